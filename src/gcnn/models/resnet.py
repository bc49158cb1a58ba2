"""Residual networks for any plane group (paper, section 8.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gcnn.groups import Group
from gcnn.nn import CosetPool, GAdaptiveAvgPool, GAvgPool, GBatchNorm, GConv, LiftConv


class Block(nn.Module):
    """A pre-activation block: x + conv(relu(norm(conv(relu(norm(x)))))), with a 1x1 projection where the shape changes."""

    def __init__(self, group: Group, k_in: int, k_out: int, stride: int = 1, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            GBatchNorm(group, k_in),
            nn.ReLU(),
            GConv(group, k_in, k_out, 3, stride, padding=1, bias=bias),
            GBatchNorm(group, k_out),
            nn.ReLU(),
            nn.Dropout3d(dropout) if dropout else nn.Identity(),
            GConv(group, k_out, k_out, 3, padding=1, bias=bias),
        )
        same = k_in == k_out and stride == 1
        self.shortcut = nn.Identity() if same else GConv(group, k_in, k_out, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The map (N, k_out, S, H, W) of `x`."""
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


def resnet(
    group: Group,
    widths: Sequence[int],
    blocks: int,
    num_classes: int = 10,
    in_channels: int = 3,
) -> nn.Sequential:
    """Images (N, in_channels, 32, 32) to logits (N, num_classes): the paper's ResNets of 6 `blocks` + 2 layers for CIFAR-10.

    A 3x3 layer, then a stage of `blocks` blocks a width, the first of each further stage with stride 2, then the mean over
    space and a linear map of all K S planes. As in the paper, strides on even sizes and that head are not exactly equivariant.
    """
    if not group.fills_box or group.dim != 2:
        raise ValueError(f"resnet: expected a group of the square lattice, got {group.name}")
    layers: list[nn.Module] = [LiftConv(group, in_channels, widths[0], 3, padding=1)]
    width = widths[0]
    for i, k in enumerate(widths):
        for j in range(blocks):
            layers.append(Block(group, width, k, stride=2 if i and not j else 1, bias=True))
            width = k
    layers += [GBatchNorm(group, width), nn.ReLU(), GAdaptiveAvgPool(group, 1), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(width * group.order, num_classes))
    for m in net.modules():
        if isinstance(m, GConv):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            nn.init.zeros_(m.bias)  # type: ignore[arg-type]
    return net


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
            layers.append(Block(group, width, k, dropout=dropout))
            width = k
    layers += [GBatchNorm(group, width), nn.ReLU(), CosetPool(group), GAdaptiveAvgPool(group, 1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
