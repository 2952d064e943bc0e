"""The example with a SuperLink and SuperNodes of its own, as separate processes, and the audit of its recording.

`make test-flower` runs it by itself: Flower gives a process half a minute to start, which a busy machine may not keep.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recleak.cli import app
from recleak.protocols.recorded import survey
from recleak.recording import replay
from recleak.wire import Aggregate, Broadcast, Upload

EXAMPLE = Path(__file__).parent.parent / "examples" / "flower"
APART = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def loopback_only() -> list[str]:
    """What a command is preceded by so that it has no network but loopback; nothing where that is not possible."""
    if shutil.which("unshare") is None or subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        return []
    return APART


def run(folder: Path, *arguments: str) -> None:
    """The example; Flower's switches for traffic are its own, not this test's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    command = [*loopback_only(), sys.executable, str(EXAMPLE / "run.py"), str(folder), *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=600)
    logs = "".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted((folder / "logs").glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"


def audited(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The verdict of the audit that the example tells of."""
    words = ["audit", str(EXAMPLE / "audit.toml"), "--recording", str(folder / "recording")]
    words += ["--interactions", str(folder / "interactions.csv"), "--out", str(folder / "audit"), "--workers", "1"]
    app([*words, "--json"], result_action="return_value")
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    return dict(verdict)


@pytest.mark.flower
def test_the_example_runs_and_its_recording_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    recording = tmp_path / "recording"
    found = survey(recording)
    assert (found.rounds, found.vantage, found.complete) == (2, "Server", True)
    assert sorted(found.first) == list(range(10))
    messages = list(replay(recording))
    assert [type(each) for each in messages] == [Broadcast, Upload, Aggregate] * 2
    assert all(each.update.client.tolist() == list(range(10)) for each in messages if isinstance(each, Upload))
    assert all("user" not in each.update.values for each in messages if isinstance(each, Upload))
    verdict = audited(tmp_path, capsys)
    assert verdict["question"] == "membership"
    assert verdict["value"] > 0.8
    assert verdict["low"] > verdict["null_value"]
    assert (tmp_path / "audit" / "report.html").exists()


@pytest.mark.flower
def test_cohorts_that_send_sums_are_recorded_and_audited_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "sums", "1")
    found = survey(tmp_path / "recording")
    assert (found.rounds, found.vantage) == (1, "Aggregator")
    messages = list(replay(tmp_path / "recording"))
    assert [type(each) for each in messages] == [Broadcast, Aggregate, Aggregate]
    sums = [sorted(each.client.tolist()) for each in messages if isinstance(each, Aggregate)]
    assert sorted(sums) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    verdict = audited(tmp_path, capsys)
    assert verdict["attack"] in ("alignment-of-sums", "rehearsed-sums")
    assert 0.5 < verdict["value"] < 0.95  # of five users together
    assert 0.5 < verdict["null_value"] < 0.95
