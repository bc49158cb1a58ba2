"""Readers against small files in the real formats, damaged in every way that files are; no data set is needed."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gcnn import data, formats
from gcnn.data import Dataset, Split, cifar10, digits, download, load, mnist, rotated_mnist, turn, volumes
from gcnn.files import write_file


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MNIST in its format with few digits, half of the files gzipped; the known checksums are theirs."""
    random = np.random.default_rng(0)
    for part, n in (("train", 60), ("t10k", 10)):
        for kind, array in (
            ("images-idx3", random.integers(0, 256, (n, 28, 28), dtype=np.uint8)),
            ("labels-idx1", random.integers(0, 10, n, dtype=np.uint8)),
        ):
            name, content = f"{part}-{kind}-ubyte", idx(array)
            monkeypatch.setitem(formats.MNIST_MD5, name, hashlib.md5(content).hexdigest())
            if part == "train":
                (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (tmp_path / name).write_bytes(content)
    return tmp_path


def test_digits_come_with_the_package() -> None:
    found = digits()
    assert found.train.images.shape == (12_000, 1, 28, 28)
    assert found.test.images.shape == (10_000, 1, 28, 28)
    assert found.train.images.dtype == torch.uint8
    counts = torch.bincount(torch.cat([found.train.labels, found.test.labels]))
    assert counts.min() > 1800
    assert counts.max() < 2700
    assert load("digits").classes == tuple("0123456789")
    packed = Path(data.__file__).parent / "assets/rotated_digits.xz"
    assert packed.stat().st_size < 6_000_000


def test_turn_is_a_rotation() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    for k in range(4):
        assert np.array_equal(turn(images, np.full(3, k * np.pi / 2)), np.rot90(images, k, (1, 2)))
    row, column = np.mgrid[:28, :28] - 13.5
    blob = (255 * np.exp(-((row + 4) ** 2 + (column - 6) ** 2) / 20)).astype(np.uint8)
    angle = 0.7  # anticlockwise: right goes up, rows point down
    r, c = -4 * np.cos(angle) - 6 * np.sin(angle), 6 * np.cos(angle) - 4 * np.sin(angle)
    exact = 255 * np.exp(-((row - r) ** 2 + (column - c) ** 2) / 20)
    assert np.abs(turn(blob[None], np.array([angle]))[0] - exact).max() < 8


def test_mnist(small_mnist: Path) -> None:
    found = mnist(small_mnist)
    assert (len(found.train), len(found.test)) == (60, 10)
    assert found.train.images.shape == (60, 1, 28, 28)


def test_damaged_mnist_says_what_and_where(small_mnist: Path) -> None:
    path = small_mnist / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is truncated or not a gzip file .*fetches MNIST"):
        mnist(small_mnist)
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ValueError, match=r"is not the file of MNIST: 14 bytes with md5 .*, expected md5"):
        mnist(small_mnist)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.gz is missing, expected train-images-idx3-ubyte of"):
        mnist(small_mnist)
    with pytest.raises(FileNotFoundError, match="is missing"):
        load("mnist", small_mnist / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_says_so(small_mnist: Path) -> None:
    (small_mnist / "t10k-images-idx3-ubyte").chmod(0)
    with pytest.raises(PermissionError, match="cannot be read: permission denied"):
        mnist(small_mnist)


def test_no_permission_is_told_apart(small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match=r"train-images-idx3-ubyte.gz cannot be read: permission denied"):
        mnist(small_mnist)


def test_rotated_mnist_is_kept_and_checked(small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real MNIST the bytes are known; here they are those of a stand-in for the generator."""
    content = bytes([1]) * 62_000 + bytes(62_000 * 784)
    calls = []

    def stand_in(source: Dataset) -> bytes:
        calls.append(source)
        return content

    monkeypatch.setattr(data, "_regenerate", stand_in)
    with pytest.raises(ValueError, match="came out different from the known bytes"):
        rotated_mnist(small_mnist)
    monkeypatch.setattr(data, "ROTATED_SHA256", hashlib.sha256(content).hexdigest())
    found = rotated_mnist(small_mnist)
    assert (len(found.train), len(found.test)) == (12_000, 50_000)
    assert (small_mnist / "rotated_mnist.xz").exists()
    rotated_mnist(small_mnist)
    assert len(calls) == 2  # the second time it was read, not made
    (small_mnist / "rotated_mnist.xz").write_bytes(b"damaged")
    rotated_mnist(small_mnist)
    assert len(calls) == 3


def test_shipped_digits_are_made_by_the_same_arithmetic() -> None:
    """The generator is fixed: same words, same angles, same bytes for made-up digits on every machine."""
    made_up = (np.arange(70_000 * 784, dtype=np.int64) * 7919 % 251).astype(np.uint8).reshape(-1, 1, 28, 28)
    labels = np.arange(70_000) % 10
    whole = Split(torch.from_numpy(made_up), torch.from_numpy(labels))
    content = data._regenerate(Dataset("made up", whole[:60_000], whole[60_000:], tuple("0123456789")))
    assert hashlib.sha256(content).hexdigest() == "440121ea5fb0463bd4650a13075bd090950e358f7729fbad5a883765c4065c88"


def test_original_amat_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.zeros((28, 28))
    row[3, 5] = 1.0  # stored column by column
    text = " ".join(f"{v:.4f}" for v in row.T.ravel()) + " 7\n"
    path = tmp_path / "mnist_all_rotation_normalized_float_train_valid.amat"
    path.write_text(text * 3)
    images, labels = formats.amat(path, 3)
    assert labels.tolist() == [7, 7, 7]
    assert images[0, 0, 3, 5] == 255
    assert images.sum() == 3 * 255
    with pytest.raises(ValueError, match=r"expected 12000 rows of 785 numbers, got 2355; the file is truncated or another"):
        formats.amat(path, 12_000)
    path.write_text("not numbers")
    with pytest.raises(ValueError, match="expected numbers only"):
        formats.amat(path, 3)


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    for name in list(formats.CIFAR_SHA1):
        records = random.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        monkeypatch.setitem(formats.CIFAR_SHA1, name, hashlib.sha1(records.tobytes()).hexdigest())
        (tmp_path / name).write_bytes(records.tobytes())
    return tmp_path


def test_cifar_in_both_versions(small_cifar: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = cifar10(small_cifar)
    assert found.train.images.shape == (50_000, 3, 32, 32)
    python = tmp_path_factory.mktemp("python") / "cifar-10-batches-py"
    python.mkdir()
    for path in small_cifar.glob("*.bin"):
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        batch = {b"data": records[:, 1:].copy(), b"labels": records[:, 0].tolist(), b"batch_label": b"x"}
        (python / path.stem).write_bytes(pickle.dumps(batch, 2))
    same = cifar10(python.parent)
    assert torch.equal(found.train.images, same.train.images)
    assert torch.equal(found.test.labels, same.test.labels)


def test_damaged_cifar_says_so_and_runs_nothing(small_cifar: Path, tmp_path: Path) -> None:
    path = small_cifar / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3.bin has 30729999 bytes, expected 30730000: truncated"):
        cifar10(small_cifar)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"data_batch_3.bin is damaged: SHA-1"):
        cifar10(small_cifar)
    with pytest.raises(FileNotFoundError, match="CIFAR-10 in its binary version, or data_batch_1 of its python version"):
        cifar10(tmp_path / "nowhere")

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/owned",)

    evil = tmp_path / "data_batch_1"
    evil.write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(ValueError, match=r"the pickle asks for (posix|nt|os).system, which no batch of CIFAR-10 does"):
        formats.cifar_python(evil)
    assert not (tmp_path / "owned").exists()


def test_volumes(tmp_path: Path) -> None:
    x, y = np.zeros((4, 3, 3, 3), bool), np.array([0, 1, 2, 1])
    path = tmp_path / "shapes.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], classes=np.array(["a", "b", "c"]))
    found = load("volumes", path)
    assert found.train.images.shape == (4, 1, 3, 3, 3)
    assert found.classes == ("a", "b", "c")
    np.savez(path, train_images=x, train_labels=y[:, None], test_images=x[:2], test_labels=y[:2, None])
    assert volumes(path).classes == ("0", "1", "2")
    np.savez(path, x_train=x)
    with pytest.raises(ValueError, match=r"expected the arrays x_train, y_train, x_test, y_test, found x_train"):
        volumes(path)
    np.savez(path, x_train=x[0], y_train=y, x_test=x, y_test=y)
    with pytest.raises(ValueError, match=r"expected volumes \(N, D, H, W\), got x_train of shape \(3, 3, 3\)"):
        volumes(path)
    with pytest.raises(FileNotFoundError, match=r"an .npz file of volumes"):
        volumes(tmp_path / "none.npz")


def test_labels_out_of_range_and_other_mistakes() -> None:
    images, labels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"mine, test: labels go from 0 to 2, expected 0 to 1"):
        Dataset("mine", Split(images[:2], labels[:2]), Split(images, labels), ("a", "b"))
    with pytest.raises(ValueError, match="mine, train: 3 images but 2 labels"):
        Dataset("mine", Split(images, labels[:2]), Split(images, labels), ("a", "b", "c"))
    whole = Dataset("mine", Split(images, labels), Split(images, labels), ("a", "b", "c"))
    assert len(whole.hold_out(1).train) == 2
    assert whole.hold_out(1).test.labels.tolist() == [2]
    with pytest.raises(ValueError, match="cannot hold out 3 of 3"):
        whole.hold_out(3)
    with pytest.raises(ValueError, match="data must be one of digits, mnist"):
        load("imagenet")
    with pytest.raises(ValueError, match="cifar10: name the folder that holds its files"):
        load("cifar10")


@pytest.fixture
def server(small_mnist: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine that has MNIST, gzipped."""
    for path in list(small_mnist.iterdir()):
        if path.suffix != ".gz":
            (small_mnist / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(small_mnist))

        def log_message(self, *_: Any) -> None:
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}/", small_mnist
    found.shutdown()
    found.server_close()
    thread.join()


def test_download(server: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    url, source = server
    monkeypatch.setitem(data.SOURCES, "mnist", (url, {f"{n}.gz": f"md5-unpacked:{m}" for n, m in formats.MNIST_MD5.items()}))
    folder = tmp_path_factory.mktemp("downloads")
    download("mnist", folder, url)
    assert len(mnist(folder).train) == 60
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    download("rotated_mnist", folder)  # the sound ones stay, the damaged one is fetched again
    assert len(mnist(folder).train) == 60
    assert (folder / "train-labels-idx1-ubyte.gz.before").read_bytes() == b"damaged"  # it may have been one of the user's
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"damaged again")
    with pytest.raises(ValueError, match=r"ubyte.gz.before is there already; move one of them away"):
        download("mnist", folder)
    assert (folder / "train-labels-idx1-ubyte.gz").read_bytes() == b"damaged again"
    (folder / "cifar-10-binary.tar.gz").write_bytes(b"of another kind")
    with pytest.raises(OSError, match=r"cifar-10-binary.tar.gz could not be fetched"):
        download("cifar10", folder, url)
    assert (folder / "cifar-10-binary.tar.gz.before").read_bytes() == b"of another kind"
    (source / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"wrong"))
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="does not have the known md5"):
        download("mnist", folder, url)
    with pytest.raises(ValueError, match="download: expected one of mnist, cifar10, got 'svhn'"):
        download("svhn", folder)


def test_whitened_cifar_has_the_identity_as_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixed = torch.rand(500, 48) @ torch.randn(48, 48)
    images = ((mixed - mixed.min()) / (mixed.max() - mixed.min()) * 255).to(torch.uint8).view(500, 3, 4, 4)
    split = Split(images, torch.arange(500) % 10)
    monkeypatch.setattr(data, "cifar10", lambda root: Dataset("cifar10", split, split[:7], data.CIFAR_CLASSES))
    found = data.whitened_cifar10("anywhere")
    rows = found.train.images.flatten(1).double()
    values = torch.linalg.eigvalsh(rows.T @ rows / 500)
    contrast = images.flatten(1).double()
    contrast = contrast - contrast.mean(1, keepdim=True)
    contrast = contrast / contrast.square().mean(1, keepdim=True).sqrt()
    before = torch.linalg.eigvalsh((contrast - contrast.mean(0)).T @ (contrast - contrast.mean(0)) / 500)
    torch.testing.assert_close(values, before / (before + 0.1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.test.images, found.train.images[:7])
    assert found.name == "cifar10, whitened"


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (torch.rand(4, 1, 8, 8), torch.zeros(4).long(), r"bytes, got torch.float32 from 0 to 1; use \(255 \* x\)"),
        (torch.zeros(4, 8, 8, 3, dtype=torch.uint8), torch.zeros(4).long(), r"movedim\(-1, 1\)"),
        (torch.zeros(4, 8, 8, 6, dtype=torch.uint8), torch.zeros(4).long(), r"got \(4, 8, 8, 6\); use x.movedim\(-1, 1\)"),
        (torch.zeros(4, 8, 8, 13, dtype=torch.uint8), torch.zeros(4).long(), r"got \(4, 8, 8, 13\); use x.movedim\(-1, 1\)"),
        (
            torch.full((4, 1, 8, 8), 4080).to(torch.uint16),
            torch.zeros(4).long(),
            r"bytes, got torch.uint16 from 4080 to 4080; scale",
        ),
        (
            torch.full((4, 1, 8, 8), -3, dtype=torch.int32),
            torch.zeros(4).long(),
            "bytes, got torch.int32 from -3 to -3; scale all",
        ),
        (torch.linspace(-1, 1, 256).view(4, 1, 8, 8), torch.zeros(4).long(), "float32 from -1 to 1; .* a loop of your own"),
        (
            torch.linspace(0, 300, 256).view(4, 1, 8, 8),
            torch.zeros(4).long(),
            "float32 from 0 to 300; scale all alike to 0 to 255",
        ),
        (torch.zeros(4, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), r"x\[:, None\]"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4), "labels as whole numbers"),
    ],
)
def test_images_of_ones_own_that_would_be_misread(images: Tensor, labels: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        data.Dataset("mine", data.Split(images, labels), data.Split(images, labels), ("a", "b"))


@pytest.mark.parametrize(
    "images",
    [
        torch.arange(256, dtype=torch.int32).view(4, 1, 8, 8),
        torch.arange(256).to(torch.uint16).view(4, 1, 8, 8),
        torch.arange(256.0).view(4, 1, 8, 8),
        torch.zeros(4, 13, 8, 8, dtype=torch.uint8),
        torch.zeros(4, 3, 3, 5, dtype=torch.uint8),
        torch.zeros(4, 8, 8, 9, 9, dtype=torch.uint8),  # volumes of eight channels
        torch.linspace(-1000, 3000, 4 * 5**3).view(4, 1, 5, 5, 5),  # as they are: predicted from Python alone
    ],
)
def test_images_of_ones_own_that_are_taken(images: Tensor) -> None:
    part = Split(images, torch.zeros(4).long())
    assert Dataset("mine", part, part, ("a",)).train.images is images
    odd = Split(torch.full_like(images[:1, :1], 200).to(torch.int16) * 2, part.labels[:1])
    if images.ndim == 4:
        with pytest.raises(ValueError, match=r"mine, test: expected images as bytes, got torch.int16 from 400 to 400"):
            Dataset("mine", part, odd, ("a",))


def test_pictures_of_ones_own(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 256, (4, 7, 5), dtype=np.uint8)
    with pytest.raises(FileNotFoundError, match="train/CLASS"):
        data.pictures(tmp_path)
    for i, place in enumerate(("train/a", "train/b", "test/a", "test/b")):
        (tmp_path / place).mkdir(parents=True)
        if i < 2:
            Image.fromarray(numbers[i]).save(tmp_path / place / f"{i}.png")
    with pytest.raises(ValueError, match="no pictures"):
        data.pictures(tmp_path)
    for i, place in enumerate(("test/a", "test/b"), 2):
        Image.fromarray(numbers[i]).save(tmp_path / place / f"{i}.TIF")
    (tmp_path / "train" / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "train" / "a" / "Thumbs.db").write_text("no picture")
    (tmp_path / "test" / "astray.png").write_text("of no class")
    with pytest.warns(UserWarning, match=r"2 files were passed over \(.png, .txt\), .*notes.txt for example"):
        found = data.load("pictures", tmp_path)
    (tmp_path / "train" / "a" / "notes.txt").unlink()
    (tmp_path / "test" / "astray.png").unlink()
    assert found.classes == ("a", "b")
    torch.testing.assert_close(found.train.images, torch.from_numpy(numbers[:2, None]))
    torch.testing.assert_close(found.test.images, torch.from_numpy(numbers[2:, None]))
    assert found.test.labels.tolist() == [0, 1]
    colour = np.stack([numbers[0]] * 3, 2)
    Image.fromarray(colour).save(tmp_path / "train" / "b" / "2.png")
    with pytest.warns(UserWarning, match=r"4 of 5 are gray \(a 2, b 2\) and become RGB"):
        assert data.pictures(tmp_path).train.images.shape == (3, 3, 7, 5)
    for image, words in (
        (Image.new("L", (6, 7)), r"2.png has 6 x 7 pixels, .*1.png has 5 x 7"),
        (Image.fromarray(numbers[0].astype(np.uint16)), "would be black; scale all pictures alike"),
    ):
        image.save(tmp_path / "train" / "b" / "2.png")
        with pytest.raises(ValueError, match=words):
            data.pictures(tmp_path)
    (tmp_path / "train" / "b" / "2.png").write_bytes(b"no picture")
    with pytest.raises(OSError, match=r"2\.png could not be read"):
        data.pictures(tmp_path)
    (tmp_path / "train" / "b" / "2.png").unlink()
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(ValueError, match=r"classes that .* has not: c"):
        data.pictures(tmp_path)


def drawn_pictures(root: Path, count: int = 6, classes: tuple[str, ...] = ("healthy", "tumour"), size: int = 9) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


def test_held_out_pictures_are_of_every_class(tmp_path: Path) -> None:
    found = data.pictures(drawn_pictures(tmp_path)).hold_out(6)
    assert found.test.labels.tolist() == [0, 1] * 3
    assert found.train.labels.bincount().tolist() == [3, 3]


def test_folders_that_are_no_classes(tmp_path: Path) -> None:
    root = drawn_pictures(tmp_path / "all")
    (root / "train" / ".ipynb_checkpoints").mkdir()
    (root / "train" / "healthy" / "._1.png").write_bytes(b"not a picture")
    (root / "train" / "healthy" / "empty").mkdir()
    assert data.pictures(root).classes == ("healthy", "tumour")
    (root / "train" / "healthy" / "empty" / "1.webp").write_bytes(b"a picture")
    with pytest.raises(ValueError, match=r"healthy/empty holds pictures; put them into the folder of the class itself"):
        data.pictures(root)
    (root / "train" / "healthy" / "empty" / "1.webp").rename(root / "train" / "healthy" / "6.webp")
    with pytest.raises(OSError, match=r"6\.webp could not be read"):
        data.pictures(root)
    (root / "train" / "healthy" / "6.webp").unlink()
    (root / "train" / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no pictures, .*expected some of every class"):
        data.pictures(root)
    with pytest.raises(ValueError, match="has 1 folder of classes, expected two or more"):
        data.pictures(drawn_pictures(tmp_path / "one", classes=("healthy",)))


def test_transparent_and_paged_pictures_are_read_alike_everywhere(tmp_path: Path) -> None:
    from PIL import Image

    root = drawn_pictures(tmp_path)
    strokes = np.zeros((9, 9, 4), np.uint8)
    strokes[4, 2:7, 3] = 255  # black on nothing
    Image.fromarray(strokes).save(root / "train" / "tumour" / "0.png")
    assert data.pictures(root).train.images[1, :, 0, 0].tolist() == [255] * 3
    assert data.read_picture(root / "train" / "tumour" / "0.png")[0, 0].tolist() == [255] * 3
    page = Image.new("RGB", (9, 9))
    page.save(root / "train" / "tumour" / "0.tif", save_all=True, append_images=[page])
    with pytest.raises(ValueError, match=r"0.tif holds 2 images"):
        data.pictures(root)


def test_pictures_are_as_viewers_show_them(tmp_path: Path) -> None:
    from PIL import Image

    shown = np.zeros((6, 9, 3), np.uint8)
    shown[0, 0] = 255
    tag = Image.Exif()
    tag[0x0112] = 6  # to be turned clockwise, as a camera held upright writes it
    Image.fromarray(np.rot90(shown).copy()).save(tmp_path / "held.png", exif=tag)
    assert np.array_equal(data.read_picture(tmp_path / "held.png"), shown)
    gray = np.ascontiguousarray(shown[..., 0])
    Image.fromarray(np.rot90(gray).copy()).save(tmp_path / "held.tif", tiffinfo={274: 6})
    assert np.array_equal(data.read_picture(tmp_path / "held.tif"), gray)
    for damaged in (b"Exif\0\0garbagegarbage", b"Exif\0\0II*\0"):
        Image.fromarray(gray).save(tmp_path / "odd.png", exif=damaged)
        assert np.array_equal(data.read_picture(tmp_path / "odd.png"), gray)


def test_pictures_of_many_bits(tmp_path: Path) -> None:
    from PIL import Image

    numbers = np.arange(81, dtype=np.float32).reshape(9, 9)
    for values, words in (
        (numbers / 27, "expected bytes"),
        (numbers * 800, "from 0 to 64000, expected bytes, or 16 bits a pixel"),
        (numbers / 40 - 1, "from -1 to 1, expected bytes"),
        (np.where(numbers == 3, np.nan, numbers), "not finite"),
    ):
        Image.fromarray(values.astype(np.float32)).save(tmp_path / "f.tif")
        with pytest.raises(ValueError, match=words):
            data.read_picture(tmp_path / "f.tif")
    Image.fromarray(numbers).save(tmp_path / "f.tif")
    assert data.read_picture(tmp_path / "f.tif").tolist() == numbers.tolist()
    image = Image.new("RGB", (9, 9), "red")
    image.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[image])
    assert data.read_picture(tmp_path / "phone.jpg").shape == (9, 9, 3)


def deep_png(kind: int, channels: int) -> bytes:
    """A PNG of 9 x 9 pixels with 16 bits a channel; pillow writes none."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + bytes(range(18 * channels)) for _ in range(9))
    head = struct.pack(">IIBBBBB", 9, 9, 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep_tiff(planes: int = 1) -> bytes:
    """The same in colour as a TIFF; with `planes` 2 each channel lies apart."""
    at = 8 + 2 + 12 * 10 + 4  # behind the table: the bits of each channel, where they are, how long, then the pixels
    size, strips = 9 * 9 * 6, 1 if planes == 1 else 3
    where, each = (at + 30, size) if planes == 1 else (at + 6, at + 18)
    tags = [(256, 3, 1, 9), (257, 3, 1, 9), (258, 3, 3, at), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, strips, where)]
    tags += [(277, 3, 1, 3), (278, 3, 1, 9), (279, 4, strips, each), (284, 3, 1, planes)]
    table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    parts = struct.pack("<6I", *(at + 30 + k * size // 3 for k in range(3)), *(size // 3,) * 3)
    return b"II*\0" + struct.pack("<I", 8) + table + struct.pack("<3H", 16, 16, 16) + parts + bytes(size)


def test_colours_of_16_bits_are_not_cut_to_8(tmp_path: Path) -> None:
    files = {"rgb.png": deep_png(2, 3), "rgba.png": deep_png(6, 4), "la.png": deep_png(4, 2), "rgb.tif": deep_tiff()}
    files["apart.tif"] = deep_tiff(2)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{name} has 16 bits a channel, of which 8 would be lost; save it with 8, and scale"
        ):
            data.read_picture(tmp_path / name)
    head = (
        b"BM"
        + struct.pack("<IHHI", 54 + 12 + 9 * 20, 0, 0, 66)
        + struct.pack("<IiiHHIIiiII", 40, 9, 9, 1, 16, 3, 180, 0, 0, 0, 0)
    )
    (tmp_path / "565.bmp").write_bytes(
        head + struct.pack("<III", 0xF800, 0x07E0, 0x001F) + bytes([0, 0xF8] * 90)
    )  # 16 bits a pixel
    assert np.array_equal(data.read_picture(tmp_path / "565.bmp"), np.full((9, 9, 3), (255, 0, 0)))


def test_what_gray_of_16_bits_loses_is_told(tmp_path: Path) -> None:
    from PIL import Image

    root = drawn_pictures(tmp_path)
    files = sorted(root.glob("*/*/*.png"))
    values = np.random.default_rng(0).integers(257, 8000, size=(len(files), 9, 9), dtype=np.uint16)

    def write(values: Any) -> None:
        for path, each in zip(files, values, strict=True):
            Image.fromarray(each).save(path)

    write(values)
    with pytest.raises(ValueError, match=r"\d+ of \d+ pictures have 16 bits, of which they use 79\d\d of 65535; scale all"):
        data.pictures(root)
    values[:, 0, 0] = 0
    for others in (np.zeros((9, 9), np.uint8), np.zeros((9, 9), np.uint16)):  # black ones say nothing
        write(values)
        Image.fromarray(others).save(files[-1])
        with pytest.raises(ValueError, match="scale all pictures alike"):
            data.pictures(root)
    values[[0, -1], 0, 0] = 60_000  # now the others are dim ones of the same scale, of the test and of the training
    write(values)
    with pytest.warns(
        UserWarning, match=rf"pictures: {len(files)} of {len(files)} are gray of 16 bits, .* stretched alike"
    ) as told:
        assert data.pictures(root).test.images.max() == 60_000 // 257
    assert len(told) == 1
    with pytest.warns(UserWarning, match="pictures are gray of 16 bits"):
        assert np.array_equal(data.read_picture(files[1]), values[1] // 257)
    write(np.random.default_rng(0).integers(256, size=values.shape).astype(np.uint16) * 257)  # bytes in 16 bits: nothing is lost
    data.pictures(root)
    Image.fromarray(np.full((9, 9), 256, np.uint16)).save(files[0])
    with pytest.raises(ValueError, match=r"uses 256 of 65535, and would be black; scale all"):
        data.read_picture(files[0])


def tiff(pixels: np.ndarray[Any, Any], kind: int, extra: tuple[int, ...] | None = None) -> bytes:
    """Bytes or floats (rows, columns, bands) as a TIFF of a kind (1 gray, 2 RGB), with the meanings of its other bands."""
    rows, columns, bands = pixels.shape
    bits, meaning = 8 * pixels.itemsize, 3 if pixels.dtype.kind == "f" else 1
    tags: list[tuple[int, str, tuple[int, ...]]] = [(256, "I", (columns,)), (257, "I", (rows,)), (258, "H", (bits,) * bands)]
    tags += [(259, "H", (1,)), (262, "H", (kind,)), (273, "I", (8,)), (277, "H", (bands,)), (278, "I", (rows,))]
    tags += [(279, "I", (pixels.nbytes,)), *([] if extra is None else [(338, "H", extra)]), (339, "H", (meaning,) * bands)]
    start = 8 + pixels.nbytes
    table, behind = struct.pack("<H", len(tags)), b""
    for tag, code, values in tags:
        packed = struct.pack(f"<{len(values)}{code}", *values)
        if len(packed) > 4:
            packed, behind = struct.pack("<I", start + 2 + 12 * len(tags) + 4 + len(behind)), behind + packed
        table += struct.pack("<HHI", tag, {"H": 3, "I": 4}[code], len(values)) + packed.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", start) + pixels.tobytes() + table + bytes(4) + behind


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")  # of damaged files
def test_bands_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "tile.tif"
    pixels = np.random.default_rng(0).integers(256, size=(9, 9, 13), dtype=np.uint8)
    pixels[..., 3] = 255
    for bands, kind, meant in ((1, 1, None), (3, 2, None), (4, 2, (2,)), (4, 2, None)):  # which are gray, RGB, with transparency
        path.write_bytes(tiff(pixels[..., :bands], kind, meant))
        assert np.array_equal(data.read_picture(path), pixels[..., 0] if bands == 1 else pixels[..., :3])
    cases: list[tuple[int, int, tuple[int, ...], int]] = [
        (4, 2, (0,), 1),
        (5, 2, (0, 0), 2),
        (5, 2, (2, 0), 1),
        (2, 1, (0,), 1),
        (4, 1, (0, 0, 0), 3),
        (13, 1, (0,) * 12, 12),
    ]
    for bands, kind, extra, lost in cases:
        path.write_bytes(tiff(pixels[..., :bands], kind, extra))
        words = (
            rf"tile.tif has {bands} bands, of which {lost} would be lost: .*; build a Dataset of all bands in Python \(docs/howto"
        )
        with pytest.raises(ValueError, match=words):
            data.read_picture(path)
    whole = tiff(pixels[..., :3], 2)
    for damaged in (whole[:-20], whole[:9], whole[:4]):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match=r"tile.tif could not be read"):
            data.read_picture(path)
    path.write_bytes(whole.replace(struct.pack("<HHI", 277, 3, 1), struct.pack("<HHI", 277, 3, 2)))  # two numbers of bands
    assert np.array_equal(data.read_picture(path), pixels[..., :3])


@pytest.mark.parametrize(("dtype", "bands"), [("f4", 3), ("f8", 3), ("f8", 1), ("f2", 1)])
def test_floats_in_colour_are_told(dtype: str, bands: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((9, 9, bands)).astype(dtype)
    (tmp_path / "f.tif").write_bytes(tiff(pixels, 2 if bands == 3 else 1))
    with pytest.raises(ValueError, match=r"f.tif has floating point numbers, expected bytes; .* save it times 255"):
        data.read_picture(tmp_path / "f.tif")


def test_a_fourth_band_that_is_no_transparency_is_told(tmp_path: Path) -> None:
    from PIL import Image

    root = drawn_pictures(tmp_path)
    soft = np.full((9, 9, 4), 255, np.uint8)
    soft[2:6, 2:7, 3] = 128  # 20 of 81 pixels
    soft[7:, :, 3] = 0
    Image.fromarray(soft).save(root / "train" / "tumour" / "0.png")
    data.pictures(root)  # warnings are errors here
    near_infrared = np.random.default_rng(0).integers(256, size=(9, 9, 4), dtype=np.uint8)
    for i in range(3):
        Image.fromarray(near_infrared).save(root / "train" / "tumour" / f"{i}.png")
    words = r"the fourth band .* was taken as transparency; .*build a Dataset of all bands in Python \(docs/howto.md"
    with pytest.warns(UserWarning, match=rf"pictures: 3 of 24 are half transparent .*{words}") as told:
        data.pictures(root)
    assert len(told) == 1
    with pytest.warns(UserWarning, match=words):
        data.read_picture(root / "train" / "tumour" / "0.png")
    heading = "More than three bands"
    assert heading in formats.WAY_OUT
    assert heading in (Path(__file__).parent.parent / "docs/howto.md").read_text()


def test_jpeg_2000_is_read_from_folders_too(tmp_path: Path) -> None:
    from PIL import Image, features

    if not features.check("jpg_2000"):
        pytest.skip("this pillow reads no JPEG 2000")
    root = drawn_pictures(tmp_path)
    path = root / "train" / "tumour" / "0.png"
    image = Image.open(path)
    image.save(path.with_suffix(".jp2"))  # without loss
    path.unlink()
    assert np.array_equal(data.pictures(root).train.images[1].permute(1, 2, 0).numpy(), np.array(image))
    content = bytearray(path.with_suffix(".jp2").read_bytes())
    for channel in range(3):
        content[content.find(b"\xff\x4f\xff\x51") + 42 + 3 * channel] = 15
    path.with_suffix(".jp2").write_bytes(content)
    with pytest.raises(ValueError, match=r"0.jp2 has 16 bits a channel"):
        data.pictures(root)


def test_folders_that_may_not_be_read_are_no_empty_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = drawn_pictures(tmp_path)
    real = os.listdir, os.scandir

    def refused(which: int) -> Any:
        def look(path: Any = ".") -> Any:
            if Path(path) == root / "train" / "tumour":
                raise PermissionError(13, "Permission denied", str(path))
            return real[which](path)

        return look

    monkeypatch.setattr(os, "listdir", refused(0))
    monkeypatch.setattr(os, "scandir", refused(1))
    with pytest.raises(PermissionError, match=r"train/tumour cannot be read: permission denied"):
        data.pictures(root)


def test_a_slide_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    Image.new("L", (64, 64)).save(tmp_path / "slide.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"slide.png is too large for one picture; cut it into tiles"):
        data.read_picture(tmp_path / "slide.png")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (np.random.default_rng(0).random((3, 3, 3, 3)), r"expected volumes as bytes, got x_train of float64 from 0"),
        (np.full((3, 3, 3, 3), 300, np.int16), "int16 from 300 to 300"),
        (np.full((3, 3, 3, 3), -1000, np.int16), "int16 from -1000 to -1000"),
        (np.zeros((0, 3, 3, 3), np.uint8), "x_train is empty"),
    ],
)
def test_volumes_that_would_be_misread(numbers: Any, words: str, tmp_path: Path) -> None:
    good = np.ones((3, 3, 3, 3), np.float32)
    labels = np.arange(3)
    np.savez(tmp_path / "v.npz", x_train=good, y_train=labels, x_test=good, y_test=labels)
    assert volumes(tmp_path / "v.npz").train.images.unique().tolist() == [1]  # full or empty, whatever the dtype
    np.savez(tmp_path / "v.npz", x_train=numbers, y_train=labels[: len(numbers)], x_test=good, y_test=labels)
    with pytest.raises(ValueError, match=words):
        volumes(tmp_path / "v.npz")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            np.array([0.0, 0.27, 1.0]),
            r"v.npz: y_train holds 0.27 \(float64\); expected whole numbers from 0, one for each volume",
        ),
        (np.array([0.0, np.nan, 1.0]), "y_train holds nan"),
        (np.array(["cat", "dog", "cat"]), r"v.npz: y_train holds cat \(<U3\); expected whole numbers from 0"),
        (np.array(["cat", 1, None], object), r"v.npz: y_train holds Python objects; write whole numbers"),
        (np.array([0, -1, 1]), "y_train holds -1"),
        (np.array([0, 10, 20]), r"labels go from 0 to 20, but 17 of the numbers .*never used; number the classes 0, 1, 2"),
        (np.eye(3, dtype=int), "3 volumes in x_train, but 9 labels"),
    ],
)
def test_labels_of_volumes_that_would_be_misread(labels: Any, words: str, tmp_path: Path) -> None:
    path, x = tmp_path / "v.npz", np.zeros((3, 3, 3, 3), np.uint8)
    for right in (np.array([0.0, 1.0, 2.0]), np.array([[0], [1], [2]], np.uint8), np.array([False, True, False])):
        np.savez(path, x_train=x, y_train=right, x_test=x, y_test=right)  # as MedMNIST has them, and others
        assert volumes(path).train.labels.tolist() == right.reshape(-1).tolist()
    np.savez(path, x_train=x, y_train=labels, x_test=x, y_test=np.arange(3) // 2)
    with pytest.raises(ValueError, match=words):
        volumes(path)
    np.savez(path, x_train=x, y_train=np.arange(3), x_test=x, y_test=np.arange(3), classes=np.array(["a", "b"]))
    with pytest.raises(ValueError, match=r"y_train holds 2 \(int64\); expected whole numbers from 0, fewer than 2"):
        volumes(path)
    np.savez(path, x_train=x, y_train=np.array([0, 2, 2]), x_test=x, y_test=np.zeros(3), classes=np.array(["a", "b", "c"]))
    assert volumes(path).classes == ("a", "b", "c")  # a class that is named may have no volumes yet


def test_files_of_volumes_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "v.npz"
    np.savez(path, x_train=np.zeros((3, 3, 3, 3), np.uint8))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"v.npz could not be read as an .npz file, it may be cut off"):
        volumes(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"v.npz could not be read as an .npz file"):
        volumes(path)
    zeros = np.zeros((3, 3, 3, 3), np.uint8)
    np.savez(path, x_train=zeros, y_train=np.arange(3), x_test=zeros, y_test=np.arange(3))
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"v.npz is damaged: .*fetch it again"):
        volumes(path)
    np.save(tmp_path / "v.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"v.npy holds one array, expected an .npz file"):
        volumes(tmp_path / "v.npy")


def test_images_with_holes_are_named() -> None:
    x, y = 255 * torch.rand(4, 1, 9, 9), torch.zeros(4, dtype=torch.int64)
    x[2, 0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="mine, test: image 2 holds NaN or infinite numbers; mend it, or leave it out"):
        Dataset("mine", Split(255 * torch.rand(4, 1, 9, 9), y), Split(x, y), ("a",))


def test_arrays_are_no_tensors() -> None:
    part = Split(np.zeros((2, 1, 9, 9), np.uint8), torch.zeros(2, dtype=torch.int64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mine, train: expected images as a tensor, got ndarray; use torch.as_tensor"):
        Dataset("mine", part, part, ("a",))


def test_files_are_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is no file that can be replaced"):
        write_file(tmp_path / "pipe", b"new")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "file.part").write_bytes(b"of somebody else")
    (tmp_path / "file").chmod(0o600)
    write_file(tmp_path / "file", b"newer")
    assert (tmp_path / "file.part").read_bytes() == b"of somebody else"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.part", "link", "pipe"]


def test_volumes_for_validation_come_last(tmp_path: Path) -> None:
    x, y, path = np.arange(5 * 27, dtype=np.uint8).reshape(5, 3, 3, 3), np.array([0, 1, 1, 0, 1]), tmp_path / "medical.npz"
    parts = {"train": slice(0, 2), "val": slice(2, 4), "test": slice(4, 5)}
    arrays: Any = {f"{name}_{what}": a[part] for name, part in parts.items() for what, a in (("images", x), ("labels", y))}
    np.savez(path, **arrays)
    found = load("volumes", path)
    assert found.for_validation == 2
    assert torch.equal(found.train.images[:, 0], torch.from_numpy(x[:4]))
    assert torch.equal(found.hold_out(2).test.labels, torch.from_numpy(y[2:4]))
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, x_val=x[:, :2], y_val=y)
    with pytest.raises(
        ValueError, match=r"expected volumes of one size, got \(3, 3, 3\) for training and \(2, 3, 3\) for validation"
    ):
        load("volumes", path)
    for odd in ({"x_val": x}, {"val_images": x, "val_labels": y}):
        np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, **odd)
        with pytest.raises(
            ValueError, match=r"expected x_val and y_val for validation, found (x_val|val_images, val_labels); name"
        ):
            load("volumes", path)


def test_many_may_write_one_file_at_once(tmp_path: Path) -> None:
    """What is read is always one of the contents, whole, and nobody's writing fails."""
    path, contents = tmp_path / "file", [bytes([i]) * 200_000 for i in range(4)]
    write_file(path, contents[0])
    failed: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(20):
                write_file(path, content)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert not failed
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", b"new")
    assert not list(tmp_path.iterdir())


def test_damaged_pickles_of_cifar_are_named(tmp_path: Path) -> None:
    good = pickle.dumps({b"data": np.zeros((10_000, 3072), np.uint8), b"labels": [0] * 10_000}, 2)
    random = np.random.default_rng(0)
    for _ in range(200):
        bad = bytearray(good[:60] + good[-60:] if random.random() < 0.5 else good[:200])
        bad[random.integers(len(bad))] = random.integers(256)
        path = tmp_path / "data_batch_1"
        path.write_bytes(bytes(bad))
        with pytest.raises(ValueError, match=r"data_batch_1 (is not a batch of CIFAR-10|is damaged)"):
            formats.cifar_python(path)
