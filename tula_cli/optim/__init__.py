"""Optimizers for large batches; usable from any training script, without the rest of the command line."""

from .orthogonal import Ortho
from .parts.advice import PRESETS, advice
from .tula import TulaOptimizer

__all__ = ["PRESETS", "Ortho", "TulaOptimizer", "advice"]
