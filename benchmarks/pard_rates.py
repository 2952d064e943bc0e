"""Learning rates for PARD's tables, chosen on validation items: ML-100K, seed 0, the same grid for each model.

`python benchmarks/pard_rates.py` trains each model of the grid for at most 100 rounds (`--rounds`) and prints
Recall@10 + Recall@20 of validation items after every 10, and its best value; test items are not looked at. A grid
whose best rate is its largest or its smallest says nothing about what lies beyond: the next rate there is tried too,
as long as that one is better, at most FURTHER times. Methods that train the same model (FedAvg, Early-stop, APM,
UC-FedRec) have its rate. `--only fedncf/pard` takes a part, `--items 1000 3000` other rates to begin with. What it
said is in the head of `recleak/papers/pard.py`. It takes more than an hour of CPU time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import process_time

from recleak.papers.pard_settings import EVERY, Scalar, setting
from recleak.protocols.federated import BLOCK, Federated, FederatedModel, train_federated
from recleak.protocols.stopping import Plateau, Stopping
from recleak.training.cohort import DivergedError
from recleak.training.executor import InProcess
from recleak.training.optimizers import SGD

OUT = Path(__file__).parent / "out" / "pard_rates.json"
MODELS = ("fedncf/fedavg", "fedncf/pfedrec", "fedncf/pard", "fedgcn/fedavg", "fedgcn/pfedrec", "fedgcn/pard")
ITEMS = (300.0, 1000.0, 3000.0, 10000.0)
ROUNDS = 100
FURTHER = 3  # rates beyond an edge of the grid


def beyond(best: Mapping[float, float]) -> float | None:
    """The next rate to try, by the best value of each: about half a decade beyond an edge that is best; else none.

    >>> beyond({300: 1.2, 1000: 1.3, 3000: 1.25}), beyond({300: 1.2, 1000: 1.3}), beyond({300: 1.2, 1000: 1.1})
    (None, 3000.0, 100.0)
    """
    rate, edges = max(best, key=lambda each: best[each]), sorted(best)
    digit = f"{rate:.0e}"[0]
    if rate == edges[-1]:
        return float(rate * 3 if digit == "1" else rate / 3 * 10)
    return float(rate / 10 * 3 if digit == "1" else rate / 3) if rate == edges[0] else None


def validated(name: str, item: float, rounds: int, threads: int) -> list[float]:
    """Validation utility after every 10 rounds with this rate of item rows; shorter if training diverges."""
    base, _, method = name.partition("/")
    run: dict[str, Scalar] = {"data": "ml-100k", "preset": "pard", "model": base, "method": method}
    made = setting(run, "as-written", 0)
    optimizer = made.local.optimizer
    rates = {**optimizer.learning_rates, "item": item}
    local = replace(made.local, optimizer=SGD(optimizer.learning_rate, rates))
    curve: list[float] = []

    def score(model: FederatedModel) -> float:
        curve.append(made.recall(model))
        return curve[-1]

    with suppress(DivergedError):
        train_federated(
            Federated(rounds=rounds, local=local),
            made.model,
            made.train,
            defense=made.defense,
            attributes=made.attributes,
            stopping=Stopping(Plateau(EVERY, rounds), score),
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
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in given.only:
        best: dict[float, float] = {}
        left, further = list(given.items), FURTHER
        while left:
            item = left.pop(0)
            start = process_time()
            curve = [round(value, 4) for value in validated(name, item, given.rounds, given.threads)]
            best[item] = max(curve, default=0.0)  # it may diverge before the first look
            found[f"{name} {item:g}"] = {"best": best[item], "curve": curve, "rounds": given.rounds}
            print(f"{name} {item:g}: best {best[item]}, {curve}, {process_time() - start:.0f} CPU s", flush=True)
            OUT.parent.mkdir(exist_ok=True)
            OUT.write_text(json.dumps(found, indent=2) + "\n")
            if not left and further and (item := beyond(best) or 0.0):
                left, further = [item], further - 1
        if beyond(best):
            print(f"{name}: {max(best, key=lambda each: best[each]):g} is at an edge of the rates that were tried")


if __name__ == "__main__":
    main()
