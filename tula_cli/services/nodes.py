"""`tula check --on-cluster`: check the nodes with a short job that runs on them."""

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tula_cli import words
from tula_cli.cluster.launcher import Launcher, lock_submission, submit_task
from tula_cli.cluster.scheduler import SchedulerState, make_scheduler
from tula_cli.cluster.slurm import queue, site
from tula_cli.cluster.slurm.site import Site
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Interruption, JobFailed, OutOfMemoryAtMinimum, Pending, SchedulerError, SpecError, TulaError
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.job_runs import get_only_run, save_runs
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.inspections import ClusterReport, NodeReport
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.results import JobFile
from tula_cli.run.records.tasks import CheckTask
from tula_cli.services import messages
from tula_cli.services.events import NodeCheckProgress, Work
from tula_cli.spec.backend import get_backend
from tula_cli.spec.job import JobSpec

# --- Findings

SLOW_LINK_BITS_PER_SECOND = 8 * 32e9
"""Bits per second between two GPUs of one node, in each direction: PCIe 4.0 x16. NVLink is faster from V100 on."""
SMALL_SHARED_MEMORY_BYTES = 2**30
"""Bytes of /dev/shm below which large batches of a few loader processes do not fit; containers default to 64 MiB."""
MAX_CLOCK_OFFSET = 1.0
"""Seconds by which the clocks of two nodes may differ."""


def find_nodes_without_files(run: RunDir, report: ClusterReport) -> list[NodeReport]:
    """Return the nodes whose files are not visible here although they reported no write error."""
    ranks, signed_in = report.ranks // len(report.nodes), run.checks.read_signed_in_hosts(report.id)
    return [node for node in report.nodes if not node.write_error and node.node * ranks not in signed_in]


def list_node_problems(run: RunDir, task: CheckTask, report: ClusterReport) -> Iterator[Diagnostic]:
    """Yield the problems that keep jobs from running on these nodes."""
    written, folder = run.checks.read_token(task.id), run.path.resolve()
    for node in report.nodes:
        if node.token != written:
            yield messages.run_directory_not_shared(host=node.host, folder=str(folder), other_content=bool(node.token))
        if node.write_error:
            yield messages.cannot_write_run_directory(host=node.host, reason=node.write_error)
    for node in find_nodes_without_files(run, report):
        seconds = task.spec.cluster.backend.file_lag
        yield messages.files_not_visible(host=node.host, folder=str(folder), seconds=seconds)
    without_dataset = [node.host for node in report.nodes if node.dataset is False]
    if without_dataset and not _needs_download(task):
        yield messages.cannot_read_dataset(hosts=format_hosts(without_dataset), folder=str(_get_dataset_folder(task)))
    yield from _list_gpu_problems(task.spec, report)
    if report.network_error:
        yield messages.ranks_cannot_communicate(backend=report.backend, reason=report.network_error)


def _get_dataset_folder(task: CheckTask) -> Path:
    return Path(task.workdir, Path(task.spec.dataset.root).expanduser())


def _needs_download(task: CheckTask) -> bool:
    """Return whether the dataset is to be downloaded before the first job."""
    return task.spec.dataset.download and not os.access(_get_dataset_folder(task), os.R_OK)


def _list_gpu_problems(spec: JobSpec, report: ClusterReport) -> Iterator[Diagnostic]:
    without = [node.host for node in report.nodes if not node.gpus]
    needed = spec.cluster.device == "cuda" or (spec.cluster.device == "auto" and len(without) < len(report.nodes))
    if not needed:
        return
    if without:
        yield messages.no_gpu_visible(hosts=format_hosts(without))
    # with local jobs, all simulated nodes are on one host
    for host, nodes_of_host in itertools.groupby(report.nodes, key=lambda node: node.host):
        nodes = list(nodes_of_host)
        ranks, gpus = sum(node.ranks for node in nodes), max(len(node.gpus) for node in nodes)
        if 0 < gpus < ranks:
            yield messages.fewer_gpus_than_ranks(host=host, ranks=ranks, gpus=gpus)
            continue
        for node in nodes:  # ranks may be bound to one GPU although there are enough
            for shared_by in node.shared_gpus:
                yield messages.ranks_share_gpu(host=host, ranks=shared_by, gpus=len(node.gpus))


def list_node_warnings(task: CheckTask, report: ClusterReport) -> Iterator[Diagnostic]:
    """Yield warnings about conditions that distort measurements or that the user should know of."""
    aspects: dict[str, Callable[[NodeReport], str]] = {
        "GPU": lambda node: " + ".join(sorted(set(node.gpus))) or "none",
        "GPU driver": lambda node: node.driver or "none",
        "torch": lambda node: node.torch,
        "CUDA": lambda node: node.cuda or "none",
        "NCCL": lambda node: node.nccl or "none",
        "Python": lambda node: node.python,
    }
    for name, aspect in aspects.items():
        if differences := _describe_differences(report.nodes, aspect):
            yield messages.nodes_differ(aspect=name, differences=differences)
    if report.inside and report.inside[-1].speed < SLOW_LINK_BITS_PER_SECOND:
        yield messages.slow_gpu_link(host=report.nodes[0].host, gigabytes_per_second=report.inside[-1].speed / 8e9)
    for host, shared in {node.host: node.shared for node in report.nodes}.items():
        if shared is not None and shared < SMALL_SHARED_MEMORY_BYTES:
            yield messages.small_shared_memory(host=host, free_bytes=shared)
    for node in report.nodes:
        if abs(node.clock_offset) > MAX_CLOCK_OFFSET:
            first_host = report.nodes[0].host
            yield messages.clock_offset(host=node.host, seconds=node.clock_offset, first_host=first_host)
    cluster = task.spec.cluster
    may_have_gpu = cluster.device == "auto" and cluster.backend.may_have_gpu("auto", here=None)
    if may_have_gpu and not any(node.gpus for node in report.nodes):
        yield messages.jobs_run_on_cpu()
    if _needs_download(task) and any(node.dataset is False for node in report.nodes):
        yield messages.dataset_not_downloaded(folder=str(_get_dataset_folder(task)))


def _describe_differences(nodes: Sequence[NodeReport], aspect: Callable[[NodeReport], str]) -> str:
    """Return the values of an aspect with their hosts, or an empty string if the nodes do not differ."""
    hosts_by_value: dict[str, list[str]] = {}
    for node in nodes:
        hosts_by_value.setdefault(aspect(node), []).append(node.host)
    return (
        ""
        if len(hosts_by_value) < 2
        else "; ".join(f"{value} on {format_hosts(hosts)}" for value, hosts in hosts_by_value.items())
    )


def format_hosts(hosts: Iterable[str]) -> str:
    """Return hosts as a comma-separated text without duplicates."""
    return ", ".join(dict.fromkeys(hosts))


# --- The check of nodes

POLL_INTERVALS = (0.5, 10.0)
"""Seconds between two polls of a waiting job: the first interval, and the longest that it grows to."""


@dataclass(frozen=True)
class ClusterCheck:
    """The reports of a cluster's nodes, and the findings that concern a job."""

    report: ClusterReport
    problems: tuple[Diagnostic, ...]  # no job can run before these are solved
    warnings: tuple[Diagnostic, ...]

    def require_sound(self, name: str) -> None:
        """Raise JobFailed if the job cannot run on these nodes."""
        if self.problems:
            raise JobFailed(f"{name} cannot run on these nodes: {' '.join(map(str, self.problems))}")


def run_node_check(
    runs: Sequence[Run],
    launcher_for: Callable[[JobSpec], Launcher],
    *,
    nodes: int | None = None,
    node_type: str | None = None,
    timeout: float | None = None,
    file: JobFile | None = None,
) -> Work[ClusterCheck]:
    """Check the nodes of the cluster in a job of about a minute, or attach to a check that is already running.

    Args:
        nodes: number of nodes; None for the smallest number of the search that is at least two, if possible.
        timeout: seconds to wait at most.

    Raises:
        SpecError: the job names several node types and none is given; or the partition has fewer nodes than requested;
            or fewer than one node is requested.
        Pending: the timeout has passed.
        Interruption: Ctrl-C; the job continues to run.
        SchedulerError: the scheduler refused the job, or the job will never start.
        JobFailed: the check failed; the message has what is known of the nodes.
    """
    run = get_only_run(runs, node_type, purpose="the check of nodes")
    launcher, count = launcher_for(run.spec), choose_node_count(run.spec, nodes)
    save_runs([run], file)
    task = submit_node_check(run, launcher, nodes=count)
    last_state = None
    try:
        for state in watch_node_check(run, launcher, task, timeout=timeout):
            if (state_shown := _round_start_to_minute(state)) != last_state:
                yield NodeCheckProgress(task, state)
            last_state = state_shown
        return collect_node_check(run, task)
    except KeyboardInterrupt:
        raise _make_interruption(run, task) from None


def _make_interruption(run: RunDir, task: CheckTask | None) -> Interruption:
    """Return the error to raise on Ctrl-C; a job that was submitted continues to run."""
    if task is None:
        return Interruption(
            "interrupted", "run the same command again to submit the job, or to follow it if it is already queued"
        )
    hint = f"run the same command again to follow the job; tula cancel {words.quote_path(run.path)} stops it"
    return Interruption(f"interrupted; {task.job} continues", hint)


def _round_start_to_minute(state: SchedulerState) -> SchedulerState:
    """Return a state with its expected start rounded to minutes: squeue's estimate varies by seconds between polls."""
    return state if state.starts_at is None else replace(state, starts_at=state.starts_at // 60)


# --- Choice of nodes


def choose_node_count(spec: JobSpec, requested: int | None) -> int:
    """Return the number of nodes to check: the requested one, else the smallest of the search from 2 on, if possible.

    Raises:
        SpecError: more nodes are requested than the partition has.
    """
    max_nodes, where = _find_max_nodes(spec)
    if requested is not None and max_nodes is not None and requested > max_nodes:
        raise SpecError(f"[[--nodes]] {requested}: a job can have at most {max_nodes} nodes here ({where})")
    if requested is not None:
        return requested
    fewest = min((nodes for nodes in spec.search.nodes if nodes > 1), default=1 if spec.cluster.kind == "local" else 2)
    return max(1, min(fewest, max_nodes)) if max_nodes is not None else fewest


def _find_max_nodes(spec: JobSpec) -> tuple[int | None, str]:
    """Return the maximum number of nodes of a job (None if it is not reported) and a description of the partition."""
    if (slurm := spec.cluster.slurm_options) is not None:
        partition = Site(site.list_partitions(), ()).find_partition(slurm.partition or "")
        return (None, "") if partition is None else (partition.usable, site.describe_partition(partition))
    offered = make_scheduler(spec.cluster).list_partitions()
    chosen = [partition for partition in offered if partition.default] or (offered if len(offered) == 1 else [])
    return (chosen[0].usable, f"partition {chosen[0].name}") if chosen else (None, "")


# --- The job


def submit_node_check(run: Run, launcher: Launcher, *, nodes: int) -> CheckTask:
    """Submit a job that checks the nodes, or resume one whose result has not been reported to the user yet.

    An unreported check with settings other than those of the run is cancelled.

    Raises:
        SchedulerError: the scheduler refused the job.
        Interruption: Ctrl-C; the job continues to run if it was submitted.
    """
    task = None
    try:
        with lock_submission(run):
            task = _submit_or_attach_node_check(run, launcher, nodes=nodes)
    except KeyboardInterrupt:
        raise _make_interruption(run, task) from None
    return task


def _submit_or_attach_node_check(run: Run, launcher: Launcher, *, nodes: int) -> CheckTask:
    spec = run.spec
    tasks = run.read_check_tasks()
    unreported = [task for task in tasks if task.nodes == nodes and not run.checks.is_reported(task.id)]
    for task in [task for task in unreported if task.spec != spec]:
        if (job := run.find_job(task.job)) is not None:
            _cancel_check(run, launcher, task, job)
    name = f"check-n{nodes:03d}-{tasks[-1].number + 1 if tasks else 1}"
    fresh = CheckTask(id=name, job=name, spec=spec, workdir=str(Path.cwd()), nodes=nodes)
    task = next((task for task in reversed(unreported) if task.spec == spec), fresh)
    if run.find_job(task.job) is None:
        run.checks.write_token(task.id, secrets.token_hex(8))
        submit_task(run, launcher, task)
    return task


def watch_node_check(
    run: RunDir,
    launcher: Launcher,
    task: CheckTask,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> Iterator[SchedulerState]:
    """Yield the scheduler's state of a check's job until the check is over.

    Args:
        clock: Unix time.
        timeout: seconds after which to give up.

    Raises:
        Pending: the check is not over when the timeout has passed.
        SchedulerError: the job will never start; it was cancelled.
        JobFailed: some nodes do not see the run directory, so that the job would wait forever; it was cancelled.
    """
    job = run.find_job(task.job)
    assert job is not None
    started, (pause, longest), never_starts_polls = clock(), POLL_INTERVALS, 0
    partly_visible_since: float | None = None
    while not _is_check_over(run, task):
        state = launcher.query_states(run.read_snapshot(strict=True), [job])[job.id]
        yield state
        if state.state == "ended":
            return
        never_starts_polls = never_starts_polls + 1 if state.hopeless else 0
        if never_starts_polls > 1:  # a busy controller may report such a reason for a moment
            _cancel_check(run, launcher, task, job)
            raise SchedulerError(
                f"{job.id} was cancelled, because it would never start: {state.reason}",
                "change section cluster of the job, or check fewer nodes with [[--nodes]]",
            )
        now, nodes_with_files = clock(), _find_nodes_with_files(run, task, job)
        partly_visible_since = (partly_visible_since or now) if 0 < len(nodes_with_files) < task.nodes else None
        if partly_visible_since is not None and now - partly_visible_since > get_backend(job.scheduler).file_lag:
            error = _make_not_shared_error(run, task, job, nodes_with_files)
            _cancel_check(run, launcher, task, job)  # its ranks would wait for those of the other nodes
            raise error
        if timeout is not None and now - started >= timeout:
            reason = f" ({state.reason})" if state.reason else ""
            raise Pending(
                f"{job.id} has not finished after {timeout:g} s: {state.state}{reason}",
                "run the same command again to follow the job",
            )
        sleep(pause if timeout is None else min(pause, max(0.0, started + timeout - now)))
        pause = min(longest, 1.5 * pause)


def _is_check_over(run: RunDir, task: CheckTask) -> bool:
    """Return whether the check has an outcome: a report, a cancellation, or a failure that is not retried."""
    if run.checks.read_report(task.id) is not None or run.is_cancelled(task.job):
        return True
    attempts = run.read_attempts(task.id)
    return bool(attempts) and attempts[-1].outcome not in (None, "done", "port")


def _cancel_check(run: RunDir, launcher: Launcher, task: CheckTask, job: Job) -> None:
    run.mark_job_cancelled(job.id)
    launcher.cancel(run, job)
    run.checks.mark_reported(task.id)


def collect_node_check(
    run: RunDir, task: CheckTask, *, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> ClusterCheck:
    """Return the findings of a check that is over.

    Raises:
        JobFailed: the check failed; the message has what is known of the nodes.
    """
    job = run.find_job(task.job)
    assert job is not None
    deadline = clock() + get_backend(job.scheduler).file_lag
    while not _has_all_reports(run, task, job) and clock() < deadline:
        sleep(POLL_INTERVALS[0])
    run.checks.mark_reported(task.id)
    report = run.checks.read_report(task.id)
    if report is None:
        failure, draft = _make_check_error(run, task, job), run.checks.read_draft_report(task.id)
        if draft is None or run.is_cancelled(task.job):
            raise failure
        reason = failure.message
        if isinstance(failure, OutOfMemoryAtMinimum) and not any(node.gpus for node in draft.nodes):
            reason += f"; {task.spec.cluster.backend.more_memory_advice}"
        report = draft.model_copy(update={"network_error": reason})
    return ClusterCheck(report, tuple(list_node_problems(run, task, report)), tuple(list_node_warnings(task, report)))


def _has_all_reports(run: RunDir, task: CheckTask, job: Job) -> bool:
    """Return whether no further files are to be expected from the nodes."""
    report = run.checks.read_report(task.id)
    if report is not None:
        return not find_nodes_without_files(run, report)
    return _is_check_over(run, task) and len(_find_nodes_with_files(run, task, job)) == task.nodes


# --- Failed checks


def _make_check_error(run: RunDir, task: CheckTask, job: Job) -> TulaError:
    """Return the reason why there is no report; on SLURM, nodes that do not see the run directory take precedence.

    Such nodes cannot report any other reason.
    """
    attempts = run.read_attempts(task.id)
    last_attempt = attempts[-1] if attempts else None
    if run.is_cancelled(task.job):
        return JobFailed(f"{job.id} was cancelled", "run the same command to start another check")
    if job.scheduler == "slurm":
        ended = queue.find_job_outcome(job.scheduler_id)
        if last_attempt is None and ended is not None:
            return JobFailed(
                f"{job.id} ended before it could check the nodes: {FAILURE_KINDS[ended].means}",
                describe_advice(ended, task.spec),
            )
        nodes_with_files = _find_nodes_with_files(run, task, job)
        if len(nodes_with_files) < task.nodes:
            return _make_not_shared_error(run, task, job, nodes_with_files)
    if last_attempt is None or last_attempt.outcome is None:
        return JobFailed(
            f"{job.id} ended before its ranks reported: {_find_last_log_line(run, job)}", describe_advice("unknown")
        )
    where = f" (rank {last_attempt.rank} on {last_attempt.host})" if last_attempt.rank is not None else ""
    failure = last_attempt.failure or Failure(outcome="unknown")
    hint = describe_advice(failure, task.spec)
    return FAILURE_KINDS[failure.outcome].error(f"{job.id} failed{where}: {last_attempt.message}", hint)


def _find_nodes_with_files(run: RunDir, task: CheckTask, job: Job) -> set[int]:
    """Return the numbers of the nodes that have written a file into the run directory."""
    if job.scheduler == "local":
        return set(range(task.nodes))
    ranks = task.spec.cluster.gpus_per_node
    tasks = 1 if task.spec.starts_one_task_per_node else ranks  # SLURM tasks per node
    logs = [path.name.split("_")[1] for path in run.submitit_dir.glob(f"{job.scheduler_id}_*_log.out")]
    return {int(log) // tasks for log in logs if log.isdigit()} | {
        rank // ranks for rank in run.checks.read_signed_in_hosts(task.id)
    }


def _make_not_shared_error(run: RunDir, task: CheckTask, job: Job, nodes_with_files: set[int]) -> JobFailed:
    hosts = site.list_allocated_hosts(job.scheduler_id)
    names = (
        hosts if len(hosts) == task.nodes else tuple(f"node {number + 1} of the job" for number in range(task.nodes))
    )
    hosts_with_files = [name for number, name in enumerate(names) if number in nodes_with_files]
    without = format_hosts(name for number, name in enumerate(names) if number not in nodes_with_files)
    description = (
        f"{format_hosts(hosts_with_files)} wrote files there, {without} did not"
        if hosts_with_files
        else f"{without} reported nothing"
    )
    return JobFailed(
        f"{job.id} failed, probably because its nodes do not all see {run.path.resolve()}: {description}",
        "choose a folder on a file system that this machine and all nodes share: [[--run-dir]] FOLDER"
        + (
            f"; or exclude those nodes: [[--set cluster.slurm.exclude={without.replace(', ', ',')}]]"
            if hosts_with_files and hosts
            else ""
        ),
    )


def _find_last_log_line(run: RunDir, job: Job) -> str:
    for path in sorted(run.submitit_dir.glob(f"{job.scheduler_id}_*_log.err")):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return f"{lines[-1]} ({path})"
    return "its log is empty"
