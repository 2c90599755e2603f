"""Tables of a report mark what is uncertain, and their captions explain the marks."""

import make_reports as reports
import pytest
from make_reports import column, table
from make_results import Truth, measured

from tula_cli.run.directory import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose probe of the choice, on one node, was disturbed: steps took three times as long there as they take."""
    run = reports.answered(reports.probed(tmp_path_factory.mktemp("caveats")), "cost")
    kept = run.recommendation()
    assert kept is not None and kept.choice.nodes == 1
    disturbed = measured(Truth(jitter=0.01), 1, kept.choice.batch)
    run.write_result(disturbed.model_copy(update={"step_times": tuple(3 * step for step in disturbed.step_times)}))
    return run


@pytest.mark.parametrize("key", ["configurations", "strong_scaling"])
def test_tables_of_the_report_have_notes_that_the_caption_explains(key: str, run: RunDir) -> None:
    own = table(reports.report(run), key)
    notes = column(own, "note")
    assert any("efficiency above 110 %" in note for note in notes) and any("efficiency" not in note for note in notes)
    assert "Efficiency above 110 %: a node does over 110 %" in own.caption
    assert ("Wide interval" in own.caption) == any("wide interval" in note for note in notes)
