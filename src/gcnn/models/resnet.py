"""Residual networks: the paper's for CIFAR-10 (section 8.2), on square and hexagonal lattices, and invariant ones for digits
and volumes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from gcnn.checks import PLANE_NAMES
from gcnn.groups import Group
from gcnn.models.allcnn import Downsample, check_downsample
from gcnn.models.cnn import ToHexagonal
from gcnn.nn import CosetPool, GAdaptiveAvgPool, GAvgPool, GBatchNorm, GConv, LiftConv
from gcnn.nn.each import ChannelDropout

HEXAGONAL_SIZE = 41  # cells over an image of 32 pixels; 41, 21, 11 are halved exactly
HEXAGONAL_SPACING = (4 / 3) ** 0.25  # a cell has the area of a pixel; the outermost corners of the image are cut off


class Block(nn.Module):
    """A pre-activation block: x + conv(relu(norm(conv(relu(norm(x)))))), with a 1x1 projection where the shape changes."""

    def __init__(
        self, group: Group, k_in: int, k_out: int, stride: int = 1, dropout: float = 0.0, bias: bool = False, pool: int = 1
    ) -> None:
        super().__init__()
        smaller = [GAvgPool(group, pool)] if pool > 1 else []
        self.branch = nn.Sequential(
            GBatchNorm(group, k_in),
            nn.ReLU(),
            *smaller,
            GConv(group, k_in, k_out, 3, stride, padding=1, bias=bias),
            GBatchNorm(group, k_out),
            nn.ReLU(),
            ChannelDropout(dropout) if dropout else nn.Identity(),
            GConv(group, k_out, k_out, 3, padding=1, bias=bias),
        )
        same = k_in == k_out and stride == 1
        projection = [] if same and pool == 1 else [*copy.deepcopy(smaller), GConv(group, k_in, k_out, 1, stride, bias=bias)]
        self.shortcut = projection[0] if len(projection) == 1 else nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """The map (N, k_out, S, *X) of `x`."""
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


def resnet(
    group: Group,
    widths: Sequence[int],
    blocks: int,
    num_classes: int = 10,
    in_channels: int = 3,
    downsample: Downsample = "stride",
    invariant: bool = False,
    hexagonal: bool = False,
) -> nn.Sequential:
    """Images (N, in_channels, 32, 32) to logits (N, num_classes): the paper's ResNets of 6 `blocks` + 2 layers for CIFAR-10.

    A 3x3 layer, then a stage of `blocks` blocks a width, the first of each further stage with stride 2, then the mean over
    space and a linear map of all K S planes. As in the paper, strides on even sizes and that head are not exactly equivariant;
    downsample="pool" averages over 2x2 cells instead of striding, and `invariant` takes the mean over the group before the
    linear map, which then has S times fewer parameters. `hexagonal` resamples the images to a hexagonal lattice first, whose
    sizes can be halved by strides exactly.
    """
    check_downsample(downsample)
    if group.dim != 2:
        meant = PLANE_NAMES.get(group.name.lower(), "p4 or p4m")
        raise ValueError(f"resnet: expected a plane group, such as {meant}, got {group.name} of dimension {group.dim}")
    if not (group.fills_box or hexagonal):
        raise ValueError(f'resnet: {group.name} acts on a hexagonal lattice; use hexagonal=True, or build("hex-resnet26")')
    if hexagonal and downsample == "pool":
        raise ValueError('resnet: downsample="pool" is for even sizes; on a hexagonal lattice "stride" is exact')
    layers: list[nn.Module] = [ToHexagonal(HEXAGONAL_SIZE, HEXAGONAL_SPACING)] if hexagonal else []
    layers.append(LiftConv(group, in_channels, widths[0], 3, padding=1))
    width = widths[0]
    for i, k in enumerate(widths):
        for j in range(blocks):
            step = 2 if i and not j else 1
            how = {"stride": step} if downsample == "stride" else {"pool": step}
            layers.append(Block(group, width, k, bias=True, **how))
            width = k
    layers += [GBatchNorm(group, width), nn.ReLU(), GAdaptiveAvgPool(group, 1)]
    layers += [CosetPool(group, reduce="mean"), nn.Flatten()] if invariant else [nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(width * (1 if invariant else group.order), num_classes))
    for m in net.modules():
        if isinstance(m, GConv):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            nn.init.zeros_(m.bias)  # type: ignore[arg-type]
    return net


def pooled_resnet(
    group: Group,
    widths: Sequence[int],
    blocks: int = 2,
    num_classes: int = 10,
    in_channels: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Images (N, in_channels, 28, 28) or volumes (N, in_channels, 30, 30, 30) to logits, invariant to the point group, exactly.

    One stage a width, each of `blocks` residual blocks, with average pooling between them: 28, 14, 7 pixels, or, since volumes
    are large, 30 voxels with a margin to 32, then 16, 8, 4.
    """
    if not group.fills_box:
        raise ValueError(f"pooled_resnet: expected a group of the square or cubic lattice, got {group.name}")
    flat = group.dim < 3
    layers: list[nn.Module] = [LiftConv(group, in_channels, widths[0], 3, padding=1 if flat else 2, bias=False)]
    layers += [] if flat else [GAvgPool(group, 2)]
    width = widths[0]
    for i, k in enumerate(widths):
        layers += [GAvgPool(group, 2)] if i else []
        for _ in range(blocks):
            layers.append(Block(group, width, k, dropout=dropout))
            width = k
    layers += [GBatchNorm(group, width), nn.ReLU(), CosetPool(group), GAdaptiveAvgPool(group, 1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
