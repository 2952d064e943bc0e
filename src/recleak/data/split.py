"""Splits: what a recommender trains on, what it is tuned on, what it is graded on.

A split works on (user, item) pairs, not rows: all rows of a held-out pair leave the training part, so no test item is
ever in train, repeats (check-ins) or not. A pair's time is that of its last row. Unknown times count as the earliest;
where they, or ties, leave the order open, a draw decides, and the split says for how many users. Every draw is a
function of (seed, user, item): the order of rows in a file does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from recleak import random
from recleak.data.interactions import Interactions
from recleak.errors import DataError, unknown_name

Order = Literal["time", "random"]


@dataclass(frozen=True)
class Split:
    """Three parts in one code space: user 7 is the same user in all of them."""

    train: Interactions
    valid: Interactions  # without rows if the recipe has no validation part
    test: Interactions
    recipe: str
    decisions: dict[str, int] = field(default_factory=dict)  # what a draw had to decide, in users


def leave_one_out(data: Interactions, *, by: Order = "time", validation: bool = True, seed: int = 0) -> Split:
    """The last item of each user (or a random one) is its test item, the one before its validation item.

    A user with too few items (under 2, or under 3 with validation) stays in train whole, and is counted.
    """
    pairs = _ordered_pairs(data, by, seed)
    held = 1 + validation
    enough = pairs.size > held  # bool[U]
    starts = [np.where(enough, pairs.size - back, pairs.size) for back in range(held, 0, -1)]
    if not validation:
        starts.insert(0, starts[0])
    recipe = f"leave-one-out by {by}{', with a validation item' if validation else ''}, seed {seed}"
    return _assemble(data, pairs, starts[0], starts[1], recipe)


def ratio(
    data: Interactions, shares: tuple[float, float, float] = (0.8, 0.1, 0.1), *, by: Order = "random", seed: int = 0
) -> Split:
    """Each user's items cut into train, validation and test by shares; by time the test items are the latest.

    Cuts are rounded per user; at least one item stays in train.
    """
    check_shares(shares)
    pairs = _ordered_pairs(data, by, seed)
    valid_from = np.maximum(1, np.floor(pairs.size * shares[0] + 0.5)).astype(np.int64)
    test_from = np.maximum(valid_from, np.floor(pairs.size * (shares[0] + shares[1]) + 0.5).astype(np.int64))
    recipe = f"per-user ratio {shares[0]:g}/{shares[1]:g}/{shares[2]:g} by {by}, seed {seed}"
    return _assemble(data, pairs, valid_from, test_from, recipe)


def check_shares(shares: tuple[float, float, float]) -> None:
    """An error for shares that cannot be."""
    if min(shares) < 0 or not np.isclose(sum(shares), 1) or shares[0] == 0:
        raise DataError(
            f"shares are {shares}",
            remedy="Give shares for train, validation and test that sum to 1, train above 0, as in (0.8, 0.1, 0.1).",
        )


@dataclass(frozen=True)
class _Pairs:
    """Distinct pairs, sorted by user and then from the first to the last."""

    table: pl.DataFrame  # user, rows (one, or a list where pairs repeat), maybe time
    size: NDArray[np.int64]  # i64[U] pairs per user
    by_time: bool

    @property
    def start(self) -> NDArray[np.int64]:
        """Where a user's pairs begin, i64[U]."""
        return np.cumsum(self.size) - self.size


def _ordered_pairs(data: Interactions, by: Order, seed: int) -> _Pairs:
    if by not in get_args(Order):
        raise unknown_name("order", by, get_args(Order))
    by_time = by == "time"
    if by_time and ("time" not in data.rows.columns or data.rows["time"].null_count() == len(data)):
        raise DataError("a split by time was asked for, but no time is known", remedy="Split by='random'.")
    when = ["time"] if by_time else []
    table = data.rows.select("user", "item", *when).with_row_index("rows")
    if data.n_pairs < len(data):
        table = table.group_by("user", "item").agg("rows", pl.col(when).max())
    draw = random.bits(seed, "split", table["user"].to_numpy(), table["item"].to_numpy())
    table = (
        table.with_columns(pl.Series("draw", draw)).sort("user", *when, "draw", nulls_last=False).drop("draw", "item")
    )
    return _Pairs(table, np.bincount(table["user"].to_numpy(), minlength=data.n_users), by_time)


def _assemble(
    data: Interactions, pairs: _Pairs, valid_from: NDArray[np.int64], test_from: NDArray[np.int64], recipe: str
) -> Split:
    """Label pairs by their rank within the user: train below `valid_from`, test from `test_from` on (i64[U] each)."""
    user = pairs.table["user"].to_numpy()
    rank = np.arange(len(user)) - pairs.start[user]
    part = (rank >= valid_from[user]).astype(np.int8) + (rank >= test_from[user])
    placed = pairs.table.select("rows", pl.Series("part", part))
    if isinstance(placed.schema["rows"], pl.List):
        placed = placed.explode("rows")
    label = np.empty(len(data), np.int8)
    label[placed["rows"].to_numpy()] = placed["part"].to_numpy()
    whole = (pairs.size > 0) & (test_from == pairs.size) & (valid_from == pairs.size)
    decisions = {"users kept whole in train (too few items)": int(whole.sum())}
    if pairs.by_time:
        for name, first, end in (("validation", valid_from, test_from), ("test", test_from, pairs.size)):
            unknown, tied = _drawn(pairs, first, end)
            decisions[f"users whose {name} item was drawn (time unknown)"] = unknown
            decisions[f"users whose {name} item was drawn (tie in time)"] = tied
        known = np.bincount(user[pairs.table["time"].is_not_null().to_numpy()], minlength=data.n_users)
        mixed = (known > 0) & (known < pairs.size) & ~whole
        decisions["users with some unknown times, taken as earlier than the known ones"] = int(mixed.sum())
    train, valid, test = (data.take(label == number) for number in range(3))
    return Split(train, valid, test, recipe, {what: count for what, count in decisions.items() if count})


def _drawn(pairs: _Pairs, first: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[int, int]:
    """For how many users time does not tell which pairs have the ranks `first` to `end` (i64[U]): unknown, tied."""
    time = pairs.table["time"]
    known = time.is_not_null().to_numpy()
    value = time.fill_null(np.iinfo(np.int64).min).to_numpy()
    unknown, tied = np.zeros(len(pairs.size), bool), np.zeros(len(pairs.size), bool)
    for cut in (first, end):
        inside = (end > first) & (cut > 0) & (cut < pairs.size)
        at = (pairs.start + cut)[inside]  # the first pair after the cut
        same = value[at] == value[at - 1]
        unknown[inside] |= same & ~known[at]
        tied[inside] |= same & known[at]
    return int(unknown.sum()), int((tied & ~unknown).sum())
