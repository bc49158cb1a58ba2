"""Pictures of functions on plane groups: patches on a Cayley diagram, as in figures 1 and 2 of the paper, for any plane group.

Rotations stand on the outer ring, anticlockwise, mirrored elements on the inner one. A red arrow leads from s to r s, a blue
line joins s and m s: under L_r every patch follows its red arrow and turns, under L_m the ends of the blue lines change
places and are mirrored. Needs matplotlib (pip install "gcnn[plot]"); nothing here touches its global state.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
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

__all__ = ["action", "animation", "example", "feature_map", "figure"]

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
    """The function `x`, (S, H, W), on the Cayley diagram of the group, drawn into `ax` or a figure of its own.

    >>> from gcnn import p6m
    >>> len(feature_map(p6m, example(p6m)).get_axes()[0].collections)
    12
    """
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


def animation(group: Group, image: Tensor, x: Tensor) -> str:
    """An SVG in which `image`, (H, W), turns, and with it the function `x`, (S, H', W'): its patches turn and change places.

    The picture runs by itself wherever a browser shows it, in light and dark, and needs no matplotlib; it stands still for people
    who asked their system for less motion. For groups with turns on the square lattice.

    >>> from gcnn import p4
    >>> animation(p4, torch.ones(7, 7), torch.ones(4, 5, 5)).count("<image")  # five that move, five that stand
    10
    """
    planes, r = _planes(group, x), rotation(group)
    if not group.fills_box or not r:
        raise ValueError(f"plot.animation: expected a group with turns on the square lattice, got {group.name}")
    if image.ndim != 2:
        raise ValueError(f"plot.animation: expected an image (H, W), got {tuple(image.shape)}")
    # wider apart than in figures, so that patches pass each other
    places, words, turns = {s: (1.25 * a, 1.25 * b) for s, (a, b) in layout(group).items()}, names(group), group.subgroup(r)
    across, up = zip(*places.values(), strict=True)
    left, height = 2.7 - min(across), max(up) - min(up) + 1.8
    width = left + max(across) + 0.7

    def at(place: tuple[float, float]) -> tuple[float, float]:
        return round(100 * (place[0] + left), 2), round(100 * (max(up) + 0.8 - place[1]), 2)

    lines = []
    for s, t, color, directed in arrows(group):
        (x0, y0), (x1, y1) = between(at(places[s]), at(places[t]), 66)
        tip = ' marker-end="url(#tip)"' if directed else ""
        ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
        lines.append(f'<line {ends} stroke="{color}" stroke-width="3"{tip}/>')
    for s, place in places.items():
        name = re.sub(r"\^(\d+)", r'<tspan dy="-6" font-size="13">\1</tspan>', words[s])
        lines.append(f'<text x="{at(place)[0]}" y="{at(place)[1] + 74}"><tspan font-style="italic">{name}</tspan></text>')
    moving = [_turning(image.detach().to("cpu", torch.float32), [(100.0, 50 * height)] * (len(turns) + 1), 140)]
    for s in places:
        way = [s]
        for _ in turns:
            way.append(int(group.product[r, way[-1]]))
        moving.append(_turning(planes[s], [at(places[t]) for t in way], 100))
    # letters with a white rim can be read on any ground
    style = (
        "text{font:21px Georgia,serif;fill:#222;stroke:#fff;stroke-width:7px;stroke-linejoin:round;paint-order:stroke;"
        "text-anchor:middle}image{image-rendering:pixelated}.still{display:none}"
        "@media(prefers-reduced-motion:reduce){.moving{display:none}.still{display:inline}}"
    )
    still = re.sub(r"<animateTransform[^>]*/>", "", "".join(moving))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {100 * width:.0f} {100 * height:.0f}" role="img">'
        f"<title>An image that turns, and its feature map on {group.name}: each patch turns and moves to the next place</title>"
        f"<style>{style}</style>"
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{RED}"/></marker></defs>{"".join(lines)}<g class="moving">{"".join(moving)}</g>'
        f'<g class="still">{still}</g></svg>\n'
    )


def _turning(plane: Tensor, way: list[tuple[float, float]], side: int) -> str:
    """A picture that rests at each place of its way for a second, and turns by an equal part on the way to the next."""
    steps = len(way) - 1
    stops = [0, *(k // 2 for k in range(1, 2 * steps + 1))]  # 0, 0, 1, 1, 2, 2 ...: rest, go, rest, go
    times = ";".join(f"{k / (2 * steps):.4g}" for k in range(2 * steps + 1))
    ease = ";".join([".4 0 .6 1"] * (2 * steps))
    timing = f'dur="{2 * steps}s" repeatCount="indefinite" calcMode="spline" keyTimes="{times}" keySplines="{ease}"'
    places = ";".join(f"{way[k][0]:g},{way[k][1]:g}" for k in stops)
    angles = ";".join(f"{-360 * k / steps:g}" for k in stops)
    return (
        f'<g transform="translate({way[0][0]:g},{way[0][1]:g})">'
        f'<animateTransform attributeName="transform" type="translate" values="{places}" {timing}/>'
        f'<g><animateTransform attributeName="transform" type="rotate" values="{angles}" {timing}/>'
        f'<image x="{-side / 2:g}" y="{-side / 2:g}" width="{side}" height="{side}" href="data:image/png;base64,{_png(plane)}"/>'
        f'<rect x="{-side / 2:g}" y="{-side / 2:g}" width="{side}" height="{side}" fill="none" stroke="{INK}"/></g></g>'
    )


def _png(plane: Tensor) -> str:
    """A plane as a gray PNG, its largest value black; not compressed, so that every machine writes the same bytes."""
    values = (255 - plane.clamp(min=0) * (255 / (float(plane.max()) or 1.0))).round().to(torch.uint8).numpy()
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    found = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">2I5B", values.shape[1], values.shape[0], 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 0)),
        (b"IEND", b""),
    ):
        found += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return base64.b64encode(found).decode()


def _check_plane(group: Group) -> None:
    if group.dim != 2:
        raise ValueError(f"plot: expected a plane group, got {group.name} of dimension {group.dim}")


def _planes(group: Group, x: Tensor) -> Tensor:
    if not isinstance(group, Group) or not isinstance(x, Tensor):
        raise TypeError(f"plot: expected a Group and a tensor, got {type(group).__name__} and {type(x).__name__}")
    _check_plane(group)
    if x.ndim != 3 or x.shape[0] != group.order:
        raise ValueError(
            f"plot: expected a function on {group.name}, ({group.order}, H, W), got {tuple(x.shape)}; "
            "take one image and one channel of a feature map, x[0, 0]"
        )
    return x.detach().to("cpu", torch.float32)


def figure(panels: int, height: float = 6, width: float | None = None) -> tuple[Figure, list[Any]]:
    """A figure with so many panels side by side, outside of matplotlib's global state.

    >>> drawn, (left, right) = figure(2)
    >>> left.set_title("mine").get_text()
    'mine'
    """
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


def arrows(group: Group) -> list[tuple[int, int, str, bool]]:
    """From s to t: red to r s, blue to m s, and whether it has a direction; what undoes itself is one line for both ways."""
    found = []
    for h, color in ((rotation(group), RED), (mirror(group), BLUE)):
        if h:
            directed = bool(group.product[h, h])
            ways = [(s, int(group.product[h, s])) for s in range(group.order)]
            found += [(s, t, color, directed) for s, t in ways if directed or s < t]
    return found


def between(start: tuple[float, float], end: tuple[float, float], gap: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """The part of the way from `start` to `end` that is clear of both by `gap`."""
    (x0, y0), (x1, y1) = start, end
    part = gap / math.hypot(x1 - x0, y1 - y0)
    a, b = part * (x1 - x0), part * (y1 - y0)
    return (x0 + a, y0 + b), (x1 - a, y1 - b)


def _draw(ax: Axes, group: Group, planes: Tensor, title: str, cmap: str, scale: float) -> None:
    places, words = layout(group), names(group)
    for s, (x, y) in places.items():
        _patch(ax, group, planes[s].numpy(), x, y, cmap, scale)
        corner = (x - 0.46, y - 0.46) if group.fills_box else (x, y - 0.44)
        ax.text(*corner, f"${words[s]}$", ha="left" if group.fills_box else "center", color="white", fontsize=9, zorder=4)
    for s, t, color, directed in arrows(group):
        _arrow(ax, *between(places[s], places[t], 0.65), color, directed)
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

    style = "-|>" if directed else "-"
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=12, color=color, linewidth=1.6, zorder=1))
