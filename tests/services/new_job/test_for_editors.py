"""The schema as a file beside a job, and the line that leads an editor to it."""

import json
from pathlib import Path

import pytest

from tula_cli.errors import CannotWrite, SpecError
from tula_cli.services.new_job.for_editors import schema_comment, schema_text, with_schema, write_schema
from tula_cli.spec.schema.json_schema import json_schema


def test_a_job_names_the_schema_that_lies_beside_it(tmp_path):
    text = with_schema("name: x\n", tmp_path / "deep" / "job.yaml")
    first, rest = text.split("\n", 1)
    assert (first, rest) == ("# yaml-language-server: $schema=.tula/job.schema.json", "name: x\n")
    beside = tmp_path / "deep" / first.partition("$schema=")[2]
    assert json.loads(beside.read_text()) == json_schema("job")


def test_a_schema_is_renewed_and_nothing_else_is_replaced(tmp_path):
    schema, job = tmp_path / "s.json", tmp_path / "job.yaml"
    write_schema("site", schema)
    write_schema("job", schema)
    assert schema.read_text() == schema_text("job")
    job.write_text("name: mine\n")
    for path in (job, tmp_path):
        with pytest.raises(SpecError, match="no schema that tula wrote"):
            write_schema("job", path)
    assert job.read_text() == "name: mine\n"


def test_what_cannot_be_written_is_told(tmp_path):
    (tmp_path / ".tula").write_text("a file")
    with pytest.raises((CannotWrite, SpecError)):
        with_schema("", tmp_path / "job.yaml")


def test_an_absolute_path_stays_one():
    assert schema_comment(Path("/etc/tula/s.json")) == "# yaml-language-server: $schema=/etc/tula/s.json"
