"""Command lines as people type them (tests/fixtures/commands/typed.yaml), and words that have to reach the ranks as they are."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tula_cli.errors import SpecError
from tula_cli.services.init import make_job_from_command
from tula_cli.spec.load import validate_job
from tula_cli.spec.scripts.launchers import KnownFacts, UnknownFact, has_launcher
from tula_cli.spec.scripts.placeholders import PLACEHOLDERS, fill_command, find_program_name
from tula_cli.spec.scripts.recognition import recognise_line
from tula_cli.spec.scripts.shell import ShellWord
from tula_cli.spec.yaml_text import parse_yaml

ROWS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parents[2] / "fixtures/commands/typed.yaml").read_text())
READ = [row for row in ROWS if "refused" not in row]
REFUSED = [row for row in ROWS if "refused" in row]


@pytest.mark.parametrize("row", READ, ids=lambda row: row["command"][:60])
def test_a_command_is_understood(row: dict[str, Any]) -> None:
    result = recognise_line(row["command"])
    record = {
        "launch": result.script["launch"],
        "per_node": result.gpus_per_node or 1,
        "nodes": result.nodes,
        "batch": result.script["reference"]["batch"],
        "lr": result.script["reference"].get("lr"),
        "wrapper": list(result.wrapper),
        **result.script.get("length", {}),
    }
    requested = {key: value for key, value in row.items() if key not in ("command", "environment")}
    assert {key: record.get(key) for key in requested} == requested
    assert all(f"{name}={value}" in result.script["command"] for name, value in row.get("environment", {}).items())
    assert f"global batch {row['batch']}" in result.summary
    validate_job(
        {"script": {"length": {"epochs": 1}, **result.script}, "train": {"accumulate": result.accumulate}}, source="row"
    )


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["command"][:60])
def test_what_is_not_known_is_named_and_never_guessed(row: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as error:
        recognise_line(row["command"])
    assert row["refused"] in error.value.message + error.value.hint
    assert error.value.hint


@pytest.mark.parametrize(
    ("start", "command"),
    [
        ("python -mtorch.distributed.run --nproc_per_node 4 t.py", "python t.py"),
        ("python -um torch.distributed.run --nproc_per_node 4 t.py", "python -u t.py"),
        ("python -OOumtorch.distributed.run --nproc_per_node 4 -m pkg.t", "python -OOu -m pkg.t"),
        ("python -uX dev -Wignore -m torch.distributed.run --nproc_per_node 4 t.py", "python -uX dev -Wignore t.py"),
        ("python --check-hash-based-pycs never -mtorch.distributed.run --nproc_per_node 4 t.py",
         "python --check-hash-based-pycs never t.py"),
        ("srun --ntasks-per-node 1 python -mtorch.distributed.run --nproc_per_node 4 t.py", "python t.py"),
        ("srun --ntasks-per-node 4 python -um pkg.t --interpreter python -mpkg", "python -u -m pkg.t --interpreter python -mpkg"),
    ],
)  # fmt: skip
def test_options_of_python_may_be_combined_and_attached(start: str, command: str) -> None:
    result = recognise_line(f"{start} -b 8")
    assert (result.script["command"], result.gpus_per_node) == (f"{command} -b {{local_batch}}", 4)


@pytest.mark.parametrize(
    ("line", "has_one"),
    [
        ("python -mtorch.distributed.run t.py", True),
        ("uv run python -um deepspeed.launcher.runner t.py", True),
        ("python t.py -mtorchrun", False),
        ("python -Wtorchrun t.py", False),
    ],
)
def test_a_launcher_is_seen_after_combined_options_of_python(line: str, has_one: bool) -> None:
    assert has_launcher([ShellWord(word, word) for word in line.split()]) is has_one


@pytest.mark.parametrize(
    ("command", "name"),
    [("python -mpkg.t -b 8", "pkg.t"), ("python -um torch.distributed.run -m pkg.t -m x", "pkg.t")],
)
def test_the_name_of_a_command_is_its_module(command: str, name: str) -> None:
    assert find_program_name(command) == name


@pytest.mark.parametrize(
    ("line", "answers", "per_node", "batch"),
    [
        ("torchrun --nproc_per_node=$N t.py -b 8", {"processes per node": "4"}, 4, 32),
        ("python t.py --gpus 4 -b 8", {"processes per node": "2"}, 2, 16),
        ("srun python t.py -b 8", {"processes per node": "2"}, 2, 16),
        ("composer -n $N --world_size $W t.py -b 8", {"processes per node": "2", "nodes": "3"}, 2, 48),
        ("bash dist.sh -b 8", {"processes per node": "8"}, 8, 64),
        ("torchrun --nproc_per_node 4 t.py --train_batch_size 64", {"batch of --train_batch_size": "all"}, 4, 64),
        ("torchrun --nproc_per_node 4 t.py --train_batch_size 64", {"batch of --train_batch_size": "one"}, 4, 256),
        (
            "torchrun --nproc_per_node 4 t.py -b 2 --gradient_accumulation_steps 8",
            {"micro-batches of --gradient_accumulation_steps": "all"},
            4,
            16,
        ),
        (
            "torchrun --nproc_per_node 4 t.py --n 2 --wd 8",
            {"option of the batch": "--n", "batch of --n": "one"},
            4,
            8,
        ),
    ],
)
def test_an_answer_settles_what_was_asked(line: str, answers: dict[str, str], per_node: int, batch: int) -> None:
    requested: list[str] = []
    for _ in range(len(answers)):
        with pytest.raises(UnknownFact) as unknown:
            recognise_line(line, KnownFacts({key: answers[key] for key in requested}))
        assert unknown.value.question and unknown.value.hint
        requested.append(unknown.value.key)
    assert set(requested) == answers.keys()
    result = recognise_line(line, KnownFacts(answers))
    assert (result.gpus_per_node, result.script["reference"]["batch"]) == (per_node, batch)


@pytest.mark.parametrize(
    ("line", "command", "batch"),
    [
        ("torchrun --nproc_per_node 4 t.py --bz {local_batch=64}", "python t.py --bz {local_batch}", 256),
        ("torchrun --nproc_per_node 4 t.py --bz={batch=64}", "python t.py --bz={batch}", 64),
        (
            "torchrun --nproc_per_node 4 t.py --m {micro_batch=2} --k {accumulate_total=8}",
            "python t.py --m {micro_batch} --k {accumulate_total}",
            16,
        ),
        ("python t.py --gpus {gpus_per_node=4} -b 8", "python t.py --gpus {gpus_per_node} -b {local_batch}", 32),
    ],
)
def test_a_placeholder_says_the_number_of_today(line: str, command: str, batch: int) -> None:
    result = recognise_line(line)
    assert (result.script["command"], result.script["reference"]["batch"]) == (command, batch)


def test_a_placeholder_without_a_number_in_it_is_refused() -> None:
    with pytest.raises(SpecError, match="'lots' is not a valid value of"):
        recognise_line("python t.py --bz {local_batch=lots}")


def test_only_an_option_that_may_be_a_batch_is_proposed_for_one() -> None:
    with pytest.raises(SpecError) as error:
        recognise_line("python main.py --arch 50 --bz 64")
    assert "--bz {local_batch" in error.value.hint and "--arch {" not in error.value.hint
    with pytest.raises(SpecError) as error:
        recognise_line("python main.py --arch 50")
    assert "--arch {" not in error.value.hint


@pytest.mark.parametrize(
    ("text", "flag"),
    [("add_argument('--local_rank')", "--local_rank={local_rank} "), ("'--local-rank'", "--local-rank={local_rank} "), ("", "")],
)  # fmt: skip
def test_launch_without_use_env_hands_on_the_rank_as_the_script_takes_it(text: str, flag: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(text)
    result = recognise_line(
        "python -m torch.distributed.launch --nproc_per_node 2 t.py -b 4", KnownFacts(folder=tmp_path)
    )
    assert result.script["command"] == f"python t.py {flag}-b {{local_batch}}"


def test_accelerate_reads_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 8\nnum_machines: 2\n")
    result = recognise_line("accelerate launch --config_file c.yaml t.py -b 4", KnownFacts(folder=tmp_path))
    assert (result.gpus_per_node, result.nodes, result.script["reference"]["batch"]) == (4, 2, 32)


# --- every word

WORDS = st.lists(
    st.one_of(
        st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12),
        st.text("ab '\"\\\n\t\r$`%{}=,.*?[]~#;|&<>()!-é\u2028\x85\x1b", max_size=8),
        st.sampled_from(["", "b=", "--flag", "{x}", "{{batch}}", "%s", "$HOME", "a=b c", "--x=", "-", "--", "{}", "\\", "'", "\n"]),
    ),
    max_size=6,
)  # fmt: skip


def _is_free(word: str) -> bool:
    """Tell whether a word stands for itself: no placeholder, and no option that has a meaning."""
    return not any(f"{{{name}" in word for name in PLACEHOLDERS) and not any(ch.isdigit() for ch in word)


@pytest.mark.parametrize("kind", ["local", "slurm"])
@given(words=WORDS)
def test_every_word_reaches_the_ranks_bit_for_bit(kind: Any, words: list[str]) -> None:
    words = [f":{word}" if word.startswith("-") else word for word in words if _is_free(word)]
    line = shlex.join(
        ["torchrun", "--nproc_per_node=2", "train.py", "--batch-size", "8", "--epochs", "3", "--", *words]
    )
    spec = validate_job(parse_yaml(make_job_from_command(line, kind).text, source="job.yaml"), source="job.yaml")
    assert spec.script is not None
    ranks = fill_command(spec.script.command, {"local_batch": 8, "epochs": 3})
    assert ranks == ["python", "train.py", "--batch-size", "8", "--epochs", "3", "--", *words]


def _names_program(word: str) -> bool:
    """Tell whether the word of a wrapper could be the program that it starts."""
    return "/" in word or word.endswith((".py", ".sh"))


@given(words=WORDS)
def test_wrappers_reach_the_ranks_bit_for_bit(words: list[str]) -> None:
    words = [f"+{word}" for word in words if _is_free(word) and not _names_program(word)]
    line = shlex.join(["wrap", *words, "torchrun", "--nproc_per_node=2", "t.py", "-b", "8", "--epochs", "3"])
    for kind in ("local", "slurm"):
        spec = validate_job(parse_yaml(make_job_from_command(line, kind).text, source="job.yaml"), source="job.yaml")
        assert spec.script is not None
        wrapper = spec.cluster.slurm.wrapper if spec.cluster.slurm else None
        ranks = [*(wrapper or []), *fill_command(spec.script.command, {"local_batch": 8, "epochs": 3})]
        assert ranks == ["wrap", *words, "python", "t.py", "-b", "8", "--epochs", "3"]
