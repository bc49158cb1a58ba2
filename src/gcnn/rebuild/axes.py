"""Calls that change axes or ask for them, and what becomes of those on a group: reshapes, permutes, squeezes, shapes."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from gcnn.rebuild.graph import from_pool
from gcnn.rebuild.values import Value, arguments
from gcnn.tracing import POINTWISE_METHODS

if TYPE_CHECKING:
    from gcnn.rebuild.converter import Converter


def squeezed(net: Converter, node: fx.Node, x: Value) -> Value:
    """Without axes of a single place; a squeeze() of all drops those of space alone, whatever the batch is."""
    dim, rank = arguments(node, "dim").get("dim"), net.rank(x)
    places = set(range(2, rank)) if dim is None else {d % rank for d in (dim if isinstance(dim, list | tuple) else [dim])}
    result = x.old == 1 and not x.last and net.pool is not None and net.is_result(node)
    if places == {1} and result and x.kind in ("map", "fibre"):
        y = net.pooled(x)
        return replace(y, node=net.graph.call_method("squeeze", (y.node, 1)), kind="other", squeezed=x.kind == "map")
    if dim is None and _is_one_number(net, node, x):
        return _as_numbers(net, node, x)
    if x.kind == "map" and not x.single and not x.last and min(places) > 1 and from_pool(net.model, node.args[0]):
        x = net.single(x, node.name)
    if not at_one_place(x) or 0 in places or (x.old < 2 and (dim is None or 1 in places)):
        way = "squeeze axes of space after a pool to a single place, or use flatten(1)"
        if places == {1}:
            way = "leave the axis of the channel in the result, and squeeze that outside of the network"
        raise net.refusal(f"{node.name}, a squeeze,", x, way)
    return with_axes(net, x, rank - 2 - len(places - {1}))  # there are several channels, so that axis stays


def unsqueezed(net: Converter, node: fx.Node, x: Value) -> Value:
    """With an axis of space for a vector that has a single place."""
    dim, rank = arguments(node, "dim")["dim"], net.rank(x)
    if node in net.spared:
        return x
    if not at_one_place(x) or dim % (rank + 1) < 2 or rank == net.group.dim + 2:
        ones = ", 1" * net.group.dim
        raise net.refusal(f"{node.name}, an unsqueeze along axis {dim},", x, f"vectors (N, C) may become maps (N, C{ones})")
    return with_axes(net, x, rank - 1)


def _as_numbers(net: Converter, node: fx.Node, x: Value) -> Value:
    """A result of one channel at one place as numbers (N,): pooled over the group, and checked when it runs."""
    y = net.pooled(net.single(x, node.name))
    return replace(y, node=net.graph.call_method("squeeze", (y.node, 1)), old=0, new=0)


def _is_one_number(net: Converter, node: fx.Node, x: Value) -> bool:
    """Whether a sample's result is a single number, as far as it is known before it runs."""
    known = x.kind in ("map", "flat") and x.old == 1 and not x.last
    return known and net.pool is not None and net.is_result(node)


def flattened(net: Converter, node: fx.Node, x: Value) -> Value:
    """A flatten, of all but the batch or of space alone; of the batch too where a sample has one number."""
    named = arguments(node, "start_dim", "end_dim")
    return _flat(net, node, x, named.get("start_dim", 0), named.get("end_dim", -1))


def flatten_layer(net: Converter, name: str, module: nn.Flatten, x: Value) -> Value:
    """The same by a layer."""
    return _flat(net, net.present, x, module.start_dim, module.end_dim)


def viewed(net: Converter, node: fx.Node, x: Value) -> Value:
    """A view or reshape, where it is a flatten, or gives back the axes of a single place."""
    given: Any = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
    given = given or node.kwargs.get("shape", ())
    ones = (1,) * net.group.dim
    samples = len(given) < 2 or given[0] == -1 or (isinstance(given[0], fx.Node) and _is_batch(net, given[0]))
    if not samples and -1 in given[1:]:  # else the channels tell how many samples there are
        way = "the batch stays: its first size is x.size(0), or -1"
        raise net.refusal(f"{node.name}, a {node.target} to a shape of its own,", x, way)
    if tuple(given) == (-1,) and _is_one_number(net, node, x):
        return _as_numbers(net, node, x)
    kept = len(given) > 1 and (given[1] == x.old or _is_channels(net, x, given[1]) or (given[1] == -1 and given[0] != -1))
    if at_one_place(x) and len(given) == net.group.dim + 2 and tuple(given[2:]) == ones and kept:
        return with_axes(net, x, net.group.dim)
    if len(given) == 3 and given[2] == -1 and given[1] != -1 and kept:
        return _flat(net, node, x, 2)
    if len(given) == 2 and at_one_place(x) and not kept:
        raise net.refusal(f"{node.name}, a {node.target} to {given[1]} numbers each,", x, f"it has {x.old} channels; flatten(1)")
    return _flat(net, node, x, 1 if len(given) == 2 else -1)


def unchanged(net: Converter, node: fx.Node, x: Value) -> Value:
    """Sums and products repeat what they must; other calls get a map that is repeated."""
    if node.target == "expand_as" and x.kind == "map":
        like = net.value(node.args[1])
        if like.kind != "map" or like.last != x.last or (x.old, x.new) not in ((1, 1), (like.old, like.new)):
            raise net.refusal(f"{node.name}, an expand_as,", x, "expand to maps of the same channels")
        return replace(like, node=net.graph.call_method("expand_as", (x.node, like.node)))
    if node.target == "expand_as" and x.kind in ("line", "fibre"):
        raise net.refusal(
            f"{node.name}, an expand_as,", x, "sums and products expand by themselves; or expand maps, (N, C, 1, 1)"
        )
    if x.kind not in ("map", "line", "fibre"):
        found = net.pointwise(node, node.target in POINTWISE_METHODS)
        return replace(found, memory="unknown" if node.kwargs.get("memory_format") else found.memory)
    return net.same_or_copied(node, x)


def repeated(net: Converter, node: fx.Node, x: Value) -> Value:
    """An image of one channel as one of three, say, for a network that was trained on those."""
    given: Any = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
    others = [n for i, n in enumerate(given) if i != 1]
    if x.kind != "image" or len(given) != net.rank(x) or any(n not in (1, -1) for n in others):
        return net.pointwise(node, pointwise=False)
    return replace(x, node=net.graph.node_copy(node, lambda n: net.value(n).node), old=0, new=0)


def transposed(net: Converter, node: fx.Node, x: Value) -> Value:
    """Two axes exchanged: a permute, where it brings the channels of a line to the end, or back."""
    dims = [d % net.rank(x) for d in arguments(node, "dim0", "dim1").values() if isinstance(d, int)]
    if x.kind == "map" and net.group.dim == 1 and sorted(dims) == [1, 2]:
        return _with_channels_moved(x)
    return net.pointwise(node, pointwise=False)


def permuted(net: Converter, node: fx.Node, x: Value) -> Value:
    """Channels brought to the end, or back; the map itself stays as it is."""
    dims: Any = node.args[1:] if len(node.args) > 2 else arguments(node, "dims")["dims"]
    rank = net.group.dim + 2
    places = tuple(d % rank for d in dims)
    to_last, to_first = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
    if x.kind == "map" and places == (to_first if x.last else to_last):
        return _with_channels_moved(x)
    raise net.refusal(f"{node.name}, a permute by {tuple(dims)},", x, f"channels may go to the end, {to_last}, and back")


def moved(net: Converter, node: fx.Node, x: Value) -> Value:
    """Another dtype; to which device, and how it lies there, the new network is told by others."""
    if net.waits(x) and not _becomes_other(net, node):
        return x  # what it meets has the numbers of the network, and their dtype
    if net.waits(x) or node.target == "type_as":
        return net.pointwise(node, pointwise=True)
    given = [a for a in node.args[1:] if isinstance(a, torch.dtype) or (isinstance(a, fx.Node) and net.value(a).kind == "size")]
    kept = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    if x.kind in ("image", "map", "line", "fibre") and "memory_format" in node.kwargs:
        x = net.same_or_copied(node, x)
    if not given and not kept:
        return x
    node_ = net.graph.call_method("to", *fx.map_arg(((x.node, *given), kept), lambda n: n if n is x.node else net.value(n).node))
    return replace(x, node=node_)


def shape_of(net: Converter, node: fx.Node, x: Value) -> Value:
    """The shape, or the number of axes, that the old network's value had."""
    if x.kind == "parts" and node.args[1:] == ("values",):
        return x.node[0]
    if node.target is getattr and node.args[1] == "dtype":
        return Value(net.graph.call_function(getattr, (x.node, "dtype")), "size")
    if node.target is getattr and node.args[1] not in ("shape", "ndim"):
        return net.pointwise(node, pointwise=False)
    if node.target == "dim" or (node.target is getattr and node.args[1] == "ndim"):
        return Value(net.rank(x), "size")
    if x.kind == "line":
        raise net.refusal(f"{node.name}, a shape,", x, "ask for it before")
    found = net.graph.call_function(getattr, (x.node, "shape"))
    shape = replace(x, node=found, kind="shape", of=x)
    named = arguments(node, "dim")
    return size_of(net, shape, named["dim"]) if node.target == "size" and "dim" in named else shape


def size_of(net: Converter, shape: Value, index: Any) -> Value:
    """An entry or a slice of the shape that the old network's value had."""
    x = shape.of
    assert x is not None
    rank = net.rank(x)
    channels = rank - 1 if x.last else 1
    before = 2 if x.kind == "image" else 3  # axes of the new value before those of space
    remedy = "sizes of space alone, x.shape[2:], the batch, x.shape[0], and the channels of maps, x.shape[1], are known"
    if isinstance(index, slice):
        axes = list(range(rank))[index]
        space = [a for a in range(1, rank) if a != channels]
        if axes == [0]:
            where: Any = slice(0, 1)
        elif axes and axes == space[space.index(axes[0]) if axes[0] in space else 0 :][: len(axes)]:
            first = before + space.index(axes[0])
            where = slice(first, first + len(axes))
        else:
            raise net.refusal(f"the part {index} of a shape", x, remedy)
        return Value(net.graph.call_function(operator.getitem, (shape.node, where)), "size")
    if not isinstance(index, int) or not -rank <= index < rank:
        raise net.refusal(f"the entry {index} of a shape", x, remedy)
    axis = index % rank
    if axis == 0:
        return Value(net.graph.call_function(operator.getitem, (shape.node, 0)), "size", batch=True)
    if axis == channels:
        if x.kind == "flat" and not x.single:
            raise net.refusal("the number of values of a flattened map", x, remedy)
        if x.old:
            return Value(x.old, "size")
        return Value(net.graph.call_function(operator.getitem, (shape.node, 1)), "size")
    where = before + axis - (1 if x.last else 2)
    return Value(net.graph.call_function(operator.getitem, (shape.node, where)), "size")


def at_one_place(x: Value) -> bool:
    """Whether this is a vector for each element, whatever ones its shape has."""
    return x.kind == "fibre" or (x.kind in ("map", "line", "flat") and x.single and not x.last)


def with_axes(net: Converter, x: Value, axes: int) -> Value:
    """A map of a single place, of which the old network has this many axes of space."""
    if x.kind == "fibre":
        index: Any = (..., *(None,) * net.group.dim)
        x = replace(x, node=net.graph.call_function(operator.getitem, (x.node, index)))
    if axes == 0:
        return replace(net.single(x), axes=0)
    return replace(x, kind="map" if axes == net.group.dim else "line", axes=axes if axes < net.group.dim else 0, single=True)


def _becomes_other(net: Converter, node: fx.Node) -> bool:
    """Whether a parameter gets a dtype that may be another than that of the maps and images: whole numbers, those of an input."""
    for a in (*node.args[1:], *node.kwargs.values()):
        like = net.value(a.args[0] if isinstance(a, fx.Node) and a.target is getattr else a)
        if isinstance(a, fx.Node) and like.kind == "other" and not net.waits(like):
            return True
        if isinstance(a, torch.dtype) and not a.is_floating_point:
            return True
    return False


def _is_batch(net: Converter, node: fx.Node) -> bool:
    """Whether this is the number of samples, of a map or of whatever else."""
    first: Any = node.args[0] if node.args else None
    of_shape = node.target is operator.getitem and isinstance(first, fx.Node) and node.args[1] == 0
    shape = of_shape and (first.target == "size" or first.args[1:] == ("shape",))
    return net.value(node).batch or shape or (node.target == "size" and node.args[1:] == (0,))


def _is_channels(net: Converter, x: Value, node: Any) -> bool:
    """Whether this is the number of channels, `x.size(1)`, `x.shape[1]`, of something that has as many."""
    return isinstance(node, fx.Node) and node.op != "placeholder" and x.old > 0 and net.value(node).node == x.old


def _flat(net: Converter, node: fx.Node, x: Value, start: Any, end: Any = -1) -> Value:
    if (start, end) == (0, -1) and _is_one_number(net, node, x):
        return _as_numbers(net, node, x)
    if start == 2 and end in (-1, net.rank(x) - 1) and x.kind in ("map", "line") and not x.last:
        x = net.same_or_copied(node, x) if x.memory else x
        return x if net.group.dim == 1 else replace(x, kind="line", axes=1)
    if start != 1 or end not in (-1, net.rank(x) - 1):
        known = "flatten(1) and a mean over space are known, and nn.ChannelShuffle for views that shuffle channels"
        how = "Flatten" if node.op == "call_module" else getattr(node.target, "__name__", node.target)
        raise net.refusal(f"{node.name}, a {how} to a shape of its own,", x, known)
    return _flat_map(net, node.name, x)


def _flat_map(net: Converter, name: str, x: Value) -> Value:
    """A map that is flat for the old network, and waits as it is for a linear layer to say what it takes."""
    if x.kind == "image":
        raise net.refusal(f"{name}, a flatten,", x)
    if x.kind == "map" and x.memory and not x.last:  # there it is a copy
        x = net.same_or_copied(net.present, x)
    if x.kind == "map" and not x.single and not x.last and net.ends_at_one_place(net.present, x):
        return net.single(x, name)
    return x if x.kind == "fibre" else replace(x, kind="flat")


def _with_channels_moved(x: Value) -> Value:
    return replace(x, last=not x.last, memory="permuted" if x.memory == "" else "" if x.memory == "permuted" else "unknown")
