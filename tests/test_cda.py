"""The runner of CDA on tiny data: DP-SGD and what it spends."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recleak import machine
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, parts_of
from recleak.defenses.dp_sgd import DPSGD, ClippedMeanNoise
from recleak.defenses.sharing import ShareLess
from recleak.epsilon import gaussian_epsilon
from recleak.errors import ConfigError, RecleakError
from recleak.papers import cda
from recleak.papers.base import load
from recleak.papers.cda import CLIP, DELTA, measure, setting
from recleak.papers.reproduce import Measured, Run, Wanted, measure_all, needed_bytes
from recleak.papers.store import Question, Store
from recleak.protocols.federated import Federated
from recleak.protocols.gossip import Gossip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=60, n_items=50, mean_activity=14, min_activity=8, coupling=1.0).generate()
    store.save(made, folder, name="small")
    return str(folder)


def a_run(data: str, **more: Any) -> dict[str, Any]:
    return {"data": data, "model": "gmf", "protocol": "fl", "sharing": "full", "rounds": 4, **more}


def answers(run: dict[str, Any], *asks: dict[str, Any]) -> list[Measured]:
    return list(measure(run, asks, variant="as-written", seed=0, threads=1))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_nodes_hold_is_known_before(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = setting(a_run(small, protocol="pers"), "as-written", 0)
    assert isinstance(made.protocol, Gossip)
    parts = made.defense.sharing(made.model.components())
    needed = made.protocol.needed_bytes(parts, made.train.n_users, made.train.n_items)
    assert cda.needed_bytes(a_run(small, protocol="pers"), "as-written") == needed > 0
    assert cda.needed_bytes(a_run(small), "as-written") == 0
    question = Question("recleak.papers.cda:measure", 1, "as-written", a_run(small, protocol="rand"), {})
    assert needed_bytes(Run(0, (Wanted(question, frozenset()),))) == needed
    lost = replace(question, run=a_run("nowhere", protocol="rand"))
    assert needed_bytes(Run(0, (Wanted(lost, frozenset()),))) == 0
    runs = [Run(seed, (Wanted(question, frozenset()),)) for seed in (0, 1)]
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * needed - 1)
    with pytest.raises(ConfigError, match="The nodes of 2 side by side of 2 runs take"):
        measure_all(load("cda"), runs, Store(tmp_path), workers=2)
    monkeypatch.setattr("recleak.jobs._here", lambda *_: iter(()))
    measure_all(load("cda"), runs, Store(tmp_path), workers=1)
    assert "The nodes of the largest of 2 runs take 0.0 GB" in " ".join(capsys.readouterr().err.split())


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


def test_without_noise_nothing_changes(small: str) -> None:
    made = setting(a_run(small), "as-written", 0)
    assert isinstance(made.protocol, Federated)
    assert made.protocol.aggregation == "weighted"
    assert not isinstance(made.defense, Chain)


@pytest.mark.parametrize(("protocol", "trainings"), [("fl", 4), ("rand", 4 * 3 * 2)])
def test_noise_is_for_all_trainings_and_weights_tell_nothing(small: str, protocol: str, trainings: int) -> None:
    made = setting(a_run(small, protocol=protocol, epsilon=10, sharing="less"), "as-written", 0)
    (noise,) = (part for part in parts_of(made.defense) if isinstance(part, DPSGD))
    assert noise.clip == CLIP
    assert gaussian_epsilon(sqrt(trainings) / noise.noise_multiplier, DELTA) == pytest.approx(10, rel=1e-6)
    assert any(isinstance(part, ShareLess) for part in parts_of(made.defense))
    assert made.keeps_vectors
    if isinstance(made.protocol, Gossip):
        assert made.protocol.weights == "equal"
    else:
        assert made.protocol.aggregation == "mean"


def test_a_federation_spends_what_it_is_calibrated_for(small: str) -> None:
    (got, attack) = answers(a_run(small, epsilon=10), {"measure": "utility"}, {"attack": "cda"})
    assert got.metrics["epsilon-spent"][0] == pytest.approx(10, rel=1e-6)
    assert got.metrics["epsilon-interaction"][0] > 10
    assert got.metrics["trainings"][0] == 4
    assert 0 <= attack.metrics["max-aac"].mean() <= 1


def test_the_busiest_node_spends_more_than_the_mean(small: str) -> None:
    (got,) = answers(a_run(small, protocol="rand", epsilon=10), {"measure": "utility"})
    assert got.metrics["trainings"][0] > 12, "somebody gets more than 3 messages in each of 4 ticks"
    noise = DPSGD.calibrated(10, DELTA, uploads=12, epochs=2).noise_multiplier
    expected = gaussian_epsilon(sqrt(2 * got.metrics["trainings"][0]) / noise, DELTA)
    assert got.metrics["epsilon-spent"][0] == pytest.approx(expected)
    assert got.metrics["epsilon-spent"][0] > 10


def test_little_noise_is_nearly_none_and_much_is_chance(small: str) -> None:
    asks = {"measure": "utility"}, {"attack": "cda", "scoring": "standardized"}
    none, little, much = (
        answers(a_run(small, rounds=12, **how), *asks)
        for how in ({"averaging": "mean"}, {"epsilon": 1e7}, {"epsilon": 0.1})
    )
    for measured, name in ((0, "hr@20"), (1, "max-aac")):
        plain, slight = (float(np.mean(each[measured].metrics[name])) for each in (none, little))
        assert slight == pytest.approx(plain, abs=0.05)
    assert np.mean(much[1].metrics["last-aac"]) < np.mean(none[1].metrics["last-aac"])


def test_the_published_noise_has_no_epsilon(small: str) -> None:
    run = a_run(small, dp="published")
    made = setting(run, "as-written", 0)
    assert any(isinstance(part, ClippedMeanNoise) for part in parts_of(made.defense))
    (got,) = answers(run, {"measure": "utility"})
    assert "epsilon-spent" not in got.metrics


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dp": "publshed"}, "published"),
        ({"averaging": "sum"}, "mean"),
        ({"epsilon": 1, "dp": "published"}, "expected one"),
    ],
)
def test_what_cannot_be_asked(small: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, RecleakError), match=message):
        setting(a_run(small, **more), "as-written", 0)


def test_every_cell_of_the_paper_can_be_set_up() -> None:
    paper = load("cda")
    runs = [cell.run for cell in paper.cells.values()]
    assert {run["epsilon"] for run in runs if "epsilon" in run} == {1, 10, 100, 1000}
    assert not [run for run in runs if "epsilon" in run and "dp" in run]
