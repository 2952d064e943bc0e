"""How GERAI's cells are measured: published numbers, who is known, what asks give, on one epoch of real data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recleak.data.features import classes_of
from recleak.defenses.base import Chain
from recleak.defenses.feature_noise import PerturbedFeatures
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.errors import ConfigError, NotFoundError
from recleak.models.attention_gcn import AttentionGCN
from recleak.papers import gerai
from recleak.papers.base import load

RUN: dict[str, gerai.Scalar] = {"data": "ml-100k", "preset": "gerai", "factors": 8}
METHODS = ("bpr", "gcn", "blurm", "dpae", "dpne", "dpmf", "rap", "gerai", "gerai-nl", "gerai-nf", "popular")


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch, data: Callable[[str], Path]) -> None:
    data("ml-100k")
    made = gerai.setting

    def short(run: Any, variant: str, seed: int) -> gerai.Setting:
        found = made(run, variant, seed)
        return replace(found, protocol=replace(found.protocol, epochs=1, batch_size=2048))

    monkeypatch.setattr(gerai, "setting", short)


def test_published_numbers_are_those_of_the_paper() -> None:
    cells = load("gerai").cells
    published = {
        "2/gender/gerai/5": 0.760,
        "2/gender/gcn/15": 0.891,
        "2/occupation/rap/25": 0.248,
        "2/age/gerai/30": 0.650,
        "3-hit/bpr/hit@5": 0.348,
        "3-ndcg/gerai/ndcg@30": 0.334,
        "4/gerai-nl/gender": 0.791,
        "4/gerai-nf/hit@5": 0.337,
        "5/age/rap/gp": 0.534,
        "5/occupation/gerai/nb": 0.116,
    }
    for name, value in published.items():
        assert cells[name].published == value, name
    counts = {
        table: sum(name.startswith(f"{table}/") for name in cells) for table in ("2", "3-hit", "3-ndcg", "4", "5")
    }
    assert counts == {"2": 144, "3-hit": 48, "3-ndcg": 48, "4": 20, "5": 96}
    for table, count in counts.items():
        assert sum(name.startswith(f"{table}/") and cell.published is not None for name, cell in cells.items()) == count


def test_who_is_known_and_who_is_graded() -> None:
    made = gerai.setting({**RUN, "model": "bpr"}, "as-written", 0)
    assert len(made.known) == 754
    shown = made.knowledge("gender").public["labels of gender"].numpy()
    assert np.array_equal(np.flatnonzero(shown >= 0), made.known)
    assert np.array_equal(shown[made.known], classes_of(made.train, "gender")[0][made.known])
    other = gerai.setting({**RUN, "model": "bpr"}, "as-written", 1)
    assert not np.array_equal(made.known, other.known)
    assert len(made.past) + len(made.split.test) == 100_000


def test_the_stages_are_those_of_the_ablation() -> None:
    parts = {}
    for method in ("gcn", "gerai", "gerai-nl", "gerai-nf"):
        made = gerai.setting({**RUN, "model": method}, "as-written", 0)
        chain = made.defense.defenses if isinstance(made.defense, Chain) else ()
        parts[method] = [type(part) for part in chain]
        assert isinstance(made.model, AttentionGCN)
        noisy = FunctionalMechanism in parts[method]
        assert (made.protocol.loss, made.model.bounding) == (("bpr-taylor", "clip") if noisy else ("bpr", "none"))
    assert parts == {
        "gcn": [],
        "gerai": [PerturbedFeatures, FunctionalMechanism],
        "gerai-nl": [FunctionalMechanism],
        "gerai-nf": [PerturbedFeatures],
    }
    kinds = {
        noise: gerai.setting({**RUN, "model": "gerai-nl", "noise": noise}, "as-written", 0).defense
        for noise in ("redrawn", "fixed", "sum")
    }
    mechanisms = {name: each.defenses[0] for name, each in kinds.items() if isinstance(each, Chain)}
    told = {n: (m.redraw, m.repair, m.on) for n, m in mechanisms.items() if isinstance(m, FunctionalMechanism)}
    assert told == {
        "redrawn": ("step", "none", "mean"),
        "fixed": ("never", "ridge", "mean"),
        "sum": ("never", "ridge", "sum"),
    }
    with pytest.raises(NotFoundError, match="Unknown method 'grai'"):
        gerai.setting({**RUN, "model": "grai"}, "as-written", 0)


@pytest.mark.heavy
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_what_is_asked(method: str) -> None:
    asks: list[dict[str, gerai.Scalar]] = [
        {"measure": "utility"},
        {"measure": "training"},
        {"attack": "nb", "attribute": "gender", "top": 5, "input": "both"},
        {"attack": "nb", "attribute": "age", "top": 30, "input": "lists"},
        {"attack": "majority", "attribute": "gender", "input": "history"},
    ]
    torch.set_num_threads(1)
    found = list(gerai.measure({**RUN, "model": method}, asks, variant="as-written", seed=0, threads=1))
    assert len(found) == len(asks)
    utility = {name: value.mean() for name, value in found[0].metrics.items()}
    assert utility["hit@5"] <= utility["hit@10"] <= utility["hit@30"] <= 1
    assert all(0 <= value <= 1 for value in utility.values())
    for each in found[2:]:
        assert len(each.metrics["f1"]) == 189
        assert each.metrics["f1"].sum() == round(each.metrics["f1"].sum())  # k / 189, as the paper prints
    assert found[4].metrics["auc"].mean() == pytest.approx(0.5)


def test_ties_are_graded_by_expectation() -> None:
    """A constant score: each of the 100 places is as likely as any."""
    made = gerai.setting({**RUN, "model": "bpr"}, "as-written", 0)

    class Constant:
        def scores(self, users: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(users), made.train.n_items)

    found = gerai._utility(made, Constant())  # type: ignore[arg-type]
    assert found["hit@5"] == pytest.approx(0.05)
    assert found["ndcg@10"] == pytest.approx(sum(1 / np.log2(place + 2) for place in range(10)) / 100)


@pytest.mark.heavy
def test_an_attacker_that_copies_the_system() -> None:
    asks: list[dict[str, gerai.Scalar]] = [
        {"attack": "nb", "attribute": "gender", "top": 30, "input": kind} for kind in ("lists", "shadow")
    ]
    plain, adaptive = gerai.measure({**RUN, "model": "bpr"}, asks, variant="as-written", seed=0, threads=1)
    assert len(plain.metrics["auc"]) == len(adaptive.metrics["auc"]) == 189
    assert not np.array_equal(plain.metrics["auc"], adaptive.metrics["auc"])


def test_asks_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="expected both, lists, history or shadow"):
        gerai._evidence({"attack": "dnn", "input": "everything"})
    with pytest.raises(NotFoundError, match="Unknown attack 'svm'"):
        gerai._learner("svm")
