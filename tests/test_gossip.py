"""Gossip: equal to a plain loop over nodes, whatever is lost, late, asleep or broken."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recleak import machine, random
from recleak.data.interactions import Interactions
from recleak.data.split import Split, ratio
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, DataError, RecleakError
from recleak.metrics.ranking import rank
from recleak.models.components import Normal
from recleak.models.mf import GMF
from recleak.models.ncf import NCF
from recleak.protocols import gossip, ticks
from recleak.protocols.gossip import Gossip, GossipModel, train_gossip
from recleak.protocols.mail import best_heard, random_views
from recleak.protocols.merging import Merging
from recleak.protocols.nodes import Precision, first_nodes, of_nodes
from recleak.protocols.panel import Panel
from recleak.protocols.saving import Interrupted
from recleak.testing.models import ragged
from recleak.training.chunks import one_thread
from recleak.training.cohort import DivergedError, LocalTraining, Task, train
from recleak.training.local import Examples
from recleak.training.optimizers import SGD, Adam
from recleak.training.state import CheckpointError, ClientStore
from recleak.update import NodeParams
from recleak.wire import Message, Peers, Push

MODEL = GMF(4, init=Normal(0.3))
KEEP = LocalTraining(epochs=2, batch_size=None, optimizer=Adam(0.05, keep=True), negatives=2, resample=True)
PLAIN = LocalTraining(epochs=1, batch_size=8, optimizer=SGD(0.2), negatives=2)
FULL = Share(("user",))


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


class Everything:
    """A tap that keeps all messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def receive(self, message: Message) -> None:
        self.messages.append(message)

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: object) -> None: ...

    def close(self) -> None: ...


def pushed(tap: Everything) -> Arrived:
    """What arrived, as a tap heard it."""
    pushes = [message for message in tap.messages if isinstance(message, Push)]
    ends = [zip(each.sender.tolist(), each.receiver.tolist(), strict=True) for each in pushes]
    return {(push.round, *pair) for push, pairs in zip(pushes, ends, strict=True) for pair in pairs}


def parts(n_users: int = 40, n_items: int = 60) -> Split:
    return ratio(Synthetic(n_users=n_users, n_items=n_items, mean_activity=15, min_activity=10).generate(), seed=1)


def run(protocol: Gossip, data: Interactions, **more: object) -> GossipModel:
    options: dict[str, object] = {"defense": FULL, "show_progress": False, "threads": 1} | more
    return train_gossip(protocol, MODEL, data, **options)  # type: ignore[arg-type]


# --- the plain loop ---------------------------------------------------------------------------------------------------


Arrived = set[tuple[int, int, int]]  # tick, sender, receiver


def plain_loop(
    protocol: Gossip,
    data: Interactions,
    defense: Defense,
    *,
    valid: Interactions | None = None,
    mute: frozenset[int] = frozenset(),
    seed: int = 0,
) -> tuple[dict[int, dict[str, Tensor]], Arrived]:
    """The same protocol, node by node and message by message; only draws are shared with what is tested.

    What each node has in the end, and what arrived. Nobody hears of nodes that are `mute`.
    """
    components = defense.sharing(MODEL.components())
    local, nodes = protocol.local, np.flatnonzero(data.activity)
    task = Task(MODEL, components, local, defense, seed)
    examples = Examples.of(data, negatives=local.negatives, resample=local.resample, seed=seed)
    store = ClientStore(components, local.optimizer, data.n_users, data.n_items, seed)
    first = first_nodes(components, data.n_users, data.n_items, seed, "float32")
    has = {int(node): {name: value[node].clone() for name, value in first.items()} for node in nodes}
    judge = Judge(data, valid, seed) if protocol.peers == "personal" and valid is not None else None
    heard: dict[int, dict[int, float]] = {node: {} for node in has}
    sent: dict[int, dict[int, dict[str, Tensor]]] = {}
    mail: list[tuple[int, int, int, int, int]] = []  # when it arrives, when it was sent, its lot, from whom, to whom
    arrived: Arrived = set()
    for tick in range(protocol.rounds):
        awake = {node for node in has if float(random.uniform(seed, "awake", tick, node)) >= protocol.churn}
        if tick % protocol.refresh == 0:
            view = plain_views(protocol, nodes, heard if tick and judge else {}, seed, tick // protocol.refresh)
            heard = {node: {} for node in has}
        sent[tick] = {node: {name: value.clone() for name, value in params.items()} for node, params in has.items()}
        for pair in [(node, to) for node in awake - mute for to in view[node]]:
            late = int(random.below(protocol.delay + 1, seed, "delay", tick, *pair))
            lot = int(random.bits(seed, "order", tick, *pair))
            if float(random.uniform(seed, "lost", tick, *pair)) >= protocol.loss:
                mail.append((tick + late, tick, lot, *pair))
        now = sorted(each[1:] for each in mail if each[0] == tick and each[4] in awake)
        arrived |= {(tick, sender, to) for _, _, sender, to in now}
        for to in {each[3] for each in now}:
            group = [(when, sender) for when, _, sender, receiver in now if receiver == to]
            for wave, some in enumerate([[each] for each in group] if protocol.merging == "pairwise" else [group]):
                theirs = [sent[when][sender] for when, sender in some]
                weight = np.array([data.activity[to], *(data.activity[sender] for _, sender in some)], float)
                if judge is not None:
                    weight = np.array([judge(params, to) for params in (has[to], *theirs)], float)
                    heard[to] |= {sender: good for (_, sender), good in zip(some, weight[1:], strict=True)}
                if protocol.weights == "equal" or not weight.any():
                    weight[:] = 1
                for name in has[to]:
                    all_of = [params[name] for params in (has[to], *theirs)]
                    has[to][name] = sum(float(w / weight.sum()) * v for w, v in zip(weight, all_of, strict=True))  # type: ignore[assignment]
                client = np.array([to])
                whole = NodeParams(
                    {name: value.new_zeros(data.n_users, *value.shape) for name, value in has[to].items()}
                )
                for name, value in has[to].items():
                    whole[name][to] = value
                number = tick * ticks._WAVES + wave
                trained = train(task, whole, store.read(client), examples.draw(client, number), number)
                store.write(trained.kept)
                for name, value in trained.update.values.items():
                    if name == "user":
                        has[to][name][to] += value[0]
                    else:
                        has[to][name] += value[0]
                has[to]["item"][trained.update.item] += trained.update.rows["item"]
    return has, arrived


def plain_views(
    protocol: Gossip, nodes: np.ndarray[Any, Any], heard: dict[int, dict[int, float]], seed: int, epoch: int
) -> dict[int, list[int]]:
    """Whom each node sends to: the best heard, if there are any, and random others."""
    view: dict[int, list[int]] = {}
    for node in nodes.tolist():
        lot = {sender: int(random.bits(seed, "equally good", epoch, node, sender)) for sender in heard.get(node, {})}
        view[node] = sorted(lot, key=lambda sender: (-heard[node][sender], lot[sender]))[: protocol.stay]
        for place in range(len(view[node]), protocol.degree):
            for attempt in range(10**6):
                drawn = int(nodes[int(random.below(len(nodes), seed, "peer", epoch, node, place, attempt))])
                if drawn != node and drawn not in view[node]:
                    view[node].append(drawn)
                    break
    return view


class Judge:
    """How good GMF's parameters are for a user: hit rate times NDCG at 20 of each validation item among 99 others."""

    def __init__(self, data: Interactions, valid: Interactions, seed: int) -> None:
        self.panel = Panel.of(data, valid, (), seed)

    def __call__(self, params: Mapping[str, Tensor], user: int) -> float:
        hits, gains = [], []
        for items in self.panel.item[self.panel.offset[user] : self.panel.offset[user + 1]]:
            score = (params["item"][items] * params["user"][user] * params["head.1.weight"].flatten()).sum(1)
            rank = int((score[1:] > score[0]).sum())
            hits.append(rank < 20)
            gains.append((rank < 20) / np.log2(rank + 2))
        return float(np.float32(np.mean(hits) * np.mean(gains))) if hits else 0.0


@pytest.mark.parametrize("defense", [FULL, Defense(), GaussianNoise(0.01)], ids=["full", "share less", "noise"])
@pytest.mark.parametrize("local", [KEEP, PLAIN], ids=["kept adam", "sgd"])
@pytest.mark.parametrize("merging", ["pairwise", "together"])
def test_equals_the_plain_loop(defense: Defense, local: LocalTraining, merging: Merging) -> None:
    data = ragged(n_users=9, n_items=12)
    protocol = Gossip(rounds=5, degree=2, refresh=2, merging=merging, local=local)
    got = run(protocol, data, defense=defense)
    expected, _ = plain_loop(protocol, data.distinct(), defense)
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(got.params[name][node], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("defense", [FULL, Chain((FULL, DPSGD(0.5, 0.1)))], ids=["full", "dp-sgd"])
def test_equals_the_plain_loop_where_all_count_alike(defense: Defense) -> None:
    data = ragged(n_users=9, n_items=12)
    protocol = Gossip(rounds=4, degree=2, refresh=2, weights="equal", local=KEEP)
    got = run(protocol, data, defense=defense)
    expected, _ = plain_loop(protocol, data.distinct(), defense)
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(got.params[name][node], value, atol=2e-5, rtol=1e-4)
    other = run(replace(protocol, weights="data"), data, defense=defense)
    assert not torch.equal(got.params["item"], other.params["item"])


@pytest.mark.heavy
@pytest.mark.parametrize("local", [KEEP, PLAIN], ids=["kept adam", "sgd"])
@pytest.mark.parametrize("merging", ["pairwise", "together"])
@pytest.mark.parametrize("peers", ["random", "personal"])
def test_equals_the_plain_loop_when_messages_are_late_or_lost_and_nodes_sleep(
    peers: gossip.Peering, merging: Merging, local: LocalTraining
) -> None:
    split, tap = parts(12, 45), Everything()
    protocol = Gossip(rounds=7, refresh=2, peers=peers, merging=merging, delay=2, loss=0.2, churn=0.2, local=local)
    got = run(protocol, split.train, valid=split.valid, taps=[tap])
    expected, arrived = plain_loop(protocol, split.train.distinct(), FULL, valid=split.valid)
    assert pushed(tap) == arrived
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(got.params[name][node], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("peers", ["random", "personal"])
def test_no_bit_depends_on_chunks_or_threads(peers: gossip.Peering) -> None:
    split = parts()
    protocol = Gossip(rounds=4, refresh=2, peers=peers, delay=1, loss=0.1, churn=0.1, local=KEEP)
    one = run(protocol, split.train, valid=split.valid, chunk=1)
    other = run(protocol, split.train, valid=split.valid, chunk=64, threads=2)
    for name, value in one.params.items():
        assert torch.equal(value, other.params[name]), name
    assert one.visits == other.visits


def test_nodes_that_train_in_place_do_what_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    split = parts()
    protocol = Gossip(rounds=4, refresh=2, peers="personal", local=KEEP)
    direct = run(protocol, split.train, valid=split.valid)
    monkeypatch.setattr(ticks, "direct", lambda *_: False)
    through = run(protocol, split.train, valid=split.valid)
    for name, value in direct.params.items():
        torch.testing.assert_close(value, through.params[name], atol=2e-5, rtol=1e-3)
    users = torch.arange(5)
    torch.testing.assert_close(direct.scores(users), through.scores(users), atol=1e-4, rtol=1e-3)


# --- peers ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 9), st.integers(0, 3))
def test_views_are_distinct_others(n: int, degree: int, epoch: int, kept: int) -> None:
    nodes = np.arange(n) * 3 + 1
    if degree >= n:
        with pytest.raises(ConfigError, match=rf"degree is {degree}, expected at most {n - 1}"):
            random_views(nodes, degree, 0, epoch)
        return
    first = random_views(nodes, degree, 0, epoch)
    view = random_views(nodes, degree, 0, epoch + 1, first[:, : min(kept, degree)])
    for who, mine, before in zip(nodes, view, first, strict=True):
        assert len(set(mine)) == degree
        assert who not in mine
        assert set(mine) <= set(nodes)
        assert list(mine[: min(kept, degree)]) == list(before[: min(kept, degree)])


def test_every_peer_is_as_likely() -> None:
    count = np.zeros((12, 12))
    for epoch in range(600):
        for who, mine in enumerate(random_views(np.arange(12), 3, 5, epoch)):
            count[who, mine] += 1
    off = count[~np.eye(12, dtype=bool)]
    assert (count.diagonal() == 0).all()
    assert abs(off - 600 * 3 / 11).max() < 5 * np.sqrt(600 * 3 / 11)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(0, 4), st.integers(0, 10**6))
def test_the_best_heard_come_first_and_nobody_else(n: int, stay: int, seed: int) -> None:
    nodes = np.arange(0, 2 * n, 2)
    draw = np.random.default_rng(seed)
    heard = draw.choice([-1.0, 0.0, 0.25, 0.5, 1.0], (n, 2 * n), p=[0.6, 0.1, 0.1, 0.1, 0.1]).astype(np.float32)
    best = best_heard(heard, nodes, stay, seed, 3)
    for good, mine in zip(heard, best, strict=True):
        count = min(stay, int((good >= 0).sum()))
        assert (mine[count:] == -1).all(), "who was never heard of is not kept"
        assert len(set(mine[:count])) == count
        assert good[mine[:count]].tolist() == sorted(good[good >= 0], reverse=True)[:count]


def test_who_is_equally_good_stays_by_chance() -> None:
    heard = np.full((40, 40), 0.5, np.float32)
    first = [best_heard(heard, np.arange(40), 1, 0, epoch)[:, 0] for epoch in (1, 2)]
    assert (first[0] != first[1]).mean() > 0.8
    assert len(set(first[0])) > 15


@pytest.mark.parametrize("refresh", [1, 3])
def test_personal_peers_are_the_best_of_those_heard_since_views_changed(refresh: int) -> None:
    split, still = parts(60, 100), replace(KEEP, optimizer=Adam(0.0, keep=True))
    protocol = Gossip(rounds=4 * refresh, refresh=refresh, peers="personal", stay=2, weights="equal", local=still)
    tap = Everything()
    run(protocol, split.train, valid=split.valid, taps=[tap])
    judge, senders = Judge(split.train.distinct(), split.valid, 0), []
    views: list[dict[int, set[int]]] = []
    good: list[dict[int, dict[int, float]]] = []  # by epoch, receiver and sender; of the last message
    for message in tap.messages:
        assert isinstance(message, Push)
        while len(views) <= message.round // refresh:
            views.append({node: set() for node in range(60)})
            good.append({node: {} for node in range(60)})
        for sender, to, row in zip(
            *(each.tolist() for each in (message.sender, message.receiver, message.model)), strict=True
        ):
            views[-1][sender].add(to)
            good[-1][to][sender] = judge({name: value[row] for name, value in message.params.items()}, to)
            senders.append(sender)
    assert len(views) == 4
    for before, view in zip(good[:-1], views[1:], strict=True):
        for node, heard in before.items():
            kept, left = view[node] & set(heard), set(heard) - view[node]
            assert len(kept) >= min(2, len(heard)), "two stay, if two were heard"
            best = sorted((heard[each] for each in kept), reverse=True)[:2]
            assert not left or not best or max(heard[each] for each in left) <= min(best), "and these are the best"
    with pytest.raises(DataError, match="Give `valid` items"):
        run(protocol, split.train)


def test_who_cannot_judge_keeps_nobody() -> None:
    split = parts(40, 100)
    protocol = Gossip(rounds=30, refresh=1, degree=2, stay=2, peers="personal", local=KEEP)
    valid = split.valid.take(split.valid.user >= 20)  # only they can judge
    tap = Everything()
    run(protocol, split.train, valid=valid, taps=[tap])
    found, stayed = pushed(tap), np.zeros(40)
    for tick, sender, to in found:
        stayed[to] += (tick + 1, to, sender) in found  # it sends to whom it heard in the tick before
    heard = np.bincount([to for tick, _, to in found if tick < 29], minlength=40)
    assert (stayed[20:] / heard[20:]).mean() > 0.5
    assert (stayed[:20] / heard[:20]).mean() < 0.15


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_converges_with_churn_and_lost_messages() -> None:
    split = parts(60, 80)
    protocol = Gossip(rounds=40, refresh=5, delay=2, loss=0.3, churn=0.2, local=KEEP)
    model = run(protocol, split.train, defense=Defense())
    assert model.loss[-1] < 0.75 * model.loss[0]
    chance = 20 / 80
    assert float(rank(model, split.train, split.test).hit(20).mean()) > 1.2 * chance
    sent = 60 * 3 * 40
    assert 0.3 * sent < sum(model.visits) < 0.6 * sent, "0.7 x 0.8 x 0.8 = 0.45 of all messages find an open ear"


def filled(number: float) -> ticks.Tamper:
    """Sends items of one number."""
    return lambda has: {**has, "item": torch.full_like(has["item"], number)}


def as_items(change: Any) -> ticks.Tamper:
    """Sends something else as items."""
    return lambda has: {**has, "item": change(has["item"])}


BROKEN: dict[str, tuple[ticks.Tamper, str]] = {
    "nan": (filled(float("nan")), "numbers that are not finite"),
    "infinite": (filled(float("-inf")), "numbers that are not finite"),
    "3e37": (filled(3e37), r"a number of 3e\+37, its receiver has none above "),
    "1e20": (filled(-1e20), r"a number of 1e\+20, its receiver has none above "),
    "1e6": (filled(1e6), r"a number of 1e\+06, its receiver has none above "),
    "short": (as_items(lambda value: value[:-1]), r"item of shape \[59, 4\], expected \[60, 4\]"),
    "others": (lambda has: {"code": torch.ones(1)}, "the components code, expected "),
    "numbers": (lambda has: {3: torch.ones(1), "item": has["item"]}, "the components 3, item, expected "),
    "nothing": (lambda has: None, "NoneType, expected components by name"),
    "no items": (as_items(lambda value: None), "item as NoneType, expected a tensor"),
    "numpy": (as_items(lambda value: value.numpy()), "item as ndarray, expected a tensor"),
    "int64": (as_items(lambda value: value.long()), r"item of type torch\.int64, .*, expected torch\.float32"),
    "complex": (as_items(lambda value: value + 1j), r"item of type torch\.complex64, .*, expected torch\.float32"),
    "float64": (as_items(lambda value: value.double()), r"item of type torch\.float64, .*, expected torch\.float32"),
    "sparse": (as_items(lambda value: value.to_sparse()), r"item of type torch\.float32, torch\.sparse_coo, cpu"),
    "meta": (as_items(lambda value: value.to("meta")), r"item of type torch\.float32, torch\.strided, meta"),
}


def test_nobody_listens_to_broken_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """What the others have in the end is what they have if nothing leaves the broken node."""
    data, protocol = parts().train, Gossip(rounds=2, local=KEEP)
    sound = run(protocol, data)
    expected, arrived = plain_loop(protocol, data.distinct(), FULL, mute=frozenset({3}))
    one = None
    for kind, (tamper, words) in BROKEN.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="recleak.gossip"):
            tap = Everything()
            model = run(protocol, data, faulty={3: tamper}, taps=[tap])
        assert model.rejected == (3,), kind
        (record,) = caplog.records
        assert re.search(rf"Tick 0: node 3 sent {words}.*; node \d+ does not use it", record.getMessage()), kind
        assert pushed(tap) == arrived
        assert np.isfinite(model.loss).all()
        assert sum(model.visits) < sum(sound.visits)
        one = model if one is None else one
        for name, value in model.params.items():
            assert torch.equal(value, one.params[name]), kind
    assert one is not None
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(one.params[name][node], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("peers", ["random", "personal"])
def test_broken_nodes_among_late_and_lost_messages(peers: gossip.Peering, precision: Precision) -> None:
    split = parts()
    protocol = Gossip(rounds=6, refresh=2, peers=peers, delay=2, loss=0.2, churn=0.2, precision=precision, local=KEEP)
    model = run(protocol, split.train, valid=split.valid, faulty={3: filled(3e4), 8: BROKEN["nothing"][0]})
    assert model.rejected == (3, 8)
    for value in model.params.values():
        assert float(value.abs().max()) < 10


def test_a_message_that_never_arrives_is_not_refused() -> None:
    protocol = Gossip(rounds=4, loss=0.99, local=KEEP)
    model = run(protocol, parts().train, faulty={node: filled(float("nan")) for node in range(40)})
    assert 0 < len(model.rejected) < 20


@pytest.mark.parametrize(
    ("local", "defense", "precision"),
    [
        (KEEP, FULL, "float32"),
        (KEEP, ShareLess(), "float32"),
        (PLAIN, FULL, "float32"),
        (KEEP, FULL, "float16"),
        (KEEP, ShareLess(("user",)), "float16"),
    ],
    ids=["in place", "in place, less", "sgd", "half", "half, less"],
)
def test_who_cannot_use_what_came_of_a_merge_has_what_it_had_before(
    local: LocalTraining,
    defense: Defense,
    precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, protocol, tap = parts().train, Gossip(rounds=2, precision=precision, local=local), Everything()
    before = run(replace(protocol, rounds=1), data, defense=defense)
    monkeypatch.setattr(ticks, "LARGEST", 5.0)  # of what nodes end with
    rest = iter(range(2))

    def later(has: dict[str, Tensor]) -> dict[str, Tensor]:
        return filled(80.0)(has) if next(rest) else has

    with caplog.at_level(logging.WARNING, logger="recleak.gossip"):
        after = run(protocol, data, defense=defense, faulty={3: later}, taps=[tap])
    hit = sorted({to for tick, sender, to in pushed(tap) if (tick, sender) == (1, 3)})
    assert len(hit) == 3
    assert after.rejected == (3,), "whoever sent it is named, and not who received it"
    assert f"node 3 sent what made the parameters of node {hit[0]} unusable" in caplog.text
    assert f"3 nodes (first node {hit[0]}) ended with what cannot be a model" in caplog.text
    for name, value in after.params.items():
        assert torch.equal(value[hit], before.params[name][hit]), name
        assert float(value.abs().max()) <= 5
    last, kept = (each.store.read_values(np.arange(40)) for each in (before, after))
    for name, value in kept.values.items():
        assert torch.equal(value[hit], last.values[name][hit]), name
    others = np.setdiff1d(np.arange(40), hit)
    assert not torch.equal(after.params["item"][others], before.params["item"][others])
    rows = after.store.read(np.array(hit)).rows
    assert not any(bool(value.any()) for name, value in rows.items() if "/" in name), "moments begin anew"


@pytest.mark.parametrize("optimizer", [SGD(1e30), Adam(1e9, keep=True)], ids=["sgd", "in place"])
def test_a_rate_that_no_node_can_use_ends_the_run(optimizer: SGD | Adam) -> None:
    wild = LocalTraining(batch_size=None, optimizer=optimizer)
    with pytest.raises(DivergedError, match=r"Tick 0: 40 nodes ended .* nobody .*\n  Lower the learning rate \(1e\+"):
        run(Gossip(rounds=2, local=wild), parts().train)


class Fails(Exception):
    """What ends a run in these tests."""


class Saboteur(Everything):
    """A tap that ends the run at some tick, and counts what it heard."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def receive(self, message: Message) -> None:
        self.count += 1
        if isinstance(message, Push) and message.round == self.at:
            raise Fails

    def state(self) -> dict[str, Tensor]:
        return {"count": torch.tensor(self.count)}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # type: ignore[override]
        self.count = int(state["count"])


@pytest.fixture
def saving_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saves slowly saves less often; here it saves after every tick."""
    monkeypatch.setattr(ticks, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("saving_is_quick")
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("defense", [FULL, ShareLess(("user",))], ids=["full", "less"])
@pytest.mark.parametrize(
    "protocol",
    [
        Gossip(rounds=5, refresh=2, peers="personal", delay=2, loss=0.1, churn=0.1, local=KEEP),
        Gossip(rounds=5, refresh=1, precision="float16", local=replace(KEEP, optimizer=Adam(0.05))),
        Gossip(rounds=5, delay=1, local=PLAIN),
    ],
    ids=["personal", "half", "plain"],
)
def test_a_run_that_failed_continues_to_the_bit(
    protocol: Gossip, defense: Defense, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = parts()
    faulty = {7: lambda has: {name: value * float("nan") for name, value in has.items()}}
    more: dict[str, Any] = {"defense": defense, "valid": split.valid, "faulty": faulty, "confidants": range(40)}
    alone = Saboteur(-1)
    expected = run(protocol, split.train, taps=[alone], **more)
    tap = Saboteur(at)
    more |= {"directory": tmp_path / "run", "checkpoint_seconds": 0.0, "taps": [tap]}
    with pytest.raises(Fails):
        run(protocol, split.train, **more)
    tap.at = -1
    caplog.clear()
    got = run(protocol, split.train, **more)
    assert all(torch.equal(got.params[name], value) for name, value in expected.params.items())
    everybody = torch.arange(40)
    assert torch.equal(got.scores(everybody), expected.scores(everybody))
    np.testing.assert_array_equal(got.loss, expected.loss)
    assert (got.visits, got.rejected, got.trainings) == (expected.visits, expected.rejected, expected.trainings)
    assert tap.count == alone.count
    assert not at or not caplog.records, "a node that was named is not named again"
    longer = run(replace(protocol, rounds=6), split.train, **more)
    assert longer.loss[:5] == got.loss or np.isnan(got.loss).any()
    with pytest.raises(CheckpointError, match="holds 6 rounds, expected at most the 5"):
        run(protocol, split.train, **more)
    with pytest.raises(CheckpointError, match=r"a run of something else: protocol\.degree was 3, now 2"):
        run(replace(protocol, degree=2, stay=1), split.train, **more)


@pytest.mark.usefixtures("saving_is_quick")
def test_what_is_refused_later_is_named_as_if_nothing_had_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, protocol = parts().train, Gossip(rounds=5, delay=3, local=KEEP)
    faulty = dict.fromkeys(range(20), BROKEN["nothing"][0])
    expected = run(protocol, data, faulty=faulty)
    said = {record.getMessage() for record in caplog.records}
    assert len({words.partition(":")[0] for words in said}) > 1, "some arrive late"
    caplog.clear()
    tap = Saboteur(1)
    with pytest.raises(Fails):
        run(protocol, data, faulty=faulty, taps=[tap], directory=tmp_path / "run", checkpoint_seconds=0.0)
    tap.at = -1
    got = run(protocol, data, faulty=faulty, taps=[tap], directory=tmp_path / "run", checkpoint_seconds=0.0)
    assert {record.getMessage() for record in caplog.records} == said
    assert got.rejected == expected.rejected
    assert torch.equal(got.params["item"], expected.params["item"])


@pytest.mark.usefixtures("saving_is_quick")
def test_an_interrupt_says_what_is_saved(tmp_path: Path) -> None:
    class Stops(Everything):
        def receive(self, message: Message) -> None:
            if isinstance(message, Push) and message.round == 2:
                raise KeyboardInterrupt

    protocol, train = Gossip(rounds=4, local=PLAIN), parts().train
    with pytest.raises(Interrupted, match=r"after 2 of 4 rounds; 2 rounds are saved in"):
        run(protocol, train, taps=[Stops()], directory=tmp_path / "run", checkpoint_seconds=0.0)
    with pytest.raises(Interrupted, match=r"after 2 of 4 rounds; nothing is kept"):
        run(protocol, train, taps=[Stops()])


def test_half_precision_is_close() -> None:
    data, protocol = parts().train, Gossip(rounds=4, local=KEEP)
    whole, half = run(protocol, data), run(replace(protocol, precision="float16"), data)
    assert half.params["item"].dtype == torch.float16
    for name, value in whole.params.items():
        torch.testing.assert_close(half.params[name].float(), value, atol=0.02, rtol=0.02)
    components = FULL.sharing(MODEL.components())
    assert protocol.state_bytes(components, 40, 60) == 4 * 40 * (60 * 4 + 40 * 4 + 4 + 1)
    assert protocol.needed_bytes(components, 40, 60) == 2 * protocol.state_bytes(components, 40, 60)


def test_a_run_that_needs_more_memory_than_is_free_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    data, protocol = parts().train, Gossip(rounds=1, local=KEEP)
    needed = protocol.needed_bytes(FULL.sharing(MODEL.components()), 40, 60)
    monkeypatch.setattr(machine, "free_memory", lambda: needed)
    run(protocol, data)
    monkeypatch.setattr(machine, "free_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"The nodes of the run take 0\.0 GB, expected .*\n .* precision=\"float16\""):
        run(protocol, data)
    run(replace(protocol, precision="float16"), data)


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_what_arrives_is_what_was_sent_when_the_tick_began() -> None:
    data, tap = parts().train, Everything()
    run(Gossip(rounds=2, local=KEEP), data, taps=[tap])
    earlier = run(Gossip(rounds=1, local=KEEP), data)
    pushes = [message for message in tap.messages if isinstance(message, Push) and message.round == 1]
    assert sum(len(push.sender) for push in pushes) == 40 * 3
    for push in pushes:
        for name, value in push.params.items():
            assert torch.equal(value[push.model], earlier.params[name][push.sender]), name
    one = Peers(torch.eye(40, dtype=torch.bool)[:1]).sees(pushes[0])
    assert one is None or (isinstance(one, Push) and set(one.receiver.tolist()) == {0})


def test_what_is_kept_never_leaves() -> None:
    tap = Everything()
    run(Gossip(rounds=2, local=KEEP), parts().train, defense=ShareLess(), taps=[tap])
    assert tap.messages
    for message in tap.messages:
        assert isinstance(message, Push)
        assert set(message.params) == {"item", "head.1.weight", "head.1.bias"}


def test_other_models_gossip_too() -> None:
    model = train_gossip(
        Gossip(rounds=2, local=LocalTraining(batch_size=16, optimizer=Adam(0.01))),
        NCF(4, (8,)),
        parts().train,
        show_progress=False,
        threads=1,
    )
    assert bool(torch.isfinite(model.scores(torch.arange(40))).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": -1}, "rounds is -1, expected at least 0"),
        ({"degree": 0}, "degree is 0"),
        ({"loss": 1.0}, "loss is 1.0"),
        ({"churn": -0.1}, "churn is -0.1"),
        ({"peers": "best"}, "peers"),
        ({"merging": "later"}, "merging"),
        ({"precision": "float8"}, "precision"),
        ({"peers": "personal", "stay": 4}, "stay is 4, expected at most the 3 peers"),
    ],
)
def test_errors_say_what_to_do(change: dict[str, object], words: str) -> None:
    with pytest.raises(RecleakError, match=words):
        run(Gossip(local=KEEP, **change), parts().train)  # type: ignore[arg-type]


def test_sums_need_a_server() -> None:
    with pytest.raises(ConfigError, match="secure aggregation in a gossip"):
        run(Gossip(rounds=1, local=KEEP), parts().train, defense=SecureAggregation())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_nodes_send_is_a_copy_in_single_precision(dtype: torch.dtype) -> None:
    params, node = NodeParams(), np.array([1, 2, 5])
    for name, shape in (("table", (7, 3)), ("vector", (4,)), ("number", ())):
        params[name] = torch.randn(6, *shape).to(dtype)
    sent = of_nodes(params, node)
    for name, value in params.items():
        assert torch.equal(sent[name], value[torch.from_numpy(node)].float())
        value.zero_()
        assert bool(sent[name].any())
