"""What `gcnn.export.to_onnx` makes of a plain network: the ONNX model, by torch's exporter, and images of other sizes to try.

Knows nothing of groups: networks come here as plain modules of torch.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, cast

import torch
from torch import Tensor, fx, nn


def in_the_plane(pool: Any) -> nn.Module:
    """A pool over a line, as one over a plane of one row."""
    size, stride, padding, dilation = (
        value[0] if isinstance(value, tuple) else value for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    made = nn.MaxPool2d((1, size), (1, stride), (0, padding), (1, dilation), ceil_mode=pool.ceil_mode)
    return nn.Sequential(nn.Unflatten(2, (1, -1)), made, nn.Flatten(2))


def sides_of(inputs: Sequence[Tensor]) -> list[range]:
    """For each input its axes that are sides of an image: images have as many axes as any of them has."""
    most = max(t.ndim for t in inputs)
    return [range(2, most) if t.ndim == most and max(t.shape[2:], default=1) > 1 else range(0) for t in inputs]


def others(inputs: Sequence[tuple[Tensor, range]]) -> Iterator[list[Tensor]]:
    """Images of other sizes, beside their mirror images: twice as long, a cell less (odd sizes stay odd), a cell longer."""
    for change in (lambda n: 2 * n, lambda n: 2 * n - 1, lambda n: n + 1):
        images = []
        for image, sides in inputs:
            for axis in sides:
                length = change(image.shape[axis])
                image = torch.cat([image, image.flip(axis)], axis).narrow(axis, 0, length)
            images.append(image)
        yield images


def onnx_model(plain: nn.Module, example: tuple[Tensor, ...], any_size: bool) -> Any:
    """The ONNX model of a plain network."""
    kept = ", ".join(sorted({type(m).__name__ for m in plain.modules() if not type(m).__module__.startswith("torch.")}))
    inputs = ["input"] if len(example) == 1 else [f"input_{i}" for i in range(1, len(example) + 1)]
    names: Any = {"input_names": inputs, "output_names": ["output"]}
    version, export = cast(Any, torch.__version__), cast(Any, torch.onnx.export)
    # they tell us that torchvision is not there, and of numbers that are not known
    with warnings.catch_warnings(), _quiet("torch.onnx"), _quiet("torch.fx.experimental.symbolic_shapes"):
        warnings.simplefilter("ignore")
        if version < (2, 7):  # whose exporter by torch.export stumbles over norms
            if kept or any_size:  # torch.jit.trace would keep the way and the sizes of the example, and say nothing
                why = f"torch.fx cannot trace {kept}" if kept else "any_size is known to torch.export alone"
                raise ValueError(f"to_onnx: {why}; use torch 2.7 or later")

            import onnx

            file, axes = io.BytesIO(), {name: {0: "N"} for name in (*inputs, "output")}
            export(plain, example, file, opset_version=18, dynamic_axes=axes, **names)
            return _named(onnx.load_from_string(file.getvalue()))
        batch: Any = ({0: torch.export.Dim("N")},) * len(example)
        if any_size:
            if kept or _asserts(plain):  # a file would go the example's way
                raise ValueError("to_onnx: any_size needs a network that does the same for images of every size")
            auto: Any = torch.export.Dim.AUTO
            batch = tuple(dict.fromkeys((0, *sides), auto) for sides in sides_of(example))
        try:
            with redirect_stderr(io.StringIO()):  # where it prints what it has so far
                program = torch.export.export(plain, example, dynamic_shapes=batch)
        except Exception as error:  # torch's own, of many kinds
            who = kept or ("the network" if _asserts(plain) else "")
            if not who:
                raise
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"to_onnx: {who} branches on numbers, or on how many images there are, which a file cannot ({why}); write the "
                "branches with torch.where, or the parts between them as files of their own"
            ) from error
        written = export(program, dynamo=True, verbose=False, external_data=False, **names)
    assert written is not None
    return _named(written.model_proto)


def _asserts(plain: nn.Module) -> bool:
    """Whether a plain network refuses some sizes, which go another way than the example."""
    parts = (part for part in plain.modules() if isinstance(part, fx.GraphModule))
    return any(node.target is torch._assert for part in parts for node in part.graph.nodes)


def _named(file: Any) -> Any:
    """The ONNX model with other names for those axes of its inputs that have any size, which torch calls s77 or so."""
    theirs: dict[str, str] = {}
    for i, value in enumerate(file.graph.input):
        axes = value.type.tensor_type.shape.dim
        names = ("N", "C", *("X", "HW", "DHW")[len(axes) - 3]) if 3 <= len(axes) <= 5 else ("N",)
        for axis, name in zip(axes, names, strict=False):
            if axis.dim_param:  # an axis that need not be as long as that of the first input has a name of its own
                theirs.setdefault(axis.dim_param, name if name not in theirs.values() else f"{name}_{i + 1}")
    for value in (*file.graph.input, *file.graph.output, *file.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in theirs:
                size.dim_param = theirs[size.dim_param]
    return file


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the warnings of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
