"""Audits of plain outputs: lists from files, column errors, nulls beside, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recleak.cli import app
from recleak.cli_audit import Outputs, _name, _named
from recleak.data import store
from recleak.data.columns import read_lists
from recleak.data.synthetic import Synthetic
from recleak.errors import ConfigError, DataError, RecleakError
from recleak.experiment import experiment
from recleak.protocols.published import Published
from recleak.published import experiment_of
from recleak.recording import Recorder
from recleak.runs import audit_run
from recleak.wire import Broadcast, Message, Recommendations, Server


class Kept:
    """A tap that keeps lists."""

    def __init__(self) -> None:
        self.lists: list[Recommendations] = []

    def receive(self, message: Message) -> None:
        assert isinstance(message, Recommendations)
        self.lists.append(message)

    def close(self) -> None: ...


def write(folder: Path, **tables: str) -> list[Path]:
    files = []
    for name, text in tables.items():
        files.append(folder / f"{name}.csv")
        files[-1].write_text(text, encoding="utf-8")
    return files


# --- reading ------------------------------------------------------------------------------------------------------


def test_lists_are_ordered_by_rank_by_score_or_by_row(tmp_path: Path) -> None:
    rank, score, rows = write(
        tmp_path,
        rank="user,item,rank\nb,y,2\na,x,1\nb,x,1\n",
        score="user_id;item_id;score\nb;y;0.5\na;x;1\nb;x;0.9\n",
        rows="user,item\nb,x\na,x\nb,y\n",
    )
    for file in (rank, score, rows):
        table, notes = read_lists(file)
        assert table.rows() == [("a", "x", 0, 0), ("b", "x", 0, 0), ("b", "y", 0, 1)], file
        assert notes == []


def test_sessions_are_kept_apart_and_repeats_are_counted(tmp_path: Path) -> None:
    (file,) = write(tmp_path, recs="user,item,session\na,x,1\na,x,2\na,y,2\na,x,2\n")
    table, notes = read_lists(file)
    assert table.rows() == [("a", "x", 1, 0), ("a", "x", 2, 0), ("a", "y", 2, 1)]
    assert [note.count for note in notes] == [1]


SIXTY = "user,item\n" + "".join(f"{user},x\n" for user in range(60))


@pytest.mark.parametrize(
    ("recs", "users", "message"),
    [
        ("who,item\na,x\n", "user,gender\na,f\n", "which column is the user; there is .'who', 'item'."),
        ("user,thing\na,x\n", "user,gender\na,f\n", "which column is the item"),
        ("user,item\na,x\n", "name,gender\na,f\n", "which column is the user; there is .'name', 'gender'."),
        ("user,item\na,x\n", "user,income\na,3\n", r"inferred \(income: known of 1 users"),
        ("user,item\na,x\n", "user,gender\na,f\n", r"inferred \(gender: known of 1 users\), .*at least 20"),
        (SIXTY, "user,zip\n" + "".join(f"{u},z{u}\n" for u in range(60)), "60 values for 60 users"),
        (SIXTY, "user,gender\n" + "".join(f"{u},f\n" for u in range(60)), "the same for all users"),
    ],
)
def test_columns_that_are_missing_are_named(tmp_path: Path, recs: str, users: str, message: str) -> None:
    files = write(tmp_path, recs=recs, users=users)
    with pytest.raises(RecleakError, match=message):
        experiment_of(files[0], files[1], None, tmp_path / "run")


def test_an_attribute_that_is_not_there_is_named(tmp_path: Path) -> None:
    files = write(tmp_path, recs="user,item\na,x\n", users="user,gender\na,f\n")
    with pytest.raises(RecleakError, match=r"gendre.*gender"):
        experiment_of(files[0], files[1], None, tmp_path / "run", attributes=["gendre"])


# --- the lists on the wire ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists that tell the gender: women are shown even items, and men odd ones, mostly."""
    folder = tmp_path_factory.mktemp("files")
    made = Synthetic(n_users=240, n_items=40, mean_activity=10, min_activity=5, coupling=0.0).generate()
    female = (made.users["gender"] == made.users["gender"].unique().sort()[0]).to_numpy()
    rng = np.random.default_rng(0)
    rows = []
    for user, name in enumerate(made.users["id"].to_list()):
        taste = rng.uniform(size=40) + 0.5 * (np.arange(40) % 2 == (0 if female[user] else 1))
        rows += [
            {"user": name, "item": str(made.items["id"][int(item)]), "rank": place}
            for place, item in enumerate(np.argsort(-taste)[:5], start=1)
        ]
    pl.DataFrame(rows).write_csv(folder / "recs.csv")
    made.users.rename({"id": "user"}).select("user", "gender").write_csv(folder / "users.csv")
    ids = {"user": made.users["id"][made.user], "item": made.items["id"][made.item]}
    pl.DataFrame(ids).write_csv(folder / "train.csv")
    return folder


def test_what_is_sent_is_what_the_file_says(files: Path, tmp_path: Path) -> None:
    table = experiment_of(files / "recs.csv", files / "users.csv", files / "train.csv", tmp_path)
    data = store.load(Path(table["data"]["name"]))
    settings = {name: value for name, value in table["protocol"].items() if name not in ("use", "name")}
    tap = Kept()
    Published(**settings).send(data, [tap])  # type: ignore[list-item]
    (message,) = tap.lists
    given = pl.read_csv(files / "recs.csv", schema_overrides={"user": pl.String, "item": pl.String})
    for user, items in zip(message.user.tolist(), message.item.tolist(), strict=True):
        mine = given.filter(pl.col("user") == str(data.users["id"][user])).sort("rank")["item"].to_list()
        assert [str(data.items["id"][item]) for item in items] == mine
    assert len(data) == pl.read_csv(files / "train.csv").height  # the history, and no row of a list


@pytest.mark.heavy
def test_a_leak_is_found_beside_its_nulls_and_chance_where_there_is_none(files: Path, tmp_path: Path) -> None:
    table = experiment_of(files / "recs.csv", files / "users.csv", files / "train.csv", tmp_path / "run")
    findings = audit_run(experiment(table), tmp_path / "run", command="test")
    (verdict,) = findings.verdicts.to_dicts()
    assert verdict["verdict"] == "leaks"
    assert verdict["value"] > 0.9
    scores = {(row["attack"], row["metric"]): row for row in findings.scores.to_dicts()}
    null = scores["from-history", "auc"]
    assert null["low"] <= 0.55
    assert scores["majority-of-audience", "auc"]["value"] == 0.5
    assert all(row["low"] <= row["value"] <= row["high"] for row in scores.values() if row["value"] is not None)
    shuffled = audit_run(experiment({**table, "shuffle_labels": True}), tmp_path / "run", command="test")
    (chance,) = shuffled.verdicts.to_dicts()
    assert chance["low"] <= 0.5 <= chance["high"]


@pytest.mark.heavy
def test_the_command_line(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "--recommendations", str(files / "recs.csv"), "--users", str(files / "users.csv")]
    out = ["--out", str(tmp_path / "run"), "--workers", "1"]
    app([*arguments, *out, "--json"], result_action="return_value")
    found = json.loads(capsys.readouterr().out)
    assert found["verdicts"][0]["question"] == "gender"
    assert found["verdicts"][0]["null"] == "majority-of-audience"  # no history was given
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(SystemExit):
        app([*arguments, *out, "--fail-if", "gender.auc > 0.6"], result_action="return_value")
    with pytest.raises(ConfigError, match=r"Got --recommendations, expected .* --users"):
        app([*arguments[:3], *out], result_action="return_value")


def test_nothing_is_written_behind_a_link_or_into_a_folder_of_something_else(files: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "given").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for name, message in {"linked": "a link", "photos": "photos holds other things"}.items():
        with pytest.raises(RecleakError, match=message):
            experiment_of(files / "recs.csv", files / "users.csv", None, tmp_path / name)
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert [each.name for each in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_nothing_is_written_into_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(Server(), tmp_path / "runs" / "seen")
    recorder.receive(Broadcast(0, {}))
    recorder.close()
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    for out in ([], ["--out", "runs/seen/run"]):
        with pytest.raises(ConfigError, match=r"which is in the recording runs/seen.*\n.*--out"):
            app(["audit", "--recording", "runs/seen", "--interactions", "x.csv", *out], result_action="return_value")
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
    monkeypatch.chdir(tmp_path / "runs" / "seen")
    for typed, name in ((".", "seen"), ("..", "runs"), ("messages", "messages")):
        assert _name(None, Outputs(recording=Path(typed))) == name
        assert _named(Path(typed)).name == name


def test_an_option_that_does_not_go_with_an_experiment_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('title = "mine"')
    with pytest.raises(ConfigError, match=r"my.toml and --attribute, expected one of them: this goes with outputs"):
        app(["audit", str(tmp_path / "my.toml"), "--attribute", "gender"], result_action="return_value")
    with pytest.raises(ConfigError, match=r"my.toml and --users, --known, expected one of them: these go with"):
        app(["audit", str(tmp_path / "my.toml"), "--users", "x", "--known", "0.2"], result_action="return_value")
    with pytest.raises(ConfigError, match="Got --attribute, expected one of --recommendations"):
        app(["audit", "--attribute", "gender"], result_action="return_value")


def test_lists_that_do_not_fit_the_data_are_refused(files: Path, tmp_path: Path) -> None:
    table = experiment_of(files / "recs.csv", files / "users.csv", None, tmp_path)
    data = store.load(Path(table["data"]["name"]))
    fewer = data.restrict(data.user < 5, "a test")
    with pytest.raises(DataError, match="the data does not have"):
        Published(table["protocol"]["lists"]).users(fewer)
    with pytest.raises(ConfigError, match="no such file"):
        Published(str(tmp_path / "gone.parquet")).users(data)
