"""Files that are there whole or not at all, and files of strangers, which are data and nothing else."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from recleak.errors import DataError, RecleakError
from recleak.strict_json import parse_json

# what reading a damaged Parquet file may raise
BROKEN = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError)
_ROWS, _ROWS_PER_BYTE = 1 << 20, 1_000  # a table with more rows than both is a bomb: a real row takes more than a bit


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


def read_table(path: Path) -> pl.DataFrame:
    """A Parquet file; its name is no pattern, whatever letters are in it."""
    check_table(path)
    try:
        return pl.read_parquet(path, glob=False)
    except BROKEN as error:
        raise _not_parquet(path, error) from error


def check_table(path: Path) -> pl.Schema:
    """The columns of a Parquet file of which only the end was read, where it says how many rows it has."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise OSError("not a plain file")
        scan = pl.scan_parquet(path, glob=False)
        schema = scan.collect_schema()
        rows = int(scan.select(pl.len()).collect().item())
    except BROKEN as error:
        raise _not_parquet(path, error) from error
    if rows > max(_ROWS, _ROWS_PER_BYTE * size):
        raise DataError(f"{rows:,} rows in {size:,} bytes, which no table has", file=path, remedy="Write it again.")
    return schema


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
