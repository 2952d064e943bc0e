"""Your own table, from a file to graded baselines: `python examples/own_data.py`."""

from __future__ import annotations

import csv
import random
import tempfile
from pathlib import Path

from recleak.data.columns import ColumnMap, read_columns
from recleak.data.split import leave_one_out
from recleak.utility import compare


def write_a_shop_log(path: Path) -> None:
    """Stands for your export: 300 customers who mostly stay in one of three departments."""
    draw = random.Random(0)
    with path.open("w", newline="") as out:
        log = csv.writer(out, delimiter=";")
        log.writerow(["customer", "sku", "day"])
        for customer in range(300):
            for _ in range(20):
                department = customer % 3 if draw.random() < 0.8 else draw.randrange(3)
                log.writerow(
                    [f"c{customer}", f"sku-{department}-{draw.randrange(60):02}", f"2024-05-{draw.randint(1, 31):02}"]
                )


def main() -> None:
    """Read, split, compare."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "log.csv"
        write_a_shop_log(table)
        data = read_columns(table, ColumnMap(user="customer", item="sku", time="day"))
    print(data, data.fingerprint[:12])
    for note in data.notes:
        print("note:", note)
    split = leave_one_out(data.distinct(), seed=0)
    print(split.recipe, split.decisions)
    for row in compare(split, negatives=99).rows:
        print(f"{row.model:8} Hit@10 {row.metrics['Hit@10']}  NDCG@10 {row.metrics['NDCG@10']}")


if __name__ == "__main__":
    main()
