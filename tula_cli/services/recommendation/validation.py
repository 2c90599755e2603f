"""How well a run's own probes foresee each other: what each strategy would have said of those that it does not take.

The paper's Figure 11 asks this of its two searches. Here it is asked of the run itself: a strategy takes its probes of those
that were measured, the step-time model is fitted to them, and the others are what it is judged by. Where it takes all of
them, each is left out once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tula_cli.errors import BadMeasurements
from tula_cli.models.observations import observation
from tula_cli.models.time import steptime
from tula_cli.models.time.priors import PRIORS, SHARDED
from tula_cli.models.time.steptime import Estimate, Observation
from tula_cli.run.records.probes import Measured
from tula_cli.services.search import STRATEGIES, grouped
from tula_cli.spec.job import JobSpec
from tula_cli.words import plural

JUDGED = ("partial", "five", "sweep", "full")


@dataclass(frozen=True)
class Validation:
    """One strategy on the probes of a run. Errors are shares of the measured step time."""

    strategy: str
    probes: int  # that it takes of those there are
    unseen: int  # that it is judged by
    median: float
    p90: float
    held: float  # share of them inside its 90 % intervals
    left_out_once: bool  # it takes all there are, and each was left out once


def validate(spec: JobSpec, measured: Iterable[Measured]) -> tuple[Validation, ...]:
    """Judge the strategies on the probes of one kind of node; those that tell nothing of any other probe are left out.

    Raises:
        BadMeasurements: no strategy tells anything, as too little was measured.
    """
    seen = {(probe.nodes, probe.local_batch): observation(probe) for probe in measured}
    by_nodes = grouped(seen)
    found: list[Validation] = []
    for name in JUDGED:
        chosen = {(nodes, local) for nodes, locals_ in STRATEGIES[name](by_nodes).items() for local in locals_}
        judged = _judged(spec, name, [seen[place] for place in sorted(chosen)], seen)
        if judged is not None and all((judged.probes, judged.unseen) != (one.probes, one.unseen) for one in found):
            found.append(judged)
    if not found:
        raise BadMeasurements(
            f"nothing of each other follows from {plural(len(seen), 'probe')}",
            "measure more (search.strategy: sweep or full)",
        )
    return tuple(found)


def _judged(
    spec: JobSpec, name: str, probes: Sequence[Observation], seen: "dict[tuple[int, int], Observation]"
) -> Validation | None:
    others = [o for place, o in sorted(seen.items()) if o not in probes]
    pairs = _foreseen(spec, probes, others) if others else _left_out_once(spec, probes)
    if not pairs:
        return None
    off = np.array([abs(estimate.seconds / o.seconds - 1) for o, estimate in pairs])
    held = [(estimate.low or 0.0) <= o.seconds <= (estimate.high or 0.0) for o, estimate in pairs]
    return Validation(
        strategy=name,
        probes=len(probes),
        unseen=len(pairs),
        median=float(np.median(off)),
        p90=float(np.percentile(off, 90)),
        held=float(np.mean(held)),
        left_out_once=not others,
    )


def _left_out_once(spec: JobSpec, probes: Sequence[Observation]) -> list[tuple[Observation, Estimate]]:
    found = []
    for out in probes:
        found += _foreseen(spec, [o for o in probes if o is not out], [out])
    return found


def _foreseen(
    spec: JobSpec, probes: Sequence[Observation], others: Sequence[Observation]
) -> list[tuple[Observation, Estimate]]:
    """Return the others with what a fit to the probes says of them; those of which it says nothing are left out."""
    if not probes:
        return []
    fit = steptime.fit(probes, collective=spec.cluster.collective, priors=SHARDED if spec.train.sharded else PRIORS)
    told = [o for o in others if not fit.refusal(o.nodes, o.gpus_per_node, o.local_batch)]
    return [(o, fit.predict(o.nodes, o.gpus_per_node, o.local_batch)) for o in told]
