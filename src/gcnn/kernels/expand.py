"""The filter transformation and its adjoint, as the operations gcnn::expand and gcnn::collect (paper, section 7.1).

A stored filter (K_out, K_in, Q) becomes a planar bank (K_out S, K_in S_in, n^d), written in the memory order that the planar
convolution wants, in the dtype it wants. The gradient collects every number's S copies again, in a fixed order: a gather both
ways, never a scatter, so that gradients are the same in every run. Tables are those of `gcnn.indices.index_table`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

library = torch.library.Library("gcnn", "DEF")
library.define("expand(Tensor weight, Tensor table, Tensor inverse, int cells, bool channels_last, ScalarType dtype) -> Tensor")
library.define("collect(Tensor bank, Tensor table, Tensor inverse, int cells, bool channels_last, ScalarType dtype) -> Tensor")


def expand_filters(weight: Tensor, table: Tensor, inverse: Tensor, cells: int, channels_last: bool, dtype: torch.dtype) -> Tensor:
    """The bank (K_out S, K_in S_in, cells) of the filters; with `channels_last` its memory is (K_out S, cells, K_in S_in)."""
    if torch.jit.is_tracing() or transformed():  # type: ignore[attr-defined]
        return _expand(weight, table, inverse, cells, channels_last, dtype)  # torch's own operations, differentiable in every way
    bank: Tensor = _Expand.apply(weight, table, inverse, cells, channels_last, dtype)
    return bank


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which python functions with a backward alone would stop."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, table: Tensor, inverse: Tensor, cells: int, channels_last: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(table, inverse)
        ctx.rest = cells, channels_last, weight.dtype
        run: Any = _expand if torch.compiler.is_compiling() else torch.ops.gcnn.expand  # compilers fuse what they can read
        bank: Tensor = run(weight, table, inverse, cells, channels_last, dtype)
        return bank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Collect.apply(grads[0], *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


class _Collect(torch.autograd.Function):
    """The adjoint of `_Expand`."""

    @staticmethod
    def forward(
        ctx: Any, bank: Tensor, table: Tensor, inverse: Tensor, cells: int, channels_last: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(table, inverse)
        ctx.rest = cells, channels_last, bank.dtype
        run: Any = _collect if torch.compiler.is_compiling() else torch.ops.gcnn.collect
        weight: Tensor = run(bank, table, inverse, cells, channels_last, dtype)
        return weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Expand.apply(grads[0], *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


def _expand(weight: Tensor, table: Tensor, inverse: Tensor, cells: int, channels_last: bool, dtype: torch.dtype) -> Tensor:
    weight = weight.to(dtype)
    if table.shape[1] != inverse.shape[1]:
        weight = F.pad(weight, (0, 1))  # the last number, 0, fills the cells outside the support
    k_out, k_in, q = weight.shape
    first = torch.arange(0, k_in * q, q, device=weight.device)  # (K_in,): where each channel's numbers begin
    places = table[:, None]  # (S, 1, S_in n^d)
    if channels_last:
        places = table.unflatten(1, (-1, cells)).transpose(1, 2).reshape(table.shape[0] * cells, 1, -1)  # (S n^d, 1, S_in)
    index = places + first[:, None]  # (S, K_in, S_in n^d) or (S n^d, K_in, S_in)
    bank = weight.flatten(1).index_select(1, index.flatten())
    if channels_last:
        return bank.reshape(k_out * table.shape[0], cells, -1).transpose(1, 2)
    return bank.reshape(k_out * table.shape[0], -1, cells)


def _collect(bank: Tensor, table: Tensor, inverse: Tensor, cells: int, channels_last: bool, dtype: torch.dtype) -> Tensor:
    (s, q), s_in = inverse.shape, table.shape[1] // cells
    k_in = bank.shape[1] // s_in
    coset, cell = inverse // cells, inverse % cells  # (S, Q)
    element, channel = torch.arange(s, device=bank.device)[:, None, None], torch.arange(k_in, device=bank.device)[:, None]
    if channels_last:
        index = ((element * cells + cell[:, None]) * k_in + channel) * s_in + coset[:, None]  # (S, K_in, Q)
        bank = bank.transpose(1, 2)
    else:
        index = ((element * k_in + channel) * s_in + coset[:, None]) * cells + cell[:, None]
    copies = bank.reshape(bank.shape[0] // s, -1).index_select(1, index.flatten())
    wide = torch.promote_types(dtype, torch.float32)
    return copies.unflatten(1, (s, k_in, q)).sum(1, dtype=wide).to(dtype)  # (K_out, K_in, Q)


for _key in ("CPU", "CUDA", "MPS", "Meta"):
    library.impl("expand", _expand, _key)
    library.impl("collect", _collect, _key)
