"""The proximal term: its values and gradients, and that compiled, stepwise and plain training agree under it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak import kernels_perceptron
from recleak.defenses.base import Chain, Defense, check
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Norm, Proximal, proximal_terms
from recleak.errors import NotFoundError
from recleak.models.base import Model
from recleak.models.components import Normal
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.streams import Streams
from recleak.testing.defenses import DefenseContract, example_update, zeros_like
from recleak.testing.models import assert_close, assert_equals_loop, assert_identical, ragged, visits
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.optimizers import SGD, Adam
from recleak.update import Update


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


class TestProximal(DefenseContract):
    """It acts on the loss; uploads pass unchanged."""

    defense = Proximal(0.5)
    neutral = Proximal(0.0)


# --- the term ---------------------------------------------------------------------------------------------------------


def gradient(defense: Defense, moved: Update) -> tuple[Tensor, Update]:
    """The term, f32[C], and the gradient of its sum."""
    leaves = moved.map(lambda _, tensor, __: tensor.clone().requires_grad_())
    term = defense.penalty(leaves, Streams.simulated(1, 2, leaves.client))
    assert term is not None
    tensors = {**leaves.values, **leaves.rows}
    found = torch.autograd.grad(term.sum(), list(tensors.values()), allow_unused=True, materialize_grads=True)
    by_name = dict(zip(tensors, found, strict=True))
    return term.detach(), moved.map(lambda name, _, __: by_name[name])


@pytest.mark.parametrize("components", [("item",), ("item", "item_bias", "weight")], ids=str)
@pytest.mark.parametrize("norm", ["plain", "squared"])
def test_term_and_gradient_are_those_of_the_formula(norm: Norm, components: tuple[str, ...]) -> None:
    moved = example_update()
    term, found = gradient(Proximal(0.3, norm, components), moved)
    for c in range(moved.n_clients):
        mine, theirs = moved.select(torch.tensor([c])), found.select(torch.tensor([c]))
        expected = 0.0
        for name in moved.names():
            value, slope = (u.values[name] if name in u.values else u.rows[name] for u in (mine, theirs))
            squared = float(value.double().square().sum())
            if name not in components or squared == 0:
                assert not slope.any()
                continue
            expected += 0.3 * (squared if norm == "squared" else squared**0.5)
            factor = 2 * 0.3 if norm == "squared" else 0.3 / squared**0.5
            torch.testing.assert_close(slope, factor * value)
        assert float(term[c]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm", ["plain", "squared"])
def test_gradient_is_zero_where_nothing_moved(norm: Norm) -> None:
    term, found = gradient(Proximal(2.0, norm), zeros_like(example_update()))
    assert not term.any()
    assert all(not tensor.any() for tensor in (*found.values.values(), *found.rows.values()))


def test_strength_zero_is_no_term() -> None:
    assert Proximal(0.0).penalty(example_update(), Streams.from_os(7)) is None
    assert Proximal(1.0, components=()).penalty(example_update(), Streams.from_os(7)) is None


@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf")])
def test_strengths_that_cannot_be(strength: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number of at least 0"):
        Proximal(strength)


def test_unknown_norms_and_components() -> None:
    with pytest.raises(ValueError, match="Got norm='l2', expected one of plain, squared"):
        Proximal(1.0, "l2")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match=r"Unknown component 'itm'\. Did you mean 'item'"):
        check(Proximal(1.0, components=("itm",)), MF(4).components())
    check(Proximal(1.0, components=("user",)), MF(4).components())  # what is kept may be held back too


@dataclass(frozen=True)
class Doubled(Proximal):
    """Computes something else than its parent."""

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        term = super().penalty(moved, streams)
        return None if term is None else 2 * term


@dataclass(frozen=True)
class HalfGradients(Defense):
    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, owner: 0.5 * tensor)


def test_terms_of_a_chain() -> None:
    one, two = Proximal(0.1), Proximal(0.2, "squared")
    assert proximal_terms(Defense()) == ()
    assert proximal_terms(Chain((one, Chain((ClipByNorm(1.0), Proximal(0.0))), two))) == (one, two)
    assert proximal_terms(Doubled(0.1)) is None
    assert proximal_terms(Chain((one, Doubled(0.1)))) is None


# --- training ---------------------------------------------------------------------------------------------------------


class StepwiseNCF(NCF):
    """The same model, which does not say that it can be compiled."""


class StepwiseLightGCN(LightGCN):
    """The same model, which does not say that it can be compiled."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each call of the compiled loop over all rows had."""
    made: list[int] = []
    real = kernels_perceptron.perceptron_visits_of_all_rows

    def counted(*arguments: object) -> None:
        made.append(len(arguments[4]) - 1)  # type: ignore[arg-type]
        real(*arguments)

    monkeypatch.setattr(kernels_perceptron, "perceptron_visits_of_all_rows", counted)
    return made


LOCAL = LocalTraining(epochs=3, batch_size=8, optimizer=Adam(0.01), negatives=2, resample=True)
GCN = LightGCN(8, score="mlp", hidden=(16,), init=Normal(0.5))
MODELS: dict[str, tuple[Model, Model]] = {
    "ncf": (NCF(8, (16, 4)), StepwiseNCF(8, (16, 4))),
    "ncf, odd sizes": (NCF(5, (7,)), StepwiseNCF(5, (7,))),
    "lightgcn": (GCN, StepwiseLightGCN(**vars(GCN))),
}


def task(model: Model, defense: Defense, training: LocalTraining = LOCAL) -> Task:
    return Task(model, defense.sharing(model.components()), training, defense, 3)


@pytest.mark.parametrize("strength", [0.01, 10.0])
@pytest.mark.parametrize("norm", ["plain", "squared"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_loop(name: str, norm: Norm, strength: float, calls: list[int]) -> None:
    compiled, stepwise = MODELS[name]
    defense, clients = Proximal(strength, norm), np.arange(0, 24, 3)
    got = assert_equals_loop(task(compiled, defense), ragged(), clients, rounds=2)
    assert calls == [8, 8]
    slow = visits(train, task(stepwise, defense), ragged(), clients, rounds=2)
    assert calls == [8, 8]
    for one, other in zip(got, slow, strict=True):
        assert_close(one.update, other.update, atol=2e-5)
        assert_close(one.kept, other.kept, atol=2e-5)
        torch.testing.assert_close(one.loss, other.loss, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", ["plain", "squared"])
def test_a_large_strength_holds_rows_back(norm: Norm) -> None:
    clients = np.arange(24)
    free, held = (visits(train, task(NCF(8, (16,)), Proximal(s, norm)), ragged(), clients)[0] for s in (0.0, 10.0))
    far, near = (trained.update.squared_norms()["item"].sqrt() for trained in (free, held))
    assert float((near / far).median()) < 0.7


@pytest.mark.parametrize(
    "defense",
    [
        Chain((Proximal(0.2), ClipByNorm(0.5), GaussianNoise(0.01))),
        Chain((Proximal(0.2), Proximal(0.1, "squared"), Chain((Proximal(0.3),)))),
    ],
    ids=["with upload hooks", "several terms"],
)
@pytest.mark.parametrize("name", MODELS)
def test_chains_are_compiled_too(name: str, defense: Defense, calls: list[int]) -> None:
    assert_equals_loop(task(MODELS[name][0], defense), ragged(), np.arange(0, 24, 3))
    assert calls == [8]


@pytest.mark.parametrize(
    ("defense", "training"),
    [
        (Doubled(0.1, "squared"), LOCAL),
        (Proximal(0.1, "squared", ("item", "user")), LOCAL),
        (Chain((Proximal(0.1, "squared"), HalfGradients())), LOCAL),
        (Proximal(0.1, "squared"), replace(LOCAL, optimizer=Adam(0.01, keep=True))),
        (Proximal(0.1, "squared"), replace(LOCAL, optimizer=SGD(0.1))),
        (Proximal(0.1, "squared"), replace(LOCAL, loss="bpr", optimizer=Adam(0.01, epsilon=1e-3))),
    ],
    ids=["subclass", "other components", "gradient hook", "kept moments", "sgd", "pairwise loss"],
)
@pytest.mark.parametrize("name", ["ncf", "lightgcn"])
def test_all_else_goes_step_by_step(name: str, defense: Defense, training: LocalTraining, calls: list[int]) -> None:
    assert_equals_loop(task(MODELS[name][0], defense, training), ragged(), np.arange(0, 24, 3), rounds=2)
    assert not calls


@pytest.mark.parametrize("neutral", [Proximal(0.0), Chain((Proximal(0.0, "squared"), Defense()))], ids=str)
@pytest.mark.parametrize("model", [MF(6), NCF(8, (16,)), GCN], ids=["mf", "ncf", "lightgcn"])
def test_strength_zero_changes_no_bit_of_training(model: Model, neutral: Defense) -> None:
    with_it, without = (
        visits(train, task(model, defense), ragged(), np.arange(24))[0] for defense in (neutral, Defense())
    )
    assert_identical(with_it, without, "strength 0")


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("norm", ["plain", "squared"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_do_not_matter(name: str, norm: Norm, batch_size: int | None, calls: list[int]) -> None:
    everyone = np.arange(24)
    job = task(MODELS[name][0], Proximal(0.3, norm), replace(LOCAL, batch_size=batch_size))
    (whole,) = visits(train, job, ragged(), everyone)
    for places in (everyone[:1], everyone[23:], everyone[5:8], everyone[8:]):
        (part,) = visits(train, job, ragged(), places)
        at = torch.from_numpy(places)
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {places}")
    assert sum(calls) == 24 + 1 + 1 + 3 + 16


@pytest.mark.parametrize("shared", [True, False])
def test_kept_rows_are_held_back_from_where_this_visit_began(shared: bool, calls: list[int]) -> None:
    model, defense = NCF(8, (16,)), Proximal(0.5, "squared")
    components = tuple(replace(part, shared=shared) if part.name == "item" else part for part in model.components())
    job = Task(model, components, LOCAL, defense, 3)
    for trained in assert_equals_loop(job, ragged(), np.arange(0, 24, 3), rounds=3):
        assert ("item" in trained.update.rows) == shared
    assert calls == [8, 8, 8]
