"""The GPUs of this node: device files, processes that hold them, and used memory. No library is loaded."""

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tula_cli.host.processes import PROC_FOLDER, run_command

GPU_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files that exist on nodes with GPUs: of the drivers of NVIDIA and AMD, and of Windows under WSL."""
DEVICE_FILES = [r"/dev/nvidia[^/]*", r"/dev/kfd", r"/dev/dri/.*"]
"""Patterns of device files that a process on a GPU has open; its memory is kept until the last copy is closed."""
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that select the GPUs visible to a process: the first for NVIDIA, all three for AMD."""
DEVICE_FOLDER, KFD_FOLDER = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
"""Folders in which NVIDIA's driver has one file per GPU, and AMD's one folder per processor or GPU."""
NVIDIA_SMI_TIMEOUT = 20.0
"""Timeout of nvidia-smi in seconds; it is slow on nodes with many GPUs without the persistence daemon."""


def has_gpu() -> bool:
    """Return whether a GPU driver is active on this node."""
    return any(Path(name).exists() for name in GPU_DRIVER_FILES)


def count_gpus() -> int:
    """Return the number of visible GPUs, from files of their drivers, without loading a library.

    The variables in `VISIBILITY_VARIABLES` are respected; without files of a driver there are no GPUs.
    """
    return len(list_visible_gpus())


def list_visible_gpus() -> list[str]:
    """Return the visible GPUs in order: the drivers' numbers, or names from `VISIBILITY_VARIABLES` (UUIDs)."""
    if not has_gpu():
        return []
    nvidia = [path for path in DEVICE_FOLDER.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    amd = [path for path in KFD_FOLDER.glob("*/gpu_id") if path.read_text(encoding="ascii").strip() not in ("", "0")]
    gpu_total = len(nvidia) or len(amd)
    # None: the driver lists no GPUs, as under WSL.
    gpus = [str(number) for number in range(gpu_total)] if gpu_total else None
    for name in _list_visibility_variables(nvidia=bool(nvidia)):
        gpus = _select_gpus(os.environ[name], gpus)
    return ["0"] if gpus is None else gpus


def list_gpu_lock_names(ranks: int) -> list[str]:
    """Return the GPUs that the first `ranks` ranks of this machine use, by names that are the same in all processes.

    The names are UUIDs if nvidia-smi reports them, else numbers. All GPUs are returned if the machine has different
    GPUs whose numbers in CUDA and nvidia-smi may differ.
    """
    gpus = list_visible_gpus()
    if not gpus:
        return []
    rows = [row for row in _run_nvidia_smi("--query-gpu=index,uuid,name") if len(row) == 3]
    mixed = len({row[2] for row in rows}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    # CUDA numbers GPUs by speed, nvidia-smi by bus: a number may mean any of them.
    if mixed and any(gpu.isdecimal() for gpu in gpus):
        return [uuid for _, uuid, _ in rows]
    uuids = {index: uuid for index, uuid, _ in rows}
    used = dict.fromkeys(gpus[rank % len(gpus)] for rank in range(ranks))
    return [uuids.get(gpu) or next((uuid for uuid in uuids.values() if uuid.startswith(gpu)), gpu) for gpu in used]


def _list_visibility_variables(*, nvidia: bool) -> list[str]:
    """Return the variables that hide GPUs in this process, in the order in which they apply.

    AMD's driver uses ROCR_VISIBLE_DEVICES; HIP renumbers the remaining GPUs and uses HIP_VISIBLE_DEVICES, or else
    CUDA_VISIBLE_DEVICES. NVIDIA uses only CUDA_VISIBLE_DEVICES.
    """
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    names = ["CUDA_VISIBLE_DEVICES"] if nvidia else ["ROCR_VISIBLE_DEVICES", hip]
    return [name for name in names if name in os.environ]


def _select_gpus(listed: str, available: Sequence[str] | None) -> list[str]:
    """Return the GPUs of `available` in a list up to its first invalid entry (-1, SLURM's NoDevFiles)."""
    selected: list[str] = []
    for entry in map(str.strip, listed.split(",")):
        if entry.isdecimal() and (available is None or int(entry) < len(available)):
            selected.append(entry if available is None else available[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            selected.append(entry)
        else:
            break
    return selected if available is None else selected[: len(available)]


def close_inherited_device_files() -> None:
    """Close only the device files inherited from the parent, in a process that uses no GPU."""
    for link in list(Path("/proc/self/fd").iterdir()):
        if int(link.name) > 2 and _is_device(link):
            with contextlib.suppress(OSError):
                os.close(int(link.name))


def find_device_holders() -> dict[int, str]:
    """Return the processes that have a device file open, with their names, as far as this user may inspect them."""
    names_by_pid = {}
    for process in (entry for entry in PROC_FOLDER.iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):  # the process belongs to another user or has exited
            if any(_is_device(link) for link in (process / "fd").iterdir()):
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                names_by_pid[int(process.name)] = name
    return names_by_pid


def read_used_gpu_memory(gpus: Sequence[str]) -> dict[str, int]:
    """Return the used bytes of the GPUs (named as in CUDA_VISIBLE_DEVICES; empty: all); empty without nvidia-smi."""
    selection = [f"--id={','.join(gpus)}"] if gpus else []
    rows = [
        row for row in _run_nvidia_smi("--query-gpu=uuid,memory.used", *selection) if len(row) == 2 and row[1].isdigit()
    ]
    return {uuid: int(mebibytes) * 2**20 for uuid, mebibytes in rows}


def describe_gpu_holders() -> list[str]:
    """Return descriptions of the processes that hold GPUs: from nvidia-smi, else those with a device file open."""
    if rows := _run_nvidia_smi("--query-compute-apps=pid,used_memory,process_name"):
        return [f"pid {row[0]} ({row[2]}, {row[1]} MiB)" for row in rows if len(row) == 3]
    return [f"pid {pid} ({name})" for pid, name in sorted(find_device_holders().items())]


def _is_device(link: Path) -> bool:
    try:
        target = str(link.readlink())
    except OSError:
        return False
    return any(re.fullmatch(form, target) for form in DEVICE_FILES)


def _run_nvidia_smi(query: str, *arguments: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; empty if it is missing, fails or hangs.

    Args:
        query: the columns, separated by commas; the last one may contain commas.
    """
    command = ["nvidia-smi", query, *arguments, "--format=csv,noheader,nounits"]
    try:
        completed = run_command(command, timeout=NVIDIA_SMI_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = completed.stdout.splitlines() if completed.returncode == 0 else []
    return [[cell.strip() for cell in line.split(",", query.count(","))] for line in lines if line.strip()]
