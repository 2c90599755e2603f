"""The training methods, one object each, without torch or pydantic; the code of their steps is in `worker/methods`.

A user-defined method is named by an import string and not imported here: it has the properties of the plain large
batch. What other methods have here is set in its job (`train.lr_scaling`, `schedule.warmup_epochs`) or by its object.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

DEFAULT_METHOD = "ramp"
"""The default of tula's loop; for scripts see `spec.scripts.script.get_default_train`."""

LrRule = Literal["none", "linear", "sqrt"]
"""How the learning rate follows the batch."""
MAX_WARMUP_SHARE = 0.05
"""Maximum share of the epochs used for a warm-up that the job does not give."""
SGD_LIKE_OPTIMIZERS = ("SGD", "ASGD")
"""Optimizers whose step is proportional to the gradient."""
OPTIMIZERS_WITH_BETA2 = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam")
"""Optimizers of torch whose second beta averages squared gradients, or their largest magnitude."""


@dataclass(frozen=True)
class TrainingMethod:
    """Properties of a training method that are known without building a model.

    Job checks, models of time and memory, comparisons and the worker read them; the steps themselves are implemented in
    module `file` of `worker/methods`.
    """

    name: str
    file: str = "plain"  # module of worker/methods that names its class METHOD
    lr_scaling: LrRule = "none"  # default rule for the learning rate at batch / reference_batch
    max_lr_factor: float | None = None  # train.max_lr_factor: auto, doubled for a cross-entropy loss; None: no limit
    max_grad_norm: float | None = None  # default for a cross-entropy loss with SGD; None: no clipping
    late_decay: bool = False  # the default schedule with Adam-like optimizers decays late
    with_rule: str = ""  # name of the same method with a learning-rate rule; empty if there is no such name
    without_rule: str = ""  # name of the same method without a rule; if set, train.lr_scaling: none is an error
    warmup_epochs: float = 0.0  # default warm-up; shorter in short trainings (`limit_warmup_epochs`)
    replaced_optimizers: tuple[str, ...] = ()
    """Optimizers that it replaces, with their settings; empty: any optimizer is kept."""
    orthogonalises: bool = False
    """Orthogonalises updates of matrices; scales Adam's learning rate and beta2 for the batch."""
    constant_schedule: bool = False  # does not allow a schedule that lowers the learning rate
    section: Literal["", "ags", "auto"] = ""  # section of the job with settings of this method only
    scales_gradients: bool = False  # multiplies gradients or updates by factors
    refreshes: bool = False  # compares the gradients of two batches from time to time
    is_arm: bool = False  # can be an arm of a self-tuning training
    grows_batch: bool = False  # the batch grows over the first epochs unless train.ramp is set
    single_gpu_conflict: str = ""  # why it cannot be evaluated on one GPU; empty if it can
    supports_scripts: bool = False  # supports the user's script, through its command line or around its optimizer
    supports_sharding: bool = False  # supports a model that is sharded over the ranks (train.parallel: fsdp)
    default_reason: str = ""  # why it is the default of tula's loop; empty if it is not
    summary: str = "a method of your own"  # effect on the large batch, and cost, without results
    probes_overestimate: bool = False  # on several GPUs, later steps are faster than those that probes measure

    @property
    def is_self_tuning(self) -> bool:
        """Whether the method trains with those of its arms (worker/train/auto_tune.py)."""
        return self.section == "auto"

    @property
    def weights_depend_on_ranks(self) -> bool:
        """Whether trainings at equal batches on different numbers of GPUs have different weights."""
        return self.is_self_tuning or bool(self.single_gpu_conflict)

    def runs_steps_of_probes(self, diagnostics: Sequence[str]) -> bool:
        """Return whether a training with these `train.diagnostics` runs the same steps as the probes of its job."""
        records_more_norms = "gradient_norms" in diagnostics and not self.scales_gradients
        return not (self.is_self_tuning or self.probes_overestimate or records_more_norms)

    def uses_section(self, section: str) -> bool:
        """Return whether a section has an effect; ags has one on a self-tuning training too, whose arms may scale gradients."""
        return section not in ("ags", "auto") or self.section in (section, "auto")

    def choose_lr_rule(self, requested: LrRule | Literal["auto"], *, is_adaptive: bool) -> LrRule:
        """Return the scaling rule of the learning rate: as requested, else that of the method.

        Args:
            requested: value of train.lr_scaling.
            is_adaptive: whether the optimizer divides by the gradient's magnitude; orthogonalised steps then follow the
                root of the batch (Malladi et al. 2022).
        """
        if requested != "auto":
            return requested
        return "sqrt" if self.orthogonalises and is_adaptive else self.lr_scaling

    def choose_rule_of_decay(self, optimizer: str) -> LrRule:
        """Return how the learning rate follows a batch that grows as the schedule decays (`train.ramp: decay`).

        If the schedule divides the rate by a, the batch is multiplied by a, and the rate by 1/a times this rule of a.

        - SGD: "linear". A step is lr x gradient, whose noise per sample goes with lr / batch: dividing the rate by a
          equals multiplying the batch by a at the same rate (Smith et al. 2018, arXiv 1711.00489; Theorem 1 of Meterez
          et al. 2025, arXiv 2510.14717: equal for equal products of both factors).
        - Adam-like optimizers, LARS, LAMB, Muon: "sqrt". They divide by the gradient's magnitude, which falls with the
          root of the batch while it is mostly noise, so that lr / sqrt(batch) determines the result: the rate is
          divided by sqrt(a) (same paper, Algorithm 1). This is the largest rate that does not diverge there (its Lemma
          4), so unknown optimizers use it too.
        """
        return "linear" if optimizer in SGD_LIKE_OPTIMIZERS and not self.replaced_optimizers else "sqrt"

    def choose_rule_of_arm(self, requested: LrRule | Literal["auto"]) -> LrRule | Literal["auto"]:
        """Return train.lr_scaling of an arm: none, except for a ramp, whose learning rate follows the batch in use."""
        return requested if self.grows_batch else "none"

    def get_name_with_rule(self, rule: LrRule) -> str:
        """Return the name of the same method with or without a learning-rate rule."""
        return (self.without_rule if rule == "none" else self.with_rule) or self.name

    def limit_warmup_epochs(self, epochs: float) -> float:
        """Return the default warm-up: at most 5 % of the training, so that a short training is not all warm-up."""
        return min(self.warmup_epochs, MAX_WARMUP_SHARE * epochs)

    def get_max_grad_norm(self, optimizer: str) -> float | None:
        """Return the default of train.max_grad_norm for a cross-entropy loss; None: no clipping."""
        return self.max_grad_norm if optimizer in SGD_LIKE_OPTIMIZERS else None

    def keeps_beta2_half_life(self, optimizer: str) -> bool:
        """Return whether beta2 follows the batch by default, with the half-life of the reference batch in samples."""
        return self.orthogonalises and optimizer in OPTIMIZERS_WITH_BETA2

    def decays_late(self, optimizer: str) -> bool:
        """Return whether the default schedule decays late, and the first beta is lower at large batches."""
        return self.late_decay and optimizer in OPTIMIZERS_WITH_BETA2

    def list_replaced_train_keys(self, job_method: str) -> set[str]:
        """Return the keys of section train that this method does not take from a job with another method or rule.

        Other methods have their own rule of the learning rate, a name without a rule (lbt) has none, and a method
        without a ramp trains at one batch.
        """
        has_other_rule = self.name != job_method or bool(self.with_rule)
        return {*(["lr_scaling"] if has_other_rule else []), *([] if self.grows_batch else ["ramp"])}

    def describe_schedule_conflict(self, kind: str) -> str:
        """Return why schedule.kind is impossible with this method; empty if it is possible."""
        if kind == "constant" or not self.constant_schedule:
            return ""
        return f"schedule.kind: must be constant with train.method: {self.name}, which averages weights instead of decreasing the learning rate, got {kind} (a warm-up is allowed)"

    def describe_train_conflict(self, ramp: object, lr_scaling: str) -> str:
        """Return why train.ramp or train.lr_scaling is impossible with this method; empty if both are possible."""
        if lr_scaling == "none" and self.without_rule:
            return f"lr_scaling: none contradicts train.method: {self.name}, which scales the learning rate; set train.method: {self.without_rule}"
        if ramp is not None and self.is_self_tuning:
            return f"ramp: has no effect with train.method: {self.name}, which needs a constant batch; remove train.ramp, or set train.method: ramp"
        if ramp != "decay":
            return ""
        if self.scales_gradients:
            return f"ramp: decay scales the learning rate with the batch, but train.method: {self.name} already scales the gradients; set train.method to ramp, ortho, lbt or lrs"
        if self.constant_schedule:
            return f"ramp: decay raises the batch where the learning rate would decrease, but train.method: {self.name} keeps the learning rate constant; set train.ramp: auto, or another train.method"
        if lr_scaling == "none":
            return "ramp: decay scales the learning rate with the batch, but train.lr_scaling is none; remove train.lr_scaling"
        return ""

    def describe_optimizer_conflict(self, optimizer: str, *, divides_gradients: bool) -> str:
        """Return why the method does not fit an optimizer; empty if it fits, or if this is unknown until the optimizer is loaded.

        Args:
            optimizer: value of optimizer.name.
            divides_gradients: whether the optimizer would divide the method's factors out, as they apply to gradients.
        """
        if self.replaced_optimizers and optimizer not in self.replaced_optimizers:
            return f"replaces {' or '.join(self.replaced_optimizers)}, so it cannot be used with optimizer.name: {optimizer}; set optimizer.name: {self.replaced_optimizers[-1]}"
        if self.orthogonalises and not self.grows_batch and optimizer == "Muon":
            return "orthogonalises updates, but Muon already does so itself; set train.method: ramp or lbt"
        if self.scales_gradients and divides_gradients:
            return f"scales gradients, but {optimizer} normalises gradients; set ags.apply_to: update"
        return ""

    def describe(self, optimizer: str | None, default: str = "", settings: str = "") -> str:
        """Describe the method in one line: why it is the default, its effect, and advice for the optimizer's family.

        Args:
            optimizer: value of optimizer.name; None for a script, whose optimizer is unknown.
            default: why the method is the default; empty if the method is not the default.
            settings: other settings that the method makes in the job, shown in place of the advice; empty if none.
        """
        reason = f", the default because {default}" if default else ""
        advice = settings or self._make_advice(optimizer)
        return f"method {self.name}{reason}: {self.summary}{f'. {advice}' if advice else ''}"

    def _make_advice(self, optimizer: str | None) -> str:
        if optimizer is None:
            advice = "If the script uses Adam or AdamW, try train.method: ortho with tula compare"
            return "" if self.orthogonalises else advice
        if optimizer == "Muon" and self.grows_batch:
            return "Muon already orthogonalises its updates"
        if optimizer == "Muon" or not (self.grows_batch or self.is_self_tuning):
            gain = f"With {optimizer}, orthogonalised updates bring the largest gain: try"
            return f"{gain if 'Adam' in optimizer else 'Try'} train.method: ramp with tula compare"
        if "Adam" in optimizer:
            return f"With {optimizer} and few steps, also try schedule: {{kind: linear, decay_from: 0.7}} with optimizer.args.betas: [0.8, 0.999]"
        return ""


_METHODS = (
    TrainingMethod(
        "ags",
        "ags",
        section="ags",
        scales_gradients=True,
        refreshes=True,
        is_arm=True,
        supports_scripts=True,
        supports_sharding=True,
        summary="scales gradients by comparison with a small batch; costs time and memory",
    ),
    TrainingMethod(
        "lbt",
        is_arm=True,
        supports_scripts=True,
        supports_sharding=True,
        with_rule="lrs",
        summary="the large batch without changes",
    ),
    TrainingMethod(
        "lrs",
        supports_scripts=True,
        supports_sharding=True,
        lr_scaling="linear",
        without_rule="lbt",
        warmup_epochs=5.0,
        summary="the large batch with a scaled learning rate",
    ),
    TrainingMethod(
        "lars",
        "layerwise",
        lr_scaling="linear",
        warmup_epochs=5.0,
        replaced_optimizers=("SGD",),
        summary="scales the step of each tensor by the norm of the tensor",
    ),
    TrainingMethod(
        "lamb",
        "layerwise",
        lr_scaling="sqrt",
        warmup_epochs=5.0,
        replaced_optimizers=("Adam", "AdamW"),
        summary="scales the step of each tensor by the norm of the tensor",
    ),
    TrainingMethod(
        "polo",
        "polo",
        warmup_epochs=5.0,
        single_gpu_conflict="on one GPU, polo is plain SGD with a warm-up, because there are no replicas to average",
        probes_overestimate=True,
        summary="GPUs train independently and average their weights at intervals, which saves synchronisation",
    ),
    TrainingMethod(
        "static",
        "static",
        section="ags",
        scales_gradients=True,
        is_arm=True,
        summary="multiplies gradients by a constant factor",
    ),
    TrainingMethod(
        "ortho",
        "ortho",
        lr_scaling="linear",
        warmup_epochs=5.0,
        orthogonalises=True,
        is_arm=True,
        supports_scripts=True,
        supports_sharding=True,
        summary="orthogonalised updates; costs matrix products in every step",
    ),
    TrainingMethod(
        "ramp",
        "ramp",
        lr_scaling="linear",
        max_lr_factor=8.0,
        max_grad_norm=1.0,
        late_decay=True,
        orthogonalises=True,
        is_arm=True,
        grows_batch=True,
        supports_sharding=True,
        default_reason="tula's own loop can change the batch during training",
        summary="batch and learning rate grow over the first epochs, with orthogonalised updates; the small batches at the start take more time",
    ),
    TrainingMethod(
        "schedule_free",
        "schedule_free",
        warmup_epochs=5.0,
        replaced_optimizers=("SGD", "AdamW"),
        constant_schedule=True,
        summary="averages weights instead of decreasing the learning rate",
    ),
    TrainingMethod(
        "auto",
        section="auto",
        refreshes=True,
        max_grad_norm=1.0,
        summary="tries several settings in short branches, and uses ramp unless another one is clearly better; costs a quarter more samples",
    ),
)
METHODS: dict[str, TrainingMethod] = {method.name: method for method in _METHODS}
"""Learning rates scale linearly with a warm-up, as in the paper, IV-D; LAMB's with the root (You et al. 2020)."""


def get_training_method(name: str) -> TrainingMethod:
    """Return a method by its name, or a user-defined one, which is an import string and is not imported here."""
    return METHODS[name] if name in METHODS else TrainingMethod(name, name, section="ags")


ARM_METHODS = tuple(name for name, method in METHODS.items() if method.is_arm)
SCRIPT_METHODS = tuple(name for name, method in METHODS.items() if method.supports_scripts)
SHARDABLE_METHODS = tuple(name for name, method in METHODS.items() if method.supports_sharding)
SEARCHABLE_METHODS = tuple(name for name, method in METHODS.items() if method.is_arm or method.without_rule)
"""Methods whose learning rate can be searched, because a branch can train without their rule."""

if TYPE_CHECKING:
    ArmMethod = str
else:
    ArmMethod = Literal[ARM_METHODS]
