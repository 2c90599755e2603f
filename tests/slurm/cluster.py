"""A real SLURM cluster of several nodes on one Linux machine, for tests.

    cluster.py check | install              print missing requirements; install them (Debian)
    cluster.py up N [--rate 200mbit] ...    start a cluster and print how to use it
    cluster.py exec NODE|login -- COMMAND   run a command on a node
    cluster.py rate NODE|all RATE|off       change the bandwidth of links
    cluster.py kill-slurmd NODE             kill the daemon of a node; its jobs continue
    cluster.py start-slurmd NODE            start the daemon again
    cluster.py power-off NODE               disconnect a node and kill its processes
    cluster.py power-on NODE                start a node again, without processes
    cluster.py down                         end all processes and remove all files

The cluster runs in separate Linux namespaces: network, mounts, host names, IPC, processes. Each compute node has its own
network (address 10.77.0.K, link shaped with tc) and host name; slurmctld, slurmdbd and MariaDB run on the node `login`.
Outside of the namespaces there is only a folder. Its bin/ contains sbatch, srun, squeue etc. that first enter the login node,
so that programs outside use the cluster as any other. Needs root and Debian packages, but no Python packages.
"""

import argparse
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from cluster_files import CLIENTS, SYSTEM_PATH, Settings, write_files
from cluster_keeper import NAMESPACES_COMMAND, kill_processes, list_namespace_processes, remove_cgroups
from cluster_world import make_slurmd_command, tc_options

# Debian package -> files that it has to provide
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", *CLIENTS),
    "munge": ("munged",),
    "slurmdbd": ("slurmdbd",),
    "slurm-wlm-mysql-plugin": ("/usr/lib/*/slurm*/accounting_storage_mysql.so",),
    "mariadb-server-core": ("mariadbd", "mariadb-install-db"),
    "mariadb-client-core": ("my_print_defaults",),
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter", "setpriv"),
    "mount": ("mount",),
    "hostname": ("hostname",),
    "bindfs": ("bindfs",),
}
INSTALL_COMMAND = "apt-get install -y --no-install-recommends"
START_TIMEOUT_SECONDS = 90.0  # seconds until a cluster is up; 16 nodes with accounting take 5 s on an idle machine
_NAMESPACE_TEST = """
ip link add bridge type bridge
ip link add link1 type veth peer name link2
ip link set link1 up
tc qdisc add dev link1 root tbf rate 1gbit burst 256kb latency 50ms
mount -t tmpfs none /run
hostname trial
"""


class ClusterError(Exception):
    """The cluster failed to do what was requested; the message contains the daemons' logs."""


def list_missing_packages() -> list[str]:
    """Return the Debian packages that the cluster needs and this machine lacks."""
    path = os.environ.get("PATH", "") + ":" + SYSTEM_PATH
    return [
        package
        for package, parts in PACKAGES.items()
        if not all(glob.glob(part) if part.startswith("/") else shutil.which(part, path=path) for part in parts)
    ]


def describe_why_no_cluster() -> str | None:
    """Return why no cluster can run on this machine, or None if one can; takes about 50 ms."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    if packages := list_missing_packages():
        return f"packages are missing (`{INSTALL_COMMAND} {' '.join(packages)}`)"
    trial = subprocess.run(
        [*NAMESPACES_COMMAND, "sh", "-ec", _NAMESPACE_TEST], env=_environment(), capture_output=True, text=True
    )
    return f"namespaces or links are refused here: {trial.stderr.strip()[:300]}" if trial.returncode else None


def install_packages() -> None:
    """Install missing packages; if a package starts daemons, they do not interfere with the cluster."""
    if packages := list_missing_packages():
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], [*INSTALL_COMMAND.split(), *packages]):
            subprocess.run(command, env=environment, check=True)


def _environment() -> dict[str, str]:
    """Return this process's environment without variables of an outer SLURM, and with the PATH of the daemons."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SUBMITIT"))}
    return {**kept, "PATH": os.environ.get("PATH", "") + ":" + SYSTEM_PATH}


class SlurmCluster:
    """A cluster in a folder that is created for it and removed with it.

    Options besides the number of nodes are the fields of cluster_files.Settings. As a context manager, the cluster ends with the
    block, and also when this process is killed.
    """

    def __init__(self, nodes: int, folder: Path | None = None, **wishes: Any) -> None:
        self.settings = Settings(nodes, **wishes)
        self.folder = (folder or Path(tempfile.mkdtemp(prefix="tula-slurm-")) / "cluster").absolute()
        self._made = self.folder.parent if folder is None else None
        self._keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def at(cls, folder: Path) -> "SlurmCluster":
        """Return the cluster that another process has started in a folder."""
        result = cls.__new__(cls)
        result.settings = Settings.load(folder.absolute())
        result.folder, result._made, result._keeper = folder.absolute(), None, None
        return result

    def __enter__(self) -> "SlurmCluster":
        return self.up()

    def __exit__(self, *failure: object) -> None:
        self.down()

    @property
    def names(self) -> list[str]:
        return self.settings.names

    @property
    def local(self) -> Path:
        """A folder that is separate on each node and initially empty."""
        return self.folder / "local"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which programs outside use this cluster."""
        path = f"{self.folder}/bin:{os.environ.get('PATH', SYSTEM_PATH)}"
        return {"PATH": path, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def up(self, *, tied: bool = True) -> "SlurmCluster":
        """Start the cluster; if `tied`, it ends with the calling thread."""
        if self.folder.exists():
            raise ClusterError(f"{self.folder} exists: another cluster may live there (`down` ends it)")
        write_files(self.folder, self.settings)
        keeper = str(Path(__file__).with_name("cluster_keeper.py"))
        command = [sys.executable, "-S", keeper, str(self.folder)]
        if tied:
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        with open(self.folder / "log/start.log", "wb") as log:
            self._keeper = subprocess.Popen(
                command, cwd="/", env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        (self.folder / "keeper.pid").write_text(f"{self._keeper.pid}\n")
        try:
            self._await_ready(self._keeper)
        except BaseException:
            self.down()
            raise
        return self

    def _await_ready(self, keeper: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not (self.folder / "ready").exists():
            if keeper.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the cluster did not come up\n{self.logs()}")
            time.sleep(0.02)

    def logs(self) -> str:
        """Return the ends of all daemon logs."""
        paths = sorted((self.folder / "log").iterdir())
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def down(self) -> None:
        """End the cluster and all its processes, and return when none is left. A second call has no effect."""
        self._end_keeper()
        if self.folder.exists():  # the keeper was killed, or the namespaces have ended
            remove_cgroups(self.folder)
            shutil.rmtree(self.folder)
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)

    def _end_keeper(self) -> None:
        if self._keeper:
            self._keeper.terminate()
            self._keeper.wait(START_TIMEOUT_SECONDS)
            return
        path = self.folder / "keeper.pid"
        if path.exists() and self._is_keeper(pid := int(path.read_text())):
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not self._is_keeper(pid), "the cluster ends")

    def _is_keeper(self, pid: int) -> bool:
        """Return whether a process is this cluster's keeper, and not a later process with the same number."""
        return f"cluster_keeper.py {self.folder}" in _command_line(pid)

    def enter(self, where: str = "login") -> list[str]:
        """Return the prefix of a command line that runs the command on a node."""
        init = (self.folder / "init.pid").read_text().strip()
        world = ["nsenter", "--target", init, "--mount", "--pid", "--ipc", f"--wd={Path.cwd()}"]
        if where == "login":
            return [*world, "--net", "--uts"]
        if where not in self.names:
            raise ClusterError(f"no node {where!r}: there are login, {', '.join(self.names)}")
        return [*world, "nsenter", f"--net=/run/netns/{where}", f"--uts=/run/hostnames/{where}"]

    def run(self, where: str, *command: str, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command on a node to its end; raise ClusterError if it fails, unless check is False."""
        options = {"capture_output": True, "stdin": subprocess.DEVNULL, **options}
        environment = {**_environment(), **self.env}
        done = subprocess.run([*self.enter(where), *command], env=environment, text=True, **options)
        if check and done.returncode:
            raise ClusterError(f"{where}: {' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def processes(self, node: str, text: str = "") -> list[int]:
        """Return the processes of a node whose command line contains a text, by their numbers outside of the namespaces."""
        network = self.run(node, "readlink", "/proc/self/ns/net").stdout.strip()
        return [pid for pid in list_namespace_processes(network) if text in _command_line(pid)]

    def kill_slurmd(self, node: str) -> None:
        """Kill the slurmd of a node; the processes that it started continue."""
        self._known(node)
        self.run("login", "sh", "-c", f"kill -9 $(cat /run/slurmd.{node}.pid)")

    def start_slurmd(self, node: str) -> None:
        self._known(node)
        self.run("login", *make_slurmd_command(self.folder, node))

    def _uncache(self) -> None:
        for node in self.names:
            if result := self.processes(node, "bindfs -o "):
                self.kill_slurmd(node)
                kill_processes(result)

    def power_off(self, node: str) -> None:
        """Power off a node: first disconnect its link, so that nobody receives a message about the processes killed then."""
        self._link(node, "down")
        wait_until(lambda: not self._kill_all(node), f"everything on {node} ends")

    def power_on(self, node: str) -> None:
        self._link(node, "up")
        self.start_slurmd(node)

    def set_rate(self, node: str, rate: str) -> None:
        """Change the bandwidth of a node's link in both directions; "off" removes the limit."""
        self._shape([node], rate)

    def _shape(self, nodes: Sequence[str], rate: str) -> None:
        numbers = {node: self._known(node) for node in nodes}
        if rate == "off":  # the nodes whose limit is off have nothing to delete
            calls = [
                (f"qdisc del dev link{k} root", f"-n {node} qdisc del dev eth0 root") for node, k in numbers.items()
            ]
        else:
            calls = [tc_options(k, node, rate) for node, k in numbers.items()]
        script = "\n".join(f"tc {options}" for pair in calls for options in pair)
        self.run("login", "sh", "-c" if rate == "off" else "-ec", script, check=rate != "off")

    def _without_daemon(self) -> list[str]:
        """Return the nodes whose slurmd is not running."""
        look = "grep -qs slurmd /proc/$(cat /run/slurmd.$node.pid)/cmdline || echo $node"
        return self.run("login", "sh", "-c", f"for node in {' '.join(self.names)}; do {look}; done").stdout.split()

    def _link(self, node: str, state: str) -> None:
        self.run("login", "ip", "link", "set", f"link{self._known(node)}", state)

    def _kill_all(self, node: str) -> bool:
        """Kill all processes of a node, and return whether there were any."""
        result = self.processes(node)
        kill_processes(result)
        return bool(result)

    def _known(self, node: str) -> int:
        """Return the number of a node."""
        if node not in self.names:
            raise ClusterError(f"no node {node!r}: there are {', '.join(self.names)}")
        return self.names.index(node) + 1

    def reset(self) -> None:
        """End all jobs, and restore all nodes and links."""
        self.run(
            "login", "scancel", "--full", "--signal=KILL", "--user=root", check=False
        )  # SIGKILL, because nothing needs to be saved
        self.run("login", "scancel", "--user=root", check=False)
        self._shape(self.names, self.settings.rate)
        self._uncache()
        for node in self._without_daemon():
            self.power_on(node)
        wait_until(lambda: not self.run("login", "squeue", "--noheader").stdout, "the queue is empty")
        for node, state in self._states().items():
            if state != "idle":
                self.run("login", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        wait_until(lambda: set(self._states().values()) == {"idle"}, "all nodes are idle")

    def _states(self) -> dict[str, str]:
        table = self.run("login", "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t").stdout
        return dict(line.split() for line in table.splitlines())


def wait_until(true: Callable[[], object], what: str, *, seconds: float = 60.0) -> None:
    """Wait until a condition is true; raise ClusterError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(tempfile.gettempdir(), "tula-slurm")
    parser.add_argument("--folder", type=Path, default=folder, help="the cluster's own (%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("check", "install", "down"):
        commands.add_parser(name)
    up = commands.add_parser("up")
    up.add_argument("nodes", type=int)
    up.add_argument("--no-accounting", dest="accounting", action="store_false")
    for wish in fields(Settings)[1:]:
        if wish.type in (int, str):
            up.add_argument(f"--{wish.name.replace('_', '-')}", type=wish.type, default=wish.default)
    for name in ("kill-slurmd", "start-slurmd", "power-off", "power-on", "rate", "exec"):
        commands.add_parser(name).add_argument("node")
    commands.choices["rate"].add_argument("rate")
    commands.choices["exec"].add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def _start_cluster(arguments: argparse.Namespace) -> None:
    wishes = {wish.name: getattr(arguments, wish.name) for wish in fields(Settings) if hasattr(arguments, wish.name)}
    cluster = SlurmCluster(folder=arguments.folder, **wishes).up(tied=False)
    print(f"export PATH={cluster.folder}/bin:$PATH SLURM_CONF={cluster.folder}/slurm.conf")


def _run_action(arguments: argparse.Namespace) -> int:
    cluster = SlurmCluster.at(arguments.folder)
    match arguments.command:
        case "down":
            cluster.down()
        case "exec":
            words = [word for place, word in enumerate(arguments.words) if (place, word) != (0, "--")]
            return cluster.run(arguments.node, *words, check=False, capture_output=False, stdin=None).returncode
        case "rate":
            for node in cluster.names if arguments.node == "all" else [arguments.node]:
                cluster.set_rate(node, arguments.rate)
        case command:
            getattr(cluster, command.replace("-", "_"))(arguments.node)
    return 0


def main() -> int | str:
    arguments = _parse_arguments(sys.argv[1:])
    match arguments.command:
        case "check":
            reason = describe_why_no_cluster()
            print(reason or "a cluster can live here")
            return 1 if reason else 0
        case "install":
            install_packages()
            return 0
        case "down" if not arguments.folder.exists():
            return 0
    try:
        if arguments.command == "up":
            _start_cluster(arguments)
            return 0
        return _run_action(arguments)
    except FileNotFoundError as error:
        return f"no cluster in {arguments.folder} ({error})"
    except (ClusterError, ValueError) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
