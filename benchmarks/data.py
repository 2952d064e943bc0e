"""Load and split, with the peak memory of a fresh process for each case: ML-1M, and 10 million synthetic rows.

`make bench` prints the table and writes `benchmarks/out/data.json`. Each case runs in a process of its own, so that its
peak memory (that of the whole process, imports included) is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from recleak.data import catalog, store
from recleak.data.columns import read_columns
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates, training_negatives
from recleak.data.split import leave_one_out, ratio
from recleak.data.synthetic import Synthetic
from recleak.metrics.ranking import rank
from recleak.models.baselines import MostPop

OUT = Path(__file__).parent / "out" / "data.json"
LARGE = Synthetic(n_users=100_000, n_items=20_000, mean_activity=101.0)


def timed(steps: dict[str, float], name: str, work: Callable[[], object]) -> None:
    """Run and note the seconds."""
    start = perf_counter()
    work()
    steps[name] = perf_counter() - start


def split_steps(data: Interactions, steps: dict[str, float]) -> None:
    """What an experiment does with its data."""
    split = leave_one_out(data)
    timed(steps, "leave-one-out by time", lambda: leave_one_out(data))
    timed(steps, "ratio 80/10/10", lambda: ratio(data))
    timed(steps, "negatives 1:4", lambda: training_negatives(split, 4))
    timed(steps, "99 candidates", lambda: evaluation_candidates(split, 99))


def ml_1m(folder: Path) -> dict[str, float]:
    """The published text file."""
    steps: dict[str, float] = {}
    timed(steps, "load", lambda: catalog.load("ml-1m"))
    data = catalog.load("ml-1m")
    timed(steps, "fingerprint", lambda: data.fingerprint)
    split_steps(data, steps)
    split = leave_one_out(data)
    timed(steps, "999 candidates", lambda: evaluation_candidates(split, 999))
    popular = MostPop().fit(split.train)
    timed(steps, "full ranking (MostPop)", lambda: rank(popular, split.train, split.test))
    return steps


def make_large(folder: Path) -> dict[str, float]:
    """Generate 10 million rows and write them as text and as Parquet."""
    steps: dict[str, float] = {}
    timed(steps, "generate", LARGE.generate)
    data = LARGE.generate()
    store.save(data, folder / "converted", name="large")
    data.rows.write_csv(folder / "rows.csv")
    steps["rows"] = len(data)
    return steps


def large_csv(folder: Path) -> dict[str, float]:
    """10 million rows of CSV, columns guessed."""
    steps: dict[str, float] = {}
    timed(steps, "load", lambda: read_columns(folder / "rows.csv"))
    return steps


def large_parquet(folder: Path) -> dict[str, float]:
    """10 million rows as `recleak data convert` writes them (the load checks the fingerprint)."""
    steps: dict[str, float] = {}
    timed(steps, "load", lambda: store.load(folder / "converted"))
    split_steps(store.load(folder / "converted"), steps)
    return steps


CASES = {"ml-1m": ml_1m, "generate 10M": make_large, "10M CSV": large_csv, "10M Parquet": large_parquet}


def main() -> None:
    """All cases, each in its own process."""
    if len(sys.argv) == 3:
        steps = CASES[sys.argv[1]](Path(sys.argv[2]))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"seconds": steps, "peak_gib": peak}))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            if name == "ml-1m" and catalog.locate(name) is None:
                print("ml-1m is not here (set RECLEAK_DATA): left out")
                continue
            run = subprocess.run([sys.executable, __file__, name, folder], stdout=subprocess.PIPE, check=True)
            results[name] = json.loads(run.stdout)
    table = Table("case", "step", "seconds", "peak GiB")
    for name, result in results.items():
        for step, seconds in result["seconds"].items():
            shown = f"{seconds:,.0f} rows" if step == "rows" else f"{seconds:.2f}"
            table.add_row(name, step, shown, f"{result['peak_gib']:.2f}")
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(results, indent=2) + "\n")
    print(f"Written: {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")


if __name__ == "__main__":
    main()
