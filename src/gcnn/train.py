"""The training program: a config, a loop that reads from top to bottom, checkpoints that survive anything (paper, section 8).

A run is a folder: config.json, metrics.csv, TensorBoard events, and the checkpoint of `gcnn.runs`, which is replaced in one move
after every epoch. Randomness is seeded by (seed, epoch), so that on a CPU a run that was stopped and resumed ends with the same
bits as one that was not. Needs pip install "gcnn[train]".
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gcnn.config import Config
from gcnn.data import Dataset, extent, load
from gcnn.files import sweep, write_file
from gcnn.groups import Group
from gcnn.models import EXAMPLES
from gcnn.models.cnn import ToHexagonal
from gcnn.nn import GBatchNorm
from gcnn.runs import (
    Normalised,
    Run,
    alike,
    as_run,
    check_group,
    error_by_angle,
    evaluate,
    group_of,
    load_model,
    load_run,
    make_model,
    mean_and_std,
    measured,
    multiplications,
    names_the_root,
    note_on_exactness,
    pick_device,
    precision,
    read_checkpoint,
    read_config,
    reestimate_norms,
    save_run,
)
from gcnn.steps import Inputs, Stepper, batches

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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


def train(
    config: Config, out: str | Path | None = None, resume: bool = False, progress: bool = True, data: Dataset | None = None
) -> Run:
    """Trains a network and returns it. With `out`, writes the run there after every epoch; `resume` goes on from there.

    Started by torchrun, trains with DistributedDataParallel: the batch is divided among the processes, the first one writes.
    """
    if not isinstance(config, Config) or not isinstance(data, Dataset | None):
        raise TypeError(
            f"train: expected a Config, and as data a gcnn.data.Dataset, got {type(config).__name__} and {type(data).__name__}"
        )
    folder = Path(out) if out is not None else None
    if folder is not None and folder.is_file():
        raise FileExistsError(f"{folder} is a file; a run is written to a folder, choose another one with --out")
    rank, world, distributed = _join(config.device)
    with _alone(folder) if folder is not None and rank == 0 else nullcontext(False) as alone:
        return _train(config, folder, alone, resume, progress, data, rank, world, distributed)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Holds a folder for this process, where the system has such locks; they end with the process, however that ends.

    Gives whether it has.
    """
    if fcntl is None:
        yield False
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    held, locked = _hold(folder)
    try:
        yield locked
    finally:
        with suppress(OSError):  # what was made for a run that did not begin is empty
            for path in new:
                path.rmdir()
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # a process that was forked meanwhile holds it too
        os.close(held)


def _hold(folder: Path) -> tuple[int, bool]:
    """Makes a folder, and locks it, which the second says: the first is to be closed."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another run made it, or what it is in, failed, and took it away
            if not Path.cwd().exists():  # this one would never be there
                raise
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise FileExistsError(f"{folder} is being written by another run; wait for it, or choose another --out") from None
        except OSError:  # some file systems of networks have no locks
            return held, False
        if folder.exists() and os.path.samestat(os.fstat(held), folder.stat()):
            return held, True
        os.close(held)  # it is the lock of a folder that is gone


def _train(
    config: Config,
    folder: Path | None,
    alone: bool,
    resume: bool,
    progress: bool,
    data: Dataset | None,
    rank: int,
    world: int,
    distributed: bool,
) -> Run:
    if folder is not None and not resume and rank == 0:
        _check_free(folder)
    if folder is not None and alone:
        sweep(folder, "last.safetensors", "config.json", "metrics.csv")
    device = pick_device(config.device)
    if data is None:
        with names_the_root() if resume else nullcontext():
            data = load(config.data, config.data_root or None, config.size)
    name, kind, shown = data.name, "validation" if config.validation else "test", progress and rank == 0
    if shown and data.for_validation and data.for_validation != config.validation:
        print(
            f"note: {data.for_validation} training images are those of val; hold out just those with --validation "
            f"{data.for_validation}",
            file=sys.stderr,
        )
    if config.validation:
        data = data.hold_out(config.validation)
        _check_held_out(data)
    if shown and config.data in ("pictures", "volumes"):
        print(_counts(data, kind), file=sys.stderr)
    if len(data.train) < 2:
        raise ValueError(f"{data.name}: {len(data.train)} training images are too few")
    _check_parts(data)
    _check_shift(data, config.shift)
    example = EXAMPLES.get(config.model)
    if example is not None and data.train.images.ndim != len(example) + 1:
        kinds = ("images", "volumes") if data.train.images.ndim == 4 else ("volumes", "images")
        raise ValueError(f"{config.model} takes {kinds[1]}, {data.name} are {kinds[0]}; choose another --data or --model")
    mean, std = mean_and_std(data.train.images)
    labels = torch.cat([data.train.labels, data.test.labels]) if config.validation else data.train.labels
    meta: dict[str, Any] = {
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "classes": data.classes,
        "shape": list(data.train.images.shape[1:]),
        "mean": mean,
        "std": std or 1.0,
        "images": len(data.train),
        "of_bytes": not data.train.images.is_floating_point() and extent(data.train.images)[1] > 1,
        "labels": hashlib.sha256(labels.cpu().long().numpy().tobytes()).hexdigest(),
        "history": [],
        "epoch": 0,
        "data": name,
    }
    model = make_model(config, len(data.classes), meta["shape"])
    cost = _check_takes(model, meta["shape"], config)
    if config.init and not resume:
        told = _begin_with(model, config.init, data.classes)
        if shown:
            print(told, file=sys.stderr)
    if world == 1 and (config.batch_size == 1 or len(data.train) % config.batch_size == 1):
        _check_takes_one(model, meta["shape"], config)
    group, steps = group_of(model), math.ceil(len(data.train) / config.batch_size)
    if shown:
        print(_summary(model, group, config, len(data.train), steps, cost), file=sys.stderr)
        if any(isinstance(m, ToHexagonal) for m in model.modules()):
            print(f"images are resampled to the hexagonal lattice of {group.name}", file=sys.stderr)
        if note := note_on_exactness(model, meta["shape"], config):
            print(note, file=sys.stderr)
    model = model.to(device)
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
    if folder is not None and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.json", json.dumps(meta["config"], indent=2).encode())

    def test() -> dict[str, Any]:
        with precision(tf32=False), torch.autocast(device.type, torch.bfloat16, enabled=config.amp):
            if config.reestimate != "no":
                reestimate_norms(model, plain, training=config.reestimate == "train")
            found = evaluate(model, testing, config.test_turns, config.balanced)
        return {"test_error": found["error"], "test_loss": found["loss"], "confusion": found["confusion"]}

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
                tested = [r for r in meta["history"] if "test_loss" in r]
                best = min(tested, key=lambda r: r["test_loss"] if math.isfinite(r["test_loss"]) else math.inf, default=row)
                if best is row:
                    meta["kept"], kept = {"epoch": epoch}, _copied(model)
                if epoch == config.epochs:
                    current = _copied(model)
                    model.load_state_dict(kept)
                    meta["kept"], kept = {"epoch": best["epoch"], **test()}, _copied(model)
                    model.load_state_dict(current)
            if folder is not None and rank == 0:
                save_run(folder, model, kept, stepper, meta)
            report.epoch(row)
    if distributed:
        dist.barrier()
    if kept:
        model.load_state_dict(kept)
    return as_run(model, config, meta)


def _check_parts(data: Dataset) -> None:
    """Raises a ValueError where the test would say nothing: no images, or others than those of the training."""
    a, b = data.train.images, data.test.images
    if not len(b):
        raise ValueError(f"{data.name}: the test part is empty; hand some images to it, or hold some out with --validation")
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"{data.name}: training images are {tuple(a.shape[1:])}, those of the test {tuple(b.shape[1:])}; cut them alike"
        )
    (low, high), (least, most) = extent(a), extent(b)
    of_ones = min(low, least) >= 0 and 0 < min(high, most) <= 1 and max(high, most) > 16
    signed, far = (low < -0.1 * high) != (least < -0.1 * most), max(high, most) > 4 * min(high, most)
    if of_ones or (signed and far) or (a.is_floating_point() != b.is_floating_point() and (signed or far)):
        raise ValueError(
            f"{data.name}: training images go from {low:g} to {high:g}, those of the test from {least:g} to {most:g}; scale both "
            "alike"
        )


def _check_shift(data: Dataset, shift: int) -> None:
    """Raises a ValueError for a shift that moves images out of themselves."""
    sides = data.train.images.shape[2:]
    if shift >= min(sides):
        shown = " x ".join(map(str, sides))
        raise ValueError(f"shift moves images of {shown} pixels by up to {shift}; expected less than the shorter side")


def _check_held_out(data: Dataset) -> None:
    """Raises a ValueError where held-out images leave nothing of a class to learn from, or are of one class alone."""
    left, held = ({*split.labels.tolist()} for split in (data.train, data.test))
    count = len(data.test)
    if lost := sorted(held - left):
        raise ValueError(
            f"{data.name}: the last {count} training images are all there are of class {data.classes[lost[0]]}, and none "
            "would be left to learn from; shuffle the data, or hold out fewer"
        )
    if len(held) == 1 < len(left):
        raise ValueError(
            f"{data.name}: the last {count} training images are all of class {data.classes[held.pop()]}, and tell nothing "
            "about the others; shuffle the data, or hold out more"
        )


def _counts(data: Dataset, kind: str) -> str:
    """How many images there are of each class."""
    train, test = (split.labels.bincount(minlength=len(data.classes)).tolist() for split in (data.train, data.test))
    each = (f"{name} {n} + {m}" for name, n, m in zip(data.classes, train, test, strict=True))
    return f"{data.name.partition(',')[0]}, training + {kind}: {', '.join(each)}"


def _summary(model: nn.Module, group: Group, config: Config, images: int, steps: int, cost: int) -> str:
    """What is about to be trained, and a word if an epoch has few steps."""
    weights = sum(p.numel() for p in model.parameters())
    work = f"{cost / 1e6:,.0f} million" if cost >= 5e5 else f"{cost:,}"
    told = f"{config.model} on {group.name}: {weights:,} parameters, {work} multiplications per image"
    if steps >= 10 or min(config.batch_size, images) <= 16:
        return told
    few = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"{told}\nnote: an epoch has {few}, since {images} images go {config.batch_size} at a time; with a smaller "
        "--batch-size, 16 for example, a network learns more in as many epochs"
    )


def _begin_with(model: nn.Module, folder: str, classes: tuple[str, ...]) -> str:
    """Gives a network the weights of another run, but for its last layer if the classes are others; says what it did."""
    path = Path(folder) / "last.safetensors"
    tensors, meta = read_checkpoint(path)
    check_group(path, model, meta)
    part, ours = "kept." if meta.get("kept") else "model.", model.state_dict()
    theirs = {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
    last = list(model.named_parameters())[-1][0].rpartition(".")[0]
    other = tuple(meta["classes"]) != tuple(classes)
    taken = {k: v for k, v in theirs.items() if not (other and k.startswith(f"{last}."))}
    for k, now in ours.items():
        was = theirs.get(k)
        if (was is None or was.shape != now.shape) and (k in taken or k not in theirs):
            there = "missing" if was is None else tuple(was.shape)
            raise ValueError(
                f"{path} does not fit this network: {k} is {there} there, {tuple(now.shape)} here; take the --model, --group, "
                f"--channels and --widths of that run, {meta['config']['model']}, and as many channels of colour"
            )
    model.load_state_dict({**ours, **taken})
    return f"begins with the weights of {folder}" + (f", but for {last}: its classes were others" if other else "")


def _check_free(folder: Path) -> None:
    """Raises a FileExistsError unless a new run can be written to the folder without a loss."""
    if (folder / "last.safetensors").exists():
        raise FileExistsError(f"{folder} holds a run already; go on with it by --resume, or choose another folder with --out")
    settings, table = folder / "config.json", folder / "metrics.csv"
    for path in (settings, table):
        if path.exists() and (path == table or not _holds_settings(path)):
            raise FileExistsError(f"{path} is there already, and is of no run; choose another folder with --out")


def _holds_settings(path: Path) -> bool:
    """Whether a run wrote this config.json: one that was stopped in its first epoch leaves nothing else."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(found, dict) and {f.name for f in dataclasses.fields(Config)} <= found.keys()


def _check_takes(model: nn.Module, shape: Sequence[int], config: Config) -> int:
    """How many multiplications an image of this shape takes; a ValueError unless the network takes it."""
    sides = " x ".join(str(n) for n in shape[1:])
    for m in model.modules():
        if isinstance(m, ToHexagonal):
            try:
                m.check(shape[1], shape[2])
            except ValueError as error:
                raise ValueError(
                    f"{config.model} cannot take images of {sides}: {error}; take smaller ones, or a --model such as resnet18"
                ) from error
    try:
        return multiplications(model, torch.zeros(1, *shape))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{config.model} cannot take images of {sides}: {error}; take larger ones, or another --model"
        ) from error


def _check_takes_one(model: nn.Module, shape: Sequence[int], config: Config) -> None:
    """Raises a ValueError unless the network learns from one image, which is all that the last batch holds."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model).train()(torch.zeros(1, *shape))  # a copy: its statistics are not to move
    except ValueError as error:
        raise ValueError(
            f"{config.model} cannot learn from one image at a time, and the last batch of an epoch holds one: {error}; choose "
            f"another --batch-size than {config.batch_size}"
        ) from error


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _join(device: str) -> tuple[int, int, bool]:
    """This process's rank and the number of processes, where torchrun started several, for work on a device."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return 0, 1, False
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith(("auto", "cuda")) and torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size(), True


def _resume(
    path: Path, model: nn.Module, stepper: Stepper, fresh: dict[str, Any], exact: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the checkpoint says, and the weights it keeps besides those that go on; `exact` for images that are bytes."""
    tensors, meta = read_checkpoint(path)
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
    if meta.get("labels", fresh["labels"]) != fresh["labels"]:  # older checkpoints do not say
        raise ValueError(f"{path} was trained with other labels of these images; resume with the same data, or start a new run")
    if fresh["config"]["schedule"] != "constant" and fresh["config"]["epochs"] != meta["config"]["epochs"]:
        raise ValueError(
            f"{path} follows a learning rate that falls over {meta['config']['epochs']} epochs, not over "
            f"{fresh['config']['epochs']}; resume with --epochs {meta['config']['epochs']}, or start a new run"
        )
    if fresh["config"]["sharp_epochs"] and fresh["config"]["epochs"] != meta["config"]["epochs"]:
        raise ValueError(
            f"{path} has its sharp epochs at the end of {meta['config']['epochs']}, not of {fresh['config']['epochs']}; resume "
            f"with --epochs {meta['config']['epochs']}, or start a new run"
        )
    if fresh["config"]["epochs"] < meta["epoch"]:
        raise ValueError(f"{path} has {meta['epoch']} epochs already, more than the {fresh['config']['epochs']} asked for")
    load_model(path, model, tensors, meta)
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
        self.folder, self.shown, self.world, self.kind = folder, 0.0, world, kind
        self.total, self.done, self.epochs, self.test = epochs * images, done * images, epochs, ""
        # a bar is for people who watch it; a file is to have a line per epoch
        self.draws, self.tells = progress and sys.stderr.isatty(), progress and not sys.stderr.isatty()
        self.images, self.first, self.start = images, done, time.perf_counter()

    def __enter__(self) -> _Reporter:
        self.bar: Any = None
        self.events: Any = None
        if self.draws:
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
        if self.tells:
            from tqdm import tqdm

            epoch, test = row["epoch"], self.test if "test_error" in row else ""
            left = (self.epochs - epoch) * (time.perf_counter() - self.start) / (epoch - self.first)
            print(
                f"epoch {epoch}/{self.epochs}, loss {row['train_loss']:.3f}{test}, {self.images / row['seconds']:,.0f} img/s, "
                f"{tqdm.format_interval(left)} left",
                file=sys.stderr,
                flush=True,
            )
        if self.events is not None:
            for key, value in row.items():
                if key not in ("epoch", "confusion"):
                    self.events.add_scalar(measured(key, self.kind == "validation"), value, row["epoch"])
            self.events.flush()

    def __exit__(self, *_: object) -> None:
        for each in (self.bar, self.events):
            if each is not None:
                each.close()
