"""Local training of perceptrons on [user, item] under Adam, compiled by numba as in `kernels`."""

from __future__ import annotations

from math import exp, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled
from recleak.kernels_adam import adam_held, adam_parts, adam_rows, settle_and_read
from recleak.kernels_star import propagate, propagate_back


@compiled
def perceptron_visits(
    row: I64,  # i64[S, C, B]: the rows that each client's batches read
    label: F32,  # f32[S, C, B]
    weight: F32,  # f32[S, C, B]
    steps: I64,  # i64[C]
    offset: I64,  # i64[C + 1]: of the clients' rows in the table
    table: F32,  # f32[N, 3, d], changed: item rows and their moments
    last: I64,  # i64[N], scratch
    first: I64,  # i64[N], scratch
    moves: F32,  # as in `settle_and_read`; for item rows
    decay: F32,
    sizes: F32,
    item_rate: float,
    params: F32,  # f32[C, P], changed: user, then weight and bias of each layer
    widths: I64,  # i64[L + 1]: 2 d, the widths of the hidden layers, 1
    rates: NDArray[np.float64],  # f64[P parts]: learning rates of user, weight 1, bias 1, weight 2, ...
    beta1: float,
    beta2: float,
    eps: float,
    loss: F32,  # f32[C], written: the mean over steps
) -> None:
    """Local training of a perceptron with ReLU on [user, item] under binary cross-entropy and a fresh Adam.

    One client after the other, all of its steps: its rows, parameters and moments stay in the cache. The rest of the
    engine is the same mathematics step by step for all clients.
    """
    d, batch, size = table.shape[2], row.shape[2], params.shape[1]
    starts, spans, places = layout(d, batch, widths)
    hidden, back = np.empty(places[-1], np.float32), np.empty(places[-1], np.float32)
    item, item_gradient = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32)
    gradient, mean, square = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    rate = np.empty(3, np.float32)
    for c in range(steps.shape[0]):
        mine = params[c]
        mean[:] = 0
        square[:] = 0
        sum_of_losses = 0.0
        for step in range(steps[c]):
            settle_and_read(table, last, row[step, c], step, moves, decay, sizes, eps, item)
            sum_of_losses += _perceptron(
                mine,
                item,
                label[step, c],
                weight[step, c],
                widths,
                starts,
                places,
                hidden,
                back,
                gradient,
                item_gradient,
            )
            first_moment, second_moment = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
            rate[1], rate[2] = 1 / sqrt(second_moment), eps
            rate[0] = item_rate / first_moment
            adam_rows(table, last, first, row[step, c], item_gradient, step + 1, rate, beta1, beta2)
            adam_parts(mine, mean, square, gradient, spans, rates, first_moment, rate, beta1, beta2, 0.0)
        held = np.arange(offset[c], offset[c + 1])
        settle_and_read(table, last, held, steps[c], moves, decay, sizes, eps, np.empty((len(held), d), np.float32))
        loss[c] = sum_of_losses / steps[c]


@compiled
def perceptron_visits_of_all_rows(
    row: I64,  # i64[S, C, B], as the next four in `perceptron_visits`
    label: F32,
    weight: F32,
    steps: I64,
    offset: I64,
    own: NDArray[np.bool_],  # bool[S, C, B]: the item is one of the client's own
    neighbor: I64,  # i64[M]: the rows of the clients' own items
    neighbor_offset: I64,  # i64[C + 1]
    star: F32,  # f32[C, 5]: see `models.base.Model.star`; 1, 0, 1, 0, 0 if nothing propagates
    table: F32,  # f32[N, d], changed: item rows
    start: F32,  # f32[N, d]: the item rows that the clients received; without a proximal term it is not read
    plain: float,  # strength of the proximal term ||rows - start||
    squared: float,  # and of its square
    item_rate: float,
    params: F32,  # f32[C, P], as the rest in `perceptron_visits`
    widths: I64,
    rates: NDArray[np.float64],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    accumulate: bool,  # gradients are summed over a client's steps
    loss: F32,
) -> None:
    """The same where rows outside the batch have a gradient: all rows of a client are stepped at every step.

    The perceptron is on propagated vectors, the loss may have a proximal term, the optimizer may decay weights and sum
    gradients.
    """
    d, batch, size = table.shape[1], row.shape[2], params.shape[1]
    starts, spans, places = layout(d, batch, widths)
    hidden, back = np.empty(places[-1], np.float32), np.empty(places[-1], np.float32)
    item, item_gradient = np.empty((batch, d), np.float32), np.empty((batch, d), np.float32)
    gradient, mean, square = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    summed = np.empty(size if accumulate else 0, np.float32)  # `gradient` is also scratch, so it has its own place
    user, total, heard = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    most = (np.max(np.diff(offset)), d)
    row_gradient = np.empty(most, np.float32)
    row_mean, row_square = np.empty(most, np.float32), np.empty(most, np.float32)
    rate = np.empty(3, np.float32)
    for c in range(steps.shape[0]):
        mine, low, high, weights = params[c], offset[c], offset[c + 1], star[c]
        near = neighbor[neighbor_offset[c] : neighbor_offset[c + 1]]
        if weights[1] == 0 and weights[4] == 0:  # nobody hears them
            near = near[:0]
        held = high - low
        row_gradient[:held], row_mean[:held], row_square[:held] = 0, 0, 0
        mean[:] = 0
        square[:] = 0
        summed[:] = 0
        sum_of_losses, distance = 0.0, 0.0  # distance: squared, of the rows from where they began
        for step in range(steps[c]):
            user[:] = mine[:d]
            propagate(user, table, row[step, c], own[step, c], near, weights, total, heard, mine, item)
            sum_of_losses += _perceptron(
                mine,
                item,
                label[step, c],
                weight[step, c],
                widths,
                starts,
                places,
                hidden,
                back,
                gradient,
                item_gradient,
            )
            mine[:d] = user
            propagate_back(low, row[step, c], own[step, c], near, weights, item_gradient, heard, gradient, row_gradient)
            first_moment, second_moment = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
            rate[1], rate[2] = 1 / sqrt(second_moment), eps
            rate[0] = item_rate / first_moment
            pull = 2 * squared + (plain / sqrt(distance) if distance > 0 else 0.0)  # the norm has no gradient at 0
            distance = adam_held(
                table[low:high],
                start[low:high],
                row_mean[:held],
                row_square[:held],
                row_gradient[:held],
                pull,
                plain > 0,
                rate,
                beta1,
                beta2,
                weight_decay,
                accumulate,
            )
            if accumulate:
                for p in range(size):
                    summed[p] += gradient[p]
            slopes = summed if accumulate else gradient
            adam_parts(mine, mean, square, slopes, spans, rates, first_moment, rate, beta1, beta2, weight_decay)
        loss[c] = sum_of_losses / steps[c]


@compiled
def layout(d: int, batch: int, widths: I64) -> tuple[I64, I64, I64]:
    """Where things lie: each layer's weight in the parameters, i64[L + 1]; the parts that have a learning rate of their
    own (user, weight 1, bias 1, ...), i64[2 L + 2]; each hidden layer in the scratch, i64[L], the last is its size.
    """
    layers = widths.shape[0] - 1
    starts = np.empty(layers + 1, np.int64)
    starts[0] = d
    for layer in range(layers):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * widths[layer + 1]
    spans = np.empty(2 * layers + 2, np.int64)
    spans[0], spans[1] = 0, d
    for layer in range(layers):
        spans[2 * layer + 2] = starts[layer] + widths[layer] * widths[layer + 1]
        spans[2 * layer + 3] = starts[layer + 1]
    places = np.zeros(layers, np.int64)
    for layer in range(1, layers):
        places[layer] = places[layer - 1] + batch * widths[layer]
    return starts, spans, places


@compiled
def _perceptron(
    params: F32,  # f32[P]
    item: F32,  # f32[B, d]
    label: F32,  # f32[B]
    weight: F32,  # f32[B]
    widths: I64,
    starts: I64,
    places: I64,
    hidden: F32,  # scratch
    back: F32,  # scratch
    gradient: F32,  # f32[P], written
    item_gradient: F32,  # f32[B, d], written
) -> float:
    """The weighted cross-entropy of one client's batch, and its gradients."""
    batch, d = item.shape
    layers = widths.shape[0] - 1
    n = widths[1]
    half = d * n
    low = starts[0]
    bias_gradient = gradient[low + 2 * half : low + 2 * half + n]
    forward(params, item, widths, starts, places, bias_gradient, hidden)
    n, low = widths[layers - 1], starts[layers - 1]
    place = places[layers - 2]
    bias_before = starts[layers - 1] - n
    loss: float = _output(
        hidden[place : place + batch * n].reshape(batch, n),
        params[low : low + n],
        params[low + n],
        label,
        weight,
        gradient[low : low + n],
        gradient[low + n : low + n + 1],
        back[place : place + batch * n].reshape(batch, n),
        gradient[bias_before : bias_before + n],
    )
    for layer in range(layers - 2, 0, -1):
        n, m, low = widths[layer], widths[layer + 1], starts[layer]
        place, place_before = places[layer], places[layer - 1]
        before = hidden[place_before : place_before + batch * n].reshape(batch, n)
        here = back[place : place + batch * m].reshape(batch, m)
        np.dot(before.T, here, gradient[low : low + n * m].reshape(n, m))
        there = back[place_before : place_before + batch * n].reshape(batch, n)
        np.dot(here, params[low : low + n * m].reshape(n, m).T, there)
        bias_before = starts[layer] - n
        _mask(there, before, gradient[bias_before : bias_before + n])
    n, low = widths[1], starts[0]
    here = back[: batch * n].reshape(batch, n)
    np.dot(item.T, here, gradient[low + half : low + 2 * half].reshape(d, n))
    np.dot(here, params[low + half : low + 2 * half].reshape(d, n).T, item_gradient)
    for i in range(d):
        through = np.float32(0)
        for j in range(n):
            gradient[low + i * n + j] = params[i] * bias_gradient[j]
            through += params[low + i * n + j] * bias_gradient[j]
        gradient[i] = through
    return loss


@compiled
def forward(
    params: F32,  # f32[P]
    item: F32,  # f32[B, d]
    widths: I64,
    starts: I64,
    places: I64,
    shift: F32,  # f32[n], scratch
    hidden: F32,  # written: the hidden layers
) -> None:
    """The hidden layers. The user's part of the first one is the same for all items: it is added to the bias."""
    batch, d = item.shape
    n, low = widths[1], starts[0]
    half = d * n
    for j in range(n):
        shift[j] = params[low + 2 * half + j]
    for i in range(d):
        for j in range(n):
            shift[j] += params[i] * params[low + i * n + j]
    now = hidden[: batch * n].reshape(batch, n)
    np.dot(item, params[low + half : low + 2 * half].reshape(d, n), now)
    _rectify(now, shift)
    for layer in range(1, widths.shape[0] - 2):
        n, m, low = widths[layer], widths[layer + 1], starts[layer]
        before = hidden[places[layer - 1] : places[layer - 1] + batch * n].reshape(batch, n)
        now = hidden[places[layer] : places[layer] + batch * m].reshape(batch, m)
        np.dot(before, params[low : low + n * m].reshape(n, m), now)
        _rectify(now, params[low + n * m : low + n * m + m])


@compiled
def _rectify(hidden: F32, bias: F32) -> None:
    """max(0, hidden + bias), in place."""
    for b in range(hidden.shape[0]):
        for j in range(hidden.shape[1]):
            hidden[b, j] = max(hidden[b, j] + bias[j], np.float32(0))


@compiled
def _mask(gradient: F32, hidden: F32, total: F32) -> None:
    """Zero the gradient where the unit was off, in place, and sum it over the batch."""
    for j in range(gradient.shape[1]):
        total[j] = 0
    for b in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            g = gradient[b, j] if hidden[b, j] > 0 else np.float32(0)
            gradient[b, j] = g
            total[j] += g


@compiled
def _output(
    hidden: F32,  # f32[B, n]
    kernel: F32,  # f32[n]
    bias: float,
    label: F32,
    weight: F32,
    kernel_gradient: F32,
    bias_gradient: F32,
    back: F32,
    total: F32,
) -> float:
    """The last layer and its weighted cross-entropy; its gradient, masked, with respect to the layer before."""
    zero = np.float32(0)
    n = hidden.shape[1]
    for j in range(n):
        kernel_gradient[j] = zero
        total[j] = zero
    bias_gradient[0] = zero
    loss = 0.0
    for b in range(hidden.shape[0]):
        z = zero
        for j in range(n):
            z += hidden[b, j] * kernel[j]
        z += bias
        odds = exp(-abs(np.float64(z)))
        loss += weight[b] * (max(z, zero) - z * label[b] + log1p(odds))
        g = np.float32((1 if z >= zero else odds) / (1 + odds) - label[b]) * weight[b]
        bias_gradient[0] += g
        for j in range(n):
            h = hidden[b, j]
            kernel_gradient[j] += g * h
            through = g * kernel[j] if h > zero else zero
            back[b, j] = through
            total[j] += through
    return loss
