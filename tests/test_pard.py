"""How PARD's cells are measured: who is known and graded, what leaves, what each ask gives, on few real rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recleak.attacks.base import WhichAttribute
from recleak.attacks.community_vectors import kept_parts
from recleak.data.features import classes_of
from recleak.data.source import open_data
from recleak.defenses.base import Chain, all_components
from recleak.defenses.consent import UserConsent
from recleak.defenses.decoupling import Decoupling
from recleak.errors import ConfigError, NotFoundError
from recleak.grading import communities, grade_communities, pairs_seen
from recleak.models.decoupled import Decoupled
from recleak.models.lightgcn import LightGCN
from recleak.models.pfedrec import PFedRec
from recleak.papers import base, pard, pard_attacks, pard_settings
from recleak.papers.pard_settings import CODE, Scalar, Setting, _as_the_code, setting
from recleak.papers.store import Question, Results, Store
from recleak.protocols.stopping import Either, Plateau
from recleak.recording import Listening
from recleak.training.attributes import insensitive
from recleak.wire import Broadcast, Server, Upload

RUN: dict[str, Scalar] = {"data": "ml-100k", "preset": "pard", "model": "fedncf", "thin": 6, "rounds": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, data: Callable[[str], Path]) -> None:
    data("ml-100k")
    monkeypatch.setattr(pard_settings, "FACTORS", 8)
    monkeypatch.setattr(pard_settings, "EVERY", 1)
    monkeypatch.setattr(pard_settings, "open_data", lru_cache(open_data))
    monkeypatch.setattr(pard_settings, "thinned", lru_cache(pard_settings.thinned))


def measured(method: str, asks: list[dict[str, Scalar]], **run: Scalar) -> list[dict[str, float]]:
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
        made = setting({**run, "thin": 6}, "as-written", 0)
        all_components(made.model.components(), made.defense)
    for cell in paper.cells.values():
        if cell.run.get("data") == "ml-100k" and cell.run["method"] == "pard":
            pard_attacks.attack_of(setting({**cell.run, "thin": 6}, "as-written", 0), cell.ask, {})
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


def test_nulls_stand_beside_attacks_and_utility() -> None:
    """Every table with an attack on an attribute has the most frequent class in each of its columns."""
    paper = base.load("pard")
    for table in paper.tables:
        asked = {cell.column for cell in table.cells if cell.ask.get("attack") in ("aia", "chain")}
        null = {cell.column for cell in table.cells if cell.ask.get("attack") == "majority"}
        assert asked <= null, table.id
        nulls = {_graded(cell) for cell in table.cells if cell.ask.get("attack") == "majority"}
        attacks = {_graded(cell) for cell in table.cells if cell.ask.get("attack") in ("aia", "chain")}
        assert attacks <= nulls, table.id
        assert all("measure" not in cell.ask for cell in table.cells if "attack" in cell.ask)
    cell = paper.cells["III/popularity/ml-1m/recall"]
    assert cell.ask == {"measure": "popularity"}
    assert "III/popularity/ml-1m/age" not in paper.cells
    assert paper.unavailable == ("taobao",)


def _graded(cell: base.Cell) -> tuple[Scalar, ...]:
    """What decides which users an attack on an attribute is graded on."""
    labels, eta = cell.ask.get("labels", "public"), cell.run.get("eta", 0.2)
    known = "others" if labels == "others" else eta if labels == "public" else labels
    choice = cell.ask.get("among", "all"), cell.run.get("consent", "")
    return known, *choice, cell.run["data"], cell.ask["attribute"]


def test_who_is_known_and_who_is_graded() -> None:
    made = setting({**RUN, "method": "fedavg"}, "as-written", 0)
    public = made.attributes.public.numpy()
    assert 0.15 < public.mean() < 0.25
    others, half, few = (made.known({"labels": labels}) for labels in ("others", 0.5, 0.1))
    assert others.sum() == public.sum()
    assert not (others & public).any()
    assert np.array_equal(half, insensitive(len(public), 0.5, 0).numpy())
    assert (half & public).sum() == public.sum()
    assert np.array_equal(few, insensitive(len(public), 0.1, 0).numpy())
    assert not (few & ~public).any()
    last = np.flatnonzero(public)[-len(public) // 20 :]
    assert 0 < few[last].sum() < len(last)  # not the first public users, but a part of all
    told = setting({**RUN, "method": "pard"}, "as-written", 0)
    with pytest.raises(ConfigError, match="Give the run a smaller eta"):
        told.known({"labels": 0.1})
    shown = made.knowledge({"attack": "aia", "attribute": "gender"}).public["labels of gender"].numpy()
    assert np.array_equal(shown >= 0, public)
    assert np.array_equal(shown[public], classes_of(made.train, "gender")[0][public])


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("eta", [0.1, 0.2, 0.3])
def test_all_methods_are_graded_on_the_same_users(eta: float, seed: int) -> None:
    """In a column of Table V: those whom the server knows are those who are public to PARD."""
    cells = base.load("pard").cells
    known, graded = [], []
    for method in ("fedavg", "apm", "pard"):
        cell = cells[f"V/{eta}/{method}/gender"]
        made = setting({**cell.run, "thin": 6}, "as-written", seed)
        known.append(made.known(cell.ask))
        graded.append(made.among(cell.ask))
        assert not (known[-1] & graded[-1]).any()
        assert (known[-1] | graded[-1] | (made.train.activity == 0)).all()
    assert all(np.array_equal(each, known[2]) for each in known)
    assert all(np.array_equal(each, graded[2]) for each in graded)
    assert known[2].mean() == pytest.approx(eta, abs=0.05)


def test_users_whose_attribute_is_known_are_graded_by_the_others() -> None:
    """All of them once, and nobody else: what a defender can choose a strength by."""
    made = setting({**RUN, "method": "pard"}, "as-written", 0)
    public = made.attributes.public.numpy()
    asks: list[dict[str, Scalar]] = [{"attribute": "gender", "among": "known", "fold": fold} for fold in range(5)]
    parts = [made.among(ask) for ask in asks]
    assert np.array_equal(np.sum(parts, axis=0), (public & (made.train.activity > 0)).astype(int))
    assert min(part.sum() for part in parts) > public.sum() / 10
    for ask, part in zip(asks, parts, strict=True):
        known = made.known(ask)
        assert not (known & part).any()
        assert np.array_equal(known | part, public)
    found = pard_attacks.graded(made, {"attack": "interactions", "attribute": "gender", "among": "known"}, None, {})
    assert sorted(found["user"]) == np.flatnonzero(public).tolist()
    assert {len(value) for value in found.values()} == {public.sum()}


def test_the_grid_shares_its_runs_with_figure_6() -> None:
    paper = base.load("pard")
    results = Results(paper, Store(Path("none")), code=pard.VERSION, variant="as-written")

    def run(name: str) -> dict[str, Scalar]:
        return dict(results.question(paper.cells[name]).run)

    levels = ("0.1", "0.3", "0.5", "0.7", "0.9")
    for level in levels:
        assert run(f"grid/{level}/gender/0.5") == run(f"fig6a/ml-100k/gender/{level}")
        assert run(f"grid/0.5/validation/{level}") == run(f"fig6b/ml-100k/recall@10/{level}")
    assert run("grid/0.5/validation/0.5") == run("III/fedncf/pard/ml-100k/recall")
    assert len({str(run(f"grid/{ir}/validation/{re}")) for ir in levels for re in levels}) == 25


def test_users_choose_what_is_protected_and_are_graded_apart() -> None:
    usual = setting({**RUN, "method": "uc-fedrec"}, "as-written", 0)
    made = setting({**RUN, "method": "uc-fedrec", "consent": 0.25}, "as-written", 0)
    public, gender, age = (
        made.attributes.public.numpy(),
        *(made.attributes.protected[name].numpy() for name in ("gender", "age")),
    )
    assert not (gender & public).any()
    assert gender[~public].mean() == pytest.approx(0.75, abs=0.05)
    assert (gender != age).any()  # each attribute for itself
    asks: list[dict[str, Scalar]] = [
        {"attribute": "gender", "among": which} for which in ("all", "protected", "consenting")
    ]
    everybody, protected, consenting = (made.among(ask) for ask in asks)
    assert np.array_equal(protected, gender & everybody)
    assert np.array_equal(consenting, ~gender & everybody)
    assert np.array_equal(usual.among(asks[1]), everybody)  # nothing is said: all but the insensitive users
    with pytest.raises(NotFoundError, match="among"):
        made.among({"attribute": "gender", "among": "friends"})


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
    made = setting({**RUN, "method": method, "model": model}, "as-written", 0)
    parts = all_components(made.model.components(), made.defense)
    assert {part.name.partition(".")[0] for part in parts if part.shared} == sent
    assert {part.name for part in parts if part.shared and not part.averaged} == ({"user"} & sent)


def test_variants_and_settings() -> None:
    written, code = (setting({**RUN, "method": "pard"}, variant, 0) for variant in ("as-written", CODE))
    assert isinstance(written.model, Decoupled)
    assert isinstance(code.model, Decoupled)
    assert (written.model.combine, code.model.combine) == ("concat", "sum")
    assert isinstance(code.defense, Decoupling)
    assert isinstance(written.defense, Decoupling)
    assert (code.defense.relabels, code.defense.warm_up, code.defense.inverse) == (True, 4, "own")
    assert (code.defense.steps, written.defense.steps) == (1, 10)
    assert (code.defense.learning_rate, written.defense.learning_rate) == (0.1, 0.1)
    assert code.defense.sample == round(0.08 * int(code.attributes.public.sum()))
    assert _as_the_code("ml-1m", 1208) == _as_the_code("ml-100k", 1208) | {"learning_rate": 0.01}
    assert (code.plateau, written.plateau) == (Plateau(1, 20), Plateau(1, 5))  # EVERY is 1 here
    assert (written.defense.bound, written.defense.reads) == ("plain", "items")
    assert dict(written.defense.attributes) == {"age": 3, "gender": 2, "occupation": 21}
    assert code.local.optimizer.learning_rates["item"] == pytest.approx(0.1 * code.train.n_items)
    assert code.oracle({})
    assert not written.oracle({})
    changed = setting({**RUN, "method": "pard", "ir": 0.1, "re": 0.0, "bound": "club"}, "as-written", 0).defense
    assert isinstance(changed, Decoupling)
    assert (changed.irrelevant, changed.relevant, changed.bound) == (0.1, 0.0, "club")
    consent = setting({**RUN, "method": "uc-fedrec", "strength": 0.9}, "as-written", 0).defense
    assert isinstance(consent, Chain)
    assert isinstance(consent.defenses[1], UserConsent)
    assert consent.defenses[1].strength == 0.9
    assert isinstance(setting({**RUN, "method": "pfedrec"}, "as-written", 0).model, PFedRec)
    assert isinstance(setting({**RUN, "method": "apm", "model": "fedgcn"}, "as-written", 0).model, LightGCN)
    with pytest.raises(NotFoundError, match="Unknown method 'prad'"):
        setting({**RUN, "method": "prad"}, "as-written", 0)
    with pytest.raises(NotFoundError, match="Unknown model 'ncf'"):
        setting({**RUN, "method": "pard", "model": "ncf"}, "as-written", 0)


@pytest.mark.parametrize("model", ["fedncf", "fedgcn"])
def test_batches_of_pfedrec_have_two_passes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is moved first, and items by a gradient with that, on a graph too."""
    monkeypatch.setattr(pard_settings, "thinned", lambda data, count, seed: data.restrict(data.user < 40, "few users"))
    made = setting({**RUN, "method": "pfedrec", "model": model, "rounds": 1}, "as-written", 0)
    assert made.local.turns == (("user", "head"), ("item",))
    assert setting({**RUN, "method": "fedavg", "model": model}, "as-written", 0).local.turns == ()
    once = replace(made, local=replace(made.local, turns=()))
    two, one = (pard._train(each, Plateau(1, 9), [], 1).params["item"] for each in (made, once))
    assert not torch.equal(two, one)


@pytest.mark.parametrize(("rounds", "capped"), [(2, 1.0), (9, 0.0)])
def test_a_run_says_how_it_ended(rounds: int, capped: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that is measured, all rounds, and whether the cap came before the plateau."""
    looks = iter((0.2, 0.3, 0.1, 0.1, 0.1))
    monkeypatch.setattr(Setting, "recall", lambda self, model: next(looks))
    monkeypatch.setattr(pard_settings, "PATIENCE", 2)
    [found] = measured("fedavg", [{"measure": "utility"}], rounds=rounds)
    assert (found["rounds"], found["trained"], found["capped"]) == (2, min(rounds, 4), capped)
    assert found["validation"] == 0.3


def test_only_usual_runs_are_remembered_as_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pard, "_LEVELS", {})
    usual: dict[str, Scalar] = {**RUN, "method": "fedavg"}
    made = setting(usual, "as-written", 0)
    trained = pard._train(made, Plateau(1, 9), [], 1)
    pard._remember({**usual, "vector": "kept"}, made, trained)
    assert not pard._LEVELS
    pard._remember(usual, made, trained)
    assert list(pard._LEVELS.values()) == [trained.curve[-1]]
    strong: dict[str, Scalar] = {**RUN, "method": "uc-fedrec", "strength": 0.9}
    other = setting(strong, "as-written", 0)
    assert pard._level(strong, other, 1) == trained.curve[-1]
    assert pard.needs(usual) == []
    assert pard.needs(strong) == [(usual, {"measure": "utility"})]


def test_levels_of_another_process_are_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rule that hears of a stored curve, which is rounded, ends where it would have without."""
    run: dict[str, Scalar] = {**RUN, "method": "pfedrec"}
    [(rival, ask)] = pard.needs(run)
    users = 943
    for exact in (701 / users, 707 / users, 1 + 1 / users):
        monkeypatch.setattr(pard, "_LEVELS", {})
        store, question = Store(tmp_path / str(exact)), Question("", 0, "", rival, ask)
        store.write(question, 0, {}, {"validation": [(1, exact / 2), (2, exact)]}, 0.0)
        pard.hear(rival, "as-written", 0, store.read(question, 0).series)
        monkeypatch.setattr(pard, "_train", lambda *_: pytest.fail("it was trained again"))
        rule = pard._rule(setting(run, "as-written", 0), run, 1)
        assert rule.ended([exact])
        assert not rule.ended([exact - 1 / users])
        assert not rule.ended([exact - 1 / 6040])


def test_thinned_data_have_so_many_of_each_user() -> None:
    made = setting({**RUN, "method": "fedavg"}, "as-written", 0)
    assert set(made.train.activity.tolist()) == {4}  # 6 less validation and test
    assert made.train.n_users == 943


def test_what_costs_nothing_stands_beside_own_items(tmp_path: Path) -> None:
    """Of the rows of the same upload: popularity, all of them, random ones."""
    made = setting({**RUN, "method": "pard", "rounds": 1}, "as-written", 0)
    best = pard.BestRound(made, tmp_path)
    best.end(pard._train(made, Plateau(1, 9), [best], 1, best.look), Plateau(1, 9))
    found, asked = {}, []
    for by in ("gradient", "popularity", "all-positive", "random"):
        ask: dict[str, Scalar] = {"attack": "membership", "by": by}
        tap = Listening(Server(), pard_attacks.attack_of(made, ask, {}), made.knowledge(ask))
        for message in best.messages:
            tap.receive(message)
        asked.append(pairs_seen(tap.state(), made.train.n_items))
        found[by] = pard_attacks.graded(made, ask, tap, {})
    assert all(torch.equal(each.item, asked[0].item) for each in asked)
    mean = {by: {name: float(value.mean()) for name, value in metrics.items()} for by, metrics in found.items()}
    assert mean["popularity"]["auc"] > 0.75
    assert mean["random"]["auc"] == pytest.approx(0.5, abs=0.05)
    assert mean["random"]["f1"] < mean["all-positive"]["f1"] < mean["popularity"]["f1"]
    auc = found["gradient"]["auc"]
    assert mean["gradient"]["auc-median"] == np.median(auc)
    assert mean["gradient"]["auc-below"] == (auc < 0.5).mean()
    with pytest.raises(NotFoundError, match="Unknown by 'lot'"):
        pard_attacks.attack_of(made, {"attack": "membership", "by": "lot"}, {})
    cells = base.load("pard").cells
    assert cells["items/neither/membership"].run["ir"] == cells["items/neither/membership"].run["re"] == 0
    assert {cells[f"items/pard/{name}"].ask["by"] for name in ("popularity", "all-positive-f1", "random")} == set(
        found
    ) - {"gradient"}


def test_figure_7_asks_what_table_iii_asks() -> None:
    paper = base.load("pard")
    results = Results(paper, Store(Path("none")), code=pard.VERSION, variant="as-written")
    for attribute in ("age", "gender", "occupation"):
        names = f"fig7/ml-100k/{attribute}/all", f"III/fedncf/pard/ml-100k/{attribute}"
        assert len({results.question(paper.cells[name]).name for name in names}) == 1


@pytest.mark.heavy
def test_every_ask_gives_its_metrics() -> None:
    asks: list[dict[str, Scalar]] = [
        {"measure": "utility"},
        {"measure": "popularity"},
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
    ranked = {"recall@10", "ndcg@10", "recall@10-full", "ndcg@10-full", "user"}
    assert set(found[0]) == {*ranked, "rounds", "trained", "capped", "validation"}
    assert found[0]["rounds"] == 2
    popular = found.pop(1)
    asks.pop(1)
    assert popular["rounds"] == 0
    assert popular["recall@10"] > 0.2  # chance is 0.1
    assert all({"auc", "micro-f1", "macro-f1", "user"} == set(each) for each in found[1:10])
    label = classes_of(setting({**RUN, "method": "pard"}, "as-written", 0).train, "age")[0]
    assert found[7]["micro-f1"] == pytest.approx(np.bincount(label).max() / len(label), abs=0.03)
    assert found[7]["auc"] == 0.5
    assert {"auc", "auc-median", "auc-below", "f1"} == set(found[10])
    membership, community = measured("fedavg", asks[10:12])
    assert membership["auc"] > 0.9  # rows that move tell what is whose
    assert community["accuracy"] > 3 * found[12]["accuracy"]
    with pytest.raises(ConfigError, match="expected a measure or an attack that is known"):
        measured("fedavg", [{"attack": "guess", "attribute": "age"}])
    with pytest.raises(ConfigError, match="keeps no vector of users"):
        measured("fedavg", [{"attack": "aia", "attribute": "age", "reads": "private"}])


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("fedavg", set()),
        ("apm", set()),
        ("uc-fedrec", set()),
        ("pfedrec", {"head"}),
        ("pard", {"user", "user.private", "head"}),
    ],
)
def test_cda_puts_a_vector_of_its_own_in_the_place_of_what_is_kept(method: str, kept: set[str]) -> None:
    """What is sent is scored as it is; who keeps a part is scored with a fitted user, of which nothing was sent."""
    made = setting({**RUN, "method": method}, "as-written", 0)
    knowledge = made.knowledge({"attack": "cda"})
    lacking = {part.name for part in kept_parts(knowledge)}
    assert {name.partition(".")[0] if name.startswith("head") else name for name in lacking} == kept
    assert knowledge.public["targets"].shape == (100, made.train.n_items)


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["fedavg", "pfedrec", "pard"])
def test_cda_finds_communities(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pard_settings, "LEADERS", 20)
    asks: list[dict[str, Scalar]] = [
        {"attack": "cda"},
        {"attack": "cda", "scoring": "standardized"},
        {"attack": "random-community"},
    ]
    plain, standardized, null = (each["accuracy"] for each in measured(method, asks))
    assert plain != standardized
    assert standardized > 1.5 * null


def test_communities_are_graded_over_adversaries_and_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranking that all adversaries share is one draw, not a draw for each: its spread is that of victims."""
    monkeypatch.setattr(pard_settings, "LEADERS", 20)
    made = setting({**RUN, "method": "fedavg"}, "as-written", 0)
    users, ask = made.train.n_users, {"attack": "cda"}
    leader = made.leaders(ask)
    assert len(leader) == 20
    shared = torch.rand(users, generator=torch.Generator().manual_seed(0)).expand(20, users)
    tap: Any = SimpleNamespace(answer=lambda question: shared)
    found = pard_attacks.graded(made, ask, tap, {})
    truth = communities(made.targets[leader], made.train, 50, leader)
    alone = grade_communities(shared, truth, 50, leader)["accuracy"].double().numpy()
    assert found["user"].tolist() == list(range(users))
    assert found["accuracy"].shape == (users,)
    assert found["accuracy"].mean() == pytest.approx(alone.mean())
    assert found["accuracy"].std() / users**0.5 > 1.5 * alone.std() / 20**0.5
    draw = pard_attacks.graded(made, {"attack": "random-community"}, None, {})
    assert draw["user"].tolist() == list(range(users))


@pytest.mark.parametrize("method", ["pfedrec", "pard"])
def test_cda_is_refused_where_it_cannot_fit_what_is_kept(method: str) -> None:
    made = setting({**RUN, "method": method, "model": "fedgcn"}, "as-written", 0)
    with pytest.raises(ConfigError, match="on a graph keeps a part of its model"):
        made.knowledge({"attack": "cda"})


def test_true_interactions_are_read_as_inferred_ones_are() -> None:
    """Else who reads the truth would be no ceiling of the chain."""
    made = setting({**RUN, "method": "fedavg"}, "as-written", 0)
    assert (
        pard_attacks.LEARNERS["chain"]
        == pard_attacks.attack_of(made, {"attack": "chain", "attribute": "age"}, {}).learner
    )
    ask: dict[str, Scalar] = {"attack": "interactions", "attribute": "gender"}
    usual, same = (pard_attacks.graded(made, each, None, {})["auc"] for each in (ask, {**ask, "learner": "chain"}))
    assert np.array_equal(usual, same)


def test_what_is_inferred_from_an_upload_is_inferred_once(tmp_path: Path) -> None:
    """Attacks on the last round share it, by the way it is inferred; answers are those of the attack alone."""
    made = setting({**RUN, "method": "fedavg"}, "as-written", 0)
    shared: dict[str, pard_attacks.OncePerUpload] = {}
    asks: list[dict[str, Scalar]] = [{"attack": "membership"}, {"attack": "chain", "attribute": "gender"}]
    first, chain = (pard_attacks.attack_of(made, ask, shared) for ask in asks)
    distant = pard_attacks.attack_of(made, {"attack": "membership", "by": "distance"}, shared)
    assert chain.membership is first
    assert distant is not first
    best = pard.BestRound(made, tmp_path)
    best.end(pard._train(made, Plateau(1, 9), [best], 1, best.look), Plateau(1, 9))
    alone = pard_attacks._membership(made, asks[0])
    taps = [Listening(Server(), attack, made.knowledge()) for attack in (first, alone)]
    for message in best.messages:
        for tap in taps:
            tap.receive(message)
    assert len(first.found) == sum(isinstance(message, Upload) for message in best.messages)
    question = pairs_seen(taps[0].state(), made.train.n_items)
    assert torch.equal(taps[0].answer(question), taps[1].answer(question))


def test_what_is_inferred_in_all_rounds_is_inferred_once_for_all_who_listen() -> None:
    """And forgotten with the next upload; who listens finds what it would alone."""
    made = setting({**RUN, "method": "fedavg"}, "as-written", 0)
    asks: list[dict[str, Scalar]] = [
        {"attack": name, "attribute": "gender", "uploads": "all", "by": by}
        for name in ("chain", "aia")
        for by in ("gradient", "distance")
    ]
    shared: dict[str, pard_attacks.OncePerUpload] = {}
    together = [pard_attacks.attack_of(made, ask, shared) for ask in asks]
    assert together[0].membership is together[2].membership
    assert together[1].membership is together[3].membership
    assert together[0].membership is not together[1].membership
    alone = [pard_attacks.attack_of(made, ask, {}) for ask in asks]
    taps = [Listening(Server(), attack, made.knowledge(asks[0])) for attack in (*together, *alone)]
    pard._train(made, Plateau(1, 9), taps, 1)
    assert [len(once.found) for once in shared.values()] == [1, 1]
    for one, other in zip(taps[:4], taps[4:], strict=True):
        first, second = one.state(), other.state()
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(("looks", "best"), [((0.3, 0.2, 0.1), 0), ((0.1, 0.3, 0.2), 1), ((0.1, 0.2, 0.3), 2)])
def test_what_counts_is_the_round_with_the_best_look(
    looks: tuple[float, ...], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = setting({**RUN, "method": "fedavg", "rounds": len(looks)}, "as-written", 0)
    left = iter(looks)
    monkeypatch.setattr(Setting, "recall", lambda self, model: next(left))
    found = pard.BestRound(made, tmp_path)
    found.end(pard._train(made, Plateau(1, 9), [found], 1, found.look), Plateau(1, 9))
    assert found.utility["rounds"].item() == best + 1
    assert found.utility["trained"].item() == len(looks)
    assert found.utility["validation"].item() == max(looks)
    messages = list(found.messages)
    assert {message.round for message in messages if isinstance(message, Broadcast | Upload)} == {best}
    assert sum(isinstance(message, Broadcast) for message in messages) == 1


@pytest.mark.parametrize("method", ["pard", "pfedrec", "apm"])
def test_a_model_is_measured_as_it_was_in_its_round(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its run has gone on since: as a run that ended there."""
    found = []
    for rounds in (2, 4):
        made = setting({**RUN, "method": method, "rounds": rounds}, "as-written", 0)
        looks = iter((0.1, 0.3, 0.2, 0.2))
        monkeypatch.setattr(Setting, "recall", lambda self, model, looks=looks: next(looks))
        (tmp_path / str(rounds)).mkdir()
        found.append(pard.BestRound(made, tmp_path / str(rounds)))
        found[-1].end(pard._train(made, Plateau(1, 9), [found[-1]], 1, found[-1].look), Plateau(1, 9))
    short, long = found
    assert short.utility.keys() == long.utility.keys()
    assert (short.utility.pop("trained").item(), long.utility.pop("trained").item()) == (2, 4)
    assert all(np.array_equal(value, long.utility[name]) for name, value in short.utility.items())
    assert short.kept.keys() == long.kept.keys() == ({"user.private"} if method == "pard" else set())
    assert all(torch.equal(value, long.kept[name]) for name, value in short.kept.items())


@pytest.mark.heavy
def test_rivals_stop_where_they_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pard, "_LEVELS", {})
    run = {**RUN, "rounds": 3}
    made = setting({**run, "method": "early-stop"}, "as-written", 0)
    rule = pard._rule(made, {**run, "method": "early-stop"}, 1)
    assert isinstance(rule, Either)  # as its rivals: looks every EVERY rounds, and its own plateau
    assert rule.every == rule.second.every == made.every == 1
    assert 0 < rule.second.level < 2
    kept = dict(pard._LEVELS)
    assert rule.second.level in kept.values()
    assert pard._rule(made, {**run, "method": "early-stop"}, 1) == rule
    assert kept == pard._LEVELS  # it was not trained again
    other = pard._rule(setting({**run, "method": "uc-fedrec"}, "as-written", 0), run, 1)
    assert isinstance(other, Either)
    assert isinstance(pard._rule(setting({**run, "method": "pard"}, "as-written", 0), run, 1), Plateau)


@pytest.mark.heavy
def test_published_choice_of_an_epoch_is_no_worse_than_any_chosen_before() -> None:
    ask: dict[str, Scalar] = {"attack": "aia", "attribute": "gender", "oracle": True}
    valid, test = measured("fedavg", [{**ask, "select": "valid"}, {**ask, "select": "test"}])
    assert test["auc"] >= valid["auc"] - 0.02
    assert test["auc"] > 0.5


def test_published_choice_of_an_epoch_is_by_guesses_as_they_are_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among equally likely classes a lot decides there too: an epoch that says nothing is no good one."""
    truth, nothing, half = np.zeros(60, np.int64), np.full((40, 3), 1 / 3), np.eye(3)[np.arange(40) % 2]
    monkeypatch.setattr(pard_attacks, "classes_of", lambda *_: (truth, ("a", "b", "c")))
    told = torch.where(torch.arange(60) < 20, 0, -1)
    knowledge: Any = SimpleNamespace(public={"labels of age": told})
    learner: Any = SimpleNamespace(path=lambda *_: np.stack([nothing, half]))
    made: Any = SimpleNamespace(train=None, seed=0)
    question = WhichAttribute(torch.arange(20, 60), "age", ("a", "b", "c"))
    best = pard_attacks._best_epoch(knowledge, question, torch.arange(60), torch.zeros(60, 2), learner, made)
    np.testing.assert_array_equal(best, half)


@pytest.mark.heavy
def test_tuned_users_score_with_rows_of_their_own() -> None:
    made = setting({**RUN, "method": "pfedrec"}, "as-written", 0)
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
