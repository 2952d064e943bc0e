"""PARD: what leaves should tell nothing about a user's attributes, what stays should tell them.

Zhao et al., "Privacy-Aware Representation Decoupling in Federated Recommendation against Attribute Inference Attacks".
For a client u with the class mu of an attribute, the terms of the loss (eq. 38) and the estimators that they need are

    lambda_ir L_ir           the mean over own items i of log q(mu | [z_u^ir, z_i])             adversarial   (eq. 16)
    lambda_re L_re^FP        - log q(mu | z_u^re)                                               cooperative   (eq. 29)
    lambda_re L_re^IP        || z_u^re - g(mu) ||                                               cooperative   (eq. 33)

each summed over attributes. Estimators q and g are perceptrons of the client (`estimators`). Before every local epoch
they make steps on the public data of insensitive users and on the client's own (eq. 21, 30, 34, 37); after that they
are constants to the recommender (eq. 38), as representations are to them. Equations 24 to 28 of the paper have "min"
where it must be "max"; eq. 29 is right, and taken here.

Axis letters: C clients, P public users, n inputs, m own items of a batch, d factors, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import isfinite
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recleak import random
from recleak.defenses.base import Defense, Scene
from recleak.defenses.estimators import (
    descended,
    encoded,
    estimate,
    estimator_components,
    log_chance,
    mean_of_known,
)
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component, by_name
from recleak.streams import Streams
from recleak.training.attributes import CLIENT, ITEMS, LABEL, MEAN, has_label

Bound = Literal["clamped", "club", "plain"]
Reads = Literal["items", "mean", "mixed"]
Inverse = Literal["public", "own"]
_KINDS = ("irrelevant", "forward", "inverse")


@dataclass(frozen=True)
class Decoupling(Defense):
    """The training of PARD, for a model with the components `user`, `user.private` and `item` (`models.decoupled`).

    attributes: how many classes each protected attribute has; 1 stands for a number. irrelevant and relevant are
    lambda_ir and lambda_re; with 0, a term and its estimators are not there (the ablations of Table IV).
    bound: what is made small in the place of the information that leaves.
        "plain": log q(mu | z), as eq. 15 and 16 have it. It has no lower end: it drives z to where q is sure and wrong.
        "clamped": max(0, log q(mu | z) - log p(mu)), with p from public data: no more than to know nothing.
        "club": log q(mu | z) - E_p log q(mu' | z), with the second term of CLUB (eq. 14), over all classes.
    reads: what the first estimator is trained on and asked: pairs with single own "items" (eq. 11, 21), the "mean" of
    own rows (which the paper's attacker reads), or "mixed": trained on means, asked about items, as the published code.
    steps, momentum, sample: of SGD on so many public users in each step (None: all), and on the client itself. Eq. 37
    has the minimum: estimators must follow the vectors, or these run away from where an estimator was, each in the
    direction of its class, and tell it to whoever looks anew. One step in a round is too few for that.
    pairs: own items of a batch that count in L_ir.
    As the published code: `warm_up` rounds without terms (it has 3); `relabels`: all rows, public ones too, get the
    client's own label from the second step or attribute on, a bug; `inverse` "own": g is trained on the client's own
    label instead of public ones.
    """

    attributes: Mapping[str, int] = field(default_factory=dict)
    irrelevant: float = 0.5
    relevant: float = 0.5
    bound: Bound = "clamped"
    reads: Reads = "mean"
    hidden: tuple[int, ...] = (32, 16)
    learning_rate: float = 0.1
    momentum: float = 0.9
    steps: int = 10
    sample: int | None = 16
    pairs: int = 16
    warm_up: int = 0
    relabels: bool = False
    inverse: Inverse = "public"
    factors: int = 64
    insensitive: float = 0.2  # share of users who tell, for an audit

    def __post_init__(self) -> None:
        for name, given, options in (
            ("bound", self.bound, get_args(Bound)),
            ("reads", self.reads, get_args(Reads)),
            ("inverse", self.inverse, get_args(Inverse)),
        ):
            if given not in options:
                raise ConfigError(f"{name} is {given!r}, expected one of {', '.join(options)}.")
        for name in ("irrelevant", "relevant", "learning_rate", "momentum"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}, expected a finite number of at least 0.")
        for name in ("steps", "pairs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1.")
        for name, classes in self.attributes.items():
            if classes < 1:
                raise ConfigError(f"{name} has {classes} classes, expected at least 2, or 1 for a number.")

    # What it is made of.

    @property
    def kinds(self) -> tuple[str, ...]:
        """The estimators that each attribute has."""
        return (*_KINDS[: bool(self.irrelevant)], *(_KINDS[1:] if self.relevant else ()))

    @property
    def idle(self) -> frozenset[str]:
        """Without a term there is nothing to do."""
        return frozenset() if self.kinds and self.attributes else frozenset({"alternate", "objective"})

    def own_components(self) -> tuple[Component, ...]:
        """The estimators, by attribute: kept by each client."""
        return self._estimators

    @cached_property
    def _estimators(self) -> tuple[Component, ...]:
        d = self.factors
        parts: list[Component] = []
        for attribute, classes in self.attributes.items():
            widths = {"irrelevant": (2 * d, classes), "forward": (d, classes), "inverse": (classes, d)}
            for kind in self.kinds:
                inputs, outputs = widths[kind]
                parts += estimator_components(_name(kind, attribute), (inputs, *self.hidden, outputs))
        return tuple(parts)

    def for_attributes(self, classes: Mapping[str, int]) -> Defense:
        """With these, if it names none."""
        return self if self.attributes else replace(self, attributes=dict(classes))

    @property
    def needs_attributes(self) -> tuple[str, ...]:
        """Those that it protects."""
        return () if "alternate" in self.idle else tuple(self.attributes)

    @property
    def disclosed(self) -> tuple[str, ...]:
        """What the estimators are trained on."""
        if "alternate" in self.idle:
            return ()
        return (*(("user", "item") if self.irrelevant else ()), *(("user.private",) if self.relevant else ()))

    def check_components(self, components: tuple[Component, ...]) -> None:
        """The model has what is decoupled, as wide as the estimators expect."""
        named = by_name(components)
        for name in self.disclosed:
            if name not in named or named[name].shape != (self.factors,):
                got = f"{list(named[name].shape)}" if name in named else "none"
                raise ConfigError(
                    f"Decoupling needs the component {name!r} of shape [{self.factors}], got {got}.\n"
                    "  Use the model Decoupled and give both the same `factors`; with one vector per user, relevant=0."
                )

    # The first stage: estimators learn.

    def alternate(self, params: Params, scene: Scene, streams: Streams) -> Params:
        """Steps of the estimators on public data and the client's own (eq. 37); representations are constants."""
        if not scene.attributes or not scene.public or scene.round < self.warm_up:
            return {}
        fixed = {name: value.detach() for name, value in params.items()}

        def loss(own: Params, step: int) -> Tensor:
            place = _sampled(scene.public, self.sample, scene.round, step)
            seen = {kind: self._seen(kind, fixed, scene, place) for kind in self.kinds}
            terms = []
            for position, attribute in enumerate(self.attributes):
                label = self._labels(attribute, scene, place, wrong=self.relabels and bool(position or step))
                for kind in ("irrelevant", "forward"):
                    if kind in seen:
                        each = self._log(own, kind, attribute, seen[kind], label)
                        terms.append(-mean_of_known(each, has_label(label)))
                if "inverse" in seen:
                    label, private = self._for_inverse(label, seen["inverse"])
                    one_hot = encoded(label, self.attributes[attribute], private.dtype)
                    guess = estimate(own, _name("inverse", attribute), one_hot)
                    terms.append(mean_of_known(_distance(private, guess), has_label(label)))
            return reduce(torch.add, terms)

        own = {part.name: scene.own[part.name] for part in self.own_components()}
        return descended(own, loss, rate=self.learning_rate, momentum=self.momentum, steps=self.steps)

    def _seen(self, kind: str, params: Params, scene: Scene, place: Tensor) -> Tensor:
        """What an estimator is trained on: vectors of public users at some places, then of the client, f32[C, n, i]."""
        public = scene.public
        if kind != "irrelevant":
            return _stacked(public["user.private"][place], params["user.private"])
        rows, weight = _own_rows(params["item"], scene.batch.own, self.pairs)
        if self.reads == "items":
            mine, theirs = rows[:, 0], public["item"][place, scene.round % ITEMS]
        else:
            mine, theirs = (rows * weight.unsqueeze(2)).sum(1), public["item" + MEAN][place]
        told = torch.cat([public["user"][place], theirs], dim=1)
        return _stacked(told, torch.cat([params["user"], mine], dim=1))

    def _labels(self, attribute: str, scene: Scene, place: Tensor, *, wrong: bool) -> Tensor:
        """The labels of what estimators are trained on, [C, n]."""
        mine = _standardized(scene.attributes[attribute], attribute, scene).unsqueeze(1)
        told = _standardized(scene.public[LABEL + attribute], attribute, scene)[place].expand(len(mine), -1)
        return torch.cat([mine.expand_as(told) if wrong else told, mine], dim=1)

    def _for_inverse(self, label: Tensor, private: Tensor) -> tuple[Tensor, Tensor]:
        """What g is trained on, labels and vectors: public ones only (eq. 34), or the client's own."""
        chosen = slice(None, -1) if self.inverse == "public" else slice(-1, None)
        return label[:, chosen], private[:, chosen]

    # The second stage: the recommender learns.

    def objective(self, params: Params, scene: Scene, streams: Streams) -> Tensor | None:
        """lambda_ir L_ir + lambda_re (L_re^FP + L_re^IP), f32[C]; estimators are constants (eq. 38)."""
        if not scene.attributes or not scene.public or scene.round < self.warm_up:
            return None
        terms = []
        for attribute, classes in self.attributes.items():
            label = _standardized(scene.attributes[attribute], attribute, scene).unsqueeze(1)  # [C, 1]
            counts = has_label(label).squeeze(1)
            if attribute in scene.protects:
                counts = counts & scene.protects[attribute]
            parts = []
            if self.irrelevant:
                parts.append(self.irrelevant * self._leaving(attribute, params, scene, label))
            if self.relevant:
                private = params["user.private"].unsqueeze(1)
                forward = -self._log(scene.own, "forward", attribute, private, label).squeeze(1)
                guess = estimate(scene.own, _name("inverse", attribute), encoded(label, classes, private.dtype))
                parts.append(self.relevant * (forward + _distance(private, guess).squeeze(1)))
            terms.append(reduce(torch.add, parts) * counts.to(parts[0].dtype))
        return reduce(torch.add, terms)

    def _leaving(self, attribute: str, params: Params, scene: Scene, label: Tensor) -> Tensor:
        """L_ir of one attribute, f32[C]."""
        rows, weight = _own_rows(params["item"], scene.batch.own, self.pairs)  # f32[C, m, d], f32[C, m]
        if self.reads == "mean":
            rows, weight = (rows * weight.unsqueeze(2)).sum(1, keepdim=True), weight.sum(1, keepdim=True)
        both = torch.cat([params["user"].unsqueeze(1).expand_as(rows), rows], dim=2)
        output = estimate(scene.own, _name("irrelevant", attribute), both)
        each = log_chance(output, label.expand(-1, rows.shape[1]))
        if self.bound == "clamped":
            each = (each - _prior(attribute, scene, self.attributes[attribute], label)).clamp(min=0)
        elif self.bound == "club":
            each = each - _expected(output, attribute, scene, self.attributes[attribute])
        return (each * weight).sum(1)

    def _log(self, own: Mapping[str, Tensor], kind: str, attribute: str, inputs: Tensor, label: Tensor) -> Tensor:
        return log_chance(estimate(own, _name(kind, attribute), inputs), label)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: it is trained against one reader."""
        why = (
            "What leaves is trained so that one reader, a small network of the client itself, fails. Nothing is "
            "bounded or random: another reader may succeed, and which items a client touched, and how their rows "
            "moved, shows as before."
        )
        return (NoGuarantee(repr(self), why),)


def _name(kind: str, attribute: str) -> str:
    return f"estimator.{kind}.{attribute}"


def _sampled(public: Mapping[str, Tensor], sample: int | None, round: int, step: int) -> Tensor:
    """The places of some public users, the same for all clients and others at every step of a round, i64[P].

    A round has them in one random order, of which each step takes the next so many.
    """
    told = public[CLIENT]
    if sample is None or len(told) <= sample:
        return torch.arange(len(told), device=told.device)
    order = random.bits(0, "public sample", round, told.cpu().numpy()).argsort()
    return torch.from_numpy(order[(step * sample + np.arange(sample)) % len(order)]).to(told.device)


def _stacked(told: Tensor, mine: Tensor) -> Tensor:
    """Public inputs f32[P, i], the same for all, and the clients' own, f32[C, i] -> f32[C, P + 1, i]."""
    return torch.cat([told.expand(len(mine), *told.shape), mine.unsqueeze(1)], dim=1)


def _own_rows(rows: Tensor, own: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Rows of some own items of a batch, f32[C, B, d], bool[C, B] -> f32[C, m, d], and weights that add up to 1, f32[C,
    m].

    Batches are in a random order, so the first ones do. A client without any in its batch has weights of 0.
    """
    order = torch.where(own, torch.arange(own.shape[1], 0, -1, device=own.device), 0)  # the first own item has most
    value, place = order.topk(min(most, own.shape[1]), dim=1)
    is_own = (value > 0).to(rows.dtype)
    weight = is_own / is_own.sum(1, keepdim=True).clamp(min=1)
    return rows.gather(1, place.unsqueeze(2).expand(-1, -1, rows.shape[2])), weight


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The l2 distance, f32[C, n, d] twice -> f32[C, n]; where it is 0 its gradient is too."""
    squared = (one - other).square().sum(2)
    still = squared == 0
    return torch.where(still, squared, torch.where(still, 1.0, squared).sqrt())


def _standardized(label: Tensor, attribute: str, scene: Scene) -> Tensor:
    """A number in standard deviations from the mean of the public ones; a class as it is."""
    if not label.is_floating_point():
        return label
    told = scene.public[LABEL + attribute]
    told = told[has_label(told)].double()
    mean, spread = (float(told.mean()), float(told.std(correction=0))) if len(told) else (0.0, 1.0)
    return ((label.double() - mean) / (spread if spread > 0 else 1.0)).float()


def _shares(attribute: str, scene: Scene, classes: int) -> Tensor:
    """How frequent the classes are among public users, one more of each, f32[K]."""
    told = scene.public[LABEL + attribute]
    count = torch.bincount(told[has_label(told)], minlength=classes).float() + 1
    return count / count.sum()


def _prior(attribute: str, scene: Scene, classes: int, label: Tensor) -> Tensor:
    """log p(mu) of who knows how frequent classes are, [C, 1]; of a standardized number as in `log_chance`."""
    if label.is_floating_point():
        return -label.nan_to_num().square() / 2
    return _shares(attribute, scene, classes).log()[label.clamp(min=0)]


def _expected(output: Tensor, attribute: str, scene: Scene, classes: int) -> Tensor:
    """E_p log q(mu' | z) over the classes, f32[C, n]; of a standardized number, whose variance is 1, in closed form."""
    if scene.public[LABEL + attribute].is_floating_point():
        return -(output.squeeze(-1).square() + 1) / 2
    return functional.log_softmax(output, dim=-1) @ _shares(attribute, scene, classes).to(output.dtype)
