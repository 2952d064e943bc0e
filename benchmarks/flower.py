"""Flower's own simulator (its ray backend) against ours on the same work: one round of Fed-NCF with 943 clients.

`python benchmarks/flower.py [CLIENTS]` trains every user of the embedded data (of ML-100K's size) for one round, once
with a virtual SuperNode for each user and once as one cohort, checks that both give the same parameters, prints the
seconds of the round, their ratio and the load of the machine, and writes `benchmarks/out/flower.json`. Each client
trains with the same engine on both sides; the ratio is what a message and a job for each client cost. Flower starts ray
and its workers within the round: what that takes, measured with as many clients as there are workers, is taken off.
"""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import json
import sys
from functools import lru_cache
from pathlib import Path
from time import perf_counter

import torch
from flwr.app import ConfigRecordValues, Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from rich.console import Console
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.deploy.flower import Cohort, Federation, client_app
from recleak.machine import cores
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam

OUT = Path(__file__).parent / "out" / "flower.json"
MODEL = NCF(factors=64, hidden=(128, 64, 32))
PROTOCOL = Federated(rounds=1, local=LocalTraining(epochs=1, batch_size=64, optimizer=Adam(0.001)))
USERS, ITEMS, SEED = 943, 1682, 0


@lru_cache(maxsize=1)
def data() -> Interactions:
    """Once in each process."""
    return Synthetic(n_users=USERS, n_items=ITEMS).generate()


def cohort(context: Context) -> Cohort:
    """The user of a virtual SuperNode: its row range, so that nobody searches through all rows."""
    user, whole = int(context.node_config["partition-id"]), data()
    begin, end = (int(each) for each in whole.indptr[user : user + 2])
    return Cohort(Interactions(whole.rows[begin:end], whole.users, whole.items))


def flower(clients: int) -> tuple[float, dict[str, Tensor]]:
    """Seconds of the round, the start of ray's workers included, and the parameters."""
    server, seen = ServerApp(), dict[str, Tensor]()
    seconds = [0.0]

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        federation = Federation(MODEL, PROTOCOL, n_users=USERS, n_items=ITEMS, min_nodes=clients, seed=SEED)
        arrays = federation.first_arrays()
        start = perf_counter()
        result = federation.start(grid, arrays, num_rounds=1)
        seconds[0] = perf_counter() - start
        seen.update(federation.params(result.arrays))

    backend: dict[str, dict[str, ConfigRecordValues]] = {
        "init_args": {
            "address": "local",  # one of its own, whatever else runs here
            "num_cpus": cores(),
            "include_dashboard": False,
            "log_to_driver": False,
            "_node_ip_address": "127.0.0.1",
        },
        "client_resources": {"num_cpus": 1},
    }
    run_simulation(server, client_app(MODEL, PROTOCOL, cohort, seed=SEED), clients, backend_config=backend)
    return seconds[0], seen


def ours(clients: int) -> tuple[float, dict[str, Tensor]]:
    """The same for the simulator here, after a round that compiles its loops."""
    some = data().take(data().user < clients)
    train_federated(PROTOCOL, MODEL, some.take(some.user < 4), seed=1, show_progress=False)
    start = perf_counter()
    trained = train_federated(PROTOCOL, MODEL, some, seed=SEED, show_progress=False)
    return perf_counter() - start, trained.params


def main() -> None:
    """Measure, compare, print, write."""
    clients = int(sys.argv[1]) if len(sys.argv) > 1 else USERS
    load = os.getloadavg()[0]
    fast, expected = ours(clients)
    start, _ = flower(cores())
    whole, found = flower(clients)
    slow = whole - start
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    console = Console()
    console.print(f"Fed-NCF, {clients} clients, one round, {cores()} cores, load before {load:.1f}")
    console.print(f"Flower's simulator (ray): {slow:.1f} s ({whole:.1f} s with the {start:.1f} s in which it starts)")
    console.print(f"recleak: {fast:.2f} s; the same parameters")
    console.print(f"Ratio: {slow / fast:.0f}")
    OUT.parent.mkdir(exist_ok=True)
    numbers = {"clients": clients, "flower": slow, "flower with start": whole, "recleak": fast, "ratio": slow / fast}
    OUT.write_text(json.dumps({**numbers, "load": load}, indent=1) + "\n")


if __name__ == "__main__":
    from flower import main as measured  # by name: what is in __main__ ray would send anew with every client

    measured()
