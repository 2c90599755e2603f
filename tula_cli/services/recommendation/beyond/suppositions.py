"""What `tula recommend --what-if` supposes: read as it is typed, told in words, and held against what was measured."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tula_cli.errors import SpecError
from tula_cli.models.choice.grid import Config
from tula_cli.models.forecast import Forecast
from tula_cli.models.time.what_if import Change, SupposedFit
from tula_cli.plugins import nearest
from tula_cli.run.records.recommendations import Prediction, Recommendation, WhatIf
from tula_cli.words import amount, number, plural

_PARTS = ("interconnect", "compute")
_BITS = {"Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}
_MOST = 1000.0
"""Times as fast, or as slow, beyond which a ratio is taken for a slip."""
_EXAMPLES = "for example --what-if interconnect=200Gbit, interconnect=4x or compute=2.1x"


def parsed(texts: Iterable[str]) -> Change:
    """Return what is supposed.

    Args:
        texts: "compute=2.1x", "interconnect=200Gbit" or "interconnect=4x"; each part once.

    Raises:
        SpecError: one of them cannot be used.
    """
    found: dict[str, Change] = {}
    for text in texts:
        name, equals, value = str(text).partition("=")
        if not equals or name not in _PARTS:
            close = "" if name in _PARTS else nearest(name, _PARTS)
            raise SpecError(f"--what-if {text}: give interconnect=... or compute=...", close or _EXAMPLES)
        if name in found:
            raise SpecError(f"--what-if {text}: {name} is given more than once", "give each of them once")
        found[name] = (
            _network(text, value) if name == "interconnect" else Change(compute=_ratio(text, value, _OWN_RATIO))
        )
    network, compute = found.get("interconnect", Change()), found.get("compute", Change())
    return Change(compute=compute.compute, interconnect=network.interconnect, bandwidth=network.bandwidth)


_OWN_RATIO = (
    "tula knows no GPU by its name: measure one step of your job on both, and give how many times as fast the other one is:"
    " compute=2.1x"
)


def _network(text: str, value: str) -> Change:
    given = re.fullmatch(r"([0-9.]+)\s*([MGT]bit)(/s)?", value)
    if given is None:
        return Change(
            interconnect=_ratio(text, value, "give a bandwidth, as 200Gbit, or how many times the one there is, as 4x")
        )
    bandwidth = _number(given[1]) * _BITS[given[2]]
    if not _BITS["Mbit"] <= bandwidth <= 100 * _BITS["Tbit"]:
        raise SpecError(f"--what-if {text}: no bandwidth from 1 Mbit to 100 Tbit a second", _EXAMPLES)
    return Change(bandwidth=bandwidth)


def _ratio(text: str, value: str, hint: str) -> float:
    given = re.fullmatch(r"([0-9.]+)\s*x", value)
    if given is None:
        raise SpecError(f"--what-if {text}: {value!r} cannot be used", hint)
    ratio = _number(given[1])
    if not 1 / _MOST <= ratio <= _MOST:
        raise SpecError(f"--what-if {text}: no ratio from {1 / _MOST:g}x to {_MOST:g}x", _EXAMPLES)
    return ratio


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # 1.2.3
        return math.nan


def told(steps: SupposedFit) -> list[str]:
    """Say what a fit is changed by, and what was taken for the network that there is."""
    change, found = steps.change, []
    if change.of_network:
        found.append(f"{_faster_network(steps)}; what the GPUs of one node send each other stays as it is")
    if change.compute is not None:
        found.append(
            f"GPUs compute {change.compute:g} times as fast, by your ratio, at a local batch of {number(steps.middle_batch, 2)},"
            " and further from it less surely; memory, prices, starts, evaluation and checkpoints stay as they are"
        )
    if steps.loader:
        found.append(
            f"no step comes below what the data loader takes, {number(1000 * steps.loader)} ms a sample and GPU"
        )
    return found


def _faster_network(steps: SupposedFit) -> str:
    change, now = steps.change, steps.bandwidth_now()
    if now is None:
        return f"links between nodes have {change.interconnect:g} times their bandwidth, whatever that is"
    gbit = [number(value / 1e9) for value in (now.middle, now.low, now.high)]
    sent = f"{amount(now.sent)} of gradients among {plural(now.nodes)}"
    there = f"the {gbit[0]} Gbit/s ({gbit[1]} to {gbit[2]}) each way that they carry by the fit ({sent})"
    if change.interconnect is not None:
        return f"links between nodes carry {change.interconnect:g} times {there}"
    assert change.bandwidth is not None
    low, middle, high = (number(value, 2) for value in steps.times_now())
    least, most = (f"{100 * share:.0f}" for share in steps.reached)
    return (
        f"links between nodes have {number(change.bandwidth / 1e9)} Gbit/s and carry {least} to {most} % of them: {middle} times"
        f" ({low} to {high}) {there}"
    )


class OfType(Protocol):
    """What is known of a type of node."""

    @property
    def type(self) -> str: ...
    @property
    def forecast(self) -> Forecast: ...


def compared(
    found: Recommendation, asked: Sequence[str], supposed: Sequence[OfType], *, as_it_is: Prediction | None
) -> Recommendation:
    """Return an answer with what it supposes, and what the choice without that takes under it; as it is without either.

    Args:
        found: the answer.
        asked: what it supposes, as typed.
        supposed: forecasts under what is supposed, by type of node ("" where the job names none).
        as_it_is: the choice without it; None where nothing is within the limits.
    """
    if not asked:
        return found
    forecasts = {each.type: each.forecast for each in supposed}
    lines = [
        f"{f'{name}: ' * bool(name)}{line}"
        for name, forecast in forecasts.items()
        if isinstance(forecast.steps, SupposedFit)
        for line in told(forecast.steps)
    ]
    there = _there(found.rows, forecasts, as_it_is)
    what_if = WhatIf(asked=tuple(asked), told=tuple(lines), as_it_is=as_it_is, there=there)
    return found.model_copy(update={"what_if": what_if})


def _there(
    rows: Sequence[Prediction], forecasts: Mapping[str, Forecast], as_it_is: Prediction | None
) -> Prediction | None:
    """Return what the choice without it takes under it, be that within the limits or not."""
    if as_it_is is None:
        return None
    at = as_it_is.type, as_it_is.nodes, as_it_is.batch, as_it_is.market
    within = next((row for row in rows if (row.type, row.nodes, row.batch, row.market) == at), None)
    own = forecasts.get(as_it_is.type)
    if within is not None or own is None:
        return within
    row: Prediction | None = own.predict(Config(as_it_is.nodes, as_it_is.batch))
    if row is not None and as_it_is.market == "spot":
        row = own.on_spot(row)
    return row and row.model_copy(update={"type": as_it_is.type})
