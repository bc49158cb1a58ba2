"""What all layers share: a group, a repr, and errors that name the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gcnn.checks import Size, as_tuple, check_axes
from gcnn.groups import Group

Device = torch.device | str | None


class GModule(nn.Module):
    """A module of a group; `_shown` names the arguments that its repr prints."""

    _shown: tuple[str, ...] = ()

    def __init__(self, group: Group) -> None:
        super().__init__()
        check_group(type(self).__name__, group)
        self.group = group

    def extra_repr(self) -> str:
        """The arguments, as the repr shows them."""
        return ", ".join([str(self.group), *(f"{name}={getattr(self, name)!r}" for name in self._shown)])


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Puts the name of a layer before the message of a ValueError about its arguments."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def check_group(layer: str, group: Group) -> None:
    """Raises a TypeError unless `group` is a Group."""
    if not isinstance(group, Group):
        raise TypeError(f"{layer}: expected a Group as the first argument, such as gcnn.p4m, got {group!r}")


def checked_axes(group: Group, what: str, value: Size, least: int = 0) -> tuple[int, ...]:
    """One whole number an axis, equal along the axes that the group mixes."""
    values = as_tuple(group, value, what)
    if min(values) < least:
        raise ValueError(f"{what} (={values}) must be at least {least}")
    check_axes(group, what, values)
    return values
