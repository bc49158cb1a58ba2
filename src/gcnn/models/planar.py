"""Ordinary networks of torch, written as most people write them; `gcnn.models.build` hands them to `gcnn.convert`.

ResNet (He et al. 2015), DenseNet (Huang et al. 2017), U-Net (Ronneberger et al. 2015), ConvNeXt (Liu et al. 2022), and a
ResNet for volumes. They know nothing of groups. With `odd`, windows of even sizes are larger by one and overlap, so that they
have a middle: hexagonal lattices know no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MAX_POOL: tuple[Any, ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
MEAN: tuple[Any, ...] = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, dim: int, k_in: int, k: int, stride: int = 1) -> None:
        super().__init__()
        conv, norm = CONV[dim - 1], NORM[dim - 1]
        self.conv1, self.bn1 = conv(k_in, k, 3, stride, 1, bias=False), norm(k)
        self.conv2, self.bn2 = conv(k, k, 3, 1, 1, bias=False), norm(k)
        self.relu = nn.ReLU()
        self.downsample = _projection(dim, k_in, k, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of x and conv(relu(conv(x))), with norms."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        found: Tensor = self.relu(y + self.downsample(x))
        return found


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, and a shortcut."""

    expansion = 4

    def __init__(self, dim: int, k_in: int, k: int, stride: int = 1) -> None:
        super().__init__()
        conv, norm = CONV[dim - 1], NORM[dim - 1]
        self.conv1, self.bn1 = conv(k_in, k, 1, bias=False), norm(k)
        self.conv2, self.bn2 = conv(k, k, 3, stride, 1, bias=False), norm(k)
        self.conv3, self.bn3 = conv(k, 4 * k, 1, bias=False), norm(4 * k)
        self.relu = nn.ReLU()
        self.downsample = _projection(dim, k_in, 4 * k, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of x and conv(relu(conv(relu(conv(x))))), with norms."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        found: Tensor = self.relu(y + self.downsample(x))
        return found


def _projection(dim: int, k_in: int, k: int, stride: int) -> nn.Module:
    if stride == 1 and k_in == k:
        return nn.Identity()
    return nn.Sequential(CONV[dim - 1](k_in, k, 1, stride, bias=False), NORM[dim - 1](k))


class ResNet(nn.Module):
    """A ResNet for images of about 224 pixels, or with a `stem` of 3 for small ones."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        widths: Sequence[int] = (64, 128, 256, 512),
        num_classes: int = 1000,
        in_channels: int = 3,
        dim: int = 2,
        stem: int = 7,
    ) -> None:
        super().__init__()
        first = [
            CONV[dim - 1](in_channels, widths[0], stem, 1 if stem == 3 else 2, stem // 2, bias=False),
            NORM[dim - 1](widths[0]),
        ]
        self.stem = nn.Sequential(*first, nn.ReLU(), *([] if stem == 3 else [MAX_POOL[dim - 1](3, 2, 1)]))
        stages, k_in = [], widths[0]
        for i, (k, count) in enumerate(zip(widths, layers, strict=True)):
            for j in range(count):
                stages.append(block(dim, k_in, k, 2 if i and not j else 1))
                k_in = k * block.expansion
        self.blocks = nn.Sequential(*stages)
        self.pool = MEAN[dim - 1](1)
        self.fc = nn.Linear(k_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits (N, num_classes)."""
        x = self.pool(self.blocks(self.stem(x)))
        found: Tensor = self.fc(torch.flatten(x, 1))
        return found


class DenseLayer(nn.Module):
    """New channels from all those before, beside them."""

    def __init__(self, k_in: int, growth: int, bottleneck: bool = True) -> None:
        super().__init__()
        self.bottleneck, k = bottleneck, 4 * growth if bottleneck else k_in
        if bottleneck:
            self.norm1, self.conv1 = nn.BatchNorm2d(k_in), nn.Conv2d(k_in, k, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(k), nn.Conv2d(k, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, H, W) to (N, K + growth, H, W)."""
        y = self.conv1(F.relu(self.norm1(x))) if self.bottleneck else x
        y = self.conv2(F.relu(self.norm2(y)))
        return torch.cat([x, y], 1)


class DenseNet(nn.Module):
    """A DenseNet for images of about 224 pixels.

    With `stem=3` and `bottleneck=False` one for small tiles: nothing is halved before the first block, and transitions keep all
    channels.
    """

    def __init__(
        self,
        growth: int = 32,
        blocks: Sequence[int] = (6, 12, 24, 16),
        num_classes: int = 1000,
        in_channels: int = 3,
        odd: bool = False,
        stem: int = 7,
        bottleneck: bool = True,
    ) -> None:
        super().__init__()
        small = stem <= 3
        k, half = growth if small else 2 * growth, (3, 2, 1) if odd else (2,)
        layers: list[nn.Module] = [nn.Conv2d(in_channels, k, stem, 1 if small else 2, stem // 2, bias=False)]
        layers += [] if small else [nn.BatchNorm2d(k), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        for i, count in enumerate(blocks):
            if i:
                fewer = k // 2 if bottleneck else k
                layers += [nn.BatchNorm2d(k), nn.ReLU(), nn.Conv2d(k, fewer, 1, bias=False), nn.AvgPool2d(*half)]
                k = fewer
            for _ in range(count):
                layers.append(DenseLayer(k, growth, bottleneck))
                k += growth
        self.features, self.norm, self.classifier = nn.Sequential(*layers), nn.BatchNorm2d(k), nn.Linear(k, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits (N, num_classes)."""
        x = F.relu(self.norm(self.features(x)))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        found: Tensor = self.classifier(torch.flatten(x, 1))
        return found


class UNet(nn.Module):
    """A U-Net: images to images of one number a class and pixel. Sides are multiples of 2^levels, with `odd` one more."""

    def __init__(self, width: int = 64, levels: int = 3, num_classes: int = 2, in_channels: int = 3, odd: bool = False) -> None:
        super().__init__()
        window = (3, 2, 1) if odd else (2, 2)  # size, stride, padding
        widths = [width * 2**i for i in range(levels + 1)]
        self.down = nn.ModuleList([self._double(a, b) for a, b in zip([in_channels, *widths], widths, strict=False)])
        self.raise_ = nn.ModuleList([nn.ConvTranspose2d(2 * k, k, *window) for k in reversed(widths[:-1])])
        self.up = nn.ModuleList([self._double(2 * k, k) for k in reversed(widths[:-1])])
        self.pool, self.out = nn.MaxPool2d(*window), nn.Conv2d(width, num_classes, 1)

    @staticmethod
    def _double(k_in: int, k: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a in (k_in, k):
            layers += [nn.Conv2d(a, k, 3, padding=1, bias=False), nn.BatchNorm2d(k), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, num_classes, H, W)."""
        kept: list[Tensor] = []
        for i, down in enumerate(self.down):
            x = down(self.pool(x) if i else x)
            kept.append(x)
        kept.pop()
        for enlarge, up in zip(self.raise_, self.up, strict=True):
            x = up(torch.cat([enlarge(x), kept.pop()], 1))
        found: Tensor = self.out(x)
        return found


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7 convolution, then two linear maps of the channels, and a shortcut."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(k, k, 7, padding=3, groups=k), nn.LayerNorm(k, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(k, 4 * k), nn.GELU(), nn.Linear(4 * k, k)
        self.gamma = nn.Parameter(torch.full((k,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """(N, K, H, W) to the same."""
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A ConvNeXt; sides are multiples of 4 * 2^(stages - 1), with `odd` one more."""

    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        widths: Sequence[int] = (96, 192, 384, 768),
        num_classes: int = 1000,
        in_channels: int = 3,
        odd: bool = False,
    ) -> None:
        super().__init__()
        patches, halves = ((5, 4, 2), (3, 2, 1)) if odd else ((4, 4), (2, 2))  # size, stride, padding
        layers: list[nn.Module] = [nn.Conv2d(in_channels, widths[0], *patches), nn.GroupNorm(1, widths[0])]
        for i, (k, depth) in enumerate(zip(widths, depths, strict=True)):
            if i:
                layers += [nn.GroupNorm(1, widths[i - 1]), nn.Conv2d(widths[i - 1], k, *halves)]
            layers += [ConvNeXtBlock(k) for _ in range(depth)]
        self.features, self.norm, self.head = (
            nn.Sequential(*layers),
            nn.LayerNorm(widths[-1], eps=1e-6),
            nn.Linear(widths[-1], num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits (N, num_classes)."""
        found: Tensor = self.head(self.norm(self.features(x).mean([-2, -1])))
        return found
