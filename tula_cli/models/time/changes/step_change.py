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

SHARE = 0.3
"""Of the change of a step, from which on a part is named."""

_FIELDS: dict[Part, str] = {"compute": "compute", "network": "sync", "input": "data"}
_SLOWER: dict[Part, str] = {"compute": "the nodes compute more slowly", "network": "the network is slower", "input": "the data come more slowly"}  # fmt: skip
_FASTER: dict[Part, str] = {"compute": "the nodes compute faster", "network": "the network is faster", "input": "the data come faster"}  # fmt: skip


def middle(looks: Sequence[StepParts]) -> StepParts:
    """Return the median of each part over some looks, of which there is at least one."""

    def of(name: str) -> float | None:
        values = [value for look in looks if (value := getattr(look, name)) is not None]
        return statistics.median(values) if values else None

    step = of("step")
    assert step is not None
    return StepParts(step=step, data=of("data"), compute=of("compute"), sync=of("sync"))


def change_of(level: "Level", task: TrainTask, seconds_left: Callable[[float], float | None]) -> StepChange:
    """Return what has changed in a training, since when, and what comes of it.

    Args:
        level: of the looks at its steps.
        task: what is trained.
        seconds_left: returns what is left of it at a step time; None where nothing tells how long it is.
    """
    first, pricing, prediction = level.after[0], task.spec.pricing, task.prediction
    before, after = (middle([look.parts for look in looks]) for looks in (level.before, level.after))
    left, at_first = seconds_left(after.step), seconds_left(before.step)
    return StepChange(
        samples=first.samples,
        epoch=first.epoch,
        began_at=first.at,
        parts=changed_parts(before, after),
        before=before,
        after=after,
        seconds_left=left,
        seconds_left_before=at_first,
        cost_more=cost(
            pricing,
            hours=0.0 if left is None or at_first is None else (left - at_first) / 3600,
            nodes=task.nodes,
            gpus_per_node=task.spec.cluster.gpus_per_node,
            reserved=(prediction and prediction.peak_memory) or 0,
            market=prediction.market if prediction else "on_demand",
        ),
        currency=pricing.currency,
    )


def changed_parts(before: StepParts, after: StepParts) -> tuple[Part, ...]:
    """Return the parts that make a notable share of a change of the step time, the most first."""
    whole = after.step - before.step
    shares: dict[Part, float] = {}
    for part, name in _FIELDS.items():
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and whole:
            shares[part] = (new - old) / whole
    return tuple(sorted((part for part in shares if shares[part] >= SHARE), key=lambda part: -shares[part]))


def words(found: StepChange) -> str:
    """Return a change in one line."""
    before, after = found.before, found.after
    slower = after.step > before.step
    since = time.strftime("%H:%M:%S", time.localtime(found.began_at))
    causes = _SLOWER if slower else _FASTER
    named = {"compute": "computing", "sync": "synchronisation", "data": "waiting for data"}
    parts = [
        f"{text} {number(1000 * new)} ({number(1000 * old)})"
        for name, text in named.items()
        if (old := getattr(before, name)) is not None and (new := getattr(after, name)) is not None
    ]
    unknown = "a script does not tell which part of it" if before.data is None else "no part alone accounts for it"
    why = ", ".join(causes[part] for part in found.parts) or unknown
    more = found.cost_more
    price = f", {number(abs(more))} {found.currency} {'more' if more > 0 else 'less'}" if more else ""
    end = f"{duration(found.seconds_left)} to the end, not {duration(found.seconds_left_before)}{price}"
    ends = [", ".join(parts)] * bool(parts) + [end] * (found.seconds_left is not None)
    place = f"{since}, {found.samples} samples"
    return (
        f"since {place if found.epoch is None else f'epoch {found.epoch:.2f} ({place})'} a step takes"
        f" {number(1000 * after.step)} ms, before {number(1000 * before.step)} ms"
        f" ({100 * (after.step / before.step - 1):+.0f} %): {'; '.join([why, *ends])}"
    )
