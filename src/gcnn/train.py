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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.data import Dataset, Split, load
from gcnn.files import write_file
from gcnn.groups import GROUPS
from gcnn.models import MODELS, build
from gcnn.nn import GBatchNorm

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
    "write_file",
]


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    model: str = "p4cnn"
    """A name from `gcnn.models.MODELS`: z2cnn, p4cnn, p4cnn-rotpool, digit-resnet; for CIFAR-10 resnet44, resnet26."""
    group: str = ""
    """Another group for the model, by its name: p4m, p6 ... Empty: the model's own."""
    channels: int = 0
    """Another number of channels for z2cnn and its relatives. 0: the model's own."""
    widths: tuple[int, ...] = ()
    """Other widths for digit-resnet, one a stage. Empty: the model's own."""
    data: str = "digits"
    """digits (comes with the package), mnist, rotated_mnist, cifar10."""
    data_root: str = ""
    """The folder with the files of the data set; not needed for digits."""
    validation: int = 0
    """Hold out the last n training images and test on them: for choosing settings without the test set."""
    epochs: int = 20
    """Passes over the training set."""
    batch_size: int = 128
    """Images a step, over all processes together."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Keep the learning rate, or let it fall to zero along a cosine."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    dropout: float = -1.0
    """Another dropout than the model's own. Negative: the model's own."""
    rotate: float = 0.0
    """Augmentation: turn every training image by a random angle of up to this many degrees."""
    shift: float = 0.0
    """Augmentation: move every training image by a random distance of up to this many pixels."""
    reestimate: Literal["eval", "train", "no"] = "eval"
    """Estimate the statistics of batch norms anew over the training set before each test: with the rest of the network as in
    the test, or as in training (with dropout), as the paper's authors did."""
    test_every: int = 1
    """Test after every n-th epoch, and after the last."""
    test_turns: int = 1
    """Test with the mean answer to each image turned by 0, 1, ... n - 1 n-ths of a quarter turn."""
    seed: int = 0
    """Everything random follows from it."""
    device: str = "auto"
    """auto (cuda, mps or cpu), or a device of torch."""
    amp: bool = False
    """Automatic mixed precision, bfloat16."""
    tf32: bool = True
    """On cuda, let the convolutions of training round float32 inputs to TF32, as torch does. Tests never do."""
    compile: bool = False
    """torch.compile the network."""
    graphs: bool = True
    """On cuda, replay each step as one CUDA graph."""
    sync_norm: bool = False
    """With several processes, share the statistics of batch norms among them."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value, kind = getattr(self, setting.name), type(setting.default)
            fits = isinstance(value, int | float) if kind is float else isinstance(value, list | tuple if kind is tuple else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{setting.name} must be of type {kind.__name__}, got {value!r}")
        object.__setattr__(self, "widths", tuple(self.widths))
        positive = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr, "test_every": self.test_every}
        positive["test_turns"] = self.test_turns
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if self.group and self.group not in GROUPS:
            raise ValueError(f"group must be one of {', '.join(GROUPS)}, got {self.group!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.dropout >= 1:
            raise ValueError(f"dropout must be below 1, got {self.dropout}")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule must be constant or cosine, got {self.schedule!r}")
        if self.reestimate not in ("eval", "train", "no"):
            raise ValueError(f"reestimate must be eval, train or no, got {self.reestimate!r}")


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
    builder, defaults = MODELS[config.model]
    known = set(inspect.signature(builder).parameters)
    if "planar" in defaults:  # a converted network takes the options of the ordinary one
        known |= set(inspect.signature(defaults["planar"]).parameters)
    if config.model == "unet":
        raise ValueError("unet answers for every pixel, and gcnn train for whole images; use build and a loop of your own for it")
    for name in options:
        if name not in known:
            taken = [k for k in ("channels", "widths", "dropout") if k in known]
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


# --- one step ------------------------------------------------------------------------------------------------------------


class Inputs:
    """Images on the device as bytes, handed out normalised, and augmented in training."""

    def __init__(self, split: Split, mean: float, std: float, device: torch.device, config: Config | None = None) -> None:
        self.images, self.labels = split.images.to(device), split.labels.to(device)
        self.mean, self.std = mean, std
        self.rotate, self.shift = (config.rotate, config.shift) if config else (0.0, 0.0)

    def __call__(self, index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.images[index].float()
        if self.rotate or self.shift:
            x = self._augment(x)
        return (x - self.mean) / self.std, self.labels[index]

    def _augment(self, x: Tensor) -> Tensor:
        angle = (torch.rand(len(x), device=x.device) * 2 - 1) * math.radians(self.rotate)
        move = (torch.rand(len(x), 2, device=x.device) * 2 - 1) * (2 * self.shift / x.shape[-1])
        return turned(x, angle, move)


def turned(x: Tensor, angle: Tensor, move: Tensor | None = None) -> Tensor:
    """Images turned anticlockwise by an angle each, in radians, and moved, by bicubic interpolation."""
    cos, sin = angle.cos(), angle.sin()
    move = torch.zeros(len(x), 2, device=x.device) if move is None else move
    # affine_grid counts columns, then rows, rows downward
    theta = torch.stack([torch.stack([cos, -sin, move[:, 0]], 1), torch.stack([sin, cos, move[:, 1]], 1)], 1)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bicubic", padding_mode="zeros", align_corners=False)


class Stepper:
    """One step of training on the images with the given indices; on cuda the whole step is one graph."""

    def __init__(self, model: nn.Module, inputs: Inputs, config: Config, device: torch.device, world: int) -> None:
        self.inputs, self.config, self.device, self.world = inputs, config, device, world
        self.plain = model
        self.model: Any = torch.compile(model) if config.compile else model
        cuda = device.type == "cuda"
        self.lr = torch.tensor(config.lr, device=device) if cuda else config.lr
        self.optimizer = torch.optim.AdamW(
            model.parameters(), self.lr, weight_decay=config.weight_decay, capturable=cuda, fused=cuda
        )
        self._prime()
        self.loss, self.wrong = torch.zeros((), device=device), torch.zeros((), device=device)
        self.graph: Any = None
        if cuda and config.graphs and world == 1 and len(inputs.labels) >= config.batch_size:
            self._capture(config.batch_size)

    def _prime(self) -> None:
        """Makes the optimiser's state exist, all zero, so that it can be saved, loaded and captured from the start."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
                steps = torch.zeros((), device=p.device if group["capturable"] or group["fused"] else "cpu")
                self.optimizer.state[p] = {"step": steps, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate, in place where a graph reads it."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr

    def _work(self, index: Tensor, share: float) -> None:
        x, y = self.inputs(index)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp):
            logits = self.model(x)
            losses = F.cross_entropy(logits, y, label_smoothing=self.config.label_smoothing, reduction="none")
        loss = losses.sum() * share
        self.optimizer.zero_grad()
        (loss * self.world).backward()  # DistributedDataParallel takes the mean over processes
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        self.wrong.copy_((logits.detach().argmax(1) != y).sum())

    def _capture(self, size: int) -> None:
        """Records the step once; what the rehearsals changed is put back."""
        self.index = torch.arange(size, device=self.device)
        tensors = [*self.plain.parameters(), *self.plain.buffers(), *self._state()]
        before = [t.detach().clone() for t in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._work(self.index, 1 / size)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._work(self.index, 1 / size)
        with torch.no_grad():
            for t, b in zip(tensors, before, strict=True):
                t.copy_(b)

    def _state(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            yield from state.values()

    def __call__(self, index: Tensor, total: int) -> None:
        """A step on `index`, this process's part of `total` images."""
        if self.graph is not None and len(index) == len(self.index):
            self.index.copy_(index)
            self.graph.replay()
        else:
            self._work(index, 1 / total)


def batches(count: int, size: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, int]]:
    """This process's part of each batch of a shuffled epoch, and the size of the whole batch: every image comes once."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for start in range(0, count, size):
        batch = order[start : start + size]
        yield batch[rank::world], len(batch)


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


def error_by_angle(model: nn.Module, inputs: Inputs, steps: int = 24) -> list[tuple[float, float]]:
    """(degrees, error in percent) of the test images turned by each of `steps` angles of a full turn."""
    found = []
    for i in range(steps):
        logits = logits_of(model, inputs, angle=2 * math.pi * i / steps)
        found.append((360 * i / steps, 100 * float((logits.argmax(1) != inputs.labels).double().mean())))
    return found


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

    def inputs(self, split: Split, device: torch.device) -> Inputs:
        """The split, as this network was trained to see it."""
        return Inputs(split, self.mean, self.std, device)

    def predict(self, images: Tensor) -> Tensor:
        """Probabilities (N, classes) of images as bytes (N, channels, rows, columns), answered as in the test."""
        device = next(self.model.parameters()).device
        unknown = Split(images, torch.zeros(len(images), dtype=torch.int64))
        return answers_of(self.model, self.inputs(unknown, device), self.config.test_turns).softmax(1)


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


def _save(folder: Path, model: nn.Module, stepper: Stepper, meta: dict[str, Any]) -> None:
    from safetensors.torch import save

    tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        for k, v in stepper.optimizer.state[p].items():
            tensors[f"optimizer.{name}.{k}"] = v.detach().cpu().contiguous()
    write_file(folder / "last.safetensors", save(tensors, {"gcnn": json.dumps(meta)}))
    table = io.StringIO()
    columns = sorted({k for row in meta["history"] for k in row if k != "confusion"}, key=lambda k: (k != "epoch", k))
    writer = csv.DictWriter(table, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(meta["history"])
    write_file(folder / "metrics.csv", table.getvalue().encode())


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError('checkpoints are safetensors files: pip install "gcnn[train]"') from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {path.parent} holds no checkpoint; train with --out {path.parent} first")
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {})["gcnn"])
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, meta
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint of gcnn, or is truncated or damaged ({error})") from error


def _load_model(path: Path, model: nn.Module, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    group = group_of(model)
    if [group.name, json.loads(json.dumps(group.matrices))] != meta["group"]:
        raise ValueError(f"{path} is a checkpoint of group {meta['group'][0]}, the network is one of {group.name}")
    state = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network {meta['config']['model']}: {error}") from error


def load_run(folder: str | Path, device: str = "cpu") -> Run:
    """The network of a run folder, in eval mode, with its config and history."""
    path = Path(folder) / "last.safetensors"
    tensors, meta = _read(path)
    config = Config(**meta["config"])
    model = make_model(config, len(meta["classes"]), meta["shape"][0])
    _load_model(path, model, tensors, meta)
    return _run(model.to(pick_device(device)), config, meta)


def read_config(folder: str | Path) -> Config:
    """The settings of the run in a folder."""
    return Config(**_read(Path(folder) / "last.safetensors")[1]["config"])


def _run(model: nn.Module, config: Config, meta: dict[str, Any]) -> Run:
    classes, shape = tuple(meta["classes"]), tuple(meta["shape"])
    return Run(model.eval(), config, classes, shape, meta["mean"], meta["std"], meta["history"], meta["data"])


# --- training ------------------------------------------------------------------------------------------------------------


def train(
    config: Config, out: str | Path | None = None, resume: bool = False, progress: bool = True, data: Dataset | None = None
) -> Run:
    """Trains a network and returns it. With `out`, writes the run there after every epoch; `resume` goes on from there.

    Started by torchrun, trains with DistributedDataParallel: the batch is divided among the processes, the first one writes.
    """
    folder = Path(out) if out is not None else None
    rank, world, distributed = _join()
    device = pick_device(config.device)
    data = load(config.data, config.data_root or None) if data is None else data
    name = data.name
    data = data.hold_out(config.validation) if config.validation else data
    if len(data.train) < 2:
        raise ValueError(f"{data.name}: {len(data.train)} training images are too few")
    pixels = data.train.images.double()
    meta: dict[str, Any] = {
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "classes": data.classes,
        "shape": list(data.train.images.shape[1:]),
        "mean": float(pixels.mean()),
        "std": float(pixels.std()) or 1.0,
        "history": [],
        "epoch": 0,
        "data": name,
    }
    model = make_model(config, len(data.classes), meta["shape"][0]).to(device)
    group = group_of(model)
    meta["group"] = [group.name, group.matrices]
    for norm in model.modules():
        if isinstance(norm, GBatchNorm):
            norm.sync = config.sync_norm and world > 1
    training = Inputs(data.train, meta["mean"], meta["std"], device, config)
    plain = Inputs(data.train, meta["mean"], meta["std"], device)
    testing = Inputs(data.test, meta["mean"], meta["std"], device)
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    with precision(config.tf32):
        stepper = Stepper(wrapped, training, config, device, world)
    if folder is not None and resume:
        meta = _resume(folder / "last.safetensors", model, stepper, meta)
    elif folder is not None and (folder / "last.safetensors").exists() and rank == 0:
        raise FileExistsError(f"{folder} holds a run already; go on with it by --resume, or choose another folder with --out")
    if folder is not None and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.json", json.dumps(meta["config"], indent=2).encode())
    steps = math.ceil(len(data.train) / config.batch_size)
    with _Reporter(
        folder if rank == 0 else None, progress and rank == 0, config.epochs, len(data.train), meta["epoch"], world
    ) as report:
        for epoch in range(meta["epoch"] + 1, config.epochs + 1):
            torch.manual_seed(config.seed * 1_000_003 + epoch)
            model.train()
            losses, sizes = torch.zeros(steps, device=device), torch.zeros(steps, device=device)
            wrong = torch.zeros((), device=device)
            start = time.perf_counter()
            order = batches(len(data.train), config.batch_size, config.seed * 1_000_003 + epoch, rank, world)
            for step, (index, total) in enumerate(order):
                if config.schedule == "cosine":
                    done = ((epoch - 1) * steps + step) / (config.epochs * steps)
                    stepper.set_lr(config.lr * 0.5 * (1 + math.cos(math.pi * done)))
                with precision(config.tf32):
                    stepper(index.to(device, non_blocking=True), total)
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
                with precision(tf32=False):
                    if config.reestimate != "no":
                        reestimate_norms(model, plain, training=config.reestimate == "train")
                    found = evaluate(model, testing, config.test_turns)
                row |= {"test_error": found["error"], "test_loss": found["loss"], "confusion": found["confusion"]}
            meta["epoch"] = epoch
            meta["history"] = [*meta["history"], row]
            if folder is not None and rank == 0:
                _save(folder, model, stepper, meta)
            report.epoch(row)
    if distributed:
        dist.barrier()
    return _run(model, config, meta)


def _join() -> tuple[int, int, bool]:
    """This process's rank and the number of processes, where torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return 0, 1, False
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size(), True


def _resume(path: Path, model: nn.Module, stepper: Stepper, fresh: dict[str, Any]) -> dict[str, Any]:
    tensors, meta = _read(path)
    changed = [k for k, v in fresh["config"].items() if meta["config"].get(k) != v and k not in ("epochs", "device")]
    if changed:
        told = ", ".join(f"{k} (was {meta['config'].get(k)!r}, now {fresh['config'][k]!r})" for k in changed)
        raise ValueError(f"{path} was trained with other settings: {told}; resume with those, or start a new run")
    for what, now in (("data", fresh["data"]), ("classes", list(fresh["classes"]))):
        if meta[what] != now:
            raise ValueError(f"{path} was trained with {what} {meta[what]}, now it is {now}; resume with the same data")
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
    return {**meta, "config": fresh["config"]}


class _Reporter:
    """The progress bar and the TensorBoard events of a run."""

    def __init__(self, folder: Path | None, progress: bool, epochs: int, images: int, done: int, world: int) -> None:
        self.folder, self.progress, self.shown, self.world = folder, progress, 0.0, world
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

    def epoch(self, row: dict[str, Any]) -> None:
        if "test_error" in row:
            self.test = f", test error {row['test_error']:.2f} %"
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
