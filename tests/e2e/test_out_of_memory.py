"""One rank of two runs out of memory again and again: no hang, and every sample is trained once an epoch."""

import random
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.e2e, pytest.mark.torch]
DIGITS = 1437  # training samples
EPOCHS = 3
MODEL = """
import hashlib, os, torch

class Greedy(torch.nn.Module):
    '''Allocates more than there is on one of two ranks, at a moment that the size of what it takes decides.'''

    def __init__(self, num_classes=10, fits=1, salt=0):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes)
        self.fits, self.salt, self.calls = fits, salt, 0

    def forward(self, x):
        if self.training and len(x) > self.fits:
            moment = int(hashlib.sha256(f"{self.salt} {len(x)}".encode()).hexdigest(), 16)
            self.calls += 1
            if self.calls > moment // 2 % 20 and os.environ.get("RANK") == str(moment % 2):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
        return self.layer(x.flatten(1))
"""
SETTINGS = {
    "train.method": "lbt",
    "train.checkpoint_every": "1e-9",
    "train.max_attempts": "1",
    "train.epochs": str(EPOCHS),
}


def trained(tula, *, batch: int, fits: int, salt: int, **settings: str) -> dict:
    """Train on two ranks until everything fits; return the summary, with the end's micro-batches and its checkpoint."""
    (tula.folder / "greedy.py").write_text(MODEL)
    model = f"model={{name: 'greedy:Greedy', args: {{fits: {fits}, salt: {salt}}}}}"
    messages = [word for name, value in {**SETTINGS, **settings}.items() for word in ("--set", f"{name}={value}")]
    answer = tula("train", "job.yaml", "--nodes", "2", "--batch", str(batch), "--set", model, *messages)
    summary = answer["data"]
    training = tula.run().get_training(summary["signature"])
    result, rows = training.read_result(), training.read_metrics()
    assert result is not None
    assert (result.batch, result.samples) == (batch, EPOCHS * (DIGITS // batch) * batch)
    assert result.steps == EPOCHS * (DIGITS // batch), "no step is lost, and none is made twice"
    steps = [row["samples"] for row in rows if row["kind"] == "start"]
    assert steps == sorted(steps)
    return {
        **summary,
        "last": training.path / "last",
        "sizes": [r["micro_batch"] for r in rows if r["kind"] == "start"],
    }


def furthest(one: Path, other: Path) -> float:
    """Return the largest difference of two checkpoints' weights."""
    first, second = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.proof  # test_main_job has a training that is out of memory twice, and goes on at the next smaller batch
def test_a_rank_that_is_out_of_memory_three_times_loses_nothing(tula) -> None:
    result = trained(tula, batch=64, fits=4, salt=1)
    assert result["sizes"] == [32, 16, 8, 4] and result["attempts"] == 4
    assert result["causes"] == [
        f"out of memory at batch 64: each rank now computes a step in {parts} micro-batches of {32 // parts}"
        for parts in (2, 4, 8)
    ]
    assert len(tula.run().read_jobs()) == tula.run().read_jobs()[0].submissions == 1


@pytest.mark.proof
def test_fifteen_times_out_of_memory_end_with_the_weights_of_an_undisturbed_training(tula, request) -> None:
    salts = random.Random(request.config.getoption("--hypothesis-seed") or 0)
    times = 0
    for seed in range(3):
        settings = {"train.seed": str(seed)}
        result = trained(tula, batch=64, fits=1, salt=salts.randrange(10**9), **settings)
        assert result["sizes"] == [32, 16, 8, 4, 2, 1]
        times += result["attempts"] - 1
        whole = trained(tula, batch=64, fits=32, salt=0, **settings)
        assert whole["attempts"] == 1
        assert furthest(result["last"], whole["last"]) < 1e-4
    assert times == 15
