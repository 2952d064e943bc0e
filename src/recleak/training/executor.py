"""Where chunks of clients are trained: threads of this process, or local worker processes.

Chunks are independent and a client's result does not depend on its chunk, so every executor gives the same bits. One
torch thread per chunk: small products gain more from chunks side by side than from threads inside a product.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from recleak.errors import RecleakError
from recleak.models.base import Params
from recleak.training.cohort import Task, Trained, train
from recleak.training.local import Examples
from recleak.update import Update

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Work:
    """One chunk: clients in ascending order, with what they keep."""

    round: int
    kept: Update


@dataclass(frozen=True, eq=False)
class Assignment:
    """What an executor needs once: the task, and where examples come from."""

    task: Task
    examples: Examples

    def do(self, received: Params, work: Work) -> Trained:
        """Train one chunk."""
        data = self.examples.draw(work.kept.client.cpu().numpy(), work.round)
        return train(self.task, received, work.kept, data, work.round)


class Session(Protocol):
    """An executor that has been given its assignment."""

    width: int  # how many chunks run side by side

    def map(self, received: Params, works: Iterable[Work]) -> Iterator[Trained]:
        """The results in the order of the works; a few are under way at a time."""
        ...


class Executor(Protocol):
    """Runs chunks somewhere."""

    def open(self, assignment: Assignment) -> AbstractContextManager[Session]:
        """A session; it ends with the context."""
        ...


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class InProcess:
    """Threads of this process, one per core by default; torch and the compiled kernels run without Python's lock."""

    threads: int | None = None

    @contextmanager
    def open(self, assignment: Assignment) -> Iterator[Session]:
        """torch uses one thread per operation while the session lasts."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        width = self.threads or cores()
        try:
            with ThreadPoolExecutor(width, thread_name_prefix="recleak") as pool:
                yield _ThreadSession(assignment, pool, width)
        finally:
            torch.set_num_threads(before)


@dataclass
class _ThreadSession:
    assignment: Assignment
    pool: Pool
    width: int

    def map(self, received: Params, works: Iterable[Work]) -> Iterator[Trained]:
        return _ordered(self.pool, lambda work: self.assignment.do(received, work), works, self.width)


@dataclass(frozen=True)
class Workers:
    """Local worker processes of one thread each, one per core by default. They start once and stay for the session."""

    processes: int | None = None

    @contextmanager
    def open(self, assignment: Assignment) -> Iterator[Session]:
        """The assignment travels once; broadcasts go through a file, results come back as arrays."""
        width = self.processes or cores()
        with (
            tempfile.TemporaryDirectory(prefix="recleak-") as folder,
            ProcessPoolExecutor(
                width,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(assignment,),
            ) as pool,
        ):
            yield _WorkerSession(pool, width, Path(folder))


@dataclass
class _WorkerSession:
    pool: Pool
    width: int
    folder: Path
    broadcasts: int = 0

    def map(self, received: Params, works: Iterable[Work]) -> Iterator[Trained]:
        self.broadcasts += 1
        file = self.folder / f"{self.broadcasts}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in received.items()}, file)
        try:
            jobs = ((str(file), work.round, _arrays(work.kept)) for work in works)
            for update, kept, loss, steps in _ordered(self.pool, _work, jobs, self.width):
                yield Trained(_update(update), _update(kept), _tensor(loss), steps)
        except BrokenProcessPool as error:
            raise RecleakError(
                "A worker process died.\n  If memory ran out, use smaller chunks or fewer processes."
            ) from error
        finally:
            file.unlink()


_assignment: Assignment | None = None  # of this worker process
_received: tuple[str, Params] = ("", {})


def _begin(assignment: Assignment) -> None:
    """A worker process starts: one thread, and the interrupt is its parent's business."""
    global _assignment
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _assignment = assignment


def _work(job: tuple[str, int, Arrays]) -> tuple[Arrays, Arrays, NDArray[np.float32], int]:
    """Train one chunk in a worker process."""
    global _received
    file, round, kept = job
    if _assignment is None:
        raise AssertionError("the worker has begun")
    if _received[0] != file:
        _received = (file, load_file(file))
    trained = _assignment.do(_received[1], Work(round, _update(kept)))
    return _arrays(trained.update), _arrays(trained.kept), trained.loss.numpy(), trained.steps


Arrays = tuple[dict[str, Any], dict[str, Any], list[Any]]


def _arrays(update: Update) -> Arrays:
    """An update as plain arrays: tensors would travel through shared memory, of which containers have little."""
    return (
        {name: value.numpy() for name, value in update.values.items()},
        {name: value.numpy() for name, value in update.rows.items()},
        [update.client.numpy(), update.item.numpy(), update.offset.numpy(), update.n_items],
    )


def _update(arrays: Arrays) -> Update:
    values, rows, (client, item, offset, n_items) = arrays
    return Update(
        _tensor(client),
        {name: _tensor(value) for name, value in values.items()},
        {name: _tensor(value) for name, value in rows.items()},
        _tensor(item),
        _tensor(offset),
        n_items,
    )


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _ordered(pool: Pool, function: Callable[[A], R], items: Iterable[A], width: int) -> Iterator[R]:
    """Results in the order of the items, with at most twice as many under way as can run at a time."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 2 * width:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
