"""Jobs with a section `script`: the defaults that take the place of tula's own loop, and the keys of section train that act."""

import math
from collections.abc import Mapping
from typing import Any

from tula_cli.spec.methods import METHODS
from tula_cli.spec.old_keys import advice
from tula_cli.spec.scripts.own_script import Script
from tula_cli.spec.scripts.placeholders import names
from tula_cli.spec.sections import Dataset, Model, Optimizer
from tula_cli.words import plural

OWN_LOOP = ("model", "dataset", "transforms", "loss", "optimizer", "schedule", "auto")
"""Sections of tula's own loop: a script builds all of it by itself."""
TRAIN = {"method", "lr_scaling", "accumulate", "seed", "workers", "oom_policy", "max_attempts"}
"""Settings of section train that reach a script: by placeholders, or because they are about starting it."""
PRESET = "robust"
"""Of section ags: the one that acts without a line of the script changed."""


def default_train(command: object) -> tuple[dict[str, str], str]:
    """Return how the large batch of a script is trained by default, as settings of section train, and the reason.

    The rate follows the square root of the batch: which optimizer a script has is not known, and linear scaling breaks Adam's.

    Args:
        command: of the script; what is no text, or has wrong placeholders, is reported where section script is checked.
    """
    reason = "the batch of a script cannot change while it trains"
    try:
        takes_rate = isinstance(command, str) and bool({"lr", "lr_factor"} & set(names(command)))
    except ValueError:
        takes_rate = False
    if takes_rate:
        return {"method": "lrs", "lr_scaling": "sqrt"}, reason
    return {"method": "lbt"}, f"{reason}, and its command takes no learning rate"


def filled(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a job with a script, with what the types ask for in place of what it does not have.

    Nobody sees that: the worker of tula's own loop is not started, and `told` leaves it out of what is written.

    Args:
        content: of the job, as it is read.

    Raises:
        ValueError: there is something in it that no script would get.
    """
    if foreign := [name for name in OWN_LOOP if content.get(name) is not None]:
        raise ValueError(f"{' and '.join(foreign)} mean nothing beside script, which builds its own; leave them out")
    train = {key: value for key, value in (content.get("train") or {}).items() if value is not None}
    if unknown := sorted(key for key in train.keys() - TRAIN if not advice(f"train.{key}")):
        raise ValueError(
            f"train.{unknown[0]} means nothing to a script, whose command says what it does; of section train it has"
            f" {', '.join(sorted(TRAIN))}"
        )
    if "method" not in train:
        default, _ = default_train(_mapping(content["script"]).get("command"))
        train = {"method": "lbt", **train} if "lr_scaling" in train else {**default, **train}
    method = train["method"]
    if method not in (there_are := [name for name, facts in METHODS.items() if facts.on_scripts]):
        raise ValueError(
            f"train.method {method} acts inside of tula's own loop; for a script there are {', '.join(there_are)}"
        )
    if not METHODS[method].reads_ags and content.get("ags") is not None:
        raise ValueError(f"section ags means nothing to train.method {method}; leave it out, or set train.method: ags")
    length, reference = (_part(content["script"], name) for name in ("length", "reference"))
    return {
        **content,
        "model": Model(name=""),
        "dataset": Dataset(name=""),
        "optimizer": Optimizer.model_construct(name="", lr=math.nan),
        **({"ags": _ags(content)} if METHODS[method].reads_ags else {}),
        # What is wrong in them is told of section script itself.
        "train": {**train, "epochs": length.get("epochs") or 1, "reference_batch": reference.get("batch") or 1},
    }


def _ags(content: Mapping[str, Any]) -> Any:
    """Return section ags with the preset of scripts where none is said. What is no mapping is for its type to tell."""
    given = content.get("ags") or {}
    return {"preset": PRESET, **given} if isinstance(given, Mapping) else given


def _part(script: Any, name: str) -> Mapping[str, Any]:
    return _mapping(_mapping(script).get(name))


def _mapping(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else {}


def told(content: dict[str, Any]) -> dict[str, Any]:
    """Return the written content of a job with a script, without what `filled` has put there."""
    reads_ags = METHODS[content.get("train", {}).get("method", "lbt")].reads_ags
    kept = {key: value for key, value in content.items() if key not in OWN_LOOP and (key != "ags" or reads_ags)}
    if "train" in kept:
        kept["train"] = {key: value for key, value in kept["train"].items() if key in TRAIN}
    return kept


def samples(script: Script, dataset_size: int) -> int:
    """Return the samples of the whole training.

    Args:
        script: of which the length is read.
        dataset_size: samples of an epoch.
    """
    asked = samples_asked(script)
    return (script.length.epochs or 0) * dataset_size if asked is None else asked


def samples_asked(script: Script) -> int | None:
    """Return the samples of the whole training as far as the section tells; None where it is so many epochs."""
    length = script.length
    return length.steps * script.reference.batch if length.steps is not None else length.samples


def steps(script: Script, batch: int, dataset_size: int) -> int:
    """Return the optimizer steps of the whole training at a global batch, rounded up: no sample is left out."""
    return math.ceil(samples(script, dataset_size) / batch)


def length_words(script: Script) -> str:
    """Return how long a script trains, in words."""
    length = script.length
    if length.epochs is not None:
        return plural(length.epochs, "epoch")
    if length.samples is not None:
        return plural(length.samples, "sample")
    return f"{plural(length.steps or 0, 'step')} at batch {script.reference.batch}"
