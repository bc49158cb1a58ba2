"""The Fourier algorithm in one kernel, for narrow maps on GPUs with the tensor cores of Hopper: no patch is written to memory.

A program has 64 points and some channels of the result, and one sum for each coefficient. For each tap it reads what its points
see, S small tiles, transforms them in registers, and multiplies on tensor cores; the last thing it does is the transform back.
The transforms are sums and differences of two numbers alone, since the matrices of these groups have entries 0, 1 and -1: their
factors are multiplied into the filters.

Every block of channels of the result reads the map again. So maps that are wide are left to `gcnn.kernels.fourier_cuda`.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnn.groups import Group, IntArray
from gcnn.irreps import fourier_matrix
from gcnn.kernels import on_its_gpu
from gcnn.kernels.fourier import empty_planes
from gcnn.kernels.fourier_cuda import Patches, filled_up, layout, transform_filters
from gcnn.layout import allows_tf32

POINTS = 64  # of a program: what one instruction of the tensor cores takes


class Code(NamedTuple):
    """A group as constants for the kernel."""

    turns: tuple[int, ...]
    """Matrices of three rows and columns, row by row."""
    steps: tuple[int, ...]
    """The transform, step by step (see `butterflies`)."""
    coefficients: tuple[int, ...]
    """Which number is each coefficient."""
    back: tuple[int, ...]
    """The transform back, step by step."""
    elements: tuple[int, ...]
    """Which number belongs to each element."""
    first: tuple[int, ...]
    """Of each entry of the filters' matrices: its place among all matrices that begin with its row."""
    column: tuple[int, ...]
    degree: tuple[int, ...]
    times: tuple[int, ...]
    """How many coefficients the entry multiplies."""
    source: tuple[int, ...]
    """The first of those, each of which is `degree` after the one before."""
    target: tuple[int, ...]
    """Where the first product belongs."""


@lru_cache(maxsize=64)
def code(group: Group) -> tuple[Code, tuple[float, ...]] | None:
    """The group's constants, and the entries of its representations with all factors; None where it takes more than sums."""
    turns = np.tile(np.eye(3, dtype=int), (group.order, 1, 1))
    turns[:, 3 - group.dim :, 3 - group.dim :] = group.arrays
    matrix = fourier_matrix(group)
    factors = np.abs(matrix).max(1)
    signs = np.rint(matrix / factors[:, None]).astype(int)
    if not 1 < group.order <= 8 or (np.abs(turns).sum(2) != 1).any() or not np.allclose(signs * factors[:, None], matrix):
        return None
    known = layout(group)
    runs = [next(run for run in known.runs if run.entry == first) for first in known.first]
    entries = list(zip(runs, known.number, known.row, known.column, strict=True))
    source = [run.first + number * run.rows * run.dim + column for run, number, _, column in entries]
    target = [run.first + number * run.rows * run.dim + row for run, number, row, _ in entries]
    first = [run.entry + (number * run.dim + row) * run.dim for run, number, row, _ in entries]
    rows = tuple(run.rows for run in runs)
    forth, back = butterflies(signs), butterflies(signs.T)
    constants = (tuple(turns.ravel().tolist()), *forth, *back, tuple(first), known.column, known.degree, rows)
    scaled = np.array(known.filters).reshape(len(first), -1) * (factors[source] ** 2)[:, None]
    return Code(*constants, tuple(source), tuple(target)), tuple(scaled.ravel().tolist())


def butterflies(signs: IntArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Steps that make the rows' sums of numbers, whose signs are 0, 1 or -1, and the numbers that are these sums at the end.

    A step is i, j, sign: the next number is the i-th plus or minus the j-th, and the negative of the i-th if the sign is 0.

    >>> butterflies(np.array([[1, 1, 1], [1, 1, -1]]))
    ((0, 1, 1, 2, 3, 1, 3, 2, -1), (4, 5))
    """
    rows = [{i: int(sign) for i, sign in enumerate(row) if sign} for row in signs]
    steps: list[tuple[int, int, int]] = []
    while any(len(row) > 1 for row in rows):
        pairs = Counter((i, j, row[i] * row[j]) for row in rows for i in row for j in row if i < j)
        i, j, sign = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))  # what most rows need
        users = [row for row in rows if i in row and j in row and row[i] * row[j] == sign]
        if sign < 0 and all(row[i] < 0 for row in users):
            i, j = j, i
        for row in users:
            row[signs.shape[1] + len(steps)] = row.pop(i)
            del row[j]
        steps.append((i, j, sign))
    for row in rows:
        [(last, sign)] = row.items()
        if sign < 0:
            row.clear()
            row[signs.shape[1] + len(steps)] = 1
            i, j, between = steps[last - signs.shape[1]]
            steps.append((j, i, -1) if between < 0 else (last, last, 0))
    return tuple(n for step in steps for n in step), tuple(next(iter(row)) for row in rows)


def suits(group: Group, dtype: torch.dtype, k_in: int, taps: int) -> bool:
    """Whether the kernel is made for such maps, on the GPU in use."""
    unit = 8 if dtype == torch.bfloat16 else 4 if dtype == torch.float32 and allows_tf32() else 0
    return bool(unit) and k_in % unit == 0 and taps < 32 and code(group) is not None and on_hopper()


def on_hopper() -> bool:
    """Whether the GPU in use is one of that generation."""
    return _hopper(torch.cuda.current_device())


@lru_cache(maxsize=16)
def _hopper(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def channels(order: int) -> int:
    """Channels of the result that one program has."""
    return 32 if order > 4 else 64


def seconds(group: Group, dtype: torch.dtype, k_in: int, k_out: int, taps: int, points: int) -> float:
    """What the kernel takes on an H200: programs read maps and filters from the cache, the map is read and written once."""
    found, block = code(group), channels(group.order)
    assert found is not None
    step = 64 // dtype.itemsize
    read = (
        taps * math.ceil(k_in / step) * step * math.ceil(k_out / block) * (1 + len(found[0].first) / group.order * block / POINTS)
    )
    return points * group.order * dtype.itemsize * (read / 6.6e12 + (k_in + k_out) / 8e12) + 5e-6


@on_its_gpu
def correlate(group: Group, planes: Tensor, weight: Tensor, *geometry: tuple[int, ...], adjoint: bool = False) -> Tensor:
    """The same as `gcnn.kernels.fourier_cuda.correlate`, for maps that `suits` allows."""
    found = code(group)
    assert found is not None
    patches = Patches(group, planes, *geometry)
    k_out, s, size = weight.shape[1 if adjoint else 0], group.order, geometry[0]
    filters = transform_filters(group, weight, size, planes.dtype, adjoint, False, found[1])
    result, out = empty_planes(planes, patches.size, s, k_out)
    block_k, block_n = 64 // planes.element_size(), channels(s)
    packed = planes.dtype == torch.bfloat16 and planes.is_cuda
    _correlate[(triton.cdiv(patches.points, POINTS) * triton.cdiv(k_out, block_n),)](
        patches.rows, filters, out, patches.points, patches.k_in // patches.unit, k_out, filled_up(k_out, patches.unit),
        *patches.geometry, (1,) * (3 - group.dim) + size, *found[0],
        s, patches.unit, packed, patches.k_in % block_k == 0, POINTS, block_k, block_n, num_warps=4,
    )  # fmt: skip
    return result


@triton.jit
def _correlate(
    x, w, out, count, units, k_out, rows,
    x0, x1, x2, y0, y1, y2, step0, step1, step2, pad0, pad1, pad2, dil0, dil1, dil2,
    KERNEL: tl.constexpr, TURNS: tl.constexpr, STEPS: tl.constexpr, COEFFICIENTS: tl.constexpr, BACK: tl.constexpr,
    ELEMENTS: tl.constexpr, FIRST: tl.constexpr, COLUMN: tl.constexpr, DEGREE: tl.constexpr, TIMES: tl.constexpr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, S: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n0: tl.constexpr = KERNEL[0]
    n1: tl.constexpr = KERNEL[1]
    n2: tl.constexpr = KERNEL[2]
    taps: tl.constexpr = n0 * n1 * n2
    k_in, tiles = units * UNIT, tl.cdiv(k_out, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k, at_k_too = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_K)[:, None]
    c2, rest = row % y2 * step2 - pad2, row // y2
    c1, rest = rest % y1 * step1 - pad1, rest // y1
    c0, image = rest % y0 * step0 - pad0, rest // y0
    seen = tl.zeros((BLOCK_M,), tl.int32)  # a bit for each cell of the kernel: whether it lies within the image
    for cell in range(taps):
        u0, u1, u2 = c0 + cell // (n1 * n2) * dil0, c1 + cell // n2 % n1 * dil1, c2 + cell % n2 * dil2
        inside = (row < count) & (u0 >= 0) & (u0 < x0) & (u1 >= 0) & (u1 < x1) & (u2 >= 0) & (u2 < x2)
        seen |= inside.to(tl.int32) << cell
    sees = seen[:, None] | tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    at = (((image * x0 + c0) * x1 + c1) * x2 + c2).to(tl.int64)
    from_x = x + at[:, None] * (S * k_in) + at_k
    from_w, there = w + at_k_too, (o < k_out)[None, :]
    sums = ()
    for _ in tl.static_range(S):
        sums = sums + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
    for step in tl.range(taps * tl.cdiv(k_in, BLOCK_K), num_stages=3):
        tap, k = step % taps, step // taps * BLOCK_K
        v0, v1, v2 = tap // (n1 * n2) * 2 - (n0 - 1), tap // n2 % n1 * 2 - (n1 - 1), tap % n2 * 2 - (n2 - 1)  # doubled
        numbers = ()
        for a in tl.static_range(S):
            u0 = (TURNS[a * 9] * v0 + TURNS[a * 9 + 1] * v1 + TURNS[a * 9 + 2] * v2 + n0 - 1) // 2
            u1 = (TURNS[a * 9 + 3] * v0 + TURNS[a * 9 + 4] * v1 + TURNS[a * 9 + 5] * v2 + n1 - 1) // 2
            u2 = (TURNS[a * 9 + 6] * v0 + TURNS[a * 9 + 7] * v1 + TURNS[a * 9 + 8] * v2 + n2 - 1) // 2
            inside = sees >> ((u0 * n1 + u1) * n2 + u2) & 1 != 0
            if not EVEN:
                inside = inside & (k + at_k < k_in)
            by = ((u0 * dil0 * x1 + u1 * dil1) * x2 + u2 * dil2) * (S * k_in) + a * k_in + k
            numbers = numbers + (tl.load(from_x + by, mask=inside, other=0.0),)
        for i in tl.static_range(len(STEPS) // 3):
            numbers = numbers + (_sum(numbers[STEPS[i * 3]], numbers[STEPS[i * 3 + 1]], STEPS[i * 3 + 2], PACKED),)
        for e in tl.static_range(len(FIRST)):
            inside = there
            if not EVEN:
                inside = inside & (k + at_k_too < k_in)
            by = ((FIRST[e] * rows + COLUMN[e]) * taps + tap) * k_in + k
            filters = tl.load(from_w + (o * (DEGREE[e] * taps * k_in))[None, :] + by, mask=inside, other=0.0)
            for i in tl.static_range(S):
                if i < TIMES[e]:
                    x_hat, y_hat = numbers[COEFFICIENTS[SOURCE[e] + i * DEGREE[e]]], sums[TARGET[e] + i * DEGREE[e]]
                    y_hat = tl.dot(x_hat, filters, y_hat, input_precision="tf32")
                    sums = _replaced(sums, TARGET[e] + i * DEGREE[e], y_hat)
    for i in tl.static_range(len(BACK) // 3):
        sums = sums + (_sum(sums[BACK[i * 3]], sums[BACK[i * 3 + 1]], BACK[i * 3 + 2], False),)
    kept = (row < count)[:, None] & there
    for a in tl.static_range(S):
        to = out + row.to(tl.int64)[:, None] * (S * k_out) + a * k_out + o[None, :]
        tl.store(to, sums[ELEMENTS[a]].to(out.dtype.element_ty), mask=kept)


@triton.jit
def _replaced(numbers, WHICH: tl.constexpr, new):
    changed = ()
    for i in tl.static_range(len(numbers)):
        if i == WHICH:
            changed = changed + (new,)
        else:
            changed = changed + (numbers[i],)
    return changed


@triton.jit
def _sum(x, y, SIGN: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:  # two numbers at a time
        if SIGN > 0:
            z = tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.bfloat16, True, 2)
        elif SIGN < 0:
            z = tl.inline_asm_elementwise("sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.bfloat16, True, 2)
        else:
            z = tl.inline_asm_elementwise("neg.bf16x2 $0, $1;", "=r,r", [x], tl.bfloat16, True, 2)
    elif SIGN > 0:
        z = x + y
    elif SIGN < 0:
        z = x - y
    else:
        z = -x
    return z
