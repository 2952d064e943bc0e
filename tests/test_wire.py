"""The wire: messages keep their meaning in bytes, nothing odd is accepted, a vantage point lets nothing else pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from torch import Tensor

from recleak import wire
from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.recording import Listening
from recleak.testing import AttackContract, Case, planted_items, unrelated_items
from recleak.testing.attacks import DotProduct, auc, chance_width, one_by_one
from recleak.update import Update
from recleak.wire import (
    Aggregate,
    Aggregator,
    Audience,
    Broadcast,
    Disclosure,
    Embeddings,
    Holder,
    Message,
    MessageError,
    Peers,
    Push,
    Recommendations,
    Server,
    ServerMessage,
    Upload,
    copied,
    decode,
    encode,
)


@dataclass(frozen=True)
class MovedRows:
    """Whose row moves is whose item: the norm of a row's change, summed over rounds."""

    table: str = "item"
    vantage: ClassVar[type[Server]] = Server

    def init(self, knowledge: Knowledge) -> State:
        return {"score": torch.zeros(knowledge.n_users, knowledge.n_items)}  # f32[U, I]

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        if not isinstance(message, Upload):
            return state
        update = message.update
        moved = update.rows[self.table].flatten(1).norm(dim=1)  # f32[N]
        place = (update.client[update.owner], update.item)
        return {"score": state["score"].index_put(place, moved, accumulate=True)}

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return state["score"][question.client, question.item]


class TestMovedRows(AttackContract):
    attack = MovedRows()


# --- the contract notices ---------------------------------------------------------------------------------------------


class InPlace(MovedRows):
    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        state["score"].copy_(super().fold(knowledge, state, message)["score"])
        return state


class Guess(MovedRows):
    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return (question.item * 7 % 13).float()


class CountsMessages(MovedRows):
    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        after = super().fold(knowledge, state, message)
        return {"score": after["score"] * 1.1}


class KeepsAside(MovedRows):
    seen: ClassVar[list[int]] = []

    def init(self, knowledge: Knowledge) -> State:
        self.seen.clear()
        return super().init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        self.seen.append(1)
        return {"score": super().fold(knowledge, state, message)["score"] * len(self.seen)}


class HasTheTruth(MovedRows):
    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return unrelated_items().truth.float()


class ByIdentity(MovedRows):
    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """Numbers depend on whether tensors are views of something else: on live references, in other words."""
        if isinstance(message, Upload) and message.update.client.storage_offset():
            return {"score": state["score"] + 1}
        return super().fold(knowledge, state, message)


class ReadsLabels(MovedRows):
    def init(self, knowledge: Knowledge) -> State:
        return {**super().init(knowledge), "known": torch.tensor(len(knowledge.public))}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        return {**state, **super().fold(knowledge, state, message)}

    def listener(self) -> ReadsLabels:
        return self


@pytest.mark.parametrize(
    ("attack", "test"),
    [
        (Guess(), "test_a_planted_leak_is_found"),
        (HasTheTruth(), "test_nothing_is_found_where_nothing_is"),
        (InPlace(), "test_the_fold_is_pure"),
        (KeepsAside(), "test_the_fold_is_pure"),
        (KeepsAside(), "test_a_saved_state_makes_no_difference"),
        (ByIdentity(), "test_bytes_make_no_difference"),
        (CountsMessages(), "test_the_grouping_makes_no_difference"),
        (ReadsLabels(), "test_another_can_listen_for_it"),
    ],
)
def test_the_contract_refuses(attack: MovedRows, test: str) -> None:
    class Contract(AttackContract):
        def planted(self) -> Case:
            case = planted_items()
            return replace(case, messages=[_viewed(message) for message in case.messages])

    Contract.attack = attack
    with pytest.raises(AssertionError):
        getattr(Contract(), test)()


def _viewed(message: Message) -> Message:
    if not isinstance(message, Upload):
        return message
    client = torch.cat([torch.zeros(1, dtype=torch.int64), message.update.client])[1:]
    return replace(message, update=replace(message.update, client=client))


def test_auc_and_its_width_by_simulation() -> None:
    truth = torch.tensor([True, False, True, False])
    assert auc(torch.tensor([4.0, 2.0, 3.0, 1.0]), truth) == 1
    assert auc(torch.tensor([1.0, 1.0, 1.0, 1.0]), truth) == 0.5
    assert auc(torch.tensor([2.0, 2.0, 1.0, 3.0]), truth) == 0.125
    labels = torch.arange(200) < 50
    generator = torch.Generator().manual_seed(1)
    drawn = torch.tensor([auc(torch.rand(200, generator=generator), labels) for _ in range(2000)])
    assert float(drawn.std()) == pytest.approx(chance_width(labels, deviations=1), rel=0.06)


def test_the_dot_product() -> None:
    params = {"user": torch.ones(2, 4), "item": torch.ones(2, 3, 4), "bias": torch.tensor([0.0, 1.0])}
    logits = DotProduct().logits(params, None)  # type: ignore[arg-type]  # it reads no batch
    assert logits.tolist() == [[4, 4, 4], [5, 5, 5]]


# --- messages of all kinds --------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["a.b", "a/b", "/", "", "__metadata__", "item", "values/x", "é", "a\nb"]
)
rounds = st.integers(0, 2**63 - 1)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def floats(*lead: int, shape: tuple[int, ...] = ()) -> st.SearchStrategy[Tensor]:
    """f32[*lead, *shape]: any bits, so NaN of all kinds and infinities too."""
    size = int(np.prod([*lead, *shape], dtype=np.int64))
    return st.binary(min_size=4 * size, max_size=4 * size).map(
        lambda data: torch.from_numpy(np.frombuffer(data, np.float32).reshape((*lead, *shape)).copy())
    )


@st.composite
def tables(draw: st.DrawFn, *lead: int) -> dict[str, Tensor]:
    """Named tensors f32[*lead, *]; with a leading axis alone, a 0-d parameter."""
    return {name: draw(floats(*lead, shape=draw(shapes))) for name in draw(st.lists(names, max_size=3, unique=True))}


def ids(n: int) -> st.SearchStrategy[Tensor]:
    """i64[n] from 0."""
    return st.lists(st.integers(0, 2**62), min_size=n, max_size=n).map(lambda x: torch.tensor(x, dtype=torch.int64))


def distinct(n: int) -> st.SearchStrategy[Tensor]:
    """i64[n], ascending."""
    chosen = st.lists(st.integers(0, 2**62), min_size=n, max_size=n, unique=True)
    return chosen.map(lambda x: torch.tensor(sorted(x), dtype=torch.int64))


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """Zero clients, clients without rows and tables without items among them."""
    clients, n_items = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    held = [sorted(draw(st.sets(st.integers(0, n_items - 1)))) if n_items else [] for _ in range(clients)]
    item = torch.tensor([item for mine in held for item in mine], dtype=torch.int64)
    offset = torch.tensor([0, *np.cumsum([len(mine) for mine in held], dtype=np.int64)], dtype=torch.int64)
    values, rows = draw(tables(clients)), draw(tables(len(item)))
    return Update(draw(distinct(clients)), values, rows, item, offset, n_items)


@st.composite
def uploads(draw: st.DrawFn) -> Upload:
    update = draw(updates())
    return Upload(draw(rounds), update, draw(floats(update.n_clients)))


@st.composite
def aggregates(draw: st.DrawFn) -> Aggregate:
    n_items = draw(st.integers(0, 4))
    per_item, other = draw(tables(n_items)), draw(tables())
    touched = {name: draw(floats(n_items)) for name in per_item if draw(st.booleans())}
    weight = draw(st.floats(allow_nan=False, allow_infinity=False))
    return Aggregate(draw(rounds), draw(distinct(draw(st.integers(0, 4)))), other | per_item, touched, weight)


@st.composite
def pushes(draw: st.DrawFn) -> Push:
    n = draw(st.integers(0, 4))
    model = draw(st.sampled_from([torch.arange(n), torch.zeros(n, dtype=torch.int64)]))
    params = draw(tables(len(model.unique())))  # type: ignore[no-untyped-call]
    return Push(draw(rounds), draw(ids(n)), draw(ids(n)), params, model)


@st.composite
def lists(draw: st.DrawFn) -> Recommendations:
    users, places = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    rows = [draw(st.lists(st.integers(0, 2**62), max_size=places)) for _ in range(users)]
    item = [row + [-1] * (places - len(row)) for row in rows]
    return Recommendations(draw(rounds), draw(ids(users)), torch.tensor(item, dtype=torch.int64).reshape(users, places))


@st.composite
def disclosures(draw: st.DrawFn) -> Disclosure:
    n = draw(st.integers(0, 4))
    labels = {name: draw(ids(n)) for name in draw(st.lists(names, max_size=2, unique=True))}
    return Disclosure(draw(distinct(n)), draw(tables(n)), labels)


@st.composite
def embeddings(draw: st.DrawFn) -> Embeddings:
    users, items, width = (draw(st.integers(0, 4)) for _ in range(3))
    vectors = [draw(floats(n * width)).reshape(n, width) for n in (users, items)]
    return Embeddings(draw(distinct(users)), vectors[0], draw(distinct(items)), vectors[1])


broadcasts = st.builds(Broadcast, rounds, tables())
messages: st.SearchStrategy[Message] = st.one_of(
    broadcasts, uploads(), aggregates(), pushes(), lists(), disclosures(), embeddings()
)


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, the order of dictionaries and the signs of NaNs too."""
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, int | float):
        return type(one) is type(other) and one == other
    return type(one) is type(other) and all(
        same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
    )


@given(messages)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    assert same(decode(data), message)
    assert encode(decode(data)) == data
    assert same(copied(message), message)


@given(messages, st.data())
def test_damaged_bytes_are_a_clear_error_or_a_sound_message(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(damaged))


@given(messages, st.data())
def test_truncated_bytes_are_a_clear_error(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(MessageError, match="not safetensors"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_clear_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.text(max_size=30) | json_values.map(json.dumps))
def test_any_metadata_is_a_clear_error(text: str) -> None:
    with pytest.raises(MessageError):
        decode(save({"client": np.zeros(1, np.int64)}, {"recleak": text}))


@given(messages, messages, st.data())
@settings(max_examples=200)
def test_sound_safetensors_that_do_not_fit_are_a_clear_error(one: Message, other: Message, data: st.DataObject) -> None:
    """The header of one message with tensors of two, whose types and shapes may be others."""
    tensors = {key: value.numpy() for key, value in (wire._flatten(one).tensors | wire._flatten(other).tensors).items()}
    header = json.loads(_metadata(encode(one)))
    for key in list(tensors):
        change = data.draw(st.sampled_from(["keep", "keep", "drop", "type", "flat", "negative"]))
        if change == "drop":
            del tensors[key]
        elif change == "type":
            tensors[key] = np.zeros(tensors[key].shape, data.draw(st.sampled_from([np.float64, np.int32, bool])))
        elif change == "flat":
            tensors[key] = tensors[key].reshape(-1)
        elif change == "negative" and tensors[key].dtype == np.int64:
            tensors[key] = -tensors[key] - data.draw(st.sampled_from([0, 1, 2**62]))
    if data.draw(st.booleans()):
        header["tensors"] = list(tensors)
    _decode_or_refuse(save(tensors, {"recleak": json.dumps(header)}))


def _decode_or_refuse(data: bytes) -> None:
    try:
        message = decode(data)
    except MessageError:
        return
    assert same(decode(encode(message)), message)
    assert same(copied(message), message)


def _metadata(data: bytes) -> str:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return str(header["__metadata__"]["recleak"])


# --- what is refused --------------------------------------------------------------------------------------------------


def _upload(**changes: Any) -> Upload:
    values, rows = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, {"item": torch.zeros(3, 4)}
    offset = torch.tensor([0, 1, 3])
    update = Update(torch.tensor([3, 5]), values, rows, torch.tensor([4, 0, 7]), offset, 8)
    own = {key: value for key, value in changes.items() if key in ("round", "weight")}
    inner = {key: value for key, value in changes.items() if key not in own}
    return replace(Upload(0, replace(update, **inner), torch.ones(2)), **own)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client": torch.tensor([5, 3])}, "ascending clients"),
        ({"client": torch.tensor([3, 3])}, "ascending clients"),
        ({"client": torch.tensor([-3, 3])}, "negative client"),
        ({"client": torch.tensor([3.0, 5.0])}, r"'client' f32\[2\], expected i64\[C\]"),
        ({"client": torch.tensor(3)}, r"'client' i64\[\], expected i64\[C\]"),
        ({"client": torch.tensor([3])}, r"'offset' i64\[3\], expected i64\[C \+ 1\] with C = 1"),
        ({"offset": torch.tensor([1, 1, 3])}, "offset from 0 to 3"),
        ({"offset": torch.tensor([0, 1, 2])}, "offset from 0 to 3"),
        ({"offset": torch.tensor([0, 5, 3])}, "offset that goes down"),
        ({"offset": torch.tensor([0, 2**63 - 1, 3])}, "offset that goes down"),
        ({"offset": torch.tensor([0, -(2**63), 3])}, "offset that goes down"),
        ({"item": torch.tensor([4, 0, 8])}, r"items in \[0, 8\)"),
        ({"item": torch.tensor([-1, 0, 7])}, r"items in \[0, 8\)"),
        ({"item": torch.tensor([4, 7, 0])}, "ascending items"),
        ({"item": torch.tensor([4, 7, 7])}, "ascending items"),
        ({"item": torch.tensor([4, 7])}, r"'rows/item' f32\[3, 4\], expected f32\[N, \*\] with N = 2"),
        ({"n_items": -1}, "n_items=-1"),
        ({"n_items": 2**63}, "whole number"),
        ({"round": -1}, "round=-1"),
        ({"round": True}, "round=True"),
        ({"round": 1.5}, "round=1.5"),
        ({"weight": torch.ones(3)}, r"'weight' f32\[3\], expected f32\[C\] with C = 2"),
        ({"weight": torch.ones(2, 1)}, "weight"),
        ({"weight": torch.ones(2).double()}, r"torch.float64\[2\]"),
        ({"values": {"w": torch.zeros(3, 3)}}, r"'values/w' f32\[3, 3\]"),
        ({"values": {"w": torch.zeros(())}}, r"'values/w' f32\[\]"),
        ({"values": {"\ud800": torch.zeros(2)}}, "cannot be written"),
    ],
)
def test_an_upload_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    encode(_upload())
    with pytest.raises(MessageError, match=words):
        encode(_upload(**change))


one, first = torch.tensor([1]), torch.tensor([0])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Broadcast(0, {"a": torch.zeros(2, dtype=torch.float16)}), r"params/a"),
        (Aggregate(0, one, {}, {}, float("nan")), "finite"),
        (Aggregate(0, one, {}, {}, float("inf")), "finite"),
        (Aggregate(0, torch.tensor([1, 1]), {}, {}, 1.0), "client twice"),
        (Aggregate(0, one, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2)}, 1.0), "each row of a component"),
        (Aggregate(0, one, {"a": torch.zeros(())}, {"a": torch.zeros(2)}, 1.0), "each row of a component"),
        (Aggregate(0, one, {}, {"a": torch.zeros(2)}, 1.0), "missing"),
        (Push(0, one, torch.tensor([1, 2]), {}, first), "receiver"),
        (Push(0, one, -one, {}, first), "negative receiver"),
        (Push(0, one, one, {"a": torch.zeros(2, 2)}, first), "each of them carried by a push"),
        (Push(0, one, one, {"a": torch.zeros(1, 2), "b": torch.zeros(2)}, first), r"params/b"),
        (Push(0, one, one, {"a": torch.zeros(1, 2)}, torch.tensor([1])), "each of them carried by a push"),
        (Recommendations(0, one, torch.tensor([[-1, 3]])), "-1 at the end only"),
        (Recommendations(0, one, torch.tensor([[3, -2]])), "below -1"),
        (Recommendations(0, one, torch.tensor([3])), r"'item' i64\[1\], expected i64\[B, K\] with B = 1"),
        (Embeddings(torch.tensor([1, 1]), torch.zeros(2, 3), first, torch.zeros(1, 3)), "same user twice"),
        (Embeddings(one, torch.zeros(1, 3), torch.tensor([2, 2]), torch.zeros(2, 3)), "same item twice"),
        (Embeddings(one, torch.zeros(1, 3), -one, torch.zeros(1, 3)), "negative item"),
        (Embeddings(one, torch.zeros(1, 3), first, torch.zeros(1, 2)), r"'item_vector' f32\[1, 2\].*d = 3"),
        (Disclosure(torch.tensor([1, 1]), {}, {}), "client twice"),
        (Disclosure(one, {}, {"age": torch.zeros(1)}), r"'labels/age' f32\[1\], expected i64\[C\]"),
    ],
)
def test_other_messages_that_do_not_fit_are_refused(message: Message, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        encode(message)


def _with(**changes: Any) -> bytes:
    """The bytes of a push with another header."""
    header = {"version": 1, "kind": "push", "numbers": {"round": 0}, "tensors": ["sender", "receiver", "model"]}
    arrays = {name: np.zeros(1, np.int64) for name in ("sender", "receiver", "model")}
    return save(arrays, {"recleak": json.dumps(header | changes)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2, expected 1"),
        ({"version": "1"}, "version '1', expected 1"),
        ({"version": True}, "version"),
        ({"kind": "pull"}, "'broadcast', 'upload', 'aggregate', 'push'"),
        ({"kind": "upload"}, "numbers round, expected round, n_items"),
        ({"kind": "disclosure", "numbers": {}}, "'sender', expected only client, values/, labels/"),
        ({"numbers": {}}, "numbers none, expected round"),
        ({"numbers": {"round": 0, "more": 1}}, "numbers round, more"),
        ({"numbers": {"round": "0"}}, "does not fit"),
        ({"numbers": {"round": 0.0}}, "whole number"),
        ({"numbers": {"round": 10**400}}, "whole number"),
        ({"numbers": {"round": float("nan")}}, "expected a JSON object"),
        ({"tensors": ["sender"]}, "tensors .*, expected those it names: sender"),
        ({"tensors": ["sender", "receiver", "model", "receiver"]}, "tensors"),
        ({"tensors": "sender"}, "does not fit"),
        ({"code": "import os"}, "does not fit"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    assert isinstance(decode(_with()), Push)
    with pytest.raises(MessageError, match=words):
        decode(_with(**change))


def test_safetensors_of_somebody_else_are_refused() -> None:
    for metadata in (None, {}, {"format": "pt"}):
        with pytest.raises(MessageError, match="without the metadata"):
            decode(save({"a": np.zeros(1, np.float32)}, metadata))
    with pytest.raises(MessageError, match="expected a JSON object"):
        decode(save({}, {"recleak": "[" * 100_000}))
    with pytest.raises(MessageError, match="'client' of type U8"):
        decode(save({"client": np.zeros(1, np.uint8)}, {"recleak": _metadata(_with())}))


@pytest.mark.parametrize("shape", [[0, 2**62], [0, 2**63], [0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [0] * 100])
def test_shapes_that_no_tensor_has_are_refused(shape: list[int]) -> None:
    metadata = {"version": 1, "kind": "broadcast", "numbers": {"round": 0}, "tensors": ["params/a"]}
    parts = {"params/a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    header = json.dumps({"__metadata__": {"recleak": json.dumps(metadata)}, **parts}).encode()
    _decode_or_refuse(len(header).to_bytes(8, "little") + header)


def test_every_kind_has_its_checks() -> None:
    assert set(wire._TENSORS) == set(wire._NUMBERS) == set(get_args(wire.Kind))
    assert len(get_args(wire.Kind)) == len(get_args(Message))


@pytest.mark.parametrize("way", [lambda message: decode(encode(message)), copied])
def test_bytes_are_no_live_reference(way: Callable[[Message], Message]) -> None:
    table = torch.zeros(4, 2, requires_grad=True)
    shared = torch.arange(8.0).reshape(2, 4).t()  # not contiguous
    message = way(Broadcast(1, {"a": table, "b": shared, "again": shared, "wide": torch.ones(1).expand(3)}))
    assert isinstance(message, Broadcast)
    assert not message.params["a"].requires_grad
    with torch.no_grad():
        table += 1
    assert float(message.params["a"].sum()) == 0
    assert torch.equal(message.params["b"], shared)
    message.params["again"][0] = 9
    assert torch.equal(message.params["b"], shared)
    assert all(value.data_ptr() % 64 == 0 for value in message.params.values())


# --- vantage points ---------------------------------------------------------------------------------------------------

ONE_OF_EACH: list[Message] = [
    Broadcast(0, {}),
    _upload(),
    Aggregate(0, one, {}, {}, 1.0),
    Push(0, one, one, {}, first),
    Recommendations(0, one, one[:, None]),
    Disclosure(one, {}, {}),
    Embeddings(one, torch.zeros(1, 2), first, torch.zeros(1, 2)),
]


@pytest.mark.parametrize(
    ("vantage", "expected"),
    [
        (Server(), [Broadcast, Upload, Aggregate, Disclosure]),
        (Holder(), [Disclosure, Embeddings]),
        (Aggregator(), [Broadcast, Aggregate, Disclosure]),
        (Peers(torch.eye(3, dtype=torch.bool)), [Push, Disclosure]),
        (Peers(torch.zeros(0, 3, dtype=torch.bool)), [Disclosure]),
        (Audience(), [Recommendations, Disclosure]),
    ],
)
def test_who_sees_what(vantage: wire.Vantage[Any], expected: list[type[Message]]) -> None:
    seen = [seen for message in ONE_OF_EACH if (seen := vantage.sees(message)) is not None]
    assert [type(message) for message in seen] == expected
    assert [vantage.sees(message) for message in seen] == seen


def test_peers_see_what_their_groups_received() -> None:
    groups = torch.tensor([[True, False, False, False], [True, False, True, False]])
    sender, receiver = torch.tensor([3, 2, 1, 0, 3]), torch.tensor([0, 1, 2, 3, 2])
    push = Push(7, sender, receiver, {"w": torch.arange(10.0).reshape(5, 2), "b": torch.arange(5.0)}, torch.arange(5))
    seen = Peers(groups).sees(push)
    assert isinstance(seen, Push)
    assert seen.round == 7
    assert seen.sender.tolist() == [3, 1, 3]
    assert seen.receiver.tolist() == [0, 2, 2]
    assert seen.params["w"].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert seen.params["b"].tolist() == [0, 2, 4]
    assert groups[:, seen.receiver].tolist() == [[True, False, False], [True, True, True]]
    assert Peers(groups[:1]).sees(replace(push, receiver=torch.tensor([1, 2, 3, 1, 2]))) is None
    assert Peers(groups).describe() == {"name": "Peers", "nodes": 4, "groups": [[0], [0, 2]]}


def test_groups_equal_separate_runs() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.rand(3, 6, generator=generator) < 0.4
    sender, receiver = torch.randint(6, (2, 20), generator=generator)
    push = Push(0, sender, receiver, {"w": torch.rand(20, 2, generator=generator)}, torch.arange(20))
    together = Peers(groups).sees(push)
    assert isinstance(together, Push)
    for group in groups:
        alone = Peers(group[None]).sees(push)
        mine = group[together.receiver]
        assert isinstance(alone, Push)
        assert torch.equal(alone.params["w"][alone.model], together.params["w"][together.model][mine])


def test_peers_with_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"i64\[2\], expected bool\[A, nodes\]"):
        Peers(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"outside \[0, 1\)"):
        Peers(torch.ones(1, 1, dtype=torch.bool)).sees(Push(0, one, one, {}, first))


# --- attacks and knowledge --------------------------------------------------------------------------------------------


def test_knowledge_can_be_printed() -> None:
    model = DotProduct(d=2)
    text = str(Knowledge(model, 1200, 7, model.components(), public={"popularity": torch.ones(7)}))
    assert text.splitlines() == [
        "model: DotProduct(d=2)",
        "users: 1,200",
        "items: 7",
        "component user: per_user, user, kept, [2]",
        "component item: per_item, item, shared, [2]",
        "component bias: dense, head, shared, []",
        "public popularity: torch.float32[7]",
    ]


def test_an_attack_at_another_vantage_point_is_refused() -> None:
    case = planted_items()
    with pytest.raises(ValueError, match="at the vantage point Aggregator, expected Server"):
        Listening(Aggregator(), MovedRows(), case.knowledge)  # type: ignore[misc]


def test_listening_holds_nothing_live() -> None:
    class Hoarder(MovedRows):
        def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
            return message.params if isinstance(message, Broadcast) else state

    table = torch.zeros(3, 2)
    listening = Listening(Server(), Hoarder(), planted_items().knowledge)
    listening.receive(Broadcast(0, {"item": table}))
    listening.receive(Push(0, one, one, {"item": torch.ones(1, 3, 2)}, first))  # not for the server
    table += 1
    assert float(listening.state()["item"].sum()) == 0


def test_one_by_one() -> None:
    parts: Callable[[Message], list[Message]] = one_by_one
    upload = _upload()
    first, second = parts(upload)
    assert isinstance(first, Upload)
    assert isinstance(second, Upload)
    assert (first.update.client.tolist(), first.update.item.tolist()) == ([3], [4])
    assert (second.update.client.tolist(), second.update.item.tolist()) == ([5], [0, 7])
    push = Push(0, torch.tensor([1, 2]), torch.tensor([3, 4]), {"w": torch.tensor([5.0, 6.0])}, torch.arange(2))
    assert [part.params["w"].tolist() for part in parts(push) if isinstance(part, Push)] == [[5], [6]]
    lists_ = Recommendations(0, torch.tensor([1, 2]), torch.tensor([[3], [4]]))
    assert [part.item.tolist() for part in parts(lists_) if isinstance(part, Recommendations)] == [[[3]], [[4]]]
    assert parts(ONE_OF_EACH[0]) == [ONE_OF_EACH[0]]
