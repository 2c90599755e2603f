"""What the steps of a training take whose batch grows (`train.ramp`): sum_k n_k t(N_k, B_k) in place of n t(N, B)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tula_cli.errors import SpecError
from tula_cli.models.choice.columns import Flags, Floats, Ints, columns
from tula_cli.models.choice.grid import Config, configs
from tula_cli.models.cost import Work
from tula_cli.models.overheads import OverheadModel
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.ramp.stage_nodes import (
    Change,
    Worth,
    allowed,
    cheapest,
    named,
    on_nodes,
    ramp_on,
    told,
    why_not_begun,
)
from tula_cli.models.ramp.stages import Ramp
from tula_cli.models.time.steptime import Estimate
from tula_cli.run.records.recommendations import Stage, StageSteps
from tula_cli.spec.job import JobSpec


def change_of(beside: OverheadModel, gpus_per_node: int, queue: float) -> Callable[[Config], Change]:
    """Return what gives for a configuration what going on with its nodes takes: a start, and the wait for them (seconds)."""

    @functools.cache
    def change(config: Config) -> Change:
        nodes, batch = columns([config])
        found = beside.at(nodes, batch // (nodes * gpus_per_node), batch)
        return Change(float(found.startup[0]), queue)

    return change


@dataclass
class StageTimes:
    """The stages of each configuration, with their nodes and the times of their steps.

    A stage whose own step time is not known is taken to have that of the training's batch, which is longer.
    """

    spec: JobSpec
    dataset_size: int
    predicted: Callable[[Sequence[Config]], Sequence[Estimate]]  # step times, all at once
    why_unknown: Callable[[Config], str]  # why there is none; empty where there is
    noise: NoisePath | None = None  # of the gradients
    too_large: Callable[[Config], str] = lambda _: ""  # why a batch does not fit the memory; empty where it does
    change: Callable[[Config], Change] = lambda _: Change(0.0)  # what going on with other nodes takes
    by: Worth = "time"  # that the nodes of stages are chosen by
    _known: dict[Config, tuple[StageSteps, ...]] = field(default_factory=dict)

    def why_not(self, config: Config) -> str:
        """Return why a configuration cannot be trained with the stages that the job names; empty where it can."""
        try:
            on_nodes(self._ramp(config).stages, named(self.spec), spec=self.spec, nodes=config.nodes)
        except SpecError as error:
            return told(error)
        return ""

    def why_not_begun(self, config: Config) -> str:
        """Return why a training cannot begin at a configuration; one after an out-of-memory may still come to it."""
        return why_not_begun(self.spec, batch=config.batch, nodes=config.nodes, dataset_size=self.dataset_size)

    def of(self, config: Config) -> tuple[StageSteps, ...]:
        """Return the stages of a configuration before it has its own batch, ascending; none where it always has."""
        if self.spec.train.stages is None:
            return ()
        if config not in self._known:
            self.work_out([config])
        return self._known[config][:-1]

    def work_out(self, configs: Sequence[Config]) -> None:
        """Work out many configurations at once; `of` then knows them.

        Raises:
            SpecError: a stage that the job names does not divide, or they last as long as the training.
        """
        if self.spec.train.stages is None:
            return
        ramps = {config: self._ramp(config) for config in configs if config not in self._known}
        places = {config: self._places(config, ramp) for config, ramp in ramps.items()}
        asked = sorted(
            {place for of_config in places.values() for options in of_config for place in options},
            key=lambda place: (place.nodes, place.batch),
        )
        times = dict(zip(asked, self.predicted(asked), strict=True)) if asked else {}
        for config, ramp in ramps.items():
            steps = ramp.steps(size=self.dataset_size, epochs=self.spec.train.epochs_at_most)
            shares = ramp.shares(self.dataset_size * self.spec.train.epochs_at_most)
            found = self._stages(config, places[config], steps, times)
            self._known[config] = tuple(one.model_copy(update={"share": shares[one.batch]}) for one in found)

    def _places(self, config: Config, ramp: Ramp) -> list[list[Config]]:
        """Return where each stage may run."""
        return [
            [Config(nodes, batch) for nodes in self._nodes(config, batch)]
            for batch in dict.fromkeys(stage.batch for stage in ramp.stages)
        ]

    def _nodes(self, config: Config, batch: int) -> Sequence[int]:
        own = named(self.spec).get(batch)
        if batch == config.batch or self.spec.train.ramp_nodes == "same" or own is not None:
            return [own or config.nodes]
        counts = allowed(self.spec, batch, nodes=config.nodes)
        if config.nodes in counts and self.why_unknown(Config(config.nodes, batch)):
            return [config.nodes]  # what other nodes would save is not known
        fitting = [
            count
            for count in counts
            if count == config.nodes or not (self.why_unknown(at := Config(count, batch)) or self.too_large(at))
        ]
        return fitting or counts[:1]

    def _stages(
        self,
        config: Config,
        places: Sequence[Sequence[Config]],
        steps: Mapping[int, int],
        times: Mapping[Config, Estimate],
    ) -> tuple[StageSteps, ...]:
        """Return the stages on the nodes that they are worth."""
        seconds = [
            {at.nodes: count * self._time(config, at, times).seconds for at in options}
            for options, count in zip(places, steps.values(), strict=True)
        ]
        nodes = cheapest(seconds, self.change(config), by=self.by)
        return tuple(
            self._stage(config, Config(count, batch), number, times)
            for count, (batch, number) in zip(nodes, steps.items(), strict=True)
        )

    def _stage(self, config: Config, place: Config, steps: int, times: Mapping[Config, Estimate]) -> StageSteps:
        time, own = self._time(config, place, times), place.nodes == config.nodes
        return StageSteps(
            batch=place.batch,
            steps=steps,
            step_time=time.seconds,
            step_low=time.low,
            step_high=time.high,
            nodes=None if own else place.nodes,
        )

    def _time(self, config: Config, place: Config, times: Mapping[Config, Estimate]) -> Estimate:
        return times[config if self.why_unknown(place) else place]

    def fit(self, nodes: Ints, batch: Ints) -> Flags:
        """Return of which configurations, shape (n,), `why_not` has nothing to say."""
        if not isinstance(self.spec.train.stages, list):
            return np.ones(len(nodes), dtype=bool)
        return np.array([not self.why_not(config) for config in configs(nodes, batch)], dtype=bool)

    def begin(self, nodes: Ints, batch: Ints) -> Flags:
        """Return of which configurations, shape (n,), `why_not_begun` has nothing to say."""
        if self.spec.train.stages in (None, "auto", "noise"):
            return np.ones(len(nodes), dtype=bool)
        return np.array([not self.why_not_begun(config) for config in configs(nodes, batch)], dtype=bool)

    def column(self, nodes: Ints, batch: Ints) -> NDArray[np.object_]:
        """Return the stages of configurations, shape (n,), as `of` has them; None where there are none."""
        found = np.full(len(nodes), None, dtype=object)
        if self.spec.train.stages is not None:
            for index, config in enumerate(configs(nodes, batch)):
                found[index] = self.of(config) or None
        return found

    def counted(self, nodes: Ints, batch: Ints, work: Work) -> Work:
        """Return the work of configurations with their steps counted in those of their own batches, which take as long."""
        if self.spec.train.stages is None:
            return work
        those = configs(nodes, batch)
        self.work_out(those)
        changes = np.array([len(self._counts(config)) - 1 for config in those])
        queue = np.array([self.change(config).queue for config in those])
        steps = np.array([self._counted(config) / work.epochs for config in those])
        return replace(work, steps=steps, changes=changes, queued=changes * queue)

    def unused(self, nodes: Ints, batch: Ints) -> Floats:
        """Return the node-hours, shape (n,), that trainings take less than all their hours on all their nodes."""
        found = np.zeros(len(nodes))
        if self.spec.train.stages is not None:
            for index, config in enumerate(configs(nodes, batch)):
                found[index] = self._unused(config) / 3600
        return found

    def _unused(self, config: Config) -> float:
        self.of(config)
        counts, change = self._counts(config), self.change(config)
        steps = sum(
            (config.nodes - stage.nodes) * stage.steps * stage.step_time
            for stage in self._known[config]
            if stage.nodes is not None
        )
        starts = sum(config.nodes - count for count in counts) * change.start
        return steps + starts + (len(counts) - 1) * config.nodes * change.queue

    def _counts(self, config: Config) -> list[int]:
        """Return the numbers of nodes that a training has, one after the other."""
        return sorted({stage.nodes or config.nodes for stage in self._known[config]})

    def _counted(self, config: Config) -> float:
        stages, own = self._known[config], self._known[config][-1]
        return sum(stage.steps * stage.step_time for stage in stages) / own.step_time

    def stages(self, config: Config) -> tuple[Stage, ...]:
        """Return where a training at a configuration comes to which batch; none where that does not grow."""
        return () if self.spec.train.stages is None else self._ramp(config).stages

    def _ramp(self, config: Config) -> Ramp:
        size = self.dataset_size
        return ramp_on(self.spec, batch=config.batch, nodes=config.nodes, dataset_size=size, noise=self.noise)
