"""What a server makes of updates, against dense sums in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recleak.models.base import Params
from recleak.models.components import Component
from recleak.testing.defenses import example_update
from recleak.training.aggregate import Aggregation, Summation, apply
from recleak.update import Update

PARTS = (
    Component("user", "per_user", "user", (4,)),
    Component("own", "per_user", "user", (2,), shared=False),
    Component("item", "per_item", "item", (4,)),
    Component("item_bias", "per_item", "item", ()),
    Component("weight", "dense", "head", (3, 2), layer=1),
    Component("bias", "dense", "head", (), layer=1),
)
SHARED = {part.name for part in PARTS if part.shared}
HOW: tuple[Aggregation, ...] = ("mean", "touched-mean", "weighted", "sum")
N_USERS, N_ITEMS = 40, 12


def params() -> Params:
    rng = torch.Generator().manual_seed(0)
    rows: dict[str, tuple[int, ...]] = {"per_user": (N_USERS,), "per_item": (N_ITEMS,), "dense": ()}
    return {part.name: torch.randn((*rows[part.storage], *part.shape), generator=rng) for part in PARTS if part.shared}


def updates() -> Update:
    return example_update(8, N_ITEMS, components=PARTS).only(SHARED)


def weights(how: Aggregation) -> Tensor:
    return torch.arange(1.0, 9.0) if how == "weighted" else torch.ones(8)


def naive(before: Params, update: Update, weight: Tensor, how: Aggregation, rate: float) -> Params:
    """One client after the other, with whole tables."""
    after = {}
    for part in PARTS:
        if not part.shared:
            continue
        total = torch.zeros_like(before[part.name], dtype=torch.float64)
        touched = torch.zeros(N_ITEMS, dtype=torch.float64)
        for c in range(update.n_clients):
            w = float(weight[c])
            if part.storage == "dense":
                total += w * update.values[part.name][c].double()
            elif part.storage == "per_user":
                total[int(update.client[c])] += w * update.values[part.name][c].double()
            else:
                for row in range(int(update.offset[c]), int(update.offset[c + 1])):
                    total[int(update.item[row])] += w * update.rows[part.name][row].double()
                    touched[int(update.item[row])] += w
        if how == "touched-mean" and part.storage == "per_item":
            for item in range(N_ITEMS):
                total[item] = total[item] / touched[item] if touched[item] else 0.0
        elif how != "sum":
            total = total / float(weight.sum())
        after[part.name] = before[part.name].double() + rate * total
    return after


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("how", HOW)
def test_aggregation_equals_a_plain_sum(how: Aggregation, rate: float) -> None:
    before, update, weight = params(), updates(), weights(how)
    total = Summation(before, PARTS, count_rows=how == "touched-mean")
    total.add(update, weight)
    after = apply(before, total.result(3), how, rate)
    expected = naive(before, update, weight, how, rate)
    assert after.keys() == expected.keys() == SHARED
    for name, value in expected.items():
        assert after[name].dtype == torch.float32
        torch.testing.assert_close(after[name].double(), value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_blocks_add_up(how: Aggregation) -> None:
    update, weight = updates(), weights(how)
    whole, blocks = (Summation(params(), PARTS, count_rows=how == "touched-mean") for _ in range(2))
    whole.add(update, weight)
    for places in (torch.arange(0, 3), torch.arange(3, 4), torch.arange(4, 8)):
        blocks.add(update.select(places), weight[places])
    one, other = whole.result(0), blocks.result(0)
    assert torch.equal(one.client, other.client)
    assert one.weight == other.weight == float(weight.sum())
    for name in one.total:
        torch.testing.assert_close(one.total[name], other.total[name], atol=1e-6, rtol=1e-6)
    assert one.touched.keys() == other.touched.keys()
    for name in one.touched:
        assert torch.equal(one.touched[name], other.touched[name])


def test_touched_counts_who_sent_a_row() -> None:
    update = updates()
    total = Summation(params(), PARTS, count_rows=True)
    total.add(update, torch.ones(8))
    expected = torch.bincount(update.item, minlength=N_ITEMS).float()
    touched = total.result(0).touched
    assert touched.keys() == {"item", "item_bias"}
    assert torch.equal(touched["item"], expected)
    assert not Summation(params(), PARTS, count_rows=False).result(0).touched


def test_rows_that_nobody_sent_stay_as_they_are() -> None:
    before, update = params(), updates()
    total = Summation(before, PARTS, count_rows=True)
    total.add(update, torch.ones(8))
    unsent = torch.ones(N_ITEMS, dtype=torch.bool)
    unsent[update.item] = False
    silent = torch.ones(N_USERS, dtype=torch.bool)
    silent[update.client] = False
    for how in HOW:
        after = apply(before, total.result(0), how)
        assert torch.equal(after["item"][unsent], before["item"][unsent])
        assert torch.equal(after["user"][silent], before["user"][silent])


@pytest.mark.parametrize("how", HOW)
def test_a_round_without_clients_changes_nothing(how: Aggregation) -> None:
    before = params()
    nobody = Summation(before, PARTS, count_rows=how == "touched-mean").result(7)
    assert nobody.round == 7
    assert len(nobody.client) == 0
    assert nobody.weight == 0
    for name, value in apply(before, nobody, how).items():
        assert torch.equal(value, before[name])


def test_nothing_is_changed_in_place() -> None:
    before, update = params(), updates()
    copies = {name: value.clone() for name, value in before.items()}
    sent = update.map(lambda name, tensor, owner: tensor.clone())
    total = Summation(before, PARTS, count_rows=True)
    total.add(update, torch.ones(8))
    for how in HOW:
        apply(before, total.result(0), how)
    for name, value in copies.items():
        assert torch.equal(before[name], value)
    for name, value in sent.rows.items():
        assert torch.equal(update.rows[name], value)


def test_an_update_without_item_rows() -> None:
    names = {"weight", "bias"}
    parts = tuple(part for part in PARTS if part.name in names)
    before = {name: value for name, value in params().items() if name in names}
    total = Summation(before, parts, count_rows=True)
    total.add(updates().only(names), torch.ones(8))
    after = apply(before, total.result(0), "touched-mean")
    torch.testing.assert_close(after["bias"], before["bias"] + updates().values["bias"].mean())
