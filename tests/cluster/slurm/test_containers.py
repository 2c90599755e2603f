"""The example jobs in containers run, with stand-ins for apptainer and for pyxis' srun on PATH."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "containers"
pytestmark = [pytest.mark.torch, pytest.mark.e2e]

PASS_ON = """#!/bin/sh
# Writes down how it was called, and runs the command with INSIDE set, as a container hands its environment on.
echo "{name} $*" >> {calls}
while [ "${{1#-}}" != "$1" ] || [ "$1" = exec ]; do
    case "$1" in --output | --error | --bind) shift 2 ;; *) shift ;; esac
done
{skip_image}
INSIDE={name} exec "$@"
"""
SET = (
    "cluster.device=cpu",
    "cluster.gpus_per_node=1",
    "search.nodes=[1]",
    "search.max_batch=32",
    "search.min_steps=5",
    "search.min_seconds=0",
    "search.max_seconds=0.001",
    "model.args.width=8",
    "train.workers=0",
)


class Site:
    """A folder with a job, and a SLURM whose srun runs its command here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.slurm = FakeSlurm(folder / "slurm")
        self.programs = self.slurm.folder / "bin"
        self.write("srun", PASS_ON.format(name="srun", calls=self.calls, skip_image=""))
        self.write("apptainer", PASS_ON.format(name="apptainer", calls=self.calls, skip_image="shift"))
        self.write("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        self.write("module", "#!/bin/sh\n")
        self.environment = {
            **os.environ,
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "FAKE_SLURM": str(self.slurm.folder),
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def write(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def tula(self, *words: str) -> Any:
        """Return the answer of a command."""
        done = subprocess.run(
            [sys.executable, "-m", "tula_cli", *words, "--json"],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["data"]

    def run_job(self, id_: str) -> None:
        """Run the script of a submitted job as task 0 of 1."""
        task = {
            "JOB_ID": id_, "JOBID": id_, "JOB_NUM_NODES": "1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0",
            "JOB_NODELIST": "n1", "NODELIST": "n1", "SUBMIT_DIR": str(self.folder),
        }  # fmt: skip
        self.slurm.set(id_, "RUNNING", node_list="n1")
        done = subprocess.run(
            ["bash", "-c", self.slurm.script(id_)],
            cwd=self.folder, env=self.environment | {f"SLURM_{name}": value for name, value in task.items()},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        logs = "".join(path.read_text() for path in self.folder.glob("tula-runs/*/submitit/*_log.*"))
        assert done.returncode == 0, done.stderr + logs
        self.slurm.set(id_, "COMPLETED", node_list="n1", accounted="COMPLETED")


PYXIS = ["srun ", " --container-image=/project/images/tula.sqsh --container-mounts=/project:/project ", " python -"]


@pytest.mark.parametrize(
    ("example", "calls"),
    [
        ("apptainer", ["srun ", "apptainer exec --nv --bind /project tula.sif python -"]),
        pytest.param("pyxis", PYXIS, marks=pytest.mark.proof),
    ],
)
def test_the_example_measures_in_a_container(example: str, calls: list[str], tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "job.yaml").write_text((EXAMPLES / f"{example}.yaml").read_text())
    changes = [word for change in SET for word in ("--set", change)]
    site.tula("profile", "job.yaml", "--yes", "--no-wait", *changes)
    site.calls.unlink(missing_ok=True)
    (job,) = site.slurm.jobs()
    site.run_job(str(job["id"]))
    called = site.calls.read_text()
    assert all(words in called for words in calls), called
    status = site.tula("status")
    assert (status["measured"], status["failed"]) == (1, 0)


def test_the_recipe_installs_a_wheel_and_tests_the_image() -> None:
    recipe = (EXAMPLES / "tula.def").read_text()
    sections = {line[1:] for line in recipe.splitlines() if line.startswith("%")}
    assert sections == {"files", "post", "test"} and recipe.count("Bootstrap: docker\nFrom: ") == 1
