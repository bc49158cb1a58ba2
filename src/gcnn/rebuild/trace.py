"""How a user's forward is traced by torch.fx, and what of it is refused since tracing would lose it."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from gcnn.rebuild.values import BY_SAMPLE, NORMS_THAT_ACT, attribute, is_constant, of_torch
from gcnn.tracing import InPlaceProxy, Tracer, reached


def images_of(example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs that an example stands for."""
    return example if isinstance(example, tuple) else (example,)


def inputs_for(model: nn.Module, example: Tensor | tuple[Tensor, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The inputs on the device of a network, and in its dtype or another, but for whole numbers."""
    like = next(model.parameters())
    return [t.to(like.device, (dtype or like.dtype) if t.is_floating_point() else None) for t in images_of(example)]


class RefusedError(ValueError):
    """What neither tracing nor a replacement of modules may take."""


def traced(model: nn.Module, example: Tensor | tuple[Tensor, ...] | None, looked: list[bool]) -> tuple[fx.Graph, dict[str, bool]]:
    """The graph of a forward, and which dropouts work in either mode, or in none; `looked` grows where sizes are asked for."""
    modes = {m: m.training for m in model.modules()}
    arguments = list(inspect.signature(model.forward).parameters.values())
    if arguments and arguments[0].kind is inspect.Parameter.VAR_POSITIONAL:
        several = arguments[0].name
        raise TypeError(f"its forward takes *{several}, any number of inputs; name those that it gets, forward(self, x, y)")
    graphs = []
    before = _random_states()
    try:
        for training in (True, False):
            model.train(training)
            with no_own_gradients(model), _no_autocast(model):
                tracer = _Tracer(example, looked)
                graph = tracer.trace(model)
                for node in reversed(list(graph.nodes)):
                    if node in tracer.asked and not node.users:
                        graph.erase_node(node)
                graphs.append(graph)
    finally:
        for m, mode in modes.items():
            m.training = mode
    train, test = graphs
    if _told(train) != _told(test):
        raise RefusedError(
            f"{type(model).__name__} does different things in training and in eval mode, which one network cannot; convert the "
            "part that does not, or write the rest as a module of its own (DropPath and StochasticDepth are known)"
        )
    for a, b in zip(train.nodes, test.nodes, strict=True):
        if is_constant(a) and not torch.equal(attribute(model, a.target), attribute(model, b.target)):
            raise RefusedError(
                f"{a.meta['place']} makes a tensor with other numbers in every call, which tracing would fix; give it to the "
                "network as an input, or write it as a module of its own (Dropout, DropPath and StochasticDepth are known)"
            )
    if _random_states() != before:
        raise RefusedError(
            f"{type(model).__name__} draws random numbers in its forward, outside of modules that are known for it, and tracing "
            "would keep what it met once; write that as a module of its own (Dropout, DropPath and StochasticDepth are known)"
        )
    told = {a.name: [n.kwargs.get("training") for n in (a, b)] for a, b in zip(train.nodes, test.nodes, strict=True)}
    return train, {name: ways[0] for name, ways in told.items() if ways[0] is not None and ways[0] == ways[1]}


def _told(graph: fx.Graph) -> list[tuple[str, str, str]]:
    """What the nodes of a graph do, whatever the mode of dropouts; torch.fx numbers constants on between traces."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        kwargs = {k: v for k, v in node.kwargs.items() if k != "training"}
        arguments: Any = fx.map_arg((node.args, kwargs), lambda n: number[n])
        found.append((node.op, "a constant" if is_constant(node) else str(node.target), repr(arguments)))
    return found


def _random_states() -> tuple[Any, ...]:
    """Where the random numbers of Python, numpy and torch are."""
    state: Any = np.random.get_state()  # noqa: NPY002 (that of the functions of old, which users call)
    return random.getstate(), state[2], state[1].tolist(), torch.get_rng_state().tolist()


class _Proxy(InPlaceProxy):
    """A value on the device of the network, so that `torch.tensor(mean, device=x.device)` is a constant, which moves with it."""

    def __getattr__(self, k: str) -> Any:
        tracer: Any = self.tracer
        return next(tracer.root.parameters()).device if k == "device" else super().__getattr__(k)

    def __len__(self) -> int:
        parts, tracer = _parts_of(self.node), self.tracer
        if parts is None:
            place = _place(getattr(tracer, "names", {}))
            raise RuntimeError(f"len(x) of a tensor is not known before it runs; write x.size(0) (in {place})")
        if isinstance(tracer, _Tracer):
            tracer.looked.append(True)
        return parts

    def __setitem__(self, index: Any, numbers: Any) -> None:
        place = _place(getattr(self.tracer, "names", {}))
        raise RuntimeError(f"{place} assigns to a part of a tensor, x[...] = ..., which is not traced; use F.relu or clamp")


def _made_of_sizes(node: fx.Node) -> set[fx.Node] | None:
    """The nodes between the tensors and a number that depends on their sizes alone; None if it depends on more."""
    of_shape = node.target in ("size", "dim") or (node.target is getattr and node.args[1] in ("shape", "ndim"))
    if of_shape:
        return {node}
    python = node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
    if not python or not node.all_input_nodes:
        return None
    found = {node}
    for each in node.all_input_nodes:
        before = _made_of_sizes(each)
        if before is None:
            return None
        found |= before
    return found


def _computed(node: fx.Node, model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> Any:
    """What a node of a graph that is being traced is for the example."""
    given = iter(inputs_for(model, example))
    needed = set(reached([node], lambda n: n.all_input_nodes))
    run = fx.Interpreter(fx.GraphModule(model, fx.Graph()))
    run.module = model
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _untraced():
        for each in node.graph.nodes:
            if each.op == "placeholder":
                run.env[each] = next(given, each.args[0] if each.args else None)
            elif each in needed:
                run.env[each] = run.run_node(each)
    return run.env[node]


@contextmanager
def _untraced() -> Iterator[None]:
    """With modules that are called as ever, in the middle of a trace."""
    kind: Any = nn.Module
    before, trace = (kind.__call__, kind.__getattr__), torch.fx._symbolic_trace
    kind.__call__, kind.__getattr__ = trace._orig_module_call, trace._orig_module_getattr
    try:
        yield
    finally:
        kind.__call__, kind.__getattr__ = before


def _parts_of(node: fx.Node) -> int | None:
    """How many parts `x.chunk(3, 1)` or `x.split([2, 1], 1)` is asked for."""
    asked: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks", node.kwargs.get("split_size", 0))
    if node.target in (torch.chunk, "chunk") and isinstance(asked, int):
        return asked
    return len(asked) if node.target in (torch.split, "split") and isinstance(asked, list | tuple) else None


class _Tracer(Tracer):
    def __init__(self, example: Tensor | tuple[Tensor, ...] | None, looked: list[bool]) -> None:
        super().__init__()
        self.looked = looked
        self.graded = torch.is_grad_enabled()
        self.names: dict[int, str] = {}
        self.example = example
        self.asked: set[fx.Node] = set()  # what branches on sizes have looked at

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = type(m).__name__ in BY_SAMPLE | NORMS_THAT_ACT or (of_torch(m) and not isinstance(m, nn.Sequential))
        return known or super().is_leaf_module(m, module_qualified_name)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """The parts of a map, `for part in x.chunk(3, 1)`: as many as are asked for."""
        whole: Any = obj
        parts = _parts_of(obj.node)
        if parts is None and obj.node.target in (torch.split, "split"):
            place = _place(self.names)
            raise fx.proxy.TraceError(f"{place} splits a map in parts whose number is not known; use chunk(number, 1)")
        return super().iter(obj) if parts is None else iter([whole[i] for i in range(parts)])

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Which way a branch on sizes goes: the way of the example. Others cannot be traced."""
        sizes = _made_of_sizes(obj.node)
        if self.example is None or sizes is None:
            return super().to_bool(obj)
        found = _computed(obj.node, copy.deepcopy(self.root).eval(), self.example)
        self.asked |= sizes
        self.looked.append(True)
        return bool(found)

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        """Calls as torch.fx takes them; `torch.tensor(mean, dtype=x.dtype)` as a constant that goes to that dtype."""
        like, options = kwargs.get("dtype"), {k: v for k, v in kwargs.items() if k != "dtype"}
        makes, numbers = target in (torch.tensor, torch.as_tensor) and isinstance(like, fx.Proxy), args
        if target == "new_tensor" and like is None:
            makes, like, numbers = True, args[0], args[1:]
            options = {"device": next(self.root.parameters()).device} | options
        if makes and not any(isinstance(each, fx.Proxy | Tensor) for each in tree_leaves((numbers, options))):
            made = _constant(next(self.root.parameters()).dtype, *numbers, **options)
            return super().create_proxy("call_method", "to", (made, like), {}, *rest, **more)
        return super().create_proxy(kind, target, args, kwargs, *rest, **more)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self.names = self.names or _names(self.root)
        if torch.is_grad_enabled() != self.graded:
            raise RefusedError(
                f"{_place(self.names)} switches gradients off, which tracing would lose; use requires_grad_(False)"
            )
        node = super().create_node(*args, **kwargs)
        if (caller := _caller_of_checkpoint()) is not None:
            node.meta["checkpoint"] = _place(self.names, caller)
        if node.op in ("call_function", "call_method", "get_attr"):
            node.meta["place"] = _place(self.names)
        return node


def _constant(dtype: torch.dtype, *numbers: Any, **options: Any) -> Tensor:
    """A tensor of these numbers in a dtype; whole numbers that it cannot hold stay whole."""
    made, known = torch.tensor(*numbers, **options | {"dtype": dtype}), torch.tensor(*numbers, **options)
    return made if known.is_floating_point() or torch.equal(made.to(known.dtype), known) else known


@contextmanager
def _no_autocast(model: nn.Module) -> Iterator[None]:
    """Refuses torch.autocast inside of a forward, on or off: tracing would lose it."""
    kind: Any = torch.autocast
    names, ours, before = _names(model), threading.get_ident(), kind.__enter__

    def refuse(self: Any) -> Any:
        if threading.get_ident() != ours:  # somebody else's work
            return before(self)
        raise RefusedError(f"{_place(names)} uses torch.autocast, which tracing would lose; use it around the network")

    kind.__enter__ = refuse
    try:
        yield
    finally:
        kind.__enter__ = before


@contextmanager
def no_own_gradients(model: nn.Module) -> Iterator[None]:
    """Refuses torch.autograd.Functions of others: tracing would lose their backward, and no check of a forward sees it."""
    module: Any = torch._functorch.utils
    names, ours = _names(model), threading.get_ident()
    before = module.unwrap_dead_wrappers  # every Function's apply asks it first, one that was bound to a name before, too

    def refuse(args: Any) -> Any:
        if threading.get_ident() != ours:  # somebody else's work
            return before(args)
        function = sys._getframe(1).f_locals.get("cls")
        traced = any(isinstance(a, fx.Proxy) for a in tree_leaves(args))
        if traced and function is torch.utils.checkpoint.CheckpointFunction:
            raise RefusedError(
                f"{_place(names)} uses torch.utils.checkpoint with use_reentrant=True, which cannot be traced; with "
                "use_reentrant=False it can"
            )
        if traced or not getattr(function, "__module__", "").startswith("torch."):
            raise RefusedError(
                f"{_place(names)} calls {getattr(function, '__name__', 'one')}, a torch.autograd.Function, whose gradient is not "
                "known for maps on a group; write it with functions of torch, or convert the parts before and after it"
            )
        return before(args)

    module.unwrap_dead_wrappers = refuse
    try:
        yield
    finally:
        module.unwrap_dead_wrappers = before


def _names(model: nn.Module) -> dict[int, str]:
    return {id(m): name for name, m in model.named_modules()}


def _caller_of_checkpoint() -> Any:
    """The frame that calls torch.utils.checkpoint, if what runs is called by that."""
    frame: Any = sys._getframe(1)
    found = None
    while frame is not None:
        ours = frame.f_code.co_filename == torch.utils.checkpoint.__file__
        found, frame = frame.f_back if ours else found, frame.f_back
    return found


def _place(names: dict[int, str], frame: Any = None) -> str:
    """The module whose forward is running, and the line of code: `layer1.0 (Block, net.py:12)`."""
    frame = frame or sys._getframe(1)
    line = ""
    while frame is not None:
        line = line or _line(frame)
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" else None
        if id(module) in names:
            first, *rest = (part for part in (names[id(module)], type(module).__name__, line) if part)
            return f"{first} ({', '.join(rest)})" if rest else first
        frame = frame.f_back
    return "its forward"


def _line(frame: Any) -> str:
    """`net.py:12`, if the code is the user's."""
    file = frame.f_code.co_filename
    package = Path(__file__).parents[1]
    ours = (
        str(Path(torch.__file__).parent),
        str(package / "rebuild"),
        str(package / "convert.py"),
        str(package / "tracing.py"),
        "<",
    )
    return "" if file.startswith(ours) else f"{Path(file).name}:{frame.f_lineno}"
