"""What a stage is given, and what it tells: figures as it goes, and in the end what is missing for it to pass."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tula_cli.run.files import write_atomic

MARK = "TULA_GPU_STAGE"
"""An environment variable that every process of a stage has, so that none outlives it."""

SLOWER = 10.0
"""By what limits are stretched on a CPU, which they are not made for."""


@dataclass
class Stage:
    """One stage under way.

    What it has told is on the disk at once: a stage that is cut off at its limit has measured that much.
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
        """Return how long to wait for something that takes a card so long at most."""
        return seconds if self.on_card else SLOWER * seconds

    def tell(self, **figures: Any) -> None:
        """Keep figures; a dict is laid over the one of that name."""
        for name, value in figures.items():
            known = self.figures.get(name)
            self.figures[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        self._write()

    def require(self, holds: bool, otherwise: str) -> None:
        """Judge something that has to hold on every machine."""
        if not holds:
            self.faults.append(otherwise)
        self._write()

    def require_on_card(self, name: str, holds: bool, otherwise: str) -> None:
        """Judge something that only a card can show; elsewhere it is left open, and the stage has not passed."""
        if self.on_card:
            self.require(holds, otherwise)
        else:
            self.leave_open(f"{name} (needs a GPU)")

    def leave_open(self, what: str) -> None:
        """Say what could not be judged here, for want of a card or of a part of tula; the stage has not passed."""
        if what not in self.unjudged:
            self.unjudged.append(what)
        self._write()

    def _write(self) -> None:
        content = {"data": self.figures, "faults": self.faults, "unjudged": self.unjudged}
        write_atomic(self.folder / "stage.json", json.dumps(content, default=str))

    def inside(self, name: str) -> Path:
        """Return a folder in the stage's own."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def share(value: float | None, digits: int = 4) -> float | None:
    """Return a figure as it is told."""
    return None if value is None else round(value, digits)
