"""Optimizers for large batches; usable from any training script, without the rest of the command line."""

from tula_cli.presets import AGS_PRESETS as PRESETS

from .ags import (
    Gate,
    IdentityWarning,
    LocalNorms,
    MissedRefreshWarning,
    SmallBatch,
    Static,
    TulaOptimizer,
    configure_ags,
    explain_small_effect,
)
from .orthogonal import Ortho

__all__ = [
    "PRESETS",
    "Gate",
    "IdentityWarning",
    "LocalNorms",
    "MissedRefreshWarning",
    "Ortho",
    "SmallBatch",
    "Static",
    "TulaOptimizer",
    "configure_ags",
    "explain_small_effect",
]
