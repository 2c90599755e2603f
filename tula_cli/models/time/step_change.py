"""What has changed where a step takes another time, and what that does to a training."""

import statistics
import time
from collections.abc import Sequence

from tula_cli.run.records.results import Part, StepChange, StepParts
from tula_cli.words import duration, number

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

    step, data = of("step"), of("data")
    assert step is not None and data is not None
    return StepParts(step=step, data=data, compute=of("compute"), sync=of("sync"))


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
    why = ", ".join(causes[part] for part in found.parts) or "no part alone accounts for it"
    more = found.cost_more
    price = f", {number(abs(more))} {found.currency} {'more' if more > 0 else 'less'}" if more else ""
    return (
        f"since epoch {found.epoch:.2f} ({since}, {found.samples} samples) a step takes {number(1000 * after.step)} ms, before"
        f" {number(1000 * before.step)} ms ({100 * (after.step / before.step - 1):+.0f} %): {why}; {', '.join(parts)};"
        f" {duration(found.seconds_left)} to the end, not {duration(found.seconds_left_before)}{price}"
    )
