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
    mean      the mean of all that were told
    fitted    one for each adversary that fits its targets best in what was broadcast (a server only)

Items of senders in the public `excluded`, f32[U, I], do not count: with their own items there, targets share none with
a victim's history (an experiment; no adversary knows them).

Models of what comes next are scored on target transitions instead: see `attacks.transitions`.

Axis letters: A adversaries, U users, I items, m models, n pushes, k pairs of an adversary and a model, t targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from recleak import random
from recleak.attacks.base import Knowledge, State, WhoBelongs
from recleak.attacks.transitions import fitted as fitted_to_transitions
from recleak.attacks.transitions import of_changes, of_models
from recleak.errors import ConfigError
from recleak.kernels_gmf import score_changed, score_items, score_pairs, standardize_pairs, sum_targets
from recleak.models.base import Batch, Params
from recleak.models.components import Component
from recleak.models.mf import GMF
from recleak.update import Update
from recleak.wire import Broadcast, Disclosure, PeerMessage, Peers, Server, ServerMessage, Upload

Scoring = Literal["confidence", "calibrated", "standardized", "jaccard", "ndcg", "random", "activity"]
Vector = Literal["sent", "told", "mean", "fitted"]
Keeping = Literal["latest", "best"]

UNSEEN = float("-inf")  # the score of who never sent anything
_RECEIVED, _TOLD, _FITTED = "received/", "told/", "fitted/"  # before the names of components in the state
_SAMPLE = 200  # random items whose mean stands for that of all
NUMBERS = 1 << 24  # of gathered parameters at a time
_STEPS, _AGAIN, _RATE = 60, 10, 0.1  # of fitting a vector: the first time, and from round to round
_FEW = 100  # targets that it is fitted to
TINY = 1e-12
_DENSE = 0.01  # the share of targets among all items above which a matrix product is faster
_FOUND = WeakIdKeyDictionary()  # the places of targets, as long as these are in use
_FITS = WeakIdKeyDictionary()  # of targets and a seed: what vectors are fitted to
WEIGHT, _BIAS = "head.1.weight", "head.1.bias"  # of GMF


@dataclass(frozen=True, kw_only=True)
class _Community:
    """What the attack does with models, wherever they come from."""

    scoring: Scoring = "confidence"
    vector: Vector = "sent"
    keep: Keeping = "latest"  # of several scores of one sender
    negatives: int = 99  # of ndcg, for each target
    cutoff: int = 20  # of ndcg
    seed: int = 0

    question: ClassVar[type[WhoBelongs]] = WhoBelongs

    def __post_init__(self) -> None:
        for name, kind in (("scoring", Scoring), ("vector", Vector), ("keep", Keeping)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(kind))}.")

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
        for part in _kept(knowledge):
            if part.name in message.values:
                name = _TOLD + part.name
                before = told.get(name, torch.full((knowledge.n_users, *part.shape), float("nan")))
                told[name] = before.index_copy(0, message.client, message.values[part.name])
        return told

    def _vectors(self, knowledge: Knowledge, state: State, own: Params, m: int) -> Params | None:
        """What models lack; None if nothing was told yet. Who guesses needs none."""
        if self.scoring in ("random", "activity"):
            return {}
        return _vectors(self._way(knowledge), knowledge, state, own, m)

    def _way(self, knowledge: Knowledge) -> Vector:
        """Whose vectors are used: what is sent is."""
        return self.vector if _kept(knowledge) else "sent"

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
            lot = random.uniform(self.seed, "random users", adversary.numpy(), sender[model].numpy())
            return torch.from_numpy(lot).float()
        told = self._way(knowledge) in ("told", "fitted")
        if knowledge.model.needs_transitions:
            given = (models, vectors["user"], adversary, model)
            return of_models(knowledge, self.scoring, *given, told=told, seed=self.seed)
        targets = targets_of(knowledge)
        if told and self.scoring in ("ndcg", "jaccard"):
            return self._of_all_items(knowledge, models, vectors, targets, adversary, model)
        if told:
            return self._of_pairs(knowledge, models, vectors, targets, adversary, model)
        logits = _logits(knowledge, models, vectors, changes)  # f32[m, I]
        if self.scoring == "ndcg":
            return torch.stack([self._ndcg(logits, mine, a) for a, mine in enumerate(targets)])[adversary, model]
        if "excluded" in knowledge.public:
            counts = 1 - knowledge.public["excluded"][sender]  # f32[m, I]: items that count
            size = _totals(targets, counts).clamp(min=1)  # f32[A, m]
        else:
            counts, size = logits.new_ones(()), targets.sum(1, keepdim=True).clamp(min=1)  # f32[A, 1]
        match self.scoring:
            case "confidence":
                score = _totals(targets, torch.sigmoid(logits) * counts) / size
            case "calibrated":
                chance = torch.sigmoid(logits)
                score = _totals(targets, chance * counts) / size - chance.mean(1)
            case "standardized":
                score = (_totals(targets, logits * counts) / size - logits.mean(1)) / logits.std(1).clamp(min=TINY)
            case "jaccard":
                score = _jaccard(targets, _claimed(knowledge, logits) * counts, size)
        return score[adversary, model]

    def _of_all_items(
        self, knowledge: Knowledge, models: Params, vectors: Params, targets: Tensor, adversary: Tensor, model: Tensor
    ) -> Tensor:
        """With a vector of each adversary where the scores of all items count: one adversary after the other."""
        out = torch.full((len(adversary),), UNSEEN)
        for a in torch.unique(adversary).tolist():
            pair = (adversary == a).nonzero().squeeze(1)
            some = {name: value[model[pair]] for name, value in models.items()}
            own = {name: value[a].expand(len(pair), *value.shape[1:]) for name, value in vectors.items()}
            logits = _logits(knowledge, some, own)  # f32[k, I]
            if self.scoring == "ndcg":
                out[pair] = self._ndcg(logits, targets[a], a)
            else:
                mine = targets[a : a + 1]
                out[pair] = _jaccard(mine, _claimed(knowledge, logits), mine.sum(1, keepdim=True).clamp(min=1))[0]
        return out

    def _of_pairs(
        self, knowledge: Knowledge, models: Params, vectors: Params, targets: Tensor, adversary: Tensor, model: Tensor
    ) -> Tensor:
        """With a vector of each adversary: its targets are all that is scored, and for a mean a sample of items."""
        tables = [part.name for part in knowledge.components if part.storage == "per_item"]
        sample = torch.from_numpy(
            random.bits(self.seed, "sample of items", range(knowledge.n_items)).argsort()[:_SAMPLE]
        )
        beside = sample if self.scoring != "confidence" else sample[:0]
        if type(knowledge.model) is GMF and set(vectors) == {"user"}:
            return self._of_pairs_compiled(models, vectors["user"], targets, beside, adversary, model)
        item, inside = _padded(targets)  # i64[A, t], bool[A, t]
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
                logits = knowledge.model.logits(params, _nothing_known(*what.shape))  # f32[k, B]
            out[some] = self._of_targets(logits, inside[who, :wide])
        return out

    def _of_pairs_compiled(
        self, models: Params, vector: Tensor, targets: Tensor, sample: Tensor, adversary: Tensor, model: Tensor
    ) -> Tensor:
        """The same for generalized matrix factorization."""
        item, offset = _places(targets)
        head, out = models[WEIGHT].squeeze(-1), torch.empty(len(adversary))
        bias = models[_BIAS].squeeze(-1) if _BIAS in models else torch.zeros(len(head))
        table = models["item"]
        if self.scoring == "standardized":
            apart = table[:, sample] - table[:, sample].mean(1, keepdim=True)  # f32[m, S, d]
            spread = apart.transpose(1, 2) @ apart / max(len(sample) - 1, 1)
            given = (table, head, vector, item, offset, table[:, sample].mean(1), spread, adversary, model)
            standardize_pairs(*(each.contiguous().numpy() for each in given), out.numpy())
        else:
            given = (table, head, bias, vector, item, offset, sample, adversary, model)
            score_pairs(*(each.contiguous().numpy() for each in given), out.numpy())
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

    def _ndcg(self, logits: Tensor, targets: Tensor, a: int) -> Tensor:
        """By m models for adversary a, each target against sampled other items: f32[m, I], f32[I] -> f32[m]."""
        own, others = targets.nonzero().squeeze(1), (targets == 0).nonzero().squeeze(1)
        if not len(own) or not len(others):
            return torch.zeros(len(logits))
        lot = random.below(len(others), self.seed, "ndcg", a, own.numpy()[:, None], range(self.negatives))
        against = logits[:, others[torch.from_numpy(lot)]]  # f32[m, t, negatives]
        best = logits[:, own].unsqueeze(2)
        rank = (against > best).sum(2) + 0.5 * (against == best).sum(2)
        return torch.where(rank < self.cutoff, 1 / torch.log2(rank + 2), 0.0).mean(1)


@dataclass(frozen=True, kw_only=True)
class ServerCommunity(_Community):
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
                before = {
                    name.removeprefix(_FITTED): value for name, value in state.items() if name.startswith(_FITTED)
                }
                found = fitted(knowledge, message.params, self.seed, before)
                kept |= {_FITTED + name: value for name, value in found.items()}
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
        direct = type(knowledge.model) is GMF and self._way(knowledge) in ("sent", "mean")
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
        vectors = self._vectors(knowledge, state, own, update.n_clients)
        if vectors is None:
            return state
        adversary, model = _all_pairs(len(targets_of(knowledge)), update.n_clients)
        score = self._scores(knowledge, models, vectors, update.client, adversary, model, changes)
        return self.keeping(state, adversary, update.client[model], score)

    def _fold_changes(self, knowledge: Knowledge, state: State, update: Update, received: Params) -> State:
        """The same for models of what comes next: no client's tables are made whole."""
        own = {
            part.name: received[part.name][update.client] + update.values[part.name]
            for part in knowledge.components
            if part.shared and part.storage == "per_user"
        }
        vectors = self._vectors(knowledge, state, own, update.n_clients)
        if vectors is None:
            return state
        adversary, model = _all_pairs(len(targets_of(knowledge)), update.n_clients)
        if self.scoring == "random":
            score = self._scores(knowledge, {}, vectors, update.client, adversary, model)
        else:
            told = self._way(knowledge) in ("told", "fitted")
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
class PeerCommunity(_Community):
    """At nodes of a gossip: adversary a is the a-th group of the public `groups`, bool[A, nodes], and has what any
    member of it received.
    """

    colluders: float = 0.0  # the share of all nodes that side with each adversary; who places adversaries reads it

    vantage: ClassVar[type[Peers]] = Peers

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.colluders < 1:
            raise ConfigError(f"colluders is {self.colluders}, expected a share of at least 0 and less than 1.")
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
        vectors = self._vectors(knowledge, state, own, m)
        if vectors is None:
            return state
        adversary, push = groups_of(knowledge)[:, message.receiver].nonzero(as_tuple=True)
        score = self._scores(knowledge, models, vectors, of_model, adversary, message.model[push])
        return self.keeping(state, adversary, message.sender[push], score)


# --- pieces -----------------------------------------------------------------------------------------------------------


def targets_of(knowledge: Knowledge) -> Tensor:
    """What marks the community of each adversary, f32[A, I]."""
    if "targets" not in knowledge.public:
        raise ConfigError(
            "The attack needs target items, got none: give public={'targets': f32[A, I]}, 1 for a target."
        )
    return knowledge.public["targets"]


def groups_of(knowledge: Knowledge) -> Tensor:
    """The nodes of each adversary, bool[A, nodes]."""
    if "groups" not in knowledge.public:
        raise ConfigError(
            "The attack needs to know who is in it, got no groups: give public={'groups': bool[A, nodes]}."
        )
    groups, targets = knowledge.public["groups"], knowledge.public.get("targets")
    if targets is not None and len(groups) != len(targets):
        raise ConfigError(f"Got {len(groups)} groups and targets for {len(targets)}, expected as many.")
    return groups


def colluding(n_users: int, share: float, seed: int, leader: Tensor | None = None) -> Tensor:
    """Every node as an adversary, or the given ones, i64[A], with a random share of all nodes beside it, bool[A, U]."""
    leader = torch.arange(n_users) if leader is None else leader
    groups = torch.zeros(len(leader), n_users, dtype=torch.bool)
    groups[torch.arange(len(leader)), leader] = True
    count = round(share * n_users)
    if count:
        lot = random.bits(seed, "colluders", leader.numpy()[:, None], np.arange(n_users)).argsort(1)
        groups.scatter_(1, torch.from_numpy(lot[:, :count].copy()), True)
    return groups


def mean_items(knowledge: Knowledge) -> int:
    """How many items clients have on average."""
    if "popularity" not in knowledge.public:
        raise ConfigError("The attack needs to know how many items clients have on average: make popularity public.")
    return max(1, round(float(knowledge.public["popularity"].sum()) / knowledge.n_users))


def _all_pairs(adversaries: int, models: int) -> tuple[Tensor, Tensor]:
    """Every adversary with every model, i64[A m] each; one model after the other, as each fits a cache."""
    return torch.arange(adversaries).repeat(models), torch.arange(models).repeat_interleave(adversaries)


def _kept(knowledge: Knowledge) -> list[Component]:
    return [part for part in knowledge.components if not part.shared and part.storage != "per_item"]


def _vectors(how: Vector, knowledge: Knowledge, state: State, own: Params, m: int) -> Params | None:
    """What a model lacks, by component: of m models or of A adversaries; None if nothing was told yet."""
    kept = _kept(knowledge)
    if how == "sent":
        if kept:
            raise ConfigError(
                f"The attack uses what is sent, but {', '.join(part.name for part in kept)} is kept.\n"
                "  Choose another vector: 'told', 'mean' or 'fitted'."
            )
        return own
    prefix = _FITTED if how == "fitted" else _TOLD
    found = {part.name: state[prefix + part.name] for part in kept if prefix + part.name in state}
    if len(found) < len(kept):
        return None
    if how == "mean":
        return own | {name: value.nanmean(0).expand(m, *value.shape[1:]) for name, value in found.items()}
    if how == "fitted":
        return found
    leader = knowledge.public.get("leaders", torch.arange(len(targets_of(knowledge))))
    return {name: value[leader].nan_to_num() for name, value in found.items()}


def _nothing_known(clients: int, items: int) -> Batch:
    """Of the senders' own items the adversary knows nothing."""
    return Batch(own=torch.zeros(clients, items, dtype=torch.bool), degree=torch.ones(clients))


class _Changes(NamedTuple):
    """Item tables that are changes of one that was received, f32[I, d]."""

    received: Tensor
    update: Update


def _logits(knowledge: Knowledge, models: Params, vectors: Params, changes: _Changes | None = None) -> Tensor:
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
    batch = _nothing_known(m, knowledge.n_items)
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


def _places(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets of each adversary as items one after another, i64[T] and i64[A + 1]; found once for each tensor."""
    if targets not in _FOUND:
        owner, item = targets.nonzero(as_tuple=True)
        _FOUND[targets] = item.contiguous(), torch.searchsorted(owner, torch.arange(len(targets) + 1))
    places: tuple[Tensor, Tensor] = _FOUND[targets]
    return places


def _totals(targets: Tensor, value: Tensor) -> Tensor:
    """The sum over an adversary's targets of what a model gives items, f32[A, I], f32[m, I] -> f32[A, m].

    Of a large catalog hardly any item is a target: then only these are read.
    """
    item, offset = _places(targets)
    if len(item) > _DENSE * targets.numel():
        return targets @ value.T
    out = torch.empty(len(targets), len(value))
    sum_targets(*(each.contiguous().numpy() for each in (value, item, offset, out)))
    return out


def _jaccard(targets: Tensor, claims: Tensor, size: Tensor) -> Tensor:
    """f32[A, I], f32[m, I], f32[A, 1 or m] (how many targets) -> f32[A, m]."""
    both = _totals(targets, claims)
    return both / (size + claims.sum(1) - both)


def _padded(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets of each adversary as items, i64[A, t], and which of them are there, bool[A, t]."""
    count = targets.sum(1).long()
    order = targets.argsort(dim=1, descending=True, stable=True)[:, : max(1, int(count.max()))]
    return order, torch.arange(order.shape[1]) < count.unsqueeze(1)


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


def fitted(knowledge: Knowledge, params: Params, seed: int, before: Params | None = None) -> Params:
    """Of each adversary the values of what is kept that fit its targets best, against random items, with the parameters
    that were broadcast: f32[A, *shape]. At most `_FEW` targets count, drawn at random; `before` is where it starts.
    """
    if knowledge.model.needs_transitions:
        return fitted_to_transitions(knowledge, params, seed)
    what, label, weight = _examples(targets_of(knowledge), seed)
    adversary = np.arange(len(what))
    own = {
        part.name: (before[part.name] if before else _drawn(part, adversary, seed)).clone().requires_grad_()
        for part in _kept(knowledge)
    }
    fixed = {
        part.name: params[part.name][what]
        if part.storage == "per_item"
        else params[part.name].expand(len(what), *part.shape)
        for part in knowledge.components
        if part.shared
    }
    optimizer = torch.optim.Adam(list(own.values()), lr=_RATE)
    for _ in range(_AGAIN if before else _STEPS):
        optimizer.zero_grad()
        logits = knowledge.model.logits({**fixed, **own}, _nothing_known(*what.shape))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label, weight, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in own.items()}


def _examples(targets: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the vector of each adversary is fitted to: some targets and as many random items, i64[A, 2t], f32[A, 2t]
    their labels and f32[A, 2t] how much each counts. The same in all rounds, so found once for each tensor and seed.
    """
    found = _FITS.setdefault(targets, {})
    if seed not in found:
        item, inside = _padded(_some(targets, seed))
        place = np.arange(len(item))[:, None], np.arange(item.shape[1])
        lot = random.below(targets.shape[1], seed, "random items", *place)
        what = torch.cat([item, torch.from_numpy(lot)], 1)
        label = torch.cat([inside, torch.zeros_like(inside)], 1).float()
        found[seed] = what, label, torch.cat([inside, inside], 1) / inside.sum(1, keepdim=True).clamp(min=1)
    examples: tuple[Tensor, Tensor, Tensor] = found[seed]
    return examples


def _some(targets: Tensor, seed: int) -> Tensor:
    """At most so many targets of each adversary, f32[A, I]."""
    lot = random.uniform(seed, "some targets", np.arange(len(targets))[:, None], np.arange(targets.shape[1]))
    order = (torch.from_numpy(lot) * targets).topk(min(_FEW, targets.shape[1]), dim=1).indices
    return torch.zeros_like(targets).scatter_(1, order, 1.0) * targets


def _drawn(part: Component, row: NDArray[np.int64], seed: int) -> Tensor:
    """The first values of something that is kept, f32[A, *shape]."""
    return part.draw(seed, row) if part.storage == "per_user" else part.draw(seed).expand(len(row), *part.shape)
