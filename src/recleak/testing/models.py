"""The contract of a model: a test class that every model's test inherits.

    class TestMF(ModelContract):
        model = MF(8)

The cohort must train it as the plain loop of `recleak.testing.oracle` does, to float tolerance; it must learn a
checkerboard, whose right answer is known; and no bit of a result may depend on chunks, executors or the order of
clients. The checks are methods without arguments.
"""
# ruff: noqa: S101  (this module is made of assertions)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense
from recleak.defenses.sharing import Share
from recleak.models.base import Model, Params
from recleak.models.components import by_name
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.testing.oracle import oracle
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.executor import Executor, InProcess
from recleak.training.local import Examples, LocalData
from recleak.training.optimizers import SGD, Adam, Optimizer
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.update import Update
from recleak.wire import Aggregate, Broadcast, Message, Upload

Train = Callable[[Task, Params, Update, LocalData, int], Trained]


# --- data -------------------------------------------------------------------------------------------------------------


def checkerboard(n_users: int = 24, n_items: int = 24) -> tuple[Interactions, NDArray[np.int64]]:
    """Even users like even items, odd users odd ones. Every user has all items that it likes but one.

    That one is its row of the held-out pairs, i64[U, 2]: a recommender that has understood ranks it above every item of
    the other color. Others of the group have it, so there is something to learn it from.
    """
    if n_users < 4 or n_items < 4 or n_items % 2:
        raise ValueError(f"Got {n_users} users and {n_items} items, expected at least 4 each, and even items.")
    user, rank = np.divmod(np.arange(n_users * (n_items // 2)), n_items // 2)
    item = 2 * rank + user % 2
    held = rank == user // 2 % (n_items // 2)
    events = pl.DataFrame({"user": user[~held], "item": item[~held]})
    return Interactions.build(events), np.column_stack([user[held], item[held]])


def ragged(n_users: int = 24, n_items: int = 24, most: int = 10, seed: int = 0) -> Interactions:
    """Random interactions of users with 1, 2, ..., `most`, 1, ... items; every user and every item occurs."""
    user = np.repeat(np.arange(n_users), 1 + np.arange(n_users) % min(most, n_items - 1))
    start = np.searchsorted(user, user)
    rank = random.bits(seed, "ragged", np.arange(n_users)[:, None], np.arange(n_items)).argsort(1)
    events = pl.DataFrame({"user": user, "item": rank[user, np.arange(len(user)) - start]})
    missing = np.setdiff1d(np.arange(n_items), events["item"].to_numpy())
    extra = pl.DataFrame({"user": np.full(len(missing), n_users - 1), "item": missing})
    return Interactions.build(pl.concat([events, extra]))


# --- running ----------------------------------------------------------------------------------------------------------


def visits(
    by: Train, task: Task, data: Interactions, client: NDArray[np.int64], *, rounds: int = 1, seed: int = 0
) -> list[Trained]:
    """Some clients (ascending) train in several rounds; what they keep is kept, but nothing is aggregated.

    Both trainers thus get the same broadcast in every round, and differ by what one visit, or a kept state, adds.
    """
    local = task.training
    examples = Examples.of(data, negatives=local.negatives, loss=local.loss, resample=local.resample, seed=seed)
    received = first_params(task.components, data.n_users, data.n_items, task.seed)
    store = ClientStore(task.components, local.optimizer, data.n_users, data.n_items, task.seed)
    results = []
    with one_thread():
        for round in range(rounds):
            trained = by(task, received, store.read(client), examples.draw(client, round), round)
            store.write(trained.kept)
            results.append(trained)
    return results


def assert_close(
    got: Update, expected: Update, *, atol: float, rtol: float = 1e-4, why: str = "", rough: Update | None = None
) -> None:
    """The same clients, components and rows, and the same numbers within a tolerance.

    `rough` is what the loop gives in single precision: a component may be off by four times as much as that is.
    """
    assert set(got.values) == set(expected.values), f"{why}: {set(got.values)}, expected {set(expected.values)}"
    assert set(got.rows) == set(expected.rows), f"{why}: {set(got.rows)}, expected {set(expected.rows)}"
    assert torch.equal(got.client, expected.client), f"{why}: other clients"
    if expected.rows:
        assert torch.equal(got.offset, expected.offset), f"{why}: other numbers of rows"
        assert torch.equal(got.item, expected.item), f"{why}: other rows"
    for name in expected.names():
        one, other = _tensor(got, name).double(), _tensor(expected, name).double()
        assert one.shape == other.shape, f"{why}: {name} has shape {tuple(one.shape)}, expected {tuple(other.shape)}"
        if not one.numel():
            continue
        off, allowed = (one - other).abs(), atol
        if rough is not None:
            allowed = max(atol, 4 * float((_tensor(rough, name).double() - other).abs().max()))
        worst = float((off - rtol * other.abs()).max())
        assert worst <= allowed, f"{why}: {name} is off by {float(off.max()):.1e}, tolerance {allowed:.0e}"


def assert_equals_loop(
    task: Task,
    data: Interactions,
    client: NDArray[np.int64],
    *,
    rounds: int = 1,
    atol: float = 2e-5,
    why: str = "",
) -> list[Trained]:
    """The cohort trains as the oracle does, over several visits; the cohort's results.

    The oracle computes in double precision. Results differ by some 1e-7, but in rare cases by more: a unit that is on
    or off by a rounding error, a gradient that nearly cancels and that Adam divides by itself. The loop in single
    precision then differs as much, so it is run too, and says how large a difference may be.
    """
    got, expected = (visits(by, task, data, client, rounds=rounds) for by in (train, oracle))
    try:
        _assert_visits(got, expected, None, atol, why)
    except AssertionError:
        _assert_visits(got, expected, visits(_single, task, data, client, rounds=rounds), atol, why)
    return got


def _single(task: Task, received: Params, kept: Update, data: LocalData, round: int) -> Trained:
    return oracle(task, received, kept, data, round, dtype=torch.float32)


def _assert_visits(
    got: list[Trained], expected: list[Trained], rough: list[Trained] | None, atol: float, why: str
) -> None:
    for visit, (one, other) in enumerate(zip(got, expected, strict=True)):
        here = f"{why}, visit {visit + 1}" if why else f"visit {visit + 1}"
        allowed = None if rough is None else rough[visit]
        assert_close(one.update, other.update, atol=atol, why=here, rough=None if allowed is None else allowed.update)
        assert_close(
            one.kept, other.kept, atol=atol, why=f"{here}, kept", rough=None if allowed is None else allowed.kept
        )
        torch.testing.assert_close(one.loss.double(), other.loss, atol=1e-5, rtol=1e-4)
        assert one.steps == other.steps, f"{here}: {one.steps} steps, expected {other.steps}"


def assert_identical(got: Trained, expected: Trained, why: str) -> None:
    """The same bits in all that clients send and keep."""
    assert torch.equal(got.loss, expected.loss), f"{why}: the loss differs"
    for what, one, other in (("update", got.update, expected.update), ("kept", got.kept, expected.kept)):
        assert set(one.names()) == set(other.names()), f"{why}: other components in the {what}"
        for name in ("client", "item", "offset"):
            assert torch.equal(getattr(one, name), getattr(other, name)), f"{why}: {name} of the {what} differs"
        _assert_same({**one.values, **one.rows}, {**other.values, **other.rows}, f"{why}: {what}")


def _assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], why: str) -> None:
    for name, tensor in expected.items():
        if not torch.equal(got[name], tensor):
            off = float((got[name].double() - tensor.double()).abs().max())
            raise AssertionError(f"{why}: {name} differs by up to {off:.1e}")


class Wiretap:
    """Holds every message of a run."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def receive(self, message: Message) -> None:
        """One more."""
        self.messages.append(message)

    def state(self) -> dict[str, Tensor]:
        """Nothing is saved."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is restored."""

    def close(self) -> None:
        """Nothing is open."""


# --- the contract -----------------------------------------------------------------------------------------------------


class ModelContract:
    """What every model must do. Set `model`, and what else applies."""

    model: ClassVar[Model]
    user_features: ClassVar[int] = 0  # how many features of a user it needs; the contract draws them
    n_users: ClassVar[int] = 24  # for a model whose tables have a size already
    n_items: ClassVar[int] = 24
    training: ClassVar[LocalTraining] = LocalTraining(
        epochs=2, batch_size=8, optimizer=Adam(0.01), negatives=2, resample=True
    )
    # Numbers of size 1 are rounded to 6e-8, and after some dozen steps results differ by 1e-7 to 1e-6. Where a gradient
    # nearly cancels, Adam divides a rounding error by itself: at 1e-3 of a step of 0.01 that is still noise.
    tolerance: ClassVar[float] = 2e-5
    protocol: ClassVar[Federated] = Federated(  # learns the checkerboard
        rounds=12,
        aggregation="touched-mean",
        local=LocalTraining(epochs=4, batch_size=16, optimizer=Adam(0.03), negatives=2, resample=True),
    )

    # --- components

    def test_components_have_names_of_their_own(self) -> None:
        """Sharing, noise and reports speak of these names."""
        parts = self.model.components()
        assert parts, "there is no component"
        by_name(parts)

    def test_components_are_the_same_every_time(self) -> None:
        """A worker process asks again."""
        first, second = self.model.components(), self.model.components()
        assert [(p.name, p.storage, p.shape, p.shared) for p in first] == [
            (p.name, p.storage, p.shape, p.shared) for p in second
        ]

    def test_draws_are_functions_of_seed_name_and_row(self) -> None:
        """Which other rows are drawn does not matter, nor their order."""
        for part in self.model.components():
            n = {"per_user": self.n_users, "per_item": self.n_items, "dense": 1}[part.storage]
            whole = part.draw(3, np.arange(n))
            assert whole.shape == (n, *part.shape), f"{part.name}: drew {tuple(whole.shape)}"
            assert whole.dtype == torch.float32, f"{part.name}: drew {whole.dtype}"
            some = np.arange(n)[::-2].copy()
            assert torch.equal(part.draw(3, some), whole[torch.from_numpy(some)]), f"{part.name} depends on other rows"
            if not torch.equal(part.draw(4, np.arange(n)), whole):  # else it starts from given or constant values
                other = replace(part, name=f"{part.name} too").draw(3, np.arange(n))
                assert not torch.equal(other, whole), f"{part.name}: another name gives the same draw"
                assert n == 1 or not torch.equal(whole[0], whole[1]), f"{part.name}: two rows start alike"

    # --- the numbers

    def test_batched_training_equals_the_loop(self) -> None:
        """Two visits with what is kept between them, for both losses and several optimizers.

        In a difference of two scores whole terms cancel (the last bias, and all that the user's vector passes through
        the same units). What rounding leaves of them, 1e-9, Adam would blow up to steps of full size, so with the
        pairwise loss its epsilon is larger than that.
        """
        adam = self.training.optimizer
        settled = replace(adam, epsilon=1e-3) if isinstance(adam, Adam) else adam
        for loss, optimizer in (("bce", adam), ("bpr", settled), ("bce", SGD(0.1))):
            task = self._task(replace(self.training, optimizer=optimizer, loss="bpr" if loss == "bpr" else "bce"))
            why = f"{type(optimizer).__name__}, {loss}"
            assert_equals_loop(task, self._data(), self._clients(), rounds=2, atol=self.tolerance, why=why)

    def test_zero_learning_rate_changes_nothing(self) -> None:
        """Not by a bit."""
        data, client = self._data(), self._clients()
        for optimizer in (Adam(0.0), SGD(0.0, momentum=0.9)):
            task = self._task(replace(self.training, optimizer=optimizer))
            (trained,) = visits(train, task, data, client)
            for name in trained.update.names():
                tensor = _tensor(trained.update, name)
                assert not bool(tensor.any()), f"{name} moved by up to {float(tensor.abs().max())}"
            store = ClientStore(task.components, optimizer, data.n_users, data.n_items, task.seed)
            before = store.read(client)
            for name, value in before.values.items():
                assert torch.equal(trained.kept.values[name], value), f"{name}, which is kept, changed"

    def test_checkerboard(self) -> None:
        """After federated training, every user's held-out item is above all items of the other color."""
        board, held = checkerboard(self.n_users, self.n_items)
        model = self._federated(self.protocol, board)
        scores = model.scores(torch.from_numpy(held[:, 0])).numpy()  # f32[U, I]
        mine = scores[np.arange(len(held)), held[:, 1]]
        others = np.where(np.arange(self.n_items) % 2 != held[:, :1] % 2, scores, -np.inf).max(1)
        wrong = int((mine <= others).sum())
        assert wrong == 0, f"P@1 is {1 - wrong / len(held):.2f}, expected 1; the loss went {model.loss}"

    # --- what leaves the device

    def test_only_shared_components_are_sent(self) -> None:
        """Neither in an upload, nor in a broadcast or an aggregate is anything that is kept."""
        for defense in (Defense(), Share()):
            parts = by_name(defense.sharing(self.model.components()))
            shared = {name for name, part in parts.items() if part.shared}
            tap = Wiretap()
            self._federated(replace(self.protocol, rounds=2), self._data(), tap=tap, defense=defense)
            assert any(isinstance(message, Upload) for message in tap.messages), "nobody sent anything"
            for message in tap.messages:
                match message:
                    case Upload():
                        sent, rows = set(message.update.names()), set(message.update.rows)
                        assert rows == {n for n in shared if parts[n].storage == "per_item"}
                    case Broadcast():
                        sent = set(message.params)
                    case Aggregate():
                        sent = set(message.total)
                    case _:
                        continue
                assert sent == shared, f"{type(message).__name__} holds {sorted(sent)}, shared are {sorted(shared)}"

    def test_user_vectors_are_kept(self) -> None:
        """A table with a row per user stays with its user, unless a policy shares it."""
        for part in self.model.components():
            assert part.storage != "per_user" or not part.shared, f"{part.name} would be sent"

    # --- no bit depends on who else trains, or where

    def test_chunks_do_not_matter(self) -> None:
        """A client alone, some and all together, bit for bit."""
        for optimizer in self._optimizers():
            task = self._task(replace(self.training, optimizer=optimizer))
            whole, n = self._visit(task, self._clients()), len(self._clients())
            for start, size in ((0, 1), (3, 1), (n - 1, 1), (1, 2), (3, 3), (2, n - 2)):
                places = np.arange(start, start + size)
                part = self._visit(task, self._clients()[places])
                _assert_part(part, whole, places, f"{type(optimizer).__name__}, {size} of the clients")

    def test_order_of_clients_does_not_matter(self) -> None:
        """Long ones among short ones."""
        for optimizer in self._optimizers():
            task = self._task(replace(self.training, optimizer=optimizer))
            whole = self._visit(task, self._clients())
            order = np.random.default_rng(0).permutation(len(self._clients()))
            mixed = self._visit(task, self._clients()[order])
            _assert_part(mixed, whole, order, f"{type(optimizer).__name__}, clients in another order")

    def test_executor_and_chunk_do_not_matter(self) -> None:
        """Federated runs with small and full batches, on one or two threads, in chunks of several sizes."""
        for size, chunk in ((self.training.batch_size, 1), (None, 3)):
            protocol = replace(self.protocol, rounds=2, local=replace(self.training, batch_size=size))
            one = self._federated(protocol, self._data(), executor=InProcess(1), chunk=32)
            two = self._federated(protocol, self._data(), executor=InProcess(2), chunk=chunk)
            why = f"batches of {size or 'all'}, two threads with chunks of {chunk}"
            assert two.loss == one.loss, f"{why}: loss {two.loss}, on one thread {one.loss}"
            _assert_same(two.params, one.params, why)
            everyone = np.arange(self.n_users)
            left, right = one.store.read(everyone), two.store.read(everyone)
            _assert_same({**right.values, **right.rows}, {**left.values, **left.rows}, f"{why}, kept")

    # --- helpers

    def _optimizers(self) -> tuple[Optimizer, ...]:
        """One for each way in which item rows are stepped."""
        return (self.training.optimizer, SGD(0.1), Adam(0.01, weight_decay=0.01), Adam(0.01, keep=True))

    def _data(self) -> Interactions:
        return ragged(self.n_users, self.n_items)

    def _clients(self) -> NDArray[np.int64]:
        return np.arange(1, self.n_users, 3)

    def _features(self) -> Tensor | None:
        if not self.user_features:
            return None
        drawn = random.normal(0, "contract features", np.arange(self.n_users)[:, None], np.arange(self.user_features))
        return torch.from_numpy(drawn.astype(np.float32))

    def _task(self, training: LocalTraining) -> Task:
        constant = self.model.item_features(self.n_items)
        return Task(self.model, self.model.components(), training, Defense(), 0, constant, self._features())

    def _visit(self, task: Task, client: NDArray[np.int64]) -> Trained:
        data, local = self._data(), task.training
        examples = Examples.of(data, negatives=local.negatives, loss=local.loss, resample=local.resample)
        store = ClientStore(task.components, local.optimizer, data.n_users, data.n_items, task.seed)
        received = first_params(task.components, data.n_users, data.n_items, task.seed)
        with one_thread():
            return train(task, received, store.read(client), examples.draw(client, 0), 0)

    def _federated(
        self,
        protocol: Federated,
        data: Interactions,
        *,
        tap: Wiretap | None = None,
        defense: Defense | None = None,
        executor: Executor | None = None,
        chunk: int = 32,
    ) -> FederatedModel:
        return train_federated(
            protocol,
            self.model,
            data,
            defense=defense,
            taps=() if tap is None else (tap,),
            executor=executor or InProcess(1),
            chunk=chunk,
            user_features=self._features(),
            show_progress=False,
        )


def _tensor(update: Update, name: str) -> Tensor:
    return update.values[name] if name in update.values else update.rows[name]


def _assert_part(part: Trained, whole: Trained, places: NDArray[np.int64], why: str) -> None:
    """The result of some clients is what they have in the result of all."""
    at = torch.from_numpy(places)
    expected = Trained(whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps)
    assert_identical(part, expected, why)
