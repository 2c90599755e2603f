"""The paper's four jobs: each model runs a real probe, on made-up images of its dataset's size."""

import time
from pathlib import Path

import pytest
from worker_jobs import probe_task

from tula_cli.records import Measured
from tula_cli.rundir import RunDir
from tula_cli.spec import Cluster, Dataset, load_spec
from tula_cli.worker.data import build_datasets
from tula_cli.worker.probe import run_probes
from tula_cli.worker.ranks import Ranks

CONFIGS = Path(__file__).parent.parent.parent / "configs"


@pytest.mark.parametrize(
    ("name", "pixels", "classes", "parameters"),
    [
        ("resnet50_imagenet", 256, 1000, 25_557_032),
        ("vgg11_cifar100", 32, 100, 129_176_036),
        ("alexnet_caltech101", 256, 101, 57_417_637),
        ("mobilenetv3_caltech256", 256, 257, 4_531_249),
    ],
)
def test_a_job_of_the_paper_runs_a_probe(
    alone: Ranks, run: RunDir, name: str, pixels: int, classes: int, parameters: int
) -> None:
    job = load_spec(CONFIGS / f"{name}.yaml", environ={}, site_files=())
    images = {"size": 8, "image_size": [3, pixels, pixels], "num_classes": classes}
    tiny = job.model_copy(
        update={
            "dataset": Dataset(name="FakeData", args=images),
            "cluster": Cluster(device="cpu"),
            "train": job.train.model_copy(update={"workers": 0}),
            "search": job.search.model_copy(update={"nodes": [1], "steps": 5, "warmup_steps": 2}),
        }
    )
    task = probe_task(tiny, 2)
    run_probes(task, run, alone, build_datasets(tiny), started_at=time.time())
    (found,) = run.results()
    assert isinstance(found, Measured)
    assert len(found.step_times) == 5
    assert found.memory.gradients == 4 * parameters
    assert found.memory.optimizer >= found.memory.gradients, "SGD's momentum"
    assert found.memory.activations > 0
