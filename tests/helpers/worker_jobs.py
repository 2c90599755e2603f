"""Small jobs for tests of the worker: a data set and models that train in milliseconds, and tasks of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Prediction, Stage
from tula_cli.run.records.tasks import ProbeTask, Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.sections import Workers
from tula_cli.spec.signature import compute_train_signature
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.preemption import Preempted, PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop

SHORTEST_PROBES = {"min_steps": 5, "min_seconds": 0, "max_seconds": 1e-6}
"""A search whose probes have 7 warm-up steps before 5 measured ones, independent of the time."""

SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {"name": "worker_jobs:net"},
    "dataset": {"name": "worker_jobs:Blobs"},
    "optimizer": {"lr": 0.1, "momentum": 0.9},
    "train": {"epochs": 2, "workers": 0, "method": "lbt", "reference_batch": 8, "seed": 3},
    "search": {"nodes": [1], "min_batch": 8, **SHORTEST_PROBES},
    "cluster": {"device": "cpu"},
}


def make_spec(**changes: dict[str, Any]) -> JobSpec:
    """Return a small spec; `changes` are merged into its sections."""
    return validate_job({**SPEC, **{k: {**SPEC.get(k, {}), **v} for k, v in changes.items()}}, source="test")


class LeavesAt(PreemptionHandler):
    """A handler that leaves at the n-th check."""

    def __init__(self, ranks: Ranks, calls: int) -> None:
        super().__init__(ranks, environ={})
        self.calls = calls

    def stop_if_requested(self, *, reserve: float) -> None:
        self.calls -= 1
        if not self.calls:
            raise Preempted("time_limit")


class Interrupted(Exception):
    """Raised by Blobs to end a training at a given sample."""


class Blobs(torch.utils.data.Dataset[Any]):
    """Images (1, 4, 4): the image of the class plus new noise, drawn as an augmentation is during training."""

    classes = ("a", "b", "c")

    def __init__(
        self,
        train: bool,
        transform: Any,
        size: int = 100,
        eval_size: int = 10,
        real: bool = False,  # regression targets
        ends_after: int | None = None,  # training samples before it raises Interrupted
    ) -> None:
        generator = torch.Generator().manual_seed(int(train))
        self.size, self.train = size if train else eval_size, train
        self.target = float if real else int
        self.left = ends_after if train else None
        self.labels = torch.randint(3, (self.size,), generator=generator).tolist()
        self.images = torch.randn(self.size, 1, 4, 4, generator=generator)
        self.means = torch.eye(3, 16).view(3, 1, 4, 4) * 4

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        if self.left == 0:
            raise Interrupted
        self.left = None if self.left is None else self.left - 1
        label = self.labels[index]
        image = self.images[index] + self.means[label]
        return (image + 0.1 * torch.randn(1, 4, 4) if self.train else image), self.target(label)


def net(num_classes: int = 3, dropout: float = 0.0, norm: bool = False, width: int = 8) -> nn.Module:
    """Return a network for Blobs, optionally with dropout or BatchNorm."""
    middle: list[nn.Module] = [nn.BatchNorm2d(width)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        *middle,
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(16 * width, num_classes),
    )


def convolutions(num_classes: int = 3) -> nn.Module:
    """Return a network with one convolution of each kind that an optimizer may treat separately: 3x3, depthwise, 1x1."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Conv2d(6, 6, 3, padding=1, groups=6),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 1),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def blocks(num_classes: int = 3) -> nn.Module:
    """Return a network of blocks that can be recomputed."""
    middle = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Sequential(*middle), nn.Linear(16, num_classes))


class WithUnused(nn.Module):
    """A network with an unused layer."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, num_classes), nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores (batch, classes)."""
        scores: torch.Tensor = self.used(images.flatten(1))
        return scores


def normed_blocks(num_classes: int = 3) -> nn.Module:
    """Return a network of two blocks with BatchNorm, which can be recomputed."""
    middle = [nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.BatchNorm2d(4)) for width in (1, 4)]
    return nn.Sequential(nn.Sequential(*middle), nn.Flatten(), nn.Linear(64, num_classes))


def wide(num_classes: int = 3, width: int = 50_000) -> nn.Module:
    """Return a network whose gradient reduction takes measurable time."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))


def deep(num_classes: int = 3, width: int = 4096, depth: int = 9) -> nn.Module:
    """Return a network with most of its memory in activations: 4 `width` bytes per sample and layer."""
    tanh = [nn.Tanh() for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), *tanh, nn.Linear(width, num_classes))


def square_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.flatten() - target).square().mean()


def two_rates(
    parameters: list[nn.Parameter], lr: float, momentum: float = 0.0, captured: bool = False
) -> torch.optim.Optimizer:
    """Return SGD that trains biases at twice the rate; `captured` has the rates as tensors."""
    rates = (torch.tensor(lr), torch.tensor(2 * lr)) if captured else (lr, 2 * lr)
    shapes = ([p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1])
    groups = [{"params": kept, "lr": rate} for kept, rate in zip(shapes, rates, strict=True)]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, foreach=False)


# --- the loop


def make_trainer(
    job: JobSpec, ranks: Ranks, *, batch: int = 16, workers: Workers = 0, datasets: Datasets | None = None
) -> worker_train_loop.Trainer:
    """Return a fresh trainer of a job."""
    task = make_train_task(job, batch=batch)
    return worker_train_loop.build_trainer(
        task, ranks, datasets or build_datasets(job), batch=batch, workers=workers, refresh=True
    )


def train_to_end(
    job: JobSpec, ranks: Ranks, **how: Any
) -> tuple[dict[str, torch.Tensor], list[worker_train_loop.Step]]:
    """Train a job to its end; return the final weights and the steps."""
    subject = make_trainer(job, ranks, **how)
    steps = list(worker_train_loop.run_steps(subject))
    return copy_weights(subject), steps


def copy_weights(subject: worker_train_loop.Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of parameters and buffers."""
    return {name: value.clone() for name, value in subject.parallel.module.state_dict().items()}


def load_final_weights(run: RunDir, task: TrainTask) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a training's last checkpoint."""
    state: dict[str, torch.Tensor] = torch.load(run.get_training(task.signature).path / "last", weights_only=True)[
        "model"
    ]
    return state


def copy_gradient(subject: worker_train_loop.Trainer) -> torch.Tensor:
    """Return a copy of the current gradient as one vector."""
    return torch.cat([p.grad.detach().double().flatten() for p in subject.parallel.parameters() if p.grad is not None])


def list_other_layouts(subject: worker_train_loop.Trainer) -> list[str]:
    """Return the tensors that belong to a parameter and have its shape but not its strides."""
    kept = [(p, name, value) for p, state in subject.base.state.items() for name, value in state.items()]
    if subject.ags is not None:
        kept += [(p, "factor", value) for p, value in getattr(subject.ags.factors, "_factor", {}).items()]
    return [
        f"{name} {tuple(p.shape)}: {value.stride()}, not {p.stride()}"
        for p, name, value in kept
        if isinstance(value, torch.Tensor) and value.shape == p.shape and value.stride() != p.stride()
    ]


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- tasks


def make_train_task(
    job: JobSpec, *, batch: int = 16, prediction: Prediction | None = None, signature: str | None = None
) -> TrainTask:
    """Return a training task; for a relaunch, `signature` is that of the first attempt."""
    name = signature or compute_train_signature(job, nodes=1, batch=batch)
    return TrainTask(
        id=f"train-{name}-1",
        job=f"train-{name}",
        spec=job,
        workdir=".",
        nodes=1,
        signature=name,
        attempt=1,
        ladder=(Rung(batch=batch, prediction=prediction),),
        workers=job.train.workers,
    )


def make_staged_task(
    *,
    method: str = "lrs",
    epochs: int = 8,
    measured: bool = True,
    ends_after: int | None = None,
) -> TrainTask:
    """Return a training of batch 32, in epochs of 100 samples, with stages planned by the gradient noise."""
    requested = {"diagnostics": ["gradient_noise"] if measured else []}
    settings = {"method": method, "ramp": "noise", "epochs": epochs, "checkpoint_every": 1e-9, **requested}
    model, dataset = {"args": {"norm": True, "dropout": 0.1}}, {"args": {"ends_after": ends_after}}
    begins = {8: 0, 16: 150, 32: 450}
    stages = [Stage(begin=begin, batch=batch, noise=2.5 * batch) for batch, begin in begins.items()]
    task = make_train_task(make_spec(model=model, dataset=dataset, optimizer={"lr": 0.003}, train=settings), batch=32)
    return task.model_copy(update={"stages": tuple(stages), "signature": f"{method:0<8.8}"})


def make_probe_task(job: JobSpec, *local_batches: int) -> ProbeTask:
    return ProbeTask(id="probe-n001", job="probe-n001", spec=job, workdir=".", nodes=1, local_batches=local_batches)


def make_prediction(*, step_time: float, low: float | None, high: float | None) -> Prediction:
    """Return a prediction of a step time; the worker does not use the other fields."""
    return Prediction(
        nodes=1, batch=16, local_batch=16, step_time=step_time, step_low=low, step_high=high, hours=1.0, hours_low=None,
        hours_high=None, cost=1.0, peak_memory=None, headroom=None, measured=True,
    )  # fmt: skip


def read_rows(run: RunDir, task: TrainTask, kind: str) -> Iterator[dict[str, Any]]:
    return (row for row in run.get_training(task.signature).read_metrics() if row["kind"] == kind)


def error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the share of wrong predictions of a batch, in percent."""
    return 100 * (outputs.argmax(1) != batch[1]).double().mean()


class Errors:
    """The share of wrong predictions as an object without support for ranks."""

    def reset(self) -> None:
        self.wrong, self.all = 0.0, 0

    def update(self, scores: torch.Tensor, target: torch.Tensor) -> None:
        self.wrong += float((scores.argmax(1) != target).sum())
        self.all += len(target)

    def compute(self) -> float:
        return 100 * self.wrong / self.all


class MergedErrors(Errors):
    """The share of wrong predictions as an object that merges the states of other ranks."""

    def reset(self) -> None:
        super().reset()
        self.device = "cpu"

    def to(self, device: torch.device | str) -> "MergedErrors":
        self.device = str(device)
        return self

    def merge_state(self, others: list["MergedErrors"]) -> None:
        assert self.device == "cpu"
        for other in others:
            self.wrong, self.all = self.wrong + other.wrong, self.all + other.all
