"""Jobs on SLURM: chains of links. submitit writes the scripts and starts the supervisors; sbatch is called here."""

import contextlib
import math
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
from tula_cli.cluster.slurm.command import call
from tula_cli.cluster.slurm.path_patterns import require_plain
from tula_cli.cluster.slurm.queue import Queued, SchedulerState, ask, live, refused
from tula_cli.cluster.slurm.sbatch import parameters, python
from tula_cli.errors import SchedulerError
from tula_cli.run.directory import RunDir
from tula_cli.run.notices import news
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task, TrainTask
from tula_cli.run.snapshot import Snapshot, is_moved
from tula_cli.run.upkeep import package
from tula_cli.spec.slurm_options import Slurm
from tula_cli.version import __version__

SPARE_LINKS = 2
"""Links of a chain beyond those that a training is predicted to need: for a preemption, a lost node, a slow day."""
MOST_LINKS = 50
"""Of one chain: queues bound how many jobs a user may have. The same command goes on where a chain ends."""
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


class SlurmLauncher:
    """Jobs on SLURM through submitit: srun starts one supervisor a rank, or one a node."""

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
        earlier, names, nodes = run.job(task.job), _link_names(run, task), nodes_of_links(task)
        if earlier is not None and is_moved(earlier, run.path.resolve()):
            scheduler.cancel(earlier.ids[::-1])  # what still waits would find no run directory
        there = in_queue(run, names)
        if earlier and any(job.id in earlier.ids for job in there.values()):
            return earlier
        ids = [there[name].id for name in names if name in there]
        for id_ in ids:
            _leave_call(run, task, id_)  # whoever submitted it may have been killed before that
        submitted_at = min((_written_at(job) for job in there.values()), default=time.time())
        news.prepare(run.path)
        new = list(zip(chain(task), names, strict=True))[_after_last(names, there) :]
        ids += _submit_links(run, new, after=ids, rehearsal=_rehearsal(run, task))
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
        known = ask([id_ for job in jobs for id_ in job.ids])
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


def links(task: Task) -> int:
    """Return how many jobs a task is submitted as: a training on SLURM as several, one after the other.

    Half as many again as it is predicted to need, and two for what is lost. Stages of `train.ramp` that run on fewer nodes have
    links of their own before those; one that has too many nodes for its stage can do it all the same, so they have one
    to spare.
    """
    return len(chain(task))


def chain(task: Task) -> Sequence[Task]:
    """Return the jobs of a task's chain, each as the task that it asks for nodes for."""
    if task.spec.cluster.kind != "slurm" or not isinstance(task, TrainTask):
        return [task]
    limit, predicted = (task.spec.cluster.slurm or Slurm()).minutes, task.prediction
    hours = None if predicted is None else predicted.hours
    found: list[Task] = []
    for nodes in sorted({count for stage in task.stages if task.nodes <= (count := stage.nodes or 0) < task.own_nodes}):
        own = None if predicted is None else predicted.hours_on(nodes)
        found += [task.model_copy(update={"nodes": nodes})] * _needed(task, own, limit, spare=1)
        hours = None if hours is None or own is None else hours - own
    last = task.model_copy(update={"nodes": task.own_nodes})
    found = found[: MOST_LINKS - 2] + [last] * min(max(2, _needed(task, hours, limit, spare=SPARE_LINKS)), MOST_LINKS)
    return found[:MOST_LINKS]


def _needed(task: TrainTask, hours: float | None, limit: int, *, spare: int) -> int:
    """Return the links that so many hours need; None: that is not known."""
    if hours is None:
        return task.spec.train.max_attempts
    return spare + (1 if 60 * hours < limit / 2 else math.ceil(1.5 * 60 * hours / limit))


def nodes_of_links(task: Task) -> tuple[int, ...]:
    """Return the nodes that each job of a task asks for."""
    return tuple(link.nodes for link in chain(task))


# --- submitting to SLURM


def text_of(run: RunDir, task: Task, *, name: str | None = None, dependency: str | None = None) -> str:
    """Return the script of one job."""
    from tula_cli.cluster.slurm.script import ScriptWriter  # submitit: of use to those who submit alone

    require_plain(run.path, slurm=True)
    writer = ScriptWriter(folder=run.submitit_dir, python=python(task))
    writer.update_parameters(**parameters(run, task, name=name, dependency=dependency))
    return writer.text()


def _link_names(run: RunDir, task: Task) -> list[str]:
    """Return the names of the jobs to submit: they find a job again of which sbatch did not tell the id."""
    first = f"tula-{run.id}-{task.job}"
    return [first, *(f"{first}.{number}" for number in range(2, links(task) + 1))]


def in_queue(run: RunDir, names: Sequence[str]) -> dict[str, Queued]:
    """Return this run's jobs in the queue by their names.

    A run of the same job in another folder has the same names; its scripts are elsewhere.

    Raises:
        SchedulerError: squeue does not answer.
    """
    folder = run.submitit_dir.resolve()
    return {job.name: job for job in live(names) if Path(job.script).parent.resolve() == folder}


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
    """Submit jobs, each with its name, to start when all before it have ended; return their ids.

    All: the end of one that waits (scancel) must not start the next beside one that runs.

    Raises:
        SchedulerError: the first one was refused.
    """
    ids: list[str] = []
    for task, name in named:
        try:
            ids.append(_submit_link(run, task, name, after=(*rehearsal, *after, *ids)))
        except SchedulerError:
            if not ids and not after:
                raise
            break  # the queue takes no more of this user's jobs; those that it took go as far as they come
    return ids


def _submit_link(run: RunDir, task: Task, name: str, *, after: Sequence[str]) -> str:
    """Submit one job; return its id.

    Raises:
        SchedulerError: sbatch refused it, or did not answer and nothing is in the queue.
    """
    run.lock.heartbeat()
    text = text_of(run, task, name=name, dependency=f"afterany:{':'.join(after)}" if after else None)
    id_ = submit_script(run, name, text)
    _leave_call(run, task, id_)
    return id_


def submit_script(run: RunDir, name: str, text: str) -> str:
    """Submit a script under a name that finds its job again; return the job's id.

    Raises:
        SchedulerError: sbatch refused it, or did not answer and nothing is in the queue.
    """
    package.keep(run.path.resolve())
    submission = _sbatch(run.write_script(name, text))
    return submission.id or _accepted_unheard(run, name, submission.words)


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


def _accepted_unheard(run: RunDir, name: str, words: str) -> str:
    """Look for a job that was perhaps accepted although sbatch failed; it may take a moment to appear. Return its id.

    Raises:
        SchedulerError: it is not there.
    """
    deadline = time.monotonic() + LAG
    while True:
        with contextlib.suppress(SchedulerError):  # a controller too busy for sbatch may be too busy for squeue
            if found := in_queue(run, [name]).get(name):
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
