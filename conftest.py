"""Examples in docstrings may use torch without importing it; kernels in Triton are read only where it is installed."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore: list[str] = []
if importlib.util.find_spec("triton") is None:
    kernels = Path(__file__).parent / "src/gcnn/kernels"
    collect_ignore = [str(path) for path in kernels.glob("*.py") if "import triton" in path.read_text()]
    collect_ignore += [str(Path(__file__).parent / f"tests/triton_{name}.py") for name in ("laws", "fits")]
elif tuple(int(n) for n in importlib.import_module("triton").__version__.split(".")[:2]) < (3, 6):  # it has no such Gluon
    collect_ignore += [str(Path(__file__).parent / name) for name in ("src/gcnn/kernels/pointwise.py", "tests/triton_fits.py")]


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
