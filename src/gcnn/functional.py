"""Functions on groups and the G-correlation as pure functions of tensors (paper, sections 4.4, 5, 6 and 7).

A feature map is a plain tensor: (N, K, S, *X) on the group, (N, K, S/|H|, *X) on the cosets of a subgroup H, (N, K, *X) on
the plane. Space is centred: a point element turns a map about the middle of its array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.checks import Size, as_tuple, check_axes, is_map, shape_text
from gcnn.groups import Group, Subgroup
from gcnn.indices import doubled_coordinates, index_table, places, support
from gcnn.kernels import compiled, planar
from gcnn.kernels.expand import expand_filters
from gcnn.kernels.fourier import Algorithm, choose, fourier_gcorr
from gcnn.lattice import check_domain, kept_domain, mask_outside
from gcnn.layout import as_tensor, autocasts, fast_form, from_planes, output_size, spread, to_planes, traced
from gcnn.pooling import adaptive_avg_pool, avg_pool, coset_pool, max_pool, pool, restrict, subsample, upsample

__all__ = [
    "act",
    "adaptive_avg_pool",
    "avg_pool",
    "correlate",
    "coset_pool",
    "gconv",
    "gcorr",
    "involution",
    "max_pool",
    "planar_gcorr",
    "planar_gcorr_transpose",
    "pool",
    "restrict",
    "subsample",
    "transform_filter",
    "upsample",
]


def act(group: Group, h: int, x: Tensor, t: Sequence[int] | None = None, stabilizer: Subgroup | None = None) -> Tensor:
    """L_g x for g = t h: the map turned by the point element `h` about its centre, then shifted by `t` (section 4.4).

    Works on planes (N, K, *X), on G-maps (N, K, S, *X), and on maps over the cosets of `stabilizer`. Cells that come from
    outside the array are zero. Where `h` exchanges axes of different length, the result has them exchanged, like torch.rot90.

    >>> from gcnn import p4
    >>> image = torch.arange(6.).reshape(1, 1, 2, 3)
    >>> act(p4, 1, image)[0, 0]
    tensor([[2., 5.],
            [1., 4.],
            [0., 3.]])
    """
    if not isinstance(group, Group) or not isinstance(x, Tensor):
        raise TypeError(
            f"act(group, h, x): expected a Group, an element and a tensor, got {type(group).__name__}, {type(h).__name__}, "
            f"{type(x).__name__}"
        )
    group.check_element(h)
    stabilizer = group.check_subgroup(stabilizer)
    t = (0,) * group.dim if t is None else tuple(t)
    if len(t) != group.dim or not all(float(u).is_integer() for u in t):
        raise ValueError(f"act: {group.name} translates by {group.dim} integers, got t = {t}")
    if is_map(group, x, stabilizer, "act"):
        sources = group.coset_action(stabilizer)[group.inverse[h]]  # (S_in,): label of h^-1 c
        x = x.index_select(2, as_tensor(sources, x.device))
    size = tuple(int(n) for n in x.shape[-group.dim :])
    matrix = group.arrays[h]
    exchanges = bool((np.abs(matrix).sum(1) == 1).all())
    out = tuple(int(n) for n in np.abs(matrix) @ size) if exchanges else size
    points = (doubled_coordinates(out) - 2 * np.array(t, dtype=np.int64)) @ group.arrays[group.inverse[h]].T  # h^-1 (u - t)
    if not exchanges:
        check_domain("act", group, size)
    return _take(x, places(points, size), group.dim)


def involution(group: Group, x: Tensor) -> Tensor:
    """f*(g) = f(g^-1) for a map on the group (N, K, S, *X); on a plane (N, K, *X) the point reflection f(-u) (eq. 6).

    >>> from gcnn import p4
    >>> f = torch.rand(1, 1, 4, 5, 5)
    >>> bool((involution(p4, involution(p4, f)) == f).all())
    True
    """
    size = tuple(int(n) for n in x.shape[-group.dim :])
    check_domain("involution", group, size)
    points = doubled_coordinates(size)
    if not is_map(group, x, None, "involution"):
        return _take(x, places(-points, size), group.dim)
    check_axes(group, "involution: the size of the map", size)
    planes = [  # (t s)^-1 = (-s^-1 t) s^-1
        _take(x[:, :, group.inverse[s]], places(-points @ group.arrays[group.inverse[s]].T, size), group.dim)
        for s in range(group.order)
    ]
    return torch.stack(planes, 2)


def gcorr(
    group: Group,
    x: Tensor,
    psi: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    stabilizer: Subgroup | None = None,
    algorithm: Algorithm = "auto",
) -> Tensor:
    """The G-correlation [f * psi](g) = sum_h sum_k f_k(h) psi_k(g^-1 h), h over the domain of f (eq. 10 and 11).

    `x` is an image (N, K_in, *X), a G-map (N, K_in, S, *X) or a map over the cosets of `stabilizer`; `psi` is a stack of
    filters on the same domain, (K_out, K_in / groups, *n) or (K_out, K_in / groups, S_in, *n). The result is a G-map
    (N, K_out, S, *Y), whose size follows the rules of torch's convolutions. On a hexagonal lattice the taps of `psi`
    outside the hexagon do not count. `algorithm` as for `correlate`.

    >>> from gcnn import p4m
    >>> gcorr(p4m, torch.rand(2, 3, 9, 9), torch.rand(5, 3, 3, 3)).shape
    torch.Size([2, 5, 8, 7, 7])
    """
    stabilizer = group.check_subgroup(stabilizer)
    on_group = is_map(group, x, stabilizer, "gcorr")
    if psi.ndim != x.ndim:
        raise ValueError(f"gcorr: expected filters on the domain of x, {x.ndim} axes like x, got psi {tuple(psi.shape)}")
    whole = tuple(range(group.order))
    cosets = group.check_subgroup(stabilizer if on_group else whole)
    kernel_size = tuple(int(n) for n in psi.shape[-group.dim :])
    check_axes(group, "gcorr: the size of psi", kernel_size)
    for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        if not isinstance(value, str):
            check_axes(group, f"gcorr: {name}", as_tuple(group, value, name))
    mask = support(group, kernel_size).ravel()
    weight = psi.flatten(-group.dim)  # (K_out, K_in / groups, [S_in,] n^d)
    if not mask.all():
        weight = weight[..., as_tensor(np.flatnonzero(mask), psi.device)]
    weight = weight.flatten(2)  # (K_out, K_in / groups, S_in P)
    return correlate(group, x, weight, bias, kernel_size, stride, padding, dilation, groups, cosets, None, algorithm)


def gconv(group: Group, x: Tensor, psi: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The G-convolution sum_h sum_k f_k(h) psi_k(h^-1 g) of G-maps: the G-correlation with the involution of psi.

    `options` are those of `gcorr`. Both maps live on the group itself; on other domains h^-1 g has no meaning.

    >>> from gcnn import p4
    >>> x, psi = torch.rand(1, 2, 4, 9, 9), torch.rand(3, 2, 4, 3, 3)
    >>> torch.equal(gconv(p4, x, psi), gcorr(p4, x, involution(p4, psi)))
    True
    """
    if x.ndim != group.dim + 3 or psi.ndim != group.dim + 3:
        raise ValueError(
            f"gconv: expected maps on the group, (N, K, {group.order}, ...), got x {tuple(x.shape)} and psi {tuple(psi.shape)}; "
            "gcorr also takes images"
        )
    return gcorr(group, x, involution(group, psi), bias, **options)


def transform_filter(
    group: Group,
    weight: Tensor,
    kernel_size: Sequence[int],
    stabilizer: Subgroup | None = None,
    tables: tuple[Tensor | None, ...] | None = None,
    groups: int = 1,
    channels_last: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The filters (K_out, K_in, S_in P) under every element, as a planar bank (S K_out, S_in K_in, *n) (section 7.1).

    Planes are ordered element by element, as those of `gcnn.layout.to_planes`; with `groups`, group by group first. P counts the
    taps of the support of the kernel, S_in the cosets of `stabilizer`. `tables` are those of `gcnn.indices.index_table` as
    tensors on the weight's device, where the caller keeps them; else they are looked up. The bank comes in `dtype` (the
    weight's if not given), and in torch's memory format channels_last if asked for.

    >>> from gcnn import p4
    >>> transform_filter(p4, torch.rand(10, 5, 4 * 9), (3, 3)).shape
    torch.Size([40, 20, 3, 3])
    """
    table, inverse, *_ = _check_tables(group, weight, kernel_size, stabilizer, tables)
    bank = expand_filters(weight, table, inverse, math.prod(kernel_size), groups, channels_last, dtype or weight.dtype)
    return planar.in_space(bank, tuple(kernel_size), channels_last)


def _check_tables(
    group: Group, weight: Tensor, kernel_size: Sequence[int], stabilizer: Subgroup | None, tables: Any
) -> planar.Tables:
    """The tables of the filter transformation, looked up if they are not given, with an error unless they fit the weight."""
    if tables is None:
        found = index_table(group, tuple(kernel_size), group.check_subgroup(stabilizer))
        tables = tuple(as_tensor(table, weight.device) for table in found)
    table, inverse, *rows = tables  # (S, S_in n^d), (S, S_in P)
    if weight.ndim != 3 or weight.shape[2] != inverse.shape[1]:
        raise ValueError(
            f"transform_filter: {group.name} with kernel_size {tuple(kernel_size)} expects a weight "
            f"(K_out, K_in, {inverse.shape[1]}), got {tuple(weight.shape)}"
        )
    if table.device != weight.device:  # a gather with an index on the meta device would return garbage
        raise ValueError(f"transform_filter: the weight is on {weight.device}, its tables are on {table.device}")
    return tables if rows else (table, inverse, None, None)


def correlate(
    group: Group,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_size: tuple[int, ...],
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    stabilizer: Subgroup | None = None,
    tables: tuple[Tensor | None, ...] | None = None,
    algorithm: Algorithm = "auto",
    depthwise: bool = False,
) -> Tensor:
    """The G-correlation with stored filters (K_out, K_in / groups, S_in P), by one of two algorithms with the same result.

    "planar" expands the filters to a planar bank (section 7); "fourier" multiplies functions on the point group by their Fourier
    transforms, which takes fewer multiplications (`gcnn.kernels.fourier`); "auto" takes the faster one. Images and maps over
    cosets gain nothing by "fourier", which spreads them over the group first. What traces or transforms functions
    (torch.export, torch.func), and torch.autocast on CPUs, always see the planar one. `depthwise` filters (K_out, 1, P) lie on
    the plane, turn with the element that they see, and take channel by channel of a map.

    >>> from gcnn import p4m
    >>> x, weight = torch.rand(1, 2, 8, 5, 5), torch.rand(3, 2, 8 * 9)
    >>> one, other = (correlate(p4m, x, weight, None, (3, 3), algorithm=a) for a in ("planar", "fourier"))
    >>> torch.allclose(one, other, atol=1e-4)
    True
    """
    check_algorithm(algorithm)
    steps = stride if isinstance(stride, tuple) else as_tuple(group, stride, "stride")
    spread_by = dilation if isinstance(dilation, tuple) else as_tuple(group, dilation, "dilation")
    pads = padding if isinstance(padding, tuple) else whole_padding(group, kernel_size, steps, padding, spread_by)
    if tables is None:  # layers have looked already
        stabilizer = None if depthwise else group.check_subgroup(stabilizer)
        for name, value in (("stride", steps), ("padding", padding), ("dilation", spread_by), ("kernel_size", kernel_size)):
            if not isinstance(value, str):
                check_axes(group, f"correlate: {name}", as_tuple(group, value, name))
        on_group, within = is_map(group, x, stabilizer, "correlate"), stabilizer or (0,)
        if not on_group and len(within) < group.order:
            cosets = group.order // len(within)
            raise ValueError(
                f"correlate: expected a map {shape_text(group, 'K', cosets)} for filters on {cosets} elements, got "
                f"{tuple(x.shape)}; use x.unflatten(1, (-1, {cosets})) for planes, or, if their elements come first, "
                f"x.unflatten(1, ({cosets}, -1)).transpose(1, 2); stabilizer=range({group.order}) for an image"
            )
    if groups < 1:
        raise ValueError(f"correlate: groups must be a positive whole number, got {groups}")
    k_in = x.shape[1]
    seen = 1 if depthwise else k_in // groups
    if weight.ndim == 3 and (weight.shape[1] != seen or k_in % groups or (depthwise and len(weight) % k_in)):
        asked_for = "depthwise filters" if depthwise else f"filters for {k_in} channels in groups (={groups})"
        raise ValueError(
            f"correlate: expected {asked_for}, ({f'a multiple of {k_in}' if depthwise else 'K_out'}, {seen}, ...), got "
            f"{tuple(weight.shape)} for x {tuple(x.shape)}; K_in / groups is the second axis of the filters"
        )
    if depthwise:
        algorithm, stabilizer = "planar", range(group.order)
    tracing = traced()
    asked = algorithm  # what a compiled call decides by when it runs
    algorithm = "planar" if tracing else choose(group, x, weight, algorithm, groups, steps)
    channels_last, dtype = fast_form(group, x, weight)
    if autocasts(x.device.type):
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if algorithm == "planar":
        checked = _check_tables(group, weight, kernel_size, stabilizer, tables)
        plan = planar.Plan(checked, kernel_size, steps, pads, spread_by, groups, depthwise, channels_last, dtype)
        if tracing and compiled.opaque(x):
            return mask_outside(group, compiled.correlate(mask_outside(group, x), weight, bias, plan, group, asked))
        domains = None if group.fills_box else _domains(group, x, plan)
        if tracing or not (group.fills_box or domains):
            return mask_outside(group, planar.by_parts(mask_outside(group, x), weight, bias, plan))
        return planar.correlate(x, weight, bias, plan, domains)
    if x.ndim != group.dim + 3 or x.shape[2] != group.order:
        # a function on cosets is one on the group that is constant on each of them
        within = group.check_subgroup(stabilizer)
        labels = as_tensor(np.array(group.cosets(within)), x.device)
        x = (x if x.ndim == group.dim + 3 else x.unsqueeze(2)).index_select(2, labels)
        shares = weight.unflatten(2, (group.order // len(within), -1)).index_select(2, labels)
        weight = shares.flatten(2) / len(within)
    _check_fit(x, weight, bias, kernel_size, steps, pads, spread_by, groups)
    x = mask_outside(group, x)
    # no chunk of one group: its gradient would be a copy
    parts = [(x, weight)] if groups == 1 else zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
    planes = [fourier_gcorr(group, to_planes(m, group.dim), w, kernel_size, steps, pads, spread_by) for m, w in parts]
    y = from_planes(planes[0], group.order) if groups == 1 else torch.cat([from_planes(p, group.order) for p in planes], 1)
    if bias is not None:
        y = y + bias.view(-1, *(1,) * (group.dim + 1))
    return mask_outside(group, y)


def _domains(group: Group, x: Tensor, plan: planar.Plan) -> planar.Domains | None:
    """The domains of a map on a hexagonal lattice and of what its correlation will be; None where they cannot be kept."""
    space = x.shape[-group.dim :]
    size = output_size(space, plan.kernel_size, plan.stride, plan.padding, plan.dilation)
    before = kept_domain(group, space, x)
    after = kept_domain(group, size, x) if min(size) > 0 else None
    return None if before is None or after is None else (before, after)


def _check_fit(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> None:
    """Raises a ValueError for what torch's convolutions would refuse."""
    k_out = weight.shape[0]
    if k_out % groups:
        raise ValueError(f"expected a number of filters that groups (={groups}) divides, got {k_out}")
    alike = x.dtype == weight.dtype or autocasts(x.device.type)
    if not x.is_floating_point() or not alike or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"expected a map, filters and a bias of one floating point dtype, got {x.dtype} and {weight.dtype}")
    if bias is not None and bias.shape != (k_out,):
        raise ValueError(f"expected a bias ({k_out},), got {tuple(bias.shape)}")
    if min(stride) < 1 or min(dilation) < 1:
        raise ValueError(f"stride (={stride}) and dilation (={dilation}) must be at least 1")
    if min(padding) < 0:
        raise ValueError(f"padding (={padding}) must be at least 0")
    spans = [d * (n - 1) + 1 for d, n in zip(dilation, kernel_size, strict=True)]
    size = tuple(x.shape[-len(kernel_size) :])
    if any(n + 2 * p < span for n, p, span in zip(size, padding, spans, strict=True)):
        raise ValueError(f"a kernel of {tuple(spans)} cells does not fit a map of {size} padded by {padding}")


def whole_padding(
    group: Group, kernel_size: tuple[int, ...], stride: tuple[int, ...], padding: Size | str, dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """The padding in whole numbers, where it is given as "same" or "valid"."""
    if not isinstance(padding, str):
        return as_tuple(group, padding, "padding")
    if padding not in ("same", "valid"):
        raise ValueError(f'padding must be whole numbers, "same" or "valid", got {padding!r}')
    if padding == "same" and max(stride) > 1:
        raise ValueError(f'padding "same" needs stride 1, got {stride}')
    spans = [d * (n - 1) for d, n in zip(dilation, kernel_size, strict=True)]
    if padding == "same" and any(span % 2 for span in spans):
        raise ValueError(
            f'padding "same" with the even kernel_size (={kernel_size}) pads one side more than the other, which is not '
            "equivariant; use an odd kernel, or whole numbers for padding"
        )
    return tuple(span // 2 if padding == "same" else 0 for span in spans)


def check_algorithm(algorithm: str) -> None:
    """Raises a ValueError unless `algorithm` is a known one."""
    if algorithm not in ("auto", "planar", "fourier"):
        raise ValueError(f'algorithm must be "auto", "planar" or "fourier", got {algorithm!r}')


def planar_gcorr(
    group: Group,
    x: Tensor,
    bank: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """The second half of the algorithm: one planar correlation of `x` with an expanded bank (section 7.2).

    >>> from gcnn import p4
    >>> bank = transform_filter(p4, torch.rand(3, 2, 4 * 9), (3, 3))
    >>> planar_gcorr(p4, torch.rand(1, 2, 4, 5, 5), bank).shape
    torch.Size([1, 3, 4, 3, 3])
    """
    steps, spread_by = as_tuple(group, stride, "stride"), as_tuple(group, dilation, "dilation")
    pads = whole_padding(group, tuple(bank.shape[2:]), steps, padding, spread_by)
    for name, value in (("stride", steps), ("padding", pads), ("dilation", spread_by)):
        check_axes(group, f"planar_gcorr: {name}", value)
    planes = to_planes(mask_outside(group, x), group.dim, groups)  # (N, S_in K_in, *X)
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[group.dim - 1]
    y = convolve(planes, bank, spread(bias, group.order, groups), steps, pads, spread_by, groups)
    return mask_outside(group, from_planes(y, group.order, groups))  # (N, K_out, S, *Y)


def planar_gcorr_transpose(
    group: Group,
    x: Tensor,
    bank: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """The adjoint of `planar_gcorr` in `x`, from G-map to G-map, plus a bias: a transposed planar convolution.

    >>> from gcnn import p4
    >>> bank = transform_filter(p4, torch.rand(3, 2, 4 * 9), (3, 3))
    >>> x, y = torch.rand(1, 2, 4, 5, 5), torch.rand(1, 3, 4, 3, 3)
    >>> torch.allclose((planar_gcorr(p4, x, bank) * y).sum(), (x * planar_gcorr_transpose(p4, y, bank)).sum())
    True
    """
    for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        check_axes(group, f"planar_gcorr_transpose: {name}", as_tuple(group, value, name))
    planes = to_planes(mask_outside(group, x), group.dim, groups)  # (N, S K_in, *X)
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[group.dim - 1]
    y = convolve(planes, bank, spread(bias, group.order, groups), stride, padding, 0, groups, dilation)
    return mask_outside(group, from_planes(y, group.order, groups))  # (N, K_out, S, *Y)


def _take(x: Tensor, source: Any, dim: int) -> Tensor:
    """`x` with its last `dim` axes read at the flat positions `source`; 0 where those are -1."""
    y = x.flatten(-dim).index_select(-1, as_tensor(source.clip(0).ravel(), x.device)).unflatten(-1, source.shape)
    return y.masked_fill(as_tensor(source < 0, x.device), 0) if (source < 0).any() else y
