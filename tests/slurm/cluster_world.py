"""The first process of a cluster's private world: builds the network, starts the daemons, reaps whatever ends.

It is started by cluster_keeper.py in new network, mount, host name, IPC and process namespaces, so nothing that is
done here is seen outside, and the kernel ends all of it with this process.
"""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster_files import INSIDE, LOGIN, Settings, hosts

PATIENCE = 60.0  # seconds; a loaded machine starts daemons slowly
_DATABASE = Path("/run/mysqld/mysqld.sock")  # where slurmdbd looks for it


def call(*command: str, check: bool = True) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(0.02)


def furnish(settings: Settings) -> None:
    """Make the places that the daemons write to; in memory, because MariaDB's fsyncs on a disk take seconds."""
    call("mount", "--make-rprivate", "/")
    call("mount", "-t", "tmpfs", "none", "/run")
    INSIDE.touch()
    for name in ("netns", "hostnames", "mysqld", "slurmctld", "slurmd"):
        Path("/run", name).mkdir()
    for gpu in range(settings.gpus):
        os.mknod(f"/run/gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # a twin of /dev/null
    Path("/run/hosts").write_text(hosts(settings))
    call("mount", "--bind", "/run/hosts", "/etc/hosts")


def connect(settings: Settings) -> None:
    """Make the login node's network, and for every node a network of its own with one link to it."""
    for scope in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")
    lines = [
        "set -e",
        "hostname login",
        "ip link set lo up",
        "ip link add bridge type bridge forward_delay 0",
        "ip link set bridge up",
        f"ip addr add {LOGIN}/24 dev bridge",
    ]
    for number, (name, address) in enumerate(settings.addresses.items(), 1):
        lines += _node_network(number, name, address)
        if settings.rate != "off":
            lines += [f"tc {options}" for options in shaping(number, name, settings.rate)]
    call("sh", "-c", "\n".join(lines))


def _node_network(number: int, name: str, address: str) -> list[str]:
    return [
        f"ip netns add {name}",
        f"ip link add link{number} type veth peer name eth0 netns {name}",
        f"ip link set link{number} master bridge up",
        f"ip -n {name} addr add {address}/24 dev eth0",
        f"ip -n {name} link set lo up",
        f"ip -n {name} link set eth0 up",
        f"touch /run/hostnames/{name}",
        f"unshare --uts=/run/hostnames/{name} hostname {name}",
    ]


def shaping(number: int, name: str, rate: str) -> tuple[str, str]:
    """Return the options of the two calls of tc that shape a node's link: out of the node, and into it."""
    shape = f"root tbf rate {rate} burst 256kb latency 50ms"
    return f"qdisc replace dev link{number} {shape}", f"-n {name} qdisc replace dev eth0 {shape}"


def start_munge(folder: Path) -> None:
    call(
        "munged", "--force",  # or it refuses a socket in a folder that is closed to others, as pytest's are
        f"--key-file={folder}/munge.key", f"--socket={folder}/run/munge.sock", "--pid-file=/run/munged.pid",
        f"--log-file={folder}/log/munged.log", "--seed-file=/run/munged.seed", "--num-threads=4",
    )  # fmt: skip


def install_database() -> None:
    """Make MariaDB's own tables; again if that fails, as it does at times beside tests that take the machine's memory."""
    for attempts_left in (2, 1, 0):
        try:
            call(
                "mariadb-install-db", "--no-defaults", "--datadir=/run/database", "--user=root", "--skip-test-db",
                "--auth-root-authentication-method=normal", "--skip-name-resolve",
            )  # fmt: skip
            return
        except RuntimeError:
            if not attempts_left:
                raise
            shutil.rmtree("/run/database", ignore_errors=True)
            time.sleep(5)


def start_accounting(folder: Path) -> None:
    """Start MariaDB and slurmdbd, and enter the one account and its user."""
    log = folder / "log" / "mariadb.log"
    install_database()
    command = [
        "mariadbd", "--no-defaults", "--datadir=/run/database", "--user=root", "--skip-networking",
        f"--socket={_DATABASE}", "--innodb-buffer-pool-size=32M", "--performance-schema=OFF",
        "--innodb-lock-wait-timeout=900", f"--log-error={log}",
    ]  # fmt: skip
    subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # Its socket is there before that, and slurmdbd ends where it is answered too early.
    until(lambda: log.exists() and "ready for connections" in log.read_text(errors="replace"), "MariaDB answers")
    call("slurmdbd")
    until(lambda: _answers("sacctmgr", "--noheader", "show", "cluster"), "slurmdbd answers")
    call("sacctmgr", "--immediate", "add", "cluster", "tula")
    call("sacctmgr", "--immediate", "add", "account", "lab", "Cluster=tula")
    call("sacctmgr", "--immediate", "add", "user", "root", "Account=lab", "Cluster=tula", "DefaultAccount=lab")


def _answers(*command: str) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def start_slurm(folder: Path, settings: Settings) -> None:
    call("slurmctld", "-c")
    for name in settings.names:
        call(*slurmd(folder, name))
    until(lambda: _idle() == settings.nodes, "all nodes are idle")


def slurmd(folder: Path, name: str, *, before: str = "") -> list[str]:
    """Return the command that starts a node's slurmd: in its own network, under its own name, with its own disk.

    Args:
        folder: of the cluster.
        name: of the node.
        before: what else is mounted there, as words of a shell.
    """
    # Not `ip netns exec`: it mounts another /sys, and the cgroups are gone.
    enter = ["nsenter", f"--net=/run/netns/{name}", f"--uts=/run/hostnames/{name}", "unshare", "--mount"]
    script = f"mkdir -p /run/slurmd/{name}; mount -t tmpfs none {folder}/local; {before or 'true'}; slurmd -N {name}"
    return [*enter, "sh", "-ec", script]


def _idle() -> int:
    count = call("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D", check=False)
    return sum(int(line) for line in count.split())


def reap() -> None:
    """Take leave of every process that ends, for as long as the cluster lives."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.5)


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings.load(folder)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    furnish(settings)
    connect(settings)
    start_munge(folder)
    if settings.accounting:
        start_accounting(folder)
    start_slurm(folder, settings)
    (folder / "ready").touch()
    reap()


if __name__ == "__main__":
    main()
