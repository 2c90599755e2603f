"""Examples in README and docs/ work, and the pages of reference agree with the code."""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promises
import pytest
import reference
import results
import sessions
import table1_summary

from tula_cli.cli.app import COMMANDS
from tula_cli.services.profile_plan import compute_max_node_hours
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec, validate_job
from tula_cli.spec.methods import METHODS
from tula_cli.spec.yaml_text import parse_yaml

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", ROOT / "AGENTS.md", *sorted(ROOT.glob("docs/**/*.md"))]
}
MOST_WRITTEN = 120_000
"""Bytes of README and of the pages that people write for users, without generated pages, sessions and the guide for contributors."""
each_page = pytest.mark.parametrize("page", PAGES)


def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return what a link into a page may name: its headings, as Markdown's table of contents writes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def command_lines(page: str) -> Iterator[list[str]]:
    """Yield the words after `tula` of every command that a page shows."""
    for block in blocks(page, "sh"):
        yield from (shlex.split(line, comments=True)[1:] for line in block.splitlines() if line.startswith("tula "))
    for block in blocks(page, "console"):
        yield from (shlex.split(line)[2:] for line in block.splitlines() if line.startswith("$ tula "))
    for result in re.findall(r"`tula ([a-z][^`]*)`", text(page)):
        yield shlex.split(result)


def test_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) <= 110


def test_written_pages_stay_small() -> None:
    generated = {f"docs/reference/{name}" for name in (*reference.PAGES, results.PAGE.name)}
    apart = {*generated, "AGENTS.md", "docs/contributing.md"}
    written = [sessions.SESSION_BLOCK.sub("", text(page)) for page in PAGES if page not in apart]
    assert sum(len(page.encode()) for page in written) <= MOST_WRITTEN


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/contributing.md"])
def test_names_of_code_on_a_page_exist(page: str) -> None:
    folders = ("tula_cli", "tests", "docs", "benchmarks")
    code = "\n".join(file.read_text(encoding="utf-8") for name in folders for file in (ROOT / name).rglob("*.py"))
    names = re.findall(r"`\.?([A-Za-z]\w*)(?:\([^`]*\))?`", text(page))
    assert len(names) > 10
    assert [name for name in names if not name.isupper() and not re.search(rf"\b{name}\b", code)] == []
    functions = re.findall(r"`\.?([a-z]\w*)\([^`]*\)`", text(page))
    assert [name for name in functions if not re.search(rf"\b(def|class) {name}\b", code)] == []


def test_navigation_has_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]))
    assert listed == {page.removeprefix("docs/") for page in PAGES} - {"README.md", "AGENTS.md"}


def test_the_page_of_results_shows_what_was_measured() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.make_page(), "run `make docs`"


@pytest.mark.parametrize(
    ("claim", "page", "words"),
    [
        ("ramp recovers", "README.md", "`ramp` recovers {} of this drop"),
        (
            "ramp recovers",
            "docs/how-to/choose-a-method.md",
            "`ramp` recovered {} of the accuracy that is lost",
        ),
        ("ramp recovers", "docs/explanation/accuracy.md", "`ramp` recovers {} of this drop"),
        (
            "lbt loses",
            "docs/explanation/accuracy.md",
            "the accuracy drops, by {} on the small networks measured so far.",
        ),
        ("ags gains", "README.md", "(`ags`) gains {} on average"),
        ("median error", "README.md", "the median error of the predicted step time is {}"),
        ("probing cost", "README.md", "tula's search needed {} of the node-hours of measuring every"),
    ],
)
def test_figures_that_pages_quote_are_those_of_the_results(claim: str, page: str, words: str) -> None:
    assert words.format(results.quoted_figures()[claim]) in " ".join(text(page).split())


def test_no_ramp_diverged_or_ended_below_the_unchanged_large_batch() -> None:
    assert "it never diverged and was never less accurate than the large batch alone (`lbt`)" in text(
        "docs/how-to/choose-a-method.md"
    )
    measured = table1_summary.read_results(results.RESULTS / "table1.csv")
    ramps = [key for key in measured if key[1] == "ramp"]
    assert ramps and not any(
        math.isnan(measured[key].value) or table1_summary.is_below_lbt(measured, key) for key in ramps
    )
    runs = results.read_reduced()
    for network, method, batch in runs:
        if method == "ramp":
            assert min(runs[network, method, batch]) > max(runs[network, "lbt", batch])


@pytest.mark.torch
@pytest.mark.parametrize("name", sessions.SESSIONS)
def test_sessions_are_what_the_commands_print(name: str) -> None:
    shown = [place[3] for page in PAGES for place in sessions.SESSION_BLOCK.finditer(text(page)) if place[2] == name]
    assert shown and set(shown) == {sessions.make_session(name)}, "run `python docs/sessions.py`"


def test_every_session_that_a_page_names_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"<!-- session: ([\w-]+) -->", text(page))}
    assert named == set(sessions.SESSIONS)


@pytest.mark.torch
def test_the_tutorial_s_own_job_can_be_measured(tmp_path: Path) -> None:
    page = "docs/tutorial/slurm-job.md"
    (tmp_path / "flowers.py").write_text(blocks(page, "python")[0])
    (tmp_path / "job.yaml").write_text(blocks(page, "yaml")[0])
    words = [sys.executable, "-m", "tula_cli", "check", "job.yaml", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    report = json.loads(done.stdout)["data"]["report"]
    assert done.returncode == 0 and [job["nodes"] for job in report["jobs"]] == [1, 4]


@pytest.mark.torch
def test_the_tutorial_s_samples_are_the_same_in_every_process() -> None:
    module: dict[str, Any] = {}
    exec(blocks("docs/tutorial/slurm-job.md", "python")[0], module)
    train, test = (module["Flowers"](train=part).images for part in (True, False))
    assert train.equal(module["Flowers"](train=True).images) and not train[: len(test)].equal(test)


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_of_reference_is_what_the_code_says(page: str) -> None:
    assert (reference.REFERENCE / page).read_text(encoding="utf-8") == reference.PAGES[page](), "run `make docs`"


def test_what_happens_when_tells_of_every_kind_of_fault_by_marks_of_tests(tmp_path: Path) -> None:
    kept = promises.promises()
    assert {first.about for first in kept} == set(promises.GROUPS)
    assert len({(item.about, item.when) for item in kept}) == len(kept) >= 35, "each row once"
    wrong = tmp_path / "tests" / "test_x.py"
    wrong.parent.mkdir()
    wrong.write_text("@pytest.mark.promise('a mouse', 'it gnaws', 'nothing')\ndef test_y() -> None: ...\n")
    with pytest.raises(
        ValueError, match=r"^tests/test_x.py::test_y: promise\(about, when, then\), about one of a process"
    ):
        promises.promises(wrong.parent)


def test_the_job_file_s_page_has_every_key() -> None:
    page = text("docs/reference/job-file.md")
    for section in {JobSpec, *(section for _, section in reference.walk_sections(JobSpec))}:
        assert all(f"| `{key}` |" in page for key in section.model_fields), section
    assert not re.findall(r"^\| `.*\|  \|$", page, re.MULTILINE), "say in a comment beside the key what it is"


def test_every_training_method_has_its_words() -> None:
    table = text("docs/how-to/choose-a-method.md").partition("## Methods")[2].partition("\n## ")[0]
    assert set(METHODS) <= set(re.findall(r"`(\w+)`", table))


@pytest.mark.parametrize("method", METHODS)
def test_results_of_a_method_stand_in_the_page_of_results_alone(method: str) -> None:
    assert not re.search(r"\d", METHODS[method].summary)


@each_page
def test_every_job_file_can_be_used(page: str, tmp_path: Path) -> None:
    for shown in blocks(page, "yaml"):
        content = parse_yaml(shown, source=page)
        assert content
        if "script" in content:
            assert validate_job(content, source=page).script
        if "train:" in shown:  # whole; others show a section
            path = tmp_path / "job.yaml"
            path.write_text(shown)
            spec = load_spec(path, environ={}, site_files=())
            assert compute_max_node_hours(spec, spec.search.nodes) <= (spec.search.max_node_hours or 0)


@pytest.mark.torch
@each_page
def test_every_piece_of_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shown in blocks(page, "python"):
        names: dict[str, object] = {}
        exec(compile(shown, page, "exec"), names)
        if "optimizer" in names:
            assert names["optimizer"].report()["refreshes"] == 3  # type: ignore[attr-defined]


@each_page
def test_every_command_line_is_understood(page: str) -> None:
    for words in command_lines(page):
        name, *arguments = words or ["--help"]
        if name.startswith("-"):
            continue
        assert name in COMMANDS, f"tula {shlex.join(words)}"
        if arguments or name in ("init", "status", "list"):
            COMMANDS[name].make_context(name, [word for word in arguments if word != "..."], resilient_parsing=False)


def test_readme_and_pages_name_every_command() -> None:
    named = {words[0] for page in PAGES for words in command_lines(page) if words}
    assert set(COMMANDS) <= named


@each_page
def test_every_exit_code_that_is_named_exists(page: str) -> None:
    named = {int(code) for code in re.findall(r"exit code (\d+)", text(page))}
    assert named <= {0, reference.BROKEN_PIPE_EXIT_CODE, *(kind.exit_code for kind in reference._error_classes())}


@each_page
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]*)\)", text(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = PAGES[page].parent / name if name else PAGES[page]
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


@each_page
def test_every_file_that_is_named_is_there(page: str) -> None:
    named = re.findall(r"`((?:benchmarks|configs|examples|templates|tests|tula_cli)/[\w./-]*)`", text(page))
    named += re.findall(r"python (\w+/[\w./]+\.py)", text(page))
    for name in named:
        assert (ROOT / name).exists(), f"{page}: {name}"
