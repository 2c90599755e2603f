"""Partitions of a site, and the job spec that `tula init slurm` makes of them."""

from pathlib import Path

import pytest

from tula_cli.assets import find_asset
from tula_cli.cluster.slurm import site
from tula_cli.cluster.slurm.site import (
    Gpus,
    Partition,
    PartitionNodeType,
    Site,
    fill_template,
    parse_gres,
    parse_minutes,
    parse_partitions,
)
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import load_spec

TEMPLATE = find_asset("templates/slurm.yaml").read_text(encoding="utf-8")

# Recorded with SLURM 22.05.8: one node drained, one that does not respond, a partition that is down.
RECORDED = """\
main*|up|2:00:00|1-infinite|1|idle*|2|4000|gpu:a100:2
main*|up|2:00:00|1-infinite|1|drained|2|4000|gpu:a100:2
main*|up|2:00:00|1-infinite|2|idle|2|4000|gpu:a100:2
short|up|2:00|1-2|1|drained|2|4000|gpu:a100:2
short|up|2:00|1-2|3|idle|2|4000|gpu:a100:2
closed|down|2:00:00|1-infinite|4|idle|2|4000|(null)
half|up|infinite|1-infinite|2|idle|2|4000|gpu:a100:2
days|up|2-12:00:00|1|1|drained|2|4000|gpu:a100:2
days|up|2-12:00:00|1|1|idle|2|4000|gpu:a100:2
"""
# Written after the documentation: 20.11 (where memory and CPUs may be "16+"), 23.11 and 24.11 (more states, shards).
DOCUMENTED = {
    "20.11": "batch*|up|1-00:00:00|1-infinite|3|mixed|16+|64000+|gpu:tesla:2(S:0),gpu:kepler:1(S:1)\n"
    "batch*|up|1-00:00:00|1-infinite|2|draining@|16+|64000+|gpu:tesla:2(S:0),gpu:kepler:1(S:1)\n",
    "23.11": "batch*|up|1-00:00:00|1-infinite|2|planned|16|64000|gpu:tesla:2(S:0-1)\n"
    "batch*|up|1-00:00:00|1-infinite|1|idle~|16|64000|gpu:tesla:2(S:0-1)\n"
    "batch*|up|1-00:00:00|1-infinite|4|inval|16|64000|gpu:tesla:2(S:0-1)\n",
    "24.11": "batch*|up|1-00:00:00|1-infinite|3|mixed-|16|64000|gpu:tesla:2(S:0,2),shard:tesla:32(S:0,2)\n"
    "batch*|up|1-00:00:00|1-infinite|1|down$|16|64000|gpu:tesla:2(S:0,2),shard:tesla:32(S:0,2)\n",
}


def partition(**changes) -> Partition:
    values = {
        "name": "gpu",
        "default": True,
        "up": True,
        "minutes": 1440,
        "most_nodes": None,
        "kinds": (PartitionNodeType(64, 48, 256_000, (Gpus("a100", 4),)),),
    }
    return Partition(**{**values, **changes})


# --- understanding sinfo


def test_partitions_are_read_with_their_usable_nodes():
    results = {p.name: p for p in parse_partitions(RECORDED)}
    assert list(results) == ["main", "short", "closed", "half", "days"]
    assert [p.nodes for p in results.values()] == [2, 3, 4, 2, 1]
    assert [p.usable for p in results.values()] == [2, 2, 4, 2, 1]
    assert [p.minutes for p in results.values()] == [120, 2, 120, None, 3600]
    assert [p.name for p in results.values() if p.default] == ["main"]
    assert [p.name for p in results.values() if not p.up] == ["closed"]
    assert results["main"].kinds == (PartitionNodeType(2, 2, 4000, (Gpus("a100", 2),)),)
    assert results["closed"].kinds[0].gpus == ()


@pytest.mark.parametrize("version", DOCUMENTED)
def test_versions_of_slurm_tell_the_same(version):
    (result,) = parse_partitions(DOCUMENTED[version])
    assert (result.name, result.default, result.minutes, result.nodes) == ("batch", True, 1440, 3)
    kind = result.kinds[0]
    assert (kind.cpus, kind.memory, kind.gpus[0]) == (16, 64000, Gpus("tesla", 2))


UNUSABLE = [
    "down",
    "down*",
    "down$",
    "down~",
    "drained",
    "drained*",
    "drained$",
    "drained^",
    "draining",
    "draining@",
    "draining!",
    "idle*",
    "idle$",
    "idle^",
    "idle%",
    "mixed$",
    "mixed^",
    "allocated$",
    "allocated^",
    "maint",
    "maint*",
    "reserved",
    "reserved*",
    "reboot",
    "reboot^",
    "reboot*",
    "powering_down",
    "powering_down%",
    "fail",
    "fail*",
    "failing",
    "inval",
    "future",
    "future*",
    "unknown",
    "unknown*",
    "error",
    "allocated*",
    "mixed%",
    "completing$",
    "IDLE+DRAIN",
    "MIXED+NOT_RESPONDING",
    "ALLOCATED+MAINT",
    "idle+powering_down",
]
USABLE = [
    "idle",
    "mixed",
    "allocated",
    "completing",
    "planned",
    "blocked",
    "idle~",
    "idle#",
    "idle!",
    "idle@",
    "idle-",
    "mixed-",
    "mixed@",
    "mixed#",
    "allocated#",
    "allocated@",
    "allocated+",
    "mixed+",
    "powered_down",
    "powering_up",
    "power_down",
    "IDLE+CLOUD",
    "MIXED+PLANNED",
    "idle+dynamic_norm",
]


@pytest.mark.parametrize("state", UNUSABLE)
def test_a_node_that_runs_nothing_does_not_count(state):
    assert parse_partitions(f"main|up|1:00|1-2|3|{state}|2|4000|(null)")[0].nodes == 0


@pytest.mark.parametrize("state", USABLE)
def test_a_node_that_is_busy_or_asleep_counts(state):
    assert parse_partitions(f"main|up|1:00|1-2|3|{state}|2|4000|(null)")[0].nodes == 3


def test_kinds_of_nodes_stay_apart_and_those_with_gpus_come_first():
    rows = "all*|up|1:00:00|1-infinite|{}|idle|{}|1000|{}\n"
    message = rows.format(9, 64, "(null)") + rows.format(1, 8, "gpu:v100:2") + rows.format(2, 8, "gpu:a100:4")
    kinds = parse_partitions(message)[0].kinds
    assert [(kind.nodes, kind.gpus) for kind in kinds] == [(2, (Gpus("a100", 4),)), (1, (Gpus("v100", 2),)), (9, ())]


@pytest.mark.parametrize("told", ["", "sinfo: error: no", "a|b|c", "main*|up|1:00|1-2|many|idle|2|4000|(null)"])
def test_what_cannot_be_understood_is_left_out(told):
    assert parse_partitions(told) == ()


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:4", [("", 4)]),
        ("gpu", [("", 1)]),
        ("gpu:a100:4(S:0-1)", [("a100", 4)]),
        ("gpu:a100:4(S:0,2)", [("a100", 4)]),
        ("gpu:kepler:1,gpu:tesla:2", [("tesla", 2), ("kepler", 1)]),
        ("craynetwork:4,gpu:mi250x:8(S:0-3)", [("mi250x", 8)]),
        ("gpu:1g.10gb:7", [("1g.10gb", 7)]),
        ("gpu:no_consume:2", [("", 2)]),
        ("gpu:0", []),
        ("shard:8", []),
        ("(null)", []),
        ("N/A", []),
        ("", []),
    ],
)
def test_gpus_among_the_generic_resources(text, gpus):
    assert parse_gres(text) == tuple(Gpus(*pair) for pair in gpus)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("infinite", None),
        ("UNLIMITED", None),
        ("n/a", None),
        ("", None),
        ("30", 30),
        ("30:00", 30),
        ("2:00:00", 120),
        ("1-00:00:00", 1440),
        ("2-12:30:59", 3630),
        ("3-06", 4680),
    ],
)
def test_time_limits(text, minutes):
    assert parse_minutes(text) == minutes


# --- asking


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """SLURM's commands as shell scripts of this test's own; no others are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


def says(text: str) -> str:
    return f"/bin/cat <<'END'\n{text}END"


# A real 22.05's lines, cut down to what counts; 20.11 has no CPUEfctv, 23.02 has MaxCPUsPerSocket.
NODE = "NodeName=node001 CPUEfctv={efctv} CPUTot=8 Sockets=2 RealMemory=64000 ThreadsPerCore=2 CfgTRES=cpu=8,mem=64000M"
LIMITS = "PartitionName=main Default=YES MaxNodes={nodes} MinNodes={least} MaxCPUsPerNode={cpus} Nodes=node[1-4] MaxMemPerNode={memory}"
FREE = LIMITS.format(nodes="UNLIMITED", least=0, cpus="UNLIMITED", memory="UNLIMITED")
ROW = "main*|up|2:00:00|1-infinite|4|idle|8|64000|gpu:a100:2|node[001-004,007]"


@pytest.mark.parametrize(
    ("row", "node", "limits", "config", "cpus", "memory", "nodes"),
    [
        (ROW, NODE.format(efctv=8), FREE, "MaxMemPerNode           = UNLIMITED", 4, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=6), FREE, "", 3, '"0"', [2, 4]),
        (ROW, NODE.replace("CPUEfctv={efctv} ", "CoreSpecCount=1 "), FREE, "", 3, '"0"', [2, 4]),
        (ROW, NODE.replace("CPUEfctv={efctv} ", "CPUSpecList=0,1,4-5 "), FREE, "", 2, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=8), FREE.replace("PerNode=UNLIMITED Nodes", "PerNode=2 Nodes"), "", 1, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=8), FREE + " MaxCPUsPerSocket=2", "", 2, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=8), FREE[:-9] + "2000", "", 4, "2000M", [2, 4]),
        (ROW, NODE.format(efctv=6), FREE.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerCPU=500"), "", 3, "3000M", [2, 4]),
        (ROW, NODE.format(efctv=8), FREE, "MaxMemPerNode           = 5000", 4, "5000M", [2, 4]),
        (ROW, NODE.format(efctv=8), FREE[:-9] + "2000", "MaxMemPerNode           = 5000", 4, "2000M", [2, 4]),
        (ROW, NODE.format(efctv=8), FREE[:-9] + "90000", "", 4, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=8) + " MemSpecLimit=4000", FREE, "", 4, '"0"', [2, 4]),
        (ROW.replace("1-infinite", "3-infinite"), NODE.format(efctv=8), FREE, "", 4, '"0"', [4]),
        (ROW.replace("1-infinite", "1-2"), NODE.format(efctv=8), FREE, "", 4, '"0"', [1, 2]),
        (ROW, "", "", "", 4, '"0"', [2, 4]),  # scontrol does not answer
        *(  # fields without a number
            (ROW, NODE.format(efctv=none) + f" CoreSpecCount={none} CPUSpecList={none} MemSpecLimit={none}", FREE, none, 4, '"0"', [2, 4])
            for none in ("N/A", "(null)", "", "None", "UNLIMITED")
        ),
        (ROW, NODE.replace("={efctv}", "=N/A").replace("Core=2", "Core=N/A") + " CoreSpecCount=2", FREE, "", 3, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=8).replace("Sockets=2", "Sockets=(null)"), FREE + " MaxCPUsPerSocket=4", "", 2, '"0"', [2, 4]),
        (ROW, NODE.format(efctv=8) + " MemSpecLimit=4000M", FREE, "", 4, '"0"', [2, 4]),
    ],
)  # fmt: skip
def test_what_a_job_can_have_of_a_node_is_asked_for(commands, row, node, limits, config, cpus, memory, nodes):
    commands("sinfo", says(f"{row}\n"))
    answers = {"node": node, "partition": limits, "config": config}
    cases = " ".join(f"*show\\ {name}*) {says(text + chr(10))}\n;;" for name, text in answers.items() if text)
    commands("scontrol", f'case "$*" in {cases} *) exit 1;; esac')
    result = site.query_site()
    assert result is not None
    requested = {setting.key.rpartition(".")[2]: setting.value for setting in site.list_site_settings(result)}
    assert (requested["cpus_per_task"], requested["memory"], requested["nodes"]) == (str(cpus), memory, str(nodes))


def test_partitions_and_accounts_are_asked_for(commands):
    commands("sinfo", says(RECORDED))
    commands("sacctmgr", says("lab|\nlab|gpu\n|\nother|\n"))
    result = site.query_site()
    assert result is not None
    assert result.default_partition is not None
    assert (result.default_partition.name, result.accounts) == ("main", ("lab", "other"))


def test_without_accounting_there_are_no_accounts(commands):
    commands("sinfo", says(RECORDED))
    commands("sacctmgr", "echo 'You are not running a supported accounting_storage plugin' >&2; exit 1")
    result = site.query_site()
    assert result is not None
    assert result.accounts == ()


@pytest.mark.parametrize("script", [None, "exit 1", "echo nonsense", "exec /bin/sleep 60", "echo main >&2"])
def test_a_scheduler_that_does_not_answer_is_none(commands, monkeypatch, script):
    monkeypatch.setattr(site, "COMMAND_TIMEOUT", 0.3)
    if script:
        commands("sinfo", script)
    assert site.query_site() is None


def test_hosts_of_a_job(commands):
    commands("squeue", "echo 'node[1-2]'")
    commands("scontrol", 'test "$3" = "node[1-2]" && printf "node1\\nnode2\\n"')
    assert site.list_allocated_hosts("7") == ("node1", "node2")


def test_hosts_of_a_job_that_the_queue_has_forgotten(commands):
    commands("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    commands("sacct", "echo node4")
    commands("scontrol", 'echo "$3"')
    assert site.list_allocated_hosts("7") == ("node4",)


@pytest.mark.parametrize("told", ["", "(null)", "None assigned"])
def test_a_job_without_nodes_has_no_hosts(commands, told):
    commands("squeue", f"echo '{told}'")
    commands("sacct", "exit 1")
    commands("scontrol", 'echo "$3"')
    assert site.list_allocated_hosts("7") == ()


# --- a job spec to match


def loaded(text: str, folder: Path) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path, environ={}, site_files=())


def test_the_default_partition_is_filled_in(tmp_path):
    other = partition(name="debug", default=False, minutes=30)
    text = fill_template(TEMPLATE, Site((other, partition()), ("physics",)))
    spec = loaded(text, tmp_path)
    slurm = spec.cluster.slurm
    assert slurm is not None
    assert (slurm.partition, slurm.account, slurm.gpu_type) == ("gpu", "physics", "a100")
    assert (spec.cluster.gpus_per_node, slurm.cpus_per_task, slurm.memory) == (4, 12, "0")
    assert spec.cluster.minutes == 120
    assert "debug: 64 nodes (4 a100 GPUs, 48 CPUs), at most 30 min" in text


def test_what_the_scheduler_does_not_tell_stays_as_it_was(tmp_path):
    text = fill_template(TEMPLATE, Site((partition(),), ()))
    before, after = loaded(TEMPLATE, tmp_path), loaded(text, tmp_path)
    for name in ("name", "model", "dataset", "transforms", "optimizer", "schedule", "train", "search", "pricing"):
        assert getattr(before, name) == getattr(after, name)
    gone = set(TEMPLATE.splitlines()) - set(text.splitlines())
    keys = {line.strip().removeprefix("# ").partition(":")[0] for line in gone}
    assert keys == {"gpus_per_node", "partition", "gpu_type", "cpus_per_task", "memory"}


def test_the_search_stays_within_the_partition(tmp_path):
    sizes = {1: [1], 2: [1, 2], 3: [1, 2], 4: [2, 4], 9: [2, 4, 8], 16: [2, 4, 8, 16], 99: [2, 4, 8, 16]}
    for size, nodes in sizes.items():
        spec = loaded(
            fill_template(TEMPLATE, Site((partition(kinds=(PartitionNodeType(size, 8, 1000, ()),)),), ())), tmp_path
        )
        assert spec.search.nodes == nodes
        assert sum(nodes) * spec.compute_measuring_minutes() / 60 <= (spec.search.max_node_hours or 0)
    small = partition(most_nodes=4)
    assert loaded(fill_template(TEMPLATE, Site((small,), ())), tmp_path).search.nodes == [2, 4]


@pytest.mark.parametrize(
    ("limit", "training", "measuring"), [(None, 120, 20), (600, 120, 20), (60, 60, 20), (15, 15, 13)]
)
def test_time_limits_stay_within_the_partitions(tmp_path, limit, training, measuring):
    spec = loaded(fill_template(TEMPLATE, Site((partition(minutes=limit),), ())), tmp_path)
    assert spec.cluster.slurm is not None
    assert (spec.cluster.minutes, spec.search.max_minutes) == (training, measuring)


def test_nodes_without_gpus_run_on_the_cpu(tmp_path):
    spec = loaded(fill_template(TEMPLATE, Site((partition(kinds=(PartitionNodeType(4, 2, 0, ()),)),), ())), tmp_path)
    assert (spec.cluster.device, spec.cluster.gpus_per_node, spec.train.workers) == ("cpu", 1, 1)
    assert spec.cluster.slurm is not None
    assert (spec.cluster.slurm.cpus_per_task, spec.cluster.slurm.memory) == (2, None)


def test_one_of_several_types_of_gpu_is_taken(tmp_path):
    kind = PartitionNodeType(4, 16, 64000, parse_gres("gpu:kepler:1,gpu:tesla:2"))
    spec = loaded(fill_template(TEMPLATE, Site((partition(kinds=(kind,)),), ())), tmp_path)
    assert spec.cluster.slurm is not None
    assert (spec.cluster.gpus_per_node, spec.cluster.slurm.gpu_type) == (2, "tesla")


def test_several_accounts_are_listed_and_none_is_chosen(tmp_path):
    text = fill_template(TEMPLATE, Site((partition(),), ("a", "b")))
    spec = loaded(text, tmp_path)
    assert spec.cluster.slurm is not None
    assert spec.cluster.slurm.account is None
    assert "# yours: a, b" in text


def test_without_a_default_all_partitions_are_listed_and_none_is_chosen(tmp_path):
    text = fill_template(TEMPLATE, Site((partition(default=False), partition(name="cpu", default=False)), ()))
    spec = loaded(text, tmp_path)
    assert spec.cluster.kind == "slurm" and spec.cluster.slurm is None
    assert spec.search.nodes == [2, 4, 8, 16]
    assert "SLURM has no default partition here: choose one of gpu, cpu" in text
    assert "#   cpu: 64 nodes" in text


def test_the_only_partition_needs_no_star(tmp_path):
    spec = loaded(fill_template(TEMPLATE, Site((partition(default=False),), ())), tmp_path)
    assert spec.cluster.slurm is not None
    assert spec.cluster.slurm.partition == "gpu"


@pytest.mark.parametrize("name", ["1234", "1e3", "on", "true", "null", "a: b", "0x1", "no"])
def test_names_stay_words(tmp_path, name):
    spec = loaded(fill_template(TEMPLATE, Site((partition(name=name),), (name,))), tmp_path)
    assert spec.cluster.slurm is not None
    assert (spec.cluster.slurm.partition, spec.cluster.slurm.account) == (name, name)


def test_a_partition_of_broken_nodes_is_reported_as_such():
    text = fill_template(TEMPLATE, Site((partition(), partition(name="old", default=False, kinds=())), ()))
    assert "old: no node can run jobs" in text


def test_a_template_that_lacks_a_line_is_our_mistake():
    with pytest.raises(AssertionError, match=r"cluster\.slurm\.partition"):
        fill_template(TEMPLATE.replace("partition:", "queue:"), Site((partition(),), ()))


def test_a_setting_of_another_section_is_not_taken_for_it():
    lines = ["a:", "  memory: 1", "b:", "  # c:", "    # memory: 2", "  # memory: 3", "  c:", "    # memory: 4 # x"]
    assert site._find_setting_line(lines, "b.memory") == (4, "    ")
    assert site._find_setting_line(lines, "b.c.memory") == (7, "    ")


@pytest.mark.parametrize(
    ("least", "nodes", "suggested"),
    [(32, 64, (32,)), (4, 3, (4,)), (16, 64, (16,)), (3, 5, (4,)), (1, 1, (1,)), (2, 64, (2, 4, 8, 16))],
)
def test_a_partition_of_large_jobs_has_numbers_of_nodes_too(least: int, nodes: int, suggested: tuple[int, ...]) -> None:
    kinds = (PartitionNodeType(nodes, 48, 256_000, (Gpus("a100", 4),)),)
    assert site.suggest_node_counts(partition(least_nodes=least, kinds=kinds)) == suggested
