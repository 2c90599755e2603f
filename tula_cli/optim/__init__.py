"""Optimizers for large batches; usable from any training script, without the rest of the command line."""

from tula_cli.presets import AGS_PRESETS as PRESETS

from .advice import advice
from .configure import configured
from .factors import LocalNorms, SmallBatch, Static
from .gate import Gate
from .orthogonal import Ortho
from .tula import TulaOptimizer

__all__ = ["PRESETS", "Gate", "LocalNorms", "Ortho", "SmallBatch", "Static", "TulaOptimizer", "advice", "configured"]
