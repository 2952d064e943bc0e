"""The cost of a client-step and the peak memory, from 1,000 to 100,000 clients.

`make bench-scale` prints the table, draws `benchmarks/out/scale.png` and writes `benchmarks/out/scale.json`:
`cost_ratio` (the largest cost per client-step over the smallest) and `peak_gb` (of the largest case; 10^9 bytes).
Synthetic data, 20,000 items, NCF 64-d with a shared head, fresh Adam, one local epoch, 10 % of the clients in a round.
Each case runs in a process of its own; its peak memory is that of the whole process, the data set included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import altair as alt
import polars as pl
from rich.console import Console
from rich.table import Table

from recleak.data import store
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.training.cohort import LocalTraining
from recleak.training.local import Examples, steps_per_epoch

OUT = Path(__file__).parent / "out"
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
ITEMS, BATCH, CLIENTS = 20_000, 64, 20_000  # at least so many visits are timed


def protocol(n_users: int) -> Federated:
    """10 % a round; more rounds where there are fewer clients."""
    return Federated(rounds=max(2, CLIENTS // (n_users // 10)), fraction=0.1, local=LocalTraining(batch_size=BATCH))


def steps(data: Interactions, federated: Federated) -> int:
    """The client-steps that a run makes."""
    examples = Examples.of(data)
    per_client = steps_per_epoch(BATCH, examples.count)
    eligible = examples.count.nonzero()[0]
    return sum(int(per_client[federated.participants(eligible, r, 0)].sum()) for r in range(federated.rounds))


def measure(folder: Path) -> dict[str, float]:
    """One case."""
    data = store.load(folder)
    federated = protocol(data.n_users)
    warm = Federated(rounds=1, clients_per_round=4, local=federated.local)
    train_federated(warm, NCF(), data, show_progress=False)
    start = perf_counter()
    train_federated(Federated(rounds=0, local=federated.local), NCF(), data, show_progress=False)
    setup = perf_counter() - start
    start = perf_counter()
    train_federated(federated, NCF(), data, show_progress=False)
    seconds = perf_counter() - start - setup
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    made = steps(data, federated)
    return {
        "clients": data.n_users,
        "interactions": len(data),
        "rounds": federated.rounds,
        "client_steps": made,
        "seconds": seconds,
        "setup_seconds": setup,
        "ms_per_client_step": 1e3 * seconds / made,
        "peak_gb": peak,
    }


def draw(rows: list[dict[str, float]]) -> None:
    """Two curves over the number of clients."""
    base = alt.Chart(pl.DataFrame(rows)).encode(
        x=alt.X(
            "clients:Q", scale=alt.Scale(type="log"), title="clients", axis=alt.Axis(format="~s", values=list(SIZES))
        )
    )
    cost = base.mark_line(point=True).encode(y=alt.Y("ms_per_client_step:Q", title="ms per client-step"))
    peak = base.mark_line(point=True).encode(y=alt.Y("peak_gb:Q", title="peak memory, GB"))
    chart = (cost.properties(width=300, height=220) | peak.properties(width=300, height=220)).properties(
        title="One round's cost and the memory, by the number of clients (10 % a round, 20,000 items)"
    )
    chart.save(OUT / "scale.png", scale_factor=2)


def main() -> None:
    """All cases, each in its own process."""
    if len(sys.argv) == 2:
        print(json.dumps(measure(Path(sys.argv[1]))))
        return
    rows: list[dict[str, float]] = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            data = Synthetic(n_users=size, n_items=ITEMS, mean_activity=101.0).generate()
            store.save(data, Path(folder) / "data", name="scale")
            del data
            run = [sys.executable, __file__, str(Path(folder) / "data")]
            rows.append(json.loads(subprocess.run(run, stdout=subprocess.PIPE, check=True).stdout))
            print(
                f"{size:,} clients: {rows[-1]['ms_per_client_step']:.4f} ms, {rows[-1]['peak_gb']:.2f} GB", flush=True
            )
    table = Table("clients", "interactions", "rounds", "client-steps", "seconds", "ms per client-step", "peak GB")
    for row in rows:
        table.add_row(
            f"{row['clients']:,}",
            f"{row['interactions']:,}",
            f"{row['rounds']}",
            f"{row['client_steps']:,}",
            f"{row['seconds']:.1f}",
            f"{row['ms_per_client_step']:.4f}",
            f"{row['peak_gb']:.2f}",
        )
    Console().print(table)
    costs = [row["ms_per_client_step"] for row in rows]
    result = {"cost_ratio": max(costs) / min(costs), "peak_gb": rows[-1]["peak_gb"], "cases": rows}
    OUT.mkdir(exist_ok=True)
    (OUT / "scale.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(rows)
    print(f"cost_ratio {result['cost_ratio']:.2f}, peak_gb {result['peak_gb']:.2f}")
    where = OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT
    print(f"Written: {where}/scale.json, {where}/scale.png")


if __name__ == "__main__":
    main()
