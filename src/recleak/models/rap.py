"""RAP: a recommender trained against an attacker that reads its lists.

Beigi et al. 2020, "Privacy-Aware Recommendation with Private-Attribute Protection using Adversarial Learning". The
published text leaves open how a list is differentiated; here the attacker reads the vectors of the best items in their
order, each times the sigmoid of its score, and what it learns is turned against the recommender by reversed gradients
(Ganin et al. 2016), so that both train in the same step.
Axis letters: B users, K places in a list, d factors, h hidden units, I items.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.central import Archive, CentralModel
from recleak.models.components import Component, Constant, FanIn, Init, Normal


@dataclass(frozen=True)
class RAP(CentralModel):
    """s_ui = p_u . q_i with a BPR loss, minus `strength` times the cross-entropy of an attacker on each attribute.

    The attacker is a gated recurrent unit (Cho et al. 2014) over the `top` best items that a user does not have, with a
    linear layer for each attribute. It minimizes its cross-entropy with the same steps with which the recommender
    maximizes it. Users whose class is not known are left out of that term.
    """

    factors: int = 60
    strength: float = 1.0
    top: int = 10
    hidden: int = 32
    attributes: tuple[str, ...] = ("gender", "age", "occupation")
    classes: tuple[int, ...] = ()  # of each attribute; none: not known yet, an audit fills it in
    init: Init = field(default=Normal(0.1))

    needs_labels: ClassVar[bool] = True

    def components(self) -> tuple[Component, ...]:
        """`user`, `item`, and the attacker's: the gates, and a head for each attribute."""
        if len(self.classes) != len(self.attributes):
            raise ConfigError(
                f"Got {len(self.classes)} numbers of classes for the attributes {', '.join(self.attributes)}, expected "
                "one for each: classes=(2, 3, 21)."
            )
        d, h = self.factors, self.hidden

        def dense(name: str, *shape: int, init: Init) -> Component:
            return Component(f"attacker.{name}", "dense", "head", shape, init)

        heads = [dense(name, h, count, init=FanIn()) for name, count in zip(self.attributes, self.classes, strict=True)]
        return (
            Component("user", "per_user", "user", (d,), self.init, shared=False),
            Component("item", "per_item", "item", (d,), self.init),
            dense("input", d, 3 * h, init=FanIn()),
            dense("state", h, 3 * h, init=FanIn()),
            dense("bias", 3 * h, init=Constant()),
            *heads,
        )

    def pair_scores(self, params: Params, archive: Archive, user: Tensor, item: Tensor, step: int) -> Tensor:
        """Products."""
        mine = params["user"].index_select(0, user).unsqueeze(1)
        theirs = params["item"].index_select(0, item.reshape(-1)).view(*item.shape, -1)
        return (mine * theirs).sum(2)

    def all_scores(self, params: Params, archive: Archive, users: Tensor) -> Tensor:
        """Products."""
        return params["user"][users] @ params["item"].T

    def side_loss(self, params: Params, archive: Archive, user: Tensor, step: int) -> Tensor | None:
        """The attacker's cross-entropy, with gradients reversed on their way into the recommender."""
        if self.strength == 0:
            return None
        who = torch.unique(user)
        with torch.no_grad():
            score = self.all_scores(params, archive, who).masked_fill_(archive.rows(who) > 0, float("-inf"))
            best = score.topk(min(self.top, score.shape[1]), 1).indices  # i64[B, K]
        items = params["item"].index_select(0, best.reshape(-1)).view(*best.shape, -1)  # f32[B, K, d]
        chance = (items * params["user"].index_select(0, who).unsqueeze(1)).sum(2, keepdim=True).sigmoid()
        told = self._read(params, _reversed(items * chance, self.strength))  # f32[B, h]
        terms = []
        for name in self.attributes:
            label = archive.labels[name][who]
            if bool((known := label >= 0).any()):
                terms.append(cross_entropy(told[known] @ params[f"attacker.{name}"], label[known]))
        return torch.stack(terms).sum() if terms else None

    def _read(self, params: Params, inputs: Tensor) -> Tensor:
        """A gated recurrent unit, f32[B, K, d] -> f32[B, h]."""
        of_inputs = inputs @ params["attacker.input"] + params["attacker.bias"]  # f32[B, K, 3 h]
        state = inputs.new_zeros(len(inputs), self.hidden)
        for place in range(inputs.shape[1]):
            update, reset, new = of_inputs[:, place].chunk(3, 1)
            of_update, of_reset, of_new = (state @ params["attacker.state"]).chunk(3, 1)
            kept = (update + of_update).sigmoid()
            fresh = (new + (reset + of_reset).sigmoid() * of_new).tanh()
            state = kept * state + (1 - kept) * fresh
        return state


class _Reverse(torch.autograd.Function):
    """The identity, whose gradient is multiplied with a negative number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def _reversed(value: Tensor, strength: float) -> Tensor:
    found: Tensor = _Reverse.apply(value, strength)  # type: ignore[no-untyped-call]
    return found
