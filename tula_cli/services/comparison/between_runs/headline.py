"""The answer of `tula diff` in a line or two: how much slower or faster, by what part of a step, and what else is different."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tula_cli.models.time.changes.two_probes import LEAST
from tula_cli.run.records.results import Part
from tula_cli.services.comparison.between_runs.differing import Differing
from tula_cli.words import duration, number, plural, shortened_pair

if TYPE_CHECKING:
    from tula_cli.services.comparison.between_runs.difference import RunDifference

_MOST = 6
"""Differences that are named; the tables have all of them."""
_PARTS: tuple[Part, ...] = ("compute", "network", "input")
_FIRST = ("hardware", "GPU driver", "GPU clocks (MHz)", "clocks held down by", "torch", "CUDA", "NCCL")
"""What changes the time of a step most often, before all else."""
_LONGEST = 40  # characters of a value


def headline(found: "RunDifference") -> tuple[str, ...]:
    """Return the answer in lines."""
    pace, what, trained = _pace(found), list(_what(found)), tuple(_trained(found))
    if not what and not found.steps.changed:
        alike = "the same job, code and environment" if found.steps.timed else "the same job and code"
        return (f"nothing differs: {alike}; {pace or 'nothing is measured in either'}", *trained)
    told = [*filter(None, [pace]), *trained]
    if what:
        more = f", and {len(what) - _MOST} more" if len(what) > _MOST else ""
        told.append(f"what differs: {', '.join(what[:_MOST])}{more}")
    else:
        told.append(
            "nothing that is recorded differs: another load of the machines or of the network, other nodes' neighbours,"
            " or chance between jobs is left"
        )
    return tuple(told)


def _pace(found: "RunDifference") -> str:
    steps = found.steps
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
    return f"B is {how} at {len(steps.changed)} of {of}{_causes(steps.causes)}"


def _trained(found: "RunDifference") -> Iterator[str]:
    """Yield which trainings took another time; that of a training is told by nothing else, so small changes are left out."""
    for pair in found.trainings:
        if pair.before is None or pair.after is None or not pair.before.hours or not pair.after.hours:
            continue
        ratio = pair.after.hours / pair.before.hours
        if abs(math.log(ratio)) <= math.log1p(LEAST):
            continue
        which = f"training {pair.before.signature}" if pair.same_signature else "the newest training"
        where = f" ({pair.part})" * bool(pair.part)
        times = f"{duration(3600 * pair.before.hours)} -> {duration(3600 * pair.after.hours)}"
        yield f"{which}{where} took {number(ratio)} x as long ({times})"


def _causes(causes: tuple[Part, ...]) -> str:
    if not causes:
        return ""
    others = [part for part in _PARTS if part not in causes]
    return f" ({' and '.join(causes)}{', not ' + ' or '.join(others) if others else ''})"


def _what(found: "RunDifference") -> Iterator[str]:
    """Yield what differs besides, what may explain a pace first."""
    environment = sorted(found.environment, key=lambda one: (one.about not in _FIRST, one.about == "hosts"))
    ahead = [one for one in environment if one.about in _FIRST]
    yield from map(_change, ahead)
    if not found.code.same:
        yield _code(found)
    yield from map(_change, [one for one in environment if one not in ahead and one.about != "hosts"])
    yield from map(_change, found.job)
    yield from map(_change, [one for one in environment if one.about == "hosts"])
    yield from (f"only {where} has {name}" for where, names in zip("AB", found.only, strict=True) for name in names)


def _code(found: "RunDifference") -> str:
    if found.code.files:
        return f"code ({plural(len(found.code.files), 'file')})"
    if found.code.commits[0] != found.code.commits[1]:
        return f"commit {found.code.commits[0] or 'none'} -> {found.code.commits[1] or 'none'}"
    return "code"


def _change(one: Differing) -> str:
    kind, unit = [*one.about.removesuffix(")").split(" ("), ""][:2]
    where = f" ({one.part})" * bool(one.part)
    before, after = shortened_pair(_text(one.before), _text(one.after), _LONGEST)
    return f"{kind}{where} {before} -> {after}{f' {unit}' * bool(unit)}"


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
