"""The job that a folder stores, by which it is a run: as YAML, and as JSON, which is read a hundred times as fast.

The JSON is used while both agree, and if a crash has damaged the YAML. An edited YAML counts.

Only the standard library and similarly light modules are imported at first, because listing hundreds of runs reads
nothing else of their jobs.
"""

import contextlib
import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.run import files
from tula_cli.run.format import require_current_format, require_known_format, write_format

if TYPE_CHECKING:
    from tula_cli.spec.job import JobSpec

_YAML_FILE, _JSON_FILE = "spec.yaml", "spec.json"


@dataclass(frozen=True)
class ParsedSpec:
    """A job as plain values."""

    digest: str  # SHA-256 of the YAML file with which it was written
    spec: Mapping[str, Any]


def write_parsed_spec(run: Path, yaml: str, spec: Mapping[str, Any]) -> None:
    """Replace the job of a run, as text and as plain values, and record the format of a new run.

    Raises:
        OtherFormat: the run exists in a format of another version of tula.
        TulaError: the files cannot be written.
    """
    require_current_format(run)
    if read_job_change_time(run) is None:
        write_format(run)
    files.write_file_atomically(run / _YAML_FILE, yaml)
    files.write_file_atomically(
        run / _JSON_FILE, json.dumps(asdict(ParsedSpec(_compute_digest(yaml.encode()), spec))) + "\n"
    )


def read_parsed_spec(run: Path) -> ParsedSpec | None:
    """Return the job of a run; None if the YAML was edited afterwards, or the JSON is missing or damaged.

    Raises:
        OtherFormat: the run is in a format of another version of tula.
        TulaError: a file cannot be read.
    """
    require_known_format(run)
    try:
        parsed = _read_spec_json(run)
        yaml = files.read_content(run / _YAML_FILE)
    except (FileNotFoundError, BadMeasurements):
        return None  # the caller finds out why
    return parsed if parsed is not None and parsed.digest == _compute_digest(yaml) else None


def _read_spec_json(run: Path) -> ParsedSpec | None:
    """Return the job of a run as its JSON holds it, whatever the YAML holds; None if the JSON is missing or damaged.

    Raises:
        TulaError: the file system does not answer, or the run belongs to another user.
    """
    try:
        content = json.loads(files.read_content(run / _JSON_FILE))
        parsed = ParsedSpec(content["digest"], content["spec"])
    except (FileNotFoundError, KeyError, ValueError, TypeError, RecursionError, BadMeasurements):
        return None
    return parsed if isinstance(parsed.spec, dict) else None


@dataclass(frozen=True)
class SpecDamage:
    """A damaged spec.yaml whose job is known from the JSON beside it."""

    error: BadMeasurements
    spec: "JobSpec"


def read_stored_spec(run: Path) -> "JobSpec":
    """Return the job of a run.

    Raises:
        OtherFormat: the run is in a format of another version of tula.
        BadMeasurements: the job is damaged.
        TulaError: a file cannot be read.
    """
    from tula_cli.spec.load import validate_job
    from tula_cli.spec.old_keys import drop_removed_values

    parsed = read_parsed_spec(run)
    if parsed is not None:
        with contextlib.suppress(SpecError):  # damaged: the YAML is used instead
            return validate_job(drop_removed_values(parsed.spec), source=str(run / _JSON_FILE))
    content = read_unvalidated_spec(run)
    try:
        return validate_job(content, source=str(run / _YAML_FILE))
    except SpecError as error:
        raise _make_damaged_job_error(run, error) from None


def read_unvalidated_spec(run: Path) -> dict[str, Any]:
    """Return the job of a run as plain values that were not validated.

    Raises:
        BadMeasurements: the job is damaged.
    """
    from tula_cli.spec.old_keys import drop_removed_values
    from tula_cli.spec.yaml_text import read_yaml

    if (damage := find_spec_damage(run)) is not None:
        return damage.spec.model_dump(mode="json")
    try:
        return dict(drop_removed_values(read_yaml(run / _YAML_FILE)))
    except SpecError as error:
        raise _make_damaged_job_error(run, error) from None


def find_spec_damage(run: Path) -> SpecDamage | None:
    """Return the damage of a run's spec.yaml that no edit explains: it is no text, truncated or unreadable.

    None if it is intact or was edited, or if the JSON beside it is of no use.
    """
    path, stored = run / _YAML_FILE, _read_spec_json(run)
    if stored is None:
        return None
    try:
        content = files.read_content(path)
    except FileNotFoundError:
        return None
    except BadMeasurements as read_error:
        content, error = b"", read_error
    else:
        if _compute_digest(content) == stored.digest:
            return None
        error = files.make_damaged_error(path, "it is truncated" if content else "it is empty")
    from tula_cli.spec.load import dump_yaml, validate_job
    from tula_cli.spec.old_keys import drop_removed_values

    try:
        spec = validate_job(drop_removed_values(stored.spec), source=str(run / _JSON_FILE))
    except SpecError:
        return None
    if b"\0" in content or not _is_text(content):
        return SpecDamage(files.make_damaged_error(path, "it is not text"), spec)
    return SpecDamage(error, spec) if dump_yaml(spec).encode().startswith(content) else None


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _make_damaged_job_error(run: Path, error: SpecError) -> BadMeasurements:
    problems = "".join(f"; {problem}" for problem in error.problems)
    return BadMeasurements(
        f"the job that run {run.name} has stored cannot be read: {error.message}{problems}",
        f"if you edited spec.yaml, undo the change; otherwise {files.JOB_FILE_ADVICE}",
    )


def list_run_folders(root: Path) -> list[Path]:
    """Return the folders under `root` that hold a job, most recently changed first.

    Folders that may not be entered belong to other users and are left out.

    Raises:
        TulaError: `root` cannot be read.
    """
    changed_by_folder = {
        root / name: at for name in files.list_names(root) if (at := read_job_change_time(root / name)) is not None
    }
    return sorted(changed_by_folder, key=lambda run: changed_by_folder[run], reverse=True)


def read_job_change_time(run: Path) -> int | None:
    """Return when the job of a run was last written (ns of Unix time); None if there is no visible job."""
    try:
        status = (run / _YAML_FILE).stat()
        return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
    # ValueError: a null byte, from a damaged file that names the run. OSError: no run, a run that is being removed, or one
    # of another user.
    except (OSError, ValueError):
        return None


def _compute_digest(yaml: bytes) -> str:
    return hashlib.sha256(yaml).hexdigest()
