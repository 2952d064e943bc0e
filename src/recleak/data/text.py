"""Delimited text into tables: streamed in blocks, every row that cannot be used counted and shown with its line.

A row with the wrong number of fields, an empty required field or a value that does not parse is dropped and counted;
more than `lines.MAX_BAD_SHARE` of such rows is an error, because then the file is probably not what it was taken for.
Blanks around a field are not part of it, in quotes or not, unless it is read `verbatim`.
Memory is bounded by the block and the parsed columns.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import polars as pl

from recleak.data.interactions import Note
from recleak.data.lines import BLANK, LineFeed, Tally, pieces
from recleak.errors import DataError

_UNIT = b"\x1f"  # ASCII's own separator of fields
SEPARATORS = ("\t", "::", "|", ";", ",", " ")
_FIRST_TIME = int(datetime(1900, 1, 1, tzinfo=UTC).timestamp())
_LAST_TIME = int(datetime(2201, 1, 1, tzinfo=UTC).timestamp()) - 1
_WIDEST = 10_000  # fields in a row: each costs memory of its own in every block
JSON_BYTES = 1 << 20  # of a line of JSON
_AGREEMENT = 0.9  # of the lines must have as many fields as the first

Parse = Callable[[pl.Series], pl.Series]


def text(values: pl.Series) -> pl.Series:
    """Any text."""
    return values


def verbatim(values: pl.Series) -> pl.Series:
    """Any text, with the blanks around it."""
    return values


def integer(values: pl.Series) -> pl.Series:
    """A whole number."""
    return values.cast(pl.Int64, strict=False)


def real(values: pl.Series) -> pl.Series:
    """A finite number."""
    numbers = values.cast(pl.Float64, strict=False)
    return numbers.set(~numbers.is_finite(), None)


def time(values: pl.Series) -> pl.Series:
    """A time from 1900 to 2200: Unix seconds, ISO 8601, or `Tue Apr 03 18:00:09 +0000 2012`.

    Milli-, micro- and nanoseconds are told by their size; for 20240131 see `spelled_dates`. Gives UTC seconds.
    """
    numbers = values.cast(pl.Float64, strict=False)
    for _ in range(3):  # milli-, micro-, nanoseconds
        numbers = (numbers / 1000).zip_with(numbers.abs() > 1e11, numbers)
    seconds = numbers.floor().cast(pl.Int64, strict=False)
    if seconds.null_count() == values.null_count():
        return plausible(seconds)
    spaced = values.str.replace("Z$", "+00:00").str.replace("T", " ", literal=True)
    iso = pl.lit(spaced.str.replace(r"^(\S+ \d\d:\d\d)([+-]\S+)?$", "${1}:00${2}"))
    zoned = iso.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%:z", time_zone="UTC", strict=False).dt.epoch("s")
    naive = iso.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", strict=False).dt.epoch("s")
    day = iso.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime).dt.epoch("s")
    tweet = pl.lit(values).str.to_datetime("%a %b %d %H:%M:%S %z %Y", time_zone="UTC", strict=False).dt.epoch("s")
    return plausible(pl.select(pl.coalesce(pl.lit(seconds), zoned, naive, day, tweet).alias(values.name)).to_series())


def plausible(seconds: pl.Series) -> pl.Series:
    """UTC seconds without those before 1900 or after 2200."""
    return seconds.set(~seconds.is_between(_FIRST_TIME, _LAST_TIME), None)


def spelled_dates(seconds: pl.Series) -> pl.Series:
    """A whole column of times; if all are numbers that spell a date, such as 20240131 (August 1970), these dates."""
    if not seconds.is_between(1900_01_01, 2200_12_31).all():
        return seconds
    days = seconds.cast(pl.String).str.to_date("%Y%m%d", strict=False)
    return days.cast(pl.Datetime).dt.epoch("s") if days.null_count() == seconds.null_count() else seconds


@dataclass(frozen=True)
class Field:
    """A column to read: its name with us, where it stands (a header's name or a position), how it parses."""

    name: str
    source: str | int
    parse: Parse = text
    required: bool = False
    lists: bool = False  # in a typed file it may have lists


def read_text(
    path: Path,
    fields: Sequence[Field],
    *,
    separator: str,
    header: bool,
    width: int | None = None,
    quoted: bool = False,
    latin_expected: bool = False,
) -> tuple[pl.DataFrame, list[Note]]:
    """The named fields of a delimited file, parsed, and notes on what was skipped.

    `width` is the number of fields in a row (default: that of the header, or of the first row). `quoted` reads fields
    in double quotes as CSV does; without it a quote is a character like any other.
    """
    quoted = quoted and len(separator) == 1  # the csv module cannot do others
    tally = Tally(path.name)
    feed = _open(path, tally)
    first = feed.line + 1
    names = _names(feed if header else _open(path, Tally(path.name)), separator, quoted)
    if header and feed.peek() is None:
        remedy = "Check that the export was complete."
        raise DataError("there is a header but no row", file=path, line=first, remedy=remedy)
    width = width or len(names)
    counts = Counter(names if header else [])
    positions = [_position(path, each, names if header else [], counts, width, separator, first) for each in fields]
    ours = [each.name for each in fields]
    if twice := sorted(name for name, count in Counter(ours).items() if count > 1):
        raise DataError(f"two columns are called {twice[0]!r}", file=path, line=first, remedy="Rename one of them.")
    parts = [
        _parse(batch, fields, width, separator, tally) for batch in _batches(feed, positions, separator, width, quoted)
    ]
    if tally.first_bad is not None:
        tally.check(other_separator(tally.first_bad[2], separator))
    return _joined(parts, fields), tally.notes(latin_expected)


def read_header(path: Path, separator: str, quoted: bool = True) -> list[str]:
    """The fields of the first row."""
    return _names(_open(path, Tally(path.name)), separator, quoted and len(separator) == 1)


def head(path: Path, lines: int = 50) -> list[str]:
    """The first lines of a file, for sniffing."""
    feed = _open(path, Tally(path.name))
    found: list[str] = []
    while len(found) < lines and (line := feed.peek()) is not None:
        found.append(line)
        feed.skip()
    return found


def sniff_separator(lines: Sequence[str]) -> str | None:
    """The separator that cuts nearly all lines into as many fields as the first, at least two; the most fields win."""
    best, most = None, 1
    for separator in SEPARATORS:
        widths = [len(row) for row in _cut(lines, separator)]
        if widths.count(widths[0]) >= _AGREEMENT * len(widths) and widths[0] > most:
            best, most = separator, widths[0]
    return best


def _cut(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Lines into rows; the last one goes if `lines` end inside its quotes."""
    quotes = sum(line.count('"') for line in lines)
    if quotes and len(separator) == 1:
        try:
            rows = list(csv.reader([line + "\n" for line in lines], delimiter=separator))
            return rows[:-1] if quotes % 2 and len(rows) > 1 else rows
        except csv.Error:
            pass
    return [line.split(separator) for line in lines]


def other_separator(line: str, separator: str) -> str:
    """A hint, if a line looks as if it were separated by something else."""
    other = sniff_separator([line])
    return f"The separator looks like {other!r}, not {separator!r}. " if other and other != separator else ""


def _open(path: Path, tally: Tally) -> LineFeed:
    """A file at its first line that is not blank."""
    feed = LineFeed(path, tally)
    if feed.peek() is None:
        raise DataError("the file is empty", file=path, remedy="Check that the download or export was complete.")
    return feed


def _names(feed: LineFeed, separator: str, quoted: bool) -> list[str]:
    """Takes the first row."""
    row = _csv_row(feed, _csv_reader(feed, separator), separator) if quoted else next(feed).split(separator)
    if len(row) > _WIDEST:
        problem = f"a row of {len(row):,} fields, expected at most {_WIDEST:,}"
        raise DataError(problem, file=feed.path, line=feed.line, remedy="Check the separator, or drop some columns.")
    return [name.strip().strip('"') for name in row]


def _csv_reader(feed: LineFeed, separator: str) -> Iterator[list[str]]:
    return csv.reader(feed, delimiter=separator, strict=True)


def _csv_row(feed: LineFeed, reader: Iterator[list[str]], separator: str) -> list[str]:
    """Takes the next row; in a line with quotes where CSV has none they are characters like any other."""
    start, line = feed.line + 1, feed.next_line()
    try:
        return next(reader)
    except csv.Error as error:
        if feed.line == start and line.count('"') % 2 == 0:
            return line.split(separator)
        remedy = "A quote was probably opened and not closed; mend the line."
        raise DataError(f"not readable as CSV ({error})", file=feed.path, line=start, remedy=remedy) from error


@dataclass(frozen=True)
class _Batch:
    """Rows cut into fields: B rows."""

    cells: list[pl.Series]  # str[B] for each wanted field
    ragged: pl.Series | None  # u32[B] fields per row; None if every row has the right number
    where: Callable[[int], tuple[int, str]]  # the line number and the content of a row, for messages


def _batches(feed: LineFeed, positions: Sequence[int], separator: str, width: int, quoted: bool) -> Iterator[_Batch]:
    """Block by block; the csv module cuts those blocks that have quotes, polars all others."""
    while feed.peek() is not None:
        if not (quoted and b'"' in feed.block):
            number, body = feed.rest()
            if (even := _even(number, body, positions, separator, width)) is not None:
                yield even
                continue
            for first, piece in pieces(number, body):  # a block of very short lines is many rows
                yield _uneven(first, piece, positions, separator, width, feed.tally)
            continue
        reader = _csv_reader(feed, separator)
        numbers: list[int] = []
        rows: list[list[str]] = []
        while feed.more:
            if feed.next_line().strip(BLANK):
                numbers.append(feed.line + 1)
                rows.append(_csv_row(feed, reader, separator))
            else:
                feed.tally.blank += 1
                feed.skip()
        columns = [[row[at] if at < len(row) else None for row in rows] for at in positions]
        widths = pl.Series([len(row) for row in rows], dtype=pl.UInt32)
        where = partial(_row, numbers, [separator.join(row) for row in rows])
        yield _Batch([pl.Series(column, dtype=pl.String) for column in columns], widths, where)


def _row(numbers: Sequence[int], content: Sequence[str], at: int) -> tuple[int, str]:
    return numbers[at], content[at]


def _even(number: int, body: bytes, positions: Sequence[int], separator: str, width: int) -> _Batch | None:
    """The quick way: if no row has more fields and the separators are as many as they should be, none has fewer."""
    rows, mark, single = body.count(b"\n"), separator.encode(), body
    if len(mark) > 1 and _UNIT not in body:  # polars separates by one byte
        single, mark = body.replace(mark, _UNIT), _UNIT
    if len(mark) > 1 or width == 1 or single.count(mark) != rows * (width - 1):
        return None
    schema = {f"field_{position}": pl.String for position in range(width)}
    try:
        table = pl.read_csv(single, has_header=False, separator=mark.decode(), quote_char=None, schema=schema)
    except pl.exceptions.PolarsError:
        return None
    if table.height != rows or (table["field_0"].fill_null("").str.strip_chars(BLANK) == "").any():  # maybe blank lines
        return None
    cells = [table[f"field_{position}"] for position in positions]
    return _Batch(cells, None, lambda at: (number + at, body.split(b"\n")[at].decode()))


def _uneven(number: int, body: bytes, positions: Sequence[int], separator: str, width: int, tally: Tally) -> _Batch:
    """Any lines: blank ones, too many fields, too few, separators of several characters."""
    content = pl.Series(body.decode().removesuffix("\n").split("\n"), dtype=pl.String)
    filled = content.str.strip_chars(BLANK) != ""
    tally.blank += len(content) - int(filled.sum())
    lines = pl.Series(range(number, number + len(content)), dtype=pl.Int64).filter(filled)
    content = content.filter(filled)
    cut = content.str.split_exact(separator, width - 1).struct.unnest()
    return _Batch(
        [cut[f"field_{position}"] for position in positions],
        content.str.count_matches(separator, literal=True) + 1,
        lambda at: (int(lines[at]), str(content[at])),
    )


def _parse(batch: _Batch, fields: Sequence[Field], width: int, separator: str, tally: Tally) -> pl.DataFrame:
    """The parsed fields of a batch; rejected rows go to the tally."""
    bad = pl.repeat(False, len(batch.cells[0]), eager=True) if batch.ragged is None else batch.ragged != width
    texts, values = [], []
    for cell, each in zip(batch.cells, fields, strict=True):
        content = cell.str.strip_chars("\r" if each.parse is verbatim else None)
        content = content.set(content == "", None)
        value = each.parse(content).rename(each.name)
        bad |= value.is_null() if each.required else value.is_null() & content.is_not_null()
        texts.append(content)
        values.append(value)
    tally.rows += len(bad)
    table = pl.DataFrame(values)
    if not bad.any():
        return table
    tally.bad += int(bad.sum())
    at = int(bad.arg_max() or 0)
    if batch.ragged is not None and batch.ragged[at] != width:
        reason = (
            f"{batch.ragged[at]} fields instead of {width}"
            if separator
            else f"not a JSON object of at most {JSON_BYTES:,} bytes"
        )
    else:
        wrong = next(n for n in range(len(fields)) if values[n][at] is None and (texts[n][at] or fields[n].required))
        kind = (fields[wrong].parse.__doc__ or "").split(".")[0].split(":")[0].strip()
        got = texts[wrong][at]
        what = "is empty" if got is None else f"is {got!r}, not {kind[:1].lower()}{kind[1:]}"
        reason = f"{fields[wrong].name} {what}"
    tally.reject(*batch.where(at), reason)
    return table.filter(~bad)


def _joined(parts: Sequence[pl.DataFrame], fields: Sequence[Field]) -> pl.DataFrame:
    """Batches as one table."""
    table = pl.concat(parts).rechunk()
    return table.with_columns(spelled_dates(table[each.name]) for each in fields if each.parse is time)


def _position(
    path: Path, each: Field, names: list[str], counts: Counter[str], width: int, separator: str, line: int
) -> int:
    """Where a field stands in a row; `names` is empty if there is no header."""
    if isinstance(each.source, int):
        if 0 <= each.source < width:
            return each.source
        raise DataError(
            f"column {each.source} (counted from 0) was asked for as {each.name}, but rows have {width} fields",
            file=path,
            line=line,
            remedy=f"Check the column map and the separator ({separator!r}).",
        )
    if counts[each.source] == 1:
        return names.index(each.source)
    if each.source in counts:
        problem = f"more than one column is called {each.source!r}"
        raise DataError(problem, file=path, line=line, remedy="Rename all but one of them.")
    there = f"the header has {names!s:.500}" if names else "the file was said to have no header"
    raise DataError(
        f"no column {each.source!r} for {each.name}; {there}",
        file=path,
        line=line,
        remedy=f"{other_separator(separator.join(names), separator)}Name the right columns.",
    )


def read_json_lines(path: Path, fields: Sequence[Field]) -> tuple[pl.DataFrame, list[Note]]:
    """The named members (`source`) of a file with one JSON object per line; otherwise as `read_text`."""
    tally = Tally(path.name)
    feed = _open(path, tally)
    parts = []
    while feed.peek() is not None:
        for number, body in pieces(*feed.rest()):
            lines = body.decode().removesuffix("\n").split("\n")
            filled = [(at, line) for at, line in enumerate(lines, number) if line.strip(BLANK)]
            tally.blank += len(lines) - len(filled)
            objects = [_object(line) for _, line in filled]
            cells = [
                pl.Series([_member(each.get(str(field.source))) for each in objects], dtype=pl.String)
                for field in fields
            ]
            widths = pl.Series([len(each) > 0 for each in objects], dtype=pl.UInt32)
            batch = _Batch(cells, widths, filled.__getitem__)
            parts.append(_parse(batch, fields, 1, "", tally))
    tally.check()
    return _joined(parts, fields), tally.notes(latin_expected=False)


def _object(line: str) -> dict[str, object]:
    """A line's JSON object; empty if it is none, or too long for one."""
    if len(line) > JSON_BYTES:
        return {}
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _member(value: object) -> str | None:
    """A JSON value as text; None for null, and for half a surrogate pair, which is not text."""
    content = str(value)
    return None if value is None or any("\ud800" <= char <= "\udfff" for char in content) else content
