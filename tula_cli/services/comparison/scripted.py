"""What a comparison asks of a script of the user's own: a metric to compare by, and a command that takes what differs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.spec.scripts.own_script import Script
from tula_cli.spec.scripts.placeholders import names
from tula_cli.words import plural

SEEDS = 3
"""How many seeds are compared unless something else is asked for."""
_NO_LR = "script.command has no {lr} that could be raised by hand"


def require_comparable(script: Script, *, seeds: int) -> None:
    """Refuse a script whose trainings could not be told apart.

    Args:
        script: of the job.
        seeds: how many are compared.

    Raises:
        SpecError: it tells no metric, or its command does not take the seed.
    """
    if not script.metric:
        raise SpecError(
            "nothing tells how good the script is: the job has no script.metric",
            "say where its number stands, for example script.metric: {top1: 'Acc@1 ([0-9.]+)'}; the first one is compared",
        )
    if seeds > 1 and not takes_seed(script):
        raise SpecError(
            f"{plural(seeds, 'seed')} of a script whose command has no {{seed}}: its runs would differ by nothing that is told",
            "add {seed} to script.command, for example --seed {seed}, or compare with --seeds 1",
        )


def takes_seed(script: Script) -> bool:
    return "seed" in names(script.command)


def takes_lr(script: Script | None) -> bool:
    """Return whether a learning rate can be raised by hand; always in tula's own loop (None)."""
    return script is None or "lr" in names(script.command)


def default_seeds(script: Script | None) -> int:
    """Return how many seeds tell something, unless something else is asked for; None is tula's own loop."""
    return SEEDS if script is None or takes_seed(script) else 1


def with_lr(section: Mapping[str, Any], script: Script, *, factor: float) -> dict[str, Any]:
    """Return a section `script` whose learning rate is raised by a factor.

    Raises:
        SpecError: its command takes none.
    """
    lr = script.reference.lr
    if lr is None or not takes_lr(script):
        raise SpecError(_NO_LR)
    return {**section, "reference": {**section["reference"], "lr": lr * factor}}


def warn_missing(script: Script, *, controls: Sequence[str]) -> Iterator[str]:
    """Say what a comparison of a script lacks."""
    if not takes_lr(script):
        yield f"the controls {' and '.join(controls)} are left out: {_NO_LR}"
    if not takes_seed(script):
        yield "one seed: script.command has no {seed}, so nothing tells how much runs differ by chance"
