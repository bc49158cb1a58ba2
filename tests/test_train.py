"""Training that can be stopped anywhere: resumed bit for bit, killed, out of disk, out of numbers, on several processes."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gcnn import cli, p4, p4m, p6, runs
from gcnn import train as module
from gcnn.data import Dataset, Split, digits
from gcnn.lattice import to_hexagonal
from gcnn.layout import allows_tf32
from gcnn.models import build, options_of, save
from gcnn.nn import GBatchNorm, GConv
from gcnn.recipes import RECIPES
from gcnn.report import report
from gcnn.runs import (
    alike,
    group_of,
    make_model,
    multiplications,
    note_on_exactness,
    on_lattice,
    pick_device,
    precision,
    read_checkpoint,
    reestimate_norms,
)
from gcnn.steps import Inputs, batches, moved, turned
from gcnn.testing import equivariance_error
from gcnn.train import Config, DivergedError, error_by_angle, evaluate, load_run, train

TINY = Config(epochs=3, batch_size=64, channels=3, lr=3e-3)


@pytest.fixture(scope="module")
def small() -> Dataset:
    whole = digits()
    return Dataset("small", whole.train[:200], whole.test[:100], whole.classes)


def weights(run: Any) -> list[Tensor]:
    return list(run.model.state_dict().values())


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def test_training_learns_and_writes_a_run(small: Dataset, tmp_path: Path) -> None:
    run = train(dataclasses.replace(TINY, epochs=8), tmp_path, progress=False, data=small)
    assert run.history[-1]["train_loss"] < 0.7 * run.history[0]["train_loss"]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows[0].startswith("epoch,")
    assert len(rows) == 9
    assert json.loads((tmp_path / "config.json").read_text())["channels"] == 3
    assert list(tmp_path.glob("events.out.tfevents.*"))
    again = load_run(tmp_path)
    assert same(run, again)
    found = evaluate(again.model, again.inputs(small.test, torch.device("cpu")))
    assert found["error"] == pytest.approx(run.history[-1]["test_error"])
    assert sum(map(sum, found["confusion"])) == 100
    assert equivariance_error(again.model, p4, small.test.images[:4].float()) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "cosine", "rotate": 20.0, "shift": 1, "flip": True, "label_smoothing": 0.1},
        {"optimizer": "sgd", "schedule": "linear", "warmup": 0.5, "drops": (1, 2), "weight_decay": 1e-3, "lr": 0.01},
        {"optimizer": "sgd", "sharpness": 0.1, "sharp_epochs": 2, "lr": 0.01},
    ],
    ids=["adam", "sgd", "sharpness"],
)
def test_resuming_continues_bit_for_bit(settings: dict[str, Any], small: Dataset, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, model="z2cnn", **settings)
    unbroken = train(config, progress=False, data=small)

    class Stop(Exception):  # noqa: N818
        pass

    original = module._Reporter.epoch

    def stop(self: Any, row: dict[str, Any]) -> None:
        original(self, row)
        if row["epoch"] == 2:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Reporter, "epoch", stop)
        with pytest.raises(Stop):
            train(config, tmp_path, progress=False, data=small)
    resumed = train(config, tmp_path, resume=True, progress=False, data=small)
    assert same(unbroken, resumed)
    assert [r["train_loss"] for r in unbroken.history] == [r["train_loss"] for r in resumed.history]


def test_the_best_weights_are_kept_beside_the_last(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last epoch that jumps away: the run ends with the weights of its lowest loss, and goes on from those of its last."""
    monkeypatch.setattr(Config, "rate", lambda self, epochs: 0.01 if epochs < 3 else 1.0)
    config = dataclasses.replace(TINY, epochs=4, keep="best", validation=50, reestimate="no")
    plain = train(dataclasses.replace(config, keep="last"), tmp_path / "last", progress=False, data=small)
    run = train(config, tmp_path / "best", progress=False, data=small)
    best = min(plain.history, key=lambda row: row["test_loss"])
    assert best["epoch"] < 4
    for found in (run, load_run(tmp_path / "best")):
        assert found.tested["epoch"] == best["epoch"]
        assert found.tested["test_error"] == best["test_error"]
        tested = evaluate(found.model, found.inputs(small.hold_out(50).test, torch.device("cpu")))
        assert tested["error"] == best["test_error"] != plain.history[-1]["test_error"]
    assert [r["train_loss"] for r in run.history] == [r["train_loss"] for r in plain.history]
    longer = [
        train(dataclasses.replace(c, epochs=5), tmp_path / c.keep, resume=True, progress=False, data=small)
        for c in (config, dataclasses.replace(config, keep="last"))
    ]
    assert longer[0].history[-1]["train_loss"] == longer[1].history[-1]["train_loss"]


def test_runs_are_not_overwritten_or_mixed(small: Dataset, tmp_path: Path) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path, progress=False, data=small)
    with pytest.raises(FileExistsError, match=r"holds a run already; go on with it by --resume, or choose another folder"):
        train(TINY, tmp_path, progress=False, data=small)
    with pytest.raises(ValueError, match=r"trained with other settings: lr \(was 0.003, now 0.5\); resume with those"):
        train(dataclasses.replace(TINY, lr=0.5), tmp_path, resume=True, progress=False, data=small)
    with pytest.raises(ValueError, match="was trained with data small, now it is other; resume with the same data"):
        train(TINY, tmp_path, resume=True, progress=False, data=dataclasses.replace(small, name="other"))
    train(TINY, tmp_path, resume=True, progress=False, data=small)
    with pytest.raises(ValueError, match="has 3 epochs already, more than the 1 asked for"):
        train(dataclasses.replace(TINY, epochs=1), tmp_path, resume=True, progress=False, data=small)
    with pytest.raises(FileNotFoundError, match=r"last.safetensors is missing: .* holds no checkpoint"):
        train(TINY, tmp_path / "other", resume=True, progress=False, data=small)


def test_files_that_are_of_no_run_are_not_overwritten(small: Dataset, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, epochs=1)
    for name, content in (("config.json", '{"lr": 1}'), ("config.json", "mine"), ("config.json", "[]"), ("metrics.csv", "mine")):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(FileExistsError, match=f"{name} is there already, and is of no run; choose another folder with --out"):
            train(config, tmp_path, progress=False, data=small)
        assert path.read_text() == content
        path.unlink()
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))  # of a run that was stopped at once
    theirs = [tmp_path / name for name in (".backup.2024-05.part", ".video.mp4.1-2.part", ".config.json.mine.part")]
    ours = [tmp_path / name for name in (".config.json.17-42.part", ".last.safetensors.part")]  # the second of older versions
    for path in (*theirs, *ours):
        path.write_text("part")
    train(config, tmp_path, progress=False, data=small)
    assert all(path.exists() for path in theirs)
    assert not any(path.exists() for path in ours)


KILLED = """
import os, signal, sys
from gcnn import train as module
from gcnn.data import Dataset, Split, digits
import torch
torch.set_num_threads(1)
whole = digits()
data = Dataset("small", whole.train[:200], whole.test[:100], whole.classes)
saves, fsync = [], os.fsync
def dying(descriptor):
    saves.append(1)
    if len(saves) == 4:  # config; checkpoint and table of epoch 1; now the checkpoint of epoch 2
        os.truncate(descriptor, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = dying
module.train(module.Config(epochs=3, batch_size=64, channels=3, lr=3e-3), sys.argv[1], progress=False, data=data)
"""


def test_kill_9_while_saving_leaves_the_last_checkpoint(small: Dataset, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [part] = tmp_path.glob(".last.safetensors.*.part")
    assert part.stat().st_size == 1000  # half a checkpoint, under another name
    assert load_run(tmp_path).history[-1]["epoch"] == 1
    resumed = train(TINY, tmp_path, resume=True, progress=False, data=small)
    assert not part.exists()
    assert same(resumed, train(TINY, progress=False, data=small))


def test_a_full_disk_leaves_the_last_checkpoint(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path, progress=False, data=small)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"could not be written \(No space left on device\); the one before it is intact"):
        train(TINY, tmp_path, resume=True, progress=False, data=small)
    assert load_run(tmp_path).history[-1]["epoch"] == 1
    assert not list(tmp_path.glob(".*.part"))


def test_damaged_and_foreign_checkpoints_say_so(small: Dataset, tmp_path: Path) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path, progress=False, data=small)
    path = tmp_path / "last.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"last.safetensors holds no checkpoint of gcnn, or is truncated or damaged"):
        load_run(tmp_path)
    path.write_bytes(content.replace(b'\\"p4\\"', b'\\"p9\\"'))
    with pytest.raises(ValueError, match="is a checkpoint of group p9, the network is one of p4"):
        load_run(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no checkpoint of gcnn"):
        load_run(tmp_path)


def test_a_loss_that_is_no_number_stops_with_its_place(small: Dataset, tmp_path: Path) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path, progress=False, data=small)
    original = Inputs.__call__
    calls = []

    def poisoned(self: Inputs, index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = original(self, index)
        calls.append(1)
        return (x * float("nan"), y) if len(calls) == 2 else (x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "__call__", poisoned)
        with pytest.raises(
            DivergedError,
            match=r"the loss became nan in epoch 2, step 2 of 4; the last good checkpoint is .*last.safetensors \(epoch 1\); try",
        ):
            train(TINY, tmp_path, resume=True, progress=False, data=small)
    assert all(torch.isfinite(p).all() for p in load_run(tmp_path).model.parameters())


def test_a_last_batch_of_one_image(small: Dataset) -> None:
    odd = Dataset("odd", small.train[:65], small.test, small.classes)
    assert math.isfinite(train(dataclasses.replace(TINY, epochs=1), progress=False, data=odd).history[-1]["test_loss"])


def test_a_last_batch_that_a_norm_cannot_take(small: Dataset, tmp_path: Path) -> None:
    odd = Dataset("odd", small.train[:65], small.test, small.classes)
    config = Config(model="resnet18", group="p1", widths=(2, 2, 2, 2), epochs=1, batch_size=64)
    with pytest.raises(ValueError, match=r"the last batch .* holds one: GBatchNorm.*choose another --batch-size than 64"):
        train(config, tmp_path / "run", progress=False, data=odd)
    assert not (tmp_path / "run").exists()
    assert train(dataclasses.replace(config, batch_size=63), progress=False, data=odd).history


def test_every_image_comes_once_an_epoch() -> None:
    for world in (1, 2, 3):
        parts = [list(batches(203, 64, 5, "cpu", rank, world)) for rank in range(world)]
        seen = torch.cat([index for part in parts for index, _ in part])
        assert sorted(seen.tolist()) == list(range(203))
        assert [total for _, total in parts[0]] == [64, 64, 64, 11]
        together = [sorted(torch.cat([part[i][0] for part in parts]).tolist()) for i in range(4)]
        assert together == [sorted(index.tolist()) for index, _ in batches(203, 64, 5)]


DISTRIBUTED = """
import json, sys, torch
from gcnn.data import Dataset, Split, digits
from gcnn.train import Config, train
torch.set_num_threads(1)
whole = digits()
data = Dataset("small", whole.train[:193], whole.test[:100], whole.classes)  # the last batch has one image: one process has none
config = Config(epochs=3, batch_size=64, channels=3, lr=1e-4, sync_norm=True, sharpness=0.05, sharp_epochs=1)
train(config, sys.argv[1], progress=False, data=data)
torch.distributed.destroy_process_group()
"""


def test_two_processes_learn_as_one(small: Dataset, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", str(script), str(tmp_path / "two")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    two = load_run(tmp_path / "two")
    config = dataclasses.replace(TINY, epochs=3, lr=1e-4, sharpness=0.05, sharp_epochs=1)
    small = dataclasses.replace(small, train=small.train[:193])
    one, other = train(config, progress=False, data=small), train(dataclasses.replace(config, seed=1), progress=False, data=small)
    for a, b in zip(two.history, one.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=2e-5)
    assert other.history[1]["train_loss"] != pytest.approx(one.history[1]["train_loss"], rel=1e-3)
    # Adam takes whole steps along gradients that are zero but for rounding (biases before a norm); the others must agree
    parts = [torch.cat([p.detach().flatten() for n, p in run.model.named_parameters() if "bias" not in n]) for run in (two, one)]
    assert ((parts[0] - parts[1]).abs() < 0.1 * 1e-4).double().mean() > 0.99


def test_turning_by_quarters_is_exact() -> None:
    x = torch.rand(2, 1, 28, 28)
    for k in range(4):
        torch.testing.assert_close(turned(x, torch.full((2,), k * math.pi / 2)), torch.rot90(x, k, (-2, -1)), rtol=0, atol=1e-4)


def test_error_by_angle_repeats_every_quarter_for_p4(small: Dataset) -> None:
    run = train(dataclasses.replace(TINY, epochs=4), progress=False, data=small)
    errors = dict(error_by_angle(run.model, run.inputs(small.test, torch.device("cpu")), steps=8))
    assert errors[0.0] == errors[90.0] == errors[180.0] == errors[270.0]
    assert list(errors) == [0.0, 45.0, 90.0, 135.0, 180.0, 225.0, 270.0, 315.0]


def test_reestimated_norms_have_the_statistics_of_the_training_set(small: Dataset) -> None:
    run = train(dataclasses.replace(TINY, epochs=1, reestimate="no"), progress=False, data=small)
    inputs = run.inputs(small.train, torch.device("cpu"))
    reestimate_norms(run.model, inputs, batch_size=100)
    first: Any = next(m for m in run.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm))
    x = inputs(torch.arange(200))[0]
    with torch.no_grad():
        y = next(iter(run.model.children()))(x)
    torch.testing.assert_close(first.running_mean, y.mean((0, 2, 3, 4)), rtol=1e-3, atol=1e-4)
    assert first.momentum == 0.1
    before = first.running_mean.clone()
    reestimate_norms(run.model, inputs, batch_size=199)  # a last part of one image would count as much as the first
    torch.testing.assert_close(first.running_mean, before, rtol=1e-3, atol=1e-4)


def test_norms_reestimated_in_training_mode_see_the_dropout(small: Dataset) -> None:
    run = train(dataclasses.replace(TINY, model="z2cnn", epochs=1), progress=False, data=small)
    inputs = run.inputs(small.train, torch.device("cpu"))
    second: Any = [m for m in run.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)][1]
    variances = []
    for training in (False, True):
        reestimate_norms(run.model, inputs, training=training)
        variances.append(second.running_var.mean())
    assert variances[1] > 1.05 * variances[0]  # a dropout of 0.3 before it


def test_moving_and_flipping_are_those_of_torch() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (400, 2, 6, 5), dtype=torch.uint8)
    seen = set()
    for before, after in zip(images, moved(images, 1, flip=True), strict=True):
        wide = torch.nn.functional.pad(before, (1, 1, 1, 1))
        for down, right, mirrored in itertools.product(range(3), range(3), (False, True)):
            cut = wide[:, down : down + 6, right : right + 5]
            if torch.equal(after, (torch.flip(wide, (2,))[:, down : down + 6, right : right + 5]) if mirrored else cut):
                seen.add((down, right, mirrored))
                break
        else:
            pytest.fail("neither a shift nor a mirrored shift")
    assert len(seen) == 18  # each of nine shifts, mirrored and not
    assert torch.equal(moved(images, 0, flip=False), images)


def test_the_learning_rate_warms_up_and_drops() -> None:
    config = Config(lr=2.0, epochs=300, warmup=10, drops=(50, 100, 150))
    assert [config.rate(e) for e in (0, 5, 10, 49.9, 50, 100, 299)] == pytest.approx([0, 1, 2, 2, 0.2, 0.02, 0.002])
    assert Config(lr=1.0, epochs=4, schedule="cosine").rate(2) == pytest.approx(0.5)


def test_sgd_takes_torchs_steps(small: Dataset) -> None:
    config = dataclasses.replace(TINY, epochs=1, batch_size=100, optimizer="sgd", lr=0.05, weight_decay=0.01, reestimate="no")
    found = train(config, progress=False, data=small)
    expected = make_model(config)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    x = small.train.images.float()
    x = (x - found.mean) / found.std
    for index, _ in batches(len(small.train), 100, config.seed * 1_000_003 + 1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(expected(x[index]), small.train.labels[index]).backward()
        optimizer.step()
    for a, b in zip(found.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sharpness_steps_along_the_gradient_uphill_in_the_last_epochs(small: Dataset) -> None:
    """Against the same steps written out with autograd; batch norms remember the pass at the weights themselves."""
    config = dataclasses.replace(TINY, epochs=2, batch_size=100, optimizer="sgd", lr=0.02, reestimate="no")
    found = train(dataclasses.replace(config, sharpness=0.5, sharp_epochs=1), progress=False, data=small)
    model = make_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x = (small.train.images.float() - found.mean) / found.std

    def gradients(index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = torch.nn.functional.cross_entropy(model(x[index]), small.train.labels[index])
        return torch.autograd.grad(loss, list(model.parameters()))

    for epoch in (1, 2):
        for index, _ in batches(len(small.train), 100, config.seed * 1_000_003 + epoch):
            grads = gradients(index)
            if epoch == 2:
                before = {k: v.clone() for k, v in model.state_dict().items()}
                length = sum(float((g.double() ** 2).sum()) for g in grads) ** 0.5
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p.add_(g, alpha=0.5 / length)
                grads = gradients(index)
                model.load_state_dict(before)
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            optimizer.step()
    expected = model.state_dict()
    plain = train(config, progress=False, data=small).model.state_dict()
    for name, value in found.model.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    assert max(float((value - plain[name]).abs().max()) for name, value in expected.items() if "weight" in name) > 1e-2


def test_volumes_are_trained_and_not_shifted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = torch.arange(8) % 2
    images = (torch.rand(8, 1, 6, 6, 6) < 0.2 + 0.6 * labels.view(-1, 1, 1, 1, 1)).to(torch.uint8)
    data = Dataset("cubes", Split(images, labels), Split(images, labels), ("thin", "dense"))
    config = Config(model="voxel-resnet", group="O", widths=(2, 2), epochs=3, batch_size=4, lr=0.01, reestimate="no")
    run = train(config, tmp_path, progress=False, data=data)
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]
    turned_images = torch.rot90(images, 1, (2, 4))
    torch.testing.assert_close(run.predict(turned_images), run.predict(images), rtol=1e-4, atol=1e-5)
    report([tmp_path], tmp_path / "report.html", data=data)
    assert "Confusion matrix" in (tmp_path / "report.html").read_text()
    assert cli.main(["predict", str(tmp_path), "digit.png"]) == 1  # says that the network takes volumes
    with pytest.raises(ValueError, match=r"rotate, shift and flip are for images, not for inputs of shape \(1, 6, 6, 6\)"):
        train(dataclasses.replace(config, flip=True), progress=False, data=data)


def test_runs_on_whitened_images_take_no_plain_ones(small: Dataset) -> None:
    run = train(dataclasses.replace(TINY, epochs=1), progress=False, data=dataclasses.replace(small, name="cifar10, whitened"))
    with pytest.raises(ValueError, match="whitening a new image takes the whole data set; train with --data cifar10"):
        run.predict(small.test.images[:1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be positive, got 0"),
        ({"lr": -1.0}, "lr must be positive, got -1.0"),
        ({"model": "lenet"}, "model must be one of z2cnn"),
        ({"group": "p5"}, "group must be one of line"),
        ({"schedule": "step"}, "schedule must be one of constant, cosine, linear"),
        ({"label_smoothing": 2.0}, "label_smoothing must be at least 0 and below 1"),
        ({"epochs": "3"}, "epochs must be of type int, got '3'"),
        ({"amp": "false"}, "amp must be of type bool, got 'false'"),
        ({"epochs": 2.5}, "epochs must be of type int, got 2.5"),
        ({"keep": "best"}, "keep = best needs images to choose by: hold some out with --validation"),
        ({"reestimate": "maybe"}, "reestimate must be one of eval, train, no, got 'maybe'"),
        ({"dropout": 1.0}, "dropout must be below 1, got 1.0"),
        ({"sharpness": -1.0}, "sharpness must be a distance, at least 0, got -1.0"),
        ({"sharpness": 0.1, "sharp_epochs": 99}, "sharp_epochs must be at least 0 and at most the 20 epochs, got 99"),
        ({"sharp_epochs": 8}, "sharp_epochs is 8, and sharpness 0: set sharpness, 0.1 for example, or sharp_epochs to 0"),
        ({"widths": 3}, "widths must be of type tuple, got 3"),
    ],
)
def test_wrong_settings_say_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_devices_that_are_not_there_say_so() -> None:
    with pytest.raises(ValueError, match=r"device 'nonsense' cannot be used here .* cpu always can"):
        pick_device("nonsense")


# --- the command line ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(small: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command on the small data set and returns (status, what it printed)."""
    monkeypatch.setattr(module, "load", lambda *_: small)
    monkeypatch.setattr(cli, "load", lambda *_: small)

    def run(*words: str) -> tuple[int, str]:
        status = cli.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_the_commands(shell: Any, tmp_path: Path, small: Dataset) -> None:
    from PIL import Image

    folder = str(tmp_path / "run")
    status, text = shell("train", "--recipe", "demo/p4cnn", "--epochs", "1", "--channels", "3", "--out", folder)
    assert status == 0
    assert "p4cnn: test error" in text
    assert re.search(r"epoch 1/1, loss [\d.]+, test error [\d.]+ %, [\d,]+ img/s, 00:00 left\n", text)  # no bar: nobody watches
    assert "had its 1 epoch already" in shell("train", "--out", folder, "--resume")[1]
    status, text = shell("train", "--out", folder, "--resume", "--epochs", "2")
    assert status == 1
    assert "follows a learning rate that falls over 1 epochs, not over 2; resume with --epochs 1, or start a new run" in text
    status, text = shell("eval", folder)
    assert status == 0
    assert "p4cnn on 100 images of small: error" in text
    recalls = [float(line.split()[2]) for line in text.splitlines()[2:-1]]
    assert text.splitlines()[-1] == f"mean of the recalls (balanced accuracy): {sum(recalls) / 10:.2f} %"
    status, text = shell("check", folder)
    assert "equivariant to p4: the error of the whole network" in text
    status, text = shell("check", folder, "--group", "p4m")
    assert (status, "not equivariant to p4m" in text) == (1, True)
    six = str(tmp_path / "six")
    text = shell("train", "--group", "p6", "--channels", "2", "--epochs", "1", "--out", six)[1]
    assert "images are resampled to the hexagonal lattice of p6" in text
    assert "p4cnn-p6: test error" in text
    assert "p1 has no turns" in shell("check", folder, "--group", "p1")[1]
    assert "equivariant to p6: the error" in shell("check", six)[1]
    picture = tmp_path / "digit.png"
    Image.fromarray(small.test.images[0, 0].numpy()).save(picture)
    status, text = shell("predict", folder, str(picture))
    assert status == 0
    assert text.count("%") == 3
    shares = shell("predict", folder, str(picture), "--top", "10")[1].split(": ")[1].split(",")
    assert sum(float(share.split()[1]) for share in shares) == pytest.approx(100, abs=1)
    assert "p4m    dimension 2, square    lattice,  8 elements, 10 subgroups" in shell("groups")[1]
    drawn = ("plot", "p4m", "--out", str(tmp_path / "p4m.png"))
    assert shell(*drawn)[0] == 0
    assert "p4m.png is there already; choose another name, or --force" in shell(*drawn)[1]
    assert shell(*drawn, "--force")[0] == 0
    assert (tmp_path / "p4m.png").stat().st_size > 5000


def test_predictions_of_every_kind_of_image_file(shell: Any, tmp_path: Path, small: Dataset) -> None:
    import numpy as np
    from PIL import Image

    folder = str(tmp_path / "run")
    config = dataclasses.replace(TINY, test_turns=2)
    run = train(config, folder, progress=False, data=small)
    digit = small.test.images[0, 0].numpy()
    shares = answered(run.predict(small.test.images[:1]))
    files = {
        "bytes.png": Image.fromarray(digit),
        "inverted.png": Image.fromarray(255 - digit),
        "sixteen.png": Image.fromarray(digit.astype(np.uint16) * 257),
        "colour.png": Image.fromarray(np.stack([digit] * 3, 2)),
        "transparent.png": Image.fromarray(np.stack([digit * 0] * 3 + [digit], 2)),  # black strokes on nothing
        "light.png": Image.fromarray(np.stack([digit * 0 + 255] * 3 + [digit], 2)),  # white ones
        "wide.png": Image.new("L", (30, 20)),
        "unit.tif": Image.fromarray((digit / 255).astype(np.float32)),
        "twelve.png": Image.fromarray(digit.astype(np.uint16) * 16),
    }
    for name, image in files.items():
        image.save(tmp_path / name)
    files["bytes.png"].save(tmp_path / "pages.tif", save_all=True, append_images=[files["bytes.png"]])
    (tmp_path / "broken.png").write_bytes((tmp_path / "bytes.png").read_bytes()[:60])
    for name in ("bytes.png", "sixteen.png", "colour.png", "light.png"):
        assert shell("predict", folder, str(tmp_path / name)) == (0, f"{tmp_path / name}: {shares}\n")
    for name in ("inverted.png", "transparent.png"):
        assert shell("predict", folder, "--invert", str(tmp_path / name)) == (0, f"{tmp_path / name}: {shares}\n")
        assert (
            "has a light ground, the network learned from dark ones: --invert?"
            in shell("predict", folder, str(tmp_path / name))[1]
        )
    status, text = shell(
        "predict", folder, *(str(tmp_path / n) for n in ("wide.png", "broken.png", "run", "absent.png", "bytes.png"))
    )
    assert status == 1
    assert "wide.png has 30 x 20 pixels, the network takes 28 x 28; resize it" in text
    assert "is a folder without pictures; they are .png, .jpg" in text
    assert text.count("gcnn predict:") == 4
    assert f"bytes.png: {shares}" in text  # the good one is still answered
    assert text.count("broken.png") == 1
    with pytest.warns(UserWarning, match="of which the 8 highest are kept"):
        status, text = shell("predict", folder, str(tmp_path / "twelve.png"))
    assert "twelve.png is all darker than the mean of what the network learned from: scaled alike?" in text
    for name, words in (("unit.tif", "expected bytes"), ("pages.tif", "holds 2 images")):
        status, text = shell("predict", folder, str(tmp_path / name))
        assert status == 1
        assert words in text


def test_a_run_that_held_out_images_can_be_tested(shell: Any, tmp_path: Path, small: Dataset) -> None:
    folder = str(tmp_path / "run")
    config = dataclasses.replace(TINY, epochs=1, validation=50, keep="best", test_turns=2)
    run = train(config, folder, progress=False, data=small)
    for words, data in (((), small.hold_out(50)), (("--test",), small)):
        found = evaluate(run.model, run.inputs(data.test, torch.device("cpu")), 2)
        expected = f"p4cnn on {len(data.test)} images of {data.name}: error {found['error']:.2f} %, loss {found['loss']:.4f}"
        assert expected in shell("eval", folder, *words)[1]
    status, text = shell("export", folder, "--onnx", str(tmp_path / "net.onnx"))
    assert (status, "answers to the image as it is; gcnn predict and the tests of this run take the mean of 2" in text) == (
        0,
        True,
    )


def test_predictions_of_folders_as_a_table(shell: Any, tmp_path: Path, small: Dataset) -> None:
    import csv

    from PIL import Image

    folder, root, table = str(tmp_path / "run"), tmp_path / "digits", tmp_path / "answers.csv"
    run = train(dataclasses.replace(TINY, epochs=1), folder, progress=False, data=small)
    for i, place in enumerate(("a/0.png", "a/1.PNG", "b/2.png", "b/deeper/3.png")):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small.test.images[i, 0].numpy()).save(root / place, format="png")
    (root / "a" / "notes.txt").write_text("no picture")
    status, text = shell("predict", folder, str(root), "--csv", str(table))
    assert (status, text.count("%")) == (0, 9)
    with table.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["file", "class", *small.classes]
    assert [row[0] for row in rows] == [str(root / place) for place in ("a/0.png", "a/1.PNG", "b/2.png")]
    shares = run.predict(small.test.images[:3])
    assert [row[1] for row in rows] == [small.classes[i] for i in shares.argmax(1).tolist()]
    torch.testing.assert_close(torch.tensor([[float(share) for share in row[2:]] for row in rows]), shares, rtol=1e-4, atol=1e-5)
    status, text = shell("predict", folder, str(root / "b"), "--csv", str(table))
    assert (status, "answers.csv is there already; choose another name, or --force" in text) == (1, True)
    assert shell("predict", folder, str(root / "b"), "--csv", str(table), "--force")[0] == 0
    assert len(table.read_text().splitlines()) == 2
    assert "is a folder; give the name of a file" in shell("predict", folder, str(root), "--csv", str(tmp_path))[1]


def answered(shares: Tensor) -> str:
    best = shares[0].argsort(descending=True)[:3].tolist()
    return ", ".join(f"{i} {100 * float(shares[0, i]):.1f} %" for i in best)


def test_resuming_takes_the_settings_of_the_run(shell: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert shell("train", "--channels", "3", "--lr", "0.002", "--epochs", "1", "--out", folder)[0] == 0
    assert shell("train", "--resume", "--epochs", "2", "--out", folder)[0] == 0
    run = load_run(folder)
    assert (run.config.channels, run.config.lr, len(run.history)) == (3, 0.002, 2)
    absent = tmp_path / "absent"
    status, text = shell("train", "--resume", "--out", str(absent))
    assert status == 1
    assert "holds no checkpoint" in text
    assert not absent.exists()


def test_data_that_has_moved(tmp_path: Path, small: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    folder, gone = str(tmp_path / "run"), str(tmp_path / "gone")
    train(dataclasses.replace(TINY, epochs=1, data="mnist", data_root=gone), folder, progress=False, data=small)
    for words in (
        ("eval", folder),
        ("report", folder, "--out", str(tmp_path / "a.html")),
        ("train", "--resume", "--out", folder),
    ):
        assert cli.main(list(words)) == 1
        assert "if the files have moved, say where they are with --data-root" in capsys.readouterr().err


def test_settings_from_a_file(shell: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('model = "z2cnn"\nchannels = 3\nepochs = 1\nlr = 0.002\n')
    folder = tmp_path / "run"
    assert shell("train", "--config", str(file), "--lr", "0.005", "--out", str(folder))[0] == 0
    config = json.loads((folder / "config.json").read_text())
    assert (config["model"], config["lr"], config["channels"]) == ("z2cnn", 0.005, 3)
    file.write_bytes(b"\xef\xbb\xbf" + b'model = "resnet44"\nwidths = 8\n')  # a file of Windows begins with a mark
    assert f"{file}: widths must be of type tuple, got 8; write a list, [8]" in shell("train", "--config", str(file))[1]
    file.write_text('batch-size = "many"\n')
    assert f"{file}: batch_size must be of type int, got 'many'" in shell("train", "--config", str(file))[1]
    file.write_text("learning_rate = 1\n")
    status, text = shell("train", "--config", str(file))
    assert status == 1
    assert "unknown settings learning_rate; known are amp, balanced, batch_size" in text


def test_problems_are_one_line_and_a_status(shell: Any, tmp_path: Path) -> None:
    for words, message in (
        (("train", "--recipe", "paper/p9"), "recipe must be one of paper/z2cnn"),
        (("eval", str(tmp_path)), "holds no checkpoint"),
        (("plot", "p9"), "group must be one of p1"),
        (("check", str(tmp_path), "--group", "P4M"), "holds no checkpoint"),
        (("train", "--recipe", "rotpool"), "recipe must be one of"),
        (("train", "--recipe", "p4cnn"), "did you mean"),
        (
            ("train", "--model", "voxel-resnet", "--out", str(tmp_path / "volumes")),
            "voxel-resnet takes volumes",
        ),
        (("predict", str(tmp_path / "a.png"), str(tmp_path)), "a.png is a file; the folder of a run was expected"),
        (("train", "--out", str(tmp_path / "a.png")), "a.png is a file; a run is written to a folder"),
        (("report", str(tmp_path), "--out", str(tmp_path / "a.png")), "is no report of gcnn"),
        (("export", str(tmp_path), "--onnx", str(tmp_path)), "is a folder; give the name of a file"),
        (("export", str(tmp_path), "--onnx", str(tmp_path / "a.png"), "--force"), "a.png: expected a name that ends in .onnx"),
        (
            ("train", "--model", "digit-resnet", "--channels", "3"),
            "digit-resnet takes no channels; what it takes of those is widths",
        ),
        (("plot", "Oh"), "group must be one of p1"),
    ):
        (tmp_path / "a.png").write_bytes(b"a picture")
        status, text = shell(*words)
        assert status == 1
        assert message in text
        assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    with pytest.raises(ValueError, match=r"did you mean p4m\?"):
        Config(group="P4M")
    with pytest.raises(ValueError, match="digits come with the package"):
        Config(data_root="mine")


def test_ctrl_c_says_how_to_go_on(shell: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    steps = []
    original = module._Reporter.step

    def interrupted(self: Any, epoch: int, *rest: Any) -> None:
        original(self, epoch, *rest)
        steps.append(epoch)
        if len(steps) in (2, 8):  # in the first epoch; then in the second of a run of its own
            raise KeyboardInterrupt

    monkeypatch.setattr(module._Reporter, "step", interrupted)
    words = ("train", "--channels", "3", "--batch-size", "64", "--epochs", "2", "--out", str(folder))
    status, text = shell(*words)
    assert status == 130
    assert "stopped in the first epoch, before anything was saved" in text
    status, text = shell(*words)
    assert status == 130
    assert f"stopped; go on with gcnn train --resume --out {folder}" in text
    assert shell("train", "--resume", "--out", str(folder))[0] == 0
    assert len(load_run(folder).history) == 2


def test_recipes_hold_the_authors_settings() -> None:
    for name, epochs in (("z2cnn", 300), ("p4cnn", 100), ("p4cnn-rotpool", 100)):
        recipe = RECIPES[f"paper/{name}"]
        assert (recipe.model, recipe.epochs, recipe.batch_size, recipe.lr) == (name, epochs, 128, 1e-3)
        assert (recipe.schedule, recipe.weight_decay, recipe.reestimate, recipe.rotate) == ("constant", 0.0, "train", 3.14)


def test_the_demo(shell: Any, small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gcnn import demo

    monkeypatch.setattr(demo, "digits", lambda: small)
    for name in ("demo/z2cnn", "demo/p4cnn"):
        monkeypatch.setitem(RECIPES, name, dataclasses.replace(RECIPES[name], epochs=1))
    status, text = shell("demo", "--out", str(tmp_path))
    assert status == 0
    assert "z2cnn        21,750" in text
    assert "p4cnn        24,680" in text
    assert (tmp_path / "report.html").exists()
    assert "trained already" in shell("demo", "--out", str(tmp_path))[1]  # the second time at once


# --- the report ----------------------------------------------------------------------------------------------------------


def test_the_report_is_one_page_with_everything_in_it(small: Dataset, tmp_path: Path) -> None:
    for name in ("p4cnn", "z2cnn"):
        train(dataclasses.replace(TINY, model=name, epochs=2), tmp_path / name, progress=False, data=small)
    page = tmp_path / "report.html"
    report([tmp_path / "p4cnn", tmp_path / "z2cnn"], page, small, images=100)
    text = page.read_text()
    assert text.count("<img alt=") == 6  # curves, angles, two confusions, filters, a feature map
    assert not re.search(r"(src|href)=.(?!data:)", text)  # nothing from elsewhere
    for words in ("error of the first 100 test images", "Confusion matrix of z2cnn", "Filters of the first layer", "p4cnn"):
        assert words in text
    with pytest.raises(ValueError, match="at least one folder"):
        report([], page, small)
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    for width in (1000, 400):
        picture = tmp_path / f"{width}.png"
        command = [browser, *flags, f"--window-size={width},3000", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        assert picture.stat().st_size > 30_000  # a drawn page, not a blank one


def test_converted_networks_train_too(small: Any) -> None:
    config = dataclasses.replace(TINY, model="resnet18", channels=0, widths=(4, 4, 4, 4), epochs=1)
    assert train(config, progress=False, data=small).history[-1]["epoch"] == 1
    with pytest.raises(ValueError, match="unet answers for every pixel"):
        train(dataclasses.replace(TINY, model="unet", channels=0), progress=False, data=small)


def test_converted_networks_see_hexagons_where_their_group_has_them(shell: Any, small: Dataset, tmp_path: Path) -> None:
    """Square pixels are resampled by the network itself: in training, for the run that is read again, and in its file."""
    folder = str(tmp_path / "run")
    words = ("train", "--model", "resnet18", "--group", "p6", "--widths", "4", "4", "4", "4", "--epochs", "1", "--out", folder)
    assert "images are resampled to the hexagonal lattice of p6" in shell(*words)[1]
    run, x = load_run(folder), small.test.images[:2].float()
    inner = torch.nn.Sequential(*list(run.model.children())[1:])
    torch.testing.assert_close(run.model(x), inner(to_hexagonal(x, 65)))
    assert equivariance_error(inner, p6, torch.rand(1, 1, 65, 65)) < 1e-4
    assert "equivariant to p6: the error" in shell("check", folder)[1]
    assert shell("export", folder, "--onnx", str(tmp_path / "net.onnx"))[0] == 0
    report([folder], tmp_path / "page.html", small, images=4)
    assert "resampled" not in shell("train", "--channels", "2", "--epochs", "1", "--out", str(tmp_path / "square"))[1]


def test_a_run_does_not_go_on_with_other_images(small: Dataset, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, epochs=1)
    train(config, tmp_path, progress=False, data=small)
    fewer = Dataset("small", small.train[:150], small.test, small.classes)
    with pytest.raises(
        ValueError, match=r"now they are of shape \(1, 28, 28\), 150 of them with mean .*resume with the same data"
    ):
        train(dataclasses.replace(config, epochs=2), tmp_path, resume=True, progress=False, data=fewer)


def test_a_run_does_not_go_on_with_other_labels(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, longer = dataclasses.replace(TINY, epochs=1), dataclasses.replace(TINY, epochs=2)
    train(config, tmp_path, progress=False, data=small)
    other = Dataset("small", Split(small.train.images, small.train.labels.flip(0)), small.test, small.classes)
    with pytest.raises(ValueError, match="was trained with other labels of these images; resume with the same data"):
        train(longer, tmp_path, resume=True, progress=False, data=other)
    held = dataclasses.replace(longer, validation=50)
    train(dataclasses.replace(held, epochs=1), tmp_path / "held", progress=False, data=small)
    last = torch.cat([small.train.labels[:150], small.train.labels[150:].flip(0)])
    unlike = Dataset("small", Split(small.train.images, last), small.test, small.classes)
    with pytest.raises(ValueError, match="was trained with other labels of these images"):
        train(held, tmp_path / "held", resume=True, progress=False, data=unlike)
    read = read_checkpoint

    def older(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = read(path)
        return tensors, {k: v for k, v in meta.items() if k != "labels"}

    monkeypatch.setattr(module, "read_checkpoint", older)
    assert len(train(longer, tmp_path, resume=True, progress=False, data=other).history) == 2


def test_a_run_is_tested_on_what_it_learned(small: Dataset, tmp_path: Path) -> None:
    for name, classes in (("a", small.classes), ("b", tuple("abcdefghij"))):
        data = Dataset("small", small.train, small.test, classes)
        train(dataclasses.replace(TINY, epochs=1), tmp_path / name, progress=False, data=data)
    run = load_run(tmp_path / "b")
    with pytest.raises(ValueError, match=r"trained with classes \('a', .*, small has \('0', "):
        run.check_data(small)
    parts = [Split(part.images[..., :20], part.labels) for part in (small.train, small.test)]
    wide = Dataset("small", parts[0], parts[1], tuple("abcdefghij"))
    with pytest.raises(ValueError, match=r"images of shape \(1, 28, 28\), small has \(1, 28, 20\)"):
        run.check_data(wide)
    with pytest.raises(ValueError, match=r"b: the run was trained with classes"):
        report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html", small, images=10)
    assert not (tmp_path / "page.html").exists()


def test_a_report_is_about_one_data_set(small: Dataset, tmp_path: Path) -> None:
    other = Dataset("small", Split(255 - small.train.images, small.train.labels), small.test, small.classes)
    for name, data in (("a", small), ("b", other)):
        train(dataclasses.replace(TINY, epochs=1), tmp_path / name, progress=False, data=data)
    with pytest.raises(ValueError, match=r"report: b was trained on other images than a, with mean .*; report them one by one"):
        report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html", small, images=10)
    assert not (tmp_path / "page.html").exists()


def test_images_sorted_by_class_are_not_held_out(small: Dataset) -> None:
    training, test = Split(small.train.images[:90], torch.arange(90) // 30), Split(small.test.images[:9], torch.arange(9) % 3)
    whole = Dataset("mine", training, test, ("a", "b", "c"))
    for count, words in (
        (20, "all of class c, .*; shuffle the data, or hold out"),
        (50, "all there are of class c, .*; shuffle"),
    ):
        with pytest.raises(ValueError, match=f"the last {count} training images are {words}"):
            train(dataclasses.replace(TINY, validation=count), progress=False, data=whole)


def test_held_out_images_that_are_others_now(small: Dataset, tmp_path: Path) -> None:
    train(dataclasses.replace(TINY, epochs=1, validation=50), tmp_path, progress=False, data=small)
    run = load_run(tmp_path)
    assert len(run.held_out(small).test) == 50
    report([tmp_path], tmp_path / "page.html", small, images=10)
    page = (tmp_path / "page.html").read_text()
    assert "validation error" in page
    assert "test error" not in page
    order: Any = torch.arange(199, -1, -1)
    classes: Any = list(small.classes)
    mixed = Dataset("small", small.train[order], small.test, classes)
    run.check_data(mixed)
    with pytest.raises(ValueError, match="it may have seen those that are held out"):
        run.held_out(mixed)


def test_rounding_is_no_other_data() -> None:
    run = {"mean": -3e-12, "std": 0.24883593}
    assert alike(run, -5e-11, 0.24883589, exact=False)
    assert not alike({"mean": 33.2, "std": 70.0}, 33.2001, 70.0, exact=True)


def test_rectangles_keep_their_shapes_when_they_turn() -> None:
    x = torch.zeros(1, 1, 20, 60)
    x[..., 8:12, 28:32] = 1  # a square about the middle
    y = turned(x, torch.tensor([math.pi / 2]))
    torch.testing.assert_close(y, x, rtol=0, atol=1e-4)
    bar = torch.zeros(1, 1, 20, 60)
    bar[..., 9:11, 26:34] = 1
    torch.testing.assert_close(
        turned(bar, torch.tensor([math.pi / 2]))[..., 6:14, 29:31], torch.ones(1, 1, 8, 2), rtol=0, atol=1e-4
    )


def test_reports_of_converted_networks(small: Dataset, tmp_path: Path) -> None:
    config = Config(model="resnet18", group="p4", widths=(8, 8, 8, 8), epochs=1, batch_size=100)
    tiny = Dataset("small", small.train[:100], small.test[:20], small.classes)
    train(config, tmp_path / "run", progress=False, data=tiny)
    report([tmp_path / "run"], tmp_path / "page.html", tiny, images=4)
    assert "Filters of the first layer" in (tmp_path / "page.html").read_text()


def test_a_run_that_ends_untested_says_so(shell: Any, tmp_path: Path, small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    config, original = dataclasses.replace(TINY, epochs=3, test_every=9), module._Reporter.epoch

    def interrupted(self: Any, row: dict[str, Any]) -> None:
        original(self, row)
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module._Reporter, "epoch", interrupted)
    monkeypatch.setattr(module, "load", lambda *_: small)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, progress=False, data=small)
    status, text = shell("train", "--resume", "--out", str(tmp_path), "--epochs", "2")
    assert (status, "not tested yet after 2 epochs" in text) == (0, True)


def test_weights_in_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    save(build("p4cnn"), tmp_path / "last.safetensors")
    with pytest.raises(ValueError, match=r"holds weights, but no checkpoint of gcnn train"):
        load_run(tmp_path)


def test_reading_a_run_leaves_the_random_numbers_alone(small: Dataset, tmp_path: Path) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path, progress=False, data=small)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_run(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_network_that_is_not_exact_says_so_before_it_trains(small: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Dataset("small", small.train[:100], small.test[:20], small.classes)
    config = Config(model="resnet44", group="p4m", widths=(2, 2, 2), epochs=1, batch_size=100)
    train(config, data=tiny)
    assert "note: resnet44 is not exact at 28 x 28: under p4m" in capsys.readouterr().err
    train(dataclasses.replace(config, downsample="pool", invariant=True), data=tiny)
    assert "is not exact" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "shape", "exact"),
    [
        ({"model": "voxel-resnet", "group": "Oh", "widths": (1, 1, 1)}, (1, 14, 14, 14), True),
        ({"model": "voxel-resnet", "group": "O", "widths": (2, 2, 2)}, (1, 15, 15, 15), False),
        ({"model": "resnet44", "group": "p4m", "widths": (1, 1, 1), "invariant": True}, (1, 33, 65), True),
        ({"model": "resnet44", "group": "p4m", "widths": (1, 1, 1), "invariant": True}, (1, 33, 64), False),
        ({"model": "hex-resnet26", "widths": (1, 1, 1), "invariant": True}, (1, 32, 32), True),
        ({"model": "hex-resnet26", "widths": (1, 1, 1)}, (1, 32, 32), False),
    ],
)
def test_volumes_rectangles_and_hexagons_that_are_not_exact(settings: Any, shape: tuple[int, ...], exact: bool) -> None:
    config = Config(**settings)
    model = make_model(config, 3, shape)
    note = note_on_exactness(model, shape, config)
    x = torch.rand(1, *shape)
    inner, x = on_lattice(model.eval(), x)
    assert (equivariance_error(inner, group_of(model), x) < 1e-3) == exact == (note == "")
    assert exact or f"is not exact at {' x '.join(map(str, shape[1:]))}: under {group_of(model)}" in note


NOTES: list[tuple[dict[str, Any], int, str]] = [
    # the relus of so narrow a network are dead, and its answers the same whatever the picture
    (
        {"model": "resnet18", "widths": (4, 4, 4, 4)},
        64,
        "a stride does not fit the size; what helps is another size (65; --size)",
    ),
    ({"model": "resnet44", "widths": (4, 4, 4)}, 65, "its head is not invariant; what helps is --invariant"),
    (
        {"model": "resnet44", "widths": (4, 4, 4)},
        64,
        "a stride does not fit the size and its head is not invariant; what helps is another size (61, 65, 69; --size) or "
        "--downsample pool, and --invariant",
    ),
    (
        {"model": "resnet44", "widths": (4, 4, 4), "invariant": True},
        30,
        "a stride does not fit the size; what helps is another size (25, 29, 33; --size)",  # pooling would not: 30, 15, 7
    ),
    (
        {"model": "allcnn-c", "channels": 2, "downsample": "pool"},
        33,
        "a stride does not fit the size; what helps is another size (28, 32, 36; --size) or --downsample stride",
    ),
    ({"model": "resnet44", "widths": (4, 4, 4), "invariant": True}, 65, ""),
]


@pytest.mark.parametrize(("settings", "side", "words"), NOTES)
def test_the_note_goes_by_strides_and_head_and_names_what_helps(settings: Any, side: int, words: str) -> None:
    config = Config(group="p4m", data="pictures", size=side, **settings)
    note = note_on_exactness(make_model(config, 3, (3, side, side)), (3, side, side), config)
    if words:
        start = f"note: {config.model} is not exact at {side} x {side}: under p4m its answers change, more so after training"
        assert note == f"{start} than before, since {words}"
    else:
        assert note == ""


def test_a_note_that_fails_stops_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(runs, "strides_checked", fail)
    config = Config(group="p4m")
    note = note_on_exactness(make_model(config), (1, 28, 28), config)
    assert note.startswith("note: p4cnn: it could not be found out whether it is exact at 28 x 28 (no such device); gcnn check")


def test_words_about_runs_that_are_used_in_a_wrong_way(
    shell: Any, tmp_path: Path, small: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder, new = tmp_path / "runs" / "bands", tmp_path / "new"
    a, b = (Split(split.images.repeat(1, 4, 1, 1)[:60], split.labels[:60]) for split in (small.train, small.test))
    train(dataclasses.replace(TINY, epochs=1), folder, progress=False, data=Dataset("bands", a, b, small.classes))
    new.mkdir()
    Image.new("RGBA", (28, 28)).save(new / "rgba.png")
    status, told = shell("predict", str(new), str(folder))
    assert (status, told) == (
        1,
        f"gcnn predict: {folder} is a run, {new} is none; the run comes first: gcnn predict {folder} {new}\n",
    )
    status, told = shell("predict", str(folder), str(new))
    assert status == 1
    assert f"{new / 'rgba.png'}: the network takes images of 4 bands, and files are read as gray or RGB; in Python" in told
    monkeypatch.setattr(cli, "load", lambda *_: dataclasses.replace(small, name="digits"))
    status, told = shell("eval", str(folder))
    assert status == 1
    assert "the run was trained on bands, data that was given in Python, where it is to be tested too: gcnn.train.eval" in told
    assert "digits" not in told
    for words, meant in (
        (("eval", str(folder), "--tset"), "got '--tset'; did you mean --test?"),
        (("predict", str(folder), str(new), "--cvs", "a.csv"), "got '--cvs'; did you mean --csv?"),
    ):
        with pytest.raises(SystemExit):
            cli.main(list(words))
        assert meant in capsys.readouterr().err
    status, told = shell("train", "--config", str(tmp_path / "mine.toml"))
    assert status == 1
    assert f"--config {tmp_path / 'mine.toml'} cannot be read (No such file or directory)" in told


def test_what_may_not_be_read_is_not_called_missing(
    shell: Any, tmp_path: Path, small: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path / "run", progress=False, data=small)
    (tmp_path / "new").mkdir()

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        status, told = shell("predict", str(tmp_path / "run"), str(tmp_path / "new"))
        assert (status, "last.safetensors cannot be read (Permission denied)" in told) == (1, True)
    monkeypatch.setattr(Path, "iterdir", refuse)
    status, told = shell("predict", str(tmp_path / "run"), str(tmp_path / "new"))
    assert (status, f"{tmp_path / 'new'} cannot be read" in told) == (1, True)


def test_little_work_is_counted_in_ones(small: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Dataset("small", small.train[:40], small.test[:20], small.classes)
    train(Config(channels=1, epochs=1, batch_size=20), data=tiny)
    assert re.search(r"p4cnn on p4: \d+ parameters, \d\d\d?,\d{3} multiplications per image", capsys.readouterr().err)


def test_settings_that_are_misspelt() -> None:
    misspelt: Any = {"batchsize": 8}
    with pytest.raises(TypeError, match=r"Config: setting must be one of model, .*, got 'batchsize'; did you mean batch_size or"):
        Config(**misspelt)
    with pytest.raises(ValueError, match=r"hold some out with --validation, a tenth of the training images, say"):
        Config(keep="best")


def test_pictures_are_counted_by_class(small: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    labels = torch.arange(200) // 150
    data = Dataset("pictures", Split(small.train.images, labels), Split(small.test.images, labels[100:]), ("many", "few"))
    train(dataclasses.replace(TINY, data="pictures", data_root="there", epochs=1), data=data)
    assert "pictures, training + test: many 150 + 50, few 50 + 50\n" in capsys.readouterr().err


def test_images_that_a_network_cannot_take(small: Dataset, tmp_path: Path) -> None:
    cut = [Split(split.images[..., :6, :6], split.labels) for split in (small.train, small.test)]
    with pytest.raises(ValueError, match=r"p4cnn cannot take images of 6 x 6: .*; take larger ones, or another --model"):
        train(TINY, tmp_path / "run", progress=False, data=Dataset("small", cut[0], cut[1], small.classes))
    assert not (tmp_path / "run").exists()
    large = [Split(split.images.repeat(1, 1, 4, 4), split.labels) for split in (small.train, small.test)]
    for model, words in (
        ("p4cnn", "29 hexagonal cells across would see less than every other pixel"),
        ("hex-resnet26", "a part of"),
    ):
        with pytest.raises(ValueError, match=f"{model} cannot take images of 112 x 112: .*{words}.*; take smaller ones"):
            train(Config(model=model, group="p6"), progress=False, data=Dataset("small", large[0], large[1], small.classes))
    assert Config(model="convnext").model == "convnext-tiny"
    assert "invariant" not in options_of("digit-resnet")  # its head is invariant as it is
    make_model(Config(model="digit-resnet", invariant=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"widths": ("a",)}, "widths must be positive whole numbers"),
        ({"lr": math.inf}, "lr must be a finite number"),
        ({"rotate": -5.0}, "rotate must be at least 0"),
        ({"weight_decay": -5.0}, "weight_decay must be at least 0"),
        ({"channels": -1}, "channels must be at least 0"),
        ({"seed": 2**63}, r"seed must be a whole number from -2\*\*43 to 2\*\*44, got 9223372036854775808"),
        ({"widths": 8}, r"widths must be of type tuple, got 8; write a list, \[8\]"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(**settings)


def test_predictions_ask_for_what_the_network_learned(small: Dataset, tmp_path: Path) -> None:
    run, x = train(dataclasses.replace(TINY, epochs=1), tmp_path / "a", progress=False, data=small), small.test.images[:3]
    expected = run.predict(x)
    assert load_run(tmp_path / "a").of_bytes
    torch.testing.assert_close(run.predict(x.numpy()), expected)  # type: ignore[arg-type]
    torch.testing.assert_close(run.predict(x.float()), expected)
    assert run.predict(x[:0]).shape == (0, 10)
    for images, words in (
        (x.float() / 255, r"expected images as bytes, got torch.float32 from 0 to 1; use \(255 \* x\)"),
        (x[..., :20], r"expected images \(N, 1, 28, 28\), as the network was trained on, got \(3, 1, 28, 20\)"),
        (x.float() * math.nan, "got NaN or infinite numbers"),
        (x.int() * 40, r"expected images as bytes, got torch.int32 from 0 to 10200; scale them as those"),
        (x / 127.5 - 1, r"got torch.float32 from -1 to 1; scale them"),
    ):
        with pytest.raises(ValueError, match=words):
            run.predict(images)
    of_ones = dataclasses.replace(run, mean=0.3, std=0.4, of_bytes=False)  # trained on zeros and ones
    torch.testing.assert_close(of_ones.predict((x > 100).float()), of_ones.predict(x > 100))


def test_shifts_stay_within_the_image(small: Dataset) -> None:
    with pytest.raises(
        ValueError, match=r"shift moves images of 28 x 28 pixels by up to 28; expected less than the shorter side"
    ):
        train(dataclasses.replace(TINY, shift=28), progress=False, data=small)


def test_parts_that_do_not_fit_each_other(small: Dataset) -> None:
    x, y = small.test.images[:20], small.test.labels[:20]
    for images, words in (
        (x[:0], "the test part is empty; hand some images to it, or hold some out"),
        (x[..., :20], r"training images are \(1, 28, 28\), those of the test \(1, 28, 20\); cut them alike"),
        (x > 100, "training images go from 0 to 255, those of the test from 0 to 1; scale both alike"),
        (x / 127.5 - 1, "training images go from 0 to 255, those of the test from -1 to 1; scale both alike"),
        (x / 128, "training images go from 0 to 255, those of the test from 0 to 1.99.*; scale both alike"),
    ):
        data = Dataset("mine", small.train, Split(images, y[: len(images)]), small.classes)
        with pytest.raises(ValueError, match=words):
            train(TINY, progress=False, data=data)
    same = Dataset("mine", small.train, Split(x.float(), y), small.classes)
    assert len(train(dataclasses.replace(TINY, epochs=1), progress=False, data=same).history) == 1
    held = Dataset("mine", small.train, Split(x[:0], y[:0]), small.classes)  # which asks for no test
    run = train(dataclasses.replace(TINY, epochs=1, validation=100), progress=False, data=held)
    assert len(run.history) == 1
    with pytest.raises(ValueError, match="evaluate: expected at least one image, got none"):
        evaluate(run.model, run.inputs(held.test, torch.device("cpu")))


def test_runs_that_begin_at_once_do_not_take_the_folder_away(tmp_path: Path) -> None:
    folder, rounds = tmp_path / "new" / "run", 20
    inside, most = itertools.count(), []
    started = threading.Barrier(4)

    def work() -> None:
        for _ in range(rounds):
            started.wait(60)
            try:
                with module._alone(folder):
                    most.append(next(inside))
                    assert folder.is_dir()
                    time.sleep(0.005)
                    assert folder.is_dir()
                    (folder / "mine").touch(exist_ok=False)  # no other run is here
                    (folder / "mine").unlink()
            except FileExistsError as error:
                refused.append(str(error))
            except BaseException:
                started.abort()  # the others would wait for it
                raise

    refused: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert len(most) >= rounds
    assert all("is being written by another run" in words for words in refused)


def test_one_run_at_a_time_writes_to_a_folder(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, seen = make_model, []

    def second(*arguments: Any) -> Any:
        monkeypatch.setattr(module, "make_model", make)
        with pytest.raises(FileExistsError, match="is being written by another run; wait for it, or choose another --out"):
            train(TINY, tmp_path / "a", progress=False, data=small)
        seen.append(True)
        return make(*arguments)

    monkeypatch.setattr(module, "make_model", second)
    train(dataclasses.replace(TINY, epochs=1), tmp_path / "a", progress=False, data=small)
    assert seen == [True]
    train(dataclasses.replace(TINY, epochs=2), tmp_path / "a", True, progress=False, data=small)  # the lock went with the run
    with pytest.raises(ValueError, match="takes volumes"):
        train(dataclasses.replace(TINY, model="voxel-resnet", channels=0), tmp_path / "b" / "c", progress=False, data=small)
    assert not (tmp_path / "b").exists()


def test_sharp_epochs_stay_at_the_end(small: Dataset, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, epochs=1, sharpness=0.1, sharp_epochs=1)
    train(config, tmp_path, progress=False, data=small)
    with pytest.raises(ValueError, match="has its sharp epochs at the end of 1, not of 2; resume with --epochs 1"):
        train(dataclasses.replace(config, epochs=2), tmp_path, True, progress=False, data=small)


@pytest.mark.parametrize("name", ["dropout", "sharpness", "rotate", "weight_decay", "lr"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_settings_are_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a"):
        Config(**{name: value})  # type: ignore[arg-type]


def test_the_best_epoch_has_a_loss_that_is_a_number(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, losses = module.evaluate, iter([math.nan, 2.0, 1.0, 3.0, 1.0])
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: {**found(*a, **k), "loss": next(losses)})
    config = dataclasses.replace(TINY, epochs=4, keep="best", validation=100)
    run = train(config, tmp_path, progress=False, data=small)
    assert run.kept is not None
    assert run.kept["epoch"] == 3


def test_reports_replace_reports_alone(small: Dataset, tmp_path: Path) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path / "a", progress=False, data=small)
    page = tmp_path / "page.html"
    page.write_text("my notes")
    with pytest.raises(FileExistsError, match="is there already and is no report of gcnn; choose another name"):
        report([tmp_path / "a"], page, small, images=10)
    assert page.read_text() == "my notes"
    page.unlink()
    for _ in range(2):
        report([tmp_path / "a"], page, small, images=10)
    assert "<h1>" in page.read_text()


def test_the_table_is_whole_where_nobody_listens(small: Dataset, tmp_path: Path) -> None:
    from PIL import Image

    train(dataclasses.replace(TINY, epochs=1), tmp_path / "run", progress=False, data=small)
    (tmp_path / "in" / "more").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(small.test.images[i, 0].numpy()).save(tmp_path / "in" / f"{i}.png")
    shutil.copy(tmp_path / "in" / "0.png", tmp_path / "in" / "0.gif")
    words = [sys.executable, "-m", "gcnn", "predict", str(tmp_path / "run"), str(tmp_path / "in"), "--device", "cpu"]
    with subprocess.Popen([*words, "--csv", str(tmp_path / "a.csv")], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stdout is not None
        asked.stdout.close()
        errors = asked.stderr.read().decode() if asked.stderr else ""
        assert asked.wait(120) == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 4
    assert "2 others in" in errors
    assert "were passed over" in errors
    (tmp_path / "bad.png").write_bytes(b"no picture")
    listed = [*words[:5], str(tmp_path / "bad.png"), *words[5:], "--csv", str(tmp_path / "b.csv")]
    with subprocess.Popen(listed, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stdout is not None
        asked.stdout.close()
        errors = asked.stderr.read().decode() if asked.stderr else ""
        assert asked.wait(120) == 1
    assert "bad.png" in errors
    assert "Exception ignored" not in errors
    assert len((tmp_path / "b.csv").read_text().splitlines()) == 4


def test_the_cost_of_a_network_is_that_of_the_planar_algorithm() -> None:
    """It does not depend on the processor, and the network stays in the mode it is in."""
    layer, x = GConv(p4m, 64, 64, 3, padding=1), torch.zeros(1, 64, 8, 20, 20)
    assert multiplications(layer, x) == 64 * 64 * 8 * 8 * 9 * 400
    assert layer.training


def test_what_is_measured_leaves_the_network_as_it_was(small: Dataset) -> None:
    run = train(dataclasses.replace(TINY, epochs=1), progress=False, data=small)
    inputs = run.inputs(small.test, torch.device("cpu"))
    run.model.train()
    frozen = next(m for m in run.model.modules() if isinstance(m, nn.BatchNorm3d | GBatchNorm)).eval()
    evaluate(run.model, inputs)
    error_by_angle(run.model, inputs, steps=2)
    assert run.model.training
    assert not frozen.training

    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    norm = nn.BatchNorm2d(1, momentum=0.3)
    with pytest.raises(KeyboardInterrupt):
        reestimate_norms(nn.Sequential(norm, Stops()), inputs)
    assert norm.momentum == 0.3


def test_only_images_are_turned_by_angles() -> None:
    volumes = Inputs(Split(torch.rand(4, 1, 5, 5, 5), torch.zeros(4, dtype=torch.int64)), 0.0, 1.0, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"expected images \(N, C, H, W\) to turn by angles, got inputs of shape \(4, 1, 5, 5, 5\)"
    ):
        error_by_angle(nn.Flatten(), volumes, steps=2)


def test_reading_a_run_draws_no_random_numbers(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(dataclasses.replace(TINY, epochs=1), tmp_path, progress=False, data=small)

    def seeded(seed: int) -> None:
        raise AssertionError("the generators of GPUs are the caller's")

    monkeypatch.setattr("torch.cuda.manual_seed_all", seeded)
    state = torch.get_rng_state()
    load_run(tmp_path)
    assert torch.equal(state, torch.get_rng_state())


def test_precision_is_put_back_whichever_setting_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has the older setting alone")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    parts = backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul
    first = [part.fp32_precision for part in parts]
    try:
        for before in (("tf32", "tf32", "none"), ("ieee", "tf32", "tf32"), ("ieee", "ieee", "ieee")):
            for part, value in zip(parts, before, strict=True):
                part.fp32_precision = value
            for tf32 in (True, False):
                with precision(tf32):
                    assert allows_tf32() == tf32
                    assert {part.fp32_precision for part in parts} == {"tf32" if tf32 else "ieee"}
                assert tuple(part.fp32_precision for part in parts) == before
    finally:
        for part, value in zip(parts, first, strict=True):
            part.fp32_precision = value
