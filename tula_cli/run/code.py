"""The user's own code: the files that a spec's import strings lead to, and the snapshot of them that its jobs run.

Nothing is imported: the files are found by reading their `import` statements, so that a command neither waits for the
user's libraries nor runs their code.
"""

import hashlib
import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.errors import SpecError, TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import Source, digest, files, foreign, import_strings, roots_of, source
from tula_cli.run.records.tasks import CodeSnapshot, ProbeTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import signature

MAX_FILE = 1_000_000  # bytes of a file of a package that is no module the spec leads to
MAX_FILES = 20_000_000  # bytes of all of them together
MAX_COUNT = 2000
MAX_ENTRIES = 1000
"""A folder that holds more is data: it is not looked through."""
MAX_DIFF = 1_000_000  # characters
GIT_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class Selection:
    """What a snapshot copies. Paths are absolute."""

    workdir: Path
    roots: tuple[Path, ...]  # folders that python imports from, those of `modules` only; workdir first
    modules: tuple[Path, ...]  # what the import strings lead to
    others: tuple[Path, ...]  # further files of the packages among them
    left_out: tuple[Path, ...]  # files and folders of these packages beyond the bounds


def fingerprint(spec: JobSpec, workdir: Path) -> str:
    """Return the digest of the user's own code as it is now; empty where the spec names none.

    Raises:
        SpecError: a file cannot be read.
    """
    return digest(files(spec, workdir), workdir)


def run_of(root: Path, spec: JobSpec) -> RunDir:
    """Return the run of a job with the user's own code as it is here and now; it may not be there yet.

    Args:
        root: where runs are kept.
        spec: the job.

    Raises:
        SpecError: a file of the code cannot be read.
    """
    return RunDir.of(root.absolute(), spec, code=fingerprint(spec, Path.cwd()))


# --- what is copied


def select(spec: JobSpec, workdir: Path) -> Selection:
    """Return what a snapshot of the spec's code holds: the modules, and of packages their other small files.

    A package's other files are copied because it may read them, or import them in ways that no statement tells.
    """
    modules = files(spec, workdir)
    roots = tuple(root for root in roots_of(workdir, sys.path) if any(file.is_relative_to(root) for file in modules))
    others: list[Path] = []
    left_out: list[Path] = []
    for package in _packages(modules, workdir):
        _survey(package, set(modules), others, left_out)
    return Selection(workdir, roots, modules, tuple(others), tuple(left_out))


def _packages(modules: Iterable[Path], workdir: Path) -> list[Path]:
    """Return the outermost folders with an __init__.py among the modules' folders."""
    found: dict[Path, None] = {}
    for module in modules:
        chain = [folder for folder in module.parents if folder != workdir and folder.is_relative_to(workdir)]
        packages = list(itertools.takewhile(lambda folder: source(folder / "__init__") is not None, chain))
        if packages:
            found[packages[-1]] = None
    return list(found)


def _survey(package: Path, modules: set[Path], others: list[Path], left_out: list[Path]) -> None:
    """Sort a package's other files into those that a snapshot copies and those beyond its bounds, folder by folder."""
    total, waiting = sum(file.stat().st_size for file in others), deque([package])
    while waiting:
        folder = waiting.popleft()
        entries = _entries(folder)
        if entries is None or len(others) >= MAX_COUNT or total >= MAX_FILES:
            left_out.append(folder)
            continue
        waiting.extend(entry for entry in entries if entry.is_dir() and not entry.is_symlink())
        plain = [entry for entry in entries if entry.is_file() and entry not in modules]
        for entry in sorted(plain, key=lambda entry: entry.suffix != ".py"):
            size = entry.stat().st_size
            beyond = size > MAX_FILE or total + size > MAX_FILES or len(others) >= MAX_COUNT
            if beyond or not os.access(entry, os.R_OK):
                left_out.append(entry)
            else:
                others.append(entry)
                total += size


def _entries(folder: Path) -> list[Path] | None:
    """Return what a folder holds that may be the user's, by name; None where that is too much, or not to be read."""
    try:
        with os.scandir(folder) as scan:
            names = [entry.name for entry in itertools.islice(scan, MAX_ENTRIES + 1)]
    except PermissionError:
        return None
    if len(names) > MAX_ENTRIES:
        return None
    paths = (folder / name for name in sorted(names) if not name.startswith(".") and not name.endswith(".pyc"))
    return [path for path in paths if not (path.is_dir() and foreign(path))]


# --- the snapshot


def choose(run: RunDir | None, spec: JobSpec, workdir: Path, *, keep: bool) -> Source:
    """Decide which code a submission runs.

    Args:
        run: where earlier submissions may have left snapshots.
        spec: the job.
        workdir: the folder where tula was called.
        keep: go on with the code that the run was measured with, also where it has changed since.

    Raises:
        SpecError: a file cannot be read.
    """
    selection = select(spec, workdir)
    present = digest(selection.modules, workdir)
    own = measured_with(run) if run is not None else None
    if own is not None and own.digest != present:
        assert run is not None
        gone = not present and not _installed(spec)
        if keep or gone:
            why = f"is not in {workdir}" if gone else "has changed"
            told = f"{behind(spec)} {why}: {run.id} goes on with the code that it was measured with"
            return Source(Path(own.workdir), own.digest, kept=own.name, warnings=(told,))
        told = (
            f"{behind(spec)} has changed since {run.id} was measured: what is there now is trained, but times and costs"
            " are predicted from the code before"
        )
        return Source(workdir, present, warnings=(told, *_beyond(selection)))
    return Source(workdir, present, warnings=_beyond(selection))


def behind(spec: JobSpec) -> str:
    """Return the user's own code in words."""
    return f"the code behind {', '.join(import_strings(spec))}"


def measured_with(run: RunDir) -> CodeSnapshot | None:
    """Return the newest snapshot that the run's probes were submitted with; None where they ran no code of the user's."""
    names = {task.code for task in run.tasks() if isinstance(task, ProbeTask) and task.code}
    found = [snapshot for name in names if run.code_dir(name).is_dir() and (snapshot := run.code(name))]
    return max(found, key=lambda snapshot: snapshot.taken_at, default=None)


def others(run: RunDir, spec: JobSpec) -> list[RunDir]:
    """Return the runs beside `run` of the same job with other code, last changed first; none where it names no code."""
    if not import_strings(spec):
        return []
    beside = [other for other in RunDir.all(run.path.parent) if other.id.startswith(f"{spec.name}-")]
    return [other for other in beside if other.path != run.path and _signature_of(other) == signature(spec)]


def _signature_of(run: RunDir) -> str:
    """Return the signature of a run's spec alone; empty where its spec is damaged, which is no matter of this job."""
    try:
        return signature(run.spec())
    except SpecError:
        return ""


def _installed(spec: JobSpec) -> bool:
    """Return whether one of the spec's modules can be found elsewhere; importing its top package is not needed."""
    tops = {name.partition(":")[0].partition(".")[0] for name in import_strings(spec)}
    for top in tops:
        try:
            if importlib.util.find_spec(top) is not None:
                return True
        except (ImportError, ValueError):
            continue
    return False


def _beyond(selection: Selection) -> tuple[str, ...]:
    """Say what the snapshot cannot hold, and what that means."""
    told = []
    if selection.left_out:
        told.append(
            f"{_listed(selection.left_out, selection.workdir)}: too large for the snapshot of the code"
            f" ({MAX_FILE // 10**6} MB a file, {MAX_FILES // 10**6} MB and {MAX_COUNT} files in all), so it is linked, not"
            " copied: a change to it reaches jobs submitted before"
        )
    crowded = [folder for folder in {module.parent for module in selection.modules} if _entries(folder) is None]
    if crowded:
        told.append(
            f"{_listed(crowded, selection.workdir)}: more than {MAX_ENTRIES} files beside the code; in a job they are found"
            f" by their path from {selection.workdir}, not by the code's own __file__"
        )
    return tuple(told)


def _listed(paths: Sequence[Path], workdir: Path) -> str:
    names = [str(path.relative_to(workdir)) for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def snapshot(run: RunDir, spec: JobSpec, source: Source) -> str:
    """Copy the code into the run directory, where it is not there yet; return the snapshot's name, empty for no code.

    Raises:
        TulaError: the code changed since `source` was decided, or it cannot be copied.
    """
    if source.kept or not source.digest:
        return source.kept
    selection = select(spec, source.workdir)
    draft = run.code_dir(f".draft.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        return _take(run, selection, draft, expected=source.digest, told=behind(spec))
    except OSError as error:
        raise TulaError(
            f"cannot copy the code to {draft.parent}: {error.strerror or error}",
            "free some space, or choose another folder with --run-dir",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _take(run: RunDir, selection: Selection, draft: Path, *, expected: str, told: str) -> str:
    workdir = selection.workdir
    names = [file.relative_to(workdir) for file in (*selection.modules, *selection.others)]
    for file in names:
        (draft / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(workdir / file, draft / file)
    modules = [file.relative_to(workdir) for file in selection.modules]
    # Of the copies, not of the originals: they may be edited at this very moment.
    found = digest((draft / file for file in modules), draft)
    if found != expected:
        raise TulaError(f"{told} has just been changed", "run the same command again")
    # The links lead to this workdir: the same code in another folder is another snapshot.
    contents = digest((draft / file for file in names), draft)
    name = hashlib.sha256(f"{contents}\0{workdir}".encode()).hexdigest()[:8]
    _link_the_rest(draft, workdir, {folder for file in names for folder in file.parents})
    _publish(draft, run.code_dir(name))
    if run.code(name) is None:
        commit, dirty, diff = _git_state(workdir, modules)
        run.write_code(
            CodeSnapshot(
                name=name,
                digest=found,
                taken_at=time.time(),
                workdir=str(workdir),
                roots=tuple(root.relative_to(workdir).as_posix() for root in selection.roots),
                modules=tuple(module.as_posix() for module in modules),
                files=tuple(sorted(file.as_posix() for file in names)),
                commit=commit,
                dirty=dirty,
                diff=diff,
            )
        )
    return name


def _link_the_rest(draft: Path, workdir: Path, folders: Iterable[Path]) -> None:
    """Link what was not copied, for code that finds files by its own `__file__`: data, weights, large files."""
    for folder in folders:
        for entry in _entries(workdir / folder) or ():
            link = draft / folder / entry.name
            if not link.exists():
                link.symlink_to(entry)


def _publish(draft: Path, place: Path) -> None:
    """Give a finished draft its name; one that is there is the same."""
    if place.is_dir():
        return
    try:
        draft.rename(place)
    except OSError:
        if not place.is_dir():  # another command was faster
            raise


# --- git


def _git_state(workdir: Path, modules: Sequence[Path]) -> tuple[str, bool, str]:
    """Return (commit, whether the modules differ from it, how); empty where there is no git or no repository."""
    commit = _git(workdir, "rev-parse", "--verify", "HEAD").strip()
    if not commit:
        return "", False, ""
    tops = sorted({module.parts[0] for module in modules})
    dirty = bool(_git(workdir, "status", "--porcelain", "--", *tops).strip())
    diff = _git(workdir, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--relative", "HEAD", "--", *tops)
    if len(diff) > MAX_DIFF:
        diff = f"{diff[:MAX_DIFF]}\n[cut: {len(diff) - MAX_DIFF} more characters]\n"
    return commit, dirty, diff


def _git(workdir: Path, *arguments: str) -> str:
    """Return what git prints; empty where it fails."""
    command = ["git", "-C", str(workdir), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_TIMEOUT,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
