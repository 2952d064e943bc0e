"""Steps and made-up idle steps against `torch.optim` on whole tables in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from recleak.errors import ConfigError, NotFoundError
from recleak.training.chunks import one_thread
from recleak.training.optimizers import (
    SGD,
    Adam,
    DirectRows,
    LazyRows,
    Optimizer,
    Stepper,
    check,
    idle_moves,
    learning_rate,
)

Steps = list[tuple[NDArray[np.int64], Tensor]]  # rows that have a gradient at each step, and the gradients


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors are tiny: threads that wait for each other cost ten times what there is to do."""
    with one_thread():
        yield


def torch_optimizer(optimizer: Optimizer, rate: float, value: nn.Parameter) -> torch.optim.Optimizer:
    """The same in torch."""
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(
            [value], rate, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay, foreach=False
        )
    betas = (optimizer.beta1, optimizer.beta2)
    decay, eps = optimizer.weight_decay, optimizer.epsilon
    return torch.optim.Adam([value], rate, betas, eps, weight_decay=decay, foreach=False)


def step_(
    optimizer: Optimizer, rate: float, value: Tensor, gradient: Tensor, moments: list[Tensor], time: int | Tensor
) -> None:
    """One step of one tensor, in place."""
    Stepper(optimizer, {"it": rate}, {"it": value}, {"it": moments}).step({"it": gradient}, time)


def dense(optimizer: Optimizer, rate: float, value: Tensor, steps: Steps) -> list[Tensor]:
    """The whole table after each step, f64."""
    table = nn.Parameter(value.double())
    with_torch = torch_optimizer(optimizer, rate, table)
    tables = []
    for row, gradient in steps:
        table.grad = torch.zeros_like(table).index_add_(0, torch.from_numpy(row), gradient.double())
        with_torch.step()
        tables.append(table.detach().clone())
    return tables


def random_steps(
    n_rows: int, shape: tuple[int, ...], n_steps: int, size: int, scale: Callable[[int], float], seed: int = 0
) -> Steps:
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    steps = []
    for step in range(n_steps):
        row = rng.integers(n_rows, size=size)  # a row may be there twice
        steps.append((row, scale(step) * torch.randn((size, *shape), generator=torch_rng)))
    return steps


def lazy(value: Tensor, optimizer: Adam, rate: float, steps: int) -> LazyRows:
    return LazyRows(value, optimizer, rate, idle_moves(optimizer, rate, steps))


def assert_lazy_equals_dense(
    optimizer: Adam, rate: float, value: Tensor, steps: Steps, *, atol: float, rtol: float = 1e-5
) -> None:
    """At every read, and at the end."""
    expected = dense(optimizer, rate, value, steps)
    rows = lazy(value, optimizer, rate, len(steps))
    reads, before = [], []
    for step, (row, gradient) in enumerate(steps):
        reads.append(rows.read(row[None], step)[0])
        before.append((expected[step - 1] if step else value.double())[torch.from_numpy(row)])
        rows.step(row[None], gradient[None], step + 1)
    rows.settle(slice(0, len(value)), len(steps))
    torch.testing.assert_close(torch.stack(reads).double(), torch.stack(before), atol=atol, rtol=rtol)
    torch.testing.assert_close(rows.value.double(), expected[-1], atol=atol, rtol=rtol)


def table(n_rows: int, *shape: int, scale: float = 0.1) -> Tensor:
    return scale * torch.randn(n_rows, *shape, generator=torch.Generator().manual_seed(1))


# --- idle steps -------------------------------------------------------------------------------------------------------

BETAS = [(0.9, 0.999), (0.0, 0.999), (0.9, 0.9), (0.5, 0.9), (0.99, 0.9999), (0.9, 0.99), (0.99, 0.9)]


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5, 1e-7, 1e-8, 1e-12, 0.0])
def test_idle_rows_move_as_in_torch(scale: float, betas: tuple[float, float]) -> None:
    """120 steps on 20 rows of which 3 are in a batch; a step has size 0.01, so 2e-5 is 0.2 % of one."""
    optimizer = Adam(beta1=betas[0], beta2=betas[1])
    steps = random_steps(20, (5,), 120, 3, lambda step: scale)
    assert_lazy_equals_dense(optimizer, 0.01, table(20, 5), steps, atol=2e-5)


@pytest.mark.parametrize("betas", BETAS[:1] + BETAS[4:7], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-8])
def test_long_idle_stretches(scale: float, betas: tuple[float, float]) -> None:
    """All rows get gradients for a while, then nobody for 600 steps but one, then all again."""
    optimizer = Adam(beta1=betas[0], beta2=betas[1])
    first, last = (random_steps(12, (4,), 20, 12, lambda step: scale, seed) for seed in (0, 1))
    alone = [(np.zeros(12, np.int64), torch.full((12, 4), scale)) for _ in range(600)]
    assert_lazy_equals_dense(optimizer, 0.001, table(12, 4), first + alone + last, atol=2e-5)


@pytest.mark.heavy
def test_two_thousand_steps() -> None:
    """Rounding of each step, 1e-8 for values below 0.2, adds up to 1e-5 and less."""
    steps = random_steps(50, (3,), 2000, 5, lambda step: 1.0)
    assert_lazy_equals_dense(Adam(), 0.001, table(50, 3), steps, atol=2e-5)


def test_gradients_of_all_sizes() -> None:
    """The same row sees gradients of very different sizes, and zeros."""
    sizes = [1.0, 1e-4, 0.0, 1e-8, 1e2, 1e-6]
    steps = random_steps(10, (6,), 400, 3, lambda step: sizes[step * 7 // 3 % len(sizes)])
    assert_lazy_equals_dense(Adam(), 0.01, table(10, 6), steps, atol=5e-5)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-4, 1e-2, 1.0])
def test_epsilon(epsilon: float) -> None:
    steps = random_steps(30, (4,), 200, 3, lambda step: 1e-3)
    assert_lazy_equals_dense(Adam(epsilon=epsilon), 0.01, table(30, 4), steps, atol=2e-5)


def test_a_rate_of_zero_moves_nothing() -> None:
    value = table(20, 4)
    rows = lazy(value, Adam(), 0.0, 50)
    for step, (row, gradient) in enumerate(random_steps(20, (4,), 50, 3, lambda step: 1.0)):
        rows.read(row[None], step)
        rows.step(row[None], gradient[None], step + 1)
    rows.settle(slice(0, 20), 50)
    assert torch.equal(rows.value, value)


@pytest.mark.parametrize("shape", [(), (1,), (16,), (2, 3)], ids=str)
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    steps = random_steps(20, shape, 50, 4, lambda step: 1.0)
    assert_lazy_equals_dense(Adam(), 0.01, table(20, *shape), steps, atol=2e-5)


def test_the_gradient_that_is_handed_over_stays_as_it_is() -> None:
    """Two components may have one gradient in the same memory: s = a_i + b_i."""
    rows, row = lazy(table(5, 2), Adam(), 0.01, 3), np.array([1, 1, 2, 1])
    gradient = torch.ones(4, 2)
    rows.read(row[None], 0)
    rows.step(row[None], gradient[None], 1)
    assert torch.equal(gradient, torch.ones(4, 2))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n_rows=st.integers(1, 8),
    n_steps=st.integers(1, 40),
    size=st.integers(1, 6),
    log_scale=st.integers(-9, 2),
    betas=st.sampled_from(BETAS[:1] + BETAS[2:7]),
)
def test_any_pattern(
    seed: int, n_rows: int, n_steps: int, size: int, log_scale: int, betas: tuple[float, float]
) -> None:
    optimizer = Adam(beta1=betas[0], beta2=betas[1])
    steps = random_steps(n_rows, (3,), n_steps, size, lambda step: 10.0**log_scale, seed)
    assert_lazy_equals_dense(optimizer, 0.01, table(n_rows, 3), steps, atol=3e-5)


def test_a_stretch_may_be_settled_alone() -> None:
    """As when its client is done: what happens to the other rows later does not touch it."""
    optimizer, steps = Adam(), random_steps(10, (4,), 30, 3, lambda step: 1.0)
    rows = lazy(table(10, 4), optimizer, 0.01, 60)
    for step, (row, gradient) in enumerate(steps):
        rows.read(row[None], step)
        rows.step(row[None], gradient[None], step + 1)
    rows.settle(slice(6, 10), 30)
    settled = rows.value[6:].clone()
    expected = dense(optimizer, 0.01, table(10, 4), steps)[-1]
    torch.testing.assert_close(settled.double(), expected[6:], atol=2e-5, rtol=1e-5)
    for step, (row, gradient) in enumerate(random_steps(6, (4,), 20, 3, lambda step: 1.0, seed=5), start=30):
        rows.read(row[None], step)
        rows.step(row[None], gradient[None], step + 1)
    rows.settle(slice(0, 6), 50)
    assert torch.equal(rows.value[6:], settled)


def test_direct_rows_are_plain_gradient_descent() -> None:
    value, steps = table(20, 4), random_steps(20, (4,), 50, 6, lambda step: 1.0)
    expected = dense(SGD(), 0.1, value, steps)[-1]
    rows = DirectRows(value.clone(), 0.1)
    for step, (row, gradient) in enumerate(steps):
        rows.read(row[None], step)
        rows.step(row[None], gradient[None], step + 1)
    rows.settle(slice(0, 20), 50)
    torch.testing.assert_close(rows.value.double(), expected, atol=1e-5, rtol=1e-5)


# --- steps of whole tensors -------------------------------------------------------------------------------------------

SETTINGS: list[Optimizer] = [
    SGD(),
    SGD(momentum=0.9),
    SGD(weight_decay=0.1),
    SGD(momentum=0.5, weight_decay=0.1),
    Adam(),
    Adam(weight_decay=0.1),
    Adam(beta1=0.0),
    Adam(beta1=0.5, beta2=0.9, epsilon=1e-4),
    Adam(beta1=0.99, beta2=0.9999),
]
SHAPES: list[tuple[int, ...]] = [(3,), (3, 16), (3, 5), (2, 4, 8), (1, 1), (0, 4)]


@pytest.mark.parametrize("clock", ["one", "each"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("optimizer", SETTINGS, ids=str)
def test_step_equals_torch(optimizer: Optimizer, shape: tuple[int, ...], clock: str) -> None:
    """`time` may be a number, or one for each entry of the leading axis."""
    rng = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=rng)
    reference = nn.Parameter(value.double())
    with_torch = torch_optimizer(optimizer, 0.01, reference)
    moments = [torch.zeros(shape) for _ in optimizer.moments]
    for step in range(1, 31):
        gradient = torch.randn(shape, generator=rng)
        reference.grad = gradient.double()
        with_torch.step()
        step_(optimizer, 0.01, value, gradient, moments, step if clock == "one" else torch.full(shape[:1], step))
    torch.testing.assert_close(value.double(), reference.detach(), atol=5e-6, rtol=1e-5)


def test_each_entry_has_its_own_time() -> None:
    """Entries that began at different steps are stepped as if alone."""
    optimizer, rng = Adam(), torch.Generator().manual_seed(0)
    value, moments = torch.randn(3, 4, generator=rng), [torch.zeros(3, 4), torch.zeros(3, 4)]
    start = value.clone()
    ages = torch.tensor([0, 0, 0])
    seen: list[list[Tensor]] = [[], [], []]
    for active in (1, 1, 2, 3, 3, 2, 1):
        gradient = torch.randn(3, 4, generator=rng)
        ages[:active] += 1
        parts = [moment[:active] for moment in moments]
        step_(optimizer, 0.01, value[:active], gradient[:active], parts, ages[:active])
        for entry in range(active):
            seen[entry].append(gradient[entry])
    for entry, gradients in enumerate(seen):
        steps = [(np.array([0]), gradient[None]) for gradient in gradients]
        expected = dense(optimizer, 0.01, start[entry : entry + 1], steps)[-1]
        torch.testing.assert_close(value[entry : entry + 1].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("optimizer", SETTINGS, ids=str)
def test_several_tensors_at_once(optimizer: Optimizer) -> None:
    """One stepper over many steps, with rates of their own."""
    rng = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 16), "b": (4, 5), "c": (4,), "d": (4, 8, 2), "e": (0, 3)}
    rates = {"a": 0.01, "b": 0.02, "c": 0.01, "d": 0.0, "e": 0.02}
    start = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    values = {name: value.clone() for name, value in start.items()}
    moments = {name: [torch.zeros(shape) for _ in optimizer.moments] for name, shape in shapes.items()}
    stepper = Stepper(optimizer, rates, values, moments)
    walked = [{name: torch.randn(shape, generator=rng) for name, shape in shapes.items()} for _ in range(20)]
    for step, gradients in enumerate(walked, start=1):
        stepper.step(gradients, step)
    for name, value in values.items():
        reference = nn.Parameter(start[name].double())
        with_torch = torch_optimizer(optimizer, rates[name], reference)
        for gradients in walked:
            reference.grad = gradients[name].double()
            with_torch.step()
        torch.testing.assert_close(value.double(), reference.detach(), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 16, 16), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.5), Adam(), Adam(weight_decay=0.1)], ids=str)
def test_a_gradient_may_lie_otherwise_in_memory(optimizer: Optimizer, shape: tuple[int, int, int]) -> None:
    """Automatic differentiation of a linear layer under vmap gives transposed gradients."""
    rng = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape[0], shape[2], shape[1], generator=rng).transpose(1, 2)
    start = torch.randn(shape, generator=rng)
    results = []
    for layout in (gradient, gradient.contiguous()):
        value, moments = start.clone(), [torch.zeros(shape) for _ in optimizer.moments]
        step_(optimizer, 0.01, value, layout, moments, 1)
        results.append(value)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("size", [1, 3, 5, 16, 33])
@pytest.mark.parametrize("optimizer", SETTINGS, ids=str)
def test_no_bit_depends_on_the_other_clients(optimizer: Optimizer, size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(7, size, generator=rng), torch.randn(7, size, generator=rng)

    def after(places: slice, time: int | Tensor) -> Tensor:
        value = start[places].clone()
        moments = [0.1 * gradient[places].abs() for _ in optimizer.moments]
        step_(optimizer, 0.01, value, gradient[places].clone(), moments, time)
        return value

    for places in (slice(0, 1), slice(2, 5), slice(6, 7)):
        ages = torch.arange(3, 10)
        assert torch.equal(after(places, 4), after(slice(0, 7), 4)[places])
        assert torch.equal(after(places, ages[places]), after(slice(0, 7), ages)[places])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Adam(-0.1), "The learning rate learning_rate is -0.1, expected a finite number of at least 0"),
        (Adam(float("inf")), "learning_rate is inf"),
        (SGD(float("nan")), "learning_rate is nan"),
        (SGD(0.1, {"item": -1.0}), "The learning rate item is -1.0"),
        (SGD(weight_decay=-1.0), "weight_decay is -1.0, expected a finite number of at least 0"),
        (Adam(weight_decay=float("nan")), "weight_decay is nan"),
        (SGD(momentum=1.0), "momentum is 1.0, expected at least 0 and less than 1"),
        (SGD(momentum=-0.1), "momentum is -0.1"),
        (Adam(beta1=1.0), "beta1 is 1.0, expected at least 0 and less than 1"),
        (Adam(beta2=1.5), "beta2 is 1.5"),
        (Adam(epsilon=0.0), "epsilon is 0.0, expected a positive number"),
        (Adam(accumulate=True, keep=True), "accumulate is True with keep=True, expected one of them"),
    ],
)
def test_settings_that_cannot_be(optimizer: Optimizer, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(optimizer, {"item", "user"})


def test_a_rate_of_an_unknown_component_is_an_error() -> None:
    with pytest.raises(NotFoundError, match=r"Unknown component with a learning rate 'itme'\. Did you mean 'item'"):
        check(SGD(0.1, {"itme": 0.1}), {"item", "user"})


@pytest.mark.parametrize("optimizer", [*SETTINGS, Adam(keep=True), Adam(accumulate=True)], ids=str)
def test_sound_settings_pass(optimizer: Optimizer) -> None:
    check(optimizer, {"item"})
    check(replace(optimizer, learning_rates={"item": 0.0}), {"item"})


def test_rates_by_component() -> None:
    optimizer = Adam(0.1, {"item": 0.0})
    assert learning_rate(optimizer, "item") == 0.0
    assert learning_rate(optimizer, "user") == 0.1
