"""The answer of `tula diff` in a line or two: how much slower or faster, by what part of a step, and what else is different."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tula_cli.models.time.changes.two_probes import MIN_DIFFERENCE
from tula_cli.run.records.results import Part
from tula_cli.services.comparison.between_runs.differing import FieldDifference
from tula_cli.words import duration, number, plural, shortened_pair

if TYPE_CHECKING:
    from tula_cli.services.comparison.between_runs.difference import RunDifference

_MAX_CAUSES = 6
"""Differences that are named; the tables have all of them."""
_PARTS: tuple[Part, ...] = ("compute", "network", "input")
_LIKELY_CAUSES = ("hardware", "GPU driver", "GPU clocks (MHz)", "clocks held down by", "torch", "CUDA", "NCCL")
"""What changes the time of a step most often, before all else."""
_MAX_VALUE_LENGTH = 40  # characters of a value


def write_headline(difference: "RunDifference") -> tuple[str, ...]:
    """Return the answer in lines."""
    pace, causes, trained = (
        _describe_pace(difference),
        list(_list_differences(difference)),
        tuple(_describe_trainings(difference)),
    )
    if not causes and not difference.steps.changed:
        alike = "the same job, code and environment" if difference.steps.timed else "the same job and code"
        return (f"nothing differs: {alike}; {pace or 'nothing is measured in either'}", *trained)
    lines = [*filter(None, [pace]), *trained]
    if causes:
        more_text = f", and {len(causes) - _MAX_CAUSES} more" if len(causes) > _MAX_CAUSES else ""
        lines.append(f"what differs: {', '.join(causes[:_MAX_CAUSES])}{more_text}")
    else:
        lines.append(
            "nothing that is recorded differs: another load of the machines or of the network, other nodes' neighbours,"
            " or chance between jobs is left"
        )
    return tuple(lines)


def _describe_pace(difference: "RunDifference") -> str:
    steps = difference.steps
    if not steps.timed:
        return "no configuration was measured in both" * bool(steps.rows or any(steps.only))
    of = f"{len(steps.timed)} {'configuration' if len(steps.timed) == 1 else 'configurations'}"
    if not steps.changed or steps.ratio is None:
        return f"a step takes as long at all of {of}, within the noise"
    slower = sum((row.ratio or 1) > 1 for row in steps.changed)
    faster = len(steps.changed) - slower
    if slower and faster:
        ratios = sorted(row.ratio or 1 for row in steps.changed)
        return (
            f"B is slower at {slower} and faster at {faster} of {of} ({number(ratios[0])} to {number(ratios[-1])} x the step"
            f" time of A)"
        )
    how = f"{number(steps.ratio)} x as slow" if slower else f"{number(1 / steps.ratio)} x as fast"
    return f"B is {how} at {len(steps.changed)} of {of}{_describe_causes(steps.causes)}"


def _describe_trainings(difference: "RunDifference") -> Iterator[str]:
    """Yield which trainings took another time; that of a training is told by nothing else, so small changes are left out."""
    for pair in difference.trainings:
        if pair.before is None or pair.after is None or not pair.before.hours or not pair.after.hours:
            continue
        ratio = pair.after.hours / pair.before.hours
        if abs(math.log(ratio)) <= math.log1p(MIN_DIFFERENCE):
            continue
        training_name = f"training {pair.before.signature}" if pair.same_signature else "the newest training"
        where = f" ({pair.part})" * bool(pair.part)
        times = f"{duration(3600 * pair.before.hours)} -> {duration(3600 * pair.after.hours)}"
        yield f"{training_name}{where} took {number(ratio)} x as long ({times})"


def _describe_causes(causes: tuple[Part, ...]) -> str:
    if not causes:
        return ""
    other_parts = [part for part in _PARTS if part not in causes]
    return f" ({' and '.join(causes)}{', not ' + ' or '.join(other_parts) if other_parts else ''})"


def _list_differences(difference: "RunDifference") -> Iterator[str]:
    """Yield what differs besides, what may explain a pace first."""
    environment = sorted(
        difference.environment, key=lambda entry: (entry.about not in _LIKELY_CAUSES, entry.about == "hosts")
    )
    likely = [entry for entry in environment if entry.about in _LIKELY_CAUSES]
    yield from map(_describe_change, likely)
    if not difference.code.same:
        yield _describe_code(difference)
    yield from map(_describe_change, [entry for entry in environment if entry not in likely and entry.about != "hosts"])
    yield from map(_describe_change, difference.job)
    yield from map(_describe_change, [entry for entry in environment if entry.about == "hosts"])
    yield from (
        f"only {where} has {name}" for where, names in zip("AB", difference.only, strict=True) for name in names
    )


def _describe_code(difference: "RunDifference") -> str:
    if difference.code.files:
        return f"code ({plural(len(difference.code.files), 'file')})"
    if difference.code.commits[0] != difference.code.commits[1]:
        return f"commit {difference.code.commits[0] or 'none'} -> {difference.code.commits[1] or 'none'}"
    return "code"


def _describe_change(difference: FieldDifference) -> str:
    kind, unit = [*difference.about.removesuffix(")").split(" ("), ""][:2]
    where = f" ({difference.part})" * bool(difference.part)
    text_before, after = shortened_pair(_as_text(difference.before), _as_text(difference.after), _MAX_VALUE_LENGTH)
    return f"{kind}{where} {text_before} -> {after}{f' {unit}' * bool(unit)}"


def _as_text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
