"""Attributes in an audit, end to end on tiny data: verdicts beside nulls, parts, conditions, the self-test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recleak import measuring, objects
from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.attribute import ThroughItems
from recleak.attacks.base import listener_of
from recleak.conditions import Condition
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.errors import ConfigError, NotFoundError
from recleak.experiment import experiment
from recleak.findings import Findings
from recleak.report.matrix import markdown
from recleak.runs import audit_run
from recleak.wiretap import listening_for, seeded


def table(data: str, **changes: Any) -> dict[str, Any]:
    local = {"epochs": 2, "optimizer": {"use": "sgd", "learning_rate": 0.01}}
    made = {
        "seeds": 2,
        "data": data,
        "model": {"use": "feature-gcn", "factors": 4, "hidden": [4]},
        "protocol": {"use": "federated", "rounds": 4, "clients_per_round": 80, "local": local},
        "defenses": ["none", "secure-aggregation", {"use": "perturbed-features", "epsilon": 5.0}],
        "attacks": [
            {"use": "alignment", "shadow_rows": 0, "name": "projection"},
            {"use": "from-updates", "name": "AIA", "learner": {"use": "logistic"}},
            "known-columns",
        ],
        "attributes": ["gender"],
        "known": 0.2,
        "by_component": ["AIA"],
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=160, n_items=50, mean_activity=10, min_activity=4).generate()
    store.save(made, folder, name="small")
    return str(folder)


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return audit_run(experiment(table(data)), folder, command="test"), folder


@pytest.mark.heavy
def test_the_exact_leak_is_found_beside_its_nulls(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    verdict = {(row["defense"], row["question"]): row for row in findings.verdicts.to_dicts()}
    assert {question for _, question in verdict} == {"membership", "gender"}
    leak = verdict["none", "gender"]
    assert leak["verdict"] == "leaks"
    assert leak["attack"] == "known-columns"
    assert leak["value"] == 1, "rows of other classes do not move"
    assert leak["null"] == "majority"
    assert "tells a user's gender with AUC 1.000" in leak["words"]
    assert verdict["secure-aggregation", "gender"]["verdict"] == "not measured"
    assert verdict["perturbed-features epsilon 5.0", "gender"]["value"] < 0.9
    rows = findings.scores.filter((pl.col("question") == "gender") & (pl.col("defense") == "none"))
    assert set(rows["attack"]) == {"AIA", "known-columns", "majority", "proportional", "true interactions"}
    roles = dict(rows.select("attack", "role").unique().iter_rows())
    assert roles["true interactions"] == "reference", "neither a rival of attacks nor what they have to beat"
    assert {roles[name] for name in ("majority", "proportional")} == {"null"}
    told = findings.scores.filter((pl.col("attack") == "true interactions") & (pl.col("metric") == "auc"))
    by_defense = dict(told.select("defense", "value").iter_rows())
    assert by_defense["none"] == by_defense["perturbed-features epsilon 5.0"], "interactions are what they are"
    assert "| *majority* | *proportional* | *true interactions* |" in markdown(findings)
    assert set(rows["metric"]) == {"auc", "macro-f1", "accuracy"}
    constant = rows.filter((pl.col("attack") == "majority") & (pl.col("metric") == "auc"))
    assert constant["value"].to_list() == [0.5]


@pytest.mark.heavy
def test_components_and_users(whole: tuple[Findings, Path]) -> None:
    findings, folder = whole
    parts = findings.parts.filter((pl.col("question") == "gender") & (pl.col("defense") == "none"))
    assert set(parts["kind"]) == {"component"}
    told = dict(zip(parts["part"], parts["value"], strict=True))
    assert set(told) == {"user", "item", "head", "head.1", "head.2"}
    assert told["user"] > max(0.65, told["item"]), "its features are there"
    risk = findings.risk.filter((pl.col("question") == "gender") & (pl.col("attack") == "known-columns"))
    exact = risk.filter(pl.col("defense") == "none")
    assert len(exact)
    assert (exact["exposed"] > 0.999).sum() > 0.9 * len(exact), "but for who moved nothing"
    page = findings.report(folder / "report.html").read_text(encoding="utf-8")
    assert "Leakage by component: gender" in page
    assert "<i>true interactions</i>" in page


@pytest.mark.heavy
def test_conditions_on_attributes(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    found = list(Condition.parse("gender.auc > 0.95", ["gender"]).violations(findings))
    assert any("(small, feature-gcn, federated, none)" in line for line in found)
    assert not list(Condition.parse("gender.macro-f1 < 0.1", ["gender"]).violations(findings, point=True))[1:]
    with pytest.raises(ConfigError, match="Unknown question 'gender'"):
        Condition.parse("gender.auc > 0.95")


@pytest.mark.heavy
def test_nothing_is_found_in_shuffled_attributes(data: str, tmp_path: Path) -> None:
    short = table(data, defenses=["none"], by_component=[], shuffle_labels=True, attributes=["gender"])
    findings = audit_run(experiment(short), tmp_path / "run")
    rows = findings.verdicts.filter(pl.col("question") == "gender").to_dicts()
    assert rows[0]["verdict"] != "leaks"


def test_what_is_missing_is_said_before_anything_is_run(data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AIA infers attributes, but none is named"):
        audit_run(experiment(table(data, attributes=[])), tmp_path / "run")
    with pytest.raises(NotFoundError, match="Unknown attribute 'gendr'"):
        audit_run(experiment(table(data, attributes=["gendr"])), tmp_path / "run")


def test_a_chain_begins_with_the_draws_of_its_seed() -> None:
    """So it keeps what the membership attack keeps; settings that give a seed keep it."""
    alone = {"use": "alignment", "shadow_rows": 0, "participation": "all"}
    for settings in ({"use": "through-items"}, {"use": "through-items", "membership": alone}):
        for seed in (0, 1):
            chain = seeded(objects.build("attack", settings), settings, seed)
            assert chain.seed == chain.membership.seed == seed
            assert listener_of(chain) == listener_of(seeded(objects.build("attack", alone), alone, seed))
    given = {"use": "through-items", "seed": 7, "membership": {**alone, "seed": 8}}
    chain = seeded(objects.build("attack", given), given, 1)
    assert (chain.seed, chain.membership.seed) == (7, 8)
    plain = objects.build("attack", {"use": "known-columns"})
    assert seeded(plain, {}, 1) == plain


@pytest.mark.heavy
def test_one_attack_listens_for_all_that_keep_the_same(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners, attributes and chains share what was heard; no finding changes."""
    attacks = [
        {"use": "alignment", "shadow_rows": 0, "participation": "all", "name": "projection"},
        {"use": "from-updates", "name": "logistic", "learner": {"use": "logistic"}},
        {"use": "from-updates", "name": "tree", "learner": {"use": "tree"}},
        {"use": "from-updates", "name": "last", "rounds": "last", "learner": {"use": "tree"}},
        {"use": "known-columns", "name": "columns"},
        {"use": "through-items", "name": "chain"},
    ]
    changes = {"seeds": [1], "defenses": [{"use": "gaussian-noise", "std": 0.01}], "by_component": ["tree"]}
    made = experiment(table(data, attacks=attacks, attributes=["gender", "age"], **changes))
    together = audit_run(made, tmp_path / "together", command="test")
    counts: list[tuple[int, int]] = []
    chained: list[set[str]] = []

    def alone(taps: dict[str, Any]) -> dict[str, str]:
        found = listening_for(taps)
        counts.append((len(taps), len(set(found.values()))))
        begins = {name for name, tap in taps.items() if isinstance(tap.attack, ThroughItems | GradientAlignment)}
        chained.append({found[name] for name in begins if len(begins) == 3})  # the chain on two attributes
        return {name: name for name in taps}

    monkeypatch.setattr(measuring, "listening_for", alone)
    apart = audit_run(made, tmp_path / "apart", command="test")
    assert together.scores.equals(apart.scores)
    assert together.parts.equals(apart.parts)
    assert together.scores.filter(pl.col("attack") == "chain")["value"].is_not_null().all()
    ((taps, ears),) = [each for each in counts if each[0] > 10]
    assert ears < taps - 8, "two attributes, two learners and the chain with its membership attack"
    assert [len(each) for each in chained if each] == [1], (
        "the chain hears through its membership attack, with any seed"
    )


@pytest.mark.heavy
def test_decoupling_and_consent_in_an_audit(data: str, tmp_path: Path) -> None:
    """Classes come from the data, insensitive users are those whose labels the adversary has."""
    sent = {"use": "share", "components": ["user"], "averaged": False}
    changes = {
        "seeds": 1,
        "model": [{"use": "ncf", "factors": 8, "hidden": [8]}, {"use": "decoupled", "factors": 8, "hidden": [8]}],
        "defenses": [
            "none",
            {"name": "pard", "use": "decoupling", "factors": 8, "sample": 16},
            {"name": "uc", "use": "chain", "defenses": [sent, {"use": "user-consent", "factors": 8}]},
        ],
        "attacks": [
            {"use": "from-representations", "name": "AIA", "rounds": "last"},
            "through-items",
            {"use": "alignment", "shadow_rows": 0, "name": "projection"},
        ],
        "by_component": [],
    }
    findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    scores = findings.scores.filter((pl.col("question") == "gender") & (pl.col("attack") == "AIA"))
    found = {(row["model"], row["defense"]): row for row in scores.to_dicts()}
    for system in (("decoupled", "none"), ("decoupled", "pard"), ("decoupled", "uc"), ("ncf", "uc")):
        assert found[system]["value"] is not None
    assert found["ncf", "pard"]["value"] is None
    assert "needs the component 'user.private'" in found["ncf", "pard"]["reason"]
