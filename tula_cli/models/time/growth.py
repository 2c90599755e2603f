"""Growth of time and memory with the text length: a sample of length L takes a L + b L^2, the square being attention's.

A step of m samples takes c + m (a L + b L^2), where c depends neither on the batch nor on the length.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[int, float, float]
"""Length, samples, and the measured value (seconds, or bytes)."""


@dataclass(frozen=True)
class LengthGrowth:
    """The coefficients, non-negative, in the unit of the fitted values."""

    fixed: float
    linear: float  # of a sample, by its length
    square: float  # of a sample, by the square of its length
    error: float | None  # median relative residual; None where as many points as coefficients leave none

    def __call__(self, length: int, samples: float) -> float:
        return self.fixed + samples * length * (self.linear + self.square * length)

    def quadratic_share(self, length: int) -> float:
        """Return the share of a sample's value that grows with the square of the length."""
        total = self.linear + self.square * length
        return self.square * length / total if total else 0.0


def fit_length_growth(points: Sequence[Point]) -> LengthGrowth | None:
    """Fit the growth by least squares of relative residuals; None with fewer than two lengths or three points.

    Args:
        points: at several lengths; values must be positive.
    """
    lengths, samples, values = (np.array(column, dtype=float) for column in zip(*points, strict=True)) if points else [np.zeros(0)] * 3  # fmt: skip
    if len(set(lengths.tolist())) < 2 or len(points) < 3:
        return None
    design = np.column_stack([np.ones_like(lengths), samples * lengths, samples * lengths**2]) / values[:, None]
    fixed, linear, square = _solve_non_negative_least_squares(design, np.ones_like(values))
    off = np.abs(design @ [fixed, linear, square] - 1)
    return LengthGrowth(fixed, linear, square, float(np.median(off)) if len(points) > 3 else None)


def _solve_non_negative_least_squares(design: np.ndarray, target: np.ndarray) -> tuple[float, float, float]:
    """Return the least-squares solution with non-negative coefficients: the best over all subsets of columns."""
    best, least = np.zeros(3), float("inf")
    scale = np.linalg.norm(design, axis=0)
    for count in (1, 2, 3):
        for columns in map(list, itertools.combinations(range(3), count)):
            coefficients = np.zeros(3)
            coefficients[columns] = (
                np.linalg.lstsq(design[:, columns] / scale[columns], target, rcond=None)[0] / scale[columns]
            )
            residual = float(np.sum((design @ coefficients - target) ** 2))
            if coefficients.min() >= 0 and residual < least:
                best, least = coefficients, residual
    return float(best[0]), float(best[1]), float(best[2])
