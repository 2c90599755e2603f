"""Secrets that lie about where a job is submitted are in nothing that tula writes."""

import json
import subprocess
from pathlib import Path

import pytest
from driver import Tula

pytestmark = [pytest.mark.e2e, pytest.mark.torch]
PLANTED = "planted-3f9c1e"
NAMES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "DB_PASSWORD", "NCCL_PROXY_TOKEN", "SLURM_JWT")
FILES = (".env", "prod.env", "tls.pem", "id_rsa", "aws_credentials", ".ssh/id_ed25519", ".git/token")
MODEL = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
"""
JOB = """
name: secrets
model: {name: pack.net:Net}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05}
train: {epochs: 1, reference_batch: 64, workers: 0}
search: {nodes: [1], min_batch: 64, max_batch: 64, min_steps: 5, min_seconds: 0, max_seconds: 0.01}
cluster: {device: cpu}
"""
SCRIPT = JOB.replace("model: {name: pack.net:Net}\ndataset: {name: digits}\noptimizer: {name: SGD, lr: 0.05}\n", """
script:
  command: pack/train.py --batch {local_batch} --lr {lr}
  length: {epochs: 1}
  reference: {batch: 64, lr: 0.05}
""").replace("{epochs: 1, reference_batch: 64, workers: 0}", "{method: lrs}")  # fmt: skip
LOOP = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--lr", type=float)
given = parser.parse_args()
weights = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weights], lr=given.lr)
for batch in torch.utils.data.DataLoader(torch.randn(2048, 4), given.batch):
    optimizer.zero_grad()
    (batch @ weights).square().mean().backward()
    optimizer.step()
raise SystemExit("it breaks off: failures are recorded with what was around them")
"""


def planted(folder: Path, job: str) -> Tula:
    """Return tula in a folder whose package, environment and git hold secrets; they changed since the commit."""
    environment = {name: f"{PLANTED}-{name}" for name in NAMES}
    environment["OMP_TOOL_LIBRARIES"] = f"https://me:{PLANTED}@example.org/tool"
    tula = Tula(folder, job, TMPDIR=str(folder), **environment)
    (folder / ".gitignore").write_text("tula-runs\n")
    for name, text in {"__init__.py": "", "net.py": MODEL, "train.py": LOOP}.items():
        (folder / "pack").mkdir(exist_ok=True)
        (folder / "pack" / name).write_text(text)
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org", "-C", str(folder))
    subprocess.run([*git, "init", "-q"], check=True)
    for words in ("before", PLANTED):
        for name in FILES:
            for place in (folder, folder / "pack"):
                (place / name).parent.mkdir(exist_ok=True)
                (place / name).write_text(f"{words} {name}\n")
        (folder / "pack" / "net.py").write_text(f"# {'after' if words == PLANTED else words}\n{MODEL}")
        if words != PLANTED:
            subprocess.run([*git, "add", "--force", "."], check=True, stderr=subprocess.DEVNULL)
            subprocess.run([*git, "commit", "-qm", "first"], check=True)
    subprocess.run([*git, "remote", "add", "origin", f"https://me:{PLANTED}@example.org/me/it"], check=True)
    return tula


def written(folder: Path) -> list[Path]:
    """Return the files that hold a planted value among those that tula wrote."""
    value = [*folder.glob("page.html"), *(folder / "tula-runs").rglob("*")]
    results = [path for path in value if path.is_file() and not path.is_symlink()]
    assert len(results) > 10, "there is something to look through"
    return [path for path in results if PLANTED.encode() in path.read_bytes()]


def test_no_secret_of_the_environment_or_the_package_is_in_a_run_or_its_page(tmp_path: Path) -> None:
    tula = planted(tmp_path, JOB)
    requested = ("--methods", "lbt", "--batch", "64", "--seeds", "1", "--no-controls")
    answers = [tula("compare", "job.yaml", *requested, "--yes"), tula("status"), tula("report", "--html", "page.html")]
    assert PLANTED not in json.dumps(answers) and (tmp_path / "page.html").exists()
    run = tula.run()
    assert run.get_training(run.list_train_signatures()[0]).read_result(), "a training has told its environment"
    assert written(tmp_path) == []
    (snapshot,) = run.path.glob("code/*.json")
    assert "+# after" in json.loads(snapshot.read_text())["diff"], "the diff of code is kept"


@pytest.mark.proof
def test_no_secret_is_in_the_run_of_a_script_that_fails(tmp_path: Path) -> None:
    tula = planted(tmp_path, SCRIPT)
    process = tula.start("train", "job.yaml", "--nodes", "1", "--batch", "64", "--yes")
    output = process.communicate(timeout=240)
    assert process.returncode and "it breaks off" in tula.logs() and PLANTED not in "".join(output)
    assert written(tmp_path) == []
