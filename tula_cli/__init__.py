"""tula: choose the nodes and the batch size of a distributed training job by measuring it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tula_cli.errors import TulaError
    from tula_cli.services.api import (
        Run,
        check,
        check_nodes,
        compare,
        diff,
        estimate,
        evaluate,
        export,
        find_largest_batch,
        find_learning_rate,
        observed_jobs,
        plan_trainings,
        profile,
        recommend,
        rehearse,
        report,
        report_text,
        status,
        train,
    )
    from tula_cli.version import __version__

__all__ = [
    "Run",
    "TulaError",
    "__version__",
    "check",
    "check_nodes",
    "compare",
    "diff",
    "estimate",
    "evaluate",
    "export",
    "find_largest_batch",
    "find_learning_rate",
    "observed_jobs",
    "plan_trainings",
    "profile",
    "recommend",
    "rehearse",
    "report",
    "report_text",
    "status",
    "train",
]
_MODULES_BY_NAME = {"TulaError": "errors", "__version__": "version"}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API on first access, so that `import tula_cli` itself imports nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES_BY_NAME.get(name, 'services.api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
