"""Jobs on SLURM: chains of links. submitit writes the scripts and starts the supervisors; sbatch is called here."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli.cluster.local import attempts_of, run_supervisor
from tula_cli.cluster.slurm import command
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.chain import chain, dependency, job_name, link_names, nodes_of_links, to_wait_for
from tula_cli.cluster.slurm.command import call
from tula_cli.cluster.slurm.path_patterns import require_plain
from tula_cli.cluster.slurm.queue import Queued, SchedulerState, ask, live
from tula_cli.cluster.slurm.refused_jobs import refused
from tula_cli.cluster.slurm.sbatch import parameters, python
from tula_cli.errors import SchedulerError
from tula_cli.run.directory import RunDir
from tula_cli.run.notices import news
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task, TrainTask
from tula_cli.run.snapshot import Snapshot, is_moved
from tula_cli.run.upkeep import package
from tula_cli.version import __version__

LAG = 10.0
"""Seconds that a job accepted by a busy controller may take to appear in the queue."""
YOUNG = 30.0
"""Seconds for which a submitted job may be known to neither squeue nor sacct."""
YOUNG_WORDS = "just submitted"
FORGOTTEN = "SLURM has forgotten it"
UNDECIDED = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Zero Bytes were transmitted",
    "Connection timed out",
)
"""Words of an sbatch that lost the controller: the job may have been accepted all the same."""


@dataclass(frozen=True)
class SlurmLauncher:
    """Jobs on SLURM through submitit: srun starts one supervisor a rank, or one a node."""

    waits: bool = False  # and so takes what squeue told another waiting command

    def patient(self) -> "SlurmLauncher":
        """Return one for a command that waits."""
        return SlurmLauncher(waits=True)

    def script(self, run: RunDir, task: Task) -> str:
        """Return the text that sbatch would be given; later links of a chain wait for the one before them as well."""
        from tula_cli.cluster.scripts.start import preview  # for a dry run alone, not for each look at the jobs

        text = text_of(run, task)
        if not (words := preview(run, task)):
            return text
        return f"{text.rstrip()}\n\n# where tula then starts, on each GPU or node: {words}\n"

    def submit(self, run: RunDir, task: Task) -> Job:
        """Submit a job, a training with all links of its chain; what is in the queue already is taken as it is.

        Raises:
            SchedulerError: sbatch refused it, in the scheduler's own words, or SLURM does not answer.
        """
        earlier, names, nodes = run.job(task.job), link_names(run, task), nodes_of_links(task)
        if earlier is not None and is_moved(earlier, run.path.resolve()):
            scheduler.cancel(earlier.ids[::-1])  # what still waits would find no run directory
        there = in_queue(run, names, task)
        if earlier and any(job.id in earlier.ids for job in there.values()):
            return earlier
        ids = [there[name].id for name in names if name in there]
        for id_ in ids:
            _leave_call(run, task, id_)  # whoever submitted it may have been killed before that
        submitted_at = min((_written_at(job) for job in there.values()), default=time.time())
        news.prepare(run.path, *([f"train/{task.signature}/checkpoints"] if isinstance(task, TrainTask) else []))
        new = list(zip(chain(task), names, strict=True))[_after_last(names, there) :]
        ids += _submit_links(
            run, new, after=to_wait_for(job_name(run, task), there, ids), rehearsal=_rehearsal(run, task)
        )
        submissions = earlier.submissions if earlier else 0
        return Job(
            id=task.job,
            scheduler="slurm",
            scheduler_id=ids[0],
            nodes=task.nodes,
            link_nodes=nodes if len(set(nodes)) > 1 else (),
            submitted_at=submitted_at,
            submissions=max(1, submissions) if there else submissions + 1,
            links=tuple(ids) if len(names) > 1 else (),
            folder=str(run.path.resolve()),
            tula=__version__,
        )

    def states(self, look: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        """Ask for all jobs at once. A job that nobody knows is over, unless it is too young to be known."""
        known = ask([id_ for job in jobs for id_ in job.ids], patient=self.waits)
        return {job.id: _with_words(look, job, _with_folder(look, job, self._state(look, job, known))) for job in jobs}

    def _state(self, look: Snapshot, job: Job, known: Mapping[str, SchedulerState]) -> SchedulerState:
        state = _chain_state(job, known)
        if state.state == "pending" and is_moved(job, look.here):
            return SchedulerState("ended", f"the run was at {job.folder} when it was submitted, and was moved since")
        if state.reason == YOUNG_WORDS and any(attempt.ended_at is None for attempt in attempts_of(look, job)):
            return SchedulerState("running", "squeue does not know it")
        return state

    def cancel(self, run: RunDir, job: Job) -> None:
        """Mark it, so that no supervisor starts anything more, and cancel its allocations; only our own ids.

        Raises:
            SchedulerError: scancel did not do it.
        """
        run.cancel(job.id)
        # The last first: the end of one link would start the next.
        if complaint := scheduler.cancel(job.ids[::-1]):
            raise SchedulerError(
                f"scancel: {complaint}", f"{job.id} is marked and starts nothing more; run tula cancel again"
            )


# --- submitting to SLURM


def text_of(run: RunDir, task: Task, *, waits_for: str = "") -> str:
    """Return the script of one job."""
    from tula_cli.cluster.slurm.script import ScriptWriter  # submitit: of use to those who submit alone

    require_plain(run.path, slurm=True)
    writer = ScriptWriter(folder=run.submitit_dir, python=python(task))
    writer.update_parameters(**parameters(run, task, name=job_name(run, task), dependency=waits_for or None))
    return writer.text()


def in_queue(run: RunDir, names: Sequence[str], task: Task | None = None) -> dict[str, Queued]:
    """Return this run's jobs in the queue by the names of their scripts.

    A run of the same job in another folder has the same names; its scripts are elsewhere.

    Args:
        run: the run.
        names: of the scripts, which are those of jobs that are no link of a chain too.
        task: what links of a chain start with.

    Raises:
        SchedulerError: squeue does not answer.
    """
    folder = run.submitit_dir.resolve()
    asked = [*names, *(() if task is None else [job_name(run, task)])]
    there = {Path(job.script).stem: job for job in live(asked) if Path(job.script).parent.resolve() == folder}
    return {name: job for name, job in there.items() if name in names}


def _written_at(job: Queued) -> float:
    """Return when the script of a job was written, just before it was submitted."""
    try:
        return Path(job.script).stat().st_mtime
    except OSError:
        return time.time()


def _after_last(names: Sequence[str], there: Mapping[str, Queued]) -> int:
    """Return how many links need no submission: a link before one that is there has run, or must not run beside it."""
    return max((names.index(name) + 1 for name in there), default=0)


def _rehearsal(run: RunDir, task: Task) -> Sequence[str]:
    """Return the jobs that a training waits for before its first link."""
    job = run.job(task.after) if isinstance(task, TrainTask) and task.after else None
    return () if job is None else job.ids


def _submit_links(
    run: RunDir, named: Sequence[tuple[Task, str]], *, after: Sequence[str], rehearsal: Sequence[str]
) -> list[str]:
    """Submit jobs, each with the name of its script, to start when all before it have ended; return their ids.

    All, though each names the one before it alone: the end of one that waits (scancel) must not start the next beside one
    that runs. Their one name sees to that (`singleton`).

    Raises:
        SchedulerError: the first one was refused.
    """
    ids: list[str] = []
    for task, name in named:
        try:
            ids.append(_submit_link(run, task, name, waits_for=dependency(ids[-1:] or after, rehearsal)))
        except SchedulerError:
            if not ids and not after:
                raise
            break  # the queue takes no more of this user's jobs; those that it took go as far as they come
    return ids


def _submit_link(run: RunDir, task: Task, name: str, *, waits_for: str) -> str:
    """Submit one job; return its id.

    Raises:
        SchedulerError: sbatch refused it, or did not answer and nothing is in the queue.
    """
    run.lock.heartbeat()
    id_ = submit_script(run, name, text_of(run, task, waits_for=waits_for), task)
    _leave_call(run, task, id_)
    return id_


def submit_script(run: RunDir, name: str, text: str, task: Task | None = None) -> str:
    """Submit a script under a name that finds its job again; return the job's id.

    Args:
        run: the run.
        name: of the script.
        text: the script.
        task: what it starts with, where it is a link of a chain.

    Raises:
        SchedulerError: sbatch refused it, or did not answer and nothing is in the queue.
    """
    package.keep(run.path.resolve())
    submission = _sbatch(run.write_script(name, text))
    return submission.id or _accepted_unheard(run, name, submission.words, task)


@dataclass(frozen=True)
class _Submission:
    """What sbatch answered: the id of the job, or the words that leave open whether it was accepted."""

    id: str = ""
    words: str = ""


def _sbatch(script: Path) -> _Submission:
    """Call sbatch.

    submitit's own call has no time limit, passes an allocation's variables on and prints what sbatch says.

    Raises:
        SchedulerError: it refused the job.
    """
    answer = call("sbatch", str(script), environ=environment_of(script))
    if answer.end == "hung":
        return _Submission(words=f"no answer within {command.PATIENCE:g} s")
    if answer.end == "missing":
        raise SchedulerError(f"sbatch cannot be started: {answer.complaint}", "run tula on a login node")
    told = re.search(r"Submitted batch job (\d+)", answer.text)
    if told:
        return _Submission(id=told.group(1))
    words = answer.complaint or answer.text
    if answer.ok or any(undecided in words for undecided in UNDECIDED):
        return _Submission(words=words.rpartition("\n")[2].removeprefix("sbatch: error: "))
    raise refused(words)


def environment_of(script: Path) -> dict[str, str]:
    """Return sbatch's environment without the variables that would override what the script says."""
    options = set(re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(encoding="utf-8"), re.MULTILINE))
    renamed = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "no-requeue": "REQUEUE"}
    said = {f"SBATCH_{renamed.get(option, option).upper().replace('-', '_')}" for option in options}
    return {name: value for name, value in command.environment(os.environ).items() if name not in said}


def _accepted_unheard(run: RunDir, name: str, words: str, task: Task | None) -> str:
    """Look for a job that was perhaps accepted although sbatch failed; it may take a moment to appear. Return its id.

    Raises:
        SchedulerError: it is not there.
    """
    deadline = time.monotonic() + LAG
    while True:
        with contextlib.suppress(SchedulerError):  # a controller too busy for sbatch may be too busy for squeue
            if found := in_queue(run, [name], task).get(name):
                return found.id
        if time.monotonic() >= deadline:
            raise SchedulerError(
                f"sbatch does not answer ({words}), and no job {name} has appeared in the queue",
                "the controller is busy or out of reach; run the same command again later, it does not submit twice",
            )
        time.sleep(LAG / 10)


def _leave_call(run: RunDir, task: Task, id_: str) -> None:
    """Leave what a job has to call where submitit looks for it, for a minute, once the job has started."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    path = JobPaths(run.submitit_dir, job_id=id_).submitted_pickle
    if not path.exists():
        call = DelayedSubmission(run_supervisor, str(run.path.resolve()), task.id, None)
        draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        call.dump(draft)
        draft.replace(path)


# --- what became of a job on SLURM


def _chain_state(job: Job, known: Mapping[str, SchedulerState]) -> SchedulerState:
    """Return the state of a job from those of its links.

    Args:
        job: the job.
        known: what the scheduler says; it does not know all of them.
    """
    young = time.time() - job.submitted_at < YOUNG
    unheard = SchedulerState("pending", YOUNG_WORDS) if young else SchedulerState("ended", FORGOTTEN)
    states = [known.get(id_, unheard) for id_ in job.ids]
    if young:  # accounting may know a job before the queue shows it
        states = [unheard if state.state == "unknown" else state for state in states]
    kinds = [state.state for state in states]
    if "running" in kinds:
        return _with_next(job.ids, states, kinds.index("running"))
    if "pending" in kinds:
        first = kinds.index("pending")
        return _waiting(job.ids[:first], states[: first + 1])
    return states[kinds.index("unknown")] if "unknown" in kinds else states[-1]


def _with_next(ids: Sequence[str], states: Sequence[SchedulerState], at: int) -> SchedulerState:
    """Return the state of the link that runs, with what keeps those after it from going on."""
    now = states[at]
    for id_, following in zip(ids[at + 1 :], states[at + 1 :], strict=True):
        if following.hopeless or following.without_nodes:
            words = f"job {id_}, which goes on after it: {following.reason}"
            return replace(now, reason="; ".join(filter(None, (now.reason, words))))
    return now


def _waiting(before: Sequence[str], states: Sequence[SchedulerState]) -> SchedulerState:
    """Return what the first waiting link of a chain waits for: for the story of the link before it, if there is one."""
    own = states[-1]
    if own.reason != "Dependency" or not before:
        return own
    story = states[-2].reason or "it ended"
    return SchedulerState("pending", f"goes on after job {before[-1]} ({story})", own.starts_at)


def _with_folder(look: Snapshot, job: Job, state: SchedulerState) -> SchedulerState:
    """Tell of a job that ran and left nothing behind that its nodes probably do not see the run directory."""
    ran = not state.reason or state.reason.startswith(("FAILED", FORGOTTEN))
    if state.state != "ended" or not ran or attempts_of(look, job):
        return state
    if look.started_logs(job.ids):
        return state
    words = (
        f"it left no log: its nodes probably do not see {look.path.resolve()}; choose a folder on a file system that "
        "all nodes share with --run-dir"
    )
    return SchedulerState("ended", f"{state.reason}; {words}" if state.reason else words)


def _with_words(look: Snapshot, job: Job, state: SchedulerState) -> SchedulerState:
    """Add what the shell, srun or python said of a job whose supervisor never started."""
    if state.state != "ended" or not state.reason.startswith("FAILED") or attempts_of(look, job):
        return state
    for path in reversed(look.scheduler_logs(job.ids)):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
        told = [line for line in lines if line and "Exited with exit code" not in line and "submitit" not in line]
        if told and path.suffix == ".err":
            return SchedulerState("ended", f"{state.reason}: {told[-1]} ({path})")
    return state
