"""The kernels in Triton beside the same in plain torch, by Triton's interpreter: run with TRITON_INTERPRET=1, on any machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl

from gcnn import GROUPS
from gcnn.indices import index_table
from gcnn.kernels import expand, fourier, fourier_cuda, fused, gather, image, pool_stats
from gcnn.layout import allows_tf32, as_linear, as_tensor

CPU = torch.device("cpu")


def gathers() -> None:
    """The filter transformation and its adjoint."""
    cases: list[Any] = [("p4m", True, 1, None), ("p4m", False, 1, None), ("p4", True, 2, None), ("p6m", False, 1, None)]
    for name, last, groups, stabilizer in [*cases, ("p4m", True, 1, range(8)), ("O", False, 1, None)]:
        group = GROUPS[name]
        size = (3,) * group.dim
        table, inverse = (as_tensor(t, CPU) for t in index_table(group, size, group.check_subgroup(stabilizer)))
        weight = torch.randn(4, 3, inverse.shape[1])
        for small in (0, 1 << 20):
            gather.SMALL = small
            options = (table, inverse, 3**group.dim, groups, last)
            bank = expand._expand(weight, *options, torch.float64)
            assert torch.equal(gather.expand(weight, *options, torch.float64), bank), name
            ours, theirs = (f(bank, *options, torch.float64) for f in (gather.collect, expand._collect))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def norms() -> None:
    """What is pooled over the planes of a map."""
    k, s, points = 5, 8, 7
    x = torch.randn(points, s * k, dtype=torch.float64) + torch.randn(s * k)
    norm = torch.nn.BatchNorm1d(k).double()
    norm(x.view(-1, k))
    running = torch.zeros(k).double(), torch.ones(k).double()
    means, variances = x.mean(0), x.var(0, correction=0)
    planar, tied = pool_stats.pool_statistics(means, variances, k, points, None, None, 1e-5, running, 0.1)
    torch.testing.assert_close(tied, torch.stack([x.view(-1, k).mean(0), x.view(-1, k).var(0, correction=0)]))
    torch.testing.assert_close(running[0], norm.running_mean)
    torch.testing.assert_close(running[1], norm.running_var)
    torch.testing.assert_close(planar[0].view(s, k)[3], tied[0])
    sums = (means, variances, variances, means)
    planar, tied, count = pool_stats.pool_gradients(sums, k, points)
    torch.testing.assert_close(planar[1].view(s, k)[2], variances.view(s, k).sum(0))
    torch.testing.assert_close(tied[1], means.view(s, k).sum(0))
    assert int(count) == s * points


def transforms() -> None:
    """The Fourier algorithm, in several blocks of points."""
    fourier_cuda.BLOCK = 1 << 12
    cases: list[Any] = [("p4m", 5, 6, ((3, 3), (1, 1), (1, 1), (1, 1))), ("p4", 4, 6, ((3, 3), (2, 2), (1, 1), (1, 1)))]
    cases += [("p6m", 3, 6, ((3, 3), (1, 1), (2, 2), (2, 2))), ("linem", 3, 6, ((3,), (1,), (1,), (1,)))]
    cases += [("T", 2, 4, ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))), ("p4m", 17, 6, ((1, 1), (1, 1), (0, 0), (1, 1)))]
    cases += [("p4", 3, 1, ((1, 1), (1, 1), (0, 0), (1, 1))), ("p4", 3, 1, ((1, 1), (1, 1), (1, 1), (1, 1)))]
    for name, k, size, geometry in cases:
        group = GROUPS[name]
        x = torch.randn(2, group.order * k, *(size,) * group.dim, dtype=torch.float64)
        taps = fourier.make_plan(group, geometry[0]).cells.shape[1]
        weight = torch.randn(k + 1, k, group.order * taps, dtype=torch.float64)
        y = fourier._correlate(group, x, weight, *geometry)
        torch.testing.assert_close(fourier_cuda.correlate(group, x, weight, *geometry), y, rtol=0, atol=1e-11)
        dy = torch.randn_like(y)
        if set(geometry[1]) == {1}:
            back = fourier._correlate(group, y, weight, *geometry, adjoint=True)
            torch.testing.assert_close(
                fourier_cuda.correlate(group, y, weight, *geometry, adjoint=True), back, rtol=0, atol=1e-10
            )
        ours = fourier_cuda.weight_gradient(group, x, dy, weight, *geometry)
        torch.testing.assert_close(ours, fourier._weight_gradient(group, x, dy, weight, *geometry), rtol=0, atol=1e-11)
        if fourier._triton() is not None:  # older versions of Triton never come there
            by_planar = fourier._planar_weight_gradient(group, x, dy, weight, *geometry)
            torch.testing.assert_close(by_planar, ours, rtol=0, atol=1e-11)
        halved = fourier_cuda.correlate(group, x.float(), weight.float(), *geometry)  # float32 in two halves, and in parts
        torch.testing.assert_close(halved.double(), y, rtol=0, atol=1e-4)
        in_parts = fourier_cuda.weight_gradient(group, x.float(), dy.float(), weight.float(), *geometry)
        torch.testing.assert_close(in_parts.double(), ours, rtol=0, atol=1e-4)


def rounding() -> None:
    """Where products are of TF32, patches and filters are rounded to the nearest of its numbers, and no NaN is lost."""
    group, geometry = GROUPS["p4m"], ((3, 3), (1, 1), (1, 1), (1, 1))
    x, weight = torch.randn(2, group.order * 4, 5, 5), torch.randn(4, 4, group.order * 9)
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]  # as GPUs write it
    x[0, 0, 2, 2], weight[1, 2, 0] = nan, nan
    found: dict[bool, list[torch.Tensor]] = {}
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        patches = fourier_cuda.Patches(group, x, *geometry)
        hat = torch.empty(group.order * patches.points * patches.width)
        patches.transformed(0, patches.points, hat)
        found[allowed] = [hat, fourier_cuda.transform_filters(group, weight, (3, 3), x.dtype, False, False)[0]]
    torch.backends.cudnn.allow_tf32 = False
    for exact, rounded in zip(*found.values(), strict=True):
        assert exact.isnan().any()
        assert torch.equal(exact.isnan(), rounded.isnan())
        assert (rounded.view(torch.int32) & 0x1FFF)[~rounded.isnan()].eq(0).all()
        scale = torch.frexp(exact).exponent  # 11 bits: the last is worth 2^(e - 11)
        far = torch.ldexp((exact - rounded).double(), 11 - scale).abs()
        assert 0.49 < far[~far.isnan()].max() <= 0.5


def fused_transforms() -> None:
    """The Fourier algorithm in one kernel, and the sums and differences it is made of."""
    for group in GROUPS.values():
        found = fused.code(group)
        if found is None:
            continue
        x, constants = torch.randn(group.order, 7, dtype=torch.float64), found[0]
        matrix = as_tensor(fourier.make_plan(group, (1,) * group.dim).matrix, CPU)
        signs = matrix.sign() * (matrix.abs() > 1e-9)
        transforms: Any = ((constants.steps, constants.coefficients, signs), (constants.back, constants.elements, signs.mT))
        for steps, ends, expected in transforms:
            numbers = list(x)
            for i, j, sign in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
                numbers.append(numbers[i] + sign * numbers[j] if sign else -numbers[i])
            torch.testing.assert_close(torch.stack([numbers[end] for end in ends]), expected @ x)
    cases: list[Any] = [("p4m", 20, 8, (3, 1, 1, 1)), ("p4", 32, 33, (1, 1, 0, 1)), ("D4", 16, 4, (3, 2, 1, 1))]
    for name, k_in, k_out, geometry in [
        *cases,
        ("cm", 8, 4, (2, 1, 1, 2)),
        ("linem", 4, 4, (3, 1, 1, 1)),
        ("C4h", 4, 4, (1, 1, 0, 1)),
    ]:
        group = GROUPS[name]
        sizes = [(n,) * group.dim for n in geometry]
        taps = fourier.make_plan(group, sizes[0]).cells.shape[1]
        x, weight = torch.randn(2, group.order * k_in, *(5,) * group.dim), torch.randn(k_out, k_in, group.order * taps)
        y = fourier._correlate(group, x, weight, *sizes)
        torch.testing.assert_close(fused.correlate(group, x, weight, *sizes), y, rtol=0, atol=1e-4)
        if geometry[1] == 1 and k_out % 4 == 0:
            back = fourier._correlate(group, y, weight, *sizes, adjoint=True)
            torch.testing.assert_close(fused.correlate(group, y, weight, *sizes, adjoint=True), back, rtol=2e-6, atol=1e-3)


def filters_of_points() -> None:
    """The transformed filters of 1x1 layers, by what `gcnn.kernels.pointwise` makes of them; Gluon has no interpreter."""
    try:
        from gcnn.kernels import pointwise
    except ImportError:  # an older Gluon
        return
    tl.extra.cuda.gdc_launch_dependents = lambda **_: None
    for name, k_out, adjoint in (("p4m", 40, False), ("p4m", 72, True), ("D2h", 8, False), ("p4", 40, True), ("cm", 200, False)):
        group = GROUPS[name]
        found = fused.code(group)
        assert found is not None
        one, (code, _), s = (1,) * group.dim, found, group.order
        weight = torch.randn(*((32, k_out) if adjoint else (k_out, 32)), s) * torch.randn(1 if adjoint else k_out, 1, 1).exp()
        x = torch.randn(7, s, 32, dtype=torch.double)
        exact = fourier._correlate(
            group, x.reshape(7, -1, *one), weight.double(), one, one, (0,) * group.dim, one, adjoint=adjoint
        )
        for dtype, each in ((torch.float16, 4), (torch.bfloat16, 8)):
            single, paired, largest = pointwise.transform_filters(group, weight, adjoint, dtype)
            seen = _sums(list(x.unbind(1)), code.steps)
            hats = [seen[c] for c in code.coefficients]
            results = [hat @ w.double() for hat, w in zip(hats, single, strict=False)]
            for n, pair in enumerate(range(len(single), s, 2)):
                rows = paired[n // code.times[-1] * 2 :][:2].double()  # (2, K_in, 32 channels of each column in turns)
                product = torch.cat(hats[pair : pair + 2], 1) @ rows.flatten(0, 1)
                results += product.unflatten(1, (-1, 2, 32)).movedim(2, 0).flatten(2)
            results = _sums(results, code.back)
            y = torch.stack([results[e] for e in code.elements], 1)  # (7, S, places)
            # places 8 j + 2 t + r: register r of thread t in the j-th part of the product; each thread gets 16 bytes in a row
            y = y.unflatten(2, (-1, 8 // each, each // 2, 4, 2)).movedim(5, 4).flatten(2)[..., :k_out]
            if dtype == torch.float16:
                y = y * torch.exp2(torch.floor(torch.log2(largest.double())) - 11)
            error = (y - exact.view(y.shape)).norm(dim=(0, 1)) / exact.view(y.shape).norm(dim=(0, 1))
            assert error.max() < (1e-3 if dtype == torch.float16 else 8e-3), (name, k_out, dtype, error.max())


def sums_of_points() -> None:
    """The gradient of the filters of 1x1 layers, from sums of products that `gcnn.kernels.pointwise_filters` adds up."""
    try:
        from gcnn.kernels import pointwise_filters
    except ImportError:  # an older Gluon
        return
    for name, k_in, k_out, parts in (("p4m", 8, 40, 11), ("D2h", 5, 33, 1), ("p4", 3, 8, 9), ("cm", 4, 64, 8)):
        group = GROUPS[name]
        found = fused.code(group)
        assert found is not None
        code, s, one = found[0], group.order, (1,) * group.dim
        x, dy = torch.randn(parts * 5, s, k_in), torch.randn(parts * 5, s, k_out)
        weight = torch.empty(k_out, k_in, s)
        hats, wanted = (_sums(list(rows.unbind(1)), code.steps) for rows in (x, dy))
        entries = []
        for source, target, degree, times in zip(code.source, code.target, code.degree, code.times, strict=True):
            places = [code.coefficients[source + n * degree] for n in range(times)]
            others = [code.coefficients[target + n * degree] for n in range(times)]
            left = torch.cat([hats[place].view(parts, 5, -1) for place in places], 1)
            right = torch.cat([wanted[place].view(parts, 5, -1) for place in others], 1)
            entries.append(left.mT @ right)
        ours = pointwise_filters.from_sums(group, torch.stack(entries, 1), weight)
        planes, grad = (rows.reshape(len(rows), -1, *one).double() for rows in (x, dy))
        exact = fourier._weight_gradient(group, planes, grad, weight.double(), one, one, (0,) * group.dim, one)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


def _sums(numbers: list[torch.Tensor], steps: tuple[int, ...]) -> list[torch.Tensor]:
    for a, b, sign in zip(*(steps[i::3] for i in range(3)), strict=True):
        numbers.append(numbers[a] + sign * numbers[b] if sign else -numbers[a])
    return numbers


def precisions() -> None:
    """Products are as precise as the layer is to be while somebody multiplies; torch's settings are then as before."""
    matmul: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    newer = hasattr(matmul, "fp32_precision")
    convolutions.allow_tf32, matmul.allow_tf32 = True, False
    with fourier_cuda.PRECISION, fourier_cuda.PRECISION:
        assert matmul.fp32_precision == "tf32" if newer else matmul.allow_tf32
    assert not matmul.allow_tf32
    convolutions.allow_tf32 = False
    for word in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(word)
        with fourier_cuda.PRECISION:
            assert matmul.fp32_precision != "tf32" if newer else not matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == word
    torch.set_float32_matmul_precision("highest")
    convolutions.allow_tf32 = True  # as torch has it at first: convolutions may, products may not
    assert allows_tf32()
    with as_linear(True):
        assert not allows_tf32()
        with fourier_cuda.PRECISION:
            assert matmul.fp32_precision != "tf32" if newer else not matmul.allow_tf32
        with as_linear(False):
            assert allows_tf32()
    assert allows_tf32()
    if newer:
        for ours, theirs, inside in (
            ("none", "ieee", "none"),
            ("none", "tf32", "tf32"),
            ("ieee", "tf32", "tf32"),
            ("tf32", "ieee", "ieee"),  # mixed: to read allow_tf32 raises
        ):
            matmul.fp32_precision, convolutions.conv.fp32_precision = ours, theirs
            with fourier_cuda.PRECISION:
                assert matmul.fp32_precision == inside
            assert matmul.fp32_precision == ours


def products() -> None:
    """What each half of a number gives, and what points give that are divided among programs."""
    x, w = torch.randn(3, 130, 36), torch.randn(3, 20, 36)
    high = (w.view(torch.int32) & -0x2000).view(torch.float32)
    out = torch.empty(3, 130, 20)
    fourier_cuda.exact_product(x, torch.stack([high, w - high])[0], out, w.numel())
    torch.testing.assert_close(out, x @ w.mT, rtol=0, atol=1e-5)
    y, total = torch.randn(3, 130, 8), torch.ones(3, 36, 8)
    fourier_cuda.add_product(total, x, y)
    torch.testing.assert_close(total, 1 + x.mT @ y, rtol=0, atol=1e-4)


def images() -> None:
    """The gradient of filters on images, beside that of torch's convolutions."""
    cases: list[Any] = [(1, 3, 5, 1, 2, 1), (2, 3, 3, 1, 1, 1), (2, 1, 3, 2, 0, 1), (2, 2, 2, 1, 2, 2), (3, 1, 3, 1, 1, 1)]
    for dim, k, n, stride, padding, dilation in cases:
        x, size = torch.randn(3, k, *(9, 8, 7)[:dim]), (n,) * dim
        weight, bias = torch.randn(70, k, *size, requires_grad=True), torch.zeros(70, requires_grad=True)
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[dim - 1]
        y = convolve(x, weight, bias, stride, padding, dilation)
        dy = torch.randn_like(y)
        expected = torch.autograd.grad(y, (weight, bias), dy)
        for grad in (dy, dy.movedim(1, -1).contiguous().movedim(-1, 1), dy.expand(2, *dy.shape)[1].mT.contiguous().mT):
            found = image.bank_gradient(grad, x, size, *((each,) * dim for each in (stride, padding, dilation)))
            torch.testing.assert_close(found[0], expected[0].flatten(2), rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    gathers()
    norms()
    transforms()
    rounding()
    fused_transforms()
    products()
    images()
    filters_of_points()
    sums_of_points()
    precisions()
    print("all kernels agree")
