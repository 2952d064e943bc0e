"""`recleak reproduce`: a paper's tables and claims, measured again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from recleak.errors import RecleakError
from recleak.terminal import err, say


def reproduce(
    paper: str,
    *,
    table: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    data: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    model: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    variant: str | None = None,
    seeds: int = 1,
    workers: int = 1,
    out_dir: Annotated[Path, Parameter(name="--out")] = Path("runs/reproduce"),
    known_file: Annotated[Path | None, Parameter(name="--known")] = None,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    markdown_file: Annotated[Path | None, Parameter(name="--markdown")] = None,
    figures_dir: Annotated[Path | None, Parameter(name="--figures")] = None,
    run: Annotated[bool, Parameter(name="--run", negative="--no-run")] = True,
) -> None:
    """Measure a paper's tables again and print ours beside theirs; then say which of its claims hold.

    Each measurement is stored as it is made and never made twice: after an interrupt, or a kill, the same command
    continues. What was not run stays blank. A claim holds if all its comparisons do, each with all of one interval on
    the claimed side of all of the other.

    Parameters
    ----------
    paper
        Its name, such as `imia`, or a TOML file of your own.
    table
        Only this table, or figure (`fig2`); may be repeated.
    data
        Only this data set; may be repeated.
    model
        Only this model; may be repeated.
    variant
        How the paper is read (default: its first variant, such as `as-written`).
    seeds
        Measure with this many seeds; what is shown is over all seeds that are stored.
    workers
        So many runs side by side, each in a process of its own with its share of the cores.
    out_dir
        Where the measurements are stored.
    known_file
        A file of cells as `--json` writes it, such as a published one: what it has is not measured again, and shown
        beside what is stored.
    json_file
        Write the cells to this file; without `--variant`, those that are stored of the other variants too.
    markdown_file
        Write tables and claims to this page: between its `<!-- begin VARIANT -->` and `<!-- end VARIANT -->`, if any;
        or a table between those of `VARIANT TABLE`, which is all that is filled with `--table`, `--data` or `--model`.
    figures_dir
        Draw the figures into this folder, each as PAPER-FIGURE.png; and PAPER-tradeoff.png, privacy against utility.
    run
        Measure what is missing; `--no-run` only reports what is stored.
    """
    from recleak.papers.base import load
    from recleak.papers.cells_file import as_json
    from recleak.papers.render import Report, places, show, write_markdown
    from recleak.papers.reproduce import Selection, measure_all, plan, results_of, with_data

    if seeds < 1 or workers < 1:
        raise RecleakError(f"Got --seeds {seeds} --workers {workers}, expected at least 1 of each.")
    loaded = load(paper)
    results = results_of(loaded, out_dir, variant, known_file)
    cells = Selection(table, data, model).cells(loaded)
    if not cells:
        raise RecleakError(f"{loaded.name}: no cell fits all that was given; leave out --table, --data or --model.")
    if markdown_file is not None:
        places(loaded, results.variant, cells, markdown_file)  # refused before, not after, hours of measuring
    failed = 0
    if run:
        runs, left_out = with_data(loaded, plan(results, cells, seeds))
        for name, count in left_out.items():
            say(f"{name}: data not available; {count} run{'s' * (count != 1)} left out.", to=err)
        failed = measure_all(loaded, runs, results.store, workers=workers)
    report = Report.of(results, cells)
    show(report)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        rows = as_json(report)
        for other in loaded.variants if variant is None else ():
            if other.name != results.variant:
                also = Report.of(results_of(loaded, out_dir, other.name, known_file), cells)
                rows += [row for row in as_json(also) if row["seeds"]]
        json_file.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        say(f"Cells: {json_file}")
    if markdown_file is not None:
        write_markdown(report, markdown_file)
        say(f"Page: {markdown_file}")
    if figures_dir is not None:
        from recleak.papers.figures import draw

        drawn, empty = draw(report, figures_dir)
        for path in drawn:
            say(f"Figure: {path}")
        if empty:
            say(f"Not drawn, as nothing of it is stored: {', '.join(empty)}.", to=err)
        if not drawn and not empty:
            say("Not drawn: no figure is part of what was asked for.", to=err)
    if failed:
        say(f"error: {failed} run{'s' * (failed != 1)} failed; run again to try them again.", to=err, style="red")
        sys.exit(1)
