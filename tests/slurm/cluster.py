"""A real SLURM cluster of several nodes on one Linux machine, for tests.

    cluster.py check | install              what is missing here; install it (Debian)
    cluster.py up N [--rate 200mbit] ...    bring a cluster up and print how to use it
    cluster.py exec NODE|login -- COMMAND   run a command on a node
    cluster.py rate NODE|all RATE|off       change the speed of links
    cluster.py kill-slurmd NODE             end a node's daemon; its jobs go on
    cluster.py start-slurmd NODE            start it again
    cluster.py power-off NODE               the node falls silent, all at once
    cluster.py power-on NODE                and is back, empty
    cluster.py down                         end everything, leave nothing

The cluster lives in a private world of namespaces: network, mounts, host names, IPC, processes. Each compute node has
its own network (address 10.77.0.K, link shaped with tc) and host name; slurmctld, slurmdbd and MariaDB run on the node
`login`. Outside, there is a folder only: its bin/ holds sbatch, srun, squeue, ... that enter the login node first, so
that programs outside use the cluster as they use any other. Needs root and Debian's packages, no Python ones.
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

from cluster_files import CLIENTS, SYSTEM_PATH, Settings, write
from cluster_keeper import NEW_WORLD, kill, processes_in, release
from cluster_world import shaping, slurmd

# What each of Debian's packages has to bring.
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
INSTALL = "apt-get install -y --no-install-recommends"
PATIENCE = 90.0  # seconds for a cluster to come up; 16 nodes with accounting take 5 where the machine is idle
_TRIAL = """
ip link add bridge type bridge
ip link add link1 type veth peer name link2
ip link set link1 up
tc qdisc add dev link1 root tbf rate 1gbit burst 256kb latency 50ms
mount -t tmpfs none /run
hostname trial
"""


class ClusterError(Exception):
    """The cluster does not do what it was asked for; the text says what its logs say."""


def missing() -> list[str]:
    """Return Debian's packages that the cluster needs and this machine lacks."""
    path = os.environ.get("PATH", "") + ":" + SYSTEM_PATH
    return [
        package
        for package, parts in PACKAGES.items()
        if not all(glob.glob(part) if part.startswith("/") else shutil.which(part, path=path) for part in parts)
    ]


def describe_why_no_cluster() -> str | None:
    """Return why no cluster can live on this machine, or None where one can; takes some 50 ms."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    if packages := missing():
        return f"packages are missing (`{INSTALL} {' '.join(packages)}`)"
    trial = subprocess.run([*NEW_WORLD, "sh", "-ec", _TRIAL], env=_environment(), capture_output=True, text=True)
    return f"namespaces or links are refused here: {trial.stderr.strip()[:300]}" if trial.returncode else None


def install() -> None:
    """Install what is missing; if the packages start daemons, the cluster does not meet them."""
    if packages := missing():
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], [*INSTALL.split(), *packages]):
            subprocess.run(command, env=environment, check=True)


def _environment() -> dict[str, str]:
    """Return this process's environment without what an outer SLURM has left in it, and with the daemons' path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SUBMITIT"))}
    return {**kept, "PATH": os.environ.get("PATH", "") + ":" + SYSTEM_PATH}


class SlurmCluster:
    """A cluster in a folder that is made for it and removed with it.

    Wishes beyond the number of nodes are the fields of cluster_files.Settings. As a context manager the cluster ends
    with the block, and also when this process is killed.
    """

    def __init__(self, nodes: int, folder: Path | None = None, **wishes: Any) -> None:
        self.settings = Settings(nodes, **wishes)
        self.folder = (folder or Path(tempfile.mkdtemp(prefix="tula-slurm-")) / "cluster").absolute()
        self._made = self.folder.parent if folder is None else None
        self._keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def at(cls, folder: Path) -> "SlurmCluster":
        """Return the cluster that another process has brought up in a folder."""
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
        """A folder that every node has for itself, empty at first: what is written there no other node sees."""
        return self.folder / "local"

    @property
    def env(self) -> dict[str, str]:
        """What has to be set for programs outside to use this cluster."""
        path = f"{self.folder}/bin:{os.environ.get('PATH', SYSTEM_PATH)}"
        return {"PATH": path, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def up(self, *, tied: bool = True) -> "SlurmCluster":
        """Bring the cluster up; tied, it ends with the thread that calls this."""
        if self.folder.exists():
            raise ClusterError(f"{self.folder} exists: another cluster may live there (`down` ends it)")
        write(self.folder, self.settings)
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
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / "ready").exists():
            if keeper.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the cluster did not come up\n{self.logs()}")
            time.sleep(0.02)

    def logs(self) -> str:
        """Return the ends of all daemons' logs."""
        paths = sorted((self.folder / "log").iterdir())
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def down(self) -> None:
        """End the cluster and all that runs on it; returns when nothing is left. A second time changes nothing."""
        self._end_keeper()
        if self.folder.exists():  # the keeper was killed, or the world has ended by itself
            release(self.folder)
            shutil.rmtree(self.folder)
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)

    def _end_keeper(self) -> None:
        if self._keeper:
            self._keeper.terminate()
            self._keeper.wait(PATIENCE)
            return
        path = self.folder / "keeper.pid"
        if path.exists() and self._is_keeper(pid := int(path.read_text())):
            os.kill(pid, signal.SIGTERM)
            until(lambda: not self._is_keeper(pid), "the cluster ends")

    def _is_keeper(self, pid: int) -> bool:
        """Tell whether a process is this cluster's keeper, and not a later one with its number."""
        return f"cluster_keeper.py {self.folder}" in _command_line(pid)

    def enter(self, where: str = "login") -> list[str]:
        """Return the words that, before a command, make it run on a node."""
        init = (self.folder / "init.pid").read_text().strip()
        world = ["nsenter", "--target", init, "--mount", "--pid", "--ipc", f"--wd={Path.cwd()}"]
        if where == "login":
            return [*world, "--net", "--uts"]
        if where not in self.names:
            raise ClusterError(f"no node {where!r}: there are login, {', '.join(self.names)}")
        return [*world, "nsenter", f"--net=/run/netns/{where}", f"--uts=/run/hostnames/{where}"]

    def run(self, where: str, *command: str, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command on a node to its end; raises ClusterError where it fails, unless check is False."""
        options = {"capture_output": True, "stdin": subprocess.DEVNULL, **options}
        environment = {**_environment(), **self.env}
        done = subprocess.run([*self.enter(where), *command], env=environment, text=True, **options)
        if check and done.returncode:
            raise ClusterError(f"{where}: {' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def processes(self, node: str, text: str = "") -> list[int]:
        """Return the processes of a node whose command line holds a text, as numbers to use outside."""
        network = self.run(node, "readlink", "/proc/self/ns/net").stdout.strip()
        return [pid for pid in processes_in(network) if text in _command_line(pid)]

    def kill_slurmd(self, node: str) -> None:
        """Kill a node's slurmd; what it has started runs on."""
        self._known(node)
        self.run("login", "sh", "-c", f"kill -9 $(cat /run/slurmd.{node}.pid)")

    def start_slurmd(self, node: str) -> None:
        self._known(node)
        self.run("login", *slurmd(self.folder, node))

    def _uncache(self) -> None:
        for node in self.names:
            if result := self.processes(node, "bindfs -o "):
                self.kill_slurmd(node)
                kill(result)

    def power_off(self, node: str) -> None:
        """Silence a node: first its link, so that nobody hears of the end of what is then killed."""
        self._link(node, "down")
        until(lambda: not self._kill_all(node), f"everything on {node} ends")

    def power_on(self, node: str) -> None:
        self._link(node, "up")
        self.start_slurmd(node)

    def set_rate(self, node: str, rate: str) -> None:
        """Change the speed of one node's link, both ways, at once; "off" takes the shaping away."""
        self._shape([node], rate)

    def _shape(self, nodes: Sequence[str], rate: str) -> None:
        numbers = {node: self._known(node) for node in nodes}
        if rate == "off":  # those that are off already have nothing to delete
            calls = [
                (f"qdisc del dev link{k} root", f"-n {node} qdisc del dev eth0 root") for node, k in numbers.items()
            ]
        else:
            calls = [shaping(k, node, rate) for node, k in numbers.items()]
        script = "\n".join(f"tc {options}" for pair in calls for options in pair)
        self.run("login", "sh", "-c" if rate == "off" else "-ec", script, check=rate != "off")

    def _without_daemon(self) -> list[str]:
        """Return the nodes whose slurmd does not run."""
        look = "grep -qs slurmd /proc/$(cat /run/slurmd.$node.pid)/cmdline || echo $node"
        return self.run("login", "sh", "-c", f"for node in {' '.join(self.names)}; do {look}; done").stdout.split()

    def _link(self, node: str, state: str) -> None:
        self.run("login", "ip", "link", "set", f"link{self._known(node)}", state)

    def _kill_all(self, node: str) -> bool:
        """Kill what runs on a node, and tell whether there was anything."""
        result = self.processes(node)
        kill(result)
        return bool(result)

    def _known(self, node: str) -> int:
        """Return a node's number."""
        if node not in self.names:
            raise ClusterError(f"no node {node!r}: there are {', '.join(self.names)}")
        return self.names.index(node) + 1

    def reset(self) -> None:
        """End all jobs, and bring all nodes and links back to what they were."""
        self.run("login", "scancel", "--full", "--signal=KILL", "--user=root", check=False)  # nothing to wait for
        self.run("login", "scancel", "--user=root", check=False)
        self._shape(self.names, self.settings.rate)
        self._uncache()
        for node in self._without_daemon():
            self.power_on(node)
        until(lambda: not self.run("login", "squeue", "--noheader").stdout, "the queue is empty")
        for node, state in self._states().items():
            if state != "idle":
                self.run("login", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        until(lambda: set(self._states().values()) == {"idle"}, "all nodes are idle")

    def _states(self) -> dict[str, str]:
        table = self.run("login", "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t").stdout
        return dict(line.split() for line in table.splitlines())


def until(true: Callable[[], object], what: str, *, seconds: float = 60.0) -> None:
    """Wait for something to become true; raises ClusterError where it does not in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def _arguments(words: Sequence[str]) -> argparse.Namespace:
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


def _up(arguments: argparse.Namespace) -> None:
    wishes = {wish.name: getattr(arguments, wish.name) for wish in fields(Settings) if hasattr(arguments, wish.name)}
    cluster = SlurmCluster(folder=arguments.folder, **wishes).up(tied=False)
    print(f"export PATH={cluster.folder}/bin:$PATH SLURM_CONF={cluster.folder}/slurm.conf")


def _act(arguments: argparse.Namespace) -> int:
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
    arguments = _arguments(sys.argv[1:])
    match arguments.command:
        case "check":
            reason = describe_why_no_cluster()
            print(reason or "a cluster can live here")
            return 1 if reason else 0
        case "install":
            install()
            return 0
        case "down" if not arguments.folder.exists():
            return 0
    try:
        if arguments.command == "up":
            _up(arguments)
            return 0
        return _act(arguments)
    except FileNotFoundError as error:
        return f"no cluster in {arguments.folder} ({error})"
    except (ClusterError, ValueError) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
