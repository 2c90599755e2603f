"""One of two ranks on one device: `python -m gpu.two_ranks FOLDER BACKEND DEVICE MODE METHODS...`.

The product gives each rank a GPU of its own. Here two share one, which gloo allows and NCCL does where it takes them for
ranks of two machines. Each method trains some steps; rank 0 writes what was seen to FOLDER/told.json.
"""

import hashlib
import itertools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from gpu.rig import build, job
from tula_cli.run.files import write_atomic
from tula_cli.worker import device as worker_device
from tula_cli.worker.measure.probe import GradientNormRecorder, repeat_steps
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.loop import Trainer
from tula_cli.worker.train.step_watch import SynchronisationTimer

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ags": ("ags", {}),
    "robust": ("ags", {"ags": {"preset": "robust"}}),
    "polo": ("polo", {"schedule": {"kind": "multistep", "milestones": [1], "warmup_epochs": 0}}),
}
FEW, MANY = 4, 40  # steps before the reserved memory is looked at first, and from then on
PATIENCE = timedelta(seconds=60)


def main() -> None:
    folder, backend, kind, mode, *methods = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(0.4, device)
    else:
        torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    me = Ranks(rank, world, 0, device)
    record = {}
    for method in methods:
        record[method] = trained(method, me, tiny=mode == "tiny")
        if me.is_first:
            write_atomic(Path(folder) / "told.json", json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def trained(name: str, me: Ranks, *, tiny: bool) -> dict[str, Any]:
    """Train some steps of a method; return whether the ranks end with equal weights, and what it took."""
    method, settings = SETTINGS[name]
    model, image, batch = ("small_cnn", 8, 16) if tiny else ("resnet18_cifar", 32, 256)
    spec = job(model, image=image, batch=batch, device=me.device.type, method=method, **settings)
    trainer = build(spec, me, batch=batch)
    norms = GradientNormRecorder.attach(trainer)
    stream = repeat_steps(trainer)
    if trainer.ags:
        trainer.ags.start_epoch(1)
    few, many = (2, 4) if tiny else (FEW, MANY)
    list(norms.watch(itertools.islice(stream, few), trainer.scaler))
    before = reserved(me)
    list(norms.watch(itertools.islice(stream, many), trainer.scaler))
    growth = reserved(me) - before
    trainer.method.synchronize_replicas(trainer)  # post-local SGD: the average of the replicas
    equal = len(set(me.gather(weights(trainer)))) == 1
    exposed = exposed_synchronisation(trainer, stream)
    steps = few + many
    del trainer, stream, norms
    return {
        "equal_weights": equal,
        "exposed_ms": round(1000 * exposed, 3),
        "reserved_growth_mib": round(me.max(growth) / 2**20, 2),
        "steps": steps,
    }


def reserved(me: Ranks) -> int:
    """Return the bytes that the device's allocator holds; on the CPU the process's own."""
    if me.device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved(me.device)
    return worker_device.read_process_memory("VmRSS")


def weights(trainer: Trainer) -> str:
    """Return a digest of this rank's parameters."""
    digest = hashlib.sha256()
    for parameter in trainer.parallel.module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def exposed_synchronisation(trainer: Trainer, stream: Any) -> float:
    """Return the median seconds from the last local gradient to the end of the reduction."""
    with SynchronisationTimer(trainer.clock, trainer.parallel) as spy:
        trainer.after_backward = spy.record_reduction
        list(itertools.islice(stream, 5))
        trainer.after_backward = None
    return trainer.ranks.max(spy.compute_median())


if __name__ == "__main__":
    main()
