"""Networks as plain torch modules: the same numbers, and nothing of this package left in them."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import image, space
from gcnn import GROUPS, Group, convert, export, lattice, linem, p4, p4m, p6, p6m
from gcnn.export import planar, to_onnx
from gcnn.lattice import to_hexagonal
from gcnn.models import build
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

BOXES = [g for g in GROUPS.values() if g.fills_box]
HEXAGONAL = [g for g in GROUPS.values() if not g.fills_box]


def part(group: Group) -> tuple[int, ...]:
    """A subgroup that is not the whole group, the largest there is."""
    return group.subgroups()[-2] if len(group.subgroups()) > 1 else (0,)


class Network(nn.Module):
    """Layers of every kind with what users write between them."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        half = part(group)
        mode: Any = "circular" if group.fills_box else "zeros"
        self.lift = LiftConv(group, 2, 4, 3, padding=1, padding_mode=mode)
        self.norm, self.prelu, self.drop = GBatchNorm(group, 4), nn.PReLU(4), nn.Dropout(0.5)
        self.grouped = GConv(group, 4, 4, 3, padding=1, groups=2)
        self.strided = GConv(group, 8, 6, 3, stride=2, padding=1, dilation=1, bias=False)
        self.pool, self.up = GMaxPool(group, 3, 1, 1), GUpsample(group, scale_factor=2, mode="linear")
        self.back = GConvTranspose(group, 6, 4, 3, padding=1)
        self.cosets = CosetPool(group, half, "mean")
        self.from_cosets = GConv(group, 4, 3, 1, stabilizer=half)
        self.mean, self.average = GAdaptiveAvgPool(group, 1), GAvgPool(group, 3, 1, 1)
        self.linear, self.coset_pool, self.head = GLinear(group, 3, 5), CosetPool(group), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.drop(self.prelu(self.norm(self.lift(x)))))
        x = torch.cat([x, self.grouped(x)], 1)
        x = self.up(self.pool(self.strided(x))) * 2
        x = self.cosets(self.back(x).relu())
        x = self.mean(self.average(self.from_cosets(x))).flatten(3).squeeze(-1)  # (N, 3, S)
        y: Tensor = self.head(self.coset_pool(self.linear(x)))
        return y


@pytest.mark.parametrize("group", GROUPS.values(), ids=str)
def test_planar_networks_compute_the_same(group: Group) -> None:
    torch.manual_seed(0)
    net = Network(group).double()
    x = image(group).double()
    if not group.fills_box:
        x = x + 1  # not zero outside the hexagon: the network does not look there, and neither may the plain one
    for _ in range(3):
        net(x)  # running statistics to fold
    net.eval()
    before = net(x)
    made = planar(net)
    torch.testing.assert_close(made(x), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(planar(net, fold=True)(x), before, rtol=1e-11, atol=1e-11)
    assert all(type(m).__module__.startswith(("torch.nn", "torch.fx")) for m in made.modules())


@pytest.mark.parametrize("name", ["z2cnn", "p4cnn", "p4cnn-rotpool", "digit-resnet", "resnet44"])
def test_planar_models(name: str) -> None:
    torch.manual_seed(0)
    net = build(name)
    x = torch.randn(2, *((3, 32, 32) if name == "resnet44" else (1, 28, 28)))
    net(x)
    training = planar(net)(x)  # a network in training is exported as it would answer
    assert net.training
    torch.testing.assert_close(training, net.eval()(x), rtol=1e-5, atol=1e-6)


def test_a_planar_network_loads_without_this_package(tmp_path: Path) -> None:
    net, x = build("p4cnn").eval(), torch.randn(2, 1, 28, 28)
    torch.save((planar(net), x, net(x)), tmp_path / "net.pt")
    script = """
import sys
sys.modules["gcnn"] = None
import torch
net, x, y = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(net(x), y)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "net.pt")], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_planar_networks_are_traced_and_exported_further() -> None:
    made, x = planar(build("p4cnn").eval()), torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(torch.export.export(made, (x,)).module()(x), made(x))
    torch.testing.assert_close(torch.jit.trace(made, x)(x), made(x))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(GBatchNorm(p4m, 2, track_running_stats=False)), r"has no running statistics to fold"),
        (Branching(), r"torch.fx cannot trace Branching"),
    ],
)
def test_what_has_no_planar_form_says_so(net: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planar(net)


class Awkward(nn.Module):
    """What users also write: grouped layers, scales by a tensor, a gate of one channel, a norm used twice, arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.grouped, self.norm = (
            LiftConv(p4, 3, 4, 3, padding=1),
            GConv(p4, 4, 4, 3, padding=1, groups=2),
            GBatchNorm(p4, 4),
        )
        self.gate, self.pool, self.prelu = GConv(p4, 4, 1, 1), GMaxPool(p4, 3, 1, 1), nn.PReLU(4)
        self.coset_pool, self.up = CosetPool(p4), nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)
        self.a = nn.Module()
        self.a.b, self.a_b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.full((1, 4, 1, 1, 1), 5.0))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.norm(self.grouped(self.lift(x)))
        y = y * torch.sigmoid(self.gate(y)) * self.a.b + self.a_b
        y = self.pool(torch.abs(self.norm(y.clamp(min=0))))
        image = self.prelu(self.norm(self.coset_pool(self.prelu(y))))
        return self.up(image, output_size=(18, 18)), {"image": torch.cat(tensors=[image, image], dim=1)}


def test_planar_networks_of_awkward_users() -> None:
    torch.manual_seed(0)
    net, x = Awkward().double(), torch.randn(2, 3, 9, 9, dtype=torch.double)
    for _ in range(3):
        net(x)
    net.eval()
    (first, others), (again, more) = net(x), planar(net)(x)
    torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(more["image"], others["image"], rtol=1e-12, atol=1e-12)


class Parts(nn.Module):
    """A map that is taken apart, and put together again."""

    def __init__(self, group: Group, how: Any) -> None:
        super().__init__()
        self.lift, self.back, self.how = LiftConv(group, 3, 4, 3, padding=1), GConv(group, 4, 2, 3), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self, self.lift(x))


@pytest.mark.parametrize("group", [p4, p6], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        lambda s, y: s.back(torch.cat(y.chunk(2, 1), 1)),
        lambda s, y: s.back(torch.cat(tensors=torch.split(y, [1, 3], 1), dim=1).relu()),
        lambda s, y: s.back(torch.cat([y[:, :2], y[:, :2]], axis=1)),  # type: ignore[call-arg]
        lambda s, y: torch.cat(y.unbind(2), 1),
    ],
)
def test_parts_of_maps_are_concatenated(group: Group, how: Any) -> None:
    torch.manual_seed(0)
    net, x = Parts(group, how).double().eval(), image(group, channels=3)
    torch.testing.assert_close(planar(net)(x), net(x), rtol=1e-12, atol=1e-12)


def test_planar_is_a_copy_and_leaves_the_network_alone() -> None:
    net = nn.Sequential(
        LiftConv(p4, 3, 4, 3), GBatchNorm(p4, 4), CosetPool(p4), nn.Flatten(), nn.Dropout(), nn.Linear(196, 3)
    ).train()
    net[1].eval()
    modes = [m.training for m in net.modules()]
    made = planar(net)
    assert [m.training for m in net.modules()] == modes
    assert not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in net.parameters()}
    made.double()
    net(torch.randn(2, 3, 9, 9))


@pytest.mark.parametrize("layer", [GBatchNorm(p4, 3), GMaxPool(p4, 3), GAvgPool(p4, 3), GConv(p4, 3, 2, 3)], ids=str)
def test_one_layer_alone(layer: nn.Module) -> None:
    x = torch.randn(2, 3, 4, 9, 9)
    torch.testing.assert_close(planar(layer.eval())(x), layer(x))


@pytest.mark.parametrize("group", [g for g in BOXES if 1 < g.order <= 16], ids=lambda g: g.name)
def test_norms_of_layers_restrictions_and_subsampling(group: Group) -> None:
    torch.manual_seed(0)
    part = group.subgroups()[-2] if len(group.subgroups()) > 1 else (0,)
    restrict, sample = Restrict(group, part), GSubsample(group, 2, part)
    small = group.restrict(part)
    layers = (LiftConv(group, 2, 3, 3, padding=1), GLayerNorm(group, 3), nn.ReLU())
    for net in (
        nn.Sequential(*layers, restrict, GConv(small, 3 * group.order // len(part), 2, 1)),
        nn.Sequential(*layers, sample, GConv(small, 3, 2, 1)),
    ):
        x = image(group, size=5).to(torch.float32)
        torch.testing.assert_close(planar(net)(x), net.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [p4m, GROUPS["linem"], GROUPS["D4"]], ids=lambda g: g.name)
def test_norms_after_transposed_convolutions_are_folded_too(group: Group) -> None:
    torch.manual_seed(0)
    layers = (LiftConv(group, 2, 3, 3, padding=1), GConvTranspose(group, 3, 2, 3, 2, 1), GBatchNorm(group, 2), nn.ReLU())
    net, x = nn.Sequential(*layers).double(), image(group, size=5)
    net(x)  # statistics that are not zero and one
    plain = planar(net.eval(), fold=True)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plain.modules())
    torch.testing.assert_close(plain(x), net(x), rtol=1e-11, atol=1e-11)


def test_other_roads_of_torch_take_plain_networks() -> None:
    torch.manual_seed(0)
    net, x = build("p4cnn", channels=2).eval(), torch.randn(2, 1, 28, 28)
    plain = planar(net, fold=True)
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(torch.export.export(plain, (x,)).module()(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.jit.trace(plain, (x,))(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # inductor uses what torch deprecates
def test_a_plain_network_runs_ahead_of_time(tmp_path: Path) -> None:
    """AOTInductor: a library that needs no Python."""
    torch.manual_seed(0)
    net, x = nn.Sequential(LiftConv(p4, 1, 2, 3), GBatchNorm(p4, 2), nn.ReLU(), CosetPool(p4)).eval(), torch.randn(1, 1, 9, 9)
    inductor: Any = torch._inductor
    file = inductor.aoti_compile_and_package(torch.export.export(planar(net), (x,)), package_path=str(tmp_path / "net.pt2"))
    with torch.no_grad():
        torch.testing.assert_close(inductor.aoti_load_package(file)(x), net(x), rtol=1e-5, atol=1e-5)


# --- every layer on every lattice ----------------------------------------------------------------------------------------------

THERE: dict[str, Any] = {  # what leads to a map with 4 channels, and the layer
    "lift": lambda g: (nn.Identity(), LiftConv(g, 2, 4, 3, padding=1)),
    "lift, strided": lambda g: (nn.Identity(), LiftConv(g, 2, 4, 3, padding=1, stride=2, bias=False)),
    "conv": lambda g: (LiftConv(g, 2, 4, 3), GConv(g, 4, 2, 3, padding="same", dilation=2)),
    "conv, grouped": lambda g: (LiftConv(g, 2, 4, 1), GConv(g, 4, 4, 3, padding=1, groups=2)),
    "depthwise": lambda g: (LiftConv(g, 2, 4, 1), GDepthwiseConv(g, 4, 8, 3, padding=1)),
    "from cosets": lambda g: (
        nn.Sequential(LiftConv(g, 2, 4, 1), CosetPool(g, part(g))),
        GConv(g, 4, 2, 3, stabilizer=part(g), groups=2) if g.order > 1 else LiftConv(g, 4, 2, 3),
    ),
    "transposed": lambda g: (LiftConv(g, 2, 4, 1), GConvTranspose(g, 4, 2, 3, stride=2, padding=1)),
    "transposed, grouped": lambda g: (LiftConv(g, 2, 4, 1), GConvTranspose(g, 4, 4, 3, dilation=2, padding=1, groups=2)),
    "norm": lambda g: (LiftConv(g, 2, 4, 3), GBatchNorm(g, 4)),
    "norm of an image": lambda g: (nn.Sequential(LiftConv(g, 2, 4, 3), CosetPool(g)), GBatchNorm(g, 4)),
    "layer norm": lambda g: (LiftConv(g, 2, 4, 3), GLayerNorm(g, 4)),
    "layer norm, grouped": lambda g: (nn.Sequential(LiftConv(g, 2, 4, 1), GConv(g, 4, 4, 1, groups=2)), GLayerNorm(g, 4)),
    "layer norm of an image": lambda g: (nn.Sequential(LiftConv(g, 2, 4, 3), CosetPool(g)), GLayerNorm(g, 4)),
    "max pool": lambda g: (LiftConv(g, 2, 4, 1), GMaxPool(g, 3, 2, 1)),
    "max pool, grouped": lambda g: (nn.Sequential(LiftConv(g, 2, 4, 1), GConv(g, 4, 4, 1, groups=2)), GMaxPool(g, 3, 1, 1)),
    "max pool of an image": lambda g: (nn.Identity(), GMaxPool(g, 3, 1, 1, 1)),
    "average pool": lambda g: (LiftConv(g, 2, 4, 1), GAvgPool(g, 3, 1, 1)),
    "average pool without padding": lambda g: (LiftConv(g, 2, 4, 1), GAvgPool(g, 3, 2, 1, count_include_pad=False)),
    "average over all": lambda g: (LiftConv(g, 2, 4, 1), GAdaptiveAvgPool(g, 1)),
    "upsample": lambda g: (LiftConv(g, 2, 4, 1), GUpsample(g, scale_factor=2, mode="linear")),
    "subsample": lambda g: (LiftConv(g, 2, 4, 1), GSubsample(g, 2, part(g))),
    "restrict": lambda g: (LiftConv(g, 2, 4, 1), Restrict(g, part(g))),
    "coset pool": lambda g: (LiftConv(g, 2, 4, 1), CosetPool(g, part(g), "mean")),
    "pool over the group": lambda g: (LiftConv(g, 2, 4, 1), CosetPool(g)),
    "pool over a domain": lambda g: (
        LiftConv(g, 2, 4, 1),
        GPool(g, [(0, (0,) * g.dim), (g.order - 1, (1,) + (0,) * (g.dim - 1)), (0, (0,) * (g.dim - 1) + (-1,))]),
    ),
    "mean over a domain": lambda g: (
        LiftConv(g, 2, 4, 1),
        GPool(g, [(0, (1,) * g.dim), (g.order // 2, (0,) * g.dim)], "mean"),
    ),
    "sigmoid": lambda g: (LiftConv(g, 2, 4, 1), nn.Sigmoid()),  # not 0 at 0
}


@pytest.mark.parametrize("name", THERE)
def test_every_layer_on_every_lattice(name: str) -> None:
    for group in GROUPS.values():
        torch.manual_seed(0)
        before, layer = THERE[name](group)
        net = nn.Sequential(before, layer).double()
        x = 1 + torch.randn(2, 2, *space(group, 9 if group.dim < 3 else 5), dtype=torch.float64)
        with torch.no_grad():
            net(x)
            y = net.eval()(x)
            made = planar(net)
            torch.testing.assert_close(made(x), y, rtol=1e-12, atol=1e-12, msg=lambda m, g=group: f"{g}: {m}")  # type: ignore[misc]
            if group.dim < 3:
                crop: Any = (..., *(slice(0, n - 4) for n in x.shape[2:]))
                smaller = x[crop]  # the size is no part of it
                torch.testing.assert_close(made(smaller), net(smaller), rtol=1e-12, atol=1e-12)
        assert all(type(m).__module__.startswith(("torch.nn", "torch.fx")) for m in made.modules())


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("p4cnn", {}, (5, 1, 28, 28)),
        ("p4cnn-rotpool", {}, (5, 1, 28, 28)),
        ("allcnn-c", {"channels": 4}, (2, 3, 32, 32)),
        ("resnet18", {"group": p4m, "widths": (8, 12, 16, 16)}, (2, 3, 33, 33)),
        ("voxel-resnet", {"widths": (2, 3)}, (2, 1, 9, 9, 9)),
    ],
)
def test_plain_networks_give_the_same_bits(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Folded norms round anew, and are as near to the numbers of float64."""
    torch.manual_seed(0)
    net: Any = build(name, **options)
    x = torch.randn(shape)
    with torch.no_grad():
        net(x)
        for layer in net.eval().modules():
            if isinstance(layer, GConv):
                layer.algorithm = "planar"
        y = net(x)
        assert torch.equal(planar(net)(x), y)
        folded, exact = planar(net, fold=True)(x), copy.deepcopy(net).double()(x.double())
        errors = [float((z - exact).abs().max() / exact.abs().max()) for z in (y, folded)]
        assert errors[1] < 3 * errors[0] + 1e-6


@pytest.mark.filterwarnings("ignore:No complete tensor found")  # torch on weights that lie with their channels last
def test_hexagonal_networks_load_without_this_package_and_stay_plain(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net: Any = build("p4cnn", group=p6, channels=3)
    x = torch.randn(2, 1, 28, 28)
    net(x)
    net.eval()
    plain = planar(net, fold=True)
    with torch.no_grad():
        y = net(x)
        torch.testing.assert_close(plain(x), y, rtol=1e-5, atol=1e-6)
        larger = torch.randn(1, 1, 40, 30)
        torch.testing.assert_close(planar(net[:1])(larger), net[:1](larger), rtol=1e-5, atol=1e-5)
    assert not [m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.save((plain, x, y), tmp_path / "net.pt")
    torch.export.save(torch.export.export(plain, (x,)), tmp_path / "net.pt2")
    torch.jit.save(torch.jit.trace(plain, (x,)), tmp_path / "net.ts")
    script = """
import sys
sys.modules["gcnn"] = None
import torch
net, x, y = torch.load("net.pt", weights_only=False)
with torch.no_grad():
    for other in (net, torch.export.load("net.pt2").module(), torch.jit.load("net.ts")):
        torch.testing.assert_close(other(x), y, rtol=1e-5, atol=1e-6)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_hexagonal_networks_as_onnx_files(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net, x = build("p4cnn", group=p6m, channels=2).eval(), torch.randn(2, 1, 28, 28)
    assert to_onnx(net, tmp_path / "net.onnx", x) < 1e-5
    graph = onnx.load(tmp_path / "net.onnx").graph
    stored = {i.name for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT}
    assert not [n for n in graph.node if n.op_type == "Gather" and n.input[0] in stored]


@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_a_hexagonal_map_without_a_centre_is_refused_by_the_plain_network_too(size: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match="size"):
        planar(LiftConv(p6, 1, 2, 3))(torch.zeros(1, 1, *size))


class Resampled(nn.Module):
    """From pixels to hexagons and back."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how, self.lift, self.pool = how, LiftConv(p6, 2, 3, 3, padding=1), CosetPool(p6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.lift(to_hexagonal(x, **self.how)))
        return lattice.to_square(y, (11, 8), self.how.get("spacing"))


@pytest.mark.parametrize("how", [{}, {"size": 17}, {"spacing": 1.3}, {"size": 21, "spacing": 0.9}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_images_are_resampled_by_plain_operations(how: dict[str, Any], dtype: torch.dtype) -> None:
    net = Resampled(**how).to(dtype).eval()
    made = planar(net)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for size in ((20, 16), (7, 30)):
        x = torch.randn(2, 2, *size).to(dtype)
        torch.testing.assert_close(made(x), net(x), rtol=tolerance, atol=tolerance)


def test_what_a_norm_gets_may_need_an_example() -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.linear, self.norm = LiftConv(p6, 1, 2, 3), GLinear(p6, 2, 3), GBatchNorm(p6, 3)
            self.layer_norm = GLayerNorm(p6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer_norm(self.norm(self.linear(self.lift(x).mean((-2, -1)))))
            return y

    net, x = Net().eval(), torch.randn(2, 1, 9, 9)
    with pytest.raises(ValueError, match=r"planar: norm \(GBatchNorm.*give planar an example= input"):
        planar(net)
    torch.testing.assert_close(planar(net, example=x)(x), net(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"planar: the network fails on the example \(2, 3, 9, 9\): .*in_channels is 1"):
        planar(net.train(), example=torch.randn(2, 3, 9, 9))
    assert net.norm.training


class InPlace(nn.Module):
    """What is changed in place is seen by everyone who has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.conv = LiftConv(p6, 1, 2, 3), GConv(p6, 2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        y = self.conv(x)
        x.clamp_(min=0.5)
        y += self.conv(x)
        return y + x


def test_functions_in_place_on_hexagonal_maps() -> None:
    torch.manual_seed(0)
    net, x = InPlace().eval(), torch.randn(2, 1, 9, 9)
    torch.testing.assert_close(planar(net)(x), net(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", [p4m, p6m], ids=str)
def test_everything_of_a_plain_network_is_where_the_network_is(group: Group) -> None:
    """On the meta device, which is no other's: a constant left elsewhere would be an error there, as it would be on a GPU."""
    net, x = Network(group).eval().to("meta"), torch.empty(2, 2, 9, 9, device="meta")
    assert planar(net)(x).shape == (2, 3)
    layers = (LiftConv(group, 2, 4, 1), GPool(group, [(0, (0, 1))]), GLayerNorm(group, 4), Restrict(group, part(group)))
    assert planar(nn.Sequential(*layers).to("meta"))(x).device.type == "meta"


class Weighed(nn.Module):
    """A map and a number a channel, in either order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mean, self.mix, self.how = GAdaptiveAvgPool(p6m, 1), GConv(p6m, 4, 4, 1), how

    def forward(self, x: Tensor) -> Tensor:
        s = self.mix(self.mean(x)).sigmoid()
        return {"s * x": lambda: s * x, "x * s": lambda: x * s, "s + x": lambda: s + x, "x - s": lambda: x - s}[self.how]()


@pytest.mark.parametrize("how", ["s * x", "x * s", "s + x", "x - s"])
@pytest.mark.parametrize("more", [True, False])
def test_a_number_a_channel_meets_a_hexagonal_map(how: str, more: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(LiftConv(p6m, 1, 4, 3, padding=1), Weighed(how))
    if more:
        net.extend([GConv(p6m, 4, 4, 3, padding=1), GBatchNorm(p6m, 4), nn.ReLU(), GConv(p6m, 4, 2, 3, padding=1)])
    x = torch.randn(2, 1, 9, 9)
    net(x)
    y = net.eval()(x)
    torch.testing.assert_close(planar(net, example=x)(x), y, rtol=1e-5, atol=1e-5)
    if how == "s * x" and not more:
        pytest.importorskip("onnxruntime")
        assert to_onnx(net.train(), tmp_path / "net.onnx", x) < 1e-5
        assert net.training


def test_a_file_is_compared_with_the_network_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    net, other, x = (build("p4cnn", channels=2), build("p4cnn", channels=2), torch.randn(2, 1, 28, 28))
    monkeypatch.setattr(export, "planar", lambda model, fold, example: planar(other, fold, example))
    with pytest.raises(ValueError, match="answers are off by"):
        to_onnx(net, tmp_path / "net.onnx", x)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", [p4, p6])
@pytest.mark.parametrize("fold", [True, False])
def test_norms_without_a_bias(group: Group, fold: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(LiftConv(group, 1, 2, 3, padding=1), GBatchNorm(group, 2, bias=False), nn.ReLU())
    x = torch.randn(3, 1, 7, 7)
    net(x)
    torch.testing.assert_close(planar(net.eval(), fold)(x), net(x))


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.fc = LiftConv(p4, 3, 4, 3), nn.Linear(4 * 4 * 49, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(torch.relu(self.lift(x)).contiguous().view(x.size(0), -1))
        return y


def test_views_of_maps_that_were_made_contiguous() -> None:
    net, x = Viewed().eval(), torch.rand(2, 3, 9, 9)
    torch.testing.assert_close(planar(net, example=x)(x), net(x))


class ToItsSize(nn.Module):
    """The mean of quarters, enlarged to the map's own size."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z: Tensor = self.two(F.interpolate(F.adaptive_avg_pool2d(y, 2), size=y.shape[-2:], mode="nearest"))
        return z


@pytest.mark.parametrize("size", [8, 82])
def test_enlargements_by_any_factor(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = convert(ToItsSize(), p4).eval(), torch.randn(1, 1, size, size)
    torch.testing.assert_close(planar(net, example=x)(x), net(x))
    pytest.importorskip("onnxruntime")
    assert to_onnx(net, tmp_path / "net.onnx", x) < 1e-5


@pytest.mark.parametrize(
    "layer",
    [
        GLayerNorm(p4, 3),
        GLayerNorm(p6, 3),
        GAvgPool(p6, 3, 1, 1),
        GAvgPool(p6, 3, 1, 1, False),
        GPool(p6, [(0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (3, (0, -1))], "mean"),
    ],
    ids=str,
)
def test_large_numbers_in_half_precision(layer: Any) -> None:
    group: Group = layer.group
    net: Any = nn.Sequential(LiftConv(group, 1, 3, 1, bias=False), layer).half().eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([2e4, 3e4, 1e4]).view(3, 1, 1))
    x = image(group, channels=1, size=9, dtype=torch.float32).abs().clamp(max=1).half()
    y = net(x).detach()
    assert y.isfinite().all()
    assert y.abs().max() > 1
    torch.testing.assert_close(planar(net)(x), y, rtol=5e-3, atol=5e-3 * float(y.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_norms_without_a_bias_in_every_dtype(dtype: torch.dtype) -> None:
    net = nn.Sequential(LiftConv(p4, 1, 3, 3), GBatchNorm(p4, 3, bias=False)).to(dtype).eval()
    x = torch.rand(2, 1, 7, 7).to(dtype)
    torch.testing.assert_close(planar(net)(x), net(x))


@pytest.mark.parametrize(
    "how",
    [
        lambda s, x: s.n(s.c(x).mean((2, 3))),
        lambda s, x: s.n(F.relu(s.c(x).amax((2, 3)))),
        lambda s, x: s.n(s.c(x).mean((2, 3), keepdim=True)).flatten(1),
        lambda s, x: s.c(s.i(F.relu(x - 0.5))).mean((2, 3)),
        lambda s, x: s.c(s.b(x)).std((2, 3)),
    ],
    ids=["a mean", "a maximum", "a mean with axes", "an image", "a batch of images"],
)
def test_norms_of_converted_hexagonal_networks_need_no_example(how: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.n = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
            self.i, self.b = nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Any:
            return how(self, x)

    torch.manual_seed(0)
    net, x = convert(Net().double(), p6).eval(), torch.rand(2, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(planar(net)(x), net(x))
    torch.testing.assert_close(planar(net, example=x)(x), net(x))


@pytest.mark.parametrize("how", ["amax", "amin", "logsumexp"])
def test_reductions_over_hexagons_as_plain_networks_and_onnx_files(how: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.f = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            return self.f(getattr(self.c(x), how)((2, 3)))

    torch.manual_seed(0)
    net, x = convert(Net(), p6).eval(), torch.rand(2, 3, 9, 9)
    plain = planar(net)
    torch.testing.assert_close(plain(x), net(x))
    assert {type(m).__module__.partition(".")[0] for m in plain.modules()} == {"torch"}
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))
    assert to_onnx(net, tmp_path / "net.onnx", x) < 1e-4


# --- networks that torch.fx cannot trace as they are ---------------------------------------------------------------------------


class BySizes(nn.Module):
    """Branches, loops and checks of sizes between layers of a group."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.lift, self.norm, self.conv = LiftConv(group, 3, 4, 3, padding=1), GBatchNorm(group, 4), GConv(group, 4, 4, 3)
        self.small, self.layer_norm, self.pool = GConv(group, 4, 4, 1), GLayerNorm(group, 4), CosetPool(group)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 3, "colours"
        y = F.relu(self.norm(self.lift(x)))
        if x.shape[-1] % 4 != 1:
            y = y * 2
        while y.shape[-1] > 5:
            y = self.conv(y)
        y = self.layer_norm(self.conv(y) if y.shape[-1] == 5 else self.small(y))
        return F.avg_pool2d(self.pool(y), x.shape[-1] // 4)


class Outer(nn.Module):
    """What can be traced around what cannot, called twice."""

    def __init__(self, group: Group, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(LiftConv(group, 3, 4, 3, padding=1), GBatchNorm(group, 4), nn.ReLU())
        self.inner, self.last = inner, nn.Sequential(GConv(group, 4, 2, 1), CosetPool(group))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(self.inner(self.first(x))))
        return y


class ByNumbers(nn.Module):
    """Looks at the numbers, and keeps its layers in a list too."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.conv, self.norm = GConv(group, 4, 4, 3, padding=1), GLayerNorm(group, 4)
        self.layers = [self.conv, self.norm]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if float(x.detach().abs().max()) > 0 else []:
            x = layer(x)
        return x


def is_plain(net: nn.Module) -> bool:
    return not any(type(m).__module__.split(".")[0] == "gcnn" for m in net.modules())


@pytest.mark.parametrize("group", [p4m, p6], ids=str)
@pytest.mark.parametrize("fold", [True, False])
def test_branches_on_sizes_go_the_way_of_the_example(group: Group, fold: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = BySizes(group).double(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    net(x)  # running statistics
    net.eval()
    with pytest.raises(ValueError, match=r"torch.fx cannot trace BySizes .*give planar an example= image"):
        planar(net)
    for size in (9, 5, 7):
        x = torch.randn(3, 3, size, size, dtype=torch.float64)
        torch.save(planar(net, fold, example=x[:2].float()), tmp_path / "net.pt")
        made = torch.load(tmp_path / "net.pt", weights_only=False)
        torch.testing.assert_close(made(x), net(x), rtol=1e-11, atol=1e-11)
        assert {type(m).__module__.split(".")[0] for m in made.modules()} == {"torch"}
        for other in {5, 7, 9, 13} - {size}:
            with pytest.raises(AssertionError, match=rf"goes another way than the example \(2, 3, {size}, {size}\)"):
                made(torch.randn(1, 3, other, other, dtype=torch.float64))
    pytest.importorskip("onnxruntime")
    assert to_onnx(net.float(), tmp_path / "net.onnx", x.float()) < 1e-5


@pytest.mark.parametrize("group", [p4, p6m], ids=str)
def test_what_cannot_be_traced_has_its_layers_replaced(group: Group) -> None:
    torch.manual_seed(0)
    net, x = Outer(group, ByNumbers(group)).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    made: Any = planar(net, example=x)
    assert is_plain(made)
    assert isinstance(made.inner, ByNumbers)
    assert made.inner.layers == [made.inner.conv, made.inner.norm]  # and none of ours in there
    zero = torch.zeros_like(x)
    for part in (net.first[0], made.first.get_submodule("0")):
        part.bias = None
    for each in (x, x[:1] * 3, zero):  # the last goes the other way
        torch.testing.assert_close(made(each), net(each), rtol=1e-11, atol=1e-11)
    assert not any(isinstance(m, torch.fx.GraphModule) for m in net.modules())


@pytest.mark.parametrize(("group", "weights"), [(p4m, True), (p4m, False), (p6, False)], ids=str)
def test_networks_whose_modules_convert_replaced(group: Group, weights: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    net = convert(Looks().double(), group, "channels", weights=weights, example=x).eval()
    assert isinstance(net, Looks)
    with pytest.raises(ValueError, match="give planar an example= image"):
        planar(net)
    for fold in (True, False):
        made = planar(net, fold, example=x)
        assert isinstance(made, Looks)
        assert is_plain(made)
        for each in (x, -x, x[:1] * 5):
            torch.testing.assert_close(made(each), net(each), rtol=1e-11, atol=1e-11)
    around = convert(nn.Sequential(Looks(head=False), nn.Conv2d(8, 2, 1)).double(), group, example=x).eval()
    made = planar(around, example=x)
    assert is_plain(made)
    torch.testing.assert_close(made(-x), around(-x), rtol=1e-11, atol=1e-11)


class Looks(nn.Module):
    """An ordinary network that branches on numbers."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
        self.norm, self.prelu, self.drop, self.fc = nn.BatchNorm2d(8), nn.PReLU(8), nn.Dropout2d(0.2), nn.Linear(8, 5)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.prelu(self.norm(self.one(x))))
        if float(x.detach()[:, 0].mean()) > 0:
            y = self.two(y)
        return self.fc(y.mean((-2, -1))) if self.head else y


class Assigns(nn.Module):
    """What torch.fx does not trace, and torch.export does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x))
        y[y < 0] = 0
        z: Tensor = self.two(y)
        return z


def test_onnx_files_of_networks_whose_modules_were_replaced(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    net = convert(Assigns(), p4m, example=x).eval()
    assert to_onnx(net, tmp_path / "net.onnx", x) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    more = torch.randn(5, 3, 9, 9)
    found = torch.from_numpy(session.run(None, {"input": more.numpy()})[0])
    torch.testing.assert_close(found, net(more), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"to_onnx: Looks branches on numbers, .* write the branches with torch.where"):
        to_onnx(convert(Looks(), p4m, example=x), tmp_path / "none.onnx", x)
    assert not (tmp_path / "none.onnx").exists()


def test_a_network_with_replaced_modules_loads_without_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.b, self.f = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)
    def forward(self, x):
        y = self.b(self.c(x))
        return self.f((y if y.mean() < 100 else -y).mean((-2, -1)))
"""
    (tmp_path / "ordinary_net.py").write_text(written)
    monkeypatch.syspath_prepend(str(tmp_path))
    import ordinary_net  # type: ignore[import-not-found]

    x = torch.randn(2, 3, 9, 9)
    net = convert(ordinary_net.Net(), p6, example=x).eval()
    torch.save((planar(net, example=x), x, net(x)), tmp_path / "net.pt")
    script = """
import sys
sys.modules["gcnn"] = None
import torch
net, x, y = torch.load("net.pt", weights_only=False)
torch.testing.assert_close(net(x), y, rtol=1e-5, atol=1e-6)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


class Written(nn.Module):
    """A network whose forward is given."""

    def __init__(self, how: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.how = how
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


class Doubled(GConv):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def in_bfloat16(s: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return s.c(x)


def test_sizes_that_numbers_make_are_no_sizes() -> None:
    net = Written(lambda s, x: x * 2 if x[x > 0].numel() > 3 else s.c(x).amax(2), c=LiftConv(p4, 1, 1, 3, padding=1)).eval()
    x = torch.ones(2, 1, 5, 5)
    made = planar(net, example=x)
    for each in (x, -x):
        torch.testing.assert_close(made(each), net(each))


@pytest.mark.parametrize(
    ("how", "layers", "words"),
    [
        (lambda s, x: s.c(x) + torch.randn(1), {}, "answers otherwise than the network: .*random numbers"),
        (in_bfloat16, {}, r"answers otherwise than the network: .*torch\.autocast"),
        (lambda s, x: s.n(s.c(x)), {"n": Doubled(p6, 4, 4, 1)}, r"n \(Doubled.* has a forward of its own"),
        (lambda s, x: s.n(s.c(x)) if x.sum() > 1e9 else s.c(x), {"n": GBatchNorm(p6, 4)}, r"n \(GBatchNorm.*not run on this one"),
        (
            lambda s, x: s.n(s.n(s.c(x)).mean((-2, -1))) if x.sum() < 1e9 else x,
            {"n": GBatchNorm(p6, 4)},
            r"GBatchNorm.*: expected an input of 5 axes",
        ),
        (lambda s, x: s.c(x, x), {}, r"the network fails on the example \(2, 3, 9, 9\)"),
    ],
    ids=["random", "autocast", "a forward of its own", "a norm that does not run", "two kinds", "fails"],
)
def test_what_is_not_known_for_sure_is_refused(how: Any, layers: dict[str, nn.Module], words: str) -> None:
    net = Written(how, c=LiftConv(p6, 3, 4, 3), **layers).eval()
    with pytest.raises(ValueError, match=rf"(?s)^planar: .*{words}"):
        planar(net, example=torch.randn(2, 3, 9, 9))


def test_networks_inside_something_else_are_found() -> None:
    net, x = nn.Sequential(LiftConv(p4, 3, 4, 3)), torch.rand(1, 3, 9, 9)
    for outer in (nn.DataParallel(net), torch.compile(net), torch.compile(nn.DataParallel(net))):
        torch.testing.assert_close(planar(outer)(x), net(x))  # type: ignore[arg-type]


def test_onnx_files_for_images_of_any_size(tmp_path: Path) -> None:
    """A U-Net in a file answers to whole scenes as the network does; what does not do the same at every size is refused."""
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net = build("unet", group=p4m, width=8, levels=2, num_classes=3, in_channels=4).eval()
    x = torch.rand(1, 4, 32, 32)
    assert to_onnx(net, tmp_path / "any.onnx", x, any_size=True) < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "any.onnx"))
    assert session.get_inputs()[0].shape == ["N", 4, "H", "W"]
    for shape in ((2, 4, 32, 32), (1, 4, 48, 64), (3, 4, 36, 20)):
        image = torch.rand(shape)
        (found,) = session.run(None, {"input": image.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), net(image).detach())
    assert to_onnx(net, tmp_path / "one.onnx", x) < 1e-5
    one = onnxruntime.InferenceSession(str(tmp_path / "one.onnx"))
    assert one.get_inputs()[0].shape == ["N", 4, 32, 32]

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = LiftConv(p4, 1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.lift(x)
            return y.mean((-2, -1)).amax(2) if x.shape[-1] > 16 else y.amax((2, 3, 4))

    with pytest.raises(ValueError, match="any_size needs a network that does the same for images of every size"):
        to_onnx(Branches(), tmp_path / "none.onnx", torch.rand(1, 1, 9, 9), any_size=True)
    assert not (tmp_path / "none.onnx").exists()


class Lifts(nn.Module):
    """A first layer and a second, for networks with a forward of their own."""

    def __init__(self, group: Group = p4) -> None:
        super().__init__()
        self.lift, self.conv = LiftConv(group, 1, 4, 3, padding=1), GConv(group, 4, 4, 3, padding=1)
        self.inner: nn.Module = nn.Identity()
        self.seen = 0.0


class Centres(Lifts):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lift(x).amax((2, 3, 4))
        return y - y.mean(0) if x.shape[0] > 1 else y


class Remembers(Lifts):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        y: Tensor = self.lift(x).amax((2, 3, 4))
        return y * self.seen


class Classes(Lifts):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.lift(x).amax((2, 3, 4)) * (-1) ** self.calls).argmax(1)


class Inner(NamedTuple):
    y: Tensor


@dataclass
class Holding:
    inner: Inner


class Nested(Classes):
    def forward(self, x: Tensor) -> Any:
        return Holding(Inner(super().forward(x)))


class Optional(Lifts):
    def forward(self, x: Tensor, scale: Tensor | None = None, shape: tuple[int, ...] = (1, 2), *, shift: float = 0.5) -> Tensor:
        y: Tensor = self.lift(x if scale is None else x * scale)
        return y.relu() + shift if isinstance(shift, float) and shape[1] == 2 else y


def test_arguments_keep_their_defaults_unless_the_example_gives_them() -> None:
    net, x, scale = Optional().eval(), torch.randn(2, 1, 9, 9), torch.randn(1)
    for plain in (planar(net), planar(net, example=x)):
        torch.testing.assert_close(plain(x), net(x))
        with pytest.raises(TypeError):
            plain(x, scale)
    plain = planar(net, example=(x, scale))
    torch.testing.assert_close(plain(x, 2 * scale), net(x, 2 * scale))
    with pytest.raises(TypeError, match="scale"):
        plain(x)


def test_hooks_are_refused_by_name() -> None:
    net = nn.Sequential(LiftConv(p4, 1, 2, 3), nn.ReLU(), CosetPool(p4)).eval()
    for part, name in ((net[0], r"0 \(LiftConv\)"), (net[2], r"2 \(CosetPool\)"), (net, r"the network \(Sequential\)")):
        handle = part.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=rf"^planar: {name} has hooks, which would be lost; remove them first"):
            planar(net)
        handle.remove()
    net[1].register_forward_hook(lambda _, x, y: 2 * y)
    x = torch.randn(2, 1, 9, 9)
    layer = LiftConv(p4, 1, 2, 3)
    layer.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^planar: the layer \(LiftConv\) has hooks"):
        planar(layer)
    torch.testing.assert_close(planar(net)(x), net(x))


def test_a_name_that_torch_fx_keeps_for_itself() -> None:
    net = Optional().eval()
    net.register_buffer("code", torch.ones(1))  # which nothing asks for
    x = torch.randn(2, 1, 9, 9)
    torch.testing.assert_close(planar(net)(x), net(x))

    class Named(Optional):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            code: Any = self.code
            found: Tensor = super().forward(x) * code
            return found

    net = Named()
    net.register_buffer("code", torch.ones(1))
    with pytest.raises(ValueError, match=r"^planar: Named\.code has a name that the modules of torch.fx keep"):
        planar(net)


class Listed(Lifts):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [GConv(p4, 4, 4, 3, padding=1)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](self.lift(x))
        return y * 2 if y.max() > 1e9 else y


class Locked(Lifts):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lift(x)
        return y * 2 if y.max() > 1e9 else y


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Remembers(), "answers otherwise than the network: .* numbers that it keeps"),
        (Classes(), "answers otherwise than the network"),
        (Nested(), "answers otherwise than the network"),
        (Listed(), "is held outside of its modules, in a list or a function; use nn.ModuleList"),
        (Locked(), "cannot be traced by torch.fx .*, nor copied"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_plain_network_would_lose_is_refused(net: nn.Module, words: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=words):
        planar(net, example=torch.rand(5, 1, 9, 9))


def test_onnx_files_for_signals_of_any_length(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net = nn.Sequential(LiftConv(linem, 1, 2, 3, padding=1), GMaxPool(linem, 3, 2, padding=1), CosetPool(linem)).eval()
    assert to_onnx(net, tmp_path / "line.onnx", torch.randn(2, 1, 17), any_size=True) < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "line.onnx"))
    assert session.get_inputs()[0].shape == ["N", 1, "X"]
    for length in (17, 30, 101):
        x = torch.randn(3, 1, length)
        (found,) = session.run(None, {"input": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), net(x).detach())


def test_onnx_files_of_networks_of_several_inputs(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.pool = LiftConv(p4, 2, 3, 3, padding=1), CosetPool(p4)

        def forward(self, image: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = self.pool(self.see(image) * weights[:, :, None, None, None])
            return y

    net, x = Both().eval(), (torch.rand(1, 2, 8, 8), torch.rand(1, 3))
    assert to_onnx(net, tmp_path / "both.onnx", x, any_size=True) < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "both.onnx"))
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("input_1", ["N", 2, "H", "W"]), ("input_2", ["N", 3])]
    image, weights = torch.rand(4, 2, 10, 12), torch.rand(4, 3)
    (found,) = session.run(None, {"input_1": image.numpy(), "input_2": weights.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), net(image, weights).detach())
    refused: Any = (
        ((), TypeError, "a tuple of all inputs, got an empty tuple"),
        ((x[0], 3), TypeError, "got Tensor, int"),
        ((x[0], torch.rand(2, 3)), ValueError, r"as many samples each, N on the first axis, got \(1, 2, 8, 8\), \(2, 3\)"),
    )
    for wrong, error, message in refused:
        with pytest.raises(error, match=message):
            to_onnx(net, tmp_path / "wrong.onnx", wrong)
    assert not (tmp_path / "wrong.onnx").exists()


def test_onnx_files_are_tried_on_other_batches(tmp_path: Path) -> None:
    """A file cannot branch on how many images there are, and torch would not say so."""
    pytest.importorskip("onnxruntime")
    with pytest.raises(ValueError, match=r"the file's answers are off by|branches on numbers, or on how many images there are"):
        to_onnx(Centres(), tmp_path / "net.onnx", torch.rand(2, 1, 9, 9))
    assert not (tmp_path / "net.onnx").exists()


class Catches(Lifts):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lift(x)
        with suppress(Exception):
            if y.max() > 1e9:
                y = y * 2
        return y.amax((2, 3, 4))


class Changes(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        if y.max() > 10:
            y += 1
        return y.mean((-2, -1), keepdim=True)


class ChangedBetween(Lifts):
    def __init__(self) -> None:
        super().__init__(p6)
        self.inner = Changes()

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        w = self.inner(y)
        found: Tensor = (self.conv(y) + w).amax((2, 3, 4))
        return found


class Centred(Lifts):
    def __init__(self) -> None:
        super().__init__(p6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        y.sub_(y.mean((3, 4), keepdim=True))
        found: Tensor = self.conv(y).amax((2, 3, 4))
        return found


@pytest.mark.parametrize("make", [Catches, ChangedBetween, Centred])
def test_ways_that_the_example_does_not_go_are_gone(make: Callable[[], nn.Module]) -> None:
    """Branches on numbers whose refusal a forward catches, and changes in place on hexagons, for other numbers too."""
    torch.manual_seed(0)
    net, x = make().double().eval(), torch.rand(2, 1, 9, 9, dtype=torch.float64)
    made = planar(net, example=x)
    for factor in (1.0, 100.0, 1e13):
        with torch.no_grad():
            expected = net(factor * x)
            torch.testing.assert_close(made(factor * x), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_onnx_files_of_any_size_are_right_at_odd_ones(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    for size, length in ((2, 16), (3, 17)):
        pool = nn.MaxPool1d(size, ceil_mode=True)
        net = nn.Sequential(LiftConv(linem, 1, 2, 3, padding=1), CosetPool(linem), pool).eval()
        path = tmp_path / f"{size}.onnx"
        assert to_onnx(net, path, torch.randn(2, 1, length), any_size=True) < 1e-5
        session = onnxruntime.InferenceSession(str(path))
        for n in range(9, 20):
            x = torch.randn(1, 1, n)
            assert session.run(None, {"input": x.numpy()})[0].shape == net(x).shape


def test_onnx_files_of_any_size_with_inputs_that_are_no_images(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")

    class Told(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.see, self.pool, self.words, self.kind = LiftConv(p4, 1, 2, 3, padding=1), CosetPool(p4), nn.Linear(5, 2), kind

        def forward(self, image: Tensor, more: Tensor) -> Tensor:
            y: Tensor = self.pool(self.see(image))
            if self.kind == "words":  # (N, words, 5)
                return y + self.words(more).mean(1)[:, :, None, None]
            return y * more

    image = torch.rand(2, 1, 8, 8)
    assert to_onnx(Told("words"), tmp_path / "words.onnx", (image, torch.rand(2, 7, 5)), any_size=True) < 1e-5
    assert to_onnx(Told("scales"), tmp_path / "scales.onnx", (image, torch.rand(2, 2, 1, 1)), any_size=True) < 1e-5

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.pool = LiftConv(p4, 1, 2, 3, padding=1), CosetPool(p4)

        def forward(self, image: Tensor, half: Tensor) -> Tensor:
            y: Tensor = self.pool(self.see(image))[..., :-1, :-1] + F.interpolate(half, scale_factor=2.0)
            return y

    with pytest.raises(ValueError, match="any_size compares images of twice the size, on which the network fails"):
        to_onnx(Half(), tmp_path / "half.onnx", (torch.rand(2, 1, 9, 9), torch.rand(2, 1, 4, 4)), any_size=True)


def test_onnx_leaves_the_example_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see = nn.Sequential(LiftConv(p4, 1, 2, 3), CosetPool(p4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.see(x.sub_(0.5))
            return y

    x = torch.rand(2, 1, 9, 9)
    before = x.clone()
    assert to_onnx(InPlace(), tmp_path / "net.onnx", x) < 1e-5
    assert torch.equal(x, before)


def test_onnx_files_of_any_size_of_networks_for_odd_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    net = build("unet", in_channels=1, num_classes=2, odd=True).eval()
    assert to_onnx(net, tmp_path / "odd.onnx", torch.rand(1, 1, 33, 33), any_size=True) < 1e-4
    assert "Traceback" not in capfd.readouterr().err  # twice 33 is even, which it refuses
