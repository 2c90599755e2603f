"""A process that imports torch once and forks the ranks of scripts, because its import and orderly shutdown are most of the time of
a short script.

A rank starts where the shim's sitecustomize would be: torch is imported, its hooks are installed, the script follows.
`tests/shim/test_launched.py` tests the complete start.
"""

import atexit
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from start_ranks import wait_for_exit

from tula_cli.host.processes import adopt_orphans, set_parent_death_signal
from tula_cli.run.records.scripts import RankResult, ShimPlan
from tula_cli.worker.preloaded import _exit_without_cleanup

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tula_cli" / "shim"
SCRIPTS = ROOT / "tests" / "scripts"
MODULES = ("torch", "torch._dynamo", "torch.nn.parallel", "torch.utils.data.distributed")
TIMEOUT_SECONDS = 120.0  # seconds; a loaded machine imports slowly
RESULT = TypeAdapter(RankResult)


@dataclass(frozen=True)
class ScriptOutcome:
    """The results of the ranks of a script."""

    folder: Path
    codes: list[int]
    leftover_processes: int  # processes that were still running after their ranks
    output: list[str] = field(repr=False)

    def json(self, name: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / name).read_text())
        return data

    def results(self) -> list[RankResult]:
        """Return the result of each rank.

        Raises:
            AssertionError: a rank has written no result; the message contains its output.
        """
        paths = [self.folder / f"result-{rank}.json" for rank in range(len(self.codes))]
        assert all(path.exists() for path in paths), (self.codes, *self.output)
        return [RESULT.validate_json(path.read_bytes()) for path in paths]


class ScriptRanks:
    """Starts scripts; a context manager for the process that it starts."""

    def __enter__(self) -> "ScriptRanks":
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(TIMEOUT_SECONDS)

    def __call__(self, script: str | Path, *arguments: object, plan: ShimPlan, world: int = 1) -> ScriptOutcome:
        """Run a script as `world` ranks under a plan, whose folder is created.

        Args:
            script: its path, or its name in tests/scripts.
            arguments: of its command line.
            plan: of the shim.
            world: ranks; with one, there are no variables of a process group.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        folder = Path(plan.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(plan.model_dump_json())
        request = {"script": str(SCRIPTS / script), "arguments": [str(a) for a in arguments], "world": world}
        self._server.stdin.write(json.dumps({**request, "folder": str(folder)}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that starts the ranks has died"
        text = [(folder / f"{rank}.log").read_text() for rank in range(world)]
        return ScriptOutcome(folder, **json.loads(answer), output=text)


def _run_rank(rank: int, request: dict[str, Any], port: int, finished: list[dict[str, Any]]) -> None:
    """Run the script as one rank, until this process exits; append the request to `finished` if the script raises no error."""
    set_parent_death_signal()
    folder, world = Path(request["folder"]), request["world"]
    with open(folder / f"{rank}.log", "wb", buffering=0) as text:
        for descriptor in (1, 2):
            os.dup2(text.fileno(), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TULA_PLAN"] = str(folder / "plan.json")
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0:0] = [str(Path(request["script"]).parent), str(SHIM), str(ROOT / "templates")]
    importlib.import_module("tula_shim.install").install()
    try:
        runpy.run_path(request["script"], run_name="__main__")
        finished.append(request)
    finally:
        if not finished:  # frozen objects are not collected at exit, and native code would report leaks
            gc.unfreeze()


def _receive_requests() -> tuple[int, dict[str, Any], int] | None:
    """Start ranks on request; return in a rank its number, request and port, and in this process None after the last request."""
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = []
        for rank in range(request["world"]):
            if (pid := os.fork()) == 0:
                return rank, request, port
            ranks.append(pid)
        codes = [wait_for_exit(pid, time.monotonic() + TIMEOUT_SECONDS) for pid in ranks]
        print(json.dumps({"codes": codes, "leftover_processes": _kill_leftover_processes()}), flush=True)
    return None


def _kill_leftover_processes() -> int:
    """Count and kill the processes that the ranks have left running."""
    here = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    alive = [pid for pid in here if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]
    for pid in alive:
        os.kill(int(pid), signal.SIGKILL)
    for pid in here:
        os.waitpid(int(pid), 0)
    return len(alive)


if __name__ == "__main__":
    finished_requests: list[dict[str, Any]] = []
    atexit.register(
        _exit_without_cleanup, finished_requests
    )  # registered before torch's handlers, so it is called last
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # otherwise each garbage collection in a rank would copy the memory pages of a million objects of torch
    with adopt_orphans():  # orphans of a rank become children of this process
        mine = _receive_requests()
    if mine is None:
        os._exit(0)  # an orderly shutdown of torch takes seconds
    _run_rank(*mine, finished_requests)
