"""What sbatch says where it takes no job, and what to do about it."""

from tula_cli.errors import SchedulerError

HINTS = {
    "maxsubmitjob": "wait until some of your jobs have ended, or cancel some; squeue --user $USER lists them",
    "accounting/qos policy": "ask for less, or set cluster.slurm.account or qos; sacctmgr show assoc, qos lists limits",
    "account": "set cluster.slurm.account; sacctmgr show user $USER withassoc lists yours",
    "partition": "set cluster.slurm.partition; sinfo lists them",
    "qos": "set cluster.slurm.qos; sacctmgr show qos lists them",
    "reservation": "set cluster.slurm.reservation; scontrol show reservation lists them",
    "feature": "set cluster.slurm.constraint; sinfo -o '%f' lists the features",
    "node count": "search fewer nodes, or another partition",
    "time limit": "lower search.max_minutes or cluster.slurm.minutes",
    "memory": "lower cluster.slurm.memory",
    "gres": "check cluster.gpus_per_node against sinfo -o '%G'",
    "contact slurm controller": "the controller is down or out of reach; run the same command again later",
    "timed out": "the controller is busy; run the same command again later",
}
"""What to do about a refusal, by the words in it; the first that fits."""


def refusal_error(output: str) -> SchedulerError:
    """Return sbatch's refusal in its own words, and what to do about it."""
    messages = [line.strip().removeprefix("sbatch: error: ") for line in output.splitlines() if "sbatch:" in line]
    text = "; ".join(messages) or output.strip().rpartition("\n")[2] or "it did not say why"
    hint = next(
        (hint for keyword, hint in HINTS.items() if keyword in text.lower()), "check the cluster section of the job"
    )
    return SchedulerError(f"sbatch refused the job: {text}", hint)
