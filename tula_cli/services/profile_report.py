"""The measurements of a profile so far, or the error if there is none."""

from dataclasses import dataclass

from tula_cli.errors import BadMeasurements, JobFailed, OutOfMemoryAtMinimum
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.services.plans import ProfilePlan
from tula_cli.services.status import summarize_probe_notes
from tula_cli.spec.job import JobSpec


@dataclass(frozen=True)
class ProfileReport:
    """The measurements so far."""

    measured: tuple[Measured, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    failed: tuple[Failed, ...]
    missing: tuple[str, ...]  # ids of probes without a result
    certainty: str = ""  # how certain the decisions are and why no more is measured, with strategy: adaptive
    notes: tuple[str, ...] = ()  # quantities that the script's probes could not measure, and why

    @property
    def finished(self) -> bool:
        """Whether no probe has failed or is missing."""
        return not self.failed and not self.missing


def is_plan_measured(run: RunDir, plan: ProfilePlan) -> bool:
    """Return whether every probe of a plan has a result, and at least one did not fail (measured or out of memory)."""
    results = [run.read_result(make_probe_id(task.nodes, size)) for task in plan.tasks for size in task.local_batches]
    return None not in results and not all(isinstance(result, Failed) for result in results)


def make_profile_report(run: RunDir, plan: ProfilePlan) -> ProfileReport:
    """Return the results of a finished profile.

    Raises:
        OutOfMemoryAtMinimum: no local batch fits.
        JobFailed, Diverged: probes failed, and none was measured now.
        BadMeasurements: none was measured for another reason.
    """
    results = run.read_results()
    measured = tuple(result for result in results if isinstance(result, Measured))
    failed = tuple(result for result in results if isinstance(result, Failed))
    out_of_memory = tuple(result for result in results if isinstance(result, OutOfMemory))
    known_ids = {result.id for result in results}
    wanted_ids = [make_probe_id(task.nodes, local) for task in plan.tasks for local in task.local_batches]
    missing = tuple(i for i in wanted_ids if i not in known_ids)
    report = ProfileReport(measured, out_of_memory, failed, missing, plan.certainty, summarize_probe_notes(measured))
    of_plan = [result for result in results if result.id in wanted_ids]
    if not measured or (of_plan and all(isinstance(result, Failed) for result in of_plan)):
        raise _make_nothing_measured_error(report, next((task.spec for task in plan.tasks), None))
    return report


def _make_nothing_measured_error(report: ProfileReport, spec: JobSpec | None) -> Exception:
    if report.failed:
        first_failure = report.failed[0]
        have_same_outcome = all(result.outcome == first_failure.outcome for result in report.failed)
        kind = FAILURE_KINDS[first_failure.outcome].error if have_same_outcome else JobFailed
        return kind(
            f"{first_failure.id} failed: {first_failure.message}",
            describe_advice(first_failure.failure, spec),
        )
    if report.out_of_memory:
        first_oom = report.out_of_memory[0]
        return OutOfMemoryAtMinimum(
            f"out of memory at the smallest local batch, {first_oom.local_batch}: {first_oom.message}",
            describe_advice("device_oom", spec),
        )
    return BadMeasurements("no probe has a result", "run tula profile again; tula status shows the jobs")
