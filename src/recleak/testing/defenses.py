"""The contract of a defense: a test class that every defense's test inherits.

    class TestGaussianNoise(DefenseContract):
        defense = GaussianNoise(0.3)
        neutral = GaussianNoise(0.0)
        noise = NoiseLaw("norm", {"item": 0.3, "item_bias": 0.3, "weight": 0.3, "bias": 0.3})

The checks are methods without arguments, so `failures(TestGaussianNoise())` runs them outside pytest too: that is how
one tests that the contract notices a broken defense.
"""
# ruff: noqa: S101  (this module is made of assertions)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from recleak import random
from recleak.defenses.base import Chain, Defense, check
from recleak.models.components import Component
from recleak.streams import Streams
from recleak.update import Update

# Every storage, with and without axes; the global bias is 0-d, and the user's own vector is kept.
EXAMPLE_COMPONENTS = (
    Component("user", "per_user", "user", (4,), shared=False),
    Component("item", "per_item", "item", (4,)),
    Component("item_bias", "per_item", "item", ()),
    Component("weight", "dense", "head", (3, 2), layer=1),
    Component("bias", "dense", "head", (), layer=1),
)

Hook = Literal["batch_sum", "gradient", "epoch", "upload"]


@dataclass(frozen=True)
class NoiseLaw:
    """The law of additive noise: the name of a scipy distribution, and its scale by component."""

    distribution: Literal["norm", "laplace"]
    scale: Mapping[str, float]  # a component that is not named must get no noise

    def pvalue(self, sample: NDArray[np.float64], scale: float) -> float:
        """Of the Kolmogorov-Smirnov test that the sample has this law at a scale."""
        return float(stats.kstest(sample, self.distribution, args=(0.0, scale)).pvalue)


def example_update(
    n_clients: int = 7,
    n_items: int = 12,
    *,
    components: tuple[Component, ...] = EXAMPLE_COMPONENTS,
    max_rows: int = 6,
    scale: float = 1.0,
    seed: int = 0,
) -> Update:
    """Normal changes of clients 10, 13, 16, ... in all components; client c holds c modulo (max_rows + 1) item rows."""
    client = np.arange(n_clients) * 3 + 10
    count = np.minimum(np.arange(n_clients) % (max_rows + 1), n_items)
    offset = np.concatenate([[0], np.cumsum(count)])
    rank = random.bits(seed, "held", np.arange(n_clients)[:, None], np.arange(n_items)).argsort(1).argsort(1)  # [C, I]
    item = np.nonzero(rank < count[:, None])[1]

    def values(part: Component, rows: int) -> Tensor:
        drawn = scale * random.normal(seed, part.name, np.arange(rows)[:, None], np.arange(part.size))
        return torch.from_numpy(drawn.astype(np.float32)).reshape(rows, *part.shape)

    return Update(
        torch.from_numpy(client),
        {part.name: values(part, n_clients) for part in components if part.storage != "per_item"},
        {part.name: values(part, len(item)) for part in components if part.storage == "per_item"},
        torch.from_numpy(item),
        torch.from_numpy(offset),
        n_items,
    )


def zeros_like(update: Update) -> Update:
    """The same clients and rows, nothing changed."""
    return update.map(lambda name, tensor, owner: torch.zeros_like(tensor))


def assert_same(got: Update, expected: Update, why: str) -> None:
    """Two updates are equal bit for bit."""
    assert set(got.names()) == set(expected.names()), f"{why}: other components"
    assert got.n_items == expected.n_items, f"{why}: another item table"
    for field, one, other in [
        *((name, got.values[name], expected.values.get(name)) for name in got.values),
        *((name, got.rows[name], expected.rows.get(name)) for name in got.rows),
        *((name, getattr(got, name), getattr(expected, name)) for name in ("client", "item", "offset")),
    ]:
        assert other is not None, f"{why}: {field} has another storage"
        assert torch.equal(one, other), f"{why}: {field} differs"


class DefenseContract:
    """What every defense must do. Set `defense` and `neutral`, and what else applies."""

    defense: ClassVar[Defense]
    neutral: ClassVar[Defense | None]  # a setting at which it must change nothing at all; None if it has none
    hook: ClassVar[Hook] = "upload"  # where it acts on updates
    components: ClassVar[tuple[Component, ...]] = EXAMPLE_COMPONENTS
    noise: ClassVar[NoiseLaw | None] = None  # additive noise; None: the result must not be random
    hides_support: ClassVar[bool] = False  # every client sends every item row
    norm_bound: ClassVar[float | None] = None  # what it sends has at most this l2 norm
    norm_per: ClassVar[Literal["client", "component", "row"]] = "client"
    norm_components: ClassVar[tuple[str, ...] | None] = None  # None: the bound is on all
    shares_users: ClassVar[bool] = False  # it sends per_user components that the model keeps

    # --- the result is an update, and each client's is its own

    def test_configuration_fits_the_components(self) -> None:
        """It names only components that exist."""
        check(self.defense, self.components)
        if self.neutral is not None:
            check(self.neutral, self.components)

    def test_result_is_an_update(self) -> None:
        """The same clients and shapes, finite numbers, ascending items."""
        self._assert_valid(self._example(), self._act(self._example()))

    def test_batch_row_equals_device_alone(self) -> None:
        """A client's result does not depend on the other clients, bit for bit; with long components too."""
        wide = (*self.components, Component("wide", "dense", "head", (40_000,)))
        for n_clients, components in ((7, self.components), (2, wide)):
            update = self._example(n_clients, components=components)
            streams = _streams(update)
            together = self._act(update, streams)
            for position in range(update.n_clients):
                one = torch.tensor([position])
                alone = self._act(update.select(one), streams.select(one))
                assert_same(alone, together.select(one), f"client {position} alone")

    def test_order_of_clients_does_not_matter(self) -> None:
        """Clients in another order get what they got."""
        update = self._example()
        order = torch.arange(update.n_clients).flip(0)
        shuffled = update.select(order)
        assert_same(self._act(shuffled), self._act(update).select(order), "another order of clients")

    def test_input_is_not_changed(self) -> None:
        """It works on copies."""
        update = self._example(scale=10.0)
        copy = update.map(lambda name, tensor, owner: tensor.clone())
        copy = replace(copy, client=copy.client.clone(), item=copy.item.clone(), offset=copy.offset.clone())
        self._act(update)
        assert_same(update, copy, "the input was changed in place")

    def test_same_streams_give_the_same_result(self) -> None:
        """All randomness comes from the streams."""
        assert_same(self._act(self._example()), self._act(self._example()), "a second call")

    # --- corner cases

    def test_neutral_setting_is_the_identity(self) -> None:
        """At its neutral setting it changes nothing, bit for bit."""
        for scale in (1.0, 1e-6, 1e6) if self.neutral is not None else ():
            update = self._example(scale=scale)
            assert_same(getattr(self.neutral, self.hook)(update, _streams(update)), update, "the neutral setting")

    def test_zero_update(self) -> None:
        """A client that changed nothing sends zeros, or noise alone; never NaN."""
        update = zeros_like(self._example())
        result = self._act(update)
        self._assert_valid(update, result)
        for name, tensor in {**result.values, **result.rows}.items():
            if self.noise is None or name not in self.noise.scale:
                assert not tensor.any(), f"zero changes of {name} became {tensor[tensor != 0][0]}"

    def test_empty_rows(self) -> None:
        """Clients that touched no item, alone or all together."""
        update = self._example(max_rows=0)
        self._assert_valid(update, self._act(update))

    def test_single_client_of_a_real_device(self) -> None:
        """One device with randomness from its operating system: fresh noise every time, else the simulated result."""
        update = self._example().select(torch.tensor([3]))
        first, second = (self._act(update, Streams.from_os()) for _ in range(2))
        self._assert_valid(update, first)
        if self.noise is None:
            assert_same(first, self._act(update), "a real device")
        for name in self._noisy(first):
            assert not torch.equal(_tensor(first, name), _tensor(second, name)), f"{name}: the same noise twice"

    # --- sharing

    def test_user_parameters_stay_unless_shared(self) -> None:
        """A per_user component that the model keeps is kept, and nothing is sent that was not handed over."""
        policy = self.defense.sharing(self.components)
        assert [part.name for part in policy] == [part.name for part in self.components], "sharing renamed components"
        for before, after in zip(self.components, policy, strict=True):
            assert replace(after, shared=before.shared, averaged=before.averaged) == before, (
                f"sharing changed more of {before.name} than `shared`"
            )
            if before.storage == "per_user" and not before.shared and not self.shares_users:
                assert not after.shared, f"{before.name} is the user's own, and is sent"
        update = self._example()
        assert set(self._act(update).names()) <= set(update.names()), (
            "the result has components that were not handed over"
        )

    def test_support(self) -> None:
        """It sends every row if it says so, else no row that was not there."""
        update = self._example()
        result = self._act(update)
        if self.hides_support and update.rows:
            assert len(result.item) == update.n_clients * update.n_items, "some rows are missing: the support shows"
        else:
            assert _places(result) <= _places(update), "there are new rows; if that is meant, set hides_support = True"

    # --- the bound

    def test_norm_is_at_most_the_bound(self) -> None:
        """For changes from 1e-8 to 1e8."""

        @settings(max_examples=50, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
        @given(st.integers(0, 2**31), st.floats(-8, 8), st.integers(1, 9))
        def bounded(seed: int, log_scale: float, n_clients: int) -> None:
            self._assert_bounded(self._act(self._example(n_clients, seed=seed, scale=10.0**log_scale)))

        if self.norm_bound is not None:
            bounded()

    def test_bound_holds_for_each_component_alone(self) -> None:
        """The 0-d parameter, a row without axes, ...: a large change in one component only."""
        update = self._example()
        for large in update.names():
            self._assert_bounded(self._act(_only_large(update, large)))

    # --- the noise

    def test_noise_has_its_law_and_scale(self) -> None:
        """A Kolmogorov-Smirnov test passes at the scale, and has the power to refuse 2/3 and 3/2 of it."""
        update = zeros_like(self._example(3000, max_rows=2))
        result = self._act(update)
        for name in self._noisy(result):
            assert self.noise is not None
            scale = self.noise.scale[name]
            sample = _tensor(result, name).double().numpy().ravel()
            assert self.noise.pvalue(sample, scale) > 1e-4, (
                f"{name}: the noise is not {self.noise.distribution}({scale})"
            )
            for wrong in (2 / 3 * scale, 3 / 2 * scale):
                assert self.noise.pvalue(sample, wrong) < 1e-4, f"{name}: too few draws to tell {scale} from {wrong}"

    def test_noise_is_never_used_twice(self) -> None:
        """Clients, rounds, components, rows, coordinates and positions in a chain all have noise of their own."""
        update = zeros_like(self._example())
        results = [self._act(update, _streams(update, round)) for round in (0, 1)]
        for before in (0, 1):
            chain = Chain((*[Defense()] * before, self.defense))
            results.append(getattr(chain, self.hook)(update, _streams(update)))
        seen: dict[tuple[float, ...], str] = {}
        for place, result in zip(("round 0", "round 1", "first in a chain", "second in a chain"), results, strict=True):
            for name in self._noisy(result):
                assert self.noise is not None
                units = _tensor(result, name).double().numpy() / self.noise.scale[name]
                for row, unit in enumerate(units.reshape(len(units), -1).round(6).tolist()):
                    assert len(set(unit)) > 0.9 * len(unit), f"{place}, {name}: the same noise on two coordinates"
                    here = f"{place}, {name}, row {row}"
                    first = seen.setdefault(tuple(unit[:4]), here)
                    assert first == here, f"the same noise twice: {first}; {here}"
        for one, other in pairwise(results):
            if self.noise is None:
                assert_same(one, other, "the result is random, but no noise is declared")

    def test_noise_does_not_depend_on_other_rows(self) -> None:
        """A row keeps its noise when the client's other rows are gone."""
        update = zeros_like(self._example())
        fewer = _without_first_rows(update)
        some, all_rows = self._act(fewer), self._act(update)
        place = {key: row for row, key in enumerate(_keys(all_rows))}
        where = torch.tensor([place[key] for key in _keys(some)], dtype=torch.int64)
        for name, rows in some.rows.items():
            assert torch.equal(rows, all_rows.rows[name][where]), f"{name}: the noise depends on which rows exist"
        for name, value in some.values.items():
            assert torch.equal(value, all_rows.values[name]), f"{name}: the noise depends on which rows exist"

    # --- helpers

    def _example(
        self,
        n_clients: int = 7,
        *,
        components: tuple[Component, ...] | None = None,
        max_rows: int = 6,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Update:
        """An update of the components that the defense lets go."""
        parts = self.components if components is None else components
        sent = {part.name for part in self.defense.sharing(parts) if part.shared}
        return example_update(n_clients, components=parts, max_rows=max_rows, scale=scale, seed=seed).only(sent)

    def _act(self, update: Update, streams: Streams | None = None) -> Update:
        result: Update = getattr(self.defense, self.hook)(update, _streams(update) if streams is None else streams)
        return result

    def _noisy(self, update: Update) -> list[str]:
        return [] if self.noise is None else [name for name in update.names() if name in self.noise.scale]

    def _assert_valid(self, update: Update, result: Update) -> None:
        assert torch.equal(result.client, update.client), "other clients"
        assert result.n_items == update.n_items, "another item table"
        for name, tensor in {**result.values, **result.rows}.items():
            before = _tensor(update, name)
            length = len(result.item) if name in result.rows else result.n_clients
            assert tensor.shape == (length, *before.shape[1:]), f"{name} has shape {tuple(tensor.shape)}"
            assert tensor.dtype == before.dtype, f"{name} became {tensor.dtype}"
            assert tensor.isfinite().all(), f"{name} has numbers that are not finite"
        assert result.offset.shape == (result.n_clients + 1,), "offset does not have a number per client and one more"
        assert result.offset[0] == 0, "offset does not start at 0"
        assert result.offset[-1] == len(result.item), "offset does not end at the number of rows"
        keys = _keys(result)
        assert keys == sorted(set(keys)), "the items of a client do not ascend"
        assert all(0 <= item < result.n_items for _, item in keys), "an item that does not exist"

    def _assert_bounded(self, result: Update) -> None:
        if self.norm_bound is None:
            return
        squared: dict[str, Tensor] = {}
        for name in result.names():
            if self.norm_components is not None and name not in self.norm_components:
                continue
            each = _tensor(result, name).double().unsqueeze(-1).flatten(1).square().sum(1)
            if name in result.rows and self.norm_per != "row":
                each = each.new_zeros(result.n_clients).index_add_(0, result.owner, each)
            squared[name] = each
        if self.norm_per == "client" and squared:
            squared = {"all components": torch.stack(list(squared.values())).sum(0)}
        for name, value in squared.items():
            largest = float(value.sqrt().max()) if len(value) else 0.0
            assert largest <= self.norm_bound * (1 + 1e-6), f"{name}: norm {largest}, bound {self.norm_bound}"


def failures(contract: DefenseContract) -> list[str]:
    """The names of the checks that a contract fails, run without pytest."""
    failed = []
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract, name)()
            except Exception:  # an error in a defense is a failure too
                failed.append(name)
    return failed


def _streams(update: Update, round: int = 0) -> Streams:
    return Streams.simulated(5, round, update.client)


def _tensor(update: Update, name: str) -> Tensor:
    return update.values[name] if name in update.values else update.rows[name]


def _keys(update: Update) -> list[tuple[int, int]]:
    """The (position of the client, item) of each row."""
    return list(zip(update.owner.tolist(), update.item.tolist(), strict=True))


def _places(update: Update) -> set[tuple[int, int]]:
    return set(_keys(update))


def _only_large(update: Update, large: str) -> Update:
    return update.map(lambda name, tensor, owner: torch.full_like(tensor, 1e4 if name == large else 0.0))


def _without_first_rows(update: Update) -> Update:
    """The update without the first row of every client that has one."""
    stays = torch.ones(len(update.item), dtype=torch.bool)
    stays[update.offset[:-1][update.offset.diff() > 0]] = False
    offset = torch.cat([torch.zeros(1, dtype=torch.int64), (update.offset.diff() - 1).clamp(min=0).cumsum(0)])
    rows: dict[str, Any] = {name: value[stays] for name, value in update.rows.items()}
    return replace(update, rows=rows, item=update.item[stays], offset=offset)
