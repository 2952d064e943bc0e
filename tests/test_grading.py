"""The audit: claims, truth and grades, on cases worked out by hand and against plain loops."""

from __future__ import annotations

from math import floor

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from recleak.attacks.base import WhichItems
from recleak.data.interactions import Interactions
from recleak.grading import (
    as_victims,
    claimed_interactions,
    claims,
    communities,
    grade_communities,
    grade_items,
    grade_users,
    own_items,
    pairs_seen,
    shuffled,
    truth_of,
)
from recleak.metrics.comparison import Counts, bootstrap_rate
from recleak.metrics.inference import auc_by_user

TRAIN = Interactions.build(pl.DataFrame({"user": [0, 0, 1, 1, 3, 3, 3, 2], "item": [4, 1, 1, 0, 2, 3, 2, 5]}))
PAIRS = {(0, 1), (0, 4), (1, 0), (1, 1), (2, 5), (3, 2), (3, 3)}


def question(*pairs: tuple[int, int]) -> WhichItems:
    client, item = torch.tensor(pairs).unbind(1)
    return WhichItems(client, item)


def asked(users: int, items: int) -> WhichItems:
    return WhichItems(*torch.cartesian_prod(torch.arange(users), torch.arange(items)).unbind(1))


# --- truth ------------------------------------------------------------------------------------------------------------


def test_the_truth_is_what_was_trained_on() -> None:
    every = asked(4, 6)
    pairs = zip(every.client.tolist(), every.item.tolist(), strict=True)
    assert truth_of(every, TRAIN).tolist() == [pair in PAIRS for pair in pairs]
    assert truth_of(question((3, 2), (0, 0), (3, 2), (1, 4)), TRAIN).tolist() == [True, False, True, False]


def test_own_items_are_the_truth_as_pairs() -> None:
    assert {(int(client), int(item)) for client, item in own_items(TRAIN)} == PAIRS
    assert len(own_items(TRAIN)) == len(PAIRS)
    assert own_items(TRAIN).dtype == torch.int64


def test_pairs_seen() -> None:
    pairs = [(0, 3), (0, 99), (7, 0), (12, 41)]
    state = {"participations": torch.zeros(20, dtype=torch.int64)}
    for client in (0, 7, 12):
        state["participations"][client] = 1
        state[f"items/{client}"] = torch.tensor([item for number, item in pairs if number == client])
        state[f"odds/{client}"] = torch.zeros(len(state[f"items/{client}"]))
    seen = pairs_seen(state, 100)
    assert list(zip(seen.client.tolist(), seen.item.tolist(), strict=True)) == pairs


# --- claims -----------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])), min_size=1, max_size=40),
    st.integers(0, 9),
)
def test_claims_are_as_many_as_probabilities_add_up_to(answers: list[tuple[int, float]], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(answers))
    user = np.array([answers[k][0] for k in order]) * 5 - 3
    chance = np.array([answers[k][1] for k in order])
    claim = claims(WhichItems(torch.from_numpy(user), torch.arange(len(user))), chance)
    for each in np.unique(user):
        mine, claimed = chance[user == each], claim[user == each]
        count = min(floor(float(mine.sum()) + 0.5), int((mine > 0).sum()))
        assert claimed.sum() == count
        assert sorted(mine[claimed].tolist(), reverse=True) == sorted(mine.tolist(), reverse=True)[:count]


def test_claims_by_hand() -> None:
    ask = WhichItems(torch.tensor([2, 1, 2, 1, 2, 1, 9, 9]), torch.arange(8))
    chance = np.array([0.6, 0.2, 0.9, 0.2, 0.1, 0.0, 0.0, 0.0])
    assert claims(ask, chance).tolist() == [True, False, True, False, False, False, False, False]
    chance[1] = 0.3  # 0.5 of user 1 is rounded up
    assert claims(ask, chance).tolist() == [True, True, True, False, False, False, False, False]
    one = WhichItems(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert claims(one, np.array([1.0, 0.0, 0.999])).tolist() == [True, False, True]


def test_a_constant_answer_gets_what_chance_gets() -> None:
    """Own items have the lowest numbers; who breaks ties by number finds them."""
    users, items, own = 400, 100, 20
    every = asked(users, items)
    truth = (every.item < own).numpy()
    found = grade_items(every, torch.full((users * items,), own / items), truth).f1.value
    assert abs(found.mean() - own / items) < 4 * found.std() / users**0.5
    assert found.std() > 0


def test_claims_as_interactions() -> None:
    ask = question((3, 5), (0, 4), (0, 2), (3, 0), (1, 1), (3, 2))
    answer = torch.tensor([0.9, 0.2, 0.8, 0.95, 0.1, 0.1])
    found = claimed_interactions(ask, answer, TRAIN)
    assert list(zip(found.user.tolist(), found.item.tolist(), strict=True)) in (
        [(0, 2), (3, 5), (3, 0)],
        [(0, 2), (3, 0), (3, 5)],
    )
    assert (found.n_users, found.n_items) == (TRAIN.n_users, TRAIN.n_items)
    assert found.activity.tolist() == [1, 0, 0, 2]
    truth = truth_of(ask, TRAIN)
    kept = claimed_interactions(ask, torch.from_numpy(truth.astype(np.float32)), TRAIN)
    assert truth_of(ask, kept).tolist() == truth.tolist()


# --- grades -----------------------------------------------------------------------------------------------------------


def test_a_perfect_answer() -> None:
    every = asked(4, 6)
    truth = truth_of(every, TRAIN)
    found = grade_items(every, torch.from_numpy(truth).float(), truth)
    for metric in (found.f1, found.auc, found.exposed):
        assert metric.user.tolist() == [0, 1, 2, 3]
        assert metric.value.tolist() == [1, 1, 1, 1]
        assert metric.left_out == 0
    assert (found.pooled_auc, found.advantage) == (1, 1)
    assert found.tpr == {"1%": None, "0.1%": None}  # 17 negatives tell nothing of one in a hundred


def test_an_answer_that_is_wrong_throughout() -> None:
    every = asked(4, 6)
    truth = truth_of(every, TRAIN)
    found = grade_items(every, torch.from_numpy(~truth).float(), truth)
    assert (found.f1.value == 0).all()
    assert (found.auc.value == 0).all()
    assert (found.exposed.value == 0).all()
    assert (found.pooled_auc, found.advantage) == (0, 0)


@pytest.mark.parametrize("constant", [0.0, 0.4, 1.0])
def test_an_answer_that_tells_nothing_apart(constant: float) -> None:
    every = asked(4, 6)
    truth = truth_of(every, TRAIN)
    found = grade_items(every, torch.full((24,), constant), truth)
    assert (found.auc.value == 0.5).all()
    assert (found.exposed.value == 0).all()
    assert (found.pooled_auc, found.advantage) == (0.5, 0)
    own = truth.reshape(4, 6)
    claimed = claims(every, np.full(24, constant)).reshape(4, 6)
    assert (claimed.sum(1) == {0.0: 0, 0.4: 2, 1.0: 6}[constant]).all()  # 0.4 of 6 is 2.4
    assert found.f1.value.tolist() == [
        2 * (mine & true).sum() / (mine.sum() + true.sum()) for mine, true in zip(claimed, own, strict=True)
    ]


def test_grades_by_hand() -> None:
    ask = question((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0))
    truth = np.array([True, True, False, False, True, False, False, False])
    found = grade_items(ask, torch.tensor([0.9, 0.5, 0.5, 0.1, 0.1, 0.7, 0.2, 0.2]), truth)
    # User 0 claims two: items 0 and 1. User 1 claims one: item 1. User 2 claims none and has none.
    assert found.f1.user.tolist() == [0, 1]
    assert found.f1.value.tolist() == [1, 0]
    assert found.f1.left_out == 1
    assert found.auc.value.tolist() == [0.875, 0]  # 3.5 of 4 pairs; 0 of 2
    assert found.auc.left_out == 1
    assert found.exposed.value.tolist() == [0.5, 0]  # above 0.7, the highest of all negatives
    assert found.pooled_auc == pytest.approx((5 + 3.5 + 0.5) / 15)
    assert found.advantage == pytest.approx(1 / 3)  # from 0.9 on: one of three, and none of five


def test_an_answer_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(2,\)"):
        grade_items(question((0, 0), (0, 1)), torch.ones(3), np.array([True, False]))


@settings(max_examples=60)
@given(st.integers(1, 450), st.integers(1, 60), st.integers(0, 99), st.booleans())
def test_one_in_a_hundred_negatives_is_exposed_at_most(n_false: int, n_true: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    n = n_false + n_true
    truth = rng.permutation(n) < n_true
    score = rng.integers(0, 30, n) / 30 if ties else rng.random(n)
    user = rng.integers(0, 4, n)
    ask = WhichItems(torch.from_numpy(user), torch.arange(n))
    found = grade_items(ask, torch.from_numpy(score), truth)
    # The lowest threshold at which no more than one in a hundred negatives is claimed, of all users together.
    limits = [limit for limit in np.unique(score[~truth]) if (score[~truth] > limit).sum() * 100 <= n_false]
    above = score > min(limits)
    assert (above & ~truth).sum() * 100 <= n_false
    for each, value in zip(found.exposed.user, found.exposed.value, strict=True):
        mine = truth & (user == each)
        assert value == pytest.approx((above & mine).sum() / mine.sum())
    assert set(found.exposed.user.tolist()) == set(user[truth].tolist())


def test_what_is_exposed_is_what_the_curve_says() -> None:
    """With enough negatives, the mean over users of equal size is the true positive rate at one in a hundred."""
    rng, users, each = np.random.default_rng(0), 5, 1000
    truth = np.tile(np.arange(each) < 200, users)
    score: Tensor = torch.from_numpy(rng.normal(truth * 1.5))
    ask = WhichItems(torch.arange(users).repeat_interleave(each), torch.arange(each).repeat(users))
    found = grade_items(ask, score, truth)
    assert found.tpr["1%"] is not None
    assert found.exposed.value.mean() == pytest.approx(found.tpr["1%"])
    assert found.tpr["0.1%"] is None
    assert 0.1 < found.exposed.value.mean() < 0.5


# --- user by user -----------------------------------------------------------------------------------------------------


def _drawn(users: int = 40, each: int = 50) -> tuple[WhichItems, NDArray[np.float64], NDArray[np.bool_]]:
    generator = np.random.default_rng(3)
    client, item = np.repeat(np.arange(users), each), np.tile(np.arange(each), users)
    truth = generator.random(len(client)) < 0.2
    score = np.round(generator.normal(size=len(client)) + truth, 1)  # with ties
    return WhichItems(torch.from_numpy(client), torch.from_numpy(item)), score, truth


def test_grades_of_users_agree_with_those_of_all() -> None:
    ask, score, truth = _drawn()
    user = ask.client.numpy()
    valid = user % 4 == 0
    graded = grade_users(ask, torch.from_numpy(score), truth, valid)
    every = grade_items(ask, torch.from_numpy(score), truth)
    frame = graded.users
    assert frame["user"].to_list() == list(range(40))
    assert frame["valid"].to_list() == [place % 4 == 0 for place in range(40)]
    assert np.array_equal(frame["auc"].to_numpy(), every.auc.value)
    assert np.array_equal(frame["f1"].to_numpy(), every.f1.value)
    with pytest.raises(ValueError, match="Got an answer of shape"):
        grade_users(ask, torch.from_numpy(score[:-1]), truth, valid)
    assert graded.roc[0] == (0.0, 0.0)
    assert graded.roc[-1] == (1.0, 1.0)
    for place in range(40):
        mine = user == place
        assert frame["positives"][place] == truth[mine].sum()
        assert frame["negatives"][place] == (~truth[mine]).sum()


def test_thresholds_are_of_the_right_users() -> None:
    ask, score, truth = _drawn()
    valid = ask.client.numpy() % 4 == 0
    graded = grade_users(ask, torch.from_numpy(score), truth, valid)
    test = graded.users.filter(~graded.users["valid"])
    low = graded.thresholds["1%"]
    assert low is not None
    assert (score[~valid & ~truth] >= low).mean() <= 0.01
    assert (score[~valid & ~truth] >= low - 0.1).mean() > 0.01, "the next lower score is too low"
    assert test["hits@1%"].sum() == (score[~valid & truth] >= low).sum()
    assert graded.thresholds["0.1%"] is None, "1 of 1,000 negatives tells nothing"
    chosen = graded.thresholds["chosen"]
    gain = {
        at: (score[valid & truth] >= at).mean() - (score[valid & ~truth] >= at).mean() for at in np.unique(score[valid])
    }
    assert chosen is not None
    assert gain[chosen] == max(gain.values())
    assert test["hits"].sum() == (score[~valid & truth] >= chosen).sum()
    assert test["alarms"].sum() == (score[~valid & ~truth] >= chosen).sum()


def test_a_user_without_both_kinds_has_no_auc() -> None:
    ask = WhichItems(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    truth = np.array([True, False, True, True])
    graded = grade_users(ask, torch.tensor([0.9, 0.1, 0.5, 0.4]), truth, np.zeros(4, bool))
    assert graded.users["auc"].to_list() == [1.0, None]
    assert graded.thresholds["chosen"] is None
    assert graded.users["hits"].to_list() == [0, 0]
    assert graded.users["exposed"].to_list() == [None, None], "a handful of negatives has no 1 %"


def test_shuffled_truth_keeps_how_many_a_user_has_and_nothing_else() -> None:
    ask, score, truth = _drawn(200)
    user = ask.client.numpy()
    other = shuffled(ask, truth, seed=0)
    assert np.array_equal(np.bincount(user, truth), np.bincount(user, other))
    assert (other != truth).any()
    assert auc_by_user(score, truth, user).value.mean() > 0.7
    assert abs(auc_by_user(score, other, user).value.mean() - 0.5) < 0.03
    assert not np.array_equal(other, shuffled(ask, truth, seed=1))


def test_scores_below_chance_are_read_the_other_way_round() -> None:
    """In everything alike, as if the attack had said the opposite; and it claims as many items as before."""
    ask, score, truth = _drawn()
    valid = ask.client.numpy() % 4 == 0
    forth, back = (grade_users(ask, torch.from_numpy(each), truth, valid) for each in (score, 1 - score))
    assert [forth.direction, back.direction] == [1, -1]
    assert back.roc == forth.roc
    assert back.users.drop("f1").equals(forth.users.drop("f1"))
    few = question((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))
    probability = np.array([0.9, 0.8, 0.1, 0.2, 0.0, 1.0])
    assert claims(few, probability).tolist() == [True, True, False, False, False, True]
    assert claims(few, probability, reverse=True).tolist() == [False, False, True, True, True, False]
    unread = grade_users(ask, torch.from_numpy(1 - score), truth, np.zeros(len(truth), bool))
    assert unread.direction == 1, "no validation user says so"


def test_who_was_not_heard_of_stays_last_when_scores_are_reversed() -> None:
    every = asked(40, 50)
    user = every.client.numpy()
    truth, heard = every.item.numpy() < 10, user % 2 == 0
    wrong = torch.from_numpy(np.where(heard, np.where(truth, 0.1, 0.9), 0.0))  # nothing is known of every other user
    graded = grade_users(every, wrong, truth, user < 8)
    assert graded.direction == -1
    rows = graded.users.filter(~pl.col("valid"))
    hits = dict(rows.select("user", "hits@1%").iter_rows())
    assert {hits[each] for each in hits if each % 2 == 0} == {10}
    assert {hits[each] for each in hits if each % 2} == {0}
    assert rows["alarms@1%"].sum() == 0
    assert set(rows.filter(pl.col("user") % 2 == 1)["auc"]) == {0.5}


@pytest.mark.heavy
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_hits_at_a_false_positive_rate_cover_the_truth(alike: float) -> None:
    """Other users would put the threshold elsewhere: with a fixed one, the interval covers 85 % instead of 95 %."""
    rng = np.random.default_rng(3)
    ask, lead, repetitions, missed, fixed = asked(120, 60), 1.5, 200, 0, 0
    user = ask.client.numpy()
    for i in range(repetitions):
        truth = rng.random(len(user)) < 0.2
        score = rng.normal(size=len(user)) + lead * truth + alike * rng.normal(size=120)[user]
        graded = grade_users(ask, torch.from_numpy(score), truth, np.zeros(len(user), bool))
        counted = {name: graded.users[name].to_numpy() for name in ("user", "positives", "negatives")}
        hits = Counts(counted["user"], graded.users["hits@1%"].to_numpy(), counted["positives"])
        alarms = Counts(counted["user"], graded.users["alarms@1%"].to_numpy(), counted["negatives"])
        one = bootstrap_rate([hits], seed=i, alarms=[alarms], slopes=[graded.slopes["1%"]])
        other = bootstrap_rate([hits], seed=i)
        expected = stats.norm.sf(stats.norm.isf(0.01) - lead / np.hypot(1, alike))
        missed += not one.low <= expected <= one.high
        fixed += not other.low <= expected <= other.high
    assert stats.binomtest(missed, repetitions, 0.05, alternative="greater").pvalue > 0.001
    if alike == 0:  # else hits and alarms of one user go together, and the correction narrows
        assert fixed > missed


# --- communities ------------------------------------------------------------------------------------------------------


def drawn_among_equals(score: Tensor, truth: Tensor, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accuracy by adversary and how often each user is claimed, the mean over draws that order who is equal."""
    draws = np.random.default_rng(0)
    accuracy, claimed = np.zeros(len(score)), np.zeros(score.shape)
    for _ in range(3000):
        for a, row in enumerate(score.numpy()):
            order = np.lexsort((draws.random(len(row)), -row))[:size]
            hit = order[np.isfinite(row[order])]
            claimed[a, hit] += 1 / 3000
            accuracy[a] += truth[a].numpy()[hit].sum() / size / 3000
    return accuracy, claimed


def test_equal_scores_count_as_a_draw_among_them() -> None:
    draws = torch.Generator().manual_seed(1)
    score = torch.randint(0, 4, (5, 12), generator=draws).float()
    score[torch.rand(5, 12, generator=draws) < 0.3] = -torch.inf
    score[4, 3:] = -torch.inf  # it heard of three
    truth = torch.rand(5, 12, generator=draws) < 0.4
    graded = grade_communities(score, truth, 4)
    accuracy, claimed = drawn_among_equals(score, truth, 4)
    np.testing.assert_allclose(graded["accuracy"].numpy(), accuracy, atol=0.03)
    exposed = (claimed * truth.numpy()).sum(0) / np.maximum(truth.sum(0).numpy(), 1)
    np.testing.assert_allclose(graded["exposed"].nan_to_num().numpy(), exposed, atol=0.03)


@pytest.mark.parametrize("first", [True, False], ids=["the first users", "the last users"])
def test_a_constant_answer_finds_what_a_draw_finds(first: bool) -> None:
    users, size = 50, 10
    truth = torch.zeros(users, users, dtype=torch.bool)
    truth[:, slice(0, size) if first else slice(users - size, users)] = True
    truth.fill_diagonal_(False)
    graded = grade_communities(torch.ones(users, users), truth, size, torch.arange(users))
    expected = truth.sum(1) / (users - 1)
    torch.testing.assert_close(graded["accuracy"], expected.float())
    assert float(graded["accuracy"].max()) == pytest.approx(size / (users - 1))
    assert float(graded["separation"]) == 0


def test_who_was_not_heard_of_or_stands_aside_is_not_found() -> None:
    truth = torch.ones(1, 6, dtype=torch.bool)
    score = torch.tensor([[3.0, 2.0, 1.0, -torch.inf, -torch.inf, -torch.inf]])
    graded = grade_communities(score, truth, 4)
    assert graded["accuracy"].tolist() == [0.75]
    assert graded["bound"].tolist() == [3 / 4]
    assert graded["exposed"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    aside = torch.tensor([[True, False, False, False, False, False]])
    assert grade_communities(score, truth, 4, aside=aside)["accuracy"].tolist() == [0.5]


def test_what_victims_add_to_the_mean_is_what_drawing_them_again_adds() -> None:
    """By a finite difference: the mean over adversaries of the share of their communities that is hit, where each user
    counts as often as it is drawn as a victim.
    """
    rng = np.random.default_rng(0)
    users, who = 30, torch.tensor([3, 8, 20])
    order = rng.random((3, users))
    order[np.arange(3), who] = 2  # nobody is in its own community
    truth = torch.from_numpy(order.argsort(1).argsort(1) < 6)
    score = rng.random((3, users))
    graded = grade_communities(torch.from_numpy(score).float(), truth, 6, who)
    column = as_victims(graded["accuracy"], graded["exposed"], truth)
    score[np.arange(3), who] = -1
    hit = truth.numpy() & ((-score).argsort(1).argsort(1) < 6)  # bool[A, U]

    def mean(times: NDArray[np.float64]) -> float:
        return float(((hit * times).sum(1) / (truth.numpy() * times).sum(1)).mean())

    assert mean(np.ones(users)) == pytest.approx(graded["accuracy"].double().mean().item(), abs=1e-6)
    step, one = 1e-4, np.eye(users)
    slope = np.array([mean(1 + step * each) - mean(1 - step * each) for each in one]) / (2 * step)
    assert np.abs(slope).max() > 0.01
    np.testing.assert_allclose(column, slope * users, atol=1e-5)
    assert graded["heard"][truth.any(0)].tolist() == [1.0] * int(truth.any(0).sum())


def test_a_community_has_nobody_who_stands_aside() -> None:
    rows = np.argwhere(np.random.default_rng(0).random((12, 20)) < 0.4)
    train = Interactions.build(pl.DataFrame({"user": rows[:, 0], "item": rows[:, 1]}))
    targets = torch.from_numpy((train.matrix().toarray() > 0).astype(np.float32))
    everybody = torch.arange(len(targets))
    aside = torch.zeros(len(targets), len(targets), dtype=torch.bool)
    aside[:, :3] = True
    plain = communities(targets, train, 5, everybody)
    apart = communities(targets, train, 5, everybody, aside)
    assert bool(plain[:, :3].any())
    assert not bool(apart[:, :3].any())
    assert apart.sum(1).tolist() == [5] * len(targets)
    assert bool((apart[:, 3:] | ~plain[:, 3:]).all()), "who else was in it stays"
