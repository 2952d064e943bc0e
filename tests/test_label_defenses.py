"""Randomized labels, fake items, signs: their laws, and what follows in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, inf, nan
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from recleak.defenses.base import Chain, Defense, hooks
from recleak.defenses.labels import FakeItems, RandomizedLabels
from recleak.defenses.sparsify import SignOnly
from recleak.errors import ConfigError
from recleak.models.base import Model
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import MF
from recleak.protocols.federated import Federated, train_federated
from recleak.streams import Streams
from recleak.testing import DefenseContract, example_update
from recleak.testing.models import Wiretap, assert_identical, ragged
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, defended_data, train
from recleak.training.local import Examples, LocalData
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.wire import Upload


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


# --- the contract: updates pass labels' and items' defenses untouched


class TestRandomizedLabelsAsDefense(DefenseContract):
    defense = RandomizedLabels(1.0)
    neutral = RandomizedLabels(inf)


class TestFakeItemsAsDefense(DefenseContract):
    defense = FakeItems(1.0)
    neutral = FakeItems(0.0)


class TestSignOnly(DefenseContract):
    defense = SignOnly()
    neutral = None


class TestSignOnlyWithStep(DefenseContract):
    defense = SignOnly(0.01)
    neutral = None


class TestChainWithSigns(DefenseContract):
    defense = Chain((RandomizedLabels(1.0), FakeItems(0.5), SignOnly(0.5)))
    neutral = Chain((RandomizedLabels(inf), FakeItems(0)))


# --- the same for the data hook


def local_data(client: NDArray[np.int64] | None = None, *, round: int = 0, resample: bool = False) -> LocalData:
    """Clients with 1 to 10 positives of 24 items and five times as many examples; negatives come more than once."""
    examples = Examples.of(ragged(), negatives=4, resample=resample, seed=3)
    return examples.draw(np.arange(24) if client is None else client, round)


def streams_of(data: LocalData, seed: int = 5) -> Streams:
    return Streams.simulated(seed, 0, data.client)


def assert_same_data(got: LocalData, expected: LocalData) -> None:
    for name in ("client", "item", "label", "offset"):
        one, other = getattr(got, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other), name
    assert (got.against, got.n_items) == (expected.against, expected.n_items)


class DataContract:
    defense: ClassVar[Defense]
    neutral: ClassVar[Defense]

    def test_uses_the_data_hook_only(self) -> None:
        assert hooks(self.defense) == {"data"}

    def test_result_has_the_layout_of_local_data(self) -> None:
        before = local_data()
        data = self.defense.data(before, streams_of(before))
        assert np.array_equal(data.client, before.client)
        assert data.offset.dtype == data.item.dtype == np.int64
        assert data.label.dtype == np.float32
        assert data.offset[0] == 0
        assert data.offset[-1] == len(data.item) == len(data.label)
        assert (np.diff(data.offset) > 0).all()
        assert set(data.label.tolist()) == {0.0, 1.0}
        assert data.item.min() >= 0
        assert data.item.max() < data.n_items == before.n_items

    def test_a_client_does_not_depend_on_the_others(self) -> None:
        data = local_data()
        together = self.defense.data(data, streams_of(data))
        order = np.array([5, 2, 23, 9])
        for positions in (order, *np.arange(24)[:, None]):
            part = self.defense.data(data.select(positions), streams_of(data).select(positions))
            assert_same_data(part, together.select(positions))

    def test_neutral_setting_is_the_identity(self) -> None:
        for data in (local_data(), pairs()):
            assert self.neutral.data(data, streams_of(data)) is data

    def test_input_is_not_changed(self) -> None:
        data, copy = local_data(), local_data()
        self.defense.data(data, streams_of(data))
        assert_same_data(data, copy)

    def test_draws_are_those_of_the_streams(self) -> None:
        data = local_data()
        first, second = (self.defense.data(data, streams_of(data)) for _ in range(2))
        assert_same_data(first, second)
        others = [self.defense.data(data, streams_of(data, seed=6))]
        others += [Chain((*[Defense()] * n, self.defense)).data(data, streams_of(data)) for n in (0, 1)]
        for one, other in pairwise([first, *others]):
            assert one.label.tolist() != other.label.tolist() or one.item.tolist() != other.item.tolist()

    def test_a_real_device_draws_fresh(self) -> None:
        data = local_data(np.array([3]))
        results = [self.defense.data(data, Streams.from_os()) for _ in range(8)]
        assert len({(*each.item.tolist(), *each.label.tolist()) for each in results}) > 1
        assert_one_label_per_item(results[0])

    def test_pairwise_losses_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"Got pairs of items .* for .*, expected single examples"):
            self.defense.data(pairs(), streams_of(pairs()))
        with pytest.raises(ConfigError, match="loss='bce'"):
            federated(self.defense, MF(4), LocalTraining(loss="bpr"))


class TestRandomizedLabelsOnData(DataContract):
    defense = RandomizedLabels(1.0)
    neutral = RandomizedLabels(inf)


class TestFakeItemsOnData(DataContract):
    defense = FakeItems(0.7)
    neutral = FakeItems(0.0)


class TestBothOnData(DataContract):
    defense = Chain((FakeItems(0.7), RandomizedLabels(1.0)))
    neutral = Chain((RandomizedLabels(inf), FakeItems(0.0)))


def pairs() -> LocalData:
    return Examples.of(ragged(), loss="bpr").draw(np.arange(24), 0)


def by_item(data: LocalData) -> dict[tuple[int, int], set[float]]:
    """The labels of each (client, item)."""
    labels: dict[tuple[int, int], set[float]] = {}
    for client, item, label in zip(data.client[data.owner], data.item, data.label.tolist(), strict=True):
        labels.setdefault((int(client), int(item)), set()).add(label)
    return labels


def assert_one_label_per_item(data: LocalData) -> None:
    assert all(len(labels) == 1 for labels in by_item(data).values())


# --- randomized labels


def wide(clients: int, items: int, label: float) -> LocalData:
    """Every client has every item, once."""
    return LocalData(
        np.arange(clients) * 7,
        np.tile(np.arange(items), clients),
        np.full(clients * items, label, np.float32),
        None,
        np.arange(clients + 1) * items,
        items,
    )


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 7.0])
def test_flips_as_often_as_epsilon_says(epsilon: float, label: float) -> None:
    """The exact binomial test passes, and has the power to refuse an epsilon that is somewhat off."""
    data = wide(300, 2000, label)
    flips = int((RandomizedLabels(epsilon).data(data, streams_of(data)).label != label).sum())

    def pvalue(claimed: float) -> float:
        return float(stats.binomtest(flips, 600_000, 1 / (1 + exp(claimed))).pvalue)

    assert pvalue(epsilon) > 1e-4
    off = 0.1 if epsilon < 5 else 0.3
    assert max(pvalue(epsilon - off), pvalue(epsilon + off)) < 1e-4


def test_flips_are_independent_between_clients_items_and_seeds() -> None:
    data = wide(200, 500, 1.0)
    one, other = (
        RandomizedLabels(0.5).data(data, streams_of(data, seed)).label.reshape(200, 500) == 0 for seed in (1, 2)
    )
    rate = 1 / (1 + exp(0.5))
    for a, b in ((one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one, other)):
        assert stats.binomtest(int((a & b).sum()), a.size, rate**2).pvalue > 1e-3
    for axis in (0, 1):  # the flips of an item, of a client: binomial, hence not all from one coin
        n = one.shape[axis]
        spread = (one.sum(axis) - n * rate) / np.sqrt(n * rate * (1 - rate))
        assert stats.kstest(spread, "norm").pvalue > 1e-3


def test_flips_depend_on_client_and_item_alone() -> None:
    """Not on the true label, nor on where an item stands among the examples or what else is there."""
    data = local_data()
    flip = RandomizedLabels(0.3).data(data, streams_of(data)).label != data.label
    opposite = replace(data, label=1 - data.label)
    assert np.array_equal(RandomizedLabels(0.3).data(opposite, streams_of(data)).label != opposite.label, flip)
    mixed = np.lexsort((np.random.default_rng(0).random(len(data.item)), data.owner))
    shuffled = replace(data, item=data.item[mixed], label=data.label[mixed])
    got = RandomizedLabels(0.3).data(shuffled, streams_of(data))
    assert np.array_equal(got.label != shuffled.label, flip[mixed])
    again = local_data(round=1, resample=True)
    other = RandomizedLabels(0.3).data(again, streams_of(again)).label != again.label
    flips = dict(zip(zip(data.owner.tolist(), data.item.tolist(), strict=True), flip.tolist(), strict=True))
    common = [(c, i, f) for c, i, f in zip(again.owner, again.item, other, strict=True) if (int(c), int(i)) in flips]
    assert len(common) > 300
    assert all(flips[int(c), int(i)] == f for c, i, f in common)


@pytest.mark.parametrize("streams", ["simulated", "os"])
def test_repeated_items_have_one_label(streams: str) -> None:
    data = local_data()
    assert len(by_item(data)) < 0.8 * len(data.item)  # many negatives were drawn twice
    drawn = streams_of(data) if streams == "simulated" else Streams.from_os(24)
    changed = RandomizedLabels(0.2).data(data, drawn)
    assert_one_label_per_item(changed)
    flipped = (changed.label != data.label).mean()
    assert 0.3 < flipped < 0.6
    assert np.array_equal(changed.item, data.item)


def test_a_client_may_be_left_without_a_positive() -> None:
    data = replace(wide(400, 3, 0.0), label=np.tile(np.array([1, 0, 0], np.float32), 400))
    changed = RandomizedLabels(1.0).data(data, streams_of(data))
    without = ~np.logical_or.reduceat(changed.label > 0, changed.offset[:-1])
    rate = 1 / (1 + exp(1.0))
    assert stats.binomtest(int(without.sum()), 400, rate * (1 - rate) ** 2).pvalue > 1e-3
    for model in (MF(4), LightGCN(4)):
        trained = visit(RandomizedLabels(1.0), model, local_data())
        assert torch.isfinite(trained.loss).all()


def test_a_large_epsilon_is_finite() -> None:
    data = local_data()
    for epsilon in (50.0, 800.0, 1e300):
        assert np.array_equal(RandomizedLabels(epsilon).data(data, streams_of(data)).label, data.label)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, nan, -inf])
def test_randomized_labels_refuse(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"Got epsilon=.*, expected a number above 0"):
        RandomizedLabels(epsilon)


def test_labels_must_be_yes_or_no() -> None:
    data = replace(local_data(), label=np.full(len(local_data().item), 0.5, np.float32))
    with pytest.raises(ConfigError, match=r"Got label 0\.5 .* expected 0 or 1"):
        RandomizedLabels(1.0).data(data, streams_of(data))


# --- what an adversary may know


def test_defenses_tell_how_many_labels_are_wrong() -> None:
    for nothing in (Defense(), Chain(), SignOnly(), FakeItems(0.0), RandomizedLabels(inf), Chain((SignOnly(),))):
        assert (nothing.fakes, nothing.flips) == (0.0, 0.0)
    assert (FakeItems(0.7).fakes, FakeItems(0.7).flips) == (0.7, 0.0)
    assert RandomizedLabels(1.0).fakes == 0.0
    assert RandomizedLabels(1.0).flips == pytest.approx(1 / (1 + exp(1.0)), rel=1e-15)
    assert RandomizedLabels(800.0).flips == 0.0
    assert not {"fakes", "flips"} & {*hooks(FakeItems(1.0)), *hooks(RandomizedLabels(1.0))}


def test_a_chain_combines_what_its_parts_tell() -> None:
    for part in (FakeItems(0.7), RandomizedLabels(0.3)):
        chain = Chain((SignOnly(), Chain((part,))))
        assert (chain.fakes, chain.flips) == (part.fakes, part.flips)
    one, other = RandomizedLabels(0.3), RandomizedLabels(2.0)
    chain = Chain((FakeItems(2.0), one, Chain((FakeItems(0.5), other)), FakeItems(1.0)))
    assert chain.fakes == pytest.approx(3 * 1.5 * 2 - 1)
    assert chain.flips == pytest.approx(one.flips * (1 - other.flips) + other.flips * (1 - one.flips))


def test_a_chain_does_what_it_tells() -> None:
    """Counted: the fakes of fakes, and labels that are flipped twice."""
    data = replace(wide(50, 400, 1.0), n_items=4000)
    for fakes in (Chain((FakeItems(0.5), FakeItems(1.0))), Chain((FakeItems(1.0), FakeItems(0.5)))):
        got = fakes.data(data, streams_of(data))
        assert ((got.count - data.count) == fakes.fakes * data.count).all()
    flips = Chain((RandomizedLabels(0.5), RandomizedLabels(1.5)))
    data = wide(300, 1000, 1.0)
    flipped = int((flips.data(data, streams_of(data)).label == 0).sum())
    assert stats.binomtest(flipped, 300_000, flips.flips).pvalue > 1e-3


# --- in training


@dataclass(frozen=True)
class Spy(Defense):
    """Writes down what the defenses before it made of the examples."""

    seen: list[LocalData] = field(default_factory=list)

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        self.seen.append(data)
        return data


def federated(
    defense: Defense, model: Model, local: LocalTraining, *, rounds: int = 2, chunk: int = 5, tap: Wiretap | None = None
) -> torch.Tensor:
    protocol = Federated(rounds=rounds, local=local)
    taps = [] if tap is None else [tap]
    result = train_federated(
        protocol, model, ragged(), defense=defense, taps=taps, chunk=chunk, seed=3, show_progress=False
    )
    return result.scores(torch.arange(24))


def task_of(defense: Defense, model: Model, local: LocalTraining) -> Task:
    return Task(model, model.components(), local, defense, seed=11)


def visit(
    defense: Defense, model: Model, data: LocalData, round: int = 0, local: LocalTraining | None = None
) -> Trained:
    """The clients of some data train once from the first parameters."""
    task = task_of(defense, model, local or LocalTraining(epochs=2, batch_size=8, optimizer=Adam(0.01)))
    store = ClientStore(task.components, task.training.optimizer, 24, 24, task.seed)
    return train(task, first_params(task.components, 24, 24, task.seed), store.read(data.client), data, round)


BOTH = Chain((RandomizedLabels(0.5), FakeItems(0.5)))
CHANGES = [RandomizedLabels(0.5), FakeItems(0.5), BOTH]


@pytest.mark.parametrize("defense", CHANGES, ids=str)
@pytest.mark.parametrize("batch_size", [8, None])
def test_examples_are_the_same_in_all_rounds_and_chunks(defense: Defense, batch_size: int | None) -> None:
    local = LocalTraining(batch_size=batch_size, optimizer=Adam(0.01))
    examples = []
    for chunk in (1, 5, 64):
        spy = Spy()
        federated(Chain((defense, spy)), MF(4), local, chunk=chunk)
        each: dict[int, list[tuple[list[int], list[float]]]] = {}
        for data in spy.seen:
            for place, client in enumerate(data.client.tolist()):
                mine = slice(data.offset[place], data.offset[place + 1])
                each.setdefault(client, []).append((data.item[mine].tolist(), data.label[mine].tolist()))
        assert sorted(each) == list(range(24)), chunk
        assert all(len(seen) == 2 and seen[0] == seen[1] for seen in each.values()), "the second round differs"
        examples.append(each)
    assert examples[0] == examples[1] == examples[2]
    plain = Examples.of(ragged(), seed=3).draw(np.arange(24), 0)
    assert sum(len(seen[0][0]) for seen in examples[0].values()) >= len(plain.item)
    assert [x for c in range(24) for x in examples[0][c][0][1]] != plain.label.tolist()


@pytest.mark.parametrize("model", [MF(4), LightGCN(4), LightGCN(4, layers=2, score="mlp", hidden=(8,))], ids=str)
@pytest.mark.parametrize("defense", CHANGES, ids=str)
def test_training_sees_the_changed_examples_only(defense: Defense, model: Model) -> None:
    """Own items, degrees and neighbors of graph models too: the same bits as from data that is so to begin with."""
    data = local_data()
    local = LocalTraining(epochs=2, batch_size=8, optimizer=Adam(0.01, keep=True))
    changed = defended_data(task_of(defense, model, local), data)
    got, expected = visit(defense, model, data, local=local), visit(Defense(), model, changed, local=local)
    assert_identical(got, expected, str(defense))
    assert torch.equal(got.positives, expected.positives)  # the client's weight in a mean
    own = {key for key, labels in by_item(changed).items() if 1.0 in labels}
    assert got.positives.tolist() == [sum(client == c for client, _ in own) for c in range(24)]
    plain = visit(Defense(), model, data, local=local)
    assert not torch.equal(got.loss, plain.loss)


def test_a_full_batch_says_the_same_in_every_round() -> None:
    """From equal parameters and all examples at once, two rounds send the same bits: nothing averages out."""
    local = LocalTraining(batch_size=None, optimizer=SGD(0.1), shuffle=False)
    first, second = (visit(RandomizedLabels(0.5), MF(4), local_data(), round, local) for round in (0, 1))
    assert_identical(first, second, "round 1")


@pytest.mark.parametrize("defense", [*CHANGES, SignOnly(), SignOnly(0.01)], ids=str)
def test_federated_result_does_not_depend_on_the_chunk(defense: Defense) -> None:
    local = LocalTraining(epochs=2, batch_size=None, optimizer=Adam(0.01))
    whole, cut = (federated(defense, LightGCN(4), local, chunk=chunk) for chunk in (64, 3))
    assert torch.equal(whole, cut)


# --- fake items


def test_fakes_are_new_distinct_and_as_many_as_asked_for() -> None:
    data = local_data()
    for per_positive in (0.1, 0.5, 1.0, 2.0, 100.0):
        got = FakeItems(per_positive).data(data, streams_of(data))
        for place in range(24):
            before = slice(data.offset[place], data.offset[place + 1])
            after = slice(got.offset[place], got.offset[place + 1])
            n = before.stop - before.start
            assert got.item[after][:n].tolist() == data.item[before].tolist()
            assert got.label[after][:n].tolist() == data.label[before].tolist()
            fake = got.item[after][n:].tolist()
            held = set(data.item[before].tolist())
            assert len(set(fake)) == len(fake)
            assert not held & set(fake)
            assert (got.label[after][n:] == 1).all()
            positives = int(data.label[before].sum())
            assert len(fake) == min(int(per_positive * positives + 0.5), 24 - len(held))


def test_fakes_are_uniform_among_all_other_items() -> None:
    clients, items = 6000, 40
    mine = np.tile(np.array([3, 7, 7, 39]), clients)
    label = np.tile(np.array([1, 0, 0, 1], np.float32), clients)
    data = LocalData(np.arange(clients), mine, label, None, np.arange(clients + 1) * 4, items)
    got = FakeItems(2.5).data(data, streams_of(data))
    assert (got.count == 9).all()
    fake = got.item.reshape(clients, 9)[:, 4:]
    number = np.bincount(fake.reshape(-1), minlength=items)
    assert number[[3, 7, 39]].tolist() == [0, 0, 0]
    # Items of a client are distinct, which makes counts vary less than multinomially: by (37 - 5) / 36.
    free = np.delete(number, [3, 7, 39])
    statistic = ((free - free.mean()) ** 2).sum() / free.mean() * 36 / 32
    assert 1e-3 < stats.chi2.sf(statistic, 36) < 1 - 1e-3
    together = np.zeros((clients, items))
    np.put_along_axis(together, fake, 1, axis=1)
    pair = (together.T @ together)[np.triu_indices(items, 1)]
    pair = pair[pair > 0]
    assert len(pair) == 37 * 36 / 2
    assert pair.mean() == pytest.approx(clients * 10 / 666)
    assert pair.max() < pair.mean() + 5 * np.sqrt(pair.mean())
    assert pair.min() > pair.mean() - 5 * np.sqrt(pair.mean())


def test_fakes_stay_when_negatives_change() -> None:
    """A fake goes only from a round in which it is drawn as a negative; the next in line takes its place."""
    examples = Examples.of(ragged(n_items=90), negatives=2, resample=True, seed=3)
    held, fakes = [], []
    for round in range(6):
        data = examples.draw(np.arange(24), round)
        got = FakeItems(1.5).data(data, streams_of(data))
        held.append(items_by_client(data))
        fakes.append([after - before for before, after in zip(held[-1], items_by_client(got), strict=True)])
    changed = 0
    for client in range(23):  # the last one has nearly every item
        for one, other in pairwise(range(6)):
            blocked = fakes[one][client] & held[other][client], fakes[other][client] & held[one][client]
            assert len(fakes[other][client] - fakes[one][client]) == max(map(len, blocked))
            changed += len(fakes[other][client] - fakes[one][client])
    assert 0 < changed < 0.3 * 5 * sum(map(len, fakes[0][:23]))


def items_by_client(data: LocalData) -> list[set[int]]:
    return [set(each.tolist()) for each in np.split(data.item, data.offset[1:-1])]


def test_clients_in_blocks_are_clients_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = local_data()
    whole = FakeItems(0.7).data(data, streams_of(data))
    monkeypatch.setattr("recleak.defenses.labels._BLOCK", 24 * 5)
    assert_same_data(FakeItems(0.7).data(data, streams_of(data)), whole)
    monkeypatch.setattr("recleak.defenses.labels._BLOCK", 1)
    assert_same_data(FakeItems(0.7).data(data, streams_of(data)), whole)


def test_without_positives_there_are_no_fakes() -> None:
    data = replace(local_data(), label=np.zeros_like(local_data().label))
    assert_same_data(FakeItems(3.0).data(data, streams_of(data)), data)


def test_fakes_are_sent() -> None:
    local = LocalTraining(optimizer=Adam(0.01))
    sent = []
    for defense in (Defense(), FakeItems(1.0)):
        tap = Wiretap()
        federated(defense, MF(4), local, tap=tap)
        uploads = [message.update for message in tap.messages if isinstance(message, Upload)]
        sent.append([set(zip(each.owner.tolist(), each.item.tolist(), strict=True)) for each in uploads])
    for plain, more in zip(*sent, strict=True):
        assert plain < more
    assert sent[1][0] == sent[1][1]


@pytest.mark.parametrize("per_positive", [-0.1, inf, nan])
def test_fake_items_refuse(per_positive: float) -> None:
    with pytest.raises(ValueError, match=r"Got per_positive=.*, expected a finite number of at least 0"):
        FakeItems(per_positive)


# --- signs


def test_signs_keep_the_mean_size_of_each_component() -> None:
    update = example_update(scale=3.0)
    update.values["weight"][2, 1] = 0.0
    got = SignOnly().upload(update, Streams.simulated(0, 0, update.client))
    for c in range(update.n_clients):
        rows = update.owner == c
        for name in update.names():
            before = update.values[name][c] if name in update.values else update.rows[name][rows]
            after = got.values[name][c] if name in got.values else got.rows[name][rows]
            if before.numel():
                size = float(before.double().abs().sum()) / before.numel()
                torch.testing.assert_close(after, before.sign() * size, rtol=1e-6, atol=0)
    assert (got.values["weight"][2, 1] == 0).all()
    assert (got.values["weight"][2, 0] != 0).all()


def test_signs_with_a_step_say_nothing_else() -> None:
    update = example_update(scale=3.0)
    got = SignOnly(0.25).upload(update, Streams.simulated(0, 0, update.client))
    for name, tensor in {**got.values, **got.rows}.items():
        before = update.values[name] if name in update.values else update.rows[name]
        assert torch.equal(tensor, 0.25 * before.sign()), name
    louder = update.map(lambda _, tensor, __: tensor * 100)
    same = SignOnly(0.25).upload(louder, Streams.simulated(0, 0, update.client))
    assert all(torch.equal(same.rows[name], got.rows[name]) for name in got.rows)


@pytest.mark.parametrize("step", [0.0, -1.0, inf, nan])
def test_sign_only_refuses(step: float) -> None:
    with pytest.raises(ValueError, match=r"Got step=.*, expected a finite number above 0, or None"):
        SignOnly(step)
