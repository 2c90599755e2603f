"""What has changed where a step takes another time, and what that does to a training."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tula_cli.models.cost import cost
from tula_cli.run.records.results import Part, StepChange, StepParts
from tula_cli.run.records.tasks import TrainTask
from tula_cli.words import duration, number

if TYPE_CHECKING:
    from tula_cli.models.time.changes.levels import Level  # numpy: not for what only tells of changes

MIN_SHARE = 0.3
"""Of the change of a step, from which on a part is named."""

_FIELDS: dict[Part, str] = {"compute": "compute", "network": "sync", "input": "data"}
_SLOWER: dict[Part, str] = {"compute": "the nodes compute more slowly", "network": "the network is slower", "input": "the data come more slowly"}  # fmt: skip
_FASTER: dict[Part, str] = {"compute": "the nodes compute faster", "network": "the network is faster", "input": "the data come faster"}  # fmt: skip


def median_parts(samples: Sequence[StepParts]) -> StepParts:
    """Return the median of each part over some looks, of which there is at least one."""

    def of(name: str) -> float | None:
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        return statistics.median(values) if values else None

    step = of("step")
    assert step is not None
    return StepParts(step=step, data=of("data"), compute=of("compute"), sync=of("sync"))


def describe_level_change(level: "Level", task: TrainTask, seconds_left: Callable[[float], float | None]) -> StepChange:
    """Return what has changed in a training, since when, and what comes of it.

    Args:
        level: of the looks at its steps.
        task: what is trained.
        seconds_left: returns what is left of it at a step time; None where nothing tells how long it is.
    """
    first_after, pricing, prediction = level.after[0], task.spec.pricing, task.prediction
    parts_before, after = (
        median_parts([sample.parts for sample in samples]) for samples in (level.before, level.after)
    )
    remaining, at_first = seconds_left(after.step), seconds_left(parts_before.step)
    return StepChange(
        samples=first_after.samples,
        epoch=first_after.epoch,
        began_at=first_after.at,
        parts=changed_parts(parts_before, after),
        before=parts_before,
        after=after,
        seconds_left=remaining,
        seconds_left_before=at_first,
        cost_more=cost(
            pricing,
            hours=0.0 if remaining is None or at_first is None else (remaining - at_first) / 3600,
            nodes=task.nodes,
            gpus_per_node=task.spec.cluster.gpus_per_node,
            reserved=(prediction and prediction.peak_memory) or 0,
            market=prediction.market if prediction else "on_demand",
        ),
        currency=pricing.currency,
    )


def changed_parts(parts_before: StepParts, after: StepParts) -> tuple[Part, ...]:
    """Return the parts that make a notable share of a change of the step time, the most first."""
    difference = after.step - parts_before.step
    shares: dict[Part, float] = {}
    for part, name in _FIELDS.items():
        old, new = getattr(parts_before, name), getattr(after, name)
        if old is not None and new is not None and difference:
            shares[part] = (new - old) / difference
    return tuple(sorted((part for part in shares if shares[part] >= MIN_SHARE), key=lambda part: -shares[part]))


def describe_step_change(change: StepChange) -> str:
    """Return a change in one line."""
    parts_before, after = change.before, change.after
    slower = after.step > parts_before.step
    since = time.strftime("%H:%M:%S", time.localtime(change.began_at))
    causes = _SLOWER if slower else _FASTER
    named = {"compute": "computing", "sync": "synchronisation", "data": "waiting for data"}
    sentences = [
        f"{text} {number(1000 * new)} ({number(1000 * old)})"
        for name, text in named.items()
        if (old := getattr(parts_before, name)) is not None and (new := getattr(after, name)) is not None
    ]
    unknown = (
        "a script does not tell which part of it" if parts_before.data is None else "no part alone accounts for it"
    )
    why = ", ".join(causes[part] for part in change.parts) or unknown
    extra_cost = change.cost_more
    price = (
        f", {number(abs(extra_cost))} {change.currency} {'more' if extra_cost > 0 else 'less'}" if extra_cost else ""
    )
    end = f"{duration(change.seconds_left)} to the end, not {duration(change.seconds_left_before)}{price}"
    ends = [", ".join(sentences)] * bool(sentences) + [end] * (change.seconds_left is not None)
    position = f"{since}, {change.samples} samples"
    return (
        f"since {position if change.epoch is None else f'epoch {change.epoch:.2f} ({position})'} a step takes"
        f" {number(1000 * after.step)} ms, before {number(1000 * parts_before.step)} ms"
        f" ({100 * (after.step / parts_before.step - 1):+.0f} %): {'; '.join([why, *ends])}"
    )
