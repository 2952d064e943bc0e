from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.metrics import rank
from recleak.models.baselines import ItemKNN, MostPop


def interactions(pairs: Iterable[Sequence[int]], n_users: int, n_items: int) -> Interactions:
    rows = pl.DataFrame(list(pairs), schema={"user": pl.Int32, "item": pl.Int32}, orient="row")
    users, items = (pl.DataFrame({"id": pl.Series(range(n), dtype=pl.Int64)}) for n in (n_users, n_items))
    return Interactions(rows.sort("user", "item"), users, items)


def checkerboard(n_users: int = 20, n_items: int = 12) -> tuple[Interactions, Interactions]:
    """Even users like even items, odd users odd ones; one liked item of every user is held out."""
    liked = [(u, i) for u in range(n_users) for i in range(n_items) if (u + i) % 2 == 0]
    held = {(u, (u % 2 + 2 * u) % n_items) for u in range(n_users)}
    assert held < set(liked)
    parts = ([pair for pair in liked if pair not in held], sorted(held))
    train, test = (interactions(part, n_users, n_items) for part in parts)
    return train, test


def naive_item_knn(x: NDArray[np.float64], neighbors: int, shrink: float) -> NDArray[np.float64]:
    """Loops over items and users: f64[U, I] binary -> f64[U, I] scores."""
    n_users, n_items = x.shape
    score = np.zeros(x.shape)
    for j in range(n_items):
        sim = {}
        for i in range(n_items):
            both = float(x[:, i] @ x[:, j])
            if i != j and both > 0:
                sim[i] = both / (np.sqrt(x[:, i].sum() * x[:, j].sum()) + shrink)
        for i in sorted(sim, key=lambda i: (-sim[i], i))[:neighbors]:
            for u in range(n_users):
                score[u, i] += x[u, j] * sim[i]
    return score


def test_most_pop_counts_distinct_users() -> None:
    fitted = MostPop().fit(interactions([(0, 1), (0, 1), (0, 2), (2, 1), (2, 1)], 3, 4))
    scores = fitted.scores(torch.tensor([2, 0]))
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[0, 2, 1, 0]] * 2


def test_item_knn_solves_the_checkerboard_and_popularity_does_not() -> None:
    train, test = checkerboard()
    assert rank(ItemKNN().fit(train), train, test).hit(1).tolist() == [1.0] * 20
    assert rank(MostPop().fit(train), train, test).hit(1).mean() < 0.6


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.05, 0.3, 0.8]),
    neighbors=st.integers(1, 15),
    shrink=st.sampled_from([0.0, 1.5, 10.0]),
    block=st.integers(1, 14),
)
def test_item_knn_equals_the_naive_loops_for_any_block(
    seed: int, density: float, neighbors: int, shrink: float, block: int
) -> None:
    x = np.random.default_rng(seed).random((9, 13)) < density
    train = interactions(np.argwhere(x).tolist(), 9, 13)
    fitted = ItemKNN(neighbors, shrink).fit(train, block_bytes=64 * 13 * block)
    scores = fitted.scores(torch.arange(9))
    assert scores.dtype == torch.float32
    assert np.diff(fitted.similarity.indptr).max() <= neighbors
    np.testing.assert_allclose(scores.numpy(), naive_item_knn(x.astype(float), neighbors, shrink), rtol=1e-6, atol=1e-7)


def test_equal_similarities_keep_the_lower_codes() -> None:
    """All items have the same two users, so all similarities are equal."""
    fitted = ItemKNN(neighbors=2, shrink=0.0).fit(interactions([(u, i) for u in range(2) for i in range(5)], 2, 5))
    assert fitted.similarity.toarray().tolist() == [
        [0, 1, 1, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ]


def test_item_knn_counts_repeats_once_and_scores_do_not_depend_on_the_batch() -> None:
    pairs = np.argwhere(np.random.default_rng(0).random((30, 20)) < 0.3).tolist()
    once, twice = (ItemKNN(5).fit(interactions(pairs * times, 30, 20)) for times in (1, 2))
    scores = once.scores(torch.arange(30))
    assert torch.equal(scores, twice.scores(torch.arange(30)))
    assert torch.equal(scores[[7]], once.scores(torch.tensor([7])))
    assert torch.equal(scores[[9, 2, 9]], once.scores(torch.tensor([9, 2, 9])))


def test_a_user_without_history_and_an_item_without_users_score_zero() -> None:
    scores = ItemKNN(shrink=0.0).fit(interactions([(0, 0), (0, 1), (1, 1)], 3, 4)).scores(torch.arange(3))
    assert scores[2].tolist() == [0, 0, 0, 0]
    assert scores[:, 2:].tolist() == [[0, 0]] * 3
    assert scores[1, 0] == pytest.approx(1 / np.sqrt(2))


@pytest.mark.parametrize(("neighbors", "shrink"), [(0, 1.0), (5, -1.0)])
def test_item_knn_refuses_impossible_settings(neighbors: int, shrink: float) -> None:
    with pytest.raises(ValueError, match=f"neighbors={neighbors}, shrink={shrink}"):
        ItemKNN(neighbors, shrink)
