"""Time beside the steps of a configuration, if some probes did not measure it."""

import numpy as np
import pytest
from make_results import Truth, as_script_probe, make_probe, make_spec

from tula_cli.models.choice.candidates import Ints
from tula_cli.models.overheads import OverheadModel, compute_median_queue_wait
from tula_cli.run.records.jobs import Attempt, Job

JOB = make_spec(train={"method": "lbt"})  # which has nothing to refresh


def at(nodes: int, local_batch: int) -> tuple[Ints, Ints, Ints]:
    return np.array([nodes]), np.array([local_batch]), np.array([nodes * local_batch])


def test_each_part_is_that_of_the_nearest_probe_that_tells_it() -> None:
    far = make_probe(Truth(), 8, 16)
    silent = [as_script_probe(make_probe(Truth(), nodes, 64)) for nodes in (1, 2)]
    result = OverheadModel(JOB, [*silent, far], shutdown=3.0).estimate_overheads(*at(2, 64))
    assert (result.startup, result.eval_batch, result.checkpoint, result.refresh) == (
        15.0, far.overheads.eval_batch, far.overheads.checkpoint, 0.0,
    )  # fmt: skip
    assert result.eval_batch_size == far.overheads.eval_batch_size


def test_what_no_probe_tells_stays_unknown() -> None:
    probes = [as_script_probe(make_probe(Truth(), nodes, 64)) for nodes in (1, 2)]
    result = OverheadModel(JOB, probes, shutdown=0.0).estimate_overheads(*at(4, 64))
    assert (result.startup, result.eval_batch, result.checkpoint, result.refresh) == (12.0, None, None, 0.0)
    assert result.eval_batch_size == 0


def starts_on(nodes: list[int], startups: dict[int, list[float]]) -> list[float]:
    """Return the estimated start-up time on each number of nodes, from one probe per measured start-up."""
    probes = [
        probe.model_copy(update={"overheads": probe.overheads.model_copy(update={"startup": seconds})})
        for count, measured_here in startups.items()
        for local_batch, seconds in zip((16, 32, 64), measured_here, strict=False)
        for probe in [make_probe(Truth(), count, local_batch)]
    ]
    counts = np.array(nodes)
    estimate = OverheadModel(JOB, probes, shutdown=0.0).estimate_overheads(counts, counts * 0 + 64, counts * 64)
    return estimate.startup.tolist()


@pytest.mark.parametrize(
    ("startups", "expected"),
    [
        ({1: [10.0], 2: [20.0], 4: [40.0]}, [10, 20, 40]),
        ({4: [9.0], 2: [12.0], 1: [60.0]}, [12, 12, 12]),  # the first job also fills the file cache
        ({1: [10.0], 2: [14.0], 4: [12.0]}, [10, 13, 13]),
        ({1: [30.0, 31.0], 4: [10.0, 11.0]}, [20.5, 20.5, 20.5]),  # two starts each show nothing
        ({1: [30.0, 31.0, 32.0], 2: [20.0, 21.0, 22.0], 4: [10.0, 19.0, 20.5]}, [31, 20.25, 20.25]),
    ],
)
def test_startup_does_not_get_shorter_with_more_nodes_unless_it_is_clear(
    startups: dict[int, list[float]], expected: list[float]
) -> None:
    assert starts_on([1, 2, 4], startups) == expected


def test_the_wait_in_the_queue_is_the_median_over_jobs_that_started() -> None:
    jobs = [
        Job(id=f"j{n}", scheduler="slurm", scheduler_id=str(n), nodes=1, submitted_at=100.0 * n) for n in range(1, 5)
    ]
    starts = {"1": 110.0, "2": 230.0, "3": 1300.0}  # waited 10, 30 and 1,000 s
    attempts = [
        Attempt(task="t", number=n, started_at=at + later, allocation=f"{link}.0")
        for n, (link, at) in enumerate(starts.items())
        for later in (0.0, 50.0)
    ]
    assert compute_median_queue_wait(jobs, attempts) == 30.0
    assert compute_median_queue_wait(jobs, []) == 0.0
    here = [job.model_copy(update={"scheduler": "local"}) for job in jobs]
    assert compute_median_queue_wait(here, attempts) == 0.0
