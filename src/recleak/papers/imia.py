"""How the cells of IMIA are measured (Yuan et al., WWW 2023): Fed-NCF and Fed-LightGCN, its attack, its defenses.

Two variants. `as-written` follows the text. `as-published-code` follows the authors' code where it differs:

    what                    as-written                      as-published-code
    held out                test and validation item        test item only
    negatives               never a training item           nor the test item
    Fed-LightGCN layers     summed (eq. 4)                  averaged
    regularizer             mu ||V - V_t|| (eq. 8)          mu ||V - V_t||^2
    LDP                     sd lambda (eq. 7)               rows of all matrices clipped to 1, variance lambda
    shadow client           trains like a client            gradients never zeroed
    its graph (LightGCN)    guessed                         the victim's true one

In both, as in the code where the text is silent or cannot be meant: 1 % of the clients in a round; the mean over a
batch as the loss (eq. 5 has a sum, beside which mu weighs up to 64 times less) and over the clients' models (eq. 6 has
a sum); noise on the item rows that are sent and on the head, the regularizer on item rows; a shadow's user vector from
Xavier's distribution; own items assumed to be 20 % of the touched ones.
The text's "25 %" for 1:4 is a slip: its Random Attack has F1 0.2079, 0.2019, 0.1998, which only 20 % gives.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from recleak import random
from recleak.attacks.alignment import AlignmentOfSums, GradientAlignment
from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.attacks.membership import (
    AllPositive,
    FromSums,
    FromUploads,
    KMeans,
    Popularity,
    PopularityOfSums,
    RandomGuess,
)
from recleak.attacks.shadow import ShadowClients, train_shadows
from recleak.attacks.sums import RehearsedSums
from recleak.data.interactions import Interactions
from recleak.data.predictability import attribute_auc
from recleak.data.prepare import at_least
from recleak.data.sampling import evaluation_candidates
from recleak.data.source import open_data
from recleak.data.split import Split, leave_one_out
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.labels import FakeItems, RandomizedLabels
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.defenses.sparsify import SignOnly
from recleak.errors import ConfigError, unknown_name
from recleak.grading import claimed_interactions, grade_items, own_items, pairs_seen, truth_of
from recleak.metrics.inference import auc_by_user
from recleak.metrics.ranking import rank
from recleak.models.base import Model
from recleak.models.components import Normal
from recleak.models.lightgcn import LightGCN
from recleak.models.ncf import NCF
from recleak.papers.reproduce import Measured
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.recording import Listening, Tap
from recleak.training.cohort import LocalTraining
from recleak.training.executor import InProcess
from recleak.training.local import Examples, LocalData
from recleak.training.optimizers import Adam
from recleak.wire import Broadcast, Message, Upload

VERSION = 3
ROUNDS = 200
ATTACKED = 2000  # users at most, drawn at random, the same in all cells: intervals are 0.01 to 0.02 wide then
_STEP = 20  # rounds between two looks at the embeddings (Figure 2)
_GROUPS = 20  # of users, by their number of interactions (Figures 3 and 5)
Scalar = str | int | float | bool


@dataclass(frozen=True, eq=False)
class Setting:
    """One training run."""

    split: Split
    model: Model
    defense: Defense
    protocol: Federated
    spare: tuple[Interactions, ...]
    published: bool  # the variant
    seed: int

    @property
    def train(self) -> Interactions:
        """What clients train on."""
        return self.split.train

    @cached_property
    def attacked(self) -> NDArray[np.bool_]:
        """Whose uploads attacks look at, bool[U]."""
        users = np.arange(self.train.n_users)
        chosen = np.zeros(len(users), bool)
        chosen[random.bits(0, "attacked users", users).argsort()[:ATTACKED]] = True
        return chosen

    def shown(self, message: Message) -> Message:
        """A message with the uploads of attacked users only."""
        if not isinstance(message, Upload) or self.attacked.all():
            return message
        mine = np.flatnonzero(self.attacked[message.update.client.numpy()])
        return Upload(message.round, message.update.select(torch.from_numpy(mine)), message.weight[mine])

    def knowledge(self, *, truth: bool = False) -> Knowledge:
        """What the curious server knows (section 2.2), the defense and the items' popularity too.

        `truth`: also what the published code gives its shadow clients, the victims' graphs.
        """
        facts = {"popularity": torch.from_numpy(self.train.popularity.astype(np.float32))}
        if truth:
            facts["own_items"] = own_items(self.train)
        parts = self.defense.sharing(self.model.components())
        return Knowledge(
            self.model, self.train.n_users, self.train.n_items, parts, self.protocol.local, self.defense, facts
        )


def setting(run: Mapping[str, Scalar], variant: str, seed: int) -> Setting:
    """The objects that a cell's `run` names."""
    published = variant == "as-published-code"
    data = open_data(str(run["data"]), str(run["preset"]))
    order: Literal["time", "random"] = "time" if "time" in data.rows.columns else "random"  # Steam-200K has none
    split = leave_one_out(data, by=order, validation=not published, seed=seed)
    models: dict[str, Model] = {
        "ncf": NCF(),
        "lightgcn": LightGCN(score="mlp", combine="mean" if published or run.get("combine") == "mean" else "sum"),
    }
    if run["model"] not in models:
        raise unknown_name("model", str(run["model"]), models)
    everybody = int(np.count_nonzero(split.train.activity))
    clients = int(run.get("clients", max(1, everybody // 100)))
    local = LocalTraining(epochs=int(run.get("epochs", 20)), batch_size=64, optimizer=Adam(0.001), negatives=4)
    protocol = Federated(rounds=ROUNDS, clients_per_round=clients, local=local)
    defense = _defense(str(run["defense"]), float(run["strength"]), published)
    spare = (split.test,) if published else ()
    return Setting(split, models[str(run["model"])], defense, protocol, spare, published, seed)


def _defense(name: str, strength: float, published: bool) -> Defense:
    if name == "none":
        return Defense()
    if name == "ldp":
        noise = GaussianNoise(strength**0.5 if published else strength)
        return Chain((ClipByNorm(1.0, per="unit"), noise)) if published else noise
    makers: dict[str, Callable[[], Defense]] = {
        "proximal": lambda: Proximal(strength, "squared" if published else "plain"),
        "dense-noise": lambda: GaussianNoise(strength, rows="all"),
        "sign": SignOnly,
        "randomized-labels": lambda: RandomizedLabels(strength),
        "fake-items": lambda: FakeItems(strength),
    }
    if name not in makers:
        raise unknown_name("defense", name, ["none", "ldp", *makers])
    return makers[name]()


def attack_of(ask: Mapping[str, Scalar], published: bool, users: int, seed: int) -> FromUploads | FromSums:
    """The attack that a cell asks for."""
    options: dict[str, Any] = {"seed": seed}
    if "participation" in ask:
        options["participation"] = ask["participation"]
    name = str(ask["attack"])
    if name == "imia":
        return ShadowClients(
            gamma=float(ask["gamma"]),
            popular_weight=4.0 if ask.get("popularity") else 1.0,
            user_init=Normal((2 / (users + 64)) ** 0.5),  # Xavier's of the whole table, as in the code
            graph="true-graph" if published or ask.get("true_graph") else "guessed",
            accumulate_gradients=published or bool(ask.get("accumulate")),
            **options,
        )
    if name not in _ATTACKS:
        raise unknown_name("attack", name, ["imia", *_ATTACKS])
    return _ATTACKS[name](**options)


_ATTACKS: dict[str, Callable[..., FromUploads | FromSums]] = {
    "alignment": GradientAlignment,
    "projection": partial(GradientAlignment, shadow_rows=0),
    "alignment-popularity": partial(GradientAlignment, popularity=True),
    "sums": AlignmentOfSums,
    "rehearsed-sums": RehearsedSums,
    "popularity-of-sums": PopularityOfSums,
    "k-means": KMeans,
    "k-means-point": partial(KMeans, sse="point"),
    "random": RandomGuess,
    "all-positive": AllPositive,
    "popularity": Popularity,
}


def measure(
    run: Mapping[str, Scalar], asks: Sequence[Mapping[str, Scalar]], *, variant: str, seed: int, threads: int
) -> Iterator[Measured]:
    """One training run with all that is asked for at its wire; then the results in the order of the asks."""
    made = setting(run, variant, seed)
    taps = [_tap(made, ask) for ask in asks]
    start = perf_counter()
    trained, looks = _train(made, taps, threads, any(ask.get("measure") == "deviation" for ask in asks))
    seconds = perf_counter() - start
    for ask, tap in zip(asks, taps, strict=True):
        if isinstance(tap, _Timed):
            yield _chained(made, tap, str(ask["attribute"])) if "attribute" in ask else _graded(made, tap)
        elif isinstance(tap, _FlipOne):
            yield Measured({"accuracy": np.array(tap.right, np.float64)}, seconds=tap.seconds)
        elif ask.get("measure") == "utility":
            yield Measured({"hit@10": _hit(made, trained)}, seconds=seconds)
        else:
            user, item, series = looks
            yield Measured({"user-deviation": user, "item-deviation": item}, series, seconds)


def _graded(made: Setting, tap: _Timed) -> Measured:
    """An attack's answer about all pairs that it has seen."""
    question = pairs_seen(tap.state(), made.train.n_items)
    answer = tap.listening.answer(question)
    spent = tap.seconds
    graded = grade_items(question, answer, truth_of(question, made.train))
    f1, activity = graded.f1.value, made.train.activity[graded.f1.user]
    metrics = {
        "f1": f1,
        "auc": graded.auc.value,
        "exposed@1%": graded.exposed.value,
        "ms": np.array([1000 * spent / max(1, len(f1))]),
        "pooled-auc": np.array([graded.pooled_auc]),
        "advantage": np.array([graded.advantage]),
        "spearman": _rank_products(activity, f1),
    }
    if isinstance(tap.attack, FromSums):  # the same scores, graded on somebody else: what is not about the victim
        others = replace(question, client=_somebody_else(question.client, made))
        metrics["auc-of-others"] = auc_by_user(
            answer.double().numpy(), truth_of(others, made.train), others.client.numpy()
        ).value
    metrics |= {f"pooled-tpr@{at}": np.array([rate]) for at, rate in graded.tpr.items() if rate is not None}
    return Measured(metrics, {"f1-by-interactions": _by_interactions(activity, f1)}, spent)


def _chained(made: Setting, tap: _Timed, attribute: str) -> Measured:
    """How well a plain reader tells an attribute from the interactions that an attack claims, and from true ones."""
    question = pairs_seen(tap.state(), made.train.n_items)
    claimed = at_least(claimed_interactions(question, tap.listening.answer(question), made.train))
    attacked = np.isin(made.train.user, question.client.numpy())
    known = made.train.restrict(attacked, "users who took part in no round")
    found, given = (attribute_auc(data, attribute, seed=made.seed) for data in (claimed, known))
    return Measured({"auc": np.array([found.auc]), "auc-of-truth": np.array([given.auc])}, seconds=tap.seconds)


def _somebody_else(client: Tensor, made: Setting) -> Tensor:
    """Another user for each client, i64[n]: a random permutation of all users."""
    lot = random.bits(made.seed, "somebody else", np.arange(made.train.n_users))
    order = np.argsort(lot)
    other = np.empty_like(order)
    other[order] = np.roll(order, 1)
    return torch.from_numpy(other)[client]


# --- training ---------------------------------------------------------------------------------------------------------


Looks = tuple[NDArray[np.float64], NDArray[np.float64], dict[str, list[tuple[float, float]]]]


def _train(made: Setting, taps: Sequence[Tap], threads: int, looks: bool) -> tuple[FederatedModel, Looks]:
    """Train; on demand stop every few rounds and look how far the embeddings are from their start."""
    common: dict[str, Any] = {
        "defense": made.defense,
        "taps": taps,
        "executor": InProcess(threads),
        "seed": made.seed,
        "spare": made.spare,
        "show_progress": False,
    }
    if not looks:
        trained = train_federated(made.protocol, made.model, made.train, **common)
        return trained, (np.empty(0), np.empty(0), {})
    folder = tempfile.TemporaryDirectory(prefix="recleak-imia-")
    series: dict[str, list[tuple[float, float]]] = {"user-deviation": [(0.0, 0.0)], "item-deviation": [(0.0, 0.0)]}
    first: dict[str, Tensor] = {}
    for rounds in range(0, ROUNDS + 1, _STEP):
        protocol = Federated(
            rounds=rounds, clients_per_round=made.protocol.clients_per_round, local=made.protocol.local
        )
        trained = train_federated(protocol, made.model, made.train, directory=Path(folder.name), **common)
        everybody = np.flatnonzero(made.train.activity)
        now = {"user": trained.store.read(everybody).values["user"], "item": trained.params["item"]}
        if not first:
            first = {name: value.clone() for name, value in now.items()}
            continue
        away = {name: (now[name] - first[name]).square().sum(1).double().numpy() for name in now}
        for name in now:
            series[f"{name}-deviation"].append((float(rounds), float(away[name].mean())))
    weakref.finalize(trained, folder.cleanup)  # as long as the model reads from it
    return trained, (away["user"], away["item"], series)


def _hit(made: Setting, trained: FederatedModel) -> NDArray[np.float64]:
    """Hit@10 of every user among 99 sampled negatives, f64[U]."""
    candidates = evaluation_candidates(made.split, 99, seed=made.seed)
    return rank(trained, made.train, made.split.test, candidates.items).hit(10)


# --- taps -------------------------------------------------------------------------------------------------------------


class _Nothing:
    """A tap that does not listen."""

    seconds = 0.0

    def receive(self, message: Message) -> None:
        """Ignores it."""

    def state(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing is open."""


class _Timed(_Nothing):
    """An attack that listens, and how long it thinks, while training goes on beside it: decoding is not counted."""

    def __init__(self, made: Setting, attack: FromUploads | FromSums, knowledge: Knowledge) -> None:
        self.seconds, self.made, self.attack = 0.0, made, attack
        self.vantage: Any = type(attack).vantage
        self.listening: Listening[Any, WhichItems] = Listening(self.vantage(), cast(Any, self), knowledge)

    def init(self, knowledge: Knowledge) -> State:
        """The attack's."""
        return self.attack.init(knowledge)

    def fold(self, knowledge: Knowledge, state: State, message: Any) -> State:
        """The attack's, timed."""
        start = perf_counter()
        after = self.attack.fold(knowledge, state, message)
        self.seconds += perf_counter() - start
        return after

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """The attack's, timed."""
        start = perf_counter()
        answer = self.attack.answer(knowledge, state, question)
        self.seconds += perf_counter() - start
        return answer

    def receive(self, message: Message) -> None:
        """To the attack, through bytes."""
        self.listening.receive(self.made.shown(message))

    def state(self) -> dict[str, Tensor]:
        """The attack's."""
        return self.listening.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The attack's."""
        self.listening.restore(state)


class _FlipOne(_Nothing):
    """The proof of concept of Table 1: is a row nearer to a twin's than to that of a twin with its one rating reversed?

    It holds the truth: all other ratings are known. Each client is tried at its first participation, with one random
    item of its local data.
    """

    def __init__(self, made: Setting) -> None:
        local = made.protocol.local
        self.examples = Examples.of(
            made.train, negatives=local.negatives, resample=local.resample, spare=made.spare, seed=made.seed
        )
        self.made, self.knowledge, self.seed, self.seconds = made, made.knowledge(), made.seed, 0.0
        self.received: dict[str, Tensor] = {}
        self.done: set[int] = set()
        self.right: list[bool] = []

    def receive(self, message: Message) -> None:
        """Train both twins of every client that is new."""
        start = perf_counter()
        if isinstance(message, Broadcast):
            self.received = message.params
        elif isinstance(message := self.made.shown(message), Upload):
            new = [place for place, client in enumerate(message.update.client.tolist()) if client not in self.done]
            if new:
                self._compare(message, torch.tensor(new))
        self.seconds += perf_counter() - start

    def _compare(self, message: Upload, new: Tensor) -> None:
        update = message.update.select(new)
        data = self.examples.draw(update.client.numpy(), message.round)
        lot = random.below(data.count, self.seed, "flip", data.client)
        chosen = data.item[data.offset[:-1] + lot]  # i64[C]
        flipped = np.where(data.item == chosen[data.owner], 1 - data.label, data.label).astype(np.float32)
        twins = []
        for number, label in enumerate((data.label, flipped)):
            seed = int(random.bits(self.seed, "twin", number) >> np.uint64(1))
            guess = LocalData(data.client, data.item, label, None, data.offset, data.n_items)
            twins.append(
                train_shadows(self.knowledge, self.received, guess, message.round, seed, defense=self.knowledge.defense)
            )
        row = torch.searchsorted(
            update.owner * update.n_items + update.item,
            torch.arange(update.n_clients) * update.n_items + torch.from_numpy(chosen),
        )
        same, other = ((twin.rows["item"][row] - update.rows["item"][row]).norm(dim=1) for twin in twins)
        self.right += (same < other).tolist()
        self.done.update(update.client.tolist())


def _tap(made: Setting, ask: Mapping[str, Scalar]) -> _Nothing:
    if "attack" in ask:
        attack = attack_of(ask, made.published, made.train.n_users, made.seed)
        truth = isinstance(attack, ShadowClients) and attack.graph == "true-graph"
        return _Timed(made, attack, made.knowledge(truth=truth))
    if ask.get("measure") == "flip":
        return _FlipOne(made)
    if ask.get("measure") in ("utility", "deviation"):
        return _Nothing()
    raise ConfigError(f"A cell asks for {dict(ask)}, expected an attack, or measure utility, flip or deviation.")


# --- statistics -------------------------------------------------------------------------------------------------------


def _rank_products(activity: NDArray[np.int64], f1: NDArray[np.float64]) -> NDArray[np.float64]:
    """One number per user whose mean is Spearman's rank correlation r of activity and F1; zeros if one is constant.

    With standardized ranks a and b, the mean of a b is r; the influence of one user on r is a b - r (a^2 + b^2) / 2, so
    that the bootstrap of these numbers has the spread of r.
    """
    first, second = (_standardized(rankdata(values)) for values in (activity, f1))
    correlation = float((first * second).mean())
    return first * second - correlation / 2 * (first**2 + second**2) + correlation


def _standardized(values: NDArray[np.float64]) -> NDArray[np.float64]:
    spread = float(values.std())
    return (values - values.mean()) / spread if spread else np.zeros_like(values)


def _by_interactions(activity: NDArray[np.int64], f1: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Mean activity and mean F1 of groups of users, by activity."""
    groups = np.array_split(np.argsort(activity, kind="stable"), min(_GROUPS, len(activity)))
    return [(float(activity[group].mean()), float(f1[group].mean())) for group in groups]
