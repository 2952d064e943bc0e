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
def settle_and_read(
    value: F32,  # f32[N, d]
    mean: F32,  # f32[N, d]: Adam's first moment
    square: F32,  # f32[N, d]: its second moment
    last: I64,  # i64[N]: the step after which each row is up to date
    row: I64,  # i64[n]
    step: int,
    moves: F32,  # f32[4, step + 1]: for a row that is up to date after step s, see `optimizers.IdleMoves`
    decay: F32,  # f32[2, step + 1]: powers of beta1 and beta2
    rate: F32,  # f32[2, step + 1]: learning rate / (1 - beta1^t) and sqrt(1 - beta2^t)
    eps: float,
    out: F32,  # f32[n, d]
) -> None:
    """Bring rows up to date with steps in which they had no gradient, and copy them to `out`."""
    for i in range(row.shape[0]):
        r = row[i]
        since = last[r]
        if since < step:
            if since > 0:
                idle = step - since
                factor, shift, curve, floor = moves[0, since], moves[1, since], moves[2, since], moves[3, since]
                fade_mean, fade_square = decay[0, idle], decay[1, idle]
                small = 0
                for j in range(value.shape[1]):
                    v = square[r, j]
                    inverse = np.float32(1) / (np.float32(sqrt(v)) + shift)
                    move = mean[r, j] * inverse * (factor + curve * inverse * inverse)
                    value[r, j] -= move if v >= floor else np.float32(0)
                    small += (v < floor) & (v > np.float32(0))
                if small:  # epsilon matters there: one idle step after the other
                    for j in range(value.shape[1]):
                        if (square[r, j] < floor) & (square[r, j] > np.float32(0)):
                            for k in range(1, idle + 1):
                                scale = sqrt(decay[1, k] * square[r, j]) / rate[1, since + k] + eps
                                value[r, j] -= rate[0, since + k] * decay[0, k] * mean[r, j] / scale
                for j in range(value.shape[1]):
                    mean[r, j] *= fade_mean
                    square[r, j] *= fade_square
            last[r] = step
        for j in range(value.shape[1]):
            out[i, j] = value[r, j]


@compiled
def adam_rows(
    value: F32,
    mean: F32,
    square: F32,
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
    d = value.shape[1]
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
            m = b1 * mean[r, j] + c1 * g
            v = b2 * square[r, j] + c2 * g * g
            mean[r, j] = m
            square[r, j] = v
            value[r, j] -= size * m / (np.float32(sqrt(v)) * root + eps)


@compiled
def add_and_rectify(hidden: F32, bias: F32) -> None:
    """hidden[c, b, :] = max(0, hidden[c, b, :] + bias[c, :]), in place; f32[C, B, n] and f32[C, n]."""
    for c in range(hidden.shape[0]):
        for b in range(hidden.shape[1]):
            for j in range(hidden.shape[2]):
                hidden[c, b, j] = max(hidden[c, b, j] + bias[c, j], np.float32(0))


@compiled
def mask_and_sum(gradient: F32, hidden: F32, total: F32) -> None:
    """Zero the gradient where the unit was off, in place, and sum it over the batch: f32[C, B, n] twice, f32[C, n]."""
    for c in range(gradient.shape[0]):
        for j in range(gradient.shape[2]):
            total[c, j] = 0
        for b in range(gradient.shape[1]):
            for j in range(gradient.shape[2]):
                g = gradient[c, b, j] if hidden[c, b, j] > 0 else np.float32(0)
                gradient[c, b, j] = g
                total[c, j] += g


@compiled
def logistic_output(
    hidden: F32,  # f32[C, B, n]: the last hidden layer, after ReLU
    kernel: F32,  # f32[C, n]
    bias: F32,  # f32[C]
    label: F32,  # f32[C, B]
    weight: F32,  # f32[C, B]
    logit: F32,  # f32[C, B], written
    kernel_gradient: F32,  # f32[C, n], written
    bias_gradient: F32,  # f32[C], written
    hidden_gradient: F32,  # f32[C, B, n], written: zero where the unit was off
    hidden_total: F32,  # f32[C, n], written: its sum over the batch
) -> None:
    """The last layer of a binary classifier and the gradient of its weighted cross-entropy, in one pass."""
    n = hidden.shape[2]
    zero = np.float32(0)
    for c in range(hidden.shape[0]):
        for j in range(n):
            kernel_gradient[c, j] = zero
            hidden_total[c, j] = zero
        bias_gradient[c] = zero
        for b in range(hidden.shape[1]):
            z = zero
            for j in range(n):
                z += hidden[c, b, j] * kernel[c, j]
            z += bias[c]
            logit[c, b] = z
            g = np.float32(1 / (1 + exp(-np.float64(z))) - label[c, b]) * weight[c, b]
            bias_gradient[c] += g
            for j in range(n):
                h = hidden[c, b, j]
                kernel_gradient[c, j] += g * h
                back = g * kernel[c, j] if h > zero else zero
                hidden_gradient[c, b, j] = back
                hidden_total[c, j] += back


@compiled
def cross_entropy(logit: F32, label: F32, weight: F32, out: F32) -> None:
    """The weighted binary cross-entropy of each client, added to `out`: f32[C, B] three times, f32[C]."""
    for c in range(logit.shape[0]):
        total = 0.0
        for b in range(logit.shape[1]):
            z = np.float64(logit[c, b])
            total += weight[c, b] * (max(z, 0.0) - z * label[c, b] + log1p(exp(-abs(z))))
        out[c] += total
