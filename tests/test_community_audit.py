"""Communities in an audit, in a federation and in a gossip, end to end on tiny data."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import roc_auc_score

from recleak import machine, objects
from recleak.attacks.base import WhoBelongs
from recleak.attacks.community import PeerCommunity, ServerCommunity
from recleak.attacks.community_targets import colluding
from recleak.audited import Attacked, Contest
from recleak.cells import Ask
from recleak.conditions import METRICS, Condition
from recleak.data import store
from recleak.data.source import open_data
from recleak.data.split import leave_one_out
from recleak.data.synthetic import Synthetic
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, RecleakError
from recleak.experiment import experiment
from recleak.findings import Findings
from recleak.grading import grade_communities
from recleak.made import Made
from recleak.models.mf import GMF
from recleak.protocols.federated import Federated, train_federated
from recleak.protocols.gossip import Gossip, train_gossip
from recleak.report.matrix import markdown
from recleak.runs import _asks, audit_run
from recleak.storing import REVERSED, graded_both_ways, set_aside, store_community, truth_of_communities
from recleak.watching import spread
from recleak.wiretap import Wiretap

ADAM = {"use": "adam", "learning_rate": 0.02, "keep": True}
LOCAL = {"epochs": 2, "batch_size": "none", "optimizer": ADAM, "resample": True}


def table(data: str, **changes: Any) -> dict[str, Any]:
    made = {
        "seeds": 2,
        "data": data,
        "model": {"use": "gmf", "factors": 4},
        "protocol": [
            {"use": "federated", "name": "federated", "rounds": 5, "aggregation": "weighted", "local": LOCAL},
            {"use": "gossip", "name": "gossip", "rounds": 5, "refresh": 1, "local": LOCAL},
        ],
        "defenses": [
            "share",
            "share-less",
            "secure-aggregation",
            {"use": "chain", "name": "share, sums", "defenses": ["share", "secure-aggregation"]},
        ],
        "attacks": [
            {"use": "community", "name": "CDA", "scoring": "standardized"},
            {"use": "community", "name": "CDA, fitted", "scoring": "standardized", "vector": "fitted"},
            {"use": "community", "name": "CDA, mean", "scoring": "standardized", "vector": "mean", "colluders": 0.2},
            {"use": "community-of-sums", "name": "rows of sums", "scoring": "standardized", "reading": "movement"},
            {"use": "community-of-peers", "name": "CDA at nodes", "scoring": "standardized"},
            {"use": "community-of-peers", "name": "CDA at colluders", "scoring": "standardized", "colluders": 0.3},
            {"use": "community-of-peers", "name": "CDA, own vector", "vector": "told"},
            "community-through-items",
        ],
        "communities": 10,
    }
    return {**made, **changes}


OPPOSITE = '''
"""An attack whose scores say the opposite."""

from dataclasses import dataclass

import torch

from recleak.attacks.community import ServerCommunity


@dataclass(frozen=True, kw_only=True)
class Opposite(ServerCommunity):
    def answer(self, knowledge, state, question):
        found = super().answer(knowledge, state, question)
        return torch.where(torch.isfinite(found), -found, found)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=80, n_items=60, mean_activity=14, min_activity=6, coupling=1.0).generate()
    store.save(made, folder, name="small")
    return str(folder)


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return audit_run(experiment(table(data)), folder, command="test"), folder


def test_an_audit_that_needs_more_memory_than_is_free_does_not_begin(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = Gossip()
    needed = protocol.needed_bytes(Share(("user",)).sharing(GMF(4).components()), 80, 60)
    some = experiment(table(data, defenses=["share"], attacks=["community-of-peers"]))
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * needed - 1)
    with pytest.raises(ConfigError, match=r"The nodes of 2 side by side of 2 runs take .*\n  Use fewer workers"):
        audit_run(some, tmp_path / "run", workers=2, command="test")
    monkeypatch.setattr("recleak.jobs._here", lambda *_: iter(()))
    with suppress(RecleakError):  # nothing was measured
        audit_run(some, tmp_path / "run", workers=1, command="test")
    assert "The nodes of the largest of 2 runs take 0.0 GB" in " ".join(capsys.readouterr().err.split())


@pytest.mark.heavy
def test_communities_are_found_beside_the_null(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    verdict = {(row["protocol"], row["defense"]): row for row in findings.verdicts.to_dicts()}
    leak = verdict["federated", "share"]
    assert leak["question"] == "community"
    assert leak["verdict"] == "leaks"
    assert leak["null"] in ("random users", "activity")
    nulls = findings.scores.filter((pl.col("role") == "null") & pl.col("value").is_not_null())
    found = set(nulls.filter(pl.col("protocol") == "federated")["attack"])
    assert {"random users", "activity", "random users, 20 % aside", "activity, 20 % aside"} <= found
    assert leak["value"] > leak["null_high"]
    assert "tells who is in a user's community from who is not with AUC" in leak["words"]
    rows = findings.scores.filter((pl.col("protocol") == "federated") & (pl.col("defense") == "share"))
    assert set(rows.filter(pl.col("value").is_not_null())["metric"]) == {"auc", *METRICS["community"][2:]}
    null = rows.filter((pl.col("role") == "null") & (pl.col("metric") == "accuracy")).to_dicts()[0]
    assert null["low"] < 10 / 79 < null["high"], "a draw finds 10 of 79"


@pytest.mark.heavy
def test_what_cannot_be_is_said(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    reasons = {
        (row["protocol"], row["defense"], row["attack"]): row["reason"]
        for row in findings.scores.filter(pl.col("value").is_null()).to_dicts()
    }
    assert "no vantage point Peers" in reasons["federated", "share", "CDA at nodes"]
    assert "no vantage point Server" in reasons["gossip", "share", "CDA"]
    assert "Choose another vector" in reasons["federated", "share-less", "CDA"]
    assert "no upload of a single client" in reasons["federated", "secure-aggregation", "CDA"]
    assert "No row of the sum is a single user's" in reasons["federated", "share-less", "rows of sums"]
    assert "no vantage point Aggregator" in reasons["gossip", "share", "rows of sums"]
    assert "secure aggregation in a gossip" in reasons["gossip", "secure-aggregation", "CDA at nodes"]
    values = findings.scores.filter(pl.col("value").is_not_null())
    known = {(row["protocol"], row["defense"], row["attack"]) for row in values.to_dicts()}
    for protocol, defense, attack in (
        ("federated", "share-less", "CDA, fitted"),
        ("federated", "share-less", "CDA, mean"),
        ("federated", "share, sums", "rows of sums"),
        ("federated", "share, sums", "random users of sums"),
        ("federated", "share-less", "community-through-items"),
        ("gossip", "share-less", "CDA, own vector"),
        ("gossip", "share", "CDA at colluders"),
    ):
        assert (protocol, defense, attack) in known


@pytest.mark.heavy
def test_secure_aggregation_does_not_hide_a_users_own_row(tmp_path: Path) -> None:
    made = Synthetic(n_users=240, n_items=60, mean_activity=14, min_activity=6, coupling=1.0).generate()
    store.save(made, tmp_path / "small", name="small")  # enough users that two seeds and both sides can tell
    changes = {
        "protocol": [{"use": "federated", "rounds": 60, "aggregation": "mean", "local": LOCAL}],
        "defenses": [{"use": "chain", "defenses": ["share", "secure-aggregation"]}],
        "attacks": [
            {"use": "community-of-sums", "name": "rows of sums", "scoring": "standardized", "reading": "movement"}
        ],
    }
    findings = audit_run(experiment(table(str(tmp_path / "small"), **changes)), tmp_path / "run", command="test")
    leak = findings.verdicts.to_dicts()[0]
    assert (leak["attack"], leak["null"], leak["verdict"]) == ("rows of sums", "random users of sums", "leaks")


@pytest.mark.heavy
def test_accuracy_over_rounds_and_exposure_of_victims(whole: tuple[Findings, Path], tmp_path: Path) -> None:
    findings, _ = whole
    curve = findings.parts.filter((pl.col("kind") == "accuracy") & (pl.col("attack") == "CDA"))
    curve = curve.filter((pl.col("protocol") == "federated") & (pl.col("defense") == "share"))
    assert curve["x"].to_list() == [1, 2, 3, 4, 5]
    assert (curve["low"] <= curve["value"]).all()
    risk = findings.risk.filter((pl.col("attack") == "CDA") & (pl.col("seed") == 0))
    assert len(risk) == 80
    assert risk["exposed"].drop_nulls().is_between(0, 1).all()
    page = findings.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Leakage by round: community" in page
    assert "accuracy by round" in page
    assert "Who is found in communities</h4>" in page
    assert "How many users are how exposed: community" in page
    assert "The 10 most exposed users under “share” (community)" in page
    assert "How much of a community is found (community)" in page


@pytest.mark.heavy
def test_rounds_bounds_and_adversaries(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    rows = findings.scores.filter((pl.col("attack") == "CDA") & (pl.col("defense") == "share")).to_dicts()
    value = {row["metric"]: row["value"] for row in rows if row["protocol"] == "federated"}
    curve = findings.parts.filter((pl.col("kind") == "accuracy") & (pl.col("attack") == "CDA"))
    curve = curve.filter((pl.col("protocol") == "federated") & (pl.col("defense") == "share"))
    assert value["bound"] == 1, "everybody takes part in every round"
    assert value["accuracy"] == pytest.approx(curve["value"][-1], abs=1e-6)
    assert value["accuracy@best"] >= max(value["accuracy@chosen"], *curve["value"].to_list()) - 1e-6
    assert value["accuracy@10%"] <= value["accuracy@50%"] <= value["accuracy@90%"]
    rows = findings.scores.filter((pl.col("attack") == "CDA at nodes") & (pl.col("metric") == "bound")).to_dicts()
    seen = {row["defense"]: row["value"] for row in rows if row["protocol"] == "gossip"}
    assert 0 < seen["share"] < 1, "a node hears of some"


@pytest.mark.heavy
def test_attacks_that_answer_alike_say_so(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    rows = findings.scores.filter((pl.col("metric") == "auc") & (pl.col("attack") == "CDA, fitted")).to_dicts()
    remark = {(row["protocol"], row["defense"]): row["reason"] for row in rows}
    assert remark["federated", "share"] == "The same as 'CDA': it answers alike here, about every user."
    assert remark["federated", "share-less"] is None, "there it fits a vector"
    assert ") The same as 'CDA': it answers alike here" in markdown(findings)


def test_a_reversed_attack_has_a_reversed_curve() -> None:
    """Whoever says of each pair the opposite of the truth finds everybody, once read the other way round."""
    truth = torch.zeros(6, 6, dtype=torch.bool)
    truth[torch.arange(6), (torch.arange(6) + 1) % 6] = True
    grade = partial(grade_communities, truth=truth, size=1, leader=torch.arange(6))
    found = graded_both_ways(-truth.float(), grade)
    assert found["accuracy" + REVERSED].tolist() == [1.0] * 6
    assert found["accuracy"].max() < 1
    unheard = graded_both_ways(torch.full((6, 6), float("-inf")), grade)
    assert unheard["accuracy" + REVERSED].tolist() == [0.0] * 6, "who was not heard of is not claimed"


@pytest.mark.heavy
def test_curve_and_finding_agree_in_the_other_direction(data: str, tmp_path: Path) -> None:
    module = tmp_path / "reversing.py"
    module.write_text(OPPOSITE, encoding="utf-8")
    protocol = table(data)["protocol"][0]
    attacks = ["community", {"use": f"{module.stem}:Opposite", "name": "opposite"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        changes = {"seeds": 1, "protocol": protocol, "defenses": "share", "attacks": attacks}
        findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    curve = findings.parts.filter(pl.col("kind") == "accuracy")
    plain, turned = (curve.filter(pl.col("attack") == name)["value"].to_list() for name in ("community", "opposite"))
    assert turned == pytest.approx(plain, abs=1e-6)
    last = findings.scores.filter((pl.col("attack") == "opposite") & (pl.col("metric") == "accuracy"))["value"][0]
    assert turned[-1] == pytest.approx(last, abs=1e-6)


@pytest.mark.heavy
def test_the_ledger_counts_every_training(data: str, tmp_path: Path) -> None:
    federated, gossip = table(data)["protocol"]
    # Weights would tell how many items a client has.
    protocols = [{**federated, "aggregation": "mean"}, {**gossip, "weights": "equal"}]
    changes = {"defenses": [{"use": "dp-sgd", "noise_multiplier": 1.0}], "seeds": 1, "protocol": protocols}
    findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    times = {row["protocol"]: row["times"] for row in findings.ledger.drop_nulls("times").to_dicts()}
    assert times["federated"] == 5, "one visit in each round"
    assert times["gossip"] > 5, "a node trains after every message, and the busiest counts"


@pytest.mark.heavy
def test_in_the_self_test_nothing_leaks(data: str, tmp_path: Path) -> None:
    changes = {"shuffle_labels": True, "defenses": ["share"], "seeds": 3}
    findings = audit_run(experiment(table(data, **changes)), tmp_path / "run", command="test")
    assert set(findings.verdicts["verdict"]) <= {"not found", "cannot tell"}
    assert not list(Condition.parse("community.auc > 0.6").violations(findings))


@pytest.mark.parametrize("gossip", [False, True])
def test_who_tells_its_vector_for_a_mean_is_not_looked_for(data: str, tmp_path: Path, gossip: bool) -> None:
    kinds: dict[str, Any] = {"colluders": 0.2, "vector": "mean"}
    attack: Any = PeerCommunity(**kinds) if gossip else ServerCommunity(**kinds)
    protocol: Any = Gossip(rounds=2, refresh=1) if gossip else Federated(rounds=2)
    split = leave_one_out(open_data(data), by="random", seed=0)
    made = Made(split, split.train, GMF(4), protocol, ShareLess(), None, 0)
    ask = Ask("CDA, mean", {"use": "community", "vector": "mean"}, community=10, validation=0.5)
    tap, train = Wiretap(attack, made, ask), train_gossip if gossip else train_federated
    told = range(80)
    train(protocol, made.model, made.train, defense=made.defense, taps=[tap], confidants=told, show_progress=False)
    aside = set_aside(attack, tap.knowledge)
    assert aside is not None
    assert aside.sum(1).min() >= 16
    truth, users = truth_of_communities(made, ask, aside), torch.arange(80)
    assert not bool((truth & aside).any())
    assert truth.sum(1).tolist() == [10] * 80
    store_community(SimpleNamespace(path=tmp_path), ask, tap, made, np.zeros(80, np.int64))  # type: ignore[arg-type]
    (file,) = tmp_path.glob("*.parquet")
    frame, facts = pl.read_parquet(file), json.loads(file.with_suffix(".json").read_text())
    answer = tap.answer(WhoBelongs(users, users)) * facts["direction"]
    answer = torch.where(torch.isfinite(answer), answer, float("-inf"))
    graded = grade_communities(answer, truth, 10, users, aside)
    np.testing.assert_allclose(frame["accuracy"], graded["accuracy"], atol=1e-6)
    np.testing.assert_allclose(frame["accuracy"], facts["curve"][-1], atol=1e-5)
    a = int(np.flatnonzero(~frame["valid"].to_numpy())[0])
    victims = ~frame["valid"].to_numpy() & ~aside[a].numpy()
    floor = torch.where(torch.isfinite(answer), answer, answer[torch.isfinite(answer)].min() - 1)
    expected = roc_auc_score(truth[a, victims], floor[a, victims])
    assert frame["auc"][a] == pytest.approx(expected)
    assert set_aside(replace(attack, vector="told"), tap.knowledge) is None
    assert ask.key != replace(ask, settings={"use": "community", "vector": "told"}).key


def test_nulls_of_who_takes_the_mean_of_colluders_do_not_look_for_them_either(data: str) -> None:
    asks = {ask.name: ask for ask in _asks(experiment(table(data)))}
    nulls = {name: ask for name, ask in asks.items() if ask.kind == "null"}
    both = ("random users", "activity")
    assert set(nulls) == {
        *both,
        *(f"{name}, 20 % aside" for name in both),
        *("random users of sums", "random peers"),
    }
    split = leave_one_out(open_data(data), by="random", seed=0)
    made = Made(split, split.train, GMF(4), Federated(rounds=2), ShareLess(), None, 0)
    some = {name: ask for name, ask in asks.items() if ask.settings["use"] == "community" and name != "CDA"}
    taps = {name: Wiretap(objects.build("attack", ask.settings), made, ask) for name, ask in some.items()}
    aside = {name: set_aside(tap.attack, tap.knowledge) for name, tap in taps.items()}
    mean = aside["CDA, mean"]
    assert mean is not None
    for name in both:
        assert aside[name] is None
        assert torch.equal(aside[f"{name}, 20 % aside"], mean)  # type: ignore[arg-type]
    truth = truth_of_communities(made, asks["CDA, mean"], mean)
    lot = torch.rand(80, 80, generator=torch.Generator().manual_seed(0))
    found = [float(grade_communities(lot, truth, 10, torch.arange(80), off)["accuracy"].mean()) for off in (mean, None)]
    assert found[0] == pytest.approx(10 / 63, abs=0.03)
    assert found[1] < found[0], "a draw of all users is not worth as much"


@pytest.mark.parametrize("apart", [False, True])
def test_in_the_self_test_a_community_is_as_large_as_it_was(data: str, apart: bool) -> None:
    split = leave_one_out(open_data(data), by="random", seed=0)
    made = Made(split, split.train, GMF(4), Federated(rounds=2), ShareLess(), None, 0)
    ask, aside = Ask("CDA", {"use": "community"}, community=10), colluding(80, 0.4, 0) if apart else None
    truth = truth_of_communities(made, ask, aside)
    other = truth_of_communities(made, replace(ask, shuffle=True), aside)
    assert truth.sum(1).tolist() == other.sum(1).tolist() == [10] * 80
    assert not bool(other.diagonal().any())
    assert aside is None or not bool((other & aside).any())
    others = 79 if aside is None else 80 - int(aside.sum(1).min())
    assert float((truth & other).sum()) / 800 == pytest.approx(10 / others, abs=0.04)


def attacked(name: str, auc: float, **settings: Any) -> Attacked:
    """An attack on communities at a server that tells with this AUC, on every user."""
    users = pl.DataFrame({"user": range(8), "valid": [True, False] * 4, "auc": [auc] * 8})
    ask = Ask(name, {"use": "community", **settings}, community=10)
    return Attacked(ask, [0], [{"vantage": "Server"}], [users], [])


def test_an_attack_stands_beside_the_strongest_null_that_is_graded_on_the_same_users() -> None:
    mean: dict[str, Any] = {"vector": "mean", "colluders": 0.2}
    nulls = [attacked("random", 0.5), attacked("activity", 0.6), attacked("random, aside", 0.7, **mean)]
    for chosen, null in ((attacked("CDA", 0.8), "activity"), (attacked("CDA, mean", 0.8, **mean), "random, aside")):
        contest = Contest("community", [chosen], nulls)
        assert contest.null is not None
        assert contest.null.ask.name == null


def test_rounds_of_a_curve() -> None:
    assert spread(5) == {0, 1, 2, 3, 4}
    assert len(spread(200)) <= 32
    assert {0, 9} <= spread(200)
