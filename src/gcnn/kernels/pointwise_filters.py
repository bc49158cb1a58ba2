"""The gradient of the filters of 1x1 layers on GPUs with the tensor cores of Hopper, in Gluon, as `gcnn.kernels.pointwise`.

A program has 64 channels of the map and 64 of the result, and a sum for each entry of the filters' coefficients. Both maps are
transformed on the way to the products, by four warps each, while eight others multiply: the four products of a representation of
two dimensions are one. Where products are of TF32, they are of float16 numbers of one size: each channel is multiplied by a power
of two, that of the points seen so far. Coefficients of bfloat16 maps are rounded once.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
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
from gcnn.kernels import on_its_gpu
from gcnn.kernels.fourier import make_plan
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
from gcnn.kernels.pointwise import suits as suits  # made for the same layers


def seconds(group: Group, dtype: torch.dtype, k_in: int, k_out: int, points: int) -> float:
    """What the gradient of the filters takes on an H200: each tile of channels reads both maps, mostly from the cache."""
    tiles = math.ceil(k_in / CHANNELS) * math.ceil(k_out / CHANNELS)
    rate = 5.2e12 if dtype == torch.bfloat16 else 4.8e12
    return 2 * points * group.order * dtype.itemsize * CHANNELS * tiles / rate + 1e-5


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
    grid, room = (*tiles, len(sums)), (2, 2) if x.dtype == torch.float32 else (5, 2)  # for steps of maps, of coefficients
    _products[grid](
        described(x.movedim(1, 0), box), described(grad.movedim(1, 0), box), sums, k_in, k_out, steps, each,
        constants.steps, constants.coefficients, group.order, constants.degree.count(1),
        *room, num_warps=4, maxnreg=128,
    )  # fmt: skip
    return from_sums(group, sums, weight)


def from_sums(group: Group, sums: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the filters from sums (programs, entries, K_in, K_out), which are added up."""
    k_out, k_in = weight.shape[:2]
    gradient, blocks = torch.empty_like(weight, memory_format=torch.contiguous_format), (4, 8, 16)
    _filter_gradient[(triton.cdiv(k_in, blocks[1]), triton.cdiv(k_out, blocks[2]))](
        sums, gradient, k_out, k_in, len(sums), _matrix(group), group.order, sums.shape[1], *blocks, num_warps=8
    )
    return gradient


@lru_cache(maxsize=64)
def _matrix(group: Group) -> tuple[float, ...]:
    """What each entry counts for each number of a filter, in the order in which filters are stored."""
    found = code(group)
    assert found is not None
    orbit = make_plan(group, (1,) * group.dim).orbit.ravel()
    return tuple(np.array(found[1]).reshape(-1, group.order)[:, orbit.argsort()].ravel().tolist())


@gluon.jit
def _products(
    x, dy, out, k_in, k_out, steps, each,
    STEPS: gl.constexpr, COEFFICIENTS: gl.constexpr, S: gl.constexpr, SINGLES: gl.constexpr, MAPS: gl.constexpr,
    HATS: gl.constexpr,
):  # fmt: skip
    BLOCK_P: gl.constexpr = x.block_shape[1]
    BLOCK: gl.constexpr = x.block_shape[2]
    KIND: gl.constexpr = gl.float16 if x.dtype == gl.float32 else x.dtype
    TIMES: gl.constexpr = (S - SINGLES) // 2  # of the representation of two dimensions, of which there is one at most
    maps = gl.allocate_shared_memory(x.dtype, [MAPS, S, BLOCK_P, BLOCK], x.layout)
    grads = gl.allocate_shared_memory(x.dtype, [MAPS, S, BLOCK_P, BLOCK], x.layout)
    map_hats = allocated(KIND, S, HATS, BLOCK_P, BLOCK)
    grad_hats = allocated(KIND, SINGLES, HATS, BLOCK_P, BLOCK) + allocated(KIND, TIMES, HATS, BLOCK_P, 2 * BLOCK)
    map_powers, grad_powers = _powers(HATS, BLOCK), _powers(HATS, BLOCK)
    maps_ready, grads_ready, hats_ready, hats_free = barriers(MAPS, 1), barriers(MAPS, 1), barriers(HATS, 2), barriers(HATS, 2)
    fence_async_shared()
    barrier()
    start = gl.program_id(2) * each
    stop = gl.minimum(start + each, steps)
    gl.warp_specialize([
        (_multiply, (x, maps, maps_ready, out, map_hats, grad_hats, map_powers, grad_powers, hats_ready, hats_free, start, stop,
                     k_in, k_out, 0, SINGLES, TIMES)),
        (_multiply, (dy, grads, grads_ready, out, map_hats, grad_hats, map_powers, grad_powers, hats_ready, hats_free, start,
                     stop, k_in, k_out, 1, SINGLES, TIMES)),
        (_transform, (maps, map_hats, map_powers, maps_ready, hats_ready, hats_free, start, stop, SINGLES, STEPS, COEFFICIENTS)),
        (_transform, (grads, grad_hats, grad_powers, grads_ready, hats_ready, hats_free, start, stop, SINGLES, STEPS,
                      COEFFICIENTS)),
    ], [4, 4, 4], [168, 88, 88])  # fmt: skip  # registers: sums take 128


@gluon.jit
def _powers(HATS: gl.constexpr, BLOCK: gl.constexpr):
    """The power of two of each channel at each step, and by how many bits it grew: twice, for two side by side."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    now = gl.allocate_shared_memory(gl.int32, [HATS, 2 * BLOCK], layout)
    return now, gl.allocate_shared_memory(gl.int32, [HATS, 2 * BLOCK], layout)


@gluon.jit
def _transform(maps, hats, powers, ready, hats_ready, hats_free, start, stop, SINGLES: gl.constexpr, STEPS: gl.constexpr,
               COEFFICIENTS: gl.constexpr):  # fmt: skip
    """Four warps that transform one of the maps."""
    slots: gl.constexpr = maps.shape[0]
    S: gl.constexpr = maps.shape[1]
    BLOCK_P: gl.constexpr = maps.shape[2]
    BLOCK: gl.constexpr = maps.shape[3]
    others: gl.constexpr = hats[0].shape[0]
    SCALED: gl.constexpr = maps.dtype == gl.float32
    down: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 4], [0, 1])  # the points of a channel in one warp
    along: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    layout: gl.constexpr = down if SCALED else along
    power = gl.full([BLOCK], LEAST, gl.int32, gl.SliceLayout(0, layout))
    for step in range(start, stop):
        slot, other, turn = (step - start) % slots, (step - start) % others, (step - start) // others
        mbarrier.wait(ready.index(slot), (step - start) // slots & 1)
        here = maps.index(slot).reshape([S * BLOCK_P, BLOCK])
        loaded = ()
        for a in gl.static_range(S):
            loaded = loaded + (here.slice(a * BLOCK_P, BLOCK_P, 0).load(layout),)
        scale = 1.0
        if SCALED:
            most = gl.abs(loaded[0])
            for a in gl.static_range(1, S):
                most = gl.maximum(most, gl.abs(loaded[a]))
            new = gl.maximum(gl.max(most, 0).to(gl.int32, bitcast=True) & 0x7F800000, power)
            scale = ((253 << 23) - (new - LEAST)).to(gl.float32, bitcast=True)[None, :]
        numbers = ()
        for a in gl.static_range(S):
            numbers = numbers + (loaded[a].to(gl.float32) * scale,)
        for i in gl.static_range(len(STEPS) // 3):
            numbers = numbers + (summed(numbers[STEPS[i * 3]], numbers[STEPS[i * 3 + 1]], STEPS[i * 3 + 2]),)
        mbarrier.wait(hats_free.index(other), (turn & 1) ^ 1)
        for c in gl.static_range(len(hats)):
            if c < SINGLES or len(hats) == S:
                found = numbers[COEFFICIENTS[c]]
            else:
                found = gl.join(numbers[COEFFICIENTS[2 * c - SINGLES]], numbers[COEFFICIENTS[2 * c - SINGLES + 1]])
                found = found.permute((0, 2, 1)).reshape([BLOCK_P, 2 * BLOCK])
            hats[c].index(other).store(found.to(hats[c].dtype))
        if SCALED:
            for half in gl.static_range(2):
                powers[0].index(other).slice(half * BLOCK, BLOCK).store(new)
                powers[1].index(other).slice(half * BLOCK, BLOCK).store(new - power)
            power = new
        fence_async_shared()
        mbarrier.arrive(hats_ready.index(other), count=1)


@gluon.jit
def _fetch(x, maps, ready, slot, step, stop, AXIS: gl.constexpr):
    """Has a copy engine bring a step of one of the maps."""
    there = step < stop
    mbarrier.expect(ready.index(slot), x.block_type.nbytes, there)
    at = [0, step * x.block_shape[1], gl.program_id(AXIS) * x.block_shape[2]]
    tma.async_copy_global_to_shared(x, at, ready.index(slot), maps.index(slot), there)


@gluon.jit
def _multiply(
    x, maps, maps_ready, out, map_hats, grad_hats, map_powers, grad_powers, ready, free, start, stop, k_in, k_out,
    WHICH: gl.constexpr, SINGLES: gl.constexpr, TIMES: gl.constexpr,
):  # fmt: skip
    """Four warps: the products of half of the coefficients, and at the end their sums. They have one of the maps fetched, too."""
    BLOCK: gl.constexpr = map_hats[0].shape[2]
    slots: gl.constexpr = maps.shape[0]
    SCALED: gl.constexpr = map_hats[0].dtype == gl.float16
    PAIRS: gl.constexpr = 1 if TIMES > 0 else 0
    HALF: gl.constexpr = SINGLES // 2
    others: gl.constexpr = map_hats[0].shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK, 16])
    whole: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0])  # all channels in each warp
    for n in gl.static_range(slots):
        _fetch(x, maps, maps_ready, n, start + n, stop, WHICH)
    sums = zeros(HALF, BLOCK, BLOCK, layout) + zeros(PAIRS, BLOCK, 2 * BLOCK, wide)
    for step in range(start, stop):
        slot, turn = (step - start) % others, (step - start) // others
        mbarrier.wait(ready.index(slot), turn & 1)  # so the step's maps are read, too
        _fetch(x, maps, maps_ready, (step - start) % slots, step + slots, stop, WHICH)
        numbers = _done(sums)
        mbarrier.arrive(free.index((step - start + others - 1) % others), count=1, pred=step > start)
        if SCALED:
            of_map, of_grad = map_powers[1].index(slot), grad_powers[1].index(slot)
            grew = of_map.slice(0, BLOCK).load(whole) | of_grad.slice(0, BLOCK).load(whole)
            if gl.max(grew, 0) != 0:  # once, and seldom again
                less = _less(of_map, 0, layout, BLOCK)[:, None] * _less(of_grad, 1, layout, BLOCK)[None, :]
                changed = ()
                for e in gl.static_range(HALF):
                    changed = changed + (numbers[e] * less,)
                if PAIRS > 0:
                    less = _less(of_map, 0, wide, BLOCK)[:, None] * _less(of_grad, 1, wide, 2 * BLOCK)[None, :]
                    changed = changed + (numbers[HALF] * less,)
                numbers = changed
        sums = running(numbers)
        found = ()
        for e in gl.static_range(HALF):
            left, right = map_hats[WHICH * HALF + e].index(slot), grad_hats[WHICH * HALF + e].index(slot)
            found = found + (warpgroup_mma(left.permute((1, 0)), right, sums[e], is_async=True),)
        if PAIRS > 0:
            total = sums[HALF]
            for n in gl.static_range(TIMES):
                left, right = map_hats[SINGLES + 2 * n + WHICH].index(slot), grad_hats[SINGLES + n].index(slot)
                total = warpgroup_mma(left.permute((1, 0)), right, total, is_async=True)
            found = found + (total,)
        sums = found
    numbers = _done(sums)
    last = (stop - start + others - 1) % others
    first = gl.program_id(2) * (SINGLES + 4 * PAIRS)
    for e in gl.static_range(HALF + PAIRS):
        entry = first + (WHICH * HALF + e if e < HALF else SINGLES + 2 * WHICH)
        _write(out, entry, numbers[e], map_powers[0].index(last), grad_powers[0].index(last), k_in, k_out, SCALED)


@gluon.jit
def _done(sums):
    """The sums, when their products are done."""
    found = warpgroup_mma_wait(0, sums)
    if len(sums) == 1:
        found = (found,)
    return found


@gluon.jit
def _less(grew, DIM: gl.constexpr, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """What sums are multiplied by where the powers of two of their channels grew."""
    found = grew.slice(0, COUNT).load(gl.SliceLayout(1 - DIM, LAYOUT))
    return gl.maximum((127 << 23) - found, 0).to(gl.float32, bitcast=True)


@gluon.jit
def _write(out, first, sums, of_map, of_grad, k_in, k_out, SCALED: gl.constexpr):
    """Writes the sums of an entry, or of two that stand side by side."""
    BLOCK: gl.constexpr = sums.shape[0]
    rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    cols: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    if SCALED:
        sums = sums * (of_grad.slice(0, sums.shape[1]).load(cols) - TOP).to(gl.float32, bitcast=True)[None, :]
        sums = sums * (of_map.slice(0, BLOCK).load(rows) - TOP).to(gl.float32, bitcast=True)[:, None]
    col = gl.arange(0, sums.shape[1], cols)[None, :]
    entry, i = first + col // BLOCK, gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, rows)[:, None]
    o = gl.program_id(1) * BLOCK + col % BLOCK
    gl.store(out + (entry * k_in + i).to(gl.int64) * k_out + o, sums, mask=(i < k_in) & (o < k_out))


@triton.jit
def _filter_gradient(
    sums, out, k_out, k_in, parts, MATRIX: tl.constexpr, S: tl.constexpr, ENTRIES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Adds up what programs have found, and brings it to the filters' own numbers."""
    part = tl.arange(0, PARTS)[:, None, None]
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
    inside = (i < k_in) & (o < k_out)
    found = ()
    for _ in tl.static_range(ENTRIES):
        found = found + (tl.zeros((PARTS, BLOCK_I, BLOCK_O), tl.float32),)
    for start in range(0, parts, PARTS):
        first, here = (start + part).to(tl.int64) * ENTRIES, inside[None] & (start + part < parts)
        more = ()
        for e in tl.static_range(ENTRIES):
            at = ((first + e) * k_in + i[None]) * k_out + o[None]
            more = more + (found[e] + tl.load(sums + at, mask=here, other=0.0),)
        found = more
    values = ()
    for e in tl.static_range(ENTRIES):
        values = values + (tl.sum(found[e], 0),)
    totals = ()
    for b in tl.static_range(S):
        total = tl.zeros((BLOCK_I, BLOCK_O), tl.float32)
        for e in tl.static_range(ENTRIES):
            if MATRIX[e * S + b] != 0.0:
                total += values[e] * MATRIX[e * S + b]
        totals = totals + (total,)
    together = _together(totals, S)
    to = ((o.to(tl.int64) * k_in + i) * S)[:, :, None] + tl.arange(0, S)
    tl.store(out + to, together.to(out.dtype.element_ty), mask=inside[:, :, None])


@triton.jit
def _together(numbers, S: tl.constexpr):
    """Tensors of two axes as one, in whose third they stand in a row; there are two, four or eight."""
    COUNT: tl.constexpr = len(numbers)
    if COUNT == 1:
        together = numbers[0].reshape([numbers[0].shape[0], numbers[0].shape[1], S])
    else:
        joined = ()
        for n in tl.static_range(COUNT // 2):
            joined = joined + (tl.join(numbers[n], numbers[COUNT // 2 + n]),)
        together = _together(joined, S)
    return together
