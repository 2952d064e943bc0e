"""Findings, looked at as a reader does: by setting (data, model, protocol), by question, by defense."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import polars as pl

from recleak.findings import SYSTEM, Findings
from recleak.report.charts import Series, series_of
from recleak.report.markup import NBSP, known

Row = dict[str, Any]
MEMBERSHIP, COMMUNITY = "membership", "community"
BASELINES = ("chance", "MostPop", "ItemKNN")
LEAKS, NOT_FOUND, CANNOT_TELL = "leaks", "not found", "cannot tell"


class Setting(NamedTuple):
    """Where defenses are compared."""

    data: str | None
    model: str | None
    protocol: str | None

    @property
    def label(self) -> str:
        """As a heading."""
        return " · ".join(part or "?" for part in self)


class System(NamedTuple):
    """The labels of `findings.SYSTEM`."""

    data: str | None
    model: str | None
    protocol: str | None
    defense: str | None

    @property
    def setting(self) -> Setting:
        """All but the defense."""
        return Setting(*self[:3])

    @property
    def name(self) -> str:
        """The defense; a system may have no name for it."""
        return self.defense or "?"

    @property
    def label(self) -> str:
        """All of it."""
        return f"{self.setting.label} · {self.name}"


def system_of(row: Mapping[str, Any]) -> System:
    """Whose row it is."""
    return System(*(row.get(name) for name in SYSTEM))


@dataclass(frozen=True, eq=False)
class View:
    """Findings in the order of the experiment; what is missing is empty."""

    findings: Findings

    @property
    def about(self) -> Mapping[str, Any]:
        """What the audit was about."""
        return self.findings.about

    @property
    def level(self) -> float:
        """Of all intervals."""
        given = self.about.get("level")
        return float(given) if isinstance(given, int | float) and known(given) else 0.95

    @property
    def level_words(self) -> str:
        """Of all intervals, in words."""
        return f"{100 * self.level:g}{NBSP}%"

    @cached_property
    def verdicts(self) -> list[Row]:
        """One for each system and question."""
        return self.findings.verdicts.to_dicts()

    @cached_property
    def scores(self) -> list[Row]:
        """All attacks and nulls."""
        return self.findings.scores.to_dicts()

    @cached_property
    def systems(self) -> list[System]:
        """All that anything is said about."""
        named = [system_of(row) for row in self.about.get("systems") or []]
        tables = (self.findings.verdicts, self.findings.scores, self.findings.ledger, self.own_utility)
        seen = [System(*row) for frame in tables for row in frame.select(SYSTEM).unique(maintain_order=True).rows()]
        return list(dict.fromkeys(named + seen))

    @cached_property
    def settings(self) -> list[Setting]:
        """Those of the systems."""
        return list(dict.fromkeys(system.setting for system in self.systems))

    def systems_of(self, setting: Setting) -> list[System]:
        """Those that differ in nothing but the defense."""
        return [system for system in self.systems if system.setting == setting]

    @cached_property
    def texts(self) -> dict[System, str]:
        """Systems in full words."""
        return {system_of(row): str(row.get("text") or "") for row in self.about.get("systems") or []}

    def questions(self, setting: Setting) -> list[str]:
        """Those that were asked of its systems."""
        rows = [*self.verdicts, *self.scores]
        return list(dict.fromkeys(row["question"] or "?" for row in rows if system_of(row).setting == setting))

    def kind(self, question: str) -> str:
        """What is asked: which items are a user's own, an attribute, who is in a community, or who has items of a kind
        (a mark).
        """
        if question in (MEMBERSHIP, COMMUNITY):
            return question
        told = {row["metric"] for row in self.scores if row["question"] == question}
        return "mark" if "accuracy" in told and "macro-f1" not in told else "attribute"

    def rows(self, rows: Iterable[Row], setting: Setting, question: str) -> list[Row]:
        """Those of a setting and a question."""
        return [r for r in rows if system_of(r).setting == setting and (r["question"] or "?") == question]

    def frame(self, frame: pl.DataFrame, setting: Setting, question: str) -> pl.DataFrame:
        """The rows of a long table of a setting and a question."""
        same = [pl.col(name).eq_missing(pl.lit(value)) for name, value in setting._asdict().items()]
        return frame.filter(pl.all_horizontal(pl.col("question").fill_null("?") == question, *same))

    @cached_property
    def chosen(self) -> dict[tuple[System, str], Row]:
        """The verdict by system and question: its attack was chosen on validation users."""
        return {(system_of(row), row["question"] or "?"): row for row in self.verdicts}

    def of_chosen(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows of the attacks that were chosen."""
        keys = [*SYSTEM, "question", "attack"]
        return frame.join(self.findings.verdicts.select(keys).unique(), on=keys, how="semi", nulls_equal=True)

    def reference(self, setting: Setting) -> str:
        """The defense that others are compared with: what the comparisons say, else the first."""
        names = [system.name for system in self.systems_of(setting)]
        for row in self.findings.comparisons.to_dicts():
            if system_of(row).setting == setting and row["reference"] in names:
                return str(row["reference"])
        return names[0] if names else "?"

    @cached_property
    def marks(self) -> dict[str, Series]:
        """A look for each defense, the same in all charts."""
        names = list(dict.fromkeys(system.name for system in self.systems))
        return {each.label: each for each in series_of(names)}

    def marks_of(self, setting: Setting) -> list[Series]:
        """The looks of its defenses."""
        return [self.marks[name] for name in dict.fromkeys(system.name for system in self.systems_of(setting))]

    @cached_property
    def own_utility(self) -> pl.DataFrame:
        """The rows of the recommenders themselves, not of what stands beside them."""
        return self.findings.utility.filter(~pl.col("recommender").is_in(BASELINES))

    @cached_property
    def utility_metric(self) -> str | None:
        """The first of the recommender's."""
        return next((str(name) for name in self.own_utility["metric"].drop_nulls()), None)

    @cached_property
    def utility(self) -> dict[System, Row]:
        """The recommender's first metric by system."""
        rows = self.own_utility.filter(pl.col("metric").eq_missing(pl.lit(self.utility_metric))).to_dicts()
        return {system_of(row): row for row in reversed(rows)}

    def baselines(self, setting: Setting) -> dict[str, float]:
        """The first metric of chance and the baselines on a setting's data: the setting's own, or else any."""
        rows = self.findings.utility.filter(
            pl.col("recommender").is_in(BASELINES) & pl.col("metric").eq_missing(pl.lit(self.utility_metric))
        ).to_dicts()
        found: dict[str, float] = {}
        for row in sorted(rows, key=lambda row: system_of(row).setting != setting):
            if row["data"] == setting.data and known(row["value"]):
                found.setdefault(row["recommender"], row["value"])
        return {name: found[name] for name in BASELINES if name in found}


_ACCURACY = {
    "bound": "share seen (bound)",
    "accuracy@best": "accuracy, best round by the truth",
    "accuracy@chosen": "accuracy, round chosen without the truth",
    "accuracy@10%": "accuracy of the lowest tenth of adversaries",
    "accuracy@50%": "accuracy of the median adversary",
    "accuracy@90%": "accuracy of the highest tenth of adversaries",
}


def metric_name(metric: str | None) -> str:
    """A metric as it is spoken.

    >>> metric_name("auc"), metric_name("tpr@0.1%").replace(NBSP, " "), metric_name("tpr_at_0.01").replace(NBSP, " ")
    ('AUC', 'TPR at 0.1 % FPR', 'TPR at 1 % FPR')
    """
    name = metric or "?"
    if found := re.match(r"tpr\D*([\d.]+) ?(%?)", name, re.IGNORECASE):
        rate = float(found[1]) * (1 if found[2] else 100)
        return f"TPR at {rate:g}{NBSP}% FPR"
    if name in _ACCURACY:
        return _ACCURACY[name]
    names = {"auc": "AUC", "f1": "F1", "excess": "AUC beyond a guesser's", "pooled_auc": "AUC over all users"}
    return names.get(name.lower(), name.replace("_", " "))


def is_auc(row: Mapping[str, Any]) -> bool:
    """Whether a score is the AUC within users, the measure of all verdicts."""
    return str(row["metric"]).lower() == "auc"


def is_tpr(row: Mapping[str, Any]) -> bool:
    """Whether a score is a true positive rate at some false positive rate."""
    return str(row["metric"]).lower().startswith("tpr")
