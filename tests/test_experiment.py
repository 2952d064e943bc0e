"""Experiment files: the grid, labels, errors, what is typed on the command line, and the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recleak import experiment as experiments
from recleak.errors import ConfigError
from recleak.experiment import Data, experiment, parse, quick_start, read, schema


def test_the_quick_start_is_an_experiment() -> None:
    made = experiment(quick_start())
    assert made.systems[0].defense.label == "none"
    assert len(made.systems) == 3


def test_every_combination_is_a_system() -> None:
    table = {
        "data": {"name": "ml-100k", "preset": "imia", "candidates": 99},
        "model": ["mf", {"use": "ncf", "factors": [8, 16]}],
        "protocol": {"use": "federated", "rounds": [1, 2]},
        "defenses": ["none", {"use": "proximal", "strength": [0.1, 1.0]}],
        "attacks": ["alignment", {"use": "imia", "gamma": [0.2, 0.5]}],
        "seeds": [3, 5],
    }
    made = experiment(table)
    assert len(made.systems) == 3 * 2 * 3
    first, *_, last = made.systems
    assert first.data == Data("ml-100k", "imia", candidates=99)
    assert first.labels == {"data": "ml-100k", "model": "mf", "protocol": "federated rounds 1", "defense": "none"}
    assert last.labels["model"] == "ncf factors 16"
    assert last.labels["defense"] == "proximal strength 1.0"
    assert [each.label for each in made.attack_choices] == ["alignment", "imia gamma 0.2", "imia gamma 0.5"]
    assert made.seed_list == [3, 5]


def test_a_name_of_ones_own() -> None:
    made = experiment({"defenses": [{"use": "proximal", "name": "theirs", "strength": [0.1, 1.0]}]})
    assert [system.defense.label for system in made.systems] == ["theirs strength 0.1", "theirs strength 1.0"]
    assert "name" not in made.systems[0].settings["defense"], "a label decides nothing"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"dataa": 1}, r"Did you mean 'data'"),
        ({"defenses": ["nonee"]}, r"Did you mean 'none'"),
        ({"seeds": 0}, r"seeds: got 0, .*at least 1"),
        ({"seeds": [1, 1]}, r"different"),
        ({"seeds": 10**18}, r"at most 10,000"),  # at once
        ({"level": 2.0}, r"level: got 2.0"),
        ({"data": {"nam": "x"}}, r"Did you mean 'name'"),
        ({"attacks": []}, r"attacks: got an empty list"),
        ({"data": []}, r"data: got an empty list"),
        ({"defenses": ["none", "none"]}, r"two are called 'none'"),
        ({"defenses": [{"strength": 1}]}, r"a table with `use`"),
        ({"by_component": ["imia"]}, r"by_component: Unknown attack 'imia'"),
    ],
)
def test_what_is_wrong_is_told(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(table)


def test_reading_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('seeds = 2\nmodel = "mf"\n', encoding="utf-8")
    assert experiment(read(file)).seed_list == [0, 1]
    file.write_text("seeds = = 2", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read(file)
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "other.toml")


def test_what_is_typed() -> None:
    assert parse("defense", "none") == {"use": "none"}
    assert parse("defense", "proximal,strength=0.1,norm=squared") == {
        "use": "proximal",
        "strength": 0.1,
        "norm": "squared",
    }
    assert parse("model", "lightgcn,hidden=[8, 4]") == {"use": "lightgcn", "hidden": [8, 4]}
    chain = parse("defense", "clip,bound=1+gaussian-noise,std=0.1")
    assert chain == {
        "use": "chain",
        "defenses": [{"use": "clip", "bound": 1}, {"use": "gaussian-noise", "std": 0.1}],
    }
    assert parse("attack", "package.module:Mine,k=3") == {"use": "package.module:Mine", "k": 3}
    assert parse("defense", '{ use = "proximal", strength = 2 }') == {"use": "proximal", "strength": 2}
    with pytest.raises(ConfigError, match="expected `setting=value`"):
        parse("defense", "proximal,0.1")


def test_the_schema_knows_names_settings_and_paths() -> None:
    made = schema()
    assert set(made["properties"]) == set(experiments.Experiment.model_fields)
    defense = made["$defs"]["defense"]["anyOf"]
    assert "proximal" in defense[0]["enum"]
    tables = {each["properties"]["use"].get("const"): each for each in defense if each.get("type") == "object"}
    proximal = tables["proximal"]
    assert proximal["additionalProperties"] is False
    assert {"type": "number"} in proximal["properties"]["strength"]["anyOf"]
    assert None in tables, "an object by its import path"
    local = made["$defs"]["protocol"]["anyOf"][2]["properties"]["local"]["anyOf"][0]
    assert "epochs" in local["properties"]


def test_combinations_are_left_out_by_labels() -> None:
    table = {"model": ["ncf", "gmf"], "defenses": ["none", "share-less"]}
    made = experiment({**table, "skip": [{"model": "gmf", "defense": "none"}]})
    labels = [(each.model.label, each.defense.label) for each in made.systems]
    assert labels == [("ncf", "none"), ("ncf", "share-less"), ("gmf", "share-less")]
    for skip, message in (
        ({"model": "gfm"}, "Did you mean 'gmf'"),
        ({"modle": "gmf"}, "Did you mean 'model'"),
        ({}, "leaves out everything"),
    ):
        with pytest.raises(ConfigError, match=message):
            experiment({**table, "skip": [skip]})
