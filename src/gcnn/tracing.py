"""What `planar` and `convert` share, which trace networks by torch.fx and rebuild them.

The modules, functions and methods that work number by number, and so on maps as on images, and need no version of ours; how a
graph is walked; what becomes of arguments and results.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

# number by number, and 0 at 0: cells outside a hexagonal domain need no clearing until something reads them
KEEP_ZERO_MODULES = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh),
    *(nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.RReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
KEEP_ZERO: set[Any] = {
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.hardswish, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.relu6, F.tanh, F.softsign, F.selu, F.celu, torch.relu, torch.tanh, torch.square, torch.sqrt, torch.abs, torch.neg),
    *(torch.sin, operator.neg, "relu", "relu_", "tanh", "square", "sqrt", "abs", "neg", "contiguous", "clone", "detach"),
    *("float", "double", "half", "bfloat16", "to", "log1p", torch.log1p, torch.relu_, F.leaky_relu_, F.elu_, torch.tanh_),
    *(torch.erf, torch.sign, torch.expm1, torch.atan, torch.arctan, F.softshrink, F.hardshrink, F.tanhshrink, "tanh_", "erf"),
    *("sign", "expm1", "atan", "arctan", "sin", "neg_", "abs_"),
    *(torch.asinh, torch.arcsinh, torch.sinh, torch.atanh, torch.arctanh, torch.asin, torch.arcsin, torch.tan, torch.nan_to_num),
    *(torch.floor, torch.ceil, torch.round, torch.trunc, torch.frac, torch.absolute, torch.negative),
    *("asinh", "arcsinh", "sinh", "atanh", "arctanh", "asin", "arcsin", "tan", "nan_to_num", "floor", "ceil", "round", "trunc"),
    *("frac", "absolute", "negative", torch.deg2rad, torch.rad2deg, "deg2rad", "rad2deg"),
}
KEEP_ZERO_OF_TWO: set[Any] = {
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, operator.add, operator.sub, operator.mul, operator.iadd),
    *(operator.isub, operator.imul, "add", "add_", "sub", "sub_", "mul", "mul_", torch.hypot, "hypot"),
}
ALIASES = {"detach", "to", "float", "double", "half", "bfloat16", "type_as"}  # which may give back the tensor itself
IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, "relu_", "add_", "sub_", "mul_", "div_", "clamp_", "clip_"),
    *(torch.relu_, F.leaky_relu_, F.elu_, torch.tanh_, torch.sigmoid_, "tanh_", "sigmoid_", "exp_", "neg_", "abs_"),
    *("clamp_min_", "clamp_max_"),
}
POINTWISE_MODULES = (*KEEP_ZERO_MODULES, nn.Hardtanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Hardsigmoid, nn.Threshold)
POINTWISE_FUNCTIONS = {f for f in KEEP_ZERO | KEEP_ZERO_OF_TWO if not isinstance(f, str)} | {
    *(F.softplus, F.hardsigmoid, F.hardtanh, F.sigmoid, F.logsigmoid, torch.sigmoid, torch.div, torch.pow, torch.exp, torch.log),
    *(torch.clamp, torch.clip, torch.cos, torch.sigmoid_, F.threshold, torch.threshold, operator.truediv, operator.pow),
    *(operator.itruediv, torch.rsqrt, torch.reciprocal, torch.clamp_min, torch.clamp_max, torch.log2, torch.log10, torch.exp2),
    *(torch.cosh, torch.acos, torch.arccos, torch.logit),
}
POINTWISE_METHODS = {f for f in KEEP_ZERO | KEEP_ZERO_OF_TWO if isinstance(f, str)} | {
    *("sigmoid", "sigmoid_", "div", "div_", "pow", "exp", "exp_", "log", "cos", "clamp", "clamp_", "clip", "clip_", "type_as"),
    *("clamp_min_", "clamp_max_", "rsqrt", "reciprocal", "clamp_min", "clamp_max", "log2", "log10", "exp2", "cosh", "acos"),
    *("arccos", "logit"),
}


TRACING = threading.RLock()
"""Held while tracing: torch.fx and our own patches change torch for all threads until the trace is done."""


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """The nodes `starts` of a graph and all that `following` leads to from them, each once."""
    waiting = list(starts)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = [n for n in following(node) if n not in seen]
        seen.update(new)
        waiting += new


def leaves(result: Any) -> list[Any]:
    """What a network returns, one by one; dataclasses are opened, too."""
    found = []
    for leaf in tree_leaves(result):
        opened = is_dataclass(leaf) and not isinstance(leaf, type)
        found += [each for f in fields(leaf) for each in leaves(getattr(leaf, f.name))] if opened else [leaf]
    return found


def module_of(model: nn.Module, node: fx.Node) -> nn.Module | None:
    """The module that a node calls, if it calls one."""
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def check_names(model: nn.Module, graph: fx.Graph, caller: str) -> None:
    """Raises a ValueError where the graph needs a part of the network whose name torch.fx's modules keep for themselves."""
    for name in {str(node.target).partition(".")[0] for node in graph.nodes if node.op in ("call_module", "get_attr")}:
        if name in ("meta", "_graph") or hasattr(fx.GraphModule, name):
            raise ValueError(
                f"{caller}: {type(model).__name__}.{name} has a name that the modules of torch.fx keep for themselves; give "
                "nn.Sequential(net), or another name"
            )


class InPlaceProxy(fx.Proxy):
    """A value that is traced with its changes in place.

    torch.fx would make sums of `x += y`, and another name of the same tensor would miss the change.
    """

    def _in_place(self, operation: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)


class Tracer(fx.Tracer):
    """Traces a forward whose arguments have their defaults, but for the first `given`."""

    given = 1

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """The arguments that tracing begins with; torch.fx's own way returns a list where a default is a tuple."""
        root_fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        arguments = list(inspect.signature(self.root.forward).parameters.values())[self.given :]
        usual = {p.name: p.default for p in arguments if p.default is not inspect.Parameter.empty}
        for i, arg in enumerate(args):
            if isinstance(arg, fx.Proxy) and arg.node.target in usual:
                self.graph.erase_node(arg.node)
                args[i] = usual[arg.node.target]
        return root_fn, args
