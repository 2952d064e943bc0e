"""How PARD's cells are measured: who is known and graded, what leaves, what each ask gives, on few real rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from recleak.data.features import classes_of
from recleak.data.source import open_data
from recleak.defenses.base import Chain, all_components
from recleak.defenses.consent import UserConsent
from recleak.defenses.decoupling import Decoupling
from recleak.errors import ConfigError, NotFoundError
from recleak.models.decoupled import Decoupled
from recleak.models.lightgcn import LightGCN
from recleak.models.pfedrec import PFedRec
from recleak.papers import base, pard
from recleak.protocols.stopping import Either, Plateau, Reached

RUN: dict[str, pard.Scalar] = {"data": "ml-100k", "preset": "pard", "model": "fedncf", "thin": 6, "rounds": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, data: Callable[[str], Path]) -> None:
    data("ml-100k")
    monkeypatch.setattr(pard, "FACTORS", 8)
    monkeypatch.setattr(pard, "EVERY", 1)
    monkeypatch.setattr(pard, "open_data", lru_cache(open_data))
    monkeypatch.setattr(pard, "thinned", lru_cache(pard.thinned))


def measured(method: str, asks: list[dict[str, pard.Scalar]], **run: pard.Scalar) -> list[dict[str, float]]:
    variant = str(run.pop("variant", "as-written"))
    answers = pard.measure({**RUN, "method": method, **run}, asks, variant=variant, seed=0, threads=1)
    return [{name: float(value.mean()) for name, value in each.metrics.items()} for each in answers]


def test_every_cell_names_something_that_can_be_made() -> None:
    paper = base.load("pard")
    assert len(paper.claims) >= 20
    runs = {
        tuple(sorted(cell.run.items())): cell.run for cell in paper.cells.values() if cell.run.get("data") == "ml-100k"
    }
    for run in runs.values():
        made = pard.setting({**run, "thin": 6}, "as-written", 0)
        all_components(made.model.components(), made.defense)
    for cell in paper.cells.values():
        if cell.run.get("data") == "ml-100k" and cell.run["method"] == "pard":
            pard._attack(pard.setting({**cell.run, "thin": 6}, "as-written", 0), cell.ask)
            break


def test_published_numbers_are_those_of_the_paper() -> None:
    cells = base.load("pard").cells
    assert cells["III/fedncf/pard/ml-100k/gender"].published == 0.5777
    assert cells["III/fedgcn/uc-fedrec/ml-1m/recall"].published == 0.1578
    assert cells["III/fedncf/early-stop/taobao/age"].published is None
    assert cells["IV/relevant/ml-100k/recall"].published == 0.6426
    assert cells["V/0.3/pard/gender"].published == 0.6543
    assert cells["nulls/random/ml-1m/occupation"].published == 0.0743
    assert sum(cell.published is not None for cell in cells.values()) == 158 + 8 + 16 + 27


def test_who_is_known_and_who_is_graded() -> None:
    made = pard.setting({**RUN, "method": "fedavg"}, "as-written", 0)
    public = made.attributes.public.numpy()
    assert 0.15 < public.mean() < 0.25
    others, half, few = (made.known({"labels": labels}) for labels in ("others", 0.5, 0.1))
    assert others.sum() == public.sum()
    assert not (others & public).any()
    assert half.mean() == pytest.approx(0.5, abs=0.01)
    assert (half & public).sum() == public.sum()
    assert few.mean() == pytest.approx(0.1, abs=0.01)
    assert not (few & ~public).any()
    shown = made.knowledge({"attack": "aia", "attribute": "gender"}).public["labels of gender"].numpy()
    assert np.array_equal(shown >= 0, public)
    assert np.array_equal(shown[public], classes_of(made.train, "gender")[0][public])


@pytest.mark.parametrize(
    ("method", "model", "sent"),
    [
        ("fedavg", "fedncf", {"user", "item", "head"}),
        ("pfedrec", "fedncf", {"item"}),
        ("pfedrec", "fedgcn", {"item"}),
        ("apm", "fedgcn", {"user", "item", "head"}),
        ("uc-fedrec", "fedncf", {"user", "item", "head", "attacker"}),
        ("pard", "fedncf", {"user", "item"}),
        ("pard", "fedgcn", {"user", "item"}),
    ],
)
def test_what_leaves(method: str, model: str, sent: set[str]) -> None:
    """The table of docs/reproduction/pard.md."""
    made = pard.setting({**RUN, "method": method, "model": model}, "as-written", 0)
    parts = all_components(made.model.components(), made.defense)
    assert {part.name.partition(".")[0] for part in parts if part.shared} == sent
    assert {part.name for part in parts if part.shared and not part.averaged} == ({"user"} & sent)


def test_variants_and_settings() -> None:
    written, code = (pard.setting({**RUN, "method": "pard"}, variant, 0) for variant in ("as-written", pard.CODE))
    assert isinstance(written.model, Decoupled)
    assert isinstance(code.model, Decoupled)
    assert (written.model.combine, code.model.combine) == ("concat", "sum")
    assert isinstance(code.defense, Decoupling)
    assert isinstance(written.defense, Decoupling)
    assert (code.defense.relabels, code.defense.warm_up, code.defense.inverse) == (True, 3, "own")
    assert (written.defense.bound, written.defense.reads) == ("plain", "items")
    assert dict(written.defense.attributes) == {"age": 3, "gender": 2, "occupation": 21}
    assert code.local.optimizer.learning_rates["item"] == pytest.approx(0.1 * code.train.n_items)
    assert code.oracle({})
    assert not written.oracle({})
    changed = pard.setting({**RUN, "method": "pard", "ir": 0.1, "re": 0.0, "bound": "club"}, "as-written", 0).defense
    assert isinstance(changed, Decoupling)
    assert (changed.irrelevant, changed.relevant, changed.bound) == (0.1, 0.0, "club")
    consent = pard.setting({**RUN, "method": "uc-fedrec", "strength": 0.9}, "as-written", 0).defense
    assert isinstance(consent, Chain)
    assert isinstance(consent.defenses[1], UserConsent)
    assert consent.defenses[1].strength == 0.9
    assert isinstance(pard.setting({**RUN, "method": "pfedrec"}, "as-written", 0).model, PFedRec)
    assert isinstance(pard.setting({**RUN, "method": "apm", "model": "fedgcn"}, "as-written", 0).model, LightGCN)
    with pytest.raises(NotFoundError, match="Unknown method 'prad'"):
        pard.setting({**RUN, "method": "prad"}, "as-written", 0)
    with pytest.raises(NotFoundError, match="Unknown model 'ncf'"):
        pard.setting({**RUN, "method": "pard", "model": "ncf"}, "as-written", 0)


def test_thinned_data_have_so_many_of_each_user() -> None:
    made = pard.setting({**RUN, "method": "fedavg"}, "as-written", 0)
    assert set(made.train.activity.tolist()) == {4}  # 6 less validation and test
    assert made.train.n_users == 943


@pytest.mark.heavy
def test_every_ask_gives_its_metrics() -> None:
    asks: list[dict[str, pard.Scalar]] = [
        {"measure": "utility"},
        {"attack": "aia", "attribute": "gender"},
        {"attack": "aia", "attribute": "gender", "oracle": True, "learner": "gbt"},
        {"attack": "aia", "attribute": "gender", "reads": "private"},
        {"attack": "aia", "attribute": "gender", "reads": "user", "uploads": "all", "watch": "path"},
        {"attack": "aia", "attribute": "gender", "labels": "others", "learner": "knn"},
        {"attack": "chain", "attribute": "occupation"},
        {"attack": "majority", "attribute": "age"},
        {"attack": "random", "attribute": "age"},
        {"attack": "interactions", "attribute": "gender"},
        {"attack": "membership"},
        {"attack": "community"},
        {"attack": "random-community"},
    ]
    found = measured("pard", asks)
    assert set(found[0]) == {"recall@10", "ndcg@10", "recall@10-full", "ndcg@10-full", "rounds"}
    assert found[0]["rounds"] == 2
    assert all({"auc", "micro-f1", "macro-f1"} == set(each) for each in found[1:10])
    label = classes_of(pard.setting({**RUN, "method": "pard"}, "as-written", 0).train, "age")[0]
    assert found[7]["micro-f1"] == pytest.approx(np.bincount(label).max() / len(label), abs=0.03)
    assert found[7]["auc"] == 0.5
    assert {"auc", "f1"} == set(found[10])
    membership, community = measured("fedavg", asks[10:12])
    assert membership["auc"] > 0.9  # rows that move tell what is whose
    assert community["accuracy"] > 3 * found[12]["accuracy"]
    with pytest.raises(ConfigError, match="expected a measure or an attack that is known"):
        measured("fedavg", [{"attack": "guess", "attribute": "age"}])
    with pytest.raises(ConfigError, match="keeps no vector of users"):
        measured("fedavg", [{"attack": "aia", "attribute": "age", "reads": "private"}])


@pytest.mark.heavy
def test_rivals_stop_where_they_are_compared() -> None:
    run = {**RUN, "rounds": 3}
    made = pard.setting({**run, "method": "early-stop"}, "as-written", 0)
    rule = pard._rule(made, {**run, "method": "early-stop"}, 1)
    assert isinstance(rule, Reached)
    assert 0 < rule.level < 2
    other = pard._rule(pard.setting({**run, "method": "uc-fedrec"}, "as-written", 0), run, 1)
    assert isinstance(other, Either)
    assert isinstance(pard._rule(pard.setting({**run, "method": "pard"}, "as-written", 0), run, 1), Plateau)


@pytest.mark.heavy
def test_published_choice_of_an_epoch_is_no_worse_than_any_chosen_before() -> None:
    ask: dict[str, pard.Scalar] = {"attack": "aia", "attribute": "gender", "oracle": True}
    valid, test = measured("fedavg", [{**ask, "select": "valid"}, {**ask, "select": "test"}])
    assert test["auc"] >= valid["auc"] - 0.02
    assert test["auc"] > 0.5


@pytest.mark.heavy
def test_tuned_users_score_with_rows_of_their_own() -> None:
    from dataclasses import replace

    made = pard.setting({**RUN, "method": "pfedrec"}, "as-written", 0)
    trained = pard._train(made, Plateau(1, 9), [], 1)
    users = torch.tensor([3, 700])
    plain, tuned = trained.scores(users), replace(trained, tuned=True).scores(users)
    own = torch.from_numpy(made.train.matrix()[users.numpy()].toarray() > 0)
    moved = (tuned - plain)[own].mean()
    assert float(moved) > float((tuned - plain)[~own].mean())
    alone = replace(trained, tuned=True).scores_of(users, torch.tensor([[0, 5], [7, 9]]))
    torch.testing.assert_close(
        alone, tuned[torch.arange(2)[:, None], torch.tensor([[0, 5], [7, 9]])], atol=1e-5, rtol=1e-4
    )
