"""IMIA's attack (Yuan et al. 2023, Algorithm 1, lines 23 to 32): shadow clients with guessed labels.

The server knows which items an upload touches. It guesses their labels at the known ratio, trains a shadow client on
the guess from the broadcast that the victim got, and takes the guess for right where the shadow's item vector came
nearest to the victim's. The shadow clients of all victims in a message train as one cohort.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.attacks.base import Knowledge
from recleak.attacks.membership import SURE, FromUploads, assumed_positives, below, chosen, public_popularity
from recleak.defenses.base import Defense
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.components import Component, Init, require_names
from recleak.training.chunks import train_in_chunks
from recleak.training.cohort import Task
from recleak.training.local import LocalData
from recleak.training.optimizers import Adam
from recleak.update import Update

Graph = Literal["guessed", "true-graph"]


@dataclass(frozen=True, kw_only=True)
class ShadowClients(FromUploads):
    """Confirm the share `gamma` of guessed labels that comes nearest in Euclidean distance, guess the others again.

    share: assumed part of own items; None is 1 / (1 + negatives), 20 % for 1:4 (the paper's example says 25 %).
    popular_weight: above 1, the most popular tenth of all items is that many times as likely to be guessed positive at
    first (section 4.8: "with a higher probability"; how much is not said). Needs `popularity` in the public knowledge.
    graph: the star of a graph model's shadow client. "guessed": its guessed positives. "true-graph": the victim's own
    items, as in the published code; **this is the answer itself**, which no server has, and the audit must put it into
    the public knowledge as `own_items` (i64[n, 2]: client, item).
    accumulate_gradients: the shadow trainer never zeroes its gradients, as in the published code.
    user_init: how a shadow's user vector starts; None: as the model's. The published code draws it from Xavier's normal
    distribution.
    """

    gamma: float = 0.2
    share: float | None = None
    popular_weight: float = 1.0
    graph: Graph = "guessed"
    accumulate_gradients: bool = False
    user_init: Init | None = None
    component: str = "item"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma is {self.gamma}, expected more than 0 and at most 1.")
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(f"share is {self.share}, expected between 0 and 1.")
        if not self.popular_weight >= 1:
            raise ConfigError(f"popular_weight is {self.popular_weight}, expected at least 1.")
        if self.graph not in get_args(Graph):
            raise ConfigError(f"graph is {self.graph!r}, expected one of {', '.join(get_args(Graph))}.")

    def evidence(self, knowledge: Knowledge, received: Params, update: Update, round: int) -> tuple[Tensor, Tensor]:
        """Rows confirmed as positive early, and near, come first; those confirmed as negative early come last."""
        if knowledge.training is not None and knowledge.training.loss != "bce":
            raise ConfigError(
                f"IMIA's shadow clients learn labels of single items, got clients that train with "
                f"{knowledge.training.loss!r}.\n  Use GradientAlignment, which reads pairwise losses too."
            )
        require_names("component", [self.component], update.rows)
        size = update.offset.diff()  # i64[C]
        target = below(assumed_positives(knowledge, size, self.share))
        step = (self.gamma * size + 1e-4).long() + 1  # rows confirmed at a time; the text is silent, the code adds one
        label = torch.zeros(len(update.item), dtype=torch.bool)
        order = torch.full((len(update.item),), float("inf"))  # f32[N]: when a row was confirmed; inf: not yet
        iteration = 0
        while True:
            found = _count(label & order.isfinite(), update)
            active = (found < target) & (_count(order.isinf(), update) > 0)
            if not bool(active.any()):
                break
            self._guess(knowledge, update, label, order, target - found, round, iteration)
            place = active.nonzero().squeeze(1)
            victims = update.select(place)
            rows = active[update.owner].nonzero().squeeze(1)
            moved = self._shadows(knowledge, received, victims, label[rows], round, iteration)
            away = (moved.rows[self.component] - victims.rows[self.component]).flatten(1).norm(dim=1)  # f32[n]
            away = away.masked_fill(order[rows].isfinite(), float("inf"))  # confirmed before
            near = chosen(victims, -away, step[place].minimum(_count(order[rows].isinf(), victims)))
            longest = torch.zeros(victims.n_clients).scatter_reduce(
                0, victims.owner[near], away[near], "amax", include_self=True
            )
            later = away / longest.clamp(min=1e-30)[victims.owner]  # in [0, 1] where near
            order[rows[near]] = iteration + later[near].clamp(max=1.0) * 0.99
            iteration += 1
        positive = label & order.isfinite()
        sure = SURE + 1 / (1 + order)  # the earlier, the surer
        return torch.where(positive, sure, -sure), _count(positive, update).float()

    def _guess(
        self,
        knowledge: Knowledge,
        update: Update,
        label: Tensor,
        order: Tensor,
        missing: Tensor,
        round: int,
        iteration: int,
    ) -> None:
        """New labels for the rows that are not confirmed yet, as many positive as are missing; in place."""
        client, item = update.client[update.owner].numpy(), update.item.numpy()
        lot = torch.from_numpy(random.uniform(self.seed, "shadow labels", round, iteration, client, item))
        if self.popular_weight > 1 and iteration == 0:
            popularity = public_popularity(knowledge)
            top = torch.zeros(len(popularity), dtype=torch.bool)
            top[popularity.argsort(descending=True)[: max(1, len(popularity) // 10)]] = True
            weight = torch.where(top[update.item], self.popular_weight, 1.0)
            lot = lot.clamp(min=1e-12) ** (1 / weight)  # a weighted draw (Efraimidis and Spirakis 2006)
        open_ = order.isinf()
        guessed = chosen(update, torch.where(open_, lot, -1.0), missing.clamp(min=0)) & open_
        label[open_] = guessed[open_]

    def _shadows(
        self, knowledge: Knowledge, received: Params, victims: Update, label: Tensor, round: int, iteration: int
    ) -> Update:
        own = None
        if self.graph == "true-graph" and knowledge.model.reads_neighbors:
            own = _true_items(knowledge, victims)
        data = LocalData(
            victims.client.numpy(),
            victims.item.numpy(),
            label.numpy().astype(np.float32),
            None,
            victims.offset.numpy(),
            victims.n_items,
            own,
        )
        seed = int(random.bits(self.seed, "shadow clients", iteration) >> np.uint64(1))
        return train_shadows(
            knowledge, received, data, round, seed, user_init=self.user_init, accumulate=self.accumulate_gradients
        )


def train_shadows(
    knowledge: Knowledge,
    received: Params,
    data: LocalData,
    round: int,
    seed: int,
    *,
    defense: Defense | None = None,
    user_init: Init | None = None,
    accumulate: bool = False,
) -> Update:
    """The uploads of shadow clients that train from a broadcast; what they keep, the adversary draws for itself.

    `seed` is one of the adversary's own draws: with that of the run, shadows would start from the victims' vectors.
    """
    if knowledge.training is None:
        raise ConfigError(
            "Shadow clients train as clients do, got knowledge without `training`.\n"
            "  Give Knowledge(..., training=LocalTraining(...)): the server prescribes it, so it is public."
        )
    optimizer = replace(knowledge.training.optimizer, keep=False)
    if accumulate:
        if not isinstance(optimizer, Adam):
            raise ConfigError(f"accumulate_gradients is known of Adam, got {optimizer}.")
        optimizer = replace(optimizer, accumulate=True)
    parts = tuple(_started(part, user_init) for part in knowledge.components)
    task = Task(
        knowledge.model,
        parts,
        replace(knowledge.training, optimizer=optimizer),
        defense or Defense(),
        seed,
        knowledge.model.item_features(knowledge.n_items),
        no_user_features(knowledge, int(data.client.max()) + 1),
    )
    clients = len(data.client)
    values = {
        part.name: part.draw(seed, data.client if part.storage == "per_user" else np.zeros(clients, np.int64))
        for part in parts
        if not part.shared and part.storage != "per_item"
    }
    rows = {p.name: torch.empty(0, *p.shape) for p in parts if not p.shared and p.storage == "per_item"}
    none = torch.empty(0, dtype=torch.int64)
    kept = Update(
        torch.from_numpy(data.client), values, rows, none, torch.zeros(clients + 1, dtype=torch.int64), data.n_items
    )
    return train_in_chunks(task, received, kept, data, round).update


def _started(part: Component, user_init: Init | None) -> Component:
    changes = user_init is not None and part.role == "user" and not part.shared
    return replace(part, init=user_init) if changes and user_init is not None else part


def no_user_features(knowledge: Knowledge, clients: int) -> Tensor | None:
    """The features of a shadow's user: unknown, so none of them is on."""
    if not knowledge.model.needs_user_features:
        return None
    encoder = next(part for part in knowledge.components if part.role == "user" and part.storage == "dense")
    return torch.zeros(1, encoder.shape[0]).expand(clients, -1)


def _true_items(knowledge: Knowledge, update: Update) -> NDArray[np.bool_]:
    if "own_items" not in knowledge.public:
        raise ConfigError(
            "graph 'true-graph' reads the victims' own items, which no server has, got none as public knowledge.\n"
            "  Give Knowledge(..., public={'own_items': i64[n, 2]}) to repeat the published code, or use 'guessed'."
        )
    client, item = knowledge.public["own_items"].unbind(1)
    mine = update.client[update.owner] * knowledge.n_items + update.item
    own: NDArray[np.bool_] = torch.isin(mine, client * knowledge.n_items + item).numpy()
    return own


def _count(rows: Tensor, update: Update) -> Tensor:
    """How many rows of each client are marked, i64[C]."""
    return torch.zeros(update.n_clients, dtype=torch.int64).index_add_(0, update.owner, rows.long())
