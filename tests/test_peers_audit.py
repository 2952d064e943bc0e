"""Own items and attributes at nodes of a gossip, in an audit, end to end on tiny data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recleak.conditions import Condition
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.experiment import experiment
from recleak.findings import Findings
from recleak.report.matrix import markdown
from recleak.runs import audit_run

ADAM = {"use": "adam", "learning_rate": 0.02, "keep": True}
LOCAL = {"epochs": 2, "batch_size": "none", "optimizer": ADAM, "resample": True}
NULLS = {
    "membership": {"random-of-peers", "all-positive-of-peers", "popularity-of-peers"},
    "gender": {"majority-of-peers", "proportional-of-peers"},
}
USERS = 120


def table(data: str, **changes: Any) -> dict[str, Any]:
    made = {
        "data": data,
        "model": {"use": "gmf", "factors": 4},
        "protocol": {"use": "gossip", "rounds": 8, "refresh": 1, "weights": "equal", "local": LOCAL},
        "defenses": ["share", "share-less"],
        "attacks": [
            {"use": "items-of-peers", "name": "items", "colluders": 0.2},
            {"use": "items-of-peers", "name": "items, alone"},
            {"use": "attributes-of-peers-through-items", "name": "through items", "colluders": 0.2},
            {"use": "vectors-of-peers", "name": "vectors", "colluders": 0.2},
        ],
        "attributes": ["gender"],
        "known": 0.3,
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=USERS, n_items=60, mean_activity=12, min_activity=6, coupling=1.0).generate()
    store.save(made, folder, name="small")
    return str(folder)


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return audit_run(experiment(table(data, canaries=True)), folder, command="test"), folder


@pytest.mark.heavy
def test_items_and_gender_are_found_beside_their_nulls(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    verdict = {(row["defense"], row["question"]): row for row in findings.verdicts.to_dicts()}
    assert {question for _, question in verdict} == set(NULLS)
    for defense in ("share", "share-less"):
        leak = verdict[defense, "membership"]
        assert leak["verdict"] == "leaks"
        assert leak["value"] > 0.9 > leak["null_high"]
        assert leak["null"] == "popularity-of-peers"
        assert verdict[defense, "gender"]["null"] == "majority-of-peers"
    assert "The models add to that." in verdict["share", "gender"]["words"]
    for question, nulls in NULLS.items():
        rows = findings.scores.filter((pl.col("question") == question) & (pl.col("role") == "null"))
        assert set(rows["attack"]) == nulls
        assert not rows.filter(pl.col("metric") == "auc")["value"].is_null().any()


@pytest.mark.heavy
def test_who_was_not_heard_of_is_not_asked_about(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    asked = {
        name: len(findings.risk.filter((pl.col("attack") == name) & (pl.col("defense") == "share")))
        for name in ("items", "items, alone", "popularity-of-peers")
    }
    members = round(0.2 * USERS) + 1
    assert asked["items, alone"] < asked["items"] <= USERS - members + 1, "members of the group know themselves"
    assert asked["items"] > 0.8 * (USERS - members)


@pytest.mark.heavy
def test_what_cannot_be_is_said(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    missing = findings.scores.filter(pl.col("value").is_null() & (pl.col("metric") == "auc")).to_dicts()
    reasons = {(row["defense"], row["attack"]): row["reason"] for row in missing}
    assert set(reasons) == {("share-less", "vectors")}
    assert "No vector of users is sent" in reasons["share-less", "vectors"]


@pytest.mark.heavy
def test_report_matrix_and_canaries(whole: tuple[Findings, Path], tmp_path: Path) -> None:
    findings, _ = whole
    page = findings.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a group of them, that receives models" in page
    text = markdown(findings)
    assert "**small, gmf, gossip: membership**" in text
    assert "**small, gmf, gossip: gender**" in text
    assert "*popularity-of-peers*" in text
    bound = findings.ledger.filter(pl.col("defense") == "share")["at_least"].drop_nulls()
    assert float(bound.max()) > 0.5, "planted items are seen too"  # type: ignore[arg-type]


@pytest.mark.heavy
def test_a_node_alone_in_one_tick_and_one_that_hears_nobody(data: str, tmp_path: Path) -> None:
    few, none = ({"name": f"{loss}", "rounds": 1, "loss": loss} for loss in (0.0, 0.97))
    protocols = [{**table(data)["protocol"], **each} for each in (few, none)]
    changes = {"protocol": protocols, "defenses": ["share"], "attacks": ["items-of-peers", "vectors-of-peers"]}
    findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    rows = findings.scores.filter((pl.col("role") == "attack") & (pl.col("metric") == "auc"))
    alone, deaf = (rows.filter(pl.col("protocol") == name) for name in ("0.0", "0.97"))
    assert alone.filter(pl.col("attack") == "items-of-peers")["value"].to_list() in ([0.5], [None]), "no earlier tick"
    assert deaf["value"].is_null().all()
    assert deaf["reason"].str.contains("Nobody sent it a model").all()


@pytest.mark.heavy
def test_in_the_self_test_nothing_leaks(data: str, tmp_path: Path) -> None:
    changes = {"shuffle_labels": True, "defenses": ["share"], "seeds": 2}
    findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    assert set(findings.verdicts["verdict"]) <= {"not found", "cannot tell"}
    assert not list(Condition.parse("membership.auc > 0.6").violations(findings))
