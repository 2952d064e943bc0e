"""Conditions on findings, for continuous integration: `membership.auc > 0.6`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from recleak.errors import ConfigError, unknown_name
from recleak.findings import SYSTEM, Findings

ATTRIBUTE = ("auc", "excess", "macro-f1", "accuracy")  # of questions that are named after an attribute
MARK = ("auc", "excess", "accuracy")  # of questions that are named after items of a kind
METRICS = {  # by question
    "membership": ("auc", "excess", "f1", "exposed", "advantage", "tpr@1%", "tpr@0.1%"),
    "community": (
        *MARK,
        *("bound", "accuracy@best", "accuracy@chosen", "accuracy@10%", "accuracy@50%", "accuracy@90%"),
    ),
    "utility": ("hit@10", "hit@20", "ndcg@10", "ndcg@20"),
}
_FORM = re.compile(r"\s*([a-z][a-z0-9_-]*)\.([a-z0-9@%.-]+?)\s*(>=|<=|>|<)\s*([-+0-9.e]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Condition:
    """Something that must not be certain of any system; where it was not measured, the condition fails too."""

    question: str  # membership, an attribute, or utility
    metric: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str, attributes: Iterable[str] = (), marks: Iterable[str] = ()) -> Condition:
        """From what is typed; `attributes` and `marks` are those that are inferred."""
        metrics = {**METRICS, **dict.fromkeys(attributes, ATTRIBUTE), **dict.fromkeys(marks, MARK)}
        found = _FORM.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            made = cls(found[1], found[2], found[3], float(found[4]))
        except ValueError:
            raise ConfigError(
                f"--fail-if {text!r}: expected question.metric, a sign and a number, such as 'membership.auc > 0.6' "
                "or 'utility.hit@10 < 0.3'."
            ) from None
        for kind, got, known in (
            ("question", made.question, metrics),
            ("metric", made.metric, metrics.get(made.question, ())),
        ):
            if got not in known:
                raise ConfigError(f"--fail-if {text!r}: {unknown_name(kind, got, known)}")
        return made

    def violations(self, findings: Findings, *, point: bool = False) -> Iterator[str]:
        """The systems of which it is certain: the end of the interval nearer to the limit is beyond it. And those
        of which it was not measured: nobody should take that for a pass.

        `point`: the value itself counts. An attack's metric is that of the strongest one, as in the verdict.
        """
        above = self.sign.startswith(">")
        for row in self._rows(findings):
            system = ", ".join(row[name] for name in SYSTEM)
            end = row["value"] if point else row["low"] if above else row["high"]
            if end is None:
                yield f"{self.question}.{self.metric}: not measured, so nothing is known ({system})"
                continue
            beyond = {">": end > self.limit, ">=": end >= self.limit, "<": end < self.limit, "<=": end <= self.limit}
            if beyond[self.sign]:
                interval = f"{row['value']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"
                yield f"{self.question}.{self.metric} {self.sign} {self.limit:g}: {interval} ({system})"

    def _rows(self, findings: Findings) -> list[dict[str, Any]]:
        if self.question == "utility":
            table = findings.utility.filter(pl.col("recommender") == pl.col("model"))
            return table.filter(pl.col("metric") == self.metric).to_dicts()
        mine = findings.verdicts.filter(pl.col("question") == self.question)
        if self.metric == "auc":
            return mine.to_dicts()
        if self.metric == "excess":
            names = {"excess": "value", "excess_low": "low", "excess_high": "high"}
            return mine.drop("value", "low", "high").rename(names).to_dicts()
        scores = findings.scores.filter(pl.col("question") == self.question, pl.col("role") == "attack")
        scores = scores.filter(pl.col("metric") == self.metric)
        return mine.select(*SYSTEM, "attack").join(scores, on=[*SYSTEM, "attack"], how="left").to_dicts()
