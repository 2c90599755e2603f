"""The oldest Python and torch of a script that tula measures, chooses for and trains: `python tests/oldest_torch.py 2.0.1`.

Makes .proof/oldest-TORCH, an environment of its own with that torch (several GB, kept for the next time) and Python 3.8 where
there is one, and needs a package registry for that. tula itself stays in the environment that runs this.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from driver import Tula  # noqa: E402
from other_torch import environment, interpreter, versions  # noqa: E402

from tula_cli.run.records.probes import Measured  # noqa: E402

NEEDED = 8  # GB
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
    python = environment(folder, interpreter("3.8"), [f"torch=={torch}", "numpy<2"], gigabytes=NEEDED)
    version, message = versions(python)
    result = version, message.partition("+")[0]
    if result[1] != torch:
        print(f"{python} has torch {result[1]}, not {torch}")
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        work = Path(place, "job")
        work.mkdir()
        shutil.copy(ROOT / "tests" / "scripts" / "plain_ddp.py", work)
        prove(Tula(work, JOB.format(python=python)), *result)
    print(
        f"a script under Python {result[0]} and torch {result[1]}: measured, chosen for, trained; no AGS, which is told"
    )
    return 0


def prove(tula: Tula, python: str, torch: str) -> None:
    """Measure, choose and train.

    Raises:
        AssertionError: something is not as it should be.
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
    refused = tula.start("profile", "job.yaml", "--set", "train.method=ags", "--yes")
    text = "".join(refused.communicate(timeout=240))
    assert refused.returncode not in (0, 1) and f"the script runs Python {python} with torch {torch}" in text, text


if __name__ == "__main__":
    sys.exit(main())
