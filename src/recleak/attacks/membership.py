"""Membership: which of the items that a client's upload touches are the client's own, and which are negatives.

`Evidence` is what all these attacks have in common: it keeps the last broadcast, asks a subclass for its evidence on
every row of an upload (`FromUploads`) or of a sum of uploads (`FromSums`), and keeps that evidence by (client, item).
The guesses that cost nothing stand below; `shadow` is the attack of IMIA and `alignment` is ours.

Axis letters: C clients, N item rows of all clients, I items, n pairs of a client and an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, log1p
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import require_names
from recleak.update import Update
from recleak.wire import Aggregate, Aggregator, AggregatorMessage, Broadcast, Server, ServerMessage, Upload

Participation = Literal["first", "last", "all"]
SURE = 8.0  # log odds of what an attack claims without a doubt; a little more or less orders its claims
_WIDEST = 200.0  # shifts of log odds are from minus this to this
_LINEAR = 12.0  # odds far above count by their logarithm
_LEAST = 1e-30  # the probability of a pair that was seen; 0 is for those that were not
_STARTS = 3  # of k-means; the one with the lowest SSE counts
_RECEIVED = "received/"  # before the names of the broadcast's components in the state
_ITEMS, _ODDS = "items/", "odds/"  # before the number of a client: its rows' items, i64[n], ascending; log odds, f32[n]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What attacks on rows have in common: evidence by pair, and probabilities from it.

    `participation` says which of a client's rounds count: its first (as IMIA's code), its last, or all together, when
    the evidence of several rounds adds up. `round` takes one round only.
    """

    participation: Participation = "first"
    round: int | None = None
    seed: int = 0  # of the adversary's own draws

    def __post_init__(self) -> None:
        if self.participation not in get_args(Participation):
            options = ", ".join(get_args(Participation))
            raise ConfigError(f"participation is {self.participation!r}, expected one of {options}.")

    def init(self, knowledge: Knowledge) -> State:
        """No evidence yet."""
        return {
            "participations": torch.zeros(knowledge.n_users, dtype=torch.int64),  # rounds that counted
            "expected": torch.zeros(knowledge.n_users),  # how many own items there are, summed over them
        }

    def _remember(self, state: State, broadcast: Broadcast) -> State:
        """The state with this broadcast in the place of the last."""
        kept = {name: value for name, value in state.items() if not name.startswith(_RECEIVED)}
        return {**kept, **{_RECEIVED + name: value.clone() for name, value in broadcast.params.items()}}

    def _counts(self, state: State, client: Tensor, round: int) -> Tensor:
        """The positions of the clients whose evidence of this round is wanted, i64[n]."""
        if self.round is not None and round != self.round:
            return client.new_empty(0)
        if self.participation == "first":
            return (state["participations"][client] == 0).nonzero().squeeze(1)
        return torch.arange(len(client))

    def _with(
        self, state: State, client: Tensor, expected: Tensor, items: Sequence[Tensor], odds: Sequence[Tensor]
    ) -> State:
        """The state with the evidence of a round: that of several rounds adds up, or the last one takes the place.

        Evidence is kept client by client, so a round costs what it brings, and memory what distinct pairs take.
        """
        new = {}
        for number, item, found in zip(client.tolist(), items, odds, strict=True):
            if self.participation == "all" and _ITEMS + str(number) in state:
                item, found = _added(state[_ITEMS + str(number)], state[_ODDS + str(number)], item, found)
            new[_ITEMS + str(number)], new[_ODDS + str(number)] = item, found
        count, sums = state["participations"].clone(), state["expected"].clone()
        if self.participation != "all":
            count[client], sums[client] = 0, 0
        count[client] += 1
        sums[client] += expected
        return {**state, **new, "participations": count, "expected": sums}

    def weighed(self, knowledge: Knowledge, item: Tensor, odds: Tensor, uploads: Tensor) -> Tensor:
        """The log odds of pairs, f32[n], with what an attack adds to the evidence; their items, and how many uploads of
        their clients were read, i64[n].
        """
        return odds

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """Probabilities that add up, client by client, to the expected number of own items; 0 for what was not seen."""
        client = state["participations"].nonzero().squeeze(1)
        expected = state["expected"][client] / state["participations"][client]
        pair, odds = pairs_with_odds(state, knowledge.n_items)
        owner = torch.searchsorted(client, pair // knowledge.n_items)
        uploads = state["participations"][client][owner]
        chance = calibrated(self.weighed(knowledge, pair % knowledge.n_items, odds, uploads), owner, expected)
        asked = question.client * knowledge.n_items + question.item
        place = torch.searchsorted(pair, asked)
        seen = torch.cat([pair, torch.tensor([-1])])[place] == asked
        return torch.where(seen, torch.cat([chance, chance.new_zeros(1)])[place], 0.0)


@dataclass(frozen=True, kw_only=True)
class FromUploads(Evidence):
    """An attack that reads each upload beside the broadcast that it answers."""

    vantage: ClassVar[type[Server]] = Server

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """Log odds that each row is of an own item (up to a constant of the client), f32[N]; and how many of a client's
        rows are, as far as the adversary can tell, f32[C].
        """
        raise NotImplementedError

    def listener(self) -> FromUploads:
        """What it keeps is also what chains go on from."""
        return self

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """Keep the broadcast; turn an upload into evidence."""
        if isinstance(message, Broadcast):
            return self._remember(state, message)
        if not isinstance(message, Upload):
            return state
        wanted, update = self._counts(state, message.update.client, message.round), message.update
        if len(wanted) < update.n_clients:
            update = update.select(wanted)
        received = _received(state)
        if not received or not len(update.item):
            return state
        odds, expected = self.evidence(knowledge, received, update, message.round)
        count = update.offset.diff().tolist()
        items, each = (tuple(part.clone() for part in torch.split(tensor, count)) for tensor in (update.item, odds))
        return self._with(state, update.client, expected, items, each)


@dataclass(frozen=True, kw_only=True)
class FromSums(Evidence):
    """An attack that reads the sum of a round's uploads, all that secure aggregation leaves.

    It says the same about everybody who took part.
    """

    vantage: ClassVar[type[Aggregator]] = Aggregator

    def evidence(
        self, knowledge: Knowledge, received: Params, mean: Update, clients: int, round: int
    ) -> tuple[Tensor, Tensor]:
        """As of one upload: `mean` has the mean change of so many clients, with the rows that anybody touched; the log
        odds of its rows, f32[N], and how many are own items of a single client, f32[1].
        """
        raise NotImplementedError

    def fold(self, knowledge: Knowledge, state: State, message: AggregatorMessage) -> State:
        """Keep the broadcast; turn a sum into evidence on everybody in it."""
        if isinstance(message, Broadcast):
            return self._remember(state, message)
        if not isinstance(message, Aggregate):
            return state
        client = message.client[self._counts(state, message.client, message.round)]
        received = _received(state)
        mean = mean_of(knowledge, message)
        if not received or not len(client) or not len(mean.item):
            return state
        odds, expected = self.evidence(knowledge, received, mean, len(message.client), message.round)
        n = len(client)
        return self._with(state, client, expected.repeat(n), (mean.item,) * n, (odds,) * n)


def _received(state: State) -> Params:
    return {name.removeprefix(_RECEIVED): state[name] for name in state if name.startswith(_RECEIVED)}


def mean_of(knowledge: Knowledge, message: Aggregate) -> Update:
    """A sum as the upload of one average client."""
    tables = [part.name for part in knowledge.components if part.storage == "per_item" and part.shared]
    dense = [part.name for part in knowledge.components if part.storage == "dense" and part.shared]
    sizes = [message.total[name].unsqueeze(-1).flatten(1).abs().amax(1) for name in tables]
    item = torch.stack(sizes).amax(0).nonzero().squeeze(1) if sizes else torch.empty(0, dtype=torch.int64)
    return Update(
        message.client[:1],
        {name: (message.total[name] / message.weight).unsqueeze(0) for name in dense},
        {name: message.total[name][item] / message.weight for name in tables},
        item,
        torch.tensor([0, len(item)]),
        knowledge.n_items,
    )


def _added(item: Tensor, odds: Tensor, more: Tensor, odds_more: Tensor) -> tuple[Tensor, Tensor]:
    """Evidence of two rounds on the items of a client, each ascending: i64[n] and f32[n], i64[m] and f32[m]."""
    if torch.equal(item, more):
        return item, odds + odds_more
    both, place = torch.unique(torch.cat([item, more]), return_inverse=True)
    return both, torch.zeros(len(both)).index_add_(0, place, torch.cat([odds, odds_more]))


def pairs_with_odds(state: State, n_items: int) -> tuple[Tensor, Tensor]:
    """All pairs that there is evidence on, client * I + item, ascending, i64[n], and their log odds, f32[n]."""
    client = state["participations"].nonzero().squeeze(1).tolist()
    pair = [number * n_items + state[_ITEMS + str(number)] for number in client]
    odds = [state[_ODDS + str(number)] for number in client]
    return torch.cat([torch.empty(0, dtype=torch.int64), *pair]), torch.cat([torch.empty(0), *odds])


def calibrated(odds: Tensor, owner: Tensor, expected: Tensor) -> Tensor:
    """Probabilities sigmoid(odds + shift), one shift for each client such that they add up to `expected`, f64[n].

    Large odds count by their logarithm, so that their order is not lost where the sigmoid is 1 in floating point.
    """
    clients, wide = len(expected), _LINEAR * torch.asinh(odds.double() / _LINEAR)

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(clients, dtype=torch.float64).index_add_(0, owner, values)

    count = summed(torch.ones_like(wide))
    target = torch.minimum(expected.double(), count)
    low, high = torch.full_like(target, -_WIDEST), torch.full_like(target, _WIDEST)
    shift = (target / count).logit().clamp(-_WIDEST, _WIDEST)  # right if all odds are even, or if it is none or all
    settled = (target <= 0) | (target >= count)  # what is found stays, so that clients do not depend on each other
    for _ in range(60):  # Newton's method, within a bracket that gets smaller: outside of it, its middle
        chance = torch.sigmoid(wide + shift[owner])
        more = target - summed(chance)
        low, high = torch.where(more > 0, shift, low), torch.where(more > 0, high, shift)
        step = shift + more / summed(chance * (1 - chance))
        settled |= (step - shift).abs() <= 1e-12
        inside = torch.where((step > low) & (step < high), step, (low + high) / 2)
        shift = torch.where(settled, shift, inside)
        if bool(settled.all()):
            break
    return torch.sigmoid(wide + shift[owner]).clamp(min=_LEAST)


def expected_positives(knowledge: Knowledge, touched: Tensor) -> Tensor:
    """How many own items a client has that touches so many different ones, f32[C].

    With p own items out of I and q negatives for each, drawn independently from the others, a client touches
    p + (I - p) (1 - (1 - 1 / (I - p))^(q p)) different items on average: a negative may be drawn twice, so the share is
    more than 1 / (1 + q) for clients with many items; fake items of a known defense come on top. Solved for p by
    bisection. A client that sends every row of the
    table hides how many it touched: it is taken for an average one if the items' popularity is public, else p is the
    share 1 / (1 + q) of all.
    """
    q, n_items = _negatives(knowledge), knowledge.n_items
    usual = n_items / (1 + q)
    if "popularity" in knowledge.public:
        usual = min(usual, float(knowledge.public["popularity"].sum()) / knowledge.n_users)

    def touches(p: NDArray[np.float64]) -> NDArray[np.float64]:
        rest = np.maximum(n_items - p, 1.0 + 1e-9)
        found: NDArray[np.float64] = p * (1 + fakes) - rest * np.expm1(q * p * np.log1p(-1 / rest))
        return found

    fakes, different = knowledge.defense.fakes, touched.double().numpy()
    low, high = np.zeros_like(different), different
    for _ in range(50):
        middle = (low + high) / 2
        fewer = touches(middle) < different
        low, high = np.where(fewer, middle, low), np.where(fewer, high, middle)
    return torch.from_numpy(np.where(different >= n_items, usual, (low + high) / 2)).float()


def expected_in_sum(knowledge: Knowledge, touched: int, clients: int) -> Tensor:
    """How many own items each of n clients has that touch so many of I items together, f32[1].

    If each touches k, anybody touches I (1 - (1 - k / I)^n) on average; solved for k.
    """
    union = min(touched, knowledge.n_items - 1) / knowledge.n_items
    each = knowledge.n_items * -expm1(log1p(-union) / clients)
    return expected_positives(knowledge, torch.tensor([each]))


def labelled_positives(knowledge: Knowledge, own: Tensor, touched: Tensor) -> Tensor:
    """How many of its touched items a client trains on as its own, under a defense that adds fakes or flips labels."""
    real = own * (1 + knowledge.defense.fakes)
    return real + knowledge.defense.flips * (touched - 2 * real)


def assumed_positives(knowledge: Knowledge, touched: Tensor, share: float | None) -> Tensor:
    """A share of what a client touches, f32[C]; None: the ratio of negatives that the server prescribes, as IMIA."""
    return touched.float() * (1 / (1 + _negatives(knowledge)) if share is None else share)


def rows_with_noise(knowledge: Knowledge) -> float:
    """The share of the item rows that get noise in an upload: all, or what an average client touches."""
    if any(getattr(spent, "every_row", False) for spent in knowledge.defense.spends()):
        return 1.0
    if "popularity" not in knowledge.public or knowledge.training is None:
        return 1.0
    own = float(knowledge.public["popularity"].sum()) / knowledge.n_users * (1 + knowledge.defense.fakes)
    return min(1.0, own * (1 + knowledge.training.negatives) / knowledge.n_items)


def _negatives(knowledge: Knowledge) -> int:
    if knowledge.training is None:
        raise ConfigError(
            "The attack needs to know how many negatives a client draws, got knowledge without `training`.\n"
            "  Give Knowledge(..., training=LocalTraining(...)): the server prescribes it, so it is public."
        )
    return knowledge.training.negatives


def whole(number: Tensor) -> Tensor:
    """The nearest whole numbers, at least 1, i64."""
    return number.add(0.5).long().clamp(min=1)


def below(number: Tensor) -> Tensor:
    """The next whole numbers below, at least 1, i64: how the published code of IMIA counts."""
    return number.add(1e-4).long().clamp(min=1)


def places_within(update: Update, score: Tensor) -> Tensor:
    """The place of each row in its client's order of falling scores, from 0, i64[N]."""
    tie = random.bits(0, "tie", update.client[update.owner].numpy(), update.item.numpy())  # never by item number
    order = _order(update.owner.numpy(), -score.numpy(), tie)
    place = torch.empty(len(score), dtype=torch.int64)
    place[torch.from_numpy(order)] = torch.arange(len(score)) - update.offset[:-1][update.owner]
    return place


def _order(owner: NDArray[np.int64], score: NDArray[Any], tie: NDArray[np.uint64]) -> NDArray[np.int64]:
    """By owner, then by score, then by tie: float32 scores in one sort of 64 bits, of which ties get what is left."""
    width = int(owner[-1]).bit_length() if len(owner) else 0
    if score.dtype != np.float32 or width > 8:
        return np.lexsort((tie, score, owner))
    bits = (score + np.float32(0)).view(np.uint32)  # + 0: -0.0 is 0.0
    rank = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)  # ordered as the numbers are
    rank[np.isnan(score)] = 2**32 - 1  # last, as in every sort of numpy
    head = (owner.astype(np.uint64) << np.uint64(32)) | rank
    return np.argsort((head << np.uint64(32 - width)) | (tie >> np.uint64(32 + width)))


def chosen(update: Update, score: Tensor, count: Tensor) -> Tensor:
    """The `count` rows of each client with the highest scores, bool[N]."""
    return places_within(update, score) < count[update.owner]


# --- guesses that cost nothing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RandomGuess(FromUploads):
    """IMIA's "Random Attack" (section 4.3): a random share of the touched items."""

    share: float | None = None  # None: 1 / (1 + negatives)

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """Some rows, drawn by (client, item)."""
        count = below(assumed_positives(knowledge, update.offset.diff(), self.share))
        client = update.client[update.owner].numpy()
        lot = torch.from_numpy(random.uniform(self.seed, "random guess", round, client, update.item.numpy()))
        return torch.where(chosen(update, lot, count), SURE, -SURE), count.float()


@dataclass(frozen=True, kw_only=True)
class AllPositive(FromUploads):
    """Claims every item that the upload touches: recall 1, precision the share of own items."""

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """Every row."""
        return torch.full((len(update.item),), SURE), update.offset.diff().float()


@dataclass(frozen=True, kw_only=True)
class Popularity(FromUploads):
    """Claims the most popular of the touched items: what a server with sales figures knows without any upload's help.

    Needs `popularity`, f32[I], in the public knowledge: how often each item was chosen, the victim's choice included.
    """

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """The log of the popularity."""
        return popularity_odds(knowledge, update.item), expected_positives(knowledge, update.offset.diff())


@dataclass(frozen=True, kw_only=True)
class PopularityOfSums(FromSums):
    """The same, of what anybody in a sum touched."""

    def evidence(
        self, knowledge: Knowledge, received: Params, mean: Update, clients: int, round: int
    ) -> tuple[Tensor, Tensor]:
        """The log of the popularity."""
        return popularity_odds(knowledge, mean.item), expected_in_sum(knowledge, len(mean.item), clients)


def popularity_odds(knowledge: Knowledge, item: Tensor) -> Tensor:
    """Own items are drawn by popularity, negatives uniformly: the log odds of an own item, up to a constant, f32[n]."""
    return (public_popularity(knowledge)[item] + 0.5).log()


def public_popularity(knowledge: Knowledge) -> Tensor:
    """How often each item was chosen, f32[I], where this is public."""
    if "popularity" not in knowledge.public:
        got = ", ".join(knowledge.public) or "nothing"
        raise ConfigError(
            f"The attack needs the items' popularity, got {got} as public knowledge.\n"
            "  Give Knowledge(..., public={'popularity': f32[I]}), or choose an attack without it."
        )
    return knowledge.public["popularity"].float()


@dataclass(frozen=True, kw_only=True)
class KMeans(FromUploads):
    """IMIA's "K-means Attack" (section 4.3): two clusters of uploaded item vectors; the one with lower SSE is claimed.

    sse "total": the sum of squared distances to the center, which a small cluster has low because it is small;
    "point": the mean. The text says the sum; no code is published.
    """

    sse: Literal["total", "point"] = "total"
    component: str = "item"

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """The rows of the more coherent cluster, client by client."""
        require_names("component", [self.component], update.rows)
        vectors = (received[self.component][update.item] + update.rows[self.component]).flatten(1).double().numpy()
        claimed = np.zeros(len(vectors), bool)
        for client, low, high in zip(update.client.tolist(), *_bounds(update), strict=True):
            mine = vectors[low:high]
            if len(mine) < 2 or not np.ptp(mine, axis=0).any():
                claimed[low:high] = True
                continue
            generator = np.random.default_rng(int(random.bits(self.seed, "k-means", round, client)))
            best = min((_clustered(mine, generator) for _ in range(_STARTS)), key=lambda found: found[1].sum())
            label, error = best
            if self.sse == "point":
                error = error / np.bincount(label, minlength=2).clip(1)
            claimed[low:high] = label == error.argmin()
        claim = torch.from_numpy(claimed)
        count = torch.zeros(update.n_clients).index_add_(0, update.owner, claim.float())
        return torch.where(claim, SURE, -SURE), count


@dataclass(frozen=True, kw_only=True)
class FarthestRows(FromUploads):
    """The rows that moved farthest are a client's own (PARD, section II-B: "the differences between client and
    server-side item embeddings"). With more negatives than own items an untrained model is further from the labels of
    the latter, and a defense that adds terms for own items moves them farther still. A trained model may move both
    alike.
    """

    component: str = "item"

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """How far each row moved, by its logarithm, in standard deviations among the rows of its client."""
        size = update.offset.diff().clamp(min=1)
        require_names("component", [self.component], update.rows)
        far = update.rows[self.component].flatten(1).norm(dim=1).clamp(min=_LEAST).log()  # f32[N]
        mean = far.new_zeros(update.n_clients).index_add_(0, update.owner, far) / size
        away = far - mean[update.owner]
        spread = (far.new_zeros(update.n_clients).index_add_(0, update.owner, away.square()) / size).sqrt()
        return 2 * away / spread.clamp(min=1e-6)[update.owner], expected_positives(knowledge, update.offset.diff())


def _clustered(points: NDArray[np.float64], rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Two clusters by Lloyd's algorithm from a k-means++ start: labels i64[K], and the SSE of each, f64[2]."""
    center, label = kmeans2(points, 2, iter=30, minit="++", check_finite=False, rng=rng)
    away: NDArray[np.float64] = np.square(points - center[label]).sum(1)
    return label.astype(np.int64), np.bincount(label, away, 2).astype(np.float64)


def _bounds(update: Update) -> tuple[list[int], list[int]]:
    return update.offset[:-1].tolist(), update.offset[1:].tolist()
