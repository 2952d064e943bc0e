"""What several parts of the page are made of: figures with their keys, cards, strips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from recleak.report.charts import Series
from recleak.report.markup import (
    Content,
    Html,
    bullets,
    details,
    estimate,
    join,
    known,
    paragraph,
    script_json,
    section,
    tag,
)
from recleak.report.view import Setting, View

VERDICTS: Mapping[str, tuple[str, str, str]] = {  # class, symbol, word
    "leaks": ("leaks", "▲", "Leaks"),
    "not found": ("clear", "○", "No leak found"),
    "cannot tell": ("unknown", "?", "Cannot tell"),
    "not measured": ("unknown", "–", "Not measured"),
}


def figure(
    spec: dict[str, Any], title: str, alternative: str, caption: Content, *, key: Html | None, numbers: Html
) -> Html:
    """A chart: what it shows, its key, itself, what to see in it, and the same as a table."""
    return tag(
        "figure",
        paragraph(title, class_="what"),
        key,
        tag("div", class_="chart", role="img", aria_label=alternative),
        tag("figcaption", caption),
        details("The numbers of this chart as a table", numbers),
        tag("script", script_json(spec), type="application/json"),
        class_="drawn",
    )


def key_of(marks: Iterable[Series], more: Iterable[tuple[Html, str]] = ()) -> Html:
    """Which line is which."""
    return bullets([*(join([_line(each), each.label]) for each in marks), *(join(pair) for pair in more)], "legend")


def _line(mark: Series) -> Html:
    dash = None if mark.dash == (1, 0) else " ".join(map(str, mark.dash))
    drawn = tag("line", x1=0, y1=6, x2=28, y2=6, stroke=mark.color, stroke_width=2.5, stroke_dasharray=dash)
    return tag("svg", drawn, viewBox="0 0 28 12", aria_hidden="true")


def letter_of(letter: str, color: str) -> Html:
    """A point of a chart in its key."""
    return tag("span", letter, class_="letter", style=f"background:{color}")


def sample_line(color: str, dash: str | None = None, width: float = 1.5, length: int = 28) -> Html:
    """A line of a chart in its key."""
    drawn = tag(
        "line",
        x1=14 - length / 2,
        y1=6,
        x2=14 + length / 2,
        y2=6,
        stroke=color,
        stroke_width=width,
        stroke_dasharray=dash,
    )
    return tag("svg", drawn, viewBox="0 0 28 12", aria_hidden="true")


def badge(verdict: str | None) -> Html:
    """A verdict as a sign and a word."""
    kind, symbol, word = VERDICTS.get(verdict or "", ("unknown", "–", verdict or "Not measured"))
    return tag("span", tag("span", symbol, aria_hidden="true"), f" {word}", class_=f"badge {kind}")


def kind_of(verdict: str | None) -> str:
    """The class of a verdict."""
    return VERDICTS.get(verdict or "", ("unknown", "", ""))[0]


def strip(row: Mapping[str, Any], first: float) -> Html | None:
    """An attack (full) and the best guesser (hollow) with their intervals on the line from `first` to 1."""
    if not known(row["value"]):
        return None

    def at(value: float) -> float:
        return round(100 * (min(1.0, max(first, value)) - first) / (1 - first), 2)

    def mark(kind: str, value: float | None, low: float | None, high: float | None) -> list[Html]:
        made = []
        if known(low) and known(high):
            made.append(tag("span", class_=f"bar {kind}", style=f"left:{at(low)}%;width:{at(high) - at(low):.2f}%"))
        if known(value):
            made.append(tag("span", class_=f"dot {kind}", style=f"left:{at(value)}%"))
        return made

    return tag(
        "div",
        tag("span", class_="axis"),
        tag("span", class_="half", style=f"left:{at(0.5)}%"),
        *mark("guess", row["null_value"], row["null_low"], row["null_high"]),
        *mark("found", row["value"], row["low"], row["high"]),
        tag("span", "0.5 a coin", class_="tick", style=f"left:{max(at(0.5), 9)}%"),
        tag("span", "1 certain", class_="tick end"),
        class_="strip",
        aria_hidden="true",
    )


def summary_of(rows: Sequence[tuple[str, Mapping[str, Any]]], most: int = 8) -> str:
    """Names and values for those who do not see a chart."""
    shown = "; ".join(f"{name} {estimate(row)}" for name, row in rows[:most])
    return shown + (f"; and {len(rows) - most} more" if len(rows) > most else "")


def chapter(
    view: View, place: str, title: str, intro: str, empty: str, *makers: Callable[[View, Setting, str], list[Content]]
) -> Html:
    """How to read it, and what is made for each setting and question; or why there is nothing."""
    made: list[Content] = []
    for setting in view.settings:
        parts = [part for each in view.questions(setting) for maker in makers for part in maker(view, setting, each)]
        if parts and len(view.settings) > 1:
            made.append(tag("h3", setting.label))
        made += parts
    return section(place, title, paragraph(intro if made else empty), *made)
