"""Steps: whether the host waits in them, and whether a probe times what they take."""

import contextlib
import gc
import itertools
import statistics
import time

import operations
import torch

from gpu.rig import Fixed, alone, job
from gpu.stage import Stage, share
from gpu.stages.machine import card
from gpu.waits import waits
from tula_cli.errors import TulaError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.measure.probe import GradientNormRecorder
from tula_cli.worker.ranks import Ranks

COUNTED = 5  # steps
MOST_NOISE = 0.01
"""By how much two equal measurements may differ where a third is judged. Steps of a few milliseconds, whose pace the host
sets, differ by 3 to 11 % on an H100 beside 16 virtual cores."""


def syncs(stage: Stage) -> None:
    """Count the host's waits in a step of every method and its variants, at every precision."""
    model, image, batch = ("small_cnn", 8, 16) if stage.tiny else ("resnet18_cifar", 32, 64)
    precisions = ("fp16",) if stage.tiny else operations.PRECISIONS
    left_out = []
    with alone(stage.device) as me, operations.as_on_gpu():
        for case, precision in itertools.product(operations.cases(), precisions):
            key = f"{case},{precision}"
            try:
                value = operations.sections(case, precision=precision, reference_batch=batch // 4)
                spec = job(model, image=image, batch=batch, device=stage.device, **value)
                result = of_a_step(spec, me, batch=batch)
            except (TulaError, ImportError, RuntimeError) as error:  # the latter of torch; the other cases go on
                left_out.append(f"{key}: {str(error)[:300]}")
                continue
            total = sum(result.values())
            stage.tell(syncs={key: {"count": total, "where": result}})
            most = 1 if precision == "fp16" else 0  # GradScaler's own
            stage.require_on_card("syncs", total <= most, f"{key}: {total:g} waits a step, at {', '.join(result)}")
    stage.require(not left_out, f"not measured: {'; '.join(left_out)}")


def of_a_step(spec: JobSpec, me: Ranks, *, batch: int) -> dict[str, float]:
    """Return the waits of a step by their place, the mean over some."""
    fixed = Fixed.of(spec, me, batch=batch)
    fixed.warm_up(4)
    with waits(me.device.type) as result:
        for _ in range(COUNTED):
            fixed.step()
    fixed.trainer.clock.wait()
    del fixed
    gc.collect()
    return {where: count / COUNTED for where, count in result.items()}


def timing(stage: Stage) -> None:
    """Hold the step times of a probe against many steps between two events, and against the wall."""
    sizes = [("small_cnn", 8, 8)] if stage.tiny else [("resnet18_cifar", 32, 128), ("resnet50", 224, 64)]
    sizes += [] if stage.tiny else [("resnet50", 224, 256)]
    judged = 0
    with alone(stage.device) as me:
        for (model, image, batch), precision in itertools.product(sizes, ("fp32",) if stage.tiny else ("fp32", "bf16")):
            key = f"{model},{batch},{precision}"
            spec = job(model, image=image, batch=batch, device=stage.device, precision=precision)
            answer = timed(spec, me, batch=batch, least=0.1 if stage.tiny else 2.0)
            stage.tell(timing={key: answer})
            if abs(answer["control"] - 1) > MOST_NOISE:
                continue
            judged += 1
            off = answer["probe_ms"] / answer["events_ms"] - 1
            stage.require_on_card(
                "probe_ms", abs(off) <= 0.02, f"{key}: a probe's step is {100 * off:+.1f} % off"
            )  # fmt: skip
        stage.require_on_card("noise", judged > 0, "two equal measurements differ too much in every case")
        sustained(stage, spec, me, batch=batch, least=0.2 if stage.tiny else 20.0)


def timed(spec: JobSpec, me: Ranks, *, batch: int, least: float) -> dict[str, float]:
    """Return one case's figures, in milliseconds a step."""
    fixed = Fixed.of(spec, me, batch=batch)
    fixed.warm_up(10)
    each = [fixed.step() for _ in range(10)]
    clock = fixed.trainer.clock
    median = statistics.median(clock.measure_seconds(step.start, step.end) for step in each)
    count = max(10, round(least / median))
    events, wall = between(fixed, count)
    each = [fixed.step() for _ in range(count)]  # as a probe takes them: each between marks of its own
    probe = statistics.median(clock.measure_seconds(step.start, step.end) for step in each)
    again, _ = between(fixed, count)
    plain = (events + again) / 2
    with_spy = spied(spec, me, batch=batch, count=count)
    del fixed
    gc.collect()
    return {
        "probe_ms": round(1000 * probe, 4),
        "events_ms": round(1000 * plain, 4),
        "wall_ms": round(1000 * wall, 4),
        "control": round(again / events, 4),  # the noise of all these
        "spy_ratio": round(with_spy / plain, 4),
        "steps": count,
    }


def between(fixed: Fixed, count: int) -> tuple[float, float]:
    """Return the seconds of a step between two events, and by the wall; the host waits once."""
    clock = fixed.trainer.clock
    clock.wait()
    began, start = time.perf_counter(), clock.mark()
    for _ in range(count):
        fixed.step()
    seconds = clock.measure_seconds(start, clock.mark())
    return seconds / count, (time.perf_counter() - began) / count


def spied(spec: JobSpec, me: Ranks, *, batch: int, count: int) -> float:
    """Return the seconds of a step in which a probe looks at the norms of gradients, which is not one that it times."""
    fixed = Fixed.of(spec, me, batch=batch)
    spy = GradientNormRecorder.attach(fixed.trainer)
    fixed.warm_up(5)
    clock = fixed.trainer.clock
    clock.wait()
    start = clock.mark()
    for _ in spy.watch((fixed.step() for _ in range(count)), fixed.trainer.scaler):
        pass
    seconds = clock.measure_seconds(start, clock.mark()) / count
    del fixed, spy
    gc.collect()
    return seconds


def sustained(stage: Stage, spec: JobSpec, me: Ranks, *, batch: int, least: float) -> None:
    """Hold the steps after a while of load against those after two seconds of it: clocks fall when power or heat bind."""
    fixed = Fixed.of(spec, me, batch=batch)
    fixed.warm_up()
    value, _ = between(fixed, 5)
    count = max(3, round(least / 10 / value))
    before = card()
    parts = [between(fixed, count)[0] for _ in range(10)]
    after = card()
    ratio = parts[-1] / parts[1]
    stage.tell(
        sustained_ratio=share(ratio),
        sustained_ms=[round(1000 * part, 3) for part in parts],
        sm_mhz=[number(report.get("clocks.sm")) for report in (before, after)],
        watts=[number(message.get("power.draw")) for message in (before, after)],
    )
    stage.require_on_card(
        "sustained_ratio", abs(ratio - 1) <= 0.03, f"after {least:g} s of load a step takes x{ratio:.3f}"
    )
    del fixed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def number(text: str | None) -> float | None:
    """Return a figure of the driver's tool; None where it tells none."""
    with contextlib.suppress(TypeError, ValueError):
        return float(text)  # type: ignore[arg-type]
    return None
