"""Objective perturbation: the law of its noise, that it lasts, and training under it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch
from scipy import stats

from recleak.accounting import ledger
from recleak.defenses.base import Chain, Defense, check
from recleak.defenses.objective_perturbation import ObjectivePerturbation, radial
from recleak.errors import NotFoundError
from recleak.models.base import Model
from recleak.models.components import Normal
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.streams import Streams
from recleak.testing.defenses import DefenseContract, NoiseLaw, assert_same, example_update, zeros_like
from recleak.testing.models import assert_equals_loop, assert_identical, ragged, visits
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.local import Examples
from recleak.training.optimizers import SGD, Adam
from recleak.update import Update


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


class Contract(DefenseContract):
    hook = "gradient"

    def test_noise_is_never_used_twice(self) -> None:
        """Not among clients, items, coordinates and positions in a chain; but the same in every round and step."""
        update = zeros_like(self._example())
        first, later = (
            self._act(update, Streams.simulated(5, round, update.client).at(step)) for round, step in ((0, 1), (3, 2))
        )
        assert_same(first, later, "another round and step")
        seen: set[float] = set()
        for result in (
            first,
            Chain((Defense(), self.defense)).gradient(update, Streams.simulated(5, 0, update.client)),
        ):
            for name in self._noisy(result):
                numbers = result.rows[name].flatten().tolist()
                assert len(set(numbers)) == len(numbers)
                assert not seen & set(numbers)
                seen |= set(numbers)


class TestObjectivePerturbation(Contract):
    """In one dimension the density is that of Laplace noise."""

    defense = ObjectivePerturbation(2.0, 10, user_norm=3.0, components=("item_bias",))
    neutral = ObjectivePerturbation(inf, 10, components=("item_bias",))
    noise = NoiseLaw("laplace", {"item_bias": 3.0 / (2.0 * 10)})


# --- the law ----------------------------------------------------------------------------------------------------------


def rows_of(n: int, width: int) -> Update:
    """One client with n rows of a table."""
    item = torch.arange(n)
    return Update(torch.tensor([4]), {}, {"item": torch.zeros(n, width)}, item, torch.tensor([0, n]), n)


@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_vectors_have_the_density_of_the_norm(width: int) -> None:
    """The length is Gamma(d), the direction uniform: any fixed coordinate of it has the known marginal."""
    update = rows_of(5000, width)
    drawn = radial(update, "item", Streams.simulated(1, 0, update.client)).double()
    length = drawn.norm(dim=1).numpy()
    assert stats.kstest(length, "gamma", args=(width,)).pvalue > 1e-4
    assert stats.kstest(length, "gamma", args=(width, 0, 1.2)).pvalue < 1e-4
    unit = drawn[:, 0].numpy() / length
    if width > 2:  # (1 + x) / 2 is Beta((d - 1) / 2, (d - 1) / 2)
        half = (width - 1) / 2
        assert stats.kstest((1 + unit) / 2, "beta", args=(half, half)).pvalue > 1e-4
    assert abs(stats.spearmanr(length, unit).statistic) < 0.06
    if width > 1:
        assert np.abs(np.corrcoef(drawn.numpy().T) - np.eye(width)).max() < 0.08


def test_every_held_row_gets_its_vector_over_n_and_nothing_else_changes() -> None:
    update = example_update()
    streams = Streams.simulated(5, 3, update.client).at(2)
    defense = ObjectivePerturbation(0.5, 20, residual=2.0, user_norm=1.5)
    got = defense.gradient(update, streams)
    eta = 2.0 * 1.5 / 0.5 * radial(update, "item", streams.lasting())
    torch.testing.assert_close(got.rows["item"], update.rows["item"] + eta / 20)
    for name in ("user", "weight", "bias"):
        assert torch.equal(got.values[name], update.values[name])
    assert torch.equal(got.rows["item_bias"], update.rows["item_bias"])


# --- training ---------------------------------------------------------------------------------------------------------

LOCAL = LocalTraining(epochs=3, batch_size=8, optimizer=SGD(0.1), negatives=2)


def task(model: Model, defense: Defense, training: LocalTraining = LOCAL) -> Task:
    return Task(model, model.components(), training, defense, 3)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.01, keep=True)], ids=["sgd", "adam"])
@pytest.mark.parametrize("model", [MF(6), NCF(8, (16,))], ids=["mf", "ncf"])
def test_training_is_that_of_the_loop(model: Model, optimizer: SGD | Adam) -> None:
    job = task(model, ObjectivePerturbation(1.0, 20), replace(LOCAL, optimizer=optimizer))
    assert_equals_loop(job, ragged(), np.arange(0, 24, 3), rounds=2)


def test_no_noise_changes_no_bit_of_training() -> None:
    one, other = (
        visits(train, task(NCF(8, (16,)), defense), ragged(), np.arange(24))[0]
        for defense in (ObjectivePerturbation(inf, 20), Defense())
    )
    assert_identical(one, other, "epsilon inf")


def test_it_is_the_gradient_of_a_linear_term() -> None:
    """Full batches and plain steps, by hand: v_j moves by the gradient of its loss and by eta_j / n."""
    client, rate = np.array([7]), 0.1
    training = LocalTraining(epochs=1, batch_size=None, optimizer=SGD(rate), negatives=2)
    job = task(MF(6, init=Normal(0.5)), ObjectivePerturbation(1.0, 20), training)
    (noisy,) = visits(train, job, ragged(), client)
    (plain,) = visits(train, replace(job, defense=Defense()), ragged(), client)
    eta = radial(plain.update, "item", Streams.simulated(3, 9, client).within("gradient").lasting())
    apart = noisy.update.rows["item"] - plain.update.rows["item"]
    torch.testing.assert_close(apart, -rate * eta / 20, atol=1e-6, rtol=1e-4)
    held = Examples.of(ragged(), negatives=2).draw(client, 0).item
    assert set(noisy.update.item.tolist()) == set(held.tolist())


@pytest.mark.parametrize("model", [MF(6), NCF(8, (16,))], ids=["mf", "ncf"])
def test_chunks_do_not_matter(model: Model) -> None:
    everyone = np.arange(24)
    job = task(model, ObjectivePerturbation(1.0, 20))
    (whole,) = visits(train, job, ragged(), everyone)
    for places in (everyone[:1], everyone[5:8], everyone[8:]):
        (part,) = visits(train, job, ragged(), places)
        at = torch.from_numpy(places)
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {places}")


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "Got epsilon=0.0"),
        ({"epsilon": nan}, "Got epsilon=nan"),
        ({"examples": 0}, "Got examples=0"),
        ({"residual": 0.0}, "Got residual=0.0"),
        ({"user_norm": inf}, "Got user_norm=inf"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectivePerturbation(**{"epsilon": 1.0, "examples": 10, **change})  # type: ignore[arg-type]


def test_components_and_promises() -> None:
    check(ObjectivePerturbation(1.0, 10), MF(4).components())
    with pytest.raises(NotFoundError, match=r"Unknown component 'itme'\. Did you mean 'item'"):
        check(ObjectivePerturbation(1.0, 10, components=("itme",)), MF(4).components())
    (row,) = ledger(
        ObjectivePerturbation(0.7, 10), components=MF(4).components(), n_items=9, participations=np.array([3])
    )
    assert row.composed is None
    assert "0.7 is claimed" in row.words
