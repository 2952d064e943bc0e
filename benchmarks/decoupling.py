"""One federated round of PARD and of its rivals on the real ML-100K, and the way of the published code to train PARD's.

`python benchmarks/decoupling.py` prints the table and writes `benchmarks/out/decoupling.json`. All 943 clients,
leave-one-out by time, 5 negatives for each own item, 64 factors, batches of 256, three attributes, one thread,
aggregation included. Seconds are of the process's own CPU time, for one round: that of three rounds minus that of
one, halved. That way is a loop over clients: each gets a deep copy of the model and of its estimators, and of the
public data for each of its attributes. It is written anew here and measured on a few clients. Both do the same work
in the line "same work": nine estimators, each with one step without momentum on all public users and the client
itself (of g on public users only), then the same terms of the loss on all own items of a batch, an epoch in batches
of 256.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
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
from recleak.defenses.decoupling import Decoupling
from recleak.papers.pard_settings import BATCH, Scalar, Setting, setting
from recleak.protocols.federated import BLOCK, Federated, train_federated
from recleak.training.executor import InProcess
from recleak.training.local import Examples

OUT = Path(__file__).parent / "out" / "decoupling.json"
RUN: dict[str, Scalar] = {"data": "ml-100k", "preset": "pard"}
SOME = 24  # clients that are trained one by one


def cost(made: Setting, rounds: int) -> float:
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
        """Scores of some items, f32[B]."""
        zero = torch.zeros(len(item), dtype=torch.int64)
        found: Tensor = self.head(torch.cat([self.user(zero), self.private(zero), self.item(item)], dim=1))
        return found.squeeze(1)


def estimator(inputs: int, outputs: int) -> nn.Module:
    """Three layers."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, outputs))


def one_by_one(made: Setting, clients: int) -> float:
    """CPU seconds of a round with terms, for some clients, each with copies of everything."""
    classes = {"age": 3, "gender": 2, "occupation": 21}
    model = Client(made.train.n_items)
    shapes = {name: {"ir": (128, k), "fp": (64, k), "ip": (k, 64)} for name, k in classes.items()}
    estimators = nn.ModuleDict(
        {f"{kind} {name}": estimator(*shape) for name, kinds in shapes.items() for kind, shape in kinds.items()}
    )
    who = made.attributes.public.nonzero().squeeze(1)
    public: list[dict[str, Any]] = [
        {"ir": torch.randn(128), "fp": torch.randn(64), **{n: int(made.attributes.labels[n][u]) for n in classes}}
        for u in who.tolist()
    ]
    data = Examples.of(made.train, negatives=5).draw(np.arange(clients), 0)
    start, zero = process_time(), torch.zeros(1, dtype=torch.int64)
    for client in range(clients):
        mine, guards = copy.deepcopy(model), copy.deepcopy(estimators)
        own = {name: made.attributes.labels[name][client].clamp(min=0).reshape(1) for name in classes}
        span = slice(int(data.offset[client]), int(data.offset[client + 1]))
        item, target = torch.from_numpy(data.item[span]), torch.from_numpy(data.label[span])
        private, row = mine.private(zero).detach(), mine.item(item[target > 0][:1]).detach()
        inputs = {"ir": torch.cat([mine.user(zero).detach(), row], dim=1), "fp": private}
        slow = torch.optim.SGD(guards.parameters(), lr=0.1)
        for name, k in classes.items():
            told = copy.deepcopy(public)
            label = torch.tensor([each[name] for each in told])
            slow.zero_grad()
            for kind, beside in inputs.items():
                both = torch.cat([torch.stack([each[kind] for each in told]), beside])
                functional.cross_entropy(guards[f"{kind} {name}"](both), torch.cat([label, own[name]])).backward()  # type: ignore[no-untyped-call]
            guess = guards[f"ip {name}"](functional.one_hot(label, k).float())
            (torch.stack([each["fp"] for each in told]) - guess).norm(dim=1).mean().backward()
            slow.step()
        fast = torch.optim.SGD(mine.parameters(), lr=0.5)
        order = torch.randperm(len(item))
        for batch in torch.split(order, 256):
            fast.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(mine(item[batch]), target[batch])
            rows = mine.item(item[batch][target[batch] > 0])
            both = torch.cat([mine.user(zero).expand(len(rows), -1), rows], dim=1)
            private = mine.private(zero)
            for name, k in classes.items():
                if len(rows):
                    label = own[name].expand(len(rows))
                    loss = loss - 0.5 * functional.cross_entropy(guards[f"ir {name}"](both), label)
                loss = loss + 0.5 * functional.cross_entropy(guards[f"fp {name}"](private), own[name])
                guess = guards[f"ip {name}"](functional.one_hot(own[name], k).float()).detach()
                loss = loss + 0.5 * (private - guess).norm()
            loss.backward()  # type: ignore[no-untyped-call]
            fast.step()
    return process_time() - start


def same_work(made: Setting) -> Setting:
    """PARD with the work of `one_by_one`."""
    if not isinstance(made.defense, Decoupling):
        raise TypeError(f"Got the defense {made.defense}, expected PARD's.")
    return replace(made, defense=replace(made.defense, steps=1, momentum=0.0, sample=None, pairs=BATCH))


def per_round(made: Setting) -> float:
    """CPU seconds of a round with all terms: those of PARD begin with the second round."""
    cost(made, 2)  # compiles
    return (cost(made, 4) - cost(made, 2)) / 2


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
            made = setting({**RUN, "model": base, "method": method}, "as-written", 0)
            seconds = per_round(made)
            found[f"{base} {method}"] = {"seconds": seconds, "clients per second": clients / seconds}
    made = setting({**RUN, "model": "fedncf", "method": "pard"}, "as-written", 0)
    seconds = per_round(same_work(made))
    found["fedncf pard, same work"] = {"seconds": seconds, "clients per second": clients / seconds}
    alone = one_by_one(made, SOME)
    found["fedncf pard, same work, copies one by one"] = {
        "seconds": alone * clients / SOME,
        "clients per second": SOME / alone,
    }
    table = Table("", "CPU seconds per round", "clients per second", title="943 clients, one thread")
    for name, each in found.items():
        table.add_row(name, f"{each['seconds']:.2f}", f"{each['clients per second']:,.0f}")
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "found": found}, indent=2) + "\n")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
