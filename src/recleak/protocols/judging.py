"""How good models are for nodes of a gossip, on the nodes' own validation items (PEPPER, Belal et al. 2022)."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recleak.data.sequences import Transitions
from recleak.protocols.nodes import TABLE, fitting
from recleak.protocols.panel import CUTOFF, NEGATIVES, Panel
from recleak.training import compiled_prme
from recleak.training.cohort import Task
from recleak.training.compiled_gmf import judge_nodes
from recleak.training.personal import personal_scores
from recleak.training.state import ClientStore
from recleak.update import NodeParams


@dataclass(frozen=True, eq=False)
class Judge:
    """Nodes that compare what they have and what others sent."""

    task: Task
    store: ClientStore
    panel: Panel
    direct: bool  # a node's parameters can be used where they are

    def performance(
        self, params: NodeParams, node: NDArray[np.int64], judge: NDArray[np.int64], pool: Executor
    ) -> NDArray[np.float32]:
        """Hit rate times NDCG on each judge's validation items of what a node has or sent, f32[n]."""
        if self.panel.starts is not None:
            return self._of_next(self.panel.starts, params, node, judge, pool)
        n_users, n_items = self.panel.own.shape
        keeps_rows = any(part.storage == "per_item" and not part.shared for part in self.task.components)
        step = fitting(self.task.components, n_users, n_items)
        found = []
        for start in range(0, len(node), step):
            who, of = judge[start : start + step], torch.from_numpy(node[start : start + step])
            people, place = np.unique(who, return_inverse=True)
            kept = self.store.read(people) if keeps_rows else self.store.read_values(people)
            kept = kept.select(torch.from_numpy(place))
            if self.direct:
                items = self.panel.item, self.panel.offset
                found.append(judge_nodes(params, kept, node[start : start + step], items, CUTOFF))
                continue
            scores = personal_scores(self.task, params, kept, self.panel.own[who], node=of)
            found.append(self.panel.performance(scores.numpy(), who))
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def _of_next(
        self,
        starts: Transitions,
        params: NodeParams,
        node: NDArray[np.int64],
        judge: NDArray[np.int64],
        pool: Executor,
    ) -> NDArray[np.float32]:
        """The same on validation transitions; judges in groups that bound the memory."""
        panel = self.panel
        limit = max(1, TABLE // (8 * (1 + NEGATIVES) * sum(part.size for part in self.task.components)))
        group = np.cumsum(panel.offset[judge + 1] - panel.offset[judge]) // limit

        def graded(some: NDArray[np.int64]) -> NDArray[np.float32]:
            who = judge[some]
            owner, place = panel.targets(who)
            people, at = np.unique(who, return_inverse=True)
            kept = self.store.read_values(people).select(torch.from_numpy(at[owner]))
            of = torch.from_numpy(node[some][owner])
            asked = starts.select(place), panel.item[place]
            return panel.graded(compiled_prme.next_scores(self.task, params, kept, *asked, of), owner, len(who))

        groups = np.split(np.arange(len(node)), np.flatnonzero(np.diff(group)) + 1)
        return np.concatenate(list(pool.map(graded, groups)))
