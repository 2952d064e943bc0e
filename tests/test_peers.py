"""Own items and attributes from the models that a group of nodes receives: planted leaks, plain loops, contracts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from recleak.attacks.base import Attack, Knowledge, WhichAttribute, WhichItems
from recleak.attacks.community_targets import colluding
from recleak.attacks.membership import calibrated
from recleak.attacks.moved import moved_rows
from recleak.attacks.peers import (
    AllItemsOfPeers,
    ItemsOfPeers,
    MajorityOfPeers,
    PeersThroughItems,
    PopularItemsOfPeers,
    ProportionalOfPeers,
    RandomItemsOfPeers,
    VectorsOfPeers,
)
from recleak.defenses.base import Defense
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError
from recleak.models.mf import GMF, MF
from recleak.testing.attacks import AttackContract, Case, auc
from recleak.training.cohort import LocalTraining
from recleak.wire import Peers, Push
from recleak.wiretap import Hearing

USERS, ITEMS, OWN, TICKS, FACTORS = 60, 40, 8, 4, 4
MEMBERS = 4  # the first nodes are the group; each of the others sends it one model in every tick


def stream(*, shared: bool, leaks: bool = True, seed: int = 0) -> Case:
    """Models whose senders' own rows moved along h * u, others a little against it; or rows drawn by themselves.

    Classes have items of their own, and vectors; the second half of the users is known.
    """
    draws = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (USERS,), generator=draws)
    liking = torch.rand(USERS, ITEMS, generator=draws)
    liking += 1.0 * (torch.arange(ITEMS) % 2 == label.unsqueeze(1)) + 0.8 * (torch.arange(ITEMS) < ITEMS // 2)
    own = torch.zeros(USERS, ITEMS, dtype=torch.bool).scatter_(1, liking.topk(OWN, dim=1).indices, True)
    user = torch.randn(USERS, FACTORS, generator=draws)
    user[:, 0] += 4 * (label - 0.5)
    if not leaks:
        user = user[torch.randperm(USERS, generator=draws)]
    head = torch.rand(FACTORS, 1, generator=draws) + 0.5
    seen = own if leaks else torch.rand(USERS, ITEMS, generator=draws) < OWN / ITEMS
    step = torch.where(seen, 0.4, -0.05).unsqueeze(2) * (user * head.squeeze(1)).unsqueeze(1)  # f32[U, I, d]
    table = torch.randn(ITEMS, FACTORS, generator=draws)
    group = torch.arange(USERS) < MEMBERS
    sender = torch.arange(MEMBERS, USERS)
    messages = []
    for tick in range(TICKS):
        noise = 0.02 * torch.randn(len(sender), ITEMS, FACTORS, generator=draws)
        params = {"item": table + step[sender] + noise, "head.1.weight": head.expand(len(sender), FACTORS, 1)}
        if shared:
            params["user"] = user.expand(len(sender), USERS, FACTORS)
        push = Push(tick, sender, sender % MEMBERS, params, torch.arange(len(sender)))
        messages += [push.select(torch.arange(len(sender)) % 2 == half) for half in (0, 1)]
    defense = Share(("user",)) if shared else ShareLess()
    model = GMF(FACTORS, bias=False)
    public = {
        "groups": group.unsqueeze(0),
        "popularity": own.sum(0).float() if leaks else torch.full((ITEMS,), USERS * OWN / ITEMS),
        "labels of gender": torch.where(torch.arange(USERS) < USERS // 2, -1, label),
    }
    parts = defense.sharing(model.components())
    knowledge = Knowledge(model, USERS, ITEMS, parts, LocalTraining(), Defense(), public)
    every = torch.cartesian_prod(sender, torch.arange(ITEMS))
    return Case(Peers(public["groups"]), knowledge, messages, WhichItems(*every.unbind(1)), own[sender].flatten())


def of_gender(case: Case, leaks: bool, seed: int = 0) -> Case:
    """The same stream, asked about the gender of those who are not known: both columns beside both answers."""
    draws = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (USERS,), generator=draws)
    asked = torch.arange(MEMBERS, USERS // 2)
    truth = torch.nn.functional.one_hot(label[asked], 2).bool()
    if not leaks:  # whom it learns from tells nothing of them either
        mixed = case.knowledge.public["labels of gender"].clone()
        mixed[USERS // 2 :] = torch.randint(2, (USERS - USERS // 2,), generator=draws)
        case = replace(
            case, knowledge=replace(case.knowledge, public={**case.knowledge.public, "labels of gender": mixed})
        )
    return replace(case, question=WhichAttribute(asked, "gender", ("f", "m")), truth=truth)


# --- contracts --------------------------------------------------------------------------------------------------------


class TestItems(AttackContract):
    attack: ClassVar[Attack[Any, Any]] = ItemsOfPeers(colluders=0.05)
    shared = True

    def planted(self) -> Case:
        return stream(shared=self.shared)

    def unrelated(self) -> Case:
        return stream(shared=self.shared, leaks=False)


class TestItemsOfShareLess(TestItems):
    shared = False


class TestLastItems(TestItems):
    attack = ItemsOfPeers(rounds="last")


class TestItemsWithAPrior(TestItems):
    attack = ItemsOfPeers(popularity=True)


class TestThroughItems(AttackContract):
    attack: ClassVar[Attack[Any, Any]] = PeersThroughItems()

    def planted(self) -> Case:
        return of_gender(stream(shared=False), leaks=True)

    def unrelated(self) -> Case:
        return of_gender(stream(shared=False, leaks=False), leaks=False)


class TestVectors(AttackContract):
    attack: ClassVar[Attack[Any, Any]] = VectorsOfPeers()

    def planted(self) -> Case:
        return of_gender(stream(shared=True), leaks=True)

    def unrelated(self) -> Case:
        return of_gender(stream(shared=True, leaks=False), leaks=False)


# --- what it computes -------------------------------------------------------------------------------------------------


def slowly(case: Case, *, adds: bool) -> dict[int, Tensor]:
    """The log odds of every sender's items by a loop over ticks and models, in float64."""
    popularity = (case.knowledge.public["popularity"].double() + 0.5).log()
    found, common, weight = dict[int, Tensor](), torch.zeros(ITEMS, FACTORS, dtype=torch.float64), 0.0
    for tick in range(TICKS):
        models = list[tuple[int, Tensor, Tensor | None, Tensor]]()
        for push in (each for each in case.messages if isinstance(each, Push) and each.round == tick):
            for sender, model in zip(push.sender.tolist(), push.model.tolist(), strict=True):
                user = push.params["user"][model, sender].double() if "user" in push.params else None
                head = push.params["head.1.weight"][model, :, 0].double()
                models.append((sender, push.params["item"][model].double(), user, head))
        for sender, table, user, head in models if weight else []:
            apart = table - common
            along = torch.linalg.svd(apart).Vh[0] if user is None else user * head
            moved = apart @ along
            if user is None:
                moved = moved if float(moved @ (popularity - popularity.mean())) > 0 else -moved
            odds = 2 * (moved - moved.mean()) / moved.std(correction=0)
            found[sender] = odds + found.get(sender, 0.0) if adds else odds
        total = torch.stack([table for _, table, _, _ in models]).sum(0)
        common = (common * weight / 2 + total) / (weight / 2 + len(models))
        weight = weight / 2 + len(models)
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["share", "share less"])
@pytest.mark.parametrize("attack", [ItemsOfPeers(), ItemsOfPeers(rounds="last")])
def test_probabilities_are_those_of_the_loop(attack: ItemsOfPeers, shared: bool) -> None:
    case = stream(shared=shared)
    state = attack.init(case.knowledge)
    for message in case.messages:
        state = attack.fold(case.knowledge, state, message)  # type: ignore[arg-type]
    got = attack.answer(case.knowledge, state, case.question).view(-1, ITEMS)
    odds = slowly(case, adds=attack.rounds == "all")
    for row, sender in zip(got, range(MEMBERS, USERS), strict=True):
        expected = calibrated(odds[sender], torch.zeros(ITEMS, dtype=torch.int64), torch.tensor([float(OWN)]))
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(got.sum(1), torch.full((USERS - MEMBERS,), float(OWN), dtype=torch.float64))


@pytest.mark.parametrize(("told", "tells"), [(True, True), (False, True), (False, False)])
def test_moved_rows_are_those_of_the_loop(told: bool, tells: bool) -> None:
    """Popular items are on the side of own ones; where popularity tells nothing, few rows are large."""
    draws = torch.Generator().manual_seed(1)
    models, common = (torch.randn(n, 30, 5, generator=draws) for n in (7, 3))
    who, what = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([3, 6, 3, 0, 1])
    direction = torch.randn(5, 5, generator=draws) if told else None
    side = torch.randn(30, generator=draws) if tells else torch.zeros(30)
    got = moved_rows(models, common, who, what, direction, side)
    for k in range(5):
        apart = (models[what[k]] - common[who[k]]).double()
        along = torch.linalg.svd(apart).Vh[0] if direction is None else direction[k].double()
        moved = apart @ along
        if direction is None and float(moved @ side.double() if tells else moved.pow(3).sum()) < 0:
            moved = -moved
        torch.testing.assert_close(got[k].double(), moved, rtol=1e-3, atol=1e-4)


def test_nothing_is_said_of_who_was_not_heard_of() -> None:
    case = stream(shared=True)
    first = replace(case, messages=[m for m in case.messages if isinstance(m, Push) and m.round < 2][:3])
    attack = ItemsOfPeers()
    state = attack.init(case.knowledge)
    for message in first.messages:
        state = attack.fold(case.knowledge, state, message)  # type: ignore[arg-type]
    chance = attack.answer(case.knowledge, state, WhichItems(*torch.tensor([[5, 7], [4, 7], [0, 7]]).T))
    assert chance.tolist()[0] == chance.tolist()[2] == 0.0, (
        "an odd sender came before there was anything to compare with"
    )
    assert 0 < float(chance[1]) < 1


def test_a_prior_helps_where_models_tell_little() -> None:
    case = stream(shared=True)
    known = case.knowledge
    question, truth = case.question, case.truth
    noise = [
        replace(m, params={**m.params, "item": m.params["item"] + 10 * torch.randn(m.params["item"].shape)})
        for m in case.messages
        if isinstance(m, Push)
    ]
    found = {}
    for prior in (False, True):
        attack = ItemsOfPeers(rounds="last", popularity=prior)
        state = attack.init(known)
        for message in noise:
            state = attack.fold(known, state, message)
        found[prior] = auc(attack.answer(known, state, question), truth)
    assert found[True] > found[False]


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_guesses_about_items() -> None:
    case = stream(shared=True)
    known, question = case.knowledge, case.question
    chance = {type(each): each.answer(known, each.init(known), question) for each in _guesses()}
    assert bool((chance[AllItemsOfPeers] == 1).all())
    drawn = chance[RandomItemsOfPeers]
    assert abs(auc(drawn, case.truth) - 0.5) < 0.1
    assert abs(float(drawn.sum()) / (USERS - MEMBERS) - OWN) < 1
    popular = chance[PopularItemsOfPeers].view(-1, ITEMS)
    assert torch.equal(popular[0].argsort(), popular[1].argsort())
    assert auc(chance[PopularItemsOfPeers], case.truth) > 0.6
    torch.testing.assert_close(popular.sum(1), torch.full((USERS - MEMBERS,), float(OWN), dtype=torch.float64))


def _guesses() -> list[Any]:
    return [RandomItemsOfPeers(), AllItemsOfPeers(), PopularItemsOfPeers()]


def test_guesses_about_attributes_read_no_message() -> None:
    case = of_gender(stream(shared=True), leaks=True)
    for attack in (MajorityOfPeers(), ProportionalOfPeers()):
        state = attack.init(case.knowledge)
        assert attack.fold(case.knowledge, state, case.messages[0]) == {}  # type: ignore[arg-type]
        answer = attack.answer(case.knowledge, state, case.question)
        assert bool((answer.sum(1) == 1).all())


# --- who is in the group, and who was heard ---------------------------------------------------------------------------


def test_groups_of_some_leaders_are_those_of_all() -> None:
    leader = torch.tensor([7, 3])
    assert torch.equal(colluding(20, 0.2, 1, leader), colluding(20, 0.2, 1)[leader])


def test_who_was_heard_and_when() -> None:
    group = torch.arange(6) < 2
    ears = Hearing(Peers(group.unsqueeze(0)))
    params, same = {"item": torch.zeros(1, 2, 1)}, torch.zeros(3, dtype=torch.int64)
    ears.receive(Push(0, torch.tensor([3, 4, 1]), torch.tensor([0, 5, 0]), params, same))
    again = Hearing(ears.vantage)
    again.restore(ears.state())
    again.receive(Push(2, torch.tensor([3, 4, 5]), torch.tensor([1, 1, 2]), params, same))
    assert again.first.tolist() == [-1, -1, -1, 0, 2, -1], "members know themselves, and 5 sent to nobody of them"


def test_errors_say_what_to_do() -> None:
    known = stream(shared=False).knowledge
    with pytest.raises(ConfigError, match="attributes-of-peers-through-items"):
        VectorsOfPeers().init(known)
    with pytest.raises(ConfigError, match="expected one: the attack is that of one adversary"):
        ItemsOfPeers().init(replace(known, public={**known.public, "groups": torch.eye(USERS) > 0}))
    with pytest.raises(ConfigError, match=r"colluders is 1\.5"):
        PeersThroughItems(colluders=1.5)
    with pytest.raises(ConfigError, match="one shared item table"):
        ItemsOfPeers().init(replace(known, components=MF(4, biases=True).components()))
