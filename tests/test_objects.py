"""Objects from settings: names, import paths, arguments, and values that span."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from recleak import objects
from recleak.cells import Ask
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.sparsify import SignOnly
from recleak.errors import ConfigError
from recleak.objects import Kind, build, find, label, sources, spans, varying
from recleak.protocols.federated import Federated
from recleak.training.optimizers import SGD


@pytest.mark.parametrize("kind", [kind for kind in objects.NAMES if objects.NAMES[kind]])
def test_every_short_name_is_there(kind: Kind) -> None:
    assert all(callable(find(kind, name)) for name in objects.NAMES[kind])


def test_arguments_reach_the_constructor() -> None:
    assert build("defense", {"use": "proximal", "strength": 0.5, "norm": "squared"}) == Proximal(0.5, norm="squared")
    assert type(build("defense", {"use": "none"})) is Defense


def test_objects_within_objects() -> None:
    parts = [{"use": "clip", "bound": 1}, {"use": "gaussian-noise", "std": 0.1, "rows": "all"}]
    assert build("defense", {"use": "chain", "defenses": parts}) == Chain((ClipByNorm(1.0), GaussianNoise(0.1, "all")))
    assert build("defense", {"use": "chain", "defenses": ["sign-only", parts[0]]}) == Chain(
        (SignOnly(), ClipByNorm(1.0))
    )
    assert spans("defense", {"use": "chain", "defenses": ["sign-only"]}) == [
        {"use": "chain", "defenses": [{"use": "sign-only"}]}
    ]
    assert label({"use": "chain", "defenses": ["sign-only", "share"]}) == "sign-only + share"
    local = {"epochs": 3, "optimizer": {"use": "sgd", "learning_rate": 0.1}}
    made = build("protocol", {"use": "federated", "rounds": 7, "local": local})
    assert isinstance(made, Federated)
    assert (made.rounds, made.local.epochs, made.local.optimizer) == (7, 3, SGD(0.1))


def test_an_import_path_needs_no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_objects.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mine:\n    k: int = 2\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert build("object", {"use": "my_objects:Mine", "k": 3}).k == 3
    with pytest.raises(ConfigError, match=r"Did you mean 'Mine'"):
        build("attack", {"use": "my_objects:Mime"})
    with pytest.raises(ConfigError, match=r"no_such_module cannot be imported"):
        build("attack", {"use": "no_such_module:Mine"})
    with pytest.raises(ConfigError, match=r"expected a class with `vantage`, `init`, `fold` and `answer`"):
        build("attack", {"use": "my_objects:Mine"})


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("use", ["subprocess:getoutput", "subprocess:Popen", "os:system", "builtins:eval"])
def test_a_file_cannot_call_what_it_likes(kind: Kind, use: str) -> None:
    with pytest.raises(ConfigError, match="expected a"):
        spans(kind, {"use": use, "args": "false", "cmd": "false"})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("defense", {"use": "proximl"}, r"Did you mean 'proximal'"),
        ("defense", {"use": "proximal", "strenght": 1}, r"Did you mean 'strength'"),
        ("protocol", {"use": "federated", "rounds": "x"}, r"rounds: got 'x', expected a valid integer"),
        ("protocol", {"use": "federated", "local": {"epoch": 1}}, r"local: .*Did you mean 'epochs'"),
        ("defense", {"use": "gaussian-noise", "std": -1}, r"expected a finite number"),
        ("defense", {"use": "clip", "bound": 1, "per": "clien"}, r"'client', 'component'"),
        ("model", {"use": "ncf", "factors": 2.5}, r"factors: got 2.5"),
        ("model", {"use": "ncf", "factors": True}, r"factors: got True"),
        ("defense", {"use": "chain", "defenses": [{"use": "clipp"}]}, r"Did you mean 'clip'"),
    ],
)
def test_what_is_wrong_is_told(kind: Kind, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(kind, settings)


def test_lists_span() -> None:
    found = spans("defense", {"use": "proximal", "strength": [0.1, 1.0], "norm": ["plain", "squared"]})
    assert [(each["strength"], each["norm"]) for each in found] == [
        (0.1, "plain"),
        (0.1, "squared"),
        (1.0, "plain"),
        (1.0, "squared"),
    ]
    assert varying(found) == ["strength", "norm"]


def test_lists_within_objects_span() -> None:
    parts = [{"use": "clip", "bound": [1, 2]}, {"use": "gaussian-noise", "std": 0.1}]
    found = spans("defense", {"use": "chain", "defenses": parts})
    assert [each["defenses"][0]["bound"] for each in found] == [1, 2]
    rounds = spans("protocol", {"use": "federated", "local": {"epochs": [1, 20]}})
    assert [each["local"]["epochs"] for each in rounds] == [1, 20]


def test_an_argument_that_is_a_list_spans_by_a_list_of_lists() -> None:
    assert spans("model", {"use": "lightgcn", "hidden": [8, 4]}) == [{"use": "lightgcn", "hidden": [8, 4]}]
    found = spans("model", {"use": "lightgcn", "hidden": [[8, 4], [4]]})
    assert [each["hidden"] for each in found] == [[8, 4], [4]]


def test_an_argument_that_is_a_list_of_lists_spans_by_one_more() -> None:
    turns = [["head"], ["item"]]
    protocol = {"use": "federated", "local": {"turns": turns}}
    assert spans("protocol", protocol) == [protocol]
    assert build("protocol", protocol).local.turns == (("head",), ("item",))
    found = spans("protocol", {"use": "federated", "local": {"turns": [turns, []]}})
    assert [build("protocol", each).local.turns for each in found] == [(("head",), ("item",)), ()]


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strength: got an empty list"):
        spans("defense", {"use": "proximal", "strength": []})


def test_labels() -> None:
    assert label({"use": "none"}) == "none"
    assert label({"use": "package.module:Mine", "k_means": 3}) == "Mine k means 3"
    assert label({"use": "federated", "local": {"epochs": 3}, "rounds": 5}, ["local.epochs"]) == "federated epochs 3"


@dataclass(frozen=True)
class Loose:
    anything: Any = None


def test_a_type_that_says_nothing_takes_anything() -> None:
    assert objects.made(Loose, {"anything": [1, 2]}, "here").anything == (1, 2)


@pytest.mark.parametrize("use", [3, ["sgd"], None, {"use": "sgd"}])
def test_an_odd_nested_use_is_named(use: object) -> None:
    with pytest.raises(ConfigError, match="expected one short name or import path"):
        spans("protocol", {"use": "federated", "local": {"optimizer": {"use": use}}})


def test_own_modules_are_told_by_their_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "my_edited.py"
    module.write_text("from dataclasses import dataclass\n\n@dataclass\nclass Mine:\n    k: int = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"use": "chain", "defenses": [{"use": "clip", "bound": 1.0}, {"use": "my_edited:Mine"}]}
    assert list(sources(settings)) == ["my_edited"]
    before = Ask("mine", settings).key
    module.write_text(module.read_text().replace("1", "2"))
    assert Ask("mine", settings).key != before
