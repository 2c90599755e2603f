"""Jobs on SLURM: submitit writes the scripts and starts the supervisors."""

import os
import socket
from collections.abc import Sequence

from tula_cli.cluster.local import run_supervisor
from tula_cli.cluster.scheduling.batch_launcher import BatchLauncher
from tula_cli.cluster.scheduling.protocol import JobRequest
from tula_cli.cluster.slurm.path_patterns import require_plain
from tula_cli.cluster.slurm.sbatch import parameters, python
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import Task


class SlurmLauncher(BatchLauncher):
    """Jobs on SLURM through submitit: srun starts one supervisor a rank, or one a node."""

    def __init__(self) -> None:
        super().__init__(SlurmScheduler(), "slurm")

    def request(self, run: RunDir, task: Task, name: str, after: Sequence[str] = ()) -> JobRequest:
        """Return the job by name; what it is asked for else is told by `parameters`."""
        return JobRequest(name, "", nodes=task.nodes, after=tuple(after), logs=run.submitit_dir)

    def text(self, run: RunDir, job: JobRequest, task: Task) -> str:
        after = f"afterany:{':'.join(job.after)}" if job.after else None
        return text_of(run, task, name=job.name, dependency=after)

    def prepare(self, run: RunDir, task: Task, id_: str) -> None:
        _leave_call(run, task, id_)

    def first_name(self, run: RunDir, task: Task) -> str:
        """Return a name without the run's place: SLURM tells where the script of each job is."""
        return f"tula-{run.id}-{task.job}"


def text_of(run: RunDir, task: Task, *, name: str | None = None, dependency: str | None = None) -> str:
    """Return the script of one job."""
    from tula_cli.cluster.slurm.script import ScriptWriter  # submitit: of use to those who submit alone

    require_plain(run.path)
    writer = ScriptWriter(folder=run.submitit_dir, python=python(task))
    writer.update_parameters(**parameters(run, task, name=name, dependency=dependency))
    return writer.text()


def _leave_call(run: RunDir, task: Task, id_: str) -> None:
    """Leave what a job has to call where submitit looks for it, for a minute, once the job has started."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    path = JobPaths(run.submitit_dir, job_id=id_).submitted_pickle
    if not path.exists():
        call = DelayedSubmission(run_supervisor, str(run.path.resolve()), task.id, None)
        draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        call.dump(draft)
        draft.replace(path)
