"""A hook of MkDocs: CONTRIBUTING.md as a page, and links that work in the repository as links of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Adds CONTRIBUTING.md, whose links begin at the root of the repository."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/ to what is a page of the site: notebooks and CONTRIBUTING.md."""
    markdown = re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb", r"](notebooks/\1.md", markdown)
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md")
