"""Syntax of the rows of a comparison: a method or a variant, and settings of the row separated by colons.

`ags`, `ags:delta=0.1`, `ags:delta=0.1:refresh={every: 50}`, `lbt:optimizer.lr=0.2`,
`package.module:Method:schedule.warmup_epochs=5`
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.plugins import suggest_nearest
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.methods import METHODS, TrainingMethod, get_training_method
from tula_cli.spec.yaml_text import parse_yaml
from tula_cli.words import format_count, split_outside_brackets

# --- Requirements on a script

DEFAULT_SEEDS = 3
_NO_LR_MESSAGE = "script.command has no {lr} that could be increased"


def require_comparable_script(spec: JobSpec, *, seeds: int) -> None:
    """Raise SpecError if a script reports no metric, or its command takes no seed although there are several seeds."""
    if not spec.workload.evaluates_held_out_data and not spec.workload.reported_metrics:
        raise SpecError(
            "the accuracy of the script is unknown: the job has no script.metric",
            "set a pattern for its value, for example script.metric: {top1: 'Acc@1 ([0-9.]+)'}; the first metric is compared",
        )
    if seeds > 1 and "seed" not in spec.workload.settings:
        raise SpecError(
            f"script.command has no {{seed}}, so the trainings with {format_count(seeds, 'seed')} would be identical",
            "add {seed} to script.command, for example --seed {seed}, or compare with [[--seeds]] 1",
        )


def choose_default_seeds(spec: JobSpec) -> int:
    """Return the default number of seeds: one for scripts that take no seed."""
    return DEFAULT_SEEDS if "seed" in spec.workload.settings else 1


def require_script_lr(spec: JobSpec) -> float:
    """Return the learning rate of a script at its reference batch.

    Raises:
        SpecError: the script's command takes no learning rate.
    """
    lr = spec.workload.reference_lr
    if lr is None or "lr" not in spec.workload.settings:
        raise SpecError(_NO_LR_MESSAGE)
    return lr


def warn_missing_controls(spec: JobSpec, *, controls: Sequence[str]) -> Iterator[Diagnostic]:
    """Yield warnings about what a script's comparison lacks: controls with a raised learning rate, or several seeds."""
    if "lr" not in spec.workload.settings:
        yield messages.controls_left_out(controls=controls, reason=_NO_LR_MESSAGE)
    if "seed" not in spec.workload.settings:
        yield messages.one_seed_only()


# --- Rows

REFERENCE_METHOD = "lbt"
"""Method of the small-batch reference: at train.reference_batch, with the learning rate that was tuned for it."""
CHANGEABLE_SECTIONS = ("ags", "auto", "optimizer", "schedule", "train")
"""Sections of the job that a row may change; model and data must be the same in all rows to be comparable."""
FIXED_KEYS = {
    "train.method": "which is the first word of the row",
    "train.seed": "which [[--seeds]] changes",
    "train.reference_batch": "which must be the same in all rows",
}
_SETTING_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=")
_IMPORT_STRING_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method, and other settings of the job that the row changes."""

    method: str
    lr: float = 1.0  # factor of optimizer.lr, or of script.reference.lr
    train: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # ignored for scripts
    preset: str = ""  # ags.preset; replaces the job's section ags, except apply_to and parameters
    settings: tuple[str, ...] = ()  # overrides (path=value, in YAML) that are applied last

    @property
    def training_method(self) -> TrainingMethod:
        return get_training_method(self.method)


VARIANTS: dict[str, Variant] = {
    "lbt-x2": Variant("lbt", lr=2.0),
    "lbt-x4": Variant("lbt", lr=4.0),
    "sqrt": Variant("lrs", train={"lr_scaling": "sqrt"}),
    "sqrt-beta2": Variant("lrs", train={"lr_scaling": "sqrt"}, optimizer={"beta2_half_life": "auto"}),
    "robust": Variant("ags", preset="robust"),
}


def make_row_of_job(spec: JobSpec) -> str:
    """Return the row that trains the job unchanged: its method, and settings that other rows of the method drop."""
    train = spec.train
    replaced = train.training_method.list_replaced_train_keys(train.method)
    settings = train.model_dump(mode="json", include=replaced, exclude_defaults=True)
    return ":".join([train.method, *(f"train.{name}={json.dumps(value)}" for name, value in settings.items())])


def list_known_methods() -> tuple[str, ...]:
    """Return the names that a row may start with, apart from import strings: values of train.method, and variants."""
    return (*METHODS, *VARIANTS)


def parse_row(row: str) -> Variant:
    """Parse the text of a row.

    Raises:
        SpecError: the method is unknown; or a setting is malformed, not allowed in a row, without a value, not YAML, or
            given twice.
    """
    name, *setting_texts = split_outside_brackets(row, ":")
    settings: list[str] = []
    for setting in setting_texts:
        if _SETTING_PATTERN.match(setting.strip()):
            settings.append(setting.strip())
        elif settings:  # the value is an import string, which contains a colon
            settings[-1] += f":{setting}"
        else:
            name += f":{setting}"
    method = name.strip()
    is_user_method = name.partition(":")[0] not in list_known_methods() and _IMPORT_STRING_PATTERN.fullmatch(method)
    if method not in list_known_methods() and not is_user_method:
        raise _make_unknown_method_error(method, row)
    variant = VARIANTS.get(method, Variant(method))
    paths = tuple(_parse_setting(row, variant, text) for text in settings)
    keys = [text.partition("=")[0] for text in paths]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise SpecError(f"[[--methods]]: {row!r} sets {twice} twice", "keep one of them")
    return dataclasses.replace(variant, settings=paths)


def _make_unknown_method_error(method: str, row: str) -> SpecError:
    method_name = method.partition(":")[0]
    if method_name in list_known_methods():
        wrong = method.partition(":")[2]
        problem = f"{wrong} has no value" if wrong.isidentifier() else f"{wrong!r} is not a setting"
        return SpecError(f"[[--methods]]: {row!r}: {problem}", f"write {method_name}:KEY=VALUE, as in ags:delta=0.1")
    hint = suggest_nearest(method, list_known_methods()) or f"choose from: {', '.join(list_known_methods())}"
    return SpecError(
        f"[[--methods]]: there is no method {method!r}",
        f"{hint} (name your own method as package.module:attribute)",
    )


def _parse_setting(row: str, variant: Variant, text: str) -> str:
    """Return a setting with the full path of its key."""
    key, _, value = text.partition("=")
    if not value.strip():
        raise SpecError(f"[[--methods]]: {row!r}: {key} has no value", f"write {key}=VALUE")
    method_section = variant.training_method.section
    if "." not in key and not method_section:
        sections = [
            name
            for name in CHANGEABLE_SECTIONS
            if variant.training_method.uses_section(name)
            and key in getattr(JobSpec.model_fields[name].annotation, "model_fields", ())
        ]
        keys = [f"{variant.method}:{section}.{key}={value}" for section in sections]
        raise SpecError(
            f"[[--methods]]: {row!r}: method {variant.method} has no section, so {key} needs the name of its section",
            f"write {' or '.join(keys)}" if keys else f"remove it: no section that a row may set has the key {key}",
        )
    path = key if "." in key else f"{method_section}.{key}"
    section = path.partition(".")[0]
    if section not in CHANGEABLE_SECTIONS:
        raise SpecError(
            f"[[--methods]]: {row!r}: a row cannot set section {section}, which is the same in all rows",
            f"a row can set {', '.join(CHANGEABLE_SECTIONS)}",
        )
    if why := FIXED_KEYS.get(path):
        raise SpecError(f"[[--methods]]: {row!r} sets {path}, {why}", "remove it")
    if not variant.training_method.uses_section(section):
        raise SpecError(
            f"[[--methods]]: {row!r}: section {section} has no effect with method {variant.method}", "remove it"
        )
    parse_yaml(
        value, source=f"[[--methods]]: {row!r}: {path}"
    )  # checked here so that the error names the row, not --set
    return f"{path}={value}"
