"""The group axioms, the identity of every named group, and the errors of what is no group."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import ALL, every_group
from gcnn import GROUPS, Group, O, Oh, generate, p3m1, p4, p4m, p6m, p31m, pm
from gcnn.groups import HEXAGONAL, PRISM

elements = st.sampled_from(ALL).flatmap(
    lambda g: st.tuples(
        st.just(g),
        *[st.tuples(st.integers(0, g.order - 1), st.tuples(*[st.integers(-9, 9)] * g.dim)) for _ in range(3)],
    )
)


@given(elements)
@settings(max_examples=300, deadline=None)
def test_axioms_with_translations(drawn: Any) -> None:
    group, *pairs = drawn
    a, b, c = (group.matrix(*p) for p in pairs)
    for p, m in zip(pairs, (a, b, c), strict=True):
        assert group.decode(m) == p
    s, t = group.decode(a @ b)  # closed: the product has indices again
    assert s == group.product[pairs[0][0], pairs[1][0]]
    assert np.array_equal((a @ b) @ c, a @ (b @ c))
    s, t = pairs[0]
    inverse = group.matrix(int(group.inverse[s]), [-int(u) for u in group.arrays[group.inverse[s]] @ t])
    assert np.array_equal(a @ inverse, group.matrix(0))
    assert np.array_equal(inverse @ a, group.matrix(0))


@every_group
def test_tables_are_those_of_the_matrices(group: Group) -> None:
    for a in range(group.order):
        for b in range(group.order):
            assert np.array_equal(group.arrays[group.product[a, b]], group.arrays[a] @ group.arrays[b])
        assert group.product[a, group.inverse[a]] == 0
    gram = np.array(group.metric)
    assert all(np.array_equal(m.T @ gram @ m, gram) for m in group.arrays)


@every_group
def test_subgroups_and_cosets(group: Group) -> None:
    subgroups = group.subgroups()
    assert subgroups[0] == (0,)
    assert subgroups[-1] == tuple(range(group.order))
    for h in subgroups:
        assert all(int(group.product[a, b]) in h for a in h for b in h)
        labels = group.cosets(h)
        assert Counter(labels.tolist()) == dict.fromkeys(range(group.order // len(h)), len(h))
        for s in range(group.order):
            assert {int(labels[group.product[s, k]]) for k in h} == {int(labels[s])}  # s H is one coset
    assert set(subgroups) >= {group.subgroup(a, b) for a in range(group.order) for b in range(min(group.order, 6))}


def test_number_of_subgroups_is_the_known_one() -> None:
    known = {"p4": 3, "p4m": 10, "p6m": 16, "T": 10, "O": 30, "Oh": 98, "D6h": 54, "D2h": 16}
    assert {name: len(GROUPS[name].subgroups()) for name in known} == known


def test_all_the_names_are_there() -> None:
    plane = "p1 p2 pm cm pmm cmm p4 p4m p3 p3m1 p31m p6 p6m"
    space = "C1 Ci C2 Cs C2h D2 C2v D2h C4 S4 C4h D4 C4v D2d D4h C3 S6 D3 C3v D3d C6 C3h C6h D6 C6v D3h D6h T Th Td O Oh"
    assert list(GROUPS) == ["line", "linem", *plane.split(), *space.split()]
    import gcnn

    assert all(getattr(gcnn, name) is group for name, group in GROUPS.items())


def test_element_order_is_the_papers() -> None:
    r, m = np.array([[0, -1], [1, 0]]), np.array([[-1, 0], [0, 1]])
    for i in range(4):
        turn = np.linalg.matrix_power(r, i)
        c, s = round(np.cos(i * np.pi / 2)), round(np.sin(i * np.pi / 2))
        assert p4.arrays[i].tolist() == [[c, -s], [s, c]] == turn.tolist()  # eq. 2
        for k in (0, 1):  # g(m, r) of section 4.3
            assert p4m.arrays[k * 4 + i].tolist() == [[(-1) ** k * c, -((-1) ** k) * s], [s, c]]
            assert p4m.arrays[k * 4 + i].tolist() == (np.linalg.matrix_power(m, k) @ turn).tolist()
    assert Oh.matrices[:24] == O.matrices
    assert p6m.matrices[:6] == GROUPS["p6"].matrices


# How many elements of each kind a crystal class has (International Tables): rotations by their order, then inversion,
# mirrors and rotoinversions.
CLASSES = {
    "C1": "1", "Ci": "1 -1", "C2": "1 2", "Cs": "1 m", "C2h": "1 2 -1 m", "D2": "1 3*2", "C2v": "1 2 2*m",
    "D2h": "1 3*2 -1 3*m", "C4": "1 2 2*4", "S4": "1 2 2*-4", "C4h": "1 2 2*4 -1 m 2*-4", "D4": "1 5*2 2*4",
    "C4v": "1 2 2*4 4*m", "D2d": "1 3*2 2*m 2*-4", "D4h": "1 5*2 2*4 -1 5*m 2*-4", "C3": "1 2*3", "S6": "1 2*3 -1 2*-3",
    "D3": "1 3*2 2*3", "C3v": "1 2*3 3*m", "D3d": "1 3*2 2*3 -1 3*m 2*-3", "C6": "1 2 2*3 2*6", "C3h": "1 2*3 m 2*-6",
    "C6h": "1 2 2*3 2*6 -1 m 2*-3 2*-6", "D6": "1 7*2 2*3 2*6", "C6v": "1 2 2*3 2*6 6*m", "D3h": "1 3*2 2*3 4*m 2*-6",
    "D6h": "1 7*2 2*3 2*6 -1 7*m 2*-3 2*-6", "T": "1 3*2 8*3", "Th": "1 3*2 8*3 -1 3*m 8*-3", "Td": "1 3*2 8*3 6*m 6*-4",
    "O": "1 9*2 8*3 6*4", "Oh": "1 9*2 8*3 6*4 -1 9*m 8*-3 6*-4",
}  # fmt: skip
KINDS = {(1, 3): "1", (1, -1): "2", (1, 0): "3", (1, 1): "4", (1, 2): "6"}
KINDS |= {(-1, -3): "-1", (-1, 1): "m", (-1, 0): "-3", (-1, -1): "-4", (-1, -2): "-6"}


@pytest.mark.parametrize("name", CLASSES)
def test_space_groups_are_the_32_crystal_classes(name: str) -> None:
    group = GROUPS[name]
    found = Counter(KINDS[round(np.linalg.det(m)), int(np.trace(m))] for m in group.arrays)
    expected: Counter[str] = Counter()
    for word in CLASSES[name].split():
        count, _, kind = word.rpartition("*")
        expected[kind] += int(count or 1)
    assert found == expected
    assert group.metric == (PRISM if "6" in found or "-6" in found else ((1, 0, 0), (0, 1, 0), (0, 0, 1)))


def test_main_axes() -> None:
    """The axis of highest order is the first array axis, but the body diagonal where it is threefold and alone."""
    for name, group in GROUPS.items():
        if group.dim == 3 and name not in ("C1", "Ci", "Cs", "T", "Th", "Td", "O", "Oh"):
            axis = [1, 1, 1] if name in ("C3", "S6", "D3", "C3v", "D3d") else [1, 0, 0]
            order = {n: [m for m in group.arrays if element_order(m) == n] for n in (6, 4, 3, 2)}
            main = next(ms for n, ms in order.items() if ms)[0]
            assert (main @ axis).tolist() in (axis, [-u for u in axis])
    assert (GROUPS["Cs"].arrays[1] @ [1, 0, 0]).tolist() == [-1, 0, 0]  # the mirror is normal to it
    for name in ("T", "Th", "Td", "O", "Oh"):
        thirds = [m for m in GROUPS[name].arrays if np.trace(m) == 0 and round(np.linalg.det(m)) == 1]
        assert any((m @ [1, 1, 1]).tolist() == [1, 1, 1] for m in thirds)


def element_order(m: Any) -> int:
    return next(k for k in range(1, 7) if np.array_equal(np.linalg.matrix_power(m, k), np.eye(3)))


def test_p3m1_and_p31m_differ_as_they_should() -> None:
    """In p3m1 every centre of threefold rotation lies on a mirror line, in p31m some do not."""

    def centre_on_mirror(group: Group) -> bool:
        centre = np.array([1, 1]) / 3  # of the triangle (0, 0), (1, 0), (0, 1)
        mirrors = [m for m in group.arrays if round(np.linalg.det(m)) == -1]
        shifts = [np.array([a, b]) for a in range(-2, 3) for b in range(-2, 3)]
        # a reflection t m fixes the centre if m c + t = c, and it is a mirror, not a glide, if m t = -t
        return any(np.allclose(m @ centre + t, centre) and np.array_equal(m @ t, -t) for m in mirrors for t in shifts)

    assert centre_on_mirror(p3m1)
    assert not centre_on_mirror(p31m)
    assert {m.tobytes() for m in p3m1.arrays} < {m.tobytes() for m in p6m.arrays}
    assert {m.tobytes() for m in p31m.arrays} < {m.tobytes() for m in p6m.arrays}


def test_plane_groups_have_their_mirrors() -> None:
    def mirrors(name: str) -> set[tuple[tuple[int, ...], ...]]:
        group = GROUPS[name]
        return {m for m, a in zip(group.matrices, group.arrays, strict=True) if round(np.linalg.det(a)) == -1}

    axes, diagonals = {((-1, 0), (0, 1)), ((1, 0), (0, -1))}, {((0, 1), (1, 0)), ((0, -1), (-1, 0))}
    assert mirrors("pm") < axes
    assert mirrors("pmm") == axes
    assert mirrors("cm") < diagonals
    assert mirrors("cmm") == diagonals
    assert mirrors("p4m") == axes | diagonals
    assert {n: GROUPS[n].order for n in ("p1", "p2", "p3", "p4", "p6", "p6m")} == {
        "p1": 1, "p2": 2, "p3": 3, "p4": 4, "p6": 6, "p6m": 12,
    }  # fmt: skip


def test_groups_are_values() -> None:
    again = pickle.loads(pickle.dumps(p4m))
    assert again == p4m
    assert hash(again) == hash(p4m)
    assert p4 != p4m
    assert str(p4m) == "p4m"
    with pytest.raises(ValueError, match="read-only"):
        p4m.product[0, 0] = 1
    with pytest.raises(AttributeError):
        p4m.name = "other"  # type: ignore[misc]
    assert p4m.restrict(p4m.subgroup(1)) is p4
    assert p4m.restrict((0, 5)).order == 2


E = ((1, 0), (0, 1))


@pytest.mark.parametrize(
    ("matrices", "metric", "message"),
    [
        ((((0, -1), (1, 0)), E), (), r"element 0 must be the identity, got \[\[0, -1\], \[1, 0\]\]; put the identity first"),
        ((E, E), (), r"elements 0 and 1 are the same matrix"),
        ((E, ((0, -1), (1, 0))), (), r"not closed, element 1 times element 1 = \[\[-1, 0\], \[0, -1\]\] is not in the list"),
        ((E, ((0.5, 0), (0, 2))), (), r"element 1 = \[\[0.5, 0.0\], \[0.0, 2.0\]\] is not integer; write it in lattice coord"),
        ((E, ((2, 0), (0, 1))), (), r"element 1 = .* has determinant 2; a symmetry of a lattice has determinant 1 or -1"),
        ((E, ((1, 1), (0, 1))), (), r"element 1 = .* is not of finite order"),
        (
            (E, ((0, -1), (1, 1))),
            (),
            r"element 1 = .* is not an isometry of the lattice with metric \[\[1, 0\], \[0, 1\]\]; pass",
        ),
        ((E, ((-1, 0), (0, 1))), HEXAGONAL, r"is not an isometry of the lattice with metric \[\[2, 1\], \[1, 2\]\]"),
        ((E,), ((1, 2), (2, 1)), r"metric must be a symmetric positive definite 2x2 matrix"),
        ((E,), ((1,),), r"metric must be a symmetric positive definite 2x2 matrix"),
        ((E, ((1,),)), (), r"expected square matrices of numbers, all 1x1, 2x2 or 3x3"),
        ((), (), r"expected square matrices"),
        ((("ab", "cd"),), (), r"expected square matrices"),
    ],
)
def test_what_is_no_group_says_why(matrices: object, metric: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Group("wrong", matrices, metric)  # type: ignore[arg-type]


def test_generate_refuses_infinite_groups_at_once() -> None:
    with pytest.raises(ValueError, match=r"generator 1 = .* is not of finite order"):
        generate("wrong", ((0, -1), (1, 0)), ((1, 1), (0, 1)))
    with pytest.raises(ValueError, match=r"generator 1 = .* is not an isometry"):
        generate("wrong", ((0, -1), (1, 0)), ((0, -1), (1, 1)))
    with pytest.raises(ValueError, match=r"generate\('wrong'\): expected square matrices"):
        generate("wrong")


def test_wrong_elements_and_subgroups_say_why() -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\) is not a subgroup of p4; .* generate is \(0, 1, 2, 3\)"):
        p4.cosets((0, 1))
    with pytest.raises(ValueError, match="p4 has elements 0 to 3, got 4"):
        p4.subgroup(4)
    with pytest.raises(ValueError, match=r"\[\[-1, 0\], \[0, 1\]\] is not an element of p4"):
        p4.index(((-1, 0), (0, 1)))
    with pytest.raises(ValueError, match="expected a homogeneous 3x3 matrix"):
        p4.decode(((1, 0), (0, 1)))
    with pytest.raises(ValueError, match="expected a translation of 2 integers"):
        pm.matrix(1, (1, 2, 3))
    with pytest.raises(ValueError, match="expected a translation of 2 integers"):
        pm.matrix(1, (2.5, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not an element of p4"):
        p4.check_subgroup(pm)
    assert p4m.check_subgroup(p4) == (0, 1, 2, 3)


def test_the_metric_is_known_up_to_the_unit_of_length() -> None:
    p6 = GROUPS["p6"]
    again = generate("p6", p6.matrices[1], metric=((4, 2), (2, 4)))
    assert again.metric == p6.metric
    basis = np.array([[1, 0], [math.cos(math.pi / 2), math.sin(math.pi / 2)]])  # with what rounding leaves of zeros
    assert generate("p4", ((0, -1), (1, 0)), metric=basis @ basis.T).metric == ((1, 0), (0, 1))
    assert generate("pm", ((-1, 0), (0, 1)), metric=((13.0, 0), (0, 15.0))).metric == ((13, 0), (0, 15))
    for unit in (1e-10, 1 / 13, 0.06, 7.0):
        assert generate("p6", p6.matrices[1], metric=np.array(p6.metric) * unit).metric == p6.metric
    assert again.contains(p6)
    real = generate("f", ((1, 0, 0), (0, -1, -1), (0, 1, 0)), metric=((1, 0, 0), (0, 1, 0.5), (0, 0.5, 1)))
    assert real.metric == ((2, 0, 0), (0, 2, 1), (0, 1, 2))
    with pytest.raises(ValueError, match="has no whole multiple; only ratios count: write it in whole numbers"):
        generate("m", ((-1, 0), (0, 1)), metric=((1, 0), (0, 2**0.5)))


@every_group
def test_axes_that_no_element_reverses(group: Group) -> None:
    """Along them the cells of a line of any length come back in the same order, whatever element acts."""
    for axis, backwards in enumerate(group.reversed_axes):
        line = np.zeros((5, group.dim), int)
        line[:, axis] = np.arange(5)
        moved = [line @ m.T for m in group.arrays]
        forwards = all((np.diff(points, axis=0) >= 0).all() for points in moved)
        assert backwards != forwards
