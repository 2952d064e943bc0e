"""UC-FedRec: users who do not mind teach surrogate attackers, and the others train against those.

Hu and Song 2024, "User Consented Federated Recommender System Against Personalized Attribute Inference Attack". Every
attribute has one surrogate attacker, a perceptron on the user's vector that all clients share. Who consents to an
attribute trains it on its own vector and label; who wants the attribute protected adds to its loss how far the
attacker's guess is from knowing nothing, KL(uniform || q(. | z_u)). Each user chooses for each attribute. Axis letters:
C clients, d factors, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isfinite, log

import torch
from torch import Tensor
from torch.nn import functional

from recleak.defenses.base import Defense, Scene
from recleak.defenses.estimators import CONTINUOUS, descended, estimate, estimator_components, log_chance
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component, by_name
from recleak.streams import Streams
from recleak.training.attributes import has_label


@dataclass(frozen=True)
class UserConsent(Defense):
    """Surrogate attackers of `attributes` (classes of each; 1: a number, which should be in units of its deviation).

    strength: of the term in the loss of who wants protection. Who does is said with the attributes
    (`training.attributes.PrivateAttributes.protected`); if nothing is said, all but the insensitive users.
    In an audit `protected` says it by attribute: the share of the others who want it, or the column of the users that
    says so; who is not asked wants it.
    The step of an attacker is averaged over all clients, also those who do not consent, as all that is shared is.
    """

    attributes: Mapping[str, int] = field(default_factory=dict)
    strength: float = 0.5
    component: str = "user"
    hidden: tuple[int, ...] = (32, 16)
    learning_rate: float = 1.0
    steps: int = 1
    factors: int = 64
    insensitive: float = 0.2  # share of users who tell, for an audit
    protected: Mapping[str, float | str] = field(default_factory=dict)  # who wants an attribute protected, for an audit

    def __post_init__(self) -> None:
        for name in ("strength", "learning_rate"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}, expected a finite number of at least 0.")
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}, expected at least 1.")

    @property
    def idle(self) -> frozenset[str]:
        """Without attributes there is nothing to do; without strength nobody trains against the attackers."""
        if not self.attributes:
            return frozenset({"alternate", "objective"})
        return frozenset() if self.strength else frozenset({"objective"})

    def for_attributes(self, classes: Mapping[str, int]) -> Defense:
        """With these, if it names none."""
        return self if self.attributes else replace(self, attributes=dict(classes))

    @property
    def needs_attributes(self) -> tuple[str, ...]:
        """Those that it protects."""
        return tuple(self.attributes)

    def own_components(self) -> tuple[Component, ...]:
        """The surrogate attackers, shared."""
        return tuple(
            part
            for attribute, classes in self.attributes.items()
            for part in estimator_components(_name(attribute), (self.factors, *self.hidden, classes), shared=True)
        )

    def check_components(self, components: tuple[Component, ...]) -> None:
        """The vector that is protected is there, as wide as the attackers expect."""
        found = by_name(components).get(self.component)
        if self.attributes and (found is None or found.shape != (self.factors,)):
            got = "none" if found is None else f"{list(found.shape)}"
            raise ConfigError(
                f"UserConsent needs the component {self.component!r} of shape [{self.factors}], got {got}.\n"
                "  Use a model with a vector for each user, and give both the same `factors`."
            )

    def alternate(self, params: Params, scene: Scene, streams: Streams) -> Params:
        """Who consents trains the attackers on itself; those of the others stay as they were received."""
        if not scene.attributes:
            return {}
        user = params[self.component].detach().unsqueeze(1)  # f32[C, 1, d]

        def loss(own: Params, step: int) -> Tensor:
            terms = []
            for attribute in self.attributes:
                label = scene.attributes[attribute].unsqueeze(1)
                error = -log_chance(estimate(own, _name(attribute), user), label).squeeze(1)
                terms.append(error * (~_protects(attribute, scene)).to(error.dtype))
            return reduce(torch.add, terms)

        own = {part.name: scene.own[part.name] for part in self.own_components()}
        return descended(own, loss, rate=self.learning_rate, steps=self.steps)

    def objective(self, params: Params, scene: Scene, streams: Streams) -> Tensor | None:
        """strength times KL(uniform || q(. | z_u)), summed over what a client wants protected, f32[C]."""
        if not scene.attributes:
            return None
        user, terms = params[self.component].unsqueeze(1), []
        for attribute, classes in self.attributes.items():
            output = estimate(scene.own, _name(attribute), user).squeeze(1)  # f32[C, K]
            if classes == CONTINUOUS:
                told = output.squeeze(1).square() / 2
            else:
                told = -functional.log_softmax(output, dim=1).mean(1) - log(classes)
            counts = _protects(attribute, scene) & has_label(scene.attributes[attribute])
            terms.append(told * counts.to(told.dtype))
        return self.strength * reduce(torch.add, terms)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee: it is trained against one reader."""
        why = (
            "Vectors of users are trained so that one reader fails. Nothing is bounded or random: another reader may "
            "succeed, and the rows of items are sent as before."
        )
        return (NoGuarantee(repr(self), why),)


def _name(attribute: str) -> str:
    return f"attacker.{attribute}"


def _protects(attribute: str, scene: Scene) -> Tensor:
    """Who wants an attribute protected, bool[C]."""
    if attribute in scene.protects:
        return scene.protects[attribute]
    everybody = torch.ones_like(scene.attributes[attribute], dtype=torch.bool)
    return everybody if scene.insensitive is None else ~scene.insensitive
