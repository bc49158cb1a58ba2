"""Trains recipes over several seeds and writes a record of each; a run that was stopped goes on where it was.

    python benchmarks/experiments.py --root FOLDER_WITH_MNIST --out RECORDS paper/p4cnn paper/z2cnn --seeds 5
    python benchmarks/experiments.py --root FOLDER --out RECORDS paper/p4cnn --set lr=0.003 epochs=200 validation=2000 --name x

With `validation=n` the error is that of the last n training images: settings are chosen on those, never on the test set.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gcnn import O
from gcnn.data import Dataset, Split, load
from gcnn.functional import act
from gcnn.recipes import RECIPES
from gcnn.runs import Run, evaluate, group_of, on_lattice, precision
from gcnn.testing import equivariance_error
from gcnn.train import Config, train


def machine(commit: str) -> dict[str, str]:
    """What a number was measured on."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit or (asked.stdout.strip() if asked.returncode == 0 else "unknown"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }


def change_under_group(run: Run, data: Dataset) -> float:
    """How much the logits change when the input is moved by the group, relatively; without TF32 and in float32."""
    group, device = group_of(run.model), next(run.model.parameters()).device
    model, x = on_lattice(run.model, (data.test.images[:16].to(device).float() - run.mean) / run.std)
    with precision(tf32=False):
        return equivariance_error(model, group, x)


def turned_by_octahedron(images: Tensor) -> Tensor:
    """Every volume turned by a random element of O, the same ones each time."""
    chosen = torch.randint(O.order, (len(images),), generator=torch.Generator().manual_seed(0))
    turned = torch.empty_like(images)
    for h in range(O.order):
        turned[chosen == h] = act(O, h, images[chosen == h])
    return turned


def turned_at_random(images: Tensor) -> Tensor:
    """Every volume turned by a random rotation, uniform over SO(3), the same ones each time; voxels stay full or empty."""
    q = F.normalize(torch.randn(len(images), 4, generator=torch.Generator().manual_seed(0)), dim=1)
    w, x, y, z = q.unbind(1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    matrices = torch.stack([torch.stack(row, 1) for row in rows], 1)  # (N, 3, 3)
    theta = F.pad(matrices, (0, 1))
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return (F.grid_sample(images.float(), grid, align_corners=False) >= 0.5).to(torch.uint8)


def on_turned_volumes(run: Run, data: Dataset) -> dict[str, float]:
    """The error on the test volumes turned by O, and turned at random."""
    device = next(run.model.parameters()).device
    found = {}
    for name, turn in (("turned_by_O", turned_by_octahedron), ("turned_at_random", turned_at_random)):
        turned = Split(turn(data.test.images), data.test.labels)
        with torch.autocast(device.type, torch.bfloat16, enabled=run.config.amp):  # as the upright ones
            found[name] = evaluate(run.model, run.inputs(turned, device))["error"]
    return found


def share_of_convolutions(run: Run) -> float:
    """The part of a training step's time on the GPU that convolutions and their gradients take."""
    model, device = run.model.train(), next(run.model.parameters()).device
    x = torch.randn(run.config.batch_size, *run.shape, device=device)
    y = torch.zeros(len(x), dtype=torch.int64, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=run.config.amp):
            F.cross_entropy(model(x), y).backward()

    with precision(run.config.tf32):
        step()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as found:
            step()
            torch.cuda.synchronize()
    model.eval()
    times = found.key_averages()
    whole = sum(t.self_device_time_total for t in times if t.device_type == DeviceType.CPU)  # kernels have rows of their own
    parts = [t.device_time_total for t in times if t.key in ("aten::convolution", "aten::convolution_backward")]
    return sum(parts) / whole


def run(config: Config, seeds: range, data: Dataset, runs: Path | None) -> Iterator[dict[str, Any]]:
    """The record so far, after every seed: test errors, of the last epoch or of what Config.keep says, times and the like."""
    rows: list[dict[str, Any]] = []
    share = None
    for seed in seeds:
        start = time.perf_counter()
        folder = runs / str(seed) if runs else None
        resume = folder is not None and (folder / "last.safetensors").exists()
        done = train(dataclasses.replace(config, seed=seed), folder, resume, progress=False, data=data)
        epoch = statistics.median(row["seconds"] for row in done.history)
        count = len(data.train) - config.validation
        row = {
            "seed": seed,
            "test_error": done.tested["test_error"],
            "train_error": done.tested["train_error"],
            "epoch": done.tested["epoch"],
            "last_epoch_error": done.history[-1]["test_error"],
            "median_epoch_seconds": epoch,
            "images_per_second": count / epoch,
            "seconds": time.perf_counter() - start,
            "equivariance_error": change_under_group(done, data),
        }
        if data.test.images.ndim == 5:
            row |= on_turned_volumes(done, data)
        rows.append(row)
        print(f"  seed {seed}: {row['test_error']:.2f} %, {row['seconds']:.0f} s", flush=True)
        if share is None and torch.cuda.is_available():
            share = share_of_convolutions(done)
        errors = [row["test_error"] for row in rows]
        whole = data.name not in ("rotated_mnist", "digits")
        yield {
            "config": dataclasses.asdict(config),
            "data": data.name if whole else f"{data.name}, regenerated from MNIST",
            "parameters": sum(p.numel() for p in done.model.parameters()),
            "mean": statistics.mean(errors),
            "std": statistics.stdev(errors) if len(errors) > 1 else None,
            "share_of_convolutions": share,
            "seeds": rows,
        }


def main() -> None:
    """Reads the arguments, trains, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", choices=sorted(RECIPES))
    parser.add_argument("--root", required=True, help="folder with the files of the data set")
    parser.add_argument("--out", required=True, type=Path, help="folder for the records")
    parser.add_argument("--runs", type=Path, help="folder for the runs, to go on with them after a stop")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="the commit that is measured, where git is not at hand")
    parser.add_argument("--name", default="", help="name of the record, for settings that are no recipe")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings that differ from the recipe")
    arguments = parser.parse_args()
    changes = {}
    for pair in arguments.set:
        key, _, value = pair.partition("=")
        changes[key] = value if isinstance(getattr(Config, key), str) else ast.literal_eval(value)
    data: dict[str, Dataset] = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for recipe in arguments.recipes:
        config = dataclasses.replace(RECIPES[recipe], **changes)
        if config.data not in data:
            data[config.data] = load(config.data, arguments.root)
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        name = (arguments.name or recipe).replace("/", "_").replace("+", "_plus")
        runs = arguments.runs / name if arguments.runs else None
        for found in run(config, seeds, data[config.data], runs):
            kept = {"recipe": recipe, "name": arguments.name or recipe, **machine(arguments.commit), **found}
            (arguments.out / f"{name}.json").write_text(json.dumps(kept, indent=1))
        seconds = found["seeds"][0]["median_epoch_seconds"]
        each = " ".join(f"{row['test_error']:.2f}" for row in found["seeds"])
        print(f"{name}: {found['mean']:.3f} +- {found['std'] or 0:.3f} % ({each}), {seconds:.3f} s an epoch", flush=True)


if __name__ == "__main__":
    main()
