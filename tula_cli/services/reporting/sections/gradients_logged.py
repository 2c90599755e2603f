"""The gradients of the training and their scaling."""

from collections.abc import Iterator, Mapping

from tula_cli.services.reporting.document import Fact, Figure, Section
from tula_cli.services.reporting.figures import (
    GradientCurve,
    Row,
    TrainingMaterial,
    factor_density,
    gradient_figures,
    newest_trainings,
    step_figures,
    value_of,
)
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.sections.training_outcome import TRAIN
from tula_cli.words import number, percent

KEY, TITLE = "gradients", "Gradients and their scaling"


def gradients_section(material: Material) -> Section:
    """Return the norms, their change with the accuracy, the factors and the curvature, as far as the training tells them."""
    trainings = newest_trainings(material)
    if not trainings:
        return Section(KEY, TITLE, missing=TRAIN)
    drawn = tuple(figure for training in trainings for figure in _figures(training))
    facts = tuple(fact for training in trainings for fact in _scaling_facts(training))
    if not drawn:
        return Section(KEY, TITLE, facts=facts, missing=_why_no_gradients(trainings[0]))
    return Section(KEY, TITLE, _untold_notes(trainings[0]), facts, figures=drawn)


def _figures(training: TrainingMaterial) -> Iterator[Figure]:
    prefix = f"{training.part.name}_" if training.part.name else ""
    curve = GradientCurve(
        training.task.spec.train.method, training.rows_of_kind("epoch"), training.rows_of_kind("hessian")
    )
    of_steps = list(step_figures(training.files.steps(), name=curve.name, prefix=prefix))
    step_keys = {figure.key for figure in of_steps}  # medians of epochs tell less
    yield from of_steps[:2]
    yield from (figure for figure in gradient_figures([curve], prefix=prefix) if figure.key not in step_keys)
    yield from of_steps[2:]
    title = f"Scaling factors of {curve.name}, batch {training.task.batch}"
    yield from factor_density(curve, key=f"{prefix}factors", title=title)


def _scaling_facts(training: TrainingMaterial) -> Iterator[Fact]:
    """Yield what gradient scaling did in the last epoch, or in all of a script's steps."""
    ags_row: Row = next((row["ags"] for row in reversed(training.rows) if isinstance(row.get("ags"), Mapping)), {})
    mean, scaled = (value_of(ags_row.get("so_far", ags_row), name) for name in ("mean", "scaled"))
    scope = " of the last epoch" if training.task.spec.script is None else ""
    if mean is not None and scaled is not None:
        yield Fact("scaling", f"factor {number(mean, 3)} in {percent(scaled)} % of the steps{scope}")


def _why_no_gradients(training: TrainingMaterial) -> str:
    if training.task.spec.script is not None:
        return "a script's gradients are not logged; --set train.diagnostics=true is for tula's own loop"
    return (
        "this training has logged no gradients: it scales none (at or below train.reference_batch there is nothing to scale)."
        " tula train --set train.diagnostics=true logs their norms, train.hessian=true the curvature"
    )


def _untold_notes(training: TrainingMaterial) -> tuple[str, ...]:
    if training.rows_of_kind("hessian"):
        return ()
    return ("The curvature (largest eigenvalue) was not measured: tula train --set train.hessian=true measures it.",)
