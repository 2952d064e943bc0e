"""Audits of recordings: what the server of a federation saw, beside what its users did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recleak.cli import app
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Defense
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.errors import ConfigError, DataError
from recleak.experiment import experiment
from recleak.models.components import Component
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.protocols.recorded import Recorded, checked, survey
from recleak.recorded import experiment_of
from recleak.recording import Recorder
from recleak.runs import audit_run
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.update import Update
from recleak.wire import Aggregate, Aggregator, Broadcast, Message, Server, Upload

MODEL = NCF(factors=8, hidden=(16, 8))
KNOWN = {
    "model": {"use": "ncf", "factors": 8, "hidden": [16, 8]},
    "protocol": {"use": "federated", "local": {"epochs": 3, "optimizer": {"use": "adam", "learning_rate": 0.01}}},
}
CLIENTS = 24  # of 60 users


@pytest.fixture(scope="module")
def data() -> Interactions:
    return Synthetic(n_users=60, n_items=150, mean_activity=25, min_activity=10, communities=5).generate()


def recorded(folder: Path, data: Interactions, defense: Defense | None = None) -> Path:
    """What a server saw of the first users, and a table of what all users did, in its numbers."""
    components = MODEL.components()
    tap = Recorder(Aggregator() if defense else Server(), folder / "seen", components=components, source="test")
    local = LocalTraining(epochs=3, optimizer=Adam(0.01))
    some = data.take(data.user < CLIENTS)
    train_federated(
        Federated(rounds=2, local=local), MODEL, some, defense=defense, taps=[tap], show_progress=False, seed=5
    )
    pl.DataFrame({"user": data.user, "item": data.item}).write_csv(folder / "truth.csv")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, data: Interactions) -> Path:
    return recorded(tmp_path_factory.mktemp("server"), data)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory, data: Interactions) -> Path:
    return recorded(tmp_path_factory.mktemp("aggregator"), data, SecureAggregation())


def test_what_is_in_a_recording(files: Path, sums: Path, data: Interactions) -> None:
    found = survey(files / "seen")
    assert (found.rounds, found.n_items, found.vantage) == (2, data.n_items, "Server")
    assert found.first == dict.fromkeys(range(CLIENTS), 0)
    assert [(part.name, part.shared) for part in found.components] == [(p.name, p.shared) for p in MODEL.components()]
    assert survey(sums / "seen").vantage == "Aggregator"
    first = Recorded(str(files / "seen")).first_rounds(60)
    assert (first[:CLIENTS] == 0).all()
    assert (first[CLIENTS:] == -1).all()


@pytest.mark.heavy
def test_a_leak_is_found_beside_its_nulls_and_chance_where_there_is_none(files: Path, tmp_path: Path) -> None:
    table = experiment_of(files / "seen", files / "truth.csv", None, tmp_path / "run", KNOWN)
    table["attacks"] = [{"use": "alignment"}, {"use": "k-means"}]
    findings = audit_run(experiment(table), tmp_path / "run", command="test")
    (verdict,) = findings.verdicts.to_dicts()
    assert verdict["question"] == "membership"
    assert verdict["verdict"] == "leaks"
    assert verdict["attack"] == "alignment"
    assert verdict["value"] > 0.8
    assert verdict["low"] > verdict["null_value"] > 0.4
    scores = {(row["attack"], row["metric"]): row for row in findings.scores.to_dicts()}
    assert scores["random", "auc"]["low"] < 0.5 < scores["random", "auc"]["high"]
    assert scores["popularity", "auc"]["value"] < 0.9  # of the others: of these few it would be the answer
    shuffled = audit_run(experiment({**table, "shuffle_labels": True}), tmp_path / "run", command="test")
    (chance,) = shuffled.verdicts.to_dicts()
    assert chance["low"] <= 0.5 <= chance["high"]


@pytest.mark.heavy
def test_without_a_model_rows_are_read_and_without_others_there_is_no_popularity(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pl.read_csv(files / "truth.csv")
    rows.filter(pl.col("user") < CLIENTS).write_csv(tmp_path / "mine.csv")
    arguments = ["audit", "--recording", str(files / "seen"), "--interactions", str(tmp_path / "mine.csv")]
    app([*arguments, "--out", str(tmp_path / "run"), "--workers", "1", "--json"], result_action="return_value")
    found = json.loads(capsys.readouterr().out)
    (verdict,) = found["verdicts"]
    assert verdict["attack"] in ("farthest-rows component item", "k-means component item")
    reasons = {row["attack"]: row["reason"] for row in found["scores"] if row.get("reason")}
    assert "needs the items' popularity" in reasons["popularity"]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.heavy
def test_a_recording_of_sums_is_attacked_as_sums(sums: Path, tmp_path: Path) -> None:
    base = {**KNOWN, "defenses": [{"use": "secure-aggregation"}]}
    table = experiment_of(sums / "seen", sums / "truth.csv", None, tmp_path / "run", base)
    assert [each["use"] for each in table["attacks"]] == ["alignment-of-sums"]
    table["attacks"].append({"use": "k-means"})
    findings = audit_run(experiment(table), tmp_path / "run", command="test")
    (verdict,) = findings.verdicts.to_dicts()
    assert verdict["attack"] == "alignment-of-sums"
    assert verdict["value"] is not None
    reasons = {row["attack"]: row["reason"] for row in findings.scores.to_dicts() if row["reason"]}
    assert "no upload of a single client" in reasons["k-means"].lower()


def test_what_does_not_fit_is_said(files: Path, sums: Path, tmp_path: Path) -> None:
    def made(base: dict[str, Any], truth: str = "", folder: Path = files) -> None:
        file = tmp_path / "given.csv"
        file.write_text(truth)
        truth_file = file if truth else folder / "truth.csv"
        experiment_of(folder / "seen", truth_file, None, tmp_path / "run", base)

    with pytest.raises(DataError, match=r"got item '150', expected a row of the recorded tables, 0 to 149"):
        made({}, "user,item\n0,150\n")
    with pytest.raises(DataError, match="got user 'ann', expected the number of a client"):
        made({}, "user,item\nann,1\n")
    with pytest.raises(DataError, match="no interaction of any of the 24 clients"):
        made({}, "user,item\n40,1\n")
    with pytest.raises(ConfigError, match="recording of sums without a model"):
        made({}, folder=sums)
    protocol = Recorded(str(files / "seen"))
    with pytest.raises(ConfigError, match=r"got 'head\.1\.weight' \(dense, \[16, 16\]\).*say \(dense, \[8, 16\]\)"):
        protocol.components(NCF(factors=4, hidden=(16, 8)).components())
    with pytest.raises(DataError, match="expected 0123"):
        _ = Recorded(str(files / "seen"), digest="0123").survey
    with pytest.raises(ConfigError, match="without --interactions"):
        app(["audit", "--recording", str(files / "seen")], result_action="return_value")
    words = ["audit", "--recording", str(files / "seen"), "--interactions", "x.csv", "--seeds", "3"]
    with pytest.raises(ConfigError, match="it is one run"):
        app(words, result_action="return_value")


def _upload(rows: torch.Tensor, client: int = 0, n_items: int = 5) -> Upload:
    update = Update(
        torch.tensor([client]), {"b": torch.zeros(1)}, {"i": rows}, torch.tensor([2]), torch.tensor([0, 1]), n_items
    )
    return Upload(0, update, torch.ones(1))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (_upload(torch.ones(1, 3)), r"'i' of shape \(3,\), expected \(2,\)"),
        (_upload(torch.ones(1, 2) * float("inf")), "not finite"),
        (_upload(torch.ones(1, 2), client=2**40), "the client 1099511627776"),
        (_upload(torch.ones(1, 2), n_items=2**40), "1099511627776 items, expected 5"),
        (Aggregate(0, torch.tensor([0]), {"i": torch.ones(4, 2)}, {}, 1.0), "a sum of"),
        (Broadcast(1, {"i": torch.ones(5, 2)}), "a broadcast of"),
    ],
)
def test_recordings_that_contradict_themselves_are_refused(tmp_path: Path, message: Message, words: str) -> None:
    parts = (Component("i", "per_item", "item", (2,)), Component("b", "dense", "head", ()))
    tape = Recorder(Server(), tmp_path / "seen", components=parts)
    tape.receive(Broadcast(0, {"i": torch.zeros(5, 2), "b": torch.zeros(())}))
    tape.receive(_upload(torch.ones(1, 2)))
    tape.receive(message)
    tape.close()
    with pytest.raises(DataError, match=words):
        list(checked(tmp_path / "seen"))
    with pytest.raises(DataError, match=words):
        survey(tmp_path / "seen")


def test_recordings_without_a_round_or_a_table_are_refused(tmp_path: Path, files: Path) -> None:
    tape = Recorder(Server(), tmp_path / "idle", components=(Component("i", "per_item", "item", (2,)),))
    tape.receive(Broadcast(0, {"i": torch.zeros(5, 2)}))
    tape.close()
    with pytest.raises(DataError, match="nobody who answered"):
        survey(tmp_path / "idle")
    shutil.copytree(files / "seen", tmp_path / "cut")
    manifest = json.loads((tmp_path / "cut" / "manifest.json").read_text())
    (tmp_path / "cut" / "manifest.json").write_text(json.dumps({**manifest, "vantage": {"name": "Peers"}}))
    with pytest.raises(DataError, match="Peers"):
        survey(tmp_path / "cut")


def test_an_unfinished_recording_is_audited_as_far_as_it_goes(tmp_path: Path, files: Path) -> None:
    shutil.copytree(files / "seen", tmp_path / "seen")
    manifest = json.loads((tmp_path / "seen" / "manifest.json").read_text())
    unfinished = {**manifest, "complete": False, "sha256": None, "messages": 0}
    (tmp_path / "seen" / "manifest.json").write_text(json.dumps(unfinished))
    lines = (tmp_path / "seen" / "messages.sha256").read_bytes().splitlines(keepends=True)
    (tmp_path / "seen" / "messages.sha256").write_bytes(b"".join(lines[:2]))
    found = survey(tmp_path / "seen")
    assert (found.rounds, found.complete) == (1, False)
    assert len(found.digest) == 64
    assert found.digest != survey(files / "seen").digest
    assert np.isin(sorted(found.first), range(CLIENTS)).all()
