"""What launchers say of a process of theirs that a signal has ended: torchrun, accelerate, deepspeed, or a shell between."""

import re
import signal

_BY_NUMBER = (
    r"\bexit ?code *: *-(\d+)",
    r"\bSignal (\d+) \(SIG[A-Z]+\) received by PID\b",
    r"\bexits? with return ?code *=+ *-(\d+)",
    r"\bdied with (?:<Signals\.SIG\w+: |unknown signal )(\d+)",
)
_OF_A_SHELL = r"\breturned non-zero exit status 1(?:29|[3-8]\d|9[0-2])\b"  # 128 and the signal
ENDED_BY_SIGNAL = (*_BY_NUMBER, _OF_A_SHELL)
"""Patterns of their words."""

CHILD_KILLED = re.compile(
    rf"^(?:subprocess\.)?CalledProcessError: [\s\S]*?(?:{_OF_A_SHELL}|{_BY_NUMBER[-1]})", re.MULTILINE
)
"""An exception that only tells that a signal has ended a child."""

_FOLLOWS = (signal.SIGTERM, signal.SIGABRT)
"""What launchers end the other ranks with, and by what torch ends a process that has lost one: not the first cause."""


def killed_by(text: str) -> str:
    """Return the signal that has ended a rank first, as a launcher tells it ("SIGKILL"); empty where none does."""
    told = [int(number) for pattern in _BY_NUMBER for number in re.findall(pattern, text)]
    told += [int(words[-3:]) - 128 for words in re.findall(_OF_A_SHELL, text)]
    known = {number.value: number for number in signal.Signals}
    return next((known[number].name for number in told if number in known and known[number] not in _FOLLOWS), "")
