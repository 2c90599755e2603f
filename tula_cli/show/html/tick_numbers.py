"""Round numbers for axes, and short words for them: 128, 256, 512; 40k, 1.2M; never 0.5754."""

import math
from collections.abc import Callable, Iterable, Sequence

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
_MOST_DECIMALS = 12
CHARACTER = 6.7  # units of a drawing that a digit takes
_GAP = 12.0  # units between two words


def ticks(low: float, high: float, scale: str, *, most: int) -> list[float]:
    """Return round numbers between two bounds, ascending.

    Args:
        low: the lower bound; above 0 on a logarithmic scale.
        high: the upper one, above it.
        scale: "linear", "log" or "log2".
        most: how many at most; at least 2.
    """
    if scale == "log2":
        found = _powers(low, high, 2.0, most)
    elif scale == "log":
        found = _decades(low, high, most)
    else:
        return _linear(low, high, most)
    return found if len(found) > 1 else _linear(low, high, min(most, 4))


def fitting(low: float, high: float, scale: str, *, length: float) -> list[float]:
    """Return as many `ticks` as have room for their words beside each other on an axis of `length` units."""
    for most in range(10 if scale == "log2" else 7, 2, -1):
        found = ticks(low, high, scale, most=most)
        if _fit(found, low, high, scale, length):
            return found
    return ticks(low, high, scale, most=2)


def _fit(found: Sequence[float], low: float, high: float, scale: str, length: float) -> bool:
    place: Callable[[float], float] = float if scale == "linear" else math.log
    per = length / (place(high) - place(low))
    told = words(found, scale)
    pairs = zip(zip(found, told, strict=True), zip(found[1:], told[1:], strict=True), strict=False)
    return all(
        per * (place(right) - place(left)) >= CHARACTER * (len(word) + len(next_word)) / 2 + _GAP
        for (left, word), (right, next_word) in pairs
    )


def _linear(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    # A sum of steps is off by the last digit; a quotient of whole numbers is not.
    return [count / round(1 / step) if step < 1 else count * step for count in range(first, last + 1)]


def _powers(low: float, high: float, base: float, most: int) -> list[float]:
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    return [base**power for power in range(first, last + 1, every)]


def _decades(low: float, high: float, most: int) -> list[float]:
    for factors in ((1, 2, 5), (1, 3), (1,)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        shown = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(shown) <= most:
            return shown
    return _powers(low, high, 10.0, most)


def words(values: Iterable[float], scale: str = "linear") -> list[str]:
    """Return numbers of one axis in words: on a linear one all in one unit, with as few decimals as are right."""
    known = list(values)
    if scale != "linear":
        return [_plain(value) if scale == "log2" else short(value) for value in known]
    largest = max((abs(value) for value in known), default=0.0)
    least = min((abs(value) for value in known if value), default=1.0)
    if largest >= 1e15 or least < 1e-4:
        return [_power_words(value) for value in known]
    size, suffix = _unit(largest)
    decimals = next(count for count in range(_MOST_DECIMALS + 1) if _told(known, size, count))
    return ["0" if value == 0 else f"{value / size:.{decimals}f}{suffix}".replace("-", "−") for value in known]


def _unit(value: float) -> tuple[float, str]:
    size, suffix = next(((size, suffix) for size, suffix in _SUFFIXES if value >= size), (1.0, ""))
    return (1e3 if suffix == "k" else size), suffix


def _plain(value: float) -> str:
    """Return a power of two as batches are known, 65536, not 65.5k, and as scaling factors are: 1/64."""
    if 1e-6 < value < 1 and 1 / value == round(1 / value):
        return f"1/{1 / value:.0f}"
    return f"{value:.0f}" if 1 <= abs(value) < 1e6 and value == round(value) else short(value)


def _told(values: Sequence[float], size: float, decimals: int) -> bool:
    """Return whether these decimals suffice; some numbers need more than there are."""
    if decimals == _MOST_DECIMALS:
        return True
    return all(math.isclose(float(f"{v / size:.{decimals}f}"), v / size, rel_tol=1e-9, abs_tol=0.0) for v in values)


def short(value: float) -> str:
    """Return one number: 1.2M, 40k, 0.05; at most 4 significant digits."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return _power_words(value)
    size, suffix = _unit(abs(value))
    told = f"{value / size:.4g}" if size > 1 or abs(value) < 1e3 else f"{value:.0f}"
    return f"{told}{suffix}".replace("-", "−")


def _power_words(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.3g}".partition("e")
    return (f"{mantissa}e{int(power)}" if power else mantissa).replace("-", "−")
