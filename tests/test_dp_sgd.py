"""DP-SGD: clipped as a loop over examples and as Opacus does, noise where it must be, and what the ledger says."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, nan, sqrt
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from scipy import stats
from torch import Tensor, nn

from recleak import objects
from recleak.accounting import Entry, ledger
from recleak.defenses.base import Chain, Defense, hooks
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.dp_sgd import DPSGD, ClippedMeanNoise
from recleak.defenses.labels import RandomizedLabels
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.sharing import Share, ShareLess
from recleak.epsilon import gaussian_epsilon, noise_multiplier_for
from recleak.errors import ConfigError
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Normal
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols.federated import Federated, train_federated
from recleak.streams import Streams
from recleak.testing.defenses import DefenseContract, NoiseLaw
from recleak.testing.models import Wiretap, assert_close, assert_equals_loop, assert_identical, ragged, visits
from recleak.testing.oracle import oracle
from recleak.training import per_example
from recleak.training.aggregate import Aggregation
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.local import Examples, LocalData, Loss
from recleak.training.optimizers import SGD, Adam, Optimizer
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.update import Update
from recleak.wire import Upload

MODELS: dict[str, Model] = {
    "gmf": GMF(6, init=Normal(0.5)),
    "mf": MF(6, biases=True, init=Normal(0.5)),
    "ncf": NCF(8, (16,)),
}
OPTIMIZERS: dict[str, Optimizer] = {"sgd": SGD(0.1), "adam": Adam(0.01, epsilon=1e-3)}
LOCAL = LocalTraining(epochs=2, batch_size=None, negatives=2)
SOME = np.array([1, 6, 9, 12])  # of the ragged users: 2, 7, 10 and 3 interactions


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def task(model: Model, defense: Defense, training: LocalTraining = LOCAL) -> Task:
    return Task(model, defense.sharing(model.components()), training, defense, 3)


# --- the contract -----------------------------------------------------------------------------------------------------


class TestDPSGD(DefenseContract):
    defense = DPSGD(1.5, 0.2)
    neutral = DPSGD(0.0, 0.2)
    hook = "batch_sum"
    noise = NoiseLaw("norm", dict.fromkeys(("item", "item_bias", "weight", "bias"), 0.3))


class TestClippedMeanNoise(DefenseContract):
    defense = ClippedMeanNoise(0.5, 0.3)
    neutral = ClippedMeanNoise(1e30, 0.0)
    hook = "gradient"
    noise = NoiseLaw("norm", dict.fromkeys(("item", "item_bias", "weight", "bias"), 0.3))


# --- against the loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["bce", "bpr"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_clipping_is_that_of_the_loop_over_examples(model: Model, optimizer: Optimizer, loss: Loss) -> None:
    training = replace(LOCAL, optimizer=optimizer, loss=loss)
    (got,) = assert_equals_loop(task(model, DPSGD(0.0, 0.3), training), ragged(), SOME)
    (free,) = visits(train, task(model, DPSGD(0.0, 1e6), training), ragged(), SOME)
    assert (got.update.rows["item"] - free.update.rows["item"]).abs().max() > 1e-3  # the clip binds


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 8},
        {"batch_size": 7, "epochs": 3, "optimizer": Adam(0.01, keep=True)},
        {"optimizer": SGD(0.1, momentum=0.9, weight_decay=0.1), "batch_size": 5},
        {"optimizer": Adam(0.01, weight_decay=0.1, accumulate=True)},
        {"loss": "taylor", "batch_size": 1},
        {"loss": "bpr", "batch_size": 5, "optimizer": SGD(0.1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [MF(6), NCF(8, (16,))], ids=["mf", "ncf"])
def test_noisy_training_is_that_of_the_loop(model: Model, change: dict[str, Any]) -> None:
    training = replace(LOCAL, **change)
    rounds = 2 if training.optimizer.keep else 1
    for trained in assert_equals_loop(task(model, DPSGD(0.5, 0.3), training), ragged(), SOME, rounds=rounds):
        assert (trained.update.offset.diff() == 24).all()  # every row moves, so every row is sent


@dataclass(frozen=True)
class Halved(Defense):
    """A hook on gradients after the clipping."""

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return gradient.map(lambda name, tensor, owner: 0.5 * tensor)


CHAINS: dict[str, Defense] = {
    "two": Chain((DPSGD(0.5, 0.3), DPSGD(1.0, 0.2))),
    "with a penalty": Chain((Proximal(0.3, "squared"), DPSGD(0.5, 0.3))),
    "with other hooks": Chain((Halved(), DPSGD(0.5, 0.3), ClipByNorm(1.0), GaussianNoise(0.01, rows="all"))),
    "user vectors shared": Chain((Share(), DPSGD(0.5, 0.3))),
    "item rows kept": Chain((ShareLess(("item",)), DPSGD(0.5, 0.3))),
    "flipped labels": Chain((RandomizedLabels(1.0), DPSGD(0.5, 0.3))),
    "clipped mean": ClippedMeanNoise(0.02, 0.1),
    "clipped mean, touched rows": ClippedMeanNoise(0.02, 0.1, rows="touched"),
}


@pytest.mark.parametrize("defense", CHAINS.values(), ids=CHAINS)
def test_chains_are_those_of_the_loop(defense: Defense) -> None:
    training = replace(LOCAL, optimizer=Adam(0.01, keep=True), batch_size=8)
    assert_equals_loop(task(GMF(6, init=Normal(0.5)), defense, training), ragged(), SOME, rounds=2)


def test_a_personal_head_is_clipped_and_noisy_too() -> None:
    training = replace(LOCAL, optimizer=SGD(0.1))
    (noisy,) = assert_equals_loop(task(PFedRec(8), DPSGD(0.5, 0.3), training), ragged(), SOME)
    (quiet,) = assert_equals_loop(task(PFedRec(8), DPSGD(0.0, 0.3), training), ragged(), SOME)
    assert (noisy.kept.values["head.1.weight"] != quiet.kept.values["head.1.weight"]).all()


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_without_noise_and_with_a_wide_clip_nothing_changes(model: Model, batch_size: int | None) -> None:
    training = replace(LOCAL, batch_size=batch_size, optimizer=SGD(0.1))
    (got,) = visits(train, task(model, DPSGD(0.0, 1e6), training), ragged(), SOME)
    (plain,) = visits(train, task(model, Defense(), training), ragged(), SOME)
    assert_close(got.update, plain.update.with_all_rows(), atol=1e-6)
    assert_close(got.kept, plain.kept, atol=1e-6)
    torch.testing.assert_close(got.loss, plain.loss)


def one_visit(defense: Defense, data: LocalData, model: Model, training: LocalTraining, by: Any = train) -> Trained:
    job = task(model, defense, training)
    received = first_params(job.components, 24, data.n_items, job.seed)
    kept = ClientStore(job.components, training.optimizer, 24, data.n_items, job.seed).read(data.client)
    trained: Trained = by(job, received, kept, data, 0)
    return trained


def test_an_item_against_itself_is_one_row() -> None:
    item, against = np.array([3, 3, 5, 1, 1, 2]), np.array([3, 4, 5, 1, 0, 2])
    data = LocalData(np.array([2, 7]), item, np.ones(6, np.float32), against, np.array([0, 4, 6]), 9)
    training = replace(LOCAL, loss="bpr", optimizer=SGD(0.1))
    got, expected = (one_visit(DPSGD(0.5, 0.1), data, MODELS["mf"], training, by) for by in (train, oracle))
    assert_close(got.update, expected.update, atol=2e-6)
    assert_close(got.kept, expected.kept, atol=2e-6)


# --- the bound --------------------------------------------------------------------------------------------------------


def batch_sum(data: LocalData, model: Model, loss: Loss, clip: float) -> Tensor:
    """The sum of the clipped gradients of one client, all components in one vector, by one step of rate 1."""
    training = LocalTraining(1, None, SGD(1.0), loss)
    defense = Chain((Share(), DPSGD(0.0, clip)))
    update = one_visit(defense, data, model, training).update
    moved = [tensor.flatten() for tensor in (*update.values.values(), *update.rows.values())]
    return torch.cat(moved) * int(data.count[0])


def without(data: LocalData, example: int) -> LocalData:
    kept = np.arange(len(data.item)) != example
    against, offset = None if data.against is None else data.against[kept], np.array([0, kept.sum()])
    return LocalData(data.client, data.item[kept], data.label[kept], against, offset, data.n_items)


@pytest.mark.parametrize("loss", ["bce", "bpr"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_example_moves_the_sum_by_the_clip_at_most(model: Model, loss: Loss) -> None:
    data = Examples.of(ragged(), negatives=2, loss=loss).draw(np.array([6]), 0)
    for clip in (0.05, 0.3):
        whole = batch_sum(data, model, loss, clip)
        far = [float((whole - batch_sum(without(data, e), model, loss, clip)).norm()) for e in range(len(data.item))]
        assert max(far) <= clip * (1 + 1e-4)
        assert max(far) > 0.99 * clip
    free = batch_sum(data, model, loss, 1e6)
    assert (free - batch_sum(without(data, 0), model, loss, 1e6)).norm() > 0.3  # the clip was needed


def test_an_example_that_is_not_finite_counts_for_nothing() -> None:
    class Broken(MF):
        """A positive has a gradient that is not a number, and a finite loss."""

        def logits(self, params: Params, batch: Batch) -> Tensor:
            score = super().logits(params, batch)
            return torch.where(batch.own, (params["item"] * 0).sqrt().sum(-1) + score.detach(), score)

    data = Examples.of(ragged(), negatives=2).draw(np.array([6]), 0)
    negatives = data.label == 0
    rest = LocalData(
        data.client, data.item[negatives], data.label[negatives], None, np.array([0, negatives.sum()]), data.n_items
    )
    got, expected = (batch_sum(each, Broken(6), "bce", 0.3) for each in (data, rest))
    torch.testing.assert_close(got, expected)


def test_a_model_sees_an_example_as_if_it_were_the_only_one() -> None:
    class Reads(MF):
        """Its score depends on how many items are the client's own."""

        def logits(self, params: Params, batch: Batch) -> Tensor:
            return super().logits(params, batch) * batch.degree.unsqueeze(1)

    data = Examples.of(ragged(), negatives=2).draw(np.array([6]), 0)
    for example in range(len(data.item)):
        far = batch_sum(data, Reads(6), "bce", 0.05) - batch_sum(without(data, example), Reads(6), "bce", 0.05)
        assert float(far.norm()) <= 0.05 * (1 + 1e-4)


# --- the noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_number_gets_noise_of_its_scale(model: Model) -> None:
    """Touched rows and others, shared components and kept ones."""
    data, training = ragged(n_items=200), LocalTraining(1, None, SGD(1.0), negatives=2)
    who = np.arange(24)
    (noisy,), (quiet,) = (visits(train, task(model, DPSGD(each, 0.4), training), data, who) for each in (2.5, 0.0))
    size = torch.from_numpy(Examples.of(data, negatives=2).draw(who, 0).count).float()
    touched = torch.zeros(24 * 200, dtype=torch.bool)
    held = visits(train, task(model, Defense(), training), data, who)[0].update
    touched[held.owner * 200 + held.item] = True
    assert 0 < int(touched.sum()) < len(touched)
    parts: dict[str, Tensor] = {}
    for name, rows in noisy.update.rows.items():
        by = size[noisy.update.owner].reshape(-1, *[1] * (rows.dim() - 1))
        drawn = (rows - quiet.update.rows[name]) * by / (2.5 * 0.4)
        parts |= {f"{name}, touched": drawn[touched], f"{name}, not touched": drawn[~touched]}
    for of, plain in ((noisy.update, quiet.update), (noisy.kept, quiet.kept)):
        for name, value in of.values.items():
            by = size.reshape(-1, *[1] * (value.dim() - 1))
            parts[name] = (value - plain.values[name]) * by / (2.5 * 0.4)
    assert "user" in parts
    for name, drawn in parts.items():
        numbers = drawn.flatten().double().numpy()
        assert stats.kstest(numbers, "norm").pvalue > 1e-4, name
        if len(numbers) > 2000:
            assert abs(numbers.std() - 1) < 0.05, name


def test_noise_is_new_at_every_step_and_in_every_round() -> None:
    training = LocalTraining(1, None, SGD(1.0), negatives=2)
    defense = DPSGD(1.0, 1e-3)  # next to no gradient
    one = visits(train, task(MF(6), defense, training), ragged(), SOME, rounds=2)
    two = visits(train, task(MF(6), defense, replace(training, epochs=2)), ragged(), SOME)
    first, second = one[0].update.rows["item"], two[0].update.rows["item"] - one[0].update.rows["item"]
    again = one[1].update.rows["item"]
    for other in (second, again):
        correlation = np.corrcoef(first.flatten().numpy(), other.flatten().numpy())[0, 1]
        assert abs(correlation) < 0.2
        assert float(other.std() / first.std()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_bit_depends_on_the_chunk_or_the_working_memory(
    model: Model, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = replace(LOCAL, optimizer=Adam(0.01, keep=True), batch_size=batch_size)
    job, everyone = task(model, DPSGD(0.5, 0.3), training), np.arange(24)
    whole = visits(train, job, ragged(), everyone, rounds=2)
    for places, numbers in ((everyone[:1], 1 << 22), (everyone[5:8], 1 << 22), (everyone[8:], 1)):
        monkeypatch.setattr(per_example, "_NUMBERS", numbers)
        part, at = visits(train, job, ragged(), places, rounds=2), torch.from_numpy(places)
        for one, other in zip(part, whole, strict=True):
            positives = other.positives[at]
            expected = Trained(other.update.select(at), other.kept.select(at), other.loss[at], positives, one.steps)
            assert_identical(one, expected, f"clients {places}")


def test_every_row_is_on_the_wire() -> None:
    tap = Wiretap()
    protocol = Federated(rounds=2, local=replace(LOCAL, batch_size=8, optimizer=Adam(0.01)))
    model = train_federated(protocol, GMF(4), ragged(), defense=DPSGD(1.0), taps=[tap], show_progress=False)
    assert np.isfinite(model.loss).all()
    uploads = [message for message in tap.messages if isinstance(message, Upload)]
    assert len(uploads) == 2
    for upload in uploads:
        assert (upload.update.offset.diff() == 24).all()
        assert (upload.update.rows["item"] != 0).all()


# --- against Opacus ---------------------------------------------------------------------------------------------------

needs_opacus = pytest.mark.skipif(
    importlib.util.find_spec("opacus") is None, reason="Opacus is not installed: pip install 'recleak[dev]'"
)


class PlainGMF(nn.Module):
    """One client's model as a user of Opacus writes it; a score for each of the items i64[n, W]."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        n_items, factors = params["item"].shape
        self.user = nn.Embedding(1, factors, _weight=params["user"].clone())
        self.item = nn.Embedding(n_items, factors, _weight=params["item"].clone())
        self.head = nn.Linear(factors, 1)
        with torch.no_grad():
            self.head.weight.copy_(params["head.1.weight"].T)
            self.head.bias.copy_(params["head.1.bias"])

    def forward(self, item: Tensor) -> Tensor:
        score: Tensor = self.head(self.user(torch.zeros_like(item)) * self.item(item))
        return score.squeeze(-1)

    def params(self) -> Params:
        head = {"head.1.weight": self.head.weight.T, "head.1.bias": self.head.bias}
        return {"user": self.user.weight, "item": self.item.weight, **head}


def by_opacus(params: Params, data: LocalData, training: LocalTraining, defense: DPSGD) -> Params:
    """Full-batch steps of one client by Opacus."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    plain = PlainGMF(params)
    module = GradSampleModule(plain, loss_reduction="mean")
    ours = training.optimizer
    inner: torch.optim.Optimizer
    if isinstance(ours, Adam):
        inner = torch.optim.Adam(module.parameters(), lr=ours.learning_rate, eps=ours.epsilon)
    else:
        inner = torch.optim.SGD(module.parameters(), lr=ours.learning_rate)
    optimizer = DPOptimizer(
        inner,
        noise_multiplier=defense.noise_multiplier,
        max_grad_norm=defense.clip,
        expected_batch_size=len(data.item),
        generator=torch.Generator().manual_seed(0),
    )
    items = [data.item] if data.against is None else [data.item, data.against]
    item, label = torch.from_numpy(np.stack(items, 1)), torch.from_numpy(data.label)
    for _ in range(training.epochs):
        optimizer.zero_grad()
        score = module(item)
        if data.against is None:
            loss = nn.functional.binary_cross_entropy_with_logits(score[:, 0], label)
        else:
            loss = -nn.functional.logsigmoid(score[:, 0] - score[:, 1]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in plain.params().items()}


def by_us(params: Params, data: LocalData, training: LocalTraining, defense: DPSGD) -> Params:
    """The same by the cohort."""
    model = GMF(params["item"].shape[1])
    job = Task(model, model.components(), training, defense, 3)
    kept = ClientStore(job.components, training.optimizer, 24, data.n_items, 3).read(data.client)
    kept = replace(kept, values={**kept.values, "user": params["user"]})
    received = {name: value for name, value in params.items() if name != "user"}
    trained = train(job, received, kept, data, 0)
    moved = {**{n: v[0] for n, v in trained.update.values.items()}, **trained.update.rows}
    return {"user": trained.kept.values["user"], **{name: received[name] + moved[name] for name in received}}


def beginning(n_items: int) -> Params:
    params = {}
    for part in GMF(8, init=Normal(0.5)).components():
        params[part.name] = part.draw(1)[0] if part.storage == "dense" else part.draw(1, np.arange(n_items))
    return {**params, "user": params["user"][:1]}


@needs_opacus
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["bce", "bpr"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_opacus(optimizer: Optimizer, loss: Loss) -> None:
    data = Examples.of(ragged(), negatives=2, loss=loss).draw(np.array([6]), 0)
    training, start = LocalTraining(3, None, optimizer, loss), beginning(24)
    defense = DPSGD(0.0, 0.2)
    got, expected = (by(start, data, training, defense) for by in (by_us, by_opacus))
    free = by_us(start, data, training, DPSGD(0.0, 1e6))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(free["item"], expected["item"], atol=1e-3)  # the clip binds


@needs_opacus
@pytest.mark.filterwarnings("ignore")
def test_noise_is_as_large_as_that_of_opacus() -> None:
    data = Examples.of(ragged(n_items=500), negatives=2).draw(np.array([6]), 0)
    training, start = LocalTraining(1, None, SGD(1.0)), beginning(500)
    expected = 3.0 * 0.2 / len(data.item)
    for by in (by_us, by_opacus):
        noisy, quiet = (by(start, data, training, DPSGD(each, 0.2))["item"] for each in (3.0, 0.0))
        drawn = ((noisy - quiet) / expected).double().flatten().numpy()
        assert stats.kstest(drawn, "norm").pvalue > 1e-4
        assert drawn.std() == pytest.approx(1, abs=0.05)


# --- the ledger -------------------------------------------------------------------------------------------------------

USES = np.array([0, 1, 1, 2, 2, 9])
DELTA = 1e-5


def entries(
    defense: Defense, training: LocalTraining | None = None, *, uses: Any = USES, how: Aggregation = "mean"
) -> list[Entry]:
    training = training or LocalTraining(epochs=3, negatives=4)
    parts = GMF(4).components()
    return ledger(
        defense,
        components=parts,
        n_items=12,
        participations=uses,
        training=training,
        aggregation=how,
        delta=DELTA,
    )


def test_an_example_and_an_interaction_have_a_row() -> None:
    example, interaction = entries(DPSGD(20.0))
    assert "one example" in example.unit
    assert "5 examples" in interaction.unit
    for row, times in ((example, 1), (interaction, 5)):
        assert row.claimed == pytest.approx(gaussian_epsilon(times * sqrt(3) / 20, DELTA))
        assert row.composed == pytest.approx(gaussian_epsilon(times * sqrt(3 * 9) / 20, DELTA))
        assert row.typical == pytest.approx(gaussian_epsilon(times * sqrt(3 * 2) / 20, DELTA))
        assert (row.times, row.delta) == (9, DELTA)
        assert f"{gaussian_epsilon(2 * times * sqrt(3 * 9) / 20, DELTA):.3g}" in row.words
    assert "4 examples" in entries(DPSGD(20.0), LocalTraining(loss="bpr", negatives=4))[1].unit


def test_neither_the_clip_nor_the_size_of_batches_changes_epsilon() -> None:
    expected = [row.composed for row in entries(DPSGD(2.0))]
    assert [row.composed for row in entries(DPSGD(2.0, 7.0))] == expected
    for size in (1, 64, None):
        training = LocalTraining(epochs=3, negatives=4, batch_size=size)
        assert [row.composed for row in entries(DPSGD(2.0), training)] == expected


def test_what_comes_beside_it_keeps_its_own_rows() -> None:
    alone, upload = entries(DPSGD(2.0)), entries(Chain((ClipByNorm(1.0), GaussianNoise(3.0, rows="all"))))
    both = entries(Chain((DPSGD(2.0), ClipByNorm(1.0), GaussianNoise(3.0, rows="all"))))
    assert both == [*alone, *upload]


@pytest.mark.parametrize("why", ["noise is 0", "own items", "clamps the mean gradient", "No component"])
def test_there_is_no_epsilon_where_none_follows(why: str) -> None:
    rows = {
        "noise is 0": entries(DPSGD(0.0)),
        "own items": entries(DPSGD(1.0), how="weighted"),
        "clamps the mean gradient": entries(ClippedMeanNoise()),
        "No component": entries(Chain((ShareLess(("item", "head.1.weight", "head.1.bias")), DPSGD(1.0)))),
    }[why]
    assert all(row.composed is None for row in rows)
    assert any(why in row.words for row in rows)


def test_epochs_must_be_known() -> None:
    with pytest.raises(ConfigError, match="Got no training"):
        ledger(DPSGD(1.0), components=GMF(4).components(), n_items=12, participations=USES)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("examples", [1, 5])
def test_noise_for_an_epsilon_has_this_epsilon_in_the_ledger(epsilon: float, examples: int) -> None:
    training = LocalTraining(epochs=2, negatives=4)
    defense = DPSGD.calibrated(epsilon, DELTA, uploads=300, epochs=2, examples=examples)
    row = entries(defense, training, uses=np.array([3, 300]))[0 if examples == 1 else 1]
    assert row.composed == pytest.approx(epsilon, rel=1e-6)
    weaker = replace(defense, noise_multiplier=0.99 * defense.noise_multiplier)
    more = entries(weaker, training, uses=np.array([3, 300]))[0 if examples == 1 else 1].composed
    assert more is not None
    assert more > epsilon


@pytest.mark.parametrize(("epsilon", "uses"), [(1.0, 1), (1.0, 400), (10.0, 60)])
def test_noise_for_an_epsilon_agrees_with_two_accountants(epsilon: float, uses: int) -> None:
    sigma = noise_multiplier_for(epsilon, DELTA, uses)
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), uses)
    losses = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(DELTA)
    assert losses == pytest.approx(epsilon, rel=0.01)
    assert epsilon <= rdp.RdpAccountant().compose(event).get_epsilon(DELTA) < 1.2 * epsilon


@pytest.mark.parametrize(("epsilon", "delta", "uses"), [(0.0, 0.1, 1), (inf, 0.1, 1), (1.0, 0.0, 1), (1.0, 0.1, 0)])
def test_an_impossible_demand_is_refused(epsilon: float, delta: float, uses: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        noise_multiplier_for(epsilon, delta, uses)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [LightGCN(4), FeatureGCN(3, 4), FeatureGCN(3, 4, item_side="features")], ids=["star", "gcn", "features"]
)
def test_a_model_that_reads_all_items_for_each_score_is_refused(model: Model) -> None:
    features = torch.zeros(24, 3) if model.needs_user_features else None
    for defense in (DPSGD(1.0), Chain((ClipByNorm(1.0), DPSGD(1.0)))):
        with pytest.raises(ConfigError, match="reads all items of a client"):
            train_federated(Federated(rounds=0), model, ragged(), defense=defense, user_features=features)
    train_federated(Federated(rounds=0), model, ragged(), defense=ClippedMeanNoise(), user_features=features)


def test_clipping_counts_as_a_hook_on_gradients() -> None:
    assert hooks(DPSGD(1.0)) == {"batch_sum", "gradient"}
    assert hooks(DPSGD(0.0)) == {"gradient"}
    assert hooks(Chain((Defense(), DPSGD(0.0)))) == {"gradient"}
    assert hooks(ClippedMeanNoise()) == {"gradient"}
    assert Chain((Defense(), DPSGD(1.0, 3.0), DPSGD(1.0, 2.0))).example_bound == 2.0
    assert Chain((Defense(), ClippedMeanNoise())).holds_every_row
    assert not Chain((Defense(), ClippedMeanNoise(rows="touched"))).holds_every_row
    assert Chain((Defense(),)).example_bound is None


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (DPSGD, {"noise_multiplier": -1.0}),
        (DPSGD, {"noise_multiplier": nan}),
        (DPSGD, {"noise_multiplier": 1.0, "clip": 0.0}),
        (DPSGD, {"noise_multiplier": 1.0, "clip": inf}),
        (ClippedMeanNoise, {"limit": 0.0}),
        (ClippedMeanNoise, {"std": -1.0}),
        (ClippedMeanNoise, {"rows": "some"}),
    ],
)
def test_settings_that_cannot_be(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make(**settings)


def test_they_are_found_by_name() -> None:
    assert objects.build("defense", {"use": "dp-sgd", "noise_multiplier": 1.5}) == DPSGD(1.5)
    assert objects.build("defense", {"use": "clipped-mean-noise"}) == ClippedMeanNoise(1.0, 4.84)
