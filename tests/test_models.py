"""Every model against a plain computation for one client, written with ordinary torch in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recleak.errors import NotFoundError
from recleak.models.adapter import TorchModel
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Constant, FanIn, Given, Normal, by_name
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.mlp import head_components
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec

FEATURES = 5  # of a user


class PlainNCF(nn.Module):
    """What a user of the adapter would write."""

    def __init__(self, n_users: int = 7, n_items: int = 9, factors: int = 4) -> None:
        super().__init__()
        self.user = nn.Embedding(n_users, factors)
        self.item = nn.Embedding(n_items, factors)
        self.mlp = nn.Sequential(nn.Linear(2 * factors, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        score: Tensor = self.mlp(torch.cat([self.user(user), self.item(item)], dim=-1))
        return score.squeeze(-1)


@dataclass
class Client:
    """One client as a plain computation sees it: whole local tables, item numbers, a list of own items."""

    params: Params
    scored: list[int]
    own: list[int]
    features: Tensor  # f64[F]
    item_features: Tensor | None  # f64[I, G]


def perceptron(params: Params, inputs: Tensor) -> Tensor:
    depth = sum(name.startswith("head.") and name.endswith(".weight") for name in params)
    for layer in range(1, depth + 1):
        inputs = F.linear(inputs, params[f"head.{layer}.weight"].T, params[f"head.{layer}.bias"])
        inputs = inputs if layer == depth else F.relu(inputs)
    return inputs.squeeze(-1)


def beside(user: Tensor, item: Tensor) -> Tensor:
    return torch.cat([user.expand(len(item), -1), item], dim=1)


def plain_mf(model: MF, client: Client) -> Tensor:
    p = client.params
    scores = []
    for i in client.scored:
        score = (p["user"] * p["item"][i]).sum()
        scores.append(score + p["bias"] + p["user.bias"] + p["item.bias"][i] if model.biases else score)
    return torch.stack(scores)


def plain_gmf(model: GMF, client: Client) -> Tensor:
    p = client.params
    product = p["user"] * p["item"][client.scored]
    return F.linear(product, p["head.1.weight"].T, p["head.1.bias"] if model.bias else None).squeeze(-1)


def plain_ncf(model: NCF, client: Client) -> Tensor:
    return perceptron(client.params, beside(client.params["user"], client.params["item"][client.scored]))


def plain_pfedrec(model: PFedRec, client: Client) -> Tensor:
    return perceptron(client.params, client.params["item"][client.scored])


def plain_lightgcn(model: LightGCN, client: Client) -> Tensor:
    """Propagation with the adjacency matrix of the star; node 0 is the user, node 1 + i is item i."""
    user, item = client.params["user"], client.params["item"]
    adjacency = torch.zeros(1 + len(item), 1 + len(item), dtype=torch.float64)
    for i in client.own:
        adjacency[0, 1 + i] = adjacency[1 + i, 0] = 1
    inverse = torch.where(adjacency.sum(1) > 0, 1 / adjacency.sum(1).clamp(min=1), 0)  # of the degrees
    if model.normalization == "symmetric":
        step = torch.diag(inverse.sqrt()) @ adjacency @ torch.diag(inverse.sqrt())
    else:
        step = torch.diag(inverse) @ adjacency
    if not model.propagate_items:
        step[1:] = torch.eye(1 + len(item))[1:]
    layers = [torch.cat([user[None], item])]
    for _ in range(model.layers):
        layers.append(step @ layers[-1])
    combined = torch.stack(layers).mean(0) if model.combine == "mean" else torch.stack(layers).sum(0)
    z_u = combined[0]
    z_i = (combined[1:] if model.propagate_items else item)[client.scored]
    return perceptron(client.params, beside(z_u, z_i)) if model.score == "mlp" else z_i @ z_u


def plain_feature_gcn(model: FeatureGCN, client: Client) -> Tensor:
    p = client.params
    z_v = p["item"] if client.item_features is None else client.item_features @ p["item.encoder"]
    z_u = p["user.encoder"].T @ client.features
    messages = [p["user.neighbors.weight"].T @ z_v[i] for i in client.own]
    heard = torch.stack(messages).mean(0) if messages else torch.zeros_like(z_u)
    z_u = F.relu(F.linear(z_u + heard, p["user.output.weight"].T, p["user.output.bias"]))
    return perceptron(p, beside(z_u, z_v[client.scored]))


def plain_adapter(model: TorchModel, client: Client) -> Tensor:
    p = client.params
    hidden = beside(p["user.weight"], p["item.weight"][client.scored])
    for place in (0, 2):
        hidden = F.linear(hidden, p[f"mlp.{place}.weight"], p[f"mlp.{place}.bias"]).relu()
    return F.linear(hidden, p["mlp.4.weight"], p["mlp.4.bias"]).squeeze(-1)


Plain = Callable[..., Tensor]

CASES: dict[str, tuple[Model, Plain]] = {
    "mf": (MF(4), plain_mf),
    "mf with biases": (MF(3, biases=True), plain_mf),
    "gmf": (GMF(5), plain_gmf),
    "gmf without bias": (GMF(5, bias=False), plain_gmf),
    "ncf": (NCF(4, (6, 3)), plain_ncf),
    "ncf of one layer": (NCF(4, ()), plain_ncf),
    "ncf of four layers": (NCF(1, (5, 1, 2)), plain_ncf),
    "pfedrec": (PFedRec(6), plain_pfedrec),
    "feature gcn": (FeatureGCN(FEATURES, 4, (3,)), plain_feature_gcn),
    "feature gcn on features": (
        FeatureGCN(FEATURES, 4, (3, 2), item_side="features", item_feature_dim=6),
        plain_feature_gcn,
    ),
    "adapter": (TorchModel(PlainNCF()), plain_adapter),
    "lightgcn, perceptron": (LightGCN(4, 2, score="mlp", hidden=(5,)), plain_lightgcn),
    "lightgcn, items at rest, perceptron": (
        LightGCN(3, normalization="mean", propagate_items=False, score="mlp", hidden=()),
        plain_lightgcn,
    ),
    **{
        f"lightgcn {layers} {combine} {normalization} {propagate}": (
            LightGCN(3, layers, combine, normalization=normalization, propagate_items=propagate),
            plain_lightgcn,
        )
        for layers in (1, 2, 3, 4)
        for combine in ("mean", "sum")
        for normalization in ("symmetric", "mean")
        for propagate in (True, False)
    },
}
MODELS = [pytest.param(model, id=name) for name, (model, _) in CASES.items()]
ALL = [pytest.param(model, plain, id=name) for name, (model, plain) in CASES.items()]


@dataclass
class Cohort:
    """Random clients with tables, items and features of their own."""

    model: Model
    params: Params  # whole: per_item components are f64[C, I, *shape]
    scored: Tensor  # i64[C, B]
    own: Tensor  # bool[C, I]
    features: Tensor  # f64[C, F]
    item_features: Tensor | None  # f64[I, G]

    @staticmethod
    def draw(
        model: Model, seed: int, clients: int, scored: int, n_items: int, dtype: torch.dtype = torch.float64
    ) -> Cohort:
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

        params = {
            part.name: normal(clients, *([n_items] if part.storage == "per_item" else []), *part.shape)
            for part in model.components()
        }
        density = torch.rand(clients, 1, generator=rng)
        density[0] *= clients == 1  # the first of several has no items
        constant = model.item_features(n_items)
        return Cohort(
            model,
            params,
            torch.randint(n_items, (clients, scored), generator=rng),
            torch.rand(clients, n_items, generator=rng) < density,
            normal(clients, FEATURES),
            None if constant is None else constant.to(dtype),
        )

    def part(self, start: int, stop: int) -> Cohort:
        params = {name: value[start:stop] for name, value in self.params.items()}
        scored, own, features = (value[start:stop] for value in (self.scored, self.own, self.features))
        return Cohort(self.model, params, scored, own, features, self.item_features)

    def client(self, c: int) -> Client:
        own = self.own[c].nonzero().flatten().tolist()
        params = {name: value[c] for name, value in self.params.items()}
        return Client(params, self.scored[c].tolist(), own, self.features[c], self.item_features)

    def logits(self) -> Tensor:
        """As the trainer calls a model: with gathered rows."""
        tables = {part.name for part in self.model.components() if part.storage == "per_item"}
        each = torch.arange(len(self.scored))[:, None]
        own = self.own.to(self.features.dtype)
        constant = self.item_features
        batch = Batch(
            own=self.own.gather(1, self.scored),
            degree=own.sum(1),
            neighbors={name: torch.einsum("ci,ci...->c...", own, self.params[name]) for name in tables}
            if self.model.reads_neighbors
            else {},
            user_features=self.features if self.model.needs_user_features else None,
            item_features=None if constant is None else constant[self.scored],
            neighbor_features=None if constant is None else own @ constant,
        )
        gathered = {name: value[each, self.scored] if name in tables else value for name, value in self.params.items()}
        return self.model.logits(gathered, batch)


@pytest.mark.parametrize(("model", "plain"), ALL)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(1, 4), scored=st.integers(1, 6), n_items=st.integers(1, 7))
def test_logits_and_gradients_equal_a_plain_computation(
    model: Model, plain: Plain, seed: int, clients: int, scored: int, n_items: int
) -> None:
    cohort = Cohort.draw(model, seed, clients, scored, n_items)
    leaves = [value.requires_grad_() for value in cohort.params.values()]
    logits = cohort.logits()
    expected = torch.stack([plain(model, cohort.client(c)) for c in range(clients)])
    assert logits.shape == (clients, scored)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)

    pull = torch.randn(clients, scored, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got, want = (
        torch.autograd.grad((scores * pull).sum(), leaves, allow_unused=True, materialize_grads=True)
        for scores in (logits, expected)
    )
    names = list(cohort.params)
    torch.testing.assert_close(
        dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_client_does_not_depend_on_the_others(model: Model) -> None:
    cohort = Cohort.draw(model, 3, clients=5, scored=33, n_items=40, dtype=torch.float32)
    logits = cohort.logits()
    assert logits.dtype == torch.float32
    for start, stop in ((0, 1), (2, 3), (1, 4)):
        torch.testing.assert_close(cohort.part(start, stop).logits(), logits[start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_client_without_items_gets_finite_scores_and_gradients(model: Model) -> None:
    cohort = Cohort.draw(model, 1, clients=2, scored=4, n_items=6)
    assert not cohort.own[0].any()
    leaves = [value.requires_grad_() for value in cohort.params.values()]
    logits = cohort.logits()
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(logits.sum(), leaves))


def table(parts: tuple[Component, ...]) -> list[tuple[object, ...]]:
    return [(part.name, part.storage, part.role, part.layer, part.shape, part.shared) for part in parts]


USER = ("user", "per_user", "user", None, (8,), False)
ITEM = ("item", "per_item", "item", None, (8,), True)
HEAD = [
    ("head.1.weight", "dense", "head", 1, (16, 6), True),
    ("head.1.bias", "dense", "head", 1, (6,), True),
    ("head.2.weight", "dense", "head", 2, (6, 1), True),
    ("head.2.bias", "dense", "head", 2, (1,), True),
]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (MF(8), [USER, ITEM]),
        (
            MF(8, biases=True),
            [
                USER,
                ITEM,
                ("user.bias", "per_user", "user", None, (), False),
                ("item.bias", "per_item", "item", None, (), True),
                ("bias", "dense", "head", 1, (), True),
            ],
        ),
        (
            GMF(),
            [
                USER,
                ITEM,
                ("head.1.weight", "dense", "head", 1, (8, 1), True),
                ("head.1.bias", "dense", "head", 1, (1,), True),
            ],
        ),
        (GMF(bias=False), [USER, ITEM, ("head.1.weight", "dense", "head", 1, (8, 1), True)]),
        (NCF(8, (6,)), [USER, ITEM, *HEAD]),
        (LightGCN(8), [USER, ITEM]),
        (LightGCN(8, score="mlp", hidden=(6,)), [USER, ITEM, *HEAD]),
        (
            PFedRec(8),
            [
                ITEM,
                ("head.1.weight", "dense", "head", 1, (8, 1), False),
                ("head.1.bias", "dense", "head", 1, (1,), False),
            ],
        ),
        (
            FeatureGCN(21, 8, (6,)),
            [
                ("user.encoder", "dense", "user", None, (21, 8), True),
                ("user.neighbors.weight", "dense", "user", None, (8, 8), True),
                ("user.output.weight", "dense", "user", None, (8, 8), True),
                ("user.output.bias", "dense", "user", None, (8,), True),
                ITEM,
                *HEAD,
            ],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_components(model: Model, expected: list[tuple[object, ...]]) -> None:
    assert table(model.components()) == expected


def test_feature_gcn_on_features_has_an_encoder_in_place_of_the_table() -> None:
    on_table, on_features = FeatureGCN(21, 8), FeatureGCN(21, 8, item_side="features", item_feature_dim=12)
    parts, others = by_name(on_table.components()), by_name(on_features.components())
    assert parts.keys() - others.keys() == {"item"}
    assert table((others["item.encoder"],)) == [("item.encoder", "dense", "item", None, (12, 8), True)]


def test_the_sizes_of_the_papers() -> None:
    assert [part.shape for part in NCF().components()] == [
        *[(64,), (64,)],
        *[(128, 64), (64,), (64, 32), (32,), (32, 1), (1,)],
    ]
    assert by_name(PFedRec().components())["item"].shape == (32,)
    assert [part.layer for part in FeatureGCN(21).components() if part.role == "head"] == [1, 1, 2, 2]


def test_which_models_read_neighbors_and_features() -> None:
    readers = {name for name, (model, _) in CASES.items() if model.reads_neighbors}
    assert readers == {name for name in CASES if name.startswith("lightgcn")} | {"feature gcn"}
    assert {name for name, (model, _) in CASES.items() if model.needs_user_features} == {
        "feature gcn",
        "feature gcn on features",
    }
    assert {name for name, (model, _) in CASES.items() if model.item_features(3) is not None} == {
        "feature gcn on features"
    }


@pytest.mark.parametrize(
    ("model", "name", "std"),
    [
        (MF(), "user", 0.1),
        (GMF(), "item", 0.01),
        (NCF(), "user", 1.0),
        (NCF(), "item", 1.0),
        (LightGCN(), "item", 0.1),
        (PFedRec(), "item", 1.0),
        (FeatureGCN(21), "user.encoder", 1.0),
        (FeatureGCN(21), "user.output.weight", 1.0),
        (FeatureGCN(21), "head.1.weight", 1.0),
    ],
    ids=str,
)
def test_normal_starts(model: Model, name: str, std: float) -> None:
    values = by_name(model.components())[name].draw(0, range(200))
    assert values.mean().item() == pytest.approx(0, abs=5 * std / sqrt(values.numel()))
    assert values.std().item() == pytest.approx(std, rel=5 / sqrt(2 * values.numel()))


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_heads_start_as_torch_starts_linear_layers(layer: int, kind: str) -> None:
    """Bound 1/sqrt(fan in), for biases too; torch's own layer is the witness."""
    widths = (128, 64, 32, 1)
    part = by_name(NCF().components())[f"head.{layer}.{kind}"]
    ours = torch.cat([part.draw(seed).flatten() for seed in range(400 if kind == "bias" else 10)])
    torch.manual_seed(0)
    theirs = torch.cat(
        [getattr(nn.Linear(widths[layer - 1], widths[layer]), kind).detach().flatten() for _ in range(400)]
    )
    bound = 1 / sqrt(widths[layer - 1])
    for values in (ours, theirs):
        assert 0.97 * bound < values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / sqrt(3), rel=4 / sqrt(values.numel()))


def test_gmf_starts_as_keras_does() -> None:
    """LeCun uniform: bound sqrt(3 / fan in); the bias is zero."""
    weight, bias = GMF().components()[2:]
    values = torch.cat([weight.draw(seed) for seed in range(300)])
    assert 0.97 * sqrt(3 / 8) < values.abs().max() <= sqrt(3 / 8)
    assert bias.draw(0).tolist() == [[0.0]]


def test_head_components_take_another_start_for_biases() -> None:
    parts = head_components((3, 2), Normal(1.0), Constant(0.5), shared=False)
    assert [part.init for part in parts] == [Normal(1.0), Constant(0.5)] * 2
    assert not any(part.shared for part in parts)
    assert {part.init for part in head_components((3, 2), FanIn())} == {FanIn()}


def test_models_are_values() -> None:
    assert NCF() == NCF() != NCF(32)
    assert hash(LightGCN(8)) == hash(LightGCN(8))
    assert LightGCN(8).components() == LightGCN(8).components()


def test_pard_and_two_layers_by_hand() -> None:
    """u = 1, own rows 3 and 5, another item 7; one factor, so that all numbers can be checked by eye."""
    params = {"user": torch.tensor([[1.0]]), "item": torch.tensor([[[3.0], [7.0]]])}
    batch = Batch(torch.tensor([[True, False]]), torch.tensor([2.0]), {"item": torch.tensor([[8.0]])})
    pard = LightGCN(1, normalization="mean", propagate_items=False)
    assert pard.propagate(params, batch)[0].item() == (1 + 4) / 2
    assert pard.logits(params, batch).tolist() == [[2.5 * 3, 2.5 * 7]]
    user, item = LightGCN(1, 2, "sum", normalization="mean").propagate(params, batch)
    assert user.tolist() == [[1 + 4 + 1]]
    assert item.tolist() == [[[3 + 1 + 4], [7]]]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LightGCN(combine="men"), "Unknown combine 'men'. Did you mean 'mean'? Known: mean, sum."),  # type: ignore[arg-type]
        (lambda: LightGCN(score="cosine"), "Unknown score 'cosine'. Known: dot, mlp."),  # type: ignore[arg-type]
        (lambda: LightGCN(normalization="none"), "Unknown normalization 'none'"),  # type: ignore[arg-type]
        (lambda: LightGCN(layers=0), "Got layers=0, expected layers >= 1"),
        (lambda: FeatureGCN(3, item_side="tables"), "Unknown item_side 'tables'. Did you mean 'table'?"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_do_not_exist(build: Callable[[], Model], words: str) -> None:
    with pytest.raises((NotFoundError, ValueError)) as error:
        build()
    assert words in str(error.value)


def test_item_features_are_public_fixed_and_one_row_per_item() -> None:
    model = FeatureGCN(FEATURES, item_side="features", item_feature_dim=100)
    few, many = model.item_features(3), model.item_features(300)
    assert few is not None
    assert many is not None
    assert few.dtype == torch.float32
    assert torch.equal(few, many[:3])
    assert many.std().item() == pytest.approx(0.1, rel=0.02)
    assert many.mean().item() == pytest.approx(0, abs=0.002)
    other = FeatureGCN(FEATURES, item_side="features", item_feature_dim=100, item_seed=1).item_features(3)
    assert other is not None
    assert not torch.equal(few, other)


def test_feature_gcn_says_which_features_are_missing() -> None:
    empty = Batch(torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1))
    with pytest.raises(ValueError, match="without user_features, expected"):
        FeatureGCN(FEATURES).logits({}, empty)
    known = Batch(empty.own, empty.degree, user_features=torch.zeros(1, FEATURES))
    with pytest.raises(ValueError, match="without item_features and neighbor_features, expected both"):
        FeatureGCN(FEATURES, item_side="features").logits({}, known)


def test_only_the_active_rows_of_the_user_encoder_get_a_gradient() -> None:
    """APM's exact leak: with one-hot x_u, the support of the gradient of E_U is the attribute."""
    cohort = Cohort.draw(FeatureGCN(FEATURES, 4), 0, clients=3, scored=8, n_items=9)
    cohort.features = torch.eye(FEATURES, dtype=torch.float64)[[4, 0, 2]]
    encoder = cohort.params["user.encoder"].requires_grad_()
    (gradient,) = torch.autograd.grad(cohort.logits().sum(), encoder)
    assert torch.equal(gradient.abs().sum(2) > 0, cohort.features > 0)


# The adapter


def test_adapter_components() -> None:
    module = PlainNCF(7, 9, 4)
    parts = TorchModel(module, shared={"user.weight": True, "mlp.4.bias": False}).components()
    assert table(parts) == [
        ("user.weight", "per_user", "user", None, (4,), True),
        ("item.weight", "per_item", "item", None, (4,), True),
        ("mlp.0.weight", "dense", "head", 1, (6, 8), True),
        ("mlp.0.bias", "dense", "head", 1, (6,), True),
        ("mlp.2.weight", "dense", "head", 2, (3, 6), True),
        ("mlp.2.bias", "dense", "head", 2, (3,), True),
        ("mlp.4.weight", "dense", "head", 3, (1, 3), True),
        ("mlp.4.bias", "dense", "head", 3, (1,), False),
    ]
    assert not by_name(TorchModel(module).components())["user.weight"].shared
    named = by_name(parts)
    assert torch.equal(named["item.weight"].draw(5, [8, 2]), module.item.weight.detach()[[8, 2]])
    assert torch.equal(named["mlp.0.weight"].draw(5)[0], module.mlp.get_parameter("0.weight").detach())


def test_adapter_guesses_roles_and_leaves_constants_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.people, self.things = nn.Embedding(3, 2), nn.Embedding(4, 2)
            self.user_layer, self.item_layer = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
            self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
            self.bias = nn.Parameter(torch.zeros(()))
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            left = self.user_layer(self.people(user))
            right = self.frozen(self.item_layer(self.things(item)))
            score: Tensor = self.get_buffer("scale") * (left * right).sum(-1) + self.bias
            return score

    module = Model()
    model = TorchModel(module, per_user=("people.weight",), per_item=("things.weight",))
    assert [(part.name, part.role, part.layer) for part in model.components()] == [
        ("bias", "head", 1),
        ("people.weight", "user", None),
        ("things.weight", "item", None),
        ("user_layer.weight", "user", None),
        ("user_layer.bias", "user", None),
        ("item_layer.weight", "item", None),
    ]
    cohort = Cohort.draw(model, 0, clients=3, scored=5, n_items=4, dtype=torch.float32)
    p = cohort.params
    left = torch.einsum("cd,ced->ce", p["people.weight"], p["user_layer.weight"]) + p["user_layer.bias"]
    things = p["things.weight"][torch.arange(3)[:, None], cohort.scored]
    right = torch.einsum("cbd,ced,fe->cbf", things, p["item_layer.weight"], module.frozen.weight)
    expected = 2 * (left[:, None] * right).sum(-1) + p["bias"][:, None]
    torch.testing.assert_close(cohort.logits(), expected)


def test_adapter_equals_the_native_model_and_the_module_itself() -> None:
    """The module's weights, in the native layout; users 5 and 2 score items by number."""
    module = PlainNCF(7, 9, 4)
    adapter, native = TorchModel(module), NCF(4, (6, 3))
    users, scored = torch.tensor([5, 2]), torch.tensor([[8, 0, 3], [1, 1, 6]])
    batch = Batch(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2))
    heads = {part.name: part.draw(0).expand(2, *part.shape) for part in adapter.components() if part.storage == "dense"}
    rows = {"user": module.user.weight[users], "item": module.item.weight[scored]}
    theirs = adapter.logits({**heads, "user.weight": rows["user"], "item.weight": rows["item"]}, batch)
    for layer, place in ((1, 0), (2, 2), (3, 4)):
        rows[f"head.{layer}.weight"] = heads[f"mlp.{place}.weight"].mT
        rows[f"head.{layer}.bias"] = heads[f"mlp.{place}.bias"]
    torch.testing.assert_close(theirs, native.logits(rows, batch), rtol=1e-6, atol=1e-6)
    itself = torch.stack([module(user.expand(3), items) for user, items in zip(users, scored, strict=True)])
    torch.testing.assert_close(theirs, itself, rtol=1e-6, atol=1e-6)


def test_adapter_leaves_the_module_as_it_was() -> None:
    module = PlainNCF()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    Cohort.draw(TorchModel(module), 0, 3, 4, 5, torch.float32).logits()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def with_parts(**changes: nn.Module) -> nn.Module:
    module = PlainNCF()
    for name, part in changes.items():
        setattr(module, name, part)
    return module


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: TorchModel(PlainNCF(), per_user=("users.weight",)),
            ["Unknown parameter 'users.weight'. Did you mean 'user.weight'?"],
        ),
        (lambda: TorchModel(PlainNCF(), per_item=("item",)), ["Unknown parameter 'item'", "item.weight"]),
        (lambda: TorchModel(PlainNCF(), shared={"mlp.1.bias": False}), ["Unknown parameter 'mlp.1.bias'"]),
        (
            lambda: TorchModel(PlainNCF(), per_item=("item.weight", "mlp.0.weight")),
            ["Got 'mlp.0.weight' of shape (6, 8), held by Linear", "expected the 2-d weight of an nn.Embedding"],
        ),
        (
            lambda: TorchModel(
                with_parts(table=nn.ParameterList([torch.zeros(3)])), per_user=("user.weight", "table.0")
            ),
            ["Got 'table.0' of shape (3,), held by ParameterList", "expected the 2-d weight"],
        ),
        (
            lambda: TorchModel(with_parts(norm=nn.BatchNorm1d(6))),
            ["Got 'norm' (BatchNorm1d), which", "expected a module whose parameters alone", "use nn.LayerNorm"],
        ),
        (
            lambda: TorchModel(with_parts(drop=nn.Dropout(0.2))),
            ["Got 'drop' (Dropout), which is active", "expected a forward without random draws", "module.eval()"],
        ),
        (
            lambda: TorchModel(with_parts(genre=nn.Embedding(3, 2))),
            ["Got 'genre' (Embedding), which is neither in per_user=('user.weight',)", "add 'genre.weight'"],
        ),
        (
            lambda: TorchModel(with_parts(item=nn.Embedding(9, 4, padding_idx=0))),
            ["Got 'item.weight' with padding_idx=0; expected a plain table", "leave padding_idx out"],
        ),
        (lambda: TorchModel(with_parts(user=nn.Embedding(9, 4, max_norm=1.0))), ["'user.weight' with max_norm=1.0"]),
        (lambda: TorchModel(with_parts(user=nn.Embedding(9, 4, sparse=True))), ["'user.weight' with sparse=True"]),
        (
            lambda: TorchModel(with_parts(user=nn.Embedding(9, 4, scale_grad_by_freq=True))),
            ["'user.weight' with scale_grad_by_freq=True"],
        ),
        (
            lambda: TorchModel(PlainNCF(), per_user=("user.weight",), per_item=("item.weight", "user.weight")),
            ["Got 'user.weight' twice in per_user and per_item, expected each table once"],
        ),
    ],
)
def test_adapter_refuses_what_it_cannot_run(build: Callable[[], Model], words: list[str]) -> None:
    with pytest.raises((NotFoundError, ValueError)) as error:
        build()
    for part in words:
        assert part in str(error.value)


def test_adapter_takes_dropout_that_is_off() -> None:
    TorchModel(with_parts(drop=nn.Dropout(0.2)).eval())
    TorchModel(with_parts(drop=nn.Dropout(0.0)))


class Wrong(PlainNCF):
    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.change(super().forward(user, item))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("change", "scored", "got"),
    [
        (lambda logits: logits.unsqueeze(-1), 3, r"\(3, 1\)"),
        (lambda logits: logits.sum(), 3, r"\(\)"),
        (lambda logits: logits.squeeze(), 1, r"\(\)"),
        (lambda logits: (logits, logits), 3, "tuple"),
    ],
)
def test_adapter_checks_the_shape_of_the_output(change: Callable[[Tensor], object], scored: int, got: str) -> None:
    cohort = Cohort.draw(TorchModel(Wrong(change)), 0, 2, scored, 5, torch.float32)
    with pytest.raises(ValueError, match=rf"Got {got} from the module's forward, expected .*\({scored},\).*squeeze"):
        cohort.logits()


def test_given_values_are_copied() -> None:
    module = PlainNCF()
    part = by_name(TorchModel(module).components())["item.weight"]
    assert isinstance(part.init, Given)
    part.draw(0, [1]).zero_()
    assert module.item.weight[1].abs().sum() > 0
