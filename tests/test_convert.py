"""Ordinary networks made equivariant: the same size, the symmetry, and, started from their weights, the mean over the group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn import GROUPS, Group, Oh, convert, linem, p4, p4m, p6
from gcnn.functional import act
from gcnn.nn import GConv, GLinear, LiftConv
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
    widths = {keep: convert(net, p4m, keep).get_submodule("0").out_channels for keep in ("params", "channels", "cost")}
    assert widths["channels"], widths["cost"] == (64, 8)
    assert 20 <= widths["params"] <= 24  # type: ignore[operator]
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


class OverOneAxis(HardReshape):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)).mean(2)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Recurrent(), r"rnn \(LSTM\) cannot be made equivariant on a map"),
        (HardReshape(), r"reshape to a shape of its own, cannot be made equivariant"),
        (CustomAutograd(), r"torch.fx cannot trace CustomAutograd: it calls Own, a torch.autograd.Function"),
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
    with pytest.raises(TypeError, match=r"expected an nn.Module, got 3"):
        convert(3, p4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="convert: expected a Group"):
        convert(SmallResNet(), "p4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit the hexagonal lattice"):
        convert(nn.Conv2d(3, 4, 3), p6, keep="channels", weights=True)


def test_hexagonal_lattices_can_be_converted_to() -> None:
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))
    from common import image

    assert equivariance_error(convert(net, p6).eval(), p6, image(p6, channels=1, dtype=torch.float32)) < 1e-4
