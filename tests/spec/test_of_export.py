from typing import Any

import pytest
from make_runs import spec

from tula_cli.errors import SpecError
from tula_cli.spec.load import dump_yaml, load_spec
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature


def test_trackers_change_neither_measurements_nor_weights_and_stand_where_they_are_asked_for(tmp_path: Any) -> None:
    plain, requested = spec(), spec(export=[{"to": "mlflow", "uri": "http://host:5000"}])
    assert compute_measurement_signature(plain) == compute_measurement_signature(requested)
    assert compute_train_signature(plain, nodes=1, batch=64) == compute_train_signature(requested, nodes=1, batch=64)
    assert "export" not in dump_yaml(plain), "an older tula reads that"
    (tmp_path / "job.yaml").write_text(dump_yaml(requested))
    assert load_spec(tmp_path / "job.yaml").export == requested.export


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"to": "tensorbord"}, "did you mean tensorboard"),
        ({"to": "mlflow", "uri": "https://me:secret@host"}, "must not contain a user name or password"),
        ({"to": "mlflow", "every": 0.5}, "30 seconds; tula export --follow --every"),
        ({"to": "mlflow", "when": "always"}, "when"),
    ],
)
def test_what_is_wrong_in_an_entry_is_reported(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as error:
        spec(export=[entry])
    assert words in str(error.value)
