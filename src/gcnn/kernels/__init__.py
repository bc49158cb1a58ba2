"""Operations behind `gcnn.functional` and `gcnn.nn` that are worth their own code, one file each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@lru_cache(maxsize=16)
def in_triton(name: str) -> Any:
    """The file of that name with kernels for GPUs; None where Triton is not installed, or does not work."""
    try:
        import_module("triton.language")  # a folder named triton, in which there is none, would pass for the package
    except ImportError:
        return None
    return import_module(f"gcnn.kernels.{name}")


class Setting:
    """A process-wide setting of torch, changed while at least one thread is inside: autograd runs one thread per GPU."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], wanted: Callable[[], Any]) -> None:
        self.read, self.write, self.wanted = read, write, wanted
        self.lock, self.inside, self.before, self.changed = Lock(), 0, None, False

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before, wanted = self.read(), self.wanted()
                self.changed = wanted != self.before  # to write what holds already may change other settings of torch
                if self.changed:
                    self.write(wanted)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.changed and not self.inside:
                self.write(self.before)


def launched_from_python(device: int) -> bool:
    """Whether Python launches each kernel on this GPU: on the default stream, that is, not where CUDA graphs are recorded.

    Small layers then use several of torch's kernels instead of one of ours, which takes Python longer to launch.
    """
    return int(torch._C._cuda_getCurrentRawStream(device)) == 0


def few(x: Tensor, numbers: int) -> bool:
    """Whether Python launches the kernels, and takes longer for one of ours than the GPU does for so many numbers."""
    return numbers <= 1 << 24 and launched_from_python(x.get_device())


def on_its_gpu(run: Callable[P, R]) -> Callable[P, R]:
    """The same function, with the GPU of its first tensor as the current one: that is where Triton launches kernels."""

    @wraps(run)
    def there(*args: P.args, **options: P.kwargs) -> R:
        x: Any = args[0] if isinstance(args[0], Tensor | tuple) else args[1]  # a group may come first
        index = (x[0] if isinstance(x, tuple) else x).get_device()
        if index < 0 or index == torch.cuda.current_device():
            return run(*args, **options)
        with torch.cuda.device(index):
            return run(*args, **options)

    return there
