"""The compiled loops of perceptrons with clipped examples against the general way (the oracle: `test_dp_sgd`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import kernels_clipped
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.dp_sgd import DPSGD, ClippedMeanNoise, noise_terms
from recleak.defenses.labels import RandomizedLabels
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.sharing import Share, ShareLess
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Normal
from recleak.models.ncf import NCF
from recleak.streams import Streams
from recleak.testing.models import assert_close, assert_identical, ragged, visits
from recleak.training import per_example
from recleak.training import visit as visit_module
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.optimizers import SGD, Adam
from recleak.update import Update

WIDE = Normal(0.5)
MODELS: dict[str, Model] = {"ncf": NCF(6, (9,), init=WIDE), "deep ncf": NCF(8, (16, 7, 5), init=WIDE)}
FRESH = LocalTraining(epochs=3, batch_size=8, optimizer=Adam(0.02, epsilon=1e-4), negatives=2, resample=True)
KEEP = replace(FRESH, optimizer=Adam(0.02, epsilon=1e-4, keep=True))
NOISY = DPSGD(0.7, 0.3)
SOME = np.arange(0, 24, 3)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled loops that were called."""
    names: list[str] = []

    def counted(name: str) -> None:
        real = getattr(kernels_clipped, name)

        def call(*arguments: object) -> None:
            names.append(name)
            real(*arguments)

        monkeypatch.setattr(kernels_clipped, name, call)

    counted("noisy_visits")
    counted("clipped_sums")
    return names


@contextmanager
def general() -> Iterator[None]:
    """All visits go step by step, and examples are differentiated one by one."""

    def refuse(*_: object) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visit_module, "walk_clipped", refuse)
        patch.setattr(per_example, "sum_of_clipped", refuse)
        yield


def task_of(model: Model, training: LocalTraining, defense: Defense) -> Task:
    return Task(model, defense.sharing(model.components()), training, defense, 3)


def compare(model: Model, training: LocalTraining, defense: Defense, rounds: int = 1) -> None:
    """A third of 24 ragged clients, with and without the loops."""
    task = task_of(model, training, defense)
    got = visits(train, task, ragged(), SOME, rounds=rounds)
    with general():
        expected = visits(train, task, ragged(), SOME, rounds=rounds)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.update, other.update, atol=2e-5)
        assert_close(one.kept, other.kept, atol=2e-5)
        torch.testing.assert_close(one.loss, other.loss, atol=1e-5, rtol=1e-4)
        assert torch.equal(one.positives, other.positives)
        assert one.steps == other.steps
        assert len(one.update.item) == (24 * len(SOME) if one.update.rows else 0), "every row is sent"


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [FRESH, KEEP], ids=["fresh", "kept"])
@pytest.mark.parametrize("defense", [DPSGD(0.0, 0.05), DPSGD(0.0, 1e6), NOISY], ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models(model: Model, defense: Defense, training: LocalTraining, calls: list[str]) -> None:
    compare(model, training, defense, rounds=2)
    assert calls == 2 * ["noisy_visits"]


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": None},
        {"batch_size": 1, "epochs": 1},
        {"batch_size": 7, "shuffle": False},
        {"batch_size": 40, "epochs": 8},
        {"negatives": 9},
        {"optimizer": Adam(0.02, epsilon=1e-4, weight_decay=0.1)},
        {"optimizer": Adam(0.0, {"user": 0.05, "item": 0.02, "head.2.weight": 0.01, "head.1.bias": 0.03})},
    ],
    ids=str,
)
def test_training(change: dict[str, Any], calls: list[str]) -> None:
    compare(MODELS["deep ncf"], replace(FRESH, **change), NOISY)
    assert set(calls) == {"noisy_visits"}


@pytest.mark.parametrize(
    "defense",
    [
        Chain((Share(), NOISY)),
        Chain((DPSGD(0.5, 0.3), DPSGD(1.0, 0.2))),
        Chain((DPSGD(0.0, 0.1), Chain((DPSGD(0.5, 0.3),)))),
        Chain((ShareLess(("item",)), NOISY)),
        Chain((RandomizedLabels(1.0), NOISY, ClipByNorm(1.0), GaussianNoise(0.01, rows="all"))),
    ],
    ids=["users sent", "two", "nested", "rows kept", "before and after"],
)
def test_chains(defense: Defense, calls: list[str]) -> None:
    compare(MODELS["ncf"], KEEP, defense, rounds=2)
    assert calls == 2 * ["noisy_visits"]


@dataclass(frozen=True)
class Halved(Defense):
    """A hook on gradients."""

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, owner: 0.5 * tensor)


@dataclass(frozen=True)
class Wider(DPSGD):
    """It may do something else to the sum, as here."""

    def batch_sum(self, total: Update, streams: Streams) -> Update:
        return super().batch_sum(total.map(lambda name, tensor, owner: 2 * tensor), streams)


@pytest.mark.parametrize(
    ("training", "defense"),
    [
        (FRESH, Chain((Halved(), NOISY))),
        (KEEP, Chain((NOISY, ClippedMeanNoise(0.02, 0.1)))),
        (FRESH, Chain((Proximal(0.3, "squared"), NOISY))),
        (FRESH, Wider(0.7, 0.3)),
        (replace(FRESH, optimizer=Adam(0.01, accumulate=True)), NOISY),
        (replace(FRESH, optimizer=SGD(0.1)), NOISY),
        (replace(FRESH, optimizer=SGD(0.1, momentum=0.9, weight_decay=0.1), batch_size=None), NOISY),
        (replace(FRESH, turns=(("head",), ("item", "user"))), NOISY),
    ],
    ids=["gradient", "clipped mean", "penalty", "subclass", "accumulated", "sgd", "momentum", "turns"],
)
def test_sums_alone_where_steps_are_others(training: LocalTraining, defense: Defense, calls: list[str]) -> None:
    compare(MODELS["deep ncf"], training, defense)
    assert set(calls) == {"clipped_sums"}


# --- no bit more than a client's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 7, None])
@pytest.mark.parametrize("defense", [NOISY, Chain((Halved(), NOISY))], ids=["visits", "sums"])
def test_no_bit_depends_on_the_chunk(defense: Defense, batch_size: int | None) -> None:
    everyone = np.arange(24)
    task = task_of(NCF(16, (32, 8)), replace(KEEP, batch_size=batch_size), defense)
    whole = visits(train, task, ragged(), everyone, rounds=2)
    for places in (everyone[:1], everyone[5:8], everyone[8:]):
        part, at = visits(train, task, ragged(), places, rounds=2), torch.from_numpy(places)
        for one, other in zip(part, whole, strict=True):
            positives = other.positives[at]
            expected = Trained(other.update.select(at), other.kept.select(at), other.loss[at], positives, one.steps)
            assert_identical(one, expected, f"clients {places}")


def test_noise_does_not_depend_on_how_a_table_is_cut() -> None:
    """With a clip of next to nothing all is noise, and the first step of Adam is its sign: that of the general way."""
    training = LocalTraining(1, None, Adam(1.0, epsilon=1e-12), negatives=2)
    data = ragged(n_items=3 * kernels_clipped._ROWS + 5)
    task = task_of(NCF(8, (16,)), training, DPSGD(1.0, 1e-6))
    (got,) = visits(train, task, data, SOME)
    with general():
        (expected,) = visits(train, task, data, SOME)
    assert_close(got.update, expected.update, atol=1e-3)
    assert 0.4 < float((got.update.rows["item"] > 0).float().mean()) < 0.6


# --- what a loop does not know ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubled(NCF):
    """It computes something else."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return 2 * super().logits(params, batch)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        (NCF(6, (9,), bounded=True), FRESH),
        (Doubled(6, (9,), init=WIDE), FRESH),
        (NCF(6, (), init=WIDE), FRESH),
        (MODELS["ncf"], replace(FRESH, loss="bpr")),
        (MODELS["ncf"], replace(FRESH, loss="taylor")),
    ],
    ids=["bounded", "subclass", "no hidden layer", "bpr", "taylor"],
)
def test_the_rest_goes_the_general_way(model: Model, training: LocalTraining, calls: list[str]) -> None:
    visits(train, task_of(model, training, NOISY), ragged(), SOME)
    assert not calls


def test_a_device_draws_from_the_operating_system(calls: list[str]) -> None:
    task = replace(task_of(MODELS["ncf"], FRESH, NOISY), on_device=True)
    (one,), (other,) = (visits(train, task, ragged(), SOME) for _ in range(2))
    assert set(calls) == {"clipped_sums"}
    assert not torch.equal(one.update.rows["item"], other.update.rows["item"])
    calls.clear()
    visits(train, replace(task, defense=DPSGD(0.0, 0.3)), ragged(), SOME)
    assert calls == ["noisy_visits"]  # there is nothing to draw


def test_noise_is_that_of_dp_sgd_and_of_nothing_else() -> None:
    streams = Streams.simulated(1, 2, np.arange(3))
    assert noise_terms(Defense(), streams) == ()
    assert noise_terms(DPSGD(0.0), streams) == ()
    assert noise_terms(DPSGD(1.5, 2.0), streams) == ((3.0, streams),)
    found = noise_terms(Chain((ClipByNorm(1.0), Chain((DPSGD(0.5, 4.0),)), DPSGD(1.0, 1.0))), streams)
    assert found is not None
    assert [(std, each.path) for std, each in found] == [(2.0, ("1", "0")), (1.0, ("2",))]
    for other in (Wider(1.0), Halved(), ClippedMeanNoise()):
        assert noise_terms(Chain((DPSGD(1.0), other)), streams) is None


def test_an_example_that_is_not_finite_counts_for_nothing() -> None:
    rng, widths = np.random.default_rng(0), np.array([8, 6, 5, 1])
    table = rng.normal(size=(9, 4)).astype(np.float32)
    params = rng.normal(size=(1, 4 + 8 * 6 + 6 + 6 * 5 + 5 + 5 + 1)).astype(np.float32)
    table[3] = 3e38  # a hidden layer overflows

    def sums(row: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        of_rows, of_params = np.zeros_like(table), np.empty_like(params)
        label, weight = np.ones((1, 4), np.float32), np.array([[0.25] * len(row) + [0.0] * (4 - len(row))], np.float32)
        rows = np.array([row + [0] * (4 - len(row))])
        loss = np.zeros(1, np.float32)
        kernels_clipped.clipped_sums(rows, label, weight, table, params, widths, 0.3, of_rows, of_params, loss)
        return of_rows, of_params

    for got, expected in zip(sums([1, 3, 2, 5]), sums([1, 2, 5]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
        assert np.abs(expected).max() > 0.01
