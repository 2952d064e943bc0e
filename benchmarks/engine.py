"""Local training of the real ML-100K cohort: the batched engine, the plain loop, the adapter, and the GEMM limit.

`make bench` prints the table and writes `benchmarks/out/engine.json`. All figures come from one run on one machine; the
ratios are the result:

- `speedup_over_loop`: client-steps per second of the engine (all cores) over the plain loop (one process, at its best
  thread count and its best Adam);
- `gemm_share`: the rate at which the engine does the nominal floating-point operations of the model's layers, over the
  rate of a large matrix product on all cores;
- `adapter_speedup`: the same model as a plain `nn.Module` through the adapter (all cores), over the plain loop.

943 clients, leave-one-out, 4 negatives per positive, NCF 64-d (128-64-32-1), Adam, batch 64, 20 local epochs (those of
the IMIA paper). The loop trains a sample of the clients, every 32nd by number of steps; the adapter all, for 2 epochs.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from recleak.data import catalog
from recleak.data.split import leave_one_out
from recleak.models.adapter import TorchModel
from recleak.models.base import Model
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.training.chunks import cores
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.local import Examples, held_rows, plan, steps_per_epoch

OUT = Path(__file__).parent / "out" / "engine.json"
FACTORS, HIDDEN, BATCH, EPOCHS = 64, (64, 32), 64, 20
REPEATS = 3


def nominal_operations() -> int:
    """Multiplications and additions of one client-step: forward once, backward twice, over [user, item]."""
    widths = (2 * FACTORS, *HIDDEN, 1)
    return 3 * 2 * BATCH * sum(a * b for a, b in pairwise(widths))


def gemm_rate(n: int = 2048) -> float:
    """Operations per second of a large product on all cores, the best of many."""
    torch.set_num_threads(cores())
    a, b = torch.randn(n, n), torch.randn(n, n)
    best = float("inf")
    for _ in range(12):
        start = perf_counter()
        torch.mm(a, b)
        best = min(best, perf_counter() - start)
    return 2 * n**3 / best


def engine(examples: Examples, model: Model, epochs: int = EPOCHS) -> float:
    """Client-steps per second of one federated round with everybody in it; planning and aggregation included."""
    train = examples.train
    steps = int(steps_per_epoch(BATCH, examples.count).sum()) * epochs
    training = LocalTraining(epochs=epochs, batch_size=BATCH)
    start = perf_counter()
    train_federated(Federated(rounds=1, local=training), model, train, executor=InProcess(), show_progress=False)
    return steps / (perf_counter() - start)


class Plain(nn.Module):
    """NCF as people write it, with a table of the client's own item rows."""

    def __init__(self, users: int, rows: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, FACTORS), nn.Embedding(rows, FACTORS)
        self.mlp = nn.Sequential(nn.Linear(2 * FACTORS, HIDDEN[0]), nn.ReLU(), nn.Linear(*HIDDEN), nn.ReLU())
        self.out = nn.Linear(HIDDEN[1], 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits, f32[B]."""
        score: Tensor = self.out(self.mlp(torch.cat([self.user(user), self.item(item)], dim=-1)))
        return score.squeeze(-1)


def loop(examples: Examples, clients: NDArray[np.int64], threads: int, *, fused: bool) -> float:
    """Client-steps per second of the plain loop: gathered rows, batches drawn beforehand, no copy of the model."""
    torch.set_num_threads(threads)
    table = torch.randn(examples.train.n_items, FACTORS)
    head = Plain(1, 1)
    steps, seconds = 0, 0.0
    for client in clients:
        data = examples.draw(client[None], 0)
        held = held_rows(data)
        walk = plan(data, epochs=EPOCHS, batch_size=BATCH, seed=0, round=0)
        real = walk.weight[:, 0] > 0
        batches = [
            (torch.from_numpy(held.of_item[e[r]]), torch.from_numpy(data.label[e[r]]), torch.zeros(int(r.sum())).long())
            for e, r in zip(walk.example[:, 0], real, strict=True)
        ]
        start = perf_counter()
        model = Plain(1, len(held.item))
        with torch.no_grad():
            model.item.weight.copy_(table[torch.from_numpy(held.item)])
            for mine, theirs in zip(model.mlp.parameters(), head.mlp.parameters(), strict=True):
                mine.copy_(theirs)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        for item, label, user in batches:
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(user, item), label)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        seconds += perf_counter() - start
        steps += len(batches)
    return steps / seconds


def main() -> None:
    """Measure, print, write."""
    if catalog.locate("ml-100k") is None:
        print("ml-100k is not here (set RECLEAK_DATA): left out")
        return
    train = leave_one_out(catalog.load("ml-100k")).train
    examples = Examples.of(train)
    by_steps = np.argsort(-examples.count, kind="stable")
    sample = by_steps[16::32]
    model = NCF(FACTORS, HIDDEN)
    plain = TorchModel(Plain(train.n_users, train.n_items))
    engine(examples, model, 1)  # compiles
    operations = nominal_operations()
    # Fast and slow alternate, so that a change of the machine's pace meets all of them; the best of each counts.
    rates: dict[str, list[float]] = {"limit": [], "engine": [], "adapter": []}
    for _ in range(REPEATS):
        rates["limit"].append(gemm_rate() / operations)
        rates["engine"].append(engine(examples, model))
    loops = {
        (threads, fused): loop(examples, sample, threads, fused=fused)
        for threads in sorted({1, cores()})
        for fused in (False, True)
    }
    rates["adapter"].append(engine(examples, plain, 2))
    rates["limit"].append(gemm_rate() / operations)
    limit, batched, adapter = (max(rates[name]) for name in ("limit", "engine", "adapter"))
    (threads, fused), looped = max(loops.items(), key=lambda entry: entry[1])
    steps = {"gemm limit": limit, "engine": batched, "adapter": adapter, "loop": looped}
    result = {
        "cores": cores(),
        "operations_per_client_step": operations,
        "gemm_gflops": limit * operations / 1e9,
        "client_steps_per_second": steps,
        "loop": {f"{t} threads, {'fused' if f else 'plain'} Adam": rate for (t, f), rate in loops.items()},
        "speedup_over_loop": batched / looped,
        "gemm_share": batched / limit,
        "adapter_speedup": adapter / looped,
    }
    table = Table("way", "steps / s", "ms per step", "x loop", "of limit", title="Client-steps")
    names = {
        "loop": f"plain loop, {threads} thr., {'fused' if fused else 'plain'} Adam",
        "adapter": f"nn.Module, adapter, {cores()} cores",
        "engine": f"engine, {cores()} cores",
        "gemm limit": f"GEMM, {result['gemm_gflops']:.0f} GFLOPS",
    }
    for key, name in names.items():
        rate = steps[key]
        table.add_row(name, f"{rate:,.0f}", f"{1e3 / rate:.4f}", f"{rate / looped:.1f}", f"{rate / limit:.2f}")
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"speedup_over_loop {result['speedup_over_loop']:.1f}, gemm_share {result['gemm_share']:.2f}")
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
