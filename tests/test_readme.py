"""What README shows works."""

import re
from pathlib import Path

import pytest

from tula_cli.spec.load import load_spec
from tula_cli.spec.yaml_text import parse_yaml

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_smallest_job_is_a_valid_spec(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(blocks("yaml")[0])
    spec = load_spec(path, environ={}, site_files=())
    assert spec.search.nodes == [1, 2, 4]


def test_every_yaml_parses() -> None:
    for text in blocks("yaml"):
        assert parse_yaml(text, source="README")


@pytest.mark.torch
def test_the_example_of_the_optimizer_runs() -> None:
    example = next(text for text in blocks("python") if "TulaOptimizer" in text)
    names: dict[str, object] = {}
    exec(compile(example, "README", "exec"), names)
    report = names["optimizer"].report()  # type: ignore[attr-defined]
    assert report["refreshes"] == 3


def test_every_command_in_the_table_exists() -> None:
    from tula_cli.cli.app import app

    known = {(info.name or info.callback.__name__).rstrip("_") for info in app.registered_commands if info.callback}
    named = set(re.findall(r"`tula (\w+)", README))
    assert named <= known
    assert known <= named | {"version"}
