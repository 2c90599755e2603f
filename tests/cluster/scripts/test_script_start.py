"""The start of a script: the command line and environment of each process, and the plan of the shim."""

import json
from pathlib import Path
from typing import Any

import pytest

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.rank_processes import find_rendezvous_address, get_first_rank
from tula_cli.cluster.scripts import methods
from tula_cli.cluster.scripts.methods import copy_shim
from tula_cli.cluster.scripts.probe import ScriptProbe
from tula_cli.cluster.scripts.start import ScriptStart
from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.cluster.slurm import sbatch
from tula_cli.errors import JobFailed
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.results import ScalingSummary
from tula_cli.run.records.tasks import ProbeTask, Rung, TrainTask
from tula_cli.spec.load import validate_job

AGS: dict[str, Any] = {"how": {"method": "ags", "accumulate": 2}}
SLURM: dict[str, Any] = {"kind": "slurm", "gpus_per_node": 2, "slurm": {"cpus_per_task": 6}}


def start(
    folder: Path,
    command: str,
    *,
    index: int = -1,
    batch: int = 32,
    train: bool = False,
    checkpoint: str = "",
    how: dict[str, Any] | None = None,
    **job: Any,
) -> ScriptStart:
    """Return how a supervisor starts a script: on this machine, or as the one of an index in an allocation."""
    reference = {"batch": 16} | ({"lr": 0.1} if "{lr}" in command else {})
    script = {"command": command, "length": {"epochs": 3}, "dataset_size": 100, "reference": reference}
    spec = validate_job(
        {
            "script": script | job.pop("script", {}),
            "search": {"nodes": [2]},
            "train": {"method": "lbt", **(how or {})},
            **job,
        },
        source="test",
    )
    common: dict[str, Any] = {"spec": spec, "workdir": str(folder), "nodes": 2}
    task = (
        TrainTask(id="t-1", job="t", signature="t", attempt=1, ladder=(Rung(batch=batch),), workers=1, **common)
        if train
        else ProbeTask(id="p", job="p", local_batches=(batch // 2,), **common)
    )
    run = RunDir(folder / "run")
    world = 2 * spec.cluster.gpus_per_node
    environ = {"PATH": "/bin", "PYTHONPATH": "/mine", "MASTER_PORT": "1", "RANK": "9"}
    allocation = Allocation(0, 1, environ=environ)
    if index >= 0:
        allocation = Allocation(index, world, local_index=index % 2, job_id="7", environ=environ, cpus=6)
    meeting = "10.0.0.1:4711"
    command = LeaderCommand(task=task.id, attempt=1, ranks=world, meeting=meeting, batch=batch, checkpoint=checkpoint)
    script = ScriptTraining(run, task) if isinstance(task, TrainTask) else ScriptProbe(run, task)
    return script.make_starter(allocation, command)


def commands(result: ScriptStart) -> list[str]:
    return [
        " ".join(rank_command.command[2:] if rank_command.command[1] == "-u" else rank_command.command)
        for rank_command in result.make_rank_commands(Path("log"))
    ]


def test_each_rank_on_this_machine_is_a_process(tmp_path: Path) -> None:
    result = start(
        tmp_path, "a.py -b {local_batch} --lr {lr} -n {world} -r {rank} -s {steps} -w {workers}", train=True, batch=32
    )
    assert commands(result) == [f"a.py -b 16 --lr 0.1 -n 2 -r {rank} -s 10 -w 1" for rank in (0, 1)]
    first, second = result.make_rank_commands(Path("log"))
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "OMP_NUM_THREADS": "1",
    }
    assert second.environment.items() >= expected.items()
    shim, *others = first.environment["PYTHONPATH"].split(":")
    assert others == ["/mine"] and (Path(shim) / "sitecustomize.py").exists()
    assert first.folder == str(tmp_path)
    assert json.loads(Path(first.environment["TULA_PLAN"]).read_text())["mode"] == "train"
    assert (tmp_path / "run/train/t/out").is_dir()


@pytest.mark.parametrize(("launcher", "index", "ranks"), [("srun", 3, [3]), ("torchrun", 1, [2, 3])])
def test_on_slurm_each_supervisor_starts_its_own(tmp_path: Path, launcher: str, index: int, ranks: list[int]) -> None:
    cluster = SLURM | {"slurm": {"launcher": launcher, "cpus_per_task": 6}}
    result = start(tmp_path, "a.py {batch} {node_rank} {rank} {local_rank}", index=index, cluster=cluster)
    assert commands(result) == [f"a.py 32 1 {rank} {rank % 2}" for rank in ranks]
    assert get_first_rank(result.allocation, result.task) == ranks[0]
    environment = result.make_rank_commands(Path("log"))[0].environment
    assert environment["LOCAL_WORLD_SIZE"] == "2" and environment["OMP_NUM_THREADS"] == (
        "6" if launcher == "srun" else "3"
    )


def test_a_command_a_node_is_one_task_of_slurm_and_knows_no_rank(tmp_path: Path) -> None:
    command = "torchrun --nnodes {nodes} --node-rank {node_rank} --nproc-per-node {gpus_per_node} --master-port {master_port} a.py {local_batch}"
    result = start(tmp_path, command, index=1, script={"launch": "node"}, cluster=SLURM)
    assert commands(result) == ["torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-port 4711 a.py 8"]
    (rank_command,) = result.make_rank_commands(Path("log"))
    assert not rank_command.environment.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS"}
    assert get_first_rank(result.allocation, result.task) == 2
    submitit_parameters = sbatch.make_submitit_parameters(result.run, result.task)
    assert (
        submitit_parameters["nodes"],
        submitit_parameters["ntasks_per_node"],
        submitit_parameters["cpus_per_task"],
    ) == (2, 1, 12)


def test_commands_of_two_nodes_on_this_machine_have_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tula_cli.cluster.scripts.start.has_gpu", lambda: True)
    result = start(tmp_path, "a {batch}", script={"launch": "node"}, cluster={"gpus_per_node": 2})
    assert [item.environment["CUDA_VISIBLE_DEVICES"] for item in result.make_rank_commands(Path("log"))] == [
        "0,1",
        "2,3",
    ]
    on_cpu = start(tmp_path, "a {batch}", script={"launch": "node"}, cluster={"device": "cpu"})
    assert [
        rank_command.environment["CUDA_VISIBLE_DEVICES"] for rank_command in on_cpu.make_rank_commands(Path("log"))
    ] == [
        "",
        "",
    ]


def test_a_checkpoint_is_reported_and_a_probe_has_words_of_its_own(tmp_path: Path) -> None:
    script = {"resume": {"args": "--resume {checkpoint}", "checkpoint": "{out}/*"}, "probe_args": "--no-eval"}
    assert commands(start(tmp_path, "a.py {batch}", script=script))[0] == "a.py 32 --no-eval"
    again = start(tmp_path, "a.py {batch}", train=True, script=script, checkpoint="/x y/1.pt")
    assert again.make_rank_commands(Path("log"))[0].command[-2:] == ("--resume", "/x y/1.pt")
    assert commands(start(tmp_path, "a.py {batch}", train=True, script=script))[0] == "a.py 32"


def test_the_plan_says_what_was_claimed(tmp_path: Path) -> None:
    answer = start(tmp_path, "a.py {micro_batch} {accumulate} {lr}").make_plan()
    assert (answer.mode, answer.warmup, answer.expected.world, answer.expected.batch) == ("probe", 10, 2, 32)
    assert (answer.expected.accumulate, answer.expected.lr) == (1, 0.1)
    silent = start(tmp_path, "a.py {batch}").make_plan()
    assert (silent.expected.accumulate, silent.expected.lr) == (None, None)


def test_the_plan_of_a_method_that_scales_has_its_settings_and_the_library(tmp_path: Path) -> None:
    message = start(tmp_path, "a.py {micro_batch} {accumulate}", train=True, batch=64, **AGS).make_plan().ags
    assert message is not None and (Path(message.code) / "tula_ags" / "presets.py").exists()
    assert (message.b_large, message.b_small, message.available, message.apply_to, message.resumed) == (
        64,
        16,
        16,
        None,
        False,
    )
    assert message.settings["source"] == "local_norms" and message.settings["refresh"] == {"every": 1}
    assert start(tmp_path, "a.py {batch}").make_plan().ags is None


def test_factors_of_an_epoch_need_its_length(tmp_path: Path) -> None:
    paper = {**AGS, "ags": {"preset": "paper"}}
    message = start(tmp_path, "a.py {batch}", train=True, checkpoint="/x", **paper).make_plan().ags
    assert message is not None and message.resumed and message.steps_per_epoch == 100 // 32
    probe = start(tmp_path, "a.py {batch}", **paper).make_plan().ags
    assert probe is not None and probe.steps_per_epoch == methods.NEVER_REFRESH_STEPS, "a probe times plain steps"
    few = start(tmp_path, "a.py {batch}", train=True, script={"dataset_size": 20}, **paper).make_plan().ags
    assert few is not None and few.steps_per_epoch == 1, "an epoch of less than a batch is a step"
    with pytest.raises(JobFailed, match="the number of samples"):
        start(tmp_path, "a.py {batch}", train=True, script={"dataset_size": "auto"}, **paper).make_plan()


def test_what_was_scaled_is_reported_over_all_attempts() -> None:
    def row(steps: float, share: float, mean: float) -> dict[str, Any]:
        so_far = {"apply_to": "update", "steps": steps, "scaled": share, "mean": mean}
        return {"kind": "row", "ags": {"mean": 9.0, "so_far": so_far}}

    result = methods.summarize_scaling([row(10.0, 0.5, 1.0), {}, row(30.0, 1.0, 1.4)])
    assert result == ScalingSummary(steps=40, scaled=0.875, mean=result.mean if result else 0.0, apply_to="update")
    assert result is not None and result.mean == pytest.approx(1.3)
    assert methods.summarize_scaling([{}, {"kind": "row"}]) is None


def test_the_first_command_can_be_seen_before_anything_is_written(tmp_path: Path) -> None:
    result = start(tmp_path, "env 'A=a b' a.py -b {batch} --lr {lr}")
    assert result.program.preview_command() == "env 'A=a b' a.py -b 32 --lr 0.1"
    assert not result.run.path.exists()


def test_the_shim_is_copied_once(tmp_path: Path) -> None:
    place = copy_shim(tmp_path)
    (place / "mark").touch()
    assert copy_shim(tmp_path) == place and (place / "mark").exists()
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_ranks_of_a_script_meet_at_an_address(tmp_path: Path) -> None:
    address, _, port = find_rendezvous_address(start(tmp_path, "a.py {batch}").task).rpartition(":")
    assert address == "127.0.0.1" and int(port) > 0
