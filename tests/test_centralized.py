"""The centralized protocol: it learns what a plain loop learns, stops on validation, continues, and shows lists."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recleak.central import seen_history
from recleak.data.interactions import Interactions
from recleak.data.split import Split, ratio
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense, Lists
from recleak.defenses.labels import FakeItems
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.release import PopularLists
from recleak.errors import ConfigError
from recleak.metrics.ranking import rank
from recleak.models.base import Model
from recleak.models.central import Archive, pair_logits, scores_of_all
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.ncf import NCF
from recleak.protocols.centralized import Centralized, as_shown, defended_history, lists, train_centralized
from recleak.streams import Streams
from recleak.testing import DefenseContract
from recleak.training.central import CentralExamples, example_losses
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import CheckpointError
from recleak.utility import union
from recleak.wire import Audience, Message, Recommendations, Server, decode, encode


@pytest.fixture(scope="module")
def split() -> Split:
    return ratio(Synthetic(n_users=80, n_items=60, mean_activity=15, min_activity=8).generate(), (0.7, 0.1, 0.2))


class Kept:
    """A tap that keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.closed = False

    def receive(self, message: Message) -> None:
        self.messages.append(message)

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: object) -> None:
        raise AssertionError("nothing to restore")

    def close(self) -> None:
        self.closed = True


# --- losses -------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_papers() -> None:
    score = torch.linspace(-3, 3, 20).reshape(10, 2)
    gap = score[:, 0] - score[:, 1]
    assert torch.allclose(example_losses("bpr", score, None), -logsigmoid(gap))
    assert torch.allclose(example_losses("bpr-taylor", score, None), log(2) - gap / 2 + gap**2 / 8)
    label = torch.tensor([0.0, 1.0]).repeat(5)
    expected = -(label * logsigmoid(score[:, 0]) + (1 - label) * logsigmoid(-score[:, 0]))
    assert torch.allclose(example_losses("bce", score[:, :1], label), expected, atol=1e-6)


@pytest.mark.parametrize(("exact", "polynomial"), [("bpr", "bpr-taylor"), ("bce", "taylor")])
def test_a_polynomial_is_its_loss_to_second_order(exact: str, polynomial: str) -> None:
    small = torch.tensor([[0.02, -0.01], [-0.03, 0.02]], dtype=torch.float64)
    label = torch.tensor([1.0, 0.0], dtype=torch.float64)
    one, other = (example_losses(name, small if "bpr" in name else small[:, :1], label) for name in (exact, polynomial))  # type: ignore[arg-type]
    assert torch.allclose(one, other, atol=1e-6, rtol=0)  # the third order is missing, the fourth is x^4 / 192


def test_the_polynomial_is_smallest_at_a_gap_of_two() -> None:
    gap = torch.linspace(0, 4, 401)
    loss = example_losses("bpr-taylor", torch.stack([gap, torch.zeros_like(gap)], 1), None)
    assert gap[loss.argmin()] == pytest.approx(2.0)


def test_examples_are_everybody_s_and_negatives_are_nobody_s_own(split: Split) -> None:
    train = split.train
    own = {(int(u), int(i)) for u, i in zip(train.user, train.item, strict=True)}
    batches = list(CentralExamples(train, "bpr", 2, seed=1).epoch(3, 50))
    user, item = torch.cat([each[0] for each in batches]), torch.cat([each[1] for each in batches])
    assert len(user) == 2 * len(train) == CentralExamples(train, "bpr", 2, seed=1).count
    pairs = {(int(u), int(i)) for u, (i, _) in zip(user, item.tolist(), strict=True)}
    assert pairs == own
    assert not {(int(u), int(j)) for u, (_, j) in zip(user, item.tolist(), strict=True)} & own
    again = list(CentralExamples(train, "bpr", 2, seed=1).epoch(4, 50))
    assert not torch.equal(again[0][0], batches[0][0])  # another epoch, another order


def test_labels_follow_their_items(split: Split) -> None:
    train = split.train
    own = {(int(u), int(i)) for u, i in zip(train.user, train.item, strict=True)}
    for user, item, label in CentralExamples(train, "bce", 3, seed=0).epoch(0, 64):
        assert label is not None
        told = [(int(u), int(i)) in own for u, i in zip(user, item[:, 0], strict=True)]
        assert told == (label > 0.5).tolist()


# --- training -----------------------------------------------------------------------------------------------------


def plain_bpr(train: Interactions, protocol: Centralized, model: MF, seed: int) -> dict[str, Tensor]:
    """The same training with torch's own optimizer, one example after the other in each batch."""
    parts = tuple(replace(part, shared=True) for part in model.components())
    params = {n: v.requires_grad_() for n, v in first_params(parts, train.n_users, train.n_items, seed).items()}
    made = protocol.optimizer
    kind = torch.optim.Adam if isinstance(made, Adam) else torch.optim.SGD
    optimizer = kind(params.values(), lr=made.learning_rate, weight_decay=made.weight_decay)
    examples = CentralExamples(train, "bpr", protocol.negatives, seed)
    for epoch in range(protocol.epochs):
        for user, item, _ in examples.epoch(epoch, protocol.batch_size):
            optimizer.zero_grad()
            losses = [
                -logsigmoid(params["user"][u] @ params["item"][i] - params["user"][u] @ params["item"][j])
                for u, (i, j) in zip(user.tolist(), item.tolist(), strict=True)
            ]
            torch.autograd.backward(torch.stack(losses).mean())
            optimizer.step()
    return {name: value.detach() for name, value in params.items()}


@pytest.mark.parametrize("optimizer", [Adam(0.01, weight_decay=0.01), SGD(0.1)])
def test_training_is_that_of_a_plain_loop(split: Split, optimizer: Adam | SGD) -> None:
    protocol = Centralized(epochs=2, batch_size=40, optimizer=optimizer, patience=0)
    ours = train_centralized(protocol, MF(4), split.train, seed=3, show_progress=False).params
    theirs = plain_bpr(split.train, protocol, MF(4), seed=3)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=2e-5), name


def test_triples_one_by_one_are_those_of_learn_bpr(split: Split) -> None:
    protocol = Centralized(epochs=2, batch_size=1, optimizer=SGD(0.05, weight_decay=0.02), patience=0)
    trained = train_centralized(protocol, MF(4), split.train, seed=3, show_progress=False)
    parts = tuple(replace(part, shared=True) for part in MF(4).components())
    first = first_params(parts, split.train.n_users, split.train.n_items, 3)
    user, item = first["user"].double().numpy(), first["item"].double().numpy()
    losses = []
    for epoch in range(2):
        losses.append(0.0)
        for who, pair, _ in CentralExamples(split.train, "bpr", 1, 3).epoch(epoch, 1):
            u, (i, j) = int(who), pair[0].tolist()
            p, q, r = user[u].copy(), item[i].copy(), item[j].copy()
            pull = 1 / (1 + np.exp(p @ (q - r)))
            losses[-1] += np.log1p(np.exp(-p @ (q - r)))
            user[u] += 0.05 * (pull * (q - r) - 0.02 * p)
            item[i] += 0.05 * (pull * p - 0.02 * q)
            item[j] += 0.05 * (-pull * p - 0.02 * r)
    assert np.allclose(trained.params["user"].numpy(), user, atol=1e-5)
    assert np.allclose(trained.params["item"].numpy(), item, atol=1e-5)
    assert trained.loss == pytest.approx([each / len(split.train) for each in losses], rel=1e-5)


@pytest.mark.parametrize("model", [MF(4), MF(4, biases=True), GMF(4), NCF(4, hidden=(8,))])
def test_scores_of_all_items_are_those_of_pairs(split: Split, model: Model) -> None:
    archive = Archive(split.train)
    parts = tuple(replace(part, shared=True) for part in model.components())
    params = first_params(parts, split.train.n_users, split.train.n_items, 0)
    users = torch.tensor([3, 0, 7])
    every = torch.arange(split.train.n_items).expand(3, -1)
    whole = scores_of_all(model, params, archive, users)
    assert torch.allclose(whole, pair_logits(model, params, archive, users, every, 0), atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("loss", ["bpr", "bce", "taylor", "bpr-taylor"])
def test_every_loss_learns(split: Split, loss: str) -> None:
    protocol = Centralized(epochs=30, batch_size=64, optimizer=Adam(0.01), loss=loss, patience=0, negatives=2)  # type: ignore[arg-type]
    trained = train_centralized(protocol, MF(8), split.train, valid=split.valid, show_progress=False)
    found = rank(trained, union(split.train, split.valid), split.test)
    assert found.recall(10).mean() > 1.3 * found.constant().recall(10).mean()
    assert trained.loss[-1] < trained.loss[0]


def test_training_stops_at_the_plateau_and_the_best_counts(split: Split) -> None:
    protocol = Centralized(epochs=200, batch_size=64, optimizer=Adam(0.05), patience=3)
    trained = train_centralized(protocol, MF(8), split.train, valid=split.valid, show_progress=False)
    assert len(trained.loss) < 200
    assert len(trained.loss) == trained.best + 3
    assert trained.valid[trained.best - 1] == max(trained.valid)
    assert rank(trained, split.train, split.valid).ndcg(10).mean() == pytest.approx(max(trained.valid), abs=1e-9)


def test_as_good_as_before_is_not_better(split: Split) -> None:
    """With a rate of 0 nothing changes: the first epoch is the best, and patience ends it."""
    protocol = Centralized(epochs=50, batch_size=64, optimizer=Adam(0.0), patience=3)
    trained = train_centralized(protocol, MF(4), split.train, valid=split.valid, show_progress=False)
    assert (trained.best, len(trained.loss)) == (1, 4)
    assert len(set(trained.valid)) == 1


def test_without_patience_all_epochs_are_made(split: Split) -> None:
    protocol = Centralized(epochs=4, optimizer=Adam(0.05), patience=0)
    trained = train_centralized(protocol, MF(4), split.train, valid=split.valid, show_progress=False)
    assert (len(trained.loss), trained.best, trained.valid) == (4, 4, ())


def test_a_killed_run_continues_with_the_same_bits(split: Split, tmp_path: Path) -> None:
    whole = Centralized(epochs=6, optimizer=Adam(0.02), patience=4)
    once = train_centralized(whole, MF(4), split.train, valid=split.valid, show_progress=False)
    train_centralized(
        replace(whole, epochs=3), MF(4), split.train, valid=split.valid, directory=tmp_path, show_progress=False
    )
    tap = Kept()
    later = train_centralized(
        whole, MF(4), split.train, valid=split.valid, directory=tmp_path, taps=[tap], show_progress=False
    )
    assert later.continued == 3
    assert (later.loss, later.valid, later.best) == (once.loss, once.valid, once.best)
    for name, value in once.params.items():
        assert torch.equal(value, later.params[name])
    assert tap.closed
    assert len(tap.messages) == 1
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.02, now 0\.5"):
        train_centralized(
            replace(whole, optimizer=Adam(0.5)), MF(4), split.train, valid=split.valid, directory=tmp_path
        )


# --- lists --------------------------------------------------------------------------------------------------------


def test_lists_are_the_best_items_that_a_user_does_not_have(split: Split) -> None:
    tap = Kept()
    protocol = Centralized(epochs=3, top=7, optimizer=Adam(0.02))
    trained = train_centralized(protocol, MF(4), split.train, valid=split.valid, taps=[tap], show_progress=False)
    (message,) = tap.messages
    assert isinstance(message, Recommendations)
    past = union(split.train, split.valid).matrix().toarray() > 0
    score = np.where(past, -np.inf, trained.scores(torch.arange(split.train.n_users)).numpy())
    for user, shown in zip(message.user.tolist(), message.item.tolist(), strict=True):
        assert shown == np.argsort(-score[user], kind="stable")[:7].tolist()
    sent = decode(encode(message))
    assert isinstance(sent, Recommendations)
    assert torch.equal(sent.item, message.item)
    assert Audience().sees(message) is message
    assert Server().sees(message) is None


def test_a_session_shows_nothing_again(split: Split) -> None:
    tap = Kept()
    protocol = Centralized(epochs=1, top=5, sessions=3)
    train_centralized(protocol, MF(4), split.train, taps=[tap], show_progress=False)
    shown = [each.item for each in tap.messages if isinstance(each, Recommendations)]
    assert [each.round for each in tap.messages if isinstance(each, Recommendations)] == [0, 1, 2]
    together = torch.cat(shown, 1)
    assert all(len(set(row)) == 15 for row in together.tolist())


def test_a_short_list_ends_with_minus_one(split: Split) -> None:
    trained = train_centralized(Centralized(epochs=1), MF(4), split.train, show_progress=False)
    long = lists(trained, split.train, torch.arange(5), split.train.n_items)
    left = split.train.n_items - split.train.activity[:5]
    assert ((long >= 0).sum(1).numpy() == left).all()
    assert all((row[row < 0] == -1).all() and (np.diff(row < 0) >= 0).all() for row in long.numpy())


# --- defenses -----------------------------------------------------------------------------------------------------


class TestPopularLists(DefenseContract):
    """The contract of defenses."""

    defense = PopularLists(0.5)
    neutral = PopularLists(0.0)


@pytest.fixture
def shown() -> Lists:
    users, items = 400, 30
    item = torch.stack([torch.randperm(items, generator=torch.Generator().manual_seed(u))[:5] for u in range(users)])
    popularity = torch.ones(items)
    popularity[20:] = 9
    return Lists(torch.arange(users), item, torch.ones(users, items, dtype=torch.bool), popularity)


def test_places_are_replaced_by_popular_items_as_often_as_said(shown: Lists) -> None:
    streams = Streams.simulated(0, 0, shown.user)
    got = PopularLists(0.3).release(shown, streams)
    changed = got != shown.item
    assert changed.double().mean() == pytest.approx(0.3, abs=0.03)
    assert all(len(set(row)) == 5 for row in got.tolist())
    fresh = got[changed]
    assert (fresh >= 20).double().mean() > 0.7  # 90 of 110 of the weight, less what the list holds already
    assert torch.equal(got, PopularLists(0.3).release(shown, streams))
    assert not torch.equal(got, PopularLists(0.3).release(shown, Streams.simulated(0, 1, shown.user)))


def test_what_must_not_be_shown_is_not_drawn(shown: Lists) -> None:
    allowed = shown.allowed.clone()
    allowed[:, 20:] = False
    got = PopularLists(1.0).release(replace(shown, allowed=allowed), Streams.simulated(0, 0, shown.user))
    assert (got[got != shown.item] < 20).all()
    assert PopularLists(0.0).release(shown, Streams.simulated(0, 0, shown.user)) is not None
    neutral = PopularLists(0.0).release(shown, Streams.simulated(0, 0, shown.user))
    assert torch.equal(neutral, shown.item)


def test_a_chain_releases_in_order(shown: Lists) -> None:
    both = Chain((PopularLists(1.0), PopularLists(0.0)))
    got = both.release(shown, Streams.simulated(0, 0, shown.user))
    assert (got != shown.item).all()


def test_what_is_graded_is_what_is_shown(split: Split) -> None:
    """Under a defense of lists their items come first, in their order, then the party's own; else it is its scores."""
    tap, defense = Kept(), PopularLists(0.5)
    protocol, past = Centralized(epochs=5, top=7, optimizer=Adam(0.02)), union(split.train, split.valid)
    trained = train_centralized(
        protocol, MF(4), split.train, valid=split.valid, defense=defense, taps=[tap], seed=4, show_progress=False
    )
    (message,) = tap.messages
    assert isinstance(message, Recommendations)
    users = torch.arange(split.train.n_users)
    plain, found = trained.scores(users).numpy(), as_shown(protocol, trained, past, defense, 4).scores(users).numpy()
    changed = 0
    for user in users.tolist():
        listed = message.item[user].tolist()
        others = [item for item in np.argsort(-plain[user], kind="stable").tolist() if item not in listed]
        assert np.argsort(-found[user], kind="stable").tolist() == listed + others
        free = past.matrix().toarray()[user] == 0
        changed += listed != [item for item in np.argsort(-plain[user], kind="stable").tolist() if free[item]][:7]
    assert changed > 0.9 * len(users)
    assert as_shown(protocol, trained, past, PopularLists(0.0), 4) is trained


def test_fake_items_are_trained_on_and_are_the_user_s_own_to_the_party(split: Split) -> None:
    """Lists hold neither what a user did nor what was added to it; only the latter has no score."""
    tap, protocol = Kept(), Centralized(epochs=20, top=60, optimizer=Adam(0.05))
    defense = FakeItems(0.5)
    trained = train_centralized(
        protocol, MF(4), split.train, valid=split.valid, defense=defense, taps=[tap], show_progress=False
    )
    more = defended_history(defense, split.train.distinct(), 0).matrix().toarray() > 0
    true = split.train.matrix().toarray() > 0
    assert (more >= true).all()
    assert more.sum() > 1.3 * true.sum()
    assert np.array_equal(trained.archive.train.matrix().toarray() > 0, more)
    score = trained.scores(torch.arange(split.train.n_users)).numpy()
    assert np.array_equal(np.isneginf(score), more & ~true)
    (message,) = tap.messages
    assert isinstance(message, Recommendations)
    own = more | (split.valid.matrix().toarray() > 0)
    for user, shown in zip(message.user.tolist(), message.item.tolist(), strict=True):
        assert not own[user][[item for item in shown if item >= 0]].any()
        assert sum(item >= 0 for item in shown) == (~own[user]).sum()
    assert defended_history(Defense(), split.train, 0) is split.train


def test_what_is_public_of_a_blurred_past_is_what_the_party_has(split: Split) -> None:
    seen = seen_history(FakeItems(0.5), split, 3).numpy() > 0
    party = defended_history(FakeItems(0.5), split.train.distinct(), 3).matrix().toarray() > 0
    assert np.array_equal(seen, party | (split.valid.matrix().toarray() > 0))
    plain = union(split.train, split.valid).matrix().toarray() > 0
    assert np.array_equal(seen_history(Defense(), split, 3).numpy() > 0, plain)


def test_what_cannot_be_is_refused(split: Split) -> None:
    with pytest.raises(ConfigError, match="acts on what clients send"):
        train_centralized(Centralized(), MF(4), split.train, defense=GaussianNoise(1.0))
    with pytest.raises(ConfigError, match="star graph"):
        train_centralized(Centralized(), LightGCN(4), split.train)
    with pytest.raises(ConfigError, match="top is 0"):
        train_centralized(Centralized(top=0), MF(4), split.train)
