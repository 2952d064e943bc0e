"""Errors that a user can act on: what was got, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class RecleakError(Exception):
    """The base of all errors that the command line prints without a traceback."""


class DataError(RecleakError):
    """Something is wrong with a data file; says where (file, line) and what to do."""

    def __init__(self, problem: str, *, file: Path | str | None = None, line: int | None = None, remedy: str) -> None:
        where = "" if file is None else f"{file}: " if line is None else f"{file}, line {line}: "
        super().__init__(f"{where}{problem}\n  {remedy}")


class ConfigError(RecleakError, ValueError):
    """A setting that cannot be."""


class NotFoundError(RecleakError):
    """A name or a file that is not there; lists what is."""


def unknown_name(kind: str, got: str, known: Iterable[str]) -> NotFoundError:
    """An error for a misspelt name, with the nearest valid one first."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return NotFoundError(f"Unknown {kind} {got!r}.{hint} Known: {', '.join(names) or 'none'}.")
