"""Files that are there whole or not at all, and files of strangers, which are data and nothing else."""

from __future__ import annotations

import io
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from recleak.errors import DataError, RecleakError
from recleak.parquet import size_of
from recleak.strict_json import parse_json

# what reading a damaged Parquet file may raise
BROKEN = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError)
_MEMORY = 64 << 20  # bytes that any table may take in memory
_RATIO = 300  # how many times its size it may take beyond that: the same ten items for everybody are 170 times


class WriteError(RecleakError):
    """A file that cannot be written."""


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file; whatever happens, there is the old one or the new one. A full disk is an error that says so."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise WriteError(
            f"{path}: cannot be written ({error.strerror or error}).\n"
            "  Make room or mend the permissions, then run again: what was written before is still there."
        ) from error


def read_json(path: Path) -> Any:
    """The same of a file that must be there: a ValueError or an OSError otherwise."""
    return parse_json(read_bytes(path, 1 << 30))


def read_bytes(path: Path, most: int = 1 << 34) -> bytes:
    """A plain file whole, of at most so many bytes: no pipe and no device, which may never end."""
    if not path.is_file():  # before it is opened: to open a pipe is to wait for its other end
        raise OSError("no such file, or not a plain one")
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(f"{size:,} bytes, expected at most {most:,}")
        return file.read()


def refuse_links(folder: Path) -> None:
    """An error if anything in a folder is a link: we write none, so it would lead to files of somebody else."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            if path.is_symlink():
                remedy = (
                    "Nothing behind links is read or written: put the files themselves there, or use another folder."
                )
                raise DataError("a link", file=path, remedy=remedy)


def read_table(path: Path, *, lists: Collection[str] = (), columns: Collection[str] | None = None) -> pl.DataFrame:
    """A Parquet file; its name is no pattern, whatever letters are in it.

    `lists`: the columns that may be lists. `columns`: those that may be there at all (default: any).
    """
    schema = check_table(path)
    nested = [name for name, dtype in schema.items() if dtype.is_nested() and name not in lists]
    if nested:
        problem = f"the column {nested[0]!r:.80} is {schema[nested[0]]!s:.80}, expected plain values"
        raise DataError(problem, file=path, remedy="Write it again.")
    if columns is not None and (strange := [name for name in schema if name not in columns]):
        problem = f"a column {strange[0]!r:.80}, expected {', '.join(columns)}"
        raise DataError(problem, file=path, remedy="Write it again.")
    try:
        table = pl.read_parquet(path, glob=False)
    except BROKEN as error:
        raise _not_parquet(path, error) from error
    check_texts(table, path)
    return table


def check_table(path: Path) -> pl.Schema:
    """The columns of a Parquet file, once its own bookkeeping was found to fit its size; no value is read."""
    try:
        if not path.is_file():
            raise OSError("not a plain file")
        most = _room(path)
        found = size_of(path, most)
        schema = pl.scan_parquet(path, glob=False).collect_schema()
    except BROKEN as error:
        raise _not_parquet(path, error) from error
    if max(found.rows, found.memory) > most:
        raise _bomb(path, f"{found.rows:,} rows that take {found.memory:,} bytes of memory or more", most)
    return schema


def check_texts(table: pl.DataFrame, path: Path) -> None:
    """An error if texts that stand once in a file, and in memory, would be far too long one by one."""
    total, most = 0, _room(path)
    for values in table:
        flat = values.explode(empty_as_null=True) if isinstance(values.dtype, pl.List) else values
        if isinstance(flat.dtype, pl.Categorical | pl.Enum):
            flat = flat.cast(pl.String)
        if isinstance(flat.dtype, pl.String):
            total += int(flat.str.len_bytes().cast(pl.Int64).sum())
        elif isinstance(flat.dtype, pl.Binary):
            total += int(flat.bin.size().cast(pl.Int64).sum())
    if total > most:
        raise _bomb(path, f"texts of {total:,} bytes", most)


def _room(path: Path) -> int:
    """Bytes that a table may take in memory."""
    return max(_MEMORY, _RATIO * path.stat().st_size)


def _bomb(path: Path, got: str, most: int) -> DataError:
    problem = f"got {got}, expected at most {most:,} of a file of {path.stat().st_size:,} bytes"
    return DataError(problem, file=path, remedy="If it is yours and right, write it as CSV: that has no such limit.")


def _not_parquet(path: Path, error: BaseException) -> DataError:
    return DataError(f"not readable as Parquet ({error!s:.300})", file=path, remedy="Fetch or write it again.")


def replace_text(path: Path, text: str) -> None:
    """The same for text."""
    replace_bytes(path, text.encode())


def replace_table(path: Path, frame: pl.DataFrame) -> None:
    """The same for a table, as Parquet."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    replace_bytes(path, buffer.getvalue())
