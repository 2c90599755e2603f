"""Cases of two ranks for test_two_ranks and test_meter: `python worker_rank_cases.py FOLDER` in torchrun's environment.

All cases run in one process group, one after the other. The results of a rank are in FOLDER/<rank>.json, weights in
FOLDER/<rank>.pt, and the runs in FOLDER/<case>.
"""

import json
import sys
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from worker_jobs import (
    are_equal,
    copy_gradient,
    copy_weights,
    make_probe_task,
    make_spec,
    make_train_task,
    make_trainer,
    train_to_end,
)

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.spec.job import JobSpec
from tula_cli.worker import device
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.weights import load_weights
from tula_cli.worker.build.zoo import build_model
from tula_cli.worker.device import lift_memory_limit, limit_memory
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.probe import GradientNormRecorder, StepBlocks, run_probes
from tula_cli.worker.preemption import Preempted, PreemptionHandler
from tula_cli.worker.ranks import Ranks, join_process_group
from tula_cli.worker.train import auto_tune, checkpoint, evaluation, hessian
from tula_cli.worker.train import loop as worker_train_loop

TRAIN = make_train_task(make_spec(train={"checkpoint_every": 1e-9, "epochs": 3, "method": "ags"}, ags={"delta": "inf"}))
ARMS = [{"name": "x2", "lr_factor": 2.0}, {"name": "robust", "method": "ags"}]
TUNED = make_train_task(
    make_spec(
        train={"method": "auto", "epochs": 3},
        model={"args": {"norm": True}},
        ags={"preset": "robust"},
        auto={"arms": ARMS, "branch_epochs": 1},
    )
)
NETWORK = {"model": {"args": {"dropout": 0.3, "norm": True}}}
AGS = {"train": {"method": "ags", "accumulate": 2}, "ags": {"delta": "inf", "b_small": 5}}
DEEP = {"model": {"name": "worker_jobs:deep"}, "dataset": {"args": {"size": 128, "eval_size": 8}}}
METRICS = {
    "error": "worker_jobs:error",
    "gathers": "worker_jobs:Errors",
    "merges": "worker_jobs:MergedErrors",
    "torchmetrics": "synchronised_metric:Errors",
}
MEASURED = {"dataset": {"args": {"eval_size": 37}}, "train": {"metrics": METRICS}}
WIDE = {"model": {"name": "worker_jobs:wide"}}


def main() -> None:
    folder, job = Path(sys.argv[1]), make_spec()
    with join_process_group(job.cluster, rendezvous_file=Path(sys.argv[1]) / "handover") as ranks:
        results = {
            case.__name__: case(folder, ranks)
            for case in (
                train_without_changes,
                resume,
                evaluate,
                record_norms,
                train_watched,
                end_windows,
                run_probe_cases,
                train_twice,
                train_self_tuned,
                leave_on_signal,
                list_bucket_storages,
                measure_curvature,
                start_from_weights,
            )
        }
    # last, because these cases fragment the heap, which would change the peaks of the probes
    results |= {case.__name__: case() for case in (measure_allocation_peaks, allocate_under_limit)}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))


def read_results(folder: Path, name: str) -> list[Any]:
    """Return the result of each rank in a case."""
    return [json.loads((folder / f"{rank}.json").read_text())[name] for rank in range(2)]


def leave_on_signal(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Send a preemption signal only to rank 1; return the number of checks before this rank left."""
    subject, requested = PreemptionHandler(ranks, environ={}), 0
    try:
        while requested < 10_000:
            requested += 1
            if ranks.rank == 1 and requested == 7:
                subject._handle_signal()
            time.sleep(0.001)
            subject.stop_if_requested(reserve=0.0)
    except Preempted as reason:
        return {"asked": requested, "reason": reason.reason}
    return {}


def start_from_weights(folder: Path, ranks: Ranks) -> bool:
    """Start from a file that only rank 0 can read; return whether this rank has its weights."""
    given = {name: torch.full_like(value, 0.5) for name, value in build_model(make_spec(), 3).state_dict().items()}
    model, path = build_model(make_spec(), 3), folder / f"first-{ranks.rank}.pt"
    if ranks.is_first:
        torch.save(given, path)
    load_weights(make_spec(model={"weights": str(path)}).model, model, first=ranks.is_first)
    return all(torch.equal(value, given[name]) for name, value in model.state_dict().items())


def list_bucket_storages(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the storages of ResNet18's gradients in bytes: during the reduction, and between micro-batches."""
    ddp = DistributedDataParallel(resnet18(num_classes=10), gradient_as_bucket_view=True)
    inputs, result, places = torch.rand(2, 3, 32, 32), {}, []

    def storages(name: str) -> None:
        gradients = [p.grad.untyped_storage() for p in ddp.parameters()]
        unique = {storage.data_ptr(): storage.nbytes() for storage in gradients}
        result[name] = list(unique.values())
        places.append(set(unique))

    for name in ("first", "reduced"):  # DDP rebuilds its buckets after the first step
        ddp.zero_grad()
        ddp(inputs).sum().backward()
        storages(name)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(inputs).sum().backward()
    storages("accumulated")
    ddp(inputs).sum().backward()
    storages("reduced again")
    _, before, apart, after = places
    return {**result, "kept": before == after and not before & apart}


def measure_curvature(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the curvature of the initial model; an odd number of samples is split unevenly over the ranks."""
    curvature = hessian.measure_curvature(make_trainer(make_spec(**NETWORK), ranks), samples=25)
    return vars(curvature) | {"seconds": 0.0}


# --- cases of single ranks


def measure_allocation_peaks() -> dict[str, int]:
    """Return the peaks of allocations."""
    memory, result = device.MemoryMeter(torch.device("cpu")), {}

    def peak(name: str) -> None:
        result[name], _ = memory.read_peak()
        memory.reset()

    memory.reset()
    kept = [_allocate(64)]
    peak("held")
    kept.clear()
    memory.reset()
    _allocate(64)
    _allocate(8)
    peak("freed")
    kept = [torch.ones(4096) for _ in range(4096)]
    peak("small")
    kept.clear()
    memory.reset()
    peak("nothing")
    kept = [torch.ones(4096) for _ in range(2048)]
    peak("small again")
    return result


def allocate_under_limit() -> dict[str, str]:
    """Return the outcomes of allocations under a limit of 64 MiB while the same amount is already allocated."""
    kept, result = [_allocate(64)], {}
    limit_memory(64 * 2**20)
    for _ in range(4):
        result["within, again and again"] = _describe_allocation(40)
    kept.append(_allocate(32))
    result["beyond"] = _describe_allocation(
        256
    )  # far beyond the limit: memory of earlier cases may be freed at any time
    lift_memory_limit()
    result["lifted"] = _describe_allocation(256)
    return result


def _describe_allocation(megabytes: int) -> str:
    try:
        _allocate(megabytes)
    except RuntimeError:
        return traceback.format_exc()
    return ""


def _allocate(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * 2**18)


# --- cases of both ranks


def train_without_changes(folder: Path, ranks: Ranks) -> list[float]:
    state, steps = train_to_end(make_spec(), ranks)
    torch.save(state, folder / f"{ranks.rank}.pt")
    return ranks.sum([float(step.loss) / ranks.world for step in steps])


def resume(folder: Path, ranks: Ranks) -> list[bool]:
    """Interrupt after some steps, and resume in a new trainer from the state saved by rank 0."""
    job, path, result = make_spec(**NETWORK, **AGS), folder / "resumed.pt", []
    whole = _with_rank_0_statistics(train_to_end(job, ranks)[0], folder, ranks)
    for after in (4, 6, 9):
        first = make_trainer(job, ranks)
        for _ in islice(worker_train_loop.run_steps(first), after):
            pass
        if ranks.is_first:
            checkpoint.write_checkpoint(path, checkpoint.make_checkpoint_state(first, best={}))
        ranks.broadcast(0)
        second = make_trainer(job, ranks)
        checkpoint.restore_checkpoint(second, torch.load(path, weights_only=True))
        for _ in worker_train_loop.run_steps(second):
            pass
        result.append(are_equal(_with_rank_0_statistics(copy_weights(second), folder, ranks), whole))
    return result


def _with_rank_0_statistics(state: dict[str, torch.Tensor], folder: Path, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the state with rank 0's running statistics, because those of other ranks are never used."""
    path = folder / "rank0.pt"
    if ranks.is_first:
        torch.save(state, path)
    ranks.broadcast(0)
    theirs: dict[str, torch.Tensor] = torch.load(path)
    ranks.broadcast(0)
    return {name: theirs[name] if "running" in name else value for name, value in state.items()}


def evaluate(folder: Path, ranks: Ranks) -> dict[str, Any]:
    subject = make_trainer(make_spec(**MEASURED), ranks)
    return vars(evaluation.Evaluator(subject).evaluate())


def record_norms(folder: Path, ranks: Ranks) -> list[list[Any]]:
    """Return the recorded norms of some gradients at the initial weights, and the same norms computed directly."""
    job = make_spec(train={"accumulate": 2}, model={"args": {"norm": True}})
    subject = make_trainer(job, ranks)
    subject.after_backward = lambda: None
    list(islice(worker_train_loop.run_steps(subject), 1))  # DDP has reduced the gradients already
    spy = GradientNormRecorder.attach(subject)
    list(spy.watch_steps(islice(worker_train_loop.run_steps(subject), 3), subject.scaler))
    list(islice(worker_train_loop.run_steps(subject), 1))  # not recorded
    plain, expected = make_trainer(job, ranks), []

    def look() -> None:
        value = copy_gradient(plain)
        (total,) = ranks.sum([float(value.square().sum())])
        mean = torch.tensor(ranks.sum(value.tolist())) / ranks.world
        expected.append((total / ranks.world, float(mean.square().sum())))

    plain.synchronise, plain.after_backward = False, look
    list(islice(worker_train_loop.run_steps(plain), 4))
    return [spy.gather_pairs(), expected[1:]]


def train_watched(folder: Path, ranks: Ranks) -> bool:
    """Return whether a watched training ends at the same weights as an unwatched one."""
    ends = []
    for watched in (True, False):
        subject = make_trainer(make_spec(**NETWORK), ranks)
        spy = GradientNormRecorder.attach(subject) if watched else None
        steps = islice(worker_train_loop.run_steps(subject), 5)
        list(spy.watch_steps(steps, subject.scaler) if spy else steps)
        ends.append(copy_weights(subject))
    return are_equal(*ends)


def end_windows(folder: Path, ranks: Ranks) -> list[int]:
    """Return the steps of two windows that the ranks would end at different steps by their own clocks."""
    subject, result = make_trainer(make_spec(), ranks), []
    for value in ((3, 9), (8, 2)):
        blocks = StepBlocks(subject, lambda times, most=value[ranks.rank]: min(2, most - len(times)))  # type: ignore[misc]
        blocks.run_blocks(worker_train_loop.run_steps(subject))
        result.append(len(blocks.steps))
    return result


def run_probe_cases(folder: Path, ranks: Ranks) -> None:
    for name, local_batches, job in (
        ("wide", (8,), make_spec(**WIDE)),
        ("deep", (16, 32), make_spec(**DEEP, **{**AGS, "train": {"method": "ags"}})),
        ("again", (16,), make_spec(**DEEP, **{**AGS, "train": {"method": "ags"}})),
    ):
        _probe(make_probe_task(job, *local_batches), RunDir(folder / name), ranks, job)


def _probe(task: ProbeTask, run: RunDir, ranks: Ranks, job: JobSpec) -> None:
    run_probes(task, run, ranks, build_datasets(job), started_at=time.time())


def train_twice(folder: Path, ranks: Ranks) -> None:
    """Train, lose the result and damage the newest checkpoint, and train again."""
    run, data = RunDir(folder / "train"), build_datasets(TRAIN.spec)
    run_training(TRAIN, run, ranks, data)
    run_training(TRAIN, run, ranks, data)
    if ranks.is_first:
        (run.get_training(TRAIN.signature).path / "result.json").unlink()
        run.get_training(TRAIN.signature).list_checkpoints()[0].write_bytes(b"damaged")
    ranks.broadcast(0)
    run_training(TRAIN, run, ranks, data)


def train_self_tuned(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Run a self-tuned training; return the choice of the rank, its position, and whether it has rank 0's final weights."""
    run, data = RunDir(folder / "tuned"), build_datasets(TUNED.spec)
    run_training(TUNED, run, ranks, data)
    choice = auto_tune.load_arm_choice(TUNED, run, ranks)
    assert choice is not None
    saved = torch.load(run.get_training(TUNED.signature).path / "last", weights_only=True)
    return {"arm": choice.arm.model_dump(mode="json"), "epoch": choice.epoch, "steps": saved["position"]["steps"]}


if __name__ == "__main__":
    main()
