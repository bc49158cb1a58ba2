"""Ordinary networks made equivariant: the same size, the symmetry, and, started from their weights, the mean over the group."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from common import image
from gcnn import GROUPS, Group, Oh, convert, linem, p4, p4m, p6, p6m
from gcnn.export import planar
from gcnn.functional import act
from gcnn.lattice import domain_mask
from gcnn.nn import GConv, GLinear, LiftConv
from gcnn.nn.each import EachElement, PadBoth, ReduceSpace, VarianceInside
from gcnn.testing import equivariance_error, explain
from ordinary import NETWORKS, Branching, SmallResNet, drawn

all_networks = pytest.mark.parametrize("name", NETWORKS)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@all_networks
def test_converted_networks_keep_their_size_and_get_the_symmetry(name: str) -> None:
    net, x, symmetry = drawn(name)
    group = GROUPS[symmetry]
    made = convert(net.train(), group)
    assert made.training
    assert abs(count(made) / count(net) - 1) < 0.1
    y = made(x)
    assert y.shape == net(x).shape
    y.square().sum().backward()
    assert [n for n, p in made.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    made.eval()
    assert equivariance_error(made, group, x) < 1e-4
    assert equivariance_error(net.eval(), group, x) > 1e-2  # the law is not empty


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("resnet50", "densenet121")])
def test_started_from_its_weights_it_is_the_mean_over_the_group(name: str) -> None:
    net, x, _ = drawn(name)
    group: Group = {"volumes": Oh, "signals": linem}.get(name, p4m)
    made = convert(net, group, keep="channels", weights=True)
    total: Any = 0
    with torch.no_grad():
        for h in range(group.order):
            y = net(act(group, h, x))
            total = total + (act(group, group.inverse[h], y) if y.ndim > 2 else y)
        torch.testing.assert_close(made(x), total / group.order, rtol=1e-5, atol=1e-5 * float(total.abs().max()))
    assert net.training is False


def test_widths_follow_the_rule() -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 10, 3))
    keeps: tuple[Any, ...] = ("params", "channels", "cost")
    widths: dict[str, Any] = {keep: convert(net, p4m, keep).get_submodule("0").out_channels for keep in keeps}
    assert (widths["channels"], widths["cost"]) == (64, 8)
    assert 20 <= widths["params"] <= 24
    assert convert(net, p4m).get_submodule("4").out_channels == 10  # the head's classes stay


def test_names_devices_and_dtypes_stay() -> None:
    net = SmallResNet().double()
    made = convert(net, p4)
    assert isinstance(made.get_submodule("conv"), LiftConv)
    assert isinstance(made.get_submodule("layer1.conv1"), GConv)
    assert {p.dtype for p in made.parameters()} == {torch.float64}
    assert set(dict(made.named_parameters())) == set(dict(net.named_parameters()))
    twice = copy.deepcopy(made).eval()
    twice.load_state_dict(made.state_dict())
    x = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(twice(x), made.eval()(x))


def test_the_result_can_stay_on_the_group() -> None:
    net, x, _ = drawn("vgg")
    made = convert(net, p4m, pool=None).eval()
    assert isinstance(made.get_submodule("classifier.6"), GLinear)
    assert made(x).shape == (2, 10, 8)
    assert equivariance_error(made, p4m, x) < 1e-4


def test_converted_networks_are_explained_layer_by_layer() -> None:
    net, x, symmetry = drawn("small resnet")
    made = convert(net, GROUPS[symmetry], example=x)
    assert explain(made, x, GROUPS[symmetry]).exact
    with pytest.raises(ValueError, match=r"(?s)convert: at this size the result is not equivariant.*stride"):
        convert(net, GROUPS[symmetry], example=torch.randn(1, 3, 16, 16))


def test_what_cannot_be_traced_has_its_modules_replaced() -> None:
    torch.manual_seed(0)
    net, x = Branching(), torch.randn(2, 3, 9, 9)
    with pytest.raises(ValueError, match=r"torch.fx cannot trace Branching.*Give an example image"):
        convert(net, p4)
    made = convert(net, p4, example=x)
    assert isinstance(made, Branching)
    assert equivariance_error(made.eval(), p4, x) < 1e-4
    assert type(net.conv1) is nn.Conv2d  # the user's network is as it was
    mean = convert(net.eval(), p4m, keep="channels", weights=True, example=x)
    expected = torch.stack([net(act(p4m, h, x)) for h in range(8)]).mean(0)
    torch.testing.assert_close(mean(x), expected, rtol=1e-5, atol=1e-5)


def test_replaced_modules_keep_the_size_too() -> None:
    torch.manual_seed(0)
    net, x = Branching(width=32, num_classes=1000), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, example=x)
    assert abs(count(made) / count(net) - 1) < 0.1
    assert equivariance_error(made.eval(), p4m, x) < 1e-4
    assert count(convert(net, p4m, keep="channels", example=x)) > 2 * count(net)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv2d(3, 8, 3), nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(self.conv(x))


class HardReshape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).reshape(-1, 4, 2, 7, 7)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


class CustomAutograd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(self.conv(x))


class LooksFirst(CustomAutograd):
    """Not traced as far as its Function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) < 1e9 else -x)


class OnlyInTraining(CustomAutograd):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) < 1e9 and self.training:
            return super().forward(x)
        return self.conv(x)


@pytest.mark.parametrize("make", [CustomAutograd, LooksFirst, OnlyInTraining])
def test_gradients_of_their_own_are_refused_with_an_example_too(make: Any) -> None:
    net = nn.Sequential(make(), nn.ReLU(), nn.Conv2d(8, 2, 1))
    words = r"convert: 0 \(\w+, test_convert\.py:\d+\) calls Own, a torch\.autograd\.Function.*; write it with functions of torch"
    with pytest.raises(ValueError, match=words):
        convert(net, p4, example=torch.rand(1, 3, 9, 9))


def test_an_example_on_which_the_network_fails() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 49, 4))
    convert(net, p4, example=torch.rand(1, 3, 9, 9))
    with pytest.raises(ValueError, match=r"convert: the network fails on the example \(1, 3, 28, 28\): mat1 and mat2 shapes"):
        convert(net, p4, example=torch.rand(1, 3, 28, 28))


class OverOneAxis(HardReshape):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)).mean(2)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Recurrent(), r"rnn \(LSTM\) cannot be made equivariant on a map"),
        (HardReshape(), r"reshape to a shape of its own, cannot be made equivariant"),
        (CustomAutograd(), r"convert: CustomAutograd \(test_convert\.py:\d+\) calls Own, a torch\.autograd\.Function"),
        (OverOneAxis(), r"mean over axes 2.*take it over all 2 axes of space"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()), r"flattened and no linear layer follows"),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 1)), r"0, a flatten, cannot"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2, ceil_mode=True)), r"leave out ceil_mode"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2)), r"1 \(MultiheadAttention\) cannot"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, (3, 5))), r"1 \(Conv2d.*kernel_size"),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 3, 2, output_padding=1)),
            r"1 \(ConvTranspose2d.*output_padding",
        ),
        (nn.Linear(3, 4), r"Linear has no convolution"),
        (nn.Conv3d(3, 4, 3), r"has Conv3d, p4 has dimension 2"),
        (nn.Sequential(LiftConv(p4, 3, 4, 3), nn.Conv2d(3, 4, 3)), r"has layers on a group already"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_converted_is_named(net: nn.Module, words: str) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        convert(net, p4)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": "all"}, 'keep must be "params"'),
        ({"pool": "sum"}, 'pool must be "mean"'),
        ({"weights": True}, 'needs all of the channels, keep="channels"'),
        ({"example": torch.zeros(3, 9, 9)}, "expected an example image with 4 axes"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(SmallResNet(), p4, **options)


def test_other_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"expected an nn.Module, got int; weights alone go"):
        convert(3, p4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected the network first, convert\(net, p4\), got the group"):
        convert(p4, SmallResNet())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"convert: expected a Group, such as gcnn\.GROUPS\[.p4.\], got"):
        convert(SmallResNet(), "p4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit the hexagonal lattice"):
        convert(nn.Conv2d(3, 4, 3), p6, keep="channels", weights=True)


def test_hexagonal_lattices_can_be_converted_to() -> None:
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))
    assert equivariance_error(convert(net, p6).eval(), p6, image(p6, channels=1, dtype=torch.float32)) < 1e-4


# --- what users do between layers ----------------------------------------------------------------------------------------------


class Written(nn.Module):
    """A network whose forward is given."""

    def __init__(self, how: Any, **parts: Any) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


class WrittenForTwo(Written):
    def forward(self, x: Tensor, m: Tensor) -> Any:  # type: ignore[override]
        return self.how(self, x, m)


class WrittenForOneOrTwo(Written):
    def forward(self, x: Tensor, m: Any = None) -> Any:
        return self.how(self, x, m)


def conv(k_in: int, k: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(k_in, k, size, padding=size // 2, **options)


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return a * torch.sigmoid(b)


def one(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1)


def own_size(net: Any, x: Tensor) -> Tensor:
    y = net.c(x)
    found: Tensor = net.f(F.avg_pool2d(y, y.size()[2:]).flatten(1))
    return found


def both_sizes(net: Any, x: Tensor) -> Tensor:
    y = net.c(x)
    found: Tensor = net.f(F.avg_pool2d(y, (y.size(2), y.shape[3])).view(y.size(0), -1))
    return found


def in_place(net: Any, x: Tensor) -> Tensor:
    y = net.c(x)
    kept = y
    y += net.e(F.relu(y))
    found: Tensor = net.d(torch.cat([kept, y], 1))
    return found


def in_bfloat16(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = net.c(x)
    return y


def in_float32(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y: Tensor = net.c(x)
    return y


def shared() -> nn.Module:
    first, second = conv(8, 8), conv(8, 8)
    second.weight = first.weight
    return nn.Sequential(conv(3, 8), first, nn.ReLU(), second)


class ChannelsFirstNorm(nn.Module):
    """As ConvNeXt's own code writes it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.rand(k)), nn.Parameter(torch.rand(k)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class SpatialAttention(nn.Module):
    """As CBAM's code writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        largest, _ = torch.max(x, dim=1, keepdim=True)
        return torch.sigmoid(self.conv(torch.cat([x.mean(1, keepdim=True), largest], 1))) * x


def excited(net: Any, x: Tensor) -> Tensor:
    x = net.c(x)
    gates = torch.sigmoid(net.b(F.relu(net.a(x.mean((2, 3))))))
    return x * gates.view(x.size(0), 8, 1, 1).expand_as(x)


def mixed(net: Any, x: Tensor) -> Any:
    x = net.c(x)
    gates = torch.softmax(net.g(x.mean((2, 3))), 1)
    return net.d(sum(gates[:, i : i + 1, None, None] * expert(x) for i, expert in enumerate((net.e, net.f))))


def beside_itself(net: Any, x: Tensor) -> Any:
    x = x - net.mean
    return net.d(torch.cat([F.relu(net.c(x)), x], 1))


GOOD: dict[str, nn.Module] = {
    "squeeze and excite at the end": Written(excited, c=conv(3, 8), a=nn.Linear(8, 2), b=nn.Linear(2, 8)),
    "experts and their gates": Written(mixed, c=conv(3, 8), g=nn.Linear(8, 2), e=conv(8, 8), f=conv(8, 8), d=conv(8, 2)),
    "one of the answers": Written(lambda s, x: s.f(F.relu(s.c(x)).mean((2, 3)))[:, 1], c=conv(3, 8), f=nn.Linear(8, 3)),
    "an image without means beside its map": Written(
        beside_itself, c=conv(3, 8), d=conv(11, 2), mean=nn.Parameter(torch.rand(3, 1, 1), requires_grad=False)
    ),
    "an image is added on the way": Written(lambda s, x: s.d(x + s.c(x)), c=conv(3, 3), d=conv(3, 8)),
    "a number a channel": Written(
        lambda s, x: s.d(s.c(x) * s.g), c=conv(3, 8), d=conv(8, 2), g=nn.Parameter(torch.randn(1, 8, 1, 1))
    ),
    "one number": Written(lambda s, x: s.d(s.c(x) * s.g / 3), c=conv(3, 8), d=conv(8, 2), g=nn.Parameter(torch.randn(1))),
    "a number a channel of the image": Written(lambda s, x: s.c(x - s.m), c=conv(3, 8), m=nn.Parameter(torch.randn(3, 1, 1))),
    "attention before what it weighs": Written(
        lambda s, x: s.d(torch.sigmoid(s.a(s.c(x))) * s.c(x)), c=conv(3, 8), a=conv(8, 1, 1), d=conv(8, 2)
    ),
    "squeeze and excite by linear maps": Written(
        lambda s, x: s.d(s.c(x) * s.e(F.relu(s.f(s.p(s.c(x)).view(2, 8)))).view(2, 8, 1, 1).expand_as(s.c(x))),
        c=conv(3, 8),
        d=conv(8, 2),
        p=nn.AdaptiveAvgPool2d(1),
        f=nn.Linear(8, 4),
        e=nn.Linear(4, 8),
    ),
    "fully convolutional": nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "a maximum over space": nn.Sequential(conv(3, 8), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    "channels last at the end": Written(lambda s, x: last(s.c(x)), c=conv(3, 8)),
    "a depthwise layer at the end": nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8, groups=8)),
    "an argument that is not given": WrittenForOneOrTwo(lambda s, x, m: s.c(x) if m is None else s.c(x) * m, c=conv(3, 8)),
    "a parameter as a result": Written(lambda s, x: (s.c(x), s.t)[0], c=conv(3, 8), t=nn.Parameter(torch.ones(1))),
    "a dropout that never sleeps": Written(lambda s, x: F.dropout(s.c(x), 0.0, training=True), c=conv(3, 8)),
    "a norm without parameters": nn.Sequential(conv(3, 8), nn.BatchNorm2d(8, affine=False), conv(8, 2)),
    "softmax over channels": Written(lambda s, x: F.softmax(s.c(x), 1), c=conv(3, 8)),
    "log_softmax by name": Written(lambda s, x: s.c(x).log_softmax(dim=-3), c=conv(3, 8)),
    "softmax in a layer": nn.Sequential(conv(3, 8), nn.Softmax(1), conv(8, 2), nn.Softmax2d()),
    "zeros around": Written(lambda s, x: s.d(F.pad(F.relu(s.c(F.pad(x, (1, 1, 1, 1)))), [2] * 4)), c=conv(3, 8), d=conv(8, 2)),
    "layers that pad": nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3), nn.ZeroPad2d(1), nn.Conv2d(8, 2, 3)),
    "other ways to pad": nn.Sequential(
        conv(3, 8), nn.ReplicationPad2d(2), nn.CircularPad2d(1), nn.ConstantPad2d(1, 0.5), nn.Conv2d(8, 2, 9)
    ),
    "pads that are known when it runs": Written(
        lambda s, x: s.d(F.pad(s.c(x), [x.size(3) - s.c(x).size(3)] * 4)), c=nn.Conv2d(3, 8, 3), d=conv(8, 2, 5)
    ),
    "halves": Written(lambda s, x: s.d(gated(s.c(x))), c=conv(3, 10), d=conv(5, 2)),
    "parts of parts": Written(lambda s, x: s.d(s.c(x).chunk(2, 1)[0].chunk(2, 1)[1]), c=conv(3, 8), d=conv(2, 2)),
    "one third after the other": Written(
        lambda s, x: s.d(torch.cat([part * part for part in s.c(x).chunk(3, dim=1)], 1)), c=conv(3, 12), d=conv(12, 2)
    ),
    "thirds by size": Written(lambda s, x: s.d(torch.split(s.c(x), 3, dim=1)[2]), c=conv(3, 9), d=conv(3, 2)),
    "unequal parts": Written(lambda s, x: s.d(s.c(x).split([2, 6], dim=1)[1]), c=conv(3, 8), d=conv(6, 2)),
    "some channels": Written(
        lambda s, x: s.d(s.c(x)[:, 2:]) + s.e(s.c(x)[:, :4, :, :]), c=conv(3, 8), d=conv(6, 2), e=conv(4, 2)
    ),
    "parts of an image": Written(lambda s, x: s.c(x[:, :2]) + s.d(x) + s.e(x[:, 2:]), c=conv(2, 4), d=conv(3, 4), e=conv(1, 4)),
    "an image beside a map": Written(lambda s, x: s.d(torch.cat([x, s.c(x)], 1)), c=conv(3, 8), d=conv(11, 2)),
    "a small image beside a map": Written(
        lambda s, x: s.d(torch.cat([s.c(x), F.avg_pool2d(x, 3)], 1)), c=nn.Conv2d(3, 8, 3, 3), d=conv(11, 2)
    ),
    "a scale of each layer": Written(
        lambda s, x: s.d(s.c(x) * s.g.reshape(1, -1, 1, 1) + s.b[:, None, None]),
        c=conv(3, 8),
        d=conv(8, 2),
        g=nn.Parameter(torch.randn(8)),
        b=nn.Parameter(torch.randn(8)),
    ),
    "it asks how many axes": Written(
        lambda s, x: (torch._assert(s.c(x).dim() == 4, "four"), s.d(s.c(x)))[1], c=conv(3, 8), d=conv(8, 2)
    ),
    "a number made on the way": Written(
        lambda s, x: s.d(torch.tensor(0.5) * s.c(x * torch.tensor(2.0))), c=conv(3, 8), d=conv(8, 2)
    ),
    "an image that is normalised": Written(
        lambda s, x: s.c((x - torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)) / torch.tensor([[[0.2]], [[0.3]], [[0.1]]])),
        c=conv(3, 8),
    ),
    "numbers on the device of the image": Written(
        lambda s, x: s.c(x - torch.tensor([0.1, 0.2, 0.3], device=x.device).view(3, 1, 1)), c=conv(3, 8)
    ),
    "normalised by numbers in the dtype of the image": Written(
        lambda s, x: s.c(
            (x - torch.tensor([0.4, 0.5, 0.6], dtype=x.dtype, device=x.device).view(1, 3, 1, 1))
            / torch.as_tensor([0.2, 0.3, 0.1], dtype=x.dtype)[None, :, None, None]
        ),
        c=conv(3, 8),
    ),
    "numbers of the image's dtype, in other ways": Written(
        lambda s, x: s.c(
            torch.tensor([3, 2, 1], dtype=x.dtype).reshape(-1, 1, 1)
            - (x - x.new_tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)) * torch.tensor([0.2, 0.3, 0.1]).type_as(x)[:, None, None]
        ),
        c=conv(3, 8),
    ),
    "one number of the image's dtype": Written(
        lambda s, x: s.c((x - torch.tensor(0.4, dtype=x.dtype)) / torch.tensor([0.2], dtype=x.dtype).view(1, 1, 1, 1) - 0.5),
        c=conv(3, 8),
    ),
    "the same number for every channel": Written(
        lambda s, x: s.d(s.c(x) * torch.full((1, 8, 1, 1), 0.3)), c=conv(3, 8), d=conv(8, 2)
    ),
    "squeezed axis by axis": Written(lambda s, x: s.f(one(s.c(x)).squeeze(-1).squeeze(-1)), c=conv(3, 8), f=nn.Linear(8, 3)),
    "squeezed": Written(lambda s, x: s.f(F.relu(torch.squeeze(one(s.c(x))))), c=conv(3, 8), f=nn.Linear(8, 3)),
    "squeezed after a layer": Written(lambda s, x: s.d(one(s.c(x))).squeeze(3).squeeze(2), c=conv(3, 8), d=conv(8, 3, 1)),
    "divided by lengths": Written(
        lambda s, x: s.d(s.c(x) / (s.c(x).norm(dim=1, keepdim=True) + torch.norm(s.c(x), 1, (1,), True))),
        c=conv(3, 8),
        d=conv(8, 2),
    ),
    "squeezed axes at once": Written(
        lambda s, x: s.f(s.c(x).mean((2, 3), True).squeeze((2, 3))), c=conv(3, 8), f=nn.Linear(8, 3)
    ),
    "the only place": Written(
        lambda s, x: s.f(one(s.c(x))[:, :, 0, 0]) + s.f(one(s.c(x))[..., 0, 0]), c=conv(3, 8), f=nn.Linear(8, 3)
    ),
    "flattened space and its mean": Written(
        lambda s, x: s.f(F.relu(s.c(x).flatten(2)).mean(2)) + s.f(torch.flatten(s.c(x), 2).mean(-1)),
        c=conv(3, 8),
        f=nn.Linear(8, 3),
    ),
    "flattened space and its largest": Written(
        lambda s, x: s.f(s.c(x).view(x.size(0), 8, -1).max(dim=2)[0]) + s.f(s.c(x).flatten(2).max(-1).values),
        c=conv(3, 8),
        f=nn.Linear(8, 3),
    ),
    "vectors of length 1": Written(
        lambda s, x: s.f(F.normalize(one(s.c(x)).flatten(1), dim=1)) + s.f(F.normalize(s.c(x)).mean((2, 3))),
        c=conv(3, 8),
        f=nn.Linear(8, 3),
    ),
    "heads side by side": Written(
        lambda s, x: torch.stack([s.f(s.c(x).mean((2, 3))), s.f(s.c(x).amax((2, 3)))], 1).sum(1), c=conv(3, 8), f=nn.Linear(8, 3)
    ),
    "a norm of vectors by hand": Written(
        lambda s, x: s.f(s.c(x).mean((2, 3)) / (s.c(x).amax((2, 3)).std(1, keepdim=True) + 0.1)), c=conv(3, 8), f=nn.Linear(8, 3)
    ),
    "squeeze and excite by axes": Written(
        lambda s, x: s.d(
            s.c(x) * s.e(s.c(x).mean((2, 3)))[:, :, None, None] * s.e(one(s.c(x)).flatten(1)).unsqueeze(-1).unsqueeze(2)
        ),
        c=conv(3, 8),
        d=conv(8, 2),
        e=nn.Linear(8, 8),
    ),
    "a norm of channels by hand": nn.Sequential(conv(3, 8), ChannelsFirstNorm(8), conv(8, 8), nn.ReLU(), conv(8, 2)),
    "spatial attention": nn.Sequential(conv(3, 8), SpatialAttention(), conv(8, 2)),
    "a norm of samples by hand": Written(
        lambda s, x: s.d(s.c(x) * torch.rsqrt(s.c(x).var((1, 2, 3), unbiased=False, keepdim=True) + 1e-5)),
        c=conv(3, 8),
        d=conv(8, 2),
    ),
    "the larger of two": Written(lambda s, x: s.d(torch.max(s.c(x), s.e(x))), c=conv(3, 8), e=conv(3, 8), d=conv(8, 2)),
    "an image without its mean": Written(lambda s, x: s.d(F.relu(s.c(x - x.mean(1, keepdim=True)))), c=conv(3, 8), d=conv(8, 2)),
    "a pool as large as the map": Written(own_size, c=conv(3, 8), f=nn.Linear(8, 4)),
    "a pool as large as both sides": Written(both_sizes, c=conv(3, 8), f=nn.Linear(8, 4)),
    "divided by the number of channels": Written(lambda s, x: s.d(s.c(x) / s.c(x).shape[-3]), c=conv(3, 8), d=conv(8, 2)),
    "divided by the channels at the end": Written(
        lambda s, x: s.d((last(s.c(x)) / last(s.c(x)).size(3)).permute(0, 3, 1, 2)), c=conv(3, 8), d=conv(8, 2)
    ),
    "divided by the size at its place": Written(
        lambda s, x: s.d((last(s.c(x)) / last(s.c(x)).shape[1]).permute(0, 3, 1, 2)), c=conv(3, 8), d=conv(8, 2)
    ),
    "scaled after it was flattened": Written(
        lambda s, x: s.f(one(s.c(x)).flatten(1) * s.g), c=conv(3, 8), f=nn.Linear(8, 4), g=nn.Parameter(torch.randn(1, 8))
    ),
    "a mean beside its map": Written(
        lambda s, x: s.d(torch.cat([one(s.c(x)).expand_as(s.e(x)), s.e(x)], 1)), c=conv(3, 8), e=conv(3, 8), d=conv(16, 2)
    ),
    "a norm of a vector": nn.Sequential(conv(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 4)),
    "torch.reshape": Written(lambda s, x: s.f(torch.reshape(one(s.c(x)), (x.shape[0], -1))), c=conv(3, 8), f=nn.Linear(8, 4)),
    "a maximum over space by a call": Written(
        lambda s, x: s.f(F.adaptive_max_pool2d(s.c(x), 1).flatten(1)), c=conv(3, 8), f=nn.Linear(8, 4)
    ),
    "mean and maximum": Written(
        lambda s, x: s.f(torch.cat([one(s.c(x)).flatten(1), s.c(x).amax((2, 3))], 1)), c=conv(3, 8), f=nn.Linear(16, 4)
    ),
    "a mean taken off and put back": Written(
        lambda s, x: s.d(F.relu(s.c(x - s.m))) + s.m, c=conv(3, 8), d=conv(8, 3), m=nn.Parameter(torch.randn(1, 3, 1, 1))
    ),
    "a number a channel of a vector and of its map": Written(
        lambda s, x: s.d(s.c(x) * (s.c(x).mean((2, 3)) * s.g)[:, :, None, None] * s.g.view(1, -1, 1, 1)),
        c=conv(3, 9),
        d=conv(9, 2),
        g=nn.Parameter(torch.randn(9)),
    ),
    "changed in place under another name": Written(in_place, c=conv(3, 8), e=conv(8, 8), d=conv(16, 4)),
    "attention to the image": Written(lambda s, x: s.c(x * torch.sigmoid(s.m(x))), c=conv(3, 8), m=conv(3, 1)),
    "one channel on the way": Written(
        lambda s, x: s.d(s.b(s.a(s.c(x)))), c=conv(3, 8), a=conv(8, 1), b=conv(1, 16), d=conv(16, 2)
    ),
    "memory formats": Written(lambda s, x: s.d(s.c(x).contiguous(memory_format=torch.channels_last)), c=conv(3, 8), d=conv(8, 2)),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("keep", ["channels", "params"])
def test_what_users_write_between_layers(name: str, keep: Any) -> None:
    torch.manual_seed(0)
    net, x = copy.deepcopy(GOOD[name]).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    if keep == "params" and name == "an image is added on the way":
        with pytest.raises(ValueError, match=r"an image meets it, so its channels must be those of the image"):
            convert(net, p4m, keep)
        return
    made = convert(net, p4m, keep, weights=keep == "channels").eval()
    y = net(x)
    assert made(x).shape == y.shape
    if keep == "channels":
        back = (
            (lambda h, t: last(act(p4m, h, t.permute(0, 3, 1, 2))))
            if name.startswith("channels last")
            else (lambda h, t: act(p4m, h, t))
        )
        each = [net(act(p4m, h, x)) for h in range(8)]
        mean = torch.stack([back(p4m.inverse[h], e) if e.ndim == 4 else e for h, e in enumerate(each)]).mean(0)
        torch.testing.assert_close(made(x), mean, rtol=0, atol=1e-10)
    elif not name.startswith("channels last"):
        assert equivariance_error(made, p4m, x) < 1e-10
    assert set(vars(GOOD[name])) == set(vars(net))  # nothing is left on the user's network


def test_numbers_made_for_each_channel_need_all_of_them() -> None:
    torch.manual_seed(0)
    net = Written(lambda s, x: s.d(s.c(x) + torch.arange(8.0).view(8, 1, 1)), c=conv(3, 8), d=conv(8, 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, keep="channels", weights=True, example=x)
    mean = torch.stack([act(p4m, p4m.inverse[h], net(act(p4m, h, x))) for h in range(8)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r'the tensor made there has a number for each of 8 channels.*use keep="channels" \(in '):
        convert(net, p4m)


@pytest.mark.parametrize("group", [linem, p4m, Oh], ids=lambda g: g.name)
def test_axes_of_single_places_in_every_dimension(group: Group) -> None:
    torch.manual_seed(0)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[group.dim - 1]
    space = tuple(range(2, 2 + group.dim))

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.c(x)
        a, b = y.mean(space, keepdim=True), y.flatten(2).amax(-1)
        for _ in space:
            a, b = a.squeeze(-1), b.unsqueeze(-1)
        out: Tensor = s.f(a) + s.f((y * b).flatten(2).mean(2))
        return out

    net, x = Written(forward, c=kind(3, 8, 3, padding=1), f=nn.Linear(8, 3)).eval(), torch.randn(2, 3, *(5,) * group.dim)
    made = convert(net, group, keep="channels", weights=True, example=x)
    mean = torch.stack([net(act(group, h, x)) for h in range(group.order)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=1e-4, atol=1e-5)


def test_embeddings_have_length_1() -> None:
    net, x = Written(lambda s, x: F.normalize(s.c(x).mean((2, 3)), dim=-1), c=conv(3, 8)), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, example=x).eval()
    torch.testing.assert_close(made(x).norm(dim=1), torch.ones(2))
    assert equivariance_error(made, p4m, x) < 1e-4


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)


def test_errors_of_calls_name_the_module_and_the_line() -> None:
    line = Turns.forward.__code__.co_firstlineno + 1
    net = nn.Sequential(conv(3, 8), nn.Sequential(nn.ReLU(), Turns()), conv(8, 2))
    with pytest.raises(ValueError, match=rf"flip, a call of flip, cannot .* \(in 1\.1 \(Turns, test_convert\.py:{line}\)\)$"):
        convert(net, p4)


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(conv(3, 8)), conv(8, 2))


def hooked() -> nn.Module:
    net = nn.Sequential(conv(3, 8), conv(8, 2))
    net[0].register_forward_hook(lambda *_: None)
    return net


reverse = Own.apply  # an alias, as people take it
BAD: dict[str, tuple[nn.Module, str]] = {
    "a number a pixel, in the dtype of the image": (
        Written(lambda s, x: s.c(x - torch.tensor([[float(i) for i in range(9)]] * 9, dtype=x.dtype)), c=conv(3, 8)),
        r"the tensor made there of shape \(9, 9\) meets an image; one number, or one a channel, is known \(in Written \(test_c",
    ),
    "a number a column, in the dtype of the image": (
        Written(lambda s, x: s.c(x - x.new_tensor([0.1, 0.2, 0.3])), c=conv(3, 8)),
        r"the tensor made there of shape \(3,\) meets an image; one number, or one a channel, is known",
    ),
    "a part that is scripted": (
        nn.Sequential(conv(3, 8), nn.Sequential(nn.ReLU(), torch.jit.script(conv(8, 8))), conv(8, 2)),
        r"convert: 1\.1 \(Conv2d\) is scripted or traced by torch.jit, .* convert the network with the eager module in its place",
    ),
    "a part that is traced by torch.jit": (
        nn.Sequential(conv(3, 8), torch.jit.trace(nn.ReLU(), torch.rand(1)), conv(8, 2)),
        r"convert: 1 \(ReLU\) is scripted or traced by torch.jit",
    ),
    "scripted as a whole": (
        torch.jit.script(nn.Sequential(conv(3, 8), conv(8, 2))),
        r"convert: the network \(Sequential\) is scripted or traced by torch.jit, .* before torch.jit.script",
    ),
    "a shuffle of pixels": (
        nn.Sequential(conv(3, 8), nn.PixelShuffle(2)),
        "PixelShuffle.* use nn.Upsample, or F.interpolate, and a",
    ),
    "filters by a call": (
        Written(lambda s, x: F.conv2d(s.c(x), s.c.weight), c=conv(3, 3)),
        "a call of conv2d, .* use a layer, nn.Conv2d; .* go into the layer of the result",
    ),
    "parts of unknown number": (
        Written(lambda s, x: sum(part for part in s.c(x).split(4, 1)), c=conv(3, 8)),
        r"splits a map in parts whose number is not known; use chunk\(number, 1\)",
    ),
    "computed from all numbers of a parameter": (
        Written(
            lambda s, x: s.d(s.c(x) * s.g.softmax(0).view(1, -1, 1, 1)),
            c=conv(3, 8),
            d=conv(8, 2),
            g=nn.Parameter(torch.randn(8)),
        ),
        r"softmax, a function of parameters, is computed from all of 8 channels, of which \d are left.*\(in Written \(test_c",
    ),
    "a parameter in another order": (
        Written(
            lambda s, x: s.d(s.c(x) * s.g[[*range(7, -1, -1)]]), c=conv(3, 8), d=conv(8, 2), g=nn.Parameter(torch.ones(8, 1, 1))
        ),
        r"getitem, a function of parameters, is computed from all of 8 channels",
    ),
    "rows computed from a parameter": (
        Written(
            lambda s, x: s.d(s.c(x) * torch.sigmoid(s.g)), c=conv(3, 9), d=conv(9, 2), g=nn.Parameter(torch.randn(1, 1, 9, 1))
        ),
        r"sigmoid, a function of parameters, of shape \(1, 1, 9, 1\) meets a map of 9 channels; one number, or one a channel",
    ),
    "a picture of numbers": (
        Written(lambda s, x: s.c(x + s.p), c=conv(3, 8), p=nn.Parameter(torch.randn(1, 3, 9, 9))),
        r"the parameter p of",
    ),
    "as many places as channels": (
        Written(lambda s, x: s.d(s.c(x) * s.p), c=conv(3, 81), d=conv(81, 2), p=nn.Parameter(torch.randn(1, 1, 9, 9))),
        r"the parameter p of shape \(1, 1, 9, 9\) meets",
    ),
    "rows beside channels at the end": (
        Written(lambda s, x: s.f(last(s.c(x)) + s.p), c=conv(3, 9), f=nn.Linear(9, 2), p=nn.Parameter(torch.randn(9, 1, 1))),
        r"the parameter p of shape \(9, 1, 1\) meets a map of 9 channels; one number, or one a channel, is known",
    ),
    "all axes of rows beside channels at the end": (
        Written(lambda s, x: s.f(last(s.c(x)) * s.p), c=conv(3, 9), f=nn.Linear(9, 2), p=nn.Parameter(torch.randn(1, 9, 1, 1))),
        r"the parameter p of shape \(1, 9, 1, 1\) meets a map of 9 channels",
    ),
    "a number a sample": (
        Written(lambda s, x: s.d(s.c(x) * s.p), c=conv(3, 8), d=conv(8, 2), p=nn.Parameter(torch.randn(8, 1, 1, 1))),
        r"the parameter p of shape \(8, 1, 1, 1\) meets a map of 8 channels",
    ),
    "a number a sample of vectors": (
        Written(lambda s, x: s.f(s.c(x).mean((2, 3)) * s.p), c=conv(3, 8), f=nn.Linear(8, 2), p=nn.Parameter(torch.randn(8, 1))),
        r"the parameter p of shape \(8, 1\) meets a map of 8 channels",
    ),
    "two inputs": (
        WrittenForTwo(lambda s, x, m: s.d(s.c(x) * m), c=conv(3, 8), d=conv(8, 2)),
        r"torch.fx cannot trace|something that is no map",
    ),
    "softmax over space": (Written(lambda s, x: F.softmax(s.c(x), 3), c=conv(3, 8)), r"softmax, a softmax along axis 3, cannot"),
    "softmax of a flat map": (
        Written(lambda s, x: F.softmax(s.c(x).flatten(1), 1), c=conv(3, 8)),
        r"a softmax along axis 1, cannot",
    ),
    "one side padded": (
        Written(lambda s, x: s.c(F.pad(x, (0, 1, 0, 1))), c=nn.Conv2d(3, 8, 2)),
        r"pad: pad \(=\(0, 1, 0, 1\)\) pads one side more than the other.*pad both sides alike",
    ),
    "one side padded by a layer": (
        nn.Sequential(conv(3, 8), nn.ZeroPad2d((1, 0, 1, 0)), conv(8, 2)),
        r"1 \(ZeroPad2d.*one side more than the other",
    ),
    "one axis padded": (Written(lambda s, x: s.c(F.pad(x, (1, 1))), c=conv(3, 8)), r"pad \(=\(0, 1\)\) must be equal along axes"),
    "samples padded": (
        Written(lambda s, x: F.pad(s.c(x), (0, 0, 0, 0, 0, 0, 2, 2)), c=conv(3, 8)),
        r"pad: expected a pad of at most 2 axes of space",
    ),
    "channels padded by what is there": (
        Written(lambda s, x: F.pad(s.c(x), (0, 0, 0, 0, 2, 2), "circular"), c=conv(3, 8)),
        r"a pad of the channels by \(2, 2\) of mode 'circular', .*a convolution of size 1, with a stride",
    ),
    "channels taken off by a pad": (Written(lambda s, x: F.pad(s.c(x), (0, 0, 0, 0, -2, -2)), c=conv(3, 8)), r"by \(-2, -2\)"),
    "every other row": (
        Written(lambda s, x: s.c(x)[:, :, ::2, ::1], c=conv(3, 8)),
        r"the step \(=\(2, 1\)\) must be equal along axes .*y\[:, :, ::2, ::2\] and y\[:, :, 1:-1, 1:-1\] are known \(in W",
    ),
    "a window that is not in the middle": (
        Written(lambda s, x: s.c(x)[..., 1:-2, 1:-2], c=conv(3, 8)),
        r"getitem, a call of getitem, cannot .* cut both ends alike",
    ),
    "parts of space": (
        Written(lambda s, x: s.c(x).chunk(3, 2)[0], c=conv(3, 8)),
        r"a chunk along axis 2, .* along their channels",
    ),
    "a window": (Written(lambda s, x: s.c(x)[:, :, 1:, 1:], c=conv(3, 8)), r"getitem, a call of getitem, cannot"),
    "channels that are not there": (Written(lambda s, x: s.c(x)[:, 9:], c=conv(3, 8)), r"takes channels 8 to 8 of 8"),
    "a part that is not there": (Written(lambda s, x: s.c(x).chunk(2, 1)[2], c=conv(3, 8)), r"part 2 of the 2 parts"),
    "every other channel": (Written(lambda s, x: s.c(x)[:, ::2], c=conv(3, 8)), r"a call of getitem, cannot"),
    "parts as a whole": (Written(lambda s, x: torch.stack(s.c(x).chunk(2, 1)), c=conv(3, 8)), r"stack"),
    "weight norm": (
        nn.Sequential(nn.utils.parametrizations.weight_norm(conv(3, 8))),
        r"0 \(ParametrizedConv2d\) has hooks or comp",
    ),
    "an image of unknown channels": (
        Written(lambda s, x: s.d(torch.cat([s.c(x * x.mean((2, 3), keepdim=True)), x], 1)), c=conv(3, 8), d=conv(11, 2)),
        r"an image whose channels are not known; let a convolution take that image",
    ),
    "an oblong pool": (
        nn.Sequential(conv(3, 8), nn.MaxPool2d((2, 3))),
        r"convert: 1 \(MaxPool2d.*kernel_size \(=\(2, 3\)\) must",
    ),
    "an oblong pool by a call": (
        Written(lambda s, x: F.avg_pool2d(s.c(x), (2, 3)), c=conv(3, 8)),
        r"convert: avg_pool2d: .*kernel_size \(=\(2, 3\)\) must be equal",
    ),
    "a pool that hangs over": (
        Written(lambda s, x: F.avg_pool2d(s.c(x), 2, 2, 0, True), c=conv(3, 8)),
        r"avg_pool2d: .*ceil_mode",
    ),
    "to a smaller size": (Written(lambda s, x: F.interpolate(s.c(x), scale_factor=0.5), c=conv(3, 8)), r"convert: interpolate"),
    "further arguments": (
        Written(lambda s, x: s.t(s.c(x), output_size=(10, 10)), c=conv(3, 8), t=nn.ConvTranspose2d(8, 4, 2, 2)),
        r"which has further arguments",
    ),
    "an aliased gradient": (Written(lambda s, x: reverse(s.c(x)), c=conv(3, 8)), r"a torch.autograd.Function"),
    "spectral norm": (spectral(), r"0 \(ParametrizedConv2d\) has hooks or computed weights"),
    "hooks": (hooked(), r"0 \(Conv2d\) has hooks"),
    "along another axis": (Written(lambda s, x: torch.cat([last(s.c(x)), last(s.c(x))], 1), c=conv(3, 8)), r"along axis 1"),
    "images side by side": (Written(lambda s, x: s.c(torch.cat([x, x], 0)), c=conv(3, 8)), r"along axis 0"),
    "bicubic": (Written(lambda s, x: F.interpolate(s.c(x), size=(18, 18), mode="bicubic"), c=conv(3, 8)), r"of mode 'bicubic'"),
    "no gradients inside": (Written(lambda s, x: torch.no_grad()(s.c)(x), c=conv(3, 8)), r"switches gradients off"),
    "by mode": (
        Written(lambda s, x: (s.c(x), x) if s.training else s.c(x) * 2, c=conv(3, 8)),
        r"different things in training and in eval",
    ),
    "noise made on the way": (
        Written(lambda s, x: s.c(x) + torch.randn(1), c=conv(3, 8)),
        r"Written \(test_convert.py:\d+\) makes a tensor with other numbers in every call",
    ),
    "a mean of channels without its axis": (
        Written(lambda s, x: s.c(x).mean(1), c=conv(3, 8)),
        r"mean over axes 1, .*over the channels with keepdim=True; for norms there are nn\.LayerNorm .* nn\.GroupNorm\(1, C\)",
    ),
    "places of maxima": (Written(lambda s, x: s.c(x).max(1, keepdim=True)[1], c=conv(3, 8)), r"part 1 of the 1 parts"),
    "a squeeze of what may be large": (Written(lambda s, x: s.c(x).squeeze(-1), c=conv(3, 8)), r"a squeeze, .* use flatten\(1\)"),
    "flattened space at the end": (Written(lambda s, x: s.c(x).flatten(2), c=conv(3, 8)), r"no linear layer follows"),
    "flattened space in a layer": (
        Written(lambda s, x: s.p(s.c(x).flatten(2)), c=conv(3, 8), p=nn.MaxPool1d(2)),
        r"p \(MaxPool1d",
    ),
    "one layer, two kinds": (Written(lambda s, x: s.c(F.relu(s.c(x))), c=conv(3, 3)), r"called on values of several kinds"),
    "flattened at the end of space": (
        Written(lambda s, x: s.f(last(s.c(x)).flatten(1)), c=conv(3, 8), f=nn.Linear(8 * 81, 2)),
        r"permuted",
    ),
    "a pool of a computed size": (
        Written(lambda s, x: F.avg_pool2d(s.c(x), x.shape[2] // 3), c=conv(3, 8)),
        r"a pool of a size that is known only when it runs",
    ),
    "a pool as large as something else": (
        Written(lambda s, x: F.avg_pool2d(s.c(x), x.size()[2:]), c=conv(3, 8)),
        r"give it as numbers, or as the map's own size",
    ),
    "places as channels": (
        Written(lambda s, x: s.f(s.c(x).flatten(1).view(2, -1, 1, 1)), c=conv(3, 8), f=nn.Conv2d(648, 4, 1)),
        r"view, a view to a shape of its own",
    ),
    "the size of a flat map": (
        Written(lambda s, x: s.f(s.c(x).flatten(1) / s.c(x).flatten(1).size(1)), c=conv(3, 8), f=nn.Linear(648, 4)),
        r"the number of values of a flattened map",
    ),
    "a whole shape": (Written(lambda s, x: s.c(x).view(s.c(x).shape[1:]), c=conv(3, 8)), r"the part slice\(1, None, None\) of"),
    "a convolution of channels at the end": (
        Written(lambda s, x: s.d(last(s.c(x))), c=conv(3, 8), d=conv(9, 4)),
        r"d \(Conv2d.*permuted to the end, .* permute them back first",
    ),
    "a pool of channels at the end": (Written(lambda s, x: F.max_pool2d(last(s.c(x)), 2), c=conv(3, 8)), r"back first"),
    "a norm of more than channels": (
        Written(lambda s, x: F.layer_norm(last(s.c(x)), (9, 9, 8)), c=conv(3, 8)),
        r"a layer_norm, .*normalise the channels alone",
    ),
    "an expanded vector": (Written(lambda s, x: s.c(x).mean((2, 3)).expand_as(x), c=conv(3, 8)), r"an expand_as, cannot"),
    "a vector of another length": (
        Written(lambda s, x: s.f(s.c(x).mean((2, 3)).view(-1, 4)), c=conv(3, 8), f=nn.Linear(4, 4)),
        r"a view to 4 numbers each, .* it has 8 channels",
    ),
    "channels of something else": (
        Written(lambda s, x: s.c(x).view(2, s.m(s.c(x)).size(1), -1).mean(2), c=conv(3, 8), m=conv(8, 4)),
        r"view, a view to a shape of its own",
    ),
    "a pool that steps": (
        Written(lambda s, x: F.avg_pool2d(s.c(x), s.c(x).size(-1), stride=1, padding=4), c=conv(3, 8)),
        r"a pool of a size that is known only when it runs",
    ),
    "a shape as a result": (Written(lambda s, x: (s.c(x), s.c(x).shape), c=conv(3, 8)), r"a shape as a result"),
    "numbers in a shape": (Written(lambda s, x: s.c(x) / s.c(x).shape.numel(), c=conv(3, 8)), r"a call on a whole shape"),
    "sizes in place of numbers": (
        Written(lambda s, x: torch.split(s.c(x), s.c(x).shape[2] // 2, 1)[0], c=conv(3, 8)),
        r"split is called in a way that is not known .*give its sizes and axes as numbers \(in Written",
    ),
    "too few channels": (nn.Sequential(conv(3, 8), conv(4, 8)), r"1 \(Conv2d\(4.*gets 8 channels"),
    "a linear layer on maps": (nn.Sequential(conv(3, 9), nn.Linear(9, 4)), r"1 \(Linear.*works along their last axis"),
    "a norm of a flat map": (nn.Sequential(conv(3, 8), nn.Flatten(), nn.GroupNorm(4, 648)), r"before they are flattened"),
    "slopes of a flat map": (nn.Sequential(conv(3, 8), nn.Flatten(), nn.PReLU(648)), r"one slope, or one a channel of a map"),
    "numbers of a flat map": (
        Written(lambda s, x: s.f(s.c(x).flatten(1) * s.g), c=conv(3, 8), f=nn.Linear(648, 4), g=nn.Parameter(torch.randn(648))),
        r"meet maps, before those are flattened",
    ),
    "one parameter of two layers": (shared(), r"1\.weight and 3\.weight are one parameter"),
    "another precision inside": (Written(in_bfloat16, c=conv(3, 8)), r"uses torch\.autocast, which tracing would lose"),
    "full precision inside": (Written(in_float32, c=conv(3, 8)), r"uses torch\.autocast, which tracing would lose"),
    "half flattened": (Written(lambda s, x: s.c(x).flatten(1, 2), c=conv(3, 8)), r"to a shape of its own"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_would_be_wrong_without_a_word_is_refused(name: str) -> None:
    net, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        convert(net, p4m)


def test_places_of_a_line_are_no_channels() -> None:
    net = Written(
        lambda s, x: s.f((s.c(x).transpose(1, 2) + s.p).mean(1)),
        c=nn.Conv1d(3, 8, 1),
        f=nn.Linear(8, 2),
        p=nn.Parameter(torch.randn(8, 1)),
    )
    with pytest.raises(ValueError, match=r"the parameter p of shape \(8, 1\) meets a map of 8 channels"):
        convert(net, linem)


def test_reshapes_of_another_size_fail_with_their_layer_named() -> None:
    x = torch.randn(2, 3, 9, 9)
    for width, size in ((8, 8), (16, 144)):  # both mix places into the batch
        net = Written(lambda s, x, size=size: s.f(s.c(x).reshape(-1, size)), c=conv(3, width), f=nn.Linear(size, 4))
        with pytest.raises(ValueError, match=r"^f: expected a map of a single place, \(N, K, S, 1, 1\), got \(2, "):
            convert(net, p4m)(x)
        with pytest.raises(ValueError, match=r"fails on the example \(2, 3, 9, 9\): f: expected a map of a single place"):
            convert(net, p4m, example=x)


def test_replaced_modules_do_not_mix_places_into_the_batch() -> None:
    class Branches(nn.Module):
        def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.c, self.f, self.reduce = conv(3, 32), nn.Linear(32, 5), reduce

        def forward(self, x: Tensor) -> Tensor:
            if float(x.mean()) > 1e9:
                x = -x
            found: Tensor = self.f(self.reduce(F.relu(self.c(x))))
            return found

    x = torch.randn(8, 3, 9, 9)
    with pytest.raises(ValueError, match=r"it fails: expected functions on the group"):
        convert(Branches(lambda y: y.flatten(2).mean(2)), p4m, example=x)
    wrong = Branches(lambda y: y.sum((-2, -1)) / (y.shape[2] * y.shape[3]))  # of a map that is S H
    with pytest.raises(ValueError, match=r"its answers are not the mean of the old ones over the group"):
        convert(wrong, p4m, "channels", weights=True, example=x)
    right = Branches(lambda y: y.mean((-2, -1))).eval()
    mean = torch.stack([right(act(p4m, h, x)) for h in range(8)]).mean(0)
    torch.testing.assert_close(convert(right, p4m, "channels", weights=True, example=x)(x), mean, rtol=1e-4, atol=1e-5)
    coarse = convert(copy.deepcopy(right).bfloat16(), p4m, "channels", weights=True, example=x)  # judged in float64
    assert coarse(x.bfloat16()).dtype == torch.bfloat16
    made = convert(Branches(lambda y: y.mean((-2, -1))), p4m, example=x)
    assert made(x).shape == (8, 5)
    assert equivariance_error(made.double(), p4m, x.double()) < 1e-10


def test_networks_inside_something_else_are_named() -> None:
    net = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 2))
    with pytest.raises(ValueError, match=r"inside a DataParallel; convert model\.module"):
        convert(nn.DataParallel(net), p4m)
    with pytest.raises(ValueError, match=r"compiled already; convert model\._orig_mod"):
        convert(torch.compile(net), p4m)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0 \(LazyConv2d\) does not know its sizes yet; run the network once first"):
        convert(nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU()), p4m)


def test_one_number_as_a_size() -> None:
    net = Written(
        lambda s, x: F.interpolate(s.d(s.c(x)), size=x.shape[2], mode="bilinear"), c=conv(3, 8), d=nn.Conv2d(8, 4, 3, 2, 1)
    )
    x = torch.randn(2, 3, 9, 9)
    assert convert(net, p4m, example=x)(x).shape == net(x).shape


def without_bias(norm: nn.Module) -> nn.Module:
    norm.register_parameter("bias", None)
    return norm


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm])
def test_norms_without_a_bias_get_none(kind: Any) -> None:
    torch.manual_seed(0)
    norm = without_bias(nn.GroupNorm(2, 8) if kind is nn.GroupNorm else kind(8, affine=True))
    net = nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 2)).train()
    x = torch.randn(2, 3, 9, 9)
    net(x)
    net.eval()
    assert not any(name.startswith("1.") and name.endswith("bias") for name, _ in convert(net, p4m).named_parameters())
    made = convert(net, p4m, "channels", weights=True, example=x).eval()
    mean = torch.stack([act(p4m, p4m.inverse[h], net(act(p4m, h, x))) for h in range(8)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=1e-4, atol=1e-5)


def test_norms_by_the_batch_have_no_mean_over_the_group() -> None:
    net = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU(), conv(8, 2))
    assert convert(net, p4m)(torch.randn(2, 3, 9, 9)).shape == (2, 2, 9, 9)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d.* with its weights .*track_running_stats=True"):
        convert(net, p4m, "channels", weights=True)


def test_modes_and_frozen_parameters_stay() -> None:
    net = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), conv(8, 2)).train()
    net[1].eval()
    net[0].weight.requires_grad_(False)
    made = convert(net, p4, keep="channels", weights=True)
    assert made.training
    assert not made.get_submodule("1").training
    assert not made.get_parameter("0.weight").requires_grad
    assert made.get_parameter("2.weight").requires_grad


@pytest.mark.parametrize("looks", [False, True])
def test_without_weights_everything_is_drawn_anew_and_trained(looks: bool) -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor, m: Tensor) -> Any:
        y = s.p(s.c(x)) * s.g
        if looks:
            y = y if float(y.mean()) < 1e9 else -y
        return s.f(y.mean((-2, -1))) + s.e(m)

    net = WrittenForTwo(
        forward, c=conv(3, 8), p=nn.PReLU(), f=nn.Linear(8, 2), e=nn.Embedding(9, 2), g=nn.Parameter(torch.tensor(2.0))
    ).requires_grad_(False)
    nn.init.constant_(net.get_parameter("p.weight"), 0.7)
    before = copy.deepcopy(net.state_dict())
    made = convert(net, p4m, keep="channels", example=(torch.randn(2, 3, 9, 9), torch.tensor([1, 7])))
    assert all(p.requires_grad for p in made.parameters())
    assert made.get_parameter("p.weight") == 0.25
    assert made.get_parameter("g") == 2
    assert not torch.equal(made.get_parameter("e.weight"), before["e.weight"])
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


# --- several inputs and results ------------------------------------------------------------------------------------------------


class TwoResults(nn.Module):
    """A class, a picture and an embedding, in a dictionary that holds a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16), nn.ReLU())
        self.mask, self.fc, self.stride = conv(16, 2, 1), nn.Linear(16, 5), nn.Conv2d(16, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"class": F.log_softmax(self.fc(y.mean((2, 3))), -1), "maps": (F.softmax(self.mask(y), 1), self.stride(y))}


def test_networks_that_return_several_tensors() -> None:
    torch.manual_seed(0)
    net, x = TwoResults().eval(), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, example=x)
    y = made(x)
    assert [y["class"].shape, y["maps"][0].shape, y["maps"][1].shape] == [(2, 5), (2, 2, 9, 9), (2, 4, 5, 5)]
    for pick in (lambda r: r["class"], lambda r: r["maps"][0], lambda r: r["maps"][1]):
        assert equivariance_error(lambda t, p=pick: p(made.eval()(t)), p4m, x) < 1e-4
    with pytest.raises(ValueError, match=r"(?s)number 2 of the 3 tensors that it returns, is not equivariant.*stride"):
        convert(net, p4m, example=torch.randn(2, 3, 8, 8))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16), nn.ReLU(), nn.MaxPool2d(3), conv(16, 16), nn.ReLU())
        self.fc = nn.Linear(16, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.abs(self.body(a) - self.body(b)).mean((2, 3)))
        return out


class EarlyFusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(4, 16), conv(16, 2)

    def forward(self, image: Tensor, depth: Tensor) -> Tensor:
        out: Tensor = self.second(F.relu(self.first(torch.cat([image, depth], 1))))
        return out


@pytest.mark.parametrize(("make", "channels"), [(Siamese, (3, 3)), (EarlyFusion, (3, 1))])
def test_networks_of_two_images(make: Any, channels: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net, pair = make().eval(), tuple(torch.randn(2, k, 9, 9) for k in channels)
    made = convert(net, p4m, example=pair).eval()
    error = equivariance_error(lambda t: made(*t.split(channels, 1)), p4m, torch.cat(pair, 1))
    assert error < 1e-4
    mean = convert(net, p4m, keep="channels", weights=True)
    each = [net(*(act(p4m, h, x) for x in pair)) for h in range(8)]
    total = torch.stack([act(p4m, p4m.inverse[h], y) if y.ndim > 2 else y for h, y in enumerate(each)]).mean(0)
    torch.testing.assert_close(mean(*pair), total, rtol=1e-5, atol=1e-5)


def test_examples_of_two_images_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="must be of one size"):
        convert(Siamese(), p4, example=(torch.randn(1, 3, 9, 9), torch.randn(1, 3, 6, 6)))
    with pytest.raises(TypeError, match="expected an example image, a tensor, or a tuple"):
        convert(Siamese(), p4, example=(torch.randn(1, 3, 9, 9), 3))  # type: ignore[arg-type]


def test_a_pad_that_turns_out_one_sided_is_refused_when_it_runs() -> None:
    net = Written(lambda s, x: s.d(F.pad(s.c(x), [0, x.size(3) - s.c(x).size(3)] * 2)), c=nn.Conv2d(3, 8, 3), d=conv(8, 2, 5))
    with pytest.raises(ValueError, match="one side more than the other"):
        convert(net, p4)(torch.randn(1, 3, 9, 9))


@pytest.mark.parametrize("name", ["many functions", "many changes in place", "norms by calls"])
def test_many_functions_on_hexagonal_lattices(name: str) -> None:
    torch.manual_seed(0)
    net, x = convert(copy.deepcopy(FOUND[name]), p6).eval(), image(p6, channels=3, size=9, dtype=torch.float32)
    assert equivariance_error(net, p6, x) < 1e-4
    torch.testing.assert_close(planar(net)(x), net(x), rtol=1e-4, atol=1e-5)


BY_HAND = ["a norm of channels by hand", "spatial attention", "a norm of samples by hand"]
WITH_ONES = ["squeezed axis by axis", "squeeze and excite by axes", "flattened space and its mean", "an image that is normalised"]


@pytest.mark.parametrize(
    "name",
    ["halves", "zeros around", "layers that pad", "an image beside a map", "softmax in a layer", *BY_HAND, *WITH_ONES],
)
def test_what_was_converted_is_exported(name: str) -> None:
    torch.manual_seed(0)
    net, x = convert(copy.deepcopy(GOOD[name]), p4m).eval(), torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(planar(net, fold=True)(x), net(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["halves", "zeros around", "an image beside a map", "softmax over channels", *BY_HAND, *WITH_ONES]
)
def test_on_hexagonal_lattices_too(name: str) -> None:
    torch.manual_seed(0)
    net = convert(copy.deepcopy(GOOD[name]), p6).eval()
    x = image(p6, channels=3, size=9, dtype=torch.float32)
    assert equivariance_error(net, p6, x) < 1e-4
    torch.testing.assert_close(planar(net)(x), net(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda y: F.pad(y, (-1, -1, -1, -1)), r"pad: pad \(=\(-1, -1, -1, -1\)\) cuts a box out of a box, and p6 maps hexagons"),
        (lambda y: y[:, :, 1:-1, 1:-1], r"getitem, .* a window of a box is no hexagon"),
    ],
)
def test_windows_of_hexagons_are_refused(cut: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(Written(lambda s, x: cut(s.c(x)).mean((2, 3)), c=conv(3, 8)), p6)


def test_places_of_hexagons_are_taken_with_their_centre() -> None:
    torch.manual_seed(0)
    net = convert(Written(lambda s, x: s.d(F.relu(s.c(x)[:, :, ::2, ::2])), c=conv(3, 8), d=conv(8, 2)), p6).eval()
    x = image(p6, channels=3, size=9, dtype=torch.float32)
    assert equivariance_error(net, p6, x) < 1e-4
    torch.testing.assert_close(planar(net)(x), net(x), rtol=1e-5, atol=1e-6)


# --- what a forward may hide from tracing --------------------------------------------------------------------------------------


class Patches(nn.Module):
    """A small classifier around a forward that is given."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 5)
        self.alpha = nn.Parameter(torch.tensor([0.3]))
        self.told = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.told(self, x)


class MyDropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.size(0), 1, 1, 1) > 0.5) if self.training else x


MyDropPath.__name__ = "DropPath"


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], *(1,) * (x.ndim - 1)) > 0.5) if self.training else x


@pytest.mark.parametrize("keep", ["params", "channels"])
def test_whole_samples_are_dropped_as_before(keep: Any) -> None:
    net = convert(Patches(lambda s, x: s.drop(s.a(x)).mean((2, 3)), drop=DropPath()), p4, keep).train()
    y = net(torch.randn(64, 3, 9, 9))
    dropped = (y == 0).all(1)
    assert 0 < dropped.sum() < 64
    assert not (y[~dropped] == 0).any()


DIFFERENT = "does different things in training"
HIDDEN: dict[str, tuple[Callable[..., Any], str]] = {
    "another factor in eval mode": (lambda s, x: s.h(s.a(x).mean((2, 3))) / (1.0 if s.training else 4.0), DIFFERENT),
    "other bounds in eval mode": (lambda s, x: s.h(s.a(x).clamp(0, 1 if s.training else 2).mean((2, 3))), DIFFERENT),
    "a random factor": (lambda s, x: s.h(s.a(x).mean((2, 3))) * random.random(), f"{DIFFERENT}|random numbers"),
    "a layer left out at random": (
        lambda s, x: s.h((s.b(s.a(x)) if random.random() > -1 else s.a(x)).mean((2, 3))),
        "random numbers",
    ),
    "columns": (lambda s, x: s.h((s.a(x) + torch.linspace(-1, 1, x.shape[3])).mean((2, 3))), "no map"),
    "positions": (lambda s, x: s.h((s.a(x) * torch.arange(x.shape[2]).sin()[:, None]).mean((2, 3))), "no map"),
    "a mask of four axes": (lambda s, x: s.h(s.drop(s.a(x)).mean((2, 3))), "whole samples"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_tracing_would_fix_or_lose_is_refused(name: str) -> None:
    forward, words = HIDDEN[name]
    with pytest.raises(ValueError, match=words):
        convert(Patches(forward, drop=MyDropPath()), p4)


def test_a_dropout_that_is_never_at_work_stays_so() -> None:
    net, x = (
        convert(Patches(lambda s, x: s.h(F.dropout(s.a(x).mean((2, 3)), 0.9, training=False))), p4).train(),
        torch.randn(2, 3, 9, 9),
    )
    torch.testing.assert_close(net(x), net(x), rtol=0, atol=0)


def test_functions_of_single_parameters_meet_maps() -> None:
    torch.manual_seed(0)
    net = Patches(lambda s, x: s.h((s.a(x) * torch.sigmoid(s.alpha) + 1.0 / s.alpha).mean((2, 3)))).eval()
    x = torch.randn(2, 3, 9, 9)
    mean = torch.stack([net(act(p4, h, x)) for h in range(4)]).mean(0)
    made = convert(net, p4, keep="channels", weights=True).eval()
    torch.testing.assert_close(made(x), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(planar(made)(x), mean, rtol=1e-4, atol=1e-5)


def added_to_a_half(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    one, other = y.chunk(2, 1)
    one += other
    return s.h(F.relu(y).mean((2, 3)))


def before_and_after(s: Any, x: Tensor) -> Any:
    y = s.one(s.a(x))
    return s.h((s.b(s.act(y)) + y).mean((2, 3)))


@pytest.mark.parametrize("group", [p4, p6], ids=str)
@pytest.mark.parametrize("name", ["half", "relu", "hardtanh"])
def test_changes_in_place_are_exported(name: str, group: Group) -> None:
    torch.manual_seed(0)
    act_ = nn.Hardtanh(0.1, 1, inplace=True) if name == "hardtanh" else nn.ReLU(inplace=True)
    one = nn.Conv2d(16, 16, 3, padding=1, groups=16 if name == "relu" else 1)
    net = Patches(added_to_a_half if name == "half" else before_and_after, act=act_, one=one)
    made, x = convert(net, group).eval(), image(group, channels=3, size=9, dtype=torch.float32)
    torch.testing.assert_close(planar(made)(x), made(x), rtol=1e-5, atol=1e-6)


def test_maps_that_must_be_of_one_place_are_checked_in_plain_modules_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4, 5))
    plain = planar(convert(net, p4, keep="channels").eval())
    assert plain(torch.randn(2, 3, 4, 4)).shape == (2, 5)
    with pytest.raises(RuntimeError):
        plain(torch.randn(2, 3, 16, 16))


def test_the_mean_is_checked_in_every_tensor_of_a_network_that_cannot_be_traced() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.a(x)
        if y.abs().max() > 1e9:
            y = y * 2
        y = y.softmax(-3)
        return s.h(y.mean((-2, -1)).flatten(1)), y.mean()

    with pytest.raises(ValueError, match="mean"):
        convert(Patches(forward), p4, keep="channels", weights=True, example=torch.randn(2, 3, 9, 9))


class Counting(nn.Module):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.last = x
        return x


def test_the_network_that_is_given_is_left_as_it_was() -> None:
    net = Patches(lambda s, x: s.h(s.count(s.a(x)).mean((2, 3))), count=Counting())
    convert(net, p4)
    assert net.get_submodule("count").n == 0
    assert net.get_submodule("count").last is None


class Masked(Patches):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        y = self.a(x) * scale
        found: Tensor = self.h((y if mask is None else y * mask).mean((2, 3)))
        return found


class Sized(Patches):
    def forward(self, x: Tensor, size: tuple[int, int] = (2, 3), *, scale: float = 2.0) -> Tensor:
        found: Tensor = self.h(self.a(x).mean((2, 3))) * size[1]
        return found * scale


def test_defaults_that_are_tuples() -> None:
    """torch.fx alone would return a list."""
    made, x = convert(Sized(lambda s, x: x), p4, example=torch.randn(2, 3, 9, 9)).eval(), torch.randn(2, 3, 9, 9)
    assert isinstance(made(x), Tensor)
    torch.testing.assert_close(made(x), made(x.rot90(1, (-2, -1))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["code", "graph", "meta", "_graph", "recompile"])
@pytest.mark.parametrize("example", [None, torch.rand(2, 3, 9, 9)])
def test_names_that_torch_fx_keeps_for_itself(name: str, example: Tensor | None) -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        parts: Any = net
        found: Tensor = getattr(parts, name)(F.relu(parts.c(x)).mean((2, 3)))
        return found

    net = Written(forward, **{"c": conv(3, 8), name: nn.Linear(8, 2)})
    with pytest.raises(
        ValueError, match=rf"^convert: Written\.{name} has a name that .* keep for themselves; give nn\.Sequential"
    ):
        convert(net, p4, example=example)
    assert convert(nn.Sequential(net), p4, example=example)(torch.rand(2, 3, 9, 9)).shape == (2, 2)


class WithHeadForTraining(Patches):
    def __init__(self) -> None:
        super().__init__(lambda s, x: x)
        self.more = nn.Linear(self.h.in_features, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).mean((-2, -1)) * (1 if float(x.detach().abs().max()) < 1e9 else 2)
        return (self.h(y), self.more(y)) if self.training else self.h(y)


def test_heads_for_training_alone() -> None:
    """Modules are replaced one by one here, and both modes must run."""
    x = torch.randn(2, 3, 9, 9)
    made, old = convert(WithHeadForTraining(), p4, example=x), WithHeadForTraining()
    assert [y.shape for y in made.train()(x)] == [y.shape for y in old.train()(x)]
    torch.testing.assert_close(made.train()(x), made(x.rot90(1, (-2, -1))), rtol=1e-4, atol=1e-5)
    assert made.eval()(x).shape == old.eval()(x).shape


class Squeezed(nn.Module):
    """A gate whose hidden width has no part in the sums of widths, after a concatenation."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, width), conv(width, width), conv(2 * width, 2)
        self.down, self.up = conv(2 * width, hidden, 1), conv(hidden, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        y = torch.cat([y, F.relu(self.b(y))], 1)
        found: Tensor = self.c(y * torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True))))))
        return found


@pytest.mark.parametrize("group", [p4, p4m, p6m], ids=str)
@pytest.mark.parametrize(("width", "hidden"), [(32, 4), (64, 8), (64, 16)])
def test_gates_after_concatenations_leave_widths_their_choice(group: Group, width: int, hidden: int) -> None:
    net, x = Squeezed(width, hidden), torch.randn(2, 3, 9, 9)
    made = convert(net, group, example=x)
    count = [sum(p.numel() for p in each.parameters()) for each in (net, made)]
    assert 0.9 < count[1] / count[0] < 1.1
    assert convert(net, group, "cost", example=x)(x).shape == net(x).shape


class GatedAndSqueezed(nn.Module):
    """Widths that must be halved, others that meet in sums of concatenations, and one that neither has a part in."""

    def __init__(self, top: int, hidden: int) -> None:
        super().__init__()
        self.s, self.o = conv(3, top), conv(top // 2, 16)
        self.x, self.y, self.z = conv(16, 16), conv(16, 32), conv(16, 48, 1)
        self.q, self.r, self.f = conv(48, hidden, 1), conv(hidden, 48, 1), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.o(gated(self.s(x)))
        y = F.relu(torch.cat([self.x(x), self.y(x)], 1) + self.z(x))
        found: Tensor = self.f((y * torch.sigmoid(self.r(F.relu(self.q(y))))).mean((2, 3)))
        return found


@pytest.mark.parametrize(("top", "hidden"), [(160, 5), (160, 6), (160, 7), (64, 4)])
def test_fractions_that_fail_leave_nothing_behind(top: int, hidden: int) -> None:
    net = GatedAndSqueezed(top, hidden)
    made: Any = convert(net, p4m, example=torch.randn(2, 3, 9, 9))
    count = [sum(p.numel() for p in each.parameters()) for each in (net, made)]
    assert 0.85 < count[1] / count[0] < 1.1
    assert made.q.out_channels <= hidden


@pytest.mark.parametrize("how", [torch.rsqrt, torch.reciprocal, lambda x: torch.clamp_min(x, 0.1), lambda x: x.clamp_max(0.5)])
def test_functions_of_single_numbers_before_several_images_meet(how: Any) -> None:
    net = WrittenForTwo(lambda s, x, m: s.d(F.relu(s.a(how(x)) + s.b(m))).mean((2, 3)), a=conv(3, 8), b=conv(3, 8), d=conv(8, 2))
    images = tuple(torch.rand(2, 3, 9, 9) + 0.1 for _ in range(2))
    made = convert(net, p4, example=images).eval()
    torch.testing.assert_close(made(*images), made(*(i.rot90(1, (-2, -1)) for i in images)), rtol=1e-4, atol=1e-5)


def test_arguments_with_defaults_are_gone_and_nothing_else_is_harmed() -> None:
    made, x = convert(Masked(lambda s, x: x), p4).eval(), torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(planar(made)(x), made(x), rtol=1e-5, atol=1e-6)
    assert torch.fx.symbolic_trace(nn.ReLU())(x).shape == x.shape
    with pytest.raises(TypeError, match="mask"):
        made(x, mask=None)


class MyConv(nn.Conv2d):
    def __init__(self, k_in: int, k_out: int) -> None:
        super().__init__(k_in, k_out, 3, padding=1)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias, padding=1)


def test_layers_of_a_class_of_ones_own() -> None:
    x = torch.randn(2, 3, 9, 9)
    made = convert(nn.Sequential(MyConv(3, 8), nn.ReLU(), MyConv(8, 4)), p4, example=x)
    assert isinstance(made.get_submodule("2"), GConv)
    with pytest.raises(ValueError, match="conv2d"):
        convert(nn.Sequential(MyConv(3, 8), Standardised(8, 4, 3)), p4)


def test_one_channel_stays_one_where_others_are_split() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.more(s.stem(x)).chunk(2, 1)[0]
        return (y * torch.sigmoid(s.one(y))).mean((2, 3))

    modules = {"stem": nn.Conv2d(3, 10, 3, padding=1), "more": nn.Conv2d(10, 18, 3, padding=1), "one": nn.Conv2d(9, 1, 1)}
    x = torch.randn(2, 3, 9, 9)
    assert equivariance_error(convert(Patches(forward, **modules), p4).eval(), p4, x) < 1e-4


# --- networks as they are found in other people's code -------------------------------------------------------------------------


def copied_and_changed(net: Any, x: Tensor) -> Tensor:
    y = net.c(x)
    z = net.l(net.a(last(y).contiguous()))  # what is changed in place is a copy
    a, b = y.chunk(2, 1)
    a = a.contiguous()
    a += 1
    found: Tensor = net.f((y + z.permute(0, 3, 1, 2) + torch.cat([a, b], 1)).mean((2, 3)))
    return found


def ghost(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    found: Tensor = net.d(y + torch.cat([net.b(y), net.c(y)], 1))
    return found


def channel_pool(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    both = torch.cat((torch.max(y, 1)[0].unsqueeze(1), torch.mean(y, 1).unsqueeze(1)), dim=1)
    found: Tensor = net.d(y * torch.sigmoid(net.b(both)))
    return found


def power_mean(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    powers = F.avg_pool2d(y.clamp(min=1e-6).pow(3), (y.size(-2), y.size(-1))).pow(1 / 3)
    found: Tensor = net.f(powers.flatten(1) + F.max_pool2d(y, y.size()[2:], stride=y.size()[2:]).flatten(1))
    return found


def axis_by_axis(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    found: Tensor = net.f(torch.cat([y.mean(3).mean(2), y.max(-1)[0].max(-1)[0]], 1))
    return found


def padded_shortcut(net: Any, x: Tensor) -> Tensor:
    """Option A of the ResNet paper."""
    y = F.relu(net.a(x))
    short = F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4), "constant", 0)
    found: Tensor = net.f(F.relu(net.b(y) + short).mean((2, 3)))
    return found


def discriminator() -> nn.Sequential:
    return nn.Sequential(conv(3, 24), nn.LeakyReLU(0.2), nn.Conv2d(24, 24, 5), nn.LeakyReLU(0.2), nn.Conv2d(24, 1, 5))


def weighted(net: Any, x: Tensor) -> Tensor:
    """Sums whose shares are learned, as BiFPN and mixtures of layers have them."""
    a, b, w, v = net.a(x), net.b(x), F.relu(net.w), torch.softmax(net.v, 0)
    found: Tensor = net.d((w[0] * a + w[1] * b) / (w.sum() + 1e-4) + v[0] * a + (1 - v[1]) * b)
    return found


def many_functions(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z = torch.erf(y) + torch.sign(y).detach() + torch.expm1(y / 9) + torch.atan(y) + F.softshrink(y) + F.tanhshrink(y)
    z = z + torch.asinh(y) + torch.hypot(y, z) + y.nan_to_num().round() + torch.log10(y.exp2()) + torch.floor(y).sinh()
    z = z + F.threshold(y, 0.1, 0.3) + torch.clip(y, -1, 1) + torch.clamp_max(y, 0.5) + net.t(net.r(net.s(net.h(y + 0.2))))
    found: Tensor = net.d(z)
    return found


def many_changes(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    kept = y
    z = F.relu_(y.clone()) + torch.relu_(y + 1) + F.leaky_relu_(y - 1, 0.2) + (y * 2).tanh_() + (y * 3).sigmoid_()
    y.sub_(0.1)
    y.div_(2).clamp_min_(-0.5)
    found: Tensor = net.d(z + kept + torch.tanh_(y))
    return found


def halves_by_size(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    half = y.shape[1] // 2
    parts = torch.split(y, y.size(1) // 4, 1)
    found: Tensor = net.d(y[:, :half] * y[:, half:] + torch.cat([parts[0], parts[3]], 1))
    return found


FOUND = {
    "halves by their size": Written(halves_by_size, a=conv(3, 24), d=conv(12, 2)),
    "channels in another order": Written(
        lambda s, x: s.d(F.relu(torch.channel_shuffle(s.b(s.s(s.a(x))), 2))),
        a=conv(3, 24),
        b=conv(24, 24, groups=2),
        s=nn.ChannelShuffle(2),
        d=conv(24, 2),
    ),
    "many functions": Written(
        many_functions,
        a=conv(3, 24),
        d=conv(24, 2),
        t=nn.Threshold(0.1, 0.2),
        r=nn.RReLU(),
        s=nn.Softshrink(),
        h=nn.Tanhshrink(),
    ),
    "many changes in place": Written(many_changes, a=conv(3, 24), d=conv(24, 2)),
    "norms by calls": Written(
        lambda s, x: s.d(F.instance_norm(F.group_norm(s.c(x), 2, s.g, s.b)) + F.group_norm(s.c(x), 4, s.h, eps=1e-3)),
        c=conv(3, 24),
        d=conv(24, 2),
        g=nn.Parameter(torch.rand(24)),
        h=nn.Parameter(torch.rand(24)),
        b=nn.Parameter(torch.rand(24)),
    ),
    "learned shares": Written(
        weighted, a=conv(3, 24), b=conv(3, 24), d=conv(24, 2), w=nn.Parameter(torch.rand(2)), v=nn.Parameter(torch.randn(2))
    ),
    "a gate of each channel": Written(
        lambda s, x: s.d(s.c(x) * torch.sigmoid(s.g).view(1, -1, 1, 1) + s.m(s.h[:, None, None] * 2) * s.k.exp()),
        c=conv(3, 24),
        d=conv(24, 2),
        m=nn.Tanh(),
        g=nn.Parameter(torch.randn(24)),
        h=nn.Parameter(torch.randn(24)),
        k=nn.Parameter(torch.randn(1)),
    ),
    "a gate as wide as its map": Written(
        lambda s, x: s.d((y := s.c(x)) * torch.sigmoid(s.g).view(1, y.size(1), 1, 1) + s.g.reshape(1, s.g.shape[0], 1, 1)),
        c=conv(3, 24),
        d=conv(24, 2),
        g=nn.Parameter(torch.randn(24)),
    ),
    "a scale that is positive": Written(
        lambda s, x: s.d(s.c(x * F.softplus(s.i)) * (F.softplus(s.g) + 0.1) / s.g.numel()),
        c=conv(3, 24),
        d=conv(24, 2),
        g=nn.Parameter(torch.randn(24, 1, 1)),
        i=nn.Parameter(torch.randn(3, 1, 1)),
    ),
    "one number each": Written(lambda s, x: s.m(x).view(-1, 1).squeeze(1), m=discriminator()),
    "one number each in a row": Written(lambda s, x: s.m(x).view(-1), m=discriminator()),
    "one number each by flatten": Written(lambda s, x: s.m(x).flatten(), m=discriminator()),
    "one number each by squeeze": Written(lambda s, x: s.m(x).squeeze(), m=discriminator()),
    "one number each by size": Written(lambda s, x: s.m(x).view(x.size(0), -1), m=discriminator()),
    "a pool of the map's size": Written(
        lambda s, x: F.avg_pool2d(s.d(F.relu(s.c(x))), 9).squeeze(3).squeeze(2), c=conv(3, 24), d=conv(24, 3)
    ),
    "a pool of the map's size flattened": Written(
        lambda s, x: F.avg_pool2d(s.d(F.relu(s.c(x))), 9).view(x.size(0), -1), c=conv(3, 24), d=conv(24, 3)
    ),
    "a pool to logarithms": Written(
        lambda s, x: F.log_softmax(F.avg_pool2d(s.d(F.relu(s.c(x))), 9).view(-1, 3), 1), c=conv(3, 24), d=conv(24, 3)
    ),
    "a layer without padding after a pool": nn.Sequential(
        conv(3, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 2, 1, padding="valid"), nn.Flatten()
    ),
    "a shortcut padded by channels": Written(padded_shortcut, a=conv(3, 8), b=nn.Conv2d(8, 16, 3, 2, 1), f=nn.Linear(16, 3)),
    "more channels than before": Written(lambda s, x: s.d(F.pad(s.c(x), (1, 1, 1, 1, 0, 4))), c=conv(3, 24), d=conv(28, 2)),
    "a window in the middle": Written(
        lambda s, x: s.d(s.c(x)[:, :, 1:-1, 1:-1] + s.e(x)), c=conv(3, 24), e=nn.Conv2d(3, 24, 3), d=conv(24, 2)
    ),
    "every other place of the image": Written(lambda s, x: s.d(F.relu(s.c(x[..., ::2, ::2]))), c=conv(3, 24), d=conv(24, 2)),
    "a copy that is changed": Written(copied_and_changed, c=conv(3, 8), a=nn.ReLU(True), l=nn.Linear(8, 8), f=nn.Linear(8, 3)),
    "parts beside their sum": Written(ghost, a=conv(3, 24), b=conv(24, 16), c=conv(24, 8), d=conv(24, 2)),
    "a pool of the channels": Written(channel_pool, a=conv(3, 24), b=conv(2, 1), d=conv(24, 2)),
    "a mean of powers": Written(power_mean, a=conv(3, 24), f=nn.Linear(24, 3)),
    "a mean axis by axis": Written(axis_by_axis, a=conv(3, 24), f=nn.Linear(48, 3)),
    "gates": Written(lambda s, x: s.d(F.glu(s.g(s.c(x)), 1)), c=conv(3, 32), g=nn.GLU(1), d=conv(8, 2)),
    "parts in a list": Written(
        lambda s, x: s.d(torch.cat([*(y := list(s.c(x).chunk(2, 1))), y[-1]], 1)), c=conv(3, 24), d=conv(36, 2)
    ),
    "some channels of the image": Written(
        lambda s, x: s.d(s.a(x[:, :2]) + s.b(x[:, 2:]) + s.c(x[:, :1].repeat(1, 3, 1, 1).expand(-1, 3, -1, -1).to(x.dtype))),
        a=conv(2, 24),
        b=conv(1, 24),
        c=conv(3, 24),
        d=conv(24, 2),
    ),
    "logits beside features": Written(
        lambda s, x: (s.g(F.relu(h := s.f(s.c(x).mean((2, 3))))), h), c=conv(3, 24), f=nn.Linear(24, 8), g=nn.Linear(8, 3)
    ),
    "a mask without its axis": Written(lambda s, x: torch.sigmoid(s.d(s.c(x)).squeeze(1)), c=conv(3, 24), d=conv(24, 1)),
    "a result with its channels at the end": Written(lambda s, x: last(s.d(s.c(x))), c=conv(3, 24), d=conv(24, 2)),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("keep", ["channels", "params"])
def test_what_is_found_in_other_peoples_code(name: str, keep: Any) -> None:
    torch.manual_seed(0)
    net, x = copy.deepcopy(FOUND[name]).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    x = x + torch.linspace(0, 3, 9, dtype=torch.float64)  # noise alone has answers that hardly change
    made = convert(net, p4m, keep, weights=keep == "channels", example=x).eval()
    ours, theirs = made(x), net(x)
    if keep == "params":
        assert abs(count(made) / count(net) - 1) < 0.25
        return
    results = [(ours, theirs)] if isinstance(ours, Tensor) else list(zip(ours, theirs, strict=True))
    for i, (y, was) in enumerate(results):
        assert y.shape == was.shape
        answers = []
        for h in range(8):
            e = net(act(p4m, h, x))
            e = e if isinstance(e, Tensor) else e[i]
            if "at the end" in name:
                e = last(act(p4m, p4m.inverse[h], e.permute(0, 3, 1, 2)))
            elif e.ndim == 3:
                e = act(p4m, p4m.inverse[h], e[:, None])[:, 0]
            answers.append(act(p4m, p4m.inverse[h], e) if e.ndim == 4 and "at the end" not in name else e)
        if "mask" in name:
            continue  # a sigmoid after the pool
        torch.testing.assert_close(y, torch.stack(answers).mean(0), rtol=0, atol=1e-10)
    plain = planar(made, example=x)
    for a, b in zip(tree_leaves(plain(x)), tree_leaves(ours), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [n for n in FOUND if n.startswith(("one number", "a pool of the map's", "a pool to log"))])
def test_results_of_one_place_are_checked_when_they_run(name: str) -> None:
    with pytest.raises(ValueError, match=r"^(view|flatten|squeeze)\w*: expected a map of a single place"):
        convert(copy.deepcopy(FOUND[name]), p4m)(torch.randn(2, 3, 19, 19))


def test_a_flattened_result_is_named() -> None:
    with pytest.raises(ValueError, match=r"no linear layer follows; .* \(in Written \(test_convert\.py:\d+\)\)"):
        convert(Written(lambda s, x: s.c(x).flatten(1), c=conv(3, 8)), p4m)
    with pytest.raises(ValueError, match=r"no linear layer follows; .* \(in 1\)"):
        convert(nn.Sequential(conv(3, 8), nn.Flatten()), p4m)


def test_what_is_frozen_stays_frozen_under_other_names() -> None:
    parts: list[nn.Module] = [conv(3, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.InstanceNorm2d(8, affine=True), conv(8, 2)]
    body = nn.Sequential(*parts).requires_grad_(False)
    assert not any(p.requires_grad for p in convert(body, p4, "channels", weights=True).parameters())

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.fc = conv(3, 8), nn.BatchNorm2d(8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.body(x))
            y = torch.relu(y) if y.mean() > -1e9 else y
            out: Tensor = self.fc(y.mean((-2, -1)))
            return out

    net = Branches().requires_grad_(False).train()
    net.norm.eval()
    made = convert(net, p4, "channels", weights=True, example=torch.rand(1, 3, 9, 9))
    assert not any(p.requires_grad for p in made.parameters())
    assert made.training
    assert not made.get_submodule("norm").training


def test_parameters_that_are_not_used_do_not_count() -> None:
    body = nn.Sequential(conv(3, 32), nn.BatchNorm2d(32), nn.ReLU(), conv(32, 32), nn.ReLU())
    net = Written(lambda s, x: s.mine(s.body(x).mean((2, 3))), body=body, mine=nn.Linear(32, 2), classifier=nn.Linear(32, 1000))
    used = count(body) + 32 * 2 + 2
    assert abs(count(convert(net, p4)) / used - 1) < 0.1


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_probabilities_of_pixels_sum_up_to_one(pool: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    for end in (nn.LogSoftmax(1), nn.Softmax(1)):
        far = conv(8, 4)
        nn.init.normal_(far.weight, std=2)
        net = nn.Sequential(conv(3, 8), nn.ReLU(), far, end)
        y = convert(net, p4m, pool=pool, example=x)(x)
        y = y.exp() if isinstance(end, nn.LogSoftmax) else y
        torch.testing.assert_close(y.sum(1), torch.ones(2, 9, 9))


def test_vectors_beside_the_features() -> None:
    torch.manual_seed(0)
    net = WrittenForTwo(
        lambda s, x, m: s.g(F.relu(s.f(torch.cat([s.c(x).mean((2, 3)), m], 1)))),
        c=conv(3, 24),
        f=nn.Linear(29, 16),
        g=nn.Linear(16, 2),
    ).eval()
    x, facts = torch.randn(2, 3, 9, 9), torch.randn(2, 5)
    made = convert(net, p4m, example=(x, facts)).eval()
    assert equivariance_error(lambda t: made(t, facts), p4m, x) < 1e-4
    assert (made(x, facts) - made(x, facts.flip(0))).abs().max() > 1e-4
    mean = convert(net, p4m, keep="channels", weights=True, example=(x, facts))
    each = torch.stack([net(act(p4m, h, x), facts) for h in range(8)])
    torch.testing.assert_close(mean(x, facts), each.mean(0), rtol=1e-5, atol=1e-5)


def test_images_that_meet_before_a_convolution() -> None:
    torch.manual_seed(0)
    net = WrittenForTwo(lambda s, x, m: s.d(F.relu(s.c(x - m))), c=conv(3, 24), d=conv(24, 2)).eval()
    pair = torch.randn(2, 3, 9, 9), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, "channels", weights=True, example=pair)
    each = [act(p4m, p4m.inverse[h], net(*(act(p4m, h, x) for x in pair))) for h in range(8)]
    torch.testing.assert_close(made(*pair), torch.stack(each).mean(0), rtol=1e-5, atol=1e-5)


def test_a_pad_to_the_size_of_another_map_is_exported() -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        wide = s.a(x)
        y = s.b(wide)
        by = wide.size(2) - y.size(2)
        y = F.pad(y, [by // 2, by - by // 2, by // 2, by - by // 2])
        out: Tensor = s.d(torch.cat([wide, y], 1))
        return out

    net, x = Written(forward, a=conv(3, 8), b=nn.Conv2d(8, 8, 3), d=conv(16, 2)).eval(), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m).eval()
    torch.testing.assert_close(planar(made)(x), made(x), rtol=1e-5, atol=1e-6)


class LooksAtSizes(nn.Module):
    """As segmentation networks are written: the size is checked, and a map that does not fit is enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.last = conv(3, 24), nn.Conv2d(24, 24, 3, 2, 1), conv(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, channels, rows, columns = x.shape
        if rows % 4 != 1 or columns % 4 != 1:
            raise RuntimeError(f"expected sides 4 n + 1, got {rows} x {columns}")
        assert channels == 3
        y = torch.relu(self.first(x))
        z = torch.relu(self.down(y))
        if z.shape[-2:] != y.shape[-2:]:
            z = F.interpolate(z, size=y.shape[-2:], mode="bilinear", align_corners=True)
        out: Tensor = self.last(torch.cat([y, z], 1))
        return out


def test_branches_on_sizes_go_the_way_of_the_example() -> None:
    torch.manual_seed(0)
    net, x = LooksAtSizes().eval(), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, "channels", weights=True, example=x)
    each = [act(p4m, p4m.inverse[h], net(act(p4m, h, x))) for h in range(8)]
    torch.testing.assert_close(made(x), torch.stack(each).mean(0), rtol=1e-4, atol=1e-5)
    assert equivariance_error(convert(net, p4m, example=x).eval(), p4m, torch.randn(2, 3, 13, 13)) < 1e-4
    with pytest.raises(ValueError, match=r"torch.fx cannot trace LooksAtSizes"):
        convert(net, p4m)
    with pytest.raises(ValueError, match=r"the network fails on the example .*expected sides 4 n \+ 1, got 8 x 8"):
        convert(net, p4m, example=torch.randn(2, 3, 8, 8))


def reduced_before_a_change(net: Any, x: Tensor) -> Tensor:
    y = net.c(x)
    a, b = y.mean(3), y.max(2)[0]
    y = net.r(y)
    found: Tensor = net.f(a.mean(2) + b.max(2)[0] + y.mean((2, 3)))
    return found


def dropped_and_changed(net: Any, x: Tensor) -> Tensor:
    y = net.c(x)
    a, b = y.chunk(2, 1)
    a = net.o(a).to(x.dtype).contiguous()
    a += 1
    z = last(y).contiguous()
    w = z.permute(0, 3, 1, 2).contiguous()
    w += 1
    found: Tensor = net.d(y + torch.cat([a, b], 1) + w * 2 + z.permute(0, 3, 1, 2))
    return found


def flattened_and_changed(net: Any, x: Tensor) -> Tensor:
    y = last(net.c(x)).contiguous().permute(0, 3, 1, 2)
    z = y.flatten(1)  # a copy, since channels lie at the end
    y += 1
    found: Tensor = net.f(z) + net.g(y.mean((2, 3)))
    return found


CHANGING = {
    "a copy by a flatten": Written(flattened_and_changed, c=conv(3, 8), f=nn.Linear(8 * 81, 2), g=nn.Linear(8, 2)),
    "means before a change": Written(reduced_before_a_change, c=conv(3, 8), r=nn.ReLU(True), f=nn.Linear(8, 2)),
    "copies of several kinds": Written(dropped_and_changed, c=conv(3, 8), o=nn.Dropout(0.5), d=conv(8, 2)),
    "a learned power": Written(
        lambda s, x: s.f(F.avg_pool2d((y := F.relu(s.c(x)) + 1).pow(s.p), (y.size(-2), y.size(-1))).flatten(1)),
        c=conv(3, 8),
        f=nn.Linear(8, 2),
        p=nn.Parameter(torch.tensor(3.0)),
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_changes_in_place_meet_what_they_met(name: str) -> None:
    torch.manual_seed(0)
    net, x = copy.deepcopy(CHANGING[name]).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    made = convert(net, p4m, "channels", weights=True, example=x)
    each = [net(act(p4m, h, x)) for h in range(8)]
    mean = torch.stack([act(p4m, p4m.inverse[h], e) if e.ndim == 4 else e for h, e in enumerate(each)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=0, atol=1e-10)


def changed_in_channels_last(s: Any, x: Tensor) -> Tensor:
    y = s.c(x)
    y = s.d(last(y).contiguous().permute(0, 3, 1, 2))  # its result lies as what it gets
    t = last(y).contiguous()
    t += 1
    return s.f((y + t.permute(0, 3, 1, 2)).mean((2, 3)))


def changed_after_a_format(s: Any, x: Tensor) -> Tensor:
    y = s.c(x)
    t = y.to(memory_format=torch.channels_last)
    t += 1
    return s.f((y + t).mean((2, 3)))


def changed_after_an_image(s: Any, x: Tensor) -> Tensor:
    y = s.c(x.contiguous(memory_format=torch.channels_last))
    t = y.contiguous()
    t.mul_(2)
    return s.f((y + t).mean((2, 3)))


def changed_with_nobody_looking(s: Any, x: Tensor) -> Tensor:
    y = s.d(last(s.c(x)).contiguous().permute(0, 3, 1, 2))
    t = last(y).contiguous()
    t += 1
    return s.f(F.relu(t).mean((1, 2)))


@pytest.mark.parametrize("forward", [changed_in_channels_last, changed_after_a_format, changed_after_an_image])
def test_copies_of_which_nobody_knows_are_refused_before_changes(forward: Any) -> None:
    net = Written(forward, c=conv(3, 8), d=conv(8, 8), f=nn.Linear(8, 2))
    words = (
        r"which may be a copy or not, before a change in place, .*clone\(\) in its place.*\(in Written \(test_convert\.py:\d+\)\)"
    )
    with pytest.raises(ValueError, match=words):
        convert(net, p4m)


def test_copies_of_which_nobody_knows_are_taken_where_nothing_tells() -> None:
    torch.manual_seed(0)
    net, x = Written(changed_with_nobody_looking, c=conv(3, 8), d=conv(8, 8), f=nn.Linear(8, 2)).eval(), torch.randn(2, 3, 9, 9)
    made = convert(net, p4m, "channels", weights=True, example=x)
    mean = torch.stack([net(act(p4m, h, x)) for h in range(8)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(planar(made.eval())(x), mean, rtol=1e-4, atol=1e-5)


def test_widths_that_must_add_up_are_refused_where_they_cannot() -> None:
    net = Written(ghost, a=conv(3, 20), b=conv(20, 14), c=conv(20, 6), d=conv(20, 2))
    with pytest.raises(ValueError, match=r"shrink by one fraction, in parts of 1/2, and none has about 4542 parameters"):
        convert(net, p4m)
    with pytest.raises(ValueError, match=r"in parts of 1/2, and none is near 0.125; use keep"):
        convert(net, p4m, "cost")


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.d(torch.special.i0(s.c(x))) if x.shape[2] % 3 == 0 else x,  # a function that is not known
        lambda s, x: torch.cat(list(s.d(s.c(x)).chunk(3, 1)), 1),  # two parts, not three
    ],
)
def test_what_looks_at_sizes_can_still_have_its_modules_replaced(forward: Any) -> None:
    torch.manual_seed(0)
    net, x = Written(forward, c=conv(3, 8), d=conv(8, 4)).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    made = convert(net, p4m, "channels", weights=True, example=x)
    mean = torch.stack([act(p4m, p4m.inverse[h], net(act(p4m, h, x))) for h in range(8)]).mean(0)
    torch.testing.assert_close(made.eval()(x), mean, rtol=0, atol=1e-10)


def test_results_that_are_not_all_tensors() -> None:
    x = torch.randn(2, 3, 9, 9)
    for how in (
        lambda s, x: (s.d(s.c(x)), None),
        lambda s, x: {"n": 3, "y": last(s.d(s.c(x)))},
        lambda s, x: (True, s.d(s.c(x)), x.shape[2]),
    ):
        made = convert(Written(how, c=conv(3, 8), d=conv(8, 2)), p4m, example=x)
        assert len(made(x)) == len(how(Written(how, c=conv(3, 8), d=conv(8, 2)), x))


def test_work_on_features_that_are_learned_from() -> None:
    x = torch.randn(2, 3, 9, 9)
    net = Written(
        lambda s, x: (s.g(F.relu(h := s.f(s.c(x).mean((2, 3))))), h.argmax(1), (h**2).sum(1)),
        c=conv(3, 24),
        f=nn.Linear(24, 8),
        g=nn.Linear(8, 3),
    )
    made = convert(net, p4m).eval()
    assert equivariance_error(lambda t: made(t)[0], p4m, x) < 1e-4
    assert equivariance_error(lambda t: made(t)[2], p4m, x) < 1e-4


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda s, x: s.d(s.c(x)).squeeze(1).transpose(1, 2), r"a call after a squeeze\(1\), cannot"),
        (lambda s, x: s.f(F.relu(s.c(x).mean(3).mean(-2, keepdim=True)).mean(2)), r"a mean over axes 3, cannot"),
    ],
)
def test_axes_that_would_be_mixed_up(forward: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(Written(forward, c=conv(3, 8), d=conv(8, 1), f=nn.Linear(1, 2)), p4m)


def test_vectors_beside_a_network_that_cannot_be_traced() -> None:
    torch.manual_seed(0)
    net = WrittenForTwo(
        lambda s, x, m: s.f((y.relu() if (y := s.c(x)).mean() > -1e9 else y).mean((-2, -1))) * s.e(m).sum(),
        c=conv(3, 8),
        e=nn.Embedding(9, 4),
        f=nn.Linear(8, 2),
    ).eval()
    x, facts = torch.randn(2, 3, 9, 9), torch.tensor([1, 7])
    made = convert(net, p4m, "channels", weights=True, example=(x, facts))
    each = torch.stack([net(act(p4m, h, x), facts) for h in range(8)])
    torch.testing.assert_close(made(x, facts), each.mean(0), rtol=1e-4, atol=1e-5)


class Looks(Written):
    """It looks at the numbers, so that its modules are replaced."""

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x if float(x.mean()) < 1e9 else -x)


class TakesAnyNumber(Written):
    def forward(self, *images: Tensor) -> Any:
        return self.how(self, *images)


def test_modules_of_several_names_and_slopes_of_channels_are_replaced() -> None:
    torch.manual_seed(0)
    again, x = conv(8, 8), torch.randn(2, 3, 9, 9)
    net = Looks(
        lambda s, x: s.f(s.e(s.p(s.d(s.c(x)))).mean((-2, -1))), c=conv(3, 8), d=again, e=again, p=nn.PReLU(8), f=nn.Linear(8, 2)
    ).eval()
    made = convert(net, p4m, "channels", weights=True, example=x)
    mean = torch.stack([net(act(p4m, h, x)) for h in range(8)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=1e-4, atol=1e-5)
    assert made.get_submodule("d") is made.get_submodule("e")
    assert equivariance_error(convert(net, p4m, example=x).eval(), p4m, x) < 1e-4


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "net",
    [
        Looks(lambda s, x: s.f(s.c(x).mean((-2, -1))), f=nn.Linear(32, 2), c=conv(3, 32)),
        Looks(lambda s, x: s.f(s.c(x).mean((-2, -1))), c=conv(3, 32), f=nn.Linear(32, 2), aux=nn.Linear(32, 5)),
        Looks(lambda s, x: s.f(F.relu(s.d(s.c(x)))), c=conv(3, 32), f=conv(32, 6, 1), d=conv(32, 32)),
        Looks(lambda s, x: s.f(F.relu(s.c(x))).sigmoid_(), c=conv(3, 32), f=conv(32, 6, 1), aux=conv(32, 6, 1)),
    ],
)
def test_heads_are_those_that_make_the_results_where_modules_are_replaced(net: Looks, weights: bool) -> None:
    torch.manual_seed(0)
    net, x = net.eval(), torch.randn(2, 3, 9, 9)
    if weights and "sigmoid_" not in net.how.__code__.co_names:
        made = convert(net, p4m, "channels", weights=True, example=x)
        answers = [net(act(p4m, h, x)) for h in range(8)]
        back = [act(p4m, p4m.inverse[h], y) if y.ndim > 2 else y for h, y in enumerate(answers)]
        torch.testing.assert_close(made(x), torch.stack(back).mean(0), rtol=1e-4, atol=1e-5)
    made = convert(net, p4m, example=x).eval()
    assert made(x).shape == net(x).shape
    assert equivariance_error(made, p4m, x) < 1e-4
    assert sum(m.out_channels < 32 for m in made.modules() if isinstance(m, LiftConv)) == 1  # others are narrower


def test_the_head_of_a_branch_that_the_example_does_not_take_keeps_its_classes() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.c(x).mean((-2, -1))
        return s.f(y) if float(x.mean()) < 1 else s.g(y)

    net, x = Written(forward, c=conv(3, 32), g=nn.Linear(32, 5), f=nn.Linear(32, 5)), torch.rand(2, 3, 9, 9)
    made = convert(net, p4, example=x)
    assert made(x).shape == made(x + 2).shape == (2, 5)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (
            Looks(lambda s, x: s.f(s.c(x).mean((-2, -1))).detach(), f=nn.Linear(8, 2), c=conv(3, 8)),
            r"it fails: .*\(f stayed as before: the layer registered last, c, is taken for the head: register the head last\)",
        ),
        (
            Looks(lambda s, x: s.f(s.d(s.c(x))).detach(), c=conv(3, 32), f=conv(32, 6, 1), d=conv(32, 32)),
            r"expected input .* \(the layer registered last, d, is taken for the head: register the head last\)",
        ),
        (
            Looks(lambda s, x: s.f(s.c(x)).detach(), c=conv(3, 32), f=conv(32, 6, 1), aux=conv(32, 6, 1)),
            r"returns \(2, 6, 9, 9\), and the converted one \(2, \d, 9, 9\) \(the layer registered last, aux, is taken for",
        ),
        (
            Looks(lambda s, x: s.f(s.d(s.c(x))), c=conv(3, 32), d=conv(32, 6, 1), f=conv(6, 6, groups=6)),
            r"and the converted one \(2, \d, 9, 9\) \(taken for heads, since they make the results on the example: f\)",
        ),
    ],
)
def test_classes_are_not_lost_where_the_head_is_not_known(net: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(net, p4m, example=torch.randn(2, 3, 9, 9))


class Conv3DSimple(nn.Conv3d):
    """As torchvision's r3d_18 has it."""

    @staticmethod
    def get_downsample_stride(stride: int) -> tuple[int, int, int]:
        return stride, stride, stride


class Doubled(nn.Conv3d):
    def _conv_forward(self, *args: Any) -> Tensor:
        return 2 * super()._conv_forward(*args)


def test_layers_with_new_methods_are_those_of_torch() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(Conv3DSimple(1, 4, 3), nn.ReLU(), Conv3DSimple(4, 2, 3)).double(), torch.randn(1, 1, 7, 7, 7).double()
    made = convert(net, Oh, "channels", weights=True, example=x)
    mean = torch.stack([act(Oh, Oh.inverse[h], net(act(Oh, h, x))) for h in range(48)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"a call of conv3d, .* use a layer, nn.Conv3d; filters of your own"):
        convert(nn.Sequential(Doubled(1, 4, 3)), Oh)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.d(torch.cat([(y := s.c(x))[:, 4:], y[:, :4]], axis=1)),  # type: ignore[call-arg]
        lambda s, x: s.d(torch.cat(s.c(x).chunk(2, 1), 1)),
        lambda s, x: s.d(torch.cat(tensors=torch.split(s.c(x), 4, dim=1), dim=1)),
        lambda s, x: s.d(torch.cat(torch.chunk(s.c(x), chunks=2, axis=1), axis=-3)),  # type: ignore[call-arg]
        lambda s, x: s.d(s.c(x).amax(axis=(2, 3), keepdims=True)),
    ],
)
def test_parts_are_concatenated_along_an_axis_of_either_name(forward: Any) -> None:
    torch.manual_seed(0)
    net, x = Written(forward, c=conv(3, 8), d=conv(8, 2)).double(), torch.randn(2, 3, 9, 9).double()
    made = convert(net, p4m, "channels", weights=True)
    mean = torch.stack([act(p4m, p4m.inverse[h], net(act(p4m, h, x))) for h in range(8)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=0, atol=1e-10)


def test_images_in_place_of_lists_are_not_concatenated() -> None:
    with pytest.raises(ValueError, match=r"a call of cat, cannot be made equivariant on a map"):
        convert(Written(lambda s, x: torch.cat(s.c(x), 0), c=conv(3, 8)), p4)


@pytest.mark.parametrize("how", [nn.AdaptiveAvgPool2d((3, 3)), lambda y: F.adaptive_avg_pool2d(y, 3)])
def test_hexagons_are_not_pooled_to_boxes(how: Any) -> None:
    net = Written(lambda s, x: s.f(s.how_(s.c(x)).flatten(1)), c=conv(3, 8), f=nn.Linear(72, 4), how_=how)
    match = r"(how_|adaptive_avg_pool2d), an adaptive pool to \(3, 3\) cells, .* pool to 1, or take a group of the square lattice"
    with pytest.raises(ValueError, match=match):
        convert(net, p6m)
    convert(net, p4m)


def assigns(s: Any, x: Tensor) -> Tensor:
    y: Tensor = s.c(x)
    y[y < 0] = 0
    return y


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda s, x: F.normalize(s.c(x), dim=(2, 3)), r"a normalize along axis \(2, 3\), cannot .* axis 1 \(in "),  # type: ignore[arg-type]
        (assigns, r"cannot trace Written: Written \(test_convert.py:\d+\) assigns to a part of a tensor, .* F.relu or clamp"),
        (
            lambda s, x: F.linear(s.c(x).mean((2, 3)), s.f.weight, s.f.bias),
            r"a call of linear, .* use a layer, nn.Linear; .* \(in Written \(test_convert.py:\d+\)\)",
        ),
    ],
)
def test_calls_that_are_not_known_name_the_way_out(forward: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(Written(forward, c=conv(3, 8), f=nn.Linear(8, 2)), p4)


def test_assignments_are_kept_where_modules_are_replaced() -> None:
    x = torch.randn(2, 3, 9, 9)
    made = convert(Written(assigns, c=conv(3, 8)), p4, example=x)
    assert equivariance_error(made.eval(), p4, x) < 1e-4


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"keep": "channels", "weights": "no_such_file.pt"}, TypeError, r"weights must be True or False, got 'no_such_file.pt'"),
        (
            {"example": torch.zeros(1, 3, 9, 9, dtype=torch.uint8)},
            ValueError,
            r"of floating-point numbers, got \(1, 3, 9, 9\) of torch.uint8; use example.float\(\)",
        ),
        ({"example": [torch.zeros(1, 3, 9, 9)]}, TypeError, r"a tensor, or a tuple of tensors for several inputs, got list$"),
        ({"example": (torch.zeros(1, 3, 9, 9), 3)}, TypeError, r"several inputs, got a tuple with int$"),
    ],
)
def test_what_options_were_expected(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        convert(nn.Sequential(conv(3, 8)), p4, **options)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (
            Written(lambda s, x: s.f(s.c(x).mean((2, 3)).view(len(x), -1)), c=conv(3, 8), f=nn.Linear(8, 2)),
            r"cannot trace Written: len\(x\) .*write x\.size\(0\) \(in Written \(test_convert\.py:\d+\)\)",
        ),
        (TakesAnyNumber(lambda s, x: s.c(x), c=conv(3, 8)), r"its forward takes \*images, .*forward\(self, x, y\)"),
        (
            nn.Sequential(conv(3, 8), nn.Conv2d(8, 8, (1, 7), padding=(0, 3))),
            r"1 \(Conv2d.*kernel_size \(=\(1, 7\)\) is not equal .* use \(7, 7\), padded alike, or .*: p2, pm or pmm",
        ),
        (
            Written(lambda s, x: F.max_pool2d(s.c(x), 2, ceil_mode=True), c=conv(3, 8)),
            r"^convert: max_pool2d uses ceil_mode, .*leave it out",
        ),
    ],
)
def test_errors_say_what_to_write(net: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(net, p4)


def test_networks_move_after_they_were_converted() -> None:
    net = Written(
        lambda s, x: s.d(s.c(x.to(s.c.weight.device)).to(memory_format=torch.channels_last)), c=conv(3, 8), d=conv(8, 2)
    )
    made = convert(net, p4)
    assert made(torch.randn(1, 3, 9, 9)).shape == (1, 2, 9, 9)
    assert made.to("meta")(torch.empty(1, 3, 9, 9, device="meta")).shape == (1, 2, 9, 9)


class Around(nn.Module):
    """Two convolutions and a head, with what `forward` does between them."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor], **numbers: Tensor) -> None:
        super().__init__()
        self.how, self.norm = how, nn.BatchNorm2d(8)
        self.one, self.two, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        for name, held in numbers.items():
            setattr(self, name, nn.Parameter(held))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)

    def head(self, y: Tensor) -> Tensor:
        found: Tensor = self.fc(self.two(y).mean((2, 3)))
        return found


def changed_copy(net: Any, x: Tensor) -> Tensor:
    w = net.t.clone()
    w.mul_(3)
    return net.head(net.one(x) * w)


def repeated_function(net: Any, x: Tensor) -> Tensor:
    w = net.w
    for _ in range(12):
        w = torch.tanh(w * net.v + w)
    return net.head(net.one(x) * w.view(-1, 1, 1))


def other_dtype(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    return net.head(y * net.w.to(y.dtype).view(-1, 1, 1) * net.t.to(y.device).exp())


def changed_window(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    part = y[:, :, 1:-1, 1:-1]
    part *= 5
    return net.head(y)


def norm_by_a_call(net: Any, x: Tensor) -> Tensor:
    return net.head(F.group_norm(net.one(x), 4, net.w))


def changed_by_a_parameter(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    y += net.w.view(1, -1, 1, 1)
    return net.head(y.mul_(net.v.view(1, -1, 1, 1)))


def a_size_first(net: Any, x: Tensor) -> Tensor:
    n: Any = x.shape[2]
    n *= net.one(x)
    return net.head(n)


def pure_functions(net: Any, x: Tensor) -> Tensor:
    w = torch.where(net.w > 0.5, net.w, 2 * net.w).clamp_min(0.1)
    return net.head(net.one(x) * w.view(1, -1, 1, 1) * (net.v.std() + net.v.max() + net.v.logsumexp(0)))


def as_the_layer(net: Any, x: Tensor) -> Tensor:
    y = F.adaptive_avg_pool2d(net.two(net.one(x.to(net.one.weight.dtype))), 1)
    found: Tensor = net.fc(y.view(x.mean((2, 3)).shape[0], -1))
    return found


@pytest.mark.parametrize(
    "how",
    [
        *(changed_copy, repeated_function, other_dtype, changed_window, norm_by_a_call),
        *(changed_by_a_parameter, a_size_first, pure_functions, as_the_layer),
    ],
)
def test_functions_of_parameters_and_changes_in_place(how: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    old, x = Around(how, t=torch.rand(1) + 1, w=torch.rand(8), v=torch.rand(8)).eval(), torch.randn(2, 3, 8, 8)
    new = convert(old, p4, keep="channels", weights=True)
    mean = torch.stack([old(act(p4, h, x)) for h in range(4)]).mean(0)
    torch.testing.assert_close(new(x), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pickle.loads(pickle.dumps(new))(x), new(x))
    torch.testing.assert_close(planar(new)(x), new(x), rtol=1e-5, atol=1e-6)
    assert len(str(new.code)) < 10_000  # each function once
    keep: Any = "channels" if how is pure_functions else "params"  # some are not number by number
    assert equivariance_error(convert(old, p4, keep=keep).eval(), p4, x) < 1e-4


def test_a_number_a_channel_meets_a_result_with_channels_at_the_end() -> None:
    def unit(net: Any, x: Tensor) -> Tensor:
        return F.normalize(net.one(x).permute(0, 2, 3, 1), dim=-1) * net.w

    old = Around(unit, w=torch.rand(8) + 1).eval()
    y = convert(old, p4, keep="channels", weights=True)(torch.randn(2, 3, 8, 8))  # as many pixels as channels
    torch.testing.assert_close((y / old.w).norm(dim=-1), torch.ones(2, 8, 8))


def in_place_function(net: Any, x: Tensor) -> Tensor:
    w = net.w * 1
    F.relu(w, inplace=True)
    return net.head(net.one(x) * w.view(-1, 1, 1))


def view_before_a_change(net: Any, x: Tensor) -> Tensor:
    w = net.w.clone()
    view = w.view(-1, 1, 1)
    w.exp_()
    return net.head(net.one(x) * view)


def gumbel(net: Any, x: Tensor) -> Tensor:
    w, y = F.gumbel_softmax(net.w, dim=0, hard=True), net.one(x)
    return net.head(w[0] * y + w[1] * y)


def copied_window(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    part = y[:, :, 1:-1, 1:-1].flatten(2)
    part.relu_()
    return net.fc(y.mean((2, 3)) + part.mean(2))


def changed_places(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    y[:, :, ::2, ::2].neg_()
    return net.head(y)


def two_norms_of_one(net: Any, x: Tensor) -> Tensor:
    return net.head(F.group_norm(F.group_norm(net.one(x), 4, net.w), 4, net.w))


def norm_before_itself(net: Any, x: Tensor) -> Tensor:
    return net.head(net.norm(net.one(x) * net.norm.weight.sigmoid().view(-1, 1, 1)))


def pairs(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net.one(x).mean((2, 3)).view(x.shape[0] // 2, -1)
    return found


def one_batch(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    return net.fc(y.view(1, y.shape[1], -1).mean(-1))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (in_place_function, "something that is no map"),
        (view_before_a_change, "something that is no map"),
        (gumbel, "something that is no map"),
        (copied_window, "may be a copy or not, before a change in place"),
        (changed_places, "of which a part is changed in place"),
        (two_norms_of_one, "w is given to a norm by a call and used elsewhere"),
        (norm_before_itself, r"norm\.weight is used before its layer"),
        (pairs, "the batch stays"),
        (one_batch, "the batch stays"),
    ],
)
def test_changes_draws_and_batches_that_would_be_misread(how: Callable[[Any, Tensor], Tensor], words: str) -> None:
    old = Around(how, w=torch.rand(8))
    with pytest.raises(ValueError, match=words):
        convert(old, p6m if how is changed_places else p4, keep="channels")


# --- all of space, on hexagonal lattices ---------------------------------------------------------------------------------------

OVER_SPACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mean": (lambda y: y.mean((2, 3)), lambda z: z.mean(-1)),
    "pool": (lambda y: F.adaptive_avg_pool2d(y, 1).flatten(1), lambda z: z.mean(-1)),
    "largest": (lambda y: y.amax((2, 3)), lambda z: z.amax(-1)),
    "largest by a pool": (lambda y: F.adaptive_max_pool2d(y, 1).flatten(1), lambda z: z.amax(-1)),
    "largest of a line": (lambda y: y.flatten(2).max(2)[0], lambda z: z.amax(-1)),
    "smallest": (lambda y: y.neg().amin((2, 3)), lambda z: z.neg().amin(-1)),
    "sum": (lambda y: torch.sigmoid(y).sum((2, 3)), lambda z: torch.sigmoid(z).sum(-1)),
    "length": (lambda y: torch.sigmoid(y).norm(2, (2, 3)), lambda z: torch.sigmoid(z).norm(2, -1)),
    "logarithm": (lambda y: y.logsumexp((2, 3)), lambda z: z.logsumexp(-1)),
    "variance": (lambda y: y.var((2, 3), unbiased=False), lambda z: z.var(-1, unbiased=False)),
    "spread": (lambda y: torch.std(y, (2, 3), correction=0), lambda z: z.std(-1, unbiased=False)),
    "unbiased": (lambda y: y.std((2, 3)), lambda z: z.std(-1)),
    "unbiased, of channels too": (lambda y: y - y.var((1, 2, 3), keepdim=True), lambda z: z - z.var((1, 3), keepdim=True)),
    "of channels too": (
        lambda y: y - y.mean((1, 2, 3), keepdim=True).mean((2, 3), keepdim=True),
        lambda z: z - z.mean((1, 3), keepdim=True),
    ),
}


@pytest.mark.parametrize("name", OVER_SPACE)
def test_hexagons_are_all_of_space(name: str) -> None:
    how, expected = OVER_SPACE[name]
    torch.manual_seed(0)
    net: Any = convert(Written(lambda s, x: how(s.c(x)), c=conv(3, 8)).double(), p6m, keep="channels", pool=None).eval()
    with torch.no_grad():
        net.get_submodule("c").bias.fill_(-5.0)  # so that the zeros outside would be the largest
    x = image(p6m, channels=3, size=9)
    inside = domain_mask(p6m, (9, 9), x.device)
    y = net(x)
    seen = y[..., inside] if y.shape[-2:] == (9, 9) else y.flatten(2)
    torch.testing.assert_close(seen, expected(net.c(x)[..., inside]))
    torch.testing.assert_close(planar(net)(x), y)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8), nn.GroupNorm(8, 8, affine=False)])
def test_norms_of_samples_see_hexagons(norm: Any) -> None:
    torch.manual_seed(0)
    net: Any = convert(nn.Sequential(conv(3, 8), norm).double(), p6m, keep="channels", pool=None).eval()
    made: Any = net.get_submodule("1").module
    with torch.no_grad():
        net.get_submodule("0").bias.fill_(-5.0)
        for p in made.parameters():
            p.copy_(torch.randn(8))
    x = image(p6m, channels=3, size=9)
    inside = domain_mask(p6m, (9, 9), x.device)
    y = net(x)
    z = net.get_submodule("0")(x)[..., inside].transpose(1, 2).flatten(0, 1)  # (N S, K, cells)
    torch.testing.assert_close(y[..., inside].transpose(1, 2).flatten(0, 1), made(z))
    assert y[..., ~inside].abs().max() == 0
    torch.testing.assert_close(planar(net)(x), y)
    assert equivariance_error(net, p6m, x) < 1e-10


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda y: y.norm(-1, (2, 3)), "a norm over space, .* that zeros do not change"),
        (lambda y: F.interpolate(y, size=(17, 17)), "an interpolate to a size, .* give a whole scale_factor"),
    ],
)
def test_what_hexagons_do_not_have(how: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(Written(lambda s, x: how(s.c(x)), c=conv(3, 8)), p6)


# --- sizes that turn, results with names, threads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [lambda x: x.shape[-2:], lambda x: x.shape[2:], lambda x: x.size()[2:], lambda x: (x.size(2), x.shape[3])],
    ids=["shape", "space", "size()", "axes"],
)
def test_maps_are_enlarged_to_images_that_are_not_square(size: Any) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.interpolate(net.d(F.relu(net.c(x))), size=size(x), mode="bilinear", align_corners=False)

    x = torch.rand(1, 3, 17, 25, dtype=torch.float64)
    net = convert(Written(forward, c=nn.Conv2d(3, 8, 3, 2, 1), d=conv(8, 2)).double(), p4m, example=x).eval()
    assert net(x).shape == (1, 2, 17, 25)
    assert equivariance_error(net, p4m, x) < 1e-10
    torch.testing.assert_close(planar(net)(x), net(x))


def test_sizes_that_do_not_turn_are_refused() -> None:
    layers: dict[str, Any] = {"c": nn.Conv2d(3, 8, 3, 2, 1)}
    fixed = Written(lambda s, x: F.interpolate(s.c(x), size=(16, 24), mode="bilinear"), **layers)
    with pytest.raises(
        ValueError, match=r"an interpolate, .* size \(=\(16, 24\)\) must be equal along axes \(0, 1\), which p4 mixes"
    ):
        convert(fixed, p4)
    crossed = Written(lambda s, x: F.interpolate(s.c(x), size=(x.size(3), x.size(2)), mode="bilinear"), **layers)
    with pytest.raises(ValueError, match=r"size \(=\(25, 17\)\) must be equal"):
        convert(crossed, p4)(torch.rand(1, 3, 17, 25))


class Pair(NamedTuple):
    answers: Tensor
    features: Tensor


@dataclass
class Found:
    answers: Tensor
    features: Tensor


class PairWithAMethod(Pair):
    def best(self) -> Tensor:
        return self.answers.argmax(1)


@pytest.mark.parametrize(
    "kind", [Pair, Found, PairWithAMethod, namedtuple("Made", ["answers", "features", "more"], defaults=[None])]
)
def test_results_with_names_keep_them(kind: Any) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        features = net.c(x)
        return kind(net.d(F.relu(features)), features=features)

    x = image(p4, channels=3, size=9, dtype=torch.float32)
    net = convert(Written(forward, c=conv(3, 8), d=conv(8, 2)), p4, example=x).eval()
    y = net(x)
    assert isinstance(y, kind)
    torch.testing.assert_close(planar(net)(x).answers, y.answers)
    for name in ("answers", "features"):
        assert equivariance_error(Written(lambda s, x, of=name: getattr(s.net(x), of), net=net), p4, x) < 1e-4


def test_networks_are_converted_by_several_threads() -> None:
    failed: list[BaseException] = []
    net = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 2))

    def work() -> None:
        try:
            for _ in range(4):
                planar(convert(net, p4))
        except ValueError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with torch.autocast("cpu"):  # it is torch's own again
        assert conv(3, 8)(torch.rand(1, 3, 5, 5)).dtype == torch.bfloat16


def test_examples_need_numbers() -> None:
    with torch.device("meta"):
        net = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 2))
    assert next(convert(net, p4).parameters()).is_meta
    with pytest.raises(ValueError, match="on the meta device, where no example can be tried"):
        convert(net, p4, example=torch.rand(1, 3, 9, 9))


@pytest.mark.parametrize("name", ["C3", "C6", "D3h", "D6h"])
@pytest.mark.parametrize(
    "how", [lambda s, x: s.n(s.c(x)), lambda s, x: s.c(x).std((2, 3, 4)), lambda s, x: s.c(x).flatten(2).norm(dim=2)]
)
def test_prisms_of_hexagons_are_all_of_space(name: str, how: Any) -> None:
    group = GROUPS[name]
    torch.manual_seed(0)
    parts = {"c": nn.Conv3d(2, 4, 3, padding=1), "n": nn.GroupNorm(2, 4)}
    net: Any = convert(Written(how, **parts).double(), group, keep="channels", pool=None).eval()
    x = image(group, channels=2, size=5)
    inside, y = domain_mask(group, x.shape[2:], x.device), net(x)
    z = net.c(x)[..., inside]
    if y.ndim == 3:
        torch.testing.assert_close(y, z.std(-1) if "std" in how.__code__.co_names else z.norm(dim=-1))
    else:
        expected = F.group_norm(z.transpose(1, 2).flatten(0, 1), 2).unflatten(0, (len(x), -1)).transpose(1, 2)
        torch.testing.assert_close(y[..., inside], expected)
    torch.testing.assert_close(planar(net)(x), y)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.BatchNorm2d(3)])
def test_norms_of_images_see_hexagons(norm: nn.Module) -> None:
    torch.manual_seed(0)
    net = convert(nn.Sequential(norm, conv(3, 8)).double(), p6m).train()
    x = image(p6m, channels=3, size=9)
    junk = torch.where(domain_mask(p6m, (9, 9), x.device), x, torch.randn_like(x))
    torch.testing.assert_close(net(junk), net(x))
    net.eval()
    torch.testing.assert_close(planar(net, example=x)(junk), net(x))
    torch.testing.assert_close(planar(net)(junk), net(x))
    assert equivariance_error(net, p6m, x) < 1e-10


def test_spreads_of_hexagons_in_half_precision_and_of_blank_images() -> None:
    net = convert(Written(lambda s, x: s.f(s.c(x).std((2, 3))), c=conv(1, 8, bias=False), f=nn.Linear(8, 2)), p6, keep="channels")
    for each in (net, planar(net)):
        each(torch.zeros(1, 1, 9, 9)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in each.parameters())
    large = convert(Written(lambda s, x: s.c(x).var((2, 3)), c=conv(1, 8)), p6, keep="channels").half().eval()
    x = 150 * image(p6, channels=1, size=33, dtype=torch.float32).half()
    y = large(x)
    assert y.isfinite().all()
    torch.testing.assert_close(planar(large)(x), y, rtol=1e-2, atol=1e-2)


@dataclass
class Scaled:
    answers: Tensor

    def __post_init__(self) -> None:
        self.answers = 2 * self.answers


class PairWithMore(Pair):
    def __new__(cls, answers: Tensor, features: Tensor) -> PairWithMore:
        return super().__new__(cls, 2 * answers, features)


@dataclass
class ScaledByHand:
    answers: Tensor

    def __init__(self, answers: Tensor) -> None:
        self.answers = 2 * answers


@pytest.mark.parametrize("kind", [Scaled, ScaledByHand, PairWithMore])
def test_results_that_compute_are_refused(kind: Any) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        y = net.c(x)
        return kind(y, y) if kind is PairWithMore else kind(y)

    with pytest.raises(ValueError, match=f"a {kind.__name__}, .* computes fields when it is made, which would be done twice"):
        convert(Written(forward, c=conv(3, 8)), p4)


@pytest.mark.parametrize("kind", [Found, Pair])
def test_results_with_names_are_checked_on_the_example(kind: Any) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        y = net.d(F.relu(net.c(x)))
        return kind(y.mean((2, 3)), y)

    with pytest.raises(ValueError, match="is not equivariant"):
        convert(Written(forward, c=conv(3, 8), d=nn.Conv2d(8, 8, 3, 2, 1)), p4, example=torch.rand(1, 3, 8, 8))


def test_heads_beside_maps_stay_heads() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        y = F.relu(net.c(x))
        return {"boxes": net.b(y), "class": net.f(y.mean((2, 3)))}

    made = convert(Written(forward, c=conv(3, 8), b=conv(8, 4), f=nn.Linear(8, 5)), p4m)
    assert type(made.get_submodule("f")) is nn.Linear

    def named(net: Any, x: Tensor) -> Any:
        y = F.relu(net.c(x))
        return Pair(net.f(y.mean((2, 3))), net.m(y).squeeze(1))

    cast = convert(Written(lambda s, x: s.f(s.c(x).mean((2, 3))).to(s.c(x)), c=conv(3, 8), f=nn.Linear(8, 5)), p4m)
    assert type(cast.get_submodule("f")) is nn.Linear
    made = convert(Written(named, c=conv(3, 8), m=conv(8, 1), f=nn.Linear(8, 5)), p4m)
    assert type(made.get_submodule("f")) is nn.Linear
    assert made(torch.rand(2, 3, 9, 9)).features.shape == (2, 9, 9)


def test_norms_of_vectors_on_a_line() -> None:
    torch.manual_seed(0)
    parts = {"c": nn.Conv1d(1, 4, 3), "n": nn.GroupNorm(2, 4), "f": nn.Linear(4, 3)}
    net = Written(lambda s, x: s.f(F.relu(s.n(F.relu(s.c(x)).mean(2)))), **parts).double().eval()
    made, x = convert(net, linem, keep="channels", weights=True).eval(), torch.randn(2, 1, 9, dtype=torch.float64)
    mean = torch.stack([net(act(linem, h, x)) for h in range(2)]).mean(0)
    torch.testing.assert_close(made(x), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(planar(made, example=x)(x), mean, rtol=0, atol=1e-12)


# --- what a review and a newcomer found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        lambda y: (y - 5).amax((2, 3)),  # so that zeros from outside would be the largest
        lambda y: (y + 5).amin((2, 3)),
        lambda y: y.logsumexp((2, 3)),
        lambda y: F.adaptive_max_pool2d(y - 5, 1).flatten(1),
    ],
    ids=["amax", "amin", "logsumexp", "pool"],
)
def test_explain_follows_reductions_over_hexagons(how: Any) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        net = convert(Written(lambda s, x: s.f(how(s.c(x))), c=conv(3, 8), f=nn.Linear(8, 2)), p6).eval()
        found = explain(net, image(p6, channels=3, size=9, dtype=torch.float32), p6)
        assert found.exact
        assert "not followed" not in str(found)


def test_explain_names_what_is_broken_beside_a_reduction_over_a_hexagon() -> None:
    torch.manual_seed(3)
    net = convert(Written(lambda s, x: s.f((s.c(x) - 5).amax((2, 3))), c=conv(3, 8), f=nn.Linear(8, 2)), p6).eval()
    broken = Written(lambda s, x: s.net(x) + s.corner(x[:, :1, 4, 0]), net=net, corner=nn.Linear(1, 2))
    first = explain(broken, image(p6, channels=3, size=9, dtype=torch.float32), p6).first
    assert first is not None
    assert first.name == "before corner"


@pytest.mark.parametrize("how", [lambda y: y.amax((2, 3)), lambda y: y.logsumexp((1, 2, 3), True), lambda y: y.norm(1, (2, 3))])
def test_no_layer_hands_out_infinities(how: Any) -> None:
    net = convert(Written(lambda s, x: how(s.c(x)), c=conv(3, 8)), p6, keep="channels", pool=None).eval()
    seen: list[Tensor] = []
    for m in net.modules():
        if not list(m.children()):
            m.register_forward_hook(lambda _, __, y: seen.append(y))
    net(image(p6, channels=3, size=9, dtype=torch.float32))
    assert seen
    assert all(y.isfinite().all() for y in seen)


@pytest.mark.parametrize("group", [p4, p6], ids=str)
@pytest.mark.parametrize("size", [1, (1, 1)])
def test_maxima_over_space_where_modules_are_replaced(group: Group, size: Any) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.c(x)
        return net.f(net.p(-y if y.abs().sum() < -1 else y).flatten(1))  # a branch that torch.fx cannot trace

    torch.manual_seed(0)
    old = Written(forward, c=conv(3, 8), p=nn.AdaptiveMaxPool2d(size), f=nn.Linear(8, 2)).double()
    x = image(group, channels=3, size=9)
    net: Any = convert(old, group, example=x).eval()
    with torch.no_grad():
        net.c.bias.fill_(-5.0)  # so that the zeros outside a hexagon would be the largest
    largest = net.c(x)[..., domain_mask(group, (9, 9), x.device)].amax(-1)  # (N, K, S)
    torch.testing.assert_close(net(x), F.linear(largest.mean(2), net.f.weight, net.f.bias))
    assert equivariance_error(net, group, x) < 1e-10


def test_linear_heads_keep_their_names_where_modules_are_replaced() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.c(x)
        return net.f((-y if y.abs().sum() < -1 else y).mean((-2, -1)).flatten(1))  # a branch that torch.fx cannot trace

    old, x = Written(forward, c=conv(3, 8), f=nn.Linear(8, 2)), torch.randn(2, 3, 9, 9)
    made = convert(old, p4, keep="channels", weights=True, example=x)
    assert made.state_dict().keys() == old.state_dict().keys()
    assert torch.equal(made.get_parameter("f.weight"), old.get_parameter("f.weight"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_numbers_in_the_dtype_of_the_image_go_with_the_network(dtype: torch.dtype) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.c(x - torch.tensor([0.1, 0.2, 0.3], dtype=x.dtype).view(1, 3, 1, 1))
        return y

    old, x = Written(forward, c=conv(3, 2)), torch.rand(2, 3, 9, 9).to(dtype)
    early, late = (
        convert(net, p4, keep="channels", weights=True).to(dtype) for net in (copy.deepcopy(old).to(dtype), copy.deepcopy(old))
    )
    old = old.to(dtype)
    mean = torch.stack([act(p4, -h % 4, old(act(p4, h, x))) for h in range(4)]).mean(0)
    off = 1e-2 if dtype == torch.bfloat16 else 1e-7
    for made in (early, late):
        assert made(x).dtype == dtype
        torch.testing.assert_close(made(x), mean, rtol=off, atol=off)


def test_numbers_in_the_dtype_of_another_input_are_of_that_dtype() -> None:
    def forward(net: Any, x: Tensor, facts: Tensor) -> Any:
        times = torch.tensor([2.5, 16777217.0], dtype=facts.dtype) * facts + torch.tensor(16777217, dtype=facts.dtype)
        more = (
            torch.tensor([1.5, 2.5]).to(facts.dtype) + torch.tensor([3.5, 0.5]).type_as(facts) + facts.new_tensor([16777217, 2])
        )
        return net.f(net.c(x).mean((2, 3))), times, facts + more

    torch.manual_seed(0)
    x, facts = torch.rand(2, 3, 9, 9), torch.tensor([[1, 7], [2, 3]])
    old = WrittenForTwo(forward, c=conv(3, 8), f=nn.Linear(8, 2)).double()
    for made in (convert(old, p4), convert(old, p4, example=(x, facts))):
        assert all(map(torch.equal, made(x.double(), facts)[1:], old(x.double(), facts)[1:]))


@pytest.mark.parametrize("group", [p4, p6], ids=str)
def test_a_maximum_over_space_keeps_its_name(group: Group) -> None:
    net = convert(nn.Sequential(conv(3, 8), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 2)), group).eval()
    x = image(group, channels=3, size=9, dtype=torch.float32)
    assert dict(net.named_modules()).keys() >= {"0", "1", "3"}
    torch.testing.assert_close(planar(net)(x), net(x))


@pytest.mark.parametrize(
    "how", [lambda y: sum(part for part in y.split(4, 1)), lambda y: (lambda parts: parts[0] + parts[1])(list(y.split(4, 1)))]
)
def test_loops_over_splits_need_an_example(how: Any) -> None:
    old = Written(lambda s, x: s.d(how(s.c(x))), c=conv(3, 8), d=conv(4, 2))
    with pytest.raises(
        ValueError, match=r"splits a map in parts whose number is not known; use chunk\(number, 1\)\. Give an exam"
    ):
        convert(old, p4, keep="channels")
    x = torch.rand(1, 3, 9, 9)
    net = convert(old, p4, keep="channels", example=x).eval()
    assert equivariance_error(net, p4, x) < 1e-4


def each_element(group: Group = p6, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 4)
    for p in norm.parameters():
        nn.init.normal_(p)
    return EachElement(group, norm).to(dtype)


@pytest.mark.parametrize("shape", [(2, 4, 6, 9, 9), (2, 4, 9, 9), (0, 4, 6, 9, 9), (2, 4, 6, 1, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_norms_of_samples_on_hexagons_are_those_that_compilers_see(shape: tuple[int, ...], last: bool) -> None:
    norm, x = each_element(), torch.randn(shape, dtype=torch.float64)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    mask = domain_mask(p6, shape[-2:])
    junk = torch.where(mask, x, torch.nan)
    y = norm(junk)
    torch.testing.assert_close(y, torch.func.vmap(norm)(junk[None])[0])
    assert not y[..., ~mask].any()
    if len(shape) == 5:
        cells = x[..., mask].transpose(1, 2).flatten(0, 1)  # (N S, K, cells)
        torch.testing.assert_close(y[..., mask].transpose(1, 2).flatten(0, 1), torch.group_norm(cells, 2, *norm.parameters()))


def test_gradients_of_norms_of_samples_on_hexagons() -> None:
    norm, x = each_element(), torch.randn(1, 4, 6, 3, 3, dtype=torch.float64)
    x = torch.where(domain_mask(p6, (3, 3)), x, 1e200).requires_grad_()
    names = [name for name, _ in norm.named_parameters()]
    numbers = [p.detach().requires_grad_() for p in norm.parameters()]

    def run(x: Tensor, *numbers: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(norm, dict(zip(names, numbers, strict=True)), (x,))
        return y

    assert torch.autograd.gradcheck(run, (x, *numbers))
    assert torch.autograd.gradgradcheck(run, (x, *numbers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_samples_on_hexagons_in_half_precision(dtype: torch.dtype) -> None:
    norm, x = each_element(dtype=torch.float32), 2e4 * torch.rand(2, 4, 6, 33, 33)
    expected = norm(x.to(dtype).float())
    y = norm.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.func.vmap(norm)(x.to(dtype)[None])[0], y, rtol=2e-2, atol=2e-2)


def test_domains_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, made = torch.rand(2, 4, 6, 9, 9), list[Any]()
    layers = [each_element(dtype=torch.float32), VarianceInside(p6, False, False, 1.0, True), ReduceSpace(p6, "amax")]
    first = [layer(x) for layer in layers]
    for where in ("gcnn.nn.each", "gcnn.lattice"):
        monkeypatch.setattr(f"{where}.domain_mask", lambda *args: made.append(args))
    for layer, y in zip(layers, first, strict=True):
        torch.testing.assert_close(layer(x), y)
    assert not made


@pytest.mark.parametrize("p", ["nuc", -1, -float("inf")])
def test_norms_that_zeros_change_are_refused_on_hexagons(p: Any) -> None:
    with pytest.raises(ValueError, match="norms are known that zeros do not change: those of a number p from 0 on"):
        convert(Written(lambda s, x: s.c(x).norm(p, (2, 3)), c=conv(3, 8)), p6)


@pytest.mark.parametrize("p", ["fro", 0, 0.5, 1, 3, float("inf")])
def test_norms_that_zeros_do_not_change_are_right_on_hexagons(p: Any) -> None:
    torch.manual_seed(0)
    net: Any = convert(Written(lambda s, x: s.c(x).norm(p, (2, 3)), c=conv(3, 8)).double(), p6, pool=None).eval()
    x = image(p6, channels=3, size=9)
    cells = net.c(x)[..., domain_mask(p6, (9, 9), x.device)]
    torch.testing.assert_close(net(x), cells.norm(2 if p == "fro" else p, -1))


class Stage(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = conv(channels, 8), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) * self.scale


def staged() -> nn.Module:
    torch.manual_seed(0)
    parts = {"body": nn.Sequential(Stage(3), Stage(8)), "last": Stage(8), "f": nn.Linear(8, 2)}
    return Written(lambda s, x: s.f(s.last(s.body(x)).mean((2, 3))), **parts)


def pickled(net: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(net))
    return found


@pytest.mark.parametrize(
    "again",
    [lambda net: net, copy.deepcopy, pickled, lambda net: copy.deepcopy(pickled(net))],
    ids=["made", "copied", "pickled", "both"],
)
def test_blocks_of_a_converted_network_say_that_they_cannot_be_called(again: Any) -> None:
    made, x = convert(staged(), p4).eval(), torch.rand(1, 3, 9, 9)
    net: Any = again(made)
    torch.testing.assert_close(net(x), made(x), rtol=0, atol=0)
    assert list(net.state_dict()) == list(made.state_dict())
    with pytest.raises(NotImplementedError, match=r"^body cannot be called: blocks .* a layer inside, such as body\.0\.conv$"):
        net.body(x)
    with pytest.raises(NotImplementedError, match=r"^body cannot be called"):
        nn.Sequential(*net.children())(x)
    assert net.body[0] is net.get_submodule("body.0") is net["body"]["0"]
    assert net.body[-1] is list(net.body.children())[-1]
    with pytest.raises(TypeError, match="not iterable"):  # some of its layers have no number, and it may call others twice
        nn.Sequential(*net)
    with pytest.raises(TypeError, match=r"are not the network: take list\(net.children\(\)\)"):
        net.body[:1]
    with pytest.raises(IndexError, match=r"9: the parts of body are 0"):
        net.body[9]
    with pytest.raises(KeyError, match=r"'head': the parts of the network are body, last"):
        net["head"]
    for register in (net.last.register_forward_hook, net.last.register_forward_pre_hook):
        with pytest.warns(UserWarning, match=r"^last never runs a hook: .* such as last\.conv$"):
            register(lambda *_: None)
    seen: list[Any] = []
    net.last.conv.register_forward_hook(lambda *_: seen.append(True))
    net(x)
    assert seen


def test_blocks_of_parameters_alone_are_hooked_by_explain() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by.view(-1, 1, 1)

    x = torch.rand(1, 3, 9, 9)
    net = convert(
        nn.Sequential(conv(3, 8), Scale(), conv(8, 2)), p4, example=x
    )  # without a warning, which would be an error here
    assert explain(net, x, p4).exact


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool, branch: bool = False) -> None:
        super().__init__()
        self.first, self.block, self.f = conv(3, 8), nn.Sequential(conv(8, 8), nn.ReLU()), nn.Linear(8, 2)
        self.reentrant, self.branch = reentrant, branch

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.branch and y.abs().sum() < 0:
            y = -y
        y = checkpoint(self.block, y, use_reentrant=self.reentrant)
        return self.f(y.mean((-2, -1)))


def test_checkpoints_are_not_kept_and_that_is_said() -> None:
    with pytest.warns(
        UserWarning, match=r"Recomputed \(test_convert.py:\d+\) uses torch.utils.checkpoint, which .*save_on_cpu"
    ) as told:
        net = convert(Recomputed(False), p4)
    assert told[0].filename == __file__
    x = torch.rand(1, 3, 9, 9)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    with torch.autograd.graph.save_on_cpu():
        y = net(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), list(net.parameters())), expected)


def test_checkpoints_stay_where_modules_are_replaced() -> None:
    net = convert(Recomputed(False, branch=True), p4, example=torch.rand(1, 3, 9, 9))  # warnings are errors
    assert isinstance(net, Recomputed)


def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.utils.checkpoint with use_reentrant=True, .* with use_reentrant=False it can"):
        convert(Recomputed(True), p4)


BAGS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softmax": lambda s, h: (torch.softmax(s.attention(h), 0) * h).sum(0, keepdim=True),
    "transposed": lambda s, h: torch.mm(F.softmax(torch.transpose(s.attention(h), 1, 0), 1), h),
    "t": lambda s, h: s.attention(h).t().softmax(1) @ h,
    "mean": lambda s, h: h.mean(0, keepdim=True),
    "max": lambda s, h: h.max(0)[0],
}


@pytest.mark.parametrize("name", BAGS)
def test_bags_of_instances_have_an_encoder_to_convert(name: str) -> None:
    encoder = nn.Sequential(conv(3, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))
    attention = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    net = Written(lambda s, x: s.f(BAGS[name](s, s.encoder(x))), encoder=encoder, attention=attention, f=nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r"it mixes samples, .* alone, net\.encoder = convert\(net\.encoder, group\)"):
        convert(net, p4)
    net.encoder = convert(encoder, p4)
    bag = torch.rand(5, 3, 9, 9)
    turned = torch.stack([torch.rot90(x, i, (1, 2)) for i, x in enumerate(bag)])  # each by itself
    torch.testing.assert_close(net(turned), net(bag))


def test_a_pad_that_sizes_tell_names_the_sizes_that_need_none() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        skip = F.relu(net.a(x))
        y = net.up(F.max_pool2d(skip, 2))
        more = skip.size(3) - y.size(3)
        y = F.pad(y, [more // 2, more - more // 2, more // 2, more - more // 2])
        return net.b(torch.cat([skip, y], 1))

    parts = {"a": conv(3, 8), "up": nn.ConvTranspose2d(8, 8, 2, 2), "b": conv(16, 2)}
    net = convert(Written(forward, **parts), p4)
    assert net(torch.rand(1, 3, 10, 10)).shape == (1, 2, 10, 10)
    with pytest.raises(ValueError, match=r"pads one side more .* sides are multiples of the product of the network's strides"):
        net(torch.rand(1, 3, 9, 9))
    with pytest.raises(ValueError, match=r"pad both sides alike$"):
        PadBoth(p4, (0, 1, 0, 1))
