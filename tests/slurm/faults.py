"""What a test does to a whole cluster beyond what happens to single nodes."""

import shlex
from pathlib import Path

from cluster import SlurmCluster, until
from cluster_world import slurmd


def cache_attributes(cluster: SlurmCluster, folder: Path, seconds: int) -> None:
    """Let every node see a folder through a file system of its own that keeps what it knows of files for so long.

    Their attributes, where names lead, and which names are missing, as NFS does and for longer; `reset` ends it.
    """
    kept = ",".join(f"{what}_timeout={seconds}" for what in ("attr", "entry", "negative"))
    place = shlex.quote(str(folder))
    for node in cluster.names:
        cluster.kill_slurmd(node)
        cluster.run("login", *slurmd(cluster.folder, node, before=f"bindfs -o {kept} {place} {place}"))
    until(lambda: _idle(cluster) == len(cluster.names), "all nodes are back")


def _idle(cluster: SlurmCluster) -> int:
    completed = cluster.run(
        "login", "sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D", check=False
    )
    return sum(map(int, completed.stdout.split()))


def in_mounts_of(cluster: SlurmCluster, script: str, *, node: int = 0) -> None:
    """Run shell words among the mounts of a node, which its jobs see and nobody else."""
    pid = cluster.run("login", "cat", f"/run/slurmd.{cluster.names[node]}.pid").stdout.strip()
    cluster.run("login", "nsenter", "--target", pid, "--mount", "sh", "-ec", script)


def kill_daemon(cluster: SlurmCluster, name: str) -> None:
    """Kill the controller (slurmctld) or what keeps the accounting (slurmdbd)."""
    cluster.run("login", "sh", "-c", f"kill -9 $(pidof {name})")


def start_daemon(cluster: SlurmCluster, name: str) -> None:
    """Start it again; returns when it answers."""
    cluster.run("login", name)
    look = ("squeue",) if name == "slurmctld" else ("sacctmgr", "--noheader", "show", "cluster")
    until(lambda: cluster.run("login", *look, check=False).returncode == 0, f"{name} answers")


def part(cluster: SlurmCluster, one: str, other: str) -> None:
    """Keep two nodes from reaching each other; connections are given up after seconds, in place of a quarter of an hour."""
    for node, peer in ((one, other), (other, one)):
        cluster.run(node, "sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2")
        cluster.run(node, "ip", "route", "add", "blackhole", f"{cluster.settings.addresses[peer]}/32")


def join(cluster: SlurmCluster, one: str, other: str) -> None:
    """Let two nodes reach each other again."""
    for node, peer in ((one, other), (other, one)):
        cluster.run(node, "ip", "route", "del", "blackhole", f"{cluster.settings.addresses[peer]}/32")
        cluster.run(node, "sh", "-c", "echo 15 > /proc/sys/net/ipv4/tcp_retries2")
