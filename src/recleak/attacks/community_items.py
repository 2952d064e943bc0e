"""The chain to communities: first which items are a sender's own, then who is similar to the targets by these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge, State, WhichItems, WhoBelongs
from recleak.attacks.community import (
    TINY,
    UNSEEN,
    WEIGHT,
    Keeping,
    PeerCommunity,
    groups_of,
    mean_items,
    targets_of,
)
from recleak.attacks.membership import FromUploads, pairs_with_odds
from recleak.errors import ConfigError
from recleak.kernels_moved import add_models, similar_by_moved, spread_apart
from recleak.models.mf import GMF
from recleak.wire import Disclosure, PeerMessage, Peers, Push, Server, ServerMessage

Reading = Literal["jaccard", "count"]


@dataclass(frozen=True, kw_only=True)
class CommunityThroughItems:
    """First which items are a client's own, from its uploads, then who is similar to the targets by these: expected
    Jaccard, the overlap and the union each by the probabilities of items. It needs nobody's vector.

    reading "count" instead: the expected number of targets that are the client's, to find who has any.
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
        near = _near(targets, rows, self.reading)
        score = torch.full((len(targets), knowledge.n_users), UNSEEN)
        score[:, seen] = near
        return score[:, question.client]


@dataclass(frozen=True, kw_only=True)
class PeerCommunityThroughItems:
    """The chain at nodes of a gossip: which item rows did the sender's own training move, and how similar are these
    items to the targets (Jaccard)? It needs nobody's vector. For matrix factorization (one item table of vectors).

    What a network has in common is taken away: the mean of the models that the adversary received in earlier ticks,
    where each tick counts twice as much as the one before. A client's own items move along one direction (in GMF along
    h * u, its negatives against it), so with the user's vector sent, that is the direction; without it, the leading one
    of what is left, f32[I, d], with the sign that makes few rows large and many small. As many rows as a client has
    items on average (`popularity` must be public) are taken for its own. It holds two item tables for each adversary.
    """

    keep: Keeping = "latest"
    colluders: float = 0.0  # as `PeerCommunity` has it

    vantage: ClassVar[type[Peers]] = Peers
    question: ClassVar[type[WhoBelongs]] = WhoBelongs

    def __post_init__(self) -> None:
        PeerCommunity(keep=self.keep, colluders=self.colluders)  # the same is wrong with both

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything."""
        adversaries = len(targets_of(knowledge))
        part = next(part for part in knowledge.components if part.name == _table(knowledge))
        nothing = torch.zeros(adversaries, knowledge.n_items, *part.shape)
        state = {"common": nothing, "weight": torch.zeros(adversaries), "tick": torch.tensor([-1])}
        return {**PeerCommunity().init(knowledge), **state, "sum": nothing, "count": torch.zeros(adversaries)}

    def answer(self, knowledge: Knowledge, state: State, question: WhoBelongs) -> Tensor:
        """The scores as they are kept."""
        return PeerCommunity().answer(knowledge, state, question)

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """Score every push for the groups that received it, if they received something before this tick."""
        if isinstance(message, Disclosure) or not len(message.model):
            return state
        if int(state["tick"]) != message.round:
            state = _next_tick(state, message.round)
        models, direction = message.params[_table(knowledge)], _directions(knowledge, message)  # f32[m, I, d]
        of_model = torch.empty(len(models), dtype=torch.int64).index_copy_(0, message.model, message.sender)
        adversary, push = groups_of(knowledge)[:, message.receiver].nonzero(as_tuple=True)
        pair = torch.unique(torch.stack([adversary, message.model[push]]), dim=1)  # colluders may receive a model twice
        total, count = state["sum"].clone(), state["count"] + torch.bincount(pair[0], minlength=len(state["count"]))
        add_models(models.numpy(), *pair.numpy(), total.numpy())
        who, what = pair[:, state["weight"][pair[0]] > 0]
        if len(who):
            along, targets = None if direction is None else direction[what], targets_of(knowledge)
            score = _of_moved_rows(models, state["common"], who, what, along, targets, mean_items(knowledge))
            state = PeerCommunity(keep=self.keep).keeping(state, who, of_model[what], score)
        return {**state, "sum": total, "count": count}


# --- pieces -----------------------------------------------------------------------------------------------------------


def _near(targets: Tensor, chance: Tensor, reading: Reading) -> Tensor:
    """How near users are to targets by the probabilities that items are theirs, f32[A, I], f32[m, I] -> f32[A, m]."""
    if reading == "count":
        return targets @ chance.T
    both = targets @ chance.T
    return both / (targets.sum(1, keepdim=True) + chance.sum(1) - both).clamp(min=TINY)


def _next_tick(state: State, tick: int) -> State:
    """What was received in the last tick is what models have in common from now on, with half of what was before."""
    before, count = state["weight"] / 2, state["count"]
    weight = before + count
    share = (before / weight.clamp(min=TINY)).view(-1, 1, 1)
    common = share * state["common"] + state["sum"] / weight.clamp(min=TINY).view(-1, 1, 1)
    fresh = {"sum": torch.zeros_like(common), "count": torch.zeros_like(count), "tick": torch.tensor([tick])}
    return {**state, **fresh, "common": common, "weight": weight}


def _of_moved_rows(
    models: Tensor, common: Tensor, who: Tensor, what: Tensor, direction: Tensor | None, targets: Tensor, size: int
) -> Tensor:
    """Jaccard of the rows that moved most with the targets, for pairs of an adversary and a model, f32[k].

    f32[m, I, d], f32[A, I, d], i64[k] twice, f32[k, d] and f32[A, I]. Without a direction it is the one in which the
    rows differ most from 0, towards the few large ones: the third moment of the projections is positive.
    """
    pairs = (models.contiguous().numpy(), common.numpy(), who.contiguous().numpy(), what.contiguous().numpy())
    along = direction
    if along is None:
        spread = torch.empty(len(who), models.shape[2], models.shape[2], dtype=torch.float64)
        spread_apart(*pairs, spread.numpy())
        along = torch.linalg.eigh(spread).eigenvectors[:, :, -1].float()
    score = torch.empty(len(who))
    similar_by_moved(
        *pairs,
        along.contiguous().numpy(),
        direction is not None,
        targets.contiguous().numpy(),
        min(size, models.shape[1]),
        score.numpy(),
    )
    return score


def _table(knowledge: Knowledge) -> str:
    """The one item table, of vectors."""
    tables = [part for part in knowledge.components if part.storage == "per_item" and part.shared]
    if len(tables) != 1 or len(tables[0].shape) != 1:
        names = ", ".join(part.name for part in tables) or "none"
        raise ConfigError(f"The chain at nodes needs one shared item table of vectors, got {names}.")
    return tables[0].name


def _directions(knowledge: Knowledge, message: Push) -> Tensor | None:
    """Along which the own items of each sender move in GMF, h * u, f32[m, d]; None where vectors are not sent."""
    params = message.params
    if type(knowledge.model) is not GMF or "user" not in params or WEIGHT not in params:
        return None
    m = len(params["user"])
    of_model = torch.empty(m, dtype=torch.int64).index_copy_(0, message.model, message.sender)
    return params["user"][torch.arange(m), of_model] * params[WEIGHT].squeeze(-1)
