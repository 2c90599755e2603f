"""Cost of the shim per step of a third-party script: runs its command with one rank and `stand_in/ruler.py`."""

import json
import math
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tula_cli.cluster.scripts import start as cluster_values
from tula_cli.run.records.scripts import ShimPlan
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.placeholders import fill_command

SHIM = Path(__file__).parents[2] / "tula_cli" / "shim"
MAX_STEPS = 100_000  # requested epochs or steps: the ruler ends the script earlier
MINUTES = 25
PORT = 29_400 + os.getpid() % 1000


def measure(
    spec: JobSpec, *, batch: int, pairs: int, work: Path, python: str, environment: Callable[..., dict[str, str]]
) -> dict[str, Any]:
    """Return CPU seconds per step without the shim, and the additional time with it: the median over pairs of successive steps.

    Raises:
        RuntimeError: the script ended before all pairs were measured; the message is the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.json")
        plan = ShimPlan(task="overhead", folder=folder, mode="train")
        Path(folder, "plan.json").write_text(plan.model_dump_json())
        process = subprocess.run(
            _make_command(spec, batch, Path(folder), python), cwd=work, env=_make_environment(environment, folder, path, pairs),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60 * MINUTES,
        )  # fmt: skip
        if not path.exists():
            raise RuntimeError(f"no measurement: exit {process.returncode}\n{process.stderr[-2000:]}")
        return summarise_pairs(json.loads(path.read_text()))


def summarise_pairs(pairs: list[list[float]]) -> dict[str, Any]:
    """Return the median over pairs (without, with), and a 90 % interval of it (order statistics); at least 6 pairs."""
    plain = statistics.median(without for without, _ in pairs)
    more = sorted(watched - without for without, watched in pairs)
    reach = 1.645 * math.sqrt(len(more)) / 2  # the ranks around the median that contain it in 90 % of cases
    low, high = (more[min(len(more) - 1, max(0, round(len(more) / 2 + side * reach)))] for side in (-1, 1))
    percent = {
        f"{name}percent": 100 * value / plain
        for name, value in (("", statistics.median(more)), ("low_", low), ("high_", high))
    }
    return {"code": 0, "pairs": len(pairs), "step_cpu_ms": 1e3 * plain, **percent}


def _make_command(spec: JobSpec, batch: int, folder: Path, python: str) -> list[str]:
    script = spec.get_script()
    here = cluster_values.ScriptProcess(1, 0, "127.0.0.1", PORT, 0, 0)
    known = cluster_values.list_placeholder_values(
        spec, here, batch=batch, out=folder / "out", run=folder, workers=1
    )  # the minimum of timm
    known |= {name: MAX_STEPS for name in ("epochs", "steps") if name in known}
    words = fill_command(script.command, known)
    return [python, *words] if words[0].endswith(".py") else words


def _make_environment(
    environment: Callable[..., dict[str, str]], folder: str, told: Path, pairs: int
) -> dict[str, str]:
    result = environment(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT),
        TULA_PLAN=str(Path(folder, "plan.json")), SCRIPTS_RULER=str(told), SCRIPTS_PAIRS=str(pairs),
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0") if Path("/dev/nvidiactl").exists() else "",
    )  # fmt: skip
    return {**result, "PYTHONPATH": os.pathsep.join([str(SHIM), result["PYTHONPATH"]])}
