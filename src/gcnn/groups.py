"""Symmetry groups of a lattice, each given by one map from indices to matrices (paper, sections 4.1-4.3 and 7.1).

In lattice coordinates every element of a point group is an exact integer matrix, so products, inverses, subgroups and
cosets are dictionary look-ups. A group here is the point group; the translations of the lattice come with it, since
every group is split: g = t s. This file knows neither torch nor kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "C1",
    "C2",
    "C3",
    "C4",
    "C6",
    "D2",
    "D3",
    "D4",
    "D6",
    "GROUPS",
    "HEXAGONAL",
    "PRISM",
    "S4",
    "S6",
    "C2h",
    "C2v",
    "C3h",
    "C3v",
    "C4h",
    "C4v",
    "C6h",
    "C6v",
    "Ci",
    "Cs",
    "D2d",
    "D2h",
    "D3d",
    "D3h",
    "D4h",
    "D6h",
    "Group",
    "O",
    "Oh",
    "T",
    "Td",
    "Th",
    "cm",
    "cmm",
    "generate",
    "line",
    "linem",
    "p1",
    "p2",
    "p3",
    "p3m1",
    "p4",
    "p4m",
    "p6",
    "p6m",
    "p31m",
    "pm",
    "pmm",
]

IntArray = npt.NDArray[np.int64]
Matrix = tuple[tuple[int, ...], ...]

# Gram matrices: u^T metric u is the squared length of the lattice vector u, up to one factor for the whole lattice.
HEXAGONAL: Matrix = ((2, 1), (1, 2))  # axial coordinates: two axes at 60 degrees
PRISM: Matrix = ((2, 0, 0), (0, 2, 1), (0, 1, 2))  # hexagonal layers stacked along the first axis


@dataclass(frozen=True, repr=False)
class Group:
    """A finite group of isometries of a lattice, from `name`, its integer `matrices` and the lattice's `metric`.

    The position of a matrix is the index of that element: in feature maps, in tables and in checkpoints. The identity
    is first. `metric` is the Gram matrix of the lattice, the unit matrix (line, square, cubic lattice) if not given.

    >>> half_turns = Group("half turns", (((1, 0), (0, 1)), ((-1, 0), (0, -1))))
    >>> half_turns.order, half_turns.dim, half_turns.product.tolist()
    (2, 2, [[0, 1], [1, 0]])
    """

    name: str
    matrices: tuple[Matrix, ...]
    metric: Matrix = ()
    oblique: tuple[tuple[int, tuple[int, ...]], ...] = field(init=False, compare=False)
    """Pairs (i, m): m is the i-th row of some element's matrix and mixes several axes; of m and -m one is listed.

    A cell u of a centred box belongs to the domain of the group if |m . u| stays within half the side i for all of them.
    """
    axis_classes: tuple[tuple[int, ...], ...] = field(init=False, compare=False)
    """The array axes, gathered by which ones the group mixes: sizes must agree along each class."""
    reversed_axes: tuple[bool, ...] = field(init=False, compare=False)
    """For each array axis whether an element runs along it backwards or askew: there windows must be symmetric."""
    code: str = field(init=False, compare=False)
    """Its name, matrices and metric as text."""
    order: int = field(init=False, compare=False)
    """S, the number of elements of the point group."""
    dim: int = field(init=False, compare=False)
    """The dimension of the lattice: 1, 2 or 3."""
    fills_box: bool = field(init=False, compare=False)
    """Whether the group maps every box of equal sides to itself: false for turns by 60 or 120 degrees, and oblique mirrors."""

    def __post_init__(self) -> None:
        who = f"Group {self.name!r}"
        arrays = _as_matrices(who, self.matrices)
        gram = _as_gram(who, self.metric, arrays.shape[1])
        object.__setattr__(self, "matrices", _tuples(arrays))
        object.__setattr__(self, "metric", _tuples(gram[None])[0])
        # plain attributes: torch.compile reads them, and layers do in every call
        object.__setattr__(self, "order", len(self.matrices))
        object.__setattr__(self, "dim", len(self.metric))
        object.__setattr__(self, "oblique", _oblique_rows(arrays))
        object.__setattr__(self, "fills_box", not self.oblique)
        object.__setattr__(self, "axis_classes", _axis_classes(arrays))
        askew = {i for i, _ in self.oblique}
        backwards = tuple(i in askew or bool((arrays[:, i] < 0).any()) for i in range(arrays.shape[1]))
        object.__setattr__(self, "reversed_axes", backwards)
        object.__setattr__(self, "code", json.dumps([self.name, self.matrices, self.metric]))
        if not np.array_equal(arrays[0], np.eye(self.dim)):
            raise ValueError(f"{who}: element 0 must be the identity, got {arrays[0].tolist()}; put the identity first")
        _check_isometries(f"{who}: element", arrays, gram)
        if len(self._index) < self.order:  # a repeated matrix keeps its last index
            i, j = next((i, self.index(m)) for i, m in enumerate(self.matrices) if self.index(m) != i)
            raise ValueError(f"{who}: elements {i} and {j} are the same matrix {arrays[i].tolist()}")
        a, b = np.nonzero(self.product < 0)
        if len(a):
            raise ValueError(
                f"{who}: not closed, element {a[0]} times element {b[0]} = {(arrays[a[0]] @ arrays[b[0]]).tolist()} "
                "is not in the list; generate() completes a set of generators to a group"
            )

    def contains(self, other: Group) -> bool:
        """Whether every element of `other` is one of this group, on the same lattice.

        >>> p4m.contains(p4), p4.contains(p4m)
        (True, False)
        """
        return self.metric == other.metric and set(other.matrices) <= set(self.matrices)

    def __repr__(self) -> str:
        return f"<Group {self.name}: order {self.order}, dimension {self.dim}>"

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:  # caches look a group up in every call of a layer, and a str keeps its hash
        return hash(self.code)

    def __reduce__(self) -> tuple[Any, ...]:  # derived tables are rebuilt, not pickled
        return Group, (self.name, self.matrices, self.metric)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:  # a value that never changes
        return self

    @cached_property
    def arrays(self) -> IntArray:
        """The matrices as one (S, d, d) array."""
        return _frozen(np.array(self.matrices, dtype=np.int64))

    @cached_property
    def _index(self) -> dict[bytes, int]:
        return {m.tobytes(): i for i, m in enumerate(self.arrays)}

    @cached_property
    def product(self) -> IntArray:
        """(S, S): product[a, b] is the index of a b."""
        pairs = self.arrays[:, None] @ self.arrays[None]  # (S, S, d, d)
        return _frozen(np.array([[self._index.get(m.tobytes(), -1) for m in row] for row in pairs], dtype=np.int64))

    @cached_property
    def inverse(self) -> IntArray:
        """(S,): inverse[a] is the index of a^-1."""
        return _frozen(np.argmax(self.product == 0, axis=1))

    def index(self, matrix: Any) -> int:
        """The index of the element with this point matrix.

        >>> p4.index([[0, -1], [1, 0]])
        1
        """
        m = np.array(matrix)
        found = (
            self._index.get(m.astype(np.int64).tobytes())
            if m.shape == (self.dim, self.dim) and (m == np.round(m)).all()
            else None
        )
        if found is None:
            raise ValueError(f"{m.tolist()} is not an element of {self.name}")
        return found

    def matrix(self, s: int, t: Sequence[int] | None = None) -> IntArray:
        """The homogeneous matrix of g = t s: the translation `t` (0 if None) after the point element `s`.

        >>> p4.matrix(1, (2, -3)).tolist()
        [[0, -1, 2], [1, 0, -3], [0, 0, 1]]
        """
        s = self.check_element(s)
        t = (0,) * self.dim if t is None else tuple(t)
        if len(t) != self.dim or any(int(u) != u for u in t):
            raise ValueError(f"{self.name}.matrix: expected a translation of {self.dim} integers, got {t}")
        out = np.eye(self.dim + 1, dtype=np.int64)
        out[:-1, :-1] = self.arrays[s]
        out[:-1, -1] = t
        return out

    def decode(self, matrix: Any) -> tuple[int, tuple[int, ...]]:
        """The inverse of `matrix`: the indices (s, t) of a homogeneous matrix.

        >>> p4.decode(p4.matrix(1, (2, -3)) @ p4.matrix(3, (1, 0)))
        (0, (2, -2))
        """
        m = np.asarray(matrix)
        if m.shape != (self.dim + 1,) * 2 or not np.array_equal(m[-1], np.eye(self.dim + 1)[-1]) or (m != np.round(m)).any():
            raise ValueError(
                f"{self.name}.decode: expected a homogeneous {self.dim + 1}x{self.dim + 1} matrix of integers, got {m.tolist()}"
            )
        return self.index(m[:-1, :-1]), tuple(int(u) for u in m[:-1, -1])

    def check_element(self, s: int) -> int:
        """`s` itself if it is the index of an element, else a ValueError."""
        if isinstance(s, bool) or not isinstance(s, int | np.integer) or not 0 <= s < self.order:
            raise ValueError(f"{self.name} has elements 0 to {self.order - 1}, got {s!r}")
        return int(s)

    def subgroup(self, *elements: int) -> tuple[int, ...]:
        """The indices, in ascending order, of the subgroup that `elements` generate.

        >>> p4m.subgroup(1), p4m.subgroup(2, 4), p4m.subgroup()
        ((0, 1, 2, 3), (0, 2, 4, 6), (0,))
        """
        steps = [self.check_element(s) for s in elements]
        found, new = {0}, [0]
        while new:
            new = list({int(self.product[s, a]) for s in steps for a in new} - found)
            found.update(new)
        return tuple(sorted(found))

    def subgroups(self) -> tuple[tuple[int, ...], ...]:
        """All subgroups, the small ones first.

        >>> p4.subgroups()
        ((0,), (0, 2), (0, 1, 2, 3))
        """
        return self._subgroups

    @cached_property
    def _subgroups(self) -> tuple[tuple[int, ...], ...]:
        cyclic = {self.subgroup(a): a for a in range(self.order)}
        found, new = set(cyclic), set(cyclic)
        while new:  # every subgroup is a join of cyclic ones
            new = {self.subgroup(*h, a) for h in new for a in cyclic.values() if a not in h} - found
            found |= new
        return tuple(sorted(found, key=lambda h: (len(h), h)))

    def check_subgroup(self, elements: Subgroup | None) -> tuple[int, ...]:
        """`elements` in ascending order if they are a subgroup, else a ValueError; None means the trivial subgroup.

        A `Group` stands for its elements: p4m.check_subgroup(p4) is (0, 1, 2, 3).
        """
        if elements is None:
            return (0,)
        if isinstance(elements, Group):
            if elements.metric != self.metric and not set(elements.matrices) <= set(self.matrices):
                raise ValueError(
                    f"{elements.name} is of another lattice than {self.name}; subgroups by indices, such as "
                    f"{self.name}.subgroup(1), are of its own"
                )
            elements = [self.index(m) for m in elements.matrices]
        if isinstance(elements, str) or not isinstance(elements, Iterable):
            raise ValueError(
                f"a subgroup of {self.name} is a Group or a sequence of indices, such as {self.name}.subgroup(1), "
                f"got {elements!r}"
            )
        found = tuple(sorted({self.check_element(s) for s in elements}))
        if (whole := self.subgroup(*found)) != found:
            raise ValueError(f"{found} is not a subgroup of {self.name}; the subgroup that these elements generate is {whole}")
        return found

    def elements_of(self, subgroup: Subgroup) -> tuple[int, ...]:
        """The indices of a subgroup's elements: in the order of its own, if it is a `Group`, else in ascending order.

        >>> O.elements_of(C4), O.check_subgroup(C4)
        ((0, 12, 1, 13), (0, 1, 12, 13))
        """
        found = self.check_subgroup(subgroup)
        return tuple(self.index(m) for m in subgroup.matrices) if isinstance(subgroup, Group) else found

    def cosets(self, subgroup: Subgroup) -> IntArray:
        """(S,): the label of the left coset s H of each element s; cosets are numbered as they first appear.

        >>> p4m.cosets((0, 1, 2, 3)).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
        """
        members = self.product[:, list(self.check_subgroup(subgroup))].min(1)  # the first element names its coset
        return _frozen(np.unique(members, return_inverse=True)[1].reshape(-1).astype(np.int64))

    def coset_action(self, stabilizer: Subgroup | None = None) -> IntArray:
        """(S, S/|K|): the label of h c for each element h and each left coset c of the subgroup K = `stabilizer`.

        K = {e} (None) gives the product table; K = the whole point group gives one coset that nothing moves.
        """
        labels = self.cosets(self.check_subgroup(stabilizer))
        representatives = np.unique(labels, return_index=True)[1]
        return _frozen(labels[self.product[:, representatives]])

    def restrict(self, subgroup: Subgroup) -> Group:
        """The subgroup as a `Group` of its own, under its own name if it has one; its elements in the order of `elements_of`.

        >>> p4m.restrict((0, 1, 2, 3)) is p4
        True
        """
        elements = self.elements_of(subgroup)
        matrices = tuple(self.matrices[s] for s in elements)
        for known in GROUPS.values():
            if (known.matrices, known.metric) == (matrices, self.metric):
                return known
        return Group(f"{self.name}[{','.join(map(str, elements))}]", matrices, self.metric)


Subgroup = Group | Iterable[int]
"""A subgroup, as a group or by the indices of its elements."""


def generate(name: str, *generators: Any, metric: Any = ()) -> Group:
    """The smallest group that holds `generators`, in an order fixed by theirs.

    With H the group of all generators but the last, x, the elements are H, then x H, then further left cosets of H: so
    the group of the first generators always comes first. Generators (R, M) give M^m R^r the index m * ord(R) + r.

    >>> generate("p4m", ((0, -1), (1, 0)), ((-1, 0), (0, 1))) == p4m
    True
    """
    who = f"generate({name!r})"
    steps = _as_matrices(who, generators)
    gram = _as_gram(who, metric, steps.shape[1])
    _check_isometries(f"{who}: generator", steps, gram)  # isometries of a lattice are finitely many, so the loop below ends
    elements = [np.eye(len(gram), dtype=np.int64)]
    for n in range(1, len(steps) + 1):
        subgroup, known = list(elements), {m.tobytes() for m in elements}
        representatives = elements[:1]
        for r in representatives:  # grows while it is walked: each new coset is tried with every generator so far
            for x in steps[:n]:
                if (x @ r).tobytes() not in known:
                    representatives.append(x @ r)
                    elements += [x @ r @ h for h in subgroup]
                    known |= {m.tobytes() for m in elements}
    return Group(name, _tuples(np.array(elements)), _tuples(gram[None])[0])


def _as_matrices(who: str, matrices: Any) -> IntArray:
    try:
        arrays = np.array(matrices)
    except ValueError:
        arrays = np.empty(0)
    if arrays.ndim != 3 or arrays.shape[1] != arrays.shape[2] or not 1 <= arrays.shape[1] <= 3 or arrays.dtype.kind not in "iuf":
        raise ValueError(f"{who}: expected square matrices of numbers, all 1x1, 2x2 or 3x3, got {matrices!r}")
    for i in np.flatnonzero((arrays != np.round(arrays)).any((1, 2))):
        raise ValueError(
            f"{who}: element {i} = {arrays[i].tolist()} is not integer; write it in lattice coordinates, "
            "where every symmetry of the lattice is an integer matrix"
        )
    return arrays.astype(np.int64)


def _as_gram(who: str, metric: Any, dim: int) -> IntArray:
    gram = np.array(metric) if len(metric) else np.eye(dim, dtype=np.int64)
    if gram.shape != (dim, dim) or not np.array_equal(gram, gram.T) or np.linalg.eigvalsh(gram).min() <= 0:
        raise ValueError(f"{who}: metric must be a symmetric positive definite {dim}x{dim} matrix, got {gram.tolist()}")
    kept = np.where(np.abs(gram) < 1e-9 * np.abs(gram).max(), 0, gram)  # what rounding has left of zeros
    multiples = (kept * k / unit for unit in (1, np.abs(kept[kept != 0]).min()) for k in range(1, 13))
    found = (m for m in multiples if np.array_equal(np.rint(m) != 0, kept != 0) and np.allclose(m, np.rint(m), rtol=0, atol=1e-9))
    multiple = next(found, None)
    if multiple is None:
        raise ValueError(f"{who}: metric {gram.tolist()} has no whole multiple; only ratios count: write it in whole numbers")
    whole = np.rint(multiple).astype(np.int64)
    return whole // np.gcd.reduce(whole, axis=None)  # so that it does not depend on the unit of length


def _check_isometries(what: str, arrays: IntArray, gram: IntArray) -> None:
    dets = np.rint(np.linalg.det(arrays)).astype(int)
    square = arrays @ arrays
    fourth = square @ square
    # an integer matrix up to 3x3 has order 1, 2, 3, 4 or 6, if it is of finite order at all: its 12th power is the identity
    finite = (fourth @ fourth @ fourth == np.eye(len(gram))).all((1, 2))
    isometry = (arrays.transpose(0, 2, 1) @ gram @ arrays == gram).all((1, 2))
    for i in np.flatnonzero((abs(dets) != 1) | ~finite | ~isometry):
        m = f"{what} {i} = {arrays[i].tolist()}"
        if abs(dets[i]) != 1:
            raise ValueError(f"{m} has determinant {dets[i]}; a symmetry of a lattice has determinant 1 or -1")
        if not finite[i]:
            raise ValueError(f"{m} is not of finite order, so the group would be infinite")
        raise ValueError(
            f"{m} is not an isometry of the lattice with metric {gram.tolist()}; "
            "pass the Gram matrix of your lattice as metric=, for instance gcnn.groups.HEXAGONAL"
        )


def _axis_classes(arrays: IntArray) -> tuple[tuple[int, ...], ...]:
    touches = (np.abs(arrays).sum(0) > 0).astype(np.int64)
    mixed = np.linalg.matrix_power(touches + touches.T, len(touches)) > 0  # chains of axes
    return tuple(sorted({tuple(int(j) for j in np.flatnonzero(row)) for row in mixed}))


def _oblique_rows(arrays: IntArray) -> tuple[tuple[int, tuple[int, ...]], ...]:
    found = set()
    for k, i in np.argwhere(np.count_nonzero(arrays, axis=2) > 1):
        row = arrays[k, i]
        found.add((int(i), tuple((row * np.sign(row[row != 0][0])).tolist())))
    return tuple(sorted(found))


def _tuples(arrays: npt.NDArray[Any]) -> tuple[Matrix, ...]:
    return tuple(tuple(tuple(row) for row in m) for m in arrays.tolist())


def _frozen(array: IntArray) -> IntArray:
    array.setflags(write=False)  # shared by everyone who asks
    return array


def _prism(matrix: Matrix, axis: int = 1) -> Matrix:
    """The plane symmetry `matrix` on the last two axes of a volume, with `axis` (1 or -1) on the first."""
    return ((axis, 0, 0), (0, *matrix[0]), (0, *matrix[1]))


# Plane: u is the row, v the column. R4 turns an image anticlockwise, as torch.rot90 does; M mirrors it top to bottom.
E2: Matrix = ((1, 0), (0, 1))
R4: Matrix = ((0, -1), (1, 0))
M: Matrix = ((-1, 0), (0, 1))
M_DIAGONAL: Matrix = ((0, 1), (1, 0))
R2: Matrix = ((-1, 0), (0, -1))
R6: Matrix = ((0, -1), (1, 1))
R3: Matrix = ((-1, -1), (1, 0))
M_ACROSS: Matrix = ((-1, -1), (0, 1))  # the mirror line is normal to the shortest lattice vector (1, 0)
M_ALONG: Matrix = ((1, 1), (0, -1))  # the mirror line holds it

line = generate("line", ((1,),))
linem = generate("linem", ((-1,),))

p1 = generate("p1", E2)
p2 = generate("p2", R2)
pm = generate("pm", M)
cm = generate("cm", M_DIAGONAL)
pmm = generate("pmm", R2, M)
cmm = generate("cmm", R2, M_DIAGONAL)
p4 = generate("p4", R4)
p4m = generate("p4m", R4, M)
p3 = generate("p3", R3, metric=HEXAGONAL)
p3m1 = generate("p3m1", R3, M_ACROSS, metric=HEXAGONAL)
p31m = generate("p31m", R3, M_ALONG, metric=HEXAGONAL)
p6 = generate("p6", R6, metric=HEXAGONAL)
p6m = generate("p6m", R6, M_ACROSS, metric=HEXAGONAL)

# Space: the main axis is the first array axis. Mirrors and turns are named by how they lie to it.
E3 = _prism(E2)
INVERSION = _prism(R2, -1)
HORIZONTAL = _prism(E2, -1)  # the mirror normal to the main axis
VERTICAL = _prism(M)  # a mirror that holds it
TURN2, TURN4, TURN3, TURN6 = _prism(R2), _prism(R4), _prism(R3), _prism(R6)
ACROSS2 = _prism(M, -1)  # half a turn about an axis normal to the main one
DIAGONAL3: Matrix = ((0, 0, 1), (1, 0, 0), (0, 1, 0))  # a third of a turn about the body diagonal
SWAP = _prism(M_DIAGONAL)  # a mirror that holds the body diagonal
SWAP2 = _prism(((0, -1), (-1, 0)), -1)  # half a turn about an axis normal to it

C1 = generate("C1", E3)
Ci = generate("Ci", INVERSION)
C2 = generate("C2", TURN2)
Cs = generate("Cs", HORIZONTAL)
C2h = generate("C2h", TURN2, INVERSION)
D2 = generate("D2", TURN2, ACROSS2)
C2v = generate("C2v", TURN2, VERTICAL)
D2h = generate("D2h", TURN2, ACROSS2, INVERSION)
C4 = generate("C4", TURN4)
S4 = generate("S4", _prism(R4, -1))
C4h = generate("C4h", TURN4, INVERSION)
D4 = generate("D4", TURN4, ACROSS2)
C4v = generate("C4v", TURN4, VERTICAL)
D2d = generate("D2d", _prism(R4, -1), ACROSS2)
D4h = generate("D4h", TURN4, ACROSS2, INVERSION)
C3 = generate("C3", DIAGONAL3)
S6 = generate("S6", DIAGONAL3, INVERSION)
D3 = generate("D3", DIAGONAL3, SWAP2)
C3v = generate("C3v", DIAGONAL3, SWAP)
D3d = generate("D3d", DIAGONAL3, SWAP2, INVERSION)
C6 = generate("C6", TURN6, metric=PRISM)
C3h = generate("C3h", TURN3, HORIZONTAL, metric=PRISM)
C6h = generate("C6h", TURN6, INVERSION, metric=PRISM)
D6 = generate("D6", TURN6, _prism(M_ACROSS, -1), metric=PRISM)
C6v = generate("C6v", TURN6, _prism(M_ACROSS), metric=PRISM)
D3h = generate("D3h", TURN3, _prism(M_ACROSS, -1), HORIZONTAL, metric=PRISM)
D6h = generate("D6h", TURN6, _prism(M_ACROSS, -1), INVERSION, metric=PRISM)
T = generate("T", TURN2, ACROSS2, DIAGONAL3)
Th = generate("Th", TURN2, ACROSS2, DIAGONAL3, INVERSION)
Td = generate("Td", TURN2, ACROSS2, DIAGONAL3, SWAP)
O = generate("O", TURN2, ACROSS2, DIAGONAL3, TURN4)
Oh = generate("Oh", TURN2, ACROSS2, DIAGONAL3, TURN4, INVERSION)

PLANE_GROUPS = (p1, p2, pm, cm, pmm, cmm, p4, p4m, p3, p3m1, p31m, p6, p6m)
SPACE_GROUPS = (
    *(C1, Ci, C2, Cs, C2h, D2, C2v, D2h, C4, S4, C4h, D4, C4v, D2d, D4h, C3, S6, D3, C3v, D3d),
    *(C6, C3h, C6h, D6, C6v, D3h, D6h, T, Th, Td, O, Oh),
)
GROUPS: dict[str, Group] = {g.name: g for g in (line, linem, *PLANE_GROUPS, *SPACE_GROUPS)}
"""Every named group, by its name."""
