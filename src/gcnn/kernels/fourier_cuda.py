"""The Fourier algorithm on a GPU (see `gcnn.kernels.fourier`): transforms in Triton, products there or by cuBLAS.

Coefficients of representations of one dimension and type, a run, are kept together, so that each run is one batched product:
patches (n, d / kind B, d P K_in) times filters (n, d K_out, d P K_in), for n representations and a block of B points. Channels
are filled up with zeros to 16 bytes, so that every row begins where vectors can be read.

Exact float32 products run on tensor cores: a number is split in two of TF32, of 11 bits each, and three of the four products of
the halves are added up. Every 32 terms begin a new sum, since tensor cores cut off what does not fit: the errors are smaller than
those of float32 arithmetic, and the time is half.

In TF32 tensor cores cut off the bits that do not fit, of both factors, which makes every product too small. So the kernels that
write patches and filters round them to the nearest before. On an H200 the largest error beside cuDNN's, where it rounds too (D4
with 16 channels), went from 2.6 times to 1.6 by it: in the one kernel of `gcnn.kernels.fused` only the filters are rounded.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnn.groups import Group
from gcnn.indices import index_table
from gcnn.irreps import fourier_matrix, irreps
from gcnn.kernels import Setting, on_its_gpu
from gcnn.kernels.fourier import empty_planes, make_plan
from gcnn.layout import allows_tf32, as_tensor, output_size, precision_of_products

BLOCK = 1 << 28  # bytes of patches worked on at a time, or as many as the planes have


class Run(NamedTuple):
    """Representations of one dimension and type, one after the other."""

    number: int
    dim: int
    rows: int
    """d / kind."""
    first: int
    """The first of their coefficients."""
    entry: int
    """The first entry of their matrices, of all."""


class Layout(NamedTuple):
    """Where coefficients lie, as constants for the kernels."""

    runs: tuple[Run, ...]
    matrix: tuple[float, ...]
    """The Fourier transform, row by row."""
    start: tuple[int, ...]
    """Of each coefficient: rows of B before it, times B."""
    dim: tuple[int, ...]
    part: tuple[int, ...]
    filters: tuple[float, ...]
    """The entries rho(b)[k, l] of each representation, ordered by l, then k, for each b."""
    first: tuple[int, ...]
    """Of each entry: the first entry of its run."""
    number: tuple[int, ...]
    """Of each entry: which representation of its run."""
    column: tuple[int, ...]
    """l of each entry."""
    row: tuple[int, ...]
    """k of each entry."""
    degree: tuple[int, ...]


@lru_cache(maxsize=128)
def layout(group: Group) -> Layout:
    """The layout for a group, cached."""
    runs, at = [], 0
    start: list[int] = []
    dims: list[int] = []
    part: list[int] = []
    entries: list[tuple[int, int, int, int, int]] = []  # first, number, column, row, degree
    for (dim, kind), same in groupby(irreps(group), key=lambda rho: (rho.dim, rho.kind)):
        count = len(list(same))
        runs.append(Run(count, dim, dim // kind, at, len(entries)))
        for i in range(count * dim // kind):
            start += [at + i * dim] * dim
            dims += [dim] * dim
            part += range(dim)
        at += count * dim * dim // kind
        entries += [(len(entries), i, column, row, dim) for i in range(count) for column in range(dim) for row in range(dim)]
    matrices = np.concatenate([rho.matrices.transpose(2, 1, 0).reshape(-1, group.order) for rho in irreps(group)])
    constants = [tuple(0.0 if abs(m) < 1e-12 else float(m) for m in array.ravel()) for array in (fourier_matrix(group), matrices)]
    return Layout(tuple(runs), constants[0], tuple(start), tuple(dims), tuple(part), constants[1], *zip(*entries, strict=True))


class Tables(NamedTuple):
    """What depends on the group and the kernel alone, on a device."""

    cells: Tensor
    """(S, P, 3): the cell of the kernel box where a v lies."""
    orbit: Tensor
    """(S, P): which stored number is w(b, b v)."""
    adjoint_orbit: Tensor
    """The same for the adjoint correlation."""
    table: Tensor
    inverse: Tensor
    """Those of `gcnn.indices.index_table`."""


@cache  # never given up: CUDA graphs read them where they lie
def tables(group: Group, kernel_size: tuple[int, ...], device: torch.device) -> Tables:
    """The tables, cached: the callers see to it that no mode of torch is at work that would spoil them for others."""
    with torch.inference_mode(False):
        plan = make_plan(group, kernel_size)
        cells = np.stack(np.unravel_index(plan.cells, (1,) * (3 - group.dim) + kernel_size), -1).astype(np.int32)
        planar = index_table(group, kernel_size, group.check_subgroup(None))
        arrays = (cells, plan.orbit, plan.adjoint[plan.orbit], *planar)
        return Tables(*(as_tensor(a, device) for a in arrays))


def _set_products(value: Any) -> None:
    setattr(torch.backends.cuda.matmul, "allow_tf32" if isinstance(value, bool) else "fp32_precision", value)


def _wanted() -> Any:
    tf32, now = allows_tf32(), precision_of_products()
    if tf32 == (now in (True, "tf32")):
        return now  # it may also be "none", which is not TF32
    return tf32 if isinstance(now, bool) else "tf32" if tf32 else "ieee"


PRECISION = Setting(precision_of_products, _set_products, _wanted)  # products in TF32 where `allows_tf32` says so


class Patches:
    """What every point of the result sees of the planes, block by block, transformed over the point group."""

    def __init__(
        self,
        group: Group,
        planes: Tensor,
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
    ) -> None:
        self.layout, self.cells = layout(group), tables(group, kernel_size, planes.device).cells
        self.rows = planes.movedim(1, -1).contiguous()  # (N, *X, S K_in)
        self.order, self.taps, _ = self.cells.shape
        self.k_in = planes.shape[1] // self.order
        self.size = output_size(planes.shape[2:], kernel_size, stride, padding, dilation)
        self.points = planes.shape[0] * math.prod(self.size)
        self.unit = 16 // planes.element_size()
        self.k = filled_up(self.k_in, self.unit)
        flat = (1,) * (3 - group.dim)  # axes that are not there
        none = (0,) * (3 - group.dim)
        self.geometry = (*flat, *planes.shape[2:], *flat, *self.size, *flat, *stride, *none, *padding, *flat, *dilation)
        self.width = self.taps * self.k
        bytes_ = self.order * self.width * planes.element_size()
        self.block = min(self.points, max(256, max(BLOCK, planes.numel() * planes.element_size()) // bytes_))

    def blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of each block of points."""
        return [(i, min(i + self.block, self.points)) for i in range(0, self.points, self.block)]

    def transformed(self, start: int, stop: int, out: Tensor) -> list[Tensor]:
        """One (n, d / kind B, d P K_in) for each run, in the memory of `out`."""
        block_m, block_k = tile(self.order, self.k)
        grid = (triton.cdiv(stop - start, block_m) * self.taps * triton.cdiv(self.k, block_k),)
        _patches[grid](
            self.rows, out, self.cells, start, stop - start, self.k_in, self.k // self.unit, self.taps, *self.geometry,
            self.layout.matrix, self.layout.start, self.layout.dim, self.layout.part,
            self.order, self.unit, rounds(self.rows), wide(self.rows), block_m, block_k,
        )  # fmt: skip
        return self.split(out, stop - start, self.width)

    def split(self, numbers: Tensor, points: int, width: int) -> list[Tensor]:
        """S coefficients of `points` points and `width` numbers, run by run."""
        found = []
        for run in self.layout.runs:
            size = run.number * run.rows * run.dim * points * width
            found.append(numbers[run.first * points * width :][:size].view(run.number, run.rows * points, run.dim * width))
        return found


@on_its_gpu
def correlate(group: Group, planes: Tensor, weight: Tensor, *geometry: tuple[int, ...], adjoint: bool = False) -> Tensor:
    """Planes (N, S K_in, *X) and filters (K_out, K_in, S P) to planes (N, S K_out, *Y), channels last in memory.

    Or, by the adjoint of the filters, from K_out channels to K_in.
    """
    patches = Patches(group, planes, *geometry)
    k_out, s = weight.shape[1 if adjoint else 0], group.order
    exact = exact_by_halves(planes)
    filters = transform_filters(group, weight, geometry[0], planes.dtype, adjoint, exact)
    result, out = empty_planes(planes, patches.size, s, k_out)
    hat = planes.new_empty(s * patches.block * patches.width)
    filled = filled_up(k_out, patches.unit)
    product = planes.new_empty(s * patches.block * filled)
    block_m, block_k = tile(s, k_out)
    by_run = [filters_of(run, filters[0], filled, patches.width) for run in patches.layout.runs]
    with PRECISION:
        for start, stop in patches.blocks():
            results = patches.split(product, stop - start, filled)
            for x, w, y in zip(patches.transformed(start, stop, hat), by_run, results, strict=True):
                if exact:
                    exact_product(x, w, y, filters.shape[1])
                else:
                    torch.bmm(x, w.mT, out=y)
            grid = (triton.cdiv(stop - start, block_m), triton.cdiv(k_out, block_k))
            _restore[grid](
                product, out[start:stop], stop - start, k_out, filled // patches.unit,
                patches.layout.matrix, patches.layout.start, patches.layout.dim, patches.layout.part,
                s, patches.unit, wide(planes), block_m, block_k,
            )  # fmt: skip
    return result


@on_its_gpu
def weight_gradient(group: Group, planes: Tensor, dy: Tensor, weight: Tensor, *geometry: tuple[int, ...]) -> Tensor:
    """The gradient of the filters (K_out, K_in, S P)."""
    patches = Patches(group, planes, *geometry)
    ones, zeros = (1,) * group.dim, (0,) * group.dim
    results = Patches(group, dy, ones, ones, zeros, ones)  # what a point sees of the gradient is its own value
    k_out, k_in, s = weight.shape[0], weight.shape[1], group.order
    fine = torch.promote_types(planes.dtype, torch.float32)
    coded = patches.layout
    sums = torch.zeros(len(coded.first) * patches.width * results.k, dtype=fine, device=dy.device)
    by_run = [filters_of(run, sums, patches.width, results.k) for run in coded.runs]
    hat = planes.new_empty(s * patches.block * patches.width)
    grad = planes.new_empty(s * patches.block * results.k)
    with PRECISION:
        for start, stop in patches.blocks():
            seen, wanted = patches.transformed(start, stop, hat), results.transformed(start, stop, grad)
            for total, x, y in zip(by_run, seen, wanted, strict=True):
                add_product(total, x, y)
    gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
    block = min(128, triton.next_power_of_2(k_out))
    _filter_gradient[(k_in, patches.taps, triton.cdiv(k_out, block))](
        sums, tables(group, geometry[0], dy.device).orbit, gradient, k_out, k_in, patches.taps, patches.k, results.k,
        coded.filters, coded.first, coded.number, coded.column, coded.row, coded.degree, s, wide(sums), block,
    )  # fmt: skip
    return gradient


def transform_filters(
    group: Group,
    weight: Tensor,
    kernel_size: tuple[int, ...],
    dtype: torch.dtype,
    adjoint: bool,
    exact: bool,
    entries: tuple[float, ...] = (),
) -> Tensor:
    """(K_out, K_in, S P) to one (n, d K_out, d P K_in) for each run, in one row of numbers, with channels filled up.

    Those of the adjoint correlation have K_in and K_out exchanged. For `exact` products there is a second row: the first has
    the numbers rounded to TF32, the second what is left of them. `entries` may stand for those of the representations.
    """
    found, coded, weight = tables(group, kernel_size, weight.device), layout(group), weight.contiguous()
    (k_out, k_in, stored), taps = weight.shape, weight.shape[2] // group.order
    o_step, i_step = (stored, k_in * stored) if adjoint else (k_in * stored, stored)
    k_out, k_in = (k_in, k_out) if adjoint else (k_out, k_in)
    unit = 16 // dtype.itemsize
    rows, columns = filled_up(k_out, unit), filled_up(k_in, unit)
    filters = weight.new_empty(2 if exact else 1, len(coded.first) * taps * rows * columns, dtype=dtype)
    block = min(128, triton.next_power_of_2(columns))
    _filters[(rows, taps, triton.cdiv(columns, block))](
        weight, found.adjoint_orbit if adjoint else found.orbit, filters, filters.shape[1], k_out, k_in, o_step, i_step, taps,
        columns // unit, entries or coded.filters, coded.first, coded.number, coded.column, coded.row, coded.degree,
        group.order, unit, exact, rounds(filters), wide(weight), block,
    )  # fmt: skip
    return filters


def filters_of(run: Run, filters: Tensor, rows: int, length: int) -> Tensor:
    """(n, d K_out, d P K_in) of a run, of filters whose matrices are (K_out, P K_in)."""
    size = run.dim**2 * rows * length
    return filters[run.entry * rows * length :][: run.number * size].view(run.number, run.dim * rows, run.dim * length)


def filled_up(channels: int, unit: int) -> int:
    """The channels that are kept of so many: whole units, of 16 bytes."""
    return -(-channels // unit) * unit


def rounds(x: Tensor) -> bool:
    """Whether products of such numbers are to be of TF32, on a GPU that has them."""
    return x.dtype == torch.float32 and allows_tf32() and _has_tf32(x.device)


@lru_cache(maxsize=16)
def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # Triton's interpreter
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def exact_by_halves(x: Tensor) -> bool:
    """Whether products of such numbers are to be exact in float32, on a GPU whose tensor cores and shared memory suffice."""
    return x.dtype == torch.float32 and not allows_tf32() and _large(x.device)


@lru_cache(maxsize=16)
def _large(device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # Triton's interpreter
    return torch.version.hip is None and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))


def exact_product(x: Tensor, w: Tensor, out: Tensor, step: int) -> None:
    """Sets out to x w^T in float32, for (n, M, L) and (n, N, L); `step` numbers after w lies what its rounding left."""
    (number, m, depth), n = x.shape, w.shape[1]
    block_n = min(128, max(16, triton.next_power_of_2(n)))
    grid = (triton.cdiv(m, 128) * triton.cdiv(n, block_n), number)
    _exact_product[grid](x, w, out, m, n, depth // 4, step, 128, block_n, 32, num_warps=8 if block_n > 64 else 4, num_stages=3)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Adds x^T y to the total, for (n, B, M) and (n, B, N), always in the same order.

    In exact float32 cuBLAS leaves most of a GPU idle if M and N are small: then the B points are divided among programs, whose
    sums are added.
    """
    (number, points, m), n = x.shape, y.shape[2]
    block_n = 64 if n > 32 else 32
    tiles = triton.cdiv(m, 128) * triton.cdiv(n, block_n)
    if tiles * number > 132 or not exact_by_halves(x):
        if total.dtype == x.dtype:
            total.baddbmm_(x.mT, y)
        else:
            total += torch.bmm(x.mT, y)
        return
    each = triton.cdiv(triton.cdiv(points, min(32, 528 // (tiles * number))), 32) * 32
    sums = total.new_empty(triton.cdiv(points, each), *total.shape)
    grid = (tiles, number, len(sums))
    _exact_products[grid](x, y, sums, points, m // 4, n // 4, each, 128, block_n, 32, num_warps=4, num_stages=3)
    total += sums.sum(0)


def tile(order: int, channels: int) -> tuple[int, int]:
    """Points and channels of one program, so that S numbers for each fit the registers of 128 threads."""
    numbers = 128 * max(1, min(8, 64 // triton.next_power_of_2(order)))
    block_k = min(64, numbers, triton.next_power_of_2(channels))
    return numbers // block_k, block_k


def wide(x: Tensor) -> Any:
    """The dtype in which the kernels add."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _patches(
    x, out, cells, first, count, k_in, units, taps,
    x0, x1, x2, y0, y1, y2, step0, step1, step2, pad0, pad1, pad2, dil0, dil1, dil2,
    MATRIX: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, S: tl.constexpr, UNIT: tl.constexpr,
    TF32: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    filled = units * UNIT  # channels, with the zeros behind them
    blocks = tl.cdiv(filled, BLOCK_K)  # neighbours in the grid are the taps of the same points, which share what they read
    which, within = tl.program_id(0) // (blocks * taps), tl.program_id(0) % (blocks * taps)
    tap, k = within // blocks, within % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    row = which * BLOCK_M + tl.arange(0, BLOCK_M)
    point = first + row
    c2, rest = point % y2 * step2 - pad2, point // y2
    c1, rest = rest % y1 * step1 - pad1, rest // y1
    c0, image = rest % y0 * step0 - pad0, rest // y0
    values = ()
    for a in tl.static_range(S):
        cell = cells + (a * taps + tap) * 3
        u0 = c0 + tl.load(cell) * dil0
        u1 = c1 + tl.load(cell + 1) * dil1
        u2 = c2 + tl.load(cell + 2) * dil2
        inside = (row < count) & (u0 >= 0) & (u0 < x0) & (u1 >= 0) & (u1 < x1) & (u2 >= 0) & (u2 < x2)
        at = (((image * x0 + u0) * x1 + u1) * x2 + u2).to(tl.int64) * (S * k_in) + a * k_in
        seen = tl.load(x + at[:, None] + k[None, :], mask=inside[:, None] & (k < k_in)[None, :], other=0.0)
        values = values + (seen.to(WIDE),)
    width = taps * filled
    kept = (row < count)[:, None] & (k < filled)[None, :]
    for c in tl.static_range(S):
        total = tl.zeros((BLOCK_M, BLOCK_K), WIDE)
        for a in tl.static_range(S):
            if MATRIX[c * S + a] != 0.0:
                total += values[a] * MATRIX[c * S + a]
        if TF32:
            total = _to_tf32(total)
        at = (START[c] * count + row * DIM[c] + PART[c]).to(tl.int64) * width + tap * filled
        tl.store(out + at[:, None] + k[None, :], total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _restore(
    y, out, count, k_out, units,
    MATRIX: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
    S: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    kept = (row < count)[:, None] & (k < k_out)[None, :]
    values = ()
    for c in tl.static_range(S):
        at = (START[c] * count + row * DIM[c] + PART[c]).to(tl.int64) * (units * UNIT)
        values = values + (tl.load(y + at[:, None] + k[None, :], mask=kept, other=0.0).to(WIDE),)
    for a in tl.static_range(S):
        total = tl.zeros((BLOCK_M, BLOCK_K), WIDE)
        for c in tl.static_range(S):
            if MATRIX[c * S + a] != 0.0:
                total += values[c] * MATRIX[c * S + a]
        at = row.to(tl.int64) * (S * k_out) + a * k_out
        tl.store(out + at[:, None] + k[None, :], total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _nearest(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)  # of TF32


@triton.jit
def _to_tf32(x):
    return tl.where(x == x, _nearest(x), x)  # the bits of NaN may overflow


@triton.jit
def _exact_product(x, w, out, m, n, fours, step, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    length = fours * 4
    tiles, which = tl.cdiv(n, BLOCK_N), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    from_x = x + which * m * length + row.to(tl.int64)[:, None] * length + at[None, :]
    from_w = w + which * n * length + column.to(tl.int64)[None, :] * length + at[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, length, BLOCK_K):
        inside = start + at < length
        a = tl.load(from_x, mask=(row < m)[:, None] & inside[None, :], other=0.0)
        high = tl.load(from_w, mask=inside[:, None] & (column < n)[None, :], other=0.0)
        low = tl.load(from_w + step, mask=inside[:, None] & (column < n)[None, :], other=0.0)
        a_high = _nearest(a)
        part = tl.dot(a - a_high, high, input_precision="tf32")
        part = tl.dot(a_high, low, part, input_precision="tf32")
        total += tl.dot(a_high, high, part, input_precision="tf32")
        from_x += BLOCK_K
        from_w += BLOCK_K
    to = out + which * m * n + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, total, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def _exact_products(
    x, y, sums, points, m_fours, n_fours, each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    m, n = m_fours * 4, n_fours * 4
    tiles, which, part = tl.cdiv(n, BLOCK_N), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = part * each, tl.minimum(part * each + each, points)
    at = first + tl.arange(0, BLOCK_K)
    from_x = x + which * points * m + at.to(tl.int64)[None, :] * m + row[:, None]
    from_y = y + which * points * n + at.to(tl.int64)[:, None] * n + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        inside = start + tl.arange(0, BLOCK_K) < last
        a = tl.load(from_x, mask=(row < m)[:, None] & inside[None, :], other=0.0)
        b = tl.load(from_y, mask=inside[:, None] & (column < n)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32x3")
        from_x += BLOCK_K * m
        from_y += BLOCK_K * n
    to = sums + (part * tl.num_programs(1) + which) * m * n + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, total, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def _filters(
    weight, orbit, out, half, k_out, k_in, o_step, i_step, taps, units,
    MATRIX: tl.constexpr, FIRST: tl.constexpr, NUMBER: tl.constexpr, COLUMN: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    S: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, o, tap = tl.num_programs(0), tl.program_id(0), tl.program_id(1)
    columns = units * UNIT
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    values = ()
    for b in tl.static_range(S):
        at = o.to(tl.int64) * o_step + i.to(tl.int64) * i_step + tl.load(orbit + b * taps + tap)
        values = values + (tl.load(weight + at, mask=(i < k_in) & (o < k_out), other=0.0).to(WIDE),)
    for e in tl.static_range(len(FIRST)):
        total = tl.zeros((BLOCK,), WIDE)
        for b in tl.static_range(S):
            if MATRIX[e * S + b] != 0.0:
                total += values[b] * MATRIX[e * S + b]
        row = FIRST[e] * rows + ((NUMBER[e] * DIM[e] + ROW[e]) * rows + o) * DIM[e] + COLUMN[e]
        at = (row.to(tl.int64) * taps + tap) * columns + i
        if EXACT:
            high = _nearest(total)
            tl.store(out + at, high, mask=i < columns)
            tl.store(out + at + half, total - high, mask=i < columns)
        else:
            if TF32:
                total = _to_tf32(total)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=i < columns)


@triton.jit
def _filter_gradient(
    sums, orbit, out, k_out, k_in, taps, filled_in, filled_out,
    MATRIX: tl.constexpr, FIRST: tl.constexpr, NUMBER: tl.constexpr, COLUMN: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    S: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, tap = tl.program_id(0), tl.program_id(1)
    o = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    values = ()
    for e in tl.static_range(len(FIRST)):
        row = ((NUMBER[e] * DIM[e] + COLUMN[e]) * taps + tap) * filled_in + i
        at = (FIRST[e] * taps * filled_in + row * DIM[e] + ROW[e]).to(tl.int64) * filled_out + o
        values = values + (tl.load(sums + at, mask=o < k_out, other=0.0),)
    for b in tl.static_range(S):
        total = tl.zeros((BLOCK,), WIDE)
        for e in tl.static_range(len(FIRST)):
            if MATRIX[e * S + b] != 0.0:
                total += values[e] * MATRIX[e * S + b]
        at = (o.to(tl.int64) * k_in + i) * (S * taps) + tl.load(orbit + b * taps + tap)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=o < k_out)
