"""The inspection of a job by building its model and dataset.

The JobSpec is read as JSON from stdin or a file; the answer goes to stdout. Its first line shows that the interpreter
has all packages it needs, the last one is a JSON object: a `records.Inspection`, or `{"error": {"class", "message",
"hint", "problems", "cause", "detail"}}`, where class is the tula error that the command line raises. Anything the user's code
prints goes to stderr.
"""

import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import JobFailed, Problem, SpecError, TulaError
from tula_cli.host.machine import read_machine_memory, read_processor_name
from tula_cli.models.self_tuning import find_most_expensive_job
from tula_cli.plugins import is_import_string
from tula_cli.run.records.inspections import Inspection
from tula_cli.run.records.probes import Footprint
from tula_cli.spec.job import JobSpec
from tula_cli.worker import messages
from tula_cli.worker.build import parameter_groups, zoo
from tula_cli.worker.build.batches import (
    IGNORED_LABEL,
    ModelCall,
    build_collate,
    describe_tree,
    find_scores,
    list_tensors,
    make_batch,
)
from tula_cli.worker.build.data import build_datasets, build_test_dataset, download_dataset, find_dataset_source
from tula_cli.worker.build.loaders import build_sampler
from tula_cli.worker.build.parameter_groups import make_parameter_groups
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.build.transforms import build_transforms
from tula_cli.worker.build.weights import check_weights_fit_model
from tula_cli.worker.device import (
    count_gpus,
    count_tensor_bytes,
    get_gpu_memory,
    get_gpu_name,
    make_autocast_context,
    read_process_memory,
)
from tula_cli.worker.measure.fake_tensor_step import (
    FakeStep,
    build_fake_step,
    describe_gathered_part,
    estimate_footprints,
)
from tula_cli.worker.measure.first_samples import describe_error, find_class_numbers, load_first_samples
from tula_cli.worker.methods.table import get_method
from tula_cli.worker.parallel.sharding import require_fsdp_support
from tula_cli.worker.train.evaluation import build_metrics, list_gathered_metrics
from tula_cli.worker.train.learning_rate import check_user_schedule

if __name__ == "__main__":
    gc.disable()  # collections find hardly anything and take a fifth of the import time


START_MARKER = "begun"


def inspect_job(spec: JobSpec) -> Inspection:
    """Build all parts of a job, and run a step of it on fake tensors.

    Raises:
        SpecError: the spec names something that cannot be built, or its parts do not fit together.
        JobFailed: the user's model or dataset fails.
    """
    job, spec = spec, find_most_expensive_job(spec)
    _check_names_of_spec(spec)
    device = _get_local_device(spec)
    download_dataset(spec)
    if spec.train.is_sharded and not _needs_gpu_memory_estimate(spec, device):
        require_fsdp_support(device)
    datasets = build_datasets(job)  # method auto refuses datasets that its arms would accept
    first_samples = load_first_samples(spec, datasets)
    warnings, notes = list(first_samples.warnings), []
    footprints, estimate_error = tuple[Footprint, ...](), ""
    try:
        fake_step = build_fake_step(
            spec,
            first_samples.item,
            classes=datasets.classes,
            gpu=_needs_gpu_memory_estimate(spec, device),
            collate=datasets.collate,
        )
        footprints = estimate_footprints(fake_step, largest=max(1, len(datasets.train)))
        model, call, optimizer, output = fake_step.model, fake_step.call, fake_step.optimizer, fake_step.make_output(2)
        warnings += _list_single_sample_problems(spec, fake_step)
        if _has_user_code_in_step(spec) or is_import_string(
            spec.dataset.name
        ):  # fake tensors have no values, and are checked less
            notes += _try_real_step(spec, datasets, device, model)
    except TulaError:
        raise
    # A model may read values of its tensors, which fake tensors do not have; then only a real step can check it.
    except Exception as error:  # noqa: BLE001
        estimate_error = describe_error(error)
        model, call, optimizer, output = _run_real_step(spec, datasets)
    warnings += _check_output(spec, find_scores(output), call.get_target(first_samples.batch), datasets.classes)
    if is_import_string(spec.dataset.name) and _is_class_target(call.get_target(first_samples.batch)):
        _check_output(spec, find_scores(output), find_class_numbers(datasets), datasets.classes)
    get_method(spec).check_optimizer(spec, model, optimizer)
    warnings += [*_warn_unused_entries(spec, call, first_samples.batch), *_warn_ineffective_methods(model)]
    return Inspection(
        dataset_size=len(datasets.train),
        eval_size=len(datasets.eval),
        classes=datasets.classes,
        sample_shape=first_samples.shape,
        sample="" if first_samples.shape else describe_tree(first_samples.item),
        sample_bytes=count_tensor_bytes(list_tensors(make_batch(datasets.collate, [first_samples.item]))),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        footprints=footprints,
        estimate_error=estimate_error,
        device=device,
        notes=(*_describe_initial_state(spec, model, optimizer), *notes, *_inspect_evaluation(spec, datasets)),
        warnings=tuple(warnings),
        hardware=get_gpu_name() if device == "cuda" else read_processor_name(),
        capacity=_get_memory_limit_per_rank(spec, device),
        cpus=len(os.sched_getaffinity(0)),
        gpus=count_gpus() if device == "cuda" else 0,
        process=read_process_memory("VmRSS"),
    )


def _describe_initial_state(spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Diagnostic]:
    """Describe the model's initial weights, its frozen parts, and parameter groups trained with other settings.

    Raises:
        SpecError: the file of weights does not fit the model.
    """
    section = spec.model
    if section.weights:
        fit = check_weights_fit_model(section, model)
        weights = str(section.weights)
        yield messages.initial_weights(weights=weights, tensors=len(fit.common), mismatch=fit.mismatch_text)
    if section.frozen:
        yield parameter_groups.describe_frozen_parameters(model, section.frozen)
    yield from parameter_groups.describe_parameter_groups(spec.optimizer, model)
    beta2 = zoo.describe_beta2(spec, optimizer)
    if beta2 is not None:
        yield beta2
    if spec.train.is_sharded:
        yield describe_gathered_part(model)


def _inspect_evaluation(spec: JobSpec, datasets: Datasets) -> list[Diagnostic]:
    """Build the test set; return notes on its size and on metrics that send batches between ranks.

    Raises:
        SpecError: the test set cannot be built, or its classes are not those that are trained.
    """
    notes = list_gathered_metrics(spec.train) if spec.max_ranks > 1 else []
    if spec.dataset.test is not None:
        notes.append(messages.size_of_test_set(samples=len(build_test_dataset(spec, datasets))))
    return notes


def _warn_unused_entries(spec: JobSpec, call: ModelCall, batch: Any) -> list[Diagnostic]:
    if call.whole:
        return []
    unused = [key for key, value in call.find_unused_entries(batch).items() if value is not call.get_target(batch)]
    return [messages.unused_batch_entries(entries=unused, model=spec.model.name)] if unused else []


def _warn_ineffective_methods(model: torch.nn.Module) -> list[Diagnostic]:
    is_lightning = all(callable(getattr(model, name, None)) for name in ("training_step", "configure_optimizers"))
    return [messages.lightning_methods_not_called()] if is_lightning else []


def _check_names_of_spec(spec: JobSpec) -> None:
    """Resolve every name before anything is built, so that all problems are reported together.

    Raises:
        SpecError: with one problem per section; if only one section fails, its error.
    """
    resolvers: dict[str, Callable[[], object]] = {
        "model.name": lambda: zoo.find_model_builder(spec.model.name),
        "dataset.name": lambda: find_dataset_source(spec.dataset.name),
        "dataset.collate_fn": lambda: build_collate(spec),
        "dataset.sampler": lambda: build_sampler(spec),
        "transforms.train": lambda: build_transforms(spec.transforms.train, path="transforms.train"),
        "transforms.eval": lambda: build_transforms(spec.transforms.eval, path="transforms.eval"),
        "loss": lambda: zoo.build_loss(spec),
        "train.method": lambda: get_method(spec),
        "train.metrics": lambda: build_metrics(spec.train),
        "schedule": lambda: check_user_schedule(spec),
        "optimizer": lambda: _check_optimizer(spec),
    }
    errors: dict[str, SpecError] = {}
    for path, resolve in resolvers.items():
        try:
            resolve()
        except SpecError as error:
            errors[path] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        problems = tuple(Problem(path, error.message, error.hint) for path, error in errors.items())
        raise SpecError(f"{len(errors)} parts of the job cannot be built", problems=problems)


def _check_optimizer(spec: JobSpec) -> None:
    optimizer = get_method(spec).build_base_optimizer(spec, [torch.nn.Parameter(torch.zeros(1))])
    zoo.compute_beta2_by_group(optimizer, spec, spec.train.reference_batch)


def _get_local_device(spec: JobSpec) -> str:
    """Return the device that the ranks of a local run use on this machine."""
    here = "cuda" if count_gpus() > 0 else "cpu"
    if spec.cluster.device == "cuda" and not spec.cluster.backend.may_have_gpu("cuda", here=here):
        raise SpecError(
            "cluster.device: cuda, but torch sees no GPU on this machine", "set cluster.device: cpu or auto"
        )
    return "cpu" if spec.cluster.device == "cpu" else here


def _needs_gpu_memory_estimate(spec: JobSpec, device: str) -> bool:
    """Return whether to estimate memory for a GPU: if there is one here, or may be one on the nodes of the jobs."""
    return device == "cuda" or spec.cluster.backend.may_have_gpu(spec.cluster.device, here=device)


def _get_memory_limit_per_rank(spec: JobSpec, device: str) -> int | None:
    """Return the bytes per rank: the spec's limit, else this machine's share; None if jobs run on other machines."""
    if spec.cluster.memory_per_gpu is not None:
        return spec.cluster.memory_per_gpu
    if spec.cluster.kind != "local":
        return None
    if device == "cuda":
        return get_gpu_memory()
    return read_machine_memory() // spec.max_ranks


MAX_PARAMETERS_TO_STEP = 30_000_000
"""Largest model of which a step is run on the CPU while a job is checked: it takes a second or two."""


_DATA_FAULT = re.compile(r"same dtype|Input type|target dtype|scalar type|[Ff]ound dtype|out of bounds")
"""Messages of torch, on every device, about samples whose type or value does not fit."""


def _try_real_step(spec: JobSpec, datasets: Datasets, device: str, model: nn.Module) -> list[Diagnostic]:
    """Run a real step on the CPU if the model is small; return notes on why it was not run or could not be.

    For a job that runs on GPUs, only faults of the data are raised: its code may need a GPU for other reasons.

    Raises:
        SpecError, JobFailed: as `_run_real_step`.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if spec.train.is_sharded or parameters > MAX_PARAMETERS_TO_STEP:
        why = "the model is sharded" if spec.train.is_sharded else f"the model has {parameters} parameters"
        return [messages.no_real_step(reason=why)]
    if not _needs_gpu_memory_estimate(spec, device):
        _run_real_step(spec, datasets)
        return []
    if spec.train.precision != "fp32":
        return [messages.no_real_step(reason=f"train.precision {spec.train.precision} is for GPUs")]
    try:
        _run_real_step(spec, datasets)
    except TulaError as error:
        if error.__cause__ is None or _DATA_FAULT.search(str(error.__cause__)):
            raise
        return [messages.no_real_step(reason=f"it fails on the CPU ({error.message})")]
    return []


def _run_real_step(spec: JobSpec, datasets: Datasets) -> tuple[nn.Module, ModelCall, torch.optim.Optimizer, Any]:
    """Run one optimizer step of two samples on the CPU.

    Raises:
        SpecError: a built-in model cannot process these samples.
        JobFailed: the user's model, loss or optimizer fails, or the loss is not finite.
    """
    items = datasets.train.list_first_samples(2)
    batch = make_batch(datasets.collate, items)
    model = zoo.build_model(spec, datasets.classes)
    call = zoo.make_model_call(spec, model, zoo.build_loss(spec))
    optimizer = get_method(spec).build_base_optimizer(spec, make_parameter_groups(spec.optimizer, model))
    stage = f"model {spec.model.name} cannot take {_describe_inputs(batch)}"
    try:
        with make_autocast_context(spec.train, torch.device("cpu")):
            output = call.compute_outputs(model, batch)
            stage = f"loss {spec.loss.name} cannot take the output of {spec.model.name}, {_describe_shape(output)}"
            if call.get_target(batch) is not None:
                stage += f", with the target {describe_tree(call.get_target(batch))}"
            value = call.compute_loss_from_outputs(output, batch)
        if not bool(torch.isfinite(value).all()):
            raise JobFailed(
                f"the loss of the first two samples is {value.item():g}, so training is not possible",
                "check the samples, the model and the loss for nan or inf",
            )
        stage = "the backward pass fails"
        value.backward()
        stage = f"optimizer {spec.optimizer.name} fails"
        optimizer.step()
    except TulaError:
        raise
    except Exception as error:
        kind = JobFailed if _has_user_code_in_step(spec) else SpecError
        raise kind(f"{stage}: {describe_error(error)}", _make_failure_hint(stage, error)) from error
    return model, call, optimizer, output


def _describe_inputs(batch: Any) -> str:
    pair = type(batch) in (tuple, list) and len(batch) == 2
    if pair and isinstance(batch[0], torch.Tensor) and batch[0].is_floating_point():
        dtype = "" if batch[0].dtype == torch.float32 else f", {str(batch[0].dtype).removeprefix('torch.')}"
        return f"inputs of shape {tuple(batch[0].shape[1:])}{dtype}"
    return f"the batch {describe_tree(batch)}"


def _has_user_code_in_step(spec: JobSpec) -> bool:
    return any(map(is_import_string, (spec.model.name, spec.loss.name, spec.optimizer.name)))


def _make_failure_hint(stage: str, error: Exception) -> str:
    if "out of bounds" in str(error) and stage.startswith("loss"):
        return (
            "class numbers are 0 to the model's outputs - 1: number the classes from 0, or give the model more outputs"
        )
    if re.search(r"dtype|Input type|scalar type", str(error)):
        return (
            "make the dataset return float32 (numpy creates float64, images are uint8), class numbers as int64, and targets of a"
            " regression as float32; or convert them in the model"
        )
    if stage.startswith("model"):
        if "the batch" in stage:
            return "tula passes the entries of a dictionary to forward by name; of a tuple, it passes all but the last (the target) in order"
        if not re.search(r"size|shape|channel|dimension|kernel", str(error)):
            return ""
        return "resize the images in transforms, or set model.args; image shapes are (channels, height, width)"
    if stage.startswith("loss"):
        if isinstance(error, TypeError):
            return "make the dataset return the target as a number or a tensor, or set loss.name to your own callable(outputs, target)"
        if "target" in str(error) or "size" in str(error):
            return "make the dataset return one class number per sample, without an extra dimension; for a regression, the shape of the output"
        return (
            "make the model return what the loss takes; for GoogLeNet and Inception, set model.args.aux_logits: false"
        )
    return ""


def _check_output(spec: JobSpec, output: Any, target: Any, classes: int | None) -> list[Diagnostic]:
    """Compare the model's output with the labels; return warnings.

    Raises:
        SpecError: there are fewer outputs than classes, or a label is negative.
    """
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or not _is_class_target(target):
        return []
    outputs, needed_outputs = output.shape[1], max(classes or 0, int(target.max()) + 1)
    if (least := int(target.min())) < 0 and least != IGNORED_LABEL:
        raise SpecError(
            f"dataset {spec.dataset.name} returns label {least}, but labels must be at least 0",
            "number the classes from 0 in the dataset",
        )
    if outputs < needed_outputs:
        raise SpecError(
            f"model {spec.model.name} has {outputs} outputs, but dataset {spec.dataset.name} has {needed_outputs} classes",
            f"set model.args.num_classes: {needed_outputs}",
        )
    if classes is not None and outputs > classes:
        names = {"model": spec.model.name, "dataset": spec.dataset.name}
        return [messages.more_outputs_than_classes(**names, outputs=outputs, classes=classes)]
    return []


def _is_class_target(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and target.ndim == 1 and target.dtype == torch.int64


def _list_single_sample_problems(spec: JobSpec, fake_step: FakeStep) -> list[Diagnostic]:
    """Return a warning if the search includes a micro-batch of one sample, on which BatchNorm cannot train."""
    micro_batches = spec.max_ranks * spec.train.accumulate
    if spec.search.min_batch // micro_batches > 1:
        return []
    try:
        fake_step.make_output(1)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        return [messages.batch_norm_on_single_sample(min_batch=2 * micro_batches)]
    return []


def _describe_shape(output: Any) -> str:
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return f"{type(output).__name__} of shape {', '.join(map(str, shapes))}"


def inspect_job_from_json(text: str) -> dict[str, Any]:
    """Return the answer to a JobSpec in JSON, as it is written to stdout."""
    try:
        return inspect_job(JobSpec.model_validate_json(text)).model_dump(mode="json")
    except SpecError as error:
        return _make_error_answer("SpecError", error.message, error.hint, error.problems)
    except TulaError as error:
        return _make_error_answer("JobFailed", error.message, error.hint)
    # The user's imports and constructors run here and may raise anything; the error is the answer.
    except Exception as error:  # noqa: BLE001
        cause = describe_error(error)
        return _make_error_answer(
            "JobFailed", f"the job's own code fails: {cause}", _find_last_frame(error), cause=cause
        )


def _make_error_answer(
    kind: str, message: str, hint: str, problems: tuple[Problem, ...] = (), *, cause: str = ""
) -> dict[str, Any]:
    error = {"class": kind, "message": message, "hint": hint, "problems": [vars(problem) for problem in problems]}
    return {"error": {**error, "cause": cause, "detail": traceback.format_exc()}}


def _find_last_frame(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:  # the frames are those of the import
        return f"correct {error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised in {frames[-1].filename}, line {frames[-1].lineno}, {frames[-1].name}" if frames else ""


def main() -> None:
    """Write the answer to the original stdout, after redirecting file descriptor 1 to stderr for all other output."""
    gc.freeze()
    gc.enable()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    channel.write(f"{START_MARKER}\n")  # later failures are due to the job, not the interpreter
    channel.flush()
    text = Path(sys.argv[1]).read_text(encoding="utf-8") if sys.argv[1:] else sys.stdin.read()
    channel.write(f"{json.dumps(inspect_job_from_json(text))}\n")
    channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads, processes and exit handlers of the user's code


if __name__ == "__main__":
    main()
