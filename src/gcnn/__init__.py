"""Group equivariant convolution for PyTorch: groups here, layers in `gcnn.nn`, functions in `gcnn.functional`."""

from typing import TYPE_CHECKING

from gcnn import functional as functional
from gcnn import lattice as lattice
from gcnn import nn as nn
from gcnn import plot as plot
from gcnn import testing as testing
from gcnn.convert import convert
from gcnn.groups import (
    C1,
    C2,
    C3,
    C4,
    C6,
    D2,
    D3,
    D4,
    D6,
    GROUPS,
    S4,
    S6,
    C2h,
    C2v,
    C3h,
    C3v,
    C4h,
    C4v,
    C6h,
    C6v,
    Ci,
    Cs,
    D2d,
    D2h,
    D3d,
    D3h,
    D4h,
    D6h,
    Group,
    O,
    Oh,
    T,
    Td,
    Th,
    cm,
    cmm,
    generate,
    line,
    linem,
    p1,
    p2,
    p3,
    p3m1,
    p4,
    p4m,
    p6,
    p6m,
    p31m,
    pm,
    pmm,
)

__version__ = "0.1.0"

__all__ = [
    "C1",
    "C2",
    "C3",
    "C4",
    "C6",
    "D2",
    "D3",
    "D4",
    "D6",
    "GROUPS",
    "S4",
    "S6",
    "C2h",
    "C2v",
    "C3h",
    "C3v",
    "C4h",
    "C4v",
    "C6h",
    "C6v",
    "Ci",
    "Cs",
    "D2d",
    "D2h",
    "D3d",
    "D3h",
    "D4h",
    "D6h",
    "Group",
    "O",
    "Oh",
    "T",
    "Td",
    "Th",
    "cm",
    "cmm",
    "convert",
    "generate",
    "line",
    "linem",
    "p1",
    "p2",
    "p3",
    "p3m1",
    "p4",
    "p4m",
    "p6",
    "p6m",
    "p31m",
    "pm",
    "pmm",
]

if not TYPE_CHECKING:
    # imported when they are first asked for: `import gcnn` takes no longer for them
    _LATER = ("data", "export", "models", "train")

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'gcnn' has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"gcnn.{name}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
