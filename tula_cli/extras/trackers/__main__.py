"""Background process that sends a run to the trackers of its job file; started by a waiting command or by a training.

    python -m tula_cli.extras.trackers RUN command|job [once]

When its stdin is closed, by its parent process or because that has exited, it sends what is new once more and exits. A
signal is not used for this, as it could arrive before its handler is installed. Warnings are printed to stdout, one per
line.
"""

import select
import signal
import sys
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.extras.trackers.export import export_run, list_requested_trackers
from tula_cli.run.directory import RunDir
from tula_cli.services.events import WarningEvent


def main(path: str, by: str, *how: str) -> int:
    """Send the run until told to stop, and return the exit code."""
    signals = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))  # of a scheduler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to react to
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # so is the warning of a time limit the supervisor's
        signal.signal(number, signal.SIG_IGN)
    try:
        run = RunDir.open(Path(path))
        trackers = list_requested_trackers(run.read_spec(), (), uri=None, project=None, by=by)
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
