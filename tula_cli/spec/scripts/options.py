"""Options of a command line in the forms that training scripts take: --lr 0.1, --lr=0.1, -b64, optim.lr=0.1, SOLVER.LR 0.1."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tula_cli.spec.scripts.placeholders import SCRIPTS
from tula_cli.spec.scripts.shell import Word

_YACS_KEY = re.compile(r"[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)+|[A-Z]+_[A-Z_]+")
_PAIR = re.compile(r"[A-Za-z_+~][\w.+/-]*=")
_ATTACHED = re.compile(r"(-[A-Za-z])(\d+)")
MAY_BE_BATCH = re.compile(r"(?i)batch|(?:^|[-_.])(?:m?bs|bsz|bz)(?:$|[ =\d])|(?:samples|imgs|ims|images)_per_|^-b\d*$")
"""Options that may be a batch."""
_LISTS = ("opts", "cfg_options", "options", "override", "overrides")
"""Options whose values are options themselves."""


@dataclass(frozen=True)
class Option:
    """An option and its value."""

    words: tuple[Word, ...]
    flag: str  # as it is written, with what stands between it and its value
    value: Word
    place: int = 0  # of its first word

    @property
    def path(self) -> tuple[str, ...]:
        """Its parts in lower case: ("trainer", "num_nodes") of --trainer.num-nodes."""
        return tuple(self.flag.rstrip("= ").lstrip("-+~").replace("-", "_").lower().split("."))

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def written(self) -> str:
        return " ".join(word.raw for word in self.words)

    def filled(self, value: str) -> tuple[Word, ...]:
        """Return its words with a text that holds placeholders as its value."""
        if self.flag.endswith(" "):
            return (self.words[0], Word(value, value, filled=True))
        return (Word(f"{self.flag}{value}", f"{self.flag}{value}", filled=True),)


def read_options(words: Sequence[Word]) -> list[Option]:
    """Return the options of a script that have values, in their order."""
    options, place = [], 0
    while place < len(words):
        word, after = words[place], words[place + 1] if place + 1 < len(words) else None
        flag, equals, value = word.text.partition("=")
        option = None
        if equals and (word.text.startswith("-") or _PAIR.match(word.text)):
            option = Option((word,), f"{flag}=", replace(word, text=value), place)
        elif match := _ATTACHED.fullmatch(word.text):
            option = Option((word,), match[1], replace(word, text=match[2]), place)
        elif after is not None and (_YACS_KEY.fullmatch(word.text) or _takes(word.text, after.text)):
            option = Option((word, after), f"{word.text} ", after, place)
        if option is not None:
            options.append(option)
        place += len(option.words) if option else 1
    return options


def _takes(flag: str, after: str) -> bool:
    is_list = flag.lstrip("-").replace("-", "_") in _LISTS or _YACS_KEY.fullmatch(after)
    return is_option(flag) and not is_option(after) and not is_list


def is_option(text: str) -> bool:
    return text.startswith("-") and number(text) is None


def number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def launcher_options(
    words: Sequence[Word], valued: str, flags: str = "", *, abbreviated: bool = False
) -> tuple[dict[str, Option], list[Word], list[Word]]:
    """Return a launcher's options that are known by their names, its other words, and the words from the script on.

    An option that is not known has a value where the word behind it is no script and one comes later.

    Args:
        words: behind the launcher.
        valued: names of options with a value, with underscores and between blanks.
        flags: names of those without.
        abbreviated: whether the start of a name that no other has will do, as with argparse.
    """
    with_value = valued.split()
    names = {*with_value, *flags.split()}
    options: dict[str, Option] = {}
    others: list[Word] = []
    place = 0
    while place < len(words) and words[place].text.startswith("-") and words[place].text != "--":
        word = words[place]
        flag, equals, value = word.text.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        longer = [each for each in names if each.startswith(name)] if abbreviated and name not in names else []
        name = longer[0] if len(longer) == 1 else name
        if name not in names and not flag.startswith("--") and flag[1:2] in with_value:  # -n4
            name, equals, value = flag[1:2], "=", word.text[2:].removeprefix("=")
        if name in names:
            size = 2 if name in with_value and not equals else 1
            given = words[place + 1] if size == 2 and place + 1 < len(words) else replace(word, text=value)
            options[name] = Option(tuple(words[place : place + size]), f"{flag}{equals or ' '}", given, place)
        else:
            size = 2 if _has_value(words[place:]) else 1
            others += words[place : place + size]
        place += size
    if place < len(words) and words[place].text == "--":
        place += 1
    return options, others, list(words[place:])


def _has_value(words: Sequence[Word]) -> bool:
    after = words[1].text if len(words) > 1 else "-"
    if "=" in words[0].text or after.startswith("-") or after.endswith(SCRIPTS):
        return False
    return any(word.text.endswith(SCRIPTS) or word.text in ("-m", "--module") for word in words[2:])
