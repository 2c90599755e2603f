"""Figures as SVG: what stands in them, and that it stands inside."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import documents
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from tula_cli.errors import SpecError
from tula_cli.extras.report import svg
from tula_cli.extras.report.svg import COLORS
from tula_cli.services.document import Annotation, Density, Figure, Series

SVG = "{http://www.w3.org/2000/svg}"
ALL = (documents.make_time_figure(), documents.make_memory_figure(), documents.make_step_parts_figure(), documents.make_gaps_figure(), documents.make_accuracy_figure(), documents.make_factors_figure())  # fmt: skip


def drawn(figure: Figure, **named) -> ElementTree.Element:
    return ElementTree.fromstring(svg.render_svg(figure, **named))


def texts(root: ElementTree.Element) -> list[str]:
    return [(result.text or "") for result in root.iter(f"{SVG}text")]


@functools.cache
def length_of(text: str, size: float) -> float:
    """Return how long a text is in DejaVu Sans, which is wider than what most systems have."""
    font = FontProperties(family="DejaVu Sans", size=size)
    return TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]


def outside(root: ElementTree.Element) -> list[str]:
    """Return the texts that reach beyond the drawing."""
    _, _, wide, high = map(float, root.get("viewBox").split())
    results = []
    for text in root.iter(f"{SVG}text"):
        style = dict(part.split(": ", 1) for part in text.get("style").split("; "))
        size = float(style["font-size"].removesuffix("px"))
        length = length_of(text.text, size)
        start = {"middle": -0.5, "end": -1.0}.get(style.get("text-anchor"), 0.0) * length
        answer = text.get("transform", "")
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        if shift := re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", answer):
            x, y = x + float(shift[1]), y + float(shift[2])
        angle = math.radians(float(turn[1])) if (turn := re.search(r"rotate\(([-\d.]+)", answer)) else 0.0
        ends = [(x + along * math.cos(angle), y + along * math.sin(angle)) for along in (start, start + length)]
        if not all(-3 <= end[0] <= wide + 3 and 0 <= end[1] <= high for end in ends):
            results.append(text.text)
    return results


def simple(*series: Series, **changes) -> Figure:
    return dataclasses.replace(Figure("k", "Title", "Caption.", "batch", "time (s)", series), **changes)


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.key)
def test_every_word_stands_in_the_drawing_and_inside_it(figure: Figure) -> None:
    root = drawn(figure)
    result = texts(root)
    assert figure.y_label in result and figure.x_label in result
    assert {series.name for series in figure.series} <= set(result)
    assert all(any(mark.text in text for text in result) for mark in figure.marks)
    assert not outside(root)


def test_a_figure_is_the_same_each_time_and_in_each_process() -> None:
    here = svg.render_svg(documents.make_time_figure())
    assert here == svg.render_svg(documents.make_time_figure())
    code = "import sys; sys.path.insert(0, 'tests/helpers'); import documents; from tula_cli.extras.report.svg import render_svg; print(render_svg(documents.make_time_figure()), end='')"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout == here and not there.stderr
    assert "20" + "26-" not in here


def test_the_names_in_a_figure_are_those_of_no_other_figure_of_the_page() -> None:
    text = svg.render_svg(documents.make_gaps_figure(), prefix="one")
    root = ElementTree.fromstring(text)
    ids = [result.get("id") for result in root.iter() if result.get("id")]
    assert ids and len(set(ids)) == len(ids) and all(name.startswith("one-") for name in ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)) <= set(ids)
    assert "<script" not in text
    assert root.get("role") == "img" and root.get("aria-labelledby") == "one-title one-desc"
    assert root.findtext(f"{SVG}title") == "Gap recovered by each method"
    assert "recovered (%) against method: batch 1024, batch 4096" in root.findtext(f"{SVG}desc")


def test_colours_can_be_told_from_the_page() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for role, color in COLORS.items():
        pair = sorted((luminance(color), luminance(COLORS["paper"])), reverse=True)
        contrast = (pair[0] + 0.05) / (pair[1] + 0.05)
        assert contrast >= {"ink": 7, "muted": 4.5, "paper": 1, "grid": 1}.get(role, 3), (role, color, contrast)


def test_filled_is_measured_and_open_is_predicted() -> None:
    series = Series("a", (64, 128, 256), (3.0, 2.0, 1.0), measured=(True, False, False))
    root = drawn(simple(series, x_scale="log2"))
    message = f"stroke: {COLORS['s0']}"
    markers = [use.get("style").split("; ")[0] for use in root.iter(f"{SVG}use") if message in use.get("style", "")]
    assert markers.count(f"fill: {COLORS['s0']}") == 1 + 1, "one point, and the legend"
    assert markers.count(f"fill: {COLORS['paper']}") == 2
    assert {"measured (filled)", "predicted (open)"} <= set(texts(root))
    assert "predicted (open)" not in texts(drawn(simple(dataclasses.replace(series, measured=(True,) * 3))))


def test_ticks_are_plain_numbers() -> None:
    root = drawn(simple(Series("a", (128, 256, 512), (0.5754, 0.5801, 0.6123)), x_scale="log2"))
    assert {"128", "256", "512"} <= set(texts(root))
    assert {"0.58", "0.59", "0.6", "0.61"} <= set(texts(root))
    root = drawn(simple(Series("a", (0, 600_000, 1_200_000), (0, 20_000, 40_000))))
    assert {"500k", "1M", "20k", "40k"} <= set(texts(root))


@pytest.mark.parametrize(
    "series",
    [
        (),
        (Series("", (), ()),),
        (Series("one", (512,), (0.5754,)),),
        (Series("none", (1, 2), (None, None)),),
        (Series("nan", (1, 2, 3, 4), (math.nan, 2.0, None, math.inf), (None, 1.0, None, 1.0), (None, math.nan, None, 3.0)),),
        (Series("zero", (0, 1), (0.0, 0.0), style="line"), Series("below", (-1, 0), (-3.0, 1e-300))),
        (Series("huge", (1, 2), (1e300, 1.0)), Series("tiny", (1, 2), (1e-12, 2e-12))),
        (Series("bar", (1, 0), (2.0, None), style="stacked"), Series("over", (0, 1), (1.0, 3.0), style="points")),
        (Series("stack", (0, 1), (2.0, -1.0), style="stacked"), Series("more", (0, 1), (2.0, math.nan), style="stacked")),
    ],
    ids=lambda series: ", ".join(item.name for item in series) or "nothing",
)  # fmt: skip
def test_whatever_the_numbers_are_something_is_drawn(series: tuple[Series, ...]) -> None:
    marks = (
        Annotation(1, 2.0, "here", "choice"),
        Annotation(None, None, "nowhere", "limit"),
        Annotation(None, -1.0, "below", "limit"),
    )
    for x_scale, y_scale in (("linear", "linear"), ("log2", "log"), ("log", "log2"), ("category", "linear")):
        root = drawn(simple(*series, x_scale=x_scale, y_scale=y_scale, marks=marks))
        assert texts(root) and not outside(root)
        if not any(y is not None and math.isfinite(y) for item in series for y in item.y):
            assert texts(root) == ["no values to draw"]


def test_fifty_series_are_reported_apart_below_the_axes() -> None:
    names = [f"method number {place} of them all" for place in range(50)]
    root = drawn(simple(*(Series(name, (0, 1), (place, place + 1.0)) for place, name in enumerate(names))))
    assert set(names) <= set(texts(root)) and not outside(root)
    curves = {
        re.search("stroke: (#.{6})", line.get("style"))[1]
        + str(re.findall("stroke-dasharray: [^;]*", line.get("style")))
        for line in root.iter(f"{SVG}path")
        if "stroke-width: 1.6" in line.get("style", "")
    }
    assert len(curves) == len(svg.SERIES_COLORS) * len(svg.DASHES), (
        "besides, there are as many markers as make 168 looks"
    )
    bottom = max(float(text.get("y")) for text in root.iter(f"{SVG}text") if text.text == "batch")
    legend = [float(text.get("y")) for text in root.iter(f"{SVG}text") if text.text in names]
    assert min(legend) > bottom


@pytest.mark.parametrize("name", documents.HOSTILE_TEXTS)
def test_a_name_is_text_whatever_is_in_it(name: str) -> None:
    series = (Series(name, (0, 1), (1.0, 2.0)), Series("b", (0, 1), (1.0, 2.0), style="stacked"))
    categories = {"x_scale": "category", "categories": (name, "b")}
    for changes in (categories, {}):
        figure = simple(
            *series[: 2 if changes else 1], title=name, x_label=name, y_label=name, key=name, caption=name, **changes
        )
        text = svg.render_svg(dataclasses.replace(figure, marks=(Annotation(0, None, name, "event"),)))
        root = ElementTree.fromstring(text.encode())
        assert "<script" not in text
        words = "".join(texts(root)).replace("\N{WORD JOINER}", "").replace(" ", "")
        assert (
            name.encode("utf-8", "replace").decode()[:8].replace(" ", "").replace("?", "\ufffd")[:7] in words
            or "\x00" in name
        )


def test_marks_without_a_place_are_left_out_and_others_have_a_line() -> None:
    figure = simple(
        Series("a", (1, 2), (1.0, 2.0)),
        marks=(Annotation(None, 5.0, "limit of 5", "limit"), Annotation(None, None, "x", "limit")),
    )
    result = texts(drawn(figure))
    assert "limit of 5" in result and "x" not in result
    assert "5" in result, "the axis reaches the limit"


def test_events_have_the_numbers_of_their_texts() -> None:
    result = texts(drawn(documents.make_accuracy_figure()))
    assert {"1", "2", "3", "2: preempted"} <= set(result)
    same = tuple(Annotation(x, None, "saved", "event") for x in (1, 2))
    assert texts(drawn(simple(Series("a", (1, 2), (1.0, 2.0)), marks=same))).count("saved") == 1


def test_a_density_lies_at_its_edges() -> None:
    density = Density((0, 100, 200), (0.5, 1, 2, 4), ((0.5, 0.5, 0), (0, 0, 1)))
    root = drawn(simple(density=density, y_scale="log2"))
    blue = f"fill: {COLORS['s0']}"
    paths = [path for path in root.iter(f"{SVG}path") if blue in path.get("style", "") and path.get("clip-path")]
    cells = [re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d")) for path in paths]
    corners = [[(float(x), float(y)) for x, y in cell] for cell in cells]
    half, whole = corners[0], corners[1]
    remaining, middle, right = min(x for x, _ in half), max(x for x, _ in half), max(x for x, _ in whole)
    assert middle == min(x for x, _ in whole) and middle - remaining == pytest.approx(right - middle, abs=0.05)
    top, third = min(y for _, y in whole), max(y for _, y in whole)
    assert max(y for _, y in half) - min(y for _, y in half) == pytest.approx(2 * (third - top), abs=0.05)
    assert min(y for _, y in half) == pytest.approx(third, abs=0.05)
    assert {"20 to 50 %", "50 to 100 %", "0.5", "4"} <= set(texts(root))


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecError, match="matplotlib") as error:
        svg.render_svg(documents.make_time_figure())
    assert "pip install 'tula-cli[report]'" in error.value.hint and "pip install '.[report]'" in error.value.hint


def test_settings_of_the_user_for_own_drawings_change_nothing() -> None:
    import matplotlib

    before = svg.render_svg(documents.make_memory_figure())
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": False, "lines.linewidth": 9}):
        assert svg.render_svg(documents.make_memory_figure()) == before
        assert matplotlib.rcParams["font.size"] == 30
