"""A round of APM's federated recommender on the real ML-100K: the compiled loop, the general way, and the GEMM limit.

`python benchmarks/feature_gcn.py` prints the table and writes `benchmarks/out/feature_gcn.json`. 471 clients (half of
them) per round, leave-one-out by time, 4 negatives per positive, 64 factors, 5 local epochs, batch 32, SGD, one thread;
planning and aggregation included. The general way, measured once, trains a subclass of the model, of which the loop
knows nothing. All figures come from one run; otherwise the best of several counts. Times are the process's own CPU time
(about what an idle core gives) and the wall clock's (what this run really took):

- `speedup`: CPU time per client-step of the general way over the compiled loop;
- `gemm_share`: the rate at which the round does the operations that one client-step needs, over the rate of a large
  matrix product on one thread.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recleak import kernels_gcn
from recleak.data import catalog
from recleak.data.features import user_features
from recleak.data.interactions import Interactions
from recleak.data.source import open_data
from recleak.data.split import leave_one_out
from recleak.models.components import Normal
from recleak.models.feature_gcn import FeatureGCN
from recleak.protocols.federated import Federated, train_federated
from recleak.testing.models import Wiretap
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.local import Examples, steps_per_epoch
from recleak.training.optimizers import SGD
from recleak.wire import Upload

OUT = Path(__file__).parent / "out" / "feature_gcn.json"
CLIENTS, BATCH, EPOCHS, REPEATS = 471, 32, 5, 3


@dataclass(frozen=True)
class General(FeatureGCN):
    """The same model, of which the compiled loop knows nothing."""


@dataclass(frozen=True)
class Cost:
    """What some client-steps took."""

    steps: int
    cpu: float  # seconds, as the next
    wall: float


def operations(model: FeatureGCN) -> int:
    """Multiplications and additions of one client-step: forward once, backward twice; the user's part once a batch."""
    d, widths = model.factors, (model.factors, *model.hidden, 1)
    user = d * (model.n_features + 2 * d + model.hidden[0])
    return 3 * 2 * (BATCH * sum(a * b for a, b in pairwise(widths)) + user)


def gemm_rate(n: int = 1024) -> float:
    """Operations per second of CPU time of a large product on one thread, the best of many."""
    torch.set_num_threads(1)
    a, b = torch.randn(n, n), torch.randn(n, n)
    best = float("inf")
    for _ in range(12):
        start = process_time()
        torch.mm(a, b)
        best = min(best, process_time() - start)
    return 2 * n**3 / best


def one_round(train: Interactions, features: Tensor, model: FeatureGCN, epochs: int) -> Cost:
    """One federated round on one thread."""
    examples, tap = Examples.of(train), Wiretap()
    local = LocalTraining(epochs=epochs, batch_size=BATCH, optimizer=SGD(0.001))
    protocol = Federated(rounds=1, clients_per_round=CLIENTS, local=local)
    cpu, wall = process_time(), perf_counter()
    train_federated(
        protocol, model, train, user_features=features, taps=(tap,), executor=InProcess(1), show_progress=False
    )
    cpu, wall = process_time() - cpu, perf_counter() - wall
    count = steps_per_epoch(BATCH, examples.count) * epochs
    client = torch.cat([message.update.client for message in tap.messages if isinstance(message, Upload)])
    return Cost(int(count[client.numpy()].sum()), cpu, wall)


def main() -> None:
    """Measure, print, write."""
    if catalog.locate("ml-100k") is None:
        print("ml-100k is not here (set RECLEAK_DATA): left out")
        return
    train = leave_one_out(open_data("ml-100k", "apm"), by="time", seed=0).train
    features = user_features(train).values
    known, unknown = (kind(features.shape[1], dense_init=Normal(0.1)) for kind in (FeatureGCN, General))
    one_round(train, features, known, 1)  # compiles
    inside = [0.0]  # CPU seconds in the compiled loop
    loop = kernels_gcn.feature_gcn_epochs

    def timed(*arguments: object) -> None:
        start = process_time()
        loop(*arguments)
        inside[0] += process_time() - start

    kernels_gcn.feature_gcn_epochs = timed
    costs: dict[str, list[Cost]] = {"loop alone": [], "compiled": [], "general": []}
    rates = []
    for repeat in range(REPEATS):
        rates.append(gemm_rate())
        inside[0] = 0.0
        costs["compiled"].append(one_round(train, features, known, EPOCHS))
        costs["loop alone"].append(Cost(costs["compiled"][-1].steps, inside[0], costs["compiled"][-1].wall))
        if repeat == 1:
            costs["general"].append(one_round(train, features, unknown, EPOCHS))
    best = {name: min(each, key=lambda cost: cost.cpu / cost.steps) for name, each in costs.items()}
    per_step, gemm = {name: cost.cpu / cost.steps for name, cost in best.items()}, max(rates)
    limit = operations(known) / gemm
    result = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "client_steps_per_round": best["compiled"].steps,
        "operations_per_client_step": operations(known),
        "gemm_gflops": gemm / 1e9,
        "cpu_ms_per_client_step": {name: 1e3 * each for name, each in per_step.items()},
        "wall_ms_per_client_step": {
            name: 1e3 * min(cost.wall / cost.steps for cost in costs[name]) for name in ("compiled", "general")
        },
        "cpu_seconds_per_round": {name: each * best["compiled"].steps for name, each in per_step.items()},
        "speedup": per_step["general"] / per_step["compiled"],
        "gemm_share": limit / per_step["compiled"],
        "gemm_share_of_loop": limit / per_step["loop alone"],
    }
    table = Table(
        "way", "CPU ms per step", "CPU s per round", "x general", "of limit", title="Client-steps, one thread"
    )
    for name, each in {**per_step, f"GEMM, {gemm / 1e9:.0f} GFLOPS": limit}.items():
        seconds = each * best["compiled"].steps
        table.add_row(
            name, f"{1e3 * each:.4f}", f"{seconds:.2f}", f"{per_step['general'] / each:.1f}", f"{limit / each:.2f}"
        )
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"speedup {result['speedup']:.1f}, gemm_share {result['gemm_share']:.2f}, load {os.getloadavg()[0]:.1f}")
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
