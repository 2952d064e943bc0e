"""Flower: the same run as in the simulator, defenses as mods, recordings of any strategy; all in this process.

`tests/test_flower_deployment.py` runs SuperLink and SuperNodes for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.adaptive_noise import BoundedGaussian
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.labels import FakeItems
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share, ShareLess
from recleak.deploy.flower import Cohort, Federation, Recorder, as_mod, client_app
from recleak.deploy.flower_records import DeviceError, RecordError, numpy_of, opened, sealed
from recleak.errors import ConfigError, DataError, NotFoundError
from recleak.models.base import Model
from recleak.models.components import Component
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.protocols.recorded import checked
from recleak.recording import Recorder as Tape
from recleak.recording import read_manifest, replay
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import SGD, Adam
from recleak.wire import Aggregate, Broadcast, Disclosure, Embeddings, Server, Upload
from recleak.wire import Message as WireMessage

USERS = 10


@pytest.fixture(scope="module")
def data() -> Interactions:
    """Ten users, no more."""
    return Synthetic(n_users=USERS, n_items=60, mean_activity=15, min_activity=5, communities=5).generate()


@pytest.fixture(autouse=True)
def _a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes messages is somebody in a run."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """SuperNodes in this process; what they are sent and answer goes through bytes, and their state is their own."""

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]]) -> None:
        self.app = app
        self.contexts = {node: Context(1, node, config, RecordDict(), {}) for node, config in nodes.items()}
        self.replies: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = [self.app(_copied(each), self.contexts[each.metadata.dst_node_id]) for each in messages]
        self.replies += replies
        return iter(replies)


def _copied(message: Message) -> Message:
    """The same message with records of its own."""
    content = RecordDict()
    for name, record in message.content.items():
        content[name] = ArrayRecord(dict(record)) if isinstance(record, ArrayRecord) else ConfigRecord(dict(record))
    return Message(content, message.metadata.dst_node_id, message.metadata.message_type)


def dealt(data: Interactions, shares: list[list[int]]) -> tuple[Callable[[Context], Cohort], dict[int, dict[str, Any]]]:
    """Users behind nodes, and the nodes."""

    def cohort(context: Context) -> Cohort:
        users = [int(each) for each in str(context.node_config["users"]).split(",")]
        return Cohort(data.take(np.isin(data.user, users)))

    return cohort, {1000 + n: {"users": ",".join(map(str, users))} for n, users in enumerate(shares)}


SHARES = [[0], [7], [3, 1, 2], [4, 5, 6, 8, 9]]


def federated(
    model: Model, protocol: Federated, data: Interactions, defense: Defense | None, folder: Path, **settings: Any
) -> tuple[dict[str, Tensor], Grid]:
    """The run through Flower, recorded."""
    cohort, nodes = dealt(data, settings.pop("shares", SHARES))
    grid = Grid(client_app(model, protocol, cohort, defense=defense, seed=settings.pop("seed", 3)), nodes)
    sizes = {"n_users": data.n_users, "n_items": data.n_items}
    federation = Federation(model, protocol, **sizes, defense=defense, seed=3, min_nodes=len(nodes))
    result = Recorder(federation, folder).start(grid, federation.first_arrays(), num_rounds=protocol.rounds)
    return federation.params(result.arrays), grid


def simulated(
    model: Model, protocol: Federated, data: Interactions, defense: Defense | None, folder: Path
) -> FederatedModel:
    tape = Tape(Server(), folder)
    return train_federated(protocol, model, data, defense=defense, seed=3, taps=[tape], show_progress=False)


# --- the same run -----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("model", "local", "aggregation", "defense"),
    [
        (NCF(factors=4, hidden=(8, 4)), LocalTraining(epochs=2, optimizer=Adam(0.01)), "mean", None),
        (NCF(factors=4, hidden=(8, 4)), LocalTraining(resample=True), "touched-mean", ClipByNorm(0.05)),
        (MF(4), LocalTraining(optimizer=SGD(0.1), batch_size=None), "weighted", FakeItems(1.0)),
        (MF(4), LocalTraining(optimizer=Adam(0.01, keep=True)), "mean", Share()),
        (PFedRec(4), LocalTraining(optimizer=SGD(0.1)), "mean", None),
    ],
    ids=["ncf", "touched-mean and clipping", "weighted", "kept moments, shared users", "kept head"],
)
def test_a_run_through_flower_gives_the_parameters_of_the_simulator(
    data: Interactions, tmp_path: Path, model: Model, local: LocalTraining, aggregation: Any, defense: Defense | None
) -> None:
    protocol = Federated(rounds=3, aggregation=aggregation, local=local)
    params, _ = federated(model, protocol, data, defense, tmp_path / "flower")
    other = simulated(model, protocol, data, defense, tmp_path / "simulator")
    assert set(params) == set(other.params)
    for name, value in params.items():
        torch.testing.assert_close(value, other.params[name], rtol=1e-5, atol=1e-6)
        moved = (value - protocol_start(model, data, defense)[name]).abs().max()
        assert moved > 1e-4, name  # or equality would say nothing


def protocol_start(model: Model, data: Interactions, defense: Defense | None) -> dict[str, Tensor]:
    federation = Federation(model, Federated(), n_users=data.n_users, n_items=data.n_items, defense=defense, seed=3)
    return federation.params(federation.first_arrays())


def test_what_is_recorded_is_what_the_simulator_records(data: Interactions, tmp_path: Path) -> None:
    model, protocol = NCF(factors=4, hidden=(8, 4)), Federated(rounds=2, local=LocalTraining(epochs=1))
    federated(model, protocol, data, None, tmp_path / "flower")
    simulated(model, protocol, data, None, tmp_path / "simulator")
    ours, theirs = (list(replay(tmp_path / name)) for name in ("flower", "simulator"))
    assert [type(each) for each in ours] == [type(each) for each in theirs] == [Broadcast, Upload, Aggregate] * 2
    for one, other in zip(ours, theirs, strict=True):
        assert_alike(one, other)
    manifest = read_manifest(tmp_path / "flower")
    assert manifest.complete
    assert manifest.vantage == {"name": "Server"}
    assert [part.name for part in manifest.components] == [part.name for part in model.components()]


def assert_alike(one: WireMessage, other: WireMessage) -> None:
    assert not isinstance(one, Disclosure | Embeddings)
    assert not isinstance(other, Disclosure | Embeddings)
    assert one.round == other.round
    if isinstance(one, Upload) and isinstance(other, Upload):
        assert torch.equal(one.update.client, other.update.client)
        assert torch.equal(one.update.item, other.update.item)
        assert torch.equal(one.update.offset, other.update.offset)
        assert torch.equal(one.weight, other.weight)
        assert_close(one.update.rows, other.update.rows)
        assert_close(one.update.values, other.update.values)
    elif isinstance(one, Broadcast) and isinstance(other, Broadcast):
        assert_close(one.params, other.params)
    else:
        assert isinstance(one, Aggregate)
        assert isinstance(other, Aggregate)
        assert torch.equal(one.client, other.client)
        assert_close(one.total, other.total)
        assert_close(one.touched, other.touched)
        assert one.weight == other.weight


def assert_close(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert set(some) == set(others)
    for name, value in some.items():
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-6)


def test_a_cohort_that_sends_its_sum_is_recorded_as_aggregator(data: Interactions, tmp_path: Path) -> None:
    model, protocol = MF(4), Federated(rounds=2, aggregation="touched-mean")
    shares = [[0, 7], [3, 1, 2], [4, 5, 6, 8, 9]]
    params, grid = federated(model, protocol, data, SecureAggregation(), tmp_path / "flower", shares=shares)
    other = simulated(model, protocol, data, SecureAggregation(), tmp_path / "simulator")
    for name, value in params.items():
        torch.testing.assert_close(value, other.params[name], rtol=1e-5, atol=1e-6)
    assert read_manifest(tmp_path / "flower").vantage == {"name": "Aggregator"}
    sums = [each for each in replay(tmp_path / "flower") if isinstance(each, Aggregate)]
    assert [sorted(each.client.tolist()) for each in sums[:3]] == [sorted(share) for share in shares]
    assert not any(isinstance(each, Upload) for each in replay(tmp_path / "flower"))
    assert not any(isinstance(opened(reply.content), Upload) for reply in grid.replies)


@contextmanager
def failing(caplog: pytest.LogCaptureFixture, kind: type[Exception], words: str) -> Iterator[None]:
    """A client fails with this error: its words are in the log of the device, and not in what Flower would send."""
    caplog.clear()
    with pytest.raises(DeviceError) as raised:
        yield
    assert str(raised.value) == f"{kind.__name__} on the device, whose log says more."
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert words in caplog.text


def test_the_sum_of_one_user_is_refused(data: Interactions, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with failing(caplog, ConfigError, "the sum of one is its upload"):
        federated(MF(4), Federated(rounds=1), data, SecureAggregation(), tmp_path / "flower")


def test_errors_of_a_device_do_not_tell_its_data(data: Interactions, caplog: pytest.LogCaptureFixture) -> None:
    """Flower sends the words of an exception to the server; these here are two items of a user."""

    def cohort(context: Context) -> Cohort:
        return Cohort.of({0: [17, 61]}, data.n_users, 60)

    grid = Grid(client_app(MF(4), Federated(rounds=1), cohort, seed=3), {11: {}})
    federation = Federation(MF(4), Federated(rounds=1), n_users=data.n_users, n_items=data.n_items)
    sent = federation.configure_train(1, federation.first_arrays(), ConfigRecord(), grid)  # type: ignore[arg-type]
    with failing(caplog, ConfigError, "items from 17 to 61"):
        grid.send_and_receive(sent)
    app = ClientApp()

    @app.train(mods=[as_mod(ClipByNorm(1.0), PARTS)])
    def train(message: Message, context: Context) -> Message:
        raise KeyError("item 17")

    with failing(caplog, KeyError, "item 17"):
        sent_by(app)


@pytest.mark.heavy
def test_without_a_seed_a_device_draws_for_itself(data: Interactions, tmp_path: Path) -> None:
    protocol = Federated(rounds=2)
    chain = Chain((ClipByNorm(1.0), GaussianNoise(0.1, rows="all")))
    runs = [federated(MF(4), protocol, data, chain, tmp_path / str(n), seed=None) for n in range(2)]
    first, second = (
        [each.update.rows["item"] for each in replay(tmp_path / str(n)) if isinstance(each, Upload)] for n in range(2)
    )
    difference = torch.cat(first) - torch.cat(second)
    assert 0.12 < float(difference.std()) < 0.17  # two draws of 0.1, and what training adds
    one, other = (grid.contexts[1000].state.config_records["recleak secret"]["seed"] for _, grid in runs)
    assert one != other
    assert all(isinstance(secret, bytes) and len(secret) == 32 for secret in (one, other))
    again, _ = federated(MF(4), protocol, data, chain, tmp_path / "seeded 1")
    same, _ = federated(MF(4), protocol, data, chain, tmp_path / "seeded 2")
    assert all(torch.equal(again[name], same[name]) for name in again)


def test_what_users_keep_stays_in_the_state_of_the_node(data: Interactions, tmp_path: Path) -> None:
    _, grid = federated(MF(4), Federated(rounds=1), data, None, tmp_path / "flower")
    state = grid.contexts[1002].state.array_records["recleak kept"]
    assert numpy_of("client", state["client"]).tolist() == [1, 2, 3]
    assert numpy_of("user", state["values/user"]).shape == (3, 4)
    for reply in grid.replies:
        message = opened(reply.content)
        assert isinstance(message, Upload)
        assert "user" not in message.update.values
        assert not reply.content.metric_records


def test_answers_that_do_not_fit_are_left_out(data: Interactions, caplog: pytest.LogCaptureFixture) -> None:
    protocol = Federated(rounds=1)
    cohort, nodes = dealt(data, [[0], [1], [2]])
    grid = Grid(client_app(MF(4), protocol, cohort, seed=3), nodes)
    federation = Federation(MF(4), protocol, n_users=data.n_users, n_items=data.n_items)
    sent = list(federation.configure_train(1, federation.first_arrays(), ConfigRecord(), grid))  # type: ignore[arg-type]
    replies = list(grid.send_and_receive(sent))
    good = opened(replies[0].content)
    assert isinstance(good, Upload)
    broken: dict[str, WireMessage] = {
        "round 5": replace(good, round=5),
        "again, expected each once": good,  # the client of the first once more
        "not finite": _with_rows(good, 7, lambda rows: rows * float("nan")),
        "of shape": _with_rows(good, 8, lambda rows: rows[:, :2]),
        "expected Upload": Broadcast(0, {}),
    }
    for each in broken.values():
        replies.append(Message(sealed(each), reply_to=sent[1]))
    strange = Message(RecordDict({"x": ArrayRecord([np.zeros(3)])}), reply_to=sent[1])
    arrays, _ = federation.aggregate_train(1, [replies[0], *replies[3:], strange])
    assert arrays is not None
    for words in (*broken, "expected an upload of recleak's ClientApp"):
        assert words in caplog.text, words
    alone = Federation(MF(4), protocol, n_users=data.n_users, n_items=data.n_items)
    list(alone.configure_train(1, alone.first_arrays(), ConfigRecord(), grid))  # type: ignore[arg-type]
    only, _ = alone.aggregate_train(1, [replies[0]])
    assert only is not None
    assert all(torch.equal(federation.params(arrays)[name], value) for name, value in alone.params(only).items())


def _with_rows(upload: Upload, client: int, change: Callable[[Tensor], Tensor]) -> Upload:
    rows = {name: change(value) if value.dim() > 1 else value for name, value in upload.update.rows.items()}
    return replace(upload, update=replace(upload.update, rows=rows, client=torch.tensor([client])))


def test_what_a_federation_of_flower_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="real clients drop out by themselves"):
        client_app(MF(4), Federated(dropout=0.1), lambda _: Cohort.of({0: [1]}, 1, 3))
    with pytest.raises(ConfigError, match=r"items from 1 to 3, expected numbers in \[0, 3\)"):
        Cohort.of({0: [1, 3]}, 1, 3)
    with pytest.raises(ConfigError, match="no interaction"):
        Cohort.of({}, 1, 3)


# --- any client -------------------------------------------------------------------------------------------------------

PARTS: dict[str, Component | None] = {
    "items.weight": Component("item", "per_item", "item", (2,)),
    "items.bias": Component("item.bias", "per_item", "item", ()),
    "head.weight": Component("head", "dense", "head", (2, 3)),
    "bias": Component("bias", "dense", "head", ()),  # without an axis
    "steps": None,
}
MOVES: dict[str, Any] = {
    "items.weight": np.array([[0, 0], [3, 4], [0, 0], [0, 0], [0, 1]], np.float32),
    "items.bias": np.array([0, 0, 2, 0, 0], np.float32),
    "head.weight": np.ones((2, 3), np.float32),
    "bias": np.float32(2.0),
    "steps": np.int64(5),
}
START = {name: np.asarray(value) * 0 + 1 for name, value in MOVES.items()}


def record(arrays: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def plain_app(mods: list[Any], moves: dict[str, Any] = MOVES, dtype: Any = None) -> ClientApp:
    """A client of somebody else: it adds `moves` to what it gets."""
    app = ClientApp()

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        got = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        made = {name: np.asarray(got[name] + moves[name]).astype(dtype or got[name].dtype) for name in moves}
        metrics = MetricRecord({"num-examples": 7})
        return Message(RecordDict({"arrays": record(made), "metrics": metrics}), reply_to=message)

    return app


def replying(arrays: dict[str, Any], weight: float) -> ClientApp:
    """A client that answers the same whatever it gets; bytes are an array as they are."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": weight})
        raw = {n: Array("float32", (), "numpy.ndarray", value) for n, value in arrays.items() if type(value) is bytes}
        made = record({name: value for name, value in arrays.items() if name not in raw})
        content = RecordDict({"arrays": ArrayRecord({**made, **raw}), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def asked(start: dict[str, Any] = START, round: int = 1) -> Message:
    content = RecordDict({"arrays": record(start), "config": ConfigRecord({"server-round": round})})
    return Message(content, 5, MessageType.TRAIN)


def sent_by(app: ClientApp, message: Message | None = None, context: Context | None = None) -> dict[str, Any]:
    reply = app(message or asked(), context or Context(1, 5, {}, RecordDict(), {}))
    return {name: array.numpy() for name, array in reply.content.array_records["arrays"].items()}


def moved(sent: dict[str, Any]) -> dict[str, Any]:
    return {name: sent[name] - START[name] for name in sent}


def test_a_mod_clips_all_parameters_also_those_without_an_axis() -> None:
    found = moved(sent_by(plain_app([as_mod(ClipByNorm(1.0), PARTS)])))
    parts = [np.ravel(found[name]).astype(np.float64) for name in MOVES if name != "steps"]
    assert 0.999 < np.sqrt(sum(np.square(each).sum() for each in parts)) <= 1.0
    assert found["bias"] == pytest.approx(2 / np.sqrt(9 + 16 + 1 + 4 + 6 + 4), rel=1e-5)
    assert found["steps"] == 0  # mapped to None: it never leaves
    np.testing.assert_allclose(found["items.weight"][0], 0)


def test_a_mod_takes_an_update_of_zeros() -> None:
    nothing = {name: np.zeros_like(value) for name, value in MOVES.items()}
    chain = Chain((ClipByNorm(1.0), GaussianNoise(0.5, rows="all")))
    found = moved(sent_by(plain_app([as_mod(ClipByNorm(1.0), PARTS)], nothing)))
    assert all(not np.any(value) for value in found.values())
    noisy = moved(sent_by(plain_app([as_mod(chain, PARTS)], nothing)))
    assert all(np.all(noisy[name] != 0) for name in MOVES if name != "steps")
    touched = moved(sent_by(plain_app([as_mod(GaussianNoise(0.5), PARTS)], nothing)))
    assert not np.any(touched["items.weight"])  # no row was touched
    assert touched["bias"] != 0


def test_the_noise_of_a_mod_is_the_mechanism_s_and_never_the_same() -> None:
    wide = {"w": np.zeros(4000, np.float32)}
    parts = {"w": Component("w", "dense", "head", (4000,))}
    app = plain_app([as_mod(GaussianNoise({"w": 0.3}), parts)], wide)
    first, second = (sent_by(app, asked(wide))["w"] for _ in range(2))
    assert 0.28 < first.std() < 0.32
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def test_a_mod_runs_the_epoch_hook_and_keeps_the_type_of_numbers() -> None:
    start = {name: value.astype(np.float64) if name != "steps" else value for name, value in START.items()}
    app = plain_app([as_mod(BoundedGaussian(std=0.0, bound=2.0), PARTS)], MOVES)
    found = sent_by(app, asked(start))
    assert found["head.weight"].dtype == np.float64
    np.testing.assert_allclose(found["items.weight"][1], 2.0)  # values are clipped by this mechanism, not changes


def test_what_a_mod_keeps_stays_on_the_device() -> None:
    app = plain_app([as_mod(ShareLess(("head",)), PARTS)])
    context = Context(1, 5, {}, RecordDict(), {})
    first = sent_by(app, asked(), context)
    np.testing.assert_array_equal(first["head.weight"], START["head.weight"])
    assert first["bias"] == 3.0
    message = asked(round=2)
    shared = message.content
    second = sent_by(app, message, context)
    np.testing.assert_array_equal(second["head.weight"], START["head.weight"])
    own = context.state.array_records["recleak mod"]["head.weight"].numpy()
    np.testing.assert_array_equal(own, np.full((2, 3), 3.0))  # twice one further than 1
    np.testing.assert_array_equal(shared.array_records["arrays"]["head.weight"].numpy(), START["head.weight"])


def test_what_a_mod_cannot_do_is_an_error_and_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="which a mod does not see"):
        as_mod(DPSGD(1.0, 1.0), PARTS)
    with pytest.raises(ConfigError, match="acts on data"):
        as_mod(Chain((ClipByNorm(1.0), FakeItems(1.0))), PARTS)
    with pytest.raises(ConfigError, match="needs other clients"):
        as_mod(SecureAggregation(), PARTS)
    with pytest.raises(NotFoundError, match=r"Unknown component 'items\.weight'"):
        as_mod(GaussianNoise({"items.weight": 1.0}), PARTS)  # it is called `item`
    forgotten = {name: part for name, part in PARTS.items() if name != "bias"}
    with failing(caplog, RecordError, "'bias', which is not mapped"):
        sent_by(plain_app([as_mod(ClipByNorm(1.0), forgotten)]))
    with failing(caplog, RecordError, "real numbers"):
        sent_by(plain_app([as_mod(ClipByNorm(1.0), {**PARTS, "steps": Component("s", "dense", "head", ())})]))
    wrong = {**PARTS, "head.weight": Component("head", "dense", "head", (3, 2))}
    with failing(caplog, RecordError, "shape [2, 3]"):
        sent_by(plain_app([as_mod(ClipByNorm(1.0), wrong)]))
    app = ClientApp()

    @app.query(mods=[as_mod(ClipByNorm(1.0), PARTS)])
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": record(START)}), reply_to=message)

    with failing(caplog, ConfigError, "nothing protects them"):
        app(Message(RecordDict(), 5, MessageType.QUERY), Context(1, 5, {}, RecordDict(), {}))


def test_arrays_that_lie_about_their_size_are_refused() -> None:
    honest = Array(np.zeros((2, 2), np.float32))
    huge = honest.data.replace(b"(2, 2)", b"(2**9)") if b"(2, 2)" in honest.data else b""
    for data in (
        honest.data[:-1],
        honest.data.replace(b"'shape': (2, 2)", b"'shape': (9, 9)"),
        b"",
        huge,
        b"\x93NUMPY",
    ):
        with pytest.raises(RecordError, match="cannot be read"):
            numpy_of("x", Array("float32", (2, 2), "numpy.ndarray", data))
    with pytest.raises(RecordError, match="pickle"):
        numpy_of("x", Array("object", (1,), "pickle", b"x"))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f8", np.int64, np.uint8])
def test_arrays_are_read_as_numpy_writes_them(dtype: Any) -> None:
    every = np.arange(6).astype(dtype)
    for values in (every, every.reshape(2, 3), np.asfortranarray(every.reshape(2, 3)), every[:0], np.asarray(every[3])):
        found = numpy_of("x", Array(values))
        np.testing.assert_array_equal(found, values)
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
    file = BytesIO()
    np.lib.format.write_array(file, every, version=(2, 0))
    np.testing.assert_array_equal(numpy_of("x", Array("", (6,), "numpy.ndarray", file.getvalue())), every)


def test_any_strategy_is_recorded(tmp_path: Path) -> None:
    grid = Grid(plain_app([]), {11: {}, 12: {}})
    recorder = Recorder(FedAvg(fraction_evaluate=0.0), tmp_path / "seen", parts=PARTS, source="a test")
    result = recorder.start(grid, record(START), num_rounds=2)
    np.testing.assert_allclose(result.arrays["bias"].numpy(), 5.0)
    messages = list(replay(tmp_path / "seen"))
    assert [type(each) for each in messages] == [Broadcast, Upload, Aggregate] * 2
    broadcast, upload, total = messages[:3]
    assert isinstance(broadcast, Broadcast)
    assert isinstance(upload, Upload)
    assert isinstance(total, Aggregate)
    assert set(broadcast.params) == {"item", "item.bias", "head", "bias"}
    assert upload.update.client.tolist() == [0, 1]
    assert upload.update.item.tolist() == [1, 2, 4] * 2  # the rows that moved in any table
    assert upload.update.values["bias"].tolist() == [2.0, 2.0]
    assert upload.weight.tolist() == [7.0, 7.0]
    np.testing.assert_allclose(total.total["bias"], 28.0)
    assert (tmp_path / "seen" / "clients.csv").read_text() == "client,node\n0,11\n1,12\n"
    assert read_manifest(tmp_path / "seen").source == "a test"
    assert isinstance(messages[3], Broadcast)
    assert messages[3].params["bias"] == 3.0


def test_replies_that_cannot_be_read_are_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Kind(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
            assert len(list(replies)) == 2  # the strategy gets all of them, also if it reads them twice
            return None, None

    longer = np.ones((7, 2), np.float32), np.ones(7, np.float32)
    wrong: dict[str, tuple[dict[str, Any], float]] = {
        "not finite": ({"bias": np.float32("nan")}, 7),
        "shape [7, 2], expected [5, 2]": ({"items.weight": longer[0], "items.bias": longer[1]}, 7),
        "num-examples = -1": ({}, -1),
        "num-examples = 1e+39": ({}, 1e39),
        "num-examples = 1e+308": ({}, 1e308),
        "num-examples = inf": ({}, float("inf")),
        "num-examples = nan": ({}, float("nan")),
        "'head' with numbers that are not finite": ({"head.weight": np.full((2, 3), 1e300)}, 7),
        "'bias times its weight' with numbers that are not finite": ({"bias": np.float32(1e38)}, 7),
    }
    for number, (words, (other, weight)) in enumerate(wrong.items()):
        folder, app = tmp_path / str(number), replying({**START, **other}, weight)
        recorder = Recorder(Kind(fraction_evaluate=0.0), folder, parts=PARTS, client=lambda _: 4)
        recorder.start(Grid(app, {11: {}, 12: {}}), record(START), num_rounds=1)
        assert [type(each) for each in replay(folder)] == [Broadcast]
        assert "is not recorded" in caplog.text
        assert words in caplog.text, words


def npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


HOSTILE = {
    "a number too large": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1e999, ), }\n"),
    "no end": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (((("),
    "a string without an end": npy(b'{"descr": """'),
    "more than there is": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999999999,), }\n"),
    "a number too long": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 99 + b",), }\n"),
    "a shape that takes forever": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1" * 60 + b"x), }\n"),
    "spaces that take forever": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1 " * 60 + b"x), }\n"),
    "objects": npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", b"x" * 8),
    "nested": npy(b"{'descr': " + b"[" * 9000 + b"\n"),
    "no bytes": b"",
    "cut within its shape": b"\x93NUMPY\x01\x00\x80\x00{'descr': '<f4', 'fortran_order': False, 'shape': ("
    + b"111111111111111111, " * 9
    + b"), }\n",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_arrays_of_one_client_do_not_end_a_recorded_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    class Kind(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
            return None, None

    bad, good = replying({**START, "bias": data}, 7), plain_app([])

    def app(message: Message, context: Context) -> Message:
        return (bad if context.node_id == 11 else good)(message, context)

    recorder = Recorder(Kind(fraction_evaluate=0.0), tmp_path / "seen", parts=PARTS)
    recorder.start(Grid(app, {11: {}, 12: {}}), record(START), num_rounds=2)  # type: ignore[arg-type]
    assert "the answer of node 11 is not recorded. Got an array 'bias' that cannot be read" in caplog.text
    uploads = [each for each in checked(tmp_path / "seen") if isinstance(each, Upload)]
    assert [each.update.n_clients for each in uploads] == [1, 1]


def test_what_is_recorded_can_be_audited_whatever_clients_send(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A change or a sum that is not finite although what was sent is; a weight of nothing; a client without number."""

    class Kind(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
            return None, None

    def recorded(name: str, weight: float, start: dict[str, Any], **other: Any) -> list[type]:
        app = replying({**START, **other.pop("sent", {})}, weight)
        recorder = Recorder(Kind(fraction_evaluate=0.0), tmp_path / name, parts=PARTS, **other)
        recorder.start(Grid(app, {11: {}, 12: {}}), record({**START, **start}), num_rounds=1)
        return [type(each) for each in checked(tmp_path / name)]

    far = np.float32(3e38)
    assert recorded("change", 1, {"bias": -far}, sent={"bias": far}) == [Broadcast]
    assert "'bias' with numbers that are not finite" in caplog.text
    assert recorded("sum", 1, {}, sent={"bias": far}) == [Broadcast, Upload]
    assert "the sum is not recorded" in caplog.text
    assert recorded("nothing", 0, {}) == [Broadcast, Upload]
    assert recorded("diverged", 1, {"bias": np.float32("nan")}) == []
    assert "Round 1: the parameters are not finite" in caplog.text

    def nobody(reply: Message) -> int:
        return int(reply.content.config_records["who"]["number"])  # type: ignore[arg-type]

    assert recorded("nobody", 1, {}, client=nobody) == [Broadcast]
    assert "KeyError" in caplog.text
    assert recorded("far away", 1, {}, client=lambda _: 10**12) == [Broadcast]
    assert "expected a number in [0, 10000000)" in caplog.text


def test_a_server_that_is_started_again_erases_nothing(tmp_path: Path) -> None:
    def recorder() -> Recorder:
        return Recorder(FedAvg(fraction_evaluate=0.0), tmp_path / "seen", parts=PARTS)

    grid: Any = Grid(plain_app([]), {11: {}, 12: {}})
    first = recorder()
    first.aggregate_train(1, grid.send_and_receive(first.configure_train(1, record(START), ConfigRecord(), grid)))
    before = list(replay(tmp_path / "seen"))
    with pytest.raises(DataError, match=r"(?s)unfinished recording already, with 3 messages.*another folder"):
        recorder().start(grid, record(START), num_rounds=1)
    assert [type(each) for each in replay(tmp_path / "seen")] == [type(each) for each in before]


def test_a_recorder_that_would_be_gone_around_is_refused(tmp_path: Path) -> None:
    class Own(FedAvg):
        def start(self, *arguments: Any, **named: Any) -> Any:
            return None

    with pytest.raises(ConfigError, match="go around"):
        Recorder(Own(), tmp_path, parts=PARTS)
    with pytest.raises(ConfigError, match="without `parts`"):
        Recorder(FedAvg(), tmp_path)
    with pytest.raises(ConfigError, match="table of users"):
        Recorder(FedAvg(), tmp_path, parts={"u": Component("u", "per_user", "user", (2,))})
    assert issubclass(Recorder, Strategy)
