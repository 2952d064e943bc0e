"""Noise on clipped values: its law, which rows it is on, what training becomes under it, and what it promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, nan, sqrt
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recleak import kernels_perceptron
from recleak.accounting import Entry, ledger
from recleak.defenses import adaptive_noise
from recleak.defenses.adaptive_noise import AdaptiveNoise, BoundedGaussian, Moment, levels_from
from recleak.defenses.base import Chain, Defense, check, hooks
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise, LaplaceNoise, Rows
from recleak.defenses.sharing import Share, ShareLess
from recleak.epsilon import gaussian_epsilon
from recleak.errors import ConfigError, NotFoundError
from recleak.models.base import Model
from recleak.models.components import Component, FanIn, Normal
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.streams import Streams
from recleak.testing.defenses import DefenseContract, NoiseLaw, example_update, zeros_like
from recleak.testing.models import assert_equals_loop, assert_identical, ragged, visits
from recleak.training.aggregate import Aggregation
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining, Task, Trained, train
from recleak.training.optimizers import SGD, Adam, Optimizer
from recleak.update import NodeParams, Update


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny."""
    with one_thread():
        yield


# --- the contract -----------------------------------------------------------------------------------------------------

PARTS: tuple[Component, ...] = (
    Component("user", "per_user", "user", (4,), shared=False),
    Component("item", "per_item", "item", (4,)),
    Component("item.bias", "per_item", "item", ()),
    Component("head.1.weight", "dense", "head", (3, 2), layer=1),
    Component("head.1.bias", "dense", "head", (), layer=1),
    Component("wide.bias", "dense", "head", (2,), layer=2),
)
LEVELS = {"user": 0, "item": 1, "head.1": 2, "head": 3, "wide": 3}
SCALE = {
    "user": 1 / 30,
    "item": 1 / 40,
    "item.bias": 1 / 40,
    "head.1.weight": 1 / 50,
    "head.1.bias": 1 / 50,
    "wide.bias": 1 / 60,
}


def with_received(update: Update, parts: tuple[Component, ...], n_users: int = 100, scale: float = 0.1) -> Update:
    """The update with what clients received: normal numbers, small enough not to be clipped."""
    sizes: dict[str, tuple[int, ...]] = {"per_item": (update.n_items,), "per_user": (n_users,), "dense": ()}
    generator = torch.Generator().manual_seed(1)
    drawn = {p.name: scale * torch.randn((*sizes[p.storage], *p.shape), generator=generator) for p in parts}
    return replace(update, received={name: drawn[name] for name in update.names()})


class ValuesContract(DefenseContract):
    """What is sent is a change from what was received."""

    components = PARTS
    neutral = None

    def _example(
        self,
        n_clients: int = 7,
        *,
        components: tuple[Component, ...] | None = None,
        max_rows: int = 6,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Update:
        parts = self.components if components is None else components
        update = super()._example(n_clients, components=parts, max_rows=max_rows, scale=scale, seed=seed)
        return with_received(update, parts, 3 * n_clients + 20)


class TestAfterEachEpoch(ValuesContract):
    hook = "epoch"
    defense = AdaptiveNoise(LEVELS)
    noise = NoiseLaw("laplace", SCALE)


class TestBeforeSending(ValuesContract):
    defense = AdaptiveNoise(LEVELS, moment="upload")
    noise = NoiseLaw("laplace", SCALE)
    hides_support = True


class TestOnTouchedRows(ValuesContract):
    defense = AdaptiveNoise(LEVELS, moment="upload", rows="touched")
    noise = NoiseLaw("laplace", SCALE)


class TestWithSharedUsers(ValuesContract):
    """The row of a shared table that belongs to the client is clipped as a value too."""

    components = (replace(PARTS[0], shared=True), *PARTS[1:])
    defense = AdaptiveNoise(LEVELS, moment="upload")
    noise = NoiseLaw("laplace", SCALE)
    hides_support = True


class TestUniform(ValuesContract):
    defense = AdaptiveNoise(LEVELS, 50.0, 50.0, moment="upload")
    noise = NoiseLaw("laplace", dict.fromkeys(SCALE, 1 / 50))
    hides_support = True


class TestBoundedGaussian(ValuesContract):
    hook = "epoch"
    defense = BoundedGaussian(0.07)
    noise = NoiseLaw("norm", dict.fromkeys(SCALE, 0.07))


class TestBoundedGaussianBeforeSending(ValuesContract):
    defense = BoundedGaussian(0.07, moment="upload", rows="touched")
    noise = NoiseLaw("norm", dict.fromkeys(SCALE, 0.07))


# --- the mechanism ----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.floats(0.01, 5), st.floats(0.01, 10), st.floats(0.01, 10))
def test_values_are_clipped_and_changes_follow(bound: float, scale: float, start: float) -> None:
    """Against a plain loop, without noise; what was received may lie outside the bound."""
    parts = TestWithSharedUsers.components
    update = with_received(example_update(4, components=parts, max_rows=3, scale=scale), parts, scale=start)
    sent = BoundedGaussian(0.0, bound, "upload").upload(update, Streams.simulated(0, 0, update.client))
    whole = update.with_all_rows()
    for name, tensor in {**whole.values, **whole.rows}.items():
        got = sent.values[name] if name in sent.values else sent.rows[name]
        for place, change in enumerate(tensor):
            first = update.received[name]
            if name in update.rows:
                first = first[whole.item[place]]
            elif name == "user":
                first = first[update.client[place]]
            expected = (first.double() + change.double()).clamp(-bound, bound) - first.double()
            torch.testing.assert_close(got[place].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("nodes", [False, True], ids=["one table", "a table of each node"])
def test_no_bit_depends_on_how_many_rows_are_treated_at_a_time(nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on whether rows are clipped by the compiled pass (one table) or by torch (nodes)."""
    parts = PARTS
    update = with_received(example_update(4, components=parts, max_rows=9, scale=2.0), parts)
    users = {part.name for part in parts if part.storage == "per_user"}
    each = {
        name: value if name in users else value.expand(100, *value.shape) for name, value in update.received.items()
    }
    many = replace(update, received=NodeParams(each)) if nodes else update
    defense, streams = AdaptiveNoise(LEVELS, moment="upload"), Streams.simulated(0, 0, update.client)
    whole = defense.upload(update, streams)
    for numbers in (1, 7, 64):
        monkeypatch.setattr(adaptive_noise, "_NUMBERS", numbers)
        cut = defense.upload(many, streams)
        for name, rows in whole.rows.items():
            assert torch.equal(cut.rows[name], rows)


@pytest.mark.parametrize(
    ("levels", "epsilons"),
    [
        ("equation", {"user.encoder": 30, "item": 40, "head.1.weight": 50, "head.2.bias": 60, "head.5.bias": 60}),
        ("section", {"user": 30, "head.1.weight": 40, "head.2.bias": 50, "item.encoder": 60, "head.3.weight": 50}),
        ({"user": 1.5, "head": 3, "head.2": 0}, {"user": 45, "head.1.weight": 60, "head.2.bias": 30}),
        ({"head.1": 3, "head.2.bias": 0}, {"head.1.bias": 60, "head.2.bias": 30, "head.12.bias": 30}),
    ],
)
def test_epsilon_by_part(levels: Mapping[str, float], epsilons: dict[str, float]) -> None:
    defense = AdaptiveNoise(levels)
    for name, epsilon in epsilons.items():
        assert defense.epsilon(name) == pytest.approx(epsilon)
        assert defense.scale(name) == pytest.approx(1 / epsilon)  # 2 * 0.5 / epsilon


def test_a_component_that_no_part_fits() -> None:
    for name in ("bias", "items", "usernames", "heads.1"):
        with pytest.raises(ConfigError, match=rf"(?s)No part of 'user', 'item'.*{name!r}.*Give `levels` as a mapping"):
            AdaptiveNoise().level(name)
    with pytest.raises(ConfigError, match=r"No part of 'head\.1', 'head\.3' fits the component 'head\.2\.bias'"):
        AdaptiveNoise({"head.1": 1, "head.3": 1}).level("head.2.bias")
    with pytest.raises(ConfigError, match="fits the component 'bias', which is sent"):
        check(AdaptiveNoise(), MF(4, biases=True).components())
    with pytest.raises(ConfigError, match="fits the component 'bias', which is sent"):
        check(Chain((Chain((AdaptiveNoise(),)),)), MF(4, biases=True).components())
    check(AdaptiveNoise(), MF(4).components())
    check(AdaptiveNoise({"item": 1}), MF(4).components())  # the user's vector is kept
    check(AdaptiveNoise({"item": 1, "head": 0}), FeatureGCN(3).components()[4:])


def test_a_part_that_no_component_has() -> None:
    with pytest.raises(NotFoundError, match=r"Unknown part of a model 'haed'\. Did you mean 'head'"):
        check(AdaptiveNoise({"item": 1, "head": 1, "haed": 1}), NCF(4, (4,)).components())
    check(AdaptiveNoise({"item": 1, "user": 1, "head.1": 1}), NCF(4, (4,)).components())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": 0.0}, "Got bound=0.0"),
        ({"bound": inf}, "Got bound=inf"),
        ({"moment": "step"}, "Got moment='step', expected one of epoch, upload"),
        ({"rows": "some"}, "Got rows='some', expected one of touched, all"),
        ({"epsilon_min": 0.0}, "Got epsilon_min=0.0"),
        ({"epsilon_min": 70.0}, "the first at most the second"),
        ({"epsilon_max": inf}, "expected finite numbers"),
        ({"epsilon_min": nan}, "Got epsilon_min=nan"),
        ({"levels": {"item": 4}}, "Got level 4 for 'item'"),
        ({"levels": {"item": nan}}, "Got level nan"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveNoise(**change)  # type: ignore[arg-type]


def test_other_settings_that_cannot_be() -> None:
    with pytest.raises(NotFoundError, match=r"Unknown levels 'sections'\. Did you mean 'section'"):
        AdaptiveNoise("sections")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Got std=-1"):
        BoundedGaussian(-1)
    with pytest.raises(ConfigError, match=r"does not say what was received of 'user'"):
        BoundedGaussian(0.1).epoch(example_update(), Streams.from_os(7))


def test_only_the_hook_of_its_moment_counts() -> None:
    assert hooks(AdaptiveNoise()) == {"epoch"}
    assert hooks(Chain((AdaptiveNoise(moment="upload"),))) == {"upload"}
    assert Chain((Defense(), AdaptiveNoise())).every_row
    assert not AdaptiveNoise(moment="upload").every_row
    assert not Chain((AdaptiveNoise(rows="touched"),)).every_row


# --- levels -----------------------------------------------------------------------------------------------------------


def test_levels_from_a_measured_leak() -> None:
    got = levels_from({"user": 0.3, "item": 0.1, "head.1": 0.2, "head.2": -0.05})
    assert got == pytest.approx({"user": 0, "item": 2, "head.1": 1, "head.2": 3})
    assert levels_from({"user": 0.2, "item": 0.2}) == {"user": 0, "item": 0}
    assert levels_from({"user": -0.2, "item": -0.1}) == {"user": 0, "item": 0}  # nothing leaks
    assert levels_from({}) == {}
    with pytest.raises(ValueError, match="expected finite numbers"):
        levels_from({"user": nan})


@given(st.dictionaries(st.text("abc.", min_size=1), st.floats(-1, 1), min_size=1))
def test_levels_go_down_with_the_leak(leak: dict[str, float]) -> None:
    levels = levels_from(leak)
    AdaptiveNoise(levels)  # they are in range
    assert list(levels) == list(leak)
    for one, other in zip(sorted(leak, key=leak.__getitem__), sorted(leak, key=leak.__getitem__)[1:], strict=False):
        assert levels[one] >= levels[other]
    assert levels[max(leak, key=leak.__getitem__)] == 0


# --- training ---------------------------------------------------------------------------------------------------------

LOCAL = LocalTraining(epochs=3, batch_size=8, optimizer=SGD(0.1), negatives=2)
GCN = FeatureGCN(5, 6, (8,), init=Normal(0.5), dense_init=FanIn())
MODELS: dict[str, Model] = {"mf": MF(6), "ncf": NCF(8, (16, 4)), "gcn": GCN}


def task(model: Model, defense: Defense, training: LocalTraining = LOCAL) -> Task:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(24, 5, generator=generator) if model.needs_user_features else None
    return Task(model, defense.sharing(model.components()), training, defense, 3, user_features=features)


@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("moment", ["epoch", "upload"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_loop(name: str, moment: Moment, rows: Rows) -> None:
    defense = AdaptiveNoise(moment=moment, rows=rows)
    for trained in assert_equals_loop(task(MODELS[name], defense), ragged(), np.arange(0, 24, 3), rounds=2):
        update = trained.update
        assert (len(update.item) == update.n_clients * update.n_items) == (rows == "all")
        assert not update.received


@pytest.mark.parametrize(
    "defense",
    [
        BoundedGaussian(0.05),
        Chain((AdaptiveNoise(), BoundedGaussian(0.02, 0.4, rows="touched"))),
        Chain((AdaptiveNoise(), ClipByNorm(1.0), GaussianNoise(0.01, rows="all"))),
        Chain((Share(), AdaptiveNoise())),
        Chain((ShareLess(("item",)), AdaptiveNoise())),
    ],
    ids=str,
)
def test_chains_train_as_the_loop_does(defense: Defense) -> None:
    assert_equals_loop(task(NCF(8, (16,)), defense), ragged(), np.arange(0, 24, 3), rounds=2)


@pytest.mark.parametrize(
    ("optimizer", "decay_rows"),
    [
        (Adam(0.01, epsilon=1e-3), "active"),
        (Adam(0.01, epsilon=1e-3, keep=True), "active"),
        (SGD(0.1, momentum=0.9, weight_decay=0.1), "active"),
        (SGD(0.1, weight_decay=0.1), "all"),
    ],
    ids=str,
)
def test_other_optimizers_train_as_the_loop_does(optimizer: Optimizer, decay_rows: Literal["active", "all"]) -> None:
    training = replace(LOCAL, optimizer=optimizer, decay_rows=decay_rows, resample=True)
    assert_equals_loop(task(MF(6), AdaptiveNoise(), training), ragged(), np.arange(0, 24, 3), rounds=3)


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("defense", [AdaptiveNoise(), BoundedGaussian(0.1, moment="upload")], ids=str)
@pytest.mark.parametrize("model", [NCF(8, (16,)), FeatureGCN(5, 8, (16,), dense_init=FanIn())], ids=["ncf", "gcn"])
def test_chunks_do_not_matter(model: Model, defense: Defense, batch_size: int | None) -> None:
    everyone = np.arange(24)
    job = task(model, defense, replace(LOCAL, batch_size=batch_size))
    (whole,) = visits(train, job, ragged(), everyone)
    for places in (everyone[:1], everyone[5:8], everyone[8:]):  # 16 go together, so cuts are at other places
        (part,) = visits(train, job, ragged(), places)
        at = torch.from_numpy(places)
        expected = Trained(
            whole.update.select(at), whole.kept.select(at), whole.loss[at], whole.positives[at], part.steps
        )
        assert_identical(part, expected, f"clients {places}")


def test_rows_that_nothing_trains_are_clipped_and_noisy_after_each_epoch() -> None:
    """By hand, for one client: x <- clip(x) + noise, epoch after epoch."""
    defense, client = AdaptiveNoise(), np.array([4])
    job = task(MF(6, init=Normal(1.0)), defense)
    (trained,) = visits(train, job, ragged(), client)
    table = job.components[1].draw(3, np.arange(24))
    (alone,) = visits(train, replace(job, defense=Defense()), ragged(), client)
    still = torch.tensor(sorted(set(range(24)) - set(alone.update.item.tolist())))
    assert len(still) > 5
    owner, value = torch.zeros_like(still), table[still]
    for epoch in (1, 2, 3):
        streams = Streams.simulated(3, 0, client).at(epoch).within("epoch")
        value = value.clamp(-0.5, 0.5) + streams.laplace("item", owner, still, (6,)) / 40
    torch.testing.assert_close(trained.update.rows["item"][still] + table[still], value, atol=1e-6, rtol=1e-5)
    assert (value.abs() > 0.5).any()  # the noise of the last epoch is not clipped


@pytest.mark.parametrize(("moment", "calls"), [("upload", 1), ("epoch", 0)])
def test_noise_before_sending_leaves_the_compiled_loop_alone(
    moment: Moment, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = kernels_perceptron.perceptron_visits

    def counted(*arguments: object) -> None:
        made.append(1)
        real(*arguments)

    monkeypatch.setattr(kernels_perceptron, "perceptron_visits", counted)
    job = task(NCF(8, (16,)), AdaptiveNoise(moment=moment), replace(LOCAL, optimizer=Adam(0.01)))
    visits(train, job, ragged(), np.arange(4))
    assert len(made) == calls


# --- the ledger -------------------------------------------------------------------------------------------------------

SENT = FeatureGCN(3, 2, (4,)).components()  # E_U 6, W1 4, W2 4, b 2; item 2 each; head 16 + 4 and 4 + 1
USES = np.array([0, 1, 1, 7])


def entries(defense: Defense, epochs: int = 5, how: Aggregation = "mean") -> list[Entry]:
    return ledger(
        defense,
        components=SENT,
        n_items=10,
        participations=USES,
        training=LocalTraining(epochs=epochs),
        aggregation=how,
        delta=1e-3,
    )


def test_epsilon_by_hand() -> None:
    number, whole = entries(AdaptiveNoise())
    once = 30 * (6 + 4 + 4 + 2) + 40 * (10 * 2) + 50 * (16 + 4) + 60 * (4 + 1)
    assert (number.claimed, number.composed, number.delta, number.times) == (60, 7 * 60, 0, 7)
    assert (whole.claimed, whole.composed, whole.delta, whole.times) == (once, 7 * once, 0, 7)
    assert whole.typical == once
    assert "one number" in number.unit
    assert f"{5 * 7 * once:.3g}" in whole.words  # as if every epoch were seen
    assert "5 epochs" in whole.words
    section = entries(AdaptiveNoise("section"))[1]
    assert section.claimed == pytest.approx(30 * 16 + 60 * 20 + 40 * 20 + 50 * 5)


def test_the_moment_does_not_matter_for_what_is_sent() -> None:
    for defense in (AdaptiveNoise(), BoundedGaussian(2.0)):
        after, before = entries(defense), entries(replace(defense, moment="upload"))
        assert [(e.claimed, e.composed) for e in after] == [(e.claimed, e.composed) for e in before]
        assert "epochs" not in before[1].words


def test_gaussian_epsilon_by_hand() -> None:
    number, whole = entries(BoundedGaussian(2.0, 0.5))
    count = 16 + 20 + 20 + 5
    assert number.claimed == pytest.approx(gaussian_epsilon(1 / 2, 1e-3))
    assert number.composed == pytest.approx(gaussian_epsilon(sqrt(7) / 2, 1e-3))
    assert whole.claimed == pytest.approx(gaussian_epsilon(sqrt(count) / 2, 1e-3))
    assert whole.composed == pytest.approx(gaussian_epsilon(sqrt(7 * count) / 2, 1e-3))


def test_the_sensitivity_is_reached_by_two_clients() -> None:
    """One moves everything up, the other everything down; without noise they are 2 bound apart in every number."""
    parts = tuple(part for part in PARTS if part.shared)
    like = with_received(example_update(2, 10, components=PARTS, max_rows=1).only({p.name for p in parts}), parts)

    def extreme(sign: float) -> dict[str, Tensor]:
        moved = like.map(lambda _, tensor, __: torch.full_like(tensor, 1e3 * sign)).with_all_rows()
        full = replace(moved, rows={name: torch.full_like(t, 1e3 * sign) for name, t in moved.rows.items()})
        sent = BoundedGaussian(0.0, 0.5, "upload").upload(full, Streams.simulated(0, 0, like.client))
        return {**sent.values, **sent.rows}

    defense = AdaptiveNoise(LEVELS)
    up, down = extreme(1), extreme(-1)
    far = sum(float(((up[name] - down[name]) / SCALE[name]).abs().sum()) for name in up) / like.n_clients
    whole = ledger(defense, components=PARTS, n_items=10, participations=np.array([1]))[1]
    assert whole.claimed == pytest.approx(far, rel=1e-4)


@pytest.mark.parametrize(
    ("defense", "how", "why"),
    [
        (AdaptiveNoise(rows="touched"), "mean", "Which rows those are"),
        (AdaptiveNoise(rows="touched", moment="upload"), "mean", "Which rows those are"),
        (AdaptiveNoise(), "weighted", "number of a client's own items"),
        (BoundedGaussian(0.0), "mean", "The noise is 0"),
        (Chain((ClipByNorm(1.0), BoundedGaussian(0.1, rows="touched"))), "mean", "Which rows those are"),
    ],
    ids=str,
)
def test_there_is_no_epsilon_where_none_follows(defense: Defense, how: Aggregation, why: str) -> None:
    rows = entries(defense, how=how)
    assert all(row.composed is None for row in rows)
    assert any(why in row.words for row in rows)


def test_noise_on_top_of_noise_counts_for_nothing() -> None:
    clip, noise = ClipByNorm(1.0), GaussianNoise(0.1, rows="all")
    alone = entries(AdaptiveNoise())
    *first, later = entries(Chain((AdaptiveNoise(), clip, noise)))
    assert first == alone
    assert "An earlier row gives the guarantee" in later.words
    assert "An earlier row gives the guarantee" in entries(Chain((clip, noise, AdaptiveNoise())))[-1].words
    weak = entries(Chain((AdaptiveNoise(rows="touched"), clip, noise)))
    assert weak[-1].composed == entries(Chain((clip, noise)))[-1].composed


def test_without_item_rows_touched_ones_are_all() -> None:
    """A model whose item side is an encoder sends no rows."""
    dense = FeatureGCN(3, 2, (4,), item_side="features", item_feature_dim=2).components()
    given = {"components": dense, "n_items": 10, "participations": USES}
    _, whole = ledger(AdaptiveNoise(rows="touched"), **given)  # type: ignore[arg-type]
    assert whole.claimed == pytest.approx(30 * 16 + 40 * 4 + 50 * 20 + 60 * 5)


def test_a_zero_change_is_not_told_from_noise() -> None:
    """Rows that nothing moved are noise around what was received, if that is within the bound."""
    update = with_received(example_update(components=PARTS).only({"item"}), PARTS)
    sent = AdaptiveNoise(moment="upload").upload(zeros_like(update), Streams.simulated(0, 0, update.client))
    assert float(sent.rows["item"].std()) == pytest.approx(sqrt(2) / 40, rel=0.15)


def test_the_noise_on_a_component_is_what_is_added() -> None:
    """Measured on a client that changed nothing, of parameters that no clipping touches."""
    update = replace(zeros_like(example_update()), received={})
    received = {name: torch.zeros(value.shape[1:]) for name, value in update.values.items()}
    received |= {name: torch.zeros(update.n_items, *value.shape[1:]) for name, value in update.rows.items()}
    update = replace(update, received=received)
    levels = dict(zip(update.names(), (0.0, 1.5, 3.0), strict=False))
    levels = {name: levels.get(name, 3.0) for name in update.names()}
    for defense in (AdaptiveNoise(levels, moment="upload"), BoundedGaussian(0.2, moment="upload")):
        drawn = [defense.upload(update, Streams.simulated(0, each, update.client)) for each in range(200)]
        for name in update.names():
            every = torch.cat([(each.values if name in each.values else each.rows)[name].flatten() for each in drawn])
            assert every.std().item() == pytest.approx(defense.noise(name), rel=0.1)
    assert Chain((GaussianNoise(3.0), LaplaceNoise({"item": 4 / sqrt(2)}))).noise("item") == pytest.approx(5.0)
    assert Defense().noise("item") == 0


@pytest.mark.parametrize("moment", ["epoch", "upload"])
def test_the_shift_is_what_leaves_a_client_that_changed_nothing(moment: Moment) -> None:
    """With next to no noise, of values most of which are beyond the bound; what follows in a chain adds its own."""
    update = with_received(zeros_like(example_update(components=PARTS)), PARTS, scale=2.0)
    levels = dict.fromkeys(LEVELS, 3.0)
    defense = AdaptiveNoise(levels, epsilon_max=1e9, bound=0.5, moment=moment, rows="touched")
    for whole in (defense, Chain((defense, replace(defense, bound=0.25)))):
        hook = whole.upload if moment == "upload" else whole.epoch
        sent = hook(update, Streams.simulated(0, 0, update.client))
        for name in update.names():
            shift = whole.shift(name, update.received[name])
            assert shift is not None
            row = update.item if name in update.rows else update.client if name == "user" else None
            expected = shift.expand_as(sent.values[name]) if row is None else shift[row]
            got = sent.rows[name] if name in update.rows else sent.values[name]
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
            assert got.abs().max() > 0.5
    assert Chain((ClipByNorm(1.0), GaussianNoise(1.0))).shift("item", torch.ones(3)) is None
