"""Profile, recommend and train a script under the oldest supported Python and torch: `python tests/oldest_torch.py 2.0.1`.

The program creates a separate environment .proof/oldest-TORCH with that torch (several GB, kept for the next call) and, if
installed, Python 3.8; it needs a package index. tula itself runs in the environment of this program.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from driver import Tula  # noqa: E402
from other_torch import create_environment, find_interpreter, query_versions  # noqa: E402

from tula_cli.run.records.probes import Measured  # noqa: E402

NEEDED_GIGABYTES = 8  # GB
JOB = """
name: oldest
script:
  command: {python} plain_ddp.py --local-batch {{local_batch}} --lr {{lr}} --epochs {{epochs}}
  length: {{epochs: 5}}
  reference: {{batch: 16, lr: 0.1}}
search: {{nodes: [1, 2], min_batch: 32, max_batch: 32, strategy: full, min_steps: 5, min_seconds: 0}}
cluster: {{device: cpu}}
"""


def main() -> int:
    torch = sys.argv[1]
    folder = ROOT / ".proof" / f"oldest-{torch}"
    python = create_environment(
        folder, find_interpreter("3.8"), [f"torch=={torch}", "numpy<2"], gigabytes=NEEDED_GIGABYTES
    )
    python_version, local_version = query_versions(python)
    torch_version = local_version.partition("+")[0]
    if torch_version != torch:
        print(f"{python} has torch {torch_version}, not {torch}")
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary, "job")
        work.mkdir()
        shutil.copy(ROOT / "tests" / "scripts" / "plain_ddp.py", work)
        check_commands(Tula(work, JOB.format(python=python)), python_version, torch_version)
    print(f"profiled, recommended and trained a script under Python {python_version} and torch {torch_version}")
    return 0


def check_commands(tula: Tula, python: str, torch: str) -> None:
    """Check profile, recommend and train, and that AGS is rejected with an error that names the versions.

    Raises:
        AssertionError: a result or a message is wrong.
    """
    tula("profile", "job.yaml", "--yes")
    for result in tula.run().read_results():
        assert isinstance(result, Measured) and result.environment.torch.startswith(torch), result
        assert result.dataset_size == 320 and result.data_wait is not None and result.script is not None
        if result.nodes == 2:
            assert result.sync_time and result.compute_time and result.gradients is not None
    assert len(tula.run().read_results()) == 2
    assert len(tula("recommend", "--objective", "time")["data"]["rows"]) == 2
    summary = tula("train", "--nodes", "2", "--batch", "32", "--yes")["data"]
    result = tula.run().get_training(summary["signature"]).read_result()
    assert result is not None and (result.samples, summary["attempts"]) == (5 * 320, 1)
    rejected = tula.start("profile", "job.yaml", "--set", "train.method=ags", "--yes")
    text = "".join(rejected.communicate(timeout=240))
    assert rejected.returncode not in (0, 1) and f"the script runs Python {python} with torch {torch}" in text, text


if __name__ == "__main__":
    sys.exit(main())
