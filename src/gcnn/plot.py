"""Pictures of functions on plane groups: patches on a Cayley diagram, as in figures 1 and 2 of the paper, for any plane group.

Rotations stand on the outer ring, anticlockwise, mirrored elements on the inner one. A red arrow leads from s to r s, a blue
line joins s and m s: under L_r every patch follows its red arrow and turns, under L_m the ends of the blue lines change
places and are mirrored. Needs matplotlib (pip install "gcnn[plot]"); nothing here touches its global state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gcnn.functional import act, gcorr
from gcnn.groups import Group
from gcnn.lattice import ROW, domain_mask, to_hexagonal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["action", "example", "feature_map", "figure"]

RED, BLUE, INK = "#c8102e", "#1f5fbf", "#333333"
SLOPE = ((1.0, 2.0, 1.0), (-0.5, 0.0, 1.5), (-2.0, -2.0, -1.0))  # a filter that no turn or mirror leaves as it is


def example(group: Group, size: int = 25) -> Tensor:
    """A function on the group to look at, (S, size, size): the letter F, lifted by a filter without symmetry.

    >>> from gcnn import p4
    >>> example(p4).shape
    torch.Size([4, 25, 25])
    """
    _check_plane(group)
    letter = torch.zeros(1, 1, 40, 40)
    for top, bottom, left, right in ((8, 33, 11, 16), (8, 13, 11, 29), (18, 23, 11, 25)):
        letter[..., top:bottom, left:right] = 1
    if group.fills_box:
        image = torch.nn.functional.interpolate(letter, (size + 2, size + 2), mode="area")
    else:
        image = to_hexagonal(letter, size + 2)
    return gcorr(group, image, torch.tensor([[SLOPE]]))[0, 0]


def feature_map(group: Group, x: Tensor, ax: Axes | None = None, title: str = "", cmap: str = "gray") -> Figure:
    """The function `x`, (S, H, W), on the Cayley diagram of the group, drawn into `ax` or a figure of its own."""
    planes = _planes(group, x)
    target: Any = figure(1)[1][0] if ax is None else ax
    _draw(target, group, planes, title, cmap, float(planes.abs().max()) or 1.0)
    drawn: Figure = target.figure
    return drawn


def action(group: Group, x: Tensor, h: int, cmap: str = "gray") -> Figure:
    """The function `x`, (S, H, W), beside L_h x: figure 1 of the paper for (p4, h = 1), figure 2 for (p4m, h = 1).

    >>> from gcnn import p4m
    >>> action(p4m, example(p4m), 1).get_axes()[1].get_title()
    '$L_{r}\\\\,f$'
    """
    planes = _planes(group, x)
    drawn, (left, right) = figure(2)
    scale = float(planes.abs().max()) or 1.0
    _draw(left, group, planes, "$f$", cmap, scale)
    moved = act(group, group.check_element(h), planes[None, None])[0, 0]
    _draw(right, group, moved, f"$L_{{{names(group)[h]}}}\\,f$", cmap, scale)
    return drawn


def _check_plane(group: Group) -> None:
    if group.dim != 2:
        raise ValueError(f"plot: expected a plane group, got {group.name} of dimension {group.dim}")


def _planes(group: Group, x: Tensor) -> Tensor:
    _check_plane(group)
    if x.ndim != 3 or x.shape[0] != group.order:
        raise ValueError(
            f"plot: expected a function on {group.name}, ({group.order}, H, W), got {tuple(x.shape)}; "
            "take one image and one channel of a feature map, x[0, 0]"
        )
    return x.detach().to("cpu", torch.float32)


def figure(panels: int, height: float = 6, width: float | None = None) -> tuple[Figure, list[Any]]:
    """A figure with so many panels side by side, outside of matplotlib's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('gcnn.plot draws with matplotlib, which is not installed: pip install "gcnn[plot]"') from error
    drawn = Figure(figsize=(width or height * panels, height), layout="constrained")
    return drawn, [drawn.add_subplot(1, panels, i + 1) for i in range(panels)]


def rotation(group: Group) -> int:
    """The rotation by the smallest angle: the one of highest order, 0 if there is none."""
    proper = [s for s in range(group.order) if round(float(np.linalg.det(group.arrays[s]))) == 1]
    return max(proper, key=lambda s: (len(group.subgroup(s)), -s))


def mirror(group: Group) -> int | None:
    """The first mirrored element, None if there is none."""
    return next((s for s in range(group.order) if round(float(np.linalg.det(group.arrays[s]))) == -1), None)


def names(group: Group) -> list[str]:
    """r^k and m r^k in TeX."""
    words = [""] * group.order
    s, m = 0, mirror(group)
    for k in range(group.order):
        power = ("e", "r")[k] if k < 2 else f"r^{k}"
        if not words[s]:
            words[s] = power
            if m is not None:
                words[group.product[m, s]] = "m" + ("" if k == 0 else power)
        s = int(group.product[rotation(group), s])
    return words


def layout(group: Group) -> dict[int, tuple[float, float]]:
    """The place of every patch, one unit wide: e on top, rotations anticlockwise, mirrored elements on a ring inside."""
    r, m = rotation(group), mirror(group)
    count = len(group.subgroup(r))
    if count == 2 and m is not None:  # two rings of two would lie on one line: a square is clearer
        return {0: (-0.8, 0.8), r: (0.8, 0.8), m: (-0.8, -0.8), int(group.product[m, r]): (0.8, -0.8)}
    ring = 0.0 if count == 1 else 0.9 / math.sin(math.pi / count)
    outer = ring if m is None else ring + 1.6
    places, s = {}, 0
    for k in range(count):
        angle = math.pi / 2 + 2 * math.pi * k / count
        places[s] = (outer * math.cos(angle), outer * math.sin(angle))
        if m is not None:
            places[int(group.product[m, s])] = (ring * math.cos(angle), ring * math.sin(angle))
        s = int(group.product[r, s])
    return places


def _draw(ax: Axes, group: Group, planes: Tensor, title: str, cmap: str, scale: float) -> None:
    places, words = layout(group), names(group)
    r, m = rotation(group), mirror(group)
    for s, (x, y) in places.items():
        _patch(ax, group, planes[s].numpy(), x, y, cmap, scale)
        corner = (x - 0.46, y - 0.46) if group.fills_box else (x, y - 0.44)
        ax.text(*corner, f"${words[s]}$", ha="left" if group.fills_box else "center", color="white", fontsize=9, zorder=4)
        if r:
            t = int(group.product[r, s])
            if group.product[r, r] or s < t:  # half a turn is its own inverse: one line for both ways
                _arrow(ax, places[s], places[t], RED, directed=bool(group.product[r, r]))
        if m is not None and s < group.product[m, s]:
            _arrow(ax, places[s], places[int(group.product[m, s])], BLUE, directed=False)
    across, up = zip(*places.values(), strict=True)
    ax.set(xlim=(min(across) - 0.7, max(across) + 0.7), ylim=(min(up) - 0.7, max(up) + 0.7), aspect="equal", title=title)
    ax.axis("off")


def _patch(ax: Axes, group: Group, plane: Any, x: float, y: float, cmap: str, scale: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    if group.fills_box:
        height, width = plane.shape
        h, w = (height / max(plane.shape) / 2, width / max(plane.shape) / 2)
        box = (x - w, x + w, y - h, y + h)
        ax.imshow(plane, extent=box, cmap=cmap, vmin=-scale, vmax=scale, interpolation="nearest", zorder=2)
        ax.add_patch(Rectangle((x - w, y - h), 2 * w, 2 * h, fill=False, edgecolor=INK, linewidth=0.8, zorder=3))
        return
    n = plane.shape[0]
    inside = domain_mask(group, (n, n)).numpy()
    step = 1 / n  # the hexagon is n cells wide
    corners = [(math.sin(k * math.pi / 3) / math.sqrt(3), math.cos(k * math.pi / 3) / math.sqrt(3)) for k in range(6)]
    cells = [
        [(x + step * (b + a / 2 + u), y + step * (-ROW * a + v)) for u, v in corners] for a, b in np.argwhere(inside) - n // 2
    ]
    polygons = PolyCollection(cells, array=plane[inside], cmap=cmap, edgecolors="face", linewidths=0.2, zorder=2)
    polygons.set_clim(-scale, scale)
    ax.add_collection(polygons)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, directed: bool) -> None:
    from matplotlib.patches import FancyArrowPatch

    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0)
    gap = 0.65 / length  # clear of both patches
    a = (x0 + (x1 - x0) * gap, y0 + (y1 - y0) * gap)
    b = (x1 - (x1 - x0) * gap, y1 - (y1 - y0) * gap)
    style = "-|>" if directed else "-"
    ax.add_patch(FancyArrowPatch(a, b, arrowstyle=style, mutation_scale=12, color=color, linewidth=1.6, zorder=1))
