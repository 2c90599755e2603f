"""Step times on another network, or on other GPUs, than the probes had: the fitted parts changed, and overlapped anew.

    m' = m (a + (1 - a) / s) e(N)               s times the bandwidth; a is the share that is latency
    c'^q = [f^q + (k b / d)^q] (c_0 / r)^q      r times as fast at the middle batch, to which c_0 brings it

Neither a nor d follow from the probes, nor does e: no two networks grow alike with the nodes, and of another GPU the floor f, which
is the work of the CPU, is not as much faster as the slope. All are drawn as they may be, and with them the parts themselves from
what the probes leave open of each. So what is told is as unsure as the split of a step into its parts is.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from tula_cli.errors import BadMeasurements
from tula_cli.models.time.noise import Z90
from tula_cli.models.time.priors import Prior
from tula_cli.models.time.steptime import Floats, Numbers, StepTimeFit
from tula_cli.run.records.components import PeakMemory
from tula_cli.run.records.probes import Measured
from tula_cli.spec.job import JobSpec

LATENCY = Prior(-2.2, 1.2)  # logit a
ALIKE = 0.4  # standard deviation of ln e, of all numbers of nodes alike
APART = 0.3  # and of each by itself; both less where the network changes by less than e times
HOLDS = 0.07  # standard deviation of ln r at the middle batch
SLOPE = Prior(0.0, 0.55)  # ln d
REACHED = Prior(0.85, 0.7)  # logit of the share of a link's bandwidth that an all-reduce reaches
_COUNT = 1024  # draws
_TOGETHER = 200  # configurations whose draws are made at a time
_ENDS = (5.0, 50.0, 95.0)  # percentiles


@dataclass(frozen=True)
class Change:
    """What is supposed instead of what was measured; None stays as it is."""

    compute: float | None = None  # times as fast, at the middle batch
    interconnect: float | None = None  # times the bandwidth between nodes
    bandwidth: float | None = None  # bits a second and direction of a node's link, in place of a ratio

    @property
    def of_network(self) -> bool:
        return self.interconnect is not None or self.bandwidth is not None


@dataclass(frozen=True)
class Bandwidth:
    """What a node's link to the others carries by the fit. Bits a second and direction, with the ends of a 90 % interval."""

    low: float
    middle: float
    high: float
    sent: int  # bytes of gradients that it follows from
    nodes: int  # that synchronised them


@dataclass(frozen=True)
class SupposedFit(StepTimeFit):
    """A fit whose parts are changed: nothing that it tells was measured."""

    change: Change
    gradients: int | None  # bytes that are synchronised; None where nothing tells
    loader: (
        float  # seconds that a GPU's data loader takes for a sample, below which no step comes; 0 where nothing tells
    )

    def predict_all(
        self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers
    ) -> tuple[Floats, Floats, Floats]:
        """Return step times, the middles of what they may be, and the ends of their 90 % intervals, each of shape (n,)."""
        where = [np.asarray(each, dtype=float) for each in (nodes, gpus_per_node, local_batch)]
        found = [
            np.percentile(
                self._log_steps(*(each[start : start + _TOGETHER] for each in where), measured=True), _ENDS, axis=0
            )
            for start in range(0, len(where[0]), _TOGETHER)
        ]
        low, middle, high = np.exp(np.hstack(found)) if found else np.zeros((3, 0))
        return middle, low, high

    def compute(self, nodes: int, gpus_per_node: int, local_batch: int) -> float:
        """Return the seconds of a step without synchronisation."""
        as_it_is = super().compute(nodes, gpus_per_node, local_batch)
        return max(as_it_is / (self.change.compute or 1.0), min(self.loader * local_batch, as_it_is))

    def draws(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers, *, count: int = 256) -> Floats:
        """Return ln step times as they may be together, shape (count, n), without the noise of a single job."""
        return self._log_steps(nodes, gpus_per_node, local_batch, count=count, measured=False)

    def second_opinion(self, nodes: int, gpus_per_node: int, local_batch: int) -> None:
        """Return None: an additive fit knows no parts that could be changed."""

    def bandwidth_now(self) -> Bandwidth | None:
        """Return what links between nodes carry by the fit, at the most nodes measured; None where nothing tells."""
        if self.gradients is None:
            return None
        low, middle, high = map(float, np.percentile(self._carried(_COUNT, self._latency(_COUNT)), _ENDS))
        return Bandwidth(low, middle, high, sent=self.gradients, nodes=self._most[0])

    def times_now(self) -> tuple[float, float, float]:
        """Return how many times the bandwidth there is supposed to be: 90 % interval and its middle, as low, middle, high."""
        low, middle, high = np.percentile(self._times(_COUNT, self._latency(_COUNT)), _ENDS)
        return float(low), float(middle), float(high)

    @property
    def reached(self) -> tuple[float, float]:
        """The share of a link's bandwidth that an all-reduce is taken to reach: the ends of its 90 % interval."""
        low, high = (1 / (1 + math.exp(-(REACHED.mean + side * Z90 * REACHED.sd))) for side in (-1, 1))
        return low, high

    @property
    def _most(self) -> tuple[int, int, int]:
        """The largest probe: nodes, GPUs a node, local batch."""
        return max((o.nodes, o.gpus_per_node, o.local_batch) for o in self._seen)

    def _log_steps(
        self,
        nodes: Numbers,
        gpus_per_node: Numbers,
        local_batch: Numbers,
        *,
        measured: bool,
        count: int = _COUNT,
    ) -> Floats:
        points = self.points(nodes, gpus_per_node, local_batch)
        found = self.model.draws(points, count=count, measured=measured)
        parts = replace(
            found.parts,
            log_compute=found.parts.log_compute - self._faster(found.parts.floor),
            log_across=found.parts.log_across + self._slower(points.replicas, count),
        )
        loaded = np.log(np.maximum(self.loader * points.local_batch, 1e-12))
        return np.maximum(replace(found, parts=parts).log_step(), np.minimum(loaded, found.log_step()))

    @property
    def middle_batch(self) -> float:
        """The local batch at which the GPUs are as much faster as is supposed: the middle one of the probes."""
        batches = [math.log(o.local_batch) for o in self._seen]
        return math.exp((min(batches) + max(batches)) / 2)

    def _faster(self, floor: Floats) -> Floats:
        """Return ln of how many times as fast GPUs compute, shape (count, n); floor: its share there."""
        count = len(floor)
        if self.change.compute is None:
            return np.zeros((count, 1))
        nodes, gpus, _ = self._most
        middle = self.model.draws(
            self.points([nodes], [gpus], np.array([self.middle_batch])), count=count, measured=False
        ).parts
        rng, q = np.random.default_rng(1), middle.q
        slope, holds = _drawn(SLOPE, rng.standard_normal((count, 1))), HOLDS * rng.standard_normal((count, 1))
        here, there = (-np.log((1 - share) * np.exp(-q * slope) + share) / q for share in (floor, middle.floor))
        faster: Floats = math.log(self.change.compute) + holds + here - there
        return faster

    def _slower(self, nodes: Floats, count: int) -> Floats:
        """Return ln of how many times as long the synchronisation between nodes takes, shape (count, n)."""
        if not self.change.of_network:
            return np.zeros((count, 1))
        rng, latency = np.random.default_rng(2), self._latency(count)
        times = self._times(count, latency)
        sizes, where = np.unique(nodes, return_inverse=True)
        other = ALIKE * rng.standard_normal((count, 1)) + APART * rng.standard_normal((count, len(sizes)))[:, where]
        found: Floats = np.log(latency + (1 - latency) / times) + np.minimum(1.0, np.abs(np.log(times))) * other
        return found

    def _times(self, count: int, latency: Floats) -> Floats:
        """Return how many times the bandwidth there is, shape (count, 1)."""
        if self.change.interconnect is not None:
            return np.full((count, 1), self.change.interconnect)
        assert self.change.bandwidth is not None
        drawn = _drawn(REACHED, np.random.default_rng(4).standard_normal((count, 1)))
        return self.change.bandwidth / (1 + np.exp(-drawn)) / self._carried(count, latency)

    def _carried(self, count: int, latency: Floats) -> Floats:
        """Return the bits a second and direction of a node's link, by the fit, shape (count, 1).

        An all-reduce of S bytes among W ranks sends 2 (1 - 1/W) S over each link, be it a ring (Patarasuk and Yuan 2009) or,
        nearly, a tree.
        """
        assert self.gradients is not None, "a bandwidth is asked for where the bytes are known"
        nodes, gpus, local_batch = self._most
        there = self.model.draws(self.points([nodes], [gpus], [local_batch]), count=count, measured=False)
        bits = 8 * 2 * (1 - 1 / (nodes * gpus)) * self.gradients
        carried: Floats = bits / ((1 - latency) * np.exp(there.parts.log_across))
        return carried

    def _latency(self, count: int) -> Floats:
        """Return the share of the synchronisation that no bandwidth changes, shape (count, 1)."""
        drawn = _drawn(LATENCY, np.random.default_rng(3).standard_normal((count, 1)))
        share: Floats = 1 / (1 + np.exp(-drawn))
        return share


def _drawn(prior: Prior, normal: Floats) -> Floats:
    return prior.mean + prior.sd * normal


def supposed(fit: StepTimeFit, change: Change, measured: Sequence[Measured], spec: JobSpec) -> SupposedFit:
    """Return a fit under a change.

    Args:
        fit: of the probes.
        change: what is supposed.
        measured: the probes.
        spec: the job.

    Raises:
        BadMeasurements: the network is to be changed, and only one node was measured; or its bandwidth is given, and nothing
            tells the one there is.
    """
    if change.of_network and not fit.across:
        raise BadMeasurements(
            "what-if interconnect: only one node was measured, so nothing of the network between nodes is known",
            "measure two nodes (search.nodes), or leave interconnect out",
        )
    gradients = _synchronised(measured, spec)
    if change.bandwidth is not None and gradients is None:
        raise BadMeasurements(
            f"what-if interconnect: {_UNTOLD}, so the bandwidth there is now is not known",
            "give a ratio: --what-if interconnect=4x for four times the bandwidth",
        )
    loaders = [probe.loader_time / probe.local_batch for probe in measured if probe.loader_time]
    return changed(fit, change, gradients=gradients, loader=statistics.median(loaders) if loaders else 0.0)


def changed(fit: StepTimeFit, change: Change, *, gradients: int | None = None, loader: float = 0.0) -> SupposedFit:
    """Return a fit under a change; as SupposedFit has them, the bytes that are synchronised and the loader's seconds a sample."""
    own = {each.name: getattr(fit, each.name) for each in fields(fit)}
    return SupposedFit(**own, change=change, gradients=gradients, loader=loader)


_UNTOLD = (
    "the probes do not tell how many bytes an all-reduce sends (a model in shares, a parameter server, or a script)"
)


def _synchronised(measured: Sequence[Measured], spec: JobSpec) -> int | None:
    """Return the bytes of gradients that are synchronised; None where no probe tells, or it is no all-reduce of them."""
    if spec.train.sharded or spec.cluster.collective == "parameter_server":
        return None
    told = [probe.memory.states if isinstance(probe.memory, PeakMemory) else probe.memory for probe in measured]
    return max((states.gradients for states in told if states is not None and states.gradients), default=None)
