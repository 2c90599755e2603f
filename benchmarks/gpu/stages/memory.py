"""Memory: the estimate without a GPU, the model after two small probes, and measured peaks; and the largest batch that fits."""

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gpu.product import run_tula, write_job
from gpu.rig import CARD_MODELS, SHORT_SEARCH, make_job
from gpu.stage import Stage, round_result
from gpu.trials import RESOLUTION, TrialFailed, Trials, find_largest_batch
from tula_cli.cluster.inspection import inspect
from tula_cli.models import memory as memory_model
from tula_cli.models.memory import MemoryModel
from tula_cli.run.files import write_file_atomically
from tula_cli.run.records.probes import Footprint
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN

GIB = 2**30
MAX_BYTES = 24 * GIB
Key = tuple[str, str]  # model, precision


def make_memory_job(key: Key, stage: Stage) -> JobSpec:
    model, precision = key
    image = 32 if stage.tiny else CARD_MODELS[model]
    return make_job(model, image=image, batch=64, device=stage.device, precision=precision)


def memory_limit(stage: Stage) -> int:
    """Return the memory limit in bytes for the batches: 24 GiB, or the memory of a smaller GPU."""
    if not stage.on_card:
        return MAX_BYTES
    import torch

    return min(MAX_BYTES, torch.cuda.get_device_properties(0).total_memory)


def list_models(stage: Stage) -> list[Key]:
    """Return the models with their precisions."""
    if stage.tiny:
        return [("small_cnn", "fp32")]
    return list(itertools.product(CARD_MODELS, ("fp32", "bf16")))


def write_estimates(folder: Path) -> None:
    """Write the estimates of all models without a GPU, so that a machine with a GPU need not compute them."""
    stage = Stage("cuda", tiny=False, folder=folder, data=None)
    answer = read_or_make_estimates(stage, list_models(stage), places=[folder / "footprints"])
    print(f"{len(answer)} estimates in {folder / 'footprints'}")


def read_or_make_estimates(
    stage: Stage, wanted: Sequence[Key], *, places: Sequence[Path]
) -> dict[Key, list[Footprint]]:
    """Return the estimates: stored ones from one of the folders; missing ones are computed and stored in the first folder.

    Raises:
        SystemExit: an estimate failed.
    """

    def made(key: Key) -> list[Footprint]:
        name = f"{'-'.join(key)}{'-tiny' if stage.tiny else ''}.json"
        for place in places:
            if (place / name).exists():
                return [Footprint.model_validate(row) for row in json.loads((place / name).read_text())]
        spec = make_memory_job(key, stage)
        if stage.device == "cuda":  # as for a cluster of GPUs; the estimate needs no GPU here
            spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"kind": "slurm"})})
        result = inspect(spec)
        if not result.footprints:
            raise SystemExit(f"{key[0]} {key[1]} cannot be estimated: {result.estimate_error}")
        rows = [row.model_dump(mode="json") for row in result.footprints]
        write_file_atomically(places[0] / name, json.dumps(rows))
        return list(result.footprints)

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        return dict(zip(wanted, pool.map(made, wanted), strict=True))


def list_estimate_folders(stage: Stage) -> list[Path]:
    """Return the folders with stored estimates: other stages of this call store theirs in sibling folders."""
    prepared = [stage.data / "footprints"] if stage.data else []
    return [stage.folder.parent / "footprints", *prepared]


def memory(stage: Stage) -> None:
    """Compare the estimate and the corrected model with measured peaks, from 16 samples up to 24 GiB."""
    wanted = list_models(stage)
    known = read_or_make_estimates(stage, wanted, places=list_estimate_folders(stage))
    off: dict[str, list[float]] = {"estimate": [], "corrected": []}
    with Trials(make_memory_job(wanted[0], stage)) as trial:
        for key in wanted:
            with record_error(stage, key):
                judge_model(stage, key, known[key], trial.of(make_memory_job(key, stage)), off)
    for name, limit in (("corrected", 0.03), ("estimate", 0.08)):
        median = statistics.median(off[name]) if off[name] else None
        stage.tell(**{f"error_{name}": round_result(median)})
        stage.require(median is not None, f"{name}: no batch beyond the probes was measured")
        stage.require_on_card(f"error_{name}", (median or 0.0) <= limit, f"{name}: median error {median or 0:.1%}")


@contextmanager
def record_error(stage: Stage, key: Key) -> Iterator[None]:
    """Record an error of one model that is not an out-of-memory error as a fault, and continue with the others."""
    try:
        yield
    except TrialFailed as error:
        stage.require(False, f"{','.join(key)}: {str(error).strip().splitlines()[-1][:300]}")


def judge_model(stage: Stage, key: Key, known: list[Footprint], trial: Trials, off: dict[str, list[float]]) -> None:
    """Measure one model at its batches; add the errors at batches that were not probed to `off`."""
    first = 16
    probes = [trial(first), trial(2 * first)]
    measured = [probe.measured() for probe in probes if probe.fits]
    models = {
        "estimate": memory_model.fit_memory_model(known),
        "corrected": memory_model.fit_memory_model([*measured, *known]),
    }
    batches = double_batches(
        2 * first, models["corrected"], round(0.9 * memory_limit(stage)), at_most=1 if stage.tiny else 16
    )
    rows = []
    for item in (*probes, *map(trial, batches)):
        if item.memory is None:
            stage.require(
                False, f"{key}: batch {item.batch} ran out of memory below {memory_limit(stage) / GIB:.0f} GiB"
            )
            continue
        row = {name: item.memory[name] for name in ("peak", "reserved", "libraries")} | {"batch": item.batch}
        for name, model in models.items():
            error = model.compute_peak(item.batch) / item.peak - 1
            row |= {name: model.compute_peak(item.batch), f"error_{name}": round_result(error)}
            off[name] += [] if item in probes else [abs(error)]
        rows.append(row)
    libraries = models["estimate"].libraries / max(1, rows[0]["libraries"]) if rows else 0.0
    stage.tell(memory={",".join(key): {"rows": rows, "libraries_ratio": round_result(libraries)}})
    stage.require_on_card(
        "libraries", abs(libraries - 1) <= 0.25, f"{key}: libraries estimated at x{libraries:.2f} of the truth"
    )


def double_batches(above: int, model: MemoryModel, most: int, *, at_most: int) -> Iterator[int]:
    """Yield doubled batches that are expected to need less than `most` bytes."""
    for power in range(1, at_most + 1):
        if model.compute_peak(above * 2**power) > most:
            return
        yield above * 2**power


def largest_of_all(stage: Stage) -> None:
    """Find the largest batch that trains in the memory of the whole GPU, for one model, and in 24 GiB, for all models."""
    wanted = list_models(stage)
    known = read_or_make_estimates(stage, wanted, places=list_estimate_folders(stage))
    with Trials(make_memory_job(wanted[0], stage)) as trial:
        if stage.on_card:
            import torch

            total = torch.cuda.get_device_properties(0).total_memory
            key = ("resnet50", "bf16")
            with record_error(stage, key):
                find_model_largest_batch(stage, key, known[key], trial.of(make_memory_job(key, stage)), total)
        for key in wanted:
            capacity = (
                memory_model.fit_memory_model(known[key]).compute_needed_memory(256) + 64 * 2**20
                if stage.tiny
                else memory_limit(stage)
            )
            with record_error(stage, key):
                find_model_largest_batch(
                    stage, key, known[key], trial.of(make_memory_job(key, stage), capacity=capacity), capacity
                )


def find_model_largest_batch(stage: Stage, key: Key, known: list[Footprint], trial: Trials, capacity: int) -> None:
    """Find the largest batch of one model under a memory limit, and compare the predictions with it."""
    first = 16
    probes = [item.measured() for item in (trial(first), trial(2 * first)) if item.fits]
    corrected = memory_model.fit_memory_model([*probes, *known])
    predicted = corrected.compute_largest_local_batch(capacity, margin=0.0) or first
    chosen = corrected.compute_largest_local_batch(capacity, margin=MEMORY_MARGIN) or first
    suffered = not trial(chosen).fits
    true = find_largest_batch(lambda batch: trial(batch).fits, predicted, resolution=1.0 if stage.tiny else RESOLUTION)
    estimated = memory_model.fit_memory_model(known).compute_largest_local_batch(capacity, margin=0.0) or 0
    figures = {"true": true, "estimated": estimated, "corrected": predicted, "margin_oom": int(suffered)}
    name = ",".join((*key, f"{capacity / GIB:.0f} GiB"))
    stage.tell(largest={name: figures})
    off = predicted / true - 1 if true else float("inf")
    stage.require_on_card("largest", abs(off) <= 0.05, f"{name}: largest batch {true}, predicted {predicted}")
    stage.require_on_card("margin_oom", not suffered, f"{name}: batch {chosen}, chosen with a margin, does not fit")


def profile_largest(stage: Stage) -> None:
    """Run `tula profile --largest` under a memory limit, and try its result and the batch above it."""
    model, image, capacity = ("small_cnn", 32, 400 * 2**20) if stage.tiny else ("resnet50", 224, 16 * GIB)
    for precision in ("fp32",) if stage.tiny else ("fp32", "bf16"):
        spec = make_job(model, image=image, batch=64, device=stage.device, precision=precision)
        content = spec.model_dump(mode="json", exclude_unset=True)
        content["dataset"]["args"]["size"] = 4096
        content["search"] |= {"min_batch": 16, "max_node_hours": 1, **SHORT_SEARCH}
        content["cluster"]["memory_per_gpu"] = capacity
        folder = stage.inside(precision)
        started = time.monotonic()
        words = ["profile", str(write_job(folder, content)), "--largest", "--yes"]
        ended = run_tula(*words, folder=folder)
        seconds = time.monotonic() - started
        answer = ended.answer.get("data") or {}
        stage.require(ended.code == 0, f"profile --largest, {precision}, ended with {ended.code}: {ended.error}")
        if ended.code:
            continue
        batch, too_large = answer["local_batch"], answer["too_large"]
        with Trials(spec, capacity=capacity) as trial:
            fits, above = trial(batch).fits, trial(round(1.1 * batch)).fits
        figures = {name: answer[name] for name in ("local_batch", "too_large", "headroom", "local_batch_with_margin")}
        trials = len(answer["measured"]) + len(answer["out_of_memory"])
        stage.tell(profile_largest={precision: {**figures, "trials": trials, "seconds": round_result(seconds, 1)}})
        stage.require(batch < too_large <= 1.03 * batch + 1, f"{precision}: {batch} fits, {too_large} does not")
        stage.require_on_card(
            "profile_largest", fits and not above, f"{precision}: alone, {batch} fits: {fits}, 10 % more: {above}"
        )
