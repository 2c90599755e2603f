"""Self-tuning: branches from a checkpoint, the choice, and going on where it was broken off."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worker_jobs import (
    Blobs,
    Interrupted,
    LeavesAt,
    are_equal,
    copy_weights,
    load_final_weights,
    make_spec,
    make_train_task,
    read_rows,
)

from tula_cli.errors import SpecError
from tula_cli.models import self_tuning
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import Tuning
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.preemption import PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import auto_tune, checkpoint, evaluation
from tula_cli.worker.train import loop as worker_train_loop

WILD = {"name": "wild", "lr_factor": 1e30}
FAST = {"name": "fast", "lr_factor": 1.5}
BEGUN = make_spec(train={"method": "lbt", "epochs": 4, "max_grad_norm": 1.0, "ramp": [{"epochs": 1, "batch": 8}]})
RAMPS = ({"name": "ramp", "method": "ramp"},)
SCALED = {"name": "scaled", "method": "ags"}


def job(*arms: dict[str, Any], dataset: dict[str, Any] | None = None, **auto: Any) -> JobSpec:
    changes = {"train": {"method": "auto", "epochs": 4}, "auto": {"arms": list(arms), "branch_epochs": 1, **auto}}
    ags = {"granularity": "tensor", "delta": "inf"}
    return make_spec(**changes, ags=ags, dataset={"args": dataset or {}})


def train(run: RunDir, ranks: Ranks, task: TrainTask, preemption: PreemptionHandler | None = None) -> None:
    run_training(task, run, ranks, build_datasets(task.spec), preemption=preemption)


def tuned(run: RunDir, ranks: Ranks, *arms: dict[str, Any], **auto: Any) -> tuple[TrainTask, Tuning]:
    """Train a job to its end; return its task and what tuning found."""
    task = make_train_task(job(*arms, **auto))
    train(run, ranks, task)
    return task, record(run, task)


@pytest.fixture(scope="module")
def two_arms(alone: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, TrainTask, Tuning]:
    """A finished training with two arms, to be looked at: its run, its task and what tuning found."""
    run = RunDir.create(tmp_path_factory.mktemp("two-arms"), job(FAST, SCALED))
    return run, *tuned(run, alone, FAST, SCALED)


def record(run: RunDir, task: TrainTask) -> Tuning:
    result = run.get_training(task.signature).read_tuning()
    assert result is not None
    return result


def interrupt(run: RunDir, ranks: Ranks, *arms: dict[str, Any], after: int, batch: int = 16) -> TrainTask:
    """Train until some samples are loaded, branches counted; return the task that goes on."""
    task = make_train_task(job(*arms), batch=batch)
    ending = make_train_task(job(*arms, dataset={"ends_after": after}), batch=batch, signature=task.signature)
    with pytest.raises(Interrupted):
        train(run, ranks, ending)
    return task


def by_hand(ranks: Ranks, arm: Arm) -> dict[str, torch.Tensor]:
    """Return the weights of a training that goes on as an arm after an epoch of batch 8, without any tuning."""
    data = build_datasets(job())
    plain, value = (
        auto_tune.ArmChoice(a, 1.0).make_task(make_train_task(job()), size=100) for a in (Arm(name="lbt"), arm)
    )
    first = worker_train_loop.build_trainer(plain, ranks, data, batch=16, workers=0, refresh=True)
    list(itertools.islice(worker_train_loop.run_steps(first), 12))
    then = worker_train_loop.build_trainer(value, ranks, data, batch=16, workers=0, refresh=True)
    then.parallel.module.load_state_dict(first.parallel.module.state_dict())
    then.base.load_state_dict(first.optimizer.state_dict())
    if then.ags:
        then.ags.request_refresh()
    then.move_to_position(first.position)
    then.lr_factor = lambda epoch: self_tuning.compute_lr_factor(arm, epoch, start=1)
    list(worker_train_loop.run_steps(then))
    return copy_weights(then)


# --- what is left behind


def test_branches_leave_a_record_and_rows_but_no_checkpoints(two_arms: tuple[RunDir, TrainTask, Tuning]) -> None:
    run, task, outcome = two_arms
    assert outcome.chosen in outcome.arms
    assert (outcome.start, outcome.epoch, outcome.batch) == (96, 1, 16)
    assert [branch.samples for branch in outcome.branches] == [80] * 3
    assert all(branch.epochs == pytest.approx(branch.samples / 90) for branch in outcome.branches)
    branches = list(read_rows(run, task, "branch"))
    assert [(row["arm"], row["top1"]) for row in branches] == [(branch.arm, branch.top1) for branch in outcome.branches]
    assert all(row["samples"] == 96 and row["eta"] > 0 for row in branches)
    assert [row["samples"] for row in read_rows(run, task, "epoch")] == [96, 192, 288, 384]
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert (result.samples, result.tuning) == (384, outcome)
    assert run.get_training(task.signature).count_trained_samples() == 384 + 88 + 3 * 80, "the branches' beginning too"


def test_a_finished_training_is_not_tuned_again(alone: Ranks, two_arms: tuple[RunDir, TrainTask, Tuning]) -> None:
    run, task, _ = two_arms
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    train(run, alone, task)
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}


# --- the training itself


def test_where_nothing_beats_the_large_batch_the_training_is_that_of_lbt_after_an_epoch_of_the_reference_batch(
    alone: Ranks, run: RunDir
) -> None:
    task, result = tuned(run, alone, WILD)
    assert result.chosen == Arm(name="lbt")
    plain = make_train_task(BEGUN)
    train(run, alone, plain)
    assert are_equal(load_final_weights(run, task), load_final_weights(run, plain))


@pytest.mark.parametrize("arm", [FAST, SCALED], ids=["fast", "scaled"])
def test_the_training_goes_on_as_if_it_had_been_told_the_winner(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch, arm: dict[str, Any]
) -> None:
    monkeypatch.setattr(self_tuning, "sort_branches", lambda branches: sorted(branches, key=lambda b: b.arm == "lbt"))
    task, result = tuned(run, alone, arm)
    assert result.chosen is not None
    assert result.chosen.name == arm["name"]
    assert are_equal(load_final_weights(run, task), by_hand(alone, result.chosen))
    messages = [row["lr"] for row in read_rows(run, task, "epoch")]
    assert messages == pytest.approx([0.1, *[0.1 * result.chosen.lr_factor] * 3])


def test_at_the_reference_batch_there_is_nothing_to_tune(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(job(), batch=8)
    train(run, alone, task)
    assert (record(run, task).branches, record(run, task).chosen) == ((), Arm(name="lbt"))


def test_the_default_arms_all_train(alone: Ranks, run: RunDir) -> None:
    task, result = tuned(run, alone)
    names = [arm.name for arm in self_tuning.list_arms_of_training(task.spec, 16)]
    assert [branch.arm for branch in result.branches] == names
    assert names == ["lbt", "ramp", "ramp-x0.5"], "there is no weight decay to try another of"
    assert len({branch.loss for branch in result.branches}) == 3


# --- judging


def test_a_branch_trains_as_its_arm_cools_down_and_settles(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []
    settled: list[int] = []
    steps, settle = worker_train_loop.run_steps, evaluation.recompute_batch_norm_statistics

    def spied(trainer: worker_train_loop.Trainer) -> Iterator[worker_train_loop.Step]:
        seen.append([])
        for step in steps(trainer):
            seen[-1].append(step.lr)
            yield step

    monkeypatch.setattr(worker_train_loop, "run_steps", spied)

    def settling(trainer: worker_train_loop.Trainer, *, batches: int, after_batch: Any) -> Any:
        settled.append(batches)
        return settle(trainer, batches=batches, after_batch=after_batch)

    monkeypatch.setattr(evaluation, "recompute_batch_norm_statistics", settling)
    arms = (Arm(name="lbt"), Arm(name="fast", lr_factor=1.5, warmup_epochs=0.5))
    monkeypatch.setattr(self_tuning, "list_arms_of_training", lambda _spec, _batch: arms)
    tuned(run, alone)
    assert settled == [auto_tune.BATCH_NORM_MICRO_BATCHES] * 2
    parts = [step * 16 / 90 for step in range(5)]
    cooled = [min(1, 2 - 2 * part) for part in parts]
    assert seen[1] == pytest.approx([0.1] * 11), "where the branches begin: at the reference batch"
    assert seen[2] == pytest.approx([0.1 * c for c in cooled])
    grown = [1 + 0.5 * min(1, part / 0.5) for part in parts]
    assert seen[3] == pytest.approx([0.1 * c * g for c, g in zip(cooled, grown, strict=True)])


def test_the_held_out_part_is_neither_trained_nor_augmented(alone: Ranks) -> None:
    subject = job()
    data = build_datasets(subject)
    split = auto_tune.hold_out_samples(subject, data, batch=16)
    trained, samples = split.train.samples, split.eval.samples
    assert sorted([*trained.indices, *samples.indices]) == list(range(100))  # type: ignore[attr-defined]
    assert (len(trained), len(samples)) == (90, 10)  # type: ignore[arg-type]
    again = auto_tune.hold_out_samples(subject, build_datasets(subject), batch=16)
    assert again.eval.samples.indices == samples.indices  # type: ignore[attr-defined]


def test_nothing_that_is_judged_has_trained_on_the_held_out_part(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, build = [], worker_train_loop.build_trainer

    def spied(task: TrainTask, ranks: Ranks, datasets: Any, **how: Any) -> worker_train_loop.Trainer:
        trainer = build(task, ranks, datasets, **how)
        built.append(len(datasets.train))
        return trainer

    loaded: list[str] = []
    restore = checkpoint.restore_checkpoint
    monkeypatch.setattr(worker_train_loop, "build_trainer", spied)
    monkeypatch.setattr(
        checkpoint,
        "restore_checkpoint",
        lambda trainer, content: (
            loaded.append(f"{len(trainer.datasets.train)} from {content['position']['samples']}"),
            restore(trainer, content),
        )[1],
    )
    tuned(run, alone, FAST)
    assert built == [100, 90, 90, 90, 100], "the training, the branches' beginning, two of them, the training"
    assert loaded == ["90 from 88", "90 from 88", "100 from 96"]


def test_an_arm_above_linear_scaling_is_trained_as_it_was_tried(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_tuning, "sort_branches", lambda branches: sorted(branches, key=lambda b: b.arm == "lbt"))
    task, _ = tuned(run, alone, {"name": "bold", "lr_factor": 3.0})
    assert [row["lr"] for row in read_rows(run, task, "epoch")] == pytest.approx([0.1, 0.3, 0.3, 0.3])


def test_the_held_out_part_is_seen_through_the_transforms_of_an_evaluation() -> None:
    turned = {"train": [{"RandomRotation": {"degrees": [90, 90]}}, "ToTensor"], "eval": ["ToTensor"]}
    subject = make_spec(train={"method": "auto"}, dataset={"name": "digits"}, transforms=turned)
    data = build_datasets(subject)
    kept = auto_tune.hold_out_samples(subject, data, batch=16).eval
    index = kept.samples.indices[0]  # type: ignore[attr-defined]
    straight, label = build_datasets(make_spec(dataset={"name": "digits"})).train[0, index]
    assert torch.equal(kept[0][0], straight)
    assert kept[0][1] == label
    assert not torch.equal(data.train[0, index][0], straight)


def test_the_statistics_of_batchnorm_are_those_of_the_weights_at_the_end(alone: Ranks) -> None:
    subject = make_spec(model={"args": {"norm": True}})
    data = build_datasets(subject)
    trainer = worker_train_loop.build_trainer(make_train_task(subject), alone, data, batch=16, workers=0, refresh=True)
    conv, norm = trainer.parallel.module[0], trainer.parallel.module[1]
    norm.running_mean.fill_(99.0)
    evaluation.recompute_batch_norm_statistics(
        trainer, batches=auto_tune.BATCH_NORM_MICRO_BATCHES, after_batch=lambda: None
    )
    with torch.no_grad():
        seen = [
            conv(images)
            for images, _ in itertools.islice(
                worker_train_loop.list_upcoming_micro_batches(trainer), auto_tune.BATCH_NORM_MICRO_BATCHES
            )
        ]
    expected = torch.stack([output.mean((0, 2, 3)) for output in seen]).mean(0)
    torch.testing.assert_close(norm.running_mean, expected)


def test_a_batch_larger_than_what_is_left_is_refused() -> None:
    subject = job()
    with pytest.raises(SpecError, match=r"compares settings on 90 of 100 training samples, fewer than the batch of 96"):
        auto_tune.hold_out_samples(subject, build_datasets(subject), batch=96)


def test_a_branch_that_diverges_is_left_at_once(alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_tune, "STEPS_BETWEEN_CHECKS", 1)
    _, result = tuned(run, alone, {"name": "wild", "lr_factor": 1e38})
    wild = next(branch for branch in result.branches if branch.arm == "wild")
    assert wild.diverged
    assert wild.samples < 80
    assert (wild.loss, wild.top1) == (None, None)


@pytest.mark.parametrize(
    ("loss", "control", "gone"),
    [(1.0, 0.5, False), (1.2, 0.5, True), (1.2, 1.3, False), (math.inf, 9.0, True), (math.nan, 9.0, True)],
)
def test_worse_than_guessing_and_than_the_control_counts_as_diverged(loss: float, control: float, gone: bool) -> None:
    result = evaluation.Evaluation(loss=loss, top1=40.0, top5=90.0, samples=10)
    assert auto_tune.has_diverged(result, 3, control) is gone, "chance is ln 3 = 1.0986"


def test_a_decay_is_the_arm_s_own_though_it_goes_on_from_a_state_of_another(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the branch, in the training after the choice, and after an interruption of that."""
    monkeypatch.setattr(self_tuning, "sort_branches", lambda branches: sorted(branches, key=lambda b: b.arm == "lbt"))
    arms = (Arm(name="lbt"), Arm(name="decayed", decay_factor=4.0))
    monkeypatch.setattr(self_tuning, "list_arms_of_training", lambda _spec, _batch: arms)
    changes = {"train": {"method": "auto", "epochs": 4}, "auto": {"branch_epochs": 1}}
    subject = make_spec(**changes, optimizer={"weight_decay": 0.01})
    seen: list[tuple[int, float]] = []
    step = worker_train_loop._train_step

    def spied(trainer: worker_train_loop.Trainer, *args: Any, **how: Any) -> worker_train_loop.Step:
        seen.append((len(trainer.datasets.train), trainer.base.param_groups[0]["weight_decay"]))
        return step(trainer, *args, **how)

    monkeypatch.setattr(worker_train_loop, "_train_step", spied)
    task = make_train_task(subject)
    train(run, alone, task, LeavesAt(alone, 45))
    train(run, alone, task)
    assert record(run, task).chosen == arms[1]
    on_parts = [decay for size, decay in seen if size == 90]
    assert on_parts == [0.01] * 11 + [0.01] * 5 + [0.04] * 5, "the beginning, the control, the arm"
    assert [decay for size, decay in seen if size == 100] == [0.01] * 12 + [0.04] * 18


def test_a_ramp_goes_through_its_stages_in_a_branch_and_in_the_training(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(job(*RAMPS), batch=48)
    train(run, alone, task)
    steps = [(row["samples"], row["batch"]) for row in read_rows(run, task, "step")]
    assert {batch for _, batch in steps} <= {8, 16, 32, 48}
    result = record(run, task)
    by_arm = {branch.arm: branch.samples for branch in result.branches}
    planned = self_tuning.plan_tuning(task.spec, batch=48, dataset_size=100)
    assert result.samples - result.lost == planned.samples == 88 + sum(by_arm.values())


# --- broken off and resumed


def test_a_branch_broken_off_is_the_only_one_trained_again(
    alone: Ranks, run: RunDir, two_arms: tuple[RunDir, TrainTask, Tuning]
) -> None:
    task = interrupt(run, alone, FAST, SCALED, after=96 + 88 + 2 * 80 + 40)
    first = record(run, task)
    assert [branch.arm for branch in first.branches] == ["lbt", "fast"]
    assert first.chosen is None
    train(run, alone, task)
    result = record(run, task)
    assert result.branches[:2] == first.branches
    assert len(list(read_rows(run, task, "branch"))) == len(result.branches) == 3
    other, whole, expected = two_arms
    assert result.chosen == expected.chosen
    assert [branch.loss for branch in result.branches] == [branch.loss for branch in expected.branches]
    assert are_equal(load_final_weights(run, task), load_final_weights(other, whole))


def test_a_training_broken_off_after_the_choice_keeps_it(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_tuning, "sort_branches", lambda branches: sorted(branches, key=lambda b: b.arm == "lbt"))
    task = interrupt(run, alone, SCALED, after=96 + 88 + 2 * 80 + 96 + 40)
    first = record(run, task)
    assert first.chosen is not None and first.chosen.name == "scaled"
    assert run.get_training(task.signature).find_newest_checkpoint_samples() == 192
    train(run, alone, task)
    assert record(run, task) == first
    assert are_equal(load_final_weights(run, task), by_hand(alone, first.chosen))


def test_at_another_batch_an_open_comparison_begins_anew(alone: Ranks, run: RunDir) -> None:
    first = interrupt(run, alone, FAST, after=96 + 88 + 80 + 40, batch=16)
    assert len(record(run, first).branches) == 1
    task = make_train_task(first.spec, batch=12, signature=first.signature)
    train(run, alone, task)
    result = record(run, task)
    assert (result.batch, result.start, len(result.branches)) == (12, 96, 2)
    assert {branch.samples for branch in result.branches} == {84}


def test_at_another_batch_a_choice_stays_with_at_most_linear_scaling(alone: Ranks, run: RunDir) -> None:
    first = make_train_task(job(FAST))
    chosen = Arm(name="x2", lr_factor=2)
    run.write_tuning(Tuning(signature=first.signature, batch=16, start=96, epoch=1, arms=(chosen,), chosen=chosen))
    task = make_train_task(first.spec, batch=12, signature=first.signature)
    choice = auto_tune.load_arm_choice(task, run, alone)
    assert choice is not None
    assert choice.arm.lr_factor == 1.5, "12 / 8"


def test_an_arm_that_breaks_down_gives_way_to_the_next_and_in_the_end_to_the_large_batch(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both arms end behind in every epoch; the control, which never is, trains as lbt does, bit for bit."""
    monkeypatch.setattr(
        self_tuning, "sort_branches", lambda branches: sorted(branches, key=lambda b: (b.arm == "lbt", b.arm))
    )
    monkeypatch.setattr(auto_tune.ArmChoice, "is_behind", lambda self, loss, epoch: epoch >= 3)
    task, outcome = tuned(run, alone, FAST, SCALED)
    assert outcome.broken == ("fast", "scaled")
    assert outcome.chosen == Arm(name="lbt")
    assert outcome.lost == 2 * (384 - 96)
    plain = make_train_task(BEGUN)
    train(run, alone, plain)
    assert are_equal(load_final_weights(run, task), load_final_weights(run, plain))
    assert [row["samples"] for row in read_rows(run, task, "epoch")] == [96, 192, 288, 384]
    *_, message = [
        row["message"] for row in read_rows(run, task, "warning") if row.get("code") == "arm-diverged-after-choice"
    ]
    assert message == "The training diverged with fast, scaled. It continues with lbt."
    result = run.get_training(task.signature).read_result()
    assert result is not None and result.samples == 384


def test_a_loss_that_is_no_number_breaks_an_arm_at_once(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_tuning, "find_winning_arm", lambda branches: max(b.arm for b in branches))
    _, result = tuned(run, alone, {"name": "wild", "lr_factor": 1e38})
    assert result.broken == ("wild",) and 0 < result.lost <= 96, "within the epoch, when the ranks next meet"
    assert result.chosen == Arm(name="lbt")


def test_behind_is_a_loss_above_the_controls_after_twice_as_long() -> None:
    choice = auto_tune.ArmChoice(Arm(name="x2", lr_factor=2), 1.0, branch_epochs=4.0, limit=0.5)
    assert not choice.is_behind(0.6, epoch=8.9)
    assert choice.is_behind(0.6, epoch=9.0) and choice.is_behind(math.nan, epoch=9.0)
    assert not choice.is_behind(0.5, epoch=9.0)
    assert not auto_tune.ArmChoice(Arm(name="lbt"), 1.0, branch_epochs=4.0, limit=0.5).is_behind(0.6, epoch=9.0)


def test_the_checkpoint_where_arms_part_stays_while_the_choice_may_break_down(
    two_arms: tuple[RunDir, TrainTask, Tuning],
) -> None:
    run, task, result = two_arms
    kept = [int(path.stem) for path in run.get_training(task.signature).list_checkpoints()]
    assert result.start == 96 and 96 in kept and len(kept) <= checkpoint.CHECKPOINTS_KEPT + 2


def test_ranks_told_to_leave_in_a_branch_say_so_and_go_on_there(alone: Ranks, run: RunDir) -> None:
    task = make_train_task(job(FAST))
    train(run, alone, task, LeavesAt(alone, 35))
    assert run.read_stop_reason(task.id, 1) == "time_limit"
    assert len(record(run, task).branches) == 1
    assert [int(path.stem) for path in run.get_training(task.signature).list_checkpoints()] == [96]
    train(run, alone, task)
    assert run.get_training(task.signature).read_result() is not None
    assert len(list(read_rows(run, task, "branch"))) == 2


def test_arms_may_part_where_less_than_a_batch_is_left_of_an_epoch(alone: Ranks, run: RunDir) -> None:
    first = interrupt(run, alone, FAST, after=40, batch=32)
    task = make_train_task(first.spec, batch=32, signature=first.signature)
    trainer = worker_train_loop.build_trainer(task, alone, build_datasets(task.spec), batch=32, workers=0, refresh=True)
    trainer.position = worker_train_loop.TrainingPosition(epoch=0, done=95, samples=95, steps=3)
    checkpoint.save_checkpoint(run, task.signature, trainer, best={}, is_best=False)
    train(run, alone, task)
    assert record(run, task).start == 95
    result = run.get_training(task.signature).read_result()
    assert result is not None
    assert result.epochs == 4


def test_blobs_are_what_these_counts_rest_on() -> None:
    assert len(Blobs(True, None)) == 100
    assert compute_train_signature(job(FAST), nodes=1, batch=16) != compute_train_signature(
        job(SCALED), nodes=1, batch=16
    )
