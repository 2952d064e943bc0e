"""What clients train on: ragged examples, and the plan of batches that each client walks through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class LocalData:
    """The examples of C clients, client after client. E is their number over all clients."""

    client: NDArray[np.int64]  # i64[C]
    item: NDArray[np.int64]  # i64[E]
    label: NDArray[np.float32]  # f32[E]: 1 for the client's own items, 0 for negatives
    against: NDArray[np.int64] | None  # i64[E]: for pairwise losses, the item that `item` is preferred to; else None
    offset: NDArray[np.int64]  # i64[C + 1]: client c has examples offset[c] to offset[c + 1]
    n_items: int
