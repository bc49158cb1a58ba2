"""Runs of a network on x and on L_h x with hooks on its layers, for `gcnn.testing.explain`: what each layer does by itself.

Every layer gets the exact L_h of what it got in the run on x, as far as that can be told from shapes and numbers, so that its
errors are its own; the rows say why and what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gcnn.functional import act
from gcnn.groups import Group, Subgroup
from gcnn.lattice import mask_outside
from gcnn.nn import GAvgPool, GConvTranspose, GMaxPool


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


def leaves(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that hold no others but parametrizations, such as those of weight_norm, and their names."""
    return {
        m: name or type(m).__name__
        for name, m in model.named_modules()
        if "parametrizations" not in name and not [child for child, _ in m.named_children() if child != "parametrizations"]
    }


def turn(group: Group, h: int, y: Tensor, stabilizer: Subgroup | None = None) -> Tensor:
    """L_h y, for what the shape of y says that it is."""
    if y.ndim < 3:
        return y  # (N, K): no place, no element
    if y.ndim == 3 and group.dim > 1:
        cosets = group.order // len(group.check_subgroup(stabilizer))
        if y.shape[2] not in (1, cosets):
            raise ValueError(
                f"expected numbers (N, K), which stay, or functions (N, K, {cosets}) on {group}, got {tuple(y.shape)}; vectors "
                "and matrices, which turn otherwise, cannot be examined; gcnn.functional.act turns images for a test of your own"
            )
        return turn(group, h, y.reshape(*y.shape, *(1,) * group.dim), stabilizer).reshape(y.shape)  # (N, K, S)
    if y.ndim == group.dim + 3 and y.shape[2] == 1:
        stabilizer = range(group.order)  # one coset, the whole group
    return act(group, h, y, stabilizer=stabilizer)


def first_map(inputs: Sequence[Tensor], dim: int) -> int:
    """Which of several inputs is the first one with places; where none has, that is more than numbers (N, K)."""
    return next((i for least in (dim + 2, 3) for i, t in enumerate(inputs) if t.ndim >= least), 0)


def inside(group: Group, y: Tensor) -> Tensor:
    """`y` with zeros outside the domain, where it is a map or an image."""
    return mask_outside(group, y) if y.ndim >= group.dim + 2 else y


Reading = Callable[[Any], Any]


def readings(group: Group, y: Tensor, inputs: Sequence[Tensor]) -> list[Reading]:
    """How a result may be read: as it is, as an image with no channel or its channels last, as numbers that belong to no place.

    The others where its shape allows them: numbers where it has the axes or the sides of no map, and not those of the input.
    """
    d, space = group.dim, inputs[first_map(inputs, group.dim)].shape[-group.dim :]
    # a result that turns has equal sides where the input has them and the group mixes all axes
    square = len(set(space)) == 1 == len(group.axis_classes)

    def fits(sides: Sequence[int]) -> bool:
        return sides == space or (square and len(set(sides)) == 1 < sides[0])

    found: list[Reading] = [as_it_is]
    if d > 1 and y.ndim == d + 1 and fits(y.shape[1:]):
        found.append(lambda z: z.unsqueeze(1))
    if d > 1 and y.ndim == d + 2 and fits(y.shape[1:-1]) and not fits(y.shape[2:]):
        found.append(lambda z: z.movedim(-1, 1))
    sides = y.shape[-d:]
    uneven = len(sides) == d and any(len({sides[i] for i in axes}) > 1 for axes in group.axis_classes)
    if d > 1 and y.ndim > 2 and sides != space and (y.ndim not in (d + 2, d + 3) or uneven):
        found.append(as_numbers)
    return found


def as_it_is(y: Any) -> Any:
    """The first of all readings."""
    return y


def as_numbers(y: Any) -> Any:
    """Numbers (N, K), which stay as they are: of this reading, one only hears where it is right."""
    return y.flatten(1)


def numbers_of(y: Tensor) -> Tensor:
    """`y` as what can be subtracted: bytes would go round at 0, and what is true or false cannot."""
    return y if y.is_floating_point() or y.is_complex() else y.double()


def larger(a: float, b: float) -> float:
    """The larger of two errors; a NaN is larger than any number."""
    return a if b <= a or a != a else b


def distance(group: Group, moved: Tensor, turned: Tensor, size: float) -> float:
    """The largest difference of two results inside the domain, relative to `size` if that is not 0."""
    if moved.shape != turned.shape:
        return float("inf")
    try:
        left, right = (inside(group, numbers_of(y)) for y in (moved, turned))
        difference = float((left - right).abs().max()) if moved.numel() else 0.0
    except ValueError:  # a size that has no centre on a hexagonal lattice
        return float("inf")
    return difference / size if size else difference


@dataclass(frozen=True)
class _Turned:
    """The exact L_h of a value, and as what it was turned."""

    kind: str  # a "map", the "planes" of one, or "plain": an image or numbers; "" for the shape of something else
    value: Tensor


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
    done: bool = False  # whether it has returned something
    followed: bool = True  # whether its inputs are known to be exact, so that its errors are its own

    def only_moves(self) -> bool:
        """Whether the output has the numbers of the input, in other places: it may be another layout."""
        x, y = self.inputs[0] if self.inputs else None, self.output
        return x is not None and y is not None and x.numel() == y.numel() and x.flatten().sort()[0].equal(y.flatten().sort()[0])


class Probe:
    """Runs a model on x and on L_h x with hooks on its leaves, handing each leaf the exact L_h of what it got before."""

    def __init__(self, model: nn.Module, group: Group, tolerance: float, stabilizer: Subgroup | None = None) -> None:
        self.model, self.group, self.tolerance, self.stabilizer = model, group, tolerance, stabilizer
        self.leaves = leaves(model)
        groups = [group, *(getattr(m, name, None) for m in model.modules() for name in ("group", "out_group"))]
        self.groups = list(dict.fromkeys(g for g in groups if isinstance(g, Group) and g.dim == group.dim))
        self.calls: list[_Call] = []
        self.after = 0.0  # the error of code after the last layer
        self.read: Reading = as_it_is

    def record(self, x: tuple[Tensor, ...]) -> Tensor:
        """Runs the model on x, all of its inputs, and keeps what every layer gets and returns."""
        last = x[first_map(x, self.group.dim)].shape

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [a.clone() for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            self.calls.append(_Call(self.leaves[module], module, inputs, size_before=tuple(last)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal last
            self.calls[-1].done = True
            if isinstance(output, Tensor):
                self.calls[-1].output = output.clone()
                last = output.shape

        try:
            self.output = self._run(x, before, after)
        except (ValueError, RuntimeError) as error:
            call = self.calls[-1] if self.calls else None
            if call is None:
                raise
            if call.done:  # in code between the layers
                way = "; where maps of two sizes meet, as in a U-Net, give images whose sides all of its strides divide"
                way = way if "Sizes of tensors must match" in str(error) else ""
                words = (
                    f"explain: the model fails after {call.name} ({type(call.module).__name__}): {str(error).rstrip('.')}{way}"
                )
                raise (ValueError if way or isinstance(error, ValueError) else RuntimeError)(words) from error
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
        wide = isinstance(module, nn.Linear) and x.ndim and x.shape[-1] == module.in_features * group.order
        before = [c.output for c in self.calls[:-1] if c.output is not None and c.output.ndim > 2]
        if wide and before and before[-1].ndim == group.dim + 3 and before[-1].shape[2] == group.order:
            return f"; these are {module.in_features} channels of {group.order} elements: put CosetPool({group}) before it", True
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

    def says_the_same(self, x: tuple[Tensor, ...]) -> bool:
        """Whether the model returns for x just what it has returned before."""
        return torch.equal(self.read(self.model(*x)), self.output)

    def draws(self, x: tuple[Tensor, ...]) -> Iterable[Row]:
        """A row for a model that returns for x something else than before, which was for x, too."""
        was, now = (numbers_of(y) for y in (self.output, self.read(self.model(*(t.clone() for t in x)))))
        little = self.tolerance * float(was.nan_to_num(0.0, 0.0, 0.0).abs().max())
        if was.shape != now.shape or not torch.allclose(now, was, rtol=0, atol=little, equal_nan=True):
            why = "the same input gives another result each time: the model draws random numbers, or keeps something of each call"
            remedy = "draw them in training alone (if self.training), or let the caller give them"
            yield Row("forward", "(code)", distance(self.group, now, was, little / self.tolerance), why, remedy)

    def sees_a_fault(self) -> bool:
        """Whether a layer, or the code around the layers, was off so far."""
        errors = [self.after, *(e for call in self.calls if call.followed for e in (call.error, call.error_before))]
        return not all(error <= self.tolerance for error in errors)

    def stride_fails(self) -> bool:
        """Whether one of the layers that were off has a stride that does not fit."""
        off = [call for call in self.calls if call.followed and not call.error <= self.tolerance and call.inputs]
        return any(stride_fault(self.group, call.module, call.inputs[0]) for call in off)

    def measure(self, x: tuple[Tensor, ...], elements: Iterable[int]) -> None:
        """The errors of all calls, each on exact inputs.

        First, inputs whose layout cannot be followed stay as they are, and only outputs of failing layers are replaced. If the
        result is then exact, only those fail. Otherwise code between layers fails, and in a second pass every input is replaced
        by the best guess.
        """
        for guess in (False, True):
            self.after = 0.0
            for call in self.calls:
                call.error, call.error_before, call.followed = 0.0, 0.0, True
            for h in elements:
                self._compare(h, tuple(turn(self.group, h, t, self.stabilizer) for t in x), guess)
                if not guess and not self.after <= self.tolerance:
                    break
            if self.after <= self.tolerance:
                break

    def _compare(self, h: int, moved: tuple[Tensor, ...], guess: bool) -> None:
        queue = iter(self.calls)
        call: _Call
        first = moved[first_map(moved, self.group.dim)]
        last = _Turned("map" if first.ndim == self.group.dim + 3 else "plain", first)  # the exact L_h of what went before
        failed = False

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            nonlocal call, last
            following = next(queue, None)
            if following is None or following.module is not module:
                raise ValueError("explain: the model calls other layers for L_h x than for x, which cannot be compared")
            call = following
            references = iter(call.inputs)

            def exact(a: Any) -> Any:
                nonlocal last, failed
                if not isinstance(a, Tensor):
                    return a
                reference = next(references)
                error, found = self.closest(h, reference, a, last, a.shape)
                call.error_before = larger(call.error_before, error)
                if not error <= self.tolerance and (not guess or (failed and found is None)):
                    call.followed = False
                failed = failed or not error <= self.tolerance
                if found is None or (not guess and not error <= self.tolerance):
                    return a
                last = found
                return _overwritten(a, last.value)

            return tuple(exact(a) for a in args), {k: exact(a) for k, a in kwargs.items()}

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            nonlocal last, failed
            if call.output is None:
                return None
            error, found = self.closest(h, call.output, output, last)
            call.error = larger(call.error, error)
            fails = not error <= self.tolerance
            if fails and not guess and call.followed and call.only_moves():
                call.followed = False
            failed = failed or (fails and call.followed)
            if found is None or (fails and not guess and not call.followed):
                return None
            last = found
            return _overwritten(output, last.value)

        y = self.read(self._run(moved, before, after))
        size = float(numbers_of(self.output).abs().max())
        self.after = larger(self.after, min(distance(self.group, y, t, size) for t in self.outputs(h)))

    def _run(self, x: tuple[Tensor, ...], before: Any, after: Any) -> Any:
        hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in self.leaves]
        hooks += [m.register_forward_hook(after, with_kwargs=True) for m in self.leaves]
        try:
            return self.model(*(t.clone() for t in x))
        finally:
            for hook in hooks:
                hook.remove()

    def closest(
        self, h: int, reference: Tensor, moved: Tensor, before: _Turned, shape: tuple[int, ...] | None = None
    ) -> tuple[float, _Turned | None]:
        """The distance of `moved` from L_h of `reference`, and that L_h, by the best guess of how the value transforms.

        `before` is the exact L_h of the value before, which this may reshape; its kind decides where numbers do not. Guesses of
        `shape` come first.
        """
        size = float(numbers_of(reference).abs().max()) if reference.numel() else 0.0
        found = [_Turned("map", y) for y in self.maps(h, reference)]
        others = [_Turned("planes", y) for y in self.planes(h, reference)]
        others += [_Turned("plain", y) for y in self.outputs_of(h, reference)]
        found += sorted(others, key=lambda t: (t.kind == "planes") != self._stays_planes(reference, before))
        if before.value.numel() == reference.numel():
            found.append(_Turned("", before.value.reshape(reference.shape)))
        if not found:
            return float("inf"), None
        errors = [distance(self.group, moved, t.value, size) for t in found]
        fits = [t for t, error in zip(found, errors, strict=True) if error <= self.tolerance]
        fits += [t for t in found if shape is not None and t.value.shape == shape]
        best = (fits or found)[0]
        return min(errors), _Turned(best.kind, best.value.clone())

    def _stays_planes(self, y: Tensor, before: _Turned) -> bool:
        """Whether what cannot be told from its numbers is more likely the planes of a map than an image, or numbers."""
        x = before.value
        return y.ndim == self.group.dim + 2 and (
            before.kind == "planes" or (before.kind == "map" and y.shape[1] == x.shape[1] * x.shape[2])
        )

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
            return [turn(group, h, y, stabilizer)]
        except ValueError:  # a size that has no centre on a hexagonal lattice
            return []

    def outputs_of(self, h: int, y: Tensor) -> list[Tensor]:
        """L_h y as an image, or as numbers that do not change."""
        return self._turned(self.group, h, y) if y.ndim == self.group.dim + 2 else [] if y.ndim > 3 else [y]

    def outputs(self, h: int, output: Tensor | None = None) -> list[Tensor]:
        """L_h of what the model returns, as `equivariance_error` reads it."""
        y = self.output if output is None else output
        return self.maps(h, y) or self.outputs_of(h, y) or [y]

    def _elements(self, h: int) -> list[tuple[Group, int]]:
        """The element h in every group of the model that has it."""
        matrix = self.group.matrices[h]
        return [(g, g.index(matrix)) for g in self.groups if matrix in g.matrices]

    def rows(self, sizes: tuple[int, ...] = ()) -> Iterable[Row]:
        """One row per call, and one for code that fails; `sizes` of the input fit all strides."""
        for call in self.calls:
            if not call.followed:
                yield Row(call.name, f"{type(call.module).__name__} (not followed)", call.error)
                continue
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
        remedy = "pool over space and over the group by sums, means or maxima, or return maps"
        if y.ndim in (2, group.dim + 2) and y.shape[1] == group.dim:
            remedy = (
                f"if these {group.dim} numbers are a vector that is to turn with the image, explain cannot tell: compare them "
                f"with group.matrices[h] times the vectors of x (docs/howto.md has it); else {remedy}"
            )
        return "the code after the last layer is not equivariant", remedy

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
        if found := stride_fault(group, module, x, sizes):
            return found
        if isinstance(own, Group) and 1 < len(getattr(module, "stabilizer", (0,))) < own.order:
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


def stride_fault(group: Group, module: nn.Module, x: Tensor, sizes: tuple[int, ...] = ()) -> tuple[str, str] | None:
    """Why the stride of a layer does not fit `x`, and what to do; None where it fits. `sizes` of the input fit all strides."""
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
    axes = zip(group.reversed_axes, x.shape[-group.dim :], kernels, strides, paddings, dilations, strict=True)
    for backwards, n, k, s, p, d in axes:
        span = n + 2 * p - d * (k - 1) - 1
        rest = span % s
        if rest and backwards:
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


class MisfitError(Exception):
    """A stride that does not fit the size that comes to its layer."""


@contextmanager
def strides_checked(model: nn.Module, group: Group) -> Iterator[None]:
    """With a MisfitError where a stride does not fit, at the first layer: most sizes end at one of those."""

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if first is not None and stride_fault(group, module, first):
            raise MisfitError

    hooks = [m.register_forward_pre_hook(check, with_kwargs=True) for m in leaves(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def sizes_that_fit(model: nn.Module, inputs: tuple[Tensor, ...], group: Group, most: int = 100) -> list[int]:
    """As `gcnn.testing.exact_sizes`, of a model in eval mode on the meta device; the nearest `most` of at most 100 sizes."""
    main, found = inputs[first_map(inputs, group.dim)], list[int]()
    side, space = main.shape[-1], main.shape[-group.dim :]

    def sized(t: Tensor, n: int, every: bool) -> Tensor:  # sides as long as the last one of the main input, or all like its
        if t.ndim < group.dim + 2:
            return torch.empty_like(t, device="meta")
        sides = [n if m == side or (every and t.shape[-group.dim :] == space) else m for m in t.shape[-group.dim :]]
        return torch.empty(*t.shape[: -group.dim], *sides, dtype=t.dtype, device="meta")

    near = sorted(range(max(1, 3 * side // 4), 3 * side // 2 + 1), key=lambda n: abs(n - side))[:100]
    with torch.no_grad(), strides_checked(model, group), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the meta device
        for every in (True, False) if len(set(space)) > 1 else (True,):
            for n in near if not found else ():
                with suppress(Exception):  # a size that does not go through, for whatever reason
                    model(*(sized(t, n, every) for t in inputs))
                    found.append(n)
                if len(found) == most:
                    break
    return sorted(found)
