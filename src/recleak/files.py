"""Files that are there whole or not at all."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

import polars as pl

from recleak.errors import RecleakError


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


def read_table(path: Path) -> pl.DataFrame:
    """A Parquet file; its name is no pattern, whatever letters are in it."""
    return pl.read_parquet(path, glob=False)


def replace_text(path: Path, text: str) -> None:
    """The same for text."""
    replace_bytes(path, text.encode())


def replace_table(path: Path, frame: pl.DataFrame) -> None:
    """The same for a table, as Parquet."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    replace_bytes(path, buffer.getvalue())
