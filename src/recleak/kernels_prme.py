"""Visits to clients with PRME-G under SGD, an example at a step, and scores in context, compiled; see `compiled_prme`.

Axis letters: C clients, E examples, N item rows, T transitions, K scored items of each, I items, d factors.
"""

from __future__ import annotations

from math import asin, exp, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled

BOOL = NDArray[np.bool_]


@compiled
def prme_visits(
    order: I64,  # i64[S]: the examples that are stepped on, client after client and epoch after epoch
    steps: I64,  # i64[C + 1]: client c has the steps from steps[c] to before steps[c + 1]
    before: I64, item: I64, against: I64,  # i64[E] each: rows of the tables
    near: BOOL,  # bool[E]: within the window
    weight: F32, weight_against: F32,  # f32[E] each: of the distances to `item` and `against`
    preference: F32, sequence: F32,  # f32[N, d] each, changed
    user: F32,  # f32[C, d], changed
    share: float,  # of the preference in a distance within the window
    rates: F32,  # f32[3]: of user, preference and sequence
    decay: float,
    loss: F32,  # f32[C]
) -> None:  # fmt: skip
    """All steps of all clients, in place; the mean loss of each, -ln sigma(z) with z = D_against - D_item.

    Of D = w (a |u - p|^2 + (1 - a) |s_b - s|^2) the gradient in u is 2 w a (u - p), and so on.
    """
    one, two, fade = np.float32(1), np.float32(2), np.float32(decay)
    for c in range(user.shape[0]):
        u, total = user[c], 0.0
        for n in range(steps[c], steps[c + 1]):
            e = order[n]
            p, q = preference[item[e]], preference[against[e]]
            a = np.float32(share) if near[e] else one
            to, off = (weight[e] * a, weight_against[e] * a) if near[e] else (one, one)
            z = np.float64(off * _squared(u, q) - to * _squared(u, p))
            if near[e]:
                s, t, b = sequence[item[e]], sequence[against[e]], sequence[before[e]]
                to_s, off_s = weight[e] * (one - a), weight_against[e] * (one - a)
                z += np.float64(off_s * _squared(b, t) - to_s * _squared(b, s))
            small = exp(-abs(z))
            total += log1p(small) + max(-z, 0.0)
            slope = two * np.float32((small if z >= 0 else 1.0) / (1 + small))  # 2 (1 - sigma(z))
            _pull(u, p, q, slope * to, slope * off, rates[0], rates[1], fade)
            if near[e]:
                _pull(b, s, t, slope * to_s, slope * off_s, rates[2], rates[2], fade)
        loss[c] = total / max(steps[c + 1] - steps[c], 1)


@compiled
def _squared(one: F32, other: F32) -> np.float32:
    total = np.float32(0)
    for j in range(one.shape[0]):
        total += (one[j] - other[j]) * (one[j] - other[j])
    return total


@compiled
def _pull(
    center: F32, toward: F32, away: F32,  # f32[d] each, changed
    to: np.float32, off: np.float32, rate: np.float32, row_rate: np.float32, decay: np.float32,
) -> None:  # fmt: skip
    """A step that draws two vectors together and a third one away; all move from where they were."""
    for j in range(center.shape[0]):
        u, p, q = center[j], toward[j], away[j]
        center[j] -= rate * (to * (u - p) - off * (u - q) + decay * u)
        toward[j] -= row_rate * (to * (p - u) + decay * p)
        away[j] -= row_rate * (off * (u - q) + decay * q)


@compiled
def scores_after(
    preference: F32, sequence: F32,  # f32[N, d] each
    row: I64,  # i64[T, K]: of the scored items in the tables
    row_before: I64,  # i64[T]: of where the user was
    item: I64, before: I64,  # i64[T, K] and i64[T]: the items themselves
    user: F32,  # f32[T, d]
    near: BOOL,  # bool[T]
    place: NDArray[np.float64],  # f64[I, 3]: see `data.sequences.on_sphere`
    diameter: float,  # of the earth in km
    share: float, exponent: float,
    out: F32,  # f32[T, K]
) -> None:  # fmt: skip
    """-D of some items after each of T transitions' starts; see `models.prme`."""
    a, one = np.float32(share), np.float32(1)
    for t in range(row.shape[0]):
        here = place[before[t]]
        for k in range(row.shape[1]):
            score = _squared(user[t], preference[row[t, k]])
            if near[t]:
                there, apart = place[item[t, k]], 0.0
                for j in range(3):
                    apart += (here[j] - there[j]) ** 2
                km = diameter * asin(min(sqrt(apart) / 2, 1.0))
                both = a * score + (one - a) * _squared(sequence[row_before[t]], sequence[row[t, k]])
                score = np.float32((1 + km) ** exponent) * both
            out[t, k] = -score
