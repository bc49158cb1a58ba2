"""Hexagonal images: geometry by plain trigonometry, and a whole stack that is exact under all of p6m."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common import ALL
from gcnn import GROUPS, lattice, p6m
from gcnn.functional import act
from gcnn.indices import support
from gcnn.lattice import domain_mask, hexagon, mask_outside, to_hexagonal, to_square
from gcnn.nn import CosetPool, GAdaptiveAvgPool, GAvgPool, GBatchNorm, GConv, GMaxPool, GUpsample, LiftConv
from gcnn.testing import assert_equivariant


def smooth(height: int, width: int, angle: float = 0.0) -> Tensor:
    """A smooth picture, turned anticlockwise about its centre by `angle`."""
    y, x = torch.meshgrid(torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij")
    c, s = math.cos(angle), math.sin(angle)
    u, v = c * x - s * y, s * x + c * y  # rows point down
    blobs = ((6, 2, 1.0), (-4, 5, -0.7), (1, -7, 0.9))
    return sum(a * torch.exp(-((u - p) ** 2 + (v - q) ** 2) / 18) for p, q, a in blobs)[None, None]  # type: ignore[index]


def test_masks_in_torch_and_numpy_agree() -> None:
    for group in ALL:
        size = (7, 5, 5) if group.dim == 3 and len(group.axis_classes) == 2 else (5,) * group.dim
        assert np.array_equal(domain_mask(group, size).numpy(), support(group, size))
    assert hexagon(7).sum() == 1 + 6 + 12 + 18


def test_a_hexagonal_image_is_the_picture_at_the_places_of_the_lattice() -> None:
    image = smooth(41, 41).double()
    n, spacing = 25, 1.3
    found = to_hexagonal(image, n, spacing)[0, 0]
    u = torch.arange(n) - n // 2
    row, column = u[:, None] * spacing * math.sqrt(3) / 2 + 0 * u, (u[None, :] + u[:, None] / 2) * spacing
    blobs = ((6, 2, 1.0), (-4, 5, -0.7), (1, -7, 0.9))
    exact = sum(a * torch.exp(-((column - p) ** 2 + (row - q) ** 2) / 18) for p, q, a in blobs)
    mask = hexagon(n)
    assert (found - exact)[mask].abs().max() < 2 / 8 / 9  # bilinear interpolation: 1/8 of the second derivative an axis, 1/9 here
    assert not found[~mask].any()


def test_turning_the_picture_turns_the_hexagonal_image() -> None:
    """A sixth of a turn of the picture, which pixels do not allow, is a permutation of cells: L_r of p6."""
    straight, turned = to_hexagonal(smooth(61, 61), 25, 1.5), to_hexagonal(smooth(61, 61, math.pi / 3), 25, 1.5)
    assert (act(p6m, 1, straight) - turned).abs().max() < 0.02
    assert (act(p6m, 5, straight) - turned).abs().max() > 0.3


@pytest.mark.parametrize("size", [(32, 32), (33, 33), (20, 28)])
def test_resampling_commutes_with_the_symmetries_both_lattices_share(size: tuple[int, int]) -> None:
    image = torch.rand(2, 3, *size, dtype=torch.float64)
    x = to_hexagonal(image)
    flip = p6m.index(((-1, 0), (1, 1)))  # rows change sign, columns stay: in axial coordinates
    for h, turn in ((p6m.index(((-1, 0), (0, -1))), (-2, -1)), (flip, (-2,))):
        torch.testing.assert_close(to_hexagonal(image.flip(turn)), act(p6m, h, x), rtol=0, atol=1e-12)
        back = to_square(act(p6m, h, x), size)
        torch.testing.assert_close(back, to_square(x, size).flip(turn), rtol=0, atol=1e-12)


def test_there_and_back() -> None:
    image = smooth(32, 32)
    assert (to_square(to_hexagonal(image), (32, 32)) - image).abs().max() < 0.04
    x = to_hexagonal(image, 31)
    assert x.shape == (1, 1, 31, 31)
    assert (to_square(x, (32, 32)) - image).abs().max() < 0.1  # coarser
    linear = torch.arange(32.0).expand(1, 1, 32, 32)
    torch.testing.assert_close(to_square(to_hexagonal(linear), (32, 32))[..., 2:-2, 2:-2], linear[..., 2:-2, 2:-2])


def test_resampling_is_differentiable() -> None:
    image = torch.rand(1, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: to_square(to_hexagonal(t), (6, 6)), image)


def test_a_whole_stack_is_exact_under_p6m() -> None:
    net = nn.Sequential(
        LiftConv(p6m, 3, 4, 3, padding=1),
        GBatchNorm(p6m, 4),
        nn.ReLU(),
        GConv(p6m, 4, 4, 3, padding=1),
        nn.Sigmoid(),  # not zero at zero: the layers after it keep the outside out
        GMaxPool(p6m, 3, stride=2, padding=1),
        GConv(p6m, 4, 4, 5, padding=2),
        GUpsample(p6m, scale_factor=2, mode="linear"),
        GAvgPool(p6m, 3, stride=2, padding=1),
        GConv(p6m, 4, 4, 3, padding=1, dilation=1),
        CosetPool(p6m),
    ).double()
    x = to_hexagonal(torch.rand(2, 3, 22, 22, dtype=torch.float64), 33)
    assert_equivariant(net, p6m, x, 1e-12)
    assert_equivariant(nn.Sequential(net, GAdaptiveAvgPool(p6m, 1), nn.Flatten()), p6m, x, 1e-12)
    net(x).sum().backward()
    trained = net.eval()
    assert_equivariant(trained, p6m, x, 1e-12)


def test_upsampling_is_linear_between_neighbours() -> None:
    x = mask_outside(p6m, torch.randn(1, 1, 12, 5, 5))
    y = GUpsample(p6m, scale_factor=2, mode="linear")(x)
    assert y.shape[-2:] == (9, 9)
    torch.testing.assert_close(y[..., ::2, ::2], x)
    torch.testing.assert_close(y[0, 0, :, 4, 5], (x[0, 0, :, 2, 2] + x[0, 0, :, 2, 3]) / 2)
    torch.testing.assert_close(y[0, 0, :, 3, 5], (x[0, 0, :, 1, 3] + x[0, 0, :, 2, 2]) / 2)


def test_wrong_arguments_say_why() -> None:
    with pytest.raises(
        ValueError, match=r"to_hexagonal: expected floating point images \(N, K, H, W\), got torch.uint8 \(1, 1, 8, 8\)"
    ):
        to_hexagonal(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"to_square: expected floating point images \(N, K, H, W\), got torch.float32 \(8, 8\)"):
        to_square(torch.zeros(8, 8), (8, 8))
    with pytest.raises(ValueError, match="a hexagonal map must be one odd number, so that a cell lies at its centre; got 8"):
        to_hexagonal(torch.zeros(1, 1, 8, 8), 8)
    with pytest.raises(ValueError, match=r"to_square: a hexagonal map has equal sizes, got \(11, 9\)"):
        to_square(torch.zeros(1, 1, 11, 9), (9, 9))
    with pytest.raises(ValueError, match="spacing must be positive, got -1"):
        to_hexagonal(torch.zeros(1, 1, 8, 8), spacing=-1)
    assert domain_mask(GROUPS["p4"], (4, 7)).all()


def test_domains_are_kept_for_some_sizes_and_take_part_in_gradients_later() -> None:
    with torch.inference_mode():
        mask_outside(p6m, torch.ones(1, 1, 12, 7, 7))
    x = torch.ones(1, 1, 12, 7, 7, requires_grad=True)
    mask_outside(p6m, x).sum().backward()  # needs the mask that inference made
    torch.testing.assert_close(x.grad, domain_mask(p6m, (7, 7)).expand_as(x).float())
    for n in range(lattice.KEPT + 10):
        mask_outside(p6m, torch.ones(1, 1, 2 * n + 1, 2 * n + 1))
    assert len(lattice._domains) == lattice.KEPT
    torch.testing.assert_close(mask_outside(p6m, torch.ones(7, 7)), domain_mask(p6m, (7, 7)).float())


def test_threads_share_what_is_kept() -> None:
    sizes = range(3, 3 + 2 * (lattice.KEPT + 20), 2)
    wrong: list[int] = []

    def work() -> None:
        for n in sizes:
            kept = lattice.kept_domain(p6m, (n, n), torch.zeros(1))
            if kept is None or kept.mask.shape != (n, n):
                wrong.append(n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(lattice._domains) <= lattice.KEPT
