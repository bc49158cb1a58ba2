"""The training program: a config, a loop that reads from top to bottom, checkpoints that survive anything (paper, section 8).

A run is a folder: config.json, metrics.csv, TensorBoard events, and last.safetensors, which holds weights, optimiser, history,
config and group and is replaced in one move after every epoch. Randomness is seeded by (seed, epoch), so that a run that was
stopped and resumed ends with the same bits as one that was not (on the CPU). Needs pip install "gcnn[train]".
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.config import Config
from gcnn.data import Dataset, Split, load
from gcnn.files import write_file
from gcnn.groups import GROUPS
from gcnn.models import EXAMPLES, MODELS, build
from gcnn.models.weights import digest, read
from gcnn.nn import GBatchNorm
from gcnn.steps import Inputs, Stepper, batches, turned
from gcnn.testing import equivariance_error

__all__ = [
    "Config",
    "DivergedError",
    "Normalised",
    "Run",
    "error_by_angle",
    "evaluate",
    "load_run",
    "precision",
    "read_config",
    "train",
]


class DivergedError(RuntimeError):
    """The loss became NaN or infinite."""


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Says whether float32 work on cuda may round its inputs to TF32; afterwards it is as before."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul) if torch.cuda.is_available() else ()
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = tf32
    try:
        yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            backend.allow_tf32 = was


def make_model(config: Config, classes: int = 10, in_channels: int = 1) -> nn.Module:
    """The network that the config names, freshly drawn from its seed."""
    torch.manual_seed(config.seed)
    options: dict[str, Any] = {"num_classes": classes, "in_channels": in_channels}
    if config.group:
        options["group"] = GROUPS[config.group]
    if config.channels:
        options["channels"] = config.channels
    if config.widths:
        options["widths"] = config.widths
    if config.dropout >= 0:
        options["dropout"] = config.dropout
    if config.downsample:
        options["downsample"] = config.downsample
    if config.invariant:
        options["invariant"] = True
    known = _options_of(config.model)
    if config.model == "unet":
        raise ValueError("unet answers for every pixel, and gcnn train for whole images; use build and a loop of your own for it")
    for name in options:
        if name not in known:
            if name == "invariant":
                raise ValueError(f"{config.model} takes no invariant: its head is invariant as it is")
            taken = [k for k in ("channels", "widths", "dropout", "downsample", "invariant") if k in known]
            raise ValueError(f"{config.model} takes no {name}; what it takes of those is {', '.join(taken) or 'nothing'}")
    return build(config.model, **options)


def pick_device(name: str) -> torch.device:
    """The device that `name` says; "auto" is the fastest there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); cpu always can") from error


# --- testing -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def reestimate_norms(model: nn.Module, inputs: Inputs, batch_size: int = 1000, training: bool = False) -> None:
    """Batch norm statistics as means over the whole training set, not over the last steps.

    The rest of the network works as in eval, or as in training: then a dropout widens the statistics.
    """
    model.train(training)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.train()
        m.reset_running_stats()
        m.momentum = None  # cumulative means
    count = len(inputs.labels)  # parts of nearly equal size, since every part counts alike in the mean
    for index in torch.arange(count, device=inputs.labels.device).tensor_split(math.ceil(count / batch_size)):
        model(inputs(index)[0])
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum


@torch.no_grad()
def logits_of(model: nn.Module, inputs: Inputs, batch_size: int = 1000, angle: float = 0.0) -> Tensor:
    """The answers of the model in eval mode, (N, classes), to its inputs turned by `angle` radians."""
    model.eval()
    found = []
    for start in range(0, len(inputs.labels), batch_size):
        index = torch.arange(start, min(start + batch_size, len(inputs.labels)), device=inputs.labels.device)
        x = inputs(index)[0]
        if angle:
            floor = -inputs.mean / inputs.std
            x = turned(x - floor, torch.full((len(x),), angle, device=x.device)) + floor  # zero outside means black
        found.append(model(x))
    return torch.cat(found)


def answers_of(model: nn.Module, inputs: Inputs, turns: int = 1) -> Tensor:
    """The mean of the logits over `turns` turns of each image, as Config.test_turns says."""
    return torch.stack([logits_of(model, inputs, angle=math.pi / 2 * i / turns) for i in range(turns)]).mean(0)


def evaluate(model: nn.Module, inputs: Inputs, turns: int = 1) -> dict[str, Any]:
    """Test error in percent, mean loss, and the confusion matrix (true class, answer); `turns` as Config.test_turns."""
    logits = answers_of(model, inputs, turns)
    answers, k = logits.argmax(1), logits.shape[1]
    confusion = torch.bincount(inputs.labels * k + answers, minlength=k * k).reshape(k, k)
    return {
        "error": 100 * float((answers != inputs.labels).double().mean()),
        "loss": float(F.cross_entropy(logits, inputs.labels)),
        "confusion": confusion.tolist(),
    }


def error_by_angle(model: nn.Module, inputs: Inputs, steps: int = 24, progress: bool = False) -> list[tuple[float, float]]:
    """(degrees, error in percent) of the test images turned by each of `steps` angles of a full turn."""
    found = []
    for i in _bar(range(steps), "turning") if progress else range(steps):
        logits = logits_of(model, inputs, angle=2 * math.pi * i / steps)
        found.append((360 * i / steps, 100 * float((logits.argmax(1) != inputs.labels).double().mean())))
    return found


def _bar(steps: Any, words: str) -> Any:
    from tqdm import tqdm

    return tqdm(steps, words)


# --- runs ----------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A trained network with what it takes to use it: its config, its group, its normalisation and its history."""

    model: nn.Module
    config: Config
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    """Of one image: channels, rows, columns."""
    mean: float
    std: float
    history: list[dict[str, Any]]
    data: str = ""
    """The name of the data set that it was trained on."""
    kept: dict[str, Any] | None = None
    """With Config.keep "best": the epoch of the weights, and their test when the run was over."""

    @property
    def tested(self) -> dict[str, Any]:
        """The row of the history that belongs to the weights."""
        return {**self.history[self.kept["epoch"] - 1], **self.kept} if self.kept else self.history[-1]

    def inputs(self, split: Split, device: torch.device) -> Inputs:
        """The split, as this network was trained to see it."""
        return Inputs(split, self.mean, self.std, device)

    def predict(self, images: Tensor) -> Tensor:
        """Probabilities (N, classes) of images as bytes (N, channels, rows, columns), answered as in the test."""
        self.check_takes_bytes()
        device = next(self.model.parameters()).device
        unknown = Split(images, torch.zeros(len(images), dtype=torch.int64))
        return answers_of(self.model, self.inputs(unknown, device), self.config.test_turns).softmax(1)

    def check_data(self, data: Dataset) -> None:
        """Raises a ValueError for data that this network does not know."""
        if self.data != data.name:
            raise ValueError(f"the run was trained on {self.data}, not on {data.name}; test it with gcnn.train.evaluate")
        for what, was, now in (
            ("classes", self.classes, tuple(data.classes)),
            ("images of shape", self.shape, tuple(data.test.images.shape[1:])),
        ):
            if was != now:
                raise ValueError(f"the run was trained with {what} {was}, {data.name} has {now}; take the data that it is of")

    def held_out(self, data: Dataset) -> Dataset:
        """The data with the images that this run held out, if it did, as its test part; an error if those are others now."""
        if not self.config.validation:
            return data
        data = data.hold_out(self.config.validation)
        images = data.train.images
        if not alike({"mean": self.mean, "std": self.std}, *_mean_and_std(images), not images.is_floating_point()):
            raise ValueError(
                f"the run was trained on other images than {data.name} are now, so it may have seen those that are held out; "
                "test it with gcnn.train.evaluate, or train it anew"
            )
        return data

    def check_takes_bytes(self) -> None:
        """Raises a ValueError for a network that saw no plain images."""
        if "whitened" in self.data:
            raise ValueError(
                f"the run was trained on {self.data}, and whitening a new image takes the whole data set; "
                "train with --data cifar10 for a network that takes images as they are"
            )


class Normalised(nn.Module):
    """A network that takes images as they are in files, with numbers from 0 to 255."""

    def __init__(self, model: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, mean, std

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes)."""
        logits: Tensor = self.model((images - self.mean) / self.std)
        return logits


def group_of(model: nn.Module) -> Any:
    """The group of the first layer that has one."""
    return next(m.group for m in model.modules() if hasattr(m, "group"))


def _save(folder: Path, model: nn.Module, kept: dict[str, Tensor], stepper: Stepper, meta: dict[str, Any]) -> None:
    from safetensors.torch import save

    tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    tensors |= {f"kept.{k}": v.cpu().contiguous() for k, v in kept.items()}
    for name, p in model.named_parameters():
        for k, v in stepper.optimizer.state[p].items():
            tensors[f"optimizer.{name}.{k}"] = v.detach().cpu().contiguous()
    write_file(folder / "last.safetensors", save(tensors, {"gcnn": json.dumps({**meta, "sha256": digest(tensors)})}))
    table = io.StringIO()
    columns = sorted({k for row in meta["history"] for k in row if k != "confusion"}, key=lambda k: (k != "epoch", k))
    writer = csv.DictWriter(table, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(meta["history"])
    write_file(folder / "metrics.csv", table.getvalue().encode())


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if path.parent.is_file():
        raise NotADirectoryError(f"{path.parent} is a file; the folder of a run was expected, which holds {path.name}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {path.parent} holds no checkpoint; train with --out {path.parent} first")
    tensors, meta = read(path, "checkpoint")
    if missing := [key for key in ("config", "classes", "shape", "group", "history") if key not in meta]:
        raise ValueError(
            f"{path} holds weights, but no checkpoint of gcnn train: it does not say its {missing[0]}; gcnn.models.load reads it"
        )
    return tensors, meta


def _load_model(path: Path, model: nn.Module, tensors: dict[str, Tensor], meta: dict[str, Any], part: str = "model.") -> None:
    group = group_of(model)
    if [group.name, json.loads(json.dumps(group.matrices))] != meta["group"]:
        raise ValueError(f"{path} is a checkpoint of group {meta['group'][0]}, the network is one of {group.name}")
    state = {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network {meta['config']['model']}: {error}") from error


def load_run(folder: str | Path, device: str = "cpu") -> Run:
    """The network of a run folder, in eval mode, with its config and history."""
    path = Path(folder) / "last.safetensors"
    tensors, meta = _read(path)
    config = Config(**meta["config"])
    with torch.random.fork_rng(devices=[]):  # what it draws is thrown away
        model = make_model(config, len(meta["classes"]), meta["shape"][0])
    _load_model(path, model, tensors, meta, "kept." if meta.get("kept") else "model.")
    return _run(model.to(pick_device(device)), config, meta)


def read_config(folder: str | Path) -> Config:
    """The settings of the run in a folder."""
    return Config(**_read(Path(folder) / "last.safetensors")[1]["config"])


def _run(model: nn.Module, config: Config, meta: dict[str, Any]) -> Run:
    classes, shape = tuple(meta["classes"]), tuple(meta["shape"])
    return Run(model.eval(), config, classes, shape, meta["mean"], meta["std"], meta["history"], meta["data"], meta.get("kept"))


# --- training ------------------------------------------------------------------------------------------------------------


def train(
    config: Config, out: str | Path | None = None, resume: bool = False, progress: bool = True, data: Dataset | None = None
) -> Run:
    """Trains a network and returns it. With `out`, writes the run there after every epoch; `resume` goes on from there.

    Started by torchrun, trains with DistributedDataParallel: the batch is divided among the processes, the first one writes.
    """
    folder = Path(out) if out is not None else None
    if folder is not None and folder.is_file():
        raise FileExistsError(f"{folder} is a file; a run is written to a folder, choose another one with --out")
    rank, world, distributed = _join()
    device = pick_device(config.device)
    data = load(config.data, config.data_root or None) if data is None else data
    name = data.name
    data = data.hold_out(config.validation) if config.validation else data
    if len(data.train) < 2:
        raise ValueError(f"{data.name}: {len(data.train)} training images are too few")
    example = EXAMPLES.get(config.model)
    if example is not None and data.train.images.ndim != len(example) + 1:
        kinds = ("images", "volumes") if data.train.images.ndim == 4 else ("volumes", "images")
        raise ValueError(f"{config.model} takes {kinds[1]}, {data.name} are {kinds[0]}; choose another --data or --model")
    mean, std = _mean_and_std(data.train.images)
    meta: dict[str, Any] = {
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "classes": data.classes,
        "shape": list(data.train.images.shape[1:]),
        "mean": mean,
        "std": std or 1.0,
        "images": len(data.train),
        "history": [],
        "epoch": 0,
        "data": name,
    }
    model = make_model(config, len(data.classes), meta["shape"][0])
    _check_takes(model, meta["shape"], config)
    if progress and rank == 0 and (note := _note_on_exactness(model, meta["shape"], config)):
        print(note, file=sys.stderr)
    model, group = model.to(device), group_of(model)
    meta["group"] = [group.name, group.matrices]
    for norm in model.modules():
        if isinstance(norm, GBatchNorm):
            norm.sync = config.sync_norm and world > 1
    training = Inputs(data.train, meta["mean"], meta["std"], device, config)
    plain = Inputs(data.train, meta["mean"], meta["std"], device)
    testing = Inputs(data.test, meta["mean"], meta["std"], device)
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    stepper = Stepper(wrapped, training, config, device, world)
    kept: dict[str, Tensor] = {}
    if folder is not None and resume:
        exact = not data.train.images.is_floating_point()  # whitening rounds in other ways with other numbers of threads
        meta, kept = _resume(folder / "last.safetensors", model, stepper, meta, exact)
    elif folder is not None and (folder / "last.safetensors").exists() and rank == 0:
        raise FileExistsError(f"{folder} holds a run already; go on with it by --resume, or choose another folder with --out")
    if folder is not None and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.json", json.dumps(meta["config"], indent=2).encode())
    steps = math.ceil(len(data.train) / config.batch_size)

    def test() -> dict[str, Any]:
        with precision(tf32=False), torch.autocast(device.type, torch.bfloat16, enabled=config.amp):
            if config.reestimate != "no":
                reestimate_norms(model, plain, training=config.reestimate == "train")
            found = evaluate(model, testing, config.test_turns)
        return {"test_error": found["error"], "test_loss": found["loss"], "confusion": found["confusion"]}

    kind, shown = "validation" if config.validation else "test", progress and rank == 0
    written = folder if rank == 0 else None
    with _Reporter(written, shown, config.epochs, len(data.train), meta["epoch"], world, kind) as report:
        for epoch in range(meta["epoch"] + 1, config.epochs + 1):
            model.train()
            with precision(config.tf32):
                stepper.begin(epoch)
            torch.manual_seed(config.seed * 1_000_003 + epoch)
            losses, sizes = torch.zeros(steps, device=device), torch.zeros(steps, device=device)
            wrong = torch.zeros((), device=device)
            start = time.perf_counter()
            order = batches(len(data.train), config.batch_size, config.seed * 1_000_003 + epoch, device, rank, world)
            for step, (index, total) in enumerate(order):
                stepper.set_lr(config.rate(epoch - 1 + step / steps))
                with precision(config.tf32):
                    stepper(index, total)
                losses[step] = stepper.loss
                sizes[step] = total
                wrong += stepper.wrong
                report.step(epoch, total, losses, step)
            if distributed:
                dist.all_reduce(losses)
                dist.all_reduce(wrong)
            bad = (~torch.isfinite(losses)).nonzero()
            if len(bad):
                last = (
                    f"the last good checkpoint is {folder / 'last.safetensors'}"
                    if folder and meta["epoch"]
                    else "there is no checkpoint yet"
                )
                raise DivergedError(
                    f"the loss became {float(losses[bad[0]])} in epoch {epoch}, step {int(bad[0]) + 1} of {steps}; {last} "
                    f"(epoch {meta['epoch']}); try a smaller --lr than {config.lr}"
                )
            row: dict[str, Any] = {
                "epoch": epoch,
                "train_loss": float((losses * sizes).sum() / len(data.train)),
                "train_error": 100 * float(wrong) / len(data.train),
                "seconds": time.perf_counter() - start,
            }
            if epoch % config.test_every == 0 or epoch == config.epochs:
                report.says(epoch, "testing" if config.reestimate == "no" else "estimating norms, testing")
                row |= test()
            meta["epoch"] = epoch
            meta["history"] = [*meta["history"], row]
            if config.keep == "best":
                best = min((r for r in meta["history"] if "test_loss" in r), key=lambda r: r["test_loss"], default=row)
                if best is row:
                    meta["kept"], kept = {"epoch": epoch}, _copied(model)
                if epoch == config.epochs:
                    current = _copied(model)
                    model.load_state_dict(kept)
                    meta["kept"], kept = {"epoch": best["epoch"], **test()}, _copied(model)
                    model.load_state_dict(current)
            if folder is not None and rank == 0:
                _save(folder, model, kept, stepper, meta)
            report.epoch(row)
    if distributed:
        dist.barrier()
    if kept:
        model.load_state_dict(kept)
    return _run(model, config, meta)


def _mean_and_std(images: Tensor) -> tuple[float, float]:
    """Of all numbers, in float64, some images at a time."""
    parts = images.flatten().split(1 << 24)
    mean = sum(float(part.double().sum()) for part in parts) / images.numel()
    squares = sum(float((part.double() - mean).square().sum()) for part in parts)
    return mean, math.sqrt(squares / max(1, images.numel() - 1))


def alike(run: dict[str, Any], mean: float, std: float, exact: bool) -> bool:
    """Whether images have the mean and the standard deviation of those that a run was trained on."""
    most = (1e-9 if exact else 1e-4) * run["std"]
    return abs(run["mean"] - mean) <= most and abs(run["std"] - (std or 1.0)) <= most


def _options_of(model: str) -> set[str]:
    """What the builder of a network takes."""
    builder, defaults = MODELS[model]
    known = set(inspect.signature(builder).parameters)
    if "planar" in defaults:  # a converted network takes the options of the ordinary one
        known |= set(inspect.signature(defaults["planar"]).parameters)
    return known


def _check_takes(model: nn.Module, shape: Sequence[int], config: Config) -> None:
    """Raises a ValueError unless the network takes an image of this shape."""
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    except (RuntimeError, ValueError) as error:
        sides = " x ".join(str(n) for n in shape[1:])
        raise ValueError(
            f"{config.model} cannot take images of {sides}: {error}; take larger ones, or another --model"
        ) from error


def _note_on_exactness(model: nn.Module, shape: Sequence[int], config: Config) -> str:
    """A sentence for a network that strides make inexact at the size of its images; none for others."""
    group = group_of(model)
    if group.order == 1 or group.dim != 2 or not group.fills_box or shape[1] != shape[2]:
        return ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.rand(1, *shape)
        try:
            error = equivariance_error(model.eval(), group, x)
        finally:
            model.train()
    if error < 1e-3:
        return ""
    sides, known = " x ".join(str(n) for n in shape[1:]), _options_of(config.model)
    ways = [way for way in ("downsample pool", "invariant") if way.split()[0] in known]
    return (
        f"note: {config.model} is not exact at {sides}: under {group.name} its answers change by {100 * error:.2g} %, since a "
        f"stride does not fit the size{', or its head is not invariant' if 'invariant' in known else ''}; gcnn check names the "
        f"layer; what may help is {' and '.join(['another size', *(f'--{way}' for way in ways)])}"
    )


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _join() -> tuple[int, int, bool]:
    """This process's rank and the number of processes, where torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return 0, 1, False
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size(), True


def _resume(
    path: Path, model: nn.Module, stepper: Stepper, fresh: dict[str, Any], exact: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the checkpoint says, and the weights it keeps besides those that go on; `exact` for images that are bytes."""
    tensors, meta = _read(path)
    was = json.loads(json.dumps(dataclasses.asdict(Config(**meta["config"]))))
    changed = [k for k, v in fresh["config"].items() if was[k] != v and k not in ("epochs", "device", "data_root")]
    if changed:
        told = ", ".join(f"{k} (was {was[k]!r}, now {fresh['config'][k]!r})" for k in changed)
        raise ValueError(f"{path} was trained with other settings: {told}; resume with those, or start a new run")
    for what, now in (("data", fresh["data"]), ("classes", list(fresh["classes"]))):
        if meta[what] != now:
            raise ValueError(f"{path} was trained with {what} {meta[what]}, now it is {now}; resume with the same data")
    same = alike(meta, fresh["mean"], fresh["std"], exact) and meta["shape"] == fresh["shape"]
    if not same or meta.get("images", fresh["images"]) != fresh["images"]:
        raise ValueError(
            f"{path} was trained on images of shape {tuple(meta['shape'])} with mean {meta['mean']:.6g}, now they are of shape "
            f"{tuple(fresh['shape'])}, {fresh['images']} of them with mean {fresh['mean']:.6g}; resume with the same data, or "
            "start a new run"
        )
    if fresh["config"]["schedule"] != "constant" and fresh["config"]["epochs"] != meta["config"]["epochs"]:
        raise ValueError(
            f"{path} follows a learning rate that falls over {meta['config']['epochs']} epochs, not over "
            f"{fresh['config']['epochs']}; resume with --epochs {meta['config']['epochs']}, or start a new run"
        )
    if fresh["config"]["epochs"] < meta["epoch"]:
        raise ValueError(f"{path} has {meta['epoch']} epochs already, more than the {fresh['config']['epochs']} asked for")
    _load_model(path, model, tensors, meta)
    with torch.no_grad():
        for name, p in model.named_parameters():
            for k, v in stepper.optimizer.state[p].items():
                v.copy_(tensors[f"optimizer.{name}.{k}"])
    kept = {k.removeprefix("kept."): v for k, v in tensors.items() if k.startswith("kept.")}
    return {**meta, "config": fresh["config"]}, kept


class _Reporter:
    """The progress bar and the TensorBoard events of a run."""

    def __init__(
        self, folder: Path | None, progress: bool, epochs: int, images: int, done: int, world: int, kind: str = "test"
    ) -> None:
        self.folder, self.progress, self.shown, self.world, self.kind = folder, progress, 0.0, world, kind
        self.total, self.done, self.epochs, self.test = epochs * images, done * images, epochs, ""

    def __enter__(self) -> _Reporter:
        self.bar: Any = None
        self.events: Any = None
        if self.progress:
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, initial=self.done, unit="img", unit_scale=True, dynamic_ncols=True)
        if self.folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # metrics.csv has the same numbers
                pass
            else:
                self.events = SummaryWriter(str(self.folder))
        return self

    def step(self, epoch: int, images: int, losses: Tensor, step: int) -> None:
        if self.bar is not None:
            self.bar.update(images)
            if time.perf_counter() - self.shown > 0.5:  # reading the loss waits for the device
                self.shown = time.perf_counter()
                self.bar.set_postfix_str(f"epoch {epoch}/{self.epochs}, loss {self.world * float(losses[step]):.3f}{self.test}")

    def says(self, epoch: int, words: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(f"epoch {epoch}/{self.epochs}, {words}")

    def epoch(self, row: dict[str, Any]) -> None:
        if "test_error" in row:
            self.test = f", {self.kind} error {row['test_error']:.2f} %"
        if self.bar is not None:
            self.bar.set_postfix_str(f"epoch {row['epoch']}/{self.epochs}, loss {row['train_loss']:.3f}{self.test}")
        if self.events is not None:
            for key, value in row.items():
                if key not in ("epoch", "confusion"):
                    self.events.add_scalar(key, value, row["epoch"])
            self.events.flush()

    def __exit__(self, *_: object) -> None:
        for each in (self.bar, self.events):
            if each is not None:
                each.close()
