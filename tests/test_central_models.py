"""Recommenders of a central trainer, each against a slow loop or the equation it is made of."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from recleak.data.features import classes_of, user_features
from recleak.data.split import Split, ratio
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.blurme import BlurMe, fitted_to
from recleak.defenses.dp_sgd import DPSGD
from recleak.defenses.feature_noise import PerturbedFeatures
from recleak.defenses.functional_mechanism import FunctionalMechanism
from recleak.errors import ConfigError
from recleak.metrics.ranking import rank
from recleak.models.attention_gcn import AttentionGCN
from recleak.models.autoencoder import Autoencoder
from recleak.models.base import Model, Params
from recleak.models.central import Archive, Neighbors
from recleak.models.components import Normal
from recleak.models.factorization import RatingFactorization, WalkFactorization, walk_matrix
from recleak.models.mf import MF
from recleak.models.rap import RAP
from recleak.protocols.centralized import Centralized, train_centralized
from recleak.testing import DefenseContract
from recleak.training.optimizers import Adam
from recleak.training.personal import first_params
from recleak.utility import union


@pytest.fixture(scope="module")
def split() -> Split:
    return ratio(Synthetic(n_users=90, n_items=60, mean_activity=15, min_activity=8).generate(), (0.7, 0.1, 0.2))


def params_of(model: Model, split: Split, seed: int = 0) -> Params:
    parts = tuple(replace(part, shared=True) for part in model.components())
    return first_params(parts, split.train.n_users, split.train.n_items, seed)


def features_of(split: Split) -> Tensor:
    return user_features(split.train, attributes=("gender",), levels=()).values


# --- the graph ----------------------------------------------------------------------------------------------------


def node_by_loop(
    model: AttentionGCN, params: Params, archive: Archive, side: str, node: int, drawn: list[int] | None = None
) -> Tensor:
    """Equations 3 to 9, one neighbor after the other, in double precision; of all neighbors, or of drawn ones."""
    assert archive.user_features is not None
    p = {name: value.double() for name, value in params.items()}
    z = {"user": archive.user_features.double() @ p["user.encoder"], "item": p["item"]}

    def message(vector: Tensor) -> Tensor:
        for layer in range(1, model.layers + 1):
            vector = vector @ p[f"message.{layer}.weight"] + p[f"message.{layer}.bias"]
            vector = vector.relu() if layer < model.layers else vector
        return vector

    other = "item" if side == "user" else "user"
    graph = archive.items_of if side == "user" else archive.users_of
    own = z[side][node]
    near = graph.node[graph.indptr[node] : graph.indptr[node + 1]].tolist() if drawn is None else drawn
    messages = [message(z[other][each]) for each in near] + [message(own)]
    weight = torch.cat([p["attention.message.weight"], p["attention.node.weight"]])  # W1 on [m, z]
    score = [
        torch.sigmoid(torch.cat([each, own]) @ weight + p["attention.bias"]) @ p["attention.output"]
        for each in messages
    ]
    share = model.neighbors / max(len(near), 1) if drawn is None else 1.0
    weight_of = torch.tensor([share] * len(near) + [1.0], dtype=torch.float64)
    alpha = torch.stack(score).exp() * weight_of
    alpha = alpha / alpha.sum()
    total = sum((a * m for a, m in zip(alpha, messages, strict=True)), torch.zeros_like(own))
    return (total @ p["output.weight"] + p["output.bias"]).relu()


def test_nodes_are_those_of_the_equations(split: Split) -> None:
    model = AttentionGCN(features_of(split).shape[1], factors=5, layers=2)
    archive, params = Archive(split.train, features_of(split)), params_of(model, split)
    for side, count in (("user", split.train.n_users), ("item", split.train.n_items)):
        found = model.nodes(params, archive, side, torch.arange(count))  # type: ignore[arg-type]
        for node in (0, 3, count - 1):
            expected = node_by_loop(model, params, archive, side, node).float()
            assert torch.allclose(found[node], expected, atol=1e-5), (side, node)


@pytest.mark.parametrize("bounding", ["none", "clip", "sigmoid"])
def test_scores_are_those_of_equation_10(split: Split, bounding: str) -> None:
    model = AttentionGCN(features_of(split).shape[1], factors=5, bounding=bounding)  # type: ignore[arg-type]
    archive, params = Archive(split.train, features_of(split)), params_of(model, split)
    user, item = (model.nodes(params, archive, side, torch.tensor([2])) for side in ("user", "item"))
    inner = torch.cat([user, item], 1) @ params["head.1.weight"] + params["head.1.bias"]
    q = {"none": inner.relu(), "clip": inner.clamp(0, 1), "sigmoid": inner.sigmoid()}[bounding]
    expected = (q @ params["head.2.weight"]).squeeze()
    assert torch.allclose(model.all_scores(params, archive, torch.tensor([2]))[0, 2], expected, atol=1e-5)


def test_drawn_neighbors_give_the_same_if_there_is_one(split: Split) -> None:
    """With a single neighbor every draw is that neighbor; equal draws weigh more than one, so S is 1."""
    one = split.train.take(
        np.unique(split.train.user, return_index=True)[1][split.train.user] == np.arange(len(split.train))
    )
    model = AttentionGCN(features_of(split).shape[1], factors=5, neighbors=1)
    archive, params = Archive(one, features_of(split)), params_of(model, split)
    user = torch.from_numpy(np.flatnonzero(one.activity)[:4])
    mine = np.unique(one.item[np.isin(one.user, user.numpy())])
    alone = np.setdiff1d(np.flatnonzero(archive.users_of.degree <= 1), mine)[:3]
    item = torch.from_numpy(alone).expand(4, -1)
    drawn = model.pair_scores(params, archive, user, item, step=5)
    assert torch.allclose(drawn, model.all_scores(params, archive, user)[:, alone], atol=1e-5)


def test_the_edge_that_is_predicted_is_not_read(split: Split) -> None:
    """A user whose only item is scored is as a user without any."""
    user, item = int(split.train.user[0]), int(split.train.item[0])
    only = (split.train.user != user) | (np.arange(len(split.train)) == 0)
    model = AttentionGCN(features_of(split).shape[1], factors=5)
    params = params_of(model, split)
    with_edge, without = (
        Archive(split.train.take(rows), features_of(split)) for rows in (only, split.train.user != user)
    )
    other = int(np.setdiff1d(np.arange(split.train.n_items), split.train.item[split.train.user == user])[0])
    asked, unasked = torch.tensor([[item, other]]), torch.tensor([[other, item]])
    vector = [model.drawn_nodes(params, archive, torch.tensor([user]), asked, 0)[0] for archive in (with_edge, without)]
    assert torch.allclose(vector[0], vector[1], atol=1e-6)
    unmasked = model.drawn_nodes(params, with_edge, torch.tensor([user]), unasked, 0)[0]
    assert not torch.allclose(vector[0], unmasked, atol=1e-4)


def test_drawn_nodes_are_those_of_the_equations(split: Split) -> None:
    """Node by node from the same draws, users and items of a batch that have some in common."""
    model = AttentionGCN(features_of(split).shape[1], factors=5, neighbors=4)
    archive, params = Archive(split.train, features_of(split)), params_of(model, split)
    user, item = torch.tensor([2, 5, 2, 7]), torch.tensor([[1, 4], [4, 9], [3, 1], [8, 8]])
    found = model.drawn_nodes(params, archive, user, item, step=3)
    sides = (
        ("user", archive.items_of, user, item[:, 0]),
        ("item", archive.users_of, item.reshape(-1), user.repeat_interleave(2)),
    )
    row = 0
    for side, graph, node, without in sides:
        drawn, some = graph.sample(node, without, 4, archive.seed, f"neighbors of a {side}", 3)
        for place in range(len(node)):
            near = drawn[place].tolist() if some[place] else []
            expected = node_by_loop(model, params, archive, side, int(node[place]), near)
            assert torch.allclose(found[row], expected.float(), atol=1e-5), (side, place)
            row += 1
    assert row == len(found)


def test_neighbors_are_drawn_uniformly_and_anew() -> None:
    graph = Neighbors(np.array([0, 4, 4, 6]), np.array([1, 5, 7, 8, 2, 3]))
    nodes, nobody = torch.tensor([0, 1, 2]), torch.full((3,), -1)
    drawn, some = graph.sample(nodes, nobody, 4000, 0, "neighbors", 1)
    assert some.tolist() == [True, False, True]
    counts = np.bincount(drawn[0].numpy(), minlength=9)[[1, 5, 7, 8]]
    assert stats.chisquare(counts).pvalue > 1e-4
    assert set(drawn[2].tolist()) == {2, 3}
    again, _ = graph.sample(nodes, nobody, 4000, 0, "neighbors", 2)
    assert not torch.equal(drawn, again)


def test_a_neighbor_that_is_left_out_is_replaced_by_the_others() -> None:
    graph = Neighbors(np.array([0, 4, 4, 6, 7]), np.array([1, 5, 7, 8, 2, 3, 2]))
    nodes = torch.tensor([0, 0, 0, 2, 3, 0])
    drawn, some = graph.sample(nodes, torch.tensor([1, 7, 8, 3, 2, 6]), 3000, 0, "neighbors", 0)
    assert some.tolist() == [True, True, True, True, False, True]
    for row, left in enumerate([(5, 7, 8), (1, 5, 8), (1, 5, 7), (2,), None, (1, 5, 7, 8)]):
        if left is not None:
            counts = np.bincount(drawn[row].numpy(), minlength=9)
            assert counts[list(left)].sum() == 3000
            assert len(left) == 1 or stats.chisquare(counts[list(left)]).pvalue > 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("noise", ["none", "step", "never"])
def test_the_graph_learns_with_and_without_the_noisy_loss(split: Split, noise: str) -> None:
    features = user_features(split.train, attributes=("gender",), levels=())
    groups = tuple((each.start, each.stop) for each in features.groups.values())
    defense: Defense = Defense()
    if noise != "none":
        mechanism = FunctionalMechanism(40.0, len(split.train), noise, repair="ridge")  # type: ignore[arg-type]
        defense = Chain((PerturbedFeatures(20.0, groups), mechanism))
    model = AttentionGCN(features.values.shape[1], factors=8, bounding="none" if noise == "none" else "clip")
    protocol = Centralized(
        epochs=25, batch_size=32, optimizer=Adam(0.01), loss="bpr" if noise == "none" else "bpr-taylor", patience=0
    )
    trained = train_centralized(
        protocol, model, split.train, defense=defense, user_features=features.values, show_progress=False
    )
    found = rank(trained, union(split.train, split.valid), split.test)
    assert found.recall(10).mean() > 1.15 * found.constant().recall(10).mean()


# --- the repair of a fixed draw -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 20, 60])
def test_the_ridge_outweighs_every_negative_direction_and_four_deviations_do_not(width: int) -> None:
    generator = np.random.default_rng(width)
    lowest = []
    for _ in range(300):
        drawn = np.triu(generator.laplace(size=(width, width)))
        lowest.append(np.linalg.eigvalsh((drawn + drawn.T) / 2)[0])
    ridge = FunctionalMechanism(0.4, 100, "never", repair="ridge").ridge(width)
    assert np.mean(np.array(lowest) + ridge > 0) > 0.99
    if width == 60:  # Zhang et al. 2012: four standard deviations of Laplace noise of scale 1
        assert np.mean(np.array(lowest) + 4 * np.sqrt(2) > 0) < 0.01


def test_one_draw_without_a_repair_has_no_minimum_and_with_it_has_one() -> None:
    """The whole loss of fixed q: the data's quadratic form plus the noise."""
    generator, d, n = np.random.default_rng(0), 60, 80_000
    q = generator.uniform(size=(2000, d)) - generator.uniform(size=(2000, d))
    data = q.T @ q / len(q) / 8
    mechanism = FunctionalMechanism(0.4, n, "never", repair="ridge")
    assert mechanism.scale(d) == pytest.approx(0.03)  # as the paper prints it
    drawn = np.triu(generator.laplace(size=(d, d))) * mechanism.scale(d)
    noisy = data + (drawn + drawn.T) / 2
    assert np.linalg.eigvalsh(noisy)[0] < -0.1
    assert np.linalg.eigvalsh(noisy + mechanism.scale(d) * mechanism.ridge(d) * np.eye(d))[0] > 0


@pytest.mark.parametrize(("d", "scale"), [(20, 0.00375), (40, 0.0125), (60, 0.03), (80, 0.0525), (100, 0.08125)])
def test_scales_are_those_that_the_paper_rounds(d: int, scale: float) -> None:
    found = FunctionalMechanism(0.4, 80_000).scale(d)
    assert found == pytest.approx((d + d * d / 4) / 32_000)
    assert found == pytest.approx(scale, rel=0.15)
    assert FunctionalMechanism(0.4, 80_000, on="sum").scale(d) == pytest.approx(found / 80_000)


def test_redrawn_noise_composes_to_what_a_batch_tells() -> None:
    words = FunctionalMechanism(0.4, 80_000).composed(steps=12_500, batch_size=64)
    assert "epsilon of 500" in words  # 0.4 * 80,000 / 64
    assert "10 times" in words
    assert "adds up to 5e+03" in words
    assert "drawn once" in FunctionalMechanism(0.4, 80_000, "never").composed(100, 64)


# --- the autoencoder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1e-3, 10.0])
def test_clipped_gradients_are_those_of_single_users(split: Split, bound: float) -> None:
    model = Autoencoder(hidden=4)
    archive, params = Archive(split.train), params_of(model, split)
    users = torch.tensor([1, 5, 6])
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for user in torch.split(users, 1):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        torch.autograd.backward(model.losses(leaves, archive, user).sum())
        gradient = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        norm = torch.sqrt(sum((value.square().sum() for value in gradient.values()), torch.zeros(())))
        for name, value in gradient.items():
            total[name] += value * min(1.0, bound / float(norm))
    found, losses = model.clipped_gradient(params, archive, users, bound)
    assert torch.allclose(losses, model.losses(params, archive, users), atol=1e-6)
    for name, value in total.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_dp_sgd_adds_noise_of_the_stated_size_to_every_number(split: Split) -> None:
    model = Autoencoder(hidden=4)

    def first_step(multiplier: float) -> Params:
        protocol = Centralized(epochs=1, batch_size=1000, patience=0, optimizer=Adam(1e-9, beta1=0.0, beta2=0.0))
        from recleak.training.central import Trainer

        trainer = Trainer(
            model, Archive(split.train), DPSGD(multiplier, clip=0.1), optimizer=protocol.optimizer, loss="bpr",
            negatives=1, batch_size=1000, params=params_of(model, split), seed=0,
        )  # fmt: skip
        seen: list[Params] = []
        trainer._move = seen.append  # type: ignore[assignment]
        trainer.epoch(0)
        return seen[0]

    quiet, noisy = first_step(0.0), first_step(3.0)
    difference = torch.cat([(noisy[name] - quiet[name]).reshape(-1) for name in quiet]) * split.train.n_users
    assert stats.kstest(difference.numpy(), stats.norm(scale=0.3).cdf).pvalue > 1e-4
    assert stats.kstest(difference.numpy(), stats.norm(scale=0.6).cdf).pvalue < 1e-4


def test_dp_sgd_needs_users_as_examples(split: Split) -> None:
    with pytest.raises(ConfigError, match="autoencoder"):
        train_centralized(Centralized(), MF(4), split.train, defense=DPSGD(1.0))


# --- factorizations -----------------------------------------------------------------------------------------------


def rated(split: Split) -> Split:
    import polars as pl

    rows = split.train.rows.with_columns(
        ((pl.col("user") * 7 + pl.col("item") * 3) % 5 + 1).cast(pl.Float32).alias("rating")
    )
    return replace(split, train=replace(split.train, rows=rows))


@pytest.mark.parametrize("model", [RatingFactorization(4, epsilon=2.0, sweeps=2), WalkFactorization(4, epsilon=2.0)])
def test_items_minimize_the_perturbed_objective(split: Split, model: RatingFactorization | WalkFactorization) -> None:
    """The gradient of each item's objective, noise included, is zero: what the theorem needs."""
    train = rated(split).train
    archive = Archive(train)
    noisy = model.solve(archive, 0)
    user, item = (noisy[name].double().numpy() for name in ("user", "item"))
    assert np.linalg.norm(user, axis=1).max() <= 1 + 1e-6
    if isinstance(model, RatingFactorization):
        value = np.full((train.n_users, train.n_items), np.nan)
        value[train.user, train.item] = train.rows["rating"].to_numpy() - 3.0
        width = 4.0
    else:
        value = walk_matrix(train.matrix(), model.window, model.negatives)
        width = float(value.max() - value.min())
    noise = model._noise(train.n_items, width, 0)
    for j in range(0, train.n_items, 7):
        have = ~np.isnan(value[:, j])
        error = user[have] @ item[j] - value[have, j]
        gradient = 2 * user[have].T @ error + 2 * model.ridge * item[j] + noise[j]
        assert np.abs(gradient).max() < 1e-4 * max(1.0, np.abs(noise[j]).max())


def test_the_noise_has_its_density() -> None:
    """|eta| is Gamma(d, Delta / epsilon) with Delta = 2 width, and directions are uniform."""
    drawn = RatingFactorization(3, epsilon=0.5)._noise(4000, 4.0, 1)
    length = np.linalg.norm(drawn, axis=1)
    assert stats.kstest(length, stats.gamma(3, scale=16.0).cdf).pvalue > 1e-4
    assert stats.kstest(length, stats.gamma(3, scale=12.0).cdf).pvalue < 1e-4
    assert np.abs((drawn / length[:, None]).mean(axis=0)).max() < 0.05
    assert not RatingFactorization(3, epsilon=inf)._noise(10, 4.0, 1).any()


def test_one_rating_moves_the_gradient_by_the_sensitivity_at_most(split: Split) -> None:
    """At any vector of an item: 2 (r - r') p_u, and |p_u| <= 1, so 2 * 4 for five stars."""
    train = rated(split).train
    user = RatingFactorization(4, sweeps=2).solve(Archive(train), 0)["user"].double()
    moved = 2 * (5 - 1) * user  # of every user
    assert float(moved.norm(dim=1).max()) <= 2 * 4 + 1e-6


def test_the_matrix_of_walks_is_that_of_the_whole_graph(split: Split) -> None:
    """Against powers of the transition matrix of all nodes."""
    matrix = split.train.matrix()
    users, items = matrix.shape
    whole = np.zeros((users + items, users + items))
    whole[:users, users:] = matrix.toarray()
    whole += whole.T
    degree = np.maximum(whole.sum(1), 1)
    step = whole / degree[:, None]
    total = sum(np.linalg.matrix_power(step, r) for r in range(1, 6)) / degree
    expected = np.log(np.maximum(1, whole.sum() / 5 * total))[:users, users:]
    assert np.allclose(walk_matrix(matrix, 5, 1), expected, atol=1e-8)


def test_ratings_are_needed(split: Split) -> None:
    train = (
        split.train
        if "rating" not in split.train.rows.columns
        else replace(split.train, rows=split.train.rows.drop("rating"))
    )
    with pytest.raises(ConfigError, match="needs ratings"):
        train_centralized(Centralized(), RatingFactorization(4), train)


# --- adversarial training -----------------------------------------------------------------------------------------


def test_the_attacker_learns_and_the_recommender_gets_the_reverse(split: Split) -> None:
    label, names = classes_of(split.train, "gender")
    model = RAP(4, strength=2.0, top=3, hidden=5, attributes=("gender",), classes=(len(names),), init=Normal(1.0))
    archive = Archive(split.train, labels={"gender": torch.tensor(label)})
    params = {name: value.requires_grad_() for name, value in params_of(model, split).items()}
    users = torch.arange(20)

    def gradients(strength: float) -> Params:
        loss = replace(model, strength=strength).side_loss(params, archive, users, 0)
        assert loss is not None
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(params, found, strict=True))

    plain, reverse = gradients(-1.0), gradients(2.0)  # -1: gradients pass as they are
    assert plain["item"].abs().sum() > 0
    for name in ("user", "item"):
        assert torch.allclose(reverse[name], -2 * plain[name], atol=1e-6)
    for name in ("attacker.input", "attacker.state", "attacker.gender"):
        assert torch.allclose(reverse[name], plain[name], atol=1e-6)


def test_the_attacker_s_unit_is_torch_s(split: Split) -> None:
    model = RAP(4, hidden=5, attributes=("gender",), classes=(2,))
    params = params_of(model, split)
    unit = torch.nn.GRU(4, 5, batch_first=True)
    with torch.no_grad():
        z, r, n = params["attacker.input"].T.chunk(3)
        hz, hr, hn = params["attacker.state"].T.chunk(3)
        dict(unit.named_parameters())["weight_ih_l0"].copy_(torch.cat([r, z, n]))  # torch's order is reset, update, new
        dict(unit.named_parameters())["weight_hh_l0"].copy_(torch.cat([hr, hz, hn]))
        dict(unit.named_parameters())["bias_ih_l0"].zero_()
        dict(unit.named_parameters())["bias_hh_l0"].zero_()
        inputs = torch.randn(6, 7, 4)
        assert torch.allclose(model._read(params, inputs), unit(inputs)[0][:, -1], atol=1e-5)


def test_labels_are_needed(split: Split) -> None:
    with pytest.raises(ConfigError, match="no labels"):
        train_centralized(Centralized(), RAP(4, attributes=("gender",), classes=(2,)), split.train)


# --- BlurMe -------------------------------------------------------------------------------------------------------


class TestBlurMe(DefenseContract):
    """The contract of defenses; without additions, since the contract's clients have no attribute."""

    defense = BlurMe(extra=0.0)
    neutral = BlurMe(extra=0.0)


@pytest.mark.parametrize("strategy", ["sampled", "greedy"])
def test_added_items_speak_for_another_class(split: Split, strategy: str) -> None:
    from recleak.protocols.centralized import defended_history

    made = BlurMe(extra=0.5, strategy=strategy).fitted(split.train)  # type: ignore[arg-type]
    assert made.weight is not None
    assert made.label is not None
    before, after = split.train.matrix().toarray() > 0, defended_history(made, split.train, 0).matrix().toarray() > 0
    assert (after >= before).all()
    added = after & ~before
    weight, label = made.weight.numpy(), made.label.numpy()
    for user in np.flatnonzero(label >= 0):
        wanted = int(np.floor(0.5 * before[user].sum() + 0.5))
        able = ((weight[1 - label[user]] > 0) & ~before[user]).sum()
        assert added[user].sum() == min(wanted, able)
        assert (weight[1 - label[user]][added[user]] > 0).all()


def test_blurring_needs_the_data_and_a_chain_gets_them(split: Split) -> None:
    from recleak.protocols.centralized import defended_history

    with pytest.raises(ConfigError, match="does not know the data"):
        defended_history(BlurMe(), split.train, 0)
    chain = fitted_to(Chain((BlurMe(), PerturbedFeatures(1.0))), split.train)
    assert isinstance(chain, Chain)
    assert isinstance(chain.defenses[0], BlurMe)
    assert chain.defenses[0].weight is not None
