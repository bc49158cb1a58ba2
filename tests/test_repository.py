"""What a user meets first: the README and the examples run, the import is quick, layers are built in no time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gcnn
from gcnn import Oh, p4m
from gcnn.nn import GConv

ROOT = Path(__file__).parent.parent


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_code_in_pages_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks or page in ("docs/results.md", "docs/reference.md", "docs/architecture.md", "docs/speed.md")
    for block in blocks:
        run("-c", block, cwd=tmp_path)


def test_the_package_as_it_is_installed_runs_the_readme(tmp_path: Path) -> None:
    """The wheel, alone with what it depends on: every file that it needs is in it, and torch and numpy are enough."""
    run(
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(wheel), cwd=tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "site" in run(
        "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import gcnn; print(gcnn.__file__)", cwd=tmp_path
    )
    extras = ("matplotlib", "PIL", "pooch", "safetensors", "tensorboard", "tqdm", "tyro", "onnx", "onnxruntime", "starlette")
    for block in blocks:
        alone = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); sys.modules.update(dict.fromkeys({extras}))"
        run("-c", f"{alone}\n{block}", cwd=tmp_path)


def test_the_readme_keeps_its_promise_of_fifteen_lines() -> None:
    first = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


def test_the_readme_names_every_group_and_layer() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"all {len(gcnn.GROUPS)}" in re.sub(r"\s+", " ", text)
    for name in gcnn.nn.__all__:
        assert name in text
    assert "`make test`" in text
    assert "`make demo`" in text


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    assert run(str(path), cwd=tmp_path)


def test_import_is_quick_and_brings_nothing_heavy() -> None:
    code = (
        "import sys, time, torch; t = time.perf_counter(); import gcnn, gcnn.nn, gcnn.functional, gcnn.testing, gcnn.plot;"
        "print(time.perf_counter() - t); assert not {'matplotlib', 'safetensors', 'scipy', 'PIL'} & set(sys.modules)"
    )
    assert min(float(run("-c", code, cwd=ROOT)) for _ in range(3)) < 0.2


def test_layers_are_built_in_no_time() -> None:
    code = (
        "import time; from gcnn import Oh; from gcnn.nn import GConv; t = time.perf_counter(); GConv(Oh, 16, 16, 3);"
        "print(time.perf_counter() - t)"
    )
    assert min(float(run("-c", code, cwd=ROOT)) for _ in range(2)) < 0.3  # the very first layer, tables and all
    assert GConv(Oh, 16, 16, 3).weight.numel() == 16 * 16 * 48 * 27
    GConv(p4m, 16, 16, 3)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        GConv(p4m, 16, 16, 3)
        times.append(time.perf_counter() - start)
    assert sorted(times)[10] < 0.005


def test_the_core_needs_torch_and_numpy_only() -> None:
    kernels = [p for p in (ROOT / "src/gcnn/kernels").glob("*.py") if "import triton" in p.read_text()]  # imported on a GPU only
    used = {
        m.split(".")[0]
        for path in (ROOT / "src").rglob("*.py")
        if path not in kernels
        for m in re.findall(r"^(?:import|from) (\w[\w.]*)", path.read_text(), re.M)  # at the top: what every user imports
    }
    assert used - set(sys.stdlib_module_names) == {"gcnn", "numpy", "torch"}
    everything = "import gcnn, gcnn.cli, gcnn.export, gcnn.models, sys; print('triton' in sys.modules)"
    assert "False" in run("-c", everything, cwd=ROOT)


def test_modules_that_are_imported_later_are_listed() -> None:
    later = "{'data', 'export', 'models', 'train'}"
    assert "True False" in run("-c", f"import gcnn, sys; print({later} <= set(dir(gcnn)), 'gcnn.train' in sys.modules)", cwd=ROOT)


def test_imports_go_one_way() -> None:
    order = [
        "files",
        "groups",
        "indices",
        "irreps",
        "checks",
        "layout",
        "lattice",
        "kernels",
        "pooling",
        "functional",
        "nn",
        "probe",
        "testing",
    ]
    order += ["plot", "tracing", "newgraph", "planes", "onnxfile", "export", "rebuild", "convert", "models", "formats", "data"]
    order += ["config", "steps", "runs", "train", "recipes", "report", "demo", "explore", "cli", "__main__"]
    for path in (ROOT / "src/gcnn").rglob("*.py"):
        name = path.relative_to(ROOT / "src/gcnn").parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        text = path.read_text()
        whole = [m for line in re.findall(r"^from gcnn import (.+)$", text, re.M) for m in re.findall(r"\w+", line) if m in order]
        for module in [*re.findall(r"^from gcnn\.(\w+)", text, re.M), *whole]:
            same_package = module == name and path.parent.name == name
            assert same_package or order.index(module) < order.index(name), f"{path} imports {module}"


def test_versions_agree() -> None:
    assert f'version = "{gcnn.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tables_of_the_readme_come_from_the_records() -> None:
    assert run(str(ROOT / "benchmarks/tables.py"), "--check", cwd=ROOT) == ""  # it fails where they differ
