"""A data set as one picture: activity, popularity, attribute balance."""

from __future__ import annotations

import html
import json
from pathlib import Path

import altair as alt
import numpy as np
import polars as pl
import vl_convert
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.errors import DataError

ENDINGS = (".html", ".png", ".svg")
_MOST_CLASSES = 30  # an attribute with more (a zip code) gets no panel
_BLUE, _ORANGE, _GREEN = "#4c78a8", "#f58518", "#54a24b"
_LOG = alt.Scale(type="log", nice=False)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><script>{library}</script></head>
<body><div id="chart"></div><script>vegaEmbed("#chart", {specification});</script></body></html>
"""


def save_chart(data: Interactions, title: str, path: Path) -> None:
    """Draw a data set; the ending tells the format. A page holds all it needs and works without a network."""
    ending = check_ending(path)
    panels = [_activity(data.activity), _popularity(data.popularity)]
    for name, kind in data.attributes.items():
        values = data.users[name]
        if kind == "continuous" and values.null_count() < len(values):
            panels.append(_spread(values))
        elif kind == "categorical" and values.n_unique() <= _MOST_CLASSES:
            panels.append(_balance(values))
    drawn = alt.concat(*panels, columns=2, title=title).configure_view(strokeWidth=0).configure_axis(grid=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    if ending == ".html":
        path.write_text(_page(drawn, title), encoding="utf-8")
    else:
        drawn.save(path, format=ending[1:], **({"scale_factor": 2} if ending == ".png" else {}))


def check_ending(path: Path) -> str:
    """The format that a file's ending names."""
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise DataError(f"cannot draw a {kind or 'file without ending'}", remedy=f"Use {', '.join(ENDINGS)}.")
    return kind


def _page(drawn: alt.ConcatChart, title: str) -> str:
    """Altair's own page does not escape `</script>` in the data; this one does."""
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    specification = json.dumps(drawn.to_dict()).replace("<", "\\u003c")
    return _PAGE.format(title=html.escape(title), library=library, specification=specification)


def _activity(counts: NDArray[np.int64]) -> alt.Chart:
    edges = np.unique(np.round(np.geomspace(max(1, counts.min()), counts.max() + 1, 20))).astype(np.float64)
    return _histogram(counts, edges, "Rows per user", alt.X("from:Q", scale=_LOG, title="rows"), _BLUE)


def _spread(values: pl.Series) -> alt.Chart:
    known = values.drop_nulls().to_numpy().astype(np.float64)
    axis = alt.X("from:Q", scale=alt.Scale(zero=False), title=values.name)
    return _histogram(known, np.linspace(known.min(), known.max(), 25), values.name, axis, _GREEN)


def _histogram(
    values: NDArray[np.int64] | NDArray[np.float64], edges: NDArray[np.float64], title: str, x: alt.X, color: str
) -> alt.Chart:
    number, _ = np.histogram(values, edges)
    table = pl.DataFrame({"from": edges[:-1], "to": edges[1:], "none": 0, "users": number})
    boxes = alt.Chart(table).mark_rect(color=color)
    y = alt.Y("users:Q", title="users")
    return _panel(boxes.encode(x=x.axis(labelOverlap=True), x2="to:Q", y=y, y2="none:Q"), title)


def _popularity(popularity: NDArray[np.int64]) -> alt.Chart:
    ordered = np.sort(popularity)[::-1]
    at = np.unique(np.round(np.geomspace(1, len(ordered), 200)).astype(int))
    table = pl.DataFrame({"rank": at, "rows": np.maximum(ordered[at - 1], 1)})
    x = alt.X("rank:Q", scale=_LOG, title="item, from the most popular").axis(labelOverlap=True)
    line = alt.Chart(table).mark_line(color=_ORANGE).encode(x=x, y=alt.Y("rows:Q", scale=_LOG))
    return _panel(line, "Rows per item")


def _balance(values: pl.Series) -> alt.Chart:
    counts = values.fill_null("(missing)").rename("class").value_counts(name="users", sort=True)
    bars = alt.Chart(counts).mark_bar(color=_GREEN)
    return _panel(bars.encode(x="users:Q", y=alt.Y("class:N", sort="-x", title=None)), values.name)


def _panel(drawn: alt.Chart, title: str) -> alt.Chart:
    return drawn.properties(width=340, height=200, title=title)
