"""A federated round of Fed-NCF under DP-SGD on the real ML-100K: the compiled loop, the general way, and the noise.

`python benchmarks/dp_sgd.py` prints the table and writes `benchmarks/out/dp_sgd.json`. 9 clients per round,
leave-one-out by time, 4 negatives per positive, NCF 64-d (128-64-32-1), 20 local epochs, batch 64, a fresh Adam, one
thread; planning and aggregation included. Every number of a client's item table and head gets noise at every step: to
draw these numbers and add them, and no more, is the floor. "Sums only" is what a visit does where another hook works on
gradients: the sum of clipped gradients is compiled, the steps are not. The general way, measured once, differentiates
for every example. Seconds are of the process's own CPU time, for one round: the time of three rounds minus that of one,
halved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from recleak import draws
from recleak.accounting import participations
from recleak.data import catalog
from recleak.data.interactions import Interactions
from recleak.data.source import open_data
from recleak.data.split import leave_one_out
from recleak.defenses.dp_sgd import DPSGD
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.training import per_example, visit
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.local import Examples, steps_per_epoch
from recleak.training.optimizers import Adam

OUT = Path(__file__).parent / "out" / "dp_sgd.json"
LOCAL = LocalTraining(epochs=20, batch_size=64, optimizer=Adam(), negatives=4)
MODEL, DEFENSE = NCF(64), DPSGD(1.0)


def nothing_fits(*_: object) -> None:
    """In the place of a compiled loop: the general way is left."""


@contextmanager
def without(*loops: tuple[object, str]) -> Iterator[None]:
    """Some compiled loops do not fit."""
    if not loops:
        yield
        return
    with patch.object(*loops[0], nothing_fits), without(*loops[1:]):
        yield


def protocol(rounds: int) -> Federated:
    """So many rounds of 9 clients."""
    return Federated(rounds=rounds, clients_per_round=9, local=LOCAL)


def cost(train: Interactions, rounds: int) -> float:
    """CPU seconds of so many rounds."""
    start = process_time()
    train_federated(protocol(rounds), MODEL, train, defense=DEFENSE, executor=InProcess(1), show_progress=False)
    return process_time() - start


def round_of(train: Interactions) -> float:
    """CPU seconds of a round, the mean of the second and third."""
    return (cost(train, 3) - cost(train, 1)) / 2


def client_steps(train: Interactions) -> int:
    """Of a round, likewise."""
    visits = participations(protocol(3), train) - participations(protocol(1), train)  # i64[U]
    steps = LOCAL.epochs * steps_per_epoch(LOCAL.batch_size, Examples.of(train, negatives=LOCAL.negatives).count)
    return round(float((visits * steps).sum()) / 2)


def drawing(n_items: int, steps: int) -> float:
    """CPU seconds of adding noise to all numbers of a client, so many times."""
    shapes = [(n_items if p.storage == "per_item" else 1, int(np.prod(p.shape))) for p in MODEL.components()]
    sums = [np.zeros(shape, np.float32) for shape in shapes]
    key, state = np.array([1], np.uint64), draws.start("noise")
    places = [(np.zeros(rows, np.int64), np.arange(rows)) for rows, _ in shapes]
    start = process_time()
    for _ in range(steps):
        for each, (client, item) in zip(sums, places, strict=True):
            draws.add(draws.NORMAL, np.float32(2.0), state, key, client, item, each)
    return process_time() - start


def main() -> None:
    """Measure, print, write."""
    if catalog.locate("ml-100k") is None:
        print("ml-100k is not here (set RECLEAK_DATA): left out")
        return
    train = leave_one_out(open_data("ml-100k", "imia"), by="time", seed=0).train
    cost(train, 1)  # compiles
    compiled, steps = min(round_of(train) for _ in range(3)), client_steps(train)
    drawing(train.n_items, 1)
    floor = min(drawing(train.n_items, steps) for _ in range(3))
    loop, sums = (visit, "walk_clipped"), (per_example, "sum_of_clipped")
    with without(loop):
        cost(train, 1)  # compiles
        stepwise = round_of(train)
    with without(loop, sums):
        general = round_of(train)
    found = {"noise alone": floor, "compiled": compiled, "sums only": stepwise, "general": general}
    table = Table("", "CPU s", "x noise", "ms per client-step", title=f"A round of {steps:,} client-steps, one thread")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / floor:.2f}", f"{1000 * seconds / steps:.3f}")
    Console().print(table)
    print(f"{general / compiled:.1f} times the general way; load {os.getloadavg()[0]:.1f}")
    OUT.parent.mkdir(exist_ok=True)
    result = {"cores": os.cpu_count(), "load": os.getloadavg(), "client_steps": steps, "seconds": found}
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
