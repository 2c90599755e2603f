"""What building model and dataset told is kept beside the runs, under a key of everything that it depends on.

Nothing is imported to find the key, so that it takes milliseconds where building takes seconds.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tula_cli import words
from tula_cli.cluster.inspection import Inspect, other_interpreter
from tula_cli.cluster.local import environment_with_package
from tula_cli.errors import TulaError
from tula_cli.host import installed
from tula_cli.host.processes import run_command
from tula_cli.host.processor import processor_name
from tula_cli.run.code import code_digest
from tula_cli.run.files import list_files, list_names, make_folder, read_record, write_record
from tula_cli.run.imports import installed_packages
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec, beta2_half_life
from tula_cli.spec.signature import signature

BUILDING = "building the model and the dataset"
FOLDER = ".inspections"
MAX_ENTRIES_KEPT = 50
MAX_DAYS = 30.0
MAX_FILES_SEEN = 5_000
"""Files and folders of a dataset whose times are looked at."""
MAX_DEPTH = 1
"""Folders below a dataset's root that are looked through: root/split; root/split/class tells by its own time."""
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that say which of the machine's GPUs there are."""
VERSIONS_TIMEOUT = 60.0  # seconds that another interpreter has to tell its versions

Facts = dict[str, Any]


@dataclass
class CachedInspection:
    """Inspects a job, unless that was done before and nothing it depends on has changed since.

    Args:
        root: where runs are kept.
        build: builds model and dataset in a process of its own.
        fresh: build anew; what is found is kept all the same.
        keep: whether anything may be written.
        note: is told what is done.
        facts: tells what the answer depends on.
    """

    root: Path
    build: Inspect
    fresh: bool = False
    keep: bool = True
    note: Callable[[str], object] = lambda _: None
    facts: Callable[[JobSpec], Facts] = lambda spec: inspection_dependencies(spec)

    def __call__(self, spec: JobSpec) -> Inspection:
        """Return what building model and dataset tells.

        Raises:
            SpecError: the model, dataset, optimizer ... of the spec cannot be built.
            JobFailed: the user's code failed, or took too long.
        """
        if spec.script is not None:
            return self.build(spec)  # nothing is built
        facts_before = self.facts(spec)
        path = self._path(facts_before)
        cached = None if self.fresh else _read(path)
        if cached is not None:
            age = words.duration(max(0.0, time.time() - (_changed_at(path) / 1e9 or time.time())))
            self.note(f"the model and the dataset are as they were built {age} ago (--fresh builds them anew)")
            return cached
        self.note(BUILDING)
        inspection = self.build(spec)
        if self.keep:
            after = self.facts(spec)  # building may have downloaded the dataset
            if {**facts_before, "dataset": None} == {**after, "dataset": None}:
                self._keep(self._path(after), inspection)
        return inspection

    def _path(self, facts: Facts) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        return self.root / FOLDER / f"{digest[:16]}.json"

    def _keep(self, path: Path, inspection: Inspection) -> None:
        # A folder that cannot be written costs the next command some seconds, not this one its answer.
        with contextlib.suppress(TulaError, OSError):
            make_folder(path.parent)
            path.parent.chmod(0o700)  # as the runs beside it: an older tula made it by the umask
            write_record(path, inspection)
        with contextlib.suppress(TulaError):
            _remove_old(path.parent)


def _read(path: Path) -> Inspection | None:
    try:
        return read_record(path, TypeAdapter(Inspection))
    except TulaError:  # damaged: it is built anew and replaced
        return None


def _remove_old(folder: Path) -> None:
    """Remove what is old, and of the rest all but the newest."""
    # Another command may sweep at the same time: what is gone has changed at 0.
    entries = [(changed, entry) for entry in list_files(folder) if (changed := _changed_at(entry) / 1e9)]
    for number, (changed, path) in enumerate(sorted(entries, reverse=True)):
        if number >= MAX_ENTRIES_KEPT or time.time() - changed > MAX_DAYS * 86400:
            with contextlib.suppress(OSError):
                path.unlink()


# --- what an inspection depends on


def inspection_dependencies(spec: JobSpec) -> Facts:
    """Return everything that an inspection of a job depends on, as JSON.

    Raises:
        SpecError: a file of the user's code cannot be read.
    """
    return {
        "signature": signature(spec),
        "others": unmeasured_settings(spec),
        "code": code_digest(spec, Path.cwd()),
        "hardware": _describe_hardware(),
        "packages": _package_versions(spec),
        "tula": max(_changed_at(path) for path in Path(__file__).parents[1].rglob("*.py")),
        "dataset": [
            newest_change(Path(place)) for place in (spec.dataset.root, *_path_candidates(spec.dataset.args.values()))
        ],
    }


def unmeasured_settings(spec: JobSpec) -> Facts:
    """Return what an inspection reads of the settings that a measurement does not depend on."""
    search, train, half_life = spec.search, spec.train, beta2_half_life(spec)
    ranks = max(search.nodes) * spec.cluster.gpus_per_node
    return {
        "several_ranks": ranks > 1,
        # The memory of this machine is shared by the ranks; the check for a lone sample looks at the smallest batch.
        "share": ranks if spec.cluster.kind == "local" and spec.cluster.memory_per_gpu is None else None,
        "one_sample": search.min_batch // (ranks * train.accumulate) <= 1,
        "ghosts": [search.nodes, search.min_batch, search.max_batch] if train.ghost_batch else None,
        "weight_decay": spec.optimizer.weight_decay > 0,  # some optimizers take none
        "beta2": [half_life, search.min_batch, search.max_batch] if half_life else None,
        "test": spec.dataset.test and spec.dataset.test.model_dump(mode="json"),
        "metrics": train.metrics,
        "arms": spec.auto.model_dump(mode="json") if train.facts.tunes else None,
    }


def _package_versions(spec: JobSpec) -> Facts:
    """Return the versions of Python, torch and the packages that the job names, as the jobs' interpreter has them."""
    modules = ("torch", "torchvision", *installed_packages(spec, Path.cwd()))
    other_python = other_interpreter(spec)
    if other_python is None:
        return installed.installed_versions(modules)
    command = ["bash", "-c", f"{other_python} -m {installed.PROGRAM} {shlex.join(modules)}"]
    try:
        completed = run_command(command, timeout=VERSIONS_TIMEOUT, environ=environment_with_package())
        return dict(json.loads(completed.stdout.strip().splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, TypeError, IndexError):
        return {"unknown": secrets.token_hex()}  # it cannot run here, or says nothing: nothing kept is known to hold


def newest_change(root: Path) -> list[int]:
    """Return the newest change in a folder (ns of Unix time) and how many entries were looked at; empty without one.

    A file that is rewritten in place more than `MAX_DEPTH` folders down is not seen.
    """
    if not _changed_at(root):
        return []
    changes = [_changed_at(root)]
    for change in _changes_in(root, MAX_DEPTH):
        changes.append(change)
        if len(changes) > MAX_FILES_SEEN:
            break
    return [max(changes), len(changes)]


def _changes_in(folder: Path, depth: int) -> Iterator[int]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        yield _changed_at(Path(entry.path))
        if depth and entry.is_dir():
            yield from _changes_in(Path(entry.path), depth - 1)


def _describe_hardware() -> Mapping[str, object]:
    """Return the machine as the kernel and the drivers tell it."""
    gpus = [path.read_text(errors="replace") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return {
        "cpu": processor_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES"),
        "limit": _read_text(Path("/sys/fs/cgroup/memory.max")),
        "driver": _read_text(Path("/proc/driver/nvidia/version")),
        "gpus": gpus,
        "devices": [name for name in list_names(Path("/dev")) if name.startswith(("nvidia", "kfd"))],
        "visible": {name: os.environ.get(name) for name in DEVICES},
    }


def _path_candidates(values: Iterable[object]) -> list[str]:
    """Return what may be paths among a dataset's own arguments."""
    return [value for value in values if isinstance(value, str) and 0 < len(value) < 4096]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
