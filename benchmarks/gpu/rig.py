"""The product's own trainer, fed with tensors that stay where they are: its steps, without a loader or a copy."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from operations import settle

from tula_cli.run.records.tasks import ProbeTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Cluster
from tula_cli.worker import ranks as worker_ranks
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.device import configure_device
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Step, Trainer

NEVER = 10**9
"""Steps until AGS refreshes by itself."""
SHORT = {"min_steps": 5, "min_seconds": 0, "max_seconds": 1e-6}
"""Settings of section search for probes whose times nobody looks at."""
CARD_MODELS = {
    "resnet50": 224,
    "vgg11": 224,
    "alexnet": 224,
    "mobilenet_v3_large": 224,
}
"""Side of the images of the models whose memory is judged."""


@contextmanager
def alone(device: str) -> Iterator[Ranks]:
    """Join a group of one rank, as a job on one GPU does."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    with (
        tempfile.TemporaryDirectory() as folder,
        worker_ranks.join_process_group(Cluster(device=device), handover=Path(folder) / "handover") as me,  # type: ignore[arg-type]
    ):
        yield me


def job(
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
    """Return a job on random images, of a dataset that is as large as the batch.

    Args:
        network: a model of torchvision, or of tula.
        image: side of the images.
        batch: global; the reference batch is a quarter of it, at most 128.
        device: "cuda" or "cpu".
        classes: outputs.
        precision: of train.precision.
        method: of train.method.
        sections: further settings, laid over the others section by section.
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


def build(spec: JobSpec, me: Ranks, *, batch: int) -> Trainer:
    """Return the product's trainer at a global batch; AGS refreshes when it is told to."""
    configure_device(spec.train, me.device)
    task = ProbeTask(id="t", job="t", spec=spec, workdir=".", nodes=1, local_batches=(batch // me.world,))
    trainer = worker_train_loop.build_trainer(task, me, build_datasets(spec), batch=batch, workers=0, refresh=False)
    if trainer.ags:
        trainer.ags.start_epoch(NEVER)
    trainer.parallel.train()
    return trainer


@dataclass
class Fixed:
    """A trainer and the micro-batch that each of its steps sees."""

    trainer: Trainer
    pair: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, spec: JobSpec, me: Ranks, *, batch: int) -> "Fixed":
        """Build a trainer at a global batch; the images are as its dataset says."""
        trainer = build(spec, me, batch=batch)
        arguments = spec.dataset.args
        generator = torch.Generator().manual_seed(me.rank)
        count, shape = trainer.micro_batch, tuple(arguments["image_size"])
        images = torch.empty(count, *shape, device=me.device)
        images.normal_()
        labels = torch.randint(arguments["num_classes"], (count,), generator=generator).to(me.device)
        return cls(trainer, (images, labels))

    def step(self) -> Step:
        """Take one optimizer step."""
        return worker_train_loop._train_step(self.trainer, itertools.repeat(self.pair), epoch_ends=False)

    def refresh(self) -> Step:
        """Take a step that also makes AGS's factors anew, where there are any."""
        if self.trainer.ags:
            self.trainer.ags.request_refresh()
        return self.step()

    def warm_up(self, steps: int = 3) -> None:
        """Take the steps that are unlike the others, of which fp16 may have more, and wait for them."""
        self.step()
        self.refresh()
        settle(self.trainer, self.step)
        for _ in range(steps - 3):
            self.step()
        self.trainer.clock.wait()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Take the forward pass of an evaluation."""
        self.trainer.parallel.eval()
        with worker_train_loop.make_autocast_context(self.trainer):
            self.trainer.parallel.module(self.pair[0])
        self.trainer.parallel.train()
