"""Networks of this package for serving: `planar(model)` as plain modules with folded banks (paper, section 7), and ONNX files.

The network is traced by torch.fx and rebuilt on planes (N, S K, *X): convolutions with the expanded banks, norms and pools of
torch.nn, sums over the group as functions. What comes out needs nothing of this package to load or run.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gcnn import lattice
from gcnn.files import write_file
from gcnn.nn import GBatchNorm
from gcnn.nn.each import ChannelDropout
from gcnn.nn.module import GModule
from gcnn.planes import Planar
from gcnn.pointwise import TRACING, InPlaceProxy

__all__ = ["planar", "to_onnx"]


def planar(model: nn.Module, fold: bool = False, example: Tensor | tuple[Tensor, ...] | None = None) -> fx.GraphModule:
    """The same network, in eval mode, as plain nn.Conv, nn.BatchNorm, nn.Linear ...: same inputs, same outputs.

    On a CPU the outputs have the same bits wherever the original takes the planar algorithm; elsewhere they agree within
    rounding. Takes networks that torch.fx can trace, on every lattice. The result is a copy; it does not follow further
    training. With `fold`, norms that follow a convolution directly become part of it, and numbers are rounded anew. An
    `example` input is needed where a norm may get maps or functions on the group, and only a run tells which: an error asks for
    it. Small batches gain most; wide layers for which the original takes the Fourier algorithm (`gcnn.functional.correlate`) are
    slower as plain convolutions.

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
    if isinstance(model, GModule | GBatchNorm):  # one layer
        model = nn.Sequential(model).train(model.training)
    with _in_eval(model):
        graph, ranks = _traced(model), {}
        if example is not None:
            ranks = _ranks(fx.GraphModule(model, graph), example if isinstance(example, tuple) else (example,))
    with torch.no_grad():
        made = Planar(model, graph, ranks).build()
        return _folded(made) if fold else made


def to_onnx(
    model: nn.Module,
    path: str | Path,
    example: Tensor,
    tolerance: float = 1e-4,
    overwrite: bool = False,
    about: dict[str, str] | None = None,
) -> float:
    """Writes the network as an ONNX file of plain convolutions, for batches of any size, and returns how far the file is off.

    The file takes "input", with N of them at a time, and answers with "output"; `about` is written into its metadata.
    The error is that of onnxruntime on `example`, relative to the largest output; above `tolerance` it is an error, and no file
    is written. Needs pip install "gcnn[export]".
    """
    try:
        import onnxruntime
    except ImportError as missing:
        raise ImportError('to_onnx needs onnx, onnxscript and onnxruntime: pip install "gcnn[export]"') from missing
    if not isinstance(example, Tensor):
        raise TypeError(f"to_onnx: expected an example input, a tensor, got {type(example).__name__}")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"to_onnx: there is no folder {path.parent}; make it first")
    if path.exists() and not overwrite:
        raise FileExistsError(f"to_onnx: {path} is there already; choose another name, or overwrite=True")
    if {p.dtype for p in model.parameters()} | {example.dtype} != {torch.float32}:
        raise ValueError("to_onnx: expected a float32 network and example, which every runtime has; use .float()")
    there = example.detach().to(next(model.parameters(), example).device)
    plain, example = planar(model, fold=True, example=there).cpu(), example.detach().cpu()
    with torch.no_grad(), _in_eval(model):
        expected = model(there)
    if not isinstance(expected, Tensor):
        raise ValueError(f"to_onnx: expected a network that returns one tensor, got {type(expected).__name__}")
    for node in plain.graph.nodes:
        if node.kwargs.get("mode") == "nearest-exact":  # onnxruntime's own rounds as it should, and is faster than a gather
            node.kwargs = {**node.kwargs, "mode": "nearest"}
    plain.recompile()
    two = example if len(example) > 1 else example.repeat(2, *(1,) * (example.ndim - 1))  # one alone would be fixed
    file = _with_batch_called("N", _onnx(plain, two))
    for key, value in (about or {}).items():
        file.metadata_props.add(key=key, value=value)
    content = file.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: example.numpy()})[0])
    error = float((found - expected.cpu()).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not error <= tolerance:
        raise ValueError(f"to_onnx: the file's answers are off by {error:.1e}, more than {tolerance:.1e}; nothing was written")
    write_file(path, content)
    return error


def _onnx(plain: nn.Module, example: Tensor) -> Any:
    """The ONNX model of a network of torch's own modules."""
    names: Any = {"input_names": ["input"], "output_names": ["output"]}
    version, export = cast(Any, torch.__version__), cast(Any, torch.onnx.export)
    with warnings.catch_warnings(), _quiet("torch.onnx"):  # it tells us that torchvision is not there
        warnings.simplefilter("ignore")
        if version < (2, 7):  # whose exporter by torch.export stumbles over norms
            import onnx

            file, axes = io.BytesIO(), {"input": {0: "N"}, "output": {0: "N"}}
            export(plain, (example,), file, opset_version=18, dynamic_axes=axes, **names)
            return onnx.load_from_string(file.getvalue())
        batch: Any = ({0: torch.export.Dim("N")},)
        program = torch.export.export(plain, (example,), dynamic_shapes=batch)
        written = export(program, dynamo=True, verbose=False, external_data=False, **names)
    assert written is not None
    return written.model_proto


def _with_batch_called(name: str, file: Any) -> Any:
    """The ONNX model with another name for its first axis, which torch calls s77 or so."""
    theirs = file.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*file.graph.input, *file.graph.output, *file.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == theirs:
                size.dim_param = name
    return file


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    """With the network in eval mode; afterwards each part is in its own again."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the warnings of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(autowrap_functions=(lattice.to_hexagonal, lattice.to_square))
        self._autowrap_search.append(lattice)  # where users call them as gcnn.lattice.to_hexagonal

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, GModule | GBatchNorm | ChannelDropout)
        return ours or super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module) -> fx.Graph:
    try:
        with TRACING:
            return _Tracer().trace(model)
    except (torch.fx.proxy.TraceError, TypeError, RuntimeError) as error:
        raise ValueError(f"planar: torch.fx cannot trace {type(model).__name__} ({error}); take its parts one by one") from error


def _ranks(model: fx.GraphModule, example: tuple[Tensor, ...]) -> dict[str, int]:
    """How many axes each value of the network has on the example."""
    run = _Ranks(model)
    try:
        with torch.no_grad():
            run.run(*example)
    except (TypeError, RuntimeError, ValueError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in example)
        raise ValueError(f"planar: the network fails on the example {shapes}: {error}") from error
    return run.found


class _Ranks(fx.Interpreter):
    """Runs a network and notes how many axes each value has."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.found: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        y = super().run_node(n)
        if isinstance(y, Tensor):
            self.found[n.name] = y.ndim
        return y
