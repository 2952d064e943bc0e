"""Canaries: made-up interactions, each planted or not by a fair coin, to measure what a run gives away at least.

The unit is the **presence of one interaction**: under (epsilon, delta) for that unit nobody can tell well which
canaries are in. An adversary that is asked about them and guesses better than that refutes the epsilon. What a defense
promises for another unit (a label, given which items are touched) is not refuted by it, and not confirmed either.

A canary that is out may still be touched, as a negative. One that no upload touches has a probability of exactly 0 in
the adversary's answer: that is a fair observation of who sees which rows are sent.

Axis letters: m canaries, U users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import torch
from numpy.typing import ArrayLike, NDArray

from recleak import random
from recleak.attacks.base import WhichItems
from recleak.data.interactions import Interactions
from recleak.data.sampling import Complement
from recleak.errors import ConfigError
from recleak.metrics.lower_bound import from_one_run

_SHARES = (2 / 5, 1 / 8, 1 / 32)  # of the canaries; not 1/2: by chance the coins put more of them in, or fewer


@dataclass(frozen=True, eq=False)
class Canaries:
    """Made-up interactions, those that are in, and the data with them."""

    client: NDArray[np.int64]  # i64[m]
    item: NDArray[np.int64]  # i64[m]
    included: NDArray[np.bool_]  # bool[m]: the truth, for the audit only
    train: Interactions  # what clients train on: the given rows and the canaries that are in

    def __len__(self) -> int:
        return len(self.client)

    @property
    def question(self) -> WhichItems:
        """What to ask an attack: it may know the canaries, not the coins."""
        return WhichItems(torch.from_numpy(self.client), torch.from_numpy(self.item))

    def of(self, clients: ArrayLike) -> Canaries:
        """The canaries of some clients, such as those who took part: no coin may decide who they are."""
        mine = np.isin(self.client, np.asarray(clients))
        return replace(self, client=self.client[mine], item=self.item[mine], included=self.included[mine])


@dataclass(frozen=True)
class AtLeast:
    """What canaries show: with confidence `level`, epsilon at `delta` is at least `epsilon`."""

    epsilon: float
    canaries: int
    guessed_in: int  # the guesses that this bound is from
    guessed_out: int
    right: int
    tried: int  # ways to guess that share the error
    delta: float
    level: float


def plant(train: Interactions, *, per_user: int = 1, spare: tuple[Interactions, ...] = (), seed: int = 0) -> Canaries:
    """Draw `per_user` items that each client does not have, and toss a coin for each.

    Items are uniform among those neither in `train` nor in `spare` (such as the held-out parts); a client with fewer
    gets all of them. Users without an interaction are no clients, and get none. A canary has no rating and no time.
    """
    if per_user < 1:
        raise ConfigError(f"per_user is {per_user}, expected at least 1 canary.")
    free = Complement.of(train, *spare)
    active = np.flatnonzero(train.activity).astype(np.int64)
    rank = _distinct(free.size[active], per_user, active, seed)  # i64[clients, per_user]
    row, place = np.nonzero(rank >= 0)
    client = active[row]
    item = free.item(client, rank[row, place]).astype(np.int64)
    order = np.lexsort((item, client))
    client, item = client[order], item[order]
    included = random.bits(seed, "canary coin", client, item) >> np.uint64(63) == 1
    return Canaries(client, item, included, _with_rows(train, client[included], item[included]))


def bound(
    canaries: Canaries,
    score: ArrayLike,
    *,
    delta: float,
    level: float = 0.95,
    guesses: Sequence[tuple[int, int]] | None = None,
) -> AtLeast:
    """What epsilon is at least, from scores f64[m] of the canaries (higher: rather in), such as an attack's answer.

    A pair (a, b) of `guesses` takes the a highest scores for in and the b lowest for out; the adversary keeps silent on
    the rest. Equal scores come in a random order, so that a constant one gets nothing. Of several pairs the one with
    the largest bound counts, and they share the error equally; by default there are nine: two fifths, an eighth and a
    thirty-second of the canaries, in and out, in only, out only. Choose them before anything is seen of `included`.
    """
    score, m = np.asarray(score, np.float64), len(canaries)
    if score.shape != (m,) or np.isnan(score).any():
        raise ValueError(f"Got scores of shape {score.shape}, expected a number for each of the {m:,} canaries.")
    pairs = _default_guesses(m) if guesses is None else list(guesses)
    wrong = [pair for pair in pairs if min(pair) < 0 or sum(pair) > m]
    if wrong or not pairs:
        raise ConfigError(f"Got guesses {wrong or pairs}, expected pairs (in, out) that add up to at most {m:,}.")
    tie = random.bits(0, "canary tie", canaries.client, canaries.item)
    truth = canaries.included[np.lexsort((tie, score))]  # lowest scores first
    each = 1 - (1 - level) / len(pairs)

    def grade(pair: tuple[int, int]) -> AtLeast:
        inside, outside = pair
        right = int(truth[m - inside :].sum()) + outside - int(truth[:outside].sum())
        epsilon = from_one_run(m, inside + outside, right, delta=delta, level=each)
        return AtLeast(epsilon, m, inside, outside, right, len(pairs), delta, level)

    return max(map(grade, pairs), key=lambda found: found.epsilon)


def _default_guesses(m: int) -> list[tuple[int, int]]:
    numbers = dict.fromkeys(int(m * share) for share in _SHARES if m * share >= 1)
    return [pair for n in numbers for pair in ((n, n), (n, 0), (0, n))] or [(0, 0)]


def _distinct(size: NDArray[np.int64], n: int, user: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """For each user a uniform set of n numbers below its size, i64[users, n]; all and then -1 if it has fewer.

    Floyd's algorithm (Bentley and Floyd 1987): for j = size - n, ..., size - 1 draw t up to j; if t is there, take j.
    """
    drawn = np.full((len(user), n), -1, np.int64)
    for place in range(n):
        last = size - n + place  # j; negative: there are not so many numbers
        lot = random.below(np.maximum(last, 0) + 1, seed, "canary item", user, place)
        lot = np.where((drawn[:, :place] == lot[:, None]).any(1), last, lot)
        drawn[:, place] = np.where(last >= 0, lot, -1)
    return drawn


def _with_rows(train: Interactions, user: NDArray[np.int64], item: NDArray[np.int64]) -> Interactions:
    """The interactions and some more, in the canonical order."""
    more = pl.DataFrame({"user": user.astype(np.int32), "item": item.astype(np.int32)})
    rows = pl.concat([train.rows, more], how="diagonal")
    keys = [name for name in ("user", "time", "item", "rating") if name in rows.columns]
    return replace(train, rows=rows.sort(keys, nulls_last=False).rechunk())
