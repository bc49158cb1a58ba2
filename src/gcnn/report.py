"""One self-contained HTML page about runs: curves, confusion, error by angle, equivariance, filters and maps on the group."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gcnn import plot
from gcnn.config import Config
from gcnn.data import Dataset, Split, load
from gcnn.files import write_file
from gcnn.functional import act
from gcnn.groups import GROUPS, p4
from gcnn.nn import LiftConv
from gcnn.runs import Run, alike, error_by_angle, group_of, load_run, names_the_root, on_lattice
from gcnn.testing import equivariance_error

__all__ = ["report"]

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: white; border-radius: .4rem; }
figure { margin: 1.5rem 0; }
figcaption { opacity: .8; }
.scroll { overflow-x: auto; }
"""


ANGLES = 24  # of a full turn
MARK = '<meta name="generator" content="gcnn">'  # by which a later report knows what it may replace


def _is_report(page: bytes) -> bool:
    return MARK.encode() in page


def report(
    folders: Sequence[str | Path],
    out: str | Path,
    data: Dataset | None = None,
    root: str = "",
    images: int = 2000,
    device: str = "auto",
    progress: bool = False,
) -> None:
    """Writes the page about the runs in `folders` to `out`; the first run is shown in detail.

    `data` is read as the first run's config says if it is not given, from `root` if the files have moved. The error by angle is
    measured on the first `images` test images, on `device`, with `progress` under a bar.
    """
    if not folders:
        raise ValueError("report: expected at least one folder of a run")
    if Path(out).exists() and not (Path(out).is_file() and _is_report(Path(out).read_bytes())):
        raise FileExistsError(f"report: {out} is there already and is no report of gcnn; choose another name")
    paths = [Path(folder).resolve() for folder in folders]
    short = len({path.name for path in paths}) == len(paths)
    runs = {path.name if short else str(folder): load_run(path, device) for path, folder in zip(paths, folders, strict=True)}
    for name, run in runs.items():
        if "test_error" not in run.tested:
            raise ValueError(f"{name} was stopped before its first test; go on with it by --resume")
    first = next(iter(runs.values()))
    if data is None:
        with names_the_root():
            data = load(first.config.data, root or first.config.data_root or None, first.config.size)
    for name, run in runs.items():
        try:
            run.check_data(data)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; hand the data to gcnn.report.report") from None
    if len(held := {run.config.validation for run in runs.values()}) > 1:
        raise ValueError(
            f"report: the runs held out {sorted(held)} images, and are to be tested on the same; report them one by one"
        )
    exact = not data.train.images.is_floating_point()
    for name, run in runs.items():
        if not alike({"mean": first.mean, "std": first.std}, run.mean, run.std, exact):
            raise ValueError(
                f"report: {name} was trained on other images than {next(iter(runs))}, with mean {run.mean:.6g} and not "
                f"{first.mean:.6g}; report them one by one"
            )
    data, kind = first.held_out(data), "validation" if first.config.validation else "test"
    parts = [
        _table(runs, data, kind),
        _facts(runs, data, kind),
        _figure(_curves(runs, kind), f"Training loss and {kind} error by epoch."),
        *([_angles(runs, data.test[:images], kind, progress)] if data.test.images.ndim == 4 else []),
        *(_figure(_confusion(name, run), f"Confusion matrix of {name}: rows are true classes.") for name, run in runs.items()),
        _recalls(runs, kind),
    ]
    group = group_of(first.model)
    if group.dim == 2 and group.order > 1:
        parts += _on_the_group(first, data, kind)
    title = "Report: " + ", ".join(runs)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{MARK}'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>{''.join(parts)}"
        "</body></html>"
    )
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_file(Path(out), page.encode())


def _table(runs: dict[str, Run], data: Dataset, kind: str) -> str:
    head = ("run", "network", "group", "parameters", "epochs", f"{kind} error", "change under its group", "under quarter turns")
    some = data.test[:16]
    quarters = p4 if some.images.ndim == 4 else GROUPS["C4"]  # of volumes, about their first axis
    rows = []
    for name, run in runs.items():
        group = group_of(run.model)
        x = _seen(run, some)
        own = f"{equivariance_error(run.model, group, x):.1e}" if group.fills_box and group.order > 1 else "-"
        last = run.tested
        epochs = f"{last['epoch']} of {len(run.history)}" if run.kept else last["epoch"]
        cells = (name, run.config.model, group.name, f"{_count(run):,}", epochs, f"{last['test_error']:.2f} %", own)
        rows.append((*cells, f"{equivariance_error(run.model, quarters, x):.1e}"))
    return _rows(head, rows) + (
        "<p>Change: the largest change of the scores when an image is turned or mirrored, relative to the largest score, over "
        f"the first {len(some)} {kind} images. About 1e-6 is rounding.</p>"
    )


def _seen(run: Run, split: Split) -> Tensor:
    """The images of the split as the network gets them in its test."""
    inputs = run.inputs(split, next(run.model.parameters()).device)
    return inputs(torch.arange(len(split), device=inputs.labels.device))[0]


def _count(run: Run) -> int:
    return sum(p.numel() for p in run.model.parameters())


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    names = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    return f'<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>'


def _facts(runs: dict[str, Run], data: Dataset, kind: str) -> str:
    """What the runs were trained on, and with which settings, as a list."""
    sides = " x ".join(str(n) for n in data.test.images.shape[1:])
    source, counts = next(iter(runs.values())).data, f"{len(data.train):,} training images and {len(data.test):,} {kind} images"
    facts = [f"Data set: {source}, {counts} of {sides}, {len(data.classes)} classes."]
    for name, run in runs.items():
        # where the data lay and what it ran on say nothing about the network
        shown = [f for f in dataclasses.fields(Config) if f.name not in ("data", "data_root", "device")]
        other = [f"{f.name} {getattr(run.config, f.name)}" for f in shown if getattr(run.config, f.name) != f.default]
        facts.append(f"{name}: {_count(run):,} parameters; settings other than the defaults: {', '.join(other) or 'none'}.")
        if run.kept:
            facts[-1] += f" Its weights are those of epoch {run.kept['epoch']}, which had the lowest loss on the held-out images."
    return "<ul>" + "".join(f"<li>{html.escape(fact)}</li>" for fact in facts) + "</ul>"


def _figure(drawn: Any, caption: str) -> str:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=100)
    picture = base64.b64encode(buffer.getvalue()).decode()
    words = html.escape(caption)
    return f'<figure><img alt="{words}" src="data:image/png;base64,{picture}"><figcaption>{words}</figcaption></figure>'


def _curves(runs: dict[str, Run], kind: str) -> Any:
    drawn, (losses, errors) = plot.figure(2, height=4)
    for name, run in runs.items():
        losses.plot([r["epoch"] for r in run.history], [r["train_loss"] for r in run.history], marker=".", label=name)
        tested = [r for r in run.history if "test_error" in r]
        errors.plot([r["epoch"] for r in tested], [r["test_error"] for r in tested], marker="o", label=name)
    losses.set(xlabel="epoch", ylabel="training loss", yscale="log")
    errors.set(xlabel="epoch", ylabel=f"{kind} error (%)", ylim=(0, None))
    losses.legend()
    return drawn


def _angles(runs: dict[str, Run], split: Split, kind: str, progress: bool) -> str:
    drawn, (ax,) = plot.figure(1, height=4, width=9)
    ground = _ground(split.images)
    for name, run in runs.items():
        fill = run.mean if ground is None else ground
        shown = _in_disc(split.images.float(), fill) if ground is None else split.images.float()
        # error_by_angle fills with zeros: with all numbers moved so that the fill is zero, the network sees the same as ever
        moved = dataclasses.replace(run, mean=run.mean - fill).inputs(
            Split(shown - fill, split.labels), next(run.model.parameters()).device
        )
        angles, errors = zip(*error_by_angle(run.model, moved, ANGLES, progress), strict=True)
        ax.plot([*angles, 360], [*errors, errors[0]], marker=".", label=name)
    ax.set(xlabel="turned by (degrees)", ylabel=f"{kind} error (%)", xticks=range(0, 361, 45), ylim=(0, None))
    ax.legend()
    words = f"{kind.title()} error of the first {len(split)} {kind} images, turned in steps of {360 / ANGLES:g} degrees. "
    words += (
        "At every angle, 0 included, the network sees only the disc that fits into the image, with the mean value around it: a "
        "turn leaves the corners empty, and empty corners alone can change an answer. So the error at 0 degrees may not be that "
        "of the table."
        if ground is None
        else f"Corners that a turn leaves empty get the value of the images' border, {ground:g}."
    )
    return _figure(drawn, words)


def _ground(images: Tensor) -> float | None:
    """The value that nearly all pixels at the borders of the images have, None if there is none."""
    x = images.float()
    border = torch.cat([x[..., 0, :], x[..., -1, :], x[..., 0], x[..., -1]], -1).flatten()
    value = border.median()
    return float(value) if ((border - value).abs() <= 0.1 * x.std()).float().mean() >= 0.9 else None


def _in_disc(x: Tensor, fill: float) -> Tensor:
    """Images (N, C, H, W) with `fill` outside the largest disc about their centre."""
    rows, columns = (torch.arange(n, device=x.device) - (n - 1) / 2 for n in x.shape[-2:])
    outside = rows[:, None].square() + columns.square() > (min(x.shape[-2:]) / 2) ** 2  # (H, W)
    return x.masked_fill(outside, fill)


def _confusion(name: str, run: Run) -> Any:
    table = torch.tensor(run.tested["confusion"])
    drawn, (ax,) = plot.figure(1, height=5)
    shown = (table.double() / table.sum(1, keepdim=True).clamp(min=1)).fill_diagonal_(0)  # what goes wrong, in colour
    ax.imshow(shown.numpy(), cmap="Reds", vmin=0, vmax=float(shown.max()) or 1.0)  # no errors: white, not the middle of the scale
    for i, row in enumerate(table.tolist()):
        for j, count in enumerate(row):
            if count:
                dark = shown[i, j] > 0.6 * shown.max()
                ax.text(j, i, count, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ticks = range(len(run.classes))
    ax.set(xticks=ticks, yticks=ticks, xticklabels=run.classes, yticklabels=run.classes, xlabel="answer", ylabel="true class")
    ax.set_title(name)
    return drawn


def _recalls(runs: dict[str, Run], kind: str) -> str:
    """A table with one row per class: the share of its images that each run finds, and the mean of these shares."""
    tables = [torch.tensor(run.tested["confusion"]).double() for run in runs.values()]
    counts = tables[0].sum(1)
    shares = torch.stack([100 * t.diagonal() / t.sum(1) for t in tables], 1)  # (classes, runs), NaN where there are no images
    cells = [["-" if share.isnan() else f"{share:.2f} %" for share in row] for row in shares]
    classes = next(iter(runs.values())).classes
    rows = [(name, int(n), *row) for name, n, row in zip(classes, counts, cells, strict=True)]
    rows.append(("mean of the recalls (balanced accuracy)", int(counts.sum()), *(f"{mean:.2f} %" for mean in shares.nanmean(0))))
    head = ("class", f"{kind} images", *(f"recall of {name}" for name in runs))
    return f"{_rows(head, rows)}<p>Recall: the share of the images of a class that the network recognises.</p>"


def _on_the_group(run: Run, data: Dataset, kind: str) -> list[str]:
    """Filters of the first layer, and a feature map of an image beside that of the image under element 1."""
    group = group_of(run.model)
    lift = next(m for m in run.model.modules() if isinstance(m, LiftConv))
    filters = lift.filters()[:, :, 0, 0]  # (K_out, S, n, n)
    strongest = filters.square().sum((1, 2, 3)).argsort(descending=True)[:3].tolist()
    drawn, panels = plot.figure(len(strongest), height=4)
    for ax, k in zip(panels, strongest, strict=True):
        plot.feature_map(group, filters[k], ax, f"filter {k}")
    words = f"Filters of the first layer under every element of {group.name}"
    if lift.in_channels > 1:
        words += f"; of the {lift.in_channels} channels of the image only those for the first, which is red in RGB images"
    words += "."
    found = [_figure(drawn, words)]
    model, x = on_lattice(run.model, _seen(run, data.test[:1]))
    upright, moved = (_answer_of(lift, model, image) for image in (x, act(group, 1, x)))  # (K, S, H, W)
    k = int(upright.sum((1, 2, 3)).argmax())
    drawn, (left, right) = plot.figure(2)
    turned, way = ("mirrored", "blue line") if "m" in plot.names(group)[1] else ("turned", "red arrow")
    plot.feature_map(group, upright[k], left, f"of the first {kind} image")
    plot.feature_map(group, moved[k], right, f"of the {turned} image")
    words = (
        f"A feature map of the first layer on {group.name}: on the left of the first {kind} image, on the right of that image "
        f"{turned} by element 1. Where the layer is equivariant, each patch on the right is one of the left, {turned} and moved "
        f"along its {way}."
    )
    return [*found, _figure(drawn, words)]


@torch.no_grad()
def _answer_of(layer: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    """What the layer returns while the model runs on `x`, one image, after a ReLU."""
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, __, y: seen.append(y))
    try:
        model(x)
    finally:
        hook.remove()
    return seen[0].relu()[0]
