"""Ranking metrics per user: Hit@K, Recall@K, NDCG@K and MRR, on all items or on sampled candidates.

Ties. A recommender that scores many items alike has not chosen an order, so every metric here is its exact expectation
over a uniformly random order of the tied candidates (McSherry and Najork 2008). A constant scorer gets exactly chance,
whatever the order of the items: Hit@K = K / n for one target among n candidates.

`rank` does the work that needs scores and keeps three counts per target; everything else is a closed form of those.
A group of tied candidates holds the positions above + 1 to above + s, with s = tied + 1. Two targets of a user are tied
with each other if, and only if, as many candidates are above them, so nothing more needs to be kept.

Cost: one sort per user; full ranking on ML-1M (6,040 users, 3,706 items) is a step of `make bench`.

Axis letters: U users, I items, G graded users, T targets, B graded users of a chunk, M the most targets of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.errors import DataError, RecleakError
from recleak.metrics.intervals import Estimate, bootstrap_mean

_BYTES = 64  # of working memory per user and item or negative; covers scores in double precision


class Scorer(Protocol):
    """Whatever ranks items for users: a fitted model, a baseline, or what an adversary makes of messages."""

    def scores(self, users: Tensor) -> Tensor:
        """A score of every item for each of the given users: i64[B] -> f32[B, I]; higher is better."""
        ...


@runtime_checkable
class CandidateScorer(Scorer, Protocol):
    """A scorer that need not score all items."""

    def scores_of(self, users: Tensor, items: Tensor) -> Tensor:
        """A score of some items for each of the given users: i64[B], i64[B, K] -> f32[B, K]."""
        ...


@dataclass(frozen=True, eq=False)
class Ranks:
    """Where the targets of each graded user came out among its candidates.

    The methods give one value per graded user, f64[G], in the order of `users`.

    >>> one = np.array([1])
    >>> Ranks(users=7 * one, candidates=100 * one, row=0 * one, above=0 * one, tied=99 * one).hit(10)
    array([0.1])
    """

    users: NDArray[np.int64]  # i64[G], ascending: the users with a target
    candidates: NDArray[np.int64]  # i64[G]: targets and others
    row: NDArray[np.int64]  # i64[T], ascending: the target belongs to users[row]
    above: NDArray[np.int64]  # i64[T]: candidates with a higher score
    tied: NDArray[np.int64]  # i64[T]: other candidates with the same score, targets or not

    @property
    def user(self) -> NDArray[np.int64]:
        """The user code of every target, i64[T]."""
        return self.users[self.row]

    def constant(self) -> Ranks:
        """The ranks of a constant scorer on the same candidates: what chance gets, without scoring anything."""
        return replace(self, above=np.zeros_like(self.above), tied=self.candidates[self.row] - 1)

    def hit(self, k: int) -> NDArray[np.float64]:
        """The probability that at least one target is among the first k.

        Only the best target's tie group matters. If j of its s positions are among the first k, the t targets in it all
        miss them with probability C(s - j, t) / C(s, t), here as the product of 1 - j / (s - i) over i < t
        (a factor is 0 before any is negative).
        """
        above, size, targets = self._best_group
        slots = np.clip(_cutoff(k) - above, 0, size)
        start = np.cumsum(targets) - targets
        i = np.arange(targets.sum()) - np.repeat(start, targets)
        miss = 1 - np.repeat(slots, targets) / (np.repeat(size, targets) - i)
        return 1 - np.multiply.reduceat(miss, start)

    def recall(self, k: int) -> NDArray[np.float64]:
        """The expected share of the targets that is among the first k; each is there with probability j / s."""
        size = self.tied + 1
        return self._sum(np.clip(_cutoff(k) - self.above, 0, size) / size) / self._targets

    def ndcg(self, k: int) -> NDArray[np.float64]:
        """The expected DCG@k over the best possible one; a target at position p <= k gains 1 / log2(1 + p).

        Gains are 0 or 1 (Järvelin and Kekäläinen 2002); the best possible list has min(k, targets) targets on top.
        """
        k = _cutoff(k)
        gain = _cumulative(1 / np.log2(np.arange(2, self.candidates.max() + 2)))
        size = self.tied + 1
        dcg = (gain[np.minimum(self.above + size, k)] - gain[np.minimum(self.above, k)]) / size
        return self._sum(dcg) / gain[np.minimum(self._targets, k)]

    def mrr(self, k: int | None = None) -> NDArray[np.float64]:
        """The expected 1 / position of the first target; with k it counts as 0 beyond position k.

        If the best target's tie group has s positions and t targets, the first target takes the j-th position with
        probability C(s - j, t - 1) / C(s, t). For t = 1 this sums to a difference of harmonic numbers over s.
        """
        above, size, targets = self._best_group
        last = above + size - targets + 1  # the worst position that the first target can have
        last = last if k is None else np.minimum(last, _cutoff(k))
        harmonic = _cumulative(1 / np.arange(1, self.candidates.max() + 1))
        value: NDArray[np.float64] = (harmonic[last] - harmonic[np.minimum(above, last)]) / size
        many = targets > 1
        if many.any():
            value[many] = _first_of_many(above[many], size[many], targets[many], last[many])
        return value

    @cached_property
    def _targets(self) -> NDArray[np.int64]:
        """Targets per graded user, i64[G]."""
        return np.bincount(self.row, minlength=len(self.users))

    @cached_property
    def _start(self) -> NDArray[np.int64]:
        """The first target of each graded user, i64[G]."""
        return np.cumsum(self._targets) - self._targets

    @cached_property
    def _best_group(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of the tie group of each user's best target: candidates above it, its size, targets in it; i64[G] each."""
        above = np.minimum.reduceat(self.above, self._start)
        best = self.above == above[self.row]
        size = np.maximum.reduceat(np.where(best, self.tied + 1, 0), self._start)
        return above, size, np.bincount(self.row[best], minlength=len(self.users))

    def _sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums over the targets of each user: f64[T] -> f64[G]."""
        return np.add.reduceat(values, self._start)


def rank(
    scorer: Scorer,
    exclude: Interactions | None,
    test: Interactions,
    candidates: NDArray[Any] | Tensor | None = None,
    *,
    chunk_bytes: int = 1 << 26,
    device: torch.device | str = "cpu",
) -> Ranks:
    """Rank the test items of every user that has any among its candidates.

    Without `candidates` this is full ranking: all items compete but those that the user has in `exclude`, normally the
    training part. With `candidates`, i64[U, n] sampled negatives padded with -1, a user's targets compete with its
    negatives alone; each entry is one candidate, so a negative that was drawn twice counts twice.
    `exclude` and `test` share user and item codes; repeats of a (user, item) pair count once.

    Users are scored in chunks of about `chunk_bytes` of working memory beside what the scorer takes, however many users
    or targets there are. The chunk changes nothing if a scorer's row does not depend on its batch. The scorer gets its
    users on `device`.
    """
    n_items = test.n_items
    target = _pairs(test)  # i64[T]
    if len(target) == 0:
        raise DataError("the test part has no interaction, so nobody can be graded", remedy="Check the split.")
    held = np.empty(0, np.int64) if exclude is None else _pairs(_same_codes(exclude, test))
    _refuse(np.intersect1d(target, held, assume_unique=True), n_items, "test items are excluded from the candidates")
    negatives = None if candidates is None else _negatives(candidates, test.n_users)

    users, row = np.unique(target // n_items, return_inverse=True)
    held = held[np.isin(held // n_items, users)]
    held_row = np.searchsorted(users, held // n_items)
    column = (
        np.arange(len(target)) - np.searchsorted(row, np.arange(len(users)))[row]
    )  # i64[T]: n-th target of its user
    width = n_items if negatives is None else n_items + negatives.shape[1]
    if negatives is not None and isinstance(scorer, CandidateScorer):
        width = int(column.max()) + 1 + negatives.shape[1]
    step = max(1, chunk_bytes // (_BYTES * width))
    parts = []
    for start in range(0, len(users), step):
        chunk = users[start : start + step]
        mine = slice(*np.searchsorted(row, (start, start + step)))
        gone = slice(*np.searchsorted(held_row, (start, start + step)))
        at = row[mine] - start, column[mine]
        sought = np.full((len(chunk), at[1].max() + 1), -1, np.int64)  # i64[B, M]
        sought[at] = target[mine] % n_items
        if negatives is None:
            pool = _finite(scorer, chunk, n_items, device)  # f32[B, I]
            wanted = _picked(pool, sought)
            pool[held_row[gone] - start, held[gone] % n_items] = -np.inf
        else:
            drawn = negatives[chunk].astype(np.int64)  # i64[B, n]
            _check_negatives(drawn, chunk, n_items, target[mine], held[gone])
            pool = _of_candidates(scorer, chunk, np.concatenate([sought, drawn], axis=1), n_items, device)
            wanted = pool[:, : sought.shape[1]].copy()
        parts.append((np.count_nonzero(pool > -np.inf, axis=1), *(counts[at] for counts in _place(pool, wanted))))
    count, above, tied = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Ranks(users, count, row, above, tied)


def summarize(ranks: Ranks, ks: Sequence[int] = (5, 10, 20), *, seed: int = 0) -> dict[str, Estimate]:
    """The mean of every metric over graded users, named as in "Hit@10"; all intervals resample the same users."""
    metrics = (("Hit", ranks.hit), ("Recall", ranks.recall), ("NDCG", ranks.ndcg))
    values = {f"{name}@{k}": metric(k) for name, metric in metrics for k in ks} | {"MRR": ranks.mrr()}
    return {name: bootstrap_mean(each, seed=seed) for name, each in values.items()}


def _place(pool: NDArray[Any], wanted: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many of a row of the pool are above each wanted score, and how many others equal it; i64[B, M] each."""
    ordered, sought = torch.from_numpy(np.sort(pool, axis=1)), torch.from_numpy(wanted)
    below, up_to = (torch.searchsorted(ordered, sought, right=right).numpy() for right in (False, True))
    return pool.shape[1] - up_to, up_to - below - 1


def _of_candidates(
    scorer: Scorer, users: NDArray[np.int64], items: NDArray[np.int64], n_items: int, device: torch.device | str
) -> NDArray[Any]:
    """The scores of some items for each user, f32[B, K], -inf where the item is -1; others are not scored, if the
    scorer can do without.
    """
    if not isinstance(scorer, CandidateScorer):
        return _picked(_finite(scorer, users, n_items, device), items)
    with torch.no_grad():
        scores = scorer.scores_of(torch.from_numpy(users).to(device), torch.from_numpy(items.clip(0)).to(device))
    found = _checked(scores, users, items.shape[1])
    found[items < 0] = -np.inf
    return found


def _picked(scores: NDArray[Any], items: NDArray[np.int64]) -> NDArray[Any]:
    """The scores f32[B, I] of items i64[B, K], f32[B, K]; -inf where the item is -1."""
    found = np.take_along_axis(scores, items.clip(0), axis=1)
    found[items < 0] = -np.inf
    return found


def _finite(scorer: Scorer, users: NDArray[np.int64], n_items: int, device: torch.device | str) -> NDArray[Any]:
    """A copy of the users' scores, checked, with the lowest finite number for -inf, which marks who is no candidate."""
    with torch.no_grad():
        scores = scorer.scores(torch.from_numpy(users).to(device))
    return _checked(scores, users, n_items)


def _checked(scores: Tensor, users: NDArray[np.int64], width: int) -> NDArray[Any]:
    """A copy of the scores of users, f32[B, width], with the lowest finite number for -inf; an error for NaN."""
    if scores.shape != (len(users), width) or not scores.is_floating_point():
        raise ValueError(
            f"The scorer gave {scores.dtype} of shape {tuple(scores.shape)}, "
            f"expected floats of shape {(len(users), width)}: one row per user, one column per item."
        )
    values = (scores if scores.dtype == torch.float64 else scores.float()).numpy(force=True)
    bad = np.isnan(values).sum(axis=1)  # i64[B]
    if bad.any():
        first = int(np.argmax(bad > 0))
        raise RecleakError(
            f"The scorer gave NaN, first for user {users[first]}: {bad[first]:,} of {width:,} scores.\n"
            "  The model has probably diverged: lower the learning rate or clip gradients, and check its training data."
        )
    finite: NDArray[Any] = np.maximum(values, np.finfo(values.dtype).min)
    return finite


def _pairs(data: Interactions) -> NDArray[np.int64]:
    """Distinct (user, item) pairs as user * I + item, ascending."""
    pair = np.sort(data.user.astype(np.int64) * data.n_items + data.item)
    return pair[np.diff(pair, prepend=-1) > 0]


def _same_codes(exclude: Interactions, test: Interactions) -> Interactions:
    if not (exclude.users["id"].equals(test.users["id"]) and exclude.items["id"].equals(test.items["id"])):
        raise DataError(
            f"the excluded part ({exclude!r}) and the test part ({test!r}) do not have the same users and items",
            remedy="Make both with Interactions.take from the same data, so that codes keep their meaning.",
        )
    return exclude


def _negatives(candidates: NDArray[Any] | Tensor, n_users: int) -> NDArray[Any]:
    table = candidates.numpy(force=True) if isinstance(candidates, Tensor) else np.asarray(candidates)
    if table.ndim != 2 or len(table) != n_users or not np.issubdtype(table.dtype, np.integer):
        raise DataError(
            f"the candidates are {table.dtype} of shape {table.shape}, expected integers of shape ({n_users}, n)",
            remedy="Give one row of negatives per user code, padded with -1.",
        )
    return table


def _check_negatives(
    drawn: NDArray[np.int64],
    users: NDArray[np.int64],
    n_items: int,
    target: NDArray[np.int64],
    held: NDArray[np.int64],
) -> None:
    if drawn.size and not -1 <= drawn.min() <= drawn.max() < n_items:
        raise DataError(
            f"the candidates have item codes from {drawn.min()} to {drawn.max()}, expected 0 to {n_items - 1}",
            remedy="Use the item codes of the test part, and -1 for padding.",
        )
    pair = np.where(drawn < 0, -1, users[:, None] * n_items + drawn)
    _refuse(pair[np.isin(pair, target)], n_items, "negatives are test items of their user")
    _refuse(pair[np.isin(pair, held)], n_items, "negatives are excluded from the candidates")


def _refuse(pairs: NDArray[np.int64], n_items: int, what: str) -> None:
    if len(pairs):
        user, item = divmod(int(pairs[0]), n_items)
        raise DataError(
            f"{len(pairs):,} {what} (first: user {user}, item {item})",
            remedy="Excluded, test and negative items of a user must not overlap: drop one of each pair first.",
        )


def _cutoff(k: int) -> int:
    if k < 1:
        raise ValueError(f"Got K={k}, expected the length of a recommendation list, at least 1.")
    return k


def _cumulative(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the first 0, 1, 2, ... terms."""
    return np.concatenate([[0.0], np.cumsum(terms)])


def _first_of_many(
    above: NDArray[np.int64], size: NDArray[np.int64], targets: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Σ_j P(j) / (above + j) up to position `last`, from P(1) = t / s and P(j + 1) = P(j) (s - j - t + 1) / (s - j)."""
    value = np.zeros(len(above))
    chance = targets / size
    for j in range(1, int((last - above).max()) + 1):
        position = above + j
        value += np.where(position <= last, chance / position, 0)
        chance = chance * np.maximum(size - j - targets + 1, 0) / np.maximum(size - j, 1)
    return value
