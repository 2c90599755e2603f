from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
OWN_LOOP = str(ROOT / "examples" / "own_loop.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
pytestmark = pytest.mark.torch


def run(*command: str, folder: Path | None = None, **environ: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environ
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("start", [(), pytest.param(TORCHRUN, marks=pytest.mark.proof)], ids=["alone", "torchrun"])
def test_own_loop_trains_with_ags(start: tuple[str, ...]) -> None:
    shown = run(*start, OWN_LOOP, "--preset", "robust", "--epochs", "10")
    accuracy, scaled = re.search(r"robust: ([\d.]+) %", shown), re.search(r"epoch 10: 100% .* by ([\d.]+)", shown)
    assert accuracy and scaled, shown
    assert float(accuracy[1]) > 70 and float(scaled[1]) > 1


@pytest.mark.parametrize(
    ("words", "world", "said"),
    [
        (("--batch", "0"), 1, "--batch 0: at least 1"),
        (("--small", "0"), 1, "--small 0: at least 1"),
        (("--epochs", "-1"), 1, "--epochs -1: at least 1"),
        (("--batch", "1409"), 1, "--batch 1409: there are only 1408 training images"),
        (("--batch", "129"), 2, "--batch 129: 2 processes cannot share it equally; take a multiple of 2"),
        (("--batch", "many"), 1, "invalid int value"),
    ],
)
def test_own_loop_refuses_words_that_mean_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], world: int, said: str
) -> None:
    module = runpy.run_path(OWN_LOOP)
    monkeypatch.setattr(sys, "argv", ["own_loop.py", *words])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as ended:
        module["main"]()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.proof
def test_own_loop_scales_nothing_where_the_batch_is_the_small_one() -> None:
    ways = [("--batch", "128", "--small", "128", "--epochs", "5", *way) for way in ((), ("--plain",))]
    ends = [re.findall(r"([\d.]+) % of", run(OWN_LOOP, *way)) for way in ways]
    assert ends[0] == ends[1] != []


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A copy of the example's folder, with little to train on."""
    folder = shutil.copytree(ROOT / "examples" / "own_model", tmp_path / "own_model")
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace("size: 2048", "size: 512"))
    return folder


@pytest.mark.proof  # its model and dataset are built by the next test
def test_own_model_trains_on_own_data(own_model: Path) -> None:
    words = ("train", "job.yaml", "--nodes", "1", "--batch", "32", "--yes", "--json", "--set", "train.epochs=5")
    answer = json.loads(run("-m", "tula_cli", *words, folder=own_model))["data"]
    assert answer["metrics"]["top1"] > 50, "one in four is chance"
    assert list(own_model.glob("tula-runs/stripes-*/code/**/model.py")), "what was submitted is kept"


def test_files_of_a_slurm_site_reach_the_script(own_model: Path, tmp_path: Path) -> None:
    """As a user's own files; a site's in /etc/tula are taken alike."""
    site = shutil.copytree(ROOT / "examples" / "slurm_site", tmp_path / ".config" / "tula")
    words = ("-m", "tula_cli", "profile", "job.yaml", "--dry-run", "--set", "cluster.device=auto")
    script = run(*words, folder=own_model, HOME=str(tmp_path), XDG_CONFIG_HOME=str(site.parent))
    requested = {"--partition=gpu", "--account=project", "--gres=gpu:a100:4", "--cpus-per-task=8", "--mail-type=FAIL"}
    assert requested <= set(re.findall(r"^#SBATCH (\S+)", script, re.MULTILINE))
    for line in ("module load cuda nccl", "export NCCL_DEBUG=WARN", 'export NCCL_IB_HCA="${cards[LOCAL_RANK]}"'):
        assert line in script
    assert "2 USD per GPU-hour" in script


@pytest.mark.parametrize("name", ["slurm-setup.sh", "slurm-wrapper.sh"])
def test_files_of_a_slurm_site_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "slurm_site" / name)], check=True)


@pytest.mark.e2e
@pytest.mark.proof
def test_the_notebook_goes_from_a_job_to_a_trained_network(tmp_path: Path) -> None:
    runner = Path(run_notebook.__file__)
    output = run(str(runner), str(NOTEBOOK), folder=tmp_path, TMPDIR=str(tmp_path))
    *progress, trained, shown = output.splitlines()
    types, texts = zip(*json.loads(shown), strict=True)
    assert types == ("CheckResult", "Run", "DataFrame", "Recommendation", "Figure", "DataFrame")
    assert "3 probes in 2 jobs" in texts[0] and "Chosen by time" in texts[3] and trained.startswith("top-1")
    assert progress[0].startswith("probe 1 of 3") and progress[-1].startswith("epoch ")
    assert all(text.startswith("<div>") and "<table" in text for text in texts if text)
    (folder,) = (tmp_path / "tula-runs").glob("notebook-*")
    assert (folder / "recommended.yaml").exists() and list((folder / "train").glob("*/summary.json"))


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
