"""The numbers and words of a report are those of what was computed, on images that are not digits on black too."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gcnn import p4, plot
from gcnn import report as module
from gcnn.data import Dataset, Split, digits
from gcnn.functional import act
from gcnn.report import report
from gcnn.runs import error_by_angle
from gcnn.testing import equivariance_error
from gcnn.train import Config, load_run, train

TINY = Config(epochs=1, batch_size=64, channels=3, lr=3e-3)


@pytest.fixture(scope="module")
def small() -> Dataset:
    whole = digits()
    return Dataset("small", whole.train[:200], whole.test[:60], whole.classes)


@pytest.fixture(scope="module")
def tiles() -> Dataset:
    """Colour noise, fine or coarse, on no ground: like tissue."""
    generator = torch.Generator().manual_seed(0)
    fine = torch.randint(60, 256, (80, 3, 28, 28), generator=generator, dtype=torch.uint8)
    coarse = fine[..., ::4, ::4].repeat_interleave(4, -1).repeat_interleave(4, -2)
    labels = torch.arange(80) % 2
    images = torch.where(labels.view(-1, 1, 1, 1) == 1, fine, coarse)
    return Dataset("tiles", Split(images[:60], labels[:60]), Split(images[60:], labels[60:]), ("coarse", "fine"))


def page_of(tmp_path: Path, data: Dataset, **settings: Any) -> str:
    train(dataclasses.replace(TINY, **settings), tmp_path / "run", progress=False, data=data)
    report([tmp_path / "run"], tmp_path / "page.html", data, images=20)
    return html.unescape((tmp_path / "page.html").read_text())


def cells_of(page: str) -> list[str]:
    """The cells of the first row of the first table."""
    return re.findall(r"<td>(.*?)</td>", page)[:8]


def test_the_change_is_that_of_the_images_as_the_network_is_tested_on_them(tiles: Dataset, tmp_path: Path) -> None:
    page = page_of(tmp_path, tiles, model="z2cnn")
    run = load_run(tmp_path / "run")
    x = (tiles.test.images[:16].float() - run.mean) / run.std
    assert cells_of(page)[7] == f"{equivariance_error(run.model, p4, x):.1e}"
    assert cells_of(page)[7] != f"{equivariance_error(run.model, p4, tiles.test.images[:16].float()):.1e}"
    assert "the largest change of the scores when an image is turned or mirrored, relative to the largest score" in page
    assert "About 1e-6 is rounding" in page


def curve(monkeypatch: pytest.MonkeyPatch, folder: Path, data: Dataset) -> list[Any]:
    """What the report draws as error by angle: (degrees, error)."""
    found: list[Any] = []

    def kept(*args: Any) -> Any:
        found.extend(error_by_angle(*args))
        return found

    monkeypatch.setattr(module, "error_by_angle", kept)
    report([folder], folder / "page.html", data, images=20)
    return found


def test_digits_on_black_are_turned_as_they_are_and_so_are_digits_on_white(
    small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(TINY, tmp_path / "black", progress=False, data=small)
    run = load_run(tmp_path / "black")
    plain = error_by_angle(run.model, run.inputs(small.test[:20], torch.device("cpu")))
    assert curve(monkeypatch, tmp_path / "black", small) == plain
    page = (tmp_path / "black" / "page.html").read_text()
    assert "turned in steps of 15 degrees" in page
    assert "get the value of the images&#x27; border, 0." in page
    splits = [Split(255 - part.images, part.labels) for part in (small.train, small.test)]
    white = Dataset("small", splits[0], splits[1], small.classes)
    corners = seen_corners(monkeypatch, tmp_path / "white", white)
    assert all((part - corners[0]).abs().max() < 1e-4 for part in corners)  # white at every angle


def seen_corners(monkeypatch: pytest.MonkeyPatch, folder: Path, data: Dataset) -> list[Tensor]:
    """The upper left pixel of all that the network is shown, one tensor per angle."""
    train(TINY, folder, progress=False, data=data)
    seen: list[Tensor] = []

    def kept(model: Any, inputs: Any, steps: int, progress: bool) -> Any:
        hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0, 0]))
        found = error_by_angle(model, inputs, steps, progress)
        hook.remove()
        return found

    monkeypatch.setattr(module, "error_by_angle", kept)
    report([folder], folder / "page.html", data, images=20)
    assert len(seen) == 24
    return seen


def test_pictures_without_a_ground_are_turned_as_discs(tiles: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for corner in seen_corners(monkeypatch, tmp_path, tiles):
        torch.testing.assert_close(corner, torch.zeros_like(corner), rtol=0, atol=1e-4)  # the mean, at every angle
    page = (tmp_path / "page.html").read_text()
    assert "sees only the disc that fits into the image, with the mean value around it" in page


def test_the_feature_map_of_the_turned_image_is_computed_from_it(
    tiles: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, Tensor]] = []
    original = plot.feature_map

    def kept(group: Any, x: Tensor, ax: Any, title: str) -> Any:
        drawn.append((title, x))
        return original(group, x, ax, title)

    monkeypatch.setattr(plot, "feature_map", kept)
    page = page_of(tmp_path, tiles, validation=10)
    (words, upright), (_, moved) = drawn[-2:]
    assert words == "of the first validation image"
    torch.testing.assert_close(act(p4, 1, upright[None, None])[0, 0], moved, rtol=1e-4, atol=1e-4)
    assert not torch.equal(act(p4, 1, upright[None, None])[0, 0], moved)  # rounding: it went another way
    assert "on the left of the first validation image, on the right of that image turned by element 1" in page
    assert "first test image" not in page
    assert "of the 3 channels of the image only those for the first, which is red in RGB images" in page


def test_the_page_says_what_was_run(small: Dataset, tmp_path: Path) -> None:
    page = page_of(tmp_path, small)
    assert cells_of(page)[4] == "1"
    assert "Data set: small, 200 training images and 60 test images of 1 x 28 x 28, 10 classes." in page
    assert "settings other than the defaults: channels 3, epochs 1, batch_size 64, lr 0.003." in page
    assert "channels of the image" not in page  # one is all there is


def test_pictures_are_read_in_the_size_of_the_run(tiles: Dataset, tmp_path: Path) -> None:
    from PIL import Image

    for i in range(16):
        path = tmp_path / "tiles" / ("train", "test")[i // 12] / ("coarse", "fine")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tiles.train.images[i].permute(1, 2, 0).numpy()).resize((40, 40)).save(path)
    config = dataclasses.replace(TINY, data="pictures", data_root=str(tmp_path / "tiles"), size=28)
    train(config, tmp_path / "run", progress=False)
    report([tmp_path / "run"], tmp_path / "page.html")
    assert "12 training images and 4 test images of 3 x 28 x 28, 2 classes" in (tmp_path / "page.html").read_text()


def test_epochs_of_runs_that_kept_the_best(small: Dataset, tmp_path: Path) -> None:
    page = page_of(tmp_path, small, validation=50, keep="best", epochs=3)
    assert "Data set: small, 150 training images and 50 validation images" in page
    run = load_run(tmp_path / "run")
    assert run.kept is not None
    assert cells_of(page)[4] == f"{run.kept['epoch']} of 3"
    assert f"Its weights are those of epoch {run.kept['epoch']}, which had the lowest loss on the held-out images" in page


def with_confusion(folder: Path, data: Dataset, confusion: list[list[int]]) -> Any:
    train(TINY, folder, progress=False, data=data)
    run = load_run(folder)
    return dataclasses.replace(run, history=[{**run.history[0], "confusion": confusion}])


def test_recalls_and_their_mean(tiles: Dataset, tmp_path: Path) -> None:
    run = with_confusion(tmp_path, tiles, [[30, 10], [1, 1]])
    text = module._recalls({"mine": run}, "test")
    last = ("mean of the recalls (balanced accuracy)", "42", "62.50 %")
    expected = ("coarse", "40", "75.00 %", "fine", "2", "50.00 %", *last)
    assert tuple(re.findall(r"<td>(.*?)</td>", text)) == expected
    nothing = dataclasses.replace(run, history=[{**run.history[0], "confusion": [[3, 1], [0, 0]]}])
    cells = re.findall(r"<td>(.*?)</td>", module._recalls({"mine": nothing}, "test"))
    assert (cells[5], cells[8]) == ("-", "75.00 %")  # a class without images does not count


def test_a_confusion_without_errors_is_white(tiles: Dataset, tmp_path: Path) -> None:
    run = with_confusion(tmp_path, tiles, [[10, 0], [0, 10]])
    (picture,) = module._confusion("mine", run).get_axes()[0].get_images()
    assert picture.get_clim() == (0, 1)
    run = with_confusion(tmp_path / "errors", tiles, [[8, 2], [0, 10]])
    (picture,) = module._confusion("mine", run).get_axes()[0].get_images()
    assert picture.get_clim() == (0, 0.2)
