"""Constants that the job file and the optimizers share; standard library only, and all of tula that `optim` imports."""

from collections.abc import Mapping
from typing import Any

_PAPER: dict[str, Any] = {
    "granularity": "element",
    "delta": 0.5,
    "refresh": "epoch",
    "s_min": 1e-3,
    "eps": 1e-8,
    "source": "small_batch",
    "norm_ewma": 0.0,
    "scale_ema": 0.0,
    "apply_to": "gradient",
}
AGS_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": _PAPER,
    "robust": {
        **_PAPER,
        "granularity": "tensor",
        "delta": "inf",
        "refresh": {"every": 1},
        "source": "local_norms",
        "scale_ema": 0.9,
    },
}
"""Settings of adaptive gradient scaling, as section `ags` of a job spells them. "paper" is Algorithm 1; "robust" one
smoothed factor a parameter, taken at every step from the ranks' own gradients, and no gate."""

DIVIDING = frozenset(
    {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "FusedAdam", "Adagrad", "Adadelta", "Adafactor"}
    | {"RMSprop", "Rprop", "Muon", "Lion", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars"}
)
"""Optimizers that divide by the gradient's own magnitude, or keep its sign only: a factor on the gradient cancels out."""
