"""How maps lie in memory. A planar convolution sees a map (N, K, S, *X) as planes (N, S K, *X), element by element.

On the way between our layers both directions are views: planes that lie with their channels last have the memory order
(N, *X, S, K), in which filters, norms and sums over the group all work on runs of K numbers. A map that a user made in the
order (N, K, S, *X) is copied once. Also here: who is looking (a compiler, tracing, autocast), on which the code path depends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gcnn.groups import Group

NARROW = 64  # up to so many planes exact convolutions on a GPU are faster with channels last


def to_planes(x: Tensor, dim: int, groups: int = 1) -> Tensor:
    """A map (N, K, S, *X) as planes (N, S K, *X), for a grouped convolution group by group; an image (N, K, *X) as it is."""
    if groups == 1:
        return x if x.ndim == dim + 2 else x.transpose(1, 2).flatten(1, 2)
    planes = x if x.ndim == dim + 2 else x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(1, 3)
    # of one sample the first stride may be anything, and torch's gradient of grouped filters is wrong for some (seen in 2.13)
    return planes.contiguous() if not torch.compiler.is_compiling() and len(planes) == 1 else planes


def from_planes(planes: Tensor, elements: int, groups: int = 1) -> Tensor:
    """Planes (N, S K, *X) as a map (N, K, S, *X)."""
    if groups == 1:
        return torch.unflatten(planes, 1, (elements, -1)).transpose(1, 2)  # Tensor.unflatten takes twice the time
    return planes.unflatten(1, (groups, elements, -1)).transpose(2, 3).flatten(1, 2)


def spread(numbers: Tensor | None, elements: int, groups: int = 1) -> Tensor | None:
    """One number a G-feature map, repeated for each of its planes: (K,) to (S K,)."""
    if numbers is None or elements == 1:
        return numbers
    if groups == 1:
        if traced():
            return numbers.repeat(elements)  # inductor 2.4 refuses a bias that is a view
        # repeat takes four times as long; without contiguous() one number would be a view, past which our kernels would read
        return numbers.expand(elements, -1).flatten().contiguous()
    return numbers.view(groups, 1, -1).expand(-1, elements, -1).flatten()


def both_sides(pads: Sequence[int]) -> list[int]:
    """Pads, one an axis, as F.pad takes them."""
    return [p for p in reversed(pads) for _ in (0, 1)]


def output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """The size of what a window gives that moves over a map."""
    axes = zip(size, kernel, stride, padding, dilation, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)


def fine(x: Tensor) -> Tensor:
    """`x` in single precision at least: sums, squares and places need more digits than half precision has."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_tensor(array: Any, device: torch.device) -> Tensor:
    """A cached array as a tensor of its own: those are read-only."""
    return torch.from_numpy(np.array(array)).to(device)


def transformed() -> bool:
    """Whether torch.jit, torch.func or forward-mode differentiation is at work: a backward is not enough for those."""
    return not torch.compiler.is_compiling() and _transforms()


def traced() -> bool:
    """Whether `transformed()`, or a compiler is at work."""
    return torch.compiler.is_compiling() or _transforms()


def _transforms() -> bool:
    at_work: bool = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    return at_work or torch.autograd.forward_ad._current_level >= 0


def plain(x: Tensor) -> bool:
    """Whether our own kernels may read `x`: a plain tensor, under no mode such as FakeTensorMode."""
    return type(x) in (Tensor, torch.nn.Parameter) and _get_current_dispatch_mode() is None


def autocasts(kind: str) -> bool:
    """Whether torch.autocast is at work on this kind of device."""
    return kind in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(kind)


def fast_form(group: Group, x: Tensor, weight: Tensor) -> tuple[bool, torch.dtype]:
    """How planar convolutions of `x` are fastest: whether with channels last, and in which dtype autocast wants the filters."""
    kind = x.device.type
    dtype = filter_dtype(kind, weight.dtype)
    if group.dim == 1 or kind not in ("cpu", "cuda"):
        return False, dtype
    if kind == "cuda" and dtype in (torch.float32, torch.float64) and not (traced() or allows_tf32()):
        # exact convolutions of many planes are about as fast either way: no copies, then
        return group.order * weight.shape[0] <= NARROW or _channels_last(x), dtype
    return True, dtype


def filter_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of filters stored in `dtype` in a convolution on this kind of device: autocast may want another."""
    return torch.get_autocast_dtype(kind) if dtype != torch.float64 and autocasts(kind) else dtype


class _Thread(threading.local):
    linear = False


_THREAD = _Thread()


def is_linear() -> bool:
    """Whether this thread is `as_linear`."""
    return _THREAD.linear


@contextmanager
def as_linear(linear: bool) -> Iterator[None]:
    """Whether `allows_tf32` is asked for linear layers: torch has a setting of its own for matrix products, off by default."""
    before, _THREAD.linear = _THREAD.linear, linear
    try:
        yield
    finally:
        _THREAD.linear = before


def precision_of_products() -> Any:
    """That of cuBLAS's products of float32 numbers: a word, or, in older versions of torch, whether it is TF32.

    Torch's newer setting is the one to write where it exists: writing the older one changes what the newer ones say, for good.
    """
    matmul: Any = torch.backends.cuda.matmul
    return matmul.fp32_precision if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)


def allows_tf32() -> bool:
    """Whether convolutions on CUDA, or matrix products where `as_linear`, may round float32 numbers to TF32."""
    if _THREAD.linear:
        return precision_of_products() in (True, "tf32")
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # set by torch's newer fp32_precision
        newer: Any = torch.backends.cudnn
        return bool(newer.conv.fp32_precision == "tf32")


def _channels_last(x: Tensor) -> bool:
    """Whether the planes of a map or image lie with their channels last in memory."""
    return x.stride(1) == 1 and x.stride(-1) > 1
