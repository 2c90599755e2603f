"""Observed jobs as probes of a job."""

import dataclasses
from pathlib import Path

import pytest
from make_runs import script_spec
from observed_jobs import make_job

from tula_cli.cluster.scripts.probe import MeasurementFailed
from tula_cli.errors import BadMeasurements, CommandNotStarted, SpecError
from tula_cli.models.observed import MeasuredJob
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.observed import ObservedJob
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import JobFile
from tula_cli.services import observed_probes
from tula_cli.services.events import WarningEvent
from tula_cli.services.observe import run_observed_command
from tula_cli.services.observed_probes import add_observed_probes, make_probe_result
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml, load_spec

SLURM = {"kind": "slurm", "gpus_per_node": 4, "device": "cuda", "minutes": 30, "slurm": {"partition": "gpu"}}


@pytest.fixture
def spec() -> JobSpec:
    return script_spec(SLURM, epochs=3)


def test_an_observed_job_is_a_probe_with_its_step_times_memory_and_epoch(spec: JobSpec) -> None:
    probe = make_probe_result(make_job(2, 4, seconds=0.2, sync=0.05), spec)
    assert (probe.id, probe.nodes, probe.local_batch, probe.batch) == ("probe-n002-l000032", 2, 32, 256)
    assert probe.step_times == (0.2,) * 20 and probe.sync_time == pytest.approx(0.05)
    assert probe.compute_time == pytest.approx(0.15)
    assert (probe.dataset_size, probe.capacity, probe.memory.peak) == (50_000, 16 << 30, 4 << 30)
    assert probe.measured_at == 9.0 and not probe.oversubscribed
    assert probe.script is not None and probe.script.notes[-1] == "measured in the observed job train/slurm-1.0"


def test_a_job_that_contradicts_the_settings_or_has_no_batch_is_no_probe(spec: JobSpec) -> None:
    with pytest.raises(MeasurementFailed, match=r"4 ranks on 2 nodes, but cluster.gpus_per_node is 4"):
        make_probe_result(make_job(2, 2), spec)
    local = script_spec({"gpus_per_node": 2, "device": "cpu"}, epochs=3)
    with pytest.raises(MeasurementFailed, match=r"with 1, each process counts as a node"):
        make_probe_result(make_job(1, 1), local)
    with pytest.raises(MeasurementFailed, match="batch is unknown"):
        make_probe_result(dataclasses.replace(make_job(2, 4), samples=None), spec)


def test_on_one_machine_processes_stand_for_nodes() -> None:
    local = script_spec({"gpus_per_node": 2, "device": "cpu"}, epochs=3)
    assert make_probe_result(make_job(1, 4), local).nodes == 2


def test_the_newest_measurement_of_a_configuration_counts(
    tmp_path: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(moment: float, job: MeasuredJob) -> MeasuredJob:
        return dataclasses.replace(job, job=str(moment), observed_at=moment)

    jobs = {
        "1": at(1.0, make_job(1, 4, seconds=0.3)),
        "2": at(2.0, make_job(1, 2)),
        "3": at(3.0, make_job(1, 4, seconds=0.2)),
        "4": at(4.0, make_job(2, 4)),
    }
    folder = tmp_path / "train"
    folder.mkdir()
    monkeypatch.setattr(
        observed_probes, "list_observed_jobs", lambda root: [ObservedJob(folder / name) for name in jobs]
    )
    monkeypatch.setattr(observed_probes, "measure_observed_job", lambda job: jobs[job.id])
    run = RunDir.from_spec(tmp_path / "runs", spec)
    events = list(add_observed_probes([Run(run.path, spec)], str(folder)))
    assert [event.warning.values["job"] for event in events if isinstance(event, WarningEvent)] == ["train/2"]  # type: ignore[union-attr]
    single, double = run.read_results()
    assert isinstance(single, Measured) and isinstance(double, Measured)
    assert (single.step_times[0], double.nodes) == (0.2, 2)
    run.write_result(single.model_copy(update={"measured_at": 5.0, "step_times": (0.1,) * 20}))
    list(add_observed_probes([Run(run.path, spec)], str(folder)))
    newer = run.read_result(single.id)
    assert isinstance(newer, Measured) and newer.step_times[0] == 0.1, "a later probe is kept"
    del jobs["1"], jobs["3"], jobs["4"]
    with pytest.raises(BadMeasurements, match="no observed job of"):
        list(add_observed_probes([Run(run.path, spec)], str(folder)))


def test_overrides_are_not_stored_with_observed_jobs_unless_they_make_another_run(
    tmp_path: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(dump_yaml(spec))
    (tmp_path / "train").mkdir()
    monkeypatch.setattr(observed_probes, "list_observed_jobs", lambda root: [ObservedJob(tmp_path / "train" / "1")])
    monkeypatch.setattr(observed_probes, "measure_observed_job", lambda job: make_job(1, 4))

    def add(*overrides: str) -> RunDir:
        assumed = load_spec(job_file, overrides=overrides)
        run = Run(RunDir.from_spec(tmp_path / "runs", assumed).path, assumed)
        file = JobFile(path=str(job_file), overrides=overrides)
        list(add_observed_probes([run], str(tmp_path / "train"), file))
        return run

    plain = JobFile(path=str(job_file))
    for _ in range(2):  # the run is created, and is there
        run = add("search.nodes=[1]")
        assert run.read_job_file() == plain and run.read_spec() == load_spec(job_file)
    renamed = add("name=other")
    assert renamed.read_spec().name == "other" and renamed.read_job_file() == JobFile(
        path=plain.path, overrides=("name=other",)
    )


def test_a_job_without_a_script_takes_no_observed_jobs(tmp_path: Path, spec: JobSpec) -> None:
    with pytest.raises(SpecError, match="no job was observed"):
        list(add_observed_probes([RunDir.from_spec(tmp_path, spec)], str(tmp_path / "train")))
    several = [RunDir.from_spec(tmp_path, spec), RunDir.from_spec(tmp_path, spec)]
    with pytest.raises(SpecError, match="one number of GPUs per node, but this job has 2 combinations"):
        list(add_observed_probes(several, "train"))
    builtin = spec.model_copy(update={"script": None})
    with pytest.raises(SpecError, match="section script"):
        list(add_observed_probes([RunDir.from_spec(tmp_path, builtin)], "train"))


def test_a_folder_stands_for_its_script_or_for_its_job(
    tmp_path: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = RunDir.from_spec(tmp_path / "runs", spec), tmp_path / "tula-observed/train/job"
    job.mkdir(parents=True)
    (beat,) = make_job(1, 4).heartbeats
    (job / "heartbeat-0.json").write_text(beat.model_dump_json())
    for folder in (job.parent, job):
        with pytest.raises(BadMeasurements, match="no observed job of"):  # it has no steps
            list(add_observed_probes([run], str(folder)))
    with pytest.raises(SpecError, match="no job of script tula-observed was observed") as error:
        list(add_observed_probes([run], str(job.parent.parent)))
    assert error.value.hint == "observed scripts: train"
    (tmp_path / "elsewhere/empty").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"no job was observed in .*elsewhere/empty"):
        list(add_observed_probes([run], str(tmp_path / "elsewhere/empty")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as error:
        RunDir.find_newest(tmp_path / "tula-runs")
    assert error.value.hint.endswith("--run DIR; tula observe --report shows the observed jobs")


def test_a_command_that_does_not_exist_has_the_exit_code_of_a_shell(tmp_path: Path) -> None:
    with pytest.raises(CommandNotStarted, match="cannot start nosuchcommand") as error:
        run_observed_command(["nosuchcommand"], tmp_path)
    assert error.value.exit_code == 127
