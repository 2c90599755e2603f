"""Optimizers for large batches; usable from any training script, without the rest of the command line."""

from .ortho import Ortho
from .presets import PRESETS, advice
from .tula import TulaOptimizer

__all__ = ["PRESETS", "Ortho", "TulaOptimizer", "advice"]
