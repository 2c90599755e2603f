"""What matplotlib writes as SVG, made fit for a page.

Nothing in it touches the page around it: no rule of a style sheet, no id that another figure could have, no metadata. Colours
are attributes, which hold where the drawing stands alone, and classes, by which a page gives them its own (palette.rules).
"""

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from tula_cli.show.html.palette import LIGHT

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_HREF = f"{{{_XLINK}}}href"
_ROLES = {value: role for role, value in LIGHT.items()}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_NUMBERS = ("d", "x", "y", "width", "height", "transform", "points")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def plain(drawn: str, *, prefix: str, title: str, description: str) -> str:
    """Return a drawing for a page.

    Args:
        drawn: what matplotlib has written.
        prefix: of its ids; one that no other drawing of the page has.
        title: for those who hear the page.
        description: what is drawn, in a sentence or two, for the same.
    """
    root = ElementTree.fromstring(drawn)
    _strip(root)
    names = _names(root, prefix)
    for element in root.iter():
        _tag(element)
        _color(element)
        _rename(element, names)
        for name in _NUMBERS:
            if name in element.attrib:
                element.set(
                    name,
                    _LONG.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), element.get(name, "")),
                )
    _describe(root, prefix, title, description)
    return ElementTree.tostring(root, encoding="unicode")


def _strip(root: ElementTree.Element) -> None:
    """Take out metadata and rules, which would hold for the page too; and the empty lines between elements."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
            child.tail = None
        if parent.tag != f"{{{_SVG}}}text":
            parent.text = None
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}defs" and not len(child):
                parent.remove(child)


def _names(root: ElementTree.Element, prefix: str) -> dict[str, str]:
    """Return new ids for those that something refers to."""
    known = [element.get("id", "") for element in root.iter()]
    used = {name for element in root.iter() for name in _references(element)}
    return {name: f"{prefix}-{place}" for place, name in enumerate(name for name in known if name in used)}


def _references(element: ElementTree.Element) -> Iterator[str]:
    for name, value in element.attrib.items():
        if name == _HREF:
            yield value.removeprefix("#")
        yield from _REFERENCE.findall(value)


def _rename(element: ElementTree.Element, names: dict[str, str]) -> None:
    own = element.attrib.pop("id", "")
    if own in names:
        element.set("id", names[own])
    if (target := element.attrib.pop(_HREF, None)) is not None:
        element.set("href", f"#{names[target.removeprefix('#')]}")
    for name, value in element.attrib.items():
        element.set(name, _REFERENCE.sub(lambda found: f"url(#{names[found[1]]})", value))


def _tag(element: ElementTree.Element) -> None:
    """Leave namespaces to the root: a page knows SVG without."""
    element.tag = element.tag.removeprefix(f"{{{_SVG}}}")


def _color(element: ElementTree.Element) -> None:
    """Turn an element's style into attributes, and its colours into classes too."""
    for declaration in filter(None, map(str.strip, element.attrib.pop("style", "").split(";"))):
        name, value = (part.strip() for part in declaration.split(":", 1))
        if name in ("font", "font-size"):  # matplotlib has written either
            found = re.search(r"([\d.]+)px", value)
            assert found, declaration
            element.set("font-size", found[1])
        elif name != "font-family":  # which the root has
            element.set(name, value)
    roles = {name: _ROLES.get(element.get(name, "")) for name in ("fill", "stroke")}
    classes = [f"{name}-{role}" for name, role in roles.items() if role is not None]
    if element.tag == "text" and "fill" not in element.attrib:  # it was left black
        element.set("fill", LIGHT["ink"])
        classes.append("fill-ink")
    if classes:
        element.set("class", " ".join(classes))


def _describe(root: ElementTree.Element, prefix: str, title: str, description: str) -> None:
    kept = {"viewBox": root.get("viewBox", ""), "xmlns": _SVG, "role": "img", "class": "figure"}
    root.attrib.clear()
    root.attrib.update({**kept, "stroke-linejoin": "round", "font-family": FONT})
    root.set("aria-labelledby", f"{prefix}-title {prefix}-desc")
    for place, (name, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(name, {"id": f"{prefix}-{name}"})
        child.text = text
        root.insert(place, child)
