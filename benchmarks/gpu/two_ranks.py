"""One of two ranks on one device: `python -m gpu.two_ranks FOLDER BACKEND DEVICE MODE METHODS...`.

tula gives each rank its own GPU. Here two ranks share one GPU, which gloo allows, and NCCL allows if it takes them for ranks of two
machines. Each method trains some steps; rank 0 writes the results to FOLDER/told.json.
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

from gpu.rig import build_trainer, make_job
from tula_cli.run.files import write_file_atomically
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
FIRST_STEPS, FURTHER_STEPS = 4, 40  # steps before the reserved memory is read first, and steps after that
TIMEOUT = timedelta(seconds=60)


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
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    me = Ranks(rank, world, 0, device)
    record = {}
    for method in methods:
        record[method] = run_method(method, me, tiny=mode == "tiny")
        if me.is_first:
            write_file_atomically(Path(folder) / "told.json", json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def run_method(name: str, me: Ranks, *, tiny: bool) -> dict[str, Any]:
    """Run some steps of a method; return whether the ranks have equal weights at the end, and the memory and times."""
    method, settings = SETTINGS[name]
    model, image, batch = ("small_cnn", 8, 16) if tiny else ("resnet18_cifar", 32, 256)
    spec = make_job(model, image=image, batch=batch, device=me.device.type, method=method, **settings)
    trainer = build_trainer(spec, me, batch=batch)
    norms = GradientNormRecorder.attach(trainer)
    stream = repeat_steps(trainer)
    if trainer.ags:
        trainer.ags.start_epoch(1)
    few, many = (2, 4) if tiny else (FIRST_STEPS, FURTHER_STEPS)
    list(norms.watch_steps(itertools.islice(stream, few), trainer.scaler))
    before = read_reserved_bytes(me)
    list(norms.watch_steps(itertools.islice(stream, many), trainer.scaler))
    growth = read_reserved_bytes(me) - before
    trainer.method.synchronize_replicas(trainer)  # for post-local SGD: average the replicas
    equal = len(set(me.gather(hash_weights(trainer)))) == 1
    exposed = measure_exposed_synchronisation(trainer, stream)
    steps = few + many
    del trainer, stream, norms
    return {
        "equal_weights": equal,
        "exposed_ms": round(1000 * exposed, 3),
        "reserved_growth_mib": round(me.max(growth) / 2**20, 2),
        "steps": steps,
    }


def read_reserved_bytes(me: Ranks) -> int:
    """Return the bytes reserved by the device's allocator; on the CPU the memory of the process."""
    if me.device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved(me.device)
    return worker_device.read_process_memory("VmRSS")


def hash_weights(trainer: Trainer) -> str:
    """Return a hash of this rank's parameters."""
    digest = hashlib.sha256()
    for parameter in trainer.parallel.module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def measure_exposed_synchronisation(trainer: Trainer, stream: Any) -> float:
    """Return the median seconds from the last local gradient to the end of the reduction."""
    with SynchronisationTimer(trainer.clock, trainer.parallel) as spy:
        trainer.after_backward = spy.record_reduction
        list(itertools.islice(stream, 5))
        trainer.after_backward = None
    return trainer.ranks.max(spy.compute_median())


if __name__ == "__main__":
    main()
