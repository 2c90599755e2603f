"""The same end twice from the same checkpoint, at once or at the same step: a third start would come to the same."""

import re
from collections.abc import Sequence

from tula_cli.host.failure_kinds import FAILURE_KINDS
from tula_cli.run.records.jobs import Attempt

MAX_SECONDS = 30.0
"""Seconds from the start of the ranks, in which Python, torch and the user's code are imported and the first steps begin."""
_CRASH_SIGNALS = re.compile(r"\bSIG(?:SEGV|ABRT|BUS|ILL|FPE)\b|\bexitcode *: *-(?:11|6|7|4|8)\b")
"""Signals by which a program ends itself. Any other comes from outside, and may come at any time."""


def _normalized_message(attempt: Attempt) -> str:
    """Return the message of an attempt without what differs from process to process: numbers and hosts."""
    return re.sub(r"\d+", "", attempt.message.replace(attempt.host or "\0", ""))


def describe_crash_loop(attempts: Sequence[Attempt], progress: int) -> str:
    """Say why a training must not be started again; empty where it may.

    Args:
        attempts: its attempts, oldest first; the last one has ended.
        progress: samples that have been trained for good by now.
    """
    if len(attempts) < 2:
        return ""
    previous, last_attempt = attempts[-2:]
    if (
        last_attempt.outcome is None
        or last_attempt.outcome == "done"
        or not FAILURE_KINDS[last_attempt.outcome].final_if_again
    ):
        return ""
    if last_attempt.outcome == "signal" and not (
        _CRASH_SIGNALS.search(last_attempt.message) and _CRASH_SIGNALS.search(previous.message)
    ):
        return ""
    seconds = [(attempt.ended_at or attempt.started_at) - attempt.started_at for attempt in (previous, last_attempt)]
    alike = previous.outcome == last_attempt.outcome and previous.progress == last_attempt.progress == progress
    if not alike:
        return ""
    if (
        last_attempt.reached is not None
        and last_attempt.reached == previous.reached
        and _normalized_message(last_attempt) == _normalized_message(previous)
    ):
        return (
            f"twice the same after {last_attempt.reached} samples from the same checkpoint, so it is not started again"
        )
    if max(seconds) > MAX_SECONDS:
        return ""
    return f"twice the same within {max(1.0, *seconds):.0f} s of a start, so it is not started again"
