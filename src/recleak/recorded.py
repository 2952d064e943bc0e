"""An audit of a recording: what the server of a federation saw that ran elsewhere, and what its users really did.

Nothing is trained but the attacker's own shadows. The recording and the truth become an ordinary experiment: the same
attacks, nulls, intervals and report as for systems that are trained here. Users and items of the truth are the numbers
of the recording: users as clients are numbered in it, items as rows of its tables, both from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from recleak.cells import RECORDED
from recleak.data.columns import GUESSED, ColumnMap, read_events, read_users
from recleak.data.interactions import Interactions, Note
from recleak.errors import ConfigError, DataError
from recleak.protocols.recorded import MOST_CLIENTS, Survey, survey
from recleak.published import chosen_attributes, stored_data

NOT_TOLD = {"use": "none", "name": "not told"}  # the label of a defense that nobody named: there may be one
_FIXED = {"data", "canaries"}  # of an experiment: a recording is of one data set, and nothing can be planted in it


def experiment_of(
    recording: Path,
    interactions: Path,
    users: Path | None,
    folder: Path,
    base: Mapping[str, Any],
    *,
    attributes: Sequence[str] = (),
    known: float = 0.5,
    columns: ColumnMap = GUESSED,
) -> dict[str, Any]:
    """The experiment on a recording, as a table; `base` has what is known of the system: model, defenses, attacks, how
    clients train (`protocol.local`).
    """
    survey.cache_clear()  # it may have gone on since
    found = survey(recording)
    truth = _truth(found, recording, interactions, users, columns)
    chosen = [] if users is None else chosen_attributes(truth, attributes, users)
    data = stored_data(truth, folder, recording.name)
    rest = {name: value for name, value in base.items() if name not in _FIXED}
    model = rest.get("model", {"use": "unknown", "name": "any model"})
    return {
        "title": f"Recording {recording.name}",
        "defenses": NOT_TOLD,
        **rest,
        "attacks": rest["attacks"] if "attacks" in rest else _attacks(found, model, bool(chosen)),
        "model": model,
        "data": {"name": str(data)},
        "protocol": {
            "use": RECORDED,
            "name": f"recording {recording.name}",
            "recording": str(recording),
            "digest": found.digest[:16],
            "rounds": found.rounds,
            "vantage": found.vantage,
            **_local(base.get("protocol")),
        },
        "attributes": chosen,
        "known": known,
        "seeds": 1,
    }


def _truth(found: Survey, recording: Path, file: Path, people: Path | None, columns: ColumnMap) -> Interactions:
    """What users did, in the numbers of the recording."""
    events, notes = read_events(file, columns)
    last = max(found.first)
    pairs = _numbers(events, file, found.n_items).unique().sort("user", "item")
    n_users = max(last, int(pairs["user"].max() or 0)) + 1  # type: ignore[arg-type]
    without = sorted(set(found.first) - set(pairs["user"].to_list()))
    if len(without) == len(found.first):
        raise DataError(
            f"got no interaction of any of the {len(found.first)} clients of {recording} ({_few(found.first)})",
            file=file,
            remedy="Users are the numbers of clients in the recording (clients.csv in it says which node is which).",
        )
    notes.append(Note("clients of the recording without an interaction; they are not graded", len(without)))
    table = pl.DataFrame({"id": range(n_users)}, schema={"id": pl.Int64})
    whole = Interactions(pairs, table, pl.DataFrame({"id": range(found.n_items)}, schema={"id": pl.Int64}))
    if not found.complete:
        notes.append(Note("the recording was never completed; what is there is audited", 1, file=recording.name))
    if found.diverged is not None:
        words = f"from round {found.diverged + 1} on its parameters are not finite; what is before is audited"
        notes.append(Note(words, 1, file=recording.name))
    if people is not None:
        described, more = read_users(people, columns)
        notes += more
        known = described.with_columns(pl.col("id").cast(pl.String)).unique("id", keep="first", maintain_order=True)
        named = table.with_columns(pl.col("id").cast(pl.String))
        joined = named.join(known, on="id", how="left", maintain_order="left")
        whole = whole.with_attributes(**{name: joined[name] for name in joined.columns if name != "id"})
    return Interactions(whole.rows, whole.users, whole.items, tuple(note for note in notes if note.count))


def _numbers(events: pl.DataFrame, file: Path, n_items: int) -> pl.DataFrame:
    """Users and items as numbers; a name, or an item that the tables do not have, is an error."""
    most = {"user": MOST_CLIENTS, "item": n_items}
    found = {}
    for name, bound in most.items():
        given = events[name].cast(pl.String)
        number = given.cast(pl.Int64, strict=False)
        if (wrong := given.filter(number.is_null() | ~number.is_between(0, bound, closed="left"))).len():
            what = "the number of a client" if name == "user" else f"a row of the recorded tables, 0 to {n_items - 1}"
            raise DataError(
                f"got {name} {wrong[0]!r:.40}, expected {what} ({wrong.len():,} such)",
                file=file,
                remedy="Write users and items by their numbers in the recording, not by their names.",
            )
        found[name] = number.cast(pl.Int32)
    return pl.DataFrame(found)


def _attacks(found: Survey, model: Any, attributes: bool) -> list[dict[str, Any]]:
    """What can be asked with what is known of the model."""
    known = "unknown" not in [each.get("use") if isinstance(each, Mapping) else each for each in _several(model)]
    if found.vantage == "Aggregator":
        if known:
            return [{"use": "alignment-of-sums"}, {"use": "rehearsed-sums"}]
        raise ConfigError(
            "Got a recording of sums without a model, expected both: attacks on sums read them with the model.\n"
            "  Say which, such as --model ncf,factors=16."
        )
    tables = [part.name for part in found.components if part.shared and part.storage == "per_item" and part.shape]
    if not tables:
        names = ", ".join(f"{part.name} {list(part.shape)}" for part in found.components if part.shared)
        raise ConfigError(
            f"Got a recording of {names}, expected a table with a row of several numbers for each item: the attacks "
            "that are chosen without being asked for read its rows.\n  Name attacks, such as --attack alignment."
        )
    table = tables[0]
    rows = [{"use": "farthest-rows", "component": table}, {"use": "k-means", "component": table}]
    attacks = [{"use": "alignment"}, {"use": "imia", "component": table}, *rows] if known else rows
    return [*attacks, *([{"use": "from-updates"}] if attributes else [])]


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _local(protocol: Any) -> dict[str, Any]:
    """How clients train, as an experiment says it."""
    if protocol is None or isinstance(protocol, str):
        return {}
    if not isinstance(protocol, Mapping):
        raise ConfigError(f"protocol: got {protocol!r:.80}, expected one table with `local`: how clients train.")
    return {"local": dict(protocol["local"])} if "local" in protocol else {}


def _few(clients: Mapping[int, int]) -> str:
    numbers = sorted(clients)
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
