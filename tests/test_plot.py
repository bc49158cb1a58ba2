"""The pictures show what they claim: the patches of f and of L_h f, a red arrow from s to r s, a blue line from s to m s."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common import plane_groups
from gcnn import Group, Oh, p4, p4m, p6m, plot
from gcnn.functional import act
from gcnn.lattice import domain_mask

RED, BLUE = (200 / 255, 16 / 255, 46 / 255), (31 / 255, 95 / 255, 191 / 255)


def patches(group: Group, ax: Any) -> list[Any]:
    """The values drawn in each patch."""
    if group.fills_box:
        return [image.get_array().data for image in ax.images]
    return [collection.get_array() for collection in ax.collections]


def arrows(ax: Any, color: tuple[float, ...]) -> list[Any]:
    return [p for p in ax.patches if type(p).__name__ == "FancyArrowPatch" and np.allclose(p.get_edgecolor()[:3], color)]


@plane_groups
def test_pictures_of_every_plane_group(group: Group, tmp_path: Path) -> None:
    f = plot.example(group)
    h = group.order - 1
    figure = plot.action(group, f, h)
    left, right = figure.get_axes()
    order = list(plot.layout(group))
    assert sorted(order) == list(range(group.order))
    moved = act(group, h, f[None, None])[0, 0]
    for ax, values in ((left, f), (right, moved)):
        for s, patch in zip(order, patches(group, ax), strict=True):
            expected = values[s].numpy() if group.fills_box else values[s].numpy()[domain_mask(group, f.shape[1:]).numpy()]
            assert np.array_equal(patch, expected)
    mirrors = sum(round(float(np.linalg.det(m))) == -1 for m in group.arrays)
    turns = len(group.subgroup(plot.rotation(group)))
    assert turns == group.order // (2 if mirrors else 1)
    assert len(arrows(left, BLUE)) == mirrors
    assert len(arrows(left, RED)) == (0 if turns == 1 else group.order // 2 if turns == 2 else group.order)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_no_two_patches_overlap() -> None:
    for group in (p4, p4m, p6m):
        places = np.array(list(plot.layout(group).values()))
        gaps = np.abs(places[:, None] - places[None]).max(-1)
        assert gaps[~np.eye(len(gaps), dtype=bool)].min() > 1.2


def test_figure_1_turns_as_a_whole() -> None:
    """On p4 the picture of L_r f is the picture of f turned by a quarter: patches follow their arrows and turn."""
    f = plot.example(p4)
    places = plot.layout(p4)
    moved = act(p4, 1, f[None, None])[0, 0]
    for s in range(4):
        t = int(p4.product[1, s])
        (x, y), goal = places[s], places[t]
        assert np.allclose((-y, x), goal)
        assert torch.equal(moved[t], torch.rot90(f[s], 1))


def test_names_are_words_in_r_and_m() -> None:
    assert plot.names(p4) == ["e", "r", "r^2", "r^3"]
    assert plot.names(p4m) == ["e", "r", "r^2", "r^3", "m", "mr", "mr^2", "mr^3"]


def test_draws_into_the_axes_of_the_user() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.add_subplot()
    assert plot.feature_map(p4, torch.randn(4, 5, 7), ax, "mine") is figure
    assert ax.get_title() == "mine"
    assert plot.feature_map(p4, torch.zeros(4, 5, 5)) is not figure


def test_wrong_arguments_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="plot: expected a plane group, got Oh of dimension 3"):
        plot.example(Oh)
    with pytest.raises(ValueError, match=r"expected a function on p4, \(4, H, W\), got \(2, 3, 4, 5, 5\); take one image"):
        plot.feature_map(p4, torch.zeros(2, 3, 4, 5, 5))
    with pytest.raises(ValueError, match="p4 has elements 0 to 3, got 7"):
        plot.action(p4, torch.zeros(4, 5, 5), 7)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'gcnn.plot draws with matplotlib, which is not installed: pip install "gcnn\[plot\]"'):
        plot.feature_map(p4, torch.zeros(4, 5, 5))
