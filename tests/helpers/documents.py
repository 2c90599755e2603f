"""Reports for tests of drawing: one with all kinds of content, and one with hostile texts."""

import dataclasses
import math
from collections.abc import Sequence

from tula_cli.services.document import (
    Annotation,
    Column,
    Density,
    Document,
    Fact,
    Figure,
    Section,
    Series,
    Table,
)

BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
HOSTILE_TEXTS = (
    "<script>alert(1)</script>",
    "\"quoted\" & 'quoted' </title></svg>",
    "a_very_long_name_that_nothing_can_break_" * 6,
    "WWWWMMMM@@@@%%%%" * 8,
    "_begins with an underscore, and $a^2$ is money",
    "\u540d\u524d\u306e\u9577\u3044\u65b9\u6cd5 \u0441\u043a\u043e\u0440\u043e\u0441\u0442\u044c \U0001f680",
    "control \x00\x1b[31m and half \ud800",
    "",
)
"""Names that a user could choose."""


def training_hours(nodes: int, batch: int) -> float:
    """Return the hours of a training."""
    return 48000 / batch / nodes + 0.8 + 0.05 * nodes + batch / (9000 * nodes)


def make_time_figure(nodes: Sequence[int] = (1, 2, 4, 8)) -> Figure:
    series = []
    for count in nodes:
        y = tuple(training_hours(count, batch) for batch in BATCHES)
        low, high = tuple(0.93 * value for value in y), tuple(1.08 * value for value in y)
        measured = tuple(batch in (64, 4096) for batch in BATCHES)
        series.append(Series(f"{count} nodes", BATCHES, y, low, high, measured=measured))
    marks = (
        Annotation(1024, training_hours(8, 1024), "chosen: 8 nodes, batch 1024", "choice"),
        Annotation(512, training_hours(8, 512), "fastest within the budget", "choice"),
        Annotation(2048, None, "largest batch whose accuracy was seen to hold", "limit"),
    )
    return Figure("time", "Time of a training", "Intervals: 90 %.", "global batch", "time (h)", tuple(series), marks=marks,
                  x_scale="log2", y_scale="log", paper="Figure 4")  # fmt: skip


def make_memory_figure() -> Figure:
    y = tuple(8 + 0.021 * batch for batch in BATCHES)
    limit = Annotation(None, 79.15, "capacity of the GPU: 79.2 GiB", "limit")
    series = Series("model", BATCHES, y, measured=tuple(batch < 1000 for batch in BATCHES))
    return Figure("memory", "Memory of a GPU", "", "local batch", "memory (GiB)", (series,), marks=(limit,), x_scale="log2")  # fmt: skip


def make_step_parts_figure() -> Figure:
    places = tuple(range(6))
    parts = {"computing": 120, "synchronisation that nothing hides": 35, "data wait": 11}
    series = [
        Series(name, places, tuple(ms * (1 + 0.3 * i) for i in places), style="stacked") for name, ms in parts.items()
    ]
    categories = tuple(f"{nodes} × {batch}" for nodes in (1, 4, 16) for batch in (256, 1024))
    return Figure("parts", "What a step consists of", "", "nodes × batch", "time (ms)", tuple(series), x_scale="category", categories=categories)  # fmt: skip


def make_gaps_figure() -> Figure:
    names = (
        "lbt",
        "lrs",
        "ags",
        "ramp, with turned steps and a warm-up of five epochs",
        "a_name_that_nothing_can_break",
    )
    x = tuple(range(5))
    first = Series(
        "batch 1024", x, (0, 31, 54, 92, None), (-3, 20, 50, 80, None), (3, 40, 60, 101, None), style="points"
    )
    second = Series("batch 4096", x, (-12, 15, 40, 81, 20), style="points", measured=(True, True, True, False, False))
    return Figure("gaps", "Gap recovered by each method", "", "method", "recovered (%)", (first, second), x_scale="category", categories=names)  # fmt: skip


def make_accuracy_figure() -> Figure:
    x = tuple(50000 * place for place in range(1, 61))
    series = []
    for name, best in {"lbt (reference)": 76.2, "lbt, batch 4096": 71.4, "ags, batch 4096": 73.0}.items():
        y = [best * (1 - math.exp(-place / 9)) for place in range(60)]
        series.append(Series(name, x, tuple(y), tuple(v - 1 for v in y), tuple(v + 1 for v in y), style="line"))
    events = ((350_000, "out of memory: batch 4096 → 2048"), (1_100_000, "preempted"), (1_150_000, "lost node"))
    marks = tuple(Annotation(at, None, text, "event") for at, text in events)
    return Figure("accuracy", "Top-1 accuracy on the way", "", "samples seen", "top-1 (%)", tuple(series), marks=marks)  # fmt: skip


def make_factors_figure() -> Figure:
    columns = []
    for place in range(30):
        mass = [math.exp(-((power - 0.1 * place) ** 2) / 2) for power in range(-6, 6)]
        columns.append(tuple(value / sum(mass) for value in mass))
    density = Density(
        tuple(50000.0 * i for i in range(31)), tuple(2.0**power for power in range(-6, 7)), tuple(columns)
    )
    return Figure("factors", "Scaling factors", "", "samples seen", "factor", density=density, y_scale="log2", paper="Figure 7")  # fmt: skip


def make_table() -> Table:
    places = [(nodes, batch) for nodes in (4, 8) for batch in BATCHES]
    columns = (Column("nodes"), Column("batch"), Column("local batch"), Column("time", "h", digits=3), Column("90 % interval", "h"),
               Column("cost", "USD", digits=3), Column("memory", "GiB/GPU", digits=3), Column("free", "%", digits=3),
               Column("basis", align="left"), Column("note", align="left"))  # fmt: skip
    rows = tuple(
        (n, b, b // (8 * n), training_hours(n, b), f"{0.93 * training_hours(n, b):.3g} .. {1.08 * training_hours(n, b):.3g}", 12.3 * n * training_hours(n, b), 8 + b / 50,
         None, "measured", "at the GPU's limit: falls back to half the micro-batch" if b > 2048 else "")
        for n, b in places
    )  # fmt: skip
    marks = tuple("chosen" if place == (8, 1024) else "front" if place[1] == 2048 else "" for place in places)
    return Table("configurations", "Configurations", columns, rows, "Time and cost are of the whole training.", marks)


def make_document() -> Document:
    facts = (
        Fact("model", "resnet50, 25.6M parameters"),
        Fact("data", "ImageNet, 1,281,167 samples"),
        Fact("hardware", "NVIDIA A100-SXM4-80GB; 8 GPUs a node"),
        Fact("run", "/lustre/project/abc123/somebody/with/a/very/long/path/tula-runs/resnet50-imagenet-e7dc068f"),
    )
    missing = "no probe measured the energy of its steps: pip install 'tula-cli[nvml]' and tula profile again"
    return Document(
        "resnet50-imagenet: what was measured and chosen",
        "How many nodes and which batch, for the least time at no more than 500 USD?",
        "8 nodes at batch 1024 (local 16): 7.11 h (6.61 h to 7.68 h), 700 USD.",
        "2026-11-24 22:10, tula 0.1.0",
        facts,
        (
            Section(
                "choice",
                "The choice",
                ("The knee lies at 512.",),
                facts[:2],
                (make_table(),),
                (make_time_figure(), make_memory_figure()),
            ),
            Section(
                "steps",
                "Steps and accuracy",
                figures=(make_step_parts_figure(), make_gaps_figure(), make_accuracy_figure(), make_factors_figure()),
            ),
            Section("energy", "Energy", missing=missing),
        ),
    )


def make_hostile_document() -> Document:
    """Return a report in which every text is hostile."""
    first, second, third, wide, _, foreign, control, _ = HOSTILE_TEXTS
    x = tuple(range(len(HOSTILE_TEXTS)))
    series = tuple(
        Series(name, x, tuple(float(place + i) for i in x), style="points") for place, name in enumerate(HOSTILE_TEXTS)
    )
    marks = (
        *(Annotation(place, None, name, "event") for place, name in enumerate(HOSTILE_TEXTS)),
        Annotation(2, 3.0, first, "choice"),
    )
    figures = (
        Figure(second, first, third, wide, wide, series, marks=marks, paper=control),
        Figure(second, foreign, third, foreign, third, series, x_scale="category", categories=HOSTILE_TEXTS),
        Figure("", "", "", "", ""),
    )
    tables = (
        Table(first, wide, tuple(map(Column, HOSTILE_TEXTS)), (HOSTILE_TEXTS, HOSTILE_TEXTS), third, (first, "chosen")),
    )
    section = Section(
        first, third, HOSTILE_TEXTS, (Fact(first, third), Fact(wide, wide)), tables, figures, missing=second
    )
    return Document(
        first, second, third, foreign, (Fact(first, third),), (section, dataclasses.replace(section, figures=()))
    )
