"""Every command as a user runs it; errors without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recleak import __version__, cli, terminal
from recleak.data import catalog, store

COMMANDS = [
    [],
    ["audit"],
    ["report"],
    ["compare"],
    ["schema"],
    ["doctor"],
    ["data"],
    *[["data", each] for each in ("list", "get", "describe", "convert", "synthesize")],
]
QUICK = ("--model", "mf", "--factors", "4", "--rounds", "1", "--epochs", "1")
TABLE = "who,what,stars,when\n" + "".join(f"u{n % 7},i{n % 5},{1 + n % 5},{1000 + n}\n" for n in range(70))
PEOPLE = "who,age,city\n" + "".join(f"u{n},{20 + n},{'ab'[n % 2]}\n" for n in range(7))


def run(*words: str, code: int = 0) -> None:
    got: object = 0
    try:
        cli.main(list(words))
    except SystemExit as end:
        got = end.code or 0
    assert got == code


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "people.csv").write_text(PEOPLE)
    path = tmp_path / "log.csv"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(*command, "--help")
    shown = capsys.readouterr().out
    assert "Usage: recleak" in shown
    assert "Traceback" not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    run("--version")
    assert __version__ in capsys.readouterr().out


def test_describe_a_table_of_ones_own(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["--user", "who", "--item", "what", "--rating", "stars", "--time", "when"]
    people = ["--users", str(table.parent / "people.csv"), "--user-id", "who"]
    run("data", "describe", str(table), *columns, *people, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["users"], facts["items"], facts["rows"]) == (7, 5, 70)
    assert facts["attributes"]["age"]["kind"] == "continuous"
    assert facts["attributes"]["city"]["classes"] == {"a": 4, "b": 3}
    run("data", "describe", str(table), *columns, *people, "--attribute", "age:categorical")
    shown = capsys.readouterr().out
    assert "age (7 classes" in shown
    assert "city" not in shown


def test_convert_and_open_again(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "convert", str(table), "--user", "who", "--item", "what", "--to", str(tmp_path / "out"))
    assert "7 users, 5 items, 70 rows" in capsys.readouterr().out.replace("\n", " ")
    assert len(store.load(tmp_path / "out")) == 70
    run("data", "describe", str(tmp_path / "out"))
    assert "interactions" in capsys.readouterr().out


def test_synthesize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--users", "60", "--items", "80", "--mean-activity", "25"]
    run("data", "synthesize", "--to", str(tmp_path / "made"), *size, "--seed", "3", "--coupling", "1")
    made = store.load(tmp_path / "made")
    assert (made.n_users, made.n_items) == (60, 80)
    run("data", "synthesize", "--to", str(tmp_path / "no"), "--coupling", "2", code=2)
    assert "Give a number from 0 to 1" in capsys.readouterr().err


def test_list_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "list")
    assert "ml-100k" in capsys.readouterr().out
    run("data", "list", "--json")
    assert {"name", "presets", "folder"} <= set(json.loads(capsys.readouterr().out)[0])
    run("doctor")
    assert "torch" in capsys.readouterr().out
    run("doctor", "--json")
    assert json.loads(capsys.readouterr().out)["recleak"] == __version__


def test_doctor_tells_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECLEAK_DATA", str(tmp_path))
    monkeypatch.setenv("RECLEAK_CACHE", str(tmp_path))
    run("doctor")
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "recleak data get ml-100k" in shown
    assert "tianchi.aliyun.com" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "describe", "ml-100"], "Did you mean 'ml-100k'?"),
        (["data", "describe", "ml-100k", "--preset", "imai"], "Did you mean 'imia'?"),
        (["data", "describe", "synthetic", "--preset", "imia"], "Unknown preset of synthetic"),
        (["data", "get", "nothing"], "Unknown data set 'nothing'"),
        (["data", "describe", "TABLE"], "cannot tell which column is the user"),
        (["data", "describe", "TABLE", "--user", "whom", "--item", "what"], "no column 'whom'"),
        (
            ["data", "describe", "TABLE", "--user", "who", "--item", "what", "--attribute", "age:odd"],
            "expected categorical",
        ),
        (
            ["data", "describe", "TABLE", "--user", "who", "--item", "what", "--plot", "picture.jpg"],
            "cannot draw a .jpg",
        ),
        (["data", "describe", "FOLDER"], "no known data set in this folder"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"TABLE": str(table), "FOLDER": str(tmp_path / "empty")}
    run(*[places.get(word, word) for word in words], code=2)
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_terms_are_shown_and_nobody_there_means_no(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RECLEAK_DATA"}
    environment["RECLEAK_CACHE"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "recleak", "data", "get", "ml-1m"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no redistribution" in done.stderr.replace("\n", " ")
    assert "--accept-terms" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_with_markup_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log[red].csv"
    log.write_text("user,item\n[red]1,a\n[/red]2,b\n")
    (tmp_path / "people.csv").write_text("user,[bold]kind\n[red]1,[/bold]x\n[/red]2,[green]y\n")
    run("data", "describe", str(log), "--users", str(tmp_path / "people.csv"))
    run(
        "train",
        "--model",
        "mf",
        "--factors",
        "4",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "[bold]run"),
    )
    shown = capsys.readouterr().out
    assert "\n[bold]kind (2 classes" in shown
    assert "[/bold]x" in shown
    assert "log[red].csv" in shown
    assert "[bold]run/result.json" in shown
    assert "\\[" not in shown


@pytest.mark.heavy
def test_audit_shows_what_the_reader_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"u{n % 20},i{n // 20},{n}" for n in range(480)]
    (tmp_path / "dirty[x].csv").write_text("\n".join(["user,item,time", *rows[:100], "u1,i3", *rows[100:]]) + "\n")
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(
        f"data = {{ name = {json.dumps(str(tmp_path / 'dirty[x].csv'))}, candidates = 10 }}\n"
        'model = { use = "mf", factors = 4 }\nattacks = ["k-means"]\n'
        'protocol = { use = "federated", rounds = 2, clients_per_round = 10 }\n'
    )
    run("audit", str(experiment), "--workers", "1", "--out", str(tmp_path / "run"))
    seen = capsys.readouterr()
    assert "dirty[x].csv, line 102: rows dropped; the first: 2 fields instead of 3" in seen.err
    assert "20 users have fewer than 10 candidates" in seen.err
    notes = json.loads((tmp_path / "run" / "findings.json").read_text())["about"]["notes"]
    assert any("line 102" in note for note in notes)


def test_a_narrow_terminal_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal.out, "_width", 40)
        run("train", *QUICK, "--out", str(tmp_path / "run"))
        run("data", "describe", "synthetic")
    shown = capsys.readouterr().out
    assert "MostPop Hit@10 0." in shown
    assert "…" not in shown.split("fingerprint")[0]


@pytest.mark.heavy
def test_describe_json_has_the_papers_counts_and_what_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "describe", "synthetic", "--json", "--predict")
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == "synthetic"
    told = facts["told_from_interactions"]
    assert set(told) == {"gender", "age", "occupation", "community"}
    assert told["gender"]["low"] < told["gender"]["auc"] < told["gender"]["high"]
    if catalog.locate("ml-100k") is not None:
        run("data", "describe", "ml-100k", "--preset", "gerai", "--json")
        assert json.loads(capsys.readouterr().out)["paper"]["rows"] == 10_000


@pytest.mark.parametrize(
    "words",
    [
        ["data", "convert", "synthetic", "--to", "FILE"],
        ["data", "synthesize", "--to", "FILE/below"],
        ["audit", "--out", "FILE"],
        ["data", "describe", "synthetic", "--plot", "FILE/picture.png"],
    ],
)
def test_a_place_that_cannot_be_written_is_no_traceback(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("mine")
    run(*[word.replace("FILE", str(tmp_path / "taken")) for word in words], code=2)
    assert str(tmp_path / "taken") in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_terminal_without_the_characters_shows_question_marks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recleak", "data", "describe", "synthetic"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gender (2 classes" in done.stdout
