"""The first process in the namespaces of a cluster: configures the network, starts the daemons, reaps exited processes.

cluster_keeper.py starts it in new network, mount, host name, IPC and process namespaces, so its changes are invisible outside,
and the kernel reverts all of them when this process exits.
"""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster_files import INSIDE_FOLDER, LOGIN, Settings, render_hosts

START_TIMEOUT_SECONDS = 60.0  # seconds; a loaded machine starts daemons slowly
_DATABASE = Path("/run/mysqld/mysqld.sock")  # path expected by slurmdbd


def run_command(*command: str, check: bool = True) -> str:
    """Run a command to its end and return its output."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {START_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.02)


def create_folders(settings: Settings) -> None:
    """Create the folders that the daemons write to; in memory, because MariaDB's fsyncs on a disk take seconds."""
    run_command("mount", "--make-rprivate", "/")
    run_command("mount", "-t", "tmpfs", "none", "/run")
    INSIDE_FOLDER.touch()
    for name in ("netns", "hostnames", "mysqld", "slurmctld", "slurmd"):
        Path("/run", name).mkdir()
    for gpu in range(settings.gpus):
        os.mknod(f"/run/gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # a second /dev/null
    Path("/run/hosts").write_text(render_hosts(settings))
    run_command("mount", "--bind", "/run/hosts", "/etc/hosts")


def create_network(settings: Settings) -> None:
    """Create the login node's network, and for each node a network namespace with one link to it."""
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
        lines += _node_network_commands(number, name, address)
        if settings.rate != "off":
            lines += [f"tc {options}" for options in tc_options(number, name, settings.rate)]
    run_command("sh", "-c", "\n".join(lines))


def _node_network_commands(number: int, name: str, address: str) -> list[str]:
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


def tc_options(number: int, name: str, rate: str) -> tuple[str, str]:
    """Return the options of the two tc calls that shape a node's link: outgoing and incoming."""
    shape = f"root tbf rate {rate} burst 256kb latency 50ms"
    return f"qdisc replace dev link{number} {shape}", f"-n {name} qdisc replace dev eth0 {shape}"


def start_munge(folder: Path) -> None:
    run_command(
        "munged", "--force",  # otherwise it rejects a socket in a private folder, such as those of pytest
        f"--key-file={folder}/munge.key", f"--socket={folder}/run/munge.sock", "--pid-file=/run/munged.pid",
        f"--log-file={folder}/log/munged.log", "--seed-file=/run/munged.seed", "--num-threads=4",
    )  # fmt: skip


def install_database() -> None:
    """Create MariaDB's system tables; retry once, because this may fail if other tests use all memory."""
    for attempts_left in (2, 1, 0):
        try:
            run_command(
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
    """Start MariaDB and slurmdbd, and add an account and its user."""
    log = folder / "log" / "mariadb.log"
    install_database()
    command = [
        "mariadbd", "--no-defaults", "--datadir=/run/database", "--user=root", "--skip-networking",
        f"--socket={_DATABASE}", "--innodb-buffer-pool-size=32M", "--performance-schema=OFF",
        "--innodb-lock-wait-timeout=900", f"--log-error={log}",
    ]  # fmt: skip
    subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # The socket exists earlier, and slurmdbd exits if it is used too early.
    wait_until(lambda: log.exists() and "ready for connections" in log.read_text(errors="replace"), "MariaDB answers")
    run_command("slurmdbd")
    wait_until(lambda: _succeeds("sacctmgr", "--noheader", "show", "cluster"), "slurmdbd answers")
    run_command("sacctmgr", "--immediate", "add", "cluster", "tula")
    run_command("sacctmgr", "--immediate", "add", "account", "lab", "Cluster=tula")
    run_command("sacctmgr", "--immediate", "add", "user", "root", "Account=lab", "Cluster=tula", "DefaultAccount=lab")


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def start_slurm(folder: Path, settings: Settings) -> None:
    run_command("slurmctld", "-c")
    for name in settings.names:
        run_command(*make_slurmd_command(folder, name))
    wait_until(lambda: _count_idle_nodes() == settings.nodes, "all nodes are idle")


def make_slurmd_command(folder: Path, name: str, *, before: str = "") -> list[str]:
    """Return the command that starts a node's slurmd with its own network, host name and disk.

    Args:
        folder: of the cluster.
        name: of the node.
        before: shell commands for further mounts.
    """
    # Not `ip netns exec`, which mounts another /sys without the cgroups.
    enter = ["nsenter", f"--net=/run/netns/{name}", f"--uts=/run/hostnames/{name}", "unshare", "--mount"]
    script = f"mkdir -p /run/slurmd/{name}; mount -t tmpfs none {folder}/local; {before or 'true'}; slurmd -N {name}"
    return [*enter, "sh", "-ec", script]


def _count_idle_nodes() -> int:
    count = run_command("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D", check=False)
    return sum(int(line) for line in count.split())


def reap_processes() -> None:
    """Reap all exited processes until the cluster ends."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.5)


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings.load(folder)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    create_folders(settings)
    create_network(settings)
    start_munge(folder)
    if settings.accounting:
        start_accounting(folder)
    start_slurm(folder, settings)
    (folder / "ready").touch()
    reap_processes()


if __name__ == "__main__":
    main()
