"""Examples, batches and held rows, against plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recleak.data.interactions import Interactions
from recleak.data.sampling import training_negatives
from recleak.data.split import leave_one_out
from recleak.data.synthetic import Synthetic
from recleak.errors import DataError
from recleak.testing.models import ragged
from recleak.training.local import Examples, LocalData, held_rows, padded, plan, steps_per_epoch

DATA = Synthetic(n_users=30, n_items=40, mean_activity=8, min_activity=3, communities=5).generate().distinct()


def local_data(sizes: list[int], n_items: int = 7, seed: int = 0, *, pairwise: bool = False) -> LocalData:
    """Random examples of clients 10, 13, ..., with repeats."""
    rng, total = np.random.default_rng(seed), sum(sizes)
    return LocalData(
        10 + 3 * np.arange(len(sizes)),
        rng.integers(n_items, size=total),
        np.ones(total, np.float32) if pairwise else rng.integers(2, size=total).astype(np.float32),
        rng.integers(n_items, size=total) if pairwise else None,
        np.concatenate([[0], np.cumsum(sizes)]),
        n_items,
    )


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("round", [None, 0, 3])
@pytest.mark.parametrize("exclude", ["train", "all"])
@pytest.mark.parametrize("loss", ["bce", "bpr"])
def test_negatives_are_those_of_data_sampling(round: int | None, exclude: str, loss: str) -> None:
    split = leave_one_out(DATA, by="random")
    spare = (split.valid, split.test) if exclude == "all" else ()
    expected = training_negatives(split, 3, exclude=exclude, seed=5, round=round)  # type: ignore[arg-type]
    examples = Examples.of(
        split.train,
        negatives=3,
        loss=loss,  # type: ignore[arg-type]
        resample=round is not None,
        spare=spare,
        seed=5,
    )
    clients = np.array([17, 2, 29])
    drawn = examples.draw(clients, round or 0)
    for position, client in enumerate(clients):
        mine = slice(drawn.offset[position], drawn.offset[position + 1])
        rows = slice(split.train.indptr[client], split.train.indptr[client + 1])
        own = split.train.item[rows]
        if loss == "bpr":
            assert drawn.against is not None
            assert np.array_equal(drawn.item[mine].reshape(-1, 3), np.repeat(own[:, None], 3, axis=1))
            assert np.array_equal(drawn.against[mine].reshape(-1, 3), expected[rows])
            assert (drawn.label[mine] == 1).all()
        else:
            assert drawn.against is None
            table = drawn.item[mine].reshape(-1, 4)
            assert np.array_equal(table[:, 0], own)
            assert np.array_equal(table[:, 1:], expected[rows])
            assert np.array_equal(drawn.label[mine].reshape(-1, 4), np.tile([1, 0, 0, 0], (len(own), 1)))
        assert examples.count[client] == drawn.count[position]


def test_negatives_stay_or_are_drawn_anew() -> None:
    clients = np.arange(5)
    once, anew = (Examples.of(DATA, resample=resample, seed=1) for resample in (False, True))
    assert np.array_equal(once.draw(clients, 0).item, once.draw(clients, 7).item)
    assert not np.array_equal(anew.draw(clients, 0).item, anew.draw(clients, 7).item)


def test_a_draw_does_not_depend_on_the_other_clients() -> None:
    examples = Examples.of(DATA, negatives=2)
    together = examples.draw(np.array([4, 20, 11]), 0)
    alone = examples.draw(np.array([20]), 0)
    assert np.array_equal(together.select(np.array([1])).item, alone.item)


def test_repeated_pairs_count_once() -> None:
    twice = Interactions.build(pl.DataFrame({"user": [0, 0, 0, 1, 1], "item": [0, 0, 1, 2, 3]}))
    assert Examples.of(twice, negatives=1).count.tolist() == [4, 4]


def test_clients_without_examples_are_an_error() -> None:
    data = Interactions.build(pl.DataFrame({"user": [0, 0, 1, 1, 1, 2], "item": [0, 1, 0, 1, 2, 2]}))
    examples = Examples.of(data)
    with pytest.raises(DataError, match=r"(?s)1 clients have every item.*first: user 1.*Leave them out"):
        examples.draw(np.array([0, 1]), 0)
    with pytest.raises(DataError, match=r"(?s)1 clients have no interactions.*first: user 2.*at_least"):
        Examples.of(data.take(data.user != 2)).draw(np.array([0, 2]), 0)


def test_spare_items_may_leave_no_negative() -> None:
    data = Interactions.build(pl.DataFrame({"user": [0, 0, 1], "item": [0, 1, 2]}))
    held = Interactions.build(pl.DataFrame({"user": [0, 1, 1], "item": [2, 1, 0]}))
    with pytest.raises(DataError, match="every item"):
        Examples.of(data, spare=(held,)).draw(np.array([0]), 0)


# --- selection --------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans(), st.integers(0, 99))
def test_select(sizes: list[int], pairwise: bool, seed: int) -> None:
    data = local_data(sizes, pairwise=pairwise)
    order = np.random.default_rng(seed).permutation(len(sizes))[: max(1, len(sizes) - 1)]
    chosen = data.select(order)
    assert np.array_equal(chosen.client, data.client[order])
    for position, place in enumerate(order):
        old = slice(data.offset[place], data.offset[place + 1])
        new = slice(chosen.offset[position], chosen.offset[position + 1])
        assert np.array_equal(chosen.item[new], data.item[old])
        assert np.array_equal(chosen.label[new], data.label[old])
        if pairwise:
            assert chosen.against is not None
            assert data.against is not None
            assert np.array_equal(chosen.against[new], data.against[old])
    assert len(chosen.item) == chosen.offset[-1]
    assert np.array_equal(chosen.owner, np.repeat(np.arange(len(order)), chosen.count))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_a_selection_keeps_the_graph(sizes: list[int], seed: int) -> None:
    data, rng = local_data(sizes, seed=seed), np.random.default_rng(seed)
    own = rng.random(len(data.item)) < 0.5
    order = rng.permutation(len(sizes))
    chosen = replace(data, own=own).select(order)
    assert chosen.own is not None
    assert chosen.own.tolist() == [bool(own[k]) for c in order for k in range(data.offset[c], data.offset[c + 1])]
    assert data.select(order).own is None


# --- held rows --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans(), st.integers(0, 99), st.booleans())
def test_held_rows(sizes: list[int], pairwise: bool, seed: int, more: bool) -> None:
    data = local_data(sizes, seed=seed, pairwise=pairwise)
    also = np.random.default_rng(seed).integers(len(sizes) * data.n_items, size=5) if more else None
    held = held_rows(data, also)
    assert held.offset[0] == 0
    assert held.offset[-1] == len(held.item)
    for c in range(len(sizes)):
        mine = slice(data.offset[c], data.offset[c + 1])
        expected = set(data.item[mine].tolist())
        if data.against is not None:
            expected |= set(data.against[mine].tolist())
        if also is not None:
            expected |= set((also[also // data.n_items == c] % data.n_items).tolist())
        assert held.item[held.offset[c] : held.offset[c + 1]].tolist() == sorted(expected)
        own = held.own[held.own_offset[c] : held.own_offset[c + 1]]
        assert held.item[own].tolist() == sorted(set(data.item[mine][data.label[mine] > 0].tolist()))
        assert ((own >= held.offset[c]) & (own < held.offset[c + 1])).all()
        for row in (held.of_item, held.of_against):
            if row is not None:
                assert ((row[mine] >= held.offset[c]) & (row[mine] < held.offset[c + 1])).all()
    assert np.array_equal(held.item[held.of_item], data.item)
    if data.against is not None:
        assert held.of_against is not None
        assert np.array_equal(held.item[held.of_against], data.against)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_the_graph_may_differ_from_the_labels(sizes: list[int], seed: int) -> None:
    """`own` decides whose neighbors the rows are; without it the positives do; the rest does not depend on it."""
    data = local_data(sizes, seed=seed)
    own = np.random.default_rng(seed + 1).random(len(data.item)) < 0.5
    by_label, same = held_rows(data), held_rows(replace(data, own=data.label > 0))
    held = held_rows(replace(data, own=own))
    for name in ("item", "offset", "of_item", "own", "own_offset"):
        assert np.array_equal(getattr(by_label, name), getattr(same, name))
        if not name.startswith("own"):
            assert np.array_equal(getattr(by_label, name), getattr(held, name))
    for c in range(len(sizes)):
        mine = slice(data.offset[c], data.offset[c + 1])
        rows = held.own[held.own_offset[c] : held.own_offset[c + 1]]
        assert held.item[rows].tolist() == sorted(set(data.item[mine][own[mine]].tolist()))
        assert ((rows >= held.offset[c]) & (rows < held.offset[c + 1])).all()


# --- the plan ---------------------------------------------------------------------------------------------------------


def seen(weight: NDArray[np.float32], example: NDArray[np.int64]) -> list[int]:
    """The examples of one batch, without padding."""
    chosen: list[int] = example[weight > 0].tolist()
    return chosen


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    batch_size=st.sampled_from([None, 1, 2, 7, 16, 64]),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_plan(sizes: list[int], batch_size: int | None, epochs: int, shuffle: bool) -> None:
    data = local_data(sorted(sizes, reverse=True))
    walk = plan(data, epochs=epochs, batch_size=batch_size, seed=1, round=2, shuffle=shuffle)
    assert walk.example.shape == walk.weight.shape
    assert walk.active.tolist() == [int((walk.steps > step).sum()) for step in range(len(walk.example))]
    for c, count in enumerate(data.count.tolist()):
        size = batch_size or count
        batches = -(-count // size)
        assert walk.per_epoch[c] == batches
        assert walk.steps[c] == epochs * batches
        orders = []
        for epoch in range(epochs):
            steps = range(epoch * batches, (epoch + 1) * batches)
            parts = [seen(walk.weight[step, c], walk.example[step, c]) for step in steps]
            assert [len(part) for part in parts] == [size] * (batches - 1) + [count - (batches - 1) * size]
            orders.append([example for part in parts for example in part])
            assert sorted(orders[-1]) == list(range(data.offset[c], data.offset[c + 1]))
            for step in steps:
                positive = walk.weight[step, c][walk.weight[step, c] > 0]
                assert len(set(positive.tolist())) == 1  # a mean over the batch
                assert positive.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
        assert shuffle or all(order == sorted(order) for order in orders)
        own = (walk.example[:, c] >= data.offset[c]) & (walk.example[:, c] < data.offset[c + 1])
        assert own.all()  # padding is the client's own too
        assert not walk.weight[walk.steps[c] :, c].any()


def test_every_epoch_round_client_and_seed_has_its_own_order() -> None:
    data = local_data([40, 40])

    def orders(seed: int, round: int) -> list[tuple[int, ...]]:
        walk = plan(data, epochs=2, batch_size=40, seed=seed, round=round)
        return [
            tuple(example - 40 * c for example in seen(walk.weight[e, c], walk.example[e, c]))
            for e in (0, 1)
            for c in (0, 1)
        ]

    found = [order for seed in (0, 1) for round in (0, 1) for order in orders(seed, round)]
    assert len(set(found)) == len(found) == 16
    assert orders(0, 0) == orders(0, 0)


@pytest.mark.parametrize("batch_size", [None, 5, 64])
def test_a_plan_does_not_depend_on_the_other_clients(batch_size: int | None) -> None:
    data = local_data([50, 33, 33, 8, 1])
    whole = plan(data, epochs=2, batch_size=batch_size, seed=0, round=0)
    for places in ([1], [0, 4], [2, 3]):
        part = data.select(np.array(places))
        walk = plan(part, epochs=2, batch_size=batch_size, seed=0, round=0)
        for position, place in enumerate(places):
            for step in range(int(walk.steps[position])):
                one = seen(walk.weight[step, position], walk.example[step, position])
                other = seen(whole.weight[step, place], whole.example[step, place])
                assert [e - part.offset[position] for e in one] == [e - data.offset[place] for e in other]


def test_clients_out_of_order_are_an_error() -> None:
    with pytest.raises(ValueError, match="sorted by their number of steps"):
        plan(local_data([3, 50]), epochs=1, batch_size=8, seed=0, round=0)


def test_batches_are_padded_alike() -> None:
    """Whatever the chunk, the elements of a client fill whole registers (torch takes 32 numbers at a time)."""
    count = np.array([1, 31, 32, 33, 64, 100])
    assert (padded(None, count) % 32 == 0).all()
    assert (padded(None, count) >= count).all()
    assert (padded(8, count) == padded(8, count)[0]).all()
    assert steps_per_epoch(None, count).tolist() == [1] * 6
    assert steps_per_epoch(32, count).tolist() == [1, 1, 1, 2, 2, 4]


def test_ragged_data_of_the_contract() -> None:
    data = ragged(24, 24)
    assert (data.n_users, data.n_items) == (24, 24)
    assert data.activity.min() == 1
    assert data.distinct() is data
