"""Is my network equivariant, and if not, where is it lost? For users' own modules as for the layers of `gcnn.nn`.

`equivariance_error` and `assert_equivariant` compare module(L_h x) with L_h module(x) over all elements h of the group;
`explain` does so for every layer of a network by itself, names the first that fails, why, and what to do; `exact_sizes` finds
the sizes of the input at which the strides of a network are exact.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gcnn.checks import shape_text, unwrapped
from gcnn.groups import Group, Subgroup
from gcnn.probe import (
    Probe,
    Reading,
    Row,
    as_it_is,
    as_numbers,
    distance,
    first_map,
    inside,
    larger,
    leaves,
    numbers_of,
    readings,
    sizes_that_fit,
    turn,
)

__all__ = ["Explanation", "Row", "assert_equivariant", "equivariance_error", "exact_sizes", "explain"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Module = Callable[..., Any]
Input = Tensor | tuple[Tensor, ...]


def equivariance_error(
    module: Module,
    group: Group,
    x: Input,
    stabilizer: Subgroup | None = None,
    out_stabilizer: Subgroup | None = None,
) -> float:
    """The largest |module(L_h x) - L_h module(x)| over all elements h of the group, relative to the largest |module(x)|.

    `x` is an image (N, K, *X), a G-map (N, K, S, *X), a function (N, K, S) or a map over the cosets of `stabilizer`. An output
    (N, K, *X) must turn as an image does, (N, K, S, *X) and (N, K, S) as maps on the group, or on the cosets of
    `out_stabilizer`; an output (N, K) must not change, and numbers of other shapes that no map has may stay, too. An image may
    come without its only channel or with its channels last, where its shape says so. A module runs in the mode it is in, as a
    copy, so that no statistic of it moves (a function that calls one is not copied). On a hexagonal lattice only the cells of
    the domain count. A module of several inputs, such as two images of one place, gets them as a tuple; all of them are turned,
    but for numbers (N, K).

    >>> from gcnn import p4
    >>> from gcnn.nn import LiftConv
    >>> equivariance_error(LiftConv(p4, 1, 2, 3), p4, torch.rand(1, 1, 9, 9)) < 1e-5
    True
    >>> equivariance_error(torch.nn.Conv2d(1, 2, 3), p4, torch.rand(1, 1, 9, 9)) > 1e-2
    True
    """
    return _worst("equivariance_error", module, *_in_order(group, x), stabilizer, out_stabilizer)[0]


def assert_equivariant(
    module: Module,
    group: Group,
    x: Input,
    tolerance: float | None = None,
    stabilizer: Subgroup | None = None,
    out_stabilizer: Subgroup | None = None,
) -> None:
    """Raises an AssertionError where `equivariance_error` exceeds `tolerance` (1e-12 in float64, 1e-5 in float32).

    >>> from gcnn import p4
    >>> assert_equivariant(torch.nn.ReLU(), p4, torch.randn(1, 1, 4, 9, 9))
    """
    group, x = _in_order(group, x)
    if tolerance is None:
        floats = (t.dtype for t in _several(x) if isinstance(t, Tensor) and t.is_floating_point())
        tolerance = max((TOLERANCES.get(dtype, 1e-5) for dtype in floats), default=1e-5)
    error, h, size = _worst("assert_equivariant", module, group, x, stabilizer, out_stabilizer, tolerance)
    name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", repr(module))
    if size == 0:
        raise AssertionError(f"{name}: the output is zero everywhere, so that nothing can be compared; give another input")
    if not error <= tolerance:  # a NaN fails too
        training = isinstance(module, nn.Module) and module.training
        raise AssertionError(
            f"{name} is not equivariant to {group}: error {error:.2g} (tolerance {tolerance:.2g}) under element {h} = "
            f"{group.matrices[h]}; gcnn.testing.explain(model, x, {group}) finds the layer"
            + ("; the module is in training mode: if it has dropout, call .eval() first" if training else "")
        )


def _worst(
    who: str,
    module: Module,
    group: Group,
    x: Input,
    stabilizer: Subgroup | None,
    out_stabilizer: Subgroup | None,
    tolerance: float = 0.0,
) -> tuple[float, int, float]:
    """The largest relative error, the element where it occurs, and the largest value of the output."""
    inputs = _checked_inputs(f"{who}(module, group, x)", group, x, stabilizer)
    module = _copied(module)
    with torch.no_grad():
        y = module(*(t.clone() for t in inputs))
        if not isinstance(y, Tensor):
            raise TypeError(f"{who}: expected a module that returns one tensor, got {type(y).__name__}; wrap it")
        if not y.numel():
            raise ValueError(f"{who}: the output is empty, {tuple(y.shape)}, so that nothing can be compared")
        ways: list[_Worst] = []
        refused: ValueError | None = None  # where it cannot be read as it is
        for read in readings(group, y, inputs):
            try:
                ways.append(_Worst(group, read, y, out_stabilizer if read is as_it_is else None))
            except ValueError as error:
                refused = error if read is as_it_is else refused
        for h in range(group.order) if ways else ():
            moved = module(*(turn(group, h, t, stabilizer) for t in inputs))
            for way in ways:
                way.compare(h, moved)
    little = max(1e-3, tolerance, TOLERANCES.get(y.dtype, 0.0))
    ways = [w for w in ways if w.read is not as_numbers or (not w.error > little and out_stabilizer is None)]  # NaN is told
    best = min(ways, key=lambda way: math.inf if math.isnan(way.error) else way.error, default=None)
    image = inputs[first_map(inputs, group.dim)].shape[-group.dim :] in (y.shape[1:], y.shape[1:-1])
    if refused is not None and (
        best is None or not (image or not best.error > little)
    ):  # a matrix, say, that only looks like an image
        raise refused
    assert best is not None
    return best.error, best.where, best.size


class _Worst:
    """The largest error of what a module returns for L_h x, and where it occurs, by one reading of the result."""

    def __init__(self, group: Group, read: Reading, y: Tensor, stabilizer: Subgroup | None) -> None:
        self.group, self.read, self.y, self.shape, self.stabilizer = group, read, read(y), y.shape, stabilizer
        self.size = float(inside(group, numbers_of(self.y)).abs().max())
        self.error, self.where = 0.0, 0
        turn(group, 0, self.y, stabilizer)  # an error if it cannot be read so

    def compare(self, h: int, moved: Tensor) -> None:
        """Takes the result for L_h x."""
        error = distance(self.group, self.read(moved), turn(self.group, h, self.y, self.stabilizer), self.size)
        if self.read is as_numbers and moved.shape != self.shape:
            error = math.inf
        if larger(self.error, error) is error:
            self.error, self.where = error, h


def _in_order(group: Any, x: Any) -> tuple[Any, Any]:
    """Group and input, in whichever order they came: two functions here take them in one order, two in the other."""
    return (x, group) if isinstance(group, Tensor | tuple) and isinstance(x, Group) else (group, x)


def _several(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _dtype(inputs: tuple[Tensor, ...]) -> torch.dtype:
    """The dtype of the first input that holds no whole numbers."""
    return next((t.dtype for t in inputs if t.is_floating_point()), inputs[0].dtype)


def _copied(module: Any) -> Any:
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise ValueError(
            f"the module is examined as a copy, and cannot be copied ({error}); call prune.remove on pruned layers"
        ) from error


def _checked_inputs(call: str, group: Group, x: Input, stabilizer: Subgroup | None = None) -> tuple[Tensor, ...]:
    """All inputs, zero outside their domain; an error if they are of no use for a test."""
    inputs = _several(x)
    others = [type(t).__name__ for t in inputs if not isinstance(t, Tensor)]
    if not isinstance(group, Group) or others or not inputs:
        found = f"a tuple with {', '.join(others) or 'nothing'}" if isinstance(x, tuple) else type(x).__name__
        raise TypeError(f"{call}: expected a Group and a tensor x, or a tuple of them, got {type(group).__name__} and {found}")
    for i, t in enumerate(inputs):
        numbers = t.ndim < 3 and len(inputs) > 1 and i != first_map(inputs, group.dim)  # (N, K), beside a map
        functions = t.ndim == 3 and not group.order % max(1, t.shape[2])  # (N, K, S) on the group
        if not numbers and not functions and t.ndim not in (group.dim + 2, group.dim + 3):
            which = "x" if len(inputs) == 1 else f"x[{i}]"
            missing = {group.dim: "[None, None]", group.dim + 1: "[None]"}.get(t.ndim)
            raise ValueError(
                f"{call}: expected {which} {shape_text(group, 'K', None)} or {shape_text(group, 'K')}, got {tuple(t.shape)}"
                + (f"; a batch axis is missing if this is one sample: {which}{missing}" if missing else "")
            )
    if not inputs[first_map(inputs, group.dim)].numel():
        raise ValueError(f"{call}: x is empty, {', '.join(str(tuple(t.shape)) for t in inputs)}, so that nothing can be compared")
    if not all(torch.isfinite(t).all() for t in inputs):
        raise ValueError(f"{call}: x holds NaN or infinite values")
    inputs = tuple(inside(group, t) for t in inputs)
    generator = torch.Generator().manual_seed(0)
    usual = tuple(torch.rand(t.shape, generator=generator).to(t.device) for t in inputs)
    functions = group.dim > 1 and all(t.ndim < 4 for t in inputs) and any(t.ndim == 3 and t.shape[2] > 1 for t in inputs)
    for h in range(1, group.order):
        # a normal subgroup moves no function over its cosets, so none can be less symmetric
        if _left_as_is(group, h, inputs, stabilizer) and not (functions and _left_as_is(group, h, usual, stabilizer)):
            raise ValueError(
                f"{call}: x is symmetric, element {h} of {group} leaves it as it is, so that nothing can be seen; "
                "use a random x, for instance torch.rand_like(x)"
            )
    return inputs


def _left_as_is(group: Group, h: int, inputs: tuple[Tensor, ...], stabilizer: Subgroup | None) -> bool:
    turned = [turn(group, h, t, stabilizer) for t in inputs]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(turned, inputs, strict=True))


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: `rows` in the order of the calls, the `error` of the whole network. Printed, it is a table.

    Where a stride does not fit, `sizes` are the nearest sizes of the input at which all of them do, as of `exact_sizes`.

    >>> from gcnn import p4
    >>> from gcnn.nn import LiftConv
    >>> found = explain(LiftConv(p4, 1, 2, 3, stride=2), torch.rand(1, 1, 8, 8), p4)
    >>> found.exact, found.first.why
    (False, 'stride 2 does not divide 8 + 2*0 - 3 = 5: the windows leave 1 over at one side')
    >>> found.sizes
    (7, 9, 11)
    """

    group: Group
    error: float
    tolerance: float
    rows: tuple[Row, ...] = field(repr=False)
    sizes: tuple[int, ...] = ()

    @property
    def first(self) -> Row | None:
        """The first layer that breaks equivariance, None if none does."""
        return next((row for row in self.rows if row.why), None)

    @property
    def exact(self) -> bool:
        """Whether the network is equivariant."""
        return self.first is None

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [5])
        kinds = max([len(row.layer) for row in self.rows] + [5])
        lines = [f"{'layer':{width}}  {'':{kinds}}  own error"]
        for row in self.rows:
            lines.append(f"{row.name:{width}}  {row.layer:{kinds}}  {row.error:9.1e}{'  <- ' + row.why if row.why else ''}")
        if self.first is None:
            lines.append(f"equivariant to {self.group}: the error of the whole network is {self.error:.1e}")
        else:
            lines.append(f"not equivariant to {self.group}: the error of the whole network is {self.error:.1e}")
            lines.append(f"first broken by {self.first.name}: {self.first.why}")
            lines.append(f"what to do: {self.first.remedy}")
            if self.sizes:
                lines.append(f"input sizes at which every stride is exact: {', '.join(map(str, self.sizes))}")
        return "\n".join(lines)


def explain(model: nn.Module, x: Input, group: Group, stabilizer: Subgroup | None = None) -> Explanation:
    """Which layer of `model` breaks equivariance on the input `x`, why, and what to do.

    Every layer gets exactly transformed inputs, so that each row shows the layer's own error, over the generators of the group:
    what commutes with those commutes with all elements. Code between layers (a call of F.pad, a sum with something) has a row of
    its own where it fails; layers that get what is laid out in a way that explain cannot follow are marked, and not judged. The
    whole network is compared over all elements. Equivariance must hold for all values of the parameters, and some faults hide at
    initialisation: so a copy of the model is examined, in eval mode and double precision, its parameters and running statistics
    shaken a little. The model itself is not touched. What takes long has a progress bar on a terminal, if tqdm is installed. A
    model of several inputs gets them as a tuple; that, and `stabilizer`, is as for `equivariance_error`.

    >>> from gcnn import p4
    >>> from gcnn.nn import GConv, LiftConv
    >>> net = torch.nn.Sequential(LiftConv(p4, 1, 4, 3), torch.nn.ReLU(), GConv(p4, 4, 4, 3, stride=2))
    >>> explain(net, torch.rand(1, 1, 11, 11), p4).exact
    True
    >>> explain(net, torch.rand(1, 1, 12, 12), p4).first.name
    '2'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain: expected an nn.Module, got {type(model).__name__}")
    group, x = _in_order(group, x)
    inputs = _checked_inputs("explain(model, x, group)", group, x, stabilizer)
    model = _copied(unwrapped(model)).eval()
    few = generators(group)
    runs = 2 + math.ceil((group.order - 1) / _at_once(inputs)) + len(few)
    with torch.no_grad(), _as_written(), _progress(leaves(model), runs):
        for seed in range(8):  # a layer that shaking has killed would hide faults
            probe, inputs, whole = _compared(_shaken(copy.deepcopy(model), seed), inputs, group, stabilizer)
            dead = whole <= probe.tolerance and probe.says_the_same(tuple(map(_nearby, inputs)))
            if not dead:
                break
        if dead:  # what decides, as argmax does, answers otherwise to quite other inputs
            others = (tuple(_elsewhere(t, seed) for t in inputs) for seed in range(1, 9))
            dead = all(probe.says_the_same(each) for each in others)
        probe.measure(inputs, few)
        if not whole <= probe.tolerance and not probe.sees_a_fault():  # one that shows on this very x under others only
            probe.measure(inputs, sorted({*range(1, group.order)}.difference(few)))
        search = not whole <= probe.tolerance and probe.stride_fails()
        drawn = tuple(probe.draws(inputs)) if not whole <= probe.tolerance else ()
        sizes = tuple(_fitting(probe.model, inputs, group, 4)) if search else ()
    rows = (*drawn, *probe.rows(sizes))
    if whole <= probe.tolerance and not dead:  # what has an error is only laid out in a way that was not followed
        rows = tuple(Row(r.name, r.layer + (" (not followed)" if r.why else ""), r.error) for r in rows)
    return Explanation(group, whole, probe.tolerance, rows, sizes)


def _compared(
    model: nn.Module, inputs: tuple[Tensor, ...], group: Group, stabilizer: Subgroup | None
) -> tuple[Probe, tuple[Tensor, ...], float]:
    """A probe that has run the model, the inputs in its precision, and the error of the whole network over all elements."""
    try:  # in double precision rounding and faults are worlds apart
        probe = Probe(model.double(), group, 1e-9, stabilizer)
        wide = tuple(t.double() if t.is_floating_point() or t.dtype == torch.uint8 else t for t in inputs)
        y = probe.record(wide)
        inputs = wide
    except (RuntimeError, TypeError, ValueError):  # a device or a model that knows single precision only
        kind = _dtype(inputs)
        probe = Probe(model.to(kind if kind.is_floating_point else torch.float32), group, 1e-4, stabilizer)
        y = probe.record(inputs)
    if y.is_floating_point():  # networks may end in a lower precision
        probe.tolerance = max(probe.tolerance, 2 * torch.finfo(y.dtype).eps)
    if not y.numel():
        raise ValueError(f"explain: the output is empty, {tuple(y.shape)}, so that nothing can be compared")
    ways, size = readings(group, y, inputs), float(numbers_of(y).abs().max())
    read, wholes = [way(y) for way in ways], [0.0 for _ in ways]
    turned = [tuple(turn(group, h, t, stabilizer) for t in inputs) for h in range(1, group.order)]
    for h, found in enumerate(_answers(probe.model, turned), 1):
        for i, way in enumerate(ways):
            error = min(distance(group, way(found), t, size) for t in probe.outputs(h, read[i]))
            wholes[i] = larger(wholes[i], math.inf if way is as_numbers and found.shape != y.shape else error)
    right = [e for e, way in zip(wholes, ways, strict=True) if way is not as_numbers or e <= probe.tolerance]
    whole = min(right, key=lambda error: math.inf if math.isnan(error) else error)
    best = wholes.index(whole)
    probe.read, probe.output = ways[best], read[best]
    return probe, inputs, whole


def _nearby(x: Tensor) -> Tensor:
    """Numbers a little off those of x, each by another share; whole numbers change places."""
    generator = torch.Generator().manual_seed(0)
    if not x.is_floating_point():
        return x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape)
    return x * (1 + 0.01 * torch.rand(x.shape, generator=generator)).to(x)


def _elsewhere(x: Tensor, seed: int) -> Tensor:
    """Other numbers than those of x, of their size and somewhere else."""
    generator = torch.Generator().manual_seed(seed)
    x = x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape)
    return x * (2 * torch.rand(x.shape, generator=generator)).to(x) if x.is_floating_point() else x


def exact_sizes(model: nn.Module, x: Input, group: Group) -> list[int]:
    """The sizes n, from 3/4 to 3/2 of that of `x`, for which the strides of all layers are exact on inputs with n on each side.

    Where no such size goes through, sides of `x` that are not as long as its last one stay as they are; those of other inputs of
    a tuple do so always, unless they are of the size of the first. Only shapes are computed, on torch's meta device: of at most
    100 sizes, the nearest. The list is empty where no size fits, and for a model that does not run there. Strides in code
    between layers, as in x[..., ::2] or F.max_pool2d, are not seen here, but `explain` sees what they do.

    >>> from gcnn import p4
    >>> from gcnn.nn import GConv, LiftConv
    >>> net = torch.nn.Sequential(LiftConv(p4, 1, 4, 3, stride=2, padding=1), GConv(p4, 4, 4, 3, stride=2, padding=1))
    >>> exact_sizes(net, torch.rand(1, 1, 28, 28), p4)
    [21, 25, 29, 33, 37, 41]
    """
    group, x = _in_order(group, x)
    if not isinstance(model, nn.Module):
        raise TypeError(f"exact_sizes: expected an nn.Module, got {type(model).__name__}")
    inputs = _several(x)
    tensors = bool(inputs) and all(isinstance(t, Tensor) for t in inputs)
    if not isinstance(group, Group) or not tensors or inputs[first_map(inputs, group.dim)].ndim < group.dim + 2:
        shapes = ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in inputs)
        raise TypeError(
            "exact_sizes(model, x, group): expected a Group and a tensor x, (N, K, *X), or a tuple of them, got "
            f"{group} and {shapes or 'an empty tuple'}"
        )
    with torch.no_grad(), _as_written():
        return _fitting(_copied(unwrapped(model)).eval(), inputs, group)


def _fitting(model: nn.Module, inputs: tuple[Tensor, ...], group: Group, most: int = 100) -> list[int]:
    """As `exact_sizes`, of a model that is not needed afterwards: it goes to the meta device."""
    try:
        model = model.to("meta")
    except Exception:  # parts of it cannot be moved
        return []
    return sizes_that_fit(model, inputs, group, most)


def _as_written() -> Any:
    """A context in which compiled parts run as they are written."""
    stance: Any = getattr(torch.compiler, "set_stance", None)
    if stance is not None:
        return stance("force_eager")
    dynamo: Any = sys.modules.get("torch._dynamo")  # before torch 2.6
    return nullcontext() if dynamo is None else dynamo.config.patch(disable=True)


def generators(group: Group) -> list[int]:
    """Elements of which all others are products: what holds for these holds for all."""
    found: list[int] = []
    for h in range(1, group.order):
        if h not in group.subgroup(*found):
            found.append(h)
    return found


def _at_once(inputs: tuple[Tensor, ...]) -> int:
    """How many inputs like these the model gets at once."""
    return max(1, 16 // max(1, len(inputs[0])))


def _answers(model: nn.Module, inputs: list[tuple[Tensor, ...]]) -> Iterable[Tensor]:
    """The model's answer to each of the inputs, to some of them at once where torch can: filters are then transformed once."""
    step = _at_once(inputs[0]) if inputs else 1
    for start in range(0, len(inputs), step):
        part = inputs[start : start + step]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operations that vmap does one by one
                found = torch.func.vmap(model)(*(torch.stack(each) for each in zip(*part, strict=True)))
        except Exception:  # inputs of several shapes, code that asks for values; what is really wrong shows below
            found = (model(*(t.clone() for t in several)) for several in part)
        yield from found


@contextmanager
def _progress(layers: Collection[nn.Module], runs: int) -> Iterator[None]:
    """With a bar over the calls of layers, for what takes longer than a second, if there is tqdm and a terminal to see it."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield
        return
    with tqdm(total=len(layers) * runs, desc="explain", unit="layer", leave=False, disable=None, delay=1) as bar:

        def tell(*_: Any) -> None:  # what update returns would take the place of the output
            bar.update()

        hooks = [] if bar.disable else [m.register_forward_hook(tell) for m in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` with its parameters and running statistics off the values they start with, the same ones every time.

    The larger the seed, the further off: a layer may be dead as it is.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like) * 0.2 * (1 + seed)

    norms = nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm
    for module in model.modules():
        for p in module.parameters(recurse=False):  # frozen filters may be meant as they are, frozen norms come from training
            if (p.requires_grad or isinstance(module, norms)) and p.is_floating_point() and p.numel():
                p.add_(noise(p) * (p.std(correction=0) + p.abs().mean() + 0.1))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(noise(buffer))
        elif name.endswith("running_var"):
            buffer.mul_(noise(buffer).exp())
    return model
