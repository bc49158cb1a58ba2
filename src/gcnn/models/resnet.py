"""Residual networks whose downsampling is exact, for any plane group (paper, section 8.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gcnn.groups import Group
from gcnn.nn import CosetPool, GAdaptiveAvgPool, GAvgPool, GBatchNorm, GConv, LiftConv


class Block(nn.Module):
    """A pre-activation block: x + conv(relu(norm(conv(relu(norm(x)))))), with a 1x1 projection where the width changes."""

    def __init__(self, group: Group, k_in: int, k_out: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            GBatchNorm(group, k_in),
            nn.ReLU(),
            GConv(group, k_in, k_out, 3, padding=1, bias=False),
            GBatchNorm(group, k_out),
            nn.ReLU(),
            nn.Dropout3d(dropout) if dropout else nn.Identity(),
            GConv(group, k_out, k_out, 3, padding=1, bias=False),
        )
        self.shortcut = nn.Identity() if k_in == k_out else GConv(group, k_in, k_out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The map (N, k_out, S, H, W) of `x`."""
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


def digit_resnet(
    group: Group,
    widths: Sequence[int],
    blocks: int = 2,
    num_classes: int = 10,
    in_channels: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Images (N, in_channels, 28, 28) to logits (N, num_classes), invariant to the point group, exactly.

    One stage a width, each of `blocks` residual blocks, with average pooling between them: 28, 14, 7 pixels.
    """
    if not group.fills_box:
        raise ValueError(f"digit-resnet: expected a group of the square lattice, got {group.name}")
    layers: list[nn.Module] = [LiftConv(group, in_channels, widths[0], 3, padding=1, bias=False)]
    width = widths[0]
    for i, k in enumerate(widths):
        layers += [GAvgPool(group, 2)] if i else []
        for _ in range(blocks):
            layers.append(Block(group, width, k, dropout))
            width = k
    layers += [GBatchNorm(group, width), nn.ReLU(), CosetPool(group), GAdaptiveAvgPool(group, 1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
