"""Draws the pictures of these pages into docs/img: `python docs/figures.py`, as `make docs` does."""

from pathlib import Path

from gcnn import GROUPS, plot


def main() -> None:
    """One picture a group."""
    folder = Path(__file__).parent / "img"
    folder.mkdir(exist_ok=True)
    for name in ("p4", "p4m", "pmm", "cmm", "p6", "p6m", "p3m1"):
        group = GROUPS[name]
        plot.action(group, plot.example(group), 1).savefig(folder / f"{name}.png", dpi=80)


if __name__ == "__main__":
    main()
