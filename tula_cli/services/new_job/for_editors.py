"""The schema of job.yaml and site.yaml as a file, and the line by which an editor finds it."""

import json
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.run.files import MODE_FOR_ALL, write_atomic
from tula_cli.spec.schema.json_schema import Kind, json_schema

SCHEMA_PATH = Path(".tula", "job.schema.json")
"""Relative to the folder of the job: it is found without a network, from any machine, and hidden files are no part of the code
that a run holds."""
_TULA_SCHEMA = '"$id": "urn:tula:'


def schema_text(kind: Kind) -> str:
    """Return the schema of a file as JSON text.

    Raises:
        TulaError: this installation has no sources, and so no descriptions.
    """
    return json.dumps(json_schema(kind), indent=1, ensure_ascii=False) + "\n"


def write_schema(kind: Kind, path: Path) -> None:
    """Write the schema, over an older one but nothing else.

    Raises:
        SpecError: the file is there, and no schema of tula's.
        CannotWrite: it cannot be written.
    """
    if path.is_dir() or (path.exists() and _TULA_SCHEMA not in _read_beginning(path)):
        raise SpecError(f"{path} is there already, and is no schema that tula wrote", "remove it, or name another file")
    write_atomic(path, schema_text(kind), mode=MODE_FOR_ALL)


def _read_beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(400).decode(errors="replace")
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


def schema_comment(schema: Path) -> str:
    """Return the first line of a YAML file by which an editor's language server finds the schema.

    Args:
        schema: its path, relative to the YAML file, or absolute.
    """
    return f"# yaml-language-server: $schema={schema.as_posix()}"


def with_schema(text: str, job: Path) -> str:
    """Write the schema beside a job that is to be written, and return the job's text with the line that names it.

    Args:
        text: of the job.
        job: its path.

    Raises:
        SpecError, CannotWrite: as of `write_schema`.
    """
    write_schema("job", job.parent / SCHEMA_PATH)
    return f"{schema_comment(SCHEMA_PATH)}\n{text}"
