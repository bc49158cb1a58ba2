"""The main result of the paper in minutes: P4CNN against Z2CNN on the rotated digits that come with the package."""

from __future__ import annotations

from pathlib import Path

from gcnn.data import digits
from gcnn.groups import p4
from gcnn.recipes import RECIPES
from gcnn.report import report
from gcnn.runs import Run, load_run
from gcnn.testing import equivariance_error
from gcnn.train import train

__all__ = ["demo"]


def demo(out: Path) -> dict[str, Run]:
    """Trains both networks (or reads them, where an earlier demo left them in `out`), prints a table, writes a report."""
    data = digits()
    runs, page = {}, out / "report.html"
    stale = not page.exists()
    for name in ("z2cnn", "p4cnn"):
        recipe, folder = RECIPES[f"demo/{name}"], out / name
        if (folder / "last.safetensors").exists() and load_run(folder).history[-1]["epoch"] == recipe.epochs:
            print(f"{name}: trained already, read from {folder}")
            runs[name] = load_run(folder)
        else:
            print(f"{name}: {recipe.epochs} epochs on {len(data.train)} digits")
            runs[name] = train(recipe, folder, resume=(folder / "last.safetensors").exists(), data=data)
            stale = True
    x = data.test.images[:32].float() / 255
    print(f"\n{'network':8} {'parameters':>10} {'test error':>11} {'change under quarter turns':>27}")
    for name, run in runs.items():
        weights = sum(p.numel() for p in run.model.parameters())
        change = equivariance_error(run.model.cpu(), p4, x)
        print(f"{name:8} {weights:10,} {run.tested['test_error']:9.2f} % {change:27.1e}")
    if stale:
        report([out / "p4cnn", out / "z2cnn"], page, data)
    print(f"\nthe report with curves, errors by angle and feature maps that turn: {page}")
    print(f"next: gcnn check {out / 'p4cnn'}; gcnn train --recipe demo/p4cnn --epochs 20 --out runs/mine; gcnn train --help")
    return runs
