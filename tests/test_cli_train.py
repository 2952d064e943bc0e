"""`recleak train` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from recleak import cli, terminal
from recleak.cli_train import MODELS, TrainingOptions
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.recording import read_manifest
from recleak.training.aggregate import Aggregation

QUICK = ["--rounds", "3", "--clients-per-round", "9", "--epochs", "1", "--factors", "4"]


def run(*words: str, code: int = 0) -> None:
    got: object = 0
    try:
        cli.main(list(words))
    except SystemExit as end:
        got = end.code or 0
    assert got == code


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    store.save(Synthetic(n_users=60, n_items=80, mean_activity=25).generate(), folder, name="small")
    return str(folder)


def test_the_choices_are_those_of_the_library() -> None:
    hints = get_type_hints(TrainingOptions)
    assert get_args(hints["aggregation"]) == get_args(Aggregation)
    assert get_args(hints["model"]) == tuple(MODELS)


def test_trains_prints_a_table_and_writes_the_result(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", small, *QUICK, "--out", str(tmp_path / "[bold]run")]
    run(*words)
    seen = capsys.readouterr()
    assert all(word in seen.out for word in ("chance", "MostPop", "ItemKNN", "ncf", "Hit@10", "NDCG@10", "clients/s"))
    assert "[bold]run/result.json" in seen.out
    assert seen.err == ""  # nobody looks, so there is no bar
    result = json.loads((tmp_path / "[bold]run" / "result.json").read_text())
    assert [row["model"] for row in result["models"]] == ["chance", "MostPop", "ItemKNN", "ncf"]
    assert (result["rounds"], len(result["loss"]), result["clients"]) == (3, 3, [9, 9, 9])
    run(*words, "--json")
    again = json.loads(capsys.readouterr().out)
    assert again["rounds_of_an_earlier_call"] == 3
    assert [row["metrics"] for row in again["models"]] == [row["metrics"] for row in result["models"]]
    words[words.index("3")] = "4"
    run(*words)
    assert "1 rounds after 3 of an earlier call" in capsys.readouterr().out
    run(*words, "--seed", "2", code=2)
    assert "seed was 0, now 2" in capsys.readouterr().err


@pytest.mark.parametrize("model", MODELS)
def test_every_model(small: str, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "--data", small, *QUICK, "--model", model, "--out", str(tmp_path), "--negatives-eval", "20")
    assert "20 sampled" in capsys.readouterr().out


@pytest.mark.parametrize("vantage", ["server", "aggregator"])
def test_options(small: str, tmp_path: Path, vantage: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--optimizer", "sgd", "--learning-rate", "0.1", "--aggregation", "weighted", "--batch-size", "16"]
    words += ["--clip", "1", "--noise", "0.01", "--order", "random", "--seed", "3", "--all-clients"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal.out, "_width", 60)
        run("train", "--data", small, *QUICK, *words, "--record", vantage, "--out", str(tmp_path))
    seen = capsys.readouterr()
    assert "ncf NDCG@10 0." in seen.out
    assert "gives no guarantee" in seen.err
    assert f"Recording: {tmp_path / 'recording'}" in seen.out
    manifest = read_manifest(tmp_path / "recording")
    assert manifest.complete
    assert manifest.messages == (9 if vantage == "server" else 6)
    assert json.loads((tmp_path / "result.json").read_text())["clients"] == [60] * 3


@pytest.mark.heavy
def test_worker_processes(small: str, tmp_path: Path) -> None:
    for name, words in (("one", []), ("two", ["--workers", "2"])):
        run("train", "--data", small, *QUICK, *words, "--out", str(tmp_path / name))
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert one["loss"] == two["loss"]
    assert one["models"][-1]["metrics"] == two["models"][-1]["metrics"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "-1"], "rounds is -1, expected at least 0"),
        (["--epochs", "0"], "epochs is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--clients-per-round", "61"], "expected at most 60"),
        (["--learning-rate", "-1"], "expected a finite number"),
        (["--clip", "0"], "Got bound=0.0"),
        (["--noise", "-1"], "Got a noise scale of -1.0"),
        (["--workers", "0"], "processes is 0"),
        (["--negatives-eval", "0"], "--negatives-eval 0: expected at least 1"),
        (["--factors", "0"], "--factors 0"),
        (["--optimizer", "sgd", "--learning-rate", "1e20", "--aggregation", "sum"], "Lower the learning rate"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--rounds": "4", "--clients-per-round": "9", **dict(zip(words[::2], words[1::2], strict=True))}
    run("train", "--data", small, "--out", str(tmp_path), *[word for pair in given.items() for word in pair], code=2)
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_a_place_that_cannot_be_written(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("mine")
    run("train", "--data", small, *QUICK, "--out", str(tmp_path / "taken"), code=2)
    assert str(tmp_path / "taken") in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    run("train", "--data", small, *QUICK, "--out", str(tmp_path), code=2)
    assert "holds other things (mine.txt)" in capsys.readouterr().err


@pytest.mark.heavy
def test_ctrl_c_and_on(small: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recleak", "train", "--data", small, "--clients-per-round", "9", "--out"]
    command += [str(tmp_path), "--rounds"]
    with subprocess.Popen([*command, "90000"], stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "run" / "clients" / "journal").exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "of 90,000 rounds;" in shown
    assert "Run it again with the same settings to continue." in shown
    assert "Traceback" not in shown


def test_torch_is_not_imported_before_a_command_needs_it() -> None:
    code = "import sys, recleak.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
