"""What a G-convolution costs, beside the planar bound and every peer that is installed.

    python benchmarks/bench.py --quick                    # a minute on a CPU
    python benchmarks/bench.py --out benchmarks/records/DATE_speed_DEVICE --compile

The bound is torch's own convolution (or network) of the same expanded shape, in the better of its two memory formats, measured
in the same run. Candidates take turns, round after round; a number is the median of the rounds, with its quartiles. Modes:
`train` is forward and backward, `forward` has no gradients but expands the filters in each call, `inference` is eval mode.
On a GPU a round is several steps one after the other, waited for at its end, as in a training loop: launched from Python (`how`
is `eager`), and recorded as a CUDA graph and replayed (`graph`), without what Python takes to launch kernels, which on a slow
host is more than what they take.
Peers (escnn 1.0.11, e2cnn 0.2.3) need an environment of their own; where they cannot be imported, the run says so and goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gcnn import Group, Oh, p4, p4m, p6m
from gcnn.export import planar
from gcnn.layout import NARROW, from_planes
from gcnn.models import build
from gcnn.nn import GBatchNorm, GConv, GLinear, LiftConv
from gcnn.train import precision

ROUND = 10.0  # ms of steps in a round on a GPU
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_TOP_PAD_": str(1 << 28)}


@dataclass(frozen=True)
class Case:
    """A module of this package and the shape of its input: images, or maps with S elements."""

    group: Group
    make: Callable[[], nn.Module]
    channels: int
    size: int
    """0: no space."""
    batch: int
    cpu_batch: int
    """0: on GPUs only."""
    on_group: bool = True
    linear: bool = True
    """A chain of layers, so that its planar twin is one too."""
    quick: bool = False


def regular(group: Group, k: int, size: int, batch: int, cpu: int, quick: bool = False, **options: Any) -> Case:
    """A layer from K to K channels."""
    options = {"kernel_size": 3, "padding": 1, "bias": False, **options}
    k_out = options.pop("k_out", k)
    return Case(group, lambda: GConv(group, k, k_out, **options), k, size, batch, cpu, quick=quick)


def linear(group: Group, k: int, rows: int) -> Case:
    """A linear layer on functions on the point group alone."""
    return Case(group, partial(GLinear, group, k, k, bias=False), k, 0, rows, 0)


def lifting(group: Group, k: int, size: int, channels: int = 3, quick: bool = False) -> Case:
    """A first layer."""
    make = partial(LiftConv, group, channels, k, 3, padding=1, bias=False)
    return Case(group, make, channels, size, 128, 128, on_group=False, quick=quick)


def block(group: Group, k: int, size: int, quick: bool = False) -> Case:
    """Convolution, norm, ReLU."""

    def make() -> nn.Module:
        return nn.Sequential(GConv(group, k, k, 3, padding=1, bias=False), GBatchNorm(group, k), nn.ReLU())

    return Case(group, make, k, size, 128, 32, quick=quick)


CASES = {
    "p4 K=10 28px": regular(p4, 10, 28, 128, 64, quick=True),
    "p4 K=32 28px": regular(p4, 32, 28, 128, 32, quick=True),
    "p4 K=64 28px": regular(p4, 64, 28, 128, 16),
    "p4m K=11 32px": regular(p4m, 11, 32, 128, 32, quick=True),
    "p4m K=23 16px": regular(p4m, 23, 16, 128, 32, quick=True),
    "p4m K=45 8px": regular(p4m, 45, 8, 128, 64),
    "p4m K=25 32px": regular(p4m, 25, 32, 128, 8),
    "p4m K=50 16px": regular(p4m, 50, 16, 128, 16),
    "p4m K=100 8px": regular(p4m, 100, 8, 128, 32),
    "p4m K=64 16px": regular(p4m, 64, 16, 128, 32),
    "p4m K=128 16px": regular(p4m, 128, 16, 128, 16),
    "p4m K=256 16px": regular(p4m, 256, 16, 64, 0),
    "p6m K=16 33px": regular(p6m, 16, 33, 32, 8),
    "Oh K=8 16px": regular(Oh, 8, 16, 8, 2),
    "Oh K=16 16px": regular(Oh, 16, 16, 8, 0),
    "p4m K=128 16px 1x1": regular(p4m, 128, 16, 128, 0, kernel_size=1, padding=0),
    "p4m K=256 16px 1x1": regular(p4m, 256, 16, 64, 0, kernel_size=1, padding=0),
    "p4m K=45 8px 1x1": regular(p4m, 45, 8, 128, 64, kernel_size=1, padding=0),
    "p4m K=11-23 32px stride 2": regular(p4m, 11, 32, 128, 32, k_out=23, stride=2),
    "GLinear p4m K=128": linear(p4m, 128, 1 << 15),
    "GLinear p4m K=256": linear(p4m, 256, 1 << 14),
    "lift p4 K=10 28px": lifting(p4, 10, 28, 1),
    "lift p4m K=11 32px": lifting(p4m, 11, 32, quick=True),
    "lift p4m K=45 32px": lifting(p4m, 45, 32),
    "block p4 K=32 28px": block(p4, 32, 28),
    "block p4m K=11 32px": block(p4m, 11, 32, quick=True),
    "block p4m K=23 16px": block(p4m, 23, 16),
    "P4CNN": Case(p4, lambda: build("p4cnn"), 1, 28, 128, 128, on_group=False, linear=False, quick=True),
    "p4m ResNet44": Case(p4m, lambda: build("resnet44"), 3, 32, 128, 8, on_group=False, linear=False),
    "p4m ResNet26": Case(p4m, lambda: build("resnet26"), 3, 32, 128, 0, on_group=False, linear=False),
}


# --- candidates --------------------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """Something to time: a module and its input."""

    module: Any
    x: Any
    inference_only: bool = False


def candidates(title: str, case: Case, device: str, compiled: bool, exact: bool = False) -> Iterator[tuple[str, Candidate]]:
    """Whatever can run the case here, the bounds first.

    Our layers get maps in the memory format that the layers before them would give: that of the image for `exact` float32 on
    GPUs if there are many planes, channels last elsewhere.
    """
    torch.manual_seed(0)
    ours = case.make().to(device)
    n = case.batch if device == "cuda" else case.cpu_batch
    dim, order = case.group.dim if case.size else 0, case.group.order
    planes = torch.randn(n, case.channels * (order if case.on_group else 1), *(case.size,) * dim, device=device)
    last = {0: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}[dim]
    if not case.size:
        twin: nn.Module = nn.Linear(planes.shape[1], planes.shape[1], bias=False).to(device)
    elif case.group.fills_box:
        twin = planar(ours)
    else:  # the same shape; what lies outside the hexagon is worked on as well
        bank = ours._bank().detach()
        twin = nn.Conv2d(bank.shape[1], bank.shape[0], 3, padding=1, bias=False).to(device)
    if case.linear and case.group.fills_box:
        twin = nn.Sequential(*(m for m in twin.modules() if not list(m.children())))
    for name, memory in (("planar nchw", torch.contiguous_format), ("planar nhwc", last)):
        copied = _copy(twin, memory)
        yield name, Candidate(copied, planes.to(memory_format=memory))
    fast = planes.to(memory_format=last)
    x = from_planes(planes if exact and planes.shape[1] > NARROW else fast, order) if case.on_group else planes
    yield "gcnn", Candidate(ours, x)
    if (isinstance(ours, GConv | GLinear) and case.on_group) or "ResNet26" in title:
        other = case.make().to(device)
        for layer in other.modules():
            if isinstance(layer, GConv | GLinear):
                layer.algorithm = "planar"
        yield "gcnn, planar algorithm", Candidate(other, x)
    if compiled:
        torch._dynamo.reset()  # else the case after a few others would run uncompiled
        inner: Any = torch._functorch.config  # gradients come as outputs lie: between layers always, here from torch 2.13 on
        inner.guess_tangent_strides_as_outputs = True
        yield "gcnn compiled", Candidate(torch.compile(case.make().to(device), dynamic=False), x)
        yield "planar compiled", Candidate(torch.compile(_copy(twin, last), dynamic=False), fast)
    if case.group.fills_box:
        yield "gcnn planar()", Candidate(_copy(twin, last), fast, inference_only=True)
    for name, make in (("escnn", _escnn), ("e2cnn", _e2cnn)):
        found = make(case, planes)
        if found is not None:
            yield name, found


def _copy(module: nn.Module, memory: torch.memory_format) -> nn.Module:
    import copy

    made = copy.deepcopy(module).train()
    for p in made.parameters():
        if p.ndim == (5 if memory == torch.channels_last_3d else 4) or memory == torch.contiguous_format:
            p.data = p.data.contiguous(memory_format=memory)
    return made


def _escnn(case: Case, planes: Tensor) -> Candidate | None:
    try:
        from escnn import gspaces
        from escnn import nn as enn
    except ImportError:
        return None
    spaces = {"p4": lambda: gspaces.rot2dOnR2(4), "p4m": lambda: gspaces.flipRot2dOnR2(4)}
    return _steerable(case, planes, spaces, enn)


def _e2cnn(case: Case, planes: Tensor) -> Candidate | None:
    try:
        from e2cnn import gspaces
        from e2cnn import nn as enn
    except ImportError:
        return None
    spaces = {"p4": lambda: gspaces.Rot2dOnR2(4), "p4m": lambda: gspaces.FlipRot2dOnR2(4)}
    return _steerable(case, planes, spaces, enn)


def _steerable(case: Case, planes: Tensor, spaces: dict[str, Any], enn: Any) -> Candidate | None:
    """The same layers on regular fields."""
    if case.group.name not in spaces or not case.linear:
        return None
    space = spaces[case.group.name]()
    first: Any = next(m for m in case.make().modules() if isinstance(m, GConv))
    fields = [space.regular_repr if case.on_group else space.trivial_repr] * case.channels
    inputs, outputs = enn.FieldType(space, fields), enn.FieldType(space, [space.regular_repr] * first.out_channels)
    conv = enn.R2Conv(
        inputs, outputs, first.kernel_size[0], padding=first.padding[0], stride=first.stride[0], bias=False, initialize=False
    )
    conv.weights.data.normal_(std=0.1)
    layers = [conv]
    if isinstance(case.make(), nn.Sequential):
        layers += [enn.InnerBatchNorm(outputs), enn.ReLU(outputs)]
    return Candidate(enn.SequentialModule(*layers).to(planes.device), enn.GeometricTensor(planes, inputs))


# --- timing ------------------------------------------------------------------------------------------------------------------


def step(candidate: Candidate, mode: str, amp: bool, device: str) -> Callable[[], None]:
    """One run of the candidate in that mode; with autocast maps are of bfloat16, as the layers before would give them."""
    module, x = candidate.module, candidate.x
    module.train(mode != "inference")
    kind = torch.bfloat16
    leaf = (x.tensor if hasattr(x, "type") and not isinstance(x, Tensor) else x).detach()
    is_map = leaf.shape[1] > 3
    leaf = leaf.to(kind) if amp and is_map else leaf
    x = leaf if isinstance(x, Tensor) else type(x)(leaf, x.type)
    if mode != "train":

        def forward() -> None:
            with torch.no_grad(), torch.autocast(device, kind, enabled=amp, cache_enabled=False):
                module(x)

        return forward
    leaf.requires_grad_(is_map)
    with torch.no_grad(), torch.autocast(device, kind, enabled=amp):
        y = module(x)
        grad = torch.randn_like(y if isinstance(y, Tensor) else y.tensor)
    parameters = list(module.parameters())

    def train() -> None:
        leaf.grad = None
        for p in parameters:
            p.grad = None
        with torch.autocast(device, kind, enabled=amp, cache_enabled=False):  # a graph must not meet another's cache
            y = module(x)
        (y if isinstance(y, Tensor) else y.tensor).backward(grad)

    return train


def recorded(run: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def measure(steps: dict[str, Callable[[], None]], device: str, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Median, quartiles and peak memory of each, taking turns."""
    peaks, counts = {}, {}
    for name, run in steps.items():
        run()
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            counts[name] = min(20, max(1, round(ROUND / _timed(run, 1))))
            peaks[name] = torch.cuda.max_memory_allocated() - before
        else:
            run()
    times: dict[str, list[float]] = {name: [] for name in steps}
    start, order = time.perf_counter(), random.Random(0)
    while len(times[name]) < 5 or (time.perf_counter() - start < seconds and len(times[name]) < rounds):
        for name in order.sample(list(steps), len(steps)):  # who comes after whom tells in a few percent
            run = steps[name]
            if device == "cuda":
                times[name].append(_timed(run, counts[name]))
            else:
                began = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - began))
    found = {}
    for name, all_times in times.items():
        low, median, high = statistics.quantiles(all_times, n=4)
        found[name] = {"ms": median, "q1": low, "q3": high, "rounds": len(all_times), "peak_bytes": peaks.get(name)}
    return found


def _timed(run: Callable[[], None], count: int) -> float:
    """Milliseconds of one of so many steps in a row, on a GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


@contextmanager
def _quietly() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def construction() -> dict[str, float]:
    """Seconds to import, and to build the layers of a p4m ResNet44."""
    found = {}
    for name in ("torch", "gcnn", "escnn", "e2cnn"):
        code = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[f"import {name}"] = float(done.stdout.split()[-1])
    began = time.perf_counter()
    net = build("resnet44")
    found["p4m ResNet44, gcnn"] = time.perf_counter() - began
    convs = [m for m in net.modules() if isinstance(m, GConv)]
    for name in ("escnn", "e2cnn"):
        try:
            if name == "escnn":
                from escnn import gspaces
                from escnn import nn as enn

                space = gspaces.flipRot2dOnR2(4)
            else:
                from e2cnn import gspaces
                from e2cnn import nn as enn

                space = gspaces.FlipRot2dOnR2(4)
        except ImportError:
            continue
        began = time.perf_counter()
        for conv in convs:
            fields = [space.trivial_repr if conv.on_plane else space.regular_repr] * conv.in_channels
            outputs = enn.FieldType(space, [space.regular_repr] * conv.out_channels)
            enn.R2Conv(enn.FieldType(space, fields), outputs, conv.kernel_size[0], padding=conv.padding[0], stride=conv.stride[0])
        found[f"p4m ResNet44, {name}"] = time.perf_counter() - began
    return found


def main() -> None:
    """Reads the arguments, measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compiled candidates too")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these in it")
    parser.add_argument("--modes", nargs="+", default=["train", "forward", "inference"])
    parser.add_argument("--precisions", nargs="+", default=[], help="float32, tf32, bf16")
    parser.add_argument("--how", nargs="+", default=["eager", "graph"], help="eager, graph: on a GPU")
    parser.add_argument("--batch", type=int, default=0, help="images of each case, instead of its own number")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case and mode")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    parser.add_argument("--out", type=Path, default=None, help="folder for the record, speed.json")
    parser.add_argument("--commit", default="", help="the commit that is measured, where git is not at hand")
    told = parser.parse_args()
    if told.device == "cpu" and any(
        os.environ.get(k) != v for k, v in MALLOC.items()
    ):  # freed buffers would come back as page faults
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    precisions = told.precisions or (["float32", "tf32", "bf16"] if told.device == "cuda" else ["float32"])
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    record: dict[str, Any] = {
        "batch": told.batch or "each case's own",
        "commit": told.commit or asked.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if told.device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "construction": construction() if told.only == [""] else {},
        "steps_in_a_row": told.device == "cuda",
        "rows": [],
    }
    for name, seconds in record["construction"].items():
        print(f"{name}: {seconds:.3f} s", flush=True)
    for name in ("escnn", "e2cnn"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed here: left out")
    chosen = {title: case for title, case in CASES.items() if any(words in title for words in told.only)}
    if not chosen:
        raise SystemExit(f"no case has {' or '.join(told.only)} in its name; there are {', '.join(CASES)}")
    for title, case in chosen.items():
        case = replace(case, batch=told.batch, cpu_batch=told.batch) if told.batch else case
        if (told.quick and not case.quick) or (told.device == "cpu" and not case.cpu_batch):
            continue
        for kind in precisions:
            with _quietly(), precision(kind == "tf32"):
                everyone = dict(candidates(title, case, told.device, told.compile, told.device == "cuda" and kind == "float32"))
                for mode in told.modes:
                    running = {k: c for k, c in everyone.items() if mode == "inference" or not c.inference_only}
                    steps = {k: step(c, mode, kind == "bf16", told.device) for k, c in running.items()}
                    for how in told.how if told.device == "cuda" else ["eager"]:
                        runs = {k: recorded(run) for k, run in steps.items()} if how == "graph" else steps
                        found = measure(runs, told.device, 1.5 if told.quick else told.seconds, told.rounds)
                        bound = min(found[k]["ms"] for k in ("planar nchw", "planar nhwc"))
                        words = {"case": title, "precision": kind, "mode": mode, "how": how}
                        record["rows"] += [
                            {**words, "candidate": k, "ratio": row["ms"] / bound, **row} for k, row in found.items()
                        ]
                        each = ", ".join(f"{k} {row['ms'] / bound:.2f}" for k, row in found.items())
                        print(f"{title:26} {kind:8} {mode:10} {how:6} {bound:9.3f} ms: {each}", flush=True)
            if told.out is not None:
                told.out.mkdir(parents=True, exist_ok=True)
                (told.out / "speed.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
