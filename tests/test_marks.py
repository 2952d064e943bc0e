"""Who has items of a kind: marks, their truth, grades, and an audit that asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recleak.attacks.base import Knowledge, WhoBelongs
from recleak.attacks.community import PeerCommunity, ServerCommunity
from recleak.attacks.community_items import CommunityThroughItems
from recleak.conditions import Condition
from recleak.data import store
from recleak.data.interactions import Interactions
from recleak.data.marks import Mark
from recleak.data.synthetic import Synthetic
from recleak.errors import ConfigError, NotFoundError
from recleak.experiment import experiment
from recleak.findings import Findings
from recleak.grading import grade_holders
from recleak.metrics.inference import auc
from recleak.models.mf import GMF
from recleak.runs import audit_run
from recleak.training.cohort import LocalTraining
from recleak.update import Update
from recleak.wire import Broadcast, Upload

ADAM = {"use": "adam", "learning_rate": 0.02, "keep": True}
LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": "none", "optimizer": ADAM, "resample": True}
LIGHT = {"use": "federated", "rounds": 3, "local": LOCAL}


def few() -> Interactions:
    rows = pl.DataFrame({"user": [0, 0, 1, 2, 2, 2], "item": [0, 1, 2, 0, 1, 3]}).cast(pl.Int32)
    items = pl.DataFrame(
        {
            "id": [10, 11, 12, 13],
            "title": ["The Church", "Corner Bar", "Gym", None],
            "categories": [["Church"], ["Bar", "Food"], [], ["Bar"]],
        }
    )
    return Interactions(rows, pl.DataFrame({"id": [1, 2, 3]}), items)


def test_marks_by_category_title_and_number() -> None:
    data = few()
    assert Mark("bars", ("Bar",)).items(data).tolist() == [False, True, False, True]
    assert Mark("bars", ("Bar",)).holders(data).tolist() == [True, False, True]
    assert Mark("bars", ("Bar",), least=2).holders(data).tolist() == [False, False, True]
    assert Mark("both", ("Church",), ("corner",)).items(data).tolist() == [True, True, False, False]
    assert Mark.of("Gym / Fitness Center").name == "gym-fitness-center"


def test_what_is_wrong_with_marks() -> None:
    with pytest.raises(NotFoundError, match=r"Unknown category 'Bars'. Did you mean 'Bar'"):
        Mark("bars", ("Bars",)).items(few())
    with pytest.raises(ConfigError, match="no title has 'Casino'"):
        Mark("casinos", titles=("Casino",)).items(few())
    with pytest.raises(ConfigError, match="neither categories nor titles"):
        Mark("nothing")
    with pytest.raises(ConfigError, match="letters and hyphens"):
        Mark("a b", ("Bar",))
    with pytest.raises(ConfigError, match="least = 0"):
        Mark("bars", ("Bar",), least=0)
    with pytest.raises(ConfigError, match="'bar' is taken"):
        _ = experiment({"sensitive": ["Bar", {"name": "bar", "categories": ["Bar"]}]}).marks


def test_grades_against_a_plain_count() -> None:
    rng = np.random.default_rng(0)
    truth, score = rng.random(40) < 0.3, rng.normal(size=(5, 40))
    score[:, truth] += 1
    score[1, :7] = -np.inf
    leader = torch.tensor([3, 0, 5, -1, 39])
    graded = grade_holders(torch.from_numpy(score), torch.from_numpy(truth), leader)
    aucs, hits, found = [], np.zeros((5, 40)), np.zeros((5, 40))
    for a in range(5):
        asked = np.arange(40) != int(leader[a])
        finite = np.where(np.isfinite(score[a]), score[a], -99.0)
        aucs.append(auc(finite[asked], truth[asked]))
        k = int(truth[asked].sum())
        top = [u for u in np.argsort(-finite) if asked[u]][:k]
        hits[a, top] = 1
        limit = np.sort(finite[asked & ~truth])[::-1][int(0.05 * (asked & ~truth).sum())]
        found[a] = (finite > limit) & asked
    kept = np.stack([np.arange(40) != int(each) for each in leader])
    for name, claims in (("accuracy", hits), ("tpr@5%", found)):
        value = graded[name].numpy()
        assert np.isnan(value[~truth]).all()
        np.testing.assert_allclose(value[truth], (claims * kept).sum(0)[truth] / kept.sum(0)[truth])
    assert abs(float(np.nanmean(graded["auc"].numpy())) - np.mean(aucs)) < 0.01


def test_who_was_not_heard_of_is_not_claimed_and_one_kind_has_no_grade() -> None:
    truth = torch.tensor([True, True, False, False])
    graded = grade_holders(torch.tensor([[2.0, -torch.inf, 1.0, -torch.inf]]), truth)
    assert graded["accuracy"][:2].tolist() == [1.0, 0.0]
    assert float(graded["auc"].mean()) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert bool(grade_holders(torch.rand(1, 4), torch.ones(4, dtype=torch.bool))["auc"].isnan().all())


def test_activity_counts_the_rows_of_the_first_upload() -> None:
    model = GMF(2)
    knowledge = Knowledge(model, 3, 4, model.components(), LocalTraining(), None, {"targets": torch.ones(2, 4)})  # type: ignore[arg-type]
    attack = ServerCommunity(scoring="activity")
    broadcast = Broadcast(0, {part.name: part.draw(0, np.arange(4)) for part in model.components() if part.shared})
    state = attack.fold(knowledge, attack.init(knowledge), broadcast)

    def upload(*counts: int) -> Upload:
        offset = torch.tensor([0, *counts]).cumsum(0)
        item = torch.cat([torch.arange(each) for each in counts])
        client = torch.arange(len(counts))
        return Upload(
            0, Update(client, {}, {"item": torch.zeros(len(item), 2)}, item, offset, 4), torch.ones(len(counts))
        )

    state = attack.fold(knowledge, state, upload(3, 1))
    state = attack.fold(knowledge, state, upload(4, 4))
    everybody = WhoBelongs(torch.arange(2), torch.arange(3))
    assert attack.answer(knowledge, state, everybody).tolist() == [[3.0, 1.0, -torch.inf]] * 2
    with pytest.raises(ConfigError, match="activity"):
        PeerCommunity(scoring="activity")
    with pytest.raises(ConfigError, match="reading is 'most'"):
        CommunityThroughItems(reading="most")  # type: ignore[arg-type]


# --- an audit ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=80, n_items=60, mean_activity=14, min_activity=6, coupling=1.0).generate()
    store.save(made, folder, name="small")
    return str(folder)


def table(data: str, **changes: Any) -> dict[str, Any]:
    category = store.load(Path(data)).items["categories"].list.explode().value_counts(sort=True)["categories"][-1]
    made = {
        "data": data,
        "seeds": 1,
        "model": {"use": "gmf", "factors": 4},
        "protocol": [
            {"use": "federated", "name": "federated", "rounds": 5, "local": LOCAL},
            {"use": "gossip", "name": "gossip", "rounds": 5, "refresh": 1, "local": LOCAL},
        ],
        "defenses": ["share", "share-less"],
        "attacks": [
            {"use": "community", "name": "CDA", "scoring": "standardized"},
            {"use": "community-of-peers", "name": "CDA at nodes", "scoring": "standardized", "vector": "told"},
            {"use": "community-through-items", "name": "chain", "reading": "count"},
        ],
        "communities": 0,
        "sensitive": [{"name": "faith", "categories": [category]}, {"name": "first", "titles": ["Item 1"], "least": 2}],
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return audit_run(experiment(table(data)), tmp_path_factory.mktemp("runs") / "whole", command="test")


@pytest.mark.heavy
def test_an_audit_asks_who_has_items_of_a_kind(whole: Findings, tmp_path: Path) -> None:
    verdict = {(row["protocol"], row["defense"], row["question"]): row for row in whole.verdicts.to_dicts()}
    assert {question for _, _, question in verdict} == {"faith", "first"}
    for defense in ("share", "share-less"):
        leak = verdict["federated", defense, "faith"]
        assert (leak["attack"], leak["verdict"]) == ("chain", "leaks")
        assert leak["value"] > 0.9
        assert "who has 1 or more items of the kind 'faith' from who has not" in leak["words"]
    names = set(whole.scores.filter(pl.col("role") == "null")["attack"])
    assert names == {"random users", "random peers", "activity"}
    nodes = whole.scores.filter((pl.col("attack") == "CDA at nodes") & (pl.col("protocol") == "gossip"))
    assert nodes["value"].drop_nulls().is_between(0, 1).all()
    assert len(nodes["value"].drop_nulls())
    curve = whole.parts.filter(
        (pl.col("kind") == "accuracy") & (pl.col("attack") == "chain") & (pl.col("question") == "faith")
    )
    assert curve["x"].to_list()[:5] == [1, 2, 3, 4, 5]
    page = whole.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "faith" in page
    condition = Condition.parse("faith.auc > 0.8", marks=["faith"])
    assert list(condition.violations(whole))


@pytest.mark.heavy
def test_in_the_self_test_nobody_holds_anything(data: str, tmp_path: Path) -> None:
    changes = {"shuffle_labels": True, "defenses": ["share"], "protocol": LIGHT}
    findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    assert "leaks" not in set(findings.verdicts["verdict"])
