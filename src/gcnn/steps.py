"""One step of training: images that live on the device and are augmented there, the optimiser, and on cuda one graph a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.config import Config
from gcnn.data import Split


class Inputs:
    """Images on the device as bytes, handed out normalised, and augmented in training."""

    def __init__(self, split: Split, mean: float, std: float, device: torch.device, config: Config | None = None) -> None:
        images = split.images
        if images.dtype in (torch.uint16, torch.uint32, torch.uint64):  # which torch 2.4 cannot index
            images = images.to(torch.int32 if images.dtype == torch.uint16 else torch.int64)
        self.images, self.labels = images.to(device), split.labels.to(device, torch.int64)
        self.mean, self.std = mean, std
        self.rotate, self.shift, self.flip = (config.rotate, config.shift, config.flip) if config else (0.0, 0, False)
        self.reflect = config is not None and config.data == "pictures"  # their ground is seldom black
        if (self.rotate or self.shift or self.flip) and self.images.ndim != 4:
            raise ValueError(f"rotate, shift and flip are for images, not for inputs of shape {tuple(self.images.shape[1:])}")

    def __call__(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the images with these numbers."""
        x = self.images[index]
        if self.shift or self.flip:
            x = moved(x, self.shift, self.flip, self.reflect)
        x = x.float()
        if self.rotate:
            x = turned(x, (torch.rand(len(x), device=x.device) * 2 - 1) * math.radians(self.rotate), self.reflect)
        return (x - self.mean) / self.std, self.labels[index]


def moved(x: Tensor, shift: int, flip: bool, reflect: bool = False) -> Tensor:
    """Images (N, C, H, W), each moved by up to `shift` whole pixels along both axes; half of them mirrored, with `flip`.

    Outside they are zero, or reflected.
    """
    n, channels, height, width = x.shape
    x = x if reflect else F.pad(x, (shift,) * 4)
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device).expand(n, -1)
    if flip:
        columns = torch.where(torch.rand(n, 1, device=x.device) < 0.5, columns, width - 1 - columns)  # (N, W)
    by = torch.randint(2 * shift + 1, (2, n, 1), device=x.device)
    rows, columns = rows + by[0], columns + by[1]
    if reflect:  # about the outermost pixels
        rows, columns = ((m - 1) - ((m - 1) - (i - shift).abs()).abs() for i, m in ((rows, height), (columns, width)))
    each, channel = torch.arange(n, device=x.device), torch.arange(channels, device=x.device)
    return x[each[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def turned(x: Tensor, angle: Tensor, reflect: bool = False) -> Tensor:
    """Images turned anticlockwise by an angle each, in radians, by bicubic interpolation; zero outside, or reflected."""
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    shape = x.shape[-2] / x.shape[-1]
    # affine_grid counts columns, then rows, rows downward, and either from -1 to 1
    theta = torch.stack([torch.stack([cos, -sin * shape, zero], 1), torch.stack([sin / shape, cos, zero], 1)], 1)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    outside = "reflection" if reflect else "zeros"
    return F.grid_sample(x, grid, mode="bicubic", padding_mode=outside, align_corners=False)


class Stepper:
    """One step of training on the images with the given indices; on cuda the whole step is one graph."""

    def __init__(self, model: nn.Module, inputs: Inputs, config: Config, device: torch.device, world: int) -> None:
        self.inputs, self.config, self.device, self.world = inputs, config, device, world
        self.plain = model
        self.model: Any = torch.compile(model) if config.compile else model
        cuda = device.type == "cuda"
        self.lr = torch.tensor(config.lr, device=device) if cuda else config.lr
        self.optimizer: torch.optim.Optimizer
        decay = config.weight_decay
        if config.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(model.parameters(), self.lr, momentum=0.9, weight_decay=decay, fused=cuda)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), self.lr, weight_decay=decay, capturable=cuda, fused=cuda)
        self._prime()
        self.loss, self.wrong = torch.zeros((), device=device), torch.zeros((), device=device)
        self.graph: Any = None
        self.captures = cuda and config.graphs and world == 1 and len(inputs.labels) >= config.batch_size
        self.uphill = False
        counts = inputs.labels.bincount().clamp(min=1)
        self.weights = len(inputs.labels) / (len(inputs.labels.unique()) * counts) if config.balanced else None

    def _prime(self) -> None:
        """Makes the optimiser's state exist, all zero, so that it can be saved, loaded and captured from the start."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
                if self.config.optimizer == "sgd":
                    self.optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                    continue
                steps = torch.zeros((), device=p.device if group["fused"] else "cpu")
                self.optimizer.state[p] = {"step": steps, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def begin(self, epoch: int) -> None:
        """Makes ready for the steps of an epoch, counted from 1."""
        first = self.config.epochs - self.config.sharp_epochs if self.config.sharp_epochs else 0
        uphill = self.config.sharpness > 0 and epoch > first
        if self.captures and (self.graph is None or uphill != self.uphill):
            self.uphill, self.graph = uphill, None
            self._capture(self.config.batch_size)
        self.uphill = uphill

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate, in place where a graph reads it."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr

    def _work(self, index: Tensor, share: float) -> None:
        x, y = self.inputs(index)
        loss, wrong = self._gradients(x, y, share)
        if self.uphill:
            with self._moved_uphill():
                self._gradients(x, y, share)
        self.optimizer.step()
        self.loss.copy_(loss)
        self.wrong.copy_(wrong)

    def _gradients(self, x: Tensor, y: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Leaves gradients in the parameters; returns the loss, and how many answers were wrong."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp):
            logits = self.model(x)
            losses = F.cross_entropy(logits, y, label_smoothing=self.config.label_smoothing, reduction="none")
        losses = losses if self.weights is None else losses * self.weights[y]
        loss = losses.sum() * share
        self.optimizer.zero_grad()
        (loss * self.world).backward()  # DistributedDataParallel takes the mean over processes
        return loss.detach(), (logits.detach().argmax(1) != y).sum()

    @contextmanager
    def _moved_uphill(self) -> Iterator[None]:
        """With the weights moved along their gradient by Config.sharpness; the statistics of batch norms stay as they are."""
        each: Any = torch  # its functions of whole lists, which have no types
        weights = [p for p in self.plain.parameters() if p.grad is not None]
        norms = [m for m in self.plain.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [m.momentum for m in norms]
        with torch.no_grad():
            before = [p.clone() for p in weights]
            grads = [p.grad for p in weights]
            length = torch.linalg.vector_norm(torch.stack(each._foreach_norm(grads)))
            each._foreach_add_(weights, each._foreach_mul(grads, self.config.sharpness / (length + 1e-12)))
        for m in norms:
            m.momentum = 0.0
        try:
            yield
        finally:
            for m, momentum in zip(norms, momenta, strict=True):
                m.momentum = momentum
            with torch.no_grad():
                each._foreach_copy_(weights, before)

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


def batches(count: int, size: int, seed: int, device: Any = "cpu", rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, int]]:
    """This process's part of each batch of a shuffled epoch, and the size of the whole batch: every image comes once."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(device)
    for start in range(0, count, size):
        batch = order[start : start + size]
        yield batch[rank::world], len(batch)
