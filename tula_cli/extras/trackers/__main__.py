"""Process that sends a run to the trackers of its job file beside a training; started by the training's supervisor.

    python -m tula_cli.extras.trackers RUN

When the supervisor closes its stdin, or has exited, it sends what is new once more and exits. Warnings are printed, one per
line.
"""

import select
import signal
import sys
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.extras.trackers.export import export_run, list_requested_trackers
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run
from tula_cli.services.events import WarningEvent


def main(path: str) -> int:
    """Send the run until the supervisor has exited, and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a scheduler sends them to all processes; the supervisor reacts to them
    try:
        run = open_run(RunDir.open(Path(path)))
        trackers = list_requested_trackers(run.spec, (), uri=None, project=None, by="job")
        work = export_run(
            [run],
            trackers,
            follow=True,
            active=lambda _: True,  # a job that sends is one that runs
            stop=lambda: bool(select.select([sys.stdin], [], [], 0)[0]),
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
