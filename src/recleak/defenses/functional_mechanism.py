"""The functional mechanism: noise on the coefficients of a loss that is a polynomial. The second stage of GERAI.

Zhang et al. 2012, "Functional Mechanism: Regression Analysis under Differential Privacy"; in a recommender, Zhang et
al., "Graph Embedding for Recommendation against Attribute Inference Attacks", WWW 2021 (GERAI), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from recleak.defenses.base import Chain, Defense, hooks, received
from recleak.defenses.spending import NoGuarantee, Spending
from recleak.errors import ConfigError
from recleak.models.components import Component
from recleak.streams import Streams
from recleak.update import Update

Redraw = Literal["step", "never"]
Target = Literal["mean", "sum"]
Repair = Literal["none", "ridge"]
_SURE = 1.5  # times the expected spectral norm of the random curvature


@dataclass(frozen=True)
class FunctionalMechanism(Defense):
    """Add Laplace noise to every coefficient of a client's mean loss, as a polynomial in the head's last weights h.

    For the loss "taylor" and a model with a `bounded` head, a score is s = h . q with q in [0, 1]^d, and the loss of an
    example with label r is log 2 + (1/2 - r) s + s^2 / 8. Over n examples its coefficients are means, of (1/2 - r) q_m
    for h_m, of q_m^2 / 8 for h_m^2 and of q_m q_l / 4 for h_m h_l. The mechanism adds

        n1 . h + sum over m <= l of N2_ml h_m h_l,    all of them Laplace of scale Delta / (epsilon n)

    to the loss of every step: a random slope and a random curvature. Zhang et al. (2012) take Delta as twice the
    largest sum of the absolute coefficients of an example (lemma 1), which is

        Delta = 2 (d / 2 + d^2 / 8) = d + d^2 / 4,

    GERAI's value (lemma 4.3; a pair has the coefficients -q_m / 2 and q_m q_l / 8 of q = q_uv - q_uv', in [-1, 1]^d).
    Less would do, for both: replacing one example changes the second-degree coefficients by d^2 / 8 in all at most, and
    d + d^2 / 8 bounds the whole.

    A hook does not see how many examples a client has: `examples` is n, one number that all clients use. It has to be
    public, and the least that any client has is on the safe side; a client's own number would tell how much it did.
    redraw "step": new noise at each step, as GERAI's text has it ("in each iteration"), which averages out over steps.
    "never": one draw for a client and all its rounds, as Zhang et al. have it. The curvature is then negative in about
    half of all directions, and the loss has no minimum: it diverges, unless it is repaired.

    repair "ridge" adds lambda |h|^2 with a lambda that outweighs the most negative direction. Zhang et al. (2012,
    section 6.1) take four standard deviations of the noise, which is enough for few weights. The symmetric matrix of
    the draw has entries of variance scale^2 / 2 beside its diagonal, so that its spectral norm is about
    scale sqrt(2 d) (Wigner): 11 scales for d = 60, where four standard deviations are 5.7. Here lambda is 1.5 times
    that, or four standard deviations if that is more. It depends on d, epsilon and n alone, so it costs no privacy.
    Their other repair, to drop negative eigenvalues, needs the noisy coefficients of all data at once, which a trainer
    of q never has; and to repair the draw by itself would be a function of the noise, which is secret.

    on "sum": noise of the same scale on the sum of the coefficients, as GERAI's Algorithm 3 prints it, and not on the
    mean, as eq. 17 has it: n times too small for its own proof.
    `epsilon=inf` adds nothing.

    **This gives no guarantee**, so GERAI's lemma 4.4 does not hold for what is trained. It is for coefficients that are
    computed once from data, released with noise, and minimized by anyone. Here q comes out of layers that are trained
    on the same data and get no noise, a step sees the coefficients of a batch and not of all n, and every step and
    round asks again. And its unit would be one example: not all that a user did, nor an attribute.
    """

    epsilon: float
    examples: int
    redraw: Redraw = "step"
    weight: str | None = None  # the component that h is; None: the weight of the head's last layer
    on: Target = "mean"
    repair: Repair = "none"

    def __post_init__(self) -> None:
        if not self.epsilon > 0:  # NaN too
            raise ValueError(f"Got epsilon={self.epsilon}, expected a number above 0, or inf to add nothing.")
        if self.examples < 1:
            raise ValueError(f"Got examples={self.examples}, expected how many examples a client has, at least 1.")
        if self.redraw not in get_args(Redraw):
            raise ValueError(f"Got redraw={self.redraw!r}, expected one of {', '.join(get_args(Redraw))}.")
        if self.on not in get_args(Target):
            raise ValueError(f"Got on={self.on!r}, expected one of {', '.join(get_args(Target))}.")
        if self.repair not in get_args(Repair):
            raise ValueError(f"Got repair={self.repair!r}, expected one of {', '.join(get_args(Repair))}.")

    @property
    def idle(self) -> frozenset[str]:
        """All, if nothing is added."""
        return frozenset({"penalty"} if self.epsilon == inf else ())

    def scale(self, width: int) -> float:
        """Of the noise on each coefficient of the mean loss, for so many weights."""
        return sensitivity(width) / (self.epsilon * self.examples) / (self.examples if self.on == "sum" else 1)

    def ridge(self, width: int) -> float:
        """What |h|^2 is multiplied with, in scales of the noise; 0 without a repair."""
        return max(_SURE * sqrt(2 * width), 4 * sqrt(2)) if self.repair == "ridge" else 0.0

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        """The random polynomial, f32[C]."""
        if self.epsilon == inf:
            return None
        name = self.weight or last_weight(moved.values)
        h = (moved.values[name] + received(moved, name)).flatten(1)  # f32[C, d]
        linear, square = (each.to(h) for each in self.coefficients(h.shape[1], streams))
        products = square.triu() * h.unsqueeze(2) * h.unsqueeze(1)  # f32[C, d, d]: one for each monomial
        drawn = (linear * h).sum(1) + products.sum((1, 2))
        return self.scale(h.shape[1]) * (drawn + self.ridge(h.shape[1]) * h.square().sum(1))

    def coefficients(self, width: int, streams: Streams) -> tuple[Tensor, Tensor]:
        """The noise at one moment of each client but for its scale: n1, f32[C, d], and N2, f32[C, d, d], of which what
        is on and above the diagonal counts.
        """
        drawn = streams.lasting() if self.redraw == "never" else streams
        position = torch.arange(streams.n_clients)
        linear = drawn.laplace("linear", position, torch.zeros_like(position), (width,))
        return linear, drawn.laplace("quadratic", position, torch.zeros_like(position), (width, width))

    def check_components(self, components: tuple[Component, ...]) -> None:
        """The head ends with weights that are sent, and without a bias."""
        named = {component.name: component for component in components}
        name = self.weight or last_weight(named)
        bias = f"{name.removesuffix('weight')}bias"
        if bias in named:
            raise ConfigError(
                f"The head's last layer has a bias, {bias!r}, expected a score h . q with q in [0, 1].\n"
                "  Give the model bounded=True (NCF and FeatureGCN have it), and the training loss='taylor'."
            )
        if name in named and not named[name].shared:
            raise ConfigError(f"{name!r} is kept by clients, expected weights that are sent: their values are needed.")

    def component_names(self) -> Iterable[str]:
        """The weights, if they are named."""
        return () if self.weight is None else (self.weight,)

    def spends(self) -> tuple[Spending, ...]:
        """No guarantee."""
        why = (
            f"An epsilon of {self.epsilon:g} is claimed, for one example, as if the loss had been released once with "
            "noise on it (GERAI, lemma 4.4). But what the last weights are multiplied with comes from layers that were "
            "trained on the same data and have no noise, so that the lemma does not apply, and the question is asked "
            "again at every step and in every round. One example is neither a user nor an attribute."
        )
        if self.on == "sum":
            why += f" And noise of this scale on the sum of {self.examples:,} examples is as many times too small."
        return (NoGuarantee(repr(self), why),)

    def composed(self, steps: int, batch_size: int) -> str:
        """What steps of a central trainer would add up to if q were fixed, in plain words.

        A step asks about a batch of B, whose mean one example moves by Delta / B: with noise of scale Delta /
        (epsilon n) that is an epsilon of epsilon n / B. An example is in one batch of each epoch, so it is asked about
        steps B / n times.
        """
        once = sensitivity(1) / batch_size / self.scale(1)
        if self.redraw == "never":
            return (
                f"The noise is drawn once, so that steps add no new draw; but each of {steps:,} steps reads another "
                "batch and other q against the same noise, and differences between them have none."
            )
        times = steps * batch_size / self.examples
        return (
            f"Even for fixed q: a step reads a batch of {batch_size:,}, for which this noise is worth an epsilon of "
            f"{once:.3g}; in {steps:,} steps an example is read about {times:.3g} times, which adds up to "
            f"{once * times:.3g}."
        )


def random_polynomial(defense: Defense, streams: Streams) -> tuple[FunctionalMechanism, Streams] | None:
    """The one mechanism that a defense's penalty consists of, and its part of the penalty's streams; else None.

    A subclass may compute something else, so it is not it.
    """
    if type(defense) is Chain:
        terms = [(number, part) for number, part in enumerate(defense.defenses) if "penalty" in hooks(part)]
        if len(terms) != 1:
            return None
        number, part = terms[0]
        return random_polynomial(part, streams.within(str(number)))
    return (defense, streams) if type(defense) is FunctionalMechanism and defense.repair == "none" else None


def sensitivity(width: int) -> float:
    """d + d^2 / 4: how far replacing one example moves the sums of n times the coefficients, at most (l1)."""
    return width + width**2 / 4


def last_weight(names: Iterable[str]) -> str:
    """The weight of the last layer of a head."""
    layers = {name: name.split(".") for name in names}
    heads = {
        int(words[1]): name
        for name, words in layers.items()
        if len(words) == 3 and (words[0], words[2]) == ("head", "weight") and words[1].isdecimal()
    }
    if not heads:
        raise ConfigError(
            f"Got the components {', '.join(layers)}, expected a head: 'head.1.weight', ...\n"
            "  Use a model with a head, or name the weights of its last layer (weight=...)."
        )
    return heads[max(heads)]
