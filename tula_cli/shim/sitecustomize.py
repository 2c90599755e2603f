"""Imported by every Python process of the job through PYTHONPATH; hooks torch at its import if TULA_PLAN is set.

A folder with this module and observe.json watches all trainings of a shell or site, unless TULA_OBSERVE is 0.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

SHIM_FOLDER = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - importing pathlib would double the cost of each start


class TorchImportHook:
    """A finder that leaves finding torch to other finders, and installs the hooks after torch has been executed."""

    def __init__(self) -> None:
        self.asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return the spec of torch with a replaced `exec_module`; None for all other modules."""
        if name != "torch" or self.asking:
            return None
        from importlib.util import find_spec

        self.asking = True
        try:
            spec = find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: object) -> None:
                run(module)  # type: ignore[arg-type]
                from importlib import import_module

                if "TULA_PLAN" in os.environ:  # otherwise the script has cleared its environment, including its rank
                    import_module("tula_shim.install").install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


SUBMITTED_CODE_FOLDERS = os.environ.get("TULA_CODE", "").split(os.pathsep)
"""Folders of the submitted code, read now, because a script may clear its environment."""


class SubmittedCodeFinder:
    """A finder that searches the submitted code before the working directory, where `python -m` looks first."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG004
        """Return the spec of a top-level module of the submitted code; None for submodules, which packages find."""
        return PathFinder.find_spec(name, SUBMITTED_CODE_FOLDERS) if path is None else None


def run_shadowed_sitecustomize() -> None:
    """Run the sitecustomize that this one hides: those of EasyBuild, conda and distributions are needed."""
    others = [folder for folder in sys.path if os.path.realpath(folder or ".") != SHIM_FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    spec.loader.exec_module(module_from_spec(spec))


if not os.environ.get("TULA_PLAN") and os.environ.get("TULA_OBSERVE") != "0":
    observe = os.path.join(SHIM_FOLDER, "observe.json")  # noqa: PTH118
    if os.path.exists(observe):  # noqa: PTH110
        os.environ["TULA_PLAN"] = observe
if os.environ.get("TULA_PLAN"):
    if os.environ.get("TULA_CODE"):
        sys.meta_path.insert(sys.meta_path.index(PathFinder), SubmittedCodeFinder)
    sys.meta_path.insert(0, TorchImportHook())
run_shadowed_sitecustomize()
