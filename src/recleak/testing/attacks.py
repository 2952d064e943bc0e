"""The contract of an attack: inherit `AttackContract` in a test module, and pytest checks it.

    class TestMyAttack(AttackContract):
        attack = MyAttack()

The default streams suit an attack that answers `WhichItems` at the server; another overrides `planted` (a stream that
gives the truth away) and `unrelated` (a stream that was made without it).
"""
# ruff: noqa: S101  (this module is made of assertions)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load, save
from scipy.stats import rankdata
from torch import Tensor

from recleak.attacks.base import Attack, Knowledge, State, WhichItems, listener_of
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Constant
from recleak.recording import Listening, Recorder, replay
from recleak.update import Update
from recleak.wire import Broadcast, Embeddings, Message, Push, Recommendations, Server, Upload, Vantage

CLIENTS, ITEMS, FACTORS, ROUNDS = 24, 40, 4, 3


@dataclass(frozen=True, eq=False)
class Case:
    """What is on the wire, who looks and what is asked; and the truth, which only the contract reads."""

    vantage: Vantage[Any]
    knowledge: Knowledge
    messages: Sequence[Message]
    question: Any
    truth: Tensor  # bool[n]


class AttackContract:
    """What every attack must do. A subclass sets `attack`."""

    attack: ClassVar[Attack[Any, Any]]

    def planted(self) -> Case:
        """A stream that gives the truth away."""
        return planted_items()

    def unrelated(self) -> Case:
        """A stream that was made without the truth."""
        return unrelated_items()

    def test_a_planted_leak_is_found(self) -> None:
        """The contract suite must be able to tell an attack from a guess."""
        case = self.planted()
        found = auc(self._answer(case), case.truth)
        assert found > 0.95, f"AUC {found:.3f} on a planted leak, expected above 0.95"

    def test_nothing_is_found_where_nothing_is(self) -> None:
        """Otherwise the attack got the truth from elsewhere."""
        case = self.unrelated()
        found, width = auc(self._answer(case), case.truth), chance_width(case.truth)
        assert abs(found - 0.5) <= width, f"AUC {found:.3f} on an unrelated stream, expected 0.5 within {width:.3f}"

    def test_the_fold_is_pure(self) -> None:
        """The state and the message that are handed over stay as they are, and the same input gives the same state."""
        case = self.planted()
        state = self.attack.init(case.knowledge)
        for message in _seen(case):
            kept = {name: value.clone() for name, value in state.items()}
            sent = [value.clone() for value in _tensors(message)]
            after = self.attack.fold(case.knowledge, state, message)
            _assert_same(state, kept, "fold changed the state that it was given")
            unchanged = all(torch.equal(*pair) for pair in zip(sent, _tensors(message), strict=True))
            assert unchanged, f"fold changed the {type(message).__name__} that it was given"
            _assert_same(
                self.attack.fold(case.knowledge, kept, message),
                after,
                "folding the same message again gave another state",
            )
            state = after

    def test_an_answer_changes_nothing(self) -> None:
        """Asking twice gives the same answer, of one row for each question asked."""
        case = self.planted()
        state = self._state(case)
        kept = {name: value.clone() for name, value in state.items()}
        first, second = (self.attack.answer(case.knowledge, state, case.question) for _ in range(2))
        _assert_same(state, kept, "answer changed the state")
        assert torch.equal(first, second), "the second answer differs from the first"
        assert len(first) == len(case.truth), f"got {len(first)} answers, expected {len(case.truth)}"
        assert not bool(first.isnan().any()), "an answer is NaN"

    def test_bytes_make_no_difference(self) -> None:
        """Messages that went through bytes lead to the same state, so nothing hangs on live objects."""
        case = self.planted()
        live = self.attack.init(case.knowledge)
        for message in _seen(case):
            live = self.attack.fold(case.knowledge, live, message)
        _assert_same(self._state(case), live, "messages from bytes gave another state")

    def test_a_recording_makes_no_difference(self, tmp_path: Path) -> None:
        """Replaying a recording gives the state of the attack that listened."""
        case = self.planted()
        recorder = Recorder(case.vantage, tmp_path / "recording", components=case.knowledge.components)
        for message in case.messages:
            recorder.receive(message)
        recorder.close()
        replayed = replace(case, messages=list(replay(tmp_path / "recording")))
        _assert_same(self._state(replayed), self._state(case), "the replayed recording gave another state")

    def test_a_saved_state_makes_no_difference(self) -> None:
        """Saved and restored after any message, the attack ends in the same state: it keeps nothing beside it."""
        case = self.planted()
        expected = self._state(case)
        for stop in range(len(case.messages) + 1):
            first = self._listening(case, case.messages[:stop])
            saved = save({name: value.clone().contiguous() for name, value in first.state().items()})
            rest = Listening(case.vantage, self.attack, case.knowledge)
            rest.restore(load(saved))
            for message in case.messages[stop:]:
                rest.receive(message)
            _assert_same(rest.state(), expected, f"saved after message {stop}, the attack ended in another state")

    def test_another_can_listen_for_it(self) -> None:
        """What its listener keeps, if it names one, is what it keeps: also if it is asked about another attribute."""
        listener: Any = listener_of(self.attack)
        if listener is not None:
            case = self.planted()
            knowledge = _of_another_attribute(case.knowledge)
            state = listener.init(knowledge)
            for message in _seen(case):
                state = listener.fold(knowledge, state, message)
            _assert_same(state, self._state(case), "the listener keeps another state")

    def test_the_grouping_makes_no_difference(self) -> None:
        """One message of many clients says the same as many messages of one."""
        case = self.planted()
        alone = replace(case, messages=[part for message in case.messages for part in one_by_one(message)])
        torch.testing.assert_close(self._answer(alone), self._answer(case), rtol=1e-4, atol=1e-6)

    def _listening(self, case: Case, messages: Iterable[Message]) -> Listening[Any, Any]:
        listening: Listening[Any, Any] = Listening(case.vantage, self.attack, case.knowledge)
        for message in messages:
            listening.receive(message)
        return listening

    def _state(self, case: Case) -> State:
        return self._listening(case, case.messages).state()

    def _answer(self, case: Case) -> Tensor:
        return self._listening(case, case.messages).answer(case.question)


# --- streams ----------------------------------------------------------------------------------------------------------


def planted_items(seed: int = 0) -> Case:
    """Each client's own item rows move; the other rows that it sends do not."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.rand(CLIENTS, ITEMS, generator=generator) < 0.25  # bool[C, I]
    sent = own | (torch.rand(CLIENTS, ITEMS, generator=generator) < 0.5)
    return _items_case(own, sent, own.float(), generator)


def unrelated_items(seed: int = 0) -> Case:
    """The rows that a client sends, and how they move, are drawn without a look at its own items."""
    generator = torch.Generator().manual_seed(seed)
    own, sent = (torch.rand(CLIENTS, ITEMS, generator=generator) < share for share in (0.25, 0.6))
    return _items_case(own, sent, torch.rand(CLIENTS, ITEMS, generator=generator), generator)


def one_by_one(message: Message) -> list[Message]:
    """The same message as one for each client, push or list; those about nobody in particular stay whole."""
    if isinstance(message, Upload):
        places = torch.arange(message.update.n_clients)[:, None]
        return [Upload(message.round, message.update.select(at), message.weight[at]) for at in places]
    if isinstance(message, Push):
        return [message.select(at) for at in torch.arange(len(message.sender))[:, None]]
    if isinstance(message, Recommendations):
        places = torch.arange(len(message.user))[:, None]
        return [Recommendations(message.round, message.user[at], message.item[at]) for at in places]
    if isinstance(message, Embeddings):
        places = torch.arange(len(message.user))[:, None]
        return [replace(message, user=message.user[at], vector=message.vector[at]) for at in places]
    return [message]


def auc(score: Tensor, truth: Tensor) -> float:
    """The probability that a true one is scored above a false one, ties counting half (Mann and Whitney 1947)."""
    rank = rankdata(score.detach().double().flatten().numpy())
    positive = truth.flatten().numpy()
    count = int(positive.sum())
    return float((rank[positive].sum() - count * (count + 1) / 2) / (count * (len(positive) - count)))


def chance_width(truth: Tensor, deviations: float = 3.3) -> float:
    """How far from 0.5 the AUC of scores that do not depend on the truth lies, but for one in a thousand.

    Its variance is (n + 1) / (12 * positives * negatives) whatever the scores are, and less with ties.
    """
    positives, n = int(truth.sum()), truth.numel()
    return deviations * sqrt((n + 1) / (12 * positives * (n - positives)))


@dataclass(frozen=True)
class DotProduct(Model):
    """The smallest recommender: a user's vector by an item's, and a bias for all."""

    d: int = FACTORS

    def components(self) -> tuple[Component, ...]:
        """The vectors of users stay with them."""
        return (
            Component("user", "per_user", "user", (self.d,), shared=False),
            Component("item", "per_item", "item", (self.d,)),
            Component("bias", "dense", "head", (), Constant()),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """f32[C, B]."""
        return (params["item"] @ params["user"][:, :, None]).squeeze(2) + params["bias"][:, None]


def _items_case(own: Tensor, sent: Tensor, size: Tensor, generator: torch.Generator) -> Case:
    """Rounds in which clients send the rows `sent`, changed by random vectors of the sizes `size` (all are [C, I])."""
    model = DotProduct()
    table, bias = torch.randn(ITEMS, FACTORS, generator=generator), torch.zeros(())
    client, item = sent.nonzero().unbind(1)
    messages: list[Message] = []
    for number in range(ROUNDS):
        messages.append(Broadcast(number, {"item": table, "bias": bias}))
        step = torch.randn(len(item), FACTORS, generator=generator)
        rows = 0.1 * size[client, item, None] * step / step.norm(dim=1, keepdim=True)
        update = Update(
            torch.arange(CLIENTS),
            {"bias": 0.01 * torch.randn(CLIENTS, generator=generator)},
            {"item": rows},
            item,
            torch.cat([torch.zeros(1, dtype=torch.int64), sent.sum(1).cumsum(0)]),
            ITEMS,
        )
        for part in torch.arange(CLIENTS).chunk(2):
            messages.append(Upload(number, update.select(part), torch.ones(len(part))))
        table = table.index_add(0, item, rows / CLIENTS)
        bias = bias + update.values["bias"].mean()
    every = torch.cartesian_prod(torch.arange(CLIENTS), torch.arange(ITEMS))
    knowledge = Knowledge(model, CLIENTS, ITEMS, model.components())
    return Case(Server(), knowledge, messages, WhichItems(*every.unbind(1)), own.flatten())


# --- helpers ----------------------------------------------------------------------------------------------------------


def _of_another_attribute(knowledge: Knowledge) -> Knowledge:
    """The same, but with labels of another attribute, of other users, and no columns."""
    about = ("labels of ", "columns of ")
    public = {name: value for name, value in knowledge.public.items() if not name.startswith(about)}
    user = torch.arange(knowledge.n_users)
    labels = torch.where(user % 2 == 0, user % 3, -1)
    return replace(knowledge, public={**public, "labels of another attribute": labels})


def _seen(case: Case) -> list[Any]:
    return [seen for message in case.messages if (seen := case.vantage.sees(message)) is not None]


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a message."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if hasattr(value, "__dataclass_fields__"):
        return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
    return []


def _assert_same(got: State, expected: State, problem: str) -> None:
    assert got.keys() == expected.keys(), f"{problem}: it has {sorted(got)}, expected {sorted(expected)}"
    for name, value in expected.items():
        same = got[name].dtype == value.dtype and torch.equal(got[name], value)
        assert same, f"{problem}: {name!r} differs"
