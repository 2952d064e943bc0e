"""`recleak reproduce`: papers as data, runs that continue, intervals, verdicts, and what is printed and written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recleak import cli, terminal
from recleak.data.catalog import CATALOG
from recleak.errors import ConfigError, NotFoundError, RecleakError
from recleak.machine import cores, kept_to, shares
from recleak.papers import base
from recleak.papers.base import Claim, Comparison, Paper, Point, Verdict
from recleak.papers.cells_file import as_json
from recleak.papers.render import Report, counts, sections, write_markdown
from recleak.papers.reproduce import Selection, plan, results_of, store_of
from recleak.papers.store import Judged, Ours, Question, Results, Store, StoreError

PAPER = """
name = "fake"
title = "A paper"
runner = "fake_runner:measure"

[[variants]]
name = "as-written"
text = "The text."
[[variants]]
name = "as-coded"
text = "The code."

[[tables]]
id = "1"
title = "Utility | all"
name = "{model}/{data}"
ask = { measure = "utility" }
metric = "hit"
columns = [{ label = "A", run = { data = "a" } }, { label = "B", run = { data = "b" } }]
rows = [
  { label = "small", run = { model = "s", strength = 0 }, published = [0.5, "-"] },
  { label = "large", run = { model = "l", strength = 0 } },
]

[[tables]]
id = "2"
title = "Attack"
headline = true
name = "{model}/{data}/{attack}"
metric = "f1"
columns = [{ label = "A", run = { data = "a" } }, { label = "B", run = { data = "b" } }]
rows = [
  { label = "small", run = { model = "s", strength = 0.0 }, ask = { attack = "x" }, published = [0.8, 0.7] },
  { label = "large", run = { model = "l", strength = 0.0 }, ask = { attack = "x" }, published = [0.3, 0.9] },
]

[[tables]]
id = "3"
title = "Ratio"
[[tables.cells]]
id = "r"
row = "ratio"
column = "s against l"
ratio = ["2/s/a/x", "2/l/a/x", "1/s/a", "1/l/a"]
published = 2.0

[[figures]]
id = "fig1"
title = "Curve"
[[figures.cells]]
id = "c"
row = "small"
column = "A"
run = { model = "s", data = "a", strength = 0.0 }
ask = { attack = "x" }
series = "curve"

[[claims]]
text = "Small leaks more."
where = "1"
for_each = { data = ["a", "b"] }
holds_if = [["2/s/{data}/x", ">", "2/l/{data}/x"]]

[[claims]]
text = "Small leaks at all."
where = "2"
holds_if = [["2/s/a/x", ">", 0.1]]
"""

RUNNER = """
import pathlib, time
import numpy as np
from recleak.errors import RecleakError
from recleak.papers.reproduce import Measured

HERE = pathlib.Path(__file__).parent
VERSION = 1

def measure(run, asks, *, variant, seed, threads):
    with open(HERE / "calls.txt", "a") as file:
        words = [run["model"], run["data"], variant, seed, threads, len(asks)]
        file.write(" ".join(map(str, words)) + "\\n")
    trouble = (HERE / "trouble.txt").read_text() if (HERE / "trouble.txt").exists() else ""
    for ask in asks:
        if trouble == f"{run['model']}{run['data']}":
            raise RecleakError("the data is away")
        if trouble == "bug":
            raise ZeroDivisionError("a bug")
        if trouble == "die":
            __import__("os")._exit(7)
        if trouble == "interrupt" and run["data"] == "b":
            raise KeyboardInterrupt
        if trouble == "slow":
            time.sleep(60)
        level = {"s": 0.8, "l": 0.3}[run["model"]]
        values = level + 0.05 * np.random.default_rng(seed).standard_normal(50)
        metrics = {"hit" if "measure" in ask else "f1": values}
        if trouble == "nan":
            values[3] = np.nan
        if trouble == "other":
            metrics = {"g1": values}
        yield Measured(metrics, {"curve": [1, 2, 4]} if "attack" in ask else {}, 1.5)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a paper and its runner."""
    (tmp_path / "fake.toml").write_text(PAPER)
    (tmp_path / "fake_runner.py").write_text(RUNNER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fake_runner", raising=False)
    return tmp_path


def run(folder: Path, *words: str, code: int = 0) -> None:
    got: object = 0
    try:
        cli.main(["reproduce", str(folder / "fake.toml"), "--out", str(folder / "out"), *words])
    except SystemExit as end:
        got = end.code or 0
    assert got == code


def calls(folder: Path) -> list[str]:
    file = folder / "calls.txt"
    return file.read_text().splitlines() if file.exists() else []


def cells(folder: Path, *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    run(folder, "--json", str(folder / "cells.json"), *words, code=code)
    return {cell["cell"]: cell for cell in json.loads((folder / "cells.json").read_text())}


# --- papers as data -----------------------------------------------------------------------------------------------


def test_a_table_is_written_as_it_is_printed(fake: Path) -> None:
    paper = base.load(str(fake / "fake.toml"))
    assert list(paper.cells)[:4] == ["1/s/a", "1/s/b", "1/l/a", "1/l/b"]
    first = paper.cells["1/s/a"]
    assert (first.row, first.column, first.published, first.metric) == ("small", "A", 0.5, "hit")
    assert first.run == {"model": "s", "strength": 0, "data": "a"}
    assert paper.cells["1/s/b"].published is None
    assert paper.cells["1/l/b"].published is None
    assert [cell.run["model"] for cell in paper.needs(paper.cells["3/r"])] == ["s", "l", "s", "l"]


def test_a_row_may_ask_for_something_else_where_columns_ask_for_it(fake: Path) -> None:
    row = '{ label = "null", name = "null/{data}/{attack}", run = { model = "s" }, over = { attack = "guess" } },'
    text = PAPER.replace('{ label = "A", run = { data = "a" } }', '{ label = "A", run = { data = "a" }, ask = ASKED }')
    text = text.replace("ASKED", '{ attack = "x" }').replace("rows = [", f"rows = [\n  {row}")
    (fake / "fake.toml").write_text(text)
    found = base.load(str(fake / "fake.toml")).cells
    assert found["2/null/a/guess"].ask == {"attack": "guess"}
    assert found["2/null/a/guess"].run == {"model": "s", "data": "a"}
    assert not [name for name in found if name.startswith("2/null/b")]  # that column asks for no attack
    assert found["1/null/a/guess"].ask == {"measure": "utility", "attack": "guess"}


def test_some_cells_of_a_table_may_ask_for_something_else_or_not_be(fake: Path) -> None:
    """By what their runs and asks are: a row and a column that are printed cross there all the same."""
    given = 'changes = [{ where = { model = ["l"], data = ["a"] }, ask = { shift = "known" } }, { where = WITHOUT } ]'
    changes = given.replace("WITHOUT", '{ model = ["s"], data = ["b", "c"] }')
    (fake / "fake.toml").write_text(PAPER.replace("rows = [", f"{changes}\nrows = [", 1))
    found = base.load(str(fake / "fake.toml")).cells
    assert found["1/l/a"].ask == {"measure": "utility", "shift": "known"}
    assert {found[name].ask.get("shift") for name in ("1/s/a", "1/l/b")} == {None}
    assert "1/s/b" not in found


def test_data_that_not_everybody_has(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs without data are left out and said, not failed; their cells say so, and are blank."""
    text = PAPER.replace('data = "b"', 'data = "taobao"').replace('"b"', '"taobao"')
    (fake / "fake.toml").write_text('unavailable = ["taobao"]\n' + text)
    run(fake, "--markdown", str(fake / "page.md"))
    assert [line.split()[1] for line in calls(fake)] == ["a", "a"]
    shown = capsys.readouterr()
    assert "taobao: data not available; 2 runs left out." in shown.err
    assert "data not" in shown.out
    page = (fake / "page.md").read_text()
    assert page.count("data not available") == 4
    assert "*0.7000*<br>data not available" in page
    cell = cells(fake)["2/s/taobao/x"]
    assert (cell["ours"], cell["seeds"]) == (None, 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"1/l/a"]', '"1/l/aa"]', "Did you mean '1/l/a'?"),
        ('"2/l/{data}/x"]', '"2/l/{data}/y"]', "(in the claim 'Small leaks more.') '2/l/a/y'. Did you mean '2/l/a/x'?"),
        ('"2/l/{data}/x"]', '"2/l/{dat}/x"]', "expected words of data"),
        ('["2/s/a/x", ">", 0.1]', '["9/s/a/x", ">", 0.1]', "2/..."),
        ('["2/s/a/x", ">", 0.1]', '["2/s/a/x", ">"]', "expected [left, sign, right]"),
        ('["2/s/a/x", ">", 0.1]', '["2/s/a/x", "~", 0.1]', "needs a margin"),
        ('["2/s/a/x", ">", 0.1]', '["2/s/a/x", "=", 0.1]', "Input should be '>', '<' or '~'"),
        ('["2/s/a/x", ">", 0.1]', '["fig1/c", ">", 0.1]', "fig1/c, a series"),
        ('[["2/s/a/x", ">", 0.1]]', '[["2/s/a/x", ">", 0.1]]\nat_least = 2', "expected at most 1"),
        ('ratio = ["2/s/a/x"', 'ratio = ["3/r"', "which is no metric"),
        ('id = "2"', 'id = "1"', "the table '1' twice"),
        ('name = "{model}/{data}/{attack}"', 'name = "{model}"', "the cell '2/s' twice"),
        ('"as-coded"', '"as-written"', "the variant 'as-written' twice"),
        ("[0.8, 0.7]", "[0.8]", "got 1 published numbers for 2 columns"),
        ("headline = true", "headlin = true", "headlin: Extra inputs are not permitted"),
        ('label = "small", run', 'lable = "small", run', "lable"),
        ('series = "curve"', 'series = "curve"\nmetric = "f1"', "got metric and series"),
        ('series = "curve"', "", "got none of metric, series, ratio"),
        ('ask = { attack = "x" }\nseries', "series", "expected `run` and `ask`, or `ratio` instead"),
        ('title = "A paper"', "title = ", "no TOML"),
        ("fake_runner:measure", "no_such_module:measure", "cannot be imported"),
        ("fake_runner:measure", "fake_runner:measur", "expected `module:function`"),
    ],
)
def test_what_is_wrong_with_a_paper(
    fake: Path, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in PAPER
    (fake / "fake.toml").write_text(PAPER.replace(old, new, 1))
    run(fake, code=2)
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "fig2"], "Unknown table 'fig2'. Did you mean 'fig1'?"),
        (["--data", "c"], "Unknown data 'c'. Known: a, b."),
        (["--model", "m"], "Unknown model 'm'. Known: l, s."),
        (["--variant", "as-writen"], "Did you mean 'as-written'?"),
        (["--seeds", "0"], "--seeds 0"),
        (["--workers", "0"], "--workers 0"),
        (["--table", "fig1", "--data", "b"], "no cell fits"),
    ],
)
def test_what_is_wrong_with_a_command(
    fake: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(fake, *words, code=2)
    assert message in capsys.readouterr().err
    assert calls(fake) == []


def test_unknown_papers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", "imai"])
    assert end.value.code == 2
    assert "Unknown paper 'imai'. Did you mean 'imia'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", "not-here.toml"])
    assert end.value.code == 2
    assert "not-here.toml: No such file" in capsys.readouterr().err


# --- running ------------------------------------------------------------------------------------------------------


def test_each_run_once_headlines_first_and_seed_by_seed(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = base.load(str(fake / "fake.toml"))
    results = results_of(paper, fake / "out", None)
    runs = plan(results, Selection().cells(paper), 2)
    order = [(run.seed, run.wanted[0].question.run["model"], run.wanted[0].question.run["data"]) for run in runs]
    assert order == [(seed, model, data) for seed in (0, 1) for model in "sl" for data in "ab"]
    # utility is asked of the same run, 0 being 0.0, and so is the curve
    assert [list(wanted.question.ask) for wanted in runs[0].wanted] == [["attack"], ["measure"]]
    assert runs[0].wanted[0].names == {"f1", "curve"}
    run(fake, "--seeds", "2")
    assert calls(fake) == [f"{model} {data} as-written {seed} {cores()} 2" for seed, model, data in order]
    assert len(list((fake / "out" / "fake").glob("*.json"))) == 16
    assert not list((fake / "out" / "fake").glob("*.partial"))
    seen = capsys.readouterr()
    assert "run 1/8: a s 0.0, seed 0: 0." in seen.err
    run(fake, "--seeds", "2")
    assert len(calls(fake)) == 8
    assert capsys.readouterr().err == ""  # nothing to do, nothing to say
    run(fake, "--variant", "as-coded", "--table", "3")
    assert calls(fake)[8:] == [f"{model} a as-coded 0 {cores()} 2" for model in "sl"]


AGAIN = """
[[tables]]
id = "again"
title = "A number of table 2"
[[tables.cells]]
id = "s/a"
row = "small"
column = "A"
run = { model = "s", data = "a", strength = 0 }
ask = { attack = "x" }
metric = "f1"
"""

NEEDS = """
def needs(run):
    return [({**run, "model": "l"}, {"attack": "x"})] if run["model"] == "s" else []

def hear(run, variant, seed, series):
    with open(HERE / "calls.txt", "a") as file:
        file.write(f"heard {run['model']} {run['data']} {variant} {seed} {series['curve']}\\n")
"""


def test_what_a_run_needs_is_measured_first_and_heard(fake: Path) -> None:
    (fake / "fake_runner.py").write_text(RUNNER + NEEDS)
    run(fake, "--table", "1", "--model", "s", "--seeds", "2")  # asks for nothing of l
    heard = [f"heard l {data} as-written 0 [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0)]" for data in "ab"]
    begun = [f"{model} {data} as-written 0 {cores()} 1" for model in "ls" for data in "ab"]
    first = [*begun[:2], heard[0], begun[2], heard[1], begun[3]]
    assert calls(fake) == first + [line.replace("written 0", "written 1") for line in first]
    run(fake, "--table", "1")  # what is stored is not measured again, and l needs nothing
    assert calls(fake)[12:] == [f"l {data} as-written 0 {cores()} 1" for data in "ab"]
    run(fake, "--table", "2", "--workers", "2")
    later = [line for line in calls(fake)[14:] if line.startswith("heard")]
    assert sorted(later) == heard
    assert len(calls(fake)) == 18


def test_selection(fake: Path) -> None:
    paper = base.load(str(fake / "fake.toml"))
    assert Selection(tables=("2",), data=("b",)).cells(paper) == ["2/s/b/x", "2/l/b/x"]
    assert Selection(data=("b",), models=("s",)).cells(paper) == ["2/s/b/x", "1/s/b"]
    assert Selection(models=("s",)).cells(paper) == ["2/s/a/x", "2/s/b/x", "1/s/a", "1/s/b", "fig1/c"]  # no ratio
    assert "3/r" in Selection(data=("a",)).cells(paper)


def test_an_error_stops_only_its_run_and_the_next_command_goes_on(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "trouble.txt").write_text("sb")
    got = cells(fake, code=1)
    seen = capsys.readouterr()
    assert "error: b s 0.0, seed 0: the data is away" in seen.err
    assert "1 run failed" in seen.err
    assert "Traceback" not in seen.err
    assert got["2/s/b/x"]["ours"] is None
    assert got["2/l/b/x"]["ours"] is not None
    (fake / "trouble.txt").unlink()
    before = {path.name: path.read_bytes() for path in (fake / "out" / "fake").iterdir()}
    got = cells(fake)
    assert calls(fake)[4:] == [f"s b as-written 0 {cores()} 2"]
    assert got["2/s/b/x"]["ours"] is not None
    after = {path.name: path.read_bytes() for path in (fake / "out" / "fake").iterdir()}
    assert before.items() <= after.items()


def test_a_bug_shows_where(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "trouble.txt").write_text("bug")
    run(fake, "--table", "2", code=1)
    seen = capsys.readouterr()
    assert "fake_runner.py" in seen.err
    assert "ZeroDivisionError: a bug" in seen.err
    assert "4 runs failed" in seen.err


@pytest.mark.parametrize(
    ("trouble", "message"), [("nan", "1 values that"), ("other", "got curve, g1, expected also f1")]
)
def test_what_a_runner_may_not_give(fake: Path, trouble: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "trouble.txt").write_text(trouble)
    run(fake, "--table", "2", "--model", "s", code=1)
    assert message in capsys.readouterr().err
    (fake / "trouble.txt").unlink()
    assert cells(fake, "--table", "2", "--model", "s")["2/s/a/x"]["ours"] is not None


def test_a_runner_that_stops_early(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "fake_runner.py").write_text("def measure(run, asks, *, variant, seed, threads):\n    return []\n")
    run(fake, "--table", "3", code=1)
    assert "fewer answers than the 2 asks" in capsys.readouterr().err


def test_interrupts_say_what_is_saved(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "trouble.txt").write_text("interrupt")
    run(fake, code=130)
    assert "what was measured is stored" in capsys.readouterr().err
    (fake / "trouble.txt").unlink()
    run(fake)
    assert [line.split()[:2] for line in calls(fake)] == [["s", "a"], ["s", "b"], ["s", "b"], ["l", "a"], ["l", "b"]]


def test_results_of_other_code_do_not_count(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(fake, "--table", "2")
    (fake / "fake_runner.py").write_text(RUNNER.replace("VERSION = 1", "VERSION = 2"))
    monkeypatch.delitem(sys.modules, "fake_runner")
    assert all(cell["ours"] is None for cell in cells(fake, "--no-run").values())
    assert len(calls(fake)) == 4


def test_a_run_begins_when_what_it_needs_is_stored(fake: Path) -> None:
    """Also side by side: else it would measure that itself, a second time."""
    slow = RUNNER.replace(
        "    for ask in asks:", "    time.sleep(2.0 * (run['model'] == 'l'))\n    for ask in asks:", 1
    )
    (fake / "fake_runner.py").write_text(slow + NEEDS)
    run(fake, "--table", "1", "--data", "a", "--seeds", "2", "--workers", "2")
    for seed in (0, 1):
        begun = [line for line in calls(fake) if f"as-written {seed} " in line]
        assert [line.split()[0] for line in begun] == ["l", "heard", "s"]


def test_cells_of_one_question_show_one_number(fake: Path) -> None:
    """What is known with the most seeds, also where the file of cells has another, or none."""
    (fake / "fake.toml").write_text(PAPER + AGAIN)
    paper = base.load(str(fake / "fake.toml"))
    known = {
        "2/s/a/x": Ours(0.7, 0.6, 0.8, 50, 1),
        "again/s/a": Ours(0.75, 0.7, 0.8, 50, 3),
        "1/s/a": Ours(0.9, seeds=1),
    }
    results = Results(paper, Store(fake / "out"), code=1, variant="as-written", known=known)
    assert results.ours("2/s/a/x") == results.ours("again/s/a") == known["again/s/a"]
    assert results.ours("1/s/a") == known["1/s/a"]  # another question
    assert results.ours("fig1/c") == Ours()  # another name of the same one
    results = Results(paper, Store(fake / "out"), code=1, variant="as-written", known={"2/s/a/x": known["2/s/a/x"]})
    assert results.ours("again/s/a") == known["2/s/a/x"]
    assert not [each for each in plan(results, ["again/s/a", "2/s/a/x"], 1) if each.seed == 0]


@pytest.mark.heavy
def test_what_is_known_is_not_measured_again(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published, page = fake / "known.json", fake / "page.md"
    run(fake, "--seeds", "2", "--json", str(published), "--markdown", str(page))
    first, before = page.read_text(), calls(fake)
    shutil.rmtree(fake / "out")
    again = cells(fake, "--seeds", "2", "--known", str(published), "--markdown", str(page))
    assert calls(fake) == before
    assert page.read_text() == first
    assert list(again.values()) == json.loads(published.read_text())
    cells(fake, "--seeds", "3", "--known", str(published), "--table", "1")
    assert len(calls(fake)) > len(before), "more seeds than are known are measured"
    for text, message in (("nonsense", "no JSON"), ('[{"cell": 1}]', "a cell cannot be read"), (None, "no such file")):
        published.unlink(missing_ok=True)
        if text is not None:
            published.write_text(text)
        run(fake, "--known", str(published), code=2)
        assert message in capsys.readouterr().err


def test_a_run_that_a_variant_does_not_change_is_measured_once(fake: Path) -> None:
    (fake / "fake.toml").write_text(PAPER.replace('text = "The code."', 'text = "The code."\nsame = { model = ["s"] }'))
    published = fake / "known.json"
    first = cells(fake)
    run(fake, "--json", str(published))
    before = calls(fake)
    other = cells(fake, "--variant", "as-coded")
    made = calls(fake)[len(before) :]
    assert sorted(made) == sorted(f"l {data} as-coded 0 {cores()} 2" for data in "ab"), "only the other model"
    assert other["2/s/a/x"]["ours"] == first["2/s/a/x"]["ours"]
    assert other["2/s/a/x"]["variant"] == "as-coded"
    shutil.rmtree(fake / "out")
    known = cells(fake, "--variant", "as-coded", "--known", str(published), "--table", "2", "--no-run")
    assert known["2/s/a/x"]["ours"] == first["2/s/a/x"]["ours"]
    assert known["2/l/a/x"]["ours"] is None, "published of the first variant, which is another run"


def test_a_default_that_is_said_asks_for_the_same_run(fake: Path) -> None:
    unsaid = PAPER.replace('run = { model = "s", strength = 0 }', 'run = { model = "s" }')
    (fake / "fake.toml").write_text(unsaid)
    run(fake, "--table", "1", "--table", "2", "--data", "a", "--model", "s")
    assert len(calls(fake)) == 2, "two runs, as one of the cells says more"
    shutil.rmtree(fake / "out")
    (fake / "calls.txt").unlink()
    (fake / "fake.toml").write_text(unsaid.replace("[[variants]]", "[defaults]\nstrength = 0\n\n[[variants]]", 1))
    found = cells(fake, "--table", "1", "--table", "2", "--data", "a", "--model", "s")
    assert len(calls(fake)) == 1
    assert found["1/s/a"]["ours"] is not None
    assert found["2/s/a/x"]["ours"] is not None


def test_what_other_code_measured_is_not_known(fake: Path) -> None:
    published = fake / "known.json"
    run(fake, "--json", str(published))
    rows = [{**row, "code": 99} for row in json.loads(published.read_text())]
    published.write_text(json.dumps(rows))
    shutil.rmtree(fake / "out")
    before = len(calls(fake))
    run(fake, "--known", str(published))
    assert len(calls(fake)) == 2 * before


def test_workers_give_the_same(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = cells(fake)
    files = {path.name: path.read_bytes() for path in (fake / "out" / "fake").iterdir()}
    (fake / "out").rename(fake / "one")
    (fake / "trouble.txt").write_text("lb")
    cells(fake, "--workers", "2", code=1)
    assert "error: b l 0.0, seed 0: the data is away" in capsys.readouterr().err
    (fake / "trouble.txt").write_text("die")
    run(fake, "--workers", "2", "--seeds", "2", code=1)  # five runs are missing, and each dies alone
    seen = capsys.readouterr().err
    assert seen.count("its process died (exit code 7)") == 5
    assert "5 runs failed" in seen
    (fake / "trouble.txt").unlink()
    assert cells(fake, "--workers", "2") == one
    assert {path.name: path.read_bytes() for path in (fake / "out" / "fake").iterdir()} == files
    assert {int(line.split()[4]) for line in calls(fake)[4:8]} == {len(share) for share in shares(2)}


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (1, [[0, 2, 3, 5, 7]]),
        (2, [[0, 2], [3, 5, 7]]),
        (5, [[0], [2], [3], [5], [7]]),
        (7, [[0], [2], [3], [5], [7], [0], [2]]),
    ],
)
def test_shares_of_cores(monkeypatch: pytest.MonkeyPatch, processes: int, expected: list[list[int]]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 5, 3, 2, 0}, raising=False)
    assert shares(processes) == expected
    assert cores() == 5


def test_shares_where_cores_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert cores() == 4
    with kept_to(shares(2)[1]):
        assert shares(2) == [[0, 1], [2, 3]]


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot choose their cores here")
@pytest.mark.parametrize("all_cores", [True, False])
def test_workers_keep_to_their_cores(fake: Path, all_cores: bool) -> None:
    (fake / "fake_runner.py").write_text(
        RUNNER.replace(
            "seed, threads, len", '"-".join(map(str, sorted(os.sched_getaffinity(0)))), threads, len'
        ).replace("import pathlib", "import os, pathlib")
    )
    before = os.sched_getaffinity(0)
    with kept_to(before if all_cores else {min(before)}):
        expected = shares(2)
        run(fake, "--workers", "2")
        assert shares(2) == expected  # those of this process are as they were
    seen = {tuple(line.split()[3:5]) for line in calls(fake)}
    assert seen == {("-".join(map(str, share)), str(len(share))) for share in expected}


@pytest.mark.heavy
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_reproduction_that_is_killed_takes_its_processes_with_it(fake: Path, how: signal.Signals) -> None:
    (fake / "trouble.txt").write_text("slow")
    (fake / "main.py").write_text("if __name__ == '__main__':\n from recleak import cli\n cli.main()\n")
    command = [sys.executable, str(fake / "main.py"), "reproduce", str(fake / "fake.toml"), "--workers", "2"]
    environment = {**os.environ, "FAKE_OF": str(fake)}
    with subprocess.Popen([*command, "--out", str(fake / "out")], env=environment, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while len(calls(fake)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(how)
        shown = (process.communicate(timeout=30)[1] or b"").decode()
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in shown
    until = time.monotonic() + 20
    while (left := _processes(f"FAKE_OF={fake}")) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def _processes(mark: str) -> list[str]:
    """Those with a word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark in words and state != "Z":
            found.append(folder.name)
    return found


# --- the store ----------------------------------------------------------------------------------------------------

QUESTION = Question("m:f", 0, "v", {"model": "s", "strength": 1}, {"attack": "x"})


def test_the_store_keeps_five_digits_and_knows_its_seeds(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "store")
    assert store.seeds(QUESTION) == []
    for seed in (0, 12):
        store.write(QUESTION, seed, {"f1": np.array([1 / 3, 2 / 30000, 12.3456789])}, {"c": [[1, 0.5], [3, 0.25]]}, 2.0)
    assert store.seeds(QUESTION) == [0, 12]
    got = store.read(QUESTION, 12)
    assert got.metrics["f1"].tolist() == [0.33333, 6.6667e-05, 12.34568]
    assert got.series == {"c": [(1.0, 0.5), (3.0, 0.25)]}
    same = Question("m:f", 0, "v", {"strength": 1.0, "model": "s"}, {"attack": "x"})
    assert store.has(same, 0)
    others = [("m:g", 0, "v"), ("m:f", 1, "v"), ("m:f", 0, "w")]
    assert not any(store.has(Question(*each, QUESTION.run, QUESTION.ask), 0) for each in others)
    assert not store.has(Question("m:f", 0, "v", {**QUESTION.run, "strength": True}, QUESTION.ask), 0)


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', '{"key": {}, "metrics": {}, "series": {}, "seconds": 1}'])
def test_a_file_that_is_something_else(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.write(QUESTION, 0, {"f1": np.ones(3)}, {}, 2.0)
    next(tmp_path.iterdir()).write_text(text)
    with pytest.raises(StoreError, match="Delete it"):
        store.read(QUESTION, 0)


@pytest.mark.parametrize("values", [np.ones((2, 2)), np.ones(0), np.array([1, np.inf])])
def test_unusable_values_are_not_stored(tmp_path: Path, values: Any) -> None:
    with pytest.raises(StoreError, match="expected one number per graded user"):
        Store(tmp_path).write(QUESTION, 0, {"f1": values}, {}, 2.0)
    with pytest.raises(StoreError, match="series"):
        Store(tmp_path).write(QUESTION, 0, {"f1": np.ones(2)}, {"c": [np.nan]}, 2.0)
    assert list(tmp_path.iterdir()) == []


# --- what it adds up to -------------------------------------------------------------------------------------------


def test_cells_are_means_over_users_and_seeds_with_intervals(fake: Path) -> None:
    got = cells(fake, "--seeds", "3")
    drawn = np.array([0.05 * np.random.default_rng(seed).standard_normal(50) for seed in range(3)])
    small = got["2/s/a/x"]
    assert small["ours"] == pytest.approx(0.8 + drawn.mean(), abs=1e-5)
    assert small["low"] < small["ours"] < small["high"]
    assert (small["seeds"], small["users"], small["seconds"], small["published"]) == (3, 50, 4.5, 0.8)
    assert (small["table"], small["metric"], small["variant"], small["code"]) == ("2", "f1", "as-written", 1)
    assert (small["row"], small["column"]) == ("small", "A")
    ratio = got["3/r"]
    assert ratio["ours"] == pytest.approx(1)
    assert ratio["low"] < 1 < ratio["high"]
    assert ratio["metric"] == "ratio"
    assert got["fig1/c"]["series"] == [[0, 1], [1, 2], [2, 4]]
    assert cells(fake, "--no-run", "--seeds", "1")["2/s/a/x"] == small  # over all that is stored


def test_one_number_of_one_seed_has_no_interval(fake: Path) -> None:
    (fake / "fake_runner.py").write_text(RUNNER.replace("standard_normal(50)", "standard_normal(1)"))
    got = cells(fake, "--table", "2")["2/s/a/x"]
    assert (got["low"], got["high"], got["seeds"]) == (None, None, 1)
    paper = base.load(str(fake / "fake.toml"))
    judged = results_of(paper, fake / "out", None).judge(paper.claims[1])
    assert judged.ours == ("within noise",)
    assert cells(fake, "--table", "2", "--seeds", "2")["2/s/a/x"]["low"] is not None


def test_a_ratio_without_cost_is_blank(fake: Path) -> None:
    (fake / "fake_runner.py").write_text(
        RUNNER.replace(
            'metrics = {"hit"', 'values = values if "attack" in ask else np.full(5, 0.4)\n        metrics = {"hit"'
        )
    )
    got = cells(fake)["3/r"]
    assert (got["ours"], got["published"]) == (None, 2.0)


A, B, C = (Ours(value=v, low=v - 0.1, high=v + 0.1) for v in (0.9, 0.5, 0.65))


@pytest.mark.parametrize(
    ("words", "left", "right", "verdict"),
    [
        ([">"], A, B, "holds"),
        (["<"], A, B, "does not hold"),
        ([">"], B, A, "does not hold"),
        (["<"], B, A, "holds"),
        ([">"], A, C, "holds"),
        ([">"], B, C, "within noise"),
        (["<"], B, C, "within noise"),
        ([">", 0.1], A, C, "within noise"),
        ([">", 0.5], A, C, "does not hold"),
        (["<", -0.4], C, B, "holds"),
        (["<", -0.05], A, B, "does not hold"),
        (["~", 0.4], B, C, "holds"),
        (["~", 0.1], B, C, "within noise"),
        (["~", 0.1], A, B, "does not hold"),
        (["~", 0.1], B, A, "does not hold"),
        ([">"], Point(value=1), Point(value=1), "does not hold"),
        (["<"], Point(value=1), Point(value=1), "does not hold"),
        ([">"], A, Point(value=0.7), "holds"),
        ([">"], A, None, "not run"),
        ([">"], None, A, "not run"),
        ([">"], A, Ours(value=0.1), "within noise"),
        ([">"], Ours(value=5, low=2.0, high=float("inf")), B, "holds"),
        ([">"], A, Ours(value=5, low=0.1, high=float("inf")), "within noise"),
    ],
)
def test_verdicts_of_comparisons(words: list[Any], left: Any, right: Any, verdict: Verdict) -> None:
    comparison = Comparison.model_validate(["l", words[0], "r", *words[1:]])
    assert comparison.judge(left, right) == verdict


def test_the_same_users_are_compared_user_by_user(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where users differ much and each of them a little, only the difference tells; else nothing changes."""
    far = """np.random.default_rng(seed).standard_normal(50) + (run["model"] == "s") * 0.1"""
    usual = RUNNER.replace("level + 0.05 * np.random.default_rng(seed).standard_normal(50)", far)
    named = usual.replace('"f1": values}', '"f1": values, "user": np.arange(50.0)}')
    paper = base.load(str(fake / "fake.toml"))

    def judged(runner: str) -> Judged:
        shutil.rmtree(fake / "out", ignore_errors=True)
        (fake / "fake_runner.py").write_text(runner)
        sys.modules.pop("fake_runner", None)
        run(fake, "--seeds", "3")
        return results_of(paper, fake / "out", None).judge(paper.claims[0])

    alone, beside = judged(usual), judged(named)
    assert (alone.ours, alone.differences) == (("within noise",) * 2, (None, None))
    assert beside.ours == ("holds", "holds")
    assert [each.value for each in beside.differences if each is not None] == pytest.approx([0.1, 0.1], abs=1e-5)
    assert beside.theirs == alone.theirs  # the paper's numbers have no users
    capsys.readouterr()
    run(fake, "--no-run")
    assert "differences of the same users 0.1000 [" in capsys.readouterr().out.replace("\n", " ")
    files = sorted((fake / "out").rglob("*-2.json"))
    files[0].unlink()  # one seed of one cell: the seeds that both have are compared
    assert results_of(paper, fake / "out", None).judge(paper.claims[0]).ours == ("holds", "holds")
    other = named.replace("np.arange(50.0)", 'np.arange(50.0) + (run["model"] == "s")')
    assert judged(other) == alone  # other users
    short = named.replace("np.arange(50.0)", "np.arange(49.0)")
    assert judged(short) == alone  # an answer that does not say who all its users are


def test_what_is_stored_of_both_is_compared_also_where_more_seeds_are_known(fake: Path) -> None:
    """A table shows what has more seeds; a claim compares the same users in the same seeds."""
    usual = "level + 0.05 * np.random.default_rng(seed).standard_normal(50)"
    far = """np.random.default_rng(seed).standard_normal(50) + (run["model"] == "s") * 0.1"""
    named = RUNNER.replace(usual, far).replace('"f1": values}', '"f1": values, "user": np.arange(50.0)}')
    (fake / "fake_runner.py").write_text(named)
    paper = base.load(str(fake / "fake.toml"))
    five = Ours(0.2, -0.2, 0.6, 50, 5)

    def judged(*known: str) -> Judged:
        given = dict.fromkeys(known, five)
        results = Results(paper, store_of(paper, fake / "out"), code=1, variant="as-written", known=given)
        assert all(results.ours(name) == five for name in known)
        return results.judge(paper.claims[0])

    run(fake)
    one = judged("2/s/a/x")
    assert one.ours == ("holds", "holds")
    assert [each.seeds for each in one.differences if each is not None] == [1, 1]
    assert one.seeds == (1, 1), "as many as were compared"
    both = judged("2/s/a/x", "2/l/a/x")
    assert both.ours == ("within noise", "holds")
    assert both.differences[0] is None, "one seed is no match for five of both"
    assert both.seeds == (5, 1)
    run(fake, "--seeds", "2")
    assert judged("2/s/a/x", "2/l/a/x").seeds == (2, 2)
    name = results_of(paper, fake / "out", None).question(paper.cells["2/l/a/x"]).name
    (fake / "out" / "fake" / f"{name}-1.json").unlink()  # of one cell a single seed: the same where nothing is known
    assert judged().seeds == (1, 2)
    assert judged().ours == ("holds", "holds")
    shutil.rmtree(fake / "out")
    none = judged("2/s/a/x", "2/l/a/x")
    assert none.ours == ("within noise", "not run")
    assert none.seeds == (5, 0)


def test_verdicts_of_claims() -> None:
    def verdict(judged: str, at_least: int | None = None) -> str:
        words: dict[str, Verdict] = {"h": "holds", "d": "does not hold", "n": "within noise", "-": "not run"}
        comparison = Comparison(left="a", sign=">", right=0)
        claim = Claim(text="t", where="w", holds_if=(comparison,) * len(judged), at_least=at_least)
        return claim.verdict([words[each] for each in judged])

    assert verdict("hhh") == "holds"
    assert verdict("hdh") == verdict("hd-") == verdict("hdn") == "does not hold"
    assert verdict("hhn") == "within noise"
    assert verdict("hh-") == verdict("hn-") == "not run"
    assert verdict("hhd", 2) == verdict("hh-", 2) == "holds"
    assert verdict("hdd", 2) == "does not hold"
    assert verdict("hdn", 2) == "within noise"
    assert verdict("hd-", 2) == "not run"
    assert counts(["holds", "does not hold", "not run"]) == "1 of 3 hold, 1 not, 1 not run"


# --- what is shown ------------------------------------------------------------------------------------------------


def test_tables_and_claims_in_the_terminal(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(fake, "--data", "a")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("Table 1: Utility | all", "Table 3: Ratio", "Figure 1: Curve", "0.8000"))
    assert "published; ours; 95 % interval over users; one seed, so run-to-run noise is not in it\n" in shown
    assert "first and last value; 1 seed\n" in shown
    assert "1.00 ▁▃█ 4.00" in shown
    line = "not run: Small leaks more. (1) 1 of 2 hold, 1 not run; in the paper's numbers 1 of 2 hold, 1 not"
    assert line in shown
    assert "holds (one seed): Small leaks at all. (2) 1 of 1 holds; in the paper's numbers 1 of 1 holds" in shown
    run(fake)
    assert "holds (one seed): Small leaks more. (1) 2 of 2 hold" in capsys.readouterr().out
    run(fake, "--seeds", "2", "--data", "a")
    shown = capsys.readouterr().out
    assert "published; ours; 95 % interval over users and seeds; 2 seeds\n" in shown
    assert "holds: Small leaks at all." in shown
    assert "holds (one seed): Small leaks more." in shown  # in b
    run(fake, "--no-run", "--table", "2")
    shown = capsys.readouterr().out
    assert "over users and seeds; 1 to 2 seeds (with one, run-to-run noise is not in it)\n" in shown
    run(fake, "--seeds", "2")
    assert "one" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("judged", "seeds", "at_least", "one"),
    [
        ("hh", (1, 1), None, True),
        ("hh", (2, 1), None, True),
        ("hh", (2, 1), 1, False),  # the other one is not needed
        ("hd", (1, 2), None, False),
        ("hd", (2, 1), None, True),
        ("nn", (2, 1), None, True),
        ("nn", (2, 3), None, False),
        ("h-", (1, 0), None, False),  # no verdict
        ("h-", (1, 0), 1, True),
    ],
)
def test_verdicts_on_one_seed(judged: str, seeds: tuple[int, ...], at_least: int | None, one: bool) -> None:
    words: dict[str, Verdict] = {"h": "holds", "d": "does not hold", "n": "within noise", "-": "not run"}
    comparisons = tuple(Comparison(left="a", sign=">", right=0.0) for _ in judged)
    claim = Claim(text="t", where="1", holds_if=comparisons, at_least=at_least)
    verdicts = tuple(words[each] for each in judged)
    assert Judged(claim, verdicts, verdicts, seeds).on_one_seed is one


def test_what_was_not_run_stays_blank(
    fake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.out, "_width", 20)
    got = cells(fake, "--no-run")
    assert calls(fake) == []
    assert all(cell["ours"] is cell["low"] is None and cell["seeds"] == 0 for cell in got.values())
    shown = capsys.readouterr().out
    assert "  small | A: published 0.8000\n" in shown
    assert "  large | A: \n" in shown
    assert "ours 0" not in shown
    run(fake, "--model", "s")
    shown = capsys.readouterr().out
    assert "  small | A: published 0.8000, ours 0.8" in shown
    assert "], 1 seed" in shown


def test_markdown(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = fake / "docs" / "page.md"
    run(fake, "--data", "a", "--markdown", str(page))
    whole = page.read_text()
    assert whole.startswith("<!-- written by `recleak reproduce fake`; do not edit -->\n\n# A paper\n")
    assert "**Table 1: Utility &#124; all**" in whole
    assert "| small | *0.8000*<br>0.8" in whole
    assert "**not run** | 1 of 2 hold, 1 not run | 1 of 2 hold, 1 not |" in whole
    run(fake, "--markdown", str(page))  # its own page is replaced
    assert "**holds** (one seed) | 2 of 2 hold" in page.read_text()
    assert "\n*Published in italics*; ours; 95 % interval over users; one seed, so run-to-run noise" in page.read_text()
    assert "\nFirst and last value; 1 seed.\n" in page.read_text()
    names = ["as-written claims", "as-written 2", "as-coded"]
    page.write_text(
        "Mine.\n" + "".join(f"<!-- begin {name} -->\nstale\n<!-- end {name} -->\nKept.\n" for name in names)
    )
    run(fake, "--markdown", str(page))
    filled = page.read_text()
    assert filled.count("stale") == 1  # the other variant's
    assert filled.count("Kept.") == 3
    assert filled.startswith("Mine.\n<!-- begin as-written claims -->\n\n| claim |")
    assert "**Table 2: Attack**" in filled
    assert "Table 1" not in filled
    run(fake, "--markdown", str(page))
    assert page.read_text() == filled
    page.write_text("Mine alone.\n")
    capsys.readouterr()
    run(fake, "--markdown", str(page), code=2)
    assert "Add these two lines" in capsys.readouterr().err
    assert page.read_text() == "Mine alone.\n"


@pytest.mark.parametrize("words", [["--table", "2"], ["--data", "a"], ["--model", "s"]])
def test_a_selection_never_takes_the_place_of_everything(
    fake: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = fake / "page.md"

    def places(*names: str) -> str:
        return "".join(f"<!-- begin {name} -->\nof {name}\n<!-- end {name} -->\n" for name in names)

    for names in (["as-written"], ["as-written claims"], ["as-written", "as-coded 2"]):
        page.write_text(places(*names))
        run(fake, *words, "--markdown", str(page), code=2)
        assert "Leave out --table, --data and --model, or add <!-- begin as-written" in capsys.readouterr().err
        assert page.read_text() == places(*names)
    assert calls(fake) == []  # and says so before anything is measured
    page.write_text(places("as-written", "as-written 2", "as-written claims"))
    run(fake, *words, "--markdown", str(page))
    filled = page.read_text()
    assert "**Table 2: Attack**" in filled
    assert "of as-written 2\n" not in filled
    assert filled.startswith(places("as-written"))
    assert filled.endswith(places("as-written claims"))
    page.write_text("Mine alone.\n")
    run(fake, *words, "--markdown", str(page), code=2)
    assert "a page without <!-- begin as-written " in capsys.readouterr().err
    page.write_text(places("as-written"))
    every = [word for name in ("1", "2", "3", "fig1") for word in ("--table", name)]
    run(fake, *every, "--markdown", str(page))  # all of it is no selection
    assert "of as-written\n" not in page.read_text()


PICTURES = """
[labels]
s = "Small"
a = "data A"

[[figures]]
id = "dots"
title = "Dots"
name = "{model}/{data}"
ask = { attack = "x" }
metric = "f1"
columns = [{ label = "A", run = { data = "a" } }, { label = "B", run = { data = "b" } }]
run = { strength = 0 }
rows = [{ label = "small", run = { model = "s" } }, { label = "large", run = { model = "l" } }]

[[figures]]
id = "bars"
title = "Bars"
name = "{model}/{data}"
chart = { at = "data", y = "F1", panel = "{model}", color = "{attack}", bars = true }
ask = { attack = "x" }
metric = "f1"
columns = [{ label = "A", run = { data = "a" } }, { label = "B", run = { data = "b" } }]
run = { strength = 0 }
rows = [{ label = "small", run = { model = "s" } }, { label = "large", run = { model = "l" } }]

[[figures]]
id = "steps"
title = "Lines over a setting"
name = "{strength}"
chart = { at = "strength", x = "strength", log = "y", dash = "{attack}" }
run = { data = "a", model = "s" }
ask = { attack = "x" }
metric = "f1"
rows = [{ label = "small" }]
columns = [{ label = "0", run = { strength = 0 } }, { label = "1", run = { strength = 1 } }]

[[tables]]
id = "4"
title = "Defended"
name = "{model}/{strength}/{metric}"
run = { data = "a", strength = 1 }
rows = [{ label = "small", run = { model = "s" } }, { label = "large", run = { model = "l" } }]
columns = [
  { label = "F1", ask = { attack = "x" }, metric = "f1" },
  { label = "Hit", ask = { measure = "utility" }, metric = "hit" },
]

[tradeoff]
title = "Privacy against utility"
panel = "{model}, {data}"
leak = "F1"
utility = { label = "Hit (higher: better)", ask = { measure = "utility" }, metric = "hit" }
chance = { label = "guess", ask = { attack = "guess" }, metric = "f1" }
attacks = [{ label = "x", ask = { attack = "x" }, metric = "f1" }]
defenses = [{ label = "none" }, { label = "noise", run = { strength = 1 }, point = "{strength}" }]

"""


@pytest.fixture
def pictured(fake: Path) -> Path:
    """The paper, with pictures of every kind."""
    (fake / "fake.toml").write_text(PAPER.replace("[[claims]]", PICTURES + "[[claims]]", 1))
    return fake


def drawn(folder: Path) -> set[str]:
    """The pictures in a folder, which must be PNGs for a page."""
    for path in folder.glob("*"):
        got = path.read_bytes()
        assert got.startswith(b"\x89PNG\r\n\x1a\n")
        assert got.endswith(b"IEND\xaeB`\x82")
        assert 5_000 < len(got) < 300_000
        width, height = struct.unpack(">II", got[16:24])
        assert 890 <= width <= 910
        assert 200 <= height <= 1500
    return {path.stem for path in folder.glob("*")}


@pytest.mark.heavy
def test_figures(pictured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = pictured / "deep" / "pictures"
    run(pictured, "--seeds", "2", "--figures", str(there))
    every = {"fake-fig1", "fake-dots", "fake-bars", "fake-steps", "fake-tradeoff"}
    assert drawn(there) == every
    seen = capsys.readouterr()
    assert all(f"Figure: {there / name}.png\n" in seen.out for name in every)
    assert "Not drawn" not in seen.err
    run(pictured, "--no-run", "--figures", str(pictured / "one"), "--table", "bars", "--data", "b")
    assert drawn(pictured / "one") == {"fake-bars"}


def test_figures_without_data(pictured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = pictured / "pictures"
    run(pictured, "--no-run", "--figures", str(there))
    assert not there.exists()
    assert "Not drawn, as nothing of it is stored: fig1, dots, bars, steps, tradeoff." in capsys.readouterr().err
    run(pictured, "--table", "2", "--figures", str(there))  # gives also the curve and what has no defense
    assert not there.exists()
    assert "no figure is part of what was asked for" in capsys.readouterr().err


def test_a_picture_leaves_out_what_was_not_run(pictured: Path) -> None:
    from recleak.papers import figures

    run(pictured, "--table", "2", "--model", "s")
    paper = base.load(str(pictured / "fake.toml"))
    report = Report.of(results_of(paper, pictured / "out", None), Selection().cells(paper))
    tables = {table.id: (table, list(cells.values())) for table, cells in report.tables()}
    made = figures._figure(report.results, *tables["bars"])
    assert made is not None
    text = json.dumps(made.to_dict())
    assert all(word in text for word in ('"Small"', '"data A"', '"b"', "Bars", "as-written, 1 seed; 95 % intervals"))
    assert '"l"' not in text
    assert '"url"' not in text  # nothing is fetched
    assert paper.tradeoff is not None
    asked = figures._attacked(report, paper.tradeoff)
    assert [(defense.label, cell.run["model"]) for cell, _, defense in asked].count(("noise", "s")) == 1
    assert figures._tradeoff(report.results, paper.tradeoff, asked) is None
    run(pictured, "--table", "1", "--table", "4", "--model", "s")
    report = Report.of(results_of(paper, pictured / "out", None), Selection().cells(paper))
    whole = figures._tradeoff(report.results, paper.tradeoff, asked)
    assert whole is not None
    points = [row for rows in whole.to_dict()["datasets"].values() for row in rows if "defense" in row]
    assert [(row["defense"], row["point"]) for row in points] == [("none", ""), ("noise", "1")]
    assert all(row["left"] < row["x"] < row["right"] and row["low"] < row["y"] < row["high"] for row in points)


def test_patterns_of_pictures_are_checked(pictured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (pictured / "fake.toml").read_text()
    (pictured / "fake.toml").write_text(text.replace('color = "{attack}"', 'color = "{atack}"'))
    run(pictured, code=2)
    assert "expected words of" in capsys.readouterr().err


def test_help_and_no_torch() -> None:
    code = "import sys; from recleak import cli\ntry:\n cli.main(['reproduce', '--help'])\nexcept SystemExit: pass\n"
    code += "from recleak.papers import figures, render, reproduce\nsys.exit('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(word in shown for word in ("--table", "--no-run", "--markdown", "--workers", "--figures"))


# --- IMIA ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imia() -> Paper:
    return base.load("imia")


def published(paper: Paper, table: str, choose: Callable[[str], bool] = lambda _: True) -> list[float]:
    found = [(name, cell.published) for name, cell in paper.cells.items() if name.startswith(f"{table}/")]
    return [value for name, value in found if value is not None and choose(name)]


OURS = {"3+", "4+", "5+", "defended", "defenses", "both", "aggregation", "switches", "chain"}  # not in the paper


def test_imia_has_every_published_number(imia: Paper) -> None:
    # the paper prints 177; its three numbers for Random stand once for each model here
    numbers = {table: len(published(imia, table)) for table in "134567"}
    assert numbers == {"1": 6, "3": 18, "4": 48, "5": 60, "6": 12, "7": 36}
    assert {table.id for table in imia.all_tables} == {*"134567", *OURS, "fig2", "fig3", "fig4", "fig5", "fig6"}
    assert all(cell.published is None for name, cell in imia.cells.items() if name.split("/")[0] in OURS)
    # sums by hand from the printed tables, column by column
    assert sum(published(imia, "1")) == pytest.approx(0.939 + 0.976 + 0.999 + 0.797 + 0.905 + 0.9115)
    assert sum(published(imia, "3", lambda name: "/ml-100k/" in name)) == pytest.approx(1.8629)
    assert sum(published(imia, "3", lambda name: "/amazon-cell-phones/" in name)) == pytest.approx(1.9995)
    assert sum(published(imia, "4", lambda name: name.endswith("/0.1/f1"))) == pytest.approx(1.3599)
    assert sum(published(imia, "4", lambda name: name.endswith("/0.01/hit@10"))) == pytest.approx(2.1255)
    assert sum(published(imia, "5", lambda name: name.endswith("/0.7/f1"))) == pytest.approx(1.6705)
    assert sum(published(imia, "5", lambda name: name.endswith("/1.0/hit@10"))) == pytest.approx(2.2569)
    assert sum(published(imia, "6")) == pytest.approx(20.07 + 176.72)
    assert sum(published(imia, "7", lambda name: "/ncf/ml-100k/" in name)) == pytest.approx(0.8661)
    assert sum(published(imia, "7", lambda name: "/lightgcn/amazon" in name)) == pytest.approx(0.7654)


def test_imia_tables_repeat_the_same_runs_with_the_same_numbers(imia: Paper) -> None:
    known: dict[str, float] = {}
    for cell in imia.cells.values():
        if cell.ratio is None and cell.published is not None:
            key = json.dumps([cell.run, cell.ask, cell.metric], sort_keys=True)
            assert known.setdefault(key, cell.published) == cell.published
    assert len(known) == 168 - 12 - 6  # without a defense, Tables 4 and 5 repeat F1, and Table 5 Hit@10


def test_imia_table_6_follows_from_tables_4_and_5(imia: Paper) -> None:
    for name, cell in imia.cells.items():
        if cell.ratio is not None:
            a0, a1, b0, b1 = (imia.cells[part].published or 0.0 for part in cell.ratio)
            exact = abs(a0 - a1) / abs(b0 - b1)
            assert cell.published == pytest.approx(int(exact * 100 + 1e-6) / 100), name  # cut, not rounded
            if name.startswith("6/ours"):
                row = cell.ratio[0].removesuffix("0.0/f1")
                strengths = [f"{row}{strength}/f1" for strength in ("0.0", "0.1", "0.4", "0.7", "1.0")]
                assert a1 == min(imia.cells[each].published or 0.0 for each in strengths)


def test_imia_is_asked_in_few_ways(imia: Paper) -> None:
    assert all(
        str(cell.run["preset"]) in CATALOG[str(cell.run["data"])].presets
        for cell in imia.cells.values()
        if cell.ratio is None
    )
    measured = [
        cell for name, cell in imia.cells.items() if cell.ratio is None and name.split("/")[0] not in OURS - {"3+"}
    ]
    assert {tuple(sorted(cell.run)) for cell in measured} == {("data", "defense", "model", "preset", "strength")}
    assert all((cell.run["defense"] == "none") == (cell.run["strength"] == 0.0) for cell in measured)
    runs = {json.dumps(cell.run, sort_keys=True) for cell in measured}
    assert len(runs) == 2 * 3 * (1 + 3 + 4)
    asks = {json.dumps(cell.ask, sort_keys=True) for cell in measured}
    assert len(asks) == 3 + 7 + 6 + 1  # measures, other attacks, six gammas, popularity


def test_imia_claims_on_the_papers_own_numbers(imia: Paper, tmp_path: Path) -> None:
    from recleak.papers.store import Results

    results = Results(imia, Store(tmp_path), code=0, variant="as-written")
    report = Report.of(results, Selection().cells(imia))
    assert len(report.claims) == len(imia.claims) == 23
    assert {judged.verdict for judged in report.claims} == {"not run"}
    failing = {judged.claim.text for judged in report.claims if judged.published == "does not hold"}
    assert failing == {
        "The defender brings IMIA to the level of Random in all cases (at Table 6's μ).",
        "The defender's influence on recommendation quality is imperceptible (at Table 6's μ).",
        "The defender makes user embeddings move further.",
    }
    assert len(as_json(report)) == len(imia.cells)
    write_markdown(report, tmp_path / "imia.md")
    assert sections(report)["as-written"] in (tmp_path / "imia.md").read_text()


def test_errors_are_ours() -> None:
    with pytest.raises(NotFoundError):
        base.load("nothing")
    assert issubclass(ConfigError, RecleakError)
