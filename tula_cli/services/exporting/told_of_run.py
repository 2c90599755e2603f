"""What is sent of a whole run and of its probes: settings, words and single numbers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tula_cli.models.time.noise import trimmed_mean
from tula_cli.run.directory import Part
from tula_cli.run.records.probes import Environment, Measured
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.snapshot import Result, Snapshot
from tula_cli.run.source.keys import may_be_secret, without_secrets
from tula_cli.services.exporting.exporter import Described, Scalar, State
from tula_cli.services.exporting.sent import digest
from tula_cli.spec.job import JobSpec
from tula_cli.spec.merge import leaves
from tula_cli.words import configuration, first_line


@dataclass(frozen=True)
class Told:
    """What is sent of one run at a tracker, but for its curves."""

    run: Described
    state: State
    ended: float  # Unix time, of its end so far
    params: Mapping[str, Scalar] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    artifacts: tuple[Path, ...] = ()

    def digests(self) -> dict[str, str]:
        """Return what is compared with what was sent before."""
        parts = {
            "params": dict(self.params),
            "tags": dict(self.tags),
            "numbers": dict(self.numbers),
            "state": self.state,
        }
        return {name: digest(part) for name, part in parts.items()}


def settings(spec: JobSpec) -> dict[str, Scalar]:
    """Return a job's settings by their keys, `a.b.c`, those that say something; without what may be a secret."""
    content = spec.model_dump(mode="json", exclude={"export"})
    return {key: value for key, given in leaves(content) if (value := _setting(key, given)) is not None}


def _setting(key: str, value: Any) -> Scalar | None:
    if isinstance(value, bool | int | float):
        return value if not isinstance(value, float) or math.isfinite(value) else None
    if value is None or value in ("", [], {}):
        return None
    name = key.rpartition(".")[2]
    if isinstance(value, list):  # the words and lines of a command keep what is no secret
        return None if may_be_secret(name, "") else without_secrets(" ".join(map(str, value)))
    return None if may_be_secret(name, str(value)) else str(value)


def environment(found: Environment | None) -> dict[str, Scalar]:
    """Return what something ran on; nothing where that is not known."""
    if found is None:
        return {}
    names = (
        "hardware",
        "driver",
        "backend",
        "python",
        "torch",
        "torchvision",
        "tula",
        "cuda",
        "nccl",
        "system",
        "workers",
    )
    told = {f"env.{name}": value for name in names if (value := getattr(found, name)) not in (None, "")}
    variables = {f"env.{name}": value for name, value in found.variables.items() if not may_be_secret(name, value)}
    return {**told, "env.hosts": " ".join(found.hosts), **variables}


def environment_in(row: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return what a row of metrics.jsonl says that a training runs on; nothing where it was damaged."""
    try:
        return environment(Environment.model_validate(row))
    except ValidationError:
        return {}


def of_run(part: Part, look: Snapshot, name: str, *, active: bool, artifacts: tuple[Path, ...]) -> Told:
    """Return what is sent of a whole run: its settings, what it ran on, and the recommendation.

    Args:
        part: the run, or the part of it on one type of node.
        look: at it.
        name: what it is called.
        active: whether a job of it is queued or running.
        artifacts: files to send.
    """
    answer, results = look.recommendation, look.results
    measured = [result for result in results if isinstance(result, Measured)]
    moments = [job.submitted_at for job in look.jobs] + [result.measured_at for result in measured]
    ran_on = measured[0].environment if measured else None
    return Told(
        Described("run", "run", name, min(moments, default=0.0)),
        "running" if active else "finished",
        max([*moments, *([answer.created_at] if answer else [])], default=0.0),
        {**settings(part.spec), **environment(ran_on)},
        _answer_words(answer),
        {"probes/measured": len(measured), "probes/in_all": len(results), **_answer_numbers(answer)},
        artifacts,
    )


def _answer_words(answer: Recommendation | None) -> dict[str, str]:
    if answer is None:
        return {}
    told = {
        "recommended": configuration(answer.choice.nodes, answer.choice.batch, answer.choice.local_batch),
        "objective": answer.objective,
        "reason": answer.reason,
        "price": answer.price,
        "fit": answer.fit,
        "node_type": answer.choice.type,
    }
    warnings = {f"warning.{number:02d}": text for number, text in enumerate(answer.warnings, 1)}
    return {f"recommendation.{key}": text for key, text in {**told, **warnings}.items() if text}


def _answer_numbers(answer: Recommendation | None) -> dict[str, float]:
    if answer is None:
        return {}
    names = (
        "nodes",
        "batch",
        "local_batch",
        "hours",
        "hours_low",
        "hours_high",
        "cost",
        "step_time",
        "kwh",
        "peak_memory",
    )
    return {f"recommended/{name}": value for name, value in _numbers_of(answer.choice, names)}


def _numbers_of(row: Prediction, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for name in names:
        if (value := getattr(row, name)) is not None and math.isfinite(value):
            yield name, float(value)


def of_probe(result: Result, name: str, parent: str, *, at: float) -> Told:
    """Return what is sent of a probe: its configuration, and what a step took there.

    Args:
        result: of the probe.
        name: what the whole run is called.
        parent: the tracker's id of that.
        at: Unix time of a probe that does not tell its own.
    """
    nodes, gpus, local = result.nodes, result.gpus_per_node, result.local_batch
    sizes = {"nodes": nodes, "gpus_per_node": gpus, "batch": nodes * gpus * local, "local_batch": local}
    if isinstance(result, Measured):
        run = Described(result.id, "probe", name, result.measured_at - sum(result.step_times), parent)
        params = {**sizes, "accumulate": result.accumulate, **environment(result.environment)}
        return Told(run, "finished", result.measured_at, params, {"outcome": result.kind}, probe_numbers(result))
    run = Described(result.id, "probe", name, at, parent)
    state: State = "failed" if result.kind == "failed" else "finished"
    words = {"outcome": result.kind, "message": without_secrets(first_line(result.message))}
    return Told(run, state, at, sizes, {key: value for key, value in words.items() if value})


def probe_numbers(probe: Measured) -> dict[str, float]:
    """Return what a step of a probe took: seconds, samples a second, bytes of one GPU, joules; what is not known is absent."""
    step, gradients = trimmed_mean(probe.step_times), probe.gradients
    told = {
        "step_time": step,
        "samples_per_second": probe.batch / step,
        "sync_time": probe.sync_time,
        "compute_time": probe.compute_time,
        "data_wait": probe.data_wait,
        "peak_memory": probe.memory.peak,
        "capacity": probe.capacity,
        "joules_a_step": probe.energy,
        "gradient_norm_sqr": None if gradients is None else gradients.norm_sqr,
        "checkpoint_time": probe.overheads.checkpoint,
        "eval_batch_time": probe.overheads.eval_batch,
        "startup_time": probe.overheads.startup,
    }
    return {key: float(value) for key, value in told.items() if value is not None and math.isfinite(value)}
