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
from gcnn.nn.each import ChannelDropout, ChannelNorm, EachElement, UpsampleTo

__all__ = ["Converter", "Value"]


CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVG_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
BY_SAMPLE = {"DropPath", "StochasticDepth"}  # drop whole samples: they do not mind another axis
FUNCTIONAL_POOLS: dict[Any, Any] = {
    **dict.fromkeys((F.max_pool1d, F.max_pool2d, F.max_pool3d), GMaxPool),
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), GAvgPool),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), GAdaptiveAvgPool),
}


@dataclass(frozen=True)
class Value:
    """A value of the new network, and how it corresponds to the old one's."""

    node: Any
    kind: Literal["image", "map", "fibre", "flat", "shape", "size", "other"] = "other"
    """(N, K, *X); (N, K, S, *X); (N, K, S); a map that was flattened, still a map; the shape of a map; sizes from it; else."""
    old: int = 0
    """Channels it had in the old network."""
    new: int = 0
    last: bool = False
    """A map that had its channels permuted to the end; still as it was."""
    single: bool = False
    """A map whose space is a single place."""


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
        self.heads = set(_heads(model, graph))

    def at(self, factor: float) -> fx.GraphModule:
        """The new network with widths multiplied by `factor`."""
        self.factor = factor
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
        first = not any(v.kind == "image" for v in self.values.values())
        return Value(self.graph.node_copy(node), "image" if first else "other")

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
        value: Any = self.model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return Value(node, "other", *((0, 0) if not isinstance(value, Tensor) else (value.numel(), 0)))

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
        target: Any = node.target
        x = self._value(node.args[0] if node.args else next(iter(node.kwargs.values()), None))
        if target in (torch.cat, torch.concat, torch.concatenate):
            return self._cat(node)
        if target is getattr and node.args[1] == "shape" and x.kind != "other":
            return replace(x, node=self.graph.call_function(getattr, (x.node, "shape")), kind="shape")
        if target is operator.getitem and x.kind == "shape":
            return self._size(x, node.args[1])
        if target in FUNCTIONAL_POOLS and x.kind != "other":
            sizes = (*node.args[1:2], *(v for k, v in node.kwargs.items() if k in ("kernel_size", "output_size")))
            if any(isinstance(s, fx.Node) for s in sizes):  # as large as the map
                if FUNCTIONAL_POOLS[target] is not GAvgPool:
                    raise self._refusal(
                        f"{node.name}, a pool of a size that is known only when it runs,", x, "give it as numbers"
                    )
                return replace(self._insert(node.name, GAdaptiveAvgPool(self.group, 1), x), single=True)
            if FUNCTIONAL_POOLS[target] is GAdaptiveAvgPool:
                return self._adaptive(node.name, sizes[0], x)
            return self._insert(f"{node.name}", FUNCTIONAL_POOLS[target](self.group, *node.args[1:], **_spatial(node)), x)
        if target is F.interpolate and x.kind != "other":
            return self._interpolate(node, x)
        if target in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d) and node.name in self.always:
            return self._pointwise(node, pointwise=target is F.dropout or x.kind == "other")
        if target in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d):  # tracing has fixed what `training` was
            p: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
            return self._insert(node.name, nn.Dropout(p) if target is F.dropout or x.kind == "other" else ChannelDropout(p), x)
        if target is F.layer_norm and x.last:
            return self._insert(node.name, self._layer_norm(node, x), x)
        if target is torch.flatten:
            return self._flat(node, x, *_span(node))
        if target in (torch.mean, torch.amax, torch.sum):
            return self._over_space(node, x, target.__name__)
        if target is torch.permute and x.kind != "other":
            return self._permuted(x, node.args[1] if len(node.args) > 1 else node.kwargs["dims"], node)
        return self._pointwise(node, target in POINTWISE_FUNCTIONS)

    def _call_method(self, node: fx.Node) -> Value:
        target, x = str(node.target), self._value(node.args[0])
        if target == "size" and x.kind != "other":
            shape = replace(x, node=self.graph.call_function(getattr, (x.node, "shape")), kind="shape")
            return self._size(shape, node.args[1]) if len(node.args) > 1 else shape
        if target == "flatten":
            return self._flat(node, x, *_span(node))
        if target in ("view", "reshape") and x.kind != "other":
            shape_given = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
            ones = (1,) * self.group.dim
            if x.kind in ("fibre", "flat") and len(shape_given) == self.group.dim + 2 and tuple(shape_given[2:]) == ones:
                x = self._single(x) if x.kind == "flat" else x
                index: Any = (..., *(None,) * self.group.dim)
                return replace(x, node=self.graph.call_function(operator.getitem, (x.node, index)), kind="map", single=True)
            return self._flat(node, x, 1 if len(shape_given) == 2 else -1)
        if target in ("expand_as", "contiguous") and x.kind in ("map", "fibre"):
            return x  # sums and products repeat what they must
        if target in ("mean", "amax", "sum"):
            return self._over_space(node, x, target)
        if target == "permute" and x.kind != "other":
            dims = node.args[1] if len(node.args) == 2 else node.args[1:]
            return self._permuted(x, dims, node)
        return self._pointwise(node, target in POINTWISE_METHODS)

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

    def _layer_norm(self, node: fx.Node, x: Value) -> nn.Module:
        numbers = [node.args[i] if len(node.args) > i else node.kwargs.get(k) for i, k in ((2, "weight"), (3, "bias"))]
        eps: Any = node.args[4] if len(node.args) > 4 else node.kwargs.get("eps", 1e-5)
        wanted = (numbers[0] is not None, numbers[1] is not None)
        made: Any = self._layer(node.name, self.model, lambda: ChannelNorm(x.new, eps, *wanted))
        for mine, theirs in ((made.weight, numbers[0]), (made.bias, numbers[1])):
            if self.weights and mine is not None and isinstance(theirs, fx.Node):
                mine.data.copy_(_attribute(self.model, str(theirs.target)))
        return made

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
            raise self._refusal(f"{name} ({module})", x, "leave out ceil_mode, return_indices and divisor_override")
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

    def _interpolate(self, node: fx.Node, x: Value) -> Value:
        named = dict(zip(("size", "scale_factor", "mode", "align_corners"), node.args[1:], strict=False)) | dict(node.kwargs)
        size, scale = named.get("size"), named.get("scale_factor")
        mode, corners = str(named.get("mode", "nearest")), named.get("align_corners")
        known = ("nearest", ("linear", "bilinear", "trilinear")[self.group.dim - 1])
        if mode not in known or named.get("antialias"):
            raise self._refusal(f"{node.name}, an interpolate of mode {mode!r},", x, f"modes {known} without antialias are known")
        x = replace(x, single=False)
        if scale is not None or isinstance(size, int):
            return self._insert(node.name, GUpsample(self.group, size, _whole(scale), mode, corners), x)  # type: ignore[arg-type]
        made = UpsampleTo(self.group, mode, corners)  # type: ignore[arg-type]
        new = self._add(node.name, made)
        sizes = fx.map_arg(size, lambda n: self._value(n).node)
        return replace(x, node=self.graph.call_module(new, (x.node, sizes)))

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

    def _flat(self, node: fx.Node, x: Value, start: Any, end: Any = -1) -> Value:
        if x.kind == "other":
            return self._pointwise(node, pointwise=False)
        if start != 1 or end not in (-1, self.group.dim + 1):
            raise self._refusal(
                f"{node.name}, a {node.target} to a shape of its own,", x, "flatten(1) and a mean over space are known"
            )
        return self._flat_map(node.name, x)

    def _flat_map(self, name: str, x: Value) -> Value:
        if x.kind == "image":
            raise self._refusal(f"{name}, a flatten,", x)
        return x if x.kind == "fibre" else replace(x, kind="flat")

    def _over_space(self, node: fx.Node, x: Value, how: str) -> Value:
        """A mean or maximum over all of space."""
        if x.kind not in ("map", "image"):
            return self._pointwise(node, pointwise=False)
        dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        keepdim = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
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

    def _permuted(self, x: Value, dims: Any, node: fx.Node) -> Value:
        rank = self.group.dim + 2
        places = tuple(d % rank for d in dims)
        to_last, to_first = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
        if x.kind == "map" and places == (to_first if x.last else to_last):
            return replace(x, last=not x.last)
        raise self._refusal(f"{node.name}, a permute by {tuple(dims)},", x, f"channels may go to the end, {to_last}, and back")

    def _permute_module(self, name: str, module: Any, x: Value) -> Value:
        raise self._refusal(f"{name} ({module})", x)

    # --- functions -------------------------------------------------------------------------------------------------------------

    def _cat(self, node: fx.Node) -> Value:
        tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        parts = [self._value(t) for t in tensors]
        kinds = {(p.kind, p.last) for p in parts}
        rank = self.group.dim + 2
        channels = (rank - 1, -1) if parts[0].last else (1, -1) if parts[0].kind in ("fibre", "flat") else (1, 1 - rank)
        if len(kinds) > 1 or (parts[0].kind != "other" and dim not in channels):
            told = ", ".join(p.kind for p in parts)
            raise ValueError(
                f"convert: {node.name} concatenates {told} along axis {dim}; values of one kind can be, along the "
                "channels, axis 1"
            )
        found = self.graph.call_function(torch.cat, ([p.node for p in parts], 1 if parts[0].kind != "other" else dim))
        return replace(parts[0], node=found, old=sum(p.old for p in parts), new=sum(p.new for p in parts))

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
            if v.kind in ("other", "shape") and n.op != "get_attr":
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
            nodes[n] = self._spread_parameter(n, v, like) if v.kind == "other" and n.op == "get_attr" else v.node
        return replace(like, node=self._copied(node, nodes))

    def _copied(self, node: fx.Node, nodes: dict[fx.Node, Any]) -> fx.Node:
        return self.graph.node_copy(node, lambda n: nodes[n])

    def _own(self, value: Value) -> Any:
        """A parameter that meets no map stays as it is."""
        if isinstance(value.node, fx.Node) and value.node.graph is self.old_graph:
            return self._parameter(str(value.node.target), _attribute(self.model, str(value.node.target)))
        return value.node

    def _spread_parameter(self, node: fx.Node, value: Value, like: Value) -> Any:
        """A parameter of one number a channel, (C, 1, ...), as one number a G-feature map, (K, 1, 1, ...)."""
        held = _attribute(self.model, str(node.target))
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
        return channels if name in self.heads else max(1, round(channels * self.factor))

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
    }


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


def _span(node: fx.Node) -> tuple[Any, Any]:
    """The first and last axis of a flatten."""
    named = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    return named.get("start_dim", 0), named.get("end_dim", -1)


def _whole(scale: Any) -> Any:
    """A scale factor as whole numbers, where it is one."""
    if isinstance(scale, tuple | list):
        return tuple(_whole(s) for s in scale)
    return int(scale) if isinstance(scale, float) and scale.is_integer() else scale


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
