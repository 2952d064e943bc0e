"""Perturbed features: the laws of the two mechanisms, their likelihood ratios, and what training sees of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import exp, inf, nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from recleak.accounting import ledger
from recleak.defenses.base import Chain
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.feature_noise import (
    PerturbedFeatures,
    piecewise,
    piecewise_ends,
    randomized_bits,
    with_categories,
)
from recleak.errors import ConfigError
from recleak.models.components import FanIn
from recleak.models.feature_gcn import FeatureGCN
from recleak.streams import Streams
from recleak.testing import DefenseContract
from recleak.testing.models import assert_equals_loop, ragged
from recleak.training.batches import features_of
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task
from recleak.training.optimizers import SGD


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


class TestPerturbedFeatures(DefenseContract):
    """It acts on features; uploads pass unchanged."""

    defense = PerturbedFeatures(5.0)
    neutral = PerturbedFeatures(inf)


class TestInAChain(DefenseContract):
    defense = Chain((PerturbedFeatures(5.0, ((0, 2),)),))
    neutral = Chain((PerturbedFeatures(inf),))


# --- the piecewise mechanism ------------------------------------------------------------------------------------------

N = 200_000
MIDS = (torch.arange(N, dtype=torch.float64) + 0.5) / N


def density(output: float, value: float, epsilon: float) -> float:
    """Eq. 13 and 14, written down once more."""
    c = (exp(epsilon / 2) + 1) / (exp(epsilon / 2) - 1)
    p = (exp(epsilon) - exp(epsilon / 2)) / (2 * exp(epsilon / 2) + 2)
    low = (c + 1) / 2 * value - (c - 1) / 2
    return p if low <= output <= low + c - 1 else p / exp(epsilon) if abs(output) <= c else 0.0


@pytest.mark.parametrize("epsilon", [0.5, 2.5, 6.0])
@pytest.mark.parametrize("value", [-1.0, -0.3, 0.0, 0.8, 1.0])
def test_piecewise_has_its_density(value: float, epsilon: float) -> None:
    """Against the density of the paper, integrated: it is constant between four ends."""
    choice = torch.from_numpy(np.random.default_rng(1).permutation(MIDS.numpy()))
    got = piecewise(torch.full((N,), value, dtype=torch.float64), epsilon, choice, MIDS)
    c, near = piecewise_ends(epsilon)
    assert float(got.abs().max()) <= c
    low = (c + 1) / 2 * value - (c - 1) / 2
    ends = np.array([-c, low, low + c - 1, c])
    heights = [density(x, value, epsilon) for x in (ends[1:] + ends[:-1]) / 2]
    cdf = np.concatenate([[0], np.cumsum(heights * np.diff(ends))])
    assert cdf[-1] == pytest.approx(1)
    assert near == pytest.approx(exp(epsilon / 2) / (exp(epsilon / 2) + 1))
    pvalue = stats.kstest(got.numpy()[::20], lambda x: np.interp(x, ends, cdf)).pvalue
    assert pvalue > 1e-4
    wrong = piecewise(torch.full((N,), value, dtype=torch.float64), 1.5 * epsilon, choice, MIDS)
    assert stats.kstest(wrong.numpy()[::20], lambda x: np.interp(x, ends, cdf)).pvalue < 1e-4


@pytest.mark.parametrize("epsilon", [0.5, 2.5, 6.0])
def test_piecewise_is_right_on_average(epsilon: float) -> None:
    c, near = piecewise_ends(epsilon)
    for value in (-1.0, -0.4, 0.0, 0.7, 1.0):
        each = torch.full((N,), value, dtype=torch.float64)
        inside = float(piecewise(each, epsilon, torch.ones(N), MIDS).mean())
        outside = float(piecewise(each, epsilon, torch.full((N,), 1e-9), MIDS).mean())
        assert near * inside + (1 - near) * outside == pytest.approx(value, abs=1e-4 * c)


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(0.1, 8))
def test_no_output_is_likelier_than_epsilon_allows(one: float, other: float, epsilon: float) -> None:
    """A histogram of both laws, exact in the limit: an output in a bin, whatever the bin."""
    choice = torch.cat([torch.full((2000,), 1e-9), torch.ones(2000)]).double()
    place = MIDS[:: N // 2000][:2000].repeat(2)
    c, near = piecewise_ends(epsilon)
    weight = torch.cat([torch.full((2000,), 1 - near), torch.full((2000,), near)]).double().numpy() / 2000
    bins = np.linspace(-c, c, 8)
    masses = [
        np.histogram(
            piecewise(torch.full((4000,), x, dtype=torch.float64), epsilon, choice, place), bins, weights=weight
        )[0]
        for x in (one, other)
    ]
    assert masses[0].sum() == pytest.approx(1)
    assert (masses[0] <= exp(epsilon) * (masses[1] + 2 / 2000) + 2 / 2000).all()


def test_two_ends_are_as_far_apart_as_epsilon_allows() -> None:
    """The bound is reached: near its own value an output is e^epsilon times as likely as from the other end."""
    c, _ = piecewise_ends(2.5)
    assert density(c, 1.0, 2.5) == pytest.approx(exp(2.5) * density(c, -1.0, 2.5))
    counts = []
    for value in (1.0, -1.0):
        choice = torch.from_numpy(np.random.default_rng(2).permutation(MIDS.numpy()))
        got = piecewise(torch.full((N,), value, dtype=torch.float64), 2.5, choice, MIDS)
        counts.append(int((got > 1.0).sum()))  # for 1 inside, for -1 outside
    assert counts[0] / counts[1] == pytest.approx(exp(2.5), rel=0.03)


def test_a_huge_epsilon_leaves_values_alone() -> None:
    value = torch.linspace(-1, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(piecewise(value, 90.0, torch.full((5,), 0.5), torch.full((5,), 0.3)), value)


# --- randomized bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.5, 2.5, 6.0])
def test_bits_have_their_chances(epsilon: float) -> None:
    lot = MIDS.float()
    assert float(randomized_bits(torch.ones(N), epsilon, lot).mean()) == pytest.approx(0.5, abs=1e-4)
    assert float(randomized_bits(torch.zeros(N), epsilon, lot).mean()) == pytest.approx(
        1 / (exp(epsilon) + 1), abs=1e-4
    )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.5, 5.0])
def test_one_hot_rows_are_epsilon_apart(epsilon: float) -> None:
    """All outputs of four bits under every one-hot row and under none: the largest ratio is e^epsilon, and reached."""
    flip = 1 / (exp(epsilon) + 1)

    def chance(output: tuple[int, ...], row: NDArray[np.int64]) -> float:
        on = np.where(row == 1, 0.5, flip)
        return float(np.prod(np.where(np.array(output) == 1, on, 1 - on)))

    rows = [*np.eye(4, dtype=np.int64), np.zeros(4, np.int64)]
    ratios = [
        chance(output, one) / chance(output, other)
        for output in product((0, 1), repeat=4)
        for one, other in product(rows, rows)
    ]
    assert max(ratios) == pytest.approx(exp(epsilon))


# --- the whole --------------------------------------------------------------------------------------------------------

GROUPS = ((2, 5), (6, 8))


def example(n: int = 30_000) -> Tensor:
    """Numeric columns 0, 1, 5, 8; two categorical features between."""
    row = torch.tensor([0.5, -1.0, 0, 1, 0, 1.0, 0, 1, -0.2])
    return row.repeat(n, 1)


def drawn(defense: PerturbedFeatures, features: Tensor, seed: int = 0) -> Tensor:
    return defense.features(features, Streams.simulated(seed, 0, torch.arange(len(features))))


@pytest.mark.parametrize(
    ("epsilon", "sampled", "kept"), [(1.0, None, 1), (5.0, None, 2), (7.4, None, 2), (20.0, None, 6), (5.0, 4, 4)]
)
def test_marginal_laws(epsilon: float, sampled: int | None, kept: int) -> None:
    defense, features = PerturbedFeatures(epsilon, GROUPS, sampled), example()
    assert defense.kept(6) == kept
    got, share = drawn(defense, features), epsilon / kept
    present = kept / 6
    sigma = 5 / sqrt(len(got))
    numeric = [0, 1, 5, 8]
    assert ((got[:, numeric] != 0).sum(1) <= kept).all()
    c, _ = piecewise_ends(share)
    assert float(got[:, numeric].abs().max()) <= c * 6 / kept * (1 + 1e-6)
    for column in numeric:  # right on average
        spread = float(got[:, column].std())
        assert float(got[:, column].mean()) == pytest.approx(float(features[0, column]), abs=sigma * spread)
        assert float((got[:, column] != 0).float().mean()) == pytest.approx(present, abs=sigma / 2)
    for column in (2, 3, 4, 6, 7):
        chance = present * (0.5 if features[0, column] else 1 / (exp(share) + 1))
        assert set(got[:, column].tolist()) <= {0.0, 1.0}
        assert float(got[:, column].mean()) == pytest.approx(chance, abs=sigma * sqrt(chance))


def test_exactly_so_many_features_are_kept_and_all_equally_often() -> None:
    numbers = torch.full((20_000, 7), 0.3)
    got = drawn(PerturbedFeatures(5.0, sampled=3), numbers) != 0
    assert (got.sum(1) == 3).all()
    assert torch.allclose(got.float().mean(0), torch.tensor(3 / 7), atol=0.02)
    pairs = float((got[:, 0] & got[:, 1]).float().mean())
    assert pairs == pytest.approx(3 / 7 * 2 / 6, abs=0.015)  # without replacement


def test_columns_are_drawn_independently() -> None:
    got = drawn(PerturbedFeatures(4.0, sampled=3), torch.zeros(30_000, 3))
    assert np.abs(np.corrcoef(got.numpy().T) - np.eye(3)).max() < 0.03


def test_a_client_s_draw_is_its_own_and_inf_changes_nothing() -> None:
    features, defense = example(9), PerturbedFeatures(20.0, GROUPS)
    whole = drawn(defense, features)
    assert torch.equal(defense.features(features[4:5], Streams.simulated(0, 0, torch.tensor([4]))), whole[4:5])
    assert not torch.equal(drawn(defense, features, seed=1), whole)
    assert torch.equal(drawn(PerturbedFeatures(inf, GROUPS), features), features)
    assert defense.features(features, Streams.from_os(9)).shape == features.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "Got epsilon=0.0"),
        ({"epsilon": nan}, "Got epsilon=nan"),
        ({"categorical": ((2, 5), (4, 6))}, "that do not overlap"),
        ({"categorical": ((3, 3),)}, "that do not overlap"),
        ({"categorical": ((-1, 3),)}, "that do not overlap"),
        ({"sampled": 0}, "Got sampled=0"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerturbedFeatures(**{"epsilon": 1.0, **change})  # type: ignore[arg-type]


def test_features_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"Got numeric features from -1 to 1\.5, expected numbers from -1 to 1"):
        drawn(PerturbedFeatures(1.0), torch.tensor([[1.5, -1.0]]))
    with pytest.raises(ConfigError, match="expected numbers from -1 to 1"):
        drawn(PerturbedFeatures(1.0), torch.tensor([[nan]]))
    for row in ([1.0, 1.0], [0.5, 0.0]):
        with pytest.raises(ConfigError, match="Columns 0 to 2 are not one-hot"):
            drawn(PerturbedFeatures(1.0, ((0, 2),)), torch.tensor([row]))
    with pytest.raises(ConfigError, match="Got 2 columns of features, expected enough"):
        drawn(PerturbedFeatures(1.0, ((0, 3),)), torch.zeros(1, 2))


# --- training and the ledger ------------------------------------------------------------------------------------------


def test_training_is_that_of_the_loop_and_every_round_has_the_same_features() -> None:
    model, defense = FeatureGCN(9, 6, (8,), dense_init=FanIn()), PerturbedFeatures(8.0, GROUPS)
    training = LocalTraining(epochs=2, batch_size=8, optimizer=SGD(0.05), negatives=2)
    task = Task(model, model.components(), training, defense, 3, user_features=example(24))
    assert_equals_loop(task, ragged(), np.arange(0, 24, 3), rounds=2)
    client = torch.tensor([3, 7])
    seen = features_of(task, client)
    assert seen is not None
    assert torch.equal(seen, defense.features(example(2), Streams.simulated(3, 0, client).within("features")))


def test_epsilon_is_spent_once_for_all_rounds() -> None:
    given = {"components": FeatureGCN(9).components(), "n_items": 10, "participations": np.array([1, 50])}
    (row,) = ledger(PerturbedFeatures(20.0, GROUPS), **given)  # type: ignore[arg-type]
    assert (row.claimed, row.composed, row.delta, row.times) == (20.0, 20.0, 0.0, 1)
    assert "50 uploads tell no more than one" in row.words
    assert "Not covered: interactions" in row.words
    (none,) = ledger(PerturbedFeatures(inf), **given)  # type: ignore[arg-type]
    assert none.composed is None


def test_categories_of_the_data_are_filled_in_where_none_are_given() -> None:
    given = PerturbedFeatures(5.0, ((0, 2),))
    chain = Chain((ClipByNorm(1.0), PerturbedFeatures(5.0), given))
    assert with_categories(chain, [(3, 5)]) == Chain((ClipByNorm(1.0), PerturbedFeatures(5.0, ((3, 5),)), given))
    assert with_categories(ClipByNorm(1.0), [(3, 5)]) == ClipByNorm(1.0)


# --- Lemma 4.2: a whole row ---------------------------------------------------------------------------------------


def likelihood(out: NDArray[np.float64], row: NDArray[np.float64], share: float, kept: int) -> float:
    """The density of a row with two numbers and a class of three, up to a constant: the sum over what may be kept."""
    c, near = piecewise_ends(share)
    groups = [[0], [1], [2, 3, 4]]
    total = 0.0
    for chosen in product((False, True), repeat=3):
        if sum(chosen) != kept or any(
            out[group].any() and not keep for group, keep in zip(groups, chosen, strict=True)
        ):
            continue
        density = 1.0
        for group, keep in zip(groups, chosen, strict=True):
            if keep and len(group) == 1:
                value, low = out[group[0]] * kept / 3, (c + 1) / 2 * row[group[0]] - (c - 1) / 2
                density *= near / (c - 1) if low <= value <= low + c - 1 else (1 - near) / (c + 1)
            elif keep:
                one = np.where(row[group] > 0, 0.5, 1 / (exp(share) + 1))
                density *= float(np.prod(np.where(out[group] > 0, one, 1 - one)))
        total += density
    return total


@pytest.mark.parametrize(("epsilon", "kept"), [(1.0, 1), (4.0, 2), (6.0, 3)])
def test_a_whole_row_is_epsilon_private(epsilon: float, kept: int) -> None:
    """Lemma 4.2: no output is more than e^epsilon times as likely under one row as under any other, and some are."""
    rng = np.random.default_rng(0)
    classes = np.eye(3)[rng.integers(3, size=400)]
    rows = np.hstack([rng.choice([-1.0, 1.0, 0.3], size=(400, 2)), classes])
    defense = PerturbedFeatures(epsilon, ((2, 5),), sampled=kept)
    drawn = defense.features(torch.from_numpy(rows).float(), Streams.simulated(0, 0, np.arange(400))).double().numpy()
    ratios = []
    for out, row in zip(drawn, rows, strict=True):
        other = np.hstack([rng.choice([-1.0, 1.0], size=2), np.eye(3)[rng.integers(3)]])
        ratios.append(likelihood(out, row, epsilon / kept, kept) / likelihood(out, other, epsilon / kept, kept))
    assert max(ratios) <= exp(epsilon) * (1 + 1e-6)
    assert max(ratios) > exp(0.8 * epsilon)  # the budget is used
    assert np.mean(ratios) > 1.05  # the true row is likelier than another, so this measures something
