"""Every attack on every defense, for a page of documentation: a table in Markdown, and a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from recleak.errors import ConfigError
from recleak.files import replace_bytes, replace_text
from recleak.findings import SYSTEM, Findings
from recleak.png import packed

_SCALE = 1.0  # pixels of the picture per point
_ROLES = ("attack", "null", "reference")
_TRUTH = ", and who reads the true interactions"
_Row = dict[str, Any]


def write_markdown(findings: Findings, path: Path, name: str = "matrix") -> Path:
    """Fill the page between `<!-- begin NAME -->` and `<!-- end NAME -->`; a page that is not there is made."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else f"# {findings.about['title']}\n\n{begin}\n{end}\n"
    if begin not in page or end not in page:
        raise ConfigError(
            f"{path}: a page without {begin} and {end}.\n"
            "  Add these two lines where the matrix shall go, or name another file."
        )
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    filled = place.sub(lambda _: f"{begin}\n\n{markdown(findings)}\n{end}", page)
    replace_text(path, filled)
    return path


def markdown(findings: Findings) -> str:
    """A table for each setting and question: AUC of attacks and nulls with intervals, utility, the verdict."""
    parts = []
    for (data, model, protocol, question), verdicts in _settings(findings):
        scores = _aucs(findings, data, model, protocol, question)
        attacks = [name for role in _ROLES for name in _names(scores, role)]
        nulls, references = set(_names(scores, "null")), set(_names(scores, "reference"))
        names = [f"*{name}*" if name in nulls | references else name for name in attacks]
        head = ["defense", *names, "utility", "verdict"]
        lines = [f"**{data}, {model}, {protocol}: {question}**", "", _line(head), _line(["---"] * len(head))]
        reasons: list[str] = []
        for verdict in verdicts:
            cells = [_cell(scores, verdict, name, reasons) for name in attacks]
            lines.append(_line([verdict["defense"], *cells, _utility(findings, verdict), verdict["verdict"]]))
        level = round(100 * findings.about["level"])
        lines += [
            "",
            f"AUC with {level} % intervals; in italics who guesses{_TRUTH if references else ''}; "
            "bold the attack chosen on validation users.",
        ]
        lines += [f"{_mark(place)} {reason}" for place, reason in enumerate(reasons)]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def write_picture(findings: Findings, path: Path) -> Path:
    """The same as a heat map, PNG."""
    charts = []
    for (data, model, protocol, question), verdicts in _settings(findings):
        scores = _aucs(findings, data, model, protocol, question)
        names = [name for role in _ROLES for name in _names(scores, role)]
        rows = [
            {"defense": row["defense"], "attack": row["attack"], "auc": row["value"]}
            | {"shown": "–" if row["value"] is None else f"{row['value']:.2f}"}
            | {"dark": row["value"] is not None and abs(row["value"] - 0.5) > 0.35}
            for row in scores.to_dicts()
        ]
        base = alt.Chart(alt.InlineData(rows)).encode(
            x=alt.X("attack:N", sort=names, title=None, axis=alt.Axis(orient="top", labelAngle=-30, labelLimit=220)),
            y=alt.Y("defense:N", sort=[row["defense"] for row in verdicts], title=None, axis=alt.Axis(labelLimit=320)),
        )
        scale = alt.Scale(scheme="blueorange", domain=[0, 1], domainMid=0.5)
        heat = base.mark_rect(stroke="white").encode(color=alt.Color("auc:Q", scale=scale, title="AUC"))
        text = base.mark_text().encode(
            text="shown:N", color=alt.condition("datum.dark", alt.value("white"), alt.value("black"))
        )
        title = f"{data}, {model}, {protocol}: {question}"
        charts.append((heat + text).properties(title=title, width=52 * len(names), height=30 * len(verdicts)))
    png = vl_convert.vegalite_to_png(alt.concat(*charts, columns=1 + (len(charts) > 3)).to_dict(), scale=_SCALE)
    replace_bytes(path, packed(png))
    return path


def _settings(findings: Findings) -> list[tuple[tuple[str, ...], list[_Row]]]:
    found: dict[tuple[str, ...], list[_Row]] = {}
    for row in findings.verdicts.to_dicts():
        found.setdefault(tuple(row[name] for name in ("data", "model", "protocol", "question")), []).append(row)
    return list(found.items())


def _aucs(findings: Findings, data: str, model: str, protocol: str, question: str) -> pl.DataFrame:
    wanted = {"data": data, "model": model, "protocol": protocol, "question": question, "metric": "auc"}
    return findings.scores.filter(pl.col(name) == value for name, value in wanted.items())


def _names(scores: pl.DataFrame, role: str) -> list[str]:
    names: list[str] = scores.filter(pl.col("role") == role)["attack"].unique(maintain_order=True).to_list()
    return names


def _cell(scores: pl.DataFrame, verdict: _Row, attack: str, reasons: list[str]) -> str:
    rows = scores.filter(pl.col("defense") == verdict["defense"], pl.col("attack") == attack).to_dicts()
    if not rows or rows[0]["value"] is None:
        reason = str(rows[0]["reason"] or "It was not run.") if rows else "It was not run."
        return _footnote(reason, reasons)
    shown = f"{rows[0]['value']:.3f} [{rows[0]['low']:.3f}, {rows[0]['high']:.3f}]"
    shown = f"**{shown}**" if attack == verdict["attack"] else shown
    return f"{shown} {_footnote(str(rows[0]['reason']), reasons)}" if rows[0]["reason"] else shown


def _footnote(reason: str, reasons: list[str]) -> str:
    """Its mark; a reason that is new is added."""
    if reason not in reasons:
        reasons.append(reason)
    return _mark(reasons.index(reason))


def _utility(findings: Findings, verdict: _Row) -> str:
    mine = findings.utility.filter(
        pl.col("recommender") == pl.col("model"), *(pl.col(name) == verdict[name] for name in SYSTEM)
    )
    if not len(mine):
        return ""
    row = mine.row(0, named=True)
    return f"{row['metric']} {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _mark(place: int) -> str:
    """A footnote.

    >>> _mark(0), _mark(1)
    ('(a)', '(b)')
    """
    return f"({chr(ord('a') + place % 26)})"


def _line(words: list[str]) -> str:
    """A row of a table; what could be markup is text."""
    safe = [word.replace("|", "&#124;").replace("<", "&lt;").replace("\n", " ") for word in words]
    return f"| {' | '.join(safe)} |"
