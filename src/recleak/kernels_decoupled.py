"""Local training of PARD's recommender under plain SGD, compiled by numba as in `kernels`.

A client is one loop: its result does not depend on which others are in the call. Axis letters: C clients, S steps,
B examples in a batch, n of them real, m own items that count, d factors, N item rows of all clients, T attributes,
K classes of the attribute with most, L layers of an estimator, P numbers of a client, Q numbers of its estimators.
"""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled
from recleak.kernels_estimators import _forward
from recleak.kernels_gcn import _head, _length, _read, _scratch, _step

PLAIN, CLAMPED, CLUB = 0, 1, 2  # see `defenses.decoupling.Decoupling.bound`


@compiled
def decoupled_visits(
    row: I64,  # i64[S, C, B]: the rows that each client's batches read
    label: F32,  # f32[S, C, B]
    weight: F32,  # f32[S, C, B]: padding at the end of a batch has 0
    own: NDArray[np.bool_],  # bool[S, C, B]: the item is one of the client's own
    steps: I64,  # i64[C]
    neighbor: I64,  # i64[M]: the rows of the clients' own items
    neighbor_offset: I64,  # i64[C + 1]
    is_graph: bool,  # both vectors of the user become (z + mean of own rows) / 2
    is_sum: bool,  # they are added, and not side by side
    table: F32,  # f32[N, d], changed: item rows
    item_rate: float,
    params: F32,  # f32[C, P], changed: z_ir, z_re, then the head
    starts: I64,  # i64[parts + 1]: where each part begins; as in `kernels_gcn`, the head from the fourth on
    rates: NDArray[np.float64],  # f64[parts]: learning rates
    vector_rates: NDArray[np.float64],  # f64[2]: of z_ir and z_re
    widths: I64,  # i64[layers + 1]: of the head
    estimators: F32,  # f32[C, Q]: constants
    firsts: I64,  # i64[T, 2]: where the estimators of z_ir and of z_re begin
    layouts: I64,  # i64[T, 2, 3, L + 1]: of each its widths, where its layers begin, and where their outputs do
    mu: F32,  # f32[T, C]: a class or a number; NaN: no term
    is_number: NDArray[np.bool_],  # bool[T]
    prior: F32,  # f32[T, C]: log p(mu)
    share: F32,  # f32[T, K]: how frequent classes are
    guess: F32,  # f32[T, C, d]: g(mu)
    bound: int,
    is_mean: bool,  # L_ir reads the mean of own rows, and not one after the other
    pairs: int,
    irrelevant: float,
    relevant: float,
    loss: NDArray[np.float64],  # f64[C], added to: the sum over steps, without the terms of the defense
) -> None:
    """All steps of all clients under binary cross-entropy and the terms of PARD (`defenses.decoupling`).

    With a graph every own row has the gradient of their mean: own rows are `table + drift`, and their sum is carried
    from step to step, as in `kernels_sgd`.
    """
    d, batch = table.shape[1], row.shape[2]
    width = d if is_sum else 2 * d
    before, after, slope_of_user = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(width, np.float32)
    user, shift = np.empty(width, np.float32), np.zeros(d, np.float32)
    item, slope = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32)
    total, drift = np.zeros(d, np.float32), np.zeros(d, np.float32)
    mine, x = np.empty(pairs, np.int64), np.empty((pairs, 2 * d), np.float32)
    scratch, bend = _scratch(batch, widths), np.zeros(widths[-2], np.float32)
    largest = 1
    for t in range(layouts.shape[0]):
        largest = max(largest, layouts[t, 0, 2, -1], layouts[t, 1, 2, -1])
    hidden, back = np.empty(largest, np.float32), np.empty(largest, np.float32)
    for c in range(steps.shape[0]):
        first, second = params[c, :d], params[c, d : 2 * d]
        near = neighbor[neighbor_offset[c] : neighbor_offset[c + 1]] if is_graph else neighbor[:0]
        total[:] = 0
        for k in range(near.shape[0]):
            _step(total, table[near[k]], -1.0)
        drift[:] = 0
        for step in range(steps[c]):
            n = _length(weight[step, c])
            here, is_own = row[step, c, :n], own[step, c, :n]
            for i in range(n):
                _read(table[here[i]], drift, np.float32(is_own[i]), item[i])
            scale, half = np.float32(1 / max(near.shape[0], 1)), np.float32(0.5 if is_graph else 1.0)
            for j in range(d):
                shift[j] = total[j] * scale if is_graph else np.float32(0)
                before[j], after[j] = half * (first[j] + shift[j]), half * (second[j] + shift[j])
            if is_sum:
                for j in range(d):
                    user[j] = before[j] + after[j]
            else:
                user[:d] = before
                user[d:] = after
            loss[c] += _head(
                params[c],
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
                slope_of_user,
                slope[:n],
            )
            for j in range(d):
                before[j] = half * slope_of_user[j]
                after[j] = half * slope_of_user[j if is_sum else d + j]
                shift[j] = before[j] + after[j]
            m = 0
            for i in range(n):
                if is_own[i] and m < pairs:
                    mine[m] = i
                    m += 1
            for t in range(mu.shape[0]):
                if mu[t, c] != mu[t, c]:
                    continue
                if irrelevant > 0 and m > 0:
                    _add_leaving(
                        estimators[c, firsts[t, 0] :],
                        layouts[t, 0],
                        first,
                        item,
                        mine[:m],
                        is_mean,
                        x,
                        mu[t, c],
                        is_number[t],
                        prior[t, c],
                        share[t],
                        bound,
                        irrelevant,
                        hidden,
                        back,
                        before,
                        slope,
                    )
                if relevant > 0:
                    _add_staying(
                        estimators[c, firsts[t, 1] :],
                        layouts[t, 1],
                        second,
                        x,
                        mu[t, c],
                        is_number[t],
                        guess[t, c],
                        relevant,
                        hidden,
                        back,
                        after,
                    )
            _step(first, before, vector_rates[0])
            _step(second, after, vector_rates[1])
            if is_graph:
                _step(drift, shift, item_rate * scale)
                _step(total, shift, item_rate if near.shape[0] else 0.0)
            for i in range(n):
                _step(table[here[i]], slope[i], item_rate)
                if is_graph and is_own[i]:
                    _step(total, slope[i], item_rate)
        for k in range(near.shape[0]):
            _step(table[near[k]], drift, -1.0)


@compiled
def _add_leaving(
    estimator: F32,
    layout: I64,  # i64[3, L + 1]
    user: F32,  # f32[d]: z_ir
    item: F32,  # f32[B, d]
    mine: I64,  # i64[m]: places of own items in the batch
    is_mean: bool,
    x: F32,  # f32[pairs, 2 d], scratch
    mu: float,
    is_number: bool,
    prior: float,
    share: F32,  # f32[K]
    bound: int,
    strength: float,
    hidden: F32,
    back: F32,
    user_slope: F32,  # f32[d], added to
    slope: F32,  # f32[B, d], added to
) -> None:
    """The gradient of L_ir of one attribute (eq. 16)."""
    widths, starts, places = layout[0], layout[1], layout[2]
    d, m, one = user.shape[0], mine.shape[0], np.float32(1)
    r = 1 if is_mean else m
    part = one / np.float32(m)
    for k in range(r):
        x[k, :d] = user
        x[k, d:] = 0
    for k in range(m):
        at, factor = (0, part) if is_mean else (k, one)
        for j in range(d):
            x[at, d + j] += factor * item[mine[k], j]
    _forward(estimator, starts, places, widths, x[:r], hidden)
    last, o = places[-2], widths[-1]
    output, out = hidden[last : last + r * o].reshape(r, o), back[last : last + r * o].reshape(r, o)
    factor = np.float32(strength) if is_mean else np.float32(strength) * part
    for k in range(r):
        surprise = _log_slopes(output[k], mu, is_number, share, bound, out[k])
        on = factor if bound != CLAMPED or surprise >= prior else np.float32(0)
        for j in range(o):
            out[k, j] *= on
    _to_inputs(estimator, starts, places, widths, r, hidden, back, x)
    for k in range(r):
        for j in range(d):
            user_slope[j] += x[k, j]
    for k in range(m):
        at, factor = (0, part) if is_mean else (k, one)
        for j in range(d):
            slope[mine[k], j] += factor * x[at, d + j]


@compiled
def _add_staying(
    estimator: F32,
    layout: I64,
    private: F32,  # f32[d]: z_re
    x: F32,  # scratch
    mu: float,
    is_number: bool,
    guess: F32,  # f32[d]: g(mu)
    strength: float,
    hidden: F32,
    back: F32,
    private_slope: F32,  # f32[d], added to
) -> None:
    """The gradient of L_re^FP and L_re^IP of one attribute (eq. 29, 33)."""
    widths, starts, places = layout[0], layout[1], layout[2]
    d, factor = private.shape[0], np.float32(strength)
    line = x.reshape(-1)[:d].reshape(1, d)
    line[0] = private
    _forward(estimator, starts, places, widths, line, hidden)
    last, o = places[-2], widths[-1]
    out = back[last : last + o].reshape(1, o)
    _log_slopes(hidden[last : last + o], mu, is_number, guess[:0], PLAIN, out[0])
    for j in range(o):
        out[0, j] *= -factor
    _to_inputs(estimator, starts, places, widths, 1, hidden, back, line)
    square = 0.0
    for j in range(d):
        square += np.float64(private[j] - guess[j]) ** 2
    scale = np.float32(strength / sqrt(square) if square > 0 else 0.0)
    for j in range(d):
        private_slope[j] += line[0, j] + scale * (private[j] - guess[j])


@compiled
def _log_slopes(output: F32, mu: float, is_number: bool, share: F32, bound: int, out: F32) -> float:
    """log q(mu), and the gradient of what is made small, with respect to the outputs f32[o]."""
    if is_number:
        out[0] = np.float32(mu) if bound == CLUB else np.float32(mu) - output[0]
        return -0.5 * (np.float64(output[0]) - mu) ** 2
    o, right = output.shape[0], np.int64(mu)
    top = output[0]
    for j in range(1, o):
        top = max(top, output[j])
    total = 0.0
    for j in range(o):
        out[j] = exp(np.float64(output[j] - top))
        total += out[j]
    for j in range(o):
        chance = share[j] if bound == CLUB else np.float32(out[j] / total)
        out[j] = np.float32(j == right) - chance
    return np.float64(output[right] - top) - log(total)


@compiled
def _to_inputs(params: F32, starts: I64, places: I64, widths: I64, r: int, hidden: F32, back: F32, x: F32) -> None:
    """From the gradient of the outputs, which is in `back`, to that of the inputs, f32[r, i], which is written to x."""
    layers = widths.shape[0] - 1
    here = back[places[layers - 1] : places[layers - 1] + r * widths[layers]].reshape(r, widths[layers])
    for layer in range(layers - 1, -1, -1):
        i, o, at = widths[layer], widths[layer + 1], starts[layer]
        matrix = params[at : at + i * o].reshape(i, o)
        if layer == 0:
            np.dot(here, matrix.T, x[:r])
            return
        place = places[layer - 1]
        before = hidden[place : place + r * i].reshape(r, i)
        there = back[place : place + r * i].reshape(r, i)
        np.dot(here, matrix.T, there)
        for k in range(r):
            for j in range(i):
                there[k, j] = there[k, j] if before[k, j] > 0 else np.float32(0)
        here = there
