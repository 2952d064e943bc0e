"""Our BPR beside that of `implicit`, on the same split: accuracy and time on one core.

    pip install implicit
    python benchmarks/bpr.py [data] [seeds]

Both have 64 numbers per user and item, learn from the same training part and are graded by the same function. Seconds
are of one core. `implicit` gets its defaults but for the rate and the number of epochs, of which the best on the
validation part counts, with the seconds of that one; ours stops on the validation part by itself, which is in its
seconds.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from recleak.data.source import open_data
from recleak.data.split import Split, ratio
from recleak.metrics.ranking import Ranks, Scorer, rank
from recleak.models.mf import MF
from recleak.protocols.centralized import Centralized, train_centralized
from recleak.training.optimizers import SGD, Adam
from recleak.utility import union

RATES, EPOCHS = (0.01, 0.05), (10, 20, 30, 50, 100)


@dataclass(frozen=True, eq=False)
class Products:
    """Vectors of users and items as a scorer."""

    user: Tensor
    item: Tensor

    def scores(self, users: Tensor) -> Tensor:
        """f32[B, I]."""
        return self.user[users] @ self.item.T


def theirs(split: Split, seed: int) -> tuple[Scorer, float, str]:
    """The best of some settings on the validation part, and the seconds of that one."""
    from implicit.bpr import BayesianPersonalizedRanking  # type: ignore[import-untyped,import-not-found,unused-ignore]

    past = sp.csr_matrix(split.train.matrix())
    found = []
    for rate in RATES:
        for epochs in EPOCHS:
            model = BayesianPersonalizedRanking(
                factors=63, learning_rate=rate, iterations=epochs, random_state=seed, num_threads=1
            )
            start = time.process_time()
            model.fit(past, show_progress=False)
            seconds = time.process_time() - start
            scorer = Products(torch.from_numpy(model.user_factors), torch.from_numpy(model.item_factors))
            value = rank(scorer, split.train, split.valid).ndcg(10).mean()
            found.append((value, scorer, seconds, f"rate {rate:g}, {epochs} epochs"))
    value, scorer, seconds, words = max(found, key=lambda each: each[0])
    return scorer, seconds, words


def ours(split: Split, seed: int, protocol: Centralized) -> tuple[Scorer, float, str]:
    """Trained until the validation metric stops growing."""
    start = time.process_time()
    trained = train_centralized(protocol, MF(64), split.train, valid=split.valid, seed=seed, show_progress=False)
    return trained, time.process_time() - start, f"best of {len(trained.loss)} epochs: {trained.best}"


def main(data: str, seeds: int) -> None:
    """Prints a line for each."""
    torch.set_num_threads(1)
    ways = {
        "ours, Adam, batches of 512": Centralized(batch_size=512, optimizer=Adam(0.001, weight_decay=1e-5)),
        "ours, SGD, one by one": Centralized(batch_size=1, optimizer=SGD(0.05, weight_decay=0.01)),
    }
    print(f"{'':28} {'seconds':>8} {'NDCG@10':>8} {'Recall@10':>10} {'Hit@10':>7}")
    rows: dict[str, list[tuple[float, Ranks]]] = {}
    for seed in range(seeds):
        split = ratio(open_data(data), (0.7, 0.1, 0.2), seed=seed)
        known = union(split.train, split.valid)
        for name in ("implicit", *ways):
            scorer, seconds, words = ours(split, seed, ways[name]) if name in ways else theirs(split, seed)
            rows.setdefault(name, []).append((seconds, rank(scorer, known, split.test)))
            print(f"  seed {seed}, {name}: {seconds:.1f} s, {words}", file=sys.stderr)
    for name, runs in rows.items():
        metrics = [[ranks.ndcg(10).mean(), ranks.recall(10).mean(), ranks.hit(10).mean()] for _, ranks in runs]
        mean, spread = np.mean(metrics, axis=0), np.std(metrics, axis=0)
        middle = np.median([each for each, _ in runs])
        print(f"{name:28} {middle:8.1f} {mean[0]:8.4f} {mean[1]:10.4f} {mean[2]:7.4f}   (±{spread[0]:.4f} over seeds)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ml-100k", int(sys.argv[2]) if len(sys.argv) > 2 else 3)
