"""What is tied in a batch norm on a GPU, in Triton: a few numbers of each plane are pooled over S, in one launch each way.

The passes over the planes are torch's own (see `gcnn.kernels.norm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnn.kernels import on_its_gpu

BLOCK = 128


@on_its_gpu
def pool_statistics(
    means: Tensor,
    variances: Tensor,
    k: int,
    points: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: tuple[Tensor, Tensor] | None,
    rate: float,
) -> tuple[Tensor, Tensor]:
    """Per-plane means and variances (S K,) of `points` numbers each to (4, S K) and (2, K).

    The first are mean, 1 / standard deviation, scale and bias of every plane, the second mean and variance of every map. The
    running statistics, if given, move towards those by `rate`.
    """
    planar, tied = means.new_empty(4, means.numel()), means.new_empty(2, k)
    mean, var = running or (tied, tied)
    grid = (triton.cdiv(k, BLOCK),)
    _pool_statistics[grid](
        means,
        variances,
        weight,
        bias,
        mean,
        var,
        planar,
        tied,
        k,
        means.numel() // k,
        points,
        eps,
        rate,
        running is not None,
        BLOCK,
    )
    return planar, tied


@on_its_gpu
def pool_gradients(sums: tuple[Tensor, ...], k: int, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per-plane sums of dy, dy (x - mean), dy x^, dy: the first two tied (2, S K), the others for each map (2, K); the count."""
    planar, tied = sums[0].new_empty(2, sums[0].numel()), sums[0].new_empty(2, k)
    count = torch.empty(1, dtype=torch.int32, device=planar.device)
    grid = (triton.cdiv(k, BLOCK),)
    _pool_gradients[grid](*sums, planar, tied, count, k, planar.shape[1] // k, points, BLOCK)
    return planar, tied, count


@triton.jit
def _pool_statistics(
    means,
    variances,
    weight,
    bias,
    running_mean,
    running_var,
    planar,
    tied,
    k,
    S: tl.constexpr,
    points,
    EPS: tl.constexpr,
    RATE: tl.constexpr,
    RUNNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < k
    first = tl.load(means + at, mask=inside, other=0.0)
    shift = tl.zeros_like(first)  # of the mean from the first plane's: sums of small numbers
    within = tl.zeros_like(first)
    for i in range(S):
        shift += tl.load(means + i * k + at, mask=inside, other=0.0) - first
        within += tl.load(variances + i * k + at, mask=inside, other=0.0)
    mean = first + shift / S
    between = tl.zeros_like(first)
    for i in range(S):
        away = tl.load(means + i * k + at, mask=inside, other=0.0) - mean
        between += away * away
    var = (within + between) / S
    tl.store(tied + at, mean, mask=inside)
    tl.store(tied + k + at, var, mask=inside)
    if RUNNING:
        count = S * points
        was = tl.load(running_mean + at, mask=inside)
        tl.store(running_mean + at, was + RATE * (mean.to(was.dtype) - was), mask=inside)
        was = tl.load(running_var + at, mask=inside)
        unbiased = var * (count.to(var.dtype) / (count - 1).to(var.dtype))
        tl.store(running_var + at, was + RATE * (unbiased.to(was.dtype) - was), mask=inside)
    inverse = 1 / tl.sqrt(var + EPS)
    scale = tl.full((BLOCK,), 1.0, mean.dtype)
    if weight is not None:
        scale = tl.load(weight + at, mask=inside).to(mean.dtype)
    move = tl.zeros_like(mean)
    if bias is not None:
        move = tl.load(bias + at, mask=inside).to(mean.dtype)
    width = S * k
    for i in range(S):
        tl.store(planar + i * k + at, mean, mask=inside)
        tl.store(planar + width + i * k + at, inverse, mask=inside)
        tl.store(planar + 2 * width + i * k + at, scale, mask=inside)
        tl.store(planar + 3 * width + i * k + at, move, mask=inside)


@triton.jit
def _pool_gradients(sum_dy, sum_dy_x, slopes, totals, planar, tied, count, k, S: tl.constexpr, points, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < k
    zero = tl.zeros((BLOCK,), sum_dy.dtype.element_ty)
    a, b, slope, total = zero, zero, zero, zero
    for i in range(S):
        a += tl.load(sum_dy + i * k + at, mask=inside, other=0.0)
        b += tl.load(sum_dy_x + i * k + at, mask=inside, other=0.0)
        slope += tl.load(slopes + i * k + at, mask=inside, other=0.0)
        total += tl.load(totals + i * k + at, mask=inside, other=0.0)
    for i in range(S):
        tl.store(planar + i * k + at, a, mask=inside)
        tl.store(planar + S * k + i * k + at, b, mask=inside)
    tl.store(tied + at, slope, mask=inside)
    tl.store(tied + k + at, total, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, S * points)
