"""Texts that fit: in lines of a width, without what no page can hold."""

import re
import unicodedata

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Return a text without what neither XML nor HTML can hold: control characters, halves of characters."""
    return _UNFIT.sub("\ufffd", text)


def width(text: str) -> float:
    """Return how wide a text is at most in a font as wide as DejaVu Sans, 1 being an ordinary letter (0.62 em)."""
    return sum(map(_width, text))


def _width(letter: str) -> float:
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 2.0
    if letter in "mwMW@%…":
        return 1.6
    return 1.0 if letter.isascii() and not letter.isupper() else 1.35


def foreign(text: str) -> bool:
    """Return whether a text has letters that the font has not which words are measured with."""
    return any(ord(letter) > 0x24FF and letter not in "…★◆−→" for letter in text)


def lines(text: str, wide: float, most: int) -> list[str]:
    """Return a text in lines of a width; what does not fit in the most of them ends in an ellipsis.

    It is broken at spaces, and within words that are longer than a line.
    """
    found = [""]
    for word in clean(text).split():
        joined = f"{found[-1]} {word}".strip()
        if width(joined) <= wide:
            found[-1] = joined
            continue
        if found[-1]:
            found.append("")
        for letter in word:
            if width(found[-1] + letter) > wide:
                found.append("")
            found[-1] += letter
    if len(found) > most:
        last = found[most - 1]
        while width(last) > wide - 1.6:
            last = last[:-1]
        found = [*found[: most - 1], f"{last.rstrip()}…"]
    return found


def fitted(text: str, wide: float, most: int = 2) -> str:
    """Return a text in at most so many lines of a width."""
    return "\n".join(lines(text, wide, most))
