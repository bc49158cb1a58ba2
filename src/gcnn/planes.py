"""The planar form of a traced network, node by node, for `gcnn.export.planar`: a map (N, K, S, *X) is planes (N, S K, *X).

Convolutions get the expanded banks (paper, section 7), norms and pools become those of torch.nn, sums over the group functions.
On hexagonal lattices masks are plain operations, made once a size. What comes out needs nothing of this package.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from gcnn import lattice
from gcnn.groups import Group, p6m
from gcnn.layout import both_sides, spread
from gcnn.newgraph import NewGraph, Value, alike, detached, same_domain
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
    GPool,
    GSubsample,
    GUpsample,
    Restrict,
)
from gcnn.nn.each import (
    FILLS,
    AtOnePlace,
    ChannelDropout,
    EachElement,
    PadBoth,
    PooledLinear,
    ReduceSpace,
    UpsampleTo,
    VarianceInside,
)
from gcnn.nn.module import GModule
from gcnn.pooling import torch_mode
from gcnn.tracing import (
    IN_PLACE,
    KEEP_ZERO,
    KEEP_ZERO_MODULES,
    KEEP_ZERO_OF_TWO,
    POINTWISE_FUNCTIONS,
    POINTWISE_METHODS,
    POINTWISE_MODULES,
    check_names,
    module_of,
    reached,
)


def is_layer(module: nn.Module) -> bool:
    """Whether this is a layer of ours, which is not traced."""
    return isinstance(module, GModule | GBatchNorm | ChannelDropout | PooledLinear)


# zero where one of two is, however large the other
PRODUCTS: set[Any] = {torch.mul, operator.mul, operator.imul, "mul", "mul_"}


class Planar(NewGraph):
    """Rebuilds a traced graph node by node; maps stay planes until something else than a pointwise function asks for them."""

    def __init__(self, model: nn.Module, graph: fx.Graph, ranks: dict[str, int], kept: dict[str, nn.Module]) -> None:
        super().__init__(next(model.parameters(), torch.empty(0)))
        self.model, self.old, self.ranks = model, graph, ranks
        self.kept = kept  # modules that were not traced, with plain layers

    def build(self) -> fx.GraphModule:
        """The new network."""
        check_names(self.model, self.old, "planar")
        for node in self.old.nodes:
            handle: Callable[[fx.Node], Any] = getattr(self, f"_{node.op}")
            found = handle(node)
            value = found if isinstance(found, Value) else Value(found)
            self.values[node] = value._replace(rank=self.ranks.get(node.name, value.rank))
        self.graph.lint()
        for node in self.graph.nodes:
            node.type = None  # annotations that are strings would stop pickle and torch.jit.script
        made = fx.GraphModule(self.root, self.graph).eval()
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for p in made.parameters():
            if p.device.type == "cpu" and p.ndim in formats:  # as our layers have them; `contiguous` would leave a single channel
                p.data = torch.empty_like(p.data, memory_format=formats[p.ndim]).copy_(p.data)
        return made

    # --- nodes by kind ---------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Value:
        return Value(self._proxy(self.graph.node_copy(node)), rank=self._rank_of_image(node))

    def _rank_of_image(self, node: fx.Node) -> int | None:
        """How many axes an input has that a lifting layer takes, after norms and functions of its numbers alone."""
        same = (*POINTWISE_MODULES, GBatchNorm, EachElement)

        def kept(before: fx.Node) -> list[fx.Node]:
            modules = {user: module_of(self.model, user) for user in before.users if len(user.all_input_nodes) == 1}
            functions = POINTWISE_FUNCTIONS | POINTWISE_METHODS
            return [u for u, m in modules.items() if (u.target in functions if m is None else isinstance(m, same))]

        after = (module_of(self.model, user) for before in reached([node], kept) for user in before.users)
        return next((m.group.dim + 2 for m in after if isinstance(m, GConv) and m.on_plane), None)

    def _get_attr(self, node: fx.Node) -> Any:
        return self._constant(operator.attrgetter(str(node.target))(self.model))

    def _output(self, node: fx.Node) -> Any:
        return self._proxy(self.graph.output(self._mapped(node.args[0])))

    def _call_function(self, node: fx.Node) -> Any:
        if node.target is lattice.to_hexagonal:
            args: Any = dict(zip(("image", "size", "spacing"), node.args, strict=False)) | dict(node.kwargs)
            return self._to_hexagonal(**args)
        if node.target is lattice.to_square:
            args = dict(zip(("x", "size", "spacing"), node.args, strict=False)) | dict(node.kwargs)
            return self._to_square(**args)
        if node.target is torch.cat:
            tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
            # `y.chunk(2, 1)` is one node, whose parts are maps as the old network has them
            parts = [Value(tensors)] if isinstance(tensors, fx.Node) else [self._value(t) for t in tensors]
            elements = parts[0].elements
            if dim == 1 and elements is not None and all(p.elements == elements for p in parts):  # the K of each element
                first, *others = parts if alike(parts) else [self._clean(p) for p in parts]
                by_element = [p.x.unflatten(1, (elements, -1)) for p in (first, *others)]
                known = [p.channels for p in parts if p.channels is not None]
                return first.into(
                    torch.cat(by_element, 2).flatten(1, 2),
                    channels=sum(known) if len(known) == len(parts) else None,
                    lattice=first.lattice if alike(parts) else None,
                    clean=all(p.clean for p in parts),
                )
        return self._copied(node, node.target in POINTWISE_FUNCTIONS)

    def _call_method(self, node: fx.Node) -> Any:
        return self._copied(node, node.target in POINTWISE_METHODS)

    def _copied(self, node: fx.Node, pointwise: bool) -> Value:
        """The node again: on planes if it works number by number and all its inputs are maps of one kind, else on maps."""
        inputs = [self._value(n) for n in node.all_input_nodes]
        kinds = {(v.elements, v.channels) for v in inputs}
        alone = len(inputs) == 1 or (bool(inputs) and inputs[0].channels is not None)
        if not pointwise or len(kinds) != 1 or not alone or inputs[0].elements is None:
            made = self.graph.node_copy(node, lambda n: self._settled(n).node)
            sizes = not any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values()))
            if (node.op, node.target) == ("call_method", "view") and sizes and len(node.args) > 1:
                made.target = "reshape"  # the axes of a map do not lie in memory as they did
            return Value(self._proxy(made), rank=_rank_after(node, inputs, pointwise))
        tensors = all(isinstance(a, fx.Node) for a in node.args[:2])
        one_size = len({v.like or v.x.node for v in inputs}) == 1
        keeps_two = node.target in KEEP_ZERO_OF_TWO and tensors and (one_size or node.target in PRODUCTS)
        keeps = alike(inputs) and (node.target in KEEP_ZERO or keeps_two)
        if not keeps:
            inputs = [self._clean(v) for v in inputs]
        nodes = {n: v.x.node for n, v in zip(node.all_input_nodes, inputs, strict=True)}
        y = self._proxy(self.graph.node_copy(node, lambda n: nodes[n]))
        lattice = inputs[0].lattice if keeps else None
        found = inputs[0].into(y, one_size, lattice=lattice, clean=keeps and all(v.clean for v in inputs))
        if node.target in IN_PLACE or node.kwargs.get("inplace"):  # what is cleared is a copy
            self.values[node.all_input_nodes[0]] = found
        return found

    def _call_module(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name in self.kept:
            return self._kept(name, node)
        module = self.model.get_submodule(name)
        v = self._value(node.args[0] if node.args else next(iter(node.kwargs.values())))
        if isinstance(module, UpsampleTo):
            return self._upsample_to(name, module, v, node.args[1])
        if isinstance(module, PadBoth):
            both = module.pad if len(node.args) < 2 else fx.map_arg(node.args[1], self._settled)
            pad = functools.partial(self._function, F.pad, pad=both, mode=module.mode, value=module.value)
            return self._on_planes(module.group, self._clean(v), pad)
        for kind, handle in self._layers.items():
            if isinstance(module, kind):
                if type(module).forward is not kind.forward:
                    raise ValueError(
                        f"planar: {name} ({module}) has a forward of its own; write it as a module that calls a layer"
                    )
                return handle(self, name, module, v)
        if isinstance(module, GModule):
            raise ValueError(f"planar: {name} ({module}) has no planar form; keep it outside and export the parts around it")
        if v.elements is not None and isinstance(module, (*POINTWISE_MODULES, nn.PReLU)):
            made = copy.deepcopy(module)
            if isinstance(made, nn.PReLU) and made.num_parameters > 1:
                made.num_parameters *= v.elements
                made.weight = nn.Parameter(made.weight.detach().repeat(v.elements))
            if isinstance(module, (*KEEP_ZERO_MODULES, nn.PReLU)):
                return v.into(self._insert(name, made, v.x))
            found = v.into(self._insert(name, made, self._clean(v).x), lattice=None, clean=False)
            if getattr(module, "inplace", False):  # what is cleared is a copy
                self.values[node.all_input_nodes[0]] = found
            return found
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)  # written before the node that takes them
        y = self._insert(name, copy.deepcopy(module))
        y.node.args, y.node.kwargs = args, kwargs
        return y

    def _kept(self, name: str, node: fx.Node) -> Any:
        """A call of a module that was not traced: one for all calls, since it may remember."""
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        held = next((str(key) for key, m in self.root.named_modules() if m is self.kept[name]), None)
        y = self._insert(name, self.kept[name]) if held is None else self._proxy(self.graph.call_module(held))
        y.node.args, y.node.kwargs = args, kwargs
        return y

    # --- layers ----------------------------------------------------------------------------------------------------------------

    def _conv(self, name: str, module: GConv | GConvTranspose, v: Value) -> Value:
        group, groups, v = module.group, module.groups, self._inside(v, module.group)
        planes = v.x if module.on_plane else self._planes(v, module.cosets, groups)
        kinds: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        options: dict[str, Any] = {}
        if isinstance(module, GConvTranspose):
            kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        else:
            options = {"padding_mode": module.padding_mode}
        made = kinds[group.dim - 1](
            module.in_channels * module.cosets,
            module.out_channels * group.order,
            module.kernel_size,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.in_channels * module.cosets if module.depthwise else groups,
            bias=module.bias is not None,
            device="meta",
            **options,
        )
        made.weight = nn.Parameter(detached(module._bank()))
        if module.bias is not None:
            made.bias = nn.Parameter(detached(spread(module.bias, group.order, groups)))
        y = self._insert(name, made, planes)
        kind: dict[str, Any] = {"rank": group.dim + 3, "lattice": None if group.fills_box else group, "clean": False}
        if groups == 1:
            return v.into(y, _keeps_size(module), elements=group.order, channels=module.out_channels, **kind)
        maps = y.unflatten(1, (groups, group.order, -1)).transpose(2, 3).flatten(1, 2)
        return v.into(maps, _keeps_size(module), elements=None, channels=None, **kind)

    def _linear(self, name: str, module: GLinear, v: Value) -> Value:
        order = module.group.order
        made = nn.Linear(module.in_channels * order, module.out_channels * order, module.bias is not None, device="meta")
        made.weight = nn.Parameter(detached(module._bank().flatten(1)))
        if module.bias is not None:
            made.bias = nn.Parameter(detached(spread(module.bias, order)))
        y = self._insert(name, made, self._map(v).transpose(-2, -1).flatten(-2))
        return Value(y.unflatten(-1, (order, module.out_channels)).transpose(-2, -1), rank=v.rank)

    def _head(self, name: str, module: Any, v: Value) -> Value:
        x, k, order = self._map(v), module.channels, module.order
        told = f"{name}: expected functions on the group, (N, {k}, {order}) or flat"
        self._function(torch._assert, self._function(operator.eq, (x.size(1) - k) * (x.size(1) - k * order), 0), told)
        functions = x.flatten(1).unflatten(1, (k, order))
        pooled = functions.mean(2) if module.pool == "mean" else functions.amax(2)
        made = nn.Linear(k, module.out_features, module.bias is not None, device="meta")
        for key, numbers in module.named_parameters():
            setattr(made, key, nn.Parameter(detached(numbers)))
        return Value(self._insert(name, made, pooled), rank=2)

    def _norm(self, name: str, module: GBatchNorm, v: Value) -> Value:
        if module.running_mean is None or module.running_var is None:
            raise ValueError(f"planar: {name} ({module}) has no running statistics to fold: set track_running_stats")
        v = self._masked(name, module, v)
        numbers = (module.running_mean, module.running_var, module.weight, module.bias)
        if v.elements is None:  # an image, or a map that something else made, with channels along axis 1
            constants: list[Any] = [None if n is None else self._constant(n) for n in numbers]
            return v.into(self._function(F.batch_norm, v.x, *constants, eps=module.eps))
        kind: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[module.group.dim - 1]
        like = module.running_mean
        made = kind(module.num_features * v.elements, module.eps, affine=module.affine, device=like.device, dtype=like.dtype)
        made.running_mean, made.running_var = (detached(spread(n, v.elements)) for n in numbers[:2])
        for key, n in (("weight", module.weight), ("bias", module.bias)):
            if n is not None:  # a bias that is not there stays zero
                setattr(made, key, nn.Parameter(detached(spread(n, v.elements))))
        return v.into(self._insert(name, made, v.x))

    def _layer_norm(self, name: str, module: GLayerNorm, v: Value) -> Value:
        v = self._masked(name, module, v)
        rank = self._rank(name, module, v)
        y = v.x.unflatten(1, (v.elements, -1)).transpose(1, 2) if v.elements is not None else v.x
        fibre, given, y = (1,) if rank == module.group.dim + 2 else (1, 2), y, self._fine(y)
        centred = y - y.mean(fibre, True)
        y = centred * ((centred * centred).mean(fibre, True) + module.eps).rsqrt()
        shape = (-1, *(1,) * (rank - 2))
        if module.weight is not None:
            y = y * self._constant(module.weight.reshape(shape))
        if module.bias is not None:
            y = y + self._constant(module.bias.reshape(shape))
        y = y.type_as(given)
        return v.into(y if v.elements is None else y.transpose(1, 2).flatten(1, 2))

    def _masked(self, name: str, module: GModule | GBatchNorm, v: Value) -> Value:
        """The input of a norm that, where it lies on a hexagonal lattice, puts zeros outside its domain."""
        group = module.group
        v = v if v.lattice is not None and same_domain(v.lattice, group) else self._clean(v)
        if group.fills_box:
            return v._replace(lattice=None, clean=False)
        return v._replace(lattice=group if self._rank(name, module, v) > 3 else None, clean=False)

    def _rank(self, name: str, module: nn.Module, v: Value) -> int:
        """How many axes a layer gets that does something else for each."""
        if v.rank is None:
            raise ValueError(
                f"planar: {name} ({module}) takes maps, images and functions on the group, and which one it gets is not known "
                "before the network runs; give planar an example= input"
            )
        if v.x.node.op == "placeholder":  # an example knows one kind alone
            told = f"{module}: expected an input of {v.rank} axes, as the example of this plain network had"
            self._function(torch._assert, self._function(operator.eq, v.x.dim(), v.rank), told)
        return v.rank

    def _pool(self, name: str, module: GMaxPool | GAvgPool, v: Value) -> Value:
        group = module.group
        if not group.fills_box:
            return self._hexagonal_pool(module, v)
        if isinstance(module, GMaxPool):
            kind: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[group.dim - 1]
            made = kind(module.kernel_size, module.stride, module.padding, module.dilation)
        else:
            kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[group.dim - 1]
            made = kind(module.kernel_size, module.stride, module.padding, count_include_pad=module.count_include_pad)
        return self._on_planes(group, self._clean(v), lambda x: self._insert(name, made, x), _keeps_size(module))

    def _hexagonal_pool(self, module: GMaxPool | GAvgPool, v: Value) -> Value:
        """Over a window that is a hexagon: the shifted copies of a map that it sees."""
        group, taps = module.group, module._taps or []
        how, fill = (torch.maximum, -torch.inf) if isinstance(module, GMaxPool) else (operator.add, 0.0)
        sizes = list(zip(module.kernel_size, module.stride, module.dilation, strict=True))

        def windows(x: Any) -> Any:
            x = F.pad(x, both_sides(module.padding), value=fill) if any(module.padding) else x
            cuts: list[Any] = [
                (..., *(slice(d * u, d * (u - k + 1) or None, s) for u, (k, s, d) in zip(tap, sizes, strict=True)))
                for tap in taps
            ]
            return functools.reduce(how, [x[cut] for cut in cuts])

        x = self._fill(v, group, fill)
        y = windows(self._fine(x) if isinstance(module, GAvgPool) else x)
        if isinstance(module, GAvgPool):
            y = y / len(taps)
            if not module.count_include_pad:
                ones = torch.where(self._domain(group, v), self._fine(torch.ones_like(v.x[:1, :1])), 0.0)
                y = y / (windows(ones) / len(taps)).clamp(min=1 / len(taps))
            y = y.type_as(x)
        return v.into(y, _keeps_size(module), lattice=group, clean=False)

    def _adaptive(self, name: str, module: GAdaptiveAvgPool, v: Value) -> Value:
        group, size = module.group, module.output_size
        kind: Any = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[group.dim - 1]
        made = kind(size if group.dim > 1 else size[0])
        v = self._inside(v, group)
        y = self._on_planes(group, v, lambda x: self._insert(name, made, x))
        if group.fills_box:
            return y
        return y._replace(x=y.x / self._domain(group, v).type_as(v.x).mean())  # the mean of the cells inside

    def _upsample(self, name: str, module: GUpsample, v: Value) -> Value:
        group, v = module.group, self._inside(v, module.group)
        if not group.fills_box:
            spread_out: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[group.dim - 1]
            tent = self._constant(torch.tensor(module._tent, dtype=self.like.dtype)[None, None])
            steps: Any = module.scale_factor
            single = v.x.flatten(0, -group.dim - 1).unsqueeze(1)  # (N S K, 1, *X)
            y = spread_out(single, tent, stride=steps, padding=tuple(k - 1 for k in steps)).squeeze(1)
            return v.into(y.unflatten(0, v.x.shape[: -group.dim]), False, lattice=group, clean=False)
        factor: Any = None if module.scale_factor is None else tuple(float(k) for k in module.scale_factor)
        made = nn.Upsample(module.size, factor, _mode(module), module.align_corners)
        return self._on_planes(group, v, lambda x: self._insert(name, made, x))

    def _upsample_to(self, name: str, module: UpsampleTo, v: Value, size: Any) -> Value:
        if not module.group.fills_box:
            raise ValueError(f"planar: {name} ({module}): a hexagonal lattice is enlarged by a scale_factor, not to a size")
        mode = "nearest-exact" if module.mode == "nearest" else _mode(module)  # by which factor, only a run tells
        options = {"size": self._mapped(size), "mode": mode, "align_corners": module.align_corners}

        def enlarge(x: Any) -> Any:
            return self._proxy(self.graph.call_function(F.interpolate, (x.node,), options))

        return self._on_planes(module.group, self._clean(v), enlarge)

    def _on_planes(self, group: Group, v: Value, operation: Callable[[Any], Any], same_size: bool = False) -> Value:
        """An operation of planes, on planes, or on an image or a map that something else made."""
        if v.elements is not None:
            y = operation(v.x)
        else:
            y = operation(v.x.flatten(1, -group.dim - 1)).unflatten(1, v.x.shape[1 : -group.dim])
        return v.into(y, same_size, lattice=None, clean=False)

    def _each(self, name: str, module: EachElement, v: Value) -> Value:
        made = copy.deepcopy(module.module)
        if not module.group.fills_box and self._rank(name, module, v) != 3:
            return self._each_inside(module, v)
        v = self._clean(v)._replace(lattice=None, clean=False)
        if v.elements is not None:
            images = v.x.unflatten(1, (v.elements, -1)).flatten(0, 1)  # (N S, K, *X)
            return v.into(self._insert(name, made, images).unflatten(0, (-1, v.elements)).flatten(1, 2))
        turned = v.x.transpose(1, 2)
        return v.into(self._insert(name, made, turned.flatten(0, 1)).unflatten(0, (-1, turned.size(1))).transpose(1, 2))

    def _each_inside(self, module: EachElement, v: Value) -> Value:
        """The statistics of what lies in the domain of a hexagonal lattice."""
        group, norm = module.group, module.module
        mask, each, filled = self._domain(group, v), norm.num_channels // norm.num_groups, v._replace(x=self._fill(v, group))
        on_plane = v.elements is None and v.rank == group.dim + 2
        x = filled.x.unsqueeze(1) if on_plane else self._by_element(filled, group.order)  # (N, S, K, *X)
        y = self._fine(x).unflatten(2, (norm.num_groups, each))
        over, count = tuple(range(3, 4 + group.dim)), self._cells(group, mask, y) * each
        centred = torch.where(mask, y - y.sum(over, True) / count, 0.0)
        y = (centred * ((centred * centred).sum(over, True) / count + norm.eps).rsqrt()).flatten(2, 3)
        shape = (-1, *(1,) * group.dim)
        y = y if norm.weight is None else y * self._constant(norm.weight.reshape(shape))
        y = y if norm.bias is None else y + self._constant(norm.bias.reshape(shape))
        kind: dict[str, Any] = {} if on_plane else {"elements": group.order, "channels": norm.num_channels}
        return v.into(y.type_as(x).flatten(1, 2), lattice=group, clean=False, **kind)

    def _cells(self, group: Group, mask: Any, x: Any) -> Any:
        """How many cells lie in the domain; the mask may be one for several layers of space."""
        return torch.where(mask, torch.ones_like(x.flatten(0, -group.dim - 1)[:1]), 0.0).sum()

    def _variance(self, name: str, module: VarianceInside, v: Value) -> Value:
        group, mask = module.group, self._domain(module.group, v)
        x = self._map(v._replace(x=self._fill(v, group), lattice=None))
        y, over = self._fine(x), (*(1,) * module.channels, *range(-group.dim, 0))
        count = self._cells(group, mask, y) * (y.size(1) if module.channels else 1)
        centred = torch.where(mask, y - y.sum(over, True) / count, 0.0)
        var = (centred * centred).sum(over, module.keepdim) / (count - module.correction).clamp(min=0)
        rank = None if v.rank is None else v.rank if module.keepdim else v.rank - len(over)
        if module.root:  # as in VarianceInside: the root has no gradient at zero
            var = torch.where(var > 0, torch.where(var > 0, var, 1.0).sqrt(), var)
        return Value(var.type_as(x), rank=rank)

    def _reduce(self, name: str, module: ReduceSpace, v: Value) -> Value:
        x = self._map(v._replace(x=self._fill(v, module.group, FILLS[module.how]), lattice=None))
        rank = None if v.rank is None else v.rank if module.keepdim else v.rank - len(module.over)
        return Value(getattr(x, module.how)(dim=module.over, keepdim=module.keepdim, **module.options), rank=rank)

    def _at_one_place(self, name: str, module: AtOnePlace, v: Value) -> Value:
        y = self._map(v).flatten(2).unflatten(2, (module.group.order, 1))  # an error for other sizes
        return Value(y.squeeze(3), rank=3)

    def _coset_pool(self, name: str, module: CosetPool, v: Value) -> Value:
        reduce = "amax" if module.reduce == "max" else "mean"
        order, members = module.group.order, module._members or [list(range(module.group.order))]
        # (N, K, S) and maps that something else made are as good as planes
        by_element = self._by_element(v, order)  # (N, S, K, *X)
        if len(members) == 1:
            rank = None if v.rank is None else v.rank - 1
            return v.into(getattr(by_element, reduce)(1), elements=None, channels=None, rank=rank)
        cosets = self._sorted(by_element, members)  # (N, S/|H|, |H|, K, *X)
        return v.into(getattr(cosets, reduce)(2).flatten(1, 2), elements=len(members))

    def _restrict(self, name: str, module: Restrict, v: Value) -> Value:
        members = module._members
        cosets = self._sorted(self._by_element(v, module.group.order), members)  # (N, S/|H|, |H|, K, *X)
        planes = cosets.movedim(1, 3).flatten(1, 3)  # (N, |H| K S/|H|, *X)
        channels = None if v.channels is None else v.channels * len(members)
        return v.into(planes, elements=len(members[0]), channels=channels)

    def _subsample(self, name: str, module: GSubsample, v: Value) -> Value:
        group = module.group
        v = v if v.lattice is not None and same_domain(v.lattice, group) else self._clean(v)
        if module.subgroup is not None:
            kept = self._by_element(v, group.order).index_select(1, self._constant(torch.tensor(module.subgroup)))
            v = v.into(kept.flatten(1, 2), elements=len(module.subgroup))
        steps: Any = (..., *(slice(None, None, s) for s in module.stride))
        return v.into(v.x[steps], max(module.stride) == 1, lattice=None if group.fills_box else group, clean=False)

    def _group_pool(self, name: str, module: GPool, v: Value) -> Value:
        """Over g U: for each element the shifted planes that it reads."""
        group, (reach, reads) = module.group, module._plan
        how, fill = (torch.maximum, -torch.inf) if module.reduce == "max" else (operator.add, 0.0)
        x = self._fill(v, group, fill)
        given, x = x, self._fine(x) if module.reduce == "mean" else x
        if any(reach):
            x = F.pad(x, both_sides(reach), value=fill)
        by_element = self._by_element(v._replace(x=x, lattice=None), group.order)  # (N, S, K, *X)
        rows = []
        for read in reads:
            cuts = [
                (slice(None), a, ..., *(slice(r + o, o - r or None) for r, o in zip(reach, offset, strict=True)))
                for a, offset in read
            ]
            rows.append(functools.reduce(how, [by_element[cut] for cut in cuts]))
        y = torch.stack(rows, 1).flatten(1, 2)
        if module.reduce == "mean":
            y = (y / len(module.domain)).type_as(given)
        elif all(any(offset) for _, offset in reads[0]):  # a cell may see nothing of the map, not even itself
            y = y.masked_fill(y == -torch.inf, 0.0)
        return v.into(y, elements=group.order, lattice=None if group.fills_box else group, clean=False)

    def _same(self, name: str, module: nn.Module, v: Value) -> Value:
        return v

    _layers: ClassVar[dict[type[nn.Module], Callable[..., Value]]] = {
        GLinear: _linear,
        PooledLinear: _head,
        GConv: _conv,
        GConvTranspose: _conv,
        GBatchNorm: _norm,
        GLayerNorm: _layer_norm,
        GMaxPool: _pool,
        GAvgPool: _pool,
        GAdaptiveAvgPool: _adaptive,
        GUpsample: _upsample,
        CosetPool: _coset_pool,
        Restrict: _restrict,
        GSubsample: _subsample,
        GPool: _group_pool,
        EachElement: _each,
        ReduceSpace: _reduce,
        VarianceInside: _variance,
        AtOnePlace: _at_one_place,
        ChannelDropout: _same,
    }

    # --- functions of the lattice ----------------------------------------------------------------------------------------------

    def _to_hexagonal(self, image: Any, size: int | None = None, spacing: float | None = None) -> Value:
        """`gcnn.lattice.to_hexagonal` for whatever size of image the network meets."""
        given = self._map(self._value(image))
        x = self._fine(given)
        height, width = x.size(-2), x.size(-1)
        row, column = (height - 1) / (2 * lattice.ROW), (width - 1) / 2
        radius = self._larger(row, column + row / 2)
        half: Any = None if size is None else (size - 1) / 2
        if half is None:
            half = -((1e-9 - radius / (spacing or lattice.ROW**-0.5)) // 1)  # rounded up
            half = half if spacing else half + half % 2
        step: Any = spacing or self._larger(radius, 0.5) / (self._larger(half, 0.5) if size is None else max(half, 0.5))
        u = self._function(torch.arange, -half, half + 0.5, device=x.device, dtype=torch.float64)
        rows = (u * step * lattice.ROW).unsqueeze(1) / (height / 2)
        columns = (u.unsqueeze(0) + u.unsqueeze(1) / 2) * step / (width / 2)
        grid = torch.stack([columns, rows.expand_as(columns)], -1).type_as(x).expand(x.size(0), -1, -1, -1)
        y = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return Value(y.type_as(given), rank=4, lattice=p6m)

    def _to_square(self, x: Any, size: int | Sequence[int], spacing: float | None = None) -> Value:
        """`gcnn.lattice.to_square` for whatever size of map the network meets."""
        given = self._map(self._value(x))
        x = self._fine(given)
        n, size = x.size(-1), size if isinstance(size, Sequence) else (size, size)
        row, column = (size[0] - 1) / (2 * lattice.ROW), (size[1] - 1) / 2
        step: Any = spacing or max(row, column + row / 2, 0.5) / self._larger((n - 1) / 2, 0.5)
        rows, columns = (
            self._function(torch.arange, (1 - m) / 2, m / 2, device=x.device, dtype=torch.float64).type_as(x) for m in size
        )
        b = columns.unsqueeze(0) / step - (rows / (step * lattice.ROW * 2)).unsqueeze(1)
        a = (rows / (step * lattice.ROW)).unsqueeze(1).expand_as(b)
        a0, b0 = a.floor(), b.floor()
        fa, fb = a - a0, b - b0
        upper = fa + fb > 1  # which triangle of the rhombus
        corners = (  # the three corners and the barycentric weights
            (upper, upper, (1 - fa - fb).abs()),
            (1, 0, torch.where(upper, 1 - fb, fa)),
            (0, 1, torch.where(upper, 1 - fa, fb)),
        )
        y: Any = 0.0
        for da, db, weight in corners:
            i, j = (a0 + da).long() + n // 2, (b0 + db).long() + n // 2
            inside = (i >= 0) & (i < n) & (j >= 0) & (j < n)
            y = y + x[..., i.clamp(0, n - 1), j.clamp(0, n - 1)] * (weight * inside)
        return Value(y.type_as(given), rank=4)


def _rank_after(node: fx.Node, inputs: list[Value], pointwise: bool) -> int | None:
    """How many axes a function of numbers, or a reduction as `convert` writes it, gives; None if that is not known."""
    first = inputs[0].rank if inputs else None
    if first is None:
        return None
    if pointwise:
        return first if len(inputs) == 1 else None
    over = node.kwargs.get("dim")
    if node.target not in ("mean", "sum", "amax", "amin", "norm", "logsumexp", "std", "var") or not isinstance(over, tuple):
        return None
    return first if node.kwargs.get("keepdim") else first - len(over)


def _keeps_size(module: Any) -> bool:
    """Whether a layer's result is as large as what it gets."""
    spans = zip(module.kernel_size, module.padding, module.dilation, strict=True)
    return max(module.stride) == 1 and all(2 * p == d * (k - 1) for k, p, d in spans)


def _mode(module: GUpsample | UpsampleTo) -> str:
    return torch_mode(module.mode, module.group.dim, max(getattr(module, "scale_factor", None) or (1,)))
