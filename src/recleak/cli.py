"""The command line: `recleak audit`, `report`, `compare`, `schema`, `train`, `reproduce`, `data ...`, `doctor`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from recleak import __version__
from recleak.cli_audit import audit, compare, report_command, schema
from recleak.cli_data import data_app
from recleak.cli_reproduce import reproduce
from recleak.cli_train import train
from recleak.errors import RecleakError
from recleak.machine import interrupts_arrive
from recleak.terminal import err, out, say, say_json

app = cyclopts.App(
    name="recleak",
    help="Measure what a recommender system leaks about its users, to whom, and what stopping it costs.",
    version=__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # `main` says what an interrupted run has saved
)
app.command(data_app)
app.command(audit)
app.command(report_command, name="report")
app.command(compare)
app.command(schema)
app.command(train)
app.command(reproduce)


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
        with interrupts_arrive():
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
