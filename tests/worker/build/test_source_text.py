"""Datasets on the source of the standard library, and models built from a configuration of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tula_cli.errors import SpecError
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.worker.build import text_datasets, transformers_models, zoo
from tula_cli.worker.build.batches import make_batch
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.measure.inspect import inspect_job

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 256}


def job(dataset: str = "python_source", model: str = "AutoModelForCausalLM", args: Any = None, **data: Any) -> Any:
    content = {
        "model": {"name": f"transformers:{model}", "args": GPT2 if args is None else args},
        "dataset": {"name": dataset, "args": {"length": 32, "size": 20_000, **data}},
        "optimizer": {"name": "AdamW", "lr": 1e-3},
        "train": {"epochs": 1, "method": "lbt"},
        "cluster": {"device": "cpu"},
    }
    return validate_job(content, source="test")


def test_blocks_of_source_are_the_same_each_time_and_hold_out_files() -> None:
    result, again = (build_datasets(job()) for _ in range(2))
    sample = result.train[0, 3]
    assert sample["input_ids"].shape == (32,) and torch.equal(sample["input_ids"], sample["labels"])
    assert torch.equal(sample["input_ids"], again.train[0, 3]["input_ids"])
    assert 500 < len(result.train) + len(result.eval) <= 20_000 // 32
    held_out = {bytes(item["input_ids"].tolist()) for item in result.eval.list_first_samples(50)}
    assert not held_out & {bytes(item["input_ids"].tolist()) for item in result.train.list_first_samples(600)}


def test_fragments_have_the_number_of_their_package_and_are_padded_to_the_longest() -> None:
    datasets = build_datasets(job("python_packages", classes=3))
    assert datasets.classes == 3
    items = datasets.train.list_first_samples(len(datasets.train))
    assert (
        {item["labels"] for item in items}
        == {0, 1, 2}
        == {item["labels"] for item in datasets.eval.list_first_samples(10_000)}
    )
    assert max(len(item["input_ids"]) for item in items) <= 32
    some = sorted(items, key=lambda item: len(item["input_ids"]))
    batch = make_batch(datasets.collate, [some[0], some[-1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 32)
    assert batch["attention_mask"].sum(1).tolist() == [len(some[0]["input_ids"]), 32]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"length": 30_000}, "are too few for a training"),
        ({"length": 0}, "must be integers of at least 2"),
        ({"words": 3}, "words"),
    ],
)
def test_sizes_that_make_no_dataset_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        build_datasets(job(**arguments))


def test_text_takes_no_transform() -> None:
    changed = {**job().model_dump(exclude_unset=True), "transforms": {"train": ["RandomHorizontalFlip"]}}
    with pytest.raises(SpecError, match="which is text"):
        build_datasets(validate_job(changed, source="test"))


def test_long_lines_are_cut_and_blank_parts_left_out() -> None:
    assert text_datasets._split_lines(b"ab\ncd\n\n\n\n\n\n0123456789\n", 6) == [b"ab\ncd\n", b"012345", b"6789\n"]


def test_a_language_model_is_built_from_its_configuration_and_takes_its_own_loss() -> None:
    spec = job()
    model = zoo.build_model(spec, None)
    assert not model.config.use_cache and model.config.eos_token_id is None
    call = zoo.make_model_call(spec, model, zoo.build_loss(spec))
    batch = make_batch(None, build_datasets(spec).train.list_first_samples(2))
    outputs = call.compute_outputs(model, batch)
    assert outputs.logits.shape == (2, 32, 256)
    assert call.compute_loss_from_outputs(outputs, batch) is outputs.loss and 4 < float(outputs.loss) < 7, (
        "ln 256 is 5.5"
    )


def test_a_classifier_has_the_classes_of_its_dataset() -> None:
    bert = {"model_type": "distilbert", "n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 16, "vocab_size": 256}
    model = zoo.build_model(job(model="AutoModelForSequenceClassification", args=bert), 5)
    assert model.config.num_labels == 5
    assert model(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.shape == (2, 5)


def test_the_shipped_classifier_builds_and_takes_a_step() -> None:
    result = inspect_job(load_spec(Path(__file__).parents[3] / "configs" / "bert_packages.yaml"))
    assert (result.classes, result.parameters, result.estimate_error) == (5, 92165, "")
    assert result.dataset_size > result.eval_size > 100


def test_a_class_of_its_own_knows_its_configuration() -> None:
    settings = {key: value for key, value in GPT2.items() if key != "model_type"}
    assert type(zoo.build_model(job(model="GPT2LMHeadModel", args=settings), None)).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("model", "args", "problem"),
    [
        ("AutoModelForCausalLM", {}, "needs model_type"),
        ("AutoModelForCausalLM", {"model_type": "gtp2"}, "did you mean gpt2"),
        ("AutoModelForCausalLM", {**GPT2, "n_layers": 3}, "n_layers.*no such setting"),
        ("AutoModelForCausalLM", {**GPT2, "n_head": 3}, "does not accept"),
        ("AutoModelForCausalML", GPT2, "did you mean AutoModelForCausalLM"),
        ("pipeline", GPT2, "no model class"),
    ],
)
def test_what_no_model_can_be_built_from_is_reported(model: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        zoo.build_model(job(model=model, args=args), None)
    import re

    assert re.search(problem, f"{caught.value.message} {caught.value.hint}")


def test_without_transformers_the_line_to_type_is_reported(monkeypatch) -> None:
    def gone(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(transformers_models.importlib, "import_module", gone)
    with pytest.raises(SpecError) as caught:
        zoo.build_model(job(), None)
    assert "which is not installed" in caught.value.message and "tula-cli[transformers]" in caught.value.hint
