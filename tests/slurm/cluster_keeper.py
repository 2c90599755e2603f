"""Starts the namespaces of a cluster and cleans up after them, however they end.

The process that requested the cluster may be killed at any time. The keeper then continues until it has ended the processes of
the namespaces and removed what would remain: cgroups, connected clients, the cluster's folder.
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

END_TIMEOUT_SECONDS = 15.0  # seconds until the kernel has ended the processes of a namespace
# setpriv: the processes end with the keeper, in case the keeper itself is killed.
NAMESPACES_COMMAND = (
    "setpriv", "--pdeathsig", "KILL",
    "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip


class Stopped(BaseException):
    """The end of the cluster was requested, or the cluster has ended by itself."""


def list_namespace_processes(namespace: str, kind: str = "net") -> list[int]:
    """Return the processes in a namespace, given as the text of its link in /proc/PID/ns."""
    return [int(path.parts[2]) for path in Path("/proc").glob(f"[0-9]*/ns/{kind}") if read_namespace(path) == namespace]


def read_namespace(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # the process has exited
        return None


def kill_processes(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def claim_node_names(folder: Path, settings: Settings) -> None:
    """Reserve the names of the nodes: two nodes with the same name would share a cgroup and kill each other's jobs."""
    if settings.cgroups:
        try:
            settings.cgroup_folders[0].mkdir()
        except FileExistsError:
            sys.exit(f"another cluster has nodes with the names {settings.prefix}1, ...: choose another prefix")
        (folder / "claimed").touch()


def remove_cgroups(folder: Path) -> None:
    """Remove the cgroups of an ended cluster, unless they belong to another cluster by now."""
    if not (folder / "claimed").exists():
        return
    deadline = time.monotonic() + END_TIMEOUT_SECONDS
    tops = Settings.load(folder).cgroup_folders
    while (tops := [top for top in tops if top.exists()]) and time.monotonic() < deadline:
        for top in tops:
            _remove_tree(top)
        time.sleep(0.02)
    (folder / "claimed").unlink()


def _remove_tree(top: Path) -> None:
    """Remove a cgroup and its children; a cgroup with a process that has not exited yet is left for the next call."""
    for path, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            continue


def run_cluster(folder: Path) -> None:
    """Start the namespaces and wait for their end."""
    command = [
        *NAMESPACES_COMMAND,
        sys.executable,
        "-S",
        str(Path(__file__).with_name("cluster_world.py")),
        str(folder),
    ]
    world = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        pid = _find_only_child(world)
        (folder / "init.pid").write_text(f"{pid}\n")
        world.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_namespaces(world)


def _find_only_child(process: "subprocess.Popen[bytes]") -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        if parts := children.read_text().split():
            return int(parts[0])
        time.sleep(0.005)
    raise RuntimeError("the kernel refuses a new world")


def _end_namespaces(world: "subprocess.Popen[bytes]") -> None:
    """Kill the first process of the PID namespace; when it is reaped, the kernel has ended all others of the namespace."""
    if world.poll() is not None:
        return
    first = Path(f"/proc/{world.pid}/task/{world.pid}/children").read_text().split()
    network = read_namespace(Path(f"/proc/{first[0]}/ns/net")) if first else None
    kill_processes([int(pid) for pid in first] or [world.pid])
    world.wait()
    # Commands outside that are still connected to the cluster would keep its network alive.
    if network and network != read_namespace(Path("/proc/self/ns/net")):
        kill_processes(list_namespace_processes(network))


def _raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped


def main() -> None:
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        claim_node_names(folder, Settings.load(folder))
        run_cluster(folder)
    except Stopped:
        remove_cgroups(folder)
        shutil.rmtree(folder)
    finally:
        remove_cgroups(
            folder
        )  # if the cluster has ended by itself, the folder is kept because its logs contain the reason


if __name__ == "__main__":
    main()
