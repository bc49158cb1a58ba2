"""Where each filter tap goes under each element: kernel supports and index tables (paper, section 7.1), in numpy.

Boxes are centred. Doubled coordinates 2 u - (n - 1) keep the taps of even kernels on the integer grid, so that one rule
serves odd and even sizes on every lattice. This file knows no torch; what it returns is cached and read-only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gcnn.groups import Group, IntArray


def doubled_coordinates(size: tuple[int, ...]) -> IntArray:
    """(*size, d): the doubled coordinates, relative to the centre, of every cell of a box.

    >>> doubled_coordinates((4,)).ravel().tolist()
    [-3, -1, 1, 3]
    """
    return np.moveaxis(np.indices(size), 0, -1) * 2 - (np.array(size) - 1)


def places(points: IntArray, size: tuple[int, ...]) -> IntArray:
    """The flat position in a box of each point (..., d) in doubled coordinates; -1 where it is no cell of the box.

    >>> places(np.array([[-3], [0], [3], [5]]), (4,)).tolist()
    [0, -1, 3, -1]
    """
    shifted = points + (np.array(size) - 1)
    inside = ((shifted % 2 == 0) & (shifted >= 0) & (shifted < 2 * np.array(size))).all(-1)
    cells = np.where(inside[..., None], shifted // 2, 0)
    flat = np.ravel_multi_index(tuple(np.moveaxis(cells, -1, 0)), size)
    return np.where(inside, flat, -1)


@lru_cache(maxsize=512)
def support(group: Group, size: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """The largest part of a box that the group maps to itself, as a mask: the whole square for p4, a hexagon for p6.

    >>> from gcnn.groups import p6
    >>> support(p6, (3, 3)).astype(int).tolist()
    [[0, 1, 1], [1, 1, 1], [1, 1, 0]]
    """
    images = np.einsum("hij,...j->h...i", group.arrays, doubled_coordinates(size))
    mask = np.asarray((places(images, size) >= 0).all(0))
    mask.setflags(write=False)
    return mask


def check_support(group: Group, size: tuple[int, ...]) -> None:
    """Raises a ValueError where no cell of a kernel stays in its box under all elements."""
    if not support(group, size).any():
        mixed = [axes for axes in group.axis_classes if len(axes) > 1]
        raise ValueError(
            f"kernel_size {size} has empty support under {group.name}: no tap stays in the box under all elements; "
            f"use {'equal' if group.fills_box else 'odd and equal'} sizes along axes {', '.join(map(str, mixed))}"
        )


@lru_cache(maxsize=512)
def index_table(
    group: Group, kernel_size: tuple[int, ...], stabilizer: tuple[int, ...] | None = None
) -> tuple[IntArray, IntArray]:
    """The tables of the filter transformation, forth and back, for filters on the cosets G/K, K = `stabilizer`.

    A filter is stored as Q = S_in P numbers, coset by coset, P the number of taps in the support. It is expanded to
    D = n^d S_in cells, the cosets of each place of a box side by side. With S elements of the point group:

    - table (S, D): where L_h takes its value for each cell, the place of h^-1 (s, u); Q for cells outside the support.
    - inverse (S, Q): which cell of L_h of the filter holds each stored number. This is the gradient's table.

    >>> from gcnn.groups import linem
    >>> table, inverse = index_table(linem, (3,))  # a reflection swaps the two elements and turns the taps around
    >>> table.tolist()
    [[0, 3, 1, 4, 2, 5], [5, 2, 4, 1, 3, 0]]
    """
    mask = support(group, kernel_size)
    taps = doubled_coordinates(kernel_size)[mask]  # (P, d)
    cells = mask.size
    check_support(group, kernel_size)
    cosets = group.coset_action(stabilizer)[group.inverse]  # (S, S_in): label of h^-1 c
    s_in, p = cosets.shape[1], len(taps)
    rank = np.full(cells, -1)
    rank[mask.ravel()] = np.arange(p)
    images = np.einsum("hij,pj->hpi", group.arrays[group.inverse], taps)
    moved = rank[places(images, kernel_size)]  # (S, P): which tap h^-1 u is
    stored = (cosets[:, :, None] * p + moved[:, None, :]).reshape(group.order, s_in * p)

    table = np.full((group.order, cells * s_in), s_in * p)
    filled = (np.flatnonzero(mask.ravel()) * s_in + np.arange(s_in)[:, None]).ravel()  # (Q,): the cell of each stored number
    table[:, filled] = stored
    inverse = np.empty_like(stored)
    np.put_along_axis(inverse, stored, np.broadcast_to(filled, stored.shape), axis=1)
    table.setflags(write=False)
    inverse.setflags(write=False)
    return table, inverse
