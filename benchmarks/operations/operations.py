"""Count operations of a training step, and waits of the host for the device, by training method; no GPU is needed.

    python benchmarks/operations/operations.py [--models resnet18,resnet50] [--precisions fp32,bf16,fp16]
                                              [--cases ags --cases "lars, clip"] [--batch 8] [--image 64] [--json]

One process on the CPU runs steps of tula's training loop, for every method of the table (`spec/methods.py`) and its variants.
Optimizers run the code for GPUs, which reads no value on the host. One step is counted that is neither the first one nor (except
for methods that refresh in each step) refreshes factors.

`operations` are calls of torch's dispatcher without views and allocations, approximately the kernels of a GPU. `kernels` counts a
foreach operation once per tensor if CUDA cannot process all tensors at once, because their lists differ in dtype, shape or strides.
Both are shown relative to the plain large batch (lbt) in the same precision; cases with AdamW relative to lbt with AdamW. `waits`
are values that the host reads from the device: item(), tolist(), a branch, a copy to the host, an index that depends on values. With
fp16 there is one, GradScaler's, except for optimizers whose kernels take the loss scale. Waits that only occur with a device
(torch.cuda.synchronize, memory that is not pinned) are not counted.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from tula_cli.errors import TulaError
from tula_cli.optim import gradient_stats, orthogonal
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS
from tula_cli.spec.resources import Cluster
from tula_cli.worker import ranks as worker_ranks
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.loop import Trainer

PLAIN_METHOD = "lbt"
PRECISIONS = ("fp32", "bf16", "fp16")
CLIP, UPDATE, TENSOR, ROBUST, ADAMW = "clip", "update", "tensor", "robust", "adamw"
VARIANTS: dict[str, dict[str, Any]] = {
    CLIP: {"train": {"max_grad_norm": 1.0}},
    UPDATE: {"ags": {"apply_to": "update"}},
    TENSOR: {"ags": {"granularity": "tensor"}},
    ROBUST: {"ags": {"preset": "robust"}},
    ADAMW: {},
}
NEVER_REFRESH_STEPS = 10**9
MAX_OVERFLOWING_STEPS = 40  # maximum number of steps; the loss scale halves in each
CLASSES = 10

WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount", "unique_dim"} | {
    "_unique", "_unique2", "unique_consecutive", "linalg_eigh", "_linalg_eigh", "_linalg_check_errors"
}  # fmt: skip
"""Operations for which the host must read a number or a size from the GPU."""
INDEXING_OPERATIONS = {"index", "index_put", "index_put_"}
MASK_DTYPES = (torch.bool, torch.uint8)
READING_METHODS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
}
"""Methods of a tensor that do so; some of them read CPU memory without an operation."""
HOST_CONSTRUCTORS = {"tensor", "as_tensor"}
FREE_FUNCTIONS = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias", "resize_",
    "set_", "lift_fresh", "is_same_size",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
"""Functions that start no work on a GPU; views are recognised by their schema."""


@dataclass
class OperationCounts:
    """The operations and waits of a section of code."""

    operations: Counter[str] = field(default_factory=Counter)
    kernels: int = 0
    waits: Counter[str] = field(default_factory=Counter)  # by function and location


class _Operations(TorchDispatchMode):
    def __init__(self, seen: OperationCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE_FUNCTIONS:
            self.seen.operations[name] += 1
            self.seen.kernels += count_kernels(name, args)
        if name in WAITING_OPERATIONS or _depends_on_mask(name, args):
            self.seen.waits[f"{name} {_find_code_location()}"] += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Detects reads of CPU memory that are no operations."""

    def __init__(self, seen: OperationCounts) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, before = kwargs or {}, self.seen.waits.total()
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if _reads_host_memory(name, args, kwargs) and self.seen.waits.total() == before:
            self.seen.waits[f"{name} {_find_code_location()}"] += 1
        return result


def _depends_on_mask(name: str, args: Sequence[Any]) -> bool:
    """Return whether the size of an operation's result depends on a mask; filling by a mask does not."""
    if name not in INDEXING_OPERATIONS or not any(isinstance(i, Tensor) and i.dtype in MASK_DTYPES for i in args[1]):
        return False
    return len(args) < 3 or args[2].numel() != 1


def _reads_host_memory(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name in READING_METHODS:
        return True
    if name == "to":  # "cpu" as a string: the device of the training is a torch.device
        return "cpu" in [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    return name in HOST_CONSTRUCTORS and kwargs.get("device") is not None


def count_kernels(name: str, args: Sequence[Any]) -> int:
    """Return the kernels that CUDA starts for an operation: one, or one per tensor if a foreach operation cannot combine them."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and all(isinstance(t, Tensor) for t in arg)]
    if not name.startswith("_foreach_") or not lists:
        return 1
    kinds = {(t.dtype, t.device) for tensors in lists for t in tensors}
    in_pairs = all(len({(t.shape, t.stride()) for t in pair}) == 1 for pair in zip(*lists, strict=True))
    single = [arg for arg in args if isinstance(arg, Tensor)]
    fits = all(t.dtype is lists[0][0].dtype for t in single)
    return 1 if len(kinds) == 1 and in_pairs and fits else len(lists[0])


def _find_code_location() -> str:
    """Return the code location that makes the host wait."""
    between = ("operations/operations.py", "/torch/_", "/torch/overrides.py")
    frame = [f for f in traceback.extract_stack() if not any(part in f.filename for part in between)][-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


@contextmanager
def count_operations() -> Iterator[OperationCounts]:
    """Count the operations and waits of the enclosed code."""
    seen = OperationCounts()
    with _Operations(seen), _Calls(seen):
        yield seen


@contextmanager
def simulate_gpu() -> Iterator[None]:
    """Make optimizers run the code for GPUs."""
    # a CPU multiplies bfloat16 slowly, but the number of operations is the same
    with (
        mock.patch.object(gradient_stats, "is_on_accelerator", lambda _: True),
        mock.patch.object(orthogonal, "GPU_DTYPE", torch.float32),
    ):
        yield


# --- the steps


def list_cases() -> list[str]:
    """Return all methods of the table, each also with clipping and with the variants of section ags."""
    results = []
    for name, method in METHODS.items():
        more = (
            [CLIP]
            + [UPDATE] * method.scales_gradients
            + [TENSOR, ROBUST] * (method.scales_gradients and method.refreshes)
        )
        more += [ADAMW] * (method.orthogonalises or name == PLAIN_METHOD)
        results += [name, *(f"{name}, {variant}" for variant in more)]
    return results


def make_sections(case: str, *, precision: str, reference_batch: int) -> dict[str, Any]:
    """Return the sections of a case: the method, with a suitable optimizer."""
    method, _, variant = case.partition(", ")
    sgd = variant != ADAMW and "SGD" in (METHODS[method].replaced_optimizers or ("SGD",))
    # fused as on a GPU; other implementations read the step number on the CPU, but nothing on a GPU
    fused = {"args": {"fused": True}} if variant == ADAMW else {}
    adam = {"name": "AdamW", "lr": 1e-3, "momentum": None, "weight_decay": 5e-4, **fused}
    train = {"method": method, "precision": precision, "reference_batch": reference_batch}
    return {
        "optimizer": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4} if sgd else adam,
        "train": train | VARIANTS.get(variant, {}).get("train", {}),
        "ags": VARIANTS.get(variant, {}).get("ags", {}),
    }


def make_job(case: str, model: str, *, precision: str, batch: int, image: int) -> JobSpec:
    """Return the job of a case on random images.

    Raises:
        SpecError: the case is invalid.
    """
    value = make_sections(case, precision=precision, reference_batch=batch // 2)
    images = {"size": 4 * batch, "image_size": [3, image, image], "num_classes": CLASSES}
    return JobSpec.model_validate(
        {
            **value,
            "model": {"name": model},
            "dataset": {"name": "FakeData", "args": images},
            "train": {"epochs": 50, "workers": 0, **value["train"]},
            "search": {"nodes": [1], "min_batch": 1},
            "cluster": {"device": "cpu"},
        }
    )


def make_step(spec: JobSpec, me: Ranks, *, batch: int) -> Callable[[], object]:
    """Return a function that runs one step of a job after its first ones, on the same samples each time.

    Raises:
        TulaError: the job cannot be built.
    """
    task = ProbeTask(id="t", job="t", spec=spec, workdir=".", nodes=1, local_batches=(batch,))
    data = build_datasets(spec)
    trainer = worker_train_loop.build_trainer(task, me, data, batch=batch, workers=0, refresh=False)
    pair = default_collate(data.train.list_first_samples(trainer.micro_batch))
    trainer.parallel.train()

    def step() -> object:
        return worker_train_loop._train_step(trainer, itertools.repeat(pair), epoch_ends=False)

    if trainer.ags:
        trainer.ags.start_epoch(NEVER_REFRESH_STEPS)
        trainer.ags.request_refresh()  # computes the factors
    step()
    run_representative_step(trainer, step)
    return step


def run_representative_step(trainer: Trainer, step: Callable[[], object]) -> None:
    """Run a representative step; the first step of fp16 may overflow, which skips the update and the factors."""
    ags = trainer.ags
    for _ in range(MAX_OVERFLOWING_STEPS):
        scale, ready = trainer.scaler.get_scale(), ags is None or ags.identity or ags.factors.has_factors
        step()
        if ready and trainer.scaler.get_scale() >= scale:
            return


def count_step(spec: JobSpec, me: Ranks, *, batch: int) -> OperationCounts:
    """Count one step of a job, with the code for GPUs.

    Raises:
        TulaError: the job cannot be built.
    """
    with simulate_gpu():
        step = make_step(spec, me, batch=batch)
        with count_operations() as seen:
            step()
    return seen


@dataclass(frozen=True)
class Row:
    """One step of one case."""

    model: str
    precision: str
    case: str
    operations: int
    ratio: float  # of operations, relative to the plain large batch
    kernels: int
    kernel_ratio: float
    waits: dict[str, int]  # function and location -> count


def measure_rows(options: argparse.Namespace, me: Ranks) -> Iterator[Row]:
    """Yield the requested cases, by model and precision."""
    for model, precision in itertools.product(options.models, options.precisions):
        how = {"precision": precision, "batch": options.batch, "image": options.image}
        plain_of: dict[str, OperationCounts] = {}
        for case in options.cases:
            plain_case = f"{PLAIN_METHOD}, {ADAMW}" if case.endswith(ADAMW) else PLAIN_METHOD
            if plain_case not in plain_of:
                plain_of[plain_case] = count_step(make_job(plain_case, model, **how), me, batch=options.batch)
            plain = plain_of[plain_case]
            seen = plain if case == plain_case else count_step(make_job(case, model, **how), me, batch=options.batch)
            operations, kernels = seen.operations.total(), seen.kernels
            yield Row(
                model=model,
                precision=precision,
                case=case,
                operations=operations,
                ratio=operations / plain.operations.total(),
                kernels=kernels,
                kernel_ratio=kernels / plain.kernels,
                waits=dict(seen.waits),
            )


# --- the command


def format_row(row: Row) -> str:
    """Format a row as text."""
    waits = "; ".join(f"{n} x {what}" for what, n in row.waits.items())
    return (
        f"{row.model:12}{row.precision:6}{row.case:24}{row.operations:11}{row.ratio:7.2f}"
        f"{row.kernels:9}{row.kernel_ratio:7.2f}{sum(row.waits.values()):7}  {waits}".rstrip()
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,resnet50", type=lambda text: text.split(","))
    parser.add_argument("--precisions", default=["fp32"], type=lambda text: text.split(","))
    parser.add_argument("--cases", action="append", help="one of them; may be given again. By default all")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=64, help="side of the images")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.cases = options.cases or list_cases()
    for name, given, known in (("cases", options.cases, list_cases()), ("precisions", options.precisions, PRECISIONS)):
        if unknown := [value for value in given if value not in known]:
            parser.error(f"--{name}: {', '.join(unknown)}; known are {'; '.join(known)}")
    if options.batch < 4 or options.batch % 2:
        parser.error(f"--batch must be even and at least 4 (half of it is the reference batch), not {options.batch}")
    return options


def main() -> None:
    options = parse_arguments()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        worker_ranks.join_process_group(Cluster(device="cpu"), rendezvous_file=Path(folder) / "handover") as me,
    ):
        if not options.json:
            print(f"{'':42}{'operations':>11}{'':7}{'kernels':>9}{'':7}{'waits':>7}")
        for row in measure_rows(options, me):
            results.append(row)
            if not options.json:
                print(format_row(row), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in results]))


if __name__ == "__main__":
    try:
        main()
    except TulaError as error:
        sys.exit(f"{error}")
