"""Layers with learned filters on the group: lifting, full and transposed G-correlation, and linear maps (paper, 6.1 and 7)."""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gcnn.checks import Size, as_tuple, check_tensor, shape_text
from gcnn.functional import check_algorithm, correlate, planar_gcorr_transpose, transform_filter, whole_padding
from gcnn.groups import Group, Subgroup
from gcnn.indices import index_table, support
from gcnn.kernels.expand import index_of
from gcnn.kernels.fourier import Algorithm, choose
from gcnn.kernels.planar import Tables
from gcnn.layout import as_linear, as_tensor, autocasts, both_sides, fast_form, spread, traced
from gcnn.nn.module import Device, GModule, check_group, checked_axes, naming
from gcnn.pooling import on_planes


class _Filters(GModule):
    """What the layers with filters share: a weight of rank 3, a bias, index tables, and errors that name the layer.

    The tables are plain attributes, made anew wherever the weight goes. Buffers would do for checkpoints, but whatever treats
    buffers as numbers (a moving average of all buffers, to_empty, Module.type) would silently spoil them.
    """

    tables: Tables
    bias: Tensor | None
    depthwise = False
    """Whether filters see one channel and one element alone."""
    _ends = ("in_channels", "out_channels")

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        groups: int,
        bias: bool,
        stabilizer: Subgroup | None,
        device: Device,
        dtype: torch.dtype | None,
        transposed: bool = False,
    ) -> None:
        super().__init__(group)
        self.in_channels, self.out_channels = in_channels, out_channels  # for the errors, too
        with naming(self._label()):
            for name, value in (("groups", groups), (self._ends[0], in_channels), (self._ends[1], out_channels)):
                if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                    raise ValueError(f"{name} must be a positive whole number, got {value!r}")
                if value % groups:
                    raise ValueError(f"{name} (={value}) must be divisible by groups (={groups})")
            kind: Any = dtype  # torch takes float for its default, too
            if not (kind in (None, float) or (isinstance(kind, torch.dtype) and kind.is_floating_point)):
                remedy = "; take real and imaginary parts as two channels" if getattr(kind, "is_complex", False) else ""
                raise ValueError(f"dtype must be a floating point dtype of torch, got {dtype!r}{remedy}")
            if self.depthwise and out_channels % in_channels:
                raise ValueError(f"out_channels (={out_channels}) must be a multiple of in_channels (={in_channels})")
            self.in_channels, self.out_channels, self.groups = int(in_channels), int(out_channels), int(groups)
            self.kernel_size = checked_axes(group, "kernel_size", kernel_size, least=1)
            self.stabilizer = group.check_subgroup(stabilizer)
            taps = index_table(group, self.kernel_size, self.stabilizer)[1].shape[1]
        self.cosets = group.order if self.depthwise else self.fibre  # those of the input
        self.on_plane = stabilizer is not None and self.fibre == 1 and not self.depthwise  # images, (N, K, *X): no axis S
        seen = 1 if self.depthwise else in_channels // groups
        channels = (in_channels, out_channels // groups) if transposed else (out_channels, seen)
        self.weight = nn.Parameter(torch.empty(*channels, taps, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()
        self._place_tables()

    @property
    def fibre(self) -> int:
        """Elements (or cosets) for which a filter has numbers."""
        return self.group.order // len(self.stabilizer)

    def reset_parameters(self) -> None:
        """Draws weight and bias as torch.nn's convolutions do."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[1] * self.weight.shape[2])
            nn.init.uniform_(self.bias, -bound, bound)

    def _tables_on(self, device: torch.device) -> Tables:
        table, inverse = (as_tensor(t, device) for t in index_table(self.group, self.kernel_size, self.stabilizer))
        return table, inverse, *index_of(table, inverse, self.weight, math.prod(self.kernel_size), self.groups)

    def _place_tables(self) -> None:
        """Puts the index tables where the parameters are; self.weight may be computed from those (weight_norm, prune)."""
        first = next(itertools.chain(self.parameters(), self.buffers()), None)
        device = (self.weight if first is None else first).device  # a weight that is computed may draw random numbers
        if getattr(self, "tables", None) is None or self.tables[0].device != device:
            self.tables = self._tables_on(device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # .to(), .cuda(), .to_empty() ...
        super()._apply(fn, recurse)
        self._place_tables()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:  # with assign=True the parameters may come from another device
        super()._load_from_state_dict(*args)
        self._place_tables()

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles make their own tables
        return {name: value for name, value in self.__dict__.items() if name != "tables"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._place_tables()

    def _bank(self, x: Tensor | None = None) -> Tensor:
        """The planar bank (S K_out, S_in K_in, *n) of the present weight, in the form that is fast for `x`."""
        weight: Tensor = self.weight  # read once: a parametrization may compute it, and draw random numbers
        form = () if x is None else fast_form(self.group, x, weight)
        tables = self._tables(weight)
        return transform_filter(self.group, weight, self.kernel_size, self.stabilizer, tables, self.groups, *form)

    def _tables(self, weight: Tensor) -> Tables:
        """The index tables where the present weight is; functional_call and replicas bring weights from elsewhere."""
        if self.tables[0].device != weight.device:
            return self._tables_on(weight.device)
        table, inverse, forth, _ = self.tables
        k_out, k_in, _ = weight.shape
        fits = forth is None or (forth.shape[0] == k_out * table.numel() and forth.shape[1:] in ((), (k_in,)))
        return self.tables if fits else (table, inverse, None, None)  # filters were taken away, or added

    def filters(self) -> Tensor:
        """The filters under every element, F+ of section 7.1: (K_out, S, K_in / groups, S_in, *n), zero outside the support.

        S_in is 1 for filters on the plane; GConvTranspose has K_in and K_out exchanged.
        """
        bank = self._bank().detach().unflatten(1, (self.fibre, -1)).unflatten(0, (self.groups, self.group.order, -1))
        return bank.movedim(1, 2).flatten(0, 1).transpose(2, 3)

    def load_filters(self, psi: Any) -> None:
        """Takes over dense filters (K_out, K_in / groups, S_in, *n), or (K_out, K_in / groups, *n) on the plane, as `gcorr` does.

        A tensor or an array of numpy. The elements are in the order of `group.matrices`; for p4 and p4m that is the paper's, and
        the shape is the one in which its authors' code, GrouPy, keeps filters. Taps outside the support of the kernel, on a
        hexagonal lattice, do not count.
        """
        psi = torch.as_tensor(psi)
        flat = self.on_plane or self.depthwise
        expected = (*self.weight.shape[:2], *(() if flat else (self.fibre,)), *self.kernel_size)
        if flat and psi.ndim == self.group.dim + 3 and psi.shape[2] == 1:  # GrouPy's first layers have such an axis
            psi = psi.squeeze(2)
        if tuple(psi.shape) != expected:
            raise ValueError(f"{self._label()}: expected filters {expected}, got {tuple(psi.shape)}")
        inside = torch.from_numpy(support(self.group, self.kernel_size).ravel().copy())
        taps = psi.detach().flatten(-self.group.dim)[..., inside.to(psi.device)]
        if "weight" in self._parameters:
            with torch.no_grad():
                self.weight.copy_(taps.flatten(2))
        elif parametrize.is_parametrized(self, "weight"):  # what it is computed from, so that it is this
            before, wanted = copy.deepcopy(self.state_dict()), taps.flatten(2).to(self.weight)
            with suppress(NotImplementedError, RuntimeError):  # it cannot be set at all
                self.weight = wanted
            rounding = 16 * torch.finfo(wanted.dtype).eps * wanted.abs().amax()  # orthogonal matrices come back within 5 eps
            if not torch.all((self.weight - wanted).abs() <= rounding):
                self.load_state_dict(before)
                raise ValueError(f"{self._label()}: the parametrization of its weight cannot hold these filters; remove it first")
        else:
            raise ValueError(f"{self._label()}: its weight is computed from others (pruning, weight_norm ...); remove that first")

    def _label(self) -> str:
        return f"{type(self).__name__}({self.group}, {self.in_channels} -> {self.out_channels})"

    def _check_dtype(self, x: Tensor) -> None:
        own = self._parameters.get("weight")  # not one that is computed, and may be drawn at random
        if own is not None and x.dtype != own.dtype and not (traced() or autocasts(x.device.type)):
            raise ValueError(
                f"{self._label()}: expected input of its own dtype {own.dtype}, got {x.dtype}; use x.to({own.dtype})"
            )

    def _check_input(self, x: Tensor) -> None:
        group, k, cosets = self.group, self.in_channels, self.cosets
        check_tensor(self._label(), x)
        expected = (k,) if self.on_plane else (k, cosets)
        if x.ndim == group.dim + 1 + len(expected) and x.shape[1 : 1 + len(expected)] == expected:
            if not x.is_floating_point():
                raise ValueError(
                    f"{self._label()}: expected floating point numbers, got {x.dtype}; use "
                    + ("x.abs(), or x.real and x.imag as two channels" if x.is_complex() else "x.float() / 255 for bytes")
                )
            self._check_dtype(x)
            return
        remedy = f"its group {group} has dimension {group.dim}"
        if x.ndim == group.dim + len(expected):
            last = self.on_plane and x.shape[-1] == k != x.shape[0]
            remedy = f"a batch axis is missing if this is one sample: {'x.movedim(-1, 0)[None]' if last else 'x[None]'}"
            if self.on_plane and k != x.shape[0] and group.dim > 1 and x.shape[1] == k:
                remedy = f"its group {group} has dimension {group.dim}, and this looks like a batch of dimension {group.dim - 1}"
            elif self.on_plane and k == 1 != x.shape[0] and not last:
                remedy = "an axis for the one channel is missing: x[:, None]"
        if x.ndim == group.dim + 2 and not (x.ndim == group.dim + len(expected) and x.shape[: len(expected)] == expected):
            if self.on_plane:
                remedy = "its channels come last: use x.movedim(-1, 1)" if x.shape[-1] == k else f"in_channels is {k}"
            elif x.shape[1] == k * cosets:
                remedy = f"use x.unflatten(1, ({k}, {cosets})) if these are planes"
            else:
                remedy = "an image is lifted to the group by LiftConv first"
        elif x.ndim == group.dim + 3:
            if self.on_plane and group.order % max(1, x.shape[2]):
                remedy = f"its group {group} has dimension {group.dim}, and this looks like a batch of dimension {group.dim + 1}"
            elif self.on_plane and x.shape[2] == 1:
                remedy = "a map over one coset, that of the whole group, is an image: use x.squeeze(2)"
            elif self.on_plane:
                remedy = "this is a map on a group already: use GConv, or CosetPool to get an image"
            elif x.shape[2] != cosets:
                remedy = f"axis 2 counts the {cosets} elements{'' if cosets == group.order else ' (cosets)'} of {group}; "
                remedy += "GConv takes maps over cosets with stabilizer=, Restrict leads to the maps of a smaller group"
            else:
                remedy = f"in_channels is {k}"
        shape = shape_text(group, k, None if self.on_plane else cosets)
        raise ValueError(f"{self._label()}: expected input {shape}, got {tuple(x.shape)}; {remedy}")

    def extra_repr(self) -> str:
        """The arguments that are not the usual ones."""
        ones = (1,) * self.group.dim
        usual = {"stride": ones, "padding": (0,) * self.group.dim, "dilation": ones, "groups": 1, "padding_mode": "zeros"}
        usual |= {"stabilizer": (0,), "algorithm": "auto"}
        options = {name: getattr(self, name) for name in self._shown} | {"groups": self.groups}
        named = [f"{name}={value!r}" for name, value in options.items() if value != usual.get(name)]
        named += [] if self.bias is not None else ["bias=False"]
        return ", ".join([str(self.group), str(self.in_channels), str(self.out_channels), *named])


class GConv(_Filters):
    """G-correlation of a G-map (N, K_in, S, *X) with learned filters: (N, K_out, S, *Y), one bias a channel (eq. 11).

    The arguments after the group are those of nn.Conv1d, 2d and 3d. Sizes must agree along axes that the group mixes. With
    `stabilizer`, a subgroup H, the input is a map over the cosets G/H, (N, K_in, S/|H|, *X), as CosetPool returns it. With a
    stride s the layer is exactly equivariant where s divides size + 2 padding - dilation (kernel_size - 1) - 1. `algorithm` is
    "planar", "fourier" or the faster of the two, "auto": it changes the time, not the result, and is no part of the model.

    >>> from gcnn import p4m
    >>> conv = GConv(p4m, 16, 32, 3, padding=1)
    >>> conv(torch.rand(2, 16, 8, 9, 9)).shape
    torch.Size([2, 32, 8, 9, 9])
    >>> conv
    GConv(p4m, 16, 32, kernel_size=(3, 3), padding=(1, 1))
    """

    _shown: tuple[str, ...] = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "stabilizer", "algorithm")

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        stabilizer: Subgroup | None = None,
        algorithm: Algorithm = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, in_channels, out_channels, kernel_size, groups, bias, stabilizer, device, dtype)
        with naming(self._label()):
            check_algorithm(algorithm)
            self.stride = checked_axes(group, "stride", stride, least=1)
            self.dilation = checked_axes(group, "dilation", dilation, least=1)
            self.padding = self._as_padding(padding)
            if padding_mode not in ("zeros", "reflect", "replicate", "circular"):
                raise ValueError(f'padding_mode must be "zeros", "reflect", "replicate" or "circular", got {padding_mode!r}')
            if padding_mode != "zeros" and not group.fills_box:
                raise ValueError(
                    f"padding_mode {padding_mode!r} continues a box, and {group} does not map boxes to boxes; "
                    'use padding_mode="zeros" on hexagonal lattices'
                )
        self.padding_mode = padding_mode
        self.algorithm: Algorithm = algorithm

    def _as_padding(self, padding: Size | str) -> tuple[int, ...]:
        if not isinstance(padding, str):
            return checked_axes(self.group, "padding", padding)
        return whole_padding(self.group, self.kernel_size, self.stride, padding, self.dilation)

    def forward(self, x: Tensor) -> Tensor:
        """The G-map (N, K_out, S, *Y) of `x`."""
        self._check_input(x)
        if not self.group.fills_box:
            self._check_window(x, self.kernel_size, self.stride, self.padding, self.dilation)
        padded, padding, weight = x, self.padding, self.weight
        try:
            if self.padding_mode != "zeros":
                both = both_sides(padding)
                padded = on_planes(self.group, x, lambda planes: F.pad(planes, both, mode=self.padding_mode))
                padding = (0,) * self.group.dim
            return correlate(
                self.group,
                padded,
                weight,
                self.bias,
                self.kernel_size,
                self.stride,
                padding,
                self.dilation,
                self.groups,
                self.stabilizer,
                self._tables(weight),
                self.algorithm,
                self.depthwise,
            )
        except (RuntimeError, ValueError):
            self._check_window(x, self.kernel_size, self.stride, self.padding, self.dilation)  # the likeliest reasons
            self._check_continued(x)
            raise

    def _check_continued(self, x: Tensor) -> None:
        """Raises a ValueError unless the map is large enough to be continued by its own numbers."""
        size = tuple(x.shape[-self.group.dim :])
        least = [p + (self.padding_mode == "reflect") for p in self.padding]
        if self.padding_mode in ("reflect", "circular") and any(n < m for n, m in zip(size, least, strict=True)):
            raise ValueError(
                f"{self._label()}: padding (={self.padding}) with padding_mode {self.padding_mode!r} takes maps of at least "
                f"{tuple(least)} cells, got {size}; give larger images, or pad less"
            ) from None


class LiftConv(GConv):
    """G-correlation of an image (N, K_in, *X) with learned filters on the plane: a G-map (N, K_out, S, *Y) (eq. 10).

    The first layer of a G-CNN: a GConv whose input has the whole point group as stabilizer. Its arguments are GConv's; "fourier"
    gains nothing here, so that "auto" is "planar".

    >>> from gcnn import p6m
    >>> LiftConv(p6m, 3, 16, 3, padding=1)(torch.rand(2, 3, 9, 9)).shape
    torch.Size([2, 16, 12, 9, 9])
    """

    _shown: tuple[str, ...] = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "algorithm")

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        algorithm: Algorithm = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_group("LiftConv", group)
        super().__init__(
            group,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            stabilizer=range(group.order),
            algorithm=algorithm,
            device=device,
            dtype=dtype,
        )


class GDepthwiseConv(GConv):
    """Filters on the plane, one a channel, turned with the element that they see: (N, K_in, S, *X) to (N, K_out, S, *Y).

    A GConv whose filters see one channel, and of the group the identity alone: S times fewer numbers and operations than
    GConv(groups=K_in). Nothing passes from element to element, so a 1x1 GConv follows: the two make a separable G-convolution.
    The arguments are those of nn.Conv1d, 2d and 3d; groups may be left out, and out_channels is a multiple of in_channels.

    >>> from gcnn import p4m
    >>> separable = nn.Sequential(GDepthwiseConv(p4m, 16, 16, 7, padding=3), GConv(p4m, 16, 32, 1))
    >>> separable(torch.rand(2, 16, 8, 9, 9)).shape
    torch.Size([2, 32, 8, 9, 9])
    >>> separable[0].weight.shape
    torch.Size([16, 1, 49])
    """

    _shown: tuple[str, ...] = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    depthwise = True

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int | None = None,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_group("GDepthwiseConv", group)
        if groups not in (None, in_channels):
            raise ValueError(
                f"GDepthwiseConv({group}, {in_channels} -> {out_channels}): groups (={groups!r}) must be in_channels "
                f"(={in_channels}), or left out; GConv takes other groups"
            )
        super().__init__(
            group,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            bias=bias,
            padding_mode=padding_mode,
            stabilizer=range(group.order),
            algorithm="planar",
            device=device,
            dtype=dtype,
        )


class GConvTranspose(_Filters):
    """The transposed G-correlation, G-map (N, K_in, S, *X) to G-map (N, K_out, S, *Y): the adjoint of GConv, plus a bias.

    The arguments are those of nn.ConvTranspose1d, 2d and 3d, but output_padding must be 0: it pads one side only and so cannot
    be equivariant. kernel_size 4, stride 2, padding 1 doubles a map; kernel_size 3, stride 2, padding 1 takes n to 2 n - 1.

    >>> from gcnn import p4
    >>> GConvTranspose(p4, 8, 4, 4, stride=2, padding=1)(torch.rand(1, 8, 4, 7, 7)).shape
    torch.Size([1, 4, 4, 14, 14])
    """

    _shown: tuple[str, ...] = ("kernel_size", "stride", "padding", "dilation")

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, in_channels, out_channels, kernel_size, groups, bias, None, device, dtype, transposed=True)
        with naming(self._label()):
            self.stride = checked_axes(group, "stride", stride, least=1)
            self.padding = checked_axes(group, "padding", padding)
            self.dilation = checked_axes(group, "dilation", dilation, least=1)
            if any(as_tuple(group, output_padding, "output_padding")):
                raise ValueError(
                    f"output_padding (={output_padding}) pads one side only, which is not equivariant; "
                    "kernel_size 4, stride 2, padding 1 doubles a map exactly"
                )

    def forward(self, x: Tensor) -> Tensor:
        """The G-map (N, K_out, S, *Y) of `x`."""
        self._check_input(x)
        return planar_gcorr_transpose(
            self.group, x, self._bank(x), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class GLinear(_Filters):
    """A linear map of functions on the point group, (..., K_in, S) to (..., K_out, S), equivariant, one bias a channel.

    `algorithm` as for GConv.

    >>> from gcnn import p4m
    >>> GLinear(p4m, 16, 10)(torch.rand(2, 16, 8)).shape
    torch.Size([2, 10, 8])
    """

    _shown: tuple[str, ...] = ("algorithm",)
    _ends = ("in_features", "out_features")

    def __init__(
        self,
        group: Group,
        in_features: int,
        out_features: int,
        bias: bool = True,
        algorithm: Algorithm = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, in_features, out_features, 1, 1, bias, None, device, dtype)
        with naming(self._label()):
            check_algorithm(algorithm)
        self.algorithm: Algorithm = algorithm

    def forward(self, x: Tensor) -> Tensor:
        """The values (..., K_out, S) of `x`."""
        check_tensor(self._label(), x)
        if x.ndim < 2 or x.shape[-2:] != (self.in_channels, self.group.order):
            raise ValueError(
                f"{self._label()}: expected input (..., {self.in_channels}, {self.group.order}), got {tuple(x.shape)}; "
                "take a mean or maximum over space first, and maps over cosets to the group by GConv(stabilizer=...)"
            )
        if not x.is_floating_point():
            raise ValueError(f"{self._label()}: expected floating point numbers, got {x.dtype}; use x.float()")
        self._check_dtype(x)
        maps = x.reshape(-1, *x.shape[-2:], *(1,) * self.group.dim)  # (points, K_in, S, 1, ...)
        weight: Tensor = self.weight
        if not traced():
            with as_linear(True):
                if choose(self.group, maps, weight, self.algorithm) == "fourier":
                    y = correlate(self.group, maps, weight, self.bias, self.kernel_size, algorithm="fourier")
                    return y.view(*x.shape[:-2], self.out_channels, self.group.order)
        bank = transform_filter(self.group, weight, self.kernel_size, self.stabilizer, self._tables(weight))
        y = F.linear(x.mT.flatten(-2), bank.flatten(1), spread(self.bias, self.group.order))  # (..., S K_out)
        return y.unflatten(-1, (self.group.order, self.out_channels)).mT
