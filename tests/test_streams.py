"""The random numbers of clients: keyed by what they are for, and of the right law."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from recleak import random
from recleak import streams as module
from recleak.streams import Streams
from recleak.testing import example_update

CLIENTS = np.array([3, 7, 8, 40])


def rows(n: int = 12) -> tuple[Tensor, Tensor]:
    """Positions 0 to 3 in turn, items 0, 5, 10, ..."""
    return torch.arange(n) % 4, torch.arange(n) * 5


def test_draws_do_not_depend_on_chunk_order_or_other_rows() -> None:
    position, row = rows()
    for kind in ("normal", "laplace", "uniform"):
        together = getattr(Streams.simulated(1, 2, CLIENTS), kind)("noise", position, row, (3, 2))
        assert together.shape == (12, 3, 2)
        assert together.dtype == torch.float32
        for k in range(12):
            alone = Streams.simulated(1, 2, [CLIENTS[int(position[k])]])
            one = getattr(alone, kind)("noise", torch.zeros(1, dtype=torch.int64), row[k : k + 1], (3, 2))
            assert torch.equal(one[0], together[k])
        order = torch.arange(12).flip(0)
        flipped = getattr(Streams.simulated(1, 2, CLIENTS), kind)("noise", position[order], row[order], (3, 2))
        assert torch.equal(flipped, together[order])


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform"])
def test_draws_are_quantiles_of_the_bits_of_their_key(kind: str) -> None:
    law = {"normal": stats.norm, "laplace": stats.laplace, "uniform": stats.uniform}[kind]
    drawn = Streams.simulated(1, 2, CLIENTS).within("a").at(3)
    assert drawn.key is not None
    position, row = rows(500)
    label = repr(("a", "noise", kind))
    bits = random.bits(0, label, drawn.key[position.numpy(), None], row.numpy()[:, None], np.arange(6))
    expected = law.ppf(((bits >> np.uint64(12)) + 0.5) * 2.0**-52).reshape(500, 3, 2)
    np.testing.assert_allclose(getattr(drawn, kind)("noise", position, row, (3, 2)).numpy(), expected, rtol=2e-7)


@pytest.mark.parametrize("block", [1, 5, 6, 7, 60, 1 << 18])
def test_a_device_uses_each_byte_of_the_operating_system_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    left = bits = random.bits(0, "bytes", np.arange(72))

    def urandom(count: int) -> bytes:
        nonlocal left
        given, left = left[: count // 8], left[count // 8 :]
        return given.tobytes()

    monkeypatch.setattr("os.urandom", urandom)
    drawn = Streams.from_os(4).laplace("noise", *rows(), (3, 2)).numpy().ravel()
    assert not len(left)
    np.testing.assert_allclose(drawn, stats.laplace.ppf(((bits >> np.uint64(12)) + 0.5) * 2.0**-52), rtol=2e-7)
    left, out = bits, torch.ones(12, 3, 2)
    Streams.from_os(4).add_laplace(out, 0.3, "noise", *rows())
    assert not len(left)
    assert torch.equal(out, 1 + 0.3 * torch.from_numpy(drawn).reshape(12, 3, 2))


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (67,), (1030,), (0,)])
def test_adding_in_place_is_drawing_then_adding(kind: str, shape: tuple[int, ...]) -> None:
    drawn = Streams.simulated(1, 2, CLIENTS)
    position, row = rows(37)
    noise = getattr(drawn, kind)("noise", position, row, shape)
    before = drawn.normal("before", position, row, shape) * 10
    wide = before.new_zeros(37, *shape, 2)
    spread = wide[..., 1]  # not contiguous
    graph = before.clone().requires_grad_() * 1.0
    for out in (before.clone(), spread.copy_(before), before.double(), graph):
        version = out._version
        getattr(drawn, f"add_{kind}")(out, 0.37, "noise", position, row)
        assert torch.equal(out, before.to(out.dtype) + 0.37 * noise.to(out.dtype))
        assert out._version > version, "automatic differentiation must know of the change"
    assert (wide[..., 0] == 0).all()


def test_working_memory_does_not_grow_with_what_is_added() -> None:
    n, out = 4000, torch.zeros(4000, 1000)
    for drawn in (Streams.simulated(1, 2, CLIENTS), Streams.from_os(4)):
        drawn.add_laplace(out[:1], 1.0, "noise", *rows(1))  # compiles
        tracemalloc.start()
        drawn.add_laplace(out, 1.0, "noise", *rows(n))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8e6, "16 MB were changed; a block of bits from the operating system is 2 MB"


def test_every_part_of_the_key_matters() -> None:
    def first(drawn: Streams, purpose: str = "noise", position: int = 0, row: int = 0) -> tuple[float, ...]:
        numbers: list[float] = drawn.normal(purpose, torch.tensor([position]), torch.tensor([row]), (4,))[0].tolist()
        return tuple(numbers)

    base = Streams.simulated(1, 2, CLIENTS)
    drawn = [
        first(base),
        first(Streams.simulated(2, 2, CLIENTS)),
        first(Streams.simulated(1, 3, CLIENTS)),
        first(base, position=1),
        first(base, row=1),
        first(base, "other"),
        first(base.within("a")),
        first(base.within("b")),
        first(base.within("a").within("b")),
        first(base.within("a/b")),
        first(base.within("a"), "b/noise"),
        first(base.at(0)),
        first(base.at(1)),
        first(base.at(1).at(0)),
        first(base.at(0).at(1)),
    ]
    assert len(set(drawn)) == len(drawn)
    assert all(len(set(numbers)) == 4 for numbers in drawn)
    assert first(base.at(torch.tensor([1, 0, 0, 0]))) == first(base.at(1))
    assert first(base.at(1).within("a")) == first(base.within("a").at(1))
    assert first(base.select(torch.tensor([2, 1])), position=1) == first(base, position=1)


def test_kinds_of_draws_are_independent() -> None:
    drawn = Streams.simulated(1, 2, CLIENTS)
    uniform = drawn.uniform("noise", *rows(4000)).double().numpy()
    for other in (drawn.normal("noise", *rows(4000)), drawn.laplace("noise", *rows(4000))):
        assert abs(stats.spearmanr(uniform, other.numpy()).statistic) < 0.06


@pytest.mark.parametrize(
    "drawn", [Streams.simulated(0, 0, np.arange(4)), Streams.from_os(4)], ids=["simulated", "operating system"]
)
def test_laws(drawn: Streams) -> None:
    laws = {"normal": stats.norm, "laplace": stats.laplace, "uniform": stats.uniform}
    for kind, law in laws.items():
        numbers = getattr(drawn, kind)("noise", *rows(5000), (4,)).double().numpy().ravel()
        assert stats.kstest(numbers, law.cdf).pvalue > 1e-8
        assert stats.kstest(numbers * 1.5, law.cdf).pvalue < 1e-8  # the test has power
    normal = drawn.normal("noise", *rows(5000), (4,)).double().numpy()
    assert np.abs(np.corrcoef(normal.T) - np.eye(4)).max() < 0.08


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_tails(kind: str) -> None:
    law = {"normal": stats.norm, "laplace": stats.laplace}[kind]
    n = 1 << 25
    position = torch.zeros(n >> 10, dtype=torch.int64)
    numbers = getattr(Streams.simulated(0, 0, [1]), kind)("noise", position, torch.arange(n >> 10), (1 << 10,))
    for probability in (1e-2, 1e-4, 1e-6):
        far = float(law.isf(probability))
        for count in ((numbers > far).sum(), (numbers < -far).sum()):
            assert stats.binomtest(int(count), n, probability).pvalue > 1e-6
            assert stats.binomtest(int(count), n, 3 * probability).pvalue < 1e-6  # the test has power


def test_extreme_bits_give_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr("os.urandom", lambda count, byte=byte: byte * count)
        drawn = Streams.from_os(4)
        assert 8.2 < drawn.normal("noise", *rows(4)).abs().max() < 8.21
        assert 36 < drawn.laplace("noise", *rows(4)).abs().max() < 36.1
        assert drawn.uniform("noise", *rows(4)).min() > 0


def test_device_never_draws_the_same_twice() -> None:
    device = Streams.from_os()
    where = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    drawn = {tuple(device.normal("noise", *where, (3,))[0].tolist()) for _ in range(50)}
    assert len(drawn) == 50
    assert device.within("a").at(3).select([0, 0]).n_clients == 2


def test_draws_like_an_update_have_its_shapes_and_are_keyed_by_item() -> None:
    update = example_update()
    drawn = Streams.simulated(1, 2, update.client)
    for name in update.names():
        tensor = update.values[name] if name in update.values else update.rows[name]
        assert drawn.normal_like(update, name).shape == tensor.shape
        assert drawn.laplace_like(update, name).shape == tensor.shape
    everywhere = drawn.normal_like(update.with_all_rows(), "item")
    assert torch.equal(everywhere[update.owner * update.n_items + update.item], drawn.normal_like(update, "item"))


def test_nothing_to_draw() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    drawn = Streams.simulated(1, 2, CLIENTS)
    assert drawn.normal("noise", none, none, (3,)).shape == (0, 3)
    assert drawn.normal("noise", *rows(), (0,)).shape == (12, 0)
    drawn.add_normal(torch.zeros(0, 3), 1.0, "noise", none, none)


def test_errors_say_what_to_do() -> None:
    drawn = Streams.simulated(1, 2, CLIENTS)
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=rf"Got client position {wrong}, expected 0 to 3.*Take the same"):
            drawn.normal("noise", torch.tensor([0, wrong]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="two vectors of one length"):
        drawn.normal("noise", torch.tensor([0, 1]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"shape \(3, 2\) and positions \(2,\), expected a position for each row"):
        drawn.add_laplace(torch.zeros(3, 2), 1.0, "noise", torch.tensor([0, 1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="Got client position 4, expected 0 to 3"):
        drawn.add_laplace(torch.zeros(1, 2), 1.0, "noise", torch.tensor([4]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"Got moments of shape \(2,\), expected \(4,\)"):
        drawn.at([1, 2])


def test_lasting_draws_are_the_same_in_every_round() -> None:
    position, row = torch.tensor([0, 1, 2]), torch.tensor([5, 5, 9])
    client = np.array([3, 8, 11])

    def drawn(streams: Streams) -> Tensor:
        return streams.normal("x", position, row, (4,))

    rounds = [Streams.simulated(1, each, client) for each in (0, 4)]
    first, second = (drawn(each.at(2).within("a").lasting()) for each in rounds)
    assert torch.equal(first, second)
    assert not torch.equal(*(drawn(each) for each in rounds))
    assert not torch.equal(first, drawn(rounds[0].within("a"))), "nor those of the first round"
    assert not torch.equal(first, drawn(rounds[0].within("b").lasting())), "a purpose of its own"
    assert torch.equal(drawn(rounds[1].select([2, 0, 1]).lasting())[1], drawn(rounds[0].lasting())[0])
