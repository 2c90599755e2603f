"""The user's own code: the files that a spec's import strings or script refer to, and the snapshot that jobs run.

Nothing is imported: files are found by parsing `import` statements, so that a command neither waits for the user's
libraries nor runs their code.
"""

import dataclasses
import filecmp
import hashlib
import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, TulaError
from tula_cli.run import code_selection, messages
from tula_cli.run.code_selection import Selection, list_entries, list_selection_warnings, select_imported_files
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import make_folder, publish_folder
from tula_cli.run.format import require_known_format
from tula_cli.run.imports import (
    Source,
    add_weights_digest,
    compute_digest_of_files,
    compute_weights_digest,
    list_files_of_imports,
    list_import_strings,
)
from tula_cli.run.job_runs import make_runs
from tula_cli.run.records.tasks import CodeSnapshot
from tula_cli.run.script_command import CommandFileMissing, list_module_names, split_command
from tula_cli.run.script_files import list_script_warnings, select_script_files
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.placeholders import find_program_name
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.signature import compute_measurement_signature


@dataclass(frozen=True)
class ImportedCode:
    """The user's code that the import strings of a job lead to, and its initial weights."""

    spec: JobSpec
    workdir: Path

    def compute_digest(self) -> str:
        digest = compute_digest_of_files(list_files_of_imports(self.spec, self.workdir), self.workdir)
        return add_weights_digest(digest, compute_weights_digest(self.spec))

    def select(self) -> Selection:
        return select_imported_files(self.spec, self.workdir)

    @property
    def is_copied(self) -> bool:
        """Whether jobs run a snapshot of the code."""
        return bool(self.modules)

    @property
    def modules(self) -> Sequence[str]:
        """Import strings or module names from which the search for files starts."""
        return list_import_strings(self.spec)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        return ()

    def __str__(self) -> str:
        return f"the code of {', '.join(self.modules)}"


@dataclass(frozen=True)
class ScriptCode:
    """The code and settings of a script, with the same members as `ImportedCode`."""

    script: Script
    workdir: Path

    def compute_digest(self) -> str:
        selection = self.select()
        return compute_digest_of_files(selection.modules, selection.base, start=selection.start)

    def select(self) -> Selection:
        return select_script_files(self.script, self.workdir)

    @property
    def is_copied(self) -> bool:
        return self.script.code != "none"

    @property
    def modules(self) -> Sequence[str]:
        return list_module_names(split_command(self.script.command))

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        return list_script_warnings(self.script, self.workdir)

    def __str__(self) -> str:
        return f"the code of {find_program_name(self.script.command)}"


def get_user_code(spec: JobSpec, workdir: Path) -> ImportedCode | ScriptCode:
    """Return the user's code of a job that is submitted from a folder."""
    return ImportedCode(spec, workdir) if spec.script is None else ScriptCode(spec.script, workdir)


def compute_code_digest(spec: JobSpec, workdir: Path) -> str:
    """Return the digest of the user's code and initial weights in their current state; empty if the spec names none.

    Raises:
        SpecError: a file cannot be read.
    """
    return get_user_code(spec, workdir).compute_digest()


def make_runs_of_job(root: Path, spec: JobSpec) -> tuple[Run, ...]:
    """Return the runs of a job with the user's code in its current state; they may not exist yet.

    Raises:
        SpecError: a file of the code cannot be read.
        OtherFormat: a run exists in a format of another version of tula.
    """
    runs = make_runs(root.absolute(), spec, code=compute_code_digest(spec, Path.cwd()))
    for run in runs:
        require_known_format(run.path)
    return runs


def choose_code(run: RunDir | None, spec: JobSpec, workdir: Path, *, keep: bool) -> Source:
    """Choose the code that a submission runs, and compute the digest of the weights it starts from.

    Args:
        run: the run in which earlier submissions may have left snapshots.
        workdir: the folder where tula was called.
        keep: use the code with which the run was measured even if the current code differs.

    Raises:
        SpecError: a file cannot be read.
    """
    return dataclasses.replace(_choose_snapshot(run, spec, workdir, keep=keep), weights=compute_weights_digest(spec))


def _choose_snapshot(run: RunDir | None, spec: JobSpec, workdir: Path, *, keep: bool) -> Source:
    run_snapshot, code = find_measured_snapshot(run) if run is not None else None, get_user_code(spec, workdir)
    if not code.is_copied:
        return Source(workdir, "", warnings=code.warnings)
    try:
        selection = code.select()
    except CommandFileMissing:
        if run_snapshot is None:
            raise
        selection = Selection(workdir, (), (), (), ())
        is_gone = True
    else:
        is_gone = not selection.modules and not _is_installed(code.modules)
    present = compute_digest_of_files(selection.modules, selection.base, start=selection.start)
    changes = []
    if run is not None and run_snapshot is not None and run_snapshot.digest != present:
        if keep or is_gone:
            warning = messages.earlier_code_used(
                code=str(code),
                run=run.id,
                missing_from=str(workdir) if is_gone else None,
                files=() if is_gone else list_changed_files(run, run_snapshot, selection),
            )
            return Source(Path(run_snapshot.workdir), run_snapshot.digest, kept=run_snapshot.name, warnings=(warning,))
        files = list_changed_files(run, run_snapshot, selection)
        changes = [messages.code_changed_since_measurement(code=str(code), run=run.id, files=files)]
    return Source(workdir, present, warnings=(*changes, *code.warnings, *list_selection_warnings(selection)))


def find_measured_snapshot(run: RunDir) -> CodeSnapshot | None:
    """Return the newest snapshot with which the run's probes were submitted, or None if they ran no user code."""
    names = {task.code for task in run.read_snapshot().probe_tasks if task.code}
    snapshots = [snapshot for name in names if run.get_code_dir(name).is_dir() and (snapshot := run.read_code(name))]
    return max(snapshots, key=lambda snapshot: snapshot.taken_at, default=None)


def list_changed_files(run: RunDir, earlier: CodeSnapshot | None, selection: Selection) -> list[str]:
    """Return the files of the code that differ from an earlier snapshot, each with the word changed, added or removed.

    Empty if there is no copy to compare with.
    """
    if earlier is None or not (copy := run.get_code_dir(earlier.name)).is_dir():
        return []
    current = {file.relative_to(selection.base).as_posix() for file in selection.modules}
    changes = []
    for name in sorted({*current, *earlier.modules}):
        if name in current and name not in earlier.files:
            changes.append(f"{name} added")
        elif name in current and not _has_same_content(selection.base / name, copy / name):
            changes.append(f"{name} changed")
        elif not (selection.base / name).exists():
            changes.append(f"{name} removed")
    return changes


def _has_same_content(file: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(file, other, shallow=False)
    except OSError:
        return False


def list_code_changes(run: RunDir, spec: JobSpec, workdir: Path, *, digest: str | None = None) -> list[str]:
    """Return the files that differ from a snapshot of a run, as `list_changed_files` does.

    Args:
        digest: of the snapshot's code; None for the newest.
    """
    snapshots = [snapshot for snapshot in run.read_code_snapshots() if digest in (None, snapshot.digest)]
    selection = get_user_code(spec, workdir).select()
    return list_changed_files(run, snapshots[-1] if snapshots else None, selection)


def list_runs_with_other_code(run: Run) -> list[RunDir]:
    """Return other runs of the same job with different code, most recently changed first.

    Empty if the job names no code.
    """
    spec = run.spec
    if not get_user_code(spec, Path.cwd()).is_copied:
        return []
    signature = compute_measurement_signature(spec)
    return [
        other_run
        for other_run in RunDir.list_all(run.path.parent)
        if other_run.id.startswith(f"{spec.name}-")
        and other_run.path != run.path
        and _read_signature(other_run) == signature
    ]


def _read_signature(run: RunDir) -> str:
    """Return the signature of a run's spec without its code; empty if the spec is damaged."""
    try:
        return compute_measurement_signature(run.read_spec())
    except BadMeasurements:
        return ""


def _is_installed(modules: Iterable[str]) -> bool:
    """Return whether one of the modules can be found elsewhere; its top-level package is not imported."""
    tops = {name.partition(":")[0].partition(".")[0] for name in modules}
    for top in tops:
        try:
            if importlib.util.find_spec(top) is not None:
                return True
        except (ImportError, ValueError):
            continue
    return False


def take_snapshot(run: RunDir, spec: JobSpec, source: Source) -> str:
    """Copy the code into the run directory unless it is already there; return the snapshot's name, empty for no code.

    Raises:
        TulaError: the code changed since `source` was chosen, or cannot be copied.
    """
    if source.kept or not source.digest:
        return source.kept
    code = get_user_code(spec, source.workdir)
    selection = code.select()
    draft = run.get_code_dir(f".draft.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        return _copy_snapshot(run, selection, draft, source, name_of_code=str(code))
    except OSError as error:
        raise TulaError(
            f"cannot copy the code to {draft.parent}: {error.strerror or error}",
            "free some space, or choose another folder with [[--run-dir]]",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_snapshot(run: RunDir, selection: Selection, draft: Path, source: Source, *, name_of_code: str) -> str:
    base = selection.base
    names = [file.relative_to(base) for file in (*selection.modules, *selection.others)]
    for file in names:
        make_folder((draft / file).parent)
        shutil.copy2(base / file, draft / file)
        (draft / file).chmod((draft / file).stat().st_mode & 0o700)
    modules = [file.relative_to(base) for file in selection.modules]
    # Digest of the copies, because the originals may be edited at the same time.
    digest = compute_digest_of_files((draft / file for file in modules), draft, start=selection.start)
    if digest != source.digest:
        raise TulaError(f"{name_of_code} changed while tula copied it", "run the same command again")
    # The name depends on the folders too, because links in the snapshot point to them.
    contents = compute_digest_of_files((draft / file for file in names), draft)
    place_text = "\0".join(dict.fromkeys([str(source.workdir), str(base), selection.program or str(base)]))
    name = hashlib.sha256(f"{contents}\0{place_text}".encode()).hexdigest()[:8]
    _link_uncopied_files(draft, base, {folder for file in names for folder in file.parents})
    publish_folder(draft, run.get_code_dir(name))
    if run.read_code(name) is None:
        run.write_code(_make_snapshot_record(selection, name, source))
    return name


def _make_snapshot_record(selection: Selection, name: str, source: Source) -> CodeSnapshot:
    base = selection.base
    modules, other_files = (
        [file.relative_to(base) for file in files] for files in (selection.modules, selection.others)
    )
    copied = [*modules, *other_files] if selection.exact else [Path(module.parts[0]) for module in modules]
    commit, dirty, diff = code_selection.read_repository_state(base, copied)
    return CodeSnapshot(
        name=name,
        digest=source.digest,
        taken_at=time.time(),
        workdir=str(source.workdir),
        roots=tuple(root.relative_to(base).as_posix() for root in selection.roots),
        modules=tuple(module.as_posix() for module in modules),
        files=tuple(sorted(file.as_posix() for file in (*modules, *other_files))),
        commit=commit,
        dirty=dirty,
        diff=diff,
        base=str(base) if selection.exact else "",
        program=selection.program,
    )


def _link_uncopied_files(draft: Path, base: Path, folders: Iterable[Path]) -> None:
    """Link files that were not copied (data, weights, large files), for code that uses its `__file__`."""
    for folder in folders:
        for entry in list_entries(base / folder) or ():
            link = draft / folder / entry.name
            if not link.exists():
                link.symlink_to(entry)
