"""What nodes of a gossip send each other, node by node: how large its numbers are. See `protocols.nodes`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import compiled

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]


@compiled
def largest_bits(bits: Bits, mask: np.unsignedinteger[Any], out: Bits) -> None:
    """The bits of each row's largest magnitude, [U] of [U, L]; `mask` takes the sign away. A NaN is the largest of all.

    Numbers without a sign are in the order of their bits, so no comparison meets a NaN.
    """
    for k in range(bits.shape[0]):
        row = bits[k]
        best = row[0] & mask
        for j in range(row.shape[0]):
            found = row[j] & mask
            best = found if found > best else best
        out[k] = best
