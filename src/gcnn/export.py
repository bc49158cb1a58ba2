"""Networks of this package for serving: `planar(model)` as plain modules with folded banks (paper, section 7), and ONNX files.

The network is traced by torch.fx and rebuilt on planes (N, S K, *X): convolutions with the expanded banks, norms and pools of
torch.nn, sums over the group as functions. What comes out needs nothing of this package to load or run. Parts that torch.fx
cannot trace keep their own code, and have their layers replaced one by one.
"""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gcnn import lattice
from gcnn.checks import unwrapped
from gcnn.files import write_file
from gcnn.onnxfile import in_the_plane, onnx_model, others, sides_of
from gcnn.planes import Planar, is_layer
from gcnn.tracing import TRACING, InPlaceProxy, Tracer, leaves, reached

__all__ = ["planar", "to_onnx"]

# methods and functions whose results have a size that depends on values
BY_NUMBERS = {
    *("item", "tolist", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    "repeat_interleave",
}


def planar(model: nn.Module, fold: bool = False, example: Tensor | tuple[Tensor, ...] | None = None) -> nn.Module:
    """The same network, in eval mode, as plain nn.Conv, nn.BatchNorm, nn.Linear ...: same inputs, same outputs.

    On a CPU the outputs have the same bits wherever the original takes the planar algorithm; elsewhere they agree within
    rounding. Takes networks on every lattice. The result is a copy; it does not follow further training. With `fold`, norms that
    follow a convolution directly become part of it, and numbers are rounded anew. Small batches gain most; wide layers for which
    the original takes the Fourier algorithm (`gcnn.functional.correlate`) are slower as plain convolutions.

    - `example`: an image (N, C, *X), or a tuple of all inputs, on which the result is compared with the network. An error asks
      for it where only a run tells what comes: whether a norm gets maps or functions on the group; which way a `forward` that
      branches on sizes goes, and the result then refuses images of sizes that go another way; what the layers of a module get
      that torch.fx cannot trace, since it branches on other numbers, say. Such a module keeps its class, whose file is needed to
      load the result, and has its layers replaced one by one: its code must not ask of what class those are.

    Arguments of `forward` that have a default keep it, and are none of the result's, unless the example gives them. Without an
    example nothing is compared: random numbers, torch.autocast and numbers that a `forward` keeps would be lost without a word.

    >>> from gcnn.models import build
    >>> net = build("p4cnn").eval()
    >>> fast, x = planar(net), torch.rand(2, 1, 28, 28)
    >>> torch.allclose(net(x), fast(x), atol=1e-5)
    True
    >>> sorted({type(m).__name__ for m in fast.modules() if not list(m.children())})
    ['BatchNorm2d', 'Conv2d', 'MaxPool2d', 'ReLU']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"planar: expected a network, an nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    for name, m in model.named_modules():
        if is_layer(m):
            _check_hooks(name or "the layer", m)
    if is_layer(model):
        model = nn.Sequential(model).train(model.training)
    inputs = None if example is None else _inputs(model, example)
    with torch.no_grad(), in_eval(model):
        expected = None if inputs is None else _answer(model, inputs, "the network")
        made = _plain(model, fold, inputs)
        for name, m in made.named_modules():
            if _is_ours(m):
                raise ValueError(
                    f"planar: {name} ({m}) is inside a module that is not looked into; give planar the network itself"
                )
        if inputs is not None:
            with _ours_refused():
                found = _answer(made, inputs, "the plain network")
            _check_same(found, expected)
    return made


def to_onnx(
    model: nn.Module,
    path: str | Path,
    example: Tensor | tuple[Tensor, ...],
    tolerance: float = 1e-4,
    overwrite: bool = False,
    about: dict[str, str] | None = None,
    any_size: bool = False,
) -> float:
    """Writes the network as an ONNX file of plain convolutions, for batches of any size, and returns how far the file is off.

    The file takes "input", with N of them at a time, and answers with "output"; a network of several inputs, whose example is a
    tuple, gets "input_1", "input_2" and so on. `about` is written into its metadata. With `any_size` it takes images of other
    sizes than the example's too, for instance whole scenes for a U-Net, and is compared with the network on some of those as
    well: of twice the size, of a cell less than that, and a cell longer, of which the network must take one.
    The error is that of onnxruntime on `example`, relative to the largest output; above `tolerance` it is an error, and no file
    is written. Needs pip install "gcnn[export]".
    """
    try:
        import onnxruntime
    except ImportError as missing:
        raise ImportError('to_onnx needs onnx, onnxscript and onnxruntime: pip install "gcnn[export]"') from missing
    given = example if isinstance(example, tuple) else (example,)
    if not given or not all(isinstance(t, Tensor) for t in given):
        kinds = ", ".join(type(t).__name__ for t in given)
        raise TypeError(
            f"to_onnx: expected an example input, a tensor, or a tuple of all inputs, got {kinds or 'an empty tuple'}"
        )
    if len({len(t) for t in given if t.ndim}) != 1 or not all(t.ndim for t in given):
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ValueError(f"to_onnx: expected inputs with as many samples each, N on the first axis, got {shapes}")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"to_onnx: there is no folder {path.parent}; make it first")
    if about is not None and not isinstance(about, Mapping):
        raise TypeError(f"to_onnx: about must be a dict of words, got {about!r}")
    if path.exists() and not overwrite:
        raise FileExistsError(f"to_onnx: {path} is there already; choose another name, or overwrite=True")
    if {p.dtype for p in model.parameters()} | {t.dtype for t in given} != {torch.float32}:
        raise ValueError("to_onnx: expected a float32 network and example, which every runtime has; use .float()")
    device = next(model.parameters(), given[0]).device
    there = tuple(t.detach().to(device) for t in given)
    plain, here = planar(model, fold=True, example=there).cpu(), [t.cpu() for t in there]
    with torch.no_grad(), in_eval(model):
        expected = model(*_copies(there))
    if not isinstance(expected, Tensor):
        raise ValueError(
            f"to_onnx: expected a network that returns one tensor, got {type(expected).__name__}; wrap it in a module "
            "whose forward returns the one that is wanted"
        )
    for part in plain.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.kwargs.get("mode") == "nearest-exact":  # onnxruntime's own rounds as it should, and is faster than a gather
                node.kwargs = {**node.kwargs, "mode": "nearest"}
        if isinstance(part, fx.GraphModule):
            part.recompile()
    for parent in list(plain.modules()) if any_size else ():
        for name, part in parent.named_children():
            if type(part) is nn.MaxPool1d and not part.return_indices:  # in which torch.export fixes the length
                setattr(parent, name, in_the_plane(part))
    two = [t if len(t) > 1 else t.repeat(2, *(1,) * (t.ndim - 1)) for t in here]  # one alone would be fixed
    file = onnx_model(plain, tuple(two), any_size)
    for key, value in (about or {}).items():
        file.metadata_props.add(key=str(key), value=str(value))
    content = file.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    names = [value.name for value in session.get_inputs()]

    def answer(inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad(), in_eval(model):
            found: Tensor = model(*(t.to(device) for t in _copies(inputs)))
        return found

    def off(inputs: Sequence[Tensor], y: Tensor) -> float:
        sizes = ", ".join(str(tuple(t.shape)) for t in inputs)
        try:
            numbers = session.run(None, {name: t.cpu().numpy() for name, t in zip(names, inputs, strict=True)})[0]
        except Exception as error:  # onnxruntime's own, of several kinds
            raise ValueError(f"to_onnx: the file fails on inputs {sizes} ({error}); nothing was written") from error
        if numbers.shape != y.shape:
            words = f"the file answers {numbers.shape}, the network {tuple(y.shape)}"
            raise ValueError(f"to_onnx: on inputs {sizes} {words}; nothing was written")
        return float((torch.from_numpy(numbers) - y.cpu()).abs().max() / y.abs().max().clamp(min=1e-30))

    error = off(here, expected)
    for several in ([t[:1] for t in here], [torch.cat([t, t[:1]]) for t in here]):  # a file cannot branch on how many there are
        error = max(error, off(several, answer(several)))
    if any_size:
        seen = zip(file.graph.input, sides_of(here), strict=True)
        if not all(value.type.tensor_type.shape.dim[axis].dim_param for value, sides in seen for axis in sides):
            raise ValueError("to_onnx: any_size needs a network for images of every size, and torch finds one size in it alone")
        refusals = []
        for images in others([*zip(here, sides_of(here), strict=True)]):
            try:
                with redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
                    expected = answer(images)
            except Exception as refused:  # inputs that must fit each other, or strides
                refusals.append(refused)
                continue
            error = max(error, off(images, expected))
        if len(refusals) == 3:
            words = "any_size compares images of twice the size, on which the network fails"
            raise ValueError(f"to_onnx: {words}: {refusals[0]}") from refusals[0]
    if not error <= tolerance:
        raise ValueError(f"to_onnx: the file's answers are off by {error:.1e}, more than {tolerance:.1e}; nothing was written")
    write_file(path, content)
    return error


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """With the network in eval mode; afterwards each part is in its own again."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


def _folded(model: fx.GraphModule) -> fx.GraphModule:
    """With each norm that follows a convolution directly as part of it."""
    for node in list(model.graph.nodes):
        if node.op != "call_module" or not isinstance(norm := model.get_submodule(str(node.target)), _BatchNorm):
            continue
        before: Any = node.args[0]
        if not (isinstance(before, fx.Node) and before.op == "call_module" and len(before.users) == 1):
            continue
        if norm.running_mean is None:  # made anew from each batch
            continue
        conv = model.get_submodule(str(before.target))
        shared = sum(n.op == "call_module" and n.target == before.target for n in model.graph.nodes) > 1
        back = isinstance(conv, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) and conv.groups == 1
        if (back or isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d)) and not shared:
            place, _, last = str(before.target).rpartition(".")
            fused: Any = fuse_conv_bn_eval
            setattr(model.get_submodule(place), last, fused(conv, norm, transpose=back))
            node.replace_all_uses_with(before)
            model.graph.erase_node(node)
    model.delete_all_unused_submodules()
    model.recompile()
    return model


# --- how networks are traced ---------------------------------------------------------------------------------------------------


def _check_hooks(name: str, module: nn.Module) -> None:
    """Raises a ValueError where a module that is not kept has hooks; those of weight_norm, prune and the like are done."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if any(not type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
        raise ValueError(
            f"planar: {name} ({type(module).__name__}) has hooks, which would be lost; remove them first, handle.remove(), and "
            "put them on the result"
        )


def _plain(model: nn.Module, fold: bool, inputs: list[Any] | None) -> nn.Module:
    """The network, in plain modules; inputs tell what cannot be told before it runs."""
    own, tracer = _own(model), _Tracer(inputs)  # tracing leaves constants in it, and what a forward keeps
    try:
        with TRACING:
            graph = tracer.trace(own)
        if tracer.refused is not None:
            raise tracer.refused
    except Exception as error:  # whatever the user's forward does with a proxy
        if inputs is None:
            raise ValueError(
                f"planar: torch.fx cannot trace {type(model).__name__} ({error}); give planar an example= image: branches on "
                "sizes then go its way, and what cannot be traced has its layers replaced one by one"
            ) from error
        return _replaced(model, fold, _calls(model, inputs), "the network", error)
    _check_hooks("the network", model)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.args = ()  # what was given may have decided branches, and is to be given always
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    errors = {name: error for name, error in tracer.kept.items() if name in called}
    calls = _calls(model, inputs) if inputs is not None and errors else {}
    kept = {name: _replaced(model.get_submodule(name), fold, calls, name, error) for name, error in errors.items()}
    made = Planar(own, graph, tracer.ranks(), kept).build()
    return _folded(made) if fold else made


def _replaced(module: nn.Module, fold: bool, calls: dict[nn.Module, tuple[Any, ...]], name: str, why: Exception) -> nn.Module:
    """A module that cannot be traced, with plain layers in it."""
    if _is_ours(module):
        raise ValueError(f"planar: torch.fx cannot trace {name} ({type(module).__name__}): {why}; export the parts around it")
    new: dict[int, Any] = {}
    for place, part in _parts(module, "" if name == "the network" else name):
        try:
            new[id(part)] = planar(part, fold, calls.get(part))
        except ValueError as error:
            told = str(error).removeprefix("planar: ")
            told = f"{place}{told[1:]}" if told.startswith("0 ") else f"{place}: {told}"  # a layer alone is called 0
            more = "" if part in calls else "; it does not run on this one: give one on which it does"
            raise ValueError(f"planar: {told}{more}") from error
    try:
        return copy.deepcopy(module, new)  # wherever it has one of them, its copy has the plain one
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"planar: {name} cannot be traced by torch.fx ({why}), nor copied ({error})") from error


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost layers and networks in a module that can be replaced whole."""
    for key, child in module.named_children():
        place = f"{name}.{key}" if name else key
        if _is_ours(child) or isinstance(child, fx.GraphModule):
            yield place, child
        else:
            yield from _parts(child, place)


def _is_ours(module: nn.Module) -> bool:
    return is_layer(module) or type(module).__module__.partition(".")[0] == __name__.partition(".")[0]


def _calls(model: nn.Module, inputs: list[Any]) -> dict[nn.Module, tuple[Any, ...]]:
    """What each part of a network gets first when it runs."""
    calls: dict[nn.Module, tuple[Any, ...]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if given := (*args, *kwargs.values()):
            calls.setdefault(module, _copies(given))

    own = _own(model)
    theirs = {part: module for (_, module), (_, part) in zip(_parts(model, ""), _parts(own, ""), strict=True)}
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in theirs]
    try:
        own(*_copies(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return {theirs[part]: given for part, given in calls.items()}


def _own(model: nn.Module) -> nn.Module:
    """A copy to run: a forward may change what its modules hold."""
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError):  # it holds something that cannot be copied
        return model


def _inputs(model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> list[Any]:
    """The example on the device and in the dtype of the network, but for whole numbers."""
    given = example if isinstance(example, tuple) else (example,)
    like = next(model.parameters(), None)
    if not all(isinstance(t, Tensor) for t in given[:1]):
        raise TypeError(f"planar: expected an example image, a tensor, or a tuple of all inputs, got {type(given[0]).__name__}")
    if all(len(t) == 0 for t in given if isinstance(t, Tensor) and t.ndim):
        raise ValueError("planar: the example is empty, so that nothing can be compared; give at least one image")
    if like is None:
        return list(given)
    return [t.to(like.device, like.dtype if t.is_floating_point() else None) if isinstance(t, Tensor) else t for t in given]


def _copies(inputs: Any) -> tuple[Any, ...]:
    """The inputs, for a network that may change them."""
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)


def _answer(model: nn.Module, inputs: list[Any], what: str) -> Any:
    """What it answers twice in a row: it may remember."""
    own = _own(model)
    try:
        return [own(*_copies(inputs)) for _ in range(2)]
    except Exception as error:  # whatever the user's forward does
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor))
        raise ValueError(f"planar: {what} fails on the example {shapes}: {error}") from error


def _check_same(found: Any, expected: Any) -> None:
    """Raises a ValueError unless both networks answer the same on the example."""
    ours, theirs = leaves(found), leaves(expected)
    same = len(ours) == len(theirs)
    for y, was in zip(ours, theirs, strict=False):
        if not isinstance(was, Tensor) or not isinstance(y, Tensor) or (y.shape, y.dtype) != (was.shape, was.dtype):
            same = same and not isinstance(was, Tensor)
        elif not was.is_floating_point() and not was.is_complex() and not was.is_meta and was.numel():
            same = same and float((y != was).double().mean()) <= 0.01  # classes that are as likely may change places by rounding
        elif was.is_floating_point() and not was.is_meta and was.numel():
            # far above what rounding does, in half precision and with TF32 too; what goes another way is further off
            eps, largest = torch.finfo(was.dtype).eps, was[was.isfinite()].abs().max() if was.isfinite().any() else 0.0
            same = same and torch.allclose(y, was, rtol=0.0, atol=float(eps**0.25 * (largest + eps)), equal_nan=True)
    if not same:
        raise ValueError(
            "planar: on the example the plain network answers otherwise than the network: its forward has something that is lost "
            "in tracing, such as random numbers, torch.autocast, hooks or numbers that it keeps; move that out of it, or export "
            "the parts around it"
        )


@contextmanager
def _ours_refused() -> Iterator[None]:
    """With an error where a layer of ours is called, which a plain network may hold in a list or a function."""

    def refuse(module: nn.Module, _: Any) -> None:
        if _is_ours(module):
            raise ValueError(f"{module} is held outside of its modules, in a list or a function; use nn.ModuleList, say")

    hook = nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


class _Tracer(Tracer):
    """Traces a network, and where inputs are given runs it along: those tell which way branches on sizes go.

    Modules that cannot be traced are kept whole then, the smallest ones that will do.
    """

    def __init__(self, inputs: list[Any] | None) -> None:
        super().__init__(autowrap_functions=(lattice.to_hexagonal, lattice.to_square))
        self._autowrap_search.append(lattice)  # where users call them as gcnn.lattice.to_hexagonal
        self.inputs, self.given, self.next = inputs, len(inputs or (0,)), iter(_copies(inputs or ()))
        self.run: fx.Interpreter | None = None
        self.running = False
        self.kept: dict[str, Exception] = {}
        self.refused: Exception | None = None  # a branch that could not be followed, whose error a forward may have caught

    def ranks(self) -> dict[str, int]:
        """How many axes each value of the network has on the inputs."""
        return {} if self.run is None else {n.name: y.ndim for n, y in self.run.env.items() if isinstance(y, Tensor)}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m) or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if self.inputs is not None and node.op != "output":
            self.run = self.run or fx.Interpreter(self.root, garbage_collect_values=False, graph=self.graph)
            self.running = True
            try:
                first = node.op == "placeholder"
                self.run.env[node] = next(self.next, *node.args) if first else self.run.run_node(node)
            finally:
                self.running = False
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.running:
            return forward(*args, **kwargs)
        last, stack = next(iter(reversed(self.graph.nodes)), None), self.module_stack.copy()
        try:
            made = super().call_module(m, forward, args, kwargs)
            if self.refused is not None:
                raise self.refused
            return made
        except Exception as error:  # whatever the user's forward does with a proxy
            if self.inputs is None:
                raise
            self.refused = None
            self.module_stack = stack
            for node in reversed(list(self.graph.nodes)):
                if node is last:
                    break
                self.graph.erase_node(node)
                if self.run is not None:
                    self.run.env.pop(node, None)
            name = self.path_of_module(m)
            self.kept.setdefault(name, error)
            return self.create_proxy("call_module", name, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Which way a branch on sizes goes: that of the inputs, and sizes that go another way are refused when it runs."""
        if self.run is None or not self._is_of_sizes(obj.node):
            try:
                return super().to_bool(obj)
            except Exception as error:
                self.refused = error
                raise
        value = self.run.env[obj.node]
        shapes = ", ".join(str(tuple(x.shape)) for x in self.inputs or () if isinstance(x, Tensor))
        told = f"an image of this size goes another way than the example {shapes} of this network; give planar one of this size"
        # `not` would ask for a bool, here and where a file is loaded; what is false is 0, or empty
        same = obj if value else self.create_proxy("call_function", operator.eq, (obj, value), {})
        torch._assert(same, told)
        return bool(value)

    def _is_of_sizes(self, node: fx.Node) -> bool:
        """Whether a number depends on the sizes of tensors alone, and those on the sizes of the inputs."""
        of_tensor = node.op == "call_method" and node.target in ("size", "dim", "numel")
        if of_tensor or (node.target is getattr and node.args[1] in ("shape", "ndim")):
            return not self._has_size_by_numbers(node)
        python = node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
        return python and bool(node.all_input_nodes) and all(self._is_of_sizes(n) for n in node.all_input_nodes)

    def _has_size_by_numbers(self, node: fx.Node) -> bool:
        """Whether the size of a tensor depends on values, or may."""
        assert self.run is not None
        for each in reached([node], lambda n: n.all_input_nodes):
            called = each.target if isinstance(each.target, str) else getattr(each.target, "__name__", "")
            indices: list[Any] = [self.run.env[n] for n in each.all_input_nodes[1:]] if called == "getitem" else []
            alone = called == "where" and len(each.args) == 1
            kept = each.op == "call_module" and called in self.kept
            if called in BY_NUMBERS or kept or alone or any(isinstance(i, Tensor) for i in indices):
                return True
        return False
