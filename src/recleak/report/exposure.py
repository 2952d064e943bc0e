"""Where it leaks, and for whom: rounds, components, groups of users, single users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import polars as pl

from recleak.report import charts
from recleak.report.markup import (
    DASH,
    Cell,
    Content,
    Html,
    counted,
    estimate,
    known,
    listed,
    number,
    percent,
    table,
    tag,
)
from recleak.report.pieces import chapter, figure, key_of, summary_of
from recleak.report.view import COMMUNITY, Row, Setting, View, metric_name, system_of

_MOST_ROUNDS, _ROUNDS_IN_TABLE = 60, 12
_MOST_EXPOSED = 10
_MOST_PARTS = 16  # of one kind in a chart
_SHARES = ("accuracy", "bound", "accuracy@best", "accuracy@chosen", "accuracy@10%", "accuracy@50%", "accuracy@90%")
_T = TypeVar("_T")
_MOST_COLUMNS = 6  # defenses beside each other in a table


def parts(view: View) -> Html:
    """By round and by component."""
    intro = (
        "By round: users who took part early are on the left, late ones on the right. If a line rises, uploads tell "
        "the more the longer the system has trained. Accuracy after each round: the share of a community that is "
        "found, the mean over all who play the adversary. By component: what an attack learns if it sees the values of "
        "one part of what is sent, and of no other; a part near the dashed line, a coin, tells nothing by itself."
    )
    empty = "Leakage was not broken down by round or component."
    makers = (_rounds, _accuracy, _of_communities, _components)
    return chapter(view, "parts", "Where it leaks: rounds and components", intro, empty, *makers)


def exposed(view: View) -> Html:
    """Users and groups of them."""
    intro = (
        "An average hides people. Read upwards from a value of the AUC, or of an exposure: so many users are at least "
        "so exposed. An own item counts as exposed if the attack claims it at 1 % false positives over all users. "
        "In communities a user is exposed to the share of the adversaries in whose community it is that find it; who "
        "has items of a kind, to the share of all adversaries. Of an attribute, exposure is the probability that the "
        "attack gives to what is true of a user."
    )
    empty = "The exposure of single users was not measured."
    return chapter(view, "exposed", "Who is exposed", intro, empty, _risk, _groups)


# --- by round, by component, by group ---------------------------------------------------------------------------------


def _parts(view: View, setting: Setting, question: str, kinds: Callable[[str], bool]) -> list[Row]:
    """The parts of some kinds under the chosen attack; of a system where there are none, under its first attack."""
    every = view.rows(view.findings.parts.to_dicts(), setting, question)
    rows = [row for row in every if kinds(row["kind"] or "?")]
    kept: list[Row] = []
    for system in view.systems_of(setting):
        own = [row for row in rows if system_of(row) == system]
        attacks = [row["attack"] for row in own]
        chosen = view.chosen.get((system, question), {}).get("attack")
        attack = chosen if chosen in attacks else attacks[0] if attacks else None
        kept += [{**row, "series": system.name} for row in own if row["attack"] == attack]
    return kept


def _by(rows: Sequence[Row]) -> str:
    """Which attacks parts are of."""
    return f"Attack: {listed(list(dict.fromkeys(str(row['attack']) for row in rows)))}."


def _rounds(view: View, setting: Setting, question: str) -> list[Content]:
    return _over_rounds(view, setting, question, "round", "AUC")


def _accuracy(view: View, setting: Setting, question: str) -> list[Content]:
    return _over_rounds(view, setting, question, "accuracy", "accuracy")


def _of_communities(view: View, setting: Setting, question: str) -> list[Content]:
    """How much of a community is found, under the chosen attack: after the last round, and in others."""
    rows = [row for row in view.rows(view.scores, setting, question) if row["metric"] in _SHARES]
    if not any(row["metric"] == "bound" for row in rows):
        return []
    found = {(system_of(row), row["attack"], row["metric"]): row for row in rows}
    body: list[list[Content | Cell]] = []
    for system in view.systems_of(setting):
        chosen = view.chosen.get((system, question), {})
        for attack in (chosen.get("attack"), chosen.get("null")):
            cells = [found.get((system, attack or "?", metric)) for metric in _SHARES]
            if any(cells):
                body.append([system.name, attack, *(DASH if one is None else estimate(one, 3) for one in cells)])
    header = ["defense", "who", "accuracy after the last round", *map(metric_name, _SHARES[1:])]
    caption = (
        f"How much of a community is found ({question}), the mean over adversaries, by the chosen attack and the "
        "guesser. Nobody knows the best round without the truth."
    )
    return [table(caption, header, body, numbers=len(_SHARES))] if body else []


def _over_rounds(view: View, setting: Setting, question: str, part: str, what: str) -> list[Content]:
    every = _parts(view, setting, question, lambda kind: kind == part)
    lines: dict[str, list[Row]] = {}
    for mark in view.marks_of(setting):
        own = [row for row in every if row["series"] == mark.label and known(row["value"]) and known(row["x"])]
        if own:
            lines[mark.label] = _spread([_plotted(row) for row in sorted(own, key=lambda row: row["x"])], _MOST_ROUNDS)
    if not lines:
        return []
    marks = [mark for mark in view.marks_of(setting) if mark.label in lines]
    rows = [row for line in lines.values() for row in line]
    names = {row["x"]: row["part"] for row in sorted(rows, key=lambda row: row["x"])}
    value = {(row["series"], row["x"]): row["found"] for row in rows}
    body = [
        [names[x], *(value.get((mark.label, x), DASH) for mark in marks)]
        for x in _spread(list(names), _ROUNDS_IN_TABLE)
    ]
    trend = [f"{name}: from {number(line[0]['value'])} to {number(line[-1]['value'])}" for name, line in lines.items()]
    drawn = figure(
        charts.rounds(rows, marks, what),
        f"Leakage by round: {question}",
        f"Lines of {what} by round. {'; '.join(trend[:10])}.",
        f"{'; '.join(trend[:10])}. Bands are {view.level_words} intervals. {_by(every)}",
        key=key_of(marks),
        numbers=table(f"{what} by round", ["round", *(mark.label for mark in marks)], body, numbers=len(marks)),
    )
    return [drawn]


def _spread(values: list[_T], most: int) -> list[_T]:
    """At most so many of a list, evenly, with the first and the last."""
    at = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[place] for place in at]


def _components(view: View, setting: Setting, question: str) -> list[Content]:
    rows = _parts(view, setting, question, lambda kind: kind == "component")
    return _dots(view, setting, rows, f"Leakage by component: {question}", _by(rows))


def _groups(view: View, setting: Setting, question: str) -> list[Content]:
    every = _parts(view, setting, question, lambda kind: kind not in ("round", "accuracy", "component"))
    caption = f"Groups whose {view.level_words} intervals overlap may be equally exposed. {_by(every)}"
    kinds = dict.fromkeys(row["kind"] or "?" for row in every)
    return [
        part
        for kind in kinds
        for part in _dots(
            view, setting, [r for r in every if (r["kind"] or "?") == kind], f"Leakage by {kind}: {question}", caption
        )
    ]


def _dots(view: View, setting: Setting, every: Sequence[Row], title: str, caption: str) -> list[Content]:
    """Values by part; of many parts the highest are drawn, and all are in the table."""
    rows = [_plotted(row) for row in every if known(row["value"])]
    reasons = [
        [row["part"], row["series"], DASH, row["reason"] or "not measured"] for row in every if not known(row["value"])
    ]
    header = ["part", "defense", "AUC", "why not"]
    if not rows:
        return [table(title, header, reasons)] if reasons else []
    marks = [mark for mark in view.marks_of(setting) if mark.label in {row["series"] for row in rows}]
    body = [[row["part"], row["series"], row["found"], None] for row in rows] + reasons
    summary = summary_of([(f"{row['part']}, {row['series']}", row) for row in rows])
    ordered = sorted(rows, key=lambda row: -float(row["value"]))
    top, names = ordered[0], list(dict.fromkeys(row["part"] for row in ordered))
    drawn = [row for row in rows if row["part"] in names[:_MOST_PARTS]]
    caption += f" The {_MOST_PARTS} highest of {len(names)} are drawn." if len(names) > _MOST_PARTS else ""
    caption += f" {counted(len(reasons), 'part')} could not be measured; the table says why." if reasons else ""
    return [
        figure(
            charts.dots(drawn, marks),
            title,
            f"Dots with intervals. {summary}.",
            f"The highest: {top['part']} under “{top['series']}”, {top['found']}. {caption}",
            key=key_of(marks),
            numbers=table(title, header, body),
        )
    ]


def _plotted(row: Row) -> Row:
    kept = {name: row[name] for name in ("series", "x", "value", "low", "high")}
    return {**kept, "part": str(row["part"]), "found": estimate(row, 3)}


# --- users ------------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """How people are exposed who have no AUC of their own."""

    heading: str
    axis: str  # of the chart
    table: str  # the caption of its numbers


_BY_KIND = {
    "community": _Found(
        "Who is found in communities",
        "share of the adversaries of its community who find a user",
        "By what share of the adversaries in whose community they are users are found, under the chosen attack",
    ),
    "mark": _Found(
        "Who is found",
        "share of the adversaries who find a user",
        "By what share of the adversaries users are found who have items of the kind, under the chosen attack",
    ),
    "attribute": _Found(
        "Of whom it is told",
        "probability given to what is true of a user",
        "The probability given to what is true of a user, under the chosen attack",
    ),
}


def _risk(view: View, setting: Setting, question: str) -> list[Content]:
    every = view.of_chosen(view.frame(view.findings.risk, setting, question)).with_columns(
        pl.col("defense").fill_null("?")
    )
    if len(every) and not bool(every["auc"].is_finite().any()):
        return _found(view, setting, question, every)
    rows: charts.Rows = []
    body: list[list[Content | Cell]] = []
    for mark in view.marks_of(setting):
        frame = every.filter((pl.col("defense") == mark.label) & pl.col("auc").is_finite())
        values = frame["auc"].to_numpy()
        if not len(values):
            continue
        steps = [*charts.survival(values), (float(values.max()), 0.0)]
        rows += [{"series": mark.label, "exposure": x, "share": share} for x, share in steps]
        found = frame["exposed"].drop_nulls().drop_nans().to_numpy()
        body.append(
            [
                mark.label,
                f"{frame['user'].n_unique():,}",
                *(number(float(each)) for each in np.quantile(values, [0.1, 0.5, 0.9])),
                percent(float((values >= 0.9).mean())),
                percent(float(found.mean()), 1) if len(found) else DASH,
                percent(float((found >= 0.5).mean())) if len(found) else DASH,
            ]
        )
    if not rows:
        return []
    marks = [mark for mark in view.marks_of(setting) if mark.label in {row["series"] for row in rows}]
    header = ["defense", "users", "AUC: lowest tenth", "median", "highest tenth", "users with 0.9 and more"]
    header += ["own items exposed, mean", "users with half exposed"]
    numbers = table("Exposure of single users under the chosen attack", header, body, numbers=len(header) - 1)
    words = "; ".join(f"{row[0]}: median {row[3]}, {row[5]} of the users at 0.9 and more" for row in body[:8])
    drawn = figure(
        charts.exposure(rows, marks),
        f"How many users are how exposed: {question}",
        f"Lines of the share of users at least so exposed. {words}.",
        f"{words}. Users of all seeds together.",
        key=key_of(marks),
        numbers=numbers,
    )
    return [drawn, *_most_exposed(view, setting, question, every, "auc")]


def _found(view: View, setting: Setting, question: str, every: pl.DataFrame) -> list[Content]:
    """The same of questions whose AUC is no mean over users, by exposure, under a heading of its own."""
    kind = _BY_KIND[view.kind(question)]
    rows: charts.Rows = []
    body: list[list[Content | Cell]] = []
    for mark in view.marks_of(setting):
        frame = every.filter((pl.col("defense") == mark.label) & pl.col("exposed").is_finite())
        values = frame["exposed"].to_numpy()
        if not len(values):
            continue
        steps = [*charts.survival(values), (float(values.max()), 0.0)]
        rows += [{"series": mark.label, "exposure": x, "share": share} for x, share in steps]
        ends = [percent(float(each)) for each in np.quantile(values, [0.1, 0.5, 0.9])]
        half, never = percent(float((values >= 0.5).mean())), percent(float((values == 0).mean()))
        mean = percent(float(values.mean()), 1)
        body.append([mark.label, f"{frame['user'].n_unique():,}", mean, *ends, half, never])
    if not rows:
        return []
    marks = [mark for mark in view.marks_of(setting) if mark.label in {row["series"] for row in rows}]
    header = ["defense", "users", "mean", "lowest tenth", "median", "highest tenth", "users at half and more"]
    header += ["users at nothing"]
    words = "; ".join(f"{row[0]}: median {row[4]}, {row[6]} of the users at half and more" for row in body[:8])
    drawn = figure(
        charts.exposure(rows, marks, kind.axis),
        f"How many users are how exposed: {question}",
        f"Lines of the share of users at least so exposed, by {kind.axis}. {words}.",
        f"{words}. Users of all seeds together.",
        key=key_of(marks),
        numbers=table(kind.table, header, body, numbers=len(header) - 1),
    )
    about = kind.heading if question == COMMUNITY else f"{kind.heading}: {question}"
    heading = tag("h4" if len(view.settings) > 1 else "h3", about)
    return [heading, drawn, *_most_exposed(view, setting, question, every, "exposed")]


def _most_exposed(view: View, setting: Setting, question: str, every: pl.DataFrame, by: str) -> list[Content]:
    """The first users by rank without a defense, averaged over seeds, and what the others do for them: to their AUC, or
    their exposure.
    """
    reference = view.reference(setting)
    present = every["defense"].unique(maintain_order=True).to_list()
    first = reference if reference in present else present[0]
    means = every.group_by("defense", "user", maintain_order=True).agg(
        pl.col("rank").min(), pl.col("auc").mean(), pl.col("exposed").mean(), pl.col("activity").first()
    )
    top = (
        means.filter(pl.col("defense") == first)
        .sort("rank", "auc", "user", descending=[False, True, False], nulls_last=True)
        .head(_MOST_EXPOSED)
    )
    others = [mark.label for mark in view.marks_of(setting) if mark.label in present and mark.label != first]
    others = others[:_MOST_COLUMNS]
    beside = {(row["defense"], row["user"]): row[by] for row in means.join(top, on="user", how="semi").to_dicts()}
    show, what = (number, "AUC") if by == "auc" else (percent, "exposed")
    body = [
        [
            row["user"] or "?",
            DASH if row["activity"] is None else f"{row['activity']:,}",
            *([number(row["auc"])] if by == "auc" else []),
            percent(row["exposed"]),
            *(show(beside.get((name, row["user"]))) for name in others),
        ]
        for row in top.to_dicts()
    ]
    header = ["user", "activity", *([f"AUC, {first}"] if by == "auc" else []), f"exposed, {first}"]
    header += [f"{what}, {name}" for name in others]
    caption = (
        f"The {len(body)} most exposed users under “{first}” ({question}), and what the defenses do for them. This "
        "table names users: think before you pass it on."
    )
    return [table(caption, header, body, numbers=len(header) - 1)]
