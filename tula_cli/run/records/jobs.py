"""Jobs, their attempts, and the commands of the leader."""

from typing import Any, Literal

from pydantic import computed_field, model_validator

from tula_cli.run.records.base import OutcomeClass, Record, RecordedText
from tula_cli.run.records.failures import Decision, Failure, Shortage, convert_old_failure
from tula_cli.run.records.results import PlannedBranch
from tula_cli.run.records.scripts import PlannedStart


class Job(Record):
    """A job as submitted; written only by the command line."""

    id: str
    scheduler: str  # cluster.kind of its spec: "local", "slurm", or an import string
    scheduler_id: str
    nodes: int
    submitted_at: float  # Unix time
    submissions: int = 1  # number of times it was submitted
    links: tuple[str, ...] = ()
    """Scheduler ids of the chain of jobs of a training, `scheduler_id` first; empty for other jobs."""
    link_nodes: tuple[int, ...] = ()  # nodes of each job in `links` if they differ (train.ramp); empty: `nodes` each
    host: str = ""  # name of the machine it runs on; only for local jobs
    folder: str = ""  # run directory as seen by its supervisors; empty for jobs of an older tula
    process_started: float | None = None  # start time of a local job's process, to detect a reused process id
    tula: str = ""  # tula version that submitted it; empty for jobs of an older tula

    @property
    def scheduler_ids(self) -> tuple[str, ...]:
        """The scheduler's ids of all jobs of the chain."""
        return self.links or (self.scheduler_id,)

    def get_nodes(self, chain_job: str) -> int:
        """Return the number of nodes that a job of the chain requests."""
        return dict(zip(self.links, self.link_nodes, strict=False)).get(chain_job, self.nodes)


class Attempt(Record):
    """One start of the workers by a supervisor."""

    task: str
    number: int  # from 1, within the task
    started_at: float  # Unix time
    ended_at: float | None = None  # Unix time; None while it runs
    failure: Failure | None = None  # None while it runs or if it succeeded
    decision: Decision | None = None  # decision after its failure; None if its supervisor made none
    host: str = ""  # node where it failed, else the leader's node
    pid: int = 0  # process id of the supervisor that started the ranks
    allocation: str = ""  # the scheduler's job id and number of requeues, "123.0"; empty for local jobs
    hosts: str = ""  # nodes of the allocation in the scheduler's notation, "node[1-4]"
    samples: int | None = None  # samples trained at the newest checkpoint when it started; None for probes
    idle_nodes: int = 0  # unused nodes of the allocation, because the batch cannot be divided among all
    reached: int | None = None  # samples trained when it ended, from the ranks' last report; None before a first step
    cluster: str = ""  # digest of its cluster section (`compute_cluster_signature`)
    tuned: int = 0  # samples trained in finished branches before it started (train.method: auto)
    disturbed_by: tuple[str, ...] = ()  # trainings of the same user that shared GPUs or cores with this probe
    tula: str = ""  # tula version that ran it; empty for an older tula

    @model_validator(mode="before")
    @classmethod
    def _convert_old_failure(cls, fields: Any) -> Any:
        return convert_old_failure(fields, ended_at="ended_at")

    @property
    def sort_key(self) -> tuple[float, str, int]:
        """The key by which attempts are sorted, oldest first."""
        return self.started_at, self.task, self.number

    def compute_duration_seconds(self, now: float | None = None) -> float:
        """Return the duration in seconds; an unfinished attempt lasts until `now`, or counts as 0 without `now`."""
        return max(0.0, (self.ended_at or now or self.started_at) - self.started_at)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> Literal["done"] | OutcomeClass | None:
        """The kind of failure, or "done"; None while the attempt runs."""
        if self.failure is not None:
            return self.failure.outcome
        return None if self.ended_at is None else "done"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def message(self) -> RecordedText:
        """The reason for the failure, and the consequence if there is one to report; empty without a failure."""
        if self.failure is None:
            return ""
        return "; ".join(filter(None, (self.failure.summary, self.decision.consequence if self.decision else "")))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rank(self) -> int | None:
        """The rank that caused the failure; None without a failure or if no single rank failed."""
        return None if self.failure is None else self.failure.rank

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shortage(self) -> Shortage | None:
        """The free and missing space if it failed because of a full disk, else None."""
        return None if self.failure is None else self.failure.shortage

    @property
    def scheduler_id(self) -> str:
        """The scheduler's id of the job that the attempt ran in; empty on the local machine."""
        return self.allocation.rpartition(".")[0] or self.allocation

    @property
    def progress(self) -> int | None:
        """Samples trained before it started that a restart does not repeat, including those of branches; None for probes."""
        return None if self.samples is None else self.samples + self.tuned


class LeaderCommand(Record):
    """The leader's next command to all supervisors of a job. If `task` is None, the job ends."""

    task: str | None
    attempt: int = 0
    ranks: int = 0  # number of ranks that take part; supervisors of further nodes stay idle
    meeting: str = ""
    """Rendezvous of torchrun or a script as "address:port"; empty if ranks meet through a file (srun)."""
    checkpoint: str = ""  # path of the checkpoint that a script resumes from; empty without one
    batch: int = 0  # global batch that a script is started with; 0 for tula's worker, which reads its task
    rehearsal: PlannedStart | None = None  # the start to run in a resume test, else None
    branch: PlannedBranch | None = None  # the start to run in a learning-rate search, else None
