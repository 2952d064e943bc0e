"""What a run keeps on disk: the state of its clients, its checkpoint, its lock, and what tells it from another run.

What clients keep between visits lies in memory-mapped files, for any number of clients. A client that was never visited
takes no space: its vector is a function of (seed, client). With a directory the store survives a kill at any moment:
before anything is overwritten, what was there goes to the journal; opening the store again puts it back, so that it is
as it was at the last commit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recleak.data.interactions import Interactions
from recleak.errors import RecleakError
from recleak.files import refuse_links
from recleak.models.components import Component
from recleak.strict_json import parse_json
from recleak.training.optimizers import Optimizer
from recleak.training.visit import AGE
from recleak.update import Update
from recleak.wire import Disclosure

_UNREADABLE = (
    SafetensorError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    OverflowError,
    OSError,
)
_ROOM = 1 << 24  # bytes that stay free on the disk: writing into a mapped file on a full disk kills a process


class CheckpointError(RecleakError):
    """A checkpoint that cannot be used."""


@dataclass(frozen=True)
class _Field:
    """One thing that each client keeps."""

    name: str
    shape: tuple[int, ...]
    component: Component | None = None  # where its first value comes from; else zeros
    dtype: str = "<f4"


def _some(fields: dict[str, _Field], names: Collection[str] | None) -> dict[str, _Field]:
    return fields if names is None else {name: field for name, field in fields.items() if name in names}


class ClientStore:
    """What each of U clients keeps: components that stay with it, and the moments of a kept optimizer."""

    def __init__(
        self,
        components: tuple[Component, ...],
        optimizer: Optimizer,
        n_users: int,
        n_items: int,
        seed: int,
        directory: Path | None = None,
        committed: int = 0,
    ) -> None:
        """`committed` is the number of rounds in the last checkpoint; what was written after it is undone."""
        self.n_users, self.n_items, self._seed = n_users, n_items, seed
        moments = optimizer.moments if optimizer.keep else ()
        self._values: dict[str, _Field] = {}
        self._rows: dict[str, _Field] = {}
        for part in components:
            fields = self._rows if part.storage == "per_item" else self._values
            if part.stays:
                fields[part.name] = _Field(part.name, part.shape, part)
            for moment in moments:
                fields[f"{part.name}/{moment}"] = _Field(f"{part.name}/{moment}", part.shape)
        if optimizer.keep:
            self._values[AGE] = _Field(AGE, (), dtype="<i8")
        if directory is None:
            folder = Path(tempfile.mkdtemp(prefix="recleak-clients-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        else:
            folder = directory / "clients"
            try:
                (folder / "journal").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable(folder, error) from error
        self._folder, self._journaled, self._committed, self._entries = folder, directory is not None, committed, 0
        self._writes = self._open("writes", (1,), "<i8")
        self._visited = self._open("visited", (n_users,), "u1")
        self._has_row = self._open("rows", (n_users, n_items), "u1") if self._rows else np.zeros((0, 0), np.uint8)
        self._arrays = {
            **{n: self._open(f"kept.{n}", (n_users, *field.shape), field.dtype) for n, field in self._values.items()},
            **{
                name: self._open(f"kept.{name}", (n_users, n_items, *field.shape), field.dtype)
                for name, field in self._rows.items()
            },
        }
        if self._journaled:
            self._undo()

    def _open(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """A file of zeros that takes space only where it is written."""
        file = self._folder / f"{name.replace('/', '.')}.bin"
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size == 0:
            return np.zeros(shape, dtype)
        try:
            if not file.exists():
                with open(file, "wb") as handle:
                    handle.truncate(size)
            elif not file.is_file():  # a pipe would wait for its other end
                raise OSError("not a plain file")
            elif (found := file.stat().st_size) != size:
                raise CheckpointError(
                    f"{file}: {found:,} bytes, expected {size:,}.\n"
                    "  It belongs to another model or data set; use another directory."
                )
            return np.memmap(file, dtype, "r+", shape=shape)
        except OSError as error:
            raise _unusable(file, error) from error

    @property
    def version(self) -> int:
        """Another number after every write, whoever wrote: also a run that continues in the same directory."""
        return int(self._writes[0])

    def read(self, client: NDArray[np.int64], names: Collection[str] | None = None) -> Update:
        """What some clients keep, i64[C] ascending: all of it, or what has these names."""
        values, tables = self._read_values(client, names), _some(self._rows, names)
        if tables:
            owner, item = np.nonzero(self._has_row[client])
        else:
            owner = item = np.zeros(0, np.int64)
        place = torch.from_numpy(client[owner] * self.n_items + item)
        rows = {name: self._table(name).index_select(0, place) for name in tables}
        offset = np.searchsorted(owner, np.arange(len(client) + 1))
        return Update(
            torch.from_numpy(client), values, rows, torch.from_numpy(item), torch.from_numpy(offset), self.n_items
        )

    def _read_values(self, client: NDArray[np.int64], names: Collection[str] | None = None) -> dict[str, Tensor]:
        values = {}
        fresh = np.flatnonzero(self._visited[client] == 0)
        for name, field in _some(self._values, names).items():
            value = torch.from_numpy(np.array(self._arrays[name][client]))
            if field.component is not None and len(fresh):
                part = field.component
                who = client[fresh] if part.storage == "per_user" else np.zeros(len(fresh), np.int64)
                value[torch.from_numpy(fresh)] = part.draw(self._seed, who)
            values[name] = value
        return values

    # Nodes that keep a row of every item are trained in place; what they keep is not journaled.

    def fill(self, client: NDArray[np.int64]) -> None:
        """From now on these clients have been visited, and keep a row of every item."""
        if self._journaled:
            raise AssertionError("what is changed in place cannot be undone")
        first = self.read_values(client)
        self.write_values(client, first.values)
        self._visited[client] = 1
        if self._rows:
            self._has_row[client] = 1

    def contents(self) -> dict[str, Tensor]:
        """All of it by name, to be put into a checkpoint; `restore` puts it back."""
        arrays = {"visited": self._visited, "rows": self._has_row, **self._arrays}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def restore(self, contents: Mapping[str, Tensor]) -> None:
        """As it was."""
        for name, array in self.contents().items():
            array.copy_(contents[name])
        self._writes[0] += 1

    def whole(self, name: str) -> NDArray[np.float32]:
        """What all clients keep of rows, f32[U, I, *shape], to be changed in place."""
        return self._arrays[name]

    def read_values(self, client: NDArray[np.int64]) -> Update:
        """What some clients keep beside rows, i64[C] ascending."""
        none, nowhere = torch.zeros(0, dtype=torch.int64), torch.zeros(len(client) + 1, dtype=torch.int64)
        return Update(torch.from_numpy(client), self._read_values(client), {}, none, nowhere, self.n_items)

    def disclosed(self, client: NDArray[np.int64]) -> Disclosure:
        """What users tell who side with an adversary: all that they keep of the model, beside rows of items."""
        own = [name for name, field in self._values.items() if field.component is not None]
        values = self._read_values(client)
        return Disclosure(torch.from_numpy(client), {name: values[name] for name in own}, {})

    def write_values(self, client: NDArray[np.int64], values: Mapping[str, Tensor]) -> None:
        """Overwrite it."""
        self._writes[0] += 1
        for name, value in values.items():
            self._arrays[name][client] = value.numpy()

    def write(self, kept: Update) -> None:
        """Overwrite what some clients keep; on a store with a directory, what was there goes to the journal first."""
        client, item = kept.client.numpy(), kept.item.numpy()
        user = client[kept.owner.numpy()]
        self._require_room(kept)
        if self._journaled:
            self._log(client, user, item)
        self._writes[0] += 1
        self._visited[client] = 1
        for name, value in kept.values.items():
            self._arrays[name][client] = value.numpy()
        if self._rows:
            self._has_row[user, item] = 1
        place = torch.from_numpy(user * self.n_items + item)
        for name, value in kept.rows.items():
            self._table(name).index_copy_(0, place, value.float())

    def _table(self, name: str) -> Tensor:
        """The rows of all clients one after another, f32[U * I, *shape]."""
        return torch.from_numpy(self._arrays[name]).flatten(0, 1)

    def commit(self, rounds: int) -> None:
        """What was written belongs to the checkpoint of `rounds` rounds, which is on disk."""
        self._committed = rounds
        for file in self._journal():
            file.unlink()
        self._entries = 0

    def flush(self) -> None:
        """Hand everything to the operating system, before the checkpoint is written."""
        for array in (self._visited, self._has_row, *self._arrays.values()):
            if isinstance(array, np.memmap):
                array.flush()

    def _require_room(self, kept: Update) -> None:
        """An error while it can still be one."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in (*kept.values.values(), *kept.rows.values()))
        free = shutil.disk_usage(self._folder).free
        if free < 2 * size + _ROOM:
            raise CheckpointError(
                f"{self._folder}: {free:,} bytes are free, expected at least {2 * size + _ROOM:,}.\n"
                "  Make room on the disk, then run again: what was saved is still there."
            )

    # The journal.

    def _journal(self) -> list[Path]:
        return sorted((self._folder / "journal").glob("*.safetensors"))

    def _log(self, client: NDArray[np.int64], user: NDArray[np.int64], item: NDArray[np.int64]) -> None:
        before = {
            "client": client,
            "user": user,
            "item": item,
            "visited": np.array(self._visited[client]),
            "rows": np.array(self._has_row[user, item]) if self._rows else np.zeros(0, np.uint8),
        }
        before |= {f"value {name}": np.array(self._arrays[name][client]) for name in self._values}
        before |= {f"row {name}": np.array(self._arrays[name][user, item]) for name in self._rows}
        file = self._folder / "journal" / f"{self._entries:08d}.safetensors"
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in before.items()}
        replace_file(file, tensors, {"committed": self._committed})
        self._entries += 1

    def _undo(self) -> None:
        """Put back what was there at the last commit; entries of an earlier commit are left over and mean nothing.

        An entry goes when it has been put back, the latest first; to put one back twice does no harm.
        """
        for file in (self._folder / "journal").glob("*.partial"):
            _remove(file)  # its write was cut off, so the arrays were not touched yet
        for file in reversed(self._journal()):
            tensors, about = read_file(file)
            if about.get("committed") == self._committed:
                try:
                    self._put_back({name: tensor.numpy() for name, tensor in tensors.items()})
                except (LookupError, ValueError, TypeError) as error:
                    problem = f"{file}: what was there before cannot be put back ({error!s:.200})"
                    raise CheckpointError(f"{problem}.\n  It is damaged; use another directory.") from error
            _remove(file)

    def _put_back(self, before: Mapping[str, NDArray[Any]]) -> None:
        client, user, item = (before[name] for name in ("client", "user", "item"))
        for code, bound in ((client, self.n_users), (user, self.n_users), (item, self.n_items)):
            if code.ndim != 1 or code.dtype != np.int64 or (len(code) and not 0 <= code.min() <= code.max() < bound):
                raise ValueError(f"numbers of {code.dtype}{list(code.shape)} that are not below {bound:,}")
        self._visited[client] = before["visited"]
        if self._rows:
            self._has_row[user, item] = before["rows"]
        for name in self._values:
            self._arrays[name][client] = before[f"value {name}"]
        for name in self._rows:
            self._arrays[name][user, item] = before[f"row {name}"]
        self._writes[0] += 1


# --- files --------------------------------------------------------------------------------------------------------


def _unusable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be used ({error.strerror or error}).\n  Mend it, or use another directory.")


def _remove(file: Path) -> None:
    try:
        file.unlink()
    except OSError as error:
        raise _unusable(file, error) from error


def replace_file(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a few facts, all or nothing: whatever happens, there is the old file or the new one."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"recleak": json.dumps(about)}
        )
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{file}: cannot be written ({error}).\n"
            "  Make room or mend the permissions, then run again: what was saved before is still there."
        ) from error


def read_file(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (in memory of their own) and facts of such a file."""
    try:
        with safe_open(file, "pt") as opened:
            about = parse_json((opened.metadata() or {})["recleak"], constants=True)
        if not isinstance(about, dict):
            raise ValueError("its facts are no object")
        return {name: tensor.clone() for name, tensor in load_file(file).items()}, about
    except _UNREADABLE as error:
        reason = f"{error!s:.200}" or type(error).__name__
        raise CheckpointError(f"{file}: not readable ({reason}).\n  It is damaged; use another directory.") from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a directory; the lock of a process that was killed is gone with it."""
    directory.mkdir(parents=True, exist_ok=True)
    refuse_links(directory)  # a lock is written, files are replaced: not behind links that somebody else put there
    with open(directory / ".lock", "a+", encoding="utf-8") as file:
        if not _lock(file):
            file.seek(0)
            raise CheckpointError(
                f"{directory} is in use by {file.read().strip() or 'another process'}.\n"
                "  Wait until that run has ended, end it, or use another directory."
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _lock(file: IO[str]) -> bool:
    """Whether the lock was free; it ends when the file is closed, also by a kill."""
    try:
        import fcntl
    except ImportError:  # not on this system: nobody is kept out
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- what a run is ------------------------------------------------------------------------------------------------


def identify(value: Any) -> Any:
    """A setting as JSON that tells it from any other: tensors and data by their hash, objects by class and fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        return f"{data.dtype}{list(data.shape)} {_digest(data.reshape(-1).view(torch.uint8).numpy())}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {_digest(value)}"
    if isinstance(value, Interactions):
        return value.fingerprint
    if isinstance(value, Mapping):
        return {str(key): identify(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, tuple | list):
        return [identify(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, nn.Module):
        weights = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        plain = {
            f"{path}.{key}": each
            for path, part in value.named_modules()
            for key, each in vars(part).items()
            if not key.startswith("_") and isinstance(each, bool | int | float | str)
        }
        return {"class": _name(type(value)), "module": repr(value), "plain": plain, "weights": identify(weights)}
    return _identify_object(value)


def _identify_object(value: Any) -> Any:
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _name(value)
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif hasattr(value, "__dict__"):
        fields = vars(value)
    else:
        return repr(value)
    return {"class": _name(type(value)), **{name: identify(each) for name, each in fields.items()}}


def _name(thing: Any) -> str:
    """Its name without the module: a class of a script is in another module when the script is imported."""
    return str(thing.__qualname__)


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:32]


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Where two identities differ, each place as `name was this, now that`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            place = f"{path}.{key}" if path else str(key)
            yield from differences(before.get(key, "absent"), now.get(key, "absent"), place)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for position, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{path}[{position}]")
    elif before != now:
        yield f"{path} was {before!s:.80}, now {now!s:.80}"
