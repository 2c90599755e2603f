"""The Python API: `import tula_cli as tula`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_results import Truth, measured

import tula_cli as tula
from tula_cli.cluster import inspection, launcher
from tula_cli.errors import Interruption
from tula_cli.run.directory import RunDir
from tula_cli.run.jobfile import edited
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.tasks import ProbeTask, TrainTask
from tula_cli.services.events import Note, ProfilePlanned, Warned, Watched, Work, follow
from tula_cli.spec.load import dump_yaml


class AtOnce(make.FakeLauncher):
    """Runs each job while it is submitted."""

    def submit(self, run: RunDir, task: ProbeTask | TrainTask) -> Any:
        self.says[task.job] = "ended"
        if isinstance(task, ProbeTask):
            for local in task.local_batches:
                run.write_result(measured(Truth(gpus_per_node=1), task.nodes, local))
        return super().submit(run, task)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AtOnce:
    """Work in a folder of its own, where no job takes time."""
    held = AtOnce()
    told = Inspection(
        dataset_size=300, eval_size=50, classes=10, sample_shape=(1, 8, 8), parameters=1000, footprints=(),
        estimate_error="", device="cpu", hardware="cpu", capacity=None, cpus=2,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launcher_for", lambda spec, **_: held)
    monkeypatch.setattr(inspection, "inspect", lambda spec: told)
    return held


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("tula_cli", "pydantic submitit torch numpy pandas rich typer yaml"),
        ("tula_cli.optim", "pydantic submitit pandas rich typer"),
    ],
)
def test_an_import_brings_nothing_that_it_does_not_need(module: str, kept_out: str) -> None:
    assert python(f"import sys, {module}; print([m for m in {kept_out.split()} if m in sys.modules])") == "[]"


def test_names_are_told_before_they_are_looked_up() -> None:
    assert {"profile", "recommend", "train", "Run", "__version__"} <= set(dir(tula))
    assert all(callable(getattr(tula, name)) for name in tula.__all__ if name != "__version__")
    assert tula.__version__ == python("from tula_cli.version import __version__ as v; print(v)")
    with pytest.raises(AttributeError, match="no attribute 'profil'"):
        tula.profil  # type: ignore[attr-defined]  # noqa: B018


def test_a_job_goes_to_a_recommendation_and_prints_nothing(cluster: AtOnce, capfd: pytest.CaptureFixture[str]) -> None:
    run = tula.profile(make.SPEC)
    answer = tula.recommend(run, objective="time")
    table, rows = run.results(), answer.frame()
    assert cluster.submitted == ["probe-n001", "probe-n002"]
    assert set(table.outcome) == {"measured"} and len(table) == len(run.probes()[None])
    assert rows[rows.chosen].batch.tolist() == [answer.choice.batch] and run.recommendation() == answer
    assert not tula.status(run).active and set(tula.status(run).frame().state) == {"done"}
    assert capfd.readouterr() == ("", "")


def test_a_job_is_a_path_its_content_or_a_spec_and_a_run_its_folder(cluster: AtOnce, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_yaml(make.spec()))
    run = tula.profile("job.yaml")
    assert {tula.profile(job).path for job in (make.SPEC, make.spec(), run, run.path)} == {run.path}
    assert len(cluster.submitted) == 2, "what is measured is not measured again"
    assert tula.recommend("job.yaml").choice == tula.recommend(run.path).choice


def test_a_cap_of_the_call_is_no_edit_of_the_job_file(cluster: AtOnce, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_yaml(make.spec()))
    run = tula.profile("job.yaml", max_node_hours=5)
    assert run.spec().search.max_node_hours == 5 and edited(run.directory, run.spec()) is None


def test_columns_of_whole_numbers_stay_whole(cluster: AtOnce) -> None:
    run = tula.profile(make.SPEC)
    make.add_out_of_memory(run.directory, 1, 512)
    table = run.results()
    assert table.peak_memory_bytes.isna().sum() == 1
    assert str(table.peak_memory_bytes.dtype) == "Int64" and str(table.batch.dtype) == "Int64"


def test_spending_is_capped_or_confirmed(cluster: AtOnce) -> None:
    job = {**make.SPEC, "search": {"nodes": [1, 2]}}
    asked: list[Any] = []
    for refused in ({}, {"max_node_hours": 1e-6}, {"confirm": lambda planned: asked.append(planned)}):
        with pytest.raises(tula.TulaError) as error:
            tula.profile(job, **refused)
        assert error.value.code == "budget" and not cluster.submitted
    (planned,) = asked
    assert isinstance(planned, ProfilePlanned) and planned.node_hours > 0
    tula.profile(job, confirm=lambda planned: planned.node_hours < 100)
    assert cluster.submitted


def test_events_come_by_iterating_or_to_a_function(cluster: AtOnce) -> None:
    told: list[Any] = []
    *events, finished = tula.profile_events(make.SPEC)
    assert finished.run == tula.profile(make.SPEC, on_event=told.append)  # type: ignore[union-attr]
    assert {ProfilePlanned, Watched} <= set(map(type, events)) and Note in map(type, told)


def test_what_is_not_there_is_one_error(cluster: AtOnce, tmp_path: Path) -> None:
    with pytest.raises(tula.TulaError, match="nothing was measured for toy yet"):
        tula.recommend(make.SPEC)
    with pytest.raises(tula.TulaError, match="not a run directory"):
        tula.status(tmp_path)


def test_ctrl_c_leaves_the_jobs_and_is_no_error_of_tula(cluster: AtOnce) -> None:
    def press(event: object) -> None:
        if isinstance(event, Watched):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the jobs go on") as pressed:
        tula.profile(make.SPEC, on_event=press)
    assert isinstance(pressed.value, Interruption) and not isinstance(pressed.value, tula.TulaError)
    assert cluster.submitted and not cluster.cancelled


def test_work_returns_its_result_and_ends_where_it_is_told() -> None:
    def work() -> Work[str]:
        try:
            yield Note("one")
        except KeyboardInterrupt:
            yield Warned("pressed")
        return "done"

    def press(event: object) -> None:
        told.append(event)
        if event == Note("one"):
            raise KeyboardInterrupt

    told: list[Any] = []
    assert follow(work(), press) == "done" and told == [Note("one"), Warned("pressed")]
