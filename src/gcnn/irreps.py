"""Real irreducible representations of any finite group, and the Fourier transform of functions on it, in numpy.

A function on the group is a sum of matrix entries of irreducible representations (Peter and Weyl). Over the real numbers these
are of real, complex or quaternionic type: the matrices that commute with all of them form an algebra of dimension 1, 2 or 4. The
same arithmetic serves all three. This file knows no torch; what it returns is cached and read-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gcnn.groups import Group, IntArray

__all__ = ["Irrep", "fourier_matrix", "irreps", "multiplications"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Irrep:
    """An irreducible representation by orthogonal matrices.

    >>> from gcnn.groups import p4
    >>> quarter_turn = irreps(p4)[-1].matrices[1]
    >>> bool(np.allclose(quarter_turn @ quarter_turn, -np.eye(2)))
    True
    """

    matrices: FloatArray
    """(S, d, d): rho(s)."""
    rows: FloatArray
    """(d / kind, d): vectors u for which the functions s -> (u rho(s))_l are an orthogonal basis of its part of the functions."""
    kind: int
    """1, 2 or 4: real, complex or quaternionic type, the dimension of what commutes with it."""

    @property
    def dim(self) -> int:
        """The dimension d."""
        return self.matrices.shape[1]

    def entries(self) -> FloatArray:
        """(d / kind, d, S): an orthonormal basis f_il of this representation's part of the functions on the group."""
        scale = np.sqrt(self.dim / len(self.matrices))
        return scale * np.einsum("iu,sul->ils", self.rows, self.matrices)


@lru_cache(maxsize=128)
def irreps(group: Group) -> tuple[Irrep, ...]:
    """The real irreducible representations of the point group, the trivial one first, each up to equivalence once.

    >>> from gcnn.groups import p4, p4m
    >>> [(rho.dim, rho.kind) for rho in irreps(p4)], [(rho.dim, rho.kind) for rho in irreps(p4m)]
    ([(1, 1), (1, 1), (2, 2)], [(1, 1), (1, 1), (1, 1), (1, 1), (2, 1)])
    """
    return irreps_of_table(tuple(tuple(int(b) for b in row) for row in group.product))


def irreps_of_table(product: tuple[tuple[int, ...], ...]) -> tuple[Irrep, ...]:
    """The same from a product table, `product[a][b]` = a b, with the identity at 0."""
    table = np.array(product)
    order = len(table)
    left = np.zeros((order, order, order))  # left[a] e_b = e_ab
    left[np.arange(order)[:, None], table, np.arange(order)[None]] = 1
    found: list[Irrep] = []
    seen: list[FloatArray] = []
    for basis in _invariant_parts(table):
        matrices = _aligned(np.einsum("bi,abc,cj->aij", basis, left, basis), table)
        character = np.trace(matrices, axis1=1, axis2=2)
        if any(np.allclose(character, other, atol=1e-8) for other in seen):
            continue
        seen.append(character)
        commuting = _commuting(matrices)
        found.append(Irrep(matrices, _independent_rows(commuting), len(commuting)))
    found.sort(key=lambda rho: (rho.dim, *(-np.round(np.trace(rho.matrices, axis1=1, axis2=2), 6) + 0.0)))
    for rho in found:
        rho.matrices.setflags(write=False)
        rho.rows.setflags(write=False)
    return tuple(found)


def _invariant_parts(table: IntArray) -> list[FloatArray]:
    """Orthonormal bases of irreducible parts of the regular representation.

    They are the eigenspaces of a generic symmetric matrix among those that commute with it.
    """
    order = len(table)
    inverse = np.argmax(table == 0, axis=1)
    weight = np.cos(np.arange(1, order + 1) ** 2 * 0.7071 + 0.3)  # generic, and the same in every run
    weight = weight + weight[inverse]
    right = np.zeros((order, order))  # sum of w(b) R(b), where R(b) e_a = e_(a b^-1) commutes with every left translation
    for b in range(order):
        right[table[np.arange(order), inverse[b]], np.arange(order)] += weight[b]
    values, vectors = np.linalg.eigh(right)
    breaks = np.flatnonzero(np.diff(values) > 1e-8) + 1
    return np.split(vectors, breaks, axis=1)


def _aligned(matrices: FloatArray, table: IntArray) -> FloatArray:
    """The representation in a basis in which as many commuting involutions as can be had are diagonal.

    Its matrices, and with them the Fourier transform, then have many zeros: those of p4m are signed permutations.
    """
    chosen: list[int] = []
    for a in np.flatnonzero(np.diag(table) == 0):
        if all(table[a, b] == table[b, a] for b in chosen):
            chosen.append(int(a))
    weights = np.cos(np.arange(1, len(chosen) + 1) ** 2 * 0.7071 + 0.3)
    _, basis = np.linalg.eigh(np.einsum("a,aij->ij", weights, matrices[chosen]))
    turned = np.einsum("ji,ajk,kl->ail", basis, matrices, basis)
    first = np.argmax(np.abs(turned[:, 0]) > 1e-6, axis=0)  # of each column the first element that does not vanish in row 0
    sign = np.sign(turned[first, 0, np.arange(len(basis))])  # an eigenvector's sign is anybody's choice; this is ours
    return np.where(np.abs(turned) < 1e-12, 0.0, sign[:, None] * turned * sign)


def _commuting(matrices: FloatArray) -> list[FloatArray]:
    """An orthogonal basis of the matrices that commute with all of a representation's; the identity first."""
    d = matrices.shape[1]
    units = np.eye(d * d).reshape(d * d, d, d)
    means = np.einsum("sij,ajk,slk->ail", matrices, units, matrices) / len(matrices)
    basis = [np.eye(d)]
    for candidate in means:
        rest = candidate - sum(np.sum(candidate * b) / np.sum(b * b) * b for b in basis)
        if np.linalg.norm(rest) > 1e-6:
            basis.append(rest * np.sqrt(d) / np.linalg.norm(rest))
    return basis


def _independent_rows(commuting: list[FloatArray]) -> FloatArray:
    """Unit vectors u, each orthogonal to the others and to whatever commutes with the representation makes of them."""
    d = len(commuting[0])
    rows: list[FloatArray] = []
    taken = np.zeros((0, d))
    for unit in np.eye(d):
        rest = unit - taken.T @ (taken @ unit)
        if np.linalg.norm(rest) > 1e-6:
            u = rest / np.linalg.norm(rest)
            rows.append(u)
            taken = np.vstack([taken, *(u @ c for c in commuting)])
    return np.array(rows)


def fourier_matrix(group: Group) -> FloatArray:
    """(S, S): the orthogonal matrix that takes a function on the point group to its Fourier coefficients.

    >>> from gcnn.groups import p4m
    >>> bool(np.allclose(fourier_matrix(p4m) @ fourier_matrix(p4m).T, np.eye(8)))
    True
    """
    return np.concatenate([rho.entries().reshape(-1, group.order) for rho in irreps(group)])


@lru_cache(maxsize=128)
def multiplications(group: Group) -> int:
    """What a product of functions on the point group costs with the Fourier transform; S^2 without.

    >>> from gcnn.groups import p4, p4m, Oh
    >>> [g.order**2 / multiplications(g) for g in (p4, p4m, Oh)]
    [2.6666666666666665, 5.333333333333333, 18.0]
    """
    return sum(rho.dim**3 // rho.kind for rho in irreps(group))
