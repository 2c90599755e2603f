"""Options of sbatch and srun; golden files of whole scripts, as submitit writes them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tula_cli import assets
from tula_cli.cluster import messages
from tula_cli.cluster.slurm import sbatch
from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CheckTask, ProbeTask, Rung, TrainTask
from tula_cli.spec.job import JobSpec

GOLDEN = Path(__file__).parents[2] / "fixtures" / "sbatch"


@pytest.fixture(autouse=True)
def no_files_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a site may place snippets, empty at first."""
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(assets, "SITE_FOLDER", tmp_path / "site")
    return tmp_path / "site"


def spec(slurm: dict[str, Any] | None = None, **cluster: Any) -> JobSpec:
    """Return a job on SLURM; settings of section cluster itself may stand among those of SLURM."""
    section = dict(slurm or {})
    cluster |= {name: section.pop(name) for name in ("minutes", "python", "setup") if name in section}
    return JobSpec.model_validate(
        {
            "name": "gold",
            "model": {"name": "resnet18"},
            "dataset": {"name": "CIFAR10"},
            "optimizer": {"lr": 0.1},
            "train": {"epochs": 3, "workers": 3},
            "search": {"nodes": [2], "max_minutes": 20},
            "cluster": {"kind": "slurm", "gpus_per_node": 4, **cluster, "slurm": section},
        }
    )


def probe(result: JobSpec, workdir: Path = Path("/")) -> ProbeTask:
    return ProbeTask(id="probe-n002", job="probe-n002", spec=result, workdir=str(workdir), nodes=2, local_batches=(32,))


def train(result: JobSpec) -> TrainTask:
    return TrainTask(
        id="train-1-1", job="train-1", spec=result, workdir="/", nodes=8, signature="1", attempt=1,
        ladder=(Rung(batch=256),), workers=3,
    )  # fmt: skip


def check(result: JobSpec) -> CheckTask:
    return CheckTask(id="check-1", job="check-1", spec=result, workdir="/", nodes=2)


def asked(slurm: dict[str, Any] | None = None, **cluster: Any) -> dict[str, Any]:
    """Return the parameters of a probe job."""
    result = spec(slurm, **cluster)
    return sbatch.make_submitit_parameters(RunDir(Path("/runs/gold-12345678")), probe(result))


def options(slurm: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    return dict(asked(slurm, **cluster)["additional_parameters"])


def setup(slurm: dict[str, Any], workdir: Path = Path("/")) -> list[str]:
    """Return the lines before the job without those that every job begins with."""
    lines = [line for line in whole_setup(slurm, workdir) if not line.startswith("export PYTHONPATH=/runs/gold-")]
    return lines[len(whole_setup({"setup": [], "wrapper": []}, workdir)) - 1 :]


def whole_setup(slurm: dict[str, Any], workdir: Path = Path("/")) -> list[str]:
    task = probe(spec(slurm), workdir)
    return list(sbatch.make_submitit_parameters(RunDir(Path("/runs/gold-12345678")), task)["setup"])


# --- whole scripts

EVERYTHING = {
    "partition": "gpu", "account": 4711, "qos": "normal", "constraint": "a100&ib",
    "exclude": "node[7-8]", "minutes": "1-00:00:00", "memory": "0", "cpus_per_task": 8, "gpus": "gres",
    "gpu_type": "a100", "extra": {"reservation": "maintenance", "mail-type": ["END", "FAIL"], "nice": 100, "gres": "nvme:1", "hold": False},
    "srun_extra": {"cpu-bind": "none", "label": True}, "setup": ["module load cuda"],
    "environment": {"NCCL_DEBUG": "WARN", "NOTE": "it's fine"}, "python": "apptainer exec --nv image.sif python",
    "wrapper": str(assets.find_asset("templates/slurm-wrapper.sh")),
}  # fmt: skip


SCRIPTS = {
    "bare": probe(spec({"setup": []}, device="cpu", gpus_per_node=1)),
    "default": probe(spec()),
    "everything": train(spec(EVERYTHING)),
    "torchrun": train(spec({"launcher": "torchrun", "cpus_per_task": 8, "minutes": 240})),
    "check": check(spec({"exclusive": False, "gpus": "gpus_per_task"})),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_the_golden_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("srun", "sbatch"):  # submitit looks whether there is an srun
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = RunDir(tmp_path / "gold-12345678")
    script = SlurmLauncher().render_script(run, SCRIPTS[name])
    templates = assets.find_asset("templates/slurm-setup.sh").parent
    for path, name_of_it in ((run.path, "RUN"), (templates, "TEMPLATES"), (sys.executable, "PYTHON")):
        script = script.replace(str(path), name_of_it)
    script = re.sub(r"tula-[^/]*\.zip", "tula.zip", script)
    script = re.sub(r"(-train-1)-[0-9a-f]{8}\b", r"\1-PLACE", script)
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("TULA_WRITE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden_script_is_sound_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_job_starts_in_the_folder_that_it_asks_for_and_gets_its_comment_back(tmp_path: Path) -> None:
    task = probe(spec({"extra": {"chdir": "/scratch/a b", "comment": "it's ours"}}))
    script = SlurmLauncher().render_script(RunDir(tmp_path / "gold-12345678"), task)
    assert "cd '/scratch/a b'\n" in script and "SLURM_SUBMIT_DIR" not in script
    assert """Comment='it'"'"'s ours'""" in script and "tula: delayed" not in script


# --- emptiness


def test_nothing_is_asked_for_that_the_spec_does_not_name() -> None:
    result = asked(device="cpu")
    given = {key: value for key, value in result.items() if value is not None}
    assert set(given) == {
        "job_name", "nodes", "ntasks_per_node", "time", "signal_delay_s", "exclusive", "setup", "srun_args",
        "additional_parameters",
    }  # fmt: skip
    assert result["additional_parameters"] == {"no-requeue": True}
    assert result["srun_args"][:-2] == ["--kill-on-bad-exit=1"]


def test_empty_settings_ask_for_nothing() -> None:
    empty = {"partition": "", "qos": None, "memory": "", "setup": [], "wrapper": []}
    assert (
        asked({**empty, "extra": {"comment": "", "reservation": "", "nice": None, "hold": False, "mail-type": []}})
        == asked()
    )


def test_zero_is_something() -> None:
    assert options({"memory": 0, "extra": {"nice": 0}}) == {"no-requeue": True, "mem": "0", "nice": "0"}


# --- GPUs

GPU_WORDS = {"gpus_per_node", "gpus_per_task", "gres", "num_gpus", "mem_per_gpu"}


@pytest.mark.parametrize("gpu_type", [None, "a100"])
@pytest.mark.parametrize(
    ("form", "value", "typed"),
    [
        ("gpus_per_node", "4", "a100:4"),
        ("gpus_per_task", "1", "a100:1"),
        ("gres", "gpu:4", "gpu:a100:4"),
    ],
)
def test_gpus_are_asked_for_in_one_form(form: str, value: str, typed: str, gpu_type: str | None) -> None:
    result = asked({"gpus": form, "gpu_type": gpu_type})
    assert {key: result[key] for key in GPU_WORDS & set(result)} == {form: typed if gpu_type else value}


@pytest.mark.parametrize(("slurm", "device"), [({"gpus": "none"}, "cuda"), ({"gpu_type": "a100"}, "cpu")])
def test_no_gpus_are_asked_for_where_there_are_none_to_ask_for(slurm: dict[str, Any], device: str) -> None:
    assert not GPU_WORDS & set(asked(slurm, device=device))


def test_other_resources_join_the_gpus_in_one_gres() -> None:
    slurm = {"extra": {"gres": ["nvme:1", "tmp:5G"]}}
    assert asked({**slurm, "gpus": "gres"})["gres"] == "gpu:4,nvme:1,tmp:5G"
    assert "gres" not in options({**slurm, "gpus": "gres"})
    assert options(slurm)["gres"] == "nvme:1,tmp:5G"
    assert asked(slurm)["gpus_per_node"] == "4"


def test_srun_is_reported_the_binding_that_it_does_not_find_behind_a_type() -> None:
    typed = {"gpus": "gpus_per_task", "gpu_type": "a100"}
    assert asked(typed)["srun_args"][1:-2] == ["--gpu-bind=per_task:1"]
    assert asked({**typed, "srun_extra": {"gpu_bind": "closest"}})["srun_args"][1:-2] == ["--gpu-bind=closest"]
    for result in (asked({"gpus": "gpus_per_task"}), asked({"gpu_type": "a100"}), asked(typed, device="cpu")):
        assert len(result["srun_args"][:-2]) == 1


# --- tasks and CPUs


def test_srun_starts_a_task_a_gpu() -> None:
    result = asked({"cpus_per_task": 8})
    assert (result["nodes"], result["ntasks_per_node"], result["cpus_per_task"]) == (2, 4, 8)
    assert "--cpus-per-task=8" in result["srun_args"]


def test_torchrun_is_one_task_a_node_with_the_cpus_and_gpus_of_all_its_ranks() -> None:
    result = asked({"launcher": "torchrun", "cpus_per_task": 8})
    assert (result["nodes"], result["ntasks_per_node"], result["cpus_per_task"]) == (2, 1, 32)
    assert "--cpus-per-task=32" in result["srun_args"]
    assert result["gpus_per_node"] == "4"


def test_whole_nodes_unless_told_otherwise() -> None:
    assert asked()["exclusive"] is True
    assert asked({"exclusive": False})["exclusive"] is None


def with_workers(workers: object, **slurm: object) -> JobSpec:
    train = spec().train.model_copy(update={"workers": workers})
    return spec(slurm).model_copy(update={"train": train})


def test_workers_from_the_cores_are_doubted_only_where_there_are_fewer_than_it_takes() -> None:
    assert sbatch.warn_too_few_cpus(with_workers("auto", cpus_per_task=3)) == []
    warnings = sbatch.warn_too_few_cpus(with_workers("auto", cpus_per_task=2))
    assert warnings == [messages.too_few_cpus_per_task(cpus_per_task=2, workers=2)]


def test_few_cpus_are_doubted() -> None:
    warnings = sbatch.warn_too_few_cpus(spec({"cpus_per_task": 3}))
    assert warnings == [messages.too_few_cpus_per_task(cpus_per_task=3, workers=3)]
    assert sbatch.warn_too_few_cpus(spec({"cpus_per_task": 4})) == []


def test_cpus_that_nobody_asks_for_are_doubted_where_workers_need_them() -> None:
    assert sbatch.warn_too_few_cpus(spec()) == [messages.cpus_per_task_not_set(workers=3, needed=4)]
    assert sbatch.warn_too_few_cpus(spec({"extra": {"cpus-per-gpu": 8}})) == []
    assert sbatch.warn_too_few_cpus(with_workers("auto")) == [messages.cpus_per_task_not_set(workers=None, needed=None)]
    alone = spec().model_copy(update={"train": spec().train.model_copy(update={"workers": 0})})
    assert sbatch.warn_too_few_cpus(alone) == []


# --- time


@pytest.mark.parametrize(("minutes", "delay"), [(1, 15), (2, 30), (5, 75), (6, 90), (600, 90)])
def test_the_signal_comes_within_the_last_quarter(minutes: int, delay: int) -> None:
    submitit_parameters = sbatch.make_submitit_parameters(RunDir(Path("/runs/gold")), train(spec({"minutes": minutes})))
    assert (submitit_parameters["time"], submitit_parameters["signal_delay_s"]) == (minutes, delay)


def test_kinds_of_tasks_have_their_own_limits() -> None:
    run, result = RunDir(Path("/runs/gold")), spec({"minutes": 77})
    assert sbatch.make_submitit_parameters(run, probe(result))["time"] == 22
    assert sbatch.make_submitit_parameters(run, train(result))["time"] == 77
    assert sbatch.make_submitit_parameters(run, check(result))["time"] == 5


def test_links_of_a_chain_have_a_name_and_wait() -> None:
    run, task = RunDir(Path("/runs/gold-12345678")), train(spec())
    first = sbatch.make_submitit_parameters(run, task)
    second = sbatch.make_submitit_parameters(run, task, name="tula-x.2", dependency="afterany:17")
    assert (first["job_name"], first.get("dependency")) == ("tula-gold-12345678-train-1", None)
    assert (second["job_name"], second["dependency"]) == ("tula-x.2", "afterany:17")
    assert {k: v for k, v in second.items() if k not in ("job_name", "dependency")} == {
        k: v for k, v in first.items() if k != "job_name"
    }


# --- what else is asked for


def test_options_are_written_as_sbatch_reads_them() -> None:
    extra = {"mail_type": ["END", "FAIL"], "nice": 5, "hold": True, "spread-job": False, "wckey": "w"}
    assert options({"extra": extra}) == {
        "no-requeue": True, "mail-type": "END,FAIL", "nice": "5", "hold": True, "wckey": "w",
    }  # fmt: skip


def test_options_of_srun() -> None:
    result = asked({"srun_extra": {"cpu_bind": "none", "label": True, "overlap": False}})
    assert result["srun_args"][:-2] == ["--kill-on-bad-exit=1", "--cpu-bind=none", "--label"]


# --- the shell before the job


def bash(lines: list[str], program: str, **environ: str) -> str:
    environment = {"PATH": os.environ["PATH"], **environ}
    script = "\n".join([*lines, program])
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_environment_reaches_the_job_as_it_is_written() -> None:
    values = {"QUOTES": 'it\'s "$HOME" `x`', "LINES": "a\nb", "EMPTY": "", "NUMBER": 3}
    lines = setup({"environment": {**values, "DROPPED": None}})
    program = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    data = json.loads(bash(lines, program, DROPPED="kept"))
    assert {name: data[name] for name in values} == {**values, "NUMBER": "3"}
    assert data["DROPPED"] == "kept"


def test_environment_holds_whatever_the_set_up_has_set() -> None:
    lines = setup({"setup": ["export THREADS=1"], "environment": {"THREADS": 8}})
    assert bash(lines, "echo $THREADS") == "8\n"


def test_a_job_imports_the_tula_that_it_is_submitted_with_before_any_that_the_set_up_brings() -> None:
    lines = whole_setup({"setup": ["export PYTHONPATH=/site/tula"], "environment": {"NOTE": "x"}})
    first, *others = bash(lines, 'echo "$PYTHONPATH"').strip().split(":")
    assert (Path(first).parent, others) == (Path("/runs/gold-12345678/code"), ["/site/tula"])
    assert first.endswith(".zip")
    assert bash(whole_setup({}), 'echo "$PYTHONPATH"', PYTHONPATH="") == f"{first}\n", "and not the working directory"


def test_every_job_mends_what_srun_inherits() -> None:
    lines = whole_setup({"setup": []})
    inherited = {"SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_BIND_TYPE": "x", "SLURM_CPUS_PER_TASK": "8"}
    result = bash(lines, "env", **inherited)
    assert "SLURM_CPU_BIND" not in result
    assert "SLURM_MEM_BIND" not in result
    assert "SRUN_CPUS_PER_TASK=8\n" in result
    assert "SRUN_CPUS_PER_TASK" not in bash(lines, "env")
    assert "SLURM_EXPORT_ENV=ALL\n" in bash(lines, "env", SLURM_EXPORT_ENV="NONE")


def test_set_up_is_the_specs_else_the_sites(no_files_of_a_site: Path, tmp_path: Path) -> None:
    assert setup({}) == []
    (no_files_of_a_site / "slurm-setup.sh").write_text("echo site\n")
    (tmp_path / "own.sh").write_text("echo own\n")
    assert setup({}) == [f"# {no_files_of_a_site}/slurm-setup.sh", "echo site"]
    assert setup({"setup": "own.sh"}, tmp_path) == [f"# {tmp_path}/own.sh", "echo own"]
    assert setup({"setup": ["echo line"]}) == ["# cluster.setup", "echo line"]
    assert setup({"setup": []}) == []


def test_a_script_around_the_ranks_is_the_specs_else_the_sites(no_files_of_a_site: Path) -> None:
    (no_files_of_a_site / "slurm-wrapper.sh").write_text("echo wrapped\n")
    assert "echo wrapped" in setup({})
    assert setup({"wrapper": []}) == []
    assert setup({"wrapper": ["numactl"]}) == []


@pytest.mark.parametrize("setting", ["setup", "wrapper"])
def test_file_that_cannot_be_read_is_the_users_to_mend(setting: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        setup({setting: "none.sh"}, tmp_path)
    assert str(tmp_path / "none.sh") in caught.value.message
    assert {"setup": "cluster.setup", "wrapper": "cluster.slurm.wrapper"}[setting] in caught.value.hint
    (tmp_path / "none.sh").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="cannot read"):
        setup({setting: "none.sh"}, tmp_path)


# --- wrappers


def test_no_wrapper_by_default() -> None:
    assert sbatch.get_wrapper_arguments(spec(), environ={}) == []


def test_wrapper_of_the_spec_stands_before_the_rank() -> None:
    assert sbatch.get_wrapper_arguments(spec({"wrapper": ["numactl", "--cpunodebind=0"]}), environ={}) == [
        "numactl", "--cpunodebind=0",
    ]  # fmt: skip


def test_script_runs_around_the_rank_as_it_was_at_submission(tmp_path: Path) -> None:
    text = "  # It's \"indented\"\ncase $LOCAL_RANK in 1) export CARD='mlx5 1';; esac\n\n" + 'exec "$@"\n'
    (tmp_path / "own.sh").write_text(text)
    result = spec({"wrapper": "own.sh", "setup": []})
    lines = sbatch.make_submitit_parameters(RunDir(tmp_path), probe(result, tmp_path))["setup"]
    (tmp_path / "own.sh").unlink()
    carried = json.loads(bash(lines, f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"))
    assert carried["TULA_WRAPPER"] == f"# {tmp_path}/own.sh\n{text}"

    command = [
        *sbatch.get_wrapper_arguments(result, environ=carried),
        "sh",
        "-c",
        'echo "$CARD,$1,$$"; exit 7',
        "x",
        "a b",
    ]
    with subprocess.Popen(command, env={**carried, "LOCAL_RANK": "1"}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"mlx5 1,a b,{process.pid}\n"
    assert process.returncode == 7


def test_words_of_the_spec_take_the_place_of_a_script() -> None:
    assert sbatch.get_wrapper_arguments(spec({"wrapper": ["numactl"]}), environ={"TULA_WRAPPER": "text"}) == ["numactl"]
    assert sbatch.get_wrapper_arguments(spec(), environ={"TULA_WRAPPER": "text"}) == [
        "bash",
        "-c",
        "text",
        "tula-wrapper",
    ]


def test_packaged_wrapper_changes_nothing() -> None:
    text = assets.find_asset("templates/slurm-wrapper.sh").read_text()
    command = sbatch.get_wrapper_arguments(spec(), environ={"TULA_WRAPPER": text})
    assert subprocess.run([*command, "echo", "a  b"], capture_output=True, text=True).stdout == "a  b\n"


def test_a_job_is_submitted_to_the_cluster_whose_queue_is_asked():
    with pytest.raises(ValueError, match="login node of that cluster"):
        spec({"extra": {"clusters": "other"}})
