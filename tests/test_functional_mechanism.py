"""The functional mechanism: its polynomial, its sensitivity, the loss it is for, and training under it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf, log, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from recleak.accounting import ledger
from recleak.defenses.base import Chain, Defense, check
from recleak.defenses.functional_mechanism import FunctionalMechanism, Redraw, sensitivity
from recleak.errors import ConfigError, NotFoundError
from recleak.models.base import Batch, Model
from recleak.models.components import Component, FanIn, Normal
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.streams import Streams
from recleak.testing.defenses import EXAMPLE_COMPONENTS, DefenseContract, example_update
from recleak.testing.models import ModelContract, assert_equals_loop, assert_identical, ragged, visits
from recleak.training.central import example_losses
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.local import Examples
from recleak.training.losses import second_order
from recleak.training.optimizers import SGD, Adam
from recleak.update import Update


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


PARTS = (*EXAMPLE_COMPONENTS, Component("head.2.weight", "dense", "head", (5, 1), layer=2))


class TestFunctionalMechanism(DefenseContract):
    """It acts on the loss; uploads pass unchanged."""

    components = PARTS
    defense = FunctionalMechanism(1.0, 100)
    neutral = FunctionalMechanism(inf, 100)


# --- the polynomial ---------------------------------------------------------------------------------------------------


def moved(n_clients: int = 3) -> Update:
    update = example_update(n_clients, components=PARTS).only({"head.2.weight"})
    generator = torch.Generator().manual_seed(2)
    return replace(update, received={"head.2.weight": torch.randn(5, 1, generator=generator)})


def test_term_and_gradient_are_those_of_the_polynomial() -> None:
    """For each client n1 . h + sum over m <= l of N2_ml h_m h_l, with the draws taken from the streams."""
    update, defense = moved(), FunctionalMechanism(2.0, 10)
    streams = Streams.simulated(1, 2, update.client)
    leaf = update.values["head.2.weight"].clone().requires_grad_()
    term = defense.penalty(replace(update, values={"head.2.weight": leaf}), streams)
    assert term is not None
    (slope,) = torch.autograd.grad(term.sum(), leaf)
    position, zero, scale = torch.arange(3), torch.zeros(3, dtype=torch.int64), (5 + 25 / 4) / 20
    n1 = scale * streams.laplace("linear", position, zero, (5,)).double()
    n2 = scale * streams.laplace("quadratic", position, zero, (5, 5)).double()
    for c in range(3):
        h = (update.received["head.2.weight"] + update.values["head.2.weight"][c]).double().flatten()
        value, gradient = 0.0, torch.zeros(5, dtype=torch.float64)
        for m in range(5):
            value += float(n1[c, m] * h[m])
            gradient[m] += n1[c, m]
            for k in range(m, 5):
                value += float(n2[c, m, k] * h[m] * h[k])
                gradient[m] += n2[c, m, k] * h[k]
                gradient[k] += n2[c, m, k] * h[m]
        assert float(term.detach()[c]) == pytest.approx(value, rel=1e-5)
        torch.testing.assert_close(slope[c].flatten().double(), gradient, atol=1e-5, rtol=1e-5)


def test_coefficients_are_laplace_of_the_stated_scale() -> None:
    """At h = (1, 0, ...) the term is n1_1 + N2_11; at (-1, 0, ...) it is N2_11 - n1_1."""
    clients, defense = 4000, FunctionalMechanism(0.5, 40)
    h = torch.zeros(5, 1)
    h[0] = 1
    update = replace(moved(clients), values={"head.2.weight": torch.zeros(clients, 5, 1)})
    streams = Streams.simulated(1, 2, update.client)
    terms = [defense.penalty(replace(update, received={"head.2.weight": s * h}), streams) for s in (1.0, -1.0)]
    plus, minus = (term for term in terms if term is not None)
    scale = (5 + 25 / 4) / (0.5 * 40)
    assert defense.scale(5) == pytest.approx(scale)
    for sample in (plus - minus, plus + minus):
        assert stats.kstest((sample / 2).numpy(), "laplace", args=(0, scale)).pvalue > 1e-4
        assert stats.kstest((sample / 2).numpy(), "laplace", args=(0, 1.5 * scale)).pvalue < 1e-4


@pytest.mark.parametrize(("redraw", "same"), [("step", False), ("never", True)])
def test_noise_is_drawn_anew_or_never(redraw: Redraw, same: bool) -> None:
    update, defense = moved(), FunctionalMechanism(1.0, 10, redraw)
    moments = [Streams.simulated(1, round, update.client).at(step) for round, step in ((0, 0), (0, 1), (4, 0))]
    by = [defense.penalty(update, streams) for streams in moments]
    first, *others = (term for term in by if term is not None)
    assert len(others) == 2
    assert all(torch.equal(first, other) == same for other in others)
    assert len(set(first.tolist())) == 3  # each client has its own


def coefficients(q: Tensor, label: float) -> Tensor:
    """Of h_m, then of h_m h_l for m <= l: those of one example."""
    pairs = torch.outer(q, q) / 8
    square = pairs.triu() + pairs.triu(1)
    rows, columns = torch.triu_indices(len(q), len(q))
    return torch.cat([(0.5 - label) * q, square[rows, columns]])


@given(st.integers(1, 6), st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
def test_one_example_moves_coefficients_by_the_sensitivity_at_most(
    width: int, seed: int, first: bool, second: bool, corners: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.rand(2, width, generator=generator, dtype=torch.float64)
    if corners:
        one, other = one.round(), other.round()
    far = float((coefficients(one, float(first)) - coefficients(other, float(second))).abs().sum())
    assert far <= width + width**2 / 8 + 1e-9 <= sensitivity(width) + 1e-9


def of_pair(q: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients of a pair, of h_m and of h_m h_l for m <= l, with q = q_uv - q_uv'."""
    square = np.triu(np.outer(q, q) / 8) + np.triu(np.outer(q, q) / 8, 1)
    return np.concatenate([-q / 2, square[np.triu_indices(len(q))]])


@pytest.mark.parametrize("width", [1, 2, 3])
def test_one_pair_moves_coefficients_by_the_sensitivity_at_most(width: int) -> None:
    """Lemma 4.3, on all corners and middles of [-1, 1]^d, which are where the largest change is."""
    corners = np.array(list(product((-1.0, 0.0, 1.0), repeat=width)))
    rows = np.stack([of_pair(q) for q in corners])
    far = np.abs(rows[:, None] - rows[None]).sum(axis=2)
    assert far.max() <= width + width**2 / 8 <= sensitivity(width)
    assert 2 * np.abs(rows).sum(axis=1).max() == pytest.approx(sensitivity(width))  # as the lemma derives it


def test_the_loss_of_pairs_is_the_polynomial_of_these_coefficients() -> None:
    generator = np.random.default_rng(0)
    q, other, h = generator.random(4), generator.random(4), generator.standard_normal(4)
    rows, columns = np.triu_indices(4)
    expected = log(2) + of_pair(q - other) @ np.concatenate([h, h[rows] * h[columns]])
    got = example_losses("bpr-taylor", torch.tensor([[h @ q, h @ other]]), None)
    assert float(got) == pytest.approx(expected)


def test_the_loss_is_the_polynomial_of_these_coefficients() -> None:
    generator = torch.Generator().manual_seed(0)
    q, h = torch.rand(4, generator=generator, dtype=torch.float64), torch.randn(4, generator=generator).double()
    rows, columns = torch.triu_indices(4, 4)
    monomials = torch.cat([h, h[rows] * h[columns]])
    for label in (0.0, 1.0):
        expected = log(2) + coefficients(q, label) @ monomials
        got = second_order((h @ q).reshape(1, 1), torch.tensor([[label]]).double(), torch.ones(1, 1).double())
        torch.testing.assert_close(got[0], expected)


@given(st.floats(-0.1, 0.1), st.sampled_from([0.0, 1.0]))
def test_the_loss_is_cross_entropy_near_zero(score: float, label: float) -> None:
    got = second_order(*(torch.tensor([[x]], dtype=torch.float64) for x in (score, label, 1.0)))
    assert float(got) == pytest.approx(log(1 + np.exp(score)) - label * score, abs=1e-6)


# --- the bounded head -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [(6,), (6, 4), ()])
def test_a_bounded_head_multiplies_numbers_between_0_and_1(hidden: tuple[int, ...]) -> None:
    model = NCF(3, hidden, bounded=True)
    names = [part.name for part in model.components()]
    last = f"head.{len(hidden) + 1}"
    assert f"{last}.weight" in names
    assert f"{last}.bias" not in names
    params = {part.name: 3 * part.draw(0) for part in model.components() if part.storage != "per_item"}
    params["item"] = 3 * torch.randn(1, 7, 3, generator=torch.Generator().manual_seed(0))
    batch = Batch(own=torch.zeros(1, 7, dtype=torch.bool), degree=torch.zeros(1))
    q = torch.cat([params["user"].unsqueeze(1).expand(1, 7, 3), params["item"]], dim=2)
    for layer in range(1, len(hidden) + 1):
        q = (q.relu() if layer > 1 else q) @ params[f"head.{layer}.weight"] + params[f"head.{layer}.bias"].unsqueeze(1)
    q = q.clamp(0, 1)
    torch.testing.assert_close(model.logits(params, batch), (q @ params[f"{last}.weight"]).squeeze(2))


@pytest.mark.heavy
class TestBoundedNCF(ModelContract):
    model = NCF(8, (16, 8), bounded=True)


@pytest.mark.heavy
class TestBoundedFeatureGCN(ModelContract):
    model = FeatureGCN(5, 8, (16,), init=Normal(0.5), dense_init=FanIn(3.0), bounded=True)
    user_features = 5


# --- training ---------------------------------------------------------------------------------------------------------

LOCAL = LocalTraining(epochs=2, batch_size=8, optimizer=SGD(0.1), negatives=2, loss="taylor")
GCN = FeatureGCN(5, 6, (7,), init=Normal(0.5), dense_init=FanIn(), bounded=True)


def task(model: Model, defense: Defense, training: LocalTraining = LOCAL) -> Task:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(24, 5, generator=generator) if model.needs_user_features else None
    return Task(model, model.components(), training, defense, 3, user_features=features)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.01, epsilon=1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("model", [MF(6), NCF(8, (16, 4)), NCF(8, (16, 4), bounded=True)], ids=["mf", "ncf", "bounded"])
def test_the_loss_trains_as_in_the_loop(model: Model, optimizer: SGD | Adam) -> None:
    LOCAL.check()
    assert_equals_loop(task(model, Defense(), replace(LOCAL, optimizer=optimizer)), ragged(), np.arange(0, 24, 3))


def test_examples_are_those_of_cross_entropy() -> None:
    client = np.array([2, 5])
    drawn = (Examples.of(ragged(), loss=loss).draw(client, 0) for loss in ("bce", "taylor"))
    one, other = drawn
    assert np.array_equal(one.item, other.item)
    assert np.array_equal(one.label, other.label)


@pytest.mark.parametrize("redraw", ["step", "never"])
@pytest.mark.parametrize("model", [NCF(8, (16, 5), bounded=True), GCN], ids=["ncf", "gcn"])
def test_training_is_that_of_the_loop(model: Model, redraw: Redraw) -> None:
    defense = FunctionalMechanism(1.0, 50, redraw)
    check(defense, model.components())
    job = task(model, defense)
    got = assert_equals_loop(job, ragged(), np.arange(0, 24, 3), rounds=2)
    plain = visits(train, replace(job, defense=Defense()), ragged(), np.arange(0, 24, 3))
    assert not torch.allclose(got[0].update.values["head.2.weight"], plain[0].update.values["head.2.weight"])


@pytest.mark.parametrize("model", [NCF(8, (16, 16), bounded=True), GCN], ids=["ncf", "gcn"])
def test_chunks_do_not_matter(model: Model) -> None:
    everyone = np.arange(24)
    job = task(model, Chain((FunctionalMechanism(1.0, 50),)))
    (whole,) = visits(train, job, ragged(), everyone)
    for places in (everyone[:1], everyone[5:8], everyone[8:]):
        (part,) = visits(train, job, ragged(), places)
        at = torch.from_numpy(places)
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {places}")


def test_no_noise_changes_no_bit_of_training() -> None:
    model = NCF(8, (16,), bounded=True)
    one, other = (
        visits(train, task(model, defense), ragged(), np.arange(24))[0]
        for defense in (FunctionalMechanism(inf, 50), Defense())
    )
    assert_identical(one, other, "epsilon inf")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_models_that_do_not_fit() -> None:
    defense = FunctionalMechanism(1.0, 50)
    check(defense, NCF(4, (4,), bounded=True).components())
    with pytest.raises(ConfigError, match=r"(?s)last layer has a bias, 'head\.2\.bias'.*bounded=True"):
        check(defense, NCF(4, (4,)).components())
    with pytest.raises(ConfigError, match="expected a head"):
        check(defense, MF(4).components())
    with pytest.raises(ConfigError, match="is kept by clients"):
        check(defense, tuple(part for part in PFedRec(4).components() if not part.name.endswith("bias")))
    with pytest.raises(NotFoundError, match=r"Unknown component 'head\.9\.weight'"):
        check(replace(defense, weight="head.9.weight"), NCF(4, (4,), bounded=True).components())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "Got epsilon=0.0"),
        ({"epsilon": nan}, "Got epsilon=nan"),
        ({"examples": 0}, "Got examples=0"),
        ({"redraw": "round"}, "Got redraw='round', expected one of step, never"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionalMechanism(**{"epsilon": 1.0, "examples": 10, **change})  # type: ignore[arg-type]


def test_nothing_is_promised() -> None:
    (row,) = ledger(FunctionalMechanism(0.4, 50), components=PARTS, n_items=10, participations=np.array([3]))
    assert row.composed is None
    assert "0.4 is claimed" in row.words
    assert "the lemma does not apply" in row.words
