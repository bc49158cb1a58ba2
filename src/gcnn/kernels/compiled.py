"""What torch.compile sees of a G-correlation: the operations gcnn::correlate and gcnn::correlate_backward, whole.

Left to itself, a compiler copies maps where we use views, and lays them out with their channels first. It may also not know the
sizes of a call, on which the faster algorithm depends.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gcnn.groups import Group
from gcnn.kernels import fourier
from gcnn.kernels.planar import KEPT, Plan, convolve, gradients, make_bank
from gcnn.layout import from_planes, spread, to_planes


def opaque(x: Tensor) -> bool:
    """Whether to hide a correlation from the compiler at work, as one opaque operation.

    Exported networks, and what torch.func transforms, are to have torch's operations alone.
    """
    if x.device.type not in ("cpu", "cuda") or not torch.compiler.is_compiling() or not hasattr(torch.compiler, "is_exporting"):
        return False
    return not torch.compiler.is_exporting() and not torch._C._are_functorch_transforms_active()


def correlate(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, group: Group, algorithm: str) -> Tensor:
    """A map or image and filters (K_out, K_in / groups, Q) to a map (N, K_out, S, *Y)."""
    y: Tensor = _Correlate.apply(x, weight, bias, plan, group.code, algorithm)
    return from_planes(y, plan.tables[0].shape[0], plan.groups)


class _Correlate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, code: str, algorithm: str) -> Tensor:
        y, bank = torch.ops.gcnn.correlate(x, weight, bias, code, algorithm, *plan.tables, *plan[1:])
        ctx.save_for_backward(x, weight, bias, bank)
        ctx.rest = code, algorithm, plan
        planes: Tensor = y
        return planes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        code, algorithm, plan = ctx.rest
        wanted = [*ctx.needs_input_grad[:2], ctx.saved_tensors[2] is not None]
        found = torch.ops.gcnn.correlate_backward(grads[0], *ctx.saved_tensors, wanted, code, algorithm, *plan.tables, *plan[1:])
        return (*(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True)), None, None, None)


library = torch.library.Library("gcnn", "FRAGMENT")
_REST = (
    "str group, str algorithm, Tensor table, Tensor inverse, Tensor? forth, Tensor? back, "
    "int[] kernel_size, int[] stride, int[] padding, int[] dilation, int groups, bool depthwise, "
    "bool channels_last, ScalarType dtype"
)
library.define(f"correlate(Tensor x, Tensor weight, Tensor? bias, {_REST}) -> (Tensor, Tensor)")
library.define(
    f"correlate_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor bank, bool[] wanted, {_REST}) "
    "-> (Tensor, Tensor, Tensor)"
)


def _correlate(x: Tensor, weight: Tensor, bias: Tensor | None, code: str, algorithm: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """gcnn::correlate: planes with their channels last, if the plan says so; and the bank, if it is small."""
    plan, group = _plan(*rest), _group(code)
    if not _takes_fourier(group, x, weight, algorithm, plan):
        return _planar(x, weight, bias, plan)
    y = fourier.correlate(group, to_planes(x, group.dim), weight, *plan[1:5])
    numbers = spread(bias, group.order)
    y = y if numbers is None else y.add_(numbers.view(-1, *(1,) * group.dim))
    small = plan.tables[0].numel() * weight.shape[0] * weight.shape[1] <= KEPT
    return _ordered(y, plan), make_bank(weight, plan) if small else y.new_empty(0, dtype=plan.dtype)


def _planar(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
    bank = make_bank(weight, plan)
    y = convolve(to_planes(x, len(plan.kernel_size), plan.groups), bank, bias, plan)
    return _ordered(y, plan), bank if bank.numel() <= KEPT else bank.new_empty(0)


def _takes_fourier(group: Group, x: Tensor, weight: Tensor, algorithm: Any, plan: Plan) -> bool:
    regular = x.ndim == group.dim + 3 and x.shape[2] == group.order and plan.groups == 1 and not plan.depthwise
    return regular and fourier.choose(group, x, weight, algorithm, 1, plan.stride, plan.dtype) == "fourier"


def _ordered(y: Tensor, plan: Plan) -> Tensor:
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if plan.channels_last else y.contiguous()


def _correlate_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: Tensor,
    wanted: list[bool],
    code: str,
    algorithm: Any,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """gcnn::correlate_backward: gradients that lie in memory as their tensors do; nothing for those not wanted."""
    plan, group = _plan(*rest), _group(code)
    planes = to_planes(x, group.dim, plan.groups)
    made: tuple[Tensor | None, ...]
    if _takes_fourier(group, x, weight, algorithm, plan):
        dbias = dy.sum((0, *range(2, dy.ndim))).view(group.order, -1).sum(0) if wanted[2] else None
        made = (*fourier.gradients(group, dy, planes, weight, *plan[1:5], wanted=wanted), dbias)
    else:
        bank = bank if bank.numel() else make_bank(weight, plan)
        made = gradients(dy, planes, bank, weight, bias, plan, wanted)
    if made[0] is not None and x.ndim == group.dim + 3:
        made = (from_planes(made[0], x.shape[2], plan.groups), *made[1:])
    return tuple(
        x.new_empty(0) if gradient is None or like is None else _laid_out(gradient, like)
        for gradient, like in zip(made, (x, weight, bias), strict=True)
    )


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the memory order of `like`."""
    found = torch.empty_like(like, dtype=x.dtype)
    return x if x.stride() == found.stride() else found.copy_(x)


def _empty_planes(x: Tensor, weight: Tensor, bias: Tensor | None, code: str, algorithm: str, *rest: Any) -> tuple[Tensor, Tensor]:
    """What `_correlate` returns, without its numbers."""
    return _planar(x, weight, bias, _plan(*rest))


def _empty_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bank: Tensor, wanted: list[bool], *rest: Any
) -> tuple[Tensor, ...]:
    """What `_correlate_backward` returns, without its numbers."""
    return tuple(
        x.new_empty(0) if like is None or not needed else torch.empty_like(like)
        for like, needed in zip((x, weight, bias), wanted, strict=True)
    )


def _plan(table: Tensor, inverse: Tensor, forth: Tensor | None, back: Tensor | None, *rest: Any) -> Plan:
    kernel_size, stride, padding, dilation = (tuple(size) for size in rest[:4])
    return Plan((table, inverse, forth, back), kernel_size, stride, padding, dilation, *rest[4:])


@lru_cache(maxsize=256)
def _group(code: str) -> Group:
    """The group whose `code` this is."""
    return Group(*json.loads(code))


for _key in ("CPU", "CUDA"):
    library.impl("correlate", _correlate, _key)
    library.impl("correlate_backward", _correlate_backward, _key)
library.impl("correlate", _empty_planes, "Meta")
library.impl("correlate_backward", _empty_gradients, "Meta")
