"""One federated round of PARD and of its rivals on the real ML-100K, and the published way of training PARD's clients.

`python benchmarks/decoupling.py` prints the table and writes `benchmarks/out/decoupling.json`. All 943 clients,
leave-one-out by time, 5 negatives for each own item, 64 factors, batches of 256, three attributes, one thread,
aggregation included. Seconds are of the process's own CPU time, for one round: that of three rounds minus that of one,
halved. The published way is a loop over clients: each gets a deep copy of the model and of its estimators, and of the
public data for each of its attributes. It is written anew here, for the same terms of the loss, and measured on a few
clients.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from recleak.data import catalog
from recleak.papers import pard
from recleak.protocols.federated import BLOCK, Federated, train_federated
from recleak.training.executor import InProcess
from recleak.training.local import Examples

OUT = Path(__file__).parent / "out" / "decoupling.json"
RUN: dict[str, pard.Scalar] = {"data": "ml-100k", "preset": "pard"}
SOME = 24  # clients that are trained one by one


def cost(made: pard.Setting, rounds: int) -> float:
    """CPU seconds of some rounds."""
    start = process_time()
    train_federated(
        Federated(rounds=rounds, local=made.local),
        made.model,
        made.train,
        defense=made.defense,
        attributes=made.attributes,
        executor=InProcess(1),
        chunk=BLOCK // 2,
        show_progress=False,
    )
    return process_time() - start


# --- the published way ------------------------------------------------------------------------------------------------


class Client(nn.Module):
    """PARD's recommender as a module with whole tables."""

    def __init__(self, n_items: int, factors: int = 64) -> None:
        super().__init__()
        self.user, self.private = nn.Embedding(1, factors), nn.Embedding(1, factors)
        self.item = nn.Embedding(n_items, factors)
        self.head = nn.Sequential(nn.Linear(3 * factors, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, item: Tensor) -> Tensor:
        """Scores of some items, [B]."""
        zero = torch.zeros(len(item), dtype=torch.int64)
        found: Tensor = self.head(torch.cat([self.user(zero), self.private(zero), self.item(item)], dim=1))
        return found.squeeze(1)


def estimator(inputs: int, outputs: int) -> nn.Module:
    """Three layers."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, outputs))


def one_by_one(made: pard.Setting, clients: int) -> float:
    """CPU seconds of the first round with terms, for some clients, each with copies of everything."""
    classes = {"age": 3, "gender": 2, "occupation": 21}
    model = Client(made.train.n_items)
    estimators = nn.ModuleDict(
        {
            f"{kind} {name}": estimator(width, k)
            for name, k in classes.items()
            for kind, width in (("ir", 128), ("fp", 64))
        }
    )
    tables = {name: nn.Embedding(k, 64) for name, k in classes.items()}
    who = made.attributes.public.nonzero().squeeze(1)
    public: list[dict[str, Any]] = [
        {"ir": torch.randn(128), "fp": torch.randn(64), **{n: int(made.attributes.labels[n][u]) for n in classes}}
        for u in who.tolist()
    ]
    data = Examples.of(made.train, negatives=5).draw(np.arange(clients), 0)
    start = process_time()
    for client in range(clients):
        mine, guards = copy.deepcopy(model), copy.deepcopy(estimators)
        names = {name: copy.deepcopy(table) for name, table in tables.items()}
        slow = torch.optim.SGD(guards.parameters(), lr=0.1)
        for name in classes:
            told = copy.deepcopy(public)
            label = torch.tensor([each[name] for each in told])
            for kind in ("ir", "fp"):
                slow.zero_grad()
                loss = functional.cross_entropy(
                    guards[f"{kind} {name}"](torch.stack([each[kind] for each in told])), label
                )
                loss.backward()  # type: ignore[no-untyped-call]
                slow.step()
        fast = torch.optim.SGD([*mine.parameters(), *(p for t in names.values() for p in t.parameters())], lr=0.5)
        span = slice(int(data.offset[client]), int(data.offset[client + 1]))
        item, target = torch.from_numpy(data.item[span]), torch.from_numpy(data.label[span])
        order = torch.randperm(len(item))
        zero = torch.zeros(1, dtype=torch.int64)
        for batch in torch.split(order, 256):
            fast.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(mine(item[batch]), target[batch])
            for name in classes:
                label = made.attributes.labels[name][client].clamp(min=0).reshape(1)
                rows = mine.item(item[batch])
                both = torch.cat([mine.user(zero).expand(len(rows), -1), rows], dim=1)
                loss = loss - 0.5 * functional.cross_entropy(guards[f"ir {name}"](both), label.expand(len(rows)))
                private = mine.private(zero)
                loss = loss + 0.5 * functional.cross_entropy(guards[f"fp {name}"](private), label)
                loss = loss + 0.5 * (private - names[name](label)).norm()
            loss.backward()  # type: ignore[no-untyped-call]
            fast.step()
    return process_time() - start


def main() -> None:
    """Measure, print, write."""
    if catalog.locate("ml-100k") is None:
        print("ml-100k is not here (set RECLEAK_DATA): left out")
        return
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    clients = 943
    for base in ("fedncf", "fedgcn"):
        for method in ("fedavg", "pfedrec", "apm", "uc-fedrec", "pard"):
            made = pard.setting({**RUN, "model": base, "method": method}, "as-written", 0)
            cost(made, 1)  # compiles
            seconds = (cost(made, 4) - cost(made, 2)) / 2  # the terms of PARD begin with the second round
            found[f"{base} {method}"] = {"seconds": seconds, "clients per second": clients / seconds}
    made = pard.setting({**RUN, "model": "fedncf", "method": "pard"}, "as-written", 0)
    alone = one_by_one(made, SOME)
    found["fedncf pard, copies one by one"] = {"seconds": alone * clients / SOME, "clients per second": SOME / alone}
    table = Table("", "CPU seconds per round", "clients per second", title="943 clients, one thread")
    for name, each in found.items():
        table.add_row(name, f"{each['seconds']:.2f}", f"{each['clients per second']:,.0f}")
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "found": found}, indent=2) + "\n")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
