"""Split a script into statements with tree-sitter, and a simple command into its words and redirections."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

# Statements whose text `split` reads; errors that tree-sitter sees within them are limits of its grammar.
SIMPLE = (
    "command",
    "variable_assignment",
    "variable_assignments",
    "declaration_command",
    "unset_command",
    "test_command",
)
_REDIRECTION = re.compile(r"(\d+|\{\w+\})?(&>>|&>|<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\())")
_OPERATOR = re.compile(r"\|\||\|&|&&|\||&|;|\n|\(|\)")
_ARRAY = re.compile(r"\w+(\[[^\]]*\])?\+?=")
_NAME = re.compile(r"\w+|[@*#?$!-]")
# Operators of ${…} whose operand is a text, in which single quotes are plain characters within double quotes.
_TEXT_OPERAND = re.compile(r"\$\{[#!]?\w*[@*]?(\[[^\]]*\])?:?[-+=?]")
_CLOSERS = {"{": "}", "(": ")", "[": "]"}


class ShellSyntaxError(ValueError):
    """A script is not valid; the message says what is wrong, and `line` where."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


@cache
def _parser() -> "Parser":
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def text_of(node: "Node") -> str:
    """Return the source of a node."""
    return (node.text or b"").decode()


def parse(source: str, line: int) -> "Node":
    """Return the statements of a script that starts at a line of its file; raise ShellSyntaxError if it is invalid."""
    root = _parser().parse(source.encode()).root_node
    pending = [root] if root.has_error else []
    while pending:
        node = pending.pop()
        if node.type in (*SIMPLE, "heredoc_redirect") or (
            node.type == "redirected_statement" and node.children[0].type in SIMPLE
        ):
            continue
        if node.is_error or node.is_missing:
            # The node that tree-sitter could not place comes last in an error.
            place = node.children[-1] if node.children and not node.children[-1].is_named else node
            start = text_of(place).strip().partition("\n")[0][:60]
            what = f"{node.type} is missing" if node.is_missing else f"unclosed or unexpected: {start}"
            raise ShellSyntaxError(what, line + place.start_point[0])
        pending += [child for child in reversed(node.children) if child.has_error]
    return root


def end_of(text: str, start: int, *, quoted: bool = False) -> int:
    """Return the index after the quoted text, escape or expansion that begins at `start`, or after one character."""
    try:
        return _end_of(text, start, quoted)
    except (IndexError, ValueError):
        what = text[start:].partition("\n")[0][:60]
        raise ShellSyntaxError(f"unclosed: {what}", text.count("\n", 0, start)) from None


def _end_of(text: str, start: int, quoted: bool) -> int:
    char, after = text[start], text[start + 1 : start + 2]
    if char == "\\":
        return min(start + 2, len(text))
    if char == "'" and not quoted:
        return text.index("'", start + 1) + 1
    if char == "$" and after == "'" and not quoted:
        return _scan(text, start + 2, "'", "")
    if char == '"' or (char == "$" and after == '"' and not quoted):
        return _scan(text, text.index('"', start) + 1, '"', "$`")
    if char == "`":
        return _scan(text, start + 1, "`", "")
    if char == "$" and after == "{":
        plain = quoted and _TEXT_OPERAND.match(text, start)
        return _scan(text, start + 2, "}", '$`"' if plain else "$`\"'", quoted=bool(plain))
    if char == "$" and after == "(":
        return bracket_end(text, start + 1)
    if char == "$" and (name := _NAME.match(text, start + 1)):
        return start + 2 if name[0][0].isdigit() else name.end()
    return start + 1


def _scan(text: str, index: int, closer: str, nested: str, *, quoted: bool | None = None) -> int:
    inside = closer == '"' if quoted is None else quoted
    while text[index] != closer:
        if text[index] in nested or text[index] == "\\":
            index = _end_of(text, index, inside)
        else:
            index += 1
    return index + 1


def bracket_end(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; brackets in quotes and comments are text."""
    opener, closer, depth, index = text[start], _CLOSERS[text[start]], 1, start + 1
    while depth:
        char = text[index]
        if char == "#" and text[index - 1] in " \t\n;(":
            index = text.index("\n", index)
        elif char in "\\'\"$`":
            index = _end_of(text, index, False)
        else:
            depth += (char == opener) - (char == closer)
            index += 1
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirection:
    """A redirection of the file descriptor `number`, such as `> log`; `target` is the word after it."""

    number: str
    operator: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple:
    """A simple command.

    words: each with the number of lines before it. rest: what follows it in the text, after `operator`; empty if
    nothing does. lines: the number of lines before `rest`.
    """

    words: list[tuple[str, int]]
    redirections: list[Redirection]
    operator: str
    rest: str
    lines: int


def split(text: str) -> Simple:
    """Split the text of a simple command, up to the operator or the end of line after it."""
    words: list[tuple[str, int]] = []
    redirections: list[Redirection] = []
    index = _skip_blanks(text, 0)
    while index < len(text):
        if found := _REDIRECTION.match(text, index):
            index = _skip_blanks(text, found.end())
            end = word_end(text, index)
            redirections.append(Redirection(number=found[1] or "", operator=found[2], target=text[index:end]))
        elif found := _OPERATOR.match(text, index):
            return Simple(
                words=words,
                redirections=redirections,
                operator=found[0],
                rest=text[found.end() :],
                lines=text.count("\n", 0, found.end()),
            )
        else:
            end = word_end(text, index)
            words.append((text[index:end], text.count("\n", 0, index)))
        index = _skip_blanks(text, end)
    return Simple(words=words, redirections=redirections, operator="", rest="", lines=0)


def word_end(text: str, start: int) -> int:
    """Return the index after the word that begins at `start`."""
    index = start
    while index < len(text) and text[index] not in " \t\n;|&)":
        char = text[index]
        if char == "(":
            if index == start or not (text[index - 1] in "?*+@!" or _ARRAY.fullmatch(text, start, index)):
                break
            index = _closed(text, index)
        elif char in "<>":
            if text[index + 1 : index + 2] != "(":
                break
            index = _closed(text, index + 1)
        else:
            index = end_of(text, index)
    return index


def _closed(text: str, start: int) -> int:
    try:
        return bracket_end(text, start)
    except (IndexError, ValueError):
        raise ShellSyntaxError(
            f"unclosed: {text[start:].partition(chr(10))[0][:60]}", text.count("\n", 0, start)
        ) from None


def _skip_blanks(text: str, index: int) -> int:
    while index < len(text):
        if text.startswith("\\\n", index):
            index += 2
        elif text[index] in " \t":
            index += 1
        elif text[index] == "#":
            end = text.find("\n", index)
            return len(text) if end < 0 else end
        else:
            break
    return index


def elements(text: str) -> Iterator[tuple[str, int]]:
    """Yield the words of an array between its parentheses, each with the number of lines before it."""
    index = 0
    while (index := _skip_blanks(text, index)) < len(text):
        if text[index] == "\n":
            index += 1
            continue
        end = word_end(text, _closed(text, index) if text[index] == "[" else index)
        if end == index:
            raise ShellSyntaxError(f"unexpected in an array: {text[index]}", text.count("\n", 0, index))
        yield text[index:end], text.count("\n", 0, index)
        index = end


def test_tokens(text: str) -> list[str]:
    """Return the words and operators of a `[[ … ]]`, without its brackets."""
    tokens: list[str] = []
    index = 0
    while index < len(text):
        if text[index] in " \t\n" or text.startswith("\\\n", index):
            index += 1 + (text[index] == "\\")
            continue
        if tokens and tokens[-1] == "=~":
            # A regular expression ends at a blank outside of brackets.
            end = index
            while end < len(text) and text[end] not in " \t\n":
                end = _closed(text, end) if text[end] == "(" else end_of(text, end)
        elif found := re.compile(r"&&|\|\||[()<>]").match(text, index):
            end = found.end()
        else:
            end = word_end(text, index)
        tokens.append(text[index:end])
        index = max(end, index + 1)
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The parts of `name[key]+=text`."""

    name: str
    key: str | None
    appends: bool
    text: str


def assignment(word: str) -> Assignment | None:
    """Return the parts of a word that assigns a variable, None if it does not."""
    found = re.match(r"([A-Za-z_]\w*)", word)
    if not found:
        return None
    end, key = found.end(), None
    if word[end : end + 1] == "[":
        close = _closed(word, end)
        key, end = word[end + 1 : close - 1], close
    sign = re.compile(r"\+?=").match(word, end)
    if not sign:
        return None
    return Assignment(name=found[1], key=key, appends=sign[0] == "+=", text=word[sign.end() :])


def case_patterns(item: "Node") -> tuple[list[str], list["Node"], str]:
    """Return the patterns of a branch of `case`, its statements and what ends it (`;;`, `;&`, `;;&`)."""
    close = next(index for index, child in enumerate(item.children) if child.type == ")")
    start, end = item.start_byte, item.children[close].start_byte
    text = (item.text or b"")[: end - start].decode().strip().removeprefix("(").strip()
    parts, begin, index = [], 0, 0
    while index <= len(text):
        if index == len(text) or text[index] == "|":
            parts.append(text[begin:index].strip())
            begin = index = index + 1
        else:
            index = _closed(text, index) if text[index] == "(" else end_of(text, index)
    last = item.children[-1]
    ending = last.type if last.type in (";;", ";&", ";;&") else ""
    return parts, item.children[close + 1 : len(item.children) - bool(ending)], ending


def for_words(loop: "Node") -> list[tuple[str, int]]:
    """Return the words that a `for` loop runs over, by default the arguments, each with the lines before it."""
    keyword = next((child for child in loop.children if child.type == "in"), None)
    if keyword is None:
        return [('"$@"', 0)]
    text = text_of(loop).encode()[keyword.end_byte - loop.start_byte :].decode()
    before = keyword.start_point[0] - loop.start_point[0]
    return [(word, before + lines) for word, lines in split(text).words]
