"""What gradient scaling and the other methods add to a step."""

import gc
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ags_overhead import CLIP, FURTHER, KNOWN, MODELS, ORTHO, PLAIN, Bench, fits, largest_batch, outcome

from gpu.rig import alone
from gpu.stage import Stage, share
from tula_cli.worker.ranks import Ranks

MOST = 48 * 2**30
"""Bytes of the card that the largest batch may take."""
LIMITS = {"element": 1.01, "tensor": 1.005}
"""How much a step at the largest batch may take, times the plain one."""
ROUNDS, SECONDS = 15, 8.0  # of a case
AT_LARGEST = ("element", "tensor", CLIP)
ALL = ("unscaled", "element", "tensor", "static", "robust", CLIP, ORTHO)
Case = tuple[str, str, int | None, Sequence[str]]  # model, precision, local batch (None: the largest), variants


def cases(*, tiny: bool) -> list[Case]:
    """Return the cases, those that are judged first."""
    if tiny:
        return [("resnet18_cifar", "fp32", 4, ("element", CLIP, ORTHO))]
    models, precisions = ("resnet50", "mobilenet_v3_large"), ("bf16", "fp32")
    result: list[Case] = [(model, kind, None, AT_LARGEST) for kind, model in itertools.product(precisions, models)]
    result += [("resnet18_cifar", kind, 128, ALL) for kind in precisions]
    result += [
        (model, kind, batch, ALL if batch == 32 else AT_LARGEST)
        for batch, kind, model in itertools.product((32, 256), precisions, models)
    ]
    return result


def overhead(stage: Stage) -> None:
    """Time each variant side by side with the plain step, and count its operations."""
    assert set(ALL) <= set(KNOWN)
    with alone(stage.device) as me:
        for case in cases(tiny=stage.tiny):
            try:
                measured(stage, me, case)
            except RuntimeError as error:  # of torch; the other cases go on
                stage.require(False, f"{case[:3]}: {str(error).strip().splitlines()[0][:300]}")
        if stage.tiny:
            stage.leave_open("overhead (needs a GPU)")


def measured(stage: Stage, me: Ranks, case: Case) -> None:
    """Measure one case."""
    model, precision, batch, names = case
    image, classes = (MODELS | FURTHER)[model]
    if batch is None:
        tried = fits(model, image, classes, me, names=("element",), most=MOST, precision=precision)
        batch = largest_batch(tried, start=32)
    key = f"{model},{precision},{batch}"
    if not batch:
        return stage.require(False, f"{key}: not even batch 32 fits")
    bench = Bench(
        model, image=image, classes=classes, batch=batch, me=me, names=names, precision=precision
    )  # fmt: skip
    bench.warm_up()
    rounds, seconds = (3, 0.0) if stage.tiny else (ROUNDS, SECONDS)
    result = outcome(bench, bench.rounds(rounds, seconds=seconds), model=model, image=image, memory=[])
    plain = bench.operations(PLAIN)
    message: dict[str, Any] = {
        row.variant: {
            **{name: share(value) for name, value in asdict(row).items() if name != "variant"},
            "ops": share(bench.operations(row.variant) / plain, 3),
        }
        for row in result.rows
    }
    refresh_share = {item.variant: share(item.share, 5) for item in result.refreshes}
    stage.tell(overhead={key: {"rows": message, "refresh_share": refresh_share, "control": share(result.control),
                               "step_ms": share(result.step_milliseconds, 3), "rounds": result.rounds}})  # fmt: skip
    if case[2] is None:
        for row in result.rows:
            limit = LIMITS.get(row.variant, float("inf"))
            stage.require_on_card(
                "overhead", row.ratio <= limit, f"{key}: {row.variant} takes x{row.ratio:.4f}, at most x{limit:g}"
            )
    del bench
    gc.collect()
    if stage.on_card:
        import torch

        torch.cuda.empty_cache()
    return None
