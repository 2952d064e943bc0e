"""The wire: everything that leaves a party is a message, and an adversary sees messages only.

A protocol sends messages; a vantage point decides which of them an adversary receives; an attack folds over those.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recleak.update import Update


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The server sends the shared components to the clients of a round."""

    round: int
    params: dict[str, Tensor]  # per_item f32[I, *shape], dense f32[*shape], a shared per_user table f32[U, *shape]


@dataclass(frozen=True, eq=False)
class Upload:
    """Clients answer with what they changed."""

    round: int
    update: Update
    weight: Tensor  # f32[C]: what a client says its update weighs (1, or its number of positives)


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The sum of a round's uploads: all that is seen behind secure aggregation."""

    round: int
    client: Tensor  # i64[n]: who took part
    total: dict[str, Tensor]  # weighted sums: per_item f32[I, *shape], dense f32[*shape], per_user f32[U, *shape]
    touched: dict[str, Tensor]  # per_item components: summed weight of the clients that sent a row, f32[I]; or empty
    weight: float  # summed weight of the clients
