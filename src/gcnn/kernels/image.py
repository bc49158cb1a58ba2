"""The gradient of filters that see an image, on a GPU, in Triton.

An image has few channels, and the gradient of the bank is a product of few columns, K_in n^d, over all points of all images:
cuDNN's algorithms that give the same bits in every run take up to several times longer than reading the numbers does. Here the
points are divided among programs, each of which multiplies what it sees on tensor cores; their sums are added in order.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnn.kernels import on_its_gpu
from gcnn.layout import allows_tf32

PROGRAMS = 528  # that keep a GPU busy


def suits(dy: Tensor, planes: Tensor) -> bool:
    """Whether cuDNN's kernels for the gradient of filters on such planes are slow, where it is one of few columns.

    They are not for more than 64 planes of TF32 or of half the bits.
    """
    return planes.dtype != torch.float64 and (dy.shape[1] <= 64 or (dy.dtype == torch.float32 and not allows_tf32()))


@on_its_gpu
def bank_gradient(
    dy: Tensor,
    image: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The gradients (S K_out, K_in, cells) of the bank and (S K_out,) of its bias, in float32."""
    image, flat = image.contiguous(), (1,) * (3 - len(kernel_size))  # axes that are not there
    rows = dy.movedim(1, -1)
    if not (rows.is_contiguous() or dy.is_contiguous()):
        dy = rows.contiguous().movedim(-1, 1)
    (images, channels), k_in, cells = dy.shape[:2], image.shape[1], math.prod(kernel_size)
    points = images * math.prod(dy.shape[2:])
    columns = k_in * cells + 1  # the last one is of ones, for the bias
    block_c, block_t = (max(16, triton.next_power_of_2(n)) for n in (min(channels, 64), columns))
    tiles = triton.cdiv(channels, block_c)
    each = triton.cdiv(triton.cdiv(points, max(1, PROGRAMS // tiles)), 64) * 64
    sums = torch.empty(triton.cdiv(points, each), channels, columns, dtype=torch.float32, device=dy.device)
    precision = _exact(dy.device) if dy.dtype == torch.float32 and not allows_tf32() else "tf32"
    if sums.numel():
        _bank_gradient[(len(sums), tiles)](
            dy, image, sums, channels, k_in, cells, points, each, dy.stride(0), dy.stride(1), dy.stride(-1),
            *flat, *image.shape[2:], *flat, *dy.shape[2:], *flat, *kernel_size, *flat, *stride, *(0 for _ in flat), *padding,
            *flat, *dilation, precision, block_c, block_t, 64,
        )  # fmt: skip
    total = sums.sum(0)
    return total[:, :-1].unflatten(1, (cells, k_in)).transpose(1, 2), total[:, -1]


@lru_cache(maxsize=16)
def _exact(device: torch.device) -> str:
    """How products of float32 numbers are made exactly: of two halves each, where tensor cores take TF32."""
    halves = device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8)
    return "tf32x3" if halves else "ieee"


@triton.jit
def _bank_gradient(
    dy, image, sums, channels, k_in, cells, points, each, image_step, channel_step, point_step,
    x0, x1, x2, y0, y1, y2, n0, n1, n2, step0, step1, step2, pad0, pad1, pad2, dil0, dil1, dil2,
    PRECISION: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    part, channel = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_T)
    cell, k = column // k_in, column % k_in
    v0, v1, v2 = cell // (n1 * n2) * dil0 - pad0, cell // n2 % n1 * dil1 - pad1, cell % n2 * dil2 - pad2
    seen, one = (cell < cells)[None, :], (column == cells * k_in)[None, :]
    last = tl.minimum(part * each + each, points)
    total = tl.zeros((BLOCK_C, BLOCK_T), tl.float32)
    for start in range(part * each, last, BLOCK_M):
        point = start + tl.arange(0, BLOCK_M)
        within, which = point % (y0 * y1 * y2), (point // (y0 * y1 * y2)).to(tl.int64)
        u0 = (within // (y1 * y2) * step0)[:, None] + v0[None, :]
        u1 = (within // y2 % y1 * step1)[:, None] + v1[None, :]
        u2 = (within % y2 * step2)[:, None] + v2[None, :]
        known = (point < last)[:, None]
        inside = seen & known & (u0 >= 0) & (u0 < x0) & (u1 >= 0) & (u1 < x1) & (u2 >= 0) & (u2 < x2)
        at = (which[:, None] * k_in + k[None, :]) * (x0 * x1 * x2) + (u0 * x1 + u1) * x2 + u2
        patch = tl.load(image + at, mask=inside, other=0.0)
        patch = tl.where(one & known, 1.0, patch).to(image.dtype.element_ty)
        at = which * image_step + within * point_step
        there = (channel < channels)[:, None] & (point < last)[None, :]
        grad = tl.load(dy + at[None, :] + (channel * channel_step)[:, None], mask=there, other=0.0)
        total = tl.dot(grad, patch, total, input_precision=PRECISION)
    columns = cells * k_in + 1
    to = sums + (part * channels + channel).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(to, total, mask=(channel < channels)[:, None] & (column < columns)[None, :])
