"""PARD's attack: a user's attribute from its vector and from the items that it seems to have (Zhao et al., eq. 7).

The server sees vectors of users where those are sent, and rows of items. Which of the rows are of a user's own items it
has to infer ("by analyzing the differences between client and server-side item embeddings", section II-B); here by a
membership attack on the very upload. What a learner reads of a user is its vector, then the mean of these rows as the
user left them. Axis letters: C clients of a message, N item rows of all clients, d factors, p columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.attribute import RowPerClient, by_learner, public
from recleak.attacks.base import Knowledge, State, WhichAttribute
from recleak.attacks.learners import ChosenEpoch, Learner
from recleak.attacks.membership import FromUploads, calibrated
from recleak.attacks.rows import seen_rows
from recleak.errors import ConfigError
from recleak.models.components import require_names
from recleak.update import Update
from recleak.wire import Broadcast, Disclosure, ServerMessage, Upload

Reads = Literal["all", "users", "items"]
Watch = Literal["rows", "path"]
OWN = "own items"  # public knowledge of an oracle: i64[n, 2], clients and items
_SENT = "sent/"  # before a table of the last broadcast
_TOLD = "told/"


@dataclass(frozen=True, kw_only=True)
class FromRepresentations(RowPerClient):
    """A learner on vectors of users and the mean rows of their items, as clients leave them.

    reads: vectors and items, or one of them alone. users: which vectors; None: all that are sent, if any. One that is
    kept can be named: it is read where users told it (`Disclosure`), which no server has of all users. items: the
    table. rounds: the last participation of a client, a certain round, or the mean over all. watch "path": reads the
    first, the mean and the way from the first to the last participation: whoever watches over many rounds; with
    rounds="all". oracle: the own items are told, `own items` in the public knowledge; else `membership` infers them
    from each upload.
    """

    reads: Reads = "all"
    users: tuple[str, ...] | None = None
    items: str = "item"
    membership: FromUploads = field(default_factory=lambda: GradientAlignment(shadow_rows=0, participation="all"))
    oracle: bool = False
    watch: Watch = "rows"
    learner: Learner = field(default_factory=ChosenEpoch)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.watch not in get_args(Watch):
            raise ConfigError(f"watch is {self.watch!r}, expected one of {', '.join(get_args(Watch))}.")
        if self.watch == "path" and self.rounds != "all":
            raise ConfigError(f"watch is 'path' with rounds={self.rounds!r}, expected rounds='all'.")
        if self.reads not in get_args(Reads):
            raise ConfigError(f"reads is {self.reads!r}, expected one of {', '.join(get_args(Reads))}.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody was seen; names are checked."""
        parts = {part.name: part for part in knowledge.components}
        names = (*self._vectors(knowledge), *(() if self.reads == "users" else (self.items,)))
        require_names("component", names, parts)
        if not names:
            raise ConfigError(
                "No vector of users is sent, expected one.\n  Read items, or name vectors that users tell."
            )
        if self.reads != "users" and not parts[self.items].shared:
            raise ConfigError(f"The table {self.items!r} is kept, expected one that is sent.")
        return super().init(knowledge)

    def _vectors(self, knowledge: Knowledge) -> tuple[str, ...]:
        """The vectors of users that it reads."""
        if self.reads == "items":
            return ()
        if self.users is not None:
            return self.users
        vectors = [part for part in knowledge.components if part.shared and len(part.shape) == 1]
        return tuple(part.name for part in vectors if part.storage == "per_user" or part.name == "user")

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """Remember what was broadcast and told; turn each client of an upload into a row."""
        if isinstance(message, Broadcast):
            kept = {name: value for name, value in state.items() if not name.startswith(_SENT)}
            return {**kept, **{_SENT + name: value for name, value in message.params.items()}}
        if isinstance(message, Disclosure):
            kinds = {part.name: part.shared for part in knowledge.components}
            told = {name: value for name, value in message.values.items() if not kinds.get(name, True)}
            if not set(self._vectors(knowledge)) & set(told):
                return state
            kept = {name: value for name, value in state.items() if not name.startswith(_TOLD)}
            return {**kept, _TOLD + "client": message.client, **{_TOLD + name: told[name] for name in told}}
        if not isinstance(message, Upload) or not self._counts(message.round) or not message.update.n_clients:
            return state
        rows, ready = self._read(knowledge, state, message.update, message.round)
        client = message.update.client[ready]
        new: State = {}
        for number, row in zip(client.tolist(), rows[ready], strict=True):
            name = f"{self.ROW}{number}"
            new[name] = self._added(state.get(name), row)
        counted = state["participations"].index_add(0, client, torch.ones_like(client))
        return {**state, **new, "participations": counted}

    def _added(self, before: Tensor | None, row: Tensor) -> Tensor:
        """What is kept of a client: its row, the sum of its rows, or with a path (first, sum, last), f32[3, p]."""
        if self.watch == "path":
            return torch.stack([row, row, row]) if before is None else torch.stack([before[0], before[1] + row, row])
        return before + row if self._adds() and before is not None else row.clone()

    def _read(self, knowledge: Knowledge, state: State, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """What a learner reads of each client, f32[C, p], and of whom all of it is known, bool[C]."""
        pieces, ready = [], torch.ones(update.n_clients, dtype=torch.bool)
        for name in self._vectors(knowledge):
            if name in update.values:
                before = state[_SENT + name]
                pieces.append(update.values[name] + (before[update.client] if before.dim() == 2 else before))
                continue
            width = next(part.size for part in knowledge.components if part.name == name)
            vector, known = torch.zeros(update.n_clients, width), torch.zeros(update.n_clients, dtype=torch.bool)
            if _TOLD + name in state:
                who = state[_TOLD + "client"]
                order = who.argsort()
                place = order[torch.searchsorted(who, update.client, sorter=order).clamp(max=len(who) - 1)]
                known = who[place] == update.client
                vector[known] = state[_TOLD + name][place[known]]
            pieces.append(vector)
            ready &= known
        if self.reads != "users":
            pieces.append(self._mean_rows(knowledge, state, update, round))
        return torch.cat(pieces, dim=1), ready

    def _mean_rows(self, knowledge: Knowledge, state: State, update: Update, round: int) -> Tensor:
        """The mean of the rows of items that seem to be a client's own, as the client left them, f32[C, d]."""
        weight = self._own(knowledge, state, update, round)  # f32[N]
        rows = update.rows[self.items] + state[_SENT + self.items][update.item]
        total = rows.new_zeros(update.n_clients, rows.shape[1]).index_add_(0, update.owner, rows * weight.unsqueeze(1))
        count = weight.new_zeros(update.n_clients).index_add_(0, update.owner, weight)
        return total / count.clamp(min=1e-12).unsqueeze(1)

    def _own(self, knowledge: Knowledge, state: State, update: Update, round: int) -> Tensor:
        """The chance that each row is of an own item, f32[N]."""
        if self.oracle:
            owned = public(knowledge, OWN, "i64[n, 2], clients and their items")
            pair = update.client[update.owner] * knowledge.n_items + update.item
            return torch.isin(pair, owned[:, 0] * knowledge.n_items + owned[:, 1]).float()
        received = {name.removeprefix(_SENT): value for name, value in state.items() if name.startswith(_SENT)}
        odds, expected = self.membership.evidence(knowledge, received, update, round)
        return calibrated(odds, update.owner, expected).float()

    def listener(self) -> FromRepresentations:
        """All learners read the same rows."""
        return replace(self, learner=ChosenEpoch())

    def answer(self, knowledge: Knowledge, state: State, question: WhichAttribute) -> Tensor:
        """Train on the known clients that were seen, predict the others."""
        return by_learner(knowledge, question, *self.read(state), self.learner, self.seed)

    def read(self, state: State) -> tuple[Tensor, Tensor]:
        """The clients that were seen, i64[n], ascending, and what a learner reads of them, f32[n, p]."""
        client, rows = seen_rows(state)
        times = state["participations"][client].unsqueeze(1)
        if self.watch == "path" and len(client):
            return client, torch.cat([rows[:, 0], rows[:, 1] / times, rows[:, 2] - rows[:, 0]], dim=1)
        return client, rows / times if self._adds() else rows
