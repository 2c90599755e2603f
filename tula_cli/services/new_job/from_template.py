"""`tula init`: a commented job file to begin with."""

import re
from typing import Literal

from tula_cli.assets import find_asset
from tula_cli.cluster.slurm import partitions as site
from tula_cli.cluster.slurm.partitions import Site
from tula_cli.services.new_job.from_command import TEMPLATES
from tula_cli.words import plural

_NODES_HERE = re.compile(r"^  nodes: .*$", re.MULTILINE)


def job_from_template(kind: Literal["local", "slurm"], offered: Site | None = None, *, gpus: int = 0) -> str:
    """Return the text of a commented job spec.

    Args:
        kind: where the job will run.
        offered: what the scheduler tells; for slurm it is filled in.
        gpus: that this machine has; a local job searches as many nodes, of one GPU each, as there are.

    Raises:
        TulaError: the installation lacks its templates.
    """
    text = find_asset(TEMPLATES[kind]).read_text(encoding="utf-8")
    if kind == "slurm":
        return text if offered is None else site.fill_template(text, offered)
    if gpus < 1:
        return text
    return _NODES_HERE.sub(
        f"  nodes: {_powers_of_two(gpus)} # here a node is a GPU: {plural(gpus, 'GPU')}", text, count=1
    )


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]
