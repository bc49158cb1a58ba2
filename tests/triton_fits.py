"""Whether the kernels in Gluon compile for Hopper GPUs and fit their shared memory: with Triton, on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gcnn import GROUPS
from gcnn.kernels import fused, pointwise, pointwise_filters

ROOM = 227 << 10  # bytes of shared memory that a program may have


class Hopper:
    """A stand-in for the driver of such a GPU, which is there to compile for, and for nothing else."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def compiled(run: Any) -> Any:
    """The launch of a kernel as its compilation alone, which raises an error where it does not fit."""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(self, *args, grid=grid, warmup=True, **options)
        assert made.metadata.shared <= ROOM, f"{self.__name__} takes {made.metadata.shared} bytes of shared memory"
        return made

    return compile_only


def pointwise_kernels() -> None:
    """Those for 1x1 layers, for every order of a group and kind of coefficients that they are made for."""
    kinds = {}
    for group in GROUPS.values():
        for channels in (32, 128, 1024):
            if pointwise.suits(group, torch.bfloat16, channels, 200):
                found = fused.code(group)
                assert found is not None
                kinds[group.order, len(found[0].first), found[0].degree.count(1), channels] = group
    assert len(kinds) > 8
    for (*_, channels), group in kinds.items():
        one = (1,) * group.dim
        geometry = one, one, (0,) * group.dim, one
        weight = torch.randn(200, channels, group.order)
        planes, grad = (torch.randn(2, group.order * k, *(4,) * group.dim) for k in (channels, 200))
        for dtype in (torch.float32, torch.bfloat16):
            pointwise.correlate(group, planes.to(dtype), weight, *geometry)
            pointwise_filters.weight_gradient(group, planes.to(dtype), grad.to(dtype), weight, *geometry)
        print(group.name, channels, flush=True)


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.run = compiled(JITFunction.run)
    maps: Any = pointwise
    filters: Any = pointwise_filters
    maps.on_hopper = lambda: True
    maps.processors = filters.processors = lambda device: 132
    torch.backends.cudnn.allow_tf32 = True
    pointwise_kernels()
    print("all kernels fit")
