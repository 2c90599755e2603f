"""Additional step time of gradient scaling and of the other methods."""

import gc
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ags_overhead import (
    ALL_VARIANTS,
    CLIP,
    FURTHER_MODELS,
    MODELS,
    ORTHO,
    PLAIN_VARIANT,
    Bench,
    find_largest_batch,
    make_trial,
    summarise_rounds,
)

from gpu.rig import join_alone
from gpu.stage import Stage, round_result
from tula_cli.worker.ranks import Ranks

MAX_BYTES = 48 * 2**30
"""Bytes of the GPU that the largest batch may use."""
MAX_RATIOS = {"element": 1.01, "tensor": 1.005}
"""Maximum step time at the largest batch relative to a plain step."""
ROUNDS, SECONDS = 15, 8.0  # per case
LARGEST_BATCH_VARIANTS = ("element", "tensor", CLIP)
TIMED_VARIANTS = ("unscaled", "element", "tensor", "static", "robust", CLIP, ORTHO)
Case = tuple[str, str, int | None, Sequence[str]]  # model, precision, local batch (None: the largest), variants


def list_cases(*, tiny: bool) -> list[Case]:
    """Return the cases; those with a limit are first."""
    if tiny:
        return [("resnet18_cifar", "fp32", 4, ("element", CLIP, ORTHO))]
    models, precisions = ("resnet50", "mobilenet_v3_large"), ("bf16", "fp32")
    result: list[Case] = [
        (model, kind, None, LARGEST_BATCH_VARIANTS) for kind, model in itertools.product(precisions, models)
    ]
    result += [("resnet18_cifar", kind, 128, TIMED_VARIANTS) for kind in precisions]
    result += [
        (model, kind, batch, TIMED_VARIANTS if batch == 32 else LARGEST_BATCH_VARIANTS)
        for batch, kind, model in itertools.product((32, 256), precisions, models)
    ]
    return result


def overhead(stage: Stage) -> None:
    """Time each variant side by side with the plain step, and count its operations."""
    assert set(TIMED_VARIANTS) <= set(ALL_VARIANTS)
    with join_alone(stage.device) as me:
        for case in list_cases(tiny=stage.tiny):
            try:
                measure_case(stage, me, case)
            except RuntimeError as error:  # of torch; continue with the other cases
                stage.require(False, f"{case[:3]}: {str(error).strip().splitlines()[0][:300]}")
        if stage.tiny:
            stage.leave_open("overhead (needs a GPU)")


def measure_case(stage: Stage, me: Ranks, case: Case) -> None:
    """Measure one case."""
    model, precision, batch, names = case
    image, classes = (MODELS | FURTHER_MODELS)[model]
    if batch is None:
        tried = make_trial(model, image, classes, me, names=("element",), most=MAX_BYTES, precision=precision)
        batch = find_largest_batch(tried, start=32)
    key = f"{model},{precision},{batch}"
    if not batch:
        return stage.require(False, f"{key}: not even batch 32 fits")
    bench = Bench(
        model, image=image, classes=classes, batch=batch, me=me, names=names, precision=precision
    )  # fmt: skip
    bench.warm_up()
    rounds, seconds = (3, 0.0) if stage.tiny else (ROUNDS, SECONDS)
    result = summarise_rounds(bench, bench.rounds(rounds, seconds=seconds), model=model, image=image, memory=[])
    plain = bench.operations(PLAIN_VARIANT)
    message: dict[str, Any] = {
        row.variant: {
            **{name: round_result(value) for name, value in asdict(row).items() if name != "variant"},
            "ops": round_result(bench.operations(row.variant) / plain, 3),
        }
        for row in result.rows
    }
    refresh_share = {item.variant: round_result(item.share, 5) for item in result.refreshes}
    stage.tell(overhead={key: {"rows": message, "refresh_share": refresh_share, "control": round_result(result.control),
                               "step_ms": round_result(result.step_milliseconds, 3), "rounds": result.rounds}})  # fmt: skip
    if case[2] is None:
        for row in result.rows:
            limit = MAX_RATIOS.get(row.variant, float("inf"))
            stage.require_on_card(
                "overhead", row.ratio <= limit, f"{key}: {row.variant} takes x{row.ratio:.4f}, at most x{limit:g}"
            )
    del bench
    gc.collect()
    if stage.on_card:
        import torch

        torch.cuda.empty_cache()
    return None
