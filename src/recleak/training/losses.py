"""What clients minimize, of the scores of a batch. Axis letters: C clients, B items in a batch."""

from __future__ import annotations

from math import log

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """The weighted binary cross-entropy of each client: f32[C, B] three times -> f32[C]."""
    return (functional.binary_cross_entropy_with_logits(logits, label, reduction="none") * weight).sum(1)


def second_order(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy as its Taylor polynomial at s = 0, log 2 + (1/2 - r) s + s^2 / 8: f32[C, B] three times -> f32[C].

    Zhang et al. 2012, "Functional mechanism", section 5; GERAI, eq. 17, has it for pairs. It is least at s = 4 r - 2.
    """
    return ((log(2) + (0.5 - label) * logits + logits.square() / 8) * weight).sum(1)


def pairwise(logits: Tensor, weight: Tensor) -> Tensor:
    """BPR (Rendle et al. 2009): -log sigmoid(preferred - other); the first half of f32[C, B] is preferred."""
    preferred, other = logits.chunk(2, dim=1)
    return -(functional.logsigmoid(preferred - other) * weight).sum(1)
