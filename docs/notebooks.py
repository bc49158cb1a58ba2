"""A hook of MkDocs: the notebooks as pages, code and text, and as files to download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, config: Any) -> Files:
    """Adds a page and a file for each notebook."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        parts = [source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells]
        parts.insert(1, f"[Download this notebook]({path.name}); it runs as it is, without a download of data.")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content="\n\n".join(parts)))
        files.append(File.generated(config, f"notebooks/{path.name}", content=text))
    return files
