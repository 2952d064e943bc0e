"""The ledger: what the defenses of a run really promise, composed over all that a client sent.

Every row says whom it protects (unit), against which alternative (neighbors), the epsilon of one use, as a paper would
print it, and the epsilon of all uses of the client that took part most. Where no guarantee follows from a mechanism the
row has no epsilon and says why.

The guarantees here are local: they hold against a server that sees every upload. Nothing is gained from clients being
sampled, because such a server sees who took part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.defenses.base import Defense
from recleak.defenses.spending import (
    Bound,
    FlippedLabels,
    NoGuarantee,
    Noise,
    NoisyFeatures,
    NoisyGradients,
    NoisyValues,
    Spending,
)
from recleak.epsilon import gaussian_epsilon, pure_epsilon
from recleak.errors import ConfigError
from recleak.models.components import Component
from recleak.protocols.federated import Federated
from recleak.protocols.gossip import Gossip
from recleak.training.aggregate import Aggregation
from recleak.training.cohort import LocalTraining

CAVEATS = (
    "Clients are sampled, but whoever sees uploads sees who took part: no amplification by subsampling is counted.",
    "Settings that were chosen by looking at private data (learning rate, noise, number of rounds) are not accounted "
    "for.",
    "Epsilon is of ideal real-valued noise. Floating-point noise has gaps that can betray a value (Mironov 2012).",
    "How long a client takes, when it takes part and what it does beside its uploads are not part of any epsilon.",
)

_UPLOADS = "everything that a client uploads"
_REPLACED = "all data of one client replaced by any other data"
_SILENCED = "one client's uploads replaced by noise alone, as if it had changed nothing"
_NUMBER = "one number of what a client uploads, in each of its uploads"
_ANOTHER = "this number has any other value within the bound, and all others are as they are"
_FEATURES = "the user features of one client, while its interactions stay as they are"
_OTHER_FEATURES = "all its features replaced by any others"
_LABEL = "the label (own or not) of one item, among the items that a client visibly trains on"
_FLIPPED = "one item has the other label"
_SWAPPED = "two items exchange their labels, so that the number of own items, which shows, stays"
_EXAMPLE = "one example that a client trains on: an item and its label, or a pair of items"
_EMPTY = "left out, its place in each batch stays empty; all other examples, and how many, are as they are"
_NONE = "nothing"
_NEVER = 36.0  # an epsilon above which no label is ever flipped: draws have 52 bits

_Norms = list[tuple[frozenset[str], float]]  # so large at most, in the l2 norm over these components


@dataclass(frozen=True)
class Entry:
    """One row of the ledger. Without a guarantee there is no epsilon: None, and `words` say why."""

    mechanism: str
    unit: str  # what is protected
    neighbors: str  # what it cannot be told from
    claimed: float | None  # epsilon of one use
    composed: float | None  # epsilon of all uses, for the client with the most
    delta: float | None  # at which both hold; 0: pure epsilon
    times: int | None  # uses by that client
    words: str
    typical: float | None = None  # epsilon of all uses, at most, for half of the clients that took part


def ledger(
    defense: Defense,
    *,
    components: tuple[Component, ...],
    n_items: int,
    participations: NDArray[np.int64],
    training: LocalTraining | None = None,
    aggregation: Aggregation = "mean",
    delta: float | None = None,
) -> list[Entry]:
    """What a defense is worth in a run: a row for each of its mechanisms and neighboring relations, in order.

    `components` are those of the model; the defense's own sharing policy is applied to them. `participations`, i64[U],
    says how often each user uploaded (see the function of that name). `delta` is 1 / (10 users) unless given: a tenth
    of the delta at which publishing all data of one user, drawn by lot, would pass for private.
    """
    participations = _checked(participations)
    if delta is None:
        delta = 0.1 / len(participations)
    if not 0 < delta < 1:
        raise ConfigError(f"Got delta={delta}, expected a number between 0 and 1, far below 1 / users.")
    statements = defense.spends()
    if not statements:
        why = (
            "There is no defense: whoever sees the uploads sees exactly what each client changed, and for which items."
        )
        return [_nothing("none", why)]
    upload = _Upload(tuple(part for part in defense.sharing(components) if part.shared), n_items, aggregation)
    uses = _Uses.of(participations, delta)
    entries: list[Entry] = []
    for position, statement in enumerate(statements):
        match statement:
            case NoGuarantee():
                entries.append(_nothing(statement.mechanism, statement.why))
            case FlippedLabels():
                entries += _labels(statement, training, uses.most)
            case NoisyFeatures():
                entries.append(_features(statement, uses.most))
            case NoisyValues():
                epochs = training.epochs if training is not None and statement.each_epoch else 1
                entries += upload.noisy_values(statements[:position], statement, uses, epochs)
            case NoisyGradients():
                entries += upload.noisy_gradients(statement, training, uses)
            case Bound():
                if not any(isinstance(after, Noise) for after in statements[position + 1 :]):
                    entries.append(_nothing(statement.mechanism, _ALONE))
            case Noise():
                entries += upload.noisy(statements[:position], statement, uses)
    return entries


def participations(protocol: Federated, train: Interactions, *, seed: int = 0) -> NDArray[np.int64]:
    """How often each user uploads in a run with this seed, i64[U]: who takes part is a function of the seed."""
    count = np.zeros(train.n_users, np.int64)
    eligible = np.flatnonzero(train.activity).astype(np.int64)
    for round in range(protocol.rounds):
        count[protocol.participants(eligible, round, seed)] += 1
    return count


def averaging(protocol: Federated | Gossip) -> Aggregation:
    """How what clients send is averaged, as the ledger needs it: in a gossip by numbers of own items, or alike."""
    if isinstance(protocol, Federated):
        return protocol.aggregation
    return "mean" if protocol.weights == "equal" else "weighted"


# --- noise on uploads -------------------------------------------------------------------------------------------------

_ALONE = "It limits how much a client can say, but nothing is random: it gives a guarantee only before noise."
_TOUCHED = (
    "The noise is on the rows that are sent anyway. Which rows those are tells which items the client trained on, "
    "however strong the noise is. Noise on every row (rows='all') would hide it."
)
_WEIGHTED = (
    "Uploads are weighted by the number of a client's own items, and this number is sent beside them without noise. "
    "Aggregate with 'mean' (in a gossip: merge with weights 'equal') for the noise to count."
)
_LATER = "An earlier row gives the guarantee; noise on top of it can only help, and nothing is counted for it."


@dataclass(frozen=True)
class _Upload:
    """What a client sends in one round."""

    components: tuple[Component, ...]  # those that are sent
    n_items: int
    aggregation: Aggregation

    def noisy(self, before: Sequence[Spending], noise: Noise, uses: _Uses) -> Iterator[Entry]:
        """The rows for noise after other mechanisms."""
        norms, mechanisms, done = self._bounded(before)
        if done:
            yield _nothing(noise.mechanism, _LATER)
            return
        mechanism = ", then ".join([*mechanisms, noise.mechanism])
        if why := self._fault(noise) or self._free(norms):
            yield _nothing(mechanism, why)
            return
        ways = list(_covers(norms, self.components))
        for factor, neighbors in ((2.0, _REPLACED), (1.0, _SILENCED)):
            if noise.law == "gaussian":
                yield _gaussian(mechanism, neighbors, factor * _reach(noise, ways), uses)
            else:
                size = {part.name: part.size * _rows(part, self.n_items) for part in self.components}
                yield _laplace(mechanism, neighbors, factor * _reach_of_sums(noise, ways, size), uses)

    def noisy_values(
        self, before: Sequence[Spending], values: NoisyValues, uses: _Uses, epochs: int
    ) -> Iterator[Entry]:
        """The rows for noise on values that are clipped number by number: two clients differ by 2 limit in each."""
        _, _, done = self._bounded(before)
        noise = self._noise_of(values)
        if why := _LATER if done else self._fault(noise):
            yield _nothing(values.mechanism, why)
            return
        size = {part.name: part.size * _rows(part, self.n_items) for part in self.components}
        far = {name: 2 * values.limit / noise.of(name) for name in size}  # of one number, in scales
        count, epsilons = sum(size.values()), sorted(set(far.values()))
        claims = f"{epsilons[0]:.3g}" if len(epsilons) == 1 else f"{epsilons[0]:.3g} to {epsilons[-1]:.3g}"
        alone = "No change of data moves one number alone: what protects a person is the next row."
        if values.law == "gaussian":
            reach = sqrt(sum(far[name] ** 2 * size[name] for name in size))
            number = _gaussian(values.mechanism, _ANOTHER, epsilons[-1], uses)
            whole = _gaussian(values.mechanism, _REPLACED, reach, uses)
            words = f"Two values are {claims} standard deviations apart at most, in each of {count:,} numbers (l2)."
            inner = ""
        else:
            once = sum(far[name] * size[name] for name in size)
            number = _laplace(values.mechanism, _ANOTHER, epsilons[-1], uses)
            whole = _laplace(values.mechanism, _REPLACED, once, uses)
            words = f"Epsilon is {claims} for each number of an upload, added up over {count:,} numbers."
            inner = f" Counting it, as if each epoch were seen, would give {epochs * once * uses.most:.3g}."
        if epochs > 1:
            words += (
                f" There is noise after each of {epochs} epochs, but only parameters after the last are sent, clipped "
                f"and noisy whatever came before: earlier noise costs nothing and protects nothing.{inner}"
            )
        told = uses.told(whole.typical or 0.0, whole.delta or 0.0)
        yield replace(number, unit=_NUMBER, words=f"For the numbers with the least noise. {alone}")
        yield replace(whole, words=f"{words} {told} A client that changed nothing may be as far from others as any.")

    def noisy_gradients(
        self, statement: NoisyGradients, training: LocalTraining | None, uses: _Uses
    ) -> Iterator[Entry]:
        """The rows for noise on sums of clipped gradients: for one example, and for those that an interaction brings.

        An example is in one batch of each epoch, and the other batches of the epoch do not depend on it but through
        what was noisy already. So an epoch is one use of the noise, with a sensitivity of `clip`; k examples that are
        left out together have at most k times that, wherever they are.
        """
        if training is None:
            raise ConfigError(
                "Got no training, expected it: how many local epochs there are decides what DP-SGD spends."
            )
        scale = statement.noise_multiplier * statement.clip
        if why := self._fault(Noise(statement.mechanism, "gaussian", scale, every_row=True)):
            yield _nothing(statement.mechanism, why)
            return
        brings = training.negatives + (training.loss != "bpr")
        interaction = f"one interaction with the {brings} examples that it brings"
        hint = "An own item is never drawn as a negative of another one, which tells a little and is not covered. "
        for unit, examples, beside in ((_EXAMPLE, 1, ""), (interaction, brings, hint)):
            reach = examples * sqrt(training.epochs) / statement.noise_multiplier  # of one upload
            entry = _gaussian(statement.mechanism, _EMPTY, reach, uses)
            other = gaussian_epsilon(2 * reach * sqrt(uses.most), uses.delta)
            words = (
                f"Gaussian noise with a standard deviation of {statement.noise_multiplier:.3g} clips on the sum of a "
                f"batch, once for each of the {training.epochs} epochs of an upload: nothing is gained from how "
                "batches are drawn. "
                f"{uses.told(entry.typical or 0.0, uses.delta)} Exact for Gaussian noise (Balle and Wang 2018). "
                f"Replaced by others, not left out, it would be {other:.3g}. {beside}Not covered: all that a client "
                "has, and how many examples that is."
            )
            yield replace(entry, unit=unit, words=words)

    def _noise_of(self, values: NoisyValues) -> Noise:
        """The same noise by the names of what is sent."""
        scale = {part.name: values.scale(part.name) for part in self.components}
        return Noise(values.mechanism, values.law, scale, values.every_row)

    def _bounded(self, before: Sequence[Spending]) -> tuple[_Norms, list[str], bool]:
        """What mechanisms before bound, which of them do, and whether one gives a guarantee already."""
        norms: _Norms = []
        mechanisms: list[str] = []
        for statement in before:
            if isinstance(statement, Noise):
                if not (self._fault(statement) or self._free(norms)):
                    return norms, mechanisms, True
                norms, mechanisms = [], []  # noise is not bounded
            elif isinstance(statement, NoisyValues):
                if not self._fault(self._noise_of(statement)):
                    return norms, mechanisms, True
                norms, mechanisms = [], []
            elif isinstance(statement, (Bound, NoGuarantee)) and not statement.keeps:
                norms, mechanisms = [], []
            if isinstance(statement, Bound):
                norms += _norms(statement, self.components, self.n_items)
                mechanisms.append(statement.mechanism)
        return norms, mechanisms, False

    def _fault(self, noise: Noise) -> str:
        """Why the noise gives no guarantee however the upload is bounded; empty if it may."""
        bare = [part.name for part in self.components if not noise.of(part.name) > 0]
        if not self.components:
            return "No component is sent, so there is nothing to add noise to."
        if len(bare) == len(self.components):
            return "The noise is 0: nothing is random."
        if bare:
            return f"There is no noise on {', '.join(bare)}, sent as it is: what one part hides, another tells."
        if not noise.every_row and any(part.storage == "per_item" for part in self.components):
            return _TOUCHED
        return _WEIGHTED if self.aggregation == "weighted" else ""

    def _free(self, norms: _Norms) -> str:
        """Why noise has nothing to cover; empty if every component is bounded."""
        known = frozenset[str]().union(*(over for over, _ in norms))
        free = [part.name for part in self.components if part.name not in known]
        why = (
            f"Nothing bounds {', '.join(free)} before the noise, so a client with an unusual history can stand out of "
            "any noise. Put ClipByNorm over all that is sent before it."
        )
        return why if free else ""


def _gaussian(mechanism: str, neighbors: str, reach: float, uses: _Uses) -> Entry:
    """A change of data moves an upload by `reach` standard deviations; k uses are one of sqrt(k) times that.

    Dong, Roth and Su 2022, "Gaussian differential privacy", corollary 3.3; later uploads may depend on earlier ones.
    """
    claimed, composed, typical = (
        gaussian_epsilon(reach * sqrt(times), uses.delta) for times in (1, uses.most, uses.half)
    )
    words = (
        f"Gaussian noise whose standard deviation is {1 / reach:.3g} times what this change of data can move an upload "
        f"(l2). {uses.told(typical, uses.delta)} Exact for Gaussian noise (Balle and Wang 2018). It covers single "
        "interactions too, with all the negatives that they bring."
    )
    return Entry(mechanism, _UPLOADS, neighbors, claimed, composed, uses.delta, uses.most, words, typical)


def _laplace(mechanism: str, neighbors: str, once: float, uses: _Uses) -> Entry:
    """A change of data moves an upload by `once` scales in the l1 norm: pure epsilon."""
    composed, delta, theorem = pure_epsilon(once, uses.most, uses.delta)
    typical, _, _ = pure_epsilon(once, uses.half, uses.delta)
    words = (
        "Laplace noise needs a bound in the l1 norm, and the l2 bound gives one that grows with the square root of how "
        f"many numbers are sent. {uses.told(typical, delta)} {theorem}"
    )
    return Entry(mechanism, _UPLOADS, neighbors, once, composed, delta, uses.most, words, typical)


def _reach(noise: Noise, ways: list[_Norms]) -> float:
    """The largest l2 norm of an upload, in standard deviations of the noise."""
    return min(sqrt(sum((limit / min(map(noise.of, over))) ** 2 for over, limit in way)) for way in ways)


def _reach_of_sums(noise: Noise, ways: list[_Norms], size: Mapping[str, int]) -> float:
    """The largest l1 norm, in scales of the noise: at most sqrt(n) B for n numbers with an l2 norm of B."""
    return min(
        sum(limit * sqrt(sum(size[name] / noise.of(name) ** 2 for name in over)) for over, limit in way) for way in ways
    )


def _norms(bound: Bound, components: Iterable[Component], n_items: int) -> _Norms:
    """A bound as l2 norms over components that are sent."""
    parts = [part for part in components if bound.components is None or part.name in bound.components]
    if bound.per == "client":
        return [(frozenset(part.name for part in parts), bound.limit)] if parts else []

    def pieces(part: Component) -> int:
        each = {"component": 1, "row": _rows(part, n_items), "number": _rows(part, n_items) * part.size}
        return _units(part, n_items) if bound.per == "unit" else each[bound.per]

    return [(frozenset([part.name]), bound.limit * sqrt(pieces(part))) for part in parts]


def _units(part: Component, n_items: int) -> int:
    """How many units `ClipByNorm` finds in a component."""
    if part.storage == "per_item":
        return n_items
    bias = part.name.rpartition(".")[2] == "bias"
    return prod(part.shape[-1:]) if len(part.shape) > 1 or bias else 1


def _covers(norms: _Norms, components: Iterable[Component]) -> Iterator[_Norms]:
    """Ways to give every component to one norm that bounds it: the tightest norms first, or the widest."""
    for order in (sorted(norms, key=lambda norm: norm[1]), sorted(norms, key=lambda norm: -len(norm[0]))):
        left, way = {part.name for part in components}, list[tuple[frozenset[str], float]]()
        for over, limit in order:
            if mine := over & left:
                way.append((frozenset(mine), limit))
                left -= mine
        yield way


def _rows(part: Component, n_items: int) -> int:
    return n_items if part.storage == "per_item" else 1


# --- features ---------------------------------------------------------------------------------------------------------


def _features(statement: NoisyFeatures, most: int) -> Entry:
    """Features that were drawn once: epsilon for all of them in all rounds together."""
    once = statement.epsilon
    if once == inf:
        return _nothing(statement.mechanism, "Features stay as they are at this setting.")
    words = (
        f"Features are drawn once for all rounds, so {most:,} uploads tell no more than one. Not covered: "
        "interactions. Training reads them too, so what they tell of an attribute is told as before, and so are "
        "features that follow from them, such as the numbers of ratings."
    )
    return Entry(statement.mechanism, _FEATURES, _OTHER_FEATURES, once, once, 0.0, 1, words, once)


# --- labels -----------------------------------------------------------------------------------------------------------


def _labels(statement: FlippedLabels, training: LocalTraining | None, most: int) -> list[Entry]:
    """Randomized response, drawn once: epsilon for one label in all rounds together (Warner 1965)."""
    once = statement.epsilon
    if once > _NEVER:
        return [_nothing(statement.mechanism, "No label is ever flipped at this setting.")]
    if training is not None and training.resample:
        why = (
            "Negatives are drawn anew in every round, and own items come back in every round: what comes back is the "
            "client's own, whatever its label says. Draw negatives once (resample=False)."
        )
        return [_nothing(statement.mechanism, why)]
    if training is not None and not training.shuffle:
        why = "Examples are not shuffled, so their order tells own items from negatives, whatever the labels say."
        return [_nothing(statement.mechanism, why)]
    covers_not = (
        "Not covered: which items a client trains on, and how often each. They show, and own items are always among "
        "them: an item that is not there is certainly not the client's own."
    )
    fixed = (
        f"Labels are flipped once for all rounds, so {most:,} uploads tell no more than one. A device that drew them "
        f"anew each time would spend {once * max(most, 1):.3g}."
    )
    if training is None:
        covers_not += " It holds if negatives are drawn once and examples are shuffled."
    several = f"For k labels at once it is k times {once:.3g}."
    swapped = (
        "How many examples there are tells how many own items; with that fixed two labels differ, and it is twice."
    )
    return [
        Entry(statement.mechanism, _LABEL, _FLIPPED, once, once, 0.0, 1, f"{fixed} {several} {covers_not}", once),
        Entry(statement.mechanism, _LABEL, _SWAPPED, once, 2 * once, 0.0, 1, f"{swapped} {covers_not}", 2 * once),
    ]


# --- uses -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Uses:
    """How often clients uploaded."""

    most: int  # of one client
    half: int  # half of those who took part do not exceed it
    delta: float

    @classmethod
    def of(cls, participations: NDArray[np.int64], delta: float) -> _Uses:
        took = participations[participations > 0]
        if not len(took):
            return cls(0, 0, delta)
        return cls(int(took.max()), int(np.quantile(took, 0.5, method="higher")), delta)

    def told(self, typical: float, delta: float) -> str:
        return (
            f"The busiest client sent {self.most:,} uploads; half of those who took part sent {self.half:,} or fewer, "
            f"which is an epsilon of {typical:.3g} at delta {delta:.2g}."
        )


def _nothing(mechanism: str, why: str) -> Entry:
    return Entry(mechanism, _NONE, _NONE, None, None, None, None, f"No guarantee. {why}")


def _checked(participations: NDArray[np.int64]) -> NDArray[np.int64]:
    uses = np.asarray(participations)
    if uses.ndim != 1 or not len(uses) or not np.issubdtype(uses.dtype, np.integer) or uses.min() < 0:
        raise ConfigError(
            f"Got participations {uses.dtype}{list(uses.shape)}, expected i64[users]: how often each user uploaded."
        )
    return uses
