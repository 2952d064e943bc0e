"""Movements along gradients in one compiled pass: the same as by automatic differentiation of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak.attacks import alignment
from recleak.attacks.base import Knowledge
from recleak.models.base import Batch, Model, Params
from recleak.models.decoupled import Decoupled
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.lightgcn import LightGCN
from recleak.models.mf import GMF, MF
from recleak.models.ncf import NCF
from recleak.models.pfedrec import PFedRec
from recleak.update import Update

N_ITEMS, N_USERS = 700, 12
SIZES = [3, 600, 1, 17, 256, 0, 257]  # of rows: more than are treated at a time, as many, one more
MODELS: dict[str, Model] = {
    "one hidden layer": NCF(factors=6, hidden=(5,)),
    "two": NCF(factors=6, hidden=(5, 4)),
    "three, wide": NCF(factors=4, hidden=(9, 3, 7)),
    "features and neighbors": FeatureGCN(5, factors=6, hidden=(8,)),
    "two vectors, the head is kept": Decoupled(factors=4),
    "two vectors and neighbors": Decoupled(factors=4, graph=True),
}


def scene(model: Model, seed: int = 0) -> tuple[Knowledge, Params, Update, Tensor, Tensor]:
    """A broadcast, and a random upload of clients 1, 2, ...; probabilities of its rows, and how many are own."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    parts, clients = model.components(), len(SIZES)
    items = [np.sort(rng.permutation(N_ITEMS)[:size]) for size in SIZES]
    leading = {"per_item": (N_ITEMS,), "per_user": (N_USERS,), "dense": ()}
    received = {part.name: normal(*leading[part.storage], *part.shape) for part in parts if part.shared}
    values = {p.name: 0.3 * normal(clients, *p.shape) for p in parts if p.shared and p.storage != "per_item"}
    update = Update(
        torch.arange(1, 1 + clients),
        values,
        {"item": normal(sum(SIZES), *received["item"].shape[1:])},
        torch.from_numpy(np.concatenate(items)),
        torch.tensor([0, *np.cumsum(SIZES)]),
        N_ITEMS,
    )
    own, expected = torch.rand(sum(SIZES), generator=torch.manual_seed(seed)), torch.tensor(SIZES) / 5
    return Knowledge(model, N_USERS, N_ITEMS, parts), received, update, own, expected


@pytest.mark.parametrize("uploaded", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_same_as_by_automatic_differentiation(model: Model, uploaded: bool) -> None:
    knowledge, received, update, own, expected = scene(model)
    quick = alignment._of_heads(knowledge, received, update, own, expected, uploaded)
    plain = alignment._of_any_model(knowledge, received, update, own, expected, uploaded)
    assert quick is not None
    for found, right in zip(quick, plain, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    if knowledge.components[-1].shared:
        assert float(plain.length.max()) > 0.1
        assert float(plain.product.abs().max()) > 0.1


@pytest.mark.parametrize("model", [MODELS["two"], MODELS["features and neighbors"]], ids=["ncf", "feature-gcn"])
def test_a_client_is_the_same_among_others_and_alone(model: Model) -> None:
    knowledge, received, update, own, expected = scene(model)
    together = alignment._of_heads(knowledge, received, update, own, expected, uploaded=True)
    assert together is not None
    for place in range(update.n_clients):
        rows = slice(int(update.offset[place]), int(update.offset[place + 1]))
        one = update.select(torch.tensor([place]))
        alone = alignment._of_heads(knowledge, received, one, own[rows], expected[place : place + 1], uploaded=True)
        assert alone is not None
        assert torch.equal(alone.product, together.product[rows])
        assert torch.equal(alone.length, together.length[rows])


@dataclass(frozen=True)
class Doubled(NCF):
    """Not what its parent computes."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        return 2 * super().logits(params, batch)


PRODUCTS: dict[str, Model] = {
    "mf": MF(6),
    "gmf": GMF(6),
    "gmf without a bias": GMF(6, bias=False),
    "lightgcn": LightGCN(6),
    "pfedrec": PFedRec(6),
    "items stay as they are": LightGCN(6, layers=2, normalization="mean", propagate_items=False),
}


@pytest.mark.parametrize("uploaded", [False, True])
@pytest.mark.parametrize("model", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_the_same_as_by_automatic_differentiation(model: Model, uploaded: bool) -> None:
    knowledge, received, update, own, expected = scene(model)
    quick = alignment._of_products(knowledge, received, update, own, expected, uploaded)
    plain = alignment._of_any_model(knowledge, received, update, own, expected, uploaded)
    assert quick is not None
    for found, right in zip(quick, (plain.score, plain.length), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    whole = plain.total.norm(dim=1) / torch.tensor(SIZES).clamp(min=1)
    mean = torch.stack([each.sum() / max(1, len(each)) for each in torch.split(plain.length, SIZES)])
    torch.testing.assert_close(whole, mean, rtol=1e-4, atol=1e-5)  # one gradient for all rows: the line decides


def test_rows_move_along_their_line_to_the_side_of_the_own_items() -> None:
    knowledge, received, update, own, expected = scene(MF(6))
    line = torch.nn.functional.normalize(torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0]), dim=0)
    far = torch.where(own < 0.2, 1.0, -0.25) * (1 + 0.1 * own)  # a fifth, as expected, to one side
    planted = replace(update, rows={"item": far.unsqueeze(1) * line})
    along, _, _ = alignment.projections(knowledge, received, planted, own, expected, uploaded=False)
    large = update.offset.diff()[update.owner] > 100
    torch.testing.assert_close(along[large], far[large], rtol=1e-4, atol=1e-5)


def test_the_head_is_read_once_if_it_was_not_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    knowledge, received, update, own, expected = scene(MODELS["two"])
    bare = replace(update, values={})
    for before, after in zip(
        *(alignment.projections(knowledge, received, bare, own, expected, uploaded=each) for each in (False, True)),
        strict=True,
    ):
        assert torch.equal(before, after)
    once = alignment.aligned(knowledge, received, bare, expected)
    assert not torch.equal(alignment.aligned(knowledge, received, update, expected), once)
    read, real = [], alignment.projections

    def counted(*args: Any, uploaded: bool) -> tuple[Tensor, Tensor, Tensor]:
        read.append(uploaded)
        return real(*args, uploaded=uploaded)

    monkeypatch.setattr(alignment, "projections", counted)
    assert torch.equal(alignment.aligned(knowledge, received, bare, expected), once)
    assert read == [False]


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_lines_of_very_small_and_large_movements(size: float) -> None:
    knowledge, received, update, own, expected = scene(MF(6))
    usual, scaled = (
        alignment.projections(knowledge, received, each, own, expected, uploaded=False)[0]
        for each in (update, replace(update, rows={"item": size * update.rows["item"]}))
    )
    torch.testing.assert_close(scaled / size, usual, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [Doubled(factors=6), NCF(factors=6, bounded=True), NCF(factors=6, hidden=()), LightGCN(6, score="mlp")],
    ids=["subclass", "bounded", "no hidden layer", "propagated items"],
)
def test_other_models_go_the_general_way(model: Model) -> None:
    knowledge, received, update, own, expected = scene(model)
    assert alignment._of_heads(knowledge, received, update, own, expected, uploaded=True) is None
    filled = update.select(torch.tensor([0, 1, 3]))  # with rows
    some = torch.cat([own[:603], own[604:621]])
    along, score, length = alignment.projections(knowledge, received, filled, some, expected[[0, 1, 3]], uploaded=True)
    assert bool(torch.isfinite(along).all() & torch.isfinite(score).all() & torch.isfinite(length).all())
