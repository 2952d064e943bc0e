"""Executors: results in order, few under way, clear ends."""

from __future__ import annotations

import os
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
from recleak.models.base import Batch, Params
from recleak.models.mf import MF
from recleak.training import executor
from recleak.training.cohort import LocalTraining, Task
from recleak.training.executor import Assignment, InProcess, Work, Workers
from recleak.training.local import Examples
from recleak.training.optimizers import SGD
from recleak.training.state import ClientStore

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
