"""Tasks: the parameters of what a job measures, trains, evaluates or checks."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, computed_field

from tula_cli.run.records.base import Record, RecordedText
from tula_cli.run.records.failures import Recovery
from tula_cli.run.records.probes import Footprint
from tula_cli.run.records.recommendations import Prediction, Stage
from tula_cli.spec.load import StoredSpec
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.sections import Workers
from tula_cli.spec.slurm_options import EXTRA_MINUTES

MAX_RESTARTS = 2
"""Maximum restarts of a job other than a training after lost processes (not after out-of-memory or a user error)."""
FOLDER_TIMEOUT_SECONDS = 30
"""Seconds for which a job waits for a folder that is unavailable."""
TRAINING_FOLDER_TIMEOUT_SECONDS = 600
"""Maximum of FOLDER_TIMEOUT_SECONDS for a job of a training, which waits for at most half of its time limit."""


class Rung(Record):
    """A batch at which the training may run, with its predictions."""

    batch: int  # global
    prediction: Prediction | None = None  # with unsplit micro-batches; None if unknown
    cut: dict[int, Prediction] = {}
    """Number of parts of each micro-batch -> prediction with them; only in the first rung, as far as known."""

    def get_prediction_with_splits(self, splits: int) -> Prediction | None:
        """Return the prediction with each micro-batch in `splits` parts, or None."""
        return self.prediction if splits == 1 else self.cut.get(splits)


class JobSize(Record):
    """One of the numbers of nodes that a job of a training may be granted (`tula train --nodes 2-8`)."""

    nodes: int
    micro_batch: int  # samples per micro-batch on one GPU, after splitting
    splits: int  # parts into which micro-batches of train.accumulate are split so that they fit the memory
    ladder: tuple[Rung, ...]  # as in TrainTask, for this number of nodes

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for this number of nodes, or None."""
        return self.ladder[0].get_prediction_with_splits(self.splits)


class BaseTask(Record):
    """The fields of every task, and properties with the values of most tasks, which some classes override."""

    has_checkpoints: ClassVar[bool] = False
    """Whether it resumes from checkpoints, so that a relaunch may succeed after any failure of the allocation."""
    is_timed: ClassVar[bool] = False  # whether step times are measured, which other programs would distort
    has_log_per_supervisor: ClassVar[bool] = False  # whether SLURM writes the output of each supervisor to its own log

    id: str
    job: str
    spec: StoredSpec
    workdir: str
    nodes: int
    code: str = ""  # name of the snapshot of the user's code; empty if the spec uses none

    @property
    def ranks(self) -> int:
        return self.nodes * self.spec.cluster.gpus_per_node

    @property
    def ranks_per_supervisor(self) -> int:
        """Number of ranks that one supervisor starts: one, those of its node, or all of a job on this machine."""
        if self.spec.cluster.backend.has_one_supervisor:
            return self.ranks
        return self.spec.cluster.gpus_per_node if self.spec.starts_one_task_per_node else 1

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Possible numbers of nodes of the job, ascending; one, unless the job uses the nodes that the scheduler grants."""
        return (self.nodes,)

    @property
    def trained_signature(self) -> str:
        """Signature of the training that it starts or resumes; empty of another task."""
        return ""

    @property
    def samples_per_rank(self) -> int | None:
        """Samples of a batch on one GPU, of a probe its last batch; None if it has no batch, or a script's resume test."""
        return None

    @property
    def next_attempt_id(self) -> str:
        """Id of the task of a training's next attempt; empty of another task, whose attempts all have its own id."""
        return ""

    @property
    def ramp_stages(self) -> tuple[Stage, ...]:
        """Stages of a training whose batch grows; empty of another task."""
        return ()

    @property
    def resume_test_job_id(self) -> str:
        """The job of the resume test that must have ended before this job starts; empty if there is none."""
        return ""

    @property
    def awaited_job_ids(self) -> tuple[str, ...]:
        """The jobs that the scheduler has to wait for before it starts this one."""
        return ()

    @property
    def requested_nodes(self) -> int:
        """Number of nodes of its job; the largest if the scheduler may grant several."""
        return self.nodes

    @property
    def cause(self) -> str:
        """The reason for this relaunch in one sentence; empty if it is none."""
        return ""

    @property
    def max_attempts(self) -> int:
        """Counted attempts (`COUNTED_OUTCOMES`) after which tula gives up; a newer checkpoint of a training resets the count."""
        return 1 + MAX_RESTARTS

    @property
    def micro_batch_splits(self) -> int:
        """Parts in which each micro-batch is computed."""
        return 1

    @property
    def script(self) -> Script | None:
        """The user's script that the ranks run; None if they run tula's worker."""
        return self.spec.script

    @property
    def loader_workers(self) -> Workers:
        """Data-loader processes per rank."""
        return self.spec.train.workers

    @property
    def timeout(self) -> float:
        """Seconds over all attempts after which the supervisor stops the task; infinite if only the job's limit applies."""
        return math.inf

    @property
    def timeout_message(self) -> str:
        return f"stopped after {self.spec.search.max_minutes:g} minutes (search.max_minutes)"

    @property
    def time_limit_minutes(self) -> int:
        """Time limit of the job in minutes."""
        return self.spec.cluster.minutes

    @property
    def folder_timeout(self) -> int:
        """Seconds for which the job waits for unavailable folders: few, as a user waits for the result."""
        return FOLDER_TIMEOUT_SECONDS


class MeasuringTask(BaseTask):
    """A task that may take `search.max_minutes`: a probe or a resume test."""

    @property
    def timeout(self) -> float:
        return 60 * self.spec.search.max_minutes

    @property
    def time_limit_minutes(self) -> int:
        return math.ceil(self.spec.compute_measuring_minutes())


class BatchBounds(Record):
    """The bounds of a search for the largest local batch that fits, and the estimate that it starts from."""

    limit: int  # largest local batch to try: that of the dataset or of search.max_batch
    start: int  # local batch of the first trial if the memory cannot be estimated
    capacity: int | None  # bytes of one GPU; None if only a probe can determine it
    footprints: tuple[Footprint, ...]  # empty without an estimate, as for a script


class ProbeTask(MeasuringTask):
    """A job that measures local batches, ascending, on one number of nodes; or one that searches for the largest."""

    is_timed = True

    kind: Literal["probe"] = "probe"
    local_batches: tuple[int, ...]
    skip: tuple[int, ...] = ()  # local batches that already failed in this job and are left out
    bounds: BatchBounds | None = None
    """Bounds of the search for the largest local batch, whose trials the supervisor appends to `local_batches`; None if only
    the given batches are measured."""

    @property
    def samples_per_rank(self) -> int:
        return self.local_batches[-1]


def make_probe_id(nodes: int, local_batch: int) -> str:
    return f"probe-n{nodes:03d}-l{local_batch:06d}"


def make_probe_identity(task: ProbeTask, local_batch: int) -> dict[str, Any]:
    """Return the fields that identify a probe, common to all its results."""
    return {
        "id": make_probe_id(task.nodes, local_batch),
        "nodes": task.nodes,
        "gpus_per_node": task.spec.cluster.gpus_per_node,
        "local_batch": local_batch,
    }


class TrainTask(BaseTask):
    """A job that trains: the first rung is this attempt's batch, the others are its OOM fallbacks.

    Its id is train-<signature>-<attempt>, its job train-<signature>; `nodes` are those of this attempt.
    """

    has_checkpoints = True

    kind: Literal["train"] = "train"
    signature: str
    attempt: int  # from 1
    ladder: tuple[Rung, ...]  # by descending batch
    workers: Workers  # data-loader processes per rank (fewer after a host OOM)
    splits: int = 1  # parts into which each micro-batch of train.accumulate is split (more after an OOM)
    sizes: tuple[JobSize, ...] = ()  # numbers of nodes that a job may be granted, ascending; empty: it requests `nodes`
    max_micro_batch: int | None = None
    """Samples per micro-batch that fit a GPU on any number of nodes, after an OOM; None before one, or without `sizes`."""
    stages: tuple[Stage, ...] = ()
    """Stages of `train.ramp`, decided before the training starts; empty if its batch does not grow. An OOM fallback to a
    smaller batch keeps the stages below it."""
    max_lr_factor: float | None = None
    """Reduced train.max_lr_factor after a growing batch diverged; None: the job's value."""
    recovery: Recovery | None = None  # the reason for this relaunch; None for the first attempt
    after: str = ""  # job of the resume test to wait for, whose verdict may forbid this training; empty without one
    follows: tuple[str, ...] = ()  # unfinished jobs whose nodes it takes over in a plan of many trainings

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cause(self) -> RecordedText:
        """The reason for this relaunch in one sentence; empty for the first attempt."""
        return "" if self.recovery is None else self.recovery.description

    @property
    def batch(self) -> int:
        return self.ladder[0].batch

    @property
    def samples_per_rank(self) -> int:
        return self.batch // self.ranks

    @property
    def trained_signature(self) -> str:
        return self.signature

    @property
    def next_attempt_id(self) -> str:
        return f"{self.job}-{self.attempt + 1}"

    @property
    def ramp_stages(self) -> tuple[Stage, ...]:
        return self.stages

    @property
    def resume_test_job_id(self) -> str:
        return self.after

    @property
    def awaited_job_ids(self) -> tuple[str, ...]:
        return (*filter(None, (self.after,)), *self.follows)

    @property
    def requested_nodes(self) -> int:
        return self.training_nodes if self.sizes else self.nodes

    @property
    def max_attempts(self) -> int:
        return self.spec.train.max_attempts

    @property
    def micro_batch_splits(self) -> int:
        return self.splits

    @property
    def loader_workers(self) -> Workers:
        return self.workers

    @property
    def folder_timeout(self) -> int:
        """Seconds for which the job waits for unavailable folders: many, to survive an outage of the file system."""
        return min(TRAINING_FOLDER_TIMEOUT_SECONDS, 30 * self.time_limit_minutes)

    @property
    def node_counts(self) -> tuple[int, ...]:
        return tuple(size.nodes for size in self.sizes) or (self.nodes,)

    @property
    def training_nodes(self) -> int:
        """Number of nodes of the training: that of its last stage, else the largest that its job may be granted."""
        return (self.stages[-1].nodes if self.stages else None) or self.node_counts[-1]

    def with_granted_nodes(self, nodes: int) -> "TrainTask":
        """Return this task on the largest of its sizes for which `nodes` nodes suffice; unchanged if it has no sizes."""
        size = next((size for size in reversed(self.sizes) if size.nodes <= nodes), None)
        return self if size is None or size.nodes == self.nodes else self.with_size(size)

    def with_size(self, size: JobSize) -> "TrainTask":
        """Return this task on the nodes of `size`, with fallbacks whose batch can be divided among the GPUs of each size."""
        parts = self.spec.cluster.gpus_per_node * self.spec.train.accumulate
        divisor = math.lcm(*(count * parts for count in self.node_counts))
        ladder = tuple(
            fallback for fallback in size.ladder if fallback.batch <= self.batch and fallback.batch % divisor == 0
        )
        if not ladder or ladder[0].batch != self.batch:
            ladder = (Rung(batch=self.batch), *ladder)
        resized = self.model_copy(update={"nodes": size.nodes, "ladder": ladder})
        if self.spec.workload.describe_accumulation_conflict():
            return resized
        whole, max_micro_batch = resized.micro_batch, min(size.micro_batch, self.max_micro_batch or size.micro_batch)
        splits = next(n for n in range(1, whole + 1) if whole % n == 0 and whole // n <= max_micro_batch)
        return resized.model_copy(update={"splits": splits})

    def with_divisible_sizes(self) -> "TrainTask":
        """Return this task without the sizes among whose ranks and micro-batches not every batch can be divided.

        The batches are that of the task and those of its stages; the micro-batches are those of train.accumulate.
        """
        parts = self.spec.cluster.gpus_per_node * self.spec.train.accumulate
        batches = [self.batch, *(stage.batch for stage in self.stages)]
        usable = [size for size in self.sizes if all(batch % (size.nodes * parts) == 0 for batch in batches)]
        return self.model_copy(update={"sizes": tuple(usable)})

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch of train.accumulate on one GPU, before it is split."""
        return self.batch // (self.ranks * self.spec.train.accumulate)

    @property
    def resume_test_nodes(self) -> int:
        """Number of nodes of the resume test before this training: 1 if its number of nodes is fixed, else 2 or 4.

        The test starts on half of its nodes. If the training never has a single rank, neither has the test, as a script
        may then save other files; this needs four nodes, so it does not apply if fewer may be granted.
        """
        if len(self.sizes) < 2:
            return 1
        has_several_ranks = self.spec.cluster.gpus_per_node > 1 or self.sizes[0].nodes == 1
        return 2 if has_several_ranks or self.sizes[-1].nodes < 4 else 4

    @property
    def next_stage(self) -> Stage | None:
        """The first stage with more nodes than this attempt; None if this attempt trains to the end."""
        return next((stage for stage in self.stages if (stage.nodes or 0) > self.nodes), None)

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for the batch with the current micro-batches, or None."""
        return self.ladder[0].get_prediction_with_splits(self.splits)


class ResumeTestTask(MeasuringTask):
    """A job that tests how a script resumes: steps, a save, kill -9, then resumes at this batch and at half of it.

    With several nodes, it starts on half of them, and resumes once on all. Its id is rehearse-<key>-<number>.
    """

    kind: Literal["rehearse"] = "rehearse"
    key: str  # resume_test_signature
    batch: int

    @property
    def first_nodes(self) -> int:
        """Number of nodes of the first start."""
        return max(1, self.nodes // 2)


class EvaluateTask(BaseTask):
    """A job that evaluates the weights of a training: `tula evaluate`.

    Its id is evaluate-<signature>-<key>. `spec` is that of the training with the test set, metrics and cluster of the
    current job file; `code` is that of the training.
    """

    kind: Literal["evaluate"] = "evaluate"
    signature: str  # signature of the training
    key: str  # id of the evaluation among those of the training
    weights: str  # best, last, or the path of a file
    path: str  # absolute path of the weights file
    samples: int | None  # samples that the weights were trained on; None for the user's own file
    local_batch: int  # samples per batch on one GPU

    @property
    def samples_per_rank(self) -> int:
        return self.local_batch


class RateSearchTask(BaseTask):
    """A job that trains short branches from one checkpoint with several learning rates: `tula compare --learning-rates`.

    Its id is rates-<key>.
    """

    kind: Literal["rates"] = "rates"
    key: str
    batches: tuple[int, ...]  # the batch whose learning rate is searched, then others to compare with it
    dataset_size: int | None = None  # samples per epoch of a script; None for tula's worker, which reads the dataset
    save_every: int = 0  # samples between two checkpoints of a script; 0 if it saves on request

    @property
    def samples_per_rank(self) -> int:
        return self.batches[0] // self.ranks


class CheckTask(BaseTask):
    """A short job that examines the nodes of a site: `tula check --on-cluster`."""

    MINUTES: ClassVar[float] = 3.0  # time limit in minutes
    has_log_per_supervisor = True  # they show which nodes see the run directory

    kind: Literal["check"] = "check"

    @property
    def number(self) -> int:
        """Number of the check in its run, at the end of its id; a later check has a higher one."""
        return int(self.id.rpartition("-")[2])

    @property
    def script(self) -> None:
        """None, because a check runs none of the user's code even if the job has a script."""

    @property
    def timeout(self) -> float:
        return 60 * self.MINUTES

    @property
    def timeout_message(self) -> str:
        return f"stopped after {self.MINUTES:g} minutes"

    @property
    def time_limit_minutes(self) -> int:
        return math.ceil(self.MINUTES) + EXTRA_MINUTES


class CodeSnapshot(Record):
    """The user's code at the time a job was submitted: the content of `code/<name>/`."""

    name: str
    digest: str  # digest of the contents of `modules`; part of the signatures
    taken_at: float  # Unix time
    workdir: str  # working directory of the ranks
    roots: tuple[str, ...]  # import paths, relative to the snapshot; "." is the snapshot itself
    modules: tuple[str, ...]  # files imported through the spec, or a script's code and settings; relative paths
    files: tuple[str, ...]  # all copied files, relative paths
    commit: str = ""  # git commit of the workdir; empty without a repository
    dirty: bool = False  # these files differ from the commit, or git could not compare them
    diff: str = ""  # output of git diff for these files, truncated if very long; empty without differences
    base: str = ""  # the copied folder of a script; empty: workdir was copied
    program: str = ""  # relative path of the script file in the command; empty for a module


LoopTask = ProbeTask | TrainTask | EvaluateTask
"""Tasks that build a model and its trainer."""
JobTask = ProbeTask | TrainTask | ResumeTestTask | EvaluateTask | RateSearchTask
"""Tasks that a user sees as jobs of a run; a check is not one of them."""
Task = JobTask | CheckTask
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
