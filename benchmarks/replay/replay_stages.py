"""Saving by ramp stages on fewer nodes, on measured step times: python benchmarks/replay/replay_stages.py TABLE.csv... [--json]

For each set (an app on one cluster, with one number of GPUs per node) trainings of 20 epochs are compared. Step times are the measured
ones; between them, they are interpolated linearly in log batch and log time on the same nodes; outside (small batches on many nodes)
they are predicted by tula's model, fitted to all measurements:

- the reference batch (the smallest measured one), on the nodes with the fewest node-hours, or with the least time;
- each larger measured batch, fixed for the whole training: faster, with a loss of accuracy that is not considered here;
- a batch that grows from the reference batch to that one (`train.ramp: auto`, which kept the small batch's accuracy in the trainings
  of docs/explanation/accuracy.md), with the same nodes throughout, and with the best nodes of each stage (`train.ramp_nodes: auto`).

The saving is that of the last one by node-hours compared with the best reference batch, and with the same ramp on the same nodes; the
speedup is relative to the reference batch at its fastest. A change of nodes costs a start (--start); there are no queue waits. The
length is that of HOURS on the fastest fixed configuration. Evaluation and checkpoints are left out.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import cast

import numpy as np
from replay_baselines import MODELS, Predictor
from replay_data import MeasuredSet, Where, load_sets

from tula_cli.models.choice.candidates import Ints, convert_to_columns, convert_to_configs
from tula_cli.models.choice.grid import Config
from tula_cli.models.ramp_costs import StageObjective, StageTimes
from tula_cli.models.time.step_time import Estimates
from tula_cli.run.records.recommendations import StageSteps
from tula_cli.spec.job import JobSpec

EPOCHS = 20
START_SECONDS = 60.0  # seconds from a change of nodes to the first step afterwards
MIN_SPEEDUP, TARGET_SPEEDUP = (
    6.0,
    4.0,
)  # minimum speedup of the largest batch over the reference batch, and the speedup that the ramp is then to reach


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a training."""

    nodes: int  # at the end
    batch: int
    hours: float
    node_hours: float


@dataclass(frozen=True)
class Row:
    """Costs of the trainings of one set; node-hours and hours of a training of HOURS on its fastest configuration."""

    name: str
    reference: int  # batch size
    least: TrainingCost  # the reference batch with the fewest node-hours
    fastest: TrainingCost  # the reference batch with the least time
    fixed: TrainingCost  # the fastest fixed batch
    same: TrainingCost  # the ramp with the same nodes throughout and the fewest node-hours
    stages: TrainingCost  # the ramp with the nodes of each stage
    sooner: TrainingCost  # the same with the least time
    at_speed: float  # node-hours saved at the fastest ramp if the nodes of its stages are chosen by cost
    slower: float  # relative additional time in that case

    @property
    def saved(self) -> float:
        """Node-hours that the ramp saves compared with the best reference batch."""
        return 1 - self.stages.node_hours / self.least.node_hours

    @property
    def by_nodes(self) -> float:
        """Node-hours saved compared with the same ramp with the same nodes throughout, each at its best."""
        return 1 - self.stages.node_hours / self.same.node_hours

    @property
    def allowed(self) -> float:
        """Speedup of the fastest fixed batch over the reference batch."""
        return self.fastest.hours / self.fixed.hours

    @property
    def speedup(self) -> float:
        return self.fastest.hours / self.sooner.hours


class Trainings:
    """The trainings of one set."""

    def __init__(self, measured: MeasuredSet, start: float) -> None:
        assert measured.gpus_per_node is not None
        self.measured, self.gpus, self.start = measured, measured.gpus_per_node, start
        self.lines: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for place, seen in sorted(measured.truth.items()):
            self.lines[place.nodes].append((place.local_batch, seen.seconds))
        self.reference = min(place.replicas * place.local_batch for place in measured.truth)
        most = max(place.replicas * place.local_batch for place in measured.truth)
        doubled = [self.reference << k for k in range(most.bit_length()) if self.reference << k <= most]
        self.candidates = [
            Config(nodes, batch)
            for batch in doubled
            for nodes in self.lines
            if not self.describe_why_unknown(Config(nodes, batch))
        ]

    def describe_why_unknown(self, config: Config) -> str:
        """Return why the time of a configuration is unknown; empty if it is known."""
        line = self.lines.get(config.nodes, [])
        local_batch, rest = divmod(config.batch, config.nodes * self.gpus)
        known = bool(line) and not rest and line[0][0] <= local_batch <= line[-1][0]
        return "" if known else "it was not measured"

    def seconds(self, config: Config) -> float:
        """Return the step time of a configuration: measured, interpolated or predicted."""
        local_batch = max(1, config.batch // (config.nodes * self.gpus))
        if self.describe_why_unknown(config):
            return float(self.model([Where(config.nodes, self.gpus, local_batch)])[0].seconds)
        sizes, times = zip(*self.lines[config.nodes], strict=True)
        return float(np.exp(np.interp(math.log(local_batch), np.log(sizes), np.log(times))))

    def predict_steps(self, nodes: Ints, batch: Ints) -> Estimates:
        """Return the step times of many configurations, without intervals."""
        unknown = np.full(len(nodes), math.nan)
        seconds = np.array([self.seconds(config) for config in convert_to_configs(nodes, batch)])
        return Estimates(seconds, low=unknown, high=unknown, fitted=unknown)

    @cached_property
    def model(self) -> Predictor:
        return MODELS["tula"](list(self.measured.truth.values()), self.measured.collective)

    @cached_property
    def size(self) -> int:
        """Samples per epoch."""
        rate = max(config.batch / self.seconds(config) for config in self.candidates)
        return round(3600 * self.measured.hours * rate / EPOCHS)

    def fixed(self, config: Config) -> TrainingCost:
        hours = (EPOCHS * (self.size // config.batch) * self.seconds(config) + self.start) / 3600
        return TrainingCost(config.nodes, config.batch, hours, config.nodes * hours)

    def grown(self, config: Config, *, nodes: str, by: StageObjective) -> TrainingCost:
        """Return the cost of a ramp up to a configuration."""
        times = StageTimes(
            self.spec(nodes),
            self.size,
            predict_steps=self.predict_steps,
            find_unknown=lambda counts, _: np.zeros(len(counts), dtype=bool),
            startup=lambda counts, _: np.full(len(counts), self.start),
            by=by,
        )
        columns = convert_to_columns([config])
        stages = times.make_stage_table(*columns, self.predict_steps(*columns)).build_records(0)
        value = (EPOCHS * self.size - sum(stage.steps * stage.batch for stage in stages)) // config.batch
        every = [
            *stages,
            StageSteps(batch=config.batch, steps=value, step_time=self.seconds(config), step_low=None, step_high=None),
        ]
        counts = {stage.nodes or config.nodes for stage in every}
        steps = [((stage.nodes or config.nodes), stage.steps * stage.step_time) for stage in every]
        hours = (sum(seconds for _, seconds in steps) + self.start * len(counts)) / 3600
        node_hours = (sum(count * seconds for count, seconds in steps) + self.start * sum(counts)) / 3600
        return TrainingCost(config.nodes, config.batch, hours, node_hours)

    def spec(self, nodes: str) -> JobSpec:
        return JobSpec.model_validate(
            {
                "name": "replayed",
                "model": {"name": "resnet50"},
                "dataset": {"name": "cifar10"},
                "optimizer": {"name": "SGD", "lr": 0.1},
                "train": {
                    "method": "lrs", "epochs": EPOCHS, "reference_batch": self.reference, "ramp": "auto", "ramp_nodes": nodes,
                },
                "search": {"nodes": sorted(self.lines)},
                "cluster": {"gpus_per_node": self.gpus},
            }
        )  # fmt: skip

    def row(self) -> Row | None:
        """Return the costs of the trainings; None if no batch above the reference was measured."""
        larger = [config for config in self.candidates if config.batch > self.reference]
        references = [self.fixed(config) for config in self.candidates if config.batch == self.reference]
        if not (references and larger):
            return None
        same = [self.grown(config, nodes="same", by="cost") for config in larger]
        cheap = [self.grown(config, nodes="auto", by="cost") for config in larger]
        quick = [self.grown(config, nodes="auto", by="time") for config in larger]
        fastest, soonest = min(same, key=_hours), min(quick, key=_hours)
        alike = next(result for result in cheap if (result.nodes, result.batch) == (fastest.nodes, fastest.batch))
        return Row(
            name=self.measured.name,
            reference=self.reference,
            least=min(references, key=_node_hours),
            fastest=min(references, key=_hours),
            fixed=min(map(self.fixed, larger), key=_hours),
            same=min(same, key=_node_hours),
            stages=min(cheap, key=_node_hours),
            sooner=soonest,
            at_speed=1 - alike.node_hours / fastest.node_hours,
            slower=alike.hours / fastest.hours - 1,
        )


def _hours(taken: TrainingCost) -> float:
    return taken.hours


def _node_hours(taken: TrainingCost) -> float:
    return taken.node_hours


def judge(sets: Sequence[MeasuredSet], *, start: float = START_SECONDS) -> list[Row]:
    """Return one row for each set with several nodes in which a batch can grow."""
    results = [Trainings(each, start).row() for each in sets if each.gpus_per_node is not None]
    return [row for row in results if row is not None]


def format_rows(rows: Sequence[Row]) -> list[str]:
    """Format the rows and their means as text."""
    head = "node-hours against the reference batch, of these by nodes; the fastest ramp: saved by nodes, longer; speed-up of a fixed batch, of the ramp"
    results = [
        f"{row.name:44} {row.saved:6.0%} {row.by_nodes:6.0%}  {row.at_speed:6.0%} {row.slower:+6.0%}  {row.allowed:6.1f} {row.speedup:6.1f}"
        for row in rows
    ]
    saved, at_speed = ([getattr(row, name) for row in rows] for name in ("saved", "at_speed"))
    wide = [row for row in rows if row.allowed >= MIN_SPEEDUP]
    return [
        head,
        *results,
        f"{len(rows)} sets: at least 20 % fewer node-hours than the best reference batch in {sum(s >= 0.2 for s in saved)}, median"
        f" {np.median(saved):.0%}; at the fastest ramp {sum(s >= 0.2 for s in at_speed)} save 20 % by the nodes of stages, median"
        f" {np.median(at_speed):.0%}",
        f"where a fixed batch is {MIN_SPEEDUP:g} times as fast ({len(wide)} sets) the ramp is {TARGET_SPEEDUP:g} times as fast in"
        f" {sum(row.speedup >= TARGET_SPEEDUP for row in wide)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--start", type=float, default=START_SECONDS, help="seconds that a start takes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = judge(load_sets(*cast("list[str]", arguments.tables)), start=arguments.start)
    if arguments.json:
        message = ("saved", "by_nodes", "allowed", "speedup")
        json.dump([asdict(row) | {name: getattr(row, name) for name in message} for row in rows], sys.stdout, indent=1)
        return
    print("\n".join(format_rows(rows)))


if __name__ == "__main__":
    main()
