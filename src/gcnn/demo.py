"""The main result of the paper in minutes: P4CNN against Z2CNN on the rotated digits that come with the package."""

from __future__ import annotations

from pathlib import Path

import torch

from gcnn import plot
from gcnn.data import digits
from gcnn.groups import p4
from gcnn.recipes import RECIPES
from gcnn.testing import equivariance_error
from gcnn.train import Run, error_by_angle, load_run, train

__all__ = ["demo"]


def demo(out: Path) -> dict[str, Run]:
    """Trains both networks (or reads them, where an earlier demo left them in `out`), prints a table, draws pictures."""
    data = digits()
    runs = {}
    for name in ("z2cnn", "p4cnn"):
        recipe, folder = RECIPES[f"demo/{name}"], out / name
        if (folder / "last.safetensors").exists() and load_run(folder).history[-1]["epoch"] == recipe.epochs:
            print(f"{name}: trained already, read from {folder}")
            runs[name] = load_run(folder)
        else:
            print(f"{name}: {recipe.epochs} epochs on {len(data.train)} digits")
            runs[name] = train(recipe, folder, resume=(folder / "last.safetensors").exists(), data=data)
    x = data.test.images[:32].float() / 255
    print(f"\n{'network':8} {'parameters':>10} {'test error':>11} {'change under quarter turns':>27}")
    for name, run in runs.items():
        weights = sum(p.numel() for p in run.model.parameters())
        change = equivariance_error(run.model.cpu(), p4, x)
        print(f"{name:8} {weights:10,} {run.history[-1]['test_error']:9.2f} % {change:27.1e}")
    _draw_angles(runs, data.test[:2000], out / "error_by_angle.png")
    run = runs["p4cnn"]
    with torch.no_grad():
        maps = run.model[:3](((data.test.images[:1].float()) - run.mean) / run.std)  # type: ignore[index]
    strongest = int(maps[0].sum((1, 2, 3)).argmax())
    plot.action(p4, maps[0, strongest], 1).savefig(out / "feature_map.png")
    print(
        f"\npictures: {out / 'error_by_angle.png'}, {out / 'feature_map.png'} (a feature map of a digit, and of the digit turned)"
    )
    print(f"next: gcnn check {out / 'p4cnn'}; gcnn train --recipe demo/p4cnn --group p4m --out runs/mine; gcnn train --help")
    return runs


def _draw_angles(runs: dict[str, Run], split: object, path: Path) -> None:
    figure, (ax,) = plot.figure(1)
    for name, run in runs.items():
        device = next(run.model.parameters()).device
        angles, errors = zip(*error_by_angle(run.model, run.inputs(split, device)), strict=True)  # type: ignore[arg-type]
        ax.plot([*angles, 360], [*errors, errors[0]], marker=".", label=name)
    ax.set(xlabel="turned by (degrees)", ylabel="test error (%)", xticks=range(0, 361, 45), ylim=(0, None))
    ax.legend()
    figure.savefig(path)
