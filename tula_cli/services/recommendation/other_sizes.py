"""Probes of the same job with other numbers of GPUs a node: with them, what is inside a node and what is between nodes is known apart.

"4 nodes of 8 GPUs" follow from "1 node of 8" and "2 nodes of 1". They are parts of one run (`search.gpus_per_node`).
"""

from pathlib import Path

from tula_cli.models.observations import OtherSizes
from tula_cli.models.time.stretches import TrainingObservations
from tula_cli.run.directory import Part
from tula_cli.run.records.probes import Measured
from tula_cli.services.recommendation.by_trainings import observations_from_trainings


class CachedTrainings:
    """Observations from the trainings of parts; each part is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, TrainingObservations] = {}

    def __call__(self, part: Part) -> TrainingObservations:
        if part.run.path not in self._known:
            self._known[part.run.path] = observations_from_trainings(part.run, part.spec, part.run.results())
        return self._known[part.run.path]


def measurements_of_other_sizes(part: Part, trainings: CachedTrainings) -> OtherSizes:
    """Return the measurements on the nodes of a part with other numbers of their GPUs."""
    probes = [
        result for other_part in part.sizes for result in other_part.run.results() if isinstance(result, Measured)
    ]
    return OtherSizes(tuple(probes), tuple(steps for other_part in part.sizes for steps in trainings(other_part).found))
