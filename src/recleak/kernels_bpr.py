"""BPR one triple after another, compiled by numba as in `kernels`. Letters: T triples, U users, I items, d factors."""

from __future__ import annotations

from math import exp, log1p

from recleak.kernels import F32, I64, compiled


@compiled
def learn_bpr(
    user: I64,  # i64[T]
    item: I64,  # i64[T, 2]: the preferred item, and the other
    users: F32,  # f32[U, d], changed
    items: F32,  # f32[I, d], changed
    user_rate: float,
    item_rate: float,
    decay: float,
) -> float:
    """LearnBPR (Rendle et al. 2009, figure 4) without biases; the sum of -log sigmoid(x) as it was before each step.

    For x = p . (q - r): p, q and r each go along their gradient of log sigmoid(x), minus decay times themselves.
    """
    total, width = 0.0, users.shape[1]
    for t in range(user.shape[0]):
        u, i, j = user[t], item[t, 0], item[t, 1]
        gap = 0.0
        for f in range(width):
            gap += users[u, f] * (items[i, f] - items[j, f])
        total += log1p(exp(-gap)) if gap > 0 else log1p(exp(gap)) - gap
        pull = 1 / (1 + exp(gap))  # 1 - sigmoid(x)
        for f in range(width):
            p, q, r = users[u, f], items[i, f], items[j, f]
            users[u, f] = p + user_rate * (pull * (q - r) - decay * p)
            items[i, f] = q + item_rate * (pull * p - decay * q)
            items[j, f] = r - item_rate * (pull * p + decay * r)
    return total
