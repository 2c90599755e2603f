"""`tula init --from-sbatch`: what a job says after each of the scripts in tests/fixtures/sbatch/typed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tula_cli.cluster.slurm.site import Partition, PartitionNodeType, Site
from tula_cli.errors import SpecError
from tula_cli.services.init import JobFileProposal
from tula_cli.services.init_from_sbatch import make_job_from_sbatch
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.yaml_text import parse_yaml

SCRIPTS = Path(__file__).parents[2] / "fixtures/sbatch/typed"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((SCRIPTS / "expected.yaml").read_text())


def made(name: str) -> JobFileProposal:
    return make_job_from_sbatch((SCRIPTS / f"{name}.sbatch").read_text(), f"{name}.sbatch")


def loaded(job: JobFileProposal) -> JobSpec:
    text = job.text if job.is_complete else job.text.replace("  # length: {epochs: 90}", "  length: {epochs: 90}")
    return validate_job(parse_yaml(text, source="job.yaml"), source="job.yaml")


def test_every_script_has_its_row() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.sbatch")} == EXPECTED.keys()


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if "refused" not in row])
def test_a_script_is_a_job(name: str) -> None:
    job, row = made(name), EXPECTED[name]
    spec = loaded(job)
    assert spec.script is not None and spec.cluster.slurm is not None
    assert spec.name == row.get("name", spec.name)
    assert (spec.script.launch, spec.cluster.gpus_per_node, job.recognised.nodes, spec.script.reference.batch) == (
        row["launch"], row["per_node"], row["nodes"], row["batch"],
    )  # fmt: skip
    assert row["nodes"] in spec.search.nodes
    today = (row["nodes"], row["batch"]) if row["nodes"] > 1 else (None, None)
    assert (spec.baseline.nodes, spec.baseline.batch) == today
    for key in ("epochs", "steps"):
        assert key not in row or getattr(spec.script.length, key) == row[key]
    settings = {**spec.cluster.slurm.model_dump(), "minutes": spec.cluster.minutes}
    assert {key: settings[key] for key in row["slurm"]} == row["slurm"]
    setup = "\n".join(spec.cluster.setup or [])
    assert all(line in setup.splitlines() for line in row.get("setup", []))
    assert "not_setup" not in row or row["not_setup"] not in setup
    assert row.get("warning", "") in " ".join(map(str, job.warnings))


def test_what_tula_sets_itself_is_left_out_with_the_reason() -> None:
    script = (
        "#!/bin/bash\n#SBATCH --nodes=2\nexport MASTER_ADDR=$(hostname)\n"
        "srun torchrun --nnodes 2 train.py --batch-size 64 --epochs 10\n"
    )
    assert make_job_from_sbatch(script, "train.sbatch").recognised.left_out == (
        "export MASTER_ADDR=$(hostname): tula sets it",
    )


def test_no_more_nodes_are_searched_than_the_default_partition_has() -> None:
    partitions = (
        Partition("main", True, True, 120, None, (PartitionNodeType(2, 48, 256_000, ()),)),
        Partition("large", False, True, 120, None, (PartitionNodeType(64, 48, 256_000, ()),)),
    )
    script = "#!/bin/bash\n#SBATCH --nodes=2\n{}srun torchrun --nnodes 2 train.py --batch-size 64 --epochs 10\n"
    searched = [
        loaded(make_job_from_sbatch(script.format(line), "train.sbatch", Site(partitions, ()))).search.nodes
        for line in ("", "#SBATCH --partition=large\n")
    ]
    assert [list(nodes) for nodes in searched] == [[1, 2], [1, 2, 4]]


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if "refused" in row])
def test_a_script_that_is_more_than_one_command_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(SpecError) as error:
        made(name)
    assert EXPECTED[name]["refused"] in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    ("options", "nodes", "per_node"),
    [
        ("--nodes=2 --ntasks=8 --ntasks-per-node=8", 2, 4),
        ("--ntasks=8 --ntasks-per-node=4", 2, 4),
        ("--nodes=2 --ntasks=9", 2, None),
        ("--ntasks=10 --ntasks-per-node=4", 3, None),
    ],
)
def test_all_tasks_are_divided_equally_among_the_nodes(options: str, nodes: int, per_node: int | None) -> None:
    text = f"#!/bin/bash\n#SBATCH {options} --gres=gpu:4\nsrun python t.py -b 4 --epochs 2\n"
    if per_node is None:
        with pytest.raises(SpecError, match=f"cannot be divided equally among {nodes} nodes"):
            make_job_from_sbatch(text, "job.sbatch")
    else:
        recognised = make_job_from_sbatch(text, "job.sbatch").recognised
        assert (recognised.nodes, recognised.gpus_per_node) == (nodes, per_node)


def test_words_of_an_array_reach_the_command_as_they_are() -> None:
    script = made("array_and_heredoc").recognised.script
    assert script["command"] == "python t.py --epochs {epochs} --lr {lr} --batch-size {local_batch} --name 'a b'"
