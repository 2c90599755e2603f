"""What two ranks do with a compiled model, for test_compiled: `python compiled_rank_cases.py FOLDER`.

What a rank finds is kept in FOLDER/<rank>.json. Nothing is compiled for real: graphs are traced, differentiated, and split
at DDP's buckets.
"""

import json
import sys
from pathlib import Path
from typing import Any

from worker_jobs import probe_task, spec, trainer

from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.worker.build import compiled
from tula_cli.worker.build.datasets import build_datasets
from tula_cli.worker.measure.probe import run_probes
from tula_cli.worker.ranks import Ranks, joined
from tula_cli.worker.train import loop as worker_train_loop

METHODS: dict[str, dict[str, Any]] = {
    "ags": {
        "train": {"method": "ags", "accumulate": 2},
        "ags": {"delta": "inf", "b_small": 3, "refresh": {"every": 2}},
    },
    "local norms": {"train": {"method": "ags"}, "ags": {"preset": "robust"}},
    "polo": {"train": {"method": "polo", "epochs": 6}},
}
WIDE = {"name": "worker_jobs:wide", "args": {"width": 200_000}}  # 13 MB and 2 MB of gradients: two buckets


def main() -> None:
    folder = Path(sys.argv[1])
    compiled.BACKEND = "aot_eager"
    with joined(spec().cluster, handover=folder / "handover") as ranks:
        found = {
            "off": {name: off(sections, ranks) for name, sections in METHODS.items()},
            "probe": probed(folder, ranks),
        }
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def off(sections: dict[str, Any], ranks: Ranks) -> float:
    """Return how far a compiled training ends from one as it is written."""
    ends = []
    for wanted in (False, True):
        train = {"epochs": 2, **sections["train"], "compile": wanted}
        subject = trainer(spec(**{**sections, "model": {"args": {"norm": True}}, "train": train}), ranks)
        list(worker_train_loop.steps(subject))
        ends.append(list(subject.ddp.module.state_dict().values()))
    return max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True))


def probed(folder: Path, ranks: Ranks) -> list[str]:
    """Probe a model whose gradients fill several buckets; return what the results are."""
    job = spec(model=WIDE, train={"compile": True, "method": "ags"}, ags={"delta": "inf", "b_small": 4})
    run = RunDir.create(folder / f"probe-{ranks.rank}", job)
    run_probes(probe_task(job, 8), run, ranks, build_datasets(job), started_at=0.0)
    return [type(result).__name__ for result in run.results() if isinstance(result, Measured)]


if __name__ == "__main__":
    main()
