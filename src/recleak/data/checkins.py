"""Check-ins: Foursquare (TSMC2014, and a compact layout of it) and Gowalla (SNAP), with coordinates and time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from recleak.data.interactions import Interactions, Note
from recleak.data.lines import find_file, find_one
from recleak.data.text import Field, integer, read_text, real, time
from recleak.errors import DataError

_EVENT = ("user", "item", "time")


@dataclass(frozen=True)
class Box:
    """A bounding box in degrees; borders are outside."""

    west: float
    south: float
    east: float
    north: float

    def holds(self) -> pl.Expr:
        """Whether a row's latitude and longitude are inside."""
        return pl.col("longitude").is_between(self.west, self.east, closed="none") & pl.col("latitude").is_between(
            self.south, self.north, closed="none"
        )


NEW_YORK = Box(west=-74.2589, south=40.4774, east=-73.7004, north=40.9176)


def read_foursquare(folder: Path) -> Interactions:
    """Foursquare New York: the raw `dataset_TSMC2014_NYC.txt`, or the compact `checkins_NYC_*.tsv` with a header.

    Raw columns: user, venue, category id, category name, latitude, longitude, timezone offset, UTC time. A venue's
    place and category are those of its first check-in that has them.
    """
    if compact := find_one(folder, "checkins_NYC*.tsv", "checkins_NYC*.tsv.gz"):
        table, notes = read_text(
            compact,
            [
                Field("user", "user_id", integer, True),
                Field("item", "venue_id", required=True),
                Field("category", "venue_category"),
                Field("latitude", "latitude", real, True),
                Field("longitude", "longitude", real, True),
                Field("time", "unix_time", time, True),
            ],
            separator="\t",
            header=True,
        )
    else:
        table, notes = read_text(
            find_file(folder, "dataset_TSMC2014_NYC.txt"),
            [
                Field("user", 0, integer, True),
                Field("item", 1, required=True),
                Field("category", 3),
                Field("latitude", 4, real, True),
                Field("longitude", 5, real, True),
                Field("time", 7, time, True),
            ],
            separator="\t",
            header=False,
            width=8,
            latin_expected=True,
        )
    venues = _places(
        table, pl.concat_list(pl.col("category").drop_nulls().first()).list.drop_nulls().alias("categories")
    )
    return Interactions.build(table.select(_EVENT), items=venues, notes=notes + _conflicts(table))


def read_gowalla(folder: Path, box: Box | None = NEW_YORK) -> Interactions:
    """SNAP's Gowalla check-ins (user, time, latitude, longitude, location), cut to a box; names where they exist."""
    patterns = "loc-gowalla_totalCheckins*.txt", "loc-gowalla_totalCheckins*.txt.gz"
    path = find_one(folder, *patterns) or find_file(folder, "loc-gowalla_totalCheckins.txt")
    table, notes = read_text(
        path,
        [
            Field("user", 0, integer, True),
            Field("time", 1, time, True),
            Field("latitude", 2, real, True),
            Field("longitude", 3, real, True),
            Field("item", 4, integer, True),
        ],
        separator="\t",
        header=False,
        width=5,
    )
    if box is not None:
        inside = table.filter(box.holds())
        if outside := table.height - inside.height:
            notes.append(Note("check-ins outside the box left out", outside, file=path.name))
        if inside.is_empty():
            raise DataError(f"no check-in is inside {box}", file=path, remedy="Check the box: it is in degrees.")
        table = inside
    spots = _places(table)
    named = sorted(folder.glob("gowalla_venues*.tsv*"))
    if named:
        titles, more = read_text(
            named[0], [Field("id", 0, integer, True), Field("title", 1)], separator="\t", header=False, width=4
        )
        notes += more
        if blank := spots.join(titles.drop_nulls(), on="id", how="anti").height:
            notes.append(Note("locations without a name", blank, file=named[0].name))
        spots = spots.join(titles, on="id", how="full", coalesce=True, maintain_order="left_right")
    return Interactions.build(table.select(_EVENT), items=spots, notes=notes + _conflicts(table))


def _conflicts(table: pl.DataFrame) -> list[Note]:
    """Notes on venues about which check-ins differ."""
    values = table.group_by("item").agg(pl.exclude(_EVENT).drop_nulls().n_unique()).drop("item")
    what = "venues with more than one {}; that of the first check-in was kept"
    return [Note(what.format(each.name), int((each > 1).sum())) for each in values]


def _places(table: pl.DataFrame, *more: pl.Expr) -> pl.DataFrame:
    """One row per venue with the place of its first check-in; the order of rows does not matter."""
    by_venue = table.sort("time", pl.exclude("user", "item", "time")).group_by("item", maintain_order=True)
    return by_venue.agg(pl.col("latitude", "longitude").first(), *more).rename({"item": "id"})
