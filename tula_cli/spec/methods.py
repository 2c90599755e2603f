"""Facts about training methods, one entry per method, without torch or pydantic; their code is in `worker/methods`.

A user-defined method is named by an import string and not imported here: it has the facts of the plain large batch.
Facts that other methods have here are set in its job (`train.lr_scaling`, `schedule.warmup_epochs`) or by its object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

DEFAULT_METHOD = "ramp"
REASON = "tula's loop can change the batch while it trains"
"""Why `DEFAULT_METHOD` is the default of tula's loop; for scripts see `spec.scripts.script.get_default_train`."""


@dataclass(frozen=True)
class Facts:
    """Properties of a training method that are known before anything is built."""

    file: str = "plain"  # of worker/methods, where its object METHOD is
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # of the learning rate, in batch / reference_batch
    max_lr_factor: float | None = None  # of train.max_lr_factor: auto; None: no limit
    max_grad_norm: float | None = None  # with a cross-entropy and SGD, where the spec gives none
    late_decay: bool = False  # of the learning rate of Adam and its like, where the spec gives no schedule
    refuses_lr_scaling: Mapping[str, str] = field(default_factory=dict)  # value of train.lr_scaling -> why
    warmup_epochs: float = 0.0  # at most, where the spec gives none
    replaces: tuple[str, ...] = ()  # optimizers whose place it takes, and whose settings it takes over; empty: none
    needs_sgd: bool = False
    orthogonalises: bool = (
        False  # the updates of matrices; Adam's learning rate and beta2 follow the batch as Adam needs it
    )
    constant_schedule: bool = False  # a learning rate that falls is refused
    reads_ags: bool = False  # the section ags means something to it
    scales: bool = False  # multiplies gradients, or updates, by factors
    refreshes: bool = False  # compares the gradients of two batches now and then
    is_arm: bool = False  # of a self-tuning training
    ramps: bool = False  # its batch grows over the first epochs where train.ramp says nothing else
    tunes: bool = False  # trains as its arms do (worker/train/auto_tune.py)
    on_one_gpu: str = ""  # why it cannot be judged there
    on_scripts: bool = False  # acts on a script of the user's own, from its command line or around its optimizer
    on_shares: bool = False  # trains a model that is divided among the ranks (train.parallel: fsdp)
    summary: str = "a method of your own"  # what it does to the large batch, and its cost, without results
    probes_overestimate: bool = False  # on several GPUs its later steps take less than those that probes measure

    @property
    def section(self) -> str:
        """Name of the job section specific to the method; empty if there is none."""
        return "auto" if self.tunes else "ags" if self.reads_ags else ""


METHODS: dict[str, Facts] = {
    "ags": Facts(
        "scaling",
        reads_ags=True,
        scales=True,
        refreshes=True,
        is_arm=True,
        on_scripts=True,
        on_shares=True,
        summary="gradients times factors from a comparison with a small batch, whose pass and factors cost time and memory",
    ),
    "lbt": Facts(
        is_arm=True,
        on_scripts=True,
        on_shares=True,
        summary="the large batch as it is; costs nothing",
    ),
    "lrs": Facts(
        on_scripts=True,
        on_shares=True,
        lr_scaling="linear",
        warmup_epochs=5.0,
        refuses_lr_scaling={
            "none": "method lrs is the scaling of the learning rate; with lr_scaling: none use method lbt"
        },
        summary="the large batch with a scaled learning rate; costs nothing",
    ),
    "lars": Facts(
        "lars",
        lr_scaling="linear",
        warmup_epochs=5.0,
        replaces=("SGD",),
        summary="the step of every tensor is in proportion to its norm",
    ),
    "lamb": Facts(
        "lamb",
        lr_scaling="sqrt",
        warmup_epochs=5.0,
        replaces=("Adam", "AdamW"),
        summary="the step of every tensor is in proportion to its norm",
    ),
    "polo": Facts(
        "polo",
        warmup_epochs=5.0,
        on_one_gpu="on one GPU, polo is plain SGD with a warm-up: there are no replicas to average",
        probes_overestimate=True,
        summary="every GPU trains by itself and weights are averaged now and then; saves synchronisation",
    ),
    "adascale": Facts(
        "adascale",
        needs_sgd=True,
        refuses_lr_scaling=dict.fromkeys(
            ("linear", "sqrt"),
            "method adascale multiplies the learning rate by its own gain, lr_scaling would scale it twice; leave"
            " lr_scaling out",
        ),
        summary="the learning rate times a gain that the noise of the gradients allows",
    ),
    "static": Facts(
        "static",
        reads_ags=True,
        scales=True,
        is_arm=True,
        summary="gradients times one constant factor",
    ),
    "ortho": Facts(
        "ortho",
        lr_scaling="linear",
        warmup_epochs=5.0,
        orthogonalises=True,
        is_arm=True,
        on_scripts=True,
        on_shares=True,
        summary="orthogonalised steps; costs products of matrices in every step",
    ),
    "ramp": Facts(
        "ramp",
        lr_scaling="linear",
        max_lr_factor=8.0,
        max_grad_norm=1.0,
        late_decay=True,
        orthogonalises=True,
        is_arm=True,
        ramps=True,
        on_shares=True,
        summary="batch and learning rate grow over the first epochs, with orthogonalised steps; costs smaller steps at first",
    ),
    "schedule_free": Facts(
        "schedule_free",
        warmup_epochs=5.0,
        replaces=("SGD", "AdamW"),
        constant_schedule=True,
        summary="averaged weights in place of a learning rate that falls",
    ),
    "auto": Facts(
        reads_ags=True,
        refreshes=True,
        tunes=True,
        max_grad_norm=1.0,
        summary="takes the ramp unless short branches show that it breaks down; costs a quarter of the training's samples more",
    ),
}
"""Learning rates scale linearly with a warm-up, as in the paper, IV-D; LAMB's with the root (You et al. 2020)."""


def describe_method(method: str, optimizer: str | None, default: str = "", settings: str = "") -> str:
    """Describe a job's method in one line: why it is the default, its effect, and advice for the optimizer's family.

    Args:
        method: value of train.method.
        optimizer: value of optimizer.name; None for a script, whose optimizer is unknown.
        default: why the method is the default; empty if the method is not the default.
        settings: other settings that the method makes in the job, shown in place of the advice; empty if none.
    """
    reason = f", the default because {default}" if default else ""
    advice = settings or _advise(method, optimizer)
    return f"method {method}{reason}: {get_facts(method).summary}{f'. {advice} (docs/how-to/choose-a-method.md)' if advice else ''}"


def _advise(method: str, optimizer: str | None) -> str:
    facts = get_facts(method)
    if optimizer is None:
        return "" if facts.orthogonalises else "If its optimizer is AdamW or Adam, compare train.method: ortho"
    if optimizer == "Muon":
        return "Muon orthogonalises its steps by itself" if facts.ramps else "Compare train.method: ramp"
    if not (facts.ramps or facts.tunes):
        orthogonalised = (
            f"With {optimizer} orthogonalised steps matter most: compare" if "Adam" in optimizer else "Compare"
        )
        return f"{orthogonalised} train.method: ramp"
    if "Adam" in optimizer:
        return (
            f"With {optimizer} and few steps also compare schedule: {{kind: linear, decay_from: 0.7}} with beta1 0.8, the first"
            " of optimizer.args.betas"
        )
    return ""


def get_facts(method: str) -> Facts:
    """Return the facts of a method; default facts for a user-defined method, which is an import string."""
    return METHODS[method] if method in METHODS else Facts(method, reads_ags=True)


ARMS = tuple(name for name, facts in METHODS.items() if facts.is_arm)

if TYPE_CHECKING:
    ArmMethod = str
else:
    ArmMethod = Literal[ARMS]
