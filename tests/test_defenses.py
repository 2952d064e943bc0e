"""The defenses pass their contract, and the contract notices broken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak.defenses import clipping
from recleak.defenses.base import HOOKS, Chain, Defense, Lists, Scene, check, hooks, without_data_hooks
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.early_stop import EarlyStop
from recleak.defenses.labels import FakeItems, RandomizedLabels
from recleak.defenses.noise import GaussianNoise, LaplaceNoise
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.defenses.sharing import Share, ShareLess
from recleak.errors import ConfigError, NotFoundError
from recleak.models.base import Batch, Params
from recleak.models.components import Component, sharing
from recleak.models.ncf import NCF
from recleak.streams import Streams
from recleak.testing import DefenseContract, NoiseLaw, example_update, failures
from recleak.testing.defenses import EXAMPLE_COMPONENTS, assert_same, zeros_like
from recleak.training.local import LocalData
from recleak.update import Update

SENT = ("item", "item_bias", "weight", "bias")


def every(scale: float) -> dict[str, float]:
    return dict.fromkeys(SENT, scale)


# --- the contract


class TestIdentity(DefenseContract):
    defense = Defense()
    neutral = Chain()


class TestEarlyStop(DefenseContract):
    defense = EarlyStop(0.4)
    neutral = EarlyStop(0.4)


class TestClipClient(DefenseContract):
    defense = ClipByNorm(0.5)
    neutral = ClipByNorm(1e30)
    norm_bound = 0.5


class TestClipComponent(DefenseContract):
    defense = ClipByNorm(0.5, per="component")
    neutral = ClipByNorm(1e30, per="component")
    norm_bound = 0.5
    norm_per = "component"


class TestClipRow(DefenseContract):
    defense = ClipByNorm(0.5, per="row")
    neutral = ClipByNorm(1e30, per="row")
    norm_bound = 0.5
    norm_per = "row"


class TestClipUnit(DefenseContract):
    defense = ClipByNorm(0.5, per="unit")
    neutral = ClipByNorm(1e30, per="unit")
    components = (
        *EXAMPLE_COMPONENTS,
        Component("head.2.weight", "dense", "head", (3, 4, 2), layer=2),
        Component("head.2.bias", "dense", "head", (5,), layer=2),
        Component("vector", "dense", "head", (5,), layer=3),
    )
    norm_bound = 0.5

    def _assert_bounded(self, result: Update) -> None:
        for name, tensor in {**result.values, **result.rows}.items():
            squared = tensor.double().square()
            if not name.endswith("bias"):
                squared = squared.sum((1, 2) if name == "head.2.weight" else 1)
            norm = squared.sqrt()
            assert (norm <= 0.5).all(), f"{name}: norm {float(norm.max())}"


class TestClipSomeComponents(DefenseContract):
    defense = ClipByNorm(0.5, components=("item", "bias"))
    neutral = ClipByNorm(0.5, components=())
    norm_bound = 0.5
    norm_components = ("item", "bias")


class TestGaussianNoise(DefenseContract):
    defense = GaussianNoise(0.3)
    neutral = GaussianNoise(0.0)
    noise = NoiseLaw("norm", every(0.3))


class TestGaussianNoiseByComponent(DefenseContract):
    defense = GaussianNoise({"item": 0.3, "bias": 2.0, "weight": 0.0})
    neutral = GaussianNoise({})
    noise = NoiseLaw("norm", {"item": 0.3, "bias": 2.0})


class TestGaussianNoiseEverywhere(DefenseContract):
    defense = GaussianNoise(0.3, rows="all")
    neutral = GaussianNoise(0.0, rows="all")
    noise = NoiseLaw("norm", every(0.3))
    hides_support = True


class TestLaplaceNoise(DefenseContract):
    defense = LaplaceNoise(0.3)
    neutral = LaplaceNoise(0.0)
    noise = NoiseLaw("laplace", every(0.3))


class TestLaplaceNoiseEverywhere(DefenseContract):
    defense = LaplaceNoise(every(0.3), rows="all")
    neutral = LaplaceNoise(0.0, rows="all")
    noise = NoiseLaw("laplace", every(0.3))
    hides_support = True


class TestShareLess(DefenseContract):
    defense = ShareLess()
    neutral = ShareLess(())


class TestShareNoItems(DefenseContract):
    defense = ShareLess(("item", "item_bias"))
    neutral = ShareLess(())


class TestShare(DefenseContract):
    defense = Share()
    neutral = Share(())
    shares_users = True


class TestSecureAggregation(DefenseContract):
    defense = SecureAggregation()
    neutral = SecureAggregation()


class TestLocalDifferentialPrivacy(DefenseContract):
    """A chain, and full sharing: the user table is clipped and noised as well."""

    defense = Chain((Share(), ClipByNorm(0.5), GaussianNoise(0.3, rows="all"), SecureAggregation()))
    neutral = Chain((ClipByNorm(1e30), Chain(), GaussianNoise(0.0)))
    noise = NoiseLaw("norm", {**every(0.3), "user": 0.3})
    hides_support = True
    shares_users = True


# --- the contract notices broken defenses


@dataclass(frozen=True)
class Edited(Defense):
    """A defense whose upload is replaced."""

    edit: Callable[[Update, Streams], Update]

    def upload(self, update: Update, streams: Streams) -> Update:
        return self.edit(update, streams)


def skipping(defense: Defense, skipped: str) -> Defense:
    """The defense, but one component passes untouched."""
    return Edited(
        lambda update, streams: defense.upload(update, streams).map(
            lambda name, tensor, owner: update.values[name] if name == skipped else tensor
        )
    )


def noise_of(draw: Callable[[Update, str, Streams], Tensor]) -> Defense:
    """A mechanism that adds 0.3 times something wrong."""
    return Edited(
        lambda update, streams: update.map(lambda name, tensor, owner: tensor + 0.3 * draw(update, name, streams))
    )


def noise_by_index(update: Update, name: str, streams: Streams) -> Tensor:
    """Keyed by the place of a row, not by its item."""
    return streams.normal_like(replace(update, item=torch.arange(len(update.item))), name)


def first_client_only(update: Update, name: str, streams: Streams) -> Tensor:
    """Every client has the noise of the first."""
    one = (
        Streams(update.n_clients, np.repeat(streams.key[:1], update.n_clients)) if streams.key is not None else streams
    )
    return one.normal_like(update, name)


def from_torch(update: Update, name: str, streams: Streams) -> Tensor:
    return torch.randn_like(streams.normal_like(update, name))


def seeded_by_nobody(update: Update, name: str, streams: Streams) -> Tensor:
    """The same in every round."""
    return Streams.simulated(0, 0, update.client).normal_like(update, name)


def without_component(update: Update, name: str, streams: Streams) -> Tensor:
    """All components draw for one purpose."""
    tensor = update.values[name] if name in update.values else update.rows[name]
    position = torch.arange(update.n_clients) if name in update.values else update.owner
    row = torch.zeros_like(position) if name in update.values else update.item
    return streams.normal("noise", position, row, tuple(tensor.shape[1:]))


def one_draw_per_row(update: Update, name: str, streams: Streams) -> Tensor:
    """All coordinates of a row get the same number."""
    drawn = streams.normal_like(update, name)
    return drawn.unsqueeze(-1).flatten(1)[:, :1].reshape(-1, *[1] * (drawn.dim() - 1)).expand_as(drawn)


def ignoring_chain(update: Update, name: str, streams: Streams) -> Tensor:
    return replace(streams, path=()).normal_like(update, name)


def clip_by_cohort(update: Update, streams: Streams) -> Update:
    """Scales everybody by the largest norm of the cohort."""
    return update.map(lambda name, tensor, owner: tensor * (0.5 / float(update.norms().max().clamp(min=0.5))))


def clip_with_division_by_zero(update: Update, streams: Streams) -> Update:
    norm = update.norms()
    scale = (0.5 / norm).clamp(max=1) * norm / norm

    def shrink(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        return tensor * (scale if owner is None else scale[owner]).reshape(-1, *[1] * (tensor.dim() - 1))

    return update.map(shrink)


def clip_in_place(update: Update, streams: Streams) -> Update:
    clipped = ClipByNorm(0.5).upload(update, streams)
    for name, value in clipped.values.items():
        update.values[name].copy_(value)
    return replace(clipped, values=update.values)


def clip_inputs(update: Update, streams: Streams) -> Update:
    """Takes weights for [outputs, inputs]."""

    def turn(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        return tensor if owner is not None or tensor.dim() < 3 else tensor.movedim(-1, 1)

    def back(name: str, tensor: Tensor, owner: Tensor | None) -> Tensor:
        return tensor if owner is not None or tensor.dim() < 3 else tensor.movedim(1, -1)

    return ClipByNorm(0.5, per="unit").upload(update.map(turn), streams).map(back)


class ShareUsers(ClipByNorm):
    def sharing(self, components: tuple[Component, ...]) -> tuple[Component, ...]:
        return tuple(replace(part, shared=True) for part in components)


CLIP: type[DefenseContract] = TestClipClient
NOISE: type[DefenseContract] = TestGaussianNoise

# what is broken: the contract, the check that must notice (others may as well), the broken defense
MUTANTS: dict[str, tuple[type[DefenseContract], str, Defense]] = {
    "clipping removed": (CLIP, "norm_is_at_most_the_bound", Defense()),
    "clipping at twice the bound": (CLIP, "norm_is_at_most_the_bound", ClipByNorm(1.0)),
    "clipping each component instead of the client": (
        CLIP,
        "norm_is_at_most_the_bound",
        ClipByNorm(0.5, per="component"),
    ),
    "clipping without the 0-d parameter": (
        CLIP,
        "bound_holds_for_each_component_alone",
        ClipByNorm(0.5, components=("item", "item_bias", "weight")),
    ),
    "clipping skips the 0-d parameter": (
        CLIP,
        "bound_holds_for_each_component_alone",
        skipping(ClipByNorm(0.5), "bias"),
    ),
    "clipping by the cohort": (CLIP, "batch_row_equals_device_alone", Edited(clip_by_cohort)),
    "clipping divides by zero": (CLIP, "zero_update", Edited(clip_with_division_by_zero)),
    "clipping in place": (CLIP, "input_is_not_changed", Edited(clip_in_place)),
    "clipping units skips the 0-d parameter": (
        TestClipUnit,
        "bound_holds_for_each_component_alone",
        skipping(ClipByNorm(0.5, per="unit"), "bias"),
    ),
    "clipping units by inputs": (TestClipUnit, "norm_is_at_most_the_bound", Edited(clip_inputs)),
    "clipping and noise": (CLIP, "zero_update", Chain((GaussianNoise(1e-4), ClipByNorm(0.5)))),
    "user parameters sent": (CLIP, "user_parameters_stay_unless_shared", ShareUsers(0.5)),
    "noise removed": (NOISE, "noise_has_its_law_and_scale", Defense()),
    "noise doubled": (NOISE, "noise_has_its_law_and_scale", GaussianNoise(0.6)),
    "noise halved": (NOISE, "noise_has_its_law_and_scale", GaussianNoise(0.15)),
    "noise of another law": (NOISE, "noise_has_its_law_and_scale", LaplaceNoise(0.3 / 2**0.5)),
    "noise is a constant": (
        NOISE,
        "noise_has_its_law_and_scale",
        noise_of(lambda update, name, streams: torch.ones(())),
    ),
    "noise skips the 0-d parameter": (NOISE, "noise_has_its_law_and_scale", skipping(GaussianNoise(0.3), "bias")),
    "noise keyed by the place of a row": (NOISE, "noise_does_not_depend_on_other_rows", noise_of(noise_by_index)),
    "noise of the first client for all": (NOISE, "noise_is_never_used_twice", noise_of(first_client_only)),
    "noise from the global generator": (NOISE, "same_streams_give_the_same_result", noise_of(from_torch)),
    "noise with a fixed seed": (NOISE, "noise_is_never_used_twice", noise_of(seeded_by_nobody)),
    "noise shared by components": (NOISE, "noise_is_never_used_twice", noise_of(without_component)),
    "noise shared by coordinates": (NOISE, "noise_is_never_used_twice", noise_of(one_draw_per_row)),
    "noise shared by the chain": (NOISE, "noise_is_never_used_twice", noise_of(ignoring_chain)),
    "noise on touched rows only": (TestGaussianNoiseEverywhere, "support", GaussianNoise(0.3)),
    "noise on new rows": (NOISE, "support", GaussianNoise(0.3, rows="all")),
    "misspelt component": (
        CLIP,
        "configuration_fits_the_components",
        Chain((ClipByNorm(0.5), ClipByNorm(0.5, components=("itme",)))),
    ),
}


def with_defense(contract: type[DefenseContract], mutant: Defense) -> DefenseContract:
    class Broken(contract):  # type: ignore[valid-type, misc]
        defense: ClassVar[Defense] = mutant

    broken: DefenseContract = Broken()
    return broken


@pytest.mark.parametrize("name", MUTANTS)
def test_contract_refuses_a_broken_defense(name: str) -> None:
    contract, noticed_by, mutant = MUTANTS[name]
    assert f"test_{noticed_by}" in failures(with_defense(contract, mutant))


@pytest.mark.parametrize("contract", [CLIP, TestClipUnit, NOISE, TestGaussianNoiseEverywhere])
def test_contract_accepts_the_original(contract: type[DefenseContract]) -> None:
    assert failures(with_defense(contract, contract.defense)) == []


def test_contract_refuses_a_neutral_setting_that_is_none() -> None:
    class Broken(TestClipClient):
        neutral = ClipByNorm(100.0)

    assert failures(Broken()) == ["test_neutral_setting_is_the_identity"]


# --- the mechanisms beyond the contract


def streams(update: Update) -> Streams:
    return Streams.simulated(1, 2, update.client)


def test_clipping_keeps_the_direction_and_reaches_the_bound() -> None:
    update = example_update(40, scale=100.0).only(set(SENT))
    clipped = ClipByNorm(0.5).upload(update, streams(update))
    torch.testing.assert_close(clipped.norms(), torch.full((40,), 0.5), rtol=1e-5, atol=0)
    assert_same(ClipByNorm(0.5).upload(clipped, streams(update)), clipped, "clipping twice")
    factor = 0.5 / update.norms()
    torch.testing.assert_close(clipped.values["bias"], update.values["bias"] * factor)
    torch.testing.assert_close(clipped.rows["item"], update.rows["item"] * factor[update.owner][:, None])


@pytest.mark.parametrize("bound", [1e-20, 1e-3, 0.1, 1 / 3, 1e20])
def test_clipped_norm_never_exceeds_the_bound_by_rounding(bound: float) -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(2000, 5)).astype(np.float32))
    for scale in (1.0, 1e3, 1e15):
        update = replace(example_update(2000, max_rows=0), values={"weight": values * bound * scale}, rows={})
        sent = ClipByNorm(bound).upload(update, streams(update)).values["weight"]
        assert sent.double().square().sum(1).sqrt().max() <= bound


def test_clipping_rows_one_by_one() -> None:
    update = example_update().only(set(SENT))
    clipped = ClipByNorm(0.7, per="row").upload(update, streams(update))
    expected = torch.stack([row * min(1.0, 0.7 / float(row.norm())) for row in update.rows["item"]])
    torch.testing.assert_close(clipped.rows["item"], expected)
    torch.testing.assert_close(clipped.rows["item_bias"], update.rows["item_bias"].clamp(-0.7, 0.7))


def shrunk(part: Tensor, bound: float) -> Tensor:
    """One unit, as its norm says."""
    return part * min(1.0, bound / float(part.double().norm()))


def test_clipping_units_one_by_one() -> None:
    update = example_update(40, components=TestClipUnit.components)
    clipped = ClipByNorm(0.7, per="unit").upload(update, streams(update))
    for name in ("user", "vector"):  # a client's own row: one norm, as for any vector that is no bias
        torch.testing.assert_close(clipped.values[name], torch.stack([shrunk(x, 0.7) for x in update.values[name]]))
    for name in ("weight", "head.2.weight"):
        expected = update.values[name].clone()
        for client in expected:
            for output in range(expected.shape[-1]):
                client[..., output] = shrunk(client[..., output].clone(), 0.7)
        assert not torch.equal(expected, update.values[name])
        torch.testing.assert_close(clipped.values[name], expected)
    for name in ("bias", "head.2.bias"):
        torch.testing.assert_close(clipped.values[name], update.values[name].clamp(-0.7, 0.7))
    by_row = ClipByNorm(0.7, per="row").upload(update, streams(update))
    for name in ("item", "item_bias"):
        assert torch.equal(clipped.rows[name], by_row.rows[name])
    assert_same(ClipByNorm(0.7, per="unit").upload(clipped, streams(update)), clipped, "clipping twice")


def test_units_within_the_bound_stay_as_they_are() -> None:
    """Next to units that are scaled, bit for bit."""
    update = example_update(40, components=TestClipUnit.components)
    sent = ClipByNorm(1.5, per="unit").upload(update, streams(update)).values
    for name, norm in (
        ("weight", update.values["weight"].double().norm(dim=1, keepdim=True)),
        ("head.2.bias", update.values["head.2.bias"].double().abs()),
        ("user", update.values["user"].double().norm(dim=1, keepdim=True)),
    ):
        within = (norm <= 1.5).expand_as(sent[name])
        assert within.any()
        assert not within.all()
        assert torch.equal(sent[name][within], update.values[name][within])


@pytest.mark.parametrize("bound", [1e-20, 1e-3, 0.1, 1 / 3, 1e20])
def test_clipped_units_never_exceed_the_bound_by_rounding(bound: float) -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).normal(size=(2000, 5, 3)).astype(np.float32))
    for scale in (1.0, 1e3, 1e15):
        values = {"weight": drawn * bound * scale, "head.1.bias": drawn[:, 0] * bound * scale}
        update = replace(example_update(2000, max_rows=0), values=values, rows={})
        sent = ClipByNorm(bound, per="unit").upload(update, streams(update)).values
        assert sent["weight"].double().square().sum(1).sqrt().max() <= bound
        assert sent["head.1.bias"].double().abs().max() <= bound


@pytest.mark.parametrize("shape", [(1,), (7, 1), (9, 2), (64, 32), (33, 3, 5), (150_000, 1), (50_000, 3)], ids=str)
def test_unit_norms_have_the_same_bits_in_a_batch_and_alone(shape: tuple[int, ...]) -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(6, *shape)).astype(np.float32))
    together = clipping._squared_unit_norms("weight", values)
    alone = torch.cat([clipping._squared_unit_norms("weight", each[None]) for each in values])
    assert torch.equal(together, alone)


def test_long_norms_have_the_same_bits_in_a_batch_and_alone() -> None:
    """torch splits a long sum over its threads if the result is one number."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 150_000)).astype(np.float32))
    together = clipping.squared_norms(values)
    alone = torch.cat([clipping.squared_norms(row[None]) for row in values])
    assert torch.equal(together, alone)


def test_clipping_leaves_other_components_alone() -> None:
    update = example_update(scale=100.0)
    clipped = ClipByNorm(0.5, components=("item",)).upload(update, streams(update))
    assert_same(clipped.only({"user", "weight", "bias"}), update.only({"user", "weight", "bias"}), "not named")
    assert torch.equal(clipped.rows["item_bias"], update.rows["item_bias"])
    assert clipped.only({"item"}).norms().max() <= 0.5


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_sent_as_zeros(wrong: float) -> None:
    update = example_update()
    update.values["bias"][2] = wrong
    whole = ClipByNorm(0.5).upload(update, streams(update))
    assert whole.norms().isfinite().all()
    assert not whole.select(torch.tensor([2])).norms().any()
    assert whole.norms()[[0, 1, 3]].min() > 0
    rows = ClipByNorm(0.5, per="row").upload(update, streams(update))
    assert rows.values["bias"][2] == 0
    assert rows.rows["item"][rows.owner == 2].any()
    update.values["weight"][3, 1, 0] = wrong
    units = ClipByNorm(0.5, per="unit").upload(update, streams(update))
    assert units.values["bias"][2] == 0
    assert not units.values["weight"][3, :, 0].any()
    assert units.values["weight"][3, :, 1].all()
    assert units.norms().isfinite().all()


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_bound_must_be_positive_and_finite(bound: float) -> None:
    with pytest.raises(ValueError, match=r"Got bound=.*, expected a finite number above 0"):
        ClipByNorm(bound)


def test_options_are_listed() -> None:
    with pytest.raises(ValueError, match=r"Got per='item', expected one of client, component, row, unit\."):
        ClipByNorm(1.0, per="item")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Got rows='some', expected one of touched, all\."):
        GaussianNoise(1.0, rows="some")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"Got a noise scale of -1\.0 for item, expected a finite number of at least 0"
    ):
        LaplaceNoise({"item": -1.0})


def test_noise_of_a_row_is_the_same_on_touched_rows_and_on_all() -> None:
    update = example_update()
    touched = GaussianNoise(0.3).upload(update, streams(update))
    everywhere = GaussianNoise(0.3, rows="all").upload(update, streams(update))
    place = update.owner * update.n_items + update.item
    assert torch.equal(everywhere.rows["item"][place], touched.rows["item"])
    assert (everywhere.rows["item"] != 0).all()


def test_noise_is_added_to_what_is_sent() -> None:
    update = example_update(scale=5.0)
    for noise in (GaussianNoise(0.3), LaplaceNoise(0.3, rows="all")):
        alone = noise.upload(zeros_like(update), streams(update))
        before = update if noise.rows == "touched" else update.with_all_rows()
        both = noise.upload(update, streams(update))
        for name in update.rows:
            torch.testing.assert_close(both.rows[name], before.rows[name] + alone.rows[name])
        for name in update.values:
            torch.testing.assert_close(both.values[name], before.values[name] + alone.values[name])


def test_noise_on_all_rows_names_no_item_if_no_item_table_is_sent() -> None:
    update = example_update().only({"weight"})
    sent = GaussianNoise(0.3, rows="all").upload(update, streams(update))
    assert len(sent.item) == 0
    only_dense = GaussianNoise({"weight": 0.3}, rows="all").upload(example_update(), streams(update))
    assert torch.equal(only_dense.item, example_update().item)


def test_sharing_policies() -> None:
    def shared(defense: Defense) -> set[str]:
        return {part.name for part in defense.sharing(EXAMPLE_COMPONENTS) if part.shared}

    assert shared(Defense()) == set(SENT)
    assert shared(Share()) == {*SENT, "user"}
    assert shared(Share(("user",))) == {*SENT, "user"}
    assert shared(ShareLess()) == set(SENT)
    assert shared(ShareLess(("item_bias",))) == {"item", "weight", "bias"}
    assert shared(Chain((Share(), ShareLess()))) == set(SENT)
    assert shared(Chain((ShareLess(), Share()))) == {*SENT, "user"}
    for policy in (ShareLess(("itme",)), Share(("itme",))):
        with pytest.raises(NotFoundError, match="Did you mean 'item'"):
            policy.sharing(EXAMPLE_COMPONENTS)


def test_hooks_that_a_defense_uses() -> None:
    assert hooks(Defense()) == frozenset()
    assert hooks(Chain()) == frozenset()
    assert hooks(GaussianNoise(1.0)) == {"upload"}
    assert hooks(ShareLess()) == {"sharing"}
    assert hooks(Chain((ClipByNorm(1.0), Chain((ShareLess(), SecureAggregation()))))) == {"upload", "sharing"}
    assert hooks(Everything(1.0)) == set(HOOKS)


def test_without_data_hooks_the_rest_is_one_flat_chain() -> None:
    clip, noise, labels, fakes = ClipByNorm(1.0), GaussianNoise(1.0), RandomizedLabels(1.0), FakeItems(1.0)
    nothing = (Defense(), Chain(), labels, Chain((labels, Chain((fakes, Defense(), Chain())))))
    assert all(type(without_data_hooks(each)) is Defense for each in nothing)
    one = (clip, Chain((clip,)), Chain((labels, Chain((Chain((fakes, clip)), Chain())))))
    assert all(without_data_hooks(each) is clip for each in one)
    nested = Chain((Chain((clip, labels)), fakes, Chain((Chain((labels, Chain((noise, ShareLess())))), clip))))
    assert without_data_hooks(nested) == Chain((clip, noise, ShareLess(), clip))
    for wrong in (Everything(1.0), Chain((clip, Chain((labels, Everything(1.0)))))):
        with pytest.raises(ConfigError, match=r"^Everything\(mark=1\.0\) changes data and more"):
            without_data_hooks(wrong)


def test_names_are_checked_against_the_model() -> None:
    check(Chain((ClipByNorm(1.0), GaussianNoise({"bias": 1.0}), ShareLess(("item",)))), EXAMPLE_COMPONENTS)
    for wrong in (ClipByNorm(1.0, ("itm",)), LaplaceNoise({"itm": 1.0}), ShareLess(("itm",)), Share(("itm",))):
        with pytest.raises(NotFoundError, match=r"Unknown component 'itm'\. Did you mean 'item'\?"):
            check(Chain((Defense(), wrong)), EXAMPLE_COMPONENTS)


def test_secure_aggregation_is_announced() -> None:
    assert not Defense().secure_aggregation
    assert SecureAggregation().secure_aggregation
    assert Chain((Chain((SecureAggregation(),)), ClipByNorm(1.0))).secure_aggregation
    assert not Chain((ClipByNorm(1.0),)).secure_aggregation


@dataclass(frozen=True)
class Everything(Defense):
    """Leaves a mark at every hook, with a draw of its own."""

    mark: float

    def sharing(self, components: tuple[Component, ...]) -> tuple[Component, ...]:
        return components[1:]

    def data(self, data: LocalData, streams: Streams) -> LocalData:
        return replace(data, label=data.label + np.float32(self.mark))

    def features(self, features: Tensor, streams: Streams) -> Tensor:
        position = torch.arange(len(features))
        return features + streams.normal("features", position, torch.zeros_like(position), tuple(features.shape[1:]))

    def alternate(self, params: Params, scene: Scene, streams: Streams) -> Params:
        return {f"own {self.mark:g}": params["bias"] + self.mark}

    def objective(self, params: Params, scene: Scene, streams: Streams) -> Tensor | None:
        return self.mark * params["bias"]

    def release(self, lists: Lists, streams: Streams) -> Tensor:
        return lists.item + int(self.mark)

    def penalty(self, moved: Update, streams: Streams) -> Tensor | None:
        return self.mark * moved.values["bias"].square()

    def batch_sum(self, total: Update, streams: Streams) -> Update:
        return GaussianNoise(self.mark).upload(total, streams)

    def gradient(self, gradient: Update, streams: Streams) -> Update:
        return GaussianNoise(self.mark).upload(gradient, streams)

    def epoch(self, moved: Update, streams: Streams) -> Update:
        return GaussianNoise(self.mark).upload(moved, streams)

    def upload(self, update: Update, streams: Streams) -> Update:
        return GaussianNoise(self.mark).upload(update, streams)


def test_chain_runs_every_hook_of_every_part_in_order() -> None:
    chain = Chain((Everything(1.0), Defense(), Everything(2.0)))
    update = example_update()
    for hook in ("batch_sum", "gradient", "epoch", "upload"):
        first = GaussianNoise(1.0).upload(update, streams(update).within("0"))
        both = GaussianNoise(2.0).upload(first, streams(update).within("2"))
        assert_same(getattr(chain, hook)(update, streams(update)), both, hook)
    zero = torch.zeros(7, 3)
    position = torch.arange(7)
    parts = [streams(update).within(k).normal("features", position, torch.zeros(7).long(), (3,)) for k in ("0", "2")]
    torch.testing.assert_close(chain.features(zero, streams(update)), parts[0] + parts[1])
    penalty = chain.penalty(update, streams(update))
    assert penalty is not None
    torch.testing.assert_close(penalty, 3 * update.values["bias"].square())
    assert Chain((Defense(),)).penalty(update, streams(update)) is None
    scene, params = Scene(0, Batch(torch.zeros(3, 1, dtype=torch.bool), torch.ones(3)), {}), {"bias": torch.ones(3)}
    changed = chain.alternate(params, scene, streams(update))
    assert {name: value.tolist() for name, value in changed.items()} == {"own 1": [2.0] * 3, "own 2": [3.0] * 3}
    objective = chain.objective(params, scene, streams(update))
    assert objective is not None
    assert objective.tolist() == [3.0] * 3
    assert Chain((Defense(),)).objective(params, scene, streams(update)) is None
    lists = Lists(
        torch.arange(2), torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 9, dtype=torch.bool), torch.ones(9)
    )
    assert bool((chain.release(lists, streams(update)) == 3).all())
    assert chain.sharing(EXAMPLE_COMPONENTS) == EXAMPLE_COMPONENTS[2:]
    data = LocalData(
        client=np.array([1]),
        item=np.array([4]),
        label=np.zeros(1, np.float32),
        against=None,
        offset=np.array([0, 1]),
        n_items=5,
    )
    assert chain.data(data, streams(update)).label.tolist() == [3.0]
    assert data.label.tolist() == [0.0]


def test_empty_chain_returns_its_arguments() -> None:
    update = example_update()
    assert Chain().upload(update, streams(update)) is update
    assert Chain().sharing(EXAMPLE_COMPONENTS) is EXAMPLE_COMPONENTS


def test_penalty_is_differentiable() -> None:
    update = example_update()
    bias = update.values["bias"].clone().requires_grad_()
    moved = replace(update, values={**update.values, "bias": bias})
    penalty = Chain((Everything(2.0),)).penalty(moved, streams(update))
    assert penalty is not None
    torch.testing.assert_close(torch.autograd.grad(penalty.sum(), bias)[0], 4 * update.values["bias"])


def test_a_mechanism_on_what_never_leaves_is_an_error() -> None:
    """Noise on a kept component would be nothing, without a word."""
    components = NCF(4, (4,)).components()
    for defense in (GaussianNoise({"user": 1.0}), Chain((ClipByNorm(1.0, components=("user",)),))):
        with pytest.raises(ConfigError, match="'user' is kept: nothing of it is sent"):
            check(defense, components)
    check(GaussianNoise({"user": 1.0}), sharing(components, {"user": True}))
