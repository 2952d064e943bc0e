"""How APM's cells are measured: who is known and who is graded, what each ask gives, on few rounds of the real data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from recleak.attacks.attribute import learner_of_items
from recleak.attacks.careful import Careful
from recleak.attacks.learners import Logistic
from recleak.data.features import classes_of
from recleak.defenses.adaptive_noise import AdaptiveNoise, BoundedGaussian
from recleak.errors import ConfigError, NotFoundError
from recleak.metrics.linearized import auc_values
from recleak.models.components import FanIn, Normal
from recleak.papers import apm

RUN: dict[str, apm.Scalar] = {"data": "ml-100k", "preset": "apm", "model": "feature-gcn", "factors": 8}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch, data: Callable[[str], Path]) -> None:
    data("ml-100k")
    monkeypatch.setattr(apm, "ROUNDS", {"ml-100k": 2})
    monkeypatch.setattr(apm, "SHARE", {"ml-100k": 0.1})


def test_known_users_are_among_the_attacked_and_nested() -> None:
    made = apm.setting({**RUN, "defense": "none"}, "as-written", 0)
    few, more = made.known(0.1), made.known(0.2)
    assert len(made.attacked) == 94
    assert [len(few), len(more)] == [9, 19]
    assert set(few) < set(more) < set(made.attacked)
    shown = made.knowledge("gender", 0.1).public["labels of gender"].numpy()
    assert np.array_equal(np.flatnonzero(shown >= 0), np.sort(few))
    assert np.array_equal(shown[few], classes_of(made.train, "gender")[0][few])


def test_variants_read_the_paper_as_it_says_twice() -> None:
    written, section = (
        apm.setting({**RUN, "defense": "apm"}, variant, 0).defense for variant in ("as-written", "section-5.7")
    )
    assert isinstance(written, AdaptiveNoise)
    assert isinstance(section, AdaptiveNoise)
    parts = ("user.encoder", "item", "head.1.weight", "head.2.weight")
    assert [written.epsilon(part) for part in parts] == [30, 40, 50, 60]
    assert [section.epsilon(part) for part in parts] == [30, 60, 40, 50]
    assert [written.moment, section.moment] == ["epoch", "upload"]
    laplace, gauss = (
        apm.setting({**RUN, "defense": name}, "as-written", 0).defense for name in ("fednews", "gaussian")
    )
    assert isinstance(gauss, BoundedGaussian)
    assert laplace.noise("item") == pytest.approx(gauss.noise("item"))
    with pytest.raises(NotFoundError, match="Unknown defense 'amp'"):
        apm.setting({**RUN, "defense": "amp"}, "as-written", 0)


def test_what_the_paper_leaves_open_can_be_changed() -> None:
    taken = apm.setting({**RUN, "defense": "none"}, "as-written", 0)
    changed: dict[str, apm.Scalar] = {"rounds": 5, "negatives": 1, "initial": "normal"}
    other = apm.setting({**RUN, "defense": "none", **changed}, "as-written", 0)
    assert [made.protocol.rounds for made in (taken, other)] == [2, 5]
    assert [made.protocol.local.negatives for made in (taken, other)] == [4, 1]
    assert [made.protocol.local.optimizer.learning_rate for made in (taken, other)] == [0.032, 0.001]
    heads = [{part.name: part.init for part in made.model.components()}["head.1.weight"] for made in (taken, other)]
    assert heads == [FanIn(), Normal(1.0)]


def test_the_ledger_of_noise_on_every_number() -> None:
    made = apm.setting({**RUN, "defense": "fixrec-max"}, "as-written", 0)
    spent = {name: float(value[0]) for name, value in apm._spent(made).items()}
    numbers = sum(part.size * (1682 if part.storage == "per_item" else 1) for part in made.model.components())
    assert spent["number"] == pytest.approx(30)
    assert spent["upload"] == pytest.approx(30 * numbers)
    assert spent["upload-busiest"] == pytest.approx(2 * 30 * numbers)  # of two rounds, somebody is in both


def test_levels_are_measured_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apm, "SHARE", {"ml-100k": 0.3})
    run, asks = {**RUN, "defense": "apm-measured"}, [{"measure": "levels"}, {"measure": "ledger"}]
    levels, spent = apm.measure(run, asks, variant="as-written", seed=0, threads=1)
    assert set(levels.metrics) == {"user", "item", "head.1", "head.2"}
    found = [float(value[0]) for value in levels.metrics.values()]
    assert (min(found), max(found)) == (0, 3)
    assert found[0] == 0  # the user's part has the attribute in it
    assert spent.metrics["number"] == pytest.approx(60)


def test_another_round_can_be_attacked() -> None:
    who: dict[str, apm.Scalar] = {"attribute": "gender", "zeta": 0.2}
    asks: list[dict[str, apm.Scalar]] = [
        {"measure": "validation"},
        {"attack": "exact", **who},
        {"attack": "exact", "round": "first", **who},
    ]
    run = {**RUN, "defense": "none"}
    made = apm.setting(run, "as-written", 0)
    first = apm._at(made, asks[2])
    assert [made.round, first.round] == [1, 0]
    assert not np.array_equal(made.attacked, first.attacked)
    valid, last, early = apm.measure(run, asks, variant="as-written", seed=0, threads=1)
    assert valid.metrics["hit@20"].shape == (943,)
    assert last.metrics["auc"].mean() > 0.99
    assert early.metrics["auc"].mean() > 0.99


def test_what_needs_no_upload_needs_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling is the reader of the chain on the true interactions of all who have any."""
    monkeypatch.setattr(apm, "_train", lambda *_: pytest.fail("trained"))
    who: dict[str, apm.Scalar] = {"attribute": "gender", "zeta": 0.2}
    asks: list[dict[str, apm.Scalar]] = [{"attack": name, **who} for name in ("true-items", "interactions", "majority")]
    run = {**RUN, "defense": "none"}
    found = list(apm.measure(run, asks, variant="as-written", seed=0, threads=1))
    ceiling, reduced = (one.metrics["auc"].mean() for one in found[:2])
    assert ceiling != reduced
    assert found[2].metrics["auc"].mean() == 0.5
    made = apm.setting(run, "as-written", 0)
    label, names = classes_of(made.train, "gender")
    known = made.known(0.2)
    graded = np.setdiff1d(made.attacked, known)
    others = np.setdiff1d(np.arange(943), known)  # all have items, and all are seen by who listens long enough
    rows = made.train.matrix().toarray().astype(np.float32)
    told = learner_of_items().fit_predict(rows[np.sort(known)], label[np.sort(known)], 2, rows[others], 0)
    expected = auc_values(told[np.searchsorted(others, graded)], label[graded]).mean()
    assert ceiling == pytest.approx(expected, abs=1e-6)
    assert [len(names), *found[0].metrics] == [2, "macro-f1", "micro-f1", "auc", "user"]


def test_the_attacker_can_ask_the_users_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them guessed from the others; and who is careful reads the same uploads without what the clip does."""
    monkeypatch.setattr(apm, "SHARE", {"ml-100k": 0.3})
    monkeypatch.setattr(apm, "Careful", partial(Careful, learners=(Logistic(),)))
    who: dict[str, apm.Scalar] = {"attribute": "gender", "zeta": 0.3, "part": "user", "round": "first"}
    asks: list[dict[str, apm.Scalar]] = [
        {"attack": "svc", "graded": "known", **who},
        {"attack": "svc", **who},
        {"attack": "careful", "shift": "known", **who},
    ]
    run = {**RUN, "defense": "apm"}
    made = apm.setting(run, "section-5.7", 0)
    known, others, careful = apm.measure(run, asks, variant="section-5.7", seed=0, threads=1)
    assert len(known.metrics["auc"]) == len(made.known(0.3))
    assert len(others.metrics["auc"]) == len(careful.metrics["auc"]) == len(made.attacked) - len(made.known(0.3))
    plain, taken = (dict(apm._evidence(made, ask))[apm._key(ask)] for ask in asks[1:])
    assert (plain.shift, taken.shift) == ("ignored", "known")


@pytest.mark.heavy
@pytest.mark.parametrize("defense", ["none", "apm", "f-gerai"])
def test_every_ask_has_its_answer(defense: str) -> None:
    who: dict[str, apm.Scalar] = {"attribute": "gender", "zeta": 0.2}
    asks: list[dict[str, apm.Scalar]] = [
        {"measure": "utility"},
        {"attack": "aia", "part": "full", **who},
        {"attack": "svc", "part": "user", **who},
        {"attack": "gbt", "part": "full", "uploads": "all", "noise": "known", **who},
        *({"attack": name, **who} for name in ("exact", "chain", "random", "proportional", "majority", "interactions")),
        {"attack": "true-items", **who},
    ]
    found = list(apm.measure({**RUN, "defense": defense}, asks, variant="as-written", seed=0, threads=1))
    assert len(found) == len(asks)
    assert set(found[0].metrics) == {"hit@20", "user"}
    for one in found[1:]:
        assert set(one.metrics) == {"macro-f1", "micro-f1", "auc", "user"}
        assert {len(values) for values in one.metrics.values()} == {94 - 19}
    auc = {str(ask.get("attack")): one.metrics["auc"].mean() for ask, one in zip(asks[1:], found[1:], strict=True)}
    assert auc["majority"] == 0.5
    if defense == "none":
        assert auc["exact"] > 0.99


def test_an_unknown_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a measure or an attack that is known"):
        next(apm.measure({**RUN, "defense": "none"}, [{"attack": "x"}], variant="as-written", seed=0, threads=1))
