"""The kernels for GPUs, by Triton's interpreter where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gcnn import kernels, lattice, p6


def test_kernels_agree_with_plain_torch() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).parent / "triton_laws.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert "all kernels agree" in done.stdout, done.stderr


def test_kernels_in_gluon_compile_and_fit() -> None:
    pytest.importorskip("triton", minversion="3.6")
    script = Path(__file__).parent / "triton_fits.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert "all kernels fit" in done.stdout, done.stderr


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnSecond:
        def get_device(self) -> int:
            return 1

    entered: list[Any] = []

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(kernels, "Tensor", OnSecond)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    run: Any = kernels.on_its_gpu(lambda *args: list(entered))
    assert run("a group", OnSecond()) == [1]
    assert run((OnSecond(), OnSecond()), 3) == [1, 1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert run(OnSecond()) == [1, 1]  # it is the current one: nothing to do


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_a_folder_named_triton_is_not_triton(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    asked = "from gcnn.kernels import fourier, in_triton; print(in_triton('gather'), fourier._triton())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600)
    assert done.stdout == "None None\n", done.stderr


def test_settings_that_are_right_are_left_alone() -> None:
    now, written = ["none"], []

    def write(value: Any) -> None:
        written.append(value)
        now[0] = value

    setting = kernels.Setting(lambda: now[0], write, lambda: wanted)
    for wanted, expected in (("none", []), ("tf32", ["tf32", "none"])):
        with setting, setting:
            assert now[0] == wanted
        assert now[0] == "none"
        assert written == expected


def test_domains_may_go_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Going(dict[Any, Any]):
        def __contains__(self, key: Any) -> bool:  # another thread makes room right after one has looked
            return self.pop(key, None) is not None

    size, like = (5, 5), SimpleNamespace(is_meta=False, is_cuda=True, device=torch.device("cuda", 0))
    kept, captured = Going({(p6, size, like.device): "the domain"}), dict[Any, Any]()
    monkeypatch.setattr(lattice, "_domains", kept)
    monkeypatch.setattr(lattice, "_captured", captured)
    monkeypatch.setattr(lattice, "plain", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    find: Any = lattice.kept_domain
    assert find(p6, size, like) == "the domain"
    kept.clear()
    assert find(p6, size, like) == "the domain"  # the graph reads it
    assert find(p6, (7, 7), like) is None
