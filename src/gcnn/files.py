"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file in one move: a crash, a kill or a full disk leaves the old one whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder) / "notes.txt", b"all of it")
    ...     [path.name for path in Path(folder).iterdir()]
    ['notes.txt']
    """
    path = path.resolve()  # what a link leads to is replaced, not the link
    if path.exists() and not path.is_file():
        raise OSError(f"{path} could not be written: it is no file that can be replaced")
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        kept = "the one before it is intact" if path.exists() else "there was none before"
        raise OSError(f"{path} could not be written ({error.strerror or error}); {kept}") from error
