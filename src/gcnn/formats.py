"""Files as arrays of bytes: pictures, and the formats of MNIST and CIFAR-10, checked; every error names the file and a remedy.

Pickles (the python version of CIFAR-10) are read by an unpickler that makes arrays alone, and runs no code of theirs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import re
import struct
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
CIFAR_SHA1 = {  # of the binary version
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
}
WAY_OUT = "build a Dataset of all bands in Python (docs/howto.md, More than three bands)"
PARTLY = (
    "half transparent in over a quarter of their pixels: the fourth band (of gray ones the second) was taken as transparency; "
    f"if it is a band of the image, {WAY_OUT}"
)
SCALE = "scale all pictures alike, and save them as bytes"
CUT = (
    "gray of 16 bits, of which the 8 highest are kept: steps below 257 are lost, and so may be what is faint; if that matters, "
    "save them as bytes, all stretched alike (arcsinh, say)"
)


def read_picture(path: str | Path) -> Bytes:
    """An image file as bytes, (rows, columns) if it is gray, else (rows, columns, 3).

    As viewers show it, turned by its EXIF tag. Transparent areas become black where what is visible is light, else white; so does
    a fourth band that is probably no transparency, with a warning. Gray of 16 bits becomes bytes, its 8 highest bits, with a
    warning where the others hold something; colours of 16 bits, and bands beyond those of a colour, are a ValueError.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (9, 7)).save(folder + "/1.png")
    ...     read_picture(folder + "/1.png").shape
    (7, 9, 3)
    """
    pixels, remark, _ = decoded(path)
    if remark:  # without the name of the file, so that it is said once for all of them
        warnings.warn(f"pictures are {remark}", stacklevel=2)
    return pixels


def decoded(path: str | Path) -> tuple[Bytes, str, float | None]:
    """What `read_picture` returns, PARTLY or CUT if one is to be said, and which part of its 16 bits is used.

    PARTLY where more than a quarter of the pixels are half transparent: soft edges have fewer.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError('pictures are read by pillow, which is not installed: pip install "gcnn[train]"') from error
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give image files, such as {path}/*.png")
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} is not there; give the name of an image file")
    try:
        content = Path(path).read_bytes()  # from a path pillow would map some files, turned ones wrongly
        _check_tiff(path, content)
        with Image.open(io.BytesIO(content)) as image:
            if _would_be_cut(image, content):
                raise ValueError(
                    f"{path} has 16 bits a channel, of which 8 would be lost; save it with 8, and scale all pictures alike"
                )
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # as cameras write: the first one is the picture
                raise ValueError(f"{path} holds {image.n_frames} images; save them as files of their own")
            _turn_upright(image)
            if image.mode.startswith(("I", "F")):
                wide = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
                return _of_16_bits(path, np.array(image).astype(np.float64), wide)
            if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
                raise ValueError(f"{path} is of the kind {image.mode}, expected bytes, in gray or in colour; convert it")
            gray = image.mode in ("1", "L", "LA")
            drawn = image.convert("RGBA")
            light, cover = (np.array(part).astype(np.float64) for part in (drawn.convert("L"), drawn.getchannel("A")))
            solid = Image.new("RGBA", image.size, "black" if (light * cover).sum() > 127 * cover.sum() else "white")
            solid.alpha_composite(drawn)
            partly = float(((cover > 0) & (cover < 255)).mean()) > 0.25
            return np.array(solid.convert("L" if gray else "RGB")), PARTLY if partly else "", None
    except UnidentifiedImageError:
        raise OSError(f"{path} could not be read: it is no picture that pillow knows, or is damaged") from None
    except OSError as error:
        raise OSError(f"{path} could not be read: {error}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large for one picture; cut it into tiles ({error})") from error


def resized(pixels: Bytes, size: int, path: str | Path = "the picture") -> Bytes:
    """A square picture with `size` pixels each way, bilinear, antialiased; another is a ValueError, since it would be distorted.

    A picture that is turned by 90 degrees or mirrored and then resized has the same bytes as one that is resized first: sums are
    of whole numbers, whose order does not matter, and are rounded once.

    >>> resized(np.full((90, 90, 3), 7, np.uint8), 33).shape
    (33, 33, 3)
    """
    if not isinstance(pixels, np.ndarray) or not isinstance(size, int | np.integer) or size < 1:
        raise ValueError(f"resized: expected an array (H, W, ...) and a size from 1 on, got {type(pixels).__name__} and {size!r}")
    rows, columns = pixels.shape[:2]
    if rows != columns:
        raise ValueError(f"{path} has {columns} x {rows} pixels, and only square pictures are resized; cut it to a square first")
    if rows == size:
        return pixels
    once, total = _sums(pixels.reshape(rows, -1), size)  # (size, columns * channels)
    once = once.reshape(size, columns, -1).swapaxes(0, 1)
    twice, _ = _sums(once.reshape(columns, -1), size)  # (size, size * channels)
    values = twice.reshape(size, size, -1).swapaxes(0, 1) / (total[:, None] * total)[..., None]
    return np.floor(values + 0.5).astype(np.uint8).reshape(size, size, *pixels.shape[2:])


def _sums(x: npt.NDArray[Any], size: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Rows (n, k) times whole weights, summed to (size, k), and the sum of each row's weights (size,), about 2^21.

    The weights are those of a triangle as wide as the larger of an old and a new pixel, each way. Two times of this stay below
    2^53: float64 holds them exactly.
    """
    n, reach = len(x), 2 * max(len(x), size)
    found, total = np.empty((size, x.shape[1])), np.empty(size)
    for first in range(0, size, 8):  # a few at a time have few rows below their triangles
        i = np.arange(first, min(first + 8, size))
        low = max(0, ((2 * first + 1) * n - reach - size) // (2 * size))
        high = min(n, ((2 * int(i[-1]) + 1) * n + reach) // (2 * size) + 1)
        # the distance of two centres, in whole numbers: 2 * size of them are an old pixel
        away = np.abs((2 * np.arange(low, high) + 1) * size - (2 * i[:, None] + 1) * n)
        weights = np.maximum(0, reach - away).astype(np.float64)
        weights = np.rint(weights * (2**21 / weights.sum(1, keepdims=True)))  # (8, high - low)
        total[i] = weights.sum(1)
        step = max(1, 2**18 // weights.size)  # products this small stay in the cache, and BLAS starts no threads for them
        for k in range(0, x.shape[1], step):
            found[i, k : k + step] = weights @ x[low:high, k : k + step].astype(np.float64)
    return found, total


def _check_tiff(path: str | Path, content: bytes) -> None:
    """Raises a ValueError for a TIFF with bands that pillow would leave out, or with floats that it does not know."""
    from PIL import TiffImagePlugin

    if content[:4] not in (b"II*\0", b"MM\0*", b"II+\0"):
        return
    tags: dict[int, list[Any]] = {}
    with warnings.catch_warnings(), suppress(Exception):  # what is damaged is told when it is opened
        warnings.simplefilter("ignore")
        table = TiffImagePlugin.ImageFileDirectory_v2(content[: 16 if content[2] == 43 else 8])
        file = io.BytesIO(content)
        file.seek(table.next)
        table.load(file)
        tags = {name: np.atleast_1d(table[name]).tolist() for name in (258, 262, 277, 338, 339) if name in table}
    tags = {name: values for name, values in tags.items() if values and all(isinstance(value, int) for value in values)}
    bands, kind, extra = tags.get(277, [1])[0], tags.get(262, [1])[0], tags.get(338, [])
    colours = {2: 3, 5: 4, 6: 3, 8: 3}.get(kind, 1)  # RGB, CMYK, YCbCr, Lab; others are gray or a palette
    cover = any(meaning in (1, 2, 999) for meaning in extra) or (kind, bands, extra) == (2, 4, [])  # pillow takes it as one
    if bands > colours + cover:
        raise ValueError(
            f"{path} has {bands} bands, of which {bands - colours - cover} would be lost: pictures are gray or RGB, with "
            f"transparency or without; {WAY_OUT}, or save it with fewer"
        )
    if 3 in tags.get(339, []) and (bands > 1 or tags.get(258) != [32]):
        raise ValueError(
            f"{path} has floating point numbers, expected bytes; if they go from 0 to 1, save it times 255, as bytes, else scale "
            "all pictures alike"
        )


def _would_be_cut(image: Any, content: bytes) -> bool:
    """Whether pillow reads channels of 16 bits as their high bytes; asked before it loads the image."""
    if image.mode.startswith(("I", "F")):
        return False  # gray, read whole
    kinds = [tile[3][0] if isinstance(tile[3], tuple) else tile[3] for tile in image.tile]
    bits = image.tag_v2.get(258, 8) if image.format == "TIFF" else 8  # its planes may lie apart, each of a kind of its own
    if image.format == "JPEG2000" and (at := content.find(b"\xff\x4f\xff\x51")) >= 0:  # the sizes: 38 bytes, then 3 a channel
        bits = [1 + (depth & 127) for depth in content[at + 42 : at + 42 + 3 * len(image.getbands()) : 3]]
    return any(re.search(";16[BLN]", str(kind)) for kind in kinds) or np.max(bits) > 8


def _turn_upright(image: Any) -> None:
    """Turns an image as its EXIF tag says: cameras write how they were held. One that cannot be read says nothing."""
    from PIL import ImageOps

    with warnings.catch_warnings(), suppress(SyntaxError, struct.error, ValueError, KeyError, TypeError, EOFError):
        warnings.simplefilter("ignore")
        ImageOps.exif_transpose(image, in_place=True)


def _of_16_bits(path: str | Path, values: npt.NDArray[np.float64], wide: bool) -> tuple[Bytes, str, float | None]:
    low, high = values.min(), values.max()
    if not np.isfinite(values).all():
        raise ValueError(f"{path} has values that are not finite, expected bytes; put numbers in their place")
    if low >= 0 and 0 < high <= 1:
        raise ValueError(f"{path} has numbers from {low:g} to {high:g}, expected bytes; save it times 255")
    if wide and 0 < high < 257:
        raise ValueError(f"{path} has 16 bits, of which it uses {high:g} of 65535, and would be black; {SCALE}")
    if low < 0 or high > (65_535 if wide else 255) or (values != np.round(values)).any():
        raise ValueError(f"{path} has values from {low:g} to {high:g}, expected bytes, or 16 bits a pixel; {SCALE}")
    lost = wide and bool((values % 257).any())
    return (values / (257 if wide else 1)).astype(np.uint8), CUT if lost else "", high / 65_535 if wide else None


def remedy(name: str) -> str:
    """How to get the files of a data set."""
    if name in ("mnist", "rotated_mnist"):
        return 'gcnn download mnist --root FOLDER fetches MNIST; "digits" comes with the package'
    if name.endswith("cifar10"):
        return "gcnn download cifar10 --root FOLDER fetches it"
    return "with folders train/CLASS and test/CLASS in it" if name == "pictures" else "give the path of the .npz file"


def need(path: Path, what: str, name: str = "") -> None:
    """Raises a FileNotFoundError where the file is missing."""
    try:
        found = path.is_file()
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be read: you have no permission to look into {path.parent}") from error
    if not found:
        raise FileNotFoundError(f"{path} is missing, expected {what}" + (f"; {remedy(name)}" if name else ""))


def read(path: Path) -> bytes:
    """What the file holds."""
    try:
        return path.read_bytes()
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be read: permission denied") from error


def unpacked_md5(path: Path) -> str:
    """Of what a gzip file holds."""
    try:
        return hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest()
    except (OSError, EOFError, zlib.error):
        return "damaged"


def idx(root: Path, name: str) -> Bytes:
    """An idx file: two zero bytes, the type (8: bytes), the number of axes, their sizes, the bytes."""
    path, packed = root / name, root / f"{name}.gz"
    if not path.is_file():
        need(packed, f"{name} of MNIST, gzipped or not", "mnist")
        path = packed
    content = read(path)
    if path == packed:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is truncated or not a gzip file ({error}); {remedy('mnist')}") from error
    md5 = hashlib.md5(content).hexdigest()
    if md5 != MNIST_MD5[name]:
        raise ValueError(
            f"{path} is not the file of MNIST: {len(content)} bytes with md5 {md5}, expected md5 {MNIST_MD5[name]}; "
            f"{remedy('mnist')}"
        )
    axes = content[3]
    sizes = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(sizes)


def amat(path: Path, rows: int) -> tuple[Bytes, npt.NDArray[np.float64]]:
    """The original text files: a row a digit, 784 values in [0, 1] column by column, then the label."""
    try:
        table = np.array(read(path).split(), dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{path}: expected numbers only ({error})") from error
    if table.size != rows * 785:
        raise ValueError(f"{path}: expected {rows} rows of 785 numbers, got {table.size}; the file is truncated or another")
    table = table.reshape(rows, 785)
    images = np.rint(table[:, :784] * 255).clip(0, 255).astype(np.uint8).reshape(rows, 1, 28, 28)
    return images.transpose(0, 1, 3, 2), table[:, 784]


def cifar_folder(root: Path) -> Path:
    """The folder with the batches of CIFAR-10, `root` itself or one in it."""
    for folder in (root, root / "cifar-10-batches-bin", root / "cifar-10-batches-py"):
        if (folder / "data_batch_1.bin").exists() or (folder / "data_batch_1").exists():
            return folder
    need(root / "data_batch_1.bin", "CIFAR-10 in its binary version, or data_batch_1 of its python version", "cifar10")
    return root


def cifar_binary(path: Path) -> tuple[Bytes, Bytes]:
    """Images and labels of a batch of CIFAR-10, binary version."""
    need(path, "a batch of CIFAR-10, binary version", "cifar10")
    content = read(path)
    if len(content) != 10_000 * 3073:
        raise ValueError(f"{path} has {len(content)} bytes, expected {10_000 * 3073}: truncated, or another file")
    sha1 = hashlib.sha1(content).hexdigest()
    if sha1 != CIFAR_SHA1[path.name]:
        raise ValueError(f"{path} is damaged: SHA-1 {sha1}, expected {CIFAR_SHA1[path.name]}; {remedy('cifar10')}")
    records = np.frombuffer(content, np.uint8).reshape(10_000, 3073)
    return records[:, 1:].reshape(10_000, 3, 32, 32), records[:, 0]


HARMLESS = (
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
)


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of dictionaries, lists and numpy arrays, and refuses whatever else one could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise ValueError(f"the pickle asks for {module}.{name}, which no batch of CIFAR-10 does; it is not read")
        if name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        return super().find_class(module, name)


def cifar_python(path: Path) -> tuple[Bytes, Bytes]:
    """The same of its python version."""
    need(path, "a batch of CIFAR-10, python version", "cifar10")
    content = read(path)
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        images = np.asarray(batch[b"data"], np.uint8).reshape(10_000, 3, 32, 32)
        labels = np.asarray(batch[b"labels"], np.uint8)
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path} is not a batch of CIFAR-10, python version ({error}); {remedy('cifar10')}") from error
    # the python version holds the same numbers as the binary one, so its checksum serves for both
    sha1 = hashlib.sha1(np.concatenate([labels[:, None], images.reshape(10_000, 3072)], 1).tobytes()).hexdigest()
    if sha1 != CIFAR_SHA1[f"{path.name}.bin"]:
        raise ValueError(f"{path} is damaged: its numbers have SHA-1 {sha1}, expected {CIFAR_SHA1[f'{path.name}.bin']}")
    return images, labels
