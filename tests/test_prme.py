"""PRME-G: equal to plain loops in double precision, federated and in gossip; it learns what comes next."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from recleak import random
from recleak.data.catalog import locate
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates
from recleak.data.sequences import Transitions, held_out, leave_last_out, sequence_split
from recleak.data.source import open_data
from recleak.data.split import Split
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.labels import FakeItems
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, DataError, RecleakError
from recleak.geometry import kilometers
from recleak.metrics.next_item import rank_next
from recleak.models.base import Batch, Params
from recleak.models.components import Normal
from recleak.models.mf import MF
from recleak.models.prme import PRMEG
from recleak.protocols import gossip, ticks
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.protocols.gossip import Gossip, GossipModel, train_gossip
from recleak.protocols.mail import random_views
from recleak.protocols.merging import Merging
from recleak.protocols.nodes import Precision, first_nodes
from recleak.protocols.panel import Panel
from recleak.streams import Streams
from recleak.training import compiled_prme
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, train
from recleak.training.executor import InProcess, Workers
from recleak.training.local import Examples, shuffles
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.training.transitions import LocalTransitions, TransitionExamples
from recleak.update import Update
from recleak.wire import Message, Upload

MODEL = PRMEG(5, init=Normal(0.5))
LOCAL = LocalTraining(
    epochs=2, batch_size=1, optimizer=SGD(0.05, weight_decay=0.06), loss="bpr", negatives=2, resample=True
)
FULL = Share(("user",))
PAIRS = Gossip(rounds=2, degree=2, refresh=1, local=LOCAL)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


def walks(
    n_users: int = 9, n_items: int = 14, length: int = 16, *, noise: float = 0.5, reach: int = 8, seed: int = 0
) -> Interactions:
    """From place i users mostly go to i + 1 within some hours; where places are says nothing.

    A user knows `reach` places in a row, with a different first one, and has from half of `length` to all of it.
    """
    user = np.repeat(np.arange(n_users), length - np.arange(n_users) % (length // 2))
    step = np.arange(len(user)) - np.searchsorted(user, user)
    lost = random.uniform(seed, "lost", user, step) < noise
    place = (step + random.below(reach, seed, "first", user)) % reach
    place = np.where(lost, random.below(reach, seed, "anywhere", user, step), place)
    hours = 1 + random.below(10, seed, "hours", user, step)
    events = pl.DataFrame({"user": user, "item": (place + 2 * user) % n_items, "time": 3600 * np.cumsum(hours)})
    missing = np.setdiff1d(np.arange(n_items), events["item"].to_numpy())
    extra = pl.DataFrame({"user": np.full(len(missing), n_users - 1), "item": missing, "time": np.arange(len(missing))})
    items = pl.DataFrame(
        {
            "id": np.arange(n_items),
            "latitude": 40.5 + 0.4 * random.uniform(seed, "north", np.arange(n_items)),
            "longitude": -74.2 + 0.5 * random.uniform(seed, "east", np.arange(n_items)),
        }
    )
    return Interactions.build(pl.concat([events, extra]), items=items)


def task_of(model: PRMEG = MODEL, local: LocalTraining = LOCAL, defense: Defense | None = None) -> Task:
    defense = defense or Defense()
    return Task(model, defense.sharing(model.components()), local, defense, 3)


def examples(data: Interactions, local: LocalTraining = LOCAL, seed: int = 0) -> TransitionExamples:
    return TransitionExamples.of(data, negatives=local.negatives, resample=local.resample, seed=seed)


# --- the model --------------------------------------------------------------------------------------------------------


def test_scores_are_the_formula() -> None:
    model = PRMEG(3, component_weight=0.3, window_hours=2)
    draw = torch.Generator().manual_seed(0)
    user, before = (torch.randn(2, 3, generator=draw) for _ in range(2))
    params = {
        "user": user,
        "item.preference": torch.randn(2, 4, 3, generator=draw),
        "item.sequence": torch.randn(2, 4, 3, generator=draw),
    }
    gap, km = torch.tensor([7200.0, 7201.0]), torch.rand(2, 4, generator=draw) * 20
    got = model.logits_after(params, before, gap, km)
    nobody = Batch(own=torch.zeros(2, 4, dtype=torch.bool), degree=torch.ones(2))
    for c in range(2):
        for i in range(4):
            preference = float(((user[c] - params["item.preference"][c, i]) ** 2).sum())
            sequence = float(((before[c] - params["item.sequence"][c, i]) ** 2).sum())
            near = (1 + float(km[c, i])) ** 0.25 * (0.3 * preference + 0.7 * sequence)
            assert float(got[c, i]) == pytest.approx(-(near if c == 0 else preference), rel=1e-5)
            assert float(model.logits(params, nobody)[c, i]) == pytest.approx(-preference, rel=1e-5)


def test_defaults_are_the_papers() -> None:
    model = PRMEG()
    assert (model.factors, model.component_weight, model.window_hours, model.distance_exponent) == (60, 0.2, 6.0, 0.25)
    parts = {part.name: part for part in model.components()}
    assert [part.shared for part in parts.values()] == [False, True, True]
    assert [part.storage for part in parts.values()] == ["per_user", "per_item", "per_item"]
    with pytest.raises(ConfigError, match=r"component_weight is 1\.2, expected a number from 0 to 1"):
        PRMEG(component_weight=1.2)
    with pytest.raises(ConfigError, match=r"window_hours is -1\.0"):
        PRMEG(window_hours=-1.0)


# --- examples ---------------------------------------------------------------------------------------------------------


def test_negatives_are_places_where_the_client_never_was() -> None:
    data = walks()
    source = examples(data)
    own = data.matrix().toarray() > 0
    rounds = [source.draw(np.array([1, 4, 8]), round) for round in (0, 1)]
    for drawn in rounds:
        who = drawn.client[drawn.owner]
        assert not own[who, drawn.against].any()
        assert own[who, drawn.item].all()
        assert own[who, drawn.before].all()
        assert (drawn.count == 2 * drawn.positives).all()
        assert (drawn.count == source.count[drawn.client]).all()
        place = source.transitions.place
        np.testing.assert_allclose(drawn.distance, kilometers(place[drawn.before], place[drawn.item]), rtol=1e-6)
        np.testing.assert_allclose(
            drawn.distance_against, kilometers(place[drawn.before], place[drawn.against]), rtol=1e-6
        )
    assert (rounds[0].item == rounds[1].item).all()
    assert (rounds[0].against != rounds[1].against).any()
    alone = source.draw(np.array([4]), 1)
    mine = slice(*rounds[1].offset[1:3])
    assert (alone.against == rounds[1].against[mine]).all(), "draws do not depend on who else is there"
    once = replace(source, resample=False)
    assert (once.draw(np.array([4]), 0).against == once.draw(np.array([4]), 1).against).all()


# --- the plain loop ---------------------------------------------------------------------------------------------------


def loop(
    task: Task, tables: Params, user: Tensor, data: LocalTransitions, position: int, round: int
) -> tuple[Params, Tensor, float]:
    """One client after one visit, by autograd in double precision: tables f64[I, d], its vector and its mean loss."""
    model, training, sgd = task.model, task.training, task.training.optimizer
    assert isinstance(model, PRMEG)
    leaves = {name: value.double().clone().requires_grad_() for name, value in {"user": user, **tables}.items()}
    p, s = leaves["item.preference"], leaves["item.sequence"]
    orders = shuffles(data.client, data.count, epochs=training.epochs, seed=task.seed, round=round)
    total, order = 0.0, list(orders)[position].ravel() + data.offset[position]
    for e in order.tolist():
        pair = torch.tensor([data.item[e], data.against[e]])
        gap, b = torch.tensor([int(data.gap[e])]), int(data.before[e])
        km = torch.tensor([[data.distance[e], data.distance_against[e]]]).double()
        rows = {"user": leaves["user"][None], "item.preference": p[pair][None], "item.sequence": s[pair][None]}
        z = model.logits_after(rows, s[b][None], gap, km) @ torch.tensor([1.0, -1.0]).double()  # D_against - D_item
        touched = [leaves["user"], p[pair]] + ([s[pair], s[b]] if bool(model.is_near(gap)) else [])
        loss = softplus(-z).sum()
        whole = loss + sgd.weight_decay / 2 * sum(each.square().sum() for each in touched)
        gradients = torch.autograd.grad(whole, list(leaves.values()), allow_unused=True)
        total += float(loss.detach())
        with torch.no_grad():
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
                if gradient is not None:
                    leaf -= sgd.learning_rates.get(name, sgd.learning_rate) * gradient
    return {name: leaves[name].detach() for name in tables}, leaves["user"].detach(), total / len(order)


@pytest.mark.parametrize("shared", [False, True], ids=["kept", "sent"])
@pytest.mark.parametrize("rates", [{}, {"user": 0.02, "item.sequence": 0.1}], ids=["one rate", "three"])
@pytest.mark.parametrize("clients", [[4], [0, 3, 4, 8]], ids=["one", "several"])
def test_a_visit_is_that_of_the_loop(shared: bool, rates: dict[str, float], clients: list[int]) -> None:
    data, who = walks(), np.array(clients)
    local = replace(LOCAL, optimizer=SGD(0.05, learning_rates=rates, weight_decay=0.06))
    task = task_of(local=local, defense=FULL if shared else None)
    received = first_params(task.components, data.n_users, data.n_items, 3)
    store = ClientStore(task.components, local.optimizer, data.n_users, data.n_items, 3)
    kept, drawn = store.read(who), examples(data).draw(who, 2)
    got = train(task, received, kept, drawn, 2)
    tables = {name: received[name] for name in ("item.preference", "item.sequence")}
    for position, client in enumerate(clients):
        first = received["user"][client] if shared else kept.values["user"][position]
        after, user, loss = loop(task, tables, first, drawn, position, 2)
        mine = got.update.select(torch.tensor([position]))
        for name, table in tables.items():
            changed = torch.zeros_like(table).index_copy_(0, mine.item, mine.rows[name])
            torch.testing.assert_close(changed.double(), after[name] - table, atol=2e-6, rtol=1e-5)
        moved = mine.values["user"][0] if shared else got.kept.values["user"][position] - first
        torch.testing.assert_close(moved.double(), user - first, atol=2e-6, rtol=1e-5)
        assert float(got.loss[position]) == pytest.approx(loss, rel=1e-5)
    assert (got.positives.numpy() == drawn.positives).all()
    assert got.steps == 2 * len(drawn.item)
    assert bool((got.update.item.diff()[(got.update.owner.diff() == 0)] > 0).all()), "items ascend within a client"


@pytest.mark.parametrize("defense", [Defense(), FULL], ids=["kept", "sent"])
def test_rounds_are_those_of_the_loop(defense: Defense) -> None:
    data = walks()
    got = train_federated(
        Federated(rounds=3, aggregation="weighted", local=LOCAL),
        MODEL,
        data,
        defense=defense,
        executor=InProcess(1),
        seed=3,
        show_progress=False,
    )
    task, source = task_of(defense=defense), examples(data, seed=3)
    params = {name: value.double() for name, value in first_params(task.components, 9, 14, 3).items()}
    own = MODEL.components()[0].draw(3, np.arange(9)).double()
    weight = torch.from_numpy(source.positives / source.positives.sum())
    for round in range(3):
        drawn = source.draw(np.arange(9), round)
        tables = {name: value for name, value in params.items() if name != "user"}
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        for client in range(9):
            first = params["user"][client] if "user" in params else own[client]
            after, user, _ = loop(task, tables, first, drawn, client, round)
            for name, value in after.items():
                total[name] += weight[client] * (value - params[name])
            if "user" in params:
                total["user"][client] += weight[client] * (user - first)
            else:
                own[client] = user
        params = {name: value + total[name] for name, value in params.items()}
    for name, value in params.items():
        torch.testing.assert_close(got.params[name].double(), value, atol=1e-5, rtol=1e-4)
    if "user" not in params:
        kept = got.store.read_values(np.arange(9)).values["user"]
        torch.testing.assert_close(kept.double(), own, atol=1e-5, rtol=1e-4)


@cache
def gossip_loop(merging: Merging, shared: bool, seed: int = 0) -> dict[int, Params]:
    """The same protocol, node by node and message by message, in double precision."""
    protocol, data, defense = replace(PAIRS, merging=merging), walks(n_users=6), FULL if shared else Defense()
    components, nodes = defense.sharing(MODEL.components()), np.arange(data.n_users)
    task = Task(MODEL, components, protocol.local, defense, seed)
    source = examples(data, protocol.local, seed)
    first = first_nodes(components, data.n_users, data.n_items, seed, "float32")
    has = {int(n): {name: value[n].double() for name, value in first.items()} for n in nodes}
    own = MODEL.components()[0].draw(seed, nodes).double()
    weight = source.positives.astype(float)
    for tick in range(protocol.rounds):
        view = random_views(nodes, protocol.degree, seed, tick // protocol.refresh)
        sent = {node: dict(params) for node, params in has.items()}
        messages = [(int(sender), int(to)) for place, sender in enumerate(nodes) for to in view[place]]
        lot = {pair: int(random.bits(seed, "order", tick, *pair)) for pair in messages}
        heard: dict[int, list[int]] = {}
        for sender, to in sorted(messages, key=lot.__getitem__):
            heard.setdefault(to, []).append(sender)
        for to, senders in heard.items():
            for wave, group in enumerate([[s] for s in senders] if protocol.merging == "pairwise" else [senders]):
                total = weight[[to, *group]].sum()
                for name in has[to]:
                    merged = weight[to] / total * has[to][name]
                    has[to][name] = merged + sum(weight[s] / total * sent[s][name] for s in group)
                number = tick * ticks._WAVES + wave
                mine = {name: value for name, value in has[to].items() if name != "user"}
                vector = has[to]["user"][to] if "user" in has[to] else own[to]
                after, user, _ = loop(task, mine, vector, source.draw(np.array([to]), number), 0, number)
                has[to] |= after
                if "user" in has[to]:
                    has[to]["user"] = has[to]["user"].clone()
                    has[to]["user"][to] = user
                else:
                    own[to] = user
    return has


def run(protocol: Gossip, data: Interactions, **more: Any) -> GossipModel:
    options: dict[str, Any] = {"show_progress": False, "threads": 1} | more
    return train_gossip(protocol, MODEL, data, **options)


@pytest.mark.parametrize("shared", [False, True], ids=["kept", "sent"])
@pytest.mark.parametrize("merging", ["pairwise", "together"])
@pytest.mark.parametrize("way", ["in place", "through"])
def test_gossip_is_that_of_the_loop(shared: bool, merging: Merging, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, defense = walks(n_users=6), FULL if shared else Defense()
    if way == "through":
        monkeypatch.setattr(compiled_prme, "direct", lambda *_: False)
    protocol = replace(PAIRS, merging=merging)
    got = run(protocol, data, defense=defense)
    half = run(replace(protocol, precision="float16"), data, defense=defense)
    for node, params in gossip_loop(merging, shared).items():
        for name, value in params.items():
            torch.testing.assert_close(got.params[name][node].double(), value, atol=2e-5, rtol=1e-4)
            assert half.params[name].dtype == torch.float16
            torch.testing.assert_close(half.params[name][node].double(), value, atol=4e-3, rtol=4e-3)


# --- the sign ---------------------------------------------------------------------------------------------------------


def test_training_draws_the_next_place_near_and_the_other_one_away() -> None:
    still = replace(LOCAL, epochs=1, negatives=1, optimizer=SGD(0.05))
    task = task_of(local=still)
    received = first_params(task.components, 1, 3, 3)
    store = ClientStore(task.components, still.optimizer, 1, 3, 3)
    kept = store.read(np.array([0]))

    def distances(tables: Params, user: Tensor, gap: int) -> list[float]:
        rows = {"user": user[None], **{name: value[None] for name, value in tables.items()}}
        score = MODEL.logits_after(rows, tables["item.sequence"][:1], torch.tensor([gap]), torch.ones(1, 3))
        return [float(each) for each in -score[0]]

    for gap in (3600, 7 * 3600):
        one = np.array([1.0], np.float32)
        where = (np.array([0]), np.array([1]), np.array([2]))
        data = LocalTransitions(np.array([0]), *where, np.array([gap]), one, one, np.array([0, 1]), one, 3)
        trained = train(task, received, kept, data, 0)
        after = {
            name: received[name].index_add(0, trained.update.item, rows) for name, rows in trained.update.rows.items()
        }
        before = distances(received, kept.values["user"][0], gap)
        now = distances(after, trained.kept.values["user"][0], gap)
        assert now[1] < before[1], "it went there"
        assert now[2] > before[2], "it did not go there"
        unmoved = torch.equal(after["item.sequence"], received["item.sequence"])
        assert unmoved == (gap > 6 * 3600), "beyond the window the sequence does not count"


# --- chunks and threads -----------------------------------------------------------------------------------------------


def test_no_bit_of_a_federation_depends_on_chunks_or_threads() -> None:
    data, protocol = walks(), Federated(rounds=3, local=LOCAL)

    def go(executor: InProcess, chunk: int) -> FederatedModel:
        noisy = Chain((ClipByNorm(0.5), GaussianNoise(0.01)))
        return train_federated(
            protocol, MODEL, data, defense=noisy, executor=executor, chunk=chunk, show_progress=False
        )

    one, other = go(InProcess(1), 1), go(InProcess(2), 64)
    for name, value in one.params.items():
        assert torch.equal(value, other.params[name]), name
    users = np.arange(9)
    assert torch.equal(one.store.read_values(users).values["user"], other.store.read_values(users).values["user"])


@pytest.mark.heavy
def test_worker_processes_do_the_same() -> None:
    data, protocol = walks(), Federated(rounds=2, local=LOCAL)
    one, other = (
        train_federated(protocol, MODEL, data, executor=executor, show_progress=False)
        for executor in (InProcess(1), Workers(1))
    )
    for name, value in one.params.items():
        assert torch.equal(value, other.params[name]), name


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("peers", ["random", "personal"])
@pytest.mark.parametrize("defense", [FULL, GaussianNoise(0.01)], ids=["in place", "through"])
def test_no_bit_of_a_gossip_depends_on_chunks_or_threads(
    precision: Precision, peers: gossip.Peering, defense: Defense
) -> None:
    split = sequence_split(walks(length=24))
    protocol = Gossip(rounds=4, refresh=2, peers=peers, delay=1, loss=0.1, churn=0.1, precision=precision, local=LOCAL)
    one = run(protocol, split.train, valid=split.valid, defense=defense, chunk=1)
    other = run(protocol, split.train, valid=split.valid, defense=defense, chunk=64, threads=2)
    assert one.visits == other.visits
    for name, value in one.params.items():
        assert torch.equal(value, other.params[name]), name


def test_a_run_continues_where_it_was(tmp_path: Any) -> None:
    data = walks()

    def go(rounds: int, **more: Any) -> FederatedModel:
        return train_federated(Federated(rounds=rounds, local=LOCAL), MODEL, data, show_progress=False, **more)

    go(2, directory=tmp_path)
    again, whole = go(4, directory=tmp_path), go(4)
    assert again.continued == 2
    for name, value in whole.params.items():
        assert torch.equal(value, again.params[name]), name
    twice = Interactions.build(pl.concat([data.rows, data.rows.with_columns(pl.col("time") + 10**6)]), items=data.items)
    with pytest.raises(RecleakError, match="train was"):
        train_federated(Federated(rounds=5, local=LOCAL), MODEL, twice, directory=tmp_path, show_progress=False)


# --- what is on the wire ----------------------------------------------------------------------------------------------


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


def test_uploads_carry_the_places_of_the_examples_and_hooks_act_on_them() -> None:
    data, tap = walks(), Everything()
    train_federated(
        Federated(rounds=1, local=LOCAL), MODEL, data, defense=ClipByNorm(0.01), taps=[tap], show_progress=False
    )
    drawn = examples(data).draw(np.arange(9), 0)
    (upload,) = [message for message in tap.messages if isinstance(message, Upload)]
    assert set(upload.update.names()) == {"item.preference", "item.sequence"}
    assert bool((upload.update.norms() <= 0.0101).all())
    for client in range(9):
        mine = slice(*drawn.offset[client : client + 2])
        touched = np.unique(np.concatenate([drawn.before[mine], drawn.item[mine], drawn.against[mine]]))
        assert upload.update.select(torch.tensor([client])).item.tolist() == touched.tolist()


# --- what is learned --------------------------------------------------------------------------------------------------

PLANTED = LocalTraining(
    epochs=4, batch_size=1, optimizer=SGD(0.05, weight_decay=0.002), loss="bpr", negatives=2, resample=True
)


def planted() -> Split:
    """A ring of 24 places; everybody knows all but the 4 that are drawn as negatives."""
    return sequence_split(walks(n_users=16, n_items=24, length=60, noise=0.1, reach=20))


def shares_of_hits(model: FederatedModel | GossipModel, split: Split, k: int) -> tuple[float, float]:
    """Hit rates at k in full ranking: with the context, and of a model that does not know it."""
    test = held_out(split)
    ranks = rank_next(model, test)
    scores = model.scores(torch.from_numpy(test.user)).numpy()
    wanted = scores[np.arange(len(test)), test.item][:, None]
    without = np.bincount(test.user, (scores > wanted).sum(1) < k) / np.bincount(test.user)
    return float(ranks.recall(k).mean()), float(np.nanmean(without))


def test_a_federation_learns_what_comes_next() -> None:
    split = planted()
    model = train_federated(
        Federated(rounds=30, aggregation="touched-mean", local=PLANTED),
        PRMEG(8, window_hours=12, init=Normal(0.1)),
        split.train,
        executor=InProcess(1),
        show_progress=False,
    )
    hits, without = shares_of_hits(model, split, 3)
    chance = 3 / 23
    assert model.loss[-1] < 0.8 * model.loss[0]
    assert hits > 3 * chance
    assert hits > 2 * without


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_gossip_learns_what_comes_next(precision: Precision) -> None:
    split = planted()
    model = train_gossip(
        Gossip(rounds=15, refresh=1, precision=precision, local=PLANTED),
        PRMEG(8, window_hours=12, init=Normal(0.1)),
        split.train,
        threads=1,
        show_progress=False,
    )
    hits, without = shares_of_hits(model, split, 3)
    assert hits > 3 * 3 / 23
    assert hits > 2 * without


# --- utility ----------------------------------------------------------------------------------------------------------


def trained(kind: str, split: Split, defense: Defense) -> FederatedModel | GossipModel:
    if kind == "federated":
        return train_federated(
            Federated(rounds=2, local=LOCAL), MODEL, split.train, defense=defense, show_progress=False
        )
    precision: Any = kind
    return run(Gossip(rounds=2, precision=precision, local=LOCAL), split.train, defense=defense)


@pytest.mark.parametrize("kind", ["federated", "float32", "float16"])
@pytest.mark.parametrize("defense", [Defense(), FULL], ids=["kept", "sent"])
def test_ranks_are_those_of_a_loop(kind: str, defense: Defense) -> None:
    split = sequence_split(walks(length=24))
    model, test = trained(kind, split, defense), held_out(split)
    sampled = evaluation_candidates(split, 4).items
    full, few = rank_next(model, test), rank_next(model, test, sampled, chunk_bytes=1)
    for t in range(len(test)):
        u, b = int(test.user[t]), int(test.before[t])
        if isinstance(model, GossipModel):
            mine = {name: value[u].float() for name, value in model.params.items()}
        else:
            mine = dict(model.params)
        vector = mine["user"][u] if "user" in mine else model.store.read_values(np.array([u])).values["user"][0]
        rows = {"user": vector[None], **{name: mine[name][None] for name in ("item.preference", "item.sequence")}}
        km = torch.from_numpy(kilometers(test.place[b], test.place)).float()[None]
        score = MODEL.logits_after(rows, mine["item.sequence"][b][None], torch.tensor([test.gap[t]]), km)[0].numpy()
        np.testing.assert_allclose(
            model.scores_after(test.select(np.array([t])), torch.arange(14)[None])[0], score, rtol=2e-5, atol=1e-6
        )
        rivals = np.setdiff1d(np.arange(14), [b, test.item[t]])
        assert full.above[t] == (score[rivals] > score[test.item[t]]).sum()
        assert few.above[t] == sum(score[i] > score[test.item[t]] for i in sampled[u] if i >= 0)
    assert (full.candidates == 13).all()
    hits = full.recall(3)
    for row, u in enumerate(full.users):
        assert hits[row] == pytest.approx((full.above[test.user == u] < 3).mean()), "the mean over a user's items"


def test_what_was_chosen_is_not_read() -> None:
    split = sequence_split(walks(length=24))
    model, test = trained("federated", split, Defense()), held_out(split)
    items = torch.arange(14).repeat(len(test), 1)
    other = replace(test, item=(test.item + 1) % 14)
    assert torch.equal(model.scores_after(test, items), model.scores_after(other, items))


def test_errors_of_grading() -> None:
    split = leave_last_out(walks(length=24))
    model, test = trained("federated", split, Defense()), held_out(split)
    with pytest.raises(DataError, match="no held-out transition"):
        rank_next(model, test.select(np.zeros(0, np.int64)))
    with pytest.raises(DataError, match="among its sampled candidates"):
        rank_next(model, test, np.tile(np.arange(14), (9, 1)))
    other = train_federated(Federated(rounds=1), MF(4), split.train, show_progress=False)
    with pytest.raises(ConfigError, match="Got MF, expected PRMEG"):
        rank_next(other, test)
    model.params["item.preference"][:] = float("nan")
    with pytest.raises(RecleakError, match="not finite"):
        rank_next(model, test)


# --- personal peers ---------------------------------------------------------------------------------------------------


def test_peers_are_judged_by_what_came_next(monkeypatch: pytest.MonkeyPatch) -> None:
    split = sequence_split(walks(length=24), (0.6, 0.3, 0.1))
    judged = []
    graded = Panel.graded

    def watch(panel: Any, scores: Any, owner: Any, n: int) -> Any:
        judged.append(scores.shape[1])
        return graded(panel, scores, owner, n)

    monkeypatch.setattr(Panel, "graded", watch)
    run(Gossip(rounds=2, peers="personal", local=LOCAL), split.train, valid=split.valid)
    assert judged
    assert set(judged) == {100}
    panel = Panel.of(split.train, split.valid, (), 0, sequential=True)
    starts = Transitions.of(split.valid, earlier=(split.train,))
    assert (panel.item[:, 0] == starts.item).all()
    own = (split.train.matrix() + split.valid.matrix()).toarray() > 0
    assert not own[starts.user[:, None], panel.item[:, 1:]].any()
    scores = -np.tile(np.arange(100.0, dtype=np.float32), (len(starts), 1))  # the right one first, always
    owner, place = panel.targets(np.array([2, 0]))
    assert (starts.user[place] == np.array([2, 0])[owner]).all()
    assert panel.graded(scores[place], owner, 2).tolist() == [1.0, 1.0]
    with pytest.raises(DataError, match="Give `valid` items"):
        run(Gossip(rounds=1, peers="personal", local=LOCAL), split.train)


# --- refusals ---------------------------------------------------------------------------------------------------------


class AfterEpochs(Defense):
    """It acts after each epoch."""

    def epoch(self, moved: Update, streams: Streams) -> Update:
        return moved


class OnFeatures(Defense):
    """It acts on features."""

    def features(self, features: Tensor, streams: Streams) -> Tensor:
        return features


@pytest.mark.parametrize(
    ("defense", "hook"),
    [
        (Proximal(0.1, components=("item.preference",)), "penalty"),
        (DPSGD(1.0, 1.0), "batch_sum, gradient"),
        (FakeItems(0.5), "data"),
        (Chain((ClipByNorm(1.0), FakeItems(0.5))), "data"),
        (AfterEpochs(), "epoch"),
        (OnFeatures(), "features"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_hooks_into_local_training_are_refused(defense: Defense, hook: str) -> None:
    with pytest.raises(ConfigError, match=f"acts on {hook} of local training"):
        train_federated(Federated(local=LOCAL), MODEL, walks(), defense=defense, show_progress=False)
    with pytest.raises(ConfigError, match=f"acts on {hook} of local training"):
        run(Gossip(local=LOCAL), walks(), defense=defense)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": Adam(0.01)},
        {"optimizer": SGD(0.01, momentum=0.9)},
        {"optimizer": SGD(0.01, keep=True)},
        {"batch_size": None},
        {"loss": "bce"},
        {"decay_rows": "all"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_ways_to_train_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected plain SGD, an example at a step\.\n  Use LocalTraining"):
        task_of(local=replace(LOCAL, **change))


def test_other_refusals() -> None:
    class Own(PRMEG):
        """It may compute something else."""

    with pytest.raises(ConfigError, match="Got Own, which needs transitions, expected PRMEG"):
        task_of(Own(4))
    with pytest.raises(ConfigError, match=r"item\.sequence of PRMEG is kept"):
        task_of(defense=ShareLess(("item.sequence",)))
    plain = Examples.of(walks(), loss="bpr").draw(np.array([0]), 0)
    store = ClientStore(MODEL.components(), LOCAL.optimizer, 9, 14, 0)
    with pytest.raises(ConfigError, match="PRMEG learns from transitions, got items without an order"):
        train(task_of(), {}, store.read(np.array([0])), plain, 0)
    still = Interactions.build(pl.DataFrame({"user": [0, 0], "item": [1, 1], "time": [1, 2]}), items=_everywhere())
    with pytest.raises(DataError, match="nobody goes from one place to another"):
        train_federated(Federated(local=LOCAL), MODEL, still, show_progress=False)
    with pytest.raises(DataError, match="1 clients have no transition to train on"):
        examples(_with_an_idler()).draw(np.array([0, 1]), 0)


def test_who_never_moves_is_no_client() -> None:
    data = _with_an_idler()
    model = train_federated(Federated(rounds=1, local=LOCAL), MODEL, data, show_progress=False)
    assert model.clients == (2,)
    nodes = run(Gossip(rounds=1, degree=1, local=LOCAL), data)
    assert nodes.visits == (2,)


def _everywhere() -> pl.DataFrame:
    return pl.DataFrame({"id": [0, 1, 2, 3], "latitude": [0.0, 1, 2, 3], "longitude": [0.0, 0, 0, 0]})


def _with_an_idler() -> Interactions:
    rows = {"user": [0, 0, 1, 1, 2, 2], "item": [0, 1, 1, 1, 2, 3], "time": [1, 2, 3, 4, 5, 6]}
    return Interactions.build(pl.DataFrame(rows), items=_everywhere())


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_of_nodes_is_told_in_advance() -> None:
    parts = PRMEG().components()
    half, single = Gossip(precision="float16"), Gossip(precision="float32")
    assert half.state_bytes(parts, 725, 18_501) == 725 * 18_501 * 120 * 2
    assert half.needed_bytes(parts, 725, 18_501) == 2 * half.state_bytes(parts, 725, 18_501) == 6_438_348_000
    assert single.needed_bytes(parts, 725, 18_501) == 12_876_696_000
    assert replace(half, delay=2).needed_bytes(parts, 725, 18_501) == 4 * half.state_bytes(parts, 725, 18_501)


_MEASURE = """
import resource, numpy as np, polars as pl
from recleak.data.interactions import Interactions
from recleak.models.components import Constant
from recleak.models.prme import PRMEG
from recleak.protocols.gossip import Gossip, train_gossip
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import SGD

users, items = 120, 6000
user = np.repeat(np.arange(users), items // users)
rows = {"user": user, "item": np.arange(len(user)), "time": np.arange(len(user))}
place = {"id": np.arange(items), "latitude": np.linspace(40, 41, items), "longitude": np.zeros(items)}
data = Interactions.build(pl.DataFrame(rows), items=pl.DataFrame(place))
local = LocalTraining(batch_size=1, optimizer=SGD(0.005, weight_decay=0.06), loss="bpr", negatives=1, resample=True)
model, protocol = PRMEG(60, init=Constant(0.01)), Gossip(rounds=3, precision="float16", local=local)
few = Gossip(rounds=1, local=local)
train_gossip(few, PRMEG(4), data.restrict(user < 6, "a warm-up"), show_progress=False)
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
train_gossip(protocol, model, data, show_progress=False)
print(peak() - before, protocol.needed_bytes(model.components(), users, items))
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_half_precision_takes_what_is_told_and_little_more() -> None:
    out = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    taken, told = (int(number) for number in out.stdout.split())
    assert told == 2 * 120 * 6000 * 120 * 2  # 346 MB
    assert taken < told + 100e6


# --- published data ---------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_places_in_new_york() -> None:
    if locate("gowalla-nyc") is None:
        pytest.skip("gowalla-nyc is not here; `recleak data get gowalla-nyc` or RECLEAK_DATA")
    split = sequence_split(open_data("gowalla-nyc", "cda"))
    local = LocalTraining(batch_size=1, optimizer=SGD(0.005, weight_decay=0.06), loss="bpr", negatives=1, resample=True)
    model = train_federated(
        Federated(rounds=2, aggregation="weighted", local=local), PRMEG(), split.train, show_progress=False
    )
    ranks = rank_next(model, held_out(split), evaluation_candidates(split, 99).items)
    assert len(ranks.users) > 700
    assert float(ranks.recall(20).mean()) > 0.35, "chance is 0.2"
    assert float(ranks.constant().recall(20).mean()) == pytest.approx(0.2)
