"""The wire: everything that leaves a party is a message, and an adversary sees messages only.

A protocol sends messages; a vantage point decides which of them an adversary receives; an attack folds over those.
Every message has a form in bytes (safetensors, nothing is ever unpickled), and `decode` believes nothing it is given.

Axis letters: C clients, N rows of all clients, I items, n pushes, B users with a list, K places in a list, A groups of
adversaries, J items with a vector, d coordinates of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Generic, Literal, NamedTuple, TypeVar

import pydantic
import torch
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save
from torch import Tensor

from recleak.errors import RecleakError
from recleak.strict_json import parse_json
from recleak.update import Update

VERSION = 1  # of the form in bytes

# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The server sends the shared components to the clients of a round."""

    round: int
    params: dict[str, Tensor]  # per_item f32[I, *shape], dense f32[*shape], a shared per_user table f32[U, *shape]


@dataclass(frozen=True, eq=False)
class Upload:
    """Clients answer with what they changed."""

    round: int
    update: Update
    weight: Tensor  # f32[C]: what a client says its update weighs (1, or its number of positives)


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The sum of a round's uploads: all that is seen behind secure aggregation."""

    round: int
    client: Tensor  # i64[C]: who took part
    total: dict[str, Tensor]  # weighted sums: per_item f32[I, *shape], dense f32[*shape], per_user f32[U, *shape]
    touched: dict[str, Tensor]  # per_item components: summed weight of the clients that sent a row, f32[I]; or empty
    weight: float  # summed weight of the clients


@dataclass(frozen=True, eq=False)
class Push:
    """Nodes send their parameters to others, peer to peer: n pushes, each from one node to one node.

    Who sends the same to several nodes has its parameters here once: m rows for n pushes.
    """

    round: int
    sender: Tensor  # i64[n]
    receiver: Tensor  # i64[n]
    params: dict[str, Tensor]  # f32[m, *shape]; per_item f32[m, I, *shape], a shared per_user table f32[m, U, *shape]
    model: Tensor  # i64[n]: the row of `params` that each push carries

    def select(self, kept: Tensor) -> Push:
        """Some of the pushes, bool[n] or i64[k], with the parameters that they carry."""
        row, model = torch.unique(self.model[kept], return_inverse=True)
        params = {name: value[row] for name, value in self.params.items()}
        return Push(self.round, self.sender[kept], self.receiver[kept], params, model)


@dataclass(frozen=True, eq=False)
class Recommendations:
    """The lists that users are shown."""

    round: int
    user: Tensor  # i64[B]
    item: Tensor  # i64[B, K], best first; a shorter list ends with -1


@dataclass(frozen=True, eq=False)
class Disclosure:
    """What consenting users volunteer: parameters of theirs and labels. Everybody sees it."""

    client: Tensor  # i64[C]
    values: dict[str, Tensor]  # f32[C, *shape]
    labels: dict[str, Tensor]  # i64[C]: the class of an attribute, by its name


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Vectors of users, and maybe of items, that somebody got hold of: a partner, an insider, a thief."""

    user: Tensor  # i64[B]
    vector: Tensor  # f32[B, d]
    item: Tensor  # i64[J]
    item_vector: Tensor  # f32[J, d]


Message = Broadcast | Upload | Aggregate | Push | Recommendations | Disclosure | Embeddings
ServerMessage = Broadcast | Upload | Aggregate | Disclosure
AggregatorMessage = Broadcast | Aggregate | Disclosure
PeerMessage = Push | Disclosure
AudienceMessage = Recommendations | Disclosure
HolderMessage = Embeddings | Disclosure

# --- vantage points ---------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)


class Vantage(Generic[M]):
    """Where an adversary stands. M are the messages that reach it; no other type has a way through."""

    def sees(self, message: Message) -> M | None:
        """What the adversary receives of a message on the wire; None if it receives nothing.

        What it has received it sees whole: `sees(sees(message))` is `sees(message)`.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, pydantic.JsonValue]:
        """Its name and its settings, for a recording and for reports."""
        return {"name": type(self).__name__}


@dataclass(frozen=True)
class Server(Vantage[ServerMessage]):
    """The server of a federation: every client's upload, and what it made of them."""

    def sees(self, message: Message) -> ServerMessage | None:
        """Broadcasts, uploads, aggregates and disclosures."""
        return message if isinstance(message, (Broadcast, Upload, Aggregate, Disclosure)) else None


@dataclass(frozen=True)
class Aggregator(Vantage[AggregatorMessage]):
    """The server behind secure aggregation: sums only, never the upload of a client."""

    def sees(self, message: Message) -> AggregatorMessage | None:
        """Broadcasts, aggregates and disclosures."""
        return message if isinstance(message, (Broadcast, Aggregate, Disclosure)) else None


@dataclass(frozen=True, eq=False)
class Peers(Vantage[PeerMessage]):
    """Groups of colluding nodes, each an adversary of its own: one run stands for A separate ones.

    A push arrives with its receiver. An attack keeps the groups apart with `groups[:, push.receiver]`, bool[A, n],
    where `groups` is part of its knowledge: a group may use only what its own members received.
    """

    groups: Tensor  # bool[A, nodes]

    def __post_init__(self) -> None:
        if self.groups.dtype != torch.bool or self.groups.dim() != 2:
            raise ValueError(f"Got groups {_typed(self.groups)}, expected bool[A, nodes]: a row for each adversary.")

    @cached_property
    def _members(self) -> Tensor:
        """Who is in any group, bool[nodes]."""
        return self.groups.any(0)

    def sees(self, message: Message) -> PeerMessage | None:
        """The pushes that a member of any group received, and disclosures."""
        if isinstance(message, Push):
            nodes = self.groups.shape[1]
            if not _all_within(message.receiver, 0, nodes):
                raise ValueError(f"Got a push to a node outside [0, {nodes}), expected as many nodes as groups[0] has.")
            heard = self._members[message.receiver]  # bool[n]
            if not bool(heard.any()):
                return None
            return message if bool(heard.all()) else message.select(heard)
        return message if isinstance(message, Disclosure) else None

    def describe(self) -> dict[str, pydantic.JsonValue]:
        """The members of each group, by number."""
        groups: list[pydantic.JsonValue] = [group.nonzero().flatten().tolist() for group in self.groups]
        return {**super().describe(), "nodes": self.groups.shape[1], "groups": groups}


@dataclass(frozen=True)
class Audience(Vantage[AudienceMessage]):
    """Somebody who sees the lists that users are shown."""

    def sees(self, message: Message) -> AudienceMessage | None:
        """Recommendations and disclosures."""
        return message if isinstance(message, (Recommendations, Disclosure)) else None


@dataclass(frozen=True)
class Holder(Vantage[HolderMessage]):
    """Somebody who holds the vectors of users, and maybe of items."""

    def sees(self, message: Message) -> HolderMessage | None:
        """Embeddings and disclosures."""
        return message if isinstance(message, (Embeddings, Disclosure)) else None


# --- bytes ------------------------------------------------------------------------------------------------------------

Kind = Literal["broadcast", "upload", "aggregate", "push", "recommendations", "disclosure", "embeddings"]


class MessageError(RecleakError):
    """A message, or bytes that should be one, that cannot be used; says what was got and what was expected."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Not a usable message: {problem}")


def encode(message: Message) -> bytes:
    """A message as safetensors. A message that `decode` would refuse is refused here already."""
    flat = _flatten(message)
    _check(flat)
    header = _Header(version=VERSION, kind=flat.kind, numbers=flat.numbers, tensors=list(flat.tensors))
    arrays = {key: tensor.detach().cpu().contiguous().numpy() for key, tensor in flat.tensors.items()}
    try:
        return save(arrays, {"recleak": header.model_dump_json()})
    except ValueError as error:  # a name that has no form in UTF-8
        raise MessageError(f"got a name of a component that cannot be written ({error}), expected text.") from error


def decode(data: bytes) -> Message:
    """The message in bytes of unknown origin: everything is checked before it is used."""
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise MessageError(f"got {len(data):,} bytes that are not safetensors ({error}).") from error
    header = _header(data)
    tensors = {key: _tensor(key, part["dtype"], part["shape"], part["data"]) for key, part in found}
    if len(set(header.tensors)) != len(header.tensors) or set(header.tensors) != set(tensors):
        raise MessageError(f"got the tensors {_listed(tensors)}, expected those it names: {_listed(header.tensors)}.")
    flat = _Flat(header.kind, header.numbers, {key: tensors[key] for key in header.tensors})  # in the sender's order
    _check(flat)
    return _build(flat)


def copied(message: Message) -> Message:
    """What `decode(encode(message))` gives, without the bytes: checked, with memory of its own, and nothing else."""
    flat = _flatten(message)
    _check(flat)
    own = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in flat.tensors.items()}
    return _build(flat._replace(tensors=own))


class _Header(pydantic.BaseModel, extra="forbid", frozen=True, strict=True):
    """The metadata of a message."""

    version: int
    kind: Kind
    numbers: dict[str, int | pydantic.FiniteFloat]
    tensors: list[str]  # in their order: safetensors sorts them


class _Flat(NamedTuple):
    """A message as numbers and tensors. `field/name` is the component `name` (which may hold anything) of `field`."""

    kind: Kind
    numbers: dict[str, int | float]
    tensors: dict[str, Tensor]

    def table(self, field: str) -> dict[str, Tensor]:
        prefix = f"{field}/"
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}


def _flatten(message: Message) -> _Flat:
    match message:
        case Broadcast():
            return _Flat("broadcast", {"round": message.round}, _keys("params", message.params))
        case Upload():
            sent = message.update
            tensors = {"client": sent.client, "item": sent.item, "offset": sent.offset, "weight": message.weight}
            tensors |= _keys("values", sent.values) | _keys("rows", sent.rows)
            return _Flat("upload", {"round": message.round, "n_items": sent.n_items}, tensors)
        case Aggregate():
            tensors = {"client": message.client} | _keys("total", message.total) | _keys("touched", message.touched)
            return _Flat("aggregate", {"round": message.round, "weight": float(message.weight)}, tensors)
        case Push():
            tensors = {"sender": message.sender, "receiver": message.receiver, "model": message.model}
            return _Flat("push", {"round": message.round}, tensors | _keys("params", message.params))
        case Recommendations():
            return _Flat("recommendations", {"round": message.round}, {"user": message.user, "item": message.item})
        case Disclosure():
            tensors = {"client": message.client} | _keys("values", message.values) | _keys("labels", message.labels)
            return _Flat("disclosure", {}, tensors)
        case Embeddings():
            tensors = {"user": message.user, "vector": message.vector}
            return _Flat("embeddings", {}, tensors | {"item": message.item, "item_vector": message.item_vector})


def _build(flat: _Flat) -> Message:
    numbers, tensors, table = flat.numbers, flat.tensors, flat.table
    round_ = int(numbers.get("round", 0))
    match flat.kind:
        case "broadcast":
            return Broadcast(round_, table("params"))
        case "upload":
            item, offset, n_items = tensors["item"], tensors["offset"], int(numbers["n_items"])
            update = Update(tensors["client"], table("values"), table("rows"), item, offset, n_items)
            return Upload(round_, update, tensors["weight"])
        case "aggregate":
            weight = float(numbers["weight"])
            return Aggregate(round_, tensors["client"], table("total"), table("touched"), weight)
        case "push":
            return Push(round_, tensors["sender"], tensors["receiver"], table("params"), tensors["model"])
        case "recommendations":
            return Recommendations(round_, tensors["user"], tensors["item"])
        case "disclosure":
            return Disclosure(tensors["client"], table("values"), table("labels"))
        case "embeddings":
            return Embeddings(*(tensors[name] for name in _TENSORS["embeddings"]))


def _keys(field: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{field}/{name}": value for name, value in tensors.items()}


def _header(data: bytes) -> _Header:
    """The metadata of bytes that safetensors has found sound: 8 bytes of length, then JSON."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        text = (parse_json(data[8:end]).get("__metadata__") or {}).get("recleak")
    except (ValueError, AttributeError) as error:
        raise MessageError(f"got a header that is no plain JSON ({error!s:.200}).") from error
    if text is None:
        raise MessageError("got safetensors without the metadata `recleak`, expected what `encode` writes.")
    try:
        version = parse_json(text)["version"]
    except (ValueError, LookupError, TypeError) as error:
        raise MessageError(f"got metadata {text[:80]!r}, expected a JSON object with a version.") from error
    if version != VERSION:
        raise MessageError(f"got version {version!r:.40}, expected {VERSION}. Read it with the recleak that wrote it.")
    try:
        return _Header.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise MessageError(f"got metadata that does not fit: {error}") from error


_DTYPES = {"F32": torch.float32, "I64": torch.int64}


def _tensor(key: str, dtype: str, shape: list[int], data: bytearray) -> Tensor:
    """A tensor with memory of its own (torch's alignment, so that kernels give the same bits wherever it came from)."""
    if dtype not in _DTYPES:
        raise MessageError(f"got {key!r:.80} of type {dtype}, expected one of {', '.join(_DTYPES)}.")
    if max(shape, default=0) >= 2**31 or len(shape) > 16:
        raise MessageError(f"got {key!r:.80} of shape {shape!s:.80}, expected at most 16 axes below 2^31.")
    try:
        return torch.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape).clone() if data else _empty(dtype, shape)
    except (RuntimeError, ValueError) as error:
        raise MessageError(f"got {key!r:.80} of shape {shape}, which torch cannot hold ({error}).") from error


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype])


# --- checks -----------------------------------------------------------------------------------------------------------

_NUMBERS: dict[Kind, tuple[str, ...]] = {
    "broadcast": ("round",),
    "upload": ("round", "n_items"),
    "aggregate": ("round", "weight"),
    "push": ("round",),
    "recommendations": ("round",),
    "disclosure": (),
    "embeddings": (),
}
# An axis letter means the same size wherever it stands in a message, * is any shape, and a field that ends with a slash
# holds any number of named tensors. The field that gives a letter its size comes first.
_TENSORS: dict[Kind, dict[str, str]] = {
    "broadcast": {"params/": "f32[*]"},
    "upload": {
        "client": "i64[C]",
        "item": "i64[N]",
        "offset": "i64[C + 1]",
        "weight": "f32[C]",
        "values/": "f32[C, *]",
        "rows/": "f32[N, *]",
    },
    "aggregate": {"client": "i64[C]", "total/": "f32[*]", "touched/": "f32[I]"},
    "push": {"sender": "i64[n]", "receiver": "i64[n]", "model": "i64[n]", "params/": "f32[m, *]"},
    "recommendations": {"user": "i64[B]", "item": "i64[B, K]"},
    "disclosure": {"client": "i64[C]", "values/": "f32[C, *]", "labels/": "i64[C]"},
    "embeddings": {"user": "i64[B]", "vector": "f32[B, d]", "item": "i64[J]", "item_vector": "f32[J, d]"},
}
_SHORT = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}


def _check(flat: _Flat) -> None:
    """Raises a MessageError unless types, shapes and numbers fit together."""
    if set(flat.numbers) != set(_NUMBERS[flat.kind]):
        expected = _listed(_NUMBERS[flat.kind])
        raise MessageError(f"got a {flat.kind} with the numbers {_listed(flat.numbers)}, expected {expected}.")
    for name, number in flat.numbers.items():
        if name == "weight":
            finite = isinstance(number, float) and isfinite(number)
            _require(finite, flat, f"{name}={number!r:.40}", "a finite decimal number")
        else:
            whole = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63
            _require(whole, flat, f"{name}={number!r:.40}", "a whole number in [0, 2^63)")
    _check_shapes(flat)
    tensors = flat.tensors
    for name in ("client", "sender", "receiver", "user"):
        if name in tensors:
            _require(_all_within(tensors[name], 0, None), flat, f"a negative {name}", "numbers from 0")
    if flat.kind == "upload":
        _check_ragged(flat)
    elif flat.kind == "push":
        for value in flat.table("params").values():  # all have as many rows
            carried = tensors["model"].unique().tolist() == list(range(len(value)))  # type: ignore[no-untyped-call]
            got = f"{len(value)} rows of params, of which pushes carry {tensors['model'].tolist()!s:.80}"
            _require(carried, flat, got, "each of them carried by a push, and no others")
            break
    elif flat.kind in ("aggregate", "disclosure"):
        distinct = len(torch.unique(tensors["client"])) == len(tensors["client"])
        _require(distinct, flat, "a client twice", "every client once")
    elif flat.kind == "recommendations":
        item, shown = tensors["item"], tensors["item"] >= 0
        _require(_all_within(item, -1, None), flat, "an item below -1", "items from 0, and -1 where a list has ended")
        _require(not bool((shown[:, 1:] & ~shown[:, :-1]).any()), flat, "an item after -1", "-1 at the end only")
    elif flat.kind == "embeddings":
        _require(_all_within(tensors["item"], 0, None), flat, "a negative item", "numbers from 0")
        for name in ("user", "item"):
            distinct = len(torch.unique(tensors[name])) == len(tensors[name])
            _require(distinct, flat, f"the same {name} twice", "one vector for each")
    if flat.kind == "aggregate":
        total = flat.table("total")
        for name, count in flat.table("touched").items():
            fits = name in total and total[name].shape[:1] == count.shape
            got = f"touched {name!r} {_typed(count)} with total {_typed(total[name]) if name in total else 'missing'}"
            _require(fits, flat, got, "a count for each row of a component in total")


def _check_shapes(flat: _Flat) -> None:
    specs = _TENSORS[flat.kind]
    sizes: dict[str, int] = {}
    for key in flat.tensors:
        if "".join(key.partition("/")[:2]) not in specs:
            raise MessageError(f"got a {flat.kind} with {key!r:.80}, expected only {_listed(specs)}.")
    for field, spec in specs.items():
        keys = [key for key in flat.tensors if key.startswith(field)] if field.endswith("/") else [field]
        for key in keys:
            if key not in flat.tensors:
                raise MessageError(f"got a {flat.kind} without {key!r}, expected {key} {spec}.")
            if not _matches(flat.tensors[key], spec, sizes):
                known = ", ".join(f"{letter} = {size}" for letter, size in sizes.items() if letter in spec[3:])
                expected = spec + (f" with {known}" if known else "")
                raise MessageError(
                    f"got a {flat.kind} with {key!r:.80} {_typed(flat.tensors[key])}, expected {expected}."
                )


def _matches(tensor: Tensor, spec: str, sizes: dict[str, int]) -> bool:
    """Whether a tensor is what a text like `f32[C, *]` says; letters met for the first time get their size."""
    dtype, axes = spec[:3], spec[4:-1].split(", ")
    if _SHORT.get(tensor.dtype) != dtype:
        return False
    fixed = [axis for axis in axes if axis != "*"]
    if tensor.dim() < len(fixed) or (tensor.dim() > len(fixed) and "*" not in axes):
        return False
    for axis, size in zip(fixed, tensor.shape, strict=False):
        letter, _, more = axis.partition(" + ")
        if sizes.setdefault(letter, size - int(more or 0)) + int(more or 0) != size:
            return False
    return True


def _check_ragged(flat: _Flat) -> None:
    client, item, offset = (flat.tensors[name] for name in ("client", "item", "offset"))
    n_items = int(flat.numbers["n_items"])
    _require(bool((client[1:] > client[:-1]).all()), flat, "clients out of order or twice", "ascending clients")
    ends = int(offset[0]) == 0 and int(offset[-1]) == len(item)
    got = f"offset from {int(offset[0])} to {int(offset[-1])}"
    _require(ends, flat, got, f"offset from 0 to {len(item)}, the number of rows")
    _require(bool((offset[1:] >= offset[:-1]).all()), flat, "an offset that goes down", "ascending offsets")
    _require(_all_within(item, 0, n_items), flat, "an item out of range", f"items in [0, {n_items})")
    owner = torch.repeat_interleave(torch.arange(len(client), device=item.device), offset.diff())  # i64[N]
    unordered = (owner[1:] == owner[:-1]) & (item[1:] <= item[:-1])
    _require(not bool(unordered.any()), flat, "items out of order or twice", "ascending items within each client")


def _all_within(tensor: Tensor, low: int, high: int | None) -> bool:
    """Whether all numbers are in [low, high)."""
    return bool((tensor >= low).all()) and (high is None or bool((tensor < high).all()))


def _require(holds: bool, flat: _Flat, got: str, expected: str) -> None:
    if not holds:
        raise MessageError(f"got a {flat.kind} with {got}, expected {expected}.")


def _typed(tensor: Tensor) -> str:
    return f"{_SHORT.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}"


def _listed(names: Iterable[str]) -> str:
    return f"{', '.join(names) or 'none'!s:.200}"
