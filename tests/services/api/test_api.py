"""The Python API: `import tula_cli as tula`."""

import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_runs as make
import pandas as pd
import pytest
from make_damages import write_checkpoint
from make_results import Truth, make_footprint, make_probe

import tula_cli as tula
from tula_cli.cluster import inspection, launcher
from tula_cli.cluster.launcher import delay_interrupts
from tula_cli.diagnostics import DiagnosticWarning
from tula_cli.errors import CannotWrite, Interruption, JobFailed, SchedulerError, SpecError, name_options
from tula_cli.options import with_arguments
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import find_config_drift
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.tasks import CheckTask, EvaluateTask, ProbeTask
from tula_cli.services import messages, profile
from tula_cli.services.api import TrainArguments
from tula_cli.services.events import JobsProgress, Note, ProfilePlanned, WarningEvent, Work, run_work
from tula_cli.services.waiting import Submission
from tula_cli.spec.load import dump_yaml


class AtOnce(make.FakeLauncher):
    """Runs each job while it is submitted."""

    def submit(self, run: RunDir, task: Any) -> Any:
        self.says[task.job] = "ended"
        if isinstance(task, ProbeTask):
            for local in task.local_batches:
                run.write_result(make_probe(Truth(gpus_per_node=1), task.nodes, local))
        elif isinstance(task, CheckTask):
            for rank in range(task.nodes):
                run.checks.record_sign_in(task.id, rank, f"n{rank + 1}")
            run.checks.write_report(make.cluster_report(run, task, {}, {"torch": "2.7"}))
        elif isinstance(task, EvaluateTask):
            run.get_training(task.signature).write_evaluation(make.evaluation(task))
        else:
            run.write_train_result(make.train_result(task.signature))
            metrics = {"top1": 90.0 - task.batch / 64 + task.spec.train.seed, "eval_loss": 1.0}
            run.write_summary(make.summary(signature=task.signature, batch=task.batch, metrics=metrics))
        return super().submit(run, task)


TOLD = Inspection(
    dataset_size=300, eval_size=50, classes=10, sample_shape=(1, 8, 8), parameters=1000, footprints=(),
    estimate_error="", device="cpu", hardware="cpu", capacity=None, cpus=2,
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AtOnce:
    """Work in a folder of its own, where no job takes time."""
    kept = AtOnce()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "make_launcher", lambda spec, **_: kept)
    monkeypatch.setattr(inspection, "inspect", lambda spec: TOLD)
    return kept


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


def test_names_are_reported_before_they_are_looked_up() -> None:
    assert {"profile", "recommend", "train", "Run", "__version__"} <= set(dir(tula))
    assert all(callable(getattr(tula, name)) for name in tula.__all__ if name != "__version__")
    assert tula.__version__ == python("from tula_cli.version import __version__ as v; print(v)")
    with pytest.raises(AttributeError, match="no attribute 'profil'"):
        tula.profil  # type: ignore[attr-defined]  # noqa: B018


def test_the_file_latest_names_the_newest_run(cluster: AtOnce) -> None:
    run = tula.profile(make.SPEC)
    latest = run.path.parent / "latest"
    assert latest.is_file() and tula.Run.open(latest) == run and tula.recommend(str(latest)).rows
    with pytest.raises(SpecError, match="A and B are the same run"):
        tula.diff(latest, run)
    with pytest.raises(SpecError, match=r"there is no run .*/elsewhere/latest"):
        tula.status("elsewhere/latest")


@pytest.mark.torch
def test_a_run_is_sent_to_a_tracker_and_nothing_twice(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make.spec())
    make.add_probes(run, 1, (32,))
    run.write_result(make_probe(Truth(), 1, 32))
    (first,) = tula.export(run.path, "tensorboard")
    assert (first.to, first.runs, first.new_runs, first.problem) == ("tensorboard", 1, 1, "")
    (again,) = tula.export(run.path, ["tensorboard"], uri=str(run.path / "exports" / "tensorboard"))
    assert (again.new_runs, again.new_points) == (0, 0)
    with pytest.raises(SpecError, match="no tracker was given"):
        tula.export(run.path)
    with pytest.raises(SpecError, match="uri and project are settings of one tracker"):
        tula.export(run.path, ["mlflow", "wandb"], project="x")
    with pytest.raises(SpecError, match="every"):
        tula.export(run.path, "tensorboard", every="30")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda: tula.train(make.SPEC, nodes="8-2"), "nodes 8-2: the range is empty", "did you mean nodes 2-8?"),
        (
            lambda: tula.train(make.SPEC),
            "has no recommendation, and nodes and batch are not given",
            "run tula profile and tula recommend, or give both: tula train --nodes N --batch B",
        ),
        (
            lambda: tula.compare(make.SPEC, batches=[10**6]),
            "method lbt: batch 1000000 is larger than the dataset",
            "lower batches; the largest power of two that fits is",
        ),
        (
            lambda: tula.check(make.SPEC, overrides=["x"]),
            "overrides=['x']: expected key.subkey=value",
            "for example overrides=['search.nodes=[2,4]']",
        ),
        (
            lambda: tula.plan_trainings(make.SPEC, [1, 2]),
            "trainings: got 2 numbers",
            "trainings=[10, 20]",
        ),
        (lambda: tula.recommend(make.SPEC, observed="x"), "observed needs a job with section script", "add section"),
        (lambda: tula.find_learning_rate(make.SPEC, batch=10**30), "batch: must be at most 2147483647", ""),
    ],
)
def test_errors_of_functions_name_arguments_not_options(
    cluster: AtOnce, call: Callable[[], object], message: str, hint: str
) -> None:
    if "trainings" in message:
        tula.profile(make.SPEC)
    with pytest.raises(tula.TulaError) as caught:
        call()
    assert message in caught.value.message and hint in caught.value.hint


def test_errors_of_functions_name_values_of_switches(cluster: AtOnce) -> None:
    @with_arguments(TrainArguments)
    def fail(arguments: TrainArguments) -> None:
        raise SpecError(
            "[[--no-rehearse]] prevents it; remove [[--within-balance]]",
            "raise it: [[--set a.b=[1,2] --set c=3]], or run tula check --set a=1; [[--batch 10 --batch 20]], [[--other 1]]",
        )

    with pytest.raises(SpecError) as caught:
        fail(make.SPEC)
    assert caught.value.message == "rehearse=False prevents it; remove within_balance=True"
    assert caught.value.hint == (
        "raise it: overrides=['a.b=[1,2]', 'c=3'], or run tula check --set a=1; batch=[10, 20], --other 1"
    )
    assert name_options("[[--nodes]] 4, [[--set a.b=[1,2]]]") == "--nodes 4, --set a.b=[1,2]", "after the call"


@pytest.mark.parametrize("values", [[""], ["a.b=[[1],[2]]", "c=3"], ["a.b=1\nc"]])
def test_marked_options_may_have_any_values(values: list[str]) -> None:
    assert name_options(f"[[--set {' --set '.join(values)}]]: wrong, [[--nodes]]") == (
        f"--set {' --set '.join(values)}: wrong, --nodes"
    )


@pytest.mark.parametrize("error", [JobFailed, SchedulerError])
def test_errors_that_quote_a_program_keep_its_flags(error: type[tula.TulaError]) -> None:
    @with_arguments(TrainArguments)
    def fail(arguments: TrainArguments) -> None:
        raise error("train.py: error: unrecognized arguments: --batch 64", "start again with [[--batch]] 32")

    with pytest.raises(error) as caught:
        fail(make.SPEC)
    assert caught.value.message == "train.py: error: unrecognized arguments: --batch 64"
    assert caught.value.hint == "start again with batch 32"


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


@pytest.mark.parametrize("job", [3, None, ["job.yaml"]])
def test_what_is_no_job_is_reported(job: Any) -> None:
    with pytest.raises(SpecError, match=re.escape(f"{job!r} is not a run or a job")):
        tula.profile(job)


def test_a_cap_of_the_call_is_no_edit_of_the_job_file(cluster: AtOnce, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_yaml(make.spec()))
    run = tula.profile("job.yaml", max_node_hours=5)
    assert run.spec().search.max_node_hours == 5 and find_config_drift(run.directories[0]) is None


def whole(table: pd.DataFrame) -> set[str]:
    return {str(name) for name, dtype in table.dtypes.items() if str(dtype) == "Int64"}


def test_columns_of_whole_numbers_stay_whole(cluster: AtOnce) -> None:
    run = tula.profile(make.SPEC)
    make.add_out_of_memory(run.directories[0], 1, 512)
    table = run.results()
    assert table.peak_memory_bytes.isna().sum() == 1
    assert whole(table) == {"nodes", "gpus_per_node", "batch", "local_batch", "peak_memory_bytes"}
    assert whole(tula.recommend(run).frame()) == {"nodes", "batch", "local_batch", "peak_memory"}
    assert whole(tula.status(run).frame()) == {"nodes", "done", "total"}


def test_spending_is_capped_or_confirmed(cluster: AtOnce) -> None:
    job = {**make.SPEC, "search": {"nodes": [1, 2]}}
    requested: list[Any] = []
    for refused in ({}, {"max_node_hours": 1e-6}, {"confirm": lambda planned: requested.append(planned)}):
        with pytest.raises(tula.TulaError) as error:
            tula.profile(job, **refused)
        assert error.value.code == "budget" and not cluster.submitted
    (planned,) = requested
    assert isinstance(planned, ProfilePlanned) and planned.node_hours > 0
    tula.profile(job, confirm=lambda planned: planned.node_hours < 100)
    assert cluster.submitted


def test_events_come_to_a_function(cluster: AtOnce) -> None:
    events: list[Any] = []
    run = tula.profile(make.SPEC, on_event=events.append)
    assert {ProfilePlanned, JobsProgress} <= set(map(type, events))
    assert tula.profile(make.SPEC, on_event=events.append) == run and isinstance(events[-1], Note)


def test_what_is_not_there_is_one_error(cluster: AtOnce, tmp_path: Path) -> None:
    with pytest.raises(tula.TulaError, match="toy has no measurements yet"):
        tula.recommend(make.SPEC)
    with pytest.raises(tula.TulaError, match="is not a run"):
        tula.status(tmp_path)


def test_ctrl_c_leaves_the_jobs_and_is_no_error_of_tula(cluster: AtOnce) -> None:
    def press(event: object) -> None:
        if isinstance(event, JobsProgress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the jobs continue") as pressed:
        tula.profile(make.SPEC, on_event=press)
    assert isinstance(pressed.value, Interruption) and not isinstance(pressed.value, tula.TulaError)
    assert cluster.submitted and not cluster.cancelled


def test_ctrl_c_while_jobs_are_submitted_leaves_none_that_is_not_written_down(
    cluster: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = make.FakeLauncher.submit

    def pressed(self: AtOnce, run: RunDir, task: Any) -> Any:
        if not self.submitted:
            signal.raise_signal(signal.SIGINT)
        return submit(self, run, task)

    monkeypatch.setattr(AtOnce, "submit", pressed)
    run = RunDir.from_spec(Path("tula-runs").absolute(), make.spec())
    work = profile.run_profile(
        [run],
        Submission(launcher.make_launcher, inspection.inspect, lambda _: True),
    )
    with pytest.raises(Interruption, match="the jobs continue"):
        run_work(work, lambda _: None)
    assert [job.id for job in run.read_jobs()] == cluster.submitted == ["probe-n001", "probe-n002"]
    assert cluster.cancelled == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not (run.path / "lock").exists()


def press_ctrl_c_at_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = AtOnce.submit

    def pressed(self: AtOnce, run: RunDir, task: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return submit(self, run, task)

    monkeypatch.setattr(AtOnce, "submit", pressed)


def test_ctrl_c_while_a_training_is_submitted_tells_that_it_goes_on(
    cluster: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tula.profile(make.SPEC)
    press_ctrl_c_at_submission(monkeypatch)
    with pytest.raises(Interruption, match="the jobs continue"):
        tula.train(run, nodes=1, batch=64)
    assert any(job.id.startswith("train-") for job in run.directories[0].read_jobs())


def test_ctrl_c_while_a_node_check_is_submitted_tells_that_it_goes_on(
    cluster: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_ctrl_c_at_submission(monkeypatch)
    with pytest.raises(Interruption, match="check-n002-1 continues"):
        tula.check_nodes(make.SPEC)
    assert cluster.submitted == ["check-n002-1"] and not cluster.cancelled
    tula.check_nodes(make.SPEC)
    assert cluster.submitted == ["check-n002-1"], "the same call attaches to it"


def test_ctrl_c_before_a_node_check_is_submitted_starts_nothing(
    cluster: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(_: RunDir) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "read_check_tasks", pressed)
    with pytest.raises(Interruption, match="run the same command again to submit the job, or to follow"):
        tula.check_nodes(make.SPEC)
    assert not cluster.submitted


def test_a_node_check_that_is_refused_makes_no_run(cluster: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tula.TulaError, match="nodes 0"):
        tula.check_nodes(make.SPEC, nodes=0)

    def refused(*_: object, **__: object) -> None:
        raise SchedulerError("sbatch was not found on this machine")

    monkeypatch.setattr(launcher, "make_launcher", refused)
    with pytest.raises(tula.TulaError, match="sbatch was not found"):
        tula.check_nodes(make.SPEC)
    assert not Path("tula-runs").exists()


def test_a_second_ctrl_c_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it was")


def test_values_that_the_command_line_would_refuse_are_one_error(cluster: AtOnce) -> None:
    run = tula.profile(make.SPEC)
    calls: list[tuple[str, Any]] = [
        ("unknown objective 'tme'; use one of time, cost", lambda: tula.recommend(run, objective="tme")),  # type: ignore[arg-type]
        ("unknown curve 'both'; use one of time, cost", lambda: tula.recommend(run, curve="both")),  # type: ignore[arg-type]
        ("nodes 0: must be at least 1", lambda: tula.recommend(run, nodes=0)),
        ("max_batch -1: must be at least 1", lambda: tula.recommend(run, max_batch=-1)),
        ("deadline_hours -1: must be at least 0", lambda: tula.recommend(run, deadline_hours=-1)),
        ("overrides 'pricing.price=3': must be a list", lambda: tula.recommend(run, overrides="pricing.price=3")),
        ("nodes 0: must be at least 1", lambda: tula.train(run, nodes=0, batch=64)),
        ("batch -64: must be at least 1", lambda: tula.train(run, nodes=1, batch=-64)),
        ("seeds 0: must be at least 1", lambda: tula.compare(run, batches=[64], seeds=0)),
        ("nodes 0: must be at least 1", lambda: tula.compare(run, batches=[64], nodes=0)),
        ("batch -64: must be at least 1", lambda: tula.compare(run, batches=[64, -64])),
        ("^methods: there is no method 'agz'", lambda: tula.compare(run, batches=[64], methods=["agz"])),
        ("nodes 0: must be at least 1", lambda: tula.check_nodes(run, nodes=0)),
        ("nodes -2: must be at least 1", lambda: tula.check_nodes(run, nodes=-2)),
        ("nodes 0: must be at least 1", lambda: tula.evaluate(run, nodes=0)),
        ("trainings 0: must be at least 1", lambda: tula.plan_trainings("no such job.yaml", 0)),
        ("batch 'x': must be an integer", lambda: tula.train(run, nodes=1, batch="x")),  # type: ignore[arg-type]
        ("nodes 1.5: must be an integer", lambda: tula.train(run, nodes=1.5, batch=64)),  # type: ignore[arg-type]
        ("timeout '5': must be a number", lambda: tula.profile(run, timeout="5")),  # type: ignore[arg-type]
        ("budget 'all': must be a number", lambda: tula.recommend(run, budget="all")),  # type: ignore[arg-type]
        ("confirm True: must be a function", lambda: tula.profile(run, confirm=True)),  # type: ignore[arg-type]
        ("methods 'ags': must be a list", lambda: tula.compare(run, methods="ags")),
        ("batches 64: must be a list", lambda: tula.compare(run, batches=64)),  # type: ignore[arg-type]
    ]
    submitted = list(cluster.submitted)
    for words, call in calls:
        with pytest.raises(tula.TulaError, match=words):
            call()
    assert cluster.submitted == submitted


def test_a_comparison_that_is_refused_is_not_kept(cluster: AtOnce) -> None:
    run = tula.profile(make.SPEC)
    with pytest.raises(tula.TulaError, match="wait=False is not possible"):
        tula.compare(run, batches=[64], wait=False, confirm=lambda _: pytest.fail("asked"))
    assert run.directories[0].read_comparison() is None


def test_work_returns_its_result_and_ends_where_it_is_reported() -> None:
    def work() -> Work[str]:
        try:
            yield Note("one")
        except KeyboardInterrupt:
            yield WarningEvent("pressed")
        return "done"

    def press(event: object) -> None:
        message.append(event)
        if event == Note("one"):
            raise KeyboardInterrupt

    message: list[Any] = []
    assert run_work(work(), press) == "done" and message == [Note("one"), WarningEvent("pressed")]


def test_overrides_are_what_set_is_on_the_command_line(cluster: AtOnce, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_yaml(make.spec()))
    one_node = ["search.nodes=[1]"]
    assert [job.nodes for job in tula.check(make.SPEC, overrides=one_node).reports[None].jobs] == [1]
    runs = [tula.profile(job, overrides=one_node) for job in (make.SPEC, make.spec(), "job.yaml")]
    assert cluster.submitted == ["probe-n001"] and len({run.path for run in runs}) == 1
    assert runs[0].spec().search.nodes == [1] and make.SPEC["search"]["nodes"] == [1, 2]
    assert find_config_drift(runs[-1].directories[0]) is None, "the run knows what was laid over its file"
    dear = tula.recommend(runs[0], overrides=["pricing.price=100"], objective="time")
    assert dear.choice.cost > 50 * tula.recommend(runs[0], objective="time").choice.cost
    assert runs[0].spec().pricing.price == 1, "no later call takes them"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["model.name=vgg11"], "changes settings on which the measurements of"),
        (["search.nods=[1]"], "has a problem"),
        (["search"], "expected key.subkey=value"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused(cluster: AtOnce, overrides: list[str], why: str) -> None:
    run = tula.profile(make.SPEC)
    with pytest.raises(tula.TulaError, match=why):
        tula.recommend(run, overrides=overrides)


def test_an_error_as_text_is_all_that_the_command_would_say() -> None:
    with pytest.raises(SpecError) as caught:
        tula.check({**make.SPEC, "serach": {}, "search": {"nodes": [0]}}, online=False)
    text = str(caught.value)
    assert text.startswith(f"{caught.value.message}\n  ")
    assert [line.strip() for line in text.splitlines()[1:]] == [str(problem) for problem in caught.value.problems]
    assert "serach" in text and "search.nodes" in text
    assert str(SpecError("it is wrong", "mend it")) == "it is wrong\nHINT: mend it"
    assert str(SpecError("it is wrong")) == "it is wrong"


def test_a_keyword_that_is_none_is_refused(cluster: AtOnce) -> None:
    refused: list[tuple[Any, dict[str, Any]]] = [
        (tula.profile, {"wiat": True}),
        (tula.check_nodes, {"confirm": bool}),
        (tula.rehearse, {"wait": True}),
    ]
    for function, given in refused:
        with pytest.raises(TypeError, match=next(iter(given))):
            function(make.SPEC, **given)
    assert not cluster.submitted


def test_model_and_dataset_are_built_once(cluster: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(inspection, "inspect", lambda spec: built.append(spec.name) or TOLD)
    tula.check(make.SPEC)
    tula.profile(make.SPEC)
    assert len(built) == 1
    tula.check(make.SPEC, fresh=True)
    assert len(built) == 2


def test_the_nodes_are_looked_at_and_tell_what_is_wrong(cluster: AtOnce) -> None:
    message: list[Any] = []
    result = tula.check_nodes(make.SPEC, on_event=message.append)
    assert [node.host for node in result.report.nodes] == ["n1", "n2"] and result.warnings[0].code == "nodes-differ"
    result.require_sound("toy")
    assert result.report.id in cluster.submitted
    problem = messages.cannot_read_dataset(hosts="n1", folder="/data")
    with pytest.raises(tula.TulaError, match="toy cannot run on these nodes"):
        replace(result, problems=(problem,)).require_sound("toy")


def test_memory_is_estimated_from_what_was_built_and_then_from_probes(
    cluster: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    footprints = tuple(make_footprint(Truth(), local) for local in (1, 8))
    monkeypatch.setattr(inspection, "inspect", lambda spec: TOLD.model_copy(update={"footprints": footprints}))
    report = tula.estimate(make.SPEC, memory="1GiB")[None]
    assert not report.probed and report.capacity == 2**30
    assert report.largest_local_batch == tula.estimate(make.SPEC, memory=2**30)[None].largest_local_batch
    assert [row.memory.peak for row in report.rows] == sorted(row.memory.peak for row in report.rows)
    tula.profile(make.SPEC)
    assert tula.estimate(make.SPEC)[None].probed
    with pytest.raises(tula.TulaError, match="got 'much'"):
        tula.estimate(make.SPEC, memory="much")


def test_a_comparison_trains_what_is_missing_and_its_frame_has_a_row_a_method_at_a_batch(cluster: AtOnce) -> None:
    job = {**make.SPEC, "train": {"epochs": 4, "reference_batch": 32}, "search": {"nodes": [1], "max_node_hours": 9}}
    report = tula.compare(job, methods=["ags"], batches=[128], seeds=2, nodes=1, controls=False)
    table = report.frame()
    assert report.complete and list(zip(table.method, table.batch, strict=True)) == [("lbt", 32), ("ags", 128)]
    assert table.top1_mean.tolist() == [90.0, 88.5] and table.gap.tolist()[1] == 1.5
    assert whole(table) == {"batch", "seeds"} and table.reference.tolist() == [True, False]
    submitted = len(cluster.submitted)
    again = tula.compare(job)
    assert again.frame().equals(table) and len(cluster.submitted) == submitted == 4


def test_a_comparison_is_confirmed_or_capped(cluster: AtOnce) -> None:
    job = {**make.SPEC, "train": {"epochs": 9}, "search": {"nodes": [1]}}
    with pytest.raises(tula.TulaError, match="no confirm function"):
        tula.compare(job, methods=["lrs"], batches=[256], seeds=1, nodes=1)
    assert not cluster.submitted


def test_a_training_is_compared_with_the_baseline_of_the_recommendation(cluster: AtOnce) -> None:
    run = tula.profile({**make.SPEC, "search": {"nodes": [1, 2], "max_node_hours": 100}})
    headline = tula.recommend(run, objective="time").headline
    assert headline is not None and headline.baseline is not None and not headline.is_baseline
    chosen = tula.train(run)
    assert chosen is not None and chosen.gain is not None
    assert (chosen.gain.nodes, chosen.gain.batch) == (headline.nodes, headline.batch)
    assert chosen.gain.time.before == headline.baseline.hours and chosen.gain.time.after == chosen.actual_hours


def test_weights_are_evaluated_and_what_they_come_to_is_returned(cluster: AtOnce) -> None:
    summary = tula.train(make.SPEC, nodes=1, batch=64)
    assert summary is not None and summary.gain is None  # nothing was recommended
    run = tula.Run.open(next(Path("tula-runs").glob("toy-*")))
    path = run.directories[0].get_training(summary.signature).get_checkpoint_path(5120)
    path.parent.mkdir(parents=True)
    write_checkpoint(path)
    result = tula.evaluate(run, weights="last", nodes=2)
    assert result is not None
    assert (result.metrics["top1"], result.samples, result.nodes) == (91.5, 5120, 2)
    assert run.status().types[None].evaluations == (result,)
    assert tula.evaluate(run, weights=path, wait=False) is None


def test_a_changed_choice_is_a_warning_with_code_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path, make.spec())
    for nodes, local in ((1, 32), (1, 64), (2, 16), (2, 32)):
        make.add_measured(run, nodes, local)
    reads: list[Path] = []
    read = RunDir.read_recommendation
    monkeypatch.setattr(RunDir, "read_recommendation", lambda run: (reads.append(run.path), read(run))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiagnosticWarning)
        first = tula.recommend(run.path, objective="time").choice
        assert tula.recommend(run.path, objective="time").choice == first
    assert len(reads) == 2, "once in each call"
    earlier = first.model_copy(update={"nodes": 3 - first.nodes, "type": "big gpu"})
    stored = read(run)
    assert stored is not None
    run.write_recommendation(stored.model_copy(update={"choice": earlier}))
    with pytest.warns(DiagnosticWarning) as issued:
        tula.recommend(run.path, objective="time")
    (warning,) = (warning.message for warning in issued)
    assert isinstance(warning, DiagnosticWarning) and warning.code == "choice-changed"
    assert warning.values == {
        "nodes": first.nodes, "batch": first.batch, "node_type": "",
        "earlier_nodes": earlier.nodes, "earlier_batch": earlier.batch, "earlier_node_type": "big gpu",
    }  # fmt: skip
    assert f"tula train --nodes {earlier.nodes} --batch {earlier.batch} --type 'big gpu'." in str(warning)


def test_an_answer_that_cannot_be_kept_is_a_warning_unless_that_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path, make.spec())
    for nodes, local in ((1, 32), (1, 64), (2, 16), (2, 32)):
        make.add_measured(run, nodes, local)

    def refused(*_: object, **__: object) -> None:
        raise CannotWrite("cannot write there: no permission")

    monkeypatch.setattr("tula_cli.services.recommendation_files.save_answer", refused)
    with pytest.warns(DiagnosticWarning, match="could not be stored for tula train: cannot write there") as issued:
        assert tula.recommend(run.path, objective="time").choice.nodes in (1, 2)
    assert [warning.message.code for warning in issued] == ["recommendation-not-stored"]  # type: ignore[union-attr]
    with pytest.raises(CannotWrite):
        tula.recommend(run.path, objective="time", save=True)
