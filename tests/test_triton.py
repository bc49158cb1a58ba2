"""The kernels for GPUs, by Triton's interpreter where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gcnn import kernels


def test_kernels_agree_with_plain_torch() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).parent / "triton_laws.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert "all kernels agree" in done.stdout, done.stderr


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnSecond:
        device = torch.device("cuda", 1)

    entered: list[Any] = []

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(kernels, "Tensor", OnSecond)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    run: Any = kernels.on_its_gpu(lambda *args: list(entered))
    assert run("a group", OnSecond()) == [OnSecond.device]
    assert run((OnSecond(), OnSecond()), 3) == [OnSecond.device] * 2
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert run(OnSecond()) == [OnSecond.device] * 2  # it is the current one: nothing to do
