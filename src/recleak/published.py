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
from recleak.experiment import Experiment
from recleak.files import read_bytes, refuse_links, replace_table

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
    shown = lists.select(_ids("user"), _ids("item"))
    whole = data_of(shown, people, [*notes, *more], interactions, columns, f"a list in {recommendations.name}")
    chosen = chosen_attributes(whole, attributes, users)
    data = stored_data(whole, folder, recommendations.stem)
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


def data_of(
    pairs: pl.DataFrame,
    people: pl.DataFrame,
    notes: Sequence[Note],
    interactions: Path | None,
    columns: ColumnMap,
    output: str,
) -> Interactions:
    """Users and items of some outputs (user, item), with what users did as rows; without that, the outputs as rows."""
    events, told = [pairs.with_columns(pl.lit(0.0).alias("rating"))], list(notes)
    if interactions is not None:
        did, more = read_events(interactions, columns)
        told += more
        events.append(did.select(_ids("user"), _ids("item"), pl.lit(1.0).alias("rating")))
    whole = Interactions.build(pl.concat(events), people, notes=told)
    rows, kept = whole.rows, list(whole.notes)
    if interactions is not None:
        rows = rows.filter(rows["rating"] == 1)
        without = len(set(events[1]["user"]) - set(pairs["user"]))
        kept.append(Note(f"users with interactions but without {output}; they are not graded", without))
    kept = [note for note in kept if note.count]
    return Interactions(rows.drop("rating").rechunk(), whole.users, whole.items, tuple(kept))


def stored_data(whole: Interactions, folder: Path, name: str) -> Path:
    """The data of an audit in its run directory; other notes on the same data are another folder."""
    check_folder(folder)
    told = hashlib.sha256("\n".join([whole.fingerprint, *map(str, whole.notes)]).encode()).hexdigest()
    data = folder / GIVEN / f"data-{told[:12]}"
    if not (data / store.MANIFEST).exists():
        store.save(whole, data, name=name)
    return data


def check_folder(folder: Path) -> None:
    """An error, before anything is written, if a folder has links in it, or is not a run directory and not empty."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file, expected a run directory.\n  Give another place with --out.")
    refuse_links(folder)
    others = [each.name for each in folder.iterdir() if each.name not in (".lock", GIVEN)]
    others = [name for name in others if not name.endswith(".partial")]  # of a process that was killed while it wrote
    if others and not _is_run(folder):
        raise ConfigError(
            f"{folder} holds other things ({', '.join(sorted(others)[:3])}), expected a run or an empty folder.\n"
            "  Nothing is overwritten: give another folder with --out."
        )


def _is_run(folder: Path) -> bool:
    try:
        Experiment.model_validate_json(read_bytes(folder / "experiment.json", 1 << 30))
    except (OSError, ValueError, RecursionError):
        return False
    return True


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


def chosen_attributes(data: Interactions, wanted: Sequence[str], file: Path) -> list[str]:
    """The attributes that are asked about: as given, or all numbers, and all whose classes are few enough."""
    kinds = data.attributes
    for name in wanted:
        if name not in kinds:
            raise unknown_name(f"attribute in {file.name}", name, kinds)
    problems = {name: _problem(data.users[name], kind) for name, kind in kinds.items()}
    able = [name for name, problem in problems.items() if not problem]
    if not (wanted or able):
        found = "; ".join(f"{name}: {problem}" for name, problem in problems.items()) or "no column beside the ids"
        raise ConfigError(
            f"{file}: no column that could be inferred ({found}), expected one with classes, such as gender, or a "
            f"number, known of at least {LEAST} users.\n"
            "  Give a table with more, or name a column that is to be tried all the same: --attribute NAME."
        )
    return list(wanted) or able


def _problem(values: pl.Series, kind: str) -> str:
    """Why a column is not asked about, if so: names and zip codes have too many values to be told apart."""
    known = values.drop_nulls()
    if len(known) < LEAST:
        return f"known of {len(known)} users"
    if known.n_unique() < 2:
        return "the same for all users"
    if kind == "categorical" and known.n_unique() > max(2, len(known) // LEAST):
        return f"{known.n_unique():,} values for {len(known):,} users"
    return ""


def _ids(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.String)
