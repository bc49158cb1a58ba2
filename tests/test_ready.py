"""The ready networks: trained one step, exported, saved and loaded again."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as pack
from torch import nn

from gcnn import Oh, p4, p4m, p6m
from gcnn.cli import main
from gcnn.data import digits
from gcnn.export import planar, to_onnx
from gcnn.lattice import mask_outside
from gcnn.models import ALIASES, EXAMPLES, MODELS, build, load, load_into, save
from gcnn.nn import CosetPool, GBatchNorm, GConv, LiftConv
from gcnn.runs import group_of
from gcnn.testing import equivariance_error

onnx = pytest.importorskip("onnx")
CONVERTED = [name for name in MODELS if MODELS[name][0].__name__ == "converted"]


@pytest.mark.parametrize("name", ["resnet18", "densenet", "unet", "convnext"])
def test_ready_networks_on_a_hexagonal_lattice(name: str) -> None:
    torch.manual_seed(0)
    narrow: dict[str, dict[str, Any]] = {
        "resnet18": {"widths": (8, 8, 16, 16)},
        "densenet": {"growth": 6, "blocks": (1, 1, 1, 1)},
        "unet": {"width": 8},
        "convnext": {"widths": (12, 12, 24, 24), "depths": (1, 1, 1, 1)},
    }
    net = build(name, group=p6m, num_classes=3, **narrow[name]).double()
    size = 33 if name == "unet" else 65
    x = mask_outside(p6m, torch.randn(2, 3, size, size, dtype=torch.float64))
    y = net(x)
    y.square().mean().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.eval()
    assert y.shape == ((2, 3, size, size) if name == "unet" else (2, 3))
    assert equivariance_error(net, p6m, x) < 1e-10
    torch.testing.assert_close(planar(net, example=x)(x), net(x))


def test_other_names() -> None:
    assert set(ALIASES.values()) <= set(MODELS)
    assert build("resnet10_3d", num_classes=2)(torch.randn(1, 1, 9, 9, 9)).shape == (1, 2)
    with pytest.raises(ValueError, match=r"build\('resnet18'\): num_classes must be a positive whole number, got 0"):
        build("resnet18", num_classes=0)


def test_the_densenet_of_digital_pathology_has_its_parameters() -> None:
    """119 thousand, as published (Veeling et al., 2018, table of PCam), and answers that do not change on tiles of 96 pixels."""
    net = build("densenet").eval()
    assert round(sum(p.numel() for p in net.parameters()) / 1000) == 119
    assert equivariance_error(net, group_of(net), torch.rand(1, 3, 96, 96)) < 1e-5


def test_every_network_has_an_example() -> None:
    assert set(EXAMPLES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_ready_networks_train_and_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = build(name, num_classes=5), torch.randn(2, *EXAMPLES[name])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    y = net(x)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    optimizer.step()
    net.eval()
    if name in CONVERTED:
        assert equivariance_error(net, group_of(net), x) < 1e-4
    with torch.no_grad():
        expected = net(x)
        size = float(expected.abs().max())
        torch.testing.assert_close(planar(net, fold=True)(x), expected, rtol=1e-5, atol=2e-6 * size)
        for served in (net, planar(net)):
            torch.testing.assert_close(pickle.loads(pickle.dumps(served))(x), expected, rtol=1e-5, atol=2e-6 * size)
    path = tmp_path / "net.onnx"
    assert to_onnx(net, path, x) < 1e-5
    graph = onnx.load(path).graph
    stored = {i.name for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT}
    assert not [n for n in graph.node if n.op_type == "Gather" and n.input[0] in stored]  # filters are folded
    assert [(v.name, v.type.tensor_type.shape.dim[0].dim_param) for v in (*graph.input, *graph.output)] == [
        ("input", "N"),
        ("output", "N"),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def test_an_onnx_file_that_fails_is_not_written(tmp_path: Path) -> None:
    net, x = build("p4cnn").eval(), torch.randn(1, *EXAMPLES["p4cnn"])
    path = tmp_path / "net.onnx"
    path.write_text("an older one")
    with pytest.raises(FileExistsError, match=r"is there already; choose another name, or overwrite=True"):
        to_onnx(net, path, x)
    with pytest.raises(ValueError, match=r"off by .* nothing was written"):
        to_onnx(net, path, x, tolerance=0.0, overwrite=True)
    with pytest.raises(ValueError, match="expected a float32 network"):
        to_onnx(net, tmp_path / "other.onnx", x.double())
    assert path.read_text() == "an older one"
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        to_onnx(net, tmp_path / "no" / "net.onnx", x)


def test_norms_are_folded_where_they_can_be() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(LiftConv(p4m, 2, 3, 3), GBatchNorm(p4m, 3), nn.ReLU(), GConv(p4m, 3, 3, 3), nn.ReLU(), GBatchNorm(p4m, 3))
    x = torch.randn(4, 2, 9, 9)
    for _ in range(3):
        net(x + 1)
    net.eval()
    folded = planar(net, fold=True)
    assert [type(m).__name__ for m in folded.modules() if not list(m.children())].count("BatchNorm2d") == 1
    with torch.no_grad():
        torch.testing.assert_close(folded(x), net(x), rtol=1e-5, atol=1e-5)


# --- weights -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "error"), [("p4cnn", 0.025), ("z2cnn", 0.06)])
def test_the_weights_that_come_with_the_package_read_digits(name: str, error: float) -> None:
    net, data = build(name, pretrained=True), digits()
    x = (data.test.images[:2000].float() - 33.29) / 73.90
    with torch.no_grad():
        answers = net(x).argmax(1)
    assert float((answers != data.test.labels[:2000]).float().mean()) < error
    assert (Path(__file__).parent.parent / f"src/gcnn/models/{name}.safetensors").stat().st_size < 110_000
    with pytest.raises(ValueError, match="weights come with p4cnn, z2cnn"):
        build("p4cnn-rotpool", pretrained=True)


def test_weights_come_back_with_their_network(tmp_path: Path) -> None:
    net = build("p4cnn", group=p4m, channels=3, num_classes=4).eval()
    path = tmp_path / "net.safetensors"
    save(net, path, why="a test")
    again = load(path)
    x = torch.randn(1, 1, 28, 28)
    assert torch.equal(net(x), again(x))
    with pytest.raises(FileExistsError, match=r"is there already.*overwrite=True"):
        save(net, path)
    save(net, path, overwrite=True)
    save(copy.deepcopy(build("unet", width=4, levels=1)).double(), tmp_path / "copy.safetensors")
    assert next(load(tmp_path / "copy.safetensors").parameters()).dtype == torch.float64
    with pytest.raises(ValueError, match="on the meta device"):
        load_into(build("p4cnn").to("meta"), path)
    with pytest.raises(TypeError, match="pretrained is True or False"):
        build("p4cnn", pretrained="file")  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ours, other = build("p4cnn", group=p4, channels=8), build("p4cnn", group=p4m, channels=4)
    path = tmp_path / "p4m.safetensors"
    save(other, path)
    before = {k: v.clone() for k, v in ours.state_dict().items()}
    with pytest.raises(ValueError, match=r"holds weights of p4m, the network is one of p4; make the network"):
        load_into(ours, path)
    save(build("p4cnn"), tmp_path / "ten.safetensors")
    with pytest.raises(ValueError, match=r"does not fit the network: 0.bias is \(10,\) there, \(8,\) here"):
        load_into(ours, tmp_path / "ten.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="holds no weights of gcnn, or is truncated"):
        load(path)
    path.write_text("something else")
    with pytest.raises(ValueError, match="holds no weights of gcnn"):
        load_into(ours, path)
    with pytest.raises(FileNotFoundError, match="is not there"):
        load(tmp_path / "none")
    whole = bytearray((tmp_path / "ten.safetensors").read_bytes())
    whole[-5] ^= 1
    (tmp_path / "flipped.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="its numbers are not those that were written"):
        load(tmp_path / "flipped.safetensors")
    for says, message in (
        ([1], "holds no weights of gcnn"),
        ({"groups": 3}, "about its groups"),
        ({"build": {"name": "lenet", "options": {}}}, "a network that this version does not have"),
        ({"build": {"name": "p4cnn"}}, "a network that this version does not have"),
    ):
        strange = tmp_path / "strange.safetensors"
        strange.write_bytes(pack({"x": torch.zeros(1)}, {"gcnn": json.dumps(says)}))
        with pytest.raises(ValueError, match=message):
            load_into(ours, strange) if "groups" in str(says) or says == [1] else load(strange)
    save(nn.Sequential(LiftConv(Oh, 1, 2, 3)), tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"does not say which network.*load_into"):
        load(tmp_path / "own.safetensors")
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())


def test_weights_of_compiled_and_larger_networks(tmp_path: Path) -> None:
    def small() -> nn.Module:
        return nn.Sequential(LiftConv(p4, 1, 2, 3), CosetPool(p4))

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small()

    compiled: Any = torch.compile(nn.DataParallel(small()))
    path, larger = tmp_path / "compiled.safetensors", tmp_path / "larger.safetensors"
    save(compiled, path)
    nets: list[Any] = [small(), torch.compile(small())]
    for net in nets:
        assert load_into(net, path) is net
        for a, b in zip(net.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(a, b)
    save(nn.ModuleDict({"_orig_mod": small()}), larger)  # as older versions wrote it
    load_into(nets[1], larger)
    save(Holds(), larger, overwrite=True)
    with pytest.raises(ValueError, match=r"a larger network, which has this one as 'model': load that one, or save this part"):
        load_into(small(), larger)
    with pytest.raises(ValueError, match=r"of a part of this network: load_into\(model\.get_submodule\('model'\), path\)"):
        load_into(Holds(), path)
    with pytest.raises(
        ValueError, match=r"make the network with the options that the other was made with"
    ):  # nothing is left to take
        load_into(nn.Sequential(LiftConv(p4, 1, 3, 3), CosetPool(p4)), path)


def test_heads_for_another_number_of_classes(tmp_path: Path) -> None:
    small: dict[str, Any] = {"widths": (8, 8, 8, 8), "layers": (1, 1, 1, 1)}
    three, five = (build("resnet18", num_classes=n, **small) for n in (3, 5))
    path = tmp_path / "three.safetensors"
    save(three, path)
    before = {k: v.clone() for k, v in five.state_dict().items()}
    with pytest.raises(ValueError, match=r"fc.bias is \(3,\) there, \(5,\) here; load_into\(model, path, skip=\('fc',\)\) takes"):
        load_into(five, path)
    with pytest.raises(ValueError, match=r"load_into: skip must be one of .*fc, got 'head'"):
        load_into(five, path, skip=("fc", "head"))
    with pytest.raises(ValueError, match=r"skip=\('stem', 'fc'\)\) takes"):
        load_into(five, path, skip=("stem",))
    assert all(torch.equal(v, before[k]) for k, v in five.state_dict().items())
    for skip in (("fc",), "fc"):
        load_into(five, path, skip=skip)
        for name, tensor in five.state_dict().items():
            assert torch.equal(tensor, before[name] if name.startswith("fc.") else three.state_dict()[name]), name
    load_into(three, path, skip=["fc.bias", "stem"])
    with pytest.raises(ValueError, match="make the network with the options that the other was made with"):
        load_into(build("resnet18", num_classes=3, **small | {"widths": (16, 16, 16, 16)}), path)


@pytest.mark.parametrize("name", ["resnet18", "digit-resnet"])
def test_networks_that_were_changed_are_not_those_of_build(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"widths": (8, 8, 8, 8)} if name == "resnet18" else {"widths": (2, 2, 2)}
    net: Any = build(name, num_classes=3, **options).eval()
    save(copy.deepcopy(net), tmp_path / "same.safetensors")
    load(tmp_path / "same.safetensors")
    head = "fc" if name == "resnet18" else str(len(net) - 1)
    setattr(net, head, nn.Linear(getattr(net, head).in_features, 5))
    save(net, tmp_path / "changed.safetensors")
    with pytest.raises(ValueError, match=r"does not say which network it is of: make that, and use load_into\(model"):
        load(tmp_path / "changed.safetensors")
    again: Any = build(name, num_classes=5, **options).eval()
    x = torch.randn(1, *EXAMPLES[name])
    assert torch.equal(load_into(again, tmp_path / "changed.safetensors")(x), net(x))


def test_checkpoints_of_runs_are_told_from_weights(tmp_path: Path) -> None:
    says = {"config": {}, "classes": ["a"], "shape": [1, 28, 28], "group": ["p4", []], "history": []}
    path = tmp_path / "last.safetensors"
    path.write_bytes(pack({"model.0.weight": torch.zeros(1)}, {"gcnn": json.dumps(says)}))
    message = rf"is the checkpoint of a run: gcnn.train.load_run\('{re.escape(str(tmp_path))}'\).model is its network"
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(ValueError, match=message):
        load_into(build("p4cnn"), path)
    with pytest.raises(ValueError, match=r"put it into a folder as last.safetensors, then gcnn.train.load_run\(folder\)"):
        load(path.rename(tmp_path / "other.safetensors"))


# --- the program ---------------------------------------------------------------------------------------------------------------


def test_the_program_lists_networks_and_exports_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "p4cnn           p4            24,680" in capsys.readouterr().out
    run, file = str(tmp_path / "run"), str(tmp_path / "net.onnx")
    arguments = ["train", "--model", "p4cnn", "--channels", "2", "--epochs", "1", "--out", run, "--batch-size", "4000"]
    assert main(arguments) == 0
    assert main(["export", run, "--onnx", file]) == 0
    assert "numbers from 0 to 255" in capsys.readouterr().out
    assert main(["export", run, "--onnx", file]) == 1
    assert "is there already" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["channels"] == 2
