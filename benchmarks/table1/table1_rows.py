"""What the reduced table trains: its networks, the rows of each, and the order in which they are worth their time.

Rows that are no `train.method` are told to `tula compare`'s own service while the table is made (`known`): a ramp of the batch
without turned steps, one by the noise (where asked for by name), four times the weight decay, LAMB and schedule-free with the settings that they need. The same tricks
are given to the small batch (AT_REFERENCE): what a method gains there is a better optimizer, not a large batch that keeps
its accuracy.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tula_cli.services.compare import ComparePlan, Grid
from tula_cli.services.comparison import rows
from tula_cli.services.comparison.rounds import Standing
from tula_cli.services.comparison.rows import REFERENCE, Variant

DECAY = {"weight_decay": 2e-3}  # four times that of both networks
LAMB = {"name": "AdamW", "momentum": None, "lr": 0.01, "weight_decay": 0.01}
NO_WARMUP = {"warmup_epochs": 0.0}

VARIANTS: Mapping[str, Variant] = {
    "ramp-sgd": Variant("lrs", train={"ramp": "auto"}),
    "ramp-noise": Variant("ramp", train={"ramp": "noise"}),
    "ramp-decay4": Variant("ramp", optimizer=DECAY),
    "lbt-decay4": Variant("lbt", optimizer=DECAY),
    "ortho-small": Variant("ortho", schedule=NO_WARMUP),
    "ortho-small-decay4": Variant("ortho", optimizer=DECAY, schedule=NO_WARMUP),
    "lamb-adamw": Variant("lamb", optimizer=LAMB),
    "schedule-free": Variant(
        "schedule_free", lr=10.0, schedule={"kind": "constant", "milestones": []}, train={"lr_scaling": "sqrt"}
    ),
}
"""Schedule-free SGD has no momentum that multiplies its steps by ten: it has ten times the learning rate, as its authors advise, and
the square root of the batch, with which one seed at 2048 with BatchNorm reached 57.6 %, with linear scaling 49.6 %."""
AT_REFERENCE = ("ortho-small", "lbt-decay4", "ortho-small-decay4", "lamb-adamw", "schedule-free")
"""The tricks at the small batch; the first and the third are for it alone."""
OF_SMALL_BATCH = ("ortho-small", "ortho-small-decay4")
SAME_TRICKS = {
    "ortho": "ortho-small",
    "ramp": "ortho-small",
    "ramp-noise": "ortho-small",
    "lbt-decay4": "lbt-decay4",
    "ramp-decay4": "ortho-small-decay4",
    "lamb-adamw": "lamb-adamw",
    "schedule-free": "schedule-free",
}
"""Rows of a large batch, and the small batch with the same optimizer and decay."""

TABLE = [
    "lbt",
    "ramp",
    "ortho",
    "ramp-sgd",
    "lrs",
    "ags",
    "adascale",
    "lars",
    "sqrt",
    "static",
    "lamb-adamw",
    "schedule-free",
    "ramp-decay4",
    "lbt-decay4",
]
ADAMW = ["lbt", "ramp", "sqrt", "sqrt-beta2", "lamb", "ags"]


@dataclass(frozen=True)
class Case:
    """A network that is trained, beside the images' own recipes: a job, and its rows."""

    content: Mapping[str, Any]  # of the job, but for name, epochs and cluster
    batches: tuple[int, ...]
    epochs: int
    reference: int


CASES: Mapping[str, Case] = {
    "digits": Case(
        {
            "model": {"name": "small_cnn", "args": {"in_channels": 1, "width": 16}},
            "dataset": {"name": "digits"},
            "optimizer": {"name": "AdamW", "lr": 2e-3, "weight_decay": 0.01},
            "schedule": {"kind": "cosine"},
        },
        batches=(512,),
        epochs=40,
        reference=32,
    ),
    "text": Case(
        {
            "model": {
                "name": "transformers:AutoModelForCausalLM",
                "args": {
                    "model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256,
                    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
                },
            },
            "dataset": {"name": "python_source", "args": {"length": 64, "size": 400_000}},
            "optimizer": {"name": "AdamW", "lr": 3e-3, "weight_decay": 0.01},
            "schedule": {"kind": "cosine"},
            "train": {"max_grad_norm": 1.0},
        },
        batches=(512,),
        epochs=6,
        reference=32,
    ),
}  # fmt: skip
"""With AdamW, at 16 times the batch: digits, and a small language model (GPT-2's architecture, 0.22 million parameters, bytes)."""


BY_NOISE = "ramp-noise"
"""Its stages follow from the noise of the first tenth of the epochs at the small batch, which is trained for it once a network."""


class Rows(Grid):
    """A grid whose small batch has the tricks, and whose large batches have not what is for the small one alone."""

    def rows(self, reference: int) -> list[tuple[str, int]]:
        return [row for row in super().rows(reference) if _belongs(*row, reference=reference)]


def _belongs(method: str, batch: int, *, reference: int) -> bool:
    if batch == reference:
        return method in (REFERENCE, *AT_REFERENCE)
    return method not in OF_SMALL_BATCH


@contextmanager
def known() -> Iterator[None]:
    """Have the rows known to the service of `tula compare`."""
    rows.VARIANTS.update(VARIANTS)
    try:
        yield
    finally:
        for name in VARIANTS:
            del rows.VARIANTS[name]


def grid(name: str, options: argparse.Namespace, *, reference: int) -> Grid:
    """Return the rows of a network: those asked for; else all of its table, and the tricks at the small batch."""
    asked = options.methods.split(",") if options.methods else None
    batches = batches_of(name, options)
    if asked or name in CASES:
        return Grid(tuple(asked or ADAMW), batches, options.seeds, nodes=1)
    methods = dict.fromkeys((*TABLE, *AT_REFERENCE))
    return Rows(tuple(methods), (*batches, reference), options.seeds, nodes=1)


def batches_of(name: str, options: argparse.Namespace) -> tuple[int, ...]:
    """Return the large batches of a network."""
    return CASES[name].batches if name in CASES else tuple(int(batch) for batch in options.batch.split(","))


@dataclass(frozen=True)
class Turn:
    """A part of a network's table that is trained before the next one begins; without batch and seed all of it."""

    name: str  # of the network
    batch: int | None = None  # with the rows at the small batch
    seed: int | None = None

    @property
    def words(self) -> str:
        return "" if self.batch is None else f" of batch {self.batch}, seed {self.seed}"

    def of(self, plan: ComparePlan) -> ComparePlan:
        """Return the part of a plan."""
        if self.batch is None:
            return plan
        small = plan.spec.train.reference_batch
        cells = [c for c in plan.comparison.cells if c.seed == self.seed and c.batch in (self.batch, small)]
        own = plan.comparison.model_copy(update={"cells": tuple(cells)})
        missing = tuple(c for c in plan.missing if c in cells)
        return dataclasses.replace(plan, comparison=own, standing=Standing(own.cells), missing=missing)


def turns(names: Sequence[str], options: argparse.Namespace) -> list[Turn]:
    """Return the parts in the order of their worth: a batch as it is named, all its seeds, of a seed all networks.

    The cases with AdamW come after the first batch.
    """
    images, cases = ([name for name in names if (name in CASES) == other] for other in (False, True))
    found: list[Turn] = []
    for place, batch in enumerate(batches_of("", options)):
        found += [Turn(name, batch, seed) for seed in range(options.seeds) for name in images]
        if place == 0:
            found += [Turn(name, CASES[name].batches[0], seed) for seed in range(options.seeds) for name in cases]
    return found
