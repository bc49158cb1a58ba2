"""Pooling, subsampling and resampling of functions on groups (paper, section 6.3), as pure functions of tensors.

Over the group: cosets, any finite domain g U, subgroups. Over space: windows that the group maps to themselves. What the
layers of `gcnn.nn` compute once and keep (members, taps, plans) can be handed to these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.checks import Size, as_tuple, check_axes, check_reduce, is_map, shape_text
from gcnn.groups import Group, Subgroup
from gcnn.indices import check_support, doubled_coordinates, support
from gcnn.lattice import domain_mask, mask_outside
from gcnn.layout import both_sides, fine, from_planes, output_size, to_planes, traced

Reduce = Literal["max", "mean"]
Members = list[list[int]]
Taps = list[tuple[int, ...]]
Tent = list[Any]
Plan = tuple[tuple[int, ...], list[list[tuple[int, tuple[int, ...]]]]]


def coset_pool(
    group: Group,
    x: Tensor,
    subgroup: Subgroup | None = None,
    reduce: Reduce = "max",
    members: Members | None = None,
) -> Tensor:
    """The G-map (N, K, S, *X) pooled over the left cosets of `subgroup`: (N, K, S/|H|, *X) (section 6.3).

    None pools over the whole point group and gives an image (N, K, *X). Also takes (N, K, S). `members` are those of
    `left_cosets`, where the caller keeps them.

    >>> from gcnn import p4m
    >>> f = torch.rand(2, 3, 8, 5, 5)
    >>> coset_pool(p4m, f).shape, coset_pool(p4m, f, p4m.subgroup(1)).shape
    (torch.Size([2, 3, 5, 5]), torch.Size([2, 3, 2, 5, 5]))
    """
    check_reduce(reduce)
    if x.ndim not in (3, group.dim + 3) or x.shape[2] != group.order:
        raise ValueError(
            f"coset_pool: expected a map on {group.name}, {shape_text(group, 'K')}, got {tuple(x.shape)}; "
            "a map that is pooled over cosets already becomes an image by x.amax(2) or x.mean(2)"
        )
    if subgroup is None:
        return _reduce(x, 2, reduce)
    members = members or left_cosets(group, subgroup)
    x = _reduce(_rearrange(x, members), 3, reduce)  # (N, K, S/|H|, *X)
    return x[:, :, 0] if x.shape[2] == 1 else x


def left_cosets(group: Group, subgroup: Subgroup) -> Members:
    """The elements of each left coset s H, in the order of `Group.cosets`."""
    labels = group.cosets(subgroup)
    members: Members = np.argsort(labels, kind="stable").reshape(int(labels.max()) + 1, -1).tolist()
    return members


def right_cosets(group: Group, subgroup: Subgroup) -> Members:
    """The elements h c of each right coset H c, with h in the order of the subgroup."""
    products = group.product[list(group.elements_of(subgroup))]  # (|H|, S)
    members: Members = products[:, np.unique(products.min(0))].T.tolist()
    return members


def pool(group: Group, x: Tensor, domain: Iterable[tuple[int, Sequence[int]]], reduce: Reduce = "max") -> Tensor:
    """Pooling without stride over g U: P f(g) = max of f(g u) over u in U, a finite subset of G (section 6.3).

    `domain` lists U as pairs (s, t), each the element t s. Cells outside the map do not count for "max" and count as zero
    for "mean". The size stays.

    >>> from gcnn import p4
    >>> f = torch.rand(1, 1, 4, 5, 5)
    >>> over_rotations = pool(p4, f, [(s, (0, 0)) for s in range(4)])
    >>> bool((over_rotations[:, :, 0] == coset_pool(p4, f)).all())
    True
    """
    return planned_pool(group, x, pool_plan(group, domain), reduce)


def pool_plan(group: Group, domain: Iterable[tuple[int, Sequence[int]]]) -> Plan:
    """How far U reaches along each axis, and for each element s what it reads: [(s a, s t), ...] over (a, t) in U."""
    pairs = list(domain)
    if not all(isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[1], Sequence) for pair in pairs):
        example = (0, (0,) * group.dim)
        raise ValueError(f"pool: expected pairs (s, t) of an element and a translation, such as {example}, got {pairs!r}")
    matrices = {tuple(m.ravel().tolist()): m for m in (group.matrix(s, t) for s, t in pairs)}  # each element once
    elements = [(s, np.array(t)) for s, t in map(group.decode, matrices.values())]
    if not elements:
        raise ValueError(f"pool: expected at least one element (s, t) of {group.name} in the domain, got none")
    reach = np.max([np.abs(group.arrays @ t).max(0) for _, t in elements], axis=0)
    reads = [  # (u s) (t a) = (u + s t) (s a)
        [(int(group.product[s, a]), tuple((m @ t).tolist())) for a, t in elements] for s, m in enumerate(group.arrays)
    ]
    return tuple(reach.tolist()), reads


def planned_pool(group: Group, x: Tensor, plan: Plan, reduce: Reduce = "max") -> Tensor:
    """`pool` over the domain that `plan` was made from."""
    check_reduce(reduce)
    if not is_map(group, x, None, "pool"):
        raise ValueError(f"pool: expected a map on {group.name}, {shape_text(group, 'K')}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"pool: expected floating point numbers, got {x.dtype}; use x.float()")
    reach, reads = plan
    size = x.shape[-group.dim :]
    fill = -torch.inf if reduce == "max" else 0.0
    x = F.pad(mask_outside(group, x, fill), both_sides(reach), value=fill)
    rows = []
    for read in reads:
        starts = [(a, [r + o for r, o in zip(reach, offset, strict=True)]) for a, offset in read]
        windows = [_window(x[:, :, a], start, size, (1,) * group.dim) for a, start in starts]
        rows.append(_fold(windows, reduce, len(read)))  # (N, K, *X)
    y = torch.stack(rows, 2)
    if reduce == "max":
        y = torch.where(_reached(group, plan, size, x.device), y, 0.0)
    return mask_outside(group, y)


def _reached(group: Group, plan: Plan, size: Sequence[int], device: torch.device) -> Tensor:
    """(S, *X): whether a cell's domain has a part inside the map."""
    reach, reads = plan
    inside = F.pad(domain_mask(group, size, device), both_sides(reach))
    shifts = [[[r + o for r, o in zip(reach, offset, strict=True)] for _, offset in read] for read in reads]
    rows = [[_window(inside, start, size, (1,) * group.dim) for start in starts] for starts in shifts]
    return torch.stack([torch.stack(windows).any(0) for windows in rows])


def _check_padding(who: str, group: Group, padding: Size, kernel_size: Size) -> None:
    """Raises a ValueError for windows that may lie in the padding alone."""
    both = zip(as_tuple(group, padding, "padding"), as_tuple(group, kernel_size, "kernel_size"), strict=True)
    if any(2 * p > k for p, k in both):
        raise ValueError(f"{who}: padding (={padding}) must be at most half of kernel_size (={kernel_size})")


def max_pool(
    group: Group,
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    taps: Taps | None = None,
) -> Tensor:
    """Max pooling over space of a map on the plane, the group or its cosets, with the arguments of torch's.

    The window is the support of the kernel: a square for p4, a hexagon for p6. Padding and cells outside a hexagonal
    domain do not count. `taps` are those of `window_taps`, where the caller keeps them.

    >>> from gcnn import p4, p6
    >>> max_pool(p4, torch.rand(2, 3, 4, 8, 8), 2).shape, max_pool(p6, torch.rand(2, 3, 6, 9, 9), 3, 2, 1).shape
    (torch.Size([2, 3, 4, 4, 4]), torch.Size([2, 3, 6, 5, 5]))
    """
    for name, value in (("kernel_size", kernel_size), ("stride", stride), ("padding", padding), ("dilation", dilation)):
        if value is not None:
            check_axes(group, f"max_pool: {name}", as_tuple(group, value, name))
    _check_padding("max_pool", group, padding, kernel_size)
    if group.fills_box:
        pooling: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[group.dim - 1]
        return on_planes(group, x, lambda planes: pooling(planes, kernel_size, stride, padding, dilation))
    taps = taps or window_taps(group, kernel_size)

    def largest(planes: Tensor) -> Tensor:
        return _fold(_windows(group, planes, taps, kernel_size, stride, padding, dilation, -torch.inf), "max")

    return mask_outside(group, on_planes(group, x, largest))


def avg_pool(
    group: Group,
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    count_include_pad: bool = True,
    taps: Taps | None = None,
) -> Tensor:
    """Average pooling over space, as `max_pool`. Cells outside count as zero, or not at all without `count_include_pad`.

    >>> from gcnn import p4
    >>> avg_pool(p4, torch.arange(4.0).reshape(1, 1, 2, 2), 2)
    tensor([[[[1.5000]]]])
    """
    for name, value in (("kernel_size", kernel_size), ("stride", stride), ("padding", padding)):
        if value is not None:
            check_axes(group, f"avg_pool: {name}", as_tuple(group, value, name))
    _check_padding("avg_pool", group, padding, kernel_size)
    if group.fills_box:
        pooling: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[group.dim - 1]
        return on_planes(
            group, x, lambda planes: pooling(planes, kernel_size, stride, padding, count_include_pad=count_include_pad)
        )
    taps = taps or window_taps(group, kernel_size)

    def mean(planes: Tensor) -> Tensor:
        return _fold(_windows(group, planes, taps, kernel_size, stride, padding, 1, 0.0), "mean", len(taps))

    y = on_planes(group, x, mean)
    if not count_include_pad:
        ones = _windows(group, fine(torch.ones_like(x[:1, :1])), taps, kernel_size, stride, padding, 1, 0.0)
        y = (y / _fold(ones, "mean", len(taps)).clamp(min=1 / len(taps))).to(x.dtype)
    return mask_outside(group, y)


def window_taps(group: Group, kernel_size: Size) -> Taps:
    """The cells of a pooling window that the group maps to itself."""
    kernel = as_tuple(group, kernel_size, "kernel_size")
    check_support(group, kernel)
    return [tuple(tap) for tap in np.argwhere(support(group, kernel)).tolist()]


def adaptive_avg_pool(group: Group, x: Tensor, output_size: Size) -> Tensor:
    """Average pooling over space to `output_size`, as torch's; on a hexagonal lattice to one cell, the mean of the domain.

    >>> from gcnn import p6
    >>> adaptive_avg_pool(p6, torch.ones(1, 1, 6, 5, 5), 1).flatten()
    tensor([1., 1., 1., 1., 1., 1.])
    """
    output = as_tuple(group, output_size, "output_size")
    check_axes(group, "adaptive_avg_pool: output_size", output)
    pooling: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[group.dim - 1]
    if not group.fills_box:
        hexagonal = {i for i, _ in group.oblique}
        if any(output[i] != 1 for i in hexagonal):
            raise ValueError(
                f"adaptive_avg_pool: {group.name} does not map boxes to boxes, so output_size must be 1 along axes "
                f"{tuple(sorted(hexagonal))}, got {output}"
            )
        mask = domain_mask(group, x.shape[-group.dim :], x.device)
        numbers = fine(mask_outside(group, x))
        whole = on_planes(group, numbers, lambda planes: pooling(planes, output))  # zeros outside count, so it is too small
        return (whole * (mask.numel() / mask.sum().to(numbers.dtype))).to(x.dtype)
    return on_planes(group, x, lambda planes: pooling(planes, output if group.dim > 1 else output[0]))


def upsample(
    group: Group,
    x: Tensor,
    size: Size | None = None,
    scale_factor: Size | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    tent: Tent | None = None,
) -> Tensor:
    """The map enlarged over space, to `size` or by the whole number `scale_factor`.

    On a hexagonal lattice: by `scale_factor` with mode "linear", linear on each triangle of neighbours, n -> (n - 1) s + 1.
    `tent` is that of `tent_kernel`, where the caller keeps it.

    >>> from gcnn import p4, p6
    >>> upsample(p4, torch.rand(1, 2, 4, 5, 5), scale_factor=2).shape
    torch.Size([1, 2, 4, 10, 10])
    >>> upsample(p6, torch.rand(1, 2, 6, 5, 5), scale_factor=2, mode="linear").shape
    torch.Size([1, 2, 6, 9, 9])
    """
    check_mode(mode)
    for name, value in (("size", size), ("scale_factor", scale_factor)):
        if value is not None:
            check_axes(group, f"upsample: {name}", as_tuple(group, value, name))
    if group.fills_box:
        if size is not None:
            return upsample_to(group, x, as_tuple(group, size, "size"), mode, align_corners)
        factors = as_tuple(group, scale_factor, "scale_factor")
        larger = tuple(n * k for n, k in zip(x.shape[-group.dim :], factors, strict=True))
        return upsample_to(group, x, larger, mode, align_corners, factors)
    if mode != "linear" or scale_factor is None or align_corners is not None:
        raise ValueError(
            f'upsample: on the hexagonal lattice of {group.name} give a scale_factor and mode="linear" alone; '
            "the nearest cell of a hexagonal map is not unique"
        )
    scale = as_tuple(group, scale_factor, "scale_factor")
    kernel = torch.tensor(tent or tent_kernel(group, scale), dtype=x.dtype, device=x.device)
    spread: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[group.dim - 1]
    single = mask_outside(group, x).flatten(0, -group.dim - 1)[:, None]  # (N K S, 1, *X)
    y = spread(single, kernel[None, None], stride=scale, padding=[k - 1 for k in scale])
    return mask_outside(group, y[:, 0].unflatten(0, x.shape[: -group.dim]))


def upsample_to(
    group: Group, x: Tensor, size: tuple[int, ...], mode: str, align_corners: bool | None, factors: tuple[int, ...] | None = None
) -> Tensor:
    """The map enlarged to a size that turns with it, on a lattice whose boxes the group maps to boxes; by `factors`, if known."""
    shape = x.shape[-group.dim :]
    if mode == "nearest" and factors is None:
        if any(m % n for m, n in zip(size, shape, strict=True)):
            raise ValueError(
                f"upsample: nearest neighbours from {tuple(shape)} to {tuple(size)} favour one side; "
                'use a multiple of the size, or mode="linear"'
            )
        factors = tuple(m // n for m, n in zip(size, shape, strict=True))
    theirs = torch_mode(mode, group.dim, max(factors or (1,)))
    return on_planes(group, x, lambda planes: F.interpolate(planes, size, mode=theirs, align_corners=align_corners))


def torch_mode(mode: str, dim: int, factor: float) -> str:
    """What torch calls a way to enlarge by a factor; its "nearest" rounds 1 / 41 and others down, and misses cells."""
    if mode == "nearest":
        return "nearest" if factor <= 32 else "nearest-exact"
    return ("linear", "bilinear", "trilinear")[dim - 1]


def check_mode(mode: str) -> None:
    """Raises a ValueError unless `mode` is a known way to enlarge a map."""
    if mode not in ("nearest", "linear"):
        raise ValueError(f'mode must be "nearest" or "linear", got {mode!r}')


def subsample(
    group: Group, x: Tensor, stride: Size = 1, subgroup: Subgroup | None = None, elements: Sequence[int] | None = None
) -> Tensor:
    """The map on a subgroup: the point elements in `subgroup` (None: all), translations by multiples of `stride` (section 6.3).

    `elements` are the indices of `subgroup`, where the caller keeps them.

    >>> from gcnn import p4m
    >>> f = torch.rand(1, 3, 8, 9, 9)
    >>> subsample(p4m, f, 2).shape, subsample(p4m, f, 2, p4m.subgroup(1)).shape
    (torch.Size([1, 3, 8, 5, 5]), torch.Size([1, 3, 4, 5, 5]))
    """
    steps = as_tuple(group, stride, "stride")
    check_axes(group, "subsample: stride", steps)
    on_group = is_map(group, x, None, "subsample")
    size = x.shape[-group.dim :]
    if any((n - 1) % k for n, k, backwards in zip(size, steps, group.reversed_axes, strict=True) if backwards):
        raise ValueError(
            f"subsample: multiples of stride {steps} are symmetric about the centre only if it divides size - 1, got size "
            f"{tuple(size)}; crop or pad by one, or pool: GAvgPool(group, 2) halves even sizes exactly"
        )
    if subgroup is not None:
        if not on_group:
            raise ValueError(f"subsample: an image has no point elements to restrict to {subgroup!r}, got {tuple(x.shape)}")
        x = torch.stack([x[:, :, s] for s in elements or group.elements_of(subgroup)], 2)
    kept = _window(x, (0,) * group.dim, [(n - 1) // k + 1 for n, k in zip(size, steps, strict=True)], steps)
    return mask_outside(group, kept.clone())  # a view would let in-place layers reach back into x


def restrict(group: Group, x: Tensor, subgroup: Subgroup, members: Members | None = None) -> Tensor:
    """The G-map (N, K, S, *X) as a map on the subgroup H, nothing lost: (N, K S/|H|, |H|, *X), a channel a right coset.

    `members` are those of `right_cosets`, where the caller keeps them.

    >>> from gcnn import p4m
    >>> restrict(p4m, torch.rand(1, 3, 8, 9, 9), p4m.subgroup(1)).shape
    torch.Size([1, 6, 4, 9, 9])
    """
    if not is_map(group, x, None, "restrict"):
        raise ValueError(f"restrict: expected a map on {group.name}, {shape_text(group, 'K')}, got {tuple(x.shape)}")
    return _rearrange(x, members or right_cosets(group, subgroup)).flatten(1, 2)


def _rearrange(x: Tensor, members: Members) -> Tensor:
    """(N, K, S, *X) -> (N, K, cosets, members, *X); slices, since an index tensor would have to follow the device."""
    return torch.stack([x[:, :, s] for coset in members for s in coset], 2).unflatten(2, (len(members), len(members[0])))


def on_planes(group: Group, x: Tensor, operation: Any) -> Tensor:
    """A planar operation applied to each plane of a map; channels and elements stay as they are."""
    if x.ndim not in (group.dim + 2, group.dim + 3):
        raise ValueError(
            f"expected an image {shape_text(group, 'K', None)} or a map {shape_text(group, 'K')} on {group.name}, "
            f"got {tuple(x.shape)}"
        )
    y: Tensor = operation(to_planes(x, group.dim))
    return from_planes(y, x.shape[2]) if x.ndim == group.dim + 3 else y


def _reduce(x: Tensor, axis: int, reduce: Reduce) -> Tensor:
    # amax, unlike max, shares the gradient among equal values, so that backward is equivariant too. Its backward reads the
    # result, which an in-place layer may overwrite: hence the copy
    y = x.amax(axis) if reduce == "max" else x.mean(axis)
    return y.clone() if reduce == "max" and y.requires_grad and not traced() else y


def _fold(windows: list[Tensor], reduce: Reduce, count: int = 1) -> Tensor:
    if reduce == "max" and (windows[0].requires_grad or traced()):  # amax for the reason of `_reduce`
        last = -1 if windows[0].stride(1) == 1 else 1  # in the order in which they lie in memory
        return torch.stack([w.movedim(1, last) for w in windows]).amax(0).movedim(last, 1)
    if reduce == "max":
        return functools.reduce(torch.maximum, windows)
    y = fine(windows[0])
    for w in windows[1:]:
        y = y + w
    return (y / count).to(windows[0].dtype)


def _window(x: Tensor, start: Sequence[int], size: Sequence[int], step: Sequence[int]) -> Tensor:
    cut = [slice(a, a + (n - 1) * k + 1, k) for a, n, k in zip(start, size, step, strict=True)]
    return x[(slice(None),) * (x.ndim - len(cut)) + tuple(cut)]


def _windows(
    group: Group, x: Tensor, taps: Taps, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size, fill: float
) -> list[Tensor]:
    """The shifted copies of x that pooling windows with these taps see."""
    kernel = as_tuple(group, kernel_size, "kernel_size")
    steps = kernel if stride is None else as_tuple(group, stride, "stride")
    pad, dilate = as_tuple(group, padding, "padding"), as_tuple(group, dilation, "dilation")
    x = F.pad(mask_outside(group, x, fill), both_sides(pad), value=fill)
    size = output_size(x.shape[-group.dim :], kernel, steps, (0,) * group.dim, dilate)
    if min(size) < 1:
        span = tuple(d * (k - 1) + 1 for d, k in zip(dilate, kernel, strict=True))
        raise ValueError(
            f"a pooling window of {span} cells does not fit a map of {tuple(x.shape[-group.dim :])} with its padding"
        )
    return [_window(x, [d * u for d, u in zip(dilate, tap, strict=True)], size, steps) for tap in taps]


def tent_kernel(group: Group, scale: Sequence[int]) -> Tent:
    """The interpolation kernel of a hexagonal lattice: 1 at the centre, falling linearly to 0 at the neighbours."""
    u = doubled_coordinates(tuple(2 * k - 1 for k in scale)) // 2  # (*size, d)
    tent = np.ones(u.shape[:-1])
    for axes in group.axis_classes:
        rows = [u[..., i] for i in axes] + [u @ np.array(m) for i, m in group.oblique if i in axes]
        tent *= np.clip(1 - np.abs(rows).max(0) / scale[axes[0]], 0, None)
    kernel: Any = tent.tolist()
    return list(kernel)
