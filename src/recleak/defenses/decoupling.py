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
from recleak.defenses.base import Chain, Defense, Scene, hooks
from recleak.defenses.estimators import (
    CONTINUOUS,
    Lesson,
    classes_in,
    distance,
    encoded,
    estimate,
    estimator_components,
    in_float,
    log_chance,
    taught,
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
_AGAIN = 0.6  # of the inputs of a step, those that the published code takes along to the next one


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
    protected: in an audit, by attribute, the share of the users who do not tell that want it protected, or the column
    of the users that says so; who is not asked wants it.
    As the published code: `warm_up` rounds without terms (it has 4); `relabels`: from the second step or attribute on,
    0.6 of the inputs of the step before, public ones too, are there once more under the client's own label, a bug;
    `inverse` "own": g is trained on the client's own label instead of public ones.
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
    protected: Mapping[str, float | str] = field(default_factory=dict)  # who wants an attribute protected, for an audit

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

    def _acts(self, scene: Scene) -> bool:
        """Whether there are terms: not before somebody has told something."""
        return (
            bool(self.kinds and self.attributes and scene.attributes and scene.public) and scene.round >= self.warm_up
        )

    # The first stage: estimators learn.

    def alternate(self, params: Params, scene: Scene, streams: Streams) -> Params:
        """Steps of the estimators on public data and the client's own (eq. 37); representations are constants."""
        if not self._acts(scene):
            return {}
        fixed = {name: value.detach() for name, value in params.items()}
        own = {part.name: scene.own[part.name].detach() for part in self.own_components()}
        changed: Params = {}
        for position, attribute in enumerate(self.attributes):
            for kind in self.kinds:
                lesson = self._lesson(kind, attribute, position, fixed, scene)
                name = _name(kind, attribute)
                changed |= taught(own, name, lesson, rate=self.learning_rate, momentum=self.momentum)
        return changed

    def _lesson(self, kind: str, attribute: str, position: int, params: Params, scene: Scene) -> Lesson:
        """What one estimator is trained on: some public users at each step, and the client itself."""
        public, classes = scene.public, self.attributes[attribute]
        private = params["user.private"] if kind != "irrelevant" else params["user"]
        own = in_float(_standardized(scene.attributes[attribute], attribute, scene), private.dtype)  # f32[C]
        told = in_float(_standardized(public[LABEL + attribute], attribute, scene), private.dtype)  # f32[P]
        if kind == "inverse":
            return self._inverse_lesson(told, own, private, scene, classes)
        place, as_mine = self._places(public, scene.round, position)  # i64[S, n], bool[S, n]
        label = torch.where(place >= 0, told[place], torch.nan)
        if kind == "forward":
            return Lesson(public["user.private"][place], label, as_mine, private, own, classes)
        mine, theirs, has_items = self._of_items(params["item"], scene)
        inputs = torch.cat([public["user"], theirs], dim=1)[place]  # f32[S, n, 2 d]
        own = torch.where(has_items, own, torch.nan)
        return Lesson(inputs, label, as_mine, torch.cat([private, mine], dim=1), own, classes)

    def _inverse_lesson(self, told: Tensor, own: Tensor, private: Tensor, scene: Scene, classes: int) -> Lesson:
        """Of g: vectors from labels, of public users only (eq. 34), or of the client itself only."""
        place = _sampled(scene.public, self.sample, scene.round, range(self.steps))
        if self.inverse == "own":
            place = place[:, :0]
        else:
            own = torch.full_like(own, torch.nan)
        label, target = told[place], scene.public["user.private"][place]
        nothing = torch.zeros_like(label, dtype=torch.bool)
        inputs, mine = (_inputs(each, classes) for each in (label, own))
        return Lesson(inputs, label, nothing, mine, own, classes, target, private)

    def _of_items(self, rows: Tensor, scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
        """What stands for items: of the client f32[C, d], of public users f32[P, d]; and who has any, bool[C]."""
        some, weight = _own_rows(rows, scene.batch.own, self.pairs)
        has_items = weight.sum(1) > 0
        if self.reads == "items":
            return some[:, 0], scene.public["item"][:, scene.round % ITEMS], has_items
        return (some * weight.unsqueeze(2)).sum(1), scene.public["item" + MEAN], has_items

    def _places(self, public: Mapping[str, Tensor], round: int, position: int) -> tuple[Tensor, Tensor]:
        """The public users of each step, i64[S, n], -1 for none, and which of them count under the client's own label.

        With `relabels`, steps of all attributes are one row of steps. From the second on, a part of what was there in
        the step before is there again.
        """
        if not self.relabels:
            place = _sampled(public, self.sample, round, range(self.steps))
            return place, torch.zeros_like(place, dtype=torch.bool)
        last = (position + 1) * self.steps
        fresh = _sampled(public, self.sample, round, range(last))
        before: list[Tensor] = [fresh[0]]
        for step in range(1, last):
            lot = random.bits(0, "told again", round, step, np.arange(len(before[-1])))
            again = torch.from_numpy(lot.argsort()[: int(_AGAIN * len(before[-1]))]).to(fresh.device)
            before.append(torch.cat([fresh[step], before[-1][again]]))
        chosen = before[last - self.steps :]
        place = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
        as_mine = torch.zeros_like(place, dtype=torch.bool)
        as_mine[:, fresh.shape[1] :] = True
        return place, as_mine & (place >= 0)

    # The second stage: the recommender learns.

    def objective(self, params: Params, scene: Scene, streams: Streams) -> Tensor | None:
        """lambda_ir L_ir + lambda_re (L_re^FP + L_re^IP), f32[C]; estimators are constants (eq. 38)."""
        if not self._acts(scene):
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
                parts.append(self.relevant * (forward + distance(private, guess).squeeze(1)))
            terms.append(reduce(torch.add, parts) * counts.to(parts[0].dtype))
        return reduce(torch.add, terms)

    def terms(self, scene: Scene, private: Tensor) -> Terms:
        """What the terms of the loss need beside the estimators, the same at all steps of an epoch."""
        if not self._acts(scene):
            return Terms.none(private)
        mu, prior, guess = [], [], []
        share = torch.zeros(len(self.attributes), max(self.attributes.values()))
        for place, (attribute, classes) in enumerate(self.attributes.items()):
            label = _standardized(scene.attributes[attribute], attribute, scene)
            counts = has_label(label)
            if attribute in scene.protects:
                counts = counts & scene.protects[attribute]
            mu.append(torch.where(counts, in_float(label), torch.nan))
            prior.append(_prior(attribute, scene, classes, label))
            if not label.is_floating_point():
                share[place, :classes] = _shares(attribute, scene, classes)
            if self.relevant:
                inputs = encoded(label.unsqueeze(1), classes, private.dtype)
                guess.append(estimate(scene.own, _name("inverse", attribute), inputs).squeeze(1))
            else:
                guess.append(torch.zeros_like(private))
        numbers = tuple(scene.attributes[name].is_floating_point() for name in self.attributes)
        return Terms(dict(self.attributes), torch.stack(mu), numbers, torch.stack(prior), share, torch.stack(guess))

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


@dataclass(frozen=True, eq=False)
class Terms:
    """What the terms of the loss need beside the estimators, for T attributes."""

    names: Mapping[str, int]  # attributes, and their classes
    mu: Tensor  # f32[T, C]: a class or a standardized number; NaN: no term
    is_number: tuple[bool, ...]
    prior: Tensor  # f32[T, C]: log p(mu)
    share: Tensor  # f32[T, K]: how frequent classes are
    guess: Tensor  # f32[T, C, d]: g(mu)

    @classmethod
    def none(cls, private: Tensor) -> Terms:
        """As long as there is none; z_re is f32[C, d]."""
        nothing = torch.empty(0, len(private))
        return cls({}, nothing, (), nothing, torch.empty(0, 1), torch.empty(0, *private.shape))


def decoupling_of(defense: Defense) -> Decoupling | None:
    """The defense, if it is PARD's; also in a chain with others that leave local training alone."""
    if type(defense) is Decoupling:
        return defense
    if type(defense) is not Chain:
        return None
    found = [each for each in defense.defenses if type(each) is Decoupling]
    rest = [each for each in defense.defenses if type(each) is not Decoupling]
    if len(found) != 1 or any(hooks(each) & {"alternate", "objective"} for each in rest):
        return None
    return found[0]


def _name(kind: str, attribute: str) -> str:
    return f"estimator.{kind}.{attribute}"


def _sampled(public: Mapping[str, Tensor], sample: int | None, round: int, steps: range) -> Tensor:
    """The places of some public users, the same for all clients and others at every step of a round, i64[S, P].

    A round has them in one random order, of which each step takes the next so many.
    """
    told = public[CLIENT]
    if sample is None or len(told) <= sample:
        return torch.arange(len(told), device=told.device).repeat(len(steps), 1)
    order = random.bits(0, "public sample", round, told.cpu().numpy()).argsort()
    place = order[(np.arange(steps.start, steps.stop)[:, None] * sample + np.arange(sample)) % len(order)]
    return torch.from_numpy(place).to(told.device)


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


def _inputs(label: Tensor, classes: int) -> Tensor:
    """Labels of a lesson as inputs of an estimator, f32[...] -> f32[..., K]."""
    return encoded(label if classes == CONTINUOUS else classes_in(label), classes, label.dtype)


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
