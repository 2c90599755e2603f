"""The context of a stage: its inputs, its results, which are written immediately, and the reasons why it has not passed."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tula_cli.run.files import write_file_atomically

STAGE_VARIABLE = "TULA_GPU_STAGE"
"""An environment variable set in all processes of a stage, so that all of them can be terminated."""

CPU_TIME_FACTOR = 10.0
"""Factor of time limits on a CPU."""


@dataclass
class Stage:
    """One running stage.

    Results are written to disk immediately, so those of a stage that is terminated at its limit are kept.
    """

    device: str  # "cuda" or "cpu"
    tiny: bool  # a dry run: every part of the program, on sizes that a CPU does in seconds
    folder: Path  # its own
    data: Path | None = None  # what was prepared before (`--data`)
    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # why it has not passed
    unjudged: list[str] = field(default_factory=list)  # what could not be judged here

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"

    def patience(self, seconds: float) -> float:
        """Return the time limit for an operation that takes at most `seconds` on a GPU."""
        return seconds if self.on_card else CPU_TIME_FACTOR * seconds

    def tell(self, **figures: Any) -> None:
        """Store results; a dict is merged with an earlier one of the same name."""
        for name, value in figures.items():
            known = self.figures.get(name)
            self.figures[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        self._write()

    def require(self, holds: bool, otherwise: str) -> None:
        """Check a condition that must hold on all machines."""
        if not holds:
            self.faults.append(otherwise)
        self._write()

    def require_on_card(self, name: str, holds: bool, otherwise: str) -> None:
        """Check a condition that only a GPU can show; on a CPU it is left open, and the stage has not passed."""
        if self.on_card:
            self.require(holds, otherwise)
        else:
            self.leave_open(f"{name} (needs a GPU)")

    def leave_open(self, what: str) -> None:
        """Record a check that is impossible here because a GPU or a part of tula is missing; the stage has not passed."""
        if what not in self.unjudged:
            self.unjudged.append(what)
        self._write()

    def _write(self) -> None:
        content = {"data": self.figures, "faults": self.faults, "unjudged": self.unjudged}
        write_file_atomically(self.folder / "stage.json", json.dumps(content, default=str))

    def inside(self, name: str) -> Path:
        """Return a subfolder of the stage's folder."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def round_result(value: float | None, digits: int = 4) -> float | None:
    """Return a rounded result."""
    return None if value is None else round(value, digits)
