"""Operations behind `gcnn.functional` and `gcnn.nn` that are worth their own code, one file each."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def on_its_gpu(run: Callable[P, R]) -> Callable[P, R]:
    """The same function, with the GPU of its first tensor as the current one: that is where Triton launches kernels."""

    @wraps(run)
    def there(*args: P.args, **options: P.kwargs) -> R:
        numbers = (a[0] if isinstance(a, tuple) and a else a for a in args)
        device = next(x.device for x in numbers if isinstance(x, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return run(*args, **options)
        with torch.cuda.device(device):
            return run(*args, **options)

    return there
