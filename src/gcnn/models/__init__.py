"""Ready networks by name, for any group of the right dimension: `build("p4cnn")`, `build("p4cnn", group=p6)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx, nn

from gcnn.checks import unknown
from gcnn.convert import convert
from gcnn.groups import GROUPS, Group, O, p1, p4, p4m, p6m
from gcnn.models import planar
from gcnn.models.allcnn import allcnn
from gcnn.models.cnn import cnn
from gcnn.models.resnet import pooled_resnet, resnet
from gcnn.models.weights import load_into, read, save, shapes_of

__all__ = ["EXAMPLES", "MODELS", "PRETRAINED", "build", "load", "load_into", "save"]


def converted(
    planar: Callable[..., nn.Module], group: Group, keep: Any = "params", pool: Any = "mean", **options: Any
) -> nn.Module:
    """An ordinary network, made with `options`, for the group; `keep` and `pool` as for `gcnn.convert`."""
    if not group.fills_box and "odd" in inspect.signature(planar).parameters:
        options = {"odd": True, **options}
    return convert(planar(**options), group, keep, pool)


_BASIC = {"group": p4, "planar": planar.ResNet, "block": planar.BasicBlock}
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    # the three networks of the paper's table 1
    "z2cnn": (cnn, {"group": p1, "channels": 20, "dropout": 0.3}),
    "p4cnn": (cnn, {"group": p4, "channels": 10}),
    "p4cnn-rotpool": (cnn, {"group": p4, "channels": 20, "pool_every_layer": True}),
    # table 2
    "allcnn-c": (allcnn, {"group": p4m, "channels": 32}),
    "resnet44": (resnet, {"group": p4m, "widths": (11, 23, 45), "blocks": 7}),
    "resnet26": (resnet, {"group": p4m, "widths": (25, 50, 100), "blocks": 4}),
    # the paper's future work: hexagons, with 0.34 million parameters, and volumes
    "hex-resnet26": (resnet, {"group": p6m, "widths": (5, 10, 20), "blocks": 4, "hexagonal": True}),
    "voxel-resnet": (pooled_resnet, {"group": O, "widths": (6, 12, 24), "blocks": 1}),
    # a larger one of our own for digits
    "digit-resnet": (pooled_resnet, {"group": p4m, "widths": (16, 32, 64)}),
    # well-known ones, converted: as many parameters as the planar networks
    "resnet18": (converted, {**_BASIC, "layers": (2, 2, 2, 2)}),
    "resnet34": (converted, {**_BASIC, "layers": (3, 4, 6, 3)}),
    "resnet50": (converted, {**_BASIC, "block": planar.Bottleneck, "layers": (3, 4, 6, 3)}),
    # the p4m DenseNet of digital pathology (Veeling et al., 2018), for tiles of 96 pixels, with its 119 thousand parameters
    "densenet": (
        converted,
        {
            "group": p4m,
            "planar": planar.DenseNet,
            "growth": 24,
            "blocks": (1,) * 5,
            "stem": 3,
            "bottleneck": False,
            "num_classes": 2,
        },
    ),
    "densenet121": (converted, {"group": p4m, "planar": planar.DenseNet}),
    "unet": (converted, {"group": p4, "planar": planar.UNet}),
    "convnext-tiny": (converted, {"group": p4, "planar": planar.ConvNeXt}),
    "resnet10-3d": (
        converted,
        {**_BASIC, "group": O, "layers": (1, 1, 1, 1), "widths": (32, 64, 128, 256), "dim": 3, "in_channels": 1, "stem": 3},
    ),
}
"""Name -> (builder, the arguments that the name stands for)."""


ALIASES = {"convnext": "convnext-tiny", "resnet10_3d": "resnet10-3d"}
"""Other names for some of them."""

EXAMPLES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("z2cnn", "p4cnn", "p4cnn-rotpool", "digit-resnet"), (1, 28, 28)),
    **dict.fromkeys(("resnet44", "resnet26", "resnet18", "resnet34", "resnet50"), (3, 33, 33)),
    "allcnn-c": (3, 33, 33),
    "hex-resnet26": (3, 32, 32),
    "voxel-resnet": (1, 30, 30, 30),
    "densenet": (3, 32, 32),
    "densenet121": (3, 29, 29),
    "unet": (3, 32, 32),
    "convnext-tiny": (3, 32, 32),
    "resnet10-3d": (1, 9, 9, 9),
}
"""Name -> the shape of an image at which its strides are exact."""

PRETRAINED = {"p4cnn": "p4cnn.safetensors", "z2cnn": "z2cnn.safetensors"}
"""Name -> weights that come with the package."""


def build(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
    """The network `name` of MODELS; `options` are its builder's: group, channels or widths, num_classes, in_channels ...

    `widths` of the paper's networks and of our own are channels on the group; those of converted networks (resnet18,
    convnext-tiny ...) are the ordinary network's, of which the converted one has about 1 / sqrt(S), for as many parameters.

    With `pretrained`, weights that come with the package, trained on the 12,000 rotated digits of `gcnn.data` to take
    (bytes - 33.29) / 73.90: P4CNN is wrong on 1.8 % of the 50,000 test digits, Z2CNN on 5.1 % of the first 10,000.

    >>> import torch
    >>> build("p4cnn")(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in build("p4cnn").parameters())
    24680
    """
    name = ALIASES.get(name, name)
    if name not in MODELS:
        raise ValueError(unknown("model", name, MODELS))
    builder, defaults = MODELS[name]
    dim = options.get("dim", len(EXAMPLES[name]) - 1)
    if isinstance(options.get("group"), str):
        if options["group"] not in GROUPS:
            raise ValueError("build: " + unknown("group", options["group"], (n for n, g in GROUPS.items() if g.dim == dim)))
        options["group"] = GROUPS[options["group"]]
    if not isinstance(options.get("group", p1), Group):
        raise TypeError(f"build({name!r}): expected a group, such as p4m, or its name, got {options['group']!r}")
    if dim == 3 and isinstance(group := options.get("group"), Group) and group.dim < 3:
        acts_on = ("signals", "images")[group.dim - 1]
        raise ValueError(f"build({name!r}): {group} acts on {acts_on}; for volumes take O or Oh")
    if "invariant" in options and "invariant" not in inspect.signature(builder).parameters:
        others = ", ".join(n for n, (made_by, _) in MODELS.items() if "invariant" in inspect.signature(made_by).parameters)
        why = "its result is an image, which turns as the input does" if name == "unet" else "its head is invariant as it is"
        raise TypeError(f"build({name!r}): leave out invariant: {why}; it is an option of {others}")
    if "planar" not in options and (foreign := [option for option in options if option not in options_of(name)]):
        raise TypeError(f"build({name!r}): " + unknown("option", foreign[0], options_of(name)))
    _check_stages(name, options)
    for count in ("num_classes", "in_channels", "width", "levels", "channels", "growth"):
        if count in options and not (isinstance(options[count], int | np.integer) and options[count] > 0):
            raise ValueError(f"build({name!r}): {count} must be a positive whole number, got {options[count]!r}")
    try:
        made = builder(**{**defaults, **options})
    except TypeError as error:
        raise TypeError(f"build({name!r}): {error}") from None
    named = {k: v.name if isinstance(v, Group) else v for k, v in options.items()}
    origin = {"name": name, "options": named, "shapes": shapes_of(made)}
    if isinstance(made, fx.GraphModule):
        made.meta["gcnn"] = origin  # copies of such modules keep this alone
    else:
        made.built_from = origin  # type: ignore[assignment]
    if not isinstance(pretrained, bool):
        raise TypeError(f"build: pretrained is True or False, got {pretrained!r}; load_into(model, path) reads files")
    if pretrained:
        if name not in PRETRAINED or options:
            raise ValueError(
                f"build: weights come with {', '.join(PRETRAINED)}, without other options, not with {name!r} {options or ''}"
            )
        load_into(made, Path(__file__).parent / PRETRAINED[name]).eval()
    return made


def options_of(name: str) -> list[str]:
    """What `build` takes for a network, in the order of its builder.

    >>> options_of("unet")
    ['group', 'keep', 'pool', 'width', 'levels', 'num_classes', 'in_channels', 'odd']
    """
    builder, defaults = MODELS[name]
    parts = (builder, defaults["planar"]) if "planar" in defaults else (builder,)  # a converted one takes the ordinary one's
    return [option for part in parts for option in inspect.signature(part).parameters if option not in ("planar", "options")]


def _check_stages(name: str, options: dict[str, Any]) -> None:
    """Raises a ValueError unless sizes are whole numbers, one per stage where the network has so many."""
    builder, defaults = MODELS[name]
    maker = defaults.get("planar", builder)
    usual = {p.name: p.default for p in inspect.signature(maker).parameters.values()} | defaults
    for key in ("widths", "layers", "depths", "blocks"):
        if key not in options or key not in usual:  # the builder says which options it has
            continue
        value, default = options[key], usual[key]
        many, least = isinstance(default, tuple), int(key == "widths")
        numbers = list(value) if many and isinstance(value, Sequence | np.ndarray) else [] if many else [value]
        if not numbers or not all(isinstance(v, int | np.integer) and not isinstance(v, bool) and v >= least for v in numbers):
            kind = f"{'positive ' * least}whole numbers, one per stage" if many else "a whole number"
            raise ValueError(f"build({name!r}): {key} must be {kind}, such as {default}, got {value!r}")
    stages = next((key for key in ("layers", "depths") if key in usual), None)
    if stages is not None and "widths" in usual:
        asked = f"{name} with {stages}={tuple(options[stages])}" if stages in options else name
        count, widths = len(options.get(stages, usual[stages])), tuple(options.get("widths", usual["widths"]))
        if count != len(widths):
            raise ValueError(
                f"build({name!r}): {asked} has {count} stages, got {len(widths)} widths {widths}; give one per stage"
            )


def load(path: str | Path) -> nn.Module:
    """The network of a file that `save` wrote of one from `build`, in eval mode; `load_into(model, path)` takes any other."""
    tensors, meta = read(path)
    made_from = meta.get("build")
    if not made_from:
        raise ValueError(f"{path} does not say which network it is of: make that, and use load_into(model, {str(path)!r})")
    known = isinstance(made_from, dict) and isinstance(made_from.get("options"), dict) and str(made_from.get("name")) in MODELS
    if not known:
        raise ValueError(f"{path} is of a network that this version does not have: it says {str(made_from)[:60]!r}")
    options = dict(made_from["options"])
    if "group" in options:
        if str(options["group"]) not in GROUPS:
            raise ValueError(f"{path} is of the group {options['group']}, which is not in GROUPS: use load_into")
        options["group"] = GROUPS[options["group"]]
    try:
        made = build(made_from["name"], **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is of a network that this version does not make: {error}") from None
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    return load_into(made.to(kinds.pop()) if len(kinds) == 1 else made, path).eval()
