"""One word for any data: a catalog name, `synthetic`, a converted folder, or files as somebody has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from recleak.data import catalog, lenskit, movielens, recbole, store
from recleak.data.columns import GUESSED, ColumnMap, read_columns
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.errors import NotFoundError, RecleakError, unknown_name

SYNTHETIC = "synthetic"
_UNNAMED: Mapping[tuple[str, ...], catalog.Read] = {  # editions that have no name in the catalog; asked after it
    ("ratings.dat", "movies.dat"): movielens.read_ml_10m,
    ("ratings.csv", "movies.csv"): movielens.read_ml_csv,
}


def open_data(
    what: str,
    preset: str | None = None,
    *,
    columns: ColumnMap = GUESSED,
    users: Path | None = None,
    items: Path | None = None,
) -> Interactions:
    """Interactions from a name or a path; a path's format is told by the files that are there.

    A column map, `users` and `items` go with a table file only.
    """
    path = Path(what)
    named = what in catalog.CATALOG or what == SYNTHETIC
    if not named and not path.exists():
        if path.suffix or path.name != what:
            raise NotFoundError(f"{what}: no such file or folder.\n  Check the path.")
        raise unknown_name("data set", what, [*catalog.CATALOG, SYNTHETIC])
    if preset is not None and what not in catalog.CATALOG:
        raise unknown_name(f"preset of {what}", preset, ())
    if not named and path.is_file() and path.suffix != ".inter":
        return read_columns(path, columns, users=users, items=items)
    given = [each.name for each in fields(columns) if getattr(columns, each.name) != getattr(GUESSED, each.name)]
    given += [name for name, table in (("users", users), ("items", items)) if table is not None]
    if given:
        raise RecleakError(
            f"{what} is not a table file, so these do not apply to it: {', '.join(given)}.\n"
            "  Leave them out, or give one CSV, TSV or Parquet file."
        )
    if what in catalog.CATALOG:
        return catalog.load(what, preset)
    if what == SYNTHETIC:
        return Synthetic().generate()
    return recbole.read_recbole(path) if path.is_file() else _open_folder(path)


def _open_folder(folder: Path) -> Interactions:
    if (folder / store.MANIFEST).exists():
        return store.load(folder)
    if any(folder.glob("*.inter")):
        return recbole.read_recbole(folder)
    if lenskit.is_lenskit(folder):
        return lenskit.read_lenskit(folder)
    for entry in catalog.CATALOG.values():
        if entry.holds(folder):
            return entry.read(folder)
    for layout, read in _UNNAMED.items():
        if catalog.has_all(folder, layout):
            return read(folder)
    raise NotFoundError(
        f"{folder}: no known data set in this folder.\n"
        "  Known are dataset.json (converted), *.inter (RecBole), schema.json (LensKit), and the files of "
        f"{', '.join(catalog.CATALOG)} and of any other MovieLens as published. For a table, give the file itself."
    )
