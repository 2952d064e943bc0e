"""Executors: results in order, few under way, clear ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.errors import ConfigError, RecleakError
from recleak.models.base import Batch, Model, Params
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.testing.models import ragged
from recleak.training import chunks, executor
from recleak.training.chunks import one_thread, train_in_chunks
from recleak.training.cohort import LocalTraining, Task, train
from recleak.training.executor import Assignment, InProcess, Work, Workers
from recleak.training.local import Examples, LocalData
from recleak.training.optimizers import SGD, Adam
from recleak.training.personal import first_params
from recleak.training.state import ClientStore
from recleak.update import Update

DATA = Interactions.build(pl.DataFrame({"user": [0, 0, 1, 2, 2], "item": [0, 1, 1, 2, 3]}))


class Dies(MF):
    """A model whose scoring ends its process."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        os._exit(3)


def assignment(model: MF) -> Assignment:
    training = LocalTraining(optimizer=SGD(0.1))
    return Assignment(Task(model, model.components(), training), Examples.of(DATA))


def works(model: MF, *clients: int) -> Iterator[Work]:
    store = ClientStore(model.components(), SGD(0.1), 3, 4, seed=0)
    return (Work(0, store.read(np.array([client]))) for client in clients)


PARAMS = {"item": torch.zeros(4, 64)}


def test_results_come_in_order_and_few_are_under_way() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def job(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002 * (number % 3))
        with lock:
            running -= 1
        return number

    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(30):
            taken.append(number)
            yield number

    with ThreadPoolExecutor(3) as pool:
        results = executor._ordered(pool, job, numbers(), 3)
        assert next(results) == 0
        assert len(taken) <= 6
        assert list(results) == list(range(1, 30))
    assert most <= 3


def test_closing_gives_up_on_the_rest() -> None:
    done: list[int] = []

    def job(number: int) -> None:
        time.sleep(0.02)
        done.append(number)

    with ThreadPoolExecutor(1) as pool:
        results = executor._ordered(pool, job, iter(range(100)), 4)
        next(results)
        results.close()
    assert len(done) <= 3


def test_threads_of_torch_are_as_before() -> None:
    before = torch.get_num_threads()
    with InProcess(2).open(assignment(MF())) as session:
        assert torch.get_num_threads() == 1
        results = list(session.map(PARAMS, works(MF(), 0, 1, 2)))
    assert torch.get_num_threads() == before
    assert [result.update.client.tolist() for result in results] == [[0], [1], [2]]


def test_what_cannot_travel_is_refused() -> None:
    class Local(MF):
        pass

    with (
        pytest.raises(ConfigError, match=r"(?s)cannot be sent to a worker process.*InProcess"),
        Workers(1).open(assignment(Local())),
    ):
        pass


@pytest.mark.heavy
def test_errors_and_deaths_of_workers_are_told(tmp_path: Path) -> None:
    with Workers(1).open(assignment(MF())) as session:
        assert len(list(session.map(PARAMS, works(MF(), 0, 1)))) == 2
        empty = Examples.of(DATA.take(DATA.user != 1))
    with (
        Workers(1).open(Assignment(assignment(MF()).task, empty)) as session,
        pytest.raises(RecleakError, match="1 clients have no interactions"),
    ):
        list(session.map(PARAMS, works(MF(), 1)))
    with (
        pytest.raises(RecleakError, match=r"(?s)A worker process died.*memory ran out.*__main__"),
        Workers(1).open(assignment(Dies())) as session,
    ):
        list(session.map(PARAMS, works(MF(), 0)))


# --- clients at hand, in chunks ---------------------------------------------------------------------------------------


def test_libraries_are_looked_for_again_after_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if as many modules went as came."""

    def looked() -> int:
        with one_thread():
            return chunks._libraries.cache_info().misses

    monkeypatch.setitem(sys.modules, "one_of_a_kind", chunks)
    looked()  # to look may import something itself
    before = looked()
    assert looked() == before
    monkeypatch.delitem(sys.modules, "one_of_a_kind")
    monkeypatch.setitem(sys.modules, "another_of_a_kind", chunks)
    assert looked() == before + 1


def at_hand(client: list[int], batch_size: int | None, model: Model) -> tuple[Task, Params, Update, LocalData]:
    """Clients of very different lengths."""
    data = ragged(n_users=12, n_items=20)
    training = LocalTraining(epochs=2, batch_size=batch_size, optimizer=Adam(0.01))
    task = Task(model, model.components(), training)
    store = ClientStore(task.components, training.optimizer, data.n_users, data.n_items, seed=0)
    who = np.array(client)
    received = first_params(task.components, data.n_users, data.n_items, 0)
    return (
        task,
        received,
        store.read(np.sort(who)).select(torch.from_numpy(who.argsort().argsort())),
        Examples.of(data).draw(who, 3),
    )


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk", [1, 2, 3, 32])
@pytest.mark.parametrize("batch_size", [4, None])
def test_chunks_of_clients_at_hand(
    monkeypatch: pytest.MonkeyPatch, batch_size: int | None, chunk: int, width: int
) -> None:
    """Whatever the chunk, the cores and the order: each client's own bits, ascending."""
    monkeypatch.setattr(chunks, "cores", lambda: width)
    clients = [7, 2, 11, 4, 9, 0, 10]
    task, received, kept, data = at_hand(clients, batch_size, NCF(4, (8,)))
    got = train_in_chunks(task, received, kept, data, 3, chunk=chunk)
    assert got.update.client.tolist() == got.kept.client.tolist() == sorted(clients)
    steps = 0
    for place, client in enumerate(sorted(clients)):
        at = np.array([clients.index(client)])
        with one_thread():
            alone = train(task, received, kept.select(torch.from_numpy(at)), data.select(at), 3)
        steps += alone.steps
        for mine, expected in ((got.update, alone.update), (got.kept, alone.kept)):
            one = mine.select(torch.tensor([place]))
            assert torch.equal(one.item, expected.item)
            assert set(one.names()) == set(expected.names())
            for name, value in {**expected.values, **expected.rows}.items():
                assert torch.equal({**one.values, **one.rows}[name], value), (client, name)
        assert torch.equal(got.loss[place], alone.loss[0])
        assert torch.equal(got.positives[place], alone.positives[0])
    assert got.steps == steps


@pytest.mark.parametrize(("clients", "width"), [(1, 2), (2, 2), (2, 4), (3, 8)])
def test_fewer_clients_at_hand_than_cores(monkeypatch: pytest.MonkeyPatch, clients: int, width: int) -> None:
    monkeypatch.setattr(chunks, "cores", lambda: width)
    task, received, kept, data = at_hand(list(range(clients)), 4, MF(4))
    before = torch.get_num_threads()
    assert train_in_chunks(task, received, kept, data, 0).update.client.tolist() == list(range(clients))
    assert torch.get_num_threads() == before
