"""Expand words as bash does: quotes, parameters, arithmetic, the output of commands, splitting and braces."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from megarl.migrate.shell import patterns, syntax
from megarl.migrate.shell.machine import Machine, Undecided
from megarl.migrate.shell.parameters import ParameterExpansion, parameter_values
from megarl.migrate.shell.state import ShellLimitError

_PLAIN = re.compile(r"[^\\'\"$`<>]+")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
_ESCAPED = re.compile(
    r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|c(.)|(.))", re.DOTALL
)
_MOST_BRACES = 10_000


def expand_words(machine: Machine, words: Iterable[tuple[str, int]], line: int) -> list[tuple[str, int]]:
    """Return the arguments that words become, each with its line. `words` have the number of lines before them."""
    result = []
    for written, lines in words:
        machine.line = line + lines
        for raw in braces(written):
            expansion = Expansion(machine=machine, splits=True)
            expansion.read(raw)
            for text in expansion.texts():
                machine.budget.text(len(text))
                result.append((text, machine.line))
    machine.line = line
    return result


def expand_text(machine: Machine, raw: str, *, here: bool = False, assigned: bool = False) -> str:
    """Return the text that a word becomes where it is not split. here: in a here-document. assigned: to a variable."""
    expansion = Expansion(machine=machine, splits=False, is_assigned=assigned)
    expansion.read(raw, quoted=here, here=here)
    text = " ".join(expansion.texts())
    machine.budget.text(len(text))
    return text


def expand_pattern(machine: Machine, raw: str) -> str:
    """Return the pattern that a word is, in which quoted characters are plain."""
    expansion = Expansion(machine=machine, splits=False)
    expansion.read(raw)
    return "".join(patterns.quote(text) if quoted else text for each in expansion.fields for text, quoted in each)


def unescape(text: str) -> str:
    """Return the text that `$'…'` stands for."""

    def one(match: re.Match[str]) -> str:
        code = next((int(group, 16) for group in match.groups()[:3] if group), None)
        if match[4]:
            code = int(match[4], 8) & 255
        if code is None:
            return (
                chr(ord(match[5]) & 31)
                if match[5]
                else _ESCAPES.get(match[6], match[6] if match[6] in "\\'\"?" else match[0])
            )
        return chr(code) if code < 0x100000 else match[0]

    return _ESCAPED.sub(one, text)


def braces(word: str) -> Iterator[str]:
    """Yield the words that `{a,b}` and `{1..3}` make of a word."""
    count = 0
    pending = [("", word)]
    while pending:
        done, rest = pending.pop()
        found = _first_braces(rest)
        count += 1
        if count > _MOST_BRACES:
            raise ShellLimitError(f"braces that make more than {_MOST_BRACES} words")
        if found is None:
            yield done + rest
            continue
        start, end, choices = found
        if len(choices) + len(pending) > _MOST_BRACES:
            raise ShellLimitError(f"braces that make more than {_MOST_BRACES} words")
        pending += [(done, rest[:start] + choice + rest[end:]) for choice in reversed(choices)]


def _first_braces(word: str) -> tuple[int, int, list[str]] | None:
    index = 0
    while (index < len(word)) and "{" in word[index:]:
        if word[index] != "{":
            index = syntax.end_of(word, index)
            continue
        depth, commas, end = 0, [index], index
        while end < len(word):
            depth += {"{": 1, "}": -1}.get(word[end], 0)
            if depth == 0:
                break
            if word[end] == "," and depth == 1:
                commas.append(end)
            end = syntax.end_of(word, end)
        if depth == 0 and len(commas) > 1:
            bounds = [*commas, end]
            return index, end + 1, [word[a + 1 : b] for a, b in pairwise(bounds)]
        if depth == 0 and (found := _RANGE.fullmatch(word[index + 1 : end])):
            return index, end + 1, _range(found)
        index += 1
    return None


def _range(found: re.Match[str]) -> list[str]:
    if found[4]:
        first, last = ord(found[4]), ord(found[5])
        return [chr(code) for code in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)]
    first, last, step = int(found[1][:18]), int(found[2][:18]), abs(int(found[3] or 1)) or 1
    if abs(last - first) // step > _MOST_BRACES:
        raise ShellLimitError(f"braces that make more than {_MOST_BRACES} words")
    is_padded = any(re.match(r"-?0\d", bound) for bound in (found[1], found[2]))
    width = max(len(found[1]), len(found[2])) if is_padded else 0
    return [
        f"{number:0{width}d}"
        for number in range(first, last + (1 if last >= first else -1), step if last >= first else -step)
    ]


@dataclass(slots=True, kw_only=True)
class Expansion:
    """The expansion of one word.

    splits: whether values that are not quoted become several fields. fields: the arguments that it makes so far, each
    in parts, quoted or not. is_open: the next text belongs to the last of them. is_inner: a default is being read.
    is_assigned: a tilde after a colon is a home, too.
    """

    machine: Machine
    splits: bool
    fields: list[list[tuple[str, bool]]] = field(default_factory=list)
    is_open: bool = False
    is_inner: bool = False
    is_assigned: bool = False

    def add(self, text: str, quoted: bool) -> None:
        """Add text to the last field, or to a new one if that is complete."""
        self.machine.budget.word()
        if not self.is_open:
            self.fields.append([])
            self.is_open = True
        self.fields[-1].append((text, quoted))

    def add_value(self, text: str, quoted: bool) -> None:
        """Add the value of an expansion, which is split if it is not quoted."""
        if quoted or not self.splits:
            self.add(text, quoted)
            return
        if not text:
            return
        separators = self.machine.state.get("IFS")
        known = separators if isinstance(separators, str) else " \t\n"
        if not known:
            self.add(text, False)
            return
        blank = "".join(each for each in known if each in " \t\n")
        other = re.escape("".join(each for each in known if each not in " \t\n"))
        blanks = f"[{re.escape(blank)}]" if blank else "(?!)"
        separator = f"{blanks}*[{other}]{blanks}*|{blanks}+" if other else f"{blanks}+"
        assumed = self.machine.holes.assume(text)
        is_assumed = assumed is not None and assumed != text and re.search(separator, assumed) is not None
        if is_assumed and assumed:
            why, shown, text = self.machine.holes.within(text)[0].why, self.machine.holes.show(text), assumed
        begins = re.match(f"{blanks}+", text)
        if begins:
            self.is_open = False
        parts = re.split(separator, text[begins.end() :] if begins else text)
        if is_assumed:
            parts = [part and self.machine.hole(shown, why, part) for part in parts]
        for index, part in enumerate(parts):
            if index:
                self.is_open = False
            if part or index < len(parts) - 1:
                self.add(part, False)

    def add_values(self, values: list[str], quoted: bool) -> None:
        """Add the elements of a list, each a field of its own."""
        for index, value in enumerate(values):
            if index:
                self.is_open = False
            self.add_value(value, quoted)

    def texts(self) -> list[str]:
        """Return the arguments that the word became."""
        assume = self.machine.holes.assume
        # Variables that are set nowhere are no words, unless quotes or other text are beside them.
        return [
            self._text(each)
            for each in self.fields
            if not self.splits or any(quoted or not text or assume(text) != "" for text, quoted in each)
        ]

    def _text(self, parts: list[tuple[str, bool]]) -> str:
        text = "".join(part for part, _ in parts)
        loose = "".join(part for part, quoted in parts if not quoted)
        is_pattern = self.splits and "=" not in text and "f" not in self.machine.state.options
        if is_pattern and re.search(r"[*?]|\[[^\]]+\]", loose) and "/" in text:
            return self.machine.hole(self.machine.holes.show(text), "the files that a pattern finds")
        return text

    def read(self, raw: str, *, quoted: bool = False, here: bool = False) -> None:
        """Expand the source of a word. quoted: it is within double quotes. here: those are plain characters."""
        index = 0 if quoted else self._tilde(raw)
        while index < len(raw):
            char = raw[index]
            plain = _PLAIN.match(raw, index)
            if plain:
                text = plain[0]
                if self.is_assigned and not quoted:
                    is_last = plain.end() == len(raw)
                    text = re.sub(r":~(?=[/:]|$)" if is_last else r":~(?=[/:])", lambda _: f":{self._home()}", text)
                (self.add_value if self.is_inner else self.add)(text, quoted)
                index = plain.end()
                continue
            end = index + 1 if char == '"' and here else syntax.end_of(raw, index, quoted=quoted)
            if char == "\\":
                self._backslash(raw[index:end], quoted, here)
            elif char == "'" and not quoted:
                self.add(raw[index + 1 : end - 1], True)
            elif char == '"' and not here:
                self._double(raw[index + 1 : end - 1])
            elif char == "`":
                inner = re.sub(r"\\([\\`$])", r"\1", raw[index + 1 : end - 1])
                self.add_value(self.capture(inner, raw[index:end]), quoted)
            elif char == "$" and end > index + 1:
                self._dollar(raw[index:end], quoted)
            elif char in "<>" and raw[index + 1 : index + 2] == "(":
                end = syntax.bracket_end(raw, index + 1)
                self.add(self.machine.hole(raw[index:end], "the output of a command, as a file"), True)
            else:
                self.add(char, quoted)
            index = end

    def _tilde(self, raw: str) -> int:
        found = re.match(r"([A-Za-z_]\w*\+?=)?(~(?=/|$|:))?", raw)
        assert found is not None
        self.is_assigned = self.is_assigned or found[1] is not None
        if not found[2]:
            return 0
        self.add((found[1] or "") + self._home(), True)
        return found.end()

    def _home(self) -> str:
        home = self.machine.get("HOME")
        return home if isinstance(home, str) else "~"

    def _double(self, inner: str) -> None:
        # "$@" without arguments is no word at all, while "" is an empty one.
        if not re.fullmatch(r"\$@|\$\{@\}|\$\{\w+\[@\]\}|\$\{@:[^{}]*\}|\$\{\w+\[@\]:[^{}]*\}", inner):
            self.add("", True)
        self.read(inner, quoted=True)

    def _backslash(self, text: str, quoted: bool, here: bool) -> None:
        if text == "\\\n":
            return
        if quoted and text[1:] not in ("$", "`", "\\", *(() if here else ('"',))):
            self.add(text, True)
        else:
            self.add(text[1:], True)

    def _dollar(self, text: str, quoted: bool) -> None:
        if text[1] == "'":
            self.add(unescape(text[2:-1]), True)
        elif text[1] == '"':
            self._double(text[2:-1])
        elif text.startswith("$((") and text.endswith("))"):
            self.add_value(self.arithmetic(text), quoted)
        elif text[1] == "(":
            self.add_value(self.capture(text[2:-1], text), quoted)
        else:
            self._parameter(text, quoted)

    def arithmetic(self, text: str) -> str:
        """Return the value of `$((…))`."""
        machine = self.machine
        expression = expand_text(machine, text[3:-2], here=True)
        machine.softened = expression != machine.holes.assume(expression)
        try:
            value = str(machine.calculate(expression))
        except Undecided as undecided:
            return machine.hole(text, undecided.why)
        return (
            machine.hole(text, "it reads a variable that is not set in the script", value)
            if machine.softened
            else value
        )

    def capture(self, source: str, written: str) -> str:
        """Return the output of a command, which is a hole unless only commands of the shell itself print it."""
        output = self.machine.capture(self.machine, source)
        return self.machine.hole(written, "the output of a command that is not run") if output is None else output

    def _parameter(self, text: str, quoted: bool) -> None:
        parameter = ParameterExpansion.parse(text)

        def operand(raw: str) -> str:
            return expand_text(self.machine, raw, here=False)

        chosen = parameter_values(self.machine, parameter, text, operand, lambda raw: expand_pattern(self.machine, raw))
        if isinstance(chosen, str):
            self.add_value(chosen, quoted)
        elif chosen is None:
            # A default: it is read in place, where its quotes and blanks count.
            is_inner, self.is_inner = self.is_inner, True
            self.read(parameter.operand, quoted=quoted)
            self.is_inner = is_inner
        elif parameter.is_joined and quoted:
            separators = self.machine.state.get("IFS")
            self.add((separators[:1] if isinstance(separators, str) else " ").join(chosen), True)
        elif parameter.is_joined and not self.splits:
            self.add(" ".join(chosen), quoted)
        else:
            self.add_values(chosen, quoted)
