"""Gossip: equal to a plain loop over nodes, whatever is lost, late, asleep or broken."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recleak import random
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
from recleak.protocols import gossip
from recleak.protocols.gossip import Gossip, GossipModel, train_gossip
from recleak.protocols.mail import random_views
from recleak.protocols.nodes import first_nodes, of_nodes
from recleak.protocols.saving import Interrupted
from recleak.testing.models import ragged
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, train
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


def parts(n_users: int = 40, n_items: int = 60) -> Split:
    return ratio(Synthetic(n_users=n_users, n_items=n_items, mean_activity=15, min_activity=10).generate(), seed=1)


def run(protocol: Gossip, data: Interactions, **more: object) -> GossipModel:
    options: dict[str, object] = {"defense": FULL, "show_progress": False, "threads": 1} | more
    return train_gossip(protocol, MODEL, data, **options)  # type: ignore[arg-type]


# --- the plain loop ---------------------------------------------------------------------------------------------------


def plain_loop(protocol: Gossip, data: Interactions, defense: Defense, seed: int = 0) -> dict[int, dict[str, Tensor]]:
    """The same protocol, node by node and message by message; only draws are shared with what is tested."""
    components = defense.sharing(MODEL.components())
    local, nodes = protocol.local, np.flatnonzero(data.activity)
    task = Task(MODEL, components, local, defense, seed)
    examples = Examples.of(data, negatives=local.negatives, resample=local.resample, seed=seed)
    store = ClientStore(components, local.optimizer, data.n_users, data.n_items, seed)
    first = first_nodes(components, data.n_users, data.n_items, seed, "float32")
    has = {int(node): {name: value[node].clone() for name, value in first.items()} for node in nodes}
    for tick in range(protocol.rounds):
        if tick % protocol.refresh == 0:
            view = random_views(nodes, protocol.degree, seed, tick // protocol.refresh)
        sent = {node: {name: value.clone() for name, value in params.items()} for node, params in has.items()}
        messages = [(int(sender), int(to)) for place, sender in enumerate(nodes) for to in view[place]]
        lot = {pair: int(random.bits(seed, "order", tick, *pair)) for pair in messages}
        heard: dict[int, list[int]] = {}
        for sender, to in sorted(messages, key=lot.__getitem__):
            heard.setdefault(to, []).append(sender)
        for to, senders in heard.items():
            for wave, group in enumerate([[s] for s in senders] if protocol.merging == "pairwise" else [senders]):
                weight = np.array([data.activity[to], *data.activity[group]], float)
                if protocol.weights == "equal":
                    weight[:] = 1
                for name in has[to]:
                    all_of = [has[to][name], *(sent[s][name] for s in group)]
                    has[to][name] = sum(float(w / weight.sum()) * v for w, v in zip(weight, all_of, strict=True))  # type: ignore[assignment]
                client = np.array([to])
                whole = NodeParams(
                    {name: value.new_zeros(data.n_users, *value.shape) for name, value in has[to].items()}
                )
                for name, value in has[to].items():
                    whole[name][to] = value
                number = tick * gossip._WAVES + wave
                trained = train(task, whole, store.read(client), examples.draw(client, number), number)
                store.write(trained.kept)
                for name, value in trained.update.values.items():
                    if name == "user":
                        has[to][name][to] += value[0]
                    else:
                        has[to][name] += value[0]
                has[to]["item"][trained.update.item] += trained.update.rows["item"]
    return has


@pytest.mark.parametrize("defense", [FULL, Defense(), GaussianNoise(0.01)], ids=["full", "share less", "noise"])
@pytest.mark.parametrize("local", [KEEP, PLAIN], ids=["kept adam", "sgd"])
@pytest.mark.parametrize("merging", ["pairwise", "together"])
def test_equals_the_plain_loop(defense: Defense, local: LocalTraining, merging: gossip.Merging) -> None:
    data = ragged(n_users=9, n_items=12)
    protocol = Gossip(rounds=5, degree=2, refresh=2, merging=merging, local=local)
    got = run(protocol, data, defense=defense)
    expected = plain_loop(protocol, data.distinct(), defense)
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(got.params[name][node], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("defense", [FULL, Chain((FULL, DPSGD(0.5, 0.1)))], ids=["full", "dp-sgd"])
def test_equals_the_plain_loop_where_all_count_alike(defense: Defense) -> None:
    data = ragged(n_users=9, n_items=12)
    protocol = Gossip(rounds=4, degree=2, refresh=2, weights="equal", local=KEEP)
    got = run(protocol, data, defense=defense)
    expected = plain_loop(protocol, data.distinct(), defense)
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(got.params[name][node], value, atol=2e-5, rtol=1e-4)
    other = run(replace(protocol, weights="data"), data, defense=defense)
    assert not torch.equal(got.params["item"], other.params["item"])


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
    monkeypatch.setattr(gossip, "direct", lambda *_: False)
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


def test_personal_peers_stay_if_they_are_good() -> None:
    split, still = parts(), replace(KEEP, optimizer=Adam(0.0, keep=True))
    protocol = Gossip(rounds=12, refresh=1, peers="personal", stay=2, local=still)
    tap = Everything()
    run(protocol, split.train, valid=split.valid, taps=[tap])
    last: dict[int, set[int]] = {sender: set() for sender in range(40)}
    stays = []
    for message in tap.messages:
        assert isinstance(message, Push)
        for sender in range(40):
            now = set(message.receiver[message.sender == sender].tolist())
            if now and last[sender]:
                stays.append(len(now & last[sender]))
            last[sender] = now or last[sender]
    assert min(stays) >= 2, "the best two stay, one is replaced"
    with pytest.raises(DataError, match="Give `valid` items"):
        run(protocol, split.train)


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


def test_nobody_listens_to_broken_nodes(caplog: pytest.LogCaptureFixture) -> None:
    data, protocol = parts().train, Gossip(rounds=3, local=KEEP)
    sound = run(protocol, data)

    def nan(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**params, "item": torch.full_like(params["item"], float("nan"))}

    def short(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**params, "item": params["item"][:-1]}

    def other(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"code": torch.ones(1)}

    with caplog.at_level(logging.WARNING, logger="recleak.gossip"):
        model = run(protocol, data, faulty={3: nan, 5: short, 8: other})
    assert model.rejected == (3, 5, 8)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "node 3 sent numbers that are not finite" in said
    assert "node 5 sent item of shape [59, 4], expected [60, 4]" in said
    assert "node 8 sent the components code, expected" in said
    assert all(bool(torch.isfinite(value).all()) for value in model.params.values())
    assert sum(model.visits) < sum(sound.visits)


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
