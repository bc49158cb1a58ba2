"""The Fourier algorithm in one kernel, for the tensor cores of a GPU: patches are transformed in registers and never written."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnn.groups import Group
from gcnn.kernels.fourier_cuda import Patches, entries_of, layout

CONFIG = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4}


def correlate(group: Group, planes: Tensor, weight: Tensor, *geometry: tuple[int, ...], config: dict[str, int] | None = None) -> Tensor:
    """Planes (N, S K_in, *X) and filters (K_out, K_in, S P) to planes (N, S K_out, *Y), channels last in memory."""
    patches = Patches(group, planes, *geometry)
    k_out, s = weight.shape[0], group.order
    entries = entries_of(group, weight, geometry[0], planes.dtype)  # (sum of d^2, P K_in K_out)
    out = planes.new_empty(patches.points, s, k_out)
    config = config or CONFIG
    grid = (triton.cdiv(k_out, config["BLOCK_N"]), triton.cdiv(patches.points, config["BLOCK_M"]))
    found = layout(group)
    _fused[grid](
        patches.rows, entries, out, patches.points, patches.k_in, k_out, patches.taps,
        *patches.geometry, *(1,) * (3 - group.dim), *geometry[0],
        found.matrix, found.start, found.dim, found.part, found.entry, matrices(group), s, len(entries), "tf32", **config,
    )  # fmt: skip
    return out.view(planes.shape[0], *patches.size, s * k_out).movedim(-1, 1)


def matrices(group: Group) -> tuple[int, ...]:
    """The elements as integer matrices on three axes, entry by entry."""
    found = np.tile(np.eye(3, dtype=int), (group.order, 1, 1))
    found[:, 3 - group.dim :, 3 - group.dim :] = group.arrays
    return tuple(int(m) for m in found.ravel())


@triton.jit
def _fused(
    x, w, out, points, k_in, k_out, taps,
    x0, x1, x2, y0, y1, y2, step0, step1, step2, pad0, pad1, pad2, dil0, dil1, dil2, n0, n1, n2,
    MATRIX: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, ENTRY: tl.constexpr,
    ELEMENTS: tl.constexpr, S: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c2, rest = row % y2 * step2 - pad2, row // y2
    c1, rest = rest % y1 * step1 - pad1, rest // y1
    c0, image = rest % y0 * step0 - pad0, rest // y0
    sums = ()
    for c in tl.static_range(S):
        sums = sums + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
    blocks = tl.cdiv(k_in, BLOCK_K)
    for step in range(taps * blocks):
        tap, k = step // blocks, step % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        v2, higher = tap % n2 * 2 - (n2 - 1), tap // n2
        v1, v0 = higher % n1 * 2 - (n1 - 1), higher // n1 * 2 - (n0 - 1)
        seen = ()
        for a in tl.static_range(S):
            u0 = c0 + (ELEMENTS[a * 9] * v0 + ELEMENTS[a * 9 + 1] * v1 + ELEMENTS[a * 9 + 2] * v2 + n0 - 1) // 2 * dil0
            u1 = c1 + (ELEMENTS[a * 9 + 3] * v0 + ELEMENTS[a * 9 + 4] * v1 + ELEMENTS[a * 9 + 5] * v2 + n1 - 1) // 2 * dil1
            u2 = c2 + (ELEMENTS[a * 9 + 6] * v0 + ELEMENTS[a * 9 + 7] * v1 + ELEMENTS[a * 9 + 8] * v2 + n2 - 1) // 2 * dil2
            inside = (row < points) & (u0 >= 0) & (u0 < x0) & (u1 >= 0) & (u1 < x1) & (u2 >= 0) & (u2 < x2)
            at = (((image * x0 + u0) * x1 + u1) * x2 + u2) * (S * k_in) + a * k_in
            mask = inside[:, None] & (k < k_in)[None, :]
            seen = seen + (tl.load(x + at[:, None] + k[None, :], mask=mask, other=0.0),)
        hat = ()
        for c in tl.static_range(S):
            total = seen[0].to(tl.float32) * MATRIX[c * S]
            for a in tl.static_range(1, S):
                if MATRIX[c * S + a] != 0.0:
                    total += seen[a].to(tl.float32) * MATRIX[c * S + a]
            hat = hat + (total.to(x.dtype.element_ty),)
        filters = ()
        for e in tl.static_range(ENTRIES):
            source = w + (e * taps + tap) * (k_in * k_out)
            mask = (k < k_in)[:, None] & (column < k_out)[None, :]
            filters = filters + (tl.load(source + k[:, None] * k_out + column[None, :], mask=mask, other=0.0),)
        new = ()
        for c in tl.static_range(S):
            total = sums[c]
            for part in tl.static_range(4):
                if part < DIM[c]:
                    left, right = hat[START[c] + part], filters[ENTRY[c] + part * DIM[c] + PART[c]]
                    total = tl.dot(left, right, total, input_precision=PRECISION)
            new = new + (total,)
        sums = new
    for a in tl.static_range(S):
        total = sums[0] * MATRIX[a]
        for c in tl.static_range(1, S):
            if MATRIX[c * S + a] != 0.0:
                total += sums[c] * MATRIX[c * S + a]
        at = row.to(tl.int64) * (S * k_out) + a * k_out
        kept = (row < points)[:, None] & (column < k_out)[None, :]
        tl.store(out + at[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=kept)
