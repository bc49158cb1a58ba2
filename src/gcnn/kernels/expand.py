"""The filter transformation and its adjoint, as the operations gcnn::expand and gcnn::collect (paper, section 7.1).

A stored filter (K_out, K_in, Q) becomes a planar bank (S K_out, S_in K_in, n^d), written in the memory order that the planar
convolution wants, in the dtype it wants. The gradient collects every number's S copies again, in a fixed order: a gather both
ways, never a scatter, so that gradients are the same in every run. Tables are those of `gcnn.indices.index_table`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.kernels import few, in_triton
from gcnn.layout import plain, transformed

SMALL = 1 << 18  # banks of at most this many numbers get an index for each number

library = torch.library.Library("gcnn", "DEF")
library.define(
    "expand(Tensor weight, Tensor table, Tensor inverse, int cells, int groups, bool channels_last, ScalarType dtype) -> Tensor"
)
library.define(
    "collect(Tensor bank, Tensor table, Tensor inverse, int cells, int groups, bool channels_last, ScalarType dtype) -> Tensor"
)


def expand_filters(
    weight: Tensor, table: Tensor, inverse: Tensor, cells: int, groups: int, channels_last: bool, dtype: torch.dtype
) -> Tensor:
    """The bank (S K_out, S_in K_in, cells) of the filters; with `channels_last` its memory is (S K_out, cells, S_in K_in)."""
    if transformed():  # torch's own operations can be traced and differentiated in every way
        return _expand(weight, table, inverse, cells, groups, channels_last, dtype)
    bank: Tensor = _Expand.apply(weight, table, inverse, cells, groups, channels_last, dtype)
    return bank


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, table: Tensor, inverse: Tensor, cells: int, groups: int, channels_last: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(table, inverse)
        ctx.rest = cells, groups, channels_last, weight.dtype
        run: Any = _expand if torch.compiler.is_compiling() else torch.ops.gcnn.expand  # compilers fuse what they can read
        bank: Tensor = run(weight, table, inverse, cells, groups, channels_last, dtype)
        return bank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Collect.apply(grads[0], *ctx.saved_tensors, *ctx.rest), None, None, None, None, None, None


class _Collect(torch.autograd.Function):
    """The adjoint of `_Expand`."""

    @staticmethod
    def forward(
        ctx: Any, bank: Tensor, table: Tensor, inverse: Tensor, cells: int, groups: int, channels_last: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(table, inverse)
        ctx.rest = cells, groups, channels_last, bank.dtype
        run: Any = _collect if torch.compiler.is_compiling() else torch.ops.gcnn.collect
        weight: Tensor = run(bank, table, inverse, cells, groups, channels_last, dtype)
        return weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Expand.apply(grads[0], *ctx.saved_tensors, *ctx.rest), None, None, None, None, None, None


def rows_of(table: Tensor, inverse: Tensor, k_out: int, groups: int) -> tuple[Tensor, Tensor]:
    """The tables for every filter, as flat indices of rows of K_in numbers: of the filters', and of the bank's."""
    (s, q), d = inverse.shape, table.shape[1]
    step = q if d == q else q + 1  # a last row of zeros fills the cells outside the support
    first = torch.arange(0, k_out * step, step, device=table.device).view(groups, 1, -1, 1)  # where each filter's rows begin
    forth = (first + table[:, None]).flatten()  # (groups, S, K_out / groups, n^d S_in)
    first = torch.arange(0, s * k_out * d, d, device=table.device).view(groups, s, -1, 1)  # where each filter's cells begin
    back = (first + inverse[:, None]).transpose(0, 1).flatten()  # (S, groups, K_out / groups, Q)
    return forth, back


def index_of(table: Tensor, inverse: Tensor, weight: Tensor, cells: int, groups: int) -> tuple[Tensor, Tensor]:
    """Flat indices for every filter: by number (`numbers_of`) for small banks on a GPU, else by row (`rows_of`)."""
    if table.is_cuda and table.shape == inverse.shape and table.numel() * weight.shape[:2].numel() <= SMALL:
        return numbers_of(table, inverse, weight, cells, groups)
    return rows_of(table, inverse, len(weight), groups)


def numbers_of(table: Tensor, inverse: Tensor, weight: Tensor, cells: int, groups: int) -> tuple[Tensor, Tensor]:
    """The same as `rows_of` number by number, (rows, K_in) and (S, K_out, K_in, Q): torch then needs one operation each way.

    The tables are K_in times as large. For groups that fill the box of the kernel.
    """
    forth, back = rows_of(table, inverse, len(weight), groups)
    (_, k_in, q), d = weight.shape, table.shape[1]
    channel, cosets = torch.arange(k_in, device=table.device), d // cells
    forth = (forth // q * k_in * q + forth % q)[:, None] + channel * q
    row, place = (n.view(-1, len(weight), 1, q) for n in (back // d, back % d))  # (S, K_out, 1, Q): of the bank
    plane = (row * cosets + place % cosets) * k_in + channel[:, None]
    return forth, plane * cells + place // cosets


def _expand(
    weight: Tensor,
    table: Tensor,
    inverse: Tensor,
    cells: int,
    groups: int,
    channels_last: bool,
    dtype: torch.dtype,
    index: Tensor | None = None,
) -> Tensor:
    if index is not None and index.ndim > 1:  # (rows, K_in): of `numbers_of`
        filled = (weight if weight.dtype == dtype else weight.to(dtype)).take(index)
    else:
        rows = weight.to(dtype).transpose(1, 2)  # (K_out, Q, K_in)
        if table.shape[1] != inverse.shape[1]:
            rows = F.pad(rows, (0, 0, 0, 1))
        index = rows_of(table, inverse, len(rows), groups)[0] if index is None else index
        filled = rows.reshape(-1, rows.shape[2]).index_select(0, index)
    bank = filled.view(table.shape[0] * weight.shape[0], cells, -1).transpose(1, 2)
    return bank if channels_last else bank.contiguous()  # (S K_out, S_in K_in, n^d)


def _collect(
    bank: Tensor,
    table: Tensor,
    inverse: Tensor,
    cells: int,
    groups: int,
    channels_last: bool,
    dtype: torch.dtype,
    index: Tensor | None = None,
) -> Tensor:
    if index is not None and index.ndim > 1 and bank.dtype == dtype and dtype in (torch.float32, torch.float64):
        return _usual(bank.take(index).sum(0))
    wide = torch.promote_types(dtype, torch.float32)
    if index is not None and index.ndim > 1:
        return _usual(bank.take(index).sum(0, dtype=wide).to(dtype))
    (s, q), k_out = inverse.shape, bank.shape[0] // inverse.shape[0]
    k_in = bank.shape[1] * cells // table.shape[1]
    index = rows_of(table, inverse, k_out, groups)[1] if index is None else index
    copies = bank.movedim(1, -1).reshape(-1, k_in).index_select(0, index).view(s, k_out, q, k_in)
    return _usual(copies.sum(0, dtype=wide).to(dtype).transpose(1, 2))


def _usual(weight: Tensor) -> Tensor:
    """(K_out, K_in, Q) with the stride that a new tensor has along a K_in of 1; DistributedDataParallel warns of others."""
    return weight.squeeze(1).unsqueeze(1) if weight.shape[1] == 1 else weight


def expand(*arguments: Any) -> Tensor:
    """gcnn::expand without torch's dispatcher, in the fastest way there is; the last argument is one of `index_of`, or None."""
    gather = _gather(arguments[0], arguments[1].shape[0] * arguments[0].numel(), arguments[-1])
    return _expand(*arguments) if gather is None else cast("Tensor", gather.expand(*arguments[:-1]))


def collect(*arguments: Any) -> Tensor:
    """gcnn::collect in the same way; the cells of the bank may be laid out in space."""
    gather = _gather(arguments[0], arguments[0].numel(), arguments[-1])
    return _collect(*arguments) if gather is None else cast("Tensor", gather.collect(*arguments[:-1]))


def _gather(x: Tensor, numbers: int, index: Tensor | None) -> Any:
    """The kernels for a bank of so many numbers on a GPU; None where torch's own operations are as fast."""
    if not x.is_cuda or (index is not None and few(x, 8 * numbers)) or not plain(x):  # torch's pass over them several times
        return None
    return in_triton("gather")


library.impl("expand", _expand, "CompositeExplicitAutograd")  # all devices
library.impl("collect", _collect, "CompositeExplicitAutograd")
library.impl("expand", lambda *arguments: expand(*arguments, None), "CUDA")
library.impl("collect", lambda *arguments: collect(*arguments, None), "CUDA")
