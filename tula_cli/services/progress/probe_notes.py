"""What the probes of a script say is absent in them."""

from collections import Counter
from collections.abc import Iterable

from tula_cli.run.records.probes import Measured
from tula_cli.words import plural


def notes(measured: Iterable[Measured]) -> tuple[str, ...]:
    """Return what is absent, and why, each once and with how many probes say so."""
    seen = [probe.script.notes for probe in measured if probe.script is not None]
    said = Counter(note for own in seen for note in dict.fromkeys(own))
    return tuple(f"{note} ({count} of {plural(len(seen), 'probe')})" for note, count in said.items())
