"""What `tula compare` has trained in the run."""

from collections.abc import Iterator
from dataclasses import replace

from tula_cli.services.comparison import accuracy
from tula_cli.services.reporting import compared
from tula_cli.services.reporting.document import Section
from tula_cli.services.reporting.material import Material

MISSING = "nothing was compared: tula compare trains the job with several methods and batches, and tells what a large batch loses"


def sections(seen: Material) -> Iterator[Section]:
    """Yield the sections of each part's comparison, or one that says that there is none."""
    found = [(one, comparison) for one in seen.own_parts if (comparison := one.part.run.comparison()) is not None]
    if not found:
        yield Section("comparison", "Methods and batches", missing=MISSING)
    for one, comparison in found:
        report = accuracy.report(one.part.run, comparison, one.part.spec, jobs=one.now.jobs)
        for section in compared.sections(report, accuracy.curves(one.part.run, comparison)):
            name = f": {one.name}" if one.name else ""
            yield replace(
                section, key=f"{section.key}{f'_{one.name}' if one.name else ''}", title=f"{section.title}{name}"
            )
