"""Colours of figures and pages, light and dark, and what tells curves apart where colours do not.

The curves' colours are after Okabe and Ito (2008), darkened to a contrast of 3 and more with white, and lightened for a dark
page; each curve has a marker of its own too, and from the seventh on another dash.
"""

from typing import Any

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#57606a",
    "grid": "#e3e7ec",
    "s0": "#0072b2",
    "s1": "#c84e00",
    "s2": "#00805f",
    "s3": "#a33a7f",
    "s4": "#8a6a00",
    "s5": "#6b6f76",
}
"""By role; each colour stands for one role alone, so that a drawing's colours tell their roles."""
DARK = {
    "paper": "#14181d",
    "ink": "#e6eaef",
    "muted": "#9aa5b1",
    "grid": "#2d343c",
    "s0": "#58b4ec",
    "s1": "#ff8f4d",
    "s2": "#3fcfa0",
    "s3": "#e78cc6",
    "s4": "#dcb63f",
    "s5": "#b4bac2",
}
SERIES = tuple(role for role in LIGHT if role[0] == "s")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: the looks of 168 series differ
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


def color(index: int) -> str:
    """Return the light colour of a series by its place."""
    return LIGHT[SERIES[index % len(SERIES)]]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def dash(index: int) -> Any:
    """Return how a curve is broken, as matplotlib names it."""
    return DASHES[index // len(SERIES) % len(DASHES)]


def variables(colors: dict[str, str]) -> str:
    """Return the colours as variables of a style sheet."""
    return "".join(f"--{role}:{value};" for role, value in colors.items())


def rules() -> str:
    """Return the rules that give what is drawn in a role's colour that of the page; see plain_svg."""
    return "".join(f".fill-{role}{{fill:var(--{role})}}.stroke-{role}{{stroke:var(--{role})}}" for role in LIGHT)
