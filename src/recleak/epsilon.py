"""Epsilon of composed mechanisms, and the noise for an epsilon."""

from __future__ import annotations

from math import inf, isfinite, sqrt

_LARGE = 20.0  # an epsilon of one use above which optimal composition gains nothing over the sum


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """The smallest epsilon at `delta` of Gaussian noise, for a sensitivity of `ratio` standard deviations.

    delta = Phi(ratio / 2 - epsilon / ratio) - e^epsilon Phi(-ratio / 2 - epsilon / ratio) (Balle and Wang 2018, th. 8).
    """
    import dp_accounting

    return 0.0 if ratio == 0 else float(dp_accounting.get_epsilon_gaussian(1 / ratio, delta))


def noise_multiplier_for(epsilon: float, delta: float, uses: int) -> float:
    """The least standard deviation of Gaussian noise, in sensitivities, for (epsilon, delta) after so many uses.

    k uses are one of sqrt(k) times the sensitivity (Dong, Roth and Su 2022, corollary 3.3), so that the equation of
    `gaussian_epsilon` is solved for the ratio.
    """
    if not (isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"Got epsilon={epsilon}, expected a finite number above 0.")
    if not 0 < delta < 1:
        raise ValueError(f"Got delta={delta}, expected a number between 0 and 1, far below 1 / users.")
    if uses < 1:
        raise ValueError(f"Got {uses} uses, expected at least 1: how often noise is added to what tells of the same.")
    import dp_accounting

    return sqrt(uses) * float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def pure_epsilon(once: float, times: int, delta: float) -> tuple[float, float, str]:
    """Epsilon and delta of so many uses of a pure epsilon, and by which theorem: the smaller epsilon of two.

    The sum, at delta 0; or the optimal composition at `delta` (Kairouz, Oh and Viswanath 2015, theorem 3.3), where each
    use has a loss of +epsilon or -epsilon: a grid of that step holds their sum exactly.
    """
    total, best = once * times, inf
    if times > 1 and 0 < once <= _LARGE:
        from dp_accounting.pld import common, privacy_loss_distribution

        one = privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(once, 0), value_discretization_interval=once
        )
        best = float(one.self_compose(times).get_epsilon_for_delta(delta))
    if best < 0.99 * total:
        return best, delta, "Composed optimally at this delta (Kairouz, Oh and Viswanath 2015)."
    return total, 0.0, "Composed by adding up: delta is 0."
