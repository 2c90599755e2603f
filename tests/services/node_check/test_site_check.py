"""`tula check --site`: the file by the job's own rules, then what the scheduler and the shell say to it."""

import re
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from tula_cli.cluster.slurm.command import CommandResult
from tula_cli.cluster.slurm.site import SiteFacts, ask_site_facts
from tula_cli.errors import JobFailed, SchedulerError, SpecError
from tula_cli.services.site_check import SiteCheck, check_files, check_site, read_site
from tula_cli.version import __version__

SINFO = (
    "gpu*|up|1-00:00:00|1-8|8|idle|64|512000|gpu:a100:4(S:0-1)\n"
    "cpu|up|infinite|1-infinite|20|mixed|128|256000|(null)\n"
    "old|down|infinite|1-infinite|2|idle|16|64000|gpu:v100:2\n"
)
TOLD = {
    "sbatch": "slurm 24.05.1",
    "squeue": "",
    "sacct": "",
    "sacctmgr account": "root|\nproject|\nphysics|",
    "sacctmgr qos": "normal||\nshort|02:00:00|",
    "sinfo": SINFO,
    "sinfo names": "gpu\ncpu\nold\nstaff",
    "sinfo features": "gpu*|a100,ib\ncpu|milan\nold|(null)",
    "scontrol": "ReservationName=course StartTime=2026-01-01T00:00:00 State=ACTIVE",
}
SITE = """
cluster:
  kind: slurm
  gpus_per_node: 4
  slurm: {partition: gpu, account: project, qos: normal, gpus: gres, gpu_type: a100, cpus_per_task: 16, minutes: 1440,
          constraint: a100&ib, setup: []}
"""


def facts(**other: str | None) -> SiteFacts:
    """Return what a scheduler of these words tells; None: the command is not there."""
    words: dict[str, str | None] = {**TOLD, **other}

    def call(*command: str, patience: float | None = None) -> CommandResult:
        kind = {"show qos": "sacctmgr qos", "show account": "sacctmgr account"}.get(" ".join(command[3:5]), command[0])
        kinds = {"--format=%P|%f": "sinfo features", "--format=%R": "sinfo names"}
        text = words[kinds.get(command[-1], kind)]
        return (
            CommandResult("missing", complaint=f"{kind}: No such file or directory")
            if text is None
            else CommandResult("done", text)
        )

    return ask_site_facts(call)


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tula_cli.assets.SITE_FOLDER", tmp_path / "etc")

    def checked(text: str, *, run_setup: bool = False, **other: str | None) -> SiteCheck:
        (tmp_path / "site.yaml").write_text(text)
        environ = {"XDG_CONFIG_HOME": str(tmp_path)}
        return check_site(tmp_path / "site.yaml", run_setup=run_setup, environ=environ, ask=lambda: facts(**other))

    return checked


def told(result: SiteCheck, verdict: str) -> list[str]:
    return [
        f"{finding.about}: {finding.message} ({finding.advice})"
        for finding in result.findings
        if finding.verdict == verdict
    ]


INSTALLED = [distribution for distribution in metadata.distributions() if distribution.name == "tula-cli"]


def test_settings_that_fit_the_site_are_found_sound(check):
    result = check(SITE)
    assert told(result, "problem") == [] and told(result, "warning") == []
    result.require_sound()
    right = told(result, "ok")
    assert any("answers: 3 partitions, gpu, cpu, old" in line for line in right)
    assert any("cluster.slurm.partition: gpu: 8 nodes (4 a100 GPUs, 64 CPUs), at most 24 h" in line for line in right)
    # Of a tula that is run from its sources nothing tells the version.
    assert any(f"tula {__version__} there and here" in line for line in right) == bool(INSTALLED)
    assert any(sys.executable in line for line in right)


@pytest.mark.parametrize(
    ("old", "new", "about", "message", "advice"),
    [
        ("partition: gpu", "partition: gpuu", "cluster.slurm.partition", "no partition 'gpuu'", "did you mean gpu?"),
        ("partition: gpu", "partition: old", "cluster.slurm.partition", "partition old is not up", "name another"),
        ("partition: gpu", "partition: cpu", "cluster.gpus_per_node", "the nodes of cpu have no GPUs", "gpus: none"),
        ("gpus_per_node: 4", "gpus_per_node: 8", "cluster.gpus_per_node", "8 is more than", "set it to 4"),
        ("a100, cpus", "h100, cpus", "cluster.slurm.gpu_type", "no GPU 'h100' in gpu", "a100"),
        ("cpus_per_task: 16", "cpus_per_task: 32", "cluster.slurm.cpus_per_task", "more than a node of gpu has (64)", "16"),
        ("minutes: 1440", "minutes: 2-00:00", "cluster.slurm.minutes", "2880 is more than gpu allows (1440)", "1440"),
        ("qos: normal", "qos: short", "cluster.slurm.minutes", "1440 is more than QOS short allows (120)", "120"),
        ("qos: normal", "qos: norml", "cluster.slurm.qos", "no QOS 'norml'", "did you mean normal?"),
        ("account: project", "account: phisics", "cluster.slurm.account", "has no account", "did you mean physics?"),
        ("a100&ib", "a100&roce", "cluster.slurm.constraint", "no node here has roce", "a100, ib"),
        ("setup: []", "setup: /no/such.sh", "cluster.slurm.setup", "the file /no/such.sh does not exist", "correct the path, or remove it"),
        ("setup: []", "setup: ['if true']", "cluster.slurm.setup", "bash cannot read the set-up", "mend"),
        ("setup: []", "setup: [], python: /no/python", "cluster.slurm.python", "does not start here", "set it to"),
        ("cluster:\n", "search: {nodes: [1, 16]}\ncluster:\n", "search.nodes", "16 is more than", "fewer"),
        ("cluster:\n", "search: {max_minutes: 1500}\ncluster:\n", "search.max_minutes", "asks for 1502 minutes", "1438"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_reported_with_what_to_do(check, monkeypatch, old, new, about, message, advice):
    assert old in SITE
    if "setup" not in new:  # each start of a python takes its time
        monkeypatch.setattr("tula_cli.services.site_check.check_job_start", lambda *_, **__: ())
    problems = check(SITE.replace(old, new, 1)).problems
    assert any(
        problem.about == about and message in problem.message and advice in problem.advice for problem in problems
    ), problems


def test_limits_of_a_node_and_maintenance_windows_are_held_against_the_settings(check, monkeypatch):
    monkeypatch.setattr("tula_cli.services.site_check.check_job_start", lambda *_, **__: ())
    begin, end = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 60 * minutes)) for minutes in (90.5, 200)
    )
    lines = (
        "ReservationName=course StartTime=2026-01-01T00:00:00 State=ACTIVE Flags=SPEC_NODES",
        f"ReservationName=maint StartTime={begin} EndTime={end} Flags=MAINT,SPEC_NODES",
        "PartitionName=gpu MaxCPUsPerNode=32 MaxMemPerNode=100000",
    )
    result = check(SITE.replace("minutes: 1440", "minutes: 1440, memory: 0"), scontrol="\n".join(lines))
    warning, *problems = [*told(result, "warning"), *told(result, "problem")]
    assert "a job of 1440 minutes would not start before the maintenance" in warning and "set it below 90" in warning
    assert problems == [
        "cluster.slurm.cpus_per_task: 16 for each of 4 ranks is more than a node of gpu has (32) (set it to 8)",
        "cluster.slurm.memory: 0 requests all memory of a node, but a job in gpu can have 100000 MB (set it to 100000M)",
    ]


def test_keys_and_values_are_checked_by_the_rules_of_a_job(check):
    result = check("cluster: {kind: slurm, gpu_per_node: 4, slurm: {minutes: soon}}\npirces: {}\n")
    assert [problem.about for problem in result.problems] == ["cluster.slurm.minutes", "cluster.gpu_per_node", "pirces"]
    assert "did you mean gpus_per_node?" in result.problems[1].advice
    with pytest.raises(SpecError, match=r"3 problems \(cluster.slurm.minutes, cluster.gpu_per_node, pirces\)"):
        result.require_sound()


def test_a_part_of_a_section_is_enough(check):
    result = check("pricing: {currency: EUR}\ncluster: {slurm: {setup: [], gpus: none, partition: gpu}}\n")
    result.require_sound()
    assert told(result, "warning")[0].startswith("cluster.kind: is not set")
    result = check("pricing: {currency: EUR}\n")
    assert [finding.verdict for finding in result.findings] == ["ok"], "nothing of SLURM, so nobody is asked"


def test_a_scheduler_that_does_not_answer_is_an_error_of_its_own(check):
    silent = dict.fromkeys(("sinfo", "squeue", "sbatch", "sacct", "scontrol"))
    result = check(SITE, **silent)
    assert [problem.about for problem in result.problems] == ["sbatch", "squeue", "sinfo"]
    with pytest.raises(SchedulerError):
        result.require_sound()


def test_without_accounting_it_goes_on_with_a_warning(check):
    result = check(SITE, sacct=None, **{"sacctmgr qos": None, "sacctmgr account": None})
    result.require_sound()
    assert [line.partition(":")[0] for line in told(result, "warning")] == ["sacct", "sacctmgr"]


def test_charge_factors_of_names_that_the_site_has_not_are_warned_of(check):
    pricing = "pricing: {kind: billing, qos_factors: {Short: 2, norml: 3}, partition_factors: {staff: 2, gpuu: 0.5}}"
    result = check(SITE + pricing)
    qos, partition = told(result, "warning")
    assert "'norml'" in qos and "normal?" in qos and "'gpuu'" in partition and "gpu?" in partition


def test_set_up_lines_run_on_request_alone(check, tmp_path):
    ran = tmp_path / "ran"
    text = SITE.replace(
        "setup: []", f'setup: ["set -e", "touch {ran}", "export PYTHON={sys.executable}"], python: $PYTHON'
    )
    result = check(text)
    assert not ran.exists() and any("--run-setup" in line for line in told(result, "warning"))
    result = check(text, run_setup=True)
    result.require_sound()
    assert ran.exists() and any("the set-up lines run here" in line for line in told(result, "ok"))


def test_a_line_that_fails_is_named_although_it_would_end_nothing(check):
    result = check(SITE.replace("setup: []", 'setup: ["ls /no/such/place", "true"]'), run_setup=True)
    assert any("set -e" in line for line in told(result, "warning"))
    assert "exit code 2 of: ls /no/such/place" in result.problems[0].message
    with pytest.raises(JobFailed):
        result.require_sound()


@pytest.mark.parametrize(
    ("line", "ends"), [("set -euo pipefail", 1), ("  set -o errexit", 1), ("set -u", 0), ("# set -e", 0)]
)
def test_a_set_up_that_goes_on_after_a_failure_is_reported(check, line, ends):
    result = check(SITE.replace("setup: []", f"setup: ['{line}', 'true']"))
    assert sum("begin with set -e" in line for line in told(result, "warning")) == 1 - ends


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", [EXAMPLES / "slurm_site" / "site.yaml", *sorted((EXAMPLES / "sites").glob("*.yaml"))])
def test_the_site_files_that_come_with_tula_are_sound_as_files(path):
    result = list(check_files(read_site(path)))
    assert [item.verdict for item in result] == ["ok"]


@pytest.mark.parametrize("path", sorted((EXAMPLES / "sites").glob("*.yaml")))
def test_a_site_file_from_documentation_says_so_and_from_which_and_when(path):
    head = path.read_text().partition("\ncluster:")[0]
    assert "FROM PUBLIC DOCUMENTATION, NOT RUN THERE" in head
    assert re.search(r"pages \".*\" and \".*\"", head) and re.search(r"on \d+ \w+ 20\d\d", head)


def test_each_type_of_node_is_held_against_its_own_partition(check):
    types = "node_types: {a: {}, b: {cluster: {gpus_per_node: 2, slurm: {partition: cpu, gpu_type: null, constraint: null}}}}"
    about = [problem.about for problem in check(SITE + types).problems]
    assert about == ["cluster.gpus_per_node (b)"]


def test_the_files_that_jobs_read_are_found_and_told_apart(tmp_path, monkeypatch):
    for name, text in (("site", "cluster: {gpus_per_node: 4}\n"), ("home", "cluster: {gpus_per_nod: 2}\n")):
        (tmp_path / name / "tula").mkdir(parents=True)
        (tmp_path / name / "tula" / "site.yaml").write_text(text)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "site")}
    result = check_site(environ=environ, ask=facts)
    assert result.files == (tmp_path / "site/tula/site.yaml", tmp_path / "home/tula/site.yaml")
    assert [str(result.files[1]) in problem.message for problem in result.problems] == [True]
    with pytest.raises(SpecError, match=r"there is no site\.yaml in"):
        check_site(environ={"XDG_CONFIG_HOME": str(tmp_path / "nowhere")})


def test_a_file_that_users_cannot_read_is_reported(check, tmp_path):
    check(SITE)
    Path("site.yaml").chmod(0o600)
    result = check_site(tmp_path / "site.yaml", environ={}, ask=facts)
    assert any("not everybody may read it" in line and "chmod a+r" in line for line in told(result, "warning"))
