"""Draws the pictures of these pages into docs/img: `python docs/figures.py`, as `make docs` does."""

from pathlib import Path

import torch

from gcnn import GROUPS, p4, plot
from gcnn.functional import gcorr


def turning() -> str:
    """The picture of the front page, kept as docs/turning.svg: a letter that turns, and its feature map on p4."""
    letter = torch.zeros(24, 24)  # whole numbers and a filter of halves: the same bytes on every machine
    for top, bottom, left, right in ((4, 21, 6, 10), (4, 8, 6, 19), (11, 15, 6, 16)):
        letter[top:bottom, left:right] = 1
    return plot.animation(p4, letter, gcorr(p4, letter[None, None], torch.tensor([[plot.SLOPE]]), padding=1)[0, 0])


def main() -> None:
    """The front page's picture, and one a group."""
    (Path(__file__).parent / "turning.svg").write_text(turning(), encoding="utf-8")
    folder = Path(__file__).parent / "img"
    folder.mkdir(exist_ok=True)
    for name in ("p4", "p4m", "pmm", "cmm", "p6", "p6m", "p3m1"):
        group = GROUPS[name]
        plot.action(group, plot.example(group), 1).savefig(folder / f"{name}.png", dpi=80)


if __name__ == "__main__":
    main()
