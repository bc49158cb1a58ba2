"""Writes the tables of README and docs from the records: `python benchmarks/tables.py`; with --check says if they are stale."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gcnn import GROUPS
from gcnn.irreps import irreps, multiplications

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"

FIRST, SECOND, THIRD = "2026-11-15_rotated_mnist", "2026-11-15_authors_settings", "2026-11-15_second_settings"
ROWS = [  # folder, record, what it is, the paper's number
    (SECOND, "paper_z2cnn", "Z2CNN, the authors' settings", "5.03 ± 0.20"),
    (FIRST, "paper_z2cnn", "Z2CNN, no small turns, norms estimated without dropout", ""),
    (THIRD, "paper_p4cnn-rotpool", "P4CNNRotationPooling, the authors' settings", "3.21 ± 0.12"),
    (FIRST, "paper_p4cnn-rotpool", "P4CNNRotationPooling, no small turns, norm after the pooling", ""),
    (SECOND, "paper_p4cnn", "P4CNN, the authors' settings", "2.28 ± 0.04"),
    (FIRST, "paper_p4cnn", "P4CNN, no small turns", ""),
    (FIRST, "decay_p4cnn", "P4CNN, no small turns, learning rate falling to zero, weight decay", ""),
    (THIRD, "decay_p4cnn", "the same with a dropout of 0.1 (`decay/p4cnn`)", ""),
    (THIRD, "best_p4", "a p4 ResNet, digits turned by any angle in training (`best/p4`)", ""),
]


def record(folder: str, name: str) -> dict[str, Any]:
    """One record."""
    found: dict[str, Any] = json.loads((RECORDS / folder / f"{name}.json").read_text())
    return found


def rotated_mnist() -> str:
    """Table 1 of the paper beside ours."""
    rows = ["| network | parameters | paper | ours | each seed |", "|---|---|---|---|---|"]
    for folder, name, words, paper in ROWS:
        r = record(folder, name)
        each = " ".join(f"{row['test_error']:.2f}" for row in r["seeds"])
        rows.append(f"| {words} | {r['parameters']:,} | {paper} | {r['mean']:.2f} ± {r['std']:.2f} | {each} |")
    r, fast, graphs = record(SECOND, "paper_p4cnn"), record(FIRST, "compile_graphs"), record(THIRD, "decay_p4cnn")
    rows.append("")
    rows.append(
        f"Test error in percent on the 50,000 digits of rotated MNIST, regenerated; mean and standard deviation of "
        f"{len(r['seeds'])} seeds, last epoch, nothing chosen on the test set. The authors turned training digits by up to 3.14 "
        "degrees and kept the learning rate: now and then the last epoch is a bad one, as that of the first seed of P4CNN. "
        f"{r['device']}, torch {r['torch']}; an epoch of P4CNN takes {graphs['seeds'][0]['median_epoch_seconds']:.2f} s, and "
        f"{fast['seeds'][0]['median_epoch_seconds']:.2f} s with `--compile`. Records: `benchmarks/records/{FIRST}`, "
        f"`{SECOND}` and `{THIRD}`."
    )
    return "\n".join(rows)


def speed() -> str:
    """Layers and networks beside the planar bound and the peers."""
    r = record("2026-11-15_speed_cpu", "speed")
    times: dict[tuple[str, str], dict[str, Any]] = {}
    for row in r["rows"]:
        times.setdefault((row["case"], row["mode"]), {})[row["candidate"]] = row
    names = ("gcnn", "gcnn, planar algorithm", "escnn", "e2cnn")
    rows = [
        "| forward and backward | bound, ms | " + " | ".join(names) + " | `planar()`, inference |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for (case, mode), found in times.items():
        if mode != "train":
            continue
        bound = min(found[k]["ms"] for k in ("planar nchw", "planar nhwc"))
        cells = [f"{found[k]['ratio']:.2f}" if k in found else "" for k in names]
        served = times.get((case, "inference"), {}).get("gcnn planar()")
        rows.append(
            f"| {case} | {bound:.1f} | {' | '.join(cells)} | {served['ratio']:.2f} |"
            if served
            else f"| {case} | {bound:.1f} | {' | '.join(cells)} | |"
        )
    built = {k: v for k, v in r["construction"].items() if "ResNet44" in k}
    words = ", ".join(f"{k.split(', ')[1]} {v:.2f} s" for k, v in built.items())
    rows.append("")
    rows.append(
        f"Time as a multiple of the bound, float32, median of interleaved rounds; {r['device']}, torch {r['torch']}. Below 1 is "
        "the Fourier algorithm, which needs fewer multiplications than a planar convolution of the same shape. Building the "
        f"layers of a p4m ResNet44: {words}. Record: `benchmarks/records/2026-11-15_speed_cpu`."
    )
    return "\n".join(rows)


def speed_on_gpu() -> str:
    """The same on a GPU, in three precisions."""
    r = record("2026-11-15_speed_h200", "speed")
    ratios: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in r["rows"]:
        ratios.setdefault(row["case"], {}).setdefault((row["precision"], row["how"]), {})[row["candidate"]] = row
    kinds = ("float32", "tf32", "bf16")
    rows = [
        "| forward and backward | bound, ms: float32, TF32, bf16 | gcnn: float32 | TF32 | bf16 | TF32, eager |",
        "|---|---|---|---|---|---|",
    ]
    for case, found in ratios.items():
        bounds = [min(found[k, "graph"][c]["ms"] for c in ("planar nchw", "planar nhwc")) for k in kinds]
        cells = [f"{found[k, 'graph']['gcnn']['ratio']:.2f}" for k in kinds] + [f"{found['tf32', 'eager']['gcnn']['ratio']:.2f}"]
        rows.append(f"| {case} | {', '.join(f'{b:.2f}' for b in bounds)} | {' | '.join(cells)} |")
    rows.append("")
    rows.append(
        f"Time as a multiple of the bound; {r['device']}, torch {r['torch']}. Steps are replayed as CUDA graphs, as "
        "`gcnn train` does, so that kernels are compared; the last column is the same step launched from Python, on a host that "
        "is slow, where small layers wait for Python. Record: `benchmarks/records/2026-11-15_speed_h200`."
    )
    return "\n".join(rows)


def savings() -> str:
    """What the Fourier algorithm saves, for every group."""
    rows = [
        "| group | elements | dimensions of its representations | multiplications: planar, Fourier | fewer |",
        "|---|---|---|---|---|",
    ]
    words = {1: "", 2: " (complex)", 4: " (quaternionic)"}
    for group in GROUPS.values():
        if group.order > 1:
            dims = ", ".join(f"{rho.dim}{words[rho.kind]}" for rho in irreps(group))
            planar, fourier = group.order**2, multiplications(group)
            rows.append(f"| {group.name} | {group.order} | {dims} | {planar}, {fourier} | {planar / fourier:.2f}x |")
    return "\n".join(rows)


def fourier() -> str:
    """The measured gain over the planar bound, by the number of channels."""
    r, cpu = record("2026-11-15_speed_h200", "speed"), record("2026-11-15_speed_cpu", "speed")
    found: dict[str, dict[str, str]] = {}
    for row in r["rows"]:
        if row["candidate"] == "gcnn" and row["how"] == "graph" and row["case"].startswith(("p4m K", "p6m K", "Oh K")):
            found.setdefault(row["case"], {})[row["precision"]] = f"{1 / row['ratio']:.2f}x"
    for row in cpu["rows"]:
        if row["candidate"] == "gcnn" and row["mode"] == "train" and row["case"] in found:
            found[row["case"]]["cpu"] = f"{1 / row['ratio']:.2f}x"
    kinds = ("float32", "tf32", "bf16", "cpu")
    rows = ["| layer, forward and backward | H200, float32 | TF32 | bf16 | CPU, float32 |", "|---|---|---|---|---|"]
    rows += [f"| {case} | {' | '.join(cells.get(k, '') for k in kinds)} |" for case, cells in found.items()]
    rows.append("")
    rows.append(
        'Times the speed of the planar bound, with `algorithm="auto"`; near 1 is the planar algorithm. Records: '
        "`benchmarks/records/2026-11-15_speed_h200` (steps as CUDA graphs) and `2026-11-15_speed_cpu`. Groups of more than 16 "
        "elements stay with the planar algorithm on GPUs so far."
    )
    return "\n".join(rows)


TABLES = {
    "rotated_mnist": rotated_mnist,
    "speed": speed,
    "speed_on_gpu": speed_on_gpu,
    "savings": savings,
    "fourier": fourier,
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """`text` with what stands between the markers of each table made anew."""
    for name, table in TABLES.items():
        start, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        if start in text:
            before, rest = text.split(start)
            text = before + start + table() + "\n" + end + rest.split(end)[1]
    return text


def main() -> None:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path in PAGES:
        text = path.read_text()
        if check and filled(text) != text:
            raise SystemExit(f"{path.name} has other numbers than the records: run python benchmarks/tables.py")
        if not check:
            path.write_text(filled(text))


if __name__ == "__main__":
    main()
