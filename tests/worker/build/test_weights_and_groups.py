"""Initial weights of a training, and which of its parameters are trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from worker_jobs import load_final_weights, make_spec, make_train_task, read_rows

from tula_cli.errors import SpecError
from tula_cli.run.code import compute_code_digest
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import compute_weights_digest
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.parameter_groups import find_parameters, make_parameter_groups
from tula_cli.worker.build.weights import check_weights_fit_model, read_weights
from tula_cli.worker.build.zoo import build_model, build_optimizer
from tula_cli.worker.entry import run_training
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.ranks import Ranks

NORM = {"model": {"args": {"norm": True}}}


def model(**section: Any) -> nn.Module:
    return build_model(job(**section), classes=3)


def job(**section: Any) -> JobSpec:
    args = {**section.pop("args", {}), "norm": True}
    return make_spec(model={**section, "args": args})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Weights of the tiny network, other than those that it starts from."""
    torch.manual_seed(99)
    path = tmp_path / "first.pth"
    torch.save(model().state_dict(), path)
    return path


def train(run: RunDir, ranks: Ranks, of: JobSpec) -> dict[str, torch.Tensor]:
    task = make_train_task(of)
    run_training(task, run, ranks, build_datasets(of))
    return load_final_weights(run, task)


# --- patterns


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["0"], ["0.weight", "0.bias"]),
        (["*.bias"], ["0.bias", "1.bias", "5.bias"]),
        (["norms"], ["1.weight", "1.bias"]),
        (["biases", "!5"], ["0.bias", "1.bias"]),
        (["*", "!5.*"], ["0.weight", "0.bias", "1.weight", "1.bias"]),
        (["!5", "*"], ["0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"]),
    ],
)
def test_patterns_name_parameters_and_the_last_one_counts(patterns, names):
    assert list(find_parameters(model(), patterns, path="model.frozen")) == names


def test_embeddings_and_norms_of_any_package_are_known_by_their_kind():
    class RMSNormOfSomebody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    whole = nn.Sequential(nn.Embedding(5, 4), RMSNormOfSomebody(), nn.Linear(4, 4))
    assert list(find_parameters(whole, ["embeddings", "norms"], path="p")) == ["0.weight", "1.weight"]


def test_a_pattern_that_names_nothing_is_refused_with_the_nearest():
    whole = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(SpecError, match=r"model.frozen: 'encodr.\*' matches no parameter") as caught:
        find_parameters(whole, ["encodr.*"], path="model.frozen")
    assert "did you mean encoder" in caught.value.hint
    with pytest.raises(SpecError) as caught:
        find_parameters(whole, ["zzz"], path="model.frozen")
    assert caught.value.hint == "its modules are encoder, head"


# --- frozen layers


def test_frozen_layers_and_their_statistics_stay_as_they_are(alone: Ranks, run: RunDir) -> None:
    of = job(frozen=["0", "1"])
    torch.manual_seed(3)
    weights = train(run, alone, of)
    before = train(RunDir.create(run.path.parent / "other", of), alone, job(frozen=["0", "1"]))
    assert all(torch.equal(value, before[name]) for name, value in weights.items())
    assert weights["1.num_batches_tracked"] == 0 and torch.equal(weights["1.running_mean"], torch.zeros(8))
    assert torch.equal(weights["1.weight"], torch.ones(8)) and weights["5.weight"].abs().sum() > 0


def test_frozen_statistics_stay_in_evaluation_when_the_model_is_trained():
    whole = model(frozen=["1"]).train()
    x = torch.randn(4, 1, 4, 4)
    assert not whole[1].training and whole.training
    assert torch.allclose(whole[1](whole[0](x)), whole[0](x), atol=1e-4)  # statistics 0 and 1
    assert model(frozen=["1.bias"])[1].training  # its scale is trained, so it takes statistics
    assert model(frozen=["0", "5"])[1].training


def test_nothing_left_to_train_is_refused():
    with pytest.raises(SpecError, match=r"model.frozen: \* freezes all parameters"):
        model(frozen=["*"])


@pytest.mark.parametrize("method", ["ags", "lars", "ortho", "polo"])
def test_methods_train_what_is_not_frozen(method: str, alone: Ranks, run: RunDir) -> None:
    of = make_spec(model={"args": {"norm": True}, "frozen": ["0", "1"]}, train={"method": method}, ags={"delta": "inf"})
    first = build_model(of, classes=3).state_dict()
    weights = train(run, alone, of)
    assert torch.equal(weights["1.weight"], first["1.weight"]) and weights["1.num_batches_tracked"] == 0
    assert not torch.equal(weights["5.weight"], first["5.weight"])


def test_memory_knows_what_is_frozen():
    whole, head = (inspect_job(job(**section)).footprints[0].memory for section in ({}, {"frozen": ["*", "!5"]}))
    trained = 4 * (16 * 8 * 3 + 3)
    assert head.parameters == whole.parameters
    assert (head.gradients, head.optimizer) == (trained, trained)
    assert whole.gradients == whole.optimizer == trained + 4 * (72 + 8 + 16)


def test_check_tells_what_is_frozen():
    (note,) = inspect_job(job(frozen=["0", "1"])).notes
    assert str(note) == "frozen: 96 of 483 parameters (0, 1); the statistics of 1 BatchNorm layers are kept"


# --- weights of a file


def test_a_training_starts_from_the_weights_of_a_file(alone: Ranks, run: RunDir, saved: Path) -> None:
    weights = train(run, alone, job(weights=str(saved), frozen=["0", "1"]))
    given = torch.load(saved, weights_only=True)
    assert torch.equal(weights["0.weight"], given["0.weight"])
    assert not torch.equal(weights["5.weight"], given["5.weight"])


def test_a_resumed_training_needs_the_file_no_more(alone: Ranks, run: RunDir, saved: Path) -> None:
    of = job(weights=str(saved))
    task = make_train_task(of)
    train(run, alone, of)
    (run.get_training(task.signature).path / "result.json").unlink()
    saved.unlink()
    train(run, alone, of)
    assert run.get_training(task.signature).read_result() is not None


@pytest.mark.parametrize("key", ["model", "state_dict", None])
def test_checkpoints_and_what_wrappers_put_before_names_are_read(key: str | None, tmp_path: Path) -> None:
    whole = model()
    state: Any = {f"module.{name}": value for name, value in whole.state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, tmp_path / "a.pt")
    fit = check_weights_fit_model(job(weights=str(tmp_path / "a.pt")).model, whole)
    assert fit.mismatch_text == "" and set(fit.common) == set(whole.state_dict())


def test_safetensors_are_read(tmp_path: Path) -> None:
    whole, path = model(), tmp_path / "a.safetensors"
    save_file(whole.state_dict(), path)
    assert check_weights_fit_model(job(weights=str(path)).model, whole).mismatch_text == ""
    path.write_bytes(b"no tensors")
    with pytest.raises(SpecError, match="is damaged, or not a file of safetensors"):
        read_weights(str(path))


def test_what_does_not_fit_is_refused_or_told(alone: Ranks, run: RunDir, tmp_path: Path) -> None:
    torch.save({**model().state_dict(), "old.weight": torch.ones(2)}, tmp_path / "a.pt")
    section = {"weights": str(tmp_path / "a.pt"), "args": {"num_classes": 4}}
    message = "not in the model: old.weight; with another shape: 5.weight (3, 128) instead of (4, 128), 5.bias (3,) instead of (4,)"
    with pytest.raises(SpecError) as caught:
        inspect_job(job(**section))
    assert message in caught.value.message and "model.strict: false" in caught.value.hint
    of = job(**section, strict=False)
    (note,) = inspect_job(of).notes
    assert str(note) == f"weights: 7 tensors of {tmp_path}/a.pt; {message}"
    train(run, alone, of)
    assert any(message in row["message"] for row in read_rows(run, make_train_task(of), "warning"))


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "does not exist"), (b"text", "is damaged, or not a file of torch.save"), ([1, 2], "no named tensors")],
)
def test_files_of_another_kind_are_refused(content: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(SpecError, match=why):
        read_weights(str(path))


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """Return a file one of whose numbers is another: it can be read, and its check sum tells."""
    at = content.index(torch.ones(8).numpy().tobytes())
    return content[:at] + b"\x01" + content[at + 1 :]


@pytest.mark.parametrize("harm", [cut, flipped])
def test_a_damaged_file_is_reported_without_what_the_unpickler_says(harm: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(8)}, path)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(SpecError) as caught:
        read_weights(str(path))
    size = path.stat().st_size
    assert caught.value.message == f"model.weights: {path} ({size} bytes) is damaged, or not a file of torch.save"


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "a.pt")  # the module itself, which is code
    with pytest.raises(SpecError, match="contains more than tensors") as caught:
        read_weights(str(tmp_path / "a.pt"))
    assert "state_dict" in caught.value.hint


def test_a_run_is_named_by_what_is_in_the_file(saved: Path) -> None:
    of, plain = job(weights=str(saved)), job()
    before = compute_code_digest(of, Path.cwd())
    assert before != compute_code_digest(plain, Path.cwd()) and compute_weights_digest(plain) == ""
    torch.save({name: value + 1 for name, value in torch.load(saved).items()}, saved)
    assert compute_code_digest(of, Path.cwd()) != before
    saved.unlink()
    with pytest.raises(SpecError, match=r"model\.weights: cannot read"):
        compute_code_digest(of, Path.cwd())


def test_the_place_of_the_file_names_nothing_and_frozen_layers_do(saved: Path) -> None:
    assert compute_measurement_signature(job(weights=str(saved))) == compute_measurement_signature(job())
    assert compute_measurement_signature(job(frozen=["0"])) != compute_measurement_signature(job())
    assert compute_train_signature(job(frozen=["0"]), nodes=1, batch=8) != compute_train_signature(
        job(), nodes=1, batch=8
    )


# --- groups of parameters


GROUPS = [{"parameters": ["norms", "biases"], "weight_decay": 0}, {"parameters": ["5"], "lr_factor": 10}]


def built(of: JobSpec) -> torch.optim.Optimizer:
    return build_optimizer(of, make_parameter_groups(of.optimizer, build_model(of, classes=3)))


def grouped(*, groups: Any = GROUPS, norm: bool = True, **optimizer: Any) -> JobSpec:
    section = {"weight_decay": 0.05, "groups": groups, **optimizer}
    return make_spec(model={"args": {"norm": norm}}, optimizer=section)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_groups_have_their_own_rate_and_decay_and_the_last_one_counts(name: str) -> None:
    momentum = {} if name == "SGD" else {"momentum": None}
    param_groups = built(grouped(name=name, **momentum)).param_groups
    sizes = [[p.numel() for p in group["params"]] for group in param_groups]
    assert sizes == [[72], [8, 8, 8], [384, 3]]
    assert [group["weight_decay"] for group in param_groups] == [0.05, 0, 0.05]
    assert [group["lr"] for group in param_groups] == [0.1, 0.1, 1.0]


def test_sgd_updates_sparse_embeddings_without_its_fused_kernel() -> None:
    network = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    of = grouped(name="SGD", groups=[{"parameters": ["2"], "lr_factor": 10}])
    dense, sparse = network[2], network[0].weight
    optimizer = build_optimizer(of, make_parameter_groups(of.optimizer, network))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]
    optimizer = build_optimizer(make_spec(), make_parameter_groups(make_spec().optimizer, network))
    assert [group["params"] for group in optimizer.param_groups] == [[dense.weight, dense.bias], [sparse]]
    before = sparse.detach().clone()
    network(torch.tensor([[0, 1], [1, 3]])).square().sum().backward()
    assert sparse.grad is not None and sparse.grad.is_sparse
    optimizer.step()
    changed = (sparse != before).any(dim=1).tolist()
    assert changed == [True, True, False, True, False] and optimizer.param_groups[0]["fused"] is True


def test_ratios_hold_at_every_point_of_a_training(alone: Ranks, run: RunDir) -> None:
    of = make_spec(
        model={"args": {"norm": True}},
        optimizer={"groups": GROUPS},
        schedule={"kind": "linear", "warmup_epochs": 0.5},
        train={"lr_scaling": "linear", "checkpoint_every": 1e-9},
    )
    task = make_train_task(of)
    run_training(task, run, alone, build_datasets(of))
    for path in run.get_training(task.signature).list_checkpoints():
        rates = [group["lr"] for group in torch.load(path, weights_only=True)["optimizer"]["param_groups"]]
        assert rates[0] == rates[1] > 0 and rates[2] == pytest.approx(10 * rates[0])


def test_groups_and_frozen_layers_go_together():
    of = make_spec(model={"args": {"norm": True}, "frozen": ["0"]}, optimizer={"groups": GROUPS})
    assert [len(group["params"]) for group in built(of).param_groups] == [2, 2]
    with pytest.raises(
        SpecError,
        match=r"optimizer.groups\[0\].parameters: all parameters that match 0 are frozen or belong to a later group",
    ):
        built(make_spec(model={"frozen": ["0"]}, optimizer={"groups": [{"parameters": ["0"]}]}))


def test_check_tells_groups_and_refuses_what_fits_nothing():
    assert [str(note) for note in inspect_job(grouped()).notes] == [
        "group norms, biases: 3 tensors, lr 0.100, weight decay 0",
        "group 5: 2 tensors, lr 1.00, weight decay 0.0500",
    ]
    with pytest.raises(SpecError, match=r"optimizer.groups\[0\].parameters: 'haed' matches no parameter"):
        inspect_job(grouped(groups=[{"parameters": ["haed"]}]))


def test_an_optimizer_without_weight_decay_takes_none_by_groups():
    of = grouped(name="Rprop", momentum=None, weight_decay=0)
    with pytest.raises(SpecError, match=r"optimizer\.groups: Rprop has no argument weight_decay"):
        built(of)


def test_groups_are_a_part_of_names_and_their_absence_is_none() -> None:
    assert compute_measurement_signature(grouped()) != compute_measurement_signature(grouped(groups=[]))
    plain = compute_train_signature(grouped(groups=[]), nodes=1, batch=8)
    assert compute_train_signature(grouped(), nodes=1, batch=8) != plain
