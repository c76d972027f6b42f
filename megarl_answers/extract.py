"""Extract the answer that a response states."""

import re

from megarl_answers.grammar import is_supposed
from megarl_answers.options import AnswerOptions
from megarl_answers.statement import last_number
from megarl_answers.thoughts import after_thoughts

# The answer stands at the end, so the search is limited to it, which keeps it fast for any text.
SEARCH_CHARS = 4096
_BE = r"(?:is|are|was|equals|(?:must|should|would|will|has to|turns out to)\s+be|comes\s+(?:out\s+)?to)\b"
# "The answer is", "Answer:", "Final answer — ", or a heading; and what may stand before the word.
_STATED = re.compile(
    r"(?i)(?<![a-z])ans(?:wers?)?(?![a-z])(?:\s+(?:to|for)\b[^.:=\n]{0,60}?)?\s*"
    rf"(?:(?P<sign>{_BE}(?:\s+(?:therefore|thus|then|hence|indeed|simply|clearly))?\s*:?|[:=—–])|(?<=\n))[\s}}]*"
)
_BEFORE_STATED = re.compile(
    r"(?i)(?>(?s:.*)(?=[^\w\s#>])|)(?s:.*?)(?:(?P<line>^|\n)|[^\w\s'#>]|\b(?:the|my|our|so|thus|hence|therefore|and)\b)[\s#>]*"
    r"(?:(?:the|final|correct|right|best|only|exact|numerical|required)\s+)*\Z"
)
_STATED_REF = "he answer is"
# A full stop ends an answer's sentence, unless it is between digits or after the letter of a choice.
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])[.!](?=\s|$)|\n|$")
_RETRACTED = re.compile(r"[\s.!]*(?i:no(?=[,.!]|\s+wait)|wait|sorry|actually|correction|scratch|hmm|oops)\b")
_EMPHASIS = re.compile(r"(?<![\w)}\]])(\*{1,3}|__)(?=\S)((?:(?!\1).)+)(?<=\S)\1(?![\w(])")
_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# After a box, this makes it a factor or a base of what is stated, or a question.
_GOES_ON = re.compile(
    r"\s*(?:\\(?:cdot|times|div)(?![a-z])|[×÷]|\^(?!\s*\{?\s*\\(?:circ|prime)))\s*[\d({\\a-zA-Z]|[\s$)]*\?"
)
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
    if options.textual and _STATED_REF in response:
        return _first_line(response.rpartition(_STATED_REF)[2])
    if not options.textual and ("*" in response or "__" in response):
        response = _EMPHASIS.sub(r"\2", response)
    if not options.textual and (statement := last_statement(response, options)):
        return statement
    if options.last_math and (formulas := _MATH.findall(response[-SEARCH_CHARS:])):
        return _first_line("".join(formulas[-1]))
    if not options.textual:
        return last_number(response[-SEARCH_CHARS:]) if options.last_number else None
    numbers = _NUMBER.findall(response.replace(",", "")) if options.last_number else []
    return numbers[-1] if numbers else None


def last_statement(response: str, options: AnswerOptions) -> str | None:
    """Return what a sentence states after the last "the answer is" or the like, None if that is supposed or revoked."""
    lower = response.lower()
    begin = lower.find("ans") if len(lower) == len(response) else 0
    if begin < 0:
        return None
    for found in list(_STATED.finditer(response, begin))[: -MAX_STATEMENTS - 1 : -1]:
        head = _BEFORE_STATED.match(response, max(0, found.start() - 60), found.start())
        if not head or (not found["sign"] and head["line"] is None) or is_supposed(response[: head.end()]):
            continue
        end = _SENTENCE_END.search(response, found.end())
        if end is None or _RETRACTED.match(response, end.start()):
            return None
        # After `Answer:`, several sentences may lead to a number.
        said = options.last_number and not (found["sign"] or "").strip(":=—– ") and last_number(response[found.end() :])
        return said or _first_line(response[found.end() : end.start()])
    return None


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
    start, end, answer = found
    if options.join_boxes and _GOES_ON.match(response, end):
        return False, None
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
