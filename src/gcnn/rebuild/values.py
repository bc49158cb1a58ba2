"""What is known of a value of the new network, the kinds of layers that are known, and small helpers."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gcnn.nn import GAdaptiveAvgPool, GAvgPool, GMaxPool

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
OF_SAMPLES = (
    "it mixes samples, as the attention over the instances of a bag does, and those stay apart; convert what comes before it "
    "alone, net.encoder = convert(net.encoder, group)"
)
"""The way out for what works along the batch."""


@dataclass(frozen=True)
class Value:
    """A value of the new network, and how it corresponds to the old one's."""

    node: Any
    kind: Literal["image", "map", "fibre", "flat", "line", "shape", "size", "parts", "record", "other"] = "other"
    """Image: (N, K, *X). Map: (N, K, S, *X). Fibre: (N, K, S). Flat: flattened in the old network, still a map here. Line: with
    fewer axes of space in the old network, as after flatten(2), still a map here. Shape: that of a map. Size: numbers from it.
    Parts: a list of values. Record: a call of the old network that makes a named tuple of results. Other: anything else; a
    parameter is the node of the old network, until it is known what it meets."""
    old: int = 0
    """Channels it had in the old network."""
    new: int = 0
    last: bool = False
    """A map that had its channels permuted to the end; still as it was."""
    single: bool = False
    """A map whose space is a single place."""
    axes: int = 0
    """Axes of space that a line has in the old network."""
    of: Value | None = None
    """The value whose shape this is."""
    memory: Literal["", "permuted", "unknown"] = ""
    """In which order the old network's value lies, if that is not the order of its axes: a `contiguous()` of it is a copy."""
    narrowed: bool = False
    """Whether it is some of the channels of a tensor, as they lie there."""
    squeezed: bool = False
    """An image of one channel, without that axis: a result."""
    batch: bool = False
    """A size that is the number of samples."""

    def anew(self, node: Any) -> Value:
        """What a layer makes of this: a tensor of its own, which may lie as this one does."""
        return replace(self, node=node, memory="unknown" if self.memory else "", narrowed=False)


class UnevenError(Exception):
    """Channels cannot be split in these proportions: widths must be multiples of `parts`."""

    def __init__(self, name: str, x: Value, start: int, end: int, parts: int) -> None:
        super().__init__(
            f"{name} takes channels {start} to {end} of {x.old}, of which {x.new} are left, and no whole number of them is that "
            'share; use keep="channels"'
        )
        self.parts = parts


class UnequalError(Exception):
    """Maps meet that had equally many channels and no longer do, since widths were rounded one by one."""


def attribute(model: nn.Module, name: str) -> Any:
    """What has this name in a network."""
    return operator.attrgetter(name)(model)


def of_torch(module: nn.Module) -> bool:
    """Whether a module does what a class of torch.nn does: it is one, or differs in how it is made and in new names alone."""
    own: set[str] = set()
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn"):
            return kind is not nn.Module and not any(hasattr(kind, name) for name in own)
        own |= {name for name, held in vars(kind).items() if callable(held)} - {"__init__", "reset_parameters", "extra_repr"}
    return False


def drops_samples(module: nn.Module, dim: int) -> bool:
    """Whether a module, which is to drop whole samples, does so on maps on a group, tried on one."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            y: Tensor = copy.deepcopy(module).train()(torch.ones(31, 5, 3, *(2,) * dim)).flatten(1)
        except Exception:  # whatever a user's module may do
            return False
        return bool((y == y[:, :1]).all())


def is_constant(node: fx.Node) -> bool:
    """Whether this is a tensor that the forward made itself, to which torch.fx gave a name."""
    return node.op == "get_attr" and str(node.target).startswith("_tensor_constant")


def makes_record(target: Any) -> bool:
    """Whether this is a class of named tuples, or a dataclass, that a forward returns."""
    return isinstance(target, type) and ((issubclass(target, tuple) and hasattr(target, "_fields")) or is_dataclass(target))


def is_plain_record(kind: Any) -> bool:
    """Whether such a class keeps what it is given, tried on one: tracing makes it, and the network again of the same fields."""
    by_name = is_dataclass(kind)
    given = {name: object() for name in ([f.name for f in fields(kind)] if by_name else kind._fields)}
    try:
        made: Any = kind(**given) if by_name else kind(*given.values())
    except Exception:  # whatever a user's class may do
        return False
    return all(getattr(made, name) is held for name, held in given.items())


def spatial(node: fx.Node) -> dict[str, Any]:
    """The arguments of a functional pool that a layer takes."""
    refused = {k: v for k, v in node.kwargs.items() if k in ("ceil_mode", "return_indices", "divisor_override") and v}
    if refused:
        raise ValueError(f"convert: {node.name} uses {', '.join(refused)}, which is not equivariant, or not known; leave it out")
    return {k: v for k, v in node.kwargs.items() if k not in ("ceil_mode", "return_indices", "divisor_override", "input")}


def arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call after the first, by name: that of torch, where it takes numpy's too."""
    as_numpy = {"axis": "dim", "keepdims": "keepdim"}
    return dict(zip(names, node.args[1:], strict=False)) | {as_numpy.get(k, k): v for k, v in node.kwargs.items()}


def whole(scale: Any) -> Any:
    """A scale factor as whole numbers, where it is one."""
    if isinstance(scale, tuple | list):
        return tuple(whole(s) for s in scale)
    return int(scale) if isinstance(scale, float) and scale.is_integer() else scale


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
