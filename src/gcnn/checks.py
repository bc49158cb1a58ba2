"""What is asked of arguments, and how errors name shapes. Errors say what was expected, what came and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcnn.groups import Group, Subgroup

Size = int | Sequence[int]

PLANE_NAMES = {
    "c1": "p1",
    "c2": "p2",
    "c3": "p3",
    "c4": "p4",
    "c6": "p6",
    "d1": "pm",
    "d2": "pmm",
    "d3": "p3m1",
    "d4": "p4m",
    "d6": "p6m",
    "c2v": "pmm",
    "c3v": "p3m1",
    "c4v": "p4m",
    "c6v": "p6m",
}
"""Names of point groups that people also use for the plane groups with the same turns and mirrors."""


def check_axes(group: Group, what: str, values: Sequence[int]) -> None:
    """Raises a ValueError unless `values`, one an axis, agree along the axes that the group mixes."""
    for axes in group.axis_classes:
        if len({values[i] for i in axes}) > 1:
            raise ValueError(
                f"{what} (={tuple(values)}) must be equal along axes {axes}, which {group.name} mixes; "
                f"use {tuple(min(values[j] for j in c) for i in range(group.dim) for c in group.axis_classes if i in c)}"
            )


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """The words of an error about a name, with the name that may have been meant.

    >>> unknown("group", "P4M", ["p4", "p4m"])
    "group must be one of p4, p4m, got 'P4M'; did you mean p4m?"
    >>> unknown("group", "d4", ["p4", "p4m"])
    "group must be one of p4, p4m, got 'd4'; did you mean p4m?"
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    close = [name for name in (got.lower(), PLANE_NAMES.get(got.lower())) if name in lower]
    close = close or difflib.get_close_matches(got.lower(), lower, 2)
    near = [lower[name] for name in close] or [name for name in names if name.endswith(f"/{got}")]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{what} must be one of {', '.join(names)}, got {got!r}{meant}"


def check_tensor(who: str, x: Any) -> None:
    """Raises a TypeError for an array of numpy, a list ..."""
    if not isinstance(x, Tensor):
        remedy = "use torch.as_tensor(x)"
        if isinstance(x, torch.fx.Proxy):
            remedy = "torch.fx is to take this layer whole: trace by an fx.Tracer whose is_leaf_module says so"
        raise TypeError(f"{who}: expected a tensor, got {type(x).__name__}; {remedy}")


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, inside what torch.compile, DataParallel and DistributedDataParallel make of it."""
    holders = {"torch.nn.parallel": "module", "torch._dynamo": "_orig_mod"}
    while name := next((name for place, name in holders.items() if type(model).__module__.startswith(place)), ""):
        inner = getattr(model, name, None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def check_reduce(reduce: str) -> None:
    """Raises a ValueError unless `reduce` is a known reduction."""
    if reduce not in ("max", "mean"):
        raise ValueError(f'reduce must be "max" or "mean", got {reduce!r}')


def as_tuple(group: Group, value: Size | None, what: str) -> tuple[int, ...]:
    """One whole number an axis of the group's lattice."""
    if type(value) is tuple and len(value) == group.dim and all(type(v) is int for v in value):
        return value
    values: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,) * group.dim
    values = tuple(int(v) if isinstance(v, np.integer) else v for v in values)
    if len(values) != group.dim or not all(isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{what} must be a whole number or {group.dim} of them for {group.name}, got {value!r}")
    return values


def shape_text(group: Group, channels: int | str, cosets: int | None = -1) -> str:
    """The shape of a map as an error prints it: (N, 16, 8, H, W); `cosets` None for an image."""
    space = (("X",), ("H", "W"), ("D", "H", "W"))[group.dim - 1]
    fibre = () if cosets is None else (group.order if cosets == -1 else cosets,)
    return "(" + ", ".join(str(a) for a in ("N", channels, *fibre, *space)) + ")"


def is_map(group: Group, x: Tensor, stabilizer: Subgroup | None, who: str) -> bool:
    """Whether x lives on the group or its cosets, not on the plane; an error if on neither."""
    if x.ndim == group.dim + 2:
        return False
    cosets = group.order // len(group.check_subgroup(stabilizer))
    if x.ndim != group.dim + 3 or x.shape[2] != cosets:
        raise ValueError(
            f"{who}: expected an image {shape_text(group, 'K', None)} or a map {shape_text(group, 'K', cosets)} on "
            f"{group.name}, got {tuple(x.shape)}; use x.unflatten(1, (-1, {cosets})) for planes, and "
            "stabilizer= for a map over cosets"
        )
    return True
