"""The command line: `recleak audit`, `recleak data ...`, `recleak doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from recleak import __version__
from recleak.data import catalog
from recleak.data.catalog import CATALOG, Entry
from recleak.data.columns import ColumnMap, Kind, Source
from recleak.errors import RecleakError

if TYPE_CHECKING:  # what is slow to import waits until a command needs it
    from recleak.data.interactions import Interactions
    from recleak.metrics.intervals import Estimate

app = cyclopts.App(
    name="recleak",
    help="Measure what a recommender system leaks about its users, to whom, and what stopping it costs.",
    version=__version__,
    help_format="markdown",
)
data_app = cyclopts.App(name="data", help="Find, fetch, describe and convert data sets.")
app.command(data_app)

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def _say(line: str, *, to: Console = out, style: str | None = None) -> None:
    """One line as it is: no markup, not wrapped, so that paths can be copied."""
    to.print(escape(line), style=style, soft_wrap=True)


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
    "The column of times (Unix seconds or milliseconds, or ISO 8601)."
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

    def column_map(self) -> ColumnMap:
        """The options as the reader takes them."""
        kinds: dict[str, Kind | None] = {}
        for each in self.attribute:
            name, _, kind = each.partition(":")
            if kind not in ("", "categorical", "continuous"):
                raise RecleakError(f"--attribute {each}: the kind is {kind!r}, expected categorical or continuous.")
            kinds[name] = "categorical" if kind == "categorical" else "continuous" if kind == "continuous" else None
        return ColumnMap(
            user=_source(self.user),
            item=_source(self.item),
            rating=_source(self.rating),
            time=_source(self.time),
            separator=self.separator,
            user_id=_source(self.user_id),
            attributes=kinds,
            item_id=_source(self.item_id),
        )


_DEFAULT_TABLE = TableOptions()


def _source(given: str | None) -> Source | None:
    return int(given) if given is not None and given.isdecimal() else given


@app.command
def audit(
    *,
    data: str = "synthetic",
    preset: str | None = None,
    order: Literal["time", "random"] = "time",
    negatives: Annotated[
        int | None, Parameter(help="Rank against this many sampled items (default: all items).")
    ] = None,
    seed: int = 0,
    out_dir: Annotated[Path, Parameter(name="--out")] = Path("runs/quickstart"),
    json_only: Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")] = False,
) -> None:
    """Train and grade the baselines MostPop and ItemKNN: the utility that a private recommender must keep.

    Leave-one-out; Hit, NDCG and MRR with 95 % intervals (bootstrap over users); chance, exactly, in the first row.
    Attacks and defenses are not part of this version.

    Parameters
    ----------
    data
        A name of the catalog, `synthetic` (embedded, no download), or a path.
    preset
        A paper's preprocessing, as listed by `recleak data list`.
    order
        The held-out item is the last in time, or a random one.
    seed
        Decides all draws.
    out_dir
        Where the result is written.
    """
    from recleak.data.source import open_data
    from recleak.data.split import leave_one_out
    from recleak.utility import compare

    interactions = open_data(data, preset)
    split = leave_one_out(interactions, by=order, seed=seed)
    comparison = compare(split, negatives=negatives, seed=seed)
    result = {
        "recleak": __version__,
        "data": data,
        "preset": preset,
        "fingerprint": interactions.fingerprint,
        "split": split.recipe,
        "decisions": split.decisions,
        "candidates": comparison.candidates,
        "users": comparison.users,
        "users_with_fewer_candidates": comparison.short_users,
        "models": [dataclasses.asdict(row) for row in comparison.rows],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "utility.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    if json_only:
        print(json.dumps(result, indent=2))  # noqa: T201
        return
    metrics = ("Hit@10", "Hit@20", "NDCG@10", "MRR")  # with one held-out item Recall is Hit
    table = Table(title=f"{data}: {interactions.n_users:,} users, {len(interactions):,} rows", show_lines=True)
    for heading in ("model", *metrics, "seconds"):
        table.add_column(heading, no_wrap=True)
    for row in comparison.rows:
        table.add_row(row.model, *[_cell(row.metrics[name]) for name in metrics], f"{row.seconds:.2f}")
    out.print(table)
    graded = f"{comparison.users:,} users graded"
    _say(f"{split.recipe}; {comparison.candidates}; {graded}; 95 % intervals over users")
    for what, count in split.decisions.items():
        _say(f"  {count:,} {what}")
    _say(f"Result: {path}")


def _cell(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}\n{estimate.low:.3f}–{estimate.high:.3f}"


@app.command
def doctor(*, json_only: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Tell versions, threads, data found, and what is missing."""
    from recleak.doctor import examine, problems

    facts = examine()
    if json_only:
        print(json.dumps(facts, indent=2))  # noqa: T201
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("recleak", facts["recleak"])
    table.add_row("python", f"{facts['python']} on {facts['platform']}")
    table.add_row("packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items()))
    extras = (f"{name} {version or '(not installed)'}" for name, version in facts["extras"].items())
    table.add_row("extras", ", ".join(extras))
    table.add_row(
        "machine", f"{facts['cores']} cores, {facts['memory_gib']} GiB; torch uses {facts['torch_threads']} threads"
    )
    table.add_row("browser", facts["browser"] or "none (only the tests of pages need one)")
    table.add_row("data in", ", ".join(facts["search_path"]))
    for name, folder in facts["data"].items():
        table.add_row(f"  {name}", folder or "not found")
    out.print(table)
    missing = problems(facts)
    for each in missing:
        _say(f"missing: {each}", style="yellow")
    out.print("The embedded data (`synthetic`) is always here." if missing else "Nothing is missing.")


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
        print(json.dumps(rows, indent=2))  # noqa: T201
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
            _say(f"{entry.title}, {entry.home}\nTerms: {entry.terms}", to=err)
            if accept_terms:
                return True
            if not sys.stdin.isatty():
                raise RecleakError("Nobody is here to accept the terms: repeat the command with --accept-terms.")
            bar.stop()
            accepted = input("Accept and fetch it? [y/N] ").strip().lower() in ("y", "yes")
            bar.start()
            return accepted

        folder, how = fetch.get(name, accept=accept, progress=progress)
    _say(f"{CATALOG[name].title}: {folder} ({how})")
    for file, same in fetch.check_files(name, folder).items():
        _say(f"  {file}: {'as published' if same else 'differs from the published file'}")


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
        Also measure how well each attribute can be told from the raw interactions: the ceiling of any attack.
    """
    from recleak.data import chart
    from recleak.data.describe import describe as facts_of
    from recleak.data.describe import show
    from recleak.data.source import open_data

    interactions = open_data(what, preset, columns=columns.column_map(), users=columns.users, items=columns.items)
    entry = CATALOG.get(what)
    title = f"{entry.title if entry else what}{f', preset {preset}' if preset else ''}"
    chosen = entry.presets[preset] if entry and preset else None
    ceilings = _ceilings(interactions) if predict else {}
    if json_only:
        print(json.dumps({**facts_of(interactions), **({"ceilings": ceilings} if predict else {})}, indent=2))  # noqa: T201
    else:
        show(interactions, title if chosen is None else f"{title}: {chosen.paper}", out, chosen)
        for line in ceilings.values():
            _say(f"from raw interactions, {line}")
    if plot is not None:
        chart.save_chart(interactions, title, plot)
        _say(f"Drawn: {plot}", to=err)


def _ceilings(interactions: Interactions) -> dict[str, str]:
    """How well each attribute can be told from the interactions; ages in three groups, other numbers in halves."""
    from recleak.data.predictability import attribute_auc
    from recleak.data.prepare import age_groups, grouped

    found = {}
    for name, kind in interactions.attributes.items():
        try:
            if kind == "continuous":
                median = interactions.users[name].median()
                edge = (float(median),) if isinstance(median, float) else ()
                interactions = age_groups(interactions) if name == "age" else grouped(interactions, name, edge)
            found[name] = str(attribute_auc(interactions, name))
        except RecleakError as error:
            found[name] = f"{name}: {str(error).splitlines()[0]}"
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
        _say(f"note: {note}", to=err, style="yellow")
    _say(f"{to}: {manifest.users:,} users, {manifest.items:,} items, {manifest.rows:,} rows")


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
    _say(f"{to}: {manifest.users:,} users, {manifest.items:,} items, {manifest.rows:,} rows")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that the user can act on is printed without a traceback and exits with 2."""
    try:
        app(arguments)
    except RecleakError as error:
        _say(f"error: {error}", to=err, style="red")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
