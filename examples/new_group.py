"""A group of your own in one line: glass plates seen from both sides, where only half turns and mirrors are symmetries."""

import torch
from torch import nn

from gcnn import generate
from gcnn.nn import CosetPool, GConv, LiftConv
from gcnn.testing import assert_equivariant


def main() -> None:
    plates = generate("plates", ((-1, 0), (0, -1)), ((1, 0), (0, -1)))  # a half turn, a left-right mirror
    print(f"{plates!r}: subgroups {plates.subgroups()}")
    print("product table:", plates.product.tolist())

    net = nn.Sequential(LiftConv(plates, 1, 4, (3, 5)), nn.ReLU(), GConv(plates, 4, 4, 3), CosetPool(plates)).double()
    x = torch.rand(1, 1, 12, 20, dtype=torch.float64)  # mirrors keep the axes apart: kernels and images may be oblong
    assert_equivariant(net, plates, x)
    print("equivariant to all", plates.order, "elements; output", tuple(net(x).shape))


if __name__ == "__main__":
    main()
