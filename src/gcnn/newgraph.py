"""The graph that `gcnn.planes` writes: its values, maps as planes, constants and modules, and the masks of hexagonal lattices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from gcnn.groups import Group


class Value(NamedTuple):
    """A value of the new network: a tensor as it was, or the planes (N, S K, *X) of a map."""

    x: Any
    elements: int | None = None
    """S, if these are planes."""
    channels: int | None = None
    """K, if these are planes and it is known."""
    rank: int | None = None
    """Axes of what the old network has here, if known: d + 3 for a map, d + 2 for an image."""
    lattice: Group | None = None
    """A group of a hexagonal lattice, outside whose domain the old network has zeros here."""
    clean: bool = False
    """Whether they are zeros here too; if not, they are garbage that is to be cleared before anything reads it."""
    like: fx.Node | None = None
    """A node whose space is as large."""

    def into(self, x: Any, same_size: bool = True, **changes: Any) -> Value:
        """What was computed from this value."""
        return self._replace(x=x, like=(self.like or self.x.node) if same_size else None, **changes)


class NewGraph:
    """A graph under construction, and the values that stand for those of the old network.

    Values are proxies of torch.fx: what is done to them here is written into the graph.
    """

    def __init__(self, like: Tensor) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self.values: dict[fx.Node, Value] = {}
        self.domains: dict[Any, Any] = {}
        self.like = like  # for constants of our own

    def _value(self, node: Any) -> Value:
        return self.values[node] if isinstance(node, fx.Node) else Value(node)

    def _map(self, v: Value) -> Any:
        """As the old network has it: a map (N, K, S, *X) is a view of its planes."""
        x = self._clean(v).x
        return x if v.elements is None else x.unflatten(1, (v.elements, -1)).transpose(1, 2)

    def _mapped(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda n: self._settled(n).node)

    def _settled(self, node: fx.Node) -> Any:
        """The value as the old network has it, cleared first.

        Whoever asked may change it in place, so nothing is assumed about cells outside the domain afterwards.
        """
        clean = self._clean(self.values[node])
        self.values[node] = clean._replace(lattice=None, clean=False)
        return self._map(clean)

    def _planes(self, v: Value, elements: int, groups: int = 1) -> Any:
        """As planes (N, S K, *X), for a grouped convolution group by group."""
        if v.elements == elements and groups == 1:
            return v.x
        x = v.x if v.elements is None else v.x.unflatten(1, (v.elements, -1)).transpose(1, 2)
        if groups == 1:
            return x.transpose(1, 2).flatten(1, 2)
        return x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(1, 3)

    def _by_element(self, v: Value, elements: int) -> Any:
        """As (N, S, K, *X)."""
        return v.x.transpose(1, 2) if v.elements is None else v.x.unflatten(1, (elements, -1))

    def _sorted(self, by_element: Any, members: list[list[int]]) -> Any:
        """(N, S, ...) to (N, cosets, members, ...)."""
        sorted_ = by_element.index_select(1, self._constant(torch.tensor(members).flatten()))
        return sorted_.unflatten(1, (len(members), -1))

    def _proxy(self, node: fx.Node) -> Any:
        return fx.Proxy(node, self.tracer)

    def _function(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, args, kwargs)

    def _constant(self, value: Any) -> Any:
        name = f"constant_{sum(1 for _ in self.root.buffers(recurse=False))}"
        self.root.register_buffer(name, detached(value).to(self.like.device))
        return self._proxy(self.graph.get_attr(name))

    def _fine(self, x: Any) -> Any:
        """`x` in float32 where the network is in half precision, which has too few digits for sums and for places."""
        return x.float() if self.like.dtype in (torch.float16, torch.bfloat16) else x

    def _larger(self, a: Any, b: Any) -> Any:
        """The larger of two numbers, the first of them known only when the network runs."""
        return (a + b + self._function(abs, a - b)) / 2

    def _insert(self, name: str, module: nn.Module, *inputs: Any) -> Any:
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
        return self._proxy(self.graph.call_module(".".join([*path, last]), tuple(x.node for x in inputs)))

    # --- hexagonal lattices ----------------------------------------------------------------------------------------------------

    def _domain(self, group: Group, v: Value) -> Any:
        """The mask of the hexagon, as `gcnn.lattice.domain_mask` gives it, for whatever size the network meets."""
        key = (group.oblique, v.like or v.x.node)
        if key not in self.domains:
            mask: Any = None
            for i, row in group.oblique:
                half = v.x.size(i - group.dim) // 2
                along: Any = 0
                for j, m in enumerate(row):
                    if m:  # one cell too many for an even size, which has no centre: an error, not a wrong answer
                        u = self._function(torch.arange, -half, half + 1, device=v.x.device)
                        along = along + m * u.view([-1 if k == j else 1 for k in range(group.dim)])
                inside = along.abs() <= half
                mask = inside if mask is None else mask & inside
            self.domains[key] = mask
        return self.domains[key]

    def _fill(self, v: Value, group: Group, value: float = 0.0) -> Any:
        """`v` with this value outside the domain of the group."""
        if not (v.lattice is not None and same_domain(v.lattice, group)):
            v = self._clean(v)
        if group.fills_box:
            return v.x
        return torch.where(self._domain(group, v), v.x, value)

    def _clean(self, v: Value) -> Value:
        """With zeros wherever the old network has them."""
        if v.lattice is None or v.clean:
            return v
        return v.into(self._fill(v, v.lattice), clean=True)

    def _inside(self, v: Value, group: Group) -> Value:
        """With zeros outside the domain of the group."""
        v = self._clean(v)
        if group.fills_box or (v.lattice is not None and same_domain(v.lattice, group)):
            return v
        return v.into(self._fill(v, group), lattice=group, clean=True)


def detached(numbers: Tensor | None) -> Tensor:
    """A copy without a history."""
    assert numbers is not None
    return numbers.detach().clone()


def same_domain(a: Group, b: Group) -> bool:
    """Whether maps of two groups are zero outside the same cells."""
    return set(a.oblique) == set(b.oblique)


def alike(values: list[Value]) -> bool:
    """Whether all are zero outside one domain, or none is known to be."""
    first = values[0].lattice
    if first is None:
        return all(v.lattice is None for v in values)
    return all(v.lattice is not None and same_domain(v.lattice, first) for v in values)
