"""Audits of recordings: what the server of a federation saw, beside what its users did."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recleak import runs
from recleak.cells import whole_of
from recleak.cli import app
from recleak.data.interactions import Interactions
from recleak.data.store import load
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Defense
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.errors import ConfigError, DataError
from recleak.experiment import experiment
from recleak.made import Made, made_of
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
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def data() -> Interactions:
    return Synthetic(n_users=60, n_items=150, mean_activity=25, min_activity=10, communities=5).generate()


def recorded(folder: Path, data: Interactions, defense: Defense | None = None, model: NCF = MODEL) -> Path:
    """What a server saw of the first users, and a table of what all users did, in its numbers."""
    components = model.components()
    tap = Recorder(Aggregator() if defense else Server(), folder / "seen", components=components, source="test")
    local = LocalTraining(epochs=3, optimizer=Adam(0.01))
    some = data.take(data.user < CLIENTS)
    train_federated(
        Federated(rounds=2, local=local), model, some, defense=defense, taps=[tap], show_progress=False, seed=5
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
    assert [each["use"] for each in table["attacks"]] == ["alignment-of-sums", "rehearsed-sums"]
    table["attacks"].append({"use": "k-means"})
    findings = audit_run(experiment(table), tmp_path / "run", command="test")
    (verdict,) = findings.verdicts.to_dicts()
    assert verdict["attack"] in ("alignment-of-sums", "rehearsed-sums")
    assert 0.5 < verdict["low"] < verdict["value"] < 0.9  # of 24 clients together: more than nothing, less than alone
    assert 0.5 < verdict["null_value"] < 0.9
    reasons = {row["attack"]: row["reason"] for row in findings.scores.to_dicts() if row["reason"]}
    assert "no upload of a single client" in reasons["k-means"].lower()


@pytest.mark.heavy
def test_the_documented_line_and_the_example_s_experiment(
    tmp_path: Path, data: Interactions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of docs/deploy.md as it stands there, and examples/flower/audit.toml on a recording of sums."""
    model = NCF(factors=16, hidden=(32, 16))
    (line,) = [each for each in (ROOT / "docs/deploy.md").read_text().splitlines() if each.endswith("hidden=[32,16]")]
    recorded(tmp_path, data, model=model)
    (tmp_path / "truth.csv").rename(tmp_path / "did.csv")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    app([*words[1:], "--attack", "alignment", "--workers", "1", "--json"], result_action="return_value")
    found = json.loads(capsys.readouterr().out)
    (verdict,) = found["verdicts"]
    assert verdict["attack"] == "alignment"
    assert verdict["value"] > 0.8
    assert verdict["defense"] == "not told"

    sums = recorded(tmp_path / "of sums", data, SecureAggregation(), model)
    example = ["audit", str(ROOT / "examples/flower/audit.toml"), "--recording", str(sums / "seen"), "--workers", "1"]
    app([*example, "--interactions", str(sums / "truth.csv"), "--json"], result_action="return_value")
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdict["attack"] in ("alignment-of-sums", "rehearsed-sums")
    assert 0.5 < verdict["low"] < verdict["value"] < 0.9


def test_models_as_the_command_line_gives_them(files: Path, tmp_path: Path) -> None:
    def uses(**base: Any) -> list[str]:
        table = experiment_of(files / "seen", files / "truth.csv", None, tmp_path / "run", base)
        return [each["use"] for each in table["attacks"]]

    every = ["alignment", "imia", "farthest-rows", "k-means"]
    assert uses(model=[KNOWN["model"]]) == uses(model=KNOWN["model"]) == uses(model="ncf") == every
    assert uses() == uses(model=[{"use": "unknown"}]) == uses(model="unknown") == every[2:]
    assert uses(attacks=[{"use": "k-means"}]) == ["k-means"]


def test_a_defense_that_nobody_names_is_not_told(files: Path, tmp_path: Path) -> None:
    def labels(**base: Any) -> list[str]:
        table = experiment_of(files / "seen", files / "truth.csv", None, tmp_path / "run", {**KNOWN, **base})
        return [each.defense.label for each in experiment(table).systems]

    assert labels() == ["not told"]
    assert labels(defenses="none") == ["none"]
    assert labels(defenses=[{"use": "clip", "bound": 1.0}]) == ["clip bound 1.0"]


def _made(folder: Path, truth: Path, out: Path) -> Made:
    """What an audit of a recording makes of its settings."""
    table = experiment_of(folder / "seen", truth, None, out, {**KNOWN, "attacks": ["alignment"]})
    (cell,) = runs._Plan(experiment(table), out).audits[0].cells
    return made_of(cell, whole_of(cell.system.data), None)


def test_popularity_of_a_recording_is_as_if_all_were_like_the_others(
    files: Path, data: Interactions, tmp_path: Path
) -> None:
    """So that an average client has as many items as the others have on average, however few are counted."""
    rows = pl.read_csv(files / "truth.csv")
    for name, least in (("many", CLIENTS), ("few", 55)):
        others = rows.filter((pl.col("user") < CLIENTS) | (pl.col("user") >= least))
        others.write_csv(tmp_path / f"{name}.csv")
        made = _made(files, tmp_path / f"{name}.csv", tmp_path / name)
        counted = others.filter(pl.col("user") >= CLIENTS)
        assert made.popularity is not None
        assert float(made.popularity.sum()) / made.train.n_users == pytest.approx(
            counted.height / counted["user"].n_unique(), rel=1e-4
        )
        some = counted["item"][0]
        share = counted.filter(pl.col("item") == some).height / counted["user"].n_unique()
        assert float(made.popularity[some]) == pytest.approx(share * made.train.n_users, rel=1e-4)


def _taped(folder: Path, parts: tuple[Component, ...], *, rounds: int = 1) -> Path:
    """A recording of one client that sends all shared parts."""
    tape = Recorder(Server(), folder, components=parts)
    rows = {part.name: torch.ones(1, *part.shape) for part in parts if part.shared and part.storage == "per_item"}
    values = {part.name: torch.ones(1, *part.shape) for part in parts if part.shared and part.storage == "dense"}
    for round in range(rounds):
        tables = {name: torch.zeros(5, *value.shape[1:]) for name, value in rows.items()}
        tape.receive(Broadcast(round, tables | {name: value[0] for name, value in values.items()}))
        update = Update(torch.tensor([0]), values, rows, torch.tensor([2]), torch.tensor([0, 1]), 5)
        tape.receive(Upload(round, update, torch.ones(1)))
    tape.close()
    return folder


def test_attacks_of_their_own_read_shared_tables_with_columns(tmp_path: Path) -> None:
    (tmp_path / "truth.csv").write_text("user,item\n0,2\n")

    def made(name: str, *parts: Component, **base: Any) -> list[dict[str, Any]]:
        folder = _taped(tmp_path / name, parts)
        attacks: list[dict[str, Any]] = experiment_of(
            folder, tmp_path / "truth.csv", None, tmp_path / f"run {name}", base
        )["attacks"]
        return attacks

    kept = Component("own", "per_item", "item", (3,), shared=False)
    bias, table = Component("bias", "per_item", "item", ()), Component("item", "per_item", "item", (2,))
    assert [each["component"] for each in made("both", kept, bias, table)] == ["item", "item"]
    with pytest.raises(ConfigError, match=r"(?s)Got a recording of bias \[\], expected a table .*--attack alignment"):
        made("bias", kept, bias)
    assert made("asked", kept, bias, attacks=[{"use": "alignment"}]) == [{"use": "alignment"}]


def test_a_recording_that_diverged_is_audited_up_to_there(tmp_path: Path) -> None:
    parts = (Component("i", "per_item", "item", (2,)), Component("b", "dense", "head", ()))
    tape = Recorder(Server(), tmp_path / "seen", components=parts)
    for round, value in enumerate((0.0, 1.0, float("nan"), 0.0)):
        tape.receive(Broadcast(round, {"i": torch.full((5, 2), value), "b": torch.zeros(())}))
        tape.receive(replace(_upload(torch.ones(1, 2), client=round), round=round))
    tape.close()
    found = survey(tmp_path / "seen")
    assert (found.rounds, found.diverged, sorted(found.first)) == (2, 2, [0, 1])
    assert len(list(checked(tmp_path / "seen"))) == 4
    (tmp_path / "truth.csv").write_text("user,item\n0,2\n1,3\n")
    table = experiment_of(tmp_path / "seen", tmp_path / "truth.csv", None, tmp_path / "run", {})
    assert table["protocol"]["rounds"] == 2
    notes = [str(note) for note in load(Path(table["data"]["name"])).notes]
    assert any("seen: from round 3 on its parameters are not finite" in note for note in notes)
    first = Recorder(Server(), tmp_path / "at once", components=parts)
    first.receive(Broadcast(0, {"i": torch.full((5, 2), float("inf")), "b": torch.zeros(())}))
    first.close()
    with pytest.raises(DataError, match="no finite broadcast"):
        survey(tmp_path / "at once")


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


def _without(name: str) -> Upload:
    upload = _upload(torch.ones(1, 2))
    values, rows = (
        {n: value for n, value in some.items() if n != name} for some in (upload.update.values, upload.update.rows)
    )
    return replace(upload, update=replace(upload.update, values=values, rows=rows))


def _sum(weight: float = 1.0, touched: dict[str, torch.Tensor] | None = None) -> Aggregate:
    total = {"i": torch.ones(5, 2), "b": torch.zeros(())}
    return Aggregate(0, torch.tensor([0]), total, touched or {}, weight)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (_upload(torch.ones(1, 3)), r"'i' of shape \(3,\), expected \(2,\)"),
        (_upload(torch.ones(1, 2) * float("inf")), "not finite"),
        (_upload(torch.ones(1, 2), client=2**40), "the client 1099511627776"),
        (_upload(torch.ones(1, 2), n_items=2**40), "1099511627776 items, expected 5"),
        (Aggregate(0, torch.tensor([0]), {"i": torch.ones(4, 2)}, {}, 1.0), "a sum of"),
        (Broadcast(1, {"i": torch.ones(5, 2)}), "a broadcast of"),
        (_without("b"), r"an upload of \['i'\], expected \['b', 'i'\]"),
        (_without("i"), r"an upload of \['b'\], expected \['b', 'i'\]"),
        (replace(_upload(torch.ones(1, 2)), weight=torch.tensor([float("inf")])), "upload with weights"),
        (replace(_upload(torch.ones(1, 2)), weight=torch.tensor([-1.0])), "upload with weights"),
        (_sum(weight=-1.0), "sum with weights or counts"),
        (_sum(touched={"i": torch.full((5,), float("nan"))}), "sum with weights or counts"),
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
