"""Starts ranks of scripts from one process that imports torch once, because the import is most of the time of a short test of ranks.

    python start_ranks.py     reads one line of JSON per script from stdin, and answers with the exit codes of its ranks

The output of rank r goes to FOLDER/r.err.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tula_cli.host.processes import set_parent_death_signal

ROOT = Path(__file__).parents[2]
MODULES = ("torch", "torch._dynamo", "torchvision")
TIMEOUT_SECONDS = 400.0  # seconds until ranks that wait for each other are killed


@functools.cache
def _start_server() -> "subprocess.Popen[str]":
    """Start the process that forks the ranks of all scripts of this process's tests."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    # Tensors are mapped apart: the holes in glibc's heap make peaks differ by 20 % from run to run.
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "32768"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end_server, server)
    return server


def _end_server(server: "subprocess.Popen[str]") -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def start_ranks(script: str, folder: Path, *, world: int, **environment: str) -> bool:
    """Run a script as `world` ranks of one group with `folder` as argument; return whether all succeeded.

    Args:
        script: path of a program that reads its position from torchrun's variables.
        folder: for the results of the ranks.
        world: number of ranks.
        environment: additional variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    request = {"script": script, "folder": str(folder), "environment": place | environment}
    server = _start_server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that starts the ranks has died"
    codes: list[int] = json.loads(answer)
    return codes == [0] * world


def read_errors(folder: Path, world: int) -> str:
    """Return the end of the output of each rank."""
    paths = [path for rank in range(world) if (path := folder / f"{rank}.err").exists()]
    return "\n".join(f"rank {path.stem}:\n{path.read_text()[-3000:]}" for path in paths)


def _run_rank(rank: int, script: str, folder: str) -> int:
    """Run the script as one rank; return its exit code."""
    set_parent_death_signal()
    with open(Path(folder, f"{rank}.err"), "wb", buffering=0) as text:
        os.dup2(text.fileno(), 1)
        os.dup2(text.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [script, folder]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(bool(end.code))
    except Exception:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
        return 1
    return 0


def _receive_requests() -> tuple[int, dict[str, Any]] | None:
    """Start ranks on request; return in a rank its number and request, and in this process None after the last request."""
    for line in sys.stdin:
        request = json.loads(line)
        script = Path(request["script"])
        sys.path.insert(0, str(script.parent))
        importlib.import_module(script.stem)  # for the imports of the script
        gc.collect()
        gc.freeze()  # otherwise each measurement of memory would scan a million objects of torch
        ranks = []
        for rank in range(int(request["environment"]["WORLD_SIZE"])):
            if (pid := os.fork()) == 0:
                return rank, request
            ranks.append(pid)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        print(json.dumps([wait_for_exit(pid, deadline) for pid in ranks]), flush=True)
    return None


def wait_for_exit(pid: int, deadline: float) -> int:
    """Return the exit code of a child process, which is killed at the deadline (monotonic clock)."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    for name in MODULES:
        importlib.import_module(name)
    mine = _receive_requests()
    if mine is None:
        return 0
    rank, request = mine
    os.environ.update(request["environment"])
    return _run_rank(rank, request["script"], request["folder"])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly shutdown of torch takes a second per rank
