"""Runs steps of tula's trainer on constant tensors, without a data loader or copies."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from operations import run_representative_step

from tula_cli.run.records.tasks import ProbeTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Cluster
from tula_cli.worker import ranks as worker_ranks
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.device import configure_device, make_autocast_context
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Step, Trainer

NEVER_REFRESH_STEPS = 10**9
"""Steps until AGS refreshes on its own."""
SHORT_SEARCH = {"min_steps": 5, "min_seconds": 0, "max_seconds": 1e-6}
"""Settings of section search for probes whose times are not used."""
CARD_MODELS = {
    "resnet50": 224,
    "vgg11": 224,
    "alexnet": 224,
    "mobilenet_v3_large": 224,
}
"""Image sizes of the models of the memory stages."""


@contextmanager
def join_alone(device: str) -> Iterator[Ranks]:
    """Join a group of one rank, as a job on one GPU does."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    with (
        tempfile.TemporaryDirectory() as folder,
        worker_ranks.join_process_group(Cluster(device=device), rendezvous_file=Path(folder) / "handover") as me,  # type: ignore[arg-type]
    ):
        yield me


def make_job(
    network: str,
    *,
    image: int,
    batch: int,
    device: str,
    classes: int = 100,
    precision: str = "fp32",
    method: str = "lbt",
    **sections: Any,
) -> JobSpec:
    """Return a job on random images, with a dataset as large as the batch.

    Args:
        network: a model of torchvision, or of tula.
        image: side of the images.
        batch: global; the reference batch is a quarter of it, at most 128.
        device: "cuda" or "cpu".
        classes: outputs.
        precision: of train.precision.
        method: of train.method.
        sections: further settings, merged into the sections.
    """
    optimizer: dict[str, Any] = {"lr": 1e-4, "weight_decay": 5e-4}
    optimizer |= {"name": "Adam"} if method == "lamb" else {"momentum": 0.9}
    train = {"epochs": 20, "method": method, "precision": precision, "workers": 0}
    train["reference_batch"] = max(1, min(128, batch // 4))
    content: dict[str, Any] = {
        "name": "gpu",
        "model": {"name": network},
        "dataset": {
            "name": "FakeData",
            "args": {"size": max(64, batch), "image_size": [3, image, image], "num_classes": classes},
        },
        "optimizer": optimizer,
        "train": train,
        "search": {"nodes": [1], "min_batch": 1},
        "cluster": {"kind": "local", "device": device},
    }
    for name, values in sections.items():
        content[name] = {**content.get(name, {}), **values}
    return JobSpec.model_validate(content)


def build_trainer(spec: JobSpec, me: Ranks, *, batch: int) -> Trainer:
    """Return tula's trainer at a global batch; AGS refreshes only on request."""
    configure_device(spec.train, me.device)
    task = ProbeTask(id="t", job="t", spec=spec, workdir=".", nodes=1, local_batches=(batch // me.world,))
    trainer = worker_train_loop.build_trainer(task, me, build_datasets(spec), batch=batch, workers=0, refresh=False)
    if trainer.ags:
        trainer.ags.start_epoch(NEVER_REFRESH_STEPS)
    trainer.parallel.train()
    return trainer


@dataclass
class ConstantBatchTrainer:
    """A trainer and the constant micro-batch of its steps."""

    trainer: Trainer
    pair: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, spec: JobSpec, me: Ranks, *, batch: int) -> "ConstantBatchTrainer":
        """Build a trainer at a global batch with images of its dataset."""
        trainer = build_trainer(spec, me, batch=batch)
        arguments = spec.dataset.args
        generator = torch.Generator().manual_seed(me.rank)
        count, shape = trainer.micro_batch, tuple(arguments["image_size"])
        images = torch.empty(count, *shape, device=me.device)
        images.normal_()
        labels = torch.randint(arguments["num_classes"], (count,), generator=generator).to(me.device)
        return cls(trainer, (images, labels))

    def step(self) -> Step:
        """Run one optimizer step."""
        return worker_train_loop._train_step(self.trainer, itertools.repeat(self.pair), epoch_ends=False)

    def refresh(self) -> Step:
        """Run a step that also updates the AGS factors, if there are any."""
        if self.trainer.ags:
            self.trainer.ags.request_refresh()
        return self.step()

    def warm_up(self, steps: int = 3) -> None:
        """Run the first steps, which differ from later ones (with fp16 there may be more of them), and wait for the device."""
        self.step()
        self.refresh()
        run_representative_step(self.trainer, self.step)
        for _ in range(steps - 3):
            self.step()
        self.trainer.clock.wait_for_device()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Run the forward pass of an evaluation."""
        self.trainer.parallel.eval()
        with make_autocast_context(self.trainer.spec.train, self.trainer.ranks.device):
            self.trainer.parallel.module(self.pair[0])
        self.trainer.parallel.train()
