"""What the tests share: every group, and random maps of the right shape and size for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gcnn import GROUPS, Group
from gcnn.lattice import mask_outside

ALL = list(GROUPS.values())
every_group = pytest.mark.parametrize("group", ALL, ids=str)
plane_groups = pytest.mark.parametrize("group", [g for g in ALL if g.dim == 2], ids=str)
some_groups = pytest.mark.parametrize("group", [GROUPS[n] for n in ("linem", "p4", "p4m", "p6m", "D3")], ids=str)


def space(group: Group, size: int) -> tuple[int, ...]:
    """A box of this size, a little shorter along axes that the group leaves alone, so that mixed-up axes show."""
    last = group.axis_classes[-1]
    return tuple(size if i in last else size - 2 for i in range(group.dim))


def image(group: Group, channels: int = 2, size: int = 5, n: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return mask_outside(group, torch.randn(n, channels, *space(group, size), dtype=dtype))


def feature_map(
    group: Group,
    channels: int = 2,
    size: int = 5,
    n: int = 2,
    dtype: torch.dtype = torch.float64,
    stabilizer: tuple[int, ...] = (0,),
) -> Tensor:
    cosets = group.order // len(stabilizer)
    return mask_outside(group, torch.randn(n, channels, cosets, *space(group, size), dtype=dtype))
