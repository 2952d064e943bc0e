"""What a recommender is: components, and a score with a leading client axis.

A model is a frozen configuration. It sees one batch per client: rows that were gathered for it, never item numbers or
whole tables. The same definition serves one real client (C = 1) and ten thousand simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from recleak.models.components import Component

Params = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """What a client scores, beside parameters. Axis letters: C clients, B scored items per client, F features."""

    own: Tensor  # bool[C, B]: the item is one of the client's own (it is a neighbor in the client's star graph)
    degree: Tensor  # f32[C]: how many own items the client has
    neighbors: Params = field(default_factory=dict)  # sum over the own items of each per_item component, f32[C, *shape]
    user_features: Tensor | None = None  # f32[C, F]
    item_features: Tensor | None = None  # f32[C, B, G]: constant features of the scored items
    neighbor_features: Tensor | None = None  # f32[C, G]: their sum over the own items


class Model:
    """A recommender. Subclasses are frozen dataclasses whose fields are public configuration."""

    needs_user_features: ClassVar[bool] = False
    needs_transitions: ClassVar[bool] = False  # it learns from what users did after what (`training.transitions`)

    @property
    def reads_neighbors(self) -> bool:
        """Whether it needs `Batch.neighbors`: then every own row moves at every step."""
        return False

    # What compiled loops rely on. Only what a class itself declares counts (`declared`).
    # perceptron: (user, item) if with a head the logits are `mlp(params, user, item)`, no more; with `star`, on vectors
    # that were propagated. star: a method, f32[C] -> f32[C, 5]; for the degree of each client five weights w, so that
    # for the vector u, the sum S of own rows and a row q, users are w0 u + w1 S, items w2 q + [own] (w3 u + w4 S).
    # head_user: a method like `logits`; the vector f32[C, u] that, with plain rows of `item`, is what the head reads:
    # the logits are `mlp(params, head_user, item)`. None: they are something else.
    # product: a method like `logits`; w, f32[C, d], and b, f32[C], so that a row q of `item` that is not marked as the
    # client's own has the logit <w, q> + b. None: it is something else.
    perceptron: ClassVar[tuple[str, str] | None] = None
    head_user: ClassVar[Callable[..., Tensor | None] | None] = None
    product: ClassVar[Callable[..., tuple[Tensor, Tensor] | None] | None] = None
    star: ClassVar[Callable[..., Tensor] | None] = None

    def components(self) -> tuple[Component, ...]:
        """The named parts of its parameters."""
        raise NotImplementedError

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """Scores before the sigmoid, f32[C, B].

        `params` holds per_user and dense components as f32[C, *shape], and per_item components as the rows of the
        scored items, f32[C, B, *shape].
        """
        raise NotImplementedError

    def public(self) -> Model:
        """The same without values that belong to users: what others may know of it."""
        return self

    def item_features(self, n_items: int) -> Tensor | None:
        """Constant public features of all items, f32[I, G], if the model has any."""
        return None


def declared(model: Model, name: str) -> Any:
    """What a model's own class says of itself, or None; not its parents, for a subclass may compute something else."""
    return vars(type(model)).get(name)
