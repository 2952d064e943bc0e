"""Federated runs: equal to a naive loop, the same bits however they are cut, interrupted or killed.

As a script (`python tests/test_federated.py FOLDER EXECUTOR`) this file is the run that the tests below kill.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, DataError, NotFoundError, RecleakError
from recleak.models.adapter import TorchModel
from recleak.models.base import Model, Params
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols import federated
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.protocols.saving import Interrupted
from recleak.recording import Listening, Recorder, read_manifest, replay
from recleak.training.cohort import DivergedError, LocalTraining, Task, train
from recleak.training.executor import Executor, InProcess, Workers
from recleak.training.local import Examples, LocalData
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import CheckpointError, ClientStore, locked, read_file
from recleak.update import Update
from recleak.wire import Aggregate, Aggregator, Broadcast, Message, Server, ServerMessage, Upload

MODEL = GMF(factors=4)
DEFENSE = Chain((ShareLess(("user", "head.1.weight")), ClipByNorm(2.0), GaussianNoise(0.01)))
LOCAL = LocalTraining(epochs=2, batch_size=16, optimizer=Adam(0.05, keep=True))
PROTOCOL = Federated(rounds=30, clients_per_round=12, dropout=0.1, local=LOCAL)


class Everything:
    """Sums in the order of arrival: its state depends on every bit and on the order."""

    vantage = Server

    def init(self, knowledge: Knowledge) -> State:
        return {"rows": torch.zeros(knowledge.n_items), "seen": torch.tensor(0)}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        rows = state["rows"] * 1.01
        if isinstance(message, Upload):
            rows = rows.index_add(0, message.update.item, message.update.rows["item"].sum(1) * (1 + state["seen"]))
        elif isinstance(message, Broadcast):
            rows = rows + message.params["item"].sum(1)
        return {"rows": rows, "seen": state["seen"] + 1}

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return state["rows"][question.item]


def interactions() -> Interactions:
    return Synthetic(n_users=40, n_items=50, mean_activity=12, min_activity=4, communities=5).generate()


def knowledge(data: Interactions) -> Knowledge:
    return Knowledge(MODEL, data.n_users, data.n_items, DEFENSE.sharing(MODEL.components()))


def kept_by_all(model: FederatedModel) -> Update:
    return model.store.read(torch.arange(model.train.n_users).numpy())


def run(folder: Path, executor: Executor, rounds: int = PROTOCOL.rounds) -> dict[str, Tensor]:
    """The run in `folder / "run"`, recorded in `folder / "recording"`; everything it ends with."""
    data = interactions()
    heard = Listening(Server(), Everything(), knowledge(data))
    recorder = Recorder(Server(), folder / "recording", components=knowledge(data).components, source="test")
    model = train_federated(
        Federated(rounds=rounds, clients_per_round=12, dropout=0.1, local=LOCAL),
        MODEL,
        data,
        defense=DEFENSE,
        taps=(recorder, heard),
        executor=executor,
        directory=folder / "run",
        checkpoint_seconds=0.02,
        seed=7,
    )
    kept = kept_by_all(model)
    ended = {f"params {name}": value for name, value in model.params.items()}
    ended |= {f"kept {name}": value for name, value in (*kept.values.items(), *kept.rows.items())}
    ended |= {f"attack {name}": value for name, value in heard.state().items()}
    ended["kept item numbers"], ended["scores"] = kept.item, model.scores(torch.arange(data.n_users))
    ended["loss"] = torch.tensor(model.loss, dtype=torch.float64)
    return ended


def main() -> None:
    """`test_federated.py FOLDER EXECUTOR [ROUNDS]`."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else PROTOCOL.rounds
    try:
        run(folder, Workers(2) if kind == "workers" else InProcess(2), rounds)
    except Interrupted as interrupt:
        sys.stderr.write(f"{interrupt}\n")
        sys.exit(130)
    (folder / "done").touch()


DATA = interactions()
SMALL = Federated(rounds=3, clients_per_round=15, local=LOCAL)
USERS = torch.arange(DATA.n_users)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Single clients are small: threads inside a product only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Wire:
    """A tap that keeps all messages."""

    heard: list[Message] = field(default_factory=list)
    closed: int = 0

    def receive(self, message: Message) -> None:
        self.heard.append(message)

    def state(self) -> dict[str, Tensor]:
        return {"heard": torch.tensor(len(self.heard))}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        del self.heard[int(state["heard"]) :]

    def close(self) -> None:
        self.closed += 1


def assert_same(one: FederatedModel, other: FederatedModel) -> None:
    """Bit for bit: parameters, what clients keep, losses, scores."""
    assert one.loss == other.loss
    assert list(one.params) == list(other.params)
    for name, value in one.params.items():
        assert torch.equal(value, other.params[name]), name
    mine, theirs = kept_by_all(one), kept_by_all(other)
    assert torch.equal(mine.item, theirs.item)
    for name in mine.names():
        assert torch.equal({**mine.values, **mine.rows}[name], {**theirs.values, **theirs.rows}[name]), name
    assert torch.equal(one.scores(USERS), other.scores(USERS))


# --- the naive loop ---------------------------------------------------------------------------------------------------


@dataclass
class Device:
    """What one client keeps, as plain dictionaries."""

    values: Params
    rows: dict[str, dict[int, Tensor]]

    def update(self, client: int, n_items: int) -> Update:
        items = sorted({item for rows in self.rows.values() for item in rows})
        rows = {name: torch.stack([each[item] for item in items]) for name, each in self.rows.items() if items}
        number = torch.tensor([client])
        return Update(number, self.values, rows, torch.tensor(items).long(), torch.tensor([0, len(items)]), n_items)


def naive(protocol: Federated, model: Model, defense: Defense, seed: int) -> tuple[Params, dict[int, Device]]:
    """One client at a time, with dense tables and a plain mean."""
    components, local = defense.sharing(model.components()), protocol.local
    task = Task(model, components, local, defense, seed)
    examples = Examples.of(DATA, negatives=local.negatives, loss=local.loss, resample=local.resample, seed=seed)
    untouched = ClientStore(components, local.optimizer, DATA.n_users, DATA.n_items, seed)
    params = first_params(components, DATA.n_users, DATA.n_items, seed)
    devices: dict[int, Device] = {}
    for round in range(protocol.rounds):
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        share = {name: torch.zeros(len(value)) for name, value in params.items() if value.dim()}
        weights = 0.0
        for client in protocol.participants(np.flatnonzero(DATA.activity), round, seed).tolist():
            who = np.array([client])
            kept = untouched.read(who)
            if client in devices:
                kept = devices[client].update(client, DATA.n_items)
                kept = replace(kept, rows=kept.rows or untouched.read(who).rows)
            trained = train(task, params, kept, examples.draw(who, round), round)
            before = devices[client].rows if client in devices else {name: {} for name in trained.kept.rows}
            now = {name: dict(zip(trained.kept.item.tolist(), v, strict=True)) for name, v in trained.kept.rows.items()}
            devices[client] = Device(trained.kept.values, {name: before[name] | now[name] for name in now})
            weight = float(DATA.activity[client]) if protocol.aggregation == "weighted" else 1.0
            weights += weight
            sent = trained.update
            for part in components:
                if part.name in sent.values:
                    place = (client,) if part.storage == "per_user" else ()
                    total[part.name][place] += weight * sent.values[part.name][0]
                elif part.name in sent.rows:
                    total[part.name][sent.item] += weight * sent.rows[part.name]
                    share[part.name][sent.item] += weight
        for part in components:
            if part.shared and weights:
                step = total[part.name]
                if protocol.aggregation == "touched-mean" and part.storage == "per_item":
                    step = step / share[part.name].clamp(min=1e-9).reshape(-1, *[1] * (step.dim() - 1))
                elif protocol.aggregation != "sum":
                    step = step / weights
                params[part.name] = params[part.name] + protocol.server_learning_rate * step
    return params, devices


CASES: dict[str, tuple[Federated, Model, Defense]] = {
    "mean": (SMALL, MODEL, DEFENSE),
    "weighted": (replace(SMALL, aggregation="weighted"), MODEL, Defense()),
    "touched-mean": (replace(SMALL, aggregation="touched-mean", server_learning_rate=0.5), MODEL, Defense()),
    "sum": (replace(SMALL, aggregation="sum", server_learning_rate=0.1), MODEL, Defense()),
    "shared user table": (SMALL, MF(4, biases=True), Share()),
    "kept heads": (SMALL, PFedRec(4), Defense()),
    "kept item rows": (
        replace(SMALL, local=replace(LOCAL, resample=True, optimizer=SGD(0.1))),
        MF(4),
        Chain((ShareLess(("item",)), Share(("user",)))),
    ),
    "kept everything": (SMALL, MF(4, biases=True), ShareLess(("user", "user.bias", "item", "item.bias"))),
    "graph, pairwise, full batch": (
        replace(SMALL, local=replace(LOCAL, loss="bpr", batch_size=None, optimizer=Adam(0.01))),
        LightGCN(4),
        Defense(),
    ),
    "dropouts": (replace(SMALL, dropout=0.5, rounds=5), NCF(4, (8,)), Defense()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_naive_loop(case: str) -> None:
    protocol, model, defense = CASES[case]
    got = train_federated(protocol, model, DATA, defense=defense, seed=3)
    params, devices = naive(protocol, model, defense, seed=3)
    for name, value in params.items():
        torch.testing.assert_close(got.params[name], value, rtol=1e-4, atol=1e-5)
    assert devices
    for client, device in devices.items():
        kept = got.store.read(np.array([client]))
        expected = device.update(client, DATA.n_items)
        assert torch.equal(kept.item, expected.item)
        for name, value in {**expected.values, **expected.rows}.items():
            torch.testing.assert_close({**kept.values, **kept.rows}[name], value, rtol=1e-3, atol=1e-5)
    visited = np.isin(np.arange(DATA.n_users), list(devices))
    fresh = ClientStore(got.task.components, protocol.local.optimizer, DATA.n_users, DATA.n_items, 3)
    others = np.flatnonzero(~visited)
    for name, value in got.store.read(others).values.items():
        assert torch.equal(value, fresh.read(others).values[name])


# --- who takes part ---------------------------------------------------------------------------------------------------


def test_participants_are_a_uniform_sample_without_replacement() -> None:
    clients = np.array([1, 2, 5, 7, 8, 11, 12, 20, 21, 30])
    protocol = Federated(clients_per_round=3)
    counts = np.zeros(31)
    for round in range(3000):
        chosen = protocol.participants(clients, round, seed=1)
        assert len(chosen) == 3
        assert np.all(np.diff(chosen) > 0)
        counts[chosen] += 1
    assert counts[clients].sum() == 9000
    assert abs(counts[clients] - 900).max() < 4.5 * np.sqrt(3000 * 0.3 * 0.7)
    assert [len(Federated(fraction=f).participants(clients, 0, 0)) for f in (0.01, 0.25, 0.3, 1.0)] == [1, 3, 3, 10]
    assert not np.array_equal(protocol.participants(clients, 0, 1), protocol.participants(clients, 1, 1))


def test_dropouts_send_nothing_and_keep_what_they_had() -> None:
    wire, protocol = Wire(), replace(SMALL, dropout=0.6, rounds=4)
    model = train_federated(protocol, MODEL, DATA, taps=[wire], seed=2)
    asked = {r: set(replace(protocol, dropout=0.0).participants(np.arange(40), r, 2).tolist()) for r in range(4)}
    sent: dict[int, set[int]] = {r: set() for r in range(4)}
    for message in wire.heard:
        if isinstance(message, Upload):
            sent[message.round] |= set(message.update.client.tolist())
    assert all(sent[r] < asked[r] for r in range(4))
    assert model.clients == tuple(len(sent[r]) for r in range(4))
    silent = np.array(sorted(set().union(*asked.values()) - set().union(*sent.values())))
    assert silent.size
    assert torch.equal(model.store.read(silent).values["user"], model.task.components[0].draw(2, silent))
    rate = np.mean([len(replace(protocol, dropout=0.6).participants(np.arange(40), r, 2)) / 15 for r in range(400)])
    assert abs(rate - 0.4) < 4 * np.sqrt(0.24 / 6000)


def test_a_round_in_which_nobody_answers_changes_nothing() -> None:
    wire = Wire()
    seed = next(
        s for s in range(100) if not len(Federated(clients_per_round=1, dropout=0.9).participants(USERS.numpy(), 0, s))
    )
    protocol = Federated(rounds=1, clients_per_round=1, dropout=0.9, local=LOCAL)
    model = train_federated(protocol, MODEL, DATA, taps=[wire], seed=seed)
    assert [type(message) for message in wire.heard] == [Broadcast]
    assert np.isnan(model.loss[0])
    assert model.clients == (0,)
    assert torch.equal(model.params["item"], model.task.components[1].draw(seed, np.arange(DATA.n_items)))


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_messages_come_in_order_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated, "BLOCK", 6)
    wire = Wire()
    model = train_federated(SMALL, MODEL, DATA, taps=[wire])
    kinds = [(type(message).__name__, getattr(message, "round", None)) for message in wire.heard]
    assert kinds == [(kind, r) for r in range(3) for kind in ("Broadcast", "Upload", "Upload", "Upload", "Aggregate")]
    for r in range(3):
        uploads = [m.update.client for m in wire.heard if isinstance(m, Upload) and m.round == r]
        assert torch.equal(torch.cat(uploads), torch.from_numpy(SMALL.participants(np.arange(40), r, 0)))
    assert wire.closed == 1
    assert len(model.loss) == 3


def test_secure_aggregation_leaves_the_sum_only() -> None:
    secure, plain = Wire(), Wire()
    one = train_federated(SMALL, MODEL, DATA, taps=[secure], defense=SecureAggregation())
    other = train_federated(SMALL, MODEL, DATA, taps=[plain])
    assert not any(isinstance(message, Upload) for message in secure.heard)
    assert torch.equal(one.params["item"], other.params["item"])
    sums = [message for message in secure.heard if isinstance(message, Aggregate)]
    uploads = [message for message in plain.heard if isinstance(message, Upload)]
    for total, upload in zip(sums, uploads, strict=True):
        dense = upload.update.with_all_rows().rows["item"].reshape(15, DATA.n_items, -1).sum(0)
        torch.testing.assert_close(total.total["item"], dense)
        torch.testing.assert_close(total.total["head.1.bias"], upload.update.values["head.1.bias"].sum(0))
        assert torch.equal(total.client, upload.update.client)


def test_a_kept_user_table_is_never_on_the_wire() -> None:
    for defense, on_the_wire in ((ShareLess(), False), (Share(), True)):
        wire = Wire()
        train_federated(SMALL, MODEL, DATA, taps=[wire], defense=defense)
        for message in wire.heard:
            names = {
                Broadcast: lambda m: set(m.params),
                Upload: lambda m: set(m.update.values),
                Aggregate: lambda m: set(m.total),
            }[type(message)](message)
            assert ("user" in names) is on_the_wire
            if on_the_wire and isinstance(message, Broadcast):
                assert message.params["user"].shape == (DATA.n_users, 4)


def test_replaying_a_recording_is_like_listening(tmp_path: Path) -> None:
    vantages: tuple[Server | Aggregator, ...] = (Server(), Aggregator())
    for number, vantage in enumerate(vantages):
        recorder = Recorder(vantage, tmp_path / str(number), source="run")
        live = Listening(Server(), Everything(), knowledge(DATA))
        train_federated(SMALL, MODEL, DATA, taps=[recorder, live], defense=DEFENSE)
        assert read_manifest(tmp_path / str(number)).complete
        later = Listening(Server(), Everything(), knowledge(DATA))
        for message in replay(tmp_path / str(number)):
            later.receive(message)
        same = all(torch.equal(value, later.state()[name]) for name, value in live.state().items())
        assert same is isinstance(vantage, Server)


# --- the same bits ----------------------------------------------------------------------------------------------------

BITS: dict[str, tuple[Model, Defense, LocalTraining]] = {
    "gmf, kept adam, noise": (MODEL, DEFENSE, LOCAL),
    "ncf": (NCF(8, (16,)), Defense(), replace(LOCAL, optimizer=Adam(0.01))),
    "lightgcn, full batch": (LightGCN(8), Defense(), replace(LOCAL, batch_size=None, optimizer=SGD(0.1))),
    "pfedrec": (PFedRec(8), Defense(), replace(LOCAL, optimizer=SGD(0.1, momentum=0.9))),
}


@pytest.mark.parametrize("case", BITS)
def test_chunks_and_threads_do_not_matter(case: str) -> None:
    model, defense, local = BITS[case]
    protocol = Federated(rounds=2, local=local)
    first = train_federated(protocol, model, DATA, defense=defense, chunk=1, executor=InProcess(1))
    for chunk, executor in ((3, InProcess(2)), (7, InProcess(1)), (64, InProcess(3))):
        assert_same(first, train_federated(protocol, model, DATA, defense=defense, chunk=chunk, executor=executor))


@pytest.mark.heavy
def test_worker_processes_do_not_matter() -> None:
    model, defense, local = BITS["gmf, kept adam, noise"]
    protocol = Federated(rounds=2, local=local)
    first = train_federated(protocol, model, DATA, defense=defense, executor=InProcess(1))
    assert_same(first, train_federated(protocol, model, DATA, defense=defense, chunk=5, executor=Workers(2)))


def test_the_order_of_rows_does_not_matter() -> None:
    rows = DATA.rows.with_columns(pl.col("user").cast(pl.Int64), pl.col("item").cast(pl.Int64))
    shuffled = Interactions.build(rows.sample(fraction=1.0, shuffle=True, seed=5))
    ordered = Interactions.build(rows)
    assert_same(train_federated(SMALL, MODEL, shuffled), train_federated(SMALL, MODEL, ordered))


def test_noise_leaves_all_other_draws_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[Tensor]] = []
    plain = Examples.draw
    resampled = replace(SMALL, local=replace(LOCAL, resample=True))

    def draw(self: Examples, client: NDArray[np.int64], round: int) -> LocalData:
        data = plain(self, client, round)
        drawn[-1] += [torch.from_numpy(data.client), torch.from_numpy(data.item)]
        return data

    monkeypatch.setattr(Examples, "draw", draw)
    wires = []
    for defense in (ClipByNorm(1e9), Chain((ClipByNorm(1e9), GaussianNoise(1e-7)))):
        drawn.append([])
        wires.append(Wire())
        train_federated(resampled, MODEL, DATA, defense=defense, taps=[wires[-1]], executor=InProcess(1))
    assert len(drawn[0]) == len(drawn[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    first, second = ([m for m in wire.heard if isinstance(m, Upload)] for wire in wires)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.update.client, other.update.client)
        assert torch.equal(one.update.item, other.update.item)
        assert not torch.equal(one.update.rows["item"], other.update.rows["item"])
        torch.testing.assert_close(one.update.rows["item"], other.update.rows["item"], atol=1e-3, rtol=0)


# --- runs on disk -----------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_ended_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]) or bool(value.isnan().any()), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, InProcess(1)), folder


def test_a_finished_run_is_not_run_again_and_can_be_prolonged(
    tmp_path: Path, whole: tuple[dict[str, Tensor], Path]
) -> None:
    expected, folder = whole
    for rounds in (0, 7, 7, PROTOCOL.rounds):
        ended = run(tmp_path, InProcess(2), rounds)
        assert read_manifest(tmp_path / "recording").complete
        assert len(ended["loss"]) == rounds
    assert_ended_alike(ended, expected)
    assert contents(tmp_path / "recording") == contents(folder / "recording")
    with pytest.raises(CheckpointError, match=r"holds 30 rounds, expected at most the 7 asked for"):
        run(tmp_path, InProcess(1), 7)


def test_no_rounds_leave_the_first_parameters() -> None:
    wire = Wire()
    model = train_federated(replace(SMALL, rounds=0), MODEL, DATA, taps=[wire])
    assert not wire.heard
    assert (wire.closed, model.loss) == (1, ())
    assert torch.equal(model.params["item"], model.task.components[1].draw(0, np.arange(DATA.n_items)))


class Fails(Exception):
    pass


@dataclass
class Saboteur(Wire):
    """A tap that ends the run at some message."""

    at: int = 0
    how: Callable[[], BaseException] = Fails

    def receive(self, message: Message) -> None:
        super().receive(message)
        if len(self.heard) == self.at:
            raise self.how()


@pytest.mark.parametrize("at", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("how", [Fails, KeyboardInterrupt])
def test_a_failed_run_continues_with_the_same_objects(
    tmp_path: Path, at: int, how: Callable[[], BaseException]
) -> None:
    """Within a round, after the journal and before the checkpoint, also in the first round."""
    settings = {"defense": DEFENSE, "directory": tmp_path / "run", "executor": InProcess(2), "seed": 5}
    heard, tap = Listening(Server(), Everything(), knowledge(DATA)), Saboteur(at=at, how=how)
    with pytest.raises((Fails, Interrupted)) as error:
        train_federated(SMALL, MODEL, DATA, taps=[heard, tap], **settings)  # type: ignore[arg-type]
    if how is KeyboardInterrupt:
        assert "rounds are saved in" in str(error.value)
        assert "Run it again with the same settings" in str(error.value)
    assert tap.closed == 0
    tap.at = 0
    model = train_federated(SMALL, MODEL, DATA, taps=[heard, tap], **settings)  # type: ignore[arg-type]
    alone = Listening(Server(), Everything(), knowledge(DATA))
    assert_same(model, train_federated(SMALL, MODEL, DATA, taps=[alone], defense=DEFENSE, seed=5))
    assert all(torch.equal(value, heard.state()[name]) for name, value in alone.state().items())
    assert (len(tap.heard), tap.closed) == (9, 1)


def test_an_interrupt_without_a_directory_says_that_nothing_is_kept() -> None:
    with pytest.raises(Interrupted, match=r"after [12] of 3 rounds; nothing is kept"):  # heard soon after
        train_federated(SMALL, MODEL, DATA, taps=[Saboteur(at=5, how=KeyboardInterrupt)])
    assert not isinstance(Interrupted(), Exception)  # `except Exception` lets it pass, like every Ctrl-C


def start(folder: Path, kind: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(folder), kind, *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not what() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)


@pytest.mark.heavy
def test_a_run_killed_at_random_moments_ends_the_same(tmp_path: Path, whole: tuple[dict[str, Tensor], Path]) -> None:
    expected, folder = whole
    seed = int.from_bytes(os.urandom(4))
    print(f"kills are seeded with {seed}")  # noqa: T201
    moment = random.Random(seed)
    kills = 0
    for kind in ("threads", "workers", "threads", "threads"):
        with start(tmp_path, kind) as process:
            wait_for(lambda: (tmp_path / "run" / ".lock").exists() and _owner(tmp_path) == process.pid, process)
            time.sleep(moment.uniform(0, 0.5 if kind == "threads" else 3.5))
            if process.poll() is None:
                process.kill()
                kills += 1
    assert kills > 2
    ended = run(tmp_path, InProcess(2))
    assert_ended_alike(ended, expected)
    assert contents(tmp_path / "recording") == contents(folder / "recording")


def _owner(folder: Path) -> int:
    words = (folder / "run" / ".lock").read_text().split()
    return int(words[1]) if words else 0


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["threads", "workers"])
def test_ctrl_c_ends_cleanly(tmp_path: Path, kind: str, whole: tuple[dict[str, Tensor], Path]) -> None:
    with start(tmp_path, kind, "4000") as process:
        wait_for((tmp_path / "recording" / "messages" / "00000030.safetensors").exists, process)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it too
        shown = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert time.monotonic() - began < 10
    assert "Traceback" not in shown
    assert "of 4,000 rounds" in shown
    assert "Run it again with the same settings to continue." in shown
    done = train_rounds(tmp_path)
    assert done > 0
    if done <= PROTOCOL.rounds:
        assert_ended_alike(run(tmp_path, InProcess(2)), whole[0])


def train_rounds(folder: Path) -> int:
    return int(read_file(folder / "run" / "checkpoint.safetensors")[1]["round"])


@pytest.mark.heavy
def test_a_killed_parent_takes_its_workers_along(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from recleak.training import executor\n"
        "if __name__ == '__main__':\n"
        "    with executor.Workers(1).open(None) as session:\n"
        "        print(session.pool.submit(os.getpid).result(), flush=True)\n"
        "        time.sleep(60)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    for _ in range(500):
        if not _alive(worker):
            return
        time.sleep(0.02)
    pytest.fail("the worker outlives its parent")


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def test_a_model_notices_that_its_run_went_on(tmp_path: Path) -> None:
    early = train_federated(replace(SMALL, rounds=1), MODEL, DATA, directory=tmp_path)
    early.scores(USERS)
    late = train_federated(SMALL, MODEL, DATA, directory=tmp_path)
    with pytest.raises(CheckpointError, match="gone on in the same directory"):
        early.scores(USERS)
    again = train_federated(SMALL, MODEL, DATA, directory=tmp_path)
    assert torch.equal(again.scores(USERS), late.scores(USERS))


def test_scores_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = train_federated(SMALL, NCF(8, (16,)), DATA)
    users = torch.tensor([5, 3, 39, 3])
    at_once = model.scores(users)
    assert at_once.shape == (4, DATA.n_items)
    assert torch.equal(at_once[1], at_once[3])
    monkeypatch.setattr(federated, "_SCORED", 1)
    torch.testing.assert_close(model.scores(users), at_once)


@pytest.mark.parametrize(
    ("model", "defense"),
    [
        (NCF(8, (16,)), Defense()),
        (LightGCN(4), Defense()),
        (PFedRec(4), Defense()),
        (FeatureGCN(3, 4, (5,)), Defense()),
        (MF(4), ShareLess(("item",))),
    ],
    ids=["perceptron", "graph", "personal items", "features", "kept items"],
)
def test_scores_of_some_items(model: Model, defense: Defense, monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.rand(DATA.n_users, 3, generator=torch.Generator().manual_seed(0))
    protocol = replace(SMALL, rounds=1)
    trained = train_federated(
        protocol, model, DATA, defense=defense, user_features=features if model.needs_user_features else None
    )
    users = torch.tensor([5, 3, 39])
    items = torch.randint(DATA.n_items, (3, 7), generator=torch.Generator().manual_seed(1))
    expected = trained.scores(users).gather(1, items)
    torch.testing.assert_close(trained.scores_of(users, items), expected)
    monkeypatch.setattr(federated, "_SCORED", 1)
    torch.testing.assert_close(trained.scores_of(users, items), expected)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def again(folder: Path, **changes: object) -> None:
    given = {"protocol": SMALL, "model": MODEL, "train": DATA, "directory": folder, **changes}
    train_federated(**given)  # type: ignore[arg-type]


class Module(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(DATA.n_users, 2), nn.Embedding(DATA.n_items, 2)
        with torch.no_grad():
            self.user.weight.fill_(start)
            self.item.weight.fill_(0.5)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        score: Tensor = (self.user(user) * self.item(item)).sum(-1)
        return score


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    again(tmp_path)
    less = DATA.take(np.arange(len(DATA)) > 0)
    changes: dict[str, dict[str, object]] = {
        "model.factors was 4, now 5": {"model": GMF(5)},
        "seed was 0, now 1": {"seed": 1},
        "protocol.local.epochs was 2, now 1": {"protocol": replace(SMALL, local=replace(LOCAL, epochs=1))},
        "protocol.local.optimizer.learning_rates.user was absent, now 0.1": {
            "protocol": replace(SMALL, local=replace(LOCAL, optimizer=Adam(0.05, {"user": 0.1}, keep=True)))
        },
        "defense.class was .*Defense, now .*GaussianNoise": {"defense": GaussianNoise({"item": 0.1})},
        "train was": {"train": less},
        "spare was": {"spare": (less,)},
        "taps was": {"taps": [Wire()]},
        "user_features was None": {"user_features": torch.ones(DATA.n_users, 2)},
    }
    before = contents(tmp_path)
    for message, change in changes.items():
        with pytest.raises(CheckpointError, match=f"something else: .*{message}"):
            again(tmp_path, **change)
    assert contents(tmp_path) == before
    again(tmp_path)


def test_weights_of_a_module_are_part_of_a_run(tmp_path: Path) -> None:
    sgd = replace(SMALL, local=LocalTraining(optimizer=SGD(0.1)))
    again(tmp_path, model=TorchModel(Module(0.25)), protocol=sgd)
    again(tmp_path, model=TorchModel(Module(0.25)), protocol=sgd)
    with pytest.raises(CheckpointError, match=r"model.module.weights.user.weight was"):
        again(tmp_path, model=TorchModel(Module(0.26)), protocol=sgd)
    again(tmp_path / "noise", defense=GaussianNoise({"item": 0.1}))
    with pytest.raises(CheckpointError, match=r"defense.std.item was 0.1, now 0.2"):
        again(tmp_path / "noise", defense=GaussianNoise({"item": 0.2}))


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds other things \(clients\)"):
        again(tmp_path)
    (tmp_path / "run.json").write_text('{"format": "mine"}')
    with pytest.raises(CheckpointError, match="Nothing is overwritten"):
        again(tmp_path)
    assert (tmp_path / "clients" / "mine.txt").read_text() == "mine"


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    again(tmp_path / "run", model=GMF(6))
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    (tmp_path / "run" / "clients" / "user.bin").write_bytes(b"rubbish")
    model = train_federated(SMALL, MODEL, DATA, directory=tmp_path / "run")
    assert_same(model, train_federated(SMALL, MODEL, DATA))


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on "):
        again(tmp_path)
    again(tmp_path)


@pytest.mark.parametrize("workers", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_divergence_is_an_error_and_what_was_saved_stays(tmp_path: Path, workers: bool) -> None:
    executor: Executor = Workers(1) if workers else InProcess(1)
    wild = replace(SMALL, aggregation="sum", local=LocalTraining(optimizer=SGD(1e15)))
    with pytest.raises(DivergedError, match=r"(?s)Round \d: .* clients.*Lower the learning rate .*'sum'"):
        again(tmp_path, protocol=wild, executor=executor)
    assert (tmp_path / "checkpoint.safetensors").exists()
    assert not list(tmp_path.rglob("*.partial"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    again(tmp_path, protocol=replace(SMALL, rounds=1))
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"(?s)cannot be written .*what was saved before is still there"):
            again(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    model = train_federated(SMALL, MODEL, DATA, directory=tmp_path)
    assert_same(model, train_federated(SMALL, MODEL, DATA))


FEATURED = FeatureGCN(n_features=3, factors=4, hidden=(4,))
WRONG: dict[str, tuple[type[Exception], str, dict[str, object]]] = {
    "rounds": (ConfigError, "rounds is -1, expected at least 0", {"protocol": Federated(rounds=-1)}),
    "fraction": (ConfigError, "fraction is 0, expected more than 0", {"protocol": Federated(fraction=0)}),
    "fraction above": (ConfigError, "fraction is 1.5", {"protocol": Federated(fraction=1.5)}),
    "both": (ConfigError, "expected one of them", {"protocol": Federated(fraction=0.5, clients_per_round=3)}),
    "no clients": (ConfigError, "clients_per_round is 0", {"protocol": Federated(clients_per_round=0)}),
    "many clients": (ConfigError, "expected at most 40", {"protocol": Federated(clients_per_round=41)}),
    "dropout": (ConfigError, "dropout is 1, expected", {"protocol": Federated(dropout=1)}),
    "server rate": (ConfigError, "server_learning_rate is 0", {"protocol": Federated(server_learning_rate=0)}),
    "aggregation": (
        NotFoundError,
        "Did you mean 'mean'",
        {"protocol": Federated(aggregation="meann")},  # type: ignore[arg-type]
    ),
    "batch": (ConfigError, "batch_size is 0.*full batch", {"protocol": Federated(local=LocalTraining(batch_size=0))}),
    "rate": (
        NotFoundError,
        "learning rate 'usr'. Did you mean 'user'",
        {"protocol": Federated(local=LocalTraining(optimizer=SGD(0.1, {"usr": 0.1})))},
    ),
    "defense": (NotFoundError, "component 'itm'. Did you mean 'item'", {"defense": ClipByNorm(1.0, ("itm",))}),
    "policy": (NotFoundError, "component 'usr'. Did you mean 'user'", {"defense": ShareLess(("usr",))}),
    "chunk": (ConfigError, "chunk is 0", {"chunk": 0}),
    "threads": (ConfigError, "threads is 0, expected at least 1", {"executor": InProcess(0)}),
    "processes": (ConfigError, "processes is -2, expected", {"executor": Workers(-2)}),
    "no features": (ConfigError, "FeatureGCN needs user features", {"model": FEATURED}),
    "features": (
        ConfigError,
        r"shape \(39, 3\), expected \(40, 3\)",
        {"model": FEATURED, "user_features": torch.ones(39, 3)},
    ),
    "wide features": (
        ConfigError,
        r"shape \(40, 4\), expected \(40, 3\)",
        {"model": FEATURED, "user_features": torch.ones(40, 4)},
    ),
    "nobody": (DataError, "No user has an interaction", {"train": DATA.take(np.zeros(len(DATA), bool))}),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be(case: str, tmp_path: Path) -> None:
    kind, message, changes = WRONG[case]
    with pytest.raises(kind, match=message) as error:
        again(tmp_path, **changes)
    assert isinstance(error.value, RecleakError)


def test_users_without_interactions_are_no_clients() -> None:
    some = DATA.take(DATA.user >= 10)
    wire = Wire()
    model = train_federated(Federated(rounds=1, local=LOCAL), MODEL, some, taps=[wire])
    assert model.clients == (30,)
    assert model.scores(USERS).shape == (40, DATA.n_items)
    with pytest.raises(DataError, match=r"1 clients have no interactions to train on \(first: user 3\)"):
        Examples.of(some).draw(np.array([3]), 0)


def test_a_user_with_every_item_has_no_negatives() -> None:
    rows = [{"user": user, "item": item} for user in range(3) for item in range(4) if user == 1 or item != user]
    with pytest.raises(DataError, match=r"1 users have every item, hence no negative \(first: user 1\)"):
        train_federated(Federated(rounds=1), MODEL, Interactions.build(pl.DataFrame(rows)))


def test_tables_of_another_data_set_are_refused() -> None:
    some = Interactions.build(pl.DataFrame({"user": [0, 1], "item": [0, 1]}))
    with pytest.raises(
        ConfigError, match=r"Got 40 rows of 'user.weight', expected 2: one for each of the data's users"
    ):
        train_federated(SMALL, TorchModel(Module(0.1)), some)


if __name__ == "__main__":
    main()
