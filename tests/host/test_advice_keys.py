"""Each key that a hint names can be written into the file of the job that gets it: a script's, or one of tula's own loop."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import make_runs as make
import pytest
from pydantic import BaseModel

from tula_cli.errors import Infeasible, TulaError
from tula_cli.host.failure_texts import find_device_fault
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.models.cost import compute_max_cost
from tula_cli.models.observations import require_measurements
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import Source
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure, FaultName
from tula_cli.run.records.probes import OutOfMemory
from tula_cli.run.records.tasks import TrainTask, make_probe_id
from tula_cli.services import profile_report
from tula_cli.services.plans import ProfilePlan
from tula_cli.services.search import list_feasible_candidates
from tula_cli.services.training_end import make_training_error
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.placeholders import find_placeholders
from tula_cli.spec.scripts.script import SCRIPT_TRAIN_KEYS, TULA_LOOP_SECTIONS

CLUSTERS: dict[str, dict[str, Any]] = {
    "this machine": {},
    "slurm": {"kind": "slurm"},
    "own scheduler": {"kind": "my.queue:Queue"},
}
WORDS = {
    "memory": "CUDA error: uncorrectable ECC error encountered",
    "link": "uncorrectable NVLink error",
    "gone": "GPU has fallen off the bus",
    "busy": "all CUDA-capable devices are busy or unavailable",
    "fabric": "Error 802: system not yet initialized",
    "driver": "Failed to initialize NVML: Driver/library version mismatch",
    "mps": "cudaErrorMpsServerNotReady",
    "locked memory": "ibv_reg_mr failed: Cannot allocate memory",
    "no GPU": "RuntimeError: No CUDA GPUs are available",
}
JOBS = [(who, where) for who in ("script", "own loop") for where in CLUSTERS]


def spec_of(who: str, where: str) -> JobSpec:
    cluster = {"gpus_per_node": 2, **CLUSTERS[where]}
    if who == "own loop":
        return make.spec(cluster=cluster)
    return make.script_spec(cluster, epochs=3)


def hints(spec: JobSpec, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield every hint of an end, with what it is about."""
    run = RunDir.create(tmp_path, spec)
    of_queues = {"time_limit"} if spec.cluster.kind == "local" else set()
    for outcome in sorted(FAILURE_KINDS.keys() - of_queues):
        yield outcome, describe_advice(outcome, spec)
        yield f"a training: {outcome}", _end_of_training(run, outcome).hint
        yield f"all probes: {outcome}", _end_of_probes(spec, outcome, tmp_path / outcome).hint
    for name, words in WORDS.items():
        yield name, describe_advice(Failure(outcome="device_fault", fault=find_device_fault(words)), spec)
    with pytest.raises(Infeasible) as caught:
        list_feasible_candidates(spec, dataset_size=10_000, max_local_batch=1)
    yield "before anything ran", caught.value.hint
    make.add_out_of_memory(run, 1, 16)
    oom = run.read_result(make_probe_id(1, 16))
    assert isinstance(oom, OutOfMemory)
    with pytest.raises(Infeasible) as caught:
        require_measurements(spec, [], [oom], [])
    yield "in every probe", caught.value.hint


def _end_of_training(run: RunDir, outcome: OutcomeClass) -> TulaError:
    make.add_training(run)
    task = run.get_training("ab12cd34").read_newest_task()
    assert isinstance(task, TrainTask)
    last = make.attempt(task.id, end=2e9, outcome=outcome, message="so it was", rank=0)
    return make_training_error(task, [last], saved_samples=0)


def _end_of_probes(spec: JobSpec, outcome: OutcomeClass, folder: Path) -> TulaError:
    run = RunDir.create(folder, spec)
    make.add_probes(run, 1, (32,))
    if outcome == "device_oom":
        make.add_out_of_memory(run, 1, 32)
    else:
        make.add_failed(run, 1, 32, "so it was", outcome=outcome)
    plan = ProfilePlan(tuple(run.read_tasks()), 1, 0, 20, Source(Path(), ""), **vars(compute_max_cost(spec, 0.3, None)))
    with pytest.raises(TulaError) as caught:
        profile_report.make_profile_report(run, plan)
    return caught.value


KEY = re.compile(
    r"\b(?:train|search|cluster|script|ags|pricing|export|model|dataset|transforms|loss|optimizer|schedule|auto)\.[a-z_]+(?:\.[a-z_]+)*"
)


def is_valid(key: str, spec: JobSpec) -> bool:
    """Return whether a job of that kind may have the key in its file."""
    section, *path = key.split(".")
    if spec.script is not None and (
        section in TULA_LOOP_SECTIONS or (section == "train" and path[0] not in SCRIPT_TRAIN_KEYS)
    ):
        return False
    if spec.script is None and section == "script":
        return False
    kind = {"slurm": "slurm", "local": ""}.get(spec.cluster.kind, "scheduler")
    if section == "cluster" and path[0] in ("slurm", "scheduler") and path[0] != kind:
        return False
    part: Any = JobSpec
    for name in (section, *path):
        if part is None or name not in part.model_fields:
            return False
        annotation = part.model_fields[name].annotation
        part = next((each for each in (annotation, *get_args(annotation)) if _is_section(each)), None)
    return True


def _is_section(each: Any) -> bool:
    return isinstance(each, type) and issubclass(each, BaseModel)


def unconditional(hint: str) -> str:
    """Return a hint without what it says of SLURM alone."""
    return re.sub(r"\(on SLURM: [^)]*\)", "", hint)


@pytest.mark.parametrize(("who", "where"), JOBS)
def test_each_key_that_a_hint_names_can_stand_in_the_jobs_file(who: str, where: str, tmp_path: Path) -> None:
    spec = spec_of(who, where)
    wrong = [
        (about, key, hint)
        for about, hint in hints(spec, tmp_path)
        for key in KEY.findall(unconditional(hint))
        if not is_valid(key, spec)
    ]
    assert not wrong


@pytest.mark.parametrize(("who", "where"), JOBS)
def test_placeholders_that_a_hint_names_are_known_and_of_scripts_alone(who: str, where: str, tmp_path: Path) -> None:
    for about, hint in hints(spec_of(who, where), tmp_path):
        assert "{{" not in hint and "\n" not in hint, about
        assert who == "script" or not find_placeholders(hint), about


def test_all_faults_of_devices_are_tried() -> None:
    assert {find_device_fault(words) for words in WORDS.values()} == set(get_args(FaultName))


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("diverged", "script.reference.lr"),
        ("device_oom", "in the script"),
        ("host_oom", "the script's loader workers"),
        ("user", "correct the script"),
        ("device_error", "the script or a library"),
    ],
)
def test_an_end_of_a_script_is_reported_as_the_scripts(outcome: OutcomeClass, words: str, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, spec_of("script", "slurm"))
    assert words in _end_of_training(run, outcome).hint
    assert words in _end_of_probes(run.read_spec(), outcome, tmp_path / "probes").hint
