"""`recleak data`: list, get, describe, convert, synthesize."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from recleak.data import catalog
from recleak.data.catalog import CATALOG, Entry
from recleak.data.columns import ColumnMap, Source, kinds_of
from recleak.errors import RecleakError
from recleak.terminal import err, out, say, say_json

if TYPE_CHECKING:  # what is slow to import waits until a command needs it
    from recleak.data.interactions import Interactions
    from recleak.data.predictability import Predictability

data_app = cyclopts.App(name="data", help="Find, fetch, describe, convert and make data sets.")


@Parameter(name="*")
@dataclass(frozen=True)
class TableOptions:
    """For a table of your own (CSV, TSV, Parquet): which column is what. Well-known names are guessed."""

    user: str | None = None
    "The column of users: its name, or its number counted from 0 if the file has no header."
    item: str | None = None
    "The column of items, likewise."
    rating: str | None = None
    "The column of ratings."
    time: str | None = None
    "The column of times (Unix seconds or milliseconds, ISO 8601, or dates such as 20240131)."
    separator: str | None = None
    "What separates fields; sniffed if not given."
    users: Path | None = None
    "A table of user attributes."
    user_id: str | None = None
    "Its column of users."
    attribute: tuple[str, ...] = ()
    "An attribute to read, `NAME`, `NAME:continuous` or `NAME:categorical`; may be repeated. Default: all."
    items: Path | None = None
    "A table of item facts: title, categories (separated by |), latitude, longitude."
    item_id: str | None = None
    "Its column of items."
    fact: tuple[str, ...] = ()
    "Which of its columns is which fact, such as `title=Name`; may be repeated. Default: well-known names."

    def column_map(self) -> ColumnMap:
        """The options as the reader takes them."""
        facts: dict[str, Source] = {}
        for each in self.fact:
            name, _, column = each.partition("=")
            if not column:
                raise RecleakError(f"--fact {each}: expected FACT=COLUMN, such as title=Name.")
            facts[name] = int(column) if column.isdecimal() else column
        return ColumnMap(
            user=_source(self.user),
            item=_source(self.item),
            rating=_source(self.rating),
            time=_source(self.time),
            separator=self.separator,
            user_id=_source(self.user_id),
            attributes=kinds_of(self.attribute),
            item_id=_source(self.item_id),
            facts=facts,
        )


_DEFAULT_TABLE = TableOptions()


def _source(given: str | None) -> Source | None:
    return int(given) if given is not None and given.isdecimal() else given


@data_app.command(name="list")
def list_(*, json_only: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """List the data sets, whether they are here, and their presets."""
    rows = [
        {
            "name": name,
            "title": entry.title,
            "folder": str(found) if (found := catalog.locate(name)) else None,
            "presets": list(entry.presets),
            "home": entry.home,
        }
        for name, entry in CATALOG.items()
    ]
    if json_only:
        say_json(rows)
        return
    table = Table("name", "what", "here", "presets")
    table.add_row("synthetic", "made here, with the marginals of MovieLens-100K", "always", "")
    for row in rows:
        table.add_row(
            str(row["name"]), str(row["title"]), "yes" if row["folder"] else "no", ", ".join(row["presets"] or ())
        )
    out.print(table)


@data_app.command
def get(name: str, *, accept_terms: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Find a data set: in RECLEAK_DATA, then in the cache, then at its publisher's (after the terms were accepted).

    Parameters
    ----------
    name
        A name of the catalog.
    accept_terms
        Accept the terms of use without being asked.
    """
    from recleak.data import fetch

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("", visible=False, total=None)

        def progress(what: str, have: int, total: int | None) -> None:
            bar.update(task, description=escape(what), completed=have, total=total, visible=True)

        def accept(entry: Entry) -> bool:
            say(f"{entry.title}, {entry.home}\nTerms: {entry.terms}", to=err)
            if accept_terms:
                return True
            if not sys.stdin.isatty():
                raise RecleakError("Nobody is here to accept the terms: repeat the command with --accept-terms.")
            bar.stop()
            try:
                return input("Accept and fetch it? [y/N] ").strip().lower() in ("y", "yes")
            except EOFError:
                return False
            finally:
                bar.start()

        folder, how = fetch.get(name, accept=accept, progress=progress)
    say(f"{CATALOG[name].title}: {folder} ({how})")
    for file, same in fetch.check_files(name, folder).items():
        say(f"  {file}: {'as published' if same else 'differs from the published file'}")


@data_app.command
def describe(
    what: str,
    *,
    preset: str | None = None,
    plot: Path | None = None,
    predict: Annotated[bool, Parameter(negative="")] = False,
    json_only: Annotated[bool, Parameter(name="--json", negative="")] = False,
    columns: TableOptions = _DEFAULT_TABLE,
) -> None:
    """Show counts (beside the paper's), activity, popularity, attribute balance, and what the reader noticed.

    Parameters
    ----------
    what
        A name of the catalog, `synthetic`, a converted folder, or a file.
    preset
        A paper's preprocessing, as listed by `recleak data list`.
    plot
        Also draw it: a file that ends in .png, .svg or .html.
    predict
        Also measure how well a plain reader tells each attribute from the raw interactions: what attacks compare with.
    """
    from recleak.data import chart
    from recleak.data.describe import describe as facts_of
    from recleak.data.describe import show
    from recleak.data.source import open_data

    if plot is not None:
        chart.check_ending(plot)
    interactions = open_data(what, preset, columns=columns.column_map(), users=columns.users, items=columns.items)
    entry = CATALOG.get(what)
    title = f"{entry.title if entry else what}{f', preset {preset}' if preset else ''}"
    chosen = entry.presets[preset] if entry and preset else None
    told = _told(interactions) if predict else {}
    if json_only:
        facts = {"name": what, "preset": preset, **facts_of(interactions)}
        if chosen is not None:
            facts["paper"] = {"source": chosen.paper, **asdict(chosen.published), "remark": chosen.remark}
        if predict:
            facts["told_from_interactions"] = {n: asdict(f) for n, f in told.items() if not isinstance(f, str)}
        say_json(facts)
    else:
        show(interactions, title if chosen is None else f"{title}: {chosen.paper}", out, chosen)
        for name, found in told.items():
            say(f"told from raw interactions: {found if not isinstance(found, str) else f'{name}: {found}'}")
            for note in () if isinstance(found, str) else found.notes:
                say(f"  note: {note}", style="yellow")
    if plot is not None:
        chart.save_chart(interactions, title, plot)
        say(f"Drawn: {plot}", to=err)


def _told(interactions: Interactions) -> dict[str, Predictability | str]:
    """How well a plain reader tells each attribute; ages and other numbers in three groups. Or why it cannot."""
    from recleak.data.predictability import attribute_auc
    from recleak.data.prepare import in_groups

    found: dict[str, Predictability | str] = {}
    for name, kind in interactions.attributes.items():
        try:
            if kind == "continuous":
                interactions = in_groups(interactions, name)
            found[name] = attribute_auc(interactions, name)
        except RecleakError as error:
            found[name] = str(error).splitlines()[0]
    return found


@data_app.command
def convert(
    what: str,
    *,
    to: Path,
    preset: str | None = None,
    columns: TableOptions = _DEFAULT_TABLE,
) -> None:
    """Write a data set as Parquet plus dataset.json (counts, attributes, fingerprint, notes).

    Parameters
    ----------
    what
        A name of the catalog, `synthetic`, or files as you have them.
    to
        The folder to write.
    preset
        A paper's preprocessing.
    """
    from recleak.data import store
    from recleak.data.source import open_data

    interactions = open_data(what, preset, columns=columns.column_map(), users=columns.users, items=columns.items)
    entry = CATALOG.get(what)
    name = f"{what}/{preset}" if preset else what
    manifest = store.save(interactions, to, name=name, terms=entry.terms if entry else "")
    for note in interactions.notes:
        say(f"note: {note}", to=err, style="yellow")
    say(f"{to}: {manifest.users:,} users, {manifest.items:,} items, {manifest.rows:,} rows")


@data_app.command
def synthesize(
    *,
    to: Path,
    users: int = 943,
    items: int = 1682,
    coupling: float = 0.5,
    mean_activity: float = 106.0,
    missing: float = 0.0,
    seed: int = 0,
) -> None:
    """Make synthetic data of any size and write it like `convert`.

    Parameters
    ----------
    to
        The folder to write.
    users
        How many users.
    items
        How many items.
    coupling
        How much attributes, tastes and items tell of each other, from 0 (nothing) to 1 (everything).
    mean_activity
        Mean number of interactions per user.
    missing
        The share of attribute values that are missing.
    seed
        Another seed, other data.
    """
    from recleak.data import store
    from recleak.data.synthetic import Synthetic

    recipe = Synthetic(
        n_users=users, n_items=items, coupling=coupling, mean_activity=mean_activity, missing=missing, seed=seed
    )
    manifest = store.save(recipe.generate(), to, name=repr(recipe))
    say(f"{to}: {manifest.users:,} users, {manifest.items:,} items, {manifest.rows:,} rows")
