"""Ready networks by name, for any group of the right dimension: `build("p4cnn")`, `build("p4cnn", group=p6)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gcnn.convert import convert
from gcnn.groups import Group, O, p1, p4, p4m
from gcnn.models import planar
from gcnn.models.cnn import cnn
from gcnn.models.resnet import digit_resnet, resnet

__all__ = ["MODELS", "build"]



def converted(planar: Callable[..., nn.Module], group: Group, keep: Any = "params", pool: Any = "mean", **options: Any) -> nn.Module:
    """An ordinary network, made with `options`, for the group; `keep` and `pool` as for `gcnn.convert`."""
    return convert(planar(**options), group, keep, pool)


_BASIC = {"group": p4, "planar": planar.ResNet, "block": planar.BasicBlock}
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    # the three networks of the paper's table 1
    "z2cnn": (cnn, {"group": p1, "channels": 20, "dropout": 0.3}),
    "p4cnn": (cnn, {"group": p4, "channels": 10}),
    "p4cnn-rotpool": (cnn, {"group": p4, "channels": 20, "pool_every_layer": True}),
    # table 2
    "resnet44": (resnet, {"group": p4m, "widths": (11, 23, 45), "blocks": 7}),
    "resnet26": (resnet, {"group": p4m, "widths": (25, 50, 100), "blocks": 4}),
    # a larger one of our own for digits
    "digit-resnet": (digit_resnet, {"group": p4m, "widths": (16, 32, 64)}),
    # well-known ones, converted: as many parameters as the planar networks
    "resnet18": (converted, {**_BASIC, "layers": (2, 2, 2, 2)}),
    "resnet34": (converted, {**_BASIC, "layers": (3, 4, 6, 3)}),
    "resnet50": (converted, {**_BASIC, "block": planar.Bottleneck, "layers": (3, 4, 6, 3)}),
    "densenet121": (converted, {"group": p4m, "planar": planar.DenseNet}),
    "unet": (converted, {"group": p4, "planar": planar.UNet}),
    "convnext-tiny": (converted, {"group": p4, "planar": planar.ConvNeXt}),
    "resnet10-3d": (
        converted,
        {**_BASIC, "group": O, "layers": (1, 1, 1, 1), "widths": (32, 64, 128, 256), "dim": 3, "in_channels": 1, "stem": 3},
    ),
}
"""Name -> (builder, the arguments that the name stands for)."""


def build(name: str, **options: Any) -> nn.Module:
    """The network `name` of MODELS; `options` are its builder's: group, channels or widths, num_classes, in_channels ...

    >>> import torch
    >>> build("p4cnn")(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in build("p4cnn").parameters())
    24680
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    builder, defaults = MODELS[name]
    try:
        return builder(**{**defaults, **options})
    except TypeError as error:
        raise TypeError(f"build({name!r}): {error}") from None
