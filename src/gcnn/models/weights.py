"""Weights as safetensors files that know what they are weights of: no pickle, so that a file from elsewhere runs no code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from gcnn.checks import unknown, unwrapped
from gcnn.files import write_file
from gcnn.groups import Group

__all__ = ["load_into", "save"]

Shapes = dict[str, tuple[int, ...]]
NEEDED = 'weights are safetensors files: pip install safetensors, or "gcnn[train]"'
TORCH_SAVE = (b"PK\3\4", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
"""What zip and pickle files begin with."""


def groups_of(model: nn.Module) -> list[Any]:
    """The name and the matrices of each group that layers of the model have: what its weights mean depends on them."""
    groups = [getattr(m, "group", None) for m in model.modules()]
    found = {group.name: group.matrices for group in groups if isinstance(group, Group)}
    return json.loads(json.dumps(sorted(found.items())))


def subgroups_of(model: nn.Module) -> dict[str, list[int]]:
    """By the name of a layer, the subgroup that it pools over, restricts to, or takes maps over the cosets of."""
    found = {}
    for name, m in model.named_modules():
        subgroup = getattr(m, "stabilizer", getattr(m, "subgroup", None))
        if isinstance(getattr(m, "group", None), Group) and subgroup is not None:
            found[name] = [int(s) for s in subgroup]
    return found


def save(model: nn.Module, path: str | Path, overwrite: bool = False, **about: Any) -> None:
    """Writes the weights with the groups of the model, what `build` made it from if that is known, and `about`.

    A network whose layers were changed after `build`, a new head for example, is not the one that `build` makes: `load_into`
    reads it into one that was changed in the same way.

    >>> import tempfile
    >>> from gcnn.models import build, load
    >>> net = build("p4cnn", channels=2).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(net, folder + "/mine.safetensors", trained_on="nothing")
    ...     again = load(folder + "/mine.safetensors")
    >>> bool((net(torch.ones(1, 1, 28, 28)) == again(torch.ones(1, 1, 28, 28))).all())
    True
    """
    try:
        from safetensors.torch import save as pack
    except ImportError as error:
        raise ImportError(NEEDED) from error
    if not isinstance(path, str | Path):
        raise TypeError(f"save(model, path): expected a network and a path, got {type(model).__name__} and {type(path).__name__}")
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} is there already; choose another name, or save(..., overwrite=True)")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save: there is no folder {path.parent}; make it first")
    if not isinstance(model, nn.Module):
        raise TypeError(f"save: expected a network, an nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    # shared ones each by itself
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in model.state_dict().items()}
    meta = {
        "groups": groups_of(model),
        "subgroups": subgroups_of(model),
        "build": built_from(model),
        "about": about,
        "sha256": digest(tensors),
    }
    try:
        told = json.dumps(meta)
    except TypeError as error:
        names = ", ".join(about)
        raise TypeError(f"save: {names}: expected numbers, words, lists and dicts, as JSON has them; {error}") from None
    write_file(path, pack(tensors, {"gcnn": told}))


def digest(tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of the numbers of all tensors: safetensors itself does not see a flipped bit."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def built_from(model: nn.Module) -> Any:
    """What `build` made a network from, its name and options; None for others, and where that is not so any more or no JSON."""
    origin = getattr(model, "meta", {}).get("gcnn") if isinstance(model, fx.GraphModule) else getattr(model, "built_from", None)
    if not origin or origin.get("shapes", shapes := shapes_of(model)) != shapes:
        return None
    try:
        return json.loads(json.dumps({"name": origin["name"], "options": origin["options"]}))
    except TypeError:  # a class of blocks, say
        return None


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the state_dict."""
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def read(path: str | Path, what: str = "weights") -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a file, and what it says about them; `what` it should hold, for the message if it does not."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(NEEDED) from error
    if Path(path).is_dir():
        raise FileNotFoundError(f"{path} is a folder, not a file of {what}; gcnn.train.load_run reads the folder of a run")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not there; gcnn.models.save(model, path) writes such files")
    try:
        with Path(path).open("rb") as raw:  # safetensors says of a file that may not be read that it is not there
            head = raw.read(4)
    except OSError as error:
        raise type(error)(f"{path} cannot be read ({error.strerror or error})") from error
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if "gcnn" not in about:
                raise ValueError("it does not say which network it is of; safetensors.torch.load_file reads the bare tensors")
            meta = json.loads(about["gcnn"])
            if not isinstance(meta, dict):
                raise ValueError(f"it says {str(meta)[:40]} about itself")
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        if meta.get("sha256", kept := digest(tensors)) != kept:
            raise ValueError("its numbers are not those that were written")
    except (SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, SafetensorError) and head.startswith(TORCH_SAVE):
            raise ValueError(
                f"{path} is a zip or pickle file, as torch.save writes them, not one of gcnn.models.save; if it holds a "
                "state_dict, net.load_state_dict(torch.load(path)) reads it"
            ) from error
        raise ValueError(
            f"{path} holds no {what} of gcnn, or is truncated or damaged ({error}); take another copy, or write it again"
        ) from error
    if what == "weights" and {"config", "history"} <= meta.keys():
        own = Path(path).name == "last.safetensors"
        folder = repr(str(Path(path).parent)) if own else "folder"
        first = "" if own else "put it into a folder as last.safetensors, then "
        raise ValueError(f"{path} is the checkpoint of a run: {first}gcnn.train.load_run({folder}).model is its network")
    return tensors, meta


def _prefix(shapes: Shapes, others: Shapes) -> str:
    """The module of a larger network, of which these are the shapes, that has all of the first; or nothing."""
    first = next(iter(shapes), "")
    for other in others:
        prefix = other.removesuffix(first)
        if other.endswith(f".{first}") and all(others.get(prefix + name) == shape for name, shape in shapes.items()):
            return prefix.removesuffix(".")
    return ""


def _without_wrapper(found: dict[str, Any]) -> dict[str, Any]:
    """By the names of the network itself what was written of one inside torch.compile or DataParallel."""
    for prefix in ("_orig_mod.", "module."):
        if found and all(name.startswith(prefix) for name in found):
            return _without_wrapper({name.removeprefix(prefix): held for name, held in found.items()})
    return found


def load_into(model: nn.Module, path: str | Path, skip: Sequence[str] = ()) -> nn.Module:
    """The model with the weights of a file, which must be of the same groups and shapes; else the model is as it was.

    Modules whose names are in `skip` keep the model's own numbers, whatever the file has: `skip=("fc",)` for a head with another
    number of classes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_into: expected a network, an nn.Module, got {type(model).__name__}")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "load_into: the network is on the meta device, which holds no numbers; use model.to_empty(device=...) first"
        )
    outer, model = model, unwrapped(model)
    tensors, meta = read(path)
    try:
        theirs, ours = dict(meta.get("groups", [])), dict(groups_of(model))
    except (TypeError, ValueError):
        raise ValueError(f"{path} holds no weights of gcnn: it says {str(meta.get('groups'))[:40]!r} about its groups") from None
    if theirs != ours:
        words = [", ".join(sorted(g)) or "no group" for g in (theirs, ours)]
        more = " (with other elements, or in another order)" if words[0] == words[1] else ""
        raise ValueError(
            f"{path} holds weights of {words[0]}, the network is one of {words[1]}{more}; make the network for that "
            "group, or take other weights"
        )
    expected, subgroups = shapes_of(model), meta.get("subgroups", {})
    if expected.keys().isdisjoint(tensors):
        tensors, subgroups = _without_wrapper(tensors), _without_wrapper(subgroups)
    found = {k: tuple(v.shape) for k, v in tensors.items()}
    names, skipped, apart = expected.keys() | found.keys(), set[str](), expected.keys().isdisjoint(found)
    asked = (skip,) if isinstance(skip, str) else tuple(skip)
    if outer is not model:
        asked = tuple(module.removeprefix("module.").removeprefix("_orig_mod.") for module in asked)
    for module in asked:
        inside = {name for name in names if f"{name}.".startswith(f"{module}.")}
        if not inside and (not module or module not in dict(model.named_modules())):  # some have no numbers
            raise ValueError("load_into: " + unknown("skip", module, dict.fromkeys(name.split(".")[0] for name in expected)))
        skipped |= inside
    if other := sorted(name for name in names - skipped if expected.get(name) != found.get(name)):
        first, modules = other[0], sorted({name.rpartition(".")[0] or name for name in other})
        if apart and (prefix := _prefix(expected, found)):
            way_out = f"the file is of a larger network, which has this one as {prefix!r}: load that one, or save this part alone"
        elif apart and (prefix := _prefix(found, expected)):
            way_out = f"the file is of a part of this network: load_into(model.get_submodule({prefix!r}), path)"
        elif len(modules) <= 2 and names - skipped - {n for n in names for m in modules if f"{n}.".startswith(f"{m}.")}:
            way_out = f"load_into(model, path, skip={(*asked, *modules)}) takes the rest of the weights"
        else:
            way_out = "make the network with the options that the other was made with"
        raise ValueError(
            f"{path} does not fit the network: {first} is {found.get(first, 'missing')} there, "
            f"{expected.get(first, 'missing')} here; {way_out}"
        )
    theirs, ours = subgroups, subgroups_of(model)
    for layer in ours:
        if theirs.get(layer, ours[layer]) != ours[layer] and not any(f"{layer}.".startswith(f"{module}.") for module in asked):
            raise ValueError(
                f"{path} holds weights of a network whose {layer} has the subgroup {tuple(theirs[layer])}, here it is "
                f"{tuple(ours[layer])}; make the network with the same, or take other weights"
                + (f"; load_into(model, path, skip={(*asked, layer)}) takes it for another layer" if layer else "")
            )
    model.load_state_dict({name: t for name, t in tensors.items() if name not in skipped}, strict=False)  # looked at above
    return outer
