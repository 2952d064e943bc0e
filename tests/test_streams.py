"""The random numbers of clients: keyed by what they are for, and of the right law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

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


@pytest.mark.parametrize("block", [1, 5, 6, 7, 60, 1 << 18])
def test_draws_do_not_depend_on_the_size_of_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Streams.simulated(1, 2, CLIENTS)
    whole = [drawn.normal("noise", *rows(), (3, 2)), drawn.laplace("noise", *rows(), (3, 2))]
    monkeypatch.setattr(module, "_BLOCK", block)
    assert torch.equal(drawn.normal("noise", *rows(), (3, 2)), whole[0])
    assert torch.equal(drawn.laplace("noise", *rows(), (3, 2)), whole[1])


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


def test_extreme_bits_give_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(Streams, "_bits", lambda self, *key, bits=bits: np.full((4, 1), bits, np.uint64))
        drawn = Streams.from_os(4)
        assert drawn.normal("noise", *rows(4)).abs().max() < 9
        assert drawn.laplace("noise", *rows(4)).abs().max() < 37
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


def test_errors_say_what_to_do() -> None:
    drawn = Streams.simulated(1, 2, CLIENTS)
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=rf"Got client position {wrong}, expected 0 to 3.*Take the same"):
            drawn.normal("noise", torch.tensor([0, wrong]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="two vectors of one length"):
        drawn.normal("noise", torch.tensor([0, 1]), torch.tensor([0]))
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
