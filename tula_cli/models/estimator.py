"""Predict time, cost, memory and feasibility of a run at any configuration from its probes.

observations -> Estimator.fit() -> .predict_candidates() -> .satisfying(query) -> choose_configuration()
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Infeasible
from tula_cli.models import cost, memory
from tula_cli.models.choice.candidates import (
    Candidates,
    Flags,
    Floats,
    Ints,
    StageTable,
    apply_to_distinct_values,
    convert_to_columns,
    convert_to_configs,
)
from tula_cli.models.choice.grid import Config, list_candidates
from tula_cli.models.cost import CheckpointSchedule, find_checkpoint_schedule
from tula_cli.models.memory import MemoryModel
from tula_cli.models.observations import (
    NO_OTHER_SIZES,
    OtherGpuCountMeasurements,
    find_capacity,
    list_measurement_warnings,
    require_measurements,
    require_same_hardware,
    warn_forecast_limits,
)
from tula_cli.models.out_of_memory import (
    find_smallest_excluding_oom,
    is_configuration_ruled_out,
    list_allowed_splits,
)
from tula_cli.models.overheads import OverheadModel, compute_median_shutdown
from tula_cli.models.ramp import NoisePath
from tula_cli.models.ramp_costs import StageObjective, StageTimes
from tula_cli.models.time import stretches
from tula_cli.models.time.job_fit import fit_step_time_and_find_stragglers
from tula_cli.models.time.step_time import Estimates, StepTimeFit
from tula_cli.run.records.base import Market
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, Result
from tula_cli.run.records.recommendations import Prediction, TrainedSteps
from tula_cli.run.records.results import ScriptCheckpointSave
from tula_cli.run.records.tasks import Rung
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import format_count

if TYPE_CHECKING:
    from tula_cli.models.power import PowerModel

T = TypeVar("T", Measured, OutOfMemory, Failed)

Probe = tuple[int, int]
"""Nodes and local batch of a probe."""

_CONFIGURATIONS_PER_CHUNK = 8192
"""Configurations that are predicted at a time, to bound the memory of intermediate arrays."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The models of one run, fitted to its probes and trainings."""

    spec: JobSpec
    steps: StepTimeFit
    memory: MemoryModel
    power: "PowerModel | None"  # None if no probe measured its energy
    capacity: int | None  # bytes of one GPU; None if unknown
    probes: Mapping[Probe, Measured]
    ooms: tuple[Probe, ...]  # probes that ran out of memory
    trained: Mapping[Probe, Sequence[TrainedSteps]]  # steps of trainings by configuration, oldest first
    trainings: Mapping[Probe, stretches.TrainedConfiguration]  # the newest by configuration, also without used steps
    dataset_size: int
    eval_size: int | None  # held-out samples; None if no probe reports it
    shutdown: float  # seconds from the last measurement of a job to its end
    saving: CheckpointSchedule | None  # checkpoint schedule of a script; None without a script
    warnings: tuple[Diagnostic, ...]
    held_up: bool  # steps are delayed by effects outside the models: only measured configurations are known
    noise: NoisePath | None = None  # gradient noise, if the ramp is based on it; else None
    queue: float = 0.0  # seconds that a job waits for nodes; 0 if unknown
    stages_by: StageObjective = "time"  # quantity by which the nodes of stages are chosen (train.ramp_nodes)

    @classmethod
    def fit(
        cls,
        spec: JobSpec,
        results: Iterable[Result],
        *,
        inspection: Inspection | None = None,
        attempts: Iterable[Attempt] = (),
        saves: Iterable[ScriptCheckpointSave] = (),
        trained: Sequence[TrainedSteps] = (),
        trainings: Iterable[stretches.TrainedConfiguration] = (),
        other_sizes: OtherGpuCountMeasurements = NO_OTHER_SIZES,
        noise: NoisePath | None = None,
        queue: float = 0.0,
        stages_by: StageObjective = "time",
    ) -> "Estimator":
        """Fit all models to the observations of a run.

        Args:
            results: results of the probes, in any order.
            inspection: estimates of memory and the capacity, used if the probes have not measured them.
            attempts: start and end times of the probes' jobs, from which the shutdown time follows.
            saves: checkpoints written by trainings of a script, from which the cost of an interruption follows.
            trained: step times of trainings, also used in the fit.
            trainings: all trainings, also those whose steps are not used.
            other_sizes: results with other numbers of GPUs per node, used for the step time only.
            noise, queue, stages_by: as the fields of these names.

        Raises:
            Infeasible: every probe was out of memory.
            TooFewMeasurements: nothing was measured.
            BadMeasurements: the probes ran on different hardware, or cannot be fitted together.
        """
        all_results = list(results)
        measured = sorted(_select_results(all_results, Measured), key=lambda probe: (probe.nodes, probe.local_batch))
        ooms = _select_results(all_results, OutOfMemory)
        require_measurements(spec, measured, ooms, _select_results(all_results, Failed))
        require_same_hardware([*measured, *other_sizes.probes])
        footprints = inspection.footprints if inspection else ()
        steps, held_up = fit_step_time_and_find_stragglers(
            spec, [*measured, *other_sizes.probes], [*trained, *other_sizes.trained]
        )
        capacity = find_capacity(spec, measured, inspection)
        memory_model = memory.fit_memory_model(
            [*measured, *footprints], accumulate=spec.train.accumulate, sharded=spec.train.is_sharded
        )
        return cls(
            spec=spec,
            steps=steps,
            held_up=bool(held_up),
            memory=memory_model,
            power=_fit_power_model(measured),
            capacity=capacity,
            probes={(probe.nodes, probe.local_batch): probe for probe in measured},
            ooms=tuple((oom.nodes, oom.local_batch) for oom in ooms),
            dataset_size=measured[0].dataset_size,
            eval_size=next((probe.eval_size for probe in measured if probe.eval_size is not None), None),
            shutdown=compute_median_shutdown(attempts, measured),
            saving=None
            if spec.workload.resumes_reliably
            else find_checkpoint_schedule(spec.get_script(), saves, dataset_size=measured[0].dataset_size),
            warnings=(
                *list_measurement_warnings(measured),
                *steps.warnings,
                *held_up,
                # unknown growth does not matter without a capacity, or if a probe ran out of memory
                *filter(None, [memory_model.warning if memory_model.grows or (capacity and not ooms) else None]),
                *warn_forecast_limits(spec, measured, noise),
            ),
            noise=noise,
            queue=queue,
            stages_by=stages_by,
            trained=stretches.group_trainings_by_configuration(trained),
            trainings=stretches.find_newest_trainings(
                [*map(stretches.convert_to_trained_configuration, trained), *trainings]
            ),
        )

    def compute_largest_local_batch(self, nodes: int) -> int | None:
        """Return the largest local batch on `nodes` nodes that leaves the memory margin free; None if unbounded."""
        return self._max_local_batch_by_nodes(nodes if self.memory.sharded else 1)

    @cached_property
    def _max_local_batch_by_nodes(self) -> Callable[[int], int | None]:
        """Cached function from a number of nodes to its largest local batch."""
        gpus = self.spec.cluster.gpus_per_node
        return functools.cache(
            lambda nodes: self.memory.adapt_to_ranks(nodes * gpus).compute_largest_local_batch(
                self.capacity, margin=MEMORY_MARGIN
            )
        )

    def list_configurations(self, nodes: Iterable[int] | None = None) -> list[Config]:
        """Return the configurations of the spec (or on other numbers of nodes), whether they fit or not."""
        return convert_to_configs(*self._make_grid(nodes))

    @cached_property
    def configuration_count(self) -> int:
        """Number of configurations of the spec."""
        return len(self._candidate_grid[0])

    @cached_property
    def _candidate_grid(self) -> tuple[Ints, Ints]:
        return self._make_grid(self.spec.search.nodes)

    def _make_grid(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return the columns (nodes, batch) of all configurations on these numbers of nodes; None: those of search.nodes."""
        if nodes is None:
            return self._candidate_grid
        search = self.spec.search
        grid = list_candidates(
            nodes,
            gpus_per_node=self.spec.cluster.gpus_per_node,
            min_batch=search.min_batch,
            max_batch=min(self.dataset_size, search.max_batch or self.dataset_size),
            accumulate=self.spec.train.accumulate,
        )
        return convert_to_columns(grid)

    def list_feasible_configurations(self, nodes: Iterable[int] | None) -> list[Config]:
        """Return the configurations of the spec (or on other numbers of nodes) that fit."""
        return convert_to_configs(*self._find_feasible_configurations(nodes))

    def _find_feasible_configurations(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the configurations that fit, considering memory, OOM probes and ramp stages."""
        counts, batch = self._make_grid(nodes)
        local_batch, sharded = batch // (counts * self.spec.cluster.gpus_per_node), self.spec.train.is_sharded
        fits = local_batch <= apply_to_distinct_values(
            lambda count: inf if (largest := self.compute_largest_local_batch(count)) is None else largest,
            counts if sharded else 1,
        )
        for oom in self.ooms:
            fits &= ~is_configuration_ruled_out(oom, counts, local_batch, sharded=sharded)
        fits[list(self._find_probes(counts, local_batch))] = True
        fits &= self.stages.compute_feasible_mask(counts, batch)
        return counts[fits], batch[fits]

    @property
    def has_unmeasured_configurations(self) -> bool:
        """Whether a configuration of the spec that fits has no probe."""
        counts, batch = self._find_feasible_configurations(None)
        return len(self._find_probes(counts, batch // (counts * self.spec.cluster.gpus_per_node))) < len(counts)

    def _find_starting_configurations(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the feasible configurations at which a training may start, given its ramp stages."""
        counts, batch = self._find_feasible_configurations(nodes)
        begin = self.stages.compute_startable_mask(counts, batch)
        return counts[begin], batch[begin]

    def find_known_configurations(self, nodes: Iterable[int] | None = None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the candidates to start at whose step time can be predicted from the probes."""
        counts, batch = self._find_starting_configurations(nodes)
        refused = self._compute_unknown_mask(counts, batch)
        return counts[~refused], batch[~refused]

    def _compute_unknown_mask(self, nodes: Ints, batch: Ints) -> Flags:
        """Return a mask of the configurations whose step time cannot be predicted (see `describe_why_unknown`)."""
        gpus = self.spec.cluster.gpus_per_node
        local_batch = batch // (nodes * gpus)
        refused = self.steps.flag_unpredictable_configurations(nodes, gpus, local_batch)
        refused[list(self._find_probes(nodes, local_batch))] = False
        return refused

    def describe_why_infeasible(self, config: Config) -> str:
        """Return why a configuration cannot run; empty if it can.

        A probe that ran takes precedence over the models. A probe that was out of memory rules out its local batch and
        all larger ones: on any number of nodes, or, if the GPUs share a sharded model, on the same number of nodes and
        fewer.
        """
        world = config.nodes * self.spec.cluster.gpus_per_node
        if config.batch > self.dataset_size:
            return f"the batch is larger than the dataset ({self.dataset_size} training samples)"
        if config.batch < 1 or config.batch % (world * self.spec.train.accumulate):
            return f"the batch is not divisible by {world} GPUs x {self.spec.train.accumulate} accumulation steps"
        if why := self.stages.describe_why_infeasible(config):
            return why
        return self.describe_why_too_large(config)

    def describe_why_not_startable(self, config: Config) -> str:
        """Return why a training cannot start at a configuration or with its stages; empty if it can."""
        return self.describe_why_infeasible(config) or self.stages.describe_why_not_startable(config)

    def describe_why_too_large(self, config: Config) -> str:
        """Return why a batch does not fit the GPUs' memory; empty if it does."""
        local_batch = config.compute_local_batch(self.spec.cluster.gpus_per_node)
        if (config.nodes, local_batch) in self.probes:
            return ""
        oom = find_smallest_excluding_oom(self.ooms, config.nodes, local_batch, sharded=self.spec.train.is_sharded)
        if oom is not None:
            return f"a local batch of {oom} ran out of memory"
        largest = self.compute_largest_local_batch(config.nodes)
        if largest is not None and local_batch > largest:
            return (
                f"the local batch of {local_batch} is too large; at most {format_count(largest, 'sample')}"
                f" {'fits' if largest == 1 else 'fit'} on one GPU if {100 * MEMORY_MARGIN:.0f} % of its memory is left free"
            )
        return ""

    def describe_why_unknown(self, config: Config) -> str:
        """Return why the step time of a configuration cannot be predicted from the probes; empty if it can."""
        local_batch = config.compute_local_batch(self.spec.cluster.gpus_per_node)
        if (config.nodes, local_batch) in self.probes:
            return ""
        return self.steps.describe_why_unpredictable(config.nodes, self.spec.cluster.gpus_per_node, local_batch)

    def predict(self, config: Config) -> Prediction:
        """Predict a configuration; a measured step time takes precedence over the fit.

        Raises:
            Infeasible: it cannot run.
            BadMeasurements: its step time cannot be predicted from the probes.
        """
        if why := self.describe_why_infeasible(config):
            raise Infeasible(
                f"batch {config.batch} on {format_count(config.nodes)}: {why}",
                "to see the configurations that fit, run tula recommend",
            )
        if why := self.describe_why_unknown(config):
            raise BadMeasurements(
                f"cannot predict batch {config.batch} on {format_count(config.nodes)}: {why}",
                "run tula profile to measure more configurations",
            )
        return self.predict_configurations(*convert_to_columns([config])).make_prediction(0)

    def predict_candidates(self, nodes: Iterable[int] | None = None) -> Candidates:
        """Predict every feasible configuration with a known step time, on each market of the pricing, fastest first."""
        on_demand = self.predict_configurations(*self.find_known_configurations(nodes))
        return Candidates.concatenate([on_demand, self.predict_on_spot(on_demand)]).sort_by_time()

    def find_unknown_configurations(self, nodes: Iterable[int] | None) -> tuple[Ints, Ints]:
        """Return nodes and batches of the candidates to start at whose step time is unknown, in order."""
        counts, batch = self._find_starting_configurations(nodes)
        refused = self._compute_unknown_mask(counts, batch)
        return counts[refused], batch[refused]

    def predict_configurations(self, nodes: Ints, batch: Ints) -> Candidates:
        """Predict configurations that fit and whose step times are known, on demand, in the given order."""
        tables = []
        for start in range(0, max(1, len(nodes)), _CONFIGURATIONS_PER_CHUNK):
            chunk = slice(start, start + _CONFIGURATIONS_PER_CHUNK)
            counts, batches = nodes[chunk], batch[chunk]
            probes = self._find_probes(counts, batches // (counts * self.spec.cluster.gpus_per_node))
            steps = self._estimate_step_times(counts, batches)
            stages = self.stages.make_stage_table(counts, batches, steps)
            tables.append(self._predict_trainings(counts, batches, steps, probes, stages))
        return Candidates.concatenate(tables)

    def predict_if_known(self, config: Config, market: Market) -> Prediction | None:
        """Predict a configuration on a market; None if it cannot run there or its step time is unknown."""
        if self.describe_why_infeasible(config) or self.describe_why_unknown(config):
            return None
        return self._get_single_prediction(self.predict_configurations(*convert_to_columns([config])), market)

    def _get_single_prediction(self, on_demand: Candidates, market: Market) -> Prediction | None:
        """Return the only row of a table on a market; None if `predict_on_spot` leaves it out."""
        rows = self.predict_on_spot(on_demand) if market == "spot" else on_demand
        return rows.make_prediction(0) if len(rows) else None

    def list_oom_fallbacks(self, nodes: int, batch: int, *, market: Market = "on_demand") -> tuple[Rung, ...]:
        """Return `batch` and every smaller feasible candidate on that number of nodes, descending.

        The first rung is `batch` whether or not it is a candidate; each rung has a prediction for `market` if there is
        one.
        """
        smaller = [config for config in self.list_feasible_configurations([nodes]) if config.batch < batch]
        configs = [Config(nodes, batch), *reversed(smaller)]
        first_rung, *rest = (
            Rung(batch=config.batch, prediction=self.predict_if_known(config, market)) for config in configs
        )
        cut = {
            split: row
            for split in list_allowed_splits(self.spec, configs[0])
            if (row := self.predict_split(configs[0], split, market)) is not None
        }
        return first_rung.model_copy(update={"cut": cut}), *rest

    def predict_split(self, config: Config, split: int, market: Market = "on_demand") -> Prediction | None:
        """Predict a configuration whose micro-batches are computed in `split` parts (`train.oom_policy: accumulate`).

        A step is one step at a batch smaller by that factor, preceded by the local work of the other parts. Each part
        counts an optimizer update although only one is made, so the prediction is slightly too long. None if the step
        time is unknown, the parts are not equal, or the market has no such nodes.
        """
        gpus, smaller = self.spec.cluster.gpus_per_node, Config(config.nodes, config.batch // split)
        if config.batch % (config.nodes * gpus * self.spec.train.accumulate * split) or self.describe_why_unknown(
            smaller
        ):
            return None
        (nodes, batch), (_, smaller_batch) = convert_to_columns([config]), convert_to_columns([smaller])
        size = smaller.compute_local_batch(gpus)
        probes = self._find_probes(nodes, np.array([size]))
        step = self._estimate_step_times(nodes, smaller_batch)
        compute_time = (probes and probes[0].compute_time) or self.steps.compute_time_without_sync(
            config.nodes, gpus, size
        )
        longer = step.scale(1 + (split - 1) * compute_time / float(step.seconds[0]))
        stages = self.stages.make_stage_table(nodes, batch, self._estimate_step_times(nodes, batch))
        forecast = self._predict_trainings(nodes, batch, longer, {}, stages, memory_batches=np.array([size]))
        return self._get_single_prediction(forecast, market)

    # --- Step times

    def _find_probes(self, nodes: Ints, local_batch: Ints) -> dict[int, Measured]:
        """Return the probes of the given configurations by index; configurations without one are left out."""
        indices = map_indices_to_probes(self.probes, nodes, local_batch)
        return {index: self.probes[probe] for index, probe in indices.items()}

    def _estimate_step_times(self, nodes: Ints, batch: Ints) -> Estimates:
        """Return the step times, measured ones if available."""
        gpus, local_batch = self.spec.cluster.gpus_per_node, batch // (nodes * self.spec.cluster.gpus_per_node)
        step_times = self.steps.predict_step_times(nodes, np.full(len(nodes), gpus), local_batch)
        configurations = map_indices_to_probes([*self.probes, *self.trained], nodes, local_batch)
        at = list(configurations)
        repeats = self.steps.compute_repeat_deviation(nodes[at], np.full(len(at), gpus), local_batch[at])
        for (index, configuration), spread in zip(configurations.items(), repeats, strict=True):
            probe = self.probes.get(configuration)
            measured = stretches.estimate_from_measurements(
                None if probe is None else probe.step_times, self.trained.get(configuration, ()), float(spread)
            )
            assert measured is not None
            step_times.set_measured_estimate(index, measured)
        return step_times

    # --- Whole trainings

    @cached_property
    def overheads(self) -> OverheadModel:
        """The model of the time outside steps."""
        return OverheadModel(self.spec, tuple(self.probes.values()), self.shutdown)

    @cached_property
    def stages(self) -> StageTimes:
        """The stages of a batch that grows, with their step times."""
        gpus = self.spec.cluster.gpus_per_node
        return StageTimes(
            self.spec,
            self.dataset_size,
            predict_steps=self._estimate_step_times,
            find_unknown=self._compute_unknown_mask,
            startup=lambda nodes, batch: (
                self.overheads.estimate_overheads(nodes, batch // (nodes * gpus), batch).startup
            ),
            noise=self.noise,
            is_too_large=lambda config: bool(self.describe_why_too_large(config)),
            queue=self.queue,
            by=self.stages_by,
        )

    def _predict_trainings(
        self,
        nodes: Ints,
        batch: Ints,
        steps: Estimates,
        probes: Mapping[int, Measured],
        stages: StageTable,
        *,
        memory_batches: Ints | None = None,
    ) -> Candidates:
        """Return the forecasts of trainings on on-demand nodes.

        Args:
            probes: of the measured configurations, by index.
            memory_batches: local batches for the memory forecast, if they differ from those of the configurations.
        """
        gpus = self.spec.cluster.gpus_per_node
        local_batch = batch // (nodes * gpus)
        time, startup = self.make_training_time(nodes, batch, stages), self.overheads.startup_spread / 3600
        hours = time.compute_hours(steps.seconds)
        paid = hours - self.stages.compute_unused_node_hours(nodes, batch, stages) / nodes
        reserved, headroom = self._estimate_memory(
            nodes, local_batch if memory_batches is None else memory_batches, probes
        )
        measured = ~np.isnan(steps.fitted)
        parts = _break_down_time(time, steps.seconds, probes) if self.spec.workload.measures_step_parts else {}
        candidates = Candidates.from_columns(
            {
                "nodes": nodes,
                "batch": batch,
                "local_batch": local_batch,
                "step_time": steps.seconds,
                "step_low": steps.low,
                "step_high": steps.high,
                "step_fitted": steps.fitted,
                "hours": hours,
                "hours_low": np.maximum(0.0, hours - np.hypot(hours - time.compute_hours(steps.low), startup)),
                "hours_high": hours + np.hypot(time.compute_hours(steps.high) - hours, startup),
                "cost": cost.compute_cost(
                    self.spec.pricing, hours=paid, nodes=nodes, gpus_per_node=gpus, reserved=reserved
                ),
                "node_hours": paid * nodes,
                "peak_memory": reserved,
                "headroom": headroom,
                "measured": measured,
                "scaling_efficiency": self._compute_scaling_efficiency(local_batch, steps.seconds),
                **self._find_newest_trainings(nodes, local_batch),
                "further": nodes > max(count for count, _ in (*self.probes, *self.trained)),
                "refresh_share": time.work.refreshes * time.overheads.refresh / (3600 * hours),
                "type": np.full(len(nodes), ""),
                "market": np.full(len(nodes), "on_demand"),
                **{f"parts_{name}": seconds for name, seconds in parts.items()},
            },
            stages,
        )
        return candidates if self.power is None else self._add_energy(candidates, probes, self.power)

    def _compute_scaling_efficiency(self, local_batch: Ints, step_time: Floats) -> Floats:
        """Return the throughput per GPU relative to that on the fewest nodes with the same local batch, shape (n,).

        nan where the step time on the fewest nodes is unknown.
        """
        gpus = self.spec.cluster.gpus_per_node
        sizes, indices = np.unique(local_batch, return_inverse=True)
        nodes = np.full(len(sizes), min(self.spec.search.nodes))
        seconds = self._estimate_step_times(nodes, sizes * nodes * gpus).seconds
        known_seconds = np.where(self._compute_unknown_mask(nodes, sizes * nodes * gpus), np.nan, seconds)
        efficiency: Floats = known_seconds[indices] / step_time
        return efficiency

    def _estimate_memory(self, nodes: Ints, local_batch: Ints, probes: Mapping[int, Measured]) -> tuple[Floats, Floats]:
        """Return the bytes that a GPU reserves, measured if available, and the share of its memory left free."""
        model = self.memory.adapt_to_ranks(nodes * self.spec.cluster.gpus_per_node)
        reserved = model.compute_reserved_memory(local_batch) + np.zeros(len(nodes))
        for index, probe in probes.items():
            reserved[index] = probe.memory.reserved
        free = np.nan if self.capacity is None else 1 - model.compute_needed_memory(local_batch) / self.capacity
        return reserved, free + np.zeros(len(nodes))

    def _find_newest_trainings(self, nodes: Ints, local_batch: Ints) -> dict[str, NDArray[Any]]:
        """Return the columns of the newest training with each configuration."""
        signatures, hours = np.full(len(nodes), "", dtype=object), np.full(len(nodes), np.nan)
        for index, position in map_indices_to_probes(self.trainings, nodes, local_batch).items():
            training = self.trainings[position]
            signatures[index] = training.signature
            hours[index] = np.nan if training.hours is None else training.hours
        includes_training = np.zeros(len(nodes), dtype=bool)
        includes_training[list(map_indices_to_probes(self.trained, nodes, local_batch))] = True
        return {
            "trained": signatures.astype(np.str_),
            "trained_hours": hours,
            "includes_training": includes_training,
        }

    def _add_energy(self, rows: Candidates, probes: Mapping[int, Measured], model: "PowerModel") -> Candidates:
        """Add the energy of trainings to forecasts; the time outside steps is assumed to draw the same power."""
        predicted_power = model.predict_power(rows["step_time"], rows["local_batch"])
        for index, probe in probes.items():
            if probe.energy is not None:
                measured_power = model.get_measured_power(probe)
                predicted_power.watts[index] = measured_power.watts
                if predicted_power.error is not None:
                    predicted_power.error[index] = measured_power.error
        kilowatts, hours = predicted_power.watts * rows["nodes"] * self.spec.cluster.gpus_per_node / 1000, rows["hours"]
        kwh = kilowatts * rows["node_hours"] / rows["nodes"]
        return rows.with_columns(
            {
                "energy": 1000 * kilowatts * rows["step_time"],
                "kwh": kwh,
                "kwh_low": predicted_power.compute_interval_end(kwh, rows["hours_low"], hours, sign=-1),
                "kwh_high": predicted_power.compute_interval_end(kwh, rows["hours_high"], hours, sign=1),
            }
        )

    def predict_on_spot(self, on_demand: Candidates) -> Candidates:
        """Return the forecasts of the same configurations on spot nodes, in their order.

        Configurations are left out if interruptions are so frequent that the training never ends; all are left out if
        there are no spot nodes, or if the cost of an interruption of a script is unknown. The interval is that of the
        expected time: it does not include the variation between runs due to their interruptions.
        """
        pricing = self.spec.pricing
        if pricing.spot is None or (self.saving is not None and not self.saving.is_known):
            return on_demand.select_rows([])
        nodes, batch = on_demand["nodes"], on_demand["batch"]
        stages = on_demand.stages.select_rows(on_demand["stages"])
        time = self.make_training_time(nodes, batch, stages, on_spot=True)
        compute_hours = (
            time.compute_hours if self.saving is None else functools.partial(self.saving.compute_hours_on_spot, time)
        )
        hours, low, high = (compute_hours(on_demand[name]) for name in ("step_time", "step_low", "step_high"))
        share = hours / on_demand["hours"]
        spot = on_demand.with_columns(
            {
                "hours": hours,
                "hours_low": np.where(np.isfinite(low), low, np.nan),
                "hours_high": np.where(np.isfinite(high), high, np.nan),
                "cost": cost.compute_cost(
                    pricing,
                    hours=hours * on_demand["node_hours"] / (nodes * on_demand["hours"]),
                    nodes=nodes,
                    gpus_per_node=self.spec.cluster.gpus_per_node,
                    reserved=np.nan_to_num(on_demand["peak_memory"]),
                    market="spot",
                ),
                "market": np.full(len(on_demand), "spot"),
                "parts_rest": on_demand["parts_rest"] + 3600 * (hours - on_demand["hours"]),
                **{name: on_demand[name] * share for name in ("node_hours", "kwh", "kwh_low", "kwh_high")},
            }
        )
        return spot.select_rows(np.isfinite(hours))

    def make_training_time(
        self, nodes: Ints, batch: Ints, stages: StageTable, *, on_spot: bool = False
    ) -> cost.TrainingTime:
        """Return the models of training time by step time; on spot nodes of the expected time."""
        gpus, checkpoint_every = self.spec.cluster.gpus_per_node, self.spec.train.checkpoint_every
        overheads = self.overheads.estimate_overheads(nodes, batch // (nodes * gpus), batch)
        work = cost.count_training_work(
            self.spec,
            batch=batch,
            world=nodes * gpus,
            dataset_size=self.dataset_size,
            eval_size=self.eval_size,
            eval_batch_size=overheads.eval_batch_size,
        )
        work = self.stages.count_equivalent_work(work, stages)
        rate = cost.compute_interruption_rate(self.spec.pricing, nodes)
        # The interval that the ranks use, which do not know whether they run on spot nodes.
        interval = (
            cost.compute_checkpoint_interval(overheads.checkpoint, rate=rate)
            if checkpoint_every == "auto"
            else checkpoint_every
        )
        return cost.TrainingTime(work, overheads, interval, rate if on_spot else 0.0)

    def describe_interruption(self, row: Prediction) -> str:
        """Describe the cost of an interruption of a script at a configuration; empty for tula's own loop."""
        if self.saving is None:
            return ""
        return self.saving.describe_lost_work(row.step_time, epoch_steps=self.dataset_size // row.batch)


def map_indices_to_probes(probes: Iterable[Probe], nodes: Ints, local_batch: Ints) -> dict[int, Probe]:
    """Return the probes that have one of the given configurations, by the index of the configuration."""
    return {
        int(index): probe
        for probe in probes
        for index in np.flatnonzero((nodes == probe[0]) & (local_batch == probe[1]))
    }


def _fit_power_model(measured: Sequence[Measured]) -> "PowerModel | None":
    """Fit the energy model; None, without importing it, if no probe has an energy reading."""
    if all(probe.energy is None for probe in measured):
        return None
    from tula_cli.models.power import fit_power_model

    return fit_power_model(measured)


def _break_down_time(time: cost.TrainingTime, step_time: Floats, probes: Mapping[int, Measured]) -> dict[str, Floats]:
    """Return the seconds of each part of trainings (see `TimeParts`), each of shape (n,)."""
    loader_waits = np.full(len(step_time), np.nan)
    for index, probe in probes.items():
        loader_waits[index] = np.nan if probe.data_wait is None else probe.data_wait
    return {
        name: seconds + np.zeros(len(step_time))
        for name, seconds in time.compute_parts(step_time, data_wait=loader_waits).items()
    }


def _select_results(results: Sequence[Result], kind: type[T]) -> list[T]:
    return [result for result in results if isinstance(result, kind)]
