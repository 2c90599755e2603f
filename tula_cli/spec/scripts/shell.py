"""Parsing of shell text without running it: commands, their words, and the parts that only a shell can expand."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path, PurePath

from tula_cli.errors import SpecError
from tula_cli.words import parse_number

# --- Shell text

PIPE_OPERATORS = ("|", "|&", "||")
"""Operators that join commands into a pipeline; other operators separate commands that run one after the other."""
_NESTED = r"\([^()]*\)"
for _ in range(3):
    _NESTED = rf"\((?:[^()]|{_NESTED})*\)"
_EXPANSION = rf"\${_NESTED}|`[^`]*`|\$\{{[^{{}}]*\}}|\$\w+|\$[@*#?$!-]|\$'(?:\\.|[^'\\])*'"
_PIECE = re.compile(
    r"(?P<continued>\\\r?\n)|\\(?P<escaped>.?)|\"?\$\{(?P<elements>\w+)\[[@*]\]\}\"?|'(?P<single>[^']*)'|(?P<double>\")"
    rf"|(?<==)(?P<array>{_NESTED})|(?P<expansion>{_EXPANSION}|[<>]{_NESTED})"
    r"|(?P<plain>[^ \t\r\n;|&<>()'\"\\`$]+|\r(?!\n|\Z)|\$(?![({']))",
    re.DOTALL,
)
_QUOTED_PIECE = re.compile(
    rf'(?P<continued>\\\n)|\\(?P<escaped>[$`"\\])|(?P<expansion>{_EXPANSION})|(?P<plain>[^"\\$`]+|\\|\$(?![({{]))',
    re.DOTALL,
)
_BLANK = re.compile(r"(?:[ \t]|\\\r?\n|\r(?=\n|\Z))*(?:#[^\n]*)?")
_LINE_END = re.compile(r"(?<=\\[ \t])[ \t]*\r?\n")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;|&\n]|\Z")
_REDIRECTION = re.compile(r"(?:&>>?|\d*(?:<<<|<<-?|>>|>\||>&|<&|<>|[<>]))(?!\()")
_BRACE_EXPANSION = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_EXPORT_COMMANDS = ("export", "declare", "readonly", "local", "typeset")
_BLOCK_ENDS = {
    **dict.fromkeys(("for", "while", "until", "select"), "done"),
    "if": "fi",
    "case": "esac",
    "{": "}",
    "(": ")",
}
_BLOCK_KEYWORDS = ("do", "then", "else", "elif", "!")


@dataclass(frozen=True)
class ShellWord:
    """A word of a command."""

    text: str  # without quotes, with known variables expanded
    raw: str  # source text
    unknown: str = ""  # first part that only a shell can expand: $DATA, $(date), {a,b}; empty if there is none
    filled: bool = False  # its braces are tula's placeholders, not the user's

    @property
    def name(self) -> str:
        """The last component of the word as a path: torchrun for /opt/bin/torchrun."""
        return PurePath(self.text).name or self.text


@dataclass(frozen=True)
class Command:
    """The words up to an operator; a loop, a branch or a function is one command that contains others."""

    words: tuple[ShellWord, ...]
    redirections: tuple[str, ...]
    operator: str  # operator that ends the command; empty at the end of the text
    line: int  # line of its first word, from 1
    start: int  # offsets in the text
    end: int
    inside: tuple["Command", ...] = ()  # commands of a loop, a branch or a function, including its first and last words

    @property
    def is_exported(self) -> bool:
        """Whether the variables of the command are exported to later programs."""
        return bool(self.words) and self.words[0].raw in _EXPORT_COMMANDS

    @property
    def assignments(self) -> tuple[tuple[str, ShellWord], ...]:
        """The variables set by the first words, with or without `export`."""
        pairs = []
        for word in self.words[self.is_exported :]:
            if (match := _ASSIGNMENT.fullmatch(word.text)) and re.match(r"\w+=", word.raw):
                pairs.append((match[1], replace(word, text=match[2])))
            elif not (self.is_exported and word.raw.startswith("-")):
                break
        return tuple(pairs)

    @property
    def program(self) -> tuple[ShellWord, ...]:
        """The words after the variable assignments; empty if the command only sets variables."""
        return () if self.is_exported else self.words[len(self.assignments) :]


def split_commands(text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """Return the commands of a command line or a shell script; a loop, a branch or a function is one command.

    Args:
        variables: values of variables known beforehand; those set in the text are added.

    Raises:
        ValueError: a quotation or a bracket is not closed.
        SpecError: a space follows the backslash that would continue a line.
    """
    commands, result = list(_Scanner(text, dict(variables or {})).read_commands()), []
    while commands:
        size = _count_block_size(commands)
        inside = tuple(commands[:size])
        block = replace(commands[0], operator=inside[-1].operator, end=inside[-1].end, inside=inside) if size else None
        result.append(block or commands[0])
        del commands[: size or 1]
    return result


def _count_block_size(commands: list[Command]) -> int:
    """Return the number of commands in the block that starts here; 0 if no block starts here."""
    closes: list[str] = []
    for count, command in enumerate(commands, 1):
        raw = [word.raw for word in command.words]
        while raw and raw[0] in _BLOCK_KEYWORDS:
            raw.pop(0)
        is_function = raw[1:3] == ["(", ")"] or raw[:1] == ["function"]
        if is_function:
            closes += ["}"] if "{" in raw else []
        elif raw and raw[0] in closes[-1:]:
            closes.pop()
        elif raw and raw[0] in _BLOCK_ENDS:
            closes.append(_BLOCK_ENDS[raw[0]])
        if closes[-1:] == [")"] and ")" in raw:
            closes.pop()
        if not closes:
            return count if count > 1 or is_function or raw[:1] == ["("] else 0
    return len(commands)


@dataclass
class _Scanner:
    text: str
    variables: dict[str, str]
    arrays: dict[str, list[ShellWord]] = field(default_factory=dict)
    position: int = 0
    here_documents: list[str] = field(default_factory=list)  # delimiters of the here-documents that follow this line

    def _match_pattern(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self.text, self.position):
            self.position = match.end()
        return match

    def read_commands(self) -> Iterator[Command]:
        words: list[ShellWord] = []
        redirections: list[str] = []
        start = 0
        while True:
            self._match_pattern(_BLANK)
            end = self.position
            if not (words or redirections):
                start = end
            if redirection := self._match_pattern(_REDIRECTION):
                redirections.append(self._read_redirection(redirection))
            elif operator := self._match_pattern(_OPERATOR):
                if operator[0] == "\n" and self._skip_here_documents():
                    end = self.position
                if words or redirections:
                    line = self.text.count("\n", 0, start) + 1
                    yield self._record_variables(
                        Command(tuple(words), tuple(redirections), operator[0], line, start, end)
                    )
                words, redirections = [], []
                if not operator[0]:
                    return
            else:
                words += self._read_words()

    def _record_variables(self, command: Command) -> Command:
        """Record the variables that a command sets for later commands; unknown ones in a value are kept as $NAME."""
        for name, word in command.assignments if not command.program else ():
            self.variables.pop(name, None)
            if not word.unknown or not re.search(r"\$\(|`|\$$", word.text):
                self.variables[name] = word.text
        return command

    def _read_redirection(self, operator: re.Match[str]) -> str:
        self._match_pattern(_BLANK)
        target = [] if _OPERATOR.match(self.text, self.position) else self._read_words()
        if operator[0].lstrip("0123456789") in ("<<", "<<-") and target:
            self.here_documents.append(target[0].text)
        return self.text[operator.start() : self.position]

    def _skip_here_documents(self) -> bool:
        ends, self.here_documents = self.here_documents, []
        for end in ends:
            match = re.compile(rf"^\t*{re.escape(end)}\r?$", re.MULTILINE).search(self.text, self.position)
            self.position = match.end() if match else len(self.text)
        return bool(ends)

    def _read_words(self) -> list[ShellWord]:
        """Return the word that starts here; several words if an unquoted variable or an array expands to several."""
        start, texts, bare, unknown, is_quoted = self.position, [""], "", "", False
        while piece := self._match_pattern(_PIECE):
            kind, written = piece.lastgroup, piece[0]
            bare += written if kind == "plain" else "\0"
            is_quoted |= kind in ("single", "double")
            if kind == "elements":
                if piece["elements"] in self.arrays:
                    return self.arrays[piece["elements"]]
                texts[-1], unknown = texts[-1] + written, unknown or written
            elif kind == "expansion":
                text, is_known = self._read_value(written)
                unknown = unknown or ("" if is_known else written)
                first, *others = re.split(r"[ \t\n]+", text) if is_known or written != text else [text]
                texts = [*texts[:-1], texts[-1] + first, *others]
            elif kind == "double":
                text, part = self._read_double_quoted()
                texts[-1], unknown = texts[-1] + text, unknown or part
            elif kind == "array":
                scanner = _Scanner(written[1:-1], self.variables, self.arrays)
                name = self.text[start : piece.start() - 1]
                self.arrays[name] = [word for command in scanner.read_commands() for word in command.words]
                unknown = unknown or written
            elif kind == "escaped" and self._match_pattern(_LINE_END):
                line = self.text.count("\n", 0, piece.start()) + 1
                raise SpecError(
                    f"line {line} of the command has a space after its last backslash, so a shell ends the command there",
                    "remove that space",
                )
            elif kind != "continued" and written != "\\":  # a backslash at the end of the text is ignored
                texts[-1] += piece[kind or 0]
        if self.position == start:
            if (character := self.text[start]) not in "()<>":
                raise ValueError("a quotation mark or a bracket is not closed")
            self.position += 1
            return [ShellWord(character, character)]
        if self.text[self.position : self.position + 1] in ("'", "`", "$"):
            raise ValueError("a quotation mark or a bracket is not closed")
        raw = self.text[start : self.position]
        if bare == "~" or bare.startswith("~/"):
            texts[0] = str(Path.home()) + texts[0][1:]
        if len(texts) > 1:  # the unknown part belongs to the word that contains it
            return [ShellWord(text, text, text[text.index("$") :] if "$" in text else "") for text in texts if text]
        return [ShellWord(text, raw, unknown or _find_shell_pattern(bare, text)) for text in texts if text or is_quoted]

    def _read_value(self, expansion: str) -> tuple[str, bool]:
        """Return the value of an expansion, and whether nothing in the value needs a shell."""
        name = re.fullmatch(r"\$\{(\w+)(?::?-[^}]*)?\}|\$(\w+)", expansion)
        value = self.variables.get(name[1] or name[2]) if name else None
        return (expansion, False) if value is None else (value, "$" not in value[:-1])

    def _read_double_quoted(self) -> tuple[str, str]:
        """Return the text up to the next double quote, and its first unknown part."""
        text, unknown = "", ""
        while piece := self._match_pattern(_QUOTED_PIECE):
            if piece.lastgroup == "expansion":
                value, is_known = self._read_value(piece[0])
                text, unknown = text + value, unknown or ("" if is_known else piece[0])
            elif piece.lastgroup != "continued":
                text += piece[piece.lastgroup or 0]
        if self.text[self.position : self.position + 1] != '"':
            raise ValueError("a quotation mark is not closed")
        self.position += 1
        return text, unknown


def _find_shell_pattern(bare: str, text: str) -> str:
    """Return the text if a shell would expand it to several words or to file names, else an empty text."""
    if _BRACE_EXPANSION.search(bare):
        return text
    pattern = text.replace("~", str(Path.home()), bare.startswith("~/"))
    return text if re.search(r"[*?\[]", bare) and "\0" not in text and glob(pattern) else ""  # noqa: PTH207


# --- Options of a command

_YACS_KEY = re.compile(r"[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)+|[A-Z]+_[A-Z_]+")
_PAIR_PATTERN = re.compile(r"[A-Za-z_+~][\w.+/-]*=")
_ATTACHED_NUMBER_PATTERN = re.compile(r"(-[A-Za-z])(\d+)")
MAY_BE_BATCH = re.compile(r"(?i)batch|(?:^|[-_.])(?:m?bs|bsz|bz)(?:$|[ =\d])|(?:samples|imgs|ims|images)_per_|^-b\d*$")
"""Pattern of options that may be a batch."""
_OPTION_LISTS = ("opts", "cfg_options", "options", "override", "overrides")
"""Options whose values are themselves options."""


@dataclass(frozen=True)
class Option:
    """An option and its value."""

    words: tuple[ShellWord, ...]
    flag: str  # source text up to the value, including a separator such as "="
    value: ShellWord
    index: int = 0  # of its first word
    meaning: str = ""  # name with underscores, for options of a launcher

    @property
    def path(self) -> tuple[str, ...]:
        """Parts of the option's name in lower case: ("trainer", "num_nodes") for --trainer.num-nodes."""
        return tuple(self.label.lstrip("-+~").replace("-", "_").lower().split("."))

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def label(self) -> str:
        """The option without its value: --lr for --lr=0.1."""
        return self.flag.rstrip("= ")

    @property
    def text(self) -> str:
        return " ".join(word.raw for word in self.words)

    def make_words(self, value: str) -> tuple[ShellWord, ...]:
        """Return the option's words with a text that contains placeholders as its value."""
        if self.flag.endswith(" "):
            return (self.words[0], make_placeholder_word(value))
        return (make_placeholder_word(f"{self.flag}{value}"),)


def read_options(words: Sequence[ShellWord]) -> list[Option]:
    """Return the options of a script that have values, in order."""
    options, index = [], 0
    while index < len(words):
        word, after = words[index], words[index + 1] if index + 1 < len(words) else None
        flag, separator, value = word.text.partition("=")
        option = None
        if separator and (word.text.startswith("-") or _PAIR_PATTERN.match(word.text)):
            option = Option((word,), f"{flag}=", replace(word, text=value), index)
        elif match := _ATTACHED_NUMBER_PATTERN.fullmatch(word.text):
            option = Option((word,), match[1], replace(word, text=match[2]), index)
        elif after is not None and (_YACS_KEY.fullmatch(word.text) or _takes_value(word.text, after.text)):
            option = Option((word, after), f"{word.text} ", after, index)
        if option is not None:
            options.append(option)
        index += len(option.words) if option else 1
    return options


def _takes_value(flag: str, after: str) -> bool:
    is_list = flag.lstrip("-").replace("-", "_") in _OPTION_LISTS or _YACS_KEY.fullmatch(after)
    return is_option(flag) and not is_option(after) and not is_list


def is_option(text: str) -> bool:
    return text.startswith("-") and parse_number(text) is None


def make_placeholder_word(text: str) -> ShellWord:
    """Return a word that contains placeholders of tula."""
    return ShellWord(text, text, filled=True)


def replace_option_values(words: Sequence[ShellWord], values: Sequence[tuple[Option | None, str]]) -> list[ShellWord]:
    """Return the words with new texts as values of the given options."""
    result = list(words)
    for option, text in sorted(((o, text) for o, text in values if o), key=lambda pair: -pair[0].index):
        result[option.index : option.index + len(option.words)] = option.make_words(text)
    return result
