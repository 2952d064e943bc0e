"""PARD: the terms are those of its equations, batched training is the plain loop's, and what leaves is what should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recleak.attacks.base import Knowledge, WhichAttribute
from recleak.attacks.learners import ChosenEpoch, Logistic
from recleak.attacks.preparation import Preparation
from recleak.attacks.representation import OWN, FromRepresentations
from recleak.defenses.base import Chain, Defense, Scene, all_components, check, hooks
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.consent import UserConsent
from recleak.defenses.decoupling import Bound, Decoupling, Reads, decoupling_of
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.estimators import Lesson, descended, estimate, estimator_components, log_chance, taught
from recleak.defenses.sharing import Share
from recleak.errors import ConfigError, NotFoundError
from recleak.grading import own_items
from recleak.models.base import Batch, Model, Params
from recleak.models.decoupled import Decoupled
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols.federated import Federated, train_federated
from recleak.protocols.gossip import Gossip, train_gossip
from recleak.protocols.stopping import Plateau, Reached, Stopping
from recleak.recording import Listening
from recleak.streams import Streams
from recleak.testing.defenses import DefenseContract
from recleak.testing.models import ModelContract, assert_close, ragged
from recleak.testing.oracle import oracle
from recleak.training.attributes import PrivateAttributes, PublicData, attributes_of, insensitive
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, train
from recleak.training.compiled_decoupled import walk_decoupled
from recleak.training.executor import InProcess, Workers
from recleak.training.local import Examples
from recleak.training.optimizers import SGD, Adam, Optimizer
from recleak.training.personal import first_params, personal_scores
from recleak.training.state import ClientStore
from recleak.update import Update, merge
from recleak.wire import Broadcast, Disclosure, Message, Server, Upload

D = 6
CLASSES = {"gender": 2, "job": 4}
DATA = ragged(24, 30, 9)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


class TestDecoupled(ModelContract):
    model = Decoupled(8, (16, 8), user="kept")


class TestDecoupledGraph(ModelContract):
    model = Decoupled(8, (16,), graph=True, combine="sum", user="kept")


class TestDecoupledOne(ModelContract):
    model = Decoupled(8, (16, 8), user="one")


class TestDecoupling(DefenseContract):
    """It acts on the loss; uploads pass unchanged."""

    defense = Decoupling(CLASSES, relevant=0.0, factors=4)
    neutral = Decoupling()


class TestUserConsent(DefenseContract):
    defense = UserConsent(CLASSES, factors=4)
    neutral = UserConsent()


def attributes(n_users: int = 24, *, number: bool = False, seed: int = 0) -> PrivateAttributes:
    """Random classes, some unknown; a third of the users tells."""
    generator = torch.Generator().manual_seed(seed)
    labels = {name: torch.randint(-1, classes, (n_users,), generator=generator) for name, classes in CLASSES.items()}
    if number:
        labels["height"] = 170 + 10 * torch.randn(n_users, generator=generator)
        labels["height"][::7] = float("nan")
    return PrivateAttributes(labels, torch.arange(n_users) % 3 == 0)


def public_tables(known: PrivateAttributes, *, seed: int = 3) -> Params:
    """As if everybody who tells had told something."""
    generator = torch.Generator().manual_seed(seed)
    who = known.public.nonzero().squeeze(1)
    tables = {
        "user": torch.randn(len(who), D, generator=generator),
        "user.private": torch.randn(len(who), D, generator=generator),
        "item": torch.randn(len(who), 8, D, generator=generator),
        "item mean": torch.randn(len(who), D, generator=generator),
        "client": who,
        **{f"label of {name}": label[who] for name, label in known.labels.items()},
    }
    return {f"public/{name}": value for name, value in tables.items()}


def task_of(model: Model, defense: Defense, optimizer: Optimizer | None = None, **local: Any) -> Task:
    training = LocalTraining(epochs=2, batch_size=12, optimizer=optimizer or SGD(0.5), negatives=3, **local)
    parts = all_components(model.components(), defense)
    return Task(model, parts, training, defense, 0, attributes=attributes(number="height" in _names(defense)))


def _names(defense: Defense) -> tuple[str, ...]:
    return defense.needs_attributes


def trained_both(task: Task, client: np.ndarray[Any, np.dtype[np.int64]], rounds: int = 2) -> None:
    """Clients train in some rounds, by the cohort and by the plain loop, with public tables beside the broadcast."""
    known = task.attributes
    assert known is not None
    received = {**first_params(task.components, 24, 30, 0), **public_tables(known)}
    stores = [ClientStore(task.components, task.training.optimizer, 24, 30, 0) for _ in range(2)]
    examples = Examples.of(DATA, negatives=task.training.negatives)
    for round in range(rounds):
        data = examples.draw(client, round)
        got = train(task, received, stores[0].read(client), data, round)
        expected = oracle(task, received, stores[1].read(client), data, round)
        assert_close(got.update, expected.update, atol=3e-5, why="update")
        assert_close(got.kept, expected.kept, atol=3e-5, why="kept")
        torch.testing.assert_close(got.loss.double(), expected.loss.double(), atol=1e-5, rtol=1e-4)
        for store in stores:
            store.write(got.kept)


# --- training is the plain loop's -------------------------------------------------------------------------------------

SMALL = {"hidden": (5, 4), "factors": D, "sample": 3, "pairs": 3, "steps": 2, "momentum": 0.5, "reads": "items"}


@pytest.mark.parametrize("reads", ["items", "mean", "mixed"])
@pytest.mark.parametrize("bound", ["clamped", "club", "plain"])
def test_cohort_trains_as_the_loop_does(bound: Bound, reads: Reads) -> None:
    defense = Decoupling(CLASSES, bound=bound, **{**SMALL, "reads": reads})  # type: ignore[arg-type]
    trained_both(task_of(Decoupled(D, (5, 4)), defense), np.arange(24))


@pytest.mark.parametrize(
    ("model", "defense", "optimizer"),
    [
        (Decoupled(D, (5,), graph=True), Decoupling(CLASSES, **SMALL), SGD(0.2)),  # type: ignore[arg-type]
        (Decoupled(D, (5,), combine="sum"), Decoupling(CLASSES, irrelevant=0.0, **SMALL), Adam(0.01)),  # type: ignore[arg-type]
        (Decoupled(D, (5,)), Decoupling({"height": 1, "gender": 2}, **SMALL), SGD(0.2)),  # type: ignore[arg-type]
        (Decoupled(D, (5,)), Decoupling({"height": 1}, bound="club", **SMALL), SGD(0.2)),  # type: ignore[arg-type]
        (Decoupled(D, (5,)), Decoupling(CLASSES, relabels=True, inverse="own", **SMALL), SGD(0.2)),  # type: ignore[arg-type]
        (NCF(D, (5,)), Decoupling(CLASSES, relevant=0.0, **SMALL), SGD(0.2)),  # type: ignore[arg-type]
        (NCF(D, (5,)), UserConsent(CLASSES, hidden=(5,), factors=D), SGD(0.2)),
        (LightGCN(D, score="mlp", hidden=(5,)), UserConsent(CLASSES, hidden=(5,), factors=D, steps=2), Adam(0.01)),
    ],
    ids=["graph", "relevant-adam", "number", "number-club", "as-published", "ncf", "consent", "consent-graph"],
)
def test_variants_train_as_the_loop_does(model: Model, defense: Defense, optimizer: Optimizer) -> None:
    trained_both(task_of(model, defense, optimizer), np.arange(24))


COMPILED: dict[str, tuple[Model, Defense]] = {
    "plain": (Decoupled(D, (5, 4)), Decoupling(CLASSES, bound="plain", **SMALL)),  # type: ignore[arg-type]
    "club-mean": (Decoupled(D, (5,)), Decoupling(CLASSES, bound="club", **{**SMALL, "reads": "mean"})),  # type: ignore[arg-type]
    "graph": (Decoupled(D, (5, 4), graph=True), Decoupling(CLASSES, **SMALL)),  # type: ignore[arg-type]
    "graph-sum": (Decoupled(D, (5,), "sum", graph=True), Decoupling(CLASSES, relevant=0.0, **SMALL)),  # type: ignore[arg-type]
    "number-club": (Decoupled(D, (5,)), Decoupling({"height": 1, "gender": 2}, bound="club", **SMALL)),  # type: ignore[arg-type]
    "number-clamped": (Decoupled(D, (5,)), Decoupling({"height": 1}, bound="clamped", **SMALL)),  # type: ignore[arg-type]
    "relevant": (Decoupled(D, (5,)), Decoupling(CLASSES, irrelevant=0.0, **SMALL)),  # type: ignore[arg-type]
    "neither": (Decoupled(D, (5,)), Decoupling(CLASSES, irrelevant=0.0, relevant=0.0, **SMALL)),  # type: ignore[arg-type]
    "one vector": (Decoupled(D, (5,), user="one"), Decoupling(CLASSES, **SMALL)),  # type: ignore[arg-type]
    "as-published": (
        Decoupled(D, (5,), "sum"),
        Chain((Decoupling(CLASSES, relabels=True, inverse="own", **{**SMALL, "reads": "mixed"}), ClipByNorm(0.5))),  # type: ignore[arg-type]
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", list(COMPILED))
def test_compiled_visits_train_as_the_loop_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def watched(visit: Any) -> Tensor | None:
        loss = walk_decoupled(visit)
        taken.append(loss is not None)
        return loss

    monkeypatch.setattr("recleak.training.visit.walk_decoupled", watched)
    task = task_of(*COMPILED[name])
    trained_both(replace(task, training=replace(task.training, epochs=1)), np.arange(24))
    assert taken
    assert all(taken)


def test_compiled_visits_of_a_client_alone_have_the_same_bits() -> None:
    task = task_of(Decoupled(D, (5, 4)), Decoupling(CLASSES, bound="plain", **SMALL))  # type: ignore[arg-type]
    task = replace(task, training=replace(task.training, epochs=1))
    assert task.attributes is not None
    received = {**first_params(task.components, 24, 30, 0), **public_tables(task.attributes)}
    store, examples = ClientStore(task.components, SGD(), 24, 30, 0), Examples.of(DATA, negatives=3)

    def some(client: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Update, Update]:
        found = train(task, received, store.read(client), examples.draw(client, 1), 1)
        return found.update, found.kept

    for whole, *alone in zip(some(np.arange(24)), *(some(np.array([user])) for user in range(24)), strict=True):
        cut = merge(list(alone))
        for part, value in {**whole.values, **whole.rows}.items():
            assert torch.equal(value, {**cut.values, **cut.rows}[part]), part


def test_what_the_compiled_loop_does_not_know_is_left_to_the_general_way() -> None:
    defense = Decoupling(CLASSES, **SMALL)  # type: ignore[arg-type]
    chained = Chain((defense, UserConsent(CLASSES, factors=D)))
    assert decoupling_of(defense) is defense
    assert decoupling_of(Chain((defense, ClipByNorm(1.0)))) is defense
    assert decoupling_of(chained) is None
    assert decoupling_of(Chain((ClipByNorm(1.0),))) is None
    assert decoupling_of(ClipByNorm(1.0)) is None


@pytest.mark.parametrize("optimizer", [SGD(0.3), SGD(0.1, momentum=0.5), Adam(0.01)], ids=str)
def test_turns_train_as_the_loop_does(optimizer: Optimizer) -> None:
    task = task_of(PFedRec(D), Defense(), optimizer, turns=(("head",), ("item",)))
    trained_both(task, np.arange(24))
    once = replace(task, training=replace(task.training, turns=()))
    received = first_params(task.components, 24, 30, 0)
    store = ClientStore(task.components, optimizer, 24, 30, 0)
    data = Examples.of(DATA, negatives=3).draw(np.arange(24), 0)
    first, second = (train(each, received, store.read(np.arange(24)), data, 0) for each in (task, once))
    assert not torch.allclose(first.update.rows["item"], second.update.rows["item"])


def test_turns_name_every_component_once() -> None:
    with pytest.raises(ConfigError, match=r"each of the components item, head.1.weight, head.1.bias in one part"):
        trained_both(task_of(PFedRec(D), Defense(), turns=(("head",),)), np.arange(3))


@pytest.mark.parametrize("defense", [Decoupling(CLASSES, **SMALL), UserConsent(CLASSES, factors=D)], ids=repr)  # type: ignore[arg-type]
def test_chunks_do_not_matter(defense: Defense) -> None:
    task = task_of(Decoupled(D, (5, 4)), defense)
    assert task.attributes is not None
    received = {**first_params(task.components, 24, 30, 0), **public_tables(task.attributes)}
    store, examples = ClientStore(task.components, SGD(), 24, 30, 0), Examples.of(DATA, negatives=3)

    def some(client: np.ndarray[Any, np.dtype[np.int64]]) -> Update:
        return train(task, received, store.read(client), examples.draw(client, 1), 1).update

    together = some(np.arange(24))
    for size in (1, 5):
        cut = merge([some(part) for part in np.array_split(np.arange(24), 24 // size)])
        for name, value in {**together.values, **together.rows}.items():
            other = {**cut.values, **cut.rows}[name]
            torch.testing.assert_close(other, value, atol=1e-6, rtol=1e-5, msg=f"{name} in chunks of {size}")


# --- the terms --------------------------------------------------------------------------------------------------------


def scene_of(
    defense: Defense, n: int = 5, width: int = 8, *, known: PrivateAttributes | None = None
) -> tuple[Params, Scene]:
    """Random parameters of some clients, the first of whom has no own item in its batch."""
    generator = torch.Generator().manual_seed(5)
    known = attributes(number=True) if known is None else known
    own = torch.rand(n, width, generator=generator) < 0.5
    own[0] = False
    params = {
        "user": torch.randn(n, D, generator=generator, requires_grad=True),
        "user.private": torch.randn(n, D, generator=generator, requires_grad=True),
        "item": torch.randn(n, width, D, generator=generator, requires_grad=True),
    }
    mine = {part.name: part.draw(1, np.zeros(n, np.int64)) for part in defense.own_components()}
    labels = {name: label[1 : n + 1] for name, label in known.labels.items()}
    tables = {name.removeprefix("public/"): value for name, value in public_tables(known).items()}
    batch = Batch(own, own.sum(1).float())
    return params, Scene(4, batch, mine, labels, {}, known.public[1 : n + 1], tables)


def perceptron(own: Params, name: str, client: int, inputs: Tensor) -> Tensor:
    """An estimator of one client on one input, layer by layer."""
    hidden, layer = inputs, 1
    while f"{name}.{layer}.weight" in own:
        hidden = hidden if layer == 1 else hidden.clamp(min=0)
        hidden = own[f"{name}.{layer}.bias"][client] + sum(
            hidden[i] * own[f"{name}.{layer}.weight"][client, i] for i in range(len(hidden))
        )
        layer += 1
    return hidden


@pytest.mark.parametrize("bound", ["clamped", "club", "plain"])
def test_objective_is_that_of_the_equations(bound: Bound) -> None:
    defense = Decoupling(
        CLASSES, irrelevant=0.3, relevant=0.7, bound=bound, reads="items", hidden=(5, 4), factors=D, pairs=99
    )
    params, scene = scene_of(defense)
    term = defense.objective(params, scene, Streams.simulated(0, 0, np.arange(5)))
    assert term is not None
    for c in range(5):
        expected = torch.zeros(())
        for name, classes in CLASSES.items():
            mu = int(scene.attributes[name][c])
            if mu < 0:
                continue
            told = scene.public[f"label of {name}"]
            share = torch.stack([(told == k).sum() + 1 for k in range(classes)]).float()
            share = share / share.sum()
            leaks = []
            for i in scene.batch.own[c].nonzero().flatten().tolist():
                z = torch.cat([params["user"][c], params["item"][c, i]])
                logs = perceptron(scene.own, f"estimator.irrelevant.{name}", c, z).log_softmax(0)
                leaks.append(
                    {
                        "plain": logs[mu],
                        "club": logs[mu] - (share * logs).sum(),
                        "clamped": (logs[mu] - share[mu].log()).clamp(min=0),
                    }[bound]
                )
            if leaks:
                expected = expected + 0.3 * torch.stack(leaks).mean()
            private = params["user.private"][c]
            forward = perceptron(scene.own, f"estimator.forward.{name}", c, private).log_softmax(0)[mu]
            guess = perceptron(
                scene.own, f"estimator.inverse.{name}", c, functional.one_hot(torch.tensor(mu), classes).float()
            )
            expected = expected + 0.7 * ((private - guess).norm() - forward)
        torch.testing.assert_close(term[c], expected)


def test_gradients_flow_into_representations_only_where_they_should() -> None:
    defense = Decoupling(CLASSES, hidden=(5,), factors=D, pairs=99, relevant=0.0)
    params, scene = scene_of(defense)
    term = defense.objective(params, scene, Streams.simulated(0, 0, np.arange(5)))
    assert term is not None
    found = torch.autograd.grad(term.sum(), list(params.values()), allow_unused=True, materialize_grads=True)
    user, private, item = found
    assert not private.any()
    assert user[1:].any()
    assert not item[~scene.batch.own].any()  # negatives are not what a user has
    before = {name: value.clone() for name, value in scene.own.items()}
    after = defense.alternate(params, scene, Streams.simulated(0, 0, np.arange(5)))
    assert all(torch.equal(scene.own[name], before[name]) for name in before)
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(before)
    assert all(value.grad is None for value in params.values())


def test_who_does_not_want_protection_has_no_term() -> None:
    defense = Decoupling({"gender": 2}, hidden=(5,), factors=D)
    params, scene = scene_of(defense)
    chosen = torch.tensor([True, False, True, False, True])
    term = defense.objective(params, replace(scene, protects={"gender": chosen}), Streams.simulated(0, 0, np.arange(5)))
    whole = defense.objective(params, scene, Streams.simulated(0, 0, np.arange(5)))
    assert term is not None
    assert whole is not None
    assert not term[~chosen].any()
    torch.testing.assert_close(term[chosen], whole[chosen])


def test_clamped_bound_ends_where_nothing_is_known() -> None:
    """With an estimator that is sure and wrong, the plain term still pulls, the clamped one does not."""
    params, scene = scene_of(Decoupling({"gender": 2}, hidden=(), factors=D))
    scene = replace(scene, attributes={"gender": torch.zeros(5, dtype=torch.int64)})
    own = {name: torch.zeros_like(value) for name, value in scene.own.items()}
    own["estimator.irrelevant.gender.1.bias"] = torch.tensor([-5.0, 5.0]).repeat(5, 1)
    own["estimator.irrelevant.gender.1.weight"] = (
        torch.randn(5, 2 * D, 2, generator=torch.Generator().manual_seed(0)) * 0.01
    )
    scene = replace(scene, own=own)
    for bound, pulls in (("plain", True), ("club", True), ("clamped", False)):
        defense = Decoupling({"gender": 2}, hidden=(), factors=D, relevant=0.0, bound=bound)  # type: ignore[arg-type]
        term = defense.objective(params, scene, Streams.simulated(0, 0, np.arange(5)))
        assert term is not None
        slope = torch.autograd.grad(term.sum(), params["user"])[0][1:]
        assert bool(slope.any()) is pulls


def test_nothing_happens_before_somebody_has_told() -> None:
    defense = Decoupling(CLASSES, hidden=(5,), factors=D, warm_up=3)
    params, scene = scene_of(defense)
    streams = Streams.simulated(0, 0, np.arange(5))
    for changed in (replace(scene, public={}), replace(scene, attributes={}), replace(scene, round=2)):
        assert defense.objective(params, changed, streams) is None
        assert defense.alternate(params, changed, streams) == {}


def test_relabelled_public_data_get_the_clients_own_class() -> None:
    """The published bug: from the second attribute on, estimators learn that many are as the client is."""
    parts = {
        "hidden": (8,),
        "factors": D,
        "sample": None,
        "relevant": 0.0,
        "learning_rate": 0.5,
        "steps": 60,
        "momentum": 0.0,
        "reads": "items",
    }
    known = replace(attributes(), labels={name: torch.arange(24) % classes for name, classes in CLASSES.items()})
    chances = {}
    for relabels in (False, True):
        defense = Decoupling(CLASSES, relabels=relabels, **parts)  # type: ignore[arg-type]
        params, scene = scene_of(defense, known=known)
        own = defense.alternate(params, scene, Streams.simulated(0, 0, np.arange(5)))
        told = torch.cat([scene.public["user"], scene.public["item"][:, 4]], dim=1).expand(5, -1, -1)
        output = estimate(own, "estimator.irrelevant.job", told)
        mine = scene.attributes["job"].unsqueeze(1).expand(-1, output.shape[1])
        chances[relabels] = float(log_chance(output, mine).exp().mean())
    assert chances[True] > chances[False] + 0.1


def test_what_is_told_again_under_the_clients_own_label() -> None:
    """Each step has its own public users, rightly labelled, and 0.6 of what was there in the step before."""
    known = attributes()
    public = {name.removeprefix("public/"): value for name, value in public_tables(known).items()}
    right = Decoupling(CLASSES, sample=3, steps=2)
    wrong = replace(right, relabels=True)
    for position in range(2):
        place, as_mine = right._places(public, 1, position)
        assert place.shape == (2, 3)
        assert not as_mine.any()
    assert [len(wrong._places(public, 1, 0)[0][0]), len(wrong._places(public, 1, 1)[0][0])] == [4, 6]
    first, mine = wrong._places(public, 1, 0)
    assert mine.tolist() == [[False] * 4, [False] * 3 + [True]]
    assert first[0, 3] == -1  # the first step has no step before
    assert first[1, 3] in first[0, :3]
    later, mine = wrong._places(public, 1, 1)
    assert mine.sum(1).tolist() == [2, 3]
    assert set(later[1, 3:].tolist()) <= set(later[0].tolist())


def test_clients_without_an_own_item_in_the_batch_teach_nothing_of_items() -> None:
    defense = Decoupling({"gender": 2}, hidden=(5,), factors=D, reads="items")
    params, scene = scene_of(defense)
    lesson = defense._lesson("irrelevant", "gender", 0, params, scene)
    assert bool(lesson.own[0].isnan())
    assert torch.equal(lesson.own[1:].isnan(), scene.attributes["gender"][1:] < 0)
    other = defense._lesson("forward", "gender", 0, params, scene)
    assert torch.equal(other.own.isnan(), scene.attributes["gender"] < 0)


@pytest.mark.parametrize("name", ["class", "number", "vector"])
def test_compiled_lessons_are_those_step_by_step(name: str) -> None:
    """Also where nothing counts at a step, and where labels are the client's own; bit by bit the same alone."""
    generator = torch.Generator().manual_seed(1)
    clients, steps, n, i, o = 5, 4, 6, 7, 3
    outputs = 1 if name == "number" else o
    parts = tuple(estimator_components("e", (i, 8, 4, outputs)))
    own = {part.name: torch.randn(clients, *part.shape, generator=generator) / 2 for part in parts}
    label = torch.randint(0, o, (steps, n), generator=generator).float()
    label[:, 0], label[2] = torch.nan, torch.nan
    mine = torch.randint(0, o, (clients,), generator=generator).float()
    mine[3] = torch.nan
    lesson = Lesson(
        torch.randn(steps, n, i, generator=generator),
        label,
        torch.rand(steps, n, generator=generator) < 0.3,
        torch.randn(clients, i, generator=generator),
        mine,
        1 if name == "number" else o,
        *((torch.randn(steps, n, o), torch.randn(clients, o)) if name == "vector" else ()),
    )
    fast = taught(own, "e", lesson, rate=0.2, momentum=0.9)
    double = Lesson(
        lesson.told.double(),
        label.double(),
        lesson.as_mine,
        lesson.mine.double(),
        mine.double(),
        lesson.classes,
        None if lesson.target is None else lesson.target.double(),
        None if lesson.my_target is None else lesson.my_target.double(),
    )
    slow = taught({part: value.double() for part, value in own.items()}, "e", double, rate=0.2, momentum=0.9)
    for part, value in slow.items():
        torch.testing.assert_close(fast[part].double(), value, atol=1e-5, rtol=1e-4)
        assert not torch.equal(fast[part], own[part])
    alone = replace(
        lesson,
        mine=lesson.mine[1:2],
        own=mine[1:2],
        my_target=None if lesson.my_target is None else lesson.my_target[1:2],
    )
    single = taught({part: value[1:2] for part, value in own.items()}, "e", alone, rate=0.2, momentum=0.9)
    assert all(torch.equal(single[part], fast[part][1:2]) for part in single)


def test_one_client_learns_for_all_who_begin_alike_and_have_nothing_of_their_own() -> None:
    generator = torch.Generator().manual_seed(2)
    clients, steps, n, i, o = 4, 3, 6, 2, 5
    start = {part.name: torch.randn(part.shape, generator=generator) for part in estimator_components("e", (i, 8, o))}
    own = {name: value.expand(clients, *value.shape).clone() for name, value in start.items()}
    lesson = Lesson(
        torch.randn(steps, n, i, generator=generator),
        torch.zeros(steps, n),
        torch.zeros(steps, n, dtype=torch.bool),
        torch.randn(clients, i, generator=generator),
        torch.full((clients,), torch.nan),
        i,
        torch.randn(steps, n, o, generator=generator),
        torch.randn(clients, o, generator=generator),
    )
    together = taught(own, "e", lesson, rate=0.2, momentum=0.9)
    apart = taught(
        {
            name: value + 0.1 * (torch.arange(clients) == 3).reshape(-1, *[1] * (value.dim() - 1))
            for name, value in own.items()
        },
        "e",
        lesson,
        rate=0.2,
        momentum=0.9,
    )
    for name, value in together.items():
        assert value.shape == own[name].shape
        assert not torch.equal(value, own[name])
        assert torch.equal(value[:3], apart[name][:3])
        assert not torch.equal(value[3], apart[name][3])
    mixed = taught(
        own, "e", replace(lesson, own=torch.tensor([0.0, torch.nan, torch.nan, torch.nan])), rate=0.2, momentum=0.9
    )
    assert not torch.equal(mixed["e.1.weight"][0], mixed["e.1.weight"][1])


def test_estimators_learn_what_is_there() -> None:
    """Steps of SGD on all clients at once are those on one client, and they fit."""
    parts = tuple(estimator_components("e", (3, 8, 2)))
    own = {part.name: part.draw(0, np.zeros(4, np.int64)) for part in parts}
    inputs = torch.randn(4, 40, 3, generator=torch.Generator().manual_seed(0))
    label = (inputs[..., 0] > 0).long()

    def loss(leaves: Params, step: int) -> Tensor:
        return -log_chance(
            estimate(leaves, "e", inputs[: len(leaves["e.1.bias"])]), label[: len(leaves["e.1.bias"])]
        ).mean(1)

    after = descended(own, loss, rate=0.3, momentum=0.9, steps=80)
    alone = descended({name: value[:1] for name, value in own.items()}, loss, rate=0.3, momentum=0.9, steps=80)
    for name, value in alone.items():
        torch.testing.assert_close(value, after[name][:1], atol=1e-4, rtol=1e-3)
    right = (estimate(after, "e", inputs).argmax(-1) == label).float().mean()
    assert float(right) > 0.97


def test_consent_pulls_to_uniform_those_who_want_it() -> None:
    defense = UserConsent({"job": 4}, strength=2.0, hidden=(5,), factors=D)
    params, scene = scene_of(defense)
    scene = replace(scene, attributes={"job": torch.tensor([0, 1, 2, 3, -1])})
    streams = Streams.simulated(0, 0, np.arange(5))
    term = defense.objective(params, scene, streams)
    assert term is not None
    assert scene.insensitive is not None
    for c in range(5):
        logs = perceptron(scene.own, "attacker.job", c, params["user"][c]).log_softmax(0)
        expected = 2 * (-logs.mean() - log(4)) if c != 4 and not scene.insensitive[c] else torch.zeros(())
        torch.testing.assert_close(term[c], expected)
    after = defense.alternate(params, scene, streams)
    for name, value in after.items():
        moved = (value != scene.own[name]).flatten(1).any(1)
        teaches = scene.insensitive & (scene.attributes["job"] >= 0)
        assert torch.equal(moved, teaches), name


# --- configuration ----------------------------------------------------------------------------------------------------


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="bound is 'low', expected one of clamped, club, plain"):
        Decoupling(bound="low")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="irrelevant is -1"):
        Decoupling(irrelevant=-1.0)
    with pytest.raises(ConfigError, match="gender has 0 classes"):
        Decoupling({"gender": 0})
    with pytest.raises(ConfigError, match=r"needs the component 'user.private' of shape \[64\], got none"):
        check(Decoupling(CLASSES), NCF().components())
    with pytest.raises(ConfigError, match=r"of shape \[64\], got \[6\]"):
        check(Decoupling(CLASSES), Decoupled(D).components())
    with pytest.raises(ConfigError, match="protects 'gender', got users with no attributes"):
        train_federated(Federated(rounds=1), Decoupled(), DATA, defense=Decoupling(CLASSES), show_progress=False)
    with pytest.raises(ConfigError, match="expected a federation"):
        train_gossip(Gossip(rounds=1), NCF(), DATA, defense=UserConsent(CLASSES), show_progress=False)
    with pytest.raises(ConfigError, match="user is sent and not averaged, expected a federation"):
        train_gossip(Gossip(rounds=1), NCF(), DATA, defense=Share(("user",), averaged=False), show_progress=False)
    with pytest.raises(ConfigError, match="nobody would clip that term"):
        task_of(NCF(D), Chain((UserConsent(CLASSES, factors=D), DPSGD(1.0, 1.0))))
    with pytest.raises(NotFoundError, match="Unknown combine"):
        Decoupled(combine="plus")  # type: ignore[arg-type]
    check(Decoupling(CLASSES, relevant=0.0), NCF().components())
    assert hooks(Decoupling(CLASSES, irrelevant=0, relevant=0)) == frozenset()
    assert Decoupling(CLASSES, irrelevant=0, relevant=0).own_components() == ()


def test_attributes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"gender is torch.int64\[3\], expected torch.int64\[24\]"):
        PrivateAttributes({"gender": torch.zeros(3, dtype=torch.int64)}, torch.zeros(24, dtype=torch.bool)).check(24)
    with pytest.raises(NotFoundError, match="Unknown attribute 'sex'"):
        PrivateAttributes({}, torch.zeros(2, dtype=torch.bool), {"sex": torch.zeros(2, dtype=torch.bool)}).check(2)
    few, more = insensitive(4000, 0.1, 0), insensitive(4000, 0.3, 0)
    assert bool((few & ~more).any()) is False
    assert 0.07 < float(few.float().mean()) < 0.13


# --- on the wire ------------------------------------------------------------------------------------------------------


class Ear:
    """A tap that keeps everything."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def receive(self, message: Message) -> None:
        self.heard.append(message)

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: object) -> None:
        pass

    def close(self) -> None:
        pass


LOCAL = LocalTraining(epochs=1, batch_size=12, optimizer=SGD(0.5), negatives=3)


def run(model: Model, defense: Defense, known: PrivateAttributes | None = None, rounds: int = 3, **more: Any) -> Any:
    ear = Ear()
    settings: dict[str, Any] = {"executor": InProcess(1), "seed": 0, "show_progress": False, **more}
    protocol = settings.pop("protocol", Federated(rounds=rounds, local=LOCAL))
    known = attributes() if known is None else known
    trained = train_federated(protocol, model, DATA, defense=defense, attributes=known, taps=[ear], **settings)
    return trained, ear.heard


def test_what_leaves() -> None:
    defense = Decoupling(CLASSES, **SMALL)  # type: ignore[arg-type]
    trained, heard = run(Decoupled(D, (5,)), defense)
    uploads = [message for message in heard if isinstance(message, Upload)]
    assert {name for message in uploads for name in message.update.names()} == {"user", "item"}
    told = [message for message in heard if isinstance(message, Disclosure)]
    assert len(told) == 2  # before the first round nobody has told anything
    who = attributes().public.nonzero().flatten()
    assert torch.equal(told[-1].client, who)
    assert torch.equal(told[-1].labels["gender"], attributes().labels["gender"][who])
    last = trained.store.read(np.arange(24))
    assert set(last.values) == {p.name for p in trained.task.components if p.stays and p.storage != "per_item"}
    assert "user" in last.values
    assert not any(name.startswith("estimator") for name in trained.params)
    # the vector of a user is where the user has put it, not divided by the number of clients
    assert torch.equal(uploads[-1].update.values["user"] + _before(heard, "user"), trained.params["user"])


def _before(heard: list[Message], name: str) -> Tensor:
    """A table in the last broadcast."""
    return [message for message in heard if isinstance(message, Broadcast)][-1].params[name]


def test_scores_read_the_parts_of_the_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what users keep for the defense; they are the same."""
    trained, _ = run(Decoupled(D, (5,)), Decoupling(CLASSES, **SMALL))  # type: ignore[arg-type]
    users, own = np.array([2, 5, 23]), trained.train.matrix()
    expected = personal_scores(trained.task, trained.params, trained.store.read(users), own[users])
    wanted = []
    whole: Callable[[NDArray[np.int64], set[str]], Update] = trained.store.read

    def read(client: NDArray[np.int64], names: set[str]) -> Update:
        wanted.append(names)
        return whole(client, names)

    monkeypatch.setattr(trained.store, "read", read)
    assert torch.equal(trained.scores(torch.from_numpy(users)), expected)
    assert wanted == [{part.name for part in trained.task.model.components()}]
    assert trained.task.defense.own_components()


def test_public_data_are_what_the_users_left() -> None:
    """The mean over own rows and some of these rows, as the client left them; vectors sent and kept."""
    trained, heard = run(Decoupled(D, (5,)), Decoupling(CLASSES, **SMALL), rounds=1)  # type: ignore[arg-type]
    upload = next(message for message in heard if isinstance(message, Upload))
    sent = _before(heard, "item")
    told = PublicData(
        trained.task.components, ("user", "item", "user.private"), attributes(), DATA.distinct().matrix(), seed=0
    )
    told.add({"item": sent, "user": _before(heard, "user")}, upload.update, trained.store.read(np.arange(24)), 0)
    tables, own = told.tables(), DATA.distinct().matrix().toarray() > 0
    for place, user in enumerate(tables["public/client"].tolist()):
        alone = upload.update.select(torch.tensor([user]))
        is_own = torch.from_numpy(own[user])[alone.item]
        rows = (alone.rows["item"] + sent[alone.item])[is_own]
        torch.testing.assert_close(tables["public/item mean"][place], rows.mean(0))
        for row in tables["public/item"][place]:
            assert (rows == row).all(1).any()
        mine = trained.store.read(np.array([user])).values
        assert torch.equal(tables["public/user.private"][place], mine["user.private"][0])
        assert torch.equal(tables["public/user"][place], mine["user"][0])
        torch.testing.assert_close(trained.params["user"][user], mine["user"][0])


def test_sent_and_kept_vectors_train_alike() -> None:
    sent, _ = run(NCF(D, (5,)), Share(("user",), averaged=False))
    kept, _ = run(NCF(D, (5,)), Defense())
    averaged, _ = run(NCF(D, (5,)), Share(("user",)))
    own = kept.store.read(np.arange(24)).values["user"]
    assert torch.equal(sent.store.read(np.arange(24)).values["user"], own)
    torch.testing.assert_close(sent.params["user"], own)
    assert torch.equal(sent.params["item"], kept.params["item"])
    assert not torch.allclose(averaged.params["user"], sent.params["user"])


@pytest.mark.parametrize("adam", [False, True])
def test_noise_on_what_is_sent_does_not_come_back_to_the_client(adam: bool) -> None:
    """Not averaged, a row is the client's own: what others have of it has the noise of one upload, not of all."""
    model: Model = GMF(D) if adam else NCF(D, (5,))
    local = replace(LOCAL, batch_size=None, optimizer=Adam(0.01, keep=True)) if adam else LOCAL
    protocol, users = Federated(rounds=8, local=local), np.arange(24)
    sent = Share(("user",), averaged=False)
    noisy, heard = run(model, Chain((sent, _OnUsers(0.5))), protocol=protocol)
    clean, _ = run(model, sent, protocol=protocol)
    own = clean.store.read(users).values["user"]
    assert torch.equal(noisy.store.read(users).values["user"], own)
    assert torch.equal(noisy.scores(torch.from_numpy(users)), clean.scores(torch.from_numpy(users)))
    off = [
        message.update.values["user"] + _before(heard[: heard.index(message)], "user") - own
        for message in heard
        if isinstance(message, Upload) and message.round == 7
    ]
    assert 0.35 < float(off[0].std()) < 0.65
    torch.testing.assert_close(noisy.params["user"] - own, off[0])


@dataclass(frozen=True)
class _OnUsers(Defense):
    """Noise on users' vectors alone, as they are sent: around what the client has, not around what was sent before."""

    std: float

    def upload(self, update: Update, streams: Streams) -> Update:
        value = update.values["user"].clone()
        return replace(update, values={**update.values, "user": value + self.std * streams.normal_like(update, "user")})


def test_one_vector_of_all_users_is_the_mean_of_what_they_send() -> None:
    """As eq. 5 has it: everybody begins with the same vector, and the server still sees where each has gone."""
    model = Decoupled(D, (5,), user="one")
    trained, heard = run(model, Decoupling(CLASSES, **SMALL))  # type: ignore[arg-type]
    uploads = [message.update for message in heard if isinstance(message, Upload)]
    assert trained.params["user"].shape == (D,)
    torch.testing.assert_close(_before(heard, "user") + uploads[-1].values["user"].mean(0), trained.params["user"])
    known = knowledge_of(model, Defense(), torch.zeros(24, dtype=torch.int64))
    attack = FromRepresentations(reads="users", rounds="last")
    tap = Listening(Server(), attack, known)
    for message in heard:
        tap.receive(message)
    torch.testing.assert_close(attack.read(tap.state())[1], _before(heard, "user") + uploads[-1].values["user"])


def test_only_rows_of_users_can_be_left_unaveraged() -> None:
    parts = Share(averaged=False).sharing(NCF(D).components())
    assert [part.name for part in parts if not part.averaged] == ["user"]
    broken = tuple(replace(part, averaged=False) for part in parts)
    with pytest.raises(ConfigError, match="is per_item and not averaged, expected per_user"):
        run(type("Broken", (NCF,), {"components": lambda self: broken})(D), Defense())


def test_weighted_averages_leave_unaveraged_rows_alone() -> None:
    protocol = Federated(rounds=2, local=LOCAL, aggregation="weighted", server_learning_rate=0.5)
    sent, _ = run(NCF(D, (5,)), Share(("user",), averaged=False), protocol=protocol)
    kept, _ = run(NCF(D, (5,)), Defense(), protocol=protocol)
    own = kept.store.read(np.arange(24)).values["user"]
    assert torch.equal(sent.store.read(np.arange(24)).values["user"], own)
    torch.testing.assert_close(sent.params["user"], own)


@pytest.mark.heavy
def test_killed_runs_continue_and_executors_agree(tmp_path: Path) -> None:
    defense, model = Decoupling(CLASSES, **SMALL), Decoupled(D, (5,))  # type: ignore[arg-type]
    whole, _ = run(model, defense, rounds=4)
    run(model, defense, rounds=2, directory=tmp_path / "run")
    again, _ = run(model, defense, rounds=4, directory=tmp_path / "run")
    other, _ = run(model, defense, rounds=4, executor=Workers(1))
    for each in (again, other):
        for name, value in whole.params.items():
            assert torch.equal(each.params[name], value), name
        for name, value in whole.store.read(np.arange(24)).values.items():
            assert torch.equal(each.store.read(np.arange(24)).values[name], value), name


def test_a_chain_with_a_clip_bounds_what_leaves() -> None:
    chain = Chain((Decoupling(CLASSES, **SMALL), ClipByNorm(0.01)))  # type: ignore[arg-type]
    _, heard = run(Decoupled(D, (5,)), chain)
    norms = torch.cat([message.update.norms() for message in heard if isinstance(message, Upload)])
    assert 0 < float(norms.max()) <= 0.0101


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_rules() -> None:
    assert not Plateau(patience=2).ended([0.1, 0.2])
    assert not Plateau(patience=2).ended([0.1, 0.2, 0.3, 0.25])
    assert Plateau(patience=2).ended([0.1, 0.3, 0.25, 0.3])
    assert Reached(0.3).ended([0.1, 0.3])
    assert not Reached(0.3).ended([0.4, 0.2])


def test_training_stops_and_continues_as_if_it_had_not_been_cut(tmp_path: Path) -> None:
    values = iter([0.1, 0.3, 0.2, 0.2, 0.9])
    stopping = Stopping(Plateau(every=2, patience=2), lambda model: next(values))
    trained, _ = run(NCF(D, (5,)), Defense(), rounds=50, stopping=stopping)
    assert len(trained.loss) == 8
    assert trained.curve == (0.1, 0.3, 0.2, 0.2)
    rule = Stopping(Reached(0.5, every=1), lambda model: len(model.loss) / 10)
    first, _ = run(NCF(D, (5,)), Defense(), rounds=3, stopping=rule, directory=tmp_path / "run")
    assert len(first.loss) == 3
    more, _ = run(NCF(D, (5,)), Defense(), rounds=50, stopping=rule, directory=tmp_path / "run")
    assert len(more.loss) == 5
    assert more.curve == (0.1, 0.2, 0.3, 0.4, 0.5)


# --- the attack -------------------------------------------------------------------------------------------------------


def knowledge_of(model: Model, defense: Defense, known: Tensor, **public: Tensor) -> Knowledge:
    parts = all_components(model.components(), defense)
    return Knowledge(model, 24, 30, parts, LOCAL, defense, {"labels of gender": known, **public})


def test_attack_reads_vectors_and_mean_rows_as_clients_left_them() -> None:
    model, defense = NCF(D, (5,)), Share(("user",), averaged=False)
    label = torch.where(torch.arange(24) % 2 == 0, torch.arange(24) % 4 // 2, -1)
    known = knowledge_of(model, defense, label, **{OWN: own_items(DATA)})
    attack = FromRepresentations(rounds=2, oracle=True, learner=Logistic(prepare=Preparation("none", "none")))
    tap = Listening(Server(), attack, known)
    trained, heard = run(model, defense)
    for message in heard:
        tap.receive(message)
    client, rows = attack.read(tap.state())
    assert torch.equal(client, torch.arange(24))
    torch.testing.assert_close(rows[:, :D], trained.params["user"])
    upload = [message for message in heard if isinstance(message, Upload)][-1].update
    own = DATA.distinct().matrix().toarray() > 0
    for user in (0, 5, 23):
        alone = upload.select(torch.tensor([user]))
        mine = torch.from_numpy(own[user])[alone.item]
        left = (alone.rows["item"] + _before(heard, "item")[alone.item])[mine].mean(0)
        torch.testing.assert_close(rows[user, D:], left)
    answer = tap.answer(WhichAttribute(torch.arange(24), "gender", ("a", "b")))
    assert answer.shape == (24, 2)
    assert torch.equal(answer[label >= 0].argmax(1), label[label >= 0])


def test_attack_without_the_truth_infers_items_itself() -> None:
    model, defense = NCF(D, (5,)), Share(("user",), averaged=False)
    known = knowledge_of(model, defense, torch.zeros(24, dtype=torch.int64))
    attack = FromRepresentations(reads="items", rounds="last")
    tap = Listening(Server(), attack, known)
    _, heard = run(model, defense)
    for message in heard:
        tap.receive(message)
    _, rows = attack.read(tap.state())
    assert rows.shape == (24, D)
    assert bool(torch.isfinite(rows).all())


def test_watching_a_path_keeps_first_mean_and_way() -> None:
    model, defense = NCF(D, (5,)), Share(("user",), averaged=False)
    known = knowledge_of(model, defense, torch.zeros(24, dtype=torch.int64))
    attack = FromRepresentations(reads="users", rounds="all", watch="path")
    tap = Listening(Server(), attack, known)
    _, heard = run(model, defense)
    seen = []
    for message in heard:
        tap.receive(message)
        if isinstance(message, Upload):
            seen.append(message.update.values["user"] + _before(heard[: heard.index(message)], "user"))
    _, rows = attack.read(tap.state())
    expected = torch.cat([seen[0], torch.stack(seen).mean(0), seen[-1] - seen[0]], dim=1)
    torch.testing.assert_close(rows, expected)


def test_kept_vectors_are_read_where_they_are_told() -> None:
    model = Decoupled(D, (5,))
    known = knowledge_of(model, Defense(), torch.zeros(24, dtype=torch.int64))
    attack = FromRepresentations(reads="users", users=("user.private",), rounds="last")
    tap = Listening(Server(), attack, known)
    _, heard = run(model, Defense(), confidants=range(0, 24, 2))
    for message in heard:
        tap.receive(message)
    client, rows = attack.read(tap.state())
    assert torch.equal(client, torch.arange(0, 24, 2))
    assert rows.shape == (12, D)
    silent = Listening(Server(), attack, known)
    for message in run(model, Defense())[1]:
        silent.receive(message)
    assert not len(attack.read(silent.state())[0])


def test_attack_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="expected rounds='all'"):
        FromRepresentations(watch="path", rounds="last")
    with pytest.raises(ConfigError, match="No vector of users is sent"):
        FromRepresentations(reads="users").init(knowledge_of(NCF(D), Defense(), torch.zeros(24, dtype=torch.int64)))
    attack = FromRepresentations(users=("usr",))
    with pytest.raises(NotFoundError, match="Unknown component 'usr'"):
        attack.init(knowledge_of(NCF(D), Defense(), torch.zeros(24, dtype=torch.int64)))


def test_chosen_epoch_stops_before_it_learns_the_noise() -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((160, 40)).astype(np.float32)
    label = (x[:, 0] + 0.8 * generator.standard_normal(160) > 0).astype(np.int64)
    others = generator.standard_normal((2000, 40)).astype(np.float32)
    truth = (others[:, 0] > 0).astype(np.int64)
    learner = ChosenEpoch()
    chosen = learner.fit_predict(x, label, 2, others, 0)
    path = learner.path(x, label, 2, others, 0)
    assert path.shape == (150, 2000, 2)
    np.testing.assert_allclose(path.sum(2), 1, atol=1e-5)

    def surprise(chance: np.ndarray[Any, Any]) -> float:
        return float(-np.log(np.maximum(chance[np.arange(2000), truth], 1e-12)).mean())

    assert surprise(chosen) < surprise(path[-1])
    assert (chosen.argmax(1) == truth).mean() > 0.7


def test_attributes_of_real_columns() -> None:
    from recleak.data.source import open_data

    data = open_data("synthetic")
    public = insensitive(data.n_users, 0.2, 1)
    numbers = [name for name, kind in data.attributes.items() if kind == "continuous"]
    made = attributes_of(data, ["gender", *numbers], public, numbers=numbers)
    made.check(data.n_users)
    assert not made.labels["gender"].is_floating_point()
    assert all(made.labels[name].is_floating_point() for name in numbers)
