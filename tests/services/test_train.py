"""`tula train` as a service: where to train, what is submitted, what came of it."""

import time
from pathlib import Path

import make_runs
import pytest
from make_results import make_inspection
from make_runs import FakeLauncher

from tula_cli.cluster import relaunch
from tula_cli.errors import (
    BadMeasurements,
    Diverged,
    JobFailed,
    OutOfMemoryAtMinimum,
    Pending,
    SchedulerError,
    SpecError,
)
from tula_cli.models.out_of_memory import list_splits
from tula_cli.options import NodeRange, TrainRequest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import append_json_line, write_file_atomically
from tula_cli.run.job_runs import mark_chosen_run
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import CountedEnergy, MicroBatches
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.services import train
from tula_cli.services.events import WarningEvent, run_work
from tula_cli.services.plans import TrainPlan
from tula_cli.show.train import render_train_plan
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature


def plan(run: RunDir, spec: JobSpec | None = None, **named: object) -> TrainPlan:
    """Plan with a dataset of 2000 samples, without building it."""
    run = Run(run.path, spec or run.read_spec())
    return train.plan_training(run, **{"inspect": lambda _: make_inspection(), **named})  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, make_runs.spec(search={"nodes": [1, 2], "min_batch": 32}))


def test_neither_recommended_nor_given_is_too_little(run: RunDir) -> None:
    with pytest.raises(BadMeasurements, match="no recommendation"):
        plan(run)
    with pytest.raises(BadMeasurements, match="--batch is not given"):
        plan(run, nodes=2)


def test_the_recommended_configuration_is_taken(run: RunDir) -> None:
    choice = make_runs.prediction(2, 256)
    requested = {"objective": "time", "options": ("--max-nodes 2",), "overrides": ("pricing.price=9",)}
    run.write_recommendation(make_runs.recommendation(choice=choice, **requested))
    planned = plan(run)
    assert (planned.task.nodes, planned.task.batch) == (2, 256)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(make_runs.START))
    assert planned.source == f"as recommended (time, --max-nodes 2, --set pricing.price=9; {when})"
    assert plan(run, nodes=1).source.startswith("nodes as given, otherwise as recommended (time, ")


@pytest.mark.parametrize(("reference", "codes"), [(2000, []), (2001, ["reference-batch-exceeds-dataset"])])
def test_a_reference_batch_above_the_dataset_size_is_warned_of(
    tmp_path: Path, reference: int, codes: list[str]
) -> None:
    job = make_runs.spec(search={"nodes": [1, 2], "min_batch": 32}, train={"epochs": 3, "reference_batch": reference})
    warnings = plan(RunDir.create(tmp_path, job), nodes=1, batch=32).warnings
    assert [warning.code for warning in warnings] == codes


def test_given_nodes_and_batch_win(run: RunDir) -> None:
    run.write_recommendation(make_runs.recommendation())
    planned = plan(run, nodes=1, batch=96)
    assert (planned.task.nodes, planned.task.batch, planned.source) == (1, 96, "as given")


def test_without_probes_the_ladder_has_no_predictions(run: RunDir) -> None:
    planned = plan(run, nodes=2, batch=256)
    assert planned.task.ladder == tuple(Rung(batch=batch) for batch in (256, 128, 64, 32))
    assert planned.prediction is None


def test_with_probes_every_rung_has_a_prediction(run: RunDir) -> None:
    for nodes in (1, 2):
        for local in (32, 64, 128, 256):
            make_runs.add_measured(run, nodes, local)
    planned = plan(run, nodes=2, batch=256)
    assert [rung.batch for rung in planned.task.ladder] == [256, 128, 64, 32]
    assert all(rung.prediction for rung in planned.task.ladder)


def test_a_batch_that_does_not_divide_is_refused_with_its_neighbours(run: RunDir) -> None:
    with pytest.raises(SpecError) as error:
        plan(run, nodes=2, batch=65)
    assert "64 and 66" in error.value.hint


def test_a_batch_larger_than_the_dataset_is_refused(run: RunDir) -> None:
    with pytest.raises(SpecError, match="larger than the dataset: 2000"):
        plan(run, nodes=1, batch=2048)


def test_a_batch_larger_than_what_tuning_leaves_of_the_dataset_is_refused(run: RunDir) -> None:
    spec = make_runs.spec(train={"epochs": 4, "method": "auto"})
    assert plan(run, spec, nodes=1, batch=1800).task.batch == 1800
    with pytest.raises(
        SpecError, match="compares settings on 1800 of 2000 training samples, fewer than the batch of 1801"
    ):
        plan(run, spec, nodes=1, batch=1801)


def test_the_probes_tell_the_size_of_the_dataset(run: RunDir) -> None:
    make_runs.add_measured(run, 1, 32)  # of 50 000 samples

    def never(_: object) -> Inspection:
        raise AssertionError("the dataset was built")

    assert plan(run, nodes=1, batch=4096, inspect=never).task.batch == 4096


@pytest.mark.parametrize(("collective", "warnings"), [("parameter_server", 1), ("ring", 0), ("tree", 0)])
def test_a_parameter_server_is_a_model_of_time_and_training_says_so_once(
    run: RunDir, collective: str, warnings: int
) -> None:
    make_runs.add_measured(run, 1, 32)
    spec = make_runs.spec(cluster={"collective": collective})
    message: list[object] = []
    ready = run_work(
        train.prepare_training([Run(run.path, spec)], TrainRequest(nodes=1, batch=32), lambda _: pytest.fail("built")),
        message.append,
    )
    assert ready.plan.task.spec.cluster.collective == collective, "it is trained, not refused"
    texts = [event.text for event in message if isinstance(event, WarningEvent)]
    assert [text for text in texts if "all-reduce" in text] == texts
    assert len(texts) == warnings


def test_a_range_of_nodes_is_one_training_whatever_its_bounds(run: RunDir) -> None:
    spec = make_runs.spec(cluster={"kind": "slurm"})
    task = plan(run, spec, nodes=NodeRange(1, 4), batch=64).task
    assert (task.nodes, task.node_counts) == (4, (1, 2, 4))
    run.write_task(task.model_copy(update={"id": f"{task.job}-2", "attempt": 2, "nodes": 1}))
    again = plan(run, spec, nodes=NodeRange(1, 2), batch=64).task
    assert (again.job, again.attempt, again.nodes, again.node_counts) == (task.job, 2, 1, (1, 2))
    assert plan(run, spec, nodes=4, batch=64).task.signature != task.signature
    ready = run_work(
        train.prepare_training([Run(run.path, spec)], TrainRequest(nodes="1-4", batch=64), lambda _: make_inspection()),
        print,
    )
    assert ready.plan.task.job == task.job
    for nodes, batch, missing in (
        (NodeRange(1), None, "--nodes and --batch are"),
        (NodeRange(1), 64, "--nodes is"),
        (2, None, "--batch is"),
    ):
        with pytest.raises(BadMeasurements, match=f", and {missing} not given"):
            plan(run, spec, nodes=nodes, batch=batch)


def test_another_range_moves_a_training_to_the_most_nodes_that_it_allows(run: RunDir) -> None:
    spec = make_runs.spec(cluster={"kind": "slurm"})
    task = plan(run, spec, nodes=NodeRange(2, 8), batch=64).task
    run.write_task(task)
    planned = plan(run, spec, nodes=NodeRange(3, 5), batch=64)
    again, (line, *_) = planned.task, render_train_plan(planned)
    assert (again.id, again.nodes, again.node_counts, again.micro_batch) == (task.id, 4, (4,), 16)
    assert line == "train on 4 nodes, batch 64 (local 16), the only usable number of nodes in the range, as given"
    run.write_attempt(make_runs.attempt(task.id))
    moved = plan(run, spec, nodes=NodeRange(3, 5), batch=64).task
    assert (moved.id, moved.nodes, moved.node_counts) == (f"{task.job}-2", 4, (4,)), "attempt 1 was on 8 nodes"
    assert moved.cause == "continues on 4 nodes instead of 8, because --nodes has changed"
    assert plan(run, spec, nodes=NodeRange(2, 8), batch=64).task.id == task.id
    launcher = FakeLauncher()
    run.write_job(launcher.submit(run, task))
    with pytest.raises(SchedulerError, match="is still running on 8 nodes") as caught:
        train.submit_training(run, plan(run, spec, nodes=NodeRange(3, 5), batch=64), launcher)
    assert "tula cancel" in caught.value.hint and launcher.submitted == [task.job]


def test_a_wider_range_has_only_nodes_among_which_the_batches_divide_that_the_training_has_come_to(
    run: RunDir,
) -> None:
    spec = make_runs.spec(cluster={"kind": "slurm"})
    task = plan(run, spec, nodes=NodeRange(1, 2), batch=64).task
    run.write_task(task.model_copy(update={"nodes": 1, "ladder": task.ladder[1:]}))  # 32, after an out-of-memory
    wider = plan(run, spec, nodes=NodeRange(1, 64), batch=64).task
    assert (wider.nodes, wider.batch, wider.node_counts) == (1, 32, (1, 2, 4, 8, 16, 32))
    assert [rung.batch for rung in wider.ladder] == [32], "no fallback that does not divide among the most nodes"
    odd = plan(run, spec, nodes=NodeRange(2, 8), batch=96).task
    assert odd.node_counts == (2, 3, 4, 6, 8) and [rung.batch for rung in odd.ladder] == [96], "64 not among 3 nodes"


def test_a_range_that_changes_the_growing_batch_or_is_limited_by_it_is_reported(run: RunDir) -> None:
    spec = make_runs.spec(cluster={"kind": "slurm"}, train={"epochs": 8, "reference_batch": 16, "ramp": "auto"})
    narrow, wide = (plan(run, spec, nodes=NodeRange(2, most), batch=64) for most in (8, 64))
    assert [stage.batch for stage in narrow.task.stages] == [16, 32, 64] and not narrow.warnings
    assert [stage.batch for stage in wide.task.stages] == [64]
    assert [warning.code for warning in wide.warnings] == ["ramp-shortened-by-nodes"]
    run.write_task(narrow.task)
    again = plan(run, spec, nodes=NodeRange(2, 64), batch=64)
    assert again.task.node_counts == (2, 4, 8, 16)
    assert [rung.batch for rung in again.task.ladder] == [64, 32], "those that divide on 16 nodes, as after 2-16"
    assert [warning.values for warning in again.warnings] == [{"nodes": [32, 64], "batches": [16, 32, 64]}]


def test_another_learning_rate_is_another_training_run(run: RunDir) -> None:
    first = plan(run, nodes=1, batch=32)
    other = plan(run, make_runs.spec(optimizer={"lr": 0.2}), nodes=1, batch=32)
    assert first.task.signature != other.task.signature
    assert first.task.signature == compute_train_signature(run.read_spec(), nodes=1, batch=32)


def test_a_second_call_goes_on_with_the_newest_attempt(run: RunDir) -> None:
    task = plan(run, nodes=1, batch=128).task
    relaunch = task.model_copy(update={"id": f"{task.job}-2", "attempt": 2, "ladder": task.ladder[1:]})
    run.write_task(relaunch)
    again = plan(run, nodes=1, batch=128)
    assert (again.task.id, again.task.batch) == (relaunch.id, 64)


@pytest.mark.promise(
    "the command line", "the same command is run twice", "the second one attaches to the job of the first"
)
def test_a_running_job_is_not_submitted_twice(run: RunDir) -> None:
    launcher = FakeLauncher()
    planned = plan(run, nodes=1, batch=64)
    job = train.submit_training(run, planned, launcher)
    assert train.submit_training(run, planned, launcher) == job
    assert launcher.submitted == [job]
    launcher.says[job] = "ended"
    train.submit_training(run, planned, launcher)
    assert launcher.submitted == [job, job]


def ended(run: RunDir, outcome: str | None, message: str = "it ended") -> TrainTask:
    task = plan(run, nodes=1, batch=64).task
    run.write_task(task)
    run.write_attempt(
        make_runs.attempt(task.id, end=None if outcome is None else 2e9, outcome=outcome, message=message, rank=1)
    )
    return task


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        ("device_oom", OutOfMemoryAtMinimum, "smallest batch, 64"),
        ("user", JobFailed, r"rank 1, n1\): it ended"),
        ("diverged", Diverged, r"rank 1, n1\): it ended\n"),
        ("signal", JobFailed, "it ended"),
        ("cancelled", JobFailed, "it ended"),
        (None, Pending, "has not ended"),
    ],
)
def test_how_a_run_ended_is_reported_by_its_class(
    run: RunDir, outcome: str | None, error: type[Exception], words: str
) -> None:
    task = ended(run, outcome)
    with pytest.raises(error, match=words):
        train.load_summary(run, task.signature)


def test_a_diverged_run_says_which_checkpoint_stays_and_what_to_do(run: RunDir) -> None:
    task = ended(run, "diverged", "Diverged: the loss is not finite at epoch 2.50, step 5, 320 samples")
    write_file_atomically(run.get_training(task.signature).get_checkpoint_path(256), b"")
    with pytest.raises(Diverged, match=r"step 5, 320 samples; the checkpoint at 256 samples is finite") as caught:
        train.load_summary(run, task.signature)
    assert caught.value.exit_code == 9 and "lower optimizer.lr" in caught.value.hint


def test_a_run_that_never_started_is_pending(run: RunDir) -> None:
    with pytest.raises(Pending, match="has not started"):
        train.load_summary(run, "00000000")


def test_a_finished_run_answers_its_summary(run: RunDir) -> None:
    summary = make_runs.summary()
    run.write_summary(summary)
    assert train.load_summary(run, summary.signature) == summary


def trained_for_two_hours(run: RunDir, choice: Prediction) -> TrainTask:
    """Write what a finished training of a recommended configuration leaves, but for its summary; return its task."""
    run.write_recommendation(make_runs.recommendation(choice=choice))
    task = plan(run).task
    task = task.model_copy(update={"ladder": (Rung(batch=128, prediction=choice),)})
    run.write_task(task)
    run.write_attempt(make_runs.attempt(task.id, start=0.0, end=7200.0))
    run.write_train_result(make_runs.train_result(task.signature))
    return task


def test_settings_that_a_finished_training_does_not_apply_are_named(run: RunDir) -> None:
    task = trained_for_two_hours(run, make_runs.prediction(2, 128))
    assert list(train._warn_settings_not_applied(Run(run.path, task.spec), task.signature)) == []
    job = make_runs.spec(train={"epochs": 4, "diagnostics": ["gradient_norms"], "metrics": {"mine": "mine:metric"}})
    (event,) = train._warn_settings_not_applied(Run(run.path, job), task.signature)
    assert event.warning.values == {"keys": ["train.metrics", "train.diagnostics"]}
    assert "tula evaluate" in event.warning.text and "train.seed" in event.warning.text


@pytest.mark.parametrize(("market", "share"), [("on_demand", 1.0), ("spot", 0.25)])
def test_what_was_paid_goes_by_the_nodes_it_was_recommended_for(tmp_path: Path, market: str, share: float) -> None:
    spot = {"discount": 0.75, "interruptions_per_day": 1.0}
    run = RunDir.create(tmp_path, make_runs.spec(pricing={"price": 3.0, "spot": spot}))
    choice = make_runs.prediction(2, 128, market=market)
    task = trained_for_two_hours(run, choice)
    relaunch.write_summary(run, task)
    summary = run.get_training(task.signature).read_summary()
    assert summary is not None and summary.actual_cost == pytest.approx(2 * 2 * 3.0 * share)


def test_a_training_that_ended_early_is_held_against_what_was_predicted_for_its_epochs(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make_runs.spec(train={"epochs": 16, "early_stopping": {"patience": 1}}))
    task = trained_for_two_hours(run, make_runs.prediction(2, 128, hours=8.0, cost=16.0))
    result = make_runs.train_result(task.signature)
    for ended, hours in (("no better epoch", 2.0), ("", 8.0)):
        run.write_train_result(result.model_copy(update={"ended": ended}))
        relaunch.write_summary(run, task)
        summary = run.get_training(task.signature).read_summary()
        assert summary is not None and (summary.predicted_hours, summary.predicted_cost) == (hours, 2 * hours)


@pytest.mark.parametrize(("seconds", "share"), [(6000.0, 1 / 1.2), (9000.0, 1.0), (None, None)])
def test_the_energy_of_all_attempts_stands_beside_the_prediction(
    tmp_path: Path, seconds: float | None, share: float | None
) -> None:
    run = RunDir.create(tmp_path, make_runs.spec())
    choice = make_runs.prediction(2, 128, kwh=3.0)
    task = trained_for_two_hours(run, choice)
    if seconds is not None:
        run.write_energy(task.signature, CountedEnergy(joules=7.2e6, seconds=seconds))
    relaunch.write_summary(run, task)
    summary = run.get_training(task.signature).read_summary()
    assert summary is not None and summary.predicted_kwh == 3.0
    assert (summary.actual_kwh, summary.counted) == (2.0 if share else None, share and pytest.approx(share))


def test_the_ladder_is_that_of_the_recommended_market(tmp_path: Path) -> None:
    spot = {"discount": 0.75, "interruptions_per_day": 1.0}
    job = make_runs.spec(search={"nodes": [1, 2], "min_batch": 32}, pricing={"price": 3.0, "spot": spot})
    run = RunDir.create(tmp_path, job)
    for nodes in (1, 2):
        for local in (32, 64, 128, 256):
            make_runs.add_measured(run, nodes, local)
    run.write_recommendation(make_runs.recommendation(choice=make_runs.prediction(2, 256, market="spot")))
    assert {rung.prediction and rung.prediction.market for rung in plan(run, job).task.ladder} == {"spot"}
    given = plan(run, job, nodes=1, batch=64).task
    assert {rung.prediction and rung.prediction.market for rung in given.ladder} == {"on_demand"}


def test_each_type_is_trained_at_its_own_recommendation(tmp_path: Path) -> None:
    a, b = runs = make_runs.create_runs(tmp_path, make_runs.spec(node_types={"a": {}, "b": {}}))
    with pytest.raises(BadMeasurements, match="--type is not given"):
        train.choose_run_to_train(runs, None)
    a.write_recommendation(make_runs.recommendation(choice=make_runs.prediction(2, 256, type="a")))
    b.write_recommendation(make_runs.recommendation(choice=make_runs.prediction(1, 64, type="b")))
    mark_chosen_run(a, runs)
    assert [train.choose_run_to_train(runs, node_type).path for node_type in (None, "b")] == [a.path, b.path]
    planned = plan(a)
    assert (planned.task.nodes, planned.task.batch) == (2, 256)


def test_after_a_fallback_the_prediction_is_that_of_smaller_micro_batches(tmp_path: Path) -> None:
    job = make_runs.spec(search={"nodes": [1, 2], "min_batch": 32})
    run = RunDir.create(tmp_path, job)
    for local in (32, 64, 128, 256):
        make_runs.add_measured(run, 1, local)
    run.write_task(plan(run, job, nodes=1, batch=128).task)
    (task,) = run.read_tasks()
    assert isinstance(task, TrainTask) and task.prediction == task.ladder[0].prediction
    cut = task.model_copy(update={"splits": 2}).prediction
    assert cut is not None and cut.batch == 128 and cut.step_time > task.prediction.step_time
    assert task.model_copy(update={"splits": 3}).prediction is None


def test_an_out_of_memory_is_reported_with_the_batch_of_its_stage(run: RunDir) -> None:
    value = run.read_spec().model_copy(update={"train": run.read_spec().train.model_copy(update={"ramp": "auto"})})
    task = plan(run, value, nodes=2, batch=512).task
    known = MicroBatches(
        splits=tuple(list_splits(batch, micro_batch=batch // 2, micro_batches=1) for batch in (512, 256)), normalised=0
    )
    files = run.get_training(task.signature)
    files.write_micro_batches(known)
    words = []
    for batch in (128, 512):
        append_json_line(files.metrics_path, {"kind": "stage", "samples": 0, "batch": batch})
        words.append(relaunch._choose_fallback(run, task).description)  # type: ignore[union-attr]
    assert words[0].startswith(
        "out of memory at batch 128, in a stage before batch 512: each rank now computes a step in "
    )
    assert words[1].startswith("out of memory at batch 512: each rank now computes a step in 2 micro-batches of 128")


def test_a_plan_names_the_finished_training_with_another_batch(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make_runs.spec())
    task = trained_for_two_hours(run, make_runs.prediction(2, 128))
    relaunch.write_summary(run, task)
    named = "already trained on 2 nodes with batch 128"

    def describe(batch: int, **changes: dict[str, object]) -> str:
        changed = Run(run.path, make_runs.spec(**changes))
        preparing = train.prepare_training([changed], TrainRequest(nodes=2, batch=batch), lambda _: make_inspection())
        return "\n".join(line for line in render_train_plan(run_work(preparing, print).plan) if isinstance(line, str))

    assert f"{named} (train-{task.signature})" in describe(256)
    assert named in describe(256, train={"epochs": run.read_spec().train.epochs, "workers": 3}), (
        "which changes no weights"
    )
    assert named not in describe(128), "the training itself"
    assert named not in describe(256, schedule={"kind": "cosine"}), "a training with other settings"
    run.get_training(task.signature).path.joinpath("summary.json").write_text("{")
    assert named not in describe(256), "a damaged record of another training does not matter here"
