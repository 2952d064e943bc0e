"""Steps of Adam on numbers and on rows, which make up for idle steps when they are read; compiled as in `kernels`."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled


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
def adam_held(
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
def adam_parts(
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
