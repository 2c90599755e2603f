"""Errors of predicted memory: of the estimate without a GPU, and of the model after one and two small probes.

    python benchmarks/memory/memory.py [--models resnet50,gpt2] [--precisions fp32,bf16] [--image 224] [--memory SIZE]
                                       [--heap] [--no-bisection] [--json] [--keep FILE]

For each model and precision (`gpt2` is a transformer with 6 layers of width 256 on blocks of 128 bytes): the values of `tula check
--memory`; two probes at small batches by tula's worker; the same worker at larger batches for the actual peaks (with a GPU: steps on
constant tensors, because the data loader would take hours); and bisection for the largest batch that trains and evaluates, on the
CPU with a separate process per trial. `--keep` writes all results after each model and precision. On the CPU, freed memory returns
to the system immediately; with `--heap` glibc keeps it in the heap, as by default, and the heap counts. With a GPU the limit is its
memory (or --memory, if less); without one it is a limit of the process (RLIMIT_DATA), by default the estimate at --cap-batch, so
that models of all sizes reach the limit near that batch. An out-of-memory error counts as suffered if it occurs at the batch that
tula would choose after the probes.

The probes' step times without synchronisation also test the local part c(b) of the step-time model: fitted to the two smallest
batches, or to these and the largest, it predicts the others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = str(Path(__file__).resolve().parents[1])
if BENCHMARKS not in sys.path:
    sys.path.insert(1, BENCHMARKS)

from gpu.trials import RETURN_FREED_MEMORY, TrialFailed, Trials, find_largest_batch, is_out_of_memory  # noqa: E402

from tula_cli.cluster.inspection import inspect  # noqa: E402
from tula_cli.errors import BadMeasurements  # noqa: E402
from tula_cli.models import memory  # noqa: E402
from tula_cli.models.memory import MemoryModel  # noqa: E402
from tula_cli.models.time import step_time  # noqa: E402
from tula_cli.run.directory import RunDir  # noqa: E402
from tula_cli.run.files import write_file_atomically  # noqa: E402
from tula_cli.run.records.inspections import Inspection  # noqa: E402
from tula_cli.run.records.probes import Measured  # noqa: E402
from tula_cli.run.records.tasks import ProbeTask, make_probe_id  # noqa: E402
from tula_cli.spec.job import JobSpec  # noqa: E402
from tula_cli.spec.kinds import parse_size  # noqa: E402
from tula_cli.spec.sections import MEMORY_MARGIN  # noqa: E402

MODELS = ("resnet50", "vgg11", "alexnet", "mobilenet_v3_large", "gpt2")
TEXT_BYTES = 128  # bytes per sample of a transformer
IMAGE_COUNT = 2**18
"""Size of the dataset, which creates an image when it is loaded: larger than any batch."""
SHORT_SEARCH = {"min_seconds": 0, "max_seconds": 10}
"""Settings of section search: step times are only a by-product."""
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **RETURN_FREED_MEMORY}


@dataclass(frozen=True)
class Outcome:
    """One model at one precision, in bytes and samples; errors are relative to the measured peak."""

    model: str
    precision: str
    capacity: int
    estimate_seconds: float  # wall time of the whole inspection, including imports
    batches: tuple[int, ...]  # measured
    probes: tuple[int, ...]  # the batches used by the corrected model
    peaks: tuple[int, ...]
    estimated: tuple[int, ...]
    after_one: tuple[int, ...]  # with one probe, the smaller one
    corrected: tuple[int, ...]  # with both probes
    libraries: tuple[int, int]  # estimated, measured
    largest: int | None  # by bisection; None without
    largest_estimated: int | None
    largest_corrected: int | None
    suffered: bool | None  # whether the batch chosen after the probes, with its margin, did not fit
    compute_times: tuple[float, ...]  # seconds of a step without synchronisation, per batch
    compute_errors: dict[str, float | None]  # median over the batches without a probe, by number of probes

    @property
    def unseen(self) -> list[int]:
        return [index for index, batch in enumerate(self.batches) if batch not in self.probes]

    def error(self, predicted: Sequence[int]) -> float | None:
        """Return the median error over the batches without a probe."""
        off = [abs(predicted[index] / self.peaks[index] - 1) for index in self.unseen]
        return statistics.median(off) if off else None


def measure_model(model: str, precision: str, options: argparse.Namespace, *, device: str) -> Outcome:
    """Estimate, probe, measure and bisect one model."""
    began = time.perf_counter()
    job = make_job(model, precision, options, device=device)
    inspection = inspect(job)
    estimate_seconds = time.perf_counter() - began
    if not inspection.footprints:
        raise SystemExit(f"{model}: {inspection.estimate_error}")
    estimate = memory.fit_memory_model(inspection.footprints)
    capacity = choose_limit(estimate, inspection, options)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"memory_per_gpu": capacity})})
    small = [options.probe, 2 * options.probe]
    probes = measure(job, small, heap=options.heap)
    if len(probes) < 2:
        raise SystemExit(f"{model} {precision}: batch {small[len(probes)]} does not fit {capacity / 2**20:.0f} MiB")
    corrected, after_one = (memory.fit_memory_model([*some, *inspection.footprints]) for some in (probes, probes[:1]))
    largest_corrected = corrected.compute_largest_local_batch(capacity, margin=0.0)
    most = largest_corrected or 8 * small[-1]
    sizes = double_batches(small[-1], min(most, options.cap_batch) if options.no_bisection else most)
    chosen = corrected.compute_largest_local_batch(capacity, margin=MEMORY_MARGIN) or small[0]
    larger, true, suffered = measure_larger_batches(
        job, sizes, largest_corrected or small[-1], chosen, options, device=device
    )
    results = [*probes, *larger]
    return Outcome(
        model=model,
        precision=precision,
        capacity=capacity,
        estimate_seconds=estimate_seconds,
        batches=tuple(probe.local_batch for probe in results),
        probes=tuple(small),
        peaks=tuple(probe.memory.peak for probe in results),
        estimated=tuple(estimate.compute_peak(probe.local_batch) for probe in results),
        after_one=tuple(after_one.compute_peak(probe.local_batch) for probe in results),
        corrected=tuple(corrected.compute_peak(probe.local_batch) for probe in results),
        libraries=(estimate.libraries, results[0].memory.libraries or 0),
        largest=true,
        largest_estimated=estimate.compute_largest_local_batch(capacity, margin=0.0),
        largest_corrected=largest_corrected,
        suffered=suffered,
        compute_times=tuple(_read_compute_time(probe) for probe in results),
        compute_errors={"2": compute_error(results, [0, 1]), "3": compute_error(results, [0, 1, len(results) - 1])},
    )


def measure_larger_batches(
    job: JobSpec, sizes: Sequence[int], expected: int, chosen: int, options: argparse.Namespace, *, device: str
) -> tuple[list[Measured], int | None, bool | None]:
    """Return the probes at larger batches, the largest batch that fits, and whether the chosen batch does not fit."""
    if options.no_bisection and device != "cuda":
        return measure(job, sizes, heap=options.heap), None, None
    with Trials(job, capacity=job.cluster.memory_per_gpu) as trial:

        def fits(batch: int) -> bool:
            result = trial(batch).fits
            print_line(f"  batch {batch}: {'fits' if result else 'out of memory'}", options)
            return result

        if device == "cuda":
            larger = [item.measured() for item in map(trial, sizes) if item.fits]
        else:
            larger = measure(job, sizes, heap=options.heap)
        return larger, *(
            (None, None) if options.no_bisection else (find_largest_batch(fits, expected), not fits(chosen))
        )


def make_job(model: str, precision: str, options: argparse.Namespace, *, device: str) -> JobSpec:
    """Return the job: random images and SGD with momentum, or text and AdamW; one rank."""
    return JobSpec.model_validate(
        {
            "name": "memory",
            **(_make_transformer_sections() if model == "gpt2" else _make_vision_sections(model, options.image)),
            "train": {"epochs": 1, "method": options.method, "precision": precision, "workers": options.workers},
            "search": {"nodes": [1], "min_batch": 1, "min_steps": options.steps, **SHORT_SEARCH},
            "cluster": {"kind": "local", "device": device},
        }
    )


def _make_vision_sections(model: str, side: int) -> dict[str, Any]:
    return {
        "model": {"name": model},
        "dataset": {
            "name": "FakeData",
            "args": {"size": IMAGE_COUNT, "image_size": [3, side, side], "num_classes": 100},
        },
        "transforms": {"train": ["ToTensor"], "eval": ["ToTensor"]},
        "optimizer": {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4},
    }


def _make_transformer_sections() -> dict[str, Any]:
    args = {
        "model_type": "gpt2",
        "n_layer": 6,
        "n_embd": 256,
        "n_head": 8,
        "n_positions": TEXT_BYTES,
        "vocab_size": 256,
    }
    return {
        "model": {"name": "transformers:AutoModelForCausalLM", "args": args},
        "dataset": {"name": "python_source", "args": {"length": TEXT_BYTES, "size": 1_000_000}},
        "optimizer": {"name": "AdamW", "lr": 1e-4},
    }


def choose_limit(estimate: MemoryModel, inspection: Inspection, options: argparse.Namespace) -> int:
    """Return the memory limit: that of the GPU, or on the CPU the estimate of the cap batch."""
    stated = int(parse_size(options.memory)) if options.memory else None  # type: ignore[call-overload]
    if inspection.device == "cuda":
        assert inspection.capacity is not None
        return min(inspection.capacity, stated or inspection.capacity)
    # Without bisection, nothing may reach the limit.
    return stated or int(estimate.compute_peak(options.cap_batch * (8 if options.no_bisection else 1)))


def double_batches(above: int, largest: int) -> list[int]:
    """Return the doubled batches up to the largest, and one close to it."""
    sizes = []
    while (above := 2 * above) < 0.9 * largest:
        sizes.append(above)
    return [*sizes, int(0.9 * largest)] if int(0.9 * largest) > max(sizes, default=above // 2) else sizes


def measure(job: JobSpec, batches: Sequence[int], *, heap: bool) -> list[Measured]:
    """Run tula's worker on ascending batches, in one process as a probe job does; return the results of those that fit."""
    settings = {name: value for name, value in ENVIRONMENT.items() if not (heap and name in RETURN_FREED_MEMORY)}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder), job)
        task = ProbeTask(
            id="probe", job="probe", spec=job, workdir=folder, nodes=1, local_batches=tuple(batches)
        )  # fmt: skip
        run.write_task(task)
        command = [sys.executable, "-m", "tula_cli.worker", str(run.path), task.id, "1"]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        outcome = [run.read_result(make_probe_id(1, batch)) for batch in batches]
    results = [result for result in outcome if isinstance(result, Measured)]
    if not results and not is_out_of_memory(done.stderr, job.cluster.device):
        raise SystemExit(f"the worker failed:\n{done.stderr[-2000:]}")
    return results


def compute_error(result: Sequence[Measured], seen: Sequence[int]) -> float | None:
    """Return the median error of the local step time at the batches that were not fitted."""
    unseen = [probe for index, probe in enumerate(result) if index not in seen]
    if not unseen or len(set(seen)) < len(seen):
        return None
    probes = [
        step_time.Observation(1, 1, result[i].local_batch, result[i].step_times, _read_compute_time(result[i]))
        for i in seen
    ]
    try:
        fitted = step_time.fit_step_time(probes, collective="ring")
        off = [abs(fitted.predict(1, 1, p.local_batch).seconds / _median(p) - 1) for p in unseen]
    except BadMeasurements:
        return None
    return statistics.median(off)


def _read_compute_time(probe: Measured) -> float:
    assert probe.compute_time is not None  # tula's training loop measures it
    return probe.compute_time


def _median(probe: Measured) -> float:
    return statistics.median(probe.step_times)


def format_outcome(outcome: Outcome) -> Iterator[str]:
    """Yield the results of one model as text."""
    mib = 2**20
    yield f"{outcome.model} {outcome.precision}, {outcome.capacity / mib:.0f} MiB, estimated in {outcome.estimate_seconds:.1f} s"
    columns = outcome.batches, outcome.peaks, outcome.estimated, outcome.after_one, outcome.corrected
    for row in zip(*columns, strict=True):
        batch, peak, *predicted = row
        off = ", ".join(
            f"{name} {100 * (value / peak - 1):+.1f} %"
            for name, value in zip(("estimate", "after one", "after two"), predicted, strict=True)
        )
        yield f"  batch {batch:5d}: {peak / mib:8.0f} MiB, {off}{' (probe)' if batch in outcome.probes else ''}"
    yield f"  libraries: estimated {outcome.libraries[0] / mib:.0f}, measured {outcome.libraries[1] / mib:.0f} MiB"
    suffered = "" if outcome.suffered is None else f"; out of memory on the way: {'yes' if outcome.suffered else 'no'}"
    yield (
        f"  largest batch {outcome.largest or 'not looked for'}; estimated {outcome.largest_estimated}, after two probes"
        f" {outcome.largest_corrected}{suffered}"
    )
    for count, error in outcome.compute_errors.items():
        yield f"  step time from {count} batches: " + (
            "not judged" if error is None else f"{100 * error:.1f} % median error"
        )


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the results over all models: median errors, and shares of the actual largest batch."""

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def off(predicted: int | None, true: int | None) -> float | None:
        return abs(predicted / true - 1) if predicted is not None and true else None

    return {
        "error_estimate": median([outcome.error(outcome.estimated) for outcome in outcomes]),
        "error_after_one": median([outcome.error(outcome.after_one) for outcome in outcomes]),
        "error_corrected": median([outcome.error(outcome.corrected) for outcome in outcomes]),
        "largest_off_estimate": median([off(outcome.largest_estimated, outcome.largest) for outcome in outcomes]),
        "largest_off_corrected": median([off(outcome.largest_corrected, outcome.largest) for outcome in outcomes]),
        "out_of_memory": sum(outcome.suffered or False for outcome in outcomes),
        "compute_error_2": median([outcome.compute_errors["2"] for outcome in outcomes]),
        "compute_error_3": median([outcome.compute_errors["3"] for outcome in outcomes]),
    }


def print_line(text: str, options: argparse.Namespace) -> None:
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--image", type=int, help="side of the images; 224 on a GPU, 64 on the CPU")
    parser.add_argument("--probe", type=int, help="the smaller of the two probed batches; 16 on a GPU, 4 on the CPU")
    parser.add_argument("--cap-batch", type=int, default=48, help="on the CPU: the batch whose estimate is the limit")
    parser.add_argument("--memory", help="the limit, for example 16GiB")
    parser.add_argument("--method", default="lbt", choices=["ags", "lbt"])
    parser.add_argument("--steps", type=int, default=5, help="the fewest timed steps a probe")
    parser.add_argument("--workers", type=int, default=0, help="data-loader processes")
    parser.add_argument("--heap", action="store_true", help="on the CPU: leave the heap as glibc keeps it")
    parser.add_argument("--no-bisection", action="store_true", help="do not look for the largest batch that fits")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what there is after each model, as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    device = detect_device()
    options.image = options.image or (224 if device == "cuda" else 64)
    options.probe = options.probe or (16 if device == "cuda" else 4)
    limited = "its memory" if device == "cuda" else "a limit on the process (RLIMIT_DATA)"
    print_line(f"device: {device}, bounded by {limited}; images of {options.image} x {options.image}", options)
    outcomes = []
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            try:
                outcomes.append(measure_model(model, precision, options, device=device))
            except TrialFailed as error:
                raise SystemExit(f"{model} {precision}: a trial failed:\n{error}") from error
            if options.keep:
                write_file_atomically(options.keep, json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")
            for line in format_outcome(outcomes[-1]):
                print_line(line, options)
    result = summarise(outcomes)
    if options.json:
        print(json.dumps({"device": device, "summary": result, "models": [asdict(outcome) for outcome in outcomes]}))
        return
    for name, value in result.items():
        print(f"{name}: {'-' if value is None else f'{value:.4f}' if isinstance(value, float) else value}")


def detect_device() -> str:
    """Return "cuda" if torch finds a GPU; checked in another process, because this one starts many processes and needs no torch."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return "cuda" if "True" in completed.stdout else "cpu"


if __name__ == "__main__":
    main()
