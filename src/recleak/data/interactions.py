"""Interactions: one immutable value that every split, model and attack starts from.

Three tables. `rows` holds who met what (codes, not ids), `users` and `items` hold what is known about them; row `u`
of `users` is user `u`. The order is canonical (users and items by id, rows by user, time and item), so two files with
the same rows in another order give the same value and the same fingerprint.

Axis letters: N rows, U users, I items.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl
import scipy.sparse as sp
from numpy.typing import NDArray

from recleak.errors import DataError

ITEM_FACTS = {
    "title": pl.String(),
    "categories": pl.List(pl.String()),
    "latitude": pl.Float64(),
    "longitude": pl.Float64(),
}


@dataclass(frozen=True)
class Note:
    """Something that a reader or a filter noticed, changed or dropped; kept with the data and shown."""

    what: str
    count: int
    remedy: str = ""
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = "" if self.file is None else self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where + ': ' if where else ''}{self.what} ({self.count:,}).{' ' + self.remedy if self.remedy else ''}"


@dataclass(frozen=True, eq=False)
class Interactions:
    """Who interacted with what, and what is known about both.

    `rows`: user i32, item i32, and where the data has them rating f32 and time i64 (UTC seconds; null is unknown).
    `users`: id, then one column per attribute: String is categorical, Float64 is continuous, null is missing.
    `items`: id, then those of title, categories, latitude, longitude that the data has.
    """

    rows: pl.DataFrame
    users: pl.DataFrame
    items: pl.DataFrame
    notes: tuple[Note, ...] = ()

    @classmethod
    def build(
        cls,
        events: pl.DataFrame,
        users: pl.DataFrame | None = None,
        items: pl.DataFrame | None = None,
        notes: Sequence[Note] = (),
    ) -> Interactions:
        """From tables with external ids: `events` has user, item and maybe rating and time; the others have an id.

        Of `notes` those that count something are kept.
        """
        lacking = {"user", "item"} - set(events.columns)
        if lacking:
            raise DataError(f"no column {sorted(lacking)} among {events.columns}", remedy="Name them in the map.")
        if events.is_empty():
            raise DataError("there is no interaction", remedy="Check the file and the filters: no row was left.")
        blank = events.filter(pl.col("user").is_null() | pl.col("item").is_null()).height
        if blank:
            raise DataError(f"{blank:,} rows have no user or no item", remedy="Drop or complete these rows.")
        user_ids, user_code = _encode(events["user"])
        item_ids, item_code = _encode(events["item"])
        columns = [user_code.rename("user"), item_code.rename("item")]
        if "rating" in events.columns:
            columns.append(_rating(events["rating"]))
        if "time" in events.columns:
            columns.append(events["time"].cast(pl.Int64).rename("time"))
        user_table, user_notes = _align(user_ids, users, "user")
        item_table, item_notes = _align(item_ids, items, "item")
        item_table = item_table.select(
            "id", *[pl.col(name).cast(dtype) for name, dtype in ITEM_FACTS.items() if name in item_table.columns]
        )
        rows = _canonical(pl.DataFrame(columns))
        return cls(
            rows,
            user_table.select("id", *[_attribute(user_table[name]) for name in user_table.columns[1:]]),
            item_table,
            (*[note for note in notes if note.count], *user_notes, *item_notes, *_repeats(rows)),
        )

    def __len__(self) -> int:
        return self.rows.height

    def __repr__(self) -> str:
        return f"Interactions({self.n_users:,} users, {self.n_items:,} items, {len(self):,} rows)"

    @property
    def n_users(self) -> int:
        """U, with those users that have no row in this part of a split."""
        return self.users.height

    @property
    def n_items(self) -> int:
        """I, likewise."""
        return self.items.height

    @property
    def user(self) -> NDArray[np.int32]:
        """The user of every row, i32[N], ascending; read-only."""
        return self.rows["user"].to_numpy()

    @property
    def item(self) -> NDArray[np.int32]:
        """The item of every row, i32[N]; read-only."""
        return self.rows["item"].to_numpy()

    @cached_property
    def indptr(self) -> NDArray[np.int64]:
        """Rows `indptr[u]` to `indptr[u + 1]` belong to user u; i64[U + 1]; read-only."""
        return _read_only(np.searchsorted(self.user, np.arange(self.n_users + 1)))

    @cached_property
    def activity(self) -> NDArray[np.int64]:
        """Rows per user, i64[U]; read-only."""
        return _read_only(np.diff(self.indptr))

    @cached_property
    def popularity(self) -> NDArray[np.int64]:
        """Rows per item, i64[I]; read-only."""
        return _read_only(np.bincount(self.item, minlength=self.n_items))

    @cached_property
    def n_pairs(self) -> int:
        """Distinct (user, item) pairs."""
        pairs = np.sort(self.user.astype(np.int64) * self.n_items + self.item)
        return int(np.count_nonzero(np.diff(pairs, prepend=-1)))

    @property
    def attributes(self) -> dict[str, Literal["categorical", "continuous"]]:
        """The user attributes and their kinds."""
        schema = self.users.schema
        return {name: "continuous" if schema[name].is_float() else "categorical" for name in self.users.columns[1:]}

    def matrix(self) -> sp.csr_array:
        """The binary user by item matrix, f32[U, I], with sorted indices and without repeats."""
        pairs = self.rows.select("user", "item").unique().sort("user", "item")
        user, item = pairs["user"].to_numpy(), pairs["item"].to_numpy()
        indptr = np.searchsorted(user, np.arange(self.n_users + 1))
        return sp.csr_array((np.ones(len(item), np.float32), item, indptr), shape=(self.n_users, self.n_items))

    def distinct(self, keep: Literal["first", "last"] = "last") -> Interactions:
        """One row per (user, item) pair: the last in time (or the first); says how many were dropped."""
        dropped = len(self) - self.n_pairs
        if not dropped:
            return self
        rows = self.rows.unique(["user", "item"], keep=keep, maintain_order=True)
        note = Note(f"repeats of a (user, item) pair dropped, the {keep} kept", dropped)
        return replace(self, rows=_canonical(rows), notes=(*self.notes, note))

    def take(self, rows: NDArray[np.bool_]) -> Interactions:
        """The rows under a mask (bool[N]), in the same users and items: codes keep their meaning."""
        return replace(self, rows=self.rows.filter(pl.Series(rows)).rechunk())

    def restrict(self, rows: NDArray[np.bool_], why: str) -> Interactions:
        """The rows under a mask, without the users and items that have none left; says how many went."""
        kept = self.rows.filter(pl.Series(rows))
        if kept.is_empty():
            raise DataError(f"no interaction is left after {why}", remedy="Loosen the filter.")
        tables, codes = {}, {}
        for axis, table in (("user", self.users), ("item", self.items)):
            present = np.zeros(table.height, bool)
            present[kept[axis].to_numpy()] = True
            codes[axis] = np.cumsum(present, dtype=np.int32) - 1
            tables[axis] = table.filter(pl.Series(present))
        if (kept.height, tables["user"].height, tables["item"].height) == (len(self), self.n_users, self.n_items):
            return self
        kept = kept.with_columns(pl.Series(axis, codes[axis][kept[axis].to_numpy()]) for axis in codes)
        gone = f"{self.n_users - tables['user'].height:,} users, {self.n_items - tables['item'].height:,} items"
        note = Note(f"rows dropped by {why}, with {gone}", len(self) - kept.height)
        return Interactions(kept.rechunk(), tables["user"], tables["item"], (*self.notes, note))

    def with_attributes(self, **columns: pl.Series) -> Interactions:
        """The same interactions with user attributes added or replaced; each has one value per user."""
        table = self.users.with_columns(_attribute(values.rename(name)) for name, values in columns.items())
        return replace(self, users=table)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of all three tables; the same for any order of the input rows; notes do not count."""
        digest = hashlib.sha256(b"recleak interactions 1")
        for table in (self.rows, self.users, self.items):
            for column in table:
                digest.update(f"|{column.name}:{len(column)}|".encode())
                for part in _column_bytes(column):
                    digest.update(part)
        return digest.hexdigest()


def _encode(ids: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Sorted unique ids, and the position of every given id among them; ids that are all integers sort as such."""
    key = "id"
    ids = ids if ids.dtype.is_integer() else ids.cast(pl.String)
    unique = ids.unique().rename(key)
    text = unique.cast(pl.String)
    number = text.cast(pl.Int64, strict=False)
    whole = bool(number.cast(pl.String).eq_missing(text).all())  # "007" and "-0" are not integers but names
    table = pl.DataFrame({key: unique, "label": number if whole else text})
    table = table.sort("label").with_columns(pl.int_range(pl.len(), dtype=pl.Int32).alias("code"))
    codes = ids.rename(key).to_frame().join(table.select(key, "code"), on=key, how="left", maintain_order="left")
    return table["label"].rename("id"), codes["code"]


def _align(ids: pl.Series, table: pl.DataFrame | None, kind: str) -> tuple[pl.DataFrame, list[Note]]:
    """The rows of a side table in the order of `ids`; ids it lacks get nulls. Both directions of mismatch are noted."""
    base = pl.DataFrame({"id": ids.cast(pl.String)})
    if table is None:
        return pl.DataFrame({"id": ids}), []
    if "id" not in table.columns:
        raise DataError(f"no column 'id' among {table.columns} of the {kind}s", remedy="Name it in the map.")
    side = table.with_columns(pl.col("id").cast(pl.String))
    notes = []
    twice = side.height - side["id"].n_unique()
    if twice:
        side = side.unique("id", keep="first", maintain_order=True)
        notes.append(Note(f"{kind}s described more than once; the first description was kept", twice))
    unknown = base.join(side, on="id", how="anti")
    if unknown.height:
        remedy = f"They keep empty {kind} facts. Check that both files use the same ids (first: {unknown['id'][0]})."
        notes.append(Note(f"{kind}s with interactions but without a description", unknown.height, remedy))
    idle = side.join(base, on="id", how="anti")
    if idle.height:
        remedy = f"They are left out (first: {idle['id'][0]})."
        notes.append(Note(f"{kind}s described but without any interaction", idle.height, remedy))
    facts = base.join(side, on="id", how="left", maintain_order="left").drop("id")
    return pl.DataFrame([ids, *facts]), notes


def _rating(values: pl.Series) -> pl.Series:
    """Ratings as f32; NaN is missing, -0.0 is 0.0 (or the order of rows would matter)."""
    ratings = values.cast(pl.Float32).fill_nan(None)
    ratings = ratings.set(ratings == 0, 0)
    if infinite := int(ratings.is_infinite().sum()):
        raise DataError(f"{infinite:,} ratings are infinite or above 3e38", remedy="Mend the ratings.")
    return ratings.rename("rating")


def _repeats(rows: pl.DataFrame) -> list[Note]:
    """A note on rows that are the same in every column: kept, because published files have them."""
    same = int(rows.select(pl.all_horizontal(pl.all().eq_missing(pl.all().shift())).sum()).item())  # rows are sorted
    return [Note(f"rows equal another one in {', '.join(rows.columns)}; kept", same)] if same else []


def _attribute(values: pl.Series) -> pl.Series:
    """Numbers are continuous (Float64), everything else is categorical (String)."""
    if values.dtype.is_numeric():
        return values.cast(pl.Float64).fill_nan(None)
    return values.cast(pl.String)


def _read_only(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.flags.writeable = False
    return array


def _canonical(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows by user, time (unknown first), item, rating; columns in a fixed order."""
    names = [name for name in ("user", "item", "rating", "time") if name in rows.columns]
    keys = [name for name in ("user", "time", "item", "rating") if name in rows.columns]
    return rows.select(names).sort(keys, nulls_last=False).rechunk()


def _column_bytes(column: pl.Series) -> Iterator[bytes]:
    """The bytes of a column, unambiguous: nulls, then lengths where they vary, then values."""
    yield np.packbits(column.is_null().to_numpy()).tobytes()
    if isinstance(column.dtype, pl.List):
        yield column.list.len().fill_null(0).cast(pl.UInt32).to_numpy().tobytes()
        yield from _column_bytes(column.explode(empty_as_null=False, keep_nulls=False))
        return
    if column.dtype.is_numeric() and column.name != "id":
        yield column.fill_null(0).to_numpy().tobytes()
        return
    text = column.cast(pl.String).fill_null("")
    yield text.str.len_bytes().to_numpy().tobytes()
    yield "".join(text.to_list()).encode()
