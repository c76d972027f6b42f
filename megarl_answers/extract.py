"""Extract the answer that a response states."""

import re

from megarl_answers.grammar import is_supposed
from megarl_answers.options import AnswerOptions
from megarl_answers.statement import last_number
from megarl_answers.thoughts import after_thoughts

# The answer stands at the end, so the search is limited to it, which keeps it fast for any text.
SEARCH_CHARS = 4096
_STATED = re.compile(r"he (?:final |correct )?answer is\s*:?", re.IGNORECASE)
_STATED_REF = re.compile(r"he answer is")
# A full stop ends an answer's sentence, unless it is between digits.
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")
_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# This may stand between two boxes that state one answer.
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;&~]|\\[()\[\],;: \\]|\\(?:q?quad|lor|land|vee|wedge)(?![a-zA-Z])|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])"
    r"|\\text\s*\{[\s,]*(?:and|or)?[\s,]*\}|(?<![a-zA-Z\\])[a-zA-Z]\s*=)*"
)
MAX_BOXES = MAX_STATEMENTS = 16
_NUMBER = re.compile(r"-?\d*\.?\d+")


def extract_answer(response: str, options: AnswerOptions) -> str | None:
    """Return the answer that a response states, as it is written, or None if there is none.

    This is the content of the last box, or else the text after the last "the answer is", or else what `options` allow.
    """
    if options.skip_thinking:
        response = after_thoughts(response)
    found, answer = _boxed(response, options)
    if found:
        return answer
    stated = list((_STATED_REF if options.textual else _STATED).finditer(response))[-MAX_STATEMENTS:]
    kept = [each.end() for each in stated if options.textual or not is_supposed(response[: each.start()])]
    if kept:
        text = response[kept[-1] :]
        return _first_line(text if options.textual else _SENTENCE_END.split(text.lstrip(), maxsplit=1)[0])
    if options.last_math and (formulas := _MATH.findall(response[-SEARCH_CHARS:])):
        return _first_line("".join(formulas[-1]))
    if not options.textual:
        return last_number(response[-SEARCH_CHARS:]) if options.last_number else None
    numbers = _NUMBER.findall(response.replace(",", "")) if options.last_number else []
    return numbers[-1] if numbers else None


def last_boxed(response: str, options: AnswerOptions) -> str | None:
    r"""Return the content of a response's last `\boxed{…}` or similar command, or None if that cannot be read."""
    return _boxed(response, options)[1]


def _boxed(response: str, options: AnswerOptions) -> tuple[bool, str | None]:
    r"""Return whether a response has a `\boxed` or similar command, and what its last ones say (None if unreadable).

    Neighbouring boxes make one answer, `\boxed{2}, \boxed{3}` → `2, 3`, if `options` say so.
    """
    found = _last_box(response, options)
    if found is None:
        return False, None
    start, _, answer = found
    if not options.join_boxes or answer is None:
        return True, answer
    answers = [answer]
    while len(answers) < MAX_BOXES and (before := _last_box(response[:start], options)):
        first, end, content = before
        if content is None or not _BETWEEN_BOXES.fullmatch(response[end:start]):
            break
        if content not in answers:
            answers.insert(0, content)
        start = first
    return True, ", ".join(answers)


def _last_box(response: str, options: AnswerOptions) -> tuple[int, int, str | None] | None:
    """Return where the last box starts and ends, and its content (None if unreadable); None without a box."""
    commands = [found for name in options.boxes if (found := _last_command(response, name, options)) is not None]
    if not commands:
        return None
    start, begin = max(commands)
    text = response[begin:]
    if not text.startswith("{"):
        line = re.split(r"[$\n]", text, maxsplit=1)[0]
        return start, begin + len(line), _first_line(line)
    depth = 0
    # Escaped braces, the brackets of sets, must be balanced too.
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            content = text[1 : brace.start()]
            answer = " ".join(content.split("\n")).strip() if options.join_lines else _first_line(content)
            return start, begin + brace.end(), answer
    return start, len(response), _first_line(text[1:]) if options.accept_unclosed else None


def _last_command(response: str, name: str, options: AnswerOptions) -> tuple[int, int] | None:
    """Return where the last LaTeX command `name` starts, and where it and the spaces after it end, or None."""
    if options.bare_box:
        start = response.rfind(name)
        return (start, start + len(name)) if start >= 0 else None
    start = response.rfind(f"\\{name}")
    while start >= 0:
        if match := re.compile(r"(?![a-zA-Z])\s*").match(response, start + 1 + len(name)):
            return start, match.end()
        start = response.rfind(f"\\{name}", 0, start)
    return None


def _first_line(text: str) -> str:
    """Return the first line of a text without the punctuation that surrounds an answer in a sentence."""
    line = text.strip().split("\n")[0].lstrip(":")
    return line.removesuffix(".").removesuffix("/").strip()
