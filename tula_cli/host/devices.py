"""The device files of this node's GPUs, who holds them, and how much of the GPUs' memory is in use. No library is loaded."""

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tula_cli.host.processes import PROC_FOLDER, run_command

GPU_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of a node that has GPUs to compute on: NVIDIA's driver, AMD's, and Windows' under WSL."""
DEVICE_FILES = [r"/dev/nvidia[^/]*", r"/dev/kfd", r"/dev/dri/.*"]
"""Device files that a process on a GPU has open: the driver keeps its memory until the last copy is closed."""
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that list the GPUs which a process is to see: NVIDIA's the first, AMD's all three."""
DEV, KFD = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
"""Where NVIDIA's driver has a file a GPU, and AMD's a folder a processor or GPU."""
NVIDIA_SMI_TIMEOUT = 20.0
"""Seconds that nvidia-smi may take; on a node with many GPUs and without its persistence daemon that is long."""


def has_gpu() -> bool:
    """Return whether the driver of a GPU is at work here."""
    return any(Path(name).exists() for name in GPU_DRIVER_FILES)


def count_gpus() -> int:
    """Return how many GPUs there are to compute on here, as far as their drivers tell; no library is asked.

    The variables in `VISIBILITY_VARIABLES` hold; without a driver's files there is none.
    """
    return len(list_visible_gpus())


def list_visible_gpus() -> list[str]:
    """Return the GPUs to compute on here in their order: the drivers' numbers, or what the variables in `VISIBILITY_VARIABLES` name."""
    if not has_gpu():
        return []
    nvidia = [path for path in DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    amd = [path for path in KFD.glob("*/gpu_id") if path.read_text(encoding="ascii").strip() not in ("", "0")]
    gpu_total = len(nvidia) or len(amd)
    gpus = (
        [str(number) for number in range(gpu_total)] if gpu_total else None
    )  # None: a driver that lists none, as under WSL
    for name in _list_visibility_variables(nvidia=bool(nvidia)):
        gpus = _select_gpus(os.environ[name], gpus)
    return ["0"] if gpus is None else gpus


def list_lock_names(ranks: int) -> list[str]:
    """Return the GPUs that the first ranks of this machine use, under names that are the same in all of its processes.

    UUIDs, as far as nvidia-smi reports them; else numbers.
    """
    gpus = list_visible_gpus()
    if not gpus:
        return []
    rows = [row for row in _run_nvidia_smi("--query-gpu=index,uuid,name") if len(row) == 3]
    mixed = len({row[2] for row in rows}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if mixed and any(gpu.isdecimal() for gpu in gpus):
        return [
            uuid for _, uuid, _ in rows
        ]  # CUDA numbers them by their speed, nvidia-smi by their bus: any may be meant
    uuids = {index: uuid for index, uuid, _ in rows}
    used = dict.fromkeys(gpus[rank % len(gpus)] for rank in range(ranks))
    return [uuids.get(gpu) or next((uuid for uuid in uuids.values() if uuid.startswith(gpu)), gpu) for gpu in used]


def _list_visibility_variables(*, nvidia: bool) -> list[str]:
    """Return the variables that hide GPUs here, in the order in which they do.

    AMD's driver goes by ROCR_VISIBLE_DEVICES; HIP numbers what that leaves anew, and goes by HIP_VISIBLE_DEVICES, or else
    by CUDA_VISIBLE_DEVICES. NVIDIA's knows the last one alone.
    """
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    names = ["CUDA_VISIBLE_DEVICES"] if nvidia else ["ROCR_VISIBLE_DEVICES", hip]
    return [name for name in names if name in os.environ]


def _select_gpus(listed: str, available: Sequence[str] | None) -> list[str]:
    """Return the GPUs that a list leaves of those `there`; the first that is none of them ends it (-1, SLURM's NoDevFiles)."""
    selected: list[str] = []
    for entry in map(str.strip, listed.split(",")):
        if entry.isdecimal() and (available is None or int(entry) < len(available)):
            selected.append(entry if available is None else available[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            selected.append(entry)
        else:
            break
    return selected if available is None else selected[: len(available)]


def close_inherited() -> None:
    """Close the device files that this process has from its parent, and nothing else: for one that computes on no GPU."""
    for link in list(Path("/proc/self/fd").iterdir()):
        if int(link.name) > 2 and _is_device(link):
            with contextlib.suppress(OSError):
                os.close(int(link.name))


def find_device_holders() -> dict[int, str]:
    """Return the processes that have a device file open, with their names; only those that this user may look into."""
    names_by_pid = {}
    for process in (entry for entry in PROC_FOLDER.iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if any(_is_device(link) for link in (process / "fd").iterdir()):
                names_by_pid[int(process.name)] = (
                    (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                )
    return names_by_pid


def read_used_gpu_memory(gpus: Sequence[str] = ()) -> dict[str, int]:
    """Return the bytes in use of each GPU, as nvidia-smi tells; empty where there is none.

    Args:
        gpus: those that matter, as CUDA_VISIBLE_DEVICES names them; none for all that are to be seen.
    """
    query = ["--query-gpu=uuid,memory.used", *([f"--id={','.join(gpus)}"] if gpus else [])]
    rows = [row for row in _run_nvidia_smi(*query) if len(row) == 2 and row[1].isdigit()]
    return {uuid: int(mebibytes) * 2**20 for uuid, mebibytes in rows}


def describe_holders() -> list[str]:
    """Say which processes hold GPUs: nvidia-smi's list, else those with a device file open."""
    if rows := _run_nvidia_smi("--query-compute-apps=pid,used_memory,process_name"):
        return [f"pid {row[0]} ({row[2]}, {row[1]} MiB)" for row in rows if len(row) == 3]
    return [f"pid {pid} ({name})" for pid, name in sorted(find_device_holders().items())]


def _is_device(link: Path) -> bool:
    try:
        target = str(link.readlink())
    except OSError:
        return False
    return any(re.fullmatch(form, target) for form in DEVICE_FILES)


def _run_nvidia_smi(*arguments: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; none where there is none, or where it fails or hangs."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        completed = run_command(command, timeout=NVIDIA_SMI_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = completed.stdout.splitlines() if completed.returncode == 0 else []
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]
