"""Taps on the wire: an attack that listens, and a recorder that writes what a vantage point sees to disk.

A protocol hands every message to its taps. A tap's state is tensors; a protocol saves it with a round and restores it
when a killed run continues. A recording is a folder:

    manifest.json                         what was recorded, and how many messages there are at least
    messages.sha256                       one line per message, as `sha256sum` writes and `sha256sum --check` reads it
    messages/00000001.safetensors ...     one message each

A message is written first, then its line. So what the lines name is on disk whenever the writer is killed, and every
message costs the same however many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import pydantic
import torch
from torch import Tensor

from recleak.attacks.base import Attack, Knowledge, State
from recleak.errors import DataError
from recleak.files import read_bytes, read_json, refuse_links
from recleak.models.components import Component
from recleak.wire import M, Message, MessageError, Vantage, copied, decode, encode

MANIFEST = "manifest.json"
DIGESTS = "messages.sha256"
_AGAIN = "Nothing is overwritten: choose another folder, or delete it."
_UNFINISHED = "Nothing is overwritten: choose another folder (this one can be audited as far as it goes), or delete it."

Q = TypeVar("Q")


class Tap(Protocol):
    """Something that a protocol feeds with every message it sends."""

    def receive(self, message: Message) -> None:
        """Takes what its vantage point sees of a message."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a protocol saves with a round."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes back to a saved state."""
        ...

    def close(self) -> None:
        """Called once, after the last message."""
        ...


_COPIES: WeakKeyDictionary[Message, Message] = WeakKeyDictionary()


def _copy(message: Message) -> Message:
    """A copy as bytes would give; one for all who listen to the message, as long as the message itself is there."""
    if message not in _COPIES:
        _COPIES[message] = copied(message)
    return _COPIES[message]


class Listening(Generic[M, Q]):
    """An attack that folds over what a vantage point delivers.

    Of every message it gets a copy, as if it had been sent as bytes: no reference to a live parameter survives.
    """

    def __init__(self, vantage: Vantage[M], attack: Attack[M, Q], knowledge: Knowledge) -> None:
        if not isinstance(vantage, attack.vantage):
            got, expected = type(vantage).__name__, attack.vantage.__name__
            raise ValueError(f"Got {attack} at the vantage point {got}, expected {expected}: it is made for that one.")
        self.vantage = vantage
        self.attack, self.knowledge = attack, knowledge
        self._state: State = attack.init(knowledge)

    def receive(self, message: Message) -> None:
        """Folds over the message, if the vantage point sees it."""
        if (seen := self.vantage.sees(message)) is None:
            return
        if (copy := self.vantage.sees(_copy(seen))) is not None:
            self._state = self.attack.fold(self.knowledge, self._state, copy)

    def answer(self, question: Q) -> Tensor:
        """The attack's answer after the messages so far."""
        return self.attack.answer(self.knowledge, self._state, question)

    def state(self) -> dict[str, Tensor]:
        """The attack's state."""
        return dict(self._state)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Puts a saved state in the place of the present one."""
        self._state = {name: value.clone() for name, value in state.items()}  # memory of torch's own alignment

    def close(self) -> None:
        """Nothing is open."""


class Part(pydantic.BaseModel, extra="forbid", frozen=True):
    """A component as a manifest describes it."""

    name: str
    storage: Literal["per_user", "per_item", "dense"]
    role: Literal["user", "item", "head"]
    shape: Annotated[tuple[Annotated[int, pydantic.Field(ge=0, lt=2**31)], ...], pydantic.Field(max_length=16)]
    layer: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None
    shared: bool


class Manifest(pydantic.BaseModel, extra="forbid", frozen=True):
    """What `manifest.json` holds."""

    format: Literal["recleak recording"] = "recleak recording"
    version: Literal[1] = 1
    source: str  # what was recorded: the name or the hash of a run, the name of a deployment
    vantage: dict[str, pydantic.JsonValue]
    components: tuple[Part, ...]
    complete: bool  # False: being written, or its writer was killed
    messages: int = pydantic.Field(ge=0)  # complete: how many there are; otherwise there are at least so many
    sha256: str | None = None  # of messages.sha256, once complete: one number for the whole recording


class Recorder:
    """Writes what a vantage point sees to a folder, one message at a time.

    The folder is opened by the first call of a method. A recording of the same thing (source, vantage point and
    components) is continued by `restore`, and by nothing else: without it, one that has messages is refused, complete
    or not. So is anything else.
    """

    def __init__(
        self,
        vantage: Vantage[Any],
        directory: Path,
        *,
        components: tuple[Component, ...] = (),
        source: str = "",
    ) -> None:
        self.vantage = vantage
        self.directory = directory
        parts = tuple(Part.model_validate(part, from_attributes=True) for part in components)
        self._manifest = Manifest(
            source=source, vantage=vantage.describe(), components=parts, complete=False, messages=0
        )
        self._count: int | None = None  # None: the folder is not open yet

    def receive(self, message: Message) -> None:
        """Writes the message, if the vantage point sees it."""
        number = self._opened() + 1
        seen: Message | None = self.vantage.sees(message)
        if seen is None:
            return
        data = encode(seen)
        name = _name(number)
        _write(self.directory / name, data)
        with open(self.directory / DIGESTS, "ab") as file:
            file.write(_line(data, name))
        self._count = number

    def state(self) -> dict[str, Tensor]:
        """How many messages there are; the manifest says so too from now on."""
        count = self._opened()
        self._write_manifest(self._manifest.model_copy(update={"messages": count}))
        return {"messages": torch.tensor(count)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continues after the messages that a saved state counts; what a killed run wrote after them is discarded."""
        if "messages" not in state or int(state["messages"]) < 0:
            raise ValueError(f"Got a state with {sorted(state)}, expected `messages`: a number that `state` returned.")
        self._cut(int(state["messages"]))

    def close(self) -> None:
        """Marks the recording as complete: for the end of a run, not for one that failed."""
        count = self._opened()
        digest = hashlib.sha256((self.directory / DIGESTS).read_bytes()).hexdigest()
        done = {"complete": True, "messages": count, "sha256": digest}
        self._write_manifest(self._manifest.model_copy(update=done))
        self._count = None

    def _opened(self) -> int:
        """The number of messages so far; a folder that is not open yet begins without any."""
        if self._count is None:
            path = self.directory / MANIFEST
            if path.is_file() and read_manifest(self.directory).complete:
                raise DataError("there is a complete recording already", file=self.directory, remedy=_AGAIN)
            self._check()
            if lines := _lines(self.directory):
                problem = f"there is an unfinished recording already, with {len(lines):,} messages"
                raise DataError(problem, file=self.directory, remedy=_UNFINISHED)
            self._cut(0)
        return self._count or 0

    def _check(self) -> None:
        """What is in the folder must be nothing, or a recording of the same thing."""
        path = self.directory / MANIFEST
        refuse_links(self.directory)
        if path.is_file():
            there = read_manifest(self.directory)
            for field in ("source", "vantage", "components"):
                got, expected = getattr(there, field), getattr(self._manifest, field)
                if got != expected:
                    problem = f"got {field} {got!r:.200}, expected {expected!r:.200}"
                    raise DataError(f"there is a recording of something else: {problem}", file=path, remedy=_AGAIN)
        elif self.directory.exists() and any(file.suffix != ".part" for file in self.directory.iterdir()):
            raise DataError("got a folder with other files, expected none", file=self.directory, remedy=_AGAIN)

    def _cut(self, count: int) -> None:
        """Keeps the first messages; whenever this is interrupted, the folder is a recording that can be replayed."""
        self._check()
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = _lines(self.directory)
        if len(lines) < count:
            problem = f"got {len(lines)} messages, expected at least the {count} of the saved state"
            remedy = "Messages were lost; delete the folder and run again from the start."
            raise DataError(problem, file=self.directory, remedy=remedy)
        self._write_manifest(self._manifest.model_copy(update={"messages": count}))
        _write(self.directory / DIGESTS, b"".join(lines[:count]))
        messages = self.directory / "messages"
        messages.mkdir(exist_ok=True)
        for file in messages.iterdir():
            number = file.name.removesuffix(".part").removesuffix(".safetensors")
            if number.isdecimal() and (int(number) > count or file.suffix == ".part"):
                file.unlink()
        self._count = count

    def _write_manifest(self, manifest: Manifest) -> None:
        _write(self.directory / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())


def read_manifest(directory: Path) -> Manifest:
    """What a recording is."""
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(f"no {MANIFEST}", file=directory, remedy="Give a folder that a Recorder wrote.")
    try:
        return Manifest.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        raise DataError(f"not a valid manifest ({error!s:.500})", file=path, remedy="Record again.") from error


def replay(directory: Path) -> Iterator[Message]:
    """The messages of a recording, one at a time, each checked. Of an unfinished one, all that were written whole."""
    refuse_links(directory)
    manifest = read_manifest(directory)
    lines = _lines(directory)
    path = directory / DIGESTS
    if len(lines) < manifest.messages or (manifest.complete and len(lines) != manifest.messages):
        problem = f"got {len(lines)} messages, the manifest says {manifest.messages}"
        raise DataError(problem, file=path, remedy="A file was changed or exchanged; record again.")
    if manifest.complete and hashlib.sha256(path.read_bytes()).hexdigest() != manifest.sha256:
        problem = f"its SHA-256 is not {manifest.sha256}, as the manifest says"
        raise DataError(problem, file=path, remedy="A file was changed or exchanged; record again.")
    for number, line in enumerate(lines, start=1):
        yield _read(directory, _name(number), line)


def _read(directory: Path, name: str, line: bytes) -> Message:
    path = directory / name
    try:
        data = read_bytes(path)
    except OSError as error:
        raise DataError(f"not readable ({error})", file=path, remedy="A file is missing; record again.") from error
    if _line(data, name) != line:
        said = line.decode(errors="replace")
        problem = f"got SHA-256 {hashlib.sha256(data).hexdigest()[:12]}, {DIGESTS} says {said[:12]!r}"
        raise DataError(problem, file=path, remedy="The file was changed or exchanged; record again.")
    try:
        return decode(data)
    except MessageError as error:
        raise DataError(str(error), file=path, remedy="Record again, with this version of recleak.") from error


def _lines(directory: Path) -> list[bytes]:
    """The whole lines of the list of digests; a last one that was cut off is not one."""
    path = directory / DIGESTS
    if not path.is_file():
        return []
    return [line for line in read_bytes(path, 1 << 32).splitlines(keepends=True) if line.endswith(b"\n")]


def _name(number: int) -> str:
    return f"messages/{number:08d}.safetensors"


def _line(data: bytes, name: str) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  {name}\n".encode()


def _write(path: Path, data: bytes) -> None:
    """The whole file or nothing."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(data)
    temporary.replace(path)
