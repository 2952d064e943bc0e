"""The compiled loop of APM's graph model against the general way, and against the oracle's loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from recleak import kernels_gcn
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.models.base import Batch, Params
from recleak.models.components import Constant, FanIn, Normal, sharing
from recleak.models.feature_gcn import FeatureGCN
from recleak.streams import Streams
from recleak.testing.models import assert_close, assert_equals_loop, assert_identical, ragged, visits
from recleak.training.chunks import one_thread
from recleak.training.cohort import DivergedError, LocalTraining, Task, Trained, train
from recleak.training.local import LocalData
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.update import Update

FEATURES = 5
SMALL = LocalTraining(epochs=3, batch_size=8, optimizer=SGD(0.1), negatives=2, resample=True)
GCN = FeatureGCN(FEATURES, 6, (9,), dense_init=FanIn())


@dataclass(frozen=True)
class Stepwise(FeatureGCN):
    """The same model; but a subclass may compute something else, so its visits go the general way."""


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The epochs that the compiled loop was called for."""
    epochs: list[tuple[int, int]] = []
    real = kernels_gcn.feature_gcn_epochs

    def counted(*arguments: object) -> None:
        first, last = arguments[5:7]
        assert isinstance(first, int)
        assert isinstance(last, int)
        epochs.append((first, last))
        real(*arguments)

    monkeypatch.setattr(kernels_gcn, "feature_gcn_epochs", counted)
    return epochs


def features(n_users: int = 24) -> Tensor:
    return torch.randn(n_users, FEATURES, generator=torch.Generator().manual_seed(0))


def task_of(
    model: FeatureGCN, training: LocalTraining, defense: Defense | None = None, shared: dict[str, bool] | None = None
) -> Task:
    components = sharing(model.components(), shared or {})
    return Task(model, components, training, defense or Defense(), 3, model.item_features(24), features())


def stepwise(model: FeatureGCN) -> Stepwise:
    return Stepwise(**{part.name: getattr(model, part.name) for part in fields(model)})


def compare(
    model: FeatureGCN,
    training: LocalTraining = SMALL,
    defense: Defense | None = None,
    shared: dict[str, bool] | None = None,
    rounds: int = 1,
) -> None:
    """A third of 24 ragged clients: the cohort, the oracle, and the cohort of a subclass."""
    client = np.arange(0, 24, 3)
    got = assert_equals_loop(task_of(model, training, defense, shared), ragged(), client, rounds=rounds)
    general = visits(train, task_of(stepwise(model), training, defense, shared), ragged(), client, rounds=rounds)
    for one, other in zip(got, general, strict=True):
        assert_same(one, other)


def assert_same(one: Trained, other: Trained) -> None:
    """To float tolerance."""
    assert_close(one.update, other.update, atol=1e-5)
    assert_close(one.kept, other.kept, atol=1e-5)
    torch.testing.assert_close(one.loss, other.loss, atol=1e-5, rtol=1e-4)
    assert torch.equal(one.positives, other.positives)
    assert one.steps == other.steps


# --- hooks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoisyEpochs(Defense):
    """Goes half way back after each epoch, then adds noise that depends on the epoch."""

    scale: float = 0.05

    def epoch(self, moved: Update, streams: Streams) -> Update:
        return moved.map(lambda name, tensor, _: 0.5 * tensor + self.scale * streams.laplace_like(moved, name))


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


@dataclass(frozen=True)
class BlurredFeatures(Defense):
    def features(self, features: Tensor, streams: Streams) -> Tensor:
        position = torch.arange(len(features))
        return features + streams.normal("blur", position, torch.zeros_like(position), tuple(features.shape[1:]))


@dataclass(frozen=True)
class ScaledGradients(Defense):
    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, _: 0.5 * tensor)


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["bce", "taylor"])
@pytest.mark.parametrize("bounded", [False, True], ids=["", "bounded"])
@pytest.mark.parametrize("hidden", [(9,), (7, 3, 5), (16, 8)], ids=str)
def test_heads_and_losses(hidden: tuple[int, ...], bounded: bool, loss: str, calls: list[tuple[int, int]]) -> None:
    training = replace(SMALL, loss="taylor" if loss == "taylor" else "bce")
    compare(replace(GCN, hidden=hidden, bounded=bounded), training)
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
def test_batches(change: dict[str, int], calls: list[tuple[int, int]]) -> None:
    training = replace(SMALL, **change)  # type: ignore[arg-type]
    compare(GCN, training, NoisyEpochs())
    widths = 7 if training.batch_size is None else 1  # clients with batches of other widths are visited apart
    assert calls[: training.epochs] == [(epoch, epoch + 1) for epoch in range(training.epochs)]
    assert training.epochs <= len(calls) <= training.epochs * widths


def test_every_part_has_its_rate(calls: list[tuple[int, int]]) -> None:
    names = [part.name for part in GCN.components()]
    rates = dict(zip(names, np.linspace(0.02, 0.3, len(names)).tolist(), strict=True))
    compare(GCN, replace(SMALL, optimizer=SGD(0.0, rates)))
    for name in names:  # one part alone moves
        compare(GCN, replace(SMALL, epochs=1, optimizer=SGD(0.0, {name: 0.3})))
    assert len(calls) == 1 + len(names)


@pytest.mark.parametrize("shared", [{"item": False}, {"user.encoder": False, "head.1.weight": False}], ids=str)
def test_what_is_kept(shared: dict[str, bool], calls: list[tuple[int, int]]) -> None:
    compare(GCN, SMALL, NoisyEpochs(), shared, rounds=2)
    assert len(calls) == 6


@pytest.mark.parametrize(
    "defense",
    [
        NoisyEpochs(),
        BothLabels(),
        BlurredFeatures(),
        Chain((ClipByNorm(0.2), GaussianNoise(0.01))),
        Chain((BothLabels(), BlurredFeatures(), NoisyEpochs(), ClipByNorm(1.0))),
    ],
    ids=lambda defense: type(defense).__name__,
)
def test_hooks(defense: Defense, calls: list[tuple[int, int]]) -> None:
    compare(GCN, SMALL, defense, rounds=2)
    assert len(calls) in (2, 6)


@pytest.mark.parametrize("bounded", [False, True], ids=["", "bounded"])
def test_units_at_the_bounds_of_their_clamp(bounded: bool) -> None:
    """All that the head reads and computes is 0, 1/2 or 1 at the first step: exactly where the slope changes."""
    model = FeatureGCN(FEATURES, 2, (2,), init=Constant(0.0), dense_init=Constant(0.5), bounded=bounded)
    compare(model, replace(SMALL, batch_size=None, epochs=1))


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


@settings(max_examples=40, deadline=None)
@given(
    data=cohorts(),
    model=st.sampled_from([GCN, FeatureGCN(FEATURES, 1, (1,)), FeatureGCN(FEATURES, 4, (5, 3), init=Normal(0.5))]),
    defense=st.sampled_from([Defense(), NoisyEpochs()]),
    batch_size=st.sampled_from([None, 1, 3, 33]),
    epochs=st.integers(1, 3),
)
def test_any_cohort(data: LocalData, model: FeatureGCN, defense: Defense, batch_size: int | None, epochs: int) -> None:
    training = replace(SMALL, epochs=epochs, batch_size=batch_size, optimizer=SGD(0.03))
    received = first_params(model.components(), 8, data.n_items, 3)
    kept = ClientStore(model.components(), training.optimizer, 8, data.n_items, 3).read(data.client)
    tasks = (task_of(each, training, defense) for each in (model, stepwise(model)))
    with one_thread():
        one, other = (train(task, received, kept, data, 4) for task in tasks)
    assert_same(one, other)


POLYNOMIALS: dict[str, Defense] = {
    "step": FunctionalMechanism(20.0, 40),
    "never": FunctionalMechanism(20.0, 40, redraw="never"),
    "named": FunctionalMechanism(20.0, 40, weight="head.3.weight"),
    "in a chain": Chain((BlurredFeatures(), FunctionalMechanism(20.0, 40), NoisyEpochs())),
}


@pytest.mark.parametrize("defense", POLYNOMIALS)
def test_random_polynomials(defense: str, calls: list[tuple[int, int]]) -> None:
    model, training = replace(GCN, hidden=(7, 5), bounded=True), replace(SMALL, loss="taylor")
    compare(model, training, POLYNOMIALS[defense], rounds=2)
    assert calls == 2 * [(0, 1), (1, 2), (2, 3)]


# --- a client by itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [GCN, FeatureGCN(FEATURES, 8, (16, 7), dense_init=FanIn())], ids=["odd", "even"])
@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize(
    "defense", [Defense(), NoisyEpochs(), FunctionalMechanism(20.0, 40)], ids=["plain", "hook", "polynomial"]
)
def test_no_bit_depends_on_the_others(
    defense: Defense, batch_size: int | None, model: FeatureGCN, calls: list[tuple[int, int]]
) -> None:
    model = replace(model, bounded=isinstance(defense, FunctionalMechanism))
    task, everyone = task_of(model, replace(SMALL, batch_size=batch_size), defense), np.arange(24)
    whole = visits(train, task, ragged(), everyone)[0]
    assert calls
    order: NDArray[np.int64]
    for order in (everyone[:1], everyone[9:10], everyone[5:8], everyone[8:]):
        at = torch.from_numpy(order)
        part = visits(train, task, ragged(), order)[0]
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {order}")


@pytest.mark.parametrize("defense", [Defense(), NoisyEpochs()], ids=["plain", "hook"])
def test_what_is_handed_over_stays_as_it_is(defense: Defense, calls: list[tuple[int, int]]) -> None:
    task, everyone = task_of(GCN, SMALL, defense, {"user.encoder": False}), np.arange(24)
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
    assert task.user_features is not None
    assert torch.equal(task.user_features, features())
    assert np.array_equal(label, np.tile([1, 0, 0], 24))


def test_divergence_is_an_error(calls: list[tuple[int, int]]) -> None:
    with pytest.raises(DivergedError):
        visits(train, task_of(GCN, replace(SMALL, optimizer=SGD(1e30))), ragged(), np.arange(24))
    assert calls


# --- what has no compiled loop ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reversed(FeatureGCN):
    """Computes something else than its parent."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return -super().logits(params, batch)


@pytest.mark.parametrize(
    ("model", "training", "defense"),
    [
        (stepwise(GCN), SMALL, Defense()),
        (Reversed(FEATURES, 6, (9,)), SMALL, Defense()),
        (replace(GCN, item_side="features"), SMALL, Defense()),
        (replace(GCN, hidden=()), SMALL, Defense()),
        (GCN, replace(SMALL, loss="bpr"), Defense()),
        (GCN, replace(SMALL, optimizer=Adam(0.01)), Defense()),
        (GCN, replace(SMALL, optimizer=SGD(0.1, momentum=0.9)), Defense()),
        (GCN, replace(SMALL, optimizer=SGD(0.1, weight_decay=0.1)), Defense()),
        (GCN, SMALL, Proximal(0.2, "squared")),
        (GCN, SMALL, ScaledGradients()),
        (replace(GCN, bounded=True), SMALL, Chain((FunctionalMechanism(20.0, 40), FunctionalMechanism(20.0, 40)))),
        (replace(GCN, bounded=True), SMALL, FunctionalMechanism(20.0, 40, weight="head.1.weight")),
    ],
    ids=str,
)
def test_the_rest_goes_the_general_way(
    model: FeatureGCN, training: LocalTraining, defense: Defense, calls: list[tuple[int, int]]
) -> None:
    assert_equals_loop(task_of(model, replace(training, epochs=1), defense), ragged(), np.arange(0, 24, 8))
    assert calls == []
