"""The automatic resistance function: how much each part of an upload tells about users whose attribute is known.

APM gives each part of a model a level of resistance, which its authors read off a figure (section 3.3 and eq. 11). Here
it is measured: an operator who knows an attribute of some users, and has their uploads, lets a learner guess it from
one part at a time. `defenses.adaptive_noise.levels_from` turns the leak into levels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from recleak.attacks.learners import Learner, Network, cross_validated
from recleak.metrics.linearized import auc_values


def measured_leak(
    parts: Mapping[str, NDArray[np.float32]],
    label: NDArray[np.int64],
    classes: int,
    *,
    learner: Learner | None = None,
    folds: int = 5,
    seed: int = 0,
) -> dict[str, float]:
    """By part, the AUC of a learner minus 0.5, from the rows f32[n, p] of users with a known class, i64[n].

    Every user is guessed by a learner that was fitted to the others (cross-validation, folds of equal proportions), so
    a part that says nothing has a leak around 0. With few users it is a noisy number: its standard deviation is some
    0.05 for 100 users in two equal classes.

    The learner is APM's network unless another is given. After 140 rounds on MovieLens-100K a logistic regression reads
    nothing from the user part (gender AUC 0.38 of 142 known users), from which the network reads all (0.97): rows of
    E_U tell by moving, in whatever direction.
    """
    count = np.bincount(label, minlength=classes)
    if len(count[count > 0]) < 2 or count[count > 0].min() < folds:
        raise ValueError(
            f"Got {count.tolist()} users of each class, expected at least two classes, each with as many users as "
            f"there are folds ({folds}), or none.\n  Give more users with a known attribute, or fewer folds."
        )
    leak = {}
    for name, rows in parts.items():
        chance = cross_validated(learner or Network(), rows, label, classes, seed, folds)
        leak[name] = float(auc_values(chance, label).mean()) - 0.5
    return leak
