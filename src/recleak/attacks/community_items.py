"""The chain to communities: first which items are a sender's own, then who is similar to the targets by these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge, State, WhichItems, WhoBelongs
from recleak.attacks.community import TINY, UNSEEN, Keeping, PeerCommunity
from recleak.attacks.community_targets import apart_of, mean_items, targets_of
from recleak.attacks.membership import FromUploads, pairs_with_odds
from recleak.attacks.moved import directions, leading, nothing_common, popular_side, received, senders, table_of
from recleak.errors import ConfigError
from recleak.kernels_moved import similar_by_moved
from recleak.wire import Disclosure, PeerMessage, Peers, Server, ServerMessage

Reading = Literal["jaccard", "count"]


@dataclass(frozen=True, kw_only=True)
class CommunityThroughItems:
    """First which items are a client's own, from its uploads, then who is similar to the targets by these: expected
    Jaccard, the overlap and the union each by the probabilities of items. It needs nobody's vector.

    reading "count" instead: the expected number of targets that are the client's, to find who has any. Items that do
    not count for a sender (`excluded`, see `attacks.community`) are taken out of both sets.
    """

    membership: FromUploads = field(default_factory=lambda: GradientAlignment(shadow_rows=0))
    reading: Reading = "jaccard"

    vantage: ClassVar[type[Server]] = Server
    question: ClassVar[type[WhoBelongs]] = WhoBelongs

    def __post_init__(self) -> None:
        if self.reading not in get_args(Reading):
            raise ConfigError(f"reading is {self.reading!r}, expected one of {', '.join(get_args(Reading))}.")

    def init(self, knowledge: Knowledge) -> State:
        """As the membership attack."""
        return self.membership.init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """As the membership attack."""
        return self.membership.fold(knowledge, state, message)

    def answer(self, knowledge: Knowledge, state: State, question: WhoBelongs) -> Tensor:
        """Probabilities of items, then similarities."""
        pair, _ = pairs_with_odds(state, knowledge.n_items)
        client, item = pair // knowledge.n_items, pair % knowledge.n_items
        chance = self.membership.answer(knowledge, state, WhichItems(client, item)).float()
        seen, place = torch.unique(client, return_inverse=True)
        rows = torch.zeros(len(seen), knowledge.n_items).index_put_((place, item), chance)
        targets = targets_of(knowledge)[question.adversary]
        near = _near(targets, rows, self.reading, apart_of(knowledge, seen))
        score = torch.full((len(targets), knowledge.n_users), UNSEEN)
        score[:, seen] = near
        return score[:, question.client]


@dataclass(frozen=True, kw_only=True)
class PeerCommunityThroughItems:
    """The chain at nodes of a gossip: which item rows did the sender's own training move, and how similar are these
    items to the targets (Jaccard)? It needs nobody's vector. For matrix factorization (one item table of vectors) and
    for PRME-G.

    `attacks.moved` says which rows moved. As many as a client has items on average (`popularity` must be public) are
    taken for its own. It holds two item tables for each adversary.
    """

    keep: Keeping = "latest"
    colluders: float = 0.0  # as `PeerCommunity` has it

    vantage: ClassVar[type[Peers]] = Peers
    question: ClassVar[type[WhoBelongs]] = WhoBelongs

    def __post_init__(self) -> None:
        PeerCommunity(keep=self.keep, colluders=self.colluders)  # the same is wrong with both

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything."""
        return {**PeerCommunity().init(knowledge), **nothing_common(knowledge, len(targets_of(knowledge)))}

    def answer(self, knowledge: Knowledge, state: State, question: WhoBelongs) -> Tensor:
        """The scores as they are kept."""
        return PeerCommunity().answer(knowledge, state, question)

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """Score every push for the groups that received it, if they received something before this tick."""
        if isinstance(message, Disclosure) or not len(message.model):
            return state
        state, who, what = received(knowledge, state, message)
        if not len(who):
            return state
        models, direction = message.params[table_of(knowledge)], directions(knowledge, message)  # f32[m, I, d]
        along, targets = None if direction is None else direction[what], targets_of(knowledge)
        side, size = popular_side(knowledge), mean_items(knowledge)
        sender = senders(message)
        apart = apart_of(knowledge, sender)
        score = _of_moved_rows(models, state["common"], who, what, along, side, targets, size, apart)
        return PeerCommunity(keep=self.keep).keeping(state, who, sender[what], score)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _near(targets: Tensor, chance: Tensor, reading: Reading, apart: Tensor | None) -> Tensor:
    """How near users are to targets by the probabilities that items are theirs, f32[A, I], f32[m, I] -> f32[A, m].

    Without the items that do not count for a user, f32[m, I].
    """
    size = targets.sum(1, keepdim=True)
    if apart is not None:
        chance, size = chance * (1 - apart), targets @ (1 - apart).T
    both = targets @ chance.T
    if reading == "count":
        return both
    return both / (size + chance.sum(1) - both).clamp(min=TINY)


def _of_moved_rows(
    models: Tensor,
    common: Tensor,
    who: Tensor,
    what: Tensor,
    direction: Tensor | None,
    side: Tensor,
    targets: Tensor,
    size: int,
    apart: Tensor | None = None,
) -> Tensor:
    """Jaccard of the rows that moved most with the targets, for pairs of an adversary and a model, f32[k].

    f32[m, I, d], f32[A, I, d], i64[k] twice, f32[k, d], f32[I] and f32[A, I]; as in `moved_rows`. Items of f32[m, I]
    that do not count for a model are in neither set.
    """
    along = leading(models, common, who, what) if direction is None else direction
    score = torch.empty(len(who))
    similar_by_moved(
        *(each.contiguous().numpy() for each in (models, common, who, what, along, side)),
        direction is not None,
        targets.contiguous().numpy(),
        (torch.empty(0, 0) if apart is None else apart).contiguous().numpy(),
        min(size, models.shape[1]),
        score.numpy(),
    )
    return score
