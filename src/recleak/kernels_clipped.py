"""Perceptrons on [user, item] with the gradient of every example clipped (DP-SGD), compiled by numba as in `kernels`.

The gradient of one example with respect to a layer is the outer product of what the layer reads and the slope of its
outputs, so its norm is the product of two norms, and the sum of clipped gradients is one product of matrices whose
slopes are scaled: no gradient of a single example is ever made but those of the two vectors.

A client is one loop: its result does not depend on which others are in the call. Axis letters: C clients, A active
ones, S steps, B examples in a batch, n of them real, d factors, N item rows of all clients, L layers, P numbers of a
client beside its rows, parts of them with a learning rate each (user, weight 1, bias 1, ...), T kinds of noise.
"""

from __future__ import annotations

from math import exp, isfinite, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak import draws
from recleak.draws import U64
from recleak.kernels import F32, I64, compiled
from recleak.kernels_adam import adam_numbers, adam_parts
from recleak.kernels_gcn import _length
from recleak.kernels_perceptron import forward, layout

F64 = NDArray[np.float64]

_SLACK = 1 - 2.0**-22  # as in `defenses.clipping`, for what roundings to float32 add
_ROWS = 64  # of a table at a time, so that noise goes from the innermost cache into Adam


@compiled
def clipped_sums(
    row: I64,  # i64[A, B]: the rows that each client's batch reads
    label: F32,  # f32[A, B]
    weight: F32,  # f32[A, B]: padding at the end of a batch has 0
    table: F32,  # f32[N, d]
    params: F32,  # f32[A, P]: user, then weight and bias of each layer
    widths: I64,  # i64[L + 1]: 2 d, the widths of the hidden layers, 1
    bound: float,
    of_rows: F32,  # f32[N, d], added to
    of_params: F32,  # f32[A, P], written
    loss: F32,  # f32[A], added to
) -> None:
    """The sum over each client's batch of the gradients of its examples, each with a norm of at most `bound`."""
    d, batch = table.shape[1], row.shape[1]
    starts, _, places = layout(d, batch, widths)
    item, of_item, scratch = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32), _scratch(batch, widths)
    for c in range(row.shape[0]):
        n = _length(weight[c])
        for i in range(n):
            item[i] = table[row[c, i]]
        loss[c] += _clipped(
            params[c], item[:n], label[c], weight[c], widths, starts, places, bound, scratch, of_params[c], of_item[:n]
        )
        for i in range(n):
            for j in range(d):
                of_rows[row[c, i], j] += of_item[i, j]


@compiled
def noisy_visits(
    row: I64,  # i64[S, C, B], as the next two in `clipped_sums`
    label: F32,
    weight: F32,
    steps: I64,  # i64[C]
    age: I64,  # i64[C]: steps that the optimizer has made before
    offset: I64,  # i64[C + 1]: of the clients' rows in the table
    number: I64,  # i64[N]: the item of each row
    table: F32,  # f32[N, d], changed, as its moments
    table_mean: F32,
    table_square: F32,
    item_rate: float,
    params: F32,  # f32[C, P], changed, as its moments
    mean: F32,
    square: F32,
    widths: I64,
    rates: F64,  # f64[parts]
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bound: float,
    scale: F32,  # f32[T]: the standard deviation of the noise on every number of a sum
    state: U64,  # u64[T, parts + 1]: of the draws for each part and, last, for the rows
    key: U64,  # u64[S, C]: of the clients' draws at each step
    loss: F32,  # f32[C], written: the mean over steps
) -> None:
    """Local training under binary cross-entropy with clipped examples, normal noise on their sum, and Adam.

    All rows of a client are stepped at every step: those outside the batch have a gradient of noise. A few rows at a
    time get their noise and make their step, so that the gradient of a whole table is never in memory.
    """
    d, batch, size = table.shape[1], row.shape[2], params.shape[1]
    starts, spans, places = layout(d, batch, widths)
    item, of_item, scratch = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32), _scratch(batch, widths)
    gradient, some, rate = np.empty(size, np.float32), np.empty((_ROWS, d), np.float32), np.empty(3, np.float32)
    first = np.full(np.max(np.diff(offset)), -1)  # where a row of the client is met first in a batch
    nobody = np.zeros(_ROWS, np.int64)  # the place of the one client whose key is at hand
    for c in range(steps.shape[0]):
        low, high = offset[c], offset[c + 1]
        sum_of_losses = 0.0
        for step in range(steps[c]):
            n, mine = _length(weight[step, c]), key[step, c : c + 1]
            here = row[step, c, :n]
            for i in range(n):
                item[i] = table[here[i]]
            sum_of_losses += _clipped(
                params[c],
                item[:n],
                label[step, c],
                weight[step, c],
                widths,
                starts,
                places,
                bound,
                scratch,
                gradient,
                of_item[:n],
            )
            time, share = age[c] + step + 1, np.float32(n)
            first_moment, second_moment = 1 - beta1**time, 1 - beta2**time
            rate[1], rate[2] = 1 / sqrt(second_moment), eps
            for t in range(scale.shape[0]):
                for part in range(rates.shape[0]):
                    numbers = gradient[spans[part] : spans[part + 1]].reshape(1, -1)
                    draws.add(draws.NORMAL, scale[t], state[t, part], mine, nobody[:1], nobody[:1], numbers)
            _divide(gradient, share)
            adam_parts(
                params[c], mean[c], square[c], gradient, spans, rates, first_moment, rate, beta1, beta2, weight_decay
            )
            rate[0] = item_rate / first_moment
            _join(here, low, of_item, first)
            for begin in range(low, high, _ROWS):
                end = min(begin + _ROWS, high)
                sums = some[: end - begin]
                _spread(of_item, first[begin - low : end - low], sums)
                for t in range(scale.shape[0]):
                    draws.add(
                        draws.NORMAL, scale[t], state[t, -1], mine, nobody[: end - begin], number[begin:end], sums
                    )
                flat = sums.reshape(-1)
                _divide(flat, share)
                adam_numbers(
                    table[begin:end].reshape(-1),
                    table_mean[begin:end].reshape(-1),
                    table_square[begin:end].reshape(-1),
                    flat,
                    rate,
                    beta1,
                    beta2,
                    weight_decay,
                )
            for i in range(n):
                first[here[i] - low] = -1
        loss[c] = sum_of_losses / steps[c]


@compiled
def _join(row: I64, low: int, of_item: F32, first: I64) -> None:
    """Where each row is met first, and there the sum of its gradients; i64[n], f32[B, d], i64[K]."""
    for i in range(row.shape[0]):
        r = row[i] - low
        if first[r] < 0:
            first[r] = i
        else:
            for j in range(of_item.shape[1]):
                of_item[first[r], j] += of_item[i, j]


@compiled
def _spread(of_item: F32, first: I64, out: F32) -> None:
    """The gradients of some rows, zero for those outside the batch; f32[B, d], i64[k] -> f32[k, d]."""
    for r in range(first.shape[0]):
        if first[r] < 0:
            out[r] = 0
        else:
            out[r] = of_item[first[r]]


@compiled
def _divide(numbers: F32, by: float) -> None:
    """By the size of the batch, in place."""
    for i in range(numbers.shape[0]):
        numbers[i] /= by


@compiled
def _scratch(batch: int, widths: I64) -> tuple[F32, F32, F32, F32, F64, F64]:
    """Working memory of `_clipped`: hidden layers, their slopes, slopes of [user, item], those of scores, squared norms
    of gradients, and what they are scaled by.
    """
    hidden = batch * np.sum(widths[1:-1])
    return (
        np.empty(hidden, np.float32),
        np.empty(hidden, np.float32),
        np.empty(batch * widths[0], np.float32),
        np.empty(batch, np.float32),
        np.empty(batch, np.float64),
        np.empty(batch, np.float64),
    )


@compiled
def _clipped(
    params: F32,  # f32[P]
    item: F32,  # f32[n, d]: a copy; rows of examples that are not finite become 0
    label: F32,  # f32[B]
    weight: F32,  # f32[B]
    widths: I64,
    starts: I64,
    places: I64,
    bound: float,
    scratch: tuple[F32, F32, F32, F32, F64, F64],
    gradient: F32,  # f32[P], written
    item_gradient: F32,  # f32[n, d], written: of each example
) -> float:
    """The weighted cross-entropy of one client's batch, and the sum of its examples' clipped gradients.

    The weights are for the loss; examples count once. The squared norm of an example's gradient is, over all layers,
    ||slope||^2 (||input||^2 + 1), and that of the gradient of [user, item].
    """
    hidden, back, wide, slope, squared, factor = scratch
    n, d = item.shape
    layers = widths.shape[0] - 1
    m, low = widths[1], starts[0]
    matrix, bias = params[low : low + 2 * d * m].reshape(2 * d, m), low + 2 * d * m
    forward(params, item, widths, starts, places, gradient[bias : bias + m], hidden)
    m, at, place = widths[layers - 1], starts[layers - 1], places[layers - 2]
    last = hidden[place : place + n * m].reshape(n, m)
    here = back[place : place + n * m].reshape(n, m)
    loss: float = _scores(last, params[at : at + m], params[at + m], label, weight, slope, here, squared)
    for layer in range(layers - 2, 0, -1):
        k, m, at, place = widths[layer], widths[layer + 1], starts[layer], places[layer - 1]
        before = hidden[place : place + n * k].reshape(n, k)
        there = back[place : place + n * k].reshape(n, k)
        _add_squares(here, before, 1.0, squared)
        np.dot(here, params[at : at + k * m].reshape(k, m).T, there)
        _mask(there, before)
        here = there
    both = wide[: 2 * n * d].reshape(n, 2 * d)
    np.dot(here, matrix.T, both)
    constant = 1.0
    for j in range(d):
        constant += np.float64(params[j]) * np.float64(params[j])
    _add_squares(here, item, constant, squared)
    _add_squares(both, both[:, :0], 1.0, squared)
    _shrinkage(squared, bound, factor, n)
    for i in range(n):
        if factor[i] == 0:  # not finite: nothing of it may enter a product
            item[i] = 0
            for layer in range(1, layers):
                m, place = widths[layer], places[layer - 1]
                hidden[place + i * m : place + (i + 1) * m] = 0
    _scale_scores(last, slope, factor, gradient[starts[layers - 1] :])
    for layer in range(layers - 2, -1, -1):
        k, m, at, place = widths[layer], widths[layer + 1], starts[layer], places[layer]
        here = back[place : place + n * m].reshape(n, m)
        _scale(here, factor, gradient[at + k * m : at + k * m + m])
        if layer:
            before = hidden[places[layer - 1] : places[layer - 1] + n * k].reshape(n, k)
            np.dot(before.T, here, gradient[at : at + k * m].reshape(k, m))
        else:
            np.dot(item.T, here, gradient[at + d * m : at + k * m].reshape(d, m))
    summed = gradient[bias : bias + widths[1]]
    for i in range(d):
        through = np.float32(0)
        for j in range(summed.shape[0]):
            gradient[low + i * summed.shape[0] + j] = params[i] * summed[j]
            through += matrix[i, j] * summed[j]
        gradient[i] = through
    for i in range(n):
        for j in range(d):
            item_gradient[i, j] = np.float32(factor[i]) * both[i, d + j] if factor[i] > 0 else np.float32(0)
    return loss


@compiled
def _scores(
    hidden: F32,  # f32[n, m]
    kernel: F32,  # f32[m]
    bias: float,
    label: F32,
    weight: F32,
    slope: F32,  # f32[B], written: of each example's loss with respect to its score
    back: F32,  # f32[n, m], written: with respect to the hidden layer before its ReLU
    squared: F64,  # f64[B], written: the squared norm of the gradient with respect to kernel and bias
) -> float:
    """The last layer, and its weighted cross-entropy."""
    zero = np.float32(0)
    loss = 0.0
    for i in range(hidden.shape[0]):
        z, norm = zero, 1.0
        for j in range(hidden.shape[1]):
            z += hidden[i, j] * kernel[j]
            norm += np.float64(hidden[i, j]) * np.float64(hidden[i, j])
        z += bias
        odds = exp(-abs(np.float64(z)))
        loss += weight[i] * (max(z, zero) - z * label[i] + log1p(odds))
        g = np.float32((1 if z >= zero else odds) / (1 + odds) - label[i])
        slope[i] = g
        squared[i] = np.float64(g) * np.float64(g) * norm
        for j in range(hidden.shape[1]):
            back[i, j] = g * kernel[j] if hidden[i, j] > zero else zero
    return loss


@compiled
def _mask(slope: F32, hidden: F32) -> None:
    """Zero slopes where the unit was off, in place; f32[n, m] both."""
    for i in range(slope.shape[0]):
        for j in range(slope.shape[1]):
            slope[i, j] = slope[i, j] if hidden[i, j] > 0 else np.float32(0)


@compiled
def _add_squares(slope: F32, inputs: F32, constant: float, out: F64) -> None:
    """out += ||slope||^2 (||input||^2 + constant) for each example; f32[n, m], f32[n, k], f64[B]."""
    for i in range(slope.shape[0]):
        first, second = 0.0, constant
        for j in range(slope.shape[1]):
            first += np.float64(slope[i, j]) * np.float64(slope[i, j])
        for j in range(inputs.shape[1]):
            second += np.float64(inputs[i, j]) * np.float64(inputs[i, j])
        out[i] += first * second


@compiled
def _shrinkage(squared: F64, bound: float, factor: F64, n: int) -> None:
    """What to multiply with: 1 within the bound, 0 if the norm is not finite (`defenses.clipping.shrinkage`)."""
    for i in range(n):
        norm = sqrt(squared[i])
        factor[i] = 1.0 if norm <= bound else bound / norm * _SLACK
        if not isfinite(norm):
            factor[i] = 0.0


@compiled
def _scale(slope: F32, factor: F64, summed: F32) -> None:
    """Scale the slopes of each example, in place, and sum them over the batch; f32[n, m], f64[B] -> f32[m]."""
    summed[:] = 0
    for i in range(slope.shape[0]):
        by = np.float32(factor[i])
        for j in range(slope.shape[1]):
            slope[i, j] = slope[i, j] * by if by > 0 else np.float32(0)
            summed[j] += slope[i, j]


@compiled
def _scale_scores(hidden: F32, slope: F32, factor: F64, out: F32) -> None:
    """The gradient with respect to kernel and bias of the last layer; f32[n, m], f32[B], f64[B] -> f32[m + 1]."""
    out[:] = 0
    m = hidden.shape[1]
    for i in range(hidden.shape[0]):
        g = slope[i] * np.float32(factor[i]) if factor[i] > 0 else np.float32(0)
        for j in range(m):
            out[j] += g * hidden[i, j]
        out[m] += g
