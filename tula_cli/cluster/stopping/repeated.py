"""The same end twice from the same checkpoint, at once or at the same step: a third start would come to the same."""

import re
from collections.abc import Sequence

from tula_cli.host.failure_kinds import FAILURE_KINDS
from tula_cli.run.records.jobs import Attempt

AT_ONCE = 30.0
"""Seconds from the start of the ranks, in which Python, torch and the user's code are imported and the first steps begin."""
_OWN_DOING = re.compile(r"\bSIG(?:SEGV|ABRT|BUS|ILL|FPE)\b|\bexitcode *: *-(?:11|6|7|4|8)\b")
"""Signals by which a program ends itself. Any other comes from outside, and may come at any time."""


def _words(attempt: Attempt) -> str:
    """Return the message of an attempt without what differs from process to process: numbers and hosts."""
    return re.sub(r"\d+", "", attempt.message.replace(attempt.host or "\0", ""))


def again_at_once(attempts: Sequence[Attempt], progress: int) -> str:
    """Say why a training must not be started again; empty where it may.

    Args:
        attempts: its attempts, oldest first; the last one has ended.
        progress: samples that have been trained for good by now.
    """
    if len(attempts) < 2:
        return ""
    before, last = attempts[-2:]
    if last.outcome is None or last.outcome == "done" or not FAILURE_KINDS[last.outcome].final_if_again:
        return ""
    if last.outcome == "signal" and not (_OWN_DOING.search(last.message) and _OWN_DOING.search(before.message)):
        return ""
    seconds = [(one.ended_at or one.started_at) - one.started_at for one in (before, last)]
    alike = before.outcome == last.outcome and before.progress == last.progress == progress
    if not alike:
        return ""
    if last.reached is not None and last.reached == before.reached and _words(last) == _words(before):
        return f"twice the same after {last.reached} samples from the same checkpoint, so it is not started again"
    if max(seconds) > AT_ONCE:
        return ""
    return f"twice the same within {max(1.0, *seconds):.0f} s of a start, so it is not started again"
