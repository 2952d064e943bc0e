"""The ledger: epsilon agrees with independent computations, and where nothing follows there is none."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import comb, exp, inf, sqrt

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from numpy.typing import NDArray
from scipy import optimize, stats

import recleak.defenses
from recleak.accounting import Entry, ledger, participations
from recleak.data.source import open_data
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm, Per
from recleak.defenses.labels import FakeItems, RandomizedLabels
from recleak.defenses.noise import GaussianNoise, LaplaceNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share, ShareLess
from recleak.defenses.sparsify import SignOnly
from recleak.epsilon import gaussian_epsilon, pure_epsilon
from recleak.errors import ConfigError
from recleak.findings import TABLES
from recleak.metrics.lower_bound import from_rates
from recleak.models.components import Component
from recleak.models.mf import MF
from recleak.protocols.federated import Federated, train_federated
from recleak.streams import Streams
from recleak.testing import example_update
from recleak.testing.defenses import EXAMPLE_COMPONENTS, zeros_like
from recleak.training.aggregate import Aggregation
from recleak.training.cohort import LocalTraining
from recleak.update import Update
from recleak.wire import Message, Upload

PARTS = (
    *EXAMPLE_COMPONENTS,
    Component("head.2.weight", "dense", "head", (3, 4, 2), layer=2),
    Component("head.2.bias", "dense", "head", (5,), layer=2),
    Component("vector", "dense", "head", (5,), layer=3),
)
SHARED = tuple(part.name for part in PARTS if part.shared)
ITEMS = 12
USES = np.array([0, 0, 0, 0, 1, 1, 2, 2, 9])
DELTA = 1e-4


def entries(defense: Defense, *, training: LocalTraining | None = None, how: Aggregation = "mean") -> list[Entry]:
    return ledger(
        defense,
        components=PARTS,
        n_items=ITEMS,
        participations=USES,
        training=training,
        aggregation=how,
        delta=DELTA,
    )


def has_epsilon(defense: Defense, *, how: Aggregation = "mean") -> bool:
    return any(entry.composed is not None for entry in entries(defense, how=how))


CLIP, NOISE = ClipByNorm(0.5), GaussianNoise(0.3, rows="all")

# --- epsilon of Gaussian noise, by others


def balle_wang(ratio: float, delta: float) -> float:
    """Theorem 8, solved without the library."""

    def excess(epsilon: float) -> float:
        first = stats.norm.logcdf(ratio / 2 - epsilon / ratio)
        second = epsilon + stats.norm.logcdf(-ratio / 2 - epsilon / ratio)
        return float(first + np.log(-np.expm1(second - first)) - np.log(delta))

    return float(optimize.bisect(excess, 1e-9, ratio**2 + 20 * ratio + 1))


def by_losses(event: dp_accounting.DpEvent, delta: float) -> float:
    """Epsilon by privacy loss distributions."""
    return float(pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta))


def by_moments(event: dp_accounting.DpEvent, delta: float) -> float:
    """Epsilon by Renyi differential privacy, which is somewhat more."""
    return float(rdp.RdpAccountant().compose(event).get_epsilon(delta))


@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_one_use_of_gaussian_noise_is_the_analytic_mechanism(ratio: float, delta: float) -> None:
    assert gaussian_epsilon(ratio, delta) == pytest.approx(balle_wang(ratio, delta), rel=1e-6)


@pytest.mark.parametrize(("ratio", "delta"), [(0.2, 1e-3), (1.0, 1e-3), (1.0, 1e-6), (3.0, 1e-6)])
def test_one_use_of_gaussian_noise_agrees_with_two_accountants(ratio: float, delta: float) -> None:
    event, epsilon = dp_accounting.GaussianDpEvent(1 / ratio), gaussian_epsilon(ratio, delta)
    assert by_losses(event, delta) == pytest.approx(epsilon, rel=0.01)
    assert epsilon <= by_moments(event, delta) < 1.2 * epsilon


@pytest.mark.parametrize("times", [2, 30, 1000])
def test_composed_gaussian_noise_agrees_with_two_accountants(times: int) -> None:
    sigma = 8.0
    entry = ledger(
        Chain((ClipByNorm(1.0), GaussianNoise(sigma, rows="all"))),
        components=PARTS,
        n_items=ITEMS,
        participations=np.array([1, times]),
        delta=1e-5,
    )[1]
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), times)
    assert entry.composed is not None
    assert entry.composed == pytest.approx(by_losses(event, 1e-5), rel=0.01)
    assert entry.composed <= by_moments(event, 1e-5) < 1.2 * entry.composed


@pytest.mark.parametrize("ratio", [1e-12, 1e-4, 1e2, 1e6])
def test_extreme_noise_has_an_epsilon(ratio: float) -> None:
    assert 0 <= gaussian_epsilon(ratio, 1e-6) <= ratio**2 / 2 + 7 * ratio


# --- what a change of data can move


def largest(defense: Defense, like: Update, sign: float) -> Update:
    """What leaves a client that wants to say as much as it can."""
    return defense.upload(like.map(lambda name, tensor, owner: sign * torch.full_like(tensor, 1e6)), streams(like))


def streams(update: Update, round: int = 0) -> Streams:
    return Streams.simulated(1, round, update.client)


def one_client() -> Update:
    update = example_update(2, ITEMS, components=PARTS, max_rows=3).only(set(SHARED))
    return update.select(torch.tensor([1])).with_all_rows()


def distance(one: Update, other: Update, scale: Mapping[str, float] | float, power: int) -> float:
    total = 0.0
    for name, tensor in {**one.values, **one.rows}.items():
        far = (tensor - (other.values | other.rows)[name]).double().abs()
        far = far / (scale if isinstance(scale, float) else scale[name])
        total += float((far**power).sum())
    return float(total ** (1 / power))


@pytest.mark.parametrize("per", ["client", "component", "row", "unit"])
def test_the_sensitivity_of_clipping_is_reached_by_two_clients(per: Per) -> None:
    clip = ClipByNorm(0.5, per=per)
    far = distance(largest(clip, one_client(), 1), largest(clip, one_client(), -1), 0.3, 2)
    replaced, silenced = entries(Chain((clip, NOISE)))
    assert replaced.claimed == pytest.approx(gaussian_epsilon(far, DELTA), rel=1e-5)
    assert silenced.claimed == pytest.approx(gaussian_epsilon(far / 2, DELTA), rel=1e-5)


def test_the_sensitivity_of_a_given_step_is_reached() -> None:
    sign = SignOnly(0.01)
    far = distance(largest(sign, one_client(), 1), largest(sign, one_client(), -1), 0.3, 2)
    assert entries(Chain((sign, NOISE)))[0].claimed == pytest.approx(gaussian_epsilon(far, DELTA), rel=1e-5)


def test_noise_by_component_counts_by_the_least_where_one_norm_is_over_all() -> None:
    scale = {name: 0.2 + 0.1 * place for place, name in enumerate(SHARED)}
    noise = GaussianNoise(scale, rows="all")
    by_client = entries(Chain((ClipByNorm(0.5), noise)))[0]
    assert by_client.claimed == pytest.approx(gaussian_epsilon(2 * 0.5 / 0.2, DELTA))
    clip = ClipByNorm(0.5, per="component")
    far = distance(largest(clip, one_client(), 1), largest(clip, one_client(), -1), scale, 2)
    assert entries(Chain((clip, noise)))[0].claimed == pytest.approx(gaussian_epsilon(far, DELTA), rel=1e-5)


def test_several_bounds_count_together() -> None:
    heads = tuple(name for name in SHARED if not name.startswith("item"))
    two = Chain((ClipByNorm(0.5, ("item", "item_bias")), ClipByNorm(0.2, heads), NOISE))
    assert entries(two)[0].claimed == pytest.approx(gaussian_epsilon(2 * sqrt(0.5**2 + 0.2**2) / 0.3, DELTA))
    tighter = Chain((ClipByNorm(0.5), ClipByNorm(0.1), NOISE))
    assert entries(tighter)[0].claimed == pytest.approx(gaussian_epsilon(2 * 0.1 / 0.3, DELTA))
    rows_too = Chain((ClipByNorm(0.5), ClipByNorm(0.4, per="row"), NOISE))
    assert entries(rows_too)[0].claimed == pytest.approx(gaussian_epsilon(2 * 0.5 / 0.3, DELTA))


def test_laplace_noise_pays_for_every_number() -> None:
    clip = ClipByNorm(0.5)
    far = distance(largest(clip, one_client(), 1), largest(clip, one_client(), -1), 0.3, 1)
    entry = entries(Chain((clip, LaplaceNoise(0.3, rows="all"))))[0]
    assert entry.claimed == pytest.approx(far, rel=1e-5)
    assert entry.composed == pytest.approx(9 * far, rel=1e-5)
    assert entry.delta == 0
    clip = ClipByNorm(0.5, per="component")
    far = distance(largest(clip, one_client(), 1), largest(clip, one_client(), -1), 0.3, 1)
    assert entries(Chain((clip, LaplaceNoise(0.3, rows="all"))))[0].claimed == pytest.approx(far, rel=1e-5)


@pytest.mark.heavy
def test_the_mechanism_itself_is_no_worse_than_the_ledger_and_not_much_better() -> None:
    """Two clients that differ as much as they can, told apart from real uploads by the best test there is."""
    defense, trials, delta = Chain((ClipByNorm(0.5), GaussianNoise(1.0, rows="all"))), 40_000, 0.01
    like = zeros_like(example_update(trials, 2, components=PARTS[:1] + PARTS[3:5], max_rows=0).only({"weight", "bias"}))
    entry = ledger(defense, components=PARTS[3:5], n_items=2, participations=np.array([1]), delta=delta)[0]
    assert entry.claimed is not None
    claimed_in = []
    for sign in (1.0, -1.0):
        moved = replace(like, values={**like.values, "bias": torch.full((trials,), 1e3 * sign)})
        sent = defense.upload(moved, streams(like))
        claimed_in.append(int((sent.values["bias"] > entry.claimed).sum()))  # where the likelihoods are as e^epsilon
    at_least = from_rates(claimed_in[0], trials, claimed_in[1], trials, delta=delta, level=0.99)
    assert 0.7 * entry.claimed < at_least <= entry.claimed


def test_signs_with_a_mean_size_never_lift_a_norm() -> None:
    for scale in (1e-3, 1.0, 1e3):
        update = example_update(50, ITEMS, components=PARTS, scale=scale).only(set(SHARED))
        sent = SignOnly().upload(update, streams(update)).squared_norms()
        for name, squared in update.squared_norms().items():
            assert (sent[name] <= squared * (1 + 1e-5)).all()


# --- pure epsilon


@pytest.mark.parametrize(
    ("once", "times", "delta"), [(0.1, 100, 1e-5), (0.5, 30, 1e-6), (0.02, 500, 1e-4), (1, 40, 1e-3)]
)
def test_pure_epsilon_composes_as_the_theorem_says(once: float, times: int, delta: float) -> None:
    """Kairouz, Oh and Viswanath 2015, theorem 3.3: ((k - 2i) epsilon, delta_i) for every i."""

    def delta_of(i: int) -> float:
        terms = (comb(times, j) * (exp((times - j) * once) - exp((times - 2 * i + j) * once)) for j in range(i))
        return sum(terms) / (1 + exp(once)) ** times

    i = max(i for i in range(times // 2 + 1) if delta_of(i) <= delta)
    got, at, words = pure_epsilon(once, times, delta)
    assert (times - 2 * i - 2) * once <= got <= (times - 2 * i) * once + 1e-9
    assert at == delta
    assert "Kairouz" in words


@pytest.mark.parametrize(("once", "times"), [(0.1, 1), (0.1, 0), (0.0, 5), (5.0, 3), (1e5, 7)])
def test_pure_epsilon_adds_up_where_that_is_as_good(once: float, times: int) -> None:
    assert pure_epsilon(once, times, 1e-6)[:2] == (once * times, 0.0)


# --- where nothing follows


@dataclass(frozen=True)
class Doubled(Defense):
    """States nothing."""

    def upload(self, update: Update, streams: Streams) -> Update:
        return update.map(lambda name, tensor, owner: 2 * tensor)


@dataclass(frozen=True)
class Renamed(Defense):
    """States nothing, and leaves uploads alone."""

    def penalty(self, moved: Update, streams: Streams) -> None:
        return None


WITHOUT: dict[str, tuple[Defense, str]] = {
    "no defense": (Defense(), "no defense"),
    "an empty chain": (Chain(), "no defense"),
    "clipping alone": (CLIP, "nothing is random"),
    "noise alone": (NOISE, "Nothing bounds item, item_bias"),
    "noise on touched rows": (Chain((CLIP, GaussianNoise(0.3))), "Which rows those are"),
    "Laplace noise on touched rows": (Chain((CLIP, LaplaceNoise(0.3))), "Which rows those are"),
    "clipping after noise": (Chain((NOISE, CLIP)), "Nothing bounds item"),
    "clipping some": (Chain((ClipByNorm(0.5, ("item", "item_bias")), NOISE)), "Nothing bounds weight"),
    "clipping what is kept": (Chain((ClipByNorm(0.5, ("user",)), NOISE)), "Nothing bounds item"),
    "noise on some": (Chain((CLIP, GaussianNoise({"item": 1.0}, rows="all"))), "no noise on item_bias, weight"),
    "noise of 0": (Chain((CLIP, GaussianNoise(0.0, rows="all"))), "noise is 0"),
    "noise in two halves": (
        Chain((CLIP, GaussianNoise({"item": 1.0}, rows="all"), GaussianNoise({"weight": 1.0}, rows="all"))),
        "no noise on item, item_bias",
    ),
    "noise that breaks the bound": (Chain((CLIP, GaussianNoise(0.3), NOISE)), "Nothing bounds item"),
    "something unknown after clipping": (Chain((CLIP, Doubled(), NOISE)), "Nothing bounds item"),
    "a step after clipping, some noise": (Chain((CLIP, SignOnly(0.1), GaussianNoise(0.3))), "Which rows those are"),
    "a regularizer": (Proximal(1.0), "nothing is random"),
    "signs": (SignOnly(), "nothing is random"),
    "signs of a step": (SignOnly(0.1), "nothing is random"),
    "fake items": (FakeItems(2.0), "Fake items"),
    "share less": (ShareLess(), "what is sent is exact"),
    "share all": (Share(), "protects nothing"),
    "secure aggregation": (SecureAggregation(), "the sum is exact"),
    "clipping and secure aggregation": (Chain((CLIP, SecureAggregation())), "the sum is exact"),
    "the user table without noise": (
        Chain((Share(), CLIP, GaussianNoise(dict.fromkeys(SHARED, 0.3), rows="all"))),
        "no noise on user",
    ),
    "labels that are never flipped": (RandomizedLabels(inf), "ever flipped"),
    "something unknown": (Doubled(), "does not state"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_there_is_no_epsilon_where_none_follows(name: str) -> None:
    defense, why = WITHOUT[name]
    rows = entries(defense)
    assert rows
    for row in rows:
        assert (row.claimed, row.composed, row.delta, row.times, row.typical) == (None,) * 5
        assert row.unit == row.neighbors == "nothing"
        assert row.words.startswith("No guarantee. ")
    assert any(why in row.words for row in rows), [row.words for row in rows]


WITH: dict[str, Defense] = {
    "clip, noise": Chain((CLIP, NOISE)),
    "in a nested chain": Chain((Chain((CLIP,)), Chain((Chain(), NOISE)))),
    "clipped again, and signs, after noise": Chain((CLIP, NOISE, CLIP, SignOnly(0.1), SecureAggregation())),
    "something unknown after noise": Chain((CLIP, NOISE, Doubled())),
    "something unknown before clipping": Chain((Doubled(), CLIP, NOISE)),
    "something unknown elsewhere": Chain((CLIP, Renamed(), NOISE)),
    "signs between": Chain((CLIP, SignOnly(), NOISE)),
    "regularizer and fakes between": Chain((CLIP, Proximal(1.0), FakeItems(1.0), NOISE)),
    "noise twice": Chain((CLIP, NOISE, GaussianNoise(9.0))),
}


@pytest.mark.parametrize("name", WITH)
def test_what_comes_after_noise_keeps_the_guarantee(name: str) -> None:
    expected = entries(Chain((CLIP, NOISE)))
    got = [row for row in entries(WITH[name]) if row.composed is not None]
    assert [(row.claimed, row.composed) for row in got] == [(row.claimed, row.composed) for row in expected]
    assert len(got) == 2


def test_noise_on_top_of_noise_counts_for_nothing_and_says_so() -> None:
    *_, later = entries(WITH["noise twice"])
    assert "An earlier row gives the guarantee" in later.words


def test_a_step_takes_the_place_of_a_bound_before_it() -> None:
    after_clipping = entries(Chain((ClipByNorm(1e-3), SignOnly(1.0), NOISE)))
    assert after_clipping[0].claimed == entries(Chain((SignOnly(1.0), NOISE)))[0].claimed
    assert "ClipByNorm" not in after_clipping[0].mechanism


def test_noise_on_what_is_sent_is_enough_where_no_item_row_is() -> None:
    without_rows = ShareLess(("item", "item_bias"))
    assert has_epsilon(Chain((without_rows, CLIP, GaussianNoise(0.3))))
    assert not has_epsilon(Chain((ShareLess(("item",)), CLIP, GaussianNoise(0.3))))
    assert not has_epsilon(Chain((ShareLess(tuple(part.name for part in PARTS)), CLIP, NOISE)))


def test_the_user_table_counts_when_it_is_shared() -> None:
    clip = ClipByNorm(0.5, per="component")
    kept, shared = (entries(Chain((*policy, clip, NOISE)))[-1] for policy in ((), (Share(),)))
    assert kept.claimed == pytest.approx(gaussian_epsilon(sqrt(7) * 0.5 / 0.3, DELTA))
    assert shared.claimed == pytest.approx(gaussian_epsilon(sqrt(8) * 0.5 / 0.3, DELTA))


def test_a_weight_that_is_sent_beside_the_noise_undoes_it() -> None:
    defense = Chain((CLIP, NOISE))
    assert has_epsilon(defense, how="touched-mean")
    assert not has_epsilon(defense, how="weighted")
    assert "number of a client's own items" in entries(defense, how="weighted")[0].words
    assert entries(RandomizedLabels(1.0), how="weighted") == entries(RandomizedLabels(1.0))  # of the flipped labels


# --- labels


def test_labels_are_spent_once_and_twice_for_a_swap() -> None:
    one, swap = entries(RandomizedLabels(0.5))
    assert (one.claimed, one.composed, one.delta, one.times) == (0.5, 0.5, 0.0, 1)
    assert (swap.claimed, swap.composed, swap.delta, swap.times) == (0.5, 1.0, 0.0, 1)
    assert one.neighbors != swap.neighbors
    assert "4.5" in one.words  # 9 uploads, if a device drew anew
    for row in (one, swap):
        assert "Not covered: which items" in row.words


@pytest.mark.parametrize(
    ("training", "why"), [(LocalTraining(resample=True), "drawn anew"), (LocalTraining(shuffle=False), "order")]
)
def test_labels_are_worth_nothing_where_the_items_tell(training: LocalTraining, why: str) -> None:
    (row,) = entries(RandomizedLabels(0.5), training=training)
    assert row.composed is None
    assert why in row.words


def test_labels_and_noise_in_a_chain_are_rows_of_their_own() -> None:
    rows = entries(Chain((RandomizedLabels(0.5), CLIP, NOISE)), training=LocalTraining())
    assert [row.composed for row in rows[:2]] == [0.5, 1.0]
    assert rows[2:] == entries(Chain((CLIP, NOISE)))


# --- the rows


def test_every_defense_of_the_package_states_what_it_spends() -> None:
    stating = []
    for module in pkgutil.iter_modules(recleak.defenses.__path__):
        for kind in vars(importlib.import_module(f"recleak.defenses.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Defense) and not kind.__name__.startswith("_"):
                assert "spends" in vars(kind), kind
                stating.append(kind)
    assert {Chain, ClipByNorm, GaussianNoise, LaplaceNoise, Proximal, RandomizedLabels, SignOnly} <= set(stating)


def test_rows_fit_the_findings() -> None:
    assert {each.name for each in fields(Entry)} - {"typical"} <= set(TABLES["ledger"])


def test_the_worst_client_and_the_typical_one() -> None:
    row = entries(Chain((CLIP, NOISE)))[0]
    ratio = 2 * 0.5 / 0.3
    assert row.times == 9
    assert row.claimed == pytest.approx(gaussian_epsilon(ratio, DELTA))
    assert row.composed == pytest.approx(gaussian_epsilon(3 * ratio, DELTA))
    assert row.typical == pytest.approx(gaussian_epsilon(sqrt(2) * ratio, DELTA))  # of 1, 1, 2, 2, 9
    assert "ClipByNorm(bound=0.5" in row.mechanism
    assert "GaussianNoise(std=0.3" in row.mechanism


def test_nobody_took_part() -> None:
    for noise in (NOISE, LaplaceNoise(0.3, rows="all")):
        row = ledger(Chain((CLIP, noise)), components=PARTS, n_items=ITEMS, participations=np.zeros(3, np.int64))[0]
        assert (row.composed, row.times) == (0.0, 0)


def test_delta_is_a_tenth_of_one_user_unless_given() -> None:
    row = ledger(Chain((CLIP, NOISE)), components=PARTS, n_items=ITEMS, participations=np.ones(200, np.int64))[0]
    assert row.delta == pytest.approx(1 / 2000)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, float("nan")])
def test_an_impossible_delta_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="expected a number between 0 and 1"):
        ledger(NOISE, components=PARTS, n_items=ITEMS, participations=USES, delta=delta)


@pytest.mark.parametrize("uses", [np.zeros(0, np.int64), np.array([-1]), np.array([0.5]), np.array([[1]])])
def test_impossible_participations_are_refused(uses: NDArray[np.int64]) -> None:
    with pytest.raises(ConfigError, match=r"expected i64\[users\]"):
        ledger(NOISE, components=PARTS, n_items=ITEMS, participations=uses)


class Counting:
    """A tap that counts the uploads of each client."""

    def __init__(self, users: int) -> None:
        self.count = np.zeros(users, np.int64)

    def receive(self, message: Message) -> None:
        if isinstance(message, Upload):
            self.count[message.update.client.numpy()] += 1

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.heavy
def test_participations_are_those_of_the_run() -> None:
    train = open_data("synthetic")
    train = train.take(train.user % 2 == 0)  # the others are no clients
    protocol = Federated(rounds=3, clients_per_round=30, dropout=0.3, local=LocalTraining(epochs=1))
    tap = Counting(train.n_users)
    train_federated(protocol, MF(4), train, taps=[tap], seed=4, show_progress=False)
    assert tap.count.sum() > 30
    np.testing.assert_array_equal(participations(protocol, train, seed=4), tap.count)


@pytest.mark.heavy
def test_the_accountant_is_imported_when_it_is_needed_only() -> None:
    code = "import sys, recleak.accounting, recleak.canaries; assert 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
