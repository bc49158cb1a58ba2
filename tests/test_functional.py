"""L_g, the involution and the G-correlation against roads that share no code with them.

The references are torch.rot90 and flip, and a brute-force loop over the sums of eq. 10 and 11 in which every group element
is a homogeneous matrix. There coordinates are doubled, so that the same loop serves even kernels.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import ALL, every_group, feature_map, some_groups, space
from gcnn import GROUPS, Group, Oh, line, p3, p4, p4m, p6, p6m
from gcnn.functional import act, avg_pool, correlate, gconv, gcorr, involution, max_pool, transform_filter, upsample
from gcnn.indices import index_table, support
from gcnn.kernels.expand import _collect, _expand, numbers_of
from gcnn.lattice import domain_mask, mask_outside
from gcnn.layout import as_tensor
from gcnn.nn import GConv

CPU = torch.device("cpu")

# --- L_g -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(5, 5), (4, 4), (4, 7)])
def test_act_on_planes_is_rot90_and_flip(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    for m, r in itertools.product(range(2), range(4)):
        expected = torch.rot90(x, r, (-2, -1))
        expected = expected.flip(-2) if m else expected
        assert torch.equal(act(p4m, m * 4 + r, x), expected)
        assert torch.equal(act(p4, r, x), torch.rot90(x, r, (-2, -1)))


def test_act_on_p4_maps_turns_and_moves_the_patches() -> None:
    """Figure 1: each patch follows its arrow (r becomes r + 1) and turns by 90 degrees."""
    x = torch.randn(2, 3, 4, 5, 5)
    assert torch.equal(act(p4, 1, x), torch.rot90(x, 1, (-2, -1)).roll(1, 2))


def test_act_shifts_with_zero_fill() -> None:
    x = torch.randn(1, 1, 4, 5)
    shifted = act(p4, 0, x, (1, -2))
    assert torch.equal(shifted[..., 1:, :3], x[..., :-1, 2:])
    assert not shifted[..., :1, :].any()
    assert not shifted[..., 3:].any()


def test_act_of_the_octahedral_group_is_flips_and_transposes() -> None:
    x = torch.randn(1, 1, 3, 4, 5)
    for h, m in enumerate(Oh.arrays):
        source = [int(np.flatnonzero(row)[0]) for row in m]  # output axis i reads input axis source[i]
        expected = x.permute(0, 1, *(2 + j for j in source))
        flipped = [2 + i for i, j in enumerate(source) if m[i, j] < 0]
        assert torch.equal(act(Oh, h, x), expected.flip(flipped))


def test_act_on_a_hexagonal_lattice_turns_by_60_degrees() -> None:
    """A single cell goes where a rotation of the plane takes its centre."""
    n, step = 7, np.array([[np.sqrt(3) / 2, 0], [0.5, 1.0]])  # (row, column) of a cell from its axial coordinates
    turn = np.array([[np.cos(np.pi / 3), -np.sin(np.pi / 3)], [np.sin(np.pi / 3), np.cos(np.pi / 3)]])
    for a, b in np.argwhere(support(p6, (n, n))):
        x = torch.zeros(1, 1, n, n)
        x[0, 0, a, b] = 1
        i, j = (int(v) for v in act(p6, 1, x)[0, 0].nonzero()[0])
        assert np.allclose(step @ [i - 3, j - 3], turn @ step @ [a - 3, b - 3])


def spot(group: Group, size: tuple[int, ...], margin: int, fibre: int) -> Tensor:
    """A map that is zero near the border, so that nothing falls off it."""
    x = torch.randn(1, 2, *((fibre,) if fibre else ()), *size)
    return torch.nn.functional.pad(mask_outside(group, x), [margin] * 2 * group.dim)


@given(st.sampled_from(ALL), st.data())
@settings(max_examples=200, deadline=None)
def test_act_is_a_homomorphism(group: Group, data: st.DataObject) -> None:
    """L_g L_h = L_gh (eq. 5) for g, h with translations, on planes, maps and cosets of any size, oblong ones too."""
    side = st.integers(1, 7 if group.dim < 3 else 3)
    sides = {axes: data.draw(side) for axes in group.axis_classes}
    if group.fills_box and data.draw(st.booleans()):  # axes that the group mixes may differ too: they change places
        size = tuple(data.draw(side) for _ in range(group.dim))
    else:
        size = tuple(2 * (n // 2) + 1 if not group.fills_box else n for axes, n in sides.items() for _ in axes)
    stabilizer = data.draw(st.sampled_from(group.subgroups()))
    fibre = data.draw(st.sampled_from((0, group.order // len(stabilizer))))
    element = st.tuples(st.integers(0, group.order - 1), st.tuples(*[st.integers(-2, 2)] * group.dim))
    (a, t), (b, u) = data.draw(element), data.draw(element)
    x = spot(group, size, 8 if not group.fills_box else 4, fibre)
    c, v = group.decode(group.matrix(a, t) @ group.matrix(b, u))
    both = act(group, a, act(group, b, x, u, stabilizer), t, stabilizer)
    assert x.any()
    assert torch.equal(both, act(group, c, x, v, stabilizer))


def pick(x: Tensor, s: int, place: tuple[int, ...]) -> Tensor:
    """The values (N, K) of a map at an element and a place."""
    at: tuple[int | slice, ...] = (slice(None), slice(None), s, *place)
    return x[at]


@every_group
def test_involution(group: Group) -> None:
    f = feature_map(group)
    star = involution(group, f)
    assert torch.equal(involution(group, star), f)
    # f*(g) = f(g^-1), by homogeneous matrices
    size = space(group, 5)
    half = [n // 2 for n in size]
    for s in range(group.order):
        for place in itertools.product(*(range(n) for n in size)):
            if not support(group, size)[place]:
                continue
            g = group.matrix(s, [u - c for u, c in zip(place, half, strict=True)])
            k, t = group.decode(np.rint(np.linalg.inv(g)).astype(int))
            source = tuple(u + c for u, c in zip(t, half, strict=True))
            assert torch.equal(pick(star, s, place), pick(f, k, source))
        if group.dim == 3 and s > 3:
            break


def test_involution_of_a_plane_is_the_point_reflection() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(involution(p4, x), x.flip(-1, -2))


# --- the G-correlation by brute force ------------------------------------------------------------------------------------


def doubled(size: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(place, doubled coordinates from the centre) of every cell of a box."""
    return [(p, tuple(2 * u - (n - 1) for u, n in zip(p, size, strict=True))) for p in itertools.product(*map(range, size))]


def brute_force(group: Group, f: Tensor, psi: Tensor, stabilizer: tuple[int, ...], out: tuple[int, ...]) -> Tensor:
    """[f * psi](g) = sum_h f(h) psi(g^-1 h), g over G and h over G/K, every element a homogeneous matrix; one channel."""
    labels = group.cosets(stabilizer)
    first = {int(c): int(np.flatnonzero(labels == c)[0]) for c in labels}

    def coset(matrix: Any) -> tuple[Any, ...]:
        """A name for g K that is the same for all its elements."""
        return (tuple(matrix[:-1, -1].tolist()), min((matrix[:-1, :-1] @ group.arrays[k]).tobytes() for k in stabilizer))

    def value(x: Tensor, *at: int) -> float:
        return float(x[at])

    filters = {
        coset(group.matrix(first[c], u)): value(psi, c, *p)
        for c in range(len(first))
        for p, u in doubled(tuple(psi.shape[1:]))
        if support(group, tuple(psi.shape[1:]))[p]
    }
    domain = [(group.matrix(first[c], u), value(f, c, *p)) for c in range(len(first)) for p, u in doubled(tuple(f.shape[1:]))]
    matrices = np.array([m for m, value in domain if value != 0])
    values = [value for _, value in domain if value != 0]
    result = torch.zeros(group.order, *out, dtype=torch.float64)
    for s in range(group.order):
        for place, t in doubled(out):
            inverse = np.rint(np.linalg.inv(group.matrix(s, t))).astype(np.int64)
            moved = inverse @ matrices
            at = (s, *place)
            result[at] = sum(v * filters.get(coset(m), 0.0) for m, v in zip(moved, values, strict=True))
    return result


def small(group: Group, kernel: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes of map, filter and result that a loop can afford."""
    n = kernel if group.dim == 3 else kernel + 2
    return (n,) * group.dim, (kernel,) * group.dim, (n - kernel + 1,) * group.dim


@every_group
@pytest.mark.parametrize("kernel", [2, 3])
def test_gcorr_is_the_sum_over_the_group(group: Group, kernel: int) -> None:
    """Equations 10 (stabilizer = the point group), 11 (stabilizer = the identity) and maps on cosets between."""
    if kernel == 2 and not group.fills_box:
        pytest.skip("even kernels have no support on a hexagonal lattice")
    kernel = 1 if group.order > 24 and kernel == 2 else kernel
    whole = tuple(range(group.order))
    between = [h for h in group.subgroups() if 1 < len(h) < group.order]
    for stabilizer in [(0,), whole, *between[len(between) // 2 : len(between) // 2 + 1]]:
        size, taps, out = small(group, kernel)
        cosets = group.order // len(stabilizer)
        f = mask_outside(group, torch.randn(cosets, *size, dtype=torch.float64))
        psi = torch.randn(cosets, *taps, dtype=torch.float64)
        expected = mask_outside(group, brute_force(group, f, psi, stabilizer, out))
        planar = cosets == 1 and stabilizer == whole
        x, w = (f[None], psi[None]) if planar else (f[None, None], psi[None, None])
        found = gcorr(group, x, w, stabilizer=None if planar else stabilizer)
        torch.testing.assert_close(found[0, 0], expected, rtol=0, atol=1e-12)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize("name", ["linem", "p4", "p31m", "p4m", "D3"])
def test_gconv_is_the_sum_over_the_group(name: str) -> None:
    """[f conv psi](g) = sum_h f(h) psi(h^-1 g), every element a homogeneous matrix."""
    group = GROUPS[name]
    size, taps, out = small(group, 3)
    f, psi = (mask_outside(group, torch.randn(group.order, *n, dtype=torch.float64)) for n in (size, taps))

    def elements(x: Tensor) -> dict[bytes, float]:
        places = [(s, p, u) for s in range(group.order) for p, u in doubled(tuple(x.shape[1:]))]
        return {group.matrix(s, u).tobytes(): float(x[s][p]) for s, p, u in places if x[s][p] != 0}

    filters = elements(psi)
    expected = torch.zeros(group.order, *out, dtype=torch.float64)
    for key, value in elements(f).items():
        inverse = np.rint(np.linalg.inv(np.frombuffer(key, np.int64).reshape(group.dim + 1, -1))).astype(np.int64)
        for s in range(group.order):
            for place, t in doubled(out):
                expected[s][place] += value * filters.get((inverse @ group.matrix(s, t)).tobytes(), 0.0)
    found = gconv(group, f[None, None], psi[None, None])[0, 0]
    torch.testing.assert_close(found, mask_outside(group, expected), rtol=0, atol=1e-12)


def test_gcorr_sums_channels_and_adds_one_bias_a_map() -> None:
    f, psi, bias = torch.randn(2, 3, 8, 5, 5), torch.randn(4, 3, 8, 3, 3), torch.randn(4)
    expected = sum(gcorr(p4m, f[:, k : k + 1], psi[:, k : k + 1]) for k in range(3)) + bias[:, None, None, None]
    torch.testing.assert_close(gcorr(p4m, f, psi, bias), expected, rtol=1e-4, atol=1e-5)


def test_lifting_with_p4_is_correlation_with_turned_filters() -> None:
    x, psi = torch.randn(2, 3, 9, 9).double(), torch.randn(4, 3, 3, 3).double()
    for m, r in itertools.product(range(2), range(4)):
        turned = torch.rot90(psi, r, (-2, -1))
        turned = turned.flip(-2) if m else turned
        expected = torch.nn.functional.conv2d(x, turned)
        torch.testing.assert_close(gcorr(p4m, x, psi)[:, :, m * 4 + r], expected)


def test_without_symmetry_gcorr_is_the_planar_correlation() -> None:
    x, psi = torch.randn(2, 3, 9), torch.randn(4, 3, 3)
    torch.testing.assert_close(gcorr(line, x, psi)[:, :, 0], torch.nn.functional.conv1d(x, psi))


# --- the calculus of Appendix C ------------------------------------------------------------------------------------------


@every_group
def test_exchanging_map_and_filter_is_the_involution(group: Group) -> None:
    """F * psi = (psi * f)* (section 6.1)."""
    size, taps = (5 if group.dim < 3 else 3), 3
    f = mask_outside(group, torch.randn(1, 1, group.order, *(size,) * group.dim, dtype=torch.float64))
    psi = mask_outside(group, torch.randn(1, 1, group.order, *(taps,) * group.dim, dtype=torch.float64))
    one = gcorr(group, f, psi, padding=taps - 1)
    other = involution(group, gcorr(group, psi, f, padding=size - 1))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@every_group
def test_gradients_are_those_of_the_paper(group: Group) -> None:
    """Appendix C: dL/df = dL/dy * psi^* (G-correlation with the involution); dL/dpsi = (dL/dy)^* G-convolved with f."""
    n = 5 if group.dim < 3 else 3
    f = mask_outside(group, torch.randn(1, 2, group.order, *(n,) * group.dim, dtype=torch.float64)).requires_grad_()
    psi = mask_outside(group, torch.randn(3, 2, group.order, *(3,) * group.dim, dtype=torch.float64)).requires_grad_()
    y = gcorr(group, f, psi, padding=2)  # all of it: n + 2 cells, channels 2 -> 3
    dy = mask_outside(group, torch.randn_like(y))
    y.backward(dy)
    assert f.grad is not None
    assert psi.grad is not None
    df = gcorr(group, dy, involution(group, psi.detach()).transpose(0, 1))  # psi_j: the filters of input channel j
    torch.testing.assert_close(f.grad, df, rtol=0, atol=1e-10)
    # (dL/dy)^* has n + 2 cells, f has n: the correlation over all shifts has 2 n + 1 cells, the middle 3 are psi's
    full = gconv(group, involution(group, dy).transpose(0, 1), f.detach().transpose(0, 1), padding=n - 1)
    cut = slice((full.shape[-1] - 3) // 2, (full.shape[-1] + 3) // 2)
    dpsi = mask_outside(group, full[(slice(None),) * 3 + (cut,) * group.dim])
    torch.testing.assert_close(psi.grad, dpsi, rtol=0, atol=1e-10)


# --- the filter transformation -------------------------------------------------------------------------------------------


@every_group
def test_transform_filter_is_act_on_filters(group: Group) -> None:
    """The bank is L_s psi for every s (section 7.1)."""
    psi = mask_outside(group, torch.randn(2, 3, group.order, *(3,) * group.dim))
    mask = support(group, (3,) * group.dim)
    weight = psi.flatten(-group.dim)[..., torch.from_numpy(mask.copy()).flatten()].flatten(2)
    bank = transform_filter(group, weight, (3,) * group.dim).unflatten(1, (-1, 3)).unflatten(0, (-1, 2)).movedim((0, 2), (1, 3))
    for s in range(group.order):
        assert torch.equal(bank[:, s], act(group, s, psi))


@every_group
def test_support_is_the_largest_invariant_part(group: Group) -> None:
    for n in (1, 2, 3, 4, 5):
        size = (n,) * group.dim
        cells = {u for _, u in doubled(size)}
        while True:  # throw out what the group moves out, until nothing moves out
            kept = {u for u in cells if all(tuple((m @ u).tolist()) in cells for m in group.arrays)}
            if kept == cells:
                break
            cells = kept
        assert {u for p, u in doubled(size) if support(group, size)[p]} == cells
        if group.fills_box or n % 2:
            assert np.array_equal(domain_mask(group, size).numpy(), support(group, size))
    assert support(p6, (5, 5)).sum() == 19
    assert support(p3, (3, 3)).sum() == 7
    assert support(p4, (4, 4)).all()


def test_tables_are_permutations_and_inverse_to_each_other() -> None:
    for group in ALL:
        table, inverse = index_table(group, (3,) * group.dim)
        q = inverse.shape[1]
        for h in range(group.order):
            assert sorted(table[h][table[h] < q].tolist()) == list(range(q))
            assert np.array_equal(table[h][inverse[h]], np.arange(q))


@some_groups
def test_gradcheck(group: Group) -> None:
    n = 3 if group.dim == 3 else 5
    x = torch.randn(1, 2, group.order, *(n,) * group.dim, dtype=torch.float64, requires_grad=True)
    psi = torch.randn(1, 2, group.order, *(3,) * group.dim, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: gcorr(group, *a), (x, psi, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: gcorr(group, *a), (x, psi, bias), fast_mode=True)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("group", [g for g in ALL if g.fills_box], ids=str)
def test_filters_are_expanded_number_by_number_as_by_rows(group: Group, groups: int) -> None:
    """Both ways, for maps and for images: the indices that small layers take on GPUs, on the CPU."""
    size, cells = (3,) * group.dim, 3**group.dim
    for stabilizer in (None, range(group.order)):
        table, inverse = (as_tensor(t, CPU) for t in index_table(group, size, group.check_subgroup(stabilizer)))
        weight = torch.randn(4, 3, inverse.shape[1], dtype=torch.float64)
        forth, back = numbers_of(table, inverse, weight, cells, groups)
        for channels_last in (True, False):
            options = (table, inverse, cells, groups, channels_last, torch.float64)
            bank = _expand(weight, *options)
            assert torch.equal(_expand(weight, *options, forth), bank)
            copies = torch.randn_like(bank).unflatten(2, size)
            torch.testing.assert_close(_collect(copies, *options, back), _collect(copies, *options))


@some_groups
def test_gradcheck_of_the_filter_transformation(group: Group) -> None:
    taps = index_table(group, (3,) * group.dim)[1].shape[1]
    weight = torch.randn(1, 2, taps, dtype=torch.float64, requires_grad=True)

    def transform(w: Tensor) -> Tensor:
        return transform_filter(group, w, (3,) * group.dim)

    assert torch.autograd.gradcheck(transform, weight, fast_mode=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(transform, weight, fast_mode=True)


def test_backward_is_a_gather() -> None:
    """The gradient of the filter transformation has no scatter in it (Appendix B, better), and repeats bit for bit."""
    weight = torch.randn(4, 3, 72, requires_grad=True)
    with torch.profiler.profile() as profile:
        transform_filter(p4m, weight, (3, 3)).square().sum().backward()
    called = {event.key for event in profile.key_averages()}
    assert "gcnn::collect" in called
    assert not {"aten::index_add_", "aten::scatter_add_", "aten::index_put_", "aten::_index_put_impl_"} & called
    assert not {name for name in called if "scatter" in name or "index_put" in name or "index_add" in name}
    first = weight.grad
    weight.grad = None
    transform_filter(p4m, weight, (3, 3)).square().sum().backward()
    assert first is not None
    assert weight.grad is not None
    assert torch.equal(first, weight.grad)


# --- errors --------------------------------------------------------------------------------------------------------------


def test_wrong_arguments_say_why() -> None:
    x = torch.randn(1, 2, 4, 5, 5)
    with pytest.raises(ValueError, match=r"act: expected an image \(N, K, H, W\) or a map \(N, K, 8, H, W\) on p4m, got"):
        act(p4m, 1, x)
    with pytest.raises(ValueError, match="stabilizer= for a map over cosets"):
        gcorr(p4m, x, torch.randn(1, 2, 4, 3, 3))
    with pytest.raises(ValueError, match="p4 translates by 2 integers"):
        act(p4, 1, x, (1,))
    with pytest.raises(ValueError, match=r"gcorr: expected filters on the domain of x, 5 axes like x, got psi \(1, 2, 3, 3\)"):
        gcorr(p4, x, torch.randn(1, 2, 3, 3))
    with pytest.raises(ValueError, match=r"gconv: expected maps on the group, \(N, K, 4, ...\)"):
        gconv(p4, torch.randn(1, 2, 5, 5), torch.randn(1, 2, 3, 3))
    with pytest.raises(ValueError, match=r"expects a weight \(K_out, K_in, 36\), got \(4, 2, 9\)"):
        transform_filter(p4, torch.randn(4, 2, 9), (3, 3))
    with pytest.raises(ValueError, match=r"size of the map \(=\(4, 5\)\) must be equal along axes \(0, 1\), which p4 mixes"):
        involution(p4, torch.randn(1, 1, 4, 4, 5))
    with pytest.raises(ValueError, match=r"hexagonal lattice of p6m has equal, odd sizes along axes \(0, 1\), got \(4, 4\)"):
        act(p6m, 1, torch.randn(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"involution: a map on the hexagonal lattice of p6m has equal, odd sizes"):
        involution(p6m, torch.randn(1, 1, 12, 4, 4))
    image, psi = torch.randn(1, 1, 9, 9), torch.randn(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"gcorr: the size of psi \(=\(3, 5\)\) must be equal along axes \(0, 1\)"):
        gcorr(p4, image, torch.randn(1, 1, 3, 5))
    with pytest.raises(ValueError, match=r"gcorr: stride \(=\(1, 2\)\) must be equal along axes \(0, 1\)"):
        gcorr(p4, image, psi, stride=(1, 2))
    with pytest.raises(ValueError, match=r'padding "same" with the even kernel_size \(=\(4, 4\)\) pads one side more'):
        gcorr(p4, image, torch.randn(1, 1, 4, 4), padding="same")
    with pytest.raises(ValueError, match=r"max_pool: kernel_size \(=\(3, 2\)\) must be equal"):
        max_pool(p4, image, (3, 2))
    with pytest.raises(ValueError, match=r"avg_pool: stride \(=\(1, 2\)\) must be equal"):
        avg_pool(p4, image, 3, (1, 2))
    with pytest.raises(ValueError, match=r"mode must be"):
        upsample(p4, image, scale_factor=2, mode="cubic")
    with pytest.raises(ValueError, match=r"kernel_size \(2, 2\) has empty support under p6"):
        gcorr(GROUPS["p6"], torch.randn(1, 1, 5, 5), torch.randn(1, 1, 2, 2))


def test_tables_of_a_layer_spare_nothing_but_checks() -> None:
    layer, x = GConv(p4, 4, 6, 3), torch.rand(2, 4, 4, 9, 9)
    whole = correlate(p4, x, layer.weight, None, (3, 3), padding="same")
    torch.testing.assert_close(correlate(p4, x, layer.weight, None, (3, 3), padding="same", tables=layer.tables), whole)
    torch.testing.assert_close(correlate(p4, x, layer.weight, None, (3, 3), 1, 1, 1, tables=layer.tables), whole)


def test_a_stabilizer_is_read_once() -> None:
    x, weight = torch.rand(1, 2, 2, 5, 5), torch.rand(3, 2, 2 * 9)
    once = correlate(p4, x, weight, None, (3, 3), stabilizer=iter((0, 2)))
    assert torch.equal(once, correlate(p4, x, weight, None, (3, 3), stabilizer=(0, 2)))
