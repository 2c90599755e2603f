"""Options of a command line in the forms that training scripts take: --lr 0.1, --lr=0.1, -b64, optim.lr=0.1, SOLVER.LR 0.1."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tula_cli.spec.scripts.shell import Word
from tula_cli.words import parse_number

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
    meaning: str = ""  # a launcher's: its name with underscores

    @property
    def path(self) -> tuple[str, ...]:
        """Its parts in lower case: ("trainer", "num_nodes") of --trainer.num-nodes."""
        return tuple(self.label.lstrip("-+~").replace("-", "_").lower().split("."))

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def label(self) -> str:
        """The option without its value: --lr of --lr=0.1."""
        return self.flag.rstrip("= ")

    @property
    def written(self) -> str:
        return " ".join(word.raw for word in self.words)

    def filled(self, value: str) -> tuple[Word, ...]:
        """Return its words with a text that holds placeholders as its value."""
        if self.flag.endswith(" "):
            return (self.words[0], filled(value))
        return (filled(f"{self.flag}{value}"),)


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
    return text.startswith("-") and parse_number(text) is None


def filled(text: str) -> Word:
    """Return a word with placeholders of tula."""
    return Word(text, text, filled=True)


def filled_in(words: Sequence[Word], values: Sequence[tuple[Option | None, str]]) -> list[Word]:
    """Return words with texts in place of the values of options that are among them."""
    result = list(words)
    for option, text in sorted(((o, text) for o, text in values if o), key=lambda pair: -pair[0].place):
        result[option.place : option.place + len(option.words)] = option.filled(text)
    return result


_FLAGS = frozenset({
    "standalone", "no_python", "use_env", "m", "module", "module_mode", "v", "verbose", "multi_gpu", "no_local_rank",
    "exclusive", "label", "l", "unbuffered", "u", "quiet", "Q", "overlap", "exact", "pty", "overcommit", "O", "oversubscribe",
})  # fmt: skip
"""Options of launchers without a value, where the word behind them might be taken for one."""


def launcher_options(words: Sequence[Word], starts: Callable[[Word], bool]) -> tuple[list[Option], list[Word]]:
    """Return a launcher's options, in their order, and the words from the script on.

    Args:
        words: behind the launcher.
        starts: whether a word is what the launcher starts, and so no option's value.
    """
    options: list[Option] = []
    place = 0
    while place < len(words) and words[place].text.startswith("-") and words[place].text != "--":
        word, behind = words[place], words[place + 1 : place + 2]
        flag, equals, value = word.text.partition("=")
        size = 1
        if match := re.fullmatch(r"(-[A-Za-z])(\d.*)", word.text):  # -n4
            flag, equals, value = match[1], "=", match[2]
        name = flag.lstrip("-").replace("-", "_")
        if not equals and behind and name not in _FLAGS and not is_option(behind[0].text) and not starts(behind[0]):
            size, value = 2, behind[0].text
        given = behind[0] if size == 2 else replace(word, text=value)
        options.append(Option(tuple(words[place : place + size]), f"{flag}{equals or ' '}", given, place, name))
        place += size
    return options, list(words[place + (words[place : place + 1] == [Word("--", "--")]) :])
