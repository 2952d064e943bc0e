"""Several runs side by side: the same systems' leakage and utility, and which settings differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recleak.findings import Findings
from recleak.report import charts
from recleak.report.markup import (
    DASH,
    MINUS,
    Cell,
    Content,
    Html,
    bullets,
    counted,
    estimate,
    join,
    known,
    listed,
    number,
    paragraph,
    section,
    table,
    tag,
)
from recleak.report.page import whole
from recleak.report.pieces import badge, figure, key_of, summary_of
from recleak.report.view import LEAKS, Row, Setting, System, View, metric_name

Runs = Sequence[tuple[str, View]]
_MISSING = "not there"


def compare(runs: Sequence[tuple[str, Findings]]) -> str:
    """A page with the runs beside each other; differences are from the first. Names must differ."""
    names = [name for name, _ in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise ValueError(f"Got the runs {names}, expected at least two with different names.")
    views = [(name, View(findings)) for name, findings in runs]
    facts = " · ".join(counted(len(view.systems), "system") + f" in {name}" for name, view in views)
    sections = [_overview(views), _leakage(views), _utility(views), _settings(views)]
    return whole(f"{listed(names)}, side by side", "Runs compared", facts, sections)


def _overview(runs: Runs) -> Html:
    tests = [name for name, view in runs if view.about.get("self_test")]
    shared = [system for system in _systems(runs) if all(system in view.systems for _, view in runs)]
    rows = []
    for name, view in runs:
        leaks = sum(row["verdict"] == LEAKS for row in view.verdicts)
        words = f" leaks in {leaks} of {counted(len(view.verdicts), 'case')}" if view.verdicts else " measured nothing"
        rows.append(join([tag("strong", name), f":{words} ({view.about.get('title') or 'no title'})"]))
    notice = f"Self-test: in {listed(tests)} the labels were shuffled. Its numbers say nothing about a system."
    return section(
        "overview",
        "The runs",
        tag("div", paragraph(notice), class_="notice", role="note") if tests else None,
        bullets(rows),
        paragraph(
            f"{counted(len(shared), 'system is', 'systems are')} in all runs. Systems are the same if data, model, "
            "protocol and defense bear the same names; look at the settings below for what the names stand for. A "
            "difference is that from the first run. It is not tested, as the runs may have other users and seeds: it "
            "is marked only where the two intervals do not overlap."
        ),
    )


def _leakage(runs: Runs) -> Html:
    made = [part for setting in _settings_of(runs) for part in _leakage_of(runs, setting)]
    return section("leakage", "Leakage", *(made or [paragraph("No run has a verdict.")]))


def _leakage_of(runs: Runs, setting: Setting) -> list[Html]:
    places = list(dict.fromkeys(place for _, view in runs for place in view.chosen if place[0].setting == setting))
    if not places:
        return []
    marks = charts.series_of(name for name, _ in runs)
    several = len({question for _, question in places}) > 1
    body: list[list[Content | Cell]] = []
    drawn: charts.Rows = []
    for system, question in places:
        part = f"{system.name}, {question}" if several else system.name
        found = [view.chosen.get((system, question)) for _, view in runs]
        body.append([part, *map(_verdict, found), *(_change(found[0], row) for row in found[1:])])
        for mark, row in zip(marks, found, strict=True):
            if row is not None and known(row["value"]):
                ends = {name: row[name] for name in ("value", "low", "high")}
                drawn.append({"part": part, "series": mark.label, "found": estimate(row, 3), **ends})
    heading = tag("h3", setting.label)
    title = f"AUC of the strongest attack: {places[0][1]}" if not several else "AUC of the strongest attack"
    numbers = table(f"{title}, with its verdict", ["defense", *_columns(runs)], body)
    if not drawn:
        return [heading, numbers]
    words = summary_of([(f"{row['part']}, {row['series']}", row) for row in drawn])
    picture = figure(
        charts.dots(drawn, marks),
        title,
        f"Dots with intervals. {words}.",
        "Dots of one row are the same system in different runs; where their bars overlap, they may be equal.",
        key=key_of(marks),
        numbers=numbers,
    )
    return [heading, picture]


def _utility(runs: Runs) -> Html:
    metrics = list(dict.fromkeys(view.utility_metric for _, view in runs if view.utility_metric))
    if not metrics:
        return section("utility", "Utility", paragraph("No run measured utility."))
    made: list[Html] = []
    for setting in _settings_of(runs):
        body: list[list[Content | Cell]] = []
        for system in _systems(runs):
            found = [view.utility.get(system) if view.utility_metric == metrics[0] else None for _, view in runs]
            if system.setting == setting and any(found):
                cells = [DASH if row is None else estimate(row, 3) for row in found]
                body.append([system.name, *cells, *(_change(found[0], row) for row in found[1:])])
        if body:
            caption = f"{metric_name(metrics[0])} of the recommender"
            grid = table(caption, ["defense", *_columns(runs)], body, numbers=2 * len(runs) - 1)
            made += [tag("h3", setting.label), grid]
    other = [name for name, view in runs if view.utility_metric not in (metrics[0], None)]
    beside = f"{listed(other)} measured something else first, and cannot be compared."
    return section("utility", "Utility", *made, paragraph(beside) if other else None)


def _columns(runs: Runs) -> list[str]:
    names = [name for name, _ in runs]
    return [*names, *(f"{name} {MINUS} {names[0]}" for name in names[1:])]


def _settings(runs: Runs) -> Html:
    flat = [_flat(view.about.get("experiment") or {}) for _, view in runs]
    for each, (_, view) in zip(flat, runs, strict=True):
        each |= {f"environment.{key}": str(value) for key, value in (view.about.get("environment") or {}).items()}
        each |= {
            key: str(view.about[key]) for key in ("recleak", "level", "validation", "self_test") if key in view.about
        }
    keys = list(dict.fromkeys(key for each in flat for key in each))
    differ = [key for key in keys if len({each.get(key, _MISSING) for each in flat}) > 1]
    body = [[key, *(each.get(key, _MISSING) for each in flat)] for key in differ]
    same = f"{counted(len(keys) - len(differ), 'setting is', 'settings are')} the same in all runs."
    return section(
        "settings",
        "What was set differently",
        table("Settings of the experiment and the environment that differ", ["setting", *(n for n, _ in runs)], body)
        if body
        else None,
        paragraph(same),
    )


def _settings_of(runs: Runs) -> list[Setting]:
    return list(dict.fromkeys(system.setting for system in _systems(runs)))


def _systems(runs: Runs) -> list[System]:
    return list(dict.fromkeys(system for _, view in runs for system in view.systems))


def _verdict(row: Row | None) -> Html | str:
    if row is None:
        return DASH
    return join([estimate(row), tag("br"), badge(row["verdict"])])


def _change(first: Row | None, row: Row | None) -> str:
    if first is None or row is None or not known(first["value"]) or not known(row["value"]):
        return DASH
    ends = [each[name] for each in (first, row) for name in ("low", "high")]
    apart = all(map(known, ends)) and (ends[1] < ends[2] or ends[3] < ends[0])
    return number(row["value"] - first["value"], 3, sign=True) + (" ◆ intervals apart" if apart else "")


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a document by its path.

    >>> _flat({"a": {"b": 1}, "c": [2, {"d": 3}]})
    {'a.b': '1', 'c.0': '2', 'c.1.d': '3'}
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    if not pairs:
        return {path: str(value)} if path else {}
    lead = f"{path}." if path else ""
    return {key: leaf for name, each in pairs for key, leaf in _flat(each, f"{lead}{name}").items()}
