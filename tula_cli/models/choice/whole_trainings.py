"""Hours, cost, memory and energy of trainings at many configurations on either market, from their step times."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tula_cli.models import cost, power
from tula_cli.models.choice.columns import Flags, Floats, Ints
from tula_cli.models.choice.offers import Offers, PartsColumns
from tula_cli.models.interruptions import CheckpointSchedule
from tula_cli.models.memory.memory import MemoryModel
from tula_cli.models.observations import Probe
from tula_cli.models.overheads import OverheadModel
from tula_cli.models.power import PowerModel
from tula_cli.models.ramp.stage_times import StageTimes
from tula_cli.models.time.steptime import Estimate
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Spot


@dataclass(frozen=True)
class Steps:
    """Step times with their 90 % intervals, each of shape (n,); nan if unknown. Seconds."""

    seconds: Floats
    low: Floats
    high: Floats
    fitted: Floats  # what the model says where seconds are measured ones

    def estimates(self) -> list[Estimate]:
        """Return the step times as single estimates."""
        rows = zip(self.seconds.tolist(), self.low.tolist(), self.high.tolist(), strict=True)
        return [Estimate(seconds, *(None if end != end else end for end in ends)) for seconds, *ends in rows]

    def times(self, factor: float) -> "Steps":
        """Return the step times multiplied by a factor, with the same relative intervals."""
        return Steps(factor * self.seconds, factor * self.low, factor * self.high, np.full(len(self.seconds), np.nan))


@dataclass(frozen=True, kw_only=True)
class RunModels:
    """The models and measurements of a run, except the model of its step time."""

    spec: JobSpec
    memory: MemoryModel
    power: PowerModel | None  # None where no probe tells its energy
    capacity: int | None  # bytes of one GPU
    probes: Mapping[Probe, Measured]
    dataset_size: int
    eval_size: int | None  # held-out samples; None where no probe tells
    saving: CheckpointSchedule | None  # of a script: how often it writes what it goes on from
    trained: Mapping[Probe, Sequence[TrainedSteps]]  # by configuration, oldest first


@dataclass(frozen=True)
class Trainings:
    """The models of whole trainings, given their step times."""

    known: RunModels
    overheads_model: OverheadModel
    stages: StageTimes  # of a batch that grows

    def probes_at(self, nodes: Ints, local_batch: Ints) -> dict[int, Measured]:
        """Return the probes of the given configurations by index; configurations without one are left out."""
        places_by_index = index_probes(self.known.probes, nodes, local_batch)
        return {index: self.known.probes[place] for index, place in places_by_index.items()}

    def on_demand(
        self,
        nodes: Ints,
        batch: Ints,
        steps: Steps,
        probes: Mapping[int, Measured],
        *,
        memory_batches: Ints | None = None,
    ) -> Offers:
        """Return the forecasts of trainings on on-demand nodes.

        Args:
            nodes, batch: of the configurations, shape (n,).
            steps: their step times.
            probes: of the measured ones, by index.
            memory_batches: local batches for the memory forecast, if they differ from those of the configurations.
        """
        gpus = self.known.spec.cluster.gpus_per_node
        local_batch = batch // (nodes * gpus)
        time, startup = self.time(nodes, batch), self.overheads_model.startup_spread / 3600
        hours, nothing = time.hours(steps.seconds), np.full(len(nodes), np.nan)
        paid = hours - self.stages.unused_node_hours(nodes, batch) / nodes
        reserved, headroom = self._memory(nodes, local_batch if memory_batches is None else memory_batches, probes)
        measured = ~np.isnan(steps.fitted)
        offers = Offers(
            nodes=nodes,
            batch=batch,
            local_batch=local_batch,
            step_time=steps.seconds,
            step_low=steps.low,
            step_high=steps.high,
            step_fitted=steps.fitted,
            hours=hours,
            hours_low=np.maximum(0.0, hours - np.hypot(hours - time.hours(steps.low), startup)),
            hours_high=hours + np.hypot(time.hours(steps.high) - hours, startup),
            cost=cost.compute_cost(
                self.known.spec.pricing, hours=paid, nodes=nodes, gpus_per_node=gpus, reserved=reserved
            ),
            node_hours=paid * nodes,
            peak_memory=reserved,
            headroom=headroom,
            measured=measured,
            trained=self._trained_at(nodes, local_batch, measured),
            further=nodes > max(count for count, _ in (*self.known.probes, *self.known.trained)),
            refresh_share=time.work.refreshes * time.overheads.refresh / (3600 * hours),
            energy=nothing,
            kwh=nothing,
            kwh_low=nothing,
            kwh_high=nothing,
            type=np.full(len(nodes), ""),
            market=np.full(len(nodes), "on_demand"),
            pareto=np.zeros(len(nodes), dtype=bool),
            stages=self.stages.stages_column(nodes, batch),
            parts=None if self.known.spec.script else _make_parts_columns(time, steps.seconds, probes),
        )
        return offers if self.known.power is None else self._with_energy(offers, probes, self.known.power)

    def _memory(self, nodes: Ints, local_batch: Ints, probes: Mapping[int, Measured]) -> tuple[Floats, Floats]:
        """Return the bytes that a GPU reserves, measured if available, and the share of its memory left free."""
        model = self.known.memory.for_ranks(nodes * self.known.spec.cluster.gpus_per_node)
        reserved = model.reserved(local_batch) + np.zeros(len(nodes))
        for index, probe in probes.items():
            reserved[index] = probe.memory.reserved
        free = np.nan if self.known.capacity is None else 1 - model.needed(local_batch) / self.known.capacity
        return reserved, free + np.zeros(len(nodes))

    def _trained_at(self, nodes: Ints, local_batch: Ints, measured: Flags) -> NDArray[np.str_]:
        """Return the newest training that measured each configuration; empty if none did."""
        signatures = np.full(len(nodes), "", dtype=object)
        for index, place in index_probes(self.known.trained, nodes, local_batch).items():
            signatures[index] = self.known.trained[place][-1].signature if measured[index] else ""
        return signatures.astype(np.str_)

    def _with_energy(self, offers: Offers, probes: Mapping[int, Measured], model: PowerModel) -> Offers:
        """Add the energy of trainings to forecasts; the time outside steps is assumed to draw the same power."""
        drawn = model.predict(offers.step_time, offers.local_batch)
        for index, probe in probes.items():
            if probe.energy is not None:
                measured_power = model.measured(probe)
                drawn.watts[index] = measured_power.watts
                if drawn.error is not None:
                    drawn.error[index] = measured_power.error
        kilowatts = drawn.watts * offers.nodes * self.known.spec.cluster.gpus_per_node / 1000
        kwh = kilowatts * offers.node_hours / offers.nodes
        return replace(
            offers,
            energy=1000 * kilowatts * offers.step_time,
            kwh=kwh,
            kwh_low=power.compute_interval_end(kwh, drawn, offers.hours_low, offers.hours, sign=-1),
            kwh_high=power.compute_interval_end(kwh, drawn, offers.hours_high, offers.hours, sign=1),
        )

    def on_spot(self, here: Offers) -> Offers:
        """Return the forecasts of the same configurations on spot nodes, in their order.

        Configurations are left out if interruptions are so frequent that the training never ends; all are left out if
        there are no spot nodes, or if the cost of an interruption of a script is unknown. The interval is that of the
        expected time: it does not include the variation between runs due to their interruptions.
        """
        pricing = self.known.spec.pricing
        if pricing.spot is None or (self.known.saving is not None and not self.known.saving.is_known):
            return here.take([])
        training = self._training(here.nodes, here.batch, pricing.spot)
        hours, low, high = (training(seconds) for seconds in (here.step_time, here.step_low, here.step_high))
        running = self._training(here.nodes, here.batch, pricing.spot.model_copy(update={"wait_minutes": 0.0}))(
            here.step_time
        )
        paid = cost.compute_cost(
            pricing,
            hours=running * here.node_hours / (here.nodes * here.hours),
            nodes=here.nodes,
            gpus_per_node=self.known.spec.cluster.gpus_per_node,
            reserved=np.nan_to_num(here.peak_memory),
            market="spot",
        )
        parts, share = here.parts, running / here.hours
        offers = replace(
            here,
            hours=hours,
            hours_low=_replace_infinite(low),
            hours_high=_replace_infinite(high),
            cost=paid,
            node_hours=here.node_hours * share,
            market=np.full(len(here), "spot"),
            kwh=here.kwh * share,
            kwh_low=here.kwh_low * share,
            kwh_high=here.kwh_high * share,
            parts=parts and replace(parts, rest=parts.rest + 3600 * (hours - here.hours)),
        )
        return offers.take(np.isfinite(hours))

    def _training(self, nodes: Ints, batch: Ints, spot: Spot) -> Callable[[Floats], Floats]:
        """Return a function from step times to the expected hours of the whole training on spot nodes."""
        time = self.time(nodes, batch, spot=spot)
        return time.hours if self.known.saving is None else functools.partial(self.known.saving.hours_on_spot, time)

    def time(self, nodes: Ints, batch: Ints, *, spot: Spot | None = None) -> cost.TrainingTime:
        """Return the models of training time by step time; on spot nodes of the expected time."""
        gpus, every = self.known.spec.cluster.gpus_per_node, self.known.spec.train.checkpoint_every
        overheads = self.overheads_model.overheads_at(nodes, batch // (nodes * gpus), batch)
        work = cost.count_work(
            self.known.spec,
            batch=batch,
            world=nodes * gpus,
            dataset_size=self.known.dataset_size,
            eval_size=self.known.eval_size,
            eval_batch_size=overheads.eval_batch_size,
        )
        work = self.stages.count_equivalent_work(nodes, batch, work)
        rate = cost.compute_interruption_rate(self.known.spec.pricing, nodes)
        # As the ranks do it, who do not know which nodes they are on.
        interval = cost.compute_checkpoint_interval(overheads.checkpoint, rate=rate) if every == "auto" else every
        if spot is None:
            return cost.TrainingTime(work, overheads, interval)
        return cost.TrainingTime(work, overheads, interval, rate, 60 * spot.wait_minutes)


def index_probes(places: Iterable[Probe], nodes: Ints, local_batch: Ints) -> dict[int, Probe]:
    """Return those of the given (nodes, local batch) pairs that are among configurations, by their index there."""
    return {
        int(index): place
        for place in places
        for index in np.flatnonzero((nodes == place[0]) & (local_batch == place[1]))
    }


def _make_parts_columns(time: cost.TrainingTime, step_time: Floats, probes: Mapping[int, Measured]) -> PartsColumns:
    waits = np.full(len(step_time), np.nan)
    for index, probe in probes.items():
        waits[index] = np.nan if probe.data_wait is None else probe.data_wait
    seconds_by_part = time.parts(step_time, data_wait=waits)
    return PartsColumns(**{name: seconds + np.zeros(len(step_time)) for name, seconds in seconds_by_part.items()})


def _replace_infinite(hours: Floats) -> Floats:
    return np.where(np.isfinite(hours), hours, np.nan)
