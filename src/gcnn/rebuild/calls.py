"""Functions and methods between the layers, and what they become on a group."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from gcnn.checks import check_axes
from gcnn.nn import GAdaptiveAvgPool, GMaxPool, GSubsample, GUpsample
from gcnn.nn.each import ChannelDropout, ChannelNorm, EachElement, ReduceSpace, UpsampleTo, VarianceInside
from gcnn.rebuild import axes, layers
from gcnn.rebuild.graph import copy_matters
from gcnn.rebuild.values import (
    FUNCTIONAL_POOLS,
    OF_SAMPLES,
    UnevenError,
    Value,
    arguments,
    attribute,
    divisor,
    spatial,
    whole,
)
from gcnn.tracing import POINTWISE_FUNCTIONS, POINTWISE_METHODS, POINTWISE_MODULES, module_of

if TYPE_CHECKING:
    from gcnn.rebuild.converter import Converter


def _layer_norm(net: Converter, node: fx.Node, x: Value) -> Value:
    if not x.last:
        return net.pointwise(node, pointwise=False)
    named = arguments(node, "shape", "weight", "bias", "eps")
    numbers = [named.get("weight"), named.get("bias")]
    if tuple(named["shape"]) != (x.old,) or any(isinstance(n, fx.Node) and n.op != "get_attr" for n in numbers):
        raise net.refusal(f"{node.name}, a layer_norm,", x, "normalise the channels alone, with parameters as they are")
    wanted = (numbers[0] is not None, numbers[1] is not None)
    made: Any = net.layer(node.name, net.model, lambda: ChannelNorm(x.new, named.get("eps", 1e-5), *wanted))
    _take_numbers(net, made, numbers)
    return net.insert(node.name, made, x)


def _take_numbers(net: Converter, made: Any, numbers: list[Any]) -> None:
    """Puts the scale and the bias that a call was given into a norm."""
    for mine, theirs in ((made.weight, numbers[0]), (made.bias, numbers[1])):
        if mine is None or not isinstance(theirs, fx.Node):
            continue
        name, held = str(theirs.target), attribute(net.model, str(theirs.target))
        uses = [user for n in net.old_graph.nodes if (n.op, n.target) == ("get_attr", name) for user in n.users]
        layer = any((n.op, n.target) == ("call_module", name.rpartition(".")[0]) for n in net.old_graph.nodes)
        if len(uses) > 1 or layer or not isinstance(held, nn.Parameter):
            raise ValueError(
                f"convert: {name} is given to a norm by a call and used elsewhere, or is a buffer: it would be a parameter of "
                "its own there; use nn.GroupNorm, nn.InstanceNorm2d or nn.LayerNorm"
            )
        mine.data.copy_(held.detach().repeat(math.ceil(len(mine) / len(held)))[: len(mine)])
        mine.requires_grad_(held.requires_grad)


def _group_norm(net: Converter, node: fx.Node, x: Value) -> Value:
    """A norm of groups of channels, or of each, of one sample: on every element by itself."""
    of_each = node.target is F.instance_norm
    names = ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    named = arguments(node, *(names if of_each else ("num_groups", "weight", "bias", "eps")))
    numbers = [named.get("weight"), named.get("bias")]
    given = [attribute(net.model, str(n.target)) for n in numbers if isinstance(n, fx.Node) and n.op == "get_attr"]
    plain = len(given) == sum(n is not None for n in numbers) and all(n.shape == (x.old,) for n in given)
    by_sample = named.get("running_mean") is None and named.get("use_input_stats", True) is True
    if x.kind != "map" or x.last or not plain or not by_sample or numbers[0] is None is not numbers[1]:
        remedy = "normalise maps by their own statistics, with parameters as they are; or use nn.GroupNorm, nn.InstanceNorm2d"
        raise net.refusal(f"{node.name}, a norm by a call,", x, remedy)
    groups = x.new if of_each else divisor(x.new, named["num_groups"])

    def make() -> EachElement:
        norm = nn.GroupNorm(groups, x.new, named.get("eps", 1e-5), numbers[0] is not None)
        if numbers[1] is None:
            norm.register_parameter("bias", None)
        return EachElement(net.group, norm)

    made: Any = net.layer(node.name, net.model, make)
    _take_numbers(net, made.module, numbers)
    return net.insert(node.name, made, x)


def _pool(net: Converter, node: fx.Node, x: Value) -> Value:
    kind = FUNCTIONAL_POOLS[node.target]
    if x.kind == "line":
        raise net.refusal(f"{node.name}, a pool,", x, "reduce its last axis, or flatten after the pool")
    sizes = (*node.args[1:2], *(v for k, v in node.kwargs.items() if k in ("kernel_size", "output_size")))
    if x.last:
        raise net.refusal(f"{node.name}, a pool,", x, "permute its channels back first")
    if any(isinstance(s, fx.Node) for size in sizes for s in (size if isinstance(size, list | tuple) else [size])):
        steps = (*node.args[2:3], *(v for k, v in node.kwargs.items() if k == "stride" and v is not None))
        usual = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False, "stride": None}
        others = {k for k, v in node.kwargs.items() if k not in usual or v != usual[k]}
        plain = len(node.args) <= 3 and not others - {"input", "kernel_size", "stride"}
        of_all = all(_is_size_of(net, x, node, size) for size in (*sizes, *steps))
        if kind is GAdaptiveAvgPool or not plain or not of_all:
            remedy = "give it as numbers, or as the map's own size, x.shape[2:]"
            raise net.refusal(f"{node.name}, a pool of a size that is known only when it runs,", x, remedy)
        if kind is GMaxPool:
            return layers.max_over_space(net, node.name, f"{node.name}, a pool,", 1, False, x)
        return replace(net.insert(node.name, GAdaptiveAvgPool(net.group, 1), x), single=True)
    if kind is GAdaptiveAvgPool:
        return layers.adaptive(net, node.name, sizes[0], x)
    options = spatial(node)
    try:
        made = kind(net.group, *node.args[1:], **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"convert: {node.name}: {error}") from None
    return net.insert(node.name, made, x)


def _is_size_of(net: Converter, x: Value, node: fx.Node, size: Any) -> bool:
    """Whether `size` is that of what a pool gets, in space, or one number of a square map."""
    rank = net.rank(x)
    pooled = _root(node.args[0] if node.args else node.kwargs.get("input"))
    if _whose_space(size, rank) is pooled:
        return True
    whose, axis = _axis_of(size, rank)
    return whose is pooled and isinstance(axis, int) and axis >= 2 and len(net.group.axis_classes) == 1


def _whose_space(size: Any, rank: int) -> Any:
    """Of what this is the size in space, `x.shape[2:]` or a list of `x.size(2)` ...; None if it is not of one thing."""
    if isinstance(size, list | tuple):
        found = [_axis_of(each, rank) for each in size]
        return found[0][0] if found == [(found[0][0], axis) for axis in range(2, rank)] else None
    whose, axes = _axis_of(size, rank)
    return whose if axes in (slice(2, None), slice(2 - rank, None), slice(2, rank)) else None


def _axis_of(size: Any, rank: int) -> tuple[Any, Any]:
    """Of what, and of which axis or slice of its axes, this is the size; None if it is not."""
    if not isinstance(size, fx.Node) or size.target not in ("size", operator.getitem) or len(size.args) != 2:
        return None, None
    whole: Any = size.args[0]
    index: Any = size.args[1]
    if size.target is operator.getitem:
        shape = isinstance(whole, fx.Node) and (whole.target == "size" or (whole.target is getattr and whole.args[1] == "shape"))
        whole = whole.args[0] if shape else None
    return _root(whole), index % rank if isinstance(index, int) else index


def _root(x: Any) -> Any:
    """What functions of single numbers made `x` from: it is as large."""
    while isinstance(x, fx.Node) and x.target in (POINTWISE_FUNCTIONS | POINTWISE_METHODS):
        made_from = [n for n in x.all_input_nodes if n.op != "get_attr"]  # parameters have a number a channel at most
        if len(made_from) != 1:
            break
        (x,) = made_from
    return x


def _adaptive_max(net: Converter, node: fx.Node, x: Value) -> Value:
    named = arguments(node, "output_size", "return_indices")
    indices = bool(named.get("return_indices"))
    return layers.max_over_space(net, node.name, f"{node.name}, a pool,", named.get("output_size"), indices, x)


def _interpolate(net: Converter, node: fx.Node, x: Value) -> Value:
    named = arguments(node, "size", "scale_factor", "mode", "align_corners")
    size, scale = named.get("size"), named.get("scale_factor")
    mode, corners = str(named.get("mode", "nearest")), named.get("align_corners")
    known = ("nearest", ("linear", "bilinear", "trilinear")[net.group.dim - 1])
    if mode not in known or named.get("antialias"):
        raise net.refusal(f"{node.name}, an interpolate of mode {mode!r},", x, f"modes {known} without antialias are known")
    if x.kind == "line" or x.last:
        raise net.refusal(f"{node.name}, an interpolate,", x, "flatten after it, and permute channels back first")
    x = replace(x, single=False)
    if scale is not None or isinstance(size, int):
        make = partial(GUpsample, net.group, size, whole(scale), mode, corners)
        return net.insert(node.name, net.layer(node.name, nn.Upsample(size, scale, mode), make), x)
    if not net.group.fills_box:
        remedy = f'{net.group} maps hexagons; give a whole scale_factor and mode="bilinear"'
        raise net.refusal(f"{node.name}, an interpolate to a size,", x, remedy)
    if isinstance(size, list | tuple) and all(isinstance(n, int) for n in size):
        try:
            check_axes(net.group, "size", size)
        except ValueError as error:
            raise net.refusal(f"{node.name}, an interpolate,", x, str(error)) from None
    whose = _whose_space(size, net.group.dim + 2)
    seen = net.value(whose)
    made = UpsampleTo(net.group, mode, corners, whose is not None and seen.kind in ("image", "map") and not seen.last)
    new = net.add(node.name, made)
    sizes = fx.map_arg(size, lambda n: net.value(n).node)
    return x.anew(net.graph.call_module(new, (x.node, sizes)))


def _dropout(net: Converter, node: fx.Node, x: Value) -> Value:
    x = replace(x, node=net.own(x)) if net.waits(x) else x
    by_number = node.target is F.dropout or x.kind == "other"
    if node.name in net.fixed:
        return net.pointwise(node, by_number) if net.fixed[node.name] else x
    p = arguments(node, "p").get("p", 0.5)  # tracing has fixed what `training` was
    return net.insert(node.name, nn.Dropout(p) if by_number else ChannelDropout(p), x)


def _pad(net: Converter, node: fx.Node, x: Value) -> Value:
    named = net.known(arguments(node, "pad", "mode", "value"))
    pad, mode, value = named["pad"], named.get("mode", "constant"), named.get("value") or 0.0
    space = 2 * net.group.dim
    if isinstance(pad, list | tuple) and len(pad) == space + 2 and x.kind == "map" and not x.last:
        x = _more_channels(net, node, x, pad[space:], mode, value)
        pad = pad[:space]
        if not any(pad):
            return x
    return layers.padded(net, node.name, node.name, x, pad, mode, value)


def _more_channels(net: Converter, node: fx.Node, x: Value, pad: Any, mode: str, value: float) -> Value:
    """A map with channels of one number beside its own: the same share of those that there are now."""
    if not all(isinstance(n, int) and n >= 0 for n in pad) or mode != "constant" or not (net.group.fills_box or value == 0):
        remedy = "pad by known numbers of channels that are zero, or use a convolution of size 1, with a stride"
        raise net.refusal(f"{node.name}, a pad of the channels by {tuple(pad)} of mode {mode!r},", x, remedy)
    more = sum(pad)
    if x.new * more % x.old:
        raise UnevenError(node.name, x, x.old, x.old + more, x.old // math.gcd(more, x.old))
    added = x.new * more // x.old
    before = round(pad[0] * x.new / x.old)
    sizes = (*(0,) * (2 * net.group.dim + 2), before, added - before)
    y = net.graph.call_function(F.pad, (x.node, sizes), {"value": value})
    return replace(x.anew(y), old=x.old + more, new=x.new + added)


def _softmax(net: Converter, node: fx.Node, x: Value) -> Value:
    named, log = arguments(node, "dim"), "log" in str(getattr(node.target, "__name__", node.target))
    return layers.softmax_over(net, f"{node.name}, a softmax", log, named.get("dim"), x, named.get("dtype"))


def _split(net: Converter, node: fx.Node, x: Value) -> Value:
    """The parts of a chunk or split along the channels."""
    what = "chunk" if "chunk" in str(node.target) else "split"
    named = arguments(node, "amount", "dim")
    dim = named.pop("dim", 0)
    amount: Any = net.known(next(v for k, v in named.items() if k not in ("tensor", "input")))
    if not net.along_channels(x, dim) or not x.old:
        raise net.refusal(f"{node.name}, a {what} along axis {dim},", x, "split maps along their channels, axis 1")
    if isinstance(amount, int):
        step = math.ceil(x.old / amount) if what == "chunk" else amount
        sizes = [min(step, x.old - start) for start in range(0, x.old, step)]
    else:
        sizes = [int(n) for n in amount]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return Value([_channels(net, node, x, end - n, end) for n, end in zip(sizes, ends, strict=True)], "parts")


def _shuffled(net: Converter, node: fx.Node, x: Value) -> Value:
    return layers.shuffled(net, node.name, arguments(node, "groups")["groups"], x)


def _channels(net: Converter, node: fx.Node, x: Value, start: int, end: int) -> Value:
    """Some of the channels: the same share of those that there are now."""
    unit = math.gcd(start, end, x.old)
    if not 0 <= start < end <= x.old:
        raise net.refusal(f"{node.name}, which takes channels {start} to {end} of {x.old},", x, "take some that are there")
    if x.new * unit % x.old:
        raise UnevenError(node.name, x, start, end, x.old // unit)
    first, count = start * x.new // x.old, (end - start) * x.new // x.old
    some = net.graph.call_method("narrow", (x.node, 1, first, count))
    return replace(x, node=some, old=end - start, new=count, narrowed=True)


def _item(net: Converter, node: fx.Node, x: Value) -> Value:
    index: Any = net.known(node.args[1])
    if x.kind == "shape":
        return axes.size_of(net, x, index)
    if x.kind == "parts":
        if index == 1 and not node.users:  # `largest, _ = x.max(1, keepdim=True)`
            return Value(None)
        if not isinstance(index, int) or not -len(x.node) <= index < len(x.node):
            raise net.refusal(f"{node.name}, part {index} of the {len(x.node)} parts of a map,", x, "take one that is there")
        return x.node[index]
    whole, steps = slice(None), index if isinstance(index, tuple) else (index,)
    rest = steps[1:] if steps[0] is ... else steps[2:] if steps[:2] == (whole, whole) else ()
    space = net.rank(x) - 2
    if rest and axes.at_one_place(x):
        if len(rest) <= space and all(isinstance(i, int) and i in (0, -1) for i in rest):
            return axes.with_axes(net, x, space - len(rest))
        if space + len(rest) <= net.group.dim and all(i is None for i in rest):
            return axes.with_axes(net, x, space + len(rest))
    one, last = len(steps) > 1 and steps[0] == whole, steps[2:]
    if one and last and axes.at_one_place(x) and _is_slice(steps[1]) and all(i is None for i in last):  # g[:, :3, None, None]
        start, end, step = steps[1].indices(x.old)
        if step == 1 and space + len(last) <= net.group.dim:
            return axes.with_axes(net, _channels(net, node, x, start, end), space + len(last))
    if one and not last and isinstance(steps[1], int) and _answers(net, node, x):  # y[:, 0]
        y = net.pooled(x)
        some = net.graph.call_function(operator.getitem, (y.node, index))
        return replace(y, node=some, kind="other", squeezed=x.kind == "map")
    if len(rest) == space == net.group.dim and x.kind in ("image", "map") and not x.last and all(map(_is_slice, rest)):
        return _window(net, node, x, rest)
    of_channels = len(steps) > 1 and isinstance(steps[1], slice) and all(i in (whole, ...) for i in (steps[0], *steps[2:]))
    if x.kind == "image" and not x.old and of_channels and steps[0] == whole:  # channels of the picture itself
        return replace(x, node=net.graph.node_copy(node, lambda n: net.value(n).node))
    if (
        x.kind in ("image", "map", "line", "fibre")
        and not x.last
        and x.old
        and of_channels
        and steps[1].step in (None, 1)
        and all(isinstance(i, int | None) for i in (steps[1].start, steps[1].stop))
        and steps[0] == whole
    ):
        start, end, _ = steps[1].indices(x.old)
        return _channels(net, node, x, start, end)
    return net.pointwise(node, pointwise=False)


def _answers(net: Converter, node: fx.Node, x: Value) -> bool:
    """Whether the channels are results, each of them what it was."""
    whole = x.kind in ("map", "fibre") and not x.last and x.old == x.new > 0
    return whole and net.pool is not None and net.is_result(node)


def _glu(net: Converter, node: fx.Node, x: Value) -> Value:
    return layers.gated(net, node, arguments(node, "dim").get("dim", -1), x)


def _reduced(net: Converter, node: fx.Node, x: Value) -> Value:
    """A mean, maximum or the like over all of space, over the channels of each element, or over both."""
    if node in net.spared:
        return x
    x = net.vector(x)
    if x.kind not in ("map", "line", "image", "fibre"):
        return net.pointwise(node, pointwise=False)
    how = str(getattr(node.target, "__name__", node.target))
    before = {"norm": ("p", "dim"), "std": ("dim", "unbiased"), "var": ("dim", "unbiased")}.get(how, ("dim",))
    named = arguments(node, *before, "keepdim")
    dims, keepdim = named.get("dim"), bool(named.get("keepdim", False))
    rank = net.rank(x)
    places = {d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])} if dims is not None else set()
    channels = {rank - 1 if x.last else 1}
    space = set(range(1, rank)) - channels
    of_one = len(places) == 1 < len(space) and places <= space and not keepdim and x.kind != "image"
    rest = _goes_on(node, how, rank, x.last) if of_one and how in _AGAIN else None
    if rest:  # `x.mean(3).mean(2)`: all of it at once
        net.spared.update(rest)
        places = space
    if places == channels and not keepdim and not x.last and x.kind in ("map", "image"):
        back = _takers(node, how)
        if back and all(u.target in (torch.unsqueeze, "unsqueeze") and arguments(u, "dim").get("dim") == 1 for u in back):
            net.spared.update(back)  # `x.mean(1).unsqueeze(1)`
            keepdim = True
    if places not in (channels, space, channels | space) or not places or (places >= channels and not keepdim):
        remedy = (
            f"take it over all {net.group.dim} axes of space, or over the channels with keepdim=True; for norms there are "
            "nn.LayerNorm of the channels, permuted to the end, and nn.GroupNorm(1, C)"
        )
        raise net.refusal(f"{node.name}, a {how} over axes {dims},", x, OF_SAMPLES if places == {0} else remedy)
    over = (*(1,) * (places >= channels), *range(-net.group.dim * (places >= space), 0)) if space else (1,)
    named = {k: v for k, v in named.items() if k in ("p", "unbiased", "correction", "dtype")}
    if how == "norm" and named.get("p") in (None, "fro"):
        named["p"] = 2  # the same, for any number of axes
    how = {"max": "amax", "min": "amin"}.get(how, how)
    if space and places >= space and not net.group.fills_box:
        x = _over_domain(net, f"{node.name}, a {how} over space,", how, x, over, keepdim, named)
    else:
        x = x.anew(net.graph.call_method(how, (x.node,), {"dim": over, "keepdim": keepdim, **named}))
    if places >= channels:
        x = replace(x, old=min(x.old, 1), new=min(x.new, 1))
    if not space or not places >= space:
        return x
    if keepdim:
        return replace(x, single=True)
    return replace(x, kind="other" if x.kind == "image" else "fibre", last=False, axes=0)


def _over_domain(
    net: Converter, what: str, how: str, x: Value, over: tuple[int, ...], keepdim: bool, options: dict[str, Any]
) -> Value:
    """A reduction over the hexagon that the group maps to itself."""
    name, channels = f"{net.present.name}_domain", over[0] == 1
    if how in ("std", "var"):
        correction = options.get("unbiased", options.get("correction"))  # None means 1
        made = VarianceInside(net.group, channels, keepdim, 1.0 if correction is None else float(correction), how == "std")
        return net.insert(name, made, x)
    if how == "mean":
        y = net.insert(name, GAdaptiveAvgPool(net.group, 1), x)
        return y.anew(net.graph.call_method(how, (y.node,), {"dim": over, "keepdim": keepdim, **options}))
    p = options.get("p", 2)
    if not isinstance(p, int | float) or not p >= 0:
        remedy = f"{net.group} maps hexagons, where norms are known that zeros do not change: those of a number p from 0 on"
        raise net.refusal(what, x, remedy)
    return net.insert(name, ReduceSpace(net.group, how, channels, keepdim, **options), x)


_AGAIN = {"mean", "sum", "amax", "amin", "max", "min"}  # axis by axis they are what they are over all


def _takers(node: fx.Node, how: str) -> list[fx.Node]:
    """What takes the result of a reduction; of `max` and `min`, which give places too, what takes the numbers."""
    if how not in ("max", "min"):
        return list(node.users)
    return [user for item in node.users if item.users for user in (item.users if item.args[1:] == (0,) else [item])]


def _goes_on(node: fx.Node, how: str, rank: int, last: bool) -> list[fx.Node] | None:
    """The further reductions, if every user of one over an axis of space takes the same again until space is used up."""
    found: list[fx.Node] = []
    nodes = [node]
    for now in range(rank - 1, 2, -1):  # axes that are left
        nodes = [user for n in nodes for user in _takers(n, how)]
        space = range(1, now - 1) if last else range(2, now)
        for user in nodes:
            named = arguments(user, "dim", "keepdim")
            place = named.get("dim")
            same = str(getattr(user.target, "__name__", user.target)) == how and set(named) <= {"dim"}
            if not same or not isinstance(place, int) or place % now not in space:
                return None
        found += nodes
    return found if found and nodes else None


def _largest(net: Converter, node: fx.Node, x: Value) -> Value:
    """The larger of two; or a maximum along axes, which torch returns with its places, and those do not turn with the image."""
    second = arguments(node, "dim").get("dim")
    if not isinstance(second, int):
        return net.pointwise(node, pointwise=isinstance(second, fx.Node))
    return Value([_reduced(net, node, x)], "parts")


def _normalised(net: Converter, node: fx.Node, x: Value) -> Value:
    """Channels as vectors of length 1: those of every element, or, where nothing is learned after it, of the result."""
    x = net.vector(x)
    named = arguments(node, "p", "dim", "eps")
    if not net.along_channels(x, named.get("dim", 1)):
        raise net.refusal(f"{node.name}, a normalize along axis {named.get('dim', 1)},", x, "take it over the channels, axis 1")
    x = replace(net.pooled(x), last=x.last) if node in net.ends else x
    return x.anew(net.graph.call_function(F.normalize, (x.node, named.get("p", 2.0), 1, named.get("eps", 1e-12))))


def _is_slice(index: Any) -> bool:
    return isinstance(index, slice) and index != slice(None)


def _window(net: Converter, node: fx.Node, x: Value, cuts: tuple[slice, ...]) -> Value:
    """Every so many places, as a strided convolution takes them, and a window that both ends are cut from alike."""
    what, known = f"{node.name}, a call of getitem,", "y[:, :, ::2, ::2] and y[:, :, 1:-1, 1:-1] are known"
    starts, stops, steps = [c.start or 0 for c in cuts], [c.stop or 0 for c in cuts], [c.step or 1 for c in cuts]
    if (
        not all(isinstance(n, int) for n in (*starts, *stops, *steps))
        or starts != [-n for n in stops]
        or min(*starts, *steps) < 0
    ):
        raise net.refusal(what, x, f"cut both ends alike along all axes, {known}; or use a convolution with a stride, or AvgPool")
    try:
        check_axes(net.group, "the start", starts)
        check_axes(net.group, "the step", steps)
    except ValueError as error:
        raise net.refusal(what, x, f"{error}; {known}") from None
    if net.group.fills_box:
        index: Any = (..., *cuts)
        y = net.graph.call_function(operator.getitem, (x.node, index))
    elif any(starts):
        raise net.refusal(
            what, x, f"a window of a box is no hexagon, and {net.group} maps those; use a convolution without padding"
        )
    elif net.in_place and copy_matters(net.model, node):
        raise net.refusal(f"{what} of which a part is changed in place,", x, "change nothing in place")
    else:
        y = net.graph.call_module(net.add(node.name, GSubsample(net.group, tuple(steps))), (x.node,))
    return replace(x, node=y, single=x.single and not any(starts), memory="unknown")


def _cat(net: Converter, node: fx.Node, x: Value) -> Value:
    tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
    dim: Any = arguments(node, "dim").get("dim", 0)
    if isinstance(tensors, fx.Node) and net.value(tensors).kind != "parts":
        return net.pointwise(node, pointwise=False)
    parts = net.value(tensors).node if isinstance(tensors, fx.Node) else [net.value(t) for t in tensors]
    if any(p.kind in ("fibre", "flat") for p in parts) and any(p.kind == "other" and not net.waits(p) for p in parts):
        parts = _beside_vectors(net, node, [net.vector(p) for p in parts])
    if any(p.kind == "fibre" for p in parts):
        parts = [net.vector(p) for p in parts]
    kinds = {(p.kind, p.last) for p in parts}
    if kinds == {("image", False), ("map", False)}:
        parts = [p if p.kind == "map" else net.lifted(node.name, p) for p in parts]
    elif kinds == {("other", False)}:
        return net.pointwise(node, pointwise=False)
    elif len(kinds) > 1 or not (net.along_channels(parts[0], dim) or (parts[0].kind == "flat" and dim in (1, -1))):
        told = ", ".join(p.kind for p in parts)
        raise ValueError(
            f"convert: {node.name} concatenates {told} along axis {dim}; values of one kind can be, along the "
            "channels, axis 1, and images with maps"
        )
    if not net.along_channels(parts[0], dim) and parts[0].kind != "flat":
        raise ValueError(f"convert: {node.name} concatenates along axis {dim}; the channels are axis 1")
    found = net.graph.call_function(torch.cat, ([p.node for p in parts], 1))
    old, new = (sum(p.old for p in parts), sum(p.new for p in parts)) if all(p.old for p in parts) else (0, 0)
    memory: Any = "unknown" if any(p.memory for p in parts) else ""
    return replace(parts[0], node=found, old=old, new=new, memory=memory, narrowed=False)


def _beside_vectors(net: Converter, node: fx.Node, parts: list[Value]) -> list[Value]:
    """Functions on the group, and beside them a vector (N, M) that is not of the image: the same on every element.

    How long it is, the linear layer after it tells.
    """
    user: Any = node
    while len(user.users) == 1:
        (user,) = user.users
        module = module_of(net.model, user)
        if isinstance(module, nn.Linear):
            break
        if not isinstance(module, POINTWISE_MODULES) and user.target not in (POINTWISE_FUNCTIONS | POINTWISE_METHODS):
            return parts
    known = [p for p in parts if p.kind == "fibre" and p.old]
    others = [p for p in parts if p.kind == "other"]
    module = module_of(net.model, user)
    if not isinstance(module, nn.Linear) or len(others) != 1 or len(known) + 1 != len(parts):
        return parts
    length = module.in_features - sum(p.old for p in known)
    repeated = net.graph.call_method("unsqueeze", (others[0].node, 2))
    repeated = net.graph.call_method("expand", (repeated, -1, -1, net.group.order))
    return [p if p.kind == "fibre" else replace(p, node=repeated, kind="fibre", old=length, new=length) for p in parts]


OF_ANYTHING: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropout),
    **dict.fromkeys(("to", "type_as"), axes.moved),
}

OPERATIONS: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys(FUNCTIONAL_POOLS, _pool),
    **dict.fromkeys((getattr, "size", "dim"), axes.shape_of),
    **dict.fromkeys((torch.flatten, "flatten"), axes.flattened),
    **dict.fromkeys(("view", "reshape", torch.reshape), axes.viewed),
    **dict.fromkeys((torch.mean, torch.amax, torch.amin, torch.sum, torch.std, torch.var, torch.norm, torch.logsumexp), _reduced),
    **dict.fromkeys(("mean", "amax", "amin", "sum", "std", "var", "norm", "logsumexp"), _reduced),
    **dict.fromkeys((torch.max, torch.min, "max", "min"), _largest),
    **dict.fromkeys((torch.squeeze, "squeeze"), axes.squeezed),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), axes.unsqueezed),
    **dict.fromkeys((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), _adaptive_max),
    F.normalize: _normalised,
    **dict.fromkeys((torch.permute, "permute"), axes.permuted),
    **dict.fromkeys(("expand_as", "contiguous"), axes.unchanged),
    **dict.fromkeys(("expand", "repeat"), axes.repeated),
    **dict.fromkeys((torch.transpose, torch.swapaxes, "transpose", "swapaxes"), axes.transposed),
    F.glu: _glu,
    **dict.fromkeys((F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, "softmax", "log_softmax"), _softmax),
    **dict.fromkeys((torch.chunk, torch.split, "chunk", "split"), _split),
    **dict.fromkeys((torch.channel_shuffle, F.channel_shuffle), _shuffled),
    operator.getitem: _item,
    F.interpolate: _interpolate,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _group_norm,
    F.pad: _pad,
}
