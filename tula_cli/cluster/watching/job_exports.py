"""A training that sends its own run to trackers (`export.by: job`): a process beside its leader, which reads the run's files."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tula_cli.errors import TulaError
from tula_cli.host.leftovers import MARK_VARIABLE
from tula_cli.run.directory import RunDir
from tula_cli.run.files import open_to_append
from tula_cli.run.records.tasks import TrainTask

PATIENCE = 20.0
"""Seconds for its last look, less than SLURM leaves between SIGTERM and SIGKILL."""


@contextlib.contextmanager
def export_meanwhile(run: RunDir, task_id: str, environ: Mapping[str, str], *, leader: bool) -> Iterator[None]:
    """Have the run sent to trackers meanwhile, where its training asks for that. What goes wrong there goes to its log alone.

    Args:
        run: the run.
        task_id: of what is supervised.
        environ: the environment of the process; it touches no GPU.
        leader: whether this is the one supervisor of several that does.
    """
    task = run.task(task_id) if leader else None
    if not isinstance(task, TrainTask) or all(export.by != "job" for export in task.spec.export):
        yield
        return
    environment = {
        **{name: value for name, value in environ.items() if name != MARK_VARIABLE},
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "tula_cli.services.exporting", str(run.path.absolute()), "job"]
    process = None
    with contextlib.suppress(OSError, TulaError), open_to_append(run.path / "exports" / "job.log") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=task.workdir,
            env=environment,
            start_new_session=True,
        )
    try:
        yield
    finally:
        if process is not None and process.stdin is not None:
            process.stdin.close()  # it looks once more
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
            process.wait()
