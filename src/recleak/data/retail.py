"""Shops and stores: Steam-200K, Amazon reviews, Taobao's ad displays."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import polars as pl

from recleak.data.interactions import Interactions, Note
from recleak.data.lines import find_file, find_one
from recleak.data.text import Field, Parse, integer, read_header, read_json_lines, read_text, real, time, verbatim


def read_steam(
    folder: Path, *, behavior: Literal["purchase", "play"] | None = None, honor_quotes: bool = True
) -> Interactions:
    """Steam-200K: user, game title, behavior, value (hours of play, or 1), 0.

    `honor_quotes=False` cuts each line at every comma, so that titles with a comma lose their tail: wrong, and what
    the published counts (5,134 titles) come from.
    """
    path = find_file(folder, "steam-200k.csv")
    parsers = {"user": integer, "item": verbatim, "behavior": verbatim, "rating": real}
    if honor_quotes:
        fields = [Field(name, at, parse, True) for at, (name, parse) in enumerate(parsers.items())]
        table, notes = read_text(path, fields, separator=",", header=False, width=5, quoted=True)
    else:
        pieces = zip(parsers.items(), (0, 1, -3, -2), strict=True)
        fields = [Field(name, 0, _piece(at, parse), True) for (name, parse), at in pieces]
        fields.append(Field("commas", 0, lambda lines: lines.str.count_matches(",", literal=True)))
        table, notes = read_text(path, fields, separator="\x1f", header=False, width=1)
        notes.append(Note("rows with a comma in the title, which was cut there", int((table["commas"] > 4).sum())))
    if behavior is not None:
        kept = table.filter(pl.col("behavior") == behavior)
        notes.append(Note(f"rows that are not {behavior!r} left out", table.height - kept.height, file=path.name))
        table = kept
    titles = table.select(pl.col("item").alias("id"), pl.col("item").alias("title")).unique("id")
    return Interactions.build(table.select("user", "item", "rating"), items=titles, notes=notes)


def _piece(at: int, parse: Parse) -> Parse:
    """One of at least five pieces of a line, cut at every comma and without its quotes."""

    def cut(lines: pl.Series) -> pl.Series:
        """A line of user,title,behavior,value,0."""
        pieces = lines.str.split(",")
        piece = pieces.list.get(at, null_on_oob=True).str.strip_chars('"')
        return parse(piece.set((pieces.list.len() < 5) | (piece == ""), None))

    return cut


def read_amazon(folder: Path) -> Interactions:
    """Amazon product reviews: the published JSON lines (`reviews_*.json`), or a CSV with the same column names.

    Needs reviewerID, asin and unixReviewTime; the stars (`overall`) are the rating where they exist.
    """
    fields = [
        Field("user", "reviewerID", required=True),
        Field("item", "asin", required=True),
        Field("time", "unixReviewTime", time),
    ]
    stars = Field("rating", "overall", real)
    published = find_one(folder, "*.json", "*.json.gz")
    if published:
        table, notes = read_json_lines(published, [*fields, stars])
    else:
        path = find_one(folder, "*.csv", "*.csv.gz") or find_file(folder, "reviews_*.json", "*.csv")
        rated = "overall" in read_header(path, ",")
        table, notes = read_text(path, [*fields, stars] if rated else fields, separator=",", header=True, quoted=True)
    if "rating" in table.columns and table["rating"].null_count() == table.height:
        table = table.drop("rating")
    return Interactions.build(table, notes=notes)


def _gender(values: pl.Series) -> pl.Series:
    """A gender code, 1 or 2."""
    return values.replace_strict({"1": "M", "2": "F"}, default=None, return_dtype=pl.String)


def read_taobao(folder: Path, *, clicks_only: bool = True) -> Interactions:
    """Taobao's ad displays: `raw_sample.csv`, `user_profile.csv`, `ad_feature.csv`, as Alibaba publishes them.

    An interaction is a click on an ad (`clk` 1); with `clicks_only=False` every display, and the click is the rating.
    Attributes: gender (code 1 is male, 2 is female), age level, and the other profile codes, all categorical.
    """
    events, notes = read_text(
        find_file(folder, "raw_sample.csv"),
        [
            Field("user", "user", integer, True),
            Field("item", "adgroup_id", integer, True),
            Field("time", "time_stamp", time),
            Field("rating", "clk", integer, True),
        ],
        separator=",",
        header=True,
    )
    if clicks_only:
        clicked = events.filter(pl.col("rating") == 1).drop("rating")
        unclicked = events.height - clicked.height
        notes.append(Note("displays without a click left out", unclicked, file="raw_sample.csv"))
        events = clicked
    codes = ["pvalue_level", "shopping_level", "occupation", "new_user_class_level"]
    users, user_notes = read_text(
        find_file(folder, "user_profile.csv"),
        [
            Field("id", "userid", integer, True),
            Field("gender", "final_gender_code", _gender),
            Field("age", "age_level"),
            *[Field(code, code) for code in codes],
        ],
        separator=",",
        header=True,
    )
    ads, ad_notes = read_text(
        find_file(folder, "ad_feature.csv"),
        [Field("id", "adgroup_id", integer, True), Field("categories", "cate_id")],
        separator=",",
        header=True,
    )
    ads = ads.with_columns(pl.concat_list("categories").list.drop_nulls())
    return Interactions.build(events, users, ads, [*notes, *user_notes, *ad_notes])
