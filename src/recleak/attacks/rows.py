"""One row for each client: what attacks keep that add up, or replace, what each message tells of its senders.

Axis letters: C clients of a message, n seen clients, p columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from recleak.attacks.base import Knowledge, State
from recleak.errors import ConfigError

Rounds = Literal["last", "all"] | int
_ROW = "row "  # before a client's number in the state


@dataclass(frozen=True, kw_only=True)
class KeepsRows:
    """Attacks that keep one row for each client: the sum of all rounds, the last one, or that of a certain round."""

    rounds: Rounds = "all"

    ROW: ClassVar[str] = _ROW

    def __post_init__(self) -> None:
        if not isinstance(self.rounds, int) and self.rounds not in ("last", "all"):
            raise ConfigError(f"rounds is {self.rounds!r}, expected 'last', 'all' or the number of a round.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody was seen."""
        return {"participations": torch.zeros(knowledge.n_users, dtype=torch.int64)}  # i64[U], of those that count

    def read(self, state: State) -> tuple[Tensor, Tensor]:
        """The clients that were seen, i64[n], ascending, and the mean or the last of their rows, f32[n, p]."""
        client, rows = seen_rows(state)
        return client, rows / state["participations"][client].unsqueeze(1) if self._adds() else rows

    def _with(self, state: State, client: Tensor, rows: Tensor) -> State:
        """The state with new rows, i64[C] and f32[C, *]; no other is copied."""
        new: State = {}
        for number, row in zip(client.tolist(), rows, strict=True):
            name = f"{_ROW}{number}"
            before = new.get(name, state.get(name)) if self._adds() else None
            new[name] = row.clone() if before is None else before + row
        seen = state["participations"].index_add(0, client, torch.ones_like(client))
        return {**state, **new, "participations": seen}

    def _counts(self, round: int) -> bool:
        return self.rounds in ("last", "all", round)

    def _adds(self) -> bool:
        return self.rounds == "all"


def seen_rows(state: State, asked: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The clients that have a row, i64[n], ascending, and their rows, f32[n, *]; perhaps only of those asked for."""
    client = state["participations"].nonzero().squeeze(1)
    if asked is not None:
        client = client[torch.isin(client, asked)]
    if not len(client):
        return client, torch.empty(0, 0)
    return client, torch.stack([state[f"{_ROW}{number}"] for number in client.tolist()])
