"""Pooling, subsampling and resampling over space and over the group (paper, section 6.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from gcnn import pooling
from gcnn.checks import Size, check_reduce, check_tensor
from gcnn.groups import Group, Subgroup
from gcnn.nn.module import GModule, checked_axes, naming
from gcnn.pooling import Reduce


class _Window(GModule):
    """What the pools over space share: a window that the group maps to itself, a stride, a padding."""

    _shown: tuple[str, ...] = ("kernel_size", "stride", "padding")

    def __init__(
        self, group: Group, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool
    ) -> None:
        super().__init__(group)
        with naming(self._label()):
            if ceil_mode:
                raise ValueError("ceil_mode lets windows hang over one side, which is not equivariant; use padding instead")
            self.kernel_size = checked_axes(group, "kernel_size", kernel_size, least=1)
            self.stride = self.kernel_size if stride is None else checked_axes(group, "stride", stride, least=1)
            self.padding = checked_axes(group, "padding", padding)
            self.dilation = checked_axes(group, "dilation", dilation, least=1)
            if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
                raise ValueError(f"padding (={self.padding}) must be at most half of kernel_size (={self.kernel_size})")
            self._taps = None if group.fills_box else pooling.window_taps(group, self.kernel_size)

    def _pool(self, x: Tensor, pool: Callable[..., Tensor], option: Any) -> Tensor:
        """The result of `pool`; `option` is the argument of its own, dilation or count_include_pad. Errors name the layer."""
        self._check_map(x)
        if not self.group.fills_box:
            self._check_window(x, self.kernel_size, self.stride, self.padding, self.dilation)
        try:
            return pool(self.group, x, self.kernel_size, self.stride, self.padding, option, self._taps)
        except (RuntimeError, ValueError):
            self._check_window(x, self.kernel_size, self.stride, self.padding, self.dilation)  # the likeliest reason
            self._check_floating(x)
            raise


class GMaxPool(_Window):
    """Max pooling over space of G-maps, maps over cosets and images, with the arguments of nn.MaxPool2d.

    Exactly equivariant where stride divides size + 2 padding - dilation (kernel_size - 1) - 1. The window of a hexagonal lattice
    is a hexagon. ceil_mode must be off, since it favours one side.

    >>> from gcnn import p4
    >>> GMaxPool(p4, 2)(torch.rand(1, 10, 4, 24, 24)).shape
    torch.Size([1, 10, 4, 12, 12])
    """

    _shown = (*_Window._shown, "dilation")

    def __init__(
        self,
        group: Group,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        *,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(group, kernel_size, stride, padding, dilation, ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        """The maxima of `x` over windows."""
        return self._pool(x, pooling.max_pool, self.dilation)


class GAvgPool(_Window):
    """Average pooling over space of G-maps, maps over cosets and images, with the arguments of nn.AvgPool2d.

    Exactly equivariant where stride divides size + 2 padding - kernel_size. The window of a hexagonal lattice is a hexagon.
    ceil_mode must be off, since it favours one side.

    >>> from gcnn import p4
    >>> GAvgPool(p4, 3, stride=2, padding=1)(torch.rand(1, 10, 4, 9, 9)).shape
    torch.Size([1, 10, 4, 5, 5])
    """

    def __init__(
        self,
        group: Group,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(group, kernel_size, stride, padding, 1, ceil_mode)
        self.count_include_pad = count_include_pad

    def forward(self, x: Tensor) -> Tensor:
        """The means of `x` over windows."""
        return self._pool(x, pooling.avg_pool, self.count_include_pad)


class GAdaptiveAvgPool(GModule):
    """Average pooling over space to `output_size` cells, as nn.AdaptiveAvgPool2d; to one cell on hexagonal lattices.

    >>> from gcnn import p4
    >>> GAdaptiveAvgPool(p4, 1)(torch.rand(1, 10, 4, 9, 9)).shape
    torch.Size([1, 10, 4, 1, 1])
    """

    _shown = ("output_size",)

    def __init__(self, group: Group, output_size: Size) -> None:
        super().__init__(group)
        with naming(self._label()):
            self.output_size = checked_axes(group, "output_size", output_size, least=1)

    def forward(self, x: Tensor) -> Tensor:
        """The means of `x` over equal parts of space."""
        self._check_map(x)
        self._check_floating(x)
        return pooling.adaptive_avg_pool(self.group, x, self.output_size)


class GUpsample(GModule):
    """Enlarges a map over space, with the arguments of nn.Upsample; mode "linear" is (bi-, tri-)linear by dimension.

    Nearest neighbours need whole factors. On a hexagonal lattice mode is "linear" and n becomes (n - 1) scale_factor + 1.

    >>> from gcnn import p4
    >>> GUpsample(p4, scale_factor=2)(torch.rand(1, 10, 4, 9, 9)).shape
    torch.Size([1, 10, 4, 18, 18])
    """

    _shown = ("size", "scale_factor", "mode")

    def __init__(
        self,
        group: Group,
        size: Size | None = None,
        scale_factor: Size | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
    ) -> None:
        super().__init__(group)
        with naming(self._label()):
            if (size is None) == (scale_factor is None):
                raise ValueError(f"give size or scale_factor, one of the two, got {size!r} and {scale_factor!r}")
            if mode == ("linear", "bilinear", "trilinear")[group.dim - 1]:
                mode = "linear"
            pooling.check_mode(mode)
            if mode == "nearest" and align_corners is not None:
                raise ValueError(f'align_corners (={align_corners!r}) is an option of mode="linear"; leave it out')
            if isinstance(scale_factor, float | tuple | list):  # torch's own layer takes 2.0 for 2
                factors = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor,)
                whole = tuple(int(n) if isinstance(n, float) and n.is_integer() else n for n in factors)
                scale_factor = whole[0] if isinstance(scale_factor, float) else whole
            if not group.fills_box and (mode != "linear" or scale_factor is None or align_corners is not None):
                raise ValueError(
                    'a hexagonal lattice is enlarged by a scale_factor with mode="linear" alone: '
                    "the nearest cell of a hexagonal map is not unique"
                )
            self.size = None if size is None else checked_axes(group, "size", size, least=1)
            self.scale_factor = None if scale_factor is None else checked_axes(group, "scale_factor", scale_factor, least=1)
        self.mode, self.align_corners = mode, align_corners
        self._tent = None if group.fills_box else pooling.tent_kernel(group, self.scale_factor or ())

    def forward(self, x: Tensor) -> Tensor:
        """`x`, enlarged."""
        self._check_map(x)
        try:
            return pooling.upsample(self.group, x, self.size, self.scale_factor, self.mode, self.align_corners, self._tent)
        except NotImplementedError:
            self._check_floating(x)
            raise


class CosetPool(GModule):
    """Pools a G-map over the left cosets of `subgroup`: (N, K, S, *X) to (N, K, S/|H|, *X) (section 6.3).

    None is the whole point group: the result is an image (N, K, *X), which turns as the input image does. Also takes (N, K, S).

    >>> from gcnn import p4m
    >>> rotations = p4m.subgroup(1)
    >>> x = torch.rand(2, 16, 8, 9, 9)
    >>> CosetPool(p4m)(x).shape, CosetPool(p4m, rotations, "mean")(x).shape
    (torch.Size([2, 16, 9, 9]), torch.Size([2, 16, 2, 9, 9]))
    """

    _shown = ("subgroup", "reduce")

    def __init__(self, group: Group, subgroup: Subgroup | None = None, reduce: Reduce = "max") -> None:
        super().__init__(group)
        with naming(self._label()):
            check_reduce(reduce)
            self.subgroup = None if subgroup is None else group.check_subgroup(subgroup)
        self.reduce: Reduce = reduce
        self._members = None if self.subgroup is None else pooling.left_cosets(group, self.subgroup)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, pooled over each coset."""
        check_tensor(self._label(), x)
        if x.ndim != 3:
            self._check_map(x, image=False, cosets=False)
        if self.reduce == "mean":
            self._check_floating(x)
        return pooling.coset_pool(self.group, x, self.subgroup, self.reduce, self._members)


class GPool(GModule):
    """Pools a G-map over g U for any finite `domain` U in G, without stride: P f(g) = max of f(g u) over u in U (section 6.3).

    `domain` lists the elements t s as pairs (s, t). CosetPool and GMaxPool are faster where U is a subgroup or a window.

    >>> from gcnn import p4
    >>> ahead = GPool(p4, [(0, (0, 0)), (0, (0, 1)), (1, (0, 0))])
    >>> ahead(torch.rand(2, 16, 4, 9, 9)).shape
    torch.Size([2, 16, 4, 9, 9])
    """

    _shown = ("domain", "reduce")

    def __init__(self, group: Group, domain: Iterable[tuple[int, Sequence[int]]], reduce: Reduce = "max") -> None:
        super().__init__(group)
        if not isinstance(domain, Iterable):
            raise TypeError(f"GPool({group}): domain must list pairs (s, t) of an element and a translation, got {domain!r}")
        self.domain = tuple(domain)
        self.reduce: Reduce = reduce
        with naming(self._label()):
            check_reduce(reduce)
            self._plan = pooling.pool_plan(group, self.domain)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, pooled over g U for every g."""
        self._check_map(x, image=False, cosets=False)
        return pooling.planned_pool(self.group, x, self._plan, self.reduce)


class Restrict(GModule):
    """A G-map as a map on a subgroup H of the point group, nothing lost: (N, K, S, *X) to (N, K S/|H|, |H|, *X).

    Further layers take the group `out_group`, which is H: so a network can give up symmetries with depth. Where the elements of
    H only exchange and reverse the axes of the array (half turns, say), its domain on a hexagonal lattice is the whole array
    again, no longer the hexagon.

    >>> from gcnn import p4m
    >>> restrict = Restrict(p4m, p4m.subgroup(1))
    >>> restrict.out_group, restrict(torch.rand(2, 16, 8, 9, 9)).shape
    (<Group p4: order 4, dimension 2>, torch.Size([2, 32, 4, 9, 9]))
    """

    _shown = ("subgroup",)

    def __init__(self, group: Group, subgroup: Subgroup) -> None:
        super().__init__(group)
        with naming(self._label()):
            self.subgroup = group.elements_of(subgroup)
        self.out_group = group.restrict(subgroup)
        self._members = pooling.right_cosets(group, subgroup)

    def forward(self, x: Tensor) -> Tensor:
        """`x` as a map on the subgroup."""
        self._check_map(x, image=False, cosets=False)
        return pooling.restrict(self.group, x, self.subgroup, self._members)


class GSubsample(GModule):
    """Subsamples a map on a subgroup: translations by multiples of `stride`, point elements in `subgroup` (None: all) (6.3).

    Takes G-maps, and images where `subgroup` is None. stride must divide size - 1, so that what is kept is symmetric about the
    centre. Further layers take `out_group`.

    >>> from gcnn import p4
    >>> GSubsample(p4, 2)(torch.rand(2, 16, 4, 9, 9)).shape
    torch.Size([2, 16, 4, 5, 5])
    """

    _shown = ("stride", "subgroup")

    def __init__(self, group: Group, stride: Size = 2, subgroup: Subgroup | None = None) -> None:
        super().__init__(group)
        with naming(self._label()):
            self.stride = checked_axes(group, "stride", stride, least=1)
            self.subgroup = None if subgroup is None else group.elements_of(subgroup)
        self.out_group = group if subgroup is None else group.restrict(subgroup)

    def forward(self, x: Tensor) -> Tensor:
        """The values of `x` on the subgroup."""
        self._check_map(x, image=self.subgroup is None, cosets=False)
        return pooling.subsample(self.group, x, self.stride, self.subgroup, self.subgroup)
