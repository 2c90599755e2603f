"""What the steps of a training take whose batch grows (`train.ramp`): sum_k n_k t(N, B_k) in place of n t(N, B)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tula_cli.errors import SpecError
from tula_cli.models.choice.columns import Flags, Ints
from tula_cli.models.choice.grid import Config, configs
from tula_cli.models.cost import Work
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.ramp.stages import Ramp, ramp_of
from tula_cli.models.time.steptime import Estimate
from tula_cli.run.records.recommendations import Stage, StageSteps
from tula_cli.spec.job import JobSpec


@dataclass
class StageTimes:
    """The stages of each configuration, with the times of their steps.

    A stage whose own step time is not known is taken to have that of the training's batch, which is longer.
    """

    spec: JobSpec
    dataset_size: int
    predicted: Callable[[Sequence[Config]], Sequence[Estimate]]  # step times, all at once
    why_unknown: Callable[[Config], str]  # why there is none; empty where there is
    noise: NoisePath | None = None  # of the gradients
    _known: dict[Config, tuple[StageSteps, ...]] = field(default_factory=dict)

    def why_not(self, config: Config) -> str:
        """Return why a configuration cannot be trained with the stages that the job names; empty where it can."""
        try:
            self._ramp(config)
        except SpecError as error:
            return str(error)
        return ""

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
        places = {Config(config.nodes, stage.batch) for config, ramp in ramps.items() for stage in ramp.stages}
        asked = sorted(places, key=lambda place: (place.nodes, place.batch))
        times = dict(zip(asked, self.predicted(asked), strict=True)) if asked else {}
        for config, ramp in ramps.items():
            steps = ramp.steps(size=self.dataset_size, epochs=self.spec.train.epochs_at_most)
            self._known[config] = tuple(self._stage(times, config, *stage) for stage in steps.items())

    def _stage(self, times: Mapping[Config, Estimate], config: Config, batch: int, steps: int) -> StageSteps:
        place = Config(config.nodes, batch)
        time = times[config if self.why_unknown(place) else place]
        return StageSteps(batch=batch, steps=steps, step_time=time.seconds, step_low=time.low, step_high=time.high)

    def fit(self, nodes: Ints, batch: Ints) -> Flags:
        """Return of which configurations, shape (n,), `why_not` has nothing to say."""
        if not isinstance(self.spec.train.stages, list):
            return np.ones(len(nodes), dtype=bool)
        return np.array([not self.why_not(config) for config in configs(nodes, batch)], dtype=bool)

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
        return replace(work, steps=np.array([self._counted(config) / work.epochs for config in those]))

    def _counted(self, config: Config) -> float:
        stages, own = self._known[config], self._known[config][-1]
        return sum(stage.steps * stage.step_time for stage in stages) / own.step_time

    def stages(self, config: Config) -> tuple[Stage, ...]:
        """Return where a training at a configuration comes to which batch; none where that does not grow."""
        return () if self.spec.train.stages is None else self._ramp(config).stages

    def _ramp(self, config: Config) -> Ramp:
        parts = config.nodes * self.spec.cluster.gpus_per_node * self.spec.train.accumulate
        size = self.dataset_size
        return ramp_of(self.spec, batch=config.batch, parts=parts, dataset_size=size, noise=self.noise)
