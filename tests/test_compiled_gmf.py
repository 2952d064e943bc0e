"""The compiled visits of generalized matrix factorization against the general way, and against the oracle's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.dp_sgd import DPSGD, ClippedMeanNoise
from recleak.defenses.labels import FakeItems
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.sharing import Share
from recleak.kernels_gmf import clipped_sums
from recleak.models.components import Normal, sharing
from recleak.models.mf import GMF
from recleak.testing.models import assert_close, assert_equals_loop, ragged, visits
from recleak.training import cohort, compiled_gmf
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.optimizers import SGD, Adam

MODEL = GMF(5, init=Normal(0.5))
FULL = LocalTraining(epochs=3, batch_size=None, optimizer=Adam(0.05), negatives=2, resample=True)
KEEP = LocalTraining(epochs=2, batch_size=None, optimizer=Adam(0.05, keep=True), negatives=3, resample=True)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


@contextmanager
def general() -> Iterator[None]:
    """All visits go the general way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohort, "fits", lambda *_: False)
        yield


def assert_same(one: Trained, other: Trained) -> None:
    """To float tolerance."""
    assert_close(one.update, other.update, atol=1e-5)
    assert_close(one.kept, other.kept, atol=1e-5)
    torch.testing.assert_close(one.loss, other.loss, atol=1e-5, rtol=1e-4)
    assert torch.equal(one.positives, other.positives)
    assert one.steps == other.steps


@pytest.mark.parametrize("shared", [{}, {"user": True}, {"head.1.weight": False}], ids=["kept", "sent", "own head"])
@pytest.mark.parametrize("training", [FULL, KEEP], ids=["fresh", "kept"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_equals_the_general_way_and_the_loop(shared: dict[str, bool], training: LocalTraining, bias: bool) -> None:
    model = GMF(5, bias, init=Normal(0.5))
    task, client = Task(model, sharing(model.components(), shared), training, Defense(), 3), np.arange(0, 24, 3)
    assert compiled_gmf.fits(task, torch.device("cpu"))
    got = assert_equals_loop(task, ragged(), client, rounds=3)
    with general():
        expected = visits(train, task, ragged(), client, rounds=3)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    "defense", [FakeItems(0.5), Chain((ClipByNorm(0.05), GaussianNoise(0.01)))], ids=["fake items", "noise"]
)
def test_defenses_before_and_after(defense: Defense) -> None:
    task, client = Task(MODEL, defense.sharing(MODEL.components()), KEEP, defense, 3), np.arange(0, 24, 3)
    got = visits(train, task, ragged(), client, rounds=2)
    with general():
        expected = visits(train, task, ragged(), client, rounds=2)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


RATES = replace(KEEP, optimizer=Adam(0.05, {"item": 0.01, "user": 0.02, "head.1.weight": 0.03}, keep=True))


@pytest.mark.parametrize("training", [FULL, KEEP, RATES], ids=["fresh", "kept", "rates"])
@pytest.mark.parametrize(
    "defense",
    [
        DPSGD(0.0, 0.05),
        DPSGD(0.7, 0.05),
        Chain((Share(), DPSGD(0.3, 2.0))),
        Chain((DPSGD(0.3, 2.0), Chain((Share(), DPSGD(0.2, 0.05))))),
    ],
    ids=["clip", "noise", "chain", "two"],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_clipped_examples_with_noise(
    training: LocalTraining, defense: Defense, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(compiled_gmf, "_walk_hooked")  # all is one loop
    model = GMF(5, bias, init=Normal(0.5))
    task, client = Task(model, defense.sharing(model.components()), training, defense, 3), np.arange(0, 24, 3)
    assert compiled_gmf.fits(task, torch.device("cpu"))
    got = visits(train, task, ragged(), client, rounds=3)
    with general():
        expected = visits(train, task, ragged(), client, rounds=3)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    assert len(got[0].update.item) == 24 * len(client), "every row is sent"


def test_an_example_that_is_not_finite_counts_for_nothing() -> None:
    rng = np.random.default_rng(0)
    table, vectors = rng.normal(size=(6, 5)).astype(np.float32), rng.normal(size=(2, 1, 5)).astype(np.float32)
    table[3] = 3e38

    def sums(row: list[int]) -> list[NDArray[np.float32]]:
        out = [np.zeros(shape, np.float32) for shape in ((6, 5), (1, 5), (1, 5), (1,))]
        label, offset = np.ones(len(row), np.float32), np.array([0, len(row)])
        clipped_sums(
            np.array(row), label, offset, table, *vectors, np.ones(1, np.float32), True, 0.3, *out,
            np.zeros(1, np.float32),
        )  # fmt: skip
        return out

    for got, expected in zip(sums([1, 3, 2]), sums([1, 2]), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize(
    "defense",
    [
        ClippedMeanNoise(0.01, 0.5),
        ClippedMeanNoise(0.01, 0.5, "touched"),
        Chain((DPSGD(0.7, 0.05), ClippedMeanNoise(0.01, 0.1))),
    ],
    ids=["all rows", "touched rows", "after clipped examples"],
)
def test_hooks_on_the_mean_gradient(defense: Defense) -> None:
    task, client = Task(MODEL, defense.sharing(MODEL.components()), KEEP, defense, 3), np.arange(0, 24, 3)
    assert compiled_gmf.fits(task, torch.device("cpu"))
    got = visits(train, task, ragged(), client, rounds=3)
    with general():
        expected = visits(train, task, ragged(), client, rounds=3)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("defense", [Defense(), DPSGD(0.5)], ids=["none", "noise"])
def test_a_client_does_not_depend_on_its_chunk(defense: Defense) -> None:
    task, data = Task(MODEL, MODEL.components(), KEEP, defense, 3), ragged()
    together = visits(train, task, data, np.arange(24), rounds=2)[-1]
    for client in (0, 7, 23):
        alone = visits(train, task, data, np.array([client]), rounds=2)[-1]
        mine = together.update.select(torch.tensor([client]))
        assert torch.equal(alone.update.rows["item"], mine.rows["item"])
        assert torch.equal(alone.update.item, mine.item)
        assert float(alone.loss) == float(together.loss[client])


def test_what_the_loop_does_not_know_goes_the_general_way() -> None:
    cpu = torch.device("cpu")

    def fits(training: LocalTraining, model: GMF = MODEL, defense: Defense | None = None) -> bool:
        return compiled_gmf.fits(Task(model, model.components(), training, defense or Defense()), cpu)

    class Own(GMF):
        """It may compute something else."""

    assert fits(FULL)
    assert not fits(LocalTraining(batch_size=32))
    assert not fits(LocalTraining(batch_size=None, optimizer=SGD(0.1)))
    assert not fits(LocalTraining(batch_size=None, optimizer=Adam(0.1, weight_decay=0.1)))
    assert not fits(LocalTraining(batch_size=None, loss="bpr"))
    assert not fits(FULL, Own(5))
    assert not fits(FULL, defense=Proximal(0.1))
    for defense in (DPSGD(1.0), ClippedMeanNoise()):
        assert not compiled_gmf.direct(Task(MODEL, MODEL.components(), KEEP, defense), torch.float32)
    assert not compiled_gmf.fits(Task(MODEL, MODEL.components(), FULL), torch.device("meta"))


def test_full_batches_have_few_widths() -> None:
    from recleak.training.local import padded

    count = np.arange(1, 5000)
    width = padded(None, count)
    assert (width >= count).all()
    assert (width[64:] < 1.5 * count[64:] + 32).all()
    assert len(np.unique(width)) <= 18
    assert (padded(40, count) == 64).all()


def test_nothing_is_read_beyond_the_table() -> None:
    data: Interactions = ragged(n_users=6, n_items=40)
    task = Task(MODEL, MODEL.components(), KEEP, Defense(), 1)
    trained = visits(train, task, data, np.arange(6), rounds=4)[-1]
    assert bool((trained.update.item < 40).all())
    for low, high in zip(trained.update.offset[:-1], trained.update.offset[1:], strict=True):
        assert bool((trained.update.item[low:high].diff() > 0).all()), "items ascend within a client"
