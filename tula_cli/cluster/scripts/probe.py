"""A probe of a script: its starts, and its result from the files of the ranks."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.scripts.start import (
    PROBE_HANG_SECONDS,
    ScriptProgram,
    compute_script_learning_rate,
    make_script_failure,
)
from tula_cli.cluster.scripts.watch import ScriptMonitor, describe_missing_step
from tula_cli.errors import BadMeasurements
from tula_cli.models.claims import JointStep, find_dataset_size, list_mismatches, select_undisturbed_steps
from tula_cli.models.efficiency import Pair, summarize_gradient_norms
from tula_cli.run.files import open_file_to_append
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.probes import (
    Environment,
    GradientStats,
    Host,
    Measured,
    ModelStates,
    Overheads,
    PeakMemory,
    ScriptObservation,
)
from tula_cli.run.records.scripts import RankResult
from tula_cli.run.records.tasks import ProbeTask, make_probe_identity
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.job import compute_lr_scale
from tula_cli.spec.sections import MIN_TIMED_STEPS
from tula_cli.version import __version__

# --- Probes


class MeasurementFailed(Exception):
    """A start of a script gave no valid measurement; the message is for the user."""


def build_probe_result(
    task: ProbeTask, ranks: Sequence[RankResult], *, local_batch: int, cores: int, log: Path, notes: Sequence[str] = ()
) -> Measured:
    """Return the result of a probe.

    Args:
        ranks: results of the ranks, in order of their rank.
        local_batch: local batch of the probe.
        cores: cores of this node, to decide whether ranks shared them.
        log: output of the command.
        notes: notes for the user, in addition to those of rank 0.

    Raises:
        MeasurementFailed: the results of the ranks are insufficient, or contradict the settings.
    """
    world = task.ranks
    steps = _select_timed_steps(ranks, log)
    first_rank = ranks[0]
    waits = [step.wait for step in steps if step.wait is not None]
    splits = [rank.split for rank in ranks]
    sync = _find_slowest_median([] if split is None else split.sync for split in splits)
    local = _find_slowest_median([] if split is None else [step.seconds for step in split.local] for split in splits)
    times = tuple(step.seconds for step in steps)
    long_sync_warnings = [_warn_long_sync(sync, median(times))] if sync is not None and sync > median(times) else []
    is_single_rank = world == 1  # one rank does not synchronise: the whole step is local work
    return Measured(
        **make_probe_identity(task, local_batch),
        batch=local_batch * world,
        accumulate=task.spec.train.accumulate,
        step_times=times,
        warmup_times=tuple(max(row) for row in zip(*(rank.warmup for rank in ranks), strict=False)),
        sync_time=0.0 if is_single_rank else sync,
        compute_time=median(times) if is_single_rank else local,
        data_wait=median(waits) if len(waits) == len(steps) else None,
        memory=_find_peak_memory(ranks),
        capacity=task.spec.cluster.memory_per_gpu or min((rank.capacity or 0 for rank in ranks), default=0) or None,
        gradients=merge_gradient_stats(ranks, local_batch=local_batch, batch=local_batch * world),
        overheads=Overheads(
            startup=max(rank.startup or 0.0 for rank in ranks),
            eval_batch=None,
            eval_batch_size=None,
            checkpoint=None,
            refresh=None,
        ),
        environment=_make_environment(ranks),
        dataset_size=_find_dataset_size(task, ranks),
        eval_size=None,
        oversubscribed=_is_oversubscribed(task, ranks, cores),
        measured_at=time.time(),
        script=ScriptObservation(
            optimizer=first_rank.optimizer,
            parameters=first_rank.parameters,
            lr=first_rank.lr,
            lr_given=_find_given_learning_rate(task, local_batch * world),
            notes=(*first_rank.notes, *notes, *long_sync_warnings),
        ),
    )


def _warn_long_sync(sync: float, step: float) -> str:
    return (
        f"synchronisation ({1000 * sync:.3g} ms) is longer than the whole step ({1000 * step:.3g} ms), because"
        " the ranks waited for each other while it was measured; do not rely on this value"
    )


def _find_given_learning_rate(task: ProbeTask, batch: int) -> float | None:
    """Return the learning rate in the command line, or the factor on the script's learning rate, or None."""
    placeholders = task.spec.get_script().placeholders
    if "lr" in placeholders:
        return compute_script_learning_rate(task.spec, batch)
    return compute_lr_scale(task.spec, batch) if "lr_factor" in placeholders else None


def _select_timed_steps(ranks: Sequence[RankResult], log: Path) -> Sequence[JointStep]:
    """Return the steps to use for the measurement.

    Raises:
        MeasurementFailed: there are too few steps, or they contradict the settings.
    """
    if not ranks:
        raise MeasurementFailed(f"the command exited with code 0, but {describe_missing_step(log)}")
    if differences := list_mismatches(ranks):
        raise MeasurementFailed(" ".join(mismatch.text for mismatch in differences))
    if len(ranks) < ranks[0].world:
        raise MeasurementFailed(f"only {len(ranks)} of {ranks[0].world} ranks have written their results")
    try:
        steps = select_undisturbed_steps(ranks)
    except BadMeasurements as error:
        if ranks[0].why == "stopped":
            raise MeasurementFailed(f"{error.message}; {error.hint}") from None
        steps = ()
    if len(steps) < MIN_TIMED_STEPS and ranks[0].why == "stopped":
        raise MeasurementFailed(
            f"only {len(steps)} of {len(ranks[0].timed)} timed steps contain no evaluation, checkpoint or start of an epoch;"
            f" at least {MIN_TIMED_STEPS} are needed: raise search.min_steps, or set script.probe_args so that the script evaluates less often in probes"
        )
    if len(steps) < MIN_TIMED_STEPS:
        raise MeasurementFailed(
            f"the script ended after {ranks[0].steps} steps, of which {len(steps)} could be timed, but"
            f" {MIN_TIMED_STEPS} are needed: set script.probe_args so that the script trains longer in probes"
        )
    return steps


def _find_slowest_median(ranks: Iterable[Sequence[float]]) -> float | None:
    """Return the largest median over all ranks, as in tula's training loop; None if a rank has no values."""
    medians = [median(seconds) if seconds else None for seconds in ranks]
    return None if None in medians else max(value for value in medians if value is not None)


def _find_peak_memory(ranks: Sequence[RankResult]) -> PeakMemory:
    """Return the largest peak memory over all ranks and phases."""
    peaks = [peak for rank in ranks for peak in rank.peak.values()]
    sizes = [rank.bytes for rank in ranks if rank.bytes is not None]
    states = None
    if sizes:
        sizes_by_kind = {kind: max(size[kind] for size in sizes) for kind in ("parameters", "gradients", "optimizer")}
        states = ModelStates(**sizes_by_kind, factors=0)
    return PeakMemory(
        states=states,
        peak=max(peak.allocated for peak in peaks),
        reserved=max(peak.reserved for peak in peaks),
    )


def merge_gradient_stats(ranks: Sequence[RankResult], *, local_batch: int, batch: int) -> GradientStats | None:
    """Return gradient statistics, with local norms averaged over all ranks; None if DDP did not provide the norms."""
    norms = [rank.split.norms for rank in ranks if rank.split is not None]
    if len(ranks) < 2 or len(norms) < len(ranks):
        return None
    pairs: list[Pair] = []
    for row in zip(*norms, strict=False):
        small, big = [pair[0] for pair in row], row[0][1]
        if big is not None and None not in small:
            pairs.append((sum(value for value in small if value is not None) / len(small), big))
    return summarize_gradient_norms(pairs, local_batch=local_batch, batch=batch) if pairs else None


def _make_environment(ranks: Sequence[RankResult]) -> Environment:
    hosts: dict[str, list[RankResult]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    nodes = tuple(
        Host(
            name=name,
            ranks=len(rank_results),
            hardware=tuple(sorted({rank.hardware for rank in rank_results})),
            driver="",
        )
        for name, rank_results in hosts.items()
    )
    first_rank = ranks[0]
    return Environment(
        hosts=tuple(hosts),
        device=first_rank.device,
        hardware=" + ".join(sorted({rank.hardware for rank in ranks})),
        driver="",
        backend=first_rank.backend,
        python=first_rank.python,
        torch=first_rank.torch,
        torchvision="",
        tula=__version__,
        nodes=nodes,
        workers=first_rank.loader.workers if first_rank.loader is not None else None,
    )


def _find_dataset_size(task: ProbeTask, ranks: Sequence[RankResult]) -> int:
    """Return the samples per epoch: as in the spec, else as reported by the data loader.

    Raises:
        MeasurementFailed: neither is known.
    """
    known_size, counted = task.spec.get_script().known_dataset_size, find_dataset_size(ranks)
    size = counted if known_size is None else known_size
    if size is None:
        raise MeasurementFailed(
            "the number of samples per epoch is unknown, because the script does not use a torch DataLoader with a known"
            " length; set script.dataset_size"
        )
    return size


def _is_oversubscribed(task: ProbeTask, ranks: Sequence[RankResult], cores: int) -> bool:
    cluster = task.spec.cluster
    sharing = cluster.backend.count_ranks_per_machine(task.ranks, gpus_per_node=cluster.gpus_per_node)
    return ranks[0].device == "cpu" and sharing > cores


# --- The program

POLL_SECONDS = 0.5  # seconds


def _read_rank_results(attempt: ScriptAttempt, ranks: int, *, max_seconds: float) -> list[RankResult]:
    """Return the results of the ranks; if any is there, wait up to `max_seconds` for the rest."""
    deadline = time.monotonic() + max_seconds
    while len(results := attempt.read_results()) < ranks and results and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return results


class ScriptProbe(ScriptProgram):
    """A probe of a script, which is started once for each local batch."""

    task: ProbeTask
    mode = "probe"
    silence = PROBE_HANG_SECONDS

    def make_leader_command(self, *, attempt: int, rendezvous: str) -> LeaderCommand:
        command = super().make_leader_command(attempt=attempt, rendezvous=rendezvous)
        return command.model_copy(update={"batch": (self.run.find_current_probe(self.task) or 0) * self.task.ranks})

    def make_monitor(self, allocation: Allocation, command: LeaderCommand) -> ScriptMonitor:
        return ScriptMonitor(self, command, self.list_ranks(allocation))

    def get_output_folder(self, command: LeaderCommand) -> Path:
        return self.get_attempt(command).output_folder

    def get_extra_arguments(self, command: LeaderCommand) -> str:
        return self.script.probe_args

    def get_hook_checkpoint_path(self, command: LeaderCommand, values: Mapping[str, str | float]) -> str:
        return str(self.get_output_folder(command) / "checkpoint.pt")

    def record_results(self, command: LeaderCommand, failure: Failure | None) -> Failure | None:
        """Write the result of the measured batch."""
        attempt, file_lag = self.get_attempt(command), self.task.spec.cluster.backend.file_lag
        ranks = _read_rank_results(attempt, command.ranks, max_seconds=file_lag if failure is None else 0.0)
        stopped = len(ranks) == command.ranks and all(rank.why == "stopped" for rank in ranks)
        if failure is not None and not stopped:
            return failure
        cores = len(os.sched_getaffinity(0))
        try:
            path, local_batch = self.run.get_log_path(self.task.id, command.attempt), command.batch // command.ranks
            result = build_probe_result(
                self.task, ranks, local_batch=local_batch, cores=cores, log=path, notes=attempt.read_moved_files()
            )
            self.run.write_result(result)
            with open_file_to_append(path) as log:
                log.write(f"{result.description}\n".encode())
        except MeasurementFailed as error:
            return make_script_failure(failure, str(error))
        return None

    def preview_command(self) -> str:
        return self.preview_command_at_batch(self.task.local_batches[0] * self.task.ranks)
