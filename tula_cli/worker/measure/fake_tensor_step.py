"""Estimate of the memory of an optimizer step: runs it on fake tensors, without a GPU, and records each allocation.

Fake tensors have shapes and storages but no data. A dispatch mode sees every operation, forward and backward, and records
when each storage is created and freed. One run with fake tensors is enough for all batches: its batch is a prime number,
so that sizes divisible by it grow with the batch. The recording is then replayed at any batch, for a GPU through a
simulation of PyTorch's allocator.

A recording lacks memory that no operation allocates, such as the workspaces that cuDNN or oneDNN choose by measuring.
`estimate_library_bytes` estimates the memory of libraries besides tensors; probes correct both.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.allocator import AllocatorPeaks, compute_peak_without_allocator, replay_allocations
from tula_cli.optim.gradient_stats import chunk_indices
from tula_cli.plugins import is_import_string
from tula_cli.run.records.probes import Components, Footprint
from tula_cli.spec.job import JobSpec
from tula_cli.worker import messages
from tula_cli.worker.build import zoo
from tula_cli.worker.build.activation_checkpointing import apply_activation_checkpointing
from tula_cli.worker.build.batches import Collate, ModelCall, allocate_batch, list_named_entries, make_batch
from tula_cli.worker.build.parameter_groups import make_parameter_groups
from tula_cli.worker.build.transformers_models import assume_one_sequence_per_sample
from tula_cli.worker.device import count_tensor_bytes, make_autocast_context
from tula_cli.worker.measure.meter import split_memory
from tula_cli.worker.methods.ags import list_excluded_parameters
from tula_cli.worker.methods.plain import Memory
from tula_cli.worker.methods.table import get_method
from tula_cli.worker.parallel.sharding import list_fsdp_blocks

# --- Storages


class LiveStorages(TorchDispatchMode):
    """Records when tensor storages are created and freed while active; counts the bytes in use, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak = 0  # maximum of live_bytes
        self.events: list[int] = []  # n + 1: storage n is created; -(n + 1): it is freed
        self.sizes: list[int] = []  # bytes of each storage, by number
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.track_storages(tree_leaves(result))
        return result

    def track_storages(self, values: Iterable[Any]) -> None:
        """Count the storages of the tensors among the values until they are freed."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._track_storage(value.untyped_storage())
        self.peak = max(self.peak, self.live_bytes)

    def restart(self) -> None:
        """Start a new peak at the bytes in use now."""
        self.peak = self.live_bytes

    def list_live_storages(self) -> list[int]:
        """Return the numbers of the storages in use, ascending."""
        return sorted(number for _, number in self._live.values())

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        number, size = len(self.sizes), storage.nbytes()
        # The Python object lives as long as the storage, even if only autograd in C++ holds it.
        self._live[key] = weakref.ref(storage, lambda _: self._release_storage(key)), number
        self.sizes.append(size)
        self.events.append(number + 1)
        self.live_bytes += size

    def _release_storage(self, key: int) -> None:
        _, number = self._live.pop(key)
        self.events.append(-number - 1)
        self.live_bytes -= self.sizes[number]


class GpuMemoryEmulation(TorchFunctionMode):
    """Runs operations on fake CPU tensors such that they need the memory that they would need on a GPU.

    torch has no backward pass on fake CUDA tensors if CUDA is missing. The differences: CUDA's dropout keeps a mask of
    one byte per element, and its autocast runs these functions in float32.
    """

    IN_FLOAT32 = frozenset({
        "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "kl_div",
        "binary_cross_entropy_with_logits", "smooth_l1_loss", "cosine_similarity", "normalize", "softplus", "norm", "cdist",
        "pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "reciprocal", "rsqrt", "exp", "expm1", "log", "log2",
        "log10", "log1p", "acos", "asin", "cosh", "sinh", "tan", "erfinv",
    })  # fmt: skip
    """Names in torch and torch.nn.functional, as torch's manual lists them under autocasting on CUDA."""
    SUMMED_IN_FLOAT32 = frozenset({"sum", "prod", "cumsum", "cumprod"})
    """Functions that read 16-bit tensors and write float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and (drop := _apply_fused_dropout(*args, **kwargs)) is not None:
            return drop
        name = getattr(func, "__name__", "")
        if name in self.IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _to_float32, (args, kwargs))
        if name in self.SUMMED_IN_FLOAT32 and torch.is_autocast_enabled("cpu") and _is_half_precision(args[0]):
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _apply_fused_dropout(
    values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor | None:
    """Return the dropout as CUDA's fused kernel computes it; None if that kernel would not run."""
    if inplace or not training or not 0 < p < 1:
        return None
    return torch.native_dropout(values, p, True)[0]


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_half_precision(tensor) else tensor


def _is_half_precision(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


# --- Buffers

MIB = 2**20
FIRST_BUCKET, BUCKET = MIB, 25 * MIB
"""Sizes in bytes at which DDP closes a bucket by default; the first one is small so that reducing starts early."""

CUDA_CONTEXT = 450 * MIB
"""The driver's context and the kernels, which are loaded when they are first used (CUDA_MODULE_LOADING=LAZY, the
default since CUDA 12.2): 300 to 550 MiB, depending on driver and architecture."""
CUBLAS_WORKSPACES = 2 * 32 * MIB
"""One per thread that calls cuBLAS, forward and backward: 32 MiB on Hopper, 8.1 MiB before
(CUBLAS_WORKSPACE_CONFIG)."""
CUDNN_WORKSPACE = 128 * MIB
"""Workspace of the algorithms that cuDNN chooses; from 0 to some hundred MiB, depending on layer and batch."""
NCCL_CONNECTION = 10 * MIB
"""Buffers of one channel to one peer: 4 MiB (NCCL_BUFFSIZE), 4.7 MiB for LL128 and 0.5 MiB for LL, in pieces of 2 MiB."""
NCCL_CHANNELS = {"one GPU a node": 2, "several": 24}
"""Channels over Ethernet or a single InfiniBand card, and over the NVLink of an A100."""
NCCL_PEERS = 3  # average number of peers per rank, with ring and tree


def make_ddp_buckets(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """Return each parameter's gradient as a view of its DDP bucket.

    tula wraps models with `gradient_as_bucket_view`, so the buckets are the only copy of the gradients. (Without that
    there would be a second one.) DDP fills the buckets from the last parameter backwards and closes one once it has
    reached its size.
    """
    views: dict[nn.Parameter, torch.Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        parameters_of_dtype = [p for p in reversed(parameters) if p.dtype == dtype]
        for members in _list_buckets(parameters_of_dtype):
            flat = torch.empty(sum(p.numel() for p in members), dtype=dtype)
            views.update(zip(members, split_flat(flat, members), strict=True))
    return views


def split_flat(flat: torch.Tensor, members: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the pieces of a flat tensor in the shapes of its members (`split` and `view` are slow on fake tensors)."""
    offset = 0
    for member in members:
        yield flat.as_strided(member.shape, member.stride(), offset)
        offset += member.numel()


def _list_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    limit = FIRST_BUCKET
    for parameter in parameters:
        bucket.append(parameter)
        if count_tensor_bytes(bucket) >= limit:
            yield bucket
            bucket, limit = [], BUCKET
    if bucket:
        yield bucket


def estimate_library_bytes(spec: JobSpec) -> int:
    """Estimate the GPU memory in bytes that libraries hold besides tensors, by rule of thumb; probes measure it.

    It covers the CUDA context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers: those of one connection, times
    channels and peers.
    """
    placement = "several" if spec.cluster.gpus_per_node > 1 else "one GPU a node"
    channels = NCCL_CHANNELS[placement] if spec.max_ranks > 1 else 0
    return CUDA_CONTEXT + CUBLAS_WORKSPACES + CUDNN_WORKSPACE + channels * NCCL_PEERS * NCCL_CONNECTION


# --- The step

CPU = torch.device("cpu")  # of fake tensors
REFERENCE_SAMPLES = 2**16 + 1
"""The micro-batch of the fake step: a prime of which layer sizes are unlikely to be multiples."""
SAMPLES_IN_FAKE_BATCH = 5
"""Copies of the sample in a batch: a number that occurs in no other size, to identify the tensors that grow with the
samples."""

ALLOCATOR_MARGINS = (1.01, 1.02, 1.04, 1.06, 1.08, 1.12, 1.16, 1.2)
"""Multiples of the memory in use that are tried as the GPU's capacity."""
MARGIN_MICRO_BATCHES = (32, 256)  # micro-batches at which the allocator margin is measured
HEAP_MARGIN = 1.5
"""The same margin for a process on the CPU, whose heap and workspaces take more than the tensors. Together with the
margin of 10 % it covers all of 14 networks, whose peaks were 1.1 to 1.65 times the memory in use."""


@dataclass(frozen=True)
class Recording:
    """The storages of one optimizer step; the first `in_use` numbers are in use when it starts."""

    early: int  # number of storages that exist before the first step: parameters, buffers, gradients
    in_use: int
    events: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes of each storage at the micro-batch of the fake step
    small: range  # numbers of the storages created for AGS's small batch

    def compute_sizes(self, micro_batch: int, *, small_batch: int) -> list[float]:
        """Return the bytes of each number at another micro-batch."""
        sizes = [
            _scale_size(size, micro_batch) if number >= self.in_use else float(size)
            for number, size in enumerate(self.sizes)
        ]
        for number in self.small:
            sizes[number] = _scale_size(self.sizes[number], min(small_batch, micro_batch))
        return sizes


def _scale_size(size: int, samples: int) -> float:
    """Return a size at a number of samples; it grows with the power of REFERENCE_SAMPLES that divides it."""
    power, quotient = 0, size
    while quotient and quotient % REFERENCE_SAMPLES == 0:
        power, quotient = power + 1, quotient // REFERENCE_SAMPLES
    return float(quotient * samples**power)


def _renumber_event(event: int, index_by_number: Mapping[int, int], shift: int) -> int:
    number = abs(event) - 1
    renumbered = index_by_number.get(number, number + shift) + 1
    return renumbered if event > 0 else -renumbered


@dataclass
class FakeStep:
    """A model and its optimizer on fake tensors, with the state that training has after its first step."""

    spec: JobSpec
    sample: Any  # a real batch of SAMPLES_IN_FAKE_BATCH copies of a sample
    gpu: bool  # whether the memory of a GPU is estimated, else that of a process on the CPU
    fake: FakeTensorMode
    storages: LiveStorages
    model: nn.Module
    call: ModelCall
    optimizer: torch.optim.Optimizer
    factors: list[torch.Tensor] = field(default_factory=list)
    buckets: Mapping[nn.Parameter, torch.Tensor] = field(default_factory=dict)  # gradients as views of DDP buckets
    early: int = 0  # number of storages created before the optimizer's state
    synchronise: bool = True
    _recording: Recording | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def scaled_parameters(self) -> list[nn.Parameter]:
        """The parameters that AGS scales if the method uses it: all except `list_excluded_parameters`."""
        if not self.spec.train.training_method.uses_section("ags"):
            return self.parameters
        excluded = set(list_excluded_parameters(self.model, self.spec.ags))
        return [p for p in self.parameters if p not in excluded]

    @property
    def has_elementwise_factors(self) -> bool:
        """Whether AGS has a factor per element; otherwise it has one per tensor."""
        return self.spec.ags.fill_from_preset().granularity == "element"

    @property
    def has_several_ranks(self) -> bool:
        """Whether some configuration has more than one rank."""
        return self.spec.max_ranks > 1

    @property
    def memory(self) -> Memory:
        """Return the memory that the method needs in a step."""
        return get_method(self.spec).estimate_memory(self.spec, self.scaled_parameters, several=self.has_several_ranks)

    def make_batch(self, size: int) -> Any:
        """Return a fake micro-batch shaped like the sample."""
        return allocate_batch(
            self.sample,
            samples=SAMPLES_IN_FAKE_BATCH,
            target_samples=size,
            from_user=self.spec.dataset.collate_fn is not None,
        )

    def measure_memory(self, micro_batch: int) -> Components:
        """Return the memory of one optimizer step at a micro-batch; the fake step itself is run only once."""
        usage = self._replay_allocations(micro_batch)
        return split_memory(
            self.model,
            self.optimizer,
            batch=micro_batch * count_tensor_bytes(tree_leaves(self.sample)) // SAMPLES_IN_FAKE_BATCH,
            factors=count_tensor_bytes(self.factors),
            peak=usage.allocated,
            reserved=usage.reserved,
            libraries=estimate_library_bytes(self.spec) if self.gpu else 0,
            accumulate=self.spec.train.accumulate,
        )

    def compute_allocator_margin(self) -> float:
        """Return the smallest capacity with which the allocator works, as a multiple of the memory in use.

        At that capacity the allocator returns cached memory during its first steps, and none once it has settled.
        """
        return max(map(self._measure_allocator_margin, MARGIN_MICRO_BATCHES)) if self.gpu else HEAP_MARGIN

    def _measure_allocator_margin(self, micro_batch: int) -> float:
        peak = self.measure_memory(micro_batch).peak
        for margin in ALLOCATOR_MARGINS:
            usage = self._replay_allocations(micro_batch, capacity=round(margin * peak))
            if usage.fits and not usage.flushes:
                return margin
        return ALLOCATOR_MARGINS[-1]

    def _replay_allocations(self, micro_batch: int, *, capacity: int | None = None) -> AllocatorPeaks:
        recording = self._recording = self._recording or self._record_step()
        sizes = recording.compute_sizes(micro_batch, small_batch=self.spec.requested_small_batch)
        if not self.gpu:
            peak = compute_peak_without_allocator(range(recording.in_use), recording.events, sizes)
            return AllocatorPeaks(allocated=peak, reserved=peak)
        early, late = range(recording.early), range(recording.early, recording.in_use)
        return replay_allocations(early, late, recording.events, sizes, capacity=capacity)

    def make_output(self, size: int) -> Any:
        """Return the model's fake output for `size` samples."""
        with self._activate_fake_mode():
            return self.call.compute_outputs(self.model, self.make_batch(size))

    def _record_step(self) -> Recording:
        """Run one optimizer step on fake tensors and record its storages."""
        with self._activate_fake_mode():
            alive = self.storages.list_live_storages()
            first_number, first_event = len(self.storages.sizes), len(self.storages.events)
            batch = self.make_batch(REFERENCE_SAMPLES)
            self._accumulate_gradients(batch)
            small = len(self.storages.sizes)
            staged = self._run_refresh(batch) if self.memory.small_batch else []
            small_end = len(self.storages.sizes)
            self._run_update(staged)
            events, sizes = self.storages.events[first_event:], self.storages.sizes
        index_by_number = {number: index for index, number in enumerate(alive)}
        shift = len(alive) - first_number  # renumber without the storages that were freed before
        return Recording(
            early=sum(number < self.early for number in alive),
            in_use=len(alive),
            events=tuple(_renumber_event(event, index_by_number, shift) for event in events),
            sizes=tuple(sizes[number] for number in [*alive, *range(first_number, len(sizes))]),
            small=range(small + shift, small_end + shift),
        )

    @contextmanager
    def _activate_fake_mode(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.fake)
            stack.enter_context(self.storages)
            # the key by which a batch describes packed sequences
            if "position_ids" not in (list_named_entries(self.sample) or ()):
                stack.enter_context(assume_one_sequence_per_sample())
            if self.gpu:
                stack.enter_context(GpuMemoryEmulation())
            yield

    def move_to_bucket(self, parameter: nn.Parameter) -> None:
        """Move a finished gradient into its bucket, of which it then is a view (gradient_as_bucket_view)."""
        if self.synchronise:
            parameter.grad = self.buckets[parameter]

    def _accumulate_gradients(self, batch: Any) -> None:
        """Run forward and backward of one or two micro-batches; only the last moves its gradients into the buckets.

        More than two micro-batches reach no higher peak.
        """
        micro_batches = min(2, self.spec.train.accumulate)
        for micro_batch in range(micro_batches):
            self.synchronise = micro_batch == micro_batches - 1
            with make_autocast_context(self.spec.train, CPU):
                loss = self.call.compute_loss(self.model, batch)
            loss.backward()

    def _run_refresh(self, batch: Any) -> list[torch.Tensor]:
        """Compute the small batch's gradient in addition to the large one's, as TulaOptimizer does."""
        with make_autocast_context(self.spec.train, CPU):
            loss = self.call.compute_loss(self.model, batch)
        used = [g for g in torch.autograd.grad(loss, self.scaled_parameters, allow_unused=True) if g is not None]
        if self.has_several_ranks:
            # As in the reduction: weighted copies are packed into one tensor before the first two copies are freed.
            weighted = [g * 1.0 for g in used]
            flat = torch.empty(sum(g.numel() for g in used), dtype=used[0].dtype)
            used = list(split_flat(flat, used))
            del weighted
        return used if self.has_elementwise_factors else [g.sum() for g in used]

    def _run_update(self, staged: list[torch.Tensor]) -> None:
        if self.spec.train.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.spec.train.max_grad_norm, error_if_nonfinite=False)
        new: list[torch.Tensor] = []
        if self.factors:  # new factors exist together with the old ones, which scale this step
            new = self._compute_factors(staged)
            if self.gpu:
                for chunk in chunk_indices(self.factors, range(len(self.factors))):
                    torch._foreach_mul([self.factors[i] for i in chunk], 1.0)  # temporaries of scale_on_device_
        # of the parameters whose update the method changes (scaled by AGS, or orthogonalised)
        copies = [p.detach().clone() for p in self.memory.before]
        self.optimizer.step()
        if copies and self.gpu and self.memory.after:
            for chunk in chunk_indices(copies, range(len(copies))):
                torch.empty(2 * sum(copies[i].numel() for i in chunk), dtype=copies[0].dtype)  # both results
        copies.clear()
        self.factors = new or self.factors
        self.optimizer.zero_grad()

    def _compute_factors(self, staged: list[torch.Tensor]) -> list[torch.Tensor]:
        """Turn the small batch's gradients into factors one by one: in place with several ranks, else in a
        temporary."""
        new: list[torch.Tensor] = []
        while staged:
            small = staged.pop(0)
            ratio = small + 1.0
            new.append(small if self.has_several_ranks else ratio)
        return new


def build_fake_step(
    spec: JobSpec, sample: Any, *, classes: int | None, gpu: bool = False, collate: Collate | None = None
) -> FakeStep:
    """Build the spec's model, loss and optimizer on fake tensors.

    Args:
        sample: a real sample of the training set, which determines the shapes of the batches.
        classes: number of classes of the dataset; None if unknown.
        gpu: whether to estimate the memory of a GPU, with PyTorch's allocator, or that of a process on the CPU.
        collate: makes a batch from samples; None: torch's default.

    Raises:
        SpecError: the model, the loss or the optimizer cannot be built.
    """
    fake, storages = FakeTensorMode(allow_non_fake_inputs=True), LiveStorages()
    model = _build_model(spec, classes, fake)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model)
    model.train()
    _convert_to_fake_tensors(model, fake)
    with fake:
        call = zoo.make_model_call(spec, model, zoo.build_loss(spec))
        optimizer = get_method(spec).build_base_optimizer(spec, make_parameter_groups(spec.optimizer, model))
    if gpu:
        _use_foreach_kernels(optimizer)
    batch = make_batch(collate, [sample] * SAMPLES_IN_FAKE_BATCH)
    fake_step = FakeStep(spec, batch, gpu, fake, storages, model, call, optimizer)
    with fake, storages:
        storages.track_storages([*model.parameters(), *model.buffers()])
        fake_step.buckets = make_ddp_buckets(fake_step.parameters)
        for parameter in fake_step.parameters:
            parameter.register_post_accumulate_grad_hook(fake_step.move_to_bucket)
            parameter.grad = fake_step.buckets[parameter]
        fake_step.early = len(storages.sizes)
        optimizer.step()  # creates the optimizer's state
        optimizer.zero_grad()
        if fake_step.memory.factors:
            fake_step.factors = [
                torch.empty_like(p) if fake_step.has_elementwise_factors else p.new_empty(())
                for p in fake_step.scaled_parameters
            ]
    return fake_step


def _build_model(spec: JobSpec, classes: int | None, fake: FakeTensorMode) -> nn.Module:
    """Build the model: torchvision's without random numbers, others with real values, because some read their
    values."""
    if is_import_string(spec.model.name) or spec.model.args.get("weights") is not None:
        return zoo.build_model(spec, classes)
    try:
        with fake:
            return zoo.build_model(spec, classes)
    # A constructor that reads values of fake tensors may fail in any way; an error of the model itself is raised below.
    except Exception:  # noqa: BLE001
        return zoo.build_model(spec, classes)


def _convert_to_fake_tensors(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace every parameter and buffer that is not fake by a fake one; tied ones remain tied."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    tensors[name] = fake.from_tensor(tensor)  # type: ignore[assignment]


def _use_foreach_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer process all tensors at once, as torch's optimizers do on a GPU by default."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


# --- The estimates of a job

MICRO_BATCHES = tuple(2**power for power in range(17))
"""Micro-batches at which an estimate is reported; between them memory is approximately linear."""


def estimate_footprints(fake_step: FakeStep, *, largest: int) -> tuple[Footprint, ...]:
    """Return the estimates at micro-batches of 1, 2, 4 ... up to the first one that is not below `largest`.

    The peak is the maximum over several moments of a step, each linear in the batch; at small batches it may be a
    moment that does not depend on the batch size (a large layer's gradient, a refresh of the factors).
    """
    below = [size for size in MICRO_BATCHES if size < largest]
    sizes = (*below, MICRO_BATCHES[min(len(below), len(MICRO_BATCHES) - 1)])
    accumulate, margin = fake_step.spec.train.accumulate, fake_step.compute_allocator_margin()
    gathered = _count_gathered_bytes(fake_step.model) if fake_step.spec.train.is_sharded else 0
    components = {
        size * accumulate: _add_unattributed_bytes(fake_step.measure_memory(size), gathered) for size in sizes
    }
    return tuple(
        Footprint(local_batch=b, memory=memory, room=round(margin * memory.peak)) for b, memory in components.items()
    )


def _count_gathered_bytes(model: nn.Module) -> int:
    """Return the bytes gathered besides a rank's shard of a model at the peak of a step (`train.parallel: fsdp`).

    Parameters outside all blocks stay gathered throughout. At the peak, the largest block accounts for its parameters,
    those of the next block, which is prefetched, its gradient, and the gradient of the block before, which is being
    reduced.
    """
    blocks, outside_blocks = _list_block_sizes(model)
    return outside_blocks + 4 * max(blocks, default=0)


def _list_block_sizes(model: nn.Module) -> tuple[list[int], int]:
    """Return the bytes of each block's parameters, without nested blocks, and of the parameters outside all blocks."""
    counted: set[nn.Parameter] = set()
    blocks = []
    for block in list_fsdp_blocks(model):  # inner blocks come first
        parameters = set(block.parameters()) - counted
        blocks.append(count_tensor_bytes(parameters))
        counted |= parameters
    return blocks, count_tensor_bytes(model.parameters()) - sum(blocks)


def describe_gathered_part(model: nn.Module) -> Diagnostic:
    """Describe which part of a model is gathered at a time (`train.parallel: fsdp`)."""
    blocks, outside_blocks = _list_block_sizes(model)
    return messages.gathered_blocks(blocks=len(blocks), largest=max(blocks, default=0), outside=outside_blocks)


def _add_unattributed_bytes(memory: Components, extra: int) -> Components:
    """Return the memory with additional bytes that belong neither to a state nor to the batch."""
    raised = {name: getattr(memory, name) + extra for name in ("activations", "peak", "reserved")}
    return memory.model_copy(update=raised) if extra else memory
