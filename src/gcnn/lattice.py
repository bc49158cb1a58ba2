"""Geometry: the domain of a feature map on its lattice, and images resampled to hexagons and back (paper, section 9).

A map on a hexagonal lattice is an array in axial coordinates: cell (a, b) lies a steps along an axis that points down and
to the right, at 60 degrees, and b steps to the right. The group maps only the hexagon inside that array to itself, so
maps are zero outside it. Of the files behind the layers, this is the only one that knows angles.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.checks import check_tensor
from gcnn.groups import Group, p6m
from gcnn.layout import fine, plain, traced

__all__ = ["domain_mask", "hexagon", "mask_outside", "to_hexagonal", "to_square"]

ROW = math.sqrt(3) / 2  # the height of one row of a hexagonal lattice, in steps


def domain_mask(group: Group, size: int | Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """(*size) bool: the largest part of a box that the group maps to itself, all of it unless the lattice is hexagonal.

    >>> from gcnn import p6m
    >>> domain_mask(p6m, (5, 5)).int()
    tensor([[0, 0, 1, 1, 1],
            [0, 1, 1, 1, 1],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 0, 0]], dtype=torch.int32)
    """
    size = size if isinstance(size, Sequence) else (size,) * group.dim
    check_domain("domain_mask", group, size)
    # the same cells as gcnn.indices.support, in torch: images have many sizes, and compilers see through it
    mask = torch.ones(tuple(size), dtype=torch.bool, device=device)
    axes = [  # doubled coordinates, as for kernels, one broadcastable tensor an axis
        (torch.arange(n, device=device) * 2 - (n - 1)).reshape([-1 if j == i else 1 for j in range(len(size))])
        for i, n in enumerate(size)
    ]
    for i, row in group.oblique:
        along = sum((m * u for m, u in zip(row, axes, strict=True) if m), torch.zeros_like(axes[0]))
        mask = mask & (along.abs() <= size[i] - 1)
    return mask


def check_domain(who: str, group: Group, size: Sequence[int]) -> None:
    """Raises a ValueError unless a map of this size has a centre that the group turns it about."""
    if len(size) != group.dim:
        raise ValueError(f"{who}: {group.name} acts on {group.dim} axes of space, got a size of {len(size)}, {tuple(size)}")
    if any(isinstance(n, int) and n < 0 for n in size):
        raise ValueError(f"{who}: sizes are 0 or more, got {tuple(size)}")
    for i, row in group.oblique:
        if any(m and (size[j] != size[i] or size[j] % 2 == 0) for j, m in enumerate(row)):
            axes = tuple(j for j, m in enumerate(row) if m)
            raise ValueError(
                f"{who}: a map on the hexagonal lattice of {group.name} has equal, odd sizes along axes {axes}, "
                f"got {tuple(size)}; bring images to the lattice with gcnn.lattice.to_hexagonal, and let "
                "(size + 2 padding - kernel_size) / stride be even, as for sizes 4 n + 1 with kernel 3, stride 2, padding 1"
            )


def mask_outside(group: Group, x: Tensor, value: float = 0.0) -> Tensor:
    """`x` with the cells outside the domain of the group set to `value`; `x` itself where the domain is the whole box.

    >>> from gcnn import p6
    >>> mask_outside(p6, torch.ones(3, 3))
    tensor([[0., 1., 1.],
            [1., 1., 1.],
            [1., 1., 0.]])
    """
    if group.fills_box:
        return x
    check_tensor("mask_outside", x)
    size = x.shape[-group.dim :]
    kept = kept_domain(group, size, x)
    mask = domain_mask(group, size, x.device) if kept is None else kept.mask
    return torch.where(mask, x, value)  # masked_fill would lose the memory format


class Domain(NamedTuple):
    """The part of a box that the group maps to itself."""

    mask: Tensor
    """(*size) bool."""
    inside: Tensor
    """The numbers of its cells in the box."""
    outside: Tensor
    """Those of the others."""


KEPT = 64  # domains of so many sizes are kept
_domains: dict[tuple[Group, tuple[int, ...], torch.device], Domain] = {}
_lock = threading.Lock()
_captured: dict[tuple[Group, tuple[int, ...], torch.device], Domain] = {}  # those that CUDA graphs read, for good


def kept_domain(group: Group, size: Sequence[int], like: Tensor) -> Domain | None:
    """The domain in a box of this size, made once for each device; None for what traces functions.

    Making it takes a dozen small kernels, longer than using it. None is made while a CUDA graph is captured, with which
    it would be freed.
    """
    if traced() or like.is_meta or not plain(like):
        return None
    size, device = tuple(size), like.device
    key = (group, size, device)
    found = _domains.get(key)  # once: another thread may take it away
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        if found is not None:
            _captured[key] = found
        return _captured.get(key)
    if found is None:
        with torch.inference_mode(False):  # a later backward pass may need it
            mask = domain_mask(group, size, device)
            found = Domain(mask, *((mask == part).flatten().nonzero()[:, 0] for part in (True, False)))
        if like.is_cuda:
            torch.cuda.current_stream(device).synchronize()  # the next to read it may be on another stream
        with _lock:
            while len(_domains) >= KEPT:
                del _domains[next(iter(_domains))]
            _domains[key] = found
    return found


def to_hexagonal(image: Tensor, size: int | None = None, spacing: float | None = None) -> Tensor:
    """Images (N, K, H, W) resampled to a hexagonal lattice: (N, K, size, size) in axial coordinates, by bilinear interpolation.

    `size` is odd; `spacing` is the distance of neighbouring cells in pixels. What is not given follows so that the hexagon
    covers the image; with neither given, a cell has at most the area of a pixel, and size is 4 n + 1, which can be halved.

    >>> to_hexagonal(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 3, 49, 49])
    """
    _check_image("to_hexagonal", image)
    size, spacing = _fit(image.shape[-2:], size, spacing)
    pixels = fine(image)
    u = torch.arange(size, device=image.device, dtype=pixels.dtype) - (size - 1) / 2
    rows = (u * spacing * ROW)[:, None].expand(size, size)
    columns = (u[None, :] + u[:, None] / 2) * spacing
    height, width = image.shape[-2:]
    grid = torch.stack([columns / (width / 2), rows / (height / 2)], -1)  # (size, size, 2) in [-1, 1], pixel edges at +-1
    grid = grid.expand(image.shape[0], *grid.shape)
    out = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return (out * hexagon(size, image.device)).to(image.dtype)


def to_square(x: Tensor, size: int | Sequence[int], spacing: float | None = None) -> Tensor:
    """A map (N, K, n, n) on a hexagonal lattice resampled to (N, K, *size) pixels, linear on each triangle of neighbours.

    `spacing` is the one the map was made with; by default the one that `to_hexagonal` takes for such an image and n.

    >>> image = torch.ones(1, 1, 9, 9)
    >>> to_square(to_hexagonal(image), (9, 9))[0, 0, 4, 1:-1]
    tensor([1., 1., 1., 1., 1., 1., 1.])
    """
    _check_image("to_square", x)
    n, size = x.shape[-1], size if isinstance(size, Sequence) else (size, size)
    if len(size) != 2 or any(isinstance(m, int) and m < 1 for m in size):
        raise ValueError(f"to_square: size must be a positive whole number or two of them, got {tuple(size)}")
    if x.shape[-2] != n:
        raise ValueError(f"to_square: a hexagonal map has equal sizes, got {tuple(x.shape[-2:])}")
    n, spacing = _fit(size, n, spacing)
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = torch.arange(size[0], device=x.device, dtype=dtype) - (size[0] - 1) / 2
    columns = torch.arange(size[1], device=x.device, dtype=dtype) - (size[1] - 1) / 2
    a = (rows / (spacing * ROW))[:, None].expand(size)
    b = columns[None, :] / spacing - a / 2
    a0, b0 = a.floor(), b.floor()
    fa, fb = a - a0, b - b0
    upper = fa + fb > 1  # which triangle of the rhombus
    corners = [  # the three corners and the barycentric weights
        (upper.to(a0), upper.to(a0), (1 - fa - fb).abs()),
        (torch.ones_like(a0), torch.zeros_like(a0), torch.where(upper, 1 - fb, fa)),
        (torch.zeros_like(a0), torch.ones_like(a0), torch.where(upper, 1 - fa, fb)),
    ]
    out = torch.zeros(*x.shape[:2], *size, device=x.device, dtype=dtype)
    for da, db, weight in corners:
        i, j = (a0 + da).long() + n // 2, (b0 + db).long() + n // 2
        inside = (i >= 0) & (i < n) & (j >= 0) & (j < n)
        out = out + x[..., i.clamp(0, n - 1), j.clamp(0, n - 1)] * (weight * inside)
    return out.to(x.dtype)


def hexagon(size: int, device: torch.device | str | None = None) -> Tensor:
    """(size, size) bool: the cells of the largest hexagon in an array in axial coordinates; the domain of p6m.

    >>> int(hexagon(5).sum())
    19
    """
    return domain_mask(p6m, (size, size), device)


def _fit(image: Sequence[int], size: int | None, spacing: float | None) -> tuple[int, float]:
    """The size and spacing of the hexagon over an image, whichever of the two is not given."""
    row, column = (image[0] - 1) / 2 / ROW, (image[1] - 1) / 2  # the corner pixel, rows in steps of the lattice
    radius = max(row, column + row / 2)  # its distance in steps of one pixel: the largest of |a|, |b|, |a + b|
    if size is not None and (isinstance(size, Sequence | float) or size < 1 or size % 2 == 0):
        raise ValueError(f"the size of a hexagonal map must be one odd number, so that a cell lies at its centre; got {size!r}")
    if spacing is not None and spacing <= 0:
        raise ValueError(f"spacing must be positive, got {spacing}")
    if size is None:
        steps = math.ceil(radius / (spacing or math.sqrt(1 / ROW)) - 1e-9)
        size = 2 * (steps if spacing else steps + steps % 2) + 1
    if spacing is None:
        spacing = max(radius, 0.5) / max((size - 1) / 2, 0.5)
    return size, spacing


def _check_image(what: str, image: Tensor) -> None:
    check_tensor(what, image)
    if image.ndim != 4 or not image.is_floating_point():
        remedy = "use x.float()" if image.ndim == 4 else "one image is x[None], more leading axes are x.flatten(0, -4)"
        raise ValueError(f"{what}: expected floating point images (N, K, H, W), got {image.dtype} {tuple(image.shape)}; {remedy}")
