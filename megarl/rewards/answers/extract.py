"""The answer that a response states."""

import re

from megarl.rewards.answers.options import AnswerOptions

# The answer stands at the end; a bounded search stays quick on any text.
SEARCH_CHARS = 4096
_THINK_END = "</think>"
_STATED = re.compile(r"he (?:final )?answer is\s*:?", re.IGNORECASE)
_STATED_REF = re.compile(r"he answer is")
# A full stop ends the sentence of an answer; one between digits does not.
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")
_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?\d*\.?\d+")


def extract_answer(response: str, options: AnswerOptions) -> str | None:
    """The raw answer: of the last box, else after the last "the answer is", else what `options` still allow.

    None if there is no answer; the text is not normalised.
    """
    if options.skip_thinking:
        response = response.rpartition(_THINK_END)[2]
    for find in (_boxed, _stated, _last_math, _last_number):
        found, answer = find(response, options)
        if found:
            return answer
    return None


def last_boxed(response: str, options: AnswerOptions) -> str | None:
    """The content of the last box, or None."""
    return _boxed(response, options)[1]


def _boxed(response: str, options: AnswerOptions) -> tuple[bool, str | None]:
    """Whether there is a box, and its content if that can be read."""
    ends = [end for end in (_last_command(response, name, options) for name in options.boxes) if end is not None]
    if not ends:
        return False, None
    text = response[max(ends) :]
    if not text.startswith("{"):
        return True, _first_line(re.split(r"[$\n]", text, maxsplit=1)[0])
    end = _matching_brace(text)
    if end is None:
        return True, _first_line(text[1:]) if options.accept_unclosed else None
    content = text[1:end]
    return True, " ".join(content.split("\n")).strip() if options.join_lines else _first_line(content)


def _last_command(response: str, name: str, options: AnswerOptions) -> int | None:
    """Where the last command of this name ends, spaces after it included."""
    if options.bare_box:
        start = response.rfind(name)
        return start + len(name) if start >= 0 else None
    start = response.rfind(f"\\{name}")
    while start >= 0:
        if match := re.compile(r"(?![a-zA-Z])\s*").match(response, start + 1 + len(name)):
            return match.end()
        start = response.rfind(f"\\{name}", 0, start)
    return None


def _matching_brace(text: str) -> int | None:
    """Index of the brace that closes the one at 0; escaped braces are brackets of sets, yet balanced too."""
    depth = 0
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    return None


def _stated(response: str, options: AnswerOptions) -> tuple[bool, str | None]:
    ends = [m.end() for m in (_STATED_REF if options.textual else _STATED).finditer(response)]
    if not ends:
        return False, None
    text = response[ends[-1] :]
    return True, _first_line(text if options.textual else _SENTENCE_END.split(text.lstrip(), maxsplit=1)[0])


def _last_math(response: str, options: AnswerOptions) -> tuple[bool, str | None]:
    found = _MATH.findall(response[-SEARCH_CHARS:]) if options.last_math else []
    return bool(found), _first_line("".join(found[-1])) if found else None


def _last_number(response: str, options: AnswerOptions) -> tuple[bool, str | None]:
    found = _NUMBER.findall(response.replace(",", "")) if options.last_number else []
    return bool(found), found[-1] if found else None


def _first_line(text: str) -> str:
    """Without the marks that surround an answer in a sentence."""
    line = text.strip().split("\n")[0].lstrip(":")
    return line.removesuffix(".").removesuffix("/").strip()
