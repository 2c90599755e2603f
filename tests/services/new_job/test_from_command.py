"""`tula init --from-command`: the job file around a command; the scheduler is what it prints."""

from pathlib import Path

import pytest
from read_diagnostics import values

from tula_cli.cluster.slurm.site import Site, parse_partitions
from tula_cli.errors import SpecError
from tula_cli.services.init import JobFileProposal, make_job_from_command
from tula_cli.services.search import choose_probes
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.yaml_text import parse_yaml

LINE = "torchrun --nproc-per-node 4 train.py --batch-size 64 --lr 0.1 --epochs 90"
SITE = "main*|up|1:00:00|1-infinite|4|idle|{cpus}|64000|{gres}\n"


def site(*, cpus: int = 16, gres: str = "gpu:a100:4") -> Site:
    return Site(parse_partitions(SITE.format(cpus=cpus, gres=gres)), ())


def loaded(made: JobFileProposal, folder: Path) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(made.text)
    return load_spec(path, environ={}, site_files=())


def test_a_torchrun_line_is_a_job_as_it_is(tmp_path: Path) -> None:
    made = make_job_from_command(LINE, "local")
    spec = loaded(made, tmp_path)
    assert made.is_complete and LINE in made.text
    assert spec.script is not None
    assert spec.script.command == "python train.py --batch-size {local_batch} --lr {lr} --epochs {epochs}"
    assert (spec.name, spec.script.reference.batch, spec.script.length.epochs) == ("train", 256, 90)
    assert (spec.cluster.gpus_per_node, spec.search.nodes) == (4, [1, 2])
    assert made.placeholders["--lr"] == ("0.1", "lr")


@pytest.mark.parametrize(("cores", "nodes"), [(7, [1]), (8, [1, 2])])
def test_nodes_without_gpus_are_what_the_cores_here_make(cores: int, nodes: list[int], tmp_path: Path) -> None:
    assert loaded(make_job_from_command(LINE, "local", cores=cores), tmp_path).search.nodes == nodes


@pytest.mark.parametrize(
    ("line", "gpus", "per_node", "nodes"),
    [
        (LINE, 8, 4, [1, 2]),
        (LINE, 4, 4, [1]),
        (LINE, 2, 4, [1]),
        ("python t.py -b 8 --epochs 1", 4, 1, [1, 2, 4]),
        ("torchrun --nproc-per-node gpu t.py -b 8 --epochs 1", 4, 4, [1]),
    ],
)
def test_nodes_are_what_the_gpus_here_make(
    line: str, gpus: int, per_node: int, nodes: list[int], tmp_path: Path
) -> None:
    made = make_job_from_command(line, "local", gpus=gpus)
    spec = loaded(made, tmp_path)
    assert (spec.cluster.gpus_per_node, spec.search.nodes) == (per_node, nodes)
    assert bool(made.warnings) == (gpus < per_node)
    assert sum(nodes) * spec.search.max_minutes / 60 <= (spec.search.max_node_hours or 0)


@pytest.mark.parametrize(
    ("line", "nodes", "batch"),
    [
        ("torchrun --nproc-per-node 2 --nnodes 4 t.py -b 8 --epochs 1", 4, 64),
        ("torchrun --nproc-per-node 2 --nnodes 4 t.py -b {local_batch} --epochs 1", 4, None),
        (LINE, None, None),  # one node, as few as the search has anyway
    ],
)
def test_the_command_of_several_nodes_is_the_baseline(line: str, nodes: int | None, batch: int | None) -> None:
    text = make_job_from_command(line, "slurm").text
    baseline = parse_yaml(text, source="job.yaml").get("baseline")
    expected = {key: value for key, value in {"nodes": nodes, "batch": batch}.items() if value is not None}
    assert baseline == (expected or None)


@pytest.mark.parametrize(
    ("line", "span"),
    [
        (LINE, (128, 2048)),
        ("torchrun --nproc-per-node 2 --nnodes 4 t.py -b 1 --epochs 1", (4, 64)),
        ("torchrun --nproc-per-node 2 t.py -b 1 --epochs 1", (2, 16)),
        ("python t.py --global-batch-size 512 --epochs 1", (256, 4096)),
        (
            "torchrun --nproc-per-node 2 t.py --batch_size 2 --accum_iter 4 --epochs 1",
            (8, 128),
        ),
    ],
)
def test_batches_lie_around_that_of_today_and_divide_among_the_gpus(
    line: str, span: tuple[int, int], tmp_path: Path
) -> None:
    spec = loaded(make_job_from_command(line, "local"), tmp_path)
    assert (spec.search.min_batch, spec.search.max_batch) == span
    probes = choose_probes(spec, dataset_size=10**6, max_local_batch=None)
    assert set(probes) == {1, 2}


def test_a_site_fills_in_its_cluster_and_the_command_its_ranks(tmp_path: Path) -> None:
    made = make_job_from_command(LINE, "slurm", site(cpus=32, gres="gpu:a100:8"))
    spec = loaded(made, tmp_path)
    assert (spec.cluster.kind, spec.cluster.slurm.partition, spec.cluster.minutes) == ("slurm", "main", 60)
    assert (spec.cluster.gpus_per_node, spec.cluster.slurm.cpus_per_task) == (4, 8)
    counts = {"processes": 4, "partition": "main", "gpus": 8}
    assert values(made.warnings, "processes-unlike-partition") == counts
    assert not make_job_from_command(LINE, "slurm", site()).warnings


def test_a_site_of_few_cores_sets_workers_only_where_the_command_has_a_place_for_them(tmp_path: Path) -> None:
    here = site(cpus=8)
    assert loaded(make_job_from_command(LINE, "slurm", here), tmp_path).train.workers == "auto"
    assert loaded(make_job_from_command(f"{LINE} -j 8", "slurm", here), tmp_path).train.workers == 1


def test_a_command_that_names_no_processes_keeps_the_cores_of_the_site(tmp_path: Path) -> None:
    spec = loaded(make_job_from_command("python t.py -b 128 --epochs 90", "slurm", site(cpus=32)), tmp_path)
    assert spec.cluster.slurm.cpus_per_task == 32 // spec.cluster.gpus_per_node


def test_without_a_scheduler_the_cluster_is_as_it_comes(tmp_path: Path) -> None:
    spec = loaded(make_job_from_command(LINE, "slurm"), tmp_path)
    assert spec.search.nodes == [2, 4, 8, 16]
    assert spec.search.max_batch == 16 * 256


def test_what_section_train_hands_on_is_what_the_command_had(tmp_path: Path) -> None:
    line = "accelerate launch --num_processes 2 run.py -b 4 --grad-accum 8 --seed 7 -j 3 --epochs 2 --lr 1e-5"
    made = make_job_from_command(line, "local")
    spec = loaded(made, tmp_path)
    assert spec.script is not None
    assert (spec.train.accumulate, spec.train.seed, spec.train.workers) == (8, 7, 3)
    assert (spec.script.launch, spec.script.reference.batch, spec.script.reference.lr) == ("node", 64, 1e-5)
    assert "4 x 8 micro-batches per GPU x 2 GPUs" in made.text


@pytest.mark.parametrize(
    ("line", "required"),
    [
        ("python t.py -b 8 --lr 0.1", {"script.length"}),
        (
            "python t.py --bz {local_batch} --lr {lr} --steps 9",
            {"script.length", "script.reference.batch", "script.reference.lr"},
        ),
        ("python t.py -b 8 --epochs 3 --max-steps 100", {"script.dataset_size"}),
        ("python t.py --bz {micro_batch} --k {accumulate} --epochs 3", {"script.reference.batch"}),
    ],
)
def test_what_is_required_and_not_told_is_a_comment_that_check_asks_for(
    line: str, required: set[str], tmp_path: Path
) -> None:
    made = make_job_from_command(line, "local")
    assert {key.key for key in made.missing if key.required} == required
    assert not made.is_complete
    with pytest.raises(SpecError) as error:
        loaded(made, tmp_path)
    assert error.value.problems
    filled = made.text
    for line_ in made.text.splitlines():
        if "# REQUIRED" in line_:
            filled = filled.replace(line_, line_.replace("# ", "", 1))
    spec = validate_job(parse_yaml(filled, source="filled"), source="filled")
    assert spec.script is not None


@pytest.mark.parametrize("name", ["dataset_size", "resume", "metric", "save"])
def test_what_may_be_left_out_is_reported_and_stands_in_the_file(name: str) -> None:
    made = make_job_from_command(LINE, "local")
    assert f"script.{name}" in {key.key for key in made.missing}
    assert f"  # {name}: " in made.text


def test_a_resume_is_written_where_the_script_saves_into_the_runs_folder(tmp_path: Path) -> None:
    spec = loaded(make_job_from_command(f"{LINE} --resume last.pth --output-dir x", "local"), tmp_path)
    assert spec.script is not None and spec.script.resume is not None
    assert spec.script.resume.args == "--resume {checkpoint}"
    elsewhere = make_job_from_command(f"{LINE} --resume last.pth", "local")
    assert elsewhere.is_complete and "script.resume.checkpoint" in {key.key for key in elsewhere.missing}
    spec = loaded(elsewhere, tmp_path)
    assert spec.script is not None and spec.script.resume is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("python -m my.pack.train -b 4 --epochs 1", "my.pack.train"),
        ("torchrun --no-python ./run.sh -b 4 --epochs 1", "run"),
        ("'./my train.py' -b 4 --epochs 1", "my-train"),
        ("python __main__.py -b 4 --epochs 1", "main"),
    ],
)
def test_the_job_is_called_as_its_script(line: str, name: str, tmp_path: Path) -> None:
    spec = loaded(make_job_from_command(line, "local"), tmp_path)
    assert spec.name == name


def test_values_that_yaml_would_read_otherwise_are_quoted(tmp_path: Path) -> None:
    spec = loaded(make_job_from_command("t.py -b 4 --epochs 1 --tag 'a: b' --note '#x'", "local"), tmp_path)
    assert spec.script is not None
    assert spec.script.command == "t.py -b {local_batch} --epochs {epochs} --tag 'a: b' --note '#x'"


def test_a_script_that_trains_in_one_process_is_searched_on_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, module = tmp_path / "t.py", tmp_path / "lib" / "steps.py"
    module.parent.mkdir()
    script.write_text("import torch\nfrom lib.steps import train\n")
    module.write_text("import torch\n")

    def nodes_for(line: str, *, gpus: int = 0) -> list[int]:
        return loaded(make_job_from_command(line, "local", gpus=gpus), tmp_path).search.nodes

    line = "python t.py -b 8 --epochs 1"
    assert nodes_for(line) == nodes_for(line, gpus=4) == [1]
    assert nodes_for("torchrun --nproc-per-node 1 t.py -b 8 --epochs 1") == [1, 2], "its launcher starts several"
    module.write_text("import torch.distributed as dist\n")
    assert nodes_for(line, gpus=4) == [1, 2, 4]
