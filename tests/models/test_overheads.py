"""What a configuration takes beside its steps, where some probes do not tell."""

from make_results import Truth, measured, of_a_script, spec

from tula_cli.models.choice.grid import Config
from tula_cli.models.overheads import OverheadModel
from tula_cli.run.records.probes import Overheads

JOB = spec(train={"method": "lbt"})  # which has nothing to refresh


def test_each_part_is_that_of_the_nearest_probe_that_tells_it() -> None:
    far = measured(Truth(), 8, 16)
    silent = [of_a_script(measured(Truth(), nodes, 64)) for nodes in (1, 2)]
    found = OverheadModel(JOB, [*silent, far], shutdown=3.0).at(Config(2, 128))
    assert found == far.overheads.model_copy(update={"startup": 15.0, "refresh": 0.0})


def test_what_no_probe_tells_stays_unknown() -> None:
    probes = [of_a_script(measured(Truth(), nodes, 64)) for nodes in (1, 2)]
    found = OverheadModel(JOB, probes, shutdown=0.0).at(Config(4, 256))
    assert found == Overheads(startup=12.0, eval_batch=None, eval_batch_size=None, checkpoint=None, refresh=0.0)
