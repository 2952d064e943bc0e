"""The command line: `recleak audit`, `recleak train`, `recleak data ...`, `recleak doctor`."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from recleak import __version__
from recleak.cli_data import data_app
from recleak.cli_reproduce import reproduce
from recleak.cli_train import show_utility, train
from recleak.errors import RecleakError
from recleak.terminal import err, out, say, say_json

app = cyclopts.App(
    name="recleak",
    help="Measure what a recommender system leaks about its users, to whom, and what stopping it costs.",
    version=__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # `main` says what an interrupted run has saved
)
app.command(data_app)
app.command(train)
app.command(reproduce)


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
    from recleak.utility import compare, facts

    interactions = open_data(data, preset)
    split = leave_one_out(interactions, by=order, seed=seed)
    comparison = compare(split, negatives=negatives, seed=seed)
    result = {
        **facts(data, preset, interactions, split, comparison),
        "models": [dataclasses.asdict(row) for row in comparison.rows],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "utility.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if json_only:
        say_json(result)
        return
    show_utility(comparison.rows, Text(f"{data}: {interactions.n_users:,} users, {len(interactions):,} rows"))
    graded = f"{comparison.users:,} users graded"
    say(f"{split.recipe}; {comparison.candidates}; {graded}; 95 % intervals over users")
    for what, count in split.decisions.items():
        say(f"  {count:,} {what}")
    if comparison.short_users:
        say(f"  {comparison.short_users:,} users have fewer candidates than asked for")
    for note in interactions.notes:
        say(f"note: {note}", to=err, style="yellow")
    say(f"Result: {path}")


@app.command
def doctor(*, json_only: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Tell versions, threads, data found, and what is missing."""
    from recleak.doctor import examine, problems

    facts = examine()
    if json_only:
        say_json(facts)
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
    table.add_row("data in", Text(", ".join(facts["search_path"])))
    for name, folder in facts["data"].items():
        table.add_row(f"  {name}", Text(folder or "not found"))
    out.print(table)
    missing = problems(facts)
    for each in missing:
        say(f"missing: {each}", style="yellow")
    out.print("The embedded data (`synthetic`) is always here." if missing else "Nothing is missing.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that the user can act on is printed without a traceback and exits with 2.

    Ctrl-C exits with 130, as from a shell; a run says what is saved.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows ? for it
            stream.reconfigure(errors="replace")
    try:
        app(arguments)
    except RecleakError as error:
        say(f"error: {error}", to=err, style="red")
        sys.exit(2)
    except OSError as error:
        say(f"error: {error.filename or 'a file'}: {error.strerror or error}", to=err, style="red")
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        say(str(interrupt) or "interrupted", to=err)
        sys.exit(130)
