"""The notebooks run from top to bottom, quickly, and are kept without their results."""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["converting_a_resnet", "hexagons_and_volumes", "rotated_digits"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Jupyter itself
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # pytest-xdist has a process for each core
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "save it without its results"
    assert notebook.cells[0].source.startswith("# ")
    start = time.perf_counter()
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.perf_counter() - start < 60  # alone 5 to 15 s
    assert all(output.get("name") != "stderr" for cell in code for output in cell.outputs)
