"""What a traced graph tells before it is rebuilt: which layers are heads, and which inputs are images."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gcnn.nn import GAvgPool, GMaxPool
from gcnn.rebuild.values import (
    ADAPTIVE,
    AVG_POOLS,
    CONVS,
    FUNCTIONAL_POOLS,
    INSTANCE_NORMS,
    MAX_POOLS,
    NORMS,
    PADS,
    TRANSPOSED,
    attribute,
    makes_record,
)
from gcnn.tracing import ALIASES, IN_PLACE, POINTWISE_FUNCTIONS, POINTWISE_METHODS, POINTWISE_MODULES, module_of, reached

# what images may go through, or meet each other in, on the way to a convolution
_MEETING = (torch.cat, torch.concat, torch.concatenate, operator.getitem, "expand", "repeat")
_VIEWS = {
    *(operator.getitem, torch.permute, torch.transpose, torch.swapaxes, torch.reshape, torch.flatten, torch.squeeze),
    *(torch.unsqueeze, torch.chunk, torch.split, "permute", "transpose", "swapaxes", "reshape", "view", "flatten", "squeeze"),
    *("unsqueeze", "chunk", "split", "expand", "expand_as", "contiguous"),
}


def heads(model: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """The names of the layers with weights that nothing but pointwise functions and the like separates from the result."""

    def following(node: fx.Node) -> Iterable[fx.Node]:
        module = module_of(model, node)
        weighs = isinstance(module, (*CONVS, *TRANSPOSED, nn.Linear)) and getattr(module, "groups", 1) == 1
        return () if weighs else node.all_input_nodes  # grouped ones keep their channels

    results = dict.fromkeys(n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes)
    for node in reached(results, following):
        if isinstance(module_of(model, node), (*CONVS, *TRANSPOSED, nn.Linear)):
            yield str(node.target)


def meets_maps(model: nn.Module, node: fx.Node) -> bool:
    """Whether what a layer gives meets, on its way to the result, what a convolution gave: then it is no answer by itself."""
    after = set(reached([node], lambda n: [u for u in n.users if u.op != "output" and not makes_record(u.target)]))
    likes = ("to", "type_as")  # these ask their second argument for its kind alone
    met = [u.all_input_nodes[:1] if u.target in likes else u.all_input_nodes for u in after - {node}]

    def following(before: fx.Node) -> Iterable[fx.Node]:
        module = module_of(model, before)
        of_shape = before.target == "size" or (before.target is getattr and before.args[1] != "values")
        return () if of_shape or isinstance(module, nn.Linear) else before.all_input_nodes

    others = reached([n for nodes in met for n in nodes if n not in after], following)
    kinds = (*CONVS, *TRANSPOSED)
    return any(isinstance(module_of(model, n), kinds) for n in others)


def ends(model: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """The nodes after which no layer with parameters comes."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        weighs = [
            u.op == "call_module" and any(True for _ in model.get_submodule(str(u.target)).parameters()) for u in node.users
        ]
        if not any(weighs) and found.issuperset(node.users):
            found.add(node)
    return found


def feeds_layers(model: nn.Module, node: fx.Node) -> bool:
    """Whether a convolution or a linear layer comes after this."""
    kinds = (*CONVS, *TRANSPOSED, nn.Linear)
    after = reached(node.users, lambda n: n.users)
    return any(isinstance(module_of(model, n), kinds) for n in after)


def changes(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node changes a tensor in place."""
    module = module_of(model, node)
    return node.target in IN_PLACE or bool(node.kwargs.get("inplace")) or bool(getattr(module, "inplace", False))


def copy_matters(model: nn.Module, node: fx.Node) -> bool:
    """Whether a later change in place tells if this call has made a copy, or has given back the tensor that it got."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    first: Any = node.args[0]
    while _may_be_same(model, first):
        first = first.args[0]
    own, others = _same_as(model, node), _same_as(model, first, node)
    for here, there in ((own, others), (others, own)):
        changed = [order[n] for n in here if order[n] > order[node] and changes(model, n)]
        if changed and any(order[user] > min(changed) for n in there for user in n.users):
            return True
    return False


def _may_be_same(model: nn.Module, node: fx.Node) -> bool:
    """Whether what a node gives may be the memory of its first argument."""
    kept = isinstance(module_of(model, node), nn.Identity | nn.Dropout)
    return bool(node.args) and (kept or changes(model, node) or node.target in ALIASES or node.target in _VIEWS)


def _same_as(model: nn.Module, node: fx.Node, but: fx.Node | None = None) -> set[fx.Node]:
    """The nodes whose memory may be that of a node."""

    def following(before: fx.Node) -> Iterable[fx.Node]:
        return (u for u in before.users if u is not but and u.args[:1] == (before,) and _may_be_same(model, u))

    return set(reached([node], following))


def from_pool(model: nn.Module, node: Any) -> bool:
    """Whether functions of single numbers and reshapes alone come between a pool of a fixed size and this."""
    passed = (*POINTWISE_MODULES, nn.Flatten)
    while isinstance(node, fx.Node) and node.op != "placeholder":
        module = module_of(model, node)
        if isinstance(module, (*MAX_POOLS, *AVG_POOLS)) or FUNCTIONAL_POOLS.get(node.target) in (GMaxPool, GAvgPool):
            return True
        reshaped = node.target in ("view", "reshape", "flatten", "squeeze", torch.reshape, torch.flatten, torch.squeeze)
        if not (isinstance(module, passed) or reshaped or (module is None and _pointwise(node))):
            return False
        node = node.args[0] if node.args else None
    return False


def leads_to_results(node: fx.Node) -> bool:
    """Whether nothing but functions of this value alone stands between it and the results of the network."""
    return all(
        user.op == "output"
        or ((len(user.all_input_nodes) == 1 or makes_record(user.target)) and bool(user.users) and leads_to_results(user))
        for user in node.users
    )


def images(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, int]:
    """The inputs that are images, and how many channels they have if that is known: those that lead to a convolution."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    found: dict[fx.Node, int] = {}
    for start in given:

        def following(node: fx.Node, start: fx.Node = start) -> Iterable[fx.Node]:
            if isinstance(module_of(model, node), CONVS):
                return ()
            meets = node.target in _MEETING or (node.op != "call_module" and _pointwise(node) and _of_inputs_alone(node))
            return node.users if node is start or meets or _passes(model, node) else ()

        for node in reached([start], following):
            module = module_of(model, node)
            if isinstance(module, CONVS):
                direct = node.args[:1] == (start,) or _channels_stay(model, node.args[0], start)
                found[start] = max(found.get(start, 0), module.in_channels if direct else 0)
    return found or dict.fromkeys(given[:1], 0)


def _passes(model: nn.Module, node: fx.Node) -> bool:
    """Whether this is a function of one image that gives an image with the same channels; a parameter may spread a single one."""
    if len([n for n in node.all_input_nodes if n.op != "get_attr"]) != 1:
        return False
    if node.op == "call_module":
        kinds = (*POINTWISE_MODULES, *NORMS, *INSTANCE_NORMS, nn.GroupNorm, *MAX_POOLS, *AVG_POOLS, *ADAPTIVE, nn.Upsample)
        return isinstance(model.get_submodule(str(node.target)), (*kinds, *(kind for pads in PADS for kind in pads)))
    return _pointwise(node) or node.target in (*FUNCTIONAL_POOLS, F.interpolate, F.pad)


def _of_inputs_alone(node: fx.Node) -> bool:
    """Whether no layer comes before this."""
    return not any(n.op == "call_module" for n in reached(node.all_input_nodes, lambda n: n.all_input_nodes))


def _pointwise(node: fx.Node) -> bool:
    return node.target in POINTWISE_FUNCTIONS or node.target in POINTWISE_METHODS


def _channels_stay(model: nn.Module, node: Any, start: fx.Node) -> bool:
    while isinstance(node, fx.Node) and node is not start and _passes(model, node):
        if any(n.op == "get_attr" and _spreads(model, n) for n in node.all_input_nodes):
            return False
        node = next(n for n in node.all_input_nodes if n.op != "get_attr")
    return node is start


def _spreads(model: nn.Module, node: fx.Node) -> bool:
    """Whether an image of one channel that meets this parameter gets more: it may then have had one."""
    held = attribute(model, str(node.target))
    return not isinstance(held, Tensor) or held.numel() > 1
