"""Loops over clients and rows for which torch has no single operation, compiled by numba for the CPU.

Each treats a client, or a row, by itself: the result does not depend on which others are in the call. Other devices use
plain torch operations instead; tests hold the two against each other and against `torch.optim`.
"""

from __future__ import annotations

from math import exp, log1p, sqrt
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


@compiled
def settle_and_read(
    table: F32,  # f32[N, 3, d]: value, first and second moment of each row
    last: I64,  # i64[N]: the step after which each row is up to date; -1 if it was never read: it has no moments yet
    row: I64,  # i64[n]
    step: int,
    moves: F32,  # f32[S, W, 4]: see `optimizers.IdleMoves`
    decay: F32,  # f32[2, S]: powers of beta1 and beta2
    sizes: F32,  # f32[2, S]: learning rate / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)
    eps: float,
    out: F32,  # f32[n, d]
) -> None:
    """Bring rows up to date with steps in which they had no gradient, and copy them to `out`."""
    zero, one, epsilon = np.float32(0), np.float32(1), np.float32(eps)
    d = table.shape[2]
    for i in range(row.shape[0]):
        r = row[i]
        since = last[r]
        if since < step:
            if since > 0:
                idle = step - since
                reach = min(idle, moves.shape[1]) - 1
                factor, shift = moves[since, reach, 0], moves[since, reach, 1]
                curve, floor = moves[since, reach, 2], moves[since, reach, 3]
                fade_mean, fade_square = decay[0, idle], decay[1, idle]
                small = 0
                for j in range(d):
                    small += (table[r, 2, j] < floor) & (table[r, 2, j] > zero)
                if small:  # epsilon matters there: one idle step after the other
                    for j in range(d):
                        m, v = table[r, 1, j], table[r, 2, j]
                        if (v < floor) & (v > zero):
                            for k in range(1, idle + 1):
                                scale = np.float32(sqrt(decay[1, k] * v)) * sizes[1, since + k] + epsilon
                                table[r, 0, j] -= sizes[0, since + k] * decay[0, k] * m / scale
                for j in range(d):
                    m, v = table[r, 1, j], table[r, 2, j]
                    inverse = one / (np.float32(sqrt(v)) + shift)
                    table[r, 0, j] -= m * inverse * (factor + curve * inverse * inverse) if v >= floor else zero
                    table[r, 1, j] = m * fade_mean
                    table[r, 2, j] = v * fade_square
            elif since < 0:
                for j in range(d):
                    table[r, 1, j] = zero
                    table[r, 2, j] = zero
            last[r] = step
        for j in range(d):
            out[i, j] = table[r, 0, j]


@compiled
def adam_rows(
    table: F32,  # f32[N, 3, d]
    last: I64,
    first: I64,  # i64[N], scratch: where a row is met first in this call
    row: I64,  # i64[n]; a row may occur more than once, then its gradients add
    gradient: F32,  # f32[n, d]; changed in place
    step: int,  # the number of this step, from 1; the rows are up to date after step - 1
    rate: F32,  # f32[3]: learning rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), epsilon
    beta1: float,
    beta2: float,
) -> None:
    """One step of Adam (Kingma and Ba 2015, Algorithm 1) on the rows that have a gradient."""
    d = table.shape[2]
    for i in range(row.shape[0]):
        r = row[i]
        if last[r] < step:
            last[r] = step
            first[r] = i
        else:
            for j in range(d):
                gradient[first[r], j] += gradient[i, j]
    b1, b2 = np.float32(beta1), np.float32(beta2)
    c1, c2 = np.float32(1 - beta1), np.float32(1 - beta2)
    size, root, eps = rate[0], rate[1], rate[2]
    for i in range(row.shape[0]):
        r = row[i]
        if first[r] != i:
            continue
        for j in range(d):
            g = gradient[i, j]
            m = b1 * table[r, 1, j] + c1 * g
            v = b2 * table[r, 2, j] + c2 * g * g
            table[r, 1, j] = m
            table[r, 2, j] = v
            table[r, 0, j] -= size * m / (np.float32(sqrt(v)) * root + eps)


@compiled
def adam_numbers(
    value: F32,  # f32[n], as the others
    mean: F32,
    square: F32,
    gradient: F32,
    rate: F32,  # f32[3], as above
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """One step of Adam, each number by itself."""
    b1, b2, decay = np.float32(beta1), np.float32(beta2), np.float32(weight_decay)
    c1, c2 = np.float32(1 - beta1), np.float32(1 - beta2)
    for i in range(value.shape[0]):
        g = gradient[i] + decay * value[i]
        mean[i] = b1 * mean[i] + c1 * g
        square[i] = b2 * square[i] + c2 * g * g
        value[i] -= rate[0] * mean[i] / (np.float32(sqrt(square[i])) * rate[1] + rate[2])


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
    starts, spans, places = _layout(d, batch, widths)
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
            _adam_parts(mine, mean, square, gradient, spans, rates, first_moment, rate, beta1, beta2, 0.0)
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
    starts, spans, places = _layout(d, batch, widths)
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
            _propagate(user, table, row[step, c], own[step, c], near, weights, total, heard, mine, item)
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
            _propagate_back(
                low, row[step, c], own[step, c], near, weights, item_gradient, heard, gradient, row_gradient
            )
            first_moment, second_moment = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
            rate[1], rate[2] = 1 / sqrt(second_moment), eps
            rate[0] = item_rate / first_moment
            pull = 2 * squared + (plain / sqrt(distance) if distance > 0 else 0.0)  # the norm has no gradient at 0
            distance = _adam_held(
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
            _adam_parts(mine, mean, square, slopes, spans, rates, first_moment, rate, beta1, beta2, weight_decay)
        loss[c] = sum_of_losses / steps[c]


@compiled
def _propagate(
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
def _propagate_back(
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


@compiled
def _adam_held(
    rows: F32,  # f32[K, d], changed: all rows of a client
    start: F32,  # f32[K, d]: where they began
    mean: F32,  # f32[K, d], as the next
    square: F32,
    gradient: F32,  # f32[K, d]; afterwards what the next step adds to: zero, or this
    pull: float,  # the proximal term's gradient is `pull` (rows - start)
    measure: bool,  # whether to measure how far the rows are from where they began
    rate: F32,  # f32[3]
    beta1: float,
    beta2: float,
    weight_decay: float,
    accumulate: bool,
) -> float:
    """One step of Adam on all rows of a client; the squared distance from where they began, after it."""
    factor, distance = np.float32(pull), 0.0
    for k in range(rows.shape[0]):
        if pull != 0:
            for j in range(rows.shape[1]):
                gradient[k, j] += factor * (rows[k, j] - start[k, j])
        adam_numbers(rows[k], mean[k], square[k], gradient[k], rate, beta1, beta2, weight_decay)
        if measure:
            total = np.float32(0)
            for j in range(rows.shape[1]):
                moved = rows[k, j] - start[k, j]
                total += moved * moved
            distance += float(total)
        if not accumulate:
            gradient[k] = 0
    return distance


@compiled
def _layout(d: int, batch: int, widths: I64) -> tuple[I64, I64, I64]:
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
def _adam_parts(
    params: F32,  # f32[P], as the next three
    mean: F32,
    square: F32,
    gradient: F32,
    spans: I64,
    rates: NDArray[np.float64],
    first_moment: float,  # 1 - beta1^t
    rate: F32,  # f32[3]; its first number is overwritten
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """One step of Adam on one client's parameters, each part with its learning rate."""
    for part in range(rates.shape[0]):
        low, high = spans[part], spans[part + 1]
        rate[0] = rates[part] / first_moment
        adam_numbers(
            params[low:high], mean[low:high], square[low:high], gradient[low:high], rate, beta1, beta2, weight_decay
        )


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
    _forward(params, item, widths, starts, places, bias_gradient, hidden)
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
def _forward(
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
