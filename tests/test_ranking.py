from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import comb, log2
from typing import Any

import ir_measures
import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.errors import DataError, RecleakError
from recleak.metrics.ranking import Ranks, rank, summarize

KS = (1, 2, 3, 5, 100)
TREC = (("Hit", "Success"), ("Recall", "R"), ("NDCG", "nDCG"))  # our names and theirs


@dataclass
class Table:
    """A scorer that reads its scores from a table and remembers how many users it was asked for at a time."""

    table: Tensor  # f32[U, I]
    largest_batch: int = 0

    def scores(self, users: Tensor) -> Tensor:
        self.largest_batch = max(self.largest_batch, len(users))
        return self.table[users]


def table(scores: ArrayLike) -> Table:
    return Table(torch.tensor(np.asarray(scores), dtype=torch.float32))


def interactions(pairs: Iterable[Sequence[int]], n_users: int, n_items: int) -> Interactions:
    rows = pl.DataFrame(list(pairs), schema={"user": pl.Int32, "item": pl.Int32}, orient="row")
    users, items = (pl.DataFrame({"id": pl.Series(range(n), dtype=pl.Int64)}) for n in (n_users, n_items))
    return Interactions(rows.sort("user", "item"), users, items)


def one_user(scores: list[float], targets: Iterable[int], excluded: Iterable[int] = ()) -> Ranks:
    train = interactions([(0, item) for item in excluded], 1, len(scores))
    return rank(table([scores]), train, interactions([(0, item) for item in targets], 1, len(scores)))


def metrics(ranks: Ranks, ks: Iterable[int] = KS) -> dict[str, NDArray[np.float64]]:
    named = (("Hit", ranks.hit), ("Recall", ranks.recall), ("NDCG", ranks.ndcg), ("MRR", ranks.mrr))
    return {f"{name}@{k}": metric(k) for name, metric in named for k in ks} | {"MRR": ranks.mrr()}


def assert_same(got: Ranks, expected: Ranks) -> None:
    """Bit for bit."""
    for name in ("users", "candidates", "row", "above", "tied"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)


def naive(scores: list[int], targets: set[int], ks: Iterable[int] = KS) -> dict[str, float]:
    """The mean of the textbook metrics over all orders of the candidates that the scores allow."""
    total: dict[str, float] = {}
    orders = [p for p in permutations(range(len(scores))) if all(scores[a] >= scores[b] for a, b in pairwise(p))]
    for order in orders:
        places = [place for place, item in enumerate(order, start=1) if item in targets]
        values = {"MRR": 1 / places[0]}
        for k in ks:
            top = [place for place in places if place <= k]
            values[f"Hit@{k}"] = float(bool(top))
            values[f"Recall@{k}"] = len(top) / len(targets)
            ideal = sum(1 / log2(1 + place) for place in range(1, min(k, len(targets)) + 1))
            values[f"NDCG@{k}"] = sum(1 / log2(1 + place) for place in top) / ideal
            values[f"MRR@{k}"] = 1 / places[0] if top else 0.0
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + value / len(orders)
    return total


@st.composite
def tied_cases(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    scores = draw(st.lists(st.integers(-1, 1), min_size=1, max_size=6))
    targets = draw(st.sets(st.integers(0, len(scores) - 1), min_size=1))
    return scores, targets


@settings(deadline=None, max_examples=150)
@given(tied_cases())
@example(([0] * 6, {0, 3, 5}))
@example(([1, 0, 0, 0, 0, 1], {1, 2, 3}))
def test_closed_forms_equal_the_mean_over_all_orders_of_ties(case: tuple[list[int], set[int]]) -> None:
    scores, targets = case
    expected = naive(scores, targets)
    got = metrics(one_user([float(score) for score in scores], targets))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx([value], abs=1e-12), name


def random_case(seed: int, n_users: int = 30, n_items: int = 40) -> tuple[Table, Interactions, Interactions]:
    """Scores without ties; a third of the cells is train, a tenth is test; some users have no test item."""
    rng = np.random.default_rng(seed)
    scores = np.argsort(rng.random((n_users, n_items)), axis=1)
    role = rng.random((n_users, n_items))
    role[::7, :] = np.minimum(role[::7, :], 0.85)
    train = interactions(np.argwhere(role < 0.33).tolist(), n_users, n_items)
    test = interactions(np.argwhere(role > 0.9).tolist(), n_users, n_items)
    return table(scores), train, test


def negatives_for(train: Interactions, test: Interactions, n: int, seed: int) -> NDArray[np.int64]:
    """Up to n distinct items per user that are in neither part, padded with -1 in odd places."""
    free = (train.matrix() + test.matrix()).toarray() == 0
    order = np.argsort(np.random.default_rng(seed).random(free.shape) + ~free, axis=1)[:, :n]
    drawn = np.where(np.take_along_axis(free, order, axis=1), order, -1)
    drawn[::3, 1] = -1
    return drawn


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_trec_eval_where_nothing_is_tied(seed: int, sampled: bool) -> None:
    scorer, train, test = random_case(seed)
    drawn = negatives_for(train, test, 9, seed) if sampled else None
    ranks = rank(scorer, train, test, drawn, chunk_bytes=64 * 40 * 7)

    relevant, run = {}, {}
    for user in range(test.n_users):
        targets = set(test.item[test.user == user].tolist())
        history = set(train.item[train.user == user].tolist())
        others = set(range(test.n_items)) - history if drawn is None else set(drawn[user].tolist()) - {-1}
        if targets:
            relevant[str(user)] = {str(item): 1 for item in targets}
            run[str(user)] = {str(item): float(scorer.table[user, item]) for item in targets | others}
    names = {f"{ours}@{k}": f"{theirs}@{k}" for k in (1, 5, 10) for ours, theirs in TREC} | {"MRR": "RR"}
    measures = {name: ir_measures.parse_measure(theirs) for name, theirs in names.items()}
    assert [str(user) for user in ranks.users] == list(relevant)
    assert len(relevant) < test.n_users
    assert ranks.candidates.tolist() == [len(each) for each in run.values()]
    theirs = {
        (m.query_id, m.measure): m.value for m in ir_measures.pytrec_eval.iter_calc(measures.values(), relevant, run)
    }
    ours = metrics(ranks, (1, 5, 10))
    for name, measure in measures.items():
        np.testing.assert_allclose(ours[name], [theirs[user, measure] for user in relevant], atol=1e-9, err_msg=name)


def chance(ranks: Ranks, n_targets: NDArray[np.int64], k: int) -> dict[str, NDArray[np.float64]]:
    """What a random order gets, from the textbook."""
    n, j = ranks.candidates, np.minimum(k, ranks.candidates)
    dcg = np.array([sum(1 / log2(1 + p) for p in range(1, top + 1)) for top in j])
    ideal = np.array([sum(1 / log2(1 + p) for p in range(1, top + 1)) for top in np.minimum(k, n_targets)])
    miss = [comb(a - b, t) / comb(a, t) for a, b, t in zip(n.tolist(), j.tolist(), n_targets.tolist(), strict=True)]
    return {"Hit": 1 - np.array(miss), "Recall": j / n, "NDCG": n_targets / n * dcg / ideal}


@pytest.mark.parametrize("sampled", [False, True])
def test_a_constant_scorer_gets_exactly_chance(sampled: bool) -> None:
    scorer, train, test = random_case(5)
    drawn = negatives_for(train, test, 12, 5) if sampled else None
    flat = rank(table(np.full(scorer.table.shape, 0.7)), train, test, drawn)
    assert_same(flat, rank(scorer, train, test, drawn).constant())
    n_targets = np.bincount(flat.row)
    assert n_targets.max() > 3
    for k in (1, 4, 10, 39):
        got = metrics(flat, [k])
        for name, expected in chance(flat, n_targets, k).items():
            np.testing.assert_allclose(got[f"{name}@{k}"], expected, rtol=0, atol=1e-12, err_msg=f"{name}@{k}")


@pytest.mark.parametrize("n", [100, 3706, 20_000])
def test_chance_of_one_target_among_many(n: int) -> None:
    flat = one_user([0.0] * n, [n // 2])
    harmonic = sum(1 / p for p in range(n, 0, -1))
    assert flat.hit(10) == pytest.approx([10 / n], abs=1e-15)
    assert flat.mrr() == pytest.approx([harmonic / n], rel=1e-12)


def test_reciprocal_rank_of_many_tied_targets_has_its_closed_form() -> None:
    """E[1 / M] = t / (s - t + 1) (H(s) - H(t - 1)) for the least M of t out of s positions."""
    s, t = 3000, 7
    expected = t / (s - t + 1) * sum(1 / p for p in range(s, t - 1, -1))
    assert one_user([0.0] * s, range(0, s, s // t + 1)).mrr() == pytest.approx([expected], rel=1e-11)


@pytest.mark.parametrize("sampled", [False, True])
def test_chunks_change_nothing_and_bound_the_batch(sampled: bool) -> None:
    scorer, train, test = random_case(6)
    scorer = Table(scorer.table // 4)
    drawn = negatives_for(train, test, 9, 6) if sampled else None
    whole = rank(scorer, train, test, drawn)
    assert scorer.largest_batch == len(whole.users)
    for batch in (1, 4):
        small = Table(scorer.table)
        width = 49 if sampled else 40
        assert_same(rank(small, train, test, drawn, chunk_bytes=64 * width * batch), whole)
        assert small.largest_batch == batch


def test_the_order_of_items_does_not_matter() -> None:
    scorer, train, test = random_case(7)
    scores = scorer.table // 8
    code = np.random.default_rng(7).permutation(test.n_items)  # the new code of every item

    def recoded(data: Interactions) -> Interactions:
        return interactions(zip(data.user.tolist(), code[data.item].tolist(), strict=True), data.n_users, data.n_items)

    before = metrics(rank(Table(scores), train, test))
    after = metrics(rank(Table(scores[:, np.argsort(code)]), recoded(train), recoded(test)))
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, rtol=1e-13, err_msg=name)


def test_every_user_gets_what_it_would_get_alone() -> None:
    scorer, train, test = random_case(10)
    scores = scorer.table // 12
    together = metrics(rank(Table(scores), train, test))
    alone = [
        metrics(one_user(scores[user].tolist(), test.item[test.user == user], train.item[train.user == user]))
        for user in np.unique(test.user)
    ]
    for name, values in together.items():
        np.testing.assert_allclose(values, [each[name][0] for each in alone], rtol=1e-13, err_msg=name)


def test_only_users_with_a_test_item_are_graded_and_repeats_count_once() -> None:
    test = interactions([(3, 1), (3, 1), (1, 0), (3, 2)], 5, 4)
    train = interactions([(1, 3), (1, 3), (0, 0)], 5, 4)
    ranks = rank(table(np.tile([0.0, 3.0, 2.0, 1.0], (5, 1))), train, test)
    assert ranks.users.tolist() == [1, 3]
    assert ranks.user.tolist() == [1, 3, 3]
    assert ranks.candidates.tolist() == [3, 4]
    assert ranks.above.tolist() == [2, 0, 1]
    assert ranks.recall(1).tolist() == [0, 0.5]


def test_infinite_scores_are_scores() -> None:
    """A genuine -inf stays a candidate, below or tied; an excluded item with +inf does not compete."""
    ranks = one_user([-np.inf, -np.inf, np.inf, np.inf, 0.0, -0.0], [0, 2, 4], excluded=[3])
    assert ranks.candidates.tolist() == [5]
    assert ranks.above.tolist() == [3, 0, 1]
    assert ranks.tied.tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_will_do(dtype: torch.dtype) -> None:
    scorer, train, test = random_case(8)
    drawn = negatives_for(train, test, 5, 8)
    for candidates in (None, drawn):
        assert_same(rank(Table(scorer.table.to(dtype)), train, test, candidates), rank(scorer, train, test, candidates))


def test_double_precision_is_kept() -> None:
    scores = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert rank(Table(scores), None, interactions([(0, 0)], 1, 2)).above.tolist() == [1]


def test_candidates_may_be_an_array_or_a_tensor_and_repeat() -> None:
    test = interactions([(1, 0)], 2, 4)
    drawn = np.array([[9, 9, 9, 9], [2, 2, -1, 3]], np.int32)
    for candidates in (drawn, torch.from_numpy(drawn)):
        ranks = rank(table([[0.0] * 4, [1.0, 5.0, 2.0, 0.0]]), None, test, candidates)
        assert (ranks.candidates.tolist(), ranks.above.tolist(), ranks.tied.tolist()) == ([4], [2], [0])


@dataclass
class Asked(Table):
    """Scores what it is asked for only."""

    def scores_of(self, users: Tensor, items: Tensor) -> Tensor:
        return self.table[users].gather(1, items)


def test_candidates_alone_are_scored_where_a_scorer_can() -> None:
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(rng.integers(0, 6, (30, 50)).astype(np.float32))  # with ties
    scores[3, :5] = -torch.inf
    test = interactions([(user, item) for user in range(0, 30, 2) for item in range(user % 3 + 1)], 30, 50)
    drawn = rng.integers(5, 50, (30, 20))
    drawn[4, 9:] = -1
    narrow = Asked(scores)
    assert_same(rank(narrow, None, test, drawn), rank(Table(scores), None, test, drawn))
    assert narrow.largest_batch == 0
    scores[7, 30] = scores[8, 30] = torch.nan
    drawn[8, 0] = 30
    with pytest.raises(RecleakError, match="first for user 8"):
        rank(narrow, None, test, drawn)


def test_the_scorer_is_asked_without_gradients_and_its_tensor_is_left_alone() -> None:
    scorer = table([[3.0, -np.inf, 1.0]])
    scorer.table.requires_grad_()
    before = scorer.table.detach().clone()
    asked = []

    class Whole:
        def scores(self, users: Tensor) -> Tensor:
            asked.append(torch.is_grad_enabled())
            return scorer.table

    rank(Whole(), interactions([(0, 0)], 1, 3), interactions([(0, 2)], 1, 3))
    assert asked == [False]
    assert torch.equal(scorer.table, before)


@pytest.mark.parametrize("k", [0, -3])
@pytest.mark.parametrize("metric", ["hit", "recall", "ndcg", "mrr"])
def test_a_list_has_at_least_one_place(metric: str, k: int) -> None:
    with pytest.raises(ValueError, match=f"K={k}"):
        getattr(one_user([1.0, 0.0], [0]), metric)(k)


def test_nan_scores_name_the_first_user() -> None:
    scores = np.zeros((6, 4), np.float32)
    scores[4, 1:3] = np.nan
    scores[5, 0] = np.nan
    test = interactions([(u, 0) for u in (0, 2, 4, 5)], 6, 4)
    for chunk_bytes in (1, 1 << 26):
        with pytest.raises(RecleakError, match=r"first for user 4: 2 of 4 scores.*\n.*learning rate"):
            rank(table(scores), None, test, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(
    ("train", "test", "drawn", "message"),
    [
        ([], [], None, "nobody can be graded"),
        ([(0, 1), (1, 2)], [(0, 0), (1, 2)], None, r"1 test items are excluded.*user 1, item 2"),
        ([], [(0, 0), (1, 2)], [[1, 3], [1, 2]], r"1 negatives are test items.*user 1, item 2"),
        ([(1, 3)], [(0, 0), (1, 2)], [[1, 3], [1, 3]], r"1 negatives are excluded.*user 1, item 3"),
        ([], [(0, 0)], [[1, 4], [1, 2]], "from 1 to 4, expected 0 to 3"),
        ([], [(0, 0)], [[1, -2], [1, 2]], "from -2 to 1, expected 0 to 3"),
        ([], [(0, 0)], [[1, 2]], r"expected integers of shape \(2, n\)"),
        ([], [(0, 0)], [[1.0], [2.0]], "are float64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    train: list[tuple[int, int]], test: list[tuple[int, int]], drawn: Any, message: str
) -> None:
    candidates = None if drawn is None else np.array(drawn)
    with pytest.raises(DataError, match=message):
        rank(table(np.zeros((2, 4))), interactions(train, 2, 4), interactions(test, 2, 4), candidates)


def test_padding_is_not_taken_for_the_last_item_of_the_user_before() -> None:
    """Pairs are coded as user * I + item, where -1 would run into the user before."""
    test = interactions([(0, 3), (1, 0)], 2, 4)
    assert rank(table(np.zeros((2, 4))), None, test, np.array([[0, -1], [1, -1]])).candidates.tolist() == [2, 2]


def test_parts_of_different_data_are_refused() -> None:
    test = interactions([(0, 0)], 2, 4)
    with pytest.raises(DataError, match="same users and items"):
        rank(table(np.zeros((2, 4))), interactions([], 2, 5), test)


@pytest.mark.parametrize("scores", [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4)])
def test_scores_of_the_wrong_shape_or_kind_are_refused(scores: Tensor) -> None:
    class Wrong:
        def scores(self, users: Tensor) -> Tensor:
            return scores

    with pytest.raises(ValueError, match=r"expected floats of shape \(2, 4\)"):
        rank(Wrong(), None, interactions([(0, 0), (1, 0)], 2, 4))


def test_summary_names_every_metric_and_covers_its_mean() -> None:
    scorer, train, test = random_case(9)
    ranks = rank(scorer, train, test)
    summary = summarize(ranks, (1, 10), seed=3)
    assert list(summary) == ["Hit@1", "Hit@10", "Recall@1", "Recall@10", "NDCG@1", "NDCG@10", "MRR"]
    assert summary == summarize(ranks, (1, 10), seed=3)
    for name, values in metrics(ranks, (1, 10)).items():
        if name in summary:
            assert summary[name].value == values.mean()
            assert summary[name].low < values.mean() < summary[name].high
            assert summary[name].n == len(ranks.users)
