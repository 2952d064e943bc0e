"""An audit end to end on tiny data: findings, resume after kills, one process at a time, a full disk, the self-test.

As a script (`python tests/test_runs.py FOLDER DATA`) this file is the audit that the tests below kill.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest
import torch
from torch import Tensor

import recleak
from recleak import measuring
from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.cli import main
from recleak.cli_audit import show
from recleak.conditions import Condition
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.errors import ConfigError
from recleak.experiment import experiment
from recleak.findings import Findings, FindingsError
from recleak.protocols.federated import train_federated
from recleak.runs import RunError, _Plan, audit_run, layers_of
from recleak.training.state import CheckpointError, locked
from recleak.wire import Broadcast, Server, ServerMessage


def table(data: str, **changes: Any) -> dict[str, Any]:
    made = {
        "title": "Tiny",
        "seeds": 2,
        "data": {"name": data, "candidates": 20},
        "model": {"use": "mf", "factors": 4},
        "protocol": {
            "use": "federated",
            "rounds": 6,
            "clients_per_round": 12,
            "local": {"epochs": 4, "optimizer": {"use": "adam", "learning_rate": 0.02}},
        },
        "defenses": ["none", {"use": "gaussian-noise", "std": 1.0}, "secure-aggregation"],
        "attacks": [{"use": "alignment", "shadow_rows": 0, "name": "projection"}, "k-means", "alignment-of-sums"],
        "by_component": ["projection"],
        "canaries": True,
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=60, n_items=50, mean_activity=10, min_activity=4).generate()
    store.save(made, folder, name="small")
    return str(folder)


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return audit_run(experiment(table(data)), folder, command="test"), folder


def everything(folder: Path) -> dict[str, bytes]:
    """All files that a run leaves, but for its log and its lock."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in ("log.json", ".lock")}


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_the_attack_is_found_and_noise_helps(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    verdict = {row["defense"]: row for row in findings.verdicts.to_dicts()}
    assert verdict["none"]["verdict"] == "leaks"
    assert verdict["none"]["attack"] == "projection"
    assert verdict["none"]["value"] > 0.95
    assert verdict["none"]["null"] == "popularity"
    assert verdict["gaussian-noise std 1.0"]["value"] < verdict["none"]["value"]
    assert verdict["secure-aggregation"]["attack"] == "alignment-of-sums", "the only one that is possible"


@pytest.mark.heavy
def test_no_value_without_its_interval_and_its_nulls(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    for frame in (findings.scores, findings.utility, findings.parts, findings.comparisons):
        measured = frame.filter(pl.col("value").is_not_null())
        assert len(measured)
        assert measured.filter(pl.col("low").is_null() | pl.col("high").is_null()).is_empty()
        assert measured.filter((pl.col("low") > pl.col("value")) | (pl.col("high") < pl.col("value"))).is_empty()
        assert measured.filter(pl.col("users") == 0).is_empty()
    blank = findings.scores.filter(pl.col("value").is_null())
    assert blank["reason"].null_count() == 0
    nulls = findings.scores.filter((pl.col("role") == "null") & (pl.col("defense") == "none"))
    assert {"random", "all-positive", "popularity", "popularity-of-sums"} == set(nulls["attack"])


@pytest.mark.heavy
def test_pairs_that_make_no_sense_say_why(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    rows = findings.scores.filter((pl.col("defense") == "secure-aggregation") & (pl.col("attack") == "projection"))
    assert rows["reason"].to_list() == [
        "Secure aggregation: no upload of a single client reaches the server. Attack the sums instead."
    ]


@pytest.mark.heavy
def test_defenses_are_compared_with_the_first_one(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    rows = findings.comparisons.filter(pl.col("question") == "membership")
    assert set(rows["defense"]) == {"gaussian-noise std 1.0", "secure-aggregation"}
    assert set(rows["reference"]) == {"none"}
    assert (rows["p_holm"] >= rows["p"]).all()
    same = findings.comparisons.filter((pl.col("defense") == "secure-aggregation") & (pl.col("metric") == "hit@10"))
    assert same["value"].to_list() == [0.0], "secure aggregation changes nothing of the model"


@pytest.mark.heavy
def test_every_user_has_a_risk_and_a_rank(whole: tuple[Findings, Path], data: str) -> None:
    findings, _ = whole
    one = findings.risk.filter(
        (pl.col("defense") == "none") & (pl.col("attack") == "projection") & (pl.col("seed") == 0)
    )
    assert one["rank"].sort().to_list() == list(range(1, len(one) + 1))
    assert one["user"].n_unique() == len(one)
    assert set(one["user"]) <= set(map(str, store.load(Path(data)).users["id"]))


@pytest.mark.heavy
def test_parts_and_ledger(whole: tuple[Findings, Path]) -> None:
    findings, _ = whole
    parts = findings.parts.filter((pl.col("defense") == "none") & (pl.col("kind") == "component"))
    value = {row["part"]: row for row in parts.to_dicts()}
    assert value["item"]["value"] > 0.95
    assert value["head"]["reason"] == "Nothing of the role head is sent.", "MF has none"
    assert {"round", "activity", "gender"} <= set(findings.parts["kind"])
    ledger = {row["defense"]: row for row in findings.ledger.to_dicts()}
    assert ledger["none"]["composed"] is None
    assert ledger["none"]["canaries"] > 20
    assert "touched" in ledger["gaussian-noise std 1.0"]["words"] or "rows" in ledger["gaussian-noise std 1.0"]["words"]


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"use": "ncf"}, ["head.1", "head.2", "head.3"]),
        ({"use": "ncf", "hidden": [8]}, ["head.1", "head.2"]),
        ({"use": "feature-gcn", "hidden": [4]}, ["head.1", "head.2"]),
        ({"use": "mf"}, []),
        ({"use": "mf", "factors": -1}, []),
        ({"use": "rap"}, []),
    ],
)
def test_layers_are_those_of_the_model(settings: dict[str, Any], layers: list[str]) -> None:
    assert layers_of(settings) == layers


def test_every_attack_that_is_run_by_component_is_run_by_layer(data: str, tmp_path: Path) -> None:
    """On items as on attributes, each system by the layers of its own model."""
    models = [{"use": "ncf", "factors": 4, "hidden": [8, 4]}, {"use": "mf", "factors": 4}]
    attacks = [{"use": "alignment", "name": "projection"}, {"use": "from-updates", "name": "AIA"}]
    both = {"by_component": ["projection", "AIA"], "attacks": attacks, "attributes": ["gender"], "known": 0.2}
    plan = _Plan(experiment(table(data, model=models, defenses=["none"], **both)), tmp_path)
    for audited, layers in zip(plan.audits, (["head.1", "head.2", "head.3"], []), strict=True):
        first, second = ([(ask.name, ask.role) for ask in cell.asks if ask.role] for cell in audited.cells)
        for attack in ("projection", "AIA"):
            assert [role for name, role in first if name == attack] == ["user", "item", "head", *layers]
        assert second == []


@pytest.mark.heavy
def test_findings_come_back_from_disk(whole: tuple[Findings, Path]) -> None:
    findings, folder = whole
    again = Findings.read(folder)
    assert all(again.tables[name].equals(frame) for name, frame in findings.tables.items())
    assert json.loads((folder / "findings.json").read_text(encoding="utf-8"))["verdicts"]
    assert "projection" in findings._repr_html_()
    assert "Tiny" in repr(findings)


def test_a_folder_without_findings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FindingsError, match=r"no findings\.json"):
        Findings.read(tmp_path)
    (tmp_path / "findings.json").write_text('{"about": {"version": 99}}', encoding="utf-8")
    with pytest.raises(FindingsError, match="version 99"):
        Findings.read(tmp_path)


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_what_is_measured_is_not_measured_again(
    whole: tuple[Findings, Path], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings, folder = whole
    monkeypatch.setattr(measuring, "train_federated", _refuse)
    again = audit_run(experiment(table(data)), folder, command="test")
    assert again.verdicts.equals(findings.verdicts)
    fewer = audit_run(experiment(table(data, seeds=1, defenses=["none"])), folder, command="test")
    assert fewer.verdicts["defense"].to_list() == ["none"]
    assert fewer.verdicts["seeds"].to_list() == [1]
    audit_run(experiment(table(data)), folder, command="test")


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("trained again")


@pytest.mark.heavy
def test_a_new_attack_is_added_to_what_is_there(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = table(data, seeds=1, defenses=["none"], attacks=["k-means"], by_component=[], canaries=False)
    audit_run(experiment(short), tmp_path / "run")
    seen: list[int] = []
    real = train_federated

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(len(options["taps"]))
        return real(*arguments, **options)

    monkeypatch.setattr(measuring, "train_federated", spy)
    attacks = ["k-means", {"use": "alignment", "shadow_rows": 0}]
    findings = audit_run(experiment({**short, "attacks": attacks}), tmp_path / "run")
    assert seen == [2], "the new attack, and who tells which pairs are asked"
    assert findings.verdicts["candidates"].to_list() == [2]


@pytest.mark.heavy
def test_a_run_killed_at_random_moments_ends_the_same(data: str, whole: tuple[Findings, Path], tmp_path: Path) -> None:
    _, folder = whole
    command = [sys.executable, str(Path(__file__)), str(tmp_path / "run"), data]
    for files in (1, 4, 30, 60, 90):  # whenever so many are there, be the machine fast or slow
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and _count(tmp_path / "run") < files:
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
    (tmp_path / "run" / "findings.json.1.partial").write_bytes(b"what a kill may leave")
    subprocess.run(command, check=True, capture_output=True)
    assert everything(tmp_path / "run") == everything(folder)


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))  # a folder that is gone meanwhile counts for nothing


def test_two_processes_in_one_folder(data: str, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CheckpointError, match="in use by process"):
        audit_run(experiment(table(data)), tmp_path)


def test_a_folder_of_other_things_is_refused(data: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds other things \(thesis\.txt\)"):
        audit_run(experiment(table(data)), tmp_path)


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files have no names here")
def test_a_full_disk_is_told_and_finished_cells_stay(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = table(data, seeds=1, defenses=["none", "secure-aggregation"], by_component=[], canaries=False)
    real = os.fsync

    def full(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").resolve())
        if "cells" in path and "utility" in path and any(tmp_path.rglob("utility.parquet")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="1 of 3 cells failed"):
        audit_run(experiment(short), tmp_path / "run")
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.partial"))
    assert len(list((tmp_path / "run" / "cells").rglob("utility.parquet"))) == 1
    monkeypatch.setattr(os, "fsync", real)
    findings = audit_run(experiment(short), tmp_path / "run")
    assert len(findings.verdicts) == 2


@pytest.mark.heavy
def test_a_system_that_cannot_be_says_why(data: str, tmp_path: Path) -> None:
    local = {"epochs": 1, "loss": "bpr"}
    short = table(
        data,
        seeds=1,
        defenses=[
            "none",
            {"use": "randomized-labels", "epsilon": 1.0},
            {"name": "head stays", "use": "share-less", "components": ["head.1.weight"]},
        ],
        protocol={"use": "federated", "rounds": 2, "clients_per_round": 8, "local": local},
        by_component=[],
        canaries=False,
    )
    findings = audit_run(experiment(short), tmp_path / "run")
    verdict = {row["defense"]: row for row in findings.verdicts.to_dicts()}
    assert verdict["randomized-labels epsilon 1.0"]["verdict"] == "not measured"
    assert "Train with loss='bce'" in verdict["randomized-labels epsilon 1.0"]["words"]
    assert verdict["head stays"]["verdict"] == "not measured", "of several models, not each has what a defense names"
    assert "Unknown component 'head.1.weight'" in verdict["head stays"]["words"]


@dataclass(frozen=True)
class Fixed:
    """An attack that answers the same to everything."""

    vantage: ClassVar[type[Server]] = Server
    value: float = 0.5

    def init(self, knowledge: Knowledge) -> State:
        return {"messages": torch.tensor(0)}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        return {"messages": state["messages"] + isinstance(message, Broadcast)}

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        return torch.full(question.item.shape, self.value, dtype=torch.float64)


@dataclass(frozen=True)
class Picky(Fixed):
    """An attack that cannot be run with some seeds."""

    seed: int = 0
    refused: int = 1

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        if self.seed == self.refused and int(state["messages"]) == 2:
            raise ConfigError("Not with this seed.")
        return super().fold(knowledge, state, message)


@pytest.mark.heavy
def test_a_seed_that_cannot_be_measured_does_not_spoil_the_others(data: str, tmp_path: Path) -> None:
    short = table(data, seeds=3, defenses=["none", "secure-aggregation"], by_component=[], canaries=False)
    attacks = [*short["attacks"], {"use": f"{Picky.__module__}:Picky"}]
    findings = audit_run(experiment({**short, "attacks": attacks}), tmp_path / "run")
    rows = findings.scores.filter(pl.col("defense") == "none", pl.col("attack") == "Picky", pl.col("metric") == "auc")
    assert rows["seeds"].to_list() == [2]
    others = findings.scores.filter(pl.col("defense") == "none", pl.col("attack") == "projection")
    assert set(others["seeds"]) == {3} | {0}, "0: too few pairs for a rate at 0.1 %"
    assert set(findings.risk.filter(pl.col("attack") == "Picky")["seed"]) == {0, 2}
    assert len(findings.comparisons)


def test_a_folder_with_another_experiment_json_is_refused(data: str, tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text('{"volts": 3}', encoding="utf-8")
    (tmp_path / "thesis.partial").write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds other things"):
        audit_run(experiment(table(data)), tmp_path)
    assert (tmp_path / "thesis.partial").exists()
    assert (tmp_path / "experiment.json").read_text(encoding="utf-8") == '{"volts": 3}'


@pytest.mark.heavy
def test_names_that_are_patterns_and_two_labels_for_one_system(data: str, tmp_path: Path) -> None:
    short = table(data, seeds=1, by_component=[], canaries=False, attacks=["k-means"])
    both = ["none", {"use": "none", "name": "again"}]
    findings = audit_run(experiment({**short, "defenses": both}), tmp_path / "run[1]", workers=2)
    first, second = findings.verdicts["value"].to_list()
    assert first == second


@pytest.mark.heavy
def test_what_was_not_measured_fails_a_condition_and_is_told_with_its_reason(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = table(data, seeds=1, by_component=[], canaries=False, attacks=["k-means"], defenses=["secure-aggregation"])
    findings = audit_run(experiment(short), tmp_path / "run")
    assert list(Condition.parse("membership.auc > 0.6").violations(findings)) == [
        "membership.auc: not measured, so nothing is known (small, mf, federated, secure-aggregation)"
    ]
    show(findings)
    told = " ".join(capsys.readouterr().out.split())
    assert "secure-aggregation, membership: Not measured. Secure aggregation: no upload of a single client" in told


# --- the self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_on_shuffled_labels_nothing_is_found(data: str, tmp_path: Path) -> None:
    short = table(data, defenses=["none"], seeds=3, by_component=[], canaries=False, shuffle_labels=True)
    findings = audit_run(experiment(short), tmp_path / "run")
    row = findings.verdicts.to_dicts()[0]
    assert row["verdict"] != "leaks"
    assert row["low"] <= 0.5 <= row["high"]
    assert findings.about["self_test"]


# --- a user's own attack ----------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_an_attack_of_ones_own(data: str, tmp_path: Path) -> None:
    mine = {"use": f"{Fixed.__module__}:Fixed", "value": 0.25}
    findings = recleak.audit(
        table(data, seeds=1, defenses=["none"], attacks=[mine], by_component=[], canaries=False), out=tmp_path / "run"
    )
    row = findings.scores.filter((pl.col("attack") == "Fixed value 0.25") & (pl.col("metric") == "auc")).to_dicts()[0]
    assert (row["value"], row["low"], row["high"]) == (0.5, 0.5, 0.5)


# --- conditions and commands ------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "point", "systems"),
    [
        ("membership.auc > 0.9", False, {"none"}),
        ("membership.auc > 2", False, set()),
        ("membership.excess > 0", False, {"none"}),
        ("membership.f1 >= 0", False, {"none", "gaussian-noise std 1.0", "secure-aggregation"}),
        ("utility.hit@10 < 0", True, set()),
        ("utility.hit@10 <= 1", True, {"none", "gaussian-noise std 1.0", "secure-aggregation"}),
    ],
)
def test_conditions(whole: tuple[Findings, Path], text: str, point: bool, systems: set[str]) -> None:
    found = list(Condition.parse(text).violations(whole[0], point=point))
    assert {
        name for name in ("none", "gaussian-noise std 1.0", "secure-aggregation") for line in found if name in line
    } == (systems)


@pytest.mark.heavy
def test_conditions_compare_the_end_that_is_certain(whole: tuple[Findings, Path]) -> None:
    row = whole[0].verdicts.filter(pl.col("defense") == "gaussian-noise std 1.0").to_dicts()[0]
    between = (row["low"] + row["value"]) / 2
    condition = Condition("membership", "auc", ">", between)
    assert not [line for line in condition.violations(whole[0]) if "noise" in line]
    assert [line for line in condition.violations(whole[0], point=True) if "noise" in line]


@pytest.mark.parametrize("text", ["membership.auc", "auc > 0.5", "membership.auc > x", "membership.auc == 1"])
def test_a_condition_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 'membership\.auc > 0\.6'"):
        Condition.parse(text)


@pytest.mark.heavy
def test_unknown_questions_and_metrics(whole: tuple[Findings, Path]) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'membership'"):
        list(Condition.parse("membershp.auc > 0.5").violations(whole[0]))
    with pytest.raises(ConfigError, match="Unknown metric"):
        list(Condition.parse("membership.aucc > 0.5").violations(whole[0]))


@pytest.fixture
def typed(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command line in an empty folder with a tiny experiment; the exit code."""
    monkeypatch.chdir(tmp_path)
    toml = f"""
title = "Typed"
data = {json.dumps(data)}
model = {{ use = "mf", factors = 4 }}
protocol = {{ use = "federated", rounds = 3, clients_per_round = 12 }}
attacks = ["k-means"]
"""
    (tmp_path / "tiny.toml").write_text(toml, encoding="utf-8")

    def run(*arguments: str) -> int:
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


@pytest.mark.heavy
def test_the_commands(typed: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("audit", "tiny.toml", "--workers", "1", "--defense", "none", "--defense", "proximal,strength=1.0") == 0
    printed = capsys.readouterr().out
    assert "proximal" in printed
    assert "runs/tiny/report.html" in printed
    assert (tmp_path / "runs/tiny/report.html").stat().st_size > 10_000
    assert typed("audit", "tiny.toml", "--workers", "1", "--json", "--out", "runs/tiny") == 0
    assert json.loads(capsys.readouterr().out)["about"]["title"] == "Typed"
    assert typed("audit", "tiny.toml", "--workers", "1", "--fail-if", "utility.hit@10 >= 0") == 1
    assert "failed: utility.hit@10 >= 0" in capsys.readouterr().err
    (tmp_path / "runs/tiny/report.html").unlink()
    assert typed("report", "runs/tiny") == 0
    assert (tmp_path / "runs/tiny/report.html").exists()
    assert typed("audit", "tiny.toml", "--workers", "1", "--seeds", "2", "--out", "runs/other") == 0
    assert typed("compare", "runs/tiny", "runs/other", "--out", "both.html") == 0
    assert (tmp_path / "both.html").exists()
    assert typed("compare", "runs/tiny") == 2
    assert typed("audit", "tiny.toml", "--defense", "proximl") == 2
    assert "Did you mean 'proximal'" in capsys.readouterr().err


def test_the_schema_is_printed(typed: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["defenses"]


if __name__ == "__main__":
    audit_run(experiment(table(sys.argv[2])), Path(sys.argv[1]), command="test")
