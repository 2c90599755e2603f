"""The whole job spec."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from tula_cli.plugins import is_import_string
from tula_cli.presets import NORMALISING_OPTIMIZERS
from tula_cli.spec.ags import BRANCHING_EPOCH, Ags, Auto, ResolvedAgs, adapt_to_sharded_model
from tula_cli.spec.kinds import Nodes, Positive, Section, find_null_character
from tula_cli.spec.merge import merge_mappings
from tula_cli.spec.methods import OPTIMIZERS_WITH_BETA2, LrRule
from tula_cli.spec.old_keys import replace_old_keys
from tula_cli.spec.resources import UNPRICED_PRICING, Cluster, NodeType, Pricing, TypeName
from tula_cli.spec.schedules import (
    RELATIVE_TOLERANCE,
    compute_lr_decay_factor,
    compute_scheduled_lr,
    compute_warmup_factor,
)
from tula_cli.spec.scripts.script import Script, fill_script_defaults, remove_script_defaults
from tula_cli.spec.sections import (
    MIN_STAGE_SHARE,
    Dataset,
    Export,
    Loss,
    Model,
    Optimizer,
    Schedule,
    Search,
    Train,
    Transforms,
)
from tula_cli.spec.slurm_options import EXTRA_MINUTES
from tula_cli.spec.workload import UserScript, Workload
from tula_cli.words import format_count

CROSS_ENTROPIES = ("cross_entropy", "CrossEntropyLoss")
LATE_DECAY_SCHEDULE = {"kind": "linear", "decay_from": 0.7}
"""Schedule of method ramp with Adam-like optimizers, if the job gives no kind."""
LARGE_BATCH_BETA1, LARGE_BATCH_RATIO = 0.8, 8
"""First beta of method ramp with Adam-like optimizers above this many reference batches, if none is given."""
DEFAULT_BETA2 = 0.999
"""Second beta of Adam-like optimizers if the job gives no betas."""
SectionType = TypeVar("SectionType", bound=Section)


class Baseline(Section):
    """Today's configuration, with which `tula recommend` and `tula train` compare the chosen one."""

    nodes: Nodes | None = None  # Number of nodes; null: the fewest of search.nodes
    batch: Positive | None = None  # Global batch; null: train.reference_batch, or for a script script.reference.batch


class JobSpec(Section):
    """A job. It needs model, dataset, optimizer.lr and train.epochs, or a script; all other sections are optional."""

    # Name of the job. Its runs are in tula-runs/<name>-<signature>, or with node types in tula-runs/<name>-<node
    # type>-<signature>.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = "job"
    # A training script that runs unchanged. It replaces the sections from model to schedule.
    script: Script | None = None
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
    baseline: Baseline = Baseline()
    # Price of the nodes; without this section, costs are in node-hours
    pricing: Pricing = UNPRICED_PRICING
    # Types of nodes by name. tula measures each type separately, and tula recommend chooses among all.
    node_types: dict[TypeName, NodeType] = {}
    export: list[Export] = []  # Trackers that receive results while a command waits for jobs; see also tula export
    _is_supplement_with_fewer_gpus: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _convert_old_keys_and_fill_script_defaults(cls, content: Any) -> Any:
        content = replace_old_keys(content)
        if path := find_null_character(content):
            raise ValueError(
                f"{path} contains a null character, which paths, variables and arguments cannot contain; remove it"
            )
        if not isinstance(content, Mapping) or content.get("script") is None:
            return content
        return fill_script_defaults(content)

    @model_serializer(mode="wrap")
    def _serialize_job(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        if not self.export:  # for the same signature as in earlier versions without the section
            content.pop("export", None)
        if self.baseline == Baseline():
            content.pop("baseline", None)
        if self.script is not None:
            return remove_script_defaults(content)
        content.pop("script", None)
        return content

    @property
    def workload(self) -> Workload:
        """The model in tula's loop, or the user's script: the object with all that differs between both."""
        sections = (self.model, self.dataset, self.optimizer, self.schedule, self.train)
        return Workload(*sections) if self.script is None else UserScript(*sections, self.script)

    def get_script(self) -> Script:
        """Return the script of a job that has one."""
        assert self.script is not None, "a job of tula's own loop"
        return self.script

    @property
    def max_ranks(self) -> int:
        """Ranks of the search's largest configuration."""
        return max(self.search.nodes) * self.cluster.gpus_per_node

    @property
    def effective_ags(self) -> ResolvedAgs | None:
        """Section `ags` with every field filled; None if the method does not scale gradients."""
        return self.ags.fill_from_preset() if self.train.training_method.scales_gradients else None

    @property
    def requested_small_batch(self) -> int:
        """Samples of AGS's small batch (`ags.b_small`); a training with a smaller batch uses fewer."""
        return self.train.reference_batch if self.ags.b_small == "auto" else self.ags.b_small

    def compute_measuring_minutes(self) -> float:
        """Return the time limit of a measuring job in minutes.

        In a queue this is the time that the job requests, and that its user may be charged for.
        """
        max_minutes = self.search.max_minutes
        return math.ceil(max_minutes) + EXTRA_MINUTES if self.cluster.backend.has_queue else max_minutes

    @model_validator(mode="after")
    def _check_settings_reach_script(self) -> "JobSpec":
        if self.script is None:
            return self
        rule = self.train.training_method.choose_lr_rule(self.train.lr_scaling, is_adaptive=False)
        if rule != "none" and not self.script.placeholders & {"lr", "lr_factor"}:
            raise ValueError(
                f"train.method: {self.train.method} scales the learning rate ({rule}), but script.command has neither {{lr}} nor {{lr_factor}}; add one of the two, or set train.method: lbt if the script itself scales the learning rate"
            )
        if isinstance(self.ags.parameters, tuple):
            raise ValueError(
                "ags.parameters: patterns apply only to tula's own training loop; remove the key, and pass only the parameters to scale to tula_hooks.wrap in the script"
            )
        return self

    @model_validator(mode="after")
    def _check_sections_have_method(self) -> "JobSpec":
        """Reject the section of a method if the job names none, because the default method would ignore it."""
        given = {"ags", "auto"} & self.model_fields_set
        if "method" not in self.train.model_fields_set and given:
            name = min(given)
            raise ValueError(
                f"section {name} has no effect with train.method: {self.train.method}, the default. Set train.method: {name},"
                " or remove the section"
            )
        return self

    @model_validator(mode="after")
    def _check_tuning(self) -> "JobSpec":
        if not self.train.training_method.is_self_tuning:
            return self
        if self.train.epochs <= BRANCHING_EPOCH:
            raise ValueError(
                f"train.method: auto compares settings after epoch {BRANCHING_EPOCH}, but train.epochs is {self.train.epochs}; set train.epochs to {BRANCHING_EPOCH + 1} or more"
            )
        if self.train.lr_scaling in ("linear", "sqrt"):
            raise ValueError(
                f"train.lr_scaling: {self.train.lr_scaling} has no effect with train.method: auto, which tries several learning rates itself; remove train.lr_scaling"
            )
        return self

    @model_validator(mode="after")
    def _set_update_scaling_by_default(self) -> "JobSpec":
        """Scale updates by default if the optimizer divides by the gradient's magnitude, cancelling its factors."""
        is_unset = self.ags.apply_to is None
        if is_unset and self.optimizer.name in NORMALISING_OPTIMIZERS and self.effective_ags is not None:
            object.__setattr__(self, "ags", self.ags.model_copy(update={"apply_to": "update"}))  # the model is frozen
        return self

    @model_validator(mode="after")
    def _convert_ags_for_sharded_model(self) -> "JobSpec":
        """Use one factor per tensor if the model is sharded; reject settings that need the whole model."""
        if (ags := adapt_to_sharded_model(self.ags, self.train)) != self.ags:
            object.__setattr__(self, "ags", ags)  # the model is frozen
        return self

    @model_validator(mode="after")
    def _set_method_defaults(self) -> "JobSpec":
        """Apply the schedule and clipping defaults of the method.

        The fields still count as unset, so that another method can apply its own defaults.
        """
        if self.train.stages == "decay":
            return self
        if has_adam_defaults(self) and "kind" not in self.schedule.model_fields_set:
            # The model is frozen.
            object.__setattr__(self, "schedule", _set_defaults(self.schedule, LATE_DECAY_SCHEDULE))
        is_clipped = self.loss.name in CROSS_ENTROPIES and "max_grad_norm" not in self.train.model_fields_set
        if is_clipped and (norm := self.train.training_method.get_max_grad_norm(self.optimizer.name)) is not None:
            object.__setattr__(self, "train", _set_defaults(self.train, {"max_grad_norm": norm}))
        return self

    @model_validator(mode="after")
    def _check_schedule_fits_method(self) -> "JobSpec":
        if why := self.train.training_method.describe_schedule_conflict(self.schedule.kind):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _check_ramp_by_decay(self) -> "JobSpec":
        if self.train.stages != "decay":
            return self
        kind = self.schedule.kind
        if is_import_string(kind):
            raise ValueError(
                f"train.ramp: decay needs a built-in schedule, because tula does not know where schedule.kind: {kind} halves the learning rate. Set the stages, for example train.ramp: [{{epochs: 30, batch: 128}}, {{epochs: 10, batch: 256}}], and"
                f" train.lr_scaling: {self.train.training_method.choose_rule_of_decay(self.optimizer.name)}"
            )
        if compute_max_decay_growth(self) < 2:
            fault = (
                "never halves it"
                if kind == "constant"
                else f"does not halve it within {self.workload.describe_length()}"
            )
            raise ValueError(
                f"train.ramp: decay doubles the batch each time the schedule halves the learning rate, but schedule.kind: {kind}"
                f" {fault}; set schedule.kind to cosine, linear, one-cycle or multistep, with a final learning rate below half,"
                " or set train.ramp: auto"
            )
        return self

    @model_validator(mode="after")
    def _check_searched_gpus(self) -> "JobSpec":
        available, searched = self.cluster.gpus_per_node, self.search.gpus_per_node or []
        if not self.node_types and max(searched, default=0) > available:
            raise ValueError(
                f"search.gpus_per_node: contains {max(searched)}, but a node has {format_count(available, 'GPU')} (cluster.gpus_per_node); remove it, or raise cluster.gpus_per_node"
            )
        return self

    @model_validator(mode="after")
    def _check_node_types(self) -> "JobSpec":
        problems: list[InitErrorDetails] = []
        currencies: dict[str, str] = {}
        for name in self.node_types:
            try:
                currencies[name] = self.select_node_type(name).pricing.currency
            except ValidationError as error:
                problems += [_add_path_prefix(item, "node_types", name) for item in error.errors()]
        if problems:
            raise ValidationError.from_exception_data("JobSpec", problems)
        if len(set(currencies.values())) > 1:
            priced = ", ".join(f"{name} in {currency}" for name, currency in currencies.items())
            raise ValueError(f"node_types: all node types must have the same pricing.currency, got {priced}")
        names = [name for each in self.node_types for name in self._name_hardware_types(each)]
        if len(set(names)) < len(names):
            raise ValueError(
                f"node_types: the names formed with search.gpus_per_node are not unique: {', '.join(names)}; rename a node type"
            )
        return self

    @property
    def is_supplement_with_fewer_gpus(self) -> bool:
        """Whether this job supplements one with more GPUs per node, and is therefore measured with few probes."""
        return self._is_supplement_with_fewer_gpus

    @property
    def starts_one_task_per_node(self) -> bool:
        """Whether the scheduler starts one process per node, which starts the ranks, instead of one process per GPU."""
        slurm = self.cluster.slurm
        by_command = self.script is not None and self.script.launch == "node"
        return by_command or (slurm is not None and slurm.launcher == "torchrun")

    @property
    def types(self) -> tuple[str, ...]:
        """Names of the configurations of hardware that are measured separately: each node type with each number of GPUs.

        Empty if the job has neither node types nor searched GPU counts.
        """
        return tuple(self.hardware_by_type)

    @property
    def hardware_by_type(self) -> dict[str, tuple[str | None, int | None]]:
        """Node type (None: the job's nodes) and number of GPUs used per node (None: all) of each of `types`."""
        return {
            name: kind for each in self.node_types or (None,) for name, kind in self._name_hardware_types(each).items()
        }

    def _name_hardware_types(self, node_type: str | None) -> dict[str, tuple[str | None, int | None]]:
        search = {} if node_type is None else self.node_types[node_type].search
        counts = search.get("gpus_per_node", self.search.gpus_per_node)
        if not counts:
            return {} if node_type is None else {node_type: (node_type, None)}
        return {"-".join(filter(None, (node_type, f"gpus-{count}"))): (node_type, count) for count in counts}

    def split_by_type(self) -> dict[str | None, "JobSpec"]:
        """Return the job on each of `types`; the job itself under None if it has no types."""
        return {name: self.select_type(name) for name in self.types} or {None: self}

    def select_type(self, name: str) -> "JobSpec":
        """Return the job on one of `types`, without the others, under another name.

        With fewer GPUs than the most searched, only two batches on the fewest nodes are measured. This suffices
        together with the measurements of the most GPUs (benchmarks/replay/replay_sizes.py).

        Raises:
            ValidationError: the settings of the type are invalid in this job.
        """
        node_type, count = self.hardware_by_type[name]
        spec_of_type = self if node_type is None else self.select_node_type(node_type)
        variant_name = f"{self.name}-{name}"
        if count is None:
            return spec_of_type.model_copy(update={"name": variant_name})
        search = spec_of_type.search.model_dump(mode="json", exclude_unset=True, exclude={"gpus_per_node"})
        fewer = count < max(spec_of_type.search.gpus_per_node or ()) and spec_of_type.search.strategy != "full"
        if fewer:
            search["strategy"] = "sweep"
        base = spec_of_type.model_dump(mode="json", exclude_unset=True)
        cluster = {**base.get("cluster", {}), "gpus_per_node": count}
        job = JobSpec.model_validate({**base, "name": variant_name, "cluster": cluster, "search": search})
        return job.with_fewer_gpus(fewer)

    def select_node_type(self, name: str) -> "JobSpec":
        """Return the job on one of `node_types`."""
        # Stored specs contain empty sections, which override nothing.
        settings = {key: value for key, value in self.node_types[name].model_dump(exclude_unset=True).items() if value}
        base = self.model_dump(mode="json", exclude_unset=True, exclude={"node_types"})
        if self.pricing == UNPRICED_PRICING:  # the defaults must not be mixed with the type's price
            base.pop("pricing", None)
        merge_mappings(base, settings)
        return JobSpec.model_validate(base)

    def without_slurm_billing(self) -> "JobSpec":
        """Return the job without the billing that SLURM reported, so that it is requested again."""
        return self.model_copy(update={"pricing": self.pricing.model_copy(update={"slurm_billing": None})})

    def with_fewer_gpus(self, fewer: bool) -> "JobSpec":
        """Return the job with `is_supplement_with_fewer_gpus` set, which is no key of the job file."""
        job = self.model_copy()
        job._is_supplement_with_fewer_gpus = fewer
        return job


def _set_defaults(section: SectionType, defaults: Mapping[str, Any]) -> SectionType:
    """Return a section with other default values, which do not count as set by the job."""
    return type(section).model_construct(section.model_fields_set, **{**dict(section), **defaults})


def _add_path_prefix(item: Any, *path: str) -> InitErrorDetails:
    """Return a pydantic error of a section with its path in the whole job."""
    why = item["msg"].removeprefix("Value error, ")
    kind = PydanticCustomError("value_error", "{why}", {**item.get("ctx", {}), "why": why})
    problem_kind = kind if item["type"] == "value_error" else item["type"]
    return InitErrorDetails(type=problem_kind, loc=(*path, *item["loc"]), input=item["input"], ctx=item.get("ctx", {}))


def compute_reference_lr(spec: JobSpec, epoch: float) -> float:
    """Return the learning rate at the reference batch after `epoch` epochs, for a schedule that is not user-defined."""
    warmup = spec.workload.warmup_epochs
    base = spec.optimizer.lr * (compute_warmup_factor(epoch, warmup) if epoch < warmup else 1.0)
    return compute_scheduled_lr(spec.schedule, base, epoch=epoch, warmup=warmup, epochs=spec.train.epochs)


def compute_max_decay_growth(spec: JobSpec) -> float:
    """Return the largest factor by which `train.ramp: decay` multiplies the reference batch.

    The learning rate must have fallen by this factor while `MIN_STAGE_SHARE` of the training remains for a stage.
    """
    epochs, warmup, lr = spec.train.epochs, spec.workload.warmup_epochs, spec.optimizer.lr
    last = spec.train.max_epochs - MIN_STAGE_SHARE * epochs
    share = compute_lr_decay_factor(spec.schedule, lr, epoch=last, warmup=warmup, epochs=epochs)
    return (1 + RELATIVE_TOLERANCE) / share if share > 0 else math.inf


def compute_lr_scale(spec: JobSpec, batch: int) -> float:
    """Return the factor of the learning rate at a global batch: the ratio to the reference batch or its root, limited.

    AGS factors come in addition; they are not known beforehand.
    """
    scale, limit = _compute_unlimited_lr_scale(spec, batch), choose_max_lr_factor(spec)
    return scale if limit is None else min(scale, limit)


def _compute_unlimited_lr_scale(spec: JobSpec, batch: int) -> float:
    ratio = batch / spec.train.reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[_choose_lr_rule(spec)]


def choose_max_lr_factor(spec: JobSpec) -> float | None:
    """Return the limit of `compute_lr_scale`: as given, else the method's, doubled for cross-entropy; None: no limit.

    The gradient of a cross-entropy is bounded however wrong the output is; a single large row of a regression may
    cause a step so long that the training diverges.
    """
    given, by_method = spec.train.max_lr_factor, spec.train.training_method.max_lr_factor
    if given != "auto":
        return given
    is_decay = spec.train.stages == "decay"  # its learning rate never exceeds optimizer.lr
    if by_method is None or is_decay:
        return None
    return 2 * by_method if spec.loss.name in CROSS_ENTROPIES else by_method


def find_effective_lr_limit(spec: JobSpec, batch: int) -> float | None:
    """Return `choose_max_lr_factor` if it lowers the learning rate at a global batch, else None.

    For method auto this is the limit of its ramp arms.
    """
    if spec.train.training_method.is_self_tuning:
        ramp = spec.train.model_copy(update={"method": "ramp", "lr_scaling": "auto"})
        spec = spec.model_copy(update={"train": ramp})
    return (
        choose_max_lr_factor(spec) if compute_lr_scale(spec, batch) < _compute_unlimited_lr_scale(spec, batch) else None
    )


def _choose_lr_rule(spec: JobSpec) -> LrRule:
    """Return the scaling rule of the learning rate: as set in the job, else that of the method.

    By default `train.ramp: decay` has a rule of the optimizer. Methods ramp and ortho scale by the root if the optimizer
    divides by the gradient's magnitude, or is unknown because it is a script's (Malladi et al. 2022).
    """
    if spec.train.stages == "decay" and spec.train.lr_scaling == "auto":
        return spec.train.training_method.choose_rule_of_decay(spec.optimizer.name)
    name = spec.workload.optimizer_name
    is_adaptive = name is None or name in NORMALISING_OPTIMIZERS
    return spec.train.training_method.choose_lr_rule(spec.train.lr_scaling, is_adaptive=is_adaptive)


def has_adam_defaults(spec: JobSpec) -> bool:
    """Return whether the job's method applies a late decay and a lower beta1 by default."""
    return spec.train.training_method.decays_late(spec.optimizer.name) and spec.train.stages != "decay"


def get_default_beta1(spec: JobSpec, batch: int) -> float | None:
    """Return the method's default of the first beta at a global batch; None if the optimizer's own value applies."""
    is_large = batch > LARGE_BATCH_RATIO * spec.train.reference_batch
    has_default = has_adam_defaults(spec) and "betas" not in spec.optimizer.args
    return LARGE_BATCH_BETA1 if is_large and has_default else None


def set_beta1(optimizer: Optimizer, beta1: float) -> Optimizer:
    """Return an optimizer section with another first beta; the second beta is unchanged."""
    second = optimizer.args.get("betas", (None, DEFAULT_BETA2))[1]
    return optimizer.model_copy(update={"args": {**optimizer.args, "betas": [beta1, second]}})


def get_beta2_half_life(spec: JobSpec) -> float | Literal["auto"] | None:
    """Return `optimizer.beta2_half_life`; methods ramp and ortho by default keep that of the reference batch."""
    given = spec.optimizer.beta2_half_life
    keeps_half_life = spec.train.training_method.keeps_beta2_half_life(spec.optimizer.name)
    return "auto" if given is None and keeps_half_life else given


def compute_beta2(spec: JobSpec, beta2: float, batch: int) -> float:
    """Return the decay factor (beta2) of Adam's second moment at a global batch.

    With `optimizer.beta2_half_life` in samples it is 0.5^(batch / samples). With `auto` the half-life in samples is
    that at the reference batch: beta2^(batch / reference) (Marek et al. 2025, arXiv 2507.07101).

    Args:
        beta2: value of the optimizer, by default or by its arguments.
    """
    half_life = get_beta2_half_life(spec)
    if half_life is None:
        return beta2
    base, steps = (beta2, batch / spec.train.reference_batch) if half_life == "auto" else (0.5, batch / half_life)
    return math.pow(base, steps)


def describe_method_conflict(spec: JobSpec) -> str:
    """Return why the job's method does not fit its optimizer.

    Empty if the method fits, or if this is unknown until the optimizer is loaded.
    """
    name = spec.optimizer.name
    divides = name in NORMALISING_OPTIMIZERS and spec.ags.fill_from_preset().apply_to == "gradient"
    if misfit := spec.train.training_method.describe_optimizer_conflict(name, divides_gradients=divides):
        return misfit
    if spec.optimizer.beta2_half_life is not None and ":" not in name and name not in OPTIMIZERS_WITH_BETA2:
        return f"keeps optimizer.name: {name}, which has no beta2, so optimizer.beta2_half_life has no effect; set optimizer.name: AdamW, or remove optimizer.beta2_half_life"
    return ""


def describe_training_method(spec: JobSpec) -> str:
    """Describe the method of a job in one line, with the reason if it is the default."""
    method, workload = spec.train.training_method, spec.workload
    return method.describe(workload.optimizer_name, workload.default_method_reason, _describe_settings(spec))


def _describe_settings(spec: JobSpec) -> str:
    """Describe the schedule, beta1 and clipping that the job's method sets by default; empty if it sets none."""
    method, name, schedule = spec.train.training_method, spec.optimizer.name, spec.schedule
    if spec.train.stages == "decay":
        return "With train.ramp: decay, the batch doubles each time the schedule halves the learning rate"
    if has_adam_defaults(spec):
        large_batch = LARGE_BATCH_RATIO * spec.train.reference_batch
        decay_text = f", decreasing after {schedule.decay_from:g} of the epochs" if schedule.decay_from else ""
        beta1 = "is that of optimizer.args.betas"
        if get_default_beta1(spec, large_batch + 1) is not None:
            beta1 = f"is {LARGE_BATCH_BETA1:g} at batches above {large_batch} unless optimizer.args.betas is set"
        return f"With {name}, the learning-rate schedule is {schedule.kind}{decay_text}, and beta1 {beta1}"
    if method.get_max_grad_norm(name) is None or spec.train.max_grad_norm is None:
        return ""
    return f"Gradients are clipped to norm {spec.train.max_grad_norm:g} (train.max_grad_norm)"
