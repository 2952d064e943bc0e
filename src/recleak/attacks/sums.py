"""The gradient-alignment attack on a sum of uploads, by who rehearses it and knows which items are popular.

Behind secure aggregation nobody sees whose row is whose: a sum says at most how many of its n clients own an item.
Which of the rows that moved are owned by many, how well a movement shows that, and what popularity alone would have
told, an adversary learns from sums that it makes itself: shadow clients, with items drawn by popularity, train under
the same defense from the same broadcast. A logistic regression on the share of shadow clients that own an item reads
then the movement of its row and its popularity together: where movements say nothing, popularity is what is left.

Axis letters: S shadow clients, I items, N rows of a sum, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import expm1, log1p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.alignment import described, read_sum, regressed, with_repeats
from recleak.attacks.base import Knowledge
from recleak.attacks.membership import (
    FromSums,
    chosen,
    expected_in_sum,
    mean_of,
    popularity_odds,
    public_popularity,
    whole,
)
from recleak.attacks.shadow import train_shadows
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.training.aggregate import Summation
from recleak.update import Update

_BLOCK = 1 << 18  # lots held at a time, or those of one shadow client


@dataclass(frozen=True, kw_only=True)
class RehearsedSums(FromSums):
    """The projection of a sum and the popularity of its items, weighed by what `shadow_sums` sums of so many shadow
    clients show. Needs `popularity`, f32[I], in the public knowledge.
    """

    shadow_sums: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadow_sums < 1:
            raise ConfigError(
                f"shadow_sums is {self.shadow_sums}, expected at least 1; without any, use AlignmentOfSums."
            )

    def evidence(
        self, knowledge: Knowledge, received: Params, mean: Update, clients: int, round: int
    ) -> tuple[Tensor, Tensor]:
        """The log odds that one of the clients owns an item, from the regression."""
        expected = expected_in_sum(knowledge, len(mean.item), clients)
        sums = [
            self._sum(knowledge, received, float(expected), np.arange(first, first + clients), round)
            for first in range(0, self.shadow_sums * clients, clients)
        ]
        known, truth = (torch.cat(parts) for parts in zip(*sums, strict=True))
        seen, _ = _shown(knowledge, received, mean, clients)
        return regressed(known, truth, torch.zeros(len(known), dtype=torch.int64), seen, mean), expected

    def _sum(
        self, knowledge: Knowledge, received: Params, expected: float, shadows: NDArray[np.int64], round: int
    ) -> tuple[Tensor, Tensor]:
        """What the rows of a sum of these shadow clients look like, f32[N, F], and which share of them own the item,
        f32[N].
        """
        seed = int(random.bits(self.seed, "shadow sums", round) >> np.uint64(1))
        tables = {part.name for part in knowledge.components if part.storage == "per_user"}
        copies = -(-self.shadow_sums * len(shadows) // knowledge.n_users)  # they begin as some users, whoever they are
        known = {name: torch.cat([value] * copies) if name in tables else value for name, value in received.items()}
        parts = tuple(part for part in knowledge.components if part.storage != "per_user")
        total, owners = Summation(received, parts, count_rows=False), torch.zeros(knowledge.n_items)
        step = max(1, _BLOCK // knowledge.n_items)
        for block in (shadows[first : first + step] for first in range(0, len(shadows), step)):
            drawn, own = self._drawn(knowledge, expected, block, round)
            data = with_repeats(knowledge, block, drawn, own, seed)
            moved = train_shadows(knowledge, known, data, round, seed, defense=knowledge.defense)
            total.add(_without(tables, moved), torch.ones(len(block)))
            owners += torch.bincount(drawn.item[own], minlength=knowledge.n_items)
        shown, item = _shown(knowledge, received, mean_of(knowledge, total.result(round)), len(shadows))
        return shown, owners[item] / len(shadows)

    def _drawn(
        self, knowledge: Knowledge, expected: float, shadows: NDArray[np.int64], round: int
    ) -> tuple[Update, Tensor]:
        """The rows that shadow clients touch, and which of them are their own items, bool[N].

        Own items are drawn by popularity without replacement (Efraimidis and Spirakis 2006), negatives uniformly.
        """
        popularity, n_items = public_popularity(knowledge), knowledge.n_items
        size = max(1, min(_nearest(expected), int((popularity > 0).sum()), n_items - 1))
        lot = random.uniform(self.seed, "items of shadows", round, shadows[:, None], np.arange(n_items)[None])
        weight = popularity.double().clamp(min=1e-9).numpy()
        order = np.argsort(np.log(np.maximum(lot, 1e-300)) / weight, axis=1)  # ascending: own items come last
        rest, draws = n_items - size, (0 if knowledge.training is None else knowledge.training.negatives) * size
        other = min(rest, _nearest(-rest * expm1(draws * log1p(-1 / rest)))) if rest > 1 else rest
        lot = random.uniform(self.seed, "negatives of shadows", round, shadows[:, None], np.arange(rest)[None])
        negative = np.take_along_axis(order[:, :rest], np.argsort(lot, axis=1)[:, :other], axis=1)
        item = np.concatenate([order[:, rest:], negative], axis=1)  # i64[S, size + other]
        mark = np.broadcast_to(np.arange(size + other) < size, item.shape)
        place = np.argsort(item, axis=1)
        item, mark = np.take_along_axis(item, place, axis=1), np.take_along_axis(mark, place, axis=1)
        offset = torch.arange(len(shadows) + 1) * (size + other)
        rows = Update(torch.from_numpy(shadows), {}, {}, torch.from_numpy(item.reshape(-1)), offset, n_items)
        return rows, torch.from_numpy(mark.reshape(-1).copy())


def _without(tables: set[str], update: Update) -> Update:
    """Without the vectors of single users: in a sum they say nothing of items."""
    return replace(update, values={name: value for name, value in update.values.items() if name not in tables})


def _nearest(number: float) -> int:
    """The nearest whole number; a half goes up."""
    return int(number + 0.5)


def _shown(knowledge: Knowledge, received: Params, mean: Update, clients: int) -> tuple[Tensor, Tensor]:
    """What the rows of a sum look like beside how popular their items are, f32[N, F]; and the items, i64[N]."""
    mean, odds, anybody, _ = read_sum(knowledge, received, mean, clients)
    moved = described(knowledge, received, mean, chosen(mean, odds, whole(anybody)), anybody)
    popular = popularity_odds(knowledge, mean.item).unsqueeze(1)
    strength = moved[:, :3]  # the projections and the length
    return torch.cat([moved, odds.unsqueeze(1), popular, popular.square(), popular * strength], dim=1), mean.item
