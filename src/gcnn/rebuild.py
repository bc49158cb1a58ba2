"""Rebuilds a traced network for a group, node by node: the heart of `gcnn.convert`.

Every value of the new network is known as an image, a map on the group, a function on the point group, or something else
(`Value`), and with it how many channels it had and has. What is not known to keep the symmetry is refused, with the way out.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gcnn.export import POINTWISE_FUNCTIONS, POINTWISE_METHODS, POINTWISE_MODULES
from gcnn.groups import Group
from gcnn.indices import support
from gcnn.nn import (
    CosetPool,
    GAdaptiveAvgPool,
    GAvgPool,
    GBatchNorm,
    GConv,
    GConvTranspose,
    GLinear,
    GMaxPool,
    GUpsample,
    LiftConv,
)
from gcnn.nn.each import ChannelDropout, ChannelNorm, EachElement, PadBoth, UpsampleTo

__all__ = ["Converter", "Value"]


CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVG_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
PADS: dict[Any, str] = {
    (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d): "constant",
    (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d): "reflect",
    (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d): "replicate",
    (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d): "circular",
}
BY_SAMPLE = {"DropPath", "StochasticDepth"}  # drop whole samples: they do not mind another axis
NORMS_THAT_ACT = {"BatchNormAct2d"}  # timm's: a norm, and then what its `drop` and `act` do
FUNCTIONAL_POOLS: dict[Any, Any] = {
    **dict.fromkeys((F.max_pool1d, F.max_pool2d, F.max_pool3d), GMaxPool),
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), GAvgPool),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), GAdaptiveAvgPool),
}


RESHAPES = {torch.reshape, torch.unsqueeze, torch.flatten, operator.getitem, "reshape", "view", "unsqueeze", "flatten"}


@dataclass(frozen=True)
class Value:
    """A value of the new network, and how it corresponds to the old one's."""

    node: Any
    kind: Literal["image", "map", "fibre", "flat", "shape", "size", "parts", "other"] = "other"
    """(N, K, *X); (N, K, S, *X); (N, K, S); a map that was flattened, still a map; the shape of a map; numbers from it; a list of
    values; else. A parameter is the node of the old network, which waits to see what it meets."""
    old: int = 0
    """Channels it had in the old network."""
    new: int = 0
    last: bool = False
    """A map that had its channels permuted to the end; still as it was."""
    single: bool = False
    """A map whose space is a single place."""
    view: tuple[int, ...] | None = None
    """The shape that a parameter was given."""


class Converter:
    """Rebuilds a traced graph node by node."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        group: Group,
        pool: Literal["mean", "max"] | None,
        weights: bool,
        always: set[str],
    ) -> None:
        self.model, self.old_graph, self.group, self.pool, self.weights = model, graph, group, pool, weights
        self.always = always
        self.heads, self.images = set(_heads(model, graph)), _images(model, graph)
        self.multiple = 1

    def at(self, factor: float) -> fx.GraphModule:
        """The new network with widths multiplied by `factor`, and such that channels can be split as they are."""
        self.factor = factor
        while True:
            try:
                return self._built()
            except _UnevenError as error:
                if self.multiple % error.parts == 0 or self.multiple * error.parts > 64:
                    raise ValueError(f"convert: {error}") from None
                self.multiple = math.lcm(self.multiple, error.parts)

    def _built(self) -> fx.GraphModule:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.values: dict[fx.Node, Value] = {}
        self.made: dict[str, nn.Module] = {}
        for node in self.old_graph.nodes:
            handle: Callable[[fx.Node], Value] = getattr(self, f"_{node.op}")
            self.values[node] = handle(node)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, type(self.model).__name__)

    # --- nodes by kind ---------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Value:
        channels = self.images.get(node)
        return Value(self.graph.node_copy(node), "other" if channels is None else "image", channels or 0, channels or 0)

    def _output(self, node: fx.Node) -> Value:
        def result(node: fx.Node) -> Any:
            x = self.values[node]
            y = self._pooled(x)
            if x.kind == "flat" and self.pool is not None:
                return self.graph.call_method("flatten", (y.node, 1))
            return self.graph.call_method("movedim", (y.node, 1, -1)) if x.last else self._own(y)

        return Value(self.graph.output(fx.map_arg(node.args[0], result)))

    def _get_attr(self, node: fx.Node) -> Value:
        """A parameter or buffer; one number a channel becomes one number a G-feature map when it meets a map."""
        return Value(node)

    def _call_module(self, node: fx.Node) -> Value:
        name = str(node.target)
        module = self.model.get_submodule(name)
        x = self._value(node.args[0] if node.args else next(iter(node.kwargs.values()), None))
        if len(node.args) + len(node.kwargs) != 1:
            if any(self._value(n).kind not in ("other", "size") for n in node.all_input_nodes):
                raise self._refusal(f"{name} ({type(module).__name__}), which has further arguments,", x)
            made = self._add(name, self._layer(name, module, lambda: copy.deepcopy(module)))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._own(self._value(n)))
            return Value(self.graph.call_module(made, args, kwargs))
        for kinds, handle in self._modules.items():
            if isinstance(module, kinds):
                return handle(self, name, module, x)
        if isinstance(module, POINTWISE_MODULES) or type(module).__name__ in BY_SAMPLE or x.kind == "other":
            return self._kept(name, module, x)
        raise self._refusal(f"{name} ({type(module).__name__})", x)

    def _call_function(self, node: fx.Node) -> Value:
        return self._operation(node, POINTWISE_FUNCTIONS)

    def _call_method(self, node: fx.Node) -> Value:
        return self._operation(node, POINTWISE_METHODS)

    def _operation(self, node: fx.Node, pointwise: Any) -> Value:
        """A function or a method: by the table at the end of this class, or number by number."""
        target: Any = node.target
        x = self._value(node.args[0] if node.args else next(iter(node.kwargs.values()), None))
        if target in self._of_anything:
            return self._of_anything[target](self, node, x)
        if target in RESHAPES and self._waits(x):
            return self._viewed(node, x)
        if target in self._operations and x.kind != "other":
            return self._operations[target](self, node, x)
        return self._pointwise(node, target in pointwise)

    # --- layers with weights ---------------------------------------------------------------------------------------------------

    def _conv(self, name: str, module: Any, x: Value) -> Value:
        transposed = isinstance(module, TRANSPOSED)
        if x.kind not in ("image", "map") or (transposed and x.kind == "image"):
            raise self._refusal(f"{name} ({module})", x)
        k_in = module.in_channels if x.kind == "image" else x.new
        if module.groups == module.in_channels and x.kind == "map":  # depthwise
            groups, k_out = k_in, k_in * (module.out_channels // module.in_channels)
        else:
            k_out = self._width(name, module.out_channels)
            groups = _divisor(math.gcd(k_in, k_out), module.groups)
        options: dict[str, Any] = {
            "kernel_size": module.kernel_size,
            "stride": module.stride,
            "padding": module.padding,
            "dilation": module.dilation,
            "groups": groups,
            "bias": module.bias is not None,
        }
        kind: Any = LiftConv if x.kind == "image" else GConv
        if transposed:
            kind, options["output_padding"] = GConvTranspose, module.output_padding
        else:
            options["padding_mode"] = module.padding_mode
        made = self._layer(name, module, lambda: kind(self.group, k_in, k_out, **options))
        if type(made) is not kind or made.in_channels != k_in:
            raise self._refusal(f"{name} ({module}), which is called on values of several kinds,", x, "give each its own layer")
        if self.weights:
            self._place(name, made, module.weight, module.bias)
        return replace(self._insert(name, made, x), kind="map", old=module.out_channels, new=k_out, single=False)

    def _linear(self, name: str, module: nn.Linear, x: Value) -> Value:
        made: nn.Module
        if x.kind == "image":
            raise self._refusal(f"{name} ({module})", x)
        if x.kind == "other":  # on invariants
            return replace(self._kept(name, module, x), old=module.out_features, new=module.out_features)
        if x.last and x.kind == "map":  # on the channels of every place
            k = self._width(name, module.out_features)
            made = self._layer(name, module, lambda: GConv(self.group, x.new, k, 1, bias=module.bias is not None))
            if self.weights:
                self._place(name, made, module.weight, module.bias)
            return replace(self._insert(name, made, x), old=module.out_features, new=k)
        if x.kind == "flat":
            side = round((module.in_features / x.old) ** (1 / self.group.dim))
            if side**self.group.dim * x.old != module.in_features:
                raise ValueError(
                    f"convert: {name} ({module}) takes {module.in_features} numbers, which are not {x.old} channels of a square "
                    "or cube of cells; flatten maps of equal sides, or pool over space first"
                )
            if x.last:
                raise self._refusal(
                    f"{name} ({module}), after channels that were permuted to the end,", x, "permute them back first"
                )
            if side == 1:
                x = self._single(x)
        if x.kind == "fibre" and name in self.heads and self.pool is not None:
            made = self._layer(name, module, lambda: nn.Linear(x.new, module.out_features, module.bias is not None))
            if self.weights:
                made.load_state_dict(module.state_dict())
            y = self._insert(name, made, self._pooled(x))
            return replace(y, kind="other", old=module.out_features, new=module.out_features)
        k = self._width(name, module.out_features)
        if x.kind == "fibre":
            made = self._layer(name, module, lambda: GLinear(self.group, x.new, k, module.bias is not None))
            shape: tuple[int, ...] = (module.out_features, -1, *(1,) * self.group.dim)
        else:
            made = self._layer(name, module, lambda: GConv(self.group, x.new, k, side, bias=module.bias is not None))
            shape = (module.out_features, -1, *(side,) * self.group.dim)
        if self.weights:
            self._place(name, made, module.weight.reshape(shape), module.bias)
        y = self._insert(name, made, x)
        node = y.node if x.kind == "fibre" else self.graph.call_method("flatten", (y.node, 2))
        found = Value(node, "fibre", module.out_features, k)
        return self._pooled(found) if name in self.heads else found

    def _norm(self, name: str, module: Any, x: Value) -> Value:
        y = self._tied_norm(name, module, x)
        if type(module).__name__ in NORMS_THAT_ACT:
            for part in ("drop", "act"):
                then = getattr(module, part)
                if not isinstance(then, POINTWISE_MODULES):
                    raise self._refusal(f"{name}.{part} ({type(then).__name__})", x)
                y = self._kept(f"{name}_{part}", then, y)
        return y

    def _tied_norm(self, name: str, module: Any, x: Value) -> Value:
        if x.kind == "image" or (x.kind == "other" and x.new in (0, module.num_features)):
            return self._kept(name, module, x)
        if x.kind == "other" or x.last or module.num_features != x.old:
            raise self._refusal(f"{name} ({module})", x)
        x = self._single(x) if x.kind == "flat" else x
        made = self._layer(
            name,
            module,
            lambda: GBatchNorm(self.group, x.new, module.eps, module.momentum, module.affine, module.track_running_stats),
        )
        if isinstance(made, GBatchNorm):
            made.sync = isinstance(module, nn.SyncBatchNorm)
        if self.weights:
            made.load_state_dict(module.state_dict())
        return self._insert(name, made, x)

    def _group_norm(self, name: str, module: Any, x: Value) -> Value:
        if x.kind in ("image", "other"):
            return self._kept(name, module, x)
        if getattr(module, "track_running_stats", False):
            raise self._refusal(f"{name} ({module})", x, "leave out track_running_stats, or use BatchNorm")
        groups = x.new if isinstance(module, INSTANCE_NORMS) else _divisor(x.new, module.num_groups)
        made: Any = self._layer(name, module, lambda: EachElement(nn.GroupNorm(groups, x.new, module.eps, module.affine)))
        if self.weights:
            made.module.load_state_dict(module.state_dict())
        return self._insert(name, made, x)

    def _layer_norm_module(self, name: str, module: nn.LayerNorm, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        if not (x.last or x.kind == "fibre") or tuple(module.normalized_shape) != (x.old,):
            raise self._refusal(
                f"{name} ({module})", x, "normalise the channels of each place (permute them to the end), or use GroupNorm"
            )
        made = self._layer(
            name, module, lambda: ChannelNorm(x.new, module.eps, module.elementwise_affine, module.bias is not None)
        )
        if self.weights:
            made.load_state_dict(module.state_dict())
        return self._insert(name, made, x)

    def _prelu(self, name: str, module: nn.PReLU, x: Value) -> Value:
        if module.num_parameters == 1 or x.kind in ("image", "other"):
            return self._kept(name, module, x)
        made = self._layer(name, module, lambda: nn.PReLU(x.new))
        if self.weights:
            made.load_state_dict(module.state_dict())
        return self._insert(name, made, x)

    def _layer_norm(self, node: fx.Node, x: Value) -> Value:
        if not x.last:
            return self._pointwise(node, pointwise=False)
        named = _arguments(node, "shape", "weight", "bias", "eps")
        numbers = [named.get("weight"), named.get("bias")]
        wanted = (numbers[0] is not None, numbers[1] is not None)
        made: Any = self._layer(node.name, self.model, lambda: ChannelNorm(x.new, named.get("eps", 1e-5), *wanted))
        for mine, theirs in ((made.weight, numbers[0]), (made.bias, numbers[1])):
            if self.weights and mine is not None and isinstance(theirs, fx.Node):
                mine.data.copy_(_attribute(self.model, str(theirs.target)))
        return self._insert(node.name, made, x)

    def _place(self, name: str, made: Any, weight: Tensor, bias: Tensor | None) -> None:
        """Puts planar filters on the identity element of new ones."""
        if not isinstance(made, GConv | GConvTranspose | GLinear):
            return
        if not support(self.group, made.kernel_size).all():
            raise ValueError(
                f"convert: the filters of {name} do not fit the hexagonal lattice of {self.group}; "
                "weights=True needs a square lattice"
            )
        with torch.no_grad():
            made.weight.zero_()
            taps = weight.flatten(2) if weight.ndim > 2 else weight[..., None]
            made.weight[:, :, : taps.shape[2]] = taps  # element 0 is the identity; the taps of an image's filter are all it has
            if bias is not None:
                assert made.bias is not None
                made.bias.copy_(bias)

    # --- layers without --------------------------------------------------------------------------------------------------------

    def _pool_module(self, name: str, module: Any, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        if (
            getattr(module, "ceil_mode", False)
            or getattr(module, "return_indices", False)
            or getattr(module, "divisor_override", None)
        ):
            remedy = "leave out ceil_mode, return_indices and divisor_override; where the stride fits the size, ceil_mode = False"
            raise self._refusal(f"{name} ({module})", x, f"{remedy} on the module changes nothing")
        if isinstance(module, MAX_POOLS):
            made: nn.Module = GMaxPool(self.group, module.kernel_size, module.stride, module.padding, module.dilation)
        elif isinstance(module, AVG_POOLS):
            made = GAvgPool(
                self.group, module.kernel_size, module.stride, module.padding, count_include_pad=module.count_include_pad
            )
        else:
            return self._adaptive(name, module.output_size, x)
        return self._insert(name, made, x)

    def _adaptive(self, name: str, size: Any, x: Value) -> Value:
        one = size == 1 or (isinstance(size, list | tuple) and all(n == 1 for n in size))
        return replace(self._insert(name, GAdaptiveAvgPool(self.group, size), x), single=one)

    def _adaptive_max(self, name: str, module: Any, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        if module.return_indices or module.output_size not in (1, (1,) * self.group.dim, [1] * self.group.dim):
            raise self._refusal(f"{name} ({module})", x, "a maximum over all of space, output_size 1, is known")
        return replace(x, node=self.graph.call_method("amax", (x.node, tuple(range(-self.group.dim, 0)), True)), single=True)

    def _upsample(self, name: str, module: nn.Upsample, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        made = GUpsample(self.group, module.size, _whole(module.scale_factor), module.mode, module.align_corners)
        return replace(self._insert(name, made, x), single=False)

    def _functional_pool(self, node: fx.Node, x: Value) -> Value:
        kind = FUNCTIONAL_POOLS[node.target]
        sizes = (*node.args[1:2], *(v for k, v in node.kwargs.items() if k in ("kernel_size", "output_size")))
        if any(isinstance(s, fx.Node) for s in sizes):  # as large as the map
            if kind is not GAvgPool:
                raise self._refusal(f"{node.name}, a pool of a size that is known only when it runs,", x, "give it as numbers")
            return replace(self._insert(node.name, GAdaptiveAvgPool(self.group, 1), x), single=True)
        if kind is GAdaptiveAvgPool:
            return self._adaptive(node.name, sizes[0], x)
        return self._insert(f"{node.name}", kind(self.group, *node.args[1:], **_spatial(node)), x)

    def _interpolate(self, node: fx.Node, x: Value) -> Value:
        named = _arguments(node, "size", "scale_factor", "mode", "align_corners")
        size, scale = named.get("size"), named.get("scale_factor")
        mode, corners = str(named.get("mode", "nearest")), named.get("align_corners")
        known = ("nearest", ("linear", "bilinear", "trilinear")[self.group.dim - 1])
        if mode not in known or named.get("antialias"):
            raise self._refusal(f"{node.name}, an interpolate of mode {mode!r},", x, f"modes {known} without antialias are known")
        x = replace(x, single=False)
        if scale is not None or isinstance(size, int):
            return self._insert(node.name, GUpsample(self.group, size, _whole(scale), mode, corners), x)
        made = UpsampleTo(self.group, mode, corners)
        new = self._add(node.name, made)
        sizes = fx.map_arg(size, lambda n: self._value(n).node)
        return replace(x, node=self.graph.call_module(new, (x.node, sizes)))

    def _dropout(self, node: fx.Node, x: Value) -> Value:
        by_number = node.target is F.dropout or x.kind == "other"
        if node.name in self.always:
            return self._pointwise(node, by_number)
        p = _arguments(node, "p").get("p", 0.5)  # tracing has fixed what `training` was
        return self._insert(node.name, nn.Dropout(p) if by_number else ChannelDropout(p), x)

    def _pad(self, node: fx.Node, x: Value) -> Value:
        named = _arguments(node, "pad", "mode", "value")
        return self._padded(node.name, node.name, x, named["pad"], named.get("mode", "constant"), named.get("value") or 0.0)

    def _pad_module(self, name: str, module: Any, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        mode = next(mode for kinds, mode in PADS.items() if isinstance(module, kinds))
        return self._padded(name, f"{name} ({module})", x, module.padding, mode, getattr(module, "value", 0.0))

    def _padded(self, name: str, what: str, x: Value, pad: Any, mode: str, value: float) -> Value:
        if x.kind not in ("image", "map") or x.last:
            raise self._refusal(f"{what}, a pad,", x, "pad images and maps, with their channels along axis 1")
        known = not any(isinstance(p, fx.Node) for p in (pad if isinstance(pad, list | tuple) else [pad]))
        try:
            made = PadBoth(self.group, tuple(pad) if known else None, mode, value)
        except ValueError as error:
            raise ValueError(f"convert: {what}: {error}") from None
        if known:
            return replace(self._insert(name, made, x), single=False)
        sizes = fx.map_arg(pad, lambda n: self._own(self._value(n)))  # checked when it runs
        return replace(x, node=self.graph.call_module(self._add(name, made), (x.node, sizes)), single=False)

    def _softmax(self, node: fx.Node, x: Value) -> Value:
        dim = _arguments(node, "dim").get("dim")
        return self._over_channels(f"{node.name}, a softmax", "log" in str(getattr(node.target, "__name__", node.target)), dim, x)

    def _softmax_module(self, name: str, module: Any, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        dim = 1 if isinstance(module, nn.Softmax2d) else module.dim
        return self._over_channels(f"{name} ({module})", isinstance(module, nn.LogSoftmax), dim, x)

    def _over_channels(self, what: str, log: bool, dim: Any, x: Value) -> Value:
        x = self._single(x) if x.kind == "flat" and x.single and not x.last else x
        if not self._along_channels(x, dim):
            raise self._refusal(f"{what} along axis {dim},", x, "take it over the channels, axis 1, of maps that are not flat")
        return replace(x, node=self.graph.call_function(torch.log_softmax if log else torch.softmax, (x.node, 1)))

    def _along_channels(self, x: Value, dim: Any) -> bool:
        """Whether this axis of the old network's value held its channels."""
        if dim is None or x.kind not in ("image", "map", "fibre"):
            return False
        rank = 2 if x.kind == "fibre" else self.group.dim + 2
        return bool(-rank <= dim < rank and dim % rank == (rank - 1 if x.last else 1))

    def _split(self, node: fx.Node, x: Value) -> Value:
        """The parts of a chunk or split along the channels."""
        what = "chunk" if "chunk" in str(node.target) else "split"
        amount = (
            node.args[1] if len(node.args) > 1 else next(v for k, v in node.kwargs.items() if k not in ("dim", "tensor", "input"))
        )
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if not self._along_channels(x, dim) or not x.old:
            raise self._refusal(f"{node.name}, a {what} along axis {dim},", x, "split maps along their channels, axis 1")
        if isinstance(amount, int):
            step = math.ceil(x.old / amount) if what == "chunk" else amount
            sizes = [min(step, x.old - start) for start in range(0, x.old, step)]
        else:
            sizes = [int(n) for n in amount]  # type: ignore[union-attr, arg-type]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return Value([self._channels(node, x, end - n, end) for n, end in zip(sizes, ends, strict=True)], "parts")

    def _channels(self, node: fx.Node, x: Value, start: int, end: int) -> Value:
        """Some of the channels: the same share of those that there are now."""
        unit = math.gcd(start, end, x.old)
        if not 0 <= start < end <= x.old:
            raise self._refusal(f"{node.name}, which takes channels {start} to {end} of {x.old},", x, "take some that are there")
        if x.new * unit % x.old:
            raise _UnevenError(node.name, x, start, end, x.old // unit)
        first, count = start * x.new // x.old, (end - start) * x.new // x.old
        return replace(x, node=self.graph.call_method("narrow", (x.node, 1, first, count)), old=end - start, new=count)

    def _item(self, node: fx.Node, x: Value) -> Value:
        index: Any = node.args[1]
        if x.kind == "shape":
            return self._size(x, index)
        if x.kind == "parts":
            if not isinstance(index, int) or not -len(x.node) <= index < len(x.node):
                raise self._refusal(
                    f"{node.name}, part {index} of the {len(x.node)} parts of a map,", x, "take one that is there"
                )
            return x.node[index]
        whole, steps = slice(None), index if isinstance(index, tuple) else (index,)
        if (
            x.kind in ("image", "map", "fibre")
            and not x.last
            and x.old
            and len(steps) > 1
            and isinstance(steps[1], slice)
            and steps[1].step in (None, 1)
            and all(isinstance(i, int | None) for i in (steps[1].start, steps[1].stop))
            and all(i in (whole, ...) for i in (steps[0], *steps[2:]))
            and steps[0] == whole
        ):
            start, end, _ = steps[1].indices(x.old)
            return self._channels(node, x, start, end)
        return self._pointwise(node, pointwise=False)

    def _waits(self, x: Value) -> bool:
        """Whether this is a parameter that has not met anything yet."""
        return isinstance(x.node, fx.Node) and x.node.graph is self.old_graph

    def _viewed(self, node: fx.Node, x: Value) -> Value:
        """A parameter with another shape, (C,) as (1, C, 1, 1), say."""
        held = self._held(x)
        if not isinstance(held, Tensor) or any(isinstance(a, fx.Node) for a in node.args[1:]):
            return self._pointwise(node, pointwise=False)
        how: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        seen = how(held.detach(), *node.args[1:], **node.kwargs)
        if seen.numel() != held.numel():
            return self._pointwise(node, pointwise=False)
        return replace(x, view=tuple(seen.shape))

    def _held(self, x: Value) -> Any:
        held = _attribute(self.model, str(x.node.target))
        return held if x.view is None else held.reshape(x.view)

    def _channel_dropout(self, name: str, module: Any, x: Value) -> Value:
        return self._kept(name, module, x) if x.kind in ("image", "other") else self._insert(name, ChannelDropout(module.p), x)

    def _flatten_module(self, name: str, module: nn.Flatten, x: Value) -> Value:
        if x.kind == "other":
            return self._kept(name, module, x)
        if module.start_dim != 1 or module.end_dim not in (-1, self.group.dim + 1):
            raise self._refusal(f"{name} ({module})", x)
        return self._flat_map(name, x)

    def _single(self, x: Value) -> Value:
        """A flattened map of a single place as a function on the group."""
        return replace(x, node=self.graph.call_method("flatten", (x.node, 2)), kind="fibre")

    def _flatten(self, node: fx.Node, x: Value) -> Value:
        named = _arguments(node, "start_dim", "end_dim")
        return self._flat(node, x, named.get("start_dim", 0), named.get("end_dim", -1))

    def _view(self, node: fx.Node, x: Value) -> Value:
        given = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
        ones = (1,) * self.group.dim
        if x.kind in ("fibre", "flat") and len(given) == self.group.dim + 2 and tuple(given[2:]) == ones:
            x = self._single(x) if x.kind == "flat" else x
            index: Any = (..., *(None,) * self.group.dim)
            return replace(x, node=self.graph.call_function(operator.getitem, (x.node, index)), kind="map", single=True)
        return self._flat(node, x, 1 if len(given) == 2 else -1)

    def _unchanged(self, node: fx.Node, x: Value) -> Value:
        """Sums and products repeat what they must."""
        return x if x.kind in ("map", "fibre") else self._pointwise(node, node.target in POINTWISE_METHODS)

    def _flat(self, node: fx.Node, x: Value, start: Any, end: Any = -1) -> Value:
        if start != 1 or end not in (-1, self.group.dim + 1):
            raise self._refusal(
                f"{node.name}, a {node.target} to a shape of its own,", x, "flatten(1) and a mean over space are known"
            )
        return self._flat_map(node.name, x)

    def _flat_map(self, name: str, x: Value) -> Value:
        if x.kind == "image":
            raise self._refusal(f"{name}, a flatten,", x)
        return x if x.kind == "fibre" else replace(x, kind="flat")

    def _over_space(self, node: fx.Node, x: Value) -> Value:
        """A mean, sum or maximum over all of space."""
        if x.kind not in ("map", "image"):
            return self._pointwise(node, pointwise=False)
        how = str(getattr(node.target, "__name__", node.target))
        named = _arguments(node, "dim", "keepdim")
        dims, keepdim = named.get("dim"), bool(named.get("keepdim", False))
        rank = self.group.dim + 2
        first = 1 if x.last else 2
        places = {d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])} if dims is not None else set()
        if places != set(range(first, first + self.group.dim)):
            raise self._refusal(f"{node.name}, a {how} over axes {dims},", x, f"take it over all {self.group.dim} axes of space")
        over = tuple(range(-self.group.dim, 0))
        found = self.graph.call_method(how, (x.node, over, keepdim))
        return (
            replace(x, node=found, single=True)
            if keepdim
            else replace(x, node=found, kind="fibre" if x.kind == "map" else "other", last=False)
        )

    def _permuted(self, node: fx.Node, x: Value) -> Value:
        dims: Any = node.args[1:] if len(node.args) > 2 else _arguments(node, "dims")["dims"]
        rank = self.group.dim + 2
        places = tuple(d % rank for d in dims)
        to_last, to_first = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
        if x.kind == "map" and places == (to_first if x.last else to_last):
            return replace(x, last=not x.last)
        raise self._refusal(f"{node.name}, a permute by {tuple(dims)},", x, f"channels may go to the end, {to_last}, and back")

    # --- functions -------------------------------------------------------------------------------------------------------------

    def _cat(self, node: fx.Node, x: Value) -> Value:
        tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        parts = [self._value(t) for t in tensors]
        kinds = {(p.kind, p.last) for p in parts}
        if kinds == {("image", False), ("map", False)}:
            parts = [p if p.kind == "map" else self._lifted(node.name, p) for p in parts]
        elif kinds == {("other", False)}:
            return self._pointwise(node, pointwise=False)
        elif len(kinds) > 1 or not (self._along_channels(parts[0], dim) or (parts[0].kind == "flat" and dim in (1, -1))):
            told = ", ".join(p.kind for p in parts)
            raise ValueError(
                f"convert: {node.name} concatenates {told} along axis {dim}; values of one kind can be, along the "
                "channels, axis 1, and images with maps"
            )
        if not self._along_channels(parts[0], dim) and parts[0].kind != "flat":
            raise ValueError(f"convert: {node.name} concatenates along axis {dim}; the channels are axis 1")
        found = self.graph.call_function(torch.cat, ([p.node for p in parts], 1))
        old, new = (sum(p.old for p in parts), sum(p.new for p in parts)) if all(p.old for p in parts) else (0, 0)
        return replace(parts[0], node=found, old=old, new=new)

    def _lifted(self, name: str, image: Value) -> Value:
        """An image as a map that is the same on every element."""
        if not image.old:
            raise ValueError(
                f"convert: {name} concatenates a map with an image whose channels are not known; let a convolution take that "
                "image as it is, or convolve it before"
            )
        sizes = (-1, -1, self.group.order, *(-1,) * self.group.dim)
        node = self.graph.call_method("expand", (self.graph.call_method("unsqueeze", (image.node, 2)), *sizes))
        return replace(image, node=node, kind="map")

    def _shape(self, node: fx.Node, x: Value) -> Value:
        if node.target is getattr and node.args[1] not in ("shape", "ndim"):
            return self._pointwise(node, pointwise=False)
        if node.target == "dim" or (node.target is getattr and node.args[1] == "ndim"):
            return Value(2 if x.kind in ("fibre", "flat") else self.group.dim + 2, "size")
        found = self.graph.call_function(getattr, (x.node, "shape"))
        shape = replace(x, node=found, kind="shape", new=0 if x.kind == "image" else x.new)
        return self._size(shape, node.args[1]) if node.target == "size" and len(node.args) > 1 else shape

    def _size(self, shape: Value, index: Any) -> Value:
        """An entry or a slice of the shape of a map, in which the axis S comes before space."""
        if shape.kind == "shape" and shape.new:  # of a map, not of an image
            if isinstance(index, slice):
                start, stop = (i if i is None or i < 2 else i + 1 for i in (index.start, index.stop))
                if (start or 0) >= 0 and (start or 0) < 2 and (stop is None or stop > 2):
                    raise self._refusal(
                        "a whole shape", shape, "sizes of space alone, x.shape[2:], and the batch, x.shape[0], are known"
                    )
                index = slice(start, stop, index.step)
            elif index >= 2:
                index += 1
        return Value(self.graph.call_function(operator.getitem, (shape.node, index)), "size")

    def _pointwise(self, node: fx.Node, pointwise: bool) -> Value:
        """A function of numbers, on values of one kind; images meet maps only after those were pooled."""
        inputs = {n: self._value(n) for n in node.all_input_nodes}
        kinds = {v.kind for v in inputs.values()}
        if kinds <= {"other", "shape", "size"}:
            sizes = Value(self._copied(node, {n: self._own(v) for n, v in inputs.items()}))
            return replace(sizes, kind="size") if kinds == {"size"} else sizes
        maps = [v for v in inputs.values() if v.kind not in ("other", "shape", "size")]
        if "parts" in kinds:
            raise self._refusal(f"{node.name}, a call on the parts of a map,", Value(None), "take the parts one by one")
        like = max(maps, key=lambda v: (v.kind != "image", v.old, not v.single))
        what = f"{node.name}, a call of {getattr(node.target, '__name__', node.target)},"
        if not pointwise:
            raise self._refusal(what, like)
        if "image" in kinds and like.kind == "map":  # an image is a map that is the same on every element
            if like.new != like.old or like.last:
                raise self._refusal(what, like, 'an image meets it, so its channels must be those of the image: keep="channels"')
            lifted = {n: self.graph.call_method("unsqueeze", (v.node, 2)) for n, v in inputs.items() if v.kind == "image"}
            inputs = {
                n: replace(v, node=lifted[n], kind="map", old=like.old, new=like.new) if n in lifted else v
                for n, v in inputs.items()
            }
            maps = [v for v in inputs.values() if v.kind not in ("other", "shape", "size")]
        if len({(v.kind, v.last) for v in maps}) > 1:
            raise self._refusal(what, like, "values of one kind can be added or multiplied")
        for n, v in inputs.items():
            if v.kind in ("other", "shape") and not self._waits(v):
                raise self._refusal(
                    f"{what} which meets {n.name}, something that is no map,", like, "numbers and parameters are known"
                )
        new = {v.new for v in maps if v.old == like.old}
        if len(new) > 1:
            raise ValueError(
                f"convert: {node.name} adds or multiplies maps that had {like.old} channels and now have {sorted(new)}, "
                'since some of them were concatenated; use keep="channels"'
            )
        nodes: dict[fx.Node, Any] = {}
        for n, v in inputs.items():
            nodes[n] = self._spread_parameter(v, like) if self._waits(v) else v.node
        return replace(like, node=self._copied(node, nodes))

    def _copied(self, node: fx.Node, nodes: dict[fx.Node, Any]) -> fx.Node:
        return self.graph.node_copy(node, lambda n: nodes[n])

    def _own(self, value: Value) -> Any:
        """A parameter that meets no map stays as it is."""
        if not self._waits(value):
            return value.node
        kept = self._parameter(str(value.node.target), _attribute(self.model, str(value.node.target)))
        return kept if value.view is None else self.graph.call_method("reshape", (kept, value.view))

    def _spread_parameter(self, value: Value, like: Value) -> Any:
        """A parameter of one number a channel, (C, 1, ...), as one number a G-feature map, (K, 1, 1, ...)."""
        node, held = value.node, self._held(value)
        if held.numel() == 1:
            return self._parameter(str(node.target), held.reshape(()))
        space = () if like.kind in ("fibre", "flat") or like.last else (1,) * self.group.dim
        by_channel = (
            held.numel() == max(held.shape)
            and held.shape[len(held.shape) - len(space) :] == space
            and (len(space) == 0 or held.ndim > len(space))
        )
        if like.kind == "image" and by_channel:
            return self._parameter(str(node.target), held)
        if not by_channel or held.numel() != like.old or like.kind == "image":
            raise ValueError(
                f"convert: the parameter {node.target} of shape {tuple(held.shape)} meets a map of {like.old} channels; "
                "one number, or one a channel, is known"
            )
        # channels that were permuted to the end are where they were
        shape = (like.new, *(1,) * (self.group.dim + 1 if like.kind == "map" else 1))
        return self._parameter(str(node.target), held.flatten()[: like.new].reshape(shape))

    def _parameter(self, name: str, held: Tensor) -> fx.Node:
        place, last = self._place_of(name)
        if not hasattr(place, last):
            made: Any = held.detach().clone()
            if isinstance(_attribute(self.model, name), nn.Parameter):
                place.register_parameter(last, nn.Parameter(made, held.requires_grad))
            else:
                place.register_buffer(last, made)
        return self.graph.get_attr(name)

    # --- the new graph ---------------------------------------------------------------------------------------------------------

    def _value(self, node: Any) -> Value:
        return self.values[node] if isinstance(node, fx.Node) else Value(node)

    def _width(self, name: str, channels: int) -> int:
        return channels if name in self.heads else self.multiple * max(1, round(channels * self.factor / self.multiple))

    def _pooled(self, x: Value) -> Value:
        """A map as an image, a function on the group as numbers, unless the result is to stay on the group."""
        if x.kind == "flat" and x.single and not x.last:
            return self._pooled(replace(x, kind="map"))
        if x.kind == "flat":
            raise ValueError(
                "convert: a map is flattened and no linear layer follows; end with a mean over space, or with a linear layer"
            )
        if x.kind not in ("map", "fibre") or self.pool is None:
            return x
        y = self._insert("coset_pool", CosetPool(self.group, reduce=self.pool), x)
        return replace(y, kind="image" if x.kind == "map" else "other", last=False)

    def _layer(self, name: str, module: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
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

    def _kept(self, name: str, module: nn.Module, x: Value) -> Value:
        return self._insert(name, self._layer(name, module, lambda: copy.deepcopy(module)), x)

    def _insert(self, name: str, module: nn.Module, x: Value) -> Value:
        return replace(x, node=self.graph.call_module(self._add(name, module), (x.node,)))

    def _add(self, name: str, module: nn.Module) -> str:
        """Gives the module its name in the new network; another one where that is taken."""
        place, last = self._place_of(name)
        prefix = name[: len(name) - len(last)]
        count = 1
        while getattr(place, last, module) is not module:
            count += 1
            last = f"{name[len(prefix) :]}_{count}"
        place.add_module(last, module)
        return prefix + last

    def _place_of(self, name: str) -> tuple[nn.Module, str]:
        place, (*path, last) = self.root, name.split(".")
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        return place, last

    def _refusal(self, what: str, x: Value, remedy: str = "") -> ValueError:
        where = {"image": "an image", "map": "a map on the group", "fibre": "a function on the group", "flat": "a flattened map"}
        where["other"] = "what does not come from the first input alone"
        remedy = remedy or "convert the parts around it, or write it with convolutions, norms, pools and pointwise functions"
        return ValueError(f"convert: {what} cannot be made equivariant on {where.get(x.kind, 'this')}; {remedy}")

    _modules: dict[Any, Callable[..., Value]] = {  # noqa: RUF012
        (*CONVS, *TRANSPOSED): _conv,
        nn.Linear: _linear,
        NORMS: _norm,
        (nn.GroupNorm, *INSTANCE_NORMS): _group_norm,
        nn.LayerNorm: _layer_norm_module,
        nn.PReLU: _prelu,
        (*MAX_POOLS, *AVG_POOLS, *ADAPTIVE): _pool_module,
        (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d): _adaptive_max,
        nn.Upsample: _upsample,
        CHANNEL_DROPOUTS: _channel_dropout,
        nn.Flatten: _flatten_module,
        (nn.Softmax, nn.LogSoftmax, nn.Softmax2d): _softmax_module,
        tuple(kind for kinds in PADS for kind in kinds): _pad_module,
    }
    _of_anything: dict[Any, Callable[..., Value]] = {  # noqa: RUF012
        **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
        **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropout),
    }
    _operations: dict[Any, Callable[..., Value]] = {  # noqa: RUF012
        **dict.fromkeys(FUNCTIONAL_POOLS, _functional_pool),
        **dict.fromkeys((getattr, "size", "dim"), _shape),
        **dict.fromkeys((torch.flatten, "flatten"), _flatten),
        **dict.fromkeys(("view", "reshape"), _view),
        **dict.fromkeys((torch.mean, torch.amax, torch.sum, "mean", "amax", "sum"), _over_space),
        **dict.fromkeys((torch.permute, "permute"), _permuted),
        **dict.fromkeys(("expand_as", "contiguous"), _unchanged),
        **dict.fromkeys((F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, "softmax", "log_softmax"), _softmax),
        **dict.fromkeys((torch.chunk, torch.split, "chunk", "split"), _split),
        operator.getitem: _item,
        F.interpolate: _interpolate,
        F.layer_norm: _layer_norm,
        F.pad: _pad,
    }


class _UnevenError(Exception):
    """Channels cannot be split in these proportions: widths must be multiples of `parts`."""

    def __init__(self, name: str, x: Value, start: int, end: int, parts: int) -> None:
        super().__init__(
            f"{name} takes channels {start} to {end} of {x.old}, of which {x.new} are left, and no whole number of them is that "
            'share; use keep="channels"'
        )
        self.parts = parts


def _images(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, int]:
    """The inputs that are images, and how many channels they have if that is known: those that lead to a convolution."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    found: dict[fx.Node, int] = {}
    for start in given:
        waiting, seen = [start], {start}
        while waiting:
            node = waiting.pop()
            module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, CONVS):
                direct = node.args[:1] == (start,) or _channels_stay(model, node.args[0], start)
                found[start] = max(found.get(start, 0), module.in_channels if direct else 0)
                continue
            if node is start or _passes(model, node) or node.target in (torch.cat, torch.concat, torch.concatenate):
                waiting += [user for user in node.users if user not in seen]
                seen.update(node.users)
    return found or dict.fromkeys(given[:1], 0)


def _passes(model: nn.Module, node: fx.Node) -> bool:
    """Whether this is a function of one image that gives an image with the same channels."""
    if len(node.all_input_nodes) != 1:
        return False
    if node.op == "call_module":
        kinds = (*POINTWISE_MODULES, *NORMS, *INSTANCE_NORMS, nn.GroupNorm, *MAX_POOLS, *AVG_POOLS, *ADAPTIVE, nn.Upsample)
        return isinstance(model.get_submodule(str(node.target)), (*kinds, *(kind for pads in PADS for kind in pads)))
    functions = (*FUNCTIONAL_POOLS, F.interpolate, F.pad)
    return node.target in POINTWISE_FUNCTIONS or node.target in POINTWISE_METHODS or node.target in functions


def _channels_stay(model: nn.Module, node: Any, start: fx.Node) -> bool:
    while isinstance(node, fx.Node) and node is not start and _passes(model, node):
        node = node.all_input_nodes[0]
    return node is start


def _heads(model: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """The names of the layers with weights that nothing but pointwise functions and the like separates from the result."""
    seen: set[fx.Node] = set()
    waiting = [n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, (*CONVS, *TRANSPOSED, nn.Linear)):
            yield str(node.target)
        if not isinstance(module, (*CONVS, *TRANSPOSED, nn.Linear)) or getattr(module, "groups", 1) > 1:  # keeps its channels
            waiting += node.all_input_nodes


def _attribute(model: nn.Module, name: str) -> Any:
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _spatial(node: fx.Node) -> dict[str, Any]:
    """The arguments of a functional pool that a layer takes."""
    refused = {k: v for k, v in node.kwargs.items() if k in ("ceil_mode", "return_indices", "divisor_override") and v}
    if refused:
        raise ValueError(f"convert: {node.name} uses {', '.join(refused)}, which is not equivariant, or not known; leave it out")
    return {k: v for k, v in node.kwargs.items() if k not in ("ceil_mode", "return_indices", "divisor_override", "input")}


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call after the first, by name."""
    return dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)


def _whole(scale: Any) -> Any:
    """A scale factor as whole numbers, where it is one."""
    if isinstance(scale, tuple | list):
        return tuple(_whole(s) for s in scale)
    return int(scale) if isinstance(scale, float) and scale.is_integer() else scale


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
