"""What `gcnn.convert` puts in the place of layers that have no tied version: the same on every element's map by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gcnn.groups import Group
from gcnn.nn.module import GModule
from gcnn.pooling import upsample


class EachElement(nn.Module):
    """A module of images on the map (N, K, *X) of every element by itself: a norm with statistics of one sample."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, S, *X) to the same."""
        images = self.module(x.transpose(1, 2).flatten(0, 1))  # (N S, K, *X)
        maps: Tensor = images.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
        return maps


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation of the channels of each element at each place, (N, K, S, *X)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, S, *X) to the same."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


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


class UpsampleTo(GModule):
    """Enlarges a map to a size that is known only when it runs."""

    _shown = ("mode", "align_corners")

    def __init__(self, group: Group, mode: str, align_corners: bool | None) -> None:
        super().__init__(group)
        self.mode = mode if mode == "nearest" else "linear"
        self.align_corners = align_corners

    def forward(self, x: Tensor, size: Any) -> Tensor:
        """`x`, enlarged to `size`, one number an axis."""
        return upsample(self.group, x, tuple(size), None, self.mode, self.align_corners)
