"""Lists of another library, for an audit of plain outputs: train `implicit`'s BPR, write what an outsider would see.

pip install implicit
python examples/implicit_lists.py ml-100k lists
recleak audit --recommendations lists/recs.csv --users lists/users.csv --interactions lists/train.csv
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

TOP = 20


def main(data: str, folder: Path) -> None:
    """Three tables: lists, users with their attributes, and what users did before."""
    split = ratio(open_data(data), (0.8, 0.0, 0.2))
    train, past = split.train, sp.csr_matrix(split.train.matrix())
    model = BayesianPersonalizedRanking(factors=63, learning_rate=0.05, iterations=100, random_state=0, num_threads=1)
    model.fit(past, show_progress=False)
    users = np.arange(train.n_users)
    item, score = model.recommend(users, past[users], N=TOP, filter_already_liked_items=True)
    person, thing = train.users["id"], train.items["id"]
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"user": person[np.repeat(users, TOP)], "item": thing[item.reshape(-1)]}
    places = {"rank": np.tile(np.arange(1, TOP + 1), len(users)), "score": score.reshape(-1)}
    pl.DataFrame({**shown, **places}).write_csv(folder / "recs.csv")
    train.users.rename({"id": "user"}).write_csv(folder / "users.csv")
    pl.DataFrame({"user": person[train.user], "item": thing[train.item]}).write_csv(folder / "train.csv")


if __name__ == "__main__":
    given = [*sys.argv[1:], *["synthetic", "lists"][len(sys.argv) - 1 :]]
    main(given[0], Path(given[1]))
