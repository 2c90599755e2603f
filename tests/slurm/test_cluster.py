"""The test cluster itself: it is what it says, breaks as told, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ClusterError, SlurmCluster, describe_why_no_cluster, list_missing_packages, wait_until
from cluster_files import CGROUPS, LOGIN
from cluster_keeper import list_namespace_processes, read_namespace

pytestmark = [pytest.mark.slurm, pytest.mark.proof]

RECEIVE = """
import socket, time
server = socket.create_server(("", 7077))
print("listens", flush=True)
link = server.accept()[0]
start, count = time.monotonic(), 0
while block := link.recv(1 << 20):
    count += len(block)
print(count * 8 / (time.monotonic() - start) / 1e6)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7077), timeout=2) as link:
    link.settimeout(30)
    link.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture
def bare(tmp_path: Path, needs_slurm: None, own_prefix: str) -> Iterator[SlurmCluster]:
    """A second cluster, not up yet; without accounting, and so up within a second."""
    cluster = SlurmCluster(2, tmp_path / "bare", prefix=f"{own_prefix}b", accounting=False)
    yield cluster
    cluster.down()


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def submit(script: str, *options: str) -> str:
    return call("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}")


def states(job: str) -> dict[str, str]:
    """Return the states of a job and of its steps, as accounted so far."""
    rows = call("sacct", "--noheader", "--parsable2", f"--jobs={job}", "--format=JobID,State").splitlines()
    return dict(row.split("|") for row in rows)


def until_state(job: str, state: str, *, seconds: float = 60.0) -> None:
    wait_until(lambda: states(job).get(job, "").startswith(state), f"job {job} is {state}", seconds=seconds)


def megabits(cluster: SlurmCluster, source: str, target: str, megabytes: float) -> float:
    """Return the speed of one TCP connection between two nodes, in Mbit/s."""
    command = [*cluster.enter(target), sys.executable, "-S", "-c", RECEIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout and receiver.stdout.readline() == "listens\n"
        cluster.run(source, sys.executable, "-S", "-c", SEND, target, str(int(megabytes * 1e6)))
        return float(receiver.stdout.read())


def traces(cluster: SlurmCluster) -> list[str]:
    """Return what is to be seen of a cluster on this machine, other than its processes."""
    cgroups = [str(path) for path in CGROUPS.glob(f"*/slurm_{cluster.settings.prefix}*")]
    folders = [str(cluster.folder)] if cluster.folder.exists() else []
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(cluster.folder) in line]
    return cgroups + folders + mounts


def living(world: str) -> list[int]:
    """Return the processes of a world; zombies have no namespaces any more."""
    return list_namespace_processes(world, "pid")


def world_of(cluster: SlurmCluster) -> str:
    world = read_namespace(Path("/proc", (cluster.folder / "init.pid").read_text().strip(), "ns/pid"))
    assert world
    return world


def test_a_cluster_leaves_nothing_behind(bare: SlurmCluster) -> None:
    interfaces = os.listdir("/sys/class/net")
    with bare:
        world = world_of(bare)
        client = subprocess.Popen([f"{bare.folder}/bin/srun", "sleep", "600"], stderr=subprocess.DEVNULL)
        wait_until(lambda: bare.processes(bare.names[0], "sleep 600"), "the job runs")
        assert len(living(world)) > 5
        assert os.listdir("/sys/class/net") == interfaces
    assert living(world) == []
    assert traces(bare) == []
    assert os.listdir("/sys/class/net") == interfaces
    assert client.wait(timeout=5) != 0
    bare.down()  # a second time does no harm


def test_it_ends_when_the_process_that_holds_it_is_killed(bare: SlurmCluster) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from cluster import SlurmCluster
        SlurmCluster(2, Path({str(bare.folder)!r}), prefix={bare.settings.prefix!r}, accounting=False).up()
        print("up", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "up\n"
        world = world_of(bare)
        holder.kill()
    wait_until(lambda: not living(world) and not traces(bare), "nothing is left", seconds=5)


def test_it_ends_with_its_keeper(bare: SlurmCluster) -> None:
    bare.up()
    world = world_of(bare)
    os.kill(int((bare.folder / "keeper.pid").read_text()), signal.SIGKILL)
    wait_until(lambda: not living(world), "the world ends", seconds=5)
    bare.down()
    assert traces(bare) == []


def test_a_cluster_that_does_not_come_up_says_why_and_leaves_nothing(bare: SlurmCluster) -> None:
    broken = SlurmCluster(2, bare.folder, prefix=bare.settings.prefix, accounting=False, extra="NoSuchKey=1")
    with pytest.raises(ClusterError, match="NoSuchKey"):
        broken.up()
    assert traces(bare) == []


def test_two_clusters_do_not_disturb_each_other(on_slurm: SlurmCluster, bare: SlurmCluster) -> None:
    job = submit("srun sleep 600", "--nodes=2")
    until_state(job, "RUNNING")
    with bare:
        assert sorted(bare.run("login", "srun", "--nodes=2", "hostname").stdout.split()) == bare.names
        with pytest.raises(ClusterError, match="another prefix"):
            SlurmCluster(1, bare.folder.with_name("third"), prefix=bare.settings.prefix, accounting=False).up()
        assert bare.run("login", "srun", "hostname").stdout.split() == bare.names[:1]
    assert call("squeue", "--noheader", "--format=%i %T") == f"{job} RUNNING"
    assert call("srun", "hostname") in on_slurm.names


def test_every_node_has_its_own_name_address_and_disk(on_slurm: SlurmCluster) -> None:
    look = "echo $(hostname) $(getent ahostsv4 $(hostname) | head -1) $(ls)"
    script = f"cd {on_slurm.local}; touch $(hostname); sleep 0.5; {look}"
    lines = call("srun", f"--nodes={len(on_slurm.names)}", "--cpus-per-task=2", "sh", "-c", script).splitlines()
    expected = [f"{name} {address} STREAM {name} {name}" for name, address in on_slurm.settings.addresses.items()]
    assert sorted(lines) == sorted(expected)
    assert on_slurm.run("login", "getent", "hosts", "login").stdout.split() == [LOGIN, "login"]


def test_a_shaped_link_is_as_slow_as_it_says(on_slurm: SlurmCluster) -> None:
    first, second = on_slurm.names[:2]
    assert 120 < megabits(on_slurm, first, second, 6) < 220
    on_slurm.set_rate(second, "40mbit")
    assert 25 < megabits(on_slurm, first, second, 2) < 46
    assert 25 < megabits(on_slurm, second, first, 2) < 46
    on_slurm.set_rate(second, "off")
    on_slurm.set_rate(first, "off")
    assert megabits(on_slurm, first, second, 60) > 400


def test_a_batch_job_runs_on_two_hosts(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(
        f"srun --output={tmp_path}/%n.txt sh -c 'hostname; pwd; echo $CUDA_VISIBLE_DEVICES'",
        "--nodes=2",
        f"--chdir={tmp_path}",
        "--gpus-per-node=1",
    )
    until_state(job, "COMPLETED")
    text = [(tmp_path / f"{task}.txt").read_text().split() for task in range(2)]
    assert text == [[name, str(tmp_path), "0"] for name in on_slurm.names[:2]]


def test_a_step_over_its_memory_is_reported_as_such(on_slurm: SlurmCluster) -> None:
    if not on_slurm.settings.cgroups:
        pytest.skip("no cgroups of version 1 here: memory is sampled, and the job just fails")
    job = submit(f"srun {sys.executable} -S -c 'bytearray(300 << 20)'", "--mem=60M")
    until_state(job, "FAILED")
    assert states(job)[f"{job}.0"] == "OUT_OF_MEMORY"


def test_a_cancelled_job_is_gone(on_slurm: SlurmCluster) -> None:
    job = submit("srun sleep 600", "--nodes=2")
    wait_until(lambda: len(on_slurm.processes(on_slurm.names[1], "sleep 600")) == 1, "the second task runs")
    call("scancel", job)
    wait_until(lambda: not call("squeue", "--noheader"), "the queue is empty", seconds=15)
    until_state(job, "CANCELLED")
    assert on_slurm.processes(on_slurm.names[1], "sleep") == []


def test_a_job_of_more_weight_takes_the_nodes_of_a_spare_one(on_slurm: SlurmCluster) -> None:
    everything = (f"--nodes={len(on_slurm.names)}", "--exclusive")
    spare = submit("srun sleep 600", "--partition=spare", *everything)
    until_state(spare, "RUNNING")
    until_state(submit("srun true", *everything), "COMPLETED")
    restarts = "scontrol show job " + spare + " | grep -o Restarts=[0-9]*"
    assert call("sh", "-c", restarts) == "Restarts=1"


def test_a_job_outlives_the_daemon_of_its_node(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    node = on_slurm.names[1]
    job = submit(f"srun sh -c 'until [ -e {tmp_path}/enough ]; do sleep 0.1; done'", "--nodes=2")
    wait_until(lambda: on_slurm.processes(node, "enough"), "the second task runs")
    on_slurm.kill_slurmd(node)
    wait_until(lambda: not on_slurm.processes(node, "slurmd -N"), "slurmd ends")
    assert on_slurm.processes(node, "enough")
    on_slurm.start_slurmd(node)
    (tmp_path / "enough").touch()
    until_state(job, "COMPLETED")


def test_a_job_on_a_powered_off_node_fails(on_slurm: SlurmCluster) -> None:
    node = on_slurm.names[1]
    job = submit("srun sleep 600", "--nodes=2", "--no-requeue", f"--nodelist={node}")
    wait_until(lambda: on_slurm.processes(node, "sleep 600"), "the job runs")
    on_slurm.power_off(node)
    assert on_slurm.processes(node) == []
    with pytest.raises(ClusterError, match=r"timed out|No route"):
        on_slurm.run(on_slurm.names[0], sys.executable, "-S", "-c", SEND, node, "1")
    until_state(job, "NODE_FAIL")
    on_slurm.power_on(node)
    wait_until(
        lambda: call("sinfo", "--noheader", f"--nodes={node}", "--partition=main", "--format=%t") == "idle",
        "the node is back",
    )


def test_a_reset_repairs_what_a_test_has_broken(on_slurm: SlurmCluster) -> None:
    first, second = on_slurm.names[:2]
    submit("srun sleep 600", "--nodes=2")
    on_slurm.set_rate(first, "1mbit")
    on_slurm.kill_slurmd(first)
    call("scontrol", "update", f"NodeName={second}", "State=DRAIN", "Reason=test")
    on_slurm.reset()
    assert sorted(call("srun", "--nodes=2", f"--nodelist={first},{second}", "hostname").split()) == [first, second]
    assert "rate 200Mbit" in on_slurm.run(first, "tc", "qdisc", "show", "dev", "eth0").stdout


def test_the_command_line_does_what_the_class_does(bare: SlurmCluster) -> None:
    def cluster(*words: str) -> str:
        script = str(Path(__file__).with_name("cluster.py"))
        return call(sys.executable, script, f"--folder={bare.folder}", *words)

    node = f"{bare.settings.prefix}2"
    assert cluster("up", "2", "--no-accounting", f"--prefix={bare.settings.prefix}").startswith("export PATH=")
    assert cluster("exec", node, "--", "hostname") == node
    cluster("rate", "all", "100mbit")
    assert "rate 100Mbit" in cluster("exec", node, "tc", "qdisc", "show", "dev", "eth0")
    cluster("kill-slurmd", node)
    cluster("start-slurmd", node)
    cluster("power-off", node)
    cluster("down")
    assert traces(bare) == []


def test_what_is_missing_is_named(needs_slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_missing_packages() == []
    monkeypatch.setattr("cluster.SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "munge" in list_missing_packages()
    assert "apt-get install" in (describe_why_no_cluster() or "")
