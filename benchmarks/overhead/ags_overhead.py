"""Additional step time and memory of adaptive gradient scaling (AGS), measured side by side with the same step without AGS.

    python benchmarks/overhead/ags_overhead.py [--models resnet50,vgg11] [--batch 32] [--rounds 15] [--image 224]
                                      [--device auto] [--precision fp32] [--most 48GiB] [--threads N] [--cpu-time]
                                      [--no-memory] [--json] [--keep FILE]
    torchrun --nproc-per-node 2 benchmarks/overhead/ags_overhead.py ...       (local norms need ranks; --threads is per rank)

One process measures one model, one batch and one base optimizer (that of tula: fused SGD with momentum and weight decay). A round
has one step of each variant, in a random order, by the functions of tula's training loop. A ratio is that of a variant's step to the
mean of the round's two plain steps; shown are the median over the rounds, a 95 % bootstrap interval of the median, and the
difference of the two plain steps, which is the noise. Forward and backward passes are equal in all variants, so the update is also
timed separately: "by update" is the ratio if only the update differed, which varies less on a shared machine; so does `--cpu-time`,
which excludes the time of other processes (on the CPU, with one thread).

Variants: plain; unscaled (AGS with element factors in a step that Algorithm 1 leaves unscaled, which computes only the norm);
element, tensor, static (scaled steps); robust (new factors in each step: in one process from a small batch, with several ranks from
the ranks' norms, which are computed in the backward pass and so are not in "by update"); and on request clip (element with gradient
clipping) and ortho (orthogonalised steps). A refresh is timed separately, as the time that it adds to a scaled step.

With a GPU, the largest local batch that fits into `--most`, a power of two times `--batch`, is measured in addition. `--keep` writes
all results after each model. Memory is the additional memory of AGS compared with the plain step, measured in a separate process
with 4 samples: permanently, and at the peak of a step with a refresh, in copies of the parameters.
"""

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path += [str(path) for path in (BENCHMARKS, BENCHMARKS / "operations") if str(path) not in sys.path]

from tula_cli.presets import AGS_PRESETS  # noqa: E402
from tula_cli.run.files import write_file_atomically  # noqa: E402
from tula_cli.spec.kinds import parse_size  # noqa: E402

if TYPE_CHECKING:
    import torch

    from tula_cli.worker.ranks import Ranks
    from tula_cli.worker.train.loop import Trainer

MODELS = {"resnet50": (224, 1000), "vgg11": (32, 100), "alexnet": (224, 101), "mobilenet_v3_large": (224, 257)}
"""Image size and number of classes of the paper's four jobs (Table I)."""
FURTHER_MODELS = {"resnet18_cifar": (32, 10)}

PLAIN_VARIANT, SECOND_PLAIN_VARIANT = "plain", "plain again"
VARIANTS: dict[str, dict[str, Any]] = {
    "unscaled": {"delta": 0.0},
    "element": {"delta": "inf"},
    "tensor": {"delta": "inf", "granularity": "tensor"},
    "static": {"delta": "inf"},
    "robust": dict(AGS_PRESETS["robust"]),
}
"""Changes of preset "paper" by variant."""
STATIC_FACTOR = 2.0
CLIP, ORTHO = "clip", "ortho"
ALL_VARIANTS = [*VARIANTS, CLIP, ORTHO]
REFRESHING_VARIANTS = ("element", "tensor")
VARIANTS_WITH_FACTORS = (*REFRESHING_VARIANTS, CLIP)
MAX_GRAD_NORM = 1.0
"""Gradient norm of clipping."""
STEPS_BETWEEN_REFRESHES = 100
"""Steps between two refreshes, for the share of a refresh."""

NEVER_REFRESH_STEPS = 10**9
RESAMPLES = 2000


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: total, and of its update (with a refresh: and of the small batch)."""

    step: float
    update: float


@dataclass(frozen=True)
class Row:
    """One variant compared with the plain step."""

    variant: str
    ratio: float  # median over the rounds
    low: float
    high: float  # 95 % interval of that median
    by_update: float  # the ratio if only the update differed
    milliseconds: float  # additional time of the update, median


@dataclass(frozen=True)
class Refresh:
    """Additional time of a refresh in a scaled step."""

    variant: str
    milliseconds: float
    of_a_step: float  # relative to the plain step
    share: float  # of a training with BETWEEN steps between refreshes


@dataclass(frozen=True)
class MemoryCost:
    """Additional memory compared with a plain training, in copies of the parameters."""

    variant: str
    lasting: float
    peak: float  # in a step with a refresh (or in a scaled step of variants without one)


@dataclass(frozen=True)
class Outcome:
    """One model at one local batch."""

    model: str
    image: int
    batch: int
    parameters: int
    ranks: int
    rounds: int
    step_milliseconds: float  # plain, median
    update_milliseconds: float
    control: float  # ratio of the two plain steps, median
    rows: tuple[Row, ...]
    refreshes: tuple[Refresh, ...]
    memory: tuple[MemoryCost, ...]


# --- the steps


class Bench:
    """One model with all variants of its base optimizer.

    Args:
        model: of torchvision.
        image: side of the images.
        classes: outputs.
        batch: of one rank.
        me: the group; with several ranks, `robust` has a separate model, because its hook cannot be removed.
        names: the variants.
        cpu_time: measure CPU time of this process instead of wall time.
        precision: of train.precision.
    """

    def __init__(
        self,
        model: str,
        *,
        image: int,
        classes: int,
        batch: int,
        me: "Ranks",
        names: Sequence[str],
        cpu_time: bool = False,
        precision: str = "fp32",
    ) -> None:
        import torch

        from tula_cli.worker.methods.table import make_method

        self.batch, self.me, self.cpu_time = batch, me, cpu_time
        self.plain = build_trainer(model, image=image, classes=classes, batch=batch, me=me, precision=precision)
        generator = torch.Generator().manual_seed(me.rank)
        self.inputs = torch.randn(batch, 3, image, image, generator=generator).to(me.device)
        self.targets = torch.randint(classes, (batch,), generator=generator).to(me.device)
        self.trainers = {PLAIN_VARIANT: self.plain, SECOND_PLAIN_VARIANT: self.plain}
        for name in names:
            value = name == "robust" and me.world > 1
            base = self.plain
            if value:
                base = build_trainer(model, image=image, classes=classes, batch=batch, me=me, precision=precision)
            method = make_method("ortho" if name == ORTHO else "ags")
            self.trainers[name] = replace(base, optimizer=make_optimizer(base, name, batch=batch), method=method)
        self.plain.parallel.train()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.plain.parallel.parameters())

    def step(self, name: str) -> Callable[[], StepTimes]:
        """Run one step; return a function that waits for the device and returns the times."""
        from tula_cli.worker.train import loop as worker_train_loop

        trainer = self.trainers[name]
        mark = time.process_time if self.cpu_time else trainer.clock.mark
        start = mark()
        worker_train_loop._run_backward(trainer, itertools.repeat((self.inputs, self.targets)), start)
        middle = mark()
        worker_train_loop._refresh_scaling_factors(trainer)
        worker_train_loop._update_weights(trainer)
        end = mark()
        seconds = trainer.clock.measure_seconds
        return lambda: StepTimes(step=seconds(start, end), update=seconds(middle, end))

    def step_with_refresh(self, name: str) -> Callable[[], StepTimes]:
        ags = self.trainers[name].ags
        assert ags is not None
        ags.start_epoch(1)
        timed = self.step(name)
        ags.start_epoch(NEVER_REFRESH_STEPS)
        return timed

    def warm_up(self) -> None:
        """Run the first steps, which differ from later ones: they create momentum, factors and buffers."""
        for name in self.trainers:
            if name in VARIANTS_WITH_FACTORS:
                self.step(name)
                self.step_with_refresh(name)
            for _ in range(2):
                self.step(name)()

    def operations(self, name: str) -> int:
        """Return the number of operations of a step at the dispatcher that start work, approximately its kernels."""
        from operations import count_operations

        with count_operations() as seen:
            self.step(name)()
        return seen.operations.total()

    def rounds(self, count: int, *, seconds: float = float("inf")) -> dict[str, list[StepTimes]]:
        """Run rounds of one step of each variant, and one refresh of each variant with factors.

        Args:
            count: rounds.
            seconds: no round starts after this time, except the first three.
        """
        actions: dict[str, Callable[[], Callable[[], StepTimes]]] = {}
        for name in self.trainers:
            actions[name] = lambda name=name: self.step(name)  # type: ignore[misc]
            if name in REFRESHING_VARIANTS:
                actions[f"{name} refresh"] = lambda name=name: self.step_with_refresh(name)  # type: ignore[misc]
        result: dict[str, list[StepTimes]] = {name: [] for name in actions}
        order = list(actions)
        ends = time.monotonic() + seconds
        for turn in range(count):
            if turn >= 3 and time.monotonic() > ends:
                break
            random.Random(turn).shuffle(order)
            taken = [(name, actions[name]()) for name in order]  # keeps a GPU busy over the whole round
            for name, timed in taken:
                result[name].append(timed())
        return result


def build_trainer(
    model: str, *, image: int, classes: int, batch: int, me: "Ranks", precision: str = "fp32"
) -> "Trainer":
    """Return tula's trainer of a plain large batch on random images."""
    from gpu import rig

    spec = rig.make_job(
        model, image=image, classes=classes, batch=batch * me.world, device=me.device.type, precision=precision
    )  # fmt: skip
    return rig.build_trainer(spec, me, batch=batch * me.world)


def make_optimizer(trainer: "Trainer", name: str, *, batch: int) -> "torch.optim.Optimizer":
    """Return AGS with the trainer's base optimizer and a small batch of a quarter, at most 128; or ortho."""
    from tula_cli.optim import Ortho, Static, TulaOptimizer, configure_ags

    if name == ORTHO:
        return Ortho(trainer.base, model=trainer.parallel)
    small = max(1, min(128, trainer.batch // 4))
    settings = configure_ags({**AGS_PRESETS["paper"], **VARIANTS["element" if name == CLIP else name]})
    if name == "static":
        settings["factors"] = Static(STATIC_FACTOR)
    opt = TulaOptimizer(
        trainer.base, model=trainer.parallel, b_large=trainer.batch, b_small=small, available=batch, **settings,
        max_grad_norm=MAX_GRAD_NORM if name == CLIP else None,
    )  # fmt: skip
    opt.start_epoch(NEVER_REFRESH_STEPS)
    return opt


# --- what they tell


def summarise_rounds(
    bench: Bench, result: dict[str, list[StepTimes]], *, model: str, image: int, memory: Sequence[MemoryCost]
) -> Outcome:
    """Evaluate the rounds of one model."""
    plain = [(a.step + b.step) / 2 for a, b in zip(result[PLAIN_VARIANT], result[SECOND_PLAIN_VARIANT], strict=True)]
    updates = [
        (a.update + b.update) / 2 for a, b in zip(result[PLAIN_VARIANT], result[SECOND_PLAIN_VARIANT], strict=True)
    ]
    step = statistics.median(plain)
    names = [name for name in bench.trainers if name not in (PLAIN_VARIANT, SECOND_PLAIN_VARIANT)]
    return Outcome(
        model=model,
        image=image,
        batch=bench.batch,
        parameters=bench.parameters,
        ranks=bench.me.world,
        rounds=len(plain),
        step_milliseconds=1000 * step,
        update_milliseconds=1000 * statistics.median(updates),
        control=statistics.median(
            b.step / a.step for a, b in zip(result[PLAIN_VARIANT], result[SECOND_PLAIN_VARIANT], strict=True)
        ),
        rows=tuple(compare_with_plain(name, result[name], plain, updates) for name in names),
        refreshes=tuple(
            measure_refresh(name, result[name], result[f"{name} refresh"], step)
            for name in names
            if f"{name} refresh" in result
        ),
        memory=tuple(memory),
    )


def compare_with_plain(name: str, own: Sequence[StepTimes], plain: Sequence[float], updates: Sequence[float]) -> Row:
    """Compare a variant's steps with the plain ones of the same rounds."""
    ratios = [timed.step / base for timed, base in zip(own, plain, strict=True)]
    extra = statistics.median(timed.update - base for timed, base in zip(own, updates, strict=True))
    low, high = bootstrap_interval(ratios)
    step = statistics.median(plain)
    return Row(name, statistics.median(ratios), low, high, by_update=1 + extra / step, milliseconds=1000 * extra)


def measure_refresh(name: str, scaled: Sequence[StepTimes], refreshed: Sequence[StepTimes], step: float) -> Refresh:
    extra = statistics.median(b.update - a.update for a, b in zip(scaled, refreshed, strict=True))
    return Refresh(name, 1000 * extra, of_a_step=extra / step, share=extra / (STEPS_BETWEEN_REFRESHES * step + extra))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling."""
    drawn = np.random.default_rng(0).choice(np.array(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


# --- memory, in processes of their own


def measure_memory(model: str, options: argparse.Namespace) -> Iterator[MemoryCost]:
    """Yield the additional memory of each variant compared with the plain step."""
    # On the CPU, freed memory must return to the system immediately; this takes time, so it is not set when times are measured.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "RANK": "0", "WORLD_SIZE": "1"}
    base: tuple[float, float] | None = None
    for name in (PLAIN_VARIANT, *options.variants):
        command = [sys.executable, __file__, "--models", model, "--device", options.device, "--hold", name]
        environment = {**os.environ, **settings, "LOCAL_RANK": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the memory of {model} {name} could not be measured:\n{done.stderr[-2000:]}")
        lasting, peak = json.loads(done.stdout)
        if base is None:
            base = (lasting, peak)
        else:
            yield MemoryCost(name, lasting, peak - base[1])


def measure_variant_memory(model: str, name: str, me: "Ranks") -> tuple[float, float]:
    """Return the permanent and the peak memory of a step with 4 samples, with a refresh if there are any, in copies of the parameters."""
    import torch

    from tula_cli.worker import device

    image, classes = (MODELS | FURTHER_MODELS)[model]
    names = [] if name == PLAIN_VARIANT else [name]
    bench = Bench(model, image=min(image, 64), classes=classes, batch=4, me=me, names=names)
    bench.warm_up()
    trainer = bench.trainers[name]
    if trainer.ags and name in VARIANTS_WITH_FACTORS:
        trainer.ags.start_epoch(1)
    trainer.clock.wait_for_device()
    memory = device.MemoryMeter(me.device)
    memory.reset()
    bench.step(name)()
    peak, _ = memory.read_peak()
    size = sum(p.numel() * p.element_size() for p in trainer.parallel.parameters())
    factors: list[torch.Tensor] = trainer.ags.factors.tensors if trainer.ags else []
    lasting = sum(factor.numel() * factor.element_size() for factor in factors)
    return lasting / size, (lasting + peak) / size


# --- the largest batch of a GPU


def find_largest_batch(fits: Callable[[int], bool], start: int, most: int = 2**16) -> int:
    """Return the largest power of two times `start` that fits; 0 if not even `start` fits."""
    batch = 0
    for tried in itertools.takewhile(lambda size: size <= most, (start * 2**k for k in itertools.count())):
        if not fits(tried):
            break
        batch = tried
    return batch


def make_trial(
    model: str, image: int, classes: int, me: "Ranks", *, names: Sequence[str], most: int, precision: str = "fp32"
) -> Callable[[int], bool]:
    """Return a function that tries a local batch with all variants and refreshes, on a GPU without other processes.

    Args:
        model: of torchvision, or of tula.
        image: side of the images.
        classes: outputs.
        me: the group.
        names: the variants.
        most: bytes of the GPU that may be used.
        precision: of train.precision.
    """
    import torch

    from tula_cli.host.failure_texts import classify_failure

    total = torch.cuda.get_device_properties(me.device).total_memory

    def trial(batch: int) -> bool:
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), me.device)
        try:
            Bench(
                model, image=image, classes=classes, batch=batch, me=me, names=names, precision=precision
            ).warm_up()  # fmt: skip
            torch.cuda.synchronize()
        except RuntimeError as error:  # cuDNN and torch have different messages for a full device
            if classify_failure(f"RuntimeError: {error}") != "device_oom":
                raise
            return False
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, me.device)
        return True

    return trial


# --- the command


def describe_machine(me: "Ranks") -> dict[str, Any]:
    """Describe the machine and its load."""
    import torch

    from tula_cli.host.machine import read_processor_name

    cuda = me.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(me.device) if cuda else read_processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ranks": me.world,
        "load": round(os.getloadavg()[0], 1),  # processes ready to run, mean of a minute
        "torch": torch.__version__,
    }


def format_outcome(result: Outcome) -> Iterator[str]:
    """Yield the results of one model as text."""
    yield (
        f"{result.model}, {result.parameters / 1e6:.1f} M parameters, images of {result.image}, local batch {result.batch},"
        f" {result.rounds} rounds: a plain step takes {result.step_milliseconds:.1f} ms, of which its update"
        f" {result.update_milliseconds:.2f} ms; the second plain step {result.control:.4f} of the first"
    )
    for row in result.rows:
        yield (
            f"  {row.variant:<9} x{row.ratio:.4f} ({row.low:.4f} .. {row.high:.4f}), by update x{row.by_update:.4f},"
            f" {row.milliseconds:+.2f} ms"
        )
    for item in result.refreshes:
        yield (
            f"  refresh of {item.variant} factors: {item.milliseconds:.1f} ms, {100 * item.of_a_step:.1f} % of a step,"
            f" {100 * item.share:.2f} % with {STEPS_BETWEEN_REFRESHES} steps between two"
        )
    for kept in result.memory:
        yield f"  memory of {kept.variant}: {kept.lasting:.2f} copies of the parameters for good, {kept.peak:.2f} at the peak"


def measure_models(options: argparse.Namespace, me: "Ranks") -> list[Outcome]:
    """Measure all requested models."""
    results = []
    for model in options.models:
        image, classes = (MODELS | FURTHER_MODELS)[model]
        image = options.image or image
        batches = [options.batch]
        if me.device.type == "cuda" and me.world == 1:
            tried = make_trial(
                model, image, classes, me, names=options.variants, most=options.most, precision=options.precision
            )  # fmt: skip
            largest = find_largest_batch(tried, start=options.batch)
            batches += [largest] if largest > options.batch else []
        for batch in batches:
            bench = Bench(
                model,
                image=image,
                classes=classes,
                batch=batch,
                me=me,
                names=options.variants,
                cpu_time=options.cpu_time,
                precision=options.precision,
            )
            bench.warm_up()
            timed = bench.rounds(options.rounds)
            alone = batch == options.batch and me.world == 1 and options.memory
            memory = list(measure_memory(model, options)) if alone else []
            results.append(summarise_rounds(bench, timed, model=model, image=image, memory=memory))
            del bench
            gc.collect()
            if me.is_first:
                if options.keep:
                    write_file_atomically(options.keep, json.dumps([asdict(item) for item in results]) + "\n")
                for line in format_outcome(results[-1]):
                    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
    return results


def make_list_parser(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return names

    return parse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=make_list_parser([*MODELS, *FURTHER_MODELS]), default=list(MODELS))
    parser.add_argument("--variants", type=make_list_parser(ALL_VARIANTS), help="by default all of AGS")
    parser.add_argument("--batch", type=int, default=32, help="of one rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--image", type=int, help="side of the images; by default that of the paper's job")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument(
        "--most", type=parse_size, default="48GiB", metavar="SIZE", help="of a GPU that may be used (48GiB)"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what there is after each model, as JSON")
    parser.add_argument(
        "--threads", type=int, help="of each rank on the CPU; by default all cores, shared by the ranks"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time computed, on a CPU that others use too; implies --device cpu and --threads 1, since threads"
        " that wait for each other count as computing",
    )
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hold", choices=[PLAIN_VARIANT, *ALL_VARIANTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu_time:
        if options.threads not in (None, 1):
            parser.error(f"--cpu-time takes one thread, not {options.threads}: those that wait count as computing")
        if options.device == "cuda":
            parser.error("--cpu-time means nothing on a GPU, which computes by itself")
        options.device, options.threads = "cpu", 1
    if options.batch < 4 or options.rounds < 3:
        parser.error("--batch must be at least 4 (a quarter of it is the small batch), --rounds at least 3")
    return options


def main() -> None:
    options = parse_arguments()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    cores = len(os.sched_getaffinity(0))
    threads = options.threads or max(1, cores // int(os.environ["WORLD_SIZE"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported

    from tula_cli.spec.resources import Cluster
    from tula_cli.worker import ranks as worker_ranks

    with (
        tempfile.TemporaryDirectory() as folder,
        worker_ranks.join_process_group(
            Cluster(device=options.device), rendezvous_file=Path(folder) / "handover"
        ) as me,
    ):
        if options.hold:
            print(json.dumps(measure_variant_memory(options.models[0], options.hold, me)))
            return
        options.variants = options.variants or list(VARIANTS)
        before = describe_machine(me)
        if me.is_first:
            text = ", ".join(f"{name} {value}" for name, value in before.items())
            print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
        completed = measure_models(options, me)
        if options.json and me.is_first:
            after = round(os.getloadavg()[0], 1)
            print(
                json.dumps({"machine": before | {"load_after": after}, "models": [asdict(item) for item in completed]})
            )


if __name__ == "__main__":
    main()
