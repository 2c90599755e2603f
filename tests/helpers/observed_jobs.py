"""Observed jobs with chosen step times."""

from tula_cli.models.observed import MeasuredJob
from tula_cli.run.records.scripts import (
    DdpSplit,
    ExpectedValues,
    Heartbeat,
    LoaderProperties,
    PhaseMemory,
    RankResult,
    ScriptStep,
)

GIB = 1 << 30


def make_rank(rank: int, *, world: int, gpus: int, seconds: float, sync: float, peak: int = 4 * GIB) -> RankResult:
    step = ScriptStep(seconds=seconds, wait=0.001, samples=32, batches=1, backwards=1, gap=())
    loader = LoaderProperties(
        dataset=50_000, batches=50_000 // (32 * world), batch_size=32, workers=4, sampler="S", drop_last=True
    )
    return RankResult(
        version=1, task="observe", attempt=1, why="begun", rank=rank, world=world, host=f"node{rank // gpus}", pid=1,
        expected=ExpectedValues(), python="3.11", torch="2.9", device="cuda", hardware="GPU", capacity=16 * GIB, startup=1.0,
        steps=200, samples=6400, optimizer="torch.optim.SGD", parameters=1_000_000,
        bytes={"parameters": GIB // 2, "gradients": GIB // 2, "optimizer": GIB},
        peak={"timed": PhaseMemory(allocated=peak, reserved=peak)}, lr=None, warmup=(), timed=(step,) * 20,
        split=DdpSplit(modules=1, hook="default", sync=(sync,) * 6, norms=(), local=()), loader=loader, loaders=(), notes=(),
    )  # fmt: skip


def make_job(nodes: int, gpus: int, *, seconds: float = 0.2, sync: float = 0.1, wait: float = 1.0) -> MeasuredJob:
    world = nodes * gpus
    ranks = [make_rank(rank, world=world, gpus=gpus, seconds=seconds, sync=sync) for rank in range(world)]
    totals = {"training": 100.0, "data": wait, "eval": 5.0, "epoch": 0.0, "save": 2.0}
    beat = Heartbeat(
        step=500,
        samples=1.0,
        stepped_at=1.0,
        seconds=seconds,
        alive_at=9.0,
        lost=None,
        host="node0",
        pid=1,
        totals=totals,
    )  # type: ignore[arg-type]
    return MeasuredJob.from_records("train", "slurm-1.0", ranks, [beat], 9.0)
