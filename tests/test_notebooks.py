"""The notebooks run from top to bottom, quickly, and are kept without their results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """The hook that runs the notebooks for the site, so that they run once for both."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["converting_a_resnet", "hexagons_and_volumes", "rotated_digits"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_kept_without_results(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "save it without its results"
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Jupyter itself
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path: Path, docs: ModuleType) -> None:
    notebook = docs.executed(path)
    assert notebook.metadata["seconds"] < 60  # alone 5 to 15 s
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.get("name") != "stderr" for cell in code for output in cell.outputs)
    assert any(docs.results(cell)[0] for cell in code)
    for cell in code:
        if docs.results(cell)[1]:
            assert len(cell.metadata.get("alt", "")) > 20, "say in the cell's metadata what the figure shows: alt"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_notebook_on_converting_keeps_pictures_in_the_centre(docs: ModuleType) -> None:
    notebook = docs.executed(ROOT / "notebooks/converting_a_resnet.ipynb")
    text = "\n".join(docs.results(cell)[0] for cell in notebook.cells if cell.cell_type == "code")
    changes = dict(re.findall(r"(\w+): turning the digits changes the answers by (\S+)", text))
    assert float(changes["resized"]) < 1e-6 < 1e-4 < float(changes["padded"])
    assert "input sizes at which every stride is exact: 21 25 29 33" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_notebooks_take_less_than_two_minutes_together(docs: ModuleType) -> None:
    assert sum(docs.executed(path).metadata["seconds"] for path in NOTEBOOKS) < 120


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_notebook_runs_again_when_it_has_changed_and_fails_with_its_cell(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "CACHE", tmp_path / "cache")
    path = tmp_path / "tiny.ipynb"
    for code, shown in (("print(1 + 1); 3", "2\n3"), ("print(5)", "5")):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code, id="only")]), path)
        first = docs.executed(path)
        assert docs.results(first.cells[0]) == (shown, [])
        assert docs.executed(path).metadata["seconds"] == first.metadata["seconds"]  # what was kept
        assert len(list((tmp_path / "cache").iterdir())) == 1
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="only")]), path)
    for _ in range(2):
        with pytest.raises(Exception, match="ZeroDivisionError"):
            docs.executed(path)
