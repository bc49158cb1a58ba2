"""Volumes: all 48 symmetries of the cube, and what remains when a direction is special."""

import torch
from torch import nn

from gcnn import C4v, Oh
from gcnn.nn import CosetPool, GAvgPool, GBatchNorm, GConv, LiftConv
from gcnn.testing import equivariance_error


def main() -> None:
    x = torch.rand(1, 1, 12, 12, 12)
    for group in (Oh, C4v):  # C4v: turns and mirrors about the first axis, for objects that stand upright
        net = nn.Sequential(
            LiftConv(group, 1, 4, 3, padding=1),
            GBatchNorm(group, 4),
            nn.ReLU(),
            GAvgPool(group, 2),  # halves even sizes exactly
            GConv(group, 4, 4, 3, padding=1),
            nn.ReLU(),
            CosetPool(group),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(4, 10),
        ).eval()
        weights = sum(p.numel() for p in net.parameters())
        print(f"{group.name}: {group.order} elements, {weights} parameters, error {equivariance_error(net, group, x):.1e}")


if __name__ == "__main__":
    main()
