"""What users did after what: from each check-in to the next, with the time and the way between them.

Check-ins are rows, not pairs: a place that a user visits again has as many. A user's rows go by time; those of the same
second go by item, as in `Interactions`. Splits cut this sequence, so that a place of the test part may be in train too.

Axis letters: T transitions, U users, I items, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.data.split import Split, check_shares
from recleak.errors import DataError
from recleak.geometry import kilometers, on_sphere

_LEAST = 2  # check-ins that stay in train: one transition


@dataclass(frozen=True, eq=False)
class Transitions:
    """T moves from one place to another, user after user and in the order of time.

    A check-in where the user already is moves nobody: it is no transition, but it is what the next one starts from.
    """

    user: NDArray[np.int64]  # i64[T], ascending
    before: NDArray[np.int64]  # i64[T]: where the user was
    item: NDArray[np.int64]  # i64[T]: where it went
    gap: NDArray[np.int64]  # i64[T]: seconds in between
    offset: NDArray[np.int64]  # i64[U + 1]: user u has the transitions offset[u] to offset[u + 1]
    place: NDArray[np.float64]  # f64[I, 3]: where each item is; see `geometry.on_sphere`

    @classmethod
    def of(cls, data: Interactions, earlier: Sequence[Interactions] = ()) -> Transitions:
        """The transitions into the check-ins of `data`; where they start from may be in one of the `earlier` parts."""
        parts = [*earlier, data]
        for part in parts:
            _require_times(part)
        columns = [part.rows.select("user", "item", "time", held=pl.lit(part is data)) for part in parts]
        rows = pl.concat(columns).sort("user", "time", maintain_order=True)
        user, item, time, held = (rows[name].to_numpy() for name in rows.columns)
        moves = np.flatnonzero((user[1:] == user[:-1]) & (item[1:] != item[:-1]) & held[1:]) + 1
        who = user[moves].astype(np.int64)
        return cls(
            who,
            item[moves - 1].astype(np.int64),
            item[moves].astype(np.int64),
            time[moves] - time[moves - 1],
            np.searchsorted(who, np.arange(data.n_users + 1)),
            places(data),
        )

    def __len__(self) -> int:
        return len(self.user)

    @property
    def n_items(self) -> int:
        """I, with those that nobody goes to."""
        return len(self.place)

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """Transitions per user, i64[U]."""
        return np.diff(self.offset)

    @cached_property
    def distance(self) -> NDArray[np.float64]:
        """How far each goes, f64[T] km."""
        return kilometers(self.place[self.before], self.place[self.item])

    def select(self, at: NDArray[np.int64]) -> Transitions:
        """The transitions at these positions, i64[n] ascending."""
        user = self.user[at]
        offset = np.searchsorted(user, np.arange(len(self.offset)))
        return Transitions(user, self.before[at], self.item[at], self.gap[at], offset, self.place)


# --- places -----------------------------------------------------------------------------------------------------------


def places(data: Interactions) -> NDArray[np.float64]:
    """Where each item is, f64[I, 3]."""
    if not {"latitude", "longitude"} <= set(data.items.columns):
        raise DataError(
            f"the items have no coordinates (they have {', '.join(data.items.columns)})",
            remedy="Give latitude and longitude of every item, in degrees, or use a model that needs no distances.",
        )
    latitude, longitude = data.items["latitude"], data.items["longitude"]
    if lacking := int((latitude.is_null() | longitude.is_null()).sum()):
        raise DataError(
            f"{lacking:,} of {data.n_items:,} items have no coordinates",
            remedy="Complete them, or leave these items out (Interactions.restrict).",
        )
    return on_sphere(latitude.to_numpy(), longitude.to_numpy())


# --- splits -----------------------------------------------------------------------------------------------------------


def sequence_split(data: Interactions, shares: tuple[float, float, float] = (0.8, 0.1, 0.1)) -> Split:
    """Each user's check-ins cut by time into train, validation and test; the test part is the latest.

    Cuts are rounded per user; at least two check-ins stay in train.
    """
    check_shares(shares)
    size = data.activity
    valid_from = np.minimum(size, np.maximum(_LEAST, np.floor(size * shares[0] + 0.5).astype(np.int64)))
    test_from = np.maximum(valid_from, np.floor(size * (shares[0] + shares[1]) + 0.5).astype(np.int64))
    recipe = f"check-ins by time, {shares[0]:g}/{shares[1]:g}/{shares[2]:g} of each user's"
    return _cut(data, valid_from, test_from, recipe)


def leave_last_out(data: Interactions, *, validation: bool = True) -> Split:
    """Each user's last check-in is its test part, the one before its validation part; at least two stay in train.

    Who has too few (under 3, or under 4 with validation) stays in train whole, and is counted.
    """
    size, held = data.activity, 1 + validation
    enough = size >= _LEAST + held
    test_from = np.where(enough, size - 1, size)
    valid_from = np.where(enough, size - held, size)
    recipe = f"the last check-in of each user{', with a validation check-in' if validation else ''}"
    return _cut(data, valid_from, test_from, recipe)


def held_out(split: Split, part: Literal["valid", "test"] = "test") -> Transitions:
    """The transitions into the held-out check-ins of a split, from wherever the user was before, train or not."""
    if part == "valid":
        return Transitions.of(split.valid, earlier=(split.train,))
    return Transitions.of(split.test, earlier=(split.train, split.valid))


def _cut(data: Interactions, valid_from: NDArray[np.int64], test_from: NDArray[np.int64], recipe: str) -> Split:
    """Label rows by their rank within the user: train below `valid_from`, test from `test_from` on (i64[U] each)."""
    _require_times(data)
    user, size = data.user, data.activity
    rank = np.arange(len(user)) - data.indptr[user]
    part = (rank >= valid_from[user]).astype(np.int8) + (rank >= test_from[user])
    whole = (size > 0) & (valid_from == size)
    decisions = {"users kept whole in train (too few check-ins)": int(whole.sum())}
    time = data.rows["time"].to_numpy()
    for name, cut in (("validation", valid_from), ("test", test_from)):
        at = (data.indptr[:-1] + cut)[(cut > 0) & (cut < size)]  # the first row after the cut
        what = f"users whose {name} part begins in the second in which the part before ends (cut by item)"
        decisions[what] = int((time[at] == time[at - 1]).sum())
    train, valid, test = (data.take(part == number) for number in range(3))
    return Split(train, valid, test, recipe, {what: count for what, count in decisions.items() if count})


def _require_times(data: Interactions) -> None:
    if "time" not in data.rows.columns:
        raise DataError("the order of check-ins is asked for, but no time is known", remedy="Give data with times.")
    if unknown := data.rows["time"].null_count():
        raise DataError(
            f"{unknown:,} of {len(data):,} check-ins have no time, so that their order is not known",
            remedy="Complete the times, or leave these rows out (Interactions.restrict).",
        )
