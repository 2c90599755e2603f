"""Faults of a whole cluster, in addition to faults of single nodes."""

import shlex
from pathlib import Path

from cluster import SlurmCluster, wait_until
from cluster_world import make_slurmd_command


def cache_attributes(cluster: SlurmCluster, folder: Path, seconds: int) -> None:
    """Mount a folder on each node through a separate file system that caches file attributes for `seconds`.

    It caches attributes, lookups and missing names, as NFS does, but longer; `reset` unmounts it.
    """
    kept = ",".join(f"{what}_timeout={seconds}" for what in ("attr", "entry", "negative"))
    place = shlex.quote(str(folder))
    for node in cluster.names:
        cluster.kill_slurmd(node)
        cluster.run("login", *make_slurmd_command(cluster.folder, node, before=f"bindfs -o {kept} {place} {place}"))
    wait_until(lambda: _count_idle_nodes(cluster) == len(cluster.names), "all nodes are back")


def _count_idle_nodes(cluster: SlurmCluster) -> int:
    completed = cluster.run(
        "login", "sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D", check=False
    )
    return sum(map(int, completed.stdout.split()))


def run_in_mounts(cluster: SlurmCluster, script: str, *, node: int = 0) -> None:
    """Run shell commands in the mount namespace of a node, which only its jobs share."""
    pid = cluster.run("login", "cat", f"/run/slurmd.{cluster.names[node]}.pid").stdout.strip()
    cluster.run("login", "nsenter", "--target", pid, "--mount", "sh", "-ec", script)


def kill_daemon(cluster: SlurmCluster, name: str) -> None:
    """Kill the controller (slurmctld) or the accounting daemon (slurmdbd)."""
    cluster.run("login", "sh", "-c", f"kill -9 $(pidof {name})")


def start_daemon(cluster: SlurmCluster, name: str) -> None:
    """Start the daemon again, and return when it responds."""
    cluster.run("login", name)
    look = ("squeue",) if name == "slurmctld" else ("sacctmgr", "--noheader", "show", "cluster")
    wait_until(lambda: cluster.run("login", *look, check=False).returncode == 0, f"{name} answers")


def block_connection(cluster: SlurmCluster, one: str, other: str) -> None:
    """Block the connection between two nodes; connections time out within seconds instead of a quarter of an hour."""
    for node, peer in ((one, other), (other, one)):
        cluster.run(node, "sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2")
        cluster.run(node, "ip", "route", "add", "blackhole", f"{cluster.settings.addresses[peer]}/32")


def restore_connection(cluster: SlurmCluster, one: str, other: str) -> None:
    """Restore the connection between two nodes."""
    for node, peer in ((one, other), (other, one)):
        cluster.run(node, "ip", "route", "del", "blackhole", f"{cluster.settings.addresses[peer]}/32")
        cluster.run(node, "sh", "-c", "echo 15 > /proc/sys/net/ipv4/tcp_retries2")
