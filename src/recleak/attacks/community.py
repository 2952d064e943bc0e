"""Community detection (CDA: Belal et al. 2023, Algorithm 1): whose models fit a set of target items?

A adversaries attack at once, each with target items of its own: `targets` f32[A, I] (0 or 1) of the public knowledge.
A received model is scored on the targets, and an adversary ranks senders by the scores of what it received of them.

    confidence     eq. 10: the mean of the chances that the model gives the target items
    calibrated     that minus the mean over all items: some models are confident of everything
    standardized   the mean score of the targets, in standard deviations of the model's scores above their mean
    jaccard        the items that the model scores highest are taken for the sender's own, as many as a client has on
                   average (`popularity` must be public); their Jaccard similarity to the targets
    ndcg           each target is ranked against sampled items that are no target: the mean NDCG (as the published code)
    random         a number that has nothing to do with the model: the null
    activity       how many item rows the sender's first upload has: the null of a server that looks for people who have
                   some items, since who has many items has any

A score needs the sender's vector. If it is not shared, the adversary has to use another one:

    sent      the sender's, as received
    told      of each adversary its own, or that of a user who sides with it, from `Disclosure` messages: the user of
              the public `leaders`, i64[A], or user a of adversary a
    mean      the mean of those who side with it, from the same messages: the public `groups`, bool[A, U]
    fitted    one for each adversary that fits its targets best in what was broadcast (a server only)

Targets in the row of a sender of the public `excluded`, f32[U, I], do not count for its models: with everybody's own
items there, targets share none with a victim's history (an experiment; no adversary knows them). What targets are
compared with, and what a vector is fitted to, stays as it is.

Models of what comes next are scored on target transitions instead: see `attacks.transitions`. Behind secure
aggregation: see `attacks.community_sums`.

Axis letters: A adversaries, U users, I items, m models, n pushes, k pairs of an adversary and a model, t targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge, State, WhoBelongs
from recleak.attacks.community_targets import (
    apart_of,
    groups_of,
    jaccard,
    mean_items,
    padded,
    places_of,
    targets_of,
    totals,
)
from recleak.attacks.community_vectors import FITTED, TOLD, Vector, fitted, kept_parts, nothing_known, vectors_for
from recleak.attacks.transitions import of_changes, of_models
from recleak.errors import ConfigError
from recleak.kernels_gmf import score_changed, score_items, score_pairs, standardize_pairs
from recleak.models.base import Params
from recleak.models.mf import GMF
from recleak.update import Update
from recleak.wire import Broadcast, Disclosure, PeerMessage, Peers, Server, ServerMessage, Upload

Scoring = Literal["confidence", "calibrated", "standardized", "jaccard", "ndcg", "random", "activity"]
Keeping = Literal["latest", "best"]

UNSEEN = float("-inf")  # the score of who never sent anything
_RECEIVED = "received/"  # before the names of components in the state
_SAMPLE = 200  # random items whose mean stands for that of all
NUMBERS = 1 << 24  # of gathered parameters at a time
TINY = 1e-12
WEIGHT, _BIAS = "head.1.weight", "head.1.bias"  # of GMF


@dataclass(frozen=True, kw_only=True)
class ScoredCommunity:
    """What the attack does with models, wherever they come from."""

    scoring: Scoring = "confidence"
    vector: Vector = "sent"
    keep: Keeping = "latest"  # of several scores of one sender
    negatives: int = 99  # of ndcg, for each target
    cutoff: int = 20  # of ndcg
    colluders: float = 0.0  # the share of all users that side with each adversary; who places adversaries reads it
    seed: int = 0

    question: ClassVar[type[WhoBelongs]] = WhoBelongs

    def __post_init__(self) -> None:
        for name, kind in (("scoring", Scoring), ("vector", Vector), ("keep", Keeping)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(kind))}.")
        if not 0 <= self.colluders < 1:
            raise ConfigError(f"colluders is {self.colluders}, expected a share of at least 0 and less than 1.")

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has sent anything."""
        targets = targets_of(knowledge)
        return {"score": torch.full((len(targets), knowledge.n_users), UNSEEN)}

    def answer(self, knowledge: Knowledge, state: State, question: WhoBelongs) -> Tensor:
        """The scores as they are kept."""
        return state["score"][question.adversary][:, question.client]

    def _listened(self, knowledge: Knowledge, state: State, message: Disclosure) -> State:
        """The state with what users tell about what they keep."""
        told = dict(state)
        for part in kept_parts(knowledge):
            if part.name in message.values:
                name = TOLD + part.name
                before = told.get(name, torch.full((knowledge.n_users, *part.shape), float("nan")))
                told[name] = before.index_copy(0, message.client, message.values[part.name])
        return told

    def _vectors(self, knowledge: Knowledge, state: State, own: Params) -> Params | None:
        """What models lack; None if nothing was told yet. Who guesses needs none."""
        if self.scoring in ("random", "activity"):
            return {}
        return vectors_for(self._way(knowledge), knowledge, state, own)

    def _way(self, knowledge: Knowledge) -> Vector:
        """Whose vectors are used: what is sent is. Any other is one of each adversary."""
        return self.vector if kept_parts(knowledge) else "sent"

    def keeping(self, state: State, adversary: Tensor, sender: Tensor, score: Tensor) -> State:
        """The state with new scores, i64[k], i64[k], f32[k]: the last of a pair, or the best."""
        kept = state["score"].clone()
        if self.keep == "latest":
            kept[adversary, sender] = score
        else:
            flat = kept.view(-1)
            flat.scatter_reduce_(0, adversary * kept.shape[1] + sender, score, "amax")
        return {**state, "score": kept}

    def _scores(
        self,
        knowledge: Knowledge,
        models: Params,
        vectors: Params,
        sender: Tensor,
        adversary: Tensor,
        model: Tensor,
        changes: _Changes | None = None,
    ) -> Tensor:
        """Of pairs of an adversary and a model, i64[k] twice -> f32[k].

        `models` has dense components as f32[m, *shape], tables as f32[m, I, *shape], and `sender` says whose they are,
        i64[m]; `vectors` are what users have of their own, of senders, f32[m, *shape], or of adversaries, f32[A, ...].
        `changes` may stand for a table.
        """
        if self.scoring == "random":
            return self.guess(adversary, sender[model])
        told = self._way(knowledge) != "sent"
        if knowledge.model.needs_transitions:
            given = (models, vectors["user"], adversary, model)
            return of_models(knowledge, self.scoring, *given, told=told, seed=self.seed)
        apart = apart_of(knowledge, sender)
        if told and self.scoring in ("ndcg", "jaccard"):
            return self._of_all_items(knowledge, models, vectors, apart, adversary, model)
        if told:
            return self._of_pairs(knowledge, models, vectors, apart, adversary, model)
        return self.of_logits(knowledge, logits_of(knowledge, models, vectors, changes), apart)[adversary, model]

    def guess(self, adversary: Tensor, sender: Tensor) -> Tensor:
        """A number for each pair that has nothing to do with any model, i64[k] twice -> f32[k]."""
        lot = random.uniform(self.seed, "random users", adversary.numpy(), sender.numpy())
        return torch.from_numpy(lot).float()

    def of_logits(self, knowledge: Knowledge, logits: Tensor, apart: Tensor | None) -> Tensor:
        """Of all adversaries and m models by the scores of all items, f32[m, I], f32[m, I] -> f32[A, m]."""
        targets = targets_of(knowledge)
        if self.scoring == "ndcg":
            return torch.stack([self._ndcg(logits, mine, a, apart) for a, mine in enumerate(targets)])
        if apart is None:
            counts, size = logits.new_ones(()), targets.sum(1, keepdim=True).clamp(min=1)  # f32[A, 1]
        else:
            counts = 1 - apart  # f32[m, I]: targets that count
            size = totals(targets, counts).clamp(min=1)  # f32[A, m]
        match self.scoring:
            case "confidence":
                return totals(targets, torch.sigmoid(logits) * counts) / size
            case "calibrated":
                chance = torch.sigmoid(logits)
                return totals(targets, chance * counts) / size - chance.mean(1)
            case "standardized":
                return (totals(targets, logits * counts) / size - logits.mean(1)) / logits.std(1).clamp(min=TINY)
            case _:
                return jaccard(targets, _claimed(knowledge, logits) * counts, size)

    def _of_all_items(
        self,
        knowledge: Knowledge,
        models: Params,
        vectors: Params,
        apart: Tensor | None,
        adversary: Tensor,
        model: Tensor,
    ) -> Tensor:
        """With a vector of each adversary where the scores of all items count: one adversary after the other."""
        out, targets = torch.full((len(adversary),), UNSEEN), targets_of(knowledge)
        for a in torch.unique(adversary).tolist():
            pair = (adversary == a).nonzero().squeeze(1)
            some = {name: value[model[pair]] for name, value in models.items()}
            own = {name: value[a].expand(len(pair), *value.shape[1:]) for name, value in vectors.items()}
            logits = logits_of(knowledge, some, own)  # f32[k, I]
            off = None if apart is None else apart[model[pair]]
            if self.scoring == "ndcg":
                out[pair] = self._ndcg(logits, targets[a], a, off)
            else:
                mine, counts = targets[a : a + 1], torch.ones_like(logits) if off is None else 1 - off
                size = totals(mine, counts).clamp(min=1)
                out[pair] = jaccard(mine, _claimed(knowledge, logits) * counts, size)[0]
        return out

    def _of_pairs(
        self,
        knowledge: Knowledge,
        models: Params,
        vectors: Params,
        apart: Tensor | None,
        adversary: Tensor,
        model: Tensor,
    ) -> Tensor:
        """With a vector of each adversary: its targets are all that is scored, and for a mean a sample of items."""
        targets = targets_of(knowledge)
        tables = [part.name for part in knowledge.components if part.storage == "per_item"]
        sample = torch.from_numpy(
            random.bits(self.seed, "sample of items", range(knowledge.n_items)).argsort()[:_SAMPLE]
        )
        beside = sample if self.scoring != "confidence" else sample[:0]
        if type(knowledge.model) is GMF and set(vectors) == {"user"}:
            return self._of_pairs_compiled(models, vectors["user"], targets, apart, beside, adversary, model)
        item, inside = padded(targets)  # i64[A, t], bool[A, t]
        out = torch.full((len(adversary),), UNSEEN)
        size = sum(models[name][0, 0].numel() for name in tables) if len(model) else 1
        for some in _similar(inside.sum(1)[adversary], len(beside), size):
            who, what_model = adversary[some], model[some]
            wide = int(inside[who].sum(1).max())
            what = torch.cat([item[who, :wide], beside.expand(len(some), -1)], 1)  # i64[k, B]
            params = {
                name: value[what_model.unsqueeze(1), what] if name in tables else value[what_model]
                for name, value in models.items()
            }
            params |= {name: value[who] for name, value in vectors.items()}
            with torch.no_grad():
                logits = knowledge.model.logits(params, nothing_known(*what.shape))  # f32[k, B]
            mine = inside[who, :wide]
            if apart is not None:
                mine = mine & (apart[what_model.unsqueeze(1), what[:, :wide]] == 0)
            out[some] = self._of_targets(logits, mine)
        return out

    def _of_pairs_compiled(
        self,
        models: Params,
        vector: Tensor,
        targets: Tensor,
        apart: Tensor | None,
        sample: Tensor,
        adversary: Tensor,
        model: Tensor,
    ) -> Tensor:
        """The same for generalized matrix factorization."""
        item, offset = places_of(targets)
        off = torch.empty(0, 0) if apart is None else apart
        head, out = models[WEIGHT].squeeze(-1), torch.empty(len(adversary))
        bias = models[_BIAS].squeeze(-1) if _BIAS in models else torch.zeros(len(head))
        table = models["item"]
        if self.scoring == "standardized":
            center = table[:, sample].mean(1)
            around = table[:, sample] - center.unsqueeze(1)  # f32[m, S, d]
            beside: tuple[Tensor, ...] = (center, around.transpose(1, 2) @ around / max(len(sample) - 1, 1))
        else:
            beside = (sample,)
        given = (table, head, bias, vector, item, offset, off, *beside, adversary, model)
        compiled = standardize_pairs if self.scoring == "standardized" else score_pairs
        compiled(*(each.contiguous().numpy() for each in given), out.numpy())
        return out

    def _of_targets(self, logits: Tensor, inside: Tensor) -> Tensor:
        """f32[k, B], bool[k, t] -> f32[k]: the first t items are targets where `inside`, the rest is a sample."""
        wide = inside.shape[1]
        weight = inside / inside.sum(1, keepdim=True).clamp(min=1)
        value = logits if self.scoring == "standardized" else torch.sigmoid(logits)
        mean, rest = (value[:, :wide] * weight).sum(1), value[:, wide:]
        match self.scoring:
            case "confidence":
                return mean
            case "calibrated":
                return mean - rest.mean(1)
            case _:
                return (mean - rest.mean(1)) / rest.std(1).clamp(min=TINY)

    def _ndcg(self, logits: Tensor, targets: Tensor, a: int, apart: Tensor | None) -> Tensor:
        """By m models for adversary a, each target against sampled other items: f32[m, I], f32[I] -> f32[m]."""
        own, others = targets.nonzero().squeeze(1), (targets == 0).nonzero().squeeze(1)
        if not len(own) or not len(others):
            return torch.zeros(len(logits))
        lot = random.below(len(others), self.seed, "ndcg", a, own.numpy()[:, None], range(self.negatives))
        against = logits[:, others[torch.from_numpy(lot)]]  # f32[m, t, negatives]
        best = logits[:, own].unsqueeze(2)
        rank = (against > best).sum(2) + 0.5 * (against == best).sum(2)
        gain = torch.where(rank < self.cutoff, 1 / torch.log2(rank + 2), 0.0)  # f32[m, t]
        if apart is None:
            return gain.mean(1)
        counts = 1 - apart[:, own]
        return (gain * counts).sum(1) / counts.sum(1).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class ServerCommunity(ScoredCommunity):
    """At the server of a federation: every client's model is what was broadcast and what it changed."""

    vantage: ClassVar[type[Server]] = Server

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """Keep the broadcast, and score every upload."""
        if isinstance(message, Disclosure):
            return self._listened(knowledge, state, message)
        if isinstance(message, Broadcast):
            kept = {name: value for name, value in state.items() if not name.startswith(_RECEIVED)}
            kept |= {_RECEIVED + name: value.clone() for name, value in message.params.items()}
            if self._way(knowledge) == "fitted":
                before = {name.removeprefix(FITTED): value for name, value in state.items() if name.startswith(FITTED)}
                found = fitted(knowledge, message.params, self.seed, before)
                kept |= {FITTED + name: value for name, value in found.items()}
            return kept
        if not isinstance(message, Upload):
            return state
        received = {name.removeprefix(_RECEIVED): value for name, value in state.items() if name.startswith(_RECEIVED)}
        if not received or not message.update.n_clients:
            return state
        if self.scoring == "activity":
            return self._counted(state, message.update)
        if knowledge.model.needs_transitions:
            return self._fold_changes(knowledge, state, message.update, received)
        update, models, own = message.update, dict[str, Tensor](), dict[str, Tensor]()
        direct = type(knowledge.model) is GMF and self._way(knowledge) == "sent"
        changes = _Changes(received["item"], update) if direct else None
        for part in knowledge.components:
            if not part.shared or (part.storage == "per_item" and direct):
                continue
            whole = received[part.name]
            if part.storage == "per_item":
                table = whole.expand(update.n_clients, *whole.shape).clone()
                place = update.owner * len(whole) + update.item
                table.flatten(0, 1).index_add_(0, place, update.rows[part.name])
                models[part.name] = table
            elif part.storage == "per_user":
                own[part.name] = whole[update.client] + update.values[part.name]
            else:
                models[part.name] = whole + update.values[part.name]
        vectors = self._vectors(knowledge, state, own)
        if vectors is None:
            return state
        adversary, model = all_pairs(len(targets_of(knowledge)), update.n_clients)
        score = self._scores(knowledge, models, vectors, update.client, adversary, model, changes)
        return self.keeping(state, adversary, update.client[model], score)

    def _fold_changes(self, knowledge: Knowledge, state: State, update: Update, received: Params) -> State:
        """The same for models of what comes next: no client's tables are made whole."""
        own = {
            part.name: received[part.name][update.client] + update.values[part.name]
            for part in knowledge.components
            if part.shared and part.storage == "per_user"
        }
        vectors = self._vectors(knowledge, state, own)
        if vectors is None:
            return state
        adversary, model = all_pairs(len(targets_of(knowledge)), update.n_clients)
        if self.scoring == "random":
            score = self._scores(knowledge, {}, vectors, update.client, adversary, model)
        else:
            told = self._way(knowledge) != "sent"
            given = (received, update, vectors["user"])
            score = of_changes(knowledge, self.scoring, *given, told=told, seed=self.seed)[adversary, model]
        return self.keeping(state, adversary, update.client[model], score)

    def _counted(self, state: State, update: Update) -> State:
        """With the numbers of rows of those who were not heard of before."""
        kept = state["score"].clone()
        new = ~torch.isfinite(kept[0, update.client])
        kept[:, update.client[new]] = update.offset.diff()[new].float()
        return {**state, "score": kept}


@dataclass(frozen=True, kw_only=True)
class PeerCommunity(ScoredCommunity):
    """At nodes of a gossip: adversary a is the a-th group of the public `groups`, bool[A, nodes], and has what any
    member of it received.
    """

    vantage: ClassVar[type[Peers]] = Peers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scoring == "activity":
            raise ConfigError("scoring is 'activity', expected another one: whole models tell no numbers of rows.")
        if self.vector == "fitted":
            raise ConfigError(
                "vector is 'fitted', expected 'sent', 'told' or 'mean': no model is broadcast in a gossip."
            )

    def fold(self, knowledge: Knowledge, state: State, message: PeerMessage) -> State:
        """Score every push for the groups that received it."""
        if isinstance(message, Disclosure):
            return self._listened(knowledge, state, message)
        models, own = dict[str, Tensor](), dict[str, Tensor]()
        m = int(message.model.max()) + 1 if len(message.model) else 0
        if not m:
            return state
        of_model = torch.empty(m, dtype=torch.int64).index_copy_(0, message.model, message.sender)
        for part in knowledge.components:
            if part.shared and part.storage == "per_user":
                own[part.name] = message.params[part.name][torch.arange(m), of_model]
            elif part.shared:
                models[part.name] = message.params[part.name]
        vectors = self._vectors(knowledge, state, own)
        if vectors is None:
            return state
        adversary, push = groups_of(knowledge)[:, message.receiver].nonzero(as_tuple=True)
        score = self._scores(knowledge, models, vectors, of_model, adversary, message.model[push])
        return self.keeping(state, adversary, message.sender[push], score)


# --- pieces -----------------------------------------------------------------------------------------------------------


def all_pairs(adversaries: int, models: int) -> tuple[Tensor, Tensor]:
    """Every adversary with every model, i64[A m] each; one model after the other, as each fits a cache."""
    return torch.arange(adversaries).repeat(models), torch.arange(models).repeat_interleave(adversaries)


class _Changes(NamedTuple):
    """Item tables that are changes of one that was received, f32[I, d]."""

    received: Tensor
    update: Update


def logits_of(knowledge: Knowledge, models: Params, vectors: Params, changes: _Changes | None = None) -> Tensor:
    """The scores of all items by m models, f32[m, I]."""
    m = len(next(iter(models.values())))
    if type(knowledge.model) is GMF:
        both, out = {**models, **vectors}, torch.empty(m, knowledge.n_items)
        turned, bias = both[WEIGHT].squeeze(-1) * both["user"], both.get(_BIAS, torch.zeros(m, 1)).squeeze(-1)
        if changes is None:
            score_items(*(each.contiguous().numpy() for each in (models["item"], turned, bias, out)))
        else:
            of = changes.update
            given = (changes.received, of.rows["item"], of.item, of.offset, turned, bias, out)
            score_changed(*(each.contiguous().numpy() for each in given))
        return out
    batch = nothing_known(m, knowledge.n_items)
    neighbors = {
        part.name: models[part.name].new_zeros(m, *part.shape)
        for part in knowledge.components
        if part.storage == "per_item" and knowledge.model.reads_neighbors
    }
    with torch.no_grad():
        return knowledge.model.logits({**models, **vectors}, replace(batch, neighbors=neighbors))


def _claimed(knowledge: Knowledge, logits: Tensor) -> Tensor:
    """The highest scores of each model, as many as a client has items on average, f32[m, I] of 0 and 1."""
    count = mean_items(knowledge)
    top = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return torch.zeros_like(logits).scatter_(1, top, 1.0)


def _similar(count: Tensor, beside: int, size: int) -> Iterator[Tensor]:
    """Places of pairs with about as many targets, so many at a time that memory is bounded, i64[k]."""
    order = count.argsort()
    width, start = (count[order] + beside) * size, 0
    while start < len(order):
        some = width[start : start + max(1, NUMBERS // max(1, int(width[start])))]
        fits = torch.arange(1, len(some) + 1) * some <= NUMBERS  # ascending, so these are the first ones
        end = start + max(1, int(fits.sum()))
        yield order[start:end]
        start = end
