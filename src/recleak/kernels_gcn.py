"""Local training of APM's graph model (`models.feature_gcn`) under SGD, compiled by numba for the CPU as in `kernels`.

A client is one loop: its result does not depend on which others are in the call. Axis letters: C clients, S steps,
B examples in a batch, n of them real, d factors, F user features, L layers of the head, P numbers of a client.
"""

from __future__ import annotations

from math import exp, log, log1p

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled

_ENCODER, _NEIGHBORS, _OUTPUT, _BIAS, _HEAD = range(5)  # parts of a client's parameters; then bias 1, weight 2, ...


@compiled
def feature_gcn_epochs(
    row: I64,  # i64[S, C, B]: the rows that each client's batches read
    label: F32,  # f32[S, C, B]
    weight: F32,  # f32[S, C, B]: padding at the end of a batch has 0
    own: NDArray[np.bool_],  # bool[S, C, B]: the item is one of the client's own
    per_epoch: I64,  # i64[C]: steps in an epoch
    first: int,  # the epochs to walk through, from 0: `first` to `last` - 1
    last: int,
    neighbor: I64,  # i64[M]: the rows of the clients' own items
    neighbor_offset: I64,  # i64[C + 1]
    features: F32,  # f32[C, F]: x_u
    table: F32,  # f32[N, d], changed: item rows
    item_rate: float,
    params: F32,  # f32[C, P], changed: E_U, W1, W2, b, then weight and bias of each layer of the head
    starts: I64,  # i64[parts + 1]: where each part begins; a part that is not there has no length
    rates: NDArray[np.float64],  # f64[parts]: learning rates
    widths: I64,  # i64[L + 1]: 2 d, the widths of the hidden layers, 1
    taylor: bool,  # the loss is cross-entropy to second order
    bounded: bool,  # the input of the last layer is clamped to [0, 1]
    polynomial_scale: float,  # of random terms of the loss, scale (n1 . h + sum over m <= l of N2_ml h_m h_l); 0: none
    polynomial_offset: I64,  # i64[C]: the place of each client's first step in this call
    linear: F32,  # f32[T, m]: n1 of each step, for the weights h of the last layer
    square: F32,  # f32[T, m, m]: N2
    loss: NDArray[np.float64],  # f64[C], added to: the sum over steps
) -> None:
    """Some epochs of all clients, one client after the other, so that its rows and parameters stay in the cache.

    Two parts of a gradient are the same step after step, and are added up until the epoch ends. Every own row has the
    mean's gradient / degree, so own rows are `table + drift`, and their sum is carried from step to step; and E_U has
    x_u (x) g with a constant x_u, so x_u E_U is carried too, which a step moves by -rate |x_u|^2 g.
    """
    d, batch = table.shape[1], row.shape[2]
    item, item_gradient = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32)
    scratch = _scratch(batch, widths)
    encoded, pull = np.empty(d, np.float32), np.empty(d, np.float32)  # x_u E_U, and the sum of its gradients
    total, drift = np.empty(d, np.float32), np.empty(d, np.float32)
    mean, joined, user = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    slope, slope_before = np.empty(d, np.float32), np.empty(d, np.float32)
    kernel = _HEAD + 2 * (widths.shape[0] - 2)  # the part that h is
    bend = np.zeros(widths[-2], np.float32)  # the gradient of the random terms
    for c in range(per_epoch.shape[0]):
        mine, x = params[c], features[c]
        encoder = mine[starts[_ENCODER] : starts[_ENCODER + 1]].reshape(x.shape[0], d)
        neighbors = mine[starts[_NEIGHBORS] : starts[_NEIGHBORS + 1]].reshape(d, d)
        output = mine[starts[_OUTPUT] : starts[_OUTPUT + 1]].reshape(d, d)
        bias = mine[starts[_BIAS] : starts[_BIAS + 1]]
        near = neighbor[neighbor_offset[c] : neighbor_offset[c + 1]]
        share, length = np.float32(1 / max(1, near.shape[0])), 0.0
        for f in range(x.shape[0]):
            length += float(x[f]) ** 2  # |x_u|^2
        for epoch in range(first, last):
            _begin(x, encoder, table, near, encoded, total)
            drift[:] = 0
            pull[:] = 0
            for step in range(epoch * per_epoch[c], (epoch + 1) * per_epoch[c]):
                n = _length(weight[step, c])
                here, is_own = row[step, c, :n], own[step, c, :n]
                for i in range(n):
                    _read(table[here[i]], drift, np.float32(is_own[i]), item[i])
                for j in range(d):
                    mean[j] = share * total[j]
                    joined[j] = encoded[j]
                    user[j] = bias[j]
                _add_product(mean, neighbors, joined)
                _add_product(joined, output, user)
                for j in range(d):
                    user[j] = max(user[j], np.float32(0))
                if polynomial_scale > 0:
                    at = polynomial_offset[c] + step - first * per_epoch[c]
                    h = mine[starts[kernel] : starts[kernel + 1]]
                    _polynomial_gradient(polynomial_scale, linear[at], square[at], h, bend)
                loss[c] += _head(
                    mine,
                    starts,
                    rates,
                    widths,
                    user,
                    item[:n],
                    label[step, c],
                    weight[step, c],
                    taylor,
                    bounded,
                    bend,
                    scratch,
                    slope,
                    item_gradient[:n],
                )
                for j in range(d):
                    slope[j] = slope[j] if user[j] > 0 else np.float32(0)
                _step(bias, slope, rates[_BIAS])
                _step_product(joined, output, slope, rates[_OUTPUT], slope_before)
                _step(encoded, slope_before, rates[_ENCODER] * length)
                _step(pull, slope_before, -1.0)
                _step_product(mean, neighbors, slope_before, rates[_NEIGHBORS], slope)
                if near.shape[0]:
                    _step(drift, slope, item_rate * share)
                    _step(total, slope, item_rate)
                for i in range(n):
                    _step(table[here[i]], item_gradient[i], item_rate)
                    if is_own[i]:
                        _step(total, item_gradient[i], item_rate)
            for k in range(near.shape[0]):
                _step(table[near[k]], drift, -1.0)
            for f in range(x.shape[0]):
                _step(encoder[f], pull, rates[_ENCODER] * x[f])


@compiled
def _begin(x: F32, encoder: F32, table: F32, near: I64, encoded: F32, total: F32) -> None:
    """x_u E_U and the sum of own rows, anew: what rounding adds up to does not outlive an epoch."""
    encoded[:] = 0
    _add_product(x, encoder, encoded)
    total[:] = 0
    for k in range(near.shape[0]):
        _step(total, table[near[k]], -1.0)


@compiled
def _length(weight: F32) -> int:
    """How many examples a batch has before its padding."""
    n: int = weight.shape[0]
    while n > 1 and weight[n - 1] == 0:
        n -= 1
    return n


@compiled
def _read(row: F32, drift: F32, own: float, out: F32) -> None:
    """A row as it is now."""
    for j in range(row.shape[0]):
        out[j] = row[j] + own * drift[j]


@compiled
def _add_product(x: F32, matrix: F32, out: F32) -> None:
    """out += x M, four rows of M at a time; f32[i], f32[i, o], f32[o]."""
    rows = matrix.shape[0] // 4 * 4
    for i in range(0, rows, 4):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        for j in range(matrix.shape[1]):
            out[j] += a * matrix[i, j] + b * matrix[i + 1, j] + c * matrix[i + 2, j] + d * matrix[i + 3, j]
    for i in range(rows, matrix.shape[0]):
        for j in range(matrix.shape[1]):
            out[j] += x[i] * matrix[i, j]


@compiled
def _step_product(x: F32, matrix: F32, gradient: F32, rate: float, before: F32) -> None:
    """From the gradient of x M, f32[o]: that of x, f32[i], is written to `before`, and M is stepped."""
    for i in range(matrix.shape[0]):
        factor, through = np.float32(rate) * x[i], np.float32(0)
        for j in range(matrix.shape[1]):
            through += matrix[i, j] * gradient[j]
            matrix[i, j] -= factor * gradient[j]
        before[i] = through


@compiled
def _scratch(batch: int, widths: I64) -> tuple[I64, F32, F32, F32, F32]:
    """Working memory of a head: where each hidden layer lies, i64[L], the last is the size; the numbers of hidden
    layers, their gradients, the gradient of a weight, and a gradient summed over a batch.
    """
    layers = widths.shape[0] - 1
    places = np.zeros(layers, np.int64)
    largest = widths[0] // 2 * widths[1]
    for layer in range(1, layers):
        places[layer] = places[layer - 1] + batch * widths[layer]
        largest = max(largest, widths[layer] * widths[layer + 1])
    hidden, back = np.empty(places[-1], np.float32), np.empty(places[-1], np.float32)
    return places, hidden, back, np.empty(largest, np.float32), np.empty(np.max(widths[1:]), np.float32)


@compiled
def _head(
    params: F32,  # f32[P], changed: the head is stepped
    starts: I64,
    rates: NDArray[np.float64],
    widths: I64,
    user: F32,  # f32[u]: as wide as an item, or not
    item: F32,  # f32[n, d]
    label: F32,  # f32[B]
    weight: F32,  # f32[B]
    taylor: bool,
    bounded: bool,
    bend: F32,  # f32[m]: what is added to the gradient of the last layer's weights
    scratch: tuple[I64, F32, F32, F32, F32],
    user_gradient: F32,  # f32[u], written
    item_gradient: F32,  # f32[n, d], written
) -> float:
    """The weighted loss of one batch, its gradients with respect to user and items, and a step of the head.

    The user's part of the first layer is the same for all items: it is added to the bias.
    """
    places, hidden, back, weight_gradient, summed = scratch
    n, d = item.shape
    u = user.shape[0]
    layers = widths.shape[0] - 1
    m = widths[1]
    matrix = params[starts[_HEAD] : starts[_HEAD + 1]].reshape(u + d, m)
    bias = params[starts[_HEAD + 1] : starts[_HEAD + 2]]
    shift = summed[:m]  # until the gradient is summed there
    shift[:] = bias
    _add_product(user, matrix[:u], shift)
    after = hidden[: n * m].reshape(n, m)
    np.dot(item, matrix[u:], after)
    _add_bias(after, shift, layers > 2)
    for layer in range(1, layers - 1):
        before, m, at = after, widths[layer + 1], starts[_HEAD + 2 * layer]
        after = hidden[places[layer] : places[layer] + n * m].reshape(n, m)
        np.dot(before, params[at : at + widths[layer] * m].reshape(widths[layer], m), after)
        at += widths[layer] * m
        _add_bias(after, params[at : at + m], layer < layers - 2)
    part = _HEAD + 2 * (layers - 1)
    here = back[places[layers - 2] : places[layers - 2] + n * m].reshape(n, m)
    loss: float = _score(
        after,
        params[starts[part] : starts[part + 1]],
        params[starts[part + 1] : starts[part + 2]],
        rates[part : part + 2],
        label,
        weight,
        taylor,
        bounded,
        bend,
        weight_gradient[:m],
        here,
        summed[:m],
    )
    for layer in range(layers - 2, 0, -1):
        before_width, m, part = widths[layer], widths[layer + 1], _HEAD + 2 * layer
        place = places[layer - 1]
        before = hidden[place : place + n * before_width].reshape(n, before_width)
        there = back[place : place + n * before_width].reshape(n, before_width)
        weights = params[starts[part] : starts[part + 1]]
        gradient = weight_gradient[: before_width * m]
        np.dot(before.T, here, gradient.reshape(before_width, m))
        np.dot(here, weights.reshape(before_width, m).T, there)
        _step(weights, gradient, rates[part])
        _step(params[starts[part + 1] : starts[part + 2]], summed[:m], rates[part + 1])
        _mask(there, before, summed[:before_width])
        here = there
    m = widths[1]
    np.dot(item.T, here, weight_gradient[: d * m].reshape(d, m))
    np.dot(here, matrix[u:].T, item_gradient)
    _step(params[starts[_HEAD] + u * m : starts[_HEAD + 1]], weight_gradient[: d * m], rates[_HEAD])
    _step(bias, summed[:m], rates[_HEAD + 1])
    _step_product(user, matrix[:u], summed[:m], rates[_HEAD], user_gradient)
    return loss


@compiled
def _score(
    inputs: F32,  # f32[n, m], before ReLU or clamp
    kernel: F32,  # f32[m], stepped
    bias: F32,  # f32[1], stepped; or f32[0]
    rates: NDArray[np.float64],  # f64[2]
    label: F32,
    weight: F32,
    taylor: bool,
    bounded: bool,
    bend: F32,  # f32[m]
    kernel_gradient: F32,  # f32[m], scratch
    back: F32,  # f32[n, m], written: the gradient with respect to the inputs
    summed: F32,  # f32[m], written: its sum
) -> float:
    """The last layer and the weighted loss: cross-entropy, or with `taylor` log 2 + (1/2 - r) s + s^2 / 8."""
    zero, one = np.float32(0), np.float32(1)
    m = inputs.shape[1]
    kernel_gradient[:] = bend
    summed[:] = zero
    shift = bias[0] if bias.shape[0] else zero
    ceiling = one if bounded else np.float32(np.inf)
    bias_gradient, loss = zero, 0.0
    for i in range(inputs.shape[0]):
        s = zero
        for j in range(m):
            s += min(max(inputs[i, j], zero), ceiling) * kernel[j]
        s += shift
        if taylor:
            loss += weight[i] * (log(2) + (0.5 - label[i]) * s + 0.125 * s * s)
            g = np.float32(0.5 - label[i] + 0.25 * s) * weight[i]
        else:
            odds = exp(-abs(np.float64(s)))
            loss += weight[i] * (max(s, zero) - s * label[i] + log1p(odds))
            g = np.float32((1 if s >= zero else odds) / (1 + odds) - label[i]) * weight[i]
        bias_gradient += g
        for j in range(m):
            q = inputs[i, j]
            kernel_gradient[j] += g * min(max(q, zero), ceiling)
            on = ((q >= zero) & (q <= one)) if bounded else (q > zero)  # a clamp passes gradients at its bounds
            through = g * kernel[j] if on else zero
            back[i, j] = through
            summed[j] += through
    _step(kernel, kernel_gradient, rates[0])
    if bias.shape[0]:
        bias[0] -= np.float32(rates[1]) * bias_gradient
    return loss


@compiled
def _polynomial_gradient(scale: float, linear: F32, square: F32, h: F32, out: F32) -> None:
    """Of scale (n1 . h + sum over m <= l of N2_ml h_m h_l) with respect to h; f32[m], f32[m, m], f32[m], f32[m]."""
    out[:] = linear
    for i in range(h.shape[0]):
        through = np.float32(0)
        for j in range(i, h.shape[0]):
            through += square[i, j] * h[j]
            out[j] += square[i, j] * h[i]
        out[i] += through
    for i in range(h.shape[0]):
        out[i] *= np.float32(scale)


@compiled
def _add_bias(hidden: F32, bias: F32, rectify: bool) -> None:
    """hidden + bias in place, and with `rectify` max(0, .) of it."""
    floor = np.float32(0 if rectify else -np.inf)
    for i in range(hidden.shape[0]):
        for j in range(hidden.shape[1]):
            hidden[i, j] = max(hidden[i, j] + bias[j], floor)


@compiled
def _mask(gradient: F32, hidden: F32, summed: F32) -> None:
    """Zero the gradient where the unit was off, in place, and sum it over the batch."""
    summed[:] = 0
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            g = gradient[i, j] if hidden[i, j] > 0 else np.float32(0)
            gradient[i, j] = g
            summed[j] += g


@compiled
def _step(value: F32, gradient: F32, rate: float) -> None:
    """value -= rate gradient: a step of SGD, each number by itself."""
    factor = np.float32(rate)
    for i in range(value.shape[0]):
        value[i] -= factor * gradient[i]
