"""The validation items on which nodes of a gossip compare their peers (PEPPER, Belal et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from recleak import random
from recleak.data.interactions import Interactions
from recleak.data.sampling import Complement
from recleak.data.sequences import Transitions
from recleak.errors import DataError

NEGATIVES = 99  # against which each validation item is ranked
CUTOFF = 20


@dataclass(frozen=True, eq=False)
class Panel:
    """The validation items of all users, each with sampled negatives; V of them."""

    own: sp.csr_array  # f32[U, I]: training items
    item: NDArray[np.int64]  # i64[V, 1 + negatives]: the validation item, then negatives
    offset: NDArray[np.int64]  # i64[U + 1]
    starts: Transitions | None = None  # V of them, if the items are what came next

    @classmethod
    def of(
        cls,
        train: Interactions,
        valid: Interactions | None,
        spare: tuple[Interactions, ...],
        seed: int,
        sequential: bool = False,
    ) -> Panel:
        """From the parts of a split; items of `spare` are no negatives. `sequential`: the items are what came next."""
        if valid is None or not len(valid):
            raise DataError(
                "Personal peers are chosen by validation items, and there are none", remedy="Give `valid` items."
            )
        held = valid.distinct()
        starts = Transitions.of(valid, earlier=(train,)) if sequential else None
        item = held.item if starts is None else starts.item
        user = held.user.astype(np.int64) if starts is None else starts.user
        offset = np.concatenate([[0], np.cumsum(held.activity)]) if starts is None else starts.offset
        free = Complement.of(train, held, *spare)
        number = np.arange(len(user))[:, None]
        rank = random.below(free.size[user][:, None], seed, "panel", number, np.arange(NEGATIVES))
        negative = free.item(np.broadcast_to(user[:, None], rank.shape), rank)
        items = np.concatenate([item[:, None], negative], 1).astype(np.int64)
        return cls(train.matrix(), items, offset.astype(np.int64), starts)

    def targets(self, user: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The validation items of users i64[n]: the place of each one's user, and its own, i64[v]."""
        count = self.offset[user + 1] - self.offset[user]
        owner = np.repeat(np.arange(len(user)), count)
        return owner, np.arange(len(owner)) - np.repeat(np.cumsum(count) - count - self.offset[user], count)

    def performance(self, scores: NDArray[np.float32], user: NDArray[np.int64]) -> NDArray[np.float32]:
        """Mean hit rate times mean NDCG at 20 on the users' validation items, f32[n]; 0 for who has none."""
        owner, place = self.targets(user)
        return self.graded(scores[owner[:, None], self.item[place]], owner, len(user))

    def graded(self, scores: NDArray[np.float32], owner: NDArray[np.int64], n: int) -> NDArray[np.float32]:
        """The same from the scores of validation items and their negatives, f32[v, 1 + negatives]."""
        rank = (scores[:, 1:] > scores[:, :1]).sum(1) + 0.5 * (scores[:, 1:] == scores[:, :1]).sum(1)
        hit = rank < CUTOFF
        gain = np.where(hit, 1 / np.log2(rank + 2), 0.0)
        size = np.maximum(np.bincount(owner, minlength=n), 1)
        return np.asarray(np.bincount(owner, hit, n) / size * np.bincount(owner, gain, n) / size, np.float32)
