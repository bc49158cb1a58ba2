"""Data sets, read from their own file formats in a folder that the user names, checked, as plain tensors of bytes.

Rotated MNIST (paper, section 8.1) is rebuilt from MNIST by integer arithmetic alone, so that every machine gets the same
bytes. `digits()` is a part of it that comes with the package and needs no download. `gcnn.formats` reads single files.
"""

from __future__ import annotations

import hashlib
import lzma
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gcnn.files import write_file
from gcnn.formats import (
    MNIST_MD5,
    SCALE,
    Bytes,
    amat,
    cifar_binary,
    cifar_folder,
    cifar_python,
    decoded,
    idx,
    need,
    read_picture,
    remedy,
    resized,
    unpacked_md5,
)

__all__ = [
    "DATASETS",
    "Dataset",
    "Split",
    "cifar10",
    "digits",
    "download",
    "load",
    "mnist",
    "pictures",
    "read_picture",
    "resized",
    "rotated_mnist",
    "volumes",
    "whitened_cifar10",
]


@dataclass(frozen=True)
class Split:
    """Images (N, C, *X), as bytes unless they were whitened, and their labels (N,); by number an image and its label.

    >>> images, labels = next(iter(torch.utils.data.DataLoader(digits().train, 16)))
    >>> images.shape, labels.shape
    (torch.Size([16, 1, 28, 28]), torch.Size([16]))
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Split: ...

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor] | Split:
        images, labels = self.images[index], self.labels[index]
        return Split(images, labels) if labels.ndim else (images, labels)


@dataclass(frozen=True)
class Dataset:
    """A data set: its parts and the names of its classes."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    for_validation: int = 0
    """How many of the last training images come from a part of their own for validation."""

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            for what, numbers in (("images", split.images), ("labels", split.labels)):
                if not isinstance(numbers, Tensor):
                    kind = type(numbers).__name__
                    raise TypeError(f"{self.name}, {part}: expected {what} as a tensor, got {kind}; use torch.as_tensor")
            shape, dtype = tuple(split.images.shape), split.images.dtype
            # the channels, if they are few, or behind a square; volumes may have any sides
            last = len(shape) > 3 and shape[1] > 4 and (shape[-1] <= 4 or (len(shape) == 4 and shape[1] == shape[2] != shape[3]))
            if len(shape) not in (4, 5) or last:
                way = "x.movedim(-1, 1)" if last else "x[:, None] for gray images"
                raise ValueError(
                    f"{self.name}, {part}: expected images (N, channels, rows, columns), or volumes with one axis more, got "
                    f"{shape}; use {way}"
                )
            if split.images.is_floating_point() and not split.images.isfinite().all():
                which = int((~split.images.flatten(1).isfinite().all(1)).nonzero()[0])
                raise ValueError(f"{self.name}, {part}: image {which} holds NaN or infinite numbers; mend it, or leave it out")
            of_bytes = not split.images.numel() or split.images.dtype in (torch.uint8, torch.bool)
            low, high = (0.0, 255.0) if of_bytes else extent(split.images)
            if split.images.is_floating_point() and len(split) and low >= 0 and high <= 1:
                raise ValueError(
                    f"{self.name}, {part}: expected images as bytes, got {dtype} from 0 to 1; use (255 * x).to(torch.uint8), so "
                    "that predictions of image files see what the network learned from"
                )
            # floats of a test part are compared with the training's by `train`; whitened images are no files' to predict
            negative = low < 0 and (part == "train" or not split.images.is_floating_point())
            if len(shape) == 4 and (negative or high > 255) and "whitened" not in self.name:
                raise ValueError(
                    f"{self.name}, {part}: expected images as bytes, got {dtype} from {low:g} to {high:g}; scale all alike to "
                    "0 to 255, .to(torch.uint8), so that predictions and exported files see what the network learned from, or "
                    "train in a loop of your own"
                )
            if split.labels.is_floating_point() or split.labels.ndim != 1:
                shape, dtype = tuple(split.labels.shape), split.labels.dtype
                raise ValueError(f"{self.name}, {part}: expected labels as whole numbers (N,), got {dtype} {shape}")
            if len(split.images) != len(split.labels):
                raise ValueError(f"{self.name}, {part}: {len(split.images)} images but {len(split.labels)} labels")
            least, most = (int(split.labels.min()), int(split.labels.max())) if len(split) else (0, 0)
            if least < 0 or most >= len(self.classes):
                raise ValueError(f"{self.name}, {part}: labels go from {least} to {most}, expected 0 to {len(self.classes) - 1}")

    def hold_out(self, count: int) -> Dataset:
        """The same with the last `count` training images as test part: for choosing settings without the test set."""
        if not 0 < count < len(self.train):
            raise ValueError(f"{self.name}: cannot hold out {count} of {len(self.train)} training images")
        return Dataset(f"{self.name}, validation", self.train[:-count], self.train[-count:], self.classes)


def extent(images: Tensor) -> tuple[float, float]:
    """The least and the largest number; torch has neither for unsigned numbers of more than 8 bits."""
    x = images.to(torch.int64) if images.dtype in (torch.uint16, torch.uint32, torch.uint64) else images
    return float(x.min()), float(x.max())


DIGITS = tuple("0123456789")
DIGITS_SHA256 = "460e042a558c74de6632c3cf76527d9f4920b538fc7b59e6eb476d1b5ea9c367"
ROTATED_SHA256 = "dea5dff6b989a1f534d91fef76b172a6ba9f1b26b1ef41899c33e3f3e53c9351"

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def digits() -> Dataset:
    """The rotated digits that come with the package: 12,000 for training, 10,000 for testing, 28 x 28.

    They are the training set and the first 10,000 test digits of `rotated_mnist`.

    >>> digits().train.images.shape
    torch.Size([12000, 1, 28, 28])
    """
    packed = files("gcnn").joinpath("assets/rotated_digits.xz").read_bytes()
    content = lzma.decompress(packed)
    if hashlib.sha256(content).hexdigest() != DIGITS_SHA256:
        raise ValueError("gcnn/assets/rotated_digits.xz is damaged: install the package again")
    labels, images = np.frombuffer(content[:22_000], np.uint8), np.frombuffer(content[22_000:], np.uint8)
    whole = _split(images.reshape(22_000, 1, 28, 28), labels)
    return Dataset("digits", whole[:12_000], whole[12_000:], DIGITS)


def mnist(root: str | Path) -> Dataset:
    """MNIST from the four idx files in `root`, gzipped or not."""
    parts = []
    for name in ("train", "t10k"):
        images = idx(Path(root), f"{name}-images-idx3-ubyte")
        labels = idx(Path(root), f"{name}-labels-idx1-ubyte")
        parts.append(_split(images[:, None], labels))
    return Dataset("mnist", parts[0], parts[1], DIGITS)


def rotated_mnist(root: str | Path) -> Dataset:
    """Rotated MNIST, 12,000 and 50,000 digits: from the original .amat files in `root`, else regenerated from MNIST there.

    Regenerated: one fixed permutation of the 70,000 digits of MNIST, the first 62,000 of them, each turned by an angle of its
    own, uniform in [0, 2 pi), with bilinear interpolation. All in integers: the bytes are the same on every machine, and
    checked. The result is kept in `root` as rotated_mnist.xz, if that can be written.
    """
    root = Path(root)
    originals = [root / f"mnist_all_rotation_normalized_float_{part}.amat" for part in ("train_valid", "test")]
    if all(path.exists() for path in originals):
        train, test = (_split(*amat(path, rows)) for path, rows in zip(originals, (12_000, 50_000), strict=True))
        return Dataset("rotated_mnist (original)", train, test, DIGITS)
    kept = root / "rotated_mnist.xz"
    try:
        content = lzma.decompress(kept.read_bytes())
    except (OSError, EOFError, lzma.LZMAError):  # not there, or damaged: made again
        content = b""
    if hashlib.sha256(content).hexdigest() != ROTATED_SHA256:
        content = _regenerate(mnist(root))
        if hashlib.sha256(content).hexdigest() != ROTATED_SHA256:
            raise ValueError("rotated MNIST came out different from the known bytes; please report this, with your numpy version")
        _keep(kept, lzma.compress(content, preset=1))
    labels, images = np.frombuffer(content[:62_000], np.uint8), np.frombuffer(content[62_000:], np.uint8)
    whole = _split(images.reshape(62_000, 1, 28, 28), labels)
    return Dataset("rotated_mnist", whole[:12_000], whole[12_000:], DIGITS)


def cifar10(root: str | Path) -> Dataset:
    """CIFAR-10 from its binary version (data_batch_1.bin ...) or its python version (data_batch_1 ...) in `root`."""
    root = cifar_folder(Path(root))
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    binary = (root / "data_batch_1.bin").exists() or not (root / "data_batch_1").exists()
    batches = [cifar_binary(root / f"{name}.bin") if binary else cifar_python(root / name) for name in names]
    train = _split(np.concatenate([images for images, _ in batches[:5]]), np.concatenate([labels for _, labels in batches[:5]]))
    return Dataset("cifar10", train, _split(*batches[5]), CIFAR_CLASSES)


def whitened_cifar10(root: str | Path) -> Dataset:
    """CIFAR-10 as the paper's authors prepared it: each image without its mean and of one contrast, then ZCA whitened.

    Whitening (x - mean) C^-1/2, with the covariance C of the training images plus 0.1, takes away what neighbouring pixels
    have in common. The images are floating point numbers. It does not commute with turns of the image.
    """
    plain = cifar10(root)
    train, test = (_of_one_contrast(split.images) for split in (plain.train, plain.test))  # (N, 3072)
    mean = train.mean(0)
    train, test = train - mean, test - mean
    values, vectors = torch.linalg.eigh(train.T @ train / len(train))
    whiten = vectors * (values + 0.1).rsqrt() @ vectors.T
    parts = [Split((x @ whiten).view_as(s.images), s.labels) for x, s in ((train, plain.train), (test, plain.test))]
    return Dataset("cifar10, whitened", parts[0], parts[1], CIFAR_CLASSES)


def _of_one_contrast(images: Tensor) -> Tensor:
    rows = images.flatten(1).float()
    rows = rows - rows.mean(1, keepdim=True)
    return rows / rows.square().mean(1, keepdim=True).sqrt().clamp(min=1e-3)


def volumes(path: str | Path) -> Dataset:
    """Volumes (N, 1, D, H, W) from an .npz with x_train, y_train, x_test, y_test or MedMNIST's train_images, train_labels ...

    If there are x_val, y_val or val_images, val_labels, these are the last volumes for training: hold out just those.
    """
    path = Path(path)
    need(path, "an .npz file of volumes")
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} could not be read as an .npz file, it may be cut off: {error}") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} holds one array, expected an .npz file of several; write it with numpy.savez_compressed")
        names = ("x_{}", "y_{}") if "x_train" in archive else ("{}_images", "{}_labels")
        wanted = [name.format(part) for part in ("train", "test") for name in names]
        named = [name for name in ("x_val", "y_val", "val_images", "val_labels") if name in archive]
        has_val = named == [name.format("val") for name in names]
        if named and not has_val:
            expected = " and ".join(name.format("val") for name in names)
            raise ValueError(
                f"{path}: expected {expected} for validation, found {', '.join(named)}; name both alike, or leave them out"
            )
        if missing := [name for name in wanted if name not in archive]:
            both = "" if "x_train" in archive else ", or x_train, y_train, x_test, y_test"
            found = ", ".join(archive)
            raise ValueError(f"{path}: expected the arrays {', '.join(wanted)}{both}, found {found}; missing {missing}")
        wanted += [name.format("val") for name in names if has_val]
        arrays = {name: _array(path, archive, name) for name in (*wanted, "classes") if name in archive}
    classes = tuple(str(c) for c in arrays.get("classes", ()))
    parts = []
    for part in ("train", "test", "val")[: 2 + has_val]:
        x, y = arrays[names[0].format(part)], arrays[names[1].format(part)].reshape(-1)
        _check_labels(f"{path}: {names[1].format(part)}", y, len(classes))
        if x.ndim != 4:
            raise ValueError(f"{path}: expected volumes (N, D, H, W), got {names[0].format(part)} of shape {x.shape}")
        if not len(x):
            raise ValueError(f"{path}: {names[0].format(part)} is empty, expected volumes (N, D, H, W)")
        if x.dtype not in (np.uint8, bool) and not (x.min() >= 0 and x.max() <= 255 and (x == np.round(x)).all()):
            raise ValueError(
                f"{path}: expected volumes as bytes, got {names[0].format(part)} of {x.dtype} from {x.min()} to {x.max()}; bring "
                "them to 0 to 255, .astype(numpy.uint8)"
            )
        if len(x) != len(y):
            raise ValueError(f"{path}: {len(x)} volumes in {names[0].format(part)}, but {len(y)} labels; expected one for each")
        parts.append(_split(x[:, None].astype(np.uint8), y))
    used = torch.cat([part.labels for part in parts]).unique()
    count = int(used.max()) + 1
    if not classes and len(used) < count:
        raise ValueError(
            f"{path}: the labels go from {int(used.min())} to {count - 1}, but {count - len(used)} of the numbers from 0 on are "
            "never used; number the classes 0, 1, 2 and so on, or name them all in an array `classes`"
        )
    train, test, *val = parts
    for held in val:
        if held.images.shape[1:] != train.images.shape[1:]:
            raise ValueError(
                f"{path}: expected volumes of one size, got {tuple(train.images.shape[2:])} for training and "
                f"{tuple(held.images.shape[2:])} for validation"
            )
        train = Split(torch.cat([train.images, held.images]), torch.cat([train.labels, held.labels]))
    return Dataset(path.stem, train, test, classes or tuple(str(i) for i in range(count)), sum(map(len, val)))


def _array(path: Path, archive: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(archive[name])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "Object arrays" in str(error):  # reading them would run code
            raise ValueError(
                f"{path}: {name} holds Python objects; write whole numbers, .astype(int); names, .astype(str), go into `classes`"
            ) from None
        raise ValueError(f"{path} is damaged: {error}; make or fetch it again") from error


def _check_labels(what: str, labels: npt.NDArray[Any], classes: int) -> None:
    """Raises a ValueError unless the labels are whole numbers from 0, and fewer than the classes if those are named."""
    good = np.zeros(labels.shape, bool)
    if labels.dtype.kind in "buif":
        good = (labels >= 0) & (labels == np.round(labels)) & (labels < (classes or 2**31))
    if not good.all():
        expected = f"whole numbers from 0, fewer than {classes}" if classes else "whole numbers from 0"
        raise ValueError(f"{what} holds {labels[~good][0]} ({labels.dtype}); expected {expected}, one for each volume")


def shown(folder: Path) -> list[Path]:
    """What a folder holds, but for hidden files; nothing if it is not there."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise PermissionError(f"{folder} cannot be read: permission denied; you may not look into it") from error


KINDS = (".png", ".jpg", ".jpeg", ".jp2", ".tif", ".tiff", ".bmp", ".webp")


def pictures_in(folder: Path) -> list[Path]:
    """The image files in a folder, by their suffixes, sorted."""
    return [path for path in shown(folder) if path.suffix.lower() in KINDS]


def _warn_of_others(folders: list[Path], taken: set[Path]) -> None:
    """Says how many files in the folders are not among the pictures that were taken."""
    others = [p for folder in folders for p in shown(folder) if p not in taken and p.is_file() and p.name != "Thumbs.db"]
    if others:
        kinds = ", ".join(sorted({p.suffix or p.name for p in others}))
        warnings.warn(
            f"pictures: {len(others)} files were passed over ({kinds}), {others[0]} for example; pictures are "
            f"{', '.join(KINDS)} in the folder of a class",
            stacklevel=3,
        )


def pictures(root: str | Path, size: int = 0) -> Dataset:
    """Pictures of one's own, all of one size: root/train/CLASS/*.png and root/test/CLASS/*.png, or .jpg, .tif, .webp.

    With `size`, square ones of any sizes, resized to that many pixels each way. They stay gray if all of them are, and become RGB
    otherwise; `read_picture` reads each. The classes take turns, so that the last training pictures (`Dataset.hold_out`) are of
    every class; if there is a root/val/CLASS, its pictures are the last ones. Without a root/test the test part is empty. Names
    that begin with a dot are passed over, other files with a warning. Needs pip install "gcnn[train]".

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for place in ("train/healthy", "train/tumour", "test/healthy", "test/tumour"):
    ...         (Path(folder) / place).mkdir(parents=True)
    ...         Image.new("RGB", (9, 9)).save(Path(folder) / place / "1.png")
    ...     found = pictures(folder)
    >>> found.classes, found.train.images.shape
    (('healthy', 'tumour'), torch.Size([2, 3, 9, 9]))
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError('pictures are read under a bar of tqdm, which is not installed: pip install "gcnn[train]"') from error
    root = Path(root)
    if not (root / "train").is_dir():
        above = f"; name the folder above, {root.parent}" if (root.parent / "train").is_dir() else ""
        raise FileNotFoundError(
            f"{root / 'train'} is missing; expected folders train/CLASS with the pictures of each class, {', '.join(KINDS)}"
            + above
        )
    parts = ("train", *(part for part in ("val", "test") if (root / part).is_dir()))
    names = {part: {path.name for path in shown(root / part) if path.is_dir()} for part in parts}
    classes = tuple(sorted(names["train"]))
    for part in parts:
        if others := sorted(names[part] - names["train"]):
            raise ValueError(f"{root / part} has classes that {root / 'train'} has not: {', '.join(others)}")
    if len(classes) < 2:
        count = "1 folder" if classes else "no folders"
        raise ValueError(f"{root / 'train'} has {count} of classes, expected two or more to tell apart")
    found: list[tuple[str, int, Path]] = []
    for part in parts:
        ordered: list[tuple[float, int, Path]] = []
        for label, name in enumerate(classes):
            paths = pictures_in(root / part / name)
            if deeper := [p for p in shown(root / part / name) if p.is_dir() and pictures_in(p)]:
                raise ValueError(
                    f"{deeper[0]} holds pictures; put them into the folder of the class itself, {root / part / name}"
                )
            if part == "train" and not paths:
                raise ValueError(f"{root / part / name} holds no pictures, {', '.join(KINDS)}; expected some of every class")
            ordered += [((i + 0.5) / len(paths), label, path) for i, path in enumerate(paths)]
        found += [(part, label, path) for _, label, path in sorted(ordered)]
    if "test" in parts and "test" not in {part for part, _, _ in found}:
        raise ValueError(f"{root}: found no pictures in test/CLASS; expected {', '.join(KINDS)}")
    folders = [root / part / name for part in parts for name in ("", *classes)]
    _warn_of_others(folders, {path for _, _, path in found})
    read, problems, remarks = [], [], Counter[str]()
    used: dict[str, list[float]] = {part: [] for part in parts}  # of 16 bits, by the pictures that have them
    for part, _, path in tqdm(found, "reading pictures", disable=None):
        try:
            pixels, remark, part_of_16_bits = decoded(path)
            remarks[remark] += 1
            if part_of_16_bits is not None:
                used[part].append(part_of_16_bits)
            read.append(resized(pixels, size, path) if size else pixels)
            if read[-1].shape[:2] != read[0].shape[:2]:
                (rows, columns), (height, width) = read[0].shape[:2], read[-1].shape[:2]
                raise ValueError(
                    f"{path} has {width} x {height} pixels, {found[0][2]} has {columns} x {rows}; resize or cut them alike, or "
                    "let --size do it"
                )
        except (OSError, ValueError) as error:  # all of them are to be named at once
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        each = "; ".join(str(error) for error in problems[:5])
        raise ValueError(f"{len(problems)} of {len(found)} pictures cannot be taken: {each}{more}")
    for part, shares in used.items():
        if shares and 0 < max(shares) < 1 / 8:
            there = sum(each == part for each, _, _ in found)
            raise ValueError(
                f"{root / part}: {len(shares)} of {there} pictures have 16 bits, of which they use {65_535 * max(shares):g} of "
                f"65535; {SCALE}"
            )
    for what, times in remarks.items():
        if what:
            warnings.warn(f"pictures: {times} of {len(found)} are {what}", stacklevel=2)
    gray = all(pixels.ndim == 2 for pixels in read)
    if not gray and (odd := [label for (_, label, _), pixels in zip(found, read, strict=True) if pixels.ndim == 2]):
        of = ", ".join(f"{name} {n}" for name, n in zip(classes, np.bincount(odd, minlength=len(classes)), strict=True) if n)
        warnings.warn(
            f"pictures: {len(odd)} of {len(found)} are gray ({of}) and become RGB; if that tells the classes apart, a network "
            "learns it",
            stacklevel=2,
        )
    whole = np.stack([p[None] if gray else np.stack([p] * 3) if p.ndim == 2 else p.transpose(2, 0, 1) for p in read])
    labels, tested = np.array([label for _, label, _ in found]), np.array([part == "test" for part, _, _ in found])
    held = sum(part == "val" for part, _, _ in found)
    return Dataset("pictures", _split(whole[~tested], labels[~tested]), _split(whole[tested], labels[tested]), classes, held)


DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "rotated_mnist": rotated_mnist,
    "cifar10": cifar10,
    "whitened_cifar10": whitened_cifar10,
    "volumes": volumes,
    "pictures": pictures,
}


def load(name: str, root: str | Path | None = None, size: int = 0) -> Dataset:
    """The data set `name` of DATASETS from the folder (or .npz file) `root`; "digits" comes with the package.

    `size` is for pictures, which are resized to it.

    >>> load("digits").name
    'digits'
    """
    if name not in DATASETS:
        raise ValueError(f"data must be one of {', '.join(DATASETS)}, got {name!r}; pictures are folders of your own")
    if name == "digits":
        return digits()
    if root is None:
        raise ValueError(f"{name}: name the folder that holds its files (data_root); {remedy(name)}")
    return pictures(root, size) if name == "pictures" else DATASETS[name](root)


SOURCES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", {f"{n}.gz": f"md5-unpacked:{m}" for n, m in MNIST_MD5.items()}),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/", {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"}),
}


def download(name: str, root: str | Path, base_url: str | None = None) -> None:
    """Fetches the files of "mnist" or "cifar10" into `root` with pooch, with a progress bar, and checks them.

    Files that are there and sound are not fetched again; damaged ones, and others of the same name, are kept as NAME.before.
    `base_url` names a mirror. Needs pip install "gcnn[train]".
    """
    try:
        import pooch
    except ImportError as error:
        raise ImportError('downloads need pooch, which is not installed: pip install "gcnn[train]"') from error
    if name == "rotated_mnist":
        name = "mnist"
    if name not in SOURCES:
        raise ValueError(f"download: expected one of {', '.join(SOURCES)}, got {name!r}")
    url, registry = SOURCES[name]
    url = (base_url or url).rstrip("/") + "/"
    for file, known in registry.items():
        kind, digest = known.split(":")
        target = Path(root) / file
        unpacked = kind == "md5-unpacked"
        if target.exists() and (unpacked_md5(target) if unpacked else hashlib.md5(target.read_bytes()).hexdigest()) != digest:
            before = target.with_name(f"{file}.before")  # it may be a file of one's own
            if before.exists():
                raise ValueError(
                    f"{target} is not the file of {name}, or is damaged, and {before} is there already; move one of them away, "
                    "or choose another folder (--root)"
                )
            target.rename(before)
        try:
            pooch.retrieve(url + file, None if unpacked else known, file, Path(root), progressbar=True)
        except OSError as error:
            wanted = ", ".join(registry)
            raise OSError(
                f"{url + file} could not be fetched ({type(error).__name__}); without a network, put {wanted} into {root}"
            ) from error
        if unpacked and unpacked_md5(target) != digest:
            target.unlink()
            raise ValueError(f"{url + file}: what came does not have the known md5 {digest}; try another mirror (base_url=)")
        if file.endswith(".tar.gz"):
            import tarfile

            with tarfile.open(target) as archive:
                safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.10.12
                archive.extractall(root, **safe)


def _split(images: Any, labels: Any) -> Split:
    return Split(torch.from_numpy(np.array(images)), torch.from_numpy(np.array(labels, dtype=np.int64)))


def _regenerate(source: Dataset) -> bytes:
    """62,000 labels, then 62,000 turned digits."""
    images = torch.cat([source.train.images, source.test.images])[:, 0].numpy()
    labels = torch.cat([source.train.labels, source.test.labels]).numpy().astype(np.uint8)
    # raw words of PCG64 are fixed by its algorithm; what numpy makes of them may change
    words = np.random.PCG64(2016).random_raw(140_000)
    chosen = np.argsort(words[:70_000], kind="stable")[:62_000]
    angles = (words[70_000:132_000] >> np.uint64(11)).astype(np.float64) * (2 * np.pi / 2**53)
    parts = [turn(images[c], a) for c, a in zip(np.array_split(chosen, 62), np.array_split(angles, 62), strict=True)]
    return labels[chosen].tobytes() + np.concatenate(parts).tobytes()


def turn(images: Bytes, angles: npt.NDArray[np.float64]) -> Bytes:
    """Images (N, n, n) turned anticlockwise by `angles` in radians about their centres, bilinear, zero outside, in integers."""
    n, bits = images.shape[-1], 16
    one = 1 << (bits + 1)
    cos, sin = (np.rint(f(angles) * 2**bits).astype(np.int64)[:, None, None] for f in (np.cos, np.sin))
    u = 2 * np.arange(n) - (n - 1)  # doubled coordinates from the centre
    row, column = u[:, None], u[None, :]
    # where each cell of the result comes from, in units of 2^-(bits + 1) of a cell
    source = [cos * row + sin * column + ((n - 1) << bits), cos * column - sin * row + ((n - 1) << bits)]
    (r, fr), (c, fc) = ((v >> (bits + 1), v & (one - 1)) for v in source)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1))).astype(np.int64)
    which = np.arange(len(images))[:, None, None]

    def at(i: npt.NDArray[np.int64], j: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        inside = (i >= -1) & (i <= n) & (j >= -1) & (j <= n)
        return padded[which, np.where(inside, i + 1, 0), np.where(inside, j + 1, 0)]

    top = at(r, c) * (one - fc) + at(r, c + 1) * fc
    bottom = at(r + 1, c) * (one - fc) + at(r + 1, c + 1) * fc
    return ((top * (one - fr) + bottom * fr + (1 << (2 * bits + 1))) >> (2 * bits + 2)).astype(np.uint8)


def _keep(path: Path, content: bytes) -> None:
    """Writes a cache, whole or not at all; a folder that cannot be written to is no error."""
    with suppress(OSError):
        write_file(path, content)
