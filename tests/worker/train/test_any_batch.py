"""Batches that are no (tensor, target): what they train, what is cut of them, and what is told of those that cannot be."""

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from read_diagnostics import values
from token_jobs import Classifier, make_token_job
from torch import nn
from worker_jobs import are_equal, make_train_task, make_trainer, read_rows, train_to_end

from tula_cli.errors import JobFailed, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.worker import device
from tula_cli.worker.build.batches import (
    ModelCall,
    TokenCounter,
    allocate_batch,
    describe_tree,
    find_sequence_length,
    slice_batch,
)
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure import probe
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.measure.probe import measure_half_batch_norms
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.evaluation import Evaluator

Inputs = namedtuple("Inputs", ["ids", "mask"])
EVEN = {"even": True}


def even(form: str, **changes: Any) -> dict[str, Any]:
    """Return sections of a job whose samples torch's own collation takes."""
    return {"dataset": {"collate_fn": None, "args": {"form": form, **EVEN}}, **changes}


# --- what is trained


@pytest.mark.parametrize("method", ["lbt", "ags"])
@pytest.mark.parametrize("form", ["dict", "nested", "three"])
def test_a_batch_of_any_form_trains_what_the_plain_one_does(alone: Ranks, form: str, method: str) -> None:
    train = {"method": method, "accumulate": 2}
    plain, _ = train_to_end(make_token_job(**even("pair", train=train)), alone)
    result, _ = train_to_end(make_token_job(**even(form, train=train)), alone)
    assert are_equal(result, plain)


@pytest.mark.parametrize("model", ["WithLoss", "Whole"])
def test_a_model_may_take_its_loss_or_the_whole_dictionary_by_itself(alone: Ranks, model: str) -> None:
    plain, steps = train_to_end(make_token_job(), alone)
    result, value = train_to_end(make_token_job(model={"name": f"token_jobs:{model}"}), alone)
    assert are_equal(result, plain)
    assert [float(step.loss) for step in value] == [float(step.loss) for step in steps]
    assert float(value[-1].loss) < float(value[0].loss)


def test_evaluation_knows_classes_in_a_dictionary(alone: Ranks) -> None:
    job = make_token_job(train={"epochs": 8})
    subject = make_trainer(job, alone)
    list(worker_train_loop.run_steps(subject))
    result = Evaluator(subject).evaluate()
    assert result.samples == 10 and result.top1 > 80
    value = make_trainer(make_token_job(model={"name": "token_jobs:WithLoss"}), alone)
    value.parallel.module.load_state_dict(subject.parallel.module.state_dict())
    assert Evaluator(value).evaluate() == result


def test_a_language_model_is_reported_by_its_perplexity(alone: Ranks, run: RunDir) -> None:
    data = {"name": "python_source", "collate_fn": None, "args": {"length": 16, "size": 1024}}
    job = make_token_job(model={"name": "token_jobs:OfBytes"}, dataset=data)
    task = make_train_task(job, batch=8)
    run_training(task, run, alone, build_datasets(job))
    result, epochs = run.get_training(task.signature).read_result(), list(read_rows(run, task, "epoch"))
    assert result is not None and result.best_top1 is None and "top1" not in result.metrics
    assert result.metrics["perplexity"] == pytest.approx(math.exp(epochs[-1]["eval_loss"]))
    assert [row["perplexity"] for row in epochs] == pytest.approx([math.exp(row["eval_loss"]) for row in epochs])
    assert result.best_loss == min(row["eval_loss"] for row in epochs)
    step = next(read_rows(run, task, "step"))
    assert step["tokens_per_second"] == pytest.approx(8 * 16 / step["step_time"])


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ({"input_ids": torch.ones(4, 9).long(), "labels": torch.ones(4).long()}, 9),
        ((torch.ones(4, 9).long(), torch.ones(4, 9).long()), 9),
        ((torch.ones(4, 9), torch.ones(4, 9)), None),
        ((torch.ones(4, 9).long(), torch.ones(4).long()), None),
        ((torch.ones(4, 3, 8, 8), torch.ones(4).long()), None),
        ({"numbers": torch.ones(4, 9).long()}, None),
        (torch.ones(4, 9).long(), None),
    ],
)
def test_the_length_of_text_is_known_by_names_and_pairs(batch: Any, length: int | None) -> None:
    assert find_sequence_length(batch) == length


IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
LABELS = torch.tensor([[5, 6, 7, -100], [-100, -100, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": LABELS}, (4, 2.5)),
        ({"ids": IDS, "mask": IDS != 0}, (4, 2.5)),
        ({"input_ids": IDS, "labels": LABELS}, (4, 1.5)),
        ((IDS, LABELS), (4, 1.5)),
        ({"input_ids": IDS, "labels": torch.ones(2).long()}, (4, 4)),
        ({"input_ids": IDS, "mask": torch.ones(2, 4, 4)}, (4, 4)),
        ((torch.ones(2, 3), torch.ones(2)), None),
    ],
)
def test_padding_is_distinguished_from_tokens_by_mask_and_labels(batch: Any, found: tuple[float, float] | None) -> None:
    counter = TokenCounter()
    counter.add(batch)
    counter.add(batch)
    assert counter.compute_means_per_sample() == found


def test_a_training_tells_tokens_a_second_without_their_padding(alone: Ranks, run: RunDir) -> None:
    job = make_token_job(train={"epochs": 1})
    task = make_train_task(job, batch=8)
    run_training(task, run, alone, build_datasets(job))
    step = next(read_rows(run, task, "step"))
    assert 0 < step["padding"] < 0.6 and step["tokens_per_second"] < 8 * 9 / step["step_time"]


def test_a_loss_of_the_whole_batch_has_no_accuracy(alone: Ranks) -> None:
    job = make_token_job(
        model={"name": "token_jobs:NextWord"},
        loss={"name": "token_jobs:next_word_loss"},
        train={"method": "ags", "epochs": 4},
    )
    subject = make_trainer(job, alone)
    losses = [float(step.loss) for step in worker_train_loop.run_steps(subject)]
    result = Evaluator(subject).evaluate()
    assert losses[-1] < losses[0] and result.loss == result.loss and result.top1 != result.top1
    assert math.isnan(result.perplexity), "nobody knows what a loss of the user's own means"


def test_halves_of_a_dictionary_are_those_of_the_plain_batch(alone: Ranks) -> None:
    results = []
    for form in ("pair", "dict"):
        subject = make_trainer(make_token_job(**even(form)), alone)
        next(worker_train_loop.run_steps(subject))
        results.append(measure_half_batch_norms(subject))
    assert results[0] == results[1] and results[0][0] > 0


# --- what the inspection tells


def test_check_tells_samples_of_different_lengths_and_estimates_the_longest() -> None:
    result = inspect_job(make_token_job())
    assert result.estimate_error == "" and result.footprints and result.classes == 3
    assert result.sample_shape == () and result.sample == "{ids: int64 (9), mask: bool (9), label: int}"
    shapes = values(result.warnings, "samples-differ-in-shape")
    assert shapes["inspected"] == 64 and shapes["largest"].startswith("{ids: int64 (9)")
    assert inspect_job(make_token_job(**even("dict"))).warnings == ()


def test_keys_that_the_model_does_not_take_are_reported() -> None:
    result = inspect_job(
        make_token_job(**even("dict", model={"name": "token_jobs:NextWord"}, loss={"name": "token_jobs:of_ids"}))
    )
    assert result.warnings == (), "the loss takes the whole batch"
    warnings = inspect_job(make_token_job(**even("dict", model={"name": "token_jobs:First"}))).warnings
    assert values(warnings, "unused-batch-entries") == {"entries": ["mask"], "model": "token_jobs:First"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dataset": {"collate_fn": None}}, r"cannot be batched: they are \{ids: int64 \(\d\), .* and \{ids: int64 \(\d\)"),
    ({"dataset": {"collate_fn": "token_jobs:packed"}}, r"batch\['ids'\] is int64 \(\d+\), but its first dimension must be the batch's 5 samples"),
    ({"dataset": {"collate_fn": "token_jobs:nosuch"}}, "collate_fn 'token_jobs:nosuch'"),
    (even("dict", model={"name": "token_jobs:NextWord"}, loss={"name": "MSELoss"}), "loss MSELoss"),
    (even("pair", model={"name": "small_cnn"}), r"small_cnn cannot take the batch \(int64 \(2, 6\), int64 \(2\)\)"),
    ({"transforms": {"train": ["RandomHorizontalFlip"]}}, "takes no transform"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_makes_no_batch_is_reported_with_its_shapes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((SpecError, JobFailed), match=words) as caught:
        inspect_job(make_token_job(**changes))
    assert "ToTensor" not in str(caught.value) + caught.value.hint


def test_collate_fn_has_to_be_an_import_string() -> None:
    with pytest.raises(SpecError) as caught:
        make_token_job(dataset={"collate_fn": "padded"})
    assert "must be an import string package.module:attribute, got 'padded'" in caught.value.problems[0].message


# --- calls and cuts


class Two(nn.Module):
    def forward(self, one: Any, other: Any, scale: float = 1.0) -> Any:
        return one, other, scale


class Anything(nn.Module):
    def forward(self, **named: Any) -> Any:
        return named


@pytest.mark.parametrize(
    ("model", "batch", "given"),
    [
        (Two(), ("a", "b", "target"), ("a", "b", 1.0)),
        (Two(), (("a", "b"), "target"), ("a", "b", 1.0)),
        (Two(), ("a", "target"), ("a", "target", 1.0)),  # it needs both
        (Two(), {"other": "b", "one": "a", "scale": 2.0, "label": "t"}, ("a", "b", 2.0)),
        (Two(), ({"one": "a", "other": "b"}, "target"), ("a", "b", 1.0)),
        (Anything(), {"a": 1, "labels": 2}, {"a": 1, "labels": 2}),
    ],
)
def test_a_model_is_called_with_what_its_signature_takes(model: nn.Module, batch: Any, given: Any) -> None:
    assert ModelCall.from_model(model, lambda *_: torch.zeros(())).compute_outputs(model, batch) == given


def test_a_missing_parameter_and_a_missing_target_are_named() -> None:
    call = ModelCall.from_model(Two(), nn.CrossEntropyLoss(), names=("model mine:Two", "loss cross_entropy"))
    with pytest.raises(SpecError, match="model mine:Two needs other, but the batch has one, label"):
        call.compute_outputs(Two(), {"one": 1, "label": 2})
    with pytest.raises(SpecError, match="loss cross_entropy needs a target"):
        call.compute_loss_from_outputs(torch.zeros(2, 3), {"one": torch.zeros(2), "other": torch.zeros(2)})


def test_a_loss_that_is_no_number_is_refused() -> None:
    call = ModelCall.from_model(Classifier(), nn.CrossEntropyLoss(), default=True)
    with pytest.raises(SpecError, match=r"the \.loss that .* returns is float32 \(4\), not one number"):
        call.compute_loss_from_outputs({"loss": torch.zeros(4)}, {})


def test_a_cut_keeps_the_tree_and_what_belongs_to_the_whole_batch() -> None:
    lists = [torch.zeros(3, 2, 2), torch.zeros(3, 4, 4), torch.zeros(3, 1, 1)]
    batch = {"in": Inputs(torch.arange(3), torch.ones(3, 2)), "images": lists, "step": torch.tensor(7), "name": "x"}
    with pytest.raises(SpecError, match="ambiguous whether an entry is a sample or a field"):
        slice_batch(batch, samples=3, stop=1, from_user=True)
    assert [len(image) for image in slice_batch(batch, samples=3, stop=1)["images"]] == [1, 1, 1], (
        "as torch collates three views"
    )
    lists[0] = torch.zeros(1, 2, 2)
    result = slice_batch(batch, samples=3, start=1, stop=3, from_user=True)
    assert type(result["in"]) is Inputs and result["in"].ids.tolist() == [1, 2] and result["in"].mask.shape == (2, 2)
    assert [image.shape[1] for image in result["images"]] == [4, 1]
    assert (int(result["step"]), result["name"]) == (7, "x")
    with pytest.raises(
        SpecError, match=r"batch\[1\] is float32 \(5\), but its first dimension must be the batch's 2 samples"
    ):
        slice_batch([torch.zeros(2), torch.zeros(5)], samples=2, stop=1)
    larger = allocate_batch({"in": Inputs(torch.zeros(3, 7), torch.zeros(3)), "n": 3}, samples=3, target_samples=11)
    assert larger["in"].ids.shape == (11, 7) and larger["n"] == 3
    assert describe_tree(batch["in"]) == "{ids: int64 (3), mask: float32 (3, 2)}"


def test_a_device_is_brought_every_tensor_of_a_batch() -> None:
    meta = torch.device("meta")
    result = device.move_to_device(
        ({"a": [torch.zeros(2)], "b": "x"}, Inputs(torch.zeros(2), None)), meta, channels_last=True
    )
    assert result[0]["a"][0].device == meta == result[1].ids.device and result[1].mask is None and result[0]["b"] == "x"


@pytest.mark.parametrize(("room", "looked"), [(None, True), (2**30, True), (0, False)])
def test_gradients_are_not_looked_at_where_there_is_no_room_for_them(
    alone: Ranks, room: int | None, looked: bool
) -> None:
    subject = make_trainer(make_token_job(**even("pair"), search={"nodes": [1]}), alone)
    stream = worker_train_loop.run_steps(subject)
    gradient_stats = probe._measure_gradient_stats(subject, stream, norms=3, free_bytes=room)
    assert (gradient_stats.steps > 0) is looked and gradient_stats.batch == 2 * gradient_stats.local_batch
