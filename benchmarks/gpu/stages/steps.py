"""Steps: whether the host waits for the device, and whether probes measure the step time correctly."""

import contextlib
import gc
import itertools
import statistics
import time

import operations
import torch

from gpu.rig import ConstantBatchTrainer, join_alone, make_job
from gpu.stage import Stage, round_result
from gpu.stages.machine import read_gpu_state
from gpu.waits import count_waits
from tula_cli.errors import TulaError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.measure.probe import GradientNormRecorder
from tula_cli.worker.ranks import Ranks

COUNTED_STEPS = 5  # steps
MAX_NOISE = 0.01
"""Maximum difference of two equal measurements for a third to be judged. Steps of a few milliseconds, which are limited by the host,
differ by 3 to 11 % on an H100 with 16 virtual cores.
"""


def syncs(stage: Stage) -> None:
    """Count the host's waits in a step of all methods and variants, at all precisions."""
    model, image, batch = ("small_cnn", 8, 16) if stage.tiny else ("resnet18_cifar", 32, 64)
    precisions = ("fp16",) if stage.tiny else operations.PRECISIONS
    left_out = []
    with join_alone(stage.device) as me, operations.simulate_gpu():
        for case, precision in itertools.product(operations.list_cases(), precisions):
            key = f"{case},{precision}"
            try:
                value = operations.make_sections(case, precision=precision, reference_batch=batch // 4)
                spec = make_job(model, image=image, batch=batch, device=stage.device, **value)
                result = count_waits_per_step(spec, me, batch=batch)
            except (
                TulaError,
                ImportError,
                RuntimeError,
            ) as error:  # RuntimeError: of torch; continue with the other cases
                left_out.append(f"{key}: {str(error)[:300]}")
                continue
            total = sum(result.values())
            stage.tell(syncs={key: {"count": total, "where": result}})
            most = 1 if precision == "fp16" else 0  # by GradScaler
            stage.require_on_card("syncs", total <= most, f"{key}: {total:g} waits a step, at {', '.join(result)}")
    stage.require(not left_out, f"not measured: {'; '.join(left_out)}")


def count_waits_per_step(spec: JobSpec, me: Ranks, *, batch: int) -> dict[str, float]:
    """Return the mean number of waits per step by code location."""
    fixed = ConstantBatchTrainer.of(spec, me, batch=batch)
    fixed.warm_up(4)
    with count_waits(me.device.type) as result:
        for _ in range(COUNTED_STEPS):
            fixed.step()
    fixed.trainer.clock.wait_for_device()
    del fixed
    gc.collect()
    return {where: count / COUNTED_STEPS for where, count in result.items()}


def timing(stage: Stage) -> None:
    """Compare the step times of a probe with many steps between two events, and with wall time."""
    sizes = [("small_cnn", 8, 8)] if stage.tiny else [("resnet18_cifar", 32, 128), ("resnet50", 224, 64)]
    sizes += [] if stage.tiny else [("resnet50", 224, 256)]
    judged = 0
    with join_alone(stage.device) as me:
        for (model, image, batch), precision in itertools.product(sizes, ("fp32",) if stage.tiny else ("fp32", "bf16")):
            key = f"{model},{batch},{precision}"
            spec = make_job(model, image=image, batch=batch, device=stage.device, precision=precision)
            answer = measure_case(spec, me, batch=batch, least=0.1 if stage.tiny else 2.0)
            stage.tell(timing={key: answer})
            if abs(answer["control"] - 1) > MAX_NOISE:
                continue
            judged += 1
            off = answer["probe_ms"] / answer["events_ms"] - 1
            stage.require_on_card(
                "probe_ms", abs(off) <= 0.02, f"{key}: a probe's step is {100 * off:+.1f} % off"
            )  # fmt: skip
        stage.require_on_card("noise", judged > 0, "two equal measurements differ too much in every case")
        check_sustained_load(stage, spec, me, batch=batch, least=0.2 if stage.tiny else 20.0)


def measure_case(spec: JobSpec, me: Ranks, *, batch: int, least: float) -> dict[str, float]:
    """Return the results of one case, in milliseconds per step."""
    fixed = ConstantBatchTrainer.of(spec, me, batch=batch)
    fixed.warm_up(10)
    each = [fixed.step() for _ in range(10)]
    clock = fixed.trainer.clock
    median = statistics.median(clock.measure_seconds(step.start, step.end) for step in each)
    count = max(10, round(least / median))
    events, wall = measure_between_events(fixed, count)
    each = [fixed.step() for _ in range(count)]  # as in a probe: each between its own events
    probe = statistics.median(clock.measure_seconds(step.start, step.end) for step in each)
    again, _ = measure_between_events(fixed, count)
    plain = (events + again) / 2
    with_spy = measure_with_gradient_norms(spec, me, batch=batch, count=count)
    del fixed
    gc.collect()
    return {
        "probe_ms": round(1000 * probe, 4),
        "events_ms": round(1000 * plain, 4),
        "wall_ms": round(1000 * wall, 4),
        "control": round(again / events, 4),  # the noise of these values
        "spy_ratio": round(with_spy / plain, 4),
        "steps": count,
    }


def measure_between_events(fixed: ConstantBatchTrainer, count: int) -> tuple[float, float]:
    """Return the seconds per step between two events and by wall time; the host waits once."""
    clock = fixed.trainer.clock
    clock.wait_for_device()
    began, start = time.perf_counter(), clock.mark()
    for _ in range(count):
        fixed.step()
    seconds = clock.measure_seconds(start, clock.mark())
    return seconds / count, (time.perf_counter() - began) / count


def measure_with_gradient_norms(spec: JobSpec, me: Ranks, *, batch: int, count: int) -> float:
    """Return the seconds of a step in which a probe records gradient norms; probes do not time such steps."""
    fixed = ConstantBatchTrainer.of(spec, me, batch=batch)
    spy = GradientNormRecorder.attach(fixed.trainer)
    fixed.warm_up(5)
    clock = fixed.trainer.clock
    clock.wait_for_device()
    start = clock.mark()
    for _ in spy.watch_steps((fixed.step() for _ in range(count)), fixed.trainer.scaler):
        pass
    seconds = clock.measure_seconds(start, clock.mark()) / count
    del fixed, spy
    gc.collect()
    return seconds


def check_sustained_load(stage: Stage, spec: JobSpec, me: Ranks, *, batch: int, least: float) -> None:
    """Compare steps under sustained load with those after two seconds of load: power or temperature limits reduce the clock."""
    fixed = ConstantBatchTrainer.of(spec, me, batch=batch)
    fixed.warm_up()
    value, _ = measure_between_events(fixed, 5)
    count = max(3, round(least / 10 / value))
    before = read_gpu_state()
    parts = [measure_between_events(fixed, count)[0] for _ in range(10)]
    after = read_gpu_state()
    ratio = parts[-1] / parts[1]
    stage.tell(
        sustained_ratio=round_result(ratio),
        sustained_ms=[round(1000 * part, 3) for part in parts],
        sm_mhz=[parse_number(report.get("clocks.sm")) for report in (before, after)],
        watts=[parse_number(message.get("power.draw")) for message in (before, after)],
    )
    stage.require_on_card(
        "sustained_ratio", abs(ratio - 1) <= 0.03, f"after {least:g} s of load a step takes x{ratio:.3f}"
    )
    del fixed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse_number(text: str | None) -> float | None:
    """Parse a number of the driver's tool; return None if there is none."""
    with contextlib.suppress(TypeError, ValueError):
        return float(text)  # type: ignore[arg-type]
    return None
