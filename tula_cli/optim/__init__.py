"""Optimizers for large batches; usable from any training script, without the rest of the command line."""

from tula_cli.presets import AGS_PRESETS as PRESETS

from .ags import Gate, LocalNorms, SmallBatch, Static, TulaOptimizer, advice, configured
from .orthogonal import Ortho

__all__ = ["PRESETS", "Gate", "LocalNorms", "Ortho", "SmallBatch", "Static", "TulaOptimizer", "advice", "configured"]
