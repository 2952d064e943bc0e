"""Loops over clients and rows for which torch has no single operation, compiled by numba for the CPU.

Each treats a client, or a row, by itself: the result does not depend on which others are in the call. Other devices use
plain torch operations instead; tests hold the two against each other and against `torch.optim`.
"""

from __future__ import annotations

from math import exp, log1p, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        """For the type checker; see below."""
        ...
else:
    import numba

    compiled = numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@compiled
def idle_moves(
    step: int,  # the step that is just over
    reach: int,
    size: NDArray[np.float64],  # f64[S]: learning rate / (1 - beta1^t)
    root: NDArray[np.float64],  # f64[S]: sqrt(1 - beta2^t)
    ratio: NDArray[np.float64],  # f64[S]: (beta1 / sqrt(beta2))^k
    fade: NDArray[np.float64],  # f64[S]: epsilon / beta2^(k / 2)
    floor: float,
    sums: NDArray[np.float64],  # f64[5, S], changed: sum of c_k, of c_k e_k, of c_k e_k^2, smallest and largest e_k
    moves: F32,  # f32[4, S], changed
) -> None:
    """See `optimizers.IdleMoves`."""
    for since in range(max(1, step - reach), step):
        k = step - since
        c = size[step] * root[step] * ratio[k]
        e = root[step] * fade[k]
        sums[0, since] += c
        sums[1, since] += c * e
        sums[2, since] += c * e * e
        sums[3, since] = min(sums[3, since], e)
        sums[4, since] = max(sums[4, since], e)
        mean = sums[1, since] / sums[0, since] if sums[0, since] > 0 else e
        moves[0, since] = sums[0, since]
        moves[1, since] = mean
        moves[2, since] = sums[2, since] - mean * sums[1, since]
        moves[3, since] = (floor * (sums[4, since] - sums[3, since])) ** 2


@compiled
def settle_and_read(
    table: F32,  # f32[N, 3, d]: value, first and second moment of each row
    last: I64,  # i64[N]: the step after which each row is up to date
    row: I64,  # i64[n]
    step: int,
    moves: F32,  # f32[4, S]: see `optimizers.IdleMoves`
    decay: F32,  # f32[2, S]: powers of beta1 and beta2
    rate: F32,  # f32[2, S]: learning rate / (1 - beta1^t) and sqrt(1 - beta2^t)
    eps: float,
    out: F32,  # f32[n, d]
) -> None:
    """Bring rows up to date with steps in which they had no gradient, and copy them to `out`."""
    zero, one = np.float32(0), np.float32(1)
    d = table.shape[2]
    for i in range(row.shape[0]):
        r = row[i]
        since = last[r]
        if since < step:
            if since > 0:
                idle = step - since
                factor, shift, curve, floor = moves[0, since], moves[1, since], moves[2, since], moves[3, since]
                small = 0
                for j in range(d):
                    small += (table[r, 2, j] < floor) & (table[r, 2, j] > zero)
                if small:  # epsilon matters there: one idle step after the other
                    for j in range(d):
                        m, v = table[r, 1, j], table[r, 2, j]
                        if (v < floor) & (v > zero):
                            for k in range(1, idle + 1):
                                scale = sqrt(decay[1, k] * v) / rate[1, since + k] + eps
                                table[r, 0, j] -= rate[0, since + k] * decay[0, k] * m / scale
                for j in range(d):
                    m, v = table[r, 1, j], table[r, 2, j]
                    inverse = one / (np.float32(sqrt(v)) + shift)
                    table[r, 0, j] -= m * inverse * (factor + curve * inverse * inverse) if v >= floor else zero
                    table[r, 1, j] = m * decay[0, idle]
                    table[r, 2, j] = v * decay[1, idle]
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
def perceptron(
    user: F32,  # f32[C, d]
    item: F32,  # f32[C, B, d]
    label: F32,  # f32[C, B]
    weight: F32,  # f32[C, B]
    first: F32,  # f32[C, 2, d, n1]: the first layer, its user half and its item half
    weights: tuple[F32, ...],  # f32[C, n, m] of the other layers; the last has m = 1
    biases: tuple[F32, ...],  # f32[C, n] of all layers
    hidden: tuple[F32, ...],  # f32[B, n], scratch: the output of each layer but the last
    back: tuple[F32, ...],  # f32[B, n], scratch: the gradient with respect to it
    user_gradient: F32,  # written, as are all that follow
    item_gradient: F32,
    first_gradient: F32,
    weight_gradients: tuple[F32, ...],
    bias_gradients: tuple[F32, ...],
    loss: F32,  # f32[C]: the weighted binary cross-entropy
) -> None:
    """The logits of a perceptron with ReLU on [user, item] and the gradients of their weighted cross-entropy.

    One client after the other: what a client needs for a step stays in the cache.
    """
    zero = np.float32(0)
    depth = len(hidden)
    for c in range(user.shape[0]):
        total = bias_gradients[0][c]
        _user_half(user[c], first[c, 0], biases[0][c], total)
        np.dot(item[c], first[c, 1], hidden[0])
        _rectify(hidden[0], total)
        for layer in range(1, depth):
            np.dot(hidden[layer - 1], weights[layer - 1][c], hidden[layer])
            _rectify(hidden[layer], biases[layer][c])
        loss[c] = _output(
            hidden[depth - 1],
            weights[depth - 1][c],
            biases[depth][c],
            label[c],
            weight[c],
            weight_gradients[depth - 1][c],
            bias_gradients[depth][c],
            back[depth - 1],
            bias_gradients[depth - 1][c],
        )
        for layer in range(depth - 1, 0, -1):
            np.dot(hidden[layer - 1].T, back[layer], weight_gradients[layer - 1][c])
            np.dot(back[layer], weights[layer - 1][c].T, back[layer - 1])
            _mask(back[layer - 1], hidden[layer - 1], bias_gradients[layer - 1][c])
        np.dot(item[c].T, back[0], first_gradient[c, 1])
        np.dot(back[0], first[c, 1].T, item_gradient[c])
        for i in range(user.shape[1]):
            through = zero
            for j in range(total.shape[0]):
                first_gradient[c, 0, i, j] = user[c, i] * total[j]
                through += first[c, 0, i, j] * total[j]
            user_gradient[c, i] = through


@compiled
def _user_half(user: F32, kernel: F32, bias: F32, out: F32) -> None:
    """What the user adds to the first layer: bias + user kernel, f32[n1]."""
    for j in range(bias.shape[0]):
        out[j] = bias[j]
    for i in range(user.shape[0]):
        for j in range(bias.shape[0]):
            out[j] += user[i] * kernel[i, j]


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
    kernel: F32,  # f32[n, 1]
    bias: F32,  # f32[1]
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
        kernel_gradient[j, 0] = zero
        total[j] = zero
    bias_gradient[0] = zero
    loss = 0.0
    for b in range(hidden.shape[0]):
        z = zero
        for j in range(n):
            z += hidden[b, j] * kernel[j, 0]
        z += bias[0]
        odds = exp(-abs(np.float64(z)))
        loss += weight[b] * (max(z, zero) - z * label[b] + log1p(odds))
        g = np.float32((1 if z >= zero else odds) / (1 + odds) - label[b]) * weight[b]
        bias_gradient[0] += g
        for j in range(n):
            h = hidden[b, j]
            kernel_gradient[j, 0] += g * h
            through = g * kernel[j, 0] if h > zero else zero
            back[b, j] = through
            total[j] += through
    return loss
