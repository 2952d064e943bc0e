"""Community detection: planted communities are found, scores are what their formulas say, and groups keep apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge, WhoBelongs
from recleak.attacks.community import UNSEEN, PeerCommunity, Scoring, ServerCommunity
from recleak.attacks.community_items import PeerCommunityThroughItems, _of_moved_rows
from recleak.attacks.community_targets import totals
from recleak.attacks.community_vectors import Vector, _drawn, fitted
from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError
from recleak.kernels_gmf import score_pairs
from recleak.models.components import Component, Constant, Normal
from recleak.models.mf import GMF, MF
from recleak.models.prme import PRMEG
from recleak.protocols.federated import Federated, train_federated
from recleak.protocols.gossip import Gossip, train_gossip
from recleak.recording import Listening
from recleak.testing.attacks import one_by_one
from recleak.testing.models import checkerboard
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.update import Update
from recleak.wire import Broadcast, Disclosure, Peers, Push, Server, Upload

MODEL = GMF(4, init=Normal(0.5))
LOCAL = LocalTraining(epochs=2, batch_size=None, optimizer=Adam(0.05, keep=True), resample=True)
FULL = Share(("user",))


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


def items_of(data: Interactions) -> Tensor:
    return torch.from_numpy((data.matrix().toarray() > 0).astype(np.float32))


def knowledge_of(data: Interactions, defense: Defense, **public: Tensor) -> Knowledge:
    targets = items_of(data)
    known = {"targets": targets, "popularity": targets.sum(0)} | public
    return Knowledge(MODEL, data.n_users, data.n_items, defense.sharing(MODEL.components()), LOCAL, defense, known)


def found(score: Tensor, color: Tensor, count: int) -> float:
    """The share of an adversary's first claims that have its color, the mean over adversaries; not itself."""
    score = score.clone()
    score.fill_diagonal_(UNSEEN)
    top = score.topk(count, dim=1)
    right = (color[top.indices] == color.unsqueeze(1)) & torch.isfinite(top.values)
    return float(right.float().mean())


@pytest.mark.parametrize("scoring", ["confidence", "calibrated", "standardized", "jaccard", "ndcg"])
def test_the_server_finds_planted_communities(scoring: Scoring) -> None:
    data, _ = checkerboard(24, 24)
    known, everybody = knowledge_of(data, FULL), torch.arange(24)
    tap = Listening(Server(), ServerCommunity(scoring=scoring, negatives=9, cutoff=5), known)
    train_federated(
        Federated(rounds=6, aggregation="weighted", local=LOCAL), MODEL, data, defense=FULL, taps=[tap],
        show_progress=False,
    )  # fmt: skip
    assert found(tap.answer(WhoBelongs(everybody, everybody)), everybody % 2, 11) > 0.8


@pytest.mark.parametrize("vector", ["told", "mean", "fitted"])
def test_everybody_is_scored_without_the_senders_vectors(vector: Vector) -> None:
    """How well is another matter: with two colors, those of the other one push the targets as those of the same do."""
    data, _ = checkerboard(24, 24)
    groups = torch.eye(24, dtype=torch.bool)
    groups[:, 0] = True
    known, everybody = knowledge_of(data, Defense(), groups=groups), torch.arange(24)
    tap = Listening(Server(), ServerCommunity(scoring="standardized", vector=vector), known)
    protocol = Federated(rounds=3, aggregation="weighted", local=LOCAL)
    train_federated(protocol, MODEL, data, taps=[tap], confidants=range(24), show_progress=False)
    score = tap.answer(WhoBelongs(everybody, everybody))
    assert bool(torch.isfinite(score).all())
    assert bool((score.std(0) > 0).all()), "adversaries differ in their targets"
    assert bool((score.std(1) > 0).all()), "senders differ in their models"


def test_a_node_ranks_those_it_heard_of_and_colluders_hear_more() -> None:
    data, _ = checkerboard(24, 24)
    everybody = torch.arange(24)
    alone = torch.eye(24, dtype=torch.bool)
    some = alone.clone()
    some[:, :8] = True  # everybody plays with the first eight
    taps = []
    for groups in (alone, some):
        known = knowledge_of(data, FULL, groups=groups)
        taps.append(Listening(Peers(groups), PeerCommunity(scoring="standardized"), known))
    train_gossip(Gossip(rounds=12, refresh=2, local=LOCAL), MODEL, data, defense=FULL, taps=taps, show_progress=False)
    one, many = (tap.answer(WhoBelongs(everybody, everybody)) for tap in taps)
    heard, more = torch.isfinite(one).sum(), torch.isfinite(many).sum()
    assert heard < more
    assert not bool((torch.isfinite(one) & ~torch.isfinite(many)).any())
    right, wrong = (
        torch.isfinite(many) & ((everybody % 2 == everybody.unsqueeze(1) % 2) == same) for same in (True, False)
    )
    right.fill_diagonal_(False)
    assert many[right].mean() > many[wrong].mean() + 0.5


def message(n: int = 5) -> tuple[Knowledge, Push]:
    """Random models of 3 senders, in 5 pushes to 4 nodes."""
    data, _ = checkerboard(8, 12)
    draw = torch.Generator().manual_seed(0)
    groups = torch.eye(8, dtype=torch.bool)[:4]
    targets = items_of(data)[:4]
    shape = {"user": (3, 8, 4), "item": (3, 12, 4), "head.1.weight": (3, 4, 1), "head.1.bias": (3, 1)}
    params = {name: torch.randn(*size, generator=draw) for name, size in shape.items()}
    model = torch.tensor([0, 0, 1, 2, 2])[:n]
    push = Push(0, torch.tensor([5, 5, 6, 7, 7])[:n], torch.tensor([0, 1, 2, 3, 0])[:n], params, model)
    known = knowledge_of(data, FULL, groups=groups)
    return Knowledge(MODEL, 8, 12, known.components, LOCAL, FULL, {**known.public, "targets": targets}), push


def test_scores_are_what_their_formulas_say() -> None:
    known, push = message()
    targets, params = known.public["targets"], push.params
    for a, sender, row in ((0, 5, 0), (2, 6, 1), (3, 7, 2), (0, 7, 2)):
        user, head = params["user"][row, sender], params["head.1.weight"][row, :, 0]
        logits = params["item"][row] @ (user * head) + params["head.1.bias"][row]
        mine = targets[a] > 0
        chance = torch.sigmoid(logits)
        own = set(logits.topk(round(float(known.public["popularity"].sum()) / 8)).indices.tolist())
        wanted = set(mine.nonzero().flatten().tolist())
        lot = random.below(12 - len(wanted), 0, "ndcg", a, np.array(sorted(wanted))[:, None], range(99))
        others = (~mine).nonzero().flatten()[torch.from_numpy(lot)]
        rank = (logits[others] > logits[mine].unsqueeze(1)).sum(1)
        expected = {
            "confidence": chance[mine].mean(),
            "calibrated": chance[mine].mean() - chance.mean(),
            "standardized": (logits[mine].mean() - logits.mean()) / logits.std(),
            "jaccard": torch.tensor(len(own & wanted) / len(own | wanted)),
            "ndcg": torch.where(rank < 20, 1 / torch.log2(rank + 2), 0.0).mean(),
        }
        for scoring, value in expected.items():
            attack = PeerCommunity(scoring=scoring)  # type: ignore[arg-type]
            state = attack.fold(known, attack.init(known), push)
            got = attack.answer(known, state, WhoBelongs(torch.tensor([a]), torch.tensor([sender])))
            torch.testing.assert_close(got[0, 0], value, atol=1e-5, rtol=1e-4)


class Other(GMF):
    """The same, but it may compute something else, so nothing compiled is used."""


def slow_score(scoring: Scoring, logits: Tensor, wanted: Tensor, apart: Tensor, a: int, count: int) -> float:
    """Of one adversary and one model, target by target: f32[I], bool[I] and bool[I] of those that do not count."""
    mine = [i for i in range(len(logits)) if wanted[i] and not apart[i]]
    value = logits if scoring in ("standardized", "jaccard", "ndcg") else torch.sigmoid(logits)
    if scoring == "jaccard":
        own = {int(i) for i in logits.topk(count).indices if not apart[i]}
        return len(own & set(mine)) / max(len(own | set(mine)), 1)
    others, gains = [i for i in range(len(logits)) if not wanted[i]], []
    for i in mine:
        lot = [others[int(at)] for at in random.below(len(others), 0, "ndcg", a, i, range(99))]
        rank = sum(float(logits[j] > logits[i]) + 0.5 * float(logits[j] == logits[i]) for j in lot)
        gains.append(1 / np.log2(rank + 2) if rank < 20 else 0.0)
    if scoring == "ndcg":
        return float(np.mean(gains)) if gains else 0.0
    mean = float(np.mean([float(value[i]) for i in mine])) if mine else 0.0
    if scoring == "confidence":
        return mean
    above = mean - float(value.mean())
    return above if scoring == "calibrated" else above / float(value.std())


@pytest.mark.parametrize("scoring", ["confidence", "calibrated", "standardized", "jaccard", "ndcg"])
@pytest.mark.parametrize("kind", [GMF, Other])
@pytest.mark.parametrize("vector", ["sent", "told", "mean"])
def test_targets_that_are_a_senders_own_do_not_count(vector: Vector, kind: type[GMF], scoring: Scoring) -> None:
    known, push = message()
    excluded = (torch.rand(8, 12, generator=torch.Generator().manual_seed(5)) < 0.4).float()
    excluded[7] = 1.0  # nothing is left of any target
    told = torch.randn(8, 4, generator=torch.Generator().manual_seed(6))
    groups = known.public["groups"].clone()
    groups[:, 4] = True
    components = MODEL.components() if vector != "sent" else known.components
    public = {**known.public, "excluded": excluded, "groups": groups}
    known = Knowledge(kind(4, init=Normal(0.5)), 8, 12, components, LOCAL, FULL, public)
    attack = PeerCommunity(scoring=scoring, vector=vector)
    state = attack.fold(known, attack.init(known), Disclosure(torch.arange(8), {"user": told}, {}))
    params = push.params if vector == "sent" else {n: value for n, value in push.params.items() if n != "user"}
    state = attack.fold(known, state, replace(push, params=params))
    count = round(float(known.public["popularity"].sum()) / 8)
    for a, sender, row in ((0, 5, 0), (1, 5, 0), (2, 6, 1), (3, 7, 2), (0, 7, 2)):
        user = {"sent": push.params["user"][row, sender], "told": told[a], "mean": (told[a] + told[4]) / 2}[vector]
        logits = push.params["item"][row] @ (user * push.params["head.1.weight"][row, :, 0])
        logits = logits + push.params["head.1.bias"][row]
        expected = slow_score(scoring, logits, public["targets"][a] > 0, excluded[sender] > 0, a, count)
        assert float(state["score"][a, sender]) == pytest.approx(expected, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("vector", ["sent", "fitted"])
@pytest.mark.parametrize("scoring", ["confidence", "calibrated", "standardized", "jaccard", "ndcg"])
def test_at_a_server_other_targets_change_only_those_they_are_taken_from(vector: Vector, scoring: Scoring) -> None:
    data, _ = checkerboard(8, 12)
    defense = FULL if vector == "sent" else ShareLess(("user",))
    excluded, scores = torch.zeros(8, 12), []
    excluded[3, ::2] = 1.0
    for more in ({}, {"excluded": excluded}, {"excluded": torch.ones(8, 12)}):
        tap = Listening(
            Server(),
            ServerCommunity(scoring=scoring, vector=vector, negatives=5, cutoff=3),
            knowledge_of(data, defense, **more),
        )
        protocol = Federated(rounds=2, local=LOCAL)
        train_federated(protocol, MODEL, data, defense=defense, taps=[tap], show_progress=False)
        scores.append(tap.answer(WhoBelongs(torch.arange(8), torch.arange(8))))
    others = torch.arange(8) != 3
    assert torch.equal(scores[0][:, others], scores[1][:, others])
    assert bool((scores[0][:, 3] != scores[1][:, 3]).any())
    assert bool((scores[2] == scores[2][:1]).all() if vector == "sent" else True), "nothing of the targets is left"


def test_excluded_of_another_shape_is_refused() -> None:
    known, push = message()
    known = replace(known, public={**known.public, "excluded": torch.ones(4, 12)})
    attack = PeerCommunity()
    with pytest.raises(ConfigError, match=r"Got excluded \[4, 12\], expected \[8, 12\]"):
        attack.fold(known, attack.init(known), push)


def test_the_vectors_of_those_outside_the_group_do_not_matter() -> None:
    data, _ = checkerboard(8, 12)
    groups = torch.eye(8, dtype=torch.bool)
    groups[:, 2] = True  # one who sides with everybody
    known = knowledge_of(data, ShareLess(("user",)), groups=groups)
    told = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    scores = []
    for vectors in (told, torch.where(torch.arange(8)[:, None] == 5, 100 * told, told)):
        tap = Listening(Server(), ServerCommunity(scoring="standardized", vector="mean"), known)
        tap.receive(Disclosure(torch.arange(8), {"user": vectors}, {}))
        protocol = Federated(rounds=2, local=LOCAL)
        train_federated(protocol, MODEL, data, defense=ShareLess(("user",)), taps=[tap], show_progress=False)
        scores.append(tap.answer(WhoBelongs(torch.arange(8), torch.arange(8))))
    others = torch.arange(8) != 5
    assert bool(torch.isfinite(scores[0]).all())
    assert torch.equal(scores[0][others], scores[1][others])
    assert not torch.equal(scores[0][5], scores[1][5])
    some = ServerCommunity(vector="mean")
    alone = replace(known, public={name: value for name, value in known.public.items() if name != "groups"})
    state = some.fold(alone, some.init(alone), Disclosure(torch.arange(8), {"user": told}, {}))
    with pytest.raises(ConfigError, match="no groups"):
        some._vectors(alone, state, {})


def test_groups_keep_apart_and_parts_of_a_message_add_up() -> None:
    known, push = message()
    attack = PeerCommunity()
    whole = attack.fold(known, attack.init(known), push)["score"]
    assert torch.isfinite(whole).sum() == 5
    assert torch.isfinite(whole[0]).nonzero().flatten().tolist() == [5, 7]
    state = attack.init(known)
    for part in one_by_one(push):
        assert isinstance(part, Push)
        state = attack.fold(known, state, part)
    torch.testing.assert_close(state["score"], whole)


def test_the_latest_or_the_best_score_counts() -> None:
    known, push = message()
    again = Push(1, push.sender, push.receiver, {name: -value for name, value in push.params.items()}, push.model)
    for keep in ("latest", "best"):
        attack = PeerCommunity(keep=keep)
        first, second = (attack.fold(known, attack.init(known), each)["score"] for each in (push, again))
        both = attack.fold(known, attack.fold(known, attack.init(known), push), again)["score"]
        torch.testing.assert_close(both, second if keep == "latest" else torch.maximum(first, second))


def test_what_was_told_is_the_adversarys_own() -> None:
    data, _ = checkerboard(8, 12)
    known = knowledge_of(data, Defense())
    attack = ServerCommunity(vector="told")
    draw = torch.Generator().manual_seed(1)
    item, head = torch.randn(12, 4, generator=draw), torch.randn(4, 1, generator=draw)
    told = torch.randn(8, 4, generator=draw)
    state = attack.fold(
        known, attack.init(known), Broadcast(0, {"item": item, "head.1.weight": head, "head.1.bias": torch.zeros(1)})
    )
    update = Update(
        torch.tensor([3]),
        {"head.1.weight": torch.zeros(1, 4, 1), "head.1.bias": torch.zeros(1, 1)},
        {"item": torch.ones(2, 4)},
        torch.tensor([1, 5]),
        torch.tensor([0, 2]),
        12,
    )
    upload = Upload(0, update, torch.ones(1))
    assert not bool(torch.isfinite(attack.fold(known, state, upload)["score"]).any()), "nothing was told yet"
    state = attack.fold(known, state, Disclosure(torch.arange(8), {"user": told}, {}))
    score = attack.fold(known, state, upload)["score"]
    table = item.clone()
    table[[1, 5]] += 1
    for a in range(8):
        mine = known.public["targets"][a] > 0
        expected = torch.sigmoid(table[mine] @ (told[a] * head[:, 0])).mean()
        torch.testing.assert_close(score[a, 3], expected, atol=1e-5, rtol=1e-4)
    assert not bool(torch.isfinite(score[:, :3]).any())


@pytest.mark.parametrize("scoring", ["confidence", "calibrated", "standardized"])
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_scores_are_those_of_the_general_way(scoring: Scoring, bias: bool) -> None:
    data, _ = checkerboard(8, 12)
    everybody, scores = torch.arange(8), []
    for model in (GMF(4, bias, Normal(0.5)), Other(4, bias, Normal(0.5))):
        public = knowledge_of(data, Defense()).public
        known = Knowledge(model, 8, 12, model.components(), LOCAL, public=public)
        tap = Listening(Server(), ServerCommunity(scoring=scoring, vector="told"), known)
        protocol = Federated(rounds=2, local=LOCAL)
        train_federated(protocol, GMF(4, bias, Normal(0.5)), data, taps=[tap], confidants=range(8), show_progress=False)
        scores.append(tap.answer(WhoBelongs(everybody, everybody)))
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scoring", ["confidence", "calibrated", "standardized", "jaccard", "ndcg"])
def test_equal_vectors_are_their_mean(scoring: Scoring) -> None:
    data, _ = checkerboard(8, 12)
    known = knowledge_of(data, ShareLess(("user",)), groups=torch.ones(8, 8, dtype=torch.bool))
    same = torch.randn(4, generator=torch.Generator().manual_seed(3)).expand(8, 4)
    scores = []
    for vector in ("told", "mean"):
        attack = ServerCommunity(scoring=scoring, vector=vector)
        tap = Listening(Server(), attack, known)
        tap.receive(Disclosure(torch.arange(8), {"user": same}, {}))
        protocol = Federated(rounds=2, local=LOCAL)
        train_federated(protocol, MODEL, data, defense=ShareLess(("user",)), taps=[tap], show_progress=False)
        scores.append(tap.answer(WhoBelongs(torch.arange(8), torch.arange(8))))
    assert bool(torch.isfinite(scores[0]).all())
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("share", [0.002, 0.05])
def test_sums_over_few_or_many_targets(share: float) -> None:
    draw = torch.Generator().manual_seed(2)
    targets = (torch.rand(7, 3000, generator=draw) < share).float()
    targets[3] = 0
    value = torch.randn(5, 3000, generator=draw)
    torch.testing.assert_close(totals(targets, value), targets @ value.T, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(totals(targets, value[:0]), torch.zeros(7, 0))


def test_mean_chances_are_those_of_sigmoids() -> None:
    draw = np.random.default_rng(0)
    for scale in (0.01, 1.0, 30.0, 1e4):  # also where exp would overflow
        table = (scale * draw.standard_normal((3, 50, 8))).astype(np.float32)
        head, vector = (draw.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (2, 8)))
        bias, item, offset = np.array([0.1, 0, -2], np.float32), np.array([4, 1, 7, 49, 3]), np.array([0, 2, 5])
        adversary, model, out = np.array([0, 1, 1, 0]), np.array([0, 1, 2, 2]), np.empty(4, np.float32)
        apart = np.empty((0, 0), np.float32)
        score_pairs(table, head, bias, vector, item, offset, apart, np.arange(9), adversary, model, out)
        logits = np.einsum("kid,kd->ki", table[model].astype(float), vector[adversary] * head[model].astype(float))
        chance = torch.sigmoid(torch.from_numpy(logits + bias[model, None])).numpy()
        for k, a in enumerate(adversary):
            mine = item[offset[a] : offset[a + 1]]
            np.testing.assert_allclose(out[k], chance[k, mine].mean() - chance[k, :9].mean(), atol=2e-6 * max(1, scale))


def test_fitted_vectors_like_their_targets() -> None:
    data, _ = checkerboard(8, 12)
    known = knowledge_of(data, Defense())
    draw = torch.Generator().manual_seed(1)
    params = {
        "item": torch.randn(12, 4, generator=draw),
        "head.1.weight": torch.ones(4, 1),
        "head.1.bias": torch.zeros(1),
    }
    params["item"][::2, 0] += 3  # even items share a direction
    vectors = fitted(known, params, 0)["user"]
    logits = vectors @ params["item"].T
    targets = known.public["targets"] > 0
    for a in range(8):
        assert logits[a][targets[a]].mean() > logits[a].mean()


def test_fitted_vectors_start_from_draws_of_the_adversary() -> None:
    """With the seed of the run they would start as its users do, and as a head that stays."""
    data, _ = checkerboard(8, 12)
    known = knowledge_of(data, Defense())
    for part in MODEL.components():
        of_run = part.draw(3, np.arange(8) if part.storage == "per_user" else 0)
        first = _drawn(part, np.arange(8), 3)
        assert torch.equal(first, _drawn(part, np.arange(8), 3))
        if not isinstance(part.init, Constant):
            assert not (first == of_run).any()
    params = {"item": torch.zeros(12, 4), "head.1.weight": torch.zeros(4, 1), "head.1.bias": torch.zeros(1)}
    users = fitted(known, params, 3)["user"]  # no gradient: they stay where they start
    [user] = [part for part in MODEL.components() if part.name == "user"]
    assert not (users == user.draw(3, np.arange(8))).any()


def test_errors_say_what_to_do() -> None:
    known, push = message()

    def fold(attack: PeerCommunity, components: tuple[Component, ...], names: tuple[str, ...]) -> None:
        public = {name: known.public[name] for name in names}
        attack.fold(Knowledge(MODEL, 8, 12, components, public=public), attack.init(known), push)

    with pytest.raises(ConfigError, match="needs target items"):
        PeerCommunity().init(Knowledge(MODEL, 8, 12, known.components))
    with pytest.raises(ConfigError, match="no groups"):
        fold(PeerCommunity(), known.components, ("targets",))
    with pytest.raises(ConfigError, match="Choose another vector"):
        fold(PeerCommunity(), MODEL.components(), ("targets", "groups"))
    with pytest.raises(ConfigError, match="no model is broadcast in a gossip"):
        PeerCommunity(vector="fitted")
    with pytest.raises(ConfigError, match="scoring is 'best'"):
        PeerCommunity(scoring="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="make popularity public"):
        fold(PeerCommunity(scoring="jaccard"), known.components, ("targets", "groups"))


def test_other_models_have_communities_too() -> None:
    data, _ = checkerboard(12, 12)
    model, everybody = MF(4), torch.arange(12)
    share = Share(("user",))
    targets = items_of(data)
    parts: tuple[Component, ...] = share.sharing(model.components())
    tap = Listening(
        Server(), ServerCommunity(scoring="standardized"), Knowledge(model, 12, 12, parts, public={"targets": targets})
    )
    local = LocalTraining(epochs=3, batch_size=8, optimizer=Adam(0.05))
    train_federated(Federated(rounds=6, local=local), model, data, defense=share, taps=[tap], show_progress=False)
    assert found(tap.answer(WhoBelongs(everybody, everybody)), everybody % 2, 5) > 0.7


# --- the chain at nodes -----------------------------------------------------------------------------------------------


def moved(shared: bool, n: int = 12, items: int = 60, own: int = 6) -> tuple[Knowledge, Push, Tensor]:
    """Senders whose own rows moved along h * u from a common table, others a little against it; targets of sender 0."""
    draws = torch.Generator().manual_seed(1)
    model = GMF(4)
    components = (Share(("user",)) if shared else ShareLess()).sharing(model.components())
    table, user = torch.randn(items, 4, generator=draws), torch.randn(n, 4, generator=draws)
    head = torch.rand(n, 4, 1, generator=draws) + 0.5
    mine = torch.rand(n, items, generator=draws).argsort(1)[:, :own]
    mine[1] = mine[0]
    along = user * head.squeeze(-1)
    step = torch.full((n, items), -0.05).scatter_(1, mine, 0.4)
    noise = 0.01 * torch.randn(n, items, 4, generator=draws)
    params = {"item": table + step.unsqueeze(2) * along.unsqueeze(1) + noise, "head.1.weight": head}
    if shared:
        params["user"] = user.expand(n, n, 4)
    params = {name: value[1:] for name, value in params.items()}
    targets = torch.zeros(1, items)
    targets[0, mine[0]] = 1.0
    popularity = torch.full((items,), own * n / items)
    groups = torch.zeros(1, n, dtype=torch.bool)
    groups[0, 0] = True
    public = {"targets": targets, "popularity": popularity, "groups": groups}
    knowledge = Knowledge(model, n, items, components, LocalTraining(), Defense(), public)
    push = Push(0, torch.arange(1, n), torch.zeros(n - 1, dtype=torch.int64), params, torch.arange(n - 1))
    return knowledge, push, mine


@pytest.mark.parametrize("shared", [True, False], ids=["full", "share less"])
def test_the_chain_at_a_node_finds_the_rows_that_moved(shared: bool) -> None:
    knowledge, push, mine = moved(shared)
    attack = PeerCommunityThroughItems()
    state = attack.fold(knowledge, attack.init(knowledge), push)
    assert not bool(torch.isfinite(state["score"]).any()), "there was nothing to compare with"
    for half in (torch.arange(11) < 4, torch.arange(11) >= 4):  # however a tick is cut into messages
        state = attack.fold(knowledge, state, replace(push.select(half), round=1))
    score = attack.answer(knowledge, state, WhoBelongs(torch.arange(1), torch.arange(12)))[0]
    truth = torch.zeros(12)
    for sender in range(1, 12):
        both = len(set(mine[0].tolist()) & set(mine[sender].tolist()))
        truth[sender] = both / (12 - both)
    assert score[0] == -torch.inf, "it sent nothing"
    torch.testing.assert_close(score[1:], truth[1:])
    assert float(score[1]) == 1.0


def slow_similarity(
    apart: Tensor, direction: Tensor | None, side: Tensor, targets: Tensor, size: int, off: Tensor | None = None
) -> float:
    """Of one pair, in float64: f64[I, d], f64[d], f64[I] and f64[I]; without items that do not count, f64[I]."""
    along = torch.linalg.eigh(apart.T @ apart).eigenvectors[:, -1] if direction is None else direction
    moved = apart @ along
    if direction is None and float(moved @ side) < 0:
        moved = -moved
    own = moved.argsort(descending=True)[:size]
    counts = torch.ones_like(targets) if off is None else 1 - off
    both = float((targets * counts)[own].sum())
    return both / max(float((targets * counts).sum()) + float(counts[own].sum()) - both, 1.0)


@pytest.mark.parametrize(("items", "size"), [(60, 12), (60, 1), (60, 60), (700, 30)])  # 700: more than one block
@pytest.mark.parametrize("told", [True, False])
def test_moved_rows_are_those_of_the_loop(told: bool, items: int, size: int) -> None:
    draws = torch.Generator().manual_seed(1)
    models, common = (torch.randn(n, items, 5, generator=draws) for n in (7, 3))
    targets = (torch.rand(3, items, generator=draws) < 0.3).float()
    who, what = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([3, 6, 3, 0, 1])
    direction = torch.randn(5, 5, generator=draws) if told else None
    side = torch.randn(items, generator=draws)
    off = (torch.rand(7, items, generator=draws) < 0.2).float()
    plain, without = (
        _of_moved_rows(models, common, who, what, direction, side, targets, size, each) for each in (None, off)
    )
    for k in range(5):
        apart = (models[what[k]] - common[who[k]]).double()
        line = None if direction is None else direction[k].double()
        given = (apart, line, side.double(), targets[who[k]].double(), size)
        assert float(plain[k]) == pytest.approx(slow_similarity(*given))
        assert float(without[k]) == pytest.approx(slow_similarity(*given, off[what[k]].double()))


def test_rows_that_moved_alike_count_as_a_random_choice() -> None:
    models, common = torch.zeros(1, 10, 2), torch.zeros(1, 10, 2)
    models[0, :2, 0] = 1.0  # two rows moved, the others not at all
    targets = torch.zeros(1, 10)
    targets[0, [0, 4, 5, 6, 7]] = 1.0
    pair = torch.zeros(1, dtype=torch.int64)
    line, side = torch.tensor([[1.0, 0.0]]), torch.zeros(10)
    got = _of_moved_rows(models, common, pair, pair, line, side, targets, 4)
    both = 1 + 4 * 2 / 8  # one of the two, and two of eight others, of which half are targets
    assert float(got) == pytest.approx(both / (5 + 4 - both))
    apart = torch.zeros(1, 10)
    apart[0, [0, 4, 8]] = 1.0  # two targets, of which one moved, and another item do not count
    got = _of_moved_rows(models, common, pair, pair, line, side, targets, 4, apart)
    both = 3 * 2 / 8
    assert float(got) == pytest.approx(both / (3 + 1 + 6 * 2 / 8 - both))


def test_what_was_received_in_later_ticks_counts_more() -> None:
    knowledge, push, _ = moved(shared=False)
    attack = PeerCommunityThroughItems()
    state, tables = attack.init(knowledge), list[Tensor]()
    for tick, some in enumerate(([0, 1, 2], [3], [4, 5], [6])):
        one = replace(push.select(torch.tensor(some)), round=tick)
        state = attack.fold(knowledge, state, one)
        tables.append(one.params["item"])
    weight, total = 0.0, torch.zeros_like(tables[0][0])
    for each in tables[:3]:
        weight, total = weight / 2 + len(each), total / 2 + each.sum(0)
    torch.testing.assert_close(state["common"][0], total / weight)
    torch.testing.assert_close(state["weight"], torch.tensor([weight]))


def test_groups_do_not_change_what_others_have_in_common() -> None:
    knowledge, push, _ = moved(shared=False)
    attack, alone = PeerCommunityThroughItems(), torch.eye(12, dtype=torch.bool)[:3]
    both = replace(knowledge, public={**knowledge.public, "groups": alone, "targets": torch.ones(3, knowledge.n_items)})
    receiver = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0])  # the third one receives nothing, ever
    state, of_first = attack.init(both), attack.init(knowledge)
    for tick, some in enumerate((range(4), range(4, 6), range(6, 8), range(8, 11))):  # the second one: in two ticks
        message = replace(push, round=tick, receiver=receiver).select(torch.tensor(list(some)))
        state = attack.fold(both, state, message)
        of_first = attack.fold(knowledge, of_first, message.select(message.receiver == 0))
    assert torch.equal(state["common"][0], of_first["common"][0])
    item = push.params["item"]
    torch.testing.assert_close(state["common"][1], (item[2] / 4 + item[7]) / 1.25)
    assert not bool(state["common"][2].any())


@pytest.mark.parametrize("shared", [True, False], ids=["full", "share less"])
def test_the_chain_at_a_node_reads_preferences_of_places(shared: bool) -> None:
    """Preferences for own places come near to the sender's vector; the other table says nothing here."""
    draws = torch.Generator().manual_seed(2)
    model, n, items, own = PRMEG(4), 12, 60, 6
    components = (FULL if shared else ShareLess()).sharing(model.components())
    user = torch.randn(n, 4, generator=draws)
    user[:, 0] += 2
    table = 0.1 * torch.randn(items, 4, generator=draws)
    mine = torch.rand(n, items, generator=draws).argsort(1)[:, :own]
    mine[1] = mine[0]
    step = torch.zeros(n, items).scatter_(1, mine, 0.3)
    params = {
        "item.preference": table + step.unsqueeze(2) * (user.unsqueeze(1) - table),
        "item.sequence": torch.randn(n, items, 4, generator=draws),
    }
    if shared:
        params["user"] = user.expand(n, n, 4)
    params = {name: value[1:].clone() for name, value in params.items()}
    targets = torch.zeros(1, items).index_fill_(1, mine[0], 1.0)
    groups = torch.zeros(1, n, dtype=torch.bool)
    groups[0, 0] = True
    popularity = torch.full((items,), own * n / items) + targets[0]  # some places are popular, as they are
    public = {"targets": targets, "popularity": popularity, "groups": groups}
    knowledge = Knowledge(model, n, items, components, LocalTraining(), Defense(), public)
    push = Push(0, torch.arange(1, n), torch.zeros(n - 1, dtype=torch.int64), params, torch.arange(n - 1))
    attack, state = PeerCommunityThroughItems(), PeerCommunityThroughItems().init(knowledge)
    for tick in range(2):
        state = attack.fold(knowledge, state, replace(push, round=tick))
    score = attack.answer(knowledge, state, WhoBelongs(torch.arange(1), torch.arange(n)))[0]
    assert int(score.argmax()) == 1
    assert float(score[1]) > 0.7
