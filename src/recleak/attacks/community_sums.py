"""Community detection behind secure aggregation: of a shared user table, each row of the sum is one user's own upload.

Nobody but user u trains row u of the users' vectors, so that the sum over all clients has u's own change there, times
its weight. `AggregatorCommunity` scores the target items of every adversary (see `attacks.community`) with that row,
the head and the item rows that all made together:

    row        the user's row as it is after the round: what was broadcast and its share of the change
    movement   how the row moved since the first broadcast, in all rounds together: where it began tells nothing
    step       how it moved in the round

With vectors that stay with their users, no row of a sum is a single user's, and there is nothing to score.
Axis letters: A adversaries, U users, I items, C clients of a round, d factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recleak.attacks.base import Knowledge, State
from recleak.attacks.community import NUMBERS, TINY, ScoredCommunity, all_pairs, logits_of
from recleak.attacks.community_targets import apart_of, targets_of
from recleak.attacks.community_vectors import kept_parts
from recleak.attacks.transitions import of_models
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component
from recleak.wire import Aggregate, Aggregator, AggregatorMessage, Broadcast

Reading = Literal["row", "movement", "step"]

_RECEIVED, _FIRST = "received/", "first/"  # before the names of components in the state


@dataclass(frozen=True, kw_only=True)
class AggregatorCommunity(ScoredCommunity):
    """At a server that sees sums: the row of each user of the round, with what all have in common."""

    reading: Reading = "step"

    vantage: ClassVar[type[Aggregator]] = Aggregator

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reading not in get_args(Reading):
            raise ConfigError(f"reading is {self.reading!r}, expected one of {', '.join(get_args(Reading))}.")
        if self.scoring == "activity":
            raise ConfigError("scoring is 'activity', expected another one: sums tell no numbers of rows.")
        if self.vector != "sent":
            raise ConfigError(f"vector is {self.vector!r}, expected 'sent': of a sum only users' own rows are read.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything."""
        if self.scoring != "random" and (kept_parts(knowledge) or not _of_users(knowledge)):
            kept = ", ".join(part.name for part in kept_parts(knowledge)) or "none"
            raise ConfigError(
                "No row of the sum is a single user's, expected a shared user table (kept by users: "
                f"{kept}).\n  What a sum without one tells of a user it tells of all."
            )
        return super().init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: AggregatorMessage) -> State:
        """Keep the broadcast; score the rows of who took part in a sum."""
        if isinstance(message, Broadcast):
            return self._remember(knowledge, state, message.params)
        received = {name.removeprefix(_RECEIVED): value for name, value in state.items() if name.startswith(_RECEIVED)}
        if not isinstance(message, Aggregate) or not received or not message.weight > 0:
            return state
        client = message.client
        adversary, model = all_pairs(len(targets_of(knowledge)), len(client))
        if self.scoring == "random":
            return self.keeping(state, adversary, client[model], self.guess(adversary, client[model]))
        after = _after(knowledge, received, message)
        parts = _of_users(knowledge)
        rows = {part.name: self._read(part, state, after, message)[client] for part in parts}
        score = self._of_rows(knowledge, after, rows, client)
        return self.keeping(state, adversary, client[model], score[adversary, model])

    def _read(self, part: Component, state: State, after: Params, message: Aggregate) -> Tensor:
        """The rows of all users, f32[U, *shape]."""
        match self.reading:
            case "row":
                return after[part.name]
            case "movement":
                return after[part.name] - state[_FIRST + part.name]
            case _:
                weight = message.weight / len(message.client) if part.averaged else 1.0  # of a client, on average
                return message.total[part.name] / weight

    def _remember(self, knowledge: Knowledge, state: State, params: Params) -> State:
        kept = {name: value for name, value in state.items() if not name.startswith(_RECEIVED)}
        kept |= {_RECEIVED + name: value.clone() for name, value in params.items()}
        if self.reading == "movement":
            names = [part.name for part in _of_users(knowledge)]
            kept |= {_FIRST + name: params[name].clone() for name in names if _FIRST + name not in kept}
        return kept

    def _of_rows(self, knowledge: Knowledge, params: Params, rows: Params, client: Tensor) -> Tensor:
        """With the rows of C users, f32[C, *shape], and all else alike, f32[A, C]."""
        common = {name: value.unsqueeze(0) for name, value in params.items() if name not in rows}
        if knowledge.model.needs_transitions:
            adversary, model = all_pairs(len(targets_of(knowledge)), len(client))
            given = (common, rows["user"], adversary, model)
            score = of_models(knowledge, self.scoring, *given, told=False, seed=self.seed)
            return score.reshape(len(client), -1).T
        parts, size = [], max(value.numel() for value in common.values())
        for some in torch.split(torch.arange(len(client)), max(1, NUMBERS // size)):
            models = {name: value.expand(len(some), *value.shape[1:]) for name, value in common.items()}
            logits = logits_of(knowledge, models, {name: value[some] for name, value in rows.items()})  # f32[c, I]
            parts.append(self.of_logits(knowledge, logits, apart_of(knowledge, client[some])))
        return torch.cat(parts, 1)


def _after(knowledge: Knowledge, received: Params, message: Aggregate) -> Params:
    """What the clients of a round made together of what they received."""
    changed = {}
    for part in (part for part in knowledge.components if part.shared):
        total, value = message.total[part.name], received[part.name]
        if part.name in message.touched:
            by = message.touched[part.name].clamp(min=TINY).reshape(-1, *[1] * (value.dim() - 1))
        else:
            by = torch.tensor(message.weight if part.averaged else 1.0)
        changed[part.name] = value + total / by
    return changed


def _of_users(knowledge: Knowledge) -> list[Component]:
    """The shared components with a row for each user."""
    return [part for part in knowledge.components if part.shared and part.storage == "per_user"]
