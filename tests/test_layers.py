"""Every layer is equivariant to every group, over all elements; and computes what its namesake in torch.nn does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from common import ALL, every_group, feature_map, image, plane_groups, some_groups
from gcnn import GROUPS, Group, Oh, p1, p4, p4m, p6, p6m, pm
from gcnn.functional import act, coset_pool, gcorr, pool
from gcnn.lattice import domain_mask, mask_outside
from gcnn.nn import (
    CosetPool,
    GAdaptiveAvgPool,
    GAvgPool,
    GBatchNorm,
    GConv,
    GConvTranspose,
    GDepthwiseConv,
    GLayerNorm,
    GLinear,
    GMaxPool,
    GPool,
    GSubsample,
    GUpsample,
    LiftConv,
    Restrict,
)
from gcnn.nn.module import GModule
from gcnn.testing import assert_equivariant, equivariance_error


def middle_subgroup(group: Group) -> tuple[int, ...]:
    subgroups = group.subgroups()
    return subgroups[len(subgroups) // 2]


def trained(norm: Any) -> Any:
    """A norm whose numbers are not the ones it starts with."""
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 2)
    for name, b in norm.named_buffers():
        if name.startswith("running"):
            nn.init.uniform_(b, 0.5, 2)
    return norm


# name -> layer of the group, 2 channels in; all take maps of 5 cells a side, where strides of 2 fit
LAYERS: dict[str, Callable[[Group], nn.Module]] = {
    "GConv": lambda g: GConv(g, 2, 3, 3),
    "GConv, 1x1": lambda g: GConv(g, 2, 3, 1),
    "GConv, padded": lambda g: GConv(g, 2, 3, 3, padding=1),
    "GConv, same": lambda g: GConv(g, 2, 3, 3, padding="same", dilation=2),
    "GConv, stride": lambda g: GConv(g, 2, 3, 3, stride=2, padding=1),
    "GConv, groups": lambda g: GConv(g, 2, 4, 3, padding=1, groups=2, bias=False),
    "GDepthwiseConv": lambda g: GDepthwiseConv(g, 2, 4, 3, stride=2, padding=1),
    "GConvTranspose": lambda g: GConvTranspose(g, 2, 3, 3, stride=2, padding=1),
    "GConvTranspose, groups": lambda g: GConvTranspose(g, 2, 2, 3, groups=2),
    "GBatchNorm": lambda g: GBatchNorm(g, 2),
    "GBatchNorm, eval": lambda g: trained(GBatchNorm(g, 2)).eval(),
    "GLayerNorm": lambda g: trained(GLayerNorm(g, 2)),
    "GMaxPool": lambda g: GMaxPool(g, 3, stride=1, padding=1),
    "GMaxPool, stride": lambda g: GMaxPool(g, 3, stride=2, padding=1),
    "GAvgPool": lambda g: GAvgPool(g, 3, stride=1, padding=1),
    "GAvgPool, inside": lambda g: GAvgPool(g, 3, stride=1, padding=1, count_include_pad=False),
    "GAdaptiveAvgPool": lambda g: GAdaptiveAvgPool(g, 1),
    "GUpsample": lambda g: GUpsample(g, scale_factor=2, mode="nearest" if g.fills_box else "linear"),
    "GUpsample, linear": lambda g: GUpsample(g, scale_factor=3, mode="linear"),
    "CosetPool": CosetPool,
    "CosetPool, mean": lambda g: CosetPool(g, reduce="mean"),
    "GPool": lambda g: GPool(g, [(0, (0,) * g.dim), (g.order - 1, (1,) * g.dim)]),
    "GPool, mean": lambda g: GPool(g, [(0, (0,) * g.dim), (g.order // 2, (0,) * (g.dim - 1) + (-1,))], "mean"),
    "GSubsample": lambda g: GSubsample(g, 2),
}


@every_group
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_equivariant(group: Group, name: str) -> None:
    layer = LAYERS[name](group)
    x = feature_map(group)
    assert_equivariant(layer.double(), group, x, 1e-12)
    assert_equivariant(layer.float(), group, x.float(), 1e-5)
    if not group.fills_box:  # cells outside the domain stay zero
        y = layer(x.float())
        assert y.equal(mask_outside(group, y))


@pytest.mark.parametrize("group", [GROUPS["p6m"], GROUPS["p31m"], GROUPS["C6v"]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_what_lies_outside_a_hexagon_does_not_count(group: Group, name: str) -> None:
    layer = LAYERS[name](group).double()
    x = torch.randn(2, 2, group.order, *feature_map(group).shape[3:], dtype=torch.float64)  # not zero outside
    inside = mask_outside(group, x)
    assert not torch.equal(x, inside)
    cells = domain_mask(group, layer(x).shape[-group.dim :])
    torch.testing.assert_close(layer(x)[..., cells], layer(inside)[..., cells], rtol=0, atol=1e-12)


@every_group
def test_lifting_is_equivariant(group: Group) -> None:
    for options in ({}, {"padding": 1}, {"stride": 2, "padding": 1}, {"groups": 2, "bias": False}):
        layer = LiftConv(group, 2, 4, 3, **options)  # type: ignore[arg-type]
        assert_equivariant(layer.double(), group, image(group), 1e-12)
        assert_equivariant(layer.float(), group, image(group, dtype=torch.float32), 1e-5)


@every_group
def test_cosets_are_equivariant(group: Group) -> None:
    """Pooling to G/H for every subgroup H, and convolving from G/H again."""
    subgroups = group.subgroups()
    x = feature_map(group, size=3 if group.axis_classes == ((0, 1, 2),) else 5)
    for h in subgroups if group.order < 16 else subgroups[:: len(subgroups) // 8]:
        pooled = CosetPool(group, h)(x)
        if len(h) < group.order:
            assert pooled.shape[2] == group.order // len(h)
        assert_equivariant(CosetPool(group, h), group, x, 1e-12, out_stabilizer=h)
        assert_equivariant(CosetPool(group, h, "mean"), group, x, 1e-12, out_stabilizer=h)
        conv = GConv(group, 2, 2, 3, padding=1, stabilizer=h)
        assert_equivariant(conv, group, pooled.float(), 1e-5, stabilizer=h)
        assert_equivariant(conv.double(), group, pooled, 1e-12, stabilizer=h)


@every_group
def test_linear_is_equivariant(group: Group) -> None:
    layer = GLinear(group, 3, 4).double()
    x = torch.randn(2, 3, group.order, dtype=torch.float64)
    y = layer(x)
    if group.dim > 1:
        assert_equivariant(GLinear(group, 3, 4), group, x.float(), 1e-5)
    for h in range(group.order):
        moved = group.product[group.inverse[h]].tolist()  # [L_h f](s) = f(h^-1 s)
        torch.testing.assert_close(layer(x[:, :, moved]), y[:, :, moved], rtol=0, atol=1e-12)
    conv = GConv(group, 3, 4, 1).double()
    conv.load_state_dict(layer.state_dict())
    torch.testing.assert_close(conv(x.reshape(*x.shape, *(1,) * group.dim)).flatten(2), y, rtol=0, atol=1e-12)


@every_group
def test_restriction_is_equivariant_to_the_subgroup(group: Group) -> None:
    for h in {middle_subgroup(group), (0,), tuple(range(group.order))}:
        lift, restrict = LiftConv(group, 2, 3, 3), Restrict(group, h)
        net = nn.Sequential(lift, restrict, GConv(restrict.out_group, 3 * group.order // len(h), 2, 3, padding=1)).double()
        assert_equivariant(net[:2], restrict.out_group, image(group), 1e-12)
        assert_equivariant(net, restrict.out_group, image(group), 1e-12)
        assert_equivariant(net.float(), restrict.out_group, image(group, dtype=torch.float32), 1e-5)
        x = feature_map(group)
        assert sorted(restrict(x).flatten().tolist()) == sorted(x.flatten().tolist())  # nothing lost


@pytest.mark.parametrize("group", [g for g in ALL if g.order > 3], ids=str)
def test_a_named_subgroup_keeps_the_order_of_its_elements(group: Group) -> None:
    torch.manual_seed(0)
    for h in GROUPS.values():
        if h.metric != group.metric or not set(h.matrices) < set(group.matrices):
            continue
        lift, restrict, subsample = LiftConv(group, 2, 1, 3).double(), Restrict(group, h), GSubsample(group, 1, h)
        assert restrict.out_group is subsample.out_group is h
        if group.elements_of(h) != group.check_subgroup(h):
            assert_equivariant(nn.Sequential(lift, restrict), h, image(group), 1e-12)
            assert_equivariant(nn.Sequential(lift, subsample), h, image(group), 1e-12)


@every_group
def test_subsampling_is_equivariant_to_the_subgroup(group: Group) -> None:
    h = middle_subgroup(group)
    subsample = GSubsample(group, 2, h)
    net = nn.Sequential(LiftConv(group, 2, 3, 3, padding=1), subsample).double()
    assert_equivariant(net, subsample.out_group, image(group), 1e-12)
    assert net(image(group)).shape[2] == len(h)
    assert_equivariant(net.float(), subsample.out_group, image(group, dtype=torch.float32), 1e-5)


EVEN = [g for g in ALL if g.fills_box]


@pytest.mark.parametrize("group", EVEN, ids=str)
def test_even_kernels_are_equivariant(group: Group) -> None:
    x = feature_map(group, size=6)
    for n in (2, 4):
        assert_equivariant(GConv(group, 2, 2, n, padding=1).double(), group, x, 1e-12)
        assert_equivariant(LiftConv(group, 2, 2, n).double(), group, image(group, size=6), 1e-12)
    assert_equivariant(GConvTranspose(group, 2, 2, 4, stride=2, padding=1).double(), group, x, 1e-12)
    assert_equivariant(GMaxPool(group, 2), group, x, 1e-12)
    assert_equivariant(GAvgPool(group, 2), group, x, 1e-12)


@pytest.mark.parametrize("group", EVEN, ids=str)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_are_equivariant(group: Group, mode: Any) -> None:
    layer = GConv(group, 2, 2, 3, padding=1, padding_mode=mode)
    assert_equivariant(layer.double(), group, feature_map(group), 1e-12)
    assert_equivariant(layer.float(), group, feature_map(group, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("name", ["pm", "p2", "pmm", "C4v", "D2h", "D6h"])
def test_rectangular_kernels_are_equivariant(name: str) -> None:
    group = GROUPS[name]
    size = (3, 5) if group.dim == 2 else (1, 3, 3) if len(group.axis_classes) == 2 else (1, 3, 5)
    padding = tuple(n // 2 for n in size)
    assert_equivariant(GConv(group, 2, 2, size, padding=padding).double(), group, feature_map(group), 1e-12)
    assert GConv(group, 2, 2, size).filters().shape[-group.dim :] == size


def test_rectangular_images_are_equivariant() -> None:
    x = torch.randn(2, 2, 7, 10, dtype=torch.float64)
    net = nn.Sequential(LiftConv(p4m, 2, 3, 3), GBatchNorm(p4m, 3), nn.ReLU(), GConv(p4m, 3, 2, 3), CosetPool(p4m)).double()
    assert_equivariant(net, p4m, x, 1e-12)


def test_a_stride_that_does_not_divide_breaks_it() -> None:
    """DESIGN: k=3, p=1, s=2 on an even map is far off, on an odd map exact. A check that cannot fail is a defect."""
    conv = GConv(p4, 2, 2, 3, stride=2, padding=1).double()
    assert equivariance_error(conv, p4, feature_map(p4, size=8)) > 0.1
    assert equivariance_error(conv, p4, feature_map(p4, size=9)) < 1e-12


@plane_groups
def test_a_whole_network_is_equivariant(group: Group) -> None:
    net = nn.Sequential(
        LiftConv(group, 2, 4, 3, padding=1),
        GBatchNorm(group, 4),
        nn.ReLU(),
        GConv(group, 4, 4, 3, padding=1),
        nn.Sigmoid(),
        GMaxPool(group, 3, 2, 1),
        GConv(group, 4, 4, 3, padding=1),
        nn.ReLU(),
    ).double()
    assert_equivariant(net, group, image(group, size=9), 1e-11)
    assert_equivariant(nn.Sequential(*net, CosetPool(group)), group, image(group, size=9), 1e-11)
    head = nn.Sequential(*net, CosetPool(group), GAdaptiveAvgPool(group, 1), nn.Flatten(), nn.Linear(4, 3)).double()
    assert_equivariant(head, group, image(group, size=9), 1e-11)


# --- torch's own layers on (N, K, S, *X) ---------------------------------------------------------------------------------

TORCH_LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{
        f.__name__: f
        for f in (
            nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh,
            nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Softshrink,
            nn.Identity,
        )
    },
    "PReLU": lambda: trained(nn.PReLU(4)),
    "GroupNorm": lambda: trained(nn.GroupNorm(2, 4)),
    "GroupNorm, one a channel": lambda: trained(nn.GroupNorm(4, 4)),
}  # fmt: skip


@every_group
def test_torch_layers_are_equivariant_as_they_are(group: Group) -> None:
    x = feature_map(group, 4, size=3 if group.dim == 3 else 5)
    for layer in TORCH_LAYERS.values():
        assert_equivariant(layer().double(), group, x, 1e-12)


@pytest.mark.parametrize("group", [g for g in ALL if g.dim < 3], ids=str)
def test_torch_layers_for_one_axis_more_than_the_lattice(group: Group) -> None:
    """InstanceNorm and Dropout of dimension d + 1, since S is an axis too."""
    norm = (nn.InstanceNorm2d, nn.InstanceNorm3d)[group.dim - 1]
    dropout = (nn.Dropout2d, nn.Dropout3d)[group.dim - 1]
    x = feature_map(group, 4)
    assert_equivariant(trained(norm(4, affine=True)).double(), group, x, 1e-12)
    y = dropout(0.5)(torch.ones_like(x).expand(8, -1, *x.shape[2:]) if len(x) == 1 else torch.ones_like(x)).flatten(2)
    assert ((y == 0).all(2) | (y == 2).all(2)).all()  # whole maps: with the same ones dropped it commutes with L_h


def test_dropout3d_drops_whole_maps() -> None:
    x = torch.ones(8, 16, 8, 5, 5)
    y = nn.Dropout3d(0.5)(x).flatten(2)
    assert ((y == 0).all(2) | (y == 2).all(2)).all()  # with the same channels dropped, it commutes with L_h
    assert (y == 0).any()


@some_groups
def test_sums_and_concatenation_are_equivariant(group: Group) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = GConv(group, 2, 2, 3, padding=1), GConv(group, 4, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(torch.cat([x, x + self.a(x)], 1))
            return y

    assert_equivariant(Residual().double(), group, feature_map(group), 1e-12)


def test_batchnorm2d_refuses_a_map_on_the_group() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        nn.BatchNorm2d(16)(torch.randn(2, 16, 8, 5, 5))


# --- against the planar layers of torch.nn -------------------------------------------------------------------------------


def test_without_symmetry_layers_are_those_of_torch() -> None:
    x = torch.randn(2, 4, 9, 9)
    options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    ours, theirs = LiftConv(p1, 4, 6, 3, **options), nn.Conv2d(4, 6, 3, **options)
    theirs.load_state_dict({k: v.reshape(theirs.state_dict()[k].shape) for k, v in ours.state_dict().items()})
    torch.testing.assert_close(ours(x)[:, :, 0], theirs(x))
    ours_t, theirs_t = GConvTranspose(p1, 4, 6, 3, **options), nn.ConvTranspose2d(4, 6, 3, **options)
    theirs_t.load_state_dict({k: v.reshape(theirs_t.state_dict()[k].shape) for k, v in ours_t.state_dict().items()})
    torch.testing.assert_close(ours_t(x[:, :, None])[:, :, 0], theirs_t(x))
    for mode in ("reflect", "replicate", "circular"):
        ours_m, theirs_m = LiftConv(p1, 4, 6, 3, padding=1, padding_mode=mode), nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode)
        theirs_m.load_state_dict({k: v.reshape(theirs_m.state_dict()[k].shape) for k, v in ours_m.state_dict().items()})
        torch.testing.assert_close(ours_m(x)[:, :, 0], theirs_m(x))


@some_groups
def test_transposed_convolution_is_the_adjoint(group: Group) -> None:
    down = GConv(group, 3, 2, 3, stride=2, padding=1, bias=False).double()
    up = GConvTranspose(group, 2, 3, 3, stride=2, padding=1, bias=False).double()
    up.load_state_dict(down.state_dict())
    x = feature_map(group, 3)
    y = torch.randn_like(down(x))
    y = mask_outside(group, y)
    torch.testing.assert_close((down(x) * y).sum(), (x * up(y)).sum(), rtol=1e-10, atol=1e-10)


def test_initialisation_is_that_of_a_convolution_with_as_many_inputs() -> None:
    torch.manual_seed(1)
    weight = GConv(p4m, 16, 64, 3).weight
    bound = (1 / (16 * 8 * 9)) ** 0.5
    assert 0.98 * bound < weight.abs().max() <= bound
    bias = GConv(p4m, 16, 4000, 3).bias
    assert bias is not None
    assert 0.98 * bound < bias.abs().max() <= bound
    assert LiftConv(p6m, 3, 8, 3).weight.shape == (8, 3, 7)  # a hexagon has no masked parameters


@pytest.mark.parametrize("by_batch", [True, False])
@pytest.mark.parametrize("group", [p4, p4m, Oh], ids=str)
def test_norms_pass_over_rows_as_over_planes(group: Group, by_batch: bool) -> None:
    """What small maps take on GPUs, on the CPU: results, gradients and running statistics."""
    x, found = feature_map(group, channels=3), []
    norm = GBatchNorm(group, 3).double().train(by_batch)
    with torch.no_grad():
        for numbers in (*norm.parameters(), *list(norm.buffers())[:2]):
            numbers.add_(torch.rand_like(numbers))

    def by_rows(net: GBatchNorm, x: Tensor) -> Tensor:
        rows = x.movedim((2, 1), (-2, -1))  # (N, *X, S, K)
        return net._normalise_rows(rows.flatten(0, -2), by_batch).view_as(rows).movedim((-2, -1), (2, 1))

    for run in (GBatchNorm.__call__, by_rows):
        net, leaf = copy.deepcopy(norm), x.clone().requires_grad_()
        y = run(net, leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, net.weight.grad, net.bias.grad, *net.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("group", [p4m, p6m, Oh], ids=str)
def test_batch_norm_has_one_statistic_a_map(group: Group) -> None:
    x = feature_map(group, 3) * 3 + 1
    norm = GBatchNorm(group, 3, momentum=1.0).double()
    y = norm(x)
    cells = domain_mask(group, x.shape[-group.dim :])
    inside = x.flatten(-group.dim)[..., cells.flatten()].transpose(0, 1).flatten(1)  # (K, values of the domain)
    torch.testing.assert_close(norm.running_mean, inside.mean(1))
    torch.testing.assert_close(norm.running_var, inside.var(1))
    z = y.flatten(-group.dim)[..., cells.flatten()].transpose(0, 1).flatten(1)
    torch.testing.assert_close(z, (inside - inside.mean(1, True)) / (inside.var(1, False, keepdim=True) + 1e-5).sqrt())
    assert y.equal(mask_outside(group, y))
    assert [tuple(v.shape) for v in norm.state_dict().values()] == [(3,), (3,), (3,), (3,), ()]


@every_group
@pytest.mark.parametrize("channels", [1, 2])
def test_batch_norm_has_the_gradients_of_its_formula(group: Group, channels: int) -> None:
    torch.manual_seed(0)
    x = GConv(group, 2, channels, 3, padding=1).double()(feature_map(group, n=3)).detach()  # as convolutions leave it in memory
    norm, grad = trained(GBatchNorm(group, channels)).double(), torch.randn(x.shape, dtype=torch.float64)
    cells, channel = domain_mask(group, x.shape[-group.dim :]).flatten(), (-1, 1, 1)
    found = []
    for formula in (False, True):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = (leaf if formula else norm(leaf)).flatten(-group.dim)[..., cells]  # (N, K, S, cells)
        if formula:
            var, mean = torch.var_mean(y, (0, 2, 3), correction=0, keepdim=True)
            y = (y - mean) / (var + norm.eps).sqrt() * norm.weight.view(channel) + norm.bias.view(channel)
        seen = grad.flatten(-group.dim)[..., cells]
        found.append((y, *torch.autograd.grad(y, [leaf, norm.weight, norm.bias], seen)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_batch_norm_follows_torch_in_its_options() -> None:
    for options in ({"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3}):
        ours, hexagonal, theirs = (
            GBatchNorm(p4, 3, **options),
            GBatchNorm(p6, 3, **options),
            nn.BatchNorm3d(3, **options),
        )
        for step in range(3):
            x = torch.randn(4, 3, 4, 5, 5)
            torch.testing.assert_close(ours(x), theirs(x))
            single = torch.randn(4, 3, 6, 1, 1)  # a hexagon of one cell has nothing outside
            if step == 0:
                planar = nn.BatchNorm3d(3, **options)
            torch.testing.assert_close(hexagonal(single), planar(single))
        for a, b in ((ours, theirs), (hexagonal, planar)):
            for mine, other in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
                torch.testing.assert_close(mine, other)
            y = torch.randn(2, 3, a.group.order, 1, 1)
            torch.testing.assert_close(a.eval()(y), b.eval()(y))


def test_layer_norm_is_torchs_over_the_planes() -> None:
    x = torch.randn(2, 4, 8, 5, 5)
    planes = x.flatten(1, 2).movedim(1, -1)  # (N, H, W, K S)
    expected = nn.functional.layer_norm(planes, (32,)).movedim(-1, 1).unflatten(1, (4, 8))
    torch.testing.assert_close(GLayerNorm(p4m, 4)(x), expected)
    pooled = x.mean(2)
    expected = nn.functional.layer_norm(pooled.movedim(1, -1), (4,)).movedim(-1, 1)
    torch.testing.assert_close(GLayerNorm(p4m, 4)(pooled), expected)
    assert set(GLayerNorm(p4m, 4, bias=False).state_dict()) == {"weight"}
    assert not GLayerNorm(p4m, 4, elementwise_affine=False).state_dict()


def test_pools_are_torchs_on_each_plane() -> None:
    x = torch.randn(2, 3, 8, 9, 9)
    planes = x.flatten(1, 2)
    for ours, theirs in (
        (GMaxPool(p4m, 3, 2, 1), nn.MaxPool2d(3, 2, 1)),
        (GMaxPool(p4m, 2, dilation=2), nn.MaxPool2d(2, dilation=2)),
        (GAvgPool(p4m, 3, 2, 1, count_include_pad=False), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        (GAdaptiveAvgPool(p4m, 4), nn.AdaptiveAvgPool2d(4)),
        (GUpsample(p4m, scale_factor=2), nn.Upsample(scale_factor=2)),
        (GUpsample(p4m, size=17, mode="linear", align_corners=True), nn.Upsample(17, mode="bilinear", align_corners=True)),
    ):
        torch.testing.assert_close(ours(x), theirs(planes).unflatten(1, (3, 8)))
        torch.testing.assert_close(ours(x[:, :, 0]), theirs(x[:, :, 0]))  # images too


def test_hexagonal_pools_by_brute_force() -> None:
    x = mask_outside(p6m, torch.randn(1, 1, 12, 9, 9))
    neighbours = [(0, 0), (1, 0), (0, 1), (-1, 1), (-1, 0), (0, -1), (1, -1)]
    most, mean, inside = GMaxPool(p6m, 3, 1, 1)(x), GAvgPool(p6m, 3, 1, 1)(x), GAvgPool(p6m, 3, 1, 1, count_include_pad=False)(x)
    mask = domain_mask(p6m, (9, 9))
    for a, b in mask.nonzero().tolist():
        cells = [(a + i, b + j) for i, j in neighbours]
        values = torch.stack([x[0, 0, :, i, j] for i, j in cells if 0 <= i < 9 and 0 <= j < 9 and mask[i, j]])
        torch.testing.assert_close(most[0, 0, :, a, b], values.amax(0))
        torch.testing.assert_close(mean[0, 0, :, a, b], values.sum(0) / 7)
        torch.testing.assert_close(inside[0, 0, :, a, b], values.mean(0))
    torch.testing.assert_close(GAdaptiveAvgPool(p6m, 1)(x)[0, 0, :, 0, 0], x[0, 0][:, mask].mean(1))
    wide = GMaxPool(p6m, 3, 1, 1, dilation=2)(x)  # 9 + 2 - 5 + 1 = 7 cells
    centre = torch.stack([x[0, 0, :, 4 + 2 * i, 4 + 2 * j] for i, j in neighbours]).amax(0)
    torch.testing.assert_close(wide[0, 0, :, 3, 3], centre)


def test_half_precision_does_not_overflow() -> None:
    ones = torch.ones(1, 1, 6, 301, 301, dtype=torch.float16)
    torch.testing.assert_close(GAdaptiveAvgPool(p6, 1)(ones).float(), torch.ones(1, 1, 6, 1, 1), rtol=0, atol=2e-3)
    x = 400 * torch.randn(2, 4, 8, 5, 5)
    torch.testing.assert_close(GLayerNorm(p4m, 4).half()(x.half()).float(), GLayerNorm(p4m, 4)(x), rtol=0, atol=1e-2)
    y = 100 + torch.randn(8, 3, 12, 9, 9)
    close = GBatchNorm(p6m, 3)(y.bfloat16()).float() - GBatchNorm(p6m, 3)(y.bfloat16().float())
    assert close.abs().max() < 0.02


def test_coset_pooling_has_equivariant_gradients_at_ties() -> None:
    x = torch.ones(1, 1, 8, 3, 3, requires_grad=True)
    CosetPool(p4m)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / 8))


def test_subsampling_returns_a_map_of_its_own() -> None:
    x = torch.randn(1, 1, 4, 5, 5)
    kept = x.clone()
    nn.Sequential(GSubsample(p4, 2), nn.ReLU(inplace=True))(x)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("group", [p4, p6], ids=str)
def test_an_empty_batch_leaves_batch_norm_alone(group: Group) -> None:
    norm = GBatchNorm(group, 2)
    norm(torch.randn(0, 2, group.order, 5, 5))
    assert torch.isfinite(norm.running_mean).all()  # type: ignore[arg-type]
    assert GConv(group, 2, 3, 3)(torch.randn(0, 2, group.order, 5, 5)).shape == (0, 3, group.order, 3, 3)


def test_general_pooling_is_the_maximum_over_gu() -> None:
    """P f(g) = max over k in g U (section 6.3), by homogeneous matrices."""
    f = torch.randn(1, 1, 8, 5, 5)
    domain = [(0, (0, 0)), (3, (1, 0)), (5, (-1, 2))]
    most, mean = pool(p4m, f, domain), pool(p4m, f, domain, "mean")
    torch.testing.assert_close(pool(p4m, f, [*domain, domain[0]], "mean"), mean)  # a set has each element once
    for s, u, v in itertools.product(range(8), range(5), range(5)):
        g = p4m.matrix(s, (u - 2, v - 2))
        values = []
        for element in domain:
            k, t = p4m.decode(g @ p4m.matrix(*element))
            i, j = t[0] + 2, t[1] + 2
            if 0 <= i < 5 and 0 <= j < 5:
                values.append(f[0, 0, k, i, j])
        torch.testing.assert_close(most[0, 0, s, u, v], torch.stack(values).amax())
        torch.testing.assert_close(mean[0, 0, s, u, v], torch.stack(values).sum() / 3)


def test_pooling_over_a_subgroup_is_coset_pooling() -> None:
    f = feature_map(p4m)
    h = p4m.subgroup(2, 4)
    over = pool(p4m, f, [(s, (0, 0)) for s in h])
    pooled = coset_pool(p4m, f, h)
    assert torch.equal(over, pooled[:, :, p4m.cosets(h).tolist()])  # constant on cosets: invariant to the right action of H


def test_coset_pooling_over_all_rotations_gives_an_image() -> None:
    x = torch.randn(1, 2, 9, 9).double()
    net = nn.Sequential(LiftConv(p4, 2, 3, 3), CosetPool(p4)).double()
    torch.testing.assert_close(net(torch.rot90(x, 1, (-2, -1))), torch.rot90(net(x), 1, (-2, -1)))


# --- the paper's counts --------------------------------------------------------------------------------------------------


def test_parameter_counts_are_the_papers() -> None:
    """P4CNN: seven p4 layers of 10 channels, 24,680 numbers with one scale and bias a map in each norm (section 8.1)."""

    def count(net: nn.Module) -> int:
        return sum(p.numel() for p in net.parameters())

    layers: list[nn.Module] = [LiftConv(p4, 1, 10, 3), GBatchNorm(p4, 10)]
    for _ in range(5):
        layers += [GConv(p4, 10, 10, 3), GBatchNorm(p4, 10)]
    assert count(nn.Sequential(*layers, GConv(p4, 10, 10, 4))) == 24_680
    p4cnn = nn.Sequential(*layers[:4], nn.ReLU(), GMaxPool(p4, 2), *layers[4:], GConv(p4, 10, 10, 4), CosetPool(p4))
    assert p4cnn(torch.randn(2, 1, 28, 28)).shape == (2, 10, 1, 1)


def test_p4m_layers_of_the_papers_resnet_match_its_planar_ones() -> None:
    """11, 23, 45 p4m channels hold about as many numbers as 32, 64, 128 planar ones (section 8.2)."""
    for k, planar in ((11, 32), (23, 64), (45, 128)):
        ratio = GConv(p4m, k, k, 3, bias=False).weight.numel() / nn.Conv2d(planar, planar, 3, bias=False).weight.numel()
        assert 0.9 < ratio < 1.1


def test_filters_show_the_expanded_bank() -> None:
    conv = GConv(p4m, 2, 3, 3)
    assert conv.filters().shape == (3, 8, 2, 8, 3, 3)
    x = torch.randn(1, 2, 8, 5, 5)
    psi = conv.filters()[:, 0]
    torch.testing.assert_close(conv(x), gcorr(p4m, x, psi, conv.bias))
    assert torch.equal(conv.filters()[:, 3], act(p4m, 3, psi))


def test_reprs_show_the_arguments() -> None:
    assert repr(GConv(p4m, 16, 32, 3, stride=2, groups=2, bias=False)) == (
        "GConv(p4m, 16, 32, kernel_size=(3, 3), stride=(2, 2), groups=2, bias=False)"
    )
    assert repr(LiftConv(pm, 3, 8, (3, 5))) == "LiftConv(pm, 3, 8, kernel_size=(3, 5))"
    assert repr(CosetPool(p4)) == "CosetPool(p4, subgroup=None, reduce='max')"
    assert repr(GLinear(p4, 3, 4)) == "GLinear(p4, 3, 4)"
    assert repr(GBatchNorm(p4, 3)).startswith("GBatchNorm(p4, 3, eps=1e-05")


@pytest.mark.parametrize("cut", ["crop", "batch", "stride", "channels", "expand"])
def test_norms_of_maps_with_gaps_in_memory(cut: str) -> None:
    torch.manual_seed(0)
    whole = GConv(p4, 3, 4, 3, padding=1).double()(torch.randn(4, 3, 4, 8, 8, dtype=torch.double)).detach()
    cuts = {
        "crop": whole[..., 1:-1, 1:-1],
        "batch": whole[::2],
        "stride": whole[..., ::2, ::2],
        "channels": whole[:, ::2],
        "expand": whole[:1].expand(3, -1, -1, -1, -1),
    }
    x = cuts[cut]
    grad = torch.randn(x.shape, dtype=torch.double)
    found = []
    for norm in (GBatchNorm(p4, x.shape[1]).double(), nn.BatchNorm3d(x.shape[1]).double()):
        leaf = x.detach().requires_grad_()  # as it lies
        y = norm(leaf if isinstance(norm, GBatchNorm) else leaf.contiguous())
        y.backward(grad)
        found.append((y, leaf.grad, norm.weight.grad, norm.bias.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_of_norms_of_maps_with_gaps() -> None:
    norm = GBatchNorm(p4, 2).double()
    whole = torch.randn(3, 2, 4, 4, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: norm(x[..., 1:, ::2]), whole)
    assert torch.autograd.gradgradcheck(lambda x: norm(x[..., 1:, ::2]), whole)


@every_group
def test_dense_filters_can_be_taken_over(group: Group) -> None:
    torch.manual_seed(0)
    size = (3,) * group.dim
    conv, psi = GConv(group, 2, 3, 3, bias=False).double(), torch.randn(3, 2, group.order, *size, dtype=torch.float64)
    conv.load_filters(psi)
    x = feature_map(group, channels=2)
    torch.testing.assert_close(conv(x), gcorr(group, x, psi), rtol=0, atol=1e-12)
    lift, plane = LiftConv(group, 2, 3, 3, bias=False).double(), torch.randn(3, 2, *size, dtype=torch.float64)
    lift.load_filters(plane.numpy())
    torch.testing.assert_close(lift(x[:, :, 0]), gcorr(group, x[:, :, 0], plane), rtol=0, atol=1e-12)
    taken = lift.weight.clone()
    lift.load_filters(2 * plane[:, :, None])  # with GrouPy's axis of one
    assert torch.equal(lift.weight, 2 * taken)
    with pytest.raises(ValueError, match=r"GConv\(.*: expected filters \(3, 2, .*got \(3, 2, 1\)"):
        conv.load_filters(torch.zeros(3, 2, 1))


@pytest.mark.parametrize("algorithm", ["planar", "fourier"])
def test_results_may_be_changed_in_place(algorithm: Any) -> None:
    torch.manual_seed(0)
    pools = CosetPool(p4m), CosetPool(p4m, p4m.subgroup(1)), GPool(p4m, [(0, (0, 0)), (1, (0, 1))])
    for layer in (
        GConv(p4m, 2, 2, 3, padding=1, algorithm=algorithm),
        GBatchNorm(p4m, 2),
        GConvTranspose(p4m, 2, 2, 3),
        GMaxPool(p4m, 2),
        *pools,
    ):
        x, y = (torch.randn(2, 2, 8, 5, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in (0, 1))
        nn.Sequential(layer, nn.ReLU(inplace=True))(x).square().sum().backward()
        nn.Sequential(layer, nn.ReLU())(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["channels last", "a picture", "contiguous"])
def test_gradients_of_grouped_filters_for_one_image(layout: str) -> None:
    torch.manual_seed(0)
    lift = LiftConv(p4, 4, 4, 3, groups=2, dtype=torch.float64)
    x = torch.rand(5, 5, 4, dtype=torch.float64).permute(2, 0, 1)[None]
    if layout != "a picture":
        x = x.clone(memory_format=torch.channels_last if layout == "channels last" else torch.contiguous_format)
    parts = [LiftConv(p4, 2, 2, 3, bias=False, dtype=torch.float64) for _ in (0, 1)]
    for part, filters in zip(parts, lift.weight.detach().chunk(2), strict=True):
        part.load_state_dict({"weight": filters})
    torch.cat([part(half.contiguous()) for part, half in zip(parts, x.chunk(2, 1), strict=True)], 1).sin().sum().backward()
    expected = torch.cat([part.weight.grad for part in parts if part.weight.grad is not None])
    assert lift.bias is not None
    torch.nn.init.zeros_(lift.bias)
    for graph in (False, True):
        (found,) = torch.autograd.grad(lift(x).sin().sum(), lift.weight, create_graph=graph)
        torch.testing.assert_close(found, expected)


@every_group
def test_a_depthwise_layer_has_its_filters_on_the_identity_alone(group: Group) -> None:
    torch.manual_seed(0)
    apart, whole = GDepthwiseConv(group, 2, 4, 3, padding=1).double(), GConv(group, 2, 4, 3, padding=1, groups=2).double()
    taps = apart.weight.shape[2]
    with torch.no_grad():
        whole.weight.zero_()[:, :, :taps] = apart.weight
        assert apart.bias is not None
        assert whole.bias is not None
        whole.bias.copy_(apart.bias)
    for x in (feature_map(group), feature_map(group)[:1], feature_map(group)[:1].movedim(1, -1).contiguous().movedim(-1, 1)):
        x = x.detach().requires_grad_()
        y, expected = apart(x), whole(x)
        torch.testing.assert_close(y, expected)
        found = torch.autograd.grad(y.sin().sum(), (x, apart.weight, apart.bias))
        wanted = torch.autograd.grad(expected.sin().sum(), (x, whole.weight, whole.bias))
        for ours, theirs in zip(found, (wanted[0], wanted[1][:, :, :taps], wanted[2]), strict=True):
            torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"GDepthwiseConv\(.*: out_channels \(=3\) must be a multiple of in_channels \(=2\)"):
        GDepthwiseConv(group, 2, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [p4, p6])
def test_means_of_many_halves(group: Group, dtype: torch.dtype) -> None:
    turns = [(s, (0, 0)) for s in range(group.order)]
    x = torch.full((1, 1, group.order, 25, 25), 1.0 if dtype == torch.bfloat16 else 20_000.0, dtype=dtype)
    pools = GAvgPool(group, 21, 2), GAvgPool(group, 5, 2, 2, False), GAdaptiveAvgPool(group, 1)
    for layer in (*pools, GPool(group, turns, "mean")):
        torch.testing.assert_close(layer(x), layer(x.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [GLayerNorm, GBatchNorm])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_outside_a_hexagon_has_no_part_in_gradients(kind: Any, training: bool) -> None:
    norm = kind(p6, 4).train(training)
    for fibre in ((6,), ()):
        x = mask_outside(p6, torch.rand(2, 4, *fibre, 9, 9), float("nan")).requires_grad_()
        found = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight, norm.bias))
        assert all(bool(g.isfinite().all()) for g in found)


@pytest.mark.parametrize("factor", [2, 3, 32, 33, 41, 47, 97, 123])
def test_the_nearest_cell_is_the_nearest(factor: int) -> None:
    x = torch.arange(16.0).view(1, 1, 4, 2, 2)
    larger = x.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    assert torch.equal(GUpsample(p4, scale_factor=factor)(x), larger)
    assert torch.equal(GUpsample(p4, size=2 * factor)(x), larger)


def test_a_maximum_may_be_minus_infinity_where_the_map_is() -> None:
    x = torch.randn(1, 1, 4, 3, 3)
    x[0, 0, 1, 1, 1] = -torch.inf
    assert torch.equal(GPool(p4, [(0, (0, 0))])(x), x)
    beside = GPool(p4, [(0, (0, 1))])(x)  # of cells that lie outside nothing is left
    assert torch.equal(beside[0, 0, 0, :, :2], x[0, 0, 0, :, 1:])
    assert not beside[0, 0, 0, :, 2].any()


@pytest.mark.parametrize("layer", [GPool(p4, [(s, (0, 0)) for s in range(4)]), GMaxPool(p6, 3, 1, 1), CosetPool(p6)])
def test_equal_numbers_share_the_gradient_of_their_maximum(layer: Any) -> None:
    x = mask_outside(layer.group, torch.ones(1, 1, layer.group.order, 5, 5)).requires_grad_()
    found = mask_outside(layer.group, torch.autograd.grad(layer(x).sum(), x)[0])
    for h in range(layer.group.order):
        torch.testing.assert_close(act(layer.group, h, found), found)


def test_norms_without_a_bias() -> None:
    for group in (p4, p6):
        norm, x = GBatchNorm(group, 3, bias=False), torch.randn(2, 3, group.order, 5, 5)
        assert [name for name, _ in norm.named_parameters()] == ["weight"]
        for each in (x, x[:, :, 0]):
            torch.testing.assert_close(norm(each), GBatchNorm(group, 3)(each))


@pytest.mark.parametrize("group", [p4, p6])
def test_one_value_has_no_variance(group: Group) -> None:
    for x in (torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"[Oo]ne value a channel|more than 1 value per channel"):
            GBatchNorm(group, 1)(x)


@pytest.mark.parametrize("layer", [GConv(p4, 2, 4, 3), GConvTranspose(p4, 2, 4, 3), GLinear(p4, 2, 4)])
def test_weights_that_are_computed_are_computed_once_a_call(layer: nn.Module) -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(1)
            return weight

    nn.utils.parametrize.register_parametrization(layer, "weight", Counted())
    calls.clear()
    layer(torch.rand(1, 2, 4) if isinstance(layer, GLinear) else torch.rand(1, 2, 4, 5, 5))
    assert len(calls) == 1


def test_filters_are_taken_over_where_weights_are_computed() -> None:
    psi = torch.randn(3, 2, 4, 3, 3)
    normed: Any = weight_norm(GConv(p4, 2, 3, 3))
    normed.load_filters(psi)
    torch.testing.assert_close(normed.filters()[:, 0], psi)
    for parametrization in (spectral_norm, orthogonal):
        conv: Any = parametrization(GConv(p4, 2, 3, 3))
        before = conv.weight.detach().clone()
        with pytest.raises(ValueError, match="the parametrization of its weight cannot hold these filters; remove it first"):
            conv.load_filters(10 * psi)
        torch.testing.assert_close(conv.eval().weight, before, rtol=0.5, atol=0.1)  # spectral_norm draws on
    pruned: Any = prune.l1_unstructured(GConv(p4, 2, 3, 3), "weight", 0.5)
    with pytest.raises(ValueError, match=r"GConv\(p4, 2 -> 3\): its weight is computed from others .* remove that first"):
        pruned.load_filters(psi)
    prune.remove(pruned, "weight")
    pruned.load_filters(psi)
    torch.testing.assert_close(pruned.filters()[:, 0], psi)


class Symmetric(nn.Module):
    """A parametrization that holds filters which are the same backwards."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x.flip(-1)) / 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_filters_are_compared_by_their_own_size_and_digits(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    psi = scale * torch.randn(3, 2, 4, 3, 3).to(dtype)
    normed: Any = weight_norm(GConv(p4, 2, 3, 3, dtype=dtype))
    normed.load_filters(psi)
    torch.testing.assert_close(normed.filters()[:, 0], psi, rtol=0.02, atol=0)
    conv: Any = GConv(p4, 2, 3, 3, dtype=dtype)
    parametrize.register_parametrization(conv, "weight", Symmetric())
    small = psi * (1e-3 if dtype.itemsize > 2 else 1)
    with pytest.raises(ValueError, match="cannot hold these filters; remove it first"):
        conv.load_filters(small)
    conv.load_filters(small + small.flatten(2).flip(-1).view_as(small))


def test_windows_are_looked_at_only_where_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    check = GModule._check_window

    def spy(self: GModule, *args: Any) -> None:
        looked.append(self._label())
        check(self, *args)

    monkeypatch.setattr(GModule, "_check_window", spy)
    x = torch.rand(1, 2, 4, 5, 5)
    for layer in (GConv(p4, 2, 2, 3), GConv(p4, 2, 2, 3, padding=1, padding_mode="circular"), GMaxPool(p4, 2), GAvgPool(p4, 2)):
        layer(x)
    LiftConv(p4, 2, 2, 3)(x[:, :, 0])
    assert not looked
    for layer in (GConv(p4, 2, 2, 6), GMaxPool(p4, 6), GAvgPool(p4, 6)):
        with pytest.raises(ValueError, match=r"a window of \(6, 6\) cells does not fit a map of \(5, 5\)"):
            layer(x)
    assert len(looked) == 3
    GConv(p6, 2, 2, 3)(torch.rand(1, 2, 6, 5, 5))
    assert len(looked) == 4  # on a hexagonal lattice torch does not know what fits


@pytest.mark.parametrize("batch", [0, 1])
def test_a_window_fits_or_is_refused(batch: int) -> None:
    for n, k, stride, padding, dilation in itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 3), (0, 1), (1, 2)):
        fits = n + 2 * padding > dilation * (k - 1)
        x = torch.zeros(batch, 1, 4, n, n)
        layers: list[nn.Module] = [GConv(p4, 1, 1, k, stride, padding, dilation, algorithm=a) for a in ("planar", "fourier")]
        if 2 * padding <= k:
            layers.append(GMaxPool(p4, k, stride, padding, dilation))
            layers += [GAvgPool(p4, k, stride, padding)] if dilation == 1 else []
        for layer in layers:
            if fits:
                assert layer(x).shape[-1] == (n + 2 * padding - dilation * (k - 1) - 1) // stride + 1
            else:
                with pytest.raises(ValueError, match=rf"{type(layer).__name__}\(p4.*: a window of .* does not fit a map of"):
                    layer(x)


def test_subclasses_take_the_arguments_they_like() -> None:
    class Same(GConv):
        def __init__(self, channels: int) -> None:
            super().__init__(p4, channels, channels, 3, padding=1)

    assert Same(2)(torch.rand(1, 2, 4, 5, 5)).shape == (1, 2, 4, 5, 5)


def test_a_layer_without_parameters_of_its_own_can_be_moved() -> None:
    """What shards or flattens parameters takes them out of a layer, and leaves plain tensors."""
    layer: Any = GConv(p4, 1, 2, 3, bias=False)
    weight = layer._parameters.pop("weight").detach()
    layer.weight = weight
    layer.float()
    assert layer(torch.rand(1, 1, 4, 5, 5)).shape == (1, 2, 4, 3, 3)


def test_moving_a_layer_does_not_compute_its_weight() -> None:
    conv: Any = spectral_norm(GConv(p4, 3, 3, 3))
    before = conv.parametrizations.weight[0]._u.clone()
    conv.to("cpu").float().load_state_dict(conv.state_dict())
    assert torch.equal(conv.parametrizations.weight[0]._u, before)


def test_factors_of_upsampling_may_be_whole_floats() -> None:
    factors: list[Any] = [2, 2.0, (2.0, 2), [2, 2.0]]
    for factor in factors:
        assert GUpsample(p4, scale_factor=factor)(torch.rand(1, 2, 4, 4, 4)).shape[3:] == (8, 8)


@pytest.mark.parametrize(("k_in", "k_out", "groups"), [(1, 4, 1), (3, 4, 1), (8, 8, 8), (2, 1, 1)])
@pytest.mark.parametrize("algorithm", ["planar", "fourier"])
def test_gradients_have_the_strides_of_the_weights(algorithm: Any, k_in: int, k_out: int, groups: int) -> None:
    # DistributedDataParallel warns where they have not, and copies
    conv = GConv(p4, k_in, k_out, 3, groups=groups, algorithm=algorithm)
    conv(torch.rand(2, k_in, 4, 9, 9)).sum().backward()
    lift = LiftConv(p4, k_in, k_out, 3)
    lift(torch.rand(2, k_in, 9, 9)).sum().backward()
    for layer in (conv, lift):
        assert layer.weight.grad is not None
        assert layer.weight.grad.stride() == layer.weight.stride()
