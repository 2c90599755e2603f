"""TulaOptimizer's settings, as the spec's section `ags` says them."""

from typing import Any

from tula_cli.spec import Ags


def settings(ags: Ags) -> dict[str, Any]:
    """Return TulaOptimizer's keyword arguments, the batch sizes and those of the static method left out."""
    full = ags.resolved()
    return {
        "granularity": full.granularity,
        "delta": float(full.delta),
        "eps": full.eps,
        "s_min": full.s_min,
        "refresh": full.refresh if full.refresh == "epoch" else full.refresh.every,
        "source": full.source,
        "norm_ewma": full.norm_ewma,
        "scale_ema": full.scale_ema,
        "apply_to": full.apply_to,
        "consensus": full.consensus,
    }
