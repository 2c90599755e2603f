"""Models in shares (`train.parallel: fsdp`): two ranks in one start, and one that goes on from what they have saved."""

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import shared_rank_cases
import torch
import torch.distributed as dist
from shared_rank_cases import KINDS, TRAIN, gather_weights
from start_ranks import read_errors, start_ranks
from torch import nn
from torch.distributed.checkpoint import metadata, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from worker_jobs import blocks, make_spec, make_trainer

from tula_cli.errors import CannotWrite, SpecError, TulaError
from tula_cli.optim import SmallBatch, TulaOptimizer
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import add_weights_digest
from tula_cli.run.records.probes import GradientStats, Measured
from tula_cli.worker.build.weights import SafeLoadPlanner, _MetadataUnpickler, read_weights
from tula_cli.worker.measure.fake_tensor_step import describe_gathered_part
from tula_cli.worker.parallel import sharded_checkpoint
from tula_cli.worker.parallel.sharding import list_fsdp_blocks
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint
from tula_cli.worker.train import loop as worker_train_loop

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the two ranks of shared_rank_cases leave behind."""
    folder = tmp_path_factory.mktemp("shares")
    assert start_ranks(shared_rank_cases.__file__, folder, world=2), read_errors(folder, 2)
    return folder


def read_results(folder: Path, name: str) -> list[object]:
    return [json.loads((folder / f"{rank}.json").read_text())[name] for rank in range(2)]


def test_shares_train_what_copies_do(shares: Path) -> None:
    for fact in read_results(shares, "compare_trainings"):
        assert isinstance(fact, dict) and fact.keys() == KINDS.keys()
        # torch's Muon multiplies in bfloat16, and shares in another order; clipping by the norm of all shares adds rounding;
        # orthogonalised steps add some that depends on the CPU (1.4e-5 on one of them)
        limits = {"muon": 1e-2, "ramp": 2e-5, "clipped ramp": 5e-5}
        for kind, differences in fact.items():
            assert max(differences) < limits.get(kind, 1e-5), fact


def test_a_rank_holds_its_share_of_parameters_gradients_and_states(shares: Path) -> None:
    result = read_results(shares, "measure_shard_bytes")
    for kind, copies in {"parameters": 1, "gradients": 1, "states": 2}.items():
        kept = [rank[kind] for rank in result]  # type: ignore[index]
        total = copies * result[0]["whole"]  # type: ignore[index]
        assert sum(kept) == total and max(kept) < 0.55 * total, kind


def test_evaluation_is_of_every_sample_once_where_ranks_have_unequal_batches(shares: Path) -> None:
    for fact in read_results(shares, "evaluate"):
        assert isinstance(fact, dict)
        for size in (17, 1):
            assert fact[f"{size} fsdp"] == pytest.approx(fact[f"{size} ddp"], abs=1e-5)


def test_shares_start_from_the_file_that_rank_0_reads(shares: Path) -> None:
    assert read_results(shares, "start_from_weights") == [0.0, 0.0]


def test_an_interrupted_training_goes_on_exactly_and_a_damaged_folder_is_passed_over(shares: Path) -> None:
    assert read_results(shares, "leave_and_resume") == [["000000000064.dcp"]] * 2
    through, broken = (torch.load(shares / f"{name}.pt") for name in ("through", "broken"))
    assert all(torch.equal(through[name], broken[name]) for name in through)
    for result, before in read_results(shares, "damage_checkpoint"):  # type: ignore[misc]
        assert result == before


def test_statistics_that_are_saved_are_rank_0s(shares: Path) -> None:
    assert read_results(shares, "save_statistics") == [[0.0] * 12] * 2


def test_every_rank_says_that_rank_0_cannot_write(shares: Path) -> None:
    places = (shares / "a-file" / "0.dcp", shares / "refused" / "1.dcp")
    assert (
        read_results(shares, "save_without_access")
        == [[f"cannot write {place}: Not a directory" for place in places]] * 2
    )


def test_folders_are_kept_as_files_are(shares: Path) -> None:
    training = RunDir(shares / "broken").get_training(TRAIN.signature)
    kept = [path.name for path in training.list_checkpoints()]
    assert kept == ["000000000288.dcp", "000000000192.dcp"]
    assert (training.path / "last").resolve().name == kept[0]
    assert (training.find_weights() or Path()).resolve().suffix == ".dcp"
    drafts = [".000000000300.dcp.draft", ".000000000192.dcp.old"]
    for name in drafts:
        (training.path / "checkpoints" / name).mkdir()
    mine = training.path / "checkpoints" / ".mine.dcp"
    mine.mkdir()
    training.drop_drafts()
    assert mine.exists() and not any((training.path / "checkpoints" / name).exists() for name in drafts)


def test_one_rank_goes_on_from_what_two_have_saved(shares: Path, alone: Ranks) -> None:
    run = RunDir(shares / "broken")
    subject = make_trainer(TRAIN.spec, alone)
    content = checkpoint.load_newest_checkpoint_on_all_ranks(run, TRAIN.signature, alone)
    assert content is not None
    best = checkpoint.restore_checkpoint(subject, content)
    saved = torch.load(shares / "broken.pt")
    assert best["epoch"] == 3 or best["epoch"] == 2
    assert subject.position.samples == 288 and subject.position.epoch == 3
    result = gather_weights(subject)
    assert result.keys() == saved.keys() and all(torch.equal(result[name], saved[name]) for name in saved)
    momenta = [state["momentum_buffer"] for state in subject.base.state.values()]
    assert momenta and all(float(value.to_local().abs().max()) > 0 for value in momenta)
    assert subject.ags is not None and subject.ags.report()["factors"] > 0


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_training_goes_on_where_the_forward_pass_leaves_a_parameter_out(
    alone: Ranks, tmp_path: Path, kind: str
) -> None:
    def begun() -> worker_train_loop.Trainer:
        return make_trainer(shared_rank_cases.job(kind, "fsdp").model_copy(update={"model": unused}), alone)

    unused = make_spec(model={"name": "worker_jobs:WithUnused"}).model
    first, second = begun(), begun()
    next(worker_train_loop.run_steps(first))
    checkpoint.write_sharded_checkpoint(tmp_path / "1.dcp", first, best={})
    sharded_checkpoint.load_sharded_checkpoint(tmp_path / "1.dcp", second.parallel.module, second.base)
    states = [
        {name: subject.base.state.get(p) for name, p in subject.parallel.module.named_parameters()}
        for subject in (first, second)
    ]
    assert [sorted(name for name in state if not state[name]) for state in states] == [
        ["unused.bias", "unused.weight"]
    ] * 2
    assert all(torch.equal(gather_weights(first)[name], value) for name, value in gather_weights(second).items())


def test_a_checkpoint_of_another_model_is_refused(shares: Path, alone: Ranks) -> None:
    content = checkpoint.load_newest_checkpoint_on_all_ranks(RunDir(shares / "broken"), TRAIN.signature, alone)
    assert content is not None
    other = make_trainer(make_spec(train={"parallel": "fsdp"}), alone)
    with pytest.raises(TulaError, match="does not fit the model"):
        checkpoint.restore_checkpoint(other, content)


def test_a_probe_tells_compute_memory_and_noise_of_shares(shares: Path) -> None:
    result = RunDir(shares / "probed").read_result("probe-n001-l000008")
    assert isinstance(result, Measured)
    assert result.sync_time is None and result.compute_time is not None and result.compute_time > 0
    assert result.memory.gradients <= result.memory.parameters < 0.6 * 2380
    assert result.gradients is not None and result.gradients.batch == 2 * result.gradients.local_batch
    assert 0 < result.gradients.norm_sqr < result.gradients.local_norm_sqr


def test_the_noise_of_shares_is_that_of_all_ranks_batches_together(shares: Path) -> None:
    first, second = read_results(shares, "compare_gradient_norms")
    assert first == second, "on every rank"
    copies, divided = (GradientStats.model_validate(stats) for stats in first)  # type: ignore[attr-defined]
    assert (divided.local_batch, divided.batch) == (2 * copies.local_batch, 2 * copies.batch)
    assert 0 < divided.norm_sqr < divided.local_norm_sqr < copies.local_norm_sqr
    assert divided.norm_sqr < copies.norm_sqr < copies.local_norm_sqr


def test_blocks_are_found() -> None:
    model = blocks()
    assert [type(block).__name__ for block in list_fsdp_blocks(model)] == ["Sequential", "Sequential"]
    model[1][0][0].weight = model[2].weight  # tied to what is outside
    assert list_fsdp_blocks(model) == [model[1][1]]


def test_a_parameter_that_cannot_be_divided_is_named_before_anything_runs() -> None:
    model = blocks()
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(SpecError, match="scalar parameters: temperature"):
        list_fsdp_blocks(model)


def test_a_block_inside_another_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Sequential(nn.Linear(16, 8, bias=False))))
    gathering = describe_gathered_part(model)
    assert gathering.values == {"blocks": 1, "largest": 512, "outside": 256}


def test_factors_of_elements_are_refused_on_shares(alone: Ranks) -> None:
    subject = make_trainer(TRAIN.spec, alone)
    with pytest.raises(ValueError, match="can only have factors per tensor"):
        TulaOptimizer(subject.base, model=subject.parallel, b_large=16, b_small=4, factors=SmallBatch("element"))


def test_steps_alone_leave_the_shares_as_they_are(alone: Ranks) -> None:
    subject = make_trainer(shared_rank_cases.job("momentum", "fsdp"), alone)
    stream = worker_train_loop.run_steps(subject)
    next(stream)
    before = gather_weights(subject)
    subject.synchronise, subject.lr_factor = False, lambda _: 0.0
    with subject.parallel.disable_communication():  # type: ignore[union-attr]
        next(stream)
    subject.synchronise = True
    after = gather_weights(subject)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(hasattr(p, "to_local") for p in subject.parallel.parameters())


def test_a_training_in_copies_starts_from_a_folder_of_shares(shares: Path, tmp_path: Path) -> None:
    path = (RunDir(shares / "broken").get_training(TRAIN.signature).path / "last").resolve()
    saved = torch.load(shares / "broken.pt")
    weights = read_weights(str(path))
    assert weights.keys() == saved.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)
    job = make_spec(model={**shared_rank_cases.BLOCKS, "weights": str(path)})
    assert add_weights_digest("", job) != add_weights_digest("", make_spec())
    damaged = tmp_path / "000000000288.dcp"
    shutil.copytree(path, damaged)
    (damaged / ".metadata").write_bytes(b"x")
    with pytest.raises(SpecError, match=r"model.weights: .*000000000288\.dcp"):
        read_weights(str(damaged))


class Planted:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


class Attribute:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def test_members_of_enumerations_are_all_that_getattr_gets() -> None:
    kind = metadata._MEM_FORMAT_ENCODING
    result = pickle.dumps(Attribute(kind, "TORCH_CONTIGUOUS_FORMAT"))
    assert _MetadataUnpickler(io.BytesIO(result)).load() is kind.TORCH_CONTIGUOUS_FORMAT
    for other in (Attribute(metadata.Metadata, "__init__"), Attribute(kind, "__class__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            _MetadataUnpickler(io.BytesIO(pickle.dumps(other))).load()


def test_nothing_in_a_folder_is_run(shares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = (RunDir(shares / "broken").get_training(TRAIN.signature).path / "last").resolve()
    shutil.copytree(path, tmp_path / "foreign.dcp")
    (tmp_path / "foreign.dcp" / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(SpecError, match=r"the metadata names pathlib\.Path"):
        read_weights("foreign.dcp")
    value = io.BytesIO()
    torch.save(Planted(), value)
    value.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        SafeLoadPlanner().load_bytes(None, value)
    assert not (tmp_path / "planted").exists()


def test_a_torch_without_shares_on_the_cpu_is_reported(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "Stream", object)
    with pytest.raises(SpecError, match="cannot run on the CPU under torch"):
        make_trainer(TRAIN.spec, alone)


def test_a_group_that_adds_gradients_up_is_refused(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda mean, *_, **__: mean.fill_(2))
    with pytest.raises(SpecError, match="sum gradients instead of averaging them: gloo under torch"):
        make_trainer(TRAIN.spec, alone)


def test_what_was_written_and_cannot_be_read_again_is_no_checkpoint(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_trainer(TRAIN.spec, alone)
    place = tmp_path / "000000000016.dcp"
    with monkeypatch.context() as patched:
        patched.setattr(sharded_checkpoint, "_compute_file_checksum", lambda _: -1)
        with pytest.raises(CannotWrite, match="cannot be read back"):
            checkpoint.write_sharded_checkpoint(place, subject, best={})
    assert not place.exists()
    checkpoint.write_sharded_checkpoint(place, subject, best={})
    assert sharded_checkpoint.is_complete_checkpoint(place, alone)
    (place / "sums.json").write_text("[1]")
    assert not sharded_checkpoint.is_complete_checkpoint(place, alone)


def test_a_full_disk_in_the_middle_of_a_share_is_reported(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise CheckpointException("", {0: (RuntimeError("PytorchStreamWriter failed\nmore"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(state_dict_saver, "save", full)
    with pytest.raises(CannotWrite, match="dcp: PytorchStreamWriter failed\n"):
        checkpoint.write_sharded_checkpoint(tmp_path / "000000000016.dcp", make_trainer(TRAIN.spec, alone), best={})
