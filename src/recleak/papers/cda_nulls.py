"""Beside CDA, ours: what is found by who reads no model.

`random`, a draw by each adversary for itself, is what the paper compares with. But an attack whose scores are high for
the same victims whoever looks (raw confidence is such a one) is one draw for all adversaries at once, and the published
maximum is the best of all rounds, seen with the truth: `best_of_rankings` is the null of that. Activity is what a
server sees of an upload without reading a number of it, and nobody else. Where targets that a victim has itself do not
count, what was excluded depends on the overlap: `scores_of_noise` is what that tells by itself. Where an attack does
not look for those who side with an adversary, its nulls do not either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.attacks.community import Scoring, ServerCommunity
from recleak.attacks.community_targets import apart_of

REPEATS = 400  # of a simulated null


def best_of_rankings(
    truth: Tensor, size: int, rounds: int, *, seed: int, aside: Tensor | None = None, repeats: int = REPEATS
) -> NDArray[np.float64]:
    """The highest mean accuracy in so many rounds, if all users claim the same `size` random others, f64[repeats].

    bool[U, U]: whom each user looks for; not itself, nor who is `aside`, bool[U, U]. In their place it claims the next
    ones.
    """
    members, users = truth.double().numpy(), len(truth)
    off = np.eye(users, dtype=bool) | (False if aside is None else aside.numpy())
    inside, last = members.sum(0), min(users, size + int(off.sum(1).max()))  # then all have claimed as many as they can
    generator = np.random.default_rng(int(random.bits(seed, "best of rankings")))
    best, left_out = np.empty(repeats), off.astype(np.float32)
    for repeat in range(repeats):
        order = generator.random((rounds, users)).argsort(1)[:, :last]
        first = np.zeros((rounds, users), np.float32)
        np.put_along_axis(first, order[:, :size], 1.0, 1)
        missing = left_out @ first.T  # f32[U, rounds]: how many more each user claims
        hits = inside[order[:, :size]].sum(1)
        for place in order[:, size:].T:
            if not missing.any():
                break
            able = (missing > 0) & ~off[:, place]
            hits += (members[:, place] * able).sum(0)
            missing -= able
        best[repeat] = hits.max()
    values: NDArray[np.float64] = best / (users * size)
    return values


def scores_of_noise(knowledge: Knowledge, scoring: Scoring, rounds: int, *, seed: int) -> Iterator[Tensor]:
    """Round by round f32[A, U]: the scores of an attack on models that give every item a random number."""
    attack, apart = ServerCommunity(scoring=scoring, seed=seed), apart_of(knowledge, torch.arange(knowledge.n_users))
    generator = torch.Generator().manual_seed(int(random.bits(seed, "noise") >> np.uint64(1)))
    for _ in range(rounds):
        logits = torch.randn(knowledge.n_users, knowledge.n_items, generator=generator)
        yield attack.of_logits(knowledge, logits, apart)
