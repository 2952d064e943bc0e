"""MovieLens as GroupLens publishes it (plain or .gz): 100K, 1M, 10M, and 20M, 25M, 32M and latest, which are alike."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from recleak.data.interactions import Interactions, Note
from recleak.data.lines import find_file
from recleak.data.text import Field, integer, read_text, real, time

_RATINGS = (Field("user", 0, integer, True), Field("item", 1, integer, True), Field("rating", 2, real, True))
# fmt: off
_GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
_OCCUPATIONS_1M = (
    "other", "academic/educator", "artist", "clerical/admin", "college/grad student", "customer service",
    "doctor/health care", "executive/managerial", "farmer", "homemaker", "K-12 student", "lawyer", "programmer",
    "retired", "sales/marketing", "scientist", "self-employed", "technician/engineer", "tradesman/craftsman",
    "unemployed", "writer",
)
# fmt: on
_NO_GENRES = "(no genres listed)"  # the publisher's own words
AGE_BANDS_1M = {
    "1": "under 18",
    "18": "18 to 24",
    "25": "25 to 34",
    "35": "35 to 44",
    "45": "45 to 49",
    "50": "50 to 55",
    "56": "56 and over",
}


def _age_band(values: pl.Series) -> pl.Series:
    """An age code of MovieLens-1M."""
    return values.replace_strict(AGE_BANDS_1M, default=None, return_dtype=pl.String)


def _occupation(values: pl.Series) -> pl.Series:
    """An occupation code."""
    names = {str(code): name for code, name in enumerate(_OCCUPATIONS_1M)}
    return values.replace_strict(names, default=None, return_dtype=pl.String)


def read_ml_100k(folder: Path) -> Interactions:
    """`u.data`, `u.user` and `u.item` of MovieLens-100K; age is continuous, gender, occupation and zip categorical."""
    events, notes = read_text(
        find_file(folder, "u.data"), [*_RATINGS, Field("time", 3, time)], separator="\t", header=False, width=4
    )
    profile = [Field("age", 1, integer), Field("gender", 2), Field("occupation", 3), Field("zip", 4)]
    users, user_notes = read_text(
        find_file(folder, "u.user"), [Field("id", 0, integer, True), *profile], separator="|", header=False, width=5
    )
    flags = [Field(genre, 5 + n, integer) for n, genre in enumerate(_GENRES_100K)]
    items, item_notes = read_text(
        find_file(folder, "u.item"),
        [Field("id", 0, integer, True), Field("title", 1), *flags],
        separator="|",
        header=False,
        width=24,
        latin_expected=True,
    )
    genres = pl.concat_list(pl.when(pl.col(genre) == 1).then(pl.lit(genre)) for genre in _GENRES_100K)
    items = items.select("id", "title", genres.list.drop_nulls().alias("categories"))
    return Interactions.build(events, users, items, [*notes, *user_notes, *item_notes])


def read_ml_1m(folder: Path) -> Interactions:
    """`ratings.dat`, `users.dat` and `movies.dat` of MovieLens-1M; age is one of seven bands, hence categorical.

    A time of 0 is unknown: copies of the file exist in which most times are missing.
    """
    events, notes = _ratings_dat(folder)
    profile = [Field("gender", 1), Field("age", 2, _age_band), Field("occupation", 3, _occupation), Field("zip", 4)]
    users, user_notes = read_text(
        find_file(folder, "users.dat"), [Field("id", 0, integer, True), *profile], separator="::", header=False, width=5
    )
    items, item_notes = _movies_dat(folder, latin_expected=True)
    return Interactions.build(events, users, items, [*notes, *user_notes, *item_notes])


def read_ml_10m(folder: Path) -> Interactions:
    """`ratings.dat` and `movies.dat` of MovieLens-10M: nothing is told of users, and stars come in halves."""
    events, notes = _ratings_dat(folder)
    items, item_notes = _movies_dat(folder, latin_expected=False)
    return Interactions.build(events, items=items, notes=[*notes, *item_notes])


def read_ml_csv(folder: Path) -> Interactions:
    """`ratings.csv` and `movies.csv` of MovieLens-20M, 25M, 32M and latest: nothing is told of users."""
    names = ("user", "userId", integer), ("item", "movieId", integer), ("rating", "rating", real)
    ratings = [Field(name, source, parse, True) for name, source, parse in names]
    events, notes = read_text(
        find_file(folder, "ratings.csv"), [*ratings, Field("time", "timestamp", time)], separator=",", header=True
    )
    items, item_notes = read_text(
        find_file(folder, "movies.csv"),
        [Field("id", "movieId", integer, True), Field("title", "title"), Field("categories", "genres", _genres)],
        separator=",",
        header=True,
        quoted=True,
    )
    return Interactions.build(events, items=items, notes=[*notes, *item_notes])


def _ratings_dat(folder: Path) -> tuple[pl.DataFrame, list[Note]]:
    events, notes = read_text(
        find_file(folder, "ratings.dat"), [*_RATINGS, Field("time", 3, time)], separator="::", header=False, width=4
    )
    unknown = int((events["time"] == 0).sum())
    if unknown:
        events = events.with_columns(pl.col("time").replace(0, None))
        remedy = "These users have no order in time beyond the ratings that have one."
        notes.append(Note("ratings without a time (0)", unknown, remedy, "ratings.dat"))
    return events, notes


def _movies_dat(folder: Path, latin_expected: bool) -> tuple[pl.DataFrame, list[Note]]:
    return read_text(
        find_file(folder, "movies.dat"),
        [Field("id", 0, integer, True), Field("title", 1), Field("categories", 2, _genres)],
        separator="::",
        header=False,
        width=3,
        latin_expected=latin_expected,
    )


def _genres(values: pl.Series) -> pl.Series:
    """Genres with bars between them; a movie that is said to have none has an empty list."""
    genres = values.replace(_NO_GENRES, "").str.split("|")
    return genres.list.eval(pl.element().filter(pl.element() != ""))
