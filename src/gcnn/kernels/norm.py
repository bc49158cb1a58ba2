"""Batch normalisation tied over the group at the price of the planar one: per-plane statistics, pooled over S (paper, 6.1).

Planes (N, S K, *X) keep their memory format, and every pass over them is one of torch's own for planar networks; what is tied
happens on few numbers. Where the channels lie last in memory, the last axis of space is counted among them: sums are then
shorter, so exacter, and torch makes them in half the time. The layer is `gcnn.nn.GBatchNorm`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.kernels import in_triton
from gcnn.layout import from_planes, spread, to_planes

Running = tuple[Tensor, Tensor]


def tied_batch_norm(
    planes: Tensor,
    elements: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None = None,
    rate: float | Tensor = 0.0,
) -> Tensor:
    """Planes (N, S K, *X) normalised by the statistics of each G-feature map.

    The running mean and variance (K,), if given, move towards those by `rate`. Differentiable twice, but not by torch.func.
    """
    last = not planes.is_contiguous() or planes.movedim(1, -1).is_contiguous()
    dense = _dense(planes, last)  # slices of maps have gaps, which torch's sums would not notice
    norm = _CudaTiedNorm if planes.is_cuda else _TiedNorm
    y: Tensor = norm.apply(dense, weight, bias, (elements, eps, last), running, rate)
    return y


def follow(running: Running, mean: Tensor, unbiased: Tensor, rate: float | Tensor) -> None:
    """Moves running statistics towards those of a batch; to be called where no gradient is recorded."""
    for number, seen in zip(running, (mean, unbiased), strict=True):
        number.lerp_(seen.to(number.dtype), rate)


def has_fast_norm(device: torch.device) -> bool:
    """Whether `tied_batch_norm` is there for maps on the device."""
    return device.type == "cpu" or (device.type == "cuda" and in_triton("pool_stats") is not None)


class _TiedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rest: tuple[int, float, bool],
        running: Running | None,
        rate: float | Tensor,
    ) -> Tensor:
        elements, eps, last = rest
        rows, k = _rows(x, last), x.shape[1] // elements
        stats: Any = torch.batch_norm_update_stats
        sums: Any = (None, None)
        if x.dtype in (torch.float16, torch.bfloat16):  # torch takes the dtype of its sums from these
            sums = torch.zeros(2, rows.shape[1], dtype=torch.float32, device=x.device)
        means, variances = stats(rows, *sums, 0.0)
        between, mean = torch.var_mean(means.view(-1, k), 0, correction=0)  # (S K or W S K,) to (K,)
        var = variances.view(-1, k).mean(0).add_(between)
        if running is not None:
            count = x.numel() // k
            follow(running, mean, var * (count / (count - 1)), rate)
        ctx.save_for_backward(x, rows, weight, mean, var)
        ctx.rest = rest, bias is not None
        scale, move = (None if n is None else spread(n.to(mean.dtype), elements) for n in (weight, bias))
        return F.batch_norm(x, spread(mean, elements), spread(var, elements), scale, move, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, weight, mean, var = ctx.saved_tensors
        (elements, eps, last), has_bias = ctx.rest
        if torch.is_grad_enabled():  # asked for a graph of the gradient: plain operations have one
            dx, slope, total = _gradient(grads[0], x, elements, weight, eps)
        else:
            dx, slope, total = _fast_gradient(_dense(grads[0], last), x, rows, elements, weight, mean, var, eps, last)
        return dx, slope if weight is not None else None, total if has_bias else None, None, None, None


class _CudaTiedNorm(torch.autograd.Function):
    """The same with the kernels of torch's SyncBatchNorm: what it pools over processes is pooled over the planes of a map."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rest: tuple[int, float, bool],
        running: Running | None,
        rate: float | Tensor,
    ) -> Tensor:
        elements, eps, last = rest
        rows, k = _matrix(x, last), x.shape[1] // elements
        torch_: Any = torch  # these functions have no types
        means, variances = torch_.batch_norm_update_stats(rows, None, None, 0.0)
        points = x.numel() // x.shape[1]
        at_once = (running, rate) if isinstance(rate, float) else (None, 0.0)  # a constant of the kernel
        planar, tied = in_triton("pool_stats").pool_statistics(means, variances, k, points, weight, bias, eps, *at_once)
        if running is not None and at_once[0] is None:
            count = points * elements
            follow(running, tied[0], tied[1] * (count / (count - 1)), rate)
        mean, inverse, scale, move = planar.unbind()
        y = torch.empty_like(x)  # whole, not a view: what a Function returns may be changed in place
        torch_.batch_norm_elemt(rows, scale, move, mean, inverse, eps, out=_matrix(y, last))
        ctx.save_for_backward(x, rows, weight, planar)
        ctx.rest = rest, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, weight, planar = ctx.saved_tensors
        (elements, eps, last), has_bias = ctx.rest
        if torch.is_grad_enabled():
            dx, slope, total = _gradient(grads[0], x, elements, weight, eps)
        else:
            drows = _matrix(_dense(grads[0], last), last)
            torch_: Any = torch
            numbers = planar.unbind()[:3]  # mean, 1 / standard deviation, scale
            sums = torch_.batch_norm_backward_reduce(drows, rows, *numbers, True, True, True)
            points, k = x.numel() // x.shape[1], x.shape[1] // elements
            tied, found, count = in_triton("pool_stats").pool_gradients(sums, k, points)
            dx = torch_.batch_norm_backward_elemt(drows, rows, *numbers, *tied.unbind(), count)
            dx, (slope, total) = _unmatrix(dx, x, last), found.unbind()
        return dx, slope if weight is not None else None, total if has_bias else None, None, None, None


def take_inside(planes: Tensor, cells: Tensor) -> tuple[Tensor, bool]:
    """Those cells of planes (N, S K, *X) side by side, (N, S K, cells), and whether channels lie last in memory."""
    last = planes.movedim(1, -1).is_contiguous()
    if last:
        inside: Tensor = Inside.apply(planes.movedim(1, -1).flatten(1, -2), cells, 1)
        return inside.mT, last
    return Inside.apply(planes.flatten(2), cells, 2), last


def put_back(y: Tensor, cells: Tensor, size: torch.Size, last: bool) -> Tensor:
    """Planes of this size again, zero in other cells."""
    if last:  # contiguous: else index_copy_ walks through memory
        rows: Tensor = Whole.apply(y.mT.contiguous(), cells, 1, size.numel())
        return rows.unflatten(1, size).movedim(-1, 1)
    whole: Tensor = Whole.apply(y, cells, 2, size.numel())
    return whole.unflatten(2, size)


class Inside(torch.autograd.Function):
    """The chosen cells of an axis, each one once; unlike torch's, the gradient is a copy and not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor, dim: int) -> Tensor:
        """The cells alone."""
        ctx.rest = cells, dim, x.shape[dim]
        return x.index_select(dim, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The other way."""
        return Whole.apply(grads[0], *ctx.rest), None, None


class Whole(torch.autograd.Function):
    """The way back: the cells at their places among `size`, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor, dim: int, size: int) -> Tensor:
        """The cells among zeros."""
        ctx.rest = cells, dim
        shape = list(x.shape)
        shape[dim] = size
        return x.new_zeros(shape).index_copy_(dim, cells, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The other way."""
        return Inside.apply(grads[0], *ctx.rest), None, None, None


def _matrix(planes: Tensor, last: bool) -> Tensor:
    """Planes whose channels lie last in memory, as (points, S K); others as (N, S K, points)."""
    return planes.movedim(1, -1).reshape(-1, planes.shape[1]) if last else planes.flatten(2)


def _unmatrix(rows: Tensor, like: Tensor, last: bool) -> Tensor:
    """Back from `_matrix`."""
    return rows.view(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1) if last else rows.view(like.shape)


def _fast_gradient(
    dy: Tensor, x: Tensor, rows: Tensor, elements: int, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias in two passes over the planes."""
    k = mean.numel()
    means, variances = (spread(n, rows.shape[1] // k) for n in (mean, var))
    _, slopes, totals = torch.ops.aten.native_batch_norm_backward(
        _rows(dy, last), rows, None, means, variances, None, None, False, eps, [False, True, True]
    )
    slope, total = (n.view(-1, k).sum(0) for n in (slopes, totals))  # (K,): of dy x^, of dy
    inverse = (var + eps).rsqrt()
    scale = inverse if weight is None else inverse * weight
    part = scale / -(x.numel() // k)
    tilt = part * inverse * slope
    planar = (n.expand(elements, -1).reshape(-1, *(1,) * (x.ndim - 2)) for n in (scale, tilt, part * total - tilt * mean))
    a, b, c = planar  # dx = a dy + b x + c
    fine = torch.promote_types(x.dtype, torch.float32)
    dx = torch.addcmul(c, x.to(fine), b).addcmul_(dy.to(fine), a)
    return dx.to(x.dtype), slope, total


def _gradient(dy: Tensor, x: Tensor, elements: int, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same by operations that can be differentiated again."""
    fine = torch.promote_types(x.dtype, torch.float32)
    dy, maps = (from_planes(t.to(fine), elements) for t in (dy, x))  # (N, K, S, *X)
    over = [i for i in range(maps.ndim) if i != 1]
    var, mean = torch.var_mean(maps, over, correction=0, keepdim=True)
    inverse = (var + eps).rsqrt()
    normal = (maps - mean) * inverse
    slope, total = (dy * normal).sum(over), dy.sum(over)
    scale = inverse if weight is None else inverse * weight.view_as(mean)
    dx = scale * (dy - dy.mean(over, keepdim=True) - normal * (dy * normal).mean(over, keepdim=True))
    return to_planes(dx, x.ndim - 2).to(x.dtype), slope, total


def _dense(planes: Tensor, last: bool) -> Tensor:
    """The planes without gaps in memory, with their channels last or first; themselves, if they are so already."""
    if not last:
        return planes.contiguous()
    rows = planes.movedim(1, -1)
    return planes if rows.is_contiguous() else rows.contiguous().movedim(-1, 1)


def _rows(planes: Tensor, last: bool) -> Tensor:
    """Planes whose channels lie last in memory, as (N, W S K, rows, 1), W the last axis of space; others as they are."""
    if not last:
        return planes
    rows = planes.movedim(1, -1).reshape(planes.shape[0], -1, planes.shape[-1] * planes.shape[1])  # (N, rows, W S K)
    return rows.transpose(1, 2).unsqueeze(-1)
