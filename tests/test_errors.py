"""Bad input to the layers: the error names the layer, what was expected, what came, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gcnn import C3, D6, Oh, line, linem, p4, p4m, p6, p6m, plot, pm
from gcnn.export import planar
from gcnn.functional import act, correlate, gcorr, planar_gcorr, planar_gcorr_transpose, transform_filter
from gcnn.lattice import domain_mask, hexagon, mask_outside, to_hexagonal, to_square
from gcnn.models import build, save
from gcnn.nn import (
    CosetPool,
    GAdaptiveAvgPool,
    GAvgPool,
    GBatchNorm,
    GConv,
    GConvTranspose,
    GDepthwiseConv,
    GLayerNorm,
    GLinear,
    GMaxPool,
    GPool,
    GSubsample,
    GUpsample,
    LiftConv,
    Restrict,
)
from gcnn.pooling import adaptive_avg_pool, avg_pool, upsample
from gcnn.train import Config, train


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


ONE: Any = 1  # where something else belongs
WORD: Any = "p4"
# called without a group
FORGOTTEN: list[Any] = [LiftConv, GConv, GConvTranspose, GLinear, GMaxPool, Restrict, GLayerNorm, GBatchNorm, GDepthwiseConv]
MIXED = r"must be equal along axes \(0, 1\), which p4 mixes"
FUNCTIONS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: gcorr(p4, torch.rand(1, 6, 9, 9), torch.rand(4, 3, 3, 3)),
        r"correlate: expected filters for 6 channels in groups \(=1\), \(K_out, 6, ...\), got \(4, 3, 9\)",
    ),
    (
        lambda: gcorr(p4, torch.rand(1, 6, 4, 9, 9), torch.rand(6, 1, 4, 3, 3)),
        r"correlate: expected filters for 6 channels in groups \(=1\), .* got \(6, 1, 36\)",
    ),
    (
        lambda: gcorr(p4, torch.rand(1, 6, 4, 9, 9), torch.rand(6, 1, 4, 3, 3), groups=3),
        r"correlate: expected filters for 6 channels in groups \(=3\), \(K_out, 2, ...\), got \(6, 1, 36\)",
    ),
    (lambda: gcorr(p4, zeros(1, 6, 9, 9), zeros(4, 3, 3, 3), groups=0), "groups must be a positive whole number, got 0"),
    (
        lambda: correlate(p4, zeros(1, 2, 4, 6, 6), zeros(3, 1, 9), None, (3, 3), stabilizer=range(4), depthwise=True),
        r"correlate: expected depthwise filters, \(a multiple of 2, 1, ...\), got \(3, 1, 9\)",
    ),
    (lambda: avg_pool(p6, zeros(1, 1, 6, 9, 9), 3, 1, 2), r"avg_pool: padding \(=2\) must be at most half of kernel_size \(=3\)"),
    (lambda: avg_pool(p4, zeros(1, 1, 4, 9, 9), 3, 1, 2), r"avg_pool: padding \(=2\) must be at most half of kernel_size \(=3\)"),
    (lambda: domain_mask(p6, (5,)), r"domain_mask: p6 acts on 2 axes of space, got a size of 1, \(5,\)"),
    (lambda: upsample(p4, zeros(1, 1, 4, 4, 4), scale_factor=(2, 3)), r"upsample: scale_factor \(=\(2, 3\)\) " + MIXED),
    (lambda: upsample(p4, zeros(1, 1, 4, 4, 4), size=(8, 12)), r"upsample: size \(=\(8, 12\)\) " + MIXED),
    (lambda: adaptive_avg_pool(p4, zeros(1, 1, 4, 6, 6), (2, 3)), r"adaptive_avg_pool: output_size \(=\(2, 3\)\) " + MIXED),
    (
        lambda: correlate(p4, zeros(1, 2, 4, 6, 6), zeros(1, 2, 36), None, (3, 3), stride=(1, 2)),
        r"correlate: stride \(=\(1, 2\)\) " + MIXED,
    ),
    (
        lambda: correlate(p4, zeros(1, 2, 4, 6, 6), zeros(1, 2, 16), None, (2, 2), padding="same"),
        r'padding "same" with the even kernel_size \(=\(2, 2\)\) pads one side more',
    ),
    (
        lambda: planar_gcorr(p4, zeros(1, 2, 4, 6, 6), transform_filter(p4, zeros(1, 2, 16), (2, 2)), padding="same"),
        r'padding "same" with the even kernel_size \(=\(2, 2\)\) pads one side more',
    ),
    (
        lambda: planar_gcorr(p4, zeros(1, 2, 4, 6, 6), transform_filter(p4, zeros(1, 2, 36), (3, 3)), padding=(1, 0)),
        r"planar_gcorr: padding \(=\(1, 0\)\) " + MIXED,
    ),
    (lambda: GMaxPool(p6, 5)(zeros(1, 1, 6, 3, 3)), r"a window of \(5, 5\) cells does not fit a map of \(3, 3\)"),
    (lambda: GUpsample(p6, scale_factor=2, mode="linear", align_corners=True), r'with mode="linear" alone'),
]


@pytest.mark.parametrize(("call", "message"), FUNCTIONS)
def test_functions_refuse_what_breaks_the_symmetry(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


AT_CONSTRUCTION: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: GConv(16, 32, 3, 1), TypeError, r"GConv: expected a Group as the first argument, .*GROUPS\['p4m'\], got 16"),  # type: ignore[arg-type]
    (lambda: FORGOTTEN[0](3, 8, 3), TypeError, r"LiftConv: .* got 3; the group comes first: LiftConv\(p4m, 3, 8, 3\)"),
    (lambda: FORGOTTEN[1](8, 9, 3, padding=1), TypeError, r"the group comes first: GConv\(p4m, 8, 9, 3, padding=1\)"),
    (lambda: FORGOTTEN[2](8, 9, 3), TypeError, r"the group comes first: GConvTranspose\(p4m, 8, 9, 3\)"),
    (lambda: FORGOTTEN[3](8, 9), TypeError, r"the group comes first: GLinear\(p4m, 8, 9\)"),
    (lambda: FORGOTTEN[8](8, 8, 3), TypeError, r"the group comes first: GDepthwiseConv\(p4m, 8, 8, 3\)"),
    (
        lambda: GDepthwiseConv(p4m, 16, 16, 7, 1, 3, 1, 4),
        ValueError,
        r"GDepthwiseConv\(p4m, 16 -> 16\): groups \(=4\) must be in_channels \(=16\), or left out",
    ),
    (
        lambda: GDepthwiseConv(p4m, 2, 2, 7, padding=3, padding_mode="reflect")(torch.rand(1, 2, 8, 3, 3)),
        ValueError,
        r"GDepthwiseConv\(p4m, 2 -> 2\): padding \(=\(3, 3\)\) with padding_mode 'reflect' takes maps of at least \(4, 4\) cells, got",
    ),
    (lambda: FORGOTTEN[4](2), TypeError, r"GMaxPool: expected a Group .* got 2; the group comes first: GMaxPool\(p4m, 2\)"),
    (lambda: FORGOTTEN[5]((0, 1)), TypeError, r"the group comes first: Restrict\(p4m, \(0, 1\)\)"),
    (lambda: FORGOTTEN[6](16), TypeError, r"the group comes first: GLayerNorm\(p4m, 16\)"),
    (lambda: FORGOTTEN[7](16), TypeError, r"the group comes first: GBatchNorm\(p4m, 16\)"),
    (lambda: build("resnet18", group=3), TypeError, r"build\('resnet18'\): expected a group, such as p4m, or its name, got 3"),
    (lambda: build("p4cnn", group=None), TypeError, "expected a group, such as p4m, or its name, got None"),
    (lambda: planar(ONE), TypeError, "planar: expected a network, an nn.Module, got int"),
    (lambda: LiftConv("P4", 1, 2, 3), TypeError, r"LiftConv: expected a Group .* such as gcnn.GROUPS\['p4'\], got 'P4'"),  # type: ignore[arg-type]
    (lambda: LiftConv(p4, 1, 2, 3)(np.zeros((1, 1, 9, 9))), TypeError, r"LiftConv\(p4, 1 -> 2\): expected a tensor, got ndarray"),
    (lambda: CosetPool(p4)(np.zeros((1, 1, 4))), TypeError, r"CosetPool\(p4\): expected a tensor, got ndarray"),
    (
        lambda: LiftConv(p4, 1, 2, 3)(torch.rand(28, 28, 1)),
        ValueError,
        r"got \(28, 28, 1\); .*one sample: x.movedim\(-1, 0\)\[None\]",
    ),
    (lambda: GBatchNorm(16, 3), TypeError, r"GBatchNorm: expected a Group as the first argument"),  # type: ignore[arg-type]
    (
        lambda: GConv(p4m, 3, 4, 3, groups=2),
        ValueError,
        r"GConv\(p4m, 3 -> 4\): in_channels \(=3\) must be divisible by groups \(=2\)",
    ),
    (lambda: GConv(p4m, 4, 3, 3, groups=2), ValueError, r"out_channels \(=3\) must be divisible by groups \(=2\)"),
    (lambda: GConv(p4m, 0, 3, 3), ValueError, r"in_channels must be a positive whole number, got 0"),
    (lambda: GConv(p4m, 4, 3.0, 3), ValueError, r"out_channels must be a positive whole number, got 3.0"),  # type: ignore[arg-type]
    (
        lambda: GConv(p6, 1, 1, 4),
        ValueError,
        r"GConv\(p6, 1 -> 1\): kernel_size \(4, 4\) has empty support under p6.* use odd and equal",
    ),
    (
        lambda: GConv(p4, 1, 1, (3, 5)),
        ValueError,
        r"kernel_size \(=\(3, 5\)\) must be equal along axes \(0, 1\), which p4 mixes; use \(3, 3\)",
    ),
    (lambda: GConv(p4, 1, 1, (3, 3, 3)), ValueError, r"kernel_size must be a whole number or 2 of them for p4, got \(3, 3, 3\)"),
    (lambda: GConv(p4, 1, 1, 0), ValueError, r"kernel_size \(=\(0, 0\)\) must be at least 1"),
    (
        lambda: GConv(p4, 1, 1, 3, stride=(1, 2)),
        ValueError,
        r"stride \(=\(1, 2\)\) must be equal along axes \(0, 1\), which p4 mixes",
    ),
    (lambda: GConv(p4, 1, 1, 3, dilation=(1, 2)), ValueError, r"dilation \(=\(1, 2\)\) must be equal along axes"),
    (lambda: GConv(p4, 1, 1, 3, padding=(1, 0)), ValueError, r"padding \(=\(1, 0\)\) must be equal along axes"),
    (lambda: GConv(p4, 1, 1, 3, padding=-1), ValueError, r"padding \(=\(-1, -1\)\) must be at least 0"),
    (lambda: GConv(p4, 1, 1, 4, padding="same"), ValueError, r'padding "same" with the even kernel_size .* use an odd kernel'),
    (lambda: GConv(p4, 1, 1, 3, 2, "same"), ValueError, r'padding "same" needs stride 1, got \(2, 2\)'),
    (lambda: GConv(p4, 1, 1, 3, padding="full"), ValueError, r'padding must be whole numbers, "same" or "valid", got \'full\''),
    (lambda: GConv(p4, 1, 1, 3, padding_mode="mirror"), ValueError, r"padding_mode must be .* got 'mirror'"),  # type: ignore[arg-type]
    (lambda: GConv(p6, 1, 1, 3, padding_mode="reflect"), ValueError, r'p6 does not map boxes to boxes; use padding_mode="zeros"'),
    (
        lambda: GConv(p4, 1, 1, 3, stabilizer=(0, 1)),
        ValueError,
        r"GConv\(p4, 1 -> 1\): \(0, 1\) is not a subgroup of p4; .* is \(0, 1, 2, 3\)",
    ),
    (lambda: GConv(p4, 1, 1, 3, stabilizer=(0, 9)), ValueError, r"p4 has elements 0 to 3, got 9"),
    (
        lambda: GConvTranspose(pm, 2, 3, 3, groups=2),
        ValueError,
        r"GConvTranspose\(pm, 2 -> 3\): out_channels \(=3\) must be divisible",
    ),
    (lambda: GConv(p4, 4, 4, 3, groups=0), ValueError, r"GConv\(p4, 4 -> 4\): groups must be a positive whole number, got 0"),
    (lambda: GConv(p4, 4, 4, 3, groups="2"), ValueError, r"groups must be a positive whole number, got '2'"),  # type: ignore[arg-type]
    (lambda: GConv(p4, 4, 4, True), ValueError, r"kernel_size must be a whole number or 2 of them for p4, got True"),
    (
        lambda: GConvTranspose(p4, 2, 2, 3, 2, 1, 1),
        ValueError,
        r"output_padding \(=1\) pads one side only, .* kernel_size 4, stride 2, padding 1",
    ),
    (
        lambda: GConv(p4m, 4, 4, 3)(torch.rand(1, 4, 8, 2, 2)),
        ValueError,
        r"GConv\(p4m, 4 -> 4\): a window of \(3, 3\) cells does not fit a map of \(2, 2\) .* give larger images, or pad more",
    ),
    (
        lambda: GConv(p4m, 64, 64, 3, dilation=2)(torch.rand(1, 64, 8, 4, 4)),
        ValueError,
        r"GConv\(p4m, 64 -> 64\): a window of \(3, 3\) cells does not fit a map of \(4, 4\) with padding \(0, 0\) and dilation \(2, 2\)",
    ),
    (lambda: GMaxPool(p4, 5)(torch.rand(1, 2, 4, 3, 3)), ValueError, r"GMaxPool\(p4\): a window of \(5, 5\) cells does not fit"),
    (
        lambda: GConv(p4, 2, 2, 3)(torch.rand(1, 2, 4, 5, 5).double()),
        ValueError,
        r"GConv\(p4, 2 -> 2\): expected input of its own dtype torch.float32, got torch.float64; use x.to\(torch.float32\)",
    ),
    (
        lambda: GLinear(p4, 2, 3)(torch.rand(1, 2, 4).double()),
        ValueError,
        r"GLinear\(p4, 2 -> 3\): expected input of its own dtype torch.float32, got torch.float64; use x.to\(torch.float32\)",
    ),
    (
        lambda: correlate(p4, torch.rand(1, 8, 5, 5), torch.rand(3, 2, 36), None, (3, 3)),
        ValueError,
        r"correlate: expected a map \(N, K, 4, .* got \(1, 8, 5, 5\); use x.unflatten\(1, \(-1, 4\)\) for planes",
    ),
    (
        lambda: planar_gcorr_transpose(p4, torch.rand(1, 2, 4, 5, 5), torch.rand(8, 12, 3, 3), stride=(1, 2)),
        ValueError,
        r"planar_gcorr_transpose: stride \(=\(1, 2\)\) must be equal along axes \(0, 1\)",
    ),
    (lambda: act(p4, 1, torch.rand(1, 1, 5, 5), (0.5, 0)), ValueError, r"act: p4 translates by 2 integers, got t = \(0.5, 0\)"),  # type: ignore[arg-type]
    (lambda: GLayerNorm(p4, 0), ValueError, r"GLayerNorm\(p4\): num_channels must be a whole number from 1 on, got 0"),
    (lambda: GMaxPool(p4, 3, ceil_mode=True), ValueError, r"GMaxPool\(p4\): ceil_mode lets windows hang over one side"),
    (lambda: GAvgPool(p4, 3, 2, 1, True), ValueError, r"GAvgPool\(p4\): ceil_mode lets windows hang over one side"),
    (
        lambda: CosetPool(p4, ONE),
        ValueError,
        r"CosetPool\(p4\): a subgroup of p4 is a Group or a sequence of indices, such as p4.subgroup\(1\), got 1",
    ),
    (lambda: CosetPool(p4, "max"), ValueError, r"a subgroup of p4 is a Group or a sequence of indices, .* got 'max'"),  # type: ignore[arg-type]
    (
        lambda: GPool(p4, [ONE, ONE]),
        ValueError,
        r"expected pairs \(s, t\) of an element and a translation, such as \(0, \(0, 0\)\), got \[1, 1\]",
    ),
    (lambda: CosetPool(p4, (1, 2)), ValueError, r"CosetPool\(p4\): \(1, 2\) is not a subgroup of p4"),
    (lambda: CosetPool(p4, reduce="sum"), ValueError, r'reduce must be "max" or "mean", got \'sum\''),  # type: ignore[arg-type]
    (lambda: Restrict(p4m, (0, 1)), ValueError, r"Restrict\(p4m\): \(0, 1\) is not a subgroup"),
    (lambda: GPool(p4, []), ValueError, r"GPool\(p4\): pool: expected at least one element \(s, t\) of p4"),
    (lambda: GPool(p4, [(0, (1,))]), ValueError, r"expected a translation of 2 integers"),
    (
        lambda: GMaxPool(p4, 2, padding=2),
        ValueError,
        r"GMaxPool\(p4\): padding \(=\(2, 2\)\) must be at most half of kernel_size",
    ),
    (lambda: GMaxPool(p6, 2), ValueError, r"GMaxPool\(p6\): kernel_size \(2, 2\) has empty support"),
    (lambda: GUpsample(p4), ValueError, r"GUpsample\(p4\): give size or scale_factor, one of the two, got None and None"),
    (lambda: GUpsample(p4, scale_factor=1.5), ValueError, r"scale_factor must be a whole number or 2 of them for p4, got 1.5"),  # type: ignore[arg-type]
    (lambda: GUpsample(p4, 9, mode="cubic"), ValueError, r'mode must be "nearest" or "linear", got \'cubic\''),
    (lambda: GUpsample(p4, 9, align_corners=True), ValueError, r'align_corners \(=True\) is an option of mode="linear"'),
    (lambda: GBatchNorm(p4m, -4), ValueError, r"GBatchNorm\(p4m\): num_features must be a whole number from 1 on, got -4"),
    (lambda: GLinear(p4m, -4, 5), ValueError, r"in_features must be a positive whole number, got -4"),
    (lambda: LiftConv(p4, 1, 2, 3, dtype=torch.int32), ValueError, r"dtype must be a floating point dtype .* got torch.int32"),
    (
        lambda: torch.fx.symbolic_trace(nn.Sequential(LiftConv(p4, 1, 2, 3))),
        TypeError,
        r"got Proxy; torch.fx is to take .* whole",
    ),
    (lambda: GConv(p4m, 2, 3, 3, stabilizer=p4m)(zeros(1, 2, 1, 9, 9)), ValueError, r"is an image: use x.squeeze\(2\)"),
    (lambda: LiftConv(p4, 1, 2, 3, dtype=torch.complex64), ValueError, r"got torch.complex64; take real and imaginary parts as"),
    (lambda: CosetPool(D6, C3), ValueError, r"C3 is of another lattice than D6; subgroups by indices, such as D6.subgroup\(1\)"),
    (lambda: GPool(p4m, ONE), TypeError, r"GPool\(p4m\): domain must list pairs \(s, t\) .* got 1"),
    (lambda: build("unet", group=p4, width=-1), ValueError, r"build\('unet'\): width must be a positive whole number, got -1"),
    (lambda: hexagon(-3), ValueError, r"sizes are 0 or more, got \(-3, -3\)"),
    (lambda: GUpsample(p6, scale_factor=2), ValueError, r'a hexagonal lattice is enlarged by a scale_factor with mode="linear"'),
]


@pytest.mark.parametrize(("build", "kind", "message"), AT_CONSTRUCTION, ids=range(len(AT_CONSTRUCTION)))
def test_bad_arguments(build: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()


IN_FORWARD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: GConv(p4m, 16, 32, 3)(zeros(4, 128, 32, 32)),
        r"GConv\(p4m, 16 -> 32\): expected input \(N, 16, 8, H, W\), got \(4, 128, 32, 32\); use x.unflatten\(1, \(16, 8\)\) if these",
    ),
    (
        lambda: GConv(p4m, 16, 32, 3)(zeros(4, 3, 32, 32)),
        r"got \(4, 3, 32, 32\); an image is lifted to the group by LiftConv first",
    ),
    (
        lambda: GConv(p4m, 16, 32, 3)(zeros(4, 16, 4, 9, 9)),
        r"expected input \(N, 16, 8, H, W\), got \(4, 16, 4, 9, 9\); axis 2 counts the 8 elements of p4m; GConv takes maps over cosets with stabilizer=",
    ),
    (lambda: GConv(p4m, 16, 32, 3)(zeros(4, 8, 8, 9, 9)), r"got \(4, 8, 8, 9, 9\); in_channels is 16"),
    (lambda: LiftConv(p4, 3, 4, 3)(zeros(9, 9, 3)), r"a batch axis is missing if this is one sample: x.movedim\(-1, 0\)\[None\]"),
    (lambda: LiftConv(p4, 3, 4, 3)(zeros(2, 9, 9, 3)), r"got \(2, 9, 9, 3\); its channels come last: use x.movedim\(-1, 1\)"),
    (lambda: LiftConv(p4, 3, 4, 3)(zeros(3, 9, 9)), r"got \(3, 9, 9\); a batch axis is missing if this is one sample: x\[None\]"),
    (
        lambda: GConv(p4, 3, 4, 3)(zeros(3, 4, 9, 9)),
        r"got \(3, 4, 9, 9\); a batch axis is missing if this is one sample: x\[None\]",
    ),
    (lambda: GConv(p4m, 16, 32, 3)(zeros(4, 16, 8, 9)), r"expected input \(N, 16, 8, H, W\), got \(4, 16, 8, 9\)"),
    (lambda: GConv(p4m, 16, 32, 3)(zeros(4, 16, 8, 9, 9, 9)), r"got \(4, 16, 8, 9, 9, 9\); its group p4m has dimension 2"),
    (
        lambda: GConv(Oh, 2, 2, 3)(zeros(4, 2, 9)),
        r"expected input \(N, 2, 48, D, H, W\), got \(4, 2, 9\); its group Oh has dimension 3",
    ),
    (
        lambda: LiftConv(line, 2, 2, 3)(zeros(4, 3, 9)),
        r"LiftConv\(line, 2 -> 2\): expected input \(N, 2, X\), got \(4, 3, 9\); in_channels is 2",
    ),
    (
        lambda: LiftConv(p4, 2, 2, 3)(zeros(1, 2, 4, 9, 9)),
        r"this is a map on a group already: use GConv, or CosetPool to get an image",
    ),
    (
        lambda: GConv(p4, 2, 2, 3, stabilizer=(0, 2))(zeros(1, 2, 4, 9, 9)),
        r"expected input \(N, 2, 2, H, W\), .* axis 2 counts the 2 elements \(cosets\) of p4",
    ),
    (lambda: GConvTranspose(p4, 2, 2, 3)(zeros(1, 2, 9, 9)), r"GConvTranspose\(p4, 2 -> 2\): expected input \(N, 2, 4, H, W\)"),
    (
        lambda: GLinear(p4, 2, 2)(zeros(1, 2, 4, 9, 9)),
        r"GLinear\(p4, 2 -> 2\): expected input \(..., 2, 4\), got .* over space first",
    ),
    (
        lambda: GBatchNorm(p4m, 16)(zeros(2, 128, 9, 9)),
        r"GBatchNorm\(p4m, 16\): expected input \(N, 16, 8, H, W\) or an image \(N, 16, H, W\), got \(2, 128, 9, 9\); use x.unflatten",
    ),
    (lambda: GBatchNorm(p6m, 16)(zeros(2, 4, 12, 9, 9)), r"GBatchNorm\(p6m, 16\): expected input \(N, 16, 12, H, W\)"),
    (lambda: GLayerNorm(p4m, 16)(zeros(2, 16, 3, 9, 9)), r"GLayerNorm\(p4m, 16\): expected input"),
    (
        lambda: CosetPool(p4m)(zeros(2, 16, 4, 9, 9)),
        r"CosetPool\(p4m\): expected input \(N, K, 8, H, W\), got \(2, 16, 4, 9, 9\); a map over cosets is pooled further by x.amax",
    ),
    (
        lambda: CosetPool(p4m)(zeros(2, 16, 9, 9)),
        r"CosetPool\(p4m\): expected input .* use x.unflatten\(1, \(-1, 8\)\) if these are planes",
    ),
    (
        lambda: Restrict(p4m, (0, 2))(zeros(2, 16, 9, 9)),
        r"Restrict\(p4m\): expected input \(N, K, 8, H, W\), got \(2, 16, 9, 9\)",
    ),
    (lambda: GPool(p4, [(0, (0, 0))])(zeros(2, 16, 9, 9)), r"GPool\(p4\): expected input \(N, K, 4, H, W\), got \(2, 16, 9, 9\)"),
    (
        lambda: GSubsample(p4, 2)(zeros(2, 16, 4, 8, 8)),
        r"only if it divides size - 1, got size \(8, 8\); crop or pad by one, or pool",
    ),
    (
        lambda: GSubsample(p4, 2, (0,))(zeros(2, 16, 9, 9)),
        r"GSubsample\(p4\): expected input \(N, K, 4, H, W\), got \(2, 16, 9, 9\)",
    ),
    (
        lambda: GMaxPool(p4, 2)(zeros(2, 9, 9)),
        r"GMaxPool\(p4\): expected input \(N, K, 4, H, W\) or an image \(N, K, H, W\), got \(2, 9, 9\)",
    ),
    (lambda: GAvgPool(p4, 2)(zeros(2, 2, 2, 2, 9, 9)), r"GAvgPool\(p4\): expected input .* p4 has 4 elements and dimension 2"),
    (lambda: GUpsample(p4, size=12)(zeros(2, 2, 9, 9)), r"nearest neighbours from \(9, 9\) to \(12, 12\) favour one side"),
    (
        lambda: GAdaptiveAvgPool(p6, 2)(zeros(2, 2, 9, 9)),
        r"p6 does not map boxes to boxes, so output_size must be 1 along axes \(0, 1\)",
    ),
    (
        lambda: LiftConv(p6, 2, 2, 3)(zeros(2, 2, 8, 8)),
        r"hexagonal lattice of p6 has equal, odd sizes along axes \(0, 1\), got \(8, 8\)",
    ),
    (
        lambda: GMaxPool(p4m, 2)(zeros(2, 3, 5, 8, 8)),
        r"GMaxPool\(p4m\): expected input .*, got \(2, 3, 5, 8, 8\); p4m has 8 elements",
    ),
    (
        lambda: LiftConv(p4, 1, 2, 3)(zeros(2, 1, 20, 20, 20)),
        r"got \(2, 1, 20, 20, 20\); its group p4 has dimension 2, and this looks like a batch of dimension 3",
    ),
    (lambda: LiftConv(linem, 3, 2, 3)(zeros(2, 3, 25, 25)), r"its group linem has dimension 1, .* a batch of dimension 2"),
    (lambda: LiftConv(p4, 1, 2, 3)(zeros(2, 1, 4, 9, 9)), r"this is a map on a group already: use GConv"),
    (lambda: LiftConv(p4, 1, 2, 3)(zeros(2, 1, 9, 9) + 0j), r"got torch.complex64; use x.abs\(\), or x.real and x.imag"),
    (lambda: GBatchNorm(p4m, 8)(zeros(2, 4, 8, 9, 9)), r"got \(2, 4, 8, 9, 9\); it has 4 channels, the norm is of 8"),
    (lambda: GBatchNorm(p4m, 8)(zeros(2, 64, 9, 9)), r"use x.unflatten\(1, \(8, 8\)\) if these are planes"),
    (lambda: GLayerNorm(p4m, 8)(zeros(2, 8, 3, 9, 9)), r"p4m has 8 elements and dimension 2"),
    *(
        (lambda layer=layer: layer(zeros(1, 2, 4, 9, 9).byte()), r"expected floating point numbers, got torch.uint8; use x.float")
        for layer in (GAvgPool(p4, 3), GAdaptiveAvgPool(p4, 1), CosetPool(p4, reduce="mean"))
    ),
    (lambda: GUpsample(p4, scale_factor=3)(zeros(1, 2, 4, 9, 9).long()), r"expected floating point numbers, got torch.int64"),
    (lambda: GMaxPool(p4, 3)(zeros(1, 2, 4, 9, 9).bool()), r"GMaxPool\(p4\): expected floating point numbers, got torch.bool"),
    (
        lambda: to_square(zeros(1, 1, 9, 9), (-1, 3)),
        r"to_square: size must be a positive whole number or two of them, got \(-1, 3\)",
    ),
    (lambda: to_hexagonal(zeros(1, 1, 9, 9), 2), r"must be one odd number, .* got 2"),
    (lambda: GMaxPool(p6m, 3)(zeros(9, 9)), r"GMaxPool\(p6m\): expected input"),
    (lambda: GUpsample(p4m, scale_factor=2)(zeros(2, 3, 3, 8, 8)), r"GUpsample\(p4m\): expected input"),
    (lambda: GAdaptiveAvgPool(p4m, 1)(zeros(2, 3, 3, 8, 8)), r"GAdaptiveAvgPool\(p4m\): expected input"),
    (
        lambda: GMaxPool(p6m, 3, 2, 1)(zeros(2, 2, 47, 47)),
        r"GMaxPool\(p6m\), result: .* got \(24, 24\); bring images to the lattice",
    ),
    (lambda: LiftConv(p6, 2, 2, 3)(zeros(2, 2, 9, 7)), r"hexagonal lattice of p6 has equal, odd sizes"),
    (
        lambda: LiftConv(p6, 2, 2, 3, 2, 1)(zeros(2, 2, 7, 7)),
        r"LiftConv\(p6, 2 -> 2\), result: .* got \(4, 4\); .* be even, as for sizes 4 n \+ 1",
    ),
]


@pytest.mark.parametrize(("call", "message"), IN_FORWARD, ids=range(len(IN_FORWARD)))
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


NAMED = [
    LiftConv(p4, 1, 2, 3),
    GConv(p4, 1, 2, 3),
    GLinear(p4, 1, 2),
    GBatchNorm(p4, 1),
    GLayerNorm(p4, 1),
    GMaxPool(p4, 2),
    GUpsample(p4, scale_factor=2.0),  # type: ignore[arg-type]  # as torch's own layer takes it
    GAdaptiveAvgPool(p4, 1),
    CosetPool(p4),
    Restrict(p4, (0, 2)),
]


@pytest.mark.parametrize("layer", NAMED, ids=lambda layer: type(layer).__name__)
def test_arrays_are_no_tensors(layer: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"{type(layer).__name__}\(p4.*: expected a tensor, got ndarray; use torch.as_tensor\(x\)"
    ):
        layer(zeros(1, 1, 4, 8, 8).numpy())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: act(p4, 1, x.numpy()), r"act\(group, h, x\): expected .* got Group, int, ndarray"),
        (lambda x: act(p4, x, ONE), r"got Group, Tensor, int"),
        (lambda x: act(WORD, 1, x), r"got str, int, Tensor"),
        (lambda x: to_hexagonal(x.numpy()), r"to_hexagonal: expected a tensor, got ndarray"),
        (lambda x: mask_outside(p6, x.numpy()), r"mask_outside: expected a tensor, got ndarray"),
        (lambda x: plot.action(WORD, x[0], 1), r"plot: expected a Group and a tensor, got str and Tensor"),
        (lambda x: save(WORD, x), r"save\(model, path\): expected a network and a path, got str and Tensor"),
        (lambda x: train(Config(), data=x), r"train: expected a Config, and as data a gcnn.data.Dataset, got Config and Tensor"),
    ],
    ids=range(8),
)
def test_functions_say_what_they_take(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(torch.rand(1, 1, 9, 9))


def test_one_number_is_enough_for_square_sizes() -> None:
    assert to_square(to_hexagonal(torch.rand(1, 1, 9, 9)), 7).shape == (1, 1, 7, 7)
    assert torch.equal(domain_mask(p6, 9), domain_mask(p6, (9, 9)))
    nine: Any = np.int64(9)
    assert to_hexagonal(torch.rand(1, 1, 8, 8), nine).shape[-1] == GBatchNorm(p4, nine).num_features == 9


@pytest.mark.skipif(not hasattr(torch.export.Dim, "AUTO"), reason="torch before 2.6")
def test_sizes_may_be_symbolic() -> None:
    class Resamples(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return to_square(to_hexagonal(x, x.shape[-1]), (8, 8))

    auto: Any = torch.export.Dim.AUTO
    exported = torch.export.export(Resamples(), (torch.rand(1, 1, 9, 9),), dynamic_shapes=({2: auto, 3: auto},))
    assert exported.module()(torch.rand(1, 1, 9, 9)).shape == (1, 1, 8, 8)
