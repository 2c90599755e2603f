"""Named settings of TulaOptimizer, and what to say of a training that they do not suit."""

from __future__ import annotations

import math
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
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "robust": _PAPER
    | {"granularity": "tensor", "delta": math.inf, "refresh": 1, "source": "local_norms", "scale_ema": 0.9},
}
"""Keyword arguments: `TulaOptimizer(base, model=ddp, b_large=1024, **PRESETS["robust"])`. "paper" is Algorithm 1;
"robust" one smoothed factor a parameter, taken at every step from the ranks' own gradients, and no gate."""

FEW_SCALED, MANY_AT_FLOOR = 0.2, 0.3


def advice(report: Mapping[str, float]) -> dict[str, str]:
    """Say in which way AGS hardly acts, from `TulaOptimizer.report()`: a sentence by the number that shows it.

    That is where the gate was shut in more than 80 % of the steps, or more than 30 % of the factors are at their lower
    bound. Empty where nothing is wrong. That no step is scaled before the first refresh is no fault, and not told.
    """
    if not (report["steps"] and report["factors"]):
        return {}
    found = {}
    shut = report["jumps_up"] + report["jumps_down"]
    if shut > 1 - FEW_SCALED:
        found["scaled"] = (
            f"AGS scaled only {report['scaled']:.0%} of the steps: in {shut:.0%} of them the gradient norm changed by more"
            " than delta allows."
            ' Raise delta, or use the preset "robust", which has no such gate'
        )
    if report["at_floor"] > MANY_AT_FLOOR:
        found["at_floor"] = (
            f"{report['at_floor']:.0%} of the AGS factors are at their lower bound s_min, so their weights hardly move:"
            ' the small batch has no gradient there. Use granularity "tensor", or a larger b_small'
        )
    return found
