"""Any CSV, TSV or Parquet file with a column map; the separator is sniffed, well-known column names are guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

import polars as pl

from recleak.data.interactions import ITEM_FACTS, Interactions, Note
from recleak.data.lines import Tally
from recleak.data.text import (
    Field,
    Parse,
    head,
    other_separator,
    plausible,
    read_header,
    read_text,
    real,
    sniff_separator,
    spelled_dates,
    text,
    time,
)
from recleak.errors import DataError, RecleakError, unknown_name
from recleak.files import BROKEN, check_table, check_texts

Source = str | int  # a header's name, or a position counted from 0 in a file without a header
Kind = Literal["categorical", "continuous"]

GUESSES = {
    "user": ("user", "user_id", "userid", "uid", "reviewerid", "customer_id", "visitorid"),
    "item": ("item", "item_id", "itemid", "iid", "movieid", "movie_id", "asin", "product_id", "venue_id", "track_id"),
    "rating": ("rating", "score", "stars", "overall"),
    "time": ("time", "timestamp", "ts", "unix_time", "unixreviewtime", "datetime", "date"),
}
LIST_GUESSES = {
    "rank": ("rank", "position", "place"),
    "score": ("score", "rating", "prediction"),
    "session": ("session", "session_id", "day", "batch"),
}
FACT_GUESSES = {
    "title": ("title", "name", "movie_title"),
    "categories": ("categories", "category", "genres", "genre", "class"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon", "lng", "long"),
}
_CATEGORY_SEPARATOR = "|"
_NO_SEPARATOR = "\x1f"  # ASCII's own, which no text has


@dataclass(frozen=True, eq=False)
class Frame:
    """A table in memory in the place of a Parquet file; its name stands in messages."""

    name: str
    table: pl.DataFrame
    suffix: ClassVar[str] = ".parquet"

    def __str__(self) -> str:
        return self.name


Table = Path | Frame


@dataclass(frozen=True)
class ColumnMap:
    """Which column is what. `attributes` and `facts` belong to the user and the item file.

    What is None or empty is guessed: the columns from well-known names, `attributes` are all.
    """

    user: Source | None = None
    item: Source | None = None
    rating: Source | None = None
    time: Source | None = None
    separator: str | None = None
    user_id: Source | None = None
    attributes: Mapping[str, Kind | None] = field(default_factory=dict)
    item_id: Source | None = None
    facts: Mapping[str, Source] = field(default_factory=dict)


GUESSED = ColumnMap()


def read_columns(
    path: Table, columns: ColumnMap = GUESSED, *, users: Table | None = None, items: Table | None = None
) -> Interactions:
    """Interactions from one table, with user attributes and item facts from two more where they exist.

    Attributes default to all columns of the user file: a column of numbers is continuous, others are categorical, and
    so are numbers that begin with 0, such as zip codes.
    """
    for kind, table, given in (
        ("user", users, columns.user_id is not None or columns.attributes),
        ("item", items, columns.item_id is not None or columns.facts),
    ):
        if given and table is None:
            raise RecleakError(f"Columns of a table of {kind}s were named, but no such table: say --{kind}s FILE.")
    events, notes = read_events(path, columns)
    user_table = item_table = None
    if users is not None:
        user_table, more = read_users(users, columns)
        notes += more
    if items is not None:
        item_table, more = _read_facts(items, columns)
        notes += more
    return Interactions.build(events, user_table, item_table, notes)


def read_events(path: Table, columns: ColumnMap = GUESSED) -> tuple[pl.DataFrame, list[Note]]:
    """The rows of a table of interactions: user and item, and rating and time where there are such columns."""
    parsers: dict[str, Parse] = {"user": text, "item": text, "rating": real, "time": time}
    header = _header(path, columns)
    sources = {name: _source(path, name, columns, header) for name in parsers}
    wanted = [
        Field(name, source, parsers[name], name in ("user", "item"))
        for name, source in sources.items()
        if source is not None
    ]
    events, notes = read_fields(path, wanted, columns.separator)
    if "time" in events.columns:
        remedy = "If 0 means unknown, leave the field empty instead."
        notes.append(Note("times are 0, that is 1 January 1970", int((events["time"] == 0).sum()), remedy, path.name))
    return events, notes


def read_lists(path: Path, columns: ColumnMap = GUESSED) -> tuple[pl.DataFrame, list[Note]]:
    """Recommendation lists, a row for each place: user and item, then the session, and the rank from the best on.

    A column `rank` (or `position`, `place`) has the smallest first, a column `score` the largest; without either the
    order of rows counts. Without a `session` there is one. The result has session i64 and rank i64 from 0.
    """
    header = _header(path, columns)
    fields = [Field(name, _source(path, name, columns, header) or 0, text, True) for name in ("user", "item")]
    found = {name: _guess(header or (), guesses) for name, guesses in LIST_GUESSES.items()}
    fields += [Field(name, source, real) for name, source in found.items() if source is not None]
    table, notes = read_fields(path, fields, columns.separator)
    session = pl.col("session").fill_null(0).cast(pl.Int64) if "session" in table.columns else pl.lit(0, pl.Int64)
    order = pl.col("rank") if "rank" in table.columns else -pl.col("score") if "score" in table.columns else pl.lit(0.0)
    table = table.select("user", "item", session.alias("session"), order.cast(pl.Float64).alias("order"))
    table = table.with_row_index("row").sort("session", "user", "order", "row", nulls_last=True)
    twice = table.height - table.unique(["session", "user", "item"]).height
    if twice:
        notes.append(Note("items stand twice in a list; the first place counts", twice, file=path.name))
        table = table.unique(["session", "user", "item"], keep="first", maintain_order=True)
    rank = pl.int_range(pl.len()).over("session", "user").cast(pl.Int64)
    return table.select("user", "item", "session", rank.alias("rank")), notes


def _header(path: Table, columns: ColumnMap) -> list[str] | None:
    """The column names; None if the map speaks of positions."""
    if isinstance(columns.user, int) or isinstance(columns.item, int):
        return None
    return _names(path, columns.separator)


def _names(path: Table, separator: str | None) -> list[str]:
    if isinstance(path, Frame) or path.suffix == ".parquet":
        return _parquet(path).collect_schema().names()
    return read_header(path, _separator(path, separator))


def _source(path: Table, name: str, columns: ColumnMap, header: list[str] | None) -> Source | None:
    """Where a column of the interactions stands: as given, or guessed from well-known names."""
    given: Source | None = getattr(columns, name)
    found = _guess(header or (), GUESSES[name]) if given is None else given
    if found is None and name in ("user", "item"):
        remedy = f"Say it: --{name} NAME, or --{name} NUMBER (counted from 0) if the file has no header."
        raise _untold(path, name, columns, header, remedy)
    return found


def _key(path: Table, name: Literal["user", "item"], columns: ColumnMap, header: list[str]) -> Source:
    """Where the ids of a user or item table stand: as given, named as in the interactions, or guessed."""
    given: Source | None = getattr(columns, f"{name}_id")
    same: Source | None = getattr(columns, name)
    if given is None and isinstance(same, str) and same in header:
        given = same
    found = _guess(header, (*GUESSES[name], "id")) if given is None else given
    if found is None:
        raise _untold(path, name, columns, header, f"Say it: --{name}-id NAME.")
    return found


def _guess(header: Iterable[str], guesses: Iterable[str]) -> str | None:
    """The first of some names that is there, in whatever case."""
    lowered = {column.lower(): column for column in header}
    return next((lowered[guess] for guess in guesses if guess in lowered), None)


def _untold(path: Table, name: str, columns: ColumnMap, header: list[str] | None, remedy: str) -> DataError:
    problem = f"cannot tell which column is the {name}; there is {header or 'no header'!s:.500}"
    if header and columns.separator is not None and isinstance(path, Path) and path.suffix != ".parquet":
        separator = _separator(path, columns.separator)
        remedy = other_separator(separator.join(header), separator) + remedy
    return DataError(problem, file=str(path), line=1 if isinstance(path, Path) else None, remedy=remedy)


def _separator(path: Path, given: str | None) -> str:
    if given is not None:
        separator = given.replace("\\t", "\t")
        if not separator or any(char in separator for char in '"\r\n'):
            remedy = "Say another: ',' ';' '|' '::' or '\\t'; without quotes and line ends."
            raise DataError(f"the separator cannot be {separator!r}", file=path, remedy=remedy)
        return separator
    lines = head(path)
    found = sniff_separator(lines)
    if found is None:
        raise DataError(
            f"cannot tell the separator from the first lines, such as {lines[0][:100]!r}",
            file=path,
            line=1,
            remedy="Say it: --separator ',' (or ';', '|', '::', '\\t').",
        )
    return found


def _parquet(path: Table) -> pl.LazyFrame:
    """A Parquet file, of which nothing but its end was read."""
    if isinstance(path, Frame):
        return path.table.lazy()
    if not path.is_file():
        raise DataError("no such file", file=path, remedy="Check the path.")
    check_table(path)
    return pl.scan_parquet(path, glob=False)


def read_fields(path: Table, wanted: Sequence[Field], separator: str | None) -> tuple[pl.DataFrame, list[Note]]:
    """The wanted columns of a text or Parquet file."""
    if isinstance(path, Path) and path.suffix != ".parquet":
        header = not any(isinstance(each.source, int) for each in wanted)
        return read_text(path, wanted, separator=_separator(path, separator), header=header, quoted=True)
    scan = _parquet(path)
    schema = scan.collect_schema()
    names = schema.names()
    lacking = [each.source for each in wanted if each.source not in names]
    if lacking:
        raise DataError(
            f"no column {lacking!s:.500}; there is {names!s:.500}", file=str(path), remedy="Name the right columns."
        )
    for each in wanted:
        if (dtype := schema[str(each.source)]).is_nested() and not (each.lists and isinstance(dtype, pl.List)):
            problem = f"a column cannot be used: {each.source!r:.80} is {dtype!s:.80}, expected plain values"
            raise DataError(problem, file=str(path), remedy="Mend it, or leave it out.")
    try:
        columns = [pl.col(str(each.source)).alias(each.name) for each in wanted]
        table = scan.select(columns).collect(engine="streaming")
        if isinstance(path, Path):
            check_texts(table, path)
        return _typed(table, wanted, path)
    except BROKEN as error:
        raise DataError(f"a column cannot be used ({error!s:.300})", file=str(path), remedy="Mend it.") from error


def _typed(table: pl.DataFrame, wanted: Sequence[Field], path: Table) -> tuple[pl.DataFrame, list[Note]]:
    """Columns of a typed file as if they had been read from text; the line of a note is the row, counted from 1."""
    if table.is_empty():
        raise DataError("there are columns but no row", file=str(path), remedy="Check that the export was complete.")
    tally = Tally(path.name, rows=table.height)
    dropped = pl.repeat(False, table.height, eager=True)
    columns = []
    for each in wanted:
        given = _content(table[each.name])
        values = _values(given, each).rename(each.name)
        bad = values.is_null() if each.required else values.is_null() & given.is_not_null()
        if bad.any() and not dropped.any():
            at = int(bad.arg_max() or 0)
            tally.reject(at + 1, str(given[at]), f"{each.name} cannot be used")
        dropped |= bad
        columns.append(values)
    tally.bad = int(dropped.sum())
    tally.check()
    return pl.DataFrame(columns).filter(~dropped), tally.notes(latin_expected=False)


def _content(values: pl.Series) -> pl.Series:
    """Values without what text cannot tell from nothing: NaN, blanks around, the empty string."""
    if values.dtype.is_float():
        return values.fill_nan(None)
    if values.dtype.is_numeric() or values.dtype.is_temporal() or isinstance(values.dtype, pl.List):
        return values
    values = values.cast(pl.String).str.strip_chars()
    return values.set(values == "", None)


def _values(given: pl.Series, each: Field) -> pl.Series:
    """One column in our types."""
    if each.parse is real and given.dtype.is_numeric():
        return real(given)
    if each.parse is time and given.dtype.is_temporal():
        return plausible(given.cast(pl.Datetime("us")).dt.epoch("s"))
    if each.parse is time:
        return spelled_dates(time(given.cast(pl.String)))
    if each.parse is not text:
        return each.parse(given.cast(pl.String))
    if each.required and given.dtype.is_float():  # ids that had to be floats because some were missing
        whole = given.cast(pl.Int64, strict=False)
        return whole if (whole == given).all() else given.cast(pl.String)
    return given if given.dtype.is_numeric() or each.lists else given.cast(pl.String)


def read_users(path: Table, columns: ColumnMap = GUESSED) -> tuple[pl.DataFrame, list[Note]]:
    """A table of users: `id`, and their attributes."""
    names = _names(path, columns.separator)
    key = _key(path, "user", columns, names)
    kinds = dict(columns.attributes) or dict.fromkeys((name for name in names if name != key), None)
    parsers: dict[str | None, Parse] = {"continuous": real}
    fields = [Field("id", key, required=True)]
    fields += [Field(name, name, parsers.get(kind, text)) for name, kind in kinds.items()]
    table, notes = read_fields(path, fields, columns.separator)
    for name, kind in kinds.items():
        values = table[name]
        if kind == "categorical":
            table = table.with_columns(pl.col(name).cast(pl.String))
        elif kind is None and values.dtype == pl.String and _looks_continuous(values):
            table = table.with_columns(real(values))
    return table, notes


def _looks_continuous(values: pl.Series) -> bool:
    """Numbers throughout, and none like the zip code 02139."""
    numbers = real(values).null_count() == values.null_count() < len(values)
    return numbers and not values.str.contains("^0[0-9]").any()


def read_ids(path: Path, name: Literal["user", "item"], columns: ColumnMap = GUESSED) -> list[str]:
    """A column of ids in the order of rows; a file with nothing else needs no header."""
    separator = columns.separator
    if path.suffix != ".parquet" and separator is None and sniff_separator(head(path)) is None:
        separator = _NO_SEPARATOR
    names = _names(path, separator)
    given: Source | None = getattr(columns, name)
    found = _guess(names, (*([given] if isinstance(given, str) else []), *GUESSES[name], f"{name}s", "id", "ids"))
    if found is None and len(names) > 1:
        raise _untold(path, name, columns, names, f"Say it: --{name} NAME.")
    alone = 0 if path.suffix != ".parquet" else names[0]
    table, _ = read_fields(path, [Field(name, alone if found is None else found, text, True)], separator)
    return [str(each) for each in table[name].to_list()]


def kinds_of(attributes: Sequence[str]) -> dict[str, Kind | None]:
    """Attributes as they are typed: `NAME`, `NAME:continuous` or `NAME:categorical`."""
    kinds: dict[str, Kind | None] = {}
    for each in attributes:
        name, _, kind = each.partition(":")
        if kind not in ("", *get_args(Kind)):
            raise RecleakError(f"--attribute {each}: the kind is {kind!r}, expected categorical or continuous.")
        kinds[name] = "categorical" if kind == "categorical" else "continuous" if kind == "continuous" else None
    return kinds


def _read_facts(path: Table, columns: ColumnMap) -> tuple[pl.DataFrame, list[Note]]:
    names = _names(path, columns.separator)
    key = _key(path, "item", columns, names)
    guessed = {name: _guess(names, guesses) for name, guesses in FACT_GUESSES.items()}
    facts = columns.facts or {name: source for name, source in guessed.items() if source is not None}
    fields = [Field("id", key, required=True)]
    for name, source in facts.items():
        if name not in ITEM_FACTS:
            raise unknown_name("item fact", name, ITEM_FACTS)
        fields.append(
            Field(name, source, real if ITEM_FACTS[name].is_float() else text, lists=ITEM_FACTS[name].is_nested())
        )
    table, notes = read_fields(path, fields, columns.separator)
    if isinstance(key, str):  # there is a header
        unused = [name for name in names if name != key and name not in facts.values()]
        remedy = f"To use one, say which fact it is: --fact FACT=NAME, with {', '.join(ITEM_FACTS)}."
        notes.append(Note(f"columns are not used: {', '.join(unused)}", len(unused), remedy, path.name))
    if not isinstance(table.schema.get("categories", pl.List(pl.String)), pl.List):
        table = table.with_columns(pl.col("categories").cast(pl.String).str.split(_CATEGORY_SEPARATOR))
    return table, notes
