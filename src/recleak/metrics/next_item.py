"""Where the place that a user went to next comes out among others, by a model that knows where the user was.

The answer has the form of `ranking.rank`: `rank_next(...).recall(20)` is the hit rate at 20, averaged over each user's
held-out transitions, one value per user; its mean is that over users. A transition is graded by itself: its item
competes with sampled ones (of `sampling.evaluation_candidates`), or with all places but the one where the user is.
Unlike in `ranking.rank` places in train compete too, since the next place may well be one of them.

Axis letters: T transitions, K candidates, I items, U users.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.sequences import Transitions
from recleak.errors import DataError, RecleakError
from recleak.metrics.ranking import Ranks

_BYTES = 768  # of working memory per transition and candidate; covers rows of a node's tables, read from half precision


class NextScorer(Protocol):
    """Whatever scores items for users whose last place is known."""

    def scores_after(self, starts: Transitions, items: Tensor) -> Tensor:
        """A score of some items for the user of each transition, as if it were still to come: i64[T, K] -> f32[T, K].

        Higher is better. What a transition went to must not be read.
        """
        ...


def rank_next(
    scorer: NextScorer, test: Transitions, candidates: NDArray[Any] | None = None, *, chunk_bytes: int = 1 << 26
) -> Ranks:
    """Rank where each transition went among all items, or among `candidates`, i64[U, K] padded with -1.

    Transitions are scored in chunks of about `chunk_bytes` of working memory.
    """
    if not len(test):
        raise DataError("there is no held-out transition, so nobody can be graded", remedy="Check the split.")
    rivals = test.n_items if candidates is None else candidates.shape[1]
    step = max(1, chunk_bytes // (_BYTES * (1 + rivals)))
    above, tied, count = (np.empty(len(test), np.int64) for _ in range(3))
    for start in range(0, len(test), step):
        part = slice(start, start + step)
        some = test.select(np.arange(len(test))[part])
        above[part], tied[part], count[part] = _placed(scorer, some, candidates)
    users, first, row = np.unique(test.user, return_index=True, return_inverse=True)
    return Ranks(users, count[first], row, above, tied)


def _placed(
    scorer: NextScorer, test: Transitions, candidates: NDArray[Any] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each transition the candidates above, those level with it, and all with itself, i64[T] each."""
    if candidates is None:
        rivals = np.tile(np.arange(test.n_items), (len(test), 1))
        competes = (rivals != test.item[:, None]) & (rivals != test.before[:, None])
    else:
        rivals = candidates[test.user].astype(np.int64)
        competes = rivals >= 0
        if (rivals == test.item[:, None]).any():
            raise DataError(
                "a place that a user went to is among its sampled candidates",
                remedy="Sample them with exclude='all' (data.sampling.evaluation_candidates).",
            )
    items = np.concatenate([test.item[:, None], rivals.clip(0)], axis=1)
    scores = scorer.scores_after(test, torch.from_numpy(items)).numpy()
    if not np.isfinite(scores).all():
        raise RecleakError(
            f"{int((~np.isfinite(scores)).sum()):,} of {scores.size:,} scores are not finite.\n"
            "  The model has probably diverged: lower the learning rate."
        )
    wanted, others = scores[:, :1], scores[:, 1:]
    above, tied = ((competes & found).sum(1) for found in (others > wanted, others == wanted))
    return above, tied, 1 + competes.sum(1)
