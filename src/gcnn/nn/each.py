"""Layers that `gcnn.convert` uses where there is no version tied over the group: they treat each element's map separately."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.checks import check_axes
from gcnn.groups import Group
from gcnn.kernels.norm import put_back, take_inside
from gcnn.lattice import domain_mask, kept_domain, mask_outside
from gcnn.layout import fine, from_planes, to_planes
from gcnn.nn.module import GModule
from gcnn.pooling import on_planes, upsample, upsample_to


class EachElement(GModule):
    """A norm by the statistics of a sample, for each element's map (N, K, *X) separately, within its hexagonal domain if any."""

    def __init__(self, group: Group, module: nn.GroupNorm) -> None:
        super().__init__(group)
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, S, *X) to the same; on a hexagonal lattice images (N, K, *X), too."""
        on_plane = x.ndim == self.group.dim + 2
        domain = None if self.group.fills_box or x.ndim == 3 else kept_domain(self.group, x.shape[-self.group.dim :], x)
        if domain is not None:
            planes = self._inside(to_planes(x, self.group.dim), 1 if on_plane else x.shape[2], domain.inside)
            return planes if on_plane else from_planes(planes, x.shape[2])
        if on_plane and not self.group.fills_box:
            return self._by_mask(x)
        images = x.transpose(1, 2).flatten(0, 1)  # (N S, K, *X)
        images = self.module(images) if self.group.fills_box or x.ndim == 3 else self._by_mask(images)
        return images.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)

    def _inside(self, planes: Tensor, elements: int, cells: Tensor) -> Tensor:
        """Planes (N, S K, *X) with the cells of the hexagon normalised, laid side by side, and zeros outside."""
        norm = self.module
        inside, last = take_inside(planes, cells)
        maps = fine(inside.unflatten(1, (elements, -1)).flatten(0, 1))  # (N S, K, cells)
        weight, bias = (None if p is None else p.to(maps.dtype) for p in (norm.weight, norm.bias))
        y = torch.group_norm(maps, norm.num_groups, weight, bias, norm.eps).to(planes.dtype)
        return put_back(y.view(*planes.shape[:2], len(cells)), cells, planes.shape[2:], last)

    def _by_mask(self, images: Tensor) -> Tensor:
        """The same of images (N, K, *X), by operations that compilers see through."""
        group, norm = self.group, self.module
        mask = domain_mask(group, images.shape[2:], images.device)
        y = fine(torch.where(mask, images, 0.0)).unflatten(1, (norm.num_groups, -1))
        over, count = tuple(range(2, y.ndim)), mask.sum() * y.shape[2]
        centred = torch.where(mask, y - y.sum(over, True) / count, 0.0)
        y = (centred * (centred.square().sum(over, True) / count + norm.eps).rsqrt()).flatten(1, 2)
        shape = (-1, *(1,) * group.dim)
        y = y if norm.weight is None else y * norm.weight.view(shape)
        y = y if norm.bias is None else y + norm.bias.view(shape)
        return torch.where(mask, y, 0.0).to(images.dtype)


class VarianceInside(GModule):
    """The variance over the domain of a hexagonal lattice, or its root; `channels`: over the channels too."""

    _shown = ("channels", "keepdim", "correction", "root")

    def __init__(self, group: Group, channels: bool, keepdim: bool, correction: float, root: bool) -> None:
        super().__init__(group)
        self.channels, self.keepdim, self.correction, self.root = channels, keepdim, correction, root

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, ..., *X) without the axes that are taken together, or with ones in their place."""
        size = x.shape[-self.group.dim :]
        domain = kept_domain(self.group, size, x)
        mask = domain_mask(self.group, size, x.device) if domain is None else domain.mask
        over = (*(1,) * self.channels, *range(-self.group.dim, 0))
        count = mask.sum() * (x.shape[1] if self.channels else 1)
        y = fine(torch.where(mask, x, 0.0))
        centred = torch.where(mask, y - y.sum(over, True) / count, 0.0)
        var = centred.square().sum(over, self.keepdim) / (count - self.correction).clamp(min=0)
        if self.root:  # which has no gradient at zero, and torch's is zero there
            var = torch.where(var > 0, torch.where(var > 0, var, 1.0).sqrt(), var)
        return var.to(x.dtype)


FILLS = {"sum": 0.0, "norm": 0.0, "amax": -math.inf, "logsumexp": -math.inf, "amin": math.inf}  # compilers read no class's


class ReduceSpace(GModule):
    """A sum, maximum or the like over all of space, within its hexagonal domain if any; `channels`: over the channels too.

    What is left out is filled in here, and never leaves: infinities would not turn with a map.
    """

    _shown = ("how", "channels", "keepdim", "options")

    def __init__(self, group: Group, how: str, channels: bool = False, keepdim: bool = False, **options: Any) -> None:
        super().__init__(group)
        self.how, self.channels, self.keepdim, self.options = how, channels, keepdim, options

    @property
    def over(self) -> tuple[int, ...]:
        """The axes that are taken together."""
        return (*(1,) * self.channels, *range(-self.group.dim, 0))

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, ..., *X) without the axes that are taken together, or with ones in their place."""
        inside = mask_outside(self.group, x, FILLS[self.how])
        found: Tensor = getattr(inside, self.how)(dim=self.over, keepdim=self.keepdim, **self.options)
        return found


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation of the channels of each element at each place, (N, K, S, *X)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, S, *X) to the same."""
        y = super().forward(x.unsqueeze(-1).transpose(1, -1).squeeze(1))  # movedim as ONNX files of older torch know it
        return y.unsqueeze(1).transpose(1, -1).squeeze(-1)


class ChannelDropout(nn.Module):
    """Dropout of whole channels of maps (N, K, ...) of any rank."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """`x` without some of its channels, in training."""
        return torch.feature_dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


class AtOnePlace(GModule):
    """A map of a single place, (N, K, S, 1, ...), as a function on the group, (N, K, S)."""

    def __init__(self, group: Group, name: str) -> None:
        super().__init__(group)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """The values at the only place that there is."""
        if x.shape[3:].numel() != 1:
            raise ValueError(
                f"{self.name}: expected a map of a single place, (N, K, S{', 1' * self.group.dim}), got {tuple(x.shape)}; pool "
                "over space first, or give the network images of the size for which it was written"
            )
        return x.flatten(2)


class UpsampleTo(GModule):
    """Enlarges a map to a size known only when it runs; with `turns` it was read from a map or image, and turns with it."""

    _shown = ("mode", "align_corners")

    def __init__(self, group: Group, mode: str, align_corners: bool | None, turns: bool = False) -> None:
        super().__init__(group)
        self.mode = mode if mode == "nearest" else "linear"
        self.align_corners, self.turns = align_corners, turns

    def forward(self, x: Tensor, size: Any) -> Tensor:
        """`x`, enlarged to `size`, one number an axis, or one for all."""
        sizes = (size,) * self.group.dim if isinstance(size, int) else tuple(size)
        if self.turns:
            return upsample_to(self.group, x, sizes, self.mode, self.align_corners)
        return upsample(self.group, x, sizes, None, self.mode, self.align_corners)


class PadBoth(GModule):
    """F.pad of images and maps by as much on either side; `pad` may also be given when it runs, and is checked then."""

    _shown = ("pad", "mode", "value")

    def __init__(self, group: Group, pad: tuple[int, ...] | None, mode: str = "constant", value: float = 0.0) -> None:
        super().__init__(group)
        self.pad, self.mode, self.value = pad, mode, value
        if pad is not None:
            self.pad = self._checked(pad)
        if not group.fills_box and (mode != "constant" or value != 0):
            raise ValueError(f"a pad of mode {mode!r} and value {value} continues a box, and {group} maps hexagons; pad by zeros")

    def _checked(self, pad: Any) -> tuple[int, ...]:
        pad = tuple(pad)
        left, right = pad[0::2], pad[1::2]
        if len(left) != len(right) or len(left) > self.group.dim:
            raise ValueError(f"expected a pad of at most {self.group.dim} axes of space, two numbers each, got {pad}")
        if left != right:
            remedy = "pad both sides alike"
            if self.pad is None:  # the sizes of the image tell, as where a U-Net pads what it has enlarged to the size of a skip
                remedy += "; images whose sides are multiples of the product of the network's strides need no such pad"
            raise ValueError(f"pad (={pad}) pads one side more than the other, which is not equivariant; {remedy}")
        if min(left, default=0) < 0 and not self.group.fills_box:
            raise ValueError(
                f"pad (={pad}) cuts a box out of a box, and {self.group} maps hexagons; convolve without padding instead"
            )
        check_axes(self.group, "pad", (*(0,) * (self.group.dim - len(left)), *left[::-1]))
        return pad

    def forward(self, x: Tensor, pad: Any = None) -> Tensor:
        """`x`, padded."""
        both: Any = self.pad if pad is None else self._checked(pad)
        return on_planes(self.group, x, lambda planes: F.pad(planes, both, self.mode, self.value))


class PooledLinear(nn.Linear):
    """The last linear layer, after pooling over the group what a forward has flattened, (N, K S)."""

    def __init__(self, group: Group, linear: nn.Linear, channels: int, pool: str | None) -> None:
        super().__init__(channels, linear.out_features, linear.bias is not None)
        self.order, self.channels, self.pool = group.order, channels, pool

    def forward(self, x: Tensor) -> Tensor:
        """(N, K S) or (N, K, S) to numbers that do not change with the elements."""
        if x.shape[1:] not in ((self.channels * self.order,), (self.channels, self.order)):
            raise ValueError(
                f"expected functions on the group, (N, {self.channels}, {self.order}) or flat, got {tuple(x.shape)}; flatten(1) "
                "after a pool to a single place is known"
            )
        functions = x.reshape(len(x), self.channels, self.order)
        return super().forward(functions.mean(2) if self.pool == "mean" else functions.amax(2))
