"""Examples in docstrings may use torch without importing it; kernels in Triton are read only where it is installed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    kernels = Path(__file__).parent / "src/gcnn/kernels"
    collect_ignore = [str(path) for path in kernels.glob("*.py") if "import triton" in path.read_text()]
    collect_ignore += [str(Path(__file__).parent / f"tests/triton_{name}.py") for name in ("laws", "fits")]


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
