"""A federation and two gossips of all 943 users of ML-100K, with every user as an adversary in every round.

`python benchmarks/gossip.py [ROUNDS]` trains GMF for so many rounds each (200), scores every received model on the
items of every adversary (CDA, eq. 10), grades it, prints the time and a table and writes `benchmarks/out/gossip.json`.
For the compiled loops against the general way, a round of each is also measured without them, in the process's CPU
time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from time import perf_counter, process_time
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from recleak.data import catalog
from recleak.papers import cda
from recleak.protocols import ticks
from recleak.training import cohort

OUT = Path(__file__).parent / "out" / "gossip.json"
KINDS = {"fl": "federation", "rand": "Rand-Gossip", "pers": "Pers-Gossip"}


def measured(kind: str, rounds: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and the accuracy in the best round."""
    run: dict[str, str | int | float | bool] = {
        "data": "ml-100k",
        "model": "gmf",
        "protocol": kind,
        "sharing": "full",
        "rounds": rounds,
    }
    start, busy = perf_counter(), process_time()
    threads = len(os.sched_getaffinity(0))
    (found,) = cda.measure(run, [{"attack": "cda"}], variant="as-written", seed=0, threads=threads)
    return perf_counter() - start, process_time() - busy, float(found.metrics["max-aac"].mean())


def per_round(kind: str) -> float:
    """CPU seconds of a round: three minus one, halved."""
    return (measured(kind, 3)[1] - measured(kind, 1)[1]) / 2


def main() -> None:
    """Measure, print, write."""
    if catalog.locate("ml-100k") is None:
        print("ml-100k is not here (set RECLEAK_DATA): left out")
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    table = Table(title=f"GMF on ML-100K, {rounds} rounds, 943 adversaries in each")
    for heading in ("", "seconds", "CPU s", "best accuracy", "a round, CPU s", "the general way, CPU s"):
        table.add_column(heading, justify="left" if not heading else "right")
    load, all_of = os.getloadavg()[0], {kind: measured(kind, rounds) for kind in KINDS}
    total, peak = sum(each[0] for each in all_of.values()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console = Console()
    console.print(f"In all {total:.0f} s, peak memory {peak:.2f} GiB, load before {load:.1f}")
    rows = []
    for kind, name in KINDS.items():
        seconds, busy, accuracy = all_of[kind]
        fast = per_round(kind)
        with patch.object(cohort, "fits", lambda *_: False), patch.object(ticks, "direct", lambda *_: False):
            slow = per_round(kind)
        rows.append({"kind": kind, "seconds": seconds, "cpu": busy, "round": fast, "general": slow})
        table.add_row(name, f"{seconds:.0f}", f"{busy:.0f}", f"{accuracy:.3f}", f"{fast:.2f}", f"{slow:.2f}")
    console.print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"rounds": rounds, "rows": rows, "peak GiB": peak}, indent=1) + "\n")


if __name__ == "__main__":
    main()
