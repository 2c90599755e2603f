"""Probe results computed from known parameters, which fits should recover."""

from dataclasses import dataclass, field

import numpy as np

from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import (
    Components,
    Environment,
    Footprint,
    GradientStats,
    Measured,
    ModelStates,
    OutOfMemory,
    Overheads,
    PeakMemory,
)
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.spec.job import JobSpec

MIB = 1024**2


@dataclass(frozen=True)
class Truth:
    """A cluster and a job with known parameters of Eq. 2 and Eq. 3, in seconds and bytes."""

    fixed: float = 0.020
    slope: float = 0.0005
    sync: float = 0.030  # multiplied by 1 - 1/N
    noise: float = 0.0  # relative deviation of a whole probe from its step time
    jitter: float = 0.0  # relative deviation of single steps
    gpus_per_node: int = 1
    accumulate: int = 1
    model_bytes: int = 100 * MIB
    sample_bytes: int = 2 * MIB
    reserved_over_peak: float = 1.0
    capacity: int | None = 16 * 1024 * MIB
    watts: float | None = None  # per GPU; None without an energy counter
    dataset_size: int = 50_000
    eval_size: int = 10_000
    hardware: str = "Test GPU"
    overheads: Overheads = field(
        default_factory=lambda: Overheads(
            startup=12.0, eval_batch=0.05, eval_batch_size=100, checkpoint=0.5, refresh=0.2
        )
    )

    def step_time(self, nodes: int, local_batch: int) -> float:
        return self.fixed + self.slope * local_batch + self.sync * (1 - 1 / nodes)

    def peak(self, local_batch: int) -> int:
        return 4 * self.model_bytes + self.sample_bytes * local_batch // self.accumulate


def make_probe(
    truth: Truth, nodes: int, local_batch: int, *, rng: np.random.Generator | None = None, steps: int = 20, **changes
) -> Measured:
    """Return the probe computed from known parameters; `changes` replace fields of the record."""
    rng = rng or np.random.default_rng(0)
    seconds = truth.step_time(nodes, local_batch) * (1 + truth.noise * rng.standard_normal())
    times = seconds * (1 + truth.jitter * rng.standard_normal(steps))
    record = Measured(
        id=make_probe_id(nodes, local_batch),
        nodes=nodes,
        gpus_per_node=truth.gpus_per_node,
        local_batch=local_batch,
        batch=nodes * truth.gpus_per_node * local_batch,
        accumulate=truth.accumulate,
        step_times=tuple(float(time) for time in times),
        warmup_times=(seconds, seconds),
        sync_time=truth.sync * (1 - 1 / nodes),
        compute_time=truth.fixed + truth.slope * local_batch,
        data_wait=0.0,
        memory=_memory(truth, local_batch),
        capacity=truth.capacity,
        gradients=GradientStats(
            norm_sqr=1.0,
            local_norm_sqr=2.0,
            batch=nodes * truth.gpus_per_node * local_batch,
            local_batch=local_batch,
            steps=steps,
        ),
        overheads=truth.overheads,
        environment=Environment(
            hosts=("a",),
            device="cuda",
            hardware=truth.hardware,
            driver="550",
            backend="nccl",
            python="3.11",
            torch="2.6",
            torchvision="0.21",
            tula="0.1",
        ),
        dataset_size=truth.dataset_size,
        eval_size=truth.eval_size,
        energy=None if truth.watts is None else truth.watts * nodes * truth.gpus_per_node * float(np.mean(times)),
        measured_at=0.0,
    )
    return record.model_copy(update=changes)


def as_script_probe(probe: Measured, **changes: object) -> Measured:
    """Return the probe as measured on an unchanged script without DDP: only steps and peak memory."""
    memory = PeakMemory(
        states=ModelStates.model_validate(probe.memory.model_dump()),
        peak=probe.memory.peak,
        reserved=probe.memory.reserved,
    )
    nothing = dict.fromkeys(("eval_batch", "eval_batch_size", "checkpoint", "refresh"))
    update = {
        "sync_time": None,
        "compute_time": None,
        "data_wait": None,
        "gradients": None,
        "eval_size": None,
        "memory": memory,
        "overheads": probe.overheads.model_copy(update=nothing),
    }
    return probe.model_copy(update={**update, **changes})


def _memory(truth: Truth, local_batch: int) -> Components:
    micro_batch, peak = local_batch // truth.accumulate, truth.peak(local_batch)
    batch = micro_batch * truth.sample_bytes // 20
    return Components(
        parameters=truth.model_bytes,
        gradients=truth.model_bytes,
        optimizer=truth.model_bytes,
        factors=truth.model_bytes,
        batch=batch,
        activations=peak - 4 * truth.model_bytes - batch,
        peak=peak,
        reserved=round(peak * truth.reserved_over_peak),
    )


def make_footprint(truth: Truth, local_batch: int) -> Footprint:
    """Return an estimate of memory with the known parameters."""
    memory = _memory(truth, local_batch)
    return Footprint(local_batch=local_batch, memory=memory.model_copy(update={"reserved": memory.peak}))


def make_inspection(**changes: object) -> Inspection:
    """Return an inspection on a CPU without memory values."""
    fields: dict[str, object] = {
        "dataset_size": 2000, "eval_size": 100, "classes": 10, "sample_shape": (1, 8, 8), "parameters": 10,
        "footprints": (), "estimate_error": "", "device": "cpu", "hardware": "x", "capacity": None, "cpus": 2,
    }  # fmt: skip
    return Inspection.model_validate({**fields, **changes})


def make_out_of_memory(nodes: int, local_batch: int, *, gpus_per_node: int = 1, assumed: bool = False) -> OutOfMemory:
    return OutOfMemory(
        id=make_probe_id(nodes, local_batch),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        local_batch=local_batch,
        assumed=assumed,
        message="CUDA out of memory",
    )


def make_spec(**sections: object) -> JobSpec:
    """Return a job spec for tests; sections are merged with small defaults."""
    default: dict[str, object] = {
        "name": "test",
        "model": {"name": "resnet18"},
        "dataset": {"name": "CIFAR10"},
        "optimizer": {"lr": 0.1},
        "train": {"epochs": 10, "method": "ags"},
        "search": {"nodes": [2, 4, 8, 16], "min_batch": 32, "strategy": "sweep"},
        "pricing": {"price": 2.0},
    }
    for name, values in sections.items():
        known = default.get(name)
        default[name] = {**known, **values} if isinstance(known, dict) and isinstance(values, dict) else values
    return JobSpec.model_validate(default)


def make_probes(truth: Truth, probes: dict[int, tuple[int, ...]], *, seed: int = 0) -> list[Measured]:
    """Return probes at all nodes -> local batches."""
    rng = np.random.default_rng(seed)
    return [make_probe(truth, nodes, local, rng=rng) for nodes, locals_ in probes.items() for local in locals_]


def make_shared_storage_probes(seed: int) -> list[Measured]:
    """Return probes whose steps wait for data from shared storage; the wait grows with the number of samples per step on all nodes."""
    rng, probes = np.random.default_rng(seed), []
    for nodes in (1, 2, 4, 8):
        for local in (batch // nodes for batch in (32, 64, 128, 256, 512, 1024)):
            compute = 0.02 + 0.001 * local
            wait = 0.0 if nodes == 1 else max(0.0, 0.0008 * local * nodes - compute) * rng.lognormal(0, 0.3)
            times = (compute + wait) * (1 + 0.01 * rng.standard_normal(20))
            probes.append(make_probe(Truth(), nodes, local, step_times=tuple(times), compute_time=compute))
    return probes


def add_gradient_noise(probes: list[Measured], scale: float, *, error: float = 1e-3) -> list[Measured]:
    """Return the probes with gradient norms that result from a gradient noise scale in samples; |G|^2 is 1."""
    return [
        probe.model_copy(
            update={
                "gradients": GradientStats(
                    norm_sqr=1 + scale / probe.batch,
                    local_norm_sqr=1 + scale / probe.local_batch,
                    batch=probe.batch,
                    local_batch=probe.local_batch,
                    steps=20,
                    covariance=(error**2, error**2, 0.0),
                )
            }
        )
        for probe in probes
    ]
