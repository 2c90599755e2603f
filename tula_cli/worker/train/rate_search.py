"""The search for the learning rate of a large batch on the nodes: short branches from one checkpoint.

The branches are those of a self-tuning training (`auto_tune`); `models.rate_search` decides which are trained. Each one
is recorded when it ends, so that a search that is started again trains only the missing ones.
"""

import math

from tula_cli.errors import Diverged
from tula_cli.models import rate_search
from tula_cli.models.rate_search import RateArm, SearchPlan
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import RateBranch, RateSearch
from tula_cli.run.records.tasks import RateSearchTask, Rung, TrainTask
from tula_cli.spec.ags import Arm
from tula_cli.spec.job import JobSpec, get_default_beta1, set_beta1
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import auto_tune, gradient_noise
from tula_cli.worker.train.auto_tune import BranchContext


def run_rate_search(task: RateSearchTask, run: RunDir, ranks: Ranks, datasets: Datasets) -> None:
    """Train the missing branches and write the record after each one; does nothing if none is missing.

    Raises:
        Diverged: the training diverges at the reference batch already.
    """
    text = ""
    if ranks.is_first and (stored := run.read_rate_search(task.key)) is not None:
        text = stored.model_dump_json()
    text = ranks.gather(text)[0]
    search = RateSearch.model_validate_json(text) if text else None
    if search is not None and search.finished:
        return
    plan = rate_search.plan_rate_search(task.spec, task.batches, dataset_size=len(datasets.train))
    context = _make_branch_context(task, plan, ranks, datasets)
    if search is None:
        search = _measure_loss_and_noise_at_checkpoint(context, task, plan)
    while (arm := rate_search.find_next_arm(task.spec, task.batches, search.branches, search.start_loss)) is not None:
        if ranks.is_first:
            run.write_rate_search(search)
        branch = _train_branch(context, task, plan, arm, search.branches)
        update = {"branches": (*search.branches, branch), "samples": search.samples + branch.samples}
        search = RateSearch.model_validate_json(ranks.gather(search.model_copy(update=update).model_dump_json())[0])
    if ranks.is_first:
        run.write_rate_search(search.model_copy(update={"finished": True}))


def _make_branch_context(task: RateSearchTask, plan: SearchPlan, ranks: Ranks, datasets: Datasets) -> BranchContext:
    """Return the start that all branches share; the training up to it runs when `branching_checkpoint` is first used."""
    split = auto_tune.hold_out_samples(task.spec, datasets, batch=max(task.batches))
    return BranchContext(
        task=_make_training_task(task, plan, len(split.train), task.spec, task.spec.train.reference_batch),
        ranks=ranks,
        datasets=split,
        beginning=plan.start,
        epoch=plan.start / len(split.train),
        preemption=None,
        control=Arm(name="start", method=task.spec.train.training_method.get_name_with_rule("none")),
    )


def _make_training_task(task: RateSearchTask, plan: SearchPlan, size: int, spec: JobSpec, batch: int) -> TrainTask:
    """Return the task of a training at a batch, whose warm-up ends before the branches start.

    Args:
        size: number of training samples without the held-out ones.
    """
    warmup = min(spec.schedule.warmup_epochs or 0.0, plan.start / size)
    schedule = spec.schedule.model_copy(update={"warmup_epochs": warmup})
    beta1 = get_default_beta1(spec, batch)
    optimizer = spec.optimizer if beta1 is None else set_beta1(spec.optimizer, beta1)
    return TrainTask(
        **task.model_dump(include={"id", "job", "workdir", "nodes", "code"}),
        spec=spec.model_copy(update={"schedule": schedule, "optimizer": optimizer}),
        signature=task.key,
        attempt=1,
        ladder=(Rung(batch=batch),),
        workers=spec.train.workers,
    )


def _measure_loss_and_noise_at_checkpoint(context: BranchContext, task: RateSearchTask, plan: SearchPlan) -> RateSearch:
    """Return the record with the loss and the gradient noise at the checkpoint from which the branches start."""
    trainer = context.build_branch_trainer(context.task, context.control, plan.length)
    loss = context.evaluate(trainer).loss
    if not math.isfinite(loss):
        raise Diverged(
            f"the training diverges at train.reference_batch {task.spec.train.reference_batch} with optimizer.lr"
            f" {task.spec.optimizer.lr:g}",
            "lower optimizer.lr, or set train.max_grad_norm",
        )
    noise = gradient_noise.measure_gradient_noise(
        trainer, batches=plan.noise_batches, after_batch=context.stop_if_requested
    )
    interval = (noise["scale"], noise["low"], noise["high"]) if "scale" in noise else None
    return RateSearch(
        key=task.key,
        nodes=task.nodes,
        batches=task.batches,
        reference_batch=task.spec.train.reference_batch,
        samples=trainer.position.samples + plan.noise_batches * task.spec.train.reference_batch,
        total=plan.total,
        start_epoch=trainer.epoch,
        start_loss=loss,
        noise=interval and (*interval[:2], interval[2] if math.isfinite(interval[2]) else None),
    )


def _train_branch(
    context: BranchContext, task: RateSearchTask, plan: SearchPlan, arm: RateArm, branches: tuple[RateBranch, ...]
) -> RateBranch:
    """Train a branch; its learning rate rises to its own in the first quarter and falls in the second half."""
    spec = rate_search.make_job_of_rule(task.spec, arm.rule)
    trained = Arm(
        name=f"{arm.rule}-{arm.batch}",
        method=task.spec.train.training_method.get_name_with_rule("none"),
        lr_factor=arm.factor if spec.train.training_method.choose_rule_of_arm(arm.rule) == "none" else 1.0,
        warmup_epochs=plan.length / 4 / context.size,
    )
    branch = context.train_branch(
        _make_training_task(task, plan, context.size, spec, arm.batch),
        trained,
        plan.length,
        control=branches[0].loss if branches else None,
    )
    lr = arm.factor * task.spec.optimizer.lr
    return RateBranch(**branch.model_dump(), batch=arm.batch, rule=arm.rule, factor=arm.factor, lr=lr)
