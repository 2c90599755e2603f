"""The whole way: variables, sitecustomize, a launcher that starts the ranks, and an error that only they tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_ranks import SCRIPTS, SHIM, TIMEOUT_SECONDS

from tula_cli.run.records.scripts import ScriptFailure, ShimPlan

pytestmark = pytest.mark.torch


def launch(folder: Path, *command: object, **more: object) -> "subprocess.CompletedProcess[str]":
    plan = ShimPlan.model_validate(
        {"task": "probe", "folder": str(folder / "out"), "warmup": 2, "split_steps": 2} | more
    )
    (folder / "plan.json").write_text(plan.model_dump_json())
    environment = {"PYTHONPATH": f"{SHIM}:{folder}", "TULA_PLAN": str(folder / "plan.json"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


def test_an_error_on_one_rank_is_reported_by_that_rank_and_not_by_torchrun(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN'] = 'ran'\n")
    done = launch(tmp_path, *TORCHRUN, SCRIPTS / "plain_ddp.py", "--fail-on", 1, min_steps=30, max_steps=30)
    assert done.returncode == 1
    assert "ChildFailedError" in done.stderr
    failures = sorted((tmp_path / "out").glob("failure-*.json"))
    # Rank 0 may see that its peer is gone before torchrun ends it; rank 1 says why.
    assert tmp_path / "out/failure-1.json" in failures and not [f for f in failures if f.name[8:9] not in "01"]
    failure = ScriptFailure.model_validate_json((tmp_path / "out/failure-1.json").read_bytes())
    assert (failure.rank, failure.where, failure.error, failure.step) == (1, "script", "RuntimeError", 4)
    assert failure.text.endswith("RuntimeError: a sample is broken\n") and "plain_ddp.py" in failure.text
