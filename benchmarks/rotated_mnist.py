"""Trains recipes on rotated MNIST (regenerated) over several seeds, and writes a record of each.

    python benchmarks/rotated_mnist.py --root FOLDER_WITH_MNIST --out RECORDS paper/p4cnn paper/z2cnn --seeds 5
    python benchmarks/rotated_mnist.py --root FOLDER --out RECORDS paper/p4cnn --set lr=0.003 epochs=200 validation=2000 --name x

With `validation=2000` the error is that of the last 2,000 training digits: settings are chosen on those, never on the test set.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from gcnn.data import Dataset, load
from gcnn.recipes import RECIPES
from gcnn.testing import equivariance_error
from gcnn.train import Config, group_of, precision, train


def machine(commit: str) -> dict[str, str]:
    """What a number was measured on."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit or (asked.stdout.strip() if asked.returncode == 0 else "unknown"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }


def run(config: Config, seeds: range, data: Dataset) -> dict[str, Any]:
    """The last test error of every seed, never a chosen one, with times and equivariance errors."""
    rows = []
    for seed in seeds:
        start = time.perf_counter()
        done = train(dataclasses.replace(config, seed=seed), progress=False, data=data)
        group = group_of(done.model)
        device = next(done.model.parameters()).device
        x = data.test.images[:16].to(device).float() / 255
        with precision(tf32=False):
            change = equivariance_error(done.model, group, x) if group.fills_box else None
        rows.append(
            {
                "seed": seed,
                "test_error": done.history[-1]["test_error"],
                "train_error": done.history[-1]["train_error"],
                "median_epoch_seconds": statistics.median(row["seconds"] for row in done.history),
                "seconds": time.perf_counter() - start,
                "equivariance_error": change,
            }
        )
    errors = [row["test_error"] for row in rows]
    return {
        "config": dataclasses.asdict(config),
        "data": f"{data.name}, regenerated from MNIST" if "original" not in data.name else data.name,
        "parameters": sum(p.numel() for p in done.model.parameters()),
        "mean": statistics.mean(errors),
        "std": statistics.stdev(errors) if len(errors) > 1 else None,
        "seeds": rows,
    }


def main() -> None:
    """Reads the arguments, trains, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", choices=sorted(RECIPES))
    parser.add_argument("--root", required=True, help="folder with the files of MNIST")
    parser.add_argument("--out", required=True, type=Path, help="folder for the records")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="the commit that is measured, where git is not at hand")
    parser.add_argument("--name", default="", help="name of the record, for settings that are no recipe")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings that differ from the recipe")
    arguments = parser.parse_args()
    changes = {}
    for pair in arguments.set:
        key, _, value = pair.partition("=")
        changes[key] = value if key in ("model", "group", "schedule", "data", "device") else ast.literal_eval(value)
    data = load("rotated_mnist", arguments.root)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for recipe in arguments.recipes:
        config = dataclasses.replace(RECIPES[recipe], **changes)
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        found = {"recipe": recipe, "name": arguments.name or recipe, **machine(arguments.commit), **run(config, seeds, data)}
        name = (arguments.name or recipe).replace("/", "_")
        (arguments.out / f"{name}.json").write_text(json.dumps(found, indent=1))
        seconds = found["seeds"][0]["median_epoch_seconds"]
        each = " ".join(f"{row['test_error']:.2f}" for row in found["seeds"])
        print(f"{name}: {found['mean']:.3f} +- {found['std'] or 0:.3f} % ({each}), {seconds:.3f} s an epoch", flush=True)


if __name__ == "__main__":
    main()
