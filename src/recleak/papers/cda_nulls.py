"""Beside CDA, ours: what is found by who reads no model.

`random`, a draw by each adversary for itself, is what the paper compares with. But an attack whose scores are high for
the same victims whoever looks (raw confidence is such a one) is one draw for all adversaries at once, and the published
maximum is the best of all rounds, seen with the truth: `best_of_rankings` is the null of that. Activity is what a
server sees of an upload without reading a number of it. Where targets that a victim has itself do not count, what was
excluded depends on the overlap: `scores_of_noise` is what that tells by itself.
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


def draws(users: int, seed: int) -> Tensor:
    """A random number of each user for each adversary, f32[U, U]."""
    lot = random.uniform(seed, "random community", np.arange(users)[:, None], np.arange(users))
    return torch.from_numpy(lot).float()


def best_of_rankings(
    truth: Tensor, size: int, rounds: int, *, seed: int, repeats: int = REPEATS
) -> NDArray[np.float64]:
    """The highest mean accuracy in so many rounds, if all users claim the same `size` random others, f64[repeats].

    bool[U, U]: whom each user looks for, nobody itself. Who is among those claimed claims the next one instead.
    """
    members, users = truth.double().numpy(), len(truth)
    inside, generator = members.sum(0), np.random.default_rng(int(random.bits(seed, "best of rankings")))
    best = np.empty(repeats)
    for repeat in range(repeats):
        first = generator.random((rounds, users)).argpartition(size, 1)[:, : size + 1]  # the last one is the next one
        claimed, spare = first[:, :size], first[:, size:]
        best[repeat] = (inside[claimed].sum(1) + members[claimed, spare].sum(1)).max()
    values: NDArray[np.float64] = best / (users * size)
    return values


def scores_of_noise(knowledge: Knowledge, scoring: Scoring, rounds: int, *, seed: int) -> Iterator[Tensor]:
    """Round by round f32[A, U]: the scores of an attack on models that give every item a random number."""
    attack, apart = ServerCommunity(scoring=scoring, seed=seed), apart_of(knowledge, torch.arange(knowledge.n_users))
    generator = torch.Generator().manual_seed(int(random.bits(seed, "noise") >> np.uint64(1)))
    for _ in range(rounds):
        logits = torch.randn(knowledge.n_users, knowledge.n_items, generator=generator)
        yield attack.of_logits(knowledge, logits, apart)
