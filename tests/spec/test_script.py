"""A script's command line: placeholders, the section, and what is recognised in what somebody types today."""

import pytest
import yaml
from pydantic import ValidationError

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec, describe_training_method
from tula_cli.spec.load import dump_yaml, validate_job
from tula_cli.spec.scripts.placeholders import (
    PLACEHOLDERS,
    fill_command,
    fill_text,
    find_placeholders,
    find_program_name,
)
from tula_cli.spec.scripts.recognition import recognise_line
from tula_cli.spec.scripts.script import Script, count_script_samples
from tula_cli.spec.scripts.script import count_script_steps as steps_of
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature

COMMAND = "train.py -b {local_batch} --lr {lr}"
SECTION = {"command": COMMAND, "length": {"epochs": 3}, "reference": {"batch": 256, "lr": 0.1}}


def section(**changes: object) -> Script:
    return Script.model_validate({key: value for key, value in {**SECTION, **changes}.items() if value is not None})


# --- placeholders


def test_values_stand_in_their_places_and_doubled_braces_are_braces() -> None:
    values = {"local_batch": 32, "lr": 0.1 + 0.2, "out": "/a folder/x"}
    result = fill_command("train.py -b {local_batch} --lr={lr} '{{x}}' --out {out}", values)
    assert result == ["train.py", "-b", "32", "--lr=0.3", "{x}", "--out", "/a folder/x"]


def test_a_value_is_one_word_whatever_is_in_it() -> None:
    assert fill_command("a {out}", {"out": "x; rm -rf $HOME 'y"}) == ["a", "x; rm -rf $HOME 'y"]


@pytest.mark.parametrize(
    ("value", "written"), [(10**15, "1000000000000000"), (2.0, "2"), (1e-7, "1e-07"), (0.05, "0.05")]
)
def test_numbers_are_written_as_people_do(value: float, written: str) -> None:
    assert fill_text("{lr}", {"lr": value}) == written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{locl_batch}", "did you mean {local_batch}"),
        ("a { b", "a single {"),
        ("{batch}}", "a single }"),
        ("{}", "unknown placeholder {}"),
    ],
)
def test_what_is_no_placeholder_is_reported(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"placeholder|single") as error:
        find_placeholders(text)
    assert words in str(error.value)


def test_each_placeholder_can_be_filled() -> None:
    text = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    assert find_placeholders(text) == tuple(PLACEHOLDERS)
    assert fill_text(text, dict.fromkeys(PLACEHOLDERS, 1)) == " ".join("1" * len(PLACEHOLDERS))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python /a/train.py -b {batch}", "train.py"),
        ("accelerate launch --config a.yaml run.py -b {batch}", "run.py"),
        ("python -m pack.train -b {batch}", "pack.train"),
        ("bash run.sh {batch}", "run.sh"),
        ("bash run.bash {batch}", "run.bash"),
        ("/opt/bin/trainer {batch}", "trainer"),
        ("torchrun --nnodes 2 train.py -b {batch}", "train.py"),
        ("python -m torch.distributed.run -m pkg.train {batch}", "pkg.train"),
        ("lightning fit {batch}", "lightning"),
        ("{out}/x {batch}", "x"),
        ("python -m mod.train --lr 0.1 -m 0.9", "mod.train"),
        ("python -m torch.distributed.run --nproc-per-node 2 -m mod.train -m 0.9", "mod.train"),
        ("torchrun --nproc-per-node 2 -m mod.train", "mod.train"),
        ("python -m torch.distributed.run train.py -m 0.9", "train.py"),
        ("./train --lr 1", "train"),
    ],
)
def test_a_command_is_named_by_its_program_not_by_its_options(command: str, name: str) -> None:
    assert find_program_name(command) == name


# --- the section


def test_the_placeholders_of_all_its_parts_are_known() -> None:
    result = section(resume={"args": "--resume {checkpoint}", "checkpoint": "{out}/*.pth"}, probe_args="-j {workers}")
    assert result.placeholders == {"local_batch", "lr", "checkpoint", "workers"}


@pytest.mark.parametrize(
    "end",
    [
        " --glue '|' --price '$X'",
        " --url http://x?a=1&b=2",
        " --between ';'",
        " --x='a | b' --y=\"it's; \\$5\" \\;",
    ],
)
def test_what_is_quoted_is_not_for_a_shell(end: str) -> None:
    assert section(command=COMMAND + end).command.endswith(end)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": "train.py --lr {lr}"}, "no placeholder for the batch"),
        ({"command": "train.py -b {micro_batch} --lr {lr}"}, "neither {accumulate} nor {accumulate_total}"),
        ({"command": COMMAND + " {bach}"}, "did you mean {batch}"),
        ({"command": COMMAND + " 'x"}, "no closing quotation"),
        ({"command": COMMAND + " | tee log"}, "'|' needs a shell"),
        ({"command": COMMAND + " $ARGS"}, "'$ARGS' needs a shell"),
        ({"command": COMMAND + ' --data="$DATA/x"'}, "needs a shell"),
        ({"command": COMMAND + "; date"}, "needs a shell"),
        ({"command": COMMAND + " --resume {checkpoint}"}, "to script.resume.args"),
        ({"command": COMMAND + " --gpu {local_rank}", "launch": "node"}, "differs between the processes of a node"),
        ({"command": "train.py -b {local_batch}"}, "reference.lr: has no effect"),
        ({"reference": {"batch": 256}}, "command: has {lr}, but script.reference.lr is not set"),
        ({"command": COMMAND + " --epochs {epochs}", "length": {"steps": 9}}, "but script.length.epochs is not set"),
        ({"length": {}}, "got none"),
        ({"length": {"epochs": 1, "steps": 2}}, "got epochs and steps"),
        ({"metric": {"top1": "Acc"}}, "must have exactly one group"),
        ({"metric": {"top1": "Acc ("}}, "regular expression"),
        ({"save": "SIGKILL"}, "or file:PATH, got 'SIGKILL'"),
        ({"save": "file:{oot}/stop"}, "did you mean {out}"),
    ],
)
def test_what_cannot_work_is_reported(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        section(**changes)
    assert words in str(error.value)


def test_a_wrong_pattern_is_one_problem() -> None:
    with pytest.raises(SpecError) as caught:
        validate_job({"script": {**SECTION, "metric": {"top1": "Acc [0-9.]+"}}}, source="test")
    assert [problem.path for problem in caught.value.problems] == ["script.metric.top1"]
    assert "Rows" not in str(caught.value.problems)


def test_a_metric_is_a_pattern_of_the_output_and_no_file() -> None:
    assert section(metric={"top1": "Acc@1 ([0-9.]+)"}).metric == {"top1": "Acc@1 ([0-9.]+)"}
    with pytest.raises(ValidationError, match="tula no longer reads files with JSON lines"):
        section(metric={"loss": {"jsonl": "{out}/log.jsonl", "key": "loss"}})


# --- recognised


def complete(line: str) -> Script:
    """The section that is recognised, which has to be sound."""
    return Script.model_validate({"length": {"epochs": 1}, **recognise_line(line).script})


def test_torchruns_part_is_tulas_and_the_numbers_give_way() -> None:
    result = recognise_line(
        "torchrun --standalone --nproc-per-node=4 train.py -b 64 --lr 0.1 --epochs 90 --name 'a b' -j 8"
    )
    assert result.script == {
        "command": "python train.py -b {local_batch} --lr {lr} --epochs {epochs} --name 'a b' -j {workers}",
        "launch": "rank",
        "reference": {"batch": 256, "lr": 0.1},
        "length": {"epochs": 90},
    }
    assert (result.gpus_per_node, result.values["workers"]) == (4, "8")
    assert result.flags == {"-b": "local_batch", "--lr": "lr", "--epochs": "epochs", "-j": "workers"}


@pytest.mark.parametrize(
    ("line", "command", "batch"),
    [
        ("python t.py --bs=8", "python t.py --bs={local_batch}", 8),
        (
            "python -m torch.distributed.run --nproc_per_node 2 -m a.b -b 32 --wd -1",
            "python -m a.b -b {local_batch} --wd -1",
            64,
        ),
        (
            "python t.py data.batch_size=16 optimizer.lr=1e-3",
            "python t.py data.batch_size={local_batch} optimizer.lr={lr}",
            16,
        ),
        ("t.py --global-batch-size 512 --fmt {x}", "t.py --global-batch-size {batch} --fmt {{x}}", 512),
        (
            "t.py --batch_size=12 --gradient_accumulation_steps=40",
            "t.py --batch_size={micro_batch} --gradient_accumulation_steps={accumulate}",
            480,
        ),
        ("t.py -b 8 --batch-size-eval 64 --lr-warmup 3", "t.py -b {local_batch} --batch-size-eval 64 --lr-warmup 3", 8),
    ],
)
def test_forms_of_options(line: str, command: str, batch: int) -> None:
    result = complete(line)
    assert (result.command, result.reference.batch) == (command, batch)


def test_accelerate_stays_and_is_reported_of_the_nodes() -> None:
    result = recognise_line("accelerate launch --num_processes 8 --num_machines 2 --mixed_precision bf16 run.py -b 4")
    assert result.gpus_per_node == 4
    assert result.script["launch"] == "node"
    assert result.script["command"] == (
        "accelerate launch --num_processes {world} --num_machines {nodes} --machine_rank {node_rank}"
        " --main_process_ip {master_addr} --main_process_port {master_port} --mixed_precision bf16 run.py -b {local_batch}"
    )


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--mixed_precision bf16 --num_processes 4", "--mixed_precision bf16 "),
        ("--config_file a.yaml --use_fsdp --num_processes=4", "--config_file a.yaml --use_fsdp "),
        ("--num_processes 4 --use_fsdp", "--use_fsdp "),
    ],
)
def test_a_launchers_options_are_found_wherever_they_stand(options: str, kept: str) -> None:
    result = recognise_line(f"accelerate launch {options} run.py -b 4")
    assert result.gpus_per_node == 4
    assert result.script["command"].endswith(f"--main_process_port {{master_port}} {kept}run.py -b {{local_batch}}")


def test_a_checkpoint_to_go_on_from_is_for_later() -> None:
    result = complete("t.py -b 4 --resume old.pth --output-dir runs/1")
    assert result.command == "t.py -b {local_batch} --output-dir {out}"
    assert result.resume is not None and result.resume.args == "--resume {checkpoint}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py --lr 0.1", "no batch size found in"),
        ("python train.py -b large", "-b large: 'large' is not a number of samples"),
        ("python 'train.py", "is not closed"),
        ("torchrun --nproc-per-node 4", "a launcher but no script"),
        ("torchrun --nprocs 4 train.py -b 4", "tula does not know option --nprocs of torchrun"),
        ("", "the command is empty"),
        ("python train.py --lr 0.1 --bz 64", "its options are --lr, --bz, and none is known to set the batch"),
        ("python train.py -b 0", "-b 0: '0' is not a number of samples"),
        ("python train.py -b 0.5", "-b 0.5: '0.5' is not a number of samples"),
        ("srun python train.py -b 4", "srun's --ntasks-per-node is not given"),
        ("deepspeed train.py -b 4", "--num_gpus is not given"),
        ("cd x && python train.py -b 4", "'cd x' cannot be used"),
        ("python train.py -b 4 --data $DATA", "'$DATA' needs a shell"),
    ],
)
def test_what_is_not_recognised_is_reported(line: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        recognise_line(line)
    assert words in str(error.value)


def test_the_hint_shows_a_placeholder_at_an_option_that_nothing_is_known_of() -> None:
    with pytest.raises(SpecError) as error:
        recognise_line("python train.py --lr 0.1 --bz 64")
    assert "--bz {local_batch}, or" in error.value.hint
    result = recognise_line("python train.py --lr 0.1 --bz {local_batch} --fmt {x}")
    assert result.script["command"] == "python train.py --lr {lr} --bz {local_batch} --fmt {{x}}"
    assert result.script["reference"] == {"lr": 0.1}


def test_all_machines_of_the_launcher_make_the_batch_of_today() -> None:
    result = recognise_line("torchrun --nnodes 3 --nproc-per-node 4 t.py -b 8")
    assert (result.gpus_per_node, result.ranks, result.script["reference"]) == (4, 12, {"batch": 96})
    result = recognise_line("accelerate launch --num_processes 8 --num_machines 2 t.py -b 8")
    assert (result.gpus_per_node, result.ranks, result.script["reference"]) == (4, 8, {"batch": 64})


def test_variables_before_the_command_are_set_by_a_program_as_there_is_no_shell() -> None:
    result = complete("OMP_NUM_THREADS=2 BATCH_SIZE=8 torchrun --nproc-per-node 2 t.py")
    assert result.command == "env OMP_NUM_THREADS=2 BATCH_SIZE={local_batch} python t.py"
    with pytest.raises(SpecError, match=r"\$DATA"):
        recognise_line("bash -c 'python t.py $DATA -b 4'")


@pytest.mark.parametrize("option", ["--max_steps -1", "--epochs 0.5", "--lr 0"])
def test_a_number_that_is_none_of_its_kind_stays(option: str) -> None:
    assert complete(f"t.py -b 4 {option}").command == f"t.py -b {{local_batch}} {option}"


# --- a job with a script


UNSCALED = {**SECTION, "command": "train.py -b {batch}", "reference": {"batch": 256}}
JOB = {"script": SECTION, "search": {"nodes": [1]}}


def job(**changes: object) -> JobSpec:
    return validate_job({**JOB, **changes}, source="test")


def test_a_job_has_a_script_in_place_of_the_loops_sections() -> None:
    spec = job(train={"accumulate": 2, "seed": 5})
    assert spec.script is not None and spec.script.command == COMMAND
    assert (spec.train.method, spec.train.epochs, spec.train.reference_batch) == ("lrs", 3, 256)
    for written in (spec.model_dump(mode="json"), spec.model_dump(exclude_unset=True), yaml.safe_load(dump_yaml(spec))):
        assert not written.keys() & {"model", "dataset", "optimizer", "schedule", "ags"}
        assert written["train"].keys() <= {
            "method",
            "lr_scaling",
            "accumulate",
            "seed",
            "workers",
            "oom_policy",
            "max_attempts",
        }
        again = validate_job(written, source="again")
        assert again.model_dump() == spec.model_dump() and again.train == spec.train


def test_a_job_without_a_script_is_written_as_ever() -> None:
    settings = {"model": {"name": "a:b"}, "dataset": {"name": "c:d"}, "optimizer": {"lr": 0.1}, "train": {"epochs": 1}}
    assert "script" not in validate_job(settings, source="test").model_dump()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"name": "resnet18"}}, "model has no effect with section script"),
        ({"train": {"epochs": 3}}, "train.epochs has no effect on a script"),
        (
            {"train": {"method": "polo"}},
            "train.method: polo needs tula's own training loop; for a script, set train.method to one of ags, lbt, lrs, ortho",
        ),
        ({"train": {"method": "lbt"}, "ags": {"delta": 0.1}}, "section ags has no effect with train.method: lbt"),
        ({"train": {"method": "ags"}, "ags": {"presett": "paper"}}, "ags.presett"),
        ({"train": {"method": "ags"}, "ags": "robust"}, "ags"),
        ({"script": {**SECTION, "length": {}}}, "script.length"),
        ({"script": {"command": COMMAND}}, "script.reference"),
        ({"script": {**SECTION, "comand": "x"}}, "script.comand"),
        ({"script": "train.py"}, "script"),
        ({"script": UNSCALED, "train": {"method": "lrs"}}, "neither {lr} nor {lr_factor}"),
        ({"script": UNSCALED, "train": {"lr_scaling": "sqrt"}}, "neither {lr} nor {lr_factor}"),
    ],
)
def test_what_reaches_no_script_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as error:
        job(**changes)
    assert words in "\n".join([str(error.value), *(f"{p.path} {p.message} {p.hint}" for p in error.value.problems)])


def test_gradient_scaling_of_a_script_is_robust_unless_it_says_otherwise() -> None:
    spec = job(train={"method": "ags"})
    assert (spec.ags.preset, spec.ags.fill_from_preset().source, spec.ags.apply_to) == ("robust", "local_norms", None)
    assert job(train={"method": "ags"}, ags={"preset": "paper"}).ags.fill_from_preset().granularity == "element"
    for written in (spec.model_dump(mode="json"), spec.model_dump(exclude_unset=True), yaml.safe_load(dump_yaml(spec))):
        assert written["ags"]["preset"] == "robust"
        assert validate_job(written, source="again").ags == spec.ags
    typed = job(train={"method": "ags"}, node_types={"small": {"pricing": {"price": 1.0}}})
    assert typed.select_type("small").ags == spec.ags


def test_each_type_of_node_has_the_script() -> None:
    spec = job(node_types={"small": {"pricing": {"price": 1.0}}, "large": {"pricing": {"price": 2.0}}})
    assert spec.select_type("large").script == spec.script


@pytest.mark.parametrize(
    ("length", "total", "steps"), [({"epochs": 3}, 3000, 47), ({"samples": 500}, 500, 8), ({"steps": 10}, 2560, 40)]
)
def test_a_length_is_so_many_samples_at_every_batch(length: dict[str, int], total: int, steps: int) -> None:
    script = section(length=length)
    assert count_script_samples(script, 1000) == total
    assert steps_of(script, 64, 1000) == steps


@pytest.mark.parametrize(
    ("changes", "probes", "training"),
    [
        ({"script": {**SECTION, "command": f"{COMMAND} --wd 0"}}, False, False),
        ({"script": {**SECTION, "reference": {"batch": 128, "lr": 0.1}}}, True, False),
        ({"script": {**SECTION, "length": {"epochs": 4}}}, True, False),
        ({"train": {"seed": 9}}, True, False),
        ({"script": {**SECTION, "metric": {"top1": "top1 ([0-9.]+)"}}}, True, True),
        ({"train": {"max_attempts": 3}}, True, True),
        ({"train": {"method": "ags"}}, False, False),
    ],
)
def test_signatures_tell_what_a_measurement_and_a_training_depend_on(
    changes: dict[str, object], probes: bool, training: bool
) -> None:
    first, other = job(), job(**changes)
    assert (compute_measurement_signature(first) == compute_measurement_signature(other)) is probes
    assert (
        compute_train_signature(first, nodes=1, batch=64) == compute_train_signature(other, nodes=1, batch=64)
    ) is training


@pytest.mark.parametrize(
    ("options", "train", "expected"),
    [
        ("--lr {lr}", {}, ("lrs", "sqrt")),
        ("--scale {lr_factor}", {}, ("lrs", "sqrt")),
        ("", {}, ("lbt", "auto")),
        ("--template {{lr}}", {}, ("lbt", "auto")),
        ("--lr {lr}", {"seed": 3, "method": None}, ("lrs", "sqrt")),
        ("--lr {lr}", {"method": "lbt"}, ("lbt", "auto")),
        ("--lr {lr}", {"method": "lrs"}, ("lrs", "auto")),
        ("--lr {lr}", {"lr_scaling": "linear"}, ("lbt", "linear")),
        ("--lr {lr}", {"lr_scaling": "none"}, ("lbt", "none")),
    ],
)
def test_a_script_without_a_method_has_a_scaled_rate_if_its_command_takes_one(
    options: str, train: dict[str, object], expected: tuple[str, str]
) -> None:
    reference = {"batch": 64, **({"lr": 0.1} if " {lr}" in options else {})}
    script = {"command": f"t.py -b {{batch}} {options}", "length": {"epochs": 1}, "reference": reference}
    spec = validate_job({"script": script, "train": train}, source="test")
    assert (spec.train.method, spec.train.lr_scaling) == expected
    is_default = "method" not in {key for key, value in train.items() if value} and "lr_scaling" not in train
    assert ("the default because" in describe_training_method(spec)) == is_default
    assert validate_job(spec.model_dump(exclude_unset=True), source="test") == spec
