"""The network that `gcnn.convert` returns, and what stands there for the blocks of the old one."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

from torch import fx, nn

_ONE_BY_ONE = "take list(net.children()), to freeze some, say; to have a part of the network run, convert that part"


def _child(self: nn.Module, key: int | str) -> nn.Module:
    """The part of that name, or number, as nn.Sequential and the like give theirs."""
    inside = dict(self.named_children())
    if isinstance(key, slice):
        raise TypeError(f"one after the other the parts of a converted network are not the network: {_ONE_BY_ONE}")
    number = 0 if isinstance(key, str) else operator.index(key)
    name = list(inside)[number] if -len(inside) <= number < 0 else str(key)
    if name not in inside:
        error = KeyError if isinstance(key, str) else IndexError
        raise error(f"{key!r}: the parts of {getattr(self, '_block', 'the network')} are {', '.join(inside) or 'none'}")
    return inside[name]


class Converted(fx.GraphModule):
    """A graph of layers under their old names, whose blocks say that they cannot be called; copies and pickles of it, too."""

    def __init__(self, root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str = "GraphModule") -> None:
        super().__init__(root, graph, class_name)
        _name_blocks(self)

    __getitem__ = _child
    __iter__ = None  # one after the other its parts are not the network

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        made: Any = super().__deepcopy__(memo)
        _name_blocks(made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, super().__reduce__()


class Block(nn.Module):
    """Holds the layers of a block of the old network under their names; the forward of the whole network calls them."""

    _block: str
    __getitem__ = _child
    __iter__ = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """An error with the way out."""
        raise NotImplementedError(self._told("cannot be called"))

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, with a warning."""
        self._warn()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, with a warning."""
        self._warn()
        return super().register_forward_pre_hook(*args, **kwargs)

    def _warn(self) -> None:
        if any(True for _ in self.children()):  # others hold parameters alone, and are nobody's block
            warnings.warn(self._told("never runs a hook"), stacklevel=3)

    def _told(self, what: str) -> str:
        inside = next((name for name, m in self.named_modules() if name and not list(m.children())), "")
        remedy = f"take a layer inside, such as {self._block}.{inside}" if inside else "take a layer of the network"
        return (
            f"{self._block} {what}: blocks of a converted network keep their names and hold their layers, and the forward of the "
            f"whole network calls those one by one; {remedy}"
        )


def _name_blocks(net: nn.Module) -> None:
    """Makes blocks of the bare modules that torch.fx puts where names have dots."""
    for name, module in net.named_modules():
        if type(module) is nn.Module:
            module.__class__ = Block
            module._block = name


def _unpickled(make: Callable[..., fx.GraphModule], arguments: tuple[Any, ...]) -> Converted:
    """What torch.fx reads, with its blocks, and with what a user has put beside the graph."""
    read = make(*arguments)
    made = Converted(read, read.graph, type(read).__name__)
    for name, held in vars(read).items():
        if not hasattr(made, name):
            setattr(made, name, held)
    return made
