"""Training methods as facts, a row each: no torch, no pydantic. What a method does is an object of `worker/methods`.

One of the user's own is named by an import string, and nothing of it is imported here: it has the facts of the plain large
batch. What others have in their row is in its job (`train.lr_scaling`, `schedule.warmup_epochs`), or said by its object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

NOT_JUDGED = "no table of tula's own judges it yet; tula compare tells what it is worth for this job"


@dataclass(frozen=True)
class Facts:
    """What is known of a method before anything is built."""

    file: str = "plain"  # of worker/methods, where its object METHOD is
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # of the learning rate, in batch / reference_batch
    max_lr_factor: float | None = None  # of train.max_lr_factor: auto; None: no limit
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
    tunes: bool = False  # trains as its arms do (worker/train/self_tuning.py)
    on_one_gpu: str = ""  # why it cannot be judged there
    on_scripts: bool = False  # acts on a script of the user's own, from its command line or around its optimizer
    on_shares: bool = False  # trains a model that is divided among the ranks (train.parallel: fsdp)
    measured_as: str = ""  # what its probes take for more than it is, on several GPUs
    worth: str = NOT_JUDGED  # what it was found to be worth (docs/accuracy.md has the tables), and what it costs

    @property
    def section(self) -> str:
        """The section of the job that is the method's own; empty where none is."""
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
        worth=(
            "+2.1 points over lbt on average in the reduced Table I (the paper has +8.8), 6 to 14 % of what the large batch"
            " loses; costs memory for a factor an element, and now and then the pass of a small batch"
        ),
    ),
    "lbt": Facts(
        is_arm=True,
        on_scripts=True,
        on_shares=True,
        worth="the large batch as it is lost 5 to 38 points of top-1 in the reduced Table I; costs nothing",
    ),
    "lrs": Facts(
        worth="won back -40 to 80 % of what the large batch loses in the reduced Table I, by the network; costs nothing",
        on_scripts=True,
        on_shares=True,
        lr_scaling="linear",
        warmup_epochs=5.0,
        refuses_lr_scaling={
            "none": "method lrs is the scaling of the learning rate; with lr_scaling: none use method lbt"
        },
    ),
    "lars": Facts("lars", lr_scaling="linear", warmup_epochs=5.0, replaces=("SGD",)),
    "lamb": Facts("lamb", lr_scaling="sqrt", warmup_epochs=5.0, replaces=("Adam", "AdamW")),
    "polo": Facts(
        "polo",
        warmup_epochs=5.0,
        worth="won back -26 to -3 % of what the large batch loses in the reduced Table I; saves synchronisation",
        on_one_gpu="polo on one GPU is plain SGD with a warm-up: there are no replicas to average",
        measured_as=(
            "post-local SGD (train.method polo) was measured while it synchronises every step, as it does at first; later"
            " steps take less, so that times and costs on several GPUs are upper bounds"
        ),
    ),
    "adascale": Facts(
        "adascale",
        needs_sgd=True,
        refuses_lr_scaling=dict.fromkeys(
            ("linear", "sqrt"),
            "method adascale multiplies the learning rate by its own gain, lr_scaling would scale it twice; leave"
            " lr_scaling out",
        ),
    ),
    "static": Facts("static", reads_ags=True, scales=True, is_arm=True),
    "ortho": Facts(
        "ortho",
        lr_scaling="linear",
        warmup_epochs=5.0,
        orthogonalises=True,
        is_arm=True,
        on_scripts=True,
        on_shares=True,
        worth=(
            "won back 60 to 86 % of what the large batch loses in the reduced Table I, and broke down on digits without"
            " BatchNorm; with AdamW 65 to 81 % in small transformers; a step took 1.2 to 1.9 times as long on a CPU core"
        ),
    ),
    "ramp": Facts(
        "ramp",
        lr_scaling="linear",
        max_lr_factor=8.0,
        orthogonalises=True,
        is_arm=True,
        ramps=True,
        on_shares=True,
        worth=(
            "won back 89 and 99 % of what the large batch loses in the reduced Table I, with AdamW 90 to 93 % in small"
            " transformers; costs smaller steps over the first epochs (there 230 in place of 100), orthogonalised as ortho's"
        ),
    ),
    "schedule_free": Facts("schedule_free", warmup_epochs=5.0, replaces=("SGD", "AdamW"), constant_schedule=True),
    "auto": Facts(
        reads_ags=True,
        refreshes=True,
        tunes=True,
        worth=(
            "takes the ramp unless short branches show that it breaks down, and won back 83 to 108 % of what the large batch"
            " loses in the reduced Table I; costs a quarter of the training's samples more"
        ),
    ),
}
"""Learning rates are scaled linearly and warmed up as in the paper, IV-D; LAMB's by the square root (You et al. 2020)."""


def worth(method: str) -> str:
    """Return in a line what a method was found to be worth, and what it costs."""
    return f"{method}: {facts_of(method).worth}"


def facts_of(method: str) -> Facts:
    """Return a method's row; of one of the user's own, an import string, what is taken to be so."""
    return METHODS[method] if method in METHODS else Facts(method, reads_ags=True)


ARMS = tuple(name for name, facts in METHODS.items() if facts.is_arm)

if TYPE_CHECKING:
    ArmMethod = str
else:
    ArmMethod = Literal[ARMS]
