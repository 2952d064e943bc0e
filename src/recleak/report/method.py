"""What is promised, and how the report came about: the ledger, the knowledge of adversaries, the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from recleak.addresses import without_password
from recleak.report.markup import (
    DASH,
    Cell,
    Content,
    Html,
    breakable,
    counted,
    join,
    known,
    listed,
    paragraph,
    percent,
    section,
    significant,
    table,
    tag,
)
from recleak.report.view import Row, View, system_of

_SHORT = 88  # characters of a line of JSON


def ledger(view: View) -> Html:
    """What the defenses promise, what it composes to, and what canaries show."""
    rows = view.findings.ledger.to_dicts()
    entered = {system_of(row) for row in rows}
    without = [system.label for system in view.systems if system not in entered]
    body = [
        [
            system_of(row).label if len(view.settings) > 1 else system_of(row).name,
            Cell(join([row["mechanism"] or "?", *_protects(row)]), "long"),
            significant(row["claimed"]) if known(row["claimed"]) else "nothing",
            _composed(row),
            _at_least(row),
            Cell(row["words"], "longer"),
        ]
        for row in rows
    ]
    header = ["system", "mechanism, and what it protects", "claimed ε", "composed ε", "at least ε", "in words"]
    return section(
        "ledger",
        "What is promised",
        paragraph(_EPSILON) if rows else paragraph("No defense was entered in the ledger."),
        table("The ledger: a smaller ε is more private", header, body) if rows else None,
        paragraph(_CANARIES, class_="small") if any(known(row["at_least"]) for row in rows) else None,
        paragraph(tag("strong", "No guarantee"), f" is known of {listed(without)}.") if without else None,
    )


_EPSILON = (
    "Epsilon (ε) bounds what anyone can learn, whatever the attack: an adversary’s odds grow by e to the ε at most, "
    "2.7 times for each unit. Below 1 is strong, above 10 says little. Claimed is that of one use, as papers print it; "
    "composed is that of everything that was sent; at least is what planted canaries show. Without a guarantee, what "
    "no attack finds today one may find tomorrow."
)
_CANARIES = (
    "Canaries are about the presence of one interaction. A promise about something else is neither refuted nor "
    "confirmed by them."
)


def _protects(row: Row) -> list[Content]:
    given = [f"{name}: {row[key]}" for key, name in (("unit", "protects"), ("neighbors", "cannot be told from"))
             if row[key] and row[key] != "nothing"]  # fmt: skip
    return [part for words in given for part in (tag("br"), tag("span", words, class_="aside"))]


def _composed(row: Row) -> Content:
    if not known(row["composed"]):
        return tag("strong", "no guarantee")
    how = [f"δ = {significant(row['delta'])}"] if known(row["delta"]) else []
    how += [counted(row["times"], "use")] if row["times"] is not None else []
    return join(
        [significant(row["composed"]), *([tag("br"), tag("span", ", ".join(how), class_="aside")] if how else [])]
    )


def _at_least(row: Row) -> Content:
    if not known(row["at_least"]):
        return DASH
    how = [counted(row["canaries"], "canary", "canaries")] if row["canaries"] is not None else []
    how += [f"{percent(row['level'])} sure"] if known(row["level"]) else []
    return join(
        [significant(row["at_least"]), *([tag("br"), tag("span", ", ".join(how), class_="aside")] if how else [])]
    )


def method(view: View) -> Html:
    """The configuration, who knew what, and how to do it again."""
    about = view.about
    share = about.get("validation")
    validation = (
        f"{percent(share)} of the users" if isinstance(share, int | float) and known(share) else "a share of the users"
    )
    facts = {"recleak": about.get("recleak"), **(about.get("environment") or {})}
    facts |= {f"fingerprint of {name}": each for name, each in (about.get("fingerprints") or {}).items()}
    command = about.get("command")
    return section(
        "method",
        "How it was made",
        paragraph(
            f"For each system and question, the attack and its direction were chosen on {validation} (validation); all "
            "numbers here are of the other users (test). Intervals are over users and seeds."
        ),
        tag("h3", "To do it again"),
        tag("pre", tag("code", without_password(_words(command))), tabindex=0)
        if command
        else paragraph("The command was not recorded."),
        tag("h3", "What the adversaries knew"),
        *_adversaries(about.get("attacks") or []),
        tag("h3", "The experiment"),
        tag("pre", tag("code", _experiment(about["experiment"])), tabindex=0)
        if about.get("experiment")
        else paragraph("The experiment was not recorded."),
        tag("h3", "Versions and environment"),
        tag(
            "dl",
            *(
                part
                for name, value in facts.items()
                if value is not None
                for part in (tag("dt", name), tag("dd", _words(value)))
            ),
        ),
    )


def _adversaries(attacks: Sequence[dict[str, Any]]) -> list[Html]:
    """Who they are; and what they knew, once for all who knew the same."""
    if not attacks:
        return [paragraph("No attack was recorded.")]
    body = [
        [
            breakable(each.get("attack")),
            "guesser" if each.get("role") == "null" else each.get("role"),
            each.get("question"),
            each.get("vantage"),
            Cell(_what(each), "longer"),
        ]
        for each in attacks
    ]
    grid = table("All attacks and guessers", ["attack", "role", "question", "sees", "what it does"], body)
    who: dict[str, list[str]] = {}
    for each in attacks:
        if each.get("knowledge"):
            who.setdefault(_lines(each["knowledge"]), []).append(str(each.get("attack") or "?"))
    said = [
        part
        for knowledge, names in who.items()
        for part in (
            paragraph(
                "Beside the messages that they see, ", tag("strong", listed(names)), " had this and nothing else:"
            ),
            tag("pre", tag("code", knowledge), tabindex=0),
        )
    ]
    return [grid, *said]


def _what(attack: dict[str, Any]) -> Html:
    settings = [tag("br"), tag("code", _words(attack["settings"]))] if attack.get("settings") else []
    return join([_words(attack.get("text")), *settings])


def _lines(knowledge: Any) -> str:
    if isinstance(knowledge, dict):
        return "\n".join(f"{name}: {_words(each)}" for name, each in knowledge.items())
    return _words(knowledge)


def _words(value: Any) -> str:
    """Anything of a JSON document on one line."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_words(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)


def _experiment(given: Any) -> str:
    return given if isinstance(given, str) else _pretty(given)


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with one line for what is short.

    >>> print(_pretty({"seeds": [0, 1], "data": {"use": "movielens"}}))
    {
      "seeds": [0, 1],
      "data": {"use": "movielens"}
    }
    """
    line = json.dumps(value, ensure_ascii=False, default=str)
    if not isinstance(value, dict | list) or not value or (indent and len(indent + line) <= _SHORT):
        return line
    inner = f"{indent}  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(key), ensure_ascii=False)}: {_pretty(each, inner)}" for key, each in value.items()]
    else:
        parts = [_pretty(each, inner) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(f"{inner}{part}" for part in parts) + f"\n{indent}{closing}"
