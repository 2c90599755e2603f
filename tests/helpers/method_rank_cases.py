"""What several ranks do, for test_methods_ranks: `python method_rank_cases.py FOLDER` in torchrun's environment.

Everything runs in one process group, one case after the other. What a rank finds is kept in FOLDER/<rank>.json.
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
    final_weights,
    otherwise_laid,
    rows,
    same,
    spec,
    staged,
    train_task,
    trained,
    trainer,
    weights,
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
        drift,
        synchronous,
        against_torch,
        resumed,
        relaunched,
        left,
        scales,
        aligned,
        layouts,
        free,
        free_again,
        grown,
        grown_by_noise,
    )
    with join_process_group(spec().cluster, handover=folder / "handover") as ranks:
        results = {case.__name__: case(folder, ranks) for case in cases}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))


def _agree(ranks: Ranks, tensors: Any) -> bool:
    """Return whether all ranks hold the same bits."""
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
    return len(set(ranks.gather(digest))) == 1


def _whole(subject: Trainer) -> list[torch.Tensor]:
    """Return all that a checkpoint holds."""
    momenta = [state["momentum_buffer"] for state in subject.base.state.values()]
    return [*subject.parallel.module.state_dict().values(), *momenta]


def aligned(folder: Path, ranks: Ranks) -> list[bool]:
    """Return after each step whether the replicas are equal, where rank 1 rounds otherwise in the third step."""
    subject = trainer(spec(train={"method": "ortho"}), ranks)
    assert isinstance(subject.optimizer, orthogonal.Ortho)
    result, before, orthogonal.BROADCAST_INTERVAL_STEPS = [], orthogonal.BROADCAST_INTERVAL_STEPS, 5
    for count, _ in enumerate(islice(worker_train_loop.run_steps(subject), 6), 1):
        result.append(_agree(ranks, subject.optimizer.matrices()))
        if count == 3 and ranks.rank == 1:
            with torch.no_grad():
                subject.optimizer.matrices()[0].mul_(1 + 1e-6)
    orthogonal.BROADCAST_INTERVAL_STEPS = before
    return result


LAYOUTS: dict[str, dict[str, Any]] = {
    "ags": {"train": {"method": "ags"}, "ags": {"delta": "inf", "b_small": 6, "refresh": {"every": 2}}},
    "ortho": {
        "train": {"method": "ortho"}
    },  # 12 steps, 3 of which align; more are chaotic: 36 tell layouts apart by 2e-3
    "polo": {"train": {"method": "polo", "epochs": 6}},
}


def layouts(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return how far channels_last is from the usual layout, and what of it has another layout than its parameter."""
    result, before, orthogonal.BROADCAST_INTERVAL_STEPS = {}, orthogonal.BROADCAST_INTERVAL_STEPS, 5
    for name, sections in LAYOUTS.items():
        usual, subject = (_with_layout(sections, ranks, channels_last=wanted) for wanted in (False, True))
        pairs = zip(subject.parallel.parameters(), usual.parallel.parameters(), strict=True)
        result[name] = {
            "off": max(float((first - other).abs().max()) for first, other in pairs),
            "turned": sum(not p.is_contiguous() for p in subject.parallel.parameters()),
            "otherwise": otherwise_laid(subject),
            "agree": _agree(ranks, subject.parallel.parameters()),
        }
    orthogonal.BROADCAST_INTERVAL_STEPS = before
    return result


def _with_layout(sections: dict[str, Any], ranks: Ranks, *, channels_last: bool) -> worker_train_loop.Trainer:
    train = {"epochs": 2, **sections["train"]}
    job = spec(**{**sections, "model": {"name": "worker_jobs:convolutions"}, "train": train})
    with mock.patch.object(worker_train_loop, "should_use_channels_last", return_value=channels_last):
        subject = trainer(job, ranks)
    list(worker_train_loop.run_steps(subject))
    return subject


def free(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return what method schedule_free comes to without BatchNorm, and with it whether its statistics are right.

    "by_hand" is the largest difference from the means over all ranks at the averaged weights; "agree" tells whether all
    ranks hold the same model after the evaluation.
    """
    plain = trainer(spec(**FREE), ranks)
    list(worker_train_loop.run_steps(plain))
    subject = trainer(spec(**FREE, **NORM, dataset={"args": {"size": 640}}), ranks)
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
        "agree": _agree(ranks, subject.parallel.module.state_dict().values()),
    }


def free_again(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Break method schedule_free off in its second epoch, go on, and return how far it is from a run without a break."""
    job, run, other = spec(**FREE, **NORM), RunDir(folder / "free"), RunDir(folder / "free-unbroken")
    task = train_task(job)
    _broken_off(job, run, ranks, after=96 + 64)
    _train(task, run, ranks)
    _train(task, other, ranks)
    starts = [row["samples"] for row in rows(run, task, "start")]
    first, whole = final_weights(run, task), final_weights(other, task)
    return {"starts": starts, "off": max(float((first[name] - whole[name]).abs().max()) for name in whole)}


STAGES = [{"epochs": 0.5, "batch": 8}]
GROWN: dict[str, dict[str, Any]] = {
    "ramp": {"train": {"method": "ramp"}},
    "robust": {"train": {"method": "ags"}, "ags": {"preset": "robust"}},
    # it changes between two averages, each rank with weights of its own
    "polo": {"train": {"method": "polo", "epochs": 7, "ramp": [{"epochs": 5.4, "batch": 8}]}},
}


def of_grown(name: str) -> JobSpec:
    """Return a job whose batch grows in its first epoch; two ranks leave the same samples to a step as four."""
    settings = {"ramp": STAGES, "epochs": 2, "reference_batch": 4, "checkpoint_every": 1e-9}
    return spec(**{**GROWN[name], "train": {**settings, **GROWN[name]["train"]}})


def grown(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Break trainings whose batch grows off around that, go on, and return how far they are from ones without a break."""
    results = {}
    for number, name in enumerate(GROWN):
        run, other = RunDir(folder / f"grown-{name}"), RunDir(folder / f"grown-{name}-unbroken")
        # before, at and after the change
        after = 40 + 8 * number if name != "polo" else 5 * 96 + 56
        task = _broken_off(of_grown(name), run, ranks, after=after)
        _train(task, run, ranks)
        _train(task, other, ranks)
        first, whole = final_weights(run, task), final_weights(other, task)
        results[name] = {
            "starts": len(list(rows(run, task, "start"))),
            "off": max(float((first[key] - whole[key]).abs().max()) for key in whole),
            "weights": torch.cat([value.flatten() for value in whole.values()]).tolist(),
        }
    return results


def grown_by_noise(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Break a training with stages by noise off, go on, and return its batches and how far it is from one without a break."""
    task, ends = staged(), []
    for name, breaks in (("noise", (130, 500)), ("noise-unbroken", ())):
        run = RunDir(folder / name)
        for after in breaks:
            _ended(task.model_copy(update={"spec": staged(ends_after=after // ranks.world).spec}), run, ranks)
        _train(task, run, ranks)
        ends.append((final_weights(run, task), [row["batch"] for row in rows(run, task, "epoch")]))
    (first, batches), (whole, without) = ends
    off = max(float((first[key] - whole[key]).abs().max()) for key in whole)
    return {"off": off, "same": batches == without, "batches": batches}


def drift(folder: Path, ranks: Ranks) -> dict[str, list[bool]]:
    """Return after each step whether the parameters are equal, and whether everything is.

    "kept" tells whether the next step begins with the running statistics that this one has left on this rank.
    """
    subject = trainer(spec(**POLO, **NORM), ranks)
    norm = next(module for module in subject.parallel.modules() if isinstance(module, nn.BatchNorm2d))
    entered: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda module, _: entered.append(module.running_mean.clone()))
    parameters, everything, after = [], [], []
    for _ in worker_train_loop.run_steps(subject):
        parameters.append(_agree(ranks, subject.parallel.parameters()))
        everything.append(_agree(ranks, _whole(subject)))
        after.append(norm.running_mean.clone())
    kept = [torch.equal(first, other) for first, other in zip(after[:-1], entered[1:], strict=True)]
    return {"parameters": parameters, "everything": everything, "kept": kept}


def synchronous(folder: Path, ranks: Ranks) -> bool:
    """Return whether the first five epochs are those of the large batch with the same warm-up, bit for bit."""
    ends = []
    for job in (
        spec(**POLO, **NORM, schedule={"warmup_epochs": 5}),
        spec(**NORM, train={"method": "lbt", "epochs": 7}, schedule={"warmup_epochs": 5}),
    ):
        subject = trainer(job, ranks)
        for _ in islice(worker_train_loop.run_steps(subject), 30):
            pass
        ends.append(weights(subject))
    return same(*ends)


def against_torch(folder: Path, ranks: Ranks) -> float:
    """Return how far the parameters are from those of torch's own post-local SGD, which averages nothing else."""
    job = spec(**POLO, dataset={"args": {"size": 128}}, optimizer={"momentum": None, "lr": 0.05})
    ours, _ = trained(job, ranks)
    data = build_datasets(job)
    torch.manual_seed(compute_stable_seed(job.train.seed))
    ddp = DistributedDataParallel(zoo.build_model(job, 3))
    switch = 5 * 8  # steps
    ddp.register_comm_hook(
        PostLocalSGDState(None, None, start_localSGD_iter=switch, post_local_gradient_allreduce=False),
        post_localSGD_hook,
    )
    averager = PeriodicModelAverager(period=2, warmup_steps=switch)
    averager.step = (
        1  # it averages first after the step that switches; here that is one step earlier, which changes nothing
    )
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


def _broken_off(job: JobSpec, run: RunDir, ranks: Ranks, *, after: int) -> TrainTask:
    """Train until a rank has loaded so many samples; return the task that goes on."""
    task = train_task(job)
    dataset = job.dataset.model_copy(update={"args": {"ends_after": after // ranks.world}})
    ending = job.model_copy(update={"dataset": dataset})
    _ended(train_task(ending, signature=task.signature), run, ranks)
    return task


def _ended(task: TrainTask, run: RunDir, ranks: Ranks) -> None:
    """Train to where its samples end."""
    try:
        _train(task, run, ranks)
    except Interrupted:
        ranks.broadcast(0)


def resumed(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Break off between two averages, go on, and compare with a run that was never broken off."""
    run, other = RunDir(folder / "resumed"), RunDir(folder / "unbroken")
    task = _broken_off(spec(**POLO, **NORM), run, ranks, after=5 * 96 + 64)
    _train(task, run, ranks)
    _train(task, other, ranks)
    starts = [row["samples"] for row in rows(run, task, "start")]
    return {"starts": starts, "same": same(final_weights(run, task), final_weights(other, task))}


def relaunched(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Go on at half the batch, as after an out-of-memory, behind the switch."""
    run = RunDir(folder / "relaunched")
    task = _broken_off(spec(**POLO, **NORM), run, ranks, after=5 * 96 + 64)
    smaller = train_task(task.spec, batch=8, signature=task.signature)
    _train(smaller, run, ranks)
    result = run.get_training(task.signature).read_result()
    assert result is not None
    return {"starts": [(row["samples"], row["batch"]) for row in rows(run, task, "start")], "epochs": result.epochs}


def left(folder: Path, ranks: Ranks) -> dict[str, bool]:
    """What leaving between two averages does before it saves."""
    subject = trainer(spec(**POLO, **NORM), ranks)
    for _ in islice(worker_train_loop.run_steps(subject), 31):
        pass
    before = _agree(ranks, _whole(subject)), subject.apart
    subject.method.synchronize_replicas(subject)
    return {"before": before[0], "apart": before[1], "after": _agree(ranks, _whole(subject)), "still": subject.apart}


def scales(folder: Path, ranks: Ranks) -> float:
    """Return the loss scale on this rank where each had found another."""
    subject = trainer(spec(train={**POLO["train"], "precision": "fp16"}), ranks)
    next(worker_train_loop.run_steps(subject))
    subject.scaler.update(2.0 ** (ranks.rank + 3))
    subject.apart = True
    subject.method.synchronize_replicas(subject)
    return float(subject.scaler.get_scale())


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main()
    assert not dist.is_initialized()
