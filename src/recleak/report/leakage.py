"""What was measured of whole systems: leakage against utility, every attack on every defense, curves and rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_uppercase

import polars as pl

from recleak.report import charts
from recleak.report.markup import (
    DASH,
    Cell,
    Content,
    Html,
    breakable,
    bullets,
    counted,
    details,
    estimate,
    join,
    known,
    listed,
    number,
    percent,
    table,
    tag,
)
from recleak.report.pieces import chapter, figure, key_of, letter_of, sample_line
from recleak.report.view import Row, Setting, System, View, is_auc, is_tpr, metric_name, system_of

_MOST_SEEDS = 3  # curves of one attack
_AT = (0.001, 0.01, 0.1, 0.5)  # false positive rates of the table beside the curves


def tradeoff(view: View) -> Html:
    """Utility against leakage."""
    intro = (
        "Each point is a system: how useful it is, and how much the strongest attack learns from it. Down and to the "
        f"right is better. Bars are {view.level_words} intervals: where they overlap, the order is not sure."
    )
    empty = "Nothing to show: a point needs both the utility of a system and a verdict on it."
    return chapter(view, "tradeoff", "What privacy costs", intro, empty, _tradeoff)


def matrix(view: View) -> Html:
    """Every attack against every defense."""
    intro = (
        "Read along a row: what each attack gets out of one defense. The ringed one was chosen on validation users; "
        "the verdict speaks of it. Read down a column: what the defenses do to one attack. Guessers stand apart: an "
        "attack that does no better than they do has learned nothing. Below 0.5, in blue, an attack is wrong more "
        "often than right, which also tells something."
    )
    return chapter(view, "matrix", "Every attack on every defense", intro, "No attack was run.", _matrix)


def curves(view: View) -> Html:
    """Receiver operating characteristics."""
    intro = (
        "An attack that is sure about a few users harms those, whatever its average. So look at the left edge: how "
        "much is found (true positives) while hardly anything is claimed falsely (false positives). Both axes are in "
        "powers of ten; the thin diagonal is a coin."
    )
    empty = "No curve was kept, and no rate measured."
    return chapter(view, "curves", "How much is found at few false alarms", intro, empty, _roc, _rates)


# --- the trade-off ----------------------------------------------------------------------------------------------------


def _tradeoff(view: View, setting: Setting, question: str) -> list[Content]:
    metric = metric_name(view.utility_metric)
    points: charts.Rows = []
    for system in view.systems_of(setting):
        found, useful = view.chosen.get((system, question)), view.utility.get(system)
        if found is None or useful is None or not known(found["value"]) or not known(useful["value"]):
            continue
        points.append(
            {"x": useful["value"], "left": useful["low"], "right": useful["high"], "y": found["value"]}
            | {"low": found["low"], "high": found["high"], "null": found["null_value"], "label": system.name}
            | {"color": view.marks[system.name].color, "utility": estimate(useful, 3), "leakage": estimate(found, 3)}
            | {"guesser": estimate(found, 3, prefix="null_value"), "verdict": found["verdict"]}
        )
    if not points:
        return []
    for place, (point, best) in enumerate(zip(points, charts.pareto([(p["x"], p["y"]) for p in points]), strict=True)):
        point["letter"] = ascii_uppercase[place] if place < 26 else str(place + 1)
        point["front"], point["where"] = best, "yes" if best else "no"
    baselines = view.baselines(setting)
    front = [point["label"] for point in points if point["front"]]
    missing = [s.name for s in view.systems_of(setting) if s.name not in {point["label"] for point in points}]
    caption = [
        f"On the Pareto front, where nothing else is both more useful and leaks less: {listed(front)}. ",
        f"Not shown, because utility or leakage was not measured: {listed(missing)}." if missing else "",
    ]
    key = bullets(
        [
            *(join([letter_of(point["letter"], point["color"]), point["label"]]) for point in points),
            join([sample_line("var(--faint)", width=3, length=14), "what the best guesser gets"]),
            *([join([sample_line("var(--ink)", "5 4", 1), "Pareto front"])] if len(front) > 1 else []),
            *(
                [join([sample_line("var(--faint)", "2 3"), f"utility of {listed(list(baselines))}"])]
                if baselines
                else []
            ),
        ],
        "legend",
    )
    rows = [[f"{p['letter']} {p['label']}", p["utility"], p["leakage"], p["guesser"], p["where"]] for p in points] + [
        [name, number(value, 3), DASH, DASH, DASH] for name, value in baselines.items()
    ]
    numbers = table(
        f"Utility ({metric}) and leakage, {setting.label}, {question}",
        ["system", metric, "AUC of the strongest attack", "AUC of the best guesser", "Pareto front"],
        rows,
        numbers=4,
    )
    words = "; ".join(f"{p['label']}: {metric} {number(p['x'], 3)}, AUC {number(p['y'])}" for p in points[:12])
    drawn = figure(
        charts.tradeoff(
            [{key: value for key, value in p.items() if key != "verdict"} for p in points], baselines, metric
        ),
        f"Leakage against utility: {question}",
        f"Scatter plot of leakage against utility. {words}.",
        join(caption),
        key=key,
        numbers=numbers,
    )
    return [drawn]


# --- the matrix -------------------------------------------------------------------------------------------------------


def _matrix(view: View, setting: Setting, question: str) -> list[Content]:
    rows = view.rows(view.scores, setting, question)
    found = {(system_of(row), row["attack"]): row for row in rows if is_auc(row)}
    reasons = {(system_of(row), row["attack"]): row["reason"] for row in rows if row["reason"]}
    attacks, guessers, truths = (
        list(dict.fromkeys(row["attack"] for row in rows if _kind(row) == kind))
        for kind in ("attack", "guesser", "reference")
    )
    nulls = [*guessers, *truths]
    if not rows:
        return []
    names: list[Content | Cell] = ["defense", *map(breakable, attacks)]
    names += [
        Cell(
            tag("i", breakable(each)) if each in truths else breakable(each), "apart" if not place and attacks else None
        )
        for place, each in enumerate(nulls)
    ]
    body = []
    for system in view.systems_of(setting):
        chosen = view.chosen.get((system, question), {}).get("attack")
        cells: list[Content | Cell] = [system.name]
        for each in [*attacks, *nulls]:
            apart = "apart" if nulls and each == nulls[0] and attacks else ""
            row = found.get((system, each))
            cells.append(_heat(system, each, row, reasons.get((system, each)), each == chosen, apart))
        body.append(cells)
    above = tag(
        "tr",
        tag("td"),
        tag("th", "attacks", colspan=len(attacks), scope="colgroup") if attacks else None,
        tag("th", "guessers", colspan=len(guessers), scope="colgroup", class_="apart" if attacks else None)
        if guessers
        else None,
        tag("th", "reference", colspan=len(truths), scope="colgroup") if truths else None,
    )
    grid = table(
        f"AUC of every attack (columns) on every defense (rows): {question}", names, body, class_="heat", above=above
    )
    drawn = tag(
        "figure",
        grid,
        _RAMP,
        tag("figcaption", _highest(found.values())),
        details("All scores as a table", _scores(view, setting, rows)),
    )
    return [drawn]


def _kind(row: Row) -> str:
    """An attack, a guesser, or a reader of the truth."""
    return {"null": "guesser", "reference": "reference"}.get(str(row["role"]), "attack")


def _highest(rows: Iterable[Row]) -> str:
    """The strongest attack and the strongest guesser of a matrix."""
    measured = [row for row in rows if known(row["value"])]
    said = []
    for who in ("attack", "guesser"):
        best = max((row for row in measured if _kind(row) == who), key=lambda r: r["value"], default=None)
        if best is not None:
            said.append(f"The highest {who} is {best['attack']} on “{system_of(best).name}”: {estimate(best)}.")
    return " ".join(said) or "Nothing could be measured; the table says why."


def _heat(system: System, attack: str, row: Row | None, reason: str | None, chosen: bool, apart: str) -> Cell:
    if row is None or not known(row["value"]):
        why = reason or "not measured"
        said = join([DASH, tag("span", f" {why}", class_="unseen")])
        return Cell(said, f"void {apart}".strip(), f"{attack} on {system.name}: {why}")
    step = round(10 * min(1.0, max(0.0, row["value"])))
    classes = " ".join(filter(None, [f"h{step}", "chosen" if chosen else "", apart]))
    return Cell(number(row["value"]), classes, f"{attack} on {system.name}: {estimate(row, 3)}{_over(row)}")


def _over(row: Row) -> str:
    counts = [counted(row[f"{unit}s"], unit) for unit in ("user", "seed") if row[f"{unit}s"]]
    return f" ({', '.join(counts)})" if counts else ""


_RAMP = tag(
    "div",
    tag("span", "AUC 0", tag("span", *(tag("i", class_=f"h{step}") for step in range(11))), "1", class_="scale"),
    tag("span", tag("i", class_="ring"), "chosen on validation users"),
    tag("span", tag("i", class_="void"), "makes no sense or was not measured: point at it, or see the table"),
    class_="ramp",
    aria_hidden="true",
)


def _scores(view: View, setting: Setting, rows: Sequence[Row]) -> Html:
    metrics = list(dict.fromkeys(row["metric"] for row in rows if row["metric"]))
    by_place: dict[tuple[System, str], dict[str | None, Row]] = {}
    for row in rows:
        by_place.setdefault((system_of(row), row["attack"]), {})[row["metric"]] = row
    order = {system: place for place, system in enumerate(view.systems_of(setting))}
    body = []
    for (system, attack), found in sorted(by_place.items(), key=lambda pair: order[pair[0][0]]):
        any_row = next(iter(found.values()))
        why = next((row["reason"] for row in found.values() if row["reason"]), None)
        cells = [estimate(found[name], 3) if name in found else DASH for name in metrics]
        counts = [next((r[unit] for r in found.values() if r[unit] is not None), None) for unit in ("users", "seeds")]
        role = "guesser" if any_row["role"] == "null" else any_row["role"]
        counts = [DASH if not count else f"{count:,}" for count in counts]
        body.append(
            [system.name, attack, role, any_row["vantage"], *cells, *counts, Cell(why, "long" if why else None)]
        )
    header = ["defense", "attack", "role", "vantage", *map(metric_name, metrics), "users", "seeds", "remark"]
    return table("Every score on test users, with its interval", header, body, numbers=len(metrics) + 2, after=1)


# --- curves -----------------------------------------------------------------------------------------------------------


def _roc(view: View, setting: Setting, question: str) -> list[Content]:
    every = view.frame(view.findings.roc, setting, question)
    reference = view.reference(setting)
    chosen = view.of_chosen(every.filter(pl.col("role").ne_missing("null")))
    nulls = every.filter((pl.col("role") == "null") & (pl.col("defense").fill_null("?") == reference))
    drawn: list[tuple[str, pl.DataFrame]] = []
    for name in [system.name for system in view.systems_of(setting)]:
        drawn += [(name, each) for each in _by_seed(chosen.filter(pl.col("defense").fill_null("?") == name))]
    guessers = nulls["attack"].drop_nulls().unique(maintain_order=True).to_list()
    for name in guessers:
        drawn += [(f"guesser: {name}", each) for each in _by_seed(nulls.filter(pl.col("attack") == name))]
    rows: charts.Rows = []
    known_rates: list[list[Content | Cell]] = []
    for place, (name, frame) in enumerate(drawn):
        fpr, tpr = frame["fpr"].to_numpy(), frame["tpr"].to_numpy()
        keep = charts.thinned(fpr, tpr, charts.points_each(len(drawn)))
        rows += [
            {"series": name, "curve": place, "fpr": float(x), "tpr": float(y)}
            for x, y in zip(fpr[keep], tpr[keep], strict=True)
        ]
        highest = [tpr[fpr <= limit].max(initial=0.0) for limit in _AT]
        known_rates.append([name, frame["attack"][0], str(frame["seed"][0])] + [percent(each, 1) for each in highest])
    if not rows:
        return []
    used = {row["series"] for row in rows}
    marks = [mark for mark in view.marks_of(setting) if mark.label in used]
    marks += [mark for mark in charts.nulls_of(f"guesser: {name}" for name in guessers) if mark.label in used]
    seeds = every["seed"].n_unique()
    first = {str(row[0]): row[4] for row in reversed(known_rates)}
    found = "; ".join(f"{mark.label} {first[mark.label]}" for mark in marks[:10])
    caption = (
        f"At 1 % false positives this much is found: {found}. One line for each seed"
        f"{f' (the first {_MOST_SEEDS} of {seeds})' if seeds > _MOST_SEEDS else ''}: the chosen attack against each "
        f"defense, and the guessers against “{reference}”."
    )
    numbers = table(
        "True positive rate at a false positive rate of at most",
        ["curve", "attack", "seed", *(percent(limit, 1) for limit in _AT)],
        known_rates,
        numbers=4,
    )
    shown = figure(
        charts.roc(rows, marks),
        f"Receiver operating characteristic, log-log: {question}",
        f"Curves of true against false positives. At 1 % false positives: {found}.",
        caption,
        key=key_of(marks, [(sample_line("var(--faint)", width=1), "a coin")]),
        numbers=numbers,
    )
    return [shown]


def _by_seed(frame: pl.DataFrame) -> list[pl.DataFrame]:
    """The curves of the first seeds, without what is not a number."""
    found = frame.filter(pl.col("fpr").is_finite() & pl.col("tpr").is_finite())
    return found.sort("seed", "fpr", "tpr").partition_by("seed", maintain_order=True)[:_MOST_SEEDS]


def _rates(view: View, setting: Setting, question: str) -> list[Content]:
    rows = [row for row in view.rows(view.scores, setting, question) if is_tpr(row)]
    metrics = sorted({row["metric"] for row in rows}, key=lambda name: -_rate(name))
    if not metrics:
        return []
    found = {(system_of(row), row["attack"], row["metric"]): row for row in rows}
    body: list[list[Content | Cell]] = []
    for system in view.systems_of(setting):
        verdict = view.chosen.get((system, question))
        if verdict is None:
            continue
        for attack, role in ((verdict["attack"], "attack"), (verdict["null"], "best guesser")):
            cells = [found.get((system, attack, metric)) for metric in metrics]
            if attack is not None and any(cells):
                said = [DASH if cell is None else _rate_words(cell) for cell in cells]
                body.append([system.name, join([breakable(attack), f" ({role})"]), *said])
    if not body:
        return []
    header = ["defense", "who", *map(metric_name, metrics)]
    caption = f"True positive rate (TPR) at a false positive rate (FPR) of at most 1 % and 0.1 %: {question}"
    return [table(caption, header, body, numbers=len(metrics))]


def _rate(metric: str) -> float:
    digits = "".join(char if char.isdigit() or char == "." else " " for char in metric).split()
    return float(digits[0]) if digits and digits[0].count(".") < 2 and digits[0] != "." else 0.0


def _rate_words(row: Row) -> str:
    if not known(row["value"]):
        return row["reason"] or "too few to tell"
    ends = f" [{percent(row['low'], 1)}, {percent(row['high'], 1)}]" if known(row["low"]) and known(row["high"]) else ""
    return f"{percent(row['value'], 1)}{ends}"
