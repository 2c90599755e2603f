"""What launchers say of a process of theirs that a signal has ended: torchrun, accelerate, deepspeed, or a shell between."""

import re
import signal

_BY_NUMBER = (
    r"\bexit ?code *: *-(\d+)",
    r"\bSignal (\d+) \(SIG[A-Z]+\) received by PID\b",
    r"\bexits? with return ?code *=+ *-(\d+)",
    r"\bdied with (?:<Signals\.SIG\w+: |unknown signal )(\d+)",
)
_BY_SHELL = r"\breturned non-zero exit status 1(?:29|[3-8]\d|9[0-2])\b"  # 128 and the signal
ENDED_BY_SIGNAL = (*_BY_NUMBER, _BY_SHELL)
"""Patterns of their words."""

CHILD_KILLED = re.compile(
    rf"^(?:subprocess\.)?CalledProcessError: [\s\S]*?(?:{_BY_SHELL}|{_BY_NUMBER[-1]})", re.MULTILINE
)
"""An exception that only tells that a signal has ended a child."""

_FOLLOW_UP_SIGNALS = (signal.SIGTERM, signal.SIGABRT)
"""What launchers end the other ranks with, and by what torch ends a process that has lost one: not the first cause."""


def kill_signal(text: str) -> str:
    """Return the signal that has ended a rank first, as a launcher tells it ("SIGKILL"); empty where none does."""
    numbers = [int(number) for pattern in _BY_NUMBER for number in re.findall(pattern, text)]
    numbers += [int(match_text[-3:]) - 128 for match_text in re.findall(_BY_SHELL, text)]
    signals_by_number = {number.value: number for number in signal.Signals}
    return next(
        (
            signals_by_number[number].name
            for number in numbers
            if number in signals_by_number and signals_by_number[number] not in _FOLLOW_UP_SIGNALS
        ),
        "",
    )
