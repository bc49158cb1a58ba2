"""Is my network equivariant, and if not, where is it lost? For users' own modules as for the layers of `gcnn.nn`.

`equivariance_error` and `assert_equivariant` compare module(L_h x) with L_h module(x) over all elements h of the group;
`explain` does so for every layer of a network by itself, names the first that fails, why, and what to do; `exact_sizes` finds
the sizes of the input at which the strides of a network are exact.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gcnn.functional import act
from gcnn.groups import Group, Subgroup
from gcnn.lattice import mask_outside
from gcnn.nn import GAvgPool, GConvTranspose, GMaxPool

__all__ = ["Explanation", "Row", "assert_equivariant", "equivariance_error", "exact_sizes", "explain"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Module = Callable[[Tensor], Any]


def equivariance_error(
    module: Module,
    group: Group,
    x: Tensor,
    stabilizer: Subgroup | None = None,
    out_stabilizer: Subgroup | None = None,
) -> float:
    """The largest |module(L_h x) - L_h module(x)| over all elements h of the group, relative to the largest |module(x)|.

    `x` is an image (N, K, *X), a G-map (N, K, S, *X), a function (N, K, S) or a map over the cosets of `stabilizer`. An output
    (N, K, *X) must turn as an image does, (N, K, S, *X) and (N, K, S) as maps on the group, or on the cosets of
    `out_stabilizer`; an output (N, K) must not change. A module runs in the mode it is in, as a copy, so that no statistic of
    it moves (a function that calls one is not copied). On a hexagonal lattice only the cells of the domain count.

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
    x: Tensor,
    tolerance: float | None = None,
    stabilizer: Subgroup | None = None,
    out_stabilizer: Subgroup | None = None,
) -> None:
    """Raises an AssertionError where `equivariance_error` exceeds `tolerance` (1e-12 in float64, 1e-5 in float32).

    >>> from gcnn import p4
    >>> assert_equivariant(torch.nn.ReLU(), p4, torch.randn(1, 1, 4, 9, 9))
    """
    group, x = _in_order(group, x)
    error, h, size = _worst("assert_equivariant", module, group, x, stabilizer, out_stabilizer)
    tolerance = TOLERANCES.get(x.dtype, 1e-5) if tolerance is None else tolerance
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
    who: str, module: Module, group: Group, x: Tensor, stabilizer: Subgroup | None, out_stabilizer: Subgroup | None
) -> tuple[float, int, float]:
    """The largest relative error, the element where it occurs, and the largest value of the output."""
    x = _checked_input(f"{who}(module, group, x)", group, x, stabilizer)
    module = _copied(module)
    with torch.no_grad():
        y = module(x.clone())
        if not isinstance(y, Tensor):
            raise TypeError(f"{who}: expected a module that returns one tensor, got {type(y).__name__}; wrap it")
        size = float(_inside(group, y).abs().max())
        worst, where = 0.0, 0
        for h in range(group.order):
            turned = _turn(group, h, y, out_stabilizer)
            error = _distance(group, module(_turn(group, h, x, stabilizer)), turned, size)
            if _larger(worst, error) is error:
                worst, where = error, h
    return worst, where, size


def _in_order(group: Any, x: Any) -> tuple[Any, Any]:
    """Group and input, in whichever order they came: two functions here take them in one order, two in the other."""
    return (x, group) if isinstance(group, Tensor) and isinstance(x, Group) else (group, x)


def _copied(module: Any) -> Any:
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise ValueError(
            f"the module is examined as a copy, and cannot be copied ({error}); call prune.remove on pruned layers"
        ) from error


def _checked_input(call: str, group: Group, x: Tensor, stabilizer: Subgroup | None = None) -> Tensor:
    """`x`, zero outside its domain; an error if it is of no use for a test."""
    if not isinstance(group, Group) or not isinstance(x, Tensor):
        raise TypeError(f"{call}: expected a Group and a tensor x, got {type(group).__name__} and {type(x).__name__}")
    if not torch.isfinite(x).all():
        raise ValueError(f"{call}: x holds NaN or infinite values")
    x = _inside(group, x)
    for h in range(1, group.order):
        turned = _turn(group, h, x, stabilizer)
        if turned.shape == x.shape and torch.equal(turned, x):
            raise ValueError(
                f"{call}: x is symmetric, element {h} of {group} leaves it as it is, so that nothing can be seen; "
                "use a random x, for instance torch.rand_like(x)"
            )
    return x


def _turn(group: Group, h: int, y: Tensor, stabilizer: Subgroup | None = None) -> Tensor:
    """L_h y, for what the shape of y says that it is."""
    if y.ndim < 3:
        return y  # (N, K): no place, no element
    if y.ndim == 3 and group.dim > 1:
        return _turn(group, h, y.reshape(*y.shape, *(1,) * group.dim), stabilizer).reshape(y.shape)  # (N, K, S)
    if y.ndim == group.dim + 3 and y.shape[2] == 1:
        stabilizer = range(group.order)  # one coset, the whole group
    return act(group, h, y, stabilizer=stabilizer)


def _inside(group: Group, y: Tensor) -> Tensor:
    return mask_outside(group, y) if y.ndim >= group.dim + 2 else y


def _larger(a: float, b: float) -> float:
    """The larger of two errors; a NaN is larger than any number."""
    return a if b <= a or a != a else b


def _distance(group: Group, moved: Tensor, turned: Tensor, size: float) -> float:
    if moved.shape != turned.shape:
        return float("inf")
    try:
        difference = float((_inside(group, moved) - _inside(group, turned)).abs().max()) if moved.numel() else 0.0
    except ValueError:  # a size that has no centre on a hexagonal lattice
        return float("inf")
    return difference / size if size else difference


@dataclass(frozen=True)
class Row:
    """One call of one layer: its own equivariance error, and where that is too large, why and what to do.

    >>> Row("conv1", "GConv", 0.5, "stride 2 does not divide 29", "resize the input")
    Row(name='conv1', layer='GConv', error=0.5, why='stride 2 does not divide 29', remedy='resize the input')
    """

    name: str
    layer: str
    error: float
    why: str = ""
    remedy: str = ""


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


def explain(model: nn.Module, x: Tensor, group: Group) -> Explanation:
    """Which layer of `model` breaks equivariance on the input `x`, why, and what to do.

    Every layer gets exactly transformed inputs, so that each row shows the layer's own error, over the generators of the group:
    what commutes with those commutes with all elements. Code between layers (a call of F.pad, a sum with something) has a row of
    its own where it fails. The whole network is compared over all elements. Equivariance must hold for all values of the
    parameters, and some faults hide at initialisation: so a copy of the model is examined, in eval mode and double precision,
    its parameters and running statistics shaken a little. The model itself is not touched.

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
    x = _checked_input("explain(model, x, group)", group, x)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    with torch.no_grad(), _as_written():
        model = _shaken(_copied(model).eval())
        try:  # in double precision rounding and faults are worlds apart
            probe = _Probe(model.double(), group, 1e-9)
            y = probe.record(x.double())
        except (RuntimeError, TypeError):  # a device or a model that knows single precision only
            probe = _Probe(model.to(x.dtype), group, 1e-4)
            y = probe.record(x)
        x = x.to(y.dtype) if x.is_floating_point() else x
        whole, size = 0.0, float(y.abs().max())
        for h, found in enumerate(_answers(probe.model, [_turn(group, h, x) for h in range(1, group.order)]), 1):
            whole = _larger(whole, min(_distance(group, found, t, size) for t in probe.outputs(h)))
        few = generators(group)
        for h in few:
            probe.compare(h, _turn(group, h, x))
        if not whole <= probe.tolerance and not probe.sees_a_fault():  # one that shows on this very x under others only
            for h in {*range(1, group.order)}.difference(few):
                probe.compare(h, _turn(group, h, x))
        search = not whole <= probe.tolerance and probe.stride_fails()
        sizes = _nearest(_exact_sizes(model, x, group), x.shape[-1]) if search else ()
    rows = tuple(probe.rows(sizes))
    if whole <= probe.tolerance:  # nothing is lost; what has an error here is only laid out in a way that was not followed
        rows = tuple(Row(r.name, r.layer + (" (not followed)" if r.why else ""), r.error) for r in rows)
    return Explanation(group, whole, probe.tolerance, rows, sizes)


def exact_sizes(model: nn.Module, x: Tensor, group: Group) -> list[int]:
    """The sizes n, from 3/4 to 3/2 of that of `x`, for which the strides of all layers are exact on inputs with n on each side.

    Only shapes are computed, on torch's meta device: of at most 100 sizes, the nearest. The list is empty where no size fits, and
    for a model that does not run there. Strides in code between layers, as in x[..., ::2] or F.max_pool2d, are not seen here, but
    `explain` sees what they do.

    >>> from gcnn import p4
    >>> from gcnn.nn import GConv, LiftConv
    >>> net = torch.nn.Sequential(LiftConv(p4, 1, 4, 3, stride=2, padding=1), GConv(p4, 4, 4, 3, stride=2, padding=1))
    >>> exact_sizes(net, torch.rand(1, 1, 28, 28), p4)
    [21, 25, 29, 33, 37, 41]
    """
    group, x = _in_order(group, x)
    if not isinstance(model, nn.Module):
        raise TypeError(f"exact_sizes: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(group, Group) or not isinstance(x, Tensor) or x.ndim < group.dim + 2:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"exact_sizes(model, x, group): expected a Group and a tensor x, (N, K, *X), got {group} and {shape}")
    with torch.no_grad(), _as_written():
        return _exact_sizes(_copied(getattr(model, "_orig_mod", model)).eval(), x, group)


class _MisfitError(Exception):
    """A stride that does not fit the size that comes to its layer."""


def _exact_sizes(model: nn.Module, x: Tensor, group: Group) -> list[int]:
    """As `exact_sizes`, of a model that is not needed afterwards: it goes to the meta device."""

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for a in (*args, *kwargs.values()):
            if isinstance(a, Tensor):
                if _stride_fault(group, module, a):
                    raise _MisfitError  # most sizes end at one of the first layers
                return

    side, found = x.shape[-1], []
    near = sorted(range(max(1, 3 * side // 4), 3 * side // 2 + 1), key=lambda n: abs(n - side))[:100]
    hooks = [m.register_forward_pre_hook(check, with_kwargs=True) for m in _leaves(model)]
    try:
        model = model.to("meta")
        for n in sorted(near):
            with suppress(Exception), warnings.catch_warnings():  # a size that does not go through, for whatever reason
                warnings.simplefilter("ignore")
                model(torch.empty(*x.shape[: -group.dim], *(n,) * group.dim, dtype=x.dtype, device="meta"))
                found.append(n)
    except Exception:  # parts of it cannot be moved
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _nearest(sizes: list[int], side: int) -> tuple[int, ...]:
    """The four nearest to `side`, in ascending order."""
    return tuple(sorted(sorted(sizes, key=lambda n: abs(n - side))[:4]))


def _as_written() -> Any:
    """A context in which compiled parts run as they are written; torch >= 2.6 has one."""
    stance: Any = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else nullcontext()


def _leaves(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that hold no others but parametrizations, such as those of weight_norm, and their names."""
    return {
        m: name or type(m).__name__
        for name, m in model.named_modules()
        if "parametrizations" not in name and not [child for child, _ in m.named_children() if child != "parametrizations"]
    }


def generators(group: Group) -> list[int]:
    """Elements of which all others are products: what holds for these holds for all."""
    found: list[int] = []
    for h in range(1, group.order):
        if h not in group.subgroup(*found):
            found.append(h)
    return found


def _answers(model: nn.Module, inputs: list[Tensor]) -> Iterable[Tensor]:
    """The model's answer to each of the inputs, to some of them at once where torch can: filters are then transformed once."""
    step = max(1, 16 // max(1, len(inputs[0]))) if inputs else 1
    for start in range(0, len(inputs), step):
        part = inputs[start : start + step]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operations that vmap does one by one
                found = torch.func.vmap(model)(torch.stack(part))
        except Exception:  # inputs of several shapes, code that asks for values; what is really wrong shows below
            found = (model(x.clone()) for x in part)
        yield from found


@dataclass
class _Call:
    """One call of one layer in the run on x itself, and the worst errors of its input and output under the group."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    output: Tensor | None = None
    size_before: tuple[int, ...] = ()  # the shape of what the call before returned
    error: float = 0.0
    error_before: float = 0.0


class _Probe:
    """Runs a model on x and on L_h x with hooks on its leaves, handing each leaf the exact L_h of what it got before."""

    def __init__(self, model: nn.Module, group: Group, tolerance: float) -> None:
        self.model, self.group, self.tolerance = model, group, tolerance
        self.leaves = _leaves(model)
        groups = [group, *(getattr(m, name, None) for m in model.modules() for name in ("group", "out_group"))]
        self.groups = list(dict.fromkeys(g for g in groups if isinstance(g, Group) and g.dim == group.dim))
        self.calls: list[_Call] = []
        self.after = 0.0  # the error of code after the last layer

    def record(self, x: Tensor) -> Tensor:
        last = x.shape

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [a.clone() for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            self.calls.append(_Call(self.leaves[module], module, inputs, size_before=tuple(last)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal last
            if isinstance(output, Tensor):
                self.calls[-1].output = output.clone()
                last = output.shape

        try:
            self.output = self._run(x, before, after)
        except (ValueError, RuntimeError) as error:
            call = self.calls[-1] if self.calls else None
            if call is None or call.output is not None:
                raise
            shapes = ", ".join(str(tuple(t.shape)) for t in call.inputs)
            reason = str(error).rstrip(".")
            way, known = self._way_out(call)
            words = f"explain: the model fails in {call.name} ({type(call.module).__name__}) on {shapes}: {reason}{way}"
            # any other error may be one of double precision
            raise (ValueError if known or isinstance(error, ValueError) else RuntimeError)(words) from error
        if not isinstance(self.output, Tensor):
            raise TypeError(f"explain: expected a model that returns one tensor, got {type(self.output).__name__}; wrap it")
        return self.output

    def _way_out(self, call: _Call) -> tuple[str, bool]:
        """What to do about a layer that fails, and whether that is sure: it is a planar one of torch's on a map."""
        group, module, x = self.group, call.module, call.inputs[0] if call.inputs else torch.empty(0)
        if x.ndim != group.dim + 3 or isinstance(getattr(module, "group", None), Group):
            return "", False  # layers of gcnn.nn say so themselves
        layers = {
            nn.modules.pooling._MaxPoolNd: "GMaxPool",
            nn.modules.pooling._AvgPoolNd: "GAvgPool",
            nn.modules.pooling._AdaptiveAvgPoolNd: "GAdaptiveAvgPool",
            nn.modules.conv._ConvTransposeNd: "GConvTranspose",
            nn.modules.conv._ConvNd: "GConv",
            nn.modules.batchnorm._BatchNorm: "GBatchNorm",
        }
        for kind, name in layers.items():
            if isinstance(module, kind):
                first = f", or CosetPool({group}) first, which makes an image of it" if "Norm" not in name else ""
                return f"; this is a map (N, K, {group.order}, ...): use {name}({group}, ...) on it{first}", True
        return f"; on maps (N, K, {group.order}, ...) use the layers of gcnn.nn", False

    def sees_a_fault(self) -> bool:
        """Whether a layer, or the code around the layers, was off so far."""
        errors = [self.after, *(e for call in self.calls for e in (call.error, call.error_before))]
        return not all(error <= self.tolerance for error in errors)

    def stride_fails(self) -> bool:
        """Whether one of the layers that were off has a stride that does not fit."""
        off = [call for call in self.calls if not call.error <= self.tolerance and call.inputs]
        return any(_stride_fault(self.group, call.module, call.inputs[0]) for call in off)

    def compare(self, h: int, moved: Tensor) -> None:
        queue = iter(self.calls)
        call: _Call
        last = moved  # the exact L_h of what went before

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            nonlocal call, last
            following = next(queue, None)
            if following is None or following.module is not module:
                raise ValueError("explain: the model calls other layers for L_h x than for x, which cannot be compared")
            call = following
            references = iter(call.inputs)

            def exact(a: Any) -> Any:
                nonlocal last
                if not isinstance(a, Tensor):
                    return a
                error, last = self.closest(h, next(references), a, last)
                call.error_before = _larger(call.error_before, error)
                return _overwritten(a, last)

            return tuple(exact(a) for a in args), {k: exact(a) for k, a in kwargs.items()}

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            nonlocal last
            if call.output is None:
                return None
            error, last = self.closest(h, call.output, output, last)
            call.error = _larger(call.error, error)
            return _overwritten(output, last)

        y = self._run(moved, before, after)
        size = float(self.output.abs().max())
        self.after = _larger(self.after, min(_distance(self.group, y, t, size) for t in self.outputs(h)))

    def _run(self, x: Tensor, before: Any, after: Any) -> Any:
        hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in self.leaves]
        hooks += [m.register_forward_hook(after, with_kwargs=True) for m in self.leaves]
        try:
            return self.model(x.clone())
        finally:
            for hook in hooks:
                hook.remove()

    def closest(self, h: int, reference: Tensor, moved: Tensor, before: Tensor) -> tuple[float, Tensor]:
        """How far `moved` is from L_h of `reference`, and that, for the best guess of how it transforms.

        `before` is the exact L_h of what went before, which this may be a reshape of.
        """
        size = float(reference.abs().max()) if reference.numel() else 0.0
        candidates = [*self.maps(h, reference), *self.planes(h, reference), *self.outputs_of(h, reference)]
        if before.numel() == reference.numel():
            candidates.append(before.reshape(reference.shape))
        if not candidates:
            return float("inf"), moved
        errors = [_distance(self.group, moved, c, size) for c in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        return errors[best], candidates[best if errors[best] <= self.tolerance else 0].clone()

    def maps(self, h: int, y: Tensor) -> list[Tensor]:
        """L_h y as a map (N, K, S, *X) or (N, K, S) on any of the groups of the model, or on its cosets."""
        d = self.group.dim
        found = []
        if y.ndim == d + 3 or (y.ndim == 3 and d > 1):
            for group, index in self._elements(h):
                subgroups = group.subgroups() if y.shape[2] != group.order else ((0,),)
                for s in subgroups:
                    found += self._turned(group, index, y, s) if group.order == y.shape[2] * len(s) else []
        return found

    def planes(self, h: int, y: Tensor) -> list[Tensor]:
        """L_h y as the planes (N, K S, *X) of a map."""
        if y.ndim not in (2, self.group.dim + 2):
            return []
        return [
            turned.flatten(1, 2)
            for group, index in self._elements(h)
            if y.shape[1] % group.order == 0 and group.order > 1
            for turned in self._turned(group, index, y.unflatten(1, (-1, group.order)))
        ]

    @staticmethod
    def _turned(group: Group, h: int, y: Tensor, stabilizer: Subgroup | None = None) -> list[Tensor]:
        try:
            return [_turn(group, h, y, stabilizer)]
        except ValueError:  # a size that has no centre on a hexagonal lattice
            return []

    def outputs_of(self, h: int, y: Tensor) -> list[Tensor]:
        """L_h y as an image, or as numbers that do not change."""
        return self._turned(self.group, h, y) if y.ndim == self.group.dim + 2 else [] if y.ndim > 3 else [y]

    def outputs(self, h: int) -> list[Tensor]:
        """L_h of what the model returns, as `equivariance_error` reads it."""
        return self.maps(h, self.output) or self.outputs_of(h, self.output) or [self.output]

    def _elements(self, h: int) -> list[tuple[Group, int]]:
        """The element h in every group of the model that has it."""
        matrix = self.group.matrices[h]
        return [(g, g.index(matrix)) for g in self.groups if matrix in g.matrices]

    def rows(self, sizes: tuple[int, ...] = ()) -> Iterable[Row]:
        """One row per call, and one for code that fails; `sizes` of the input fit all strides."""
        for call in self.calls:
            if not call.error_before <= self.tolerance:
                yield Row(f"before {call.name}", "(code)", call.error_before, *self._diagnose_code(call))
            if call.output is not None:
                why, remedy = self._diagnose(call, sizes) if not call.error <= self.tolerance else ("", "")
                yield Row(call.name, type(call.module).__name__, call.error, why, remedy)
        if not self.after <= self.tolerance:
            yield Row("output", "(code)", self.after, *self._diagnose_output())

    def _diagnose_output(self) -> tuple[str, str]:
        group, y = self.group, self.output
        if y.ndim in (2, group.dim + 2) and y.shape[1] % group.order == 0:
            return (
                f"the {y.shape[1]} outputs change places with the elements of {group}: they are planes of a map, not pooled",
                f"put CosetPool({group}) before the head, or return the map as (N, K, {group.order}, ...)",
            )
        return (
            "the code after the last layer is not equivariant",
            "pool over space and over the group by sums, means or maxima, or return maps",
        )

    def _diagnose_code(self, call: _Call) -> tuple[str, str]:
        d = self.group.dim
        x = call.inputs[0]
        if x.ndim >= d + 2 and len(call.size_before) >= d + 2:
            old, new = call.size_before[-d:], tuple(x.shape[-d:])
            if any((a - b) % 2 for a, b in zip(old, new, strict=True)):
                return (
                    f"asymmetric padding or cropping: size {old} becomes {new}, an odd change, so one side gets more",
                    "pad and crop both sides alike, or use the padding= of the layer",
                )
        return (
            "the code before this layer is not equivariant, or lays its axes out in a way that explain cannot follow",
            "keep maps as (N, K, S, *X); add nothing that depends on the place or on the element",
        )

    def _diagnose(self, call: _Call, sizes: tuple[int, ...]) -> tuple[str, str]:
        group, module = self.group, call.module
        x = call.inputs[0] if call.inputs else torch.empty(0)
        on_group = x.ndim == group.dim + 3
        planes = x.ndim == group.dim + 2 and x.shape[1] % group.order == 0
        own = getattr(module, "group", None)
        if isinstance(own, Group) and not own.contains(group):
            return f"this layer is one of {own}, which does not hold all of {group}", f"use {group} throughout, or check {own}"
        kept = getattr(module, "out_group", None)
        if isinstance(kept, Group) and not kept.contains(group):
            return f"from here on the network is equivariant to {kept} only", f"check {kept}, or leave this layer out"
        learned = nn.modules.conv._ConvNd | nn.Linear | nn.Bilinear
        if isinstance(module, learned) and not (on_group or planes or x.ndim <= 3):
            return (
                "a planar convolution does not commute with rotations and reflections (paper, section 5)",
                f"use LiftConv({group}, ...) on images",
            )
        if found := _stride_fault(group, module, x, sizes):
            return found
        if isinstance(own, Group) and getattr(module, "stabilizer", (0,)) != (0,):
            return (
                f"the input is no map over the cosets of {module.stabilizer}",
                "give GConv as stabilizer the subgroup that CosetPool pooled over",
            )
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
            k = x.shape[1] // group.order if planes else x.shape[1]
            return (
                "the norm has a scale, bias or statistic for each plane or place, not one a G-feature map",
                f"use GBatchNorm({group}, {k}) or GLayerNorm({group}, {k}) on (N, {k}, {group.order}, ...)",
            )
        pads = getattr(module, "padding", None)
        if type(module).__module__ == "torch.nn.modules.padding" and isinstance(pads, tuple):
            return (
                f"asymmetric padding {pads}: one side gets more than the other",
                "pad both sides alike, or use the padding= of the layer",
            )
        if isinstance(module, learned) or on_group:
            return (
                f"the layer mixes the {group.order} elements (axis S) or places with weights of its own",
                f"use GConv or GLinear of {group}, or CosetPool and a mean or maximum over space first",
            )
        return (
            "the layer treats places or elements differently",
            "replace it by a layer of gcnn.nn or one of torch's that acts on each value alike",
        )


def _overwritten(x: Tensor, value: Tensor) -> Tensor:
    """`x` itself with new values, so that layers that work in place still reach what they are meant to; else a copy."""
    try:
        return x.copy_(value)
    except RuntimeError:  # an expanded tensor, or another shape
        return value.clone()


def _stride_fault(group: Group, module: nn.Module, x: Tensor, sizes: tuple[int, ...] = ()) -> tuple[str, str] | None:
    kernel = getattr(module, "kernel_size", None)
    other_way = nn.modules.conv._ConvTransposeNd | nn.modules.pooling._MaxUnpoolNd | nn.Fold | GConvTranspose
    if kernel is None or x.ndim < group.dim + 2 or isinstance(module, other_way):
        return None

    def spread(value: Any) -> list[int]:
        return [value] * group.dim if isinstance(value, int) else list(value)[-group.dim :]

    kernels = spread(kernel)
    strides = spread(getattr(module, "stride", None) or kernel)
    paddings = spread(getattr(module, "padding", 0) if not isinstance(getattr(module, "padding", 0), str) else 0)
    dilations = spread(getattr(module, "dilation", 1))
    for n, k, s, p, d in zip(x.shape[-group.dim :], kernels, strides, paddings, dilations, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        if rest := span % s:
            why = (
                f"stride {s} does not divide {n} + 2*{p} - {d * (k - 1) + 1} = {span}: the windows leave {rest} over at one side"
            )
            way = f"make the size here {n - rest} or {n - rest + s}"  # what is before this layer may not allow it
            if sizes:
                way = "make the input a size at which every stride is exact"
            if not group.fills_box:
                return why, way  # even windows have no centre there
            if not isinstance(module, nn.modules.pooling._MaxPoolNd | nn.modules.pooling._AvgPoolNd | GMaxPool | GAvgPool):
                way += f", or use stride 1 and then GAvgPool or GMaxPool({group}, {s}), which are exact on multiples of {s}"
            elif k != s or p:
                way += f", or use kernel_size {s} without padding, which is exact on multiples of {s}"
            return why, way
    return None


def _shaken(model: nn.Module) -> nn.Module:
    """`model` with its parameters and running statistics off the values they start with, the same ones every time."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like) * 0.2

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
