"""Out-of-memory fallbacks: the same batch in smaller micro-batches as long as possible, then a smaller batch."""

from collections.abc import Callable, Iterable, Sequence

from tula_cli.models.choice.grid import Config, Number
from tula_cli.run.records.failures import Fallback
from tula_cli.run.records.results import MicroBatches, Splits
from tula_cli.spec.job import JobSpec

MIN_NORMALISED = 8
"""Minimum samples for BatchNorm statistics: with fewer, their noise, not the batch, decides what is learned (Wu and He
2018, figure 1: the error of ResNet-50 grows from 8 samples downwards)."""


def describe_why_not_splittable(spec: JobSpec) -> str:
    """Return why a job's micro-batches must not be split after an out-of-memory error; empty if they may."""
    if spec.train.oom_policy == "shrink":
        return "train.oom_policy is shrink"
    return spec.workload.describe_accumulation_conflict()


def list_allowed_splits(spec: JobSpec, config: Config) -> tuple[int, ...]:
    """Return the numbers of parts into which a configuration's micro-batches may be split; none if they must not be."""
    if describe_why_not_splittable(spec):
        return ()
    accumulate, local_batch = spec.train.accumulate, config.compute_local_batch(spec.cluster.gpus_per_node)
    return list_splits(config.batch, micro_batch=local_batch // accumulate, micro_batches=accumulate).into


def list_splits(
    batch: int, *, micro_batch: int, micro_batches: int, limits: Sequence[tuple[Callable[[int], bool], str]] = ()
) -> Splits:
    """Return the numbers of equal parts into which a micro-batch may be split, each at least twice the previous.

    A micro-batch of 12 is split into 2, 4 and 12 parts: a ragged part, whose samples would weigh more, never occurs.

    Args:
        micro_batch: samples of a micro-batch before splitting.
        micro_batches: per step on one GPU, before splitting.
        limits: conditions on a smaller micro-batch, each with the reason to report if it is not met.
    """
    splits: list[int] = []
    least, limit = 2, "they have one sample each"
    for split in list_divisors(micro_batch):
        if split < least:
            continue
        broken = [why for holds, why in limits if not holds(micro_batch // split)]
        if broken:
            limit = broken[0]
            break
        splits.append(split)
        least = 2 * split
    return Splits(batch=batch, micro_batch=micro_batch, micro_batches=micro_batches, into=tuple(splits), limit=limit)


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    divisors, remaining, prime = {1}, number, 2
    while remaining > 1:
        if prime * prime > remaining:
            prime = remaining
        if remaining % prime:
            prime += 1
        else:
            remaining //= prime
            divisors |= {divisor * prime for divisor in divisors}
    return sorted(divisors)


def make_batch_norm_limit(*, ranks: int = 1) -> tuple[Callable[[int], bool], str]:
    """Return the condition that BatchNorm imposes on a micro-batch, and its description.

    Args:
        ranks: number of ranks over which statistics are taken (SyncBatchNorm), else 1.
    """

    def is_met(micro_batch: int) -> bool:
        return micro_batch * ranks >= MIN_NORMALISED

    return is_met, f"BatchNorm would compute its statistics over fewer than {MIN_NORMALISED} samples"


def find_next_fallback(
    batches: Sequence[int],
    splits: int,
    micro_batches: MicroBatches | None,
    *,
    why_not: str = "",
    stage: int | None = None,
) -> Fallback | None:
    """Return the next fallback after an out-of-memory error, or None if no remaining configuration uses less memory.

    Memory grows with the size of the micro-batch, not with the number of them: a smaller batch whose micro-batches are
    not smaller would not fit either and is skipped.

    Args:
        batches: OOM fallbacks in descending order; the first one did not fit.
        splits: parts into which its micro-batches were split.
        micro_batches: how far micro-batches may be split; None if unknown.
        why_not: why they must not be split in this training; empty if they may.
        stage: the batch in use if it is a smaller one (`train.ramp`); its own micro-batches have to become smaller.
    """
    did_not_fit = Fallback(rung=0, splits=1, batch=batches[0], stage=stage)
    batch_splits = micro_batches.get_splits(batches[0]) if micro_batches is not None else None
    if why_not or micro_batches is None or batch_splits is None:
        limit = why_not or "the ranks ended before they reported how far micro-batches can be split"
        return did_not_fit.model_copy(update={"rung": 1, "limit": limit}) if len(batches) > 1 else None
    failed = batch_splits.micro_batch / max(splits, 1 if stage is None else batches[0] / stage)
    following = next((split for split in batch_splits.into if batch_splits.micro_batch / split < failed), None)
    if following is not None:
        smaller_micro_batches = {
            "splits": following,
            "micro_batch": batch_splits.micro_batch // following,
            "micro_batches": batch_splits.micro_batches * following,
            "normalised": micro_batches.normalised * batch_splits.micro_batch // following,
        }
        return did_not_fit.model_copy(update=smaller_micro_batches)
    uncut = {"failed_micro_batch": int(failed), "limit": batch_splits.limit}
    for index, batch in enumerate(batches[1:], 1):
        smaller = micro_batches.get_splits(batch)
        if smaller is None:
            continue
        for split in (1, *smaller.into):
            if smaller.micro_batch / split < failed:
                return did_not_fit.model_copy(update={"rung": index, "splits": split, **uncut})
    return None


def find_smallest_excluding_oom(
    ooms: Iterable[tuple[int, int]], nodes: int, local_batch: int, *, sharded: bool
) -> int | None:
    """Return the smallest out-of-memory local batch that rules out a configuration, or None if none does.

    Args:
        ooms: (nodes, local batch) of each probe that was out of memory.
        nodes, local_batch: of the configuration.
        sharded: whether the GPUs share the model, so that more nodes may leave more memory per GPU, but fewer nodes
            never do.
    """
    return min(
        (oom[1] for oom in ooms if is_configuration_ruled_out(oom, nodes, local_batch, sharded=sharded)), default=None
    )


def is_configuration_ruled_out(oom: tuple[int, int], nodes: Number, local_batch: Number, *, sharded: bool) -> Number:
    """Return whether an out-of-memory probe rules out a configuration, or each of an array of configurations."""
    count, size = oom
    return (size <= local_batch) & (nodes <= count) if sharded else size <= local_batch
