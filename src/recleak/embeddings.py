"""An audit of vectors: embeddings of users and items of any system, or what users sent it, one row for each.

Nothing is trained but the attacker. Files become a data set and a file of vectors in the run directory, and an ordinary
experiment on them, as for lists (`published`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from recleak.cells import GIVEN
from recleak.data.arrays import Arrays
from recleak.data.columns import GUESSED, ColumnMap, read_events, read_ids, read_users
from recleak.data.interactions import Interactions, Note
from recleak.errors import ConfigError, DataError
from recleak.protocols.vectors import Kind
from recleak.published import check_folder, chosen_attributes, data_of, stored_data
from recleak.training.state import replace_file

_STANDARD = {"scale": "standard", "reduce": "none"}
_LEARNERS = {
    "logistic": {"use": "logistic", "C": 0.1, "prepare": _STANDARD},
    "kernel": {"use": "svc", "prepare": _STANDARD},
    "network": {"use": "network", "hidden": [100], "members": 1, "prepare": _STANDARD},
}
_SCORINGS = ("product", "cosine", "distance")
_USER_NAMES = ("user", "users", "user_factors", "user_embeddings", "user_embedding", "embeddings", "vectors", "uploads")
_ITEM_NAMES = ("item", "items", "item_factors", "item_embeddings", "item_embedding")


@dataclass(frozen=True)
class Files:
    """Where vectors are: a matrix of users, maybe one of items, in one file or in two; and whose the rows are."""

    vectors: Path
    items: Path | None = None
    user_array: str | None = None
    item_array: str | None = None
    user_ids: Path | None = None
    item_ids: Path | None = None


def experiment_of(
    files: Files,
    users: Path,
    interactions: Path | None,
    folder: Path,
    *,
    kind: Kind = "embeddings",
    attributes: Sequence[str] = (),
    known: float = 0.5,
    columns: ColumnMap = GUESSED,
) -> dict[str, Any]:
    """The experiment on some files, as a table; what it needs is written into the folder."""
    if kind == "uploads" and (files.items is not None or files.item_array is not None):
        raise ConfigError("Got uploads and vectors of items, expected one of them: items are compared with embeddings.")
    check_folder(folder)
    people, notes = read_users(users, columns)
    arrays = Arrays.of(files.vectors)
    name = arrays.choose(files.user_array, _USER_NAMES, "user")
    ids, vector, whose = _users(files, arrays, name, people["id"].cast(pl.String).to_list(), users, columns)
    thing, item_vector, more = _items(files, arrays, name, interactions if kind == "embeddings" else None, columns)
    anything = thing[:1] or _first_item(interactions, columns)
    rows = pl.DataFrame({"user": [*ids, *ids[:1] * len(thing)], "item": [*anything * len(ids), *thing]}, _PAIRS)
    rows = rows.unique(maintain_order=True)
    whole = data_of(rows, people, [*notes, *whose, *more], interactions, columns, f"a vector in {files.vectors.name}")
    chosen = chosen_attributes(whole, attributes, users) if attributes or not thing else _perhaps(whole, users)
    data = stored_data(whole, folder, files.vectors.stem)
    tensors = {
        "user": _codes(ids, whole.users["id"]),
        "vector": torch.from_numpy(vector),
        "item": _codes(thing, whole.items["id"]),
        "item_vector": torch.from_numpy(item_vector),
    }
    digest = _digest(whole, tensors)
    file = folder / GIVEN / f"vectors-{digest}.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, tensors, {"kind": kind})
    sent = {"sends": vector.shape[1]} if kind == "uploads" else {}
    return {
        "title": f"{'Vectors' if kind == 'embeddings' else 'Uploads'} of {files.vectors.name}",
        "data": {"name": str(data)},
        "model": {"use": "unknown", "name": "any recommender", **sent},
        "protocol": {
            "use": "vectors",
            "name": f"{kind} as given",
            "vectors": str(file),
            "digest": digest,
            "kind": kind,
        },
        "defenses": [{"use": "none", "name": files.vectors.stem}],
        "attacks": _attacks(kind, attributes=bool(chosen), items=bool(thing)),
        "attributes": chosen,
        "known": known,
    }


_PAIRS = {"user": pl.String, "item": pl.String}
_Rows = tuple[list[str], NDArray[np.float32], list[Note]]  # the id of each row, the rows f32[B, d], what was noted


def _attacks(kind: Kind, *, attributes: bool, items: bool) -> list[dict[str, Any]]:
    """Attributes by several learners; own items, where items have vectors, by several scores."""
    use, name = ("from-vectors", "vectors") if kind == "embeddings" else ("from-updates", "uploads")
    found: list[dict[str, Any]] = []
    if attributes:
        found += [{"use": use, "name": f"{name}, {by}", "learner": learner} for by, learner in _LEARNERS.items()]
    if items:
        found += [{"use": "scored-items", "name": f"items by {by}", "scoring": by} for by in _SCORINGS]
    return found


def _perhaps(whole: Interactions, users: Path) -> list[str]:
    """The attributes that can be asked about; none is no error, because own items are asked about anyway."""
    try:
        return chosen_attributes(whole, (), users)
    except ConfigError:
        return []


def _users(files: Files, arrays: Arrays, name: str, listed: list[str], table: Path, columns: ColumnMap) -> _Rows:
    """Users; without ids in the order of their table, which is noted."""
    vector = arrays.matrix(name)
    notes: list[Note] = []
    ids = _ids(arrays, "user_ids", files.user_ids, "user", columns)
    if ids is None:
        if len(listed) != len(vector):
            problem = f"there are {len(vector):,} vectors of users, and {table.name} has {len(listed):,} users"
            remedy = (
                "Give as many, in the same order, or say whose the rows are: --user-ids FILE, or an array user_ids."
            )
            raise DataError(problem, file=files.vectors, remedy=remedy)
        ids = listed
        what = f"rows of vectors were taken in the order of {table.name}"
        remedy = "If theirs is another, the findings are wrong: say whose they are, with --user-ids FILE."
        notes.append(Note(what, len(vector), remedy, files.vectors.name))
    _check_ids(ids, len(vector), files.vectors, "user")
    if not set(ids) & set(listed):
        problem = f"no user of the vectors (first: {ids[0]}) is in {table.name} (first: {listed[0]})"
        raise DataError(problem, file=files.vectors, remedy="Check that both use the same ids.")
    return ids, vector, notes


def _items(files: Files, arrays: Arrays, users: str, interactions: Path | None, columns: ColumnMap) -> _Rows:
    """Items: as named, or beside the users by a usual name. If there are interactions but no such rows, it is noted."""
    width = arrays.shapes[users][1]
    if files.items is not None or files.item_array is not None:
        return _item_rows(files, interactions, columns, width)
    none: list[str] = []
    nothing = np.zeros((0, width), np.float32)
    if interactions is None:
        return none, nothing, []
    matrices = [name for name, shape in arrays.shapes.items() if len(shape) == 2 and name != users]
    found = next((name for name in _ITEM_NAMES if name in matrices), None)
    what = "no vectors of items were found, so which items are a user's own is not asked"
    remedy = "Say where they are: --item-array NAME or --item-embeddings FILE."
    if found is not None:
        try:
            return _item_rows(replace(files, item_array=found), interactions, columns, width)
        except DataError as error:
            reason = str(error).partition("\n")[0].removeprefix(f"{arrays.path}: ")
            what = f"the vectors of items, {found}, cannot be used, so own items are not asked about: {reason:.200}"
            remedy = "Mend them, or say whose the rows are: --item-ids FILE, or an array item_ids."
    return none, nothing, [Note(what, 1, remedy, files.vectors.name)]


def _item_rows(files: Files, interactions: Path | None, columns: ColumnMap, width: int) -> _Rows:
    """The vectors of items that were named."""
    if interactions is None:
        raise ConfigError(
            "Got vectors of items without --interactions, expected both: to grade who infers a user's own items, they "
            "have to be known."
        )
    arrays = Arrays.of(files.items or files.vectors)
    rows = arrays.matrix(arrays.choose(files.item_array, _ITEM_NAMES, "item"))
    if rows.shape[1] != width:
        problem = f"vectors of items have {rows.shape[1]} numbers, those of users {width}, expected as many"
        raise DataError(problem, file=arrays.path, remedy="Give both as the recommender multiplies them.")
    ids = _ids(arrays, "item_ids", files.item_ids, "item", columns)
    if ids is not None:
        _check_ids(ids, len(rows), arrays.path, "item")
        return ids, rows, []
    there = read_events(interactions, columns)[0]["item"].cast(pl.String).unique().to_list()
    numbers = [str(place) for place in range(len(rows))]
    if not set(there) <= set(numbers):
        strange = min(set(there) - set(numbers))
        problem = f"the item {strange!r} of {interactions.name} is no row number from 0 to {len(rows) - 1:,}"
        remedy = "Say whose the rows are: --item-ids FILE with a column of items, or an array item_ids in the file."
        raise DataError(problem, file=arrays.path, remedy=remedy)
    return numbers, rows, [Note("items whose ids were taken for row numbers of their vectors", len(there))]


def _ids(arrays: Arrays, name: str, file: Path | None, kind: str, columns: ColumnMap) -> list[str] | None:
    """The ids of rows: from a table, or from an array beside them."""
    if file is not None:
        return read_ids(file, "user" if kind == "user" else "item", columns)
    return arrays.ids(name) if name in arrays.shapes else None


def _check_ids(ids: list[str], rows: int, file: Path, kind: str) -> None:
    if len(ids) != rows:
        remedy = "Give one id for each row, in the same order."
        raise DataError(f"there are {rows:,} vectors of {kind}s and {len(ids):,} ids", file=file, remedy=remedy)
    seen: set[str] = set()
    for each in ids:
        if each in seen:
            problem = f"the {kind} {each!r:.80} stands twice"
            raise DataError(problem, file=file, remedy=f"Give one vector for each {kind}.")
        seen.add(each)


def _first_item(interactions: Path | None, columns: ColumnMap) -> list[str]:
    """Some item: users need one to be in the data, though nobody looks at it."""
    return ["none"] if interactions is None else [str(read_events(interactions, columns)[0]["item"][0])]


def _codes(ids: list[str], of: pl.Series) -> torch.Tensor:
    """The numbers of ids in the data, i64[n]."""
    place = {name: code for code, name in enumerate(of.cast(pl.String).to_list())}
    return torch.tensor([place[each] for each in ids], dtype=torch.int64)


def _digest(whole: Interactions, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(whole.fingerprint.encode())
    for name, tensor in tensors.items():
        digest.update(f"|{name}:{list(tensor.shape)}|".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
