"""Starts a cluster's world and cleans up after it, whoever ends it and however.

The process that asked for the cluster may be killed at any time. The keeper outlives it by as long as it takes to end
the world and to remove what would stay behind: cgroups, clients that are still connected, the cluster's folder.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cluster_files import Settings

PATIENCE = 15.0  # seconds until the kernel has let go of a killed world
# setpriv: the world ends with the keeper, should the keeper itself be killed.
NEW_WORLD = (
    "setpriv", "--pdeathsig", "KILL",
    "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip


class Stopped(BaseException):
    """Somebody wants the cluster to end, or has ended without it."""


def processes_in(namespace: str, kind: str = "net") -> list[int]:
    """Return the processes in a namespace, given as the text of its link in /proc/PID/ns."""
    return [int(path.parts[2]) for path in Path("/proc").glob(f"[0-9]*/ns/{kind}") if namespace_of(path) == namespace]


def namespace_of(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # the process has ended
        return None


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def claim(folder: Path, settings: Settings) -> None:
    """Take the nodes' names: two nodes of one name would share a cgroup, and kill each other's jobs."""
    if settings.cgroups:
        try:
            settings.cgroup_folders[0].mkdir()
        except FileExistsError:
            sys.exit(f"another cluster has nodes with the names {settings.prefix}1, ...: choose another prefix")
        (folder / "claimed").touch()


def release(folder: Path) -> None:
    """Remove the cgroups of a cluster that has ended; nothing where they are not, or no longer, its own."""
    if not (folder / "claimed").exists():
        return
    deadline = time.monotonic() + PATIENCE
    tops = Settings.load(folder).cgroup_folders
    while (tops := [top for top in tops if top.exists()]) and time.monotonic() < deadline:
        for top in tops:
            _remove_tree(top)
        time.sleep(0.02)
    (folder / "claimed").unlink()


def _remove_tree(top: Path) -> None:
    """Remove a cgroup and those below it; one whose processes have not quite ended stays for the next time."""
    for path, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            continue


def live(folder: Path) -> None:
    """Start the world and wait for its end."""
    command = [*NEW_WORLD, sys.executable, "-S", str(Path(__file__).with_name("cluster_world.py")), str(folder)]
    world = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        pid = _only_child(world)
        (folder / "init.pid").write_text(f"{pid}\n")
        world.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end(world)


def _only_child(process: "subprocess.Popen[bytes]") -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        if parts := children.read_text().split():
            return int(parts[0])
        time.sleep(0.005)
    raise RuntimeError("the kernel refuses a new world")


def _end(world: "subprocess.Popen[bytes]") -> None:
    """Kill the world's first process; when that is reaped, the kernel has ended all others of the world too."""
    if world.poll() is not None:
        return
    first = Path(f"/proc/{world.pid}/task/{world.pid}/children").read_text().split()
    network = namespace_of(Path(f"/proc/{first[0]}/ns/net")) if first else None
    kill([int(pid) for pid in first] or [world.pid])
    world.wait()
    # Commands started outside that are still talking to the cluster would keep its network alive.
    if network and network != namespace_of(Path("/proc/self/ns/net")):
        kill(processes_in(network))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped


def main() -> None:
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, _stop)
    try:
        claim(folder, Settings.load(folder))
        live(folder)
    except Stopped:
        release(folder)
        shutil.rmtree(folder)
    finally:
        release(folder)  # the folder stays where the world has ended by itself: its logs say why


if __name__ == "__main__":
    main()
