"""The first part of the report: who can learn what, in plain words, and whether a defense changes it."""

from __future__ import annotations

from math import floor
from typing import Any

from recleak.report.markup import (
    Content,
    Html,
    bullets,
    counted,
    details,
    estimate,
    join,
    known,
    number,
    paragraph,
    probability,
    section,
    table,
    tag,
    text,
)
from recleak.report.pieces import badge, kind_of, strip
from recleak.report.view import CANNOT_TELL, LEAKS, NOT_FOUND, Row, System, View, metric_name, system_of

_MANY = 12  # cards
_VERB = {True: "lowers", False: "raises"}  # by whether the difference is negative
_SCOPE = (
    "Scope. The adversaries here are honest but curious: they follow the protocol and look at what they receive. "
    "Malicious ones, who tamper with what they send or poison the training, are out of scope. Only the attacks listed "
    "below were tried: “no leak found” means that none of them beat a guesser, by 0.05 at most, not that nothing leaks."
)

_TERMS = (
    "A case is one system and one question about its users. An attack is judged by its AUC: the chance that it ranks "
    "something that is true of a user above something that is not. 0.5 is a coin, 1 is certainty. Brackets are {level} "
    "intervals. A guesser goes by what is known anyway, such as which items are popular; only what an attack learns "
    "beyond the best guesser counts as a leak. On the lines below, the full dot is the attack "
    "and the hollow one the best guesser."
)


def verdict(view: View) -> Html:
    """The verdicts, and what the defenses change."""
    return section(
        "verdict", "The verdict", _self_test(view), *_headline(view), *_cards(view), *_changes(view), *_end(view)
    )


def _self_test(view: View) -> Html | None:
    if not view.about.get("self_test"):
        return None
    measured, leaks = _measured(view)
    found = f"{len(leaks)} of {counted(len(measured), 'verdict')} {'says' if len(leaks) == 1 else 'say'} “leaks” still"
    return tag(
        "div",
        paragraph(
            tag("strong", "Self-test: the labels were shuffled."),
            " There is nothing to be found, so that every attack must look like a guesser. Nothing on this page says "
            "anything about the system; it tells whether the audit can be believed.",
        ),
        paragraph(f"{found}; by chance a few in a hundred do.") if measured else None,
        class_="notice",
        role="note",
    )


def _measured(view: View) -> tuple[list[Row], list[Row]]:
    """The verdicts that rest on a measurement, and those of them that say there is a leak."""
    measured = [row for row in view.verdicts if row["verdict"] in (LEAKS, NOT_FOUND, CANNOT_TELL)]
    return measured, [row for row in measured if row["verdict"] == LEAKS]


def _headline(view: View) -> list[Html]:
    measured, leaks = _measured(view)
    unmeasured = len(view.verdicts) - len(measured)
    cases = counted(len(measured), "case")
    if not measured:
        lead = ("Nothing was measured.", " No attack could be graded against any system.")
    elif not leaks and all(row["verdict"] == CANNOT_TELL for row in measured):
        lead = ("It cannot be told.", " Nowhere is it certain that the strongest attack beats a guesser, nor that not.")
    elif not leaks:
        lead = ("No leak was found.", f" In none of {cases} did the strongest attack beat a guesser.")
    else:
        share = f"all {cases}" if leaks == measured else f"{len(leaks)} of {cases}"
        share = "the one case" if len(measured) == 1 else share
        lead = ("It leaks.", f" In {share} an adversary learns more about users than a guesser does.")
    unsure = sum(row["verdict"] == CANNOT_TELL for row in measured)
    aside = f" In {counted(unsure, 'case')} users and seeds are too few to tell." if unsure else ""
    aside += f" {counted(unmeasured, 'case')} could not be measured." if unmeasured and measured else ""
    said = [] if view.about.get("self_test") else [paragraph(tag("strong", lead[0]), lead[1], aside, class_="lead")]
    worst = max(leaks, key=_excess, default=None)
    if worst is not None:
        where = f"The largest lead over a guesser: {system_of(worst).label}. "
        said.append(paragraph(tag("strong", where), worst["words"]))
    return [*said, paragraph(_TERMS.format(level=view.level_words), class_="small")] if view.verdicts else said


def _excess(row: Row) -> tuple[float, float]:
    return row["excess"] if known(row["excess"]) else -1.0, row["value"] if known(row["value"]) else -1.0


def _cards(view: View) -> list[Html]:
    ends = [
        row[name] for row in view.verdicts for name in ("value", "low", "null_value", "null_low") if known(row[name])
    ]
    first = min([0.4, *(floor(10 * end) / 10 for end in ends)])
    dense = " dense" if len(view.verdicts) > _MANY else ""
    made: list[Html] = []
    for setting in view.settings:
        rows = [row for row in view.verdicts if system_of(row).setting == setting]
        if rows:
            made.append(tag("h3", setting.label))
            made.append(tag("div", *(_card(row, first) for row in rows), class_=f"cards{dense}"))
    return made


def _card(row: Row, first: float) -> Html:
    beyond = f"Beyond the best guesser ({row['null'] or '?'}): {estimate(row, sign=True, prefix='excess')}. "
    how = [f"Attack: {row['attack']}"] if row["attack"] else []
    if how and row["candidates"]:
        how[0] += ", the only one" if row["candidates"] == 1 else f", the strongest of {row['candidates']}"
    how += [counted(row[f"{unit}s"], unit) for unit in ("user", "seed") if row[f"{unit}s"]]
    how += ["read the other way round"] if row["direction"] == -1 else []
    return tag(
        "article",
        tag("div", tag("h4", system_of(row).name), badge(row["verdict"]), class_="top"),
        paragraph(row["question"] or "?", class_="about"),
        strip(row, first),
        paragraph(row["words"]) if row["words"] else None,
        paragraph(beyond if known(row["excess"]) else "", f"{'; '.join(how)}." if how else "", class_="about")
        if how or known(row["excess"])
        else None,
        class_=f"card {kind_of(row['verdict'])}",
    )


# --- what a defense changes -------------------------------------------------------------------------------------------


def _changes(view: View) -> list[Html]:
    rows = view.findings.comparisons.to_dicts()
    if not rows:
        several = any(len(view.systems_of(setting)) > 1 for setting in view.settings)
        words = "They were not compared." if several else "There is one defense only, so nothing to compare it with."
        return [tag("h3", "What the defenses change"), paragraph(words)] if view.verdicts else []
    sure = 1 - view.level
    made: list[Content] = []
    for setting in view.settings:
        of = {system: [row for row in rows if system_of(row) == system] for system in view.systems_of(setting)}
        sentences = [_sentence(view, system, each, sure) for system, each in of.items() if each]
        if sentences and len(view.settings) > 1:
            made.append(tag("h4", setting.label))
        made += [bullets(sentences)] if sentences else []
    return [
        tag("h3", "What the defenses change"),
        paragraph(
            "Each defense against the same system with the reference in its place, on the same users. p is corrected "
            f"for the number of comparisons (Holm); from {number(sure)} on, a difference may be chance.",
            class_="small",
        ),
        *(text(each) for each in made),
        details("All comparisons as a table", _comparisons(rows)),
    ]


def _sentence(view: View, system: System, rows: list[Row], sure: float) -> Html:
    leakage: dict[str, Row] = {}
    for row in rows:
        if row["question"] != "utility" and row["metric"] in ("auc", "excess"):
            chosen = view.chosen.get((system, row["question"] or "?"))
            best = chosen is not None and chosen["attack"] == row["attack"]
            if best or row["question"] not in leakage:
                leakage[row["question"]] = row
    utility = [row for row in rows if row["question"] == "utility"]
    parts = [
        _part(row, "leakage", f"{row['question'] or '?'}: {metric_name(row['metric'])}", sure)
        for row in leakage.values()
    ]
    parts += [_part(row, "utility", metric_name(row["metric"]), sure) for row in utility[:1]]
    against = f" (against “{rows[0]['reference'] or '?'}”) "
    return join([tag("strong", system.name), against, join(parts or ["is in the table only"], "; "), "."])


def _part(row: Row, what: str, of: str, sure: float) -> Html:
    value = row["value"]
    if not known(value):
        return text(f"its {what} ({of}) could not be compared")
    verb = "does not clearly change" if not known(row["p_holm"]) or row["p_holm"] >= sure else _VERB[value < 0]
    numbers = f" ({of} {estimate(row, 3, sign=True)}, {probability(row['p_holm'])})"
    return join([f"{verb} {what}", tag("span", numbers, class_="aside")])


def _comparisons(rows: list[Row]) -> Html:
    body = [
        [
            system_of(row).label,
            row["reference"],
            row["question"],
            row["attack"],
            metric_name(row["metric"]),
            estimate(row, 3, sign=True),
            probability(row["p"]).removeprefix("p = ").removeprefix("p "),
            probability(row["p_holm"]).removeprefix("p = ").removeprefix("p "),
        ]
        for row in rows
    ]
    header = ["system", "reference", "question", "attack", "metric", "difference", "p", "p (Holm)"]
    return table("Each defense minus the reference, on the same users", header, body, numbers=3)


# --- scope, notes, names ----------------------------------------------------------------------------------------------


def _end(view: View) -> list[Html | None]:
    notes = [str(note) for note in view.about.get("notes") or []]
    named: list[tuple[System, str]] = [(system, view.texts.get(system, "")) for system in view.systems]
    meanings: list[Any] = [
        part for system, words in named if words for part in (tag("dt", system.label), tag("dd", words))
    ]
    return [
        tag("div", paragraph(_SCOPE), class_="scope", role="note"),
        bullets(notes, "small") if notes else None,
        details("What the names of the systems mean", tag("dl", *meanings)) if meanings else None,
    ]
