"""The files that the import strings of a spec refer to."""

import functools
import hashlib
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.plugins import is_import_string
from tula_cli.run.checkpoint_integrity import CHECKSUM_FILE
from tula_cli.run.directory import LATEST_FILE
from tula_cli.run.files import is_regular_file
from tula_cli.run.python_file import PythonFile, parse_python
from tula_cli.spec.job import JobSpec

CHUNK_BYTES = 2**20  # bytes read at a time


def compute_weights_digest(spec: JobSpec) -> str:
    """Return the digest of the initial weights file, looked up in the working directory; empty if there is none.

    Every command reads the file: its digest is part of the run's name, so it has to be known before there is a run
    directory in which to store it.

    Raises:
        SpecError: the file cannot be read.
    """
    return "" if spec.model.weights is None else compute_file_digest(spec.model.weights)


def add_weights_digest(code: str, weights: str) -> str:
    """Combine the digest of the user's code with that of the initial weights, if there are any."""
    return hashlib.sha256(f"{code}\0{weights}".encode()).hexdigest()[:8] if weights else code


def compute_file_digest(name: str) -> str:
    """Return the SHA-256 of a file, or of the checksum file of a folder of shards; cached until the file changes.

    Raises:
        SpecError: it cannot be read.
    """
    path = Path(name).absolute()
    path = path / CHECKSUM_FILE if path.is_dir() else path
    try:
        if not is_regular_file(path):
            raise SpecError(
                f"model.weights: {name} is not a regular file", "name a file, or the folder of a sharded checkpoint"
            )
        file_statistics = path.stat()
        return _compute_digest_of_content(path, (file_statistics.st_size, file_statistics.st_mtime_ns))
    except OSError as error:
        raise SpecError(
            f"model.weights: cannot read {name}: {error.strerror}",
            f"give a path relative to {Path.cwd()}, or an absolute path",
        ) from error


@functools.lru_cache
def _compute_digest_of_content(path: Path, _stamp: tuple[int, int]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


_EXCLUDED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_TULA_PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)  # in python's order of preference


@dataclass(frozen=True)
class Source:
    """The code that a submission runs, and the weights from which it starts."""

    workdir: Path  # working directory of the ranks
    digest: str  # digest of the files imported through the spec; empty if it names none of the user's code
    kept: str = ""  # name of the earlier snapshot to reuse; empty if a new one is taken
    warnings: tuple[Diagnostic, ...] = ()
    weights: str = ""  # digest of the file with initial weights; empty without one

    @property
    def identity(self) -> str:
        """The digest of the code and the initial weights, by which a training is named."""
        return add_weights_digest(self.digest, self.weights)


def list_import_strings(spec: JobSpec) -> tuple[str, ...]:
    """Return the names in the spec of the form package.module:attribute."""
    transforms = [entry for section in (spec.transforms.train, spec.transforms.eval) for entry in section]
    names = [
        spec.model.name,
        spec.dataset.name,
        *spec.dataset.further_imports,
        spec.loss.name,
        spec.optimizer.name,
        spec.schedule.kind,
        spec.train.method,
        *spec.train.metric_names,
        *itertools.chain.from_iterable([entry] if isinstance(entry, str) else entry for entry in transforms),
    ]
    return tuple(dict.fromkeys(name for name in names if is_import_string(name)))


def list_files_of_imports(spec: JobSpec, workdir: Path, *, path: Sequence[str] | None = None) -> tuple[Path, ...]:
    """Return the user's files that the spec's import strings refer to, directly or through import statements.

    Args:
        workdir: the folder where tula was called; only files under it are the user's own.
        path: module search path; sys.path by default.
    """
    return list_files_of_import_strings(list_import_strings(spec), workdir, path=path)


def list_files_of_import_strings(
    names: Iterable[str], workdir: Path, *, path: Sequence[str] | None = None
) -> tuple[Path, ...]:
    """Return the user's files that import strings refer to; arguments as in `list_files_of_imports`."""
    roots = list_import_roots(workdir, sys.path if path is None else path)
    return follow_imports(
        (file for name in names for file in resolve_module(name.partition(":")[0], roots)), workdir, roots
    )


def follow_imports(starts: Iterable[Path], workdir: Path, roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return the given files and those under `workdir` reached through their import statements, sorted.

    Args:
        workdir: only files under it are the user's own.
        roots: folders that python imports from.
    """
    files: dict[Path, None] = {}
    waiting = deque(starts)
    while waiting:
        file = waiting.popleft()
        if file not in files:
            files[file] = None
            waiting.extend(list_imported_files(file, workdir, roots))
    return tuple(sorted(files))


def compute_digest_of_files(files: Iterable[Path], workdir: Path, *, start: str = "") -> str:
    """Return 8 hex digits over the names relative to `workdir` and the contents; empty if there are no files.

    Args:
        start: the file that is run, if the spec alone does not determine it.

    Raises:
        SpecError: a file cannot be read.
    """
    ordered = sorted((file.relative_to(workdir).as_posix(), file) for file in files)
    digest = hashlib.sha256(start.encode())
    for name, file in ordered:
        content = _read_file(file)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:8] if ordered else ""


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SpecError(
            f"cannot read {file}: {error.strerror}",
            "make the file readable: the job's code includes it",
        ) from error


def list_import_roots(workdir: Path, path: Iterable[str]) -> list[Path]:
    """Return `workdir` and the folders under it that python imports from because of PYTHONPATH or a .pth file."""
    roots, real = {workdir: None}, workdir.resolve()
    python = [
        prefix for prefix in map(Path.resolve, map(Path, (sys.prefix, sys.base_prefix))) if real in prefix.parents
    ]
    for entry in path:
        folder = (workdir / entry).resolve()
        if any(folder.is_relative_to(prefix) for prefix in python):
            continue  # standard library or packages of an interpreter that lies in the working directory
        if folder.is_relative_to(real) and folder.is_dir():
            between = [above for above in (folder, *folder.parents) if above.is_relative_to(real) and above != real]
            if not any(map(is_foreign_folder, between)):
                roots[workdir / folder.relative_to(real)] = None
    return list(roots)


def is_foreign_folder(folder: Path) -> bool:
    """Return whether a folder does not hold user code: hidden, installed, an environment, or a folder of runs."""
    if folder.name.startswith(".") or is_installed_folder(folder):
        return True
    return (folder / LATEST_FILE).is_file() and any(folder.glob("*/spec.yaml"))


def is_installed_folder(folder: Path) -> bool:
    """Return whether a folder holds installed packages, an environment or caches."""
    return folder.name in _EXCLUDED_FOLDERS or (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def resolve_module(module: str, roots: Iterable[Path]) -> list[Path]:
    """Return the files that run when a module is imported, as far as they exist: those of its packages, then its own."""
    files, folders = [], list(roots)
    for name in module.split("."):
        file, folders = _resolve_name(name, folders)
        if file is not None and not file.resolve().is_relative_to(_TULA_PACKAGE):
            files.append(file)
        if not folders:
            break
    return files


def _resolve_name(name: str, folders: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """Return the file of one component of a module's name, and the folders of the next one, in python's order."""
    portions = []  # parts of a namespace package: folders without __init__.py
    for candidate in folders:
        folder = candidate / name
        is_folder = bool(name) and folder.is_dir() and not is_foreign_folder(folder)
        if is_folder and (file := find_source_file(folder / "__init__")):
            return file, [folder]
        if name and (file := find_source_file(folder)):
            return file, []
        if is_folder:
            portions.append(folder)
    return None, portions


def find_source_file(stem: Path) -> Path | None:
    candidates = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    return next((file for file in candidates if file.is_file()), None)


def list_imported_files(file: Path, workdir: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files under `workdir` that the import statements of a file refer to, at any position in it."""
    python_file = read_python_file(file)
    for name, level in python_file.imports if python_file else ():
        folders = [file.parents[level - 1]] if 0 < level <= len(file.parents) else roots
        if not level or folders[0].is_relative_to(workdir):
            yield from resolve_module(name, folders)


def read_python_file(file: Path) -> PythonFile | None:
    """Return the imports of a python file; None if python cannot parse it, because that error belongs to the job."""
    return parse_python(_read_file(file)) if file.suffix == ".py" else None
