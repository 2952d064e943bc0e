"""Learning rates for PARD's tables, chosen on validation items: ML-100K, seed 0, the same grid for each model.

`python benchmarks/pard_rates.py` trains each model of the grid for at most 100 rounds and prints Recall@10 + Recall@20
of validation items after every 10, and its best value; test items are not looked at. Methods that train the same model
(FedAvg, Early-stop, APM, UC-FedRec) have its rate. `--only fedncf/pard` takes a part, `--items 1000 3000` other rates.
What it said is in the head of `recleak/papers/pard.py`. It takes about an hour of CPU time.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import process_time

from recleak.papers import pard
from recleak.protocols.federated import BLOCK, Federated, FederatedModel, train_federated
from recleak.protocols.stopping import Plateau, Stopping
from recleak.training.cohort import DivergedError
from recleak.training.executor import InProcess
from recleak.training.optimizers import SGD

OUT = Path(__file__).parent / "out" / "pard_rates.json"
MODELS = ("fedncf/fedavg", "fedncf/pfedrec", "fedncf/pard", "fedgcn/fedavg", "fedgcn/pfedrec", "fedgcn/pard")
ITEMS = (300.0, 1000.0, 3000.0, 10000.0)
ROUNDS = 100


def validated(name: str, item: float, threads: int) -> list[float]:
    """Validation utility after every 10 rounds with this rate of item rows; shorter if training diverges."""
    base, _, method = name.partition("/")
    run: dict[str, pard.Scalar] = {"data": "ml-100k", "preset": "pard", "model": base, "method": method}
    made = pard.setting(run, "as-written", 0)
    optimizer = made.local.optimizer
    rates = {**optimizer.learning_rates, "item": item}
    local = replace(made.local, optimizer=SGD(optimizer.learning_rate, rates))
    curve: list[float] = []

    def score(model: FederatedModel) -> float:
        curve.append(made.recall(model))
        return curve[-1]

    with suppress(DivergedError):
        train_federated(
            Federated(rounds=ROUNDS, local=local),
            made.model,
            made.train,
            defense=made.defense,
            attributes=made.attributes,
            stopping=Stopping(Plateau(pard.EVERY, ROUNDS), score),
            executor=InProcess(threads),
            chunk=BLOCK // 2,
            show_progress=False,
        )
    return curve


def main() -> None:
    """The grid, one line for each of its points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=MODELS)
    parser.add_argument("--items", nargs="*", type=float, default=ITEMS)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in given.only:
        for item in given.items:
            start = process_time()
            curve = [round(value, 4) for value in validated(name, item, given.threads)]
            found[f"{name} {item:g}"] = {"best": max(curve, default=None), "curve": curve}
            print(f"{name} {item:g}: best {max(curve, default=None)}, {curve}, {process_time() - start:.0f} CPU s")
            OUT.parent.mkdir(exist_ok=True)
            OUT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
