"""What runners share that ask for communities: who is drawn at random, and grades whose spread is that of users.

Axis letters: A adversaries, U users.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recleak import random
from recleak.grading import as_victims, grade_communities
from recleak.metrics.intervals import both_ways

OF_USERS = " of users"  # after the name of a grade: see `graded`


def draws(users: int, seed: int, who: Tensor | None = None) -> Tensor:
    """A random number of each user for each adversary, the users `who` (i64[A]) or all, f32[A, U]."""
    adversary = np.arange(users) if who is None else who.numpy()
    lot = random.uniform(seed, "random community", adversary[:, None], np.arange(users))
    return torch.from_numpy(lot).float()


def graded(answer: Tensor, truth: Tensor, size: int, who: Tensor, aside: Tensor | None = None) -> dict[str, Tensor]:
    """The grades of adversaries, the users `who` (i64[A]); and `accuracy of users` and `bound of users`, f64[U].

    The mean of these is that of the adversaries, and their spread is that of users as adversaries and as victims
    (`both_ways`), whoever plays the adversary: some users do, or all.
    """
    found = grade_communities(answer, truth, size, who, aside)
    for name, hit in (("accuracy", "exposed"), ("bound", "heard")):
        row = np.full(truth.shape[1], np.nan)
        row[who.numpy()] = found[name].double().numpy()
        found[name + OF_USERS] = torch.from_numpy(both_ways(row, as_victims(found[name], found[hit], truth)))
    return found
