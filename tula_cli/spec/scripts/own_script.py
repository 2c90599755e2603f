"""The section of a spec that has a script of the user's own in place of model, dataset, loss, optimizer and schedule."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from tula_cli.spec.kinds import Line, Positive, PositiveFloat, Section, shell_words
from tula_cli.spec.scripts.placeholders import BATCHES, FOR_A_SHELL, IN_A_FILE, OF_A_RANK, names, of_a_shell


def _known(text: str) -> str:
    names(text)
    return text


def _without_shell(text: str) -> str:
    if word := of_a_shell(text):
        raise ValueError(f"{word!r} {FOR_A_SHELL}: {IN_A_FILE}")
    return text


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"{text!r} must have one group, around the number, for example 'top1 ([0-9.]+)'; it has {groups}"
        )
    return text


def _way_to_ask(text: str) -> str:
    if text in ("none", "hooks", "SIGUSR1", "SIGUSR2", "SIGTERM") or re.fullmatch(r"file:.+", text):
        return _known(text)
    raise ValueError(f"{text!r} is no way to ask for a checkpoint: none, hooks, SIGUSR1, SIGUSR2, SIGTERM or file:PATH")


Filled = Annotated[Line, AfterValidator(_known)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Length(Section):
    """How long the script trains. Exactly one of the three."""

    epochs: Positive | None = None  # over dataset_size samples each
    samples: Positive | None = None  # in all
    steps: Positive | None = None  # at reference.batch: another batch takes as many samples

    @model_validator(mode="after")
    def _is_one(self) -> "Length":
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise ValueError(f"give one of epochs, samples and steps, not {' and '.join(given) or 'none of them'}")
        return self


class Reference(Section):
    """The batch and the learning rate that the script was tuned for."""

    batch: Positive  # global
    lr: PositiveFloat | None = None  # left out where the command has no {lr}


class Resume(Section):
    """How the script goes on from a checkpoint of its own."""

    args: Filled = ""  # appended where there is a checkpoint, for example --resume {checkpoint}
    checkpoint: Filled  # its path, or a pattern with *, of which the newest is taken: {out}/checkpoint*.pth
    # with which batch it may go on: the same, another from an epoch's end on, any; rehearse: as a rehearsal finds
    batch: Literal["rehearse", "same", "epoch", "any"] = "rehearse"
    checkpoint_interval: Literal["epoch"] | Positive | None = (
        None  # how often it saves (epoch, or so many steps), while no training has shown it
    )


class Rows(Section):
    """A metric in a file of one JSON object a line."""

    jsonl: Filled  # the file
    key: str  # of the number in each line


class ProbeScript(Section):
    """Settings that differ while the script is measured, not trained."""

    args: Filled = ""  # appended, for example --epochs 1
    stop: Literal["exit", "raise"] = "exit"  # raise: SystemExit in the loop, which runs what the script does at its end
    environment: dict[str, str] = {"WANDB_MODE": "disabled"}  # what a probe must not publish


class Script(Section):
    """A training script as it is: its command line, and what tula cannot see from inside."""

    command: Annotated[
        str, AfterValidator(shell_words), AfterValidator(_known), AfterValidator(_without_shell)
    ]  # with placeholders, for example train.py -b {local_batch} --lr {lr}
    # rank: tula starts a process a GPU with RANK, WORLD_SIZE ...; node: one a node, which starts its ranks itself
    launch: Literal["rank", "node"] = "rank"
    code: Literal["snapshot", "none"] = "snapshot"  # none: what runs is what the files are by then
    length: Length
    dataset_size: Literal["auto"] | Positive = "auto"  # samples of an epoch; auto: as the loader says
    reference: Reference
    resume: Resume | None = None  # without it a training that is interrupted begins anew
    save: Annotated[str, AfterValidator(_way_to_ask)] = "none"  # how it is asked to save before it has to leave
    metric: dict[
        str, Pattern | Rows
    ] = {}  # name: a pattern on what it prints, or {jsonl: file, key: name}; the last one
    probe: ProbeScript = ProbeScript()

    @property
    def known_dataset_size(self) -> int | None:
        """Samples of an epoch as given; where the length needs none, those of the whole training. None: not known yet."""
        if self.dataset_size != "auto":
            return self.dataset_size
        if self.length.epochs is not None:
            return None
        return self.length.samples or (self.length.steps or 0) * self.reference.batch

    @property
    def placeholders(self) -> frozenset[str]:
        """The placeholders of all that may be on its command line."""
        parts = (self.command, self.resume.args if self.resume else "", self.probe.args)
        return frozenset(name for part in parts for name in names(part))

    @property
    def accumulates(self) -> bool:
        """Whether its command can be told to take a batch in more and smaller micro-batches."""
        found = set(names(self.command))
        return "micro_batch" in found and bool(found & {"accumulate", "accumulate_total"})

    @model_validator(mode="after")
    def _has_a_batch(self) -> "Script":
        found = set(names(self.command))
        if not found & BATCHES:
            raise ValueError(
                "command has no batch that tula could choose; write {local_batch} (a GPU's), {batch} (all GPUs') or"
                " {micro_batch} in place of its number"
            )
        if "micro_batch" in found and not found & {"accumulate", "accumulate_total"}:
            raise ValueError(
                "command has {micro_batch} but neither {accumulate} nor {accumulate_total}: with several micro-batches a step"
                " it would train on too few samples; write {local_batch}, or tell it how many there are"
            )
        return self

    @model_validator(mode="after")
    def _is_told_what_it_asks(self) -> "Script":
        found = self.placeholders
        if self.launch == "node" and (of_rank := sorted(found & OF_A_RANK)):
            raise ValueError(
                f"{{{of_rank[0]}}} differs among the processes of a node, which launch: node leaves to the command to start"
            )
        for name, value in (("lr", self.reference.lr), ("epochs", self.length.epochs)):
            if name in found and value is None:
                where = "reference.lr" if name == "lr" else "length.epochs"
                raise ValueError(f"command asks for {{{name}}}, which {where} gives")
        if self.reference.lr is not None and not found & {"lr", "lr_factor"}:
            raise ValueError(
                "reference.lr reaches nothing: command has neither {lr} nor {lr_factor}; leave it out where the script scales"
                " its learning rate itself"
            )
        for name in ("steps", "samples"):
            if name in found and self.known_dataset_size is None:
                raise ValueError(f"command asks for {{{name}}}: with length.epochs, give dataset_size")
        if "checkpoint" in names(self.command):
            raise ValueError("{checkpoint} belongs into resume.args: at the start there is none")
        return self
