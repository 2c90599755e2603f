from unittest import mock

import make_runs as make
import pytest

from tula_cli.errors import BadMeasurements
from tula_cli.run import job_runs, parsed_spec
from tula_cli.run.directory import RunDir
from tula_cli.spec import yaml_text


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, make.spec())


def test_a_job_is_read_without_its_yaml(run):
    with mock.patch.object(yaml_text, "read_yaml", side_effect=AssertionError):
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


HALF, ZEROS, NO_TEXT = (lambda text: text[: len(text) // 2], lambda text: bytes(len(text)), lambda text: b"\xff" + text)


@pytest.mark.promise(
    "the run directory",
    "spec.yaml is truncated or zeroed",
    "the job is read from spec.json, and a warning names the file",
)
@pytest.mark.parametrize(
    "damage", [HALF, ZEROS, NO_TEXT, lambda _: b"", lambda text: text[: text.rindex(b"\n", 0, -1) + 1]]
)
def test_a_damaged_yaml_is_no_edit_and_the_json_beside_it_counts(run, damage):
    path = run.path / "spec.yaml"
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert run.read_spec() == make.spec()
    assert job_runs.load_with_overrides(run, ["search.max_batch=64"]).search.max_batch == 64
    (warning,) = run.read_snapshot().record_warnings
    assert str(path) in warning.text and "read from spec.json" in warning.text
    assert warning.text.endswith("to change the settings, edit the job file instead of spec.yaml.")
    run.save_job(make.spec())
    assert path.read_bytes() == intact and run.read_snapshot().record_warnings == []


@pytest.mark.parametrize("text", ["model: [", "", "[1]", "model: {name: resnet18}\nnonsense: 3\n"])
def test_a_job_that_is_lost_is_no_error_of_the_job_file_of_the_user(run, text):
    (run.path / "spec.json").unlink()
    (run.path / "spec.yaml").write_text(text)
    with pytest.raises(BadMeasurements, match=r"the job that run .* has stored cannot be read: .*spec\.yaml") as caught:
        run.read_spec()
    assert "undo the change" in caught.value.hint and "keeps all measurements" in caught.value.hint
    run.save_job(make.spec())
    assert run.read_spec() == make.spec()
