"""The tools for users must find what is planted, name it, and leave the model as it was."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from common import every_group, plane_groups
from gcnn import C4, Group, Oh, linem, p1, p4, p4m, p6m, pm, pmm
from gcnn.checks import unwrapped
from gcnn.functional import act
from gcnn.lattice import mask_outside
from gcnn.models import build
from gcnn.nn import (
    CosetPool,
    GAdaptiveAvgPool,
    GAvgPool,
    GBatchNorm,
    GConv,
    GLinear,
    GMaxPool,
    GSubsample,
    LiftConv,
    Restrict,
)
from gcnn.testing import assert_equivariant, equivariance_error, exact_sizes, explain


class Planar(nn.Module):
    """A layer on planes (N, K S, *X), inside a net of G-maps."""

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.flatten(1, 2))
        return y.unflatten(1, (-1, self.group.order))


class Code(nn.Module):
    """A function between two layers, not a leaf of the net."""

    def __init__(self, function: Any, then: nn.Module) -> None:
        super().__init__()
        self.function, self.then = function, then

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.then(self.function(x))
        return y


class CumulativeSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(2)


def net(*planted: nn.Module, group: Group = p4m) -> nn.Sequential:
    return nn.Sequential(
        LiftConv(group, 1, 4, 3, padding=1),
        GBatchNorm(group, 4),
        nn.ReLU(),
        *planted,
        GConv(group, 4, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        CosetPool(group),
        GAdaptiveAvgPool(group, 1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@plane_groups
def test_explain_is_clean_for_a_sound_network(group: Group) -> None:
    model = net(GMaxPool(group, 3, 2, 1), group=group)
    found = explain(model, torch.rand(2, 1, 9, 9), group)
    assert found.exact
    assert found.first is None
    assert found.error < 1e-5
    assert [row.layer for row in found.rows][:4] == ["LiftConv", "GBatchNorm", "ReLU", "GMaxPool"]
    assert str(found).splitlines()[-1].startswith(f"equivariant to {group}")


@pytest.mark.parametrize("group", [linem, Oh], ids=str)
def test_explain_works_in_every_dimension(group: Group) -> None:
    assert explain(net(group=group), torch.rand(1, 1, *(7,) * group.dim), group).exact
    broken = net(GConv(group, 4, 4, 3, stride=2), group=group)
    assert explain(broken, torch.rand(1, 1, *(8,) * group.dim), group).first is not None or group.order == 1


PLANTED: dict[str, tuple[Any, str, str, str]] = {
    "stride": (
        lambda: GConv(p4m, 4, 4, 3, stride=2, padding=1),
        "3",
        r"stride 2 does not divide 12 \+ 2\*1 - 3 = 11: the windows leave 1 over at one side",
        r"make the input a size at which every stride is exact, or use stride 1 and then GAvgPool or GMaxPool\(p4m, 2\), which",
    ),
    "pool": (
        lambda: GMaxPool(p4m, 3, 2),
        "3",
        r"stride 2 does not divide 12",
        "^make the input a size at which every stride is exact, or use kernel_size 2 without padding, which is exact",
    ),
    "torch's pool": (
        lambda: Planar(nn.MaxPool2d(5), p4m),
        "3.inner",
        r"stride 5 does not divide 12",
        "^make the input a size at which every stride is exact$",
    ),
    "norm": (
        lambda: Planar(nn.BatchNorm2d(32), p4m),  # fresh: its faults do not show before training
        "3.inner",
        "the norm has a scale, bias or statistic for each plane",
        r"use GBatchNorm\(p4m, 4\)",
    ),
    "layer norm": (lambda: nn.LayerNorm((4, 8, 12, 12)), "3", "the norm has a scale, bias or statistic", r"GBatchNorm\(p4m, 4\)"),
    "padding": (
        lambda: nn.ConstantPad3d((0, 1, 0, 1, 0, 0), 0.0),
        "3",
        r"asymmetric padding \(0, 1, 0, 1, 0, 0\)",
        "pad both sides alike",
    ),
    "zero padding": (lambda: Planar(nn.ZeroPad2d((1, 0, 1, 0)), p4m), "3.inner", "asymmetric padding", "pad both sides alike"),
    "F.pad": (
        lambda: Code(lambda x: F.pad(x, (1, 0, 1, 0)), GConv(p4m, 4, 4, 3)),
        "before 3.then",
        r"asymmetric padding or cropping: size \(12, 12\) becomes \(13, 13\)",
        "pad and crop both sides alike",
    ),
    "mixing S by a convolution": (lambda: Planar(nn.Conv2d(32, 32, 1), p4m), "3.inner", "mixes the 8 elements", "use GConv"),
    "mixing S by Conv3d": (lambda: nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0)), "3", "mixes the 8 elements", "use GConv"),
    "mixing S by code": (CumulativeSum, "3", "mixes the 8 elements", "use GConv"),
    "code that knows the element": (
        lambda: Code(lambda x: x + torch.arange(8.0)[:, None, None], GConv(p4m, 4, 4, 3)),
        "before 3.then",
        "the code before this layer is not equivariant",
        "add nothing that depends on the place or on the element",
    ),
    "code that knows the place": (
        lambda: Code(lambda x: x + torch.arange(12.0), GConv(p4m, 4, 4, 3)),
        "before 3.then",
        "the code before this layer is not equivariant",
        "add nothing that depends on the place",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_explain_finds_what_is_planted(name: str) -> None:
    build, where, why, remedy = PLANTED[name]
    found = explain(net(build()), torch.rand(2, 1, 12, 12), p4m)
    assert not found.exact
    assert found.first is not None
    assert found.first.name == where
    assert re.search(why, found.first.why)
    assert re.search(remedy, found.first.remedy)
    assert sum(bool(row.why) for row in found.rows) == 1, str(found)  # each row shows its own error, not what came before
    assert re.search(why, str(found))
    assert f"first broken by {where}" in str(found)


def test_explain_finds_two_faults() -> None:
    model = net(GConv(p4m, 4, 4, 3, stride=2, padding=1), Planar(nn.BatchNorm2d(32), p4m))
    found = explain(model, torch.rand(2, 1, 12, 12), p4m)
    assert [row.name for row in found.rows if row.why] == ["3", "4.inner"]


class Head(nn.Module):
    def __init__(self, function: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x, *self.layers)
        return y


def channels_last(x: Tensor, mix: nn.Module) -> Tensor:
    y: Tensor = mix(x.movedim(1, -1))
    return y.movedim(-1, 1)


def attention(x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
    y = norm(x.flatten(2).mT)  # (N, H * W, K)
    q = linear(y)
    mixed: Tensor = torch.softmax(q @ q.mT, -1) @ y
    return mixed.mean(1)


class ToLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


def last_layers(k: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(k), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(k, 8), nn.ReLU(), nn.Linear(8, 3)]


AFTER: dict[str, tuple[Any, list[str], list[str]]] = {  # what fails, and what cannot be followed
    "planar layers of 8 channels": (lambda: [nn.Conv2d(1, 8, 3), *last_layers(8)], ["0"], []),
    "planar layers of 16": (lambda: [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), *last_layers(16)], ["0", "2"], []),
    "a planar convolution of a pooled image": (
        lambda: [LiftConv(p4m, 1, 8, 3), CosetPool(p4m), nn.Conv2d(8, 8, 3), *last_layers(8)],
        ["2"],
        [],
    ),
    "a head of two layers": (
        lambda: [LiftConv(p4m, 1, 2, 3), nn.Flatten(), nn.Linear(2 * 8 * 100, 16), nn.ReLU(), nn.Linear(16, 8)],
        ["2"],
        [],
    ),
    "code on 8 channels": (
        lambda: [LiftConv(p4m, 1, 8, 3), CosetPool(p4m), Code(lambda x: x + torch.arange(10.0), nn.ReLU()), *last_layers(8)],
        ["before 2.then"],
        [],
    ),
    "planes, and then an image": (
        lambda: [LiftConv(p4m, 1, 4, 3), Planar(nn.Conv2d(32, 64, 1), p4m), CosetPool(p4m), nn.Conv2d(8, 8, 3), *last_layers(8)],
        ["1.inner", "3"],
        [],
    ),
    "channels at the end": (
        lambda: [LiftConv(p4m, 1, 4, 4, stride=3), Head(channels_last, nn.Linear(4, 4)), nn.ReLU(), GConv(p4m, 4, 4, 3)],
        ["0"],
        ["1.layers.0"],
    ),
    "channels of an image at the end": (
        lambda: [LiftConv(p4m, 1, 4, 4, stride=3), CosetPool(p4m), Head(channels_last, nn.Linear(4, 4)), *last_layers(4)],
        ["0"],
        ["2.layers.0"],
    ),
    "channels brought to the end by a layer": (
        lambda: [nn.Conv2d(1, 4, 3), ToLast(), nn.Linear(4, 4), Code(lambda x: x.mean((1, 2)), nn.Linear(4, 3))],
        ["0"],
        ["1", "2"],
    ),
    "attention": (
        lambda: [LiftConv(p4m, 1, 4, 3, stride=2), CosetPool(p4m), Head(attention, nn.LayerNorm(4), nn.Linear(4, 4)), nn.ReLU()],
        ["0"],
        ["2.layers.0", "2.layers.1"],
    ),
}


@pytest.mark.parametrize("name", AFTER)
def test_layers_after_the_first_fault_are_judged_by_themselves(name: str) -> None:
    build, fails, unknown = AFTER[name]
    torch.manual_seed(0)
    found = explain(nn.Sequential(*build()), torch.rand(2, 1, 12, 12), p4m)
    assert [row.name for row in found.rows if row.why] == fails, str(found)
    assert [row.name for row in found.rows if "(not followed)" in row.layer] == unknown, str(found)
    assert all(row.error < 1e-9 for row in found.rows if row.name not in (*fails, *unknown))


def test_explain_finds_a_planar_first_layer_and_a_head_on_planes() -> None:
    planar = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
    found = explain(planar, torch.rand(1, 1, 9, 9), p4m)
    assert found.first is not None
    assert "planar convolution" in found.first.why
    assert "LiftConv(p4m" in found.first.remedy
    flat = nn.Sequential(LiftConv(p4m, 1, 4, 3), nn.Flatten(), nn.Linear(4 * 8 * 49, 10))
    found = explain(flat, torch.rand(1, 1, 9, 9), p4m)
    assert found.first is not None
    assert found.first.name == "2"
    assert "mixes" in found.first.why


def test_explain_follows_vectors_on_the_group_and_cosets() -> None:
    model = nn.Sequential(
        LiftConv(p4m, 1, 4, 3),
        CosetPool(p4m, p4m.subgroup(1)),
        GConv(p4m, 4, 4, 3, stabilizer=p4m.subgroup(1)),
        GAdaptiveAvgPool(p4m, 1),
        nn.Flatten(3),
        nn.Flatten(2),
        GLinear(p4m, 4, 3),
        CosetPool(p4m, reduce="mean"),
    )
    found = explain(model, torch.rand(1, 1, 9, 9), p4m)
    assert found.exact, str(found)


def test_explain_finds_code_after_the_last_layer() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = LiftConv(p4, 1, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y[:, :, 0, 0, :1].flatten(1)

    found = explain(Head(), torch.rand(1, 1, 9, 9), p4)
    assert found.first is not None
    assert found.first.name == "output"


def test_the_model_is_left_as_it_was() -> None:
    model = net().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    explain(model, torch.rand(2, 1, 9, 9), p4m)
    equivariance_error(model, p4m, torch.rand(2, 1, 9, 9))
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_assert_equivariant_can_fail() -> None:
    x = torch.rand(1, 1, 9, 9)
    with pytest.raises(
        AssertionError, match=r"Conv2d is not equivariant to p4: error .* under element \d = .*explain\(model, x, p4\)"
    ):
        assert_equivariant(nn.Conv2d(1, 1, 3), p4, x)
    with pytest.raises(AssertionError, match="the output is zero everywhere"):
        assert_equivariant(torch.zeros_like, p4, x)
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(lambda t: t * float("nan"), p4, x)
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(lambda t: t[..., 1:, :], p4, torch.rand(1, 1, 9, 9))  # another shape
    with pytest.raises(TypeError, match="expected a module that returns one tensor, got tuple; wrap it"):
        equivariance_error(lambda t: (t, t), p4, x)
    with pytest.raises(ValueError, match="stabilizer= for a map over cosets"):
        equivariance_error(CosetPool(p4m, (0, 2)), p4m, torch.rand(1, 1, 8, 5, 5))
    with pytest.raises(TypeError, match=r"explain: expected an nn.Module, got function"):
        explain(lambda t: t, x, p4)  # type: ignore[arg-type]


def test_errors_are_relative_and_over_all_elements() -> None:
    x = torch.rand(1, 1, 8, 5, 5, dtype=torch.float64)
    weights = torch.ones(8, dtype=torch.float64)
    weights[6] = 1.5

    def scaled(t: Tensor) -> Tensor:
        return t * weights[:, None, None]

    expected = max(
        float((scaled(act(p4m, h, x)) - act(p4m, h, scaled(x))).abs().max()) / float(scaled(x).abs().max()) for h in range(8)
    )
    assert equivariance_error(scaled, p4m, x) == pytest.approx(expected)
    assert equivariance_error(lambda t: 1000 * scaled(t), p4m, x) == pytest.approx(expected)


def test_only_the_domain_counts_on_a_hexagonal_lattice() -> None:
    x = torch.rand(1, 2, 9, 9, dtype=torch.float64)  # not zero outside
    assert equivariance_error(nn.Sigmoid(), p6m, x) < 1e-12
    assert equivariance_error(nn.Sequential(LiftConv(p6m, 2, 2, 3), GAvgPool(p6m, 3, 1)).double(), p6m, x) < 1e-12
    assert equivariance_error(lambda t: t + torch.arange(9), p6m, mask_outside(p6m, x)) > 0.1


def test_a_nan_is_never_lost() -> None:
    class Poison(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (float("nan") if x[0, 0, 0, 0, 0] < x[0, 0, 0, -1, -1] else 1.0)

    x = torch.arange(25.0).reshape(1, 1, 1, 5, 5).expand(1, 1, 4, 5, 5)
    assert not equivariance_error(Poison(), p4, x) <= 1e9
    assert not equivariance_error(Poison(), p4, x.flip(-1, -2)) <= 1e9
    assert not explain(nn.Sequential(Poison(), nn.ReLU()), x.flip(-1, -2), p4).exact


def test_explain_judges_the_output_as_equivariance_error_does() -> None:
    """Eight logits that only change places are not the answer of an invariant classifier."""
    forgotten = nn.Sequential(LiftConv(p4m, 1, 4, 3), nn.ReLU(), GConv(p4m, 4, 1, 3), GAdaptiveAvgPool(p4m, 1), nn.Flatten())
    found = explain(forgotten, torch.rand(2, 1, 9, 9), p4m)
    assert found.first is not None
    assert found.first.name == "output"
    assert "change places with the elements of p4m" in found.first.why
    assert "put CosetPool(p4m) before the head" in found.first.remedy
    assert equivariance_error(forgotten, p4m, torch.rand(2, 1, 9, 9)) > 1e-3


def test_explain_knows_the_groups_of_the_layers() -> None:
    x = torch.rand(2, 1, 9, 9)
    larger = nn.Sequential(LiftConv(p4m, 1, 4, 3), nn.ReLU(), GConv(p4m, 4, 4, 3), CosetPool(p4m))
    assert explain(larger, x, p4).exact  # a network of p4m, asked about p4
    restrict = Restrict(p4m, p4)
    net = nn.Sequential(LiftConv(p4m, 1, 4, 3), restrict, GConv(p4, 8, 4, 3), CosetPool(p4))
    assert explain(net, x, p4).exact
    found = explain(net, x, p4m)
    assert found.first is not None
    assert found.first.why == "from here on the network is equivariant to p4 only"
    found = explain(nn.Sequential(LiftConv(p4, 1, 4, 3)), x, p4m)
    assert found.first is not None
    assert found.first.why == "this layer is one of p4, which does not hold all of p4m"
    assert found.first.remedy == "use p4m throughout, or check p4"
    mismatch = nn.Sequential(LiftConv(p4m, 1, 4, 3), CosetPool(p4m, (0, 4)), GConv(p4m, 4, 4, 3, stabilizer=(0, 5)))
    found = explain(mismatch, x, p4m)
    assert found.first is not None
    assert found.first.why == "the input is no map over the cosets of (0, 5)"


def test_explain_does_not_blame_code_that_is_only_laid_out_otherwise() -> None:
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.mix = LiftConv(p4m, 1, 4, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mix(self.lift(x).movedim(1, -1))
            return y.movedim(-1, 1)

    found = explain(ChannelsLast(), torch.rand(2, 1, 9, 9), p4m)
    assert found.exact
    assert any("(not followed)" in row.layer for row in found.rows)


def test_explain_takes_models_as_they_come() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = LiftConv(p4, 1, 2, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x=x)
            return y

    found = explain(ByKeyword(), torch.rand(1, 1, 8, 8), p4)
    assert found.first is not None
    assert "stride 2 does not divide" in found.first.why
    compiled: Any = torch.compile(net(), backend="eager")
    assert explain(compiled, torch.rand(1, 1, 9, 9), p4m).exact
    with pytest.raises(ValueError, match=r"the model fails in 1 \(BatchNorm2d\) on \(1, 2, 4, 7, 7\): expected 4D input"):
        explain(nn.Sequential(LiftConv(p4, 1, 2, 3), nn.BatchNorm2d(2)), torch.rand(1, 1, 9, 9), p4)


def test_useless_inputs_are_refused() -> None:
    for call in (
        lambda x: equivariance_error(nn.Conv2d(1, 1, 3), p4, x),
        lambda x: assert_equivariant(nn.Conv2d(1, 1, 3), p4, x),
        lambda x: explain(nn.Conv2d(1, 1, 3), x, p4),
    ):
        with pytest.raises(ValueError, match="x is symmetric, element 1 of p4 leaves it as it is"):
            call(torch.ones(1, 1, 9, 9))
        with pytest.raises(ValueError, match="x holds NaN or infinite values"):
            call(torch.full((1, 1, 9, 9), float("nan")))
    with pytest.raises(TypeError, match=r"\(module, group, x\): expected a Group and a tensor x, or .*, got str and Tensor"):
        equivariance_error(nn.ReLU(), "p4", torch.rand(1, 1, 9, 9))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"explain\(model, x, group\): expected a Group and a tensor x"):
        explain(nn.ReLU(), p4, p4)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"exact_sizes\(model, x, group\): expected a Group and a tensor x, .* got p4 and \(9, 9\)"
    ):
        exact_sizes(nn.ReLU(), torch.rand(9, 9), p4)
    with pytest.raises(TypeError, match=r"exact_sizes: expected an nn.Module, got function"):
        exact_sizes(lambda t: t, torch.rand(1, 1, 9, 9), p4)  # type: ignore[arg-type]


def test_group_and_input_are_taken_in_either_order() -> None:
    model: Any = net(GConv(p4m, 4, 4, 3, stride=2, padding=1))
    x: Any = torch.rand(1, 1, 12, 12)
    group: Any = p4m
    assert equivariance_error(model, x, group) == equivariance_error(model, group, x)
    assert explain(model, group, x) == explain(model, x, group)
    assert exact_sizes(model, group, x) == exact_sizes(model, x, group)
    with pytest.raises(AssertionError, match="Sequential is not equivariant to p4m"):
        assert_equivariant(model, x, group)


class Strides(nn.Module):
    """A small residual network as they are, of three strides in two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.pool = LiftConv(p4m, 1, 2, 7, stride=2, padding=3), GMaxPool(p4m, 3, 2, 1)
        self.conv, self.short = GConv(p4m, 2, 2, 3, stride=2, padding=1), GConv(p4m, 2, 2, 1, stride=2)
        self.head = CosetPool(p4m)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.lift(x).relu())
        y: Tensor = self.head(self.conv(x) + self.short(x))
        return y.mean((2, 3))


def test_exact_sizes_are_those_at_which_the_network_is_exact() -> None:
    model = Strides()
    found = exact_sizes(model, torch.rand(1, 1, 32, 32), p4m)
    assert found == [n for n in range(24, 49) if equivariance_error(model.eval(), p4m, torch.rand(1, 1, n, n)) < 1e-5]
    assert found == [25, 33, 41]
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_explain_says_at_which_input_sizes_every_stride_is_exact() -> None:
    found = explain(Strides(), torch.rand(1, 1, 32, 32), p4m)
    assert found.sizes == (25, 33, 41)
    assert str(found).splitlines()[-1] == "input sizes at which every stride is exact: 25, 33, 41"
    assert "make the size here" not in str(found)
    sound = explain(Strides(), torch.rand(1, 1, 33, 33), p4m)
    assert (sound.exact, sound.sizes) == (True, ())
    assert explain(net(Planar(nn.BatchNorm2d(32), p4m)), torch.rand(2, 1, 9, 9), p4m).sizes == ()  # that is no matter of size


def test_where_no_size_fits_the_advice_is_about_the_layer() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three, self.two = LiftConv(p4m, 1, 2, 3, stride=2), LiftConv(p4m, 1, 2, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.three(x).amax((2, 3, 4)) + self.two(x).amax((2, 3, 4))
            return y

    found = explain(Odd(), torch.rand(1, 1, 12, 12), p4m)
    assert found.sizes == ()  # one takes odd sizes, the other even ones
    assert found.first is not None
    assert found.first.remedy.startswith("make the size here 11 or 13, or use stride 1 and then")
    assert "input sizes" not in str(found)
    hexagons = nn.Sequential(LiftConv(p6m, 1, 2, 3), GMaxPool(p6m, 3, 4))
    found = explain(hexagons, torch.rand(1, 1, 15, 15), p6m)
    assert found.first is not None
    assert "kernel_size" not in found.first.remedy  # even windows have no centre there


@pytest.mark.parametrize(
    ("layer", "way"),
    [
        (nn.MaxPool2d(2), r"use GMaxPool\(p4, ...\) on it, or CosetPool\(p4\) first"),
        (nn.AvgPool2d(2), r"use GAvgPool\(p4, ...\) on it, or CosetPool\(p4\) first"),
        (nn.AdaptiveAvgPool2d(2), r"use GAdaptiveAvgPool\(p4, ...\) on it"),
        (nn.Conv2d(2, 2, 3), r"use GConv\(p4, ...\) on it, or CosetPool\(p4\) first, which makes an image of it"),
        (nn.ConvTranspose2d(2, 2, 3), r"use GConvTranspose\(p4, ...\) on it"),
        (nn.BatchNorm2d(2), r"use GBatchNorm\(p4, ...\) on it$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_planar_layers_on_maps_are_named_with_the_way_out(layer: nn.Module, way: str) -> None:
    name = type(layer).__name__
    fails = rf"explain: the model fails in 1 \({name}\) on \(1, 2, 4, 7, 7\): .*; this is a map \(N, K, 4, ...\): {way}"
    with pytest.raises(ValueError, match=fails):
        explain(nn.Sequential(LiftConv(p4, 1, 2, 3), layer), torch.rand(1, 1, 9, 9), p4)


def test_other_failures_are_named_too() -> None:
    model = nn.Sequential(LiftConv(p4, 1, 2, 3), CosetPool(p4), nn.Flatten(), nn.Linear(5, 3))
    with pytest.raises(RuntimeError, match=r"the model fails in 3 \(Linear\) on \(1, 98\): .*cannot be multiplied"):
        explain(model, torch.rand(1, 1, 9, 9), p4)


def test_layers_are_compared_under_generators_and_the_network_under_all_elements() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __deepcopy__(self, memo: Any) -> Counting:
            return self  # so that it is counted here

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    counting = Counting()
    assert explain(nn.Sequential(counting, *net()), torch.rand(2, 1, 9, 9), p4m).exact
    assert counting.calls == 1 + 1 + 1 + 2  # x, all turned at once, one near x, a turn and a mirror; not 1 + 7 + 7

    class Corner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x if x[0, 0, 0, 0] > x[0, 0, -1, -1] else x

    x = torch.arange(25.0).reshape(1, 1, 5, 5)  # of the turns only that by 180 degrees brings a larger number to the corner
    found = explain(nn.Sequential(Corner(), LiftConv(p4, 1, 2, 3)), x, p4)
    assert [row.name for row in found.rows if row.why] == ["0"]


def test_functions_of_the_group_alone_can_be_tested() -> None:
    assert_equivariant(GLinear(p4m, 3, 4), p4m, torch.rand(2, 3, 8))
    assert (
        equivariance_error(nn.Sequential(nn.Flatten(), nn.Linear(24, 24), nn.Unflatten(1, (3, 8))), p4m, torch.rand(2, 3, 8))
        > 0.1
    )
    pooled = nn.Sequential(nn.AdaptiveAvgPool3d(1))
    assert_equivariant(pooled, p4m, torch.rand(2, 3, 8, 5, 5))  # (N, K, 1, 1, 1): one coset
    with pytest.raises(AssertionError, match=r"if it has dropout, call .eval\(\) first"):
        assert_equivariant(nn.Sequential(LiftConv(p4, 1, 4, 3), nn.Dropout3d(0.5)), p4, torch.rand(4, 1, 9, 9))


def test_explain_sees_in_place_layers_and_parametrizations_as_they_are() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.relu, self.conv, self.last = (
                LiftConv(p4m, 1, 4, 3),
                nn.ReLU(inplace=True),
                GConv(p4m, 4, 4, 3, padding=1),
                GConv(p4m, 4, 4, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x)
            y = self.conv(self.relu(x))
            z: Tensor = self.last(x + y)  # x is what relu made of it
            return z

    x = torch.rand(2, 1, 9, 9)
    found = explain(InPlace(), x, p4m)
    assert found.exact
    assert not any("not followed" in row.layer for row in found.rows)
    normed = nn.Sequential(LiftConv(p4m, 1, 4, 3), weight_norm(GConv(p4m, 4, 4, 1)), weight_norm(GConv(p4m, 4, 4, 2, stride=2)))
    assert [row.name for row in explain(normed, torch.rand(2, 1, 10, 10), p4m).rows] == ["0", "1", "2"]
    found = explain(normed, x, p4m)
    assert found.first is not None
    assert found.first.name == "2"


def test_explain_runs_in_eval_mode_and_shakes_what_training_changes() -> None:
    assert explain(net(nn.Dropout3d(0.5)).train(), torch.rand(2, 1, 9, 9), p4m).exact
    norm = nn.BatchNorm2d(32, affine=False)  # only its running statistics could show a difference
    assert not explain(net(Planar(norm, p4m)), torch.rand(2, 1, 9, 9), p4m).exact
    frozen = nn.BatchNorm2d(32, track_running_stats=False).requires_grad_(False)
    assert not explain(net(Planar(frozen, p4m)), torch.rand(2, 1, 9, 9), p4m).exact
    assert not explain(nn.Sequential(nn.Conv2d(1, 2, 3)).bfloat16(), torch.rand(1, 1, 9, 9).bfloat16(), p4m).exact


def test_what_cannot_be_examined_says_why() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.relu(x)
            return self.relu(y) if y[..., 0, 0].sum() > y[..., -1, -1].sum() else y

    with pytest.raises(ValueError, match="the model calls other layers for L_h x than for x"):
        explain(Fickle(), torch.arange(25.0).reshape(1, 1, 5, 5).mT, p4)
    pruned = nn.Sequential(LiftConv(p4, 1, 2, 3))
    prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    pruned(torch.rand(1, 1, 9, 9))
    with pytest.raises(ValueError, match=r"cannot be copied .* call prune.remove on pruned layers"):
        explain(pruned, torch.rand(1, 1, 9, 9), p4)


def test_explain_names_what_leaves_a_hexagonal_lattice() -> None:
    # a mean over the box counts what AvgPool2d leaves outside of the hexagon; on 2 x 2 cells there is none, and nothing is judged
    for planted, fails in ((nn.AvgPool2d(2), ["2", "4"]), (nn.AdaptiveAvgPool2d(2), ["2"])):
        model = nn.Sequential(LiftConv(p6m, 1, 2, 3), CosetPool(p6m), planted, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        found = explain(model, torch.rand(1, 1, 9, 9), p6m)
        assert found.first is not None
        assert found.first.name == "2"
        assert [row.name for row in found.rows if row.why] == fails


def test_explain_shows_how_far_it_is_where_somebody_watches(monkeypatch: Any, capsys: Any) -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.4)
            return x

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    model, x, seen = nn.Sequential(Slow(), LiftConv(p4, 1, 2, 3), CosetPool(p4)), torch.rand(1, 1, 9, 9), Terminal()
    assert explain(model, x, p4).exact
    assert capsys.readouterr() == ("", "")  # no terminal
    monkeypatch.setattr("sys.stderr", seen)
    assert explain(model, x, p4).exact
    assert re.search(r"explain: .*/12 ", seen.getvalue())  # three layers, run on x, its turned copies, one of them, inputs near x
    seen.truncate(0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert explain(model, x, p4).exact
    assert not seen.getvalue()


def test_explain_reads_three_axes_as_equivariance_error_does() -> None:
    class Shaped(nn.Module):
        """Numbers of some shape, that change or do not."""

        def __init__(self, *shape: int, pooled: bool = True) -> None:
            super().__init__()
            self.lift, self.linear = LiftConv(p4m, 1, 3, 3), nn.Linear(3, math.prod(shape))
            self.shape, self.pooled = shape, pooled

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.lift(x).relu()
            y = self.linear(y.mean((2, 3, 4)) if self.pooled else y[:, :, 0].mean((2, 3)))
            return y.unflatten(1, self.shape)

    x = torch.rand(2, 1, 9, 9)
    for shape in ((5, 8), (5, 4), (3, 2, 7), (2, 3, 4, 5)):  # eight numbers look like a function
        right, wrong = Shaped(*shape), Shaped(*shape, pooled=False)
        assert equivariance_error(right, p4m, x) < 1e-5
        assert explain(right, x, p4m).exact
        assert not explain(wrong, x, p4m).exact
        if shape not in ((5, 4), (2, 3, 4, 5)):
            assert equivariance_error(wrong, p4m, x) > 1e-2
    with pytest.raises(ValueError, match=r"vectors and matrices, which turn otherwise"):
        equivariance_error(Shaped(5, 4, pooled=False), p4m, x)
    assert equivariance_error(Shaped(5, 8), p4m, x, out_stabilizer=(0,)) > 0.1  # who says what it is wants that


def test_numbers_are_no_images_of_the_input() -> None:
    class Placed(nn.Module):
        """One number for each image, and one for each place, which does not turn."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.places = nn.Linear(1, 1), nn.Parameter(torch.randn(135))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x.mean((2, 3)))[:, :, None, None] + self.places.view(1, 1, *x.shape[2:])
            return y

    x = torch.rand(2, 1, 9, 15)
    assert equivariance_error(Placed(), p4, x) > 0.1
    assert not explain(Placed(), x, p4).exact
    halved = nn.Sequential(Placed(), nn.AvgPool2d(3, 2))
    assert equivariance_error(halved, p4, x) > 0.1
    rough = torch.randn(2, 3, 31, 31, dtype=torch.bfloat16)
    assert_equivariant(lambda x: x.sum(2).sum(2)[:, :, None].repeat(1, 1, 5), p4, rough)
    assert math.isnan(equivariance_error(lambda x: x.sum((2, 3))[:, :, None].repeat(1, 1, 5) * math.nan, p4, rough))


def test_explain_tells_what_is_random() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x) * self.training + torch.randn(())

    for net in (nn.Conv2d(1, 2, 2), nn.Sequential(LiftConv(p6m, 1, 2, 3, padding=1), CosetPool(p6m), nn.MaxPool2d(2))):
        first = explain(net, torch.rand(1, 1, 9, 9), p6m).first
        assert first is not None
        assert "the same input" not in first.why
    x = torch.randn(1, 1, 9, 9, dtype=torch.float64)
    kept = x.clone()
    assert not explain(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(1, 2, 3)), x, p4).exact
    assert torch.equal(x, kept)
    found = explain(nn.Sequential(LiftConv(p4, 1, 2, 3), CosetPool(p4), Noisy()), torch.rand(1, 1, 9, 9), p4)
    assert found.first is not None
    assert found.first.why.startswith("the same input gives another result each time")
    assert not explain(nn.Conv2d(1, 2, 3), torch.rand(1, 1, 9, 9), p4).first.why.startswith("the same input")  # type: ignore[union-attr]


def test_explain_takes_models_with_compiled_parts() -> None:
    part: Any = torch.compile(LiftConv(p4, 1, 2, 3), backend="eager")
    assert explain(nn.Sequential(part, CosetPool(p4)), torch.rand(1, 1, 9, 9), p4).exact


def test_explain_names_what_is_forgotten() -> None:
    """A batch axis, a pool over the group, and that vectors turn: what new users meet first."""
    net = nn.Sequential(LiftConv(p4m, 3, 4, 3), GAdaptiveAvgPool(p4m, 1), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"expected x \(N, K, H, W\) .*, got \(3, 9, 9\); .*: x\[None\]"):
        explain(net, torch.rand(3, 9, 9), p4m)
    with pytest.raises(ValueError, match=r"fails in 3 \(Linear\) .* 4 channels of 8 elements: put CosetPool\(p4m\) before it"):
        explain(net, torch.rand(2, 3, 9, 9), p4m)

    class Direction(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = LiftConv(p4m, 1, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            turns = torch.tensor(p4m.arrays[:, :, 0], dtype=x.dtype)  # where each element takes the first axis
            return torch.einsum("ns,si->ni", self.lift(x).mean((1, -2, -1)), turns)

    found = explain(Direction(), torch.rand(2, 1, 9, 9), p4m)
    assert found.first is not None
    assert "if these 2 numbers are a vector that is to turn with the image" in found.first.remedy


def test_explain_names_sizes_that_do_not_meet() -> None:
    net = build("unet", group=p4m, width=8, levels=2, num_classes=3, in_channels=4)
    with pytest.raises(ValueError, match=r"the model fails after .*give images whose sides all of its strides divide"):
        explain(net, torch.rand(1, 4, 30, 30), p4m)


class Change(nn.Module):
    """Two images of one place and a number for each sample, to an image."""

    def __init__(self, group: Group, stride: int = 1) -> None:
        super().__init__()
        self.see, self.pool = LiftConv(group, 1, 2, 3, padding=1), CosetPool(group)
        self.compare = GConv(group, 4, 2, 3, stride=stride, padding=1)

    def forward(self, before: Tensor, after: Tensor, date: Tensor) -> Tensor:
        seen = torch.cat([self.see(before), self.see(after).relu()], 1)
        y: Tensor = self.pool(self.compare(seen) * date[:, :, None, None, None])
        return y


@plane_groups
def test_networks_of_several_inputs_are_turned_with_all_of_them(group: Group) -> None:
    torch.manual_seed(0)
    before, after, date = *torch.rand(2, 2, 1, 9, 9).unbind(), torch.rand(2, 1)
    inputs = mask_outside(group, before), mask_outside(group, after), date
    assert_equivariant(Change(group).eval(), group, inputs)
    found = explain(Change(group), inputs, group)
    assert found.exact
    assert [row.name for row in found.rows] == ["see", "see", "compare", "pool"]
    if group.order > 1:  # only one of the images turns
        net = Change(group)
        assert equivariance_error(lambda x: net(x, inputs[1], date), group, inputs[0]) > 1e-2


def test_faults_of_networks_of_several_inputs_are_found() -> None:
    torch.manual_seed(0)
    inputs = torch.rand(1, 1, 8, 8), torch.rand(1, 1, 8, 8), torch.rand(1, 1)
    found = explain(Change(p4m, stride=2), inputs, p4m)
    assert found.first is not None
    assert (found.first.name, found.sizes) == ("compare", (7, 9, 11))
    assert exact_sizes(Change(p4m, stride=2), inputs, p4m) == [7, 9, 11]


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ((), TypeError, "got Group and a tuple with nothing"),
        ((torch.rand(1, 1, 8, 8), 3), TypeError, "got Group and a tuple with int"),
        ([torch.rand(1, 1, 8, 8)], TypeError, "a tensor x, or a tuple of them, got Group and list"),
        (torch.rand(9, 9), ValueError, r"got \(9, 9\); a batch axis is missing if this is one sample: x\[None, None\]"),
        (torch.rand(3, 9, 9), ValueError, r"one sample: x\[None\]"),
    ],
)
def test_inputs_that_are_none_are_named(x: Any, error: type[Exception], message: str) -> None:
    for run in (lambda: equivariance_error(nn.Identity(), p4m, x), lambda: explain(nn.Identity(), x, p4m)):
        with pytest.raises(error, match=message):
            run()


@every_group
def test_strides_need_fit_only_along_axes_that_are_reversed(group: Group) -> None:
    torch.manual_seed(0)
    if not group.fills_box:  # whose layers refuse windows that leave cells over
        pytest.skip("hexagonal")
    odd = tuple(9 if backwards else 8 for backwards in group.reversed_axes)  # stride 2 leaves one over on 8 cells
    x = torch.rand(1, 2, *odd, dtype=torch.double)
    net = nn.Sequential(LiftConv(group, 2, 2, 3, stride=2, padding=1), nn.Tanh(), CosetPool(group)).double()
    assert_equivariant(net, group, x)
    assert explain(net, x, group).exact
    assert_equivariant(GSubsample(group, 2), group, torch.rand(1, 2, group.order, *odd, dtype=torch.double))
    for axis, backwards in enumerate(group.reversed_axes):
        if backwards:  # and there they must
            shape = [8 if i in next(c for c in group.axis_classes if axis in c) else n for i, n in enumerate(odd)]
            found = explain(net, torch.rand(1, 2, *shape, dtype=torch.double), group)
            assert found.first is not None
            assert found.first.why.startswith("stride 2 does not divide 8 + 2*1 - 3")


def test_sizes_are_looked_for_along_sides_of_one_length() -> None:
    net = nn.Sequential(LiftConv(C4, 1, 2, (2, 3, 3), stride=2, padding=(0, 1, 1)), CosetPool(C4))
    assert exact_sizes(net, torch.rand(1, 1, 6, 9, 9), C4) == [7, 9, 11, 13]
    assert exact_sizes(LiftConv(p1, 1, 2, 3, stride=2, padding=1), torch.rand(1, 1, 8, 8), p1) == list(range(6, 13))


def test_faults_that_a_dead_layer_hides_are_found() -> None:
    """Shaken parameters may kill the last ReLU: a constant answer is equivariant, the network is not."""
    for seed in range(20):
        torch.manual_seed(seed)
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        found = explain(
            nn.Sequential(LiftConv(p4, 1, 2, 3, stride=2, padding=1), CosetPool(p4), *head), torch.rand(1, 1, 8, 8), p4
        )
        assert found.first is not None, seed
        assert found.first.name == "0"
    blind = nn.Sequential(LiftConv(p4, 1, 2, 3, stride=2, padding=1), CosetPool(p4), nn.Threshold(1e9, 0.0))
    assert not explain(blind, torch.rand(1, 1, 8, 8), p4).exact  # then layers are judged by themselves alone
    assert explain(blind, torch.rand(1, 1, 9, 9), p4).exact


def test_code_after_a_layer_of_several_results_is_not_blamed_on_it() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Twice()

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.twice(x)
            return torch.cat([first, second[..., 1:]], 1)

    with pytest.raises(ValueError, match=r"explain: the model fails after twice \(Twice\)"):
        explain(Net(), torch.rand(1, 1, 9, 9), p4)


def test_sizes_are_found_for_images_that_are_not_square() -> None:
    net = nn.Sequential(LiftConv(p4m, 1, 2, 3, stride=2, padding=1))
    assert exact_sizes(net, torch.rand(1, 1, 8, 10), p4m) == [7, 9, 11, 13, 15]

    class Deep(nn.Module):  # whose first side is as it is
        def __init__(self) -> None:
            super().__init__()
            self.see = LiftConv(C4, 1, 2, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[2] == 6
            y: Tensor = self.see(x)
            return y

    assert exact_sizes(Deep(), torch.rand(1, 1, 6, 9, 9), C4) == [7, 9, 11, 13]


def test_decisions_are_not_dead() -> None:
    """An answer that does not change with small changes of the input is no sign of a layer that hides faults."""

    class Vector(nn.Module):
        def forward(self, y: Tensor) -> Tensor:  # turns with the image, in a way that explain does not know
            return torch.stack([y[..., 0] - y[..., 2], y[..., 1] - y[..., 3]], -1)

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.vector = LiftConv(p4, 1, 5, 3, padding=1), Vector()

        def forward(self, x: Tensor) -> Tensor:
            long = self.vector(self.see(x).mean((3, 4))).norm(dim=-1)
            return long.argmax(1, keepdim=True)

    torch.manual_seed(0)
    found = explain(Decides(), torch.rand(1, 1, 9, 9), p4)
    assert found.exact, found


@pytest.mark.parametrize("end", ["float", "bytes"])
def test_networks_may_end_in_single_precision_or_begin_with_bytes(end: str) -> None:
    class Net(nn.Module):
        def __init__(self, stride: int) -> None:
            super().__init__()
            self.see, self.pool = LiftConv(p4, 1, 2, 3, stride, 1), CosetPool(p4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.pool(self.see(x.to(self.see.weight.dtype) / 255))
            return y.float() if end == "float" else y

    x = torch.randint(0, 256, (1, 1, 8, 8)).to(torch.uint8) if end == "bytes" else torch.rand(1, 1, 8, 8)
    assert explain(Net(1), x, p4).exact
    assert not explain(Net(2), x, p4).exact


def test_the_image_may_be_any_of_several_inputs() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.pool = LiftConv(p4, 1, 2, 3, 2, 1), CosetPool(p4)

        def forward(self, scale: Tensor, image: Tensor) -> Tensor:
            y: Tensor = self.pool(self.see(image)) * scale[:, :, None, None]
            return y

    inputs = torch.rand(1, 1), torch.rand(1, 1, 9, 9)
    assert_equivariant(Scaled(), p4, inputs)
    assert explain(Scaled(), inputs, p4).exact
    assert exact_sizes(Scaled(), inputs, p4) == [7, 9, 11, 13]
    for wrong, message in (
        ((inputs[1], torch.rand(1, 9, 9)), r"expected x\[1\] .* got \(1, 9, 9\); a batch axis is missing .* x\[1\]\[None\]"),
        (torch.rand(1, 9, 9), r"expected x .* got \(1, 9, 9\); a batch axis is missing if this is one sample: x\[None\]"),
        ((inputs[0], inputs[0]), r"expected x\[0\] .* got \(1, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            equivariance_error(Scaled(), p4, wrong)
    with pytest.raises(TypeError, match="a tuple with NoneType"):
        equivariance_error(Scaled(), p4, (inputs[1], None))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"or a tuple of them, got p4 and \(1, 1, 9, 9\), int"):
        exact_sizes(Scaled(), (inputs[1], 3), p4)  # type: ignore[arg-type]


def test_inputs_of_two_precisions_are_judged_by_the_coarser_one() -> None:
    x = torch.rand(1, 1, 9, 9)
    assert_equivariant(lambda a, b: a.float() * b.mean((2, 3), keepdim=True), p4, (x.double(), torch.rand(1, 1, 9, 9)))
    whole = torch.randint(0, 9, (1, 1, 5, 5))
    assert_equivariant(lambda a, b: a + b, p4, (whole, whole.clone()))


def test_networks_that_end_in_half_precision_are_not_excused() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see = nn.Conv2d(1, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.see(x).relu().amax((2, 3)).bfloat16()

    torch.manual_seed(0)
    assert not explain(Half(), torch.randn(1, 1, 9, 9), p4).exact


def test_bytes_that_do_not_fit_say_what_was_expected() -> None:
    class Net(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.see, self.pool = LiftConv(p4, channels, 4, 3), CosetPool(p4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.pool(self.see(x.float() / 255))
            return y

    x = torch.randint(0, 255, (1, 1, 9, 9)).to(torch.uint8)
    assert explain(Net(1), x, p4).exact
    with pytest.raises(ValueError, match=r"expected input \(N, 3, H, W\), got \(1, 1, 9, 9\)"):
        explain(Net(3), x, p4)


def test_sizes_for_two_images_of_one_place_and_functions_before_images() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (LiftConv(p4, 1, 2, 3, stride=2) for _ in range(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z: Tensor = self.one(x) + (self.other(y) if y.ndim > 3 else y[..., None, None].mean())
            return z

    image = torch.rand(1, 1, 12, 16)
    assert exact_sizes(Two(), (image, image), p4) == [13, 15, 17, 19, 21, 23]

    class Turned(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(y, x)

    assert exact_sizes(Turned(), (torch.rand(1, 2, 4), image), p4) == [13, 15, 17, 19, 21, 23]


@pytest.mark.parametrize(
    "end", [lambda y: y > 0, lambda y: (y.sigmoid() * 255).to(torch.uint8), torch.argmax], ids=["masks", "bytes", "labels"]
)
def test_networks_may_end_in_masks_and_labels(end: Any) -> None:
    class Ends(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = end(self.net(x)) if end is not torch.argmax else self.net(x).argmax(1, keepdim=True)
            return y

    x = torch.rand(1, 1, 9, 9)
    good, bad = nn.Sequential(LiftConv(p4, 1, 3, 3), CosetPool(p4)), nn.Conv2d(1, 3, 3)
    assert equivariance_error(Ends(good).double(), p4, x.double()) == 0
    assert_equivariant(Ends(good).double(), p4, x.double())
    assert explain(Ends(good), x, p4).exact
    assert 0 < equivariance_error(Ends(bad), p4, x) <= 1  # bytes do not go round at 0, truth can be subtracted
    assert not explain(Ends(bad), x, p4).exact


@pytest.mark.parametrize("generator", [4, 2, 1])
def test_explain_takes_maps_over_cosets(generator: int) -> None:
    within = p4m.subgroup(generator)
    cosets = p4m.order // len(within)
    for stride in (1, 2):
        net = nn.Sequential(GConv(p4m, 2, 3, 3, stride, stabilizer=within), nn.ReLU(), CosetPool(p4m))
        found = explain(net, torch.rand(1, 2, cosets, 10, 10), p4m, stabilizer=within)
        assert found.exact == (stride == 1)
        assert found.sizes == (() if stride == 1 else (7, 9, 11, 13))
    with pytest.raises(ValueError, match=r"\(0, 3\) is not a subgroup of p4m"):
        explain(net, torch.rand(1, 2, 4, 10, 10), p4m, stabilizer=(0, 3))


def test_functions_over_cosets_of_a_normal_subgroup_are_not_symmetric() -> None:
    class Mixes(nn.Module):
        def __init__(self, each: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))
            self.each = each

        def forward(self, x: Tensor) -> Tensor:
            y = torch.einsum("oc,ncs->nos", self.weight, x)
            return y * torch.arange(4) if self.each else y

    turns = p4m.subgroup(2)  # the half turn: alone in its class
    x, mixes = torch.rand(2, 2, 4), Mixes(False)
    state = torch.get_rng_state()
    assert equivariance_error(mixes, p4m, x, stabilizer=turns, out_stabilizer=turns) == 0
    assert torch.equal(state, torch.get_rng_state())
    assert equivariance_error(Mixes(True), p4m, x, stabilizer=turns, out_stabilizer=turns) > 0.1
    assert explain(Mixes(False), x, p4m, stabilizer=turns).exact
    assert not explain(Mixes(True), x, p4m, stabilizer=turns).exact
    with pytest.raises(ValueError, match="x is symmetric, element 1 of p4m"):
        equivariance_error(Mixes(False), p4m, torch.ones(2, 2, 4), stabilizer=turns, out_stabilizer=turns)


@pytest.mark.parametrize("sides", [(9, 9), (9, 12)])
@pytest.mark.parametrize("group", [p4m, pm], ids=str)
@pytest.mark.parametrize("end", ["squeezed", "last", "two last", "labels"])
def test_images_may_come_without_their_channel_or_with_it_last(end: str, group: Group, sides: tuple[int, int]) -> None:
    ends: dict[str, Any] = {
        "squeezed": lambda y: y[:, 0],
        "last": lambda y: y[:, :1].movedim(1, -1),
        "two last": lambda y: y[:, :2].movedim(1, -1),
        "labels": lambda y: y.argmax(1),
    }

    class Ends(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = ends[end](self.net(x))
            return y

    x = torch.rand(2, 1, *sides)
    good, bad = nn.Sequential(LiftConv(group, 1, 3, 3, padding=1), CosetPool(group)), nn.Conv2d(1, 3, 3, padding=1)
    assert equivariance_error(Ends(good).double(), group, x.double()) < 1e-9
    assert explain(Ends(good), x, group).exact
    assert equivariance_error(Ends(bad), group, x) > 0.1
    assert not explain(Ends(bad), x, group).exact


def test_what_is_empty_or_no_image_is_refused() -> None:
    net = nn.Sequential(LiftConv(p4m, 1, 2, 3), CosetPool(p4m))
    for call in (equivariance_error, assert_equivariant):
        with pytest.raises(ValueError, match=r"x is empty, \(0, 1, 9, 9\)"):
            call(net, p4m, torch.rand(0, 1, 9, 9))
    with pytest.raises(ValueError, match=r"explain\(model, x, group\): x is empty"):
        explain(net, torch.rand(0, 1, 9, 9), p4m)
    with pytest.raises(ValueError, match=r"functions \(N, K, 8\) on p4m, got \(2, 2, 2\); vectors and matrices"):
        equivariance_error(lambda x: x[:, 0, :2, :2], p4m, torch.rand(2, 1, 9, 9))


class Outer(nn.Module):
    """Matrices of products."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


def test_channels_first_are_channels_first() -> None:
    """Results whose channels are as many as the image has rows, and invariant matrices, are no images with channels last."""
    strips = nn.Sequential(LiftConv(pmm, 1, 8, (1, 5)), CosetPool(pmm))
    assert_equivariant(strips, pmm, torch.rand(2, 1, 8, 8))
    wide = nn.Sequential(LiftConv(p4, 1, 12, 5), CosetPool(p4))
    assert_equivariant(wide, p4, torch.rand(2, 1, 8, 12))
    assert explain(wide, torch.rand(2, 1, 8, 12), p4).exact

    class Gram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(LiftConv(p4, 1, 5, 3), nn.ReLU(), CosetPool(p4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x).flatten(2)
            return y @ y.mT

    assert explain(Gram(), torch.rand(2, 1, 9, 9), p4).exact
    assert_equivariant(Gram(), p4, torch.rand(2, 1, 9, 9))
    outer = nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(2), Outer())
    with pytest.raises(ValueError, match=r"got \(2, 5, 5\); vectors and matrices"):
        equivariance_error(outer, p4, torch.rand(2, 1, 9, 9))


@pytest.mark.parametrize(
    ("net", "group", "shape"),
    [
        (nn.Conv2d(1, 2, 3, padding=1), p4, (1, 1)),
        (nn.Conv2d(1, 2, 3, padding=1), pm, (1, 9)),
        (nn.Conv1d(1, 2, 3, padding=1), linem, (1,)),
    ],
    ids=["one pixel", "a strip", "one sample"],
)
def test_images_that_nothing_moves_are_refused(net: nn.Module, group: Group, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="x is symmetric"):
        equivariance_error(net, group, torch.rand(2, 1, *shape))
    with pytest.raises(ValueError, match="x is symmetric"):
        explain(net, torch.rand(2, 1, *shape), group)


def test_compiled_networks_with_a_part_called_module() -> None:
    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(LiftConv(p4, 1, 4, 3), CosetPool(p4))
            self.head = nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.module(x))
            return y

    net = Wrap()
    compiled: Any = torch.compile(net)
    assert not explain(compiled, torch.rand(2, 1, 9, 9), p4).exact  # the head is planar
    assert unwrapped(compiled) is unwrapped(nn.DataParallel(compiled)) is net
    assert unwrapped(net) is net
