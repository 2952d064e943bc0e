"""What a data set looks like: counts, skew, attribute balance, time; as numbers, and in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from recleak.data.catalog import Counts, Preset
from recleak.data.interactions import Interactions

_BAR = 40  # characters of the longest bar
_CLASSES = 8  # classes of an attribute that are shown


def describe(data: Interactions) -> dict[str, Any]:
    """The numbers, ready for JSON."""
    activity, popularity = data.activity, data.popularity
    top = np.sort(popularity)[::-1]
    return {
        "users": data.n_users,
        "items": data.n_items,
        "rows": len(data),
        "pairs": data.n_pairs,
        "density": data.n_pairs / (data.n_users * data.n_items),
        "rows_per_user": _quantiles(activity),
        "rows_per_item": _quantiles(popularity),
        "popularity_gini": gini(popularity),
        "top_tenth_share": float(top[: max(1, len(top) // 10)].sum() / len(data)),
        "rating": _rating(data),
        "time": _time(data),
        "attributes": {name: _attribute(data.users[name]) for name in data.attributes},
        "item_facts": {name: _known(data.items[name]) for name in data.items.columns[1:]},
        "fingerprint": data.fingerprint,
        "notes": [str(note) for note in data.notes],
    }


def gini(counts: NDArray[np.int64]) -> float:
    """The Gini coefficient: 0 if all counts are equal, near 1 if one has them all."""
    ordered = np.sort(counts).astype(float)
    n = len(ordered)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * ordered.sum()))


def _known(values: pl.Series) -> int:
    """How many items have a value; an empty list is none."""
    if isinstance(values.dtype, pl.List):
        return int((values.list.len() > 0).sum())
    return len(values) - values.null_count()


def _quantiles(counts: NDArray[np.int64]) -> dict[str, float]:
    low, quarter, half, three, high = np.quantile(counts, [0, 0.25, 0.5, 0.75, 1])
    return {
        "min": float(low),
        "q25": float(quarter),
        "median": float(half),
        "mean": float(counts.mean()),
        "q75": float(three),
        "max": float(high),
    }


def _rating(data: Interactions) -> dict[str, int] | None:
    if "rating" not in data.rows.columns:
        return None
    counts = data.rows["rating"].value_counts().sort("rating")
    if counts.height > 10:
        return None
    return {"missing" if value is None else f"{value:g}": count for value, count in counts.iter_rows()}


def _time(data: Interactions) -> dict[str, Any] | None:
    if "time" not in data.rows.columns:
        return None
    time = data.rows["time"]
    known = time.drop_nulls()
    if known.is_empty():
        return {"first": None, "last": None, "unknown": len(time)}
    first, last = (_date(int(known[at])) for at in (known.arg_min() or 0, known.arg_max() or 0))
    return {"first": first, "last": last, "unknown": time.null_count()}


def _date(seconds: int) -> str:
    """ISO 8601; just the number where there is no such year."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return f"{seconds:,} s"


def _attribute(values: pl.Series) -> dict[str, Any]:
    missing = values.null_count()
    if values.dtype.is_float():
        known = values.drop_nulls().to_numpy()
        return {"kind": "continuous", "missing": missing, **(_quantiles(known) if len(known) else {})}
    counts = values.drop_nulls().value_counts(sort=True)
    classes = dict(counts.iter_rows())
    majority = max(classes.values(), default=0) / max(1, len(values) - missing)
    return {"kind": "categorical", "missing": missing, "majority": majority, "classes": classes}


def show(data: Interactions, title: str, console: Console, preset: Preset | None = None) -> None:
    """The description in a terminal."""
    facts = describe(data)
    console.print(Text(title, style="bold"))
    console.print(_counts_table(data, facts, preset))
    if preset is not None and preset.remark:
        console.print(Text(preset.remark, style="yellow"))
    console.print(_panel("Rows per user", _log_histogram(data.activity)))
    console.print(_panel("Rows per item", _log_histogram(data.popularity)))
    for name, values in facts["attributes"].items():
        console.print(_attribute_panel(name, values, data.n_users))
    for note in data.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print(f"fingerprint {data.fingerprint}", style="dim")


def _counts_table(data: Interactions, facts: dict[str, Any], preset: Preset | None) -> Table:
    table = Table("", "here", *(["paper"] if preset else []), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    here = Counts.of(data)
    for label, name in (("users", "users"), ("items", "items"), ("interactions", "rows")):
        row = [label, f"{getattr(here, name):,}"]
        if preset:
            published = getattr(preset.published, name)
            agree = published == getattr(here, name)
            row.append("not said" if published is None else f"{published:,}{' =' if agree else ' ≠'}")
        table.add_row(*row)
    if facts["pairs"] != facts["rows"]:
        table.add_row("distinct pairs", f"{facts['pairs']:,}")
    table.add_row("density", f"{facts['density']:.2%}")
    for label, name in (("rows per user", "rows_per_user"), ("rows per item", "rows_per_item")):
        q = facts[name]
        spread = f"min {q['min']:g}, median {q['median']:g}, mean {q['mean']:.1f}, max {q['max']:g}"
        table.add_row(label, spread)
    table.add_row("most popular tenth has", f"{facts['top_tenth_share']:.1%}")
    table.add_row("Gini of popularity", f"{facts['popularity_gini']:.3f}")
    if facts["rating"]:
        shares = "  ".join(f"{value}: {count / facts['rows']:.0%}" for value, count in facts["rating"].items())
        table.add_row("ratings", shares)
    if (time := facts["time"]) is not None:
        span = " to ".join(time[end].split("T")[0] for end in ("first", "last")) if time["first"] else "unknown"
        table.add_row("time (UTC)", span + (f", unknown for {time['unknown']:,} rows" if time["unknown"] else ""))
    known = ", ".join(f"{name} ({count:,})" for name, count in facts["item_facts"].items())
    table.add_row("known of items", known or "nothing")
    return table


def _panel(title: str, body: RenderableType) -> Group:
    return Group(Text(f"\n{title}", style="bold"), body)


def _bars(labels: list[str], counts: list[int]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(max_width=_BAR)
    table.add_column(justify="right", no_wrap=True)
    most, total = max(counts, default=1), max(1, sum(counts))
    for label, count in zip(labels, counts, strict=True):
        table.add_row(Text(label), Bar(most, 0, count), f"{count:,} ({count / total:.1%})")
    return table


def _log_histogram(counts: NDArray[np.int64]) -> Table:
    """Counts in bins that double: 1, 2 to 3, 4 to 7, ..."""
    bins = np.bincount(np.floor(np.log2(np.maximum(counts, 1))).astype(int))
    first = int(np.flatnonzero(bins)[0])
    labels = [str(2**k) if k == 0 else f"{2**k:,} to {2 ** (k + 1) - 1:,}" for k in range(first, len(bins))]
    return _bars(labels, bins[first:].tolist())


def _attribute_panel(name: str, facts: dict[str, Any], n_users: int) -> Group:
    missing = f", {facts['missing']:,} missing" if facts["missing"] else ""
    if facts["kind"] == "continuous":
        known = n_users - facts["missing"]
        spread = f"min {facts['min']:g}, median {facts['median']:g}, max {facts['max']:g}" if known else "no value"
        return _panel(f"{name} (continuous{missing})", Text(spread))
    classes = list(facts["classes"].items())
    labels, counts = [str(value) for value, _ in classes[:_CLASSES]], [count for _, count in classes[:_CLASSES]]
    if len(classes) > _CLASSES:
        labels.append(f"{len(classes) - _CLASSES:,} more")
        counts.append(sum(count for _, count in classes[_CLASSES:]))
    head = f"{name} ({len(classes):,} classes, majority {facts['majority']:.3f}{missing})"
    return _panel(head, _bars(labels, counts))
