"""Shell text as people type it, taken apart without running it: commands, their words, and what only a shell can replace."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

PIPES = ("|", "|&", "||")
"""Operators that join commands; the others stand between commands that run one after the other."""
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;|&\n]")
_REDIRECTION = re.compile(r"(?:&>>?|\d*(?:<<<|<<-?|>>|>\||>&|<&|<>|[<>]))(?!\()")
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_NAME = re.compile(r"\w+|[@*#?$!-]")
_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_EXPORTS = ("export", "declare", "readonly", "local", "typeset")
_CLOSES = {**dict.fromkeys(("for", "while", "until", "select"), "done"), "if": "fi", "case": "esac", "{": "}", "(": ")"}
_BETWEEN = ("do", "then", "else", "elif", "!")


@dataclass(frozen=True)
class Word:
    """A word of a command."""

    text: str  # without its quotes, with the values of variables that are known
    raw: str  # as it is written
    unknown: str = ""  # the first part of it that only a shell can replace: $DATA, $(date), {a,b}
    filled: bool = False  # with placeholders of tula, which are no braces of the user's

    @property
    def name(self) -> str:
        """Its last part as a path: torchrun of /opt/bin/torchrun."""
        return PurePath(self.text).name or self.text


@dataclass(frozen=True)
class Command:
    """The words up to an operator; a loop, a branch or a function is one command that has others inside."""

    words: tuple[Word, ...]
    redirections: tuple[str, ...]
    operator: str  # that ends it
    line: int  # of its first word, from 1
    start: int  # in the text
    end: int
    inside: tuple["Command", ...] = ()  # of a loop, a branch, a function

    @property
    def assignments(self) -> tuple[tuple[str, Word], ...]:
        """The variables that its first words set, by themselves or after `export`."""
        exported = bool(self.words) and self.words[0].raw in _EXPORTS
        pairs = []
        for word in self.words[exported:]:
            if exported and word.raw.startswith("-"):
                continue
            if not (match := _ASSIGNMENT.fullmatch(word.text)) or not re.match(r"\w+=", word.raw):
                break
            pairs.append((match[1], replace(word, text=match[2])))
        return tuple(pairs)

    @property
    def program(self) -> tuple[Word, ...]:
        """The words without the variables before them; none where it only sets variables."""
        if self.words and self.words[0].raw in _EXPORTS:
            return ()
        return self.words[len(self.assignments) :]

    @property
    def exported(self) -> bool:
        """Return whether its variables are exported to the programs after it."""
        return bool(self.words) and self.words[0].raw in _EXPORTS


def split_commands(text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """Return the commands of a shell text; a loop, a branch or a function is one.

    Args:
        text: a command line or a script.
        variables: values that are known before it; those that it sets itself join them.

    Raises:
        ValueError: a quotation or a bracket is not closed.
    """
    commands, result, position = list(_Scanner(text, dict(variables or {})).commands()), [], 0
    while position < len(commands):
        first, size = commands[position], _block_size(commands[position:])
        if size:
            inside = tuple(commands[position : position + size])
            first = replace(first, operator=inside[-1].operator, end=inside[-1].end, inside=inside)
        result.append(first)
        position += size or 1
    return result


def _block_size(commands: list[Command]) -> int:
    """Return of how many commands the block is that begins here; 0 where none does."""
    closes: list[str] = []
    for count, command in enumerate(commands, 1):
        raw = [word.raw for word in command.words]
        while raw and raw[0] in _BETWEEN:
            raw.pop(0)
        is_function = raw[1:3] == ["(", ")"] or raw[:1] == ["function"]
        if is_function:
            closes += ["}"] if "{" in raw else []
        elif raw and raw[0] in closes[-1:]:
            closes.pop()
        elif raw and raw[0] in _CLOSES:
            closes.append(_CLOSES[raw[0]])
        if closes and closes[-1] == ")" and ")" in raw:
            closes.pop()
        if not closes:
            return count if count > 1 or is_function or raw[:1] == ["("] else 0
    return len(commands)


@dataclass
class _Scanner:
    """Reads a shell text from its start to its end."""

    text: str
    variables: dict[str, str]
    position: int = 0
    here_documents: list[str] = field(default_factory=list)  # words that end those of this line
    arrays: dict[str, list[Word]] = field(default_factory=dict)

    def commands(self) -> Iterator[Command]:
        words: list[Word] = []
        redirections: list[str] = []
        start = 0
        while True:
            self._skip_blanks()
            if not (words or redirections):
                start = self.position
            operator = _OPERATOR.match(self.text, self.position)
            at_end = self.position >= len(self.text)
            if redirection := _REDIRECTION.match(self.text, self.position):
                redirections.append(self._redirection(redirection[0]))
            elif operator or at_end:
                end = self.position
                self.position = operator.end() if operator else end
                if operator and operator[0] == "\n":
                    self._skip_here_documents()
                    end = max(end, self.position) if self.position > operator.end() else end
                if words or redirections:
                    line = self.text.count("\n", 0, start) + 1
                    command = Command(
                        tuple(words), tuple(redirections), operator[0] if operator else "", line, start, end
                    )
                    self._learn(command)
                    yield command
                words, redirections = [], []
                if at_end:
                    return
            else:
                words += self._words()

    def _learn(self, command: Command) -> None:
        """Take over the variables that a command sets for those after it."""
        if command.program:
            return
        for name, word in command.assignments:
            self.variables.pop(name, None)
            if not word.unknown or not re.search(r"\$\(|`|\$$", word.text):  # a variable in it stays, as $NAME
                self.variables[name] = word.text

    def _skip_blanks(self) -> None:
        blank = re.compile(r"(?:[ \t]|\\\r?\n|\r(?=\n|$))*(?:#[^\n]*)?")
        match = blank.match(self.text, self.position)
        self.position = match.end() if match else self.position

    def _redirection(self, operator: str) -> str:
        start, self.position = self.position, self.position + len(operator)
        self._skip_blanks()
        target = self._words() if self.position < len(self.text) and self.text[self.position] not in "\n;|&" else []
        if operator.lstrip("0123456789") in ("<<", "<<-") and target:
            self.here_documents.append(target[0].text)
        return self.text[start : self.position]

    def _skip_here_documents(self) -> None:
        for end in self.here_documents:
            match = re.compile(rf"^\t*{re.escape(end)}\r?$", re.MULTILINE).search(self.text, self.position)
            self.position = match.end() if match else len(self.text)
        self.here_documents = []

    def _words(self) -> list[Word]:
        """Return the word that begins here; several where a variable without quotes holds several."""
        start, texts, bare, unknown, quoted = self.position, [""], "", "", False
        elements: list[Word] = []  # of an array that the word is
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in " \t\n;|&" or self.text[self.position : self.position + 2] == "\r\n":
                break
            if character in "()<>":
                if character == "(" and (name := re.fullmatch(r"(\w+)=", self.text[start : self.position])):
                    content = self._closed(")")
                    inner = _Scanner(content[1:-1], self.variables, arrays=self.arrays)
                    self.arrays[name[1]] = [word for command in inner.commands() for word in command.words]
                    unknown = unknown or content
                    continue
                if character in "<>" and self.text[self.position + 1 : self.position + 2] == "(":
                    self.position += 1
                    unknown = unknown or character + self._closed(")")
                    continue
                self.position += self.position == start
                break
            if character == "\\":
                escaped = re.compile(r"\\(\r?\n|.?)", re.DOTALL).match(self.text, self.position)
                assert escaped is not None
                self.position = escaped.end()
                texts[-1] += "" if escaped[1] in ("\n", "\r\n") else escaped[1] or "\\"
                bare += "\0"
            elif (array := _ARRAY.match(self.text, self.position)) and array[1] in self.arrays:
                self.position = array.end()
                elements, bare = self.arrays[array[1]], bare + "\0"
            elif character == "'":
                quoted, bare = True, bare + "\0"
                texts[-1] += self._closed("'")[1:-1]
            elif character == '"':
                quoted, bare = True, bare + "\0"
                text, of_it = self._double_quoted()
                texts[-1], unknown = texts[-1] + text, unknown or of_it
            elif character in "$`":
                raw, value = self._expansion()
                unknown = unknown or (raw if value is None or "$" in value[:-1] else "")
                parts = re.split(r"[ \t\n]+", raw if value is None else value) if value is not None else [raw]
                texts = [*texts[:-1], texts[-1] + parts[0], *parts[1:]]
                bare += "\0"
            else:
                self.position += 1
                texts[-1], bare = texts[-1] + character, bare + character
        raw = self.text[start : self.position]
        if texts == [""] and raw in ("(", ")", "<", ">"):
            return [Word(raw, raw)]
        if not unknown:
            unknown = _pattern(bare, texts[0])
        if bare == "~" or bare.startswith("~/"):
            texts[0] = str(Path.home()) + texts[0][1:]
        if elements:
            return elements
        if len(texts) > 1:  # each of them has what is not known of it
            return [Word(text, text, text[text.index("$") :] if "$" in text else "") for text in texts if text]
        return [Word(text, raw, unknown) for text in texts if text or quoted]

    def _closed(self, closing: str) -> str:
        """Return the text from here to what closes it, and go behind it."""
        start = self.position
        if closing in "'`":
            end = self.position + 1
            while end < len(self.text) and self.text[end] != closing:
                end += 2 if closing == "`" and self.text[end] == "\\" else 1
            if end >= len(self.text):
                raise ValueError("No closing quotation" if closing == "'" else "no closing `")
            self.position = end + 1
            return self.text[start : self.position]
        opening, depth = {")": "(", "}": "{"}[closing], 0
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in "'\"`" and closing == ")":
                self._double_quoted() if character == '"' else self._closed(character)
                continue
            self.position += 2 if character == "\\" else 1
            depth += (character == opening) - (character == closing)
            if depth == 0:
                return self.text[start : self.position]
        raise ValueError(f"no closing {closing}")

    def _double_quoted(self) -> tuple[str, str]:
        """Return what stands in double quotes, and the first part of it that is not known."""
        text, unknown = "", ""
        self.position += 1
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == '"':
                self.position += 1
                return text, unknown
            if character in "$`":
                raw, value = self._expansion()
                text += raw if value is None else value
                unknown = unknown or (raw if value is None or "$" in value[:-1] else "")
            elif character == "\\" and self.text[self.position + 1 : self.position + 2] in ("$", "`", '"', "\\", "\n"):
                text += self.text[self.position + 1].replace("\n", "")
                self.position += 2
            else:
                text += character
                self.position += 1
        raise ValueError("No closing quotation")

    def _expansion(self) -> tuple[str, str | None]:
        """Return what stands for another text here, and that text where it is known."""
        if self.text[self.position] == "`":
            return self._closed("`"), None
        start, after = self.position, self.text[self.position + 1 : self.position + 2]
        self.position += 1
        if after in ("(", "{"):
            raw = "$" + self._closed(")" if after == "(" else "}")
            name = re.fullmatch(r"\$\{(\w+)(?::?-[^}]*)?\}", raw)
            return raw, self.variables.get(name[1]) if name else None
        if after == "'":
            return "$" + self._closed("'"), None
        if name := _NAME.match(self.text, self.position):
            self.position = name.end()
            return self.text[start : self.position], self.variables.get(name[0])
        return "$", "$"


def _pattern(bare: str, text: str) -> str:
    """Return what a shell would make several words of, or names of files."""
    if _BRACES.search(bare):
        return text
    if not re.search(r"[*?]|\[.+\]", bare):
        return ""
    path = PurePath(text.replace("~", str(Path.home()), 1) if bare.startswith("~/") else text)
    try:
        is_file = any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except (OSError, ValueError, NotImplementedError):  # no pattern that anything could match
        return ""
    return text if is_file else ""
