"""Networks of this package for serving: `planar(model)` as plain modules with folded banks (paper, section 7), and ONNX files.

The network is traced by torch.fx and rebuilt on planes (N, S K, *X): convolutions with the expanded banks, norms and pools of
torch.nn, sums over the group as functions. What comes out needs nothing of this package to load or run.
"""

from __future__ import annotations

import copy
import logging
import operator
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gcnn.layout import spread
from gcnn.nn import (
    CosetPool,
    GAdaptiveAvgPool,
    GAvgPool,
    GBatchNorm,
    GConv,
    GConvTranspose,
    GLayerNorm,
    GLinear,
    GMaxPool,
    GSubsample,
    GUpsample,
    LiftConv,
    Restrict,
)
from gcnn.nn.each import ChannelDropout, EachElement, UpsampleTo
from gcnn.nn.module import GModule

__all__ = ["planar", "to_onnx"]

POINTWISE_MODULES = (
    *(
        nn.Identity,
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Hardswish,
        nn.Hardtanh,
    ),
    *(nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardsigmoid, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
POINTWISE_FUNCTIONS = {
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.hardswish, F.softplus, F.dropout, F.dropout2d, F.dropout3d),
    *(F.relu6, F.hardsigmoid, F.hardtanh, F.sigmoid, F.tanh, F.softsign, F.selu, F.celu, F.logsigmoid),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.square, torch.sqrt),
    *(torch.abs, torch.exp, torch.log, torch.clamp, torch.neg, torch.sin, torch.cos, torch.maximum, torch.minimum),
    *(
        operator.truediv,
        operator.pow,
        operator.itruediv,
        operator.add,
        operator.sub,
        operator.mul,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.neg,
    ),
}
POINTWISE_METHODS = {
    "relu",
    "relu_",
    "sigmoid",
    "tanh",
    "add",
    "add_",
    "sub",
    "mul",
    "mul_",
    "contiguous",
    "clone",
    "div",
    "pow",
    "square",
    "sqrt",
}
POINTWISE_METHODS |= {"abs", "exp", "log", "clamp", "clamp_", "neg", "float", "double", "half", "bfloat16", "detach", "type_as"}


def planar(model: nn.Module, fold: bool = False) -> fx.GraphModule:
    """The same network, in eval mode, as plain nn.Conv, nn.BatchNorm, nn.Linear ...: same inputs, same outputs within rounding.

    Takes networks that torch.fx can trace, on box lattices. The result is a copy; it does not follow further training. With
    `fold`, norms that follow a convolution directly become part of it.

    >>> from gcnn.models import build
    >>> net = build("p4cnn").eval()
    >>> fast, x = planar(net), torch.rand(2, 1, 28, 28)
    >>> torch.allclose(net(x), fast(x), atol=1e-5)
    True
    >>> sorted({type(m).__name__ for m in fast.modules() if not list(m.children())})
    ['BatchNorm2d', 'Conv2d', 'MaxPool2d', 'ReLU']
    """
    if isinstance(model, GModule | GBatchNorm):  # one layer
        model = nn.Sequential(model).train(model.training)
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
        graph = _Tracer().trace(model)
    except (torch.fx.proxy.TraceError, TypeError, RuntimeError) as error:
        raise ValueError(f"planar: torch.fx cannot trace {type(model).__name__} ({error}); take its parts one by one") from error
    finally:
        for m, mode in modes.items():
            m.training = mode
    with torch.no_grad():
        made = _Planar(model, graph).build()
        return _folded(made) if fold else made


def to_onnx(model: nn.Module, path: str | Path, example: Tensor, tolerance: float = 1e-4, overwrite: bool = False) -> float:
    """Writes the network as an ONNX file of plain convolutions, for batches of any size, and returns how far the file is off.

    The error is that of onnxruntime on `example`, relative to the largest output; above `tolerance` it is an error, and no file
    is written. Needs pip install "gcnn[export]".
    """
    try:
        import onnxruntime
    except ImportError as missing:
        raise ImportError('to_onnx needs onnx, onnxscript and onnxruntime: pip install "gcnn[export]"') from missing
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"to_onnx: there is no folder {path.parent}; make it first")
    if path.exists() and not overwrite:
        raise FileExistsError(f"to_onnx: {path} is there already; choose another name, or overwrite=True")
    if {p.dtype for p in model.parameters()} | {example.dtype} != {torch.float32}:
        raise ValueError("to_onnx: expected a float32 network and example, which every runtime has; use .float()")
    plain, example = planar(model, fold=True).cpu(), example.detach().cpu()
    expected = plain(example)
    if not isinstance(expected, Tensor):
        raise ValueError(f"to_onnx: expected a network that returns one tensor, got {type(expected).__name__}")
    two = example if len(example) > 1 else example.repeat(2, *(1,) * (example.ndim - 1))  # one alone would be fixed
    batch: Any = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(plain, (two,), dynamic_shapes=tuple(batch.values()))
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        warnings.simplefilter("ignore")
        part = Path(folder) / path.name
        with _quiet("torch.onnx"):  # it tells us that torchvision is not there
            written = torch.onnx.export(program, dynamo=True, verbose=False, external_data=False)
        assert written is not None
        written.save(str(part), external_data=False)
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: example.numpy()})[0])
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not error <= tolerance:
            raise ValueError(
                f"to_onnx: the file's answers are off by {error:.1e}, more than {tolerance:.1e}; nothing was written"
            )
        part.replace(path)
    return error


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
        if isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d) and not shared:
            place, _, last = str(before.target).rpartition(".")
            setattr(model.get_submodule(place), last, fuse_conv_bn_eval(conv, norm))
            node.replace_all_uses_with(before)
            model.graph.erase_node(node)
    model.delete_all_unused_submodules()
    model.recompile()
    return model


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, GModule | GBatchNorm | ChannelDropout | EachElement) or super().is_leaf_module(
            m, module_qualified_name
        )


class _Value(NamedTuple):
    """A node of the new graph: a tensor as it was, or the planes (N, S K, *X) of a map with so many elements and channels."""

    node: Any
    elements: int | None = None
    channels: int | None = None


class _Planar:
    """Rebuilds a traced graph node by node; maps stay planes until something else than a pointwise function asks for them."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model, self.old, self.graph = model, graph, fx.Graph()
        self.root = nn.Module()
        self.values: dict[fx.Node, _Value] = {}

    def build(self) -> fx.GraphModule:
        for node in self.old.nodes:
            handle: Callable[[fx.Node], Any] = getattr(self, f"_{node.op}")
            found = handle(node)
            self.values[node] = found if isinstance(found, _Value) else _Value(found)
        self.graph.lint()
        made = fx.GraphModule(self.root, self.graph).eval()
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for p in made.parameters():
            if p.device.type == "cpu" and p.ndim in formats:
                p.data = p.data.contiguous(memory_format=formats[p.ndim])
        return made

    # --- nodes by kind ---------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        return self.graph.node_copy(node)

    def _get_attr(self, node: fx.Node) -> Any:
        value: Any = self.model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return self._constant(value)

    def _output(self, node: fx.Node) -> Any:
        return self.graph.output(fx.map_arg(node.args[0], self._map))

    def _call_function(self, node: fx.Node) -> Any:
        if node.target is torch.cat:
            tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            parts = [self._value(t) for t in tensors]
            elements = parts[0].elements
            if dim == 1 and elements is not None and all(p.elements == elements for p in parts):  # the K of each element
                by_element = [self._call("unflatten", p.node, 1, (elements, -1)) for p in parts]
                joined = self._call("flatten", self.graph.call_function(torch.cat, (by_element, 2)), 1, 2)
                return _Value(joined, elements, sum(p.channels or 0 for p in parts))
        return self._copied(node, node.target in POINTWISE_FUNCTIONS)

    def _call_method(self, node: fx.Node) -> Any:
        return self._copied(node, node.target in POINTWISE_METHODS)

    def _copied(self, node: fx.Node, pointwise: bool) -> Any:
        """The node again: on planes if it works number by number and all its inputs are maps of one kind, else on maps."""
        kinds = {self._value(n)[1:] for n in node.all_input_nodes}
        if pointwise and len(kinds) == 1 and (kind := kinds.pop())[0] is not None:
            return _Value(self.graph.node_copy(node, lambda n: self._value(n).node), *kind)
        return self.graph.node_copy(node, self._map)

    def _call_module(self, node: fx.Node) -> Any:
        name = str(node.target)
        module = self.model.get_submodule(name)
        x = self._value(node.args[0] if node.args else next(iter(node.kwargs.values())))
        if isinstance(module, GModule | GBatchNorm):
            group = module.group
            if not group.fills_box:
                raise ValueError(
                    f"planar: {name} ({module}) lives on a hexagonal lattice; torch.export takes such networks as they are"
                )
            if isinstance(module, UpsampleTo):
                return self._upsample_to(module, x, node.args[1])
            for kind, handle in self._layers.items():
                if isinstance(module, kind):
                    return handle(self, name, module, x)
            raise ValueError(f"planar: {name} ({module}) has no planar form yet; keep it outside and export the parts around it")
        if isinstance(module, ChannelDropout):
            return x
        if isinstance(module, EachElement):
            return self._each(name, module, x)
        if isinstance(module, nn.PReLU) and x.elements is not None and module.num_parameters > 1:
            made = nn.PReLU(module.num_parameters * x.elements)
            made.weight.data = module.weight.detach().repeat(x.elements)
            return x._replace(node=self._insert(name, made, x.node))
        if isinstance(module, (*POINTWISE_MODULES, nn.PReLU)) and x.elements is not None:
            return x._replace(node=self._insert(name, copy.deepcopy(module), x.node))
        args, kwargs = fx.map_arg(node.args, self._map), fx.map_arg(node.kwargs, self._map)
        made_node = self._insert(name, copy.deepcopy(module))
        made_node.args, made_node.kwargs = args, kwargs
        return made_node

    # --- layers ----------------------------------------------------------------------------------------------------------------

    def _conv(self, name: str, module: GConv | GConvTranspose, x: _Value) -> _Value:
        group, groups = module.group, module.groups
        planes = x.node if module.on_plane else self._planes(x, module.cosets, groups)
        bank = module._bank()
        if isinstance(module, GConvTranspose):
            kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[group.dim - 1]
            options: dict[str, Any] = {}
        else:
            kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[group.dim - 1]
            options = {"padding_mode": module.padding_mode}
        made = kind(
            module.in_channels * module.cosets,
            module.out_channels * group.order,
            module.kernel_size,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=groups,
            bias=module.bias is not None,
            device="meta",
            **options,
        )
        made.weight = nn.Parameter(bank.detach().clone())
        if module.bias is not None:
            made.bias = nn.Parameter(_plain(spread(module.bias, group.order, groups)))
        y = self._insert(name, made, planes)
        if groups == 1:
            return _Value(y, group.order, module.out_channels)
        maps = self._call("transpose", self._call("unflatten", y, 1, (groups, group.order, -1)), 2, 3)
        return _Value(self._call("flatten", maps, 1, 2))

    def _linear(self, name: str, module: GLinear, x: _Value) -> _Value:
        order = module.group.order
        made = nn.Linear(module.in_channels * order, module.out_channels * order, module.bias is not None, device="meta")
        made.weight = nn.Parameter(module._bank().flatten(1).detach().clone())
        if module.bias is not None:
            made.bias = nn.Parameter(_plain(spread(module.bias, order)))
        flat = self._call("flatten", self._call("transpose", self._map(x), -2, -1), -2)
        y = self._insert(name, made, flat)
        return _Value(self._call("transpose", self._call("unflatten", y, -1, (order, module.out_channels)), -2, -1))

    def _norm(self, name: str, module: GBatchNorm, x: _Value) -> _Value:
        if module.running_mean is None or module.running_var is None:
            raise ValueError(f"planar: {name} ({module}) has no running statistics to fold: set track_running_stats")
        numbers = (module.running_mean, module.running_var, *((module.weight, module.bias) if module.affine else (None, None)))
        if x.elements is None:  # an image, or a map that something else made: of unknown rank, with channels along axis 1
            constants = [None if n is None else self._constant(n) for n in numbers]
            return _Value(self.graph.call_function(F.batch_norm, (x.node, *constants, False, 0.0, module.eps)))
        kind: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[module.group.dim - 1]
        made = kind(module.num_features * x.elements, module.eps, affine=module.affine)
        made.running_mean, made.running_var = (_plain(spread(n, x.elements)) for n in numbers[:2])
        if module.affine:
            made.weight.data, made.bias.data = (_plain(spread(n, x.elements)) for n in numbers[2:])
        return x._replace(node=self._insert(name, made, x.node))

    def _pool(self, name: str, module: GModule, x: _Value) -> _Value:
        at, made = module.group.dim - 1, nn.Module()
        if isinstance(module, GMaxPool):
            kind: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[at]
            made = kind(module.kernel_size, module.stride, module.padding, module.dilation)
        elif isinstance(module, GAvgPool):
            kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[at]
            made = kind(module.kernel_size, module.stride, module.padding, count_include_pad=module.count_include_pad)
        elif isinstance(module, GAdaptiveAvgPool):
            kind = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[at]
            made = kind(module.output_size if at else module.output_size[0])
        elif isinstance(module, GUpsample):
            mode = module.mode if module.mode == "nearest" else ("linear", "bilinear", "trilinear")[at]
            factor: Any = None if module.scale_factor is None else tuple(float(k) for k in module.scale_factor)
            made = nn.Upsample(module.size, factor, mode, module.align_corners)
        if x.elements is not None:
            return x._replace(node=self._insert(name, made, x.node))
        dim = module.group.dim  # an image, or a map that something else made
        flat = self._insert(name, made, self._call("flatten", x.node, 1, -dim - 1))
        return _Value(self._call("unflatten", flat, 1, self._fibre(x.node, dim)))

    def _fibre(self, node: Any, dim: int) -> fx.Node:
        """The sizes of a value between the batch and space."""
        shape = self.graph.call_function(getattr, (node, "shape"))
        return self.graph.call_function(operator.getitem, (shape, slice(1, -dim)))

    def _each(self, name: str, module: EachElement, x: _Value) -> _Value:
        copied = copy.deepcopy(module.module)
        if x.elements is not None:
            images = self._call("flatten", self._call("unflatten", x.node, 1, (x.elements, -1)), 0, 1)  # (N S, K, *X)
            each = self._call("unflatten", self._insert(name, copied, images), 0, (-1, x.elements))
            return x._replace(node=self._call("flatten", each, 1, 2))
        turned = self._call("transpose", x.node, 1, 2)
        elements = self._call("size", turned, 1)
        each = self._call("unflatten", self._insert(name, copied, self._call("flatten", turned, 0, 1)), 0, (-1, elements))
        return _Value(self._call("transpose", each, 1, 2))

    def _upsample_to(self, module: UpsampleTo, x: _Value, size: Any) -> _Value:
        mode = module.mode if module.mode == "nearest" else ("linear", "bilinear", "trilinear")[module.group.dim - 1]
        options = {"size": fx.map_arg(size, self._map), "mode": mode, "align_corners": module.align_corners}
        if x.elements is not None:
            return x._replace(node=self.graph.call_function(F.interpolate, (x.node,), options))
        flat = self.graph.call_function(F.interpolate, (self._call("flatten", x.node, 1, -module.group.dim - 1),), options)
        return _Value(self._call("unflatten", flat, 1, self._fibre(x.node, module.group.dim)))

    def _layer_norm(self, name: str, module: GLayerNorm, x: _Value) -> _Value:
        y = self._map(x)
        fibre = (1, 2) if x.elements is not None else (1,)
        centred = self.graph.call_function(operator.sub, (y, self._call("mean", y, fibre, True)))
        square = self._call("mean", self.graph.call_function(operator.mul, (centred, centred)), fibre, True)
        scale = self._call("rsqrt", self.graph.call_function(operator.add, (square, module.eps)))
        y = self.graph.call_function(operator.mul, (centred, scale))
        shape = (-1, *(1,) * (module.group.dim + len(fibre) - 1))
        for numbers, how in ((module.weight, operator.mul), (module.bias, operator.add)):
            if numbers is not None:
                y = self.graph.call_function(how, (y, self._constant(numbers.reshape(shape))))
        if x.elements is None:
            return _Value(y)
        return _Value(self._call("flatten", self._call("transpose", y, 1, 2), 1, 2), x.elements, x.channels)

    def _coset_pool(self, name: str, module: CosetPool, x: _Value) -> _Value:
        reduce = "amax" if module.reduce == "max" else "mean"
        if x.elements is None:  # (N, K, S), or a map that something else made
            x = _Value(self._planes(x, module.group.order), module.group.order, x.channels)
        by_element = self._call("unflatten", x.node, 1, (x.elements, -1))  # (N, S, K, *X)
        if module._members is None or len(module._members) == 1:
            return _Value(self._call(reduce, by_element, 1))
        members = self._constant(torch.tensor(module._members).flatten())
        sorted_ = self._call("index_select", by_element, 1, members)
        cosets = self._call("unflatten", sorted_, 1, (len(module._members), -1))  # (N, S/|H|, |H|, K, *X)
        return _Value(self._call("flatten", self._call(reduce, cosets, 2), 1, 2), len(module._members), x.channels)

    def _restrict(self, name: str, module: Restrict, x: _Value) -> _Value:
        order, members = module.group.order, module._members
        by_element = self._call("unflatten", self._planes(x, order), 1, (order, -1))  # (N, S, K, *X)
        sorted_ = self._call("index_select", by_element, 1, self._constant(torch.tensor(members).flatten()))
        cosets = self._call("unflatten", sorted_, 1, (len(members), -1))  # (N, S/|H|, |H|, K, *X)
        planes = self._call("flatten", self._call("movedim", cosets, 1, 3), 1, 3)  # (N, |H| K S/|H|, *X)
        return _Value(planes, len(members[0]), (x.channels or 0) * len(members))

    def _subsample(self, name: str, module: GSubsample, x: _Value) -> _Value:
        if module.subgroup is not None:
            by_element = self._call("unflatten", self._planes(x, module.group.order), 1, (module.group.order, -1))
            kept = self._call("index_select", by_element, 1, self._constant(torch.tensor(module.subgroup)))
            x = _Value(self._call("flatten", kept, 1, 2), len(module.subgroup), x.channels)
        steps: Any = (..., *(slice(None, None, s) for s in module.stride))
        return x._replace(node=self.graph.call_function(operator.getitem, (x.node, steps)))

    _layers: ClassVar[dict[type, Callable[..., _Value]]] = {
        GLinear: _linear,
        LiftConv: _conv,
        GConv: _conv,
        GConvTranspose: _conv,
        GBatchNorm: _norm,
        GLayerNorm: _layer_norm,
        **dict.fromkeys((GMaxPool, GAvgPool, GAdaptiveAvgPool, GUpsample), _pool),
        CosetPool: _coset_pool,
        Restrict: _restrict,
        GSubsample: _subsample,
    }

    # --- the new graph ---------------------------------------------------------------------------------------------------------

    def _value(self, node: Any) -> _Value:
        return self.values[node] if isinstance(node, fx.Node) else _Value(node)

    def _map(self, value: Any) -> Any:
        """As a map (N, K, S, *X): a view."""
        value = value if isinstance(value, _Value) else self._value(value)
        if value.elements is None:
            return value.node
        return self._call("transpose", self._call("unflatten", value.node, 1, (value.elements, -1)), 1, 2)

    def _planes(self, value: _Value, elements: int, groups: int = 1) -> Any:
        """As planes (N, S K, *X), for a grouped convolution group by group."""
        if value.elements == elements and groups == 1:
            return value.node
        x = self._map(value)
        if groups == 1:
            return self._call("flatten", self._call("transpose", x, 1, 2), 1, 2)
        return self._call("flatten", self._call("transpose", self._call("unflatten", x, 1, (groups, -1)), 2, 3), 1, 3)

    def _call(self, method: str, *args: Any) -> fx.Node:
        return self.graph.call_method(method, args)

    def _constant(self, value: Tensor) -> fx.Node:
        name = f"constant_{sum(1 for _ in self.root.buffers(recurse=False))}"
        self.root.register_buffer(name, value.detach().clone())
        return self.graph.get_attr(name)

    def _insert(self, name: str, module: nn.Module, *inputs: Any) -> fx.Node:
        """A call of `module` under its old name, or one like it where that is taken: a layer may serve several kinds of maps."""
        place = self.root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        while hasattr(place, last):
            last += "_again"
        place.add_module(last, module)
        return self.graph.call_module(".".join([*path, last]), inputs)


def _plain(numbers: Tensor | None) -> Tensor:
    assert numbers is not None
    return numbers.detach().clone()
