"""The kernels for GPUs, by Triton's interpreter where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_agree_with_plain_torch() -> None:
    script = Path(__file__).parent / "triton_laws.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert "all kernels agree" in done.stdout, done.stderr
