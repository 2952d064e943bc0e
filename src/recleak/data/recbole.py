"""RecBole's atomic files: NAME.inter, and where they exist NAME.user and NAME.item.

Tab separated; the header names a column and its type, `age:float`. Types: token, token_seq (blank separated), float,
float_seq.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from recleak.data.columns import FACT_GUESSES
from recleak.data.interactions import Interactions, Note
from recleak.data.text import Field, Parse, read_header, read_text, real, text, time
from recleak.errors import DataError

_TYPES = ("token", "token_seq", "float", "float_seq")
_EVENT = {"user_id": "user", "item_id": "item", "rating": "rating", "timestamp": "time"}
_USER = {"user_id": "id"}
_ITEM = {"item_id": "id", **{guess: fact for fact, guesses in FACT_GUESSES.items() for guess in guesses}}


def read_recbole(path: Path) -> Interactions:
    """The atomic files of one data set: its `.inter` file, or the folder that holds one.

    All columns of the `.user` file are attributes: a float is continuous, all else is categorical.
    """
    if path.is_dir():
        found = sorted(path.glob("*.inter"))
        if len(found) != 1:
            names = ", ".join(each.name for each in found) or "none"
            raise DataError(f"expected one .inter file, found {names}", file=path, remedy="Name the file itself.")
        path = found[0]
    events, notes = _read(path, _EVENT)
    users = items = None
    if (side := path.with_suffix(".user")).is_file():
        users, more = _read(side, _USER, others=True)
        notes += more
    if (side := path.with_suffix(".item")).is_file():
        items, more = _read(side, _ITEM)
        notes += more
    return Interactions.build(events, users, items, notes)


def _read(path: Path, names: Mapping[str, str], others: bool = False) -> tuple[pl.DataFrame, list[Note]]:
    """The columns in `names` under our names (of several for one of ours the first), maybe all others under theirs."""
    fields: dict[str, Field] = {}
    header = read_header(path, "\t", quoted=False)
    theirs = [column.partition(":")[0] for column in header]
    for column in header:
        name, _, kind = column.partition(":")
        if kind not in _TYPES:
            raise DataError(
                f"the header field {column!r} is not NAME:TYPE with a type of {', '.join(_TYPES)}",
                file=path,
                line=1,
                remedy="Give a RecBole atomic file (tab separated), or read it as plain CSV with a column map.",
            )
        if theirs.count(name) > 1 or (others and name in names.values()):
            problem = f"the name {name!r} is taken: by another column, or by the key"
            raise DataError(problem, file=path, line=1, remedy="Rename or delete the column.")
        if name in names:
            ours = names[name]
            fields.setdefault(ours, Field(ours, column, _parser(ours, kind), name in ("user_id", "item_id")))
        elif others:
            fields[name] = Field(name, column, real if kind == "float" else text)
    lacking = [name for name in ("user_id", "item_id") if name in names and name not in theirs]
    if lacking:
        remedy = "RecBole names its keys user_id and item_id; rename the columns."
        raise DataError(f"no column {lacking}; there is {theirs}", file=path, line=1, remedy=remedy)
    return read_text(path, list(fields.values()), separator="\t", header=True)


def _parser(name: str, kind: str) -> Parse:
    """How a column of ours is read; its type in the file matters for categories only."""
    if name == "categories":
        return _words if kind.endswith("_seq") else _one_word
    return {"rating": real, "time": time, "latitude": real, "longitude": real}.get(name, text)


def _words(values: pl.Series) -> pl.Series:
    """Words with blanks between them."""
    return values.str.extract_all(r"\S+")


def _one_word(values: pl.Series) -> pl.Series:
    """A text, as a list of one."""
    return values.str.split("\t")  # there is none: it separates the columns
