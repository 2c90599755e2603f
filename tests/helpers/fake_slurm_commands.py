"""sbatch, squeue, sacct, scontrol, scancel, sinfo and srun without a cluster: `python fake_slurm_commands.py NAME ARGUMENTS`.

The state is in the folder $FAKE_SLURM, which FakeSlurm in fake_slurm.py creates: jobs/<id>.json, settings.json (version and
faults), calls.jsonl (all calls). Only a few modules of the standard library are imported, because each call is a process.

The output was recorded from SLURM 22.05.8 (Debian) on the project's test cluster: the lines of squeue, sacct and scontrol (many
of them are in tests/fixtures/slurm_22_05.json), the messages of sbatch, "Invalid job id specified" and "Slurm accounting storage
is disabled". The following was written from the documentation and release notes: all that only 20.11, 23.11 or 24.11 prints
(see VERSIONS), the message of a lost connection, and a squeue that fails completely if one of several jobs is unknown.
"""

import fcntl
import json
import os
import re
import sys
import time

VERSIONS = {
    # no squeue --me, which some 20.11 lack, and no Scheduler=
    "20.11": {"name": "slurm 20.11.9", "me": False, "fields": "", "tres": "TRES={tres}", "end": "Power="},
    "22.05": {"name": "slurm-wlm 22.05.8", "me": True, "fields": "Scheduler=Main ", "tres": "TRES={tres}", "end": "Power="},
    # requested and allocated resources are separate fields
    "23.11": {"name": "slurm 23.11.10", "me": True, "fields": "Scheduler=Main ", "tres": "ReqTRES={tres} AllocTRES={tres}", "end": "Power="},
    # prints the command line of the submission, which can contain any text
    "24.11": {"name": "slurm 24.11.3", "me": True, "fields": "Scheduler=Main ", "tres": "ReqTRES={tres} AllocTRES={tres}",
              "end": "TresPerNode=gres/gpu:1 SubmitLine=sbatch --comment=JobState=RUNNING Restarts=7 script.sh"},
}  # fmt: skip
ACTIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "EXPEDITING", "STAGE_OUT")
UNREACHABLE = "Unable to contact slurm controller (connect failure)"
FOLDER = os.environ["FAKE_SLURM"]


def main() -> None:
    command, arguments = sys.argv[1], sys.argv[2:]
    log_call(command, arguments)
    settings = read_state("settings.json")
    replay(settings, [command, *arguments])
    globals()[command](settings, arguments)


def replay(settings: dict, call: list) -> None:
    """Print the recorded output of the same call of a real SLURM and exit, if there is one."""
    if not settings["recorded"]:
        return
    with open(settings["recorded"]) as file:
        for known in json.load(file)["calls"]:
            if known["call"] == call:
                sys.stdout.write(known["stdout"])
                sys.stderr.write(known["stderr"])
                sys.exit(known["code"])
    exit_with_error(f"not recorded: {call}")


def log_call(command: str, arguments: list) -> None:
    kept = ("SLURM_", "SUBMITIT_", "SQUEUE_", "SACCT_", "SINFO_", "CUDA_VISIBLE_DEVICES")
    environ = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    with open(f"{FOLDER}/calls.jsonl", "a") as file:
        file.write(json.dumps({"command": command, "arguments": arguments, "environ": environ}) + "\n")


def read_state(name: str) -> dict:
    with open(f"{FOLDER}/{name}") as file:
        return json.load(file)


def write_state(name: str, content: object) -> None:
    path = f"{FOLDER}/{name}"
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump(content, file)
    os.replace(f"{path}.{os.getpid()}", path)


def read_jobs() -> list:
    names = sorted((name for name in os.listdir(f"{FOLDER}/jobs") if name.endswith(".json")), key=lambda n: int(n[:-5]))
    return [read_state(f"jobs/{name}") for name in names]


def exit_with_error(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.exit(1)


def read_option(arguments: list, *names: str) -> str:
    """Return the value of an option under any of its names; empty if it is not given."""
    for place, word in enumerate(arguments):
        for name in names:
            if word.startswith(f"{name}=") and name.startswith("--"):
                return word.partition("=")[2]
            if word == name and place + 1 < len(arguments):
                return arguments[place + 1]
    return ""


# --- sbatch


def sbatch(settings: dict, arguments: list) -> None:
    if "--version" in arguments:
        print(VERSIONS[settings["version"]]["name"])
        return
    if "--test-only" in arguments and not settings["sbatch"]:
        sys.stderr.write(
            f"sbatch: Job 99 to start at {settings['starts']} using 4 processors on nodes n[1-2] in partition main\n"
        )
        return
    with open(f"{FOLDER}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        calls = read_state("sbatch.json")
        write_state("sbatch.json", calls + 1)
        mode = settings["sbatch"][calls] if calls < len(settings["sbatch"]) else "accept"
        id_ = (
            None
            if mode in ("timeout", "hang", "unreachable") or mode.startswith("refuse:")
            else accept_job(settings, arguments)
        )
    if mode.startswith("refuse:"):
        exit_with_error("".join(f"sbatch: error: {line}\n" for line in mode.partition(":")[2].split(";")).rstrip())
    if mode in ("timeout", "accept, timeout"):
        exit_with_error("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    if mode == "unreachable":
        exit_with_error(f"sbatch: error: Batch job submission failed: {UNREACHABLE}")
    if mode in ("hang", "accept, hang"):
        time.sleep(3600)
    print("Submitted batch job" if mode == "accept, no id" else f"Submitted batch job {id_}")


def accept_job(settings: dict, arguments: list) -> int:
    """Accept a job and store its script."""
    path = arguments[-1]
    with open(path) as file:
        text = file.read()
    requested = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    id_ = 1000 + len(os.listdir(f"{FOLDER}/jobs"))
    with open(f"{FOLDER}/scripts/{id_}.sh", "w") as file:
        file.write(text)
    depends = requested.get("dependency", "")
    write_state(f"jobs/{id_}.json", {
        "id": id_, "name": requested.get("job-name", "").strip("'"), "script": os.path.abspath(path), "nodes": requested.get("nodes", "1"),
        "dependency": depends, "state": "PENDING", "reason": "Dependency" if depends else "Priority", "starts": "N/A",
        "ends": "N/A", "node_list": "", "restarts": 0, "derived": "0:0", "steps": [], "earlier": [], "forgotten": False,
        "accounted": None, "visible_at": time.time() + settings["lag"], "user": os.getuid(),
    })  # fmt: skip
    return id_


# --- queries


def list_known_jobs(settings: dict) -> list:
    """Return the jobs known to the controller."""
    return [job for job in read_jobs() if not job["forgotten"] and job["visible_at"] <= time.time()]


def exit_if_unreachable(settings: dict, command: str) -> None:
    """Exit if the controller is unreachable."""
    fault = settings.get(command, "")
    if fault == "unreachable":
        exit_with_error(f"slurm_load_jobs error: {UNREACHABLE}")
    if fault == "timeout":
        exit_with_error("slurm_load_jobs error: Socket timed out on send/recv operation")
    if fault == "hang":
        time.sleep(3600)
    if fault == "garbage":
        print("\x00\xff|||\nslurm: something\n|RUNNING|\n12|\n")
        sys.exit(0)


def squeue(settings: dict, arguments: list) -> None:
    exit_if_unreachable(settings, "squeue")
    if "--me" in arguments and not VERSIONS[settings["version"]]["me"]:
        exit_with_error("squeue: unrecognized option '--me'\nTry \"squeue --help\" for more information")
    result = list_known_jobs(settings)
    ids = [int(id_) for id_ in read_option(arguments, "--jobs", "-j").split(",") if id_]
    strange = [id_ for id_ in ids if id_ not in {job["id"] for job in result}]
    if ids and (len(strange) == len(ids) == 1 or (strange and settings["squeue"] == "refuses unknown")):
        exit_with_error("slurm_load_jobs error: Invalid job id specified")
    if ids:
        result = [job for job in result if job["id"] in ids]
    if user := read_option(arguments, "--user", "-u"):
        result = [job for job in result if str(job["user"]) == user]
    if name := read_option(arguments, "--name", "-n"):
        result = [job for job in result if job["name"] in name.split(",")]
    if read_option(arguments, "--states", "-t") != "all":
        result = [job for job in result if job["state"] in ACTIVE_STATES]
    form = read_option(arguments, "--format", "-o")
    for job in result:
        keys = {
            "%i": "id",
            "%T": "state",
            "%r": "reason",
            "%S": "starts",
            "%e": "ends",
            "%j": "name",
            "%o": "script",
            "%N": "node_list",
            "%k": "comment",
        }
        print(re.sub(r"%[A-Za-z]", lambda field, job=job, keys=keys: str(job.get(keys[field[0]], "(null)")), form))


def sacct(settings: dict, arguments: list) -> None:
    if settings["sacct"] == "disabled":
        exit_with_error("Slurm accounting storage is disabled")
    if settings["sacct"] == "hang":
        time.sleep(3600)
    if settings["sacct"] == "unreachable":
        exit_with_error("sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:dbd:6819: Connection refused")  # fmt: skip
    ids = read_option(arguments, "--jobs", "-j").split(",")
    columns = read_option(arguments, "--format", "-o").split(",")
    for job in read_jobs():
        if str(job["id"]) not in ids or settings["sacct"] == "knows nothing":
            continue
        last = {"state": job["accounted"] or job["state"], "derived": job["derived"], "steps": job["steps"]}
        for run in [*job["earlier"], last] if "--duplicates" in arguments or "-D" in arguments else [last]:
            rows = [("", run["state"], run["derived"]), *((f".{name}", state, "") for name, state in run["steps"])]
            for step, state, derived in rows:
                values = {"JobID": f"{job['id']}{step}", "State": state, "DerivedExitCode": derived}
                print("|".join(values[column] for column in columns))


def scontrol(settings: dict, arguments: list) -> None:
    words = [word for word in arguments if not word.startswith("-")]
    if words[:1] == ["update"]:
        exit_if_unreachable(settings, "scontrol")
        update_jobs(dict(word.split("=", 1) for word in words[1:]))
        return
    if words[:1] in (["uhold"], ["release"]):
        exit_if_unreachable(settings, "scontrol")
        hold_or_release(words[0], words[1].split(","))
        return
    if words[:2] != ["show", "job"]:
        exit_with_error(f"invalid keyword: {' '.join(words)}")
    exit_if_unreachable(settings, "scontrol")
    for job in list_known_jobs(settings):
        if str(job["id"]) == words[2]:
            print(format_job(settings, job))
            return
    exit_with_error("slurm_load_jobs error: Invalid job id specified")


def update_jobs(changes: dict) -> None:
    """Change pending jobs as `scontrol update` does."""
    for id_ in changes["JobId"].split(","):
        job = read_state(f"jobs/{id_}.json")
        if job["state"] != "PENDING":
            exit_with_error(f"Job is no longer pending execution for job {id_}")
        names = {"ExcNodeList": "exclude", "Dependency": "dependency", "StartTime": "starts", "Comment": "comment"}
        write_state(
            f"jobs/{id_}.json", {**job, **{names[key]: value for key, value in changes.items() if key in names}}
        )


def hold_or_release(word: str, ids: list) -> None:
    """Hold or release pending jobs."""
    for id_ in ids:
        job = read_state(f"jobs/{id_}.json")
        if job["state"] != "PENDING":
            exit_with_error(f"Job has already finished for job {id_}")
        write_state(f"jobs/{id_}.json", {**job, "reason": "JobHeldUser" if word == "uhold" else "None"})


def format_job(settings: dict, job: dict) -> str:
    """Return the line of `scontrol --details --oneliner show job`."""
    version = VERSIONS[settings["version"]]
    tres = version["tres"].format(tres=f"cpu=2,mem=1000M,node={job['nodes']},billing=2")
    return (
        f"JobId={job['id']} JobName={job['name']} UserId=user({job['user']}) GroupId=group(1000) MCS_label=N/A "
        f"Priority=4294901755 Nice=0 Account=lab QOS=normal JobState={job['state']} Reason={job['reason']} "
        f"Dependency={job['dependency'] or '(null)'} Requeue=0 Restarts={job['restarts']} BatchFlag=1 Reboot=0 ExitCode=0:0 "
        f"DerivedExitCode={job['derived']} RunTime=00:00:02 TimeLimit=00:02:00 TimeMin=N/A StartTime={job['starts']} "
        f"EndTime={job['ends']} Deadline=N/A SuspendTime=None SecsPreSuspend=0 {version['fields']}Partition=main "
        f"NodeList={job['node_list']} NumNodes={job['nodes']} NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* {tres} "
        f"Socks/Node=* Features=(null) Command={job['script']} WorkDir=/ {version['end']} "
    )


# --- commands that act on jobs


def scancel(settings: dict, arguments: list) -> None:
    for job in read_jobs():
        if str(job["id"]) in arguments and job["state"] in ACTIVE_STATES:
            job.update(state="CANCELLED", reason="None", accounted=job["accounted"] or f"CANCELLED by {os.getuid()}")
            write_state(f"jobs/{job['id']}.json", job)


def sinfo(settings: dict, arguments: list) -> None:
    print(settings["sinfo"])


def srun(settings: dict, arguments: list) -> None:
    exit_with_error("srun: error: nothing runs on a fake")


main()
