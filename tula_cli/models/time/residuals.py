"""Residuals of the step-time model: Gaussian processes."""

from dataclasses import dataclass

import numpy as np

from tula_cli.models.time.priors import Floats, Local, Priors, Smooth


@dataclass(frozen=True)
class Process:
    """A Gaussian process over a logarithm with its values at some places as whitened coordinates."""

    places: Floats
    sd: float
    length: float
    white: float
    _root: Floats  # lower Cholesky factor of the covariance at the places

    @classmethod
    def over(cls, positions: Floats, residual: Smooth) -> "Process":
        unique = np.unique(positions)
        sd, length, white = residual.sd, residual.length, residual.white
        process = cls(unique, sd, length, white, np.zeros((0, 0)))
        covariance = process._covariance(unique, unique) + 1e-10 * np.eye(len(unique))
        return cls(unique, sd, length, white, np.asarray(np.linalg.cholesky(covariance), dtype=float))

    def map(self, at: Floats) -> Floats:
        """Return the matrix, shape (n, places), that takes coordinates to the expected values at `at`."""
        if not len(self.places):
            return np.zeros((len(at), 0))
        distinct, where = np.unique(at, return_inverse=True)
        mapped = np.asarray(np.linalg.solve(self._root, self._covariance(self.places, distinct)), dtype=float)
        return mapped.T[where]

    def unseen_variance(self, at: Floats) -> Floats:
        """Return the variance that the values at the places leave, shape (n,)."""
        explained: Floats = np.square(self.map(at)).sum(axis=1)
        return np.maximum(0.0, self.sd**2 + self.white**2 - explained)

    def unseen_covariance(self, at: Floats) -> Floats:
        """Return the covariance that the values at the places leave, shape (n, n)."""
        mapped = self.map(at)
        return self._covariance(at, at) - mapped @ mapped.T

    def _covariance(self, left_positions: Floats, right_positions: Floats) -> Floats:
        off = np.abs(left_positions[:, None] - right_positions[None, :])
        smooth: Floats = self.sd**2 * np.exp(-0.5 * (off / self.length) ** 2)
        return smooth + self.white**2 * (off < 1e-9)


@dataclass(frozen=True)
class Rows:
    """What the local residuals are part of: each row is a ln t (which all enter) or a ln c. Arrays of one length."""

    batch: Floats
    replicas: Floats
    gpus: Floats  # of a node, where they are not as many everywhere
    by_step: Floats  # derivative by the residual of ln t: 1, and 0 for a ln c
    by_compute: Floats  # and by that of ln c
    by_across: Floats  # and by that of ln m between nodes; 0 where nodes of one size were measured

    def covariance(self, others: "Rows", priors: Priors) -> Floats:
        """Return the covariance of the local residuals' part in these rows and in others, shape (n, m)."""
        off = [
            np.subtract.outer(np.log(a), np.log(b))
            for a, b in ((self.batch, others.batch), (self.replicas, others.replicas), (self.gpus, others.gpus))
        ]
        step = np.outer(self.by_step, others.by_step) * _local_covariance(priors.local_step, *off)
        compute = np.outer(self.by_compute, others.by_compute) * _local_covariance(priors.local_compute, *off)
        return step + compute + np.outer(self.by_across, others.by_across) * _local_covariance(priors.local_sync, *off)

    def variance(self, priors: Priors) -> Floats:
        """Return the diagonal of their own covariance, shape (n,)."""
        residuals = (priors.local_step, priors.local_compute, priors.local_sync)
        by = (self.by_step, self.by_compute, self.by_across)
        contributions = [(factor * residual.sd) ** 2 for factor, residual in zip(by, residuals, strict=True)]
        return np.asarray(np.sum(contributions, axis=0), dtype=float)


def _local_covariance(residual: Local, batch: Floats, replicas: Floats, gpus: Floats) -> Floats:
    off = (batch / residual.batch) ** 2 + (replicas / residual.replicas) ** 2 + (gpus / residual.replicas) ** 2
    return np.asarray(residual.sd**2 * np.exp(-0.5 * off))
