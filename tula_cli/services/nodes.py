"""`tula check --on-cluster`: what the nodes are like, seen by a short job on them."""

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.cluster.launcher import Launcher, submitting
from tula_cli.cluster.slurm import partitions as site
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.partitions import Site
from tula_cli.cluster.slurm.queue import SchedulerState
from tula_cli.errors import JobFailed, Pending, SchedulerError, SpecError, TulaError
from tula_cli.host.outcome import advice
from tula_cli.run.directory import RunDir
from tula_cli.run.records.cluster_reports import ClusterReport, NodeReport
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import CheckTask
from tula_cli.spec.job import JobSpec

# --- the nodes of the cluster

LAG = {"local": 2.0, "slurm": 30.0}
"""Seconds that a file of another node may take to be seen here (NFS keeps what it knows of a folder for that long)."""
CLOCKS_APART = 1.0
"""Seconds by which the clocks of two nodes may differ."""
LOOKS = (0.5, 10.0)
"""Seconds between two looks at a waiting job: the first, and what it grows to."""


@dataclass(frozen=True)
class ClusterCheck:
    """What the nodes of a cluster told, and what of it is not as a job needs it."""

    report: ClusterReport
    problems: tuple[str, ...]  # no job can run before these are solved
    warnings: tuple[str, ...]


def cluster_nodes(spec: JobSpec, wanted: int | None) -> int:
    """Return on how many nodes to look: as many as wanted, else the fewest of the search, two or more where possible.

    Raises:
        SpecError: the partition has fewer nodes than wanted.
    """
    here = _partition(spec)
    most = here.usable if here is not None else None
    if wanted is not None and most is not None and here is not None and wanted > most:
        raise SpecError(f"--nodes {wanted}: a job can have {most} nodes here ({site.describe(here)})")
    if wanted is not None:
        return wanted
    fewest = min((nodes for nodes in spec.search.nodes if nodes > 1), default=2 if spec.cluster.kind == "slurm" else 1)
    return max(1, min(fewest, most)) if most is not None else fewest


def _partition(spec: JobSpec) -> site.Partition | None:
    """Return the partition that the spec's jobs go to, where the scheduler tells."""
    if spec.cluster.kind != "slurm":
        return None
    offered = Site(site.partitions(), ())
    name = spec.cluster.slurm.partition if spec.cluster.slurm else None
    if name is None:
        return offered.default
    return next((partition for partition in offered.partitions if partition.name == name), None)


def start_on_cluster(run: RunDir, spec: JobSpec, launcher: Launcher, *, nodes: int) -> CheckTask:
    """Submit a job that looks at the nodes; one that the user has not yet been told the end of is taken up again.

    One that waits with other settings than those of the spec now is cancelled.

    Raises:
        SchedulerError: it was refused.
    """
    with submitting(run):
        return _start_on_cluster(run, spec, launcher, nodes=nodes)


def _start_on_cluster(run: RunDir, spec: JobSpec, launcher: Launcher, *, nodes: int) -> CheckTask:
    tasks = sorted(run.check_tasks(), key=_number)
    untold = [task for task in tasks if task.nodes == nodes and not run.checks.told(task.id)]
    for task in [task for task in untold if task.spec != spec]:
        if (job := run.job(task.job)) is not None:
            _end(run, launcher, task, job)
    name = f"check-n{nodes:03d}-{_number(tasks[-1]) + 1 if tasks else 1}"
    fresh = CheckTask(id=name, job=name, spec=spec, workdir=str(Path.cwd()), nodes=nodes)
    task = next((task for task in reversed(untold) if task.spec == spec), fresh)
    if run.job(task.job) is None:
        run.write_task(task)
        run.checks.write_token(task.id, secrets.token_hex(8))
        run.write_job(launcher.submit(run, task))
    return task


def _number(task: CheckTask) -> int:
    return int(task.id.rpartition("-")[2])


def watch_cluster(
    run: RunDir,
    launcher: Launcher,
    task: CheckTask,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> Iterator[SchedulerState]:
    """Yield what becomes of a check's job until it is over.

    Args:
        run: the run.
        launcher: who knows the scheduler.
        task: the check.
        clock: Unix time.
        sleep: waits for some seconds.
        timeout: seconds after which to give up.

    Raises:
        Pending: it is not over when the time is.
        SchedulerError: it will never start; it was cancelled.
        JobFailed: it waits in vain for nodes that do not see the run directory; it was cancelled.
    """
    job = run.job(task.job)
    assert job is not None
    started, (pause, longest), hopeless = clock(), LOOKS, 0
    some_since: float | None = None
    while not _is_over(run, task):
        state = launcher.states(run.read(), [job])[job.id]
        yield state
        if state.state == "ended":
            return
        hopeless = hopeless + 1 if state.hopeless else 0
        if hopeless > 1:  # it may be so for a moment while the controller is busy
            raise _ended_hopeless(run, launcher, task, job, state)
        now = clock()
        some_since = (some_since or now) if 0 < len(_nodes_seen(run, task, job)) < task.nodes else None
        if some_since is not None and now - some_since > LAG[job.scheduler]:
            raise _ended_half_seen(run, launcher, task, job)
        if timeout is not None and now - started >= timeout:
            words = f" ({state.reason})" if state.reason else ""
            raise Pending(
                f"{job.id} is not over after {timeout:g} s: {state.state}{words}",
                "the same command attaches to it again",
            )
        sleep(pause if timeout is None else min(pause, max(0.0, started + timeout - now)))
        pause = min(longest, 1.5 * pause)


def _is_over(run: RunDir, task: CheckTask) -> bool:
    """Return whether the check has an end that is its own: a report, or a failure that is not tried again."""
    if run.checks.report(task.id) is not None or run.cancelled(task.job):
        return True
    attempts = run.attempts(task.id)
    return bool(attempts) and attempts[-1].outcome not in (None, "done", "port")


def _ended_hopeless(
    run: RunDir, launcher: Launcher, task: CheckTask, job: Job, state: SchedulerState
) -> SchedulerError:
    _end(run, launcher, task, job)
    return SchedulerError(
        f"{job.id} was accepted, but would not start: {state.reason}; it was cancelled",
        "change the cluster section of the job, or look at fewer nodes with --nodes",
    )


def _end(run: RunDir, launcher: Launcher, task: CheckTask, job: Job) -> None:
    run.cancel(job.id)
    launcher.cancel(run, job)
    run.checks.mark_told(task.id)


def _ended_half_seen(run: RunDir, launcher: Launcher, task: CheckTask, job: Job) -> JobFailed:
    """End a job whose nodes do not all show up: the ranks of those that have would wait for the others."""
    error = _unshared(run, task, job, set(range(task.nodes)) - _nodes_seen(run, task, job))
    _end(run, launcher, task, job)
    return error


def conclude_cluster(
    run: RunDir, task: CheckTask, *, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> ClusterCheck:
    """Return what a check that is over has found.

    Raises:
        JobFailed: it has failed; with what is known of the nodes.
    """
    job = run.job(task.job)
    assert job is not None
    deadline = clock() + LAG[job.scheduler]
    while not _all_told(run, task, job) and clock() < deadline:
        sleep(LOOKS[0])
    run.checks.mark_told(task.id)
    report = run.checks.report(task.id)
    if report is None:
        raise _failure(run, task, job)
    return ClusterCheck(report, tuple(_problems(run, task, report)), tuple(_cluster_warnings(task, report)))


def _all_told(run: RunDir, task: CheckTask, job: Job) -> bool:
    """Return whether nothing more is to be expected from the nodes."""
    report = run.checks.report(task.id)
    if report is not None:
        return not _silent(run, report)
    return _is_over(run, task) and len(_nodes_seen(run, task, job)) == task.nodes


def _silent(run: RunDir, report: ClusterReport) -> list[NodeReport]:
    """Return the nodes of which nothing that they wrote is seen here, although they say that they did."""
    ranks, here = report.ranks // len(report.nodes), run.checks.signed_in(report.id)
    return [node for node in report.nodes if not node.write_error and node.node * ranks not in here]


# --- what is not as it should be


def _problems(run: RunDir, task: CheckTask, report: ClusterReport) -> Iterator[str]:
    """Yield what keeps jobs from running on these nodes."""
    written, folder = run.checks.token(task.id), run.path.resolve()
    for node in report.nodes:
        if node.token != written:
            found = "another file" if node.token else "nothing"
            yield f"{node.host} reads {found} where {folder} has what was written here: it does not share that folder"
        if node.write_error:
            yield f"{node.host} cannot write into the run directory: {node.write_error}"
    for node in _silent(run, report):
        yield f"what {node.host} wrote into {folder} is not seen here after {LAG[task.spec.cluster.kind]:g} s"
    yield from _dataset_problems(task, report)
    yield from _gpu_problems(task.spec, report)


def _dataset_problems(task: CheckTask, report: ClusterReport) -> Iterator[str]:
    without = [node.host for node in report.nodes if node.dataset is False]
    if without and not _is_yet_to_come(task):
        yield f"{_list(without)} cannot read dataset.root, {_dataset_folder(task)}"


def _dataset_folder(task: CheckTask) -> Path:
    return Path(task.workdir, Path(task.spec.dataset.root).expanduser())


def _is_yet_to_come(task: CheckTask) -> bool:
    """Return whether the dataset is to be downloaded before the first job."""
    return task.spec.dataset.download and not os.access(_dataset_folder(task), os.R_OK)


def _gpu_problems(spec: JobSpec, report: ClusterReport) -> Iterator[str]:
    without = [node.host for node in report.nodes if not node.gpus]
    needed = spec.cluster.device == "cuda" or (spec.cluster.device == "auto" and len(without) < len(report.nodes))
    if not needed:
        return
    if without:
        yield f"torch sees no GPU on {_list(without)}: check the driver, torch's CUDA version and how GPUs are asked for"
    for host, nodes in _by_host(report.nodes):
        ranks, gpus = sum(node.ranks for node in nodes), max(len(node.gpus) for node in nodes)
        if 0 < gpus < ranks:
            yield f"{ranks} ranks on {host} see {gpus} GPU{'s' * (gpus > 1)}: each rank needs one of its own"


def _by_host(nodes: Iterable[NodeReport]) -> Iterator[tuple[str, list[NodeReport]]]:
    """Yield the nodes of each host; on this machine all sets of ranks are on one."""
    for host, found in itertools.groupby(nodes, key=lambda node: node.host):
        yield host, list(found)


def _cluster_warnings(task: CheckTask, report: ClusterReport) -> Iterator[str]:
    """Yield what spoils measurements, or what one would want to know."""
    aspects: dict[str, Callable[[NodeReport], str]] = {
        "GPU": lambda node: " + ".join(sorted(set(node.gpus))) or "none",
        "GPU driver": lambda node: node.driver or "none",
        "torch": lambda node: node.torch,
        "CUDA": lambda node: node.cuda or "none",
        "NCCL": lambda node: node.nccl or "none",
        "Python": lambda node: node.python,
    }
    for name, aspect in aspects.items():
        if words := _differences(report.nodes, aspect):
            yield f"the nodes differ in {name}: {words}"
    for node in report.nodes:
        if abs(node.clock_offset) > CLOCKS_APART:
            side = "ahead of" if node.clock_offset > 0 else "behind"
            first = report.nodes[0].host
            yield f"the clock of {node.host} is {abs(node.clock_offset):.1f} s {side} that of {first}; times in logs and results will be apart"  # fmt: skip
    if (
        task.spec.cluster.device == "auto"
        and task.spec.cluster.kind == "slurm"
        and not any(n.gpus for n in report.nodes)
    ):
        yield "torch sees no GPU on any node: jobs will run on the CPU (cluster.device: auto)"
    if _is_yet_to_come(task) and any(node.dataset is False for node in report.nodes):
        yield f"dataset.root, {_dataset_folder(task)}, is not there yet: it is downloaded before the first job"


def _differences(nodes: Sequence[NodeReport], aspect: Callable[[NodeReport], str]) -> str:
    """Return what is where in words, where it is not the same everywhere."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(aspect(node), []).append(node.host)
    return "" if len(found) < 2 else "; ".join(f"{value} on {_list(hosts)}" for value, hosts in found.items())


def _list(hosts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(hosts))


# --- a check that has failed


def _failure(run: RunDir, task: CheckTask, job: Job) -> TulaError:
    """Tell why there is no report: nodes that do not see the run directory before all else, for they cannot tell."""
    attempts = run.attempts(task.id)
    last = attempts[-1] if attempts else None
    if run.cancelled(task.job):
        return JobFailed(f"{job.id} was cancelled", "the same command starts another one")
    if job.scheduler == "slurm":
        ended = scheduler.ended_how(job.scheduler_id)
        if last is None and ended is not None:
            return JobFailed(f"{job.id} ended before it could look: {ended.replace('_', ' ')}", advice(ended))
        blind = set(range(task.nodes)) - _nodes_seen(run, task, job)
        if blind:
            return _unshared(run, task, job, blind)
    if last is None or last.outcome is None:
        return JobFailed(f"{job.id} ended before its ranks could report: {_last_words(run, job)}", advice("unknown"))
    where = f" (rank {last.rank} on {last.host})" if last.rank is not None else ""
    return JobFailed(
        f"{job.id} failed{where}: {last.message}", advice(last.outcome if last.outcome != "done" else "unknown")
    )


def _nodes_seen(run: RunDir, task: CheckTask, job: Job) -> set[int]:
    """Return the numbers of the nodes that have written anything into the run directory."""
    if job.scheduler == "local":
        return set(range(task.nodes))
    ranks = task.spec.cluster.gpus_per_node
    slurm = task.spec.cluster.slurm
    tasks = 1 if slurm is not None and slurm.launcher == "torchrun" else ranks  # of SLURM, on one node
    logs = [path.name.split("_")[1] for path in run.submitit_dir.glob(f"{job.scheduler_id}_*_log.out")]
    return {int(log) // tasks for log in logs if log.isdigit()} | {
        rank // ranks for rank in run.checks.signed_in(task.id)
    }


def _unshared(run: RunDir, task: CheckTask, job: Job, blind: set[int]) -> JobFailed:
    hosts = site.allocated(job.scheduler_id)
    names = (
        hosts if len(hosts) == task.nodes else tuple(f"node {number + 1} of the job" for number in range(task.nodes))
    )
    seeing = [name for number, name in enumerate(names) if number not in blind]
    without = _list(name for number, name in enumerate(names) if number in blind)
    those = f"{_list(seeing)} wrote into it, {without} did not" if seeing else f"nothing came from {without}"
    return JobFailed(
        f"{job.id} failed, probably because its nodes do not all see {run.path.resolve()}: {those}",
        "choose a folder on a file system that this machine and all nodes share: --run-dir FOLDER"
        + (
            f"; or leave those nodes out: --set cluster.slurm.exclude={without.replace(', ', ',')}"
            if seeing and hosts
            else ""
        ),
    )


def _last_words(run: RunDir, job: Job) -> str:
    """Return the last line that the scheduler's own logs hold."""
    for path in sorted(run.submitit_dir.glob(f"{job.scheduler_id}_*_log.err")):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return f"{lines[-1]} ({path})"
    return "it has left no word"
