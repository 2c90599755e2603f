"""Observed jobs as probes: `tula recommend --observed`."""

import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_cli.cluster.scripts.probe import MeasurementFailed, build_probe_result
from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.models.observed import MeasuredJob
from tula_cli.options import DEFAULT_OBSERVATIONS_FOLDER
from tula_cli.run.directory import Run
from tula_cli.run.format import require_current_format
from tula_cli.run.job_runs import list_variants, save_runs
from tula_cli.run.observed import ObservedJob, list_observed_jobs
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import JobFile
from tula_cli.run.records.scripts import ExpectedValues
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services import messages
from tula_cli.services.events import Note, WarningEvent, Work
from tula_cli.services.observe import list_jobs_of_script, measure_observed_job
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec
from tula_cli.spec.signature import compute_measurement_signature
from tula_cli.words import describe_probe_configuration, format_count


def add_observed_probes(runs: Sequence[Run], name: str, file: JobFile | None = None) -> Work[None]:
    """Write the measurements of the observed jobs of a script into a run as results of probes; create it if needed.

    The newest measurement of each configuration counts, also against probes of `tula profile`. Jobs with other hardware
    or another number of parameters than the newest job are not used.

    Args:
        runs: the only run of a job that starts the script.
        name: the script, its folder of observations, or the folder of one job.
        file: the file that the settings come from. Its overrides are not stored, because a recommendation only assumes
            them, unless they make it a run of its own.

    Raises:
        SpecError: the job has no script or is measured in several runs, or no job of this name was observed.
        BadMeasurements: no observed job can be used.
        OtherFormat, TulaError: the run cannot be written.
    """
    run, spec = runs[0], runs[0].spec
    if spec.script is None:
        raise SpecError(
            "[[--observed]] needs a job with section script", "add section script, or measure the job with tula profile"
        )
    if len(runs) > 1:
        raise SpecError(
            f"[[--observed]] needs a job with one node type and one number of GPUs per node, but this job has {len(runs)} combinations of them",
            "set cluster.gpus_per_node, and remove node_types and search.gpus_per_node",
        )
    require_current_format(run.path)
    jobs = _list_named_jobs(name)
    results: dict[str, Measured] = {}
    kind = None  # hardware of the newest usable job; other jobs must match it
    for job in reversed(jobs):
        try:
            measured = measure_observed_job(job)
            if kind is not None and measured.kind != kind:
                raise MeasurementFailed("newer jobs ran on other hardware or with another number of parameters")
            result = make_probe_result(measured, spec)
        except (BadMeasurements, MeasurementFailed) as error:
            yield WarningEvent(
                messages.observed_job_not_used(
                    job=f"{job.script}/{job.id}",
                    why=_describe_reason(error, job),
                )
            )
        else:
            kind = measured.kind
            results.setdefault(result.id, result)
    if not results:
        raise BadMeasurements(
            f"no observed job of {name} can be used as a probe",
            "the warnings show why; run tula profile to measure the job instead",
        )
    save_runs(*_drop_overrides(run, file))
    for result in results.values():
        known = run.read_result(result.id)
        if not isinstance(known, Measured) or known.measured_at < result.measured_at:
            run.write_result(result)
    configuration_texts = [
        describe_probe_configuration(result.nodes, result.local_batch) for result in reversed(results.values())
    ]
    yield Note(f"probes taken from observed jobs: {'; '.join(configuration_texts)}")


def _describe_reason(error: BadMeasurements | MeasurementFailed, job: ObservedJob) -> str:
    """Return why an observed job cannot be used, without the name of the job, with which an error begins."""
    reason = error.message if isinstance(error, BadMeasurements) else str(error)
    return reason.removeprefix(f"{job.script}/{job.id}: ")


def _drop_overrides(run: Run, file: JobFile | None) -> tuple[list[Run], JobFile | None]:
    """Return a run and its job file without the overrides that do not change what is measured."""
    if file is None or not file.overrides:
        return [run], file
    if run.exists:
        return [run.with_spec(run.read_job())], run.read_job_file()
    try:
        variants = list_variants(load_spec(Path(file.path)))
    except SpecError:  # the file is invalid without the overrides
        return [run], file
    job, spec = variants[0][1], run.spec
    is_same = job.name == spec.name and compute_measurement_signature(job) == compute_measurement_signature(spec)
    if len(variants) > 1 or not is_same:
        return [run], file
    return [run.with_spec(job)], JobFile(path=file.path)


def _list_named_jobs(name: str) -> list[ObservedJob]:
    """Return the observed jobs of a script, of a script's folder, or of a job's folder, oldest first."""
    if not Path(name).is_dir():
        root = Path(DEFAULT_OBSERVATIONS_FOLDER)
        return list_jobs_of_script(list_observed_jobs(root), root, name)
    folder = Path(name).resolve()
    if (job := ObservedJob(folder)).heartbeats:
        return [job]
    # the folder may be that of one script, or of all scripts
    jobs = list_observed_jobs(folder.parent) or list_observed_jobs(folder)
    return list_jobs_of_script(jobs, folder, folder.name)


def make_probe_result(job: MeasuredJob, spec: JobSpec) -> Measured:
    """Return the measurements of an observed job as the result of a probe.

    Raises:
        MeasurementFailed: its batch or the samples of an epoch are unknown, or it contradicts the settings of the job.
    """
    script, per_node = spec.get_script(), spec.cluster.gpus_per_node
    per_machine = spec.cluster.backend.count_ranks_per_machine(job.world, gpus_per_node=per_node)
    if job.world % per_node or job.gpus_per_node != per_machine:
        is_local = per_machine == job.world  # all processes share this machine, whatever the number per node
        advice = " (with 1, each process counts as a node)" if is_local else ""
        raise MeasurementFailed(
            f"it had {format_count(job.world, 'rank')} on {format_count(job.nodes)}, but cluster.gpus_per_node is {per_node}{advice}"
        )
    if job.local_batch is None:
        raise MeasurementFailed("the batch is unknown, because the script reads its data without a torch DataLoader")
    expected = ExpectedValues(
        world=job.world,
        batch=job.local_batch * job.world,
        accumulate=spec.train.accumulate if script.accumulates else None,
        dataset=None if script.dataset_size == "auto" else script.dataset_size,
    )
    task = ProbeTask(
        id="observed",
        job="observed",
        spec=spec,
        workdir=str(Path.cwd()),
        nodes=job.world // per_node,
        local_batches=(job.local_batch,),
    )
    is_here = all(rank.host == socket.gethostname() for rank in job.ranks)
    result = build_probe_result(
        task,
        [rank.model_copy(update={"expected": expected}) for rank in job.ranks],
        local_batch=job.local_batch,
        cores=len(os.sched_getaffinity(0)) if is_here else sys.maxsize,
        log=Path(),
        notes=(f"measured in the observed job {job.script}/{job.job}",),
    )
    compute = job.convert_to_observation().compute_time
    return result.model_copy(
        update={"compute_time": None if math.isnan(compute) else compute, "measured_at": job.observed_at}
    )
