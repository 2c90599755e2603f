"""Cases of two ranks with a sharded model: `python shared_rank_cases.py FOLDER` in torchrun's environment.

The results of a rank are in FOLDER/<rank>.json, whole weights in FOLDER/<case>.pt, and the runs in FOLDER/<case>.
"""

import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from worker_jobs import LeavesAt, make_probe_task, make_spec, make_train_task, make_trainer

from tula_cli.errors import CannotWrite
from tula_cli.run.directory import RunDir
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.weights import load_weights
from tula_cli.worker.build.zoo import build_model
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.parallel import sharded_checkpoint
from tula_cli.worker.ranks import Ranks, join_process_group
from tula_cli.worker.train import checkpoint, evaluation, gradient_noise
from tula_cli.worker.train import loop as worker_train_loop

BLOCKS = {"name": "worker_jobs:blocks"}
DATA = {"args": {"eval_size": 17}}  # with two ranks and batches of 8, rank 0 has two batches and rank 1 has one
KINDS: dict[str, dict[str, Any]] = {
    "momentum": {"train": {"max_grad_norm": 0.5, "accumulate": 2}},
    "adamw": {"optimizer": {"name": "AdamW", "momentum": None, "weight_decay": 0.1, "lr": 0.01}},
    "ags": {
        "train": {"method": "ags", "max_grad_norm": 5.0},
        "ags": {"granularity": "tensor", "delta": "inf", "b_small": 12, "parameters": ["*", "!biases"]},
    },
    "grown": {
        "train": {"method": "ags", "lr_scaling": "linear", "ramp": [{"epochs": 0.5, "batch": 8}]},
        "ags": {"granularity": "tensor", "delta": "inf", "b_small": 12},
    },
    "ortho": {
        "optimizer": {"name": "AdamW", "momentum": None, "weight_decay": 0.1, "lr": 0.01},
        "train": {"method": "ortho", "max_grad_norm": 0.5},
        "schedule": {"warmup_epochs": 0.5},
    },
    "ramp": {"train": {"method": "ramp", "max_grad_norm": None}},
    "clipped ramp": {"train": {"method": "ramp"}},
    "decay": {
        "optimizer": {"name": "AdamW", "momentum": None, "weight_decay": 0.1, "lr": 0.01},
        "train": {"method": "lbt", "ramp": "decay", "reference_batch": 4, "accumulate": 2},
        "schedule": {"kind": "cosine"},
    },
    "muon": {"optimizer": {"name": "Muon", "momentum": None, "lr": 0.01}},
    "recomputed": {"train": {"activation_checkpointing": True}},
    "frozen": {"model": {**BLOCKS, "frozen": ["1.0"]}},
}


def job(kind: str, parallel: str, **more: Any) -> JobSpec:
    """Return a job of two ranks."""
    changes = {"model": BLOCKS, "dataset": DATA, **KINDS[kind]}
    return make_spec(**{**changes, "train": {**changes.get("train", {}), "parallel": parallel, **more}})


TRAIN = make_train_task(job("ags", "fsdp", checkpoint_every=1e-9, epochs=3))


def main() -> None:
    folder = Path(sys.argv[1])
    with join_process_group(make_spec().cluster, rendezvous_file=folder / "handover") as ranks:
        cases = (
            compare_trainings,
            measure_shard_bytes,
            evaluate,
            start_from_weights,
            leave_and_resume,
            damage_checkpoint,
            save_without_access,
            save_statistics,
            compare_gradient_norms,
            run_probe_case,
        )
        results = {case.__name__: case(folder, ranks) for case in cases}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))


def gather_weights(subject: worker_train_loop.Trainer) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers, gathered from all ranks."""
    return {name: gather_tensor(value) for name, value in subject.parallel.module.state_dict().items()}


def gather_tensor(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def compare_trainings(folder: Path, ranks: Ranks) -> dict[str, list[float]]:
    """Train each kind of job replicated and sharded; return the largest differences of weights and of losses."""
    results = {}
    for kind in KINDS:
        ends, losses = [], []
        for parallel in ("ddp", "fsdp"):
            subject = make_trainer(job(kind, parallel), ranks)
            losses.append([float(step.loss) for step in worker_train_loop.run_steps(subject)])
            ends.append(gather_weights(subject))
            if kind == "ags":
                assert subject.ags is not None and subject.ags.report()["factors"]
                losses[-1].append(subject.ags.report()["mean"])
        assert ends[0].keys() == ends[1].keys()
        weights = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
        results[kind] = [weights, max(abs(a - b) for a, b in zip(*losses, strict=True))]
    return results


def measure_shard_bytes(folder: Path, ranks: Ranks) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on this rank, and those of the whole model."""
    subject = make_trainer(job("adamw", "fsdp"), ranks)
    subject.after_backward = lambda: result.update(
        gradients=sum(p.grad.to_local().nbytes for p in subject.parallel.parameters() if p.grad is not None)  # type: ignore[attr-defined]
    )
    result: dict[str, int] = {}
    list(islice(worker_train_loop.run_steps(subject), 1))
    subject.after_backward = None
    list(islice(worker_train_loop.run_steps(subject), 1))
    states = [v for state in subject.base.state.values() for v in state.values() if v.ndim]
    return result | {
        "parameters": sum(p.to_local().nbytes for p in subject.parallel.parameters()),  # type: ignore[attr-defined]
        "states": sum(value.to_local().nbytes for value in states),
        "whole": sum(p.numel() * 4 for p in subject.parallel.parameters()),
    }


def evaluate(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Evaluate with unequal numbers of batches on the ranks, and with no batch on one rank."""
    results = {}
    for size in (17, 1):
        for parallel in ("ddp", "fsdp"):
            changed = job("momentum", parallel).model_copy(
                update={"dataset": make_spec(dataset={"args": {"eval_size": size}}).dataset}
            )
            result = evaluation.Evaluator(make_trainer(changed, ranks)).evaluate()
            results[f"{size} {parallel}"] = {name: result.metrics[name] for name in ("loss", "top1")}
    return results


def start_from_weights(folder: Path, ranks: Ranks) -> float:
    """Start a sharded model from a file that only rank 0 can read; return the difference of the weights."""
    given = {name: torch.randn_like(value) for name, value in build_model(job("adamw", "ddp"), 3).state_dict().items()}
    path = folder / f"first-{ranks.rank}.pt"
    if ranks.is_first:
        torch.save(given, path)
    subject = make_trainer(job("adamw", "fsdp"), ranks)
    section = make_spec(model={**BLOCKS, "weights": str(path)}).model
    load_weights(section, subject.parallel.module, first=ranks.is_first)
    mine, theirs = gather_weights(subject), [given]
    dist.broadcast_object_list(theirs, src=0)
    return max(float((mine[name] - theirs[0][name]).abs().max()) for name in mine)


def leave_and_resume(folder: Path, ranks: Ranks) -> list[str]:
    """Train with an interruption, resume, and store the whole weights of both runs and of the checkpoint between."""
    for name, leaves in (("through", 10**9), ("broken", 4)):
        run, data = RunDir(folder / name), build_datasets(TRAIN.spec)
        run_training(TRAIN, run, ranks, data, preemption=LeavesAt(ranks, leaves))
        if name == "broken":
            between = sorted(path.name for path in run.get_training(TRAIN.signature).list_checkpoints())
            run_training(TRAIN, run, ranks, data, preemption=LeavesAt(ranks, 10**9))
        subject = make_trainer(TRAIN.spec, ranks)
        result = checkpoint.load_newest_checkpoint_on_all_ranks(run, TRAIN.signature, ranks)
        assert result is not None
        checkpoint.restore_checkpoint(subject, result)
        state = gather_weights(subject)
        if ranks.is_first:
            torch.save(state, folder / f"{name}.pt")
    return between


def damage_checkpoint(folder: Path, ranks: Ranks) -> list[Any]:
    """Damage the newest checkpoint; return the names of the checkpoint that is found then and of the one before it."""
    run = RunDir(folder / "through")
    newest, before = run.get_training(TRAIN.signature).list_checkpoints()[:2]
    if ranks.is_first:
        share = next(iter(sorted(newest.glob("*.distcp"))))
        content = bytearray(share.read_bytes())
        content[len(content) // 2] ^= 1
        share.write_bytes(content)
    ranks.broadcast(0)
    message: list[str] = []
    result = checkpoint.load_newest_checkpoint_on_all_ranks(run, TRAIN.signature, ranks, message.append)
    words = f"the checkpoint {newest.name} ({int(newest.stem)} samples) is damaged, skipped and kept as checkpoints/damaged-{newest.name}"
    assert message == ([words] if ranks.is_first else [])
    return [result and result["folder"].name, before.name]


def save_without_access(folder: Path, ranks: Ranks) -> list[str]:
    """Save if rank 0 cannot create the folder, and if it cannot move a finished one; return the errors of this rank."""
    subject, result = make_trainer(job("adamw", "fsdp"), ranks), []
    file, taken = folder / "a-file", folder / "refused" / "1.dcp"
    if ranks.is_first:
        file.touch()
        taken.mkdir(parents=True)
        (taken.parent / ".1.dcp.old").touch()
    ranks.broadcast(0)
    for path in (file / "0.dcp", taken):
        try:
            checkpoint.write_sharded_checkpoint(path, subject, best={})
        except CannotWrite as error:
            result.append(str(error).splitlines()[0])
    return result


def save_statistics(folder: Path, ranks: Ranks) -> list[float]:
    """Save a sharded model whose buffers differ by rank; return the values that are read again."""
    subject = make_trainer(job("momentum", "fsdp"), ranks)
    model, path = subject.parallel.module, folder / "statistics" / "1.dcp"
    for name in ("mean", "variance", "more"):
        model.register_buffer(name, torch.full((4,), float(ranks.rank)))
    checkpoint.write_sharded_checkpoint(path, subject, best={})
    for buffer in model.buffers():
        buffer.fill_(-1)
    sharded_checkpoint.load_sharded_checkpoint(path, model, subject.base)
    return [float(value) for buffer in model.buffers() for value in buffer]


def compare_gradient_norms(folder: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the gradient norms of a replicated and of a sharded model."""
    kinds = ("ddp", "fsdp")
    return [
        gradient_noise.measure_gradient_noise(make_trainer(job("momentum", kind), ranks), batches=8)["stats"]
        for kind in kinds
    ]


def run_probe_case(folder: Path, ranks: Ranks) -> None:
    probe_job = job("momentum", "fsdp")
    run_probes(
        make_probe_task(probe_job, 8),
        RunDir(folder / "probed"),
        ranks,
        build_datasets(probe_job),
        started_at=time.time(),
    )


if __name__ == "__main__":
    main()
