"""The documentation is true: links lead somewhere, commands parse, the tree of modules is the real one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recleak import __version__, cli
from recleak.experiment import experiment, read
from recleak.objects import NAMES

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def commands(page: Path) -> list[str]:
    """Every `recleak ...` line in the code blocks of a page, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("recleak ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("https://", "http://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(page, command, id=command) for page in PAGES for command in commands(page)],
)
def test_commands_in_the_documentation_parse(page: Path, command: str) -> None:
    _, *words = shlex.split(command)
    words = words[: words.index(">")] if ">" in words else words
    cli.app.parse_args(words, exit_on_error=False, print_error=False)


def planned(name: str) -> set[str]:
    """The defenses of an experiment among the examples."""
    made = experiment(read(ROOT / "examples" / f"{name}.toml"))
    return {system.defense.label for system in made.systems}


def printed(name: str) -> set[str]:
    """The first column of its tables in docs/matrix.md."""
    block = (ROOT / "docs" / "matrix.md").read_text().split(f"<!-- begin {name} -->")[1].split("<!-- end")[0]
    rows = [line.split("|")[1].strip() for line in block.splitlines() if line.startswith("| ")]
    return {row for row in rows if row not in ("defense", "---")}


@pytest.mark.parametrize(
    "name",
    [
        *("matrix", "matrix-noise", "matrix-dp", "matrix-gossip", "matrix-lists", "matrix-gerai", "matrix-rivals"),
        "matrix-pfedrec",
    ],
)
def test_the_matrix_is_what_its_file_plans(name: str) -> None:
    assert printed(name) == planned(name)


def test_rows_that_the_matrix_lacks_are_said_to_be_not_measured() -> None:
    page = (ROOT / "docs" / "matrix.md").read_text()
    said = page.split("<!-- end matrix-attributes -->")[1].split("\n\n")[1]
    assert printed("matrix-attributes") <= planned("matrix-attributes")
    for label in planned("matrix-attributes") - printed("matrix-attributes"):
        assert label.split(" (")[0].split("-")[0] in said


def test_every_defense_stands_somewhere_in_the_matrix() -> None:
    section = (ROOT / "docs" / "matrix.md").read_text().split("## Which defense stands where")[1]
    rows = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z-]+)`", rows)) == set(NAMES["defense"]) - {"none", "chain"}


def test_the_tree_in_the_architecture_is_the_package() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("src/recleak/\n")[1].split("```")[0]
    listed, folder = set(), ""
    for line in tree.splitlines():
        name = line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            listed.add((folder if line.startswith("    ") else "") + name)
    package = ROOT / "src" / "recleak"
    real = {str(path.relative_to(package)) for path in package.rglob("*.py") if not path.name.startswith("__")}
    assert listed == real


def test_the_readme_starts_with_the_two_commands() -> None:
    code = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in code.splitlines()] == ["make audit", "make test"]


@pytest.mark.heavy
def test_the_python_in_the_readme_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert code
    for block in code:
        subprocess.run([sys.executable, "-c", block], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(example)], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


def test_versions_agree() -> None:
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text()
