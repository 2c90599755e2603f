"""The gradients of the training and their scaling."""

from collections.abc import Iterator, Mapping

from tula_cli.services.reporting.document import Fact, Figure, Section
from tula_cli.services.reporting.gradient_figures import Curve, density, figures
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.sections.training_outcome import TRAIN
from tula_cli.services.reporting.step_figures import step_figures
from tula_cli.services.reporting.training_look import Row, TrainingLook, trainings, value_of
from tula_cli.words import number, percent

KEY, TITLE = "gradients", "Gradients and their scaling"


def section(seen: Material) -> Section:
    """Return the norms, their change with the accuracy, the factors and the curvature, as far as the training tells them."""
    found = trainings(seen)
    if not found:
        return Section(KEY, TITLE, missing=TRAIN)
    drawn = tuple(figure for one in found for figure in _figures(one))
    facts = tuple(fact for one in found for fact in _scaled(one))
    if not drawn:
        return Section(KEY, TITLE, facts=facts, missing=_why_not(found[0]))
    return Section(KEY, TITLE, _untold(found[0]), facts, figures=drawn)


def _figures(one: TrainingLook) -> Iterator[Figure]:
    prefix = f"{one.part.name}_" if one.part.name else ""
    curve = Curve(one.task.spec.train.method, one.of_kind("epoch"), one.of_kind("hessian"))
    of_steps = list(step_figures(one.files.steps(), name=curve.name, prefix=prefix))
    known = {figure.key for figure in of_steps}  # medians of epochs tell less
    yield from of_steps[:2]
    yield from (figure for figure in figures([curve], prefix=prefix) if figure.key not in known)
    yield from of_steps[2:]
    title = f"Scaling factors of {curve.name}, batch {one.task.batch}"
    yield from density(curve, key=f"{prefix}factors", title=title)


def _scaled(one: TrainingLook) -> Iterator[Fact]:
    """Yield what gradient scaling did in the last epoch, or in all of a script's steps."""
    seen: Row = next((row["ags"] for row in reversed(one.rows) if isinstance(row.get("ags"), Mapping)), {})
    mean, scaled = (value_of(seen.get("so_far", seen), name) for name in ("mean", "scaled"))
    last = " of the last epoch" if one.task.spec.script is None else ""
    if mean is not None and scaled is not None:
        yield Fact("scaling", f"factor {number(mean, 3)} in {percent(scaled)} % of the steps{last}")


def _why_not(one: TrainingLook) -> str:
    if one.task.spec.script is not None:
        return "a script's gradients are not logged; --set train.diagnostics=true is for tula's own loop"
    return (
        "this training has logged no gradients: it scales none (at or below train.reference_batch there is nothing to scale)."
        " tula train --set train.diagnostics=true logs their norms, train.hessian=true the curvature"
    )


def _untold(one: TrainingLook) -> tuple[str, ...]:
    if one.of_kind("hessian"):
        return ()
    return ("The curvature (largest eigenvalue) was not measured: tula train --set train.hessian=true measures it.",)
