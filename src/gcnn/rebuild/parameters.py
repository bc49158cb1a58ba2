"""Parameters, and functions of parameters alone: they stay nodes of the old network until it is known what they meet."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gcnn.rebuild.graph import changes
from gcnn.rebuild.values import RESHAPES, Value, attribute, is_constant
from gcnn.tracing import POINTWISE_FUNCTIONS, POINTWISE_METHODS, POINTWISE_MODULES, module_of

if TYPE_CHECKING:
    from gcnn.rebuild.converter import Converter

_DRAWING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.RReLU)
# what gives the same numbers at every call, and tensors of its own or views: names of torch, of its methods, or of both
_BOTH = (
    *("softmax", "log_softmax", "sum", "mean", "amax", "amin", "max", "min", "std", "var", "norm", "prod", "logsumexp", "cumsum"),
    *("squeeze", "chunk", "split", "unbind", "permute", "transpose", "movedim", "narrow", "select", "unflatten", "flip", "roll"),
    *("broadcast_to", "repeat_interleave", "rsqrt", "reciprocal", "clamp_min", "clamp_max", "cosh", "sinh", "round", "floor"),
    *("floor_divide", "lerp", "addcmul", "where", "matmul", "outer", "dot", "t", "gt", "lt", "ge", "le"),
)
_PURE = (POINTWISE_FUNCTIONS | POINTWISE_METHODS | RESHAPES) - {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d} | {
    *_BOTH,
    *(getattr(torch, name) for name in _BOTH),
    *(F.softmax, F.log_softmax, F.normalize, torch.stack, torch.einsum, torch.linalg.norm, torch.linalg.vector_norm),
    *("expand", "expand_as", "view_as", "repeat", operator.floordiv, operator.matmul, operator.gt, operator.lt),
}


def of_parameters(net: Converter, node: fx.Node) -> Value | None:
    """A function of parameters alone, which waits as they do; a number of Python that it gives is known; None for others."""
    waiting = [n for n in node.all_input_nodes if net.waits(net.value(n))]
    if not waiting or not all(n in waiting or _is_number(net, n) for n in node.all_input_nodes):
        return None
    attribute_ = node.args[1] if node.target is getattr else ""
    if node.target in ("size", "dim", "numel") or attribute_ in ("shape", "ndim", "dtype"):
        found = computed(net, node)
        return Value(tuple(found) if isinstance(found, torch.Size) else found, "size")
    if (node.target not in _PURE and attribute_ not in ("T", "mT")) or _changed(net, node):
        return None
    return Value(node) if isinstance(computed(net, node), Tensor | tuple | list) else None


def waits_for(net: Converter, node: fx.Node, module: nn.Module) -> bool:
    """Whether a layer without numbers of its own, called on a parameter, may wait as that does."""
    known = (*POINTWISE_MODULES, nn.Softmax, nn.LogSoftmax, nn.Flatten, nn.Unflatten)
    pure = isinstance(module, known) and not isinstance(module, _DRAWING)
    return pure and not _changed(net, node)


def _changed(net: Converter, node: fx.Node) -> bool:
    """Whether a node changes something in place, or it or what it gets is changed: then it must be one tensor for all."""
    around = [user for n in (node, *node.all_input_nodes) for user in n.users if user.args[:1] == (n,)]
    return any(changes(net.model, n) for n in (node, *around))


def _waiting(net: Converter, node: fx.Node) -> fx.Node:
    """The node that stands for this one: a parameter that goes to another dtype or device stays itself."""
    value = net.values.get(node)
    return value.node if value is not None and net.waits(value) else node


def computed(net: Converter, node: fx.Node) -> Any:
    """What a function of parameters alone gives in the old network."""
    node = _waiting(net, node)
    if node not in net.numbers:
        net.numbers[node] = _computed(net, node)
    return net.numbers[node]


def _computed(net: Converter, node: fx.Node) -> Any:
    if _is_number(net, node):
        return net.value(node).node
    if node.op == "get_attr":
        return attribute(net.model, str(node.target))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: computed(net, n))
    how: Any = node.target
    if node.op == "call_module":
        how = net.model.get_submodule(str(node.target))
    elif node.op == "call_method":
        how = getattr(type(args[0]), str(node.target))
    device = next(net.model.parameters()).device
    with torch.no_grad(), torch.device(device), torch.random.fork_rng(devices=[]):
        return how(*args, **kwargs)


def _is_number(net: Converter, node: fx.Node) -> bool:
    """Whether this is a number, or a shape, that is known before the network runs: the number of channels, say."""
    x = net.values.get(node)
    return x is not None and x.kind == "size" and isinstance(x.node, int | float | tuple)


def emitted(net: Converter, node: fx.Node) -> Any:
    """The same function of the same parameters in the new network, once for all that it meets."""
    node = _waiting(net, node)
    if node not in net.emitted:
        net.emitted[node] = _emitted(net, node)
    return net.emitted[node]


def _emitted(net: Converter, node: fx.Node) -> Any:
    if _is_number(net, node):
        return net.value(node).node
    if node.op == "get_attr":
        return net.parameter(str(node.target), attribute(net.model, str(node.target)))
    if node.op == "call_module":
        name = str(node.target)
        module = net.model.get_submodule(name)
        made = net.add(name, net.layer(name, module, lambda: net.copied(module)))
        return net.graph.call_module(made, *fx.map_arg((node.args, node.kwargs), lambda n: emitted(net, n)))
    return net.graph.node_copy(node, lambda n: emitted(net, n))


def number(net: Converter, node: fx.Node) -> fx.Node:
    """A parameter of one number, or a function that gives one, without axes."""
    base = _base(net, node)
    if base is not None:
        return net.parameter(str(base.target), computed(net, base).reshape(()))
    return net.graph.call_method("reshape", (emitted(net, node), ()))


def spread(net: Converter, value: Value, like: Value) -> fx.Node:
    """A parameter of one number a channel, (C, 1, ...), as one number a G-feature map, (K, 1, 1, ...)."""
    node, held = value.node, net.held(value)
    what = told(net, node)
    if not isinstance(held, Tensor):
        raise ValueError(f"convert: {what} gives several tensors; take one of them before it meets a map")
    if held.numel() == 1:
        return number(net, node)
    space = () if like.last else (1,) * (net.rank(like) - 2)
    # (C, 1) beside channels at the end, or (C, 1, 1, 1) beside maps, has a number a row, or a sample
    by_channel = held.ndim > len(space) and held.shape[held.ndim - len(space) - 1 :] == (held.numel(), *space)
    if like.kind == "image" and by_channel:
        base = _base(net, node)
        found = emitted(net, node) if base is None else net.parameter(str(base.target), held)
        # the channels of a result that are to go to the end are still where they were
        return net.graph.call_method("reshape", (found, (-1, *(1,) * net.group.dim))) if like.last else found
    if not by_channel or held.numel() != like.old or like.kind == "image":
        met = "an image" if like.kind == "image" else f"a map of {like.old} channels"
        raise ValueError(f"convert: {what} of shape {tuple(held.shape)} meets {met}; one number, or one a channel, is known")
    # channels that were permuted to the end are where they were
    shape = (like.new, *(1,) * (net.group.dim + 1 if like.kind in ("map", "line") else 1))
    if _base(net, node) is None and like.new == like.old:
        return net.graph.call_method("reshape", (emitted(net, node), shape))
    return _by_channel(net, node, like, shape)


def _by_channel(net: Converter, node: fx.Node, like: Value, shape: tuple[int, ...]) -> fx.Node:
    """The function of numbers, of parameters that have as many as there are channels now."""
    node = _waiting(net, node)
    if (node, shape) not in net.spread:
        net.spread[node, shape] = _by_channel_anew(net, node, like, shape)
    return net.spread[node, shape]


def _by_channel_anew(net: Converter, node: fx.Node, like: Value, shape: tuple[int, ...]) -> fx.Node:
    held, what = computed(net, node), told(net, node)
    if held.numel() == 1:
        return number(net, node)
    if node.op == "get_attr":
        if is_constant(node) and like.new != like.old and not torch.all(held == held.flatten()[0]):
            raise ValueError(
                f"convert: {what} has a number for each of {like.old} channels, of which {like.new} are left; make it an "
                'nn.Parameter, which may be drawn anew, or use keep="channels"'
            )
        numbers = held.flatten().repeat(math.ceil(like.new / held.numel()))[: like.new]
        return net.parameter(str(node.target), numbers.reshape(shape))
    inputs = [n for n in node.all_input_nodes if not _is_number(net, n)]
    known = all(isinstance(h := computed(net, n), Tensor) and h.numel() in (1, held.numel()) for n in inputs)
    if known and _reshapes(net, node):
        return _by_channel(net, inputs[0], like, shape)
    module = module_of(net.model, node)
    if not known or not (isinstance(module, POINTWISE_MODULES) or node.target in (POINTWISE_FUNCTIONS | POINTWISE_METHODS)):
        raise ValueError(
            f"convert: {what} is computed from all of {like.old} channels, of which {like.new} are left; functions number by "
            'number are known, or use keep="channels"'
        )
    nodes: dict[fx.Node, Any] = {n: net.value(n).node for n in node.all_input_nodes}
    nodes |= {n: _by_channel(net, n, like, shape) for n in inputs}
    if module is not None:
        made = net.add(str(node.target), net.layer(str(node.target), module, lambda: net.copied(module)))
        return net.graph.call_module(made, *fx.map_arg((node.args, node.kwargs), lambda n: nodes[n]))
    return net.graph.node_copy(node, lambda n: nodes[n])


def _reshapes(net: Converter, node: fx.Node) -> bool:
    """Whether a node gives another shape to the numbers that it gets."""
    inputs = [n for n in node.all_input_nodes if not _is_number(net, n)]
    if node.target not in RESHAPES or len(inputs) != 1:
        return False
    before = computed(net, inputs[0])
    if not isinstance(before, Tensor):
        return False
    with torch.device("cpu"):
        order = torch.arange(before.numel())  # parameters may hold one number many times
    how: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    after = how(order.reshape(before.shape), *net.known(node.args[1:]), **net.known(node.kwargs))
    return torch.equal(after.flatten(), order)


def _base(net: Converter, node: fx.Node) -> fx.Node | None:
    """The parameter of which this is another shape; None if it is more than that."""
    node = _waiting(net, node)
    while node.op != "get_attr":
        if not _reshapes(net, node):
            return None
        (node,) = (_waiting(net, n) for n in node.all_input_nodes if not _is_number(net, n))
    return node


def told(net: Converter, node: fx.Node) -> str:
    """What an error calls this."""
    base = _base(net, node)
    if base is None:
        return f"{node.name}, a function of parameters,"
    return "the tensor made there" if is_constant(base) else f"the parameter {base.target}"
