"""Starts ranks of one script that share one import of torch, because the import is most of the time of a short test of ranks.

    python start_ranks.py WORLD SCRIPT FOLDER     with MASTER_ADDR and MASTER_PORT in the environment

The output of rank r goes to FOLDER/r.err. The exit code is 1 if a rank failed.
"""

import gc
import importlib
import os
import runpy
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from tula_cli.host.processes import set_parent_death_signal

ROOT = Path(__file__).parents[2]
MODULES = ("torch", "torch._dynamo", "torchvision")
TIMEOUT_SECONDS = 400.0  # seconds; a loaded machine imports slowly


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
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])}
    command = [sys.executable, __file__, str(world), script, str(folder)]
    done = subprocess.run(
        command,
        env=os.environ | path | place | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return done.returncode == 0


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


def main() -> int:
    world, script, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path[0] = str(Path(script).parent)
    for name in (*MODULES, Path(script).stem):  # the last module: imports of the script itself
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each measurement of memory would scan a million objects of torch
    ranks = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            return _run_rank(rank, script, folder)
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    return int(any(statuses))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly shutdown of torch takes a second per rank
