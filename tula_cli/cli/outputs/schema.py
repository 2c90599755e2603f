"""`tula schema`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tula_cli.show.screen import Screen


def schema(
    screen: Screen,
    kind: Annotated[Literal["job", "site"], typer.Argument(help="Of a job.yaml, or of a site.yaml.")] = "job",
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it there instead.")] = None,
) -> None:
    """Print the JSON Schema of job.yaml or site.yaml, with a description of every key.

    Editors complete and check by it; tula init writes that of a job beside it.
    """
    from tula_cli.services.new_job.for_editors import schema_comment, schema_text, write_schema
    from tula_cli.spec.schema.json_schema import json_schema

    if out is not None:
        write_schema(kind, out)
        line = schema_comment(out.absolute())
        screen.answer({"path": out, "kind": kind, "line": line}, [f"wrote {out}; first line of a {kind}.yaml: {line}"])
    elif screen.as_json:
        screen.answer(json_schema(kind), ())
    else:  # as it is, on a terminal too: a broken line is no JSON
        screen.line(schema_text(kind).rstrip("\n"), None)
