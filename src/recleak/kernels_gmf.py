"""Visits to clients with generalized matrix factorization under Adam and full batches, compiled; see `compiled_gmf`.

Axis letters: C clients, E examples and N item rows of all clients, K kept rows of all clients, I items, d factors.
"""

from __future__ import annotations

from math import exp, isfinite, log1p, sqrt

import numpy as np

from recleak import draws
from recleak.draws import U64
from recleak.kernels import F32, I32, I64, compiled


@compiled
def count_rows(item: I64, offset: I64, kept: I64, kept_offset: I64, n_items: int, out: I64) -> None:
    """How many item rows each client holds, i64[C]: those of its examples, i64[E], and those it kept, i64[K]."""
    seen = np.full(n_items, -1, np.int64)
    for c in range(out.shape[0]):
        held = 0
        for n in range(kept_offset[c], kept_offset[c + 1]):
            seen[kept[n]] = c
            held += 1
        for e in range(offset[c], offset[c + 1]):
            if seen[item[e]] != c:
                seen[item[e]] = c
                held += 1
        out[c] = held


@compiled
def place_rows(
    item: I64, offset: I64, kept: I64, kept_offset: I64, held_offset: I64, n_items: int,
    held: I64, row: I64, kept_row: I64,
) -> None:  # fmt: skip
    """The items that clients hold, i64[N] ascending within a client, and the rows of examples, i64[E], and of what was
    kept, i64[K].
    """
    place = np.full(n_items, -1, np.int64)
    for c in range(held_offset.shape[0] - 1):
        for n in range(kept_offset[c], kept_offset[c + 1]):
            place[kept[n]] = 0
        for e in range(offset[c], offset[c + 1]):
            place[item[e]] = 0
        at = held_offset[c]
        for i in range(n_items):
            if place[i] == 0:
                place[i], held[at] = at, i
                at += 1
        for n in range(kept_offset[c], kept_offset[c + 1]):
            kept_row[n] = place[kept[n]]
        for e in range(offset[c], offset[c + 1]):
            row[e] = place[item[e]]
        for n in range(held_offset[c], at):
            place[held[n]] = -1


@compiled
def gmf_visits(
    row: I64, label: F32, offset: I64,  # i64[E], f32[E], i64[C + 1]: examples
    table: F32, table_mean: F32, table_square: F32,  # f32[N, d] each
    first_row: I64, last_row: I64,  # i64[C]: client c has the rows from the first to before the last
    user: F32, user_mean: F32, user_square: F32,  # f32[C, d] each
    head: F32, head_mean: F32, head_square: F32,  # f32[C, d] each
    bias: F32, bias_mean: F32, bias_square: F32,  # f32[C] each; not used without a bias
    with_bias: bool, age: I64, epochs: int,  # i64[C]: steps made before
    rates: F32,  # f32[4]: of item, user, head and bias
    beta1: float, beta2: float, epsilon: float,
    loss: F32,  # f32[C]
) -> None:  # fmt: skip
    """All steps of all clients, each on all of its examples, in place; the mean loss of each."""
    d = table.shape[1]
    turned, lean, gradient = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    flat, flat_mean, flat_square = table.reshape(-1), table_mean.reshape(-1), table_square.reshape(-1)
    b1, b2 = np.float32(beta1), np.float32(beta2)
    for c in range(user.shape[0]):
        begin, end = first_row[c], last_row[c]
        push = np.zeros((end - begin, d), np.float32)
        share = np.float32(1 / (offset[c + 1] - offset[c]))
        total = 0.0
        for epoch in range(epochs):
            time = age[c] + epoch + 1
            first = 1 / (1 - beta1**time)
            root, eps = np.float32(sqrt(1 - beta2**time)), np.float32(epsilon)
            push[:] = 0
            for j in range(d):
                turned[j], lean[j] = head[c, j] * user[c, j], 0
            tilt = np.float32(0)
            for e in range(offset[c], offset[c + 1]):
                q = table[row[e]]
                score = bias[c] if with_bias else np.float32(0)
                for j in range(d):
                    score += turned[j] * q[j]
                small = exp(-abs(score))
                total += share * (max(score, 0) - label[e] * score + log1p(small))
                chance = 1 / (1 + small) if score >= 0 else small / (1 + small)
                slope = share * (np.float32(chance) - label[e])
                tilt += slope
                pushed = push[row[e] - begin]
                for j in range(d):
                    pushed[j] += slope * turned[j]
                    lean[j] += slope * q[j]
            size = np.float32(first * rates[0])
            mine = slice(begin * d, end * d)  # all rows as one: a vector instruction takes several of their numbers
            _adam(flat[mine], flat_mean[mine], flat_square[mine], push.reshape(-1), size, root, eps, b1, b2)
            for j in range(d):
                gradient[j] = lean[j] * head[c, j]
                lean[j] *= user[c, j]
            _adam(user[c], user_mean[c], user_square[c], gradient, np.float32(first * rates[1]), root, eps, b1, b2)
            _adam(head[c], head_mean[c], head_square[c], lean, np.float32(first * rates[2]), root, eps, b1, b2)
            if with_bias:
                gradient[0] = tilt
                one, mean, square = bias[c : c + 1], bias_mean[c : c + 1], bias_square[c : c + 1]
                _adam(one, mean, square, gradient, np.float32(first * rates[3]), root, eps, b1, b2)
        loss[c] = total / epochs


@compiled
def clipped_sums(
    row: I64, label: F32, offset: I64,  # i64[E], f32[E], i64[C + 1]: examples
    table: F32, user: F32, head: F32, bias: F32, with_bias: bool,  # f32[N, d], f32[C, d] twice, f32[C]
    clip: float,
    of_rows: F32, of_user: F32, of_head: F32, of_bias: F32,  # zeros of the same shapes
    loss: F32,  # f32[C]: the mean over examples is added
) -> None:  # fmt: skip
    """The sum over each client's examples of their gradients, each scaled to a norm of at most `clip` in all parts."""
    for c in range(user.shape[0]):
        mine = slice(offset[c], offset[c + 1])
        loss[c] += _clipped(
            row[mine], 0, label[mine], table, user[c], head[c], bias[c : c + 1], with_bias, clip,
            of_rows, of_user[c], of_head[c], of_bias[c : c + 1],
        )  # fmt: skip


@compiled
def _clipped(
    row: I64, begin: int, label: F32,  # i64[n], f32[n]: examples of one client, whose sums are from this row on
    table: F32, user: F32, head: F32, bias: F32, with_bias: bool, clip: float,  # f32[N, d], f32[d] twice, f32[1]
    of_rows: F32, of_user: F32, of_head: F32, of_bias: F32,  # added to
) -> float:  # fmt: skip
    """The sums of one client, and the mean loss."""
    d, total = user.shape[0], 0.0
    for e in range(row.shape[0]):
        q = table[row[e]]
        score = bias[0] if with_bias else np.float32(0)
        for j in range(d):
            score += head[j] * user[j] * q[j]
        small = exp(-abs(score))
        total += max(score, 0) - label[e] * score + log1p(small)
        slope = (1 / (1 + small) if score >= 0 else small / (1 + small)) - label[e]
        norm = 1.0 if with_bias else 0.0
        for j in range(d):
            norm += (head[j] * user[j]) ** 2 + (head[j] * q[j]) ** 2 + (user[j] * q[j]) ** 2
        norm = abs(slope) * sqrt(norm)
        if not isfinite(norm):  # it counts for nothing
            continue
        slope *= min(1.0, clip / norm) if norm > 0 else 1.0
        mine = of_rows[row[e] - begin]
        for j in range(d):
            mine[j] += slope * head[j] * user[j]
            of_user[j] += slope * head[j] * q[j]
            of_head[j] += slope * user[j] * q[j]
        of_bias[0] += slope
    mean: float = total / row.shape[0]
    return mean


@compiled
def noisy_visits(
    row: I64, label: F32, offset: I64,  # i64[E], f32[E], i64[C + 1]: examples
    number: I64,  # i64[N]: the item of each row
    table: F32, table_mean: F32, table_square: F32,  # f32[N, d] each
    first_row: I64, last_row: I64,  # i64[C]
    user: F32, user_mean: F32, user_square: F32,  # f32[C, d] each
    head: F32, head_mean: F32, head_square: F32,  # f32[C, d] each
    bias: F32, bias_mean: F32, bias_square: F32,  # f32[C, 1] each; not used without a bias
    with_bias: bool, age: I64, epochs: int,  # i64[C]: steps made before
    rates: F32,  # f32[4]: of item, user, head and bias
    beta1: float, beta2: float, epsilon: float, clip: float,
    scale: F32,  # f32[T]: the standard deviation of the noise on every number of a sum
    state: U64,  # u64[T, 4]: of the draws for item, user, head and bias
    key: U64,  # u64[epochs, C]: of the clients' draws at each step
    loss: F32,  # f32[C]
) -> None:  # fmt: skip
    """`gmf_visits` with clipped examples and normal noise on their sums: the rows of one client stay in the cache."""
    d = table.shape[1]
    b1, b2, eps = np.float32(beta1), np.float32(beta2), np.float32(epsilon)
    of_user, of_head, of_bias = np.empty((1, d), np.float32), np.empty((1, d), np.float32), np.empty((1, 1), np.float32)
    for c in range(user.shape[0]):
        begin, end, mine = first_row[c], last_row[c], slice(offset[c], offset[c + 1])
        nobody = np.zeros(end - begin, np.int64)  # the place of the one client whose key is at hand
        of_rows, size, total = np.empty((end - begin, d), np.float32), np.float32(offset[c + 1] - offset[c]), 0.0
        for epoch in range(epochs):
            of_rows[:], of_user[:], of_head[:], of_bias[:] = 0, 0, 0, 0
            total += _clipped(
                row[mine], begin, label[mine], table, user[c], head[c], bias[c], with_bias, clip,
                of_rows, of_user[0], of_head[0], of_bias[0],
            )  # fmt: skip
            who = key[epoch, c : c + 1]
            for t in range(scale.shape[0]):
                draws.add(draws.NORMAL, scale[t], state[t, 0], who, nobody, number[begin:end], of_rows)
                draws.add(draws.NORMAL, scale[t], state[t, 1], who, nobody[:1], nobody[:1], of_user)
                draws.add(draws.NORMAL, scale[t], state[t, 2], who, nobody[:1], nobody[:1], of_head)
                if with_bias:
                    draws.add(draws.NORMAL, scale[t], state[t, 3], who, nobody[:1], nobody[:1], of_bias)
            time = age[c] + epoch + 1
            first, root = 1 / (1 - beta1**time), np.float32(sqrt(1 - beta2**time))
            flat, along = table[begin:end].reshape(-1), of_rows.reshape(-1)
            means, squares = table_mean[begin:end].reshape(-1), table_square[begin:end].reshape(-1)
            _divided_adam(flat, means, squares, along, size, np.float32(first * rates[0]), root, eps, b1, b2)
            step = np.float32(first * rates[1])
            _divided_adam(user[c], user_mean[c], user_square[c], of_user[0], size, step, root, eps, b1, b2)
            step = np.float32(first * rates[2])
            _divided_adam(head[c], head_mean[c], head_square[c], of_head[0], size, step, root, eps, b1, b2)
            if with_bias:
                step = np.float32(first * rates[3])
                _divided_adam(bias[c], bias_mean[c], bias_square[c], of_bias[0], size, step, root, eps, b1, b2)
        loss[c] = total / epochs


@compiled
def _divided_adam(
    value: F32, mean: F32, square: F32, total: F32, by: np.float32,
    size: np.float32, root: np.float32, eps: np.float32, beta1: np.float32, beta2: np.float32,
) -> None:  # fmt: skip
    """A step of Adam with the gradient total / by; `total` is changed."""
    for j in range(total.shape[0]):
        total[j] /= by
    _adam(value, mean, square, total, size, root, eps, beta1, beta2)


@compiled
def adam_step(
    value: F32, mean: F32, square: F32, gradient: F32,  # f32[N, d] each
    first_row: I64, last_row: I64, age: I64,  # i64[C]: of each client the rows, and the number of the step, from 1
    rate: float, beta1: float, beta2: float, epsilon: float,
) -> None:  # fmt: skip
    """One step of Adam on the rows of clients."""
    d, b1, b2 = value.shape[1], np.float32(beta1), np.float32(beta2)
    flat, flat_mean, flat_square, along = value.reshape(-1), mean.reshape(-1), square.reshape(-1), gradient.reshape(-1)
    for c in range(age.shape[0]):
        size = np.float32(rate / (1 - beta1 ** age[c]))
        root, eps = np.float32(sqrt(1 - beta2 ** age[c])), np.float32(epsilon)
        mine = slice(first_row[c] * d, last_row[c] * d)
        _adam(flat[mine], flat_mean[mine], flat_square[mine], along[mine], size, root, eps, b1, b2)


@compiled
def _adam(
    value: F32, mean: F32, square: F32, gradient: F32,
    size: np.float32, root: np.float32, eps: np.float32, beta1: np.float32, beta2: np.float32,
) -> None:  # fmt: skip
    one = np.float32(1)
    for j in range(value.shape[0]):
        mean[j] = beta1 * mean[j] + (one - beta1) * gradient[j]
        square[j] = beta2 * square[j] + (one - beta2) * gradient[j] * gradient[j]
        value[j] -= size * mean[j] / (np.sqrt(square[j]) / root + eps)


@compiled
def merge_models(own: F32, sent: F32, node: I64, offset: I64, sender: I64, rest: F32, share: F32) -> None:
    """own[node] = rest own[node] + the sum over its messages of share sent[sender], f32[U, L]; node k has the messages
    offset[k] to offset[k + 1].
    """
    for k in range(node.shape[0]):
        mine = own[node[k]]
        for j in range(mine.shape[0]):
            mine[j] *= rest[k]
        for m in range(offset[k], offset[k + 1]):
            theirs, factor = sent[sender[m]], share[m]
            for j in range(mine.shape[0]):
                mine[j] += factor * theirs[j]


@compiled
def judge_models(
    table: F32,  # f32[U, I, d]: of each node
    node: I64,  # i64[n]: whose model is judged
    turned: F32,  # f32[n, d]: what item rows are multiplied with
    judge: I64,  # i64[n]: the user who judges
    item: I64,  # i64[V, 1 + negatives]: validation items of all users, each before its negatives
    offset: I64,  # i64[U + 1]
    cutoff: int,
    out: F32,  # f32[n]
) -> None:
    """Mean hit rate times mean NDCG on the judges' validation items; 0 for who has none. Ties count half."""
    d = table.shape[2]
    for k in range(node.shape[0]):
        rows, weight = table[node[k]], turned[k]
        begin, end = offset[judge[k]], offset[judge[k] + 1]
        hits, gains = 0.0, 0.0
        for v in range(begin, end):
            best, rank = np.float32(0), 0.0
            for c in range(item.shape[1]):
                score, row = np.float32(0), rows[item[v, c]]
                for j in range(d):
                    score += weight[j] * row[j]
                if c == 0:
                    best = score
                elif score > best:
                    rank += 1
                elif score == best:
                    rank += 0.5
            if rank < cutoff:
                hits += 1
                gains += 1 / np.log2(rank + 2)
        size = max(end - begin, 1)
        out[k] = hits / size * gains / size


@compiled
def score_items(
    table: F32, turned: F32, bias: F32,  # f32[m, I, d], f32[m, d], f32[m]: of models, with h * e_u for a user's vector
    out: F32,  # f32[m, I]
) -> None:  # fmt: skip
    """The scores of all items by models."""
    for m in range(table.shape[0]):
        rows, mine = table[m], turned[m]
        for i in range(rows.shape[0]):
            score = bias[m]
            for j in range(mine.shape[0]):
                score += mine[j] * rows[i, j]
            out[m, i] = score


@compiled
def score_changed(
    table: F32,  # f32[I, d]: what all clients received
    change: F32, item: I64, offset: I64,  # f32[N, d], i64[N], i64[C + 1]: what they changed of it
    turned: F32, bias: F32,  # f32[C, d], f32[C]
    out: F32,  # f32[C, I]
) -> None:  # fmt: skip
    """The same where models are changes of one table."""
    for c in range(turned.shape[0]):
        mine = turned[c]
        for i in range(table.shape[0]):
            score = bias[c]
            for j in range(mine.shape[0]):
                score += mine[j] * table[i, j]
            out[c, i] = score
        for n in range(offset[c], offset[c + 1]):
            more = np.float32(0)
            for j in range(mine.shape[0]):
                more += mine[j] * change[n, j]
            out[c, item[n]] += more


@compiled
def sum_targets(value: F32, item: I64, offset: I64, out: F32) -> None:
    """Of each row of f32[m, I] the sums over items of A sets, i64[T] and i64[A + 1], to f32[A, m]."""
    for m in range(value.shape[0]):
        row = value[m]
        for a in range(out.shape[0]):
            total = np.float32(0)
            for t in range(offset[a], offset[a + 1]):
                total += row[item[t]]
            out[a, m] = total


@compiled
def score_pairs(
    table: F32, head: F32, bias: F32,  # f32[m, I, d], f32[m, d], f32[m]: of models
    vector: F32,  # f32[A, d]: of adversaries
    item: I64, offset: I64,  # i64[T], i64[A + 1]: targets
    apart: F32,  # f32[m, I]: 1 for targets that do not count for a model; or f32[0, 0]
    sample: I64,  # i64[S]: random items
    adversary: I64, model: I64,  # i64[k]: pairs
    out: F32,  # f32[k]
) -> None:  # fmt: skip
    """The mean chance of an adversary's targets by a model with its vector, minus that of a sample if there is one."""
    d = table.shape[2]
    turned, chance = np.empty(d, np.float32), np.empty(table.shape[1], np.float32)
    power, room = np.empty(table.shape[1], np.int32), np.empty(table.shape[1], np.int64)
    for k in range(adversary.shape[0]):
        a, m = adversary[k], model[k]
        for j in range(d):
            turned[j] = vector[a, j] * head[m, j]
        mine = _that_count(item[offset[a] : offset[a + 1]], apart, m, room)
        mean = _mean_chance(table[m], turned, bias[m], mine, chance, power)
        if sample.shape[0]:
            mean -= _mean_chance(table[m], turned, bias[m], sample, chance, power)
        out[k] = mean


@compiled
def _that_count(item: I64, apart: F32, model: int, room: I64) -> I64:
    """The items without those that a model's row of f32[m, I] sets apart, if there are such rows; i64[at most I]."""
    if apart.shape[0] == 0:
        return item
    count = 0
    for t in range(item.shape[0]):
        if apart[model, item[t]] == 0:
            room[count] = item[t]
            count += 1
    return room[:count]


@compiled
def _mean_chance(rows: F32, turned: F32, bias: np.float32, item: I64, chance: F32, power: I32) -> float:
    """The mean sigmoid; `chance` and `power` are room for one value per item."""
    d, count = turned.shape[0], item.shape[0]
    for t in range(count):
        score = bias
        for j in range(d):
            score += turned[j] * rows[item[t], j]
        chance[t] = score
    # exp(-x) = 2^n 2^f with n whole and f in [-0.5, 0.5]: a polynomial for the second, the exponent's bits for the
    # first. Without calls, so that the loop is vectorized
    for t in range(count):
        y = min(max(-chance[t] * np.float32(1.442695040888963), np.float32(-126)), np.float32(126))
        n = np.floor(y + np.float32(0.5))
        f = (y - n) * np.float32(0.6931471805599453)
        series = np.float32(1 / 720) + f * np.float32(1 / 5040)
        series = np.float32(1 / 120) + f * series
        series = np.float32(1 / 24) + f * series
        series = np.float32(1 / 6) + f * series
        series = np.float32(0.5) + f * series
        chance[t] = np.float32(1) + f * (np.float32(1) + f * series)
        power[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
    scale = power.view(np.float32)
    total = np.float32(0)
    for t in range(count):
        total += np.float32(1) / (np.float32(1) + chance[t] * scale[t])
    return float(total / max(count, 1))


@compiled
def standardize_pairs(
    table: F32, head: F32, bias: F32,  # f32[m, I, d], f32[m, d], f32[m]: of models
    vector: F32,  # f32[A, d]: of adversaries
    item: I64, offset: I64,  # i64[T], i64[A + 1]: targets
    apart: F32,  # f32[m, I]: 1 for targets that do not count for a model; or f32[0, 0]
    center: F32, spread: F32,  # f32[m, d], f32[m, d, d]: mean and covariance of a model's rows of random items
    adversary: I64, model: I64,  # i64[k]: pairs
    out: F32,  # f32[k]
) -> None:  # fmt: skip
    """How far an adversary's targets lie above random items by a model with its vector, in standard deviations.

    A score is linear in an item's row, so that the sample's mean and variance are those of rows along one direction.
    The mean over no targets is 0.
    """
    d = table.shape[2]
    turned, room = np.empty(d, np.float32), np.empty(table.shape[1], np.int64)
    for k in range(adversary.shape[0]):
        a, rows = adversary[k], table[model[k]]
        for j in range(d):
            turned[j] = vector[a, j] * head[model[k], j]
        total, mine = np.float32(0), _that_count(item[offset[a] : offset[a + 1]], apart, model[k], room)
        for t in range(mine.shape[0]):
            score = np.float32(0)
            for j in range(d):
                score += turned[j] * rows[mine[t], j]
            total += score
        above, variance = total / max(mine.shape[0], 1), np.float32(0)
        if mine.shape[0] == 0:  # else both means have it
            above -= bias[model[k]]
        for j in range(d):
            above -= turned[j] * center[model[k], j]
            for i in range(d):
                variance += turned[i] * spread[model[k], i, j] * turned[j]
        out[k] = above / max(sqrt(max(variance, np.float32(0))), 1e-12)
