"""The networks are the paper's, and exactly equivariant for every plane group."""

from __future__ import annotations

import errno
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common import plane_groups
from gcnn import Group, O, Oh, p1, p4, p4m, p6, p6m
from gcnn.models import MODELS, build, load, load_into, save
from gcnn.models.planar import Bottleneck
from gcnn.nn import CosetPool, GConv, GMaxPool, LiftConv
from gcnn.recipes import RECIPES
from gcnn.testing import equivariance_error, explain


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts_are_the_papers() -> None:
    assert {name: count(build(name)) for name in ("z2cnn", "p4cnn", "p4cnn-rotpool")} == {
        "z2cnn": 21_750,
        "p4cnn": 24_680,
        "p4cnn-rotpool": 21_750,
    }


def test_the_layers_are_the_papers() -> None:
    net = build("p4cnn")
    convs = [m for m in net.modules() if isinstance(m, GConv)]
    assert [c.kernel_size for c in convs] == [(3, 3)] * 6 + [(4, 4)]
    kinds = [type(m).__name__ for m in net.children()]
    assert kinds.index("GMaxPool") == 6  # after the second layer
    assert "Dropout" not in kinds
    assert [type(m).__name__ for m in build("z2cnn").children()].count("Dropout") == 5
    norm = next(m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    assert norm.eps == 2e-5
    assert isinstance(list(net.children())[6], GMaxPool)
    weights = torch.cat([c.weight.detach().flatten() * (c.weight.shape[1] * c.weight.shape[2]) ** 0.5 for c in convs])
    assert abs(float(weights.std()) - 1) < 0.05  # N(0, 1 / fan-in)


@plane_groups
def test_networks_for_every_plane_group(group: Group) -> None:
    net = build("p4cnn", group=group, channels=4, num_classes=7, in_channels=2)
    x = torch.rand(2, 2, 28, 28)
    assert net(x).shape == (2, 7)
    if group.fills_box:
        assert explain(net, x, group).exact
    pooled = build("p4cnn-rotpool", group=group, channels=4)
    assert pooled(x[:, :1]).shape == (2, 10)


def test_p4cnn_does_not_change_under_quarter_turns() -> None:
    for name in ("p4cnn", "p4cnn-rotpool"):
        net = build(name).eval()
        assert equivariance_error(net, p4, torch.rand(4, 1, 28, 28)) < 1e-4
    assert equivariance_error(build("z2cnn").eval(), p4, torch.rand(4, 1, 28, 28)) > 1e-2


def test_hexagonal_networks_are_exact_on_the_lattice() -> None:
    net = build("p4cnn", group=p6, channels=4)
    inner = nn.Sequential(*list(net.children())[1:]).double().eval()
    assert equivariance_error(inner, p6, torch.rand(2, 1, 29, 29, dtype=torch.float64)) < 1e-12


def test_digit_resnet_is_exact() -> None:
    net = build("digit-resnet", group=p4m, widths=(2, 3, 4), blocks=1, dropout=0.1)
    assert explain(net, torch.rand(1, 1, 28, 28), p4m).exact


def test_networks_for_hexagons_and_volumes_are_exact_and_of_one_size() -> None:
    for recipes in ("hexagons", "volumes"):
        found = {name: config for name, config in RECIPES.items() if name.startswith(recipes)}
        counts = [count(build(c.model, group=c.group, widths=c.widths)) for c in found.values()]
        assert max(counts) < 1.05 * min(counts)
    assert count(build("hex-resnet26")) == 338_200  # about 0.34 million
    hexagons = build("hex-resnet26", widths=(2, 2, 2), blocks=1, invariant=True)
    inner = nn.Sequential(*list(hexagons.children())[1:]).double().eval()
    assert equivariance_error(inner, p6m, torch.rand(2, 3, 41, 41, dtype=torch.float64)) < 1e-12
    volumes = build("voxel-resnet", group=Oh, widths=(1, 2)).double().eval()
    assert equivariance_error(volumes, Oh, torch.rand(1, 1, 6, 6, 6, dtype=torch.float64)) < 1e-12


def test_wrong_names_and_arguments_say_why() -> None:
    with pytest.raises(ValueError, match=f"model must be one of {', '.join(MODELS)}, got 'p5cnn'"):
        build("p5cnn")
    with pytest.raises(TypeError, match=r"build\('p4cnn'\): option must be one of group, channels, .*, got 'width'"):
        build("p4cnn", width=3)
    with pytest.raises(TypeError, match=r"build\('resnet18'\): option must be .*, got 'classes'; did you mean num_classes"):
        build("resnet18", group=p4m, classes=3)
    with pytest.raises(TypeError, match=r"build\('unet'\): option must be one of group, keep, pool, width, .*, got 'channels'"):
        build("unet", channels=4)
    with pytest.raises(ValueError, match="expected a plane group, such as p4 or p4m, got Oh"):
        build("p4cnn", group=Oh)
    for name in ("p4cnn", "resnet44"):
        with pytest.raises(ValueError, match="expected a plane group, such as p4m, got D4 of dimension 3"):
            build(name, group="D4")
    with pytest.raises(ValueError, match="expected a group of the square or cubic lattice, got p6"):
        build("digit-resnet", group=p6)
    with pytest.raises(ValueError, match="p6 acts on a hexagonal lattice; use hexagonal=True"):
        build("resnet26", group=p6)
    with pytest.raises(ValueError, match='downsample="pool" is for even sizes'):
        build("hex-resnet26", downsample="pool")


STAGES: list[tuple[str, dict[str, Any], str]] = [
    ("resnet18", {"widths": (8, 16, 32)}, r"resnet18 has 4 stages, got 3 widths \(8, 16, 32\); give one per stage"),
    ("resnet18", {"layers": (1, 1)}, r"resnet18 with layers=\(1, 1\) has 2 stages, got 4 widths \(64, 128, 256, 512\)"),
    ("convnext-tiny", {"widths": (8, 16, 32)}, r"convnext-tiny has 4 stages, got 3 widths"),
    ("convnext-tiny", {"depths": (1, 1, 1)}, r"convnext-tiny with depths=\(1, 1, 1\) has 3 stages, got 4 widths"),
    ("resnet10-3d", {"widths": (4, 4)}, r"resnet10-3d has 4 stages, got 2 widths"),
    ("resnet44", {"widths": 8}, r"widths must be positive whole numbers, one per stage, such as \(11, 23, 45\), got 8"),
    ("digit-resnet", {"widths": ()}, r"widths must be positive whole numbers, one per stage, such as \(16, 32, 64\), got \(\)"),
    ("resnet18", {"widths": (8, 0, 8, 8)}, r"widths must be positive whole numbers, one per stage, .* got \(8, 0, 8, 8\)"),
    ("resnet26", {"blocks": (1, 2)}, r"blocks must be a whole number, such as 4, got \(1, 2\)"),
    ("densenet121", {"blocks": 3}, r"blocks must be whole numbers, one per stage, such as \(6, 12, 24, 16\), got 3"),
]


@pytest.mark.parametrize(("name", "options", "message"), STAGES)
def test_sizes_are_one_a_stage(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"build\('.*'\): " + message):
        build(name, **options)


def test_invariance_is_an_option_only_where_it_is_one() -> None:
    takes = {name for name, (builder, _) in MODELS.items() if "invariant" in inspect.signature(builder).parameters}
    for name in MODELS.keys() - takes:
        why = "its result is an image" if name == "unet" else "its head is invariant as it is"
        with pytest.raises(
            TypeError, match=rf"build\('{name}'\): leave out invariant: {why}.* of resnet44, resnet26, hex-resnet26"
        ):
            build(name, invariant=True)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("p4cnn", "d4", "p4m"),
        ("resnet18", "c4", "p4"),
        ("resnet44", "d6", "p6m"),
        ("p4cnn", "P4M", "p4m"),
        ("resnet44", "D_6", ""),
        ("voxel-resnet", "oh", "Oh"),
        ("resnet10-3d", "d4", "D4"),
    ],
)
def test_groups_are_suggested_for_what_the_network_takes(name: str, given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"build: group must be one of .*, got '{given}'") as caught:
        build(name, group=given)
    words = str(caught.value)
    assert words.endswith(f"; did you mean {meant}?" if meant else f"got {given!r}")
    assert ("p4m" in words.split(", got")[0]) == (MODELS[name][1]["group"].dim == 2)


def test_networks_for_volumes_take_groups_of_space() -> None:
    for name in ("voxel-resnet", "resnet10-3d"):
        with pytest.raises(ValueError, match=rf"build\('{name}'\): p4m acts on images; for volumes take O or Oh"):
            build(name, group=p4m)
    assert build("resnet10-3d", group=p4, dim=2, widths=(4, 4, 4, 4))(torch.rand(1, 1, 9, 9)).shape == (1, 1000)


def test_all_cnn_has_the_papers_counts() -> None:
    found = {g.name: count(build("allcnn-c", group=g, channels=k)) for g, k in ((p1, 96), (p4, 48), (p4m, 32))}
    assert found == {"p1": 1_372_254, "p4": 1_371_006, "p4m": 1_219_678}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allcnn-c", {"channels": 3}),
        ("resnet26", {"widths": (3, 4, 5), "invariant": True}),
        ("resnet44", {"widths": (2, 3, 4), "invariant": True}),
    ],
)
@pytest.mark.parametrize("group", [p4, p4m], ids=str)
def test_maps_can_be_halved_exactly(name: str, options: dict[str, Any], group: Group) -> None:
    torch.manual_seed(0)
    exact, faithful = (build(name, group=group, downsample=d, **options).double().eval() for d in ("pool", "stride"))
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert equivariance_error(exact, group, x) < 1e-10
    assert equivariance_error(faithful, group, x) > 1e-6  # as in the paper
    assert count(exact) == count(faithful)
    with pytest.raises(ValueError, match='downsample must be "stride"'):
        build(name, group=group, downsample="other", **options)


def test_weights_of_networks_whose_options_are_no_json(tmp_path: Path) -> None:
    net = build("resnet18", block=Bottleneck, widths=(4, 4, 4, 4), stem=3)
    save(net, tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"does not say which network it is of: make that, and use load_into"):
        load(tmp_path / "mine.safetensors")
    again = load_into(build("resnet18", block=Bottleneck, widths=(4, 4, 4, 4), stem=3), tmp_path / "mine.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))


def test_weights_of_other_subgroups_are_refused(tmp_path: Path) -> None:
    """Subgroups of one order have weights of one shape, which mean something else."""

    def network(subgroup: tuple[int, ...]) -> nn.Module:
        return nn.Sequential(LiftConv(O, 1, 2, 3), CosetPool(O, subgroup), GConv(O, 2, 2, 3, stabilizer=subgroup), CosetPool(O))

    first, other, *_ = (h for h in O.subgroups() if len(h) == 2)
    save(network(first), tmp_path / "net.safetensors")
    load_into(network(first), tmp_path / "net.safetensors")
    with pytest.raises(
        ValueError, match=rf"a network whose 1 has the subgroup {re.escape(str(first))}, here it is.*skip=\('1',\)"
    ):
        load_into(network(other), tmp_path / "net.safetensors")
    kept: Any = network(other)
    before = kept[2].weight.clone()
    load_into(kept, tmp_path / "net.safetensors", skip=("1", "2"))  # a pool has no numbers to skip, but a subgroup
    assert torch.equal(kept[2].weight, before)


def test_weights_of_torch_save_say_how_they_are_read(tmp_path: Path) -> None:
    net, path = build("p4cnn", channels=2), tmp_path / "u.pt"
    for zipped in (True, False):
        torch.save(net.state_dict(), path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(
            ValueError, match=r"u.pt is a zip or pickle file, .*net.load_state_dict\(torch.load\(path\)\) reads it"
        ):
            load_into(net, path)
        net.load_state_dict(torch.load(path))


def test_weights_that_cannot_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, path = build("p4cnn", channels=2), tmp_path / "mine.safetensors"
    with pytest.raises(FileNotFoundError, match=r"save: there is no folder .*nof; make it first"):
        save(net, tmp_path / "nof" / "u.safetensors")
    save(net, path)

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"mine.safetensors cannot be read \(Permission denied\)"):
        load_into(net, path)
