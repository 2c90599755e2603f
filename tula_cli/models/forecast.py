"""Predict time, cost, memory and feasibility of a run at any configuration from its probes."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Infeasible
from tula_cli.models import interruptions, power
from tula_cli.models.choice.columns import Flags, Ints, compute_by_value, convert_to_columns, to_columns, to_configs
from tula_cli.models.choice.grid import Config, list_places
from tula_cli.models.choice.offers import Offers
from tula_cli.models.choice.whole_trainings import RunModels, Steps, Trainings, index_probes
from tula_cli.models.memory import memory
from tula_cli.models.observations import (
    NO_OTHER_SIZES,
    OtherSizes,
    Probe,
    T,
    find_capacity,
    list_measurement_warnings,
    require_measurements,
    require_one_hardware,
    warn_limits,
)
from tula_cli.models.out_of_memory import cannot_accumulate, find_smallest_ruled_out, is_ruled_out_by, list_splits
from tula_cli.models.overheads import OverheadModel, compute_median_shutdown
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.ramp.stage_nodes import Worth
from tula_cli.models.ramp.stage_times import StageTimes, make_change_costs
from tula_cli.models.time import steptime, stretches
from tula_cli.models.time.steptime import StepTimeFit
from tula_cli.models.time.stragglers import fit_with_stragglers
from tula_cli.run.records.base import Market
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, TrainedSteps
from tula_cli.run.records.results import Save
from tula_cli.run.records.tasks import Rung
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import format_count

_BLOCK = 8192
"""Configurations that are predicted at a time, to bound the memory of intermediate arrays."""


@dataclass(frozen=True, kw_only=True)
class Forecast(RunModels):
    """The fitted models of one run."""

    steps: StepTimeFit
    ooms: tuple[Probe, ...]  # that were out of memory
    shutdown: float  # seconds from the last measurement of a job to its end
    warnings: tuple[Diagnostic, ...]
    held_up: bool  # by what no model foresees: measured configurations alone are known
    noise: NoisePath | None = None  # of the gradients, where the stages of a growing batch follow from it
    queue: float = 0.0  # seconds that a job waits for nodes, as far as known
    stages_by: Worth = "time"  # that the nodes of stages are chosen by (train.ramp_nodes)

    @classmethod
    def from_results(
        cls,
        spec: JobSpec,
        results: Iterable[Measured | OutOfMemory | Failed],
        *,
        inspection: Inspection | None = None,
        attempts: Iterable[Attempt] = (),
        saves: Iterable[Save] = (),
        trained: Sequence[TrainedSteps] = (),
        other_sizes: OtherSizes = NO_OTHER_SIZES,
        noise: NoisePath | None = None,
    ) -> "Forecast":
        """Fit all models.

        Args:
            spec: the job.
            results: results of the probes, in any order.
            inspection: estimates of memory and the capacity, used if the probes have not measured them.
            attempts: start and end times of the probes' jobs, from which the shutdown time follows.
            saves: checkpoints written by trainings of a script, from which the cost of an interruption follows.
            trained: step times of trainings, also used in the fit.
            other_sizes: results with other numbers of GPUs per node, used for the step time only.
            noise: of the gradients, which determines the stages of `train.ramp: noise`.

        Raises:
            Infeasible: every probe was out of memory.
            TooFew: nothing was measured.
            BadMeasurements: the probes ran on different hardware, or cannot be fitted together.
        """
        all_results = list(results)
        measured = sorted(_select_type(all_results, Measured), key=lambda probe: (probe.nodes, probe.local_batch))
        ooms = _select_type(all_results, OutOfMemory)
        require_measurements(measured, ooms, _select_type(all_results, Failed), script=spec.script is not None)
        require_one_hardware([*measured, *other_sizes.probes])
        footprints = inspection.footprints if inspection else ()
        steps, held_up = fit_with_stragglers(spec, [*measured, *other_sizes.probes], [*trained, *other_sizes.trained])
        memory_model = memory.fit_memory_model(
            [*measured, *footprints], accumulate=spec.train.accumulate, sharded=spec.train.sharded
        )
        return cls(
            spec=spec,
            steps=steps,
            held_up=bool(held_up),
            memory=memory_model,
            power=power.fit_power_model(measured),
            capacity=find_capacity(spec, measured, inspection),
            probes={(probe.nodes, probe.local_batch): probe for probe in measured},
            ooms=tuple((oom.nodes, oom.local_batch) for oom in ooms),
            dataset_size=measured[0].dataset_size,
            eval_size=next((probe.eval_size for probe in measured if probe.eval_size is not None), None),
            shutdown=compute_median_shutdown(attempts, measured),
            saving=interruptions.find_checkpoint_schedule_of_job(spec, saves, dataset_size=measured[0].dataset_size),
            warnings=(
                *list_measurement_warnings(measured),
                *steps.warnings,
                *held_up,
                *filter(None, [memory_model.warning]),
                *warn_limits(spec, measured, noise),
            ),
            noise=noise,
            trained=stretches.group_trainings_by_configuration(trained),
        )

    def largest_local_batch(self, nodes: int) -> int | None:
        """Return the largest local batch on `nodes` nodes that leaves the memory margin free; None if unbounded."""
        return self._largest(nodes if self.memory.sharded else 1)

    @cached_property
    def _largest(self) -> Callable[[int], int | None]:
        """Cached function from a number of nodes to its largest local batch."""
        gpus, margin = self.spec.cluster.gpus_per_node, MEMORY_MARGIN
        return functools.cache(
            lambda nodes: self.memory.for_ranks(nodes * gpus).largest_local_batch(self.capacity, margin=margin)
        )

    def candidates(self, nodes: Iterable[int] | None = None) -> list[Config]:
        """Return the candidates of the spec (or on other numbers of nodes), whether they fit or not."""
        return to_configs(*self._grid(nodes))

    @cached_property
    def count(self) -> int:
        """Number of candidates of the spec."""
        return len(self._candidate_grid[0])

    @cached_property
    def _candidate_grid(self) -> tuple[Ints, Ints]:
        return self._grid(self.spec.search.nodes)

    def _grid(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the candidates."""
        if nodes is None:
            return self._candidate_grid
        search = self.spec.search
        grid = list_places(
            nodes,
            gpus_per_node=self.spec.cluster.gpus_per_node,
            min_batch=search.min_batch,
            max_batch=min(self.dataset_size, search.max_batch or self.dataset_size),
            accumulate=self.spec.train.accumulate,
        )
        return convert_to_columns(grid)

    def feasible(self, nodes: Iterable[int] | None = None) -> list[Config]:
        """Return the candidates that fit."""
        return to_configs(*self._feasible(nodes))

    def _feasible(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the candidates that fit, considering memory, OOM probes and ramp stages."""
        counts, batch = self._grid(nodes)
        local_batch, sharded = batch // (counts * self.spec.cluster.gpus_per_node), self.spec.train.sharded
        fits = local_batch <= (compute_by_value(self._max_local_batch, counts) if sharded else self._max_local_batch(1))
        for oom in self.ooms:
            fits &= ~is_ruled_out_by(oom, counts, local_batch, sharded=sharded)
        fits[list(self.trainings.probes_at(counts, local_batch))] = True
        fits &= self.trainings.stages.fits_mask(counts, batch)
        return counts[fits], batch[fits]

    def _to_begin_at(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the feasible candidates at which a training may start, given its ramp stages."""
        counts, batch = self._feasible(nodes)
        begin = self.trainings.stages.can_begin_mask(counts, batch)
        return counts[begin], batch[begin]

    def _max_local_batch(self, nodes: int) -> float:
        largest = self.largest_local_batch(nodes)
        return inf if largest is None else largest

    def known_candidates(self, nodes: Iterable[int] | None = None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the candidates to start at whose step time can be predicted from the probes."""
        counts, batch = self._to_begin_at(nodes)
        refused = self._unknown_mask(counts, batch)
        return counts[~refused], batch[~refused]

    def _unknown_mask(self, nodes: Ints, batch: Ints) -> Flags:
        """Return a mask of the configurations whose step time cannot be predicted (see `why_unknown`)."""
        gpus = self.spec.cluster.gpus_per_node
        local_batch = batch // (nodes * gpus)
        refused = self.steps.refused(nodes, gpus, local_batch)
        refused[list(self.trainings.probes_at(nodes, local_batch))] = False
        return refused

    def why_not(self, config: Config) -> str:
        """Return why a configuration cannot run; empty if it can.

        A probe that ran takes precedence over the models. A probe that was out of memory rules out its local batch and
        all larger ones: on any number of nodes, or, if the GPUs share a sharded model, on the same number of nodes and
        fewer.
        """
        world = config.nodes * self.spec.cluster.gpus_per_node
        if config.batch > self.dataset_size:
            return f"the batch is larger than the dataset ({self.dataset_size} training samples)"
        if config.batch < 1 or config.batch % (world * self.spec.train.accumulate):
            return f"the batch does not divide among {world} GPUs x {self.spec.train.accumulate} accumulation steps"
        if why := self.trainings.stages.why_not(config):
            return why
        return self.too_large(config)

    def why_not_begun(self, config: Config) -> str:
        """Return why a training cannot start at a configuration or with its stages; empty if it can."""
        return self.why_not(config) or self.trainings.stages.why_not_begun(config)

    def too_large(self, config: Config) -> str:
        """Return why a batch does not fit the GPUs' memory; empty if it does."""
        local_batch = config.local_batch(self.spec.cluster.gpus_per_node)
        if (config.nodes, local_batch) in self.probes:
            return ""
        oom = find_smallest_ruled_out(self.ooms, config.nodes, local_batch, sharded=self.spec.train.sharded)
        if oom is not None:
            return f"a local batch of {oom} was out of memory"
        largest = self.largest_local_batch(config.nodes)
        if largest is not None and local_batch > largest:
            return f"at most {largest} samples fit one GPU with {MEMORY_MARGIN:.0%} of its memory left free"
        return ""

    def why_unknown(self, config: Config) -> str:
        """Return why the step time of a configuration cannot be predicted from the probes; empty if it can."""
        local_batch = config.local_batch(self.spec.cluster.gpus_per_node)
        if (config.nodes, local_batch) in self.probes:
            return ""
        return self.steps.refusal(config.nodes, self.spec.cluster.gpus_per_node, local_batch)

    def predict(self, config: Config) -> Prediction:
        """Predict a configuration; a measured step time takes precedence over the fit.

        Raises:
            Infeasible: it cannot run.
            BadMeasurements: its step time cannot be predicted from the probes.
        """
        if why := self.why_not(config):
            raise Infeasible(
                f"batch {config.batch} on {format_count(config.nodes)}: {why}", "tula recommend shows what fits"
            )
        if why := self.why_unknown(config):
            raise steptime.make_prediction_error(f"batch {config.batch} on {format_count(config.nodes)}", why)
        return self.table(*to_columns([config])).record(0)

    def predictions(self, nodes: Iterable[int] | None = None) -> tuple[Prediction, ...]:
        """Predict every feasible candidate whose step time is known from the probes, fastest first."""
        return self.table(*self.known_candidates(nodes)).ordered().records()

    def offers(self, nodes: Iterable[int] | None = None) -> Offers:
        """Predict the same candidates on each market of the pricing, fastest first."""
        table = self.table(*self.known_candidates(nodes))
        return Offers.join([table, self.trainings.on_spot(table)]).ordered()

    def unknown_candidates(self, nodes: Iterable[int] | None = None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the candidates to start at whose step time is unknown, in order."""
        counts, batch = self._to_begin_at(nodes)
        refused = self._unknown_mask(counts, batch)
        return counts[refused], batch[refused]

    def table(self, nodes: Ints, batch: Ints) -> Offers:
        """Predict configurations that fit and whose step times are known from the probes, in the given order.

        Args:
            nodes, batch: shape (n,).
        """
        blocks = range(0, max(1, len(nodes)), _BLOCK)
        return Offers.join([self._block(nodes[at : at + _BLOCK], batch[at : at + _BLOCK]) for at in blocks])

    def _block(self, nodes: Ints, batch: Ints) -> Offers:
        probes = self.trainings.probes_at(nodes, batch // (nodes * self.spec.cluster.gpus_per_node))
        return self.trainings.on_demand(nodes, batch, self._steps(nodes, batch), probes)

    def on_spot(self, on_demand: Prediction) -> Prediction | None:
        """Return the prediction for spot nodes, or None if `Trainings.on_spot` leaves it out."""
        spot_offers = self.trainings.on_spot(Offers.of([on_demand]))
        return spot_offers.record(0) if len(spot_offers) else None

    def fallback_rungs(self, nodes: int, batch: int, *, market: Market = "on_demand") -> tuple[Rung, ...]:
        """Return `batch` and every smaller feasible candidate on that number of nodes, descending.

        The first rung is `batch` whether or not it is a candidate; each rung has a prediction for `market` if there is
        one.
        """
        smaller = [config for config in self.feasible([nodes]) if config.batch < batch]
        rungs = [Config(nodes, batch), *reversed(smaller)]
        first_rung, *rest = (Rung(batch=config.batch, prediction=self._forecast(config, market)) for config in rungs)
        return first_rung.model_copy(update={"cut": self._predictions_by_split(rungs[0], market)}), *rest

    def _predictions_by_split(self, config: Config, market: Market) -> dict[int, Prediction]:
        """Return the predictions of a configuration with split micro-batches, by the number of parts."""
        accumulate, local_batch = self.spec.train.accumulate, config.local_batch(self.spec.cluster.gpus_per_node)
        splits = list_splits(config.batch, micro_batch=local_batch // accumulate, micro_batches=accumulate)
        rows = (
            {} if cannot_accumulate(self.spec) else {split: self.predict_split(config, split) for split in splits.into}
        )
        predictions = {split: self.on_spot(row) if row and market == "spot" else row for split, row in rows.items()}
        return {split: row for split, row in predictions.items() if row is not None}

    def predict_split(self, config: Config, split: int) -> Prediction | None:
        """Predict a configuration whose micro-batches are computed in `split` parts (`train.oom_policy: accumulate`).

        A step is one step at a batch smaller by that factor, preceded by the local work of the other parts. Each part
        counts an optimizer update although only one is made, so the prediction is slightly too long. None if the step
        time is unknown, or the parts are not equal.
        """
        gpus, smaller = self.spec.cluster.gpus_per_node, Config(config.nodes, config.batch // split)
        if config.batch % (config.nodes * gpus * self.spec.train.accumulate * split) or self.why_unknown(smaller):
            return None
        nodes, batch, size = to_columns([smaller])[0], to_columns([config])[1], smaller.local_batch(gpus)
        probes = self.trainings.probes_at(nodes, np.array([size]))
        step = self._steps(*to_columns([smaller]))
        alone = (probes and probes[0].compute_time) or self.steps.compute(config.nodes, gpus, size)
        longer = step.times(1 + (split - 1) * alone / float(step.seconds[0]))
        return self.trainings.on_demand(nodes, batch, longer, {}, memory_batches=np.array([size])).record(0)

    def _forecast(self, config: Config, market: Market) -> Prediction | None:
        row = None if self.why_not(config) or self.why_unknown(config) else self.predict(config)
        return row if row is None or market == "on_demand" else self.on_spot(row)

    def _steps(self, nodes: Ints, batch: Ints) -> Steps:
        """Return the step times, measured ones if available."""
        gpus, local_batch = self.spec.cluster.gpus_per_node, batch // (nodes * self.spec.cluster.gpus_per_node)
        seconds, low, high = self.steps.predict_all(nodes, np.full(len(nodes), gpus), local_batch)
        fitted = np.full(len(nodes), np.nan)
        configurations = index_probes([*self.probes, *self.trained], nodes, local_batch)
        at = list(configurations)
        repeats = self.steps.repeat_deviation(nodes[at], np.full(len(at), gpus), local_batch[at])
        for (index, configuration), spread in zip(configurations.items(), repeats, strict=True):
            probe = self.probes.get(configuration)
            times = None if probe is None else probe.step_times
            measured_times = stretches.estimate_from_measurements(
                times, self.trained.get(configuration, ()), float(spread)
            )
            assert measured_times is not None
            fitted[index], seconds[index] = seconds[index], measured_times.seconds
            low[index], high[index] = (
                np.nan if end is None else end for end in (measured_times.low, measured_times.high)
            )
        return Steps(seconds, low, high, fitted)

    @cached_property
    def trainings(self) -> Trainings:
        """The models of whole trainings: their steps and overheads."""
        overheads = OverheadModel(self.spec, tuple(self.probes.values()), self.shutdown)
        stages = StageTimes(
            self.spec,
            self.dataset_size,
            lambda those: self._steps(*to_columns(those)).estimates(),
            self.why_unknown,
            noise=self.noise,
            too_large=self.too_large,
            change=make_change_costs(overheads, self.spec.cluster.gpus_per_node, self.queue),
            by=self.stages_by,
        )
        return Trainings(self, overheads, stages)

    def describe_interruption(self, row: Prediction) -> str:
        """Describe the cost of an interruption of a script at a configuration; empty for tula's own loop."""
        if self.saving is None:
            return ""
        return self.saving.describe_loss(row.step_time, epoch_steps=self.dataset_size // row.batch)


def _select_type(results: Sequence[Measured | OutOfMemory | Failed], kind: type[T]) -> list[T]:
    return [result for result in results if isinstance(result, kind)]
