"""One self-contained HTML page about runs: curves, confusion, error by angle, equivariance, filters and maps on the group."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gcnn import plot
from gcnn.data import Dataset, load
from gcnn.files import write_file
from gcnn.groups import GROUPS, p4
from gcnn.nn import LiftConv
from gcnn.runs import Run, alike, error_by_angle, group_of, load_run, names_the_root
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


MARK = '<meta name="generator" content="gcnn">'  # by which a later report knows what it may replace


def _is_report(page: bytes) -> bool:
    return MARK.encode() in page or b"</style></head><body><h1>Report: " in page  # as before there was a mark


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
            data = load(first.config.data, root or first.config.data_root or None)
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
        _figure(_curves(runs, kind), f"Training loss and {kind} error by epoch."),
        *(
            [
                _figure(
                    _angles(runs, data, kind, images, progress),
                    f"{kind.title()} error of the first {min(images, len(data.test))} {kind} images, turned by every angle.",
                )
            ]
            if data.test.images.ndim == 4
            else []
        ),
        *(_figure(_confusion(name, run), f"Confusion matrix of {name}: rows are true classes.") for name, run in runs.items()),
    ]
    group = group_of(first.model)
    if group.dim == 2 and group.order > 1:
        parts += _on_the_group(first, data)
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
    x = data.test.images[:16].float()
    quarters = p4 if x.ndim == 4 else GROUPS["C4"]  # of volumes, about their first axis
    rows = []
    for name, run in runs.items():
        group = group_of(run.model)
        x = x.to(next(run.model.parameters()).device)
        own = f"{equivariance_error(run.model, group, x):.1e}" if group.fills_box and group.order > 1 else "-"
        weights = sum(p.numel() for p in run.model.parameters())
        last = run.tested
        cells = (name, run.config.model, group.name, f"{weights:,}", last["epoch"], f"{last['test_error']:.2f} %", own)
        rows.append((*cells, f"{equivariance_error(run.model, quarters, x):.1e}"))
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr>{lines}</table></div>'


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


def _angles(runs: dict[str, Run], data: Dataset, kind: str, images: int, progress: bool) -> Any:
    drawn, (ax,) = plot.figure(1, height=4, width=9)
    for name, run in runs.items():
        device = next(run.model.parameters()).device
        found = error_by_angle(run.model, run.inputs(data.test[:images], device), progress=progress)
        angles, errors = zip(*found, strict=True)
        ax.plot([*angles, 360], [*errors, errors[0]], marker=".", label=name)
    ax.set(xlabel="turned by (degrees)", ylabel=f"{kind} error (%)", xticks=range(0, 361, 45), ylim=(0, None))
    ax.legend()
    return drawn


def _confusion(name: str, run: Run) -> Any:
    table = torch.tensor(run.tested["confusion"])
    drawn, (ax,) = plot.figure(1, height=5)
    shown = (table.double() / table.sum(1, keepdim=True).clamp(min=1)).fill_diagonal_(0)  # what goes wrong, in colour
    ax.imshow(shown.numpy(), cmap="Reds")
    for i, row in enumerate(table.tolist()):
        for j, count in enumerate(row):
            if count:
                dark = shown[i, j] > 0.6 * shown.max()
                ax.text(j, i, count, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ticks = range(len(run.classes))
    ax.set(xticks=ticks, yticks=ticks, xticklabels=run.classes, yticklabels=run.classes, xlabel="answer", ylabel="true class")
    ax.set_title(name)
    return drawn


def _on_the_group(run: Run, data: Dataset) -> list[str]:
    """Filters of the first layer, and a feature map of a digit beside that of the digit turned."""
    group = group_of(run.model)
    lift = next(m for m in run.model.modules() if isinstance(m, LiftConv))
    filters = lift.filters()[:, :, 0, 0]  # (K_out, S, n, n)
    strongest = filters.square().sum((1, 2, 3)).argsort(descending=True)[:3].tolist()
    drawn, panels = plot.figure(len(strongest), height=4)
    for ax, k in zip(panels, strongest, strict=True):
        plot.feature_map(group, filters[k], ax, f"filter {k}")
    found = [_figure(drawn, f"Filters of the first layer under every element of {group.name}.")]
    with torch.no_grad():
        x = (data.test.images[:1].float() - run.mean) / run.std
        seen: list[torch.Tensor] = []
        hook = lift.register_forward_hook(lambda _, __, y: seen.append(y))
        run.model(x.to(lift.weight.device))
        hook.remove()
        maps = seen[0].relu()[0]
    k = int(maps.sum((1, 2, 3)).argmax())
    words = f"A feature map of the first test image on {group.name}, and the same under element 1: what the turned image gives."
    return [*found, _figure(plot.action(group, maps[k], 1), words)]
