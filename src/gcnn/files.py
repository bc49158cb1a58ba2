"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file in one move: a crash, a kill or a full disk leaves the old one whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder) / "notes.txt", b"all of it")
    ...     [path.name for path in Path(folder).iterdir()]
    ['notes.txt']
    """
    path = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    if path.exists() and not path.is_file():
        raise OSError(f"{path} could not be written: it is no file that can be replaced")
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")  # others may write the same file
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    except OSError as error:
        kept = "the one before it is intact" if path.exists() else "there was none before"
        raise OSError(f"{path} could not be written ({error.strerror or error}); {kept}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def sweep(folder: Path, *names: str) -> None:
    """Removes what killed processes have left of `write_file` of such names, in a folder in which nobody else writes those."""
    for name in names:
        for part in folder.glob(f".{name}.*part"):
            if re.fullmatch(r"(\d+-\d+\.)?part", part.name.removeprefix(f".{name}.")):
                with suppress(OSError):
                    part.unlink()
