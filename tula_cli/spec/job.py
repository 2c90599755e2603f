"""The whole job spec."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from tula_cli.errors import SpecError
from tula_cli.presets import DIVIDING
from tula_cli.spec.ags import Ags, Auto, divided
from tula_cli.spec.kinds import NonNegativeFloat, Positive, PositiveFloat, Section
from tula_cli.spec.merge import merge
from tula_cli.spec.resources import UNPRICED, Cluster, NodeType, Pricing, TypeName
from tula_cli.spec.scripts import section
from tula_cli.spec.scripts.own_script import Script
from tula_cli.spec.sections import Dataset, Loss, Model, Optimizer, Schedule, SequenceLengths, Train, Transforms
from tula_cli.words import plural

LEAST_STEPS = 5
"""The fewest steps that a probe times, however long they take: fewer tell nothing of their spread."""
WITH_BETA2 = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam")
"""Optimizers of torch whose second beta is that of the gradients' squares, or of their largest magnitude."""
LOOKS = 3
"""Looks of a probe at the time of steps of their own: on data that is there, of synchronisation, of local work."""


class Search(Section):
    """What to measure."""

    nodes: Annotated[list[Positive], Field(min_length=1)] = [2, 4, 8, 16]  # numbers of nodes
    min_batch: Positive = 32  # smallest global batch; candidates are min_batch x 2^k
    max_batch: Positive | None = None  # besides memory and the dataset's size
    # sweep: all batches on the fewest nodes, the smallest elsewhere, the middle one on the most; five: three batches on the
    # fewest nodes, two on the most; partial: the four corners; full: all; adaptive: in rounds; few: the smallest batch and
    # the two largest, on the fewest nodes
    strategy: Literal["sweep", "five", "partial", "full", "adaptive", "few"] = "sweep"
    sequence: SequenceLengths | None = None  # lengths of text to measure too, a few batches of each on the fewest nodes
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.01  # expected regret at which `adaptive` stops, a share
    # a probe times steps until it has as many, they have taken min_seconds, and the standard error of their mean is below 1 %
    min_steps: Annotated[int, Field(ge=5)] = 10
    min_seconds: NonNegativeFloat = 2.0  # clocks and power have settled by then
    max_seconds: PositiveFloat = 60.0  # it ends then in any case, if it has 5; so does the warm-up
    warmup_steps: Annotated[int, Field(ge=2)] = (
        10  # at least, before those that are timed; it lasts until they are alike
    )
    memory_margin: Annotated[float, Field(ge=0, lt=1)] = 0.1  # of the capacity, kept free
    max_node_hours: PositiveFloat | None = None  # the most that probes, and rehearsals of a script, may cost
    max_minutes: PositiveFloat = 20.0  # the most one profiling job may last
    packing: Literal["jobs", "single"] = "jobs"  # a job a number of nodes, or one job for all

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "Search":
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch {self.max_batch} is below min_batch {self.min_batch}")
        if self.max_seconds < self.min_seconds:
            raise ValueError(f"max_seconds {self.max_seconds:g} is below min_seconds {self.min_seconds:g}")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes names a size twice: {self.nodes}")
        return self

    @property
    def split_steps(self) -> int:
        """How many steps a probe takes at most for each look of its own at times, and for that at gradients."""
        return self.min_steps

    def timed_steps(self, step_time: float) -> int:
        """Return how many steps a probe is expected to time, where they are steady.

        Args:
            step_time: seconds of one.
        """
        wanted = max(self.min_steps, math.ceil(self.min_seconds / step_time))
        return max(LEAST_STEPS, min(wanted, math.ceil(self.max_seconds / step_time)))

    def probe_seconds(self, step_time: float) -> float:
        """Return what the steps of a probe are expected to take: warm-up, timed ones, and its other looks. Seconds.

        Args:
            step_time: seconds of one.
        """
        looks = LOOKS * LEAST_STEPS + self.split_steps  # steady steps are looked at for as few as tell anything
        return (self.warmup_steps + self.timed_steps(step_time) + looks) * step_time


class JobSpec(Section):
    """A whole job. Everything has a default but the model, the dataset, the learning rate and the epochs; or the script."""

    # the run's directory is tula-runs/<name>-<signature>
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "job"
    script: Script | None = None  # a training script as it is, in place of the sections up to schedule
    model: Model
    dataset: Dataset
    transforms: Transforms = Transforms()
    loss: Loss = Loss()
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    train: Train
    ags: Ags = Ags()
    auto: Auto = Auto()
    search: Search = Search()
    cluster: Cluster = Cluster()
    pricing: Pricing = UNPRICED  # without it cost is a number of node-hours
    node_types: dict[TypeName, NodeType] = {}  # each is measured for itself; the choice is made over all

    @model_validator(mode="before")
    @classmethod
    def _script_takes_the_place_of_the_loop(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or content.get("script") is None:
            return content
        return section.filled(content)

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        if self.script is not None:
            return section.told(content)
        content.pop("script", None)
        return content

    @model_validator(mode="after")
    def _learning_rate_reaches_the_script(self) -> "JobSpec":
        rule = self.train.lr_rule
        if self.script is not None and rule != "none" and not self.script.placeholders & {"lr", "lr_factor"}:
            raise ValueError(
                f"the learning rate is to be scaled ({rule}), and script.command has neither {{lr}} nor {{lr_factor}}; add one,"
                " or use train.method lbt where the script scales it itself"
            )
        return self

    @model_validator(mode="after")
    def _names_of_parameters_are_known(self) -> "JobSpec":
        if self.script is not None and self.ags.exclude:
            raise ValueError("ags.exclude names parameters of tula's own loop; with a script wrap the optimizer there")
        return self

    @model_validator(mode="after")
    def _tuning_fits(self) -> "JobSpec":
        if not self.train.facts.tunes:
            return self
        if self.auto.after >= self.train.epochs:
            raise ValueError(
                f"auto.after {self.auto.after} leaves nothing of train.epochs {self.train.epochs} to train as tuned"
            )
        if self.train.lr_scaling in ("linear", "sqrt"):
            raise ValueError(
                f"train.lr_scaling {self.train.lr_scaling} would scale the learning rate under method auto, whose arms"
                " scale it themselves; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _scaling_is_of_updates_where_gradients_do_nothing(self) -> "JobSpec":
        """Let factors be of the update, unless it is said otherwise, where the optimizer divides by what they multiply."""
        if (
            self.script is None
            and self.train.facts.scales
            and self.ags.apply_to is None
            and self.optimizer.name in DIVIDING
        ):
            object.__setattr__(self, "ags", self.ags.model_copy(update={"apply_to": "update"}))  # it is frozen
        return self

    @model_validator(mode="after")
    def _shares_suffice(self) -> "JobSpec":
        """Let factors be of tensors where the model is divided among the ranks; refuse what needs it whole."""
        if (ags := divided(self.ags, self.train)) != self.ags:
            object.__setattr__(self, "ags", ags)  # it is frozen
        return self

    @model_validator(mode="after")
    def _schedule_fits_the_method(self) -> "JobSpec":
        if self.train.facts.constant_schedule and self.schedule.kind != "constant":
            raise ValueError(
                f"method {self.train.method} averages weights in place of a learning rate that falls; set schedule.kind:"
                f" constant, not {self.schedule.kind} (a warm-up is fine)"
            )
        return self

    @model_validator(mode="after")
    def _lengths_are_those_of_text(self) -> "JobSpec":
        sequence = self.search.sequence
        if sequence is None:
            return self
        if self.script is not None:
            raise ValueError(
                "search.sequence is of tula's own loop; a script's length is in its command: profile each one"
            )
        if self.length is None:
            raise ValueError(
                f"search.sequence needs the job's own length: set {sequence.options[0]} to it, or name in"
                " search.sequence.options the argument that holds it (dataset.args.X or model.args.X), as an integer"
            )
        longest = max(sequence.lengths)
        for key, value in self.model.longest_text.items():
            if value < longest and f"model.args.{key}" not in sequence.options:
                raise ValueError(
                    f"search.sequence: the model takes at most {value} positions (model.args.{key}), and {longest} is to be"
                    f" measured; add model.args.{key} to search.sequence.options, or raise it"
                )
        return self

    @model_validator(mode="after")
    def _types_are_sound(self) -> "JobSpec":
        problems: list[InitErrorDetails] = []
        currencies: dict[str, str] = {}
        for name in self.node_types:
            try:
                currencies[name] = self.of_type(name).pricing.currency
            except ValidationError as error:
                problems += [_under(item, "node_types", name) for item in error.errors()]
        if problems:
            raise ValidationError.from_exception_data("JobSpec", problems)
        if len(set(currencies.values())) > 1:
            found = ", ".join(f"{name} in {currency}" for name, currency in currencies.items())
            raise ValueError(f"node_types must be priced in one currency to be compared, got {found}")
        return self

    @property
    def task_per_node(self) -> bool:
        """Whether SLURM starts one process a node, which starts those of the GPUs; else it starts one a GPU."""
        slurm = self.cluster.slurm
        by_command = self.script is not None and self.script.launch == "node"
        return self.cluster.kind == "slurm" and (by_command or (slurm is not None and slurm.launcher == "torchrun"))

    def by_type(self, only: str | None = None) -> dict[str | None, "JobSpec"]:
        """Return the whole job on each type of node (on the named one); where it names none, itself under None.

        Raises:
            SpecError: there is no such type.
        """
        if only is not None and only not in self.node_types:
            there_are = ", ".join(self.node_types)
            raise SpecError(
                f"no node type {only!r}",
                f"there are: {there_are}" if there_are else "the job has no section node_types",
            )
        if not self.node_types:
            return {None: self}
        return {name: self.of_type(name) for name in self.node_types if only in (None, name)}

    def of_type(self, name: str) -> "JobSpec":
        """Return the whole job on one type of node; it knows of no others.

        Raises:
            ValidationError: what the type has of its own does not fit.
        """
        # A section that is there but empty, as a written spec has it, says nothing of its own.
        own = {key: value for key, value in self.node_types[name].model_dump(exclude_unset=True).items() if value}
        base = self.model_dump(mode="json", exclude_unset=True, exclude={"node_types"})
        if self.pricing == UNPRICED:  # nothing of it holds beside a price
            base.pop("pricing", None)
        merge(base, own, {}, source=name)
        return JobSpec.model_validate(base)

    @property
    def length(self) -> int | None:
        """The job's own length of text; None where search.sequence does not say where it stands."""
        sequence = self.search.sequence
        if sequence is None:
            return None
        section, _, key = sequence.options[0].split(".")
        found = (self.dataset.args if section == "dataset" else self.model.args).get(key)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def by_length(self) -> dict[int, "JobSpec"]:
        """Return the job at each other length of search.sequence, ascending, as it is measured there.

        A few batches on the fewest nodes tell memory and pace; what more nodes take follows from the job's own length.
        """
        sequence = self.search.sequence
        if sequence is None:
            return {}
        return {
            length: self._of_length(length, sequence) for length in sorted(sequence.lengths) if length != self.length
        }

    def _of_length(self, length: int, sequence: SequenceLengths) -> "JobSpec":
        base = self.model_dump(mode="json", exclude_unset=True)
        for option in sequence.options:
            section, _, key = option.split(".")
            base[section].setdefault("args", {})[key] = length
        search = {"nodes": [min(self.search.nodes)], "strategy": "few", "sequence": None}
        return JobSpec.model_validate({**base, "search": {**base["search"], **search}})


def _under(item: Any, *path: str) -> InitErrorDetails:
    """Return a problem that pydantic found in a part, with the path of the whole."""
    kind = PydanticCustomError("value_error", "{why}", {"why": item["msg"].removeprefix("Value error, ")})
    own = kind if item["type"] == "value_error" else item["type"]
    return InitErrorDetails(type=own, loc=(*path, *item["loc"]), input=item["input"], ctx=item.get("ctx", {}))


def warmup_epochs(spec: JobSpec) -> float:
    """Return how many epochs the learning rate grows before its schedule: as given, else as the method needs."""
    if spec.schedule.kind == "one-cycle":  # it grows by itself
        return 0.0
    given = spec.schedule.warmup_epochs
    by_method = (
        0.0 if spec.train.stages else spec.train.facts.warmup_epochs
    )  # a batch that grows is a warm-up by itself
    return by_method if given is None else given


def train_length(spec: JobSpec) -> str:
    """Return how long a job trains, in words."""
    if spec.script is not None:
        return section.length_words(spec.script)
    whole, trained = spec.train.epochs, spec.train.epochs_at_most
    return plural(whole, "epoch") if trained == whole else f"{trained} of {plural(whole, 'epoch')}"


def lr_scale(spec: JobSpec, batch: int) -> float:
    """Return what the learning rate is multiplied by at a global batch: its ratio to the reference, or the root of it.

    AdaScale's gain and the factors of AGS come on top; they are not known beforehand.
    """
    ratio = batch / spec.train.reference_batch
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[_lr_rule(spec)]
    return scale if spec.train.max_lr_factor is None else min(scale, spec.train.max_lr_factor)


def _lr_rule(spec: JobSpec) -> Literal["none", "linear", "sqrt"]:
    """Return how the learning rate is scaled; of method ramp Adam's by the root (Malladi et al. 2022)."""
    by_root = spec.train.facts.ramps and spec.train.lr_scaling == "auto" and spec.optimizer.name in DIVIDING
    return "sqrt" if by_root else spec.train.lr_rule


def beta2_half_life(spec: JobSpec) -> float | Literal["auto"] | None:
    """Return `optimizer.beta2_half_life`; where nothing is said method ramp keeps that of the reference batch."""
    given = spec.optimizer.beta2_half_life
    return "auto" if given is None and spec.train.facts.ramps and spec.optimizer.name in WITH_BETA2 else given


def beta2_at(spec: JobSpec, beta2: float, batch: int) -> float:
    """Return the share of Adam's second moment that a step at a global batch keeps.

    Half of it is forgotten in `optimizer.beta2_half_life` samples: 0.5^(batch / samples); with `auto` in as many as at the
    reference batch: beta2^(batch / reference) (Marek et al. 2025, arXiv 2507.07101).

    Args:
        spec: the job.
        beta2: as the optimizer has it by itself, or by its arguments.
        batch: samples a step.
    """
    asked = beta2_half_life(spec)
    if asked is None:
        return beta2
    kept, steps = (beta2, batch / spec.train.reference_batch) if asked == "auto" else (0.5, batch / asked)
    return math.pow(kept, steps)


def misfit(spec: JobSpec) -> str:
    """Return why the job's method does not go with its optimizer; empty where it does, or where only loading it tells."""
    facts, name = spec.train.facts, spec.optimizer.name
    if facts.replaces and name not in facts.replaces:
        return f"takes the place of {' or '.join(facts.replaces)}, not of optimizer.name: {name}"
    if facts.needs_sgd and name != "SGD" and ":" not in name:
        return f"needs optimizer.name: SGD, not {name}"
    if facts.scales and name in DIVIDING and spec.ags.resolved().apply_to == "gradient":
        return f"scales gradients, whose magnitude {name} divides by: set ags.apply_to: update"
    if spec.optimizer.beta2_half_life is not None and ":" not in name and name not in WITH_BETA2:
        return f"keeps optimizer.beta2_half_life, and {name} has no beta2: set optimizer.name: AdamW, or leave it out"
    return ""
