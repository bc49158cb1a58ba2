"""Layers of torch and what takes their place on a group; what comes after pooling over the group stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gcnn.indices import support
from gcnn.nn import (
    GAdaptiveAvgPool,
    GAvgPool,
    GBatchNorm,
    GConv,
    GConvTranspose,
    GDepthwiseConv,
    GLinear,
    GMaxPool,
    GUpsample,
    LiftConv,
)
from gcnn.nn.each import ChannelDropout, ChannelNorm, EachElement, PadBoth, ReduceSpace
from gcnn.rebuild import axes
from gcnn.rebuild.values import (
    ADAPTIVE,
    AVG_POOLS,
    CHANNEL_DROPOUTS,
    CONVS,
    INSTANCE_NORMS,
    MAX_POOLS,
    NORMS,
    NORMS_THAT_ACT,
    OF_SAMPLES,
    PADS,
    TRANSPOSED,
    UnevenError,
    Value,
    divisor,
    whole,
)
from gcnn.tracing import POINTWISE_MODULES

if TYPE_CHECKING:
    from gcnn.rebuild.converter import Converter


def _conv(net: Converter, name: str, module: Any, x: Value) -> Value:
    transposed = isinstance(module, TRANSPOSED)
    if x.kind not in ("image", "map") or (transposed and x.kind == "image"):
        raise net.refusal(f"{name} ({module})", x)
    if x.old and module.in_channels != x.old:
        raise net.refusal(f"{name} ({module}), which gets {x.old} channels as far as can be seen,", x, "reshape with flatten(1)")
    _check_sides(net, name, module)
    k_in = module.in_channels if x.kind == "image" else x.new
    depthwise = module.groups == module.in_channels > 1 and x.kind == "map"
    if depthwise:
        groups, k_out = k_in, k_in * (module.out_channels // module.in_channels)
    else:
        k_out = net.width(name, module.out_channels)
        groups = divisor(math.gcd(k_in, k_out), module.groups)
    options: dict[str, Any] = {
        "kernel_size": module.kernel_size,
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "bias": module.bias is not None,
    }
    kind: Any = LiftConv if x.kind == "image" else GConv
    if transposed:
        kind, options["output_padding"] = GConvTranspose, module.output_padding
    else:
        options["padding_mode"] = module.padding_mode
    if depthwise and not transposed:
        kind = GDepthwiseConv
    else:
        options["groups"] = groups
    made = net.layer(name, module, lambda: kind(net.group, k_in, k_out, **options))
    if type(made) is not kind or made.in_channels != k_in:
        raise net.refusal(f"{name} ({module}), which is called on values of several kinds,", x, "give each its own layer")
    if net.weights:
        _place(net, name, made, module.weight, module.bias)
    unpadded = isinstance(module.padding, str) or set(module.padding) == {0}  # "same" and "valid" are the same for size 1
    stays = x.single and set(module.kernel_size) == {1} and unpadded and not transposed
    return replace(net.insert(name, made, x), kind="map", old=module.out_channels, new=k_out, single=stays)


def _check_sides(net: Converter, name: str, module: Any) -> None:
    """Refuses filters that are longer along one of the axes that the group mixes: the group would turn them."""
    sides = module.kernel_size
    if all(len({sides[i] for i in mixed}) == 1 for mixed in net.group.axis_classes):
        return
    equal = tuple(max(sides[i] for i in mixed) for n in range(net.group.dim) for mixed in net.group.axis_classes if n in mixed)
    others = {2: "p2, pm or pmm", 3: "D2h or, if two sides are equal, D4h"}[net.group.dim]
    raise ValueError(
        f"convert: {name} ({module}): kernel_size (={sides}) is not equal along axes that {net.group} mixes; use {equal}, padded "
        f"alike, or a group that leaves the axes where they are: {others}"
    )


def _linear(net: Converter, name: str, module: nn.Linear, x: Value) -> Value:
    made: nn.Module
    if x.kind == "image":
        raise net.refusal(f"{name} ({module})", x)
    if x.kind == "other":  # on invariants
        return replace(net.kept(name, module, x), old=module.out_features, new=module.out_features)
    if x.last and x.kind == "map":  # on the channels of every place
        k = net.width(name, module.out_features)
        made = net.layer(name, module, lambda: GConv(net.group, x.new, k, 1, bias=module.bias is not None))
        if net.weights:
            _place(net, name, made, module.weight, module.bias)
        return replace(net.insert(name, made, x), old=module.out_features, new=k)
    if x.kind == "flat":
        side = round((module.in_features / x.old) ** (1 / net.group.dim))
        if side**net.group.dim * x.old != module.in_features:
            raise ValueError(
                f"convert: {name} ({module}) takes {module.in_features} numbers, which are not {x.old} channels of a square "
                "or cube of cells; flatten maps of equal sides, or pool over space first"
            )
        if x.last:
            raise net.refusal(f"{name} ({module}), after channels that were permuted to the end,", x, "permute them back first")
        if side == 1:
            x = net.single(x, name)
    elif x.kind != "fibre":
        remedy = "on maps it works along their last axis; permute the channels to the end, or flatten first"
        raise net.refusal(f"{name} ({module})", x, remedy)
    if x.kind == "fibre" and x.old not in (0, module.in_features):
        raise net.refusal(f"{name} ({module}), which gets {x.old} numbers as far as can be seen,", x, "reshape with flatten(1)")
    if x.kind == "fibre" and name in net.final and net.pool is not None:
        made = net.layer(name, module, lambda: nn.Linear(x.new, module.out_features, module.bias is not None))
        y = _taken_over(net, name, module, net.pooled(x), lambda: made)
        return replace(y, kind="other", old=module.out_features, new=module.out_features)
    k = net.width(name, module.out_features)
    if x.kind == "fibre":
        made = net.layer(name, module, lambda: GLinear(net.group, x.new, k, module.bias is not None))
        shape: tuple[int, ...] = (module.out_features, -1, *(1,) * net.group.dim)
    else:
        made = net.layer(name, module, lambda: GConv(net.group, x.new, k, side, bias=module.bias is not None))
        shape = (module.out_features, -1, *(side,) * net.group.dim)
    if net.weights:
        _place(net, name, made, module.weight.reshape(shape), module.bias)
    y = net.insert(name, made, x)
    node = y.node if x.kind == "fibre" else net.single(y, name).node
    found = Value(node, "fibre", module.out_features, k)
    return net.pooled(found) if name in net.final else found


def _norm(net: Converter, name: str, module: Any, x: Value) -> Value:
    y = _tied_norm(net, name, module, x)
    if type(module).__name__ in NORMS_THAT_ACT:
        for part in ("drop", "act"):
            then = getattr(module, part)
            if not isinstance(then, POINTWISE_MODULES):
                raise net.refusal(f"{name}.{part} ({type(then).__name__})", x)
            y = net.kept(f"{name}_{part}", then, y)
    return y


def _tied_norm(net: Converter, name: str, module: Any, x: Value) -> Value:
    on_box = x.kind == "image" and net.group.fills_box
    if on_box or (x.kind == "other" and x.new in (0, module.num_features)):
        return net.kept(name, module, x)
    if x.kind == "image":  # of a hexagon
        x = replace(x, old=module.num_features, new=module.num_features)
    if x.kind == "other" or x.last or module.num_features != x.old:
        raise net.refusal(f"{name} ({module})", x)
    if net.weights and not module.track_running_stats:
        remedy = "its statistics are those of each batch, and the mean over the group has no such norm; track_running_stats=True"
        raise net.refusal(f"{name} ({module}) with its weights", x, remedy)
    x = net.single(x, name) if x.kind == "flat" else x

    def make() -> GBatchNorm:
        made = GBatchNorm(net.group, x.new, module.eps, module.momentum, module.affine, module.track_running_stats)
        made.sync = isinstance(module, nn.SyncBatchNorm)
        return _with_bias_of(module, made)

    return _taken_over(net, name, module, x, make)


def _with_bias_of(module: Any, made: Any) -> Any:
    """A new norm, without a bias where the old one scales alone."""
    if module.weight is not None and module.bias is None:
        made.register_parameter("bias", None)
    return made


def _taken_over(net: Converter, name: str, module: nn.Module, x: Value, make: Callable[[], nn.Module]) -> Value:
    """The new layer, with the old one's numbers if weights are kept."""
    made: Any = net.layer(name, module, make)
    if net.weights:
        inner = getattr(made, "module", made)
        inner.load_state_dict(module.state_dict())
        for mine, theirs in zip(inner.parameters(), module.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
    return net.insert(name, made, x)


def _group_norm(net: Converter, name: str, module: Any, x: Value) -> Value:
    if x.kind == "image" and net.group.fills_box:
        return net.kept(name, module, x)
    if getattr(module, "track_running_stats", False):
        raise net.refusal(f"{name} ({module})", x, "leave out track_running_stats, or use BatchNorm")
    if x.kind in ("flat", "other") or x.old not in (0, getattr(module, "num_channels", getattr(module, "num_features", 0))):
        raise net.refusal(f"{name} ({module})", x, "normalise the channels of maps, before they are flattened")
    if x.kind == "image":  # of a hexagon
        channels = module.num_features if isinstance(module, INSTANCE_NORMS) else module.num_channels
        x = replace(x, old=channels, new=channels)
    groups = x.new if isinstance(module, INSTANCE_NORMS) else divisor(x.new, module.num_groups)
    make = partial(nn.GroupNorm, groups, x.new, module.eps, module.affine)
    return _taken_over(net, name, module, x, lambda: EachElement(net.group, _with_bias_of(module, make())))


def _layer_norm(net: Converter, name: str, module: nn.LayerNorm, x: Value) -> Value:
    x = net.vector(x)
    if not (x.last or x.kind == "fibre") or tuple(module.normalized_shape) != (x.old,):
        raise net.refusal(
            f"{name} ({module})", x, "normalise the channels of each place (permute them to the end), or use GroupNorm"
        )
    make = partial(ChannelNorm, x.new, module.eps, module.elementwise_affine, module.bias is not None)
    return _taken_over(net, name, module, x, make)


def _prelu(net: Converter, name: str, module: nn.PReLU, x: Value) -> Value:
    if module.num_parameters == 1 or x.kind == "image":
        return net.kept(name, module, x)
    x = net.vector(x)
    if module.num_parameters != x.old or x.kind == "flat" or x.last:
        raise net.refusal(f"{name} ({module})", x, "one slope, or one a channel of a map, is known")
    return _taken_over(net, name, module, x, lambda: nn.PReLU(x.new))


def _place(net: Converter, name: str, made: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Puts planar filters on the identity element of new ones."""
    if not isinstance(made, GConv | GConvTranspose | GLinear):
        return
    if not support(net.group, made.kernel_size).all():
        raise ValueError(
            f"convert: the filters of {name} do not fit the hexagonal lattice of {net.group}; weights=True needs a square lattice"
        )
    with torch.no_grad():
        made.weight.zero_()
        taps = weight.flatten(2) if weight.ndim > 2 else weight[..., None]
        made.weight[:, :, : taps.shape[2]] = taps  # element 0 is the identity; the taps of an image's filter are all it has
        if bias is not None:
            assert made.bias is not None
            made.bias.copy_(bias)
            made.bias.requires_grad_(bias.requires_grad)
    made.weight.requires_grad_(weight.requires_grad)


def _pool(net: Converter, name: str, module: Any, x: Value) -> Value:
    if any(getattr(module, option, None) for option in ("ceil_mode", "return_indices", "divisor_override")):
        remedy = "leave out ceil_mode, return_indices and divisor_override; where the stride fits the size, ceil_mode = False"
        raise net.refusal(f"{name} ({module})", x, f"{remedy} on the module changes nothing")
    if isinstance(module, MAX_POOLS):
        make: Callable[[], nn.Module] = partial(
            GMaxPool, net.group, module.kernel_size, module.stride, module.padding, module.dilation
        )
    elif isinstance(module, AVG_POOLS):
        options = {"count_include_pad": module.count_include_pad}
        make = partial(GAvgPool, net.group, module.kernel_size, module.stride, module.padding, **options)
    else:
        return adaptive(net, name, module.output_size, x)
    return net.insert(name, net.layer(name, module, make), x)


def adaptive(net: Converter, name: str, size: Any, x: Value) -> Value:
    """A mean over parts of space."""
    one = size == 1 or (isinstance(size, list | tuple) and all(n == 1 for n in size))
    made: Any = net.layer(name, ADAPTIVE[net.group.dim - 1](size), lambda: GAdaptiveAvgPool(net.group, size))
    if any(made.output_size[i] != 1 for i, _ in net.group.oblique):
        remedy = f"{net.group} maps hexagons, which have no such parts; pool to 1, or take a group of the square lattice"
        raise net.refusal(f"{name}, an adaptive pool to {made.output_size} cells,", x, remedy)
    return replace(net.insert(name, made, x), single=one)


def _adaptive_max(net: Converter, name: str, module: Any, x: Value) -> Value:
    return max_over_space(net, name, f"{name} ({module})", module.output_size, module.return_indices, x)


def max_over_space(net: Converter, name: str, what: str, size: Any, indices: bool, x: Value) -> Value:
    """The largest number of each channel."""
    if indices or size not in (1, (1,) * net.group.dim, [1] * net.group.dim) or x.kind not in ("map", "image"):
        raise net.refusal(what, x, "a maximum over all of space, output_size 1, is known")
    return replace(net.insert(name, ReduceSpace(net.group, "amax", keepdim=True), x), single=True)


def _upsample(net: Converter, name: str, module: nn.Upsample, x: Value) -> Value:
    make = partial(GUpsample, net.group, module.size, whole(module.scale_factor), module.mode, module.align_corners)
    return replace(net.insert(name, net.layer(name, module, make), x), single=False)


def _pad(net: Converter, name: str, module: Any, x: Value) -> Value:
    mode = next(mode for kinds, mode in PADS.items() if isinstance(module, kinds))
    return padded(net, name, f"{name} ({module})", x, module.padding, mode, getattr(module, "value", 0.0))


def padded(net: Converter, name: str, what: str, x: Value, pad: Any, mode: str, value: float) -> Value:
    """A pad by as much on either side."""
    if x.kind not in ("image", "map") or x.last:
        raise net.refusal(f"{what}, a pad,", x, "pad images and maps, with their channels along axis 1")
    known = not any(isinstance(p, fx.Node) for p in (pad if isinstance(pad, list | tuple) else [pad]))
    try:
        made = PadBoth(net.group, tuple(pad) if known else None, mode, value)
    except ValueError as error:
        raise ValueError(f"convert: {what}: {error}") from None
    if known:
        return replace(net.insert(name, made, x), single=False)
    sizes = fx.map_arg(pad, lambda n: net.own(net.value(n)))  # checked when it runs
    return replace(x.anew(net.graph.call_module(net.add(name, made), (x.node, sizes))), single=False)


def _softmax(net: Converter, name: str, module: Any, x: Value) -> Value:
    dim = 1 if isinstance(module, nn.Softmax2d) else module.dim
    return softmax_over(net, f"{name} ({module})", isinstance(module, nn.LogSoftmax), dim, x)


def softmax_over(net: Converter, what: str, log: bool, dim: Any, x: Value, dtype: Any = None) -> Value:
    """A softmax over the channels of each place and element."""
    x = net.vector(x)
    if not net.along_channels(x, dim):
        remedy = OF_SAMPLES if dim in (0, -net.rank(x)) else "take it over the channels, axis 1, of maps that are not flat"
        raise net.refusal(f"{what} along axis {dim},", x, remedy)
    # else probabilities would not sum up to 1; from weights, means of logarithms are the means of the old answers
    first = net.pool == "max" or (log and net.pool is not None and not net.weights)
    if first and net.is_result(net.present):
        x = replace(net.pooled(x), last=x.last)
    return x.anew(net.graph.call_function(torch.log_softmax if log else torch.softmax, (x.node, 1), {"dtype": dtype}))


def _glu(net: Converter, name: str, module: nn.GLU, x: Value) -> Value:
    return gated(net, net.present, module.dim, x)


def gated(net: Converter, node: fx.Node, dim: Any, x: Value) -> Value:
    """One half of the channels, multiplied by the sigmoid of the other."""
    if not net.along_channels(x, dim) or not x.old:
        raise net.refusal(f"{node.name}, a glu along axis {dim},", x, "take it over the channels, axis 1")
    if x.new % 2:
        raise UnevenError(node.name, x, 0, x.old // 2, 2)
    return replace(x.anew(net.graph.call_function(F.glu, (x.node, 1))), old=x.old // 2, new=x.new // 2)


def _shuffle(net: Converter, name: str, module: Any, x: Value) -> Value:
    return net.kept(name, module, x) if x.kind == "image" else shuffled(net, name, module.groups, x)


def shuffled(net: Converter, name: str, groups: int, x: Value) -> Value:
    """Channels in another order: one of each group after the other."""
    if x.kind not in ("map", "line", "fibre") or x.last or not x.old:
        raise net.refusal(f"{name}, a shuffle of channels,", x, "shuffle those of maps, axis 1")
    if x.new % groups:
        raise UnevenError(name, x, 0, x.old // groups, groups)
    return x.anew(net.graph.call_function(torch.channel_shuffle, (x.node, groups)))


def _channel_dropout(net: Converter, name: str, module: Any, x: Value) -> Value:
    return net.kept(name, module, x) if x.kind == "image" else net.insert(name, ChannelDropout(module.p), x)


MODULES: dict[Any, Callable[..., Value]] = {
    (*CONVS, *TRANSPOSED): _conv,
    nn.Linear: _linear,
    NORMS: _norm,
    (nn.GroupNorm, *INSTANCE_NORMS): _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.PReLU: _prelu,
    (*MAX_POOLS, *AVG_POOLS, *ADAPTIVE): _pool,
    (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d): _adaptive_max,
    nn.Upsample: _upsample,
    CHANNEL_DROPOUTS: _channel_dropout,
    nn.Flatten: axes.flatten_layer,
    (nn.Softmax, nn.LogSoftmax, nn.Softmax2d): _softmax,
    nn.GLU: _glu,
    nn.ChannelShuffle: _shuffle,
    tuple(kind for kinds in PADS for kind in kinds): _pad,
}

OF_LAST = (nn.Linear, nn.LayerNorm, nn.Flatten, nn.Softmax, nn.LogSoftmax, nn.GLU)  # they ask where the channels are

OF_LINES = (
    *NORMS,
    nn.GroupNorm,
    *INSTANCE_NORMS,
    nn.PReLU,
    nn.Flatten,
    nn.Softmax,
    nn.LogSoftmax,
    nn.GLU,
    nn.ChannelShuffle,
)  # they do not ask for axes of space
