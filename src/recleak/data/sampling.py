"""Negatives for training and candidates for evaluation: items that a user does not have, drawn uniformly.

Every draw is a function of (seed, purpose, round, user, position), so nothing depends on the order of users or on the
chunk. No rejection: the r-th item that a user does not have is found by bisection in the sorted list of those it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recleak import kernels, random
from recleak.data.interactions import Interactions
from recleak.data.split import Split
from recleak.errors import DataError, unknown_name

Exclude = Literal["train", "all"]
_CHUNK = 1 << 16  # draws held at a time; they stay in cache


@dataclass(frozen=True)
class Complement:
    """The items that each user does not have, by rank: O(pairs) memory, O(log pairs) a look-up."""

    n_items: int
    indptr: NDArray[np.int64]  # i64[U + 1]
    gaps: NDArray[np.int64]  # i64[pairs] ascending: user * (I + 1) + number of free items below each item it has

    @classmethod
    def of(cls, *parts: Interactions) -> Complement:
        """The complement of the union of some parts."""
        n_items = parts[0].n_items
        pairs = np.concatenate([part.user.astype(np.int64) * n_items + part.item for part in parts])
        pairs.sort()
        fresh = np.diff(pairs, prepend=-1) > 0  # np.unique is ten times slower
        pairs = pairs if fresh.all() else pairs[fresh]
        indptr = np.searchsorted(pairs, np.arange(parts[0].n_users + 1) * n_items).astype(np.int64)
        gaps = pairs  # user * I + item, to become user * (I + 1) + item - position; in place, for ten million pairs
        gaps += np.repeat(np.arange(parts[0].n_users) + indptr[:-1], np.diff(indptr))
        gaps -= np.arange(len(gaps))
        return cls(n_items, indptr, gaps)

    @cached_property
    def size(self) -> NDArray[np.int64]:
        """How many items each user does not have, i64[U]."""
        return self.n_items - np.diff(self.indptr)

    def item(self, user: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int32]:
        """The item of a given rank among those a user does not have; rank < size[user]."""
        shape = np.broadcast_shapes(user.shape, rank.shape)
        user, rank = (np.ascontiguousarray(part).reshape(-1) for part in np.broadcast_arrays(user, rank))
        out = np.empty(shape, np.int32)
        kernels.free_items(self.gaps, self.indptr, user, rank, self.n_items, out.reshape(-1))
        return out


def training_negatives(
    split: Split, per_positive: int = 4, *, exclude: Exclude = "train", seed: int = 0, round: int | None = None
) -> NDArray[np.int32]:
    """For each row of train `per_positive` negatives, independent draws, i32[N, per_positive].

    `round=None` draws once for all rounds; a number draws anew for that round.
    `exclude="train"` is what a client can do: a held-out item may come up as a negative. `exclude="all"` also spares
    the held-out items, as several published codes do. That leaks: an item that is never a negative is more likely the
    test item, training pushes all others down, and the measured utility is too high.
    """
    if per_positive < 1:
        raise DataError(f"{per_positive} negatives per positive", remedy="Draw at least 1.")
    if round is not None and round < 0:
        raise DataError(f"round is {round}", remedy="Count rounds from 0, or give None to draw once for all.")
    _check_exclude(exclude)
    free = Complement.of(split.train, split.valid, split.test) if exclude == "all" else Complement.of(split.train)
    user = split.train.user.astype(np.int64)  # i64[N]
    full = np.flatnonzero((free.size == 0) & (split.train.activity > 0))
    if len(full):
        raise DataError(
            f"{len(full):,} users have every item, hence no negative (first: {split.train.users['id'][int(full[0])]})",
            remedy="Leave these users out, or use exclude='train'.",
        )
    position = np.arange(len(user)) - split.train.indptr[user]
    return negatives_at(free, user, position, per_positive, seed=seed, round=round)


def negatives_at(
    free: Complement,
    user: NDArray[np.int64],
    position: NDArray[np.int64],
    per_positive: int,
    *,
    seed: int,
    round: int | None,
) -> NDArray[np.int32]:
    """The negatives of some positives, given by their user and their position among its positives: i64[n] -> i32[n, q].

    Every user must have a free item.
    """
    when = 0 if round is None else round + 1
    drawn = np.empty((len(user), per_positive), np.int32)
    for start in range(0, len(user), step := max(1, _CHUNK // per_positive)):
        rows = slice(start, start + step)
        who = user[rows, None]  # i64[B, 1]
        key = (who, position[rows, None], np.arange(per_positive))
        drawn[rows] = free.item(who, random.below(free.size[who], seed, "negatives", when, *key))
    return drawn


@dataclass(frozen=True)
class Candidates:
    """Sampled negatives that the held-out items of a user compete with."""

    items: NDArray[np.int32]  # i32[U, n]; -1 pads users that do not have n such items, or are not graded
    recipe: str
    short: int  # graded users with fewer than n negatives


def evaluation_candidates(
    split: Split,
    n: int = 99,
    *,
    part: Literal["test", "valid"] = "test",
    exclude: Exclude = "all",
    seed: int = 0,
) -> Candidates:
    """`n` distinct negatives for every user with a held-out item in `part`.

    `exclude="all"` spares all items the user ever had; `exclude="train"` only those in train (and, always, the held-out
    items that compete), so that the item of the other part may be among the candidates.
    """
    if n < 1:
        raise DataError(f"{n} candidates", remedy="Sample at least 1, or rank all items (full).")
    _check_exclude(exclude)
    target = split.test if part == "test" else split.valid
    others = (split.train, split.valid, split.test) if exclude == "all" else (split.train, target)
    free = Complement.of(*others)
    users = np.flatnonzero(target.activity)
    items = np.full((split.train.n_users, n), -1, np.int32)
    for start in range(0, len(users), step := max(1, _CHUNK // (4 * n))):
        chunk = users[start : start + step]
        rank = _distinct_ranks(free.size[chunk], n, chunk, seed)
        items[chunk] = np.where(rank < 0, -1, free.item(chunk[:, None], np.maximum(rank, 0)))
    recipe = f"{n} sampled, excluding {'all' if exclude == 'all' else 'train'} positives, seed {seed}"
    return Candidates(items, recipe, int((free.size[users] < n).sum()))


def _check_exclude(exclude: str) -> None:
    if exclude not in get_args(Exclude):
        raise unknown_name("way to exclude", exclude, get_args(Exclude))


def _distinct_ranks(size: NDArray[np.int64], n: int, users: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """For each user n distinct integers below its size, uniform over all such tuples; if fewer, all, then -1."""
    ranks = np.empty((len(users), n), np.int64)
    dense = size < 2 * n
    if dense.any():  # put the few that there are in a random order
        key = random.uniform(seed, "candidates in order", users[dense][:, None], np.arange(2 * n))
        key[np.arange(2 * n) >= size[dense][:, None]] = np.inf
        order = np.argsort(key, axis=1)[:, :n]
        ranks[dense] = np.where(np.isinf(np.take_along_axis(key, order, 1)), -1, order)
    # Otherwise the first n distinct values of a stream of draws; 1.4 n draws hold n distinct ones if size is 2 n.
    rows, width = np.flatnonzero(~dense), n + n // 2 + 16
    while len(rows):
        drawn = random.below(size[rows][:, None], seed, "candidates", users[rows][:, None], np.arange(width))
        packed = np.sort(drawn * width + np.arange(width), axis=1)  # by value, then by position
        value, position = np.divmod(packed, width)
        fresh = np.ones(drawn.shape, bool)
        np.put_along_axis(fresh, position[:, 1:], value[:, 1:] != value[:, :-1], 1)
        count = np.cumsum(fresh, axis=1)
        done = count[:, -1] >= n
        ranks[rows[done]] = drawn[done][fresh[done] & (count[done] <= n)].reshape(-1, n)
        rows, width = rows[~done], 2 * width
    return ranks
