"""Settings of a test cluster, and SLURM's configuration files."""

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

NETWORK = "10.77.0"  # exists only in the cluster's network namespaces
LOGIN = f"{NETWORK}.254"  # the node of slurmctld, slurmdbd and of all submissions
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "freezer", "cpuacct", "cpuset", "devices")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLIENTS = ("sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sacct", "sacctmgr", "sinfo", "sstat")
INSIDE_FOLDER = Path("/run/tula-slurm")  # exists only for processes of a cluster
_MAX_SOCKET_PATH_BYTES = 107  # maximum bytes of the path of a Unix socket


def cgroups_usable() -> bool:
    """Return whether SLURM can use cgroups here: it needs version 1 of cgroups; for version 2 it also needs systemd."""
    return all((CGROUPS / name / "release_agent").exists() for name in ("memory", "freezer", "cpuacct"))


@dataclass(frozen=True)
class Settings:
    """The requested properties of a cluster."""

    nodes: int
    prefix: str = "node"  # of node names; clusters that are up at the same time need different prefixes
    rate: str = "off"  # of each node's link in both directions, in tc's notation ("200mbit")
    accounting: bool = True  # False: sacct reports nothing, as on sites without slurmdbd
    cpus: int = 2  # per node
    memory: int = 4000  # MB per node
    gpus: int = 2  # per node; fake devices that only make SLURM set CUDA_VISIBLE_DEVICES
    gpu_type: str = "a100"  # "" for GPUs without a type
    cgroups: bool = field(default_factory=cgroups_usable)  # False: memory is sampled, not limited
    kill_wait: int = 2  # seconds from SIGTERM to SIGKILL; SLURM's default is 30
    requeue_wait: int = 5  # minimum seconds before a requeued job starts; SLURM's default is 120
    slurmd_timeout: int = (
        5  # seconds without a response until a node is DOWN, effectively about 15; SLURM's default is 300
    )
    extra: str = ""  # further lines of slurm.conf

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}{number}" for number in range(1, self.nodes + 1)]

    @property
    def addresses(self) -> dict[str, str]:
        return {name: f"{NETWORK}.{number}" for number, name in enumerate(self.names, 1)}

    @property
    def cgroup_folders(self) -> list[Path]:
        """The cgroups of the nodes' jobs: Debian's build has a separate tree for each node of one machine."""
        return [CGROUPS / controller / f"slurm_{name}" for controller in CONTROLLERS for name in self.names]

    @classmethod
    def load(cls, folder: Path) -> "Settings":
        return cls(**json.loads((folder / "settings.json").read_text()))


def write_files(folder: Path, settings: Settings) -> None:
    """Write all files that the cluster reads into a new folder."""
    socket = str(folder / "run/munge.sock")
    if len(socket) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{socket} is too long a path for a socket: choose another folder")
    if " " in socket:
        raise ValueError(f"SLURM takes no path with a space in it, as {folder} has: choose another folder")
    for name in ("run", "log", "bin", "local"):
        (folder / name).mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(asdict(settings)))
    _write_secret(folder / "munge.key", os.urandom(128))
    (folder / "slurm.conf").write_text(render_slurm_conf(folder, settings))
    (folder / "plugstack.conf").touch()
    (folder / "cgroup.conf").write_text(_CGROUP_CONF)
    (folder / "gres.conf").write_text(render_gres_conf(settings))
    _write_secret(folder / "slurmdbd.conf", _SLURMDBD_CONF.format(folder=folder, login=LOGIN).encode())
    for client in CLIENTS:
        _write_client(folder, client)


def render_hosts(settings: Settings) -> str:
    """Return the cluster's /etc/hosts: the name of a node must resolve to its address, as on real sites."""
    known = {"localhost": "127.0.0.1", "login": LOGIN, **settings.addresses}
    return "".join(f"{address} {name}\n" for name, address in known.items())


def render_slurm_conf(folder: Path, settings: Settings) -> str:
    parts = [
        _SLURM_CONF.format(folder=folder, login=LOGIN, first_job=_choose_first_job_id(), **asdict(settings)),
        _CGROUP_LIMITS if settings.cgroups else _SAMPLED_MEMORY,
        _WITH_ACCOUNTING.format(folder=folder, login=LOGIN) if settings.accounting else _WITHOUT_ACCOUNTING,
        "GresTypes=gpu" if settings.gpus else "",
        *_node_lines(settings),
        _PARTITIONS,
        settings.extra,
    ]
    return "\n".join(part.strip() for part in parts if part) + "\n"


def render_gres_conf(settings: Settings) -> str:
    """Return gres.conf: SLURM drains a node that lacks the device file of a GPU."""
    kind = f" Type={settings.gpu_type}" if settings.gpu_type else ""
    return f"AutoDetect=off\nName=gpu{kind} File=/run/gpu[0-{settings.gpus - 1}]\n" if settings.gpus else ""


def _node_lines(settings: Settings) -> list[str]:
    each = f"CPUs={settings.cpus} RealMemory={settings.memory} State=UNKNOWN"
    if settings.gpus:
        each += f" Gres={':'.join(filter(None, ('gpu', settings.gpu_type, str(settings.gpus))))}"
    return [
        f"NodeName={name} NodeHostname={name} NodeAddr={address} Feature=rack{1 + 2 * place // settings.nodes} {each}"
        for place, (name, address) in enumerate(settings.addresses.items())
    ]


def _choose_first_job_id() -> int:
    """Return a first job id that other recent or concurrent clusters are unlikely to use, so that files named by id differ."""
    return 1000 + (int(time.time()) + 17 * os.getpid()) % 30_000 * 2000


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _write_client(folder: Path, client: str) -> None:
    path = folder / "bin" / client
    program = shutil.which(client, path=SYSTEM_PATH) or client
    path.write_text(_CLIENT.format(folder=folder, program=program, inside=INSIDE_FOLDER))
    path.chmod(0o755)


_CLIENT = """\
#!/bin/sh
# Within the cluster this is the program itself; from outside it enters the login node first.
[ -e {inside} ] && exec {program} "$@"
read -r init < {folder}/init.pid || exit 1
exec nsenter --target "$init" --net --uts --ipc env SLURM_CONF={folder}/slurm.conf {program} "$@"
"""

_SLURM_CONF = """
ClusterName=tula
SlurmctldHost=login({login})
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired.
AuthInfo=socket={folder}/run/munge.sock,cred_expire={requeue_wait}

StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
FirstJobId={first_job}

SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MinJobAge=300
KillWait={kill_wait}
UnkillableStepTimeout=600
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=30
# A node is given up only when its last ping has timed out too.
MessageTimeout={slurmd_timeout}
# The nodes claim more memory and processors together than the machine has.
SlurmdParameters=config_overrides
PropagateResourceLimitsExcept=MEMLOCK
JobAcctGatherFrequency=task=1
"""

_CGROUP_LIMITS = """
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
"""

_SAMPLED_MEMORY = """
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill
"""

_WITH_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={login}
AccountingStoragePort=16819
# Towards slurmdbd the munge socket is taken from here and not from AuthInfo.
AccountingStoragePass={folder}/run/munge.sock
AccountingStorageEnforce=associations,limits,qos
"""

_WITHOUT_ACCOUNTING = "AccountingStorageType=accounting_storage/none"

# Jobs in main preempt those in spare; no job ever starts in closed.
_PARTITIONS = """
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 MaxTime=120 PriorityTier=2 PreemptMode=OFF
PartitionName=spare Nodes=ALL DefaultTime=10 MaxTime=120 PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=short Nodes=ALL DefaultTime=1 MaxTime=2 MaxNodes=2 PriorityTier=2 PreemptMode=OFF
PartitionName=closed Nodes=ALL MaxTime=120 State=DOWN
"""

_CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
"""

_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
DbdHost=login
DbdAddr={login}
DbdPort=16819
SlurmUser=root
LogFile={folder}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm_acct
StorageUser=root
"""
