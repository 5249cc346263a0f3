"""How far apart two runs may be because of rounding alone, measured on the reference and its float64 run.

The distance between the reference and its float64 run is one sample of the rounding error of each tensor. A layout's rounding error is
another sample from about the same distribution, so the squared ratio of both follows an F distribution. The variance of a single
tensor is moderated by those of the other tensors of the stage, which matters for tensors of a few elements, whose error may be almost
zero by chance.

Source: Smyth, "Linear models and empirical Bayes methods for assessing differential expression" (2004), equations for the moderated
variance and its prior degrees of freedom; here with the median and the median absolute deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import torch

_MAX_FREEDOM = 1e6  # in place of infinitely many degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The rounding error of one tensor of the reference."""

    norm: float
    error: float
    """Distance to the float64 run; 0.0 if it was not measured."""
    freedom: int
    """Degrees of freedom of ``error``: number of elements, at most that of the sketch."""
    floor: float
    """Relative error that rounding always explains: unit roundoff times the square root of the reduction depth."""


class RoundingModel:
    """Rounding errors of the tensors of one stage in one update."""

    def __init__(self, measurements: Sequence[Measurement], *, probability: float) -> None:
        """Fit the prior to the tensors that have a norm.

        Args:
            measurements: all tensors of the stage.
            probability: of exceeding the allowed distance in one comparison.
        """
        self._probability = probability
        logs: list[float] = []
        trigammas: list[float] = []
        self._prior_freedom = 0.0
        self._prior_square = 0.0
        total = 0
        for one in measurements:
            if one.norm <= 0 or one.freedom <= 0:
                continue
            relative = max(one.error / one.norm, one.floor)
            half = one.freedom / 2
            logs.append(2 * math.log(relative) - _digamma(half) + math.log(half))
            trigammas.append(_trigamma(half))
            total += one.freedom
        if not logs:
            return
        center = median(logs)
        spread = (1.4826 * median([abs(value - center) for value in logs])) ** 2 - sum(trigammas) / len(trigammas)
        half_prior = _inverse_trigamma(spread) if spread > 0 else _MAX_FREEDOM
        # No more than what has been measured: a single tensor has no spread, and is no proof that there is none.
        self._prior_freedom = min(2 * half_prior, float(total))
        half = self._prior_freedom / 2
        self._prior_square = math.exp(center + _digamma(half) - math.log(half))

    def allowed(self, one: Measurement) -> float:
        """Return the greatest distance to the reference ``one`` that rounding explains."""
        if one.freedom <= 0:
            return 0.0
        scale = one.norm * one.norm
        own = max(one.error * one.error, one.floor * one.floor * scale)
        weight = self._prior_freedom
        square = (weight * self._prior_square * scale + one.freedom * own) / (weight + one.freedom)
        # The prior leaves out tensors whose error is far from the median (gradients that cancel); they count by their own error.
        square = max(square, own)
        quantile = f_quantile(self._probability, one.freedom, weight + one.freedom)
        # Both runs have rounding errors of their own, hence twice the variance.
        return math.sqrt(2 * square * quantile)


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype by its name (``"torch.bfloat16"``); 0.0 for integers."""
    bits = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11, "float8_e4m3fn": 4, "float8_e5m2": 3}
    return 2.0 ** -bits[dtype.removeprefix("torch.")] if dtype.removeprefix("torch.") in bits else 0.0


@lru_cache(maxsize=4096)
def _f_quantile(log_probability: float, numerator: int, denominator: int) -> float:
    low, high = 0.0, 1.0
    target = math.exp(log_probability)
    while _f_tail(math.exp(high), numerator, denominator) > target and high < 200:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _f_tail(math.exp(middle), numerator, denominator) > target:
            low = middle
        else:
            high = middle
    return math.exp(high)


def f_quantile(probability: float, numerator: float, denominator: float) -> float:
    """Return x with P(F > x) = ``probability`` for an F distribution, at least 1."""
    return _f_quantile(round(math.log(probability), 1), max(1, round(numerator)), max(1, round(denominator)))


def _f_tail(x: float, numerator: float, denominator: float) -> float:
    return _incomplete_beta(denominator / 2, numerator / 2, denominator / (denominator + numerator * x))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 2000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away_from_zero(1 + even * d, tiny)
        c = _away_from_zero(1 + even / c, tiny)
        fraction *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + odd * d, tiny)
        c = _away_from_zero(1 + odd / c, tiny)
        fraction *= d * c
        if abs(d * c - 1) < 1e-12:
            break
    return front * fraction


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


@lru_cache(maxsize=4096)
def _digamma(x: float) -> float:
    return float(torch.digamma(torch.tensor(x, dtype=torch.float64)))


@lru_cache(maxsize=4096)
def _trigamma(x: float) -> float:
    return float(torch.polygamma(1, torch.tensor(x, dtype=torch.float64)))


def _inverse_trigamma(value: float) -> float:
    low, high = 1e-3, _MAX_FREEDOM
    for _ in range(100):
        middle = math.sqrt(low * high)
        if _trigamma(middle) > value:
            low = middle
        else:
            high = middle
    return high
