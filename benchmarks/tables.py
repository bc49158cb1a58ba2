"""Writes the tables of the README from the records: `python benchmarks/tables.py`; with --check only says if they are stale."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"

PAPER = {"paper_z2cnn": "5.03 ± 0.20", "paper_p4cnn-rotpool": "3.21 ± 0.12", "paper_p4cnn": "2.28 ± 0.04", "decay_p4cnn": ""}
NAMES = {
    "paper_z2cnn": "Z2CNN, the authors' settings",
    "paper_p4cnn-rotpool": "P4CNNRotationPooling, the authors' settings",
    "paper_p4cnn": "P4CNN, the authors' settings",
    "decay_p4cnn": "P4CNN, learning rate falling to zero, weight decay (`decay/p4cnn`)",
}


def record(folder: str, name: str) -> dict[str, Any]:
    """One record."""
    found: dict[str, Any] = json.loads((RECORDS / folder / f"{name}.json").read_text())
    return found


def rotated_mnist(folder: str) -> str:
    """Table 1 of the paper beside ours."""
    rows = ["| network | parameters | paper | ours | s an epoch |", "|---|---|---|---|---|"]
    for name, words in NAMES.items():
        r = record(folder, name)
        seconds = r["seeds"][0]["median_epoch_seconds"]
        ours = f"{r['mean']:.2f} ± {r['std']:.2f}"
        rows.append(f"| {words} | {r['parameters']:,} | {PAPER[name]} | {ours} | {seconds:.2f} |")
    r, fast = record(folder, "paper_p4cnn"), record(folder, "compile_graphs")
    rows.append("")
    rows.append(
        f"Test error in percent on the 50,000 digits of rotated MNIST, regenerated; mean and standard deviation of "
        f"{len(r['seeds'])} seeds, last epoch, nothing chosen on the test set. {r['device']}, torch {r['torch']}; with "
        f"`--compile` an epoch of P4CNN takes {fast['seeds'][0]['median_epoch_seconds']:.2f} s. "
        f"Records: `benchmarks/records/{folder}`."
    )
    return "\n".join(rows)


TABLES = {"rotated_mnist": lambda: rotated_mnist("2026-11-15_rotated_mnist")}


def filled(text: str) -> str:
    """`text` with what stands between the markers of each table made anew."""
    for name, table in TABLES.items():
        start, end = f"<!-- table {name} -->\n", f"\n<!-- end {name} -->"
        before, rest = text.split(start)
        text = before + start + table() + end + rest.split(end)[1]
    return text


def main() -> None:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    path = ROOT / "README.md"
    text = path.read_text()
    if parser.parse_args().check:
        if filled(text) != text:
            raise SystemExit("README.md has other numbers than the records: run python benchmarks/tables.py")
    else:
        path.write_text(filled(text))


if __name__ == "__main__":
    main()
