"""Chunks of clients and cells of audits on a Ray cluster.

A chunk's result is a pure function of the assignment, the broadcast, the round and what its clients keep; a cell's of
the cell and the data. Both are stateless tasks: one whose worker died is run again, anywhere, with the same bits. Who
waits takes each result once, in its own order, and alone writes what clients keep and what is stored. So nothing is
lost and nothing is doubled.

Ray's own processes talk by pickle, and whoever reaches a cluster's ports can run code on it: use clusters that are
yours alone. Nothing that we read from a file is unpickled, here or there.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from recleak.cells import loaded
from recleak.data.interactions import Interactions
from recleak.deploy import away
from recleak.deploy.away import Errand, Home, Job
from recleak.errors import ConfigError, RecleakError
from recleak.jobs import Outcome, Work
from recleak.machine import cores, use_at_most
from recleak.models.base import Params
from recleak.training.chunks import one_thread
from recleak.training.cohort import Trained
from recleak.training.executor import Assignment, Session, require_cpu
from recleak.training.executor import Work as Chunk
from recleak.training.parcels import Arrays, Result, arrays_of, trained_of

HERE = "ray"
CLIENT = "ray://"
RETRIES = 3  # of a task whose worker died
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of what it will do with graphics cards one day
}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # whatever its name says: a cluster of this machine alone


@dataclass(frozen=True)
class RayCluster:
    """An executor of chunks, and of the jobs of an audit.

    `ray`: the cluster of RAY_ADDRESS, or one of its own on this machine for as long as it is needed, which listens on
    the loopback only. `ray://HOST:10001`: a cluster elsewhere, through its client port. A Ray that this process has
    begun itself is used as it is. Workers need the same Python and packages (`away.versions`); they get data from here.
    """

    address: str = HERE
    cpus: int | None = None  # of a cluster of its own (default: all cores)
    store_bytes: int | None = None  # of its object store (default: Ray's)
    workers: int | None = None  # cells at a time, which share the CPUs (default: one per CPU)

    def __post_init__(self) -> None:
        if self.address != HERE and not (self.address.startswith(CLIENT) and self.address != CLIENT):
            raise ConfigError(
                f"Got the executor {self.address!r}, expected 'ray' (on this machine, or RAY_ADDRESS) or "
                "'ray://HOST:10001' (a cluster elsewhere)."
            )
        for name in ("cpus", "store_bytes", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1.")

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """The module `ray`, connected; a connection that this begins ends with the block."""
        own = self.address == HERE and not os.environ.get("RAY_ADDRESS")
        ray = _imported(own)
        if ray.is_initialized():
            yield ray
            return
        try:
            if own:
                ray.init(
                    "local",
                    num_cpus=self.cpus or cores(),
                    object_store_memory=self.store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            else:
                where = {} if self.address == HERE else {"address": self.address}
                ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            raise RecleakError(
                f"{self.address}: no Ray cluster could be reached ({error}).\n"
                "  Check that it runs, with the same versions of Ray and Python, or leave the executor out.\n"
                "  If its client server failed to start, try again: Ray forks it, and that can go wrong.\n"
                "  A head that is started with GRPC_ENABLE_FORK_SUPPORT=0 is spared that."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()

    # --- chunks of clients

    @contextmanager
    def open(self, assignment: Assignment) -> Iterator[Session]:
        """The assignment and each broadcast go to a machine once; chunks and their results travel as arrays."""
        with self.connected() as ray:
            try:
                given = [ray.put(away.home()), ray.put(assignment)]
            except (TypeError, AttributeError) as error:
                raise ConfigError(
                    f"Got a model, defense or optimizer that cannot be sent to a worker ({error}).\n"
                    "  Leave out what is tied to this process (locks, open files), or use the executor InProcess."
                ) from error
            with one_thread():  # who waits only copies and adds: threads would spin for it while workers need the cores
                yield _RaySession(ray, given, max(1, int(ray.cluster_resources().get("CPU", 1))))

    # --- cells of an audit

    def outcomes(self, jobs: Sequence[Job], work: Work[Job]) -> Iterator[tuple[int, Outcome]]:
        """How each job went, as they end; what they found is stored by then."""
        with self.connected() as ray:
            yield from _outcomes(ray, jobs, work, self.workers)


def _imported(own: bool) -> Any:
    """Ray, with its settings made before it reads them."""
    for name, value in (_QUIET | (_LOOPBACK if own else {})).items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"The executor 'ray' needs Ray, which cannot be imported ({error}).\n  pip install 'recleak[ray]'"
        ) from error


@dataclass
class _RaySession:
    ray: Any
    given: list[Any]  # references of home and the assignment
    width: int

    def map(self, received: Params, works: Iterable[Chunk]) -> Generator[Trained, None, None]:
        require_cpu(received)
        broadcast = self.ray.put({name: tensor.contiguous().numpy() for name, tensor in received.items()})
        do = self.ray.remote(max_retries=RETRIES)(_chunk)
        waiting: deque[Any] = deque()
        try:
            for work in works:
                # references in a list arrive as references: a worker gets what it does not have yet
                waiting.append(do.remote([*self.given, broadcast], work.round, arrays_of(work.kept)))
                if len(waiting) >= 2 * self.width:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for left in waiting:
                self.ray.cancel(left)

    def _result(self, reference: Any) -> Trained:
        with _told(self.ray, "a chunk of clients"):
            return trained_of(self.ray.get(reference))


@contextmanager
def _told(ray: Any, what: str) -> Iterator[None]:
    """Errors of ours as they were raised; those of Ray in our words, with what it says."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RecleakError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{lines[0] if lines else 'it does not say why':.300}"
        remedy = "Check that the cluster runs and its machines reach each other, then run the same command again."
        if isinstance(error, ray.exceptions.WorkerCrashedError):
            why = f"its workers died {RETRIES + 1} times"
        if isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError):
            remedy = "If memory ran out, use smaller chunks, fewer CPUs or larger machines."
        raise RecleakError(f"Ray gave up on {what} ({type(error).__name__}): {why.rstrip('.')}.\n  {remedy}") from error


def _outcomes(ray: Any, jobs: Sequence[Job], work: Work[Job], workers: int | None) -> Iterator[tuple[int, Outcome]]:
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    counts = [int(each.get("CPU", 0)) for each in resources]
    side_by_side = max(1, sum(counts) if workers is None else workers)
    threads = max(1, min(max(counts), sum(counts) // side_by_side))  # no machine has more for one cell
    do = ray.remote(max_retries=RETRIES, num_cpus=threads)(_cell)
    common = [ray.put(away.home()), ray.put(work)]
    data = {each: ray.put(loaded(each)) for each in dict.fromkeys(away.data_of(job) for job in jobs)}
    going: dict[Any, tuple[int, float]] = {}
    waiting = deque(enumerate(jobs))
    try:
        while waiting or going:
            while waiting and len(going) < side_by_side:
                place, job = waiting.popleft()
                reference = do.remote(common, away.errand(job), data[away.data_of(job)], threads)
                going[reference] = place, time.perf_counter()
            (ready,), _ = ray.wait(list(going), num_returns=1)
            place, since = going.pop(ready)
            try:
                with _told(ray, "a cell"):
                    outcome, files = ray.get(ready)
                away.bring(jobs[place], files)
            except RecleakError as error:
                outcome = Outcome(0.0, (str(error),))
            yield place, replace(outcome, seconds=time.perf_counter() - since)
    finally:
        for left in going:
            ray.cancel(left)


# --- in a worker ------------------------------------------------------------------------------------------------------

_held: dict[str, tuple[str, Any]] = {}  # what this process was sent last, of each kind
_threads = 0


def _chunk(references: Sequence[Any], round: int, kept: Arrays) -> Result:
    """Train one chunk."""
    _use(1)
    home, given, broadcast = references
    _last("home", home, _settled)  # first: it says where the rest is imported from
    assignment: Assignment = _last("assignment", given, lambda found: found)
    received: Params = _last("broadcast", broadcast, _tensors)
    return assignment.result(received, round, kept)


def _settled(home: Home) -> None:
    home.require_same()


def _tensors(arrays: Mapping[str, Any]) -> Params:
    return {name: torch.tensor(array) for name, array in arrays.items()}  # copies, with torch's own alignment


def _last(kind: str, reference: Any, made: Callable[[Any], Any]) -> Any:
    key, ray = reference.hex(), import_module("ray")
    if _held.get(kind, ("", None))[0] != key:
        _held.pop(kind, None)  # first, so that there are never two
        try:
            found = ray.get(reference)
        except ray.exceptions.RaySystemError as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise ConfigError(
                f"A worker cannot open the {kind} that it was sent ({reason}).\n"
                "  Put modules of your own on every machine, where Python finds them."
            ) from error
        _held[kind] = key, made(found)
    return _held[kind][1]


def _cell(
    references: Sequence[Any], errand: Errand, data: Interactions, threads: int
) -> tuple[Outcome, dict[str, bytes]]:
    """Measure one cell."""
    _use(threads)
    home, given = references
    _last("home", home, _settled)
    work: Work[Job] = _last("work", given, lambda found: found)
    return away.run(errand, data, work, threads)


def _use(threads: int) -> None:
    """So many threads from now on, whatever the machine has: its other cores belong to other workers."""
    global _threads
    if threads != _threads:
        torch.set_num_threads(threads)
        threadpool_limits(threads)  # for good: nothing undoes it
        use_at_most(threads)
        _threads = threads
