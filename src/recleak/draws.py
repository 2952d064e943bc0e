"""Noise from keys in one compiled pass: the hash of `random.bits`, then the quantile of a law, in float32.

A number is a function of its 64 bits alone, and these of their key. The compiler may reorder or fuse nothing here (no
fast arithmetic), so a number is the same to the last bit wherever it stands in an array and however that is cut, with
or without vector instructions.

Of the bits, the upper 52 count: u = (k + 1/2) / 2^52, in the open interval and symmetric around 1/2. Quantiles are
computed in float64 from the tail's side, where 2 min(u, 1 - u) is exact, with logarithms and rational functions without
branches, which the compiler turns into vector instructions. Against exact quantiles the float32 result is off by a
relative 7e-8 at most (6e-8 is the rounding to float32), in the far tails too.
"""

from __future__ import annotations

import hashlib
from math import log
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from recleak import random

if TYPE_CHECKING:
    F = TypeVar("F")

    def exact(function: F) -> F:
        """For the type checker; see below."""
        ...
else:
    import numba

    exact = numba.njit(cache=True, nogil=True, error_model="numpy")

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

UNIFORM, NORMAL, LAPLACE = 0, 1, 2  # the laws

_WIDTH = 1024  # numbers at a time, so that their bits stay in the innermost cache; the result does not depend on it
_GAMMA, _MIX_1, _MIX_2 = random._GAMMA, random._MIX_1, random._MIX_2
_S11, _S12, _S27, _S30, _S31, _S51, _S52 = (np.uint64(by) for by in (11, 12, 27, 30, 31, 51, 52))
_ONE = np.uint64(1)
_LOW_51 = np.uint64(2**51 - 1)
_SIGN = np.uint64(1 << 63)
_TWO_52, _BITS_OF_TWO_52 = 2.0**52, np.float64(2.0**52).view(np.uint64)
_BITS_OF_ROOT_HALF = np.float64(0.5**0.5).view(np.uint64)
_LOG_2 = log(2)


def start(label: str) -> np.uint64:
    """The state of `random.bits` with seed 0 and this label before the first word of the key."""
    return np.uint64(int.from_bytes(hashlib.sha256(f"0/{label}".encode()).digest()[:8], "little"))


@exact
def draw(law: int, state: np.uint64, key: U64, client: I64, item: I64, out: F32) -> None:
    """Set out[i, j], f32[n, size], to the number of (state, key[client[i]], item[i], j)."""
    flat = out.reshape(-1)
    bits = np.empty(_WIDTH, np.uint64)
    for begin in range(0, flat.size, _WIDTH):
        end = min(begin + _WIDTH, flat.size)
        _hash(state, key, client, item, out.shape[1], begin, bits[: end - begin])
        quantiles(law, bits[: end - begin], flat[begin:end])


@exact
def add(law: int, scale: np.float32, state: np.uint64, key: U64, client: I64, item: I64, out: F32) -> None:
    """Add scale times the numbers of `draw` to `out`; both operations round to float32, as torch does it in two."""
    flat = out.reshape(-1)
    bits, numbers = np.empty(_WIDTH, np.uint64), np.empty(_WIDTH, np.float32)
    for begin in range(0, flat.size, _WIDTH):
        end = min(begin + _WIDTH, flat.size)
        _hash(state, key, client, item, out.shape[1], begin, bits[: end - begin])
        quantiles(law, bits[: end - begin], numbers[: end - begin])
        for i in range(end - begin):
            flat[begin + i] += scale * numbers[i]


@exact
def quantiles(law: int, bits: U64, out: F32) -> None:
    """The numbers of given bits, u64[n], into f32[n]."""
    if law == LAPLACE:
        for i in range(bits.size):
            out[i] = _laplace(bits[i])
    elif law == NORMAL:
        for i in range(bits.size):
            out[i] = _normal(bits[i])
    else:
        for i in range(bits.size):
            out[i] = _uniform(bits[i])


@exact
def _hash(state: np.uint64, key: U64, client: I64, item: I64, size: int, begin: int, out: U64) -> None:
    """The bits of the numbers from `begin` on, counted along rows of `size`; the words of a row are hashed once."""
    done = 0
    row, place = begin // size, begin % size
    while done < out.size:
        of_client = _finalize((state ^ key[client[row]]) + _GAMMA)
        of_row = _finalize((of_client ^ np.uint64(item[row])) + _GAMMA)
        count = min(size - place, out.size - done)
        for j in range(count):
            out[done + j] = _finalize(_finalize((of_row ^ np.uint64(place + j)) + _GAMMA) + _GAMMA)
        done += count
        row, place = row + 1, 0


@exact
def _finalize(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@exact
def _uniform(bits: np.uint64) -> float:
    return (_float(bits >> _S12) + 0.5) * 2.0**-52


@exact
def _laplace(bits: np.uint64) -> float:
    """sign(u - 1/2) times -log(2 min(u, 1 - u))."""
    return _signed(_minus_log(_tail(bits)), bits)


@exact
def _normal(bits: np.uint64) -> float:
    """t r(w) with t = 2u - 1 and w = -log(1 - t^2) = -log(4 u (1 - u)), which is smooth in w (see Giles 2010).

    r is a rational function fitted to the quantile over t for w from 0 to 36.2 (u = 2^-53 has w = 35.4): relative
    error at most 4.6e-9. All its coefficients are positive, so nothing cancels.
    """
    tail = _tail(bits)
    share = tail * 2.0**-52  # 2 min(u, 1 - u), and 1 - |t|
    w = _minus_log(tail * (2 - share))
    upper = 7.1957583694e-06 + w * 6.148998558e-08
    upper = 0.0021020132678 + w * (0.00015309845647 + w * upper)
    upper = 1.2533141396 + w * (0.53271982391 + w * (0.12212761152 + w * (0.019145881546 + w * upper)))
    lower = 6.2923256055e-07 + w * 1.2872286664e-09
    lower = 0.0004309482035 + w * (2.7474233743e-05 + w * lower)
    lower = 1 + w * (0.16324962433 + w * (0.041672467059 + w * (0.0048751115751 + w * lower)))
    return _signed((1 - share) * upper / lower, bits)


@exact
def _tail(bits: np.uint64) -> float:
    """2^53 min(u, 1 - u): an odd whole number below 2^52."""
    k = bits >> _S12
    low = k ^ (_LOW_51 * (k >> _S51))  # the lower 51 bits, from the end of the tail in both halves
    return _float(((low & _LOW_51) << _ONE) | _ONE)


@exact
def _signed(size: float, bits: np.uint64) -> float:
    """Negative where u < 1/2, that is where the first bit is 0."""
    return np.uint64(np.float64(size).view(np.uint64) | (~bits & _SIGN)).view(np.float64)


@exact
def _float(whole: np.uint64) -> float:
    """A whole number below 2^52: the lower bits of 2^52 + whole."""
    return np.uint64(whole | _BITS_OF_TWO_52).view(np.float64) - _TWO_52


@exact
def _minus_log(x: float) -> float:
    """-log(x / 2^52) for x from 1 to 2^52: x = 2^e f, with f from sqrt(1/2) to sqrt 2, and log f = 2 artanh(s).

    The series of artanh is cut after s^11, which is a relative 6e-11 at s = 0.172, the largest.
    """
    bits = np.float64(x).view(np.uint64)
    e = (bits - _BITS_OF_ROOT_HALF) >> _S52
    f = np.uint64(bits - (e << _S52)).view(np.float64)
    s = (f - 1) / (f + 1)
    q = s * s
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11)))))
    return (52 - _float(e)) * _LOG_2 - 2 * s * series
