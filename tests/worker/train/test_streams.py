"""Iterable datasets and samplers of the user's own: which rank trains which sample, before and after a resume."""

import itertools
import os
from pathlib import Path
from typing import Any

import make_runs
import pytest
import token_jobs
import torch
from token_jobs import make_token_job
from torch._utils import ExceptionWrapper
from torch.utils.data import WeightedRandomSampler
from worker_jobs import are_equal, copy_weights, make_trainer, train_to_end

from tula_cli.errors import SpecError
from tula_cli.models.ramp import Ramp
from tula_cli.run.directory import RunDir
from tula_cli.spec.job import JobSpec
from tula_cli.worker import __main__ as worker_program
from tula_cli.worker import messages
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.loaders import MicroBatchSampler, TrainingPosition, build_eval_loader, build_train_loader
from tula_cli.worker.measure.inspect import inspect_job
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.evaluation import Evaluator
from tula_cli.worker.train.training_log import list_ineffective_settings


def stream(name: str = "Stream", *, train: dict[str, Any] | None = None, **dataset: Any) -> JobSpec:
    """Return a job of a stream of 36 samples an epoch."""
    settings = {"collate_fn": None, "length": 36, "eval_length": 10, **dataset}
    return make_token_job(
        model={"name": "token_jobs:linear"},
        dataset={"name": f"token_jobs:{name}", **settings},
        optimizer={"lr": 1e-4},
        train=train or {},
    )


def read(
    job: JobSpec, *, world: int, batch: int, start: TrainingPosition | None = None, accumulate: int = 1
) -> list[list[Any]]:
    """Return the samples of each step, over all ranks."""
    result: list[list[Any]] = []
    for rank in range(world):
        datasets = build_datasets(job)
        batches = MicroBatchSampler(
            len(datasets.train),
            ramp=Ramp.from_constant_batch(batch),
            parts={batch: accumulate},
            rank=rank,
            world=world,
            seed=3,
            epochs=2,
            start=start or TrainingPosition(),
        )
        parts = [values.tolist() for values, _ in build_train_loader(datasets.train, batches, workers=0, pin=False)]
        result.append([list(itertools.chain(*parts[at : at + accumulate])) for at in range(0, len(parts), accumulate)])
    return [sorted(itertools.chain(*step)) for step in zip(*result, strict=True)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_is_shared_among_ranks_and_goes_on_at_the_exact_sample(shuffled: bool) -> None:
    job = stream(args={"shuffled": shuffled})
    text = read(job, world=1, batch=12)
    assert [len(step) for step in text] == [12] * 6
    assert len({number for step in text for number, _ in step}) == 72, "no sample is trained twice"
    assert read(job, world=2, batch=12) == text == read(job, world=3, batch=12, accumulate=2)
    resumed = read(job, world=2, batch=6, start=TrainingPosition(epoch=0, done=24, samples=24))
    assert [
        sorted(resumed[0] + resumed[1]),
        *(sorted(a + b) for a, b in zip(resumed[2::2], resumed[3::2], strict=True)),
    ] == text[2:]


def test_a_resumed_stream_trains_the_same_weights_and_tells_what_it_passes_over(alone: Ranks) -> None:
    job = stream(train={"method": "ags"})
    whole, _ = train_to_end(job, alone, batch=12)
    subject = make_trainer(job, alone, batch=12)
    steps = worker_train_loop.run_steps(subject)
    next(steps), next(steps)
    later = make_trainer(job, alone, batch=12)
    later.parallel.module.load_state_dict(copy_weights(subject))
    later.optimizer.load_state_dict(subject.optimizer.state_dict())
    later.position = subject.position
    assert messages.stream_read_again(samples=24) in list_ineffective_settings(later)
    warnings = list_ineffective_settings(make_trainer(job, alone, batch=12))
    assert "stream-read-again" not in [warning.code for warning in warnings]
    list(worker_train_loop.run_steps(later))
    assert are_equal(copy_weights(later), whole)


def test_a_stream_is_evaluated_once_over_all_ranks(alone: Ranks) -> None:
    job = stream()
    results = []
    for rank in range(3):
        loader = build_eval_loader(build_datasets(job).eval, rank=rank, world=3, batch=3, workers=0, pin=False)
        batches = list(loader)
        assert len(loader) == len(batches)
        results += [number for values, _ in batches for number in values[:, 0].tolist()]
    assert sorted(number % 100 for number in results) == list(range(10))
    assert Evaluator(make_trainer(job, alone, batch=12)).evaluate().samples == 10


def test_a_dataset_that_shares_itself_out_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job, seen = stream("Shares", sharded=True), []
    for rank in range(2):
        monkeypatch.setattr(token_jobs.Shares, "ranks", (rank, 2))
        batches = MicroBatchSampler(
            36,
            ramp=Ramp.from_constant_batch(12),
            parts={12: 1},
            rank=rank,
            world=2,
            seed=3,
            epochs=1,
            start=TrainingPosition(done=12, samples=12),
        )
        loader = build_train_loader(build_datasets(job).train, batches, workers=0, pin=False)
        seen += [number for values, _ in loader for number in values[:, 0].tolist()]
    assert sorted(seen) == list(range(12, 36))


def test_a_stream_that_ends_early_is_reported(alone: Ranks) -> None:
    with pytest.raises(SpecError, match="dataset Stream ended after 40 samples instead of 60"):
        train_to_end(stream(length=60), alone, batch=12)


@pytest.mark.parametrize(
    ("error", "message", "permanent"),
    [
        (SpecError("it ends after 40 samples", "set length"), "SpecError: it ends after 40 samples (set length)", True),
        (KeyError("image"), "KeyError: 'image'", False),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "odd"), "UnicodeDecodeError: 'utf-8' codec can't decode", False),
    ],
)
@pytest.mark.parametrize("from_loader", [True, False])
def test_failure_of_a_rank_has_message_and_hint_of_the_original_error(
    error: Exception,
    message: str,
    permanent: bool,
    from_loader: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDir.create(tmp_path, make_runs.spec())
    make_runs.add_training(run)
    (task,) = run.read_snapshot().tasks
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(type(error)) as raised:
        raise error
    if from_loader:
        wrapper = ExceptionWrapper((raised.type, raised.value, raised.tb), "in DataLoader worker process 0")
        with pytest.raises((type(error), RuntimeError), match="Caught") as raised:
            wrapper.reraise()
    worker_program.exit_with_failure(raised.value, task, run, 1)
    (failure,) = run.read_failures(task.id, 1)
    assert failure.message.startswith(message) and "HINT" not in failure.message
    assert (failure.outcome, failure.permanent) == ("user", permanent and from_loader)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (stream(length=None), "Stream has no length"),
        (stream(sampler="token_jobs:rare_first"), "an iterable dataset, which determines its own order"),
        (
            stream(train={"method": "auto"}),
            "train.method auto selects samples by index, which is not possible with an iterable dataset",
        ),
        (
            make_token_job(dataset={"sampler": "token_jobs:padded"}, train={"method": "auto"}),
            "not possible with dataset.sampler",
        ),
        (stream(train={"diagnostics": ["hessian"]}), "train.diagnostics: hessian selects samples by index"),
        (make_token_job(dataset={"length": 7}), "are only for iterable datasets"),
        (make_token_job(dataset={"eval_length": 7}), "is only for iterable datasets"),
        (make_token_job(dataset={"sampler": "token_jobs:padded"}), "sampler"),
        (make_token_job(dataset={"sampler": "token_jobs:nosuch"}), "nosuch"),
    ],
)
def test_what_a_stream_and_a_sampler_cannot_do_is_refused(job: JobSpec, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build_datasets(job)


def test_check_refuses_a_dataset_that_only_the_arms_of_a_training_could_use() -> None:
    with pytest.raises(SpecError, match=r"train\.method auto selects samples by index"):
        inspect_job(stream(train={"method": "auto"}))


def test_check_knows_the_length_that_is_stated() -> None:
    result = inspect_job(stream())
    assert (result.dataset_size, result.eval_size, result.sample_shape, result.warnings) == (36, 10, (2,), ())


# --- samplers


def test_a_sampler_gives_the_order_of_every_epoch() -> None:
    job = make_token_job(dataset={"sampler": {"token_jobs:rare_first": {"times": 2}}})
    train = build_datasets(job).train
    for epoch in range(2):
        expected = token_jobs.rare_first(train.samples, epoch, 3, times=2)
        batches = MicroBatchSampler(len(train), ramp=Ramp.from_constant_batch(16), parts={16: 1}, rank=0, world=1, seed=3, epochs=2,
                          start=TrainingPosition(epoch=epoch), order=train.draw_epoch_order)  # fmt: skip
        assert [index for _, index in itertools.chain(*itertools.islice(batches, 4))] == expected


def sixteen(samples: Any) -> WeightedRandomSampler:
    """Return torch's sampler, which draws from the process's random numbers."""
    return WeightedRandomSampler(torch.arange(len(samples)).double(), 16)


def test_a_sampler_of_torchs_is_drawn_anew_for_each_epoch_and_alike_on_each_rank() -> None:
    job = make_token_job(dataset={"sampler": f"{__name__}:sixteen"})
    first, other = build_datasets(job).train, build_datasets(job).train
    assert len(first) == 16
    orders = [first.draw_epoch_order(epoch) for epoch in (0, 1, 0)]
    assert torch.equal(orders[0], orders[2]) and not torch.equal(orders[0], orders[1])
    torch.rand(3)
    assert torch.equal(orders[1], other.draw_epoch_order(1))
