"""Negatives and candidates: never a positive, uniform, independent of order and chunk."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recleak.data import sampling
from recleak.data.interactions import Interactions
from recleak.data.sampling import Complement, evaluation_candidates, training_negatives
from recleak.data.split import Split, leave_one_out
from recleak.errors import DataError, NotFoundError

pairs_of_users = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 11)), min_size=3, max_size=50)


def interactions(pairs: set[tuple[int, int]], n_items: int = 13) -> Interactions:
    """The pairs, and one more user that has every item, so that all items exist."""
    rows = sorted(pairs) + [(99, item) for item in range(n_items)]
    return Interactions.build(pl.DataFrame(rows, schema=["user", "item"], orient="row"))


def without_the_last_user(data: Interactions) -> Interactions:
    return data.take(data.user < data.n_users - 1)


def split_of(pairs: set[tuple[int, int]]) -> Split:
    return leave_one_out(without_the_last_user(interactions(pairs)), by="random")


@given(pairs_of_users)
def test_complement_lists_exactly_the_items_a_user_does_not_have(pairs: set[tuple[int, int]]) -> None:
    data = interactions(pairs)
    free = Complement.of(data)
    have = set(zip(data.user.tolist(), data.item.tolist(), strict=True))
    for user in range(data.n_users):
        missing = [item for item in range(data.n_items) if (user, item) not in have]
        assert free.size[user] == len(missing)
        ranks = np.arange(len(missing))
        assert free.item(np.full(len(missing), user), ranks).tolist() == missing


@given(pairs_of_users, st.sampled_from(["train", "all"]), st.integers(1, 6))
def test_negatives_are_never_what_is_excluded(pairs: set[tuple[int, int]], exclude: str, per_positive: int) -> None:
    split = split_of(pairs)
    drawn = training_negatives(split, per_positive, exclude=exclude)  # type: ignore[arg-type]
    assert drawn.shape == (len(split.train), per_positive)
    assert drawn.min() >= 0
    assert drawn.max() < split.train.n_items
    parts = (split.train,) if exclude == "train" else (split.train, split.valid, split.test)
    taken = {pair for part in parts for pair in zip(part.user.tolist(), part.item.tolist(), strict=True)}
    for user, items in zip(split.train.user.tolist(), drawn.tolist(), strict=True):
        assert not taken & {(user, item) for item in items}


def test_held_out_items_come_up_as_negatives_only_if_they_may() -> None:
    split = split_of({(user, item) for user in range(6) for item in range(9)})
    held = set(zip(split.test.user.tolist(), split.test.item.tolist(), strict=True))
    for exclude, expected in (("train", True), ("all", False)):
        drawn = training_negatives(split, 20, exclude=exclude)  # type: ignore[arg-type]
        met = {
            (user, item) for user, row in zip(split.train.user.tolist(), drawn.tolist(), strict=True) for item in row
        }
        assert bool(held & met) is expected


def test_negatives_are_uniform_and_rounds_differ() -> None:
    split = split_of({(user, item) for user in range(5) for item in range(6)})
    rounds = [training_negatives(split, 500, seed=1, round=number) for number in (0, 1)]
    assert not np.array_equal(rounds[0], rounds[1])
    assert np.array_equal(rounds[1], training_negatives(split, 500, seed=1, round=1))
    once = training_negatives(split, 500, seed=1)
    assert not np.array_equal(once, rounds[0])
    for user in range(5):
        counts = np.bincount(once[split.train.user == user].ravel(), minlength=13)
        counts = counts[counts > 0]
        assert len(counts) == 13 - 4
        assert stats.chisquare(counts).pvalue > 1e-4


@given(pairs_of_users, st.integers(1, 40))
def test_nothing_depends_on_the_chunk(pairs: set[tuple[int, int]], chunk: int) -> None:
    split = split_of(pairs)
    whole = training_negatives(split, 3), evaluation_candidates(split, 4).items
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CHUNK", 3 * chunk)
        parts = training_negatives(split, 3), evaluation_candidates(split, 4).items
    assert np.array_equal(whole[0], parts[0])
    assert np.array_equal(whole[1], parts[1])


@given(pairs_of_users, st.integers(1, 15), st.sampled_from(["train", "all"]), st.sampled_from(["test", "valid"]))
def test_candidates_are_distinct_and_never_excluded(
    pairs: set[tuple[int, int]], n: int, exclude: str, part: str
) -> None:
    split = split_of(pairs)
    drawn = evaluation_candidates(split, n, exclude=exclude, part=part)  # type: ignore[arg-type]
    target = split.test if part == "test" else split.valid
    parts = (split.train, target) if exclude == "train" else (split.train, split.valid, split.test)
    taken = {pair for each in parts for pair in zip(each.user.tolist(), each.item.tolist(), strict=True)}
    graded = set(target.user.tolist())
    short = 0
    for user, row in enumerate(drawn.items.tolist()):
        real = [item for item in row if item >= 0]
        available = split.train.n_items - len([1 for who, _ in taken if who == user])
        assert len(real) == (min(n, available) if user in graded else 0)
        assert len(set(real)) == len(real)
        assert not taken & {(user, item) for item in real}
        short += user in graded and available < n
    assert drawn.short == short


@pytest.mark.parametrize("n", [3, 6])  # 8 free items: by redrawing, and by ordering the few there are
def test_candidates_are_uniform_over_sets(n: int) -> None:
    rows = {(user, item) for user in range(20_000) for item in range(5)}
    data = Interactions.build(
        pl.DataFrame(sorted(rows) + [(99_999, k) for k in range(13)], schema=["user", "item"], orient="row")
    )
    split = leave_one_out(without_the_last_user(data), by="random")
    drawn = evaluation_candidates(split, n).items[:20_000]
    assert stats.chisquare(np.bincount(drawn.ravel(), minlength=13)[5:]).pvalue > 1e-4
    together = ((drawn == 5).any(axis=1) & (drawn == 6).any(axis=1)).mean()
    expected = n * (n - 1) / (8 * 7)
    assert abs(together - expected) < 5 * np.sqrt(expected * (1 - expected) / 20_000)
    first = np.bincount(drawn[:, 0], minlength=13)[5:]
    assert stats.chisquare(first).pvalue > 1e-4


def test_what_makes_no_sense_is_refused() -> None:
    split = split_of({(0, 1), (0, 2), (0, 3)})
    with pytest.raises(NotFoundError, match="Known: all, train"):
        training_negatives(split, exclude="everything")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="Known: all, train"):
        evaluation_candidates(split, exclude="everything")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="round is -1"):
        training_negatives(split, round=-1)


def test_many_negatives_per_positive() -> None:
    split = split_of({(0, 1), (0, 2), (0, 3)})
    assert training_negatives(split, 70_000).shape == (1, 70_000)


def test_a_user_with_every_item_is_a_clear_error() -> None:
    data = interactions({(0, 1), (0, 2), (0, 3)})
    with pytest.raises(DataError, match="1 users have every item, hence no negative \\(first: 99\\)"):
        training_negatives(leave_one_out(data, by="random"), exclude="all")


@pytest.mark.parametrize("work", [lambda s: training_negatives(s, 0), lambda s: evaluation_candidates(s, 0)])
def test_zero_is_refused(work: object) -> None:
    with pytest.raises(DataError, match="at least 1"):
        work(split_of({(0, 1), (0, 2), (0, 3)}))  # type: ignore[operator]
