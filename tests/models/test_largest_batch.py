"""The search for the largest local batch, on simulated GPUs whose memory is known."""

import random

import make_runs
import pytest
from make_results import Truth, make_probe

from tula_cli.models.largest_batch import BRACKET_RESOLUTION, BatchBracket
from tula_cli.run.records.probes import Components, Failed, Footprint, Measured, OutOfMemory, PeakMemory
from tula_cli.run.records.tasks import BatchBounds

MIB = 2**20
LIMIT = 48_000


class Gpu:
    """A GPU on which a step takes `fixed` bytes and `per_sample` more for each sample of a micro-batch."""

    def __init__(self, seed: int, *, script: bool, accumulate: int) -> None:
        draws = random.Random(seed)
        self.fixed, self.per_sample = draws.uniform(10, 800) * MIB, draws.uniform(0.05, 300) * MIB
        self.capacity, self.estimate_error = draws.choice([1000, 16_000, 80_000]) * MIB, draws.uniform(0.6, 1.5)
        self.script, self.accumulate = script, accumulate
        self.spec = make_runs.spec(train={"epochs": 1, "accumulate": accumulate})
        estimated = (
            ()
            if script
            else tuple(Footprint(local_batch=n, memory=self.memory(n, self.estimate_error)) for n in (8, 32))
        )
        self.bounds = BatchBounds(
            limit=LIMIT, start=32, capacity=None if script else self.capacity, footprints=estimated
        )

    @property
    def largest(self) -> int:
        return min(LIMIT, int((self.capacity - self.fixed) // self.per_sample) * self.accumulate)

    def memory(self, local_batch: int, error: float = 1.0) -> Components:
        activations = int(error * self.per_sample * local_batch / self.accumulate)
        peak = int(self.fixed) + activations
        return Components(
            parameters=int(self.fixed), gradients=0, optimizer=0, factors=0, batch=0,
            activations=activations, peak=peak, reserved=peak,
        )  # fmt: skip

    def probe(self, local_batch: int) -> Measured | OutOfMemory:
        if local_batch > self.largest:
            return out_of_memory(local_batch)
        memory = self.memory(local_batch)
        peak = PeakMemory(states=None, peak=memory.peak, reserved=memory.peak) if self.script else memory
        known = {"memory": peak, "capacity": self.capacity, "accumulate": self.accumulate}
        return make_probe(Truth(), 1, local_batch).model_copy(update=known)

    def search(self) -> tuple[BatchBracket, list[Measured | OutOfMemory | Failed]]:
        """Return the bracket at the end of a search, and the trials."""
        results: list[Measured | OutOfMemory | Failed] = []
        while (trial := self.bracket(results).choose_next_trial()) is not None:
            assert trial % self.accumulate == 0 and 0 < trial <= LIMIT
            assert trial not in [result.local_batch for result in results], "nothing is tried twice"
            results.append(self.probe(trial))
        return self.bracket(results), results

    def bracket(self, results: list[Measured | OutOfMemory | Failed]) -> BatchBracket:
        return BatchBracket.from_results(self.spec, 1, self.bounds, results)


def out_of_memory(local_batch: int, nodes: int = 1) -> OutOfMemory:
    return OutOfMemory(id="p", nodes=nodes, gpus_per_node=1, local_batch=local_batch, assumed=False, message="")


@pytest.mark.parametrize("script", [False, True])
def test_a_few_trials_find_the_largest_batch_to_a_few_percent(script: bool) -> None:
    counts = []
    for seed in range(60):
        gpu = Gpu(seed, script=script, accumulate=1 + seed % 3)
        bracket, trials = gpu.search()
        assert gpu.largest * (1 - 1 / BRACKET_RESOLUTION) - gpu.accumulate <= bracket.fitting <= gpu.largest
        assert bracket.failing is None or bracket.failing > gpu.largest
        counts.append(len(trials))
    assert sorted(counts)[len(counts) // 2] <= 5 and max(counts) <= 8


def test_the_first_trial_leaves_the_margin_free_so_that_it_probably_fits() -> None:
    gpu = Gpu(3, script=False, accumulate=1)
    first = gpu.bracket([]).choose_next_trial()
    assert first is not None and gpu.memory(first, gpu.estimate_error).peak <= 0.9 * gpu.capacity


def test_without_a_known_capacity_no_batch_is_tried_beyond_the_first_that_fits() -> None:
    gpu = Gpu(0, script=True, accumulate=1)
    fits = gpu.probe(32).model_copy(update={"capacity": None})
    assert gpu.bracket([]).choose_next_trial() == 32
    assert gpu.bracket([fits]).choose_next_trial() is None
    assert gpu.bracket([fits]).compute_headroom() is None


def test_results_on_other_numbers_of_nodes_do_not_count() -> None:
    gpu = Gpu(0, script=False, accumulate=1)
    elsewhere = make_probe(Truth(), 2, 4096)
    assert gpu.bracket([elsewhere, out_of_memory(8, nodes=2)]) == gpu.bracket([])


def test_headroom_is_the_share_that_the_largest_batch_leaves_free() -> None:
    gpu = Gpu(3, script=False, accumulate=1)
    bracket, _ = gpu.search()
    assert bracket.compute_headroom() == pytest.approx(1 - gpu.memory(bracket.fitting).peak / gpu.capacity, abs=0.01)
    with_margin = bracket.estimate_largest_batch(margin=0.1)
    assert with_margin is not None and gpu.memory(with_margin).peak == pytest.approx(0.9 * gpu.capacity, rel=0.02)


def test_memory_that_no_batch_could_use_is_not_free() -> None:
    gpu = Gpu(3, script=False, accumulate=1)
    _, trials = gpu.search()
    capacity = int(1.25 * gpu.capacity)  # a fifth is lost, so the batch that did not fit needs less than that
    bracket = gpu.bracket(
        [trial.model_copy(update={"capacity": capacity}) if isinstance(trial, Measured) else trial for trial in trials]
    )
    headroom, with_margin = bracket.compute_headroom(), bracket.estimate_largest_batch(margin=0.1)
    assert headroom is not None and headroom < 0.05
    assert with_margin is not None and gpu.memory(with_margin).peak == pytest.approx(0.9 * gpu.capacity, rel=0.05)


def test_a_search_that_nothing_fits_ends_at_the_smallest_batch() -> None:
    gpu = Gpu(0, script=False, accumulate=2)
    sizes = [64]
    while (trial := gpu.bracket([out_of_memory(size) for size in sizes]).choose_next_trial()) is not None:
        assert trial < min(sizes)
        sizes.append(trial)
    assert min(sizes) == 2


def test_no_headroom_is_inferred_from_memory_that_falls_with_the_batch() -> None:
    """The batch that did not fit may need hardly more than the largest one that fitted."""
    probes = [
        make_probe(Truth(capacity=700 * MIB), 1, batch, memory=PeakMemory(states=None, peak=peak, reserved=peak))
        for batch, peak in ((16, 680 * MIB), (20, 670 * MIB))
    ]
    too_large = out_of_memory(40)
    bounds = BatchBounds(limit=64, start=16, capacity=None, footprints=())
    bracket = BatchBracket.from_results(make_runs.spec(), 1, bounds, [*probes, too_large])
    assert bracket.model is not None and not bracket.model.grows and bracket.compute_headroom() == 0
