"""Scores that each client computes for itself: global parameters, what it keeps, its own history."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from recleak.models.base import Batch, Params
from recleak.models.components import Component
from recleak.training.batches import features_of
from recleak.training.cohort import Task
from recleak.update import NodeParams, Update, values_of


def personal_scores(
    task: Task,
    params: Params,
    kept: Update,
    history: sp.csr_array,
    items: Tensor | None = None,
    *,
    node: Tensor | None = None,
    moved: Update | None = None,
) -> Tensor:
    """The scores that C clients give all items with the global parameters and what they keep, f32[C, I].

    `history` is their own items, f32[C, I]. With `items`, i64[C, K], each scores those only: f32[C, K]. Of nodes
    (`NodeParams`) each uses its own parameters, or those of the given node, i64[C]. `moved`: what the same clients have
    changed of the global parameters on their devices.
    """
    device = next(iter(params.values())).device if params else torch.device("cpu")
    each = torch.from_numpy(history.toarray()).to(device)  # f32[C, I]
    mine = _own_params(task, params, kept, device, node)
    if moved is not None:
        mine |= {name: mine[name] + value for name, value in moved.values.items()}
        for name, value in moved.rows.items():
            mine[name] = mine[name].index_put((moved.owner, moved.item), value, accumulate=True)
    features = None if task.item_features is None else task.item_features.to(device)
    tables = [part.name for part in task.components if part.storage == "per_item"]
    with torch.no_grad():
        around = {
            name: torch.einsum("ci,ci...->c...", each, mine[name]) for name in tables if task.model.reads_neighbors
        }
        near = None if features is None else each @ features
        own, shown = each > 0, None if features is None else features.expand(kept.n_clients, *features.shape)
        if items is not None:
            who, what = torch.arange(kept.n_clients, device=device).unsqueeze(1), items.to(device)
            mine |= {name: mine[name][who, what] for name in tables}
            own, shown = own[who, what], None if features is None else features[what]
        batch = Batch(
            own=own,
            degree=each.sum(1),
            neighbors=around,
            user_features=features_of(task, kept.client.to(device)),
            item_features=shown,
            neighbor_features=near,
        )
        return task.model.logits(mine, batch)


def _own_params(task: Task, params: Params, kept: Update, device: torch.device, node: Tensor | None) -> Params:
    """All parameters as each of C clients has them: shared ones broadcast, kept ones its own."""
    mine: Params = {}
    for part in task.components:
        if part.storage == "per_item":
            table = params[part.name] if part.shared else part.draw(task.seed, np.arange(kept.n_items)).to(device)
            if part.shared and isinstance(params, NodeParams):
                rows = table[kept.client if node is None else node].float()
            else:
                rows = table.expand(kept.n_clients, *table.shape)
            if not part.shared and len(kept.item):
                rows = rows.clone()
                rows[kept.owner.to(device), kept.item.to(device)] = kept.rows[part.name].to(device)
            mine[part.name] = rows
        elif part.name in kept.values:
            mine[part.name] = kept.values[part.name].to(device)
        else:
            per_user = part.storage == "per_user"
            own = values_of(params, part.name, kept.client.to(device), per_user=per_user, node=node)
            mine[part.name] = own.expand(kept.n_clients, *part.shape)
    return mine


def first_params(
    components: tuple[Component, ...], n_users: int, n_items: int, seed: int, device: torch.device | str = "cpu"
) -> Params:
    """The shared components before the first round."""
    rows = {"per_user": np.arange(n_users), "per_item": np.arange(n_items)}
    return {
        part.name: (part.draw(seed)[0] if part.storage == "dense" else part.draw(seed, rows[part.storage])).to(device)
        for part in components
        if part.shared
    }
