"""Training methods as facts: no torch, no pydantic."""

from typing import Literal

Method = Literal["ags", "lbt", "lrs", "lars", "lamb", "polo", "adascale", "static", "ortho", "auto"]

LR_SCALING: dict[str, Literal["linear", "sqrt"]] = {
    "lrs": "linear",
    "lars": "linear",
    "lamb": "sqrt",
    "ortho": "linear",
}
"""How methods scale the learning rate by themselves: linearly (paper, IV-D), LAMB by the square root (You et al. 2020)."""

WARMUP_EPOCHS = {"lrs": 5.0, "lars": 5.0, "lamb": 5.0, "polo": 5.0, "ortho": 5.0}
"""Warm-up of methods where the spec gives none (paper, IV-D)."""


REPLACES: dict[str, tuple[str, ...]] = {"lars": ("SGD",), "lamb": ("Adam", "AdamW")}
"""Methods that are optimizers of their own, and the optimizers whose settings they take over."""

NEED_SGD = ("adascale", "ortho")
READ_AGS = ("ags", "static", "auto")
"""Methods that read the section ags."""
