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
    submitted_at: float
    submissions: int = 1  # how often it was submitted
    links: tuple[
        str, ...
    ] = ()  # ids of the chain that a training job is where jobs wait in a queue, scheduler_id first
    link_nodes: tuple[int, ...] = ()  # of each of them, where they differ (train.ramp); else all have `nodes`
    host: str = ""  # local: the machine it runs on
    folder: str = ""  # the run directory that it writes to, as its supervisors know it; empty of jobs of an older tula
    process_started: float | None = None  # local: start time of the process, against reused process ids
    tula: str = ""  # version that it was submitted with; empty of jobs of an older tula

    @property
    def ids(self) -> tuple[str, ...]:
        """The scheduler's ids of all jobs of the chain."""
        return self.links or (self.scheduler_id,)

    def get_nodes(self, link: str) -> int:
        """Return the number of nodes that a job of the chain requests."""
        return dict(zip(self.links, self.link_nodes, strict=False)).get(link, self.nodes)


class Attempt(Record):
    """One start of the workers by a supervisor."""

    task: str
    number: int  # from 1, within the task
    started_at: float
    ended_at: float | None = None
    failure: Failure | None = None  # None while it runs, and of a success
    decision: Decision | None = None  # what followed; None if its supervisor did not come to decide
    host: str = ""  # where it failed, else of its leader
    pid: int = 0  # of the process that started the ranks
    allocation: str = ""  # the scheduler's job id and how often it was requeued, "123.0"; empty on this machine
    hosts: str = ""  # the allocation's nodes as the scheduler writes them, "node[1-4]"
    samples: int | None = None  # of the newest checkpoint when it started; None for probes
    idle_nodes: int = 0  # of the allocation, which the batch does not divide among
    reached: int | None = None  # samples trained when it ended, as far as its ranks have told; None before a first step
    cluster: str = ""  # digest of the cluster section that it ran under (`compute_cluster_signature`)
    tuned: int = 0  # samples of finished branches when it started (train.method: auto)
    disturbed_by: tuple[str, ...] = ()  # of a probe: trainings of the same user on the same GPUs or cores
    tula: str = ""  # version that ran it; empty where an older one did

    @model_validator(mode="before")
    @classmethod
    def _lift_failure(cls, fields: Any) -> Any:
        return convert_old_failure(fields, ended_at="ended_at")

    def count_seconds(self, now: float | None = None) -> float:
        """Return the seconds that it took; an open attempt lasts until `now`, or is not counted."""
        return max(0.0, (self.ended_at or now or self.started_at) - self.started_at)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> Literal["done"] | OutcomeClass | None:
        """The kind of its failure, or "done"; None while it runs."""
        if self.failure is not None:
            return self.failure.outcome
        return None if self.ended_at is None else "done"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def message(self) -> RecordedText:
        """Why it failed, and what followed if that has to be said."""
        if self.failure is None:
            return ""
        return "; ".join(filter(None, (self.failure.summary, self.decision.consequence if self.decision else "")))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rank(self) -> int | None:
        """The rank at the root of its failure."""
        return None if self.failure is None else self.failure.rank

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shortage(self) -> Shortage | None:
        """The shortage of a full disk that it failed of."""
        return None if self.failure is None else self.failure.shortage

    @property
    def job_id(self) -> str:
        """The scheduler's id of the job that it ran in; empty on the local machine."""
        return self.allocation.rpartition(".")[0] or self.allocation

    @property
    def progress(self) -> int | None:
        """Samples done at the start that a restart does not train again; None for probes."""
        return None if self.samples is None else self.samples + self.tuned


class LeaderCommand(Record):
    """The leader's next command to all supervisors of a job. If `task` is None, the job ends."""

    task: str | None
    attempt: int = 0
    ranks: int = 0  # how many ranks take part; the followers beyond sit it out
    meeting: str = ""  # "address:port" of torchrun's rendezvous, or a script's; ranks under srun meet through a file
    checkpoint: str = ""  # that a script goes on from
    batch: int = 0  # global, that a script is started with: the worker knows its own
    rehearsal: PlannedStart | None = None  # what this start of a resume test is for
    branch: PlannedBranch | None = None  # the same of a search for a learning rate
