"""One word for any data: a catalog name, `synthetic`, a converted folder, or files as somebody has them."""

from __future__ import annotations

from pathlib import Path

from recleak.data import catalog, movielens, recbole, store
from recleak.data.columns import GUESSED, ColumnMap, read_columns
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.errors import NotFoundError, unknown_name

SYNTHETIC = "synthetic"


def open_data(
    what: str,
    preset: str | None = None,
    *,
    columns: ColumnMap = GUESSED,
    users: Path | None = None,
    items: Path | None = None,
) -> Interactions:
    """Interactions from a name or a path; a path's format is told by the files that are there."""
    if what in catalog.CATALOG:
        return catalog.load(what, preset)
    if preset is not None:
        raise unknown_name(f"preset of {what}", preset, ())
    if what == SYNTHETIC:
        return Synthetic().generate()
    path = Path(what)
    if path.is_dir():
        if (path / store.MANIFEST).exists():
            return store.load(path)
        if any(path.glob("*.inter")):
            return recbole.read_recbole(path)
        if any(path.glob("u.data*")):
            return movielens.read_ml_100k(path)
        if any(path.glob("ratings.dat*")):
            return movielens.read_ml_1m(path)
        raise NotFoundError(
            f"{path}: no known data set in this folder.\n"
            "  Known are dataset.json (converted), *.inter (RecBole), u.data or ratings.dat (MovieLens). "
            "For a table, give the file itself."
        )
    if path.is_file():
        if path.suffix == ".inter":
            return recbole.read_recbole(path)
        return read_columns(path, columns, users=users, items=items)
    raise unknown_name("data set", what, [*catalog.CATALOG, SYNTHETIC])
