"""A small batch queue whose jobs are processes of this machine, with limits, time limits, dependencies, holds and requeues.

    python tiny_queue_commands.py HOME submit SCRIPT NAME NODES TASKS_PER_NODE MINUTES AFTER,AFTER
    python tiny_queue_commands.py HOME list | cancel ID ... | hold ID ... | release ID ... | requeue ID ...
    python tiny_queue_commands.py HOME run COMMAND ...          in a job: starts the command once per task, on all its "nodes"

HOME/settings.json: nodes (of the machine), jobs (maximum number), minute (seconds per minute of a limit; 60 is real time), grace
(seconds between SIGTERM and SIGKILL). The queue is independent of tula. One process per job manages it.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(sys.argv[1])
SETTINGS = {"nodes": 2, "jobs": 50, "minute": 60.0, "grace": 20.0}
ENDS = {"cancel": "cancelled", "requeue": "preempted", "time": "time limit"}


def read_settings():
    with contextlib.suppress(FileNotFoundError):
        return {**SETTINGS, **json.loads((HOME / "settings.json").read_text())}
    return SETTINGS


@contextlib.contextmanager
def locked_jobs():
    """Return all jobs by id, under a lock, so that one process at a time reads and changes them."""
    HOME.mkdir(exist_ok=True)
    with open(HOME / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = HOME / "jobs.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        yield result
        draft = path.with_name("draft.json")
        draft.write_text(json.dumps(result))
        draft.replace(path)


def submit(script, name, nodes, tasks, minutes, after):
    limits = read_settings()
    if int(nodes) > limits["nodes"]:
        sys.exit(f"rejected: {nodes} nodes, and the queue has {limits['nodes']}")
    with locked_jobs() as known:
        if sum(job["state"] != "over" for job in known.values()) >= limits["jobs"]:
            sys.exit(f"rejected: {limits['jobs']} jobs are enough")
        id_ = f"tq.{len(known) + 1}"
        known[id_] = {
            "name": name, "script": script, "nodes": int(nodes), "tasks": int(tasks), "minutes": float(minutes), "after": after.split(",") if after else [],
            "state": "waits", "why": "", "held": False, "wish": "", "starts": 0, "runs": [], "code": None, "ends": None,
        }  # fmt: skip
    subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[:2], "keep", id_], start_new_session=True, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)  # fmt: skip
    print(id_)


def request(word, ids):
    with locked_jobs() as known:
        for id_ in ids:
            if id_ not in known:
                sys.exit(f"no job {id_}")
            job = known[id_]
            if word in ("hold", "release"):
                job["held"] = word == "hold"
            elif job["state"] == "runs":
                job["wish"] = word
            elif job["state"] == "waits" and word == "cancel":
                job.update(state="over", runs=["cancelled"])


def find_obstacle(job, known):
    """Return the reason why a job cannot start; empty if it can."""
    if job["held"]:
        return "held"
    if any(known[id_]["state"] != "over" for id_ in job["after"]):
        return "dependency"
    taken = sum(other["nodes"] for other in known.values() if other["state"] == "runs")
    return "nodes" if taken + job["nodes"] > read_settings()["nodes"] else ""


def manage_job(id_):
    while True:
        with locked_jobs() as known:
            job = known[id_]
            if job["state"] == "over":
                return
            job["why"] = find_obstacle(job, known)
            if not job["why"]:
                now = time.time()
                job.update(
                    state="runs",
                    wish="",
                    starts=job["starts"] + 1,
                    began=now,
                    ends=now + job["minutes"] * read_settings()["minute"],
                )
        if not job["why"]:
            run_job_script(id_, job)
        time.sleep(0.05)


def run_job_script(id_, job):
    """Run the script of a job once, until it exits or reaches its limit."""
    environ = {**os.environ, "TQ_JOB": id_, "TQ_STARTS": str(job["starts"]), "TQ_NODES": str(job["nodes"]), "TQ_TASKS": str(job["tasks"]), "TQ_ENDS": str(job["ends"])}  # fmt: skip
    process = subprocess.Popen(
        ["/bin/sh", job["script"]], env=environ, start_new_session=True, stdin=subprocess.DEVNULL
    )
    killed_at = None
    while process.poll() is None:
        with locked_jobs() as known:
            if time.time() >= job["ends"] and not known[id_]["wish"]:
                known[id_]["wish"] = "time"
            wanted = known[id_]["wish"]
        if wanted and killed_at is None:
            process.send_signal(signal.SIGTERM)
            killed_at = time.monotonic() + read_settings()["grace"]
        if killed_at is not None and time.monotonic() >= killed_at:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    with locked_jobs() as known:
        done = known[id_]
        done["runs"].append(ENDS.get(done["wish"], ""))
        done.update(state="waits" if done["wish"] == "requeue" else "over", code=process.returncode)


def run_tasks(command):
    """Start a command once per task, and end all tasks if one fails; forward SIGTERM to all."""
    nodes, tasks = int(os.environ["TQ_NODES"]), int(os.environ["TQ_TASKS"])
    places = [(node, local) for node in range(nodes) for local in range(tasks)]
    children = [
        subprocess.Popen(command, env={**os.environ, "TQ_TASK": str(node * tasks + local), "TQ_LOCAL": str(local), "TQ_NODE": str(node)})
        for node, local in places
    ]  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: [child.send_signal(signal.SIGTERM) for child in children])
    while None in (codes := [child.poll() for child in children]):
        if any(codes):
            time.sleep(5.0)  # time for the other tasks to print their errors
            for child in children:
                child.kill()
        time.sleep(0.05)
    sys.exit(max(codes, key=abs))


if __name__ == "__main__":
    what, rest = sys.argv[2], sys.argv[3:]
    if what == "submit":
        submit(*rest)
    elif what == "list":
        with locked_jobs() as all_jobs:
            print(json.dumps(all_jobs))
    elif what == "keep":
        manage_job(rest[0])
    elif what == "run":
        run_tasks(rest)
    else:
        request(what, rest)
