"""What a run will take at any configuration, from the results of its probes: time, cost, memory, and whether it fits."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import hypot, inf, isfinite

from tula_cli.errors import Infeasible
from tula_cli.models import claims, cost, interruptions, power
from tula_cli.models.choice.grid import Config, candidates
from tula_cli.models.interruptions import Saving
from tula_cli.models.memory import memory
from tula_cli.models.memory.memory import MemoryModel
from tula_cli.models.observations import (
    Probe,
    T,
    bounds,
    capacity_of,
    doubts,
    not_measured,
    observation,
    other_shape,
    require_one_hardware,
    require_some,
)
from tula_cli.models.out_of_memory import cannot_accumulate, ruled_out, splits_of
from tula_cli.models.overheads import OverheadModel, shutdown_of
from tula_cli.models.power import PowerModel
from tula_cli.models.time import steptime
from tula_cli.models.time.priors import PRIORS, SHARDED
from tula_cli.models.time.steptime import Estimate, StepTimeFit
from tula_cli.run.records.base import Market
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, Overheads
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import Save
from tula_cli.run.records.tasks import Rung
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Spot
from tula_cli.words import plural


@dataclass(frozen=True)
class Forecast:
    """The models of one run, fitted."""

    spec: JobSpec
    steps: StepTimeFit
    memory: MemoryModel
    power: PowerModel | None  # None where no probe tells its energy
    capacity: int | None  # bytes of one GPU
    probes: Mapping[Probe, Measured]
    ooms: tuple[Probe, ...]  # that were out of memory
    dataset_size: int
    eval_size: int | None  # held-out samples; None where no probe tells
    shutdown: float  # seconds from the last measurement of a job to its end
    saving: Saving | None  # of a script: how often it writes what it goes on from
    warnings: tuple[str, ...]

    @classmethod
    def from_results(
        cls,
        spec: JobSpec,
        results: Iterable[Measured | OutOfMemory | Failed],
        *,
        inspection: Inspection | None = None,
        attempts: Iterable[Attempt] = (),
        saves: Iterable[Save] = (),
    ) -> "Forecast":
        """Fit all models.

        Args:
            spec: the job.
            results: what the probes left, in any order.
            inspection: estimates of memory and the capacity, used where the probes do not tell.
            attempts: when the probes' jobs began and ended, which tells what ending a job takes.
            saves: what trainings by a script have written, which tells what an interruption loses.

        Raises:
            Infeasible: every probe was out of memory.
            TooFew: nothing was measured.
            BadMeasurements: the probes ran on different hardware, or cannot be fitted together.
        """
        seen = list(results)
        measured = sorted(_of(seen, Measured), key=lambda probe: (probe.nodes, probe.local_batch))
        ooms = _of(seen, OutOfMemory)
        require_some(measured, ooms, _of(seen, Failed))
        require_one_hardware(measured)
        footprints = inspection.footprints if inspection else ()
        script, size = spec.script, measured[0].dataset_size
        steps = steptime.fit(
            [observation(probe) for probe in measured],
            collective=spec.cluster.collective,
            priors=SHARDED if spec.train.sharded else PRIORS,
        )
        return cls(
            spec=spec,
            steps=steps,
            memory=memory.fit([*measured, *footprints], accumulate=spec.train.accumulate, sharded=spec.train.sharded),
            power=power.fit(measured),
            capacity=capacity_of(spec, measured, inspection),
            probes={(probe.nodes, probe.local_batch): probe for probe in measured},
            ooms=tuple((oom.nodes, oom.local_batch) for oom in ooms),
            dataset_size=size,
            eval_size=next((probe.eval_size for probe in measured if probe.eval_size is not None), None),
            shutdown=shutdown_of(attempts, measured),
            saving=None if script is None else interruptions.saving(script, saves, dataset_size=size),
            warnings=(
                *doubts(measured),
                *steps.warnings,
                *bounds(spec, measured),
                *other_shape(spec, measured),
                *claims.doubts(measured),
                *not_measured(spec, measured),
            ),
        )

    @cached_property
    def largest_local_batch(self) -> Callable[[int], int | None]:
        """What returns the largest local batch on a number of nodes that leaves the margin free, None where memory sets no
        bound; each is worked out once.
        """
        margin = self.spec.search.memory_margin
        return functools.cache(lambda nodes: self._memory_on(nodes).largest_local_batch(self.capacity, margin=margin))

    @cached_property
    def _memory_on(self) -> Callable[[int], MemoryModel]:
        """What returns the memory of a GPU on a number of nodes."""
        return functools.cache(lambda nodes: self.memory.on(nodes * self.spec.cluster.gpus_per_node))

    def candidates(self, nodes: Iterable[int] | None = None) -> list[Config]:
        """Return the candidates of the spec (or of other numbers of nodes), whether they fit or not."""
        search = self.spec.search
        return candidates(
            search.nodes if nodes is None else nodes,
            gpus_per_node=self.spec.cluster.gpus_per_node,
            min_batch=search.min_batch,
            max_batch=min(self.dataset_size, search.max_batch or self.dataset_size),
            accumulate=self.spec.train.accumulate,
        )

    def feasible(self, nodes: Iterable[int] | None = None) -> list[Config]:
        """Return the candidates that fit."""
        return [config for config in self.candidates(nodes) if not self.why_not(config)]

    def why_not(self, config: Config) -> str:
        """Return why a configuration cannot run; empty where it can.

        A probe that ran is believed over the models; one that was out of memory rules out its local batch and all
        larger ones on any number of nodes, or of GPUs that share a model on as many and fewer.
        """
        world = config.nodes * self.spec.cluster.gpus_per_node
        if config.batch > self.dataset_size:
            return f"the batch is larger than the dataset ({self.dataset_size} training samples)"
        if config.batch < 1 or config.batch % (world * self.spec.train.accumulate):
            return f"the batch does not divide among {world} GPUs x {self.spec.train.accumulate} accumulation steps"
        local_batch = config.batch // world
        if (config.nodes, local_batch) in self.probes:
            return ""
        oom = ruled_out(self.ooms, config.nodes, local_batch, sharded=self.spec.train.sharded)
        if oom is not None:
            return f"a local batch of {oom} was out of memory"
        largest = self.largest_local_batch(config.nodes)
        if largest is not None and local_batch > largest:
            margin = self.spec.search.memory_margin
            return f"at most {largest} samples fit one GPU with {margin:.0%} of its memory left free"
        return ""

    def why_unknown(self, config: Config) -> str:
        """Return why the probes do not tell the step time of a configuration; empty where they do."""
        local_batch = config.local_batch(self.spec.cluster.gpus_per_node)
        if (config.nodes, local_batch) in self.probes:
            return ""
        return self.steps.refusal(config.nodes, self.spec.cluster.gpus_per_node, local_batch)

    def predict(self, config: Config) -> Prediction:
        """Forecast a configuration; the step time is the measured one where that was measured.

        Raises:
            Infeasible: it cannot run.
            BadMeasurements: the probes do not tell its step time.
        """
        if why := self.why_not(config):
            raise Infeasible(f"batch {config.batch} on {plural(config.nodes)}: {why}", "tula recommend shows what fits")
        if why := self.why_unknown(config):
            raise steptime.cannot_predict(f"batch {config.batch} on {plural(config.nodes)}", why)
        probe = self._probe(config)
        return self._prediction(config, self._steps([config], [probe])[0], probe)

    def predictions(self, nodes: Iterable[int] | None = None) -> tuple[Prediction, ...]:
        """Forecast every feasible candidate whose step time the probes tell, fastest first."""
        configs = [config for config in self.feasible(nodes) if not self.why_unknown(config)]
        probes = [self._probe(config) for config in configs]
        steps = self._steps(configs, probes)
        found = [self._prediction(*row) for row in zip(configs, steps, probes, strict=True)]
        return tuple(sorted(found, key=lambda row: (row.hours, row.nodes, row.batch)))

    def offers(self, nodes: Iterable[int] | None = None) -> tuple[Prediction, ...]:
        """Forecast the same configurations on each market that the pricing knows, fastest first."""
        found = self.predictions(nodes)
        spot = [row for on_demand in found if (row := self.on_spot(on_demand)) is not None]
        return tuple(sorted((*found, *spot), key=lambda row: (row.hours, row.nodes, row.batch))) if spot else found

    def on_spot(self, on_demand: Prediction) -> Prediction | None:
        """Return what a configuration is expected to take on spot nodes.

        None where there are none, where interruptions leave no time to get anywhere, and where nothing tells what a script
        loses by them. The interval is that of the
        expected time: how much one run differs from the next by its interruptions is not in it.
        """
        pricing, row = self.spec.pricing, on_demand
        spot, config = pricing.spot, Config(row.nodes, row.batch)
        if spot is None or (self.saving is not None and not self.saving.known):
            return None
        training = self._training(config, spot=spot)
        if not isfinite(hours := training(row.step_time)):
            return None
        low, high = (
            None if step is None or not isfinite(bound := training(step)) else bound
            for step in (row.step_low, row.step_high)
        )
        running = self._training(config, spot=spot.model_copy(update={"wait_minutes": 0.0}))(row.step_time)
        price = cost.cost(
            pricing,
            hours=running,
            nodes=row.nodes,
            gpus_per_node=self.spec.cluster.gpus_per_node,
            reserved=row.peak_memory or 0,
            market="spot",
        )
        energy = {name: kwh and kwh * running / row.hours for name, kwh in power.kwh_of(row).items()}
        parts = row.parts and row.parts.model_copy(update={"rest": row.parts.rest + 3600 * (hours - row.hours)})
        update = {"hours": hours, "hours_low": low, "hours_high": high, "cost": price, "market": "spot", "parts": parts}
        return row.model_copy(update={**update, **energy})

    def ladder(self, nodes: int, batch: int, *, market: Market = "on_demand") -> tuple[Rung, ...]:
        """Return the batch and every smaller feasible candidate on that number of nodes, descending.

        The first rung is `batch` whether or not it is a candidate; a rung has a prediction where there is one, for the
        kind of nodes that `market` is.
        """
        smaller = [config for config in self.feasible([nodes]) if config.batch < batch]
        configs = [Config(nodes, batch), *reversed(smaller)]
        first, *rest = (Rung(batch=config.batch, prediction=self._forecast(config, market)) for config in configs)
        return first.model_copy(update={"cut": self._cuts(configs[0], market)}), *rest

    def _cuts(self, config: Config, market: Market) -> dict[int, Prediction]:
        """Return the forecasts of a configuration whose micro-batches are cut, by the number of parts."""
        accumulate, local_batch = self.spec.train.accumulate, config.local_batch(self.spec.cluster.gpus_per_node)
        own = splits_of(config.batch, micro_batch=local_batch // accumulate, micro_batches=accumulate)
        rows = {} if cannot_accumulate(self.spec) else {parts: self.cut(config, parts) for parts in own.into}
        found = {parts: self.on_spot(row) if row and market == "spot" else row for parts, row in rows.items()}
        return {parts: row for parts, row in found.items() if row is not None}

    def cut(self, config: Config, parts: int) -> Prediction | None:
        """Forecast a configuration whose micro-batches are computed in so many parts (`train.oom: accumulate`).

        A step is one at that much smaller a batch, and before it the local work of the other parts: each counts an update,
        which is made once, so it is rather too long. None where the probes do not tell it, or the parts are not equal.
        """
        gpus, smaller = self.spec.cluster.gpus_per_node, Config(config.nodes, config.batch // parts)
        if config.batch % (config.nodes * gpus * self.spec.train.accumulate * parts) or self.why_unknown(smaller):
            return None
        probe, held = self._probe(smaller), smaller.local_batch(gpus)
        step = self._steps([smaller], [probe])[0]
        alone = (probe and probe.compute_time) or self.steps.compute(config.nodes, gpus, held)
        return self._prediction(config, step.times(1 + (parts - 1) * alone / step.seconds), None, held=held)

    def _forecast(self, config: Config, market: Market) -> Prediction | None:
        if self.why_not(config) or self.why_unknown(config):
            return None
        row = self.predict(config)
        return row if market == "on_demand" else self.on_spot(row)

    def _probe(self, config: Config) -> Measured | None:
        return self.probes.get((config.nodes, config.local_batch(self.spec.cluster.gpus_per_node)))

    def _steps(self, configs: Sequence[Config], probes: Sequence[Measured | None]) -> list[Estimate]:
        """Return the step times; those not measured are predicted all at once."""
        gpus = self.spec.cluster.gpus_per_node
        unmeasured = [config for config, probe in zip(configs, probes, strict=True) if probe is None]
        columns = self.steps.predict_all(
            [config.nodes for config in unmeasured],
            [gpus] * len(unmeasured),
            [config.local_batch(gpus) for config in unmeasured],
        )
        predicted = (Estimate(*map(float, row)) for row in zip(*columns, strict=True))
        return [next(predicted) if probe is None else steptime.observed(probe.step_times) for probe in probes]

    def _prediction(
        self, config: Config, step: Estimate, probe: Measured | None, *, held: int | None = None
    ) -> Prediction:
        """Return the forecast at a step time; `held` is the local batch whose memory is taken, where that is another."""
        gpus = self.spec.cluster.gpus_per_node
        local_batch = config.local_batch(gpus)
        held = held or local_batch
        time, startup = self._time(config), self._beside.startup_spread / 3600
        training, overheads, hours = time.hours, time.overheads, time.hours(step.seconds)
        model = self._memory_on(config.nodes)
        reserved = probe.memory.reserved if probe else model.reserved(held)
        found = Prediction(
            nodes=config.nodes,
            batch=config.batch,
            local_batch=local_batch,
            step_time=step.seconds,
            step_low=step.low,
            step_high=step.high,
            hours=hours,
            hours_low=None if step.low is None else max(0.0, hours - hypot(hours - training(step.low), startup)),
            hours_high=None if step.high is None else hours + hypot(training(step.high) - hours, startup),
            cost=cost.cost(self.spec.pricing, hours=hours, nodes=config.nodes, gpus_per_node=gpus, reserved=reserved),
            peak_memory=reserved,
            headroom=None if self.capacity is None else 1 - model.needed(held) / self.capacity,
            measured=probe is not None,
            parts=None if self.spec.script else time.parts(step.seconds, data_wait=probe.data_wait if probe else None),
            refresh_share=None
            if overheads.refresh is None
            else self._work(config).refreshes * overheads.refresh / (3600 * hours),
        )
        return found if self.power is None else self._with_energy(found, probe, self.power)

    def _with_energy(self, row: Prediction, probe: Measured | None, model: PowerModel) -> Prediction:
        """Return a forecast with the energy of its steps; the rest of the training is taken to draw what they do."""
        told = probe is not None and probe.energy is not None
        found = model.measured(probe) if probe and told else model.predict(row.step_time, row.local_batch)
        kilowatts = found.watts * row.nodes * self.spec.cluster.gpus_per_node / 1000
        kwh = kilowatts * row.hours
        return row.model_copy(
            update={
                "energy": 1000 * kilowatts * row.step_time,
                "kwh": kwh,
                "kwh_low": power.end(kwh, found, row.hours_low, row.hours, side=-1),
                "kwh_high": power.end(kwh, found, row.hours_high, row.hours, side=1),
            }
        )

    def _training(self, config: Config, *, spot: Spot | None = None) -> Callable[[float], float]:
        """Return what gives the hours of the whole training from the step time; on spot nodes the expected ones."""
        found = self._time(config, spot=spot)
        if spot is not None and self.saving is not None:
            return self._training_of_script(found.work, found.overheads, self.saving, rate=found.rate, spot=spot)
        return found.hours

    def _time(self, config: Config, *, spot: Spot | None = None) -> cost.TrainingTime:
        overheads, every = self._beside.at(config), self.spec.train.checkpoint_every
        rate = cost.interruption_rate(self.spec.pricing, config.nodes)
        if every == "auto":  # as the ranks do it, who do not know which nodes they are on
            every = cost.checkpoint_interval(overheads.checkpoint, rate=rate)
        if spot is None:
            return cost.TrainingTime(self._work(config), overheads, every)
        return cost.TrainingTime(self._work(config), overheads, every, rate, 60 * spot.wait_minutes)

    def _training_of_script(
        self, work: cost.Work, overheads: Overheads, saving: Saving, *, rate: float, spot: Spot
    ) -> Callable[[float], float]:
        """Return what gives the hours on spot nodes of a script, which alone decides when it saves."""

        def hours(step_time: float) -> float:
            interval = saving.interval(step_time, epoch_steps=work.steps)
            if interval is None:
                return inf
            stepping, wait = work.epochs * work.steps * step_time, 60 * spot.wait_minutes
            return cost.script_seconds(stepping, overheads=overheads, interval=interval, rate=rate, wait=wait) / 3600

        return hours

    def interruption(self, row: Prediction) -> str:
        """Say what an interruption costs a script at a configuration; empty for tula's own loop."""
        if self.saving is None:
            return ""
        return self.saving.words(row.step_time, epoch_steps=self._work(Config(row.nodes, row.batch)).steps)

    @cached_property
    def _work(self) -> Callable[[Config], cost.Work]:
        """What gives the work of a configuration; each is worked out once."""
        return functools.cache(self._work_of)

    def _work_of(self, config: Config) -> cost.Work:
        return cost.work(
            self.spec,
            batch=config.batch,
            world=config.nodes * self.spec.cluster.gpus_per_node,
            dataset_size=self.dataset_size,
            eval_size=self.eval_size,
            eval_batch_size=self._beside.at(config).eval_batch_size,
        )

    @cached_property
    def _beside(self) -> OverheadModel:
        """What there is beside the steps."""
        return OverheadModel(self.spec, tuple(self.probes.values()), self.shutdown)


def _of(results: Sequence[Measured | OutOfMemory | Failed], kind: type[T]) -> list[T]:
    return [result for result in results if isinstance(result, kind)]
