"""Constants of the job file and the optimizers. `optim` imports no other module of tula; standard library only."""

from collections.abc import Mapping
from typing import Any

_PAPER: dict[str, Any] = {
    "granularity": "element",
    "delta": 0.5,
    "refresh": "epoch",
    "s_min": 1e-3,
    "eps": 1e-8,
    "source": "small_batch",
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
"""Settings of adaptive gradient scaling, in the form of section `ags` of a job. "paper" is Algorithm 1; "robust" uses
one smoothed factor per parameter tensor, updated at every step from the ranks' own gradients, without a gate."""

NORMALISING_OPTIMIZERS = frozenset(
    {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "FusedAdam", "Adagrad", "Adadelta", "Adafactor"}
    | {"RMSprop", "Rprop", "Muon", "Lion", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars"}
)
"""Optimizers that divide by the gradient's magnitude or use only its sign, so that a factor on the gradient has no
effect."""
