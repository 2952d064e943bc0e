"""The threat model holds: attacks import nothing that knows the truth, and the type checker refuses the rest."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ATTACKS = ROOT / "src" / "recleak" / "attacks"
ALLOWED = {
    "recleak.attacks",
    "recleak.defenses",
    "recleak.errors",
    "recleak.kernels",
    "recleak.geometry",
    "recleak.kernels_gmf",
    "recleak.kernels_heads",
    "recleak.kernels_moved",
    "recleak.kernels_prme",
    "recleak.metrics",
    "recleak.models",
    "recleak.random",
    "recleak.strict_json",
    "recleak.training.aggregate",  # sums of uploads, which an adversary makes of its shadow clients'
    "recleak.training.chunks",
    "recleak.training.cohort",
    "recleak.training.local",
    "recleak.training.optimizers",
    "recleak.update",
    "recleak.wire",
}
OTHERS = {  # all else could read a file, or the memory of who calls
    *("__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing", "weakref"),
    *("numpy", "scipy", "sklearn", "torch"),
}
READERS = {"load", "from_file", "fromfile", "memmap", "loadtxt", "genfromtxt", "loadmat", "fetch_openml"}
READ_THERE = {"Interactions", "Complement"}  # data readers' names in modules that an attack may import


def imported(source: str, package: str) -> Iterator[str]:
    """The full names of all that a module of a package imports, wherever in the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name) and node.id in ("__import__", "open", "eval", "exec", "globals", "vars"):
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in READERS:
            yield node.attr


def forbidden(source: str, package: str = "recleak.attacks") -> list[str]:
    """What an attack may not import."""

    def within(name: str) -> bool:
        return any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED)

    names = list(imported(source, package))
    ours = [name for name in names if name.split(".")[0] == "recleak"]
    bad = [name for name in ours if not within(name) or name.split(".")[-1] in READ_THERE]
    return bad + [name for name in names if name.split(".")[0] not in {*OTHERS, "recleak"}]


def test_attacks_import_nothing_that_knows_the_truth() -> None:
    files = sorted(ATTACKS.rglob("*.py"))
    assert ATTACKS / "base.py" in files
    for file in files:
        package = ".".join(["recleak", *file.parent.relative_to(ROOT / "src" / "recleak").parts])
        assert forbidden(file.read_text(encoding="utf-8"), package) == [], file


@pytest.mark.parametrize(
    "source",
    [
        "import recleak",
        "import recleak.protocols.federated",
        "import recleak.grading as wire",
        "from recleak import protocols",
        "from recleak import data as random",
        "from recleak import *",
        "from recleak.data.interactions import Interactions",
        "from recleak.training import executor",
        "from recleak.training import *",
        "from recleak.wires import x",
        "from recleak.recording import replay",
        "from .. import data",
        "from ..data import split",
        "from ..data.split import leave_one_out",
        "from ..training.executor import run",
        "def f():\n    from recleak.protocols import federated",
        "if True:\n    import recleak.data.store",
        "import importlib",
        "from importlib import import_module",
        "__import__('recleak.data')",
        "open('truth.json')",
    ],
)
def test_every_way_to_import_is_seen(source: str) -> None:
    assert forbidden(source)


@pytest.mark.parametrize(
    "source",
    [
        "import recleak.wire",
        "from recleak import random, wire",
        "from recleak.training import cohort",
        "from recleak.training.cohort import train",
        "from recleak.models.base import Model",
        "from . import base",
        "from .base import Attack",
        "from ..wire import Upload",
        "from .. import update",
        "from recleak.metrics import *",
        "import torch",
        "from sklearn.linear_model import LogisticRegression",
    ],
)
def test_what_is_allowed(source: str) -> None:
    assert forbidden(source) == []


def test_the_level_of_a_relative_import_counts() -> None:
    assert forbidden("from .. import data", "recleak.attacks.deep") == []  # recleak.attacks.data
    assert forbidden("from ... import data", "recleak.attacks.deep") == ["recleak.data"]


def test_what_the_wire_is_made_of_knows_no_truth_either() -> None:
    for name in ("wire.py", "update.py"):
        found = forbidden((ROOT / "src" / "recleak" / name).read_text(encoding="utf-8"), "recleak")
        bytes_only = {
            "json",
            "pydantic",
            "safetensors",
            "struct",
        }  # a message's form in bytes; nothing that opens a file
        assert [each for each in found if each.split(".")[0] not in bytes_only] == []


@pytest.mark.heavy
def test_mypy_refuses_what_the_threat_model_forbids() -> None:
    file = ROOT / "tests" / "must_not_typecheck.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    errors = re.findall(r"^tests/must_not_typecheck\.py:(\d+): error: .*\[([\w-]+)\]$", output, re.MULTILINE)
    lines = file.read_text(encoding="utf-8").splitlines()
    expected = [number for number, line in enumerate(lines, start=1) if line.endswith("  # error")]
    assert len(expected) > 15
    assert sorted({int(number) for number, _ in errors}) == expected, output
    for_the_wrong_reason = {"name-defined", "import-not-found", "import-untyped", "syntax"}
    assert not for_the_wrong_reason & {code for _, code in errors}, output
