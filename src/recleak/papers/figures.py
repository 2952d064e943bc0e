"""A paper's figures from what is stored, as PNG: lines, bars, dots with intervals; and privacy against utility."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from recleak.papers.base import Cell, Chart, Scalar, Table, Tradeoff, Way
from recleak.papers.render import Report, heading
from recleak.papers.store import Ours, Question, Results
from recleak.png import packed, width

_WIDTH, _SCALE = 900, 1.5  # of a picture in pixels; pixels of a point of type
_INNER = 520  # points for all panels of a row
_ACROSS = 3  # panels
_TALL = 210
_WIDEST_BAR = 45
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
_Rows = list[dict[str, Any]]
_Panel = alt.LayerChart | alt.FacetChart


def draw(report: Report, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the figures of a report as PAPER-FIGURE.png; returns the files, and the figures of which nothing is stored.

    The picture of privacy against utility, PAPER-tradeoff.png, has the report's attacks; their utility may be any
    stored one.
    """
    results = report.results
    paper, figures = results.paper, {table.id for table in results.paper.figures}
    pictures: dict[str, _Panel | alt.VConcatChart | None] = {
        table.id: _figure(results, table, list(cells.values()))
        for table, cells in report.tables()
        if table.id in figures
    }
    if paper.tradeoff is not None and (asked := _attacked(report, paper.tradeoff)):
        pictures["tradeoff"] = _tradeoff(results, paper.tradeoff, asked)
    drawn = {folder / f"{paper.name}-{name}.png": picture for name, picture in pictures.items() if picture is not None}
    for path, picture in drawn.items():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_png(picture))
    return list(drawn), [name for name, picture in pictures.items() if picture is None]


def _png(picture: _Panel | alt.VConcatChart) -> bytes:
    """About as wide as a page, whatever the axes and legends take."""
    specification = (
        picture.configure_view(stroke="#cccccc")
        .configure_axis(gridColor="#eeeeee", domainColor="#888888", tickColor="#888888", titleFontWeight="normal")
        .configure_legend(
            orient="bottom", titleFontWeight="normal", labelLimit=0, symbolStrokeWidth=2, symbolSize=60, symbolOpacity=1
        )
        .configure_header(labelFontWeight="bold", labelFontSize=11)
        .configure_title(anchor="start", fontSize=13, subtitleColor="#555555", subtitleFontSize=11, offset=10)
        .configure_concat(spacing=14)
        .properties(background="white", padding=8)
        .to_dict()
    )
    made = vl_convert.vegalite_to_png(specification, scale=_SCALE)
    return packed(vl_convert.vegalite_to_png(specification, scale=_SCALE * _WIDTH / width(made)))


def _title(results: Results, words: str, cells: Iterable[Ours], intervals: bool) -> alt.TitleParams:
    """What it shows, how the paper was read, and with how many seeds."""
    seeds = sorted({each.seeds for each in cells if each.seeds})
    many = f"{seeds[0]} seed{'s' * (seeds[0] != 1)}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    over = "users" if seeds == [1] else "users and seeds"
    subtitle = f"{results.variant}, {many}" + (f"; 95 % intervals over {over}" if intervals else "")
    return alt.TitleParams(textwrap.wrap(words, 92), subtitle=subtitle)


def _ordered(names: Iterable[str], marks: Sequence[Any], known: Iterable[str]) -> alt.Scale:
    """A mark for each of the names that are there; what is missing does not change the marks of others."""
    there = set(names)
    every = list(dict.fromkeys(known))
    chosen = [(name, mark) for name, mark in zip(every, islice(cycle(marks), len(every)), strict=True) if name in there]
    return alt.Scale(domain=[name for name, _ in chosen], range=[mark for _, mark in chosen])


def _finite(ours: Ours) -> tuple[float | None, float | None]:
    """The interval, if it is known and ends."""
    ends = (ours.low, ours.high)
    return ends if all(end is not None and isfinite(end) for end in ends) else (None, None)


# --- a paper's figures ------------------------------------------------------------------------------------------------


def _figure(results: Results, table: Table, cells: Sequence[tuple[Cell, Ours]]) -> _Panel | None:
    """Lines if cells are series; else bars, or lines over a setting that is a number, or dots, with intervals."""
    chart = table.chart or Chart()
    series = any(cell.series is not None for cell in table.cells)
    rows: _Rows = []
    for cell, ours in cells:
        curve = ours.curve if series else []
        if not series and ours.value is not None and isfinite(ours.value):
            curve = [(_place(results, chart, cell), ours.value)]  # type: ignore[list-item]
        low, high = _finite(ours)
        names = {name: results.paper.caption(getattr(chart, name), cell) for name in ("panel", "color", "dash")}
        rows += [{**names, "x": x, "y": y, "low": low, "high": high} for x, y in curve if _shown(chart, x, y)]
    if not rows:
        return None
    used = [ours for _, ours in cells if ours.curve or ours.value is not None]
    intervals = any(row["low"] is not None for row in rows)
    title = _title(results, heading(table), used, intervals and not series)
    return _panels(results, table, chart, rows, isinstance(rows[0]["x"], float)).properties(title=title)


def _place(results: Results, chart: Chart, cell: Cell) -> float | str:
    value: Scalar = {**cell.run, **cell.ask}.get(chart.at, "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return results.paper.caption(f"{{{chart.at}}}", cell)


def _shown(chart: Chart, x: float | str, y: float) -> bool:
    """A logarithm has no place for 0."""
    return ("y" not in chart.log or y > 0) and ("x" not in chart.log or isinstance(x, str) or x > 0)


def _panels(results: Results, table: Table, chart: Chart, rows: _Rows, numbers: bool) -> _Panel:
    def named(pattern: str) -> list[str]:
        return [results.paper.caption(pattern, cell) for cell in table.cells]

    series = any(cell.series is not None for cell in table.cells)
    panels = [name for name in dict.fromkeys(named(chart.panel)) if name in {row["panel"] for row in rows}]
    across = min(len(panels), _ACROSS)
    width = (_INNER - 20 * (across - 1)) / across
    colors = _ordered((row["color"] for row in rows), _COLORS, named(chart.color))
    color: dict[str, Any] = {
        "color": alt.Color(
            "color:N",
            scale=colors,
            legend=alt.Legend(title=None, columns=4) if len({row["color"] for row in rows}) > 1 else None,
        )
    }
    y = _y(chart, [row["y"] for row in rows])
    if numbers:
        declared = () if series else table.cells
        places = (_place(results, chart, cell) for cell in declared)
        tried = sorted(each for each in places if isinstance(each, float) and (each > 0 or "x" not in chart.log))
        fixed: dict[str, Any] = {"domain": [tried[0], tried[-1]]} if len(set(tried)) > 1 else {}
        ticks: dict[str, Any] = {"values": sorted(set(tried))} if tried else {"tickCount": 6}
        x_scale = alt.Scale(type="log" if "x" in chart.log else "linear", nice=False, padding=6, **fixed)
        axis = alt.Axis(labelOverlap=True, grid=False, **ticks)
        x: Any = alt.X("x:Q", title=chart.x or None, scale=x_scale, axis=axis)
    else:
        there = list(dict.fromkeys(row["x"] for row in rows))
        group = _WIDEST_BAR * len({row["color"] for row in rows})
        beside = (width * 0.8 / group - len(there) + 0.2) / 2  # the margin, in steps, for groups so wide
        x_scale = alt.Scale(paddingInner=0.2, paddingOuter=min(1, max(0.2, beside)))
        x = alt.X("x:N", title=chart.x or None, sort=there, scale=x_scale, axis=alt.Axis(labelAngle=0, labelLimit=150))
    base = alt.Chart(pl.DataFrame(rows, infer_schema_length=None))
    if chart.bars or not numbers:
        color["xOffset"] = alt.XOffset("color:N", sort=colors.to_dict()["domain"])
    ends = base.transform_filter("isValid(datum.low)").encode(x=x, **color)
    if chart.bars and not numbers:
        layers = [base.mark_bar().encode(x=x, y=y, **color)]
        ends = ends.encode(color=alt.value("#222222"))
    elif numbers:
        dashed = chart.dash and {
            "strokeDash": alt.StrokeDash(
                "dash:N",
                scale=_ordered((row["dash"] for row in rows), _DASHES, named(chart.dash)),
                legend=alt.Legend(title=None, symbolStrokeColor="#444444", symbolSize=250),
            )
        }
        layers = [
            base.mark_line(strokeWidth=1.8).encode(x=x, y=y, **color, **(dashed or {})),
            base.mark_point(filled=True, size=22, opacity=1).encode(x=x, y=y, **color),
        ]
    else:
        layers = [base.mark_point(filled=True, size=40, opacity=1).encode(x=x, y=y, **color)]
    if any(row["low"] is not None for row in rows):
        layers.append(ends.mark_rule(strokeWidth=1.4).encode(y=alt.Y("low:Q"), y2="high:Q"))
    drawn = alt.layer(*layers).properties(width=width, height=_TALL)
    if len(panels) == 1 and not panels[0]:
        return drawn
    return drawn.facet(alt.Facet("panel:N", title=None, sort=panels), columns=across)


def _y(chart: Chart, heights: Sequence[float]) -> alt.Y:
    """From 0; or in powers of ten, if there are at least two."""
    if "y" not in chart.log:
        return alt.Y("y:Q", title=chart.y or None, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5))
    decades = [10.0**power for power in range(floor(log10(min(heights))), ceil(log10(max(heights))) + 1)]
    ticks = alt.Axis(values=decades, format="~g") if len(decades) > 2 else alt.Axis(labelOverlap=True, format="~g")
    return alt.Y("y:Q", title=chart.y or None, scale=alt.Scale(type="log"), axis=ticks)


# --- privacy against utility ------------------------------------------------------------------------------------------


def _attacked(report: Report, tradeoff: Tradeoff) -> list[tuple[Cell, Way, Way]]:
    """The cells of a report's tables that are an attack on a defense, each measurement once; none without a defense."""
    found: dict[str, tuple[Cell, Way, Way]] = {}
    left_out = {*(table.id for table in report.results.paper.figures), *tradeoff.without}
    for cell in (cell for table, cells in report.tables() if table.id not in left_out for cell, _ in cells.values()):
        attack = next((way for way in tradeoff.attacks if way.metric == cell.metric and way.ask == cell.ask), None)
        defense = _fitting(tradeoff.defenses, cell)
        if attack is not None and defense is not None:
            found.setdefault(f"{report.results.question(cell).name} {cell.metric}", (cell, attack, defense))
    defended = any(defense != tradeoff.defenses[0] for _, _, defense in found.values())
    return list(found.values()) if defended else []


def _fitting(ways: Iterable[Way], cell: Cell) -> Way | None:
    """The way that names most of a cell's run."""
    fitting = [way for way in ways if way.run.items() <= cell.run.items()]
    return max(fitting, key=lambda way: len(way.run), default=None)


def _tradeoff(results: Results, tradeoff: Tradeoff, asked: Sequence[tuple[Cell, Way, Way]]) -> alt.VConcatChart | None:
    """A large panel for the first model and data, small ones for the others."""
    paper = results.paper
    names = {
        (results.question(cell).name, cell.metric): name
        for name, cell in reversed(paper.cells.items())
        if cell.ratio is None
    }
    panels: dict[str, _Rows] = {}
    used: list[Ours] = []
    for cell, attack, defense in asked:
        question = results.question(cell)
        utility = Question(question.runner, question.code, question.variant, cell.run, tradeoff.utility.ask)
        same_run = names.get((utility.name, tradeoff.utility.metric))
        y = results.ours(names[question.name, cell.metric])
        x = results.ours(same_run) if same_run is not None else Ours()
        if x.value is None or y.value is None:
            continue
        used += [x, y]
        (left, right), (low, high) = _finite(x), _finite(y)
        point = {"x": x.value, "left": left, "right": right, "y": y.value, "low": low, "high": high}
        words = {"attack": attack.label, "defense": defense.label, "point": paper.caption(defense.point, cell)}
        panels.setdefault(paper.caption(tradeoff.panel, cell), []).append({**point, **words})
    none = tradeoff.defenses[0].label
    panels = {name: each for name, each in panels.items() if any(row["defense"] != none for row in each)}
    if not panels:
        return None
    chance: dict[str, Ours] = {}
    for name, cell in paper.cells.items():
        if (
            cell.ask == tradeoff.chance.ask
            and cell.metric == tradeoff.chance.metric
            and _fitting([tradeoff.chance], cell)
        ):
            chance.setdefault(paper.caption(tradeoff.panel, cell), results.ours(name))
    rows = [row for each in panels.values() for row in each]
    scales = (
        _ordered((row["attack"] for row in rows), _COLORS, (way.label for way in tradeoff.attacks)),
        _ordered((row["defense"] for row in rows), _SHAPES, (way.label for way in tradeoff.defenses)),
    )
    top = ceil(10 * max(row["high"] or row["y"] for row in rows)) / 10  # the same for all panels
    drawn = [
        _points(tradeoff, name, each, chance.get(name, Ours()).value, scales, top, large=place == 0)
        for place, (name, each) in enumerate(panels.items())
    ]
    small = [alt.concat(*drawn[1:], columns=_ACROSS)] if drawn[1:] else []
    title = _title(results, tradeoff.title, used, any(row["low"] is not None for row in rows))
    return alt.vconcat(drawn[0], *small).properties(title=title)


def _points(
    tradeoff: Tradeoff,
    name: str,
    rows: _Rows,
    chance: float | None,
    scales: tuple[alt.Scale, alt.Scale],
    top: float,
    *,
    large: bool,
) -> _Panel:
    none = tradeoff.defenses[0].label
    lines: _Rows = []
    for attack, defense in dict.fromkeys((row["attack"], row["defense"]) for row in rows if row["defense"] != none):
        start = [row for row in rows if row["attack"] == attack and row["defense"] == none][:1]
        path = start + [row for row in rows if row["attack"] == attack and row["defense"] == defense]
        keys = {"attack": attack, "line": f"{attack} {defense}"}
        lines += [{**keys, "x": row["x"], "y": row["y"], "order": place} for place, row in enumerate(path)]
    first = {(row["defense"], row["point"]): row for row in reversed(rows)}  # words stand once, beside the first attack
    rows = [{**row, "words": row["point"] if row in first.values() else ""} for row in rows]
    base = alt.Chart(pl.DataFrame(rows, infer_schema_length=None))
    utility = tradeoff.utility.label
    axis = alt.Axis(labelOverlap=True, tickCount=8 if large else 4, grid=False)
    x = alt.X(
        "x:Q", title=utility if large else utility.split(" (")[0], scale=alt.Scale(zero=False, padding=12), axis=axis
    )
    y = alt.Y(
        "y:Q", title=tradeoff.leak if large else None, scale=alt.Scale(domain=[0, top]), axis=alt.Axis(tickCount=5)
    )
    color = alt.Color("attack:N", scale=scales[0], legend=alt.Legend(title="attack", columns=1))
    shape = alt.Shape("defense:N", scale=scales[1], legend=alt.Legend(title="defense", columns=3))
    layers: list[alt.Chart] = []
    if lines:
        path_of = alt.Chart(pl.DataFrame(lines)).mark_line(strokeWidth=1, opacity=0.55)
        layers.append(path_of.encode(x=x, y=y, color=color, detail="line:N", order="order:Q"))
    if any(row["low"] is not None for row in rows):
        rule = base.mark_rule(opacity=0.35).transform_filter("isValid(datum.low)")
        layers.append(rule.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color))
    if any(row["left"] is not None for row in rows):
        rule = base.mark_rule(opacity=0.35).transform_filter("isValid(datum.left)")
        layers.append(rule.encode(x=alt.X("left:Q"), x2="right:Q", y=y, color=color))
    size = 70 if large else 35
    layers.append(base.mark_point(filled=True, opacity=1, size=size).encode(x=x, y=y, color=color, shape=shape))
    if large:
        text = base.mark_text(align="left", dx=7, dy=-6, fontSize=9)
        layers.append(text.encode(x=x, y=y, text="words:N", color=color))
    if chance is not None:
        level = alt.Chart(pl.DataFrame({"y": [chance], "label": [tradeoff.chance.label]}))
        layers.append(level.mark_rule(strokeDash=[5, 4], color="#444444").encode(y=y))
        if large:
            words = level.mark_text(align="left", baseline="top", dx=4, dy=3, fontSize=10, color="#444444")
            layers.append(words.encode(x=alt.value(0), y=y, text="label:N"))
    width, height = (_INNER, 300) if large else ((_INNER - 90) / _ACROSS, 110)
    return alt.layer(*layers).properties(width=width, height=height, title=alt.TitleParams(name, fontSize=11))
