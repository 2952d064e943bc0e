"""Canaries: planted by fair coins among items that clients do not have, and graded without favor."""

from __future__ import annotations

from functools import cache

import numpy as np
import polars as pl
import pytest
from scipy import stats

from recleak import random
from recleak.accounting import ledger, participations
from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge
from recleak.attacks.membership import AllPositive, FromUploads
from recleak.canaries import AtLeast, Canaries, bound, plant
from recleak.data.interactions import Interactions
from recleak.data.source import open_data
from recleak.data.split import Split, leave_one_out
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.labels import FakeItems, RandomizedLabels
from recleak.defenses.noise import GaussianNoise
from recleak.errors import ConfigError
from recleak.metrics.lower_bound import from_one_run
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.training.cohort import LocalTraining
from recleak.wire import Server


@cache
def split() -> Split:
    return leave_one_out(open_data("synthetic"))


def keys(data: Interactions) -> set[int]:
    return set((data.user.astype(np.int64) * data.n_items + data.item).tolist())


# --- planting


@pytest.mark.heavy
def test_canaries_are_new_items_of_clients_and_those_in_are_in_the_data() -> None:
    train, valid, test = split().train, split().valid, split().test
    canaries = plant(train, per_user=3, spare=(valid, test), seed=1)
    assert len(canaries) == 3 * train.n_users
    pair = canaries.client * train.n_items + canaries.item
    assert len(np.unique(pair)) == len(pair)
    assert not set(pair.tolist()) & (keys(train) | keys(valid) | keys(test))
    assert keys(canaries.train) == keys(train) | set(pair[canaries.included].tolist())
    assert len(canaries.train) == len(train) + canaries.included.sum()
    asked = canaries.question.client * train.n_items + canaries.question.item
    np.testing.assert_array_equal(np.isin(asked.numpy(), list(keys(canaries.train))), canaries.included)


def test_planted_data_is_in_the_canonical_order_and_keeps_what_it_had() -> None:
    train = split().train
    planted = plant(train, seed=1).train
    ids = pl.DataFrame(
        {
            "user": planted.users["id"][planted.user],
            "item": planted.items["id"][planted.item],
            **{name: planted.rows[name] for name in planted.rows.columns[2:]},
        }
    )
    again = Interactions.build(ids.sample(fraction=1, shuffle=True, seed=0))
    assert again.rows.height == planted.rows.height
    assert planted.rows.select("user", "time").equals(again.rows.select("user", "time"))
    assert planted.rows.join(train.rows, on=["user", "item"], how="inner").height == len(train)
    assert planted.users.equals(train.users)


def test_coins_are_fair_and_independent_of_seed_and_item() -> None:
    train = split().train
    heads = np.concatenate([plant(train, per_user=4, seed=seed).included for seed in range(10)])
    assert stats.binomtest(int(heads.sum()), len(heads)).pvalue > 0.01
    one, other = (plant(train, per_user=4, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one.item, other.item)
    half = one.item < np.median(one.item)
    assert stats.binomtest(int(one.included[half].sum()), int(half.sum())).pvalue > 0.01
    assert stats.binomtest(int((one.included ^ other.included).sum()), len(one)).pvalue > 0.01
    again = plant(train, per_user=4, seed=0)
    np.testing.assert_array_equal(one.included, again.included)
    np.testing.assert_array_equal(one.item, again.item)


@pytest.mark.parametrize("by", ["client", "item"])
def test_coins_of_one_client_and_of_one_item_are_independent(by: str) -> None:
    canaries = plant(split().train, per_user=6, seed=2)
    key = getattr(canaries, by)
    order = np.lexsort((canaries.client, key))
    coin, same = canaries.included[order], np.diff(key[order]) == 0
    agree = (coin[1:] == coin[:-1])[same]
    assert len(agree) > 1000
    assert stats.binomtest(int(agree.sum()), len(agree)).pvalue > 0.01


def small(users: int, items: int, per_user: int) -> Interactions:
    rows = [(user, item) for user in range(users) for item in range(per_user)] + [(0, item) for item in range(items)]
    return Interactions.build(pl.DataFrame(rows, schema=["user", "item"], orient="row").unique())


def test_canaries_are_uniform_among_free_items() -> None:
    canaries = plant(small(4000, 8, 3), per_user=2)  # five free items: ten pairs
    pair = canaries.item.reshape(-1, 2)
    assert (pair[:, 0] < pair[:, 1]).all()
    count = np.bincount(pair[:, 0] * 8 + pair[:, 1])
    assert (count > 0).sum() == 10
    assert stats.chisquare(count[count > 0]).pvalue > 0.01


def test_a_client_with_few_free_items_gets_all_and_one_without_any_none() -> None:
    canaries = plant(small(5, 6, 4), per_user=3)
    assert 0 not in canaries.client  # user 0 has every item
    for user in range(1, 5):
        assert canaries.item[canaries.client == user].tolist() == [4, 5]


def test_users_without_an_interaction_get_none() -> None:
    train = split().train
    some = train.take(train.user % 2 == 0)
    assert (plant(some).client % 2 == 0).all()


def test_canaries_of_some_clients() -> None:
    canaries = plant(split().train, per_user=2)
    some = canaries.of([3, 5])
    assert some.client.tolist() == [3, 3, 5, 5]
    where = [6, 7, 10, 11]
    np.testing.assert_array_equal(some.item, canaries.item[where])
    np.testing.assert_array_equal(some.included, canaries.included[where])


def test_no_canary_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 1 canary"):
        plant(split().train, per_user=0)


# --- grading


def made_up(m: int, seed: int = 0) -> Canaries:
    number = np.arange(m)
    coin = random.bits(seed, "coin", number) >> np.uint64(63) == 1
    return Canaries(number, number % 50, coin, split().train)


def test_a_perfect_score_and_the_same_backwards() -> None:
    canaries = made_up(640)
    found = bound(canaries, canaries.included.astype(float), delta=0.0)
    assert found.right == found.guessed_in + found.guessed_out == 2 * 256
    assert found.epsilon == from_one_run(640, found.right, found.right, level=1 - 0.05 / 9)
    assert found.tried == 9
    assert bound(canaries, ~canaries.included, delta=0.0).epsilon == 0


def test_the_highest_are_guessed_in_and_the_lowest_out() -> None:
    canaries = made_up(100)
    score = np.where(canaries.included, 1.0, -1.0)
    wrong = int(np.flatnonzero(canaries.included)[0])
    score[wrong] = -9.0  # the very lowest is in
    found = bound(canaries, score, delta=0.0, guesses=[(10, 0)])
    assert (found.right, found.guessed_in, found.guessed_out, found.tried) == (10, 10, 0, 1)
    assert bound(canaries, score, delta=0.0, guesses=[(0, 10)]).right == 9
    assert bound(canaries, score, delta=0.0, guesses=[(20, 10)]).right == 29
    assert bound(canaries, score, delta=0.0, guesses=[(20, 10)]).epsilon == from_one_run(100, 30, 29)


def test_several_guesses_share_the_error() -> None:
    canaries = made_up(200)
    alone = bound(canaries, canaries.included, delta=1e-4, guesses=[(50, 50)])
    both = bound(canaries, canaries.included, delta=1e-4, guesses=[(50, 50), (5, 5)])
    assert both.epsilon == from_one_run(200, 100, 100, delta=1e-4, level=0.975) < alone.epsilon
    assert (both.guessed_in, both.tried, both.level, both.delta) == (50, 2, 0.95, 1e-4)


def test_a_constant_score_shows_nothing_more_often_than_stated() -> None:
    """Also where coins follow the order of the canaries: ties are not broken by it."""
    sorted_coins = made_up(400)
    sorted_coins = Canaries(sorted_coins.client, sorted_coins.item, np.sort(sorted_coins.included), sorted_coins.train)
    assert bound(sorted_coins, np.zeros(400), delta=0.0).epsilon == 0
    above = sum(bound(made_up(200, seed), np.zeros(200), delta=0.0, level=0.8).epsilon > 0 for seed in range(300))
    assert stats.binomtest(above, 300, 0.2, alternative="greater").pvalue > 1e-3


@pytest.mark.parametrize("m", [0, 1, 2, 9])
def test_few_canaries_show_nothing(m: int) -> None:
    canaries = made_up(m)
    assert bound(canaries, canaries.included, delta=0.0).epsilon == 0


@pytest.mark.parametrize("guesses", [[], [(6, 5)], [(-1, 2)]])
def test_impossible_guesses_are_refused(guesses: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=r"expected pairs \(in, out\)"):
        bound(made_up(10), np.zeros(10), delta=0.0, guesses=guesses)


@pytest.mark.parametrize("score", [np.zeros(9), np.zeros((10, 1)), np.full(10, np.nan)])
def test_scores_that_are_none_are_refused(score: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    with pytest.raises(ValueError, match="expected a number for each of the 10 canaries"):
        bound(made_up(10), score, delta=0.0)


# --- a run


def run(defense: Defense, attack: FromUploads) -> tuple[AtLeast, float | None]:
    """What canaries show of a small run, beside the largest epsilon of the ledger."""
    canaries = plant(split().train, per_user=8, spare=(split().valid, split().test), seed=1)
    model, local = NCF(), LocalTraining(epochs=5)
    known = Knowledge(model, canaries.train.n_users, canaries.train.n_items, model.components(), local, defense)
    tap = Listening(Server(), attack, known)
    protocol = Federated(rounds=1, clients_per_round=60, local=local)
    train_federated(protocol, model, canaries.train, defense=defense, taps=[tap], show_progress=False)
    uses = participations(protocol, canaries.train)
    mine = canaries.of(np.flatnonzero(uses))
    parts, n_items = model.components(), canaries.train.n_items
    rows = ledger(defense, components=parts, n_items=n_items, participations=uses, training=local)
    promised = [row.composed for row in rows if row.composed is not None]
    return bound(mine, tap.answer(mine.question).numpy(), delta=1e-5), max(promised, default=None)


@pytest.mark.heavy
def test_without_a_defense_nearly_every_canary_is_told() -> None:
    found, promised = run(Defense(), GradientAlignment())
    assert promised is None
    assert found.epsilon > 3


@pytest.mark.heavy
@pytest.mark.parametrize(
    "defense", [RandomizedLabels(0.05), FakeItems(4.0), Chain((ClipByNorm(1.0), GaussianNoise(9.0)))]
)
def test_presence_shows_in_what_is_touched_however_values_are_hidden(defense: Defense) -> None:
    """Nothing but the support is read here, and labels of epsilon 0.1 at most do not hide it."""
    found, promised = run(defense, AllPositive())
    assert found.epsilon > 1.5
    assert promised is None or promised <= 0.1 + 1e-9
    assert found.guessed_out == found.right  # what nobody touched is out, for sure


@pytest.mark.heavy
@pytest.mark.parametrize("std", [0.01, 3.0])
def test_canaries_never_show_more_than_the_ledger_promises(std: float) -> None:
    found, promised = run(Chain((ClipByNorm(1.0), GaussianNoise(std, rows="all"))), GradientAlignment())
    assert promised is not None
    assert found.epsilon <= promised
    assert (found.epsilon > 1) == (std < 1)
