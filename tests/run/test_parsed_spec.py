from unittest import mock

import make_runs as make
import pytest

from tula_cli.run import directory, parsed_spec
from tula_cli.run.directory import RunDir


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, make.spec())


def test_a_job_is_read_without_its_yaml(run):
    with mock.patch.object(directory, "read_yaml", side_effect=AssertionError):
        assert run.read_spec() == make.spec()


def test_an_edited_yaml_counts_and_the_json_beside_it_does_not(run):
    path = run.path / "spec.yaml"
    path.write_text(path.read_text().replace("lr: 0.1", "lr: 0.2"))
    assert parsed_spec.read_parsed_spec(run.path) is None and run.read_spec().optimizer.lr == 0.2


@pytest.mark.parametrize("text", ["", "[1]", '{"digest": 3}', '{"digest": "x", "spec": {}}', None])
def test_a_damaged_or_missing_json_costs_time_alone(run, text):
    (run.path / "spec.json").unlink()
    if text is not None:
        (run.path / "spec.json").write_text(text)
    assert run.read_spec() == make.spec()
