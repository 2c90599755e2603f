"""The trainings of `tula compare` in the run."""

from collections.abc import Iterator
from dataclasses import replace

from tula_cli.services.comparison import accuracy
from tula_cli.services.reporting import comparison_document
from tula_cli.services.reporting.document import Section
from tula_cli.services.reporting.material import Material

MISSING = "nothing was compared: tula compare trains the job with several methods and batches, and tells what a large batch loses"


def comparison_sections(material: Material) -> Iterator[Section]:
    """Yield the sections of each part's comparison, or one that says that there is none."""
    compared_parts = [
        (part_material, comparison)
        for part_material in material.own_parts
        if (comparison := part_material.part.run.comparison()) is not None
    ]
    if not compared_parts:
        yield Section("comparison", "Methods and batches", missing=MISSING)
    for part_material, comparison in compared_parts:
        report = accuracy.build_compare_report(
            part_material.part.run, comparison, part_material.part.spec, jobs=part_material.now.jobs
        )
        for section in comparison_document.comparison_sections(
            report, accuracy.training_curves(part_material.part.run, comparison)
        ):
            name = f": {part_material.name}" if part_material.name else ""
            yield replace(
                section,
                key=f"{section.key}{f'_{part_material.name}' if part_material.name else ''}",
                title=f"{section.title}{name}",
            )
