"""PRME-G, compiled: visits to clients under SGD, an example at a step, and scores in context (see `compiled_prme`); how
well models fit target transitions (see `attacks.transitions`).

Axis letters: C clients, E examples, N item rows, T transitions, K scored items of each, I items, d factors; m models,
A adversaries, V vectors, S random ways, k pairs of an adversary and a model.
"""

from __future__ import annotations

from math import asin, exp, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled

BOOL = NDArray[np.bool_]
F64 = NDArray[np.float64]


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
    place: F64,  # f64[I, 3]: see `geometry.on_sphere`
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


# --- how well models fit ----------------------------------------------------------------------------------------------
#
# The distance of a transition is toward |u - p_i|^2 + along |s_b - s_i|^2, whatever the window: within it, toward is
# w a and along w (1 - a); beyond it they are 1 and 0.


@compiled
def fit_pairs(
    preference: F32, sequence: F32,  # f32[m, I, d] each: of models
    user: F32,  # f32[V, d]
    before: I64, item: I64, toward: F32, along: F32,  # [T] each: target transitions
    offset: I64,  # i64[A + 1]: adversary a has those from offset[a] to before offset[a + 1]
    adversary: I64, model: I64, vector: I64,  # i64[k] each: the pairs, and the vector that each is scored with
    out: F64,  # f64[k]
) -> None:  # fmt: skip
    """The mean distance of an adversary's target transitions by a model."""
    for k in range(adversary.shape[0]):
        p, s, u = preference[model[k]], sequence[model[k]], user[vector[k]]
        first, last, total = offset[adversary[k]], offset[adversary[k] + 1], 0.0
        for t in range(first, last):
            total += toward[t] * _squared(u, p[item[t]])
            if along[t] > 0:
                total += along[t] * _squared(s[before[t]], s[item[t]])
        out[k] = total / max(last - first, 1)


@compiled
def near_places(
    preference: F32,  # f32[I, d]: what all clients received
    held: I64, start: I64,  # i64[N] and i64[C + 1]: the items that clients changed
    new_preference: F32,  # f32[N, d]: what they have of these
    user: F32,  # f32[C, d]
    out: F32,  # f32[I, C]
) -> None:  # fmt: skip
    """|u - p_i|^2 of all items by every client's own model."""
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[i, c] = _squared(user[c], preference[i])
    for c in range(out.shape[1]):
        for n in range(start[c], start[c + 1]):
            out[held[n], c] = _squared(user[c], new_preference[n])


@compiled
def fit_changes(
    preference: F32, sequence: F32,  # f32[I, d] each: what all clients received
    held: I64, start: I64,  # i64[N] and i64[C + 1]: the items that clients changed
    new_preference: F32, new_sequence: F32,  # f32[N, d] each: what they have of these
    user: F32,  # f32[A, d]: one vector for each adversary
    told: bool,  # or else what preferences add up to is in `out` already, by the clients' own vectors
    before: I64, item: I64, toward: F32, along: F32, owner: I64,  # [T] each: target transitions, and whose they are
    offset: I64,  # i64[A + 1]
    touching: I64, first: I64,  # i64[n] and i64[I + 1]: of item i, the transitions that start or end there
    out: F64,  # f64[C, A], changed
) -> None:  # fmt: skip
    """The mean distance for all pairs where models differ in a few rows: what does not change is added up once."""
    row = np.full(preference.shape[0], -1, np.int64)
    old, same = np.zeros(item.shape[0], np.float32), np.zeros(out.shape[1])
    for t in range(item.shape[0]):
        if along[t] > 0:
            old[t] = along[t] * _squared(sequence[before[t]], sequence[item[t]])
        if told:
            old[t] += toward[t] * _squared(user[owner[t]], preference[item[t]])
        same[owner[t]] += old[t]
    for c in range(out.shape[0]):
        mine = out[c]
        mine += same
        for n in range(start[c], start[c + 1]):
            row[held[n]] = n
        for n in range(start[c], start[c + 1]):
            for place in range(first[held[n]], first[held[n] + 1]):
                t = touching[place]
                to, off = row[item[t]], row[before[t]]
                if item[t] != held[n] and to >= 0:
                    continue  # it counts where it ends
                new = np.float32(0)
                if told:
                    new += toward[t] * _squared(user[owner[t]], new_preference[to] if to >= 0 else preference[item[t]])
                if along[t] > 0:
                    s = new_sequence[to] if to >= 0 else sequence[item[t]]
                    b = new_sequence[off] if off >= 0 else sequence[before[t]]
                    new += along[t] * _squared(b, s)
                mine[owner[t]] += np.float64(new) - np.float64(old[t])
        for n in range(start[c], start[c + 1]):
            row[held[n]] = -1
        for a in range(mine.shape[0]):
            mine[a] /= max(offset[a + 1] - offset[a], 1)


@compiled
def ways_pairs(
    preference: F32, sequence: F32,  # f32[m, I, d] each
    user: F32,  # f32[V, d]
    origin: I64, end: I64, weight: F32,  # [S] each: random ways, and w of each
    share: float,
    model: I64, vector: I64,  # i64[k] each
    out: F64,  # f64[k, 4]
) -> None:  # fmt: skip
    """Of the distances of random ways by a model the mean and the mean square, within the window and beyond it."""
    near, ways = np.empty(end.shape[0], np.float32), np.empty(end.shape[0], np.float32)
    for k in range(model.shape[0]):
        p, s, u = preference[model[k]], sequence[model[k]], user[vector[k]]
        for n in range(end.shape[0]):
            near[n] = _squared(u, p[end[n]])
            ways[n] = _squared(s[origin[n]], s[end[n]])
        _moments(near, ways, weight, share, out[k])


@compiled
def ways_changes(
    preference: F32, sequence: F32,  # f32[I, d] each
    held: I64, start: I64,  # i64[N] and i64[C + 1]
    new_preference: F32, new_sequence: F32,  # f32[N, d] each
    user: F32, told: bool,  # f32[A, d] if told; else f32[C, d]
    origin: I64, end: I64, weight: F32,  # [S] each
    share: float,
    out: F64,  # f64[C, V, 4]: V is A if told, else 1
) -> None:  # fmt: skip
    """The same for models that differ in a few rows."""
    row, size = np.full(preference.shape[0], -1, np.int64), end.shape[0]
    same, near, ways = (
        np.empty((user.shape[0], size), np.float32),
        np.empty(size, np.float32),
        np.empty(size, np.float32),
    )
    for v in range(user.shape[0]):
        for n in range(size):
            same[v, n] = _squared(user[v], preference[end[n]])
    for c in range(out.shape[0]):
        for n in range(start[c], start[c + 1]):
            row[held[n]] = n
        for n in range(size):
            to, off = row[end[n]], row[origin[n]]
            s = new_sequence[to] if to >= 0 else sequence[end[n]]
            ways[n] = _squared(new_sequence[off] if off >= 0 else sequence[origin[n]], s)
        for v in range(out.shape[1]):
            mine = v if told else c
            for n in range(size):
                to = row[end[n]]
                near[n] = _squared(user[mine], new_preference[to]) if to >= 0 else same[mine, n]
            _moments(near, ways, weight, share, out[c, v])
        for n in range(start[c], start[c + 1]):
            row[held[n]] = -1


@compiled
def _moments(near: F32, ways: F32, weight: F32, share: float, out: F64) -> None:
    a, one, size = np.float32(share), np.float32(1), near.shape[0]
    inside, inside_squared, beyond, beyond_squared = 0.0, 0.0, 0.0, 0.0
    for n in range(size):
        both = np.float64(weight[n] * (a * near[n] + (one - a) * ways[n]))
        inside += both
        inside_squared += both * both
        beyond += np.float64(near[n])
        beyond_squared += np.float64(near[n]) * np.float64(near[n])
    out[0], out[1], out[2], out[3] = inside / size, inside_squared / size, beyond / size, beyond_squared / size
