"""Attribute inference from lists: the contract of attacks, what each input is, audits of centralized systems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.attacks.audience import (
    FromHistory,
    FromLists,
    MajorityOfAudience,
    ProportionalOfAudience,
    ShadowLists,
    gerai_network,
)
from recleak.attacks.base import Knowledge, WhichAttribute
from recleak.attacks.learners import Bayes, GaussianProcess, Logistic
from recleak.attacks.preparation import Preparation
from recleak.central import central_ledger, shadow_lists
from recleak.data import store
from recleak.data.split import ratio
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.blurme import BlurMe
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.feature_noise import PerturbedFeatures
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.errors import ConfigError
from recleak.experiment import experiment
from recleak.models.autoencoder import Autoencoder
from recleak.models.central import UnknownModel
from recleak.models.factorization import WalkFactorization
from recleak.models.mf import MF
from recleak.papers.gerai import Setting
from recleak.protocols.centralized import Centralized, train_centralized
from recleak.runs import audit_run
from recleak.testing.attacks import AttackContract, Case, auc, chance_width
from recleak.wire import Audience, Message, Recommendations

USERS, ITEMS, PLACES, KNOWN = 160, 40, 6, 80
CLASSES = ("no", "yes")


def shown(label: Tensor, seed: int = 0, sessions: int = 2) -> list[Message]:
    """Lists: users of the second class are mostly shown items of the upper half."""
    generator = torch.Generator().manual_seed(seed)
    messages: list[Message] = []
    for session in range(sessions):
        taste = torch.rand(USERS, ITEMS, generator=generator)
        taste[:, ITEMS // 2 :] += 0.6 * label[:, None].float() - 0.3
        item = taste.topk(PLACES, 1).indices
        messages += [Recommendations(session, part, item[part]) for part in torch.arange(USERS).chunk(3)]
    return messages


def case(*, related: bool) -> Case:
    generator = torch.Generator().manual_seed(1)
    label, other = (torch.randint(2, (USERS,), generator=generator) for _ in range(2))
    told = label if related else other
    known = torch.where(torch.arange(USERS) < KNOWN, label, -1)
    history = (torch.rand(USERS, ITEMS, generator=generator) < 0.1).float()
    shadow = shown(told, seed=9, sessions=1)
    public = {
        "labels of sex": known,
        "history": history,
        "shadow users": torch.arange(KNOWN),
        "shadow lists": torch.cat([each.item for each in shadow if isinstance(each, Recommendations)])[:KNOWN],
    }
    knowledge = Knowledge(UnknownModel(), USERS, ITEMS, (), public=public)
    question = WhichAttribute(torch.arange(KNOWN, USERS), "sex", CLASSES)
    return Case(Audience(), knowledge, shown(told), question, label[KNOWN:] == 1)


class OnLists(AttackContract):
    """The contract with two classes: the probability of the second is the score."""

    def planted(self) -> Case:
        return case(related=True)

    def unrelated(self) -> Case:
        return case(related=False)

    def _answer(self, case: Case) -> Tensor:
        return super()._answer(case)[:, 1]


class TestNetwork(OnLists):
    attack = FromLists()


class TestListsAlone(OnLists):
    attack = FromLists(history=False, learner=Logistic(prepare=Preparation("none", "none")))


class TestDiscounted(OnLists):
    attack = FromLists(history=False, weighing="discounted", learner=Logistic(prepare=Preparation("none", "none")))


class TestBayes(OnLists):
    attack = FromLists(history=False, learner=Bayes())


class TestProcess(OnLists):
    attack = FromLists(history=False, learner=GaussianProcess(prepare=Preparation("none", "none")))


class TestShadow(OnLists):
    attack = ShadowLists(history=False, learner=Logistic(prepare=Preparation("none", "none")))


class AGuess(OnLists):
    def test_a_planted_leak_is_found(self) -> None:
        """It is not: a leak in lists must not reach what does not read them."""
        planted = self.planted()
        assert abs(auc(self._answer(planted), planted.truth) - 0.5) <= chance_width(planted.truth)


class TestHistoryAlone(AGuess):
    attack = FromHistory(learner=Logistic())


class TestMajority(AGuess):
    attack = MajorityOfAudience()


class TestProportional(AGuess):
    attack = ProportionalOfAudience()


# --- what is read -------------------------------------------------------------------------------------------------


def read(attack: FromLists, messages: list[Message], history: Tensor | None = None) -> Tensor:
    public = {"labels of sex": torch.zeros(3, dtype=torch.int64)} | ({} if history is None else {"history": history})
    knowledge = Knowledge(UnknownModel(), 3, 5, (), public=public)
    state = attack.init(knowledge)
    for message in messages:
        assert isinstance(message, Recommendations)
        state = attack.fold(knowledge, state, message)
    return attack.read(knowledge, state)[1]


def test_the_input_is_that_of_the_paper() -> None:
    """The sum of one-hot codes of history and top K (section 5.3)."""
    lists = [Recommendations(0, torch.tensor([0, 2]), torch.tensor([[1, 3, 4], [0, 2, -1]]))]
    history = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]])
    assert read(FromLists(top=2), [*lists], history).tolist() == [[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert read(FromLists(history=False), [*lists]).tolist() == [[0, 1, 0, 1, 1], [1, 0, 1, 0, 0]]
    weighed = read(FromLists(history=False, weighing="discounted"), [*lists])[0]
    assert weighed.tolist() == pytest.approx([0, 1, 0, 1 / np.log2(3), 0.5])


def test_one_session_or_all() -> None:
    lists = [Recommendations(round, torch.tensor([0]), torch.tensor([[round, 3]])) for round in (0, 1)]
    assert read(FromLists(history=False), [*lists]).tolist() == [[1, 1, 0, 2, 0]]
    assert read(FromLists(history=False, sessions=1), [*lists]).tolist() == [[1, 0, 0, 1, 0]]


def test_what_is_missing_is_said() -> None:
    knowledge = Knowledge(UnknownModel(), 3, 5, (), public={})
    with pytest.raises(ConfigError, match="history=False"):
        FromLists().init(knowledge)
    with pytest.raises(ConfigError, match="top is 0"):
        FromLists(top=0)
    asked = case(related=True)
    bare = replace(asked.knowledge, public={k: v for k, v in asked.knowledge.public.items() if "shadow" not in k})
    attack = ShadowLists(history=False)
    with pytest.raises(ConfigError, match="copy of the system"):
        attack.answer(bare, attack.init(bare), asked.question)
    assert gerai_network().hidden == (100,)


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_the_ledger_says_what_is_promised_to_whom() -> None:
    split = ratio(Synthetic(n_users=60, n_items=40, mean_activity=12, min_activity=6).generate(), (0.8, 0.1, 0.1))
    fast = Centralized(epochs=2, patience=0, batch_size=64)
    plain = train_centralized(fast, MF(4), split.train, show_progress=False)
    (none,) = central_ledger(fast, Defense(), plain, delta=1e-5)
    assert none.claimed is None
    assert "no defense" in none.words
    features, loss = central_ledger(
        fast, Chain((PerturbedFeatures(20.0), FunctionalMechanism(0.4, 1000))), plain, delta=1e-5
    )
    assert (features.claimed, features.composed) == (20.0, 20.0)
    assert loss.claimed is None
    assert "trained on the same data" in loss.words
    assert "Even for fixed q" in loss.words
    trained = train_centralized(fast, Autoencoder(4), split.train, defense=DPSGD(5.0), show_progress=False)
    (noisy,) = central_ledger(fast, DPSGD(5.0), trained, delta=1e-5)
    assert noisy.composed is not None
    assert noisy.claimed is not None
    assert noisy.composed > noisy.claimed
    assert "own list" in noisy.words
    assert noisy.times == 2
    solved = train_centralized(fast, WalkFactorization(4, 2.0), split.train, show_progress=False)
    (entry,) = central_ledger(fast, Defense(), solved, delta=1e-5)
    assert "One interaction changes many entries" in entry.words
    assert "discount" in central_ledger(fast, BlurMe(), plain, delta=1e-5)[0].words


# --- an adversary that copies the system --------------------------------------------------------------------------


def test_a_copy_knows_nothing_of_users_that_the_adversary_does_not_know() -> None:
    """Other genders of the others: the same lists. Other genders of known users: other lists."""
    split = ratio(Synthetic(n_users=80, n_items=50, mean_activity=12, min_activity=6).generate(), (0.8, 0.1, 0.1))
    known = np.arange(split.train.n_users) < 40

    def copied(turned: NDArray[np.bool_]) -> Tensor:
        gender = split.train.users["gender"].to_list()
        swap = {None: None, **dict(zip(sorted({*gender} - {None}), sorted({*gender} - {None})[::-1], strict=True))}
        users = split.train.users.with_columns(
            pl.Series("gender", [swap[each] if turn else each for each, turn in zip(gender, turned, strict=True)])
        )
        parts = {name: replace(getattr(split, name), users=users) for name in ("train", "valid", "test")}
        other = replace(split, **parts)
        protocol = Centralized(epochs=2, batch_size=64, top=5)
        made = Setting(other, MF(4), BlurMe(extra=1.0).fitted(other.train), protocol, None, 0)
        defense = made.knowledge("gender").defense
        assert isinstance(defense, BlurMe)
        assert defense.label is defense.weight is None
        return shadow_lists(made, known)["shadow lists"]

    as_they_are = copied(np.zeros(len(known), bool))
    assert torch.equal(as_they_are, copied(~known & (np.arange(len(known)) % 2 == 0)))
    assert not torch.equal(as_they_are, copied(known & (np.arange(len(known)) % 2 == 0)))


# --- in an audit --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    made = Synthetic(n_users=200, n_items=60, mean_activity=14, min_activity=8, coupling=1.0).generate()
    store.save(made, folder, name="small")
    return str(folder)


@pytest.mark.heavy
def test_an_audit_of_lists(data: str, tmp_path: Path) -> None:
    learner = {"use": "logistic"}
    table: dict[str, Any] = {
        "data": data,
        "model": [{"use": "mf", "factors": 8}, {"use": "rap", "factors": 8, "top": 5, "hidden": 8}],
        "protocol": {"use": "centralized", "epochs": 5, "batch_size": 128, "top": 10, "sessions": 2},
        "defenses": ["none", {"use": "blurme", "extra": 0.3}],
        "attacks": [
            {"use": "from-lists", "name": "both", "learner": learner},
            {"use": "from-lists", "name": "lists", "history": False, "learner": learner},
            {"use": "shadow-lists", "name": "adaptive", "history": False, "learner": learner},
            {"use": "from-updates", "name": "uploads"},
        ],
        "attributes": ["gender"],
        "known": 0.5,
    }
    findings = audit_run(experiment(table), tmp_path / "run", command="test")
    scores = findings.scores.filter(pl.col("metric") == "auc")
    assert set(scores["attack"]) >= {"both", "lists", "adaptive", "from-history", "majority-of-audience"}
    assert scores.filter(pl.col("attack") == "uploads")["reason"].str.contains("no vantage point").all()
    rest = scores.filter(pl.col("attack") != "uploads", pl.col("vantage") == "Audience")
    assert rest["value"].null_count() == 0
    majority = scores.filter(pl.col("attack") == "majority-of-audience")
    assert (majority["value"] == 0.5).all()
    verdicts = findings.verdicts.to_dicts()
    assert len(verdicts) == 4
    for row in verdicts:
        assert row["attack"] in ("lists", "adaptive")  # who reads lists alone decides
        assert row["null"] == "majority-of-audience"
        assert "lists" in row["words"]
        assert "uploads add" not in row["words"]
    assert findings.utility.filter(pl.col("metric") == "hit@10")["value"].null_count() == 0
    assert "There is no defense" in " ".join(findings.ledger["words"])
