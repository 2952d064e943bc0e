"""An audit of plain outputs: recommendation lists of any system, users with attributes, and maybe what they did.

Nothing is trained but the attacker. Files become a data set and a table of lists in the run directory, and an ordinary
experiment on them: the same attacks, nulls, intervals and report as for systems that are trained here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from recleak.cells import GIVEN
from recleak.data import store
from recleak.data.columns import GUESSED, ColumnMap, read_events, read_lists, read_users
from recleak.data.interactions import Interactions, Note
from recleak.errors import ConfigError, unknown_name
from recleak.files import replace_table

LEAST = 20  # graded and known users with an attribute below which nothing is tried
_LOGISTIC = {"use": "logistic", "C": 10.0, "prepare": {"scale": "unit", "reduce": "none"}}
_LEARNERS = {
    "logistic": _LOGISTIC,
    "network": {"use": "network", "hidden": [100], "members": 1},
    "bayes": {"use": "bayes"},
}


def experiment_of(
    recommendations: Path,
    users: Path,
    interactions: Path | None,
    folder: Path,
    *,
    attributes: Sequence[str] = (),
    known: float = 0.5,
    columns: ColumnMap = GUESSED,
) -> dict[str, Any]:
    """The experiment on some files, as a table; what it needs is written into the folder."""
    lists, notes = read_lists(recommendations, columns)
    people, more = read_users(users, columns)
    notes += more
    pairs = [lists.select(_ids("user"), _ids("item"), pl.lit(0.0).alias("rating"))]
    if interactions is not None:
        events, more = read_events(interactions, columns)
        notes += more
        pairs.append(events.select(_ids("user"), _ids("item"), pl.lit(1.0).alias("rating")))
    whole = Interactions.build(pl.concat(pairs), people, notes=notes)
    if interactions is not None:
        shown = set(lists["user"].cast(pl.String))
        both = whole.rows["rating"].to_numpy() == 1
        unlisted = len(set(pairs[1]["user"]) - shown)
        notes = [
            Note("users with interactions but without a list; they are not graded", unlisted, file=recommendations.name)
        ]
        whole = Interactions(whole.rows.filter(both), whole.users, whole.items, (*whole.notes, *notes))
    whole = Interactions(
        whole.rows.drop("rating").rechunk(), whole.users, whole.items, tuple(n for n in whole.notes if n.count)
    )
    chosen = _chosen(whole, attributes, users)
    data = folder / GIVEN / f"data-{whole.fingerprint[:12]}"
    if not (data / store.MANIFEST).exists():
        store.save(whole, data, name=recommendations.stem)
    table = lists.select(_ids("user"), _ids("item"), "session", "rank")
    digest = hashlib.sha256(table.write_ipc(None, compression="uncompressed").getvalue()).hexdigest()[:16]
    file = folder / GIVEN / f"lists-{digest}.parquet"
    if not file.exists():
        replace_table(file, table)
    history = interactions is not None
    return {
        "title": f"Lists of {recommendations.name}",
        "data": {"name": str(data)},
        "model": {"use": "unknown", "name": "any recommender"},
        "protocol": {
            "use": "published",
            "name": "lists as given",
            "lists": str(file),
            "digest": digest,
            "history": history,
            "sessions": int(lists["session"].n_unique()),
        },
        "defenses": [{"use": "none", "name": recommendations.stem}],
        "attacks": _attacks(history),
        "attributes": chosen,
        "known": known,
    }


def _attacks(history: bool) -> list[dict[str, Any]]:
    """Lists alone by several learners; with a history, both together too."""
    found = [
        {"use": "from-lists", "name": f"lists, {name}", "history": False, "learner": learner}
        for name, learner in _LEARNERS.items()
    ]
    if history:
        found += [
            {"use": "from-lists", "name": f"lists and history, {name}", "learner": learner}
            for name, learner in _LEARNERS.items()
        ]
    return found


def _chosen(data: Interactions, wanted: Sequence[str], file: Path) -> list[str]:
    """The attributes that are asked about: as given, or all that have classes."""
    kinds = data.attributes
    for name in wanted:
        if name not in kinds:
            raise unknown_name(f"attribute in {file.name}", name, kinds)
    able = [name for name, kind in kinds.items() if kind == "categorical" or name == "age"]
    able = [name for name in able if data.users[name].drop_nulls().n_unique() > 1 and _enough(data.users[name])]
    if not (wanted or able):
        raise ConfigError(
            f"{file}: no column that could be inferred, got {', '.join(kinds) or 'none'} beside the users' ids; "
            "expected one with classes, such as gender.\n  Numbers other than `age` have to be cut into groups first."
        )
    return list(wanted) or able


def _enough(values: pl.Series) -> bool:
    """Whether classes are few enough to be told apart: names and zip codes are not."""
    known = values.drop_nulls()
    return len(known) >= LEAST and (known.dtype.is_float() or known.n_unique() <= max(2, len(known) // LEAST))


def _ids(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.String)
