"""Community detection on PRME-G: scores are those of a plain loop, planted communities are found, nearest is best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from recleak import random
from recleak.attacks import transitions
from recleak.attacks.base import Knowledge, WhoBelongs
from recleak.attacks.community import UNSEEN, PeerCommunity, Scoring, ServerCommunity
from recleak.attacks.community_vectors import Vector
from recleak.data import store
from recleak.data.interactions import Interactions
from recleak.data.sequences import Transitions
from recleak.defenses.base import Defense
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError
from recleak.experiment import experiment
from recleak.geometry import kilometers
from recleak.grading import target_transitions
from recleak.models.base import Params
from recleak.models.components import Normal
from recleak.models.mf import MF
from recleak.models.prme import PRMEG
from recleak.papers import base, cda, cda_settings
from recleak.protocols.federated import Federated, train_federated
from recleak.protocols.gossip import Gossip, train_gossip
from recleak.recording import Listening
from recleak.runs import audit_run
from recleak.testing.attacks import one_by_one
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import SGD
from recleak.update import Update
from recleak.wire import Broadcast, Disclosure, Message, Peers, Push, Server, Upload

MODEL = PRMEG(6, init=Normal(0.1))
LOCAL = LocalTraining(
    epochs=2, batch_size=1, optimizer=SGD(0.05, weight_decay=0.01), loss="bpr", negatives=1, resample=True
)
FULL = Share(("user",))
USERS, GROUPS, EACH = 18, 3, 6  # EACH places of a group
ITEMS = GROUPS * EACH
SCORINGS: tuple[Scoring, ...] = ("confidence", "calibrated", "standardized")
EVERYBODY = torch.arange(USERS)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


def walks(length: int = 30) -> Interactions:
    """User u goes about among the places of group u mod 3, within some hours or after a night."""
    user = np.repeat(np.arange(USERS), length)
    step = np.tile(np.arange(length), USERS)
    place = random.below(EACH, 0, "place", user, step)
    hours = 1 + random.below(12, 0, "hours", user, step)
    item = np.concatenate([place + EACH * (user % GROUPS), np.arange(ITEMS)])
    who = np.concatenate([user, np.repeat(np.arange(GROUPS), EACH)])  # everything is somewhere once
    time = np.concatenate([3600 * np.cumsum(hours), np.arange(ITEMS)])
    items = pl.DataFrame(
        {
            "id": np.arange(ITEMS),
            "latitude": 40.5 + 0.4 * random.uniform(0, "north", np.arange(ITEMS)),
            "longitude": -74.2 + 0.5 * random.uniform(0, "east", np.arange(ITEMS)),
        }
    )
    return Interactions.build(pl.DataFrame({"user": who, "item": item, "time": time}), items=items)


DATA = walks()


def knowledge_of(defense: Defense, model: PRMEG = MODEL, **public: Tensor) -> Knowledge:
    targets = torch.from_numpy((DATA.matrix().toarray() > 0).astype(np.float32))
    known = {"targets": targets, **target_transitions(DATA), **public}
    return Knowledge(model, USERS, ITEMS, defense.sharing(model.components()), LOCAL, defense, known)


def found(score: Tensor, count: int = USERS // GROUPS - 1) -> float:
    """The share of an adversary's first claims that are of its group, the mean over adversaries."""
    score = score.clone()
    score.fill_diagonal_(UNSEEN)
    top = score.topk(count, dim=1)
    right = (top.indices % GROUPS == EVERYBODY.unsqueeze(1) % GROUPS) & torch.isfinite(top.values)
    return float(right.float().mean())


# --- the plain loop ---------------------------------------------------------------------------------------------------


def distance(user: Tensor, tables: Params, before: int, item: int, seconds: int, place: Tensor) -> float:
    """D of one transition by one model, tables f32[I, d]."""
    rows = {name: table[item][None, None].double() for name, table in tables.items()}
    km = torch.from_numpy(kilometers(place[before].numpy()[None], place[item].numpy()[None]))[None]
    start = tables["item.sequence"][before][None].double()
    given = {"user": user[None].double(), **rows}
    return -float(MODEL.logits_after(given, start, torch.tensor([seconds]), km)[0, 0])


def expected(scoring: str, known: Knowledge, tables: Params, user: Tensor, adversary: int) -> float:
    """A score, transition by transition."""
    public = known.public
    first, last = public["offsets"][adversary : adversary + 2].tolist()
    mine = public["transitions"][first:last].tolist()
    mean = float(np.mean([distance(user, tables, b, i, gap, public["places"]) for b, i, gap in mine]))
    if scoring == "confidence":
        return -mean
    targets = transitions.Targets.of(known, 0)
    within = float(np.mean([seconds <= 6 * 3600 for _, _, seconds in mine]))
    ways = list(zip(targets.origin.tolist(), targets.end.tolist(), strict=True))
    near, far = (
        np.array([distance(user, tables, b, i, seconds, public["places"]) for b, i in ways]) for seconds in (0, 10**6)
    )
    rival = within * near.mean() + (1 - within) * far.mean()
    square = within * (near**2).mean() + (1 - within) * (far**2).mean()
    spread = np.sqrt((square - rival**2) * len(ways) / (len(ways) - 1))
    return float((rival - mean) / (1 if scoring == "calibrated" else spread))


def tables_of(draw: torch.Generator, *shape: int) -> Params:
    return {name: torch.randn(*shape, ITEMS, 6, generator=draw) for name in ("item.preference", "item.sequence")}


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("told", [False, True], ids=["sent", "told"])
def test_pushes_are_scored_as_by_the_loop(scoring: Scoring, told: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    groups = torch.eye(USERS, dtype=torch.bool)
    groups[3, 5] = True  # a colluder
    known = knowledge_of(ShareLess() if told else FULL, groups=groups)
    tables = tables_of(draw, 3)
    table = {} if told else {"user": torch.randn(3, USERS, 6, generator=draw)}
    sender, receiver = torch.tensor([7, 7, 9, 11]), torch.tensor([0, 5, 2, 5])
    model = torch.tensor([0, 0, 1, 2])
    push = Push(0, sender, receiver, tables | table, model)
    attack = PeerCommunity(scoring=scoring, vector="told" if told else "sent")
    state, own = attack.init(known), torch.randn(USERS, 6, generator=draw)
    if told:
        assert torch.equal(attack.fold(known, state, push)["score"], state["score"]), "nothing was told yet"
        state = attack.fold(known, state, Disclosure(EVERYBODY, {"user": own}, {}))
    score = attack.fold(known, state, push)["score"]
    heard = {(0, 7): 0, (5, 7): 0, (3, 7): 0, (2, 9): 1, (5, 11): 2, (3, 11): 2}
    assert set(map(tuple, torch.isfinite(score).nonzero().tolist())) == set(heard)
    for (adversary, who), row in heard.items():
        user = own[adversary] if told else table["user"][row, who]
        one = {name: value[row] for name, value in tables.items()}
        assert float(score[adversary, who]) == pytest.approx(expected(scoring, known, one, user, adversary), rel=1e-4)
    for part in one_by_one(push):
        assert isinstance(part, Push)
        state = attack.fold(known, state, part)
    torch.testing.assert_close(state["score"], score)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("vector", ["sent", "told", "fitted"])
@pytest.mark.parametrize("together", [64, 1])
def test_uploads_are_scored_as_by_the_loop(
    scoring: Scoring, vector: Vector, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "_TOGETHER", together)
    draw = torch.Generator().manual_seed(2)
    sent = vector == "sent"
    known = knowledge_of(FULL if sent else ShareLess())
    tables, users = tables_of(draw), torch.randn(USERS, 6, generator=draw)
    client, item = torch.tensor([1, 4, 6]), torch.tensor([0, 1, 3, 7, 1, 2, 8, 17])
    offset = torch.tensor([0, 4, 4, 8])  # the second one changes nothing but its vector
    rows = {name: torch.randn(8, 6, generator=draw) for name in tables}
    values = {"user": torch.randn(3, 6, generator=draw)} if sent else {}
    update = Update(client, values, rows, item, offset, ITEMS)
    attack = ServerCommunity(scoring=scoring, vector=vector)
    state = attack.init(known)
    messages: list[Any] = [Broadcast(0, tables | ({"user": users} if sent else {}))]
    messages += [] if sent else [Disclosure(EVERYBODY, {"user": users}, {})]
    for message in (*messages, Upload(0, update, torch.ones(3))):
        state = attack.fold(known, state, message)
    score = state["score"]
    assert torch.isfinite(score).any(0).nonzero().flatten().tolist() == client.tolist()
    moves, place = known.public["transitions"], known.public["offsets"]
    for position, who in enumerate(client.tolist()):
        mine = update.select(torch.tensor([position]))
        one = {name: value.index_add(0, mine.item, mine.rows[name]) for name, value in tables.items()}
        for adversary in (0, 1, 4, 17):
            user = users[who] + values["user"][position] if sent else users[adversary]
            if vector == "fitted":
                to = moves[place[adversary] : place[adversary + 1], 1]
                weight = torch.from_numpy(
                    transitions.Targets.of(known, 0).toward[place[adversary] : place[adversary + 1]]
                )
                user = (weight.unsqueeze(1) * tables["item.preference"][to]).sum(0) / weight.sum()
            wanted = expected(scoring, known, one, user, adversary)
            assert float(score[adversary, who]) == pytest.approx(wanted, rel=2e-4, abs=1e-5)


def test_a_fitted_vector_is_the_nearest() -> None:
    known = knowledge_of(ShareLess())
    tables = tables_of(torch.Generator().manual_seed(3))
    best = transitions.fitted(known, tables, 0)["user"]
    for adversary in (0, 5):
        at = expected("confidence", known, tables, best[adversary], adversary)
        for step in 0.05 * torch.eye(6):
            assert at > expected("confidence", known, tables, best[adversary] + step, adversary)
            assert at > expected("confidence", known, tables, best[adversary] - step, adversary)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_who_is_near_its_own_places_ranks_first(scoring: Scoring) -> None:
    """The sign: of three models, each with one group's places around its vector, an adversary's own group is first."""
    known = knowledge_of(FULL, groups=torch.eye(USERS, dtype=torch.bool))
    user = torch.zeros(3, USERS, 6)
    tables = {name: torch.ones(3, ITEMS, 6) for name in ("item.preference", "item.sequence")}
    tables["item.sequence"] *= torch.randn(3, ITEMS, 1, generator=torch.Generator().manual_seed(0))
    for group in range(GROUPS):
        for value in tables.values():
            value[group, EACH * group : EACH * (group + 1)] = 0.1
    sender = torch.tensor([15, 16, 17]).repeat(3)
    push = Push(0, sender, torch.arange(3).repeat_interleave(3), {"user": user, **tables}, torch.arange(3).repeat(3))
    attack = PeerCommunity(scoring=scoring)
    score = attack.fold(known, attack.init(known), push)["score"]
    for adversary in range(3):
        assert int(score[adversary].argmax()) % GROUPS == adversary


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scoring", "least"), [("confidence", 0.5), ("calibrated", 0.6), ("standardized", 0.6)])
def test_the_server_finds_planted_communities(scoring: Scoring, least: float) -> None:
    tap = Listening(Server(), ServerCommunity(scoring=scoring), knowledge_of(FULL))
    protocol = Federated(rounds=25, aggregation="weighted", local=LOCAL)
    train_federated(protocol, MODEL, DATA, defense=FULL, taps=[tap], show_progress=False)
    assert found(tap.answer(WhoBelongs(EVERYBODY, EVERYBODY))) > least, "chance is 5 of 17"


@pytest.mark.parametrize("vector", ["told", "fitted"])
def test_the_server_finds_them_without_the_senders_vectors(vector: Vector) -> None:
    tap = Listening(Server(), ServerCommunity(vector=vector), knowledge_of(ShareLess()))
    protocol = Federated(rounds=4, aggregation="weighted", local=LOCAL)
    train_federated(
        protocol, MODEL, DATA, defense=ShareLess(), taps=[tap], confidants=range(USERS), show_progress=False
    )
    assert found(tap.answer(WhoBelongs(EVERYBODY, EVERYBODY))) > 0.6


@pytest.mark.parametrize("defense", [FULL, ShareLess()], ids=["full", "less"])
def test_nodes_find_them_too(defense: Defense) -> None:
    groups = torch.eye(USERS, dtype=torch.bool)
    vector: Vector = "sent" if defense is FULL else "told"
    known = knowledge_of(defense, groups=groups)
    tap = Listening(Peers(groups), PeerCommunity(scoring="calibrated", vector=vector), known)
    protocol = Gossip(rounds=8, degree=8, refresh=1, precision="float16", local=LOCAL)
    train_gossip(
        protocol, MODEL, DATA, defense=defense, taps=[tap], confidants=range(USERS) if defense is not FULL else (),
        show_progress=False,
    )  # fmt: skip
    score = tap.answer(WhoBelongs(EVERYBODY, EVERYBODY))
    assert float(torch.isfinite(score).float().mean()) > 0.8
    assert found(score) > (0.8 if defense is FULL else 0.45), "chance is 5 of 17"


def test_random_needs_no_transitions() -> None:
    known = knowledge_of(FULL)
    known = replace(known, public={"targets": known.public["targets"]})
    tap = Listening(Server(), ServerCommunity(scoring="random"), known)
    train_federated(Federated(rounds=1, local=LOCAL), MODEL, DATA, defense=FULL, taps=[tap], show_progress=False)
    assert bool(torch.isfinite(tap.answer(WhoBelongs(EVERYBODY, EVERYBODY))).all())


# --- errors -----------------------------------------------------------------------------------------------------------


def some_push() -> Message:
    tables = tables_of(torch.Generator().manual_seed(0), 1)
    one = torch.zeros(1, dtype=torch.int64)
    return Push(0, one + 3, one, {"user": torch.zeros(1, USERS, 6), **tables}, one)


@pytest.mark.parametrize(
    ("changes", "scoring", "says"),
    [
        ({"transitions": None}, "confidence", "needs target transitions, got no transitions"),
        ({"places": None}, "confidence", "got no places"),
        ({"transitions": torch.zeros(4, 2, dtype=torch.int64)}, "confidence", r"\[4, 2\], expected i64\[T, 3\]"),
        ({"transitions": torch.full((4, 3), 99)}, "confidence", r"an item outside \[0, 18\)"),
        ({"offsets": torch.tensor([0, 5, 3])}, "confidence", r"expected i64\[A \+ 1\] that ascend"),
        ({"offsets": torch.tensor([0, 3])}, "confidence", "offsets from 0 to 3, expected 0 to"),
        ({"places": torch.zeros(3, 3)}, "confidence", r"places torch.float32\[3, 3\], expected f64\[18, 3\]"),
        ({"excluded": torch.zeros(USERS, ITEMS)}, "confidence", "items that do not count"),
        ({}, "ndcg", "Got scoring 'ndcg' for PRMEG, expected one of confidence, calibrated, standardized"),
    ],
)
def test_errors_say_what_to_do(changes: dict[str, Tensor | None], scoring: Scoring, says: str) -> None:
    known = knowledge_of(FULL, groups=torch.eye(USERS, dtype=torch.bool))
    public = {name: value for name, value in (dict(known.public) | changes).items() if value is not None}
    attack, push = PeerCommunity(scoring=scoring), some_push()
    assert isinstance(push, Push)
    with pytest.raises(ConfigError, match=says):
        attack.fold(replace(known, public=public), attack.init(known), push)


def test_no_other_model_has_this_distance() -> None:
    with pytest.raises(ConfigError, match="Got MF and target transitions, expected PRMEG"):
        transitions.Targets.of(replace(knowledge_of(FULL), model=MF(4)), 0)


# --- the paper's cells ------------------------------------------------------------------------------------------------


def test_targets_are_the_transitions_of_each_user() -> None:
    public = target_transitions(DATA)
    moves = Transitions.of(DATA)
    for user, (first, last) in enumerate(pairwise(public["offsets"].tolist())):
        mine = moves.user == user
        assert last - first == mine.sum()
        wanted = np.stack([moves.before[mine], moves.item[mine], moves.gap[mine]], 1)
        assert (public["transitions"][first:last].numpy() == wanted).all()


@pytest.mark.parametrize("variant", ["as-written", cda_settings.CODE])
@pytest.mark.parametrize("protocol", ["fl", "rand", "pers"])
@pytest.mark.parametrize("sharing", ["full", "less"])
def test_cells_of_prme_are_measured(protocol: str, sharing: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cda_settings, "open_data", lambda *_: DATA)
    monkeypatch.setattr(cda_settings, "SIZE", 5)
    run: dict[str, str | int] = {
        "data": "walks",
        "model": "prme",
        "protocol": protocol,
        "sharing": sharing,
        "rounds": 2,
    }
    asks: list[dict[str, Any]] = [
        {"attack": "cda"},
        {"attack": "cda", "scoring": "standardized"},
        {"attack": "random"},
        {"measure": "utility"},
        {"attack": "chain"},
    ]
    monkeypatch.setattr(cda, "evaluation_candidates", lambda split, _, seed: _few(split, seed))
    cda_, standardized, guess, utility, chain = cda.measure(run, asks, variant=variant, seed=0, threads=1)
    for got in (cda_, standardized, chain):
        assert got.metrics["max-aac"].shape == (USERS,)
        assert [x for x, _ in got.series["aac"]] == [1, 2]
    assert (cda_.metrics["bound"].mean() == 1) == (protocol == "fl")
    assert guess.metrics["accuracy"].shape == (USERS,)
    assert set(utility.metrics) == {"hr@20", "hr@20-full"}
    assert float(utility.metrics["hr@20"].mean()) > 0


def _few(split: Any, seed: int) -> Any:
    from recleak.data.sampling import evaluation_candidates

    return evaluation_candidates(split, 9, seed=seed)


def test_cda_has_every_published_number_of_prme() -> None:
    paper = base.load("cda")
    cells = {name: cell for name, cell in paper.cells.items() if cell.run.get("model") == "prme"}
    numbers = [cell.published for name, cell in cells.items() if name.startswith("4-prme/") and "random" not in name]
    assert len(numbers) == 18
    # by hand, Foursquare and Gowalla
    assert sum(number or 0 for number in numbers) == pytest.approx(
        (0.198 + 0.092 + 0.05 + 0.052 + 0.044 + 0.052 + 0.046 + 0.046 + 0.036)
        + (0.372 + 0.284 + 0.112 + 0.07 + 0.048 + 0.068 + 0.05 + 0.05 + 0.026)
    )
    assert {cell.run["data"] for cell in cells.values()} == {"foursquare-nyc", "gowalla-nyc"}, "others have no places"
    assert all(cell.run["model"] == "gmf" for name, cell in paper.cells.items() if name not in cells)
    less = [cells[f"share-less-prme/fl/{data}/told"].published for data in ("foursquare-nyc", "gowalla-nyc")]
    assert less == [0.168, 0.308]


# --- in an audit ------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_an_audit_finds_communities_by_transitions(tmp_path: Path) -> None:
    """Who goes to the places of a group goes where its others go; the null does not see it."""
    store.save(DATA, tmp_path / "walks", name="walks")
    local = {
        "epochs": 2,
        "batch_size": 1,
        "loss": "bpr",
        "negatives": 1,
        "resample": True,
        "optimizer": {"use": "sgd", "learning_rate": 0.05, "weight_decay": 0.01},
    }
    made = experiment(
        {
            "data": str(tmp_path / "walks"),
            "model": {"use": "prme-g", "factors": 6},
            "protocol": [
                {"use": "federated", "name": "federated", "rounds": 3, "local": local},
                {"use": "gossip", "name": "gossip", "rounds": 3, "refresh": 1, "local": local},
            ],
            "defenses": ["share"],
            "attacks": [
                {"use": "community", "name": "server", "scoring": "standardized"},
                {"use": "community-of-peers", "name": "nodes", "scoring": "standardized", "colluders": 0.9},
            ],
            "communities": 5,
        }
    )
    found = audit_run(made, tmp_path / "run", command="test")
    rows = found.verdicts.select("protocol", "attack", "value", "null_value").rows()
    assert {(protocol, attack) for protocol, attack, *_ in rows} == {("federated", "server"), ("gossip", "nodes")}
    for _, _, value, null in rows:
        assert value > 0.8
        assert null < 0.7
    utility = found.utility.filter((pl.col("metric") == "hit@10") & pl.col("value").is_not_null())
    assert set(utility["protocol"]) >= {"federated", "gossip"}
