"""Where chunks of clients are trained: threads of this process, or local worker processes.

Chunks are independent and a client's result does not depend on its chunk, so every executor gives the same bits. One
torch thread per chunk: small products gain more from chunks side by side than from threads inside a product.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from threadpoolctl import threadpool_limits

from recleak.errors import ConfigError, DataError, RecleakError
from recleak.machine import end_with_parent, interrupts_wait
from recleak.models.base import Params
from recleak.training.chunks import cores, one_thread
from recleak.training.cohort import Task, Trained, train
from recleak.training.local import Examples
from recleak.training.parcels import Arrays, Result, arrays_of, result_of, trained_of, update_of
from recleak.training.transitions import TransitionExamples
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
    examples: Examples | TransitionExamples

    def do(self, received: Params, work: Work) -> Trained:
        """Train one chunk."""
        data = self.examples.draw(work.kept.client.cpu().numpy(), work.round)
        return train(self.task, received, work.kept, data, work.round)

    def result(self, received: Params, round: int, kept: Arrays) -> Result:
        """The same in another process, from arrays to arrays."""
        try:
            return result_of(self.do(received, Work(round, update_of(kept))))
        except DataError as error:  # it has no form in bytes
            raise RecleakError(str(error)) from None


class Session(Protocol):
    """An executor that has been given its assignment."""

    width: int  # how many chunks run side by side

    def map(self, received: Params, works: Iterable[Work]) -> Generator[Trained, None, None]:
        """The results in the order of the works; a few are under way at a time. Closing it gives up on the rest."""
        ...


class Executor(Protocol):
    """Runs chunks somewhere."""

    def open(self, assignment: Assignment) -> AbstractContextManager[Session]:
        """A session; it ends with the context."""
        ...


@dataclass(frozen=True)
class InProcess:
    """Threads of this process, one per core by default; torch and the compiled kernels run without Python's lock."""

    threads: int | None = None

    @contextmanager
    def open(self, assignment: Assignment) -> Iterator[Session]:
        """torch and BLAS use one thread per operation while the session lasts."""
        width = _width("threads", self.threads)
        with one_thread(), ThreadPoolExecutor(width, thread_name_prefix="recleak") as pool:
            yield _ThreadSession(assignment, pool, width)


@dataclass
class _ThreadSession:
    assignment: Assignment
    pool: Pool
    width: int

    def map(self, received: Params, works: Iterable[Work]) -> Generator[Trained, None, None]:
        return _ordered(self.pool, lambda work: self.assignment.do(received, work), works, self.width)


@dataclass(frozen=True)
class Workers:
    """Local worker processes of one thread each, one per core by default. They start once and stay for the session.

    A script that uses them needs `if __name__ == "__main__":`, as with all of Python's processes.
    """

    processes: int | None = None

    @contextmanager
    def open(self, assignment: Assignment) -> Iterator[Session]:
        """The assignment goes to each worker as it starts, broadcasts through files; results come back as arrays."""
        width = _width("processes", self.processes)
        with tempfile.TemporaryDirectory(prefix="recleak-") as folder:
            pool = ProcessPoolExecutor(
                width,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(_packed(assignment),),
            )
            try:
                with interrupts_wait():
                    for _ in range(width):  # all of them start now, side by side
                        pool.submit(_nothing)
                yield _WorkerSession(pool, width, Path(folder))
            except BaseException:
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                raise
            finally:
                pool.shutdown(cancel_futures=True)


def _width(what: str, given: int | None) -> int:
    if given is not None and given < 1:
        raise ConfigError(f"{what} is {given}, expected at least 1; None means one per core.")
    return cores() if given is None else given


def require_cpu(received: Params) -> None:
    """An error for parameters that another process cannot have."""
    if away := [name for name, tensor in received.items() if tensor.device.type != "cpu"]:
        raise ConfigError(
            f"Got {away[0]} on {received[away[0]].device}, expected cpu: worker processes have no other device.\n"
            "  Use the executor InProcess."
        )


def _packed(assignment: Assignment) -> bytes:
    """The assignment for a child process, which gets it through the pipe that Python starts it with; never a file."""
    try:
        return pickle.dumps(assignment)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Got a model, defense or optimizer that cannot be sent to a worker process ({error}).\n"
            "  Define its classes and functions at the top level of a module, or use the executor InProcess."
        ) from error


@dataclass
class _WorkerSession:
    pool: Pool
    width: int
    folder: Path
    broadcasts: int = 0

    def map(self, received: Params, works: Iterable[Work]) -> Generator[Trained, None, None]:
        require_cpu(received)
        self.broadcasts += 1
        file = self.folder / f"{self.broadcasts}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in received.items()}, file)
        try:
            jobs = ((str(file), work.round, arrays_of(work.kept)) for work in works)
            for result in _ordered(self.pool, _work, jobs, self.width):
                yield trained_of(result)
        except BrokenProcessPool as error:
            raise RecleakError(
                "A worker process died.\n"
                "  If memory ran out, use smaller chunks or fewer processes; if this is a script, see that it starts "
                'with `if __name__ == "__main__":`; or use the executor InProcess.'
            ) from error
        finally:
            file.unlink(missing_ok=True)


_assignment: Assignment | None = None  # of this worker process
_received: tuple[str, Params] = ("", {})


def _begin(assignment: bytes) -> None:
    """A worker process starts: one thread, no interrupts, and it ends with its parent."""
    global _assignment
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    threadpool_limits(1)  # for good: nothing undoes it
    _assignment = pickle.loads(assignment)  # noqa: S301 (from our parent, as all that Python gives a child process)


def _nothing() -> None:
    """The first job of a worker process, so that it starts."""


def _work(job: tuple[str, int, Arrays]) -> Result:
    """Train one chunk in a worker process."""
    global _received
    file, round, kept = job
    if _assignment is None:
        raise AssertionError("the worker has begun")
    if _received[0] != file:
        _received = (file, {name: tensor.clone() for name, tensor in load_file(file).items()})  # torch's own alignment
    return _assignment.result(_received[1], round, kept)


def _ordered(pool: Pool, function: Callable[[A], R], items: Iterable[A], width: int) -> Generator[R, None, None]:
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
