"""Notes of a script's probes about quantities that they could not measure."""

from collections import Counter
from collections.abc import Iterable

from tula_cli.run.records.probes import Measured
from tula_cli.words import plural


def count_notes(measured: Iterable[Measured]) -> tuple[str, ...]:
    """Return what is absent, and why, each once and with how many probes say so."""
    notes_by_probe = [probe.script.notes for probe in measured if probe.script is not None]
    counts = Counter(note for probe_notes in notes_by_probe for note in dict.fromkeys(probe_notes))
    return tuple(f"{note} ({count} of {plural(len(notes_by_probe), 'probe')})" for note, count in counts.items())
