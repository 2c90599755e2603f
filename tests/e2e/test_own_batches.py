"""Jobs whose batches are no (image, class): from check to a trained model, as a user's own code."""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from driver import weights_differ

from tula_cli.worker.build.weights import read_weights

pytestmark = [pytest.mark.e2e, pytest.mark.torch]
HELPERS = Path(__file__).parents[1] / "helpers"
JOB: dict[str, Any] = {
    "name": "tokens",
    "model": {"name": "token_jobs:Classifier"},
    "dataset": {"name": "token_jobs:Sentences", "collate_fn": "token_jobs:padded", "args": {"size": 256}},
    "optimizer": {"name": "SGD", "lr": 0.3, "momentum": 0.9},
    "train": {"epochs": 6, "method": "ags", "reference_batch": 16, "workers": 0},
    "search": {
        "nodes": [1], "min_batch": 16, "max_batch": 32, "min_steps": 5, "min_seconds": 0, "max_seconds": 0.001,
 "max_node_hours": 5,
    },
    "cluster": {"device": "cpu"},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "own-loss": {"model": {"name": "token_jobs:WithLoss"}},
    "several-inputs": {"dataset": {"collate_fn": None, "args": {"form": "three", "even": True, "size": 256}}},
    "stream": {
        "model": {"name": "token_jobs:linear"},
        "dataset": {
            "name": "token_jobs:Stream",
            "collate_fn": None,
            "length": 256,
            "eval_length": 64,
            "args": {"size": 256},
        },
        "optimizer": {"lr": 1e-4},
        "train": {"workers": 1},
    },
    "transformer": {
        "model": {
            "name": "transformers:AutoModelForCausalLM",
            "args": {
                "model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256,
            },
        },
        "dataset": {"name": "python_source", "collate_fn": None, "args": {"length": 16, "size": 20000}},
        "optimizer": {"name": "AdamW", "lr": 1e-3, "momentum": None},
    },
}  # fmt: skip


def write(tula: Any, **changes: dict[str, Any]) -> None:
    sections = {key: {**JOB[key], **changes.get(key, {})} if isinstance(JOB[key], dict) else JOB[key] for key in JOB}
    (tula.folder / "job.yaml").write_text(yaml.safe_dump(sections))
    shutil.copy(HELPERS / "token_jobs.py", tula.folder)


def trained_anew_and_killed(tula: Any, command: Sequence[str], *, rank: int) -> None:
    """Forget what was trained, train it again, kill a rank with SIGKILL on the way, and go on to the end."""
    for name in ("train", "tasks", "jobs", "attempts", "failures"):
        shutil.rmtree(tula.run().path / name, ignore_errors=True)
    process = tula.start(*command, "--set", "train.checkpoint_every=1e-9")
    tula.wait_until(tula.epochs_done)
    os.kill(tula.ranks(tula.task())[rank], signal.SIGKILL)
    process.communicate(timeout=240)
    again = tula(*command)["data"]
    assert again["attempts"] == 2 and "killed by SIGKILL" in again["causes"][0]


@pytest.mark.proof
def test_sentences_of_different_lengths_from_check_to_a_trained_model(tula) -> None:
    write(tula)
    assert "Samples differ in shape" in str(tula("check", "job.yaml")["warnings"])
    tula("profile", "job.yaml")
    choice = tula("recommend")["data"]["choice"]
    summary = tula("train")["data"]
    assert summary["batch"] == choice["batch"] in (16, 32)
    result = tula.run().get_training(summary["signature"]).read_result()
    assert result is not None and result.samples == 6 * 256
    assert result.best_top1 > 60, "three classes"


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_from_check_to_a_training_that_is_killed(tula, kind: str) -> None:
    write(tula, **KINDS[kind], search={**JOB["search"], "nodes": [1, 2]})
    tula("check", "job.yaml")
    assert tula("check", "job.yaml", "--memory", "64GiB")["status"]
    tula("profile", "job.yaml")
    tula("recommend")
    command = ("train", "job.yaml", "--nodes", "2", "--batch", "32", "--set", "train.epochs=6")
    straight = tula(*command)["data"]
    run = tula.run()
    last = run.get_training(straight["signature"]).path / "last"
    whole = run.get_training(straight["signature"]).read_result()
    assert whole is not None and whole.samples > 6 * 192
    if kind == "transformer":
        assert "top1" not in straight["metrics"] and 1 < straight["metrics"]["perplexity"] < 256
        assert run.read_spec().ags.apply_to == "update"
    kept = tula.folder / "straight.pt"
    kept.write_bytes(last.read_bytes())
    trained_anew_and_killed(tula, command, rank=0)
    result = run.get_training(straight["signature"]).read_result()
    assert result is not None and result.samples == whole.samples
    assert not weights_differ(kept, last)


@pytest.mark.proof
def test_a_language_model_in_shares_from_check_to_a_training_that_is_killed(tula) -> None:
    kind = KINDS["transformer"]
    write(
        tula,
        **{**kind, "model": {**kind["model"], "args": {**kind["model"]["args"], "n_layer": 2}}},
        train={**JOB["train"], "epochs": 5, "parallel": "fsdp", "max_grad_norm": 1.0},
        search={**JOB["search"], "nodes": [1, 2]},
    )
    assert "2 blocks" in str(tula("check", "job.yaml")["data"])
    assert tula("check", "job.yaml", "--memory", "64GiB")["data"]["sharing"] == 2
    tula("profile", "job.yaml")
    tula("recommend")
    run = tula.run()
    alone, together = (
        run.read_result(f"probe-n{nodes:03d}-l{local_batch:06d}").memory for nodes, local_batch in ((1, 16), (2, 16))
    )
    assert together.parameters < 0.6 * alone.parameters and together.optimizer < 0.6 * alone.optimizer
    assert run.read_spec().ags.granularity == "tensor" and run.read_spec().ags.apply_to == "update"

    command = ("train", "job.yaml", "--nodes", "2", "--batch", "32")
    straight = tula(*command)["data"]
    last = run.get_training(straight["signature"]).path / "last"
    kept = read_weights(str(last.resolve()))
    trained_anew_and_killed(tula, command, rank=1)
    weights = read_weights(str(last.resolve()))
    assert weights.keys() == kept.keys() and all(torch.equal(weights[name], kept[name]) for name in kept)
