"""A hook of MkDocs: the notebooks as pages, with what they print and draw, and as files to download.

They are kept without results, so they are run here, once for each state of the package; tests look at what `executed` gives, too.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
CACHE = ROOT / ".cache" / "notebooks"
# figures of twice the size they are shown in; without a remark on how the kernel is reached
KERNEL = ["--InlineBackend.figure_formats={'retina'}", "--IPKernelApp.log_level=ERROR"]


def on_files(files: Files, config: Any) -> Files:
    """Adds a page with its pictures and a file for each notebook."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    with ThreadPoolExecutor(2) as pool:
        notebooks = list(pool.map(executed, paths))
    for path, notebook in zip(paths, notebooks, strict=True):
        parts: list[str] = []
        for number, cell in enumerate(notebook.cells):
            parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
            text, pictures = results(cell)
            if text:
                parts.append(f'``` {{ .text .no-copy title="Result" }}\n{text}\n```')
            for png, width in pictures:
                name = f"{path.stem}-{number}.png"
                parts.append(f'![{cell.metadata["alt"]}]({name}){{ width="{width}" }}')
                files.append(File.generated(config, f"notebooks/{name}", content=png))
        parts.insert(1, f"[Download this notebook]({path.name}); it runs as it is, without a download of data.")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content="\n\n".join(parts)))
        files.append(File.generated(config, f"notebooks/{path.name}", content=path.read_bytes()))
    return files


def results(cell: Any) -> tuple[str, list[tuple[bytes, int]]]:
    """What a cell printed, and its figures: each as a PNG and the width to show it in."""
    outputs = cell.get("outputs", ())
    text = "".join(output.text for output in outputs if output.output_type == "stream").strip("\n")
    shown = [(output.data, output.metadata) for output in outputs if "data" in output]
    pictures = [(base64.b64decode(d["image/png"]), m["image/png"]["width"]) for d, m in shown if "image/png" in d]
    values = [d["text/plain"] for d, _ in shown if "image/png" not in d]
    return "\n".join(filter(None, [text, *values])), pictures


def executed(path: Path) -> Any:
    """The notebook with its results, run if neither it nor the package is as it was the last time; a cell that fails raises."""
    kept = CACHE / f"{path.stem}-{_state(path)}.ipynb"
    if not kept.exists():
        notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
        with TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources, extra_arguments=KERNEL)
            paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))  # the package of the hash
            client.execute(env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})  # two run at a time
        notebook.metadata["seconds"] = time.perf_counter() - start
        CACHE.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        nbformat.write(notebook, part)
        part.replace(kept)  # whole or not at all
        for old in {*CACHE.glob(f"{path.stem}-*.ipynb")} - {kept}:
            old.unlink(missing_ok=True)
    return nbformat.read(kept, as_version=4)


def _state(path: Path) -> str:
    """A hash of all that results depend on: the notebook, the package, torch, and this file."""
    package = sorted(p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    found = hashlib.sha256(version("torch").encode())
    for file in (path, Path(__file__), *package):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]
