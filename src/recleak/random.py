"""Random numbers that are a pure function of what they are for.

A simulated client draws from its own stream, keyed by (seed, purpose, client, ...). Nothing depends on the order in
which clients or rows are visited, on how they are chunked, or on whether another purpose draws more or less: switching
noise on leaves negatives and shuffles as they were. A real device draws from the operating system instead.

The generator is a counter-based hash: the words of the key go one by one through the finalizer of SplitMix64 (Steele,
Lea and Flood 2014). It is for simulation, not for cryptography.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _finalize(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def bits(seed: int, purpose: str, *key: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for every element of the broadcast key of integers; equal keys give equal bits."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    state = np.array(np.frombuffer(digest[:8], dtype="<u8")[0], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in key:
            state = _finalize((state ^ np.asarray(word).astype(np.uint64)) + _GAMMA)
        return _finalize(state + _GAMMA)


def uniform(seed: int, purpose: str, *key: ArrayLike) -> NDArray[np.float64]:
    """A uniform number in [0, 1) for every element of the broadcast key."""
    return (bits(seed, purpose, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bound: ArrayLike, seed: int, purpose: str, *key: ArrayLike) -> NDArray[np.int64]:
    """A uniform integer in [0, bound) for every element of the broadcast key; a bias of at most bound / 2^53."""
    scaled: NDArray[np.float64] = uniform(seed, purpose, *key) * np.asarray(bound)
    return scaled.astype(np.int64)


def normal(seed: int, purpose: str, *key: ArrayLike) -> NDArray[np.float64]:
    """A standard normal number for every element of the broadcast key: the quantile of a uniform number in (0, 1)."""
    centred = ((bits(seed, purpose, *key) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    quantile: NDArray[np.float64] = ndtri(centred)
    return quantile
