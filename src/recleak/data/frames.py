"""Tables in memory: pandas or polars frames, or whatever has named columns. Neither pandas nor pyarrow is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from recleak.data.columns import GUESSED, ColumnMap, Frame, read_columns
from recleak.data.interactions import Interactions
from recleak.errors import DataError


def from_frame(events: Any, users: Any = None, items: Any = None, *, columns: ColumnMap = GUESSED) -> Interactions:
    """Interactions from a frame with users and items, and maybe one of user attributes and one of item facts.

    Columns are found by well-known names, as in files, or through the map. Numbers are continuous attributes, text,
    categories and truth values are categorical. A named index of pandas is a column.

    >>> from_frame({"user": [1, 1, 2], "item": ["a", "b", "a"]}, users={"user": [1, 2], "height": [1.7, 1.8]})
    Interactions(2 users, 2 items, 3 rows)
    """
    tables = [
        None if each is None else Frame(name, _polars(each, name))
        for name, each in (("users", users), ("items", items))
    ]
    return read_columns(Frame("events", _polars(events, "events")), columns, users=tables[0], items=tables[1])


def _polars(frame: Any, name: str) -> pl.DataFrame:
    """Any frame as one of polars."""
    if isinstance(frame, pl.LazyFrame):
        return frame.collect()
    if isinstance(frame, pl.DataFrame):
        return frame
    if not isinstance(frame, Mapping) and not (hasattr(frame, "columns") and hasattr(frame, "__getitem__")):
        remedy = "Give a frame of pandas or polars, or a mapping of names to columns."
        raise DataError(f"got {type(frame).__name__}, expected named columns", file=name, remedy=remedy)
    if any(each is not None for each in getattr(getattr(frame, "index", None), "names", ())):
        try:
            frame = frame.reset_index()
        except (TypeError, ValueError) as error:  # of a name that a column has too
            remedy = "Rename the index, or drop it: frame.reset_index(drop=True)."
            raise DataError(f"the index cannot be a column ({error!s:.200})", file=name, remedy=remedy) from error
    names = list(frame) if isinstance(frame, Mapping) else list(frame.columns)
    if len({str(each) for each in names}) < len(names):
        raise DataError(f"two columns have one name among {names}", file=name, remedy="Rename one of them.")
    try:
        return pl.DataFrame([_column(str(each), frame[each]) for each in names])
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        remedy = "Give columns of numbers, text or times."
        raise DataError(f"a column cannot be used ({error!s:.200})", file=name, remedy=remedy) from error


def _column(name: str, values: Any) -> pl.Series:
    """One column; what pandas calls missing is null."""
    if isinstance(values, pl.Series):
        return values.rename(name)
    array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    if array.dtype.kind != "O":
        return pl.Series(name, array)
    gone = values.isna().to_numpy() if hasattr(values, "isna") else [each is None or each != each for each in array]
    content = [None if missing else each for each, missing in zip(array.tolist(), gone, strict=True)]
    kinds = {type(each) for each in content if each is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        content = [None if each is None else str(each) for each in content]
    column = pl.Series(name, content)
    if isinstance(column.dtype, pl.Object):  # such as bands and periods of pandas, by their names
        column = pl.Series(name, [None if each is None else str(each) for each in content], pl.String)
    return column
