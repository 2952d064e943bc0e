"""Propagation on a client's star graph, the client and its own items, compiled by numba as in `kernels`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled


@compiled
def propagate(
    user: F32,  # f32[d]
    table: F32,  # f32[N, d]
    row: I64,  # i64[B]
    own: NDArray[np.bool_],  # bool[B]
    near: I64,  # rows of the client's own items
    weights: F32,  # f32[5]
    total: F32,  # f32[d], scratch
    heard: F32,  # f32[d], scratch
    user_out: F32,  # f32[d, ...], its first d numbers are written
    item_out: F32,  # f32[B, d], written
) -> None:
    """The vectors of a client and of the items of its batch after propagation on its star graph."""
    d = user.shape[0]
    total[:] = 0
    for k in range(near.shape[0]):
        for j in range(d):
            total[j] += table[near[k], j]
    for j in range(d):
        user_out[j] = weights[0] * user[j] + weights[1] * total[j]
        heard[j] = weights[3] * user[j] + weights[4] * total[j]
    for i in range(row.shape[0]):
        hears = np.float32(own[i])
        for j in range(d):
            item_out[i, j] = weights[2] * table[row[i], j] + hears * heard[j]


@compiled
def propagate_back(
    low: int,  # the client's first row
    row: I64,
    own: NDArray[np.bool_],
    near: I64,
    weights: F32,
    item_gradient: F32,  # f32[B, d]: with respect to propagated items
    through: F32,  # f32[d], scratch
    gradient: F32,  # f32[P], changed: its first d numbers from the propagated user to the user
    row_gradient: F32,  # f32[K, d], added to
) -> None:
    """The gradients with respect to a client's vector and its rows, from those with respect to propagated vectors."""
    d = row_gradient.shape[1]
    through[:] = 0  # with respect to what own items hear
    for i in range(row.shape[0]):
        r, hears = row[i] - low, np.float32(own[i])
        for j in range(d):
            row_gradient[r, j] += weights[2] * item_gradient[i, j]
            through[j] += hears * item_gradient[i, j]
    for j in range(d):
        of_user, of_heard = gradient[j], through[j]
        gradient[j] = weights[0] * of_user + weights[3] * of_heard
        through[j] = weights[1] * of_user + weights[4] * of_heard  # with respect to the sum of own rows
    for k in range(near.shape[0]):
        for j in range(d):
            row_gradient[near[k] - low, j] += through[j]
