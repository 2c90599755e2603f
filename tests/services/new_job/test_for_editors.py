"""The schemas as files beside a job, and the line that leads an editor to the job's."""

import io
import json
from pathlib import Path

import pytest
from isolation import isolate_environment

from tula_cli.cli import app
from tula_cli.errors import CannotWrite, SpecError
from tula_cli.services.init import get_schema_path, write_schema, write_schemas_and_add_reference
from tula_cli.show.screen import Screen
from tula_cli.spec.json_schema import make_json_schema


def test_the_schemas_of_job_and_site_lie_beside_a_job_which_names_its_own(tmp_path):
    text = write_schemas_and_add_reference("name: x\n", tmp_path / "deep" / "job.yaml")
    first, rest = text.split("\n", 1)
    assert (first, rest) == ("# yaml-language-server: $schema=.tula/job.schema.json", "name: x\n")
    for kind in ("job", "site"):
        assert json.loads((tmp_path / "deep" / get_schema_path(kind)).read_text()) == make_json_schema(kind)


def test_a_schema_is_renewed_and_nothing_else_is_replaced(tmp_path):
    schema, job = tmp_path / "s.json", tmp_path / "job.yaml"
    write_schema("site", schema)
    write_schema("job", schema)
    assert json.loads(schema.read_text()) == make_json_schema("job")
    job.write_text("name: mine\n")
    for path in (job, tmp_path):
        with pytest.raises(SpecError, match="not a schema that tula wrote"):
            write_schema("job", path)
    assert job.read_text() == "name: mine\n"


def test_what_cannot_be_written_is_reported(tmp_path):
    (tmp_path / ".tula").write_text("a file")
    with pytest.raises((CannotWrite, SpecError)):
        write_schemas_and_add_reference("", tmp_path / "job.yaml")


@pytest.mark.parametrize("words", [(), ("slurm",), ("--from-command", "train.py --batch-size 8 --epochs 3")])
def test_init_writes_the_schemas_and_check_reads_past_the_line_that_names_one(words, tmp_path, monkeypatch):
    isolate_environment(monkeypatch, tmp_path)
    monkeypatch.setattr("tula_cli.cluster.slurm.site.query_site", lambda: None)

    def tula(*words):
        return app.run(words, screen=Screen(out=io.StringIO(), err=io.StringIO()))

    Path("deep").mkdir()
    assert tula("init", *words, "-o", "deep/new.yaml") == 0
    first = Path("deep/new.yaml").read_text().partition("\n")[0]
    assert first == "# yaml-language-server: $schema=.tula/job.schema.json"
    assert json.loads(Path("deep", first.partition("=")[2]).read_text())["$id"] == "urn:tula:job"
    assert json.loads(Path("deep/.tula/site.schema.json").read_text())["$id"] == "urn:tula:site"
    assert tula("check", "deep/new.yaml", "--offline") == 0
