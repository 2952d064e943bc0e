"""A sum of uploads, read by who rehearses it: more than popularity and movements tell by themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recleak.attacks.alignment import AlignmentOfSums
from recleak.attacks.base import Knowledge
from recleak.attacks.membership import FromSums, PopularityOfSums
from recleak.attacks.shadow import train_shadows
from recleak.attacks.sums import RehearsedSums
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.labels import FakeItems, RandomizedLabels
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share
from recleak.errors import ConfigError
from recleak.grading import pairs_seen, truth_of
from recleak.models.base import Model, Params
from recleak.models.components import Normal
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening, Tap
from recleak.testing.attacks import auc
from recleak.training.cohort import LocalTraining
from recleak.training.local import LocalData
from recleak.training.optimizers import SGD, Adam
from recleak.update import Update
from recleak.wire import Aggregator

DATA = Synthetic(n_users=60, n_items=200, mean_activity=15, min_activity=8, communities=5).generate().distinct()
LOCAL = LocalTraining(epochs=5, batch_size=64, optimizer=Adam(0.01))
SMALL = NCF(8, (32,), init=Normal(0.1))
EVERY = SecureAggregation()


def knowledge_of(model: Model, local: LocalTraining, data: Interactions, defense: Defense) -> Knowledge:
    parts = defense.sharing(model.components())
    public = {"popularity": torch.from_numpy(data.popularity.astype(np.float32))}
    return Knowledge(model, data.n_users, data.n_items, parts, local, defense, public)


def train(model: Model, local: LocalTraining, defense: Defense, taps: list[Tap], data: Interactions = DATA) -> None:
    protocol = Federated(10, clients_per_round=6, local=local)
    train_federated(protocol, model, data, defense=defense, taps=taps, show_progress=False)


def found(attacks: list[FromSums], model: Model, local: LocalTraining = LOCAL, defense: Defense = EVERY) -> list[float]:
    """The AUC of each attack over the pairs of a client and an item that anybody in its sum touched."""
    knowledge = knowledge_of(model, local, DATA, defense)
    taps = [Listening(Aggregator(), attack, knowledge) for attack in attacks]
    train(model, local, defense, list(taps))
    question = pairs_seen(taps[0].state(), DATA.n_items)
    truth = torch.from_numpy(truth_of(question, DATA))
    return [auc(tap.answer(question), truth) for tap in taps]


# --- what it reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [MF(8), GMF(8), NCF(8, (16,)), LightGCN(8, score="mlp", hidden=(16,)), PFedRec(8)],
    ids=lambda model: type(model).__name__,
)
def test_it_reads_more_than_popularity_and_than_movements(model: Model) -> None:
    rehearsed, moved, popular = found([RehearsedSums(), AlignmentOfSums(), PopularityOfSums()], model)
    assert rehearsed > popular + 0.02
    assert rehearsed > moved


@pytest.mark.parametrize(
    "defense",
    [
        Chain((ClipByNorm(1.0), GaussianNoise(10.0, rows="all"), EVERY)),
        Chain((RandomizedLabels(0.1), EVERY)),
        Chain((FakeItems(3.0), EVERY)),
    ],
    ids=["noise", "labels", "fakes"],
)
def test_where_movements_say_little_popularity_is_left(defense: Defense) -> None:
    """The projection is worse than popularity there; who rehearsed it knows."""
    rehearsed, moved, popular = found([RehearsedSums(), AlignmentOfSums(), PopularityOfSums()], SMALL, defense=defense)
    assert moved < popular - 0.02
    assert rehearsed > popular - 0.02


@pytest.mark.parametrize("local", [LocalTraining(loss="bpr", optimizer=SGD(0.5)), LOCAL], ids=["bpr", "bce"])
@pytest.mark.parametrize("defense", [EVERY, Chain((Share(), EVERY))], ids=["kept", "user table in the sum"])
def test_pairwise_losses_and_tables_of_users(local: LocalTraining, defense: Defense) -> None:
    rehearsed, popular = found([RehearsedSums(), PopularityOfSums()], MF(8, init=Normal(0.1)), local, defense)
    assert rehearsed > popular


# --- shadow clients ---------------------------------------------------------------------------------------------------


def drawn(own: float, popularity: NDArray[np.float32], clients: int = 200) -> tuple[NDArray[np.int64], ...]:
    """For each shadow client its own items, and what else it touches."""
    local = LocalTraining(negatives=2)
    knowledge = Knowledge(
        SMALL, 9, len(popularity), SMALL.components(), local, public={"popularity": torch.from_numpy(popularity)}
    )
    rows, mine = RehearsedSums()._drawn(knowledge, own, np.arange(clients), 0)
    assert rows.n_clients == clients
    item, mark = rows.item.numpy().reshape(clients, -1), mine.numpy().reshape(clients, -1)
    assert (np.diff(item, axis=1) > 0).all()  # ascending, none twice
    return item[mark].reshape(clients, -1), item[~mark].reshape(clients, -1)


def test_own_items_of_shadows_are_drawn_by_popularity() -> None:
    popularity = np.array([0, 30, 1, 1, 1, 1, 60, 1, 1, 4, *[0] * 40], np.float32)
    own, other = drawn(1.0, popularity, clients=4000)
    assert own.shape == (4000, 1)
    share = np.bincount(own[:, 0], minlength=50) / 4000
    np.testing.assert_allclose(share, popularity / popularity.sum(), atol=0.03)
    assert other.shape == (4000, 2)  # of 49 items two drawn with replacement: 1.98 different ones
    evenly = np.bincount(other.ravel(), minlength=50) / other.size
    assert evenly[10:].min() > 0.01
    assert evenly[0] < 0.04


def test_shadows_have_no_more_items_than_anybody_has() -> None:
    own, _ = drawn(20.0, np.array([5, 0, 5, 0, 5, *[0] * 45], np.float32), clients=3)
    assert (np.sort(own, axis=1) == [0, 2, 4]).all()
    own, other = drawn(60.0, np.ones(50, np.float32), clients=3)
    assert own.shape == (3, 49)
    assert other.shape == (3, 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, LocalData]]:
    """The seeds and the examples that shadow clients are trained with."""
    seen: list[tuple[int, LocalData]] = []

    def spied(
        knowledge: Knowledge, received: Params, data: LocalData, round: int, seed: int, *, defense: Defense
    ) -> Update:
        seen.append((seed, data))
        return train_shadows(knowledge, received, data, round, seed, defense=defense)

    monkeypatch.setattr("recleak.attacks.sums.train_shadows", spied)
    return seen


def test_shadows_are_drawn_anew_in_each_round_and_by_each_seed(seen: list[tuple[int, LocalData]]) -> None:
    for attack in (RehearsedSums(), RehearsedSums(seed=7)):
        tap = Listening(Aggregator(), attack, knowledge_of(SMALL, LOCAL, DATA, EVERY))
        protocol = Federated(2, clients_per_round=6, local=LOCAL)
        train_federated(protocol, SMALL, DATA, defense=EVERY, taps=[tap], show_progress=False)
    assert len({seed for seed, _ in seen} | {0}) == 5  # none is that of the run
    assert all(len(data.client) == 6 for _, data in seen)
    assert len({data.item.tobytes() for _, data in seen}) == 8  # of two sums in each round


def test_memory_is_bounded_by_a_block_of_shadows_and_the_answer_is_the_same(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, LocalData]]
) -> None:
    answers = []
    for block in (1 << 18, 2 * DATA.n_items, 1):
        monkeypatch.setattr("recleak.attacks.sums._BLOCK", block)
        seen.clear()
        tap = Listening(Aggregator(), RehearsedSums(shadow_sums=1), knowledge_of(SMALL, LOCAL, DATA, EVERY))
        train_federated(
            Federated(1, clients_per_round=6, local=LOCAL), SMALL, DATA, defense=EVERY, taps=[tap], show_progress=False
        )
        answers.append((tap.answer(pairs_seen(tap.state(), DATA.n_items)), [len(data.client) for _, data in seen]))
    assert [found for _, found in answers] == [[6], [2, 2, 2], [1] * 6]
    for other, _ in answers[1:]:
        torch.testing.assert_close(answers[0][0], other, rtol=0, atol=1e-4)


def test_it_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="shadow_sums is 0, expected at least 1"):
        RehearsedSums(shadow_sums=0)
    knowledge = replace(knowledge_of(SMALL, LOCAL, DATA, EVERY), public={})
    tap = Listening(Aggregator(), RehearsedSums(), knowledge)
    with pytest.raises(ConfigError, match="needs the items' popularity"):
        train(SMALL, LOCAL, EVERY, [tap])
