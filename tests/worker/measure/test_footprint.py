"""Memory estimated on fake tensors."""

import functools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest
import torch
import worker_jobs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from worker_rank_cases import read_results

from tula_cli.run.records.probes import Components
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Loss, Model
from tula_cli.worker.build import zoo
from tula_cli.worker.device import count_tensor_bytes
from tula_cli.worker.measure import fake_tensor_step
from tula_cli.worker.measure import meter as worker_measure_meter
from tula_cli.worker.measure.fake_tensor_step import (
    GpuMemoryEmulation,
    LiveStorages,
    Recording,
    build_fake_step,
    estimate_footprints,
    estimate_library_bytes,
)
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop

HELPERS = Path(__file__).parents[2] / "helpers"
MB = 10**6


def spec(model: str = "small_cnn", *, optimizer: dict | None = None, ags: dict | None = None, **train) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"name": model},
            "dataset": {"name": "FakeData"},
            "optimizer": optimizer or {"lr": 0.1, "momentum": 0.9},
            "train": {"epochs": 1, "method": "lbt", **train},
            "ags": ags or {},
            "search": {"nodes": [1]},
        }
    )


def gpt2(attention: str, length: int, **train) -> JobSpec:
    """Return a language model of four layers, without dropout."""
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": length, "vocab_size": 256}
    args = {"model_type": "gpt2", "attn_implementation": attention, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = {"name": "transformers:AutoModelForCausalLM", "args": {**args, **sizes}}
    optimizer = {"name": "AdamW", "lr": 1e-3}
    return spec(optimizer=optimizer, **train).model_copy(update={"model": Model(**model), "loss": Loss()})


def measure(job: JobSpec, micro_batch: int = 32, *, shape=(3, 32, 32)) -> Components:
    return build_fake_step(job, (torch.zeros(shape), 1), classes=10).measure_memory(micro_batch)


@pytest.mark.torch
def test_attention_takes_the_square_of_the_length_only_where_it_is_written_out():
    def activations(attention: str, length: int) -> int:
        ids = torch.zeros(length, dtype=torch.int64)
        return (
            build_fake_step(gpt2(attention, length), {"input_ids": ids, "labels": ids}, classes=None)
            .measure_memory(8)
            .activations
        )

    fused, written_out = ([activations(name, length) for length in (64, 256)] for name in ("sdpa", "eager"))
    assert 3.8 < fused[1] / fused[0] < 4.1, "transformers makes no mask where a sample is one sequence"
    scores = 4 * 8 * 4 * 256**2  # bytes of one layer's scores
    assert written_out[1] - fused[1] > 3 * scores


# --- the tracker


def test_storages_are_counted_until_they_die():
    with LiveStorages() as storages:
        item = torch.empty(1000)
        two = torch.empty(500)
        assert (storages.live_bytes, storages.peak) == (6000, 6000)
        del item
        assert (storages.live_bytes, storages.peak) == (2000, 6000)
        storages.restart()
        assert storages.peak == 2000
        del two
        assert storages.live_bytes == 0


def test_views_and_changes_in_place_take_nothing():
    with LiveStorages() as storages:
        values = torch.empty(1000)
        views = [values[:10], values.view(10, 100).t(), values.add_(1), values.detach()]
        assert storages.live_bytes == 4000
        del values
        assert storages.live_bytes == 4000
        del views
        assert storages.live_bytes == 0


def test_what_autograd_keeps_is_alive():
    weight = torch.ones(1000, requires_grad=True)
    with LiveStorages() as storages:
        result = (weight * 2).exp().sum()  # exp keeps its result
        assert storages.live_bytes >= 4000
        result.backward()
        del result
        assert storages.live_bytes == 4000  # the gradient
        del weight
    assert storages.peak >= 8000


# --- the estimate


def test_components_are_counted_from_tensors():
    result = measure(spec())
    numbers = 73_000
    assert result.parameters > result.gradients == result.optimizer  # buffers count as parameters
    assert result.gradients / 4 == pytest.approx(numbers, rel=0.15)
    assert result.factors == 0
    assert result.batch == 32 * (3 * 32 * 32 * 4 + 8)
    assert result.peak == result.static_bytes + result.batch + result.activations


@pytest.mark.parametrize(
    ("optimizer", "method", "copies"),
    [
        ({"lr": 1.0}, "lbt", 0),
        ({"lr": 1.0, "momentum": 0.9}, "lbt", 1),
        ({"name": "AdamW", "lr": 1.0}, "lbt", 2),
        ({"lr": 1.0}, "lars", 0),
        ({"lr": 1.0, "momentum": 0.9}, "lars", 1),
        ({"lr": 1.0, "momentum": 0.9}, "polo", 1),
        ({"lr": 1.0, "momentum": 0.9}, "static", 1),
        ({"lr": 1.0, "momentum": 0.9}, "ortho", 1),
        ({"name": "AdamW", "lr": 1.0}, "lamb", 2),
    ],
)
def test_optimizer_state_is_that_of_its_kind(optimizer, method, copies):
    result = measure(spec(optimizer=optimizer, method=method))
    assert result.factors == 0
    assert result.optimizer == pytest.approx(copies * result.gradients, rel=0.01)


def test_a_turned_step_holds_a_copy_of_the_matrices():
    result = measure(spec("vgg11", method="ortho"), 2)
    assert result.peak >= 1.99 * result.parameters + result.gradients + result.optimizer


def test_factors_are_one_copy_where_they_are_elementwise():
    plain, scaled = measure(spec()), measure(spec(method="ags", ags={"b_small": 8}))
    assert scaled.factors == scaled.gradients
    assert scaled.peak == plain.peak + scaled.factors  # the refresh stays below the peak of the large batch


def test_what_ags_leaves_out_has_no_factor_and_no_copy():
    model = zoo.build_model(spec(), 10)
    small = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 1)  # norms and biases
    left_out = {"parameters": ["*", "!norms", "!biases"]}
    whole, part = (spec("small_cnn", method="ags", ags=ags) for ags in ({}, left_out))
    assert measure(whole).factors - measure(part).factors == 4 * small > 0
    update = {"apply_to": "update", "granularity": "tensor"}
    copies = [len(build_fake_step(spec(method="ags", ags={**update, **ags}), (torch.zeros(3, 32, 32), 1), classes=10).memory.before)
              for ags in ({}, left_out)]  # fmt: skip
    assert copies[0] - copies[1] == len([p for p in model.parameters() if p.ndim == 1])
    assert measure(spec(method="lbt")).factors == measure(spec(method="lbt", ags=left_out)).factors == 0


def test_factors_of_tensors_are_a_number_each():
    job = spec(method="ags", ags={"granularity": "tensor"})
    assert measure(job).factors == 4 * len(list(zoo.build_model(job, 10).parameters()))
    assert (
        measure(spec("vgg11", method="ags", ags={"granularity": "tensor"}), 2).peak
        < measure(spec("vgg11", method="ags"), 2).peak - 1.5 * measure(spec("vgg11"), 2).gradients
    )


def test_local_norms_of_several_ranks_need_no_small_batch():
    plain, alone = spec("vgg11"), spec("vgg11", method="ags", ags={"preset": "robust"})
    several = alone.model_copy(update={"search": alone.search.model_copy(update={"nodes": [2]})})
    assert measure(several, 2).peak < measure(plain, 2).peak + 10_000
    assert measure(alone, 2).peak > measure(plain, 2).peak + 0.1 * measure(plain, 2).gradients


def test_a_scaled_update_holds_a_copy_of_the_parameters():
    jobs = [spec("vgg11", method="static", ags={"apply_to": to}) for to in ("gradient", "update")]
    gradient, update = (measure(job, 2) for job in jobs)
    kept = update.parameters + update.gradients + update.optimizer
    assert update.peak >= kept + update.parameters
    assert gradient.peak <= update.peak


def test_refresh_is_the_peak_where_parameters_dominate():
    job = spec("vgg11", method="ags")
    result = measure(job, 2)
    assert (
        result.peak >= 1.5 * result.gradients + result.parameters + result.optimizer + result.factors + result.gradients
    )
    assert measure(spec("vgg11"), 2).peak < result.peak - result.gradients


def test_activations_are_linear_in_the_batch():
    rehearsal = build_fake_step(spec(), (torch.zeros(3, 32, 32), 1), classes=10)
    small, middle, large = (rehearsal.measure_memory(size).activations for size in (16, 32, 64))
    assert large - middle == pytest.approx(2 * (middle - small), rel=0.02)


def test_measuring_again_gives_the_same():
    rehearsal = build_fake_step(spec(method="ags"), (torch.zeros(3, 32, 32), 1), classes=10)
    assert rehearsal.measure_memory(16) == rehearsal.measure_memory(16)


def test_half_precision_halves_most_activations():
    full, half = measure(spec(), 64), measure(spec(precision="bf16"), 64)
    assert 0.4 < half.activations / full.activations < 0.85
    assert half.parameters == full.parameters


def test_accumulation_holds_one_micro_batch_and_a_second_copy_of_the_gradients():
    single, several = measure(spec(), 16), measure(spec(accumulate=4), 16)
    assert several.batch == single.batch
    assert several.gradients == 2 * single.gradients
    assert several.activations == pytest.approx(single.activations, rel=0.1)
    single, several = (measure(spec("resnet18", accumulate=parts), 64, shape=(3, 64, 64)) for parts in (1, 2))
    assert several.peak - single.peak == pytest.approx(single.gradients, rel=0.05)


def test_buckets_are_closed_as_ddp_closes_them():
    """As DDP assigns them once it knows the order of the gradients: from the last parameter on."""
    model = zoo.build_model(spec("resnet18"), 10)
    parameters = list(model.parameters())
    assigned, _ = torch.distributed._compute_bucket_assignment_by_size(parameters[::-1], [2**20, 25 * 2**20])
    views = fake_tensor_step.make_ddp_buckets(parameters)
    results = {view.untyped_storage()._cdata: view.untyped_storage().nbytes() for view in views.values()}
    expected = [sum(parameters[::-1][i].numel() * 4 for i in bucket) for bucket in assigned]
    assert sorted(results.values()) == sorted(expected)
    assert all(views[p].shape == p.shape for p in parameters)


# --- for a GPU


def on_gpu(job: JobSpec, micro_batch: int = 32, *, shape=(3, 32, 32)) -> Components:
    return build_fake_step(job, (torch.zeros(shape), 1), classes=10, gpu=True).measure_memory(micro_batch)


def test_a_gpu_rounds_and_reserves():
    plain, rounded = measure(spec(), 64), on_gpu(spec(), 64)
    assert plain.peak < rounded.peak < 1.05 * plain.peak + 2**20
    assert rounded.reserved >= rounded.peak
    assert rounded.reserved % 2**21 == 0
    assert rounded.libraries > 400 * 2**20


def test_the_least_room_is_less_than_what_is_reserved():
    rehearsal = build_fake_step(spec("resnet18"), (torch.zeros(3, 64, 64), 1), classes=10, gpu=True)
    (*_, row) = estimate_footprints(rehearsal, largest=256)
    assert row.memory.peak < row.room < row.memory.reserved


def test_a_scaled_update_holds_both_outcomes_of_one_chunk_at_a_time_on_a_gpu():
    result = on_gpu(spec("vgg11", method="static", ags={"apply_to": "update"}), 2)
    largest = 4 * 25088 * 4096  # bytes of one matrix, a chunk of its own
    other = result.peak - result.parameters - result.gradients - result.optimizer - result.parameters  # with the copy
    assert other / largest == pytest.approx(2, abs=0.05)


def test_dropout_keeps_a_mask_of_bytes_on_a_gpu():
    job = spec("alexnet")
    cpu, gpu = (measure_(job, 256, shape=(3, 64, 64)).activations for measure_ in (measure, on_gpu))
    masks = 256 * (256 * 6 * 6 + 4096)  # elements of the two dropouts
    assert masks < cpu - gpu < 3 * masks  # three bytes less each, but for what is rounded


def test_adam_takes_all_tensors_at_once_on_a_gpu():
    job = spec("resnet18", optimizer={"name": "AdamW", "lr": 1.0})
    assert on_gpu(job, 1).peak > measure(job, 1).peak + 0.5 * measure(job, 1).gradients


def test_autocast_keeps_layer_norms_wide_on_a_gpu():
    blocks = {"image_size": 224, "patch_size": 16, "num_layers": 2, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
    model = Model(name="torchvision.models:VisionTransformer", args=blocks)
    job = spec(precision="bf16").model_copy(update={"model": model})
    cpu, gpu = (measure_(job, 8, shape=(3, 224, 224)).activations for measure_ in (measure, on_gpu))
    assert gpu > 1.02 * cpu


WIDE = {
    "a power": lambda x: x**2,
    "its method": lambda x: x.pow(2),
    "rsqrt": torch.rsqrt,
    "exp": lambda x: x.exp(),
    "one over": lambda x: 1 / x,
    "norm": lambda x: x.norm(),
    "sum": lambda x: x.sum(-1),
    "loss": lambda x: torch.nn.functional.mse_loss(x, x),
}


@pytest.mark.parametrize("how", WIDE)
def test_autocast_on_a_gpu_computes_in_float32_what_torchs_manual_says(how):
    values = torch.ones(4, 4, dtype=torch.bfloat16)
    with GpuMemoryEmulation():
        assert WIDE[how](values).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert WIDE[how](values).dtype == torch.float32
            assert (values * 2).dtype == values.mean().dtype == torch.bfloat16


def test_a_norm_that_is_written_out_takes_more_under_autocast_on_a_gpu():
    class Norm(torch.nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def peak(gpu: bool) -> int:
        storages, narrow = LiveStorages(), torch.bfloat16
        with (
            FakeTensorMode(),
            storages,
            GpuMemoryEmulation() if gpu else nullcontext(),
            torch.autocast("cpu", dtype=narrow),
        ):
            x = torch.empty(64, 256, dtype=narrow, requires_grad=True)
            Norm()(x).sum().backward()
        return storages.peak

    assert peak(True) > 1.3 * peak(False)


def test_factors_scale_on_the_device_with_a_copy_for_a_moment():
    job = spec("vgg11", method="ags")
    assert on_gpu(job, 1).peak >= measure(job, 1).peak
    assert on_gpu(job, 1).factors == measure(job, 1).factors


def test_libraries_grow_with_the_connections():
    def of(nodes: int, gpus: int) -> int:
        content = {**spec().model_dump(), "search": {"nodes": [nodes]}, "cluster": {"gpus_per_node": gpus}}
        return estimate_library_bytes(JobSpec.model_validate(content))

    alone, two, inside = of(1, 1), of(2, 1), of(1, 4)
    assert 400 * 2**20 < alone < two < inside < 2 * 2**30
    assert of(16, 1) == two, "a ring and a tree have as many neighbours at any size"


def test_footprints_are_reported_up_to_the_dataset():
    footprints = estimate_footprints(
        build_fake_step(spec("vgg11"), (torch.zeros(3, 32, 32), 1), classes=10), largest=100
    )
    assert [row.local_batch for row in footprints] == [1, 2, 4, 8, 16, 32, 64, 128]
    memorys = [row.memory for row in footprints]
    assert memorys[0].peak == pytest.approx(memorys[3].peak, rel=0.02), "one layer's gradient, whatever the batch"
    assert memorys[-1].peak > 1.05 * memorys[0].peak
    assert all(memory.peak == memory.reserved and memory.libraries == 0 for memory in memorys)
    assert [row.room for row in footprints] == [round(1.5 * memory.peak) for memory in memorys], (
        "with holes in the heap"
    )


def test_the_local_batch_of_a_footprint_counts_all_micro_batches():
    rows = estimate_footprints(build_fake_step(spec(accumulate=4), (torch.zeros(3, 32, 32), 1), classes=10), largest=2)
    assert [row.local_batch for row in rows] == [4, 8]


def test_one_rehearsal_tells_every_batch():
    """Scaling from the batch of the fake step gives what a fake step at that batch counts."""
    job = spec(method="ags", ags={"b_small": 8}, accumulate=2)
    rehearsal = build_fake_step(job, (torch.zeros(3, 32, 32), 1), classes=10)
    answer = rehearsal.measure_memory(24)
    for number in (23, 47):  # primes that no layer's size is a multiple of
        fake_tensor_step.REFERENCE_SAMPLES, kept = number, fake_tensor_step.REFERENCE_SAMPLES
        try:
            assert build_fake_step(job, (torch.zeros(3, 32, 32), 1), classes=10).measure_memory(24) == answer
        finally:
            fake_tensor_step.REFERENCE_SAMPLES = kept


def test_sizes_grow_with_every_power_of_the_batch():
    numbers = fake_tensor_step.REFERENCE_SAMPLES
    recording = Recording(
        early=1, in_use=1, events=(), sizes=(numbers, 12 * numbers, 4 * numbers**2, 40), small=range(2, 3)
    )
    assert recording.compute_sizes(10, small_batch=6) == [numbers, 120, 4 * 36, 40]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("resnet50", 224, marks=pytest.mark.proof),
        ("vgg11", 224),
        pytest.param("mobilenet_v3_large", 224, marks=pytest.mark.proof),
    ],
)
def test_activation_checkpointing_lowers_the_peak(name, size):
    batch = 64
    plain, recomputed = (
        measure(spec(name, activation_checkpointing=choice), batch, shape=(3, size, size)) for choice in (False, True)
    )
    assert recomputed.activations < 0.75 * plain.activations


def test_a_fake_step_works_where_initialisation_reads_what_it_drew():
    result = measure(spec("vit_b_16"), 2, shape=(3, 224, 224))
    assert result.parameters == pytest.approx(343 * MB, rel=0.01)


def test_tied_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(300, 300, bias=False)
            self.two = nn.Linear(300, 300, bias=False)
            self.two.weight = self.one.weight

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(values))

    sys.modules["tied_model"] = type(sys)("tied_model")
    sys.modules["tied_model"].Tied = Tied
    try:
        result = measure(spec("tied_model:Tied"), 4, shape=(300,))
    finally:
        del sys.modules["tied_model"]
    assert result.parameters == 300 * 300 * 4


# --- against reality

COUNTED = {
    "plain": {},
    "adamw": {"optimizer": {"name": "AdamW", "momentum": 0.0}},
    "elements": {"train": {"method": "ags"}, "ags": {"b_small": 4}},
    "tensors": {"train": {"method": "ags"}, "ags": {"b_small": 4, "granularity": "tensor"}},
    "accumulated": {"train": {"accumulate": 4}},
    "bf16": {"train": {"precision": "bf16"}},
}


@pytest.mark.parametrize("name", COUNTED)
def test_components_are_those_of_the_real_training(name: str, alone: Ranks):
    job = worker_jobs.make_spec(model={"args": {"norm": True}}, **COUNTED[name])
    subject = worker_jobs.make_trainer(job, alone, batch=32)
    list(islice(worker_train_loop.run_steps(subject), 2))
    real = worker_measure_meter.split_memory(
        subject.parallel.module,
        subject.base,
        batch=count_tensor_bytes(subject.last_batch),
        factors=subject.ags.compute_memory() if subject.ags else 0,
        peak=10**9,
        reserved=10**9,
        accumulate=job.train.accumulate,
    )
    answer = build_fake_step(job, subject.datasets.train[(0, 0)], classes=3).measure_memory(32 // job.train.accumulate)
    for part in ("parameters", "gradients", "optimizer", "factors", "batch"):
        assert getattr(answer, part) == getattr(real, part), part


@pytest.mark.proof
@pytest.mark.torch
def test_gradients_are_in_the_buckets_of_ddp_and_apart_while_they_accumulate(two_ranks: Path):
    views = fake_tensor_step.make_ddp_buckets(list(zoo.build_model(spec("resnet18"), 10).parameters()))
    expected = {view.untyped_storage()._cdata: view.untyped_storage().nbytes() for view in views.values()}
    for fact in read_results(two_ranks, "list_bucket_storages"):
        assert fact["reduced"] == fact["reduced again"]
        assert sorted(fact["reduced"]) == sorted(expected.values())
        assert len(fact["accumulated"]) == len(views), "a storage for each parameter, beside the buckets"
        assert sum(fact["accumulated"]) == sum(fact["reduced"])
        assert fact["kept"], "the buckets stay when the gradients are dropped"


CASES = {
    "small_cnn": (spec("small_cnn"), 128, 32),
    "resnet18": (spec("resnet18"), 24, 64),
    "mobilenet_v3_small": (spec("mobilenet_v3_small"), 48, 96),
    "checkpointing": (spec("resnet18", activation_checkpointing=True), 24, 64),
    "ags": (spec("resnet18", method="ags", ags={"b_small": 6}), 24, 64),
    "adamw": (spec("resnet18", optimizer={"name": "AdamW", "lr": 1e-3}), 16, 64),
    "text-sdpa": (gpt2("sdpa", 512), 8, 512),
    "text-eager": (gpt2("eager", 256), 16, 256),
    "text-bf16": (gpt2("sdpa", 256, precision="bf16"), 16, 256),
    "text-recomputed": (gpt2("sdpa", 256, activation_checkpointing=True), 16, 256),
}


SHORT = ("ags",)
"""The case of `make test`; each group is one process."""


@functools.cache
def peaks(*, short: bool) -> dict[str, dict[str, int]]:
    """Return estimated and measured peaks on the CPU of a group of cases, in bytes."""
    requests = {
        name: {
            "spec": job.model_dump(mode="json"),
            "batch": batch,
            **({"length": size} if name.startswith("text") else {"shape": [3, size, size]}),
        }
        for name, (job, batch, size) in CASES.items()
        if (name in SHORT) is short
    }
    # Freed tensors go back to the system at once, or the allocator's leftovers would count as the model's.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HELPERS.parent.parent), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, str(HELPERS / "peak_memory.py")],
        input=json.dumps(requests), capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    data: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return data


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.proof) for name in CASES]
)
def test_estimate_agrees_with_the_measured_peak(name):
    of_case = peaks(short=name in SHORT)[name]
    estimated, measured = of_case["estimated"], of_case["measured"]
    assert 0.85 < estimated / measured < 1.05, (estimated / MB, measured / MB)
