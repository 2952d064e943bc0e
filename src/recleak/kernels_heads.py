"""Heads on many item rows: scores, their gradients, and movements along these, compiled by numba as in `kernels`.

A client at a time and some rows at a time, so that all but the movements stays in the cache.
Axis letters: C clients, N item rows of all clients, I items, d factors, u the length of a user's vector.
"""

from __future__ import annotations

import numpy as np

from recleak.kernels import F32, I64, compiled

_ROWS = 256  # at a time


@compiled
def sum_of_rows(table: F32, item: I64, weight: F32, offset: I64, out: F32) -> None:
    """The weighted sum of each client's rows: f32[I, d], i64[N], f32[N], i64[C + 1] -> f32[C, d]."""
    for c in range(offset.shape[0] - 1):
        mine = out[c]
        mine[:] = 0
        for n in range(offset[c], offset[c + 1]):
            row, share = table[item[n]], weight[n]
            for j in range(row.shape[0]):
                mine[j] += share * row[j]


@compiled
def score_rows(table: F32, item: I64, offset: I64, vector: F32, constant: F32, out: F32) -> None:
    """Products of each client's vector with its rows, plus a constant: f32[I, d], i64[N], i64[C + 1], f32[C, d], f32[C]
    -> f32[N].
    """
    for c in range(offset.shape[0] - 1):
        mine = vector[c]
        for n in range(offset[c], offset[c + 1]):
            row, score = table[item[n]], constant[c]
            for j in range(row.shape[0]):
                score += mine[j] * row[j]
            out[n] = score


@compiled
def along_slopes(
    table: F32,  # f32[I, d]
    item: I64,  # i64[N]
    offset: I64,  # i64[C + 1]
    moved: F32,  # f32[N, d]
    user: F32,  # f32[C, u]
    params: F32,  # f32[C, P], or f32[1, P] for all: weight and bias of each layer
    widths: I64,  # i64[L + 1]: u + d, the widths of the hidden layers, 1
    along: F32,  # f32[N], written: the movement of each row along the gradient of its score, not yet over its length
    score: F32,  # f32[N], written
    length: F32,  # f32[N], written: of the gradient
    total: F32,  # f32[C, d], written: the sum of the gradients
) -> None:
    """A perceptron with ReLU between its layers on [user, row]; the gradients are those with respect to the row."""
    d, u, layers = table.shape[1], user.shape[1], widths.shape[0] - 1
    starts, places = np.zeros(layers + 1, np.int64), np.zeros(layers, np.int64)  # of layers, of what they read
    for layer in range(layers):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * widths[layer + 1]
        if layer:
            places[layer] = places[layer - 1] + _ROWS * (d if layer == 1 else widths[layer - 1])
    inputs = np.empty(places[-1] + _ROWS * widths[-2], np.float32)
    back, other = np.empty(_ROWS * max(d, widths[1:].max()), np.float32), np.empty(_ROWS * widths.max(), np.float32)
    shift = np.empty(widths[1], np.float32)
    for c in range(offset.shape[0] - 1):
        mine = params[c if params.shape[0] > 1 else 0]
        m = widths[1]
        first = mine[: (u + d) * m].reshape(u + d, m)
        shift[:] = mine[(u + d) * m : starts[1]]
        for i in range(u):
            for j in range(m):
                shift[j] += user[c, i] * first[i, j]
        total[c] = 0
        for low in range(offset[c], offset[c + 1], _ROWS):
            n = min(_ROWS, offset[c + 1] - low)
            rows = inputs[: n * d].reshape(n, d)
            for r in range(n):
                rows[r] = table[item[low + r]]
            before, weight, bias = rows, first[u:], shift
            for layer in range(layers - 1):
                m = widths[layer + 1]
                if layer:
                    at = starts[layer]
                    weight = mine[at : at + widths[layer] * m].reshape(widths[layer], m)
                    bias = mine[at + widths[layer] * m : starts[layer + 1]]
                hidden = inputs[places[layer + 1] : places[layer + 1] + n * m].reshape(n, m)
                np.dot(before, weight, hidden)
                for r in range(n):
                    for j in range(m):
                        hidden[r, j] = max(hidden[r, j] + bias[j], np.float32(0))
                before = hidden
            m, at = widths[-2], starts[layers - 1]
            last, constant = mine[at : at + m], mine[at + m]
            here = back[: n * m].reshape(n, m)
            for r in range(n):
                s = constant
                for j in range(m):
                    s += before[r, j] * last[j]
                    here[r, j] = last[j] if before[r, j] > 0 else np.float32(0)
                score[low + r] = s
            for layer in range(layers - 2, 0, -1):
                m, at = widths[layer], starts[layer]
                weight = mine[at : at + m * widths[layer + 1]].reshape(m, widths[layer + 1])
                there = other[: n * m].reshape(n, m)
                np.dot(here, weight.T, there)
                hidden = inputs[places[layer] : places[layer] + n * m].reshape(n, m)
                here = back[: n * m].reshape(n, m)
                for r in range(n):
                    for j in range(m):
                        here[r, j] = there[r, j] if hidden[r, j] > 0 else np.float32(0)
            slope = other[: n * d].reshape(n, d)
            np.dot(here, first[u:].T, slope)
            _project(slope, moved[low : low + n], along[low : low + n], length[low : low + n], total[c])


@compiled
def _project(slope: F32, moved: F32, along: F32, length: F32, total: F32) -> None:
    """Products of movements with gradients, f32[n, d] both; lengths of the gradients; their sum on top of `total`."""
    for r in range(slope.shape[0]):
        product, square = np.float32(0), np.float32(0)
        for j in range(slope.shape[1]):
            product += slope[r, j] * moved[r, j]
            square += slope[r, j] * slope[r, j]
            total[j] += slope[r, j]
        along[r], length[r] = product, np.sqrt(square)
