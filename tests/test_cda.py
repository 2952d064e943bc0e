"""The runner of CDA on tiny data: DP-SGD and what it spends, and what is asked."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recleak import machine
from recleak.attacks.community_targets import colluding
from recleak.data import store
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, parts_of
from recleak.defenses.dp_sgd import DPSGD, ClippedMeanNoise
from recleak.defenses.sharing import ShareLess
from recleak.epsilon import gaussian_epsilon
from recleak.errors import ConfigError, RecleakError
from recleak.grading import communities, grade_communities
from recleak.papers import cda, cda_nulls, cda_sensitive, cda_settings
from recleak.papers.base import load
from recleak.papers.cda import measure
from recleak.papers.cda_settings import CLIP, DELTA, setting
from recleak.papers.communities import draws, graded
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


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_halves_are_apart_and_the_truth_is_by_the_other(small: str) -> None:
    made = setting(a_run(small), "as-written", 0)
    first, other = cda._halves(made)
    assert torch.equal(first + other, made.targets)
    assert set((first.sum(1) - other.sum(1)).tolist()) <= {0.0, 1.0}
    sought = cda._Sought.of(made, {"attack": "cda", "halves": True, "disjoint": True})
    users = torch.arange(made.train.n_users)
    assert torch.equal(sought.targets, first)
    assert torch.equal(sought.truth, communities(other, made.train, made.size, users))
    assert torch.equal(sought.public["excluded"], made.targets)
    assert "excluded" not in cda._Sought.of(made, {"attack": "cda", "halves": True}).public


def test_who_tells_its_vector_for_a_mean_is_not_looked_for(small: str) -> None:
    made = setting(a_run(small, sharing="less"), "as-written", 0)
    sought = cda._Sought.of(made, {"attack": "cda", "vector": "mean"})
    assert sought.aside is not None
    assert sought.aside.sum(1).min() >= 6
    assert not bool((sought.truth & sought.aside).any())
    (got,) = answers(a_run(small, sharing="less"), {"attack": "cda", "vector": "mean"})
    assert 0 < got.metrics["max-aac"].mean() <= 1


@pytest.mark.parametrize("protocol", ["fl", "rand"])
@pytest.mark.parametrize("ask", [{"attack": "cda"}, {"attack": "chain"}, {"attack": "chain", "colluders": 0.1}])
def test_whoever_listens_knows_which_targets_do_not_count(small: str, protocol: str, ask: dict[str, Any]) -> None:
    made = setting(a_run(small, protocol=protocol), "as-written", 0)
    known = cda._tap(made, {**ask, "disjoint": True}).knowledge.public
    assert torch.equal(known["excluded"], made.targets)
    assert "excluded" not in cda._tap(made, ask).knowledge.public


@pytest.mark.parametrize("sharing", ["full", "less"])
@pytest.mark.parametrize("variant", ["as-written", cda_settings.CODE])
def test_disjoint_targets_are_another_question(
    small: str, sharing: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain reads the overlap, of which nothing is left; whatever scores a model, something changes."""
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    monkeypatch.setattr(cda_settings, "SCALE", {cda_settings.CODE: (100, 10)})
    asks: list[dict[str, Any]] = [{"attack": "cda"}, {"attack": "cda", "scoring": "standardized"}, {"attack": "chain"}]
    both = [*asks, *({**ask, "disjoint": True} for ask in asks)]
    measured = list(measure(a_run(small, sharing=sharing), both, variant=variant, seed=0, threads=1))
    for one, other in zip(measured[:3], measured[3:], strict=True):
        assert not np.array_equal(one.metrics["last-aac"], other.metrics["last-aac"])
    assert measured[2].metrics["last-aac"].mean() > 0.8
    assert measured[5].metrics["last-aac"].mean() < 0.4


def test_sums_tell_something_with_rows_of_users_only(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    ask = {"attack": "sums", "scoring": "standardized", "reading": "movement"}
    (full,) = answers(a_run(small, rounds=8), ask)
    (less,) = answers(a_run(small, rounds=2, sharing="less"), ask)
    assert full.metrics["max-aac"].mean() > 1.3 * 10 / 59
    assert less.metrics["max-aac"].mean() == pytest.approx(10 / 59)
    with pytest.raises(ConfigError, match="in a gossip"):
        answers(a_run(small, protocol="rand"), ask)


def test_a_model_of_what_comes_next_is_not_asked_about_kinds_of_items(small: str) -> None:
    made = setting(a_run(small, model="prme"), "as-written", 0)
    for ask in ({"attack": "cda"}, {"attack": "cda", "vector": "fitted"}):
        with pytest.raises(ConfigError, match="expected attack = 'chain'"):
            cda_sensitive.tap(made, ask, ())
    with pytest.raises(ConfigError, match="expected GMF"):
        answers(a_run(small, model="prme"), {"attack": "cda", "halves": True})


# --- nulls and intervals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_best_of_many_rankings_is_that_of_a_plain_loop(share: float) -> None:
    """Also where some are aside: of them each adversary claims nobody, and the next ones instead."""
    users, size, rounds = 40, 6, 20
    aside = colluding(users, share, 5)
    lot = np.where(aside.numpy(), 2.0, np.random.default_rng(1).random((users, users)))
    truth = torch.from_numpy(lot.argsort(1).argsort(1) < size)
    quick = cda_nulls.best_of_rankings(truth, size, rounds, seed=3, aside=aside if share else None, repeats=200)
    slow = []
    for repeat in range(200):
        torch.manual_seed(repeat)
        score = torch.rand(rounds, users)
        found = [grade_communities(one.repeat(users, 1), truth, size, torch.arange(users), aside) for one in score]
        slow.append(max(float(each["accuracy"].mean()) for each in found))
    assert quick.shape == (200,)
    assert quick.mean() == pytest.approx(np.mean(slow), abs=0.005)
    assert quick.std() == pytest.approx(np.std(slow), rel=0.3)
    once = cda_nulls.best_of_rankings(truth, size, 1, seed=3, aside=aside, repeats=2000)
    assert once.mean() == pytest.approx(size / (users - 1 - round(share * users)), abs=0.004)


def test_who_sides_with_an_adversary_is_not_looked_for_by_its_nulls(
    small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    asks: list[dict[str, Any]] = [{"attack": "random"}, {"attack": "random", "rounds": 50}, {"attack": "activity"}]
    apart = [{**ask, "vector": "mean", "colluders": 0.5} for ask in asks]
    made = setting(a_run(small), "as-written", 0)
    sought = cda._Sought.of(made, apart[0])
    draw, best, activity = (each.metrics for each in answers(a_run(small), *apart))
    everybody = made.groups(0.5)
    others = 60 - everybody.sum(1).double()
    assert others.max() < 31
    assert draw["expected"] == pytest.approx(float((10 / others).mean()))
    assert draw["accuracy"].mean() == pytest.approx(draw["expected"][0], abs=0.05)
    plain, ranked, busy = (each.metrics for each in answers(a_run(small), *asks))
    assert best["accuracy"].mean() > ranked["accuracy"].mean() + 0.1
    count = torch.from_numpy(made.train.activity.astype(np.float32)).repeat(60, 1)
    graded = grade_communities(count, sought.truth, 10, torch.arange(60), everybody)
    assert activity["accuracy"].mean() == pytest.approx(float(graded["accuracy"].double().mean()))
    assert not np.array_equal(activity["accuracy"], busy["accuracy"])
    assert plain["expected"] == pytest.approx(10 / 59)


def test_nulls_need_no_training(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    monkeypatch.delattr(cda, "train_federated")
    asks: list[dict[str, Any]] = [
        {"attack": "random"},
        {"attack": "random", "times": 3},
        {"attack": "random", "rounds": 50},
        {"attack": "activity"},
        {"attack": "noise", "scoring": "standardized", "rounds": 3},
        {"attack": "noise", "scoring": "standardized", "disjoint": True, "rounds": 3},
    ]
    draw, more, best, activity, noise, apart = (each.metrics for each in answers(a_run(small), *asks))
    assert draw["accuracy"].mean() == pytest.approx(10 / 59, abs=0.03)
    assert draw["expected"] == pytest.approx(10 / 59)
    assert more["accuracy"] == pytest.approx(3 * draw["accuracy"])
    assert draw["accuracy"].mean() < best["accuracy"].mean() <= best["p95"][0]
    for each in (draw, more, activity, noise, apart):
        assert each["user"].tolist() == list(range(60))
        assert len(each["accuracy"]) == 60
    assert noise["accuracy"].mean() == pytest.approx(10 / 59, abs=0.04)
    assert not np.array_equal(noise["accuracy"], apart["accuracy"])


def test_a_ranking_that_all_share_is_no_finding(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals over users as adversaries and as victims have the null; over adversaries alone, they mostly do not."""
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    made = setting(a_run(small), "as-written", 0)
    users = torch.arange(60)
    truth = communities(made.targets, made.train, 10, users)
    wide = narrow = 0
    rng = np.random.default_rng(0)
    for _ in range(200):
        found = graded(torch.from_numpy(rng.random(60)).float().repeat(60, 1), truth, 10, users)
        both, alone = found["accuracy of users"].numpy(), found["accuracy"].double().numpy()
        assert both.mean() == pytest.approx(alone.mean())
        wide += abs(both.mean() - 10 / 59) > 1.96 * both.std() / 60**0.5
        narrow += abs(alone.mean() - 10 / 59) > 1.96 * alone.std() / 60**0.5
    assert wide <= 0.12 * 200 < narrow


def heard(curves: dict[str, list[list[float]]], users: int) -> Any:
    """A tap that was told these grades, round by round: of adversaries or of users."""
    told = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in curves.items()}
    told |= {f"{name} of users": rows.mean(1, keepdim=True).repeat(1, users) for name, rows in told.items()}
    told |= {"exposed": torch.full((len(told["accuracy"]), users), 0.5), "separation": torch.tensor([1.0, 3.0, 2.0])}
    return SimpleNamespace(rounds=torch.tensor([0, 9, 19]), curve=told.__getitem__)


def test_values_are_of_users_and_quantiles_of_adversaries() -> None:
    """Four adversaries among ten users: a quantile is one of the four, in the best round; means are over ten values."""
    accuracy = [[0.0, 0.1, 0.0, 0.1], [0.2, 0.2, 0.2, 0.2], [0.0, 0.1, 0.2, 0.9]]
    got = cda._measured(heard({"accuracy": accuracy, "bound": [[0.5] * 4, [0.75] * 4, [1.0] * 4]}, 10), 0.0)
    found = got.metrics
    assert found["user"].tolist() == list(range(10))
    assert all(found[name].shape == (10,) for name in ("max-aac", "last-aac", "chosen-aac", "bound", "aac@10"))
    assert found["max-aac"].mean() == pytest.approx(0.3)
    assert (found["max-round"][0], found["chosen-round"][0]) == (20, 10)
    assert found["chosen-aac"].mean() == found["aac@10"].mean() == pytest.approx(0.2)
    assert found["bound"].mean() == 1
    assert [found[name][0] for name in ("median", "p90", "p99")] == pytest.approx(
        np.quantile([0.0, 0.1, 0.2, 0.9], [0.5, 0.9, 0.99])
    )
    assert [value for _, value in got.series["aac"]] == pytest.approx([0.05, 0.2, 0.3])


@pytest.mark.parametrize("protocol", ["fl", "rand"])
def test_whoever_plays_the_adversary_values_are_of_all_users(
    small: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    monkeypatch.setattr(cda, "SOME", 20)
    for each in answers(a_run(small, protocol=protocol), {"attack": "cda"}, {"attack": "chain"}):
        found = each.metrics
        assert found["last-aac"].mean() == pytest.approx(each.series["aac"][-1][1])
        assert found["user"].tolist() == list(range(60))
        assert all(found[name].shape == (60,) for name in ("max-aac", "last-aac", "chosen-aac", "bound"))


def test_a_draw_of_some_adversaries_is_part_of_that_of_all() -> None:
    some = torch.tensor([3, 0, 7])
    assert torch.equal(draws(9, 4, some), draws(9, 4)[some])
    assert not torch.equal(draws(9, 4), draws(9, 5))


def test_nobody_looks_for_who_tells_its_vector_in_a_gossip_either(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is found, as in what is looked for: an adversary that names its colluders first finds others after it."""
    monkeypatch.setattr(cda_settings, "SIZE", 10)
    made = setting(a_run(small, protocol="rand", sharing="less"), "as-written", 0)
    ask: dict[str, Any] = {"attack": "cda", "vector": "mean", "colluders": 0.2}
    sought = cda._Sought.of(made, ask)
    assert sought.aside is not None
    assert torch.equal(sought.aside, made.groups(0.2))
    assert sought.truth.sum(1).tolist() == [10] * 60
    assert not bool((sought.truth & sought.aside).any())
    tap = cda._tap(made, ask)
    assert torch.equal(tap.knowledge.public["groups"], sought.aside)
    assert tap._grade is not None
    told = tap._grade(sought.truth.float() + 2 * sought.aside.float())
    assert told["accuracy"].tolist() == told["bound"].tolist() == [1.0] * 60
    (got,) = answers(a_run(small, protocol="rand", sharing="less"), ask)
    assert 0 < got.metrics["max-aac"].mean() <= got.metrics["bound"].mean() <= 1
