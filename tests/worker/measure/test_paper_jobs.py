"""The paper's four jobs: each runs a real probe on made-up images of its dataset's size.

With a small network here, so that what is shown is that the job's settings work together; with its own, which takes
long, in `make proof`. That each job's network is the paper's is shown in test_inspect.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from worker_jobs import SHORTEST_PROBES, make_probe_task

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.spec.load import load_spec
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import Dataset, Model
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.ranks import Ranks

CONFIGS = Path(__file__).parents[3] / "configs"


JOBS = {  # pixels, classes, parameters
    "resnet50_imagenet": (256, 1000, 25_557_032),
    "vgg11_cifar100": (32, 100, 129_176_036),
    "alexnet_caltech101": (256, 101, 57_417_637),
    "mobilenetv3_caltech256": (256, 257, 4_531_249),
}
SHORT = ("vgg11_cifar100", "alexnet_caltech101")
"""The jobs of `make test`."""


def probed(ranks: Ranks, run: RunDir, name: str, **changes: Any) -> Measured:
    """Return what a probe of two images measures of a job, on a CPU and with made-up images."""
    job = load_spec(CONFIGS / f"{name}.yaml", environ={}, site_files=())
    pixels, classes, _ = JOBS[name]
    images = {"size": 8, "image_size": [3, pixels, pixels], "num_classes": classes}
    tiny = job.model_copy(
        update={
            "dataset": Dataset(name="FakeData", args=images),
            "cluster": Cluster(device="cpu"),
            "train": job.train.model_copy(update={"workers": 0}),
            "search": job.search.model_copy(update={"nodes": [1], **SHORTEST_PROBES}),
            **changes,
        }
    )
    run_probes(make_probe_task(tiny, 2), run, ranks, build_datasets(tiny), started_at=time.time())
    (result,) = run.read_results()
    assert isinstance(result, Measured)
    assert len(result.step_times) == 5
    assert result.memory.optimizer >= result.memory.gradients, "SGD's momentum"
    return result


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.proof) for name in JOBS]
)
def test_a_job_of_the_paper_runs_a_probe(alone: Ranks, run: RunDir, name: str) -> None:
    result = probed(alone, run, name, model=Model(name="small_cnn", args={"width": 4}))
    assert result.memory.batch >= 2 * 3 * min(JOBS[name][0], 224) ** 2 * 4, "images of the network's size"


@pytest.mark.proof
@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_the_paper_runs_a_probe_with_its_own_network(alone: Ranks, run: RunDir, name: str) -> None:
    result = probed(alone, run, name)
    assert result.memory.gradients == 4 * JOBS[name][2]
    assert result.memory.activations > 0
