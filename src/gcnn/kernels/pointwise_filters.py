"""The gradient of the filters of 1x1 layers on GPUs with the tensor cores of Hopper, in Gluon, as `gcnn.kernels.pointwise`.

A program has 64 channels of the map and 64 of the result, and a sum for each entry of the filters' coefficients. Both maps are
transformed on the way to the products, which are of float16 numbers of one size: each channel is multiplied by a power of two.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gcnn.groups import Group
from gcnn.kernels import on_its_gpu, pointwise
from gcnn.kernels.fourier_cuda import tables
from gcnn.kernels.fused import code
from gcnn.kernels.pointwise import (
    CHANNELS,
    LEAST,
    TOP,
    allocated,
    barrier,
    barriers,
    described,
    processors,
    rows_of,
    running,
    summed,
    zeros,
)


def suits(group: Group, dtype: torch.dtype, k_in: int, k_out: int) -> bool:
    """Whether the kernel is made for the gradient of such filters, on the GPU in use.

    Not in bfloat16: it is exact enough, but whether it is the faster one there was not measured.
    """
    return dtype == torch.float32 and pointwise.suits(group, dtype, k_in, k_out)


def seconds(group: Group, dtype: torch.dtype, k_in: int, k_out: int, points: int) -> float:
    """What the gradient of the filters takes there: each tile of channels reads both maps."""
    tiles = math.ceil(k_in / CHANNELS), math.ceil(k_out / CHANNELS)
    maps = points * group.order * dtype.itemsize
    return max(maps * (k_in * tiles[1] + k_out * tiles[0]) / 3.9e12, maps * (k_in + k_out) / 4e12) + 2e-5


@on_its_gpu
def weight_gradient(group: Group, planes: Tensor, dy: Tensor, weight: Tensor, *geometry: tuple[int, ...]) -> Tensor:
    """The same as `gcnn.kernels.fourier_cuda.weight_gradient`, for 1x1 kernels and maps that `suits` allows.

    Programs share the points of a tile of channels, and what they have found is added, always in the same order.
    """
    found = code(group)
    assert found is not None
    constants, (k_out, k_in, _) = found[0], weight.shape
    x, grad = rows_of(planes, group.order), rows_of(dy, group.order)
    entries, block_p = len(constants.first), 16
    tiles, steps = (triton.cdiv(k_in, CHANNELS), triton.cdiv(k_out, CHANNELS)), triton.cdiv(len(x), block_p)
    each = triton.cdiv(steps, max(1, processors(x.get_device()) // (tiles[0] * tiles[1])))
    sums = x.new_empty(triton.cdiv(steps, each), entries, k_in, k_out, dtype=torch.float32)
    box = (group.order, block_p, CHANNELS)
    grid = (*tiles, len(sums))
    _products[grid](
        described(x.movedim(1, 0), box), described(grad.movedim(1, 0), box), sums, k_in, k_out, steps, each,
        constants.steps, constants.coefficients, constants.degree, constants.times, constants.source, constants.target,
        group.order, entries, 2, num_warps=8,
    )  # fmt: skip
    gradient, block = torch.empty_like(weight, memory_format=torch.contiguous_format), 32
    orbit = tables(group, (1,) * group.dim, x.device).orbit
    _filter_gradient[(triton.cdiv(k_in, block), triton.cdiv(k_out, block))](
        sums.sum(0), orbit, gradient, k_out, k_in, found[1], group.order, entries, block
    )
    return gradient


@gluon.jit
def _fetch_points(x, dy, maps, grads, ready, step, start, stop):
    slot, there = (step - start) % maps.shape[0], step < stop
    mbarrier.expect(ready.index(slot), x.block_type.nbytes + dy.block_type.nbytes, there)
    at = [0, step * x.block_shape[1], gl.program_id(0) * x.block_shape[2]]
    tma.async_copy_global_to_shared(x, at, ready.index(slot), maps.index(slot), there)
    at = [0, step * x.block_shape[1], gl.program_id(1) * x.block_shape[2]]
    tma.async_copy_global_to_shared(dy, at, ready.index(slot), grads.index(slot), there)


@gluon.jit
def _of_points(seen, power, EACH: gl.constexpr, STEPS: gl.constexpr, COEFFICIENTS: gl.constexpr):
    """The coefficients of a step's points, the power of two of each channel, and by how many bits it grew."""
    S: gl.constexpr = seen.shape[0]
    BLOCK_P: gl.constexpr = seen.shape[1]
    here = seen.reshape([S * BLOCK_P, seen.shape[2]])
    loaded = ()
    for a in gl.static_range(S):
        loaded = loaded + (here.slice(a * BLOCK_P, BLOCK_P, 0).load(EACH),)
    most = gl.abs(loaded[0])
    for a in gl.static_range(1, S):
        most = gl.maximum(most, gl.abs(loaded[a]))
    new = gl.maximum(gl.max(most, 0).to(gl.int32, bitcast=True) & 0x7F800000, power)
    scale = ((253 << 23) - (new - LEAST)).to(gl.float32, bitcast=True)[None, :]
    numbers = ()
    for a in gl.static_range(S):
        numbers = numbers + (loaded[a] * scale,)
    for i in gl.static_range(len(STEPS) // 3):
        numbers = numbers + (summed(numbers[STEPS[i * 3]], numbers[STEPS[i * 3 + 1]], STEPS[i * 3 + 2]),)
    found = ()
    for c in gl.static_range(S):
        found = found + (numbers[COEFFICIENTS[c]],)
    return found, new, new - power


@gluon.jit
def _products(
    x, dy, out, k_in, k_out, steps, each,
    STEPS: gl.constexpr, COEFFICIENTS: gl.constexpr, DEGREE: gl.constexpr, TIMES: gl.constexpr, SOURCE: gl.constexpr,
    TARGET: gl.constexpr, S: gl.constexpr, ENTRIES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    BLOCK_P: gl.constexpr = x.block_shape[1]
    BLOCK: gl.constexpr = x.block_shape[2]
    across: gl.constexpr = gl.num_warps() // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, across], [16, BLOCK // across, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    cols: gl.constexpr = gl.SliceLayout(0, layout)
    read: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, gl.num_warps()], [1, 0])  # the points of a channel in one warp
    maps = gl.allocate_shared_memory(x.dtype, [SLOTS, S, BLOCK_P, BLOCK], x.layout)
    grads = gl.allocate_shared_memory(x.dtype, [SLOTS, S, BLOCK_P, BLOCK], x.layout)
    map_hats, grad_hats = allocated(gl.float16, S, 1, BLOCK_P, BLOCK), allocated(gl.float16, S, 1, BLOCK_P, BLOCK)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    map_grew = gl.allocate_shared_memory(gl.int32, [BLOCK], vector)
    grad_grew = gl.allocate_shared_memory(gl.int32, [BLOCK], vector)
    ready = barriers(SLOTS, 1)
    fence_async_shared()
    barrier()
    start = gl.program_id(2) * each
    stop = gl.minimum(start + each, steps)
    for n in gl.static_range(SLOTS):
        _fetch_points(x, dy, maps, grads, ready, start + n, start, stop)
    sums = zeros(ENTRIES, BLOCK, BLOCK, layout)
    map_power = gl.full([BLOCK], LEAST, gl.int32, gl.SliceLayout(0, read))
    grad_power = gl.full([BLOCK], LEAST, gl.int32, gl.SliceLayout(0, read))
    for step in range(start, stop):
        slot = (step - start) % SLOTS
        mbarrier.wait(ready.index(slot), (step - start) // SLOTS & 1)
        seen, map_power, grew = _of_points(maps.index(slot), map_power, read, STEPS, COEFFICIENTS)
        wanted, grad_power, grew_too = _of_points(grads.index(slot), grad_power, read, STEPS, COEFFICIENTS)
        numbers = warpgroup_mma_wait(0, sums)
        barrier()  # all have read this slot, and done the last products
        for c in gl.static_range(S):
            map_hats[c].index(0).store(seen[c].to(gl.float16))
            grad_hats[c].index(0).store(wanted[c].to(gl.float16))
        map_grew.store(grew)
        grad_grew.store(grew_too)
        fence_async_shared()
        barrier()
        less = gl.maximum((127 << 23) - map_grew.load(rows), 0).to(gl.float32, bitcast=True)[:, None]
        less = less * gl.maximum((127 << 23) - grad_grew.load(cols), 0).to(gl.float32, bitcast=True)[None, :]
        changed = ()
        for e in gl.static_range(ENTRIES):
            changed = changed + (numbers[e] * less,)
        sums = running(changed)
        for e in gl.static_range(ENTRIES):
            for n in gl.static_range(S):
                if n < TIMES[e]:
                    x_hat = map_hats[SOURCE[e] + n * DEGREE[e]].index(0).permute((1, 0))
                    product = warpgroup_mma(x_hat, grad_hats[TARGET[e] + n * DEGREE[e]].index(0), sums[e], is_async=True)
                    sums = _replaced(sums, e, product)
        _fetch_points(x, dy, maps, grads, ready, step + SLOTS, start, stop)
    numbers = warpgroup_mma_wait(0, sums)
    row = (gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, rows))[:, None]
    col = (gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, cols))[None, :]
    by_row = (gl.convert_layout(map_power, rows) - TOP).to(gl.float32, bitcast=True)[:, None]
    by_col = (gl.convert_layout(grad_power, cols) - TOP).to(gl.float32, bitcast=True)[None, :]
    for e in gl.static_range(ENTRIES):
        at = ((gl.program_id(2) * ENTRIES + e) * k_in + row) * k_out + col
        gl.store(out + at, numbers[e] * by_col * by_row, mask=(row < k_in) & (col < k_out))


@gluon.jit
def _replaced(numbers, WHICH: gl.constexpr, new):
    changed = ()
    for i in gl.static_range(len(numbers)):
        if i == WHICH:
            changed = changed + (new,)
        else:
            changed = changed + (numbers[i],)
    return changed


@triton.jit
def _filter_gradient(
    sums, orbit, out, k_out, k_in, MATRIX: tl.constexpr, S: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (i < k_in) & (o < k_out)
    values = ()
    for e in tl.static_range(ENTRIES):
        values = values + (tl.load(sums + (e * k_in + i).to(tl.int64) * k_out + o, mask=inside, other=0.0),)
    for b in tl.static_range(S):
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for e in tl.static_range(ENTRIES):
            if MATRIX[e * S + b] != 0.0:
                total += values[e] * MATRIX[e * S + b]
        at = (o.to(tl.int64) * k_in + i) * S + tl.load(orbit + b)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
