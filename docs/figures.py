"""Draws the pictures of these pages, all kept in the repository: `python docs/figures.py`, as `make docs` does.

The pictures are written by hand as SVG, with numbers of few digits: every machine draws the same bytes, and a test compares them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import torch

from gcnn import Group, p4, plot
from gcnn.functional import gcorr
from gcnn.groups import PLANE_GROUPS
from gcnn.lattice import ROW

FOLDER = Path(__file__).parent
COLORS = {plot.RED: "#d8344a", plot.BLUE: "#3f7fd8"}  # lighter, to be seen on dark pages too
MOTIF = "M-19 28V-28H21V-17H-7V-4H14V7H-7V28z"  # the letter F: no turn and no mirror leaves it as it is


def turning() -> str:
    """The picture of the front page, kept as docs/turning.svg: a letter that turns, and its feature map on p4."""
    letter = torch.zeros(24, 24)  # whole numbers and a filter of halves: the same bytes on every machine
    for top, bottom, left, right in ((4, 21, 6, 10), (4, 8, 6, 19), (11, 15, 6, 16)):
        letter[top:bottom, left:right] = 1
    return plot.animation(p4, letter, gcorr(p4, letter[None, None], torch.tensor([[plot.SLOPE]]), padding=1)[0, 0])


def on_paper(group: Group, s: int) -> np.ndarray:
    """What the element s does to a point (x, y) of the page, y downwards: its matrix on the lattice in the page's axes."""
    axes = np.eye(2)[::-1] if group.fills_box else np.array([[0.5, 1], [ROW, 0]])  # (row, column) to (x, y)
    return axes @ group.arrays[s] @ np.linalg.inv(axes)


def orbit(group: Group) -> str:
    """The letter F under every element of the group, on its Cayley diagram."""
    words, inner = plot.names(group), plot.mirror(group) is not None
    places = {s: (115 * x, -115 * y) for s, (x, y) in plot.layout(group).items()}
    outline = "M-50-50H50V50H-50z"
    if not group.fills_box:
        outline = "M0-57.7L50-28.9V28.9L0 57.7L-50 28.9V-28.9z"
    parts = []
    for s, t, color, directed in plot.arrows(group):
        (x0, y0), (x1, y1) = plot.between(places[s], places[t], 66)
        tip = ' marker-end="url(#tip)"' if directed else ""
        parts.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{COLORS[color]}" stroke-width="3"{tip}/>')
    labels = []
    for s, (x, y) in places.items():
        matrix = on_paper(group, s)
        mirrored = np.linalg.det(matrix) < 0
        numbers = " ".join(f"{v:.4g}" for v in (matrix.T.round(4) + 0.0).ravel())
        parts.append(f'<g transform="translate({x:.1f} {y:.1f})"><path d="{outline}" fill="#fff" stroke="#888"/>')
        parts.append(f'<path d="{MOTIF}" fill="#333" transform="matrix({numbers} 0 0)"/>')
        if mirrored:  # the line that the mirror leaves where it is
            angle = math.degrees(math.atan2(matrix[1, 0], matrix[0, 0])) / 2
            parts.append(
                f'<path d="M-48 0H48" stroke="{COLORS[plot.BLUE]}" stroke-width="2" stroke-dasharray="6 4" '
                f'transform="rotate({angle:.4g})"/>'
            )
        parts.append("</g>")
        length = math.hypot(x, y)
        away = (0.0, 1.0 if mirrored else -1.0) if length < 1 else (x / length, y / length)
        if len(places) == 4 and inner:  # four patches on a square: names above and below
            away = (0.0, math.copysign(1, y))
        elif mirrored and length > 1:  # names of the inner ring inside it
            away = (-away[0], -away[1])
        place = (x + 78 * away[0], y + 78 * away[1])
        labels.append((words[s], *place))
    for word, x, y in labels:
        letters = re.sub(r"\^(\d+)", r'<tspan dy="-7" font-size="16">\1</tspan>', word)
        wide = 20 + 9 * len(word.replace("^", ""))
        parts.append(
            f'<rect x="{x - wide / 2:.1f}" y="{y - 15:.1f}" width="{wide}" height="30" rx="8" fill="#fff"/>'
            f'<text x="{x:.1f}" y="{y + 7:.1f}">{letters}</text>'
        )
    across = [x + a for x, _ in places.values() for a in (-60, 60)] + [x + a for _, x, _ in labels for a in (-30, 30)]
    down = [y + a for _, y in places.values() for a in (-60, 60)] + [y + a for _, _, y in labels for a in (-18, 18)]
    left, top = min(across), min(down)
    width, height = max(across) - left, max(down) - top
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img"><title>The letter F under every element of {group.name}</title>'
        "<style>text{font:italic 23px Georgia,serif;fill:#222;text-anchor:middle}</style>"
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{COLORS[plot.RED]}"/></marker></defs>\n' + "\n".join(parts) + "</svg>\n"
    )


def pictures() -> dict[Path, str]:
    """Every picture of the pages, by where it is kept."""
    return {FOLDER / "turning.svg": turning(), **{FOLDER / f"groups/{g.name}.svg": orbit(g) for g in PLANE_GROUPS}}


def main() -> None:
    """Draws them all."""
    for path, picture in pictures().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
