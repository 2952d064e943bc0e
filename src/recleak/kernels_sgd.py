"""Local training of products and perceptrons of two vectors under plain SGD, compiled by numba as in `kernels`.

A client is one loop: its result does not depend on which others are in the call. Axis letters: C clients, S steps,
B examples in a batch, n of them real, d factors, N item rows of all clients, L layers of the head, P numbers of a
client.
"""

from __future__ import annotations

from math import exp, log1p

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled
from recleak.kernels_gcn import _head, _length, _read, _scratch, _step
from recleak.kernels_star import propagate, propagate_back


@compiled
def sgd_epochs(
    row: I64,  # i64[S, C, B]: the rows that each client's batches read
    label: F32,  # f32[S, C, B]
    weight: F32,  # f32[S, C, B]: padding at the end of a batch has 0
    own: NDArray[np.bool_],  # bool[S, C, B]: the item is one of the client's own
    per_epoch: I64,  # i64[C]: steps in an epoch
    first: int,  # the epochs to walk through, from 0: `first` to `last` - 1
    last: int,
    offset: I64,  # i64[C + 1]: of the clients' rows in the table
    neighbor: I64,  # i64[M]: the rows of the clients' own items
    neighbor_offset: I64,  # i64[C + 1]
    star: F32,  # f32[C, 5]: see `models.base.Model.star`; or f32[0, 5]: nothing propagates
    table: F32,  # f32[N, d], changed: item rows
    item_rate: float,
    extra: F32,  # f32[N, d]: a gradient that each row has at every step, in a batch or not; or f32[0, d]
    item_bias: F32,  # f32[N], changed; or f32[0]: no biases
    item_bias_rate: float,
    params: F32,  # f32[C, P], changed: user, then user.bias and bias, if there are any, or a head
    starts: I64,  # i64[parts + 1]: where each part begins; with a head as in `kernels_gcn`, the user in place of E_U
    rates: NDArray[np.float64],  # f64[parts]: learning rates
    widths: I64,  # i64[L + 1]: 2 d, the widths of the hidden layers, 1; without a hidden layer the score is the product
    loss: NDArray[np.float64],  # f64[C], added to: the sum over steps
) -> None:
    """Some epochs of all clients under binary cross-entropy, one client after the other.

    Scores are inner products of user and item, with biases if there are any, or a perceptron with ReLU on both. A step
    touches the rows of its batch only. What moves the others too is made up for when a row is read, and when the epoch
    ends: every own row has the gradient of their sum S, so own rows are `table + drift`, and S is carried from step to
    step; and after t steps of an epoch every row is t times `extra` further. To the propagation the rows of a batch and
    S are a table of n + 1 rows.
    """
    d, batch = table.shape[1], row.shape[2]
    is_product, is_biased = widths.shape[0] == 2, item_bias.shape[0] > 0
    is_spread, is_pulled = star.shape[0] > 0, extra.shape[0] > 0
    count = np.arange(batch + 1)
    before, slope_before = np.empty((batch + 1, d), np.float32), np.empty((batch + 1, d), np.float32)
    item, slope = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32)
    user, user_slope, heard = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    total, drift, pull = np.empty(d, np.float32), np.empty(d, np.float32), np.zeros(d, np.float32)
    shift, score_slope = np.zeros(batch, np.float32), np.empty(batch, np.float32)
    scratch, bend = _scratch(batch, widths), np.zeros(widths[-2], np.float32)  # the loss has no term of the head
    for c in range(per_epoch.shape[0]):
        mine = params[c]
        near = neighbor[neighbor_offset[c] : neighbor_offset[c + 1]] if is_spread else neighbor[:0]
        if is_pulled:
            pull[:] = 0
            _add_rows(extra, near, pull)
        for epoch in range(first, last):
            total[:] = 0  # anew: what rounding adds up to does not outlive an epoch
            _add_rows(table, near, total)
            drift[:] = 0
            for step in range(epoch * per_epoch[c], (epoch + 1) * per_epoch[c]):
                n = _length(weight[step, c])
                here, is_own = row[step, c, :n], own[step, c, :n]
                seen, slopes = (before, slope_before) if is_spread else (item, slope)
                for i in range(n):
                    _read(table[here[i]], drift, np.float32(is_own[i]), seen[i])
                    if is_pulled:
                        _step(seen[i], extra[here[i]], item_rate * (step - epoch * per_epoch[c]))
                if is_spread:
                    seen[n] = total
                    propagate(
                        mine[:d], seen, count[:n], is_own, count[n : n + 1], star[c], user_slope, heard, user, item
                    )
                else:
                    user[:] = mine[:d]
                if is_product:
                    if is_biased:
                        _read_biases(item_bias, here, mine[d] + mine[d + 1], shift)
                    loss[c] += _product(
                        user, item[:n], label[step, c], weight[step, c], shift, score_slope, user_slope, slope
                    )
                    if is_biased:
                        _step_biases(item_bias, item_bias_rate, here, score_slope, mine[d:], rates[1:])
                else:
                    loss[c] += _head(
                        mine,
                        starts,
                        rates,
                        widths,
                        user,
                        item[:n],
                        label[step, c],
                        weight[step, c],
                        False,
                        False,
                        bend,
                        scratch,
                        user_slope,
                        slope[:n],
                    )
                if is_spread:
                    slopes[: n + 1] = 0
                    propagate_back(0, count[:n], is_own, count[n : n + 1], star[c], slope, heard, user_slope, slopes)
                    _step(drift, slopes[n], item_rate)
                    _step(total, slopes[n], item_rate * near.shape[0])
                    _step(total, pull, item_rate)
                _step(mine[:d], user_slope, rates[0])
                for i in range(n):
                    _step(table[here[i]], slopes[i], item_rate)
                    if is_spread and is_own[i]:
                        _step(total, slopes[i], item_rate)
            for k in range(near.shape[0]):
                _step(table[near[k]], drift, -1.0)
            if is_pulled:
                for r in range(offset[c], offset[c + 1]):
                    _step(table[r], extra[r], item_rate * per_epoch[c])


@compiled
def _add_rows(table: F32, row: I64, out: F32) -> None:
    """out += the sum of some rows; f32[N, d], i64[n], f32[d]."""
    for k in range(row.shape[0]):
        for j in range(out.shape[0]):
            out[j] += table[row[k], j]


@compiled
def _read_biases(item_bias: F32, row: I64, client: float, out: F32) -> None:
    """What biases add to the scores of a batch: f32[N], i64[n], and one number -> f32[n]."""
    for i in range(row.shape[0]):
        out[i] = item_bias[row[i]] + client


@compiled
def _step_biases(
    item_bias: F32,  # f32[N], changed
    item_rate: float,
    row: I64,  # i64[n]
    slope: F32,  # f32[B]: the gradient with respect to the scores
    biases: F32,  # f32[2], changed: those that all scores of a client have
    rates: NDArray[np.float64],  # f64[2]
) -> None:
    """A step of all biases that a batch reads."""
    summed, factor = np.float32(0), np.float32(item_rate)
    for i in range(row.shape[0]):
        summed += slope[i]
        item_bias[row[i]] -= factor * slope[i]
    for k in range(2):
        biases[k] -= np.float32(rates[k]) * summed


@compiled
def _product(
    user: F32,  # f32[d]
    item: F32,  # f32[n, d]
    label: F32,  # f32[B]
    weight: F32,  # f32[B]
    shift: F32,  # f32[B]: what is added to the products
    slope: F32,  # f32[B], written: the gradient with respect to the scores
    gradient: F32,  # f32[d], written: that with respect to the user
    item_gradient: F32,  # f32[B, d], written
) -> float:
    """The weighted cross-entropy of one client's batch with inner products as scores, and its gradients."""
    zero = np.float32(0)
    gradient[:] = zero
    loss = 0.0
    for i in range(item.shape[0]):
        s = zero
        for j in range(user.shape[0]):
            s += user[j] * item[i, j]
        s += shift[i]
        odds = exp(-abs(np.float64(s)))
        loss += weight[i] * (max(s, zero) - s * label[i] + log1p(odds))
        g = np.float32((1 if s >= zero else odds) / (1 + odds) - label[i]) * weight[i]
        slope[i] = g
        for j in range(user.shape[0]):
            gradient[j] += g * item[i, j]
            item_gradient[i, j] = g * user[j]
    return loss
