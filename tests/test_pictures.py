"""Pictures of one's own, from folders to answers: sizes, validation folders, rare classes, other classes, what is printed."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from gcnn import cli, data
from gcnn import train as module
from gcnn.data import Dataset, Split, digits, pictures, read_picture, resized
from gcnn.runs import at_a_time, evaluate, make_model
from gcnn.steps import Inputs, batches, moved, turned
from gcnn.train import Config, load_run, train

TINY = Config(epochs=1, batch_size=16, channels=2, lr=3e-3)


def draw(folder: Path, count: int, side: int = 28, colour: bool = True, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        pixels = rng.integers(256, size=(side, side, 3) if colour else (side, side), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}_{i}.png")


@pytest.fixture
def tissue(tmp_path: Path) -> Path:
    """Sixteen healthy pictures and eight of tumours to learn from, and four of each to test on."""
    for seed, (place, count) in enumerate((("train/healthy", 16), ("train/tumour", 8), ("test/healthy", 4), ("test/tumour", 4))):
        draw(tmp_path / "tissue" / place, count, seed=seed)
    return tmp_path / "tissue"


def test_pictures_for_validation_come_last(tissue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = pictures(tissue)
    for seed, name in enumerate(("healthy", "tumour")):
        draw(tissue / "val" / name, 3, seed=10 + seed)
    found = pictures(tissue)
    assert (len(found.train), found.for_validation, len(found.test)) == (30, 6, 8)
    held = found.hold_out(6)
    assert torch.equal(held.train.images, without.train.images)
    assert held.test.labels.tolist() == [0, 1, 0, 1, 0, 1]
    train(dataclasses.replace(TINY, data="pictures", data_root=str(tissue)))
    assert "6 training images are those of val; hold out just those with --validation 6" in capsys.readouterr().err
    train(dataclasses.replace(TINY, data="pictures", data_root=str(tissue), validation=6))
    told = capsys.readouterr().err
    assert "those of val" not in told
    assert "pictures, training + validation: healthy 16 + 3, tumour 8 + 3\n" in told
    draw(tissue / "val" / "cyst", 1)
    with pytest.raises(ValueError, match=r"val has classes that .*train has not: cyst"):
        pictures(tissue)


def test_a_test_set_may_come_later(tissue: Path, tmp_path: Path) -> None:
    """Settings are chosen on what is held out, before there is anything to test on."""
    shutil.rmtree(tissue / "test")
    config = dataclasses.replace(TINY, data="pictures", data_root=str(tissue))
    with pytest.raises(ValueError, match=r"the test part is empty; hand some images to it, or hold some out with --validation"):
        train(config, progress=False)
    run = train(dataclasses.replace(config, validation=6), tmp_path / "run", progress=False)
    assert "test_error" in run.history[-1]
    assert len(pictures(tissue).test) == 0


def test_pictures_are_resized_in_training_and_answers(tissue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(tissue / "test" / "tumour", 1, side=40, seed=99)
    with pytest.raises(ValueError, match=r"has 40 x 40 pixels, .* has 28 x 28; resize or cut them alike, or let --size do it"):
        pictures(tissue)
    found = pictures(tissue, size=33)
    assert found.train.images.shape == (24, 3, 33, 33)
    first = np.array(Image.open(tissue / "train" / "healthy" / "0_0.png").resize((33, 33), Image.Resampling.BILINEAR))
    torch.testing.assert_close(found.train.images[0].int(), torch.from_numpy(first).permute(2, 0, 1).int(), rtol=0, atol=1)
    config = dataclasses.replace(TINY, model="resnet44", channels=0, widths=(1, 1, 1), data="pictures", data_root=str(tissue))
    run = train(dataclasses.replace(config, size=33), tmp_path / "run", progress=False)
    picture = str(tissue / "test" / "tumour" / "99_0.png")  # 40 x 40
    assert cli.main(["predict", str(tmp_path / "run"), picture, "--top", "1"]) == 0
    large = resized(read_picture(picture), 33)
    shares = run.predict(torch.from_numpy(large).permute(2, 0, 1)[None])[0]
    assert f"{run.classes[int(shares.argmax())]} {100 * float(shares.max()):.1f} %" in capsys.readouterr().out
    assert cli.main(["eval", str(tmp_path / "run")]) == 0
    Image.new("RGB", (40, 30)).save(tissue / "test" / "tumour" / "wide.png")
    with pytest.raises(ValueError, match=r"wide.png has 40 x 30 pixels, and only square pictures are resized; cut it"):
        pictures(tissue, size=33)
    with pytest.raises(ValueError, match="size is for pictures, digits have a size of their own"):
        Config(size=33)


@pytest.mark.parametrize(("before", "after"), [(28, 33), (64, 32), (60, 33), (301, 17), (13, 7), (7, 64), (1, 3), (97, 1)])
@pytest.mark.parametrize("colour", [True, False])
def test_resizing_commutes_with_turns_and_mirrors(before: int, after: int, colour: bool) -> None:
    rng = np.random.default_rng(before)
    for bright in (2, 256):  # few values have many sums half way between two bytes
        pixels = (255 // (bright - 1) * rng.integers(bright, size=(before, before, 3)[: 2 + colour])).astype(np.uint8)
        small = resized(pixels, after)
        for turns in range(4):
            for mirror in (False, True):
                moved_one, expected = (np.rot90(x[::-1] if mirror else x, turns) for x in (pixels, small))
                assert np.array_equal(resized(moved_one, after), expected)
        by_pillow = np.array(Image.fromarray(pixels).resize((after, after), Image.Resampling.BILINEAR))
        assert np.abs(small.astype(int) - by_pillow).max() <= 1
    for value in (0, 7, 255):
        assert (resized(np.full_like(pixels, value), after) == value).all()


def test_sizes_that_fit_are_named(tissue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(TINY, model="resnet44", channels=0, widths=(1, 1, 1), data="pictures", data_root=str(tissue))
    train(config)
    told = capsys.readouterr().err
    assert "resnet44 is not exact at 28 x 28: under p4m its answers change" in told
    assert "what helps is another size (25, 29, 33; --size) or --downsample pool, and --invariant\n" in told
    train(dataclasses.replace(config, size=29, invariant=True))
    assert "is not exact" not in capsys.readouterr().err


def test_all_pictures_that_cannot_be_read_are_named(tissue: Path) -> None:
    for i in range(7):
        (tissue / "train" / "healthy" / f"bad{i}.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"7 of 39 pictures cannot be taken: .*bad0.png could not .*bad4.png .*; and 2 more"):
        pictures(tissue)


def test_gray_pictures_among_coloured_ones_are_told(tissue: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures(tissue)
    draw(tissue / "train" / "tumour", 2, colour=False, seed=7)
    with pytest.warns(UserWarning, match=r"2 of 34 are gray \(tumour 2\) and become RGB"):
        pictures(tissue)


def test_every_class_counts_as_much(tissue: Path) -> None:
    """Against steps written out, with a weight for each class."""
    found = pictures(tissue)
    config = dataclasses.replace(TINY, batch_size=12, optimizer="sgd", lr=0.05, reestimate="no", balanced=True)
    run = train(config, progress=False, data=found)
    expected = make_model(config, 2, (3, 28, 28))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    x = (found.train.images.float() - run.mean) / run.std
    weight = torch.tensor([24 / (2 * 16), 24 / (2 * 8)])
    for index, total in batches(24, 12, config.seed * 1_000_003 + 1):
        optimizer.zero_grad()
        (F.cross_entropy(expected(x[index]), found.train.labels[index], weight, reduction="sum") / total).backward()
        optimizer.step()
    for a, b in zip(run.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    few = Split(found.test.images[:5], torch.tensor([0, 0, 0, 0, 1]))
    inputs = run.inputs(few, torch.device("cpu"))
    with torch.no_grad():
        losses = F.cross_entropy(run.model(inputs(torch.arange(5))[0]), few.labels, reduction="none")
    assert evaluate(run.model, inputs, balanced=True)["loss"] == pytest.approx(float(losses[:4].mean() + losses[4]) / 2, rel=1e-5)


def test_a_run_begins_with_the_weights_of_another(tissue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, still = pictures(tissue), dataclasses.replace(TINY, lr=1e-12, reestimate="no")
    first = train(dataclasses.replace(TINY, seed=1), tmp_path / "first", progress=False, data=found)
    same = train(dataclasses.replace(still, init=str(tmp_path / "first")), data=found)
    assert f"begins with the weights of {tmp_path / 'first'}\n" in capsys.readouterr().err
    for a, b in zip(first.model.parameters(), same.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    more = Dataset("mine", found.train, found.test, ("healthy", "tumour", "cyst"))
    other = train(dataclasses.replace(still, init=str(tmp_path / "first")), tmp_path / "second", data=more)
    assert ": its classes were others\n" in capsys.readouterr().err
    last = list(first.model.state_dict())[-1].rpartition(".")[0]
    for name, p in other.model.named_parameters():
        if not name.startswith(f"{last}."):
            torch.testing.assert_close(p, first.model.get_parameter(name), rtol=0, atol=1e-9)
    longer = dataclasses.replace(still, init=str(tmp_path / "first"), epochs=2)
    os.rename(tmp_path / "first", tmp_path / "gone")  # it is not needed any more
    assert len(train(longer, tmp_path / "second", resume=True, progress=False, data=more).history) == 2
    with pytest.raises(ValueError, match="is a checkpoint of group p4, the network is one of p4m"):
        train(dataclasses.replace(still, group="p4m", init=str(tmp_path / "gone")), progress=False, data=found)
    with pytest.raises(ValueError, match=r"does not fit this network: .* take the --model, --group, --channels and --widths"):
        train(dataclasses.replace(still, channels=3, init=str(tmp_path / "gone")), progress=False, data=found)


def test_what_was_held_out_is_not_called_a_test(tmp_path: Path) -> None:
    whole = digits()
    small = Dataset("small", whole.train[:100], whole.test[:20], whole.classes)
    for name, held in (("test", 0), ("validation", 20)):
        train(dataclasses.replace(TINY, validation=held), tmp_path / name, progress=False, data=small)
        with (tmp_path / name / "metrics.csv").open() as file:
            columns = next(csv.reader(file))
        assert columns == sorted(columns, key=lambda c: (c != "epoch", c))
        assert set(columns) == {"epoch", "seconds", "train_error", "train_loss", f"{name}_error", f"{name}_loss"}


def test_few_steps_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    whole = digits()
    small = Dataset("small", whole.train[:100], whole.test[:20], whole.classes)
    train(dataclasses.replace(TINY, batch_size=128), data=small)
    told = capsys.readouterr().err
    assert "p4cnn on p4: 2,064 parameters, 1 million multiplications per image\n" in told
    assert "note: an epoch has 1 step, since 100 images go 128 at a time; with a smaller --batch-size" in told
    train(dataclasses.replace(TINY, batch_size=10), data=small)
    assert "note: an epoch" not in capsys.readouterr().err


def test_images_are_reflected_outside() -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (200, 2, 6, 5), dtype=torch.uint8)
    wide = F.pad(images.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    seen = set()
    for before, after in zip(wide, moved(images, 2, flip=False, reflect=True), strict=True):
        fits = [(i, j) for i in range(5) for j in range(5) if torch.equal(after, before[:, i : i + 6, j : j + 5])]
        assert fits
        seen.add(fits[0])
    assert len(seen) == 25
    bright = torch.full((1, 1, 9, 9), 7.0)
    torch.testing.assert_close(turned(bright, torch.tensor([0.7]), reflect=True), bright)
    assert float(turned(bright, torch.tensor([0.7])).min()) < 1  # black corners
    split = Split(images, torch.zeros(200, dtype=torch.int64))
    for kind, outside in (("pictures", True), ("cifar10", False)):
        assert Inputs(split, 0.0, 1.0, torch.device("cpu"), Config(data=kind, data_root="x")).reflect == outside


def test_large_images_are_tested_a_few_at_a_time() -> None:
    for side, count in ((28, 1000), (32, 1000), (96, 111), (2000, 1)):
        split = Split(torch.zeros(1, 1, side, side), torch.zeros(1, dtype=torch.int64))
        assert at_a_time(Inputs(split, 0.0, 1.0, torch.device("cpu"))) == count


def test_onnx_files_know_their_classes(tissue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    train(TINY, tmp_path / "run", progress=False, data=pictures(tissue))
    assert cli.main(["export", str(tmp_path / "run"), "--onnx", str(tmp_path / "net.onnx")]) == 0
    assert "to 2 logits, in the order healthy, tumour (also in the file's metadata)" in capsys.readouterr().out
    about = onnxruntime.InferenceSession(str(tmp_path / "net.onnx")).get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["healthy", "tumour"]
    assert about["input"] == "(3, 28, 28), numbers from 0 to 255"


def test_folders_and_files_that_predict_cannot_take(tissue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(TINY, tmp_path / "run", progress=False, data=pictures(tissue))
    assert cli.main(["predict", str(tmp_path / "run"), str(tissue)]) == 1
    assert f"holds folders of folders of pictures; give one of those, {tissue / 'train'}" in capsys.readouterr().err
    assert cli.main(["predict", str(tmp_path / "run"), "*.png"]) == 1
    assert "*.png is not there; give the name of an image file" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16, torch.float32])
def test_images_of_other_numbers_train(dtype: torch.dtype) -> None:
    whole = digits()
    parts = [Split(split.images[:40].to(dtype), split.labels[:40]) for split in (whole.train, whole.test)]
    assert train(TINY, progress=False, data=Dataset("mine", parts[0], parts[1], whole.classes)).history
    dim = [Split(parts[0].images.float() / 25, parts[0].labels), Split(parts[1].images.float() / 106 - 0.008, parts[1].labels)]
    assert train(TINY, progress=False, data=Dataset("mine", dim[0], dim[1], whole.classes)).history  # a little below zero


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows")
def test_a_process_forked_in_a_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    read, write = os.pipe()
    with module._alone(tmp_path / "run"):
        child = os.fork()
        if not child:  # waits, with whatever it inherited
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        (tmp_path / "run" / "kept").touch()
    try:
        with module._alone(tmp_path / "run"):  # the child lives, and does not hold it
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_arrays_of_volumes_by_either_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", images=np.zeros((2, 4, 4, 4), np.uint8))
    with pytest.raises(
        ValueError, match=r"expected the arrays train_images, .*, or x_train, y_train, x_test, y_test, found images"
    ):
        data.volumes(tmp_path / "v.npz")


def test_a_run_of_pictures_can_be_loaded(tissue: Path, tmp_path: Path) -> None:
    config: Any = dataclasses.replace(TINY, data="pictures", data_root=str(tissue), balanced=True, rotate=10.0, shift=1)
    run = train(config, tmp_path / "run", progress=False)
    again = load_run(tmp_path / "run")
    assert again.config == run.config
