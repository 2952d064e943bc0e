"""Tensors and messages as Flower's records, and back. What comes over a network is checked before it is used."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.arrays import _npy
from recleak.errors import ConfigError, RecleakError
from recleak.models.base import Params
from recleak.models.components import Component, by_name
from recleak.update import Update
from recleak.wire import Message, MessageError, decode, encode

ARRAYS, CONFIG, ROUND = "arrays", "config", "server-round"  # the names that Flower's own strategies use
_SEALED, _MESSAGE, _STYPE = "recleak", "message", "recleak.message"
_HEADER = re.compile(  # of an array as NumPy writes it; no part can be matched in two ways, so that it takes no time
    rb"\{ *'descr': *'[<>|=]?[a-zA-Z]\d{1,3}' *, *'fortran_order': *(?:True|False) *,"
    rb" *'shape': *\( *(?:\d{1,18} *, *)*(?:\d{1,18} *)?\) *,? *\} *\n?"
)
_LONGEST = 10_000  # bytes of a header: as many as numpy itself reads from strangers
_BROKEN = (ValueError, TypeError, OSError, EOFError, struct.error, OverflowError, MemoryError)
logger = logging.getLogger("flwr")  # Flower's own, so that its settings hold


class RecordError(RecleakError):
    """A record that cannot be used; says what was got and what was expected."""


class DeviceError(RecleakError):
    """What leaves a device of an error there: its type."""


@contextmanager
def told_here() -> Iterator[None]:
    """Flower sends the words of a client's error to the server, and they may quote data: they go to the log here."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        logger.error("The client failed; the server is told the type of the error only.", exc_info=error)
        raise DeviceError(f"{type(error).__name__} on the device, whose log says more.") from None


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors by name."""
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()})


def numpy_of(name: str, array: Array) -> NDArray[np.generic]:
    """The numbers of one array; its header is checked before anything is allocated, and nothing in it is evaluated."""
    file = BytesIO(array.data)
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"it is serialized as {array.stype!r:.80}")
        start = 10 if array.data[6:7] == b"\x01" else 12  # version 1 says the length of its header in two bytes
        length = int.from_bytes(array.data[8:start], "little")
        if length > _LONGEST or _HEADER.fullmatch(array.data[start : start + length]) is None:
            raise ValueError(f"it begins with {array.data[:80]!r}")
        values: NDArray[np.generic] = _npy(file, len(array.data)).read(file)
    except _BROKEN as error:
        reason = str(error) or type(error).__name__
        raise RecordError(
            f"Got an array {name!r:.80} that cannot be read ({reason:.300}), expected one of NumPy."
        ) from error
    return values


def floats_of(name: str, array: Array) -> Tensor:
    """The numbers of one array as f32; of another kind than real numbers it is an error."""
    values = numpy_of(name, array)
    if not np.issubdtype(values.dtype, np.floating):
        raise RecordError(
            f"Got {name!r:.80} with numbers of type {values.dtype}, expected real numbers.\n"
            "  What is no parameter (a counter) has to be mapped to None."
        )
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which whoever uses it checks
        return torch.from_numpy(np.array(values, np.float32))


def params_of(record: ArrayRecord, components: tuple[Component, ...], n_users: int, n_items: int) -> Params:
    """The shared components of a broadcast; names and shapes are as they should be."""
    tables = {"per_user": (n_users,), "per_item": (n_items,), "dense": ()}
    expected = {part.name: (*tables[part.storage], *part.shape) for part in components if part.shared}
    if set(record) != set(expected):
        raise RecordError(f"Got the parameters {_listed(record)}, expected {_listed(expected)}.")
    params = {name: floats_of(name, record[name]) for name in expected}
    for name, shape in expected.items():
        if params[name].shape != shape:
            raise RecordError(f"Got {name!r} of shape {tuple(params[name].shape)}, expected {shape}.")
    return params


def _listed(names: Mapping[str, object]) -> str:
    return f"{', '.join(sorted(names)) or 'none'!s:.300}"


def only_arrays(content: RecordDict, whose: str) -> ArrayRecord:
    """The one array record of a message's content."""
    records = content.array_records
    if len(records) != 1:
        raise RecordError(f"Got {len(records)} array records in {whose}, expected one: that of the model.")
    return next(iter(records.values()))


def round_of(content: RecordDict) -> int:
    """The round that the server says, counted from 0; Flower counts from 1."""
    for record in content.config_records.values():
        if isinstance(number := record.get(ROUND), int) and number >= 1:
            return number - 1
    raise RecordError(f"Got a message without `{ROUND}` in its configuration, expected the number of the round.")


# --- a model of anybody's ---------------------------------------------------------------------------------------------

Parts = Mapping[str, Component | None]  # a component for each name of a parameter; None: it is none, or never leaves


def check_parts(parts: Parts) -> tuple[Component, ...]:
    """The components that names are mapped to, each once."""
    components = tuple(part for part in parts.values() if part is not None)
    by_name(components)
    for name, part in parts.items():
        if part is not None and part.storage == "per_user":
            raise ConfigError(
                f"{name!r} is mapped to a table of users, expected per_item or dense: what each client sends is its "
                "own.\n  A vector that stays on the device is mapped to None, one that is sent is dense."
            )
    return components


def tensors_of(record: ArrayRecord, parts: Parts, whose: str) -> Params:
    """The parameters of a record by the names of components; every name must be mapped, and shapes must fit."""
    if lost := [name for name in parts if name not in record]:
        raise RecordError(f"Got {whose} without {lost[0]!r}, expected the parameters {_listed(parts)}.")
    found: Params = {}
    rows: dict[str, int] = {}
    for name, array in record.items():
        if name not in parts:
            raise RecordError(
                f"Got {whose} with {name!r:.80}, which is not mapped, expected {_listed(parts)}.\n"
                "  Map it to a component, or to None: nothing leaves because it was forgotten."
            )
        if (part := parts[name]) is None:
            continue
        value = floats_of(name, array)
        table = part.storage == "per_item" and value.dim() > 0
        if tuple(value.shape[1:] if table else value.shape) != part.shape:
            expected = f"{['I', *part.shape] if part.storage == 'per_item' else list(part.shape)}"
            raise RecordError(f"Got {name!r} of shape {list(value.shape)} in {whose}, expected {expected}.")
        if table:
            rows[name] = len(value)
        found[part.name] = value
    if len(set(rows.values())) > 1:
        raise RecordError(f"Got tables of items with {rows} rows in {whose}, expected the same number in all.")
    return found


def update_of(before: Params, after: Params, components: Sequence[Component], client: int = 0) -> Update:
    """What one client changed; of tables of items the rows that are not as they were."""
    for part in components:
        got, expected = after[part.name].shape, before[part.name].shape
        if got != expected:
            raise RecordError(f"Got {part.name!r} of shape {list(got)}, expected {list(expected)}, as it was sent.")
    moved = {part.name: (part.storage, after[part.name] - before[part.name]) for part in components}
    tables = {name: value for name, (storage, value) in moved.items() if storage == "per_item"}
    n_items = len(next(iter(tables.values()))) if tables else 0
    touched = torch.zeros(n_items, dtype=torch.bool)
    for value in tables.values():
        touched |= (value != 0).reshape(n_items, -1).any(1)
    item = touched.nonzero().squeeze(1)
    return Update(
        torch.tensor([client]),
        {name: value.unsqueeze(0) for name, (storage, value) in moved.items() if storage != "per_item"},
        {name: value[item] for name, value in tables.items()},
        item,
        torch.tensor([0, len(item)]),
        n_items,
        before,
    )


# --- messages of the wire ---------------------------------------------------------------------------------------------


def sealed(message: Message) -> RecordDict:
    """A message of the wire as the content of one of Flower's."""
    data = encode(message)
    return RecordDict({_SEALED: ArrayRecord({_MESSAGE: Array("uint8", (len(data),), _STYPE, data)})})


def opened(content: RecordDict) -> Message:
    """The message in it; everything is checked."""
    record = content.array_records.get(_SEALED)
    if record is None or set(record) != {_MESSAGE} or record[_MESSAGE].stype != _STYPE:
        raise MessageError(f"got the records {_listed(content)}, expected an upload of recleak's ClientApp.")
    return decode(record[_MESSAGE].data)


# --- what a device keeps ----------------------------------------------------------------------------------------------

_KEPT, _SECRET = "recleak kept", "recleak secret"


def secret_of(state: RecordDict, drawn: bytes) -> int:
    """The secret of this device in this run: `drawn` at the first call, the same at every other."""
    if _SECRET not in state.config_records:
        state[_SECRET] = ConfigRecord({"seed": drawn})
    return int.from_bytes(state.config_records[_SECRET]["seed"], "little")  # type: ignore[arg-type]


def remember(state: RecordDict, kept: Update) -> None:
    """Keep what clients keep; Flower's state never leaves the device."""
    tensors = {"client": kept.client, "item": kept.item, "offset": kept.offset}
    tensors |= {f"values/{name}": value for name, value in kept.values.items()}
    tensors |= {f"rows/{name}": value for name, value in kept.rows.items()}
    state[_KEPT] = arrays_of(tensors)


def recall(state: RecordDict, n_items: int) -> Update | None:
    """What `remember` kept; None at the first visit."""
    if _KEPT not in state.array_records:
        return None
    record = state.array_records[_KEPT]
    tensors = {name: torch.from_numpy(np.array(numpy_of(name, array))) for name, array in record.items()}

    def table(field: str) -> dict[str, Tensor]:
        return {name.removeprefix(field): value for name, value in tensors.items() if name.startswith(field)}

    return Update(tensors["client"], table("values/"), table("rows/"), tensors["item"], tensors["offset"], n_items)
