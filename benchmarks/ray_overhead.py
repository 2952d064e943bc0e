"""What Ray adds to a round on one machine: CPU seconds by process, message sizes, the cost of a chunk for who waits.

`python benchmarks/ray_overhead.py` prints the table and writes `benchmarks/out/ray_overhead.json`. One round with all
943 clients of ML-100K, leave-one-out, 4 negatives per positive, NCF 64-d (128-64-32-1), Adam, batch 64, 20 local
epochs, chunks of 32; on the embedded data where ML-100K is not. CPU time, because a shared machine's clock says little;
the whole round counts (planning, training, uploads, aggregation), without reading the data.

The server's part of a round (uploads, sums, what clients keep) is the cost of the same round with results that are
there already. `waiting` is what Ray uses by the second while nothing happens, which counts where a machine is slow; it
is subtracted. `echo` are tasks that return what they get: what messages cost apart from all else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from recleak.data import catalog
from recleak.data.interactions import Interactions
from recleak.data.source import open_data
from recleak.data.split import leave_one_out
from recleak.deploy.ray import RayCluster
from recleak.models.base import Params
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.training.chunks import cores
from recleak.training.cohort import LocalTraining, Trained
from recleak.training.executor import Assignment, Executor, InProcess, Session, Work
from recleak.update import Update

OUT = Path(__file__).parent / "out" / "ray_overhead.json"
MODEL, LOCAL = NCF(), LocalTraining(epochs=20, batch_size=64)
SIZES = (0, 1_000_000, 8_000_000)  # bytes of an echo
ECHOES = 40


class Counted:
    """Threads of this process; counts the chunks and the bytes of their arrays, and keeps the results for `again`."""

    def __init__(self) -> None:
        self.results: list[Trained] = []
        self.out = self.back = 0
        self.again = False

    @contextmanager
    def open(self, assignment: Assignment) -> Iterator[Session]:
        """A session of one thread."""
        with InProcess(1).open(assignment) as session:
            yield _CountedSession(self, session)


@dataclass
class _CountedSession:
    counts: Counted
    inner: Session
    width: int = 1

    def map(self, received: Params, works: Iterable[Work]) -> Generator[Trained, None, None]:
        if self.counts.again:
            for result, _ in zip(self.counts.results, works, strict=True):
                yield result
            return
        for result in self.inner.map(received, self.seen(works)):
            self.counts.results.append(result)
            self.counts.back += _nbytes(result.update) + _nbytes(result.kept)
            yield result

    def seen(self, works: Iterable[Work]) -> Iterator[Work]:
        """The same, counted."""
        for work in works:
            self.counts.out += _nbytes(work.kept)
            yield work


def _nbytes(update: Update) -> int:
    tensors = [*update.values.values(), *update.rows.values(), update.client, update.item, update.offset]
    return sum(each.numel() * each.element_size() for each in tensors)


def round_of(data: Interactions, executor: Executor, rounds: int = 1, clients: int | None = None) -> None:
    """So many rounds with everybody, or with some."""
    protocol = Federated(rounds=rounds, clients_per_round=clients, local=LOCAL)
    train_federated(protocol, MODEL, data, executor=executor, show_progress=False)


def used(below: Callable[[], dict[str, float]]) -> dict[str, float]:
    """CPU seconds so far: this process, Ray's workers, Ray's other processes; and the clock."""
    return {"here": process_time(), "clock": perf_counter(), **below()}


def below() -> dict[str, float]:
    """CPU seconds of all processes that this one has started, Ray's."""
    import psutil  # type: ignore[import-untyped, import-not-found, unused-ignore]  # Ray brings it

    found = {"workers": 0.0, "ray": 0.0}
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        found["workers" if process.cmdline()[0].startswith("ray::") else "ray"] += times.user + times.system
    return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was used in between."""
    return {name: after[name] - before[name] for name in after}


def echoes(ray: Any, size: int) -> dict[str, float]:
    """CPU seconds of one task that is sent so many bytes and sends them back."""

    @ray.remote  # type: ignore[untyped-decorator, unused-ignore]
    def echo(array: Any) -> Any:
        return np.array(array)  # a new one, as a result is

    array = np.zeros(size, np.uint8)
    ray.get([echo.remote(array) for _ in range(4)])
    before, waiting = used(below), []
    for _ in range(ECHOES):
        waiting.append(echo.remote(array))
        if len(waiting) >= 2 * cores():
            np.array(ray.get(waiting.pop(0)))
    for each in waiting:
        np.array(ray.get(each))
    return {name: value / ECHOES for name, value in difference(before, used(below)).items()}


def waiting(ray: Any, seconds: float = 8.0) -> dict[str, float]:
    """CPU seconds by second of waiting for a task that does nothing."""

    @ray.remote  # type: ignore[untyped-decorator, unused-ignore]
    def rest() -> None:
        sleep(seconds)

    before = used(below)
    ray.get(rest.remote())
    spent = difference(before, used(below))
    return {name: value / spent["clock"] for name, value in spent.items() if name != "clock"}


def main() -> None:
    """Here, then on Ray."""
    name = "ml-100k" if catalog.locate("ml-100k") is not None else "synthetic"
    data = leave_one_out(open_data(name)).train
    round_of(data, InProcess(1), clients=64)  # compiles
    begin = process_time()
    round_of(data, InProcess(1), rounds=0)
    setup = process_time() - begin
    counted = Counted()
    start, begin = perf_counter(), process_time()
    round_of(data, counted)
    local = {"here": process_time() - begin - setup, "clock": perf_counter() - start}
    counted.again, begin = True, process_time()
    round_of(data, counted)
    server = process_time() - begin - setup
    with RayCluster(store_bytes=1_000_000_000).connected() as ray:
        round_of(data, RayCluster(), clients=128)  # workers start
        before = used(below)
        round_of(data, RayCluster())
        there = difference(before, used(below))
        there["here"] -= setup
        idle = waiting(ray)
        begin = perf_counter()
        ray.put(data)
        put = perf_counter() - begin
        sent = {size: echoes(ray, size) for size in SIZES}
    busy = {name: there[name] - idle[name] * there["clock"] for name in idle}
    chunks, clients = len(counted.results), int((data.activity > 0).sum())
    result = {
        "data": name,
        "cores": cores(),
        "clients": clients,
        "chunks": chunks,
        "kilobytes_out_per_client": counted.out / clients / 1e3,
        "kilobytes_back_per_client": counted.back / clients / 1e3,
        "megabytes_back_per_chunk": counted.back / chunks / 1e6,
        "cpu_seconds_here_alone": local,
        "cpu_seconds_of_the_server": server,
        "cpu_seconds_with_ray": there,
        "cpu_seconds_by_second_of_waiting": idle,
        "cpu_seconds_without_waiting": busy,
        "overhead": sum(busy.values()) / local["here"] - 1,
        "ms_of_the_driver_per_chunk": 1e3 * busy["here"] / chunks,
        "ms_of_the_driver_per_client": 1e3 * busy["here"] / clients,
        "ms_of_the_server_per_client": 1e3 * server / clients,
        "ms_of_a_worker_per_client": 1e3 * busy["workers"] / clients,
        "seconds_to_put_the_data": put,
        "echo_cpu_ms": {str(size): {key: 1e3 * value for key, value in each.items()} for size, each in sent.items()},
    }
    table = Table(
        "CPU s", "this process", "workers", "Ray's own", "in all", title=f"One round, {clients} clients, {name}"
    )
    table.add_row("in this process", f"{local['here']:.2f}", "", "", f"{local['here']:.2f}")
    table.add_row("of it the server's part", f"{server:.2f}", "", "", f"{server:.2f}")
    for row, spent in (("on Ray", there), ("without waiting", busy)):
        values = [spent[key] for key in ("here", "workers", "ray")]
        table.add_row(row, *(f"{value:.2f}" for value in (*values, sum(values))))
    Console().print(table)
    for size, each in sent.items():
        print(f"echo of {size / 1e6:g} MB: {1e3 * each['here']:.2f} ms here, {1e3 * each['workers']:.2f} ms in workers")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
