"""The user's own code: the files that a spec's import strings lead to, and the snapshot of them that its jobs run.

Nothing is imported: the files are found by reading their `import` statements, so that a command neither waits for the
user's libraries nor runs their code.
"""

import ast
import hashlib
import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path

from tula_cli.errors import SpecError, TulaError
from tula_cli.plugins import is_import_string
from tula_cli.records import CodeSnapshot, ProbeTask
from tula_cli.rundir import LATEST, RunDir
from tula_cli.spec import JobSpec, signature

MAX_FILE = 1_000_000  # bytes of a file of a package that is no module the spec leads to
MAX_FILES = 20_000_000  # bytes of all of them together
MAX_COUNT = 2000
MAX_ENTRIES = 1000
"""A folder that holds more is data: it is not looked through."""
MAX_DIFF = 1_000_000  # characters
GIT_TIMEOUT = 10.0  # seconds

_OTHERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_OURSELVES = Path(__file__).resolve().parent
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)  # in the order in which python prefers them


@dataclass(frozen=True)
class Selection:
    """What a snapshot copies. Paths are absolute."""

    workdir: Path
    roots: tuple[Path, ...]  # folders that python imports from, those of `modules` only; workdir first
    modules: tuple[Path, ...]  # what the import strings lead to
    others: tuple[Path, ...]  # further files of the packages among them
    left_out: tuple[Path, ...]  # files and folders of these packages beyond the bounds


@dataclass(frozen=True)
class Source:
    """The code that a submission runs."""

    workdir: Path  # where the ranks work
    digest: str  # of the files that the spec leads to; empty where it names no code of the user's own
    kept: str = ""  # name of the earlier snapshot that is used again; empty where a new one is taken
    warnings: tuple[str, ...] = ()


# --- which files


def import_strings(spec: JobSpec) -> tuple[str, ...]:
    """Return the names of the spec that are written package.module:attribute."""
    transforms = [entry for part in (spec.transforms.train, spec.transforms.eval) for entry in part]
    names = [
        spec.model.name,
        spec.dataset.name,
        spec.loss.name,
        spec.optimizer.name,
        *itertools.chain.from_iterable([entry] if isinstance(entry, str) else entry for entry in transforms),
    ]
    return tuple(dict.fromkeys(name for name in names if is_import_string(name)))


def files(spec: JobSpec, workdir: Path, *, path: Sequence[str] | None = None) -> tuple[Path, ...]:
    """Return the user's own files that the spec's import strings lead to, by way of their import statements.

    Args:
        spec: the job.
        workdir: the folder where tula was called; only what lies under it is the user's own.
        path: where python looks for modules; sys.path by default.
    """
    roots = _roots(workdir, sys.path if path is None else path)
    found: dict[Path, None] = {}
    waiting = deque(file for name in import_strings(spec) for file in _resolve(name.partition(":")[0], roots))
    while waiting:
        file = waiting.popleft()
        if file not in found:
            found[file] = None
            waiting.extend(_imported(file, workdir, roots))
    return tuple(sorted(found))


def digest(files: Iterable[Path], workdir: Path) -> str:
    """Return 8 hex digits over the names relative to `workdir` and the contents; empty where there are no files.

    Raises:
        SpecError: a file cannot be read.
    """
    ordered = sorted((file.relative_to(workdir).as_posix(), file) for file in files)
    found = hashlib.sha256()
    for name, file in ordered:
        content = _read(file)
        found.update(f"{name}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()[:8] if ordered else ""


def fingerprint(spec: JobSpec, workdir: Path) -> str:
    """Return the digest of the user's own code as it is now; empty where the spec names none.

    Raises:
        SpecError: a file cannot be read.
    """
    return digest(files(spec, workdir), workdir)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror}", "the spec's import strings lead to it") from error


def _roots(workdir: Path, path: Iterable[str]) -> list[Path]:
    """Return the folders under `workdir` that python imports from: itself, and those that PYTHONPATH or a .pth adds."""
    found, real = {workdir: None}, workdir.resolve()
    python = [
        prefix for prefix in map(Path.resolve, map(Path, (sys.prefix, sys.base_prefix))) if real in prefix.parents
    ]
    for entry in path:
        folder = (workdir / entry).resolve()
        if any(folder.is_relative_to(prefix) for prefix in python):
            continue  # an interpreter in the user's own folder, with its library
        if folder.is_relative_to(real) and folder.is_dir():
            below = folder.relative_to(real)
            if not any(_foreign(real / part) for part in [*below.parents, below] if part != Path()):
                found[workdir / below] = None
    return list(found)


def _foreign(folder: Path) -> bool:
    """Return whether a folder is none of the user's code: hidden, installed, an environment, or where runs are kept."""
    if folder.name.startswith(".") or folder.name in _OTHERS:
        return True
    if (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists():
        return True
    return (folder / LATEST).is_file() and any(folder.glob("*/spec.yaml"))


def _resolve(module: str, roots: Iterable[Path]) -> list[Path]:
    """Return the files that importing a module runs, as far as they are found: its packages' and its own."""
    found, places = [], list(roots)
    for part in module.split("."):
        file, places = _look(part, places)
        if file is not None and not file.resolve().is_relative_to(_OURSELVES):
            found.append(file)
        if not places:
            break
    return found


def _look(part: str, places: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """Return the file of one part of a module's name, and the folders where the next part is; in python's order."""
    portions = []  # of a namespace package: folders without __init__.py
    for place in places:
        folder = place / part
        is_folder = bool(part) and folder.is_dir() and not _foreign(folder)
        if is_folder and (file := _source(folder / "__init__")):
            return file, [folder]
        if part and (file := _source(folder)):
            return file, []
        if is_folder:
            portions.append(folder)
    return None, portions


def _source(stem: Path) -> Path | None:
    candidates = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    return next((file for file in candidates if file.is_file()), None)


def _imported(file: Path, workdir: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files under `workdir` that the imports of a file lead to, wherever in it they stand."""
    for node in _nodes(file):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from _resolve(alias.name, roots)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = f"{module}." if module else ""
                places = [file.parents[level - 1]] if 0 < level <= len(file.parents) else roots
                if level and not places[0].is_relative_to(workdir):
                    continue
                for alias in names:  # a submodule or a mere attribute: the files tell
                    yield from _resolve(f"{base}{alias.name}", places)
            case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module")):
                if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    yield from _resolve(node.args[0].value, roots)


def _nodes(file: Path) -> list[ast.AST]:
    """Return all nodes of a python file; none where it does not parse: its error belongs to the job, not to us."""
    if file.suffix != ".py":
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's string escapes
            return list(ast.walk(ast.parse(_read(file))))
    except (SyntaxError, ValueError, RecursionError):
        return []


# --- what is copied


def select(spec: JobSpec, workdir: Path) -> Selection:
    """Return what a snapshot of the spec's code holds: the modules, and of packages their other small files.

    A package's other files are copied because it may read them, or import them in ways that no statement tells.
    """
    modules = files(spec, workdir)
    roots = tuple(root for root in _roots(workdir, sys.path) if any(file.is_relative_to(root) for file in modules))
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
        packages = list(itertools.takewhile(lambda folder: _source(folder / "__init__") is not None, chain))
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
    return [path for path in paths if not (path.is_dir() and _foreign(path))]


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
    """Return the runs beside `run` of the same job with other code, last changed first."""
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
