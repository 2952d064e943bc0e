"""A reproduction to read: published numbers beside ours, claims with verdicts; for terminals and as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rich.table import Table as Grid
from rich.text import Text

from recleak.errors import ConfigError
from recleak.papers.base import Cell, Paper, Table, Verdict
from recleak.papers.store import Judged, Ours, Results
from recleak.terminal import out, say

_NO_DATA = "data not available"
_ONE_SEED = "run-to-run noise is not in it"  # but in the interval over several
_MARK = "<!-- written by `recleak reproduce"
_STYLE: dict[Verdict, str] = {"holds": "green", "does not hold": "red", "within noise": "yellow", "not run": "dim"}
_SPARK = "▁▂▃▄▅▆▇█"
_FEW = 3  # comparisons of a claim whose differences are said one by one
_Cells = dict[tuple[str, str], tuple[Cell, Ours]]  # by row and column


@dataclass(frozen=True)
class Report:
    """What was asked for, as far as it is stored."""

    results: Results
    cells: tuple[str, ...]
    claims: tuple[Judged, ...]

    @classmethod
    def of(cls, results: Results, cells: Sequence[str]) -> Report:
        """Of some cells, and of the claims that name one of them."""
        chosen = set(cells)
        claims = [
            claim
            for claim in results.paper.claims
            if chosen & {name for comparison in claim.holds_if for name in comparison.cells}
        ]
        return cls(results, tuple(cells), tuple(results.judge(claim) for claim in claims))

    def lacks_data(self, cell: Cell, ours: Ours) -> bool:
        """Whether a cell is blank because its data are not to be had."""
        return not ours.seeds and cell.run.get("data") in self.results.paper.unavailable

    def tables(self) -> Iterable[tuple[Table, _Cells]]:
        """The tables in the paper's order, each with its cells by row and column."""
        chosen = set(self.cells)
        for table in self.results.paper.all_tables:
            cells = {
                (cell.row, cell.column): (cell, self.results.ours(table.full(cell)))
                for cell in table.cells
                if table.full(cell) in chosen
            }
            if cells:
                yield table, cells


def heading(table: Table) -> str:
    """Its number and title."""
    name = f"Figure {table.id[3:]}" if table.id.startswith("fig") else f"Table {table.id}"
    return f"{name}: {table.title}"


def number(value: float | None) -> str:
    """As the papers print them: two decimals from 1, four below.

    >>> number(71.472), number(0.59283), number(None), number(float("inf"))
    ('71.47', '0.5928', '', '∞')
    """
    if value is None:
        return ""
    if not isfinite(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def _interval(ours: Ours, between: str) -> str:
    if ours.low is None or ours.high is None:
        return ""
    return f"{_end(ours.low)}{' to ' if between == '-' and ours.low < 0 else between}{_end(ours.high)}"


def _end(value: float) -> str:
    """An end of an interval needs no more than three digits."""
    return f"{value:.3f}" if 0.1 <= abs(value) < 1 else number(value)


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def _sparkline(ours: Ours) -> str:
    """A series in a few characters: its ends, and its shape between them."""
    heights = [y for _, y in ours.curve]
    low, high = min(heights), max(heights)
    some = heights[:: max(1, -(-len(heights) // 20))]
    steps = [int((y - low) / (high - low or 1) * (len(_SPARK) - 1)) for y in some]
    return f"{number(heights[0])} {''.join(_SPARK[step] for step in steps)} {number(heights[-1])}"


def counts(judged: Sequence[Verdict]) -> str:
    """How the comparisons of a claim went.

    >>> counts(["holds", "within noise", "holds"])
    '2 of 3 hold, 1 within noise'
    """
    count = Counter(judged)
    parts = [f"{count['holds']} of {len(judged)} hold{'s' * (len(judged) == 1)}"]
    parts += [f"{count[name]} {_PLURAL.get(name, name)}" for name in _OTHERS if count[name]]
    return ", ".join(parts)


_OTHERS: tuple[Verdict, ...] = ("does not hold", "within noise", "not run")
_PLURAL: dict[Verdict, str] = {"does not hold": "not"}


# --- the terminal -------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """Print tables and claims."""
    say(f"{report.results.paper.title}; {_variant(report)}")
    for table, cells in report.tables():
        _show_table(report, table, cells)
    if report.claims:
        say("")
        say("Claims")
    for judged in report.claims:
        line = Text()
        line.append(f"{judged.verdict}{_thin(judged)}: ", style=_STYLE[judged.verdict])
        line.append(f"{judged.claim.text} ({judged.claim.where}) ")
        line.append(f"{counts(judged.ours)}{_differences(judged)}{_own(judged)}")
        out.print(line, soft_wrap=True)


def _variant(report: Report) -> str:
    """How the paper was read."""
    named = {variant.name: variant.text for variant in report.results.paper.variants}
    return f"{report.results.variant}: {named[report.results.variant]}"


def _own(judged: Judged) -> str:
    """What the paper's own numbers say, where it gives them all."""
    if "not run" in judged.theirs:
        return ""
    return f"; in the paper's numbers {counts(judged.theirs)}"


def _differences(judged: Judged) -> str:
    """User by user, with intervals, where a claim has few comparisons."""
    known = [each for each in judged.differences if each is not None]
    if not known or len(judged.differences) > _FEW:
        return ""
    words = [f"{number(each.value)} [{_interval(each, ', ')}]" for each in known]
    return f"; difference{'s' * (len(words) > 1)} of the same users {', '.join(words)}"


def _thin(judged: Judged) -> str:
    """To be said beside the verdict."""
    return " (one seed)" if judged.on_one_seed else ""


def _show_table(report: Report, table: Table, cells: _Cells) -> None:
    rows, columns = _axes(cells)
    seeds = {ours.seeds for _, ours in cells.values() if ours.seeds}
    lacking = {place for place, (cell, ours) in cells.items() if report.lacks_data(cell, ours)}
    texts = {
        place: (number(cell.published), *_NO_DATA.rsplit(" ", 1))
        if place in lacking
        else _lines(cell, ours, len(seeds) > 1)
        for place, (cell, ours) in cells.items()
    }
    width = {
        column: max([len(line) for row in rows for line in texts.get((row, column), ())] + [_longest_word(column)])
        for column in columns
    }
    say("")
    say(heading(table))
    if max(map(len, rows)) + 4 + sum(each + 3 for each in width.values()) > out.width:
        for place, (cell, ours) in cells.items():
            words = [_line(cell, ours), *([_NO_DATA] if place in lacking else [])]
            say(f"  {cell.row} | {cell.column}: {', '.join(filter(None, words))}")
        say(f"  {_legend(cells, 'published; ours')}")
        return
    grid = Grid(show_lines=True)
    grid.add_column("", no_wrap=True)
    for column in columns:
        grid.add_column(Text(column), min_width=width[column])
    for row in rows:
        grid.add_row(Text(row), *[Text("\n".join(texts.get((row, column), ()))) for column in columns])
    out.print(grid)
    say(_legend(cells, "published; ours"))


def _legend(cells: _Cells, numbers: str) -> str:
    """What the cells of a table show, and what their intervals tell."""
    seeds = sorted({ours.seeds for _, ours in cells.values() if ours.seeds})
    if not seeds:
        return f"{numbers.partition('; ')[0]}; nothing of it was run"
    many = _seeds(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    if all(cell.series is not None for cell, _ in cells.values()):
        return f"first and last value; {many}"
    if seeds == [1]:
        return f"{numbers}; 95 % interval over users; one seed, so {_ONE_SEED}"
    beside = f" (with one, {_ONE_SEED})" if 1 in seeds else ""
    return f"{numbers}; 95 % interval over users and seeds; {many}{beside}"


def _axes(cells: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    places = list(cells)
    return list(dict.fromkeys(row for row, _ in places)), list(dict.fromkeys(column for _, column in places))


def _longest_word(label: str) -> int:
    return max(map(len, label.split()), default=0)


def _lines(cell: Cell, ours: Ours, with_seeds: bool) -> tuple[str, ...]:
    """A cell of a table: published, ours, interval; what is not known is a blank line."""
    plain = [number(cell.published), number(ours.value), _interval(ours, "-")]
    lines = [_sparkline(ours)] if ours.curve else plain
    return (*lines, *([_seeds(ours.seeds)] if with_seeds and ours.seeds else []))


def _line(cell: Cell, ours: Ours) -> str:
    parts = [f"published {number(cell.published)}"] if cell.published is not None else []
    if ours.curve:
        parts.append(_sparkline(ours))
    if ours.value is not None:
        parts.append(f"ours {number(ours.value)}" + (f" [{_interval(ours, ', ')}]" if ours.low is not None else ""))
    parts += [_seeds(ours.seeds)] if ours.seeds else []
    return ", ".join(parts)


# --- Markdown -----------------------------------------------------------------------------------------------------


def sections(report: Report) -> dict[str, str]:
    """Markdown by name: `VARIANT TABLE` for each table, `VARIANT claims`, and `VARIANT` for all of it."""
    variant = report.results.variant
    parts = {f"{variant} {table.id}": _markdown_table(report, table, cells) for table, cells in report.tables()}
    if report.claims:
        parts[f"{variant} claims"] = _markdown_claims(report.claims)
    return {variant: "\n".join(parts.values()), **parts}


def write_markdown(report: Report, path: Path) -> None:
    """Fill the places of a page between `<!-- begin NAME -->` and `<!-- end NAME -->`; or write all of a new page."""
    parts = sections(report)
    paper, variant = report.results.paper, report.results.variant
    page = _read(path)
    names = places(paper, variant, report.cells, path)
    if names:
        for name in names:
            text = parts[name]
            page = _place(name).sub(lambda found, text=text: f"{found[1]}\n\n{text}\n{found[2]}", page)  # type: ignore[misc]
    else:
        head = f"{_MARK} {paper.name}`; do not edit -->\n\n# {paper.title}\n\nVariant {_variant(report)}"
        page = f"{head}\n\n{parts[variant]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def places(paper: Paper, variant: str, cells: Iterable[str], path: Path) -> list[str]:
    """The names of the places of a page that cells of the paper fill; none if the whole page is ours to write.

    Some cells fill only places of single tables: in a place for everything, the rest would be lost. A page that cannot
    be filled is refused, which is better done before hours of measuring.
    """
    page, chosen = _read(path), set(cells)
    tables = [
        f"{variant} {table.id}" for table in paper.all_tables if any(table.full(cell) in chosen for cell in table.cells)
    ]
    for_all = [variant, *([f"{variant} claims"] if paper.claims else [])]
    partial, single = chosen != set(paper.cells), next(iter(tables), f"{variant} TABLE")
    found = [name for name in (tables if partial else [*for_all, *tables]) if _place(name).search(page)]
    if found or not page:
        return found
    if partial and any(_place(name).search(page) for name in for_all):
        raise ConfigError(
            f"{path}: got a selection of cells and no place for its tables, expected all cells for what is there.\n"
            "  Leave out --table, --data and --model, "
            f"or add <!-- begin {single} --> and <!-- end {single} --> for a single table."
        )
    if not page.startswith(_MARK):
        name = single if partial else variant
        raise ConfigError(
            f"{path}: a page without <!-- begin {name} --> and <!-- end {name} -->.\n"
            "  Add these two lines where the result shall go, or name another file."
        )
    return []


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def _place(name: str) -> re.Pattern[str]:
    word = re.escape(name)
    return re.compile(rf"(<!-- begin {word} -->).*?(<!-- end {word} -->)", re.DOTALL)


def _markdown_table(report: Report, table: Table, cells: _Cells) -> str:
    rows, columns = _axes(cells)
    lines = [f"**{_escape(heading(table))}**", "", _row("", *columns), _row(*["---"] * (len(columns) + 1))]
    for row in rows:
        found = [cells.get((row, column)) for column in columns]
        lines.append(_row(row, *["" if each is None else _markdown_cell(report, *each) for each in found]))
    note = _legend(cells, "*Published in italics*; ours")
    return "\n".join([*lines, "", f"{note[0].upper()}{note[1:]}.", ""])


def _markdown_cell(report: Report, cell: Cell, ours: Ours) -> str:
    parts = [] if cell.published is None else [f"*{number(cell.published)}*"]
    if ours.curve:
        parts.append(_sparkline(ours))
    elif ours.value is not None:
        parts.append(number(ours.value) + (f" [{_interval(ours, ', ')}]" if ours.low is not None else ""))
    elif report.lacks_data(cell, ours):
        parts.append(_NO_DATA)
    return "<br>".join(parts)


def _markdown_claims(claims: Sequence[Judged]) -> str:
    lines = [_row("claim", "where", "verdict", "comparisons", "in the paper's own numbers"), _row(*["---"] * 5)]
    for judged in claims:
        own = "" if "not run" in judged.theirs else counts(judged.theirs)
        claim, went = judged.claim, f"{counts(judged.ours)}{_differences(judged)}"
        lines.append(_row(claim.text, claim.where, f"**{judged.verdict}**{_thin(judged)}", went, own))
    return "\n".join([*lines, ""])


def _row(*words: str) -> str:
    return f"| {' | '.join(word.replace('|', '&#124;') for word in words)} |"


def _escape(text: str) -> str:
    return text.replace("|", "&#124;")
