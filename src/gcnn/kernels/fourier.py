"""The Fourier algorithm for G-correlations: fewer multiplications than the planar one, the same numbers.

Write each tap of a filter on the group as (b, b v). Then out(t, s) = sum over v of sum over a of x~_v(a) w~_v(s^-1 a), where
x~_v(a) = x(t + a v, a) is what the point t sees of tap v, turned with a, and w~_v(b) = w(b, b v): for each v a product of
functions on the point group. In the basis of `gcnn.irreps` it takes one small matrix for each irreducible representation rho,

    out^[i, k] = sum over l of x^[i, l] W[l, k],    W[l, k] = sum over b of w~(b) rho(b)[k, l],

that is, for real types, the sum of d^3 multiplications instead of S^2, for kernels of any size.

Here in plain torch operations, in blocks of points whose patches stay in the cache; each core of a CPU has points of its own, so
that no numbers go from one to the other.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gcnn.groups import Group, IntArray
from gcnn.indices import doubled_coordinates, index_table, places, support
from gcnn.irreps import FloatArray, fourier_matrix, irreps, multiplications
from gcnn.kernels import in_triton, launched_from_python
from gcnn.kernels.expand import collect, expand_filters
from gcnn.kernels.planar import batched, conv_backward
from gcnn.layout import allows_tf32, as_linear, as_tensor, autocasts, both_sides, filter_dtype, is_linear, output_size, plain

Algorithm = Literal["auto", "planar", "fourier"]
Part = Literal["map", "both ways", "filters"]  # of a step: the map, its gradient too, the gradient of the filters

# bytes of patches worked on at a time: what a core's cache holds, what keeps a GPU busy
BLOCK = {"cpu": 1 << 22, "cuda": 1 << 28}
SHARES = 4  # of a core's points in a block
LARGEST = 48  # the largest order of a group whose transform fits a GPU's registers


class Plan(NamedTuple):
    """What depends on the group and the kernel alone."""

    cells: IntArray
    """(S, P): the cell of the kernel box where a v lies."""
    orbit: IntArray
    """(S, P): which stored number is w(b, b v)."""
    back: IntArray
    """(S P): for each stored number its place in `orbit`."""
    adjoint: IntArray
    """(S P): for each stored number (s, u) that of its inverse (s^-1, -s^-1 u)."""
    matrix: FloatArray
    """(S, S): the Fourier transform."""


@lru_cache(maxsize=256)
def make_plan(group: Group, kernel_size: tuple[int, ...]) -> Plan:
    """The tables of the algorithm, cached and read-only."""
    mask = support(group, kernel_size)
    taps = doubled_coordinates(kernel_size)[mask]  # (P, d)
    rank = np.full(mask.size, -1)
    rank[mask.ravel()] = np.arange(len(taps))
    turned = places(np.einsum("hij,pj->hpi", group.arrays, taps), kernel_size)  # (S, P)
    orbit = np.arange(group.order)[:, None] * len(taps) + rank[turned]
    inverse = np.array(group.inverse)
    mirrored = rank[places(-np.einsum("hij,pj->hpi", group.arrays[inverse], taps), kernel_size)]  # (S, P): -s^-1 u
    adjoint = inverse[:, None] * len(taps) + mirrored
    found = Plan(turned, orbit, np.argsort(orbit.ravel()), adjoint.ravel(), fourier_matrix(group))
    for array in found:
        array.setflags(write=False)
    return found


# measured on a GPU, in 1e12 multiply-adds a second, (planar, Fourier): for maps, then for the gradient of filters
RATES = {
    "float64": ((25.0, 25.0), (25.0, 25.0)),
    "float32": ((44.0, 85.0), (135.0, 50.0)),
    "tf32": ((400.0, 320.0), (190.0, 150.0)),
    "half": ((720.0, 600.0), (700.0, 500.0)),
}


def pays_on_cuda(group: Group, dtype: torch.dtype, k_in: int, k_out: int, taps: int, points: int, part: Part = "map") -> bool:
    """Whether the Fourier algorithm is the faster one on the current GPU, by a model of the two in the proportions of an H200."""
    if group.order > LARGEST or _triton() is None:
        return False
    device = torch.cuda.current_device()
    settings = allows_tf32(), launched_from_python(device), device
    return _pays_on_cuda(group, dtype, k_in, k_out, taps, points, part, settings)


@lru_cache(maxsize=4096)
def _pays_on_cuda(
    group: Group, dtype: torch.dtype, k_in: int, k_out: int, taps: int, points: int, part: Part, settings: tuple[bool, bool, int]
) -> bool:
    """The same, found once: to work it out takes as long as to launch a kernel. It depends on `settings` of torch too.

    Python takes half a millisecond to launch the algorithm; as part of a CUDA graph its many kernels take 0.1 ms for themselves.
    """
    sizes = (k_in, k_out, taps, points)
    kernels, ours = _fastest(group, dtype, *sizes, part)
    planar = _seconds(group, dtype, *sizes, part)[1]
    if kernels is _triton():
        ours += 1e-4
    if settings[1]:
        ours = max(ours, 5e-4)
    return 1.05 * ours < planar


def _fastest(
    group: Group, dtype: torch.dtype, k_in: int, k_out: int, taps: int, points: int, part: Part, *geometry: tuple[int, ...]
) -> tuple[Any, float]:
    """The kernels for a GPU that are the fastest for such maps or filters, and what they take.

    Where there is no geometry, taps fill their box, and nothing is left out or added.
    """
    kernel_size, stride, padding = geometry[:3] or ((taps,), (1,), (0,))
    sizes, filters = (k_in, k_out, taps, points), part == "filters"
    found = [(_triton(), _seconds(group, dtype, *sizes, part)[0])]
    fused, pointwise = in_triton("fused"), _gluon(filters)
    if not filters and math.prod(kernel_size) == taps and fused.suits(group, dtype, k_in, taps):
        found.append((fused, fused.seconds(group, dtype, *sizes)))
    alone = {*kernel_size, *stride} == {1} and not any(padding)  # each point sees itself alone
    if alone and pointwise is not None and pointwise.suits(group, dtype, k_in, k_out):
        found.append((pointwise, pointwise.seconds(group, dtype, k_in, k_out, points)))
    return min(found, key=lambda each: each[1])


def _seconds(
    group: Group, dtype: torch.dtype, k_in: int, k_out: int, taps: int, points: int, part: Part = "map"
) -> tuple[float, float]:
    """What the Fourier algorithm of `gcnn.kernels.fourier_cuda` takes, and the planar one.

    Arithmetic at measured rates; besides, every number of the patches is written and read and every number of the result moved
    twice, at 4.5e12 bytes a second.
    """
    size = torch.finfo(dtype).bits // 8
    kind = "half" if size == 2 else "float64" if size == 8 else "tf32" if allows_tf32() else "float32"
    gradient = part == "filters"
    planar, ours = RATES[kind][gradient]
    if group.order * math.gcd(k_in, k_out) % 64:  # the tiles of cuDNN's kernels are not filled
        planar *= 0.4 if kind == "float32" and gradient else 0.62
        if part == "both ways" and kind == "tf32":  # the way back takes half as long again
            planar *= 0.8
    if kind == "float32" and gradient and (group.dim != 2 or taps == 1):  # the others have Winograd's saving
        planar = 32.0
    if kind == "float32" and not gradient and group.order**2 < 4 * multiplications(group):
        planar = 107.0
    if gradient and kind in ("tf32", "half"):  # cuBLAS cannot divide a small result among many
        ours *= min(1.0, taps * k_in * k_out / 1e5)
    work = 2e-12 * points * taps * k_in * k_out
    moved = 2e-12 * points * group.order * size * (taps * k_in + 2 * k_out) * max(1.0, 32 / k_in)  # short runs take longer
    return work * multiplications(group) / ours + moved / 4.5, work * group.order**2 / planar


def pays(group: Group, k_in: int, k_out: int, taps: int, points: int, convolve: bool = False) -> bool:
    """Whether the Fourier algorithm is the faster one on a CPU, by a model of the two in multiplications of the planar one.

    Every number of a patch is gathered and transformed at a price (a higher one in runs of fewer than 16), and every number of
    the result is transformed back. `convolve` is for CPUs on which `convolutions_are_faster`: what is no convolution costs more
    there. The filters' transform is small beside 256 points and more; with fewer, what the planar algorithm takes is to expand
    its bank, so that large ones of groups that save much are worth a transform instead.
    """
    order, short = group.order, max(0.0, 1200 / k_in - 75)
    if points < 256:
        return order**2 * taps * k_in * k_out >= 5e6 and order**2 >= 4 * multiplications(group)
    if convolve:
        gain, product, price, back = 0.95, 1.5, 110 + 6 * order + short, 0.8
    else:
        gain, product, price, back = 1.0, 1.1, 122 + 1.2 * order + short, 1.3
    saved = (gain * order**2 - product * multiplications(group)) * k_out
    return saved > price * order * (1 + back * k_out / (taps * k_in))


@lru_cache(maxsize=1)
def convolutions_are_faster() -> bool:
    """Whether this CPU multiplies float32 numbers much faster in convolutions than in matrix products.

    On AMD processors with AVX-512 (family 26, Zen 5) oneDNN's convolutions were about twice as fast as MKL's products, so that
    products are 1x1 convolutions there. Told by what the processor says of itself: if times decided, runs would not repeat
    bit for bit.
    """
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        words = Path("/proc/cpuinfo").read_text()
    except OSError:
        words = platform.processor()
    family = re.search(r"family\s*:?\s*(\d+)", words, re.IGNORECASE)
    return "AuthenticAMD" in words and family is not None and int(family[1]) >= 26


def choose(
    group: Group,
    x: Tensor,
    weight: Tensor,
    algorithm: Algorithm,
    groups: int = 1,
    stride: tuple[int, ...] = (1,),
    dtype: torch.dtype | None = None,
) -> Algorithm:
    """The algorithm to take where nothing traces or transforms functions: the faster one for "auto".

    `dtype` is that of the filters on a GPU, if it is not the one that autocast wants now.
    """
    shape, order = x.shape, group.order
    if algorithm == "auto" and (len(shape) != group.dim + 3 or shape[2] != order or groups > 1 or max(stride) > 1):
        return "planar"
    if algorithm == "planar" or x.is_meta or not x.numel() or (not x.is_cuda and autocasts(x.device.type)):
        return "planar"
    if algorithm == "fourier":
        return algorithm
    k_out, k_in, stored = weight.shape
    sizes = (k_in, k_out, stored // order, x.numel() // (shape[1] * order))
    if x.is_cuda:
        wanted = dtype or filter_dtype("cuda", weight.dtype)
        part: Part = "both ways" if torch.is_grad_enabled() and x.requires_grad else "map"
        faster = plain(x) and pays_on_cuda(group, wanted, *sizes, part)
    else:
        fits = x.is_cpu and x.dtype == weight.dtype in (torch.float32, torch.float64)
        faster = fits and pays(group, *sizes, x.dtype == torch.float32 and convolutions_are_faster())
    return "fourier" if faster else "planar"


def fourier_gcorr(
    group: Group,
    planes: Tensor,
    weight: Tensor,
    kernel_size: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Planes (N, S K_in, *X) and filters (K_out, K_in, S P) to planes (N, S K_out, *Y), channels last in memory."""
    found: Tensor = _Fourier.apply(planes, weight, group, kernel_size, tuple(stride), tuple(padding), tuple(dilation))
    return found


class _Fourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, planes: Tensor, weight: Tensor, group: Group, *geometry: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(planes, weight)
        ctx.rest, ctx.linear = (group, geometry), is_linear()
        return correlate(group, planes, weight, *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        planes, weight = ctx.saved_tensors
        group, (kernel_size, stride, padding, dilation) = ctx.rest
        with as_linear(ctx.linear):  # which may be asked on another thread
            # gradients of gradients, or many at once: the planar algorithm has them all
            if torch.is_grad_enabled() or batched(grads[0]):
                return (*_by_planar(group, planes, weight, grads[0], kernel_size, stride, padding, dilation), *(None,) * 5)
            wanted = ctx.needs_input_grad
            found = gradients(group, grads[0], planes, weight, kernel_size, stride, padding, dilation, wanted=wanted)
        return (*found, *(None,) * 5)


def correlate(group: Group, planes: Tensor, weight: Tensor, *geometry: tuple[int, ...]) -> Tensor:
    """The same as `fourier_gcorr`, without gradients."""
    with torch.autocast(planes.device.type, enabled=False):
        return _correlate(group, planes, weight, *geometry)


def gradients(
    group: Group,
    dy: Tensor,
    planes: Tensor,
    weight: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the planes and of the filters, where they are wanted."""
    d_planes = d_weight = None
    with torch.autocast(planes.device.type, enabled=False):
        if wanted[0]:
            spread = _insert_zeros(dy, stride, planes.shape[2:], kernel_size, padding, dilation)
            pad = tuple(d * (n - 1) - p for d, n, p in zip(dilation, kernel_size, padding, strict=True))
            d_planes = _correlate(group, spread, weight, kernel_size, (1,) * group.dim, pad, dilation, adjoint=True)
        if wanted[1]:
            sizes = (weight.shape[1], weight.shape[0], weight.shape[2] // group.order, dy.shape[0] * math.prod(dy.shape[2:]))
            planar = _on_cuda(group, dy) and not pays_on_cuda(group, dy.dtype, *sizes, "filters")
            gradient = _planar_weight_gradient if planar else _weight_gradient
            d_weight = gradient(group, planes, dy, weight, kernel_size, stride, padding, dilation)
    return d_planes, d_weight


@lru_cache(maxsize=1)
def _triton() -> Any:
    """The algorithm's kernels for a GPU; None where Triton is not installed, or knows no tuples yet."""
    return in_triton("fourier_cuda") if _version() >= (3, 4) else None


@lru_cache(maxsize=2)
def _gluon(filters: bool) -> Any:
    """Those for 1x1 kernels, or for the gradient of their filters.

    None where Triton's Gluon, which still changes, is not the one that they have been run with.
    """
    return in_triton("pointwise_filters" if filters else "pointwise") if _version() == (3, 6) else None


def _version() -> tuple[int, ...]:
    """That of Triton."""
    try:
        import triton.language  # the submodule, for the reason that in_triton gives
    except ImportError:
        return (0, 0)
    return tuple(int(n) for n in triton.__version__.split(".")[:2])


def _on_cuda(group: Group, planes: Tensor) -> bool:
    return planes.is_cuda and group.order <= LARGEST and plain(planes) and _triton() is not None


def _correlate(group: Group, planes: Tensor, weight: Tensor, *geometry: tuple[int, ...], adjoint: bool = False) -> Tensor:
    if _on_cuda(group, planes):
        k_in, k_out = weight.shape[:2] if adjoint else (weight.shape[1], weight.shape[0])
        sizes = (k_in, k_out, weight.shape[2] // group.order, planes.numel() // planes.shape[1])
        kernels = _fastest(group, planes.dtype, *sizes, "map", *geometry)[0]
        found: Tensor = kernels.correlate(group, planes, weight, *geometry, adjoint=adjoint)
        return found
    k_out, s = weight.shape[1 if adjoint else 0], group.order
    convolve = planes.is_cpu and planes.dtype == torch.float32 and convolutions_are_faster()
    patches = _Patches(group, planes, *geometry)
    filters = _transform_filters(group, weight.to(patches.dtype), patches.plan, adjoint)
    if convolve:
        filters = [w.permute(2, 0, 1).contiguous().permute(1, 2, 0) for w in filters]  # as convolutions have them
    result, out = empty_planes(planes, patches.size, s, k_out)
    products = planes.new_empty(s * patches.shares * patches.block * k_out, dtype=patches.dtype)
    for start, stop, shares in patches.blocks():
        x = patches.transformed(start, stop, shares)  # (shares, S, B, P K_in)
        y = products[: s * (stop - start) * k_out].view(s, shares, -1, k_out)
        at = 0
        for w in filters:
            d = len(w)
            for i in range(at, at + patches.parts[d, at], d):
                each = _product(x[:, i : i + d], w, convolve)
                y[i : i + d] = each.unflatten(2, (d, k_out)).movedim(2, 0)
            at += patches.parts[d, at]
        back = patches.matrix.t().expand(shares, s, s).bmm(y.flatten(2).transpose(0, 1))  # (shares, S, B K_out)
        out[start:stop].unflatten(0, (shares, -1)).copy_(back.unflatten(2, (-1, k_out)).transpose(1, 2))
    return result


def _product(x: Tensor, w: Tensor, convolve: bool) -> Tensor:
    """(shares, d, B, L) times (d, L, N), added up over d, as matrices or as a convolution."""
    if convolve:
        return F.conv2d(x.permute(0, 3, 1, 2), w.permute(2, 1, 0)[..., None])[:, :, 0].mT
    shared = w[:, None].expand(-1, len(x), -1, -1)
    total = x[:, 0].bmm(shared[0])
    for j in range(1, len(w)):
        total.baddbmm_(x[:, j], shared[j])
    return total


def _weight_gradient(group: Group, planes: Tensor, dy: Tensor, weight: Tensor, *geometry: tuple[int, ...]) -> Tensor:
    if _on_cuda(group, planes):
        sizes = (weight.shape[1], weight.shape[0], weight.shape[2] // group.order, dy.numel() // dy.shape[1])
        kernels = _fastest(group, planes.dtype, *sizes, "filters", *geometry)[0]
        found: Tensor = kernels.weight_gradient(group, planes, dy, weight, *geometry)
        return found
    patches = _Patches(group, planes, *geometry, most=8)  # each share has sums of its own
    k_out, k_in, s, taps = weight.shape[0], weight.shape[1], group.order, patches.plan.cells.shape[1]
    rows = dy.movedim(1, -1).reshape(patches.points, s, k_out)
    sums = [patches.hat.new_zeros(rho.dim, patches.shares, taps * k_in, rho.dim * k_out) for rho in irreps(group)]
    for start, stop, shares in patches.blocks():
        x = patches.transformed(start, stop, shares)  # (shares, S, B, P K_in)
        block = rows[start:stop].to(patches.dtype).unflatten(0, (shares, -1)).transpose(1, 2).flatten(2)  # (shares, S, B K_out)
        y = patches.matrix.expand(shares, s, s).bmm(block).unflatten(2, (-1, k_out))
        at = 0
        for w in sums:
            d = len(w)
            for i in range(at, at + patches.parts[d, at], d):
                each = y[:, i : i + d].transpose(1, 2).flatten(2)  # (shares, B, d K_out)
                for j in range(d):
                    _add_products(w[j, :shares], x[:, i + j], each)
            at += patches.parts[d, at]
    hat = torch.cat([w.sum(1).unflatten(2, (len(w), k_out)).transpose(1, 2).flatten(0, 1) for w in sums]).flatten(1)
    total = _matrices_of(group, hat).t().mm(hat).view(s * taps, k_in, k_out)
    ordered = total.index_select(0, as_tensor(patches.plan.back, total.device))  # (S P, K_in, K_out)
    return ordered.permute(2, 1, 0).to(weight.dtype).contiguous()


def _add_products(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Adds x^T y to the total, for each share.

    With few columns a BLAS adds up all rows one after the other, which is less exact than a convolution's sums: 128 at a time.
    """
    if y.shape[2] >= 16:
        total.baddbmm_(x.mT, y)
        return
    for some, others in zip(x.split(128, 1), y.split(128, 1), strict=True):
        total += some.mT.bmm(others)


def _transform_filters(group: Group, weight: Tensor, plan: Plan, adjoint: bool) -> list[Tensor]:
    """(K_out, K_in, S P) to one (d, P K_in, d K_out) for each irreducible representation; of the adjoint, with its K."""
    order = plan.adjoint[plan.orbit] if adjoint else plan.orbit
    rows = weight.permute(2, 0, 1) if adjoint else weight.permute(2, 1, 0)
    turned = rows.contiguous().index_select(0, as_tensor(order.ravel(), weight.device))  # w~_v(b): (S P, K_in, K_out)
    hat = _matrices_of(group, weight).mm(turned.view(group.order, -1)).unflatten(1, (-1, turned.shape[2]))  # (l k, P K_in, K_out)
    found, at = [], 0
    for rho in irreps(group):
        d = rho.dim
        found.append(hat[at : at + d * d].unflatten(0, (d, d)).transpose(1, 2).flatten(2))
        at += d * d
    return found


def _matrices_of(group: Group, like: Tensor) -> Tensor:
    """(sum of d^2, S): for each representation, rows (l, k) of the numbers rho(b)[k, l]."""
    rows = [rho.matrices.transpose(2, 1, 0).reshape(rho.dim**2, -1) for rho in irreps(group)]
    return as_tensor(np.concatenate(rows), like.device).to(like.dtype)


def empty_planes(like: Tensor, size: Sequence[int], s: int, k: int) -> tuple[Tensor, Tensor]:
    """Planes (N, S K, *X) with their channels last in memory, and the same numbers as (points, S, K).

    The planes are no view: what a Function returns may be changed in place.
    """
    width = s * k
    steps = [math.prod(size[i + 1 :]) * width for i in range(len(size))]
    shape, strides = (like.shape[0], width, *size), (math.prod(size) * width, 1, *steps)
    planes = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    return planes, planes.movedim(1, -1).view(-1, s, k)


class _Patches:
    """What every point of the result sees of the planes, block by block, transformed over the point group."""

    def __init__(
        self,
        group: Group,
        planes: Tensor,
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        *,
        most: int = 1 << 30,
    ) -> None:
        self.plan = make_plan(group, kernel_size)
        self.dtype = torch.promote_types(planes.dtype, torch.float32)
        padded = F.pad(planes, both_sides(padding)) if any(padding) else planes
        rows = padded.movedim(1, -1).contiguous()  # (N, *X, S K_in)
        s, taps = self.plan.cells.shape
        self.k_in = planes.shape[1] // s
        self.rows = rows.view(-1, self.k_in)
        space = rows.shape[1:-1]
        self.size = output_size(space, kernel_size, stride, (0,) * group.dim, dilation)
        self.points = planes.shape[0] * math.prod(self.size)
        steps = [math.prod(space[i + 1 :]) * s for i in range(group.dim)]  # rows from one cell to the next along each axis
        cells = np.stack(np.unravel_index(self.plan.cells, kernel_size), -1)  # (S, P, d)
        offsets = (cells * np.array(dilation) * np.array(steps)).sum(-1) + np.arange(s)[:, None]
        self.offsets = as_tensor(offsets, planes.device)[:, None]  # (S, 1, P)
        first = torch.arange(planes.shape[0], device=planes.device) * (math.prod(space) * s)
        for n, step, stride_ in zip(self.size, steps, stride, strict=True):
            first = (first[:, None] + torch.arange(n, device=planes.device) * (step * stride_)).flatten()
        self.first = first[:, None]  # (points, 1)
        self.matrix = as_tensor(self.plan.matrix, planes.device).to(self.dtype)
        # a BLAS gives each core whole products of a batch if there are several for each; else it parts every product
        threads = torch.get_num_threads()
        self.shares = min(SHARES * threads, max(threads, self.points // 16), most) if planes.is_cpu else 1
        many = max(128, BLOCK.get(planes.device.type, 1 << 28) // (s * taps * self.k_in * 4))
        many = many // SHARES if planes.is_cpu else many
        self.block = min(many, -(-self.points // self.shares))  # points of a share
        # the same memory for every block: what is new takes longer to be had than to be filled
        numbers = s * self.shares * self.block * taps * self.k_in
        self.seen = planes.new_empty(numbers if planes.dtype == self.dtype else 0)
        self.hat = planes.new_empty(numbers, dtype=self.dtype)
        at, self.parts = 0, {}
        for rho in irreps(group):  # (dimension, first coefficient) -> number of coefficients
            self.parts[rho.dim, at] = rho.dim**2 // rho.kind
            at += rho.dim**2 // rho.kind

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, shares) of each block of points, cut into equal shares; the remainder is one."""
        start, shares = 0, self.shares
        while start < self.points:
            count = min(self.block, (self.points - start) // shares)
            count, shares = (count, shares) if count else (self.points - start, 1)
            yield start, start + count * shares, shares
            start += count * shares

    def transformed(self, start: int, stop: int, shares: int) -> Tensor:
        """x^: (shares, S, B, P K_in), until the next block."""
        index = (self.first[start:stop].view(shares, 1, -1, 1) + self.offsets).flatten()  # (shares, S, B, P)
        numbers, s = len(index) * self.k_in, len(self.matrix)
        if len(self.seen):
            seen = torch.index_select(self.rows, 0, index, out=self.seen[:numbers].view(-1, self.k_in))
        else:
            seen = self.rows.index_select(0, index).to(self.dtype)
        matrix, hat = self.matrix.expand(shares, s, s), self.hat[:numbers].view(shares, s, -1)
        return torch.bmm(matrix, seen.view(shares, s, -1), out=hat).view(shares, s, (stop - start) // shares, -1)


def _insert_zeros(
    dy: Tensor,
    stride: tuple[int, ...],
    space: Sequence[int],
    kernel_size: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """The gradient of a strided result as that of one with stride 1."""
    full = [n + 2 * p - d * (k - 1) for n, k, p, d in zip(space, kernel_size, padding, dilation, strict=True)]
    if list(dy.shape[2:]) == full:
        return dy
    wide = dy.new_zeros(*dy.shape[:2], *full)
    kept = tuple(slice(0, (n - 1) * s + 1, s) for n, s in zip(dy.shape[2:], stride, strict=True))
    index: Any = (..., *kept)
    wide[index] = dy
    return wide


def _planar_weight_gradient(
    group: Group, planes: Tensor, dy: Tensor, weight: Tensor, kernel_size: tuple[int, ...], *options: tuple[int, ...]
) -> Tensor:
    """The gradient of the filters as the planar algorithm has it, where that is faster."""
    found = _triton().tables(group, kernel_size, dy.device)
    k_out, cells = weight.shape[0], math.prod(kernel_size)
    shape = (group.order * k_out, planes.shape[1], *kernel_size)
    if planes.dtype in (torch.float16, torch.bfloat16) or allows_tf32():  # as the planar algorithm does, with its rounding
        planes = planes.movedim(1, -1).contiguous().movedim(-1, 1)
    last = planes.stride(1) == 1
    stride, padding, dilation = options
    gradient: Tensor | None
    if is_linear():  # as the planar algorithm there; convolutions without space are slow
        gradient = (dy.flatten(1).mT @ planes.flatten(1)).view(shape)
    else:
        bank = planes.new_empty(1).expand(shape)  # its numbers do not matter
        gradient = conv_backward(dy, planes, bank, None, stride, padding, dilation, 1, (False, True, False))[1]
    assert gradient is not None
    return collect(gradient.flatten(2), found.table, found.inverse, cells, 1, last, weight.dtype, None)


def _by_planar(
    group: Group, planes: Tensor, weight: Tensor, dy: Tensor, kernel_size: tuple[int, ...], *options: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """The gradients of the planes and of the filters, with a graph of their own."""
    table, inverse = (as_tensor(t, weight.device) for t in index_table(group, kernel_size, group.check_subgroup(None)))
    stride, padding, dilation = options
    with torch.enable_grad():
        # of these alone: the filters may have had a part in the map, where a layer is called twice
        planes, weight = (t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (planes, weight))
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[group.dim - 1]
        bank = expand_filters(weight, table, inverse, math.prod(kernel_size), 1, False, weight.dtype).unflatten(2, kernel_size)
        if is_linear():
            y = F.linear(planes.flatten(1), bank.flatten(1)).view(dy.shape)
        else:
            y = convolve(planes, bank, None, stride, padding, dilation)
        return torch.autograd.grad(y, (planes, weight), dy, create_graph=True)
