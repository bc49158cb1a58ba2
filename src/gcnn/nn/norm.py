"""Normalisation with one set of statistics and parameters a G-feature map, which keeps it equivariant (paper, 6.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.checks import check_tensor, shape_text
from gcnn.groups import Group
from gcnn.kernels import few
from gcnn.kernels.norm import follow, has_fast_norm, put_back, take_inside, tied_batch_norm
from gcnn.lattice import domain_mask, kept_domain, mask_outside
from gcnn.layout import fine, from_planes, spread, to_planes, traced
from gcnn.nn.module import Device, GModule, check_group, check_group_is_first


class GBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with one mean, one variance, one scale and one bias a G-feature map (section 6.1).

    Takes (N, K, S, *X), images (N, K, *X) and (N, K, S). The arguments after the group are those of nn.BatchNorm2d. On a
    hexagonal lattice cells outside the domain do not count, and stay zero. With `norm.sync = True` the statistics are those of
    all processes of torch.distributed together, if there are any, on any device; nn.SyncBatchNorm would forget hexagonal domains.

    >>> from gcnn import p4m
    >>> norm = GBatchNorm(p4m, 16)
    >>> norm(torch.rand(2, 16, 8, 9, 9)).shape, norm.running_mean.shape
    (torch.Size([2, 16, 8, 9, 9]), torch.Size([16]))
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """The layer; a TypeError where the group was forgotten."""
        check_group_is_first(cls, args, options)
        return super().__new__(cls)

    def __init__(
        self,
        group: Group,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        check_group("GBatchNorm", group)
        if not isinstance(num_features, int | np.integer) or num_features < 1:
            raise ValueError(f"GBatchNorm({group}): num_features must be a whole number from 1 on, got {num_features!r}")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:  # torch's own argument since 2.13, after the others
            self.register_parameter("bias", None)
        self.group = group
        self.sync = False

    def _check_input_dim(self, x: Tensor) -> None:
        _check_norm_input("GBatchNorm", self.group, self.num_features, x)
        own = self.weight if self.weight is not None else self.running_mean
        if own is not None and x.dtype != own.dtype and torch.promote_types(x.dtype, torch.float32) != own.dtype:
            raise ValueError(
                f"GBatchNorm({self.group}, {self.num_features}): expected input of its own dtype {own.dtype}, got {x.dtype}; "
                "use x.to(dtype) or norm.to(dtype)"
            )

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised; in training mode by the statistics of this batch, which the running ones follow."""
        self._check_input_dim(x)
        hexagonal = not self.group.fills_box and x.ndim > 3
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        together = self.sync and self.training and dist.is_available() and dist.is_initialized()
        if hexagonal and not by_batch:  # what is outside may be anything, and its part in the gradients must be none
            x = mask_outside(self.group, x)
        if by_batch and (together or (hexagonal and x.numel())):  # every process must take part, one without images too
            on_group = hexagonal and not together and x.ndim == self.group.dim + 3
            domain = kept_domain(self.group, x.shape[3:], x) if on_group else None
            if domain is not None and has_fast_norm(x.device):
                return self._normalise_inside(x, domain.inside)
            return self._normalise(x, hexagonal, together)
        if x.ndim == self.group.dim + 3 and x.numel():
            return self._normalise_planes(x, hexagonal, by_batch)
        y = super().forward(x)
        return mask_outside(self.group, y) if hexagonal else y

    def _normalise_planes(self, x: Tensor, hexagonal: bool, by_batch: bool) -> Tensor:
        """A map (N, K, S, *X) plane by plane, in the memory format that it has."""
        if by_batch and (traced() or not has_fast_norm(x.device)):
            return super().forward(x if x.ndim < 6 else x.flatten(2, 3)).reshape(x.shape)  # cudnn takes five axes
        if by_batch:
            self._check_count(x)
        if x.is_cuda and self.momentum is not None and not traced() and few(x, x.numel()):
            rows = x.movedim((2, 1), (-2, -1))  # (N, *X, S, K)
            if rows.is_contiguous():
                y = self._normalise_rows(rows.flatten(0, -2), by_batch).view_as(rows).movedim((-2, -1), (2, 1))
                return mask_outside(self.group, y) if hexagonal else y
        planes, elements = to_planes(x, self.group.dim), x.shape[2]  # (N, S K, *X)
        if by_batch:
            running, rate = self._running()
            return from_planes(tied_batch_norm(planes, elements, self.weight, self.bias, self.eps, running, rate), elements)
        numbers = [spread(n, elements) for n in (self.running_mean, self.running_var, self.weight, self.bias)]
        y = from_planes(F.batch_norm(planes, numbers[0], numbers[1], numbers[2], numbers[3], eps=self.eps), elements)
        return mask_outside(self.group, y) if hexagonal else y

    def _normalise_rows(self, rows: Tensor, by_batch: bool) -> Tensor:
        """Rows of K numbers in one call of torch: fewer launches but slower a number, so for small maps only."""
        rate: Any
        running, rate = self._running() if by_batch else ((self.running_mean, self.running_var), 0.0)
        mean, var = running or (None, None)
        return F.batch_norm(rows, mean, var, self.weight, self.bias, by_batch, rate, self.eps)

    def _normalise_inside(self, x: Tensor, cells: Tensor) -> Tensor:
        """A map on a hexagonal lattice by the statistics of the cells inside its domain: those alone, laid side by side."""
        planes, elements = to_planes(x, self.group.dim), x.shape[2]  # (N, S K, *X)
        inside, last = take_inside(planes, cells)
        self._check_count(x)
        running, rate = self._running()
        y = tied_batch_norm(inside, elements, self.weight, self.bias, self.eps, running, rate)
        return from_planes(put_back(y, cells, planes.shape[2:], last), elements)

    def _check_count(self, x: Tensor) -> None:
        if x.numel() == x.shape[1]:  # a hexagonal domain of more cells than one has seven
            raise ValueError(
                f"GBatchNorm({self.group}, {self.num_features}): one value a channel has no variance, got {tuple(x.shape)}"
            )

    def _running(self) -> tuple[tuple[Tensor, Tensor] | None, float | Tensor]:
        """The running statistics that follow this batch, if any do, and the rate at which."""
        if not (self.training and self.track_running_stats):
            return None, 0.0
        seen: Any = self.num_batches_tracked
        running: Any = (self.running_mean, self.running_var)
        if seen is not None:
            seen.add_(1)
        if self.running_mean is None:
            return None, 0.0
        if self.momentum is not None:
            return running, float(self.momentum)
        return running, 0.0 if seen is None else 1 / seen.to(self.running_mean.dtype)

    def _normalise(self, x: Tensor, hexagonal: bool, together: bool) -> Tensor:
        """By the statistics of the cells inside a hexagonal domain, or of several processes together."""
        channel = (-1, *(1,) * (x.ndim - 2))  # the shape of a channel's number, to meet (N, K, ...)
        inside = x if x.dtype == torch.float64 else x.float()
        inside = mask_outside(self.group, inside) if hexagonal else inside
        count = torch.tensor(x.numel() // x.shape[1], device=x.device)
        if hexagonal:
            mask = domain_mask(self.group, x.shape[-self.group.dim :], x.device)
            count = count // mask.numel() * mask.sum()
        total = torch.cat([_sum_by_channel(inside), count.reshape(1).to(inside.dtype)])
        if together:
            total = _over_processes(total)
        else:
            self._check_count(x)
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = inside - mean.reshape(channel)
        centred = mask_outside(self.group, centred) if hexagonal else centred
        squares = _sum_by_channel(centred.square())
        var = (_over_processes(squares) if together else squares) / count
        running, rate = self._running()
        if running is not None:
            with torch.no_grad():
                follow(running, mean, var * (count / (count - 1).clamp(min=1)), rate)
        y = centred * (var + self.eps).rsqrt().reshape(channel)
        if self.weight is not None:
            y = y * self.weight.reshape(channel)
        if self.bias is not None:
            y = y + self.bias.reshape(channel)
        y = y.to(x.dtype)
        return mask_outside(self.group, y) if hexagonal else y

    def extra_repr(self) -> str:
        """The arguments, as the repr shows them."""
        return f"{self.group}, {super().extra_repr()}"


class GLayerNorm(GModule):
    """Layer normalisation of each place in space over its K channels and S elements, one scale and one bias a channel.

    On the K S planes of a map this is what nn.LayerNorm does over the channels of a planar network, with tied parameters.
    Takes (N, K, S, *X), images (N, K, *X) and, for groups of a plane or of space, (N, K, S): on a line this is an image.

    >>> from gcnn import p4m
    >>> GLayerNorm(p4m, 16)(torch.rand(2, 16, 8, 9, 9)).shape
    torch.Size([2, 16, 8, 9, 9])
    """

    _shown = ("num_channels", "eps")
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        group: Group,
        num_channels: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        if not isinstance(num_channels, int | np.integer) or isinstance(num_channels, bool) or num_channels < 1:
            raise ValueError(f"GLayerNorm({group}): num_channels must be a whole number from 1 on, got {num_channels!r}")
        self.num_channels, self.eps = num_channels, eps
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype)) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised at each place."""
        _check_norm_input("GLayerNorm", self.group, self.num_channels, x)
        spatial = x.ndim != 3 or self.group.dim == 1
        x = mask_outside(self.group, x) if spatial else x
        fibre = (1,) if spatial and x.ndim == self.group.dim + 2 else (1, 2)
        y = fine(x)  # squares overflow in half precision
        var, mean = torch.var_mean(y, fibre, correction=0, keepdim=True)
        y = (y - mean) * (var + self.eps).rsqrt()
        channel = (-1, *(1,) * (x.ndim - 2))
        if self.weight is not None:
            y = y * self.weight.reshape(channel)
        if self.bias is not None:
            y = y + self.bias.reshape(channel)
        y = y.to(x.dtype)
        return mask_outside(self.group, y) if spatial else y


def _sum_by_channel(x: Tensor) -> Tensor:
    """(N, K, ...) to (K,), axis by axis: one sum over a map that lies with its channels last would lose digits."""
    while x.ndim > 2:
        x = x.sum(-1)
    return x.sum(0)


class _OverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _over_processes(grads[0])


def _over_processes(x: Tensor) -> Tensor:
    """The sum over all processes, with a gradient: every process has all of it."""
    summed: Tensor = _OverProcesses.apply(x)
    return summed


def _check_norm_input(layer: str, group: Group, channels: int, x: Tensor) -> None:
    check_tensor(f"{layer}({group}, {channels})", x)
    image = x.ndim == group.dim + 2
    on_group = x.ndim == group.dim + 3 or (x.ndim == 3 and not image)
    elements = x.shape[2] if on_group else group.order
    if not x.is_floating_point():
        raise ValueError(f"{layer}({group}, {channels}): expected floating point numbers, got {x.dtype}; use x.float()")
    fits = elements > 0 and group.order % elements == 0
    if not (image or on_group) or x.shape[1] != channels or not fits:
        if image and x.shape[1] == channels * group.order:
            remedy = f"use x.unflatten(1, ({channels}, {group.order})) if these are planes"
        elif (image or on_group) and fits:
            remedy = f"it has {x.shape[1]} channels, the norm is of {channels}"
        else:
            remedy = f"{group} has {group.order} elements and dimension {group.dim}"
        raise ValueError(
            f"{layer}({group}, {channels}): expected input {shape_text(group, channels)} or an image "
            f"{shape_text(group, channels, None)}, got {tuple(x.shape)}; {remedy}"
        )
