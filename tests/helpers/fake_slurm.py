"""A fake SLURM whose commands are on PATH; tests set the states of jobs and the faults.

For events that are rare on a real cluster, and for versions that are not installed; tests/slurm has a real cluster.
"""

import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "srun")
VERSIONS = ("20.11", "22.05", "23.11", "24.11")
PROGRAM = Path(__file__).with_name("fake_slurm_commands.py")


@dataclass(frozen=True)
class Call:
    """One call of a SLURM command."""

    command: str
    arguments: list[str]
    environ: dict[str, str]  # variables of SLURM


class FakeSlurm:
    """A fake SLURM in a folder.

    Args:
        folder: empty.
        version: of SLURM, as printed by the commands.
    """

    def __init__(self, folder: Path, version: str = "22.05") -> None:
        self.folder = folder
        for name in ("bin", "jobs", "scripts"):
            (folder / name).mkdir(parents=True)
        (folder / "sbatch.json").write_text("0")
        self._settings: dict[str, Any] = {"version": version, "sbatch": [], "squeue": "", "sacct": "", "scontrol": "", "lag": 0, "sinfo": "", "recorded": "", "starts": ""}  # fmt: skip
        self.fault()
        for name in COMMANDS:
            program = folder / "bin" / name
            program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(PROGRAM))} {name} \"$@\"\n")  # fmt: skip
            program.chmod(0o755)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put only the fake commands on PATH, because a real SLURM may be installed."""
        monkeypatch.setenv("PATH", str(self.folder / "bin"))
        monkeypatch.setenv("FAKE_SLURM", str(self.folder))

    def fault(self, **faults: Any) -> None:
        """Set faults from now on.

        Args:
            faults: sbatch: a list with one entry per call ("accept", "timeout", "accept, timeout", "hang", "accept, hang",
                "accept, no id", "unreachable", "refuse:WORDS;WORDS"); squeue, scontrol: "unreachable", "timeout", "hang",
                "garbage", for squeue also "refuses unknown"; sacct: "disabled", "unreachable", "hang", "knows nothing"; recorded: a
                file with recorded calls of a real SLURM, which are replayed; lag: seconds until a submitted job is visible; sinfo:
                its output; starts: the start time printed by `sbatch --test-only`.
        """
        self._settings.update(faults)
        (self.folder / "settings.json").write_text(json.dumps(self._settings))

    def without(self, command: str) -> None:
        """Remove a command."""
        (self.folder / "bin" / command).unlink()

    def set(self, id_: str, state: str, reason: str = "None", **changes: Any) -> None:
        """Change a job. `changes`: node_list, starts, ends (local times), derived, restarts, steps, earlier, forgotten, accounted."""
        path = self.folder / "jobs" / f"{id_}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": state, "reason": reason, **changes}))

    def add(self, name: str, state: str = "PENDING", reason: str = "None", **changes: Any) -> str:
        """Add a job of another submission; return its id."""
        id_ = str(1000 + len(list((self.folder / "jobs").iterdir())))
        job = {
            "id": int(id_), "name": name, "script": "/elsewhere/job.sh", "nodes": "2", "dependency": "", "starts": "N/A", "ends": "N/A",
            "node_list": "", "restarts": 0, "derived": "0:0", "steps": [], "earlier": [], "forgotten": False, "accounted": None,
            "visible_at": 0, "user": os.getuid(),
        }  # fmt: skip
        (self.folder / "jobs" / f"{id_}.json").write_text(json.dumps(job))
        self.set(id_, state, reason, **changes)
        return id_

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, in the order of their submission."""
        paths = sorted((self.folder / "jobs").iterdir(), key=lambda path: int(path.stem))
        return [json.loads(path.read_text()) for path in paths]

    def script(self, id_: str) -> str:
        """Return the script passed to sbatch."""
        return (self.folder / "scripts" / f"{id_}.sh").read_text()

    def calls(self, command: str) -> list[Call]:
        path = self.folder / "calls.jsonl"
        result = [Call(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in result if call.command == command]


def format_time(at: float) -> str:
    """Format a Unix time as SLURM prints it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
