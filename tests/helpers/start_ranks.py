"""Ranks of one script on this machine that share one import of torch: it is most of what a short test of ranks costs.

    python start_ranks.py WORLD SCRIPT FOLDER     with MASTER_ADDR and MASTER_PORT in the environment

What rank r prints goes to FOLDER/r.err. Exits with 1 where a rank failed.
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
PATIENCE = 400.0  # seconds; a loaded machine imports slowly


def start_ranks(script: str, folder: Path, *, world: int, **environment: str) -> bool:
    """Run a script as so many ranks of one group, each with FOLDER as its argument; tell whether all ended well.

    Args:
        script: the path of a program that finds its place in torchrun's variables.
        folder: where the ranks leave what they have found.
        world: how many.
        environment: more variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])}
    command = [sys.executable, __file__, str(world), script, str(folder)]
    done = subprocess.run(
        command, env=os.environ | path | place | {"OMP_NUM_THREADS": "1"} | environment, timeout=PATIENCE, check=False
    )
    return done.returncode == 0


def errors(folder: Path, world: int) -> str:
    """Return the end of what each rank has said."""
    paths = [path for rank in range(world) if (path := folder / f"{rank}.err").exists()]
    return "\n".join(f"rank {path.stem}:\n{path.read_text()[-3000:]}" for path in paths)


def _become(rank: int, script: str, folder: str) -> int:
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
    for name in (*MODULES, Path(script).stem):  # the last one for what the script itself imports
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # torch's million objects, which every measurement of memory would go through otherwise
    ranks = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            return _become(rank, script, folder)
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    return int(any(statuses))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take torch down in order costs a second of each rank
