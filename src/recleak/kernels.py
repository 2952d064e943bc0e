"""Loops over clients and rows for which torch has no single operation, compiled by numba for the CPU.

Each treats a client, or a row, by itself: the result does not depend on which others are in the call. Other devices use
plain torch operations instead; tests hold the two against each other and against `torch.optim`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recleak.draws import exact

if TYPE_CHECKING:
    from collections.abc import Callable

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        """For the type checker; see below."""
        ...
else:
    import numba

    compiled = numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@exact
def clip_rows(table: F32, moved: F32, out: F32, item: I64, bound: float) -> None:
    """clip(table[item] + moved) - table[item] to [-bound, bound]; f32[I, d], f32[n, d] twice. A NaN stays one."""
    limit = np.float32(bound)
    for n in range(item.shape[0]):
        start = table[item[n]]
        for j in range(start.shape[0]):
            value = start[j] + moved[n, j]
            value = limit if value > limit else value
            value = -limit if value < -limit else value
            out[n, j] = value - start[j]


@compiled
def free_items(gaps: I64, indptr: I64, user: I64, rank: I64, n_items: int, out: NDArray[np.int32]) -> None:
    """The item of a given rank among those a user does not have, by bisection among those it has; see `sampling`."""
    for i in range(user.shape[0]):
        low, high = indptr[user[i]], indptr[user[i] + 1]
        key = user[i] * (n_items + 1) + rank[i]
        while low < high:
            middle = (low + high) // 2
            if gaps[middle] <= key:
                low = middle + 1
            else:
                high = middle
        out[i] = rank[i] + low - indptr[user[i]]


@compiled
def fold_rows(rows: F32, owner: I64, item: I64, place: I64, sign: F32, out: F32) -> None:
    """Add the rows f32[N, d] of clients i64[N] and items i64[N] to f32[C, S], each coordinate to its place i64[I, d],
    with its sign f32[I, d].
    """
    for n in range(rows.shape[0]):
        mine, where, factor = out[owner[n]], place[item[n]], sign[item[n]]
        for j in range(rows.shape[1]):
            mine[where[j]] += factor[j] * rows[n, j]
