"""The layers are ordinary torch modules: compile, export, autocast, copies, checkpoints, function transforms."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common import feature_map, image, some_groups
from gcnn import D3, GROUPS, Group, Oh, linem, p4, p4m, p6m
from gcnn.functional import coset_pool, gcorr, transform_filter
from gcnn.kernels import fourier, planar
from gcnn.layout import from_planes, to_planes
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


def network(group: Group) -> nn.Sequential:
    """Every layer of the library in one net, image (N, 2, 9...) to classes (N, 3)."""
    half = group.subgroups()[-2] if len(group.subgroups()) > 1 else (0,)
    restrict = Restrict(group, half)
    sub = restrict.out_group
    mode: Any = "nearest" if group.fills_box else "linear"
    return nn.Sequential(
        LiftConv(group, 2, 4, 3, padding=1),
        GBatchNorm(group, 4),
        nn.ReLU(),
        GConv(group, 4, 4, 3, padding=1, groups=2),
        GDepthwiseConv(group, 4, 4, 3, padding=1),
        GLayerNorm(group, 4),
        GMaxPool(group, 3, 2, 1),
        GSubsample(group, 2),
        GUpsample(group, scale_factor=2, mode=mode),
        GConvTranspose(group, 4, 4, 3, padding=1),
        GPool(group, [(0, (0,) * group.dim), (group.order - 1, (1,) * group.dim)]),
        GAvgPool(group, 3, 1, 1),
        CosetPool(group, half, "mean"),
        GConv(group, 4, 4, 3, padding=1, stabilizer=half) if len(half) < group.order else nn.Identity(),
        restrict,
        GSubsample(sub, 1, range(sub.order)),
        GConv(sub, 4 * group.order // len(half), 4, 1),
        GAdaptiveAvgPool(sub, 1),
        nn.Flatten(3),
        nn.Flatten(2),
        GLinear(sub, 4, 3),
        CosetPool(sub),
    )


def pair(group: Group, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Tensor]:
    return network(group).to(dtype).eval(), image(group, size=9, dtype=dtype)


@some_groups
def test_compile(group: Group) -> None:
    net, x = pair(group)
    torch._dynamo.reset()
    net = pickle.loads(pickle.dumps(net))  # whose groups have no tables cached yet
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    compiled(x).sum().backward()
    grads = {k: p.grad for k, p in net.named_parameters()}
    net.zero_grad()
    net(x).sum().backward()
    for k, p in net.named_parameters():
        torch.testing.assert_close(grads[k], p.grad, rtol=1e-3, atol=1e-4)


def test_compile_with_inductor_trains() -> None:
    net = nn.Sequential(LiftConv(p4m, 1, 4, 3), GBatchNorm(p4m, 4), nn.ReLU(), GConv(p4m, 4, 4, 3), CosetPool(p4m))
    x = torch.randn(2, 1, 9, 9)
    torch._dynamo.reset()
    compiled: Any = torch.compile(copy.deepcopy(net), fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (net, compiled)]
    for _ in range(3):
        for m, optimizer in zip((net, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-3, atol=1e-4)


def test_compiled_training_with_changing_sizes() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(LiftConv(p4, 1, 4, 3), nn.ReLU(), GConv(p4, 4, 4, 3))
    compiled = torch.compile(net, fullgraph=True)
    for n in (9, 11, 13):
        x = torch.randn(2, 1, n, n)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        compiled(x).sum().backward()


def test_compiled_gradients_of_each_image() -> None:
    net = nn.Sequential(LiftConv(p4, 1, 3, 3), nn.ReLU(), GConv(p4, 3, 3, 3), CosetPool(p4))
    x, parameters = torch.randn(4, 1, 9, 9), dict(net.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x[None],)).square().sum()

    each: Any = torch.func.vmap(torch.func.grad(loss), (None, 0))
    torch._dynamo.reset()
    found = torch.compile(each, fullgraph=True, backend="aot_eager")(parameters, x)
    for name, gradient in each(parameters, x).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "channels"),
    [
        (LiftConv(p4m, 1, 4, 3), (1,)),
        (GConv(p4, 4, 6, 3, stride=2, padding=1, groups=2), (4, 4)),
        (GConv(p4m, 2, 3, 3, padding=2, dilation=2, bias=False), (2, 8)),
        (GDepthwiseConv(p4, 2, 4, 3, padding=1), (2, 4)),
        (GConv(linem, 2, 3, 3), (2, 2)),
        (GConv(Oh, 1, 2, 3, padding=1), (1, 48)),
    ],
    ids=["lift", "groups", "dilation", "depthwise", "line", "space"],
)
def test_what_compilers_see_of_a_correlation(layer: GConv, channels: tuple[int, ...]) -> None:
    """By the checks of torch itself: the schema, and that sizes and memory formats are foretold rightly."""
    layer = copy.deepcopy(layer).double()
    x = torch.randn(2, *channels, *(7,) * layer.group.dim, dtype=torch.float64)
    y = layer(x)
    last = layer.group.dim > 1
    kernel, bias = layer.kernel_size, layer.bias
    sizes = (
        list(kernel),
        list(layer.stride),
        list(layer.padding),
        list(layer.dilation),
        layer.groups,
        layer.depthwise,
        last,
        x.dtype,
    )
    tensors = (x, layer.weight.detach(), None if bias is None else bias.detach())
    dy = torch.randn_like(to_planes(y, layer.group.dim, layer.groups))
    for algorithm in ("planar", "fourier"):
        rest = (layer.group.code, algorithm, *layer.tables, *sizes)
        tests = ("test_schema", "test_faketensor")
        assert set(torch.library.opcheck(torch.ops.gcnn.correlate, (*tensors, *rest), test_utils=tests).values()) == {"SUCCESS"}
        planes, bank = torch.ops.gcnn.correlate(*tensors, *rest)
        torch.testing.assert_close(planes, to_planes(y, layer.group.dim, layer.groups), rtol=1e-9, atol=1e-9)
        assert bank.numel() > 0
        for wanted, kept in (([True, True, bias is not None], bank), ([False, True, False], bank.new_empty(0))):
            backward = (dy, *tensors, kept, wanted, *rest)
            found = torch.library.opcheck(torch.ops.gcnn.correlate_backward, backward, test_utils=tests)
            assert set(found.values()) == {"SUCCESS"}
            expected = torch.autograd.grad(layer(x), layer.weight, from_planes(dy, layer.group.order, layer.groups))[0]
            gradient = torch.ops.gcnn.correlate_backward(*backward)[1]
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def test_compiled_layers_take_the_faster_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spied(*arguments: Any) -> Tensor:
        seen.append(arguments[0].name)
        return correlate(*arguments)

    correlate = fourier.correlate
    monkeypatch.setattr(fourier, "correlate", spied)
    torch._dynamo.reset()
    wide, narrow = GConv(p4m, 64, 64, 3, padding=1), GConv(p4m, 2, 2, 3, padding=1)
    for layer, taken in ((wide, ["p4m"]), (narrow, [])):
        x = torch.randn(2, layer.in_channels, 8, 16, 16)
        expected = layer(x)
        seen.clear()
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), expected, rtol=1e-4, atol=1e-4)
        assert seen == taken


@some_groups
def test_export(group: Group) -> None:
    net, x = pair(group)
    exported = torch.export.export(net, (x,))
    torch.testing.assert_close(exported.module()(x), net(x))


def test_export_with_any_size() -> None:
    net = nn.Sequential(LiftConv(p4, 2, 3, 3, padding=1), GMaxPool(p4, 3, 1, 1), GUpsample(p4, scale_factor=2), CosetPool(p4))
    x = torch.randn(2, 2, 9, 12)
    sizes = ({2: torch.export.Dim("h", min=4), 3: torch.export.Dim("w", min=4)},)
    exported = torch.export.export(net, (x,), dynamic_shapes=sizes)
    torch.testing.assert_close(exported.module()(x.mT.contiguous()), net(x.mT))


def test_export_with_a_batch_of_any_size() -> None:
    net, x = pair(p4)
    exported = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    more = image(p4, size=9, n=5, dtype=torch.float32)
    torch.testing.assert_close(exported.module()(more), net(more))


@some_groups
def test_autocast(group: Group) -> None:
    net, x = pair(group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
        assert net[0](x).dtype == torch.bfloat16
    assert (y.float() - net(x)).abs().max() < 0.05 * net(x).abs().max()
    net.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("group", [p4m, p6m], ids=str)
def test_float64_and_lower_precisions(group: Group) -> None:
    net, x = pair(group, torch.float64)
    assert net(x).dtype == torch.float64
    expected = net(x)
    assert (net.bfloat16()(x.bfloat16()).double() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("group", [p4m, p6m], ids=str)
def test_channels_last(group: Group) -> None:
    net, x = pair(group)
    expected = net(x)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(net(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [p4m, p6m, D3], ids=str)
def test_maps_lie_with_their_channels_last_whatever_the_image_was(group: Group) -> None:
    layers: list[nn.Module] = [
        LiftConv(group, 1, 4, 3, padding=1),
        GBatchNorm(group, 4),
        nn.ReLU(),
        GConv(group, 4, 3, 3, padding=1),
    ]
    layers += [GBatchNorm(group, 3), GMaxPool(group, 3, 1, 1), GConvTranspose(group, 3, 3, 3)]
    layers += [GAvgPool(group, 3, 1, 1)] if group.dim == 2 else []  # torch's avg_pool3d always writes channels first
    last = torch.channels_last if group.dim == 2 else torch.channels_last_3d
    for training in (True, False):
        x = torch.randn(2, 1, *(9,) * group.dim)
        for layer in layers:
            x = layer.train(training)(x)
            planes = to_planes(x, group.dim)
            assert planes.data_ptr() == x.data_ptr(), layer  # a view, not a copy
            assert planes.is_contiguous(memory_format=last), layer


@some_groups
def test_deepcopy_and_pickle(group: Group) -> None:
    net, x = pair(group)
    expected = net(x)
    clone = copy.deepcopy(net)
    torch.testing.assert_close(clone(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(pickle.loads(pickle.dumps(net))(x), expected, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), expected, rtol=0, atol=0)
    with torch.no_grad():
        next(clone.parameters()).add_(1)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


@some_groups
def test_meta_device(group: Group) -> None:
    with torch.device("meta"):
        net = network(group)
    assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))
    straight = copy.deepcopy(net).to_empty(device="cpu").eval()
    assert net.eval()(image(group, size=9, dtype=torch.float32).to("meta")).is_meta
    net = net.to_empty(device="cpu")
    for m in net.modules():
        reset: Any = getattr(m, "reset_parameters", None)
        if reset is not None:
            reset()
    real, x = pair(group)
    for made in (net, straight):
        made.load_state_dict(real.state_dict())
        torch.testing.assert_close(made(x), real(x), rtol=0, atol=0)
    skipped: Any = nn.utils.skip_init(GConv, group, 2, 2, 3)
    same = GConv(group, 2, 2, 3)
    skipped.load_state_dict(same.state_dict())
    y = feature_map(group).float()
    torch.testing.assert_close(skipped(y), same(y), rtol=0, atol=0)
    assert torch.equal(skipped.tables[0], same.tables[0])
    with torch.device("meta"):
        late = network(group).eval()
    late.load_state_dict(real.state_dict(), assign=True)  # the tables come with the weights
    torch.testing.assert_close(late(x), real(x), rtol=0, atol=0)
    assert GConv(group, 2, 2, 3, device="meta", dtype=torch.float64).weight.dtype == torch.float64


@some_groups
def test_vmap_and_grad(group: Group) -> None:
    conv = GConv(group, 2, 3, 3).double()
    params = {k: v.detach() for k, v in conv.named_parameters()}
    x = feature_map(group, n=4)

    def loss(p: dict[str, Tensor], sample: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(conv, p, (sample[None],))
        return y.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)  # gradients of each sample
    for i in range(4):
        one = torch.func.grad(loss)(params, x[i])
        for k in params:
            torch.testing.assert_close(each[k][i], one[k])
    stacked = {k: torch.stack([v, 2 * v]) for k, v in params.items()}  # two models at once
    both = torch.func.vmap(loss, in_dims=(0, None))(stacked, x[0])
    torch.testing.assert_close(both[1], 4 * both[0])


@some_groups
def test_forward_derivatives_and_hessians(group: Group) -> None:
    conv = GConv(group, 1, 1, 3, bias=False).double()
    x, weight = feature_map(group, 1, n=1, size=3), conv.weight.detach()

    def loss(w: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(conv, {"weight": w}, (x,))
        return y.square().sum()

    direction = torch.randn_like(weight)
    slope = torch.func.jvp(loss, (weight,), (direction,))[1]
    torch.testing.assert_close(slope, (torch.func.grad(loss)(weight) * direction).sum())
    bent = torch.func.jvp(torch.func.grad(loss), (weight,), (direction,))[1]
    torch.testing.assert_close((bent * direction).sum(), 2 * loss(direction))  # a quadratic form
    if group.order <= 4:
        hessian = torch.func.hessian(loss)(weight).reshape(weight.numel(), -1)
        torch.testing.assert_close(direction.flatten() @ hessian @ direction.flatten(), 2 * loss(direction))


@some_groups
def test_double_backward(group: Group) -> None:
    conv = GConv(group, 2, 2, 3).double()
    x = feature_map(group, n=1, size=3).requires_grad_()
    (dx,) = torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert conv.weight.grad is not None
    eps, direction = 1e-5, torch.randn_like(conv.weight)

    def penalty(shift: float) -> float:
        with torch.no_grad():
            conv.weight.add_(shift * direction)
        (g,) = torch.autograd.grad(conv(x).square().sum(), x)
        with torch.no_grad():
            conv.weight.sub_(shift * direction)
        return float(g.square().sum())

    numeric = (penalty(eps) - penalty(-eps)) / (2 * eps)
    assert abs(float((conv.weight.grad * direction).sum()) - numeric) < 1e-4 * abs(numeric)


# --- checkpoints ---------------------------------------------------------------------------------------------------------


@some_groups
def test_state_dict_holds_weight_and_bias_only(group: Group) -> None:
    for layer in (LiftConv(group, 2, 3, 3), GConv(group, 2, 3, 3), GConvTranspose(group, 2, 3, 3), GLinear(group, 2, 3)):
        assert list(layer.state_dict()) == ["weight", "bias"]
        assert layer.weight.ndim == 3
    for empty in (CosetPool(group), GMaxPool(group, 3), GPool(group, [(0, (0,) * group.dim)]), GSubsample(group)):
        assert not empty.state_dict()
    net = network(group)
    in_train = {k: v.clone() for k, v in net.train().state_dict().items()}
    in_eval = net.eval().state_dict()
    assert list(in_train) == list(in_eval)
    assert all(torch.equal(in_train[k], in_eval[k]) for k in in_train)
    for mode in (True, False):
        other = network(group).train(mode)
        other.load_state_dict(in_eval, strict=True)
        net.train(mode)
    x = image(group, size=9, dtype=torch.float32)
    torch.testing.assert_close(other.eval()(x), net.eval()(x), rtol=0, atol=0)


def test_averaged_and_retyped_models_keep_their_tables() -> None:
    """Tables are no buffers: a moving average of all buffers, or Module.type, would spoil them without a word."""
    conv = GConv(p4m, 2, 2, 3).eval()
    x = torch.randn(1, 2, 8, 5, 5)
    average = AveragedModel(conv, multi_avg_fn=get_ema_multi_avg_fn(0.9999), use_buffers=True)
    for _ in range(3):
        average.update_parameters(conv)
    torch.testing.assert_close(average(x), conv(x))
    torch.testing.assert_close(copy.deepcopy(conv).type(torch.float64)(x.double()).float(), conv(x))
    assert not list(conv.buffers())


def test_weights_from_elsewhere_meet_tables_of_their_own() -> None:
    """A gather with an index on the meta device returns garbage without a word: tables follow the weight that comes."""
    conv, x = LiftConv(p4, 3, 4, 3), torch.randn(1, 3, 9, 9)
    skeleton = copy.deepcopy(conv).to("meta")
    found = torch.func.functional_call(skeleton, dict(conv.named_parameters()), (x,))
    torch.testing.assert_close(found, conv(x), rtol=0, atol=0)
    normed = weight_norm(LiftConv(p4, 3, 4, 3))
    with torch.device("meta"):
        late = weight_norm(LiftConv(p4, 3, 4, 3))
    late.load_state_dict(normed.state_dict(), assign=True)
    torch.testing.assert_close(late(x), normed(x), rtol=0, atol=0)
    pruned = LiftConv(p4, 3, 4, 3)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    assert pruned.to("meta").tables[0].is_meta
    with pytest.raises(ValueError, match="transform_filter: the weight is on cpu, its tables are on meta"):
        transform_filter(p4, conv.weight, (3, 3), range(4), skeleton.tables[:2])
    assert len(pickle.dumps(conv)) < len(pickle.dumps(conv.state_dict())) + 4000


def test_traces_can_be_saved() -> None:
    net, x = pair(p4m)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and traces warn of every python number
        torch.jit.save(torch.jit.trace(net, x), file)
        file.seek(0)
        torch.testing.assert_close(torch.jit.load(file)(x), net(x))


def test_checkpoints_are_small() -> None:
    conv = GConv(GROUPS["Oh"], 16, 16, 3)
    file = io.BytesIO()
    torch.save(conv.state_dict(), file)
    assert file.tell() < 1.01 * 4 * (conv.weight.numel() + 16) + 4096


def changes(net: nn.Module, x: Tensor, change: Callable[[], Any]) -> None:
    before = net(x).detach()
    change()
    assert not torch.equal(net(x), before)


def test_weights_changed_in_eval_show_in_the_next_call() -> None:
    net, x = pair(p4m)
    conv: Any = net[3]
    torch.testing.assert_close(net(x), net(x), rtol=0, atol=0)
    with torch.no_grad():
        changes(net, x, lambda: conv.weight.mul_(0.9))  # an exponential moving average
    changes(net, x, lambda: prune.l1_unstructured(conv, "weight", amount=0.5))
    prune.remove(conv, "weight")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).sum().backward()  # fine-tuning in eval mode
    changes(net, x, optimizer.step)
    changes(net, x, lambda: net.load_state_dict(network(p4m).state_dict()))


def test_models_share_nothing() -> None:
    a, x = pair(p4m)
    b, _ = pair(p4m)
    expected = b(x)
    a.double()
    assert a(x.double()).dtype == torch.float64
    assert b(x).dtype == torch.float32
    torch.testing.assert_close(b(x), expected, rtol=0, atol=0)
    with torch.inference_mode():
        GConv(p4m, 2, 2, 5)(torch.randn(1, 2, 8, 9, 9))
    GConv(p4m, 2, 2, 5)(torch.randn(1, 2, 8, 9, 9)).sum().backward()  # tables made under inference_mode do not leak


def test_functions_compile() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3, 8, 9, 9)
    compiled = torch.compile(lambda t: coset_pool(p4m, t.relu()), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), coset_pool(p4m, x.relu()))
    assert gcorr(p4m, x, torch.randn(2, 3, 8, 3, 3)).shape == (2, 2, 8, 7, 7)


@pytest.mark.parametrize("group", [p4, p6m, linem], ids=str)
@pytest.mark.parametrize("algorithm", ["planar", "fourier"])
def test_a_layer_that_is_called_twice_has_its_gradient_with_a_graph_too(group: Group, algorithm: Any) -> None:
    conv = GConv(group, 2, 2, 3, padding=1, dtype=torch.float64, algorithm=algorithm)
    x, parameters = feature_map(group, channels=2, size=5), list(conv.parameters())

    def loss() -> Tensor:
        found: Tensor = conv(conv(x)).square().sum()
        return found

    for plain, graphed in zip(
        torch.autograd.grad(loss(), parameters), torch.autograd.grad(loss(), parameters, create_graph=True), strict=True
    ):
        torch.testing.assert_close(graphed.detach(), plain, rtol=1e-10, atol=1e-10)
    y = conv(conv(x))
    several = torch.randn(3, *y.shape, dtype=y.dtype)
    (batched,) = torch.autograd.grad(y, conv.weight, several, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, conv.weight, one, retain_graph=True)[0] for one in several]
    torch.testing.assert_close(batched, torch.stack(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gone", [(), ("num_batches_tracked",), ("running_mean", "running_var", "num_batches_tracked")])
def test_norms_whose_statistics_were_taken_away_do_as_torchs(gone: tuple[str, ...], training: bool) -> None:
    ours, theirs = GBatchNorm(p4, 2), nn.BatchNorm3d(2)
    x = torch.randn(3, 2, 4, 5, 5)
    for norm in (ours, theirs):
        assert norm.running_mean is not None
        norm.running_mean.fill_(3.0)
        norm.train(training)
        for name in gone:
            setattr(norm, name, None)
        if not gone:
            norm.track_running_stats = False
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as the only one of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("group", "n"), [(p4, 5), (p4, 2), (linem, 3), (p6m, 4), (Oh, 4)], ids=str)
def test_statistics_over_processes_of_functions_on_the_group(alone: None, group: Group, n: int) -> None:
    one, other = GBatchNorm(group, 3), GBatchNorm(group, 3)
    one.sync = True
    for x in (torch.rand(n, 3, group.order), feature_map(group, 3, n=n, dtype=torch.float32)):
        torch.testing.assert_close(one(x), other(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.running_var, other.running_var, rtol=1e-5, atol=1e-6)


def test_a_norm_over_processes_works_in_one() -> None:
    norm = GBatchNorm(p4, 3)
    x, norm.sync = torch.rand(2, 3, 4, 5, 5), True
    torch.testing.assert_close(norm(x), GBatchNorm(p4, 3)(x))


def test_norms_refuse_other_numbers_than_their_own() -> None:
    with pytest.raises(ValueError, match=r"GBatchNorm\(p4, 3\): expected floating point numbers, got torch.int64"):
        GBatchNorm(p4, 3)(torch.ones(2, 3, 4, 5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"GLayerNorm\(p4, 3\): expected floating point numbers"):
        GLayerNorm(p4, 3)(torch.ones(2, 3, 4, 5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"of its own dtype torch.float32, got torch.float64"):
        GBatchNorm(p4, 3)(torch.ones(2, 3, 4, 5, 5, dtype=torch.float64))
    assert GBatchNorm(p4, 3)(torch.rand(2, 3, 4, 5, 5).bfloat16()).dtype == torch.bfloat16  # as under autocast


def test_threads_leave_the_choice_of_cudnn_as_it_was() -> None:
    before = torch.backends.cudnn.deterministic
    with planar._DETERMINISTIC:
        with planar._DETERMINISTIC:
            assert torch.backends.cudnn.deterministic
        assert torch.backends.cudnn.deterministic  # the other one is not done
    assert torch.backends.cudnn.deterministic == before
    conv, x = GConv(p4, 4, 4, 3, padding=1), torch.rand(2, 4, 4, 9, 9)
    threads = [threading.Thread(target=lambda: [conv(x).sum().backward() for _ in range(50)]) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.backends.cudnn.deterministic == before


@pytest.mark.parametrize("kept", [[0, 2], [0, 1, 1, 2, 3]])
def test_filters_may_be_taken_away_or_added(kept: list[int]) -> None:
    conv, x = GConv(p4m, 2, 4, 3, padding=1), torch.rand(2, 2, 8, 5, 5)
    assert conv.bias is not None
    y = torch.func.functional_call(conv, {"weight": conv.weight[kept], "bias": conv.bias[kept]}, (x,))
    torch.testing.assert_close(y, conv(x)[:, kept])
    whole = conv(x)[:, kept].detach()
    conv.weight, conv.bias = nn.Parameter(conv.weight[kept].detach()), nn.Parameter(conv.bias[kept].detach())
    torch.testing.assert_close(conv(x), whole)


def test_filters_may_be_a_buffer() -> None:
    conv = GConv(p4, 2, 3, 3, bias=False)
    filters = conv.weight.detach().clone()
    del conv.weight
    conv.register_buffer("weight", filters)
    x = torch.randn(1, 2, 4, 5, 5)
    torch.testing.assert_close(copy.deepcopy(conv)(x), conv(x))


def test_bytes_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"LiftConv\(p4, 1 -> 2\): expected floating point numbers, got torch.uint8; use x.float"
    ):
        LiftConv(p4, 1, 2, 3)(torch.zeros(1, 1, 5, 5, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"expected floating point numbers, got torch.int64"):
        GLinear(p4, 1, 2)(torch.zeros(1, 1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected floating point numbers, got torch.int64"):
        GPool(p4, [(0, (0, 0))])(torch.zeros(1, 1, 4, 3, 3, dtype=torch.int64))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_statistics_do_not_follow_the_default_dtype(default: torch.dtype) -> None:
    x = (torch.randn(4, 3, 4, 8, 8, dtype=torch.float64) + 5).bfloat16()
    norm = GBatchNorm(p4, 3, momentum=1.0, dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        norm(x)
    finally:
        torch.set_default_dtype(before)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, x.double().mean((0, 2, 3, 4)).float())
