"""The compiled loop of products and perceptrons under SGD against the general way, and against the oracle's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recleak import kernels_sgd
from recleak.defenses.adaptive_noise import AdaptiveNoise
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.objective_perturbation import ObjectivePerturbation, linear_terms
from recleak.defenses.proximal import Proximal
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Normal, sharing
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.ncf import NCF
from recleak.streams import Streams
from recleak.testing.models import assert_close, assert_equals_loop, assert_identical, ragged, visits
from recleak.training import visit as visit_module
from recleak.training.chunks import one_thread
from recleak.training.cohort import DivergedError, LocalTraining, Task, Trained, train
from recleak.training.local import LocalData
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.training.visit import Visit
from recleak.update import Update

SMALL = LocalTraining(epochs=3, batch_size=8, optimizer=SGD(0.1), negatives=2, resample=True)
WIDE = Normal(0.5)
MODELS: dict[str, Model] = {
    "mf": MF(6, init=WIDE),
    "mf with biases": MF(5, biases=True, init=WIDE),
    "ncf": NCF(6, (9,), init=WIDE),
    "deep ncf": NCF(8, (16, 7, 5), init=WIDE),
    "lightgcn": LightGCN(6, init=WIDE),
    "lightgcn, perceptron": LightGCN(6, score="mlp", hidden=(9, 5), init=WIDE),
}
STARS: dict[str, Model] = {
    "sum": LightGCN(5, 3, "sum", init=WIDE),
    "two layers": LightGCN(6, 2, init=WIDE),
    "mean": LightGCN(6, 2, "mean", "mlp", (9,), "mean", init=WIDE),
    "items stay": LightGCN(6, 2, "mean", "dot", (), "mean", propagate_items=False, init=WIDE),
}


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The epochs that the compiled loop was called for."""
    epochs: list[tuple[int, int]] = []
    real = kernels_sgd.sgd_epochs

    def counted(*arguments: object) -> None:
        first, last = arguments[5:7]
        assert isinstance(first, int)
        assert isinstance(last, int)
        epochs.append((first, last))
        real(*arguments)

    monkeypatch.setattr(kernels_sgd, "sgd_epochs", counted)
    return epochs


@contextmanager
def stepwise() -> Iterator[None]:
    """All visits go the general way."""

    def refuse(visit: Visit) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visit_module, "walk_sgd", refuse)
        yield


def task_of(
    model: Model, training: LocalTraining, defense: Defense | None = None, shared: dict[str, bool] | None = None
) -> Task:
    return Task(model, sharing(model.components(), shared or {}), training, defense or Defense(), 3)


def noise_for(model: Model) -> Defense:
    """The epoch hook of APM, with levels for what the model shares."""
    parts = {"head" if part.name.startswith("head.") else part.name for part in model.components() if part.shared}
    return AdaptiveNoise(dict.fromkeys(parts, 1.0), bound=0.7, rows="touched")


def compare(
    model: Model,
    training: LocalTraining = SMALL,
    defense: Defense | None = None,
    shared: dict[str, bool] | None = None,
    rounds: int = 1,
) -> None:
    """A third of 24 ragged clients: the cohort, the oracle, and the cohort without the loop."""
    task, client = task_of(model, training, defense, shared), np.arange(0, 24, 3)
    got = assert_equals_loop(task, ragged(), client, rounds=rounds)
    with stepwise():
        general = visits(train, task, ragged(), client, rounds=rounds)
    for one, other in zip(got, general, strict=True):
        assert_same(one, other)


def assert_same(one: Trained, other: Trained) -> None:
    """To float tolerance."""
    assert_close(one.update, other.update, atol=1e-5)
    assert_close(one.kept, other.kept, atol=1e-5)
    torch.testing.assert_close(one.loss, other.loss, atol=1e-5, rtol=1e-4)
    assert torch.equal(one.positives, other.positives)
    assert one.steps == other.steps


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [*MODELS.values(), *STARS.values()], ids=[*MODELS, *STARS])
def test_models(model: Model, calls: list[tuple[int, int]]) -> None:
    compare(model)
    assert calls == [(0, 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": None},
        {"batch_size": 1, "epochs": 1},
        {"batch_size": 7, "shuffle": False},
        {"batch_size": 40},
        {"epochs": 12},
        {"negatives": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mf with biases", "deep ncf", "lightgcn, perceptron"])
def test_batches(name: str, change: dict[str, int], calls: list[tuple[int, int]]) -> None:
    compare(MODELS[name], replace(SMALL, **change))  # type: ignore[arg-type]
    assert calls


@pytest.mark.parametrize("model", [*MODELS.values(), *STARS.values()], ids=[*MODELS, *STARS])
def test_the_epoch_hook_sees_and_changes_what_clients_share(model: Model, calls: list[tuple[int, int]]) -> None:
    compare(model, SMALL, noise_for(model), rounds=2)
    assert calls == 2 * [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_part_has_its_rate(model: Model, calls: list[tuple[int, int]]) -> None:
    names = [part.name for part in model.components()]
    rates = dict(zip(names, np.linspace(0.02, 0.3, len(names)).tolist(), strict=True))
    compare(model, replace(SMALL, optimizer=SGD(0.0, rates)))
    for name in names:  # one part alone moves
        compare(model, replace(SMALL, epochs=1, optimizer=SGD(0.0, {name: 0.3})))
    assert len(calls) == 1 + len(names)


@pytest.mark.parametrize("shared", [{"item": False}, {"user": True}], ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_is_kept(model: Model, shared: dict[str, bool], calls: list[tuple[int, int]]) -> None:
    compare(model, SMALL, None, shared, rounds=2)
    assert len(calls) == 2


@dataclass(frozen=True)
class BothLabels(Defense):
    """Every client trains its first two negatives as its own, too: an item with both labels, which is a neighbor."""

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        item, label = [], []
        for low, high in zip(data.offset, data.offset[1:], strict=False):
            fake = data.item[low:high][data.label[low:high] == 0][:2]
            item.append(np.concatenate([data.item[low:high], fake]))
            label.append(np.concatenate([data.label[low:high], np.ones(len(fake), np.float32)]))
        offset = np.concatenate([[0], np.cumsum([len(each) for each in item])])
        return LocalData(data.client, np.concatenate(item), np.concatenate(label), None, offset, data.n_items)


@pytest.mark.parametrize(
    "defense",
    [BothLabels(), Chain((ClipByNorm(0.2), GaussianNoise(0.01))), Proximal(0.0)],
    ids=lambda defense: type(defense).__name__,
)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_other_hooks(model: Model, defense: Defense, calls: list[tuple[int, int]]) -> None:
    compare(model, SMALL, defense)
    assert len(calls) == 1


# --- objective perturbation -------------------------------------------------------------------------------------------

PERTURBED = ObjectivePerturbation(0.5, 20)
CHAINS: dict[str, Defense] = {
    "alone": PERTURBED,
    "second": Chain((ClipByNorm(1.0), PERTURBED)),
    "inner": Chain((Defense(), Chain((BothLabels(), PERTURBED)), GaussianNoise(0.01))),
    "twice": Chain((PERTURBED, PERTURBED)),
    "one adds nothing": Chain((ObjectivePerturbation(inf, 20), PERTURBED)),
}


@pytest.mark.parametrize("defense", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_objective_perturbation(model: Model, defense: Defense, calls: list[tuple[int, int]]) -> None:
    compare(model, SMALL, defense)
    assert calls == [(0, 3)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_objective_perturbation_and_an_epoch_hook(model: Model, calls: list[tuple[int, int]]) -> None:
    compare(model, SMALL, Chain((noise_for(model), PERTURBED)), rounds=2)
    assert calls == 2 * [(0, 1), (1, 2), (2, 3)]


def test_the_terms_have_the_streams_of_the_hook() -> None:
    """Their draws are those that the hook adds."""
    item = torch.arange(7)
    rows = {"item": torch.zeros(7, 3)}
    update = Update(torch.tensor([2, 5]), {}, rows, item, torch.tensor([0, 4, 7]), 7)
    streams = Streams.simulated(3, 1, update.client).within("gradient")
    for defense in CHAINS.values():
        terms = linear_terms(defense, streams)
        assert terms is not None
        total = sum((each.vectors(update, "item", within) for each, within in terms), torch.zeros(7, 3))
        torch.testing.assert_close(total, defense.gradient(update, streams.at(9)).rows["item"])
        assert bool(total.any())
    assert linear_terms(Defense(), streams) == ()
    assert linear_terms(ObjectivePerturbation(inf, 5), streams) == ()
    assert linear_terms(Chain((PERTURBED, ScaledGradients())), streams) is None
    assert linear_terms(Louder(1.0, 5), streams) is None


# --- any cohort -------------------------------------------------------------------------------------------------------


@st.composite
def cohorts(draw: st.DrawFn) -> LocalData:
    """Any examples: items that repeat with either label, clients without an own item."""
    n_items = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    total = sum(sizes)
    item = draw(st.lists(st.integers(0, n_items - 1), min_size=total, max_size=total))
    label, own = (draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)) for _ in range(2))
    client = draw(st.permutations(range(8)))[: len(sizes)]
    return LocalData(
        np.array(client),
        np.array(item),
        np.array(label, np.float32),
        None,
        np.concatenate([[0], np.cumsum(sizes)]),
        n_items,
        draw(st.sampled_from([None, np.array(own, bool)])),
    )


@settings(max_examples=60, deadline=None)
@given(
    data=cohorts(),
    model=st.sampled_from([*MODELS.values(), *STARS.values(), MF(1), NCF(1, (1,))]),
    hooked=st.booleans(),
    perturbed=st.booleans(),
    batch_size=st.sampled_from([None, 1, 3, 33]),
    epochs=st.integers(1, 3),
)
def test_any_cohort(
    data: LocalData, model: Model, hooked: bool, perturbed: bool, batch_size: int | None, epochs: int
) -> None:
    training = replace(SMALL, epochs=epochs, batch_size=batch_size, optimizer=SGD(0.03))
    defense = Chain((noise_for(model),) * hooked + (PERTURBED,) * perturbed)
    received = first_params(model.components(), 8, data.n_items, 3)
    kept = ClientStore(model.components(), training.optimizer, 8, data.n_items, 3).read(data.client)
    task = task_of(model, training, defense)
    with one_thread():
        one = train(task, received, kept, data, 4)
        with stepwise():
            other = train(task, received, kept, data, 4)
    assert_same(one, other)


# --- a client by itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("kind", ["plain", "epoch hook", "perturbed"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_bit_depends_on_the_others(
    model: Model, kind: str, batch_size: int | None, calls: list[tuple[int, int]]
) -> None:
    defense = {"plain": Defense(), "epoch hook": noise_for(model), "perturbed": PERTURBED}[kind]
    task, everyone = task_of(model, replace(SMALL, batch_size=batch_size), defense), np.arange(24)
    whole = visits(train, task, ragged(), everyone)[0]
    assert calls
    for order in (everyone[:1], everyone[9:10], everyone[5:8], everyone[8:]):
        at = torch.from_numpy(order)
        part = visits(train, task, ragged(), order)[0]
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {order}")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_is_handed_over_stays_as_it_is(model: Model, calls: list[tuple[int, int]]) -> None:
    task, everyone = task_of(model, SMALL, Chain((noise_for(model), PERTURBED))), np.arange(24)
    received = first_params(task.components, 24, 24, 3)
    kept = ClientStore(task.components, SMALL.optimizer, 24, 24, 3).read(everyone)
    item = np.concatenate([np.arange(c, c + 3) % 24 for c in everyone])
    label = np.tile(np.array([1, 0, 0], np.float32), 24)
    data = LocalData(everyone, item, label, None, 3 * np.arange(25), 24)
    copies = ({name: value.clone() for name, value in received.items()}, kept.map(lambda _, value, __: value.clone()))
    results = [train(task, received, kept, data, 0) for _ in range(2)]
    assert calls
    assert_identical(results[1], results[0], "a second time")
    assert all(torch.equal(received[name], value) for name, value in copies[0].items())
    assert all(torch.equal(kept.values[name], value) for name, value in copies[1].values.items())
    assert np.array_equal(label, np.tile([1, 0, 0], 24))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_divergence_is_an_error(model: Model, calls: list[tuple[int, int]]) -> None:
    with pytest.raises(DivergedError):
        visits(train, task_of(model, replace(SMALL, optimizer=SGD(1e30))), ragged(), np.arange(24))
    assert calls


# --- what has no compiled loop ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledGradients(Defense):
    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, _: 0.5 * tensor)


@dataclass(frozen=True)
class Louder(ObjectivePerturbation):
    """Computes something else than its parent."""

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return super().gradient(super().gradient(gradient, streams), streams)


@dataclass(frozen=True)
class ReversedMF(MF):
    """Computes something else than its parent, as the next two."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return -super().logits(params, batch)


@dataclass(frozen=True)
class ReversedNCF(NCF):
    def logits(self, params: Params, batch: Batch) -> Tensor:
        return -super().logits(params, batch)


@dataclass(frozen=True)
class ReversedGCN(LightGCN):
    def logits(self, params: Params, batch: Batch) -> Tensor:
        return -super().logits(params, batch)


@pytest.mark.parametrize(
    ("model", "training", "defense"),
    [
        (ReversedMF(6), SMALL, Defense()),
        (ReversedNCF(6, (9,)), SMALL, Defense()),
        (ReversedGCN(6), SMALL, Defense()),
        (ReversedGCN(6, score="mlp", hidden=(9,)), SMALL, Defense()),
        (GMF(6), SMALL, Defense()),
        (NCF(6, ()), SMALL, Defense()),
        (NCF(6, (9,), bounded=True), SMALL, Defense()),
        *(
            (model, training, Defense())
            for model in (MF(6), NCF(6, (9,)), LightGCN(6))
            for training in (
                replace(SMALL, loss="bpr"),
                replace(SMALL, loss="taylor"),
                replace(SMALL, optimizer=Adam(0.01)),
                replace(SMALL, optimizer=SGD(0.1, momentum=0.9)),
                replace(SMALL, optimizer=SGD(0.1, weight_decay=0.1)),
                replace(SMALL, optimizer=SGD(0.1, keep=True)),
            )
        ),
        *(
            (model, SMALL, defense)
            for model in (MF(6), NCF(6, (9,)), LightGCN(6))
            for defense in (
                Proximal(0.2, "squared"),
                ScaledGradients(),
                Louder(1.0, 20),
                Chain((PERTURBED, ScaledGradients())),
            )
        ),
        (MF(6, biases=True), SMALL, ObjectivePerturbation(1.0, 20, components=("item", "item.bias"))),
    ],
    ids=str,
)
def test_the_rest_goes_the_general_way(
    model: Model, training: LocalTraining, defense: Defense, calls: list[tuple[int, int]]
) -> None:
    assert_equals_loop(task_of(model, replace(training, epochs=1), defense), ragged(), np.arange(0, 24, 8))
    assert calls == []
