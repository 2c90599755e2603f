"""tula: choose the nodes and the batch size of a distributed training job by measuring it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tula_cli.errors import TulaError
    from tula_cli.services.api.commands import (
        check,
        check_nodes,
        compare,
        estimate,
        profile,
        profile_events,
        recommend,
        status,
        train,
    )
    from tula_cli.services.api.differing_runs import diff
    from tula_cli.services.api.evaluating import evaluate
    from tula_cli.services.api.exported import export
    from tula_cli.services.api.handles import Run
    from tula_cli.services.api.rehearsing import rehearse
    from tula_cli.services.api.reported import report, report_text
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
    "profile",
    "profile_events",
    "recommend",
    "rehearse",
    "report",
    "report_text",
    "status",
    "train",
]
_PLACES = {
    "Run": "services.api.handles",
    "TulaError": "errors",
    "diff": "services.api.differing_runs",
    "evaluate": "services.api.evaluating",
    "export": "services.api.exported",
    "__version__": "version",
    "rehearse": "services.api.rehearsing",
    "report": "services.api.reported",
    "report_text": "services.api.reported",
}


def __getattr__(name: str) -> Any:
    """Look a function of the Python API up when it is asked for: `import tula_cli` itself imports nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES.get(name, 'services.api.commands')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
