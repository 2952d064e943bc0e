"""Findings in MLflow: one run for an audit, with its report, and below it one for each system.

A system's run has its labels as parameters, and every score, verdict, utility and epsilon as a metric; the ends of an
interval stand beside a value as `NAME.low` and `NAME.high`. What is logged already is not logged again.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import polars as pl

from recleak.addresses import without_password
from recleak.errors import ConfigError, RecleakError
from recleak.findings import SYSTEM, Findings

EXPERIMENT = "recleak"
_TAG = "recleak.findings"  # a digest: the same findings are logged once
_MOST = 1000  # metrics that MLflow takes at a time
_PATIENCE = 5  # seconds until a server is not there


def require() -> Any:
    """The module `mlflow`, told to report to nobody."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # folders are what mlflow-skinny has without a server
    try:
        return import_module("mlflow")
    except ImportError as error:
        raise ConfigError(
            f"Logging to MLflow needs it, and it cannot be imported ({error}).\n  pip install 'recleak[mlflow]'"
        ) from error


def log(findings: Findings, folder: Path, uri: str) -> str:
    """Log the findings of a run directory; returns the id of the audit's run in MLflow."""
    mlflow = require()
    try:
        return _logged(mlflow, findings, folder, uri)
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise RecleakError(
            f"{without_password(uri)}: MLflow could not be written to ({_reason(error)}).\n"
            f"  The findings are in {folder}. Give a server (http://...), a folder (file:...) or, with all of mlflow "
            "installed, a database; the same command goes on."
        ) from error


def check(uri: str) -> None:
    """An error if MLflow cannot be asked at an address: before hours of work, and within seconds."""
    mlflow = require()
    hasty = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(_PATIENCE), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    before = {name: os.environ.get(name) for name in hasty}
    os.environ.update(hasty)
    try:
        mlflow.MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    except Exception as error:  # of MLflow, of what it needs for this kind of address, of the network
        raise ConfigError(
            f"--mlflow {without_password(uri)}: MLflow cannot be asked there ({_reason(error)}).\n  Nothing was run. "
            "Start the server or mend the address: http://HOST:5000, a folder (file:mlruns) or, with all of mlflow "
            "installed, a database."
        ) from error
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _reason(error: BaseException) -> str:
    """The first line, without passwords."""
    return without_password(str(error).strip().partition("\n")[0])[:300] or type(error).__name__


def _logged(mlflow: Any, findings: Findings, folder: Path, uri: str) -> str:
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(EXPERIMENT)
    where = client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
    digest = hashlib.sha256((folder / "findings.json").read_bytes()).hexdigest()
    same = client.search_runs([where], f"tags.`{_TAG}` = '{digest}' and attributes.status = 'FINISHED'")
    if same:
        return str(same[0].info.run_id)
    about = findings.about
    tags = {_TAG: digest, "recleak.version": about["recleak"], "recleak.command": without_password(about["command"])}
    audit = str(client.create_run(where, run_name=about["title"] or folder.name, tags=tags).info.run_id)
    try:
        for place, system in enumerate(about["systems"]):
            labels = {name: system[name] for name in SYSTEM}
            name = " ".join(dict.fromkeys(labels.values()))
            run = client.create_run(
                where, run_name=name, tags={"mlflow.parentRunId": audit, "recleak.system": str(place)}
            )
            for key, value in {**labels, "text": system["text"], **_settings(about, system)}.items():
                client.log_param(run.info.run_id, key, value)
            _log_metrics(mlflow, client, run.info.run_id, dict(metrics(findings, labels)))
            client.set_terminated(run.info.run_id)
        for path in (folder / "report.html", folder / "findings.json"):
            if path.exists():
                client.log_artifact(audit, str(path))
    except BaseException:
        client.set_terminated(audit, "FAILED")
        raise
    client.set_terminated(audit)
    return audit


def _settings(about: Mapping[str, Any], system: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for all systems alike, and the data."""
    print_ = about.get("fingerprints", {}).get(system["data"], "")
    return {"fingerprint": print_, "level": about["level"], "self_test": about["self_test"]}


def metrics(findings: Findings, labels: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Names and values of one system; what was not measured is left out."""

    def rows(table: pl.DataFrame) -> list[dict[str, Any]]:
        return table.filter(*(pl.col(name) == value for name, value in labels.items())).to_dicts()

    for row in rows(findings.scores):
        yield from _interval(row, row["question"], row["attack"], row["metric"])
    for row in rows(findings.verdicts):
        yield from _interval(row, row["question"], "strongest auc")
        yield from _interval(row, row["question"], "strongest null auc", prefix="null_")
        excess = {"value": row["excess"], "low": row["excess_low"], "high": row["excess_high"]}
        yield from _interval(excess, row["question"], "excess")
    for row in rows(findings.utility):
        yield from _interval(row, "utility", row["recommender"], row["metric"])
    for row in rows(findings.ledger):
        values = {"value": row["composed"], "low": row["at_least"], "high": None}
        yield from _interval(values, "epsilon", row["mechanism"] or "none")


def _interval(row: Mapping[str, Any], *parts: str, prefix: str = "") -> Iterator[tuple[str, float]]:
    name = "/".join(_clean(part) for part in parts)
    for key, end in (("value", ""), ("low", ".low"), ("high", ".high")):
        value = row.get(f"{prefix}{key}")
        if value is not None and isfinite(value):
            yield name + end, float(value)


def _clean(part: str) -> str:
    """A part of a name with letters that MLflow takes.

    >>> _clean("tpr@0.1%"), _clean("lists/history, bayes")
    ('tpr at 0.1 percent', 'lists-history- bayes')
    """
    return re.sub(r"[^\w .-]", "-", part.replace("@", " at ").replace("%", " percent")).strip(" .") or "-"


def _log_metrics(mlflow: Any, client: Any, run: str, values: Mapping[str, float]) -> None:
    now = int(time.time() * 1000)
    every = [mlflow.entities.Metric(name, value, now, 0) for name, value in values.items()]
    for start in range(0, len(every), _MOST):
        client.log_batch(run, metrics=every[start : start + _MOST])
