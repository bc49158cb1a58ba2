"""A quick look that the layers do on a GPU what they do on the CPU, forward and backward, for groups of every lattice."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gcnn import GROUPS
from gcnn.nn import CosetPool, GBatchNorm, GConv, GMaxPool, LiftConv
from gcnn.testing import equivariance_error, explain


def main() -> None:
    """Prints one line a group."""
    for name in ("linem", "p4", "p4m", "p6m", "D4", "Oh", "D6h"):
        group = GROUPS[name]
        size = 9 if group.dim < 3 else 5
        net = nn.Sequential(
            LiftConv(group, 2, 4, 3, padding=1),
            GBatchNorm(group, 4),
            nn.ReLU(),
            GMaxPool(group, 3, 2, 1),
            GConv(group, 4, 4, 3, padding=1),
            CosetPool(group),
        )
        net = net.double()
        x = torch.rand(2, 2, *(size,) * group.dim, dtype=torch.float64)
        there = copy.deepcopy(net).cuda()
        y, z = net(x), there(x.cuda())
        y.square().sum().backward()
        z.square().sum().backward()
        ours, theirs = ([p.grad.cpu() for p in m.parameters() if p.grad is not None] for m in (net, there))
        gradients = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name}: output {float((y - z.cpu()).detach().abs().max()):.1e}, gradients {gradients:.1e}, "
            f"equivariance {equivariance_error(there, group, x.cuda()):.1e}, explain {explain(there, x.cuda(), group).exact}"
        )


if __name__ == "__main__":
    main()
