"""The cohort against the plain loop: every model, every optimizer, every hook.

Tolerances are those of `recleak.testing.models.assert_equals_loop`. Where gradients cancel by design (pairwise losses,
an item with both labels), Adam has an epsilon of 1e-3: a rounding error of 1e-8 then moves 1e-5 of a step, not a whole.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from recleak import kernels_perceptron
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.errors import ConfigError
from recleak.models.adapter import TorchModel
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, FanIn, Normal, sharing
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import Combine, LightGCN, Normalization
from recleak.models.mf import GMF, MF
from recleak.models.mlp import dot
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols.federated import Federated, train_federated
from recleak.streams import Streams
from recleak.testing.models import (
    ModelContract,
    assert_close,
    assert_equals_loop,
    assert_identical,
    ragged,
    visits,
)
from recleak.testing.oracle import oracle
from recleak.training.chunks import _libraries, one_thread
from recleak.training.cohort import DivergedError, LocalTraining, Task, Trained, train
from recleak.training.executor import InProcess, Workers
from recleak.training.local import Examples, LocalData
from recleak.training.optimizers import SGD, Adam, Optimizer
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.update import Update


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny: threads that wait for each other cost ten times what there is to do."""
    with one_thread():
        yield


# --- the contract -----------------------------------------------------------------------------------------------------


class PlainNCF(nn.Module):
    """What a user of the adapter would write; sizes fill vector registers, as those of published models do."""

    def __init__(self, n_users: int = 24, n_items: int = 24, factors: int = 8) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.user, self.item = nn.Embedding(n_users, factors), nn.Embedding(n_items, factors)
        self.mlp = nn.Sequential(nn.Linear(2 * factors, 16), nn.ReLU(), nn.Linear(16, 1))
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(0.5 * torch.randn(value.shape, generator=rng))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        score: Tensor = self.mlp(torch.cat([self.user(user), self.item(item)], dim=-1))
        return score.squeeze(-1)


@dataclass(frozen=True)
class Odd(Model):
    """Item components of several shapes. `left` and `right` have one gradient in the same memory, that of `summed` has
    one number for both places, and `unread` has none."""

    def components(self) -> tuple[Component, ...]:
        return (
            Component("user", "per_user", "user", (3,), Normal(0.5), shared=False),
            Component("item", "per_item", "item", (3,), Normal(0.5)),
            Component("left", "per_item", "item", ()),
            Component("right", "per_item", "item", ()),
            Component("matrix", "per_item", "item", (2, 2)),
            Component("summed", "per_item", "item", (2,)),
            Component("unread", "per_item", "item", (2,)),
            Component("scale", "dense", "head", (), Normal(0.1, mean=1.0), layer=1),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        score = dot(params["user"], params["item"]) + params["left"] + params["right"]
        return params["scale"].unsqueeze(1) * score + params["matrix"].tanh().sum((2, 3)) + params["summed"].sum(2)


class TestMF(ModelContract):
    model = MF(8)


@pytest.mark.heavy
class TestMFWithBiases(ModelContract):
    model = MF(5, biases=True)


@pytest.mark.heavy
class TestGMF(ModelContract):
    model = GMF(8, init=Normal(0.5))


@pytest.mark.heavy
class TestDeepNCF(ModelContract):
    model = NCF(6, (9, 7, 5))


class TestNCF(ModelContract):
    model = NCF(8, (16, 8))


@pytest.mark.heavy
class TestNCFOfOneHiddenLayer(ModelContract):
    model = NCF(5, (6,))


class TestLightGCN(ModelContract):
    model = LightGCN(8)


@pytest.mark.heavy
class TestLightGCNOfTwoLayers(ModelContract):
    model = LightGCN(8, 2, combine="sum")


@pytest.mark.heavy
class TestLightGCNWithPerceptron(ModelContract):
    # A perceptron can tell own items by the user's vector in them, and then knows nothing of a held-out one; with
    # vectors of some size it learns the colors first.
    model = LightGCN(8, score="mlp", hidden=(16, 4), init=Normal(0.5))


@pytest.mark.heavy
class TestLightGCNOfTwoLayersWithPerceptron(ModelContract):
    model = LightGCN(8, 2, combine="sum", score="mlp", hidden=(16,), init=Normal(0.5))


@pytest.mark.heavy
class TestFedGCN(ModelContract):
    model = LightGCN(8, normalization="mean", propagate_items=False)


@pytest.mark.heavy
class TestFeatureGCN(ModelContract):
    model = FeatureGCN(6, 8, (16,), dense_init=FanIn())
    user_features = 6


@pytest.mark.heavy
class TestFeatureGCNOnItemFeatures(ModelContract):
    model = FeatureGCN(6, 8, (16,), item_side="features", item_feature_dim=24, dense_init=FanIn())
    user_features = 6


class TestPFedRec(ModelContract):
    model = PFedRec(8)


@pytest.mark.heavy
class TestTorchModel(ModelContract):
    model = TorchModel(PlainNCF())


@pytest.mark.heavy
class TestOdd(ModelContract):
    model = Odd()


@pytest.mark.heavy
def test_worker_processes_give_the_same_bits_as_threads() -> None:
    protocol = Federated(rounds=3, local=LocalTraining(batch_size=8, optimizer=Adam(0.01, keep=True), resample=True))
    data = ragged()
    threads, workers = (
        train_federated(protocol, NCF(8, (16,)), data, executor=executor, chunk=chunk, show_progress=False)
        for executor, chunk in ((InProcess(1), 32), (Workers(2), 3))
    )
    assert threads.loss == workers.loss
    for name, value in threads.params.items():
        assert torch.equal(value, workers.params[name])


# --- the grid ---------------------------------------------------------------------------------------------------------


def compare(
    model: Model,
    training: LocalTraining,
    *,
    defense: Defense | None = None,
    shared: Mapping[str, bool] | None = None,
    features: Tensor | None = None,
    rounds: int = 1,
) -> list[Trained]:
    """Train a third of 24 ragged clients with the cohort and with the oracle; the cohort's results."""
    defense = defense or Defense()
    components = sharing(defense.sharing(model.components()), shared or {})
    task = Task(model, components, training, defense, 3, model.item_features(24), features)
    return assert_equals_loop(task, ragged(), np.arange(0, 24, 3), rounds=rounds)


SMALL = LocalTraining(epochs=2, batch_size=8, negatives=2, resample=True)
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.1),
    "sgd, momentum": SGD(0.1, momentum=0.9),
    "sgd, momentum kept": SGD(0.1, momentum=0.9, keep=True),
    "sgd, kept without momentum": SGD(0.1, keep=True),
    "sgd, decay": SGD(0.1, weight_decay=0.1),
    "sgd, momentum and decay": SGD(0.1, momentum=0.5, weight_decay=0.1),
    "sgd, rates": SGD(0.1, {"item": 0.3, "user": 0.0}),
    "adam": Adam(0.01),
    "adam, rates": Adam(0.01, {"item": 0.02, "user": 0.005}),
    "adam, item at rest": Adam(0.01, {"item": 0.0}),
    "adam, all but item at rest": Adam(0.0, {"item": 0.01}),
    "adam, kept": Adam(0.01, keep=True),
    "adam, kept, rates": Adam(0.01, {"item": 0.02, "user": 0.0}, keep=True),
    "adam, decay": Adam(0.01, weight_decay=0.1),
    "adam, decay, kept": Adam(0.01, weight_decay=0.1, keep=True),
    "adam, no first moment": Adam(0.01, beta1=0.0),
    "adam, no second moment": Adam(0.01, beta2=0.0, epsilon=0.1),
    "adam, short memory": Adam(0.01, beta1=0.5, beta2=0.9),
    "adam, long memory": Adam(0.01, beta1=0.99, beta2=0.9999),
    "adam, first moment outlives the second": Adam(0.01, beta1=0.99, beta2=0.9),
    "adam, summed": Adam(0.01, accumulate=True),
    "adam, summed, decay": Adam(0.01, weight_decay=0.1, accumulate=True),
    "adam, summed, rates": Adam(0.01, {"item": 0.02, "user": 0.005}, accumulate=True),
}


@pytest.mark.parametrize("model", [MF(6), NCF(8, (16, 4))], ids=["mf", "ncf"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(model: Model, optimizer: Optimizer) -> None:
    compare(model, replace(SMALL, optimizer=optimizer), rounds=3 if optimizer.keep else 1)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["sgd, decay", "sgd, momentum and decay", "adam, decay"])
def test_decay_of_the_whole_table(name: str, keep: bool) -> None:
    optimizer = replace(OPTIMIZERS[name], keep=keep)
    for model in (MF(6), NCF(8, (16,))):
        for trained in compare(model, replace(SMALL, optimizer=optimizer, decay_rows="all"), rounds=2):
            assert (trained.update.offset.diff() == 24).all()  # every row moves, so every row is sent


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": None},
        {"batch_size": 1},
        {"batch_size": 7, "epochs": 3},
        {"batch_size": 1000},
        {"epochs": 12},
        {"shuffle": False},
        {"negatives": 1, "loss": "bpr"},  # somebody has a single example
        {"negatives": 5},
        {"loss": "bpr", "batch_size": 5},
        {"loss": "bpr", "batch_size": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.01)], ids=["sgd", "adam"])
def test_batches(change: dict[str, int], optimizer: Optimizer) -> None:
    if "loss" in change and isinstance(optimizer, Adam):
        optimizer = replace(optimizer, epsilon=1e-3)
    compare(MF(6, biases=True), replace(SMALL, optimizer=optimizer, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), Adam(0.01), Adam(0.01, keep=True), SGD(0.1, weight_decay=0.1)], ids=str
)
@pytest.mark.parametrize("model", [GMF(6, init=Normal(0.5)), LightGCN(6)], ids=["gmf", "lightgcn"])
def test_item_rows_may_be_kept(model: Model, optimizer: Optimizer) -> None:
    for trained in compare(model, replace(SMALL, optimizer=optimizer), shared={"item": False}, rounds=3):
        assert not trained.update.rows
        assert not len(trained.update.item)  # what was touched does not show


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.01), Adam(0.01, keep=True)], ids=str)
def test_user_vectors_may_be_shared(optimizer: Optimizer) -> None:
    for trained in compare(NCF(8, (16,)), replace(SMALL, optimizer=optimizer), shared={"user": True}, rounds=2):
        assert trained.update.values["user"].shape == (8, 8)
        assert "user" not in trained.kept.values


def test_everything_may_be_kept() -> None:
    everything = dict.fromkeys(("user", "item", "head.1.weight", "head.1.bias"), False)
    for trained in compare(GMF(6), replace(SMALL, optimizer=Adam(0.01, keep=True)), shared=everything, rounds=3):
        assert not list(trained.update.names())


def test_rows_with_kept_state_move_though_untouched() -> None:
    training = replace(SMALL, optimizer=Adam(0.01, keep=True))
    last = compare(MF(6), training, rounds=3)[-1].update
    examples = Examples.of(ragged(), negatives=2, resample=True)
    touched = examples.draw(np.arange(0, 24, 3), 2)
    idle = [
        row
        for c in range(8)
        for row in range(int(last.offset[c]), int(last.offset[c + 1]))
        if int(last.item[row]) not in touched.item[touched.offset[c] : touched.offset[c + 1]]
    ]
    assert len(idle) >= 5
    assert (last.rows["item"][idle].abs().amax(1) > 1e-4).all()


# --- hooks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stay(Defense):
    """A penalty on all that moves: mu ||moved||^2."""

    mu: float = 0.3

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        return self.mu * torch.stack(list(moved.squared_norms().values())).sum(0)


@dataclass(frozen=True)
class StayAtOne(Defense):
    """A penalty on one component, and another power: the gradient depends on where the client is."""

    name: str = "item"

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        return moved.squared_norms()[self.name].square()


@dataclass(frozen=True)
class WithinBounds(Defense):
    """What is sent are parameters between -0.1 and 0.1; a random term of the loss that depends on where they are."""

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        if "item" not in moved.received:  # it is kept
            return None
        now = moved.received["item"].index_select(0, moved.item) + moved.rows["item"]
        term = (streams.normal_like(moved, "item") * now.square()).flatten(1).sum(1)
        return term.new_zeros(moved.n_clients).index_add(0, moved.owner, term)

    def epoch(self, moved: Update, streams: Streams) -> Update:
        return self.upload(moved, streams)

    def upload(self, update: Update, streams: Streams) -> Update:
        def bounded(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
            whole = update.received[name]
            start = whole if owner is None else whole.index_select(0, update.item)
            return (start + tensor).clamp(-0.1, 0.1) - start

        return update.map(bounded)


@dataclass(frozen=True)
class ScaledGradients(Defense):
    factor: float = 0.25

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, owner: self.factor * tensor)


@dataclass(frozen=True)
class NoisyGradients(Defense):
    scale: float = 0.05

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, _: tensor + self.scale * streams.normal_like(gradient, name))


@dataclass(frozen=True)
class HalfWayBack(Defense):
    def epoch(self, moved: Update, streams: Streams) -> Update:
        return moved.map(lambda name, tensor, owner: 0.5 * tensor)


@dataclass(frozen=True)
class NoisyEpochs(Defense):
    scale: float = 0.05

    def epoch(self, moved: Update, streams: Streams) -> Update:
        return moved.map(lambda name, tensor, _: tensor + self.scale * streams.laplace_like(moved, name))


@dataclass(frozen=True)
class FakeItems(Defense):
    """Each client adds items as if they were its own; they may be among its negatives."""

    number: int = 3
    spare_negatives: bool = False

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        parts, labels, sizes = [], [], []
        position = torch.arange(len(data.client))
        lots = streams.uniform("fake", position, torch.zeros_like(position), (data.n_items,)).numpy().argsort(1)
        for c in range(len(data.client)):
            mine = slice(int(data.offset[c]), int(data.offset[c + 1]))
            have = set(data.item[mine][(data.label[mine] > 0) | self.spare_negatives].tolist())
            fake = [i for i in lots[c].tolist() if i not in have][: self.number]
            parts.append(np.concatenate([data.item[mine], np.array(fake, np.int64)]))
            labels.append(np.concatenate([data.label[mine], np.ones(len(fake), np.float32)]))
            sizes.append(len(parts[-1]))
        offset = np.concatenate([[0], np.cumsum(sizes)])
        return LocalData(data.client, np.concatenate(parts), np.concatenate(labels), None, offset, data.n_items)


@dataclass(frozen=True)
class BlurredFeatures(Defense):
    def features(self, features: Tensor, streams: Streams) -> Tensor:
        position = torch.arange(len(features))
        noise = streams.normal("features", position, torch.zeros_like(position), tuple(features.shape[1:]))
        return features + noise


HOOKS: dict[str, Defense] = {
    "penalty": Stay(),
    "penalty on one component": StayAtOne(),
    "bounds on values": WithinBounds(),
    "gradient": ScaledGradients(),
    "noise on gradients": NoisyGradients(),
    "epoch": HalfWayBack(),
    "noise after epochs": NoisyEpochs(),
    "data": FakeItems(),
    "upload": Chain((ClipByNorm(0.2), GaussianNoise(0.01))),
    "all": Chain(
        (
            FakeItems(2, spare_negatives=True),
            Stay(0.1),
            ScaledGradients(0.5),
            NoisyGradients(),
            HalfWayBack(),
            NoisyEpochs(),
            ClipByNorm(1.0),
            GaussianNoise(0.01),
        )
    ),
}


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, momentum=0.9, weight_decay=0.1), Adam(0.01), Adam(0.01, keep=True)], ids=str
)
@pytest.mark.parametrize("defense", HOOKS.values(), ids=HOOKS)
def test_hooks(defense: Defense, optimizer: Optimizer) -> None:
    model = MF(6, biases=True)
    compare(model, replace(SMALL, epochs=3, optimizer=optimizer), defense=defense, rounds=2 if optimizer.keep else 1)


@pytest.mark.parametrize("defense", HOOKS.values(), ids=HOOKS)
def test_hooks_with_kept_rows_and_a_head(defense: Defense) -> None:
    if defense != HOOKS["upload"]:
        compare(NCF(8, (16,)), replace(SMALL, optimizer=SGD(0.1)), defense=defense, shared={"item": False}, rounds=2)


@pytest.mark.parametrize("spare", [True, False], ids=["other items", "negatives too"])
def test_fake_items_are_neighbors(spare: bool) -> None:
    compare(LightGCN(6), replace(SMALL, optimizer=SGD(0.1)), defense=FakeItems(4, spare_negatives=spare))


def test_features_hook() -> None:
    features = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    model = FeatureGCN(5, 6, (8,), dense_init=FanIn())
    compare(model, replace(SMALL, optimizer=SGD(0.05)), defense=BlurredFeatures(), features=features, rounds=2)


@pytest.mark.parametrize("model", [MF(6), NCF(8, (16,))], ids=["mf", "ncf"])
@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("defense", HOOKS.values(), ids=HOOKS)
def test_hooks_do_not_depend_on_the_chunk(defense: Defense, batch_size: int | None, model: Model) -> None:
    training = replace(SMALL, optimizer=Adam(0.01, keep=True), batch_size=batch_size)
    task = Task(model, model.components(), training, defense)
    everyone = np.arange(24)
    whole = visits(train, task, ragged(), everyone, rounds=2)
    for places in (everyone[:1], everyone[5:8], everyone[8:]):
        part = visits(train, task, ragged(), places, rounds=2)
        at = torch.from_numpy(places)
        for one, other in zip(part, whole, strict=True):
            expected = Trained(
                other.update.select(at), other.kept.select(at), other.loss[at], other.positives[at], one.steps
            )
            assert_identical(one, expected, f"clients {places}")


# --- ragged cohorts ---------------------------------------------------------------------------------------------------


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[LocalData, bool]:
    """Any examples: clients in any order, one example or many, items that repeat with either label."""
    n_items = draw(st.integers(2, 9))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    total = sum(sizes)
    item = draw(st.lists(st.integers(0, n_items - 1), min_size=total, max_size=total))
    pairwise = draw(st.booleans())
    second = draw(st.lists(st.integers(0, n_items - 1 if pairwise else 1), min_size=total, max_size=total))
    client = draw(st.permutations(range(8)))[: len(sizes)]
    return (
        LocalData(
            np.array(client),
            np.array(item),
            np.ones(total, np.float32) if pairwise else np.array(second, np.float32),
            np.array(second) if pairwise else None,
            np.concatenate([[0], np.cumsum(sizes)]),
            n_items,
        ),
        pairwise,
    )


@settings(max_examples=60)
@given(
    cohort=cohorts(),
    model=st.sampled_from(
        [MF(3), MF(2, biases=True), NCF(4, (5,)), PFedRec(4), LightGCN(4, score="mlp", hidden=(5,), init=Normal(0.5))]
    ),
    defense=st.sampled_from([Defense(), Proximal(0.2, "squared")]),
    optimizer=st.sampled_from(
        [
            SGD(0.1),
            SGD(0.1, momentum=0.9, weight_decay=0.01),
            Adam(0.01, epsilon=1e-3),
            Adam(0.01, epsilon=1e-3, weight_decay=0.1),
            Adam(0.01, epsilon=1e-3, accumulate=True),
        ]
    ),
    batch_size=st.sampled_from([None, 1, 3, 8]),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_any_cohort(
    cohort: tuple[LocalData, bool],
    model: Model,
    defense: Defense,
    optimizer: Optimizer,
    batch_size: int | None,
    epochs: int,
    shuffle: bool,
) -> None:
    data, pairwise = cohort
    training = LocalTraining(epochs, batch_size, optimizer, "bpr" if pairwise else "bce", shuffle=shuffle)
    task = Task(model, model.components(), training, defense, seed=1)
    received = first_params(task.components, 8, data.n_items, 1)
    kept = ClientStore(task.components, optimizer, 8, data.n_items, 1).read(data.client)
    with one_thread():
        got, expected = (by(task, received, kept, data, 4) for by in (train, oracle))
    assert_close(got.update, expected.update, atol=2e-5)
    assert_close(got.kept, expected.kept, atol=2e-5)
    torch.testing.assert_close(got.loss.double(), expected.loss, atol=1e-5, rtol=1e-4)


# --- errors and purity ------------------------------------------------------------------------------------------------


class Setting:
    """Everything for one visit."""

    data: ClassVar = ragged()

    def __init__(self, training: LocalTraining, model: Model | None = None, defense: Defense | None = None) -> None:
        model = model or MF(4)
        self.task = Task(model, model.components(), training, defense or Defense())
        self.received = first_params(self.task.components, 24, 24, 0)
        self.client: NDArray[np.int64] = np.arange(24)
        self.kept = ClientStore(self.task.components, training.optimizer, 24, 24, 0).read(self.client)
        self.examples = Examples.of(self.data, negatives=training.negatives, loss=training.loss).draw(self.client, 0)

    def train(self) -> Trained:
        return train(self.task, self.received, self.kept, self.examples, 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_handed_over_stays_as_it_is(optimizer: Optimizer) -> None:
    setting = Setting(replace(SMALL, optimizer=optimizer), MF(4, biases=True))
    received = {name: value.clone() for name, value in setting.received.items()}
    kept = setting.kept.map(lambda name, tensor, owner: tensor.clone())
    examples = (setting.examples.item.copy(), setting.examples.label.copy())
    first = setting.train()
    for name, value in received.items():
        assert torch.equal(setting.received[name], value)
    for name in kept.names():
        of = "values" if name in kept.values else "rows"
        assert torch.equal(getattr(setting.kept, of)[name], getattr(kept, of)[name])
    assert np.array_equal(setting.examples.item, examples[0])
    assert np.array_equal(setting.examples.label, examples[1])
    assert_identical(setting.train(), first, "a second time")


@pytest.mark.parametrize("optimizer", [SGD(1e30), Adam(1e30)], ids=["sgd", "adam"])
def test_divergence_is_an_error(optimizer: Optimizer) -> None:
    with pytest.raises(
        DivergedError,
        match=r"(?s)Round 0: .*of 24 clients of a chunk is not finite.*Lower the learning rate \(1e\+30\)",
    ):
        Setting(replace(SMALL, epochs=8, optimizer=optimizer)).train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs is 0, expected a whole number of at least 1"),
        ({"negatives": 0}, "negatives is 0, expected a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0, expected a whole number of at least 1. None means a full batch"),
        ({"loss": "mse"}, "loss is 'mse', expected 'bce' or 'bpr'"),
        ({"decay_rows": "some"}, "decay_rows is 'some', expected 'active' or 'all'"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**change).check()  # type: ignore[arg-type]


def test_default_settings_are_sound() -> None:
    LocalTraining().check()
    LocalTraining(batch_size=None).check()


def test_steps_are_counted_and_the_loss_falls() -> None:
    short, long = (Setting(replace(SMALL, epochs=epochs, optimizer=Adam(0.05))).train() for epochs in (1, 10))
    assert long.steps == 10 * short.steps
    assert float(long.loss.mean()) < float(short.loss.mean())


# --- what a short way must not skip ---------------------------------------------------------------------------------


class Tripled(NCF):
    """Computes something else than its parent, whose visits are compiled."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return 3 * super().logits(params, batch)


def test_a_subclass_of_a_compiled_model_is_trained_as_it_computes() -> None:
    for trained in compare(Tripled(8, (16,)), SMALL):
        assert trained.steps


@dataclass(frozen=True)
class SendsNothing(Chain):
    """A chain with a hook of its own."""

    def upload(self, update: Update, streams: Streams) -> Update:
        return update.map(lambda name, tensor, owner: torch.zeros_like(tensor))


@pytest.mark.parametrize("model", [NCF(8, (16,)), MF(6)], ids=["compiled", "stepwise"])
def test_a_hook_of_a_chain_s_subclass_is_used(model: Model) -> None:
    for trained in compare(model, SMALL, defense=SendsNothing(())):
        assert all(not bool(tensor.any()) for tensor in trained.update.rows.values())


# --- the compiled loops ---------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the compiled loops over visits, as they are called."""
    names: list[str] = []

    def count(name: str) -> None:
        real = getattr(kernels_perceptron, name)

        def counted(*arguments: object) -> None:
            names.append(name)
            real(*arguments)

        monkeypatch.setattr(kernels_perceptron, name, counted)

    for name in (LAZY, DENSE):
        count(name)
    return names


LAZY, DENSE = "perceptron_visits", "perceptron_visits_of_all_rows"
STARS = {
    f"{layers} {combine} {normalization} {propagate}": LightGCN(
        6, layers, combine, "mlp", (9, 5), normalization, propagate, init=Normal(0.5)
    )
    for layers, combine, normalization, propagate in product(
        (1, 2), get_args(Combine), get_args(Normalization), (True, False)
    )
}


@pytest.mark.parametrize("model", STARS.values(), ids=STARS)
def test_star_graphs_are_compiled(model: LightGCN, compiled: list[str]) -> None:
    compare(model, SMALL, rounds=2)
    assert compiled == [DENSE, DENSE]


@pytest.mark.parametrize(
    "change", [{"batch_size": None}, {"batch_size": 1}, {"epochs": 8}, {"shuffle": False}], ids=str
)
@pytest.mark.parametrize(
    "optimizer",
    [
        Adam(0.01, {"item": 0.02, "user": 0.005}),
        Adam(0.01, weight_decay=0.1),
        Adam(0.01, beta2=0.0, epsilon=0.1),
        Adam(0.01, beta1=0.99, beta2=0.9),
    ],
    ids=str,
)
def test_compiled_star_graphs(optimizer: Adam, change: dict[str, int], compiled: list[str]) -> None:
    compare(STARS["1 mean symmetric True"], replace(SMALL, optimizer=optimizer, **change))  # type: ignore[arg-type]
    assert set(compiled) == {DENSE}


@pytest.mark.parametrize("shared", [{"item": False}, {"user": True}, {"head.1.weight": False}], ids=str)
def test_compiled_star_graphs_share_what_the_policy_says(shared: dict[str, bool], compiled: list[str]) -> None:
    compare(STARS["1 mean symmetric True"], SMALL, shared=shared, rounds=2)
    assert compiled == [DENSE, DENSE]


@pytest.mark.parametrize("spare", [True, False], ids=["other items", "negatives too"])
def test_fake_items_are_neighbors_in_the_compiled_loop(spare: bool, compiled: list[str]) -> None:
    compare(STARS["1 mean symmetric True"], SMALL, defense=FakeItems(4, spare_negatives=spare))
    assert compiled == [DENSE]


class Reversed(LightGCN):
    """Computes something else than its parent, whose visits are compiled."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return -super().logits(params, batch)


@dataclass(frozen=True)
class Nosy(NCF):
    """Says that it is a perceptron, but reads its neighbors in a way that it does not tell."""

    perceptron = ("user", "item")
    reads_neighbors = True

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return super().logits(params, batch) + batch.neighbors["item"].sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "loops"),
    [
        (NCF(8, (16,)), [LAZY]),
        (Tripled(8, (16,)), []),
        (Reversed(8, score="mlp", hidden=(16,), init=Normal(0.5)), []),
        (LightGCN(8), []),
        (LightGCN(8, score="mlp", hidden=(), init=Normal(0.5)), []),
        (Nosy(8, (16,)), []),
    ],
    ids=["ncf", "subclass of ncf", "subclass of lightgcn", "product", "no hidden layer", "undeclared neighbors"],
)
def test_only_what_a_class_declares_is_compiled(model: Model, loops: list[str], compiled: list[str]) -> None:
    compare(model, SMALL)
    assert compiled == loops


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["1 mean symmetric True", "2 sum mean True", "1 mean mean False"])
def test_compiled_star_graphs_do_not_depend_on_the_chunk(
    name: str, weight_decay: float, batch_size: int | None
) -> None:
    training = replace(SMALL, optimizer=Adam(0.01, weight_decay=weight_decay), batch_size=batch_size)
    task = Task(STARS[name], STARS[name].components(), training)
    everyone = np.arange(24)
    (whole,) = visits(train, task, ragged(), everyone)
    for places in (everyone[:1], everyone[23:], everyone[5:8], everyone[8:]):
        (part,) = visits(train, task, ragged(), places)
        at = torch.from_numpy(places)
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {places}")


# --- gradients that are never zeroed --------------------------------------------------------------------------------

SUMMED = Adam(0.01, accumulate=True)
STAR = STARS["1 mean symmetric True"]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("model", [NCF(8, (16,)), Tripled(8, (16,))], ids=["compiled", "stepwise"])
def test_summed_gradients_are_what_torch_does_without_zero_grad(model: Model, weight_decay: float) -> None:
    """A plain module with the whole item table, examples in order, the last batch of an epoch shorter."""
    factor = 3 if isinstance(model, Tripled) else 1
    optimizer = replace(SUMMED, weight_decay=weight_decay)
    setting = Setting(LocalTraining(4, 8, optimizer, negatives=2, shuffle=False, decay_rows="all"), model)
    trained = setting.train()
    for client in (0, 9, 22):
        module = PlainNCF(1).double()
        names = ["user", "item", "head.1.weight", "head.1.bias", "head.2.weight", "head.2.bias"]
        first = {**setting.received, "user": setting.kept.values["user"][client]}
        with torch.no_grad():
            for name, value in zip(names, module.parameters(), strict=True):
                value.copy_(first[name].mT if name.endswith("weight") else first[name])
        mine = slice(int(setting.examples.offset[client]), int(setting.examples.offset[client + 1]))
        item, label = torch.from_numpy(setting.examples.item[mine]), torch.from_numpy(setting.examples.label[mine])
        assert len(item) % 8  # a shorter batch
        by_torch = torch.optim.Adam(module.parameters(), 0.01, weight_decay=weight_decay)
        for _ in range(4):
            for low in range(0, len(item), 8):
                some, target = item[low : low + 8], label[low : low + 8].double()
                score = factor * module(torch.zeros_like(some), some)
                loss = nn.functional.binary_cross_entropy_with_logits(score, target)
                loss.backward()  # type: ignore[no-untyped-call]
                by_torch.step()
        update = trained.update.select(torch.tensor([client]))
        got = {name: first[name] + value[0] for name, value in update.values.items()}
        got["user"] = trained.kept.values["user"][client]
        got["item"] = first["item"].index_add(0, update.item, update.rows["item"])
        for name, value in zip(names, module.parameters(), strict=True):
            expected = (value.mT if name.endswith("weight") else value).detach().reshape(got[name].shape)
            torch.testing.assert_close(got[name].double(), expected, atol=2e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": None}, {"batch_size": 1}, {"epochs": 4}, {"decay_rows": "all"}],
    ids=str,
)
@pytest.mark.parametrize("defense", [Defense(), Proximal(0.2), Proximal(0.2, "squared")], ids=str)
@pytest.mark.parametrize("model", [NCF(8, (16, 4)), STAR], ids=["ncf", "lightgcn"])
def test_summed_gradients_are_compiled(
    model: Model, defense: Defense, change: dict[str, int], compiled: list[str]
) -> None:
    optimizer = replace(SUMMED, weight_decay=0.1 if "decay_rows" in change else 0.0)
    compare(model, replace(SMALL, optimizer=optimizer, **change), defense=defense)  # type: ignore[arg-type]
    assert set(compiled) == {DENSE}


@pytest.mark.parametrize("defense", [*HOOKS.values(), Proximal(0.2)], ids=[*HOOKS, "proximal"])
@pytest.mark.parametrize("model", [MF(6, biases=True), NCF(8, (16,)), LightGCN(6)], ids=["mf", "ncf", "lightgcn"])
def test_summed_gradients_with_hooks(model: Model, defense: Defense) -> None:
    compare(model, replace(SMALL, optimizer=SUMMED), defense=defense)


def test_summed_gradients_of_pairs_and_odd_components() -> None:
    compare(MF(6), replace(SMALL, optimizer=replace(SUMMED, epsilon=1e-3), loss="bpr"))
    compare(Odd(), replace(SMALL, optimizer=SUMMED))


@pytest.mark.parametrize("model", [NCF(8, (16,)), Tripled(8, (16,))], ids=["compiled", "stepwise"])
def test_a_row_of_the_first_batch_is_driven_to_the_end(model: Model) -> None:
    """Its gradient stays what it was, so Adam moves each of its numbers by the whole rate at every step.

    By less where epsilon is not small beside the gradient, so it is tiny here.
    """
    setting = Setting(LocalTraining(1, 1, replace(SUMMED, epsilon=1e-12), shuffle=False), model)
    update, offset = setting.train().update, setting.examples.offset
    for client in (4, 9, 23):
        one = update.select(torch.tensor([client]))
        row = one.rows["item"][one.item == int(setting.examples.item[offset[client]])]
        expected = torch.full((1, 8), 0.01 * int(offset[client + 1] - offset[client]))
        torch.testing.assert_close(row.abs(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("model", [NCF(8, (16, 4)), STAR, MF(6), LightGCN(6)], ids=["ncf", "star", "mf", "lightgcn"])
def test_summed_gradients_do_not_depend_on_the_chunk(model: Model, weight_decay: float, batch_size: int | None) -> None:
    training = replace(SMALL, optimizer=replace(SUMMED, weight_decay=weight_decay), batch_size=batch_size)
    task = Task(model, model.components(), training)
    everyone = np.arange(24)
    (whole,) = visits(train, task, ragged(), everyone)
    for places in (everyone[:1], everyone[23:], everyone[5:8], everyone[8:]):
        (part,) = visits(train, task, ragged(), places)
        at = torch.from_numpy(places)
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {places}")


@pytest.mark.parametrize("model", [STAR, LightGCN(6)], ids=["compiled", "stepwise"])
def test_a_single_step_has_nothing_to_sum(model: Model) -> None:
    """Both step all rows anyway, so it is the same program, to the bit; after two steps it is not."""
    once, twice = (replace(SMALL, epochs=epochs, batch_size=None) for epochs in (1, 2))
    summed, plain = (Setting(replace(once, optimizer=each), model).train() for each in (SUMMED, Adam(0.01)))
    assert_identical(summed, plain, "one step")
    summed, plain = (Setting(replace(twice, optimizer=each), model).train() for each in (SUMMED, Adam(0.01)))
    assert not torch.equal(summed.update.rows["item"], plain.update.rows["item"])


def test_all_libraries_have_one_thread_also_those_that_were_loaded_since() -> None:
    """Libraries are looked for again when something was imported, and else not."""
    code = (
        "import sys, numpy\n"
        "from threadpoolctl import threadpool_info\n"
        "from recleak.training.chunks import one_thread\n"
        "with one_thread(): pass\n"
        "before = {each['filepath'] for each in threadpool_info()}\n"
        "import scipy.linalg.cython_blas, sklearn.svm\n"
        "most = [each['num_threads'] for each in threadpool_info()]\n"
        "with one_thread():\n"
        "    inside = threadpool_info()\n"
        "assert {each['filepath'] for each in inside} >= before\n"
        "assert all(each['num_threads'] == 1 for each in inside), inside\n"
        "assert [each['num_threads'] for each in threadpool_info()] == most\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with one_thread():
        pass
    before = _libraries.cache_info()
    with one_thread():
        pass
    after = _libraries.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
