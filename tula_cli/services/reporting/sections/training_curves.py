"""Curves of a training: loss and metric over samples and over time, the learning rate, the step time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tula_cli.services.reporting.document import Figure, Mark, Series
from tula_cli.services.reporting.training_look import Row, TrainingLook, value_of
from tula_cli.services.reporting.units import thinned
from tula_cli.words import time_unit

Place = Callable[[Row], float]
TITLES = {"top1": "Top-1 accuracy", "eval_loss": "Loss on the evaluation set", "perplexity": "Perplexity"}
UNITS = {"top1": "top-1 (%)", "eval_loss": "loss"}


def figures(one: TrainingLook, *, suffix: str) -> Iterator[Figure]:
    """Yield them, those of which the training has told something; `suffix` tells their keys from those of other parts."""
    for axis in _axes(one):
        for figure in (*axis.loss(one), *axis.metric(one)):
            yield _renamed(figure, suffix)
    samples = _axes(one)[0]
    for figure in (*samples.rate(one), *samples.step_time(one)):
        yield _renamed(figure, suffix)


def _renamed(figure: Figure, suffix: str) -> Figure:
    return replace(figure, key=f"{figure.key}{suffix}")


def _axes(one: TrainingLook) -> "list[_Axis]":
    found = [_Axis("samples", "samples seen", lambda row: float(row["samples"]))]
    began, times = one.began, [row["time"] for row in one.rows if row.get("time") is not None]
    if began is not None and times:
        divisor, unit = time_unit(max(times) - began)
        found.append(_Axis("time", f"time since its start ({unit})", lambda row: (row["time"] - began) / divisor))
    return found


class _Axis:
    """What curves are drawn over.

    Args:
        key: for the keys of the figures.
        label: of the axis.
        place: of a row.
    """

    def __init__(self, key: str, label: str, place: Place) -> None:
        self.key = key
        self.label = label
        self.place = place

    def series(
        self, name: str, rows: Sequence[Row], value: Callable[[Row], float | None], style: str = "line"
    ) -> Iterator[Series]:
        """Yield the curve of what rows tell; nothing where they tell nothing."""
        told = thinned([(self.place(row), found) for row in rows if (found := value(row)) is not None])
        if told:
            xs, ys = zip(*told, strict=True)
            yield Series(name, xs, ys, style=style)  # type: ignore[arg-type]

    def starts(self, one: TrainingLook) -> tuple[Mark, ...]:
        """Return where attempts began after the first one, and where the batch changed."""
        found = [
            Mark(self.place(row), None, f"attempt {number}", "event")
            for number, row in enumerate(one.of_kind("start"), 1)
            if number > 1
        ]
        stages = one.of_kind("stage")[1:]
        return (*found, *(Mark(self.place(row), None, f"batch {row['batch']}", "event") for row in stages))

    def loss(self, one: TrainingLook) -> Iterator[Figure]:
        steps, epochs = one.of_kind("step"), one.of_kind("epoch")
        series = (
            *self.series("training", steps or epochs, lambda row: value_of(row, "loss")),
            *self.series("evaluation", epochs, lambda row: value_of(row, "eval_loss"), "line+points"),
        )
        if series:
            low = min(y for one_ in series for y in one_.y if y is not None)
            yield Figure(f"loss_by_{self.key}", f"Loss over {self.key}", "Of training steps as they were logged, and on the evaluation set at the end of epochs.",
                         self.label, "loss", series, marks=self.starts(one), y_scale="log" if low > 0 else "linear")  # fmt: skip

    def metric(self, one: TrainingLook) -> Iterator[Figure]:
        name, epochs = one.metric, one.of_kind("epoch")
        if name == "eval_loss":  # it is in the figure of the loss
            return
        series = [
            *self.series(name if name != "top1" else "top-1", epochs, lambda row: value_of(row, name), "line+points")
        ]
        series += (
            self.series("top-5", epochs, lambda row: value_of(row, "top5"), "line+points") if name == "top1" else []
        )
        if series:
            title = TITLES.get(name, name)
            yield Figure(f"metric_by_{self.key}", f"{title} over {self.key}", "On the evaluation set, at the end of epochs.",
                         self.label, UNITS.get(name, name), tuple(series), marks=self.starts(one))  # fmt: skip

    def rate(self, one: TrainingLook) -> Iterator[Figure]:
        rows = one.of_kind("step", "epoch")
        series = tuple(self.series("learning rate", rows, lambda row: value_of(row, "lr")))
        if series:
            yield Figure("learning_rate", "Learning rate", "Of the steps as they were logged.", self.label, "learning rate",
                         series, marks=self.starts(one))  # fmt: skip

    def step_time(self, one: TrainingLook) -> Iterator[Figure]:
        """Yield the step time as it was logged, beside what was predicted with its interval."""
        series = [*self.series("logged", one.of_kind("step"), lambda row: _ms(row, "step_time"))]
        if not series:
            return
        told = [row for row in one.of_kind("epoch") if row.get("predicted_step") is not None]
        if told:
            told = thinned(told)
            ends = [tuple(_ms(row, name) for row in told) for name in ("predicted_step", "step_low", "step_high")]
            series.append(
                Series("predicted", tuple(self.place(row) for row in told), ends[0], ends[1], ends[2], style="line")
            )
        changes = tuple(
            Mark(float(change.samples), None, f"changed: {', '.join(change.parts)}", "event")
            for change in one.files.changes()
        )
        caption = "Means over the steps between two rows of the log; the band of the prediction is its 90 % interval."
        yield Figure("step_time", "Step time", caption, self.label, "step time (ms)", tuple(series), marks=(*self.starts(one), *changes))  # fmt: skip


def _ms(row: Row, name: str) -> float | None:
    value = value_of(row, name)
    return None if value is None else 1000 * value
