"""A login environment that cannot build the model: the first job does, and the search is settled from what it tells."""

import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula

from tula_cli.cluster.slurm import first_job
from tula_cli.run.records.probes import Measured

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def without_torch(tula: Tula, tmp_path: Path) -> tuple[str, ...]:
    """Take torch from the login environment; return the setting that names an interpreter that runs on nodes alone."""
    hidden = tmp_path / "login"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    tula.environment["PYTHONPATH"] = f"{hidden}:{ROOT}"
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ -n "$SLURM_JOB_ID" ] || { echo "no such module here" >&2; exit 127; }\n'
        f'PYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return ("--set", f"cluster.python={python}")


@pytest.mark.proof
def test_a_login_without_torch_takes_a_job_to_its_end(
    tula: Tula, on_slurm: SlurmCluster, without_torch: tuple[str, ...]
) -> None:
    job = tula.folder / "job.yaml"
    job.write_text(job.read_text().replace("nodes: [1, 2]", "nodes: [1]"))
    checked = tula("check", "job.yaml", *without_torch)["data"]["report"]
    assert checked["inspection"] is None
    assert "no such module here" in checked["warnings"][0]
    assert "first job" in checked["warnings"][0]
    assert checked["unsettled"]["first_job_minutes"] == first_job.INSPECTION_JOB_MINUTES
    refused = tula("train", "job.yaml", "--nodes", "1", "--batch", "128", *without_torch, code=6)
    assert "run tula profile job.yaml" in refused["error"]["hint"]
    tula("profile", "job.yaml", "--wait", *without_torch)
    run = tula.run()
    measured = {(r.nodes, r.local_batch) for r in run.read_results() if isinstance(r, Measured)}
    assert measured == {(1, 64), (1, 128)}
    assert 0 < first_job.count_node_hours(run) < 0.1
    checked = tula("check", "job.yaml", *without_torch)["data"]["report"]
    sizes = {result.dataset_size for result in run.read_results() if isinstance(result, Measured)}
    assert {checked["inspection"]["dataset_size"]} == sizes, "what the first job told is known here from now on"
    assert tula("recommend", "--objective", "time")["data"]["choice"]["nodes"] == 1
    summary = tula("train", "--nodes", "1", "--batch", "128", "--set", "train.epochs=1", "--wait")["data"]
    assert summary["attempts"] == 1


def test_without_an_interpreter_of_its_own_the_missing_package_and_the_line_to_type_are_reported(
    tula: Tula, on_slurm: SlurmCluster, without_torch: tuple[str, ...]
) -> None:
    answer = tula("profile", "job.yaml", "--wait", code=6)
    assert "No module named 'torch'" in answer["error"]["message"]
    assert "pip install 'tula-cli[torch]'" in answer["error"]["hint"]
