"""Real error messages, and how tula classifies them."""

import os
import subprocess
import sys

from gpu.stage import Stage
from gpu.watch import NO_ERROR_PREFIX
from tula_cli.host.failure_texts import classify_failure
from tula_cli.host.network import find_free_port

EXPECTED_OUTCOMES = {
    "allocator": "device_oom",
    "cublas": "device_oom",
    "cudnn": "device_oom",
    "nccl": "device_oom",
    "device_assert": "user",
    "duplicate": "user",
}
EXPECTED_ON_CPU = {"host_memory": "device_oom", "host_index": "user"}
"""Errors used instead without a GPU, where the batch is in host memory."""
TIMEOUT_SECONDS = 25.0  # seconds
MAX_TEXT_CHARS = 4000  # maximum characters of a stored message


def errors(stage: Stage) -> None:
    """Provoke each error in a separate process."""
    for kind, wanted in (EXPECTED_OUTCOMES if stage.on_card else EXPECTED_ON_CPU).items():
        code, text = provoke_error(
            kind, ranks=2 if kind == "duplicate" else 1, patience=stage.patience(TIMEOUT_SECONDS)
        )
        if NO_ERROR_PREFIX in text:
            stage.tell(errors={kind: {"exit": code, "class": None, "text": text[-MAX_TEXT_CHARS:]}})
            stage.leave_open(f"{kind}: it could not be provoked")
            continue
        outcome = "no error" if code in (0, None) else classify_failure(text, exit_code=code, device=stage.device)
        stage.tell(errors={kind: {"exit": code, "class": outcome, "text": text[-MAX_TEXT_CHARS:]}})
        message = (text.strip().splitlines() or ["nothing"])[-1][:200]
        stage.require(outcome == wanted, f"{kind} is read as {outcome}, not {wanted}: {message}")
    if not stage.on_card:
        stage.leave_open("errors of a GPU's libraries (needs a GPU)")


def provoke_error(kind: str, *, ranks: int, patience: float) -> tuple[int | None, str]:
    """Return exit code and output of rank 0; the code is None if it did not exit in time."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())} if ranks > 1 else {}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "gpu.provoke", kind],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        text, _ = processes[0].communicate(timeout=patience)
        return processes[0].returncode, text
    except subprocess.TimeoutExpired:
        processes[0].kill()
        return None, processes[0].communicate()[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
