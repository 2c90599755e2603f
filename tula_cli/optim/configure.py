"""From settings as section `ags` of a job spells them to what TulaOptimizer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from .factors import LocalNorms, SmallBatch
from .gate import Gate
from .parts.factor_source import Factors

Target = Literal["gradient", "update"]


class Configured(TypedDict):
    """Arguments of TulaOptimizer, for one of them: factors and gate keep its state."""

    factors: Factors
    gate: Gate
    apply_to: Target


def configured(settings: Mapping[str, Any]) -> Configured:
    """Make new collaborators: `TulaOptimizer(base, model=ddp, b_large=1024, **configured(AGS_PRESETS["robust"]))`.

    Args:
        settings: all that a preset names (`tula_cli/presets.py`), and `consensus` where it is not the usual one.

    Raises:
        ValueError: a value of another kind or out of range.
    """
    refresh = settings["refresh"]
    common: dict[str, Any] = {
        "refresh": refresh["every"] if isinstance(refresh, Mapping) else refresh,
        "s_min": settings["s_min"],
        "eps": settings["eps"],
        "ema": settings["scale_ema"],
    }
    local = settings["source"] == "local_norms"
    if local and settings["granularity"] != "tensor":
        raise ValueError("source local_norms knows one norm a tensor: use granularity tensor")
    gate = Gate(float(settings["delta"]), ewma=settings["norm_ewma"], consensus=settings.get("consensus", "broadcast"))
    return {
        "factors": LocalNorms(**common) if local else SmallBatch(settings["granularity"], **common),
        "gate": gate,
        "apply_to": settings["apply_to"],
    }
