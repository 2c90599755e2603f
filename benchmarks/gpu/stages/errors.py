"""The real words of errors, and the classes that the product reads out of them."""

import os
import subprocess
import sys

from gpu.stage import Stage
from gpu.watch import RAN
from tula_cli.host.failure_texts import classify_failure
from tula_cli.host.network import find_free_port

WANTED = {
    "allocator": "device_oom",
    "cublas": "device_oom",
    "cudnn": "device_oom",
    "nccl": "device_oom",
    "device_assert": "user",
    "duplicate": "user",
}
ON_CPU = {"host_memory": "device_oom", "host_index": "user"}
"""What takes their place without a card; there the batch is in the host's memory."""
PATIENCE = 25.0  # seconds
KEPT = 4000  # characters


def errors(stage: Stage) -> None:
    """Provoke each error in a process of its own."""
    for kind, wanted in (WANTED if stage.on_card else ON_CPU).items():
        code, text = provoked(kind, ranks=2 if kind == "duplicate" else 1, patience=stage.patience(PATIENCE))
        if RAN in text:
            stage.tell(errors={kind: {"exit": code, "class": None, "text": text[-KEPT:]}})
            stage.leave_open(f"{kind}: it could not be provoked")
            continue
        outcome = "no error" if code in (0, None) else classify_failure(text, exit_code=code, device=stage.device)
        stage.tell(errors={kind: {"exit": code, "class": outcome, "text": text[-KEPT:]}})
        message = (text.strip().splitlines() or ["nothing"])[-1][:200]
        stage.require(outcome == wanted, f"{kind} is read as {outcome}, not {wanted}: {message}")
    if not stage.on_card:
        stage.leave_open("errors of a GPU's libraries (needs a GPU)")


def provoked(kind: str, *, ranks: int, patience: float) -> tuple[int | None, str]:
    """Return exit code and words of rank 0; None where it did not end in time."""
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
