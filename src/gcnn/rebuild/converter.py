"""The network that is being rebuilt: its graph, its values, and what the handlers of layers and calls ask of it."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gcnn.groups import Group
from gcnn.nn import CosetPool
from gcnn.nn.each import AtOnePlace
from gcnn.rebuild import calls, layers, parameters
from gcnn.rebuild.graph import (
    changes,
    copy_matters,
    ends,
    feeds_layers,
    from_pool,
    heads,
    images,
    leads_to_results,
    meets_maps,
)
from gcnn.rebuild.result import Converted
from gcnn.rebuild.values import (
    BY_SAMPLE,
    CONVS,
    NORMS,
    OF_SAMPLES,
    TRANSPOSED,
    UnequalError,
    UnevenError,
    Value,
    attribute,
    drops_samples,
    is_plain_record,
    makes_record,
)
from gcnn.tracing import ALIASES, IN_PLACE, POINTWISE_FUNCTIONS, POINTWISE_METHODS, POINTWISE_MODULES, check_names

AS_METHODS: dict[Any, str] = {
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
}


_BY_CALL = "use a layer, nn.{}; filters of your own, and functions of filters, go into the layer of the result"
_STACK = "add them up, or concatenate them along the channels, axis 1"
_SHUFFLE = "use nn.Upsample, or F.interpolate, and a convolution"
REMEDIES: dict[Any, str] = {
    **{getattr(F, f"conv{d}d"): _BY_CALL.format(f"Conv{d}d") for d in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{d}d"): _BY_CALL.format(f"ConvTranspose{d}d") for d in (1, 2, 3)},
    F.linear: _BY_CALL.format("Linear").replace("filters", "weights"),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, F.pixel_shuffle, F.pixel_unshuffle), _SHUFFLE),
    torch.stack: _STACK,
}
"""Ways out for what is often met and is not known."""
_OF_MATRICES: set[Any] = {  # which take vectors (N, M) for a matrix, and so mix samples
    *(torch.transpose, torch.swapaxes, torch.t, torch.mm, torch.matmul, operator.matmul),
    *("transpose", "swapaxes", "t", "mm", "matmul"),
}


class Converter:
    """Rebuilds a traced graph node by node."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        group: Group,
        pool: Literal["mean", "max"] | None,
        weights: bool,
        fixed: dict[str, bool],
    ) -> None:
        self.model, self.old_graph, self.group, self.pool, self.weights = model, graph, group, pool, weights
        self.fixed = fixed  # dropouts that are at work in training and eval mode alike, or in neither
        self.heads, self.images, self.ends = set(heads(model, graph)), images(model, graph), ends(model, graph)
        called = {name: [n for n in graph.nodes if n.op == "call_module" and n.target == name] for name in self.heads}
        # with weights, a mean before another layer would not be the mean of the answers
        stay = {name: any((weights and feeds_layers(model, n)) or meets_maps(model, n) for n in called[name]) for name in called}
        self.final = {name for name in called if not stay[name]}
        self.in_place = any(changes(model, node) for node in graph.nodes)
        self.multiple, self.unit = 1, 0
        kinds = (*CONVS, *TRANSPOSED, nn.Linear)
        layers_ = [m for name, m in model.named_modules() if isinstance(m, kinds) and name not in self.heads]
        widths = {getattr(m, "out_channels", getattr(m, "out_features", 0)) for m in layers_} - {1}
        largest = sorted(widths, reverse=True)
        # what all widths are multiples of, and, finer, what all but the smallest are, which may have no part in sums
        self.units = sorted({math.gcd(*largest[: n + 1]) for n in range(len(largest))}) or [1]

    def is_result(self, node: fx.Node) -> bool:
        """Whether nothing but functions of this value alone stands between it and the results, and nothing is learned there."""
        return node in self.ends and leads_to_results(node)

    def parameters(self) -> int:
        """How many parameters of the old network its forward uses."""
        used: dict[int, int] = {}
        for node in self.old_graph.nodes:
            found: Any = ()
            if node.op == "call_module":
                found = self.model.get_submodule(str(node.target)).parameters()
            elif node.op == "get_attr" and isinstance(held := attribute(self.model, str(node.target)), nn.Parameter):
                found = (held,)
            used.update((id(p), p.numel()) for p in found)
        return sum(used.values())

    def at(self, factor: float) -> fx.GraphModule:
        """The new network with widths multiplied by `factor`, and such that channels can be split as they are."""
        self.factor = factor
        while True:
            try:
                return self._built()
            except UnequalError as error:
                if self.unit:
                    raise ValueError(f"convert: {error}") from None
                self.unit = self.units[0]  # every width by the same fraction: so sums of widths stay sums
            except UnevenError as error:
                needed = math.lcm(self.multiple, error.parts)
                self.multiple = needed if needed > self.multiple else self.multiple * error.parts  # parts of parts
                if self.multiple > 64:
                    raise ValueError(f"convert: {error}") from None

    def _built(self) -> fx.GraphModule:
        check_names(self.model, self.old_graph, "convert")
        self.graph, self.root = fx.Graph(), nn.Module()
        self.values: dict[fx.Node, Value] = {}
        self.made: dict[str, nn.Module] = {}
        self.numbers: dict[fx.Node, Any] = {}  # of `parameters.computed`, `emitted` and `spread`
        self.emitted: dict[fx.Node, fx.Node] = {}
        self.spread: dict[Any, fx.Node] = {}
        self.spared: set[fx.Node] = set()  # calls that are done already
        self.axes: list[Literal["", "last", "squeezed"]] = []  # where the channels of the results are
        for node in self.old_graph.nodes:
            self.present = node
            handle: Callable[[fx.Node], Value] = getattr(self, f"_{node.op}")
            try:
                self.values[node] = handle(node)
            except ValueError as error:
                if node.op not in ("call_function", "call_method"):
                    raise
                raise ValueError(f"{error} (in {node.meta['place']})") from None
            except (TypeError, AttributeError, IndexError) as error:  # numbers that are known only when the network runs
                if node.op not in ("call_function", "call_method"):
                    raise
                raise ValueError(
                    f"convert: {node.name} is called in a way that is not known ({error}); give its sizes and axes as numbers "
                    f"(in {node.meta['place']})"
                ) from error
        self.graph.lint()
        for node in self.graph.nodes:
            node.type = None  # annotations that are strings would stop pickle
        return Converted(self.root, self.graph, type(self.model).__name__)

    def _placeholder(self, node: fx.Node) -> Value:
        channels = self.images.get(node)
        return Value(self.graph.node_copy(node), "other" if channels is None else "image", channels or 0, channels or 0)

    def _output(self, node: fx.Node) -> Value:
        def result(n: fx.Node, x: Value) -> Any:
            if x.kind == "parts":
                return tuple(result(n, part) for part in x.node)
            if x.kind == "record":
                args, kwargs = fx.map_arg((x.node.args, x.node.kwargs), lambda each: result(each, self.values[each]))
                return self.graph.call_function(x.node.target, args, kwargs)
            if x.of is not None and x.of.kind != "image":
                raise self.refusal("a shape as a result", Value(None), "return its entries, x.shape[2]")
            if x.kind not in ("size", "shape"):
                self.axes.append("last" if x.last else "squeezed" if x.squeezed else "")
            y = self._pooled_at_the_end(n, x)
            if x.kind == "flat" and self.pool is not None:
                return self.graph.call_method("flatten", (y.node, 1))
            return self.graph.call_method("movedim", (y.node, 1, -1)) if x.last else self.own(y)

        return Value(self.graph.output(fx.map_arg(node.args[0], lambda n: result(n, self.values[n]))))

    def _pooled_at_the_end(self, node: fx.Node, x: Value) -> Value:
        try:
            return self.pooled(x)
        except ValueError as error:
            place = node.meta.get("place", str(node.target))
            raise ValueError(f"{error} (in {place})") from None

    def _get_attr(self, node: fx.Node) -> Value:
        """A parameter or buffer; one number a channel becomes one number a G-feature map when it meets a map."""
        return Value(node)

    def _call_module(self, node: fx.Node) -> Value:
        name = str(node.target)
        module = self.model.get_submodule(name)
        x = self.value(node.args[0] if node.args else next(iter(node.kwargs.values()), None))
        if len(node.args) + len(node.kwargs) != 1:
            if any(self.value(n).kind not in ("other", "size") for n in node.all_input_nodes):
                raise self.refusal(f"{name} ({type(module).__name__}), which has further arguments,", x)
            made = self.add(name, self.layer(name, module, lambda: self.copied(module)))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.own(self.value(n)))
            return Value(self.graph.call_module(made, args, kwargs))
        if self.waits(x):
            if parameters.waits_for(self, node, module):
                return Value(node)
            x = replace(x, node=self.own(x))
        if x.kind == "other" and not isinstance(module, (*CONVS, *TRANSPOSED, *NORMS, nn.Linear)):
            return self.kept(name, module, x)
        if x.kind == "line" and not isinstance(module, (*layers.OF_LINES, *POINTWISE_MODULES)):
            raise self.refusal(f"{name} ({module})", x, "reduce its last axis, or flatten after it")
        for kinds, handle in layers.MODULES.items():
            if isinstance(module, kinds):
                if x.last and not isinstance(module, layers.OF_LAST):
                    raise self.refusal(
                        f"{name} ({module}), after channels that were permuted to the end,", x, "permute them back first"
                    )
                return handle(self, name, module, x)
        if type(module).__name__ in BY_SAMPLE and not drops_samples(module, self.group.dim):
            remedy = "its mask must have the axes of its input: torch.rand(x.shape[0], *(1,) * (x.ndim - 1))"
            raise self.refusal(
                f"{name} ({type(module).__name__}), which does not drop whole samples of maps on a group,", x, remedy
            )
        if isinstance(module, POINTWISE_MODULES) or type(module).__name__ in BY_SAMPLE:
            return self.kept(name, module, x)
        raise self.refusal(f"{name} ({type(module).__name__})", x, REMEDIES.get(type(module), ""))

    def _call_function(self, node: fx.Node) -> Value:
        return self._operation(node, POINTWISE_FUNCTIONS)

    def _call_method(self, node: fx.Node) -> Value:
        return self._operation(node, POINTWISE_METHODS)

    def _operation(self, node: fx.Node, pointwise: Any) -> Value:
        """A function or a method: by the tables of `calls`, or number by number."""
        target: Any = node.target
        if makes_record(target):
            if not is_plain_record(target):
                remedy = "its class computes fields when it is made, which would be done twice; return a tuple or a dictionary"
                raise self.refusal(f"{node.name}, a {target.__name__},", Value(None), remedy)
            return Value(node, "record")
        x = self.value(node.args[0] if node.args else next(iter(node.kwargs.values()), None))
        if target in calls.OF_ANYTHING:
            return calls.OF_ANYTHING[target](self, node, x)
        waiting = parameters.of_parameters(self, node)
        if waiting is not None:
            return waiting
        if target in calls.OPERATIONS and x.kind != "other":
            return calls.OPERATIONS[target](self, node, x)
        return self.pointwise(node, target in pointwise)

    def rank(self, x: Value) -> int:
        """How many axes the old network's value had."""
        return 2 if x.kind in ("fibre", "flat") else 2 + x.axes if x.kind == "line" else 2 + self.group.dim

    def along_channels(self, x: Value, dim: Any) -> bool:
        """Whether this axis of the old network's value held its channels."""
        if not isinstance(dim, int) or x.kind not in ("image", "map", "line", "fibre"):
            return False
        rank = self.rank(x)
        return bool(-rank <= dim < rank and dim % rank == (rank - 1 if x.last else 1))

    def waits(self, x: Value) -> bool:
        """Whether this is a parameter that has not met anything yet."""
        return isinstance(x.node, fx.Node) and x.node.graph is self.old_graph

    def held(self, x: Value) -> Any:
        """The numbers of a parameter, or of a function of parameters, that waits."""
        return parameters.computed(self, x.node)

    def ends_at_one_place(self, node: fx.Node, x: Value) -> bool:
        """Whether a map, flattened where no layer follows, is meant to have a single place; that is checked when it runs."""
        return node in self.ends and (x.old == 1 or from_pool(self.model, node.args[0] if node.args else None))

    def single(self, x: Value, name: str = "a reshape") -> Value:
        """A flattened map of a single place as a function on the group."""
        if x.single:
            return replace(x, node=self.graph.call_method("flatten", (x.node, 2)), kind="fibre")
        return replace(self.insert(f"{name}_at_one_place".replace(" ", "_"), AtOnePlace(self.group, name), x), kind="fibre")

    def vector(self, x: Value) -> Value:
        """The same for a flattened map, if it has a single place; else the value as it is."""
        return self.single(x) if x.kind == "flat" and x.single and not x.last else x

    def lifted(self, name: str, image: Value) -> Value:
        """An image as a map that is the same on every element."""
        if not image.old:
            raise ValueError(
                f"convert: {name} concatenates a map with an image whose channels are not known; let a convolution take that "
                "image as it is, or convolve it before"
            )
        sizes = (-1, -1, self.group.order, *(-1,) * self.group.dim)
        node = self.graph.call_method("expand", (self.graph.call_method("unsqueeze", (image.node, 2)), *sizes))
        return replace(image, node=node, kind="map")

    def pointwise(self, node: fx.Node, pointwise: bool) -> Value:
        """A function of numbers, on values of one kind; images meet maps only after those were pooled."""
        inputs = {n: self.value(n) for n in node.all_input_nodes}
        kinds = {v.kind for v in inputs.values()}
        if any(v.of is not None and v.of.kind != "image" for v in inputs.values()):
            raise self.refusal(f"{node.name}, a call on a whole shape,", Value(None), "take its entries, x.shape[2]")
        if kinds <= {"other", "shape", "size"}:
            return self._of_numbers(node, inputs, pointwise)
        maps = [v for v in inputs.values() if v.kind not in ("other", "shape", "size")]
        if "parts" in kinds:
            raise self.refusal(f"{node.name}, a call on the parts of a map,", Value(None), "take the parts one by one")
        like = max(maps, key=lambda v: (v.kind != "image", v.old, not v.single))
        what = f"{node.name}, a call of {getattr(node.target, '__name__', node.target)},"
        if not pointwise:
            of_samples = like.kind == "fibre" and node.target in _OF_MATRICES
            raise self.refusal(what, like, OF_SAMPLES if of_samples else REMEDIES.get(node.target, ""))
        if "image" in kinds and like.kind == "map":  # an image is a map that is the same on every element
            if like.new != like.old or like.last or node.target in IN_PLACE:
                raise self.refusal(
                    what, like, 'an image meets it, so its channels must be those of the image: keep="channels"; and not in place'
                )
            lifted = {n: self.graph.call_method("unsqueeze", (v.node, 2)) for n, v in inputs.items() if v.kind == "image"}
            for n, node_ in lifted.items():
                channels = inputs[n].old or like.old
                inputs[n] = replace(inputs[n], node=node_, kind="map", old=channels, new=channels, single=False)
            like = max((v for v in inputs.values() if v.kind == "map"), key=lambda v: v.old)
            maps = [v for v in inputs.values() if v.kind not in ("other", "shape", "size")]
        if len({(v.kind, v.last, v.axes) for v in maps}) > 1:
            raise self.refusal(what, like, "values of one kind can be added or multiplied")
        for n, v in inputs.items():
            if v.kind in ("other", "shape") and not self.waits(v):
                raise self.refusal(
                    f"{what} which meets {n.name}, something that is no map,",
                    like,
                    "numbers are, and parameters of one number, or one a channel",
                )
        new = {v.new for v in maps if v.old == like.old}
        if len(new) > 1:
            raise UnequalError(
                f"{node.name} adds or multiplies maps that had {like.old} channels and now have {sorted(new)}, "
                f'since some of them are concatenated, or results; use keep="channels" (in {node.meta["place"]})'
            )
        if like.kind == "flat" and any(self.waits(v) and self.held(v).numel() > 1 for v in inputs.values()):
            if not all(v.single for v in maps):
                raise self.refusal(what, like, "parameters with a number a channel meet maps, before those are flattened")
            inputs = {n: self.vector(v) for n, v in inputs.items()}
            like = self.vector(like)
            maps = [v for v in inputs.values() if v.kind not in ("other", "shape", "size")]
        nodes: dict[fx.Node, Any] = {}
        for n, v in inputs.items():
            nodes[n] = parameters.spread(self, v, like) if self.waits(v) else v.node
        changed: Any = node.args[0] if node.args else None
        method = AS_METHODS.get(node.target) if changed in inputs and inputs[changed].kind not in ("other", "size") else None
        if method is None:
            made = self._copied(node, nodes)
        else:  # what is unpickled is traced again, and would make `x += y` a sum
            made = self.graph.call_method(method, fx.map_arg(node.args, lambda n: nodes[n]))
        like = replace(like, node=made, single=all(v.single for v in maps))
        if like.kind == "image" and not like.old:  # a mean of each channel tells how many there are
            shapes = [self.held(v).shape for v in inputs.values() if self.waits(v)]
            channels = max((s[-1 - self.group.dim] for s in shapes if len(s) > self.group.dim), default=0)
            like = replace(like, old=channels, new=channels) if channels > 1 else like
        if changes(self.model, node) or node.target in ALIASES:
            return like
        return replace(like, narrowed=False, memory=like.memory if len({v.memory for v in maps}) == 1 else "unknown")

    def same_or_copied(self, node: fx.Node, x: Value) -> Value:
        """`x` where the old network makes a copy of what does not lie in the order of its axes, or of the order asked for."""
        format_ = node.kwargs.get("memory_format", torch.contiguous_format)
        flat = x.single or x.old == 1  # then orders are the same
        if format_ is not torch.contiguous_format or x.memory == "unknown" or (flat and x.memory):
            if self.in_place and copy_matters(self.model, node):
                what = f"{node.name}, which may be a copy or not, before a change in place,"
                raise self.refusal(what, x, "write clone() in its place, or change nothing in place")
            return replace(x, memory="" if format_ is torch.contiguous_format else "unknown", narrowed=False)
        if self.in_place and (x.memory or x.narrowed):
            x = replace(x, node=self.graph.call_method("clone", (x.node,)))
        return replace(x, memory="", narrowed=False)

    def _of_numbers(self, node: fx.Node, inputs: dict[fx.Node, Value], pointwise: bool) -> Value:
        """A function of sizes or of parameters: a number again, if it is one of Python's, or if all parameters are single."""
        single = {n: v for n, v in inputs.items() if self.waits(v) and self.held(v).numel() == 1}
        if single and pointwise and all(n in single or v.kind == "size" for n, v in inputs.items()):
            numbers = {n: parameters.number(self, v.node) for n, v in single.items()}
            return Value(self._copied(node, {n: numbers.get(n, v.node) for n, v in inputs.items()}), "size")
        # torch.arange(x.shape[2]) and the like are positions
        python = node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
        sizes = bool(inputs) and all(v.kind == "size" for v in inputs.values())
        if python and sizes and all(isinstance(v.node, int | float | tuple) for v in inputs.values()):  # y.shape[1] // 2
            how: Any = node.target
            return Value(how(*self.known(node.args), **self.known(node.kwargs)), "size")
        found = Value(self._copied(node, {n: self.own(v) for n, v in inputs.items()}))
        if any(v.squeezed for v in inputs.values()):
            if not pointwise:
                raise self.refusal(
                    f"{node.name}, a call after a squeeze(1),", Value(None, "image"), "functions of single numbers may follow it"
                )
            return replace(found, squeezed=True)
        return replace(found, kind="size") if sizes and python else found

    def _copied(self, node: fx.Node, nodes: dict[fx.Node, Any]) -> fx.Node:
        return self.graph.node_copy(node, lambda n: nodes[n])

    def own(self, value: Value) -> Any:
        """A parameter that meets no map stays as it is."""
        return parameters.emitted(self, value.node) if self.waits(value) else value.node

    def parameter(self, name: str, held: Tensor) -> fx.Node:
        """The parameter of this name in the new network, as `held` has it."""
        owner = name.rpartition(".")[0]
        if owner and owner not in self.made and any((n.op, n.target) == ("call_module", owner) for n in self.old_graph.nodes):
            raise ValueError(
                f"convert: {name} is used before its layer, {owner}, and the two would be two parameters; use it after the layer"
            )
        place, last = self.place_of(name)
        kept = getattr(place, last, held)
        if kept.shape != held.shape:  # it was used before, in another shape
            if kept.numel() != held.numel():
                raise ValueError(f'convert: {name} meets values of several kinds, with other channels each; use keep="channels"')
            return self.graph.call_method("reshape", (self.graph.get_attr(name), tuple(held.shape)))
        if not hasattr(place, last):
            made: Any = held.detach().clone()
            if isinstance(attribute(self.model, name), nn.Parameter):
                place.register_parameter(last, nn.Parameter(made, held.requires_grad))
            else:
                place.register_buffer(last, made)
        return self.graph.get_attr(name)

    def value(self, node: Any) -> Value:
        """What a node of the old network, or a constant, has become."""
        return self.values[node] if isinstance(node, fx.Node) else Value(node)

    def known(self, arguments: Any) -> Any:
        """Arguments of a call, with those as numbers that are known before the network runs."""

        def number(n: fx.Node) -> Any:
            x = self.values[n]
            return x.node if x.kind == "size" and isinstance(x.node, int | float | tuple) else n

        return fx.map_arg(arguments, number)

    def width(self, name: str, channels: int) -> int:
        """How many channels a layer gets."""
        if name in self.heads or channels == 1:  # one for all, as an attention has it
            return channels
        if self.unit and channels % self.unit == 0:
            return channels // self.unit * max(1, round(self.unit * self.factor))
        return self.multiple * max(1, round(channels * self.factor / self.multiple))

    def pooled(self, x: Value) -> Value:
        """A map as an image, a function on the group as numbers, unless the result is to stay on the group."""
        if x.kind == "flat" and x.single and not x.last:
            return self.pooled(replace(x, kind="map"))
        if x.kind in ("flat", "line"):
            raise ValueError(
                "convert: a map is flattened and no linear layer follows; end with a mean over space, or with a linear layer"
            )
        if x.kind not in ("map", "fibre") or self.pool is None:
            return x
        y = self.insert("coset_pool", CosetPool(self.group, reduce=self.pool), x)
        return replace(y, kind="image" if x.kind == "map" else "other", last=False)

    def layer(self, name: str, module: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        """A new layer on the device and in the dtype of the old one; the same one again where that was called twice."""
        if name in self.made:
            return self.made[name]
        try:
            made = make()
        except ValueError as error:
            raise ValueError(f"convert: {name} ({module}): {error}") from None
        like = next(module.parameters(), next(self.model.parameters(), None))
        if like is not None and torch.empty(0).device.type != "meta":
            made.to(like.device, like.dtype)
        self.made[name] = made
        return made

    def kept(self, name: str, module: nn.Module, x: Value) -> Value:
        """The layer as it is, on `x`."""
        return self.insert(name, self.layer(name, module, lambda: self.copied(module)), x)

    def copied(self, module: nn.Module) -> nn.Module:
        """A copy of a layer that stays as it is; drawn anew, as all others are, if no weights are kept."""
        made = copy.deepcopy(module)
        for each in () if self.weights else made.modules():
            drawn: Any = getattr(each, "reset_parameters", getattr(each, "_reset_parameters", None))
            if drawn is not None:
                drawn()
        return made

    def insert(self, name: str, module: nn.Module, x: Value) -> Value:
        """A new layer on `x`."""
        node = self.graph.call_module(self.add(name, module), (x.node,))
        if isinstance(module, nn.Identity | nn.Dropout) or getattr(module, "inplace", False):
            return replace(x, node=node)
        if isinstance(module, POINTWISE_MODULES):
            return replace(x, node=node, narrowed=False)
        return replace(x.anew(node), memory="") if x.last else x.anew(node)  # layers of what is last lay it out anew

    def add(self, name: str, module: nn.Module) -> str:
        """Gives the module its name in the new network; another one where that is taken."""
        place, last = self.place_of(name)
        prefix = name[: len(name) - len(last)]
        count = 1
        while getattr(place, last, module) is not module:
            count += 1
            last = f"{name[len(prefix) :]}_{count}"
        place.add_module(last, module)
        return prefix + last

    def place_of(self, name: str) -> tuple[nn.Module, str]:
        """The module that is to hold what has this name, and its last part."""
        place, (*path, last) = self.root, name.split(".")
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        return place, last

    def refusal(self, what: str, x: Value, remedy: str = "") -> ValueError:
        """The error for what would not keep the symmetry."""
        where = {"image": "an image", "map": "a map on the group", "fibre": "a function on the group", "flat": "a flattened map"}
        where["line"] = "a map whose space was flattened"
        where["other"] = "something that is not known to be an image or a map (another input, say, or a pooled result)"
        remedy = remedy or "convert the parts around it, or write it with convolutions, norms, pools and pointwise functions"
        return ValueError(f"convert: {what} cannot be made equivariant on {where.get(x.kind, 'this')}; {remedy}")
