"""Which rows of received models moved, compiled by numba as in `kernels`: for attacks at nodes.

Axis letters: m models, A adversaries, I items, d factors, k pairs of an adversary and a model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled

F64 = NDArray[np.float64]
_BLOCK = 256  # rows whose differences are in the innermost cache


@compiled
def add_models(models: F32, what: I64, total: F32) -> None:
    """Add some of f32[m, I, d] to f32[I, d]."""
    mine = total.reshape(-1)
    for k in range(what.shape[0]):
        rows = models[what[k]].reshape(-1)
        for i in range(rows.shape[0]):
            mine[i] += rows[i]


@compiled
def spread_apart(models: F32, common: F32, who: I64, what: I64, out: F64) -> None:
    """D^T D of what sets each pair's model apart from what its adversary knows, D f32[I, d] -> f64[k, d, d].

    A block of rows is turned, so that a sum over rows is one over neighbors, which vector instructions take.
    """
    items, d = models.shape[1], models.shape[2]
    apart = np.empty((d, _BLOCK), np.float32)
    for k in range(who.shape[0]):
        model, base, mine = models[what[k]], common[who[k]], out[k]
        mine[:] = 0
        for begin in range(0, items, _BLOCK):
            size = min(_BLOCK, items - begin)
            for i in range(size):
                for j in range(d):
                    apart[j, i] = model[begin + i, j] - base[begin + i, j]
            for j in range(d):
                for other in range(j + 1):
                    mine[j, other] += _product(apart[j, :size], apart[other, :size])
        for j in range(d):
            for other in range(j):
                mine[other, j] = mine[j, other]


@compiled
def _product(one: F32, other: F32) -> np.float32:
    total = np.float32(0)
    for i in range(one.shape[0]):
        total += one[i] * other[i]
    return total


@compiled
def _project(model: F32, base: F32, line: F32, oriented: bool, side: F32, moved: F32) -> None:
    """How far each row of a model is from the base along a line, f32[I, d] twice, f32[d] -> f32[I].

    Unless the line is oriented, its sign is the one with which rows moved with `side`, f32[I]; if that tells nothing,
    the one with which few rows are large and many small.
    """
    lean, cubes = 0.0, 0.0
    for i in range(model.shape[0]):
        step = np.float32(0)
        for j in range(model.shape[1]):
            step += (model[i, j] - base[i, j]) * line[j]
        moved[i] = step
        lean += float(step * side[i])
        cubes += float(step * step * step)
    if not oriented and (lean if lean != 0 else cubes) < 0:
        for i in range(model.shape[0]):
            moved[i] = -moved[i]


@compiled
def project_apart(
    models: F32, common: F32, who: I64, what: I64, along: F32, side: F32, oriented: bool, out: F32
) -> None:
    """How far each pair's rows moved along the pair's direction, f32[m, I, d], f32[A, I, d], f32[k, d] -> f32[k, I]."""
    for k in range(who.shape[0]):
        _project(models[what[k]], common[who[k]], along[k], oriented, side, out[k])


@compiled
def similar_by_moved(
    models: F32, common: F32, who: I64, what: I64,  # f32[m, I, d], f32[A, I, d], i64[k] twice
    along: F32,  # f32[k, d]: the direction in which own items of the pair's sender moved
    side: F32,  # f32[I]: with these rows own items move, as in `_project`
    oriented: bool,  # whether the direction has the right sign
    targets: F32,  # f32[A, I]
    apart: F32,  # f32[m, I]: 1 for items that do not count for a model; or f32[0, 0]
    size: int,  # so many rows that moved most are taken for the sender's own
    out: F32,  # f32[k]
) -> None:  # fmt: skip
    """Jaccard of the rows that moved most with the targets; of rows that moved alike, what a random choice gives."""
    items = models.shape[1]
    moved, largest = np.empty(items, np.float32), np.empty(size, np.float32)
    for k in range(who.shape[0]):
        wanted = targets[who[k]]
        _project(models[what[k]], common[who[k]], along[k], oriented, side, moved)
        limit = _least_of_largest(moved, largest)
        above, level, count = 0.0, 0.0, 0.0  # targets above the limit and at it, and the target items in all
        taken, tied, lost, lost_level = 0, 0, 0, 0  # the last two: of rows above and at it, those that do not count
        for i in range(items):
            off = apart.shape[0] > 0 and apart[what[k], i] != 0
            if not off:
                count += wanted[i]
            if moved[i] > limit:
                taken += 1
                if off:
                    lost += 1
                else:
                    above += wanted[i]
            elif moved[i] == limit:
                tied += 1
                if off:
                    lost_level += 1
                else:
                    level += wanted[i]
        share = (size - taken) / tied
        both = above + level * share
        out[k] = both / max(count + size - lost - lost_level * share - both, 1.0)


@compiled
def _least_of_largest(value: F32, heap: F32) -> np.float32:
    """The least of so many largest values as there is room for; few of many, so that most are looked at once.

    heap[n] is at most heap[2 n + 1] and heap[2 n + 2].
    """
    size = heap.shape[0]
    heap[:] = value[:size]
    for start in range(size // 2 - 1, -1, -1):
        _sink(heap, start)
    for i in range(size, value.shape[0]):
        if value[i] > heap[0]:
            heap[0] = value[i]
            _sink(heap, 0)
    least: np.float32 = heap[0]
    return least


@compiled
def _sink(heap: F32, place: int) -> None:
    """Put one value where it belongs below its place."""
    size, value = heap.shape[0], heap[place]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value
