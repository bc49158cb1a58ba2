"""What all layers share: a group, a repr, and errors that name the layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gcnn.checks import Size, as_tuple, check_axes, check_tensor, shape_text
from gcnn.groups import GROUPS, Group
from gcnn.lattice import check_domain
from gcnn.layout import output_size

Device = torch.device | str | None


class GModule(nn.Module):
    """A module of a group; `_shown` names the arguments that its repr prints."""

    _shown: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """The layer; a TypeError where the group was forgotten, for which Python would miss the last argument."""
        check_group_is_first(cls, args, options)
        return super().__new__(cls)

    def __init__(self, group: Group) -> None:
        super().__init__()
        check_group(type(self).__name__, group)
        self.group = group

    def extra_repr(self) -> str:
        """The arguments, as the repr shows them."""
        return ", ".join([str(self.group), *(f"{name}={getattr(self, name)!r}" for name in self._shown)])

    def _label(self) -> str:
        """The layer, as errors name it."""
        return f"{type(self).__name__}({self.group})"

    def _check_map(self, x: Tensor, image: bool = True, cosets: bool = True) -> None:
        """Raises a ValueError unless `x` is a map on the group, or an image or a map over cosets where those will do."""
        check_tensor(self._label(), x)
        group = self.group
        if x.ndim == group.dim + 2 and image:
            return
        if x.ndim == group.dim + 3 and (x.shape[2] == group.order or (cosets and x.shape[2] and group.order % x.shape[2] == 0)):
            return
        expected = f"input {shape_text(group, 'K')}" + (f" or an image {shape_text(group, 'K', None)}" if image else "")
        if x.ndim == group.dim + 2 and x.shape[1] % group.order == 0:
            remedy = f"use x.unflatten(1, (-1, {group.order})) if these are planes"
        elif x.ndim == group.dim + 3 and x.shape[2] and group.order % x.shape[2] == 0:
            remedy = "a map over cosets is pooled further by x.amax(2) or x.mean(2), and lifted by GConv(stabilizer=...)"
        else:
            remedy = f"{group} has {group.order} elements and dimension {group.dim}"
        raise ValueError(f"{self._label()}: expected {expected}, got {tuple(x.shape)}; {remedy}")

    def _check_floating(self, x: Tensor) -> None:
        if not (x.is_floating_point() or x.is_complex()):
            raise ValueError(f"{self._label()}: expected floating point numbers, got {x.dtype}; use x.float()") from None

    def _check_window(
        self, x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: Sequence[int], dilation: tuple[int, ...]
    ) -> None:
        """Raises a ValueError unless the window fits `x`, and on a hexagonal lattice `x` and the result fit that.

        It takes some microseconds, as much as a tenth of a small pool: on other lattices, where torch itself refuses windows
        that do not fit, layers call it once something was refused.
        """
        size = x.shape[-self.group.dim :]
        for n, k, p, d in zip(size, kernel, padding, dilation, strict=True):
            if n + 2 * p <= d * (k - 1):
                raise ValueError(
                    f"{self._label()}: a window of {kernel} cells does not fit a map of {tuple(size)} with padding "
                    f"{tuple(padding)} and dilation {dilation}; give larger images, or pad more"
                ) from None
        if not self.group.fills_box:
            check_domain(self._label(), self.group, size)
            check_domain(f"{self._label()}, result", self.group, output_size(size, kernel, stride, padding, dilation))


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Puts the name of a layer before the message of a ValueError about its arguments."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def check_group_is_first(layer: type, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raises a TypeError where a layer is made without its group."""
    forgotten = args and isinstance(args[0], int | tuple | list)
    if forgotten and "group" in list(inspect.signature(layer.__init__).parameters)[1:2]:  # type: ignore[misc]  # subclasses may take others
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())])
        check_group(layer.__name__, args[0], f"; the group comes first: {layer.__name__}(p4m, {given})")


def check_group(layer: str, group: Any, way_out: str = "") -> None:
    """Raises a TypeError unless `group` is a Group."""
    if not isinstance(group, Group):
        named = next((name for name in GROUPS if name.lower() == str(group).lower()), "p4m")
        raise TypeError(
            f"{layer}: expected a Group as the first argument, such as gcnn.GROUPS[{named!r}], got {group!r}{way_out}"
        )


def checked_axes(group: Group, what: str, value: Size, least: int = 0) -> tuple[int, ...]:
    """One whole number an axis, equal along the axes that the group mixes."""
    values = as_tuple(group, value, what)
    if min(values) < least:
        raise ValueError(f"{what} (={values}) must be at least {least}")
    check_axes(group, what, values)
    return values
