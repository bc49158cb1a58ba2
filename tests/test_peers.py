"""Other people's filters and networks: arrays in the shape of the paper's code, escnn, torchvision and timm where they import."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from gcnn import Group, convert, p4, p4m
from gcnn.functional import act
from gcnn.nn import GConv, LiftConv
from gcnn.testing import equivariance_error


def imported(name: str) -> Any:
    """The module, or a skipped test: some builds do not import beside this torch, and say so by a RuntimeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} does not import: {type(error).__name__}")


# --- filters -------------------------------------------------------------------------------------------------------------------


def element(m: int, r: int, u: int, v: int) -> np.ndarray[Any, Any]:
    """The matrix g(m, r, u, v) as the paper writes it in section 4.3."""
    c, s = math.cos(r * math.pi / 2), math.sin(r * math.pi / 2)
    sign = (-1) ** m
    return np.array([[sign * c, -sign * s, u], [s, c, v], [0, 0, 1]])


@pytest.mark.parametrize("group", [p4, p4m], ids=str)
def test_arrays_in_the_shape_of_the_papers_code(group: Group) -> None:
    """(K_out, K_in, S, n, n), against equation 11 with the matrices of section 4: a sum over all h of f(h) psi(g^-1 h)."""
    torch.manual_seed(0)
    mirrors, n, size = group.order // 4, 3, 4
    psi, f = torch.randn(2, 2, group.order, n, n, dtype=torch.float64), torch.randn(1, 2, group.order, size, size).double()
    expected = torch.zeros(1, 2, group.order, size - n + 1, size - n + 1, dtype=torch.float64)
    point = list(itertools.product(range(mirrors), range(4)))  # m * 4 + r
    for (m, r), u, v in itertools.product(point, range(1, size - 1), range(1, size - 1)):
        back = np.linalg.inv(element(m, r, u, v))
        for (a, b), y, x in itertools.product(point, range(size), range(size)):
            h = np.rint(back @ element(a, b, y, x)).astype(int)
            place = next(4 * i + j for i, j in point if (np.rint(element(i, j, 0, 0)[:2, :2]) == h[:2, :2]).all())
            row, column = h[0, 2] + 1, h[1, 2] + 1
            if 0 <= row < n and 0 <= column < n:
                expected[0, :, 4 * m + r, u - 1, v - 1] += psi[:, :, place, row, column] @ f[0, :, 4 * a + b, y, x]
    conv = GConv(group, 2, 2, n, bias=False).double()
    conv.load_filters(psi)
    torch.testing.assert_close(conv(f), expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", [p4, p4m], ids=str)
def test_escnn_with_the_same_filters(group: Group) -> None:
    """Regular R2Conv of escnn: its own basis makes filters; ours with these filters gives its numbers."""
    gspaces, escnn = imported("escnn.gspaces"), imported("escnn.nn")
    torch.manual_seed(0)
    space = gspaces.rot2dOnR2(4) if group is p4 else gspaces.flipRot2dOnR2(4)
    pixels = escnn.FieldType(space, 2 * [space.trivial_repr])
    maps, more = (escnn.FieldType(space, k * [space.regular_repr]) for k in (3, 4))
    image = torch.randn(2, 2, 9, 9)
    ours = []  # our index of each of its elements, by what they do to an image
    for g in space.testing_elements:
        turned = escnn.GeometricTensor(image, pixels).transform(g).tensor
        ours += [h for h in range(group.order) if torch.allclose(act(group, h, image), turned, atol=1e-4)]
    assert sorted(ours) == list(range(group.order))
    order = [ours.index(h) for h in range(group.order)]  # its places in our order
    identity = ours.index(0)

    first, second = escnn.R2Conv(pixels, maps, 3, padding=1), escnn.R2Conv(maps, more, 3, padding=1)
    theirs = second(first(escnn.GeometricTensor(image, pixels))).tensor
    lift, conv = LiftConv(group, 2, 3, 3, padding=1), GConv(group, 3, 4, 3, padding=1)
    with torch.no_grad():
        for layer, peer in ((lift, first), (conv, second)):
            bank, bias = peer.expand_parameters()
            psi = bank.unflatten(0, (-1, group.order))[:, identity]  # the filters of its identity
            layer.load_filters(psi if layer is lift else psi.unflatten(1, (3, group.order))[:, :, order])
            assert layer.bias is not None
            layer.bias.copy_(bias.unflatten(0, (-1, group.order))[:, 0])
        found = conv(lift(image))
    torch.testing.assert_close(found, theirs.unflatten(1, (4, group.order))[:, :, order], rtol=1e-4, atol=1e-5)


# --- networks ------------------------------------------------------------------------------------------------------------------

TORCHVISION: dict[str, tuple[dict[str, Any], int]] = {  # name: (options, size at which the strides are exact)
    "resnet18": ({}, 33),
    "resnet50": ({}, 33),
    "vgg11_bn": ({}, 32),
    "densenet121": ({}, 29),
    "convnext_tiny": ({}, 32),
    "mobilenet_v2": ({}, 33),
    "efficientnet_b0": ({}, 33),
    "regnet_y_400mf": ({}, 33),
}
TIMM = {"resnet18": 33, "resnext26ts": 33, "densenet121": 29, "convnext_atto": 32, "seresnet18": 33}


NETWORKS = [*(("torchvision.models", name) for name in TORCHVISION), *(("timm", name) for name in TIMM)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), NETWORKS)
def test_networks_of_other_libraries(library: str, name: str) -> None:
    module = imported(library)
    if library == "timm":
        net, size = module.create_model(name, num_classes=5), TIMM[name]
    else:
        options, size = TORCHVISION[name]
        net = getattr(module, name)(num_classes=5, **options)
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size)
    made = convert(net.train(), p4)
    total = sum(p.numel() for p in net.parameters())
    assert abs(sum(p.numel() for p in made.parameters()) / total - 1) < 0.1
    y = made(x)
    assert y.shape == (2, 5)
    y.square().sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert equivariance_error(made.eval(), p4, x) < 1e-4
