"""Progress of a script's training, from the files of its ranks: without processes."""

import json
import os
import time
from pathlib import Path

import pytest
from make_results import Truth, make_probe

from tula_cli.cluster.scripts import checkpoints, start
from tula_cli.cluster.scripts.metrics import find_last_and_best, is_lower_better, read_metrics
from tula_cli.cluster.scripts.training import ScriptTraining, TrainingMonitor
from tula_cli.cluster.scripts.watch import describe_missing_step, find_last_script_line
from tula_cli.models.time.changes import ScriptLevelDetector, describe_step_change
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import Attempt, LeaderCommand
from tula_cli.run.records.results import ScriptCheckpointSave, ScriptProgress, ScriptSaves, StepChange
from tula_cli.run.records.scripts import ExpectedValues, LoaderProperties, RankResult
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.load import validate_job
from tula_cli.spec.scripts.script import Length, Resume

STARTED = 1_000_000.0  # Unix time


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = validate_job(
        {
            "script": {
                "command": "train.py -b {local_batch} --out {out}",
                "length": {"samples": 1600},
                "reference": {"batch": 16},
                "resume": {"args": "--resume {checkpoint}", "checkpoint": "{out}/state.json", "batch": "same"},
            },
            "cluster": {"device": "cpu"},
        },
        source="test",
    )
    run = RunDir.create(tmp_path, spec)
    run.write_task(task(run, "train-x-1", 16))
    run.write_attempt(Attempt(task="train-x-1", number=1, started_at=STARTED))
    return run


def task(run: RunDir, name: str, batch: int) -> TrainTask:
    return TrainTask(
        id=name, job="train-x", spec=run.read_spec(), workdir=str(run.path), nodes=1, signature="x", attempt=int(name[-1]),
        ladder=(Rung(batch=batch),), workers=0,
    )  # fmt: skip


def tells(run: RunDir, name: str, *rows: dict[str, object], **beat: object) -> None:
    """Write what rank 0 of an attempt has written."""
    folder = ScriptAttempt(run.path, name, 1).path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if beat:
        heartbeat(run, name, 0, **beat)


def heartbeat(run: RunDir, name: str, rank: int, **told: object) -> None:
    usual = {"samples": None, "seconds": 0.1, "alive_at": 0.0, "stepped_at": 0.0, "lost": None, "host": "h", "pid": 1}
    folder = ScriptAttempt(run.path, name, 1).path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"heartbeat-{rank}.json").write_text(json.dumps({**usual, "step": 9, **told}))


def saves(place: Path, when: float) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "state.json").write_text("{}")
    os.utime(place / "state.json", (when, when))


def row(kind: str, step: int, when: float) -> dict[str, object]:
    """A save is at an epoch's end, and in the step after it the loader is a batch ahead, as timm's."""
    if kind == "row":
        return {"kind": kind, "step": step, "samples": 16.0 * step, "time": when}
    ahead = {"samples": 16.0 * (step + 1), "before": 16.0 * (step - 1)}
    return {"kind": kind, "step": step, "time": when, "causes": ["save"], "seconds": 0.1, **ahead}


def test_what_an_attempt_saved_whose_supervisor_was_lost_counts(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    saves(training.output_folder, STARTED + 20)
    tells(run, "train-x-1", row("row", 5, STARTED + 10), row("gap", 31, STARTED + 21), step=60, samples=960)
    training.recover_lost_attempt(run.read_attempts("train-x-1")[0])
    result = run.get_training("x").read_script_progress()
    assert result is not None and (result.steps, result.samples) == (30, 480)


def test_steps_after_a_checkpoint_are_not_in_it_where_no_save_was_seen(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    saves(training.output_folder, STARTED + 20)
    after = {"step": 60, "samples": 960.0, "stepped_at": STARTED + 40}
    tells(
        run,
        "train-x-1",
        row("row", 5, STARTED + 10),
        row("row", 25, STARTED + 19),
        row("row", 50, STARTED + 30),
        **after,
    )
    training.recover_lost_attempt(run.read_attempts("train-x-1")[0])
    result = run.get_training("x").read_script_progress()
    assert result is not None and (result.steps, result.samples) == (25, 400)


def test_a_smaller_batch_that_began_anew_goes_on_from_its_own_checkpoints(run: RunDir) -> None:
    run.get_training("x").write_script_progress(
        ScriptProgress(samples=800, steps=50, batch=16, checkpoint="old", saved_at=STARTED + 1)
    )
    smaller = task(run, "train-x-2", 8)
    run.write_task(smaller)
    run.write_attempt(Attempt(task="train-x-2", number=1, started_at=STARTED + 100))
    training = ScriptTraining(run, smaller)
    saves(training.output_folder, STARTED + 50)
    assert training.find_resume_checkpoint() is None, "what was there before"
    saves(training.output_folder, STARTED + 120)
    tells(run, "train-x-2", step=10, samples=80.0, stepped_at=STARTED + 119)
    training.recover_lost_attempt(run.read_attempts("train-x-2")[0])
    result = run.get_training("x").read_script_progress()
    assert result is not None and (result.samples, result.batch) == (80, 8)
    assert training.find_resume_checkpoint() == training.output_folder / "state.json"


# --- the pace of its steps


def looked(run: RunDir, of: TrainTask, *, slower_from: int, looks: int = 70) -> list[StepChange]:
    """Follow a step a look of 0.1 s, of 0.25 s from one on; one in ten holds an evaluation of half a minute."""
    training, pace, now = ScriptTraining(run, of), ScriptLevelDetector(), STARTED
    command = LeaderCommand(task=of.id, attempt=1, checkpoint="")
    gaps: list[dict[str, object]] = []
    for step in range(1, looks + 1):
        value = (0.25 if step >= slower_from else 0.1) * (1 + 0.02 * (step % 5))
        now += value
        if step % 10 == 0:
            now += 30.0
            gaps.append({**row("gap", step, now), "seconds": 30.0 + value, "causes": ["evaluation"]})
        tells(run, of.id, *gaps, step=step, samples=16.0 * step, stepped_at=now)
        training.record_step_time_change(pace, ScriptAttempt(run.path, of.id, 1), command)
        training.record_step_time_change(pace, ScriptAttempt(run.path, of.id, 1), command)  # no step since
    return list(run.get_training("x").read_step_changes())


@pytest.mark.parametrize("size", [160, None])
def test_a_change_of_its_pace_is_reported_without_evaluations_and_its_end_where_that_is_known(
    tmp_path: Path, run: RunDir, size: int | None
) -> None:
    script = {**run.read_spec().model_dump(exclude_unset=True)["script"], "dataset_size": size or "auto"}
    script["length"] = {"epochs": 10}
    priced = validate_job({"script": script, "cluster": {"device": "cpu"}, "pricing": {"price": 3.0}}, source="test")
    (result,) = looked(run, task(run, "train-x-1", 16).model_copy(update={"spec": priced}), slower_from=36)
    assert result.before.step == pytest.approx(0.104, rel=0.03) and result.after.step == pytest.approx(0.26, rel=0.03)
    assert abs(result.samples - 35 * 16) <= 16
    assert (result.parts, result.before.data, result.after.compute) == ((), None, None)
    step_change = describe_step_change(result)
    assert "the affected part is unknown for a script" in step_change and "(+150 %)" in step_change
    if size is None:
        assert (result.epoch, result.seconds_left, result.cost_more) == (None, None, 0)
        assert step_change.startswith("since ") and "epoch" not in step_change and "to the end" not in step_change
    else:
        assert result.epoch == result.samples / 160
        assert result.seconds_left / result.seconds_left_before == pytest.approx(2.5)  # type: ignore[operator]
        assert result.cost_more > 0 and step_change.endswith("USD more")


def test_steady_steps_between_evaluations_are_no_change(run: RunDir) -> None:
    assert not looked(run, task(run, "train-x-1", 16), slower_from=1000)


def has_begun(run: RunDir, *, file: str = "begun-0.json", **more: object) -> None:
    """Write what the first steps of the only rank have shown: 16 samples each."""
    step = {"seconds": 0.1, "wait": None, "samples": 16.0, "batches": None, "backwards": 1, "gap": ()}
    seen = {
        "version": 1, "task": "train-x-1", "attempt": 1, "why": "begun", "rank": 0, "world": 1, "host": "h", "pid": 1,
        "python": "", "torch": "", "device": "cpu", "hardware": "", "startup": 1.0, "steps": 9, "samples": None, "loader": None,
        "optimizer": None, "parameters": None, "bytes": None, "peak": {}, "warmup": (), "timed": [step] * 5, "split": None,
        "lr": None, "loaders": (), "notes": (), "expected": {"world": 1, "batch": 16}, **more,
    }  # fmt: skip
    folder = ScriptAttempt(run.path, "train-x-1", 1).path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(seen))


def test_a_training_whose_first_steps_break_a_claim_is_ended(run: RunDir) -> None:
    first = task(run, "train-x-1", 16)
    command = LeaderCommand(task="train-x-1", attempt=1, ranks=1, batch=16)
    seen = TrainingMonitor(ScriptTraining(run, first), command, range(1), leads=True)
    seen.record_progress()
    assert seen.find_reason_to_kill() is None, "nothing is known yet"
    has_begun(run, expected={"world": 2, "batch": 16})
    seen.record_final_reports()
    reason = seen.find_reason_to_kill()
    assert (
        reason is not None
        and reason.outcome == "user"
        and "2 ranks should have started, but 1 did" in reason.description
    )


def test_a_training_that_was_too_short_to_be_ended_fails_at_its_end(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    command = LeaderCommand(task="train-x-1", attempt=1, ranks=1, batch=16)
    tells(run, "train-x-1", step=100, samples=1600.0)
    has_begun(run, file="result-0.json", why="ended", expected={"world": 1, "batch": 32})
    reason = training.record_attempt_results(command, None)
    assert reason.outcome == "user" and "batch 32, but a step trains on 16 samples" in reason.description
    assert run.get_training("x").read_result() is None


def folder_of(out: Path, name: str, when: float, *files: str) -> None:
    for file in files:
        (out / name / file).parent.mkdir(parents=True, exist_ok=True)
        (out / name / file).write_text("x")
        os.utime(out / name / file, (when, when))


def test_a_folder_without_files_that_the_one_before_has_is_half_a_checkpoint(tmp_path: Path) -> None:
    def newest() -> str:
        result, _ = checkpoints.find_newest_checkpoint(resume, {"out": str(tmp_path)}, workdir=tmp_path, since=0.0)
        return "" if result is None else result.name

    resume = Resume(args="{checkpoint}", checkpoint="{out}/*")
    folder_of(tmp_path, "checkpoint-10", 10.0, "model.bin", "rank_0.bin", "rank_1.bin", "global_step10/optimizer.bin")
    assert newest() == "checkpoint-10", "there is none to compare it with"
    folder_of(tmp_path, "checkpoint-20", 20.0, "model.bin", "rank_0.bin")
    assert newest() == "checkpoint-10"
    folder_of(tmp_path, "checkpoint-20", 21.0, "global_step20/optimizer.bin")
    assert newest() == "checkpoint-20", "of fewer ranks"
    folder_of(tmp_path, "best", 30.0, "model.bin")
    assert newest() == "best", "of another kind"


def fails_at_once(run: RunDir, first: TrainTask, checkpoint: Path) -> Failure:
    """Let an attempt that goes on from a checkpoint fail in the script, before its first step."""
    folder = ScriptAttempt(run.path, first.id, 1).path
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "version": 1, "task": first.id, "attempt": 1, "rank": 0, "host": "h", "pid": 1, "where": "script", "step": 0,
        "error": "EOFError", "text": "EOFError: Ran out of input", "failed_at": 1.0,
    }  # fmt: skip
    (folder / "failure-0.json").write_text(json.dumps(record))
    command = LeaderCommand(task=first.id, attempt=1, ranks=1, batch=16, checkpoint=str(checkpoint))
    return ScriptTraining(run, first).record_attempt_results(
        command, Failure(outcome="user", message="EOFError: Ran out of input")
    )


def test_a_checkpoint_that_cannot_be_loaded_is_left_out_for_the_one_before(run: RunDir) -> None:
    script = run.read_spec().script
    assert script is not None and script.resume is not None
    resume = script.resume.model_copy(update={"checkpoint": "{out}/step-*"})
    update = {"script": script.model_copy(update={"resume": resume})}
    first = task(run, "train-x-1", 16).model_copy(update={"spec": run.read_spec().model_copy(update=update)})
    run.write_task(first)
    training, out = ScriptTraining(run, first), ScriptTraining(run, first).output_folder
    folder_of(out, "step-30", STARTED + 20, "state")
    folder_of(out, "step-60", STARTED + 40, "state")
    newest = ScriptProgress(samples=960, steps=60, batch=16, checkpoint=str(out / "step-60"), saved_at=STARTED + 40)
    run.get_training("x").write_script_progress(newest)
    save = ScriptCheckpointSave(saved_at=STARTED + 40, batch=16, steps=30, samples=480, seconds=20.0)
    run.get_training("x").write_script_saves(ScriptSaves(saves=(save,)))

    reason = fails_at_once(run, first, out / "step-60")
    assert (
        reason.outcome == "unknown" and "skipped step-60; trying the previous checkpoint step-30" in reason.description
    )
    assert training.find_resume_checkpoint() == out / "step-30"
    kept = run.get_training("x").read_script_progress()
    assert kept is not None and (kept.samples, kept.steps, kept.checkpoint) == (480, 30, str(out / "step-30"))
    assert run.get_training("x").read_script_saves().lost == (480,)
    assert fails_at_once(run, first, out / "step-30").outcome == "user", "it is the script's own fault"
    assert (training.find_resume_checkpoint(), run.get_training("x").read_script_progress()) == (
        out / "step-60",
        newest,
    )


def test_without_a_checkpoint_before_it_the_scripts_error_ends_the_training(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    saves(training.output_folder, STARTED + 20)
    path = training.output_folder / "state.json"
    run.get_training("x").write_script_progress(
        ScriptProgress(samples=480, steps=30, batch=16, checkpoint=str(path), saved_at=STARTED + 20)
    )
    assert fails_at_once(run, training.task, path).outcome == "user" and training.find_resume_checkpoint() == path


def watching(run: RunDir, ranks: int) -> TrainingMonitor:
    command = LeaderCommand(task="train-x-1", attempt=1, ranks=ranks, batch=16)
    return TrainingMonitor(ScriptTraining(run, task(run, "train-x-1", 16)), command, range(1, ranks))


def test_ranks_that_wait_for_one_that_goes_on_are_not_stuck(run: RunDir) -> None:
    long_ago = time.time() - 2 * start.TRAINING_HANG_SECONDS
    heartbeat(run, "train-x-1", 0, alive_at=time.time())
    heartbeat(run, "train-x-1", 1, alive_at=long_ago)
    assert watching(run, 2).find_reason_to_kill() is None, "rank 0, on another node, evaluates alone"
    heartbeat(run, "train-x-1", 0, alive_at=long_ago)
    reason = watching(run, 2).find_reason_to_kill()
    assert reason is not None and reason.rank == 1 and "stopped, because no step finished for" in reason.message


def test_a_training_whose_shim_gave_up_goes_on(run: RunDir) -> None:
    heartbeat(run, "train-x-1", 1, alive_at=0.0, lost="OSError(28, 'No space left on device')")
    record = {
        "version": 1, "task": "train-x-1", "attempt": 1, "rank": 1, "host": "h", "pid": 1, "where": "shim", "step": 9,
        "error": "OSError", "text": "OSError: [Errno 28] No space left on device", "failed_at": 1.0,
    }  # fmt: skip
    (ScriptAttempt(run.path, "train-x-1", 1).path / "failure-1.json").write_text(json.dumps(record))
    watched = watching(run, 2)
    watched.record_progress()
    assert run.read_failures("train-x-1", 1) == [] and watched.find_reason_to_kill() is None


def test_a_method_that_cannot_train_a_script_fails_it_even_where_it_ends_well(run: RunDir) -> None:
    folder = ScriptAttempt(run.path, "train-x-1", 1).path
    folder.mkdir(parents=True)
    why = "train.method ags: the script's 2 ranks train without DistributedDataParallel"
    record = {"version": 1, "task": "train-x-1", "attempt": 1, "rank": 0, "host": "h", "pid": 1, "where": "method"}
    error = "tula_shim.ags.CannotScaleError"
    record |= {"error": error, "message": why, "text": f"{error}: {why}\n", "step": 0, "failed_at": STARTED}
    (folder / "failure-0.json").write_text(json.dumps(record))
    value, command = task(run, "train-x-1", 16), LeaderCommand(task="train-x-1", attempt=1, ranks=1, batch=16)
    result = ScriptTraining(run, value).record_attempt_results(command, None)
    assert (result.outcome, result.message) == ("user", why)
    assert run.get_training("x").read_result() is None
    TrainingMonitor(ScriptTraining(run, value), command, range(1)).record_progress()
    (failure,) = run.read_failures("train-x-1", 1)
    assert (failure.outcome, failure.message) == ("user", why)


def test_what_a_rank_notes_at_its_first_step_is_a_warning_once(run: RunDir) -> None:
    note: dict[str, object] = {"kind": "note", "step": 1, "samples": 16, "time": STARTED, "text": "AGS is the identity"}
    tells(run, "train-x-1", note, row("row", 9, STARTED) | {"ags": {"mean": 1.2}}, step=9)
    value, command = task(run, "train-x-1", 16), LeaderCommand(task="train-x-1", attempt=1, batch=16)
    training, attempt = ScriptTraining(run, value), ScriptAttempt(run.path, "train-x-1", 1)
    assert training.log_progress(attempt, command, after=0) == 9
    heartbeat(run, "train-x-1", 0, step=12)
    assert training.log_progress(attempt, command, after=9) == 12
    rows = run.get_training("x").read_metrics()
    assert [first["message"] for first in rows if first["kind"] == "warning"] == ["AGS is the identity"]
    assert [item["ags"]["mean"] for item in rows if item["kind"] == "step"] == [1.2, 1.2]


def test_a_probe_that_was_overdue_without_a_step_says_so(run: RunDir) -> None:
    watched = watching(run, 2)
    assert not watched.has_stepped
    heartbeat(run, "train-x-1", 1)
    assert watched.has_stepped


def test_an_epoch_is_unknown_where_nothing_tells_its_samples(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    training.record_start(LeaderCommand(task="train-x-1", attempt=1, ranks=1, batch=16))
    assert run.get_training("x").read_metrics()[-1]["epoch"] == 0.0, "length.samples stands for it"
    epochs = run.read_spec().model_copy(
        update={"script": run.read_spec().script.model_copy(update={"length": Length(epochs=3)})}
    )
    unknown = ScriptTraining(run, training.task.model_copy(update={"spec": epochs}))
    unknown.record_start(LeaderCommand(task="train-x-1", attempt=1, ranks=1, batch=16))
    assert run.get_training("x").read_metrics()[-1]["epoch"] is None


def test_a_metric_that_is_no_number_in_the_end_has_a_best_value_alone() -> None:
    record = {"loss": [3.0, 2.0, float("nan")], "acc": [0.5, 0.7, 0.6], "wer": [], "ppl": [float("inf")]}
    assert find_last_and_best(record) == {"best_loss": 2.0, "acc": 0.6, "best_acc": 0.7}


def test_a_name_that_holds_the_letters_of_an_error_rate_is_none() -> None:
    errors = (
        "loss",
        "val_loss",
        "valloss",
        "top1err",
        "Error",
        "eval_wer",
        "CER",
        "fid",
        "FID50k",
        "rmse",
        "nll/dev",
        "ppl",
    )
    assert all(is_lower_better(name) for name in errors)
    assert not any(
        is_lower_better(name) for name in ("top1", "answer_f1", "cancer_auc", "confidence", "power", "errands")
    )


def command(**changes: object) -> LeaderCommand:
    return LeaderCommand(task="train-x-1", attempt=1, ranks=1, batch=16, **changes)  # type: ignore[arg-type]


def planned(run: RunDir, when: float) -> ScriptAttempt:
    """Return the attempt, whose plan was written then."""
    attempt = ScriptAttempt(run.path, "train-x-1", 1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    attempt.plan_path.write_text("{}")
    os.utime(attempt.plan_path, (when, when))
    return attempt


def test_what_lies_between_two_checkpoints_is_kept(run: RunDir) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)
    seen = [row("gap", 31, STARTED + 21), row("gap", 61, STARTED + 41)]
    saves(training.output_folder, STARTED + 20)
    tells(run, "train-x-1", seen[0], step=31, samples=496.0, stepped_at=STARTED + 19)
    training.record_save(attempt, command())
    assert run.get_training("x").read_script_saves().saves == (), "the row that tells its step may be on its way"
    heartbeat(run, "train-x-1", 0, step=35, samples=560.0, stepped_at=STARTED + 25)
    training.record_save(attempt, command())
    training.record_save(attempt, command())
    saves(training.output_folder, STARTED + 40)
    tells(run, "train-x-1", *seen, step=65, samples=1040.0, stepped_at=STARTED + 45)
    training.record_save(attempt, command())
    result = run.get_training("x").read_script_saves().saves
    assert [(save.steps, save.samples, save.seconds) for save in result] == [(30, 480, None), (30, 480, 20.0)]


def test_checkpoints_between_two_polls_are_counted_one_by_one(run: RunDir) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)
    begun = {step: STARTED + 0.1 * step for step in (11, 16, 21, 26, 31)}

    def saved(step: int, name: str) -> dict[str, object]:
        return {**row("gap", step, begun[step] + 0.5), "saved": {name: begun[step]}}

    out = training.output_folder
    rows = [saved(step, f"{out}/state.json.tmp" if step != 16 else "/elsewhere/outputs.pt") for step in begun]
    saves(out, begun[31] + 0.2)
    tells(run, "train-x-1", *rows, step=33, samples=528.0, stepped_at=begun[31] + 10)
    training.record_save(attempt, command())
    result = run.get_training("x").read_script_saves().saves
    assert [(save.steps, save.samples) for save in result] == [(10, 160), (10, 160), (5, 80), (5, 80)]
    assert [save.saved_at for save in result] == pytest.approx(
        [begun[11], begun[21], begun[26], begun[31] + 0.2], abs=1e-6
    )
    assert [save.seconds and round(save.seconds, 1) for save in result] == [None, 1.0, 0.5, 0.7]
    training.record_save(attempt, command(), stable_seconds=0.0)
    assert run.get_training("x").read_script_saves().saves == result


@pytest.mark.parametrize("name", ["state.json", "state.json.tmp", "renamed-3.pt"])
def test_checkpoints_before_one_after_the_last_step_are_counted_too(run: RunDir, name: str) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)
    begun = {step: STARTED + 0.1 * step for step in (11, 21)}
    out = training.output_folder
    rows = [{**row("gap", step, when + 0.5), "saved": {f"{out}/{name}": when}} for step, when in begun.items()]
    saves(out, begun[21] + 2)
    tells(run, "train-x-1", *rows, row("row", 30, begun[21] + 2), step=30, samples=480.0, stepped_at=begun[21] + 1.5)
    training.record_save(attempt, command(), stable_seconds=0.0)
    assert [save.steps for save in run.get_training("x").read_script_saves().saves] == [10, 10, 10]


def test_a_checkpoint_of_another_library_is_counted_at_the_step_whose_epoch_it_ended(run: RunDir) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)
    gap = {**row("gap", 21, STARTED + 12), "causes": ["epoch"], "seconds": 3.0}
    saves(training.output_folder, STARTED + 11)
    tells(run, "train-x-1", row("row", 15, STARTED + 8), gap, step=25, samples=400.0, stepped_at=STARTED + 14)
    training.record_save(attempt, command())
    assert [save.steps for save in run.get_training("x").read_script_saves().saves] == [20]


def test_remaining_time_includes_gaps_between_steps_as_frequent_as_so_far(run: RunDir) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)

    def read_remaining_seconds(*rows: dict[str, object], step: int, after: int) -> float:
        tells(run, "train-x-1", *rows, step=step, samples=16.0 * step, stepped_at=STARTED + 14, seconds=0.1)
        training.log_progress(attempt, command(), after=after)
        return float(run.get_training("x").read_newest_metrics()[-1]["eta"])

    total = training.total_samples
    assert total is not None
    gap = {**row("gap", 21, STARTED + 12), "seconds": 3.1}
    remaining_steps = (total - 16 * 10) / 16
    assert read_remaining_seconds(step=10, after=0) == pytest.approx(0.1 * remaining_steps), "no gap yet"
    gaps_to_come = (total - 16 * 20) / (16 * 20)
    assert read_remaining_seconds(gap, step=30, after=10) == pytest.approx(
        0.1 * (remaining_steps - 20) + 3.0 * gaps_to_come
    )
    assert read_remaining_seconds(gap, step=35, after=30) == pytest.approx(
        0.1 * (remaining_steps - 25) + 3.0 * gaps_to_come
    ), "counted once"
    early = {**row("gap", 2, STARTED + 1), "seconds": 3.1}
    remaining_steps, gaps_to_come = total / 16 - 51, (total - 16) / (16 * 50)
    assert read_remaining_seconds(early, step=1, after=0) > 0
    assert read_remaining_seconds(step=51, after=1) == pytest.approx(0.1 * remaining_steps + 3.0 * gaps_to_come), (
        "an evaluation after the first step may be the only one for long"
    )


def test_time_of_a_script_is_divided_into_steps_gaps_and_starts(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    attempts = run.read_attempts("train-x-1")
    assert training.measure_time_parts(attempts, 60.0) is None
    rows = [row("row", 1, STARTED + 5), {**row("gap", 21, STARTED + 20), "seconds": 8.1}, row("row", 100, STARTED + 33)]
    tells(run, "train-x-1", *rows, step=100, samples=1600.0, stepped_at=STARTED + 30, seconds=0.1)
    parts = training.measure_time_parts(attempts, 60.0)
    assert parts is not None
    assert (parts.steps, parts.evaluation, parts.rest) == pytest.approx((17.0, 11.0, 32.0))


def test_files_that_are_saved_beside_the_checkpoint_are_not_checkpoints(run: RunDir) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)
    begun = {step: STARTED + 0.1 * step for step in (11, 21, 31)}
    out = training.output_folder
    best = out / "best.pt"
    saves(out, begun[31] + 0.2)
    best.touch()

    def saved(step: int) -> dict[str, object]:
        names = [str(best)] if step == 21 else [f"{out}/state.json", str(best)]
        return {**row("gap", step, begun[step] + 0.5), "saved": dict.fromkeys(names, begun[step])}

    tells(run, "train-x-1", *map(saved, begun), step=33, samples=528.0, stepped_at=begun[31] + 10)
    training.record_save(attempt, command())
    result = run.get_training("x").read_script_saves().saves
    assert [save.steps for save in result] == [10, 20]


def test_a_checkpoint_of_another_library_is_not_counted_by_what_torch_saves(run: RunDir) -> None:
    training, attempt = ScriptTraining(run, task(run, "train-x-1", 16)), planned(run, STARTED)
    begun = {step: STARTED + 0.1 * step for step in (11, 21, 31)}
    metrics = training.output_folder / "metrics.pt"
    saves(training.output_folder, begun[31] + 0.2)
    metrics.touch()
    rows = [{**row("gap", step, begun[step] + 0.5), "saved": {str(metrics): begun[step]}} for step in begun]
    tells(run, "train-x-1", *rows, step=33, samples=528.0, stepped_at=begun[31] + 10)
    training.record_save(attempt, command())
    assert [save.steps for save in run.get_training("x").read_script_saves().saves] == [30]


def test_samples_that_an_interruption_costs_are_kept(run: RunDir) -> None:
    training = ScriptTraining(run, task(run, "train-x-1", 16))
    planned(run, STARTED)
    saves(training.output_folder, STARTED + 20)
    tells(run, "train-x-1", row("gap", 31, STARTED + 21), step=60, samples=960.0, stepped_at=STARTED + 40)
    training.record_attempt_results(command(), Failure(outcome="time_limit", message="over"))
    kept = run.get_training("x").read_script_saves()
    assert kept.lost == (480,) and [save.samples for save in kept.saves] == [480]
    anew = run.read_spec().model_copy(update={"script": run.read_spec().script.model_copy(update={"resume": None})})
    without = ScriptTraining(run, training.task.model_copy(update={"spec": anew, "signature": "y"}))
    without.record_attempt_results(command(), Failure(outcome="time_limit", message="over"))
    assert run.get_training("y").read_script_saves().lost == (960,), "it starts again"


def test_a_training_that_never_steps_is_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watching(run, 2)
    run.write_result(make_probe(Truth(overheads=Truth().overheads.model_copy(update={"startup": 90.0})), 1, 16))
    assert watched.find_reason_to_kill() is None
    watched._began -= 60 * run.read_spec().search.max_minutes + 1
    assert watched.find_reason_to_kill() is None, "20 starts of a probe are longer: 30 min"
    watched._began -= 600
    reason = watched.find_reason_to_kill()
    assert reason is not None and reason.outcome == "user", "so that it is not started again"
    assert (
        "the first step was not done after 30 min" in reason.message
        and "no step of a torch optimizer was observed" in reason.message
    )
    heartbeat(run, "train-x-1", 0, alive_at=time.time())
    assert watched.find_reason_to_kill() is None, "a rank on another node has stepped"


def test_a_training_whose_shim_gave_up_before_a_step_goes_on(run: RunDir) -> None:
    watched = watching(run, 2)
    watched._began -= 1e6
    record = {
        "version": 1, "task": "train-x-1", "attempt": 1, "rank": 1, "host": "h", "pid": 1, "where": "shim", "step": 0,
        "error": "OSError", "text": "OSError: full", "failed_at": 1.0,
    }  # fmt: skip
    folder = ScriptAttempt(run.path, "train-x-1", 1).path
    folder.mkdir(parents=True)
    (folder / "failure-1.json").write_text(json.dumps(record))
    assert watched.find_reason_to_kill() is None


def test_metrics_of_a_script_are_read_from_the_logs_that_exist(tmp_path: Path) -> None:
    content = {
        "command": "python train.py -b {local_batch}",
        "length": {"epochs": 1},
        "reference": {"batch": 8},
        "metric": {"acc": r"acc (\S+)"},
    }
    script = validate_job(
        {"name": "own", "script": content, "search": {"nodes": [2], "max_node_hours": 1}}, source="test"
    ).script
    assert script is not None
    (tmp_path / "log").write_text("acc 10\nacc nothing\nacc 20\n")
    assert read_metrics(script, (tmp_path / "log", tmp_path / "none")) == {"acc": [10.0, 20.0]}


@pytest.fixture
def alone(tmp_path: Path) -> RunDir:
    """Return a run of a script that says nothing of a resume, of whose training an attempt was killed and another begins."""
    script = {"command": "train.py -b {local_batch} --out {out}", "length": {"epochs": 2}, "dataset_size": 800}
    spec = validate_job({"script": {**script, "reference": {"batch": 16}}, "cluster": {"device": "cpu"}}, source="test")
    run = RunDir.create(tmp_path, spec)
    for number, began in ((1, STARTED), (2, STARTED + 100)):
        run.write_task(task(run, f"train-x-{number}", 16))
        run.write_attempt(Attempt(task=f"train-x-{number}", number=1, started_at=began))
    tells(run, "train-x-1", row("row", 5, STARTED + 10), row("gap", 31, STARTED + 21), step=60, samples=960)
    run.get_training("x").write_script_saves(ScriptSaves(lost=(960,)))
    return run


def second_start(run: RunDir, *rows: dict[str, object]) -> tuple[ScriptTraining, tuple[int, int]]:
    """Let the second attempt step once; return its training, and samples and steps that it is counted from."""
    training, command = ScriptTraining(run, task(run, "train-x-2", 16)), LeaderCommand(task="train-x-2", attempt=1)
    attempt = ScriptAttempt(run.path, "train-x-2", 1)
    tells(run, "train-x-2", *rows, step=1, samples=16.0)
    attempt.plan_path.write_text("{}")
    os.utime(attempt.plan_path, (STARTED + 101, STARTED + 101))
    training.log_progress(attempt, command, after=0)
    return training, training.find_start_position(command)


def test_a_script_that_resumes_by_itself_is_counted_from_what_it_has_loaded(alone: RunDir) -> None:
    out = ScriptTraining(alone, task(alone, "train-x-2", 16)).output_folder
    saves(out / "epoch-1", STARTED + 20)
    load = {"kind": "load", "path": str(out.resolve() / "epoch-1" / "state.json"), "written": STARTED + 20}
    training, base = second_start(alone, load)
    assert base == (480, 30)
    kept = alone.get_training("x").read_script_saves()
    assert (kept.resumes_from, kept.lost) == ("{out}/epoch-*/state.json", (480,))
    message = next(row for row in alone.get_training("x").read_newest_metrics() if row["kind"] == "warning")["message"]
    assert "resumed by itself" in message and 'resume: {checkpoint: "{out}/epoch-*/state.json"}' in message
    assert (
        training.allowed_resume_batch == "same" and training.find_resume_checkpoint() == out / "epoch-1" / "state.json"
    ), "the next start, too"


def test_a_script_that_resumes_from_a_checkpoint_beyond_what_was_counted_has_lost_nothing(alone: RunDir) -> None:
    alone.get_training("x").write_script_saves(ScriptSaves(lost=(160, 400)))
    out = ScriptTraining(alone, task(alone, "train-x-2", 16)).output_folder
    saves(out / "epoch-1", STARTED + 20)
    load = {"kind": "load", "path": str(out.resolve() / "epoch-1" / "state.json"), "written": STARTED + 20}
    assert second_start(alone, load)[1] == (480, 30)
    assert alone.get_training("x").read_script_saves().lost == (160, 0)


@pytest.mark.parametrize(
    "load",
    [
        (),
        ({"kind": "load", "path": "/data/pretrained.pt", "written": STARTED - 1000},),  # of somebody else
        ({"kind": "load", "path": "/tmp/self.pt", "written": STARTED + 102},),  # that this start has written
    ],
)
def test_a_script_that_loads_nothing_of_its_training_begins_anew(
    alone: RunDir, load: tuple[dict[str, object], ...]
) -> None:
    training, base = second_start(alone, *load)
    assert base == (0, 0) and training.allowed_resume_batch == "none" and training.find_resume_checkpoint() is None


def begun(run: RunDir, samples: int | None, *, dataset: int = 800) -> None:
    """Write what rank 0 has seen of the first steps of the first attempt."""
    loader = LoaderProperties(
        dataset=dataset, batches=50, batch_size=16, workers=0, sampler="", drop_last=True, epoch_samples=samples
    )
    result = RankResult(
        version=1, task="train-x-1", attempt=1, why="begun", rank=0, world=1, host="h", pid=1, python="3.8.1",
        torch="2.0.1", expected=ExpectedValues(world=1, batch=16), device="cpu", hardware="", startup=1.0, steps=7,
        samples=112.0, optimizer="SGD", parameters=1, bytes=None, peak={}, lr=None, warmup=(), timed=(), split=None,
        loader=loader, loaders=(loader,), notes=(),
    )  # fmt: skip
    (ScriptAttempt(run.path, "train-x-1", 1).path / "begun-0.json").write_text(result.model_dump_json())


@pytest.mark.parametrize(
    ("epoch", "dataset", "total"), [(736, 800, 1472), (816, 800, 1632), (None, 800, 1600), (320, 400, 1600)]
)
def test_an_epoch_is_what_the_loader_delivers(alone: RunDir, epoch: int | None, dataset: int, total: int) -> None:
    begun(alone, epoch, dataset=dataset)
    training, command = ScriptTraining(alone, task(alone, "train-x-1", 16)), LeaderCommand(task="train-x-1", attempt=1)
    assert training.total_samples == total
    heartbeat(alone, "train-x-1", 0, step=92, samples=float(total))
    training.record_attempt_results(command, None)
    rows = alone.get_training("x").read_newest_metrics()
    assert not [row for row in rows if row["kind"] == "warning" and "ended after" in row["message"]], rows


def test_steps_that_come_to_train_on_more_samples_are_reported_with_both_figures(alone: RunDir) -> None:
    training, command = ScriptTraining(alone, task(alone, "train-x-1", 16)), LeaderCommand(task="train-x-1", attempt=1)
    attempt, batch = ScriptAttempt(alone.path, "train-x-1", 1), 16.0
    for step, samples in ((10, 16.0), (20, 16.5), (30, None), (40, 64.0), (50, 64.0), (60, 16.0)):
        heartbeat(alone, "train-x-1", 0, step=step, step_samples=samples)
        batch = training.warn_step_samples_change(attempt, command, previous=batch)
    rows = [row["message"] for row in alone.get_training("x").read_newest_metrics() if row["kind"] == "warning"]
    assert [message.partition(", but the command was given batch 16")[0] for message in rows] == [
        "at step 40, a step trains on 64 samples",
        "at step 60, a step trains on 16 samples",
    ]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("loading\nthis needs 2 GPUs\n\ntula: put aside\n", "this needs 2 GPUs"),
        ("", ""),
        ("x" * 20_000 + "\nend", "end"),
    ],
)
def test_the_last_line_of_a_script_says_why_it_took_no_step(tmp_path: Path, log: str, line: str) -> None:
    (tmp_path / "log").write_text(log)
    assert find_last_script_line(tmp_path / "log") == line
    assert (line or "is started without -I") in describe_missing_step(tmp_path / "log")
