"""`convert(model, group)`: an ordinary network of torch made equivariant, layer by layer, in one call.

The network is traced by torch.fx and rebuilt: the first convolution lifts its image to the group, further ones are
G-correlations, norms are tied over the group, pools and upsampling stay in space, and the group is pooled before the head. The
rebuilding is in `gcnn.rebuild`; here is what goes before it, and what is done where torch.fx fails.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from gcnn.functional import act
from gcnn.groups import Group
from gcnn.nn import CosetPool
from gcnn.pointwise import InPlaceProxy
from gcnn.rebuild import Converter, Value
from gcnn.rebuild.layers import MODULES
from gcnn.rebuild.values import BY_SAMPLE, CONVS, NORMS_THAT_ACT, TRANSPOSED, attribute, is_constant, of_torch
from gcnn.testing import explain

__all__ = ["convert"]

Keep = Literal["params", "channels", "cost"]


def convert(
    model: nn.Module,
    group: Group,
    keep: Keep = "params",
    pool: Literal["mean", "max"] | None = "mean",
    weights: bool = False,
    example: Tensor | tuple[Tensor, ...] | None = None,
) -> nn.Module:
    """The equivariant version of an ordinary network, freshly drawn, with modules of the same names.

    Takes networks that torch.fx can trace, of convolutions of the group's dimension, norms, pools, upsampling, pointwise
    functions, sums, concatenations and linear heads; what it cannot convert is an error that names the module. Others, whose
    `forward` branches, have their modules replaced one by one if an `example` image is given to try them on. Arguments of
    `forward` that have defaults keep those, and are not taken any more.

    - `keep`: "params" divides widths by about sqrt(S), so that the number of parameters stays (the paper's rule), "channels"
      leaves them, "cost" divides by S, which keeps the time.
    - `pool`: over the group, before the last linear layer, or at the end where the result is an image; None leaves the result on
      the group.
    - `weights`: start from the old network's weights, each filter placed on the identity element. The new network then computes
      the old one on every transformed copy of the image at once, and with pool="mean" its answer is the mean of those answers, if
      nothing but linear functions follow the last layer. Needs keep="channels".
    - `example`: an image (N, C, *X), or a tuple of them for several inputs, on which every tensor of the result is checked: an
      error if a stride or the like breaks the symmetry there.

    >>> from gcnn import p4
    >>> head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    >>> net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), *head)
    >>> turned = convert(net, p4)
    >>> turned(torch.rand(2, 1, 9, 9)).shape
    torch.Size([2, 10])
    >>> turned.get_submodule("0"), turned.get_submodule("2")
    (LiftConv(p4, 1, 8, kernel_size=(3, 3)), GConv(p4, 8, 8, kernel_size=(3, 3)))
    """
    if not isinstance(group, Group):
        raise TypeError(f"convert: expected a Group, such as gcnn.p4m or GROUPS['p4m'], got {group!r}")
    _check_options(model, group, keep, pool, weights, example)
    if isinstance(model, (*CONVS, *TRANSPOSED)):  # one layer
        model = nn.Sequential(model).train(model.training)
    if example is not None:
        _try_on(model, example)
    factor = {"params": group.order**-0.5, "channels": 1.0, "cost": 1 / group.order}[keep]
    whole, model = model, _own_copy(model)
    try:
        graph, fixed = _traced(model, example)
    except _RefusedError as error:
        raise ValueError(f"convert: {error}") from None
    except Exception as error:  # whatever the user's forward does with a proxy
        if example is None:
            raise ValueError(
                f"convert: torch.fx cannot trace {type(model).__name__}: {error}. Give an example image, and its modules are "
                "replaced one by one; or convert the parts between the branches of its forward, one at a time"
            ) from error
        one_by_one = _Replacer(whole, group, pool, weights)
        factor = _fitted(one_by_one, factor) if keep == "params" else factor
        made_so = _replaced(one_by_one, factor, example)
        _with_modes_of(whole, made_so if pool is None or not isinstance(made_so, nn.Sequential) else made_so[0])
        _checked(made_so, whole, group, pool, example)
        if weights and pool == "mean":
            _check_mean(made_so, whole, group, example)
        return made_so
    build = Converter(model, graph, group, pool, weights, fixed)
    if keep == "params":
        factor = _fitted(build, factor)
    made = build.at(factor)
    _with_modes_of(model, made)
    if weights:
        asked = {name: p.requires_grad for name, p in model.named_parameters()}
        for name, p in made.named_parameters():
            p.requires_grad_(asked.get(name, p.requires_grad))
    return made if example is None else _checked(made, whole, group, pool, example, build.axes)


def _with_modes_of(model: nn.Module, made: nn.Module) -> None:
    """Training or eval mode, module by module."""
    made.train(model.training)
    modules = dict(made.named_modules())
    for name, module in model.named_modules():
        if name in modules:
            modules[name].training = module.training


def _check_options(model: nn.Module, group: Group, keep: Keep, pool: str | None, weights: bool, example: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: expected an nn.Module, got {model!r}")
    if keep not in ("params", "channels", "cost"):
        raise ValueError(f'convert: keep must be "params", "channels" or "cost", got {keep!r}')
    if pool not in ("mean", "max", None):
        raise ValueError(f'convert: pool must be "mean", "max" or None, got {pool!r}')
    if weights and keep != "channels":
        raise ValueError(f'convert: weights=True needs all of the channels, keep="channels", got keep={keep!r}')
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"convert: the network is inside a {type(model).__name__}; convert model.module, and wrap the result")
    if hasattr(model, "_orig_mod"):
        raise ValueError("convert: the network is compiled already; convert model._orig_mod, and compile the result")
    for name, m in model.named_modules():
        if any(nn.parameter.is_lazy(p) for p in m.parameters(recurse=False)):
            raise ValueError(f"convert: {name} ({type(m).__name__}) does not know its sizes yet; run the network once first")
    owners: dict[int, str] = {}
    for name, m in model.named_modules():
        for last, p in m.named_parameters(recurse=False):
            first = owners.setdefault(id(p), f"{name}.{last}")
            if first != f"{name}.{last}":
                raise ValueError(
                    f"convert: {first} and {name}.{last} are one parameter, and would become two; call one module twice instead"
                )
    if any(hasattr(m, "group") and isinstance(m.group, Group) for m in model.modules()):
        raise ValueError(f"convert: {type(model).__name__} has layers on a group already")
    for name, m in model.named_modules():
        if parametrize.is_parametrized(m) or getattr(m, "_forward_hooks", None) or getattr(m, "_forward_pre_hooks", None):
            raise ValueError(
                f"convert: {name or type(model).__name__} ({type(m).__name__}) has hooks or computed weights (spectral_norm, "
                "weight_norm ...), which would be lost; remove them first, and put them on the result"
            )
    dims = {d for m in model.modules() for d, kind in enumerate(CONVS, 1) if isinstance(m, kind)}
    if not dims:
        raise ValueError(f"convert: {type(model).__name__} has no convolution: there is nothing to make equivariant")
    if dims != {group.dim}:
        several = " and ".join(f"Conv{d}d" for d in sorted(dims))
        raise ValueError(
            f"convert: {type(model).__name__} has {several}, {group} has dimension {group.dim}; "
            + (f"take a group of dimension {max(dims)}" if len(dims) == 1 else "convert the parts of one dimension alone")
        )
    given = () if example is None else _images(example)
    for image in given:
        if not isinstance(image, Tensor):
            raise TypeError(f"convert: expected an example image, or a tuple of them for several inputs, got {image!r}")
    pictures = [image for image in given if image.ndim == group.dim + 2]
    if given and not (pictures and all(image.is_floating_point() for image in pictures)):
        raise ValueError(f"convert: expected an example image with {group.dim + 2} axes, got {_shapes(given)}")
    if len({(len(x), *x.shape[2:]) for x in pictures}) > 1:
        raise ValueError(
            f"convert: example images of several inputs are checked together, and must be of one size, got {_shapes(example)}"
        )


def _own_copy(model: nn.Module) -> nn.Module:
    """A copy to trace: a forward may change what its modules hold, and tracing leaves constants there."""
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError):  # it holds something that cannot be copied
        return copy.copy(model)


def _images(example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return example if isinstance(example, tuple) else (example,)


def _shapes(example: Tensor | tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(image.shape)) for image in _images(example))


def _try_on(model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> None:
    """Runs a copy of the user's network on the example, in either mode, and refuses what tracing would not have seen."""
    model, like = copy.deepcopy(model), next(model.parameters())
    images = [image.to(like.device, like.dtype if image.is_floating_point() else None) for image in _images(example)]
    for training in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _no_own_gradients(model):
                model.train(training)(*(torch.cat([image] * (1 + training)) for image in images))  # norms in training want two
        except _RefusedError as error:
            raise ValueError(f"convert: {error}") from None
        except Exception as error:  # whatever the user's forward does
            if not training:
                raise ValueError(f"convert: the network fails on the example {_shapes(example)}: {error}") from error


def _fitted(build: Converter | _Replacer, factor: float) -> float:
    """The factor at which the new network has about as many parameters as the old one."""
    wanted = build.parameters()
    off: dict[float, float] = {}
    for step in range(20):
        with torch.device("meta"):
            found = sum(p.numel() for p in build.at(factor).parameters())
        off[factor] = abs(math.log(found / wanted))
        best = min(off, key=lambda f: off[f])
        if off[best] < 0.01 or (step > 5 and off[best] < 0.05):
            break
        factor = factor * (wanted / found) ** 0.5 if step < 4 else best * (1 + 0.03 * (step - 3) * (-1) ** step)
    unit = getattr(build, "unit", 0)
    if unit and off[best] > math.log(1.25):
        raise ValueError(
            f"convert: widths whose sums stay sums are multiples of 1/{unit} of the old ones, and none of them has about {wanted} "
            'parameters; use keep="channels"'
        )
    return best


def _without_channels(x: Tensor) -> tuple[int, ...]:
    """A shape, without the channels: those of features that are not learned to the end change."""
    return (*x.shape[:1], *x.shape[2:]) if x.ndim > 1 else tuple(x.shape)


def _checked(
    made: nn.Module,
    model: nn.Module,
    group: Group,
    pool: str | None,
    example: Tensor | tuple[Tensor, ...],
    axes: Sequence[str] = (),
) -> nn.Module:
    """The network, unless something that it returns is not equivariant on the example; `axes` tells where channels are."""
    like = next(made.parameters())
    given = [image.to(like.device, like.dtype if image.is_floating_point() else None) for image in _images(example)]
    pictures = [image for image in given if image.ndim == group.dim + 2]
    x, inputs = torch.cat(pictures, 1), _Inputs(given, group.dim + 2)
    try:
        with torch.no_grad():
            result = copy.deepcopy(made).eval()(*inputs(x))
    except Exception as error:
        raise ValueError(f"convert: the converted network fails on the example {_shapes(example)}: {error}") from error
    results, alone = tree_leaves(result), isinstance(result, Tensor) and len(given) == 1 and not any(axes)
    if pool is not None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = tree_leaves(copy.deepcopy(model).eval()(*inputs(x)))
        for i, (y, was) in enumerate(zip(results, before, strict=True)):
            moved = bool(axes) and axes[i] != ""
            if isinstance(was, Tensor) and not moved and _without_channels(y) != _without_channels(was):
                raise ValueError(
                    f"convert: on the example the network returns {tuple(was.shape)}, and the converted one {tuple(y.shape)}"
                    + (f", number {i} of its results" if len(results) > 1 else "")
                    + "; it reshapes a map in a way that is not known: flatten(1), means over space and views (N, C, 1, 1) are"
                )
    for i, y in enumerate(results):
        if isinstance(y, Tensor) and y.is_floating_point():
            found = explain(made if alone else _One(made, inputs, i, axes[i] if axes else ""), x, group)
            if not found.exact:
                which = "" if len(results) == 1 else f", number {i} of the {len(results)} tensors that it returns,"
                raise ValueError(f"convert: at this size the result{which} is not equivariant:\n{found}")
    return made


def _check_mean(made: nn.Module, model: nn.Module, group: Group, example: Tensor | tuple[Tensor, ...]) -> None:
    """Refuses a network whose modules were replaced and which does not compute the mean of the old one's answers.

    The code between its modules sees maps with one axis more, and no other check knows what it makes of it.
    """
    images = [image.to(next(model.parameters()).device).double() for image in _images(example)]  # whatever its precision
    old, answers = copy.deepcopy(model).double().eval(), []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = copy.deepcopy(made).double().eval()(*images)
        for h in range(group.order):
            moved = tree_leaves(old(*(act(group, h, image) for image in images)))
            back = int(group.inverse[h])
            answers.append([act(group, back, y) if isinstance(y, Tensor) and y.ndim == group.dim + 2 else y for y in moved])
    for y, *each in zip(tree_leaves(found), *answers, strict=True):
        if not isinstance(y, Tensor) or not y.is_floating_point():
            continue
        mean = torch.stack(each).mean(0)
        if y.shape == mean.shape and (y - mean).abs().max() <= 1e-3 * mean.abs().max():
            continue
        raise ValueError(
            f"convert: {type(model).__name__} cannot be traced by torch.fx, and with its modules replaced its answers are not "
            "the mean of the old ones over the group: the code between the modules asks for sizes or axes, of which maps on a "
            "group have more, or works on the answers. Convert the parts between its branches, or use weights=False"
        )


class _Inputs:
    """What a network takes, from all of its images along the channels of one; other inputs stay what they are."""

    def __init__(self, given: list[Tensor], rank: int) -> None:
        self.given, self.rank = given, rank

    def __call__(self, x: Tensor) -> list[Tensor]:
        parts = iter(x.split([t.shape[1] for t in self.given if t.ndim == self.rank], 1))
        return [next(parts) if t.ndim == self.rank else t for t in self.given]


class _One(nn.Module):
    """One of the tensors that a network returns, with its channels along axis 1."""

    def __init__(self, net: nn.Module, inputs: _Inputs, which: int, axes: str) -> None:
        super().__init__()
        self.net, self.inputs, self.which, self.axes = net, inputs, which, axes

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = tree_leaves(self.net(*self.inputs(x)))[self.which]
        return found.movedim(-1, 1) if self.axes == "last" else found.unsqueeze(1) if self.axes == "squeezed" else found


class _RefusedError(ValueError):
    """What neither tracing nor a replacement of modules may take."""


def _traced(model: nn.Module, example: Tensor | tuple[Tensor, ...] | None) -> tuple[fx.Graph, dict[str, bool]]:
    """The graph of a forward, and which dropouts are at work in either mode, or in none."""
    modes = {m: m.training for m in model.modules()}
    arguments = list(inspect.signature(model.forward).parameters.values())[1:]
    usual = {p.name: p.default for p in arguments if p.default is not inspect.Parameter.empty}
    graphs = []
    before = _random_states()
    try:
        for training in (True, False):
            model.train(training)
            with _no_own_gradients(model), _no_autocast(model):
                tracer = _Tracer(example)
                graph = _without_defaults(tracer.trace(model, concrete_args=usual or None), usual)
                for node in reversed(list(graph.nodes)):
                    if node in tracer.asked and not node.users:
                        graph.erase_node(node)
                graphs.append(graph)
    finally:
        for m, mode in modes.items():
            m.training = mode
    train, test = graphs
    if _told(train) != _told(test):
        raise _RefusedError(
            f"{type(model).__name__} does different things in training and in eval mode, which one network cannot; convert the "
            "part that does not, or write the rest as a module of its own (DropPath and StochasticDepth are known)"
        )
    for a, b in zip(train.nodes, test.nodes, strict=True):
        if is_constant(a) and not torch.equal(attribute(model, a.target), attribute(model, b.target)):
            raise _RefusedError(
                f"{a.meta['place']} makes a tensor with other numbers in every call, which tracing would fix; give it to the "
                "network as an input, or write it as a module of its own (Dropout, DropPath and StochasticDepth are known)"
            )
    if _random_states() != before:
        raise _RefusedError(
            f"{type(model).__name__} draws random numbers in its forward, outside of modules that are known for it, and tracing "
            "would keep what it met once; write that as a module of its own (Dropout, DropPath and StochasticDepth are known)"
        )
    told = {a.name: [n.kwargs.get("training") for n in (a, b)] for a, b in zip(train.nodes, test.nodes, strict=True)}
    return train, {name: ways[0] for name, ways in told.items() if ways[0] is not None and ways[0] == ways[1]}


def _told(graph: fx.Graph) -> list[tuple[str, str, str]]:
    """What the nodes of a graph do, whatever the mode of dropouts; tensors made in a forward are numbered on between traces."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        kwargs = {k: v for k, v in node.kwargs.items() if k != "training"}
        arguments: Any = fx.map_arg((node.args, kwargs), lambda n: number[n])
        found.append((node.op, "a constant" if is_constant(node) else str(node.target), repr(arguments)))
    return found


def _without_defaults(graph: fx.Graph, usual: dict[str, Any]) -> fx.Graph:
    """The graph without arguments that have defaults, and what tracing writes to refuse others."""
    for node in list(graph.nodes):
        name, _, number = str(node.target).rpartition("_")
        if node.op == "placeholder" and name in usual and number.isdigit():
            for user in list(node.users):
                for last in list(user.users):
                    graph.erase_node(last)
                graph.erase_node(user)
            graph.erase_node(node)
    return graph


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
        parts = _parts_of(self.node)
        return super().__len__() if parts is None else parts


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
    like = next(model.parameters())
    given = iter(image.to(like.device, like.dtype if image.is_floating_point() else None) for image in _images(example))
    needed, waiting = {node}, [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in needed]
        needed.update(new)
        waiting += new
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


class _Tracer(fx.Tracer):
    def __init__(self, example: Tensor | tuple[Tensor, ...] | None) -> None:
        super().__init__()
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
        return super().iter(obj) if parts is None else iter([whole[i] for i in range(parts)])

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Which way a branch on sizes goes: the way of the example. Others cannot be traced."""
        sizes = _made_of_sizes(obj.node)
        if self.example is None or sizes is None:
            return super().to_bool(obj)
        found = _computed(obj.node, copy.deepcopy(self.root).eval(), self.example)
        self.asked |= sizes
        return bool(found)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self.names = self.names or _names(self.root)
        if torch.is_grad_enabled() != self.graded:
            raise _RefusedError(
                f"{_place(self.names)} switches gradients off, which tracing would lose; use requires_grad_(False)"
            )
        node = super().create_node(*args, **kwargs)
        if node.op in ("call_function", "call_method", "get_attr"):
            node.meta["place"] = _place(self.names)
        return node


@contextmanager
def _no_autocast(model: nn.Module) -> Iterator[None]:
    """Refuses torch.autocast inside of a forward, on or off: tracing would lose it."""
    kind: Any = torch.autocast
    names, ours, before = _names(model), threading.get_ident(), kind.__enter__

    def refuse(self: Any) -> Any:
        if threading.get_ident() != ours:  # somebody else's work
            return before(self)
        raise _RefusedError(f"{_place(names)} uses torch.autocast, which tracing would lose; use it around the network")

    kind.__enter__ = refuse
    try:
        yield
    finally:
        kind.__enter__ = before


@contextmanager
def _no_own_gradients(model: nn.Module) -> Iterator[None]:
    """Refuses torch.autograd.Functions of others: tracing would lose their backward, and no check of a forward sees it."""
    module: Any = torch._functorch.utils
    names, ours = _names(model), threading.get_ident()
    before = module.unwrap_dead_wrappers  # every Function's apply asks it first, one that was bound to a name before, too

    def refuse(args: Any) -> Any:
        if threading.get_ident() != ours:  # somebody else's work
            return before(args)
        function = sys._getframe(1).f_locals.get("cls")
        traced = any(isinstance(a, fx.Proxy) for a in tree_leaves(args))
        if traced or not getattr(function, "__module__", "").startswith("torch."):
            raise _RefusedError(
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


def _place(names: dict[int, str]) -> str:
    """The module whose forward is running, and the line of code: `layer1.0 (Block, net.py:12)`."""
    frame: Any = sys._getframe(1)
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
    ours = (str(Path(torch.__file__).parent), __file__, str(Path(__file__).with_name("pointwise.py")), "<")
    return "" if file.startswith(ours) else f"{Path(file).name}:{frame.f_lineno}"


# --- where tracing fails -------------------------------------------------------------------------------------------------------


class _Replacer:
    """Replaces the modules of a network one by one, as a `Converter` rebuilds a traced one."""

    def __init__(self, model: nn.Module, group: Group, pool: Literal["mean", "max"] | None, weights: bool) -> None:
        self.model, self.pool = model, pool
        self.leaves = [(name, m) for name, m in model.named_modules() if not list(m.children()) and name]
        self.last = [name for name, m in self.leaves if isinstance(m, (*CONVS, *TRANSPOSED, nn.Linear))][-1]
        self.shell = Converter.__new__(Converter)
        self.shell.model, self.shell.group, self.shell.pool, self.shell.weights = model, group, None, weights
        self.shell.heads = self.shell.final = {self.last}
        self.shell.multiple, self.shell.unit = 1, 0
        if pool is None and isinstance(model.get_submodule(self.last), nn.Linear):
            raise ValueError("convert: a network that torch.fx cannot trace needs pool=")

    def parameters(self) -> int:
        """How many parameters the network has."""
        return sum(p.numel() for p in self.model.parameters())

    def at(self, factor: float) -> nn.Module:
        """A copy of the network with widths multiplied by `factor`."""
        made, lifted = copy.deepcopy(self.model), False
        self.shell.factor = factor
        for name, module in self.leaves:
            parent, _, last = name.rpartition(".")
            setattr(made.get_submodule(parent), last, self._new(name, module, lifted))
            lifted = lifted or isinstance(module, CONVS)
        if self.pool is None or isinstance(made.get_submodule(self.last), _Head):
            return made
        return nn.Sequential(made, CosetPool(self.shell.group, reduce=self.pool))

    def _new(self, name: str, module: nn.Module, lifted: bool) -> nn.Module:
        shell = self.shell
        shell.graph, shell.root, shell.made, shell.values = fx.Graph(), nn.Module(), {}, {}
        if name == self.last and isinstance(module, nn.Linear):
            width, pool = max(1, round(module.in_features * shell.factor)), self.pool
            head: Any = shell.layer(name, module, lambda: _Head(shell.group, module, width, pool))
            if shell.weights:
                head.linear.load_state_dict(module.state_dict())
                for mine, theirs in zip(head.linear.parameters(), module.parameters(), strict=True):
                    mine.requires_grad_(theirs.requires_grad)
            return head
        channels = getattr(module, "in_channels", getattr(module, "num_features", getattr(module, "num_channels", 0)))
        x = Value(shell.graph.placeholder("x"), "map" if lifted else "image", channels, max(1, round(channels * shell.factor)))
        for kinds, handle in MODULES.items():
            if isinstance(module, kinds) and not of_torch(module):
                raise ValueError(
                    f"convert: {name} is a {type(module).__name__}, whose forward is its own; write it with torch's layers"
                )
            along_axes = nn.Linear | nn.Flatten | nn.Softmax | nn.LogSoftmax | nn.Softmax2d | nn.GLU
            if isinstance(module, kinds) and not isinstance(module, along_axes):
                handle(shell, name, module, x)
                break
        found = shell.made.get(name) or next((m for n, m in shell.root.named_modules() if n == name), None)
        return found or copy.deepcopy(module)


def _replaced(build: _Replacer, factor: float, example: Tensor | tuple[Tensor, ...]) -> nn.Module:
    """The network with its modules replaced, tried on the example."""
    made = build.at(factor)
    like = next(made.parameters())
    try:
        with torch.no_grad():
            images = [t.to(like.device, like.dtype if t.is_floating_point() else None) for t in _images(example)]
            copy.deepcopy(made).eval()(*images)
    except Exception as error:
        raise ValueError(
            f"convert: {type(build.model).__name__} cannot be traced by torch.fx, and with its modules replaced it fails: "
            f"{error}. Convert the parts between the branches of its forward, one at a time"
        ) from error
    return made.train(build.model.training)


class _Head(nn.Module):
    """The last linear layer, after pooling over the group what a forward has flattened, (N, K S)."""

    def __init__(self, group: Group, linear: nn.Linear, channels: int, pool: str | None) -> None:
        super().__init__()
        self.order, self.channels, self.pool = group.order, channels, pool
        self.linear = nn.Linear(channels, linear.out_features, linear.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] not in ((self.channels * self.order,), (self.channels, self.order)):
            raise ValueError(
                f"expected functions on the group, (N, {self.channels}, {self.order}) or flat, got {tuple(x.shape)}; flatten(1) "
                "after a pool to a single place is known"
            )
        functions = x.reshape(len(x), self.channels, self.order)
        return self.linear(functions.mean(2) if self.pool == "mean" else functions.amax(2))
