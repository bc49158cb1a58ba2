"""The fast algorithm of section 7 as one node of autograd: expand the filters, correlate, and both ways back.

The same as `gcnn.functional.transform_filter` and `planar_gcorr` one after the other, with a fraction of the calls: layers of a
small network spend more time in those than in arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.kernels.expand import collect, expand, expand_filters
from gcnn.lattice import Domain
from gcnn.layout import from_planes, plain, spread, to_planes

Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # table, inverse, and the same by rows, where there are
Domains = tuple[Domain, Domain]  # of the map that goes in, of the one that comes out

KEPT = 1 << 18  # numbers of a bank that is kept for the way back whatever the map: to make it again would take longer


class Plan(NamedTuple):
    """A planar correlation, but for its numbers."""

    tables: Tables
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels_last: bool
    dtype: torch.dtype


def correlate(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, domains: Domains | None = None) -> Tensor:
    """A map or image and filters (K_out, K_in / groups, Q) to a map (N, K_out, S, *Y).

    With the domains of both on a hexagonal lattice, what lies outside of them counts as zero and comes out as zero.
    """
    # a view that a Function returns could not be changed in place, so the planes become a map out here
    planes: Tensor = _Correlate.apply(x, weight, bias, plan, domains)
    return from_planes(planes, plan.tables[0].shape[0], plan.groups)


class _Correlate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, domains: Domains | None) -> Tensor:
        bank = _bank(weight, plan)
        planes = to_planes(x, len(plan.kernel_size), plan.groups)
        planes = planes if domains is None else torch.where(domains[0].mask, planes, 0.0)
        y = _convolve(planes, bank, bias, plan)
        _clear(y, domains and domains[1])
        # a large bank is made again: kept, it takes S times the filters' memory
        small = not x.is_cuda or bank.numel() < max(KEPT, planes.numel() // 8)
        ctx.save_for_backward(x, weight, bias, planes, bank if small else None)
        ctx.rest = plan, domains
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, planes, bank = ctx.saved_tensors
        plan, domains = ctx.rest
        dim, groups = len(plan.kernel_size), plan.groups
        if torch.is_grad_enabled() or batched(grads[0]):  # gradients of gradients, or many at once
            wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
            with torch.enable_grad():
                inside = x if domains is None else torch.where(domains[0].mask, x, 0.0)
                y = to_planes(by_parts(inside, weight, bias, plan), dim, groups)
                y = y if domains is None else torch.where(domains[1].mask, y, 0.0)
                found = iter(torch.autograd.grad(y, wanted, grads[0], create_graph=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None, None)
        bank = _bank(weight, plan) if bank is None else bank
        dy = grads[0] if domains is None else torch.where(domains[1].mask, grads[0], 0.0)
        dx, dweight, dbias = _gradients(dy, planes, bank, weight, bias, plan, ctx.needs_input_grad[:3])
        if dx is not None:
            _clear(dx, domains and domains[0])
            dx = from_planes(dx, x.shape[2], groups) if x.ndim == dim + 3 else dx
        return dx, dweight, dbias, None, None


def _convolve(planes: Tensor, bank: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    numbers, none = spread(bias, plan.tables[0].shape[0], plan.groups), (0,) * len(plan.stride)
    return torch.convolution(planes, bank, numbers, plan.stride, plan.padding, plan.dilation, False, none, plan.groups)


def _gradients(
    dy: Tensor, planes: Tensor, bank: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the planes, of the filters and of their bias."""
    (table, inverse, _, back), groups, geometry = plan.tables, plan.groups, (plan.stride, plan.padding, plan.dilation)
    ours = wanted[1] and groups == 1 and dy.is_cuda and plain(dy) and _triton() is not None
    few = ours and _triton().suits(planes, plan.kernel_size)
    sizes = None if bias is None else [bank.shape[0]]
    dx, dweight, dbias = (None, None, None)
    if wanted[0] or not few:
        theirs = (wanted[0], False, False) if few else wanted
        dx, dweight, dbias = conv_backward(dy, planes, bank, sizes, *geometry, groups, theirs)
    if few:
        dweight, dbias = _triton().bank_gradient(dy, planes, plan.kernel_size, *geometry)
        dbias = None if bias is None else dbias.to(bias.dtype)
    if dweight is not None:
        dweight = collect(dweight, table, inverse, math.prod(plan.kernel_size), groups, plan.channels_last, weight.dtype, back)
    if dbias is not None:
        dbias = dbias.view(groups, table.shape[0], -1).sum(1).flatten()
    return dx, dweight, dbias


@lru_cache(maxsize=1)
def _triton() -> Any:
    try:
        from gcnn.kernels import image
    except ImportError:
        return None
    return image


def _bank(weight: Tensor, plan: Plan) -> Tensor:
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
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            dy, planes, bank, bias_sizes, stride, padding, dilation, False, (0,) * len(stride), groups, wanted
        )
    finally:
        torch.backends.cudnn.deterministic = before
    return found


def by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """The same in operations that can be traced, transformed and differentiated in every way."""
    if _opaque(x):
        y: Tensor = _OpaqueCorrelate.apply(x, weight, bias, plan)
        return from_planes(y, plan.tables[0].shape[0], plan.groups)
    (table, inverse, _, _), size, stride, padding, dilation, groups, channels_last, dtype = plan
    bank = expand_filters(weight, table, inverse, math.prod(size), groups, channels_last, dtype)
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    planes, numbers = to_planes(x, len(size), groups), spread(bias, table.shape[0], groups)
    y = convolve(planes, in_space(bank, size, channels_last), numbers, stride, padding, dilation, groups)
    return from_planes(y, table.shape[0], groups)


def _opaque(x: Tensor) -> bool:
    """Whether a compiler is at work that must not look into a correlation.

    Of the views between maps and planes torch.compile makes copies, and lays maps out as if their channels came first.
    Exported networks, and what torch.func transforms, are to have torch's operations alone.
    """
    if x.device.type not in ("cpu", "cuda") or not torch.compiler.is_compiling() or not hasattr(torch.compiler, "is_exporting"):
        return False
    return not torch.compiler.is_exporting() and not torch._C._are_functorch_transforms_active()


class _OpaqueCorrelate(torch.autograd.Function):
    """By the operations gcnn::planar and gcnn::planar_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        y, bank = torch.ops.gcnn.planar(x, weight, bias, *plan.tables, *plan[1:])
        ctx.save_for_backward(x, weight, bias, bank)
        ctx.plan = plan
        planes: Tensor = y
        return planes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, bank = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None]
        found = torch.ops.gcnn.planar_backward(grads[0], x, weight, bias, bank, *ctx.plan.tables, *ctx.plan[1:], wanted)
        return (*(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True)), None)


library = torch.library.Library("gcnn", "FRAGMENT")
_PLAN = (
    "Tensor table, Tensor inverse, Tensor? forth, Tensor? back, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "int groups, bool channels_last, ScalarType dtype"
)
library.define(f"planar(Tensor x, Tensor weight, Tensor? bias, {_PLAN}) -> (Tensor, Tensor)")
library.define(
    f"planar_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor bank, {_PLAN}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor)"
)


def _plan(table: Tensor, inverse: Tensor, forth: Tensor | None, back: Tensor | None, *rest: Any) -> Plan:
    kernel_size, stride, padding, dilation = (tuple(size) for size in rest[:4])
    return Plan((table, inverse, forth, back), kernel_size, stride, padding, dilation, *rest[4:])


def _planar(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """gcnn::planar: planes with their channels last, if the plan says so; and the bank, if it is small."""
    plan = _plan(*rest)
    bank = _bank(weight, plan)
    y = _convolve(to_planes(x, len(plan.kernel_size), plan.groups), bank, bias, plan)
    y = y.movedim(1, -1).contiguous().movedim(-1, 1) if plan.channels_last else y.contiguous()
    return y, bank if bank.numel() <= KEPT else bank.new_empty(0)


def _planar_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bank: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """gcnn::planar_backward: gradients that lie in memory as their tensors do; nothing for those not wanted."""
    *rest_, wanted = rest
    plan = _plan(*rest_)
    dim = len(plan.kernel_size)
    planes = to_planes(x, dim, plan.groups)
    bank = bank if bank.numel() else _bank(weight, plan)
    dx, dweight, dbias = _gradients(dy, planes, bank, weight, bias, plan, wanted)
    if dx is not None:
        dx = from_planes(dx, x.shape[2], plan.groups) if x.ndim == dim + 3 else dx
    return tuple(
        x.new_empty(0) if made is None or like is None else _laid_out(made, like)
        for made, like in zip((dx, dweight, dbias), (x, weight, bias), strict=True)
    )


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the memory order of `like`."""
    found = torch.empty_like(like, dtype=x.dtype)
    return x if x.stride() == found.stride() else found.copy_(x)


def _empty_gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """What `_planar_backward` returns, without its numbers."""
    return tuple(
        x.new_empty(0) if like is None or not needed else torch.empty_like(like)
        for like, needed in zip((x, weight, bias), rest[-1], strict=True)
    )


for _key in ("CPU", "CUDA"):
    library.impl("planar", _planar, _key)
    library.impl("planar_backward", _planar_backward, _key)
library.impl("planar", _planar, "Meta")
library.impl("planar_backward", _empty_gradients, "Meta")


def in_space(bank: Tensor, kernel_size: tuple[int, ...], channels_last: bool) -> Tensor:
    """A bank (S K_out, S_in K_in, cells) as (S K_out, S_in K_in, *n)."""
    if channels_last and 1 in bank.shape[:2]:  # here unflatten alone would make up other strides
        return bank.mT.unflatten(1, kernel_size).movedim(-1, 1)
    return bank.unflatten(2, kernel_size)


def batched(x: Tensor) -> bool:
    """Whether vmap stands behind `x`."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
