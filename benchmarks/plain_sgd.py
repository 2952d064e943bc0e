"""A federated round under plain SGD on the real ML-100K: the compiled loops against the general way, in one run.

`python benchmarks/plain_sgd.py` prints the table and writes `benchmarks/out/plain_sgd.json`. 471 clients (half of them)
per round, leave-one-out by time, 4 negatives per positive, 64 factors, 5 local epochs, batch 32, one thread; planning
and aggregation included. The general way, measured once, is what a visit does where no loop fits. Seconds are of the
process's own CPU time, for one round: the time of three rounds minus that of one, halved.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from time import process_time
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from recleak.data import catalog
from recleak.data.features import user_features
from recleak.data.source import open_data
from recleak.data.split import leave_one_out
from recleak.defenses.base import Defense
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.defenses.objective_perturbation import ObjectivePerturbation
from recleak.models.base import Model
from recleak.models.components import FanIn
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.training import visit
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.optimizers import SGD

OUT = Path(__file__).parent / "out" / "plain_sgd.json"
LOCAL = LocalTraining(epochs=5, batch_size=32, optimizer=SGD(0.032), negatives=4)


def nothing_fits(_: object) -> None:
    """In the place of a compiled loop: the general way is left."""


def main() -> None:
    """Measure, print, write."""
    if catalog.locate("ml-100k") is None:
        print("ml-100k is not here (set RECLEAK_DATA): left out")
        return
    train = leave_one_out(open_data("ml-100k", "apm"), by="time", seed=0).train
    features = user_features(train).values
    graph = FeatureGCN(features.shape[1], dense_init=FanIn(), bounded=True)
    taylor = replace(LOCAL, loss="taylor")
    cases: dict[str, tuple[Model, LocalTraining, Defense]] = {
        "MF": (MF(64), LOCAL, Defense()),
        "MF, objective perturbation": (MF(64), LOCAL, ObjectivePerturbation(0.4, len(train))),
        "NCF": (NCF(64), LOCAL, Defense()),
        "LightGCN": (LightGCN(64), LOCAL, Defense()),
        "FeatureGCN, functional mechanism": (graph, taylor, FunctionalMechanism(0.4, len(train))),
    }

    def cost(model: Model, local: LocalTraining, defense: Defense, rounds: int) -> float:
        protocol = Federated(rounds=rounds, clients_per_round=471, local=local)
        given = features if model.needs_user_features else None
        start = process_time()
        train_federated(
            protocol, model, train, defense=defense, user_features=given, executor=InProcess(1), show_progress=False
        )
        return process_time() - start

    found = {}
    for name, case in cases.items():
        cost(*case, 1)  # compiles
        compiled = min((cost(*case, 3) - cost(*case, 1)) / 2 for _ in range(2))
        with patch.object(visit, "walk_sgd", nothing_fits), patch.object(visit, "walk_epochs", nothing_fits):
            general = (cost(*case, 3) - cost(*case, 1)) / 2
        found[name] = {"compiled": compiled, "general": general, "speedup": general / compiled}
    table = Table("", "compiled", "general", "x general", title="CPU seconds per round, one thread")
    for name, each in found.items():
        table.add_row(name, f"{each['compiled']:.2f}", f"{each['general']:.1f}", f"{each['speedup']:.1f}")
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "seconds": found}, indent=2) + "\n")
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
