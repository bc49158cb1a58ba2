"""gcnn::expand and gcnn::collect on a GPU, in Triton: one gather each (see `gcnn.kernels.expand`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnn.kernels import on_its_gpu

BLOCK = 1024
SMALL = 1 << 20  # stored numbers that the cache holds, so that they can be read in any order


@on_its_gpu
def expand(
    weight: Tensor, table: Tensor, inverse: Tensor, cells: int, groups: int, channels_last: bool, dtype: torch.dtype
) -> Tensor:
    """The bank (S K_out, S_in K_in, cells)."""
    k_out, k_in, q = weight.shape
    large = weight.numel() > SMALL
    rows = weight.transpose(1, 2).contiguous() if large else weight.contiguous()  # runs of K_in numbers, if there are many
    steps = (k_in, 1) if large else (1, q)  # from one stored number, and from one channel, to the next
    (s, places), width = table.shape, table.shape[1] * k_in
    shape = (s * k_out, cells, width // cells) if channels_last else (s * k_out, width // cells, cells)
    bank = torch.empty(shape, dtype=dtype, device=weight.device)
    grid = (s * k_out, triton.cdiv(width, BLOCK))
    if bank.numel():
        _expand[grid](rows, table, bank, k_out // groups, k_in, q, *steps, s, places, cells, width, channels_last, BLOCK)
    return bank.transpose(1, 2) if channels_last else bank


@on_its_gpu
def collect(
    bank: Tensor, table: Tensor, inverse: Tensor, cells: int, groups: int, channels_last: bool, dtype: torch.dtype
) -> Tensor:
    """The sum over the S copies of every number, (K_out, K_in, Q), always in the same order."""
    (s, q), places = inverse.shape, table.shape[1]
    bank = bank.movedim(1, -1).contiguous() if channels_last else bank.contiguous()
    k_out, k_in = bank.shape[0] // s, bank.numel() // (bank.shape[0] * places)
    weight = torch.empty(k_out, k_in, q, dtype=dtype, device=bank.device)
    width = places * k_in
    if weight.numel() > SMALL:
        weight, steps = weight.view(k_out, q, k_in), (k_in, 1)
    else:
        steps = (1, q)
    grid = (k_out, triton.cdiv(q * k_in, BLOCK))
    if weight.numel():
        wide = tl.float64 if dtype == torch.float64 else tl.float32
        _collect[grid](
            bank, inverse, weight, k_out // groups, k_in, q, *steps, s, places, cells, width, channels_last, wide, BLOCK
        )
    return weight if steps[0] == 1 else weight.transpose(1, 2)


@triton.jit
def _expand(
    rows,
    table,
    bank,
    per_group,
    k_in,
    q,
    number_step,
    channel_step,
    S: tl.constexpr,
    places,
    cells,
    width,
    CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)  # of the bank: a group, an element, a filter of that group
    element, filter_ = (row // per_group) % S, row // (per_group * S) * per_group + row % per_group
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if CHANNELS_LAST:  # (cell, coset, channel)
        place, channel = at // k_in, at % k_in
    else:  # (coset, channel, cell)
        plane, cosets = at // cells, places // cells
        place, channel = (at % cells) * cosets + plane // k_in, plane % k_in
    source = tl.load(table + element * places + place, mask=inside, other=q)
    first = filter_.to(tl.int64) * q * k_in
    number = tl.load(rows + first + source * number_step + channel * channel_step, mask=inside & (source < q), other=0.0)
    tl.store(bank + row.to(tl.int64) * width + at, number.to(bank.dtype.element_ty), mask=inside)


@triton.jit
def _collect(
    bank,
    inverse,
    weight,
    per_group,
    k_in,
    q,
    number_step,
    channel_step,
    S: tl.constexpr,
    places,
    cells,
    width,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    filter_ = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < q * k_in
    number, channel = at // k_in, at % k_in
    cosets = places // cells
    total = tl.zeros((BLOCK,), WIDE)
    for element in range(S):
        row = (filter_ // per_group * S + element) * per_group + filter_ % per_group
        place = tl.load(inverse + element * q + number, mask=inside, other=0)
        if CHANNELS_LAST:  # noqa: SIM108 (a constant: Triton drops the other branch)
            source = place * k_in + channel
        else:
            source = ((place % cosets) * k_in + channel) * cells + place // cosets
        total += tl.load(bank + row.to(tl.int64) * width + source, mask=inside, other=0.0).to(WIDE)
    to = weight + filter_.to(tl.int64) * q * k_in + number * number_step + channel * channel_step
    tl.store(to, total.to(weight.dtype.element_ty), mask=inside)
