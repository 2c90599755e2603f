"""What building model and dataset told is kept beside the runs, under a key of everything that it depends on.

Nothing is imported to find the key: packages and their versions are the names of the `.dist-info` folders that the
interpreter looks through.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tula_cli import words
from tula_cli.cluster.inspection import Inspect
from tula_cli.errors import TulaError
from tula_cli.run.code import fingerprint
from tula_cli.run.files import listing, read_record, write_record
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec

BUILDING = "building the model and the dataset"
FOLDER = ".inspections"
MOST_KEPT = 50
MOST_DAYS = 30.0
MOST_ENTRIES = 5_000
"""Files and folders of a dataset whose times are looked at."""
DEPTH = 1
"""Folders below a dataset's root that are looked through: root/split; root/split/class tells by its own time."""
ENVIRONMENT = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TORCH_HOME")

Facts = dict[str, Any]


@dataclass
class KeptInspection:
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
    facts: Callable[[JobSpec], Facts] = lambda spec: facts_of(spec)

    def __call__(self, spec: JobSpec) -> Inspection:
        """Return what building model and dataset tells.

        Raises:
            SpecError: the model, dataset, optimizer ... of the spec cannot be built.
            JobFailed: the user's code failed, or took too long.
        """
        before = self.facts(spec)
        path = self._path(before)
        kept = None if self.fresh else _read(path)
        if kept is not None:
            age = words.duration(max(0.0, time.time() - path.stat().st_mtime))
            self.note(f"the model and the dataset are as they were built {age} ago (--fresh builds them anew)")
            return kept
        self.note(BUILDING)
        found = self.build(spec)
        after = self.facts(spec)  # building may have downloaded the dataset
        if self.keep and {**before, "dataset": None} == {**after, "dataset": None}:
            self._keep(self._path(after), found)
        return found

    def _path(self, facts: Facts) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        return self.root / FOLDER / f"{digest[:16]}.json"

    def _keep(self, path: Path, found: Inspection) -> None:
        # A folder that cannot be written costs the next command some seconds, not this one its answer.
        with contextlib.suppress(TulaError):
            write_record(path, found)
        _sweep(path.parent)


def _read(path: Path) -> Inspection | None:
    try:
        return read_record(path, TypeAdapter(Inspection))
    except TulaError:  # damaged: it is built anew and replaced
        return None


def _sweep(folder: Path) -> None:
    """Remove what is old, and of the rest all but the newest."""
    found = [(entry.stat().st_mtime, entry) for entry in listing(folder) if entry.exists()]
    for number, (changed, path) in enumerate(sorted(found, reverse=True)):
        if number >= MOST_KEPT or time.time() - changed > MOST_DAYS * 86400:
            with contextlib.suppress(OSError):
                path.unlink()


# --- what an inspection depends on


def facts_of(spec: JobSpec) -> Facts:
    """Return everything that an inspection of a job depends on, as JSON.

    Raises:
        SpecError: a file of the user's code cannot be read.
    """
    return {
        "spec": spec.model_dump(mode="json", exclude={"name", "pricing"}),
        "code": fingerprint(spec, Path.cwd()),
        "folder": str(Path.cwd()),
        "hardware": _hardware(),
        "python": [sys.version, sys.executable, _changed(Path(sys.executable))],
        "packages": packages(sys.path),
        "tula": max(_changed(path) for path in Path(__file__).parents[1].rglob("*.py")),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "dataset": [newest_change(Path(place)) for place in (spec.dataset.root, *_words(spec.dataset.args.values()))],
    }


def packages(paths: Iterable[str]) -> list[str]:
    """Return the names and versions of the packages on a path that python imports from."""
    folders = [Path(path) for path in paths if path]
    return sorted(
        {entry for folder in folders for entry in _names(folder) if entry.endswith((".dist-info", ".egg-info"))}
    )


def newest_change(root: Path) -> list[int]:
    """Return the newest change in a folder (ns of Unix time) and how many entries were looked at; empty without one.

    A file that is rewritten in place more than `DEPTH` folders down is not seen.
    """
    if not _changed(root):
        return []
    changes = [_changed(root)]
    for change in _changes(root, DEPTH):
        changes.append(change)
        if len(changes) > MOST_ENTRIES:
            break
    return [max(changes), len(changes)]


def _changes(folder: Path, depth: int) -> Iterator[int]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        yield _changed(Path(entry.path))
        if depth and entry.is_dir():
            yield from _changes(Path(entry.path), depth - 1)


def _hardware() -> Mapping[str, object]:
    """Return the machine as the kernel and the drivers tell it."""
    gpus = [path.read_text(errors="replace") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return {
        "host": os.uname().nodename,
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES"),
        "limit": _text(Path("/sys/fs/cgroup/memory.max")),
        "driver": _text(Path("/proc/driver/nvidia/version")),
        "gpus": gpus,
        "devices": [name for name in _names(Path("/dev")) if name.startswith(("nvidia", "kfd"))],
    }


def _words(values: Iterable[object]) -> list[str]:
    """Return what may be paths among a dataset's own arguments."""
    return [value for value in values if isinstance(value, str) and 0 < len(value) < 4096]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
