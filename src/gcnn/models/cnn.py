"""The seven-layer networks of the paper's rotated MNIST experiment (section 8.1), for any plane group."""

from __future__ import annotations

import math

from torch import Tensor, nn

from gcnn.checks import PLANE_NAMES
from gcnn.groups import Group
from gcnn.lattice import ROW, to_hexagonal
from gcnn.nn import CosetPool, GBatchNorm, GConv, GMaxPool, LiftConv

HEXAGONAL_SIZE = 29  # 29 cells go through the same seven layers as 28 pixels, with hexagonal windows


class ToHexagonal(nn.Module):
    """Images (N, K, H, W) resampled to a hexagonal lattice of `size` cells across, `spacing` pixels apart."""

    def __init__(self, size: int, spacing: float | None = None) -> None:
        super().__init__()
        self.size, self.spacing = size, spacing

    def forward(self, x: Tensor) -> Tensor:
        """The images on the lattice, (N, K, size, size)."""
        return to_hexagonal(x, self.size, self.spacing)

    def check(self, height: int, width: int) -> None:
        """Raises a ValueError for images of which the lattice leaves out a large part."""
        if max(height / ROW, width) > (self.size - 1) * (self.spacing or 2) + 3:
            seen = "a part of the image" if self.spacing else "less than every other pixel"
            raise ValueError(f"its {self.size} hexagonal cells across would see {seen}")


class MaxOverSpace(nn.Module):
    """(N, K, H, W) to (N, K)."""

    def forward(self, x: Tensor) -> Tensor:
        """The maximum of each channel."""
        return x.amax((-2, -1))


def cnn(
    group: Group,
    channels: int,
    num_classes: int = 10,
    in_channels: int = 1,
    dropout: float = 0.0,
    pool_every_layer: bool = False,
) -> nn.Sequential:
    """Z2CNN (p1, 20 channels, dropout 0.3), P4CNN (p4, 10 channels) or P4CNNRotationPooling (`pool_every_layer`).

    Images (N, in_channels, 28, 28) to logits (N, num_classes), invariant to the point group. Six 3x3 layers with batch norm and
    ReLU, max pooling after the second, dropout after all but the second, a 4x4 layer to the classes. Groups of a hexagonal
    lattice resample the image first and end in a 5x5 layer.
    """
    if group.dim != 2:
        meant = PLANE_NAMES.get(group.name.lower(), "p4 or p4m")
        raise ValueError(f"cnn: expected a plane group, such as {meant}, got {group.name} of dimension {group.dim}")
    layers: list[nn.Module] = [] if group.fills_box else [ToHexagonal(HEXAGONAL_SIZE)]
    for i in range(7):
        k_in, k_out = (in_channels if i == 0 else channels), (num_classes if i == 6 else channels)
        n = 3 if i < 6 else 4 if group.fills_box else 5
        lift = i == 0 or pool_every_layer
        conv = LiftConv(group, k_in, k_out, n) if lift else GConv(group, k_in, k_out, n)
        nn.init.normal_(conv.weight, std=1 / math.sqrt(conv.weight.shape[1] * conv.weight.shape[2]))
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        layers.append(conv)
        if i == 6:
            break
        layers += [GBatchNorm(group, channels, eps=2e-5), nn.ReLU()]
        if pool_every_layer:
            layers.append(CosetPool(group))
        if i == 1:
            layers.append(GMaxPool(group, 2) if group.fills_box else GMaxPool(group, 3, stride=2, padding=1))
        elif dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, CosetPool(group), MaxOverSpace())
