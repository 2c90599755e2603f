"""The same end at once, twice: a third start would come to the same."""

import re
from collections.abc import Sequence

from tula_cli.host.endings.outcomes import ENDINGS
from tula_cli.run.records.jobs import Attempt

AT_ONCE = 30.0
"""Seconds from the start of the ranks, in which Python, torch and the user's code are imported and the first steps begin."""
_OWN_DOING = re.compile(r"\bSIG(?:SEGV|ABRT|BUS|ILL|FPE)\b|\bexitcode *: *-(?:11|6|7|4|8)\b")
"""Signals by which a program ends itself. Any other comes from outside, and may come at any time."""


def again_at_once(attempts: Sequence[Attempt], progress: int) -> str:
    """Say why a training must not be started again; empty where it may.

    Args:
        attempts: its attempts, oldest first; the last one has ended.
        progress: samples that have been trained for good by now.
    """
    if len(attempts) < 2:
        return ""
    before, last = attempts[-2:]
    if last.outcome is None or last.outcome == "done" or not ENDINGS[last.outcome].final_if_again:
        return ""
    if last.outcome == "signal" and not (_OWN_DOING.search(last.message) and _OWN_DOING.search(before.message)):
        return ""
    seconds = [(one.ended_at or one.started_at) - one.started_at for one in (before, last)]
    alike = before.outcome == last.outcome and before.progress == last.progress == progress
    if not alike or max(seconds) > AT_ONCE:
        return ""
    return f"twice the same within {max(1.0, *seconds):.0f} s of a start, so it is not started again"
