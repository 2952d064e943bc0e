"""Vectors of another library, for an audit of embeddings: train `implicit`'s BPR, write what it learned.

pip install implicit
python examples/implicit_vectors.py ml-100k vectors
recleak audit --embeddings vectors/bpr.npz --item-array item --users vectors/users.csv --interactions vectors/train.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl
import scipy.sparse as sp
from implicit.bpr import BayesianPersonalizedRanking  # type: ignore[import-untyped,import-not-found,unused-ignore]

from recleak.data.source import open_data
from recleak.data.split import ratio


def main(data: str, folder: Path) -> None:
    """One file of vectors with their ids, and two tables: users with their attributes, and what they did."""
    train = ratio(open_data(data), (0.8, 0.0, 0.2)).train
    model = BayesianPersonalizedRanking(factors=63, learning_rate=0.05, iterations=100, random_state=0, num_threads=1)
    model.fit(sp.csr_matrix(train.matrix()), show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    person, thing = (side["id"].cast(pl.String) for side in (train.users, train.items))
    np.savez(
        folder / "bpr.npz",
        user=np.asarray(model.user_factors),
        item=np.asarray(model.item_factors),
        user_ids=np.array(person.to_list()),
        item_ids=np.array(thing.to_list()),
    )
    train.users.rename({"id": "user"}).write_csv(folder / "users.csv")
    pl.DataFrame({"user": person[train.user], "item": thing[train.item]}).write_csv(folder / "train.csv")


if __name__ == "__main__":
    given = [*sys.argv[1:], *["synthetic", "vectors"][len(sys.argv) - 1 :]]
    main(given[0], Path(given[1]))
