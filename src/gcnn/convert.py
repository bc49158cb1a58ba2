"""`convert(model, group)`: an ordinary network of torch made equivariant, layer by layer, in one call.

The network is traced by torch.fx and rebuilt: the first convolution lifts its image to the group, further ones are
G-correlations, norms are tied over the group, pools and upsampling stay in space, and the group is pooled before the head. The
rebuilding is in `gcnn.rebuild`; here is what goes before it, and what is done where torch.fx fails.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from gcnn.functional import act
from gcnn.groups import GROUPS, Group
from gcnn.nn import CosetPool
from gcnn.nn.each import PooledLinear
from gcnn.rebuild import Converter, Value
from gcnn.rebuild.layers import MODULES
from gcnn.rebuild.trace import RefusedError, images_of, inputs_for, no_own_gradients, traced
from gcnn.rebuild.values import CONVS, TRANSPOSED, of_torch
from gcnn.testing import explain
from gcnn.tracing import TRACING, leaves, reached

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
    if isinstance(model, Group):
        raise TypeError(f"convert: expected the network first, convert(net, {model}), got the group")
    if not isinstance(group, Group):
        named = next((name for name in GROUPS if name.lower() == str(group).lower()), "p4m")
        raise TypeError(f"convert: expected a Group, such as gcnn.GROUPS[{named!r}], got {group!r}")
    with TRACING:
        return _converted(model, group, keep, pool, weights, example)


def _converted(
    model: nn.Module,
    group: Group,
    keep: Keep,
    pool: Literal["mean", "max"] | None,
    weights: bool,
    example: Tensor | tuple[Tensor, ...] | None,
) -> nn.Module:
    _check_options(model, group, keep, pool, weights, example)
    if isinstance(model, (*CONVS, *TRANSPOSED)):  # one layer
        model = nn.Sequential(model).train(model.training)
    if example is not None:
        _try_on(model, example)
    factor = {"params": group.order**-0.5, "channels": 1.0, "cost": 1 / group.order}[keep]
    whole, model = model, _own_copy(model)
    graph, looked = None, list[bool]()
    try:
        graph, fixed = traced(model, example, looked)
        build = Converter(model, graph, group, pool, weights, fixed)
        fitted = _fitted(build, factor) if keep == "params" else factor
        made = build.at(fitted)
        if keep == "cost" and build.unit:
            made = _at_a_fraction(build, made, factor)
    except Exception as error:  # ValueErrors are ours; others are whatever the user's forward does with a proxy
        ours = isinstance(error, ValueError) and (isinstance(error, RefusedError) or str(error).startswith("convert: "))
        refused = ValueError(f"convert: {error}") if isinstance(error, RefusedError) else error
        if ours and (example is None or not looked):
            raise refused from None
        if graph is not None and not ours:
            raise
        if example is None:
            raise ValueError(
                f"convert: torch.fx cannot trace {type(model).__name__}: {error}. Give an example image, and its modules are "
                "replaced one by one; or convert the parts between the branches of its forward, one at a time"
            ) from error
        try:
            return _one_by_one(whole, group, keep, pool, weights, example, factor)
        except ValueError:
            if ours:
                raise refused from None
            raise
    recomputed = next((node.meta["checkpoint"] for node in graph.nodes if "checkpoint" in node.meta), None)
    if recomputed is not None:
        warnings.warn(
            f"convert: {recomputed} uses torch.utils.checkpoint, which tracing does not keep: training takes the memory that it "
            "takes without. Convert the parts one by one and checkpoint those, which pools over the group between them; or put "
            "torch.autograd.graph.save_on_cpu() around the new network",
            stacklevel=3,
        )
    _with_modes_of(model, made)
    asked = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, p in made.named_parameters():
        p.requires_grad_(asked.get(name, p.requires_grad) if weights else p.is_floating_point() or p.is_complex())
    return made if example is None else _checked(made, whole, group, pool, example, build.axes)


def _one_by_one(
    model: nn.Module,
    group: Group,
    keep: Keep,
    pool: Literal["mean", "max"] | None,
    weights: bool,
    example: Tensor | tuple[Tensor, ...],
    factor: float,
) -> nn.Module:
    """The network with its modules replaced, since it cannot be traced."""
    one_by_one = _Replacer(model, group, pool, weights, example)
    factor = _fitted(one_by_one, factor) if keep == "params" else factor
    made = _replaced(one_by_one, factor, example)
    _with_modes_of(model, made if pool is None or not isinstance(made, nn.Sequential) else made[0])
    for p in () if weights else made.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
    _checked(made, model, group, pool, example, heads=one_by_one)
    if weights and pool == "mean":
        _check_mean(made, model, group, example)
    return made


def _with_modes_of(model: nn.Module, made: nn.Module) -> None:
    """Training or eval mode, module by module."""
    made.train(model.training)
    modules = dict(made.named_modules())
    for name, module in model.named_modules():
        if name in modules:
            modules[name].training = module.training


def _check_options(model: nn.Module, group: Group, keep: Keep, pool: str | None, weights: bool, example: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: expected an nn.Module, got {type(model).__name__}; weights alone go into their network first")
    if keep not in ("params", "channels", "cost"):
        raise ValueError(f'convert: keep must be "params", "channels" or "cost", got {keep!r}')
    if pool not in ("mean", "max", None):
        raise ValueError(f'convert: pool must be "mean", "max" or None, got {pool!r}')
    if not isinstance(weights, bool):
        raise TypeError(f"convert: weights must be True or False, got {weights!r}; load a file into the old network first")
    if weights and keep != "channels":
        raise ValueError(f'convert: weights=True needs all of the channels, keep="channels", got keep={keep!r}')
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"convert: the network is inside a {type(model).__name__}; convert model.module, and wrap the result")
    if hasattr(model, "_orig_mod"):
        raise ValueError("convert: the network is compiled already; convert model._orig_mod, and compile the result")
    for name, m in model.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(
                f"convert: {name or 'the network'} ({m.original_name}) is scripted or traced by torch.jit, and its code cannot "
                "be rebuilt; convert the network with the eager module in its place, before torch.jit.script or torch.jit.trace"
            )
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
        why = "there is nothing to make equivariant"
        if any(isinstance(m, TRANSPOSED) for m in model.modules()):
            why = "transposed convolutions take maps made by convolutions, not images or vectors"
        raise ValueError(f"convert: {type(model).__name__} has no convolution: {why}")
    if dims != {group.dim}:
        several = " and ".join(f"Conv{d}d" for d in sorted(dims))
        raise ValueError(
            f"convert: {type(model).__name__} has {several}, {group} has dimension {group.dim}; "
            + (f"take a group of dimension {max(dims)}" if len(dims) == 1 else "convert the parts of one dimension alone")
        )
    given = () if example is None else images_of(example)
    if given and any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "convert: the network is on the meta device, where no example can be tried; leave that out, or use to_empty"
        )
    for image in given:
        if not isinstance(image, Tensor):
            came = f"a tuple with {type(image).__name__}" if isinstance(example, tuple) else type(image).__name__
            raise TypeError(f"convert: expected an example image, a tensor, or a tuple of tensors for several inputs, got {came}")
    pictures = [image for image in given if image.ndim == group.dim + 2]
    if given and not pictures:
        raise ValueError(f"convert: expected an example image with {group.dim + 2} axes, got {_shapes(given)}")
    whole = next((image for image in pictures if not image.is_floating_point()), None)
    if whole is not None:
        raise ValueError(
            f"convert: expected an example image of floating-point numbers, got {tuple(whole.shape)} of {whole.dtype}; use "
            "example.float()"
        )
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


def _shapes(example: Tensor | tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(image.shape)) for image in images_of(example))


def _try_on(model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> None:
    """Runs a copy of the user's network on the example, in either mode, and refuses what tracing would not have seen."""
    model = copy.deepcopy(model)
    images = inputs_for(model, example)
    for training in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), no_own_gradients(model):
                twice = [torch.cat([t] * (1 + training)) if t.ndim else t for t in images]  # norms in training want two
                model.train(training)(*twice)
        except RefusedError as error:
            raise ValueError(f"convert: {error}") from None
        except Exception as error:  # whatever the user's forward does
            if not training:
                raise ValueError(f"convert: the network fails on the example {_shapes(example)}: {error}") from error


def _fitted(build: Converter | _Replacer, factor: float) -> float:
    """The factor at which the new network has about as many parameters as the old one."""
    found, off = _fit(build, factor)
    if isinstance(build, Converter) and build.unit and off > math.log(1.1):
        chosen = build.unit, build.multiple
        for unit in build.units[1:]:
            build.unit, build.multiple = unit, 1
            with suppress(ValueError):  # sums do not stay sums
                again, less = _fit(build, factor)
                if less < off:
                    chosen, found, off = (unit, build.multiple), again, less
        build.unit, build.multiple = chosen
        if off > math.log(1.25):
            raise _no_fraction(build, f"has about {build.parameters()} parameters")
    return found


def _fit(build: Converter | _Replacer, factor: float) -> tuple[float, float]:
    """That factor, and how far off it is: the logarithm of the ratio."""
    wanted = build.parameters()
    off: dict[float, float] = {}
    rounding: Any = None
    for step in range(20):
        with torch.device("meta"):
            found = sum(p.numel() for p in build.at(factor).parameters())
        if rounding != (rounding := (getattr(build, "unit", 0), getattr(build, "multiple", 1))):
            off.clear()  # widths were rounded in another way
        off[factor] = abs(math.log(found / wanted))
        best = min(off, key=lambda f: off[f])
        if off[best] < 0.01 or (step > 5 and off[best] < 0.05):
            break
        factor = factor * (wanted / found) ** 0.5 if step < 4 else best * (1 + 0.03 * (step - 3) * (-1) ** step)
    return best, off[best]


def _at_a_fraction(build: Converter, made: fx.GraphModule, factor: float) -> fx.GraphModule:
    """The network whose widths are the fraction next to the factor of the old ones, with finer fractions where that is far."""

    def near() -> bool:
        return 0.8 < max(1, round(build.unit * factor)) / (build.unit * factor) < 1.25

    for unit in build.units[1:]:
        if near():
            return made
        before = build.unit, build.multiple
        build.unit, build.multiple = unit, 1
        try:
            made = build.at(factor)
        except ValueError:  # sums do not stay sums
            build.unit, build.multiple = before
    if not near():
        raise _no_fraction(build, f"is near {factor:g}")
    return made


def _no_fraction(build: Converter, what: str) -> ValueError:
    return ValueError(
        f"convert: this network adds maps to concatenated ones, so that all widths shrink by one fraction, in parts of "
        f'1/{build.unit}, and none {what}; use keep="channels"'
    )


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
    heads: _Replacer | None = None,
) -> nn.Module:
    """The network, unless something that it returns is not equivariant on the example; `axes` tells where channels are.

    Where modules were replaced, nothing but the example tells whether the `heads` are those that make the results.
    """
    given = inputs_for(made, example)
    pictures = [image for image in given if image.ndim == group.dim + 2]
    x, inputs = torch.cat(pictures, 1), _Inputs(given, group.dim + 2)
    try:
        with torch.no_grad():
            result = copy.deepcopy(made).eval()(*inputs(x))
    except Exception as error:
        raise ValueError(f"convert: the converted network fails on the example {_shapes(example)}: {error}") from error
    results, alone = leaves(result), isinstance(result, Tensor) and len(given) == 1 and not any(axes)
    tensors = [i for i, y in enumerate(results) if isinstance(y, Tensor)]
    places = dict(zip(tensors, axes, strict=True)) if len(axes) == len(tensors) else {}
    before: list[Any] = []
    if pool is not None or heads is not None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = leaves(copy.deepcopy(model).eval()(*inputs(x)))
    for i, (y, was) in enumerate(zip(results, before, strict=bool(before))):
        if not isinstance(was, Tensor):
            continue
        told = f"convert: on the example the network returns {tuple(was.shape)}, and the converted one {tuple(y.shape)}"
        told += f", number {i} of its results" if len(results) > 1 else ""
        if pool is not None and not places.get(i) and _without_channels(y) != _without_channels(was):
            raise ValueError(
                f"{told}; it reshapes a map in a way that is not known: flatten(1), means over space and views (N, C, 1, 1) are"
            )
        if heads is not None and y.shape[1:2] != was.shape[1:2]:
            raise ValueError(f"{told} ({heads.taken}). Convert the parts between the branches of its forward, one at a time")
    for i, y in enumerate(results):
        if isinstance(y, Tensor) and y.is_floating_point():
            found = explain(made if alone else _One(made, inputs, i, places.get(i, "")), x, group)
            if not found.exact:
                which = "" if len(results) == 1 else f", number {i} of the {len(results)} tensors that it returns,"
                raise ValueError(f"convert: at this size the result{which} is not equivariant:\n{found}")
    return made


def _check_mean(made: nn.Module, model: nn.Module, group: Group, example: Tensor | tuple[Tensor, ...]) -> None:
    """Refuses a network whose modules were replaced and which does not compute the mean of the old one's answers.

    The code between its modules sees maps with one axis more, and no other check knows what it makes of it.
    """
    images = inputs_for(model, example, torch.float64)
    old, answers = copy.deepcopy(model).double().eval(), []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = copy.deepcopy(made).double().eval()(*images)
        for h in range(group.order):
            moved = leaves(old(*(act(group, h, t) if t.ndim == group.dim + 2 else t for t in images)))
            back = int(group.inverse[h])
            answers.append([act(group, back, y) if isinstance(y, Tensor) and y.ndim == group.dim + 2 else y for y in moved])
    for y, *each in zip(leaves(found), *answers, strict=True):
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
        found: Tensor = leaves(self.net(*self.inputs(x)))[self.which]
        return found.movedim(-1, 1) if self.axes == "last" else found.unsqueeze(1) if self.axes == "squeezed" else found


# --- where tracing fails -------------------------------------------------------------------------------------------------------


class _Replacer:
    """Replaces the modules of a network one by one, as a `Converter` rebuilds a traced one."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        pool: Literal["mean", "max"] | None,
        weights: bool,
        example: Tensor | tuple[Tensor, ...],
    ) -> None:
        self.model, self.pool = model, pool
        self.leaves = [(name, m) for name, m in model.named_modules() if not list(m.children()) and name]
        self.heads = _heads_of(model, example)
        self.taken = f"taken for heads, since they make the results on the example: {', '.join(self.heads)}"
        if not self.heads:
            self.heads = [name for name, m in self.leaves if isinstance(m, (*CONVS, *TRANSPOSED, nn.Linear))][-1:]
            self.taken = f"the layer registered last, {self.heads[0]}, is taken for the head: register the head last"
        self.linear = isinstance(model.get_submodule(self.heads[0]), nn.Linear)
        self.shell = Converter.__new__(Converter)
        self.shell.model, self.shell.group, self.shell.pool, self.shell.weights = model, group, None, weights
        self.shell.heads = self.shell.final = set(self.heads)
        self.shell.multiple, self.shell.unit = 1, 0
        if pool is None and self.linear:
            raise ValueError("convert: a network that torch.fx cannot trace needs pool=")

    def parameters(self) -> int:
        """How many parameters the network has."""
        return sum(p.numel() for p in self.model.parameters())

    def at(self, factor: float) -> nn.Module:
        """A copy of the network with widths multiplied by `factor`."""
        made, lifted = copy.deepcopy(self.model), False
        self.shell.factor = factor
        for name, module in self.leaves:
            new = self._new(name, module, lifted)
            for each, same in self.model.named_modules(remove_duplicate=False):
                if same is module:  # which may be registered under several names
                    parent, _, last = each.rpartition(".")
                    setattr(made.get_submodule(parent), last, new)
            lifted = lifted or isinstance(module, CONVS)
        if self.pool is None or self.linear:
            return made
        return nn.Sequential(made, CosetPool(self.shell.group, reduce=self.pool))

    def _new(self, name: str, module: nn.Module, lifted: bool) -> nn.Module:
        shell = self.shell
        shell.graph, shell.root, shell.made, shell.values = fx.Graph(), nn.Module(), {}, {}
        if name in self.heads and isinstance(module, nn.Linear):
            width, pool = max(1, round(module.in_features * shell.factor)), self.pool
            head: Any = shell.layer(name, module, lambda: PooledLinear(shell.group, module, width, pool))
            if shell.weights:
                head.load_state_dict(module.state_dict())
                for mine, theirs in zip(head.parameters(), module.parameters(), strict=True):
                    mine.requires_grad_(theirs.requires_grad)
            return head
        names = ("in_channels", "num_features", "num_channels", "num_parameters")
        channels = next((getattr(module, key) for key in names if hasattr(module, key)), 0)
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
        return found or shell.copied(module)


def _heads_of(model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> list[str]:
    """The layers that make the results on the example, as `gcnn.rebuild.graph.heads` finds them; none if that cannot be told.

    Those of training count, too: some heads are for it alone.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (*CONVS, *TRANSPOSED, nn.Linear))}
    found, ran = _makers_of_results(model, list(layers), example, training=False)
    if len({isinstance(layers[name], nn.Linear) for name in found}) != 1:  # none; or of two kinds, of which one may be a gate
        return []
    more, _ = _makers_of_results(model, list(layers), example, training=True)
    kind = nn.Linear if any(isinstance(layers[name], nn.Linear) for name in found) else (*CONVS, *TRANSPOSED)
    found |= {name for name in more - ran if isinstance(layers[name], kind)}
    # a layer that did not run may be the head of another branch
    classes: dict[str, Any] = {name: (type(m), getattr(m, "out_features", 0) or m.out_channels) for name, m in layers.items()}
    like = {classes[name] for name in found}
    return [name for name in layers if name in found or (name not in ran and classes[name] in like)]


def _makers_of_results(
    model: nn.Module, names: list[str], example: Tensor | tuple[Tensor, ...], training: bool
) -> tuple[set[str], set[str]]:
    """Those of the layers that make the results on the example, and those that ran.

    Found by walking back from the results through the graph that autograd recorded.
    """
    net = copy.deepcopy(model).train(training).requires_grad_(False)
    made_by: dict[Any, str] = {}
    ran: set[str] = set()

    def record(name: str, made: Tensor) -> None:
        ran.add(name)
        made_by[made.grad_fn] = name

    for name in names:
        layer: Any = net.get_submodule(name)
        layer.weight.requires_grad_(True)
        layer.register_forward_hook(lambda _, given, made, name=name: record(name, made))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of float(x) where gradients are recorded
            results = leaves(net(*inputs_for(net, example)))
    except Exception:  # a forward that runs without gradients, or in one mode, alone
        return set(), ran
    starts = {y.grad_fn for y in results if isinstance(y, Tensor) and y.grad_fn is not None}
    steps = reached(starts, lambda step: () if step in made_by else [f for f, _ in step.next_functions if f is not None])
    return {made_by[step] for step in steps if step in made_by}, ran


def _runs(model: nn.Module, example: Tensor | tuple[Tensor, ...], training: bool) -> bool:
    """Whether the network takes the example in that mode: norms refuse a single number a channel in training, for instance."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model).train(training)(*inputs_for(model, example))
    except Exception:  # whatever the user's forward does
        return False
    return True


def _replaced(build: _Replacer, factor: float, example: Tensor | tuple[Tensor, ...]) -> nn.Module:
    """The network with its modules replaced, tried on the example."""
    made = build.at(factor)
    training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for training in (False, True) if _runs(build.model, example, training=True) else (False,):
                copy.deepcopy(made).train(training)(*inputs_for(made, example))
    except Exception as error:
        linear = [name for name, m in build.leaves if isinstance(m, nn.Linear) and name not in build.heads]
        left = f"{', '.join(linear)} stayed as before: " if linear else ""
        mode = " in training mode" if training else ""
        raise ValueError(
            f"convert: {type(build.model).__name__} cannot be traced by torch.fx, and with its modules replaced it fails{mode}: "
            f"{error} ({left}{build.taken}). Convert the parts between the branches of its forward, one at a time; where "
            'widths do not fit, keep="channels" keeps them'
        ) from error
    return made.train(build.model.training)
