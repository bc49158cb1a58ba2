"""Runs: the network that a config names, its tests, its checkpoint in a folder, and what it takes to use it.

A checkpoint is last.safetensors, which holds weights, optimiser, history, config and group. `gcnn.train` makes them.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.config import Config
from gcnn.data import Dataset, Split, extent
from gcnn.export import in_eval
from gcnn.files import write_file
from gcnn.groups import GROUPS, Group
from gcnn.lattice import to_hexagonal
from gcnn.models import MODELS, build, options_of
from gcnn.models.cnn import ToHexagonal
from gcnn.models.weights import digest, read
from gcnn.probe import MisfitError, sizes_that_fit, strides_checked
from gcnn.steps import Inputs, Stepper, turned


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Says whether float32 work on cuda may round its inputs to TF32; afterwards it is as before."""
    cudnn, matmul = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda.matmul)
    newer = hasattr(matmul, "fp32_precision")  # torch >= 2.9, where the older setting cannot always be read, nor put back
    parts = ((cudnn.conv, cudnn.rnn, matmul) if newer else (cudnn, matmul)) if torch.cuda.is_available() else ()
    name, value = ("fp32_precision", "tf32" if tf32 else "ieee") if newer else ("allow_tf32", tf32)
    before = [getattr(part, name) for part in parts]
    for part in parts:
        setattr(part, name, value)
    try:
        yield
    finally:
        for part, was in zip(parts, before, strict=True):
            setattr(part, name, was)


@contextmanager
def names_the_root() -> Iterator[None]:
    """Adds to a FileNotFoundError how to name the new place of the data."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; if the files have moved, say where they are with --data-root") from error


def make_model(config: Config, classes: int = 10, shape: Sequence[int] = (1, 28, 28)) -> nn.Module:
    """The network that the config names for images of `shape`, freshly drawn from its seed.

    A converted network with a plane group of a hexagonal lattice begins with `ToHexagonal`: images are of square pixels.
    """
    torch.default_generator.manual_seed(config.seed)  # that of the CPU alone: others are the caller's
    options: dict[str, Any] = {"num_classes": classes, "in_channels": shape[0]}
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
    known = options_of(config.model)
    if config.invariant and "invariant" in known:  # the heads of others are invariant as they are
        options["invariant"] = True
    if config.model == "unet":
        raise ValueError("unet answers for every pixel, and gcnn train for whole images; use build and a loop of your own for it")
    for name in options:
        if name not in known:
            taken = [k for k in ("channels", "widths", "dropout", "downsample", "invariant") if k in known]
            raise ValueError(f"{config.model} takes no {name}; what it takes of those is {', '.join(taken) or 'nothing'}")
    model = build(config.model, **options)
    group = group_of(model)
    if "planar" in MODELS[config.model][1] and group.dim == 2 and not group.fills_box:
        return nn.Sequential(ToHexagonal(halved_size(shape[1:])), model)
    return model


def halved_size(sides: Sequence[int]) -> int:
    """The size of a hexagonal lattice over an image of these sides that converted networks can halve five times.

    >>> halved_size((65, 65))
    129
    """
    least = to_hexagonal(torch.empty(1, 1, *sides)).shape[-1]
    return 64 * math.ceil((least - 1) / 64) + 1  # 65 -> 33 -> 17 -> 9 -> 5 -> 3: odd all the way


def on_lattice(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The part of a network that its group acts on, and what goes into it: pixels do not turn by 60 degrees."""
    first, *rest = model.children()
    return (nn.Sequential(*rest), first(x)) if isinstance(first, ToHexagonal) else (model, x)


def multiplications(model: nn.Module, images: Tensor) -> int:
    """What a network takes for these images in eval mode, by the planar algorithm: counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # which brings Triton along where it is installed

    shapes = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shapes(images.to("meta"))
    return int(counter.get_total_flops()) // 2


def note_on_exactness(model: nn.Module, shape: Sequence[int], config: Config) -> str:
    """A sentence for a network whose strides or head are not exact on images of `shape`; none for others.

    Judged by shapes alone: the answers of a fresh network change little, and how much they will after training nobody knows.
    """
    group, known = group_of(model), options_of(config.model)
    if group.order == 1:
        return ""
    who, turns = f"note: {config.model}", "invariant" in known and not config.invariant  # a head that is not invariant
    sides = " x ".join(str(n) for n in shape[1:])
    try:
        strides, sizes = _misfit(model, shape, group)
        pools: Any = ""
        if strides and "downsample" in known and group.fills_box:
            pools = "stride" if config.downsample == "pool" else "pool"
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                other = make_model(dataclasses.replace(config, downsample=pools), shape=shape)
            pools = "" if _misfit(other, shape, group)[0] else pools
    except Exception as error:  # a note is no reason to stop a training
        return f"{who}: it could not be found out whether it is exact at {sides} ({error}); gcnn check tells, after an epoch"
    if not (strides or turns):
        return ""
    how = "; --size" if config.data == "pictures" else ""
    listed = f" ({', '.join(map(str, sizes))}{how})" if sizes and group.fills_box else ""
    ways = [f"another size{listed}"] * strides + [f"--downsample {pools}"] * bool(pools)
    reasons = ["a stride does not fit the size"] * strides + ["its head is not invariant"] * turns
    helps = [" or ".join(ways)] * strides + ["--invariant"] * turns
    return (
        f"{who} is not exact at {sides}: under {group.name} its answers change, more so after training than before, "
        f"since {' and '.join(reasons)}; what helps is {', and '.join(helps)}"
    )


def _misfit(model: nn.Module, shape: Sequence[int], group: Group) -> tuple[bool, list[int]]:
    """Whether a stride does not fit images of `shape`, and the three sizes nearest to its last side that all strides fit.

    Shapes alone are computed, on the meta device.
    """
    inner, x = on_lattice(model, torch.zeros(1, *shape))
    inner = copy.deepcopy(inner).to("meta").eval()
    with torch.no_grad(), strides_checked(inner, group), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the meta device
        try:
            inner(x.to("meta"))
        except MisfitError:
            pass
        else:
            return False, []
    return True, sizes_that_fit(inner, (x,), group, 3)


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
def reestimate_norms(model: nn.Module, inputs: Inputs, batch_size: int | None = None, training: bool = False) -> None:
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
    parts = math.ceil(count / (batch_size or at_a_time(inputs)))
    try:
        for index in torch.arange(count, device=inputs.labels.device).tensor_split(parts):
            model(inputs(index)[0])
    finally:
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum


def at_a_time(inputs: Inputs) -> int:
    """How many images are tested at a time: a thousand small ones, of larger ones as many as have as many pixels."""
    return max(1, min(1000, 1000 * 32 * 32 // math.prod(inputs.images.shape[2:])))


@torch.no_grad()
def logits_of(model: nn.Module, inputs: Inputs, angle: float = 0.0) -> Tensor:
    """The answers of the model in eval mode, (N, classes), to its inputs turned by `angle` radians."""
    if angle and inputs.images.ndim != 4:
        raise ValueError(f"expected images (N, C, H, W) to turn by angles, got inputs of shape {tuple(inputs.images.shape)}")
    if not len(inputs.labels):
        raise ValueError("expected at least one image to answer to, got none")
    found, batch_size = [], at_a_time(inputs)
    with in_eval(model):
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


def evaluate(model: nn.Module, inputs: Inputs, turns: int = 1, balanced: bool = False) -> dict[str, Any]:
    """Test error in percent, mean loss, and the confusion matrix (true class, answer); `turns` as Config.test_turns.

    `balanced` takes the mean loss of each class first.
    """
    if not len(inputs.labels):
        raise ValueError("evaluate: expected at least one image, got none; the test part of the data may be empty")
    logits = answers_of(model, inputs, turns)
    answers, k = logits.argmax(1), logits.shape[1]
    confusion = torch.bincount(inputs.labels * k + answers, minlength=k * k).reshape(k, k)
    return {
        "error": 100 * float((answers != inputs.labels).double().mean()),
        "loss": _mean_by_class(logits, inputs.labels) if balanced else float(F.cross_entropy(logits, inputs.labels)),
        "confusion": confusion.tolist(),
    }


def _mean_by_class(logits: Tensor, labels: Tensor) -> float:
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    return float(torch.stack([losses[labels == c].mean() for c in labels.unique()]).mean())


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
    of_bytes: bool = True
    """Whether it was trained on bytes, and not on zeros and ones or other numbers."""

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
        images = torch.as_tensor(images)
        if tuple(images.shape[1:]) != tuple(self.shape):
            what = f"({', '.join(['N', *map(str, self.shape)])})"
            raise ValueError(f"expected images {what}, as the network was trained on, got {tuple(images.shape)}")
        if not len(images):
            return torch.zeros(0, len(self.classes))
        if images.is_floating_point() and not images.isfinite().all():
            raise ValueError("expected images as bytes, got NaN or infinite numbers")
        if self.of_bytes and images.is_floating_point() and images.min() >= 0 and 0 < images.max() <= 1:
            raise ValueError(f"expected images as bytes, got {images.dtype} from 0 to 1; use (255 * x).to(torch.uint8)")
        if self.of_bytes and images.dtype not in (torch.uint8, torch.bool):
            low, high = extent(images)
            if low < 0 or high > 255:
                raise ValueError(
                    f"expected images as bytes, got {images.dtype} from {low:g} to {high:g}; scale them as those that "
                    "the network was trained on, and .to(torch.uint8)"
                )
        device = next(self.model.parameters()).device
        unknown = Split(images, torch.zeros(len(images), dtype=torch.int64))
        return answers_of(self.model, self.inputs(unknown, device), self.config.test_turns).softmax(1)

    def check_data(self, data: Dataset) -> None:
        """Raises a ValueError for data that this network does not know."""
        if self.data != data.name:
            if data.name == self.config.data and not self.data.startswith(data.name):  # nobody named other data than its own
                raise ValueError(
                    f"the run was trained on {self.data}, data that was given in Python, where it is to be tested too: "
                    "gcnn.train.evaluate(run.model, run.inputs(data.test, torch.device('cpu'))), with load_run(folder) as run"
                )
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
        if not alike({"mean": self.mean, "std": self.std}, *mean_and_std(images), not images.is_floating_point()):
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


def save_run(folder: Path, model: nn.Module, kept: dict[str, Tensor], stepper: Stepper, meta: dict[str, Any]) -> None:
    """Writes checkpoint and metrics, each in one move."""
    from safetensors.torch import save

    tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    tensors |= {f"kept.{k}": v.cpu().contiguous() for k, v in kept.items()}
    for name, p in model.named_parameters():
        for k, v in stepper.optimizer.state[p].items():
            tensors[f"optimizer.{name}.{k}"] = v.detach().cpu().contiguous()
    write_file(folder / "last.safetensors", save(tensors, {"gcnn": json.dumps({**meta, "sha256": digest(tensors)})}))
    table = io.StringIO()
    rows = [{measured(k, bool(meta["config"]["validation"])): v for k, v in row.items()} for row in meta["history"]]
    columns = sorted({k for row in rows for k in row if k != "confusion"}, key=lambda k: (k != "epoch", k))
    writer = csv.DictWriter(table, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_file(folder / "metrics.csv", table.getvalue().encode())


def measured(key: str, validation: bool) -> str:
    """What a column is called where people read it: a test on held-out images is no test."""
    return key.replace("test_", "validation_") if validation else key


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint and what it says, checked."""
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


def check_group(path: Path, model: nn.Module, meta: dict[str, Any]) -> None:
    """Raises a ValueError unless the network has the group of the checkpoint."""
    group = group_of(model)
    if [group.name, json.loads(json.dumps(group.matrices))] != meta["group"]:
        raise ValueError(f"{path} is a checkpoint of group {meta['group'][0]}, the network is one of {group.name}")


def load_model(path: Path, model: nn.Module, tensors: dict[str, Tensor], meta: dict[str, Any], part: str = "model.") -> None:
    """Loads the weights, of this network and group, or raises a ValueError."""
    check_group(path, model, meta)
    state = {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network {meta['config']['model']}: {error}") from error


def load_run(folder: str | Path, device: str = "cpu") -> Run:
    """The network of a run folder, in eval mode, with its config and history."""
    path = Path(folder) / "last.safetensors"
    tensors, meta = read_checkpoint(path)
    config = Config(**meta["config"])
    with torch.random.fork_rng(devices=[]):  # what it draws is thrown away
        model = make_model(config, len(meta["classes"]), meta["shape"])
    load_model(path, model, tensors, meta, "kept." if meta.get("kept") else "model.")
    return as_run(model.to(pick_device(device)), config, meta)


def read_config(folder: str | Path) -> Config:
    """The settings of the run in a folder."""
    return Config(**read_checkpoint(Path(folder) / "last.safetensors")[1]["config"])


def as_run(model: nn.Module, config: Config, meta: dict[str, Any]) -> Run:
    """The trained network with what its checkpoint says."""
    classes, shape = tuple(meta["classes"]), tuple(meta["shape"])
    of_bytes = meta.get("of_bytes", meta["mean"] + 2 * meta["std"] > 64)  # older checkpoints do not say
    numbers = meta["mean"], meta["std"]
    return Run(model.eval(), config, classes, shape, *numbers, meta["history"], meta["data"], meta.get("kept"), of_bytes)


def mean_and_std(images: Tensor) -> tuple[float, float]:
    """Of all numbers, in float64, some images at a time."""
    parts = images.flatten().split(1 << 24)
    mean = sum(float(part.double().sum()) for part in parts) / images.numel()
    squares = sum(float((part.double() - mean).square().sum()) for part in parts)
    return mean, math.sqrt(squares / max(1, images.numel() - 1))


def alike(run: dict[str, Any], mean: float, std: float, exact: bool) -> bool:
    """Whether images have the mean and the standard deviation of those that a run was trained on."""
    most = (1e-9 if exact else 1e-4) * run["std"]
    return abs(run["mean"] - mean) <= most and abs(run["std"] - (std or 1.0)) <= most
