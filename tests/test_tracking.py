"""Findings in MLflow: parameters, metrics with their intervals, the report; once."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recleak import tracking
from recleak.addresses import without_password
from recleak.cli import app, main
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.errors import ConfigError, RecleakError
from recleak.findings import SYSTEM, Findings
from recleak.report.page import render
from report_sample import sample

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # MLflow's, on its folders
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A local file store."""
    pytest.importorskip("mlflow")
    return (tmp_path / "mlruns").as_uri()


def written(folder: Path) -> Findings:
    findings = sample()
    findings.write(folder)
    (folder / "report.html").write_text("<title>page</title>", encoding="utf-8")
    return findings


def runs_in(uri: str) -> list[Any]:
    client = tracking.require().MlflowClient(tracking_uri=uri)
    where = client.get_experiment_by_name(tracking.EXPERIMENT).experiment_id
    return list(client.search_runs([where], max_results=1000))


@pytest.mark.heavy
def test_what_is_logged(uri: str, tmp_path: Path) -> None:
    findings = written(tmp_path / "run")
    audit = tracking.log(findings, tmp_path / "run", uri)
    found = {run.info.run_id: run for run in runs_in(uri)}
    parent = found.pop(audit)
    assert parent.info.status == "FINISHED"
    artifacts = tracking.require().MlflowClient(tracking_uri=uri).list_artifacts(audit)
    assert {each.path for each in artifacts} == {"report.html", "findings.json"}
    assert len(found) == len(findings.about["systems"])
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {audit}
    by_defense = {run.data.params["defense"]: run.data for run in found.values()}
    row = findings.verdicts.filter(~findings.verdicts["value"].is_null()).to_dicts()[0]
    data = by_defense[row["defense"]]
    assert {name: data.params[name] for name in SYSTEM} == {name: row[name] for name in SYSTEM}
    name = f"{row['question']}/strongest auc"
    got = [data.metrics[name + end] for end in ("", ".low", ".high")]
    assert got == pytest.approx([row["value"], row["low"], row["high"]])
    assert any(key.startswith("utility/") for key in data.metrics)
    assert any(key.endswith("tpr at 1 percent.low") for key in data.metrics)


@pytest.mark.heavy
def test_the_same_findings_are_logged_once(uri: str, tmp_path: Path) -> None:
    findings = written(tmp_path / "run")
    first = tracking.log(findings, tmp_path / "run", uri)
    count = len(runs_in(uri))
    assert tracking.log(findings, tmp_path / "run", uri) == first
    assert len(runs_in(uri)) == count
    (tmp_path / "run" / "findings.json").write_text("{}", encoding="utf-8")
    assert tracking.log(findings, tmp_path / "run", uri) != first


@pytest.mark.heavy
def test_a_store_that_cannot_be_written_is_told(uri: str, tmp_path: Path) -> None:
    findings = written(tmp_path / "run")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RecleakError, match=r"(?s)MLflow could not be written to.*The findings are in .*run"):
        tracking.log(findings, tmp_path / "run", (tmp_path / "file" / "mlruns").as_uri())


def test_only_what_was_measured_is_a_metric() -> None:
    findings = sample()
    for system in findings.about["systems"]:
        values = dict(tracking.metrics(findings, {name: system[name] for name in SYSTEM}))
        assert values
        assert all(value == value for value in values.values())
        assert not any(letter in name for name in values for letter in "@%")


def test_an_address_where_nobody_answers_is_told_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nobody listens there when it is closed
    begun = time.monotonic()
    words = ["audit", "--mlflow", f"http://alice:s3cret@127.0.0.1:{port}", "--out", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=r"(?s)MLflow cannot be asked there.*Nothing was run") as raised:
        app(words, result_action="return_value")
    assert time.monotonic() - begun < 30
    assert "s3cret" not in str(raised.value)
    assert not (tmp_path / "run").exists()
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--mlflow http://alice:s3cret@host:5000/x", "--mlflow http://host:5000/x"),
        ("'--mlflow=https://alice:p@ss@host'", "'--mlflow=https://host'"),
        ("postgresql+psycopg://bob:x@db/a ray://h:10001", "postgresql+psycopg://db/a ray://h:10001"),
        ("file:///home/a@b/runs --out c@d http://host/a@b", "file:///home/a@b/runs --out c@d http://host/a@b"),
    ],
)
def test_passwords_are_not_recorded(given: str, shown: str) -> None:
    assert without_password(given) == shown


def test_a_report_shows_no_password() -> None:
    findings = sample()
    about = {**findings.about, "command": "recleak audit --mlflow http://alice:s3cret@host"}
    page = render(replace(findings, about=about))
    assert "http://host" in page
    assert "s3cret" not in page


def test_without_mlflow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"(?s)needs it.*pip install 'recleak\[mlflow\]'"):
        tracking.require()


@pytest.mark.heavy
def test_the_command(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Synthetic(n_users=60, n_items=50, mean_activity=10, min_activity=4).generate()
    store.save(data, tmp_path / "small", name="small")
    short = ["--data", "small", "--model", "mf,factors=4", "--defense", "none", "--attack", "k-means"]
    with pytest.raises(SystemExit) as ended:
        main(["audit", *short, "--rounds", "2", "--seeds", "1", "--workers", "1", "--mlflow", uri, "--out", "run"])
    assert ended.value.code == 0
    assert sorted(run.data.params.get("defense", "") for run in runs_in(uri)) == ["", "none"]
