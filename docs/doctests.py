"""An extension of griffe: examples in docstrings are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.M | re.S)


class Doctests(griffe.Extension):
    """Puts each run of lines that begins with >>> between fences."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Changes the docstring of whatever griffe has read."""
        if obj.docstring:
            text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = text.replace("[f * psi](g)", "`[f * psi](g)`")
