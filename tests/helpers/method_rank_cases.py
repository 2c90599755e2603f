"""Cases of test_methods_ranks on several ranks: `python method_rank_cases.py FOLDER` in torchrun's environment.

All cases run in one process group, one after the other. The results of a rank are in FOLDER/<rank>.json.
"""

import hashlib
import json
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from worker_jobs import (
    Interrupted,
    are_equal,
    copy_weights,
    list_other_layouts,
    load_final_weights,
    make_spec,
    make_staged_task,
    make_train_task,
    make_trainer,
    read_rows,
    train_to_end,
)

from tula_cli.optim import orthogonal
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import zoo
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.loaders import make_epoch_permutation
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks, join_process_group
from tula_cli.worker.seeding import compute_stable_seed
from tula_cli.worker.train import checkpoint, evaluation
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.learning_rate import compute_learning_rate
from tula_cli.worker.train.loop import Trainer

POLO: dict[str, Any] = {"train": {"method": "polo", "epochs": 7, "checkpoint_every": 1e-9}}
FREE: dict[str, Any] = {"train": {"method": "schedule_free", "epochs": 2, "checkpoint_every": 1e-9}}
NORM: dict[str, Any] = {"model": {"args": {"norm": True, "dropout": 0.3}}}


def main() -> None:
    folder = Path(sys.argv[1])
    cases = (
        compare_replicas,
        compare_synchronous_phase,
        compare_with_torch,
        resume,
        relaunch_at_half_batch,
        save_between_averages,
        agree_on_loss_scale,
        align_with_rounding,
        compare_layouts,
        train_schedule_free,
        resume_schedule_free,
        resume_growing_batch,
        resume_growth_by_noise,
    )
    with join_process_group(make_spec().cluster, rendezvous_file=folder / "handover") as ranks:
        results = {case.__name__: case(folder, ranks) for case in cases}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))


def _is_equal_on_all_ranks(ranks: Ranks, tensors: Any) -> bool:
    """Return whether the tensors are bitwise equal on all ranks."""
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
    return len(set(ranks.gather(digest))) == 1


def _checkpoint_tensors(subject: Trainer) -> list[torch.Tensor]:
    """Return all tensors of a checkpoint."""
    momenta = [state["momentum_buffer"] for state in subject.base.state.values()]
    return [*subject.parallel.module.state_dict().values(), *momenta]


def align_with_rounding(folder: Path, ranks: Ranks) -> list[bool]:
    """Return after each step whether the replicas are equal; rank 1 rounds differently in the third step."""
    subject = make_trainer(make_spec(train={"method": "ortho"}), ranks)
    assert isinstance(subject.optimizer, orthogonal.Ortho)
    result, before, orthogonal.BROADCAST_INTERVAL_STEPS = [], orthogonal.BROADCAST_INTERVAL_STEPS, 5
    for count, _ in enumerate(islice(worker_train_loop.run_steps(subject), 6), 1):
        result.append(_is_equal_on_all_ranks(ranks, subject.optimizer.matrices()))
        if count == 3 and ranks.rank == 1:
            with torch.no_grad():
                subject.optimizer.matrices()[0].mul_(1 + 1e-6)
    orthogonal.BROADCAST_INTERVAL_STEPS = before
    return result


LAYOUTS: dict[str, dict[str, Any]] = {
    "ags": {"train": {"method": "ags"}, "ags": {"delta": "inf", "b_small": 6, "refresh": {"every": 2}}},
    "ortho": {
        "train": {"method": "ortho"}
    },  # 12 steps, 3 of which align; more would be chaotic: 36 steps change layouts by 2e-3
    "polo": {"train": {"method": "polo", "epochs": 6}},
}


def compare_layouts(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the distance between channels_last and the default layout, and the tensors whose layout differs from their parameter's."""
    result, before, orthogonal.BROADCAST_INTERVAL_STEPS = {}, orthogonal.BROADCAST_INTERVAL_STEPS, 5
    for name, sections in LAYOUTS.items():
        usual, subject = (_with_layout(sections, ranks, channels_last=wanted) for wanted in (False, True))
        pairs = zip(subject.parallel.parameters(), usual.parallel.parameters(), strict=True)
        result[name] = {
            "off": max(float((first - other).abs().max()) for first, other in pairs),
            "turned": sum(not p.is_contiguous() for p in subject.parallel.parameters()),
            "otherwise": list_other_layouts(subject),
            "agree": _is_equal_on_all_ranks(ranks, subject.parallel.parameters()),
        }
    orthogonal.BROADCAST_INTERVAL_STEPS = before
    return result


def _with_layout(sections: dict[str, Any], ranks: Ranks, *, channels_last: bool) -> worker_train_loop.Trainer:
    train = {"epochs": 2, **sections["train"]}
    job = make_spec(**{**sections, "model": {"name": "worker_jobs:convolutions"}, "train": train})
    with mock.patch.object(worker_train_loop, "should_use_channels_last", return_value=channels_last):
        subject = make_trainer(job, ranks)
    list(worker_train_loop.run_steps(subject))
    return subject


def train_schedule_free(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the results of method schedule_free without BatchNorm, and with BatchNorm whether its statistics are correct.

    "by_hand" is the largest difference from the means over all ranks at the averaged weights; "agree" is whether all ranks have
    the same model after the evaluation.
    """
    plain = make_trainer(make_spec(**FREE), ranks)
    list(worker_train_loop.run_steps(plain))
    subject = make_trainer(make_spec(**FREE, **NORM, dataset={"args": {"size": 640}}), ranks)
    list(islice(worker_train_loop.run_steps(subject), 6))
    conv, norm = subject.parallel.module[0], subject.parallel.module[1]
    with subject.method.use_evaluated_weights(subject), torch.no_grad():
        seen = [conv(inputs) for inputs, _ in islice(worker_train_loop.list_upcoming_micro_batches(subject), 4)]
    value = [torch.stack([output.mean((0, 2, 3)) for output in seen]).mean(0)]
    value.append(torch.stack([output.transpose(0, 1).flatten(1).var(1) for output in seen]).mean(0))
    expected = torch.tensor(ranks.sum(torch.cat(value).tolist())) / ranks.world
    evaluation.Evaluator(subject).evaluate()
    result = torch.cat([norm.running_mean, norm.running_var])
    return {
        "weights": torch.cat(
            [p.flatten() for p in checkpoint.make_checkpoint_state(plain, best={})["model"].values()]
        ).tolist(),
        "by_hand": float((result - expected).abs().max()),
        "agree": _is_equal_on_all_ranks(ranks, subject.parallel.module.state_dict().values()),
    }


def resume_schedule_free(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Interrupt method schedule_free in its second epoch, resume it, and return the distance to an uninterrupted run."""
    job, run, other = make_spec(**FREE, **NORM), RunDir(folder / "free"), RunDir(folder / "free-unbroken")
    task = make_train_task(job)
    _interrupt(job, run, ranks, after=96 + 64)
    _train(task, run, ranks)
    _train(task, other, ranks)
    starts = [row["samples"] for row in read_rows(run, task, "start")]
    first, whole = load_final_weights(run, task), load_final_weights(other, task)
    return {"starts": starts, "off": max(float((first[name] - whole[name]).abs().max()) for name in whole)}


STAGES = [{"epochs": 0.5, "batch": 8}]
GROWING_BATCH_JOBS: dict[str, dict[str, Any]] = {
    "ramp": {"train": {"method": "ramp"}},
    "robust": {"train": {"method": "ags"}, "ags": {"preset": "robust"}},
    # the batch changes between two averages, while the ranks have different weights
    "polo": {"train": {"method": "polo", "epochs": 7, "ramp": [{"epochs": 5.4, "batch": 8}]}},
}


def make_growing_job(name: str) -> JobSpec:
    """Return a job whose batch grows in its first epoch; steps have the same samples on two ranks as on four."""
    settings = {"ramp": STAGES, "epochs": 2, "reference_batch": 4, "checkpoint_every": 1e-9}
    return make_spec(**{**GROWING_BATCH_JOBS[name], "train": {**settings, **GROWING_BATCH_JOBS[name]["train"]}})


def resume_growing_batch(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Interrupt trainings around a change of the batch, resume them, and return the distances to uninterrupted runs."""
    results = {}
    for number, name in enumerate(GROWING_BATCH_JOBS):
        run, other = RunDir(folder / f"grown-{name}"), RunDir(folder / f"grown-{name}-unbroken")
        # before, at and after the change of the batch
        after = 40 + 8 * number if name != "polo" else 5 * 96 + 56
        task = _interrupt(make_growing_job(name), run, ranks, after=after)
        _train(task, run, ranks)
        _train(task, other, ranks)
        first, whole = load_final_weights(run, task), load_final_weights(other, task)
        results[name] = {
            "starts": len(list(read_rows(run, task, "start"))),
            "off": max(float((first[key] - whole[key]).abs().max()) for key in whole),
            "weights": torch.cat([value.flatten() for value in whole.values()]).tolist(),
        }
    return results


def resume_growth_by_noise(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Interrupt a training with stages by gradient noise; return its batches and the distance to an uninterrupted run."""
    task, ends = make_staged_task(), []
    for name, breaks in (("noise", (130, 500)), ("noise-unbroken", ())):
        run = RunDir(folder / name)
        for after in breaks:
            _train_until_interrupted(
                task.model_copy(update={"spec": make_staged_task(ends_after=after // ranks.world).spec}), run, ranks
            )
        _train(task, run, ranks)
        ends.append((load_final_weights(run, task), [row["batch"] for row in read_rows(run, task, "epoch")]))
    (first, batches), (whole, without) = ends
    off = max(float((first[key] - whole[key]).abs().max()) for key in whole)
    return {"off": off, "same": batches == without, "batches": batches}


def compare_replicas(folder: Path, ranks: Ranks) -> dict[str, list[bool]]:
    """Return after each step whether the parameters are equal, and whether the whole state is.

    "kept" is whether the next step starts with the running statistics of this rank after this step.
    """
    subject = make_trainer(make_spec(**POLO, **NORM), ranks)
    norm = next(module for module in subject.parallel.modules() if isinstance(module, nn.BatchNorm2d))
    entered: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda module, _: entered.append(module.running_mean.clone()))
    parameters, everything, after = [], [], []
    for _ in worker_train_loop.run_steps(subject):
        parameters.append(_is_equal_on_all_ranks(ranks, subject.parallel.parameters()))
        everything.append(_is_equal_on_all_ranks(ranks, _checkpoint_tensors(subject)))
        after.append(norm.running_mean.clone())
    kept = [torch.equal(first, other) for first, other in zip(after[:-1], entered[1:], strict=True)]
    return {"parameters": parameters, "everything": everything, "kept": kept}


def compare_synchronous_phase(folder: Path, ranks: Ranks) -> bool:
    """Return whether the first five epochs equal bitwise those of the large batch with the same warm-up."""
    ends = []
    for job in (
        make_spec(**POLO, **NORM, schedule={"warmup_epochs": 5}),
        make_spec(**NORM, train={"method": "lbt", "epochs": 7}, schedule={"warmup_epochs": 5}),
    ):
        subject = make_trainer(job, ranks)
        for _ in islice(worker_train_loop.run_steps(subject), 30):
            pass
        ends.append(copy_weights(subject))
    return are_equal(*ends)


def compare_with_torch(folder: Path, ranks: Ranks) -> float:
    """Return the distance of the parameters to those of torch's post-local SGD, which averages only parameters."""
    job = make_spec(**POLO, dataset={"args": {"size": 128}}, optimizer={"momentum": None, "lr": 0.05})
    ours, _ = train_to_end(job, ranks)
    data = build_datasets(job)
    torch.manual_seed(compute_stable_seed(job.train.seed))
    ddp = DistributedDataParallel(zoo.build_model(job, 3))
    switch = 5 * 8  # steps
    ddp.register_comm_hook(
        PostLocalSGDState(None, None, start_localSGD_iter=switch, post_local_gradient_allreduce=False),
        post_localSGD_hook,
    )
    averager = PeriodicModelAverager(period=2, warmup_steps=switch)
    averager.step = 1  # it first averages after the step that switches, here one step earlier, which changes nothing
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.05), averager)
    for epoch in range(job.train.epochs):
        order = make_epoch_permutation(128, seed=job.train.seed, epoch=epoch).tolist()
        for begin in range(0, 128, 16):
            pairs = [data.train[epoch, index] for index in order[begin : begin + 16][ranks.rank :: ranks.world]]
            optimizer.param_groups[0]["lr"] = compute_learning_rate(job, epoch + begin / 128, 16)
            optimizer.zero_grad()
            output = ddp(torch.stack([image for image, _ in pairs]))
            nn.functional.cross_entropy(output, torch.tensor([label for _, label in pairs])).backward()
            optimizer.step()
    theirs = ddp.module.state_dict()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _train(task: TrainTask, run: RunDir, ranks: Ranks) -> None:
    run_training(task, run, ranks, build_datasets(task.spec))
    ranks.broadcast(0)


def _interrupt(job: JobSpec, run: RunDir, ranks: Ranks, *, after: int) -> TrainTask:
    """Train until a rank has loaded `after` samples; return the task that resumes."""
    task = make_train_task(job)
    dataset = job.dataset.model_copy(update={"args": {"ends_after": after // ranks.world}})
    ending = job.model_copy(update={"dataset": dataset})
    _train_until_interrupted(make_train_task(ending, signature=task.signature), run, ranks)
    return task


def _train_until_interrupted(task: TrainTask, run: RunDir, ranks: Ranks) -> None:
    """Train until the dataset interrupts the training."""
    try:
        _train(task, run, ranks)
    except Interrupted:
        ranks.broadcast(0)


def resume(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Interrupt between two averages, resume, and compare with an uninterrupted run."""
    run, other = RunDir(folder / "resumed"), RunDir(folder / "unbroken")
    task = _interrupt(make_spec(**POLO, **NORM), run, ranks, after=5 * 96 + 64)
    _train(task, run, ranks)
    _train(task, other, ranks)
    starts = [row["samples"] for row in read_rows(run, task, "start")]
    return {"starts": starts, "same": are_equal(load_final_weights(run, task), load_final_weights(other, task))}


def relaunch_at_half_batch(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Resume at half the batch, as after an out-of-memory error, after the switch."""
    run = RunDir(folder / "relaunched")
    task = _interrupt(make_spec(**POLO, **NORM), run, ranks, after=5 * 96 + 64)
    smaller = make_train_task(task.spec, batch=8, signature=task.signature)
    _train(smaller, run, ranks)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    return {
        "starts": [(row["samples"], row["batch"]) for row in read_rows(run, task, "start")],
        "epochs": result.epochs,
    }


def save_between_averages(folder: Path, ranks: Ranks) -> dict[str, bool]:
    """Return the state saved by an exit between two averages."""
    subject = make_trainer(make_spec(**POLO, **NORM), ranks)
    for _ in islice(worker_train_loop.run_steps(subject), 31):
        pass
    before = _is_equal_on_all_ranks(ranks, _checkpoint_tensors(subject)), subject.apart
    subject.method.synchronize_replicas(subject)
    return {
        "before": before[0],
        "apart": before[1],
        "after": _is_equal_on_all_ranks(ranks, _checkpoint_tensors(subject)),
        "still": subject.apart,
    }


def agree_on_loss_scale(folder: Path, ranks: Ranks) -> float:
    """Return the loss scale on this rank after each rank has found a different one."""
    subject = make_trainer(make_spec(train={**POLO["train"], "precision": "fp16"}), ranks)
    next(worker_train_loop.run_steps(subject))
    subject.scaler.update(2.0 ** (ranks.rank + 3))
    subject.apart = True
    subject.method.synchronize_replicas(subject)
    return float(subject.scaler.get_scale())


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main()
    assert not dist.is_initialized()
