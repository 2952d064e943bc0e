"""Compiled draws against numpy and scipy: the same bits, accurate quantiles, and nothing that depends on the place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special

from recleak import draws, random
from recleak.draws import F32, I64, LAPLACE, NORMAL, U64, UNIFORM

F64 = NDArray[np.float64]
LAWS = pytest.mark.parametrize("law", [UNIFORM, NORMAL, LAPLACE], ids=["uniform", "normal", "laplace"])
KEY = random.bits(1, "keys", np.arange(5))


def unit(bits: U64) -> F64:
    """52 bits and a half, exact in float64: the open interval, symmetric around 1/2."""
    unit: F64 = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return unit


def expected(law: int, bits: U64) -> F64:
    """The quantiles by scipy, in float64."""
    u = unit(bits)
    if law == UNIFORM:
        return u
    t = 2 * u - 1  # exact
    quantile: F64 = special.ndtri(u) if law == NORMAL else -np.sign(t) * special.log1p(-np.abs(t))
    return quantile


def quantiles(law: int, bits: U64) -> F32:
    out = np.full(bits.shape, np.nan, np.float32)
    draws.quantiles(law, bits, out)
    return out


def drawn(law: int, label: str, client: I64, item: I64, size: int) -> F32:
    out = np.full((len(client), size), np.nan, np.float32)
    draws.draw(law, draws.start(label), KEY, client, item, out)
    return out


def telling_bits() -> U64:
    """Random bits; both tails and the middle number by number; the neighbourhoods of all powers of two."""
    k = np.arange(2000)
    places = np.concatenate([2**j + np.arange(-8, 8) for j in range(4, 52)] + [k, 2**51 + k - 1000])
    places = np.concatenate([places, 2**52 - 1 - places]).astype(np.uint64) << np.uint64(12)
    scaled = random.bits(0, "scales", np.arange(200_000))
    scaled >>= np.arange(200_000).astype(np.uint64) % np.uint64(50)  # every tail down to the last
    return np.concatenate([random.bits(0, "telling", np.arange(200_000)), places, scaled, ~scaled])


@given(
    st.text(),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 7, 64, 341, 1023, 1024, 1025, 2500]),
)
def test_bits_are_those_of_the_plain_hash(label: str, rows: list[tuple[int, int]], size: int) -> None:
    client, item = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    plain = random.bits(0, label, KEY[client][:, None], item[:, None], np.arange(size))
    for begin in {0, size // 2, size * len(rows) - 1}:
        bits = np.zeros(size * len(rows) - begin, np.uint64)
        draws._hash(draws.start(label), KEY, client, item, size, begin, bits)
        assert np.array_equal(bits, plain.ravel()[begin:])


@LAWS
def test_draws_are_the_quantiles_of_the_plain_hash(law: int) -> None:
    for n, size in [(1, 1), (5000, 1), (3, 1024), (700, 3), (2, 3001), (40, 64)]:
        client, item = np.arange(n) % 5, np.arange(n) * 7 - 20
        bits = random.bits(0, "a label", KEY[client][:, None], item[:, None], np.arange(size))
        assert np.array_equal(drawn(law, "a label", client, item, size), quantiles(law, bits.ravel()).reshape(n, size))


@LAWS
def test_quantiles_are_accurate_to_float32_also_far_in_the_tails(law: int) -> None:
    bits = telling_bits()
    right = expected(law, bits)
    error = np.abs(quantiles(law, bits).astype(np.float64) / right - 1)
    assert error.max() < 7e-8, "rounding to float32 alone is 6e-8"
    assert unit(bits).min() == 2.0**-53, "the last of the tail was among them"


def test_uniform_numbers_are_the_rounded_ones() -> None:
    bits = telling_bits()
    assert np.array_equal(quantiles(UNIFORM, bits), unit(bits).astype(np.float32))


@pytest.mark.parametrize("law", [NORMAL, LAPLACE], ids=["normal", "laplace"])
def test_the_upper_half_mirrors_the_lower(law: int) -> None:
    bits = telling_bits()
    assert np.array_equal(quantiles(law, ~bits), -quantiles(law, bits))
    assert np.array_equal(quantiles(law, bits) > 0, unit(bits) > 0.5)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_every_number_is_finite_and_within_its_range(words: list[int]) -> None:
    bits = np.array([*words, 0, 2**64 - 1, 2**63, 2**63 - 1, 2**63 - 2**12, 2**12 - 1], np.uint64)
    for law, most in ((UNIFORM, 1.0), (NORMAL, 8.21), (LAPLACE, 36.1)):
        numbers = quantiles(law, bits)
        assert np.isfinite(numbers).all()
        assert (numbers != 0).all()
        assert np.abs(numbers).max() <= most


@LAWS
def test_a_number_does_not_depend_on_its_place_in_an_array(law: int) -> None:
    """Vector instructions take what fills them, others the rest; numbers must not show which."""
    bits = random.bits(0, "places", np.arange(1100))
    alone = np.concatenate([quantiles(law, bits[i : i + 1]) for i in range(len(bits))])
    for offset in range(34):
        for end in (offset + 1, offset + 7, 67, 255, 1025, 1100):
            assert np.array_equal(quantiles(law, bits[offset:end]), alone[offset:end])
    out = np.zeros(1101, np.float32)  # nor on where the result goes
    for offset in range(1, 20):
        draws.quantiles(law, bits[: 1101 - offset], out[offset:])
        assert np.array_equal(out[offset:], alone[: 1101 - offset])


@LAWS
def test_draws_side_by_side_are_those_of_one_call(law: int) -> None:
    client, item = np.arange(997) % 5, np.arange(997)
    together = drawn(law, "threads", client, item, 33)
    cuts = [slice(begin, begin + 37) for begin in range(0, 997, 37)]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda cut: drawn(law, "threads", client[cut], item[cut], 33), cuts))
    assert np.array_equal(np.concatenate(parts), together)
    narrow = drawn(law, "threads", client, item, 5)
    assert np.array_equal(narrow, together[:, :5]), "a coordinate is its own, however many there are"


@LAWS
@pytest.mark.parametrize("shape", [(1, 1), (13, 5), (2, 1024), (31, 100), (1500, 1), (0, 4), (4, 0)])
def test_adding_in_place_is_drawing_then_adding(law: int, shape: tuple[int, int]) -> None:
    n, size = shape
    client, item = np.arange(n) % 5, np.arange(n)
    before = (100 * random.normal(0, "before", np.arange(n)[:, None], np.arange(size))).astype(np.float32)
    for scale in (np.float32(0.3), np.float32(-17.0), np.float32(0)):
        after = before.copy()
        draws.add(law, scale, draws.start("add"), KEY, client, item, after)
        assert np.array_equal(after, before + scale * drawn(law, "add", client, item, size))
