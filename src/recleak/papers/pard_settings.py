"""What PARD's cells train: the objects that a cell's `run` names, as the head of `pard` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.attacks.representation import OWN
from recleak.data.features import classes_of
from recleak.data.interactions import Interactions
from recleak.data.sampling import evaluation_candidates
from recleak.data.source import open_data
from recleak.data.split import Split, leave_one_out
from recleak.defenses.adaptive_noise import AdaptiveNoise
from recleak.defenses.base import Chain, Defense, all_components
from recleak.defenses.consent import UserConsent
from recleak.defenses.decoupling import Decoupling
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, unknown_name
from recleak.grading import own_items
from recleak.metrics.ranking import rank
from recleak.models.base import Model
from recleak.models.components import Component, Normal
from recleak.models.decoupled import Decoupled
from recleak.models.lightgcn import LightGCN
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.protocols.federated import FederatedModel
from recleak.protocols.stopping import Plateau
from recleak.training.attributes import PrivateAttributes, attributes_of, insensitive
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import SGD

CODE = "as-published-code"
FACTORS, BATCH, NEGATIVES, HEAD_RATE = 64, 256, 5, 0.5
ROUNDS, EVERY, PATIENCE = 1500, 10, 5
CODE_EVERY, CODE_PATIENCE = 1, 20
CANDIDATES = {"ml-100k": 99, "ml-1m": 999, "taobao": 999}
ATTRIBUTES = {"ml-100k": ("age", "gender", "occupation"), "ml-1m": ("age", "gender", "occupation")}
USER_RATE, ITEM_RATE, LOWER_RATE = 0.5, 3000.0, 1000.0  # for the mean over a batch of 256
LOWER = (("fedncf", "pard"), ("fedgcn", "pard"), ("fedgcn", "pfedrec"))
SPREAD = 0.1  # of vectors at the start
LEADERS = 100  # users as which CDA's adversary looks for others: each scores all uploads, and may fit a model for that
Scalar = str | int | float | bool
FOLDS = 5  # of users whose attribute is known, for an attack that is graded on them


@dataclass(frozen=True, eq=False)
class Setting:
    """One training run."""

    split: Split
    model: Model
    defense: Defense
    local: LocalTraining
    attributes: PrivateAttributes
    data: str
    method: str
    variant: str
    seed: int
    rounds: int
    tuned: bool = False

    @property
    def train(self) -> Interactions:
        """What clients train on."""
        return self.split.train

    @property
    def code(self) -> bool:
        """Whether the published code is followed, not the text."""
        return self.variant == CODE

    @property
    def everybody(self) -> NDArray[np.int64]:
        """Who has anything to train on."""
        return np.flatnonzero(self.train.activity).astype(np.int64)

    def known(self, ask: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        """Whose attributes the server knows, bool[U]: those of public users; `labels` "others": of as many others; a
        number: of those who would be public if that were eta. With a `fold`, those outside it.
        """
        public: NDArray[np.bool_] = self.attributes.public.numpy()
        wanted = ask.get("labels", "public")
        if "fold" in ask:
            rest: NDArray[np.bool_] = public & (self._fold != int(ask["fold"]))
            return rest
        if wanted == "public":
            return public
        if wanted == "others":
            lot = random.uniform(self.seed, "labelled users", np.arange(len(public)))
            others = np.flatnonzero(~public)
            chosen = np.zeros(len(public), bool)
            chosen[others[lot[others].argsort()[: int(public.sum())]]] = True
            return chosen
        known: NDArray[np.bool_] = insensitive(len(public), float(wanted), self.seed).numpy()
        if self.defense.disclosed and (public & ~known).any():
            raise ConfigError(
                f"labels is {wanted} where {public.mean():.2f} of all users have told their attributes, expected more: "
                "the server knows them.\n  Give the run a smaller eta."
            )
        return known

    @property
    def _fold(self) -> NDArray[np.int64]:
        """A part for each user, of FOLDS."""
        return random.below(FOLDS, self.seed, "fold of a known user", np.arange(len(self.attributes.public)))

    def among(self, ask: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        """Of whom a guess is graded, bool[U]: of users who have items and whose attribute the server does not know, nor
        is told; `among` "protected" or "consenting": of those who want the attribute protected, or do not; "known",
        with a `fold`: of the public users in it.
        """
        public, which = self.attributes.public.numpy(), ask.get("among", "all")
        users: NDArray[np.bool_] = (self.train.activity > 0) & ~self.known(ask)
        if which == "known":
            users &= public
            return users
        if ask.get("labels") == "others":
            users &= ~public
        if which == "all":
            return users
        if which not in ("protected", "consenting"):
            raise unknown_name("among", str(which), ("all", "protected", "consenting", "known"))
        said = self.attributes.protected.get(str(ask["attribute"]))
        wants = np.ones(len(users), bool) if said is None else said.numpy()
        chosen: NDArray[np.bool_] = users & (wants if which == "protected" else ~wants)
        return chosen

    def knowledge(self, ask: Mapping[str, Scalar] | None = None) -> Knowledge:
        """What the curious server knows (section II-B); an oracle is told everybody's items."""
        public = {"popularity": torch.from_numpy(self.train.popularity.astype(np.float32))}
        if ask is not None and "attribute" in ask:
            label, _ = classes_of(self.train, str(ask["attribute"]))
            public[f"labels of {ask['attribute']}"] = torch.from_numpy(np.where(self.known(ask), label, -1))
        if ask is not None and self.oracle(ask):
            public[OWN] = own_items(self.train)
        parts = all_components(self.model.components(), self.defense)
        if ask is not None and ask.get("attack") in ("community", "cda"):
            public["targets"] = self.targets[self.leaders(ask)]
        if ask is not None and ask.get("attack") == "cda":
            parts = self._heard(parts)
        return Knowledge(self.model, self.train.n_users, self.train.n_items, parts, self.local, self.defense, public)

    def _heard(self, parts: tuple[Component, ...]) -> tuple[Component, ...]:
        """What CDA scores models with, of all that is on the wire. Of a user who keeps a part, nothing of its own is
        used: the adversary puts a fitted user in its place, whole.
        """
        if all(part.shared for part in parts):
            return parts
        if self.model.reads_neighbors:
            raise ConfigError(
                f"{self.method} on a graph keeps a part of its model, expected one that sends all: CDA fits what is "
                "kept to its targets, and does not know with whose neighbors.\n  Ask for the attack 'community'."
            )
        own = {part.name for part in self.defense.own_components()}
        model = [part for part in parts if part.name not in own]
        return tuple(replace(part, shared=False) if part.storage == "per_user" else part for part in model)

    @property
    def targets(self) -> Tensor:
        """Every user as an adversary that looks for who is similar to it, f32[U, I]."""
        return torch.from_numpy((self.train.matrix().toarray() > 0).astype(np.float32))

    def leaders(self, ask: Mapping[str, Scalar]) -> Tensor:
        """The users as which an adversary looks for who is similar, i64[A]: all; of CDA some, drawn at random."""
        users = np.arange(self.train.n_users)
        if ask["attack"] == "cda":
            users = np.sort(random.uniform(self.seed, "leaders", users).argsort()[:LEADERS])
        return torch.from_numpy(users)

    def oracle(self, ask: Mapping[str, Scalar]) -> bool:
        """Whether the attacker is told which items are whose."""
        return bool(ask.get("oracle", self.code))

    @cached_property
    def candidates(self) -> NDArray[np.int32]:
        """What held-out items are ranked against, i32[U, n]."""
        return evaluation_candidates(self.split, CANDIDATES[self.data], seed=self.seed).items

    @property
    def every(self) -> int:
        """Rounds between looks."""
        return CODE_EVERY if self.code else EVERY

    @property
    def plateau(self) -> Plateau:
        """When a method has nothing left to learn."""
        return Plateau(self.every, CODE_PATIENCE if self.code else PATIENCE)

    def recall(self, model: FederatedModel) -> float:
        """Recall@10 + Recall@20 of validation items, against sampled ones."""
        ranks = rank(replace(model, tuned=self.tuned), self.train, self.split.valid, self.candidates)
        return float(ranks.recall(10).mean() + ranks.recall(20).mean())


def setting(run: Mapping[str, Scalar], variant: str, seed: int) -> Setting:
    """The objects that a cell's `run` names."""
    name, base, method = str(run["data"]), str(run["model"]), str(run["method"])
    data = open_data(name, str(run["preset"]))
    if run.get("thin"):
        data = thinned(data, int(run["thin"]), seed)
    split = leave_one_out(data, by="time", seed=seed)
    names = [each for each in ATTRIBUTES.get(name, ("age", "gender")) if each in data.attributes]
    public = insensitive(data.n_users, float(run.get("eta", 0.2)), seed)
    attributes = attributes_of(split.train, names, public)
    if "consent" in run:
        attributes = replace(attributes, protected=_protected(public, names, float(run["consent"]), seed))
    classes = {each: len(classes_of(split.train, each)[1]) for each in names}
    code = variant == CODE
    model = _model(run, base, method, code)
    defense = _defense(run, base, method, classes, _as_the_code(name, int(public.sum())) if code else {})
    local = _local(model, base, method, split.train.n_items, name, code)
    rounds = int(run.get("rounds", ROUNDS))
    tuned = method == "pfedrec"
    return Setting(split, model, defense, local, attributes, name, method, variant, seed, rounds, tuned)


def _protected(public: Tensor, names: Sequence[str], consent: float, seed: int) -> dict[str, Tensor]:
    """Who wants which attribute protected, bool[U] each: of the users who are not public, all but a share of `consent`,
    drawn for each attribute.
    """
    users = np.arange(len(public))
    return {
        name: torch.from_numpy(random.uniform(seed, f"consent to {name}", users) >= consent) & ~public for name in names
    }


def thinned(data: Interactions, count: int, seed: int) -> Interactions:
    """Every user with so many of its interactions at random."""
    lot = random.uniform(seed, "thinned", data.user, data.item)
    order = np.lexsort((lot, data.user))
    rank_in_user = np.empty(len(order), np.int64)
    rank_in_user[order] = np.arange(len(order)) - data.indptr[data.user[order]]
    return data.restrict(rank_in_user < count, f"{count} interactions of each user")


def _model(run: Mapping[str, Scalar], base: str, method: str, code: bool) -> Model:
    start, hidden = Normal(1.0 if code else SPREAD), (32,) if code else (64, 32)
    if base not in ("fedncf", "fedgcn"):
        raise unknown_name("model", base, ("fedncf", "fedgcn"))
    if method == "pard":
        combine: Any = "sum" if code else "concat"
        leaves: Any = run.get("vector", "sent")
        return Decoupled(FACTORS, hidden, combine, graph=base == "fedgcn", user=leaves, init=start)
    if base == "fedncf":
        return PFedRec(FACTORS, start) if method == "pfedrec" else NCF(FACTORS, hidden, start)
    return LightGCN(FACTORS, score="mlp", hidden=hidden, normalization="mean", propagate_items=False, init=start)


def _as_the_code(data: str, public: int) -> dict[str, Any]:
    """How the published code trains PARD, where it differs; it reads 8 % of the public users at each step."""
    rate = 0.1 if data == "ml-100k" else 0.01
    read = {"reads": "mixed", "relabels": True, "inverse": "own", "warm_up": 4, "steps": 1}
    return {**read, "learning_rate": rate, "sample": max(1, round(0.08 * public))}


def _defense(
    run: Mapping[str, Scalar], base: str, method: str, classes: Mapping[str, int], other: Mapping[str, Any]
) -> Defense:
    """`other` is what the published code has in the place of the text's, if it is followed."""
    code, sent = bool(other), Share(("user",), averaged=False)
    read: dict[str, Any] = {"bound": "plain", "reads": "items", **other}  # eq. 16, eq. 11 and 21
    options = {name: run[name] for name in ("bound", "reads", "steps", "momentum") if name in run}
    makers: dict[str, Callable[[], Defense]] = {
        "fedavg": lambda: ShareLess(("user",)) if run.get("vector") == "kept" else sent,
        "early-stop": lambda: sent,
        "pfedrec": Defense if base == "fedncf" else lambda: ShareLess(("user", *_heads(code))),
        "apm": lambda: Chain((sent, AdaptiveNoise(_levels(code), moment="upload"))),
        "uc-fedrec": lambda: Chain((sent, UserConsent(classes, float(run.get("strength", 0.5)), factors=FACTORS))),
        "pard": lambda: Decoupling(
            classes,
            irrelevant=float(run.get("ir", 0.5)),
            relevant=float(run.get("re", 0.5)),
            factors=FACTORS,
            **{**read, **options},
        ),
    }
    if method not in makers:
        raise unknown_name("method", method, makers)
    return makers[method]()


def _levels(code: bool) -> dict[str, float]:
    """How APM's levels are given out in the published code of PARD: user, item, hidden layers, last layer."""
    return {"user": 0, "item": 1, "head": 2, f"head.{2 if code else 3}": 3}


def _heads(code: bool) -> list[str]:
    return [f"head.{layer}.{kind}" for layer in range(1, 3 if code else 4) for kind in ("weight", "bias")]


def _local(model: Model, base: str, method: str, n_items: int, data: str, code: bool) -> LocalTraining:
    """How clients train; rates of users and items are their own."""
    names = {part.name for part in model.components()}
    item = LOWER_RATE if (base, method) in LOWER else ITEM_RATE
    rates = {"user": USER_RATE, "user.private": USER_RATE, "item": item}
    head = HEAD_RATE
    if code:
        head, scale = 0.1, 1.0 if data == "ml-100k" else 80.0
        rates = {"user": head * scale, "user.private": head * scale, "item": head * n_items * scale}
    turns: tuple[tuple[str, ...], ...] = ()
    if method == "pfedrec":
        turns = (("user", "head"), ("item",))  # what stays, then what leaves; the linear score has no vector of a user
    sgd = SGD(head, {name: rate for name, rate in rates.items() if name in names})
    return LocalTraining(1, BATCH, sgd, negatives=NEGATIVES, resample=not code, turns=turns)
