"""Irreducible representations by their laws, and the Fourier algorithm beside the planar one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common import every_group, feature_map, some_groups
from gcnn import GROUPS, Group, O, Oh, p4, p4m, p6m
from gcnn.functional import gcorr
from gcnn.irreps import fourier_matrix, irreps, irreps_of_table, multiplications
from gcnn.kernels import fourier
from gcnn.kernels.fourier import Algorithm, convolutions_are_faster, pays
from gcnn.layout import allows_tf32
from gcnn.nn import GConv, GLinear, LiftConv
from gcnn.testing import equivariance_error, exact_sizes

# the eight quaternions 1, -1, i, -i, j, -j, k, -k
QUATERNIONS = [np.array(q) for unit in np.eye(4, dtype=int).tolist() for q in (unit, [-a for a in unit])]


def quaternion_table() -> tuple[tuple[int, ...], ...]:
    def times(p: Any, q: Any) -> list[int]:
        a, b, c, d = p
        e, f, g, h = q
        real, i = a * e - b * f - c * g - d * h, a * f + b * e + c * h - d * g
        return [real, i, a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e]

    known = [q.tolist() for q in QUATERNIONS]
    return tuple(tuple(known.index(times(p, q)) for q in QUATERNIONS) for p in QUATERNIONS)


TABLES = {g.name: tuple(tuple(int(b) for b in row) for row in g.product) for g in GROUPS.values()}
TABLES["Q8"] = quaternion_table()
all_tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())


@all_tables
def test_irreps_are_orthogonal_representations(table: Any) -> None:
    for rho in irreps_of_table(table):
        m, product = rho.matrices, np.array(table)
        np.testing.assert_allclose(np.einsum("aij,bjk->abik", m, m), m[product], atol=1e-12)
        np.testing.assert_allclose(np.einsum("aij,akj->aik", m, m), np.broadcast_to(np.eye(rho.dim), m.shape), atol=1e-12)


@every_group
def test_irreps_do_not_depend_on_the_signs_of_eigenvectors(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    before, eigh = fourier_matrix(group), np.linalg.eigh

    def negative(matrix: Any) -> Any:
        values, vectors = eigh(matrix)
        return values, vectors * np.where(np.arange(len(values)) % 2, 1, -1)

    monkeypatch.setattr(np.linalg, "eigh", negative)
    irreps.cache_clear()
    after = fourier_matrix(group)
    irreps.cache_clear()
    np.testing.assert_allclose(after, before, atol=1e-9)


@all_tables
def test_irreps_obey_schur_and_are_all_there(table: Any) -> None:
    found, order = irreps_of_table(table), len(table)
    assert sum(rho.dim**2 // rho.kind for rho in found) == order
    characters = np.array([np.trace(rho.matrices, axis1=1, axis2=2) for rho in found])
    np.testing.assert_allclose(characters @ characters.T / order, np.diag([rho.kind for rho in found]), atol=1e-12)
    np.testing.assert_allclose(found[0].matrices, 1)  # the trivial one comes first
    basis = np.concatenate([rho.entries().reshape(-1, order) for rho in found])
    np.testing.assert_allclose(basis @ basis.T, np.eye(order), atol=1e-12)


@all_tables
def test_the_transform_makes_the_regular_representation_block_diagonal(table: Any) -> None:
    found, product = irreps_of_table(table), np.array(table)
    basis = np.concatenate([rho.entries().reshape(-1, len(table)) for rho in found])
    for b in range(len(table)):
        right = basis @ np.eye(len(table))[product[:, b]] @ basis.T  # x(s) -> x(s b), in the new basis
        expected = np.zeros_like(right)
        at = 0
        for rho in found:
            for _ in range(rho.dim // rho.kind):
                expected[at : at + rho.dim, at : at + rho.dim] = rho.matrices[b]
                at += rho.dim
        np.testing.assert_allclose(right, expected, atol=1e-12)


def test_types_and_dimensions_of_known_groups() -> None:
    def kinds(table: Any) -> list[tuple[int, int]]:
        return [(rho.dim, rho.kind) for rho in irreps_of_table(table)]

    assert kinds(TABLES["Q8"]) == [(1, 1)] * 4 + [(4, 4)]  # quaternionic
    assert kinds(TABLES["p4"]) == [(1, 1), (1, 1), (2, 2)]  # complex
    assert kinds(TABLES["T"]) == [(1, 1), (2, 2), (3, 1)]
    assert kinds(TABLES["Oh"]) == [(1, 1)] * 4 + [(2, 1)] * 2 + [(3, 1)] * 4


def test_irreps_are_the_same_in_every_run() -> None:
    once = irreps(p6m)
    irreps.cache_clear()
    for a, b in zip(once, irreps(p6m), strict=True):
        assert np.array_equal(a.matrices, b.matrices)
    with pytest.raises(ValueError, match="read-only"):
        once[0].matrices[0] = 2


def test_savings_are_those_of_the_theory() -> None:
    expected = {"p4": 16 / 6, "p4m": 64 / 12, "p6m": 7.2, "O": 9.0, "Oh": 18.0}
    assert {name: GROUPS[name].order ** 2 / multiplications(GROUPS[name]) for name in expected} == pytest.approx(expected)
    assert fourier_matrix(p4).shape == (4, 4)


OPTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": 3, "dilation": 2, "padding": 2},
    {"kernel_size": 4, "padding": 3},
    {"kernel_size": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@every_group
def test_both_algorithms_give_the_same_map_and_gradients(group: Group, options: dict[str, Any]) -> None:
    if group.order == 1 or (not group.fills_box and (options["kernel_size"] == 4 or "padding_mode" in options)):
        pytest.skip("one element, or no such kernel on a hexagonal lattice")
    torch.manual_seed(0)
    conv = GConv(group, 2, 4, algorithm="planar", **options).double()
    other = copy.deepcopy(conv)
    other.algorithm = "fourier"
    x, y = (feature_map(group, channels=2).double().requires_grad_() for _ in (0, 1))
    y.data.copy_(x.data)
    first, second = conv(x), other(y)
    torch.testing.assert_close(second, first, rtol=1e-11, atol=1e-11)
    grad = torch.randn_like(first)
    first.backward(grad)
    second.backward(grad)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-11, atol=1e-11)
    for a, b in zip(conv.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-11, atol=1e-11)


@every_group
def test_both_algorithms_on_images_and_cosets(group: Group) -> None:
    torch.manual_seed(0)
    for stabilizer in {group.subgroups()[-1], group.subgroups()[len(group.subgroups()) // 2]}:
        conv = GConv(group, 2, 3, 3, padding=1, stabilizer=stabilizer, algorithm="planar").double()
        x = feature_map(group, stabilizer=stabilizer)
        x = (x[:, :, 0] if conv.on_plane else x).requires_grad_()
        found = []
        for algorithm in ("planar", "fourier"):
            conv.algorithm = algorithm
            y = conv(x)
            found.append((y, *torch.autograd.grad(y.square().sum(), [x, *conv.parameters()])))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@some_groups
def test_the_fourier_algorithm_is_equivariant_in_float32(group: Group) -> None:
    torch.manual_seed(0)
    conv = GConv(group, 6, 6, 3, padding=1, algorithm="fourier") if group.order > 1 else GConv(group, 6, 6, 3, padding=1)
    assert equivariance_error(conv, group, feature_map(group, channels=6, dtype=torch.float32)) < 1e-5


@pytest.mark.parametrize(
    ("group", "channels", "size"), [(p4m, 8, 16), (p4, 16, 28), (p6m, 4, 15), (O, 2, 8), (Oh, 1, 8)], ids=str
)
def test_float32_is_as_exact_as_with_the_planar_algorithm(group: Group, channels: int, size: int) -> None:
    torch.manual_seed(0)
    conv = GConv(group, channels, channels, 3, padding=1, bias=False).double()
    x, dy = torch.randn(2, 4, channels, group.order, *(size,) * group.dim)

    def run(algorithm: Algorithm, dtype: torch.dtype) -> list[torch.Tensor]:
        conv.algorithm = algorithm
        layer, x_ = conv.to(dtype), x.to(dtype).requires_grad_()
        y = layer(x_)
        return [y.detach(), *torch.autograd.grad(y, [x_, layer.weight], dy.to(dtype))]

    exact, planar, fourier = run("planar", torch.double), run("planar", torch.float), run("fourier", torch.float)
    for e, p, f in zip(exact, planar, fourier, strict=True):
        assert (f - e).norm() < 2 * (p - e).norm() + 1e-7 * e.norm()


@pytest.mark.parametrize("kind", ["convolution", "linear"])
def test_gradients_of_gradients(kind: str) -> None:
    conv: GConv | GLinear = GConv(p4, 1, 2, 3, stride=2, padding=1, algorithm="fourier").double()
    x = torch.randn(1, 1, 4, 5, 5, dtype=torch.double, requires_grad=True)
    if kind == "linear":
        conv, x = GLinear(p4, 2, 3, algorithm="fourier").double(), torch.randn(3, 2, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(conv, x)
    assert torch.autograd.gradgradcheck(conv, x)
    dy = torch.randn_like(conv(x).detach())  # what gradgradcheck compares with itself are the gradients as they are otherwise
    again, once = (torch.autograd.grad(conv(x), (x, conv.weight), dy, create_graph=graph) for graph in (True, False))
    torch.testing.assert_close(again, once)
    weight = conv.weight.detach().clone().requires_grad_()
    function = lambda w: torch.func.functional_call(conv, {"weight": w}, (x.detach(),))  # noqa: E731
    assert torch.autograd.gradcheck(function, weight)
    assert torch.autograd.gradgradcheck(function, weight)


def test_linear_layers_are_as_precise_as_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch lets convolutions round to TF32 at first, and products not
    monkeypatch.setattr("gcnn.layout.precision_of_products", lambda: "ieee")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    asked, correlate = [], fourier._correlate

    def listening(*arguments: Any, **options: Any) -> torch.Tensor:
        asked.append(allows_tf32())
        return correlate(*arguments, **options)

    monkeypatch.setattr(fourier, "_correlate", listening)
    x = torch.randn(2, 3, 4, requires_grad=True)
    for layer, maps, tf32 in (
        (GLinear(p4, 3, 2, algorithm="fourier"), x, False),
        (GConv(p4, 3, 2, 1, algorithm="fourier"), x[..., None, None].expand(2, 3, 4, 5, 5), True),
        (GConv(p4, 3, 2, 1, algorithm="fourier"), x[..., None, None], True),  # a convolution, of one point
    ):
        layer(maps).sum().backward()
        assert asked == [tf32] * 2  # there and back
        assert allows_tf32()
        asked.clear()


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = GConv(p4m, 3, 5, 3, padding=1, algorithm="fourier").double()
    x = torch.randn(2, 3, 8, 9, 9, dtype=torch.double)
    whole = conv(x)
    monkeypatch.setattr("gcnn.kernels.fourier.BLOCK", {"cpu": 1})
    torch.testing.assert_close(conv(x), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("convolve", [False, True])
@pytest.mark.parametrize("group", [p4, p4m, p6m, O], ids=str)
def test_products_are_matrices_or_convolutions(group: Group, convolve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one or the other, as the processor is; blocks of points end anywhere."""
    torch.manual_seed(0)
    monkeypatch.setattr("gcnn.kernels.fourier.convolutions_are_faster", lambda: convolve)
    monkeypatch.setattr("gcnn.kernels.fourier.BLOCK", {"cpu": 1})
    conv = GConv(group, 8, 32, 3, padding=1, algorithm="fourier")
    exact = copy.deepcopy(conv).double()
    x = feature_map(group, channels=8, size=13 if group.dim == 2 else 7, dtype=torch.float32).requires_grad_()
    with torch.profiler.profile() as profile:
        y = conv(x)
    assert ("aten::conv2d" in {event.key for event in profile.key_averages()}) == convolve
    dy = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, [x, conv.weight], dy)
    wide = x.detach().double().requires_grad_()
    z = exact(wide)
    for a, b in zip(found, (z, *torch.autograd.grad(z, [wide, exact.weight], dy.double())), strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_auto_chooses_and_changes_nothing_but_time() -> None:
    assert pays(p4m, 64, 64, 9, 8192)
    assert pays(Oh, 16, 16, 27, 4096)
    assert not pays(p4m, 8, 8, 9, 8192)  # too few channels
    assert not pays(p4m, 64, 64, 9, 64)  # too few points
    assert pays(p4m, 128, 128, 9, 64)  # but the bank is large
    assert not pays(p4, 256, 256, 9, 64)  # of a group that saves less
    assert pays(p4m, 32, 32, 9, 8192)
    assert not pays(p4m, 32, 32, 9, 8192, convolve=True)  # where convolutions are faster than products
    assert pays(p4m, 64, 64, 9, 8192, convolve=True)
    assert convolutions_are_faster() in (False, True)
    torch.manual_seed(0)
    auto, x = GConv(p4m, 80, 80, 3, padding=1), torch.randn(4, 80, 8, 12, 12)
    planar = GConv(p4m, 80, 80, 3, padding=1, algorithm="planar")
    planar.load_state_dict(auto.state_dict())  # the algorithm is no part of the model
    with torch.profiler.profile() as profile:
        y = auto(x)
    assert "_Fourier" in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(y, planar(x), rtol=1e-4, atol=1e-5)
    compiled: Any = torch.compile(auto, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), y, rtol=1e-4, atol=1e-5)
    each = torch.func.vmap(auto)(x[:, None])
    torch.testing.assert_close(each[:, 0], y, rtol=1e-4, atol=1e-5)


def test_half_precision_inputs_are_summed_in_float32() -> None:
    conv = GConv(p4m, 8, 8, 3, padding=1, algorithm="fourier")
    x = torch.randn(2, 8, 8, 9, 9)
    y = conv.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), conv.float()(x.bfloat16().float()), rtol=2e-2, atol=2e-2)


def test_many_gradients_at_once_and_autocast() -> None:
    x = torch.randn(2, 2, 4, 6, 6, dtype=torch.double, requires_grad=True)
    grads = []
    for algorithm in ("planar", "fourier"):
        torch.manual_seed(0)
        y = GConv(p4, 2, 3, 3, algorithm=algorithm).double()(x)
        many = torch.randn(5, *y.shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
        grads.append(torch.autograd.grad(y, x, many, is_grads_batched=True)[0])
    torch.testing.assert_close(grads[1], grads[0])
    conv, z = GConv(p4, 2, 3, 3, algorithm="fourier"), torch.randn(2, 2, 4, 6, 6, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        assert conv(z).dtype == torch.float16
    y = conv(z)
    with torch.autocast("cpu", torch.float16):
        y.sum().backward()
    assert z.grad is not None
    assert z.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "smae"}, "padding must be whole numbers"),
        ({"padding": -1}, "must be at least 0"),
        ({"stride": 0}, "must be at least 1"),
        ({"bias": torch.zeros(1)}, r"expected a bias \(3,\), got \(1,\)"),
        ({"bias": torch.zeros(3).double()}, "of one floating point dtype"),
        ({"groups": 2}, r"expected filters for 2 channels in groups \(=2\), \(K_out, 1, ...\), got \(3, 2, 36\)"),
        ({"dilation": 4}, r"a kernel of \(9, 9\) cells does not fit a map of \(6, 6\)"),
    ],
    ids=str,
)
def test_what_the_planar_algorithm_refuses_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gcorr(p4, torch.randn(1, 2, 4, 6, 6), torch.randn(3, 2, 4, 3, 3), algorithm="fourier", **options)
    assert pays(p4m, 64, 64, 9, 256)
    with pytest.raises(ValueError, match="does not fit a map"):
        GConv(p4m, 64, 64, 3)(torch.randn(64, 64, 8, 2, 2))


def test_wrong_algorithms_say_so() -> None:
    with pytest.raises(ValueError, match=r'GConv\(p4, 1 -> 1\): algorithm must be "auto", "planar" or "fourier", got \'fft\''):
        GConv(p4, 1, 1, 3, algorithm="fft")  # type: ignore[arg-type]
    for layer in (LiftConv, GConv):
        assert "algorithm='fourier'" in repr(layer(p4, 1, 1, 3, algorithm="fourier"))


def test_images_are_lifted_by_either_algorithm() -> None:
    torch.manual_seed(0)
    lift = LiftConv(p4m, 3, 4, 3, padding=1, stride=2, algorithm="fourier").double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.double)
    with torch.profiler.profile() as profile:
        y = lift(x)
    assert "_Fourier" in {event.key for event in profile.key_averages()}
    lift.algorithm = "planar"
    torch.testing.assert_close(y, lift(x), rtol=1e-11, atol=1e-11)


def test_on_the_meta_device_shapes_are_those_of_any_algorithm() -> None:
    for layer, shape in (
        (GConv(p4, 2, 3, 3, algorithm="fourier"), (1, 2, 4, 9, 9)),
        (GLinear(p4, 2, 3, algorithm="fourier"), (5, 2, 4)),
    ):
        x = torch.rand(shape)
        assert layer.to("meta")(x.to("meta")).shape == layer.to_empty(device="cpu")(x).shape
    strided = nn.Sequential(GConv(p4, 1, 1, 3, stride=2, padding=1, algorithm="fourier"), nn.ReLU())
    assert exact_sizes(strided, torch.rand(1, 1, 4, 9, 9), p4) == [7, 9, 11, 13]
