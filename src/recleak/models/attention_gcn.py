"""GERAI's recommender: a graph convolution with attention on both sides of the graph of users and items.

Zhang et al., "Graph Embedding for Recommendation against Attribute Inference Attacks", WWW 2021, section 3.
Axis letters: n nodes, S sampled neighbors, d factors, F user features, B examples, k scored items.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear

from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.central import Archive, CentralModel
from recleak.models.components import Component, FanIn, Init, Normal, require_names

Bounding = Literal["none", "clip", "sigmoid"]
_EDGES = 1 << 18  # scored at a time where all neighbors count


@dataclass(frozen=True)
class AttentionGCN(CentralModel):
    """z_u = E_U x_u, z_v a vector of its own (eq. 4); messages m = MLP(z) (eq. 3); for a node and its neighbors

        a_k = w2 . sigmoid(W1 [m_k, z] + b1) + b2,    alpha = softmax over the neighbors and the node itself (7, 8)
        z* = ReLU(W sum of alpha_k m_k + b)                                                                (5, 6, 9)
        q_uv = ReLU(W3 [z_u*, z_v*] + b3),    s_uv = h . q_uv                                                    (10)

    with the same weights on both sides. While training, `neighbors` S of each node are drawn with replacement, and not
    the edge that is to be predicted. For lists all neighbors count, each with S over their number: what the draws are
    on average, so that a node weighs in its own sum as it did in training, however many neighbors it has. (With a
    weight of 1 each, items with many neighbors would lose their own message, and lists would hold unknown items.)
    `bounding` keeps q in [0, 1], which the functional mechanism needs: by clipping, as a note of the paper proposes, or
    with a sigmoid in place of the ReLU. b2 is left out: it cancels in the softmax.

    Everything starts from N(0, 1), says the paper. With 60 inputs and three layers that saturates the sigmoids at once,
    so weights start by their fan-in with a gain for ReLU (He et al. 2015): with less, what tells users apart is lost on
    its way through six layers, and the model stays with what is popular. Vectors start with a deviation of 0.1. With 1,
    a user's vector is the sum of tens of features, several times longer than an item's (perturbed ones even more, as
    they are scaled up), and so is what drawn users tell an item: of itself little is left. `init=Normal(1.0)` is the
    paper's.
    """

    n_features: int = 0  # 0: not known yet; an audit fills it in
    factors: int = 60
    layers: int = 3  # of the MLP
    neighbors: int = 10
    bounding: Bounding = "none"
    init: Init = field(default=Normal(0.1))
    dense_init: Init = field(default=FanIn(6.0))

    needs_user_features: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_names("bounding", [self.bounding], get_args(Bounding))
        for name in ("factors", "layers", "neighbors"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1.")

    def components(self) -> tuple[Component, ...]:
        """E_U, the item table, the MLP, the attention, the aggregation, and the head: W3, b3 and h."""
        if self.n_features < 1:
            raise ConfigError(f"n_features is {self.n_features}, expected how many features a user has.")
        d = self.factors

        def dense(name: str, *shape: int, fans: tuple[int, int]) -> Component:
            return Component(name, "dense", "head", shape, self.dense_init, fans=fans)

        messages = [
            part
            for layer in range(1, self.layers + 1)
            for part in (
                dense(f"message.{layer}.weight", d, d, fans=(d, d)),
                dense(f"message.{layer}.bias", d, fans=(d, d)),
            )
        ]
        return (
            Component("user.encoder", "dense", "user", (self.n_features, d), self.init),
            Component("item", "per_item", "item", (d,), self.init),
            *messages,
            dense("attention.message.weight", d, d, fans=(2 * d, d)),
            dense("attention.node.weight", d, d, fans=(2 * d, d)),
            dense("attention.bias", d, fans=(2 * d, d)),
            dense("attention.output", d, fans=(d, 1)),
            dense("output.weight", d, d, fans=(d, d)),
            dense("output.bias", d, fans=(d, d)),
            Component("head.1.weight", "dense", "head", (2 * d, d), self.dense_init, 1, fans=(2 * d, d)),
            Component("head.1.bias", "dense", "head", (d,), self.dense_init, 1, fans=(2 * d, d)),
            Component("head.2.weight", "dense", "head", (d, 1), self.dense_init, 2, fans=(d, 1)),
        )

    def pair_scores(self, params: Params, archive: Archive, user: Tensor, item: Tensor, step: int) -> Tensor:
        """With drawn neighbors, without the edge that is to be predicted: lists are of items that are no neighbors.

        A user or an item that occurs twice in a batch draws twice.
        """
        both = self.drawn_nodes(params, archive, user, item, step)
        return self._head(params, both[: len(user)].unsqueeze(1), both[len(user) :].view(*item.shape, -1))

    def drawn_nodes(self, params: Params, archive: Archive, user: Tensor, item: Tensor, step: int) -> Tensor:
        """z* of users, i64[B], and of items, i64[B, k], from drawn neighbors; f32[B + B k, d].

        A user's neighbors are drawn without the first of its items, an item's without its user. Both sides have the
        same weights, so their nodes go through them together, and a message is computed once.
        """
        flat, of_item = item.reshape(-1), user.repeat_interleave(item.shape[1])
        near = [  # i64[B, S] items and i64[B k, S] users, and whether there are any
            graph.sample(node, without, self.neighbors, archive.seed, f"neighbors of a {side}", step)
            for side, graph, node, without in (
                ("user", archive.items_of, user, item[:, 0]),
                ("item", archive.users_of, flat, of_item),
            )
        ]
        users, (own_user, far_user) = _once(archive.train.n_users, user, near[1][0])
        items, (own_item, far_item) = _once(archive.train.n_items, flat, near[0][0])
        vectors = [self._vectors(params, archive, side, node) for side, node in (("user", users), ("item", items))]
        z = torch.cat(vectors)  # f32[m, d]: users, then items
        message = self._message(params, z)
        key = linear(message, params["attention.message.weight"].T)
        own = torch.cat([own_user, own_item + len(users)])  # i64[n], n = B + B k
        place = torch.cat([torch.cat([far_item + len(users), far_user]), own.unsqueeze(1)], 1)  # i64[n, S + 1]
        of_node = linear(z.index_select(0, own), params["attention.node.weight"].T, params["attention.bias"])
        score = self._attend(params, _rows(key, place) + of_node.unsqueeze(1))
        some = torch.cat([near[0][1], near[1][1]])
        if not bool(some.all()):  # who has no neighbor has itself
            score = torch.cat([score[:, :-1].masked_fill(~some.unsqueeze(1), float("-inf")), score[:, -1:]], 1)
        summed = torch.bmm(score.softmax(1).unsqueeze(1), _rows(message, place)).squeeze(1)  # f32[n, d]
        return linear(summed, params["output.weight"].T, params["output.bias"]).relu()

    def all_scores(self, params: Params, archive: Archive, users: Tensor) -> Tensor:
        """With all neighbors."""
        items = self.nodes(params, archive, "item", torch.arange(archive.train.n_items))
        mine = self.nodes(params, archive, "user", users)
        size = max(1, _EDGES * 16 // items.numel())
        return torch.cat(
            [self._head(params, some.unsqueeze(1), items.unsqueeze(0)) for some in torch.split(mine, size)]
        )

    def nodes(self, params: Params, archive: Archive, side: Literal["user", "item"], node: Tensor) -> Tensor:
        """z* of users or items from all their neighbors, i64[n] -> f32[n, d]."""
        graph = archive.items_of if side == "user" else archive.users_of
        own, others = self._vectors(params, archive, side, node), self._vectors(params, archive, _other(side), None)
        message = self._message(params, others)
        key = linear(message, params["attention.message.weight"].T)  # f32[m, d]
        of_node = linear(own, params["attention.node.weight"].T, params["attention.bias"])
        self_message = self._message(params, own)
        self_score = self._attend(params, linear(self_message, params["attention.message.weight"].T) + of_node)
        found = torch.empty_like(own)
        degree = torch.from_numpy(graph.degree[node.numpy()])
        for some in _blocks(degree):
            count = degree[some]
            position = torch.repeat_interleave(torch.arange(len(count)), count)  # of the edge's node in the block
            start = torch.from_numpy(graph.indptr[node[some].numpy()]) - (count.cumsum(0) - count)
            far = torch.from_numpy(graph.node)[start[position] + torch.arange(len(position))]
            share = (self.neighbors / count.clamp(min=1)).log()  # each stands for so many of the draws, on average
            score = self._attend(params, key[far] + of_node[some][position]) + share[position]  # f32[edges]
            top = self_score[some].scatter_reduce(0, position, score, "amax")
            weight, mine = (score - top[position]).exp(), (self_score[some] - top).exp()
            total = mine.scatter_add(0, position, weight)
            summed = mine.unsqueeze(1) * self_message[some]
            summed = summed.index_add(0, position, weight.unsqueeze(1) * message[far]) / total.unsqueeze(1)
            found[some] = linear(summed, params["output.weight"].T, params["output.bias"]).relu()
        return found

    def _vectors(self, params: Params, archive: Archive, side: str, node: Tensor | None) -> Tensor:
        """z of some nodes, or of all, f32[n, d]."""
        if side == "item":
            return params["item"] if node is None else params["item"].index_select(0, node)
        if archive.user_features is None:
            raise ConfigError("AttentionGCN needs user features; see recleak.data.features.user_features.")
        features = archive.user_features if node is None else archive.user_features.index_select(0, node)
        return features @ params["user.encoder"]

    def _message(self, params: Params, z: Tensor) -> Tensor:
        """MLP(z), f32[n, d]: ReLU between layers."""
        for layer in range(1, self.layers + 1):
            z = linear(
                z if layer == 1 else z.relu(), params[f"message.{layer}.weight"].T, params[f"message.{layer}.bias"]
            )
        return z

    @staticmethod
    def _attend(params: Params, joined: Tensor) -> Tensor:
        """w2 . sigmoid(...), f32[..., d] -> f32[...]."""
        return joined.sigmoid() @ params["attention.output"]

    def _head(self, params: Params, user: Tensor, item: Tensor) -> Tensor:
        """s_uv, f32[B, 1, d] and f32[B or 1, k, d] -> f32[B, k]."""
        weight, d = params["head.1.weight"], self.factors
        inner = linear(user, weight[:d].T, params["head.1.bias"]) + linear(item, weight[d:].T)
        q = inner.sigmoid() if self.bounding == "sigmoid" else inner.relu()
        return (q.clamp(max=1) if self.bounding == "clip" else q) @ params["head.2.weight"].squeeze(1)


def _rows(table: Tensor, place: Tensor) -> Tensor:
    """f32[m, d] and i64[n, s] -> f32[n, s, d]; its gradient adds rows up, several times faster than an index does."""
    return table.index_select(0, place.reshape(-1)).view(*place.shape, -1)


def _once(count: int, *nodes: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The nodes that occur, i64[m] ascending, and where each of the given ones is among them."""
    there = torch.zeros(count, dtype=torch.bool)
    for each in nodes:
        there[each.reshape(-1)] = True
    where = there.cumsum(0) - 1
    return there.nonzero().squeeze(1), [where[each] for each in nodes]


def _other(side: str) -> str:
    return "user" if side == "item" else "item"


def _blocks(degree: Tensor) -> list[slice]:
    """Nodes in blocks of a bounded number of edges."""
    ends, start, total = [], 0, 0
    for place, count in enumerate(degree.tolist()):
        if total + count > _EDGES and place > start:
            ends.append(slice(start, place))
            start, total = place, 0
        total += count
    return [*ends, slice(start, len(degree))]
