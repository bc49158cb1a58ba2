"""The Fourier algorithm for 1x1 kernels on GPUs with the tensor cores of Hopper, in Gluon, Triton's language without a scheduler.

A program has 64 points and 64 channels of the result at a time, and one sum for each coefficient. Copy engines bring the maps and
filters of the next steps to shared memory while tensor cores multiply those of the last one, also from one tile to the next. 1x1
layers have little to multiply: what they take is the time to read, and this reads half as much as `gcnn.kernels.fused`. The
columns of a row of a two-dimensional representation share a product.

Where products are of TF32, they are made of float16 numbers here, which have as many bits: those of a point, and the filters of a
channel of the result, are multiplied by a power of two, which brings the largest of the filters to 2^11 or more, and of the point
to 2^5 or more. The power of a point is that of the channels seen so far, with room for larger ones to come, and the sums follow
it. So filters take half of the space, and half of the time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gcnn.groups import Group
from gcnn.kernels import on_its_gpu
from gcnn.kernels.fourier import empty_planes
from gcnn.kernels.fourier_cuda import tables
from gcnn.kernels.fused import code, on_hopper
from gcnn.layout import allows_tf32

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # named anew in Triton 3.7, with which it compiles too
POINTS = CHANNELS = 64  # of a tile


def suits(group: Group, dtype: torch.dtype, k_in: int, k_out: int) -> bool:
    """Whether the kernel is made for such maps, on the GPU in use."""
    products = dtype == torch.bfloat16 or (dtype == torch.float32 and allows_tf32())
    if not products or k_in % 32 or k_out % 8:
        return False
    found = code(group)
    return found is not None and len(found[0].first) <= 8 and on_hopper()  # more do not fit shared memory: C4h's twelve


def seconds(group: Group, dtype: torch.dtype, k_in: int, k_out: int, points: int) -> float:
    """What the map takes on an H200: programs read maps and filters from the cache, the map is read and written once."""
    found, rows, columns = code(group), math.ceil(points / POINTS), math.ceil(k_out / CHANNELS)
    assert found is not None
    maps = points * group.order * dtype.itemsize
    filters = rows * columns * CHANNELS * len(found[0].first) * k_in * 2
    once = maps * (k_in + k_out) / 4e12
    if is_kept(group, k_in):  # the next points wait for the room of these
        return once + filters / 5e12 + 5e-6
    return max((maps * k_in * columns + filters) / 5.5e12, once) + 1e-5


def is_kept(group: Group, k_in: int) -> bool:
    """Whether there is room for the coefficients of all channels: then each number of the map is read once."""
    return group.order * k_in <= 1024


def slots(scaled: bool, kept: bool, chunks: int) -> tuple[int, int, int]:
    """How many steps of maps, of coefficients and of filters there is room for in shared memory."""
    if kept:
        return (3, chunks, 3) if scaled else (4, chunks, 4)
    return (3, 4, 4) if scaled else (2, 2, 3)


LEAST = gl.constexpr(12 << 23)  # the least power of two that numbers are compared with, 2^-115, as the bits of its exponent
TOP = gl.constexpr(11 << 23)  # to which power the largest numbers are brought
ROOM = gl.constexpr(6 << 23)  # left for larger ones to come


@on_its_gpu
def correlate(group: Group, planes: Tensor, weight: Tensor, *geometry: tuple[int, ...], adjoint: bool = False) -> Tensor:
    """The same as `gcnn.kernels.fourier_cuda.correlate`, for 1x1 kernels and maps that `suits` allows."""
    found = code(group)
    assert found is not None
    constants = found[0]
    k_out, k_in = (weight.shape[1], weight.shape[0]) if adjoint else weight.shape[:2]
    result, out = empty_planes(planes, planes.shape[2:], group.order, k_out)
    x = rows_of(planes, group.order)
    scaled = x.dtype == torch.float32
    columns = triton.cdiv(k_out, CHANNELS)
    kept = is_kept(group, k_in)
    block_k = 16 if kept else 64 // x.element_size()
    single, paired, largest = transform_filters(group, weight, adjoint, torch.float16 if scaled else x.dtype)
    singles = len(single)
    rows = triton.cdiv(len(x), POINTS)
    tiles, apart, passes = (rows, 1, columns) if kept else (rows * columns, columns, 1)
    _correlate[(min(tiles, processors(x.get_device())),)](
        described(x.movedim(1, 0), (group.order, POINTS // (2 if kept else 1), block_k)),
        described(single, (singles, block_k, CHANNELS)),
        described(paired, (2, block_k, 2 * CHANNELS)), out, largest,
        tiles, apart, passes, k_in // block_k, len(x), k_out // 8,
        constants.steps, constants.coefficients, constants.back, constants.elements, group.order, singles, constants.times[-1],
        *slots(scaled, kept, k_in // block_k), POINTS, num_warps=8, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    return result


def rows_of(planes: Tensor, s: int) -> Tensor:
    """Planes (N, S K, *X) as (points, S, K), where copy engines can read them."""
    rows = planes.movedim(1, -1).contiguous()
    return (rows.clone() if rows.data_ptr() % 16 else rows).view(-1, s, planes.shape[1] // s)


def described(x: Tensor, block: tuple[int, ...]) -> Any:
    """A tensor as copy engines see it, in such blocks."""
    kind = getattr(gl, str(x.dtype).removeprefix("torch."))
    return TensorDescriptor.from_tensor(x, list(block), gl.NVMMASharedLayout.get_default_for(list(block), kind))


@lru_cache(maxsize=16)
def processors(device: int) -> int:
    """How many there are on a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def transform_filters(group: Group, weight: Tensor, adjoint: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(K_out, K_in, S) to the entries of representations of one dimension, and of two: (entries, K_in, .) and (rows, K_in, .).

    The channels of the result stand in an order, 32 by 32, that gives a thread of the product 16 bytes of them side by side; the
    entries of a row of two take turns after every 32. The last are the largest numbers of each channel, that scale float16.
    """
    weight, known = weight.contiguous(), code(group)
    assert known is not None
    degree, entries = known[0].degree, known[1]
    found, (k_out, k_in, stored) = tables(group, (1,) * group.dim, weight.device), weight.shape
    o_step, i_step = (stored, k_in * stored) if adjoint else (k_in * stored, stored)
    k_out, k_in = (k_in, k_out) if adjoint else (k_out, k_in)
    scaled, singles = dtype == torch.float16, degree.count(1)
    largest = weight.new_empty(k_out, dtype=torch.float32)
    single = weight.new_empty(singles, k_in, triton.cdiv(k_out, 32) * 32, dtype=dtype)
    paired = weight.new_empty(max(2, (len(degree) - singles) // 2), k_in, triton.cdiv(k_out, 32) * 64, dtype=dtype)
    block = 4 if scaled else 32  # the largest number of a channel is sought by the program that has all of it
    _filters[(1 if scaled else triton.cdiv(k_in, 32), triton.cdiv(k_out, 32) * 32 // block)](
        weight, found.adjoint_orbit if adjoint else found.orbit, largest, single, paired, k_out, k_in, o_step, i_step,
        entries, group.order, len(degree), singles, scaled, 4 if scaled else 8,
        min(256, triton.next_power_of_2(k_in)) if scaled else 32, block, num_warps=8 if scaled else 4,
    )  # fmt: skip
    return single, paired, largest


@triton.jit
def _filters(
    weight, orbit, largest, single, paired, k_out, k_in, o_step, i_step,
    MATRIX: tl.constexpr, S: tl.constexpr, ENTRIES: tl.constexpr, SINGLES: tl.constexpr, SCALED: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    tl.extra.cuda.gdc_launch_dependents()  # the kernel that follows may begin: it waits for the filters where it needs them
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)[:, None]
    place = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
    o = place // 32 * 32 + place % 8 // 2 * EACH + place % 32 // 8 // (EACH // 2) * (4 * EACH)
    o += place % 32 // 8 % (EACH // 2) * 2 + place % 2  # which channel stands there
    stop = first + BLOCK
    scale = 1.0
    if SCALED:
        stop = k_in
        most = tl.zeros((BLOCK, BLOCK_O), tl.float32)
        for k in range(0, k_in, BLOCK):
            for b in tl.static_range(S):
                at = o.to(tl.int64) * o_step + (k + i).to(tl.int64) * i_step + tl.load(orbit + b)
                most = tl.maximum(most, tl.abs(tl.load(weight + at, mask=(k + i < k_in) & (o < k_out), other=0.0).to(tl.float32)))
        found = tl.max(most, 0)[None, :]
        tl.store(largest + o, found, mask=o < k_out)
        power = tl.maximum(found.to(tl.int32, bitcast=True) & 0x7F800000, 12 << 23)
        scale = ((253 << 23) - (power - (12 << 23))).to(tl.float32, bitcast=True)
    for k in range(0, stop - first, BLOCK):
        inside = (k + i < k_in) & (o < k_out)
        values = ()
        for b in tl.static_range(S):
            at = o.to(tl.int64) * o_step + (k + i).to(tl.int64) * i_step + tl.load(orbit + b)
            values = values + (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * scale,)
        for e in tl.static_range(ENTRIES):
            total = tl.zeros((BLOCK, BLOCK_O), tl.float32)
            for b in tl.static_range(S):
                if MATRIX[e * S + b] != 0.0:
                    total += values[b] * MATRIX[e * S + b]
            if e < SINGLES:
                to = single + (e * k_in + k + i).to(tl.int64) * (tl.cdiv(k_out, 32) * 32) + place
            else:
                row = ((e - SINGLES) // 2 * k_in + k + i).to(tl.int64) * (tl.cdiv(k_out, 32) * 64)
                to = paired + row + place // 32 * 64 + (e - SINGLES) % 2 * 32 + place % 32
            tl.store(to, total.to(single.dtype.element_ty), mask=k + i < k_in)  # of channels past the last too: zeros


@gluon.jit
def _wait_for_filters():
    """Waits for the end of the kernel before this one."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers in shared memory, each for so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def _fetch_maps(x, maps, ready, free, tiles, apart, chunks, PARTS: gl.constexpr):
    """A warp that has a copy engine bring the map, as soon as there is room."""
    slots: gl.constexpr = maps.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for chunk in range(chunks):
            for part in gl.static_range(PARTS):
                slot = step % slots
                mbarrier.wait(free.index(slot), (step // slots & 1) ^ 1)
                mbarrier.expect(ready.index(slot), x.block_type.nbytes)
                at = [0, (tile // apart * PARTS + part) * x.block_shape[1], chunk * x.block_shape[2]]
                tma.async_copy_global_to_shared(x, at, ready.index(slot), maps.index(slot))
                step += 1


@gluon.jit
def _fetch_filters(w, pairs, filters, paired, ready, free, tiles, apart, passes, chunks, BLOCKS: gl.constexpr):
    """A warp that does so for the filters."""
    slots: gl.constexpr = ready.shape[0]
    _wait_for_filters()
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for which in range(passes):
            for chunk in range(chunks):
                slot, column = step % slots, tile % apart + which
                mbarrier.wait(free.index(slot), (step // slots & 1) ^ 1)
                mbarrier.expect(ready.index(slot), w.block_type.nbytes + BLOCKS * pairs.block_type.nbytes)
                at = [0, chunk * w.block_shape[1], column * w.block_shape[2]]
                tma.async_copy_global_to_shared(w, at, ready.index(slot), filters.index(slot))
                for i in gl.static_range(BLOCKS):
                    at = [2 * i, chunk * w.block_shape[1], column * pairs.block_shape[2]]
                    tma.async_copy_global_to_shared(pairs, at, ready.index(slot), paired.index(slot * BLOCKS + i))
                step += 1


@gluon.jit
def _transform(maps, hats, powers, ready, free, hats_ready, hats_free, tiles, chunks, SINGLES: gl.constexpr,
               STEPS: gl.constexpr, COEFFICIENTS: gl.constexpr):  # fmt: skip
    """Four warps that transform what the first one brings."""
    slots: gl.constexpr = maps.shape[0]
    S: gl.constexpr = maps.shape[1]
    rows: gl.constexpr = maps.shape[2]
    others: gl.constexpr = powers.shape[0]
    parts: gl.constexpr = powers.shape[1] // rows
    each: gl.constexpr = gl.BlockedLayout([1, maps.shape[3] // 4], [8, 4], [4, 1], [1, 0])
    step = 0
    for _tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        so_far = ()
        for _ in gl.static_range(parts):
            so_far = so_far + (gl.full([rows], LEAST, gl.int32, gl.SliceLayout(1, each)),)
        for _chunk in range(chunks):
            other = step % others
            loaded = ()
            for part in gl.static_range(parts):
                slot, turn = (parts * step + part) % slots, (parts * step + part) // slots
                mbarrier.wait(ready.index(slot), turn & 1)
                here = maps.index(slot).reshape([S * rows, maps.shape[3]])
                for a in gl.static_range(S):
                    loaded = loaded + (here.slice(a * rows, rows, 0).load(each),)
                fence_async_shared()  # all is read, and may be written over
                mbarrier.arrive(free.index(slot), count=1)
            mbarrier.wait(hats_free.index(other), (step // others & 1) ^ 1)
            now = ()
            for part in gl.static_range(parts):
                numbers = ()
                for a in gl.static_range(S):
                    numbers = numbers + (loaded[part * S + a],)
                power = _coefficients(numbers, hats, other, so_far[part], part * rows, SINGLES, STEPS, COEFFICIENTS)
                if maps.dtype == gl.float32:
                    powers.index(other).slice(part * rows, rows, 0).store(power)
                now = now + (power,)
            so_far = now
            fence_async_shared()
            mbarrier.arrive(hats_ready.index(other), count=1)
            step += 1


@gluon.jit
def _coefficients(numbers, hats, slot, power, ROW: gl.constexpr, SINGLES: gl.constexpr, STEPS: gl.constexpr,
                  COEFFICIENTS: gl.constexpr):  # fmt: skip
    """Writes the coefficients of some points, scaled if they are float32; returns the power of two of each point."""
    S: gl.constexpr = len(numbers)
    ROWS: gl.constexpr = numbers[0].shape[0]
    COLS: gl.constexpr = numbers[0].shape[1]
    scale = 1.0
    if numbers[0].dtype == gl.float32:
        most = gl.abs(numbers[0])
        for a in gl.static_range(1, S):
            most = gl.maximum(most, gl.abs(numbers[a]))
        new = gl.max(most, 1).to(gl.int32, bitcast=True) & 0x7F800000
        power = gl.where(new > power, gl.minimum(new, 0x7F800000 - ROOM) + ROOM, power)
        scale = ((253 << 23) - (power - LEAST)).to(gl.float32, bitcast=True)[:, None]
    scaled = ()
    for a in gl.static_range(S):
        scaled = scaled + (numbers[a].to(gl.float32) * scale,)
    numbers = scaled
    for i in gl.static_range(len(STEPS) // 3):
        numbers = numbers + (summed(numbers[STEPS[i * 3]], numbers[STEPS[i * 3 + 1]], STEPS[i * 3 + 2]),)
    for c in gl.static_range(len(hats)):
        if c < SINGLES:
            found = numbers[COEFFICIENTS[c]]
        else:
            found = gl.join(numbers[COEFFICIENTS[2 * c - SINGLES]], numbers[COEFFICIENTS[2 * c - SINGLES + 1]])
            found = found.permute((0, 2, 1)).reshape([ROWS, 2 * COLS])
        hats[c].index(slot).slice(ROW, ROWS, 0).store(found.to(hats[c].dtype))
    return power


@gluon.jit
def _multiply(
    out, hats, powers, filters, paired, hats_ready, hats_free, ready, free, largest, tiles, apart, passes, chunks, points, units,
    BACK: gl.constexpr, ELEMENTS: gl.constexpr, S: gl.constexpr, TIMES: gl.constexpr,
):  # fmt: skip
    """Eight warps: products, the transform back, the result. The second four have the other half of the channels."""
    SCALED: gl.constexpr = out.dtype.element_ty == gl.float32
    BLOCK_M: gl.constexpr = hats[0].shape[1]
    BLOCK_K: gl.constexpr = hats[0].shape[2]
    BLOCK_N: gl.constexpr = filters.shape[3]
    SINGLES: gl.constexpr = filters.shape[1]
    PAIRS: gl.constexpr = len(hats) - SINGLES
    slots: gl.constexpr = powers.shape[0]
    others: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    EACH: gl.constexpr = 4 if SCALED else 8  # numbers of 16 bytes: as `_filters` has them stand
    side_by_side: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16 if SCALED else 4], [8, 0]], [[0, EACH], [0, 2 * EACH], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 32]], [], [BLOCK_M, BLOCK_N])  # fmt: skip
    whole: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [gl.num_warps()], [0])  # all rows in each warp
    k_out = units * 8  # so the compiler knows that 16 bytes of a point are in one place
    before, step = 0, 0  # steps of maps, steps of filters
    _wait_for_filters()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for which in range(passes):
            last = which == passes - 1
            row, o = tile // apart * BLOCK_M, (tile % apart + which) * BLOCK_N
            channel = o + gl.arange(0, BLOCK_N, gl.SliceLayout(0, side_by_side))
            if SCALED:  # read now, for it takes a while
                of_channel = gl.load(largest + channel, channel < k_out, 0.0)
            sums = zeros(SINGLES, BLOCK_M, BLOCK_N, layout) + zeros(PAIRS, BLOCK_M, 2 * BLOCK_N, wide)
            power = gl.full([BLOCK_M], LEAST, gl.int32, rows)
            in_warp = gl.full([BLOCK_M], LEAST, gl.int32, whole)
            for chunk in range(chunks):
                slot, turn, other = (before + chunk) % slots, (before + chunk) // slots, step % others
                mbarrier.wait(hats_ready.index(slot), turn & 1)
                grown = False
                if SCALED:
                    now = powers.index(slot).load(whole)
                    grown = gl.max((now != in_warp).to(gl.int32), 0) != 0
                    in_warp = now
                mbarrier.wait(ready.index(other), step // others & 1)
                numbers = warpgroup_mma_wait(0, sums)
                mbarrier.arrive(hats_free.index((before + chunk + slots - 1) % slots), count=1, pred=(chunk > 0) & last)
                mbarrier.arrive(free.index((step + others - 1) % others), count=1, pred=chunk > 0)
                if grown:  # once, and seldom again
                    new = powers.index(slot).load(rows)
                    less = gl.maximum((127 << 23) + power - new, 0).to(gl.float32, bitcast=True)
                    power = new
                    less_of_pairs = gl.convert_layout(less, gl.SliceLayout(1, wide))
                    changed = ()
                    for c in gl.static_range(len(hats)):
                        if c < SINGLES:
                            changed = changed + (numbers[c] * less[:, None],)
                        else:
                            changed = changed + (numbers[c] * less_of_pairs[:, None],)
                    numbers = changed
                sums = running(numbers)
                found = ()
                for c in gl.static_range(len(hats)):
                    if c < SINGLES:
                        right = filters.index(other).reshape([SINGLES * BLOCK_K, BLOCK_N]).slice(c * BLOCK_K, BLOCK_K, 0)
                    else:
                        right = paired.index(other * (PAIRS // TIMES) + (c - SINGLES) // TIMES).reshape(
                            [2 * BLOCK_K, 2 * BLOCK_N]
                        )
                    found = found + (warpgroup_mma(hats[c].index(slot), right, sums[c], is_async=True),)
                sums = found
                step += 1
            numbers = warpgroup_mma_wait(0, sums)
            mbarrier.arrive(hats_free.index((before + chunks - 1) % slots), count=1, pred=last)
            mbarrier.arrive(free.index((step + others - 1) % others), count=1)
            found = ()
            for c in gl.static_range(len(hats)):
                if c < SINGLES:
                    found = found + (numbers[c],)
                else:
                    pair = numbers[c].reshape([BLOCK_M, 2, 2, BLOCK_N // 2]).permute((0, 1, 3, 2))
                    left, right = pair.reshape([BLOCK_M, BLOCK_N, 2]).split()
                    found = found + (gl.convert_layout(left, layout), gl.convert_layout(right, layout))
            numbers = found
            for i in gl.static_range(len(BACK) // 3):
                numbers = numbers + (summed(numbers[BACK[i * 3]], numbers[BACK[i * 3 + 1]], BACK[i * 3 + 2]),)
            if SCALED:
                by_channel = (gl.maximum(of_channel.to(gl.int32, bitcast=True) & 0x7F800000, LEAST) - TOP).to(
                    gl.float32, bitcast=True
                )
                by_row = (gl.convert_layout(power, gl.SliceLayout(1, side_by_side)) - TOP).to(gl.float32, bitcast=True)[:, None]
            point = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, side_by_side))
            at = point.to(gl.int64)[:, None] * (S * k_out) + channel[None, :]
            inside = (point < points)[:, None] & (channel < k_out)[None, :]
            for a in gl.static_range(S):
                found = numbers[ELEMENTS[a]].reshape([BLOCK_M, 2, 8 // EACH, EACH // 2, 4, 2]).permute((0, 1, 2, 4, 3, 5))
                found = gl.convert_layout(found.reshape([BLOCK_M, BLOCK_N]), side_by_side)
                if SCALED:
                    found = found * by_channel[None, :] * by_row
                gl.store(out + at + a * k_out, found.to(out.dtype.element_ty), mask=inside)
        before += chunks


@gluon.jit
def _correlate(
    x, w, pairs, out, largest, tiles, apart, passes, chunks, points, units,
    STEPS: gl.constexpr, COEFFICIENTS: gl.constexpr, BACK: gl.constexpr, ELEMENTS: gl.constexpr, S: gl.constexpr,
    SINGLES: gl.constexpr, TIMES: gl.constexpr, MAPS: gl.constexpr, HATS: gl.constexpr, FILTERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    block_k: gl.constexpr = x.block_shape[2]
    PAIRS: gl.constexpr = (S - SINGLES) // 2
    BLOCKS: gl.constexpr = PAIRS // TIMES
    maps = gl.allocate_shared_memory(x.dtype, [MAPS, S, x.block_shape[1], block_k], x.layout)
    hats = allocated(w.dtype, SINGLES, HATS, BLOCK_M, block_k) + allocated(w.dtype, PAIRS, HATS, BLOCK_M, 2 * block_k)
    powers = gl.allocate_shared_memory(gl.int32, [HATS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filters = gl.allocate_shared_memory(w.dtype, [FILTERS, SINGLES, block_k, w.block_shape[2]], w.layout)
    paired = filters
    if PAIRS > 0:
        paired = gl.allocate_shared_memory(w.dtype, [FILTERS * BLOCKS, 2, block_k, pairs.block_shape[2]], pairs.layout)
    maps_ready, maps_free, hats_ready, hats_free = barriers(MAPS, 1), barriers(MAPS, 1), barriers(HATS, 1), barriers(HATS, 1)
    ready, free = barriers(FILTERS, 1), barriers(FILTERS, 1)
    fence_async_shared()  # copy engines are to see the barriers
    barrier()
    gl.warp_specialize([
        (_multiply, (out, hats, powers, filters, paired, hats_ready, hats_free, ready, free, largest, tiles, apart, passes,
                     chunks, points, units, BACK, ELEMENTS, S, TIMES)),
        (_transform, (maps, hats, powers, maps_ready, maps_free, hats_ready, hats_free, tiles, chunks, SINGLES, STEPS,
                      COEFFICIENTS)),
        (_fetch_maps, (x, maps, maps_ready, maps_free, tiles, apart, chunks, BLOCK_M // x.block_shape[1])),
        (_fetch_filters, (w, pairs, filters, paired, ready, free, tiles, apart, passes, chunks, BLOCKS)),
    ], [4, 1, 1], [152, 24, 24])  # fmt: skip


@gluon.jit
def allocated(KIND: gl.constexpr, S: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """So many slots for each coefficient: an allocation each, else the compiler has warps wait after every one."""
    layout: gl.constexpr = gl.NVMMASharedLayout(COLS * 2 if COLS < 64 else 128, 16, 2)
    hats = ()
    for _ in gl.static_range(S):
        hats = hats + (gl.allocate_shared_memory(KIND, [COUNT, ROWS, COLS], layout),)
    return hats


@gluon.jit
def zeros(COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """So many sums to begin with."""
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (warpgroup_mma_init(gl.zeros([ROWS, COLS], gl.float32, LAYOUT)),)
    return sums


@gluon.jit
def running(sums):
    """Sums that products may be added to once more."""
    found = ()
    for a in gl.static_range(len(sums)):
        found = found + (warpgroup_mma_init(sums[a]),)
    return found


@gluon.jit
def summed(x, y, SIGN: gl.constexpr):
    """A step of a transform."""
    if SIGN > 0:
        z = x + y
    elif SIGN < 0:
        z = x - y
    else:
        z = -x
    return z
