"""Community detection behind secure aggregation: a row of a sum is a user's own; with its vector kept, nothing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak.attacks.base import Knowledge, WhoBelongs
from recleak.attacks.community import Scoring
from recleak.attacks.community_sums import AggregatorCommunity, Reading
from recleak.defenses.base import Chain, Defense
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError
from recleak.models.components import Normal
from recleak.models.mf import GMF, MF
from recleak.models.prme import PRMEG
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.testing.attacks import AttackContract, Case, auc, chance_width
from recleak.testing.models import checkerboard
from recleak.training.aggregate import apply
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.wire import Aggregate, Aggregator, Broadcast, Message

FULL = Share(("user",))
USERS, ITEMS, FACTORS = 24, 20, 4
MODEL = GMF(FACTORS)
EVERYBODY = torch.arange(USERS)


def case(*, related: bool) -> Case:
    """Rounds in which each user's row moves along the items of its own half of the users, or of another half."""
    draws = torch.Generator().manual_seed(3)
    color = EVERYBODY % 2
    way = torch.where((color if related else EVERYBODY // 2 % 2) == 0, 1.0, -1.0)
    liked = torch.where(torch.arange(ITEMS) % 2 == 0, 1.0, -1.0)
    line = torch.randn(FACTORS, generator=draws)
    params = {
        "user": torch.randn(USERS, FACTORS, generator=draws),
        "item": liked[:, None] * line + 0.3 * torch.randn(ITEMS, FACTORS, generator=draws),
        "head.1.weight": torch.ones(FACTORS, 1),
        "head.1.bias": torch.zeros(1),
    }
    messages: list[Message] = []
    for number in range(3):
        messages.append(Broadcast(number, params))
        step = 0.1 * way[:, None] * line + 0.05 * torch.randn(USERS, FACTORS, generator=draws)
        total = {name: torch.zeros_like(value) for name, value in params.items()} | {"user": step}
        messages.append(Aggregate(number, EVERYBODY, total, {}, float(USERS)))
        params = apply(params, messages[-1], "mean")  # type: ignore[arg-type]
    targets = (torch.arange(ITEMS) % 2 == color[:, None]).float()
    parts = FULL.sharing(MODEL.components())
    public = {"targets": targets, "popularity": torch.full((ITEMS,), float(USERS // 2))}
    knowledge = Knowledge(MODEL, USERS, ITEMS, parts, LocalTraining(), FULL, public)
    return Case(Aggregator(), knowledge, messages, WhoBelongs(EVERYBODY, EVERYBODY), color[:, None] == color)


class OfSums(AttackContract):
    def planted(self) -> Case:
        return case(related=True)

    def unrelated(self) -> Case:
        return case(related=False)


class TestMovement(OfSums):
    attack = AggregatorCommunity(scoring="standardized", reading="movement")


class TestStep(OfSums):
    attack = AggregatorCommunity(scoring="calibrated", keep="best")


class TestGuess(OfSums):
    attack = AggregatorCommunity(scoring="random")

    def test_a_planted_leak_is_found(self) -> None:
        """It is not: a leak must not reach what stands beside an attack as its null."""
        planted = self.planted()
        assert abs(auc(self._answer(planted), planted.truth) - 0.5) <= chance_width(planted.truth)


def expected(scoring: str, logits: Tensor, mine: Tensor) -> float:
    """One score, f32[I] and bool[I]."""
    chance = torch.sigmoid(logits)
    if scoring == "confidence":
        return float(chance[mine].mean())
    if scoring == "calibrated":
        return float(chance[mine].mean() - chance.mean())
    if scoring == "standardized":
        return float((logits[mine].mean() - logits.mean()) / logits.std())
    top = set(logits.topk(ITEMS // 2).indices.tolist())
    wanted = set(mine.nonzero().flatten().tolist())
    return len(top & wanted) / len(top | wanted)


@pytest.mark.parametrize("scoring", ["confidence", "calibrated", "standardized", "jaccard"])
@pytest.mark.parametrize("reading", ["row", "movement", "step"])
def test_scores_are_what_their_formulas_say(scoring: Scoring, reading: Reading) -> None:
    asked = case(related=True)
    attack = AggregatorCommunity(scoring=scoring, reading=reading)
    first, last = asked.messages[0], asked.messages[-2]
    summed = asked.messages[-1]
    assert isinstance(first, Broadcast)
    assert isinstance(last, Broadcast)
    assert isinstance(summed, Aggregate)
    weight = 60.0  # others count more than one
    state = attack.init(asked.knowledge)
    for message in (*asked.messages[:-1], replace(summed, weight=weight)):
        state = attack.fold(asked.knowledge, state, message)  # type: ignore[arg-type]
    score = attack.answer(asked.knowledge, state, asked.question)
    total = summed.total["user"]
    after = last.params["user"] + total / weight
    row = {
        "row": after,
        "movement": after - first.params["user"],
        "step": total * USERS / weight,
    }[reading]
    for a, u in ((0, 0), (3, 8), (5, 23)):
        mine = asked.knowledge.public["targets"][a] > 0
        assert float(score[a, u]) == pytest.approx(expected(scoring, last.params["item"] @ row[u], mine), abs=1e-4)


def federation(model: GMF | MF, defense: Defense, reading: Reading, **public: Tensor) -> Tensor:
    """Scores after some rounds on a checkerboard, f32[U, U]."""
    data, _ = checkerboard(USERS, USERS)
    targets = torch.from_numpy((data.matrix().toarray() > 0).astype(np.float32))
    known = Knowledge(model, USERS, USERS, defense.sharing(model.components()), public={"targets": targets, **public})
    tap = Listening(Aggregator(), AggregatorCommunity(scoring="standardized", reading=reading), known)
    local = LocalTraining(epochs=2, batch_size=None, optimizer=Adam(0.05, keep=True), resample=True)
    protocol = Federated(rounds=8, local=local)
    train_federated(protocol, model, data, defense=defense, taps=[tap], show_progress=False)
    return tap.answer(WhoBelongs(EVERYBODY, EVERYBODY))


@pytest.mark.parametrize("model", [GMF(FACTORS, init=Normal(0.3)), MF(FACTORS)], ids=["GMF", "MF"])
@pytest.mark.parametrize("reading", ["movement", "step"])
def test_sums_of_a_federation_tell_who_belongs(model: GMF | MF, reading: Reading) -> None:
    score = federation(model, Chain((FULL, SecureAggregation())), reading)
    same = EVERYBODY[:, None] % 2 == EVERYBODY % 2
    others = ~torch.eye(USERS, dtype=torch.bool)
    assert auc(score[others], same[others]) > 0.8


def test_targets_that_are_a_senders_own_do_not_count() -> None:
    defense = Chain((FULL, SecureAggregation()))
    model = GMF(FACTORS, init=Normal(0.3))
    excluded = torch.zeros(USERS, USERS)
    excluded[5, ::2] = 1.0
    plain, apart = (federation(model, defense, "movement", **more) for more in ({}, {"excluded": excluded}))
    others = EVERYBODY != 5
    assert torch.equal(plain[:, others], apart[:, others])
    assert bool((plain[::2, 5] != apart[::2, 5]).all())


def test_without_rows_of_users_there_is_nothing() -> None:
    for model in (MODEL, PRMEG(4)):
        parts = ShareLess(("user",)).sharing(model.components())
        known = Knowledge(model, USERS, ITEMS, parts, public={"targets": torch.ones(2, ITEMS)})
        with pytest.raises(ConfigError, match="No row of the sum is a single user's"):
            AggregatorCommunity().init(known)
        AggregatorCommunity(scoring="random").init(known)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="reading is 'rows', expected one of row, movement"):
        AggregatorCommunity(reading="rows")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="activity"):
        AggregatorCommunity(scoring="activity")
    with pytest.raises(ConfigError, match="vector is 'told'"):
        AggregatorCommunity(vector="told")
