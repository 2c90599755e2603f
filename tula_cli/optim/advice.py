"""What to say of a training that the settings of TulaOptimizer do not suit."""

from __future__ import annotations

from collections.abc import Mapping

FEW_SCALED, MANY_AT_FLOOR = 0.2, 0.3


def advice(report: Mapping[str, float]) -> dict[str, str]:
    """Say in which way AGS hardly acts, from `TulaOptimizer.report()`: a sentence by the number that shows it.

    That is where the gate was shut in more than 80 % of the steps, or more than 30 % of the factors are at their lower
    bound. Empty where nothing is wrong. That no step is scaled before the first refresh is no fault, and not told.
    """
    if not (report["steps"] and report["factors"]):
        return {}
    sentences = {}
    shut = report["jumps_up"] + report["jumps_down"]
    if shut > 1 - FEW_SCALED:
        sentences["scaled"] = (
            f"AGS scaled only {report['scaled']:.0%} of {report['steps']:.0f} steps: in {shut:.0%} of them the gradient norm changed by more"
            " than delta allows."
            ' Raise delta, or use the preset "robust", which has no such gate'
        )
    if report["at_floor"] > MANY_AT_FLOOR:
        sentences["at_floor"] = (
            f"{report['at_floor']:.0%} of the AGS factors are at their lower bound s_min, so their weights hardly move:"
            ' the small batch has no gradient there. Use one factor a tensor (granularity "tensor"), or a larger b_small'
        )
    return sentences
