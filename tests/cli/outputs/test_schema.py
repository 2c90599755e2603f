import io
import json
from pathlib import Path

import pytest
from quiet import quiet

from tula_cli.cli import app
from tula_cli.show.screen import Screen
from tula_cli.spec.schema.json_schema import json_schema


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    quiet(monkeypatch, tmp_path)
    return tmp_path


def tula(*words):
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run(words, screen=screen)
    return code, screen.out.getvalue(), screen.err.getvalue()


@pytest.mark.parametrize("kind", ["job", "site"])
def test_the_schema_is_printed_whole_and_in_the_envelope(kind):
    assert json.loads(tula("schema", kind)[1]) == json_schema(kind)
    assert json.loads(tula("schema", kind, "--json")[1])["data"] == json_schema(kind)
    assert tula("schema")[1] == tula("schema", "job")[1]


def test_the_schema_is_written_with_the_line_that_names_it_but_over_no_other_file(here):
    code, out, _ = tula("schema", "site", "--out", "site.schema.json")
    assert (code, json.loads(Path("site.schema.json").read_text())) == (0, json_schema("site"))
    assert out.endswith(f"# yaml-language-server: $schema={here}/site.schema.json\n")
    Path("job.yaml").write_text("name: mine\n")
    code, _, err = tula("schema", "--out", "job.yaml")
    assert code == 2 and "HINT" in err and Path("job.yaml").read_text() == "name: mine\n"


@pytest.mark.parametrize("words", [(), ("slurm",), ("--from-command", "train.py --batch-size 8 --epochs 3")])
def test_init_names_the_schema_in_the_first_line_and_check_reads_on(words, monkeypatch):
    monkeypatch.setattr("tula_cli.cluster.slurm.partitions.ask_site", lambda: None)
    assert tula("init", *words, "-o", "deep/new.yaml")[0] == 0
    first = Path("deep/new.yaml").read_text().partition("\n")[0]
    assert first == "# yaml-language-server: $schema=.tula/job.schema.json"
    assert json.loads(Path("deep", first.partition("=")[2]).read_text())["$id"] == "urn:tula:job"
    assert tula("check", "deep/new.yaml", "--offline")[0] == 0
