"""Hexagonal images: resample a picture, and build a network that is exact under the twelve symmetries of a hexagon."""

import torch
from torch import nn

from gcnn import p6m
from gcnn.functional import act
from gcnn.lattice import hexagon, to_hexagonal, to_square
from gcnn.nn import CosetPool, GAdaptiveAvgPool, GBatchNorm, GConv, GMaxPool, LiftConv
from gcnn.testing import equivariance_error


def main() -> None:
    image = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    x = to_hexagonal(image, 33)  # (N, 3, 33, 33) in axial coordinates; cells outside the hexagon are zero
    print(f"{tuple(image.shape)} pixels -> {tuple(x.shape)}, {int(hexagon(33).sum())} cells in the hexagon")
    print("and back:", tuple(to_square(x, (32, 32)).shape))

    net = nn.Sequential(
        LiftConv(p6m, 3, 8, 3, padding=1),  # 7 taps, a hexagon
        GBatchNorm(p6m, 8),
        nn.ReLU(),
        GMaxPool(p6m, 3, stride=2, padding=1),  # 33 -> 17: sizes 4 n + 1 can be halved exactly
        GConv(p6m, 8, 16, 3, padding=1),
        nn.ReLU(),
        CosetPool(p6m),
        GAdaptiveAvgPool(p6m, 1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    net = net.double().eval()
    print(f"error over all {p6m.order} elements: {equivariance_error(net, p6m, x):.1e}")
    turned = act(p6m, 1, x)  # a sixth of a turn, exact: pixels could not do that
    print("a picture and the same turned by 60 degrees agree:", torch.allclose(net(x), net(turned)))


if __name__ == "__main__":
    main()
