"""The fast algorithm of section 7 as one node of autograd: expand the filters, correlate, and both ways back.

The same as `gcnn.functional.transform_filter` and `planar_gcorr` one after the other, with a fraction of the calls: layers of a
small network spend more time in those than in arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.kernels.expand import collect, expand, expand_filters
from gcnn.lattice import Domain
from gcnn.layout import from_planes, spread, to_planes

Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # table, inverse, and the same by rows, where there are
Domains = tuple[Domain, Domain]  # of the map that goes in, of the one that comes out
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride, padding, dilation, groups


def correlate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: Tables,
    kernel_size: tuple[int, ...],
    geometry: Geometry,
    channels_last: bool,
    dtype: torch.dtype,
    domains: Domains | None = None,
) -> Tensor:
    """A map or image and filters (K_out, K_in / groups, Q) to a map (N, K_out, S, *Y).

    With the domains of both on a hexagonal lattice, what lies outside of them counts as zero and comes out as zero.
    """
    # a view that a Function returns could not be changed in place, so the planes become a map out here
    planes: Tensor = _Correlate.apply(x, weight, bias, tables, kernel_size, geometry, channels_last, dtype, domains)
    return from_planes(planes, len(tables[0]), geometry[3])


class _Correlate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tables: Tables,
        kernel_size: tuple[int, ...],
        geometry: Geometry,
        channels_last: bool,
        dtype: torch.dtype,
        domains: Domains | None,
    ) -> Tensor:
        stride, padding, dilation, groups = geometry
        order, cells = len(tables[0]), math.prod(kernel_size)
        bank = in_space(expand(weight, *tables[:2], cells, groups, channels_last, dtype, tables[2]), kernel_size, channels_last)
        planes = to_planes(x, len(kernel_size), groups)
        planes = planes if domains is None else torch.where(domains[0].mask, planes, 0.0)
        y = torch.convolution(
            planes, bank, spread(bias, order, groups), stride, padding, dilation, False, (0,) * len(kernel_size), groups
        )
        _clear(y, domains and domains[1])
        small = 8 * bank.numel() < planes.numel()  # a large one is made again: kept, it takes S times the filters' memory
        ctx.save_for_backward(x, weight, bias, planes, bank if small or not x.is_cuda else None)
        ctx.rest = tables, kernel_size, geometry, channels_last, dtype
        ctx.domains = domains
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, planes, bank = ctx.saved_tensors
        tables, kernel_size, geometry, channels_last, dtype = ctx.rest
        if torch.is_grad_enabled() or batched(grads[0]):  # gradients of gradients, or many at once
            wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
            with torch.enable_grad():
                inside = x if ctx.domains is None else torch.where(ctx.domains[0].mask, x, 0.0)
                y = to_planes(by_parts(inside, weight, bias, *ctx.rest), len(kernel_size), geometry[3])
                y = y if ctx.domains is None else torch.where(ctx.domains[1].mask, y, 0.0)
                found = iter(torch.autograd.grad(y, wanted, grads[0], create_graph=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), *(None,) * 6)
        stride, padding, dilation, groups = geometry
        order, cells = len(tables[0]), math.prod(kernel_size)
        if bank is None:
            bank = in_space(
                expand(weight, *tables[:2], cells, groups, channels_last, dtype, tables[2]), kernel_size, channels_last
            )
        sizes = None if bias is None else [bank.shape[0]]
        dy = grads[0] if ctx.domains is None else torch.where(ctx.domains[1].mask, grads[0], 0.0)
        dx, dbank, dbias = conv_backward(dy, planes, bank, sizes, stride, padding, dilation, groups, ctx.needs_input_grad[:3])
        if dx is not None:
            _clear(dx, ctx.domains and ctx.domains[0])
            dx = from_planes(dx, x.shape[2], groups) if x.ndim == len(kernel_size) + 3 else dx
        dweight = (
            None
            if dbank is None
            else collect(dbank.flatten(2), *tables[:2], cells, groups, channels_last, weight.dtype, tables[3])
        )
        if dbias is not None:
            dbias = dbias.view(groups, order, -1).sum(1).flatten()
        return dx, dweight, dbias, None, None, None, None, None, None


def _clear(planes: Tensor, domain: Domain | None) -> None:
    """Sets the cells outside the domain to zero, in place, and touches no others."""
    if domain is None or not len(domain.outside):
        return
    rows = planes.movedim(1, -1)
    if rows.is_contiguous():
        rows.flatten(1, -2).index_fill_(1, domain.outside, 0.0)
    elif planes.is_contiguous():
        planes.flatten(2).index_fill_(2, domain.outside, 0.0)
    else:
        planes.mul_(domain.mask)


def conv_backward(
    dy: Tensor,
    planes: Tensor,
    bank: Tensor,
    bias_sizes: list[int] | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of torch.convolution by algorithms that give the same bits in every run; cuDNN has others."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            dy, planes, bank, bias_sizes, stride, padding, dilation, False, (0,) * len(stride), groups, wanted
        )
    finally:
        torch.backends.cudnn.deterministic = before
    return found


def by_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: Tables,
    kernel_size: tuple[int, ...],
    geometry: Geometry,
    channels_last: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The same in operations that can be traced, transformed and differentiated in every way."""
    stride, padding, dilation, groups = geometry
    order = len(tables[0])
    bank = in_space(
        expand_filters(weight, *tables[:2], math.prod(kernel_size), groups, channels_last, dtype), kernel_size, channels_last
    )
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(kernel_size) - 1]
    planes = to_planes(x, len(kernel_size), groups)
    y = convolve(planes, bank, spread(bias, order, groups), stride, padding, dilation, groups)
    return from_planes(y, order, groups)


def in_space(bank: Tensor, kernel_size: tuple[int, ...], channels_last: bool) -> Tensor:
    """A bank (S K_out, S_in K_in, cells) as (S K_out, S_in K_in, *n)."""
    if channels_last:  # by way of (S K_out, *n, S_in K_in): with one channel, unflatten alone would make up other strides
        return bank.mT.unflatten(1, kernel_size).movedim(-1, 1)
    return bank.unflatten(2, kernel_size)


def batched(x: Tensor) -> bool:
    """Whether vmap stands behind `x`."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
