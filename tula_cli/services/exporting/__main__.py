"""Sends a run to the trackers of its job file, beside a command that waits or beside a training: started by these.

    python -m tula_cli.services.exporting RUN command|job [once]

The end of its stdin lets it look once more and end: whoever has started it closes that, or is no longer there. A signal might
come before there is anything to react to it. Warnings are lines of stdout.
"""

import select
import signal
import sys
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.run.directory import RunDir
from tula_cli.services.events import WarningEvent
from tula_cli.services.exporting.export import export_run, list_requested_trackers


def main(path: str, by: str, *how: str) -> int:
    """Send until told to stop; return the exit code."""
    signals = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))  # of a scheduler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to react to
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # so is the warning of a time limit the supervisor's
        signal.signal(number, signal.SIG_IGN)
    try:
        run = RunDir.open(Path(path))
        trackers = list_requested_trackers(run.spec(), (), uri=None, project=None, by=by)
        work = export_run(
            run,
            trackers,
            follow="once" not in how,
            active=(lambda _: True) if by == "job" else None,  # a job that sends is one that runs
            stop=lambda: bool(signals or select.select([sys.stdin], [], [], 0)[0]),
        )
        for event in work:
            if isinstance(event, WarningEvent):
                sys.stdout.write(f"{event.text}\n")
                sys.stdout.flush()
    except TulaError as error:
        sys.stdout.write(f"{error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
