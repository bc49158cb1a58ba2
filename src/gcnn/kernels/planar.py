"""The fast algorithm of section 7 as one node of autograd: expand the filters, correlate, and both ways back.

The same as `gcnn.functional.transform_filter` and `planar_gcorr` one after the other, with a fraction of the calls: layers of a
small network spend more time in those than in arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.kernels import Setting, in_triton
from gcnn.kernels.expand import collect, expand, expand_filters
from gcnn.lattice import Domain
from gcnn.layout import from_planes, plain, spread, to_planes

Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # table, inverse, and the same by rows, where there are
Domains = tuple[Domain, Domain]  # of the map that goes in, of the one that comes out

FEW = 128  # up to so many columns (K_in n^d) the gradient of filters that see an image has a kernel of its own on GPUs
KEPT = 1 << 18  # banks of at most so many numbers are always kept for the way back: making them again would take longer


class Plan(NamedTuple):
    """A planar correlation, but for its numbers."""

    tables: Tables
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    depthwise: bool
    """Whether the planes of one element and channel alone are seen by its filters, which lie on the plane."""
    channels_last: bool
    dtype: torch.dtype


def correlate(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, domains: Domains | None = None) -> Tensor:
    """A map or image and filters (K_out, K_in / groups, Q) to a map (N, K_out, S, *Y).

    With the domains of both on a hexagonal lattice, what lies outside of them counts as zero and comes out as zero.
    """
    y: Tensor = _Correlate.apply(x, weight, bias, plan, domains)
    return y if y.ndim > len(plan.kernel_size) + 2 else from_planes(y, plan.tables[0].shape[0], plan.groups)


class _Correlate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, domains: Domains | None) -> Tensor:
        bank = make_bank(weight, plan)
        planes = to_planes(x, len(plan.kernel_size), plan.groups)
        planes = planes if domains is None else torch.where(domains[0].mask, planes, 0.0)
        y = convolve(planes, bank, bias, plan)
        _clear(y, domains and domains[1])
        # a large bank is made again: kept, it takes S times the filters' memory
        small = not x.is_cuda or bank.numel() < max(KEPT, planes.numel() // 8)
        ctx.save_for_backward(x, weight, bias, planes, bank if small else None)
        ctx.rest = plan, domains
        return _as_map(y, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, planes, bank = ctx.saved_tensors
        plan, domains = ctx.rest
        dim, groups = len(plan.kernel_size), plan.groups
        if torch.is_grad_enabled() or batched(grads[0]):  # gradients of gradients, or many at once
            with torch.enable_grad():
                # of these alone: the filters may have had a part in the map, where a layer is called twice
                x, weight, bias = x.view_as(x), weight.view_as(weight), None if bias is None else bias.view_as(bias)
                wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
                inside = x if domains is None else torch.where(domains[0].mask, x, 0.0)
                y = by_parts(inside, weight, bias, plan)
                y = y if grads[0].ndim == dim + 3 else to_planes(y, dim, groups)
                y = y if domains is None else torch.where(domains[1].mask, y, 0.0)
                found = iter(torch.autograd.grad(y, wanted, grads[0], create_graph=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None, None)
        bank = make_bank(weight, plan) if bank is None else bank
        dy = to_planes(grads[0], dim, groups)
        dy = dy if domains is None else torch.where(domains[1].mask, dy, 0.0)
        dx, dweight, dbias = gradients(dy, planes, bank, weight, bias, plan, ctx.needs_input_grad[:3])
        if dx is not None:
            _clear(dx, domains and domains[0])
            dx = from_planes(dx, x.shape[2], groups) if x.ndim == dim + 3 else dx
        return dx, dweight, dbias, None, None


def _as_map(planes: Tensor, plan: Plan) -> Tensor:
    """Makes the planes a map by giving the tensor other strides; where this would take a copy, they stay planes.

    Autograd would track a view, in both directions, and a view that a Function returns cannot be changed in place.
    """
    if plan.groups > 1 or type(planes) is not Tensor:
        return planes
    (n, _, *space), (image, plane, *steps), elements = planes.shape, planes.stride(), plan.tables[0].shape[0]
    k = planes.shape[1] // elements
    return planes.as_strided_((n, k, elements, *space), (image, plane, k * plane, *steps))


def convolve(planes: Tensor, bank: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """The planar correlation of the planes with the bank."""
    numbers, none = spread(bias, plan.tables[0].shape[0], plan.groups), (0,) * len(plan.stride)
    groups = planes.shape[1] if plan.depthwise else plan.groups
    return torch.convolution(planes, bank, numbers, plan.stride, plan.padding, plan.dilation, False, none, groups)


def gradients(
    dy: Tensor, planes: Tensor, bank: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the planes, of the filters and of their bias."""
    (table, inverse, _, back), groups, geometry = plan.tables, plan.groups, (plan.stride, plan.padding, plan.dilation)
    cells = math.prod(plan.kernel_size)
    apart = planes.shape[1] if plan.depthwise else groups
    ours = planes.shape[1] * cells < FEW and dy.is_cuda and wanted[1] and apart == 1 and plain(dy)
    few = ours and in_triton("image") is not None and in_triton("image").suits(dy, planes)
    sizes = None if bias is None else [bank.shape[0]]
    dx, dweight, dbias = (None, None, None)
    if wanted[0] or not few:
        theirs = (wanted[0], False, False) if few else wanted
        dx, dweight, dbias = conv_backward(dy, planes, bank, sizes, *geometry, apart, theirs)
    if few:
        dweight, dbias = in_triton("image").bank_gradient(dy, planes, plan.kernel_size, *geometry)
        dbias = None if bias is None else dbias.to(bias.dtype)
    if dweight is not None:
        dweight = collect(dweight, table, inverse, cells, groups, plan.channels_last, weight.dtype, back)
    if dbias is not None:
        dbias = dbias.view(groups, table.shape[0], -1).sum(1).flatten()
    return dx, dweight, dbias


def make_bank(weight: Tensor, plan: Plan) -> Tensor:
    """The planar bank (S K_out, S_in K_in, *n)."""
    (table, inverse, forth, _), size = plan.tables, plan.kernel_size
    bank = expand(weight, table, inverse, math.prod(size), plan.groups, plan.channels_last, plan.dtype, forth)
    return in_space(bank, size, plan.channels_last)


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
    with _DETERMINISTIC if dy.is_cuda else nullcontext():
        found: tuple[Tensor | None, ...] = _backward(
            dy, planes, bank, bias_sizes, stride, padding, dilation, False, (0,) * len(stride), groups, wanted
        )
    return found


_backward: Any = torch.ops.aten.convolution_backward.default
# torch.backends.cudnn.deterministic, without the time that it takes
_DETERMINISTIC = Setting(torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, lambda: True)


def by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """The same in operations that can be traced, transformed and differentiated in every way."""
    (table, inverse, _, _), size, stride, padding, dilation, groups, depthwise, channels_last, dtype = plan
    bank = expand_filters(weight, table, inverse, math.prod(size), groups, channels_last, dtype)
    torch_convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    planes, numbers = to_planes(x, len(size), groups), spread(bias, table.shape[0], groups)
    apart = planes.shape[1] if depthwise else groups
    y = torch_convolve(planes, in_space(bank, size, channels_last), numbers, stride, padding, dilation, apart)
    return from_planes(y, table.shape[0], groups)


def in_space(bank: Tensor, kernel_size: tuple[int, ...], channels_last: bool) -> Tensor:
    """A bank (S K_out, S_in K_in, cells) as (S K_out, S_in K_in, *n)."""
    if channels_last and 1 in bank.shape[:2]:  # here unflatten alone would make up other strides
        return bank.mT.unflatten(1, kernel_size).movedim(-1, 1)
    return torch.unflatten(bank, 2, kernel_size)


def batched(x: Tensor) -> bool:
    """Whether vmap stands behind `x`."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
