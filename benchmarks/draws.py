"""Noise for every coordinate of every upload: the compiled draws beside numpy and scipy passes and plain generators.

`python benchmarks/draws.py` prints the table and writes `benchmarks/out/draws.json`. 471 clients (half of ML-100K),
1,682 items, 64 factors: 51 million numbers, drawn client by client, on one thread (the slow way for 24 clients only).
All figures come from one run; ways alternate, and the best of each counts. Rates are per second of the thread's own CPU
time (about what an idle core gives) and per second of the wall clock (what this run really took):

- `passes`: the hash of `random.bits` and scipy's quantile, one numpy pass after the other over blocks of 2^18;
- `compiled`: `Streams.laplace` and `Streams.normal`;
- `drawn, added`: the same, times a scale, added by torch to an array that is there;
- `added`: `Streams.add_laplace` and `Streams.add_normal`: the same sum in one pass;
- `generator`: numpy's generator (PCG64), which is not keyed: a yardstick, not a way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import special
from torch import Tensor

from recleak import random
from recleak.streams import Streams

OUT = Path(__file__).parent / "out" / "draws.json"
CLIENTS, ITEMS, FACTORS = 471, 1_682, 64
REPEATS, BLOCK, SAMPLE = 5, 1 << 18, 24
Numbers = NDArray[np.float64]


def laplace_quantile(u: Numbers) -> Numbers:
    """By scipy's log1p."""
    t = 2 * u - 1
    quantile: Numbers = -np.sign(t) * special.log1p(-np.abs(t))
    return quantile


def passes(kind: str, streams: Streams) -> int:
    """Hash and quantile in numpy passes; the count of numbers."""
    assert streams.key is not None
    quantile = laplace_quantile if kind == "laplace" else special.ndtri
    item, step = np.arange(ITEMS), BLOCK // FACTORS
    for client in range(SAMPLE):
        drawn = np.empty((ITEMS, FACTORS), np.float32)
        for begin in range(0, ITEMS, step):
            part = item[begin : begin + step, None]
            bits = random.bits(0, repr(("noise", kind)), streams.key[client], part, np.arange(FACTORS))
            u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
            drawn[begin : begin + step] = quantile(u)
    return SAMPLE * ITEMS * FACTORS


def client_by_client(work: Callable[[Tensor], object]) -> int:
    """Do something for every client; the count of numbers."""
    for client in range(CLIENTS):
        work(torch.full((ITEMS,), client))
    return CLIENTS * ITEMS * FACTORS


def rates(work: Callable[[], int]) -> NDArray[np.float64]:
    """Numbers per second of CPU time and of the wall clock."""
    cpu, wall = thread_time(), perf_counter()
    count = work()
    return count / np.array([thread_time() - cpu, perf_counter() - wall])


def ways(kind: str) -> dict[str, Callable[[], int]]:
    """Each way of drawing."""
    streams = Streams.simulated(0, 0, np.arange(CLIENTS))
    row, upload = torch.arange(ITEMS), torch.zeros(ITEMS, FACTORS)
    draw, add = getattr(streams, kind), getattr(streams, f"add_{kind}")
    generator = np.random.default_rng(0)
    plain = generator.laplace if kind == "laplace" else generator.normal

    def draw_and_add(position: Tensor) -> None:
        upload.add_(0.1 * draw("noise", position, row, (FACTORS,)))

    return {
        "passes": lambda: passes(kind, streams),
        "compiled": lambda: client_by_client(lambda position: draw("noise", position, row, (FACTORS,))),
        "drawn, added": lambda: client_by_client(draw_and_add),
        "added": lambda: client_by_client(lambda position: add(upload, 0.1, "noise", position, row)),
        "generator": lambda: client_by_client(lambda _: plain(size=(ITEMS, FACTORS)).astype(np.float32)),
    }


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    result: dict[str, object] = {"load_before": load, "cores": os.cpu_count()}
    table = Table("law", "way", "million / s of CPU", "million / s of wall", "x passes", title="Draws, one thread")
    for kind in ("laplace", "normal"):
        todo = ways(kind)
        for name in ("compiled", "added"):
            todo[name]()  # compiles
        measured = [{name: rates(work) for name, work in todo.items()} for _ in range(REPEATS)]
        best = {name: np.max([each[name] for each in measured], axis=0) for name in todo}
        for name, rate in best.items():
            cpu, wall = rate / 1e6
            table.add_row(kind, name, f"{cpu:,.0f}", f"{wall:,.0f}", f"{rate[0] / best['passes'][0]:.1f}")
        result[kind] = {name: {"cpu": rate[0], "wall": rate[1]} for name, rate in best.items()}
    Console().print(table)
    print(f"Load of the machine before: {load:.1f} on {os.cpu_count()} cores")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
