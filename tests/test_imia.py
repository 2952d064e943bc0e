"""The runner of IMIA: every ask gets its metrics, and each variant does what its table says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.membership import FromSums
from recleak.attacks.shadow import ShadowClients
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.models.lightgcn import LightGCN
from recleak.papers import imia
from recleak.papers.base import load
from recleak.update import Update

RUN: dict[str, imia.Scalar] = {"data": "tiny", "preset": "imia", "model": "ncf", "defense": "none", "strength": 0.0}
VARIANTS = ("as-written", "as-published-code")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Interactions:
    """120 users, two rounds of a tenth of them."""
    data = Synthetic(n_users=120, n_items=150, mean_activity=20, min_activity=8).generate()
    monkeypatch.setattr(imia, "open_data", lambda name, preset: data)
    monkeypatch.setattr(imia, "ROUNDS", 2)
    monkeypatch.setattr(imia, "_STEP", 1)
    return data


def asks() -> list[dict[str, imia.Scalar]]:
    """Every way in which the paper's cells ask."""
    paper = load("imia")
    found = {repr(sorted(cell.ask.items())): dict(cell.ask) for cell in paper.cells.values() if cell.ratio is None}
    return list(found.values())


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["ncf", "lightgcn"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_ask_gets_the_metrics_that_its_cells_want(model: str, variant: str) -> None:
    run: dict[str, imia.Scalar] = {**RUN, "model": model, "clients": 60, "epochs": 2}
    wanted = [ask for ask in asks() if "attribute" not in ask or ask["attribute"] == "gender"]
    got = list(imia.measure(run, wanted, variant=variant, seed=0, threads=1))
    assert len(got) == len(wanted)
    cells = [cell for cell in load("imia").cells.values() if cell.ratio is None]
    for ask, measured in zip(wanted, got, strict=True):
        for cell in cells:
            if cell.ask == ask and cell.metric is not None and not cell.metric.startswith("pooled-tpr"):
                values = measured.metrics[cell.metric]
                assert len(values) > 0
                assert np.isfinite(values).all()
            if cell.ask == ask and cell.series is not None:
                assert len(measured.series[cell.series]) > 1
    auc = {name: got[wanted.index({"attack": name})].metrics["auc"].mean() for name in ("alignment", "random")}
    assert auc["alignment"] > 0.95
    assert abs(auc["random"] - 0.5) < 0.1


def test_variants_are_what_the_table_says() -> None:
    text, code = (imia.setting({**RUN, "model": "lightgcn"}, variant, 0) for variant in VARIANTS)
    assert (len(text.split.valid) > 0, len(code.split.valid) > 0) == (True, False)
    assert (text.spare, code.spare) == ((), (code.split.test,))
    assert isinstance(text.model, LightGCN)
    assert isinstance(code.model, LightGCN)
    assert (text.model.combine, code.model.combine) == ("sum", "mean")
    assert (text.protocol.clients_per_round, text.protocol.rounds) == (1, 2)
    ask: dict[str, imia.Scalar] = {"attack": "imia", "gamma": 0.2}
    written, published = (imia.attack_of(ask, flag, 120, 0) for flag in (False, True))
    assert isinstance(written, ShadowClients)
    assert isinstance(published, ShadowClients)
    assert (written.graph, written.accumulate_gradients) == ("guessed", False)
    assert (published.graph, published.accumulate_gradients) == ("true-graph", True)
    assert written == replace(published, graph="guessed", accumulate_gradients=False)
    assert "own_items" not in text.knowledge().public


@pytest.mark.parametrize(
    ("name", "published", "expected"),
    [
        ("none", True, Defense()),
        ("ldp", False, GaussianNoise(0.01)),
        ("ldp", True, Chain((ClipByNorm(1.0, per="unit"), GaussianNoise(0.1)))),
        ("proximal", False, Proximal(0.01, "plain")),
        ("proximal", True, Proximal(0.01, "squared")),
    ],
)
def test_defenses_of_both_variants(name: str, published: bool, expected: Defense) -> None:
    assert repr(imia._defense(name, 0.01, published)) == repr(expected)


def test_spearman_and_its_spread() -> None:
    rng = np.random.default_rng(0)
    activity = rng.integers(1, 1000, 500)
    f1 = -activity / 1000 + rng.normal(0, 0.2, 500)
    each = imia._rank_products(activity, f1)
    ranks = np.argsort(np.argsort(activity)), np.argsort(np.argsort(f1))
    assert each.mean() == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=0.01)
    draws = [rng.integers(500, size=500) for _ in range(400)]
    resampled = [imia._rank_products(activity[draw], f1[draw]).mean() for draw in draws]
    assert each.std() / 500**0.5 == pytest.approx(np.std(resampled), rel=0.25)
    assert (imia._rank_products(activity, np.ones(500)) == 0).all()


def test_the_number_of_clients_in_a_sum_counts_not_the_new_ones() -> None:
    """Somebody who took part before is in the sum, too."""
    heard: list[int] = []

    class Counting(FromSums):
        def evidence(self, knowledge, received, mean: Update, clients: int, round: int):  # type: ignore[no-untyped-def]
            heard.append(clients)
            return torch.zeros(len(mean.item)), torch.ones(1)

    made = imia.setting({**RUN, "clients": 60}, "as-written", 0)
    imia._train(made, [imia._Timed(made, Counting(), made.knowledge())], 1, False)
    assert heard == [60, 60]


def test_of_many_users_some_are_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = imia.setting({**RUN, "clients": 60}, "as-written", 0)
    everybody = imia._tap(made, {"attack": "projection"})
    imia._train(made, [everybody], 1, False)
    monkeypatch.setattr(imia, "ATTACKED", 40)
    made = imia.setting({**RUN, "clients": 60}, "as-written", 0)
    some, flips = imia._tap(made, {"attack": "projection"}), imia._tap(made, {"measure": "flip"})
    imia._train(made, [some, flips], 1, False)
    attacked = set(np.flatnonzero(made.attacked).tolist())
    assert len(attacked) == 40
    whole, part = everybody.state(), some.state()
    tried = {name for name in part if name.startswith(("items/", "odds/"))}
    assert {int(name.partition("/")[2]) for name in tried} == attacked & {
        int(name.partition("/")[2]) for name in whole if name.startswith("items/")
    }
    assert all(torch.equal(whole[name], part[name]) for name in tried)
    assert isinstance(flips, imia._FlipOne)
    assert flips.done <= attacked


def test_the_default_attack_knows_the_defense() -> None:
    made = imia.setting({**RUN, "defense": "fake-items", "strength": 4.0}, "as-written", 0)
    assert made.knowledge().defense.fakes == 4.0
    assert isinstance(imia.attack_of({"attack": "alignment"}, False, 120, 0), GradientAlignment)


@pytest.mark.parametrize("variant", ["as-written", "as-published-code"])
def test_every_cell_of_the_paper_can_be_set_up(variant: str) -> None:
    cells = [cell for cell in load("imia").cells.values() if cell.ratio is None]
    runs = {repr(sorted(cell.run.items())): cell.run for cell in cells}
    for run in runs.values():
        made = imia.setting(run, variant, 0)
        assert type(made.model).__name__.lower() == run["model"]
    for ask in {repr(cell.ask): cell.ask for cell in cells}.values():
        imia._tap(made, ask)
