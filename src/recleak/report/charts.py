"""The report's charts as Vega-Lite: one view each, as wide as the page lets it be.

Colors are CSS variables, so that a chart follows the page into the dark and onto paper without being drawn again. Keys
are HTML, so that they wrap on a phone. Data are columns and rows, not objects: half the bytes (`page.js` unpacks them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

import altair as alt
import numpy as np
import polars as pl
from numpy.typing import NDArray

from recleak.report.markup import known

Rows = list[dict[str, Any]]
_COLORS = [f"var(--c{place})" for place in range(8)]
_DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))
_INK, _FAINT = "var(--ink)", "var(--faint)"
_NARROW = "width < 430"  # of the inner plot: a phone
_MOST_ROWS = 3000  # of one chart


@dataclass(frozen=True)
class Series:
    """What is drawn alike all over the page."""

    label: str
    color: str
    dash: tuple[int, ...] = (1, 0)


def series_of(labels: Iterable[str]) -> list[Series]:
    """A color each; past the eighth the dashes tell them apart. The first, the reference, is in ink."""
    return [Series(label, _COLORS[place % 8], _DASHES[place // 8 % len(_DASHES)]) for place, label in enumerate(labels)]


def nulls_of(labels: Iterable[str]) -> list[Series]:
    """Guessers are grey, and dashed."""
    return [Series(label, _FAINT, _DASHES[1 + place % 3]) for place, label in enumerate(labels)]


def tradeoff(points: Rows, baselines: Mapping[str, float], utility: str) -> dict[str, Any]:
    """Leakage against utility: x, left, right; y, low, high; null; letter; label; on the Pareto front or not.

    Points are letters; there is room for labels on a wide page only.
    """
    points = _clipped(points)
    xs = [v for row in points for v in (row["x"], row["left"], row["right"]) if known(v)] + list(baselines.values())
    ys = [v for row in points for v in (row["y"], row["low"], row["high"], row["null"]) if known(v)] + [0.5]
    x_domain, y_domain = _around(xs, 0.06), _around(ys, 0.08)
    placed = _labelled(points, x_domain, y_domain)
    x = alt.X("x:Q", title=f"{utility}: more useful →", scale=_scale(x_domain), axis=alt.Axis(grid=False))
    y = alt.Y("y:Q", title="AUC of the strongest attack: leaks more →", scale=_scale(y_domain))
    base = _chart(placed)
    color = alt.Color("color:N", scale=None)
    layers: list[alt.Chart] = [_level(0.5, y)]
    if baselines:
        lines = _chart(_staggered(baselines, x_domain))
        layers.append(lines.mark_rule(color=_FAINT, strokeDash=[2, 3]).encode(x=x))
        place = {key: alt.ExprRef(f"datum.{key}") for key in ("dy", "align")}
        words = lines.mark_text(baseline="bottom", color=_FAINT, fontSize=11, **place)  # type: ignore[arg-type]
        layers.append(words.encode(x=x, y=alt.value(0), text="label:N"))
    front = sorted((row for row in points if row["front"]), key=lambda row: (row["x"], row["y"]))
    if len(front) > 1:
        stairs = _chart([{"x": row["x"], "y": row["y"]} for row in front])
        line = stairs.mark_line(interpolate="step-before", color=_INK, strokeWidth=1, strokeDash=[5, 4], opacity=0.6)
        layers.append(line.encode(x=x, y=y))
    known_null = base.transform_filter("isValid(datum.null)")
    layers.append(
        known_null.mark_tick(color=_FAINT, thickness=3, width=16, orient="horizontal").encode(x=x, y="null:Q")
    )
    vertical = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(
        strokeWidth=1.5, opacity=0.75
    )
    layers.append(vertical.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color))
    level = base.transform_filter("isValid(datum.left) && isValid(datum.right)").mark_rule(
        strokeWidth=1.5, opacity=0.75
    )
    layers.append(level.encode(x=alt.X("left:Q"), x2="right:Q", y=y, color=color))
    tips = _tips(label="defense", utility=utility, leakage="AUC", guesser="guesser's AUC", where="Pareto front")
    layers.append(base.mark_circle(size=330, opacity=1).encode(x=x, y=y, color=color, tooltip=tips))
    letters = base.mark_text(color="var(--paper)", fontWeight="bold", fontSize=11, dy=1)
    layers.append(letters.encode(x=x, y=y, text="letter:N", tooltip=tips))
    side = {key: alt.ExprRef(f"datum.{key}") for key in ("dx", "dy", "align")}
    shown = base.transform_filter("datum.shown").mark_text(color=_INK, fontSize=12, limit=190, **side)  # type: ignore[arg-type]
    layers.append(shown.encode(x=x, y=y, text=alt.condition(_NARROW, alt.value(""), "label:N")))
    return _spec(layers, 380)


def roc(curves: Rows, marks: Sequence[Series]) -> dict[str, Any]:
    """True against false positive rates, both in powers of ten: series, curve (one line each), fpr, tpr."""
    smallest = min([row["fpr"] for row in curves] + [row["tpr"] for row in curves] + [0.01])
    first = min(-2, max(-5, floor(log10(smallest))))
    curves = [row for row in curves if row["fpr"] >= 10**first and row["tpr"] >= 10**first]
    axis = alt.Axis(values=[10.0**power for power in range(first, 1)], format="~%")
    scale = alt.Scale(type="log", domain=[10**first, 1], clamp=True)
    x = alt.X("fpr:Q", title="false positives, of all that are not the user's →", scale=scale, axis=axis)
    y = alt.Y("tpr:Q", title="true positives, of all that are →", scale=scale, axis=axis)
    diagonal = _chart([{"fpr": 10.0**first, "tpr": 10.0**first}, {"fpr": 1.0, "tpr": 1.0}])
    lines = _chart(curves).mark_line(strokeWidth=1.75, strokeJoin="round", clip=True)
    return _spec(
        [
            diagonal.mark_line(color=_FAINT, strokeWidth=1, opacity=0.6).encode(x=x, y=y),
            lines.encode(x=x, y=y, color=_color(marks), strokeDash=_dash(marks), detail="curve:N", tooltip=_ROC_TIPS),
        ],
        380,
    )


def rounds(rows: Rows, marks: Sequence[Series], title: str = "AUC") -> dict[str, Any]:
    """AUC, or an accuracy, by round: series, x, value, low, high."""
    x = alt.X("x:Q", title="round →", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(grid=False, tickMinStep=1))
    domain = _auc_domain(rows) if title == "AUC" else (0.0, max([0.05, *(row["high"] or row["value"] for row in rows)]))
    y = alt.Y("value:Q", title=title, scale=_scale(domain))
    base = _chart(_clipped(rows))
    band = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_area(opacity=0.15)
    tips = _tips(series="defense", x="round", found=title)
    line = base.mark_line(strokeWidth=2, point={"size": 28, "filled": True, "opacity": 1})
    color, dash = _color(marks), _dash(marks)
    return _spec(
        [
            *([_level(0.5, y)] if title == "AUC" else []),
            band.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color),
            line.encode(x=x, y=y, color=color, strokeDash=dash, tooltip=tips),
        ],
        280,
    )


def dots(rows: Rows, marks: Sequence[Series], title: str = "AUC") -> dict[str, Any]:
    """Values with intervals by part, the series side by side within one: part, series, value, low, high."""
    parts = list(dict.fromkeys(row["part"] for row in rows))
    used = {row["series"] for row in rows}
    inner = [each.label for each in marks if each.label in used]
    x = alt.X("value:Q", title=title, scale=_scale(_auc_domain(rows)))
    axis = alt.Axis(grid=False, ticks=False, domain=False, labelLimit=150, labelPadding=8, title=None)
    y = alt.Y("part:N", sort=parts, axis=axis, scale=alt.Scale(paddingInner=0.35, paddingOuter=0.2))
    offset = alt.YOffset("series:N", sort=inner, scale=alt.Scale(domain=inner))
    base = _chart(_clipped(rows))
    color = _color(marks)
    bars = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(strokeWidth=2, opacity=0.55)
    return _spec(
        [
            _level(0.5, x),
            bars.encode(x=alt.X("low:Q"), x2="high:Q", y=y, yOffset=offset, color=color),
            base.mark_circle(size=70, opacity=1).encode(
                x=x, y=y, yOffset=offset, color=color, tooltip=_tips(part="part", series="series", found=title)
            ),
        ],
        max(90, len(parts) * (14 * len(inner) + 14)),
    )


def exposure(rows: Rows, marks: Sequence[Series], title: str = "") -> dict[str, Any]:
    """The share of users at least so exposed: series, exposure, share. By AUC; or by a share, which `title` names."""
    xs = [row["exposure"] for row in rows]
    low = 0.0 if title else min([*xs, 0.5])
    x = alt.X("exposure:Q", title=f"{title or 'AUC within one user'} →", scale=_scale((low, max([*xs, 1.0]))))
    y = alt.Y("share:Q", title="users at least so exposed", scale=_scale((0, 1)), axis=alt.Axis(format="~%"))
    line = _chart(rows).mark_line(strokeWidth=2, interpolate="step-before")
    shown = [
        alt.Tooltip("series:N", title="defense"),
        alt.Tooltip("exposure:Q", title=f"{title or 'AUC'} at least", format=".2f"),
        alt.Tooltip("share:Q", title="share of users", format=".0%"),
    ]
    drawn = line.encode(x=x, y=y, color=_color(marks), strokeDash=_dash(marks), tooltip=shown)
    return _spec([drawn] if title else [_level(0.5, x), drawn], 280)


# --- what is drawn of long tables -------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at least as useful (x) and leaks at most as much (y), and better in one of them.

    >>> pareto([(0.4, 0.9), (0.3, 0.6), (0.2, 0.7)])
    [True, True, False]
    """
    return [not any(other[0] >= x and other[1] <= y and other != (x, y) for other in points) for x, y in points]


def thinned(fpr: NDArray[np.float64], tpr: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """Which points of a curve to draw on logarithmic axes, i64[at most `points`]; every one is of the curve."""
    visible = np.flatnonzero((fpr > 0) & (tpr > 0))
    if len(visible) <= points:
        return visible
    path = np.cumsum(np.hypot(np.diff(np.log10(fpr[visible])), np.diff(np.log10(tpr[visible]))))  # along the line
    wanted = np.linspace(0, path[-1], points)
    nearest = np.searchsorted(np.concatenate([[0.0], path]), wanted).clip(max=len(visible) - 1)
    kept: NDArray[np.int64] = visible[np.unique(nearest)]
    return kept


def survival(values: NDArray[np.float64], points: int = 80) -> list[tuple[float, float]]:
    """(value, share of the values that are at least so large), at quantiles, ascending.

    >>> survival(np.array([0.5, 0.5, 1.0, 0.75]))
    [(0.5, 1.0), (0.75, 0.5), (1.0, 0.25)]
    """
    ordered = np.sort(values)
    at = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).round().astype(np.int64))
    chosen = np.unique(ordered[at])
    share = 1 - np.searchsorted(ordered, chosen, side="left") / len(ordered)
    return [(float(value), float(each)) for value, each in zip(chosen, share, strict=True)]


def points_each(curves: int) -> int:
    """How many points each of so many curves may have in one chart."""
    return max(12, min(90, _MOST_ROWS // max(1, curves)))


# --- pieces -----------------------------------------------------------------------------------------------------------

_ROC_TIPS = [
    alt.Tooltip("series:N", title="attack"),
    alt.Tooltip("fpr:Q", title="false positives", format=".2~%"),
    alt.Tooltip("tpr:Q", title="true positives", format=".2~%"),
]


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(pl.DataFrame(rows, infer_schema_length=None, strict=False))


def _tips(**titles: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{field}:N", title=title) for field, title in titles.items()]


def _color(marks: Sequence[Series]) -> alt.Color:
    scale = alt.Scale(domain=[each.label for each in marks], range=[each.color for each in marks])
    return alt.Color("series:N", scale=scale, legend=None)


def _dash(marks: Sequence[Series]) -> alt.StrokeDash:
    scale = alt.Scale(domain=[each.label for each in marks], range=[list(each.dash) for each in marks])
    return alt.StrokeDash("series:N", scale=scale, legend=None)


def _scale(domain: tuple[float, float]) -> alt.Scale:
    return alt.Scale(domain=list(domain), nice=False, zero=False)


def _level(value: float, like: alt.X | alt.Y) -> alt.Chart:
    """A line at the AUC of a coin, on the axis of `like`."""
    line = alt.Chart(pl.DataFrame({"at": [value]})).mark_rule(color=_FAINT, strokeDash=[4, 4], strokeWidth=1)
    title, scale = like["title"], like["scale"]
    drawn: alt.Chart = (
        line.encode(x=alt.X("at:Q", title=title, scale=scale))
        if isinstance(like, alt.X)
        else line.encode(y=alt.Y("at:Q", title=title, scale=scale))
    )
    return drawn


def _clipped(rows: Rows) -> Rows:
    """Intervals of an AUC up to what can be, where the axis ends: wide ones may reach beyond."""
    ends = ("low", "high")
    return [{**row, **{end: min(1.0, max(0.0, row[end])) for end in ends if known(row[end])}} for row in rows]


def _auc_domain(rows: Rows) -> tuple[float, float]:
    ends = [row[key] for row in _clipped(rows) for key in ("value", "low", "high") if known(row[key])]
    low, high = _around([*ends, 0.5], 0.05)
    return max(0.0, low), min(1.0, high)


def _around(values: Sequence[float], margin: float) -> tuple[float, float]:
    """From the least to the greatest, and a little more, to a round number."""
    low, high = min(values), max(values)
    room = margin * max(high - low, 0.02)
    step = 10 ** floor(log10(max(high - low, 0.02))) / 10
    return floor((low - room) / step) * step, ceil((high + room) / step) * step


def _staggered(baselines: Mapping[str, float], domain: tuple[float, float]) -> Rows:
    """Labels above the plot, one above the other where they are too near for a phone."""
    ends: list[float] = []  # of the last label of each level, as a share of the width
    placed: Rows = []
    for label, value in sorted(baselines.items(), key=lambda pair: pair[1]):
        at = (value - domain[0]) / (domain[1] - domain[0])
        width = 0.025 * len(label)
        align = "left" if at < width / 2 else "right" if at > 1 - width / 2 else "center"
        start = at - {"left": 0, "center": width / 2, "right": width}[align]
        level = next((place for place, end in enumerate(ends) if end < start), len(ends))
        ends[level:] = [start + width + 0.02, *ends[level + 1 :]]
        placed.append({"x": value, "label": label, "dy": -3 - 13 * level, "align": align})
    return placed


def _labelled(rows: Rows, x_domain: tuple[float, float], y_domain: tuple[float, float]) -> Rows:
    """Each label beside its point, where it covers no other; else not shown: its letter is in the key."""
    wide, tall, letter = 560.0, 330.0, 6.2  # points: a plot, a character

    def at(row: dict[str, Any]) -> tuple[float, float]:
        across = (row["x"] - x_domain[0]) / (x_domain[1] - x_domain[0])
        down = (y_domain[1] - row["y"]) / (y_domain[1] - y_domain[0])
        return across * wide, down * tall

    taken = [(x - 10, y - 10, x + 10, y + 10) for x, y in map(at, rows)]
    placed: Rows = []
    for row in rows:
        x, y = at(row)
        width = min(190, letter * len(row["label"]))
        best = {"dx": 0, "dy": 0, "align": "left", "shown": False}
        for dx, dy in ((13, -12), (-13, -12), (13, 14), (-13, 14)):
            left, top = (x + dx if dx > 0 else x + dx - width), y + dy - 7
            box = (left, top, left + width, top + 14)
            free = all(box[2] < b[0] or b[2] < box[0] or box[3] < b[1] or b[3] < box[1] for b in taken)
            if free and box[0] >= 0 and box[2] <= wide and box[1] >= 0 and box[3] <= tall:
                best = {"dx": dx, "dy": dy, "align": "left" if dx > 0 else "right", "shown": True}
                taken.append(box)
                break
        placed.append({**row, **best})
    return placed


def _spec(layers: Sequence[alt.Chart], height: int) -> dict[str, Any]:
    """Without the address of the schema (the page says what it is) and Altair's own looks (the page has its own)."""
    with alt.data_transformers.enable("default", max_rows=None):
        drawn = alt.layer(*layers).properties(width="container", height=height).to_dict(validate=False)
    spec = {key: value for key, value in drawn.items() if key not in ("$schema", "config")}
    spec["datasets"] = {name: _packed(rows) for name, rows in drawn["datasets"].items()}
    return spec


def _packed(rows: Rows) -> dict[str, Any]:
    columns = list(rows[0])
    return {"columns": columns, "rows": [[_short(row[column]) for column in columns] for row in rows]}


def _short(value: Any) -> Any:
    """A number with five digits at most; JSON has no infinity and no NaN."""
    return value if not isinstance(value, float) else float(f"{value:.5g}") if known(value) else None
