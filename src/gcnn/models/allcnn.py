"""All-CNN-C of the paper's CIFAR-10 experiment (section 8.2), for any group of the square lattice."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from gcnn.groups import Group
from gcnn.nn import CosetPool, GAvgPool, GBatchNorm, GConv, LiftConv

Downsample = Literal["stride", "pool"]


class MeanOverSpace(nn.Module):
    """(N, K, H, W) to (N, K)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean of each channel."""
        return x.mean((-2, -1))


def check_downsample(downsample: str) -> None:
    """Raises a ValueError unless `downsample` is a known way to halve maps."""
    if downsample not in ("stride", "pool"):
        raise ValueError(f'downsample must be "stride" (the paper\'s) or "pool" (exact on even sizes), got {downsample!r}')


def allcnn(
    group: Group,
    channels: int,
    num_classes: int = 10,
    in_channels: int = 3,
    dropout: float = 0.5,
    input_dropout: float = 0.2,
    downsample: Downsample = "stride",
) -> nn.Sequential:
    """Images (N, in_channels, 32, 32) to logits (N, num_classes), with K = `channels` in the first three layers, then 2 K.

    3x3 layers K, K, K with stride 2, 2 K, 2 K, 2 K with stride 2, 2 K, then 1x1 layers 2 K and num_classes, each with batch norm
    and ReLU; the mean over space and group. Strides on even sizes are not exactly equivariant, as in the paper;
    downsample="pool" averages over 2x2 cells instead, which is, with the same parameters.
    """
    check_downsample(downsample)
    if not group.fills_box or group.dim != 2:
        raise ValueError(f"allcnn: expected a group of the square lattice, got {group.name}")
    widths = [channels] * 3 + [2 * channels] * 5 + [num_classes]
    layers: list[nn.Module] = [nn.Dropout(input_dropout)] if input_dropout else []
    for i, (k_in, k) in enumerate(zip([in_channels, *widths], widths, strict=False)):
        size, halves = (3 if i < 7 else 1), i in (2, 5)
        stride = 2 if halves and downsample == "stride" else 1
        conv = (LiftConv if i == 0 else GConv)(group, k_in, k, size, stride, padding=size // 2)
        nn.init.normal_(conv.weight, std=0.05 if group.order == 1 else 0.035)
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        layers += [conv, GBatchNorm(group, k), nn.ReLU()]
        if halves:
            layers += [GAvgPool(group, 2)] if downsample == "pool" else []
            layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, CosetPool(group, reduce="mean"), MeanOverSpace())
