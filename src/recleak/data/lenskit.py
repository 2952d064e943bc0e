"""LensKit's own data sets, as `Dataset.save` of LensKit 2025 and later writes them: `schema.json` and Parquet.

There is a Parquet file for each class of entities (`user`, `item`) and of relationships (such as `rating`).

A row of a relationship names users and items by the row in their entity's file: `user_num`, `item_num`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import polars as pl
import pydantic

from recleak.data.columns import FACT_GUESSES, read_fields
from recleak.data.interactions import ITEM_FACTS, Interactions, Note
from recleak.data.text import Field, Parse, real, text, time
from recleak.errors import DataError
from recleak.files import read_bytes
from recleak.strict_json import parse_json

SCHEMA = "schema.json"
_Name = Annotated[str, pydantic.StringConstraints(pattern=r"^\w+$", max_length=100)]  # it becomes the name of a file


class _Column(pydantic.BaseModel):
    layout: str = "scalar"


class _Entity(pydantic.BaseModel):
    attributes: dict[_Name, _Column] = {}


class _Relationship(pydantic.BaseModel):
    entities: dict[_Name, _Name | None]
    interaction: bool = False
    attributes: dict[_Name, _Column] = {}


class _Schema(pydantic.BaseModel):
    default_interaction: _Name | None = None
    entities: dict[_Name, _Entity]
    relationships: dict[_Name, _Relationship]

    def interaction(self) -> str:
        """The class of interactions: the default one, or the only one."""
        found = [name for name, each in self.relationships.items() if each.interaction]
        if self.default_interaction in self.relationships:
            return str(self.default_interaction)
        if len(found) != 1:
            raise ValueError(
                f"there are {len(found)} classes of interactions ({', '.join(found)}), none is the default"
            )
        return found[0]


def is_lenskit(folder: Path) -> bool:
    """Whether a folder looks like such a data set."""
    return (folder / SCHEMA).is_file() and (folder / "user.parquet").is_file() and (folder / "item.parquet").is_file()


def read_lenskit(folder: Path) -> Interactions:
    """The default interactions of a data set, with the scalar attributes of users and known facts of items."""
    path = folder / SCHEMA
    try:
        schema = _Schema.model_validate(parse_json(read_bytes(path)))
        name = schema.interaction()
        relationship = schema.relationships[name]
        sides = {kind: _alias(relationship, kind) for kind in ("user", "item")}
    except (OSError, ValueError) as error:
        remedy = "Give a folder that Dataset.save of LensKit 2025 or later wrote."
        raise DataError(f"not a schema of LensKit ({error!s:.300})", file=path, remedy=remedy) from error
    fields = [Field(f"{kind} row", f"{alias}_num", text, True) for kind, alias in sides.items()]
    parsers: dict[str, tuple[str, Parse]] = {"rating": ("rating", real), "timestamp": ("time", time)}
    fields += [
        Field(ours, theirs, parse) for theirs, (ours, parse) in parsers.items() if theirs in relationship.attributes
    ]
    events, notes = read_fields(_table(folder, name), fields, None)
    unused = [each for each in relationship.attributes if each not in parsers]
    notes.append(Note(f"attributes of {name} are not used: {', '.join(unused)}", len(unused), file=f"{name}.parquet"))
    tables = {}
    for kind in ("user", "item"):
        tables[kind], more = _entities(folder, kind, schema.entities.get(kind, _Entity()))
        notes += more
        code = events[f"{kind} row"]
        if not code.dtype.is_integer() or not bool(code.is_between(0, tables[kind].height - 1).all()):
            span = f"{kind}_num is {code.dtype} from {code.min()!r} to {code.max()!r}"
            problem = f"{span}, {kind}.parquet has {tables[kind].height:,} rows"
            raise DataError(problem, file=folder / f"{name}.parquet", remedy="Save the data set again.")
        events = events.with_columns(tables[kind]["id"].gather(code).alias(kind))
    return Interactions.build(events.drop("user row", "item row"), tables["user"], tables["item"], notes)


def _alias(relationship: _Relationship, kind: str) -> str:
    """What a class of entities is called in a relationship."""
    found = [alias for alias, entity in relationship.entities.items() if kind == (entity or alias)]
    if len(found) != 1:
        raise ValueError(
            f"the interactions are between {', '.join(relationship.entities)}, expected a user and an item"
        )
    return found[0]


def _entities(folder: Path, kind: str, entity: _Entity) -> tuple[pl.DataFrame, list[Note]]:
    """Ids and what is known of users or items; no row may go, because interactions name them by their place."""
    path = _table(folder, kind)
    facts = {guess: fact for fact, guesses in FACT_GUESSES.items() for guess in guesses}
    fields, unused = {"id": Field("id", f"{kind}_id", text, True)}, []
    for name, column in entity.attributes.items():
        ours = facts.get(name.lower()) if kind == "item" else name
        lists = column.layout == "list" and ours == "categories"
        if ours is None or ours in fields or (column.layout != "scalar" and not lists):
            unused.append(name)
            continue
        number = kind == "item" and ITEM_FACTS[ours].is_float()
        fields[ours] = Field(ours, name, real if number else text, lists=lists and kind == "item")
    table, notes = read_fields(path, list(fields.values()), None)
    if notes:
        raise DataError(f"a row cannot be used: {notes[0]}", file=path, remedy="Mend or delete it in LensKit.")
    if "categories" in table.columns and kind == "item" and not isinstance(table.schema["categories"], pl.List):
        table = table.with_columns(pl.col("categories").cast(pl.String).str.split("|"))
    return table, [Note(f"attributes of {kind}s are not used: {', '.join(unused)}", len(unused), file=path.name)]


def _table(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"
