"""Places on the earth, and the way between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EARTH = 6371.0088  # km: the mean radius


def on_sphere(latitude: NDArray[np.float64], longitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Degrees as points of the unit sphere, f64[n, 3]."""
    north, east = np.radians(latitude), np.radians(longitude)
    return np.stack([np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)], axis=-1)


def kilometers(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """The way between points of the unit sphere, f64[n, 3] each -> f64[n]: the haversine formula.

    2 R asin sqrt(h) with h = sin^2(dlat / 2) + cos lat cos lat' sin^2(dlon / 2), which is |x - x'|^2 / 4.

    >>> paris, london = on_sphere(np.array([48.8566, 51.5074]), np.array([2.3522, -0.1278]))
    >>> round(float(kilometers(paris, london)))
    344
    """
    half = np.sqrt(np.square(one - other).sum(-1)) / 2
    way: NDArray[np.float64] = 2 * EARTH * np.arcsin(np.minimum(half, 1))
    return way
