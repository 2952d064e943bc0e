"""What a federation sent that ran elsewhere, from its recording. Nothing is trained here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Literal, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.errors import ConfigError, DataError
from recleak.models.components import Component
from recleak.recording import DIGESTS, Tap, read_manifest, replay
from recleak.training.cohort import LocalTraining
from recleak.wire import Aggregate, Broadcast, Message, Upload

MOST_CLIENTS = 10_000_000  # numbers from 0; a larger one is no number of a client but a name


@dataclass(frozen=True)
class Recorded:
    """The messages of a recording (`recording.Recorder`, `deploy.flower.Recorder`), in their order.

    `recleak audit --recording` writes these settings. `digest` is part of them so that another recording is another
    cell. `vantage` is where it was made: at the server, or where only sums arrive. `local` is how clients train, as far
    as an adversary knows it.
    """

    recording: str
    digest: str = ""
    rounds: int = 1
    vantage: Literal["Server", "Aggregator"] = "Server"
    local: LocalTraining = field(default_factory=LocalTraining)

    @property
    def survey(self) -> Survey:
        """What is in it."""
        return survey(Path(self.recording), self.digest)

    def first_rounds(self, n_users: int) -> NDArray[np.int64]:
        """The round in which each user took part first, i64[U]; -1: in none."""
        first = np.full(n_users, -1, np.int64)
        for client, round in self.survey.first.items():
            if client < n_users:
                first[client] = round
        return first

    def components(self, model: tuple[Component, ...]) -> tuple[Component, ...]:
        """The model's, if there are any: then those that are shared must be what was recorded; else the recording's."""
        recorded = self.survey.components
        if not model:
            return recorded
        got, expected = ({p.name: (p.storage, p.shape) for p in some if p.shared} for some in (recorded, model))
        if got != expected:
            name = sorted(n for n in {*got, *expected} if got.get(n) != expected.get(n))[0]
            found, wanted = (_words(side.get(name)) for side in (got, expected))
            raise ConfigError(
                f"{self.recording}: got {name!r} {found}, but the model and the defense say {wanted}.\n"
                f"  The recording has {', '.join(f'{n} {_words(each)}' for n, each in got.items())}: give the model "
                "with the settings that it was trained with, and the defense in force."
            )
        return model

    def send(self, taps: Sequence[Tap]) -> None:
        """Put the messages on the wire."""
        for message in checked(Path(self.recording)):
            for tap in taps:
                tap.receive(message)
        for tap in taps:
            tap.close()


@dataclass(frozen=True, eq=False)
class Survey:
    """What there is in a recording, without its numbers."""

    rounds: int
    n_items: int  # I: rows of its tables
    first: dict[int, int]  # the round in which each client took part first
    components: tuple[Component, ...]
    vantage: str
    digest: str
    complete: bool
    diverged: int | None = None  # the first round whose broadcast is not finite: what is here ends before it


@lru_cache(maxsize=4)
def survey(directory: Path, digest: str = "") -> Survey:
    """Read a recording once. With a `digest`, it must be the same as then."""
    manifest = read_manifest(directory)
    name = str(manifest.vantage.get("name"))
    if name not in ("Server", "Aggregator"):
        raise DataError(
            f"got a recording at the vantage point {name!r:.40}, expected Server or Aggregator",
            file=directory,
            remedy="Only what a server of a federation sees can be audited this way.",
        )
    lines = directory / DIGESTS
    whole = hashlib.sha256(lines.read_bytes() if lines.is_file() else b"").hexdigest()
    if digest and digest != whole[: len(digest)]:
        problem = f"got the digest {whole[: len(digest)]}, expected {digest}"
        raise DataError(problem, file=directory, remedy="It was exchanged meanwhile; audit it again.")
    first: dict[int, int] = {}
    rounds, items = 0, set[int]()
    broadcast: dict[str, Tensor] = {}
    diverged = None
    for message in _fitting(directory):
        if _is_diverged(message):
            diverged = message.round
            break
        if isinstance(message, Broadcast):
            broadcast = broadcast or message.params
        elif isinstance(message, Upload | Aggregate):
            rounds = max(rounds, message.round + 1)
            for client in _clients(message).tolist():
                first.setdefault(client, message.round)
    if not first or not broadcast:
        some = "broadcast" if diverged is None else "finite broadcast"
        lacking = "nobody who answered" if broadcast else f"no {some}"
        raise DataError(f"got a recording with {lacking}", file=directory, remedy="Record at least one whole round.")
    parts = tuple(
        Component(part.name, part.storage, part.role, part.shape, layer=part.layer, shared=part.shared)
        for part in manifest.components
    )
    for part in parts:
        if part.shared and part.storage == "per_item" and part.name in broadcast:
            items.add(len(broadcast[part.name]))
    if len(items) != 1:
        got = f"tables of items with {sorted(items)} rows" if items else "no table of items among its components"
        raise DataError(f"got {got}, expected one number of items", file=directory, remedy="Say which part has them.")
    return Survey(rounds, items.pop(), first, parts, name, whole, manifest.complete, diverged)


def checked(directory: Path) -> Iterator[Message]:
    """The messages, each of which fits to those before: shapes of the broadcast, numbers of clients and items.

    They end before the first broadcast that is not finite: what a system that diverged sends is no evidence.
    """
    return takewhile(lambda message: not _is_diverged(message), _fitting(directory))


def _is_diverged(message: Message) -> TypeGuard[Broadcast]:
    return isinstance(message, Broadcast) and not _finite(message.params)


def _fitting(directory: Path) -> Iterator[Message]:
    manifest = read_manifest(directory)
    shared = {part.name: part for part in manifest.components if part.shared}
    shapes: dict[str, tuple[int, ...]] = {}
    for number, message in enumerate(replay(directory), start=1):
        problem = None
        if isinstance(message, Broadcast):
            found = {name: tuple(value.shape) for name, value in message.params.items()}
            shapes = shapes or found
            if found != shapes or set(found) != set(shared):
                problem = f"a broadcast of {found!s:.200}, expected {shapes if set(shapes) == set(shared) else shared}"
            elif wrong := [n for n, part in shared.items() if not _fits(found[n], part.storage, part.shape)]:
                problem = f"{wrong[0]!r} of shape {found[wrong[0]]}, expected rows of {shared[wrong[0]].shape}"
        elif isinstance(message, Upload | Aggregate):
            problem = _problem(message, shapes, {name: part.storage for name, part in shared.items()})
        if problem is not None:
            where = directory / "messages" / f"{number:08d}.safetensors"
            raise DataError(f"got {problem!s:.400}", file=where, remedy="It was not made by a Recorder; record again.")
        yield message


def _fits(shape: tuple[int, ...], storage: str, row: tuple[int, ...]) -> bool:
    return shape == row if storage == "dense" else len(shape) > 0 and shape[1:] == row


def _problem(message: Upload | Aggregate, shapes: dict[str, tuple[int, ...]], storage: dict[str, str]) -> str | None:
    """What is wrong with an upload or a sum beside the broadcast, if something is."""
    client = _clients(message)
    if len(client) and int(client.max()) >= MOST_CLIENTS:
        return f"the client {int(client.max())}, expected numbers from 0 on, below {MOST_CLIENTS:,}"
    if isinstance(message, Aggregate):
        found = {name: tuple(value.shape) for name, value in message.total.items()}
        if found != shapes:
            return f"a sum of {found!s:.200}, expected {shapes!s:.200}"
        if lost := [name for name in message.touched if storage[name] != "per_item"]:
            return f"a sum with counts of rows of {lost[0]!r:.80}, which is no table of items"
        if not (isfinite(message.weight) and message.weight >= 0 and _from_zero(message.touched)):
            return "a sum with weights or counts of rows that are no numbers from 0 on"
        return None if _finite(message.total) else "a sum with numbers that are not finite"
    update = message.update
    if set(update.names()) != set(shapes):
        return f"an upload of {sorted(update.names())!s:.200}, expected {sorted(shapes)!s:.200}"
    if not _from_zero({"weight": message.weight}):
        return "an upload with weights that are no numbers from 0 on"
    for name, value in (*update.values.items(), *update.rows.items()):
        if (name in update.rows) != (storage[name] == "per_item"):
            return f"an upload with {name!r:.80}, which the broadcast does not have so"
        row = shapes[name] if storage[name] == "dense" else shapes[name][1:]
        if tuple(value.shape[1:]) != row:
            return f"an upload with {name!r} of shape {tuple(value.shape[1:])}, expected {row}"
        if name in update.rows and update.n_items != shapes[name][0]:
            return f"an upload of {update.n_items} items, expected {shapes[name][0]}"
    return None if _finite({**update.values, **update.rows}) else "an upload with numbers that are not finite"


def _finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in tensors.values())


def _from_zero(tensors: dict[str, Tensor]) -> bool:
    return _finite(tensors) and all(bool((value >= 0).all()) for value in tensors.values())


def _clients(message: Upload | Aggregate) -> Tensor:
    return message.update.client if isinstance(message, Upload) else message.client


def _words(part: tuple[str, tuple[int, ...]] | None) -> str:
    return "that it is not sent" if part is None else f"({part[0]}, {list(part[1])})"
